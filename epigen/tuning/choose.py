"""Which config a call gets, and the sentence that says why: the tuning databases first, then the plain rule."""

from __future__ import annotations

from dataclasses import dataclass

from epigen.codegen.spec import Choice, KernelSpec
from epigen.ir.graph import Graph
from epigen.runtime.device import Target
from epigen.runtime.loader import triton_version
from epigen.tuning import model, rule
from epigen.tuning.database import Database
from epigen.tuning.problem import problem_of


def capability(target: Target) -> str:
    """As torch names it: "9.0" for sm_90, "gfx942" for an AMD part."""
    return f"{target.arch // 10}.{target.arch % 10}" if isinstance(target.arch, int) else target.arch


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for one program. Called by a kernel when it meets a new signature."""

    graph: Graph
    database: Database

    def __call__(self, spec: KernelSpec, shape: tuple[int, int, int], layout: str, target: Target, refused: str) -> Choice:
        if refused:
            return rule.library(spec, refused)
        problem = problem_of(self.graph, spec, shape, layout, target.part, capability(target))
        found = self.database.find(problem, triton_version(), lambda config: not model.refusal(spec, config, shape, target, layout))
        return found or rule.choose(spec, shape, target, layout=layout)
