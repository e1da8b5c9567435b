"""The untyped tree of a program, with spans, and its printer.

In: what the parser builds. Out: canonical text. Invariant: `parse(to_text(p))` equals `p` but for spans.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from epigen import ops
from epigen.errors import Span
from epigen.lang.walk import walk


@dataclass(frozen=True, slots=True)
class Number:
    value: float
    span: Span = field(compare=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A bare name, or with `indices` an input's declaration such as `gate[m,n]`. periods: of `pos[m % P, n]`, ("P", ""); none where no index has one.
    blocks: of `scale[k/128,n]`, (128, 1); none where no index has one."""

    name: str
    span: Span = field(compare=False)
    indices: tuple[str, ...] | None = None
    periods: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """An operation applied to arguments. An operator is a call whose `function` is the row's name and `infix` is true."""

    function: str
    args: tuple[Expr, ...]
    span: Span = field(compare=False)
    keywords: tuple[tuple[str, Expr], ...] = ()
    infix: bool = False


@dataclass(frozen=True, slots=True)
class Power:
    """`base ** exponent` with a small integer exponent."""

    base: Expr
    exponent: int
    span: Span = field(compare=False)


Expr = Number | Name | Call | Power


@dataclass(frozen=True, slots=True)
class Assign:
    name: str
    value: Expr
    span: Span = field(compare=False)


WAYS = HALVES, PAIRS = ("halves", "pairs")
"""How two tensors lie in one along n: one after the other, [g0, g1, u0, u1], or in turn, [g0, u0, g1, u1]. The calls that part and join are called so."""


@dataclass(frozen=True, slots=True)
class Parted:
    """`x, y = halves(value)`. names: x and y, with a span each. way: one of WAYS."""

    names: tuple[str, str]
    way: str
    value: Expr
    spans: tuple[Span, Span] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Program:
    """Assignments, then the outputs. `text` is the cleaned source that the spans point into."""

    assigns: tuple[Assign | Parted, ...]
    outputs: tuple[Expr, ...]
    text: str = field(compare=False)

    @property
    def values(self) -> tuple[Expr, ...]:
        """What is assigned, then the outputs."""
        return (*(made.value for made in self.assigns), *self.outputs)


# how tightly each form binds, loosest first; a child that binds less tightly stands in parentheses
_COMPARE, _OR, _AND, _SUM, _PRODUCT, _UNARY, _POWER, _ATOM = range(8)
_BINDS = {
    ">": _COMPARE, ">=": _COMPARE, "<": _COMPARE, "<=": _COMPARE, "==": _COMPARE, "!=": _COMPARE,
    "|": _OR, "&": _AND, "+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT,
}  # fmt: skip


def to_text(program: Program) -> str:
    """Canonical one-line text: statements joined by '; ', one space around operators."""
    return "; ".join([*map(_statement, program.assigns), ", ".join(expr_text(e) for e in program.outputs)])


def _statement(statement: Assign | Parted) -> str:
    if isinstance(statement, Parted):
        return f"{', '.join(statement.names)} = {statement.way}({expr_text(statement.value)})"
    return f"{statement.name} = {expr_text(statement.value)}"


def expr_text(expr: Expr) -> str:
    return walk(_print, _print(expr))[0]


def number_text(value: float) -> str:
    """Shortest text that reads back as `value`; integers without a fraction."""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else repr(value)


def declared_text(indices: Sequence[str], periods: Sequence[str] = (), blocks: Sequence[int] = ()) -> str:
    """An input's indices as a program has them: "m,n", "m % P, n" or "k/128,n"."""
    each = [f"{i}/{b}" if b > 1 else i for i, b in zip(indices, blocks or (1,) * len(indices), strict=True)]
    return ", ".join(f"{i} % {p}" if p else i for i, p in zip(each, periods, strict=True)) if periods else ",".join(each)


def parts(program: Program) -> int:
    """How many parts a program has, as the parser counts them in its text: names, numbers, operators and calls."""
    every = within(*program.values)
    return sum(2 if isinstance(e, Number) and e.value < 0 else 1 for e in every)  # the sign is an operator


def within(*exprs: Expr) -> Iterator[Expr]:
    """Every expression of some, themselves among them."""
    pending = list(exprs)
    while pending:
        expr = pending.pop()
        yield expr
        match expr:
            case Power(base):
                pending.append(base)
            case Call(_, args, _, keywords):
                pending += [*args, *(v for _, v in keywords)]


def names_in(*exprs: Expr) -> set[str]:
    return {e.name for e in within(*exprs) if isinstance(e, Name)}


_Text = tuple[str, int]
"""An expression's text, and how tightly it binds."""


def _print(expr: Expr) -> Generator[Expr, _Text, _Text]:
    match expr:
        case Number(value):
            return number_text(value), _UNARY if value < 0 else _ATOM
        case Name(name, _, indices, periods, blocks):
            return (name if indices is None else f"{name}[{declared_text(indices, periods, blocks)}]"), _ATOM
        case Power(base, exponent):
            return f"{_wrapped((yield base), _ATOM)} ** {exponent}", _POWER
        case Call(function, args, _, keywords, False):
            listed = []
            for key, arg in [*(("", a) for a in args), *keywords]:
                text, _ = yield arg
                listed.append(f"{key}={text}" if key else text)
            return f"{function}({', '.join(listed)})", _ATOM
        case Call(function, (x,)):
            return f"{ops.TABLE[function].symbol}{_wrapped((yield x), _UNARY)}", _UNARY
        case Call(function, (x, y)):
            symbol = ops.TABLE[function].symbol
            binds = _BINDS[symbol]
            # comparisons do not chain in the language, so both sides need to bind tighter
            left = _wrapped((yield x), binds + 1 if binds == _COMPARE else binds)
            return f"{left} {symbol} {_wrapped((yield y), binds + 1)}", binds
    raise AssertionError(expr)


def _wrapped(printed: _Text, least: int) -> str:
    text, binds = printed
    return text if binds >= least else f"({text})"
