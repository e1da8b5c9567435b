"""How often, and beside what, launches are timed, so that configs can be told apart on a GPU whose clock moves.

A GPU at its power limit lowers its clock while it is timed, and raises it while it waits for the next config: an H200's sinks from 1.97 to 1.6 GHz
within 0.15 s of large products, which is more than good configs differ by. So a long launch is timed in turns with the vendor's product, whose time
tells how fast the GPU is just then; and close calls are decided in turns, once the GPU is as hot as work will make it. So all candidates have one
clock, and their cycles decide: what each one's power would make of the clock, were it launched alone, `bench.power` shows.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence

from epigen.tuning.task import Outcome

LONG_US = 250.0
"""Launches from here on keep the GPU busy enough to lower its clock: between shorter ones the flushes of the L2 cache let it rest."""

_FIRST, _SAMPLES = 3, 15
_ENOUGH_US = 15_000.0  # a long kernel needs fewer samples, for its spread is less
_FAR, _HOPELESS = 1.25, 2.5  # a candidate this far behind the best is cut off after the first samples, or after one
_FEWEST, _MOST, _COMPARED_S = 7, 101, 0.3  # rounds of a comparison, and how long it goes on

HEATED_S = 0.25
"""How long the GPU is kept busy before long launches are compared."""

Run = Callable[[], object]


def heat(once: Callable[[Run], float], runs: Sequence[Run], now: Callable[[], float] = time.perf_counter) -> None:
    """Launch them in turns for HEATED_S where all are long; else once each, which tells that they are not. once: microseconds of a launch."""
    begun = now()
    while min(once(run) for run in runs) >= LONG_US and now() - begun < HEATED_S:
        pass


class Sampler:
    """Times the launches of one task."""

    def __init__(self, once: Callable[[Run], float], product: Run, now: Callable[[], float] = time.perf_counter):
        """once: microseconds of one launch. product: the vendor's product alone. now: seconds."""
        self.once, self.product, self.now = once, product, now
        self.product_us = 0.0  # before the first long launch; not a number where it cannot be timed

    def single(self, run: Run, best_us: float) -> Outcome:
        """One config. best_us: of the fastest so far, or 0; a candidate far behind it is cut off after a few samples. A long launch's time is what
        it would be while the product takes `product_us`."""
        once, enough_us, samples = self.once, _ENOUGH_US, [self.once(run)]
        if best_us and samples[0] > _HOPELESS * best_us:
            return Outcome("slower", samples[0], 0.0, 1)
        if samples[0] >= LONG_US and self._product_runs():
            once, enough_us, samples = self._beside_the_product, _ENOUGH_US / 2, []  # the product takes about as long again
        while len(samples) < _FIRST:
            samples.append(once(run))
        middle = statistics.median(samples)
        if best_us and middle > _FAR * best_us:
            return Outcome("slower", middle, max(samples) - min(samples), len(samples))
        while len(samples) < _SAMPLES and sum(samples) < enough_us:
            samples.append(once(run))
        return _outcome(samples)

    def _product_runs(self) -> bool:
        """Whether the product can be timed, which is found out once; there may be no memory for its result."""
        if not self.product_us:
            try:
                self.product()  # a first call takes longer
                self.product_us = statistics.median(self.once(self.product) for _ in range(_FIRST))
            except RuntimeError:
                self.product_us = math.nan
        return not math.isnan(self.product_us)

    def _beside_the_product(self, run: Run) -> float:
        """Microseconds that a launch would take while the product takes `product_us`."""
        return self.product_us * self.once(run) / self.once(self.product)

    def turns(self, runs: Sequence[Run], hot: bool = True) -> list[Outcome]:
        """Several, taking turns. hot: on a GPU that long ones have heated."""
        if hot:
            heat(self.once, runs, self.now)
        measures = [functools.partial(self.once, run) for run in runs]
        return [_outcome(s) for s in in_turns(measures, _MOST, _FEWEST, _COMPARED_S, self.now)]


def in_turns(
    measures: Sequence[Callable[[], float]], most: int, fewest: int = 1, seconds: float = math.inf, now: Callable[[], float] = time.perf_counter
) -> list[list[float]]:  # fmt: skip
    """What each measured, one a round, in every second round backwards: what drifts meanwhile favours nobody. most, fewest: rounds. After so many
    seconds no further one is begun, once there are the fewest."""
    samples: list[list[float]] = [[] for _ in measures]
    begun = now()
    for number in range(most):
        if number >= fewest and now() - begun >= seconds:
            break
        for i in range(len(measures))[:: -1 if number % 2 else 1]:
            samples[i].append(measures[i]())
    return samples


def _outcome(samples: Sequence[float]) -> Outcome:
    low, middle, high = statistics.quantiles(samples, n=4)
    return Outcome("ok", middle, high - low, len(samples))
