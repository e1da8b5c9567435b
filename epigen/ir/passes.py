"""Pure rewrites, graph -> graph. `normalise` runs them in order; each states what it requires and ensures."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import epigen.ir.graph as g
from epigen.dtypes import FP32, FP32_TINY
from epigen.ir.graph import Graph, Node, Output
from epigen.ops import NUMBER

_FOLD: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "scale": operator.mul,
}


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

    outputs = tuple(Output(o.name, place(o.node), o.dtype) for o in graph.outputs)
    return Graph(tuple(nodes), outputs, graph.text)
