"""Activations that are written out, by what they compute: x * 0.5 * (1 + tanh(…)) is gelu_tanh(x), and its derivative's dozen of operations one.

Models spell them in many ways, and a derivative is spelt by whoever derived it. So a part of the graph that depends on one value, or linearly on a
second, is computed at a few hundred points in fp64 and compared with the rows of the operation table. A row is shorter, exact in its tails, has its
form for 16 bits, and is what the tuning databases know.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import epigen.ir.graph as g
from epigen import ops
from epigen.ir import reference
from epigen.ir.graph import Graph, Node, Output
from epigen.ir.passes import order
from epigen.ops import NUMBER

_MOST_NODES = 200
"""Of larger graphs nothing is looked for: it would take longer than they save."""
_LARGEST = 64
"""Nodes that an activation is written in, at most."""
_CLOSE = 2.0**-25
"""Half a unit of fp32, in parts of the value or of its argument: as close as two spellings of one formula are, and constants of nine digits."""

_SLOW = re.compile(r"exp|log|erf")


@functools.cache
def _slow(op: str) -> bool:
    """Whether a row is computed by exponentials or the like. Only what has such a part is looked at."""
    return op in ops.TABLE and any(_SLOW.search(text) for text in (ops.TABLE[op].triton, *ops.TABLE[op].body))


@functools.cache
def _rows(params: tuple[str, ...]) -> tuple[str, ...]:
    """The rows that something may be, by what they take."""
    rounded = {op.rounded for op in ops.TABLE.values()}
    named = [name for name, op in ops.TABLE.items() if _slow(name) and name not in rounded]
    return tuple(name for name in named if tuple(p.name for p in ops.TABLE[name].params) == params)


@functools.lru_cache(maxsize=1024)
def recognised(graph: Graph) -> Graph:
    """The same with rows in the place of what they equal.

    Requires: canonical order. Ensures: it, and fewer nodes where anything was found; values change by no more than the rounding of their own formulas.
    """
    if len(graph.nodes) > _MOST_NODES or not any(_slow(n.op) for n in graph.nodes):
        return graph
    # the points are numbers, whatever torch is writing down around this, and on the CPU
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        while (replaced := _replaced(graph)) is not None:
            graph = replaced
    return graph


def _replaced(graph: Graph) -> Graph | None:
    """With one more row; None where there is none."""
    for number in reversed(range(len(graph.nodes))):  # what is largest first
        node = graph.nodes[number]
        if node.op not in ops.TABLE or node.kind != NUMBER:
            continue
        for args in _cuts(graph, number):
            row = _row(graph, number, args)
            if row is not None:
                nodes = list(graph.nodes)
                nodes[number] = Node(row, args, NUMBER, node.indices, node.reduced, label=node.label)
                shorter = order(Graph(tuple(nodes), graph.outputs, graph.text))
                if len(shorter.nodes) < len(graph.nodes):
                    return shorter
    return None


# -- what a value depends on


def _cuts(graph: Graph, number: int) -> Iterator[tuple[int, ...]]:
    """The values by which alone a node can be computed with exponentials: one, x; or two, (g, x), where all that is slow is a matter of x."""
    below = _below(graph, number)
    if not any(_slow(graph.nodes[i].op) for i in below):
        return
    alone = _gates(graph, below, number, ())
    for x in sorted(alone, reverse=True):
        if _worth(graph, number, (x,)):
            yield (x,)
    for x in below:
        if x == number or graph.nodes[x].kind != NUMBER or graph.nodes[x].op == g.CONSTANT:
            continue
        of_x = _of(graph, below, x)
        if any(_slow(graph.nodes[i].op) for i in of_x) and number not in of_x:
            for other in sorted(_gates(graph, below, number, {x, *of_x}), reverse=True):
                if _worth(graph, number, (other, x)):
                    yield (other, x)


def _below(graph: Graph, number: int) -> list[int]:
    """What a node is computed of elementwise, itself and all atoms among it, in order."""
    below = {number}
    pending = [number]
    while pending:
        node = graph.nodes[pending.pop()]
        new = [a for a in (node.args if node.op in ops.TABLE else ()) if a not in below]
        below.update(new)
        pending += new
    return sorted(below)


def _of(graph: Graph, below: Sequence[int], x: int) -> set[int]:
    """What is computed of x and of constants alone."""
    computed: set[int] = set()
    known = {x, *(i for i in below if graph.nodes[i].op == g.CONSTANT)}
    for i in below:
        node = graph.nodes[i]
        if i not in known and node.op in ops.TABLE and all(a in known for a in node.args):
            known.add(i)
            computed.add(i)
    return computed


def _gates(graph: Graph, below: Sequence[int], number: int, known: Collection[int]) -> set[int]:
    """The values through which all goes that a node depends on, but for constants and what is known."""
    through: dict[int, set[int] | None] = {}
    for i in below:
        node = graph.nodes[i]
        if i in known or node.op == g.CONSTANT:
            through[i] = None
        elif node.op in ops.TABLE:
            sets = [s for a in node.args if (s := through[a]) is not None]
            through[i] = {i, *(set.intersection(*sets) if sets else ())}
        else:
            through[i] = {i}
    return {i for i in through[number] or () if i != number and graph.nodes[i].kind == NUMBER}


def _worth(graph: Graph, number: int, args: Sequence[int]) -> bool:
    """Whether there is something slow between a node and what it is to be computed of, and no more than an activation takes. What is detached there has another
    derivative than a row of the same values."""
    inside = _inside(graph, number, args)
    computed = [graph.nodes[i].op for i in inside]
    return 1 < len(inside) <= _LARGEST and any(map(_slow, computed)) and "detach" not in computed


def _inside(graph: Graph, number: int, args: Collection[int]) -> list[int]:
    inside = {number}
    pending = [number]
    while pending:
        new = [a for a in graph.nodes[pending.pop()].args if a not in inside and a not in args]
        inside.update(new)
        pending += new
    return sorted(inside)


# -- what it is


def _row(graph: Graph, number: int, args: tuple[int, ...]) -> str | None:
    """The row that a node is of these values."""
    names = ("x",) if len(args) == 1 else ("g", "z")
    inside = _inside(graph, number, args)
    given = [Node(g.INPUT, (), NUMBER, "mn", name=name) for name in names]
    places = {a: i for i, a in enumerate(args)} | {old: len(args) + i for i, old in enumerate(inside)}
    nodes = (*given, *(_everywhere(graph.nodes[i], [places[a] for a in graph.nodes[i].args]) for i in inside))
    near, far = _near(names), _far(names)
    value = _computed(nodes, near)
    for row in _rows(names):
        own = (*given, Node(row, tuple(range(len(names))), NUMBER, "mn"))
        if _equal(value, _computed(own, near), near) and _equal(_computed(nodes, far), _computed(own, far), far):
            return row
    return None


def _everywhere(node: Node, args: Sequence[int]) -> Node:
    return replace(node, args=tuple(args), indices="mn" if node.op != g.CONSTANT else "")


class _Points(NamedTuple):
    """Values [1, P] by name, in the dtype in which it is computed there. close: how far two spellings may be apart, in parts of the value or of its argument."""

    values: tuple[tuple[str, Tensor], ...]
    close: float


def _equal(x: Tensor, y: Tensor, points: _Points) -> bool:
    """Whether values at the points are those of a row, y."""
    argument = points.values[0][1].abs()  # x, or the gradient
    room = points.close * torch.maximum(y.abs(), argument)
    return bool(((x == y) | ((x - y).abs() <= room)).all())


@functools.cache
def _near(names: tuple[str, ...]) -> _Points:
    """From where an activation is almost linear to where it is at its ends."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-12, 12, 193), torch.randn(64, generator=generator) * 2, torch.randn(32, generator=generator) * 1e-3])
    return _points(names, x.double(), _CLOSE)


@functools.cache
def _far(names: tuple[str, ...]) -> _Points:
    """Where a formula may overflow in fp32 and a row does not, as log(1 + exp(x)) does: then it is another one, whatever it means."""
    return _points(names, torch.tensor([s * x for x in (20.0, 50.0, 90.0, 200.0, 1e4) for s in (1, -1)]), 1e-5)


def _points(names: tuple[str, ...], x: Tensor, close: float) -> _Points:
    """Gradients are of all sizes and both signs."""
    gradients = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return _Points(tuple(zip(names, (x[None],) if len(names) == 1 else (gradients[None], x[None]), strict=True)), close)


def _computed(nodes: tuple[Node, ...], points: _Points) -> Tensor:
    """The last of these nodes at the points."""
    graph, values = Graph(nodes, (Output("out", len(nodes) - 1, None),), ""), dict(points.values)
    x = points.values[-1][1]
    a, b = torch.zeros(1, 0, dtype=x.dtype), torch.zeros(0, x.shape[1], dtype=x.dtype)
    return reference.node_values(graph, a, b, values, x.dtype)[-1].expand_as(x)
