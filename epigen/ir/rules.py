"""The operation table's `gradient`, `error` and `eager` texts as graphs, which the error bound evaluates, and differentiation and eager rounding put together."""

from __future__ import annotations

import functools

from epigen import ops
from epigen.ir.check import check_rule
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.ops import NUMBER


@functools.cache
def gradients(name: str) -> tuple[Graph | None, ...]:
    """What flows to each parameter of an elementwise operation: graphs over its parameters, `grad` and `out`. None where nothing does."""
    texts = ops.TABLE[name].gradient
    return tuple(None if text is None else normalise(check_rule(text, _kinds(name) | {"grad": NUMBER})) for text in texts)


@functools.cache
def error(name: str) -> Graph:
    """An elementwise operation's own rounding error, over its parameters and `out`."""
    return normalise(check_rule(ops.TABLE[name].error, _kinds(name)))


@functools.cache
def eager(name: str) -> Graph | None:
    """What torch's own kernel computes in place of an elementwise operation, over its parameters; None where it is the same."""
    text = ops.TABLE[name].eager
    return normalise(check_rule(text, _kinds(name))) if text else None


@functools.cache
def reduction_gradient(row: str) -> Graph | None:
    """What flows to the elements `x` of a reduction, over `x`, `grad` and `out`."""
    text = ops.REDUCTIONS[row].gradient
    return None if text is None else normalise(check_rule(text, dict.fromkeys(("x", "grad", "out"), NUMBER)))


def _kinds(name: str) -> dict[str, str]:
    op = ops.TABLE[name]
    return {p.name: p.kind for p in op.params} | {"out": op.result}
