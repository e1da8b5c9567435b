"""transformers' own products of groups of rows, which it calls under torch.compile where the dtype is not bf16: a loop over groups, whose ends the host waits for.

Of both gradients it has one operation. `as_products` puts a product of rows and one along k in its place, so that what comes next need know nothing of it. Where no
program has taken the second, the operation gives it after `settle`, as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from epigen.training.aten import name_of
from epigen.training.regions import GROUPED_MM, LOOP_GRADIENTS, LOOPED, product_of
from epigen.training.rewrite import adding, called

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class StandIn:
    """original: the gradient of the weights, as the operation gives it, without users for the while. made: the product in its place."""

    original: fx.Node
    made: fx.Node


def as_products(graph: fx.Graph) -> list[StandIn]:
    return [one for node in list(graph.nodes) if node.op == "call_function" and name_of(node) == LOOP_GRADIENTS for one in _parted(graph, node)]


def settle(graph: fx.Graph, standing: Sequence[StandIn]) -> None:
    there = set(graph.nodes)
    for each in standing:
        if each.made in there:
            each.made.replace_all_uses_with(each.original)


def _parted(graph: fx.Graph, node: fx.Node) -> list[StandIn]:
    x, weight, ends, grad = node.args
    results: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
    standing = []
    with adding(graph, max([node, *results.values()]).next, node):
        of_rows = called(graph, _loop(), (grad, called(graph, _aten.permute.default, (weight, [0, 2, 1])), ends))
        if isinstance(product_of(of_rows), str):  # which no program takes
            return []
        if 0 in results:
            results[0].replace_all_uses_with(of_rows)
        if 1 in results:
            made = graph.call_function(GROUPED_MM, (called(graph, _aten.permute.default, (x, [1, 0])), grad, ends))
            made.meta |= {"val": results[1].meta["val"]}  # of dtypes that torch's own operation has not
            standing.append(StandIn(results[1], made))
    for each in standing:
        each.made.meta[LOOPED] = True
        each.original.replace_all_uses_with(each.made)
    return standing


def _loop() -> Any:
    return torch.ops.transformers.grouped_mm_fallback.default  # which is there where its gradients are
