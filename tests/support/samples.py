"""Tensors that kernels are tried on."""

from __future__ import annotations

import torch
from cases import Case

from epigen.runtime import verify
from epigen.runtime.kernel import Kernel


def arguments(case: Case, kernel: Kernel, device: str) -> verify.Sample:
    given = verify.sample(
        kernel.graph, case.shape, case.a, case.b or case.a, case.inputs, seed=1, device=device, layout=case.layout,
        integers=case.integers, scalars_by_value=case.by_value,
    )  # fmt: skip
    inputs = {name: viewed(value, case.view) if isinstance(value, torch.Tensor) else value for name, value in given.inputs.items()}
    return verify.Sample(viewed(given.a, case.view), viewed(given.b, case.view), inputs)


def viewed(t: torch.Tensor, view: str) -> torch.Tensor:
    """The same shape, lying differently in memory."""
    if view == "sliced":
        larger = torch.zeros([2 * size + 3 for size in t.shape], dtype=torch.uint8, device=t.device).to(t.dtype)
        inner = larger[tuple(slice(1, 2 * size + 1, 2) for size in t.shape)]
        return inner.copy_(t)
    if view == "expanded":
        return t[:1].expand(t.shape)
    if view == "shifted":
        flat = torch.zeros(t.numel() + 1, dtype=torch.uint8, device=t.device).to(t.dtype)
        return flat[1:].view(t.shape).copy_(t)
    return t


def sparse(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of small integers in memory of which only the pages are there that it lies on."""
    reach = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return torch.empty(reach + 1, dtype=dtype).as_strided(size, stride).copy_(torch.randint(-2, 3, size))
