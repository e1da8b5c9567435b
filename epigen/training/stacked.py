"""Stacked products of a graph of torch's: one whose columns are two matrices', such as a gate and what it is multiplied with, which are parted again behind it.

`as_products` puts a product for each in its place, of views of the weight, so that what comes next need know nothing of them. What no program has taken is
the one product again after `settle`: that is faster than two.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from epigen.lang.syntax import HALVES, WAYS
from epigen.training.aten import SAME, is_view, name_of, same
from epigen.training.halved import Slice, slices
from epigen.training.regions import of_groups, pointwise
from epigen.training.rewrite import adding, called

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Stacked:
    """original: the product of all columns, without users for the while. made: those of its two parts. parts: what was read of each, and what is read instead.
    computed: the products, and what is computed of them up to there."""

    original: fx.Node
    made: tuple[fx.Node, fx.Node]
    parts: tuple[tuple[fx.Node, fx.Node], ...]
    computed: tuple[fx.Node, ...]


def found(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if _found(node) is not None]


def as_products(graph: fx.Graph, nodes: Sequence[fx.Node] | None = None) -> list[Stacked]:
    """nodes: of those that are `found`; by default all."""
    return [_parted(graph, node, *parts) for node in (list(graph.nodes) if nodes is None else nodes) if (parts := _found(node)) is not None]


def settle(graph: fx.Graph, stacked: Sequence[Stacked]) -> list[Stacked]:
    """Each product of which a program has taken neither part is as it was. Returns those."""
    there = set(graph.nodes)
    left = [each for each in stacked if there.issuperset(each.made)]
    for each in left:
        for part, instead in each.parts:
            instead.replace_all_uses_with(part)
        for node in reversed(each.computed):
            if not node.users:
                graph.erase_node(node)
    return left


def _found(node: fx.Node) -> tuple[list[fx.Node], dict[Slice, list[fx.Node]]] | None:
    """Of a stacked product what is computed of it before it is parted, one after the other, and the nodes that read each of its two parts; None of any other node."""
    if not (node.target in (_aten.mm.default, _aten.addmm.default) or of_groups(node)) or node.kwargs or not isinstance(node.meta["val"].shape[-1], int):
        return None
    columns = node.meta["val"].shape[-1]
    if node.target == _aten.addmm.default and tuple(node.args[0].meta["val"].shape) != (columns,):  # type: ignore[union-attr]
        return None
    if of_groups(node) and node.args[1].meta["val"].dim() != 3:  # type: ignore[union-attr]
        return None
    between: list[fx.Node] = []
    whole = node
    while len(whole.users) == 1 and _keeps_columns(user := next(iter(whole.users)), whole, columns):
        between.append(whole := user)
    parts: dict[Slice, list[fx.Node]] = {}
    one_after_the_other = slices(HALVES, columns)
    for user in whole.users:
        if user.target == _aten.split.Tensor and _along_last(user, 2):
            if 2 * user.args[1] != columns or any(item.target is not operator.getitem for item in user.users):  # type: ignore[operator]
                return None
            for item in user.users:
                parts.setdefault(one_after_the_other[item.args[1]], []).append(item)  # type: ignore[index]
        elif user.target == _aten.slice.Tensor and _along_last(user, 1):
            given: list[Any] = [*user.args[2:]]
            start, end, step = given + [None, None, 1][len(given) :]
            if not all(isinstance(at, int | None) for at in (start, end, step)):
                return None
            parts.setdefault(slice(start, end, step).indices(columns), []).append(user)
        else:
            return None
    possible = [slices(way, columns) for way in WAYS]
    return (between, parts) if columns % 2 == 0 and set(parts) in map(set, possible) else None


def _keeps_columns(node: fx.Node, whole: fx.Node, columns: int) -> bool:
    """Whether a node computes each column of its result of one column of `whole`, and of what has as many columns or the same for all of them."""
    if is_view(node):
        return node.target not in (_aten.permute.default, _aten.view.dtype) and same(node.meta["val"].shape[-1], columns)
    if not (pointwise(node.target) or name_of(node) in SAME) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    others = [s.meta.get("val") for s in node.all_input_nodes if s is not whole]
    return not any(isinstance(t, torch.Tensor) and t.dim() and not (same(t.shape[-1], 1) or same(t.shape[-1], columns)) for t in others)


def _rows(graph: fx.Graph, whole: fx.Node) -> list[Any]:
    """The leading dimensions of a view, as far as it goes without that itself, which need not be computed then."""
    extents, sizes = whole.meta["val"].shape[:-1], whole.args[1] if len(whole.args) > 1 else None
    if isinstance(sizes, list | tuple) and len(sizes) == len(extents) + 1:
        return [*sizes[:-1]]
    return [e if isinstance(e, int) else called(graph, _aten.sym_size.int, (whole, d)) for d, e in enumerate(extents)]


def _along_last(node: fx.Node, place: int) -> bool:
    """Whether a node parts the last dimension of what it reads. place: where its arguments name that."""
    dim = node.args[place] if len(node.args) > place else 0
    return not node.kwargs and dim in (-1, node.args[0].meta["val"].dim() - 1)  # type: ignore[union-attr]


def _parted(graph: fx.Graph, node: fx.Node, between: Sequence[fx.Node], parts: dict[Slice, list[fx.Node]]) -> Stacked:
    made, instead, computed = [], [], list[fx.Node]()
    following = {each: each.next for each in (node, *between)}  # so that one part comes behind the other
    for at, read in sorted(parts.items(), key=lambda item: item[0]):
        with adding(graph, following[node], node):
            made.append(product := _product(graph, node, at))
        of = {node: product}
        for each in between:
            with adding(graph, following[each], each):
                of[each] = _part(graph, each, of, at)
        computed += of.values()
        instead += [(part, of[between[-1] if between else node]) for part in read]
    for part, value in instead:
        value.meta["val"] = part.meta["val"] if part.meta["val"].is_contiguous() else value.meta["val"]
        part.replace_all_uses_with(value)
    return Stacked(node, (made[0], made[1]), tuple(instead), tuple(computed))


def _product(graph: fx.Graph, node: fx.Node, at: Slice) -> fx.Node:
    """The product of one part of the columns."""
    if of_groups(node):
        a, b, *ends = node.args
        product = graph.call_function(node.target, (a, called(graph, _aten.slice.Tensor, (b, 2, *at)), *ends))  # type: ignore[arg-type]
        whole = node.meta["val"]
        product.meta["val"] = whole.new_empty((*whole.shape[:-1], whole.shape[-1] // 2))  # torch's own refuses some ways in which a part may lie
        return product
    *added, a, b = node.args
    right = called(graph, _aten.slice.Tensor, (b, 1, *at))
    return called(graph, node.target, (*(called(graph, _aten.slice.Tensor, (x, 0, *at)) for x in added), a, right))


def _part(graph: fx.Graph, node: fx.Node, of: Mapping[fx.Node, fx.Node], at: Slice) -> fx.Node:
    """One part of the columns of what is computed of the product. of: the same of the nodes before it."""
    columns = node.meta["val"].shape[-1]
    if is_view(node):
        (source,) = (s for s in node.all_input_nodes if s in of)
        return called(graph, _aten.reshape.default, (of[source], [*_rows(graph, node), of[source].meta["val"].shape[-1]]))

    def part(x: fx.Node) -> fx.Node:
        value = x.meta.get("val")
        if x in of or not (isinstance(value, torch.Tensor) and value.dim() and value.shape[-1] == columns):
            return of.get(x, x)
        return called(graph, _aten.slice.Tensor, (x, value.dim() - 1, *at))

    return called(graph, node.target, fx.map_arg(node.args, part), fx.map_arg(node.kwargs, part))
