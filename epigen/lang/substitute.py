"""One value of a program for another, on its tree."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from epigen.lang.syntax import Assign, Call, Expr, Name, Parted, Power, Program
from epigen.lang.walk import walk


def substituted(program: Program, instead: Callable[[Expr], Expr | None]) -> Program:
    """The program with what `instead` gives in place of each expression for which it gives one."""

    def visit(expr: Expr) -> Generator[Expr, Expr, Expr]:
        if (other := instead(expr)) is not None:
            return other
        match expr:
            case Power():
                return replace(expr, base=(yield expr.base))
            case Call():
                args, keywords = [], []
                for arg in expr.args:
                    args.append((yield arg))
                for key, arg in expr.keywords:
                    keywords.append((key, (yield arg)))
                return replace(expr, args=tuple(args), keywords=tuple(keywords))
        return expr

    def value(expr: Expr) -> Expr:
        return walk(visit, visit(expr))

    def statement(made: Assign | Parted) -> Assign | Parted:
        return replace(made, value=value(made.value))

    return replace(program, assigns=tuple(map(statement, program.assigns)), outputs=tuple(map(value, program.outputs)))


def is_product(expr: Expr) -> bool:
    """Whether an expression is the product of both operands as they are: mm, or dot(a, b)."""
    match expr:
        case Name("mm", indices=None):
            return True
        case Call("dot", (Name("a", indices=None), Name("b", indices=None)), keywords=()):
            return True
    return False
