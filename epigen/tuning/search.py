"""The search: a model's best configs and borrowed winners first, then the corrected model's and Optuna's TPE's proposals alternately.

Strategy apart from measuring and from remembering: a Runner answers with outcomes, from a GPU or from a recorded table, and a Study
holds what is known, whoever found it. While one batch is measured the next one compiles; the first holds all that nothing measured could
change. Failures are counted by kind.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epigen.choose.space import Space
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig
from epigen.errors import EpigenError, TuneError
from epigen.tuning.interrupt import noticed, unbroken
from epigen.tuning.runner import RECORDED, Runner
from epigen.tuning.sampling import LONG_US
from epigen.tuning.storage import Storage, open_storage
from epigen.tuning.study import Claim, Study
from epigen.tuning.surrogate import Surrogate
from epigen.tuning.task import Baseline, Outcome
from epigen.tuning.tpe import Tpe

BATCH = 6
_AHEAD = 9  # claimed and not measured when the next batch is taken: enough that a dozen compilers have work
_CLOSE = 1.02  # configs within this of the best are timed again, interleaved, and those whose difference may be chance
_CLOSE_LONG = 1.06  # of long launches: so much the clock, which is lower then, moves ways to share the work against each other
_NOISE = 1.005  # what still counts as a tie after that: the first by the model's rank wins
_FINALISTS = 8
_POLISH = 3  # so many of the last trials are one step away from the best
_COARSE = {"block_m", "block_n", "block_k", "num_warps", "num_stages"}
_HEAD = 12  # of the model's best to begin with
_TPE_TURN = 3  # after those, one proposal in so many is TPE's
_PATIENCE = 20  # repeated proposals in a row before the model's next best is taken
_POLL_S = 0.1  # between two looks at what other tuners have under way
_OTHERS_S = 30.0  # what others have under way when the budget is spent is waited for this long
_UNKNOWN = Baseline(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a search has seen so far.

    trials: finished ones, those of other tuners and of earlier runs too; of the `wanted`, `before` were there at the start.
    best_us: 0 before the first right answer. baseline: the vendor's product, None until it is timed.
    """

    trials: int
    wanted: int
    best: KernelConfig | None
    best_us: float
    baseline: Baseline | None
    counts: Counter[str]
    seconds: float
    budget_s: float = math.inf
    before: int = 0

    @property
    def left_s(self) -> float | None:
        """Seconds until the end, by the pace so far, and no more than the budget leaves; None before the first trial."""
        if self.trials <= self.before:
            return None
        pace = self.seconds / (self.trials - self.before)
        return max(0.0, min(pace * (self.wanted - self.trials), self.budget_s - self.seconds))


@dataclass(frozen=True, slots=True)
class Result:
    """A search's end. outcomes: every config tried, by whomever. complete: false where it was interrupted, without a run-off then.
    measured: trials of this search itself; 0 where earlier runs or other tuners had done them all. spent: seconds waited, by what for.
    untimed: what of the baseline could not be timed, and why."""

    winner: KernelConfig
    outcome: Outcome
    baseline: Baseline
    outcomes: dict[KernelConfig, Outcome] = field(repr=False)
    seconds: float = 0.0
    complete: bool = True
    measured: int = 0
    spent: Mapping[str, float] = field(default_factory=dict)
    untimed: str = ""

    @property
    def counts(self) -> Counter[str]:
        return _kinds(self.outcomes)


def search(
    space: Space, runner: Runner, *,
    first: Sequence[KernelConfig] = (), prior: Mapping[KernelConfig, float] | None = None, trials: int = 48, budget_s: float = math.inf,
    seed: int = 0, storage: str | Storage | None = None, name: str | None = None, report: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Result:  # fmt: skip
    """Find the fastest correct config.

    first: tried before all else, such as winners of near shapes; those that are not legal here are passed over. prior: every config to
    choose from, with the microseconds that a model expects (by default all legal ones, alike). trials: distinct configs measured, other
    tuners' of the same study and earlier runs' included: none is measured again. storage, name: the study, by a URL for `open_storage` or
    in a storage that is open.
    Ctrl-C, or `stop` when it is set, ends the search with what was found. Raises TuneError where no trial gave a right answer, with the
    commonest cause, and where the storage fails.
    """
    with _joined(storage, name, space, runner, prior, trials, budget_s, seed, stop, report) as tuner:
        final = None
        with contextlib.suppress(KeyboardInterrupt):
            if tuner.lead([c for c in first if space.legal(c)]):
                final = tuner.final()
        best = tuner.best()
        outcomes = tuner.study.outcomes
        if best is None:
            raise TuneError(_why_none(outcomes))
        winner, outcome, baseline = final or (best, outcomes[best], tuner.baseline or _UNKNOWN)
    return Result(winner, outcome, baseline, outcomes, time.monotonic() - tuner.start, final is not None, tuner.measured, dict(runner.spent), tuner.untimed)


def assist(
    space: Space, runner: Runner, *,
    prior: Mapping[KernelConfig, float] | None = None, trials: int = 48, budget_s: float = math.inf, seed: int = 0,
    storage: str | Storage, name: str, stop: threading.Event | None = None,
) -> int:  # fmt: skip
    """Take part in a study that another tuner leads, on another GPU, until `trials` are finished. Returns how many were measured here.

    Arguments as of `search`. Ctrl-C, or `stop` when it is set, ends it early. Raises TuneError where the storage fails.
    """
    with (
        _joined(storage, name, space, runner, prior, trials, budget_s, seed, stop, lambda _: None) as tuner,
        contextlib.suppress(KeyboardInterrupt),
    ):
        tuner.explore(())
    return tuner.measured


@contextlib.contextmanager
def _joined(storage: str | Storage | None, name: str | None, *about: Any) -> Iterator[_Tuner]:
    """A tuner in its study, which it leaves at the end. about: what a _Tuner is made of."""
    with noticed() as interrupted, contextlib.ExitStack() as stack:
        tuner = _Tuner(interrupted, *about)
        if not isinstance(storage, Storage):
            storage = stack.enter_context(contextlib.closing(open_storage(storage)))
        tuner.join(stack.enter_context(Study(storage, name, accept=tuner.measurable)))
        yield tuner


def _head(ranked: Sequence[KernelConfig]) -> list[KernelConfig]:
    """What a search begins with: the best of the ranking, but no more than two of one tile and schedule, so that a wrong model costs
    little; and each schedule's best two, since the model may be wrong about a whole schedule. The tiles of a pass behind the vendor's
    product count as one: the product takes what they all take."""
    taken: list[KernelConfig] = []
    tiles: Counter[tuple[object, ...]] = Counter()
    schedules: Counter[str] = Counter()
    for config in ranked:
        values = dict(config.values)
        tile = (config.schedule, *(values.get(n) for n in ("block_m", "block_n", "block_k") if SCHEDULES[config.schedule].multiplies))
        if tiles[tile] < 2 and (len(taken) < _HEAD or schedules[config.schedule] < 2):
            tiles[tile] += 1
            schedules[config.schedule] += 1
            taken.append(config)
    return taken


class _Tuner:
    """One tuner's part in a study."""

    study: Study

    def __init__(
        self,
        interrupted: threading.Event,
        space: Space,
        runner: Runner,
        prior: Mapping[KernelConfig, float] | None,
        trials: int,
        budget_s: float,
        seed: int,
        stop: threading.Event | None,
        report: Callable[[Progress], None],
    ):
        self.space, self.runner = space, runner
        self.trials, self.budget_s, self.seed = trials, budget_s, seed
        self.stop, self.interrupted, self.report = stop or threading.Event(), interrupted, report
        if not prior:
            unknown = list(space.every())
            random.Random(seed).shuffle(unknown)
            prior = dict.fromkeys(unknown, 1.0)
        self.surrogate = Surrogate(prior)
        self.ranked = sorted(prior, key=prior.__getitem__)
        self.rank = {c: i for i, c in enumerate(self.ranked)}
        counts = Counter(space.schedules.index(c.schedule) for c in self.ranked)
        self.weights = {s: math.log2(1 + n) for s, n in sorted(counts.items())}
        self.proposed: Counter[int] = Counter()
        self.turns = 0
        self.tpe = Tpe(seed)
        self.head: list[KernelConfig] = []
        self.claimed = self.exhausted = False
        self.baseline: Baseline | None = None
        self.untimed = ""
        self.measured = 0
        self.start = time.monotonic()

    def join(self, study: Study) -> None:
        self.study = study
        self.before = len(study.outcomes)

    def measurable(self, config: KernelConfig) -> bool:
        """Whether the runner can have measured it: a table may hold what is no point of today's space."""
        return self.runner.available(config) == config and (self.runner.kind == RECORDED or self.space.legal(config))

    # -- what is known

    def right(self) -> list[KernelConfig]:
        """The configs with right answers, the fastest first."""
        timed = [(o.median_us, self.rank.get(c, len(self.rank)), str(c), c) for c, o in self.study.outcomes.items() if o.kind == "ok"]
        return [c for *_, c in sorted(timed)]

    def best(self) -> KernelConfig | None:
        right = ((o.median_us, self.rank.get(c, len(self.rank)), c) for c, o in self.study.outcomes.items() if o.kind == "ok")
        return min(right, key=lambda candidate: candidate[:2], default=(0.0, 0, None))[2]

    def best_us(self) -> float:
        best = self.best()
        return self.study.outcomes[best].median_us if best else 0.0

    def tell(self) -> None:
        counts, seconds = _kinds(self.study.outcomes), time.monotonic() - self.start
        trials, best = len(self.study.outcomes), self.best()
        self.report(Progress(trials, self.trials, best, self.best_us(), self.baseline, counts, seconds, self.budget_s, self.before))

    # -- the way through

    def lead(self, first: Sequence[KernelConfig]) -> bool:
        """Explore, beginning with the vendor's product and `first`. False where it was stopped."""
        if not self.explore(first, self.time_baseline):
            return False
        self.study.release()
        self.wait_for(self.study.others() if len(self.study.outcomes) < self.trials else set())
        return not self.stopped()

    def explore(self, first: Sequence[KernelConfig], begun: Callable[[], None] = lambda: None) -> bool:
        """Measure until the trials are done, the time is spent or the space is exhausted. begun: is called while the first batch is
        built. False where it was stopped."""
        self.head = list(dict.fromkeys([*first, *_head(self.ranked)]))
        current = self.take(max(BATCH, len(self.head)))  # which no measurement changes
        if len(self.study.outcomes) < self.trials:
            begun()
        while len(self.study.outcomes) < self.trials:
            if self.stopped():
                return False
            if len(current) <= _AHEAD:
                current += self.take()
            if not current:
                if self.exhausted and not self.study.others():
                    return True
                if self.spent():
                    return True
                self.stop.wait(_POLL_S)
                continue
            claim = current.pop(0)
            outcome = self.runner.measure(claim.config, self.best_us())
            if self.interrupted.is_set() or (self.stop.is_set() and outcome.kind == "crashed"):
                return False  # Ctrl-C ends a terminal's workers too: that is no outcome
            self.settle(claim, outcome)
            if self.spent():
                return True
        return True

    def stopped(self) -> bool:
        return self.stop.is_set() or self.interrupted.is_set()

    def spent(self) -> bool:
        return time.monotonic() - self.start > self.budget_s

    def wait_for(self, numbers: set[int]) -> None:
        """Let other tuners end these trials; a dead one's are given up in the meantime."""
        until = time.monotonic() + _OTHERS_S
        while numbers & self.study.others() and time.monotonic() < until and not self.stopped():
            self.stop.wait(_POLL_S)
            self.study.refresh()

    def time_baseline(self) -> None:
        """What an interrupted search, and one under way, compares with; the run-off times it again."""
        try:
            compared = self.runner.compare([])
        except EpigenError as error:  # the worker was lost: the trials go on in another
            self.untimed = str(error)
        else:
            self.baseline, self.untimed = compared.baseline, compared.untimed
        self.tell()

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        with unbroken():
            self.measured += 1
            self.study.record(claim, outcome)
        self.tell()

    def final(self) -> tuple[KernelConfig, Outcome, Baseline] | None:
        """The winner among the close ones: timed again, interleaved, and of those that tie the first by rank, so that two runs agree."""
        best = self.best()
        if best is None:
            return None
        close = _of_every_way([c for c in self.right() if self.may_be_as_fast(c, best)])[:_FINALISTS]
        self.runner.prepare(close)  # some may have been measured elsewhere
        try:
            compared = self.runner.compare(close)
        except EpigenError:  # the worker was lost: what the trials showed must do
            if self.baseline is None:
                self.time_baseline()
            return close[0], self.study.outcomes[close[0]], self.baseline or _UNKNOWN
        least = min(map(_mostly_us, compared.outcomes))
        tied = [(c, o) for c, o in zip(close, compared.outcomes, strict=True) if _mostly_us(o) <= _NOISE * least]
        winner, outcome = min(tied, key=lambda pair: (self.rank.get(pair[0], len(self.rank)), str(pair[0])))
        if self.baseline is None or compared.baseline.mm_us:
            self.baseline, self.untimed = compared.baseline, compared.untimed
        return winner, outcome, self.baseline

    def may_be_as_fast(self, config: KernelConfig, best: KernelConfig) -> bool:
        one, other = self.study.outcomes[config], self.study.outcomes[best]
        close = _CLOSE_LONG if other.median_us >= LONG_US else _CLOSE
        return one.median_us - other.median_us <= max((close - 1) * other.median_us, 2 * math.hypot(one.error_us, other.error_us))

    # -- what to try

    def take(self, most: int = BATCH) -> list[Claim]:
        """Claim the next batch, and have it built. Smaller towards the end where others take part, so that nobody waits for long."""
        self.study.refresh()
        left = self.trials - len(self.study.outcomes) - len(self.study.under_way)
        tuners = self.study.tuners()
        fresh = self.propose(min(most, left if tuners == 1 else -(-left // (2 * tuners))))
        self.runner.prepare([c.config for c in fresh])
        return fresh

    def propose(self, count: int) -> list[Claim]:
        """New configs, each once: the head, then the corrected model's and TPE's alternately, then the ranking's next where they repeat."""
        fresh: list[Claim] = []
        repeats = 0
        self.exhausted = False
        while len(fresh) < count:
            led = self.led(repeats)
            if led is None:
                self.exhausted = True
                break
            config, point = self.tpe.propose(self.study.study, led, lambda suggest: self.runner.available(self.space.point(suggest)))
            claim = "repeat" if self.study.known(config) else self.study.claim(config, point, self.trials)
            if claim == "full":
                break
            if claim == "repeat":
                repeats += 1
                continue
            repeats = 0
            fresh.append(claim)
            self.diverge(claim)
        return fresh

    def led(self, repeats: int) -> dict[str, int] | None:
        """The dimensions of the next proposal that TPE does not choose; None where nothing is left."""
        while self.head and self.study.known(self.head[0]):
            self.head.pop(0)
        if repeats >= _PATIENCE:
            following = next((c for c in self.ranked if not self.study.known(c)), None)
            return None if following is None or repeats > 10 * _PATIENCE else self.space.parameters(following)
        if self.head:
            return self.space.parameters(self.head.pop(0))
        if self.trials - len(self.study.outcomes) - len(self.study.under_way) <= _POLISH and (near := self.near_best()):
            return self.space.parameters(near)
        self.turns += 1
        hopeful = self.hopeful() if self.turns % _TPE_TURN else None
        return {"schedule": self.turn()} if hopeful is None else self.space.parameters(hopeful)

    def diverge(self, claim: Claim) -> None:
        """Tuners of one seed that share a study part here, by the number of their first claim: a lone one's is 0."""
        if not self.claimed:
            self.claimed = True
            if claim.number:
                self.tpe.reseed(self.seed + claim.number)

    def hopeful(self) -> KernelConfig | None:
        """The corrected model's proposal. TPE, which knows no model, hardly leaves its prior in so few trials."""
        measured = {c: o.median_us if o.kind in ("ok", "slower") else None for c, o in self.study.outcomes.items()}
        return self.surrogate.propose(measured, self.study.under_way)

    def near_best(self) -> KernelConfig | None:
        """The best but for one of its finer values, the model's first such config: which of those is fastest the model cannot tell, and
        searches that found the same tile should end with the same config."""
        best = self.best()
        if best is None:
            return None
        return next((c for c in self.ranked if _one_step(c, best) and not self.study.known(c)), None)

    def turn(self) -> int:
        """The schedule of TPE's next proposal, in proportion to the logarithm of how many configs each has. Left to itself, TPE would
        stay with a schedule of a few configs that are all nearly the best so far."""
        schedule = min(self.weights, key=lambda s: (self.proposed[s] + 1) / self.weights[s])
        self.proposed[schedule] += 1
        return schedule


def _mostly_us(outcome: Outcome) -> float:
    """What decides between candidates that were timed interleaved. A long launch that now and then takes longer than it does here is worse where it lies elsewhere in
    memory: on an H100, tiles of 128x128 that take 1345 to 1546 us take 1648 to 1857 with copies of the operands, those of 128x256 1394 to 1448 and 1450 to 1582.
    """
    return outcome.median_us + (outcome.spread_us if outcome.median_us >= LONG_US else 0.0)


def _of_every_way(configs: Sequence[KernelConfig]) -> list[KernelConfig]:
    """The first of each tile and way to share it, then the second of each, and so on."""
    ways, nth = Counter[tuple[object, ...]](), {}
    for config in configs:
        values = dict(config.values)
        way = (config.schedule, values.get("block_m"), values.get("block_n"), values.get("pingpong"))
        nth[config] = ways[way]
        ways[way] += 1
    return sorted(configs, key=nth.__getitem__)


def _one_step(one: KernelConfig, other: KernelConfig) -> bool:
    """Whether they differ in one value, which is none of the tile, the warps and the stages."""
    apart = [name for name, _ in {*one.values} - {*other.values}]
    return one.schedule == other.schedule and len(apart) == 1 and apart[0] not in _COARSE


def _kinds(outcomes: dict[KernelConfig, Outcome]) -> Counter[str]:
    """How many trials ended how."""
    return Counter(o.kind for o in outcomes.values())


def _why_none(outcomes: dict[KernelConfig, Outcome]) -> str:
    if not outcomes:
        return "the search ended before its first trial"
    kind, count = _kinds(outcomes).most_common(1)[0]
    detail = next(o.detail for o in outcomes.values() if o.kind == kind)
    return f"none of {len(outcomes)} configs gave a right answer in time; {count} ended as {kind.replace('_', ' ')}: {detail}"
