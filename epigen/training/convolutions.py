"""Convolutions of a graph of torch's that are products: with a kernel of one element, in memory where the channels of an element lie side by side.

`as_products` puts a product of views in the place of each, so that what comes next need know nothing of convolutions. What was left of these products is a
convolution again after `settle`, the very node that was there: whoever runs the rest gets what he would have got.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from epigen.training.aten import lies_as_rows
from epigen.training.elements import CHANNELS_LAST, channels_second, rows_first, why_no_product, why_not_as_fast
from epigen.training.rewrite import called

_aten: Any = torch.ops.aten
_INPUT, _WEIGHT, _BIAS = range(3)
"""The results of a backward, by place, and so in its mask."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """What was put in the place of a convolution, or of one result of its backward.

    original: what was there, without users for the while. node: what its users read instead. made: the product or sum by which it is computed. biased: what adds
    the bias to that, which the convolution does not read for the while.
    """

    original: fx.Node
    node: fx.Node
    made: fx.Node
    biased: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Apart:
    """A product that a convolution would be if it were not left. shape: M, N, K."""

    node: fx.Node
    shape: tuple[Any, Any, Any]
    dtype: torch.dtype
    why: str


class _Convolution:
    """One node, of a forward or a backward. out: the convolution's result, or the gradient that arrives there."""

    def __init__(self, node: fx.Node):
        self.node, self.backward = node, node.target == _aten.convolution_backward.default
        given: list[Any] = list(node.args)
        out: Any = node
        if self.backward:
            out, *given = given
        self.x, self.weight, self.bias = given[:3]
        self.stride, self.padding, self.dilation, self.transposed, _, self.groups = given[3:9]
        self.mask: Sequence[bool] = given[9] if self.backward else ()
        self.out: fx.Node = out

    @property
    def shapes(self) -> list[tuple[Any, Any, Any]]:
        """M, N, K of its products: an element's sums over channels and kernel, all elements below one another."""
        channels, *window = self.weight.meta["val"].shape
        elements, taps = _elements(self.x if self.transposed else self.out), _product(window)
        if not self.backward:
            return [(elements, taps, channels) if self.transposed else (elements, channels, taps)]
        return [((elements, taps, channels), (channels, taps, elements))[place] for place in (_INPUT, _WEIGHT) if self.mask[place]]

    @property
    def why(self) -> str:
        """Why it is no product, or none that takes as long as the convolution."""
        weight, x, out = (n.meta["val"] for n in (self.weight, self.x, self.out))
        if why := why_no_product(weight, self.stride, self.padding, self.groups, self.transposed) or why_not_as_fast(x):
            return why
        order = rows_first(x.dim())
        if not all(lies_as_rows(t, order) for t in (x, out)) or any(not lies_as_rows(t, order, dense=True) for t in self.given()):
            return CHANNELS_LAST
        return ""

    def given(self) -> Iterator[torch.Tensor]:
        """What it gives, where a product would."""
        if not self.backward:
            yield self.out.meta["val"]
        elif self.mask[_INPUT]:
            yield self.node.meta["val"][_INPUT]


def as_products(graph: fx.Graph) -> tuple[list[StandIn], list[Apart]]:
    """Put products in the places of convolutions, forward and backward. Returns what stands in, and what is left as it is and why."""
    standing: list[StandIn] = []
    apart: list[Apart] = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (_aten.convolution.default, _aten.convolution_backward.default):
            continue
        convolution = _Convolution(node)
        if why := convolution.why:
            apart += [Apart(node, shape, convolution.x.meta["val"].dtype, why) for shape in convolution.shapes]
        elif convolution.backward:
            standing += _backward(graph, convolution)
        else:
            standing.append(_forward(graph, convolution))
    return standing, apart


def _forward(graph: fx.Graph, convolution: _Convolution) -> StandIn:
    node = convolution.node
    with graph.inserting_before(node.next):
        w = called(graph, _aten.permute.default, (_matrix(graph, convolution.weight), [1, 0]))
        made = result = called(graph, _aten.mm.default, (_rows(graph, convolution.x), w))
        biased = None
        if convolution.bias is not None:
            biased = result = called(graph, _aten.add.Tensor, (result, convolution.bias))
            node.update_arg(2, None)
        return _put(node, _elementwise(graph, result, convolution.x, convolution.weight, 0), made, biased)


def _backward(graph: fx.Graph, convolution: _Convolution) -> Iterator[StandIn]:
    node, order = convolution.node, rows_first(convolution.x.meta["val"].dim())
    results = {user.args[1]: user for user in node.users}
    for original in reversed(results.values()):
        node.append(original)  # before what stands in, and so before all that may read it again
    with graph.inserting_before(max(results.values()).next):
        arrived = _rows(graph, convolution.out)
        for place, original in results.items():
            if place == _INPUT:
                made = called(graph, _aten.mm.default, (arrived, _matrix(graph, convolution.weight)))
                yield _put(original, _elementwise(graph, made, convolution.x, convolution.weight, 1), made)
            elif place == _WEIGHT:
                made = called(graph, _aten.mm.default, (called(graph, _aten.permute.default, (arrived, [1, 0])), _rows(graph, convolution.x)))
                yield _put(original, called(graph, _aten.reshape.default, (made, _extents(graph, convolution.weight, range(len(order))))), made)
            else:
                made = called(graph, _aten.sum.dim_IntList, (convolution.out, order[:-1]))
                yield _put(original, made, made)


def _put(original: fx.Node, node: fx.Node, made: fx.Node, biased: fx.Node | None = None) -> StandIn:
    node.meta["val"] = original.meta["val"]  # of extents that vary, those that the graph speaks of
    original.replace_all_uses_with(node)
    return StandIn(original, node, made, biased)


def settle(graph: fx.Graph, standing: Sequence[StandIn]) -> None:
    """Each convolution is as it was, unless a program has taken its product."""
    there = set(graph.nodes)
    for each in standing:
        if each.made in there and each.node in there:
            if each.biased is not None:
                each.original.update_arg(2, each.biased.args[1])
            each.node.replace_all_uses_with(each.original)
    for node in {each.original.args[0]: None for each in standing if each.original.target is operator.getitem}:
        assert isinstance(node, fx.Node)
        read = {user.args[1] for user in node.users if user.users}
        for user in [user for user in node.users if not user.users]:
            graph.erase_node(user)
        node.update_arg(10, [place in read for place in (_INPUT, _WEIGHT, _BIAS)])
        node.meta["val"] = tuple(value if place in read else None for place, value in enumerate(node.meta["val"]))


# -- as matrices


def _extents(graph: fx.Graph, node: fx.Node, dims: Sequence[int]) -> list[Any]:
    """Numbers, or nodes that give what varies."""
    shape = node.meta["val"].shape
    return [shape[d] if isinstance(shape[d], int) else called(graph, _aten.sym_size.int, (node, d)) for d in dims]


def _rows(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[N, C, H, W] as [N * H * W, C]."""
    moved = called(graph, _aten.permute.default, (node, rows_first(node.meta["val"].dim())))
    return called(graph, _aten.reshape.default, (moved, [-1, *_extents(graph, node, [1])]))


def _matrix(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    """[O, C, 1, 1] as [O, C]."""
    return called(graph, _aten.reshape.default, (weight, _extents(graph, weight, [0, 1])))


def _elementwise(graph: fx.Graph, rows: fx.Node, x: fx.Node, weight: fx.Node, channels: int) -> fx.Node:
    """[N * H * W, C] as [N, C, H, W], which has the elements of x, and as many channels as the weight in this dimension."""
    order = rows_first(x.meta["val"].dim())
    parted = called(graph, _aten.reshape.default, (rows, _extents(graph, x, order[:-1]) + _extents(graph, weight, [channels])))
    return called(graph, _aten.permute.default, (parted, channels_second(len(order))))


def _elements(node: fx.Node) -> Any:
    shape = node.meta["val"].shape
    return _product([shape[0], *shape[2:]])


def _product(extents: Sequence[Any]) -> Any:
    return functools.reduce(operator.mul, extents, 1)
