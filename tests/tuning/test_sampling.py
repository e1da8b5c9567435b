"""How launches are sampled, on a GPU that is made up: its clock sinks while it works and rises while it rests."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest

from epigen.tuning.sampling import LONG_US, Run, Sampler, interleave

COOL, HOT = 1.0, 0.8  # clocks
HEATING_US, FLUSH_US = 100_000.0, 130.0


class Gpu:
    """now_us: of its clock on the wall. heat: 0 to 1. rested_us: when it last had a pause."""

    def __init__(self) -> None:
        self.now_us = self.heat = self.rested_us = 0.0
        self.launched: list[object] = []

    def work(self, microseconds: float) -> None:
        self.now_us += microseconds
        self.heat = min(1.0, self.heat + microseconds / HEATING_US)

    def rest(self, microseconds: float) -> None:
        self.now_us += microseconds
        self.heat = max(0.0, self.heat - microseconds / HEATING_US)
        self.rested_us = self.now_us

    def kernel(self, cool_us: float, hot_us: float | None = None) -> Run:
        """It takes cool_us on a cool GPU, and hot_us, or what the clock makes of cool_us, on a hot one."""
        hot_us = cool_us * COOL / HOT if hot_us is None else hot_us

        def run() -> float:
            took = cool_us + self.heat * (hot_us - cool_us)
            self.launched.append(run)
            self.work(took)
            return took

        return run

    def once(self, run: Run) -> float:
        self.rest(FLUSH_US)
        took = run()
        assert isinstance(took, float)
        return took

    def row(self, runs: Sequence[Run]) -> list[float]:
        self.once(runs[0])
        return [float(run()) for run in runs]  # type: ignore[arg-type]

    def sampler(self, product: Run) -> Sampler:
        return Sampler(self, product, lambda: self.now_us / 1e6)


def test_the_clock_decides_nothing_between_long_launches() -> None:
    """4 % apart, the slower one on a cool GPU and the faster one on a hot one: alone they take 1040 and more than 1200 us."""
    gpu = Gpu()
    sampler = gpu.sampler(gpu.kernel(1100.0))
    gpu.rest(1e6)
    slower = sampler.single(gpu.kernel(1040.0), 0.0)
    gpu.work(1e6)
    faster = sampler.single(gpu.kernel(1000.0), slower.median_us)
    assert faster.kind == slower.kind == "ok" and slower.median_us / faster.median_us == pytest.approx(1.04, rel=0.005)
    gpu.rest(1e6)
    assert sampler.single(gpu.kernel(1000.0), slower.median_us).median_us == pytest.approx(faster.median_us, rel=0.005)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_configs_of_a_short_product_are_timed_alone(share: float) -> None:
    gpu = Gpu()
    product = gpu.kernel(0.7 * LONG_US)
    sampler = gpu.sampler(product)
    sampler.single(gpu.kernel(share * LONG_US), 0.0)
    known = gpu.launched.count(product)
    assert sampler.single(gpu.kernel(share * LONG_US), 0.0).samples == 15 and gpu.launched.count(product) == known, "how long it is was found out before"


def test_all_configs_of_a_task_are_compared_at_one_clock() -> None:
    """The first of them comes while the GPU is hot. Those 3 % apart once it is cool lie on both sides of what is long."""
    gpu = Gpu()
    sampler = gpu.sampler(gpu.kernel(0.98 * LONG_US))
    gpu.work(1e6)
    first = sampler.single(gpu.kernel(1.3 * LONG_US), 0.0)
    gpu.rest(1e6)
    faster = sampler.single(gpu.kernel(0.985 * LONG_US), first.median_us)
    gpu.rest(1e6)
    slower = sampler.single(gpu.kernel(1.015 * LONG_US), faster.median_us)
    assert faster.kind == slower.kind == "ok" and slower.median_us / faster.median_us == pytest.approx(1.03, rel=0.005)
    assert first.median_us / faster.median_us == pytest.approx(1.3 / 0.985, rel=0.01)


def test_a_product_that_waits_for_the_host_is_not_long() -> None:
    """Of int8, in several launches: 576x776x1008 took 8 us on an H100, and 47 to 60 behind a product of 61 for which a busy host took longer."""

    class Busy(Gpu):
        def row(self, runs: Sequence[Run]) -> list[float]:
            return [max(3.0 * LONG_US, us) for us in super().row(runs)]

    gpu = Busy()
    sampler = gpu.sampler(gpu.kernel(0.6 * LONG_US))
    assert sampler.single(gpu.kernel(8.0, 8.0), 0.0).median_us == pytest.approx(8.0) and sampler.product_us < LONG_US


def test_the_vendors_first_call_is_none_of_its_samples() -> None:
    """It may take a hundred times as long as the others, which would be the scale of all that follows."""
    gpu = Gpu()
    calls = 0

    def product() -> float:
        nonlocal calls
        calls += 1
        return 100_000.0 if calls == 1 else 1000.0

    sampler = gpu.sampler(product)
    assert sampler.single(gpu.kernel(900.0, 900.0), 0.0).median_us == pytest.approx(900.0) and sampler.product_us == 1000.0


@pytest.mark.parametrize(("behind", "samples"), [(2.6, 1), (1.3, 3), (1.2, 15)])
@pytest.mark.parametrize("best_us", [0.5 * LONG_US, LONG_US])
def test_what_is_far_behind_is_cut_off(behind: float, samples: int, best_us: float) -> None:
    gpu = Gpu()
    found = gpu.sampler(gpu.kernel(LONG_US, LONG_US)).single(gpu.kernel(behind * best_us, behind * best_us), best_us)
    assert (found.kind, found.samples) == ("ok" if samples == 15 else "slower", samples) and found.median_us == pytest.approx(behind * best_us)


def test_a_long_kernel_needs_fewer_samples() -> None:
    gpu = Gpu()
    assert [gpu.sampler(gpu.kernel(us)).single(gpu.kernel(us), 0.0).samples for us in (200.0, 300.0, 1000.0, 50_000.0)] == [15, 15, 8, 3]


@pytest.mark.parametrize("microseconds", [1000.0, 30_000.0])
def test_close_calls_are_decided_on_a_hot_gpu(microseconds: float) -> None:
    """The first is 3 % ahead on a cool GPU, and behind on a hot one, as a kernel that waits for memory is against one that does not."""
    gpu = Gpu()
    gpu.rest(1e6)
    runs = [gpu.kernel(microseconds, 1.25 * microseconds), gpu.kernel(1.03 * microseconds, 1.22 * microseconds)]
    first, second = gpu.sampler(runs[0]).interleaved(runs)
    assert first.median_us == pytest.approx(1.25 * microseconds, rel=0.01) and second.median_us == pytest.approx(1.22 * microseconds, rel=0.01)
    assert first.samples == second.samples >= 7


def test_short_launches_leave_the_gpu_cool() -> None:
    gpu = Gpu()
    runs = [gpu.kernel(10.0), gpu.kernel(1000.0)]
    assert [o.samples for o in gpu.sampler(runs[0]).interleaved(runs)] == [101, 101] and len(gpu.launched) == 2 * 102, "one round tells that one is short"


def test_what_is_only_told_of_a_search_under_way_heats_nothing() -> None:
    gpu = Gpu()
    runs = [gpu.kernel(30_000.0), gpu.kernel(31_000.0)]
    gpu.sampler(runs[0]).interleaved(runs, hot=False)
    assert len(gpu.launched) == 2 + 4 * (1 + 2 * 2)


def test_a_config_that_is_fast_only_after_a_pause_does_not_win() -> None:
    """As one that draws much power: 4 % ahead where the GPU has had a pause, 12 % behind where it has not."""
    gpu = Gpu()

    def powerful() -> float:
        took = 960.0 if gpu.rested_us == gpu.now_us else 1120.0
        gpu.work(took)
        return took

    steady, product = gpu.kernel(1000.0, 1000.0), gpu.kernel(1000.0, 1000.0)
    sampler = gpu.sampler(product)
    found, other = sampler.interleaved([powerful, steady])
    assert found.median_us == pytest.approx(1120.0) and other.median_us == pytest.approx(1000.0)
    assert sampler.single(powerful, 0.0).median_us == pytest.approx(1120.0) and sampler.single(steady, 0.0).median_us == pytest.approx(1000.0)


@pytest.mark.parametrize(("seconds", "rounds"), [(math.inf, 9), (100.0, 9), (12.0, 4), (11.0, 4), (0.0, 3)])
def test_turns_go_there_and_back_until_the_time_is_up_but_not_before_the_fewest(seconds: float, rounds: int) -> None:
    """Each round takes 3 s."""
    told: list[str] = []

    def measure(name: str) -> float:
        told.append(name)
        return float(len(told))

    found = interleave([functools.partial(measure, name) for name in "abc"], 9, 3, seconds, lambda: float(len(told)))
    assert "".join(told) == ("abccba" * 5)[: 3 * rounds] and found[0][:3] == [1.0, 6.0, 7.0] and [len(one) for one in found] == [rounds] * 3
