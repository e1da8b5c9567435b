"""A program's call in the place of a region's nodes. What it adds to the graph lies where all that it reads is there, and who reads its results behind it."""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from epigen.training import library
from epigen.training.aten import Leaf, Role, is_view, order_of, same, size_hint
from epigen.training.regions import Levels, Product, Region, level_of

_aten: Any = torch.ops.aten


def replace(graph: fx.Graph, region: Region, tune: str | None, levels: Levels) -> None:
    """A call of the program instead of the region's nodes. levels: made right for what changes.

    Raises NotImplementedError for a result with an extent that the graph's own cannot give; the graph then computes what it did.
    """
    product = region.product
    placed = max([*product.nodes, *(leaf.node for leaf in region.imported.leaves)])
    following = placed.next
    with graph.inserting_before(following):
        sizes = Sizes(graph, following)
        inputs = [_presented(graph, sizes, leaf, product) for leaf in region.imported.leaves]
        inputs += [] if product.ends is None else [product.ends]
        a, b = _operands(graph, sizes, product)
        call = called(graph, library.fused, (region.imported.text, tune, a, b, inputs, []), {} if product.options is None else {"options": product.options})
        outputs = zip(region.outputs, region.imported.roles, strict=True)
        results = [_result(graph, sizes, call, place, node, roles) for place, (node, roles) in enumerate(outputs)]
    created = list(_between(placed, following))
    inside = set(region.nodes)
    for node, item in zip(region.outputs, results, strict=True):
        # views of it inside the region are made anew of the result, by the nodes that were there
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside or is_view(user))
    _move_behind(min(product.nodes), created, following)
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    _level(created, levels)


def is_program(node: fx.Node) -> bool:
    """Whether what a node moves is moved by a program's kernel: it is a call of one, or a result."""
    return node.target is library.fused or (node.target is operator.getitem and node.args[0].target is library.fused)  # type: ignore[union-attr]


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _result(graph: fx.Graph, sizes: Sizes, call: fx.Node, place: int, node: fx.Node, roles: Sequence[Role]) -> fx.Node:
    """One of the program's, as torch has it. roles: what its dimensions run along."""
    item, value = called(graph, operator.getitem, (call, place)), node.meta["val"]
    if value.dtype == torch.bool:
        item = called(graph, _aten.view.dtype, (item, torch.bool))
    order = order_of(roles)
    shape = [value.shape[d] for d in order]
    if tuple(item.meta["val"].shape) != tuple(shape):
        item = called(graph, _aten.reshape.default, (item, sizes.listed(shape)))
    if order != sorted(order):
        item = called(graph, _aten.permute.default, (item, [order.index(d) for d in range(len(order))]))
    if not all(isinstance(extent, int) for extent in value.shape):
        item.meta["val"] = value  # of equal extents that vary, those that the graph speaks of
    return item


def _move_behind(product: fx.Node, created: Sequence[fx.Node], following: fx.Node) -> None:
    """What reads the results and lies before them goes behind them, in its order."""
    late = dict.fromkeys(created)
    for node in _between(product, created[0]):
        if any(s in late for s in node.all_input_nodes):
            late[node] = None
    for node in [n for n in late if n < created[0]]:
        following.prepend(node)


def _level(created: Sequence[fx.Node], levels: Levels) -> None:
    """The levels of what is new, and of what reads it."""
    pending = list(created)  # which are in order, and so a heap
    while pending:
        node = heapq.heappop(pending)
        if levels.get(node) != (level := level_of(node, levels)):
            levels[node] = level
            for user in node.users:
                heapq.heappush(pending, user)


def lie_as_before(graph: fx.Graph, before: Sequence[Any]) -> None:
    """Copy what a graph gives and what lies in memory otherwise than the values that it gave before: a program's result lies as its rows do."""
    (output,) = graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    for place, (node, value) in enumerate(zip(results, before, strict=True)):
        if not isinstance(value, torch.Tensor) or _same_layout(node.meta["val"], value):
            continue
        order = sorted(range(value.dim()), key=lambda d: -(size_hint(value.stride(d)) or 0))
        with graph.inserting_before(output):
            moved = called(graph, _aten.permute.default, (node, order))
            copied = called(graph, _aten.clone.default, (moved,), {"memory_format": torch.contiguous_format})
            results[place] = called(graph, _aten.permute.default, (copied, [order.index(d) for d in range(len(order))]))
    output.args = (tuple(results),)


def results_of(graph: fx.Graph) -> list[Any]:
    """What a graph gives, as values."""
    (output,) = graph.find_nodes(op="output")
    return [node.meta.get("val") if isinstance(node, fx.Node) else node for node in output.args[0]]


def _same_layout(x: torch.Tensor, y: torch.Tensor) -> bool:
    return all(same(extent, 1) or same(one, other) for extent, one, other in zip(y.shape, x.stride(), y.stride(), strict=True))


class Sizes:
    """Extents as arguments of nodes: numbers, or nodes that give those that vary. following: the node before which they have to be there."""

    def __init__(self, graph: fx.Graph, following: fx.Node):
        self.graph, self.following = graph, following
        self.symbols: dict[Any, fx.Node | tuple[fx.Node, int]] = {}
        for node in graph.nodes:
            if node.op != "placeholder":
                break
            value = node.meta.get("val")
            shape: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            if isinstance(value, torch.SymInt):
                self.symbols.setdefault(value.node.expr, node)
            for dim, extent in enumerate(shape):
                if isinstance(extent, torch.SymInt):
                    self.symbols.setdefault(extent.node.expr, (node, dim))

    def listed(self, shape: Sequence[Any]) -> list[Any]:
        """For a reshape, which finds one extent by itself."""
        symbolic = [i for i, extent in enumerate(shape) if not isinstance(extent, int)]
        return [-1 if symbolic == [i] else self.node(extent) for i, extent in enumerate(shape)]

    def node(self, extent: Any) -> Any:
        return extent if isinstance(extent, int) else self._of(extent.node.expr)

    def _of(self, expression: Any) -> Any:
        if expression.is_number:
            return int(expression)
        source = self.symbols.get(expression)
        if isinstance(source, fx.Node):
            return source
        source = source or self._computed(expression)
        if source is not None:
            self.symbols[expression] = size = called(self.graph, _aten.sym_size.int, source)
            return size
        if not (expression.is_Mul or expression.is_Add):
            raise NotImplementedError(f"its extent {expression} is computed of others")
        operation = operator.mul if expression.is_Mul else operator.add
        return functools.reduce(lambda x, y: called(self.graph, operation, (x, y)), map(self._of, expression.args))

    def _computed(self, expression: Any) -> tuple[fx.Node, int] | None:
        """Where there is one that is computed of others, such as by a stride: a node, and which of its dimensions."""
        for node in self.graph.nodes:
            if node is self.following:
                break
            value = node.meta.get("val")
            shape: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            for dim, extent in enumerate(shape):
                if isinstance(extent, torch.SymInt) and extent.node.expr == expression:
                    return node, dim
        return None


def _operands(graph: fx.Graph, sizes: Sizes, product: Product) -> tuple[fx.Node, fx.Node]:
    """As a program takes them: one matrix of all rows, or one for each product of a batch."""
    if product.groups or (product.batch and not product.parted):
        return product.a, product.b
    a, b = product.a, product.b
    if product.parted:
        a = called(graph, _aten.reshape.default, (a, sizes.listed((*product.parted, a.meta["val"].shape[-1]))))
    elif a.meta["val"].dim() != 2:
        a = called(graph, _aten.reshape.default, (a, [-1, sizes.node(a.meta["val"].shape[-1])]))
    return a, b if b.meta["val"].dim() == 2 else called(graph, _aten.select.int, (b, 0, 0))


def _presented(graph: fx.Graph, sizes: Sizes, leaf: Leaf, product: Product) -> fx.Node:
    """An input as a program takes it: [M, N], [M], [N] or [], or so for each product of a batch."""
    node = leaf.node
    if leaf.expand is not None:
        node = called(graph, _aten.expand.default, (node, [sizes.node(e) for e in leaf.expand]))
    if leaf.order is not None:
        node = called(graph, _aten.permute.default, (node, list(leaf.order)))
    value, n = node.meta["val"], product.node.meta["val"].shape[-1]
    if not isinstance(value, torch.Tensor):
        return node
    if product.batch is not None:
        shape = leaf.shape(dict(zip("bmn", (*product.batch, n), strict=True)))
        return node if len(shape) == value.dim() and all(map(same, shape, value.shape)) else called(graph, _aten.reshape.default, (node, sizes.listed(shape)))
    if value.dim() != len(leaf.indices) and leaf.indices != "kn":
        shape = leaf.shape({"m": -1, "n": -1 if leaf.indices == "n" else n})
        node = called(graph, _aten.reshape.default, (node, [sizes.node(e) for e in shape]))
    return node


@contextmanager
def adding(graph: fx.Graph, following: fx.Node, origin: fx.Node) -> Iterator[None]:
    """What is added to the graph goes before `following`. origin: a node of which it is a part, for all that torch knows of it, such as whether to compute it again."""
    last = following.prev
    with graph.inserting_before(following):
        yield
    while (last := last.next) is not following:
        last.meta = {**{key: value for key, value in origin.meta.items() if key != "tensor_meta"}, "val": last.meta["val"]}


def called(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """A node with the value that it would have."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    values = fx.map_arg(args, lambda n: n.meta["val"])
    mode = torch._guards.detect_fake_mode([v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor)])
    with mode or torch.no_grad(), torch.no_grad():
        node.meta["val"] = target(*values, **node.kwargs)
    return node
