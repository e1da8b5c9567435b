"""Activations and their derivatives as one node each, as `aten` reads them: kept whole while AOTAutograd writes a graph down, and what is left of them taken
apart as Inductor wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from epigen import ops
from epigen.training import bits, embeddings
from epigen.training.aten import SEVERAL


def _names() -> set[str]:
    rows = {pattern.partition("(")[0] for op in ops.TABLE.values() if op.group in ("activation", "derivative") for pattern in op.aten}
    return rows | {pattern.partition("(")[0] for pattern in SEVERAL if "backward" in pattern or pattern.startswith(("elu", "softplus"))}


def _parted() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Inductor's decompositions of activations and their derivatives, and all others."""
    names, whole, others = _names(), dict[Any, Any](), dict[Any, Any]()
    for target, rule in select_decomp_table().items():
        (whole if target.name().split("::")[-1].split(".")[0] in names else others)[target] = rule
    return whole, others


def kept_whole() -> dict[Any, Any]:
    """Inductor's decompositions but those of activations and their derivatives, and with a better one for small tables' gradients."""
    return _parted()[1] | {embeddings.GRADIENT: embeddings.gradient}


def decompose(graph: fx.Graph) -> None:
    """Take apart what was kept whole and is left."""
    masks = {torch.ops.epigen.bitmask.default: bits.bitmask, torch.ops.epigen.where_bits.default: bits.where_bits}
    whole, table = _parted()[0] | masks, select_decomp_table() | masks
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in whole:
            _inline(graph, node, table)
    graph.eliminate_dead_code()


def _inline(graph: fx.Graph, node: fx.Node, table: Mapping[Any, Any]) -> None:
    flat, spec = torch.utils._pytree.tree_flatten((node.args, dict(node.kwargs)))
    given = [x for x in flat if isinstance(x, fx.Node)]

    def call(*values: Any) -> Any:
        rest = iter(values)
        args, kwargs = torch.utils._pytree.tree_unflatten([next(rest) if isinstance(x, fx.Node) else x for x in flat], spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    values = [x.meta["val"] for x in given]
    mode = torch._guards.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
    with mode or torch.no_grad(), torch.no_grad():
        body = make_fx(call, decomposition_table=table)(*values)
    copied: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "call_function":
                copied[inner] = graph.node_copy(inner, copied.__getitem__)
                copied[inner].meta = dict(inner.meta)
    (output,) = body.graph.find_nodes(op="output")
    result = output.args[0]
    if isinstance(result, tuple | list):
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(copied[result[place]])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(copied[result])
    graph.erase_node(node)
