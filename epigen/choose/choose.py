"""Which config a call gets, and the sentence that says why: the tuning databases first, then the model and the plain rule.

Where the very problem was not tuned, several near ones may have their configs borrowed, made fit for it. Which of those, of the plain rule's and of an
outline of the whole space is the fastest here, the model says, held to what the nearest record knows better. All M of one bucket get one of the same
few configs, so that batches of ever new sizes need few kernels, and few look-ups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Choice, KernelConfig, KernelSpec, Signature, with_layout
from epigen.db.database import Database
from epigen.db.lookup import FARTHEST, PROGRAM_STEP, Index, Recorded
from epigen.db.problem import Problem, capability, coarse_bucket, fine_bucket, fine_bucket_step, problem_of
from epigen.errors import ConfigError
from epigen.gpus import Target
from epigen.ir.graph import Graph
from epigen.lru_cache import LruCache
from epigen.perf import limits, model
from epigen.runtime.loader import triton_version
from epigen.shapes import Shape, each, extents

_SOURCES = 8  # near problems that are tried; the estimates of more would take longer than they are worth
_DOUBT = 0.02  # a share of the time for each doubling that a config comes from afar
_UNMEASURED = FARTHEST + PROGRAM_STEP  # what nobody measured is no nearer than the farthest that is borrowed from
_OUTLINED = 3  # of the space's outline, the fastest by the model
_NEAR = 0.5  # doublings within which a source's config is no worse than what the model could find
_RULED = 0.93  # where nothing is near, the share of the plain rule's time that a config of the outline has to keep to
_KEPT = 4  # configs of a bucket; where one M has a wave of tiles less than the one that stands for it, another may be the faster
_WITHIN = 1.3  # of the first's time, what another may take there
_ROWS = 64  # of the lowest tiles that are taken for many rows: what is faster is asked for every so many
_WORTH = 0.95  # of the first's time, what another has to keep to at another M: a kernel more is compiled for it
_BY_EPILOGUE = ("fused_finalize", "tma_load")  # what a program without reductions, or without a tile to load, has no choice in
_BUCKETS = 256


class Found(NamedTuple):
    """doubt: what the model's time of it is multiplied by."""

    choice: Choice
    doubt: float


@dataclass(frozen=True, slots=True)
class FineBucket:
    """What all M of a bucket have in common. problem: of the M that stands for them. found: configs that differ in their tiles, the best for that M first;
    none where nothing is near and the plain rule's is as good as any.

    tuned: whether it was tuned for one M of their coarse bucket. index: the records that were searched.
    """

    problem: Problem
    found: tuple[Found, ...]
    tuned: bool
    index: Index
    best: dict[Shape, int] = field(default_factory=dict, repr=False, compare=False)
    """Which of them, by the shape that was asked for, M rounded up to whole tiles."""

    def config_for(self, spec: KernelSpec, shape: Shape, target: Target) -> Choice | None:
        """The first, or another that the model takes to be faster for one of them."""
        stands = self.problem.shape
        if not self.found or shape == stands:
            return self.found[0].choice if self.found else None
        best = self._best(spec, each(shape, min(-(-shape[-3] // _ROWS) * _ROWS, stands[-3]), *shape[-2:]), target)
        why = "by the model faster here than what is found for" if best else "found for"
        choice, m = self.found[best].choice, stands[-3]
        step = fine_bucket_step(m)
        least = (m - 1) // step * step + 1
        note = "" if self.problem.layout[0] == "n" else ", of rows aligned alike"
        those = f"M from {least} to {m}{note}"
        if len(stands) == 4:
            those = f"{stands[0] // 2 + 1} to {stands[0]} products, and {those}"
        return replace(choice, why=f"{choice.why}; {why} {extents(stands)}, which stands for {those}")

    def _best(self, spec: KernelSpec, shape: Shape, target: Target) -> int:
        if shape in self.best or len(self.found) == 1 or shape == self.problem.shape:
            return self.best.get(shape, 0)
        estimated = model.estimates(spec, [one.choice.config for one in self.found], shape, gpus.of_target(target))
        times = [e.us * one.doubt for e, one in zip(estimated, self.found, strict=True)]
        fastest = min(range(len(times)), key=times.__getitem__)
        return self.best.setdefault(shape, fastest if times[fastest] <= _WORTH * times[0] else 0)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for one program. Called by a kernel when it meets a new shape."""

    graph: Graph
    database: Database
    held: LruCache[tuple[Signature, Shape, Target], FineBucket] = field(default_factory=lambda: LruCache(_BUCKETS), compare=False)

    def __call__(self, spec: KernelSpec, shape: Shape, target: Target, refused: str) -> Choice:
        if limits.one_config(spec, target):
            return rule.for_all_rows(spec, shape, target, refused)
        if refused:
            return rule.by_vendor(spec, shape, target, refused)
        if spec.pointwise:
            return rule.pointwise(spec, shape, target)
        if spec.signature.sparse:
            return self._of_sparse(spec, shape, target)
        if 0 in shape:
            return rule.choose(spec, shape, target)
        own = self.bucket(spec, shape, target)
        # what was measured for this very problem runs, whatever the model takes it to need; but a record says nothing of bits
        same_bits = functools.partial(_same_bits, spec, shape, target) if spec.signature.invariant else None
        same = own.index.same(replace(own.problem, shape=shape), triton_version(), same_bits)
        return next(same, None) or own.config_for(spec, shape, target) or rule.choose(spec, shape, target)

    def _of_sparse(self, spec: KernelSpec, shape: Shape, target: Target) -> Choice:
        """The vendor's product of a sparse operand, unless its dense values were measured to be faster: for this very shape, or the one that stands for those of its
        coarse bucket. Nothing is borrowed: dense values take memory, which who made them sparse may not have."""
        problem, index = problem_of(self.graph, spec, shape, target.part, capability(target)), self.database.index()
        for stands in dict.fromkeys((shape, coarse_bucket(shape, problem.layout))):
            found = next(index.same(replace(problem, shape=stands), triton_version(), lambda config: not limits.unfit(spec, config, shape, target)), None)
            if found is not None:
                return found
        return rule.of_sparse(spec, shape, target)

    def bucket(self, spec: KernelSpec, shape: Shape, target: Target) -> FineBucket:
        """That of one shape, looked up anew where the database has changed."""
        stands, index = fine_bucket(shape, spec.signature.layout), self.database.index()
        key = (spec.signature, stands, target)
        bucket = self.held.get(key)
        if bucket is None or bucket.index is not index:
            problem = problem_of(self.graph, spec, stands, target.part, capability(target))
            tuned = index.tuned_in_coarse_bucket(problem, triton_version())
            bucket = self.held.put(key, FineBucket(problem, _found(index, problem, spec, target), tuned, index))
        return bucket


@dataclass(frozen=True, slots=True)
class Within:
    """Chooses among the configs of one schedule, which a caller has named: by the model, whatever was measured. Raises ConfigError where there is none."""

    schedule: str

    def __call__(self, spec: KernelSpec, shape: Shape, target: Target, refused: str) -> Choice:
        if limits.one_config(spec, target):
            choice = rule.for_all_rows(spec, shape, target, refused)
            if choice.config.schedule != self.schedule:
                raise ConfigError(
                    f"the program is invariant, and has one config for all M, of the schedule {choice.config.schedule}: give a config, or no schedule"
                )
            return choice
        if refused:
            return rule.by_vendor(spec, shape, target, refused)
        space = Space(spec, shape, target)
        configs = [config for config in space.outline() if config.schedule == self.schedule] if self.schedule in space.schedules else []
        ranked = model.rank(spec, configs, shape, gpus.of_target(target))
        fitting = next((fit for config in ranked if (fit := limits.fitted(spec, config, shape, target))), None)
        if fitting is None:
            those = ", ".join(space.schedules)
            raise ConfigError(f"no config of {self.schedule} suits {extents(shape)} {spec.signature.called} on {target.name}: there are some of {those}")
        return Choice(fitting, f"the model's choice of {self.schedule} for {extents(shape)} {spec.signature.called} on {target.name}")


def _same_bits(spec: KernelSpec, shape: Shape, target: Target, config: KernelConfig) -> bool:
    """Whether a row of an invariant program has the same bits by a config as by those of all other M."""
    return not limits.unfit(spec, config, shape, target, chosen=True)


def _found(index: Index, problem: Problem, spec: KernelSpec, target: Target) -> tuple[Found, ...]:
    """The configs that are expected to be the fastest here, of those of near problems, the plain rule's, and those of the space's outline.

    None where nothing is near and the outline is hardly better than the plain rule, and on GPUs on which nobody has measured what the model says.
    """
    space = Space(spec, problem.shape, target)
    runs = frozenset(space.schedules)
    suited: dict[KernelConfig, list[Recorded]] = {}
    for source in index.near(problem, triton_version(), lambda config: config.schedule in runs):
        if source.config not in suited and (here := _suited(source, problem, space)):
            suited[source.config] = here
            if len(suited) == _SOURCES:
                break
    borrowed, ruled = [one for here in suited.values() for one in here], rule.choose(spec, problem.shape, target)
    near = min((source.far for source in borrowed), default=math.inf)
    # Of weights that are converted on their way, and of operands of 8 bits with scales, no config is among those that the model was fitted to. At 64x28672x8192 its choice for int4 with zero points took
    # 0.32 of the bf16 product's speed, the plain rule's at 64x14336x4096 0.70 (H200, Triton 3.6, 2026-11).
    unlike = any(operand.converted for operand in spec.operands) or (spec.computed and spec.signature.a.bits == 8)
    known = index.measured(problem.capability) and not unlike
    outlined = _outlined(space, _OUTLINED) if near > _NEAR and known else []
    modelled = [e.us for e in model.estimates(spec, [one.config for one in (*borrowed, ruled, *outlined)], problem.shape, gpus.of_target(target))]
    if not borrowed:
        enough = [(one, us) for one, us in zip(outlined, modelled[1:], strict=True) if us <= _RULED * modelled[0]]
        return _apart([(one, us, 1.0) for one, us in (*enough, (ruled, modelled[0]))]) if enough else ()
    unmeasured = [ruled, *outlined]
    times = _expected(borrowed, unmeasured, spec, target, modelled)
    order = sorted(range(len(times)), key=times.__getitem__)
    those = f"the configs of {len(suited)} near problem{'s' * (len(suited) > 1)}"

    def said(i: int) -> Choice:
        if i >= len(borrowed):
            chosen = unmeasured[i - len(borrowed)]
            return replace(chosen, why=f"{chosen.why}; by the model faster here than {those}") if i == order[0] else chosen
        return replace(borrowed[i], why=f"{borrowed[i].why}: of {those} the fastest here by the model") if i and i == order[0] else borrowed[i]

    return _apart([(said(i), times[i], times[i] / modelled[i]) for i in order])


def _apart(ranked: Sequence[tuple[Choice, float, float]]) -> tuple[Found, ...]:
    """The first few that have tiles of their own, and take little longer than the first. ranked: with microseconds, and what those are of the model's."""
    kept: dict[tuple[object, ...], Found] = {}
    for choice, us, doubt in ranked:
        if us <= _WITHIN * ranked[0][1] and len(kept) < _KEPT:
            kept.setdefault(_tile(choice.config), Found(choice, doubt))
    return tuple(kept.values())


def _tile(config: KernelConfig) -> tuple[object, ...]:
    """What of a config decides how many waves of tiles there are. Of the vendor's product nobody knows."""
    values = dict(config.values)
    return (config.schedule, *(values.get(name) for name in ("block_m", "block_n", "pingpong", "splits") if SCHEDULES[config.schedule].multiplies))


def _outlined(space: Space, count: int) -> list[Choice]:
    """The fastest of the space's outline by the model that the GPU has room for, and the fastest of each schedule that has none among them."""
    spec, shape, target = space.spec, space.shape, space.target
    configs = list(space.outline())
    times = [e.us for e in model.estimates(spec, configs, shape, gpus.of_target(target))]
    why = f"the model's choice for {extents(shape)} {spec.signature.called} on {target.name}: no measurement is at hand"
    fastest: dict[KernelConfig, None] = {}
    missing = set(space.schedules)
    for i in sorted(range(len(configs)), key=times.__getitem__):
        if len(fastest) >= count and configs[i].schedule not in missing:
            continue
        if fitting := limits.fitted(spec, configs[i], shape, target):
            fastest.setdefault(_ordered(fitting, space))
            missing.discard(fitting.schedule)
    return [Choice(config, why) for config in fastest]


def _suited(source: Recorded, problem: Problem, space: Space) -> list[Recorded]:
    """A source's config as it can run here, with as many stages as there is room for, and its tiles in an order that suits another shape.

    From an epilogue of the same class as it was measured. From another one the nearest legal points, since what pays beside its loads, stores
    and reductions may not beside these; and what it had nothing to decide by is tried both ways.
    """
    configs = (source.config,) if source.record.kind == problem.kind else space.nearest(source.config, _BY_EPILOGUE)
    fitting = [fit for config in configs if (fit := limits.fitted(space.spec, config, space.shape, space.target))]
    if source.record.shape != space.shape:
        fitting = [_ordered(config, space) for config in fitting]
    return [_changed(source, config) for config in dict.fromkeys(fitting)]


def _ordered(config: KernelConfig, space: Space) -> KernelConfig:
    """A config with its tiles in the order that the model takes to be the fastest here: that depends on the shape more than on all else."""
    orders = space.orders(config)
    return model.rank(space.spec, orders, space.shape, gpus.of_target(space.target))[0] if len(orders) > 1 else config


def _changed(source: Recorded, config: KernelConfig) -> Recorded:
    if config == source.config:
        return source
    changes = ", ".join(f"{name}={value}" for name, value in config.values if value != source.config[name])
    return replace(source, config=config, why=f"{source.why}; here with {changes}")


def _expected(borrowed: Sequence[Recorded], unmeasured: Sequence[Choice], spec: KernelSpec, target: Target, here: Sequence[float]) -> list[float]:
    """Microseconds that each borrowed config is expected to take here, and each that nobody measured. here: by the model.

    They are the model's, with what the nearest record is sure of: where it was tuned, nothing was faster than its config. What the model takes
    to be faster there it flatters, here as well, the more so the nearer that is. And each doubling of a source's distance makes it doubtful.

    How much slower or faster than estimated a source was is not carried over: of 182 records on an H200 those ratios have nothing in common
    beyond one doubling (correlation 0.0), and little within it (0.2 for one program).
    """
    gpu, nearest = gpus.of_target(target), min(borrowed, key=lambda source: source.far)
    configs = [one.config for one in (*borrowed, *unmeasured)]
    tuned = nearest.record
    won, *there = model.estimates(with_layout(spec, tuned.layout), [tuned.kernel_config, *configs], tuned.shape, gpus.find(tuned.gpu) or gpu)
    sure = max(0.0, 1 - nearest.far / FARTHEST)
    far = [*(source.far for source in borrowed), *[_UNMEASURED] * len(unmeasured)]
    return [us * max(1.0, won.us / t.us) ** sure * (1 + _DOUBT * f) for us, t, f in zip(here, there, far, strict=True)]
