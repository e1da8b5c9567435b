"""Runs a kernel on sample inputs and measures it against the float64 oracle, within the bound that dtype and K allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epigen.codegen.lower import output_dtype
from epigen.dtypes import BY_TORCH, FP32, UINT8, DType
from epigen.errors import VerificationError
from epigen.ir import bound, reference
from epigen.ir import graph as g
from epigen.ir.bound import Difference, Expected
from epigen.ir.eager import as_eager_of
from epigen.ir.graph import Graph
from epigen.runtime.kernel import Kernel
from epigen.shapes import Shape


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of one call. Of several products what has more than two dimensions is each one's own, along the first.

    groups: the index, "m" or "k", along which the call takes the products as groups; else "".
    """

    a: Tensor
    b: Tensor
    inputs: Mapping[str, Any]
    groups: str = ""

    def call(self, kernel: Kernel, out: Any = None) -> Callable[[], Any]:
        """What calls it with these, of groups with all that they have one behind another."""
        a, b, inputs = self.a, self.b, dict(self.inputs)
        if self.groups:
            count, along = a.shape[0], "mk".index(self.groups)
            extent = a.shape[1 + along]
            a, b = _one_behind_another(a, along), b if self.groups == "m" else _one_behind_another(b, 0)
            for node in kernel.graph.inputs():
                value, indices = inputs[node.name], node.indices
                if isinstance(value, Tensor) and self.groups in indices and self.groups not in g.shared_along(node):
                    of_each = value if value.dim() > len(indices) else value.expand(count, *value.shape)
                    inputs[node.name] = _one_behind_another(of_each, indices.index(self.groups))
            inputs[g.GROUPS] = extent * torch.arange(1, count + 1, dtype=torch.int32, device=a.device)
        return lambda: kernel(a, b, out=out, **inputs)

    def products(self) -> list[Sample]:
        """The arguments of each product; these where operands are matrices."""
        if self.a.dim() == 2:
            return [self]
        several = self.inputs.items()
        return [
            Sample(a, b, {name: value[i] if isinstance(value, Tensor) and value.dim() > 2 else value for name, value in several})
            for i, (a, b) in enumerate(zip(self.a, self.b, strict=True))
        ]


def _one_behind_another(t: Tensor, index: int) -> Tensor:
    """Several matrices or vectors as one, along an index of theirs, which lies in memory as they do."""
    if t.dim() == 3 and t.stride(-1) != 1:
        return _one_behind_another(t.mT, 1 - index).mT
    return t.movedim(0, index).flatten(index, index + 1)


@dataclass(frozen=True, slots=True)
class Oracle:
    """What the float64 oracle has of a call. products: of each product its outputs. several: whether results have a dimension of products. rows: of each output,
    whether it has those of all groups one behind another."""

    products: list[list[Expected]]
    several: bool
    rows: tuple[bool, ...]

    @classmethod
    def of(cls, graph: Graph, given: Sample, precision: str = "ieee", rounding: str = "", product: DType | None = None) -> Oracle:
        """rounding: "eager" where each operation is rounded; the bound then has the error of each. product: what the product is rounded to, if it is."""
        if rounding:
            graph = as_eager_of(graph, given.a, given.b, given.inputs)
        dtypes = [output_dtype(graph, o, BY_TORCH[str(given.a.dtype)]) for o in graph.outputs]
        by_rows, m = given.groups == "m", given.a.shape[-2]
        products = [
            bound.expect(graph, one.a, one.b, one.inputs, dtypes, precision, *((i * m, 0) if by_rows else (0, i)), product)
            for i, one in enumerate(given.products())
        ]
        return cls(products, given.a.dim() > 2, tuple(by_rows and "m" in graph.nodes[o.node].indices for o in graph.outputs))

    def differences(self, results: Any) -> list[Difference]:
        """Each output against it; of several products the first that is out of bounds, and else the first. results: what the kernel returned."""
        held = [results] if isinstance(results, Tensor) else list(results)
        held = [r.unflatten(0, (len(self.products), -1)) if joined else r for r, joined in zip(held, self.rows, strict=True)]
        by_product = [[bound.compare(r[i] if self.several else r, e) for r, e in zip(held, expected, strict=True)] for i, expected in enumerate(self.products)]
        return [next((d for d in of_output if not d.ok), of_output[0]) for of_output in zip(*by_product, strict=True)]


def sample(
    graph: Graph, shape: Shape, a: DType, b: DType, inputs: DType | Mapping[str, DType], *,
    seed: int = 0, device: str = "cpu", layout: str = "nn", integers: bool = False, scalars_by_value: bool = True,
) -> Sample:  # fmt: skip
    """Random arguments for a program, of normal distribution and scaled so that mm has a standard deviation near 1.

    Of several products each has operands, tiles and masks of its own, and vectors are the same for all. inputs: dtype of the inputs that have indices, for all or each. integers: small whole numbers instead, whose sums are exact in every dtype.
    On the meta device the tensors have dtypes, shapes and strides alone.
    """
    lead, (m, n, k) = shape[:-3], shape[-3:]
    extents, period = {"m": m, "n": n, "k": k}, max(1, min(m, n) // 3)
    generator = torch.Generator(device).manual_seed(seed) if device != "meta" else None

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, device=device)

    def tensor(dtype: DType, *size: int, scale: float = 1.0, transposed: bool = False) -> Tensor:
        if transposed:
            return tensor(dtype, *size[:-2], size[-1], size[-2], scale=scale).mT
        wanted = reference.torch_dtype(dtype)
        if generator is None:  # arithmetic on a meta tensor would import torch's whole compiler
            return torch.empty(size, dtype=wanted, device=device)
        if dtype == UINT8:
            return whole(0, 5 if integers else 19, *size).to(wanted)
        if integers:
            return whole(-2, 3, *size).to(wanted)
        return (normal(*size) * scale).to(wanted) if dtype.is_float else whole(-9, 10, *size).to(wanted)

    def mask() -> Tensor:
        if generator is None:
            return torch.empty((*lead, m, g.mask_stride(n)), dtype=torch.uint8, device=device)[..., : -(-n // 8)]
        return reference.pack(torch.rand((*lead, m, n), generator=generator, device=device) < 0.5)

    def right() -> Tensor:
        return tensor(b, *lead, k, n, scale=max(k, 1) ** -0.5, transposed=layout[1] == "t")

    def packed() -> Tensor:
        size = (*lead, *(extent // (1 + (graph.packed_along() == index)) for index, extent in zip("kn", (k, n), strict=True)))
        held = (*size[:-2], size[-1], size[-2]) if layout[1] == "t" else size
        bytes_ = whole(0, 256, *held).to(torch.uint8) if generator is not None else torch.empty(held, dtype=torch.uint8, device=device)
        return bytes_.mT if layout[1] == "t" else bytes_

    named: dict[str, Any] = {}
    second = graph.second()
    for node in graph.inputs():
        dtype = inputs if isinstance(inputs, DType) else inputs.get(node.name, FP32)
        if node.op == g.BITS:
            named[node.name] = mask()
        elif node.kind == g.SEED:
            named[node.name] = whole(-(1 << 62), 1 << 62, 1) if generator is not None else torch.empty(1, dtype=torch.int64, device=device)
        elif node == second:
            named[node.name] = right()
        elif node.indices:
            own = g.held(node.indices, node.blocks, {i: period if i in g.periodic(node.indices, node.periods) else extent for i, extent in extents.items()})
            named[node.name] = tensor(dtype, *(lead if len(node.indices) == 2 else ()), *own)
        else:
            value = 2.0 if integers or generator is None else 0.5 + torch.rand((), generator=generator, device=device).item()
            named[node.name] = value if scalars_by_value else torch.tensor([value], device=device).to(reference.torch_dtype(dtype))
    return Sample(tensor(a, *lead, m, k, transposed=layout[0] == "t"), packed() if graph.packed() else right(), named)


def pruned(given: Sample, operand: str) -> Sample:
    """The same, with 0 for the two smaller ones of each four values along k of an operand, "a" or "b"."""
    t = (given.a if operand == "a" else given.b.mT).contiguous()
    smaller = t.float().abs().view(-1, 4).argsort(dim=-1, stable=True)[:, :2]
    held = t.view(torch.int8) if t.element_size() == 1 else t  # in which torch writes fp8, whose 0 it is too
    t = held.view(-1, 4).scatter(1, smaller, 0).view(t.shape).view(t.dtype)
    return replace(given, a=t) if operand == "a" else replace(given, b=t.mT)


def differences(kernel: Kernel, given: Sample, precision: str = "ieee", out: Any = None) -> dict[str, Difference]:
    """Each output of one call against the oracle."""
    results = given.call(kernel, out)()
    compared = Oracle.of(kernel.graph, given, precision, kernel.numerics.rounding).differences(results)
    return {o.name: d for o, d in zip(kernel.graph.outputs, compared, strict=True)}


def demand(by_output: Mapping[str, Difference]) -> None:
    """Raises VerificationError for the first output that is out of bounds."""
    for name, d in by_output.items():
        if not d.ok:
            raise VerificationError(f"output '{name}' is wrong at {list(d.where)}: the error is {d.error:.3g}, and the bound {d.bound:.3g}")
