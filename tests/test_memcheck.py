"""`bench.memcheck` without a GPU: a stand-in for compute-sanitizer runs what it is given, and GPU tests skip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import memcheck
from epigen.runtime import device

PASSED = "....\n========= COMPUTE-SANITIZER\n4 passed, 1 skipped in 2.10s\n========= ERROR SUMMARY: 0 errors\n"
WRONG = "F.\n1 failed, 1 passed, 2 errors in 3.20s\n========= ERROR SUMMARY: 12 errors\n"
CRASHED = "....\n"


def test_every_test_has_one_worker_and_none_is_idle() -> None:
    tests = [f"tests/test_differential.py::test_gpu[{i}]" for i in range(7)]
    assert sorted([t for share in memcheck.shares(tests, 3) for t in share]) == tests and {len(s) for s in memcheck.shares(tests, 3)} == {2, 3}
    assert memcheck.shares(tests, 20) == [[t] for t in tests]


def test_names_with_spaces_and_brackets_are_taken_whole_and_the_rest_is_not_taken() -> None:
    first, second = "tests/test_differential.py::test_gpu[relu(mm + bias) 1x8x8 fp16 nt]", "tests/test_differential.py::test_gpu[dz[m,n] :: 1x8x8]"
    assert memcheck.collected(f"{first}\n{second}\n\n2/4996 tests collected (4994 deselected) in 2.77s\n") == [first, second]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([(0, PASSED), (0, PASSED)], {"tests": {"passed": 8, "skipped": 2}, "memcheck_errors": 0, "status": 0}),
        ([(0, PASSED), (9, WRONG)], {"tests": {"passed": 5, "skipped": 1, "failed": 1, "errors": 2}, "memcheck_errors": 12, "status": 9}),
        ([(-11, CRASHED), (0, PASSED)], {"tests": {"passed": 4, "skipped": 1}, "memcheck_errors": None, "status": -11}),
    ],
    ids=["passed", "wrong", "crashed"],
)  # fmt: skip
def test_workers_are_added_up(told: list[tuple[int, str]], found: dict[str, object]) -> None:
    assert memcheck.outcome(memcheck.Ran(*one) for one in told) == found


@pytest.mark.skipif(bool(device.indices()), reason="the tests would not skip")
def test_the_tests_run_under_the_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bin" / "compute-sanitizer"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\n[ "$*" != "" ] && shift 4 && "$@" && echo "========= ERROR SUMMARY: 0 errors"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=":")
    monkeypatch.setattr(memcheck, "SELECTION", "test_gpu and 17x24x16")
    monkeypatch.setattr("sys.argv", ["memcheck", "--workers", "2", "--commit", "abc1234", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        memcheck.main()
    found = json.loads((tmp_path / "memcheck.json").read_text())
    assert ended.value.code == 0 and found["workers"] == 2 and found["memcheck_errors"] == 0
    assert set(found["tests"]) == {"skipped"} and found["tests"]["skipped"] > 2
