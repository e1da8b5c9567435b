"""A call of several products, of inputs and outputs of every kind: what it is given, and what torch's own operations make of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cases
import torch
from torch import Tensor

from epigen.codegen.spec import KernelConfig
from epigen.ir import reference

EVERYTHING = "z = mm * alpha + bias + scale_a[m] + residual; y = drelu(z, mask); y, bitmask(z > 0), bgrad(y), sum(y, n), amax(y), sum(a, k), sum(b, k) * bias"
"""Inputs and outputs of every kind."""

LEADS = (
    ((3,), (3,), (3,)),
    ((2, 3), (), (2, 3)),
    ((), (4,), ()),
    ((1,), (5,), (1,)),
    ((2, 3), (2, 3), (1, 1)),
    ((1,), (1,), ()),
    ((0,), (0,), ()),
    ((2, 0), (), ()),
)
"""Of a, of b, and of inputs."""


GROUPED: Mapping[str, KernelConfig] = {
    "cooperative": cases.warp_specialized(tma_load=1),
    "cooperative, subtiles": cases.warp_specialized(128, 32, subtiles=2, prefetch=1, tma_store=0, group_m=1),
    "ping-pong": cases.warp_specialized(64, 32, pingpong=1, prefetch=1),
    "ping-pong, subtiles": cases.warp_specialized(64, 64, pingpong=1, subtiles=2, tma_load=1),
    "parts": cases.warp_specialized(splits=3, prefetch=1),
    "parts, ping-pong, the last block": cases.warp_specialized(64, 64, pingpong=1, subtiles=2, splits=2, fused_finalize=1),
    "the last block": cases.warp_specialized(128, 32, fused_finalize=1),
}
"""Those of warp_specialized, which the interpreter has another schedule's kernels for."""


def given(
    lead_a: tuple[int, ...], lead_b: tuple[int, ...], lead: tuple[int, ...], m: int = 33, n: int = 45, k: int = 20, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Small integers, whose sums are exact in any order."""
    torch.manual_seed(0)

    def whole(*size: int) -> Tensor:
        return torch.randint(-2, 3, size).to(dtype)

    inputs = {"alpha": 2.0, "bias": whole(*lead, n), "scale_a": whole(*lead, m), "residual": whole(*lead, m, n), "mask": reference.pack(whole(*lead, m, n) > 0)}
    return whole(*lead_a, m, k), whole(*lead_b, k, n), inputs


def expected(a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> list[Tensor]:
    """EVERYTHING, by torch's own operations, which broadcast over leading dimensions."""
    mm = a @ b
    m, n = mm.shape[-2:]
    z = mm * inputs["alpha"] + inputs["bias"][..., None, :] + inputs["scale_a"][..., None] + inputs["residual"]
    y = torch.where(reference.unpack(inputs["mask"], n), z, 0.0)
    lead = torch.zeros(mm.shape[:-2])
    sums = a.sum(-1) + lead[..., None], (b.sum(-2) + lead[..., None]) * inputs["bias"]
    largest = y.abs().amax((-1, -2)) if m * n else lead
    return [y, z > 0, y.sum(-2), y.sum(-1), largest, *sums]


GATED = "g = mm + bias; u = dot(a, up[k,n]); y = g * u + residual; y, bgrad(u)"
"""Two products, each of a batch."""


def expected_gated(a: Tensor, b: Tensor, up: Tensor, inputs: Mapping[str, Any]) -> list[Tensor]:
    mm, u = a @ b, a @ up
    return [(mm + inputs["bias"][..., None, :]) * u + inputs["residual"], (u + torch.zeros(mm.shape[:-2])[..., None, None]).sum(-2)]


def same(found: Any, wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(reference.unpack(x, y.shape[-1]) if x.dtype == torch.uint8 else x, y), (x.shape, y.shape)
