"""Calls of several products at once: tensors with leading dimensions, each seen as one matrix or vector and the distance to the next.

Leading dimensions broadcast as `torch.matmul` has them. A launch takes one distance for each tensor, 0 where all products share it, so those of a tensor
have to lie evenly. Raises CallError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.graph import PRODUCT, Graph, Node
from epigen.runtime.arguments import reach
from epigen.runtime.outputs import Out, allocator
from epigen.shapes import Shape, power_of_two


@dataclass(frozen=True, slots=True)
class Batch:
    """The products of a call. lead: the leading dimensions of its results. strides: by tensor, elements from one product's to the next one's.
    groups: the index, "m" or "k", of which each product has so much as only the device knows, one's behind another's; "" where all have all of it."""

    lead: tuple[int, ...]
    strides: Mapping[str, int]
    groups: str = ""

    @property
    def count(self) -> int:
        return math.prod(self.lead)

    def lead_of(self, indices: str) -> tuple[int, ...]:
        """The leading dimensions of a result: those of all groups' rows lie one after another."""
        return () if self.groups and self.groups in indices else self.lead

    def problem(self, m: int, n: int, k: int) -> Shape:
        """The shape of all of it. m, n, k: of what a call is given of one product; of groups, of all, which are taken to be alike. Of their k the least power of two that is
        no smaller, as many rows, of which each call has others, have one config up to such a number."""
        if self.groups == "m":
            m = -(-m // self.count)
        elif self.groups:
            k = power_of_two(-(-k // self.count)) if k else 0
        return self.count, m, n, k

    def stacked(self, name: str, t: Tensor) -> Tensor:
        """All matrices of a tensor, [products, rows, columns], where what all share, and what has all groups' rows, stands for each at a distance of 0. name: of the tensor.

        TMA takes such a distance, and one shorter than a row's, as heads have it that lie side by side (H100, driver 580, 2026-11)."""
        return t.as_strided((self.count, *t.shape[-2:]), (self.strides.get(name, 0), *t.stride()[-2:]))


def one(declared: Mapping[str, Node], operands: tuple[Any, ...], inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any], Batch | None]:
    """What the first of a call's products is given, and all of them; the same, and None, where there are no leading dimensions. declared: the program's inputs.

    Its checks are of leading dimensions alone: what remains is as in a call of matrices.
    """
    several = operands or (inputs.get(PRODUCT),)
    if not any(isinstance(t, Tensor) and t.dim() > 2 for t in several) or not all(isinstance(t, Tensor) and t.dim() >= 2 for t in several):
        return operands, inputs, None
    names = [f"operand {name}" for name in g.OPERANDS] if operands else [PRODUCT]
    lead = _broadcast(names, several)
    strides: dict[str, int] = {}
    first = []
    for name, operand in zip(g.OPERANDS, operands, strict=False):
        held, strides[name] = matrix(f"operand {name}", operand, 2, lead)
        first.append(held)
    given = dict(inputs)
    for name, node in declared.items():
        value = inputs.get(name)
        if isinstance(value, Tensor) and node.indices:
            given[name], strides[name] = matrix(PRODUCT if name == PRODUCT else f"input '{name}'", value, len(node.indices), lead)
    return tuple(first), given, Batch(lead, strides)


def with_outputs(batch: Batch, all_outputs: Sequence[Out], outs: Mapping[str, Tensor], m: int, n: int) -> tuple[dict[str, Tensor], Batch]:
    """The caller's buffers as the first product writes them, and the batch with the strides of all_outputs, the program's. m, n: of each product."""
    first: dict[str, Tensor] = {}
    strides = {**batch.strides, PRODUCT: m * n}
    for out in all_outputs:
        lead = batch.lead_of(out.indices)
        if lead:
            strides[out.name] = math.prod(out.held(m, n).shape)
        if out.name in outs and lead:
            first[out.name], strides[out.name] = _given(outs[out.name], out, batch)
        elif out.name in outs:
            first[out.name] = outs[out.name]
    return first, replace(batch, strides=strides)


def _given(t: Any, out: Out, batch: Batch) -> tuple[Tensor, int]:
    """One of the caller's buffers, as the first product writes it, and the distance to what the next one does."""
    own = len(out.indices)
    if not isinstance(t, Tensor) or tuple(t.shape[: t.dim() - own]) != batch.lead:
        actual = list(t.shape) if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise CallError(f"out for '{out.name}' is {actual}, and a tensor with the leading dimensions {list(batch.lead)} was expected")
    if not batch.count:  # nothing is written
        return t.new_empty(t.shape[t.dim() - own :]), 0
    held, stride = matrix(f"out for '{out.name}'", t, own, batch.lead)
    if batch.count > 1 and stride <= reach(held) and not _lie_between(held, batch.count, stride):
        raise CallError(f"out for '{out.name}' has strides {list(t.stride())}: several products would share places in it, and each wants its own")
    return held, stride


def _lie_between(t: Tensor, count: int, step: int) -> bool:
    """Whether so many matrices or vectors share no place though each begins before the one in front of it ends, as heads lie side by side: every stride,
    beginning with the smallest, leads past all that is reached by those before it."""
    past = 0
    for stride, size in sorted(pair for pair in zip((step, *t.stride()), (count, *t.shape), strict=True) if pair[1] > 1):
        if stride <= past:
            return False
        past += (size - 1) * stride
    return True


def _broadcast(names: Sequence[str], several: Sequence[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*(t.shape[:-2] for t in several)))
    except RuntimeError:
        shapes = " and ".join(f"{name} is {list(t.shape)}" for name, t in zip(names, several, strict=True))
        raise CallError(f"{shapes}: the dimensions before the last two do not broadcast") from None


def matrix(what: str, t: Tensor, own: int, lead: tuple[int, ...]) -> tuple[Tensor, int]:
    """The first of a tensor's matrices or vectors, of so many own dimensions, and the elements from one to the next."""
    dims = t.dim() - own
    if dims < 1:
        return t, 0
    pairs = zip(reversed(t.shape[:dims]), reversed(lead), strict=False)
    if dims > len(lead) or any(size not in (1, wanted) for size, wanted in pairs):
        raise CallError(f"{what} is {list(t.shape)}: its leading dimensions {list(t.shape[:dims])} do not broadcast to the product's {list(lead)}")
    if 0 in lead:  # there is none
        return t.new_zeros(()).expand(t.shape[dims:]), 0
    whole = t.expand(*lead, *t.shape[dims:])
    along = [(size, stride) for size, stride in zip(lead, whole.stride(), strict=False) if size != 1]
    if any(outer != size * stride for (_, outer), (size, stride) in itertools.pairwise(along)):
        raise CallError(
            f"{what} is {list(t.shape)} with strides {list(t.stride())}: its matrices do not lie evenly, pass a copy as {list(whole.shape)} by .expand(…).contiguous()"
        )
    return t.as_strided(t.shape[dims:], t.stride()[dims:]), along[-1][1] if along else 0


# -- the reference


def evaluate(
    graph: Graph, lead: tuple[int, ...], operands: tuple[Tensor, ...], inputs: Mapping[str, Any], shape: tuple[int, int, int], outs: Sequence[Out], on: torch.device,
    by_rows: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The outputs by the reference, one product after another. shape: M, N, K of each. by_rows: as of `reference.evaluate`."""
    (m, n, _), count = shape, math.prod(lead)
    named = {node.name: node for node in graph.inputs()}
    results = [out.held(m, n, (count,)).empty(allocator(on)) for out in outs]
    # where the product is given, operands without a k have its extents and its device
    several = [_several(t, 2, lead) for t in operands] or [torch.empty((count, m, 0), device=on), torch.empty((count, 0, n), device=on)]
    given = {
        name: _several(value, len(named[name].indices), lead) if isinstance(value, Tensor) and named[name].indices else value for name, value in inputs.items()
    }
    for i in range(count):
        own = {name: value[i] if isinstance(value, Tensor) and named[name].indices else value for name, value in given.items()}
        for result, output in zip(
            results, reference.evaluate(graph, several[0][i], several[1][i], own, [out.dtype for out in outs], by_rows, number=i), strict=True
        ):
            result[i].copy_(output)
    return [result.unflatten(0, lead) for result in results]


def _several(t: Tensor, own: int, lead: tuple[int, ...]) -> Tensor:
    """All matrices or vectors of a tensor in a row."""
    size = t.shape[t.dim() - own :]
    return t.expand(*lead, *size).reshape(math.prod(lead), *size)
