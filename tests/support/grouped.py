"""Calls of groups: ends of every kind, what the groups of rows of a call are given, and whether each has what it has alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import cases
import torch
from torch import Tensor

import epigen
from epigen.codegen.spec import KernelConfig

M, N, K = 40, 48, 32
EXTENT = 40
"""Of what groups are along: rows, or k."""
ENDS: Mapping[str, Sequence[int]] = {
    "alike": (10, 20, 30, 40),
    "one": (40,),
    "empty ones": (0, 0, 25, 25, 40),
    "rows of none": (7, 19),
    "past the end": (5, 50, 60),
    "falling": (20, 10, 40),
    "below 0": (-3, 12, 40),
    "each row, and more": tuple(range(200)),
    "none at all": (0, 0, 0),
}
ROWS = "z = mm * alpha + bias + scale_a[m] + residual; y = drelu(z, mask); y, bitmask(z > 0), bgrad(y), sum(y, n), amax(y), sum(a, k), sum(b, k) * bias"
"""Of rows: what has no rows is each group's."""
OF_K = "z = mm * alpha + bias + residual; z, sum(z, m), sum(a, k), sum(b, k), amax(z, n)"
"""Of groups along k."""
TILED: Mapping[str, KernelConfig] = {
    "tiled": cases.tiled(32, 32, 32, prefetch=1),
    "tiled, small tiles": cases.tiled(16, 16, 16),
    "tiled, rows of tiles": cases.tiled(16, 32, 32, group_m=4),
}
HOPPER: Mapping[str, KernelConfig] = {
    "cooperative": cases.warp_specialized(128, 32, tma_store=0),
    "cooperative, subtiles": cases.warp_specialized(128, 64, subtiles=2, prefetch=1, group_m=1),
    "cooperative, all by TMA": cases.warp_specialized(128, 64, subtiles=2, tma_load=1),
    "ping-pong": cases.warp_specialized(64, 32, pingpong=1, prefetch=1, tma_store=0),
    "ping-pong, subtiles": cases.warp_specialized(64, 64, pingpong=1, subtiles=2),
    "ping-pong, all by TMA": cases.warp_specialized(64, 32, pingpong=1, tma_load=1),
}
SOME = [(ends, config) for i, ends in enumerate(ENDS) for config in [*HOPPER][i % 3 :: 6 if len(ENDS[ends]) > 100 else 3]]
"""Of all pairs a third, in which each of both stands: the GPU takes all."""


def spans(ends: Sequence[int], extent: int = EXTENT) -> list[tuple[int, int]]:
    """From where and up to where each group is."""
    reached = [min(max(0, end), extent) for end in itertools.accumulate(ends, max)]
    return list(itertools.pairwise([0, *reached]))


def whole(*size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Small integers, whose sums are exact in any order."""
    return torch.randint(-2, 3, size).to(dtype).to(device)


def given(count: int, shared: bool, m: int = M, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Of rows, by `ROWS`. shared: whether what has no rows is the same for all groups, but for b."""
    torch.manual_seed(0)
    lead = () if shared else (count,)
    inputs = {
        "alpha": 2.0,
        "bias": whole(*lead, N, dtype=dtype, device=device),
        "scale_a": whole(m, device=device),
        "residual": whole(m, N, dtype=dtype, device=device),
        "mask": torch.randint(0, 256, (m, -(-N // 8)), dtype=torch.uint8).to(device),
    }
    b = whole(count, N, K, dtype=dtype, device=device).mT
    return whole(m, K, dtype=dtype, device=device), b, inputs


def ends_of(ends: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def same(found: Sequence[Tensor], ends: Sequence[int], a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> None:
    """Whether each group has what the program makes of its rows alone, by the reference."""
    alone = epigen.compile(ROWS)
    of_rows, of_tiles = (0, 1, 3, 5), (2, 4, 6)
    to_cpu = [t.cpu() for t in found]
    a, b, inputs = a.cpu(), b.cpu(), {name: v.cpu() if isinstance(v, Tensor) else v for name, v in inputs.items()}
    for g, (begin, end) in enumerate(spans(ends, a.shape[0])):
        own = {
            name: v[begin:end] if name in ("scale_a", "residual", "mask") else v[g] if isinstance(v, Tensor) and v.dim() > 1 else v
            for name, v in inputs.items()
        }
        expected = alone(a[begin:end], b[g], **own)
        for i in of_rows:
            torch.testing.assert_close(to_cpu[i][begin:end], expected[i], rtol=0, atol=0, equal_nan=True)
        for i in of_tiles:
            torch.testing.assert_close(to_cpu[i][g], expected[i], rtol=0, atol=0, equal_nan=True)


def along_k(count: int, dtype: torch.dtype = torch.float32, device: str = "cpu", k: int = EXTENT) -> tuple[Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    inputs = {"alpha": 2.0, "bias": whole(count, N, device=device), "residual": whole(M, N, dtype=dtype, device=device)}
    return whole(k, M, dtype=dtype, device=device).T, whole(k, N, dtype=dtype, device=device), inputs


def same_along_k(found: Sequence[Tensor], ends: Sequence[int], a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> None:
    alone = epigen.compile(OF_K)
    a, b, inputs = a.cpu(), b.cpu(), {name: v.cpu() if isinstance(v, Tensor) else v for name, v in inputs.items()}
    for g, (begin, end) in enumerate(spans(ends, b.shape[0])):
        for one, expected in zip(found, alone(a[:, begin:end], b[begin:end], **{**inputs, "bias": inputs["bias"][g]}), strict=True):
            torch.testing.assert_close(one[g].cpu(), expected, rtol=0, atol=0)
