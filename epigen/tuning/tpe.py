"""Optuna's TPE as a sampler on a study: what to try next, from all the trials that the study knows, whoever measured them.

A study and dimensions that are given go in, a point of the space comes out: TPE chooses the rest. Nothing is written: most proposals are
configs that the study has already, and what becomes a trial is claimed there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from epigen.choose.space import Suggest
from epigen.codegen.spec import KernelConfig


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the space, as Optuna notes it."""

    parameters: Mapping[str, int]
    distributions: Mapping[str, BaseDistribution]


class Tpe:
    def __init__(self, seed: int):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sampler = _sampler(seed)

    def reseed(self, seed: int) -> None:
        self.sampler = _sampler(seed)

    def propose(self, study: optuna.Study, given: Mapping[str, int], walk: Callable[[Suggest], KernelConfig]) -> tuple[KernelConfig, Point]:
        """The config that `walk` makes of suggestions, and its point. given: dimensions that TPE does not choose."""
        parameters: dict[str, int] = {}
        distributions: dict[str, BaseDistribution] = {}
        draft = create_trial(state=TrialState.RUNNING)

        def suggest(name: str, low: int, high: int) -> int:
            distribution = IntDistribution(low, high)
            if name in given:
                value = given[name]
            else:
                value = low if distribution.single() else self.sampler.sample_independent(study, draft, name, distribution)
            parameters[name], distributions[name] = value, distribution
            return value

        return walk(suggest), Point(parameters, distributions)


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        # to Optuna 4 the constant liar, which keeps proposals apart from trials under way, is experimental; since 5 it is the default
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # the first trials are given: TPE needs no random ones of its own. Each dimension by itself: schedules share none but their own number
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, multivariate=False, constant_liar=True)
