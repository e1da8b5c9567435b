"""Runs a kernel on sample inputs and measures it against the float64 oracle, within the bound that dtype and K allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigen.codegen.lower import output_dtype
from epigen.dtypes import BY_TORCH, FP32, DType
from epigen.errors import VerificationError
from epigen.ir import bound, reference
from epigen.ir import graph as g
from epigen.ir.bound import Difference
from epigen.ir.graph import Graph
from epigen.runtime.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of one call."""

    a: Tensor
    b: Tensor
    inputs: Mapping[str, Any]


def sample(
    graph: Graph, shape: tuple[int, int, int], a: DType, b: DType, inputs: DType | Mapping[str, DType], *,
    seed: int = 0, device: str = "cpu", layout: str = "nn", integers: bool = False, scalars_by_value: bool = True,
) -> Sample:  # fmt: skip
    """Random arguments for a program, of normal distribution and scaled so that mm has a standard deviation near 1.

    shape: M, N, K. inputs: dtype of the inputs that have indices, for all or each. integers: small whole numbers instead, whose sums are exact in every dtype.
    On the meta device the tensors have dtypes, shapes and strides alone.
    """
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(seed) if device != "meta" else None

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, device=device)

    def tensor(dtype: DType, *size: int, scale: float = 1.0, transposed: bool = False) -> Tensor:
        if transposed:
            return tensor(dtype, *reversed(size), scale=scale).T
        wanted = reference.torch_dtype(dtype)
        if generator is None:  # arithmetic on a meta tensor would import torch's whole compiler
            return torch.empty(size, dtype=wanted, device=device)
        if integers:
            return whole(-2, 3, *size).to(wanted)
        return (normal(*size) * scale).to(wanted) if dtype.is_float else whole(-9, 10, *size).to(wanted)

    def mask() -> Tensor:
        if generator is None:
            return torch.empty((m, g.mask_stride(n)), dtype=torch.uint8, device=device)[:, : -(-n // 8)]
        return reference.pack(torch.rand((m, n), generator=generator, device=device) < 0.5)

    named: dict[str, Any] = {}
    for node in graph.inputs():
        dtype = inputs if isinstance(inputs, DType) else inputs.get(node.name, FP32)
        if node.op == g.BITS:
            named[node.name] = mask()
        elif node.indices:
            named[node.name] = tensor(dtype, *(shape["mnk".index(i)] for i in node.indices))
        else:
            value = 2.0 if integers or generator is None else 0.5 + torch.rand((), generator=generator, device=device).item()
            named[node.name] = value if scalars_by_value else torch.tensor([value], device=device).to(reference.torch_dtype(dtype))
    return Sample(tensor(a, m, k, transposed=layout[0] == "t"), tensor(b, k, n, scale=max(k, 1) ** -0.5, transposed=layout[1] == "t"), named)


def differences(kernel: Kernel, given: Sample, precision: str = "ieee", out: Any = None) -> dict[str, Difference]:
    """Each output of one call against the oracle."""
    found = kernel(given.a, given.b, out=out, **given.inputs)
    results = [found] if isinstance(found, Tensor) else list(found)
    graph = kernel.graph
    dtypes = [output_dtype(graph, o, BY_TORCH[str(given.a.dtype)]) for o in graph.outputs]
    expected = bound.expect(graph, given.a, given.b, given.inputs, dtypes, precision)
    return {o.name: bound.compare(r, e) for o, r, e in zip(graph.outputs, results, expected, strict=True)}


def demand(found: Mapping[str, Difference]) -> None:
    """Raises VerificationError for the first output that is out of bounds."""
    for name, d in found.items():
        if not d.ok:
            raise VerificationError(f"output '{name}' is wrong at {list(d.where)}: the error is {d.error:.3g}, and the bound {d.bound:.3g}")
