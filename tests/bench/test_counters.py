"""`bench.counters` without a GPU: ncu's table is read from an excerpt of a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from machines import ONE_H200

from bench import counters, record

STALLED = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
EXCERPT = f"""\
==PROF== Connected to process 9215 (/usr/bin/python3.12)
"ID","Kernel Name","Grid Size","gpu__time_duration.max","gpu__time_duration.sum","launch__registers_per_thread","sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","{STALLED}","smsp__issue_active.avg.per_cycle_active","smsp__issue_active.sum.per_cycle_active"
"","","","ns","ns","register/thread","%","%","inst","",""
"0","void at::vectorized_elementwise_kernel<4, at::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)","(1, 1, 1)","1,984","1,984","16","0","0","0","0.05","24.06"
"1","epigen_drelu_mm_mask","(132, 1, 1)","104,704","104,704","168","0","84.55","4.50","0.24","129.32"
"2","epigen_drelu_mm_mask_reduce(float *)","(64, 1, 1)","3,008","3,008","32","0","0","0","0.11","50"
"3","void at::vectorized_elementwise_kernel<4, at::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)","(1, 1, 1)","1,984","1,984","16","0","0","0","0.05","24.06"
"4","void at::vectorized_elementwise_kernel<4, at::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)","(1, 1, 1)","1,984","1,984","16","0","0","0","0.05","24.06"
"5","nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT","(132, 1, 1)","98,176","98,176","168","0","90.1","0.5","0.1","60"
"6","void at::vectorized_elementwise_kernel<4, at::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)","(1, 1, 1)","1,984","1,984","16","0","0","0","0.05","24.06"
"""


def test_the_kernels_after_each_mark_keep_what_is_useful() -> None:
    (ours, tanh, mm, missing), units = counters.kernels(EXCERPT)
    assert [one["kernel"] for one in ours] == ["epigen_drelu_mm_mask", "epigen_drelu_mm_mask_reduce"], "no argument types"
    assert [one["kernel"] for one in mm] == ["nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"]
    assert tanh == missing == [], "a mark alone"
    assert ours[0]["metrics"] == {
        "gpu__time_duration.sum": 104704.0,
        "launch__registers_per_thread": 168.0,
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 84.55,
        STALLED: 4.5,
        "smsp__issue_active.avg.per_cycle_active": 0.24,
    }
    assert units == {
        "gpu__time_duration.sum": "ns",
        "launch__registers_per_thread": "register/thread",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "%",
        STALLED: "inst",
    }


def script(monkeypatch: pytest.MonkeyPatch, out: Path, status: int, told: str) -> list[list[str]]:
    """Run it with a stand-in for ncu, which ends so. Returns the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, told, "")

    monkeypatch.setattr(counters.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["counters", "--commit", "abc1234", "--out", str(out)])
    counters.main(ONE_H200)
    return commands


def test_the_script_writes_what_ncu_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(counters, "CASES", (("drelu + bgrad", (8192, 8192, 512)),))
    (command,) = script(monkeypatch, tmp_path, 0, EXCERPT)
    assert command[0] == "ncu" and command[-4:] == [sys.executable, "-m", "bench.counters", "--watched"]
    assert [p.name for p in tmp_path.iterdir()] == ["counters.json"]
    found = record.read(tmp_path / "counters.json")
    assert found.environment["commit"] == "abc1234" and found.summary["units"]["gpu__time_duration.sum"] == "ns"
    assert [(row["program"], row["shape"]) for row in found.rows] == [("drelu + bgrad", [8192, 8192, 512])] * 3
    assert [row["contender"] for row in found.rows] == ["epigen", "epigen", "mm"], "and neither cuBLASLt nor epigen by tanh"
    told = capsys.readouterr().out
    assert "drelu + bgrad, 8192x8192x512: epigen 104.7 us (epigen_drelu_mm_mask) + 3.0 us (epigen_drelu_mm_mask_reduce); mm 98.2 us (nvjet_" in told


@pytest.mark.parametrize(("status", "words"), [(0, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"), (1, EXCERPT)], ids=["nothing", "a part"])
def test_what_ncu_has_not_measured_is_no_result(status: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"{status}: ==[A-Z]+=="):
        script(monkeypatch, tmp_path, status, words)
    assert not list(tmp_path.iterdir())
