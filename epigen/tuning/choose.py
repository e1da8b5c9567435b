"""Which config a call gets, and the sentence that says why: the tuning databases first, then the plain rule.

Where the very problem was not tuned, several near ones may lend their configs. Which of those is the fastest here, the model says: each
one's measured time, carried over from its own shape to this one by the ratio of the model's times. All M of one bucket are lent the same
config, so that batches of ever new sizes need few kernels, and few look-ups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from epigen.codegen.spec import Choice, KernelConfig, KernelSpec, Signature, laid
from epigen.ir.graph import Graph
from epigen.runtime.device import Target
from epigen.runtime.latest import Latest
from epigen.runtime.loader import triton_version
from epigen.tuning import gpus, model, rule
from epigen.tuning.database import Database
from epigen.tuning.lookup import Found, Index, distinct
from epigen.tuning.problem import Problem, bucket, problem_of
from epigen.tuning.records import extents

_LENDERS = 12  # near problems that are asked; the estimates of more would take longer than they are worth
_BUCKETS = 256


def capability(target: Target) -> str:
    """As torch names it: "9.0" for sm_90, "gfx942" for an AMD part."""
    return f"{target.arch // 10}.{target.arch % 10}" if isinstance(target.arch, int) else target.arch


@dataclass(frozen=True, slots=True)
class Bucket:
    """What all M of a bucket have in common. problem: of the M that stands for them. lent: the config, if one is near enough.

    tuned: whether it was tuned for one of them. index: the records that were asked.
    """

    problem: Problem
    lent: Found | None
    tuned: bool
    index: Index

    def lends(self, shape: tuple[int, int, int]) -> Found | None:
        """To one of them."""
        stands = self.problem.shape
        if self.lent is None or shape == stands:
            return self.lent
        least = (1 << (stands[0] - 1).bit_length() >> 1) + 1
        like = "" if self.problem.layout[0] == "n" else ", of rows aligned alike"
        return replace(self.lent, why=f"{self.lent.why}; found for {extents(stands)}, which stands for M from {least} to {stands[0]}{like}")


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for one program. Called by a kernel when it meets a new shape."""

    graph: Graph
    database: Database
    held: Latest[tuple[Signature, tuple[int, int, int], Target], Bucket] = field(default_factory=lambda: Latest(_BUCKETS), compare=False)

    def __call__(self, spec: KernelSpec, shape: tuple[int, int, int], target: Target, refused: str) -> Choice:
        if refused:
            return rule.library(spec, refused)
        if spec.pointwise:
            return rule.pointwise(spec)
        if 0 in shape:
            return rule.choose(spec, shape, target)
        own = self.bucket(spec, shape, target)
        # what was measured for this very problem runs, whatever the model takes it to need
        same = own.index.same(replace(own.problem, shape=shape), triton_version())
        return next(same, None) or own.lends(shape) or rule.choose(spec, shape, target)

    def bucket(self, spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> Bucket:
        """That of one shape, looked up anew where the database has changed."""
        stands, index = bucket(shape, spec.signature.layout), self.database.index()
        key = (spec.signature, stands, target)
        found = self.held.get(key)
        if found is None or found.index is not index:
            problem = problem_of(self.graph, spec, stands, target.part, capability(target))
            tuned = index.tuned_alike(problem, triton_version())
            found = self.held.put(key, Bucket(problem, _lent(index, problem, spec, target), tuned, index))
        return found


def _lent(index: Index, problem: Problem, spec: KernelSpec, target: Target) -> Found | None:
    """Of the configs of near problems the one that is expected to be the fastest here."""
    shape = problem.shape
    fitted = functools.cache(lambda config: model.fitted(spec, config, shape, target))
    near = index.near(problem, triton_version(), lambda config: fitted(config) is not None)
    found = [_with_room(f, fitted(f.config)) for f in distinct(near, _LENDERS)]
    if len(found) < 2:
        return found[0] if found else None
    times = _carried_over(found, spec, shape, target)
    best = min(range(len(found)), key=times.__getitem__)
    if best == 0:
        return found[0]
    return replace(found[best], why=f"{found[best].why}: of the configs of {len(found)} near problems the fastest here by the model")


def _with_room(found: Found, config: KernelConfig | None) -> Found:
    """Another epilogue may leave less shared memory for stages. config: what fits."""
    assert config is not None
    if config == found.config:
        return found
    return replace(found, config=config, why=f"{found.why}; with {config['num_stages']} stages, for which there is room here")


def _carried_over(found: Sequence[Found], spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> list[float]:
    """Microseconds that each found config is expected to take here."""
    here = model.estimates(spec, [f.config for f in found], shape, gpus.of_target(target))
    times = []
    for f, estimate in zip(found, here, strict=True):
        there = model.estimate_us(
            laid(spec, f.record.layout), f.record.kernel_config, f.record.problem.shape, gpus.find(f.record.gpu) or gpus.of_target(target)
        )
        times.append(estimate.us * f.record.median_us / there.us)
    return times
