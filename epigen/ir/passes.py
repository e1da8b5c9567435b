"""Pure rewrites, graph -> graph. `normalise` runs them in order; each states what it requires and ensures."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import epigen.ir.graph as g
from epigen import ops
from epigen.dtypes import FP32, FP32_TINY, DType
from epigen.ir.graph import Graph, Node
from epigen.ops import NUMBER

_FOLD: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "scale": operator.mul,
}
_KEEPS_RELATIVE = ("neg", "mul", "div", "scale", "abs", "drelu", "where")


def normalise(graph: Graph) -> Graph:
    return order(fold_constants(graph))


def fold_constants(graph: Graph) -> Graph:
    """Arithmetic between constants becomes a constant, in double precision.

    Ensures: values change by no more than one rounding to fp32. A result that fp32 cannot hold (1 / 0, overflow) is left to the kernel.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        args = [nodes[a] for a in node.args]
        if node.op in _FOLD and all(a.op == g.CONSTANT for a in args) and not (node.op == "div" and args[1].value == 0):
            value = _FOLD[node.op](*(a.value for a in args)) + 0.0  # one zero: -0.0 equals 0.0, and so would merge with it
            if value == 0 or FP32_TINY <= abs(value) <= FP32.largest:
                node = Node(g.CONSTANT, (), NUMBER, "", value=value)
        nodes.append(node)
    return Graph(tuple(nodes), graph.outputs, graph.text)


def rounded(graph: Graph, dtypes: Sequence[DType]) -> Graph:
    """Operations take their form for 16 bits where nothing comes of them but what is rounded to so many, as an output or by a cast, and sums of it.

    dtypes: of the outputs. Between the two lies only what keeps a relative error as it is. A sum may be fp32: what is summed without epigen is rounded.
    Requires: canonical order. Ensures: it; values change by no more than the error of the rows in their place.
    """
    coarse, exact = [False] * len(graph.nodes), [False] * len(graph.nodes)
    ends = [(output.node, dtype) for output, dtype in zip(graph.outputs, dtypes, strict=True)]
    ends += [(n.args[0], n.dtype) for n in graph.nodes if n.op == g.CAST and n.dtype is not None]
    for number, dtype in ends:
        (coarse if dtype.is_float and dtype.bits <= 16 else exact)[number] = True
    for number in reversed(range(len(graph.nodes))):
        node = graph.nodes[number]
        if node.op != g.CAST and not (node.op == g.REDUCE and node.name == "sum"):
            for arg in node.args:
                coarse[arg] |= coarse[number]
                exact[arg] |= exact[number] or node.op not in _KEEPS_RELATIVE
    rows = {number: ops.TABLE[n.op].rounded for number, n in enumerate(graph.nodes) if n.op in ops.TABLE and coarse[number] and not exact[number]}
    if not any(rows.values()):
        return graph
    nodes = tuple(replace(n, op=rows.get(number) or n.op) for number, n in enumerate(graph.nodes))
    return order(Graph(nodes, graph.outputs, graph.text))  # two may have become one


def with_leaf(graph: Graph) -> Graph:
    """A product of the operands as they are given as a leaf, mm, for whom it need have no arguments; any other is left.

    Requires: canonical order. Ensures: it. Digests are of this form, as they were when there was no other product, so that records stay valid.
    """
    leaf = Node(g.PRODUCT, (), NUMBER, "mn")
    return graph if graph.computed() else order(replace(graph, nodes=tuple(leaf if n.op == g.DOT and not n.name else n for n in graph.nodes)))


def order(graph: Graph) -> Graph:
    """Canonical order: depth first from the outputs, arguments before their users; equal nodes merged, unreached ones dropped."""
    nodes: list[Node] = []
    numbers: dict[Node, int] = {}
    moved: dict[int, int] = {}

    def place(old: int) -> int:
        # the parser bounds nesting within a statement, not across statements: no recursion here
        pending = [old]
        while pending:
            top = pending[-1]
            missing = [a for a in graph.nodes[top].args if a not in moved]
            if missing:
                pending += reversed(missing)
                continue
            pending.pop()
            if top not in moved:
                node = replace(graph.nodes[top], args=tuple(moved[a] for a in graph.nodes[top].args))
                if node not in numbers:
                    numbers[node] = len(nodes)
                    nodes.append(node)
                moved[top] = numbers[node]
        return moved[old]

    outputs = tuple(replace(o, node=place(o.node)) for o in graph.outputs)
    return Graph(tuple(nodes), outputs, graph.text)
