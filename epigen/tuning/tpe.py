"""Optuna's TPE: what to try next, from all that is known of a study. A model in memory of one tuner, whatever the study is kept in.

Configs that were tried and their times go in, points of the space come out. A point may be led: given dimensions are taken as they
are, and TPE chooses the rest.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState, create_trial

from epigen.choose.space import Suggest
from epigen.codegen.spec import KernelConfig
from epigen.tuning.task import Outcome


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the space, as Optuna notes it."""

    parameters: Mapping[str, int]
    distributions: Mapping[str, BaseDistribution]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A config that TPE proposed. It counts as under way until it is told or dropped."""

    config: KernelConfig
    point: Point
    trial: optuna.Trial


class Tpe:
    def __init__(self, seed: int):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(sampler=_sampler(seed))

    def reseed(self, seed: int) -> None:
        self.study.sampler = _sampler(seed)

    def propose(self, led: Mapping[str, int], walk: Callable[[Suggest], KernelConfig]) -> Proposal:
        """A point that `walk` makes of suggestions. led: dimensions that are given."""
        self.study.enqueue_trial(dict(led))
        trial = self.study.ask()
        config = walk(trial.suggest_int)
        return Proposal(config, Point(trial.params, trial.distributions), trial)

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        time = _log_us(outcome)
        if time is None:
            self.drop(proposal)
        else:
            self.study.tell(proposal.trial, time)

    def drop(self, proposal: Proposal) -> None:
        """Told as a failure, which TPE passes over: a repeat told as a result would draw it there ever more."""
        self.study.tell(proposal.trial, state=TrialState.FAIL)

    def learn(self, point: Point, outcome: Outcome) -> None:
        """Take in what another tuner found. A point that was damaged on its way teaches nothing."""
        time = _log_us(outcome)
        if time is None:
            return
        with contextlib.suppress(ValueError):
            self.study.add_trial(create_trial(value=time, params=dict(point.parameters), distributions=dict(point.distributions)))


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        # to Optuna 4 the constant liar, which keeps the proposals of a batch apart, is experimental; since 5 it is the default
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # the first trials are led: TPE needs no random ones of its own
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, constant_liar=True)


def _log_us(outcome: Outcome) -> float | None:
    """To Optuna a time is its logarithm, so that ten per cent count alike everywhere; None for a failure."""
    return math.log(outcome.median_us) if outcome.kind in ("ok", "slower") and outcome.median_us > 0 else None
