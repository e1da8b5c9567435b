"""The analytic model, corrected by what a search has measured: a Gaussian process over the logarithm of measured by estimated time.

The model knows what all problems share, the measurements know this one; near configs are wrong by about the same factor. So a few dozen
measurements say where the model is too hopeful, and where it has overlooked something. Rasmussen and Williams, "Gaussian Processes for
Machine Learning" (2006), section 2.2. Pure numpy: the whole space is small enough to look at each config.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from epigen.choose.space import parameters
from epigen.codegen.spec import KernelConfig

Floats = npt.NDArray[np.float64]

_STEPS = {"num_stages": 2.5, "group_m": 3.0}
_STEP = 1.5  # how many steps of a dimension until two configs' factors have little in common
_LOCAL = (
    0.05,
    0.1,
    0.2,
    0.4,
    0.8,
)  # standard deviation of the factor's logarithm among a schedule's configs: the likeliest of these, as the model is good or bad
_SHARED = 1.0  # of what a schedule's configs have in common: the model may be wrong about a whole schedule
_NOISE = 0.01  # of a measurement
_FAILED = math.log(4.0)  # a config that fails counts as one that takes four times its estimate
_MOST_OBSERVED = 256  # the fastest: beyond that the algebra would take longer than a measurement


class Surrogate:
    """prior: every config of the space with the model's time in microseconds."""

    def __init__(self, prior: Mapping[KernelConfig, float]):
        self.configs = list(prior)
        self.index = {c: i for i, c in enumerate(self.configs)}
        self.prior: Floats = np.log(np.array([prior[c] for c in self.configs], dtype=np.float64))
        points = [parameters(c) for c in self.configs]
        names = sorted({name for point in points for name in point} - {"schedule"})
        self.schedule = np.array([point["schedule"] for point in points], dtype=np.int64)
        self.points: Floats = np.array([[point.get(n, 0) / _STEPS.get(n.partition(".")[2], _STEP) for n in names] for point in points])

    def propose(self, measured: Mapping[KernelConfig, float | None], pending: Iterable[KernelConfig] = ()) -> KernelConfig | None:
        """The config that may well be the fastest of those not seen yet; None where all have been.

        measured: microseconds, None for a failure. pending: being measured; they are believed to come out as expected, so that the next
        proposal is another one. Configs outside the space are passed over.
        """
        known = sorted((self.index[c] for c in measured if c in self.index), key=lambda i: (measured[self.configs[i]] or math.inf, i))
        waiting = [self.index[c] for c in pending if c in self.index]
        free = np.ones(len(self.configs), dtype=bool)
        free[known + waiting] = False
        if not free.any():
            return None
        observed = known[:_MOST_OBSERVED]
        factors = [_FAILED if us is None else math.log(us) - self.prior[i] for i in observed for us in (measured[self.configs[i]],)]
        # of all schedules: the model's scale, of which what fails says nothing
        right = [f for i, f in zip(observed, factors, strict=True) if measured[self.configs[i]] is not None]
        common = float(np.median(right)) if right else 0.0
        expected, deviation = self._posterior(observed, factors, common)
        if waiting:
            expected, deviation = self._posterior(observed + waiting, [*factors, *expected[waiting]], common)
        times = self.prior + expected
        # before the first measurement there is nothing to improve on: the shortest time goes first
        gain = _improvement(min(self.prior[i] + f for i, f in zip(observed, factors, strict=True)) - times, deviation) if observed else deviation - times
        gain[~free] = -np.inf
        return self.configs[int(np.argmax(gain))]

    def _posterior(self, observed: list[int], factors: list[float], common: float) -> tuple[Floats, Floats]:
        """Mean and standard deviation of every config's factor, as logarithms. What one schedule shows says nothing of another's factors."""
        known = np.array(factors)
        expected, deviation = np.full(len(self.configs), common), np.full(len(self.configs), math.hypot(_LOCAL[0], _SHARED))
        for schedule in np.unique(self.schedule[observed]):
            members = np.flatnonzero(self.schedule == schedule)
            seen = [i for i, config in enumerate(observed) if self.schedule[config] == schedule]
            rows = np.searchsorted(members, np.array(observed)[seen])
            mean, deviation[members] = _regression(self.points[members], rows, known[seen] - common)
            expected[members] = common + mean
        return expected, deviation


def _improvement(ahead: Floats, deviation: Floats) -> Floats:
    """By how much each is expected to beat the best so far: ahead by so much in the mean, give or take a normal deviation. Jones, Schonlau
    and Welch, "Efficient Global Optimization of Expensive Black-Box Functions" (1998), section 4.1."""
    deviation = np.maximum(deviation, 1e-9)
    z = ahead / deviation
    below = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in z])
    expected: Floats = ahead * below + deviation * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return expected


def _regression(points: Floats, rows: npt.NDArray[np.int64], values: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation at all points, given the values at some rows of them."""
    squares = (points**2).sum(axis=1)
    near = np.exp(-np.maximum(squares[rows][:, None] + squares[None, :] - 2 * points[rows] @ points.T, 0.0) / 2)
    fits = []
    for local in _LOCAL:
        across = local**2 * near + _SHARED**2
        factor = np.linalg.cholesky(across[:, rows] + _NOISE**2 * np.eye(len(rows)))
        whitened = np.linalg.solve(factor, values)
        # minus twice the logarithm of how likely these values are
        fits.append((float(whitened @ whitened + 2 * np.log(np.diag(factor)).sum()), local, across, factor, whitened))
    _, local, across, factor, whitened = min(fits, key=lambda fit: fit[0])
    explained = np.linalg.solve(factor, across)
    variance = local**2 + _SHARED**2 - (explained**2).sum(axis=0)
    return explained.T @ whitened, np.sqrt(np.maximum(variance, 0.0))
