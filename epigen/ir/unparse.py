"""Typed graph -> untyped Program: the inverse of the checker, for graphs that no user wrote.

Invariant: parsed, checked and normalised anew, the text gives an equal graph. Values keep the names that they had; a value that is used
twice and has none is given one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import epigen.ir.graph as g
from epigen import ops
from epigen.errors import Span, near_miss
from epigen.ir.check import PREDECLARED, letters, refused_name
from epigen.ir.graph import Graph, Node
from epigen.lang.syntax import Assign, Call, Expr, Name, Number, Program, to_text

_NOWHERE = Span(0, 0)
_DEEPEST = 10  # a deeper expression is easier to read in two statements
_LEAVES = (g.INPUT, g.BITS, g.OPERAND, g.CONSTANT, g.EXTENT, g.POSITION)
_LONGEST_BASE = 50


class Names:
    """The names of one program, those that are taken and new ones."""

    def __init__(self, taken: Iterable[str]):
        self.letters = set(map(letters, taken))
        self.others = (f"v{i}" for i in itertools.count())  # no end: some bases are refused with any number after them
        self.numbered: dict[str, Iterator[str]] = {}

    def fresh(self, base: str, scalar: bool = False) -> str:
        """The base itself, or the first name like it that an input or a value may have. scalar: for an input that a bare name declares."""
        base = base[:_LONGEST_BASE]
        # what was once refused or given is not tried again
        left = self.numbered.setdefault(base, itertools.chain([base], (f"{base}{i}" for i in range(1, 100)), self.others))
        name = next(n for n in left if self._free(n, scalar))
        self.letters.add(letters(name))
        return name

    def _free(self, name: str, scalar: bool) -> bool:
        # the checker takes a scalar for a slip of the pen where it has the letters of another name, or is near a predeclared one
        if scalar and near_miss(name, (*PREDECLARED, "mask")):
            return False
        return letters(name) not in self.letters and refused_name(name, scalar) is None


def unparse(graph: Graph) -> str:
    """The program's canonical text. Requires a normalised graph."""
    return to_text(program_of(graph))


def program_of(graph: Graph) -> Program:
    """What `parse` makes of the program's canonical text, but for spans. Requires a normalised graph."""
    return _Writer(graph).program()


class _Writer:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.assigns: list[Assign] = []
        self.bound: set[str] = set()
        self.exprs: list[tuple[Expr, int]] = []  # of each node, with its depth
        self.uses = Counter(a for n in graph.nodes for a in n.args) + Counter(o.node for o in graph.outputs)
        self.names = Names([*(n.name for n in graph.inputs()), *(n.label for n in graph.nodes), *(o.name for o in graph.outputs)])

    def program(self) -> Program:
        listed = [*enumerate(self.graph.outputs)]
        default = "out{}" if len(listed) > 1 else "out"
        own = {o.node: o.name for i, o in reversed(listed) if o.dtype is None and o.name != default.format(i) and not self.leaf(self.graph.nodes[o.node])}
        labels = {n.label for n in self.graph.nodes} - {o.name for _, o in listed}
        for number, node in enumerate(self.graph.nodes):
            expr, depth = self.expr(node)
            name = own.get(number) or (node.label if node.label in labels else "")
            if not name and not self.leaf(node) and (self.uses[number] > 1 or depth > _DEEPEST):
                name = self.names.fresh("v")
            self.exprs.append((self.bind(name, expr), 0) if name else (expr, depth))
        outputs: list[Expr] = []
        for position, output in listed:
            expr = self.exprs[output.node][0]
            if output.dtype is not None:
                expr = _call("cast", expr, _name(output.dtype.name))
            implied = expr.name if isinstance(expr, Name) and expr.name in self.bound else default.format(position)
            outputs.append(expr if implied == output.name else self.bind(output.name, expr))
        return Program(tuple(self.assigns), tuple(outputs), "")

    def leaf(self, node: Node) -> bool:
        """Whether a value is written as a name or a number: the product of the operands as they are given is mm."""
        return node.op in _LEAVES or (node.op == g.DOT and not node.name and all(g.is_given(self.graph.nodes[a]) for a in node.args))

    def bind(self, name: str, expr: Expr) -> Name:
        self.assigns.append(Assign(name, expr, _NOWHERE))
        self.bound.add(name)
        return _name(name)

    def expr(self, node: Node) -> tuple[Expr, int]:
        args = [self.exprs[a][0] for a in node.args]
        depth = 1 + max((self.exprs[a][1] for a in node.args), default=0)
        match node.op:
            case g.DOT:
                return (_name("mm"), 0) if self.leaf(node) else (_call("dot", *args), depth)
            case g.OPERAND if node.dtype is not None:
                return _call(node.dtype.name, _name(node.name), *([_name(node.axes)] if node.axes != "k" else [])), 1
            case g.OPERAND | g.POSITION:
                return _name(node.name), 0
            case g.EXTENT:
                return _call("extent", _name(node.name)), 0
            case g.UNIFORM:
                return _call("uniform", *args), depth
            case g.CONSTANT:
                return Number(node.value, _NOWHERE), 0
            case g.INPUT:
                bare = PREDECLARED.get(node.name, "") == node.indices and not node.periods and not node.blocks
                return Name(node.name, _NOWHERE, None if bare else tuple(node.indices), node.periods, node.blocks), 0
            case g.BITS:
                return (_name("mask") if node.name == "mask" else _call("bits", _name(node.name))), 0
            case g.CAST:
                assert node.dtype is not None
                return _call("cast", *args, _name(node.dtype.name)), depth
            case g.REDUCE:
                if node.name == "sum" and node.axes == "m":
                    return _call("bgrad", *args), depth
                return _call(node.name, *args, *(() if node.axes == "mn" else (_name(node.axes),))), depth
            case g.BLOCKWISE:
                block = Call("div", (_name(node.axes), Number(node.blocks[-1], _NOWHERE)), _NOWHERE, infix=True)
                return _call(node.name, *args, block), depth
        infix = node.op in ops.TABLE and bool(ops.TABLE[node.op].symbol)
        return Call(node.op, tuple(args), _NOWHERE, infix=infix), depth


def _name(name: str) -> Name:
    return Name(name, _NOWHERE)


def _call(function: str, *args: Expr) -> Call:
    return Call(function, args, _NOWHERE)
