"""`bench.memcheck` without a GPU: a stand-in for compute-sanitizer runs what it is given, and GPU tests skip."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import memcheck
from epigen.runtime.device import THIS_MACHINE


@pytest.mark.skipif(bool(THIS_MACHINE.indices()), reason="the tests would not skip")
@pytest.mark.parametrize(("errors", "status"), [(0, 0), (12, 9)])
def test_the_tests_run_under_the_sanitizer(errors: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bin" / "compute-sanitizer"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\nshift 4 && "$@" && echo "========= ERROR SUMMARY: {errors} errors"\nexit {status}\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=":")
    monkeypatch.setattr(memcheck, "SELECTION", "test_gpu and 17x24x16")
    monkeypatch.setattr("sys.argv", ["memcheck", "--commit", "abc1234", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        memcheck.main()
    found = memcheck.record.read(tmp_path / "memcheck.json")
    assert ended.value.code == found.summary["status"] == status and found.summary["memcheck_errors"] == errors
    assert [row["outcome"] for row in found.rows] == ["skipped"] and found.rows[0]["count"] > 2
