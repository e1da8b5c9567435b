"""The search: a model's best configs and borrowed winners first, Optuna's TPE from there. The sole importer of optuna.

Strategy apart from measuring: a Runner answers with outcomes, from a GPU or from a recorded table. While one batch is measured the
next one compiles. A proposal that was seen before costs nothing. Failures are told to Optuna as failures and counted by kind.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import optuna

from epigen.codegen.spec import KernelConfig
from epigen.errors import TuneError
from epigen.tuning.runner import Runner
from epigen.tuning.space import SCHEDULE_NAMES, Space, parameters
from epigen.tuning.task import Baseline, Outcome

BATCH = 6
_CLOSE = 1.02  # configs within this of the best are timed again, taking turns
_NOISE = 1.005  # what still counts as a tie after that: the first by the model's rank wins
_FINALISTS = 5
_PATIENCE = 20  # repeated proposals in a row before the model's next best is taken


@dataclass(frozen=True, slots=True)
class Progress:
    """What a search has seen so far. trials: finished, of those wanted. baseline: None until the vendor's product was timed."""

    trials: int
    wanted: int
    best: KernelConfig | None
    best_us: float
    baseline: Baseline | None
    counts: Counter[str]
    seconds: float
    budget_s: float = math.inf

    @property
    def left_s(self) -> float | None:
        """Seconds to the search's end at its present pace, or to that of its budget; None before the first trial."""
        if not self.trials:
            return None
        pace = self.seconds / self.trials
        return max(0.0, min(self.budget_s - self.seconds, pace * (self.wanted - self.trials)))


@dataclass(frozen=True, slots=True)
class Result:
    """A search's end. outcomes: every config tried. complete: false where it was interrupted. spent: seconds by what they went into."""

    winner: KernelConfig
    outcome: Outcome
    baseline: Baseline
    outcomes: dict[KernelConfig, Outcome] = field(repr=False)
    seconds: float = 0.0
    complete: bool = True
    spent: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        return _kinds(self.outcomes)


def search(
    space: Space, runner: Runner, *,
    first: Sequence[KernelConfig] = (), ranked: Sequence[KernelConfig] = (), trials: int = 48, budget_s: float = math.inf,
    seed: int = 0, storage: str | None = None, name: str | None = None, report: Callable[[Progress], None] = lambda _: None,
) -> Result:  # fmt: skip
    """Find the fastest correct config.

    first: tried before all else, such as winners of near shapes; those that are not legal here are passed over. ranked: every legal
    config in a model's order, best first (by default in random order); half of the trials go to its head. trials: distinct configs
    measured. storage, name: an Optuna study to share with other tuners.
    Ctrl-C ends the search with what was found. Raises TuneError where no trial gave a right answer, with the commonest cause.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # the first trials are enqueued: TPE needs no random ones of its own
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="minimize", storage=storage, study_name=name, load_if_exists=True)
    if not ranked:
        ranked = list(space.every())
        random.Random(seed).shuffle(ranked)
    state = _State(space, runner, study, list(ranked), report)
    first = [c for c in first if space.legal(c)]
    for config in dict.fromkeys([*first, *_varied(ranked, max(1, trials // 2 - len(first)))]):
        study.enqueue_trial(parameters(config), skip_if_exists=True)
        state.enqueued += 1
    complete = True
    try:
        state.go(trials, budget_s)
    except KeyboardInterrupt:
        complete = False
    if state.best is None:
        raise TuneError(_why_none(state.outcomes))
    try:
        winner, outcome, baseline = state.final()
    except KeyboardInterrupt:
        winner, outcome, baseline, complete = state.best, state.outcomes[state.best], Baseline(0.0, 0.0), False
    return Result(winner, outcome, baseline, state.outcomes, time.monotonic() - state.start, complete)


def _varied(ranked: Sequence[KernelConfig], count: int) -> list[KernelConfig]:
    """The head of the ranking, with no more than two configs of one tile and schedule among them, so that a wrong model costs little."""
    taken: list[KernelConfig] = []
    tiles: Counter[tuple[object, ...]] = Counter()
    for config in ranked:
        values = dict(config.values)
        tile = (config.schedule, values.get("block_m"), values.get("block_n"), values.get("block_k"))
        if tiles[tile] < 2:
            tiles[tile] += 1
            taken.append(config)
            if len(taken) == count:
                break
    return taken


class _State:
    """A search under way."""

    def __init__(
        self,
        space: Space,
        runner: Runner,
        study: optuna.Study,
        ranked: list[KernelConfig],
        report: Callable[[Progress], None],
    ):
        self.space, self.runner, self.study = space, runner, study
        self.ranked, self.report = ranked, report
        self.rank = {c: i for i, c in enumerate(ranked)}
        self.outcomes: dict[KernelConfig, Outcome] = {}
        self.best: KernelConfig | None = None
        counts = Counter(SCHEDULE_NAMES.index(c.schedule) for c in ranked)
        self.weights = {s: math.log2(1 + n) for s, n in sorted(counts.items())}
        self.proposed: Counter[int] = Counter()
        self.enqueued = 0
        self.start = time.monotonic()

    @property
    def best_us(self) -> float:
        return self.outcomes[self.best].median_us if self.best else 0.0

    def go(self, trials: int, budget_s: float) -> None:
        current = self.propose(min(BATCH, trials))
        self.runner.prepare([c for _, c in current])
        while current:
            left = trials - len(self.outcomes) - len(current)
            upcoming = self.propose(min(BATCH, left), frozenset(c for _, c in current))
            self.runner.prepare([c for _, c in upcoming])
            for trial, config in current:
                self.settle(trial, config, self.runner.measure(config, self.best_us))
                self.report(Progress(len(self.outcomes), trials, self.best, self.best_us, None, _kinds(self.outcomes), time.monotonic() - self.start, budget_s))
                if time.monotonic() - self.start > budget_s:
                    return
            current = upcoming

    def propose(self, count: int, pending: frozenset[KernelConfig] = frozenset()) -> list[tuple[optuna.Trial, KernelConfig]]:
        """New configs, each once: what was enqueued, then TPE's, then the model's next best where TPE only repeats itself."""
        fresh: list[tuple[optuna.Trial, KernelConfig]] = []
        taken = set(pending)
        repeats = 0
        while len(fresh) < count:
            if repeats >= _PATIENCE:
                following = next((c for c in self.ranked if c not in self.outcomes and c not in taken), None)
                if following is None or repeats > 10 * _PATIENCE:
                    return fresh
                self.study.enqueue_trial(parameters(following))
            elif self.enqueued <= 0:
                near = self.neighbour(taken) if sum(self.proposed.values()) % 2 else None
                self.study.enqueue_trial(parameters(near) if near else {"schedule": self.turn()})
                if near:
                    self.proposed[SCHEDULE_NAMES.index(near.schedule)] += 1
            self.enqueued -= 1
            trial = self.study.ask()
            config = self.runner.available(self.space.point(trial.suggest_int))
            if config in self.outcomes or config in taken:
                # told as a failure, which TPE passes over: a repeat told as a result would draw it there ever more
                repeats += 1
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            repeats = 0
            taken.add(config)
            fresh.append((trial, config))
        return fresh

    def neighbour(self, taken: set[KernelConfig]) -> KernelConfig | None:
        """An untried config one step from one of the best few, the model's favourite among them: every other proposal. In so few trials
        TPE alone hardly leaves its prior."""
        best = sorted((o.median_us, str(c), c) for c, o in self.outcomes.items() if o.kind == "ok")[:_FINALISTS]
        for _, _, config in best:
            near = [c for c in self.space.around(config) if c not in self.outcomes and c not in taken]
            if near:
                return min(near, key=lambda c: (self.rank.get(c, len(self.rank)), str(c)))
        return None

    def turn(self) -> int:
        """The schedule of TPE's next proposal, in proportion to the logarithm of how many configs each has. Left to itself, TPE would
        stay with a schedule of a few configs that are all nearly the best so far."""
        schedule = min(self.weights, key=lambda s: (self.proposed[s] + 1) / self.weights[s])
        self.proposed[schedule] += 1
        return schedule

    def settle(self, trial: optuna.Trial, config: KernelConfig, outcome: Outcome) -> None:
        self.outcomes[config] = outcome
        self.tell(trial, outcome)
        if outcome.kind == "ok" and (self.best is None or outcome.median_us < self.best_us):
            self.best = config

    def tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """To Optuna a time is its logarithm, so that ten per cent count alike everywhere."""
        if outcome.kind in ("ok", "slower"):
            self.study.tell(trial, math.log(outcome.median_us))
        else:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def final(self) -> tuple[KernelConfig, Outcome, Baseline]:
        """The winner among the close ones: timed again in turns, and of those that tie the first by rank, so that two runs agree."""
        assert self.best is not None
        right = sorted((o.median_us, self.rank.get(c, len(self.rank)), str(c), c) for c, o in self.outcomes.items() if o.kind == "ok")
        close = [c for us, _, _, c in right if us <= _CLOSE * self.best_us][:_FINALISTS]
        compared = self.runner.compare(close)
        least = min(o.median_us for o in compared.outcomes)
        tied = [(c, o) for c, o in zip(close, compared.outcomes, strict=True) if o.median_us <= _NOISE * least]
        winner, outcome = min(tied, key=lambda pair: (self.rank.get(pair[0], len(self.rank)), str(pair[0])))
        return winner, outcome, compared.baseline


def _kinds(outcomes: dict[KernelConfig, Outcome]) -> Counter[str]:
    """How many trials ended how."""
    return Counter(o.kind for o in outcomes.values())


def _why_none(outcomes: dict[KernelConfig, Outcome]) -> str:
    if not outcomes:
        return "the search ended before its first trial"
    kind, count = _kinds(outcomes).most_common(1)[0]
    detail = next(o.detail for o in outcomes.values() if o.kind == kind)
    return f"none of {len(outcomes)} configs gave a right answer in time; {count} ended as {kind.replace('_', ' ')}: {detail}"
