"""What a program parts, as `g, u = halves(mm)`, and what it joins, as an output `pairs(x, y)`: the same program of parts alone.

A product whose columns are two matrices' is two products of one left operand. All that comes behind the checker knows these; whoever calls a program learns
from its `Parting` which tensors to take apart and which to put together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace

from epigen import ops
from epigen.errors import Diagnostic, Span
from epigen.ir.graph import OPERANDS, PRODUCT, periodic
from epigen.lang.syntax import WAYS, Assign, Call, Expr, Name, Parted, Power, Program, names_in, within
from epigen.lang.walk import walk

_RANDOM = frozenset({"uniform", "dropout"})
_OF_ALL_COLUMNS = frozenset({*ops.REDUCTIONS, "bgrad", "mean", "extent", *_RANDOM})
"""Calls that mean another thing of a part than of the whole."""

_LONGEST = 60
"""Of a name, to which a number may be added."""


@dataclass(frozen=True, slots=True)
class Part:
    """whole: what a call has as one tensor. first, second: what the program calls its parts. way: how they lie along n, the last index: one of WAYS."""

    whole: str
    first: str
    second: str
    way: str


@dataclass(frozen=True, slots=True)
class Parting:
    """inputs: those that a call gives as one, the operand b before the others. outputs: those that it gets as one."""

    inputs: tuple[Part, ...] = ()
    outputs: tuple[Part, ...] = ()

    def as_given(self, inputs: Iterable[str]) -> tuple[str, ...]:
        """What a call names for these inputs of the program."""
        return _wholes(inputs, self.inputs)

    def as_returned(self, outputs: Iterable[str]) -> tuple[str, ...]:
        """What a call names its results of these outputs."""
        return _wholes(outputs, self.outputs)


def _wholes(names: Iterable[str], parts: Iterable[Part]) -> tuple[str, ...]:
    first, second = {p.first: p.whole for p in parts}, {p.second for p in parts}
    return tuple(first.get(name, name) for name in names if name not in second)


@dataclass(frozen=True, slots=True)
class WithoutParts:
    """A program of assignments alone. parting: what was written otherwise; None where that is nothing. mistakes: if any, the rest is not to be read."""

    assigns: tuple[Assign, ...]
    outputs: tuple[Expr, ...]
    parting: Parting | None = None
    mistakes: tuple[Diagnostic, ...] = ()


def without_parts(program: Program, declared: Mapping[str, str], free: Callable[[str], bool]) -> WithoutParts:
    """declared: the indices of inputs whose bare names declare them. free: whether an input may have a name."""
    assigns = tuple(s for s in program.assigns if isinstance(s, Assign))
    every = within(*(s.value for s in assigns), *program.outputs)
    if len(assigns) == len(program.assigns) and not any(isinstance(e, Call) and e.function in WAYS for e in every):
        return WithoutParts(assigns, program.outputs)
    return _Rewriter(program, declared, free).result()


class _Rewriter:
    def __init__(self, program: Program, declared: Mapping[str, str], free: Callable[[str], bool]):
        self.program, self.free = program, free
        self.declared: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]] = {
            name: (tuple(indices), (), ()) for name, indices in declared.items()
        }
        self.declared |= {e.name: (e.indices, e.periods, e.blocks) for e in within(*program.values) if isinstance(e, Name) and e.indices is not None}
        self.bound = {name for s in program.assigns for name in (s.names if isinstance(s, Parted) else (s.name,))}
        self.taken = self.bound | names_in(*program.values)
        self.twice: dict[str, Assign] = {}
        self.made: list[Assign] = []
        self.inputs: dict[str, Part] = {}
        self.mistakes: dict[Diagnostic, None] = {}  # in order, each once

    def error(self, message: str, span: Span, hint: str) -> None:
        self.mistakes[Diagnostic(message, span, hint)] = None

    def fresh(self, name: str) -> str:
        """The name, or the first like it that is none of the program's."""
        name = name[:_LONGEST]
        found = next(n for n in (name, *(f"{name}{i}" for i in range(2, 100))) if n not in self.taken and self.free(n))
        self.taken.add(found)
        return found

    def result(self) -> WithoutParts:
        assigns: list[Assign] = []
        for statement in self.program.assigns:
            if isinstance(statement, Assign):
                assigns.append(statement)
            elif not self.inputs:
                assigns += self.both(statement, {a.name: a for a in assigns})
            else:
                self.error("a program parts one product", statement.spans[0], "take all parts from the first, or compile two programs")
        assigns, outputs, joined = self.joined(assigns)
        if self.inputs:
            assigns = self.without_whole(assigns, outputs)
        for call in within(*(a.value for a in assigns), *outputs):
            match call:
                case Call(function, (_,), span) if function in WAYS:
                    self.error(f"{function} gives two values", span, f"bind them: 'x, y = {function}(mm); ...'")
                case Call(function, _, span) if function in WAYS:
                    self.error(f"{function} joins two tiles, as an output", span, f"end with {function}(x, y)")
        return WithoutParts(tuple(assigns), outputs, Parting(tuple(self.inputs.values()), tuple(joined)), tuple(self.mistakes))

    # -- what is parted

    def both(self, parted: Parted, before: Mapping[str, Assign]) -> list[Assign]:
        """The assignments of both parts, and for each those before it again that differ in them."""
        reached = self.reached(parted.value, before)
        for assign in before.values():
            drawn = any(isinstance(e, Call) and e.function in _RANDOM for e in within(assign.value))
            if assign.name in reached and (drawn or any(name in self.twice or self.differs(name) for name in names_in(assign.value))):
                self.twice[assign.name] = assign
        if reached.isdisjoint((PRODUCT, "b")):
            self.error(f"{parted.way} parts what is computed of the product, and there is no mm in this", parted.value.span, f"write {parted.way}(mm)")
        self.inputs["b"] = Part("b", "b", self.fresh(f"b_{parted.names[1]}"), parted.way)
        for place, (name, span) in enumerate(zip(parted.names, parted.spans, strict=True)):
            instead = {old: self.fresh(f"{old}_{name}") for old in self.twice}
            self.made += [Assign(instead[old], self.part(a.value, place, instead, parted), a.span) for old, a in self.twice.items()]
            self.made.append(Assign(name, self.part(parted.value, place, instead, parted), span))
        return self.made

    def reached(self, value: Expr, before: Mapping[str, Assign]) -> set[str]:
        """All names in a value and in what these are bound to."""
        reached: set[str] = set()
        pending = [value]
        while pending:
            new = names_in(pending.pop()) - reached
            reached |= new
            pending += [before[name].value for name in new if name in before]
        return reached

    def differs(self, name: str) -> bool:
        """Whether a name that is not bound stands for something else in each part."""
        return name in (PRODUCT, "b", "n") or ("n" in self.declared.get(name, ((), ()))[0] and name not in self.bound)

    def part(self, value: Expr, place: int, instead: Mapping[str, str], parted: Parted) -> Expr:
        """What a value is in one of the parts. instead: of names that are bound, those to read there."""
        how = parted.way
        instead_of_it = f"take the parts first: x, y = {how}(mm)"

        def visit(expr: Expr) -> Generator[Expr, Expr, Expr]:
            match expr:
                case Name(name, span) if name == PRODUCT and place:
                    return Call("dot", (Name("a", span), self.right(span)), span)
                case Call("dot", (left, Name("b", at)), span):
                    return Call("dot", ((yield left), self.right(at) if place else Name("b", at)), span)
                case Call("dot", _, span):
                    self.error(f"{how} parts a product of b as it is given", span, "write dot(..., b)")
                case Call("bits", _, span) | Name("mask", span):
                    self.error(f"a packed mask within {how}", span, instead_of_it)
                case Call(function, _, span) if function in _OF_ALL_COLUMNS:
                    self.error(f"{function} within {how}", span, instead_of_it)
                case Name(name) if name in instead:
                    return replace(expr, name=instead[name])
                case Name("n", span):
                    self.error(f"the number of the column within {how}", span, instead_of_it)
                case Name(name, span) if name not in (PRODUCT, "b") and self.differs(name):
                    indices, periods, blocks = self.declared[name]
                    if periodic("".join(indices), periods).endswith("n"):
                        self.error(f"'{name}', whose columns begin anew, within {how}", span, instead_of_it)
                    if dict(zip(indices, blocks, strict=False)).get("n", 1) > 1:
                        self.error(f"'{name}', of which several columns share a value, within {how}", span, instead_of_it)
                    if name not in self.inputs:
                        first, second = (self.fresh(f"{name}_{of}") for of in parted.names)
                        self.inputs[name] = Part(name, first, second, how)
                    part = self.inputs[name]
                    return Name(part.second if place else part.first, span, indices, periods, blocks)
                case Power(base):
                    return replace(expr, base=(yield base))
                case Call(_, args, _, keywords):
                    parts = []
                    for arg in (*args, *(v for _, v in keywords)):
                        parts.append((yield arg))
                    return replace(expr, args=tuple(parts[: len(args)]), keywords=tuple(zip((k for k, _ in keywords), parts[len(args) :], strict=True)))
            return expr

        return walk(visit, visit(value))

    def right(self, span: Span) -> Name:
        return Name(self.inputs["b"].second, span, tuple(OPERANDS["b"]))

    def without_whole(self, assigns: list[Assign], outputs: tuple[Expr, ...]) -> list[Assign]:
        """Without the assignments that only what is parted needed. Nothing else is to be computed of what is parted."""
        kept: list[Assign] = []
        used = names_in(*outputs)
        for assign in reversed(assigns):
            if assign.name in used or assign.name not in self.twice:
                kept.insert(0, assign)
                used |= names_in(assign.value)
        way = self.inputs["b"].way
        for expr in within(*(a.value for a in kept if a not in self.made), *outputs):
            match expr:
                case Name(name, span) if name in (PRODUCT, *self.inputs):
                    self.error(f"'{name}' is parted by {way}, and stands outside of it too", span, f"compute it of the parts, or within {way}(...)")
                case Call("dot", _, span):
                    self.error(f"a product outside of {way}", span, "compile two programs")
        return kept

    # -- what is joined

    def joined(self, assigns: list[Assign]) -> tuple[list[Assign], tuple[Expr, ...], list[Part]]:
        """Assignments and outputs with two outputs for each that joins two tiles, and which those are."""
        several = len(self.program.outputs) > 1
        bound = {a.name: a for a in assigns}
        before, assigns = assigns, [*assigns]
        outputs: list[Expr] = []
        parts: list[Part] = []
        for position, output in enumerate(self.program.outputs):
            name = output.name if isinstance(output, Name) and output.name in bound else f"out{position}" if several else "out"
            value = bound[name].value if isinstance(output, Name) and name in bound else output
            match value:
                case Call(way, (_, _), _, ()) if way in WAYS and name in {p.whole for p in parts}:
                    self.error(f"two outputs are called '{name}'", output.span, "list each output once")
                case Call(way, (x, y), span, ()) if way in WAYS:
                    part = Part(name, self.fresh(f"{name}_first"), self.fresh(f"{name}_second"), way)
                    assigns = [a for a in assigns if a.name != name]
                    assigns += [Assign(part.first, x, span), Assign(part.second, y, span)]
                    outputs += [Name(part.first, span), Name(part.second, span)]
                    parts.append(part)
                case _ if name in bound:
                    outputs.append(output)
                case _:  # the name that it has beside fewer
                    assigns.append(Assign(name, output, output.span))
                    outputs.append(Name(name, output.span))
        return (assigns, tuple(outputs), parts) if parts else (before, self.program.outputs, [])
