"""Rows behind the last end of groups in a graph of torch's: they are no group's, and what a product of groups has there is undefined, in torch as in epigen.

Where something else is chosen there, as transformers fills such rows with 0, torch has defined them, and a program writes nothing there. If such a row is read, it
is computed by torch's own operations, of a product that is 0. Products of groups read none: what they alone read is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from epigen.training.aten import SAME, Role, chooses, in_order, is_view, moves, name_of, named_arguments, same
from epigen.training.regions import LOOP_GRADIENTS, Levels, Product, Region, above_of, level_of, pointwise, product_of
from epigen.training.rewrite import Sizes, adding, called

_aten: Any = torch.ops.aten
_UNREAD = "epigen_unread_behind"
"""What a node's meta has where nobody reads its rows behind the last end, in forward or backward."""

Groups = tuple[fx.Node, int]
"""The ends, and the dimension in which groups lie."""


def mark(graph: fx.Graph) -> None:
    """Before forward and backward are parted: of a result of the forward nothing tells afterwards who reads it."""
    for node in _unread(graph):
        node.meta[_UNREAD] = True


def keep(graph: fx.Graph, region: Region, levels: Levels) -> None:
    """Have those rows of a region's results that torch has defined, and that somebody reads, computed by torch. The region is still to be replaced.

    levels: added to. Raises NotImplementedError for results whose rows have changed places.
    """
    product = region.product
    if product.ends is None or product.groups != "m":
        return
    inside, defined = set(region.nodes), _defined(region)
    for node, roles in zip(region.outputs, region.imported.roles, strict=True):
        if node not in defined:
            continue
        unread = _unread(graph)
        readers = {u for u in _readers(node, inside) if not (u.op == "output" and _UNREAD in node.meta) and _groups_of(u, node, unread) != (product.ends, 0)}
        if readers:
            mended = _mended(graph, region, node, roles, levels)
            node.replace_all_uses_with(mended, delete_user_cb=readers.__contains__)


def _defined(region: Region) -> set[fx.Node]:
    """What of a region torch may have defined where the product of groups is not."""
    defined = set(region.product.nodes) if region.product.loop else set[fx.Node]()
    for node in region.nodes:
        if chooses(node) or any(s in defined for s in node.all_input_nodes):
            defined.add(node)
    return defined


def _readers(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Who reads a result, views inside the region among them that others read."""
    return [u for u in node.users if u not in inside or (is_view(u) and _readers(u, inside))]


def _mended(graph: fx.Graph, region: Region, node: fx.Node, roles: Sequence[Role], levels: Levels) -> fx.Node:
    product, ends = region.product, region.product.ends
    if not in_order(roles):
        raise NotImplementedError("rows behind the last end, which torch has defined, have changed places with columns")
    needed = above_of([node], region.nodes)
    last, shape = node.next, product.node.meta["val"].shape
    before = node
    with adding(graph, last, node):
        sizes = Sizes(graph, last)
        own = {"dtype": product.node.meta["val"].dtype, "device": product.node.meta["val"].device}
        zero = called(graph, _aten.full.default, ([sizes.node(e) for e in shape], 0), own)
        copied = dict.fromkeys(product.nodes, zero)
        for each in region.nodes:
            if each in needed and each not in copied:
                copied[each] = graph.node_copy(each, lambda n: copied.get(n, n))
        counting = {"start": 0, "step": 1, "dtype": torch.int64, "device": own["device"], "requires_grad": False}
        rows = called(graph, torch.ops.prims.iota.default, (sizes.node(shape[0]),), counting)
        behind = called(graph, _aten.ge.Tensor, (rows, called(graph, _aten.select.int, (ends, 0, -1))))
        along = [e if role is not None and role[0] == "m" else 1 for e, role in zip(node.meta["val"].shape, roles, strict=True)]
        mended = called(graph, _aten.where.self, (called(graph, _aten.reshape.default, (behind, sizes.listed(along))), copied[node], node))
    mended.meta["val"] = node.meta["val"]
    while (before := before.next) is not last:
        levels[before] = level_of(before, levels)
    return mended


# -- who reads such rows


def _unread(graph: fx.Graph) -> dict[fx.Node, Groups]:
    """The nodes of which nobody reads what is behind the last end."""
    unread: dict[fx.Node, Groups] = {}
    for node in reversed(graph.nodes):
        if isinstance(node.meta.get("val"), torch.Tensor | list | tuple) and node.users:
            by = {_groups_of(user, node, unread) for user in node.users}
            if len(by) == 1 and (groups := by.pop()) is not None:
                unread[node] = groups
    return unread


def _groups_of(user: fx.Node, node: fx.Node, unread: Mapping[fx.Node, Groups]) -> Groups | None:
    """The groups behind the last of which a node's user reads nothing of it; None where it reads all."""
    if name_of(user) == LOOP_GRADIENTS:
        x, _, ends, grad = user.args
        return (ends, 0) if node in (x, grad) else None  # type: ignore[return-value]
    product = product_of(user)
    if isinstance(product, Product):
        operands = {"a": product.a, "b": product.b}
        dims = {"m": {"a": 0}, "k": {"a": 1, "b": 0}}.get(product.groups, {})
        found = {dims.get(name) for name, operand in operands.items() if operand is node}
        return (product.ends, dim) if product.ends is not None and len(found) == 1 and (dim := found.pop()) is not None else None
    return _through(user, node, unread[user]) if user in unread else None


def _through(user: fx.Node, node: fx.Node, groups: Groups) -> Groups | None:
    """The groups in a node whose user has these, where it computes each of its rows of the same row."""
    (ends, dim), name = groups, name_of(user)
    read, given = (value[0] if isinstance(value, list | tuple) else value for value in (user.meta["val"], node.meta["val"]))
    if not isinstance(given, torch.Tensor):
        return None
    if moves(user):
        return (ends, 1 - dim) if given.dim() == 2 else None
    matches = dim < min(read.dim(), given.dim()) and same(read.shape[dim], given.shape[dim])
    if name in ("split", "split_with_sizes", "slice", "cat"):
        along = named_arguments(user).get("dim", 0) % read.dim()
        return groups if matches and along != dim else None
    if is_view(user):
        return groups if matches and dim == 0 else None
    if pointwise(user.target) or name in SAME or name == "getitem":
        return groups if matches and read.dim() == given.dim() else None
    return None
