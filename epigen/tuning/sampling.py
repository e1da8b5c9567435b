"""How often, and beside what, launches are timed, so that configs can be told apart on a GPU whose clock moves.

A GPU at its power limit lowers its clock while it is timed, and raises it while it waits for the next config: an H200's sinks from 1.97 to 1.6 GHz
within 0.15 s of large products, which is more than good configs differ by. So where the vendor's product is long all configs are timed right behind it, and its time
tells how fast the GPU is just then; and close calls are decided by interleaved samples, once the GPU is as hot as work will make it, without a pause between them.
A pause as short as a flush of the L2 favours some of them: on an H100, tiles of 128x128 in ping-pong took 1304 us of 8192x14336x4096 after one, and
128x256 by cooperative warpgroups 1308; right behind other launches they took 1345 to 1680, each launch another time, and 1390 to 1450.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from epigen.tuning.task import Outcome

LONG_US = 100.0
"""Products and launches from here on, most of which move more than an L2 holds, are timed without a pause. In a model, what is chosen with one may be behind: BERT's forward
took 1.5 % longer with winners of 180 to 250 us that were (H100, 2026-11)."""

_FIRST, _SAMPLES = 3, 15
_ENOUGH_US = 15_000.0  # a long kernel needs fewer samples, for its spread is less
_FAR, _HOPELESS = 1.25, 2.5  # a candidate this far behind the best is cut off after the first samples, or after one
_FEWEST, _MOST, _COMPARED_S = 7, 101, 0.3  # rounds of a comparison, and how long it goes on

HEATED_S = 0.25
"""How long the GPU is kept busy before long launches are compared."""

Run = Callable[[], object]


class Timer(Protocol):
    """`timer.ColdTimer`, on a GPU."""

    def once(self, run: Run, /) -> float: ...
    def row(self, runs: Sequence[Run], /) -> list[float]: ...


class Sampler:
    """Times the launches of one task."""

    def __init__(self, timer: Timer, product: Run, now: Callable[[], float] = time.perf_counter):
        """product: the vendor's product alone. now: seconds."""
        self.timer, self.product, self.now = timer, product, now
        self.product_us = 0.0  # before the first config; not a number where it cannot be timed

    def single(self, run: Run, best_us: float) -> Outcome:
        """One config. best_us: of the fastest so far, or 0; a candidate far behind it is cut off after a few samples. Beside a long product the time is what
        it would be while that takes `product_us`: of all configs of a task, or those a little faster than LONG_US would be compared at another clock than those a little slower."""
        once, enough_us, samples = self.timer.once, _ENOUGH_US, [self.timer.once(run)]
        if best_us and samples[0] > _HOPELESS * best_us:
            return Outcome("slower", samples[0], 0.0, 1)
        if self._long_product():
            once, enough_us, samples = self._behind_the_product, _ENOUGH_US / 2, []  # the product takes about as long again
        while len(samples) < _FIRST:
            samples.append(once(run))
        middle = statistics.median(samples)
        if best_us and middle > _FAR * best_us:
            return Outcome("slower", middle, max(samples) - min(samples), len(samples))
        while len(samples) < _SAMPLES and sum(samples) < enough_us:
            samples.append(once(run))
        return _outcome(samples)

    def _long_product(self) -> bool:
        """Whether the product is long, which is found out once; it cannot be timed where there is no memory for its result.

        Where it is several launches, as int8's, a row lasts as long as the host takes for them, and so does what comes behind: alone, the flush before it hides that.
        """
        if not self.product_us:
            try:
                self.product()  # a first call takes longer
                self.product_us = self.timer.once(self.product)
                if self.product_us >= LONG_US:
                    self.product_us = statistics.median(self.timer.row([self.product])[0] for _ in range(2))
            except RuntimeError:
                self.product_us = math.nan
        return self.product_us >= LONG_US

    def _behind_the_product(self, run: Run) -> float:
        """Microseconds that a launch would take while the product takes `product_us`."""
        product_us, us = self.timer.row([self.product, run])
        return self.product_us * us / product_us

    def interleaved(self, runs: Sequence[Run], hot: bool = True) -> list[Outcome]:
        """Several, interleaved. hot: long ones on a GPU that they have heated."""
        if min(self.timer.once(run) for run in runs) < LONG_US:
            measures = [functools.partial(self.timer.once, run) for run in runs]
            return [_outcome(s) for s in interleave(measures, _MOST, _FEWEST, _COMPARED_S, self.now)]
        begun = self.now()
        while hot and self.now() - begun < HEATED_S:
            self.timer.row(runs)
        return [_outcome(s) for s in self._rows(runs)]

    def _rows(self, runs: Sequence[Run]) -> list[list[float]]:
        """As `interleave`, without a pause within what goes there and back."""
        samples: list[list[float]] = [[] for _ in runs]
        begun = self.now()
        while len(samples[0]) < _FEWEST or (len(samples[0]) < _MOST and self.now() - begun < _COMPARED_S):
            row = self.timer.row([*runs, *runs[::-1]])
            for one, there, back in zip(samples, row, row[::-1], strict=False):
                one += [there, back]
        return samples


def interleave(
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
