"""Outputs in fp8 with a scale for each 128 columns of a row, out of one kernel, against torch's product and one pass that torch.compile makes.

Run: python -m bench.quantized_outputs [--commit HASH] [--out FOLDER] [--tuned] [--seconds S] [SHAPES]
Claim: of fp8 with scales in blocks CLAIMED of `torch.nn.functional.scaled_mm` and the pass; of bf16 nothing is claimed. SHAPES are those of one product. Beside
it the product alone, which of SwiGLU is one with twice the columns, and epigen's kernel that leaves the same tile in bf16. Contenders are interleaved, and the
L2 cache is cold. A wrong answer is not timed. --tuned: tune both kernels of each first where no record has them, into the user's database; into a result of
its own. --seconds: after so many no further case is begun, and the result says how many were left out.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import block_scales, checked, gated, record, timing
from bench.block_scales import Operands
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, extents
from epigen.training.fp8 import quantised

SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192), (8192, 8192, 1024), (4096, 14336, 4096), (4096, 4096, 4096), (512, 4096, 4096), (64, 8192, 8192), (16, 4096, 4096),
)  # fmt: skip
BLOCK = 128
"""Columns that share a scale."""
PRODUCT, COMPILED, OURS, PLAIN = "product", "product, torch.compile", "epigen", "epigen, bf16"
CLAIMED = 1.05
NEAR, ROUNDED = 1e-2, 4e-2
"""How far off an answer may be as a whole, and one in fp8, of which rounding alone makes 0.026."""


@dataclass(frozen=True, slots=True)
class Case:
    """name: in tables. tile: what is quantised, for epigen. eager: the same for torch, of the product and the inputs. products: side by side in torch's one.

    dtype: of both operands.
    """

    name: str
    tile: str
    eager: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    products: int = 1
    dtype: str = "bf16"

    @property
    def programs(self) -> dict[str, str]:
        """Of epigen's two contenders."""
        return {
            PLAIN: self.tile if self.dtype == "bf16" else f"cast({self.tile}, bf16)",
            OURS: f"q, s = quantize({self.tile}, fp8e4m3, n/{BLOCK}); q, s",
        }

    def right(self, given: Operands) -> Tensor:
        """The tile in fp32, [M, N]."""
        return self.eager(given.exact(), {name: t.float() for name, t in given.inputs.items()})


def _swiglu(both: Tensor, _: Mapping[str, Tensor]) -> Tensor:
    gate, up = both.chunk(2, 1)
    return functional.silu(gate) * up


BLOCK_SCALES = Case("fp8, scales in blocks", block_scales.TILE, lambda mm, _: mm, dtype="fp8e4m3")
CASES = (
    Case("mm", "mm", lambda mm, _: mm),
    Case("gelu + bias", "gelu(mm + bias)", lambda mm, inputs: functional.gelu(mm + inputs["bias"])),
    Case("SwiGLU", gated.GATED, _swiglu, products=2),
    BLOCK_SCALES,
)


def operands(case: Case, shape: Shape, device: str = "cuda") -> Operands:
    """Random ones, of which a product of bf16 has a standard deviation near 1."""
    if case is BLOCK_SCALES:
        return block_scales.operands(shape, device)
    m, n, k = shape[-3:]
    x, w = torch.randn(m, k, device=device).bfloat16(), (torch.randn(case.products * n, k, device=device) / k**0.5).bfloat16().t()
    inputs = {"bias": torch.randn(n, device=device).bfloat16(), "up": w[:, n:]}
    own = {name: t for name, t in inputs.items() if name in case.tile}
    return Operands(x, w[:, :n], own, lambda: torch.mm(x, w), lambda: x.float() @ w.float())


def contenders(case: Case, given: Operands, kernels: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[[], Any]]:
    """Of which COMPILED and OURS give values and scales. kernels: epigen's, by contender."""
    torch._dynamo.reset()  # each shape is compiled by itself, and torch gives up after eight
    behind = torch.compile(lambda mm: quantised(case.eager(mm, given.inputs), 1, BLOCK), fullgraph=True, dynamic=False)
    ours = {name: functools.partial(kernel, given.a, given.b, **given.inputs) for name, kernel in kernels.items()}
    return {PRODUCT: given.product, COMPILED: lambda: behind(given.product()), **ours}


def check(found: Mapping[str, Callable[[], Any]], right: Tensor, where: str) -> None:
    """Raises Wrong where one of the contenders is. right: the tile in fp32, [M, N]."""
    checked.near(found[PLAIN](), right, NEAR, f"{PLAIN} at {where}")
    for name in (COMPILED, OURS):
        values, scales = found[name]()
        checked.near(scales, quantised(right, 1, BLOCK)[1], NEAR, f"the scales of {name} at {where}")
        checked.near(block_scales.wide(values, scales, 1), right, ROUNDED, f"{name} at {where}")


def of(row: Mapping[str, Any], peer: str, contender: str = OURS) -> float:
    """How many times as fast as a peer."""
    return float(row["timing"][peer]["median_us"] / row["timing"][contender]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claim."""
    shares = [of(row, COMPILED) / CLAIMED for row in rows if row["program"] == BLOCK_SCALES.name]
    return {"claimed": CLAIMED, "met": sum(share >= 1 for share in shares), "of": len(shares), "worst": round(min(shares, default=0.0), 3)}


def measured(case: Case, shape: Shape) -> dict[str, Any]:
    """One row."""
    given, kernels = operands(case, shape), {name: epigen.compile(program) for name, program in case.programs.items()}
    found = contenders(case, given, kernels)
    check(found, case.right(given), f"{extents(shape)}, {case.name}")
    configs = {name: str(kernel.config) for name, kernel in kernels.items()}
    return {"program": case.name, "shape": list(shape), "dtype": case.dtype, "configs": configs, "timing": timing.cold(found, budget_s=1.0)}


def said(row: Mapping[str, Any]) -> str:
    return (
        f"{row['timing'][PRODUCT]['median_us']:.1f} us; of the product {of(row, PRODUCT):.3f}, torch.compile {of(row, PRODUCT, COMPILED):.3f}; "
        f"{of(row, COMPILED):.3f} of torch.compile, {of(row, PLAIN):.3f} of bf16; {row['configs'][OURS]}"
    )


def main(machine: Machine = THIS_MACHINE) -> None:
    options = record.options_with_shapes(__doc__, SHAPES, seconds=480.0)
    target, environment = record.gpu_at_hand(machine), record.environment(options.commit)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    todo, begun = list(product(options.shapes, CASES)), time.monotonic()
    for shape, case in todo:
        if rows and time.monotonic() - begun > options.seconds:
            break
        if options.tuned:
            epigen.tune(case.programs.values(), shape, dtype=case.dtype, missing=True)
        rows.append(row := measured(case, shape))
        print(f"{extents(shape)} {case.name}: {said(row)}", flush=True)
        about = verdict(rows) | {"left_out": len(todo) - len(rows)}
        written = record.write_rows("quantized_outputs", target, environment, rows, about, options)
    print(f"{written}, {len(todo) - len(rows)} of {len(todo)} left out")


if __name__ == "__main__":
    main()
