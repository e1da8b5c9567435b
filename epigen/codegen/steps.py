"""What a step along k multiplies of each operand, where threads load it through pointers: spec and config say which, and the templates print it.

A factor that all values of a step share along k is taken of the step's product, which is fewer multiplications, and no rounding of what they would have made
of the operand. Of packed weights it leaves integers, and those of even and of odd k are multiplied apart, as bytes hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Arg, KernelConfig, KernelSpec, Line, Operand

POINTED = frozenset(s.name for s in SCHEDULES.values() if s.computes)
"""The schedules whose threads load their operands through pointers."""
_MOST_ROWS = 64
"""Of a tile: a factor of the product is multiplied as often as it has rows, one of the operand as often as a step has values along k. At 512x8192x8192 int4 with
scales of groups took 0.38 of the bf16 product's speed so, and 0.58 with the scales in the operand (H200, Triton 3.6, 2026-11)."""
_LEAST_PAIRED = 32
"""Of k in a step: each of the two products that it then has takes half, and `tl.dot` wants 16."""


@dataclass(frozen=True, slots=True)
class Step:
    """lines: what is computed each step. value: what is rounded to the multiplied dtype. rows: inputs along k of which it has one row, or column. factors: of the step's product. last: of the sum of all steps' products.
    paired: whether even and odd k are multiplied apart. zero: what is subtracted of each of those values, in the multiplied dtype, or ""."""

    operand: Operand
    lines: tuple[Line, ...]
    value: Arg
    rows: frozenset[str] = frozenset()
    factors: tuple[Arg, ...] = ()
    last: tuple[Arg, ...] = ()
    paired: bool = False
    zero: str = ""

    @property
    def name(self) -> str:
        return self.operand.name

    @property
    def as_loaded(self) -> bool:
        """Whether nothing but a conversion, and a zero point's distance, lies between what is loaded and what is multiplied."""
        return self.value == self.name

    @property
    def computed(self) -> bool:
        """Whether anything is done to it each step."""
        return self.operand.computed or bool(self.factors)

    @property
    def multiplied(self) -> str:
        """What the kernel calls the values that it multiplies."""
        return self.name if self.as_loaded else f"{self.name}_in"


def steps(spec: KernelSpec, config: KernelConfig) -> tuple[Step, ...]:
    """One of each operand, in the order of the product."""
    return tuple(_step(spec, config, operand) for operand in spec.operands)


def _step(spec: KernelSpec, config: KernelConfig, operand: Operand) -> Step:
    if config.schedule not in POINTED:
        return Step(operand, operand.lines, operand.value)
    whole = Step(operand, operand.lines, operand.value, frozenset(i.name for i in operand.along_k if i.in_row(config["block_k"])))
    if spec.second or (config["block_m"] > _MOST_ROWS and spec.signature.a.bits > 8):
        return whole
    step = _factored(whole)
    return _paired(spec, config, step) if spec.signature.packed == "k" and operand.packed else step


def _reached(operand: Operand, arg: Arg) -> set[str]:
    """The names that a value is computed of, its own among them."""
    made = {line.name: line for line in (*operand.once, *operand.lines)}
    own = made.get(str(arg))
    return {str(arg)}.union(*(_reached(operand, a) for a in own.args)) if own else {str(arg)}


def _factored(step: Step) -> Step:
    """With factors taken of the product, if each step has one value of each."""
    operand = step.operand
    along_k = {i.name for i in operand.along_k}
    reached = {factor: _reached(operand, factor) for factor in operand.factors}
    read = set[str]().union(*reached.values())
    if not reached or not step.rows.issuperset(along_k & read):
        return step
    kept = read | _reached(operand, operand.apart)
    by_step: dict[bool, list[Arg]] = {True: [], False: []}
    for factor in operand.factors:
        by_step[not along_k.isdisjoint(reached[factor])].append(factor)
    lines = tuple(line for line in step.lines if line.name in kept)
    return replace(step, lines=lines, value=operand.apart, factors=tuple(by_step[True]), last=tuple(by_step[False]))


def _paired(spec: KernelSpec, config: KernelConfig, step: Step) -> Step:
    """The same with even and odd k apart, where a zero point at most lies between the values in bytes and what is multiplied."""
    operand, multiplied = step.operand, spec.signature.multiplied[step.name]
    if config["block_k"] < _LEAST_PAIRED or multiplied.bits != 16:
        return step
    of_values = [line for line in step.lines if operand.name in _reached(operand, line.name)]
    lines = tuple(line for line in step.lines if line not in of_values)
    if not of_values:
        return replace(step, lines=lines, paired=step.as_loaded)
    # the difference of what both hold exactly is rounded once in their own dtype as well
    zeros = {i.name for i in operand.inputs if i.dtype == multiplied and ("k" not in i.indices or i.name in step.rows)}
    [last, *others] = of_values
    if others or (last.name, last.op, last.args[0]) != (step.value, "sub", operand.name) or last.args[1] not in zeros:
        return step
    return replace(step, lines=lines, value=operand.name, paired=True, zero=str(last.args[1]))
