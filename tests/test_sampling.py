"""How launches are sampled, on a GPU that is made up: its clock sinks while it works and rises while it rests."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import timed_gpu

from epigen.tuning.sampling import ALONE_S, LONG_US, SETTLED_S, Run, Sampler, in_turns
from epigen.tuning.task import Outcome
from epigen.tuning.timer import back_to_back

COOL, HOT = 1.0, 0.8  # clocks
HEATING_US, FLUSH_US = 100_000.0, 130.0


class Gpu:
    """now_us: of its clock on the wall. heat: 0 to 1."""

    def __init__(self) -> None:
        self.now_us = self.heat = 0.0
        self.launched: list[object] = []

    def work(self, microseconds: float) -> None:
        self.now_us += microseconds
        self.heat = min(1.0, self.heat + microseconds / HEATING_US)

    def rest(self, microseconds: float) -> None:
        self.now_us += microseconds
        self.heat = max(0.0, self.heat - microseconds / HEATING_US)

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

    def sampler(self, product: Run) -> Sampler:
        return Sampler(self.once, product, self.loop, lambda: self.now_us / 1e6)

    def loop(self, run: Run, seconds: float) -> float:
        begun, count = self.now_us, 0
        while self.now_us - begun < seconds * 1e6:
            run()
            count += 1
        return (self.now_us - begun) / count


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


def test_short_launches_are_timed_alone() -> None:
    gpu = Gpu()
    product = gpu.kernel(LONG_US)
    found = gpu.sampler(product).single(gpu.kernel(0.5 * LONG_US), 0.0)
    assert found.samples == 15 and product not in gpu.launched


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
    first, second = gpu.sampler(runs[0]).turns(runs)
    assert first.median_us == pytest.approx(1.25 * microseconds, rel=0.01) and second.median_us == pytest.approx(1.22 * microseconds, rel=0.01)
    assert first.samples == second.samples >= 7


def test_short_launches_leave_the_gpu_cool() -> None:
    gpu = Gpu()
    runs = [gpu.kernel(10.0), gpu.kernel(1000.0)]
    assert [o.samples for o in gpu.sampler(runs[0]).turns(runs)] == [101, 101] and len(gpu.launched) == 2 * 102, "one round tells that one is short"


def test_what_is_only_told_of_a_search_under_way_heats_nothing() -> None:
    gpu = Gpu()
    runs = [gpu.kernel(30_000.0), gpu.kernel(31_000.0)]
    gpu.sampler(runs[0]).turns(runs, hot=False)
    assert len(gpu.launched) == 2 * 7


def test_what_runs_alone_is_timed_once_its_clock_has_settled() -> None:
    gpu = Gpu()
    gpu.rest(1e6)
    runs = [gpu.kernel(1000.0, 1250.0), gpu.kernel(1030.0, 1220.0)]
    among = [Outcome("ok", 1240.0), Outcome("ok", 1230.0)]
    sampler = gpu.sampler(runs[0])
    assert sampler.alone(runs, among, "ab") == pytest.approx((1250.0, 1220.0), rel=0.001)
    assert gpu.now_us - 1e6 == pytest.approx(4e6 * (SETTLED_S + ALONE_S), rel=0.01)
    gpu.launched.clear()
    assert sampler.alone(runs, [Outcome("ok", 0.9 * LONG_US), among[1]], "ab") == (), "a short one among them"
    assert sampler.alone(runs, among, "aa") == () == sampler.alone([], [], ""), "nothing to tell apart"
    assert not gpu.launched


def test_of_each_kind_the_fastest_runs_alone_and_speaks_for_the_others() -> None:
    gpu = Gpu()
    gpu.work(1e6)
    runs = [gpu.kernel(us, us) for us in (1100.0, 1000.0, 990.0, 1200.0)]
    among = [Outcome("ok", us) for us in (1050.0, 1000.0, 1010.0, 1020.0)]
    assert gpu.sampler(runs[0]).alone(runs, among, "abab") == pytest.approx((1050 * 990 / 1010, 1000.0, 990.0, 1020.0), rel=0.001)
    assert set(gpu.launched) == {runs[1], runs[2]}


def test_what_grows_warmer_meanwhile_favours_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """For seconds: of three alike the third loop takes 3 % longer than the first."""
    monkeypatch.setitem(globals(), "HEATING_US", 5e6)
    gpu = Gpu()
    runs = [gpu.kernel(1000.0) for _ in range(3)]
    first, second, third = gpu.sampler(runs[0]).alone(runs, [Outcome("ok", 1000.0)] * 3, "abc")
    assert second == pytest.approx(first, rel=0.002) and third == pytest.approx(first, rel=0.002)
    gpu.heat = 0.0
    once = [gpu.loop(run, 2 * (SETTLED_S + ALONE_S)) for run in runs]
    assert once[2] > 1.03 * once[0], "each by itself"


@pytest.mark.parametrize(("seconds", "rounds"), [(math.inf, 9), (100.0, 9), (12.0, 4), (11.0, 4), (0.0, 3)])
def test_turns_go_there_and_back_until_the_time_is_up_but_not_before_the_fewest(seconds: float, rounds: int) -> None:
    """Each round takes 3 s."""
    told: list[str] = []

    def measure(name: str) -> float:
        told.append(name)
        return float(len(told))

    found = in_turns([functools.partial(measure, name) for name in "abc"], 9, 3, seconds, lambda: float(len(told)))
    assert "".join(told) == ("abccba" * 5)[: 3 * rounds] and found[0][:3] == [1.0, 6.0, 7.0] and [len(one) for one in found] == [rounds] * 3


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
