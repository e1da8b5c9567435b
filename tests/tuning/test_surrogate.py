"""The corrected model: it learns by what factor the model is wrong, where, and of which schedule, from a few measurements."""

from __future__ import annotations

import math
from random import Random

import pytest
from tuner_process import SPACE

from epigen.choose.space import parameters
from epigen.codegen.spec import KernelConfig
from epigen.tuning.surrogate import Surrogate

CONFIGS = list(SPACE.every())
TILED = [c for c in CONFIGS if c.schedule == "tiled"]
LIBRARY = [c for c in CONFIGS if c.schedule == "library"]


def search(prior: dict[KernelConfig, float], truth: dict[KernelConfig, float], trials: int) -> list[KernelConfig]:
    surrogate, measured = Surrogate(prior), dict[KernelConfig, float | None]()
    for _ in range(trials):
        config = surrogate.propose(measured)
        assert config is not None
        measured[config] = truth[config]
    return list(measured)


def test_a_right_model_is_followed() -> None:
    noisy = Random(0)
    truth = {c: noisy.uniform(50, 200) for c in CONFIGS}
    assert min(search(truth, truth, 3), key=truth.__getitem__) == min(truth, key=truth.__getitem__)


def test_a_model_that_is_wrong_about_a_dimension_is_corrected() -> None:
    """It thinks nothing of warps, and in truth each halving of them costs a fifth: of hundreds of configs the best is found in 30."""
    noisy = Random(1)
    prior = {c: 100.0 * noisy.uniform(1, 1.1) for c in TILED}
    truth = {c: us * 1.2 ** (4 - parameters(c)["tiled.num_warps"]) for c, us in prior.items()}
    best = min(truth.values())
    assert min(truth[c] for c in search(prior, truth, 30)) <= 1.06 * best


def test_a_model_that_is_wrong_about_a_schedule_is_corrected() -> None:
    """The library is three times as slow as it says: after a few, the other schedule's turn comes."""
    prior = dict.fromkeys(TILED, 100.0) | dict.fromkeys(LIBRARY, 60.0)
    truth = dict.fromkeys(TILED, 100.0) | dict.fromkeys(LIBRARY, 180.0)
    assert sum(c.schedule == "tiled" for c in search(prior, truth, 12)) >= 6


def test_failures_are_left_behind() -> None:
    """Where all of one tile fail, it goes elsewhere once it has seen that others do not; and what fails is not proposed again."""
    prior = {c: 100.0 if c["block_m"] == 64 else 120.0 for c in TILED}
    surrogate = Surrogate(prior)
    measured: dict[KernelConfig, float | None] = {c: 120.0 for c in TILED if (c["block_m"], c["block_n"], c["block_k"]) == (16, 16, 64)}
    begun = len(measured)
    for _ in range(16):
        config = surrogate.propose(measured)
        assert config is not None and config not in measured
        measured[config] = None if config["block_m"] == 64 else 120.0
    assert sum(us is not None for us in measured.values()) - begun >= 4


def test_a_batch_spreads_and_ends() -> None:
    prior = dict.fromkeys(TILED[:20], 100.0)
    surrogate, pending = Surrogate(prior), list[KernelConfig]()
    while (config := surrogate.propose({}, pending)) is not None:
        pending.append(config)
    assert sorted(map(str, pending)) == sorted(map(str, TILED[:20]))


def test_what_is_outside_the_space_is_passed_over() -> None:
    surrogate = Surrogate(dict.fromkeys(TILED[:5], 100.0))
    assert surrogate.propose({LIBRARY[0]: 1.0}, [LIBRARY[1]]) in TILED[:5]


@pytest.mark.parametrize("count", [1, 5, 400])
def test_many_measurements_are_taken_in(count: int) -> None:
    prior = dict.fromkeys(CONFIGS, 100.0)
    measured: dict[KernelConfig, float | None] = {c: 90.0 + math.sin(i) for i, c in enumerate(CONFIGS[:count])}
    found = Surrogate(prior).propose(measured)
    assert found is not None and found not in measured
