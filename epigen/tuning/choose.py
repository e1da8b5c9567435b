"""Which config a call gets, and the sentence that says why: the tuning databases first, then the plain rule.

Where the very problem was not tuned, several near ones may lend their configs. Which of those is the fastest here, the model says: each
one's measured time, carried over from its own shape to this one by the ratio of the model's times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from epigen.codegen.spec import Choice, KernelSpec, laid
from epigen.ir.graph import Graph
from epigen.runtime.device import Target
from epigen.runtime.loader import triton_version
from epigen.tuning import gpus, model, rule
from epigen.tuning.database import Database
from epigen.tuning.lookup import Found
from epigen.tuning.problem import problem_of

_LENDERS = 12  # near problems that are asked; the estimates of more would take longer than they are worth


def capability(target: Target) -> str:
    """As torch names it: "9.0" for sm_90, "gfx942" for an AMD part."""
    return f"{target.arch // 10}.{target.arch % 10}" if isinstance(target.arch, int) else target.arch


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for one program. Called by a kernel when it meets a new signature."""

    graph: Graph
    database: Database

    def __call__(self, spec: KernelSpec, shape: tuple[int, int, int], target: Target, refused: str) -> Choice:
        if refused:
            return rule.library(spec, refused)
        if spec.pointwise:
            return rule.pointwise(spec)
        problem = problem_of(self.graph, spec, shape, target.part, capability(target))
        found = self.database.nearest(problem, triton_version(), _LENDERS, lambda config: not model.refusal(spec, config, shape, target))
        if not found or 0 in shape:
            return rule.choose(spec, shape, target)
        if found[0].how in ("exact", "triton") or len(found) == 1:
            return found[0]
        times = _carried_over(found, spec, shape, target)
        best = min(range(len(found)), key=times.__getitem__)
        if best == 0:
            return found[0]
        return replace(found[best], why=f"{found[best].why}: of the configs of {len(found)} near problems the fastest here by the model")


def _carried_over(found: Sequence[Found], spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> list[float]:
    """Microseconds that each found config is expected to take here."""
    here = model.estimates(spec, [f.config for f in found], shape, gpus.of_target(target))
    times = []
    for f, estimate in zip(found, here, strict=True):
        there = model.estimate_us(laid(spec, f.record.layout), f.config, f.record.problem.shape, gpus.find(f.record.gpu) or gpus.of_target(target))
        times.append(estimate.us * f.record.median_us / there.us)
    return times
