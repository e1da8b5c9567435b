"""Whether a contender's answer is right: strips of its outputs against the float64 oracle, within the bound that dtype and K allow.

A strip of rows holds whole rows of every tile, a strip of columns whole columns, and so the sums over m as well: together they cost little
at any extent, and each is computed from a call of the contender at its full shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigen.api import graph_of
from epigen.codegen.lower import output_dtype
from epigen.dtypes import BY_TORCH
from epigen.ir import bound, reference
from epigen.ir import graph as g
from epigen.ir.bound import Expected
from epigen.ir.graph import Graph
from epigen.runtime.verify import Sample

_ROWS, _COLUMNS = 128, 64  # at the begin, in the middle and at the end; columns are whole bytes of a mask
_ROUGH = 2.0**-8


class Wrong(Exception):
    """An answer that no demand allows."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What an answer is held to. words: for the record. text: the program whose bound it is; "T" stands for the operands' dtype.

    rough: 2^-8 of a value's size and of its output's typical size is allowed on top; of a mask's bits so many may differ.
    """

    words: str
    text: str
    rough: bool = False


def near(found: Tensor, right: Tensor, within: float, whose: str) -> None:
    """Raises Wrong where an answer as a whole is too far off. within: the norm of the difference, as a share of the norm of what is right."""
    if not (error := ((found.float() - right).norm() / right.norm()).item()) < within:
        raise Wrong(f"{whose} is off by {error:.4f}")


class Oracle:
    """What is right for one call."""

    def __init__(self, sample: Sample):
        self.sample = sample
        self.m, self.n = sample.a.shape[0], sample.b.shape[1]
        on = sample.a.device
        self.rows, self.columns = _strip(self.m, _ROWS).to(on), _strip(self.n, _COLUMNS).to(on)
        self.bytes = self.columns[::8] // 8
        self._known: dict[str, Any] = {}

    def demanded(self, found: Sequence[Tensor], demands: Sequence[Demand]) -> str:
        """The words of the first demand that the answer keeps. Raises Wrong, with how it misses the first of them."""
        misses = []
        for demand in demands:
            missed = self._missed(found, demand)
            if missed is None:
                return demand.words
            misses.append(missed)
        raise Wrong(misses[0])

    def _missed(self, found: Sequence[Tensor], demand: Demand) -> str | None:
        graph, strips = self._expected(demand.text)
        if len(found) != len(graph.outputs):
            raise Wrong(f"{len(found)} results in place of {len(graph.outputs)}")
        for number, (output, whole) in enumerate(zip(graph.outputs, found, strict=True)):
            node = graph.nodes[output.node]
            packed = node.kind == g.PACKED
            shape = {"mn": (self.m, self.n), "m": (self.m,), "n": (self.n,)}[node.indices]
            if tuple(whole.shape) != shape and not (packed and tuple(whole.shape) == (self.m, -(-self.n // 8))):
                raise Wrong(f"output '{output.name}' has shape {list(whole.shape)}")
            for cut, expected in strips:
                if expected[number] is None:
                    continue
                part = cut(whole, node.indices, packed and whole.dtype == torch.uint8)
                if packed and part.dtype == torch.bool:
                    part = reference.pack(part)
                if missed := _missed(part, expected[number], demand.rough):
                    return f"output '{output.name}': {missed}"
        return None

    def _expected(self, text: str) -> Any:
        if text not in self._known:
            self._known[text] = self._expect(text)
        return self._known[text]

    def _expect(self, text: str) -> tuple[Graph, list[tuple[Callable[[Tensor, str, bool], Tensor], list[Any]]]]:
        a, b = self.sample.a, self.sample.b
        dtype = BY_TORCH[str(a.dtype)]
        graph = graph_of(text.replace(", T)", f", {dtype.name})"))
        kinds = {node.name: (node.indices, node.op == g.BITS) for node in graph.inputs()}
        dtypes = [output_dtype(graph, o, dtype) for o in graph.outputs]
        strips = []
        for cut, part_a, part_b, over in ((self._of_rows, a[self.rows], b, "m"), (self._of_columns, a, b[:, self.columns], "n")):
            inputs = {name: cut(self.sample.inputs[name], *kind) for name, kind in kinds.items()}
            expected: list[Expected | None] = list(bound.expect(graph, part_a, part_b, inputs, dtypes, "ieee"))
            for number, output in enumerate(graph.outputs):
                node = graph.nodes[output.node]
                if node.indices != "mn" and over in (set("mn") - set(node.indices)):  # a sum over what the strip has only a part of
                    expected[number] = None
            strips.append((cut, expected))
        return graph, strips

    def _of_rows(self, x: Tensor, indices: str, bits: bool) -> Tensor:  # noqa: ARG002  # a row of bits is cut like any other
        return x[self.rows] if "m" in indices else x

    def _of_columns(self, x: Tensor, indices: str, bits: bool) -> Tensor:
        if "n" not in indices:
            return x
        return x[..., self.bytes if bits else self.columns]


def _strip(extent: int, width: int) -> Tensor:
    """Indices at the begin, in the middle and at the end, each part beginning at a multiple of eight, and only the last ending elsewhere."""
    last = max(0, (extent - width) // 8 * 8)
    starts = {0, extent // 2 // width * width, last}
    found = sorted({i for s in starts for i in range(s, extent if s == last else min(s + width, extent))})
    return torch.tensor(found, dtype=torch.long)


def _missed(part: Tensor, expected: Expected, rough: bool) -> str | None:
    if rough and expected.unsure is not None:
        bits = reference.unpack(part, expected.value.shape[1])
        share = ((bits != expected.value) & ~expected.unsure).double().mean().item()
        return f"{share:.2%} of the bits" if share > _ROUGH else None
    if rough:
        size = expected.value.square().mean().sqrt() + expected.value.abs()
        expected = Expected(expected.value, expected.bound + _ROUGH * size)
    difference = bound.compare(part, expected)
    return None if difference.ok else f"error {difference.error:.3g}, bound {difference.bound:.3g}"
