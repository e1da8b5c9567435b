"""Calls of groups whose ends lie on the device: of rows of `a`, each with a matrix of `b`, as experts have them; or along k, each of which makes a product.

A group begins where those before it have ended. Nobody waits for the ends: how many rows a group has only the kernels find out. Raises CallError.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epigen.codegen.lower import check_grouped
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.graph import GROUPS, Graph, Node
from epigen.runtime import batches
from epigen.runtime.batches import Batch
from epigen.runtime.outputs import Out, allocator

DECLARED = Node(g.INPUT, (), g.ENDS, "", name=GROUPS)
"""The ends, as an input of the program."""


def declared(program: Mapping[str, Node], inputs: Mapping[str, Any]) -> Mapping[str, Node]:
    """A program's inputs by name, and the ends of groups behind them in a call that has such."""
    return {**program, GROUPS: DECLARED} if GROUPS in inputs and GROUPS not in program else program


def check(graph: Graph, ends: Any, on: torch.device, along: str) -> None:
    """What the call names its groups by, and whether the program can be taken of groups along an index."""
    if not isinstance(ends, Tensor) or ends.dtype != torch.int32 or ends.dim() != 1 or not ends.is_contiguous():
        found = f"{ends.dtype} {list(ends.shape)}" if isinstance(ends, Tensor) else f"a {type(ends).__name__}"
        raise CallError(f"groups is where each group ends, a contiguous int32 tensor [G], and {found} was given: pass ends.to(torch.int32)")
    if ends.device != on:
        raise CallError(f"groups is on {ends.device}, and the call's other tensors are on {on}")
    if not ends.numel():
        raise CallError("groups has no elements: a call has a group at least, which may be empty")
    check_grouped(graph, along)


def products(
    graph: Graph, declared: Mapping[str, Node], operands: tuple[Any, ...], inputs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any], Batch | None]:  # fmt: skip
    """What the first of a call's products is given, and all of them: of groups, if the call names such, else as `batches.one` has them."""
    return one(graph, declared, operands, inputs) if GROUPS in declared else batches.one(declared, operands, inputs)


def one(
    graph: Graph, declared: Mapping[str, Node], operands: tuple[Any, ...], inputs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any], Batch]:  # fmt: skip
    """As `products`, of groups. declared: the program's inputs, and the ends."""
    a, b = operands
    if not (isinstance(a, Tensor) and a.dim() == 2 and isinstance(b, Tensor) and b.dim() in (2, 3)):
        shapes = " and ".join(f"{name} is {list(t.shape) if isinstance(t, Tensor) else type(t).__name__}" for name, t in zip("ab", operands, strict=True))
        raise CallError(f"with groups, of rows a is [M, K] and b [G, K, N], and along k a is [M, K] and b [K, N]: {shapes}")
    along, ends = "m" if b.dim() == 3 else "k", inputs[GROUPS]
    check(graph, ends, a.device, along)
    lead = (ends.numel(),)
    if along == "m" and b.shape[0] != lead[0]:
        raise CallError(f"b is [G, K, N] = {list(b.shape)}, and groups has {lead[0]} ends: a matrix for each was expected")
    first, step = batches.matrix("operand b", b, 2, lead)
    strides, given = {"b": step} if along == "m" else {}, dict(inputs)
    for name, node in declared.items():
        value = inputs.get(name)
        if isinstance(value, Tensor) and node.indices and along not in node.indices:
            given[name], strides[name] = batches.matrix(f"input '{name}'", value, len(node.indices), lead)
    return (a, first), given, Batch(lead, strides, along)


def evaluate(
    graph: Graph, batch: Batch, operands: tuple[Tensor, ...], inputs: Mapping[str, Any], shape: tuple[int, int, int], outs: Sequence[Out], on: torch.device
) -> list[Tensor]:  # fmt: skip
    """The outputs by the reference, a group after the other. Rows of no group are 0."""
    along, (m, n, k) = batch.groups, shape
    named = {node.name: node for node in graph.inputs()}
    results = [out.held(m, n, batch.lead_of(out.indices)).empty(allocator(on)).zero_() for out in outs]
    own_k = {"m": m, "k": k}[along]
    ends = [min(max(0, end), own_k) for end in itertools.accumulate(inputs[GROUPS].tolist(), max)]
    a, b = operands
    for number, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        rows = slice(begin, end)
        own = {}
        for name, node in named.items():
            value = inputs[name]
            if isinstance(value, Tensor) and node.indices:
                if along in node.indices:
                    value = value if along in g.shared_along(node) else value.narrow(node.indices.index(along), begin, end - begin)
                elif value.dim() > len(node.indices):
                    value = value.expand(*batch.lead, *value.shape[1:])[number]
            own[name] = value
        left, right = (a[rows], b.expand(*batch.lead, -1, -1)[number]) if along == "m" else (a[:, rows], b[rows])
        first_row, product = (begin, 0) if along == "m" else (0, number)
        answers = reference.evaluate(graph, left, right, own, [out.dtype for out in outs], first_row=first_row, number=product)
        for result, out, answer in zip(results, outs, answers, strict=True):
            if along == "m" and "m" in out.indices:
                result[rows].copy_(answer)
            else:
                result[number].copy_(answer)
    return results
