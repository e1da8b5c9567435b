"""One problem's trials, shared by all who tune it: who measures which config, and what came of it.

A config goes in as a claim, and its outcome as that trial's end; out comes what is known by now, whoever measured it and whenever.
Invariant: of several claims of one config the lowest trial number holds, so no two living tuners measure the same. A trial is written
with its claim in one step, so that no reader sees one without the other.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Self

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.db import fields
from epigen.db.records import OUTCOMES
from epigen.errors import ConfigError, TuneError
from epigen.tuning.interrupt import unbroken
from epigen.tuning.storage import Storage
from epigen.tuning.task import Outcome
from epigen.tuning.tpe import Point

BEAT_S = 3.0
DEAD_S = 20.0
"""A tuner whose beat has not changed for this long is dead, and what it had under way is given up. Seen by the reader's own clock."""

_CLAIM, _OUTCOME, _NOTE = "claim", "outcome", "note"  # a trial's attributes
_ENDED = RuntimeError  # what Optuna raises where a trial has ended: from version to version this one or a kind of it
_GONE = -1  # the last beat of a tuner that ended by itself
_JOIN_S = 5.0
_LONGEST_DETAIL = 300


@dataclass(frozen=True, slots=True)
class Claim:
    """A trial under way. number: its place in the study. tuner: who measures it."""

    number: int
    config: KernelConfig
    tuner: str


class _Kept(optuna.Study):
    """Optuna's study for a sampler, which asks it for all trials once a dimension: it answers from memory. seen: what it answers."""

    seen: Sequence[FrozenTrial] = ()

    def fetch(self) -> list[FrozenTrial]:
        """All trials as the storage has them now, by number. A database tells of those alone that may have changed."""
        return super()._get_trials(deepcopy=False)

    def _get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False) -> list[FrozenTrial]:  # noqa: ARG002  # Optuna's
        return [t for t in self.seen if states is None or t.state in states]


class Study:
    """A tuner's view of a study. outcomes: of every finished trial. under_way: the claims that hold, the tuner's own included.
    study: what a sampler goes by, the trials that were timed and those under way, whoever measures them."""

    def __init__(
        self, storage: Storage, name: str | None, beat_s: float = BEAT_S, dead_s: float = DEAD_S, accept: Callable[[KernelConfig], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        """name: None for one of its own. accept: which configs can be trials of it; what a damaged storage says of others is passed over.
        clock: seconds, by which others' beats are judged. Raises TuneError where the storage fails."""
        self.storage = storage
        self.tuner = uuid.uuid4().hex[:12]
        self.outcomes: dict[KernelConfig, Outcome] = {}
        self.under_way: dict[KernelConfig, Claim] = {}
        self._timed: list[FrozenTrial] = []
        self._closed: set[int] = set()  # numbers of trials that will not change any more
        self._beats: dict[str, tuple[object, float]] = {}  # each other tuner's last beat, and when it was first seen
        self._beats_read = -math.inf
        self._beat_s, self._dead_s, self._accept, self._clock = beat_s, dead_s, accept, clock
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._go_on_beating, name="study beat", daemon=True)
        with storage.in_words():
            self.backend = storage.backend(name or "")
            made = optuna.create_study(storage=self.backend, study_name=name, direction="minimize", load_if_exists=True)
            self.study = _Kept(made.study_name, self.backend)
            self.id = self.backend.get_study_id_from_name(made.study_name)
            if storage.lasting:
                self._beat(0)
                self._beating.start()
            self.refresh()

    # -- what is known

    def known(self, config: KernelConfig) -> bool:
        return config in self.outcomes or config in self.under_way

    def others(self) -> set[int]:
        """Numbers of the trials that other tuners have under way."""
        return {c.number for c in self.under_way.values() if c.tuner != self.tuner}

    def tuners(self) -> int:
        """How many are known to have trials under way, this one included."""
        return len({self.tuner, *(c.tuner for c in self.under_way.values())})

    def refresh(self) -> None:
        """Read what others did meanwhile, and give up what the dead among them had under way."""
        with self.storage.in_words(), unbroken():
            self._take_in(self.study.fetch())
            dead = self._dead({c.tuner for c in self.under_way.values()} - {self.tuner})
            for claim in [c for c in self.under_way.values() if c.tuner in dead]:
                self._give_up(claim.number, "abandoned")
                del self.under_way[claim.config]

    def _take_in(self, trials: Iterable[FrozenTrial]) -> None:
        """Update the view to these trials, which come by number; those that changed for the last time before are passed over."""
        under_way: dict[KernelConfig, tuple[Claim, FrozenTrial]] = {}
        for trial in trials:
            if trial.number in self._closed:
                continue
            if trial.state.is_finished():
                self._closed.add(trial.number)
            tuner_and_config, outcome = _claimed(trial), _outcome(trial)
            if tuner_and_config is None or not self._accept(tuner_and_config[1]):
                continue
            tuner, config = tuner_and_config
            if outcome is not None:  # also where a kill came before the trial was told as finished
                self.outcomes.setdefault(config, outcome)
                if trial.state == TrialState.COMPLETE and _sound(trial):
                    self._timed.append(trial)
            elif not trial.state.is_finished():
                under_way.setdefault(config, (Claim(trial.number, config, tuner), trial))
        held = {config: claimed for config, claimed in under_way.items() if config not in self.outcomes}
        self.under_way = {config: claim for config, (claim, _) in held.items()}
        self.study.seen = [*self._timed, *(trial for _, trial in held.values() if _sound(trial))]

    # -- taking part

    def claim(self, config: KernelConfig, point: Point, most: int) -> Claim | Literal["repeat", "full"]:
        """Take a config to measure. "repeat": another tuner has it. "full": with those of other tuners, `most` configs are tried or
        under way."""
        draft = create_trial(
            state=TrialState.RUNNING,
            params=dict(point.parameters),
            distributions=dict(point.distributions),
            user_attrs={_CLAIM: {"tuner": self.tuner, "schedule": config.schedule, **dict(config.values)}},
        )
        with self.storage.in_words(), unbroken():
            trial_id = self.backend.create_new_trial(self.id, draft)
            claim = Claim(self.backend.get_trial_number_from_id(trial_id), config, self.tuner)
            trials = self.study.fetch()
            self._take_in(t for t in trials if t.number < claim.number)
            if self.known(config):
                self._give_up(claim.number, "repeat")
                return "repeat"
            if len(self.outcomes) + len(self.under_way) >= most:
                self._give_up(claim.number, "full")
                return "full"
            self.under_way[config] = claim
            self.study.seen = [*self.study.seen, *(t for t in trials if t.number == claim.number)]
            return claim

    def record(self, claim: Claim, outcome: Outcome) -> None:
        """The end of a trial. Where others gave it up meanwhile, its outcome counts for this tuner alone."""
        with self.storage.in_words(), unbroken():
            self.outcomes[claim.config] = outcome
            self.under_way.pop(claim.config, None)
            with contextlib.suppress(_ENDED):
                trial_id = self._trial_id(claim.number)
                self.backend.set_trial_user_attr(trial_id, _OUTCOME, asdict(outcome) | {"detail": outcome.detail[:_LONGEST_DETAIL]})
                time_us = outcome.median_us if outcome.kind in ("ok", "slower") else 0.0
                if time_us > 0:
                    self.backend.set_trial_state_values(trial_id, TrialState.COMPLETE, [math.log(time_us)])
                else:
                    self.backend.set_trial_state_values(trial_id, TrialState.FAIL)

    def release(self) -> None:
        """Let go of what this tuner claimed and has not measured, so that others may."""
        with self.storage.in_words(), unbroken():
            for trial in self.study.fetch():
                tuner_and_config = _claimed(trial)
                if tuner_and_config is not None and tuner_and_config[0] == self.tuner and not trial.state.is_finished():
                    self._give_up(trial.number, "released")
            self.under_way = {config: claim for config, claim in self.under_way.items() if claim.tuner != self.tuner}

    def close(self) -> None:
        """Leave the study. What fails of the storage here costs others a short wait and nothing else."""
        self._over.set()
        if self._beating.is_alive():
            self._beating.join(_JOIN_S)
        with contextlib.suppress(TuneError):
            self.release()
            if self.storage.lasting:
                with self.storage.in_words():
                    self._beat(_GONE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_up(self, number: int, note: str) -> None:
        with contextlib.suppress(_ENDED):  # it ended after all, or another gave it up
            trial_id = self._trial_id(number)
            self.backend.set_trial_user_attr(trial_id, _NOTE, note)
            self.backend.set_trial_state_values(trial_id, TrialState.FAIL)

    def _trial_id(self, number: int) -> int:
        return self.backend.get_trial_id_from_study_id_trial_number(self.id, number)

    # -- who is alive

    def _beat(self, beat: int) -> None:
        self.backend.set_study_user_attr(self.id, f"tuner {self.tuner}", beat)

    def _go_on_beating(self) -> None:
        beat = 0
        while not self._over.wait(self._beat_s):
            beat += 1
            with contextlib.suppress(TuneError), self.storage.in_words():  # the tuner itself meets the failure, and tells of it
                self._beat(beat)

    def _dead(self, tuners: set[str]) -> set[str]:
        """Those of other tuners that ended, or whose beat stopped. One in memory is a thread of this process, and ends by itself."""
        if not tuners or not self.storage.lasting:
            return set()
        now = self._clock()
        if now - self._beats_read > self._beat_s / 2:
            self._beats_read = now
            beats = self.study.user_attrs
            for tuner in tuners:
                beat = beats.get(f"tuner {tuner}")
                if tuner not in self._beats or self._beats[tuner][0] != beat:
                    self._beats[tuner] = beat, now
        return {t for t in tuners & self._beats.keys() if self._beats[t][0] == _GONE or now - self._beats[t][1] > self._dead_s}


def _claimed(trial: FrozenTrial) -> tuple[str, KernelConfig] | None:
    """The tuner and the config of a trial; None where it is no trial of epigen's."""
    stored = trial.user_attrs.get(_CLAIM)
    if not isinstance(stored, dict):
        return None
    values = dict(stored)
    tuner = str(values.pop("tuner", ""))
    try:
        return tuner, schedules.from_mapping(values)
    except ConfigError:
        return None


def _sound(trial: FrozenTrial) -> bool:
    """Whether a sampler can take it in: of a damaged trial the parameters may be no whole numbers within bounds, or the time no number."""
    whole = all(isinstance(d, IntDistribution) and d.low <= trial.params.get(name, math.nan) <= d.high for name, d in trial.distributions.items())
    times = trial.values or ()
    return whole and len(times) == (1 if trial.state == TrialState.COMPLETE else 0) and all(map(math.isfinite, times))


_US = fields.number(0, 1e9, digits=6)
_FIELDS = {
    "kind": fields.one_of(OUTCOMES), "median_us": _US, "spread_us": _US, "samples": fields.whole(0, 10**6), "detail": fields.text("text", lambda _: True),
}  # fmt: skip


def _outcome(trial: FrozenTrial) -> Outcome | None:
    """What came of a trial; None where it is no outcome of epigen's."""
    stored = trial.user_attrs.get(_OUTCOME)
    try:
        outcome = Outcome(**fields.held(stored, _FIELDS)) if isinstance(stored, dict) else None
    except fields.Wrong:
        return None
    return None if outcome is None or (outcome.kind == "ok" and outcome.median_us == 0) else outcome
