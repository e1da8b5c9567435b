"""What a step along k multiplies of each operand, where threads have it in registers first: spec and config say which, and the templates print it.

A factor that all values of a step share along k is taken of the step's product, which is fewer multiplications, and no rounding of what they would have made
of the operand. Of packed weights it leaves integers, and those of even and of odd k are multiplied apart, as bytes hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from epigen import ops
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Arg, Input, KernelConfig, KernelSpec, Line, Operand, OverK

_MOST_ROWS = 64
"""Of a tile: a factor of the product is multiplied as often as it has rows, one of the operand as often as a step has values along k. At 512x8192x8192 int4 with
scales of groups took 0.38 of the bf16 product's speed so, and 0.58 with the scales in the operand (H200, Triton 3.6, 2026-11)."""
_LEAST_PAIRED = 32
"""Of k in a step: each of the two products that it then has takes half, and `tl.dot` wants 16."""


@dataclass(frozen=True, slots=True)
class Step:
    """lines: what is computed each step. value: what is rounded to the multiplied dtype. rows: inputs along k of which it has one row, or column. factors: of the step's product. last: of the sum of all steps' products.
    paired: whether even and odd k are multiplied apart. zero: what is subtracted of each of the values that are loaded, in the multiplied dtype, or "".
    scales: what each is multiplied by then, in that dtype."""

    operand: Operand
    lines: tuple[Line, ...]
    value: Arg
    rows: frozenset[str] = frozenset()
    factors: tuple[Arg, ...] = ()
    last: tuple[Arg, ...] = ()
    paired: bool = False
    zero: str = ""
    scales: tuple[str, ...] = ()

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
    def beside(self) -> tuple[Arg, ...]:
        """What the values that are multiplied are computed of beside those that are loaded."""
        return (self.zero, *self.scales) if self.as_loaded else (self.value,)

    def inputs_of(self, args: Iterable[Arg]) -> tuple[Input, ...]:
        """The inputs that these are computed of."""
        names = set[str]().union(*(_reached(self.operand, arg) for arg in args))
        return tuple(i for i in self.operand.inputs if i.name in names)

    def once_of(self, args: Iterable[Arg]) -> tuple[Line, ...]:
        """The lines that do not vary along k and that these are computed of."""
        names = set[str]().union(*(_reached(self.operand, arg) for arg in args))
        return tuple(line for line in self.operand.once if line.name in names)

    @property
    def multiplied(self) -> str:
        """What the kernel calls the values that it multiplies."""
        return self.name if self.as_loaded else f"{self.name}_in"


def steps(spec: KernelSpec, config: KernelConfig) -> tuple[Step, ...]:
    """One of each operand, in the order of the product."""
    return tuple(_step(spec, config, operand) for operand in spec.operands)


@dataclass(frozen=True, slots=True)
class Carried:
    """What the loop over k carries along of one operand, beside what it multiplies: reductions, and of what these are computed of that which is not there yet.

    operand: "a" or "b". inputs: those to load, along k each step. once: lines before the loop. lines: of each step. widened: whether the operand's elements still have to become fp32, once they are
    multiplied. bounded: whether some of the elements past the last k would count. offsets: whether the numbers of a step's k have to be there for any of that, and are not.
    """

    operand: str
    reductions: tuple[OverK, ...]
    inputs: tuple[Input, ...]
    once: tuple[Line, ...]
    lines: tuple[Line, ...]
    widened: bool
    bounded: tuple[str, ...]
    offsets: bool

    @property
    def along_k(self) -> tuple[Input, ...]:
        return tuple(i for i in self.inputs if "k" in i.indices)


def carried(spec: KernelSpec, config: KernelConfig) -> tuple[Carried, ...]:
    """One of each operand that is reduced over k for the tiles."""
    by_operand = {step.name: step for step in steps(spec, config)}
    computed = {o.name: o for o in spec.computed}
    loaded = {i for o in spec.computed for i in o.inputs if "k" not in i.indices}
    found = []
    for name, step in by_operand.items():
        reductions = tuple(r for r in spec.carried if r.operand == name)
        if not reductions:
            continue
        there = loaded | set(step.operand.along_k if name in computed else ())
        even_k = spec.signature.k_multiple % config["block_k"] == 0
        bounded = tuple(r.name for r in reductions if not even_k and not (r.zero and ops.REDUCTIONS[r.row].identity == "0.0"))
        inputs = tuple(i for i in dict.fromkeys(i for r in reductions for i in r.inputs) if i not in there)
        once, lines = (dict.fromkeys(line for r in reductions for line in (r.lines if each_step else r.once)) for each_step in (False, True))
        counted = not step.operand.as_loaded and (
            (not even_k and not step.operand.zero and not step.as_loaded) or any(i.name not in step.rows for i in step.operand.along_k)
        )
        needs = bool(bounded) or any("k" in i.indices for i in inputs)
        found.append(
            Carried(
                name,
                reductions,
                inputs,
                tuple(line for line in once if name not in computed or line not in step.operand.once),
                tuple(line for line in lines if name not in computed or line not in step.lines),
                name not in computed or step.as_loaded,
                bounded,
                needs and not counted,
            )
        )
        loaded |= {i for i in inputs if "k" not in i.indices}
    return tuple(found)


def _step(spec: KernelSpec, config: KernelConfig, operand: Operand) -> Step:
    schedule = SCHEDULES[config.schedule]
    if not (schedule.computes or schedule.scales):
        return Step(operand, operand.lines, operand.value)
    whole = Step(operand, operand.lines, operand.value, frozenset(i.name for i in operand.along_k if i.in_row(config["block_k"])))
    if schedule.converts:
        return _scaled(spec, _factored(whole))
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
    if config["block_k"] < _LEAST_PAIRED or spec.signature.multiplied[step.name].bits != 16:
        return step
    found = _less_zero(spec, step)
    return replace(found, paired=True) if found.as_loaded else step


def _less_zero(spec: KernelSpec, step: Step) -> Step:
    """The same with nothing computed of the values that are loaded, where a zero point at most is, which the multiplied dtype holds."""
    operand = step.operand
    of_values = [line for line in step.lines if operand.name in _reached(operand, line.name)]
    lines = tuple(line for line in step.lines if line not in of_values)
    if not of_values:
        return replace(step, lines=lines)
    # the difference of what both hold exactly is rounded once in their own dtype as well
    [last, *others] = of_values
    if others or (last.name, last.op, last.args[0]) != (step.value, "sub", operand.name) or last.args[1] not in _held(spec, step):
        return step
    return replace(step, lines=lines, value=operand.name, zero=str(last.args[1]))


def _held(spec: KernelSpec, step: Step) -> set[str]:
    """The inputs of the multiplied dtype of which a step has one row, or column."""
    multiplied = spec.signature.multiplied[step.name]
    return {i.name for i in step.operand.inputs if i.dtype == multiplied and ("k" not in i.indices or i.name in step.rows)}


def _scaled(spec: KernelSpec, step: Step) -> Step:
    """The same with the factors of a step's product back in the values: in the multiplied dtype where it holds them, else with all that is computed in fp32."""
    operand, found = step.operand, _less_zero(spec, step)
    if found.as_loaded and set(map(str, step.factors)) <= _held(spec, step):
        return replace(found, factors=(), scales=tuple(map(str, step.factors)))
    return Step(operand, operand.lines, operand.value, step.rows)
