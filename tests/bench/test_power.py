"""`bench.power` without a GPU: made-up times, contenders on CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timed_gpu
from golden import Golden
from machines import ONE_H200

from bench import cases, clock, headline, peers, power, readme, record, tables
from bench.timing import back_to_back
from epigen.codegen import schedules

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_loop_tells_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1900, None, 1500, 1400])

    def looped(run: Callable[[], float], seconds: float, look: Callable[[], object]) -> float:
        for _ in range(4):
            look()
        return run() * seconds

    monkeypatch.setattr(power, "back_to_back", looped)
    monkeypatch.setattr(clock, "sm_mhz", lambda: next(clocks, None))
    assert power.loop(lambda: 900.0, 0.5) == (450.0, 1500)
    assert power.loop(lambda: 900.0, 0.5) == (450.0, None), "nobody tells it"


def test_the_clock_has_settled_before_anything_counts_and_the_last_is_the_first_of_a_second_round() -> None:
    loops: list[tuple[Any, float]] = []

    def loop(run: Callable[[], object], for_s: float) -> tuple[float, float]:
        loops.append((run(), for_s))
        return 100.0 * len(loops), 1500.0 + len(loops)

    def turns(contenders: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        return {name: {"median_us": 50.0, "spread_us": 1.0, "samples": 5} for name in contenders}

    found = power.both({"one": lambda: 1, "other": lambda: 2}, turns, loop)
    assert loops == [(which, seconds) for which in (1, 2, 2, 1) for seconds in (power.SETTLED_S, power.MEASURED_S)]
    assert found["one"] == {"median_us": 50.0, "spread_us": 1.0, "samples": 5, "alone_us": 500.0, "alone_mhz": 1505.0}
    assert found["other"]["alone_us"] == 500.0, "what has grown all the while"


@pytest.mark.parametrize("case", power.CASES, ids=str)
def test_contenders_are_made_and_checked(case: cases.Case) -> None:
    small = replace(case, shape=(48, 40, 64))
    asked: list[set[str]] = []

    def how(contenders: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        asked.append(set(contenders))
        return {}

    row = headline.measured(small, "cpu", {cases.COLD: how}, power.MAKERS)
    assert asked == [{peers.OURS, peers.MM, *power.WAYS}] and set(row["missing"]) == {peers.CUBLASLT} and "failed" not in row


def test_the_ways_are_configs() -> None:
    for config in power.WAYS.values():
        values = dict(config)
        schedules.config(values.pop("schedule"), **values)


def test_the_script_writes_and_the_readme_shows_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    times = {
        peers.MM: (100.0, 120.0, 1500), peers.CUBLASLT: (110.0, 125.0, 1490), peers.OURS: (98.0, 124.0, 1400), power.PINGPONG: (98.0, 124.0, 1400)
    }  # fmt: skip

    def measured(case: cases.Case, **_: Any) -> dict[str, Any]:
        found = {name: {"median_us": turns, "alone_us": us, "alone_mhz": mhz} for name, (turns, us, mhz) in times.items()}
        return {"program": case.program, "shape": list(case.shape), "timing": found}

    monkeypatch.setattr(power, "CASES", power.CASES[:1])
    monkeypatch.setattr(headline, "measured", measured)
    monkeypatch.setattr("sys.argv", ["power", "--commit", "abc1234", "--out", str(tmp_path)])
    power.main(ONE_H200)
    told = capsys.readouterr().out
    golden(told)
    found = record.read(tmp_path / "power.json")
    assert found.environment["commit"] == "abc1234"
    record.write("power", replace(found, environment={**found.environment, "gpu": "H200", "triton": "3.6.0", "driver": "580"}), tmp_path)
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    shown = readme.power_limited()
    assert shown.splitlines()[-3] == "| 8192x8192x4096, relu + bias | 100, 120 (1500) | 0.91, 0.96 (1490) | 1.02, 0.97 (1400) | 1.02, 0.97 (1400) | |"


def test_a_case_that_failed_says_so() -> None:
    row = headline._blank(power.CASES[0]) | {"failed": "RuntimeError: out of memory"}
    assert power.line(row).endswith("FAILED RuntimeError: out of memory")


# -- the loop


def test_a_loop_keeps_the_gpu_busy() -> None:
    gpu, ahead, looks = timed_gpu.Gpu(host_us=10, kernel_us=900), list[float](), list[float]()

    def run() -> None:
        gpu.run()
        ahead.append(gpu.free - gpu.now)

    us = back_to_back(run, 0.5, lambda: looks.append(gpu.now), lambda: gpu.now / 1e6, gpu.event)
    assert us == pytest.approx(900, rel=0.001) and 0.5e6 <= gpu.now <= 0.52e6
    assert min(ahead[12:]) > 900, "it is never waited for with nothing left to do"
    assert len(looks) == (len(ahead) - 1) // 11 - 1 and all(a < b for a, b in itertools.pairwise(looks)), "one that tells how long they are; 11 a batch"
    assert back_to_back(run, 0.0, now=lambda: gpu.now / 1e6, event=gpu.event) == pytest.approx(900, rel=0.01), "a batch at least"


@pytest.mark.parametrize("kernel_us", [250.0, 900.0, 27_000.0])
def test_a_loop_ends_soon_after_its_time(kernel_us: float) -> None:
    gpu = timed_gpu.Gpu(host_us=10, kernel_us=kernel_us)
    assert back_to_back(gpu.run, 0.1, now=lambda: gpu.now / 1e6, event=gpu.event) == pytest.approx(kernel_us, rel=0.01)
    assert 0.1e6 <= gpu.now <= 0.13e6 + 2 * kernel_us
