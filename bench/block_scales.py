"""Products of fp8 with a scale for each 1x128 of the left operand and each 128x128 of the right one, as DeepSeek-V3 has them, against torch's own.

Run: python -m bench.block_scales [--commit HASH] [--out FOLDER] [--tuned] [SHAPES]
Claim: CLAIMED of `torch.nn.functional.scaled_mm` with the same scales, which is cuBLAS. Beside it cuBLAS with a scale a row and a column and without fast
accumulation. Contenders are interleaved, and the L2 cache is cold. A wrong answer is not timed. --tuned: tune each problem first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import checked, record, timing
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, extents

SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 4096, 4096), (8192, 8192, 1024), (512, 4096, 4096), (64, 8192, 8192),
)  # fmt: skip
TILE = "dot(a * sa[m,k/128], b * sb[k/128,n/128])"
PROGRAM = f"cast({TILE}, bf16)"
OURS, TORCH, ROWS = "epigen", "torch", "cuBLAS, scales of rows"
CLAIMED = 1.00


def of_torch(row: Mapping[str, Any]) -> float:
    """How many times as fast as torch's product with the same scales."""
    return float(row["timing"][TORCH]["median_us"] / row["timing"][OURS]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claim."""
    shares = [of_torch(row) for row in rows]
    return {"claimed": CLAIMED, "met": sum(share >= CLAIMED for share in shares), "of": len(shares), "worst": round(min(shares), 3)}


@dataclass(frozen=True, slots=True)
class Operands:
    """What a product takes. a: [M, K]. b: [K, N]. inputs: of epigen's kernel. product: torch's call, in bf16. exact: the same in fp32."""

    a: Tensor
    b: Tensor
    inputs: Mapping[str, Tensor]
    product: Callable[[], Tensor]
    exact: Callable[[], Tensor]


def operands(shape: Shape, device: str = "cuda") -> Operands:
    """Random ones in fp8, for TILE. The scales of rows lie along m, as torch asks."""
    m, n, k = shape[-3:]
    x, w = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    sx, sw = (torch.rand(k // 128, m, device=device) + 0.5).t(), torch.rand(n // 128, k // 128, device=device) + 0.5
    kind = functional.ScalingType
    return Operands(
        x, w.t(), {"sa": sx, "sb": sw.t()},
        functools.partial(functional.scaled_mm, x, w.t(), sx, kind.BlockWise1x128, sw.t(), kind.BlockWise128x128, output_dtype=torch.bfloat16),
        lambda: wide(x, sx, 1) @ wide(w, sw, 128).t(),
    )  # fmt: skip


def measured(shape: Shape, tuned: bool = False) -> dict[str, Any]:
    """One row."""
    m, n = shape[-3:-1]
    given = operands(shape)
    if tuned:
        epigen.tune(PROGRAM, shape, dtype="fp8e4m3")
    kernel = epigen.compile(PROGRAM)
    contenders: dict[str, Callable[[], Any]] = {OURS: lambda: kernel(given.a, given.b, **given.inputs), TORCH: given.product}
    right = given.exact()
    for name, run in contenders.items():
        checked.near(run(), right, 1e-2, f"{name} at {extents(shape)}")
    del right
    ones = {"scale_a": torch.ones(m, 1, device="cuda"), "scale_b": torch.ones(1, n, device="cuda")}
    contenders[ROWS] = functools.partial(torch._scaled_mm, given.a, given.b, out_dtype=torch.bfloat16, **ones)
    return {"program": PROGRAM, "shape": list(shape), "dtype": "fp8e4m3", "config": str(kernel.config), "timing": timing.cold(contenders, budget_s=1.0)}


def wide(values: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Scaled, in fp32. scales: of so many rows and 128 columns each."""
    return values.float() * scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)


def said(row: Mapping[str, Any]) -> str:
    times = ", ".join(f"{name} {found['median_us']:.1f} us" for name, found in row["timing"].items())
    return f"{of_torch(row):.3f} of torch's; {times}; {row['config']}"


def main(machine: Machine = THIS_MACHINE) -> None:
    torch.manual_seed(0)
    record.each_shape("block_scales", __doc__, SHAPES, machine, measured, said, verdict)


if __name__ == "__main__":
    main()
