"""What is chosen for weights of fewer bits, of 8 as of 4."""

from __future__ import annotations

from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelSpec
from epigen.gpus import Target
from epigen.perf import limits
from epigen.shapes import Shape


def chosen_runs(spec: KernelSpec, shape: Shape, target: Target) -> None:
    """That the rule chooses what can run, and that the space holds it and no schedule that does not compute operands."""
    space, config = Space(spec, shape, target), rule.choose(spec, shape, target).config
    assert config.schedule in space.schedules and space.legal(config) and limits.refusal(spec, config, shape, target) == ""
    assert all(SCHEDULES[name].computes or SCHEDULES[name].scales for name in space.schedules)
