"""Several products in one launch, each with its epilogue, against torch.bmm alone and with the epilogue behind it.

Run: python -m bench.batched [--commit HASH] [--out FOLDER]
Claim: an untuned kernel of `mm * s` is 0.95 times as fast as torch.bmm alone and more. Of the other program nothing is claimed: gelu's arithmetic takes
longer than many of these products. Contenders are interleaved, and the L2 cache is cold. A wrong answer is not timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import epigen
from bench import record, timing
from bench.record import Report
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, extents

BMM, EAGER, OURS = "bmm", "bmm and the epilogue", "epigen"
CLAIMED = 0.95
"""Of torch.bmm's speed."""
SCALED, BIASED = "mm * s", "gelu(mm + bias)"
SHAPES: tuple[Shape, ...] = (
    (64, 1024, 1024, 128), (64, 512, 512, 64), (16, 2048, 2048, 64), (16, 2048, 128, 2048), (32, 512, 512, 512), (8, 1024, 4096, 1024), (128, 256, 1024, 1024),
    (8, 4096, 4096, 512),
)  # fmt: skip
"""Products, M, N, K: scores of attention and what they weigh, experts of equal load, parts of a long product."""


@dataclass(frozen=True, slots=True)
class Case:
    """layout: of the operands, as `codegen.spec.LAYOUTS` has it. eager: the epilogue as torch writes it, of torch.bmm's result."""

    program: str
    shape: Shape
    layout: str
    eager: Callable[..., Tensor]

    def operands(self) -> tuple[Tensor, Tensor]:
        count, m, n, k = torch.Size(self.shape)
        a, b = torch.randn(count, m, k, device="cuda").bfloat16(), torch.randn(count, n, k, device="cuda").bfloat16().mT
        return a, b if self.layout == "nt" else b.contiguous()

    def inputs(self) -> dict[str, Any]:
        return {"s": 0.125} if self.program == SCALED else {"bias": torch.randn(self.shape[-2], device="cuda").bfloat16()}


def _scaled(mm: Tensor, s: float) -> Tensor:
    return mm * s


def _biased(mm: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.gelu(mm + bias)


CASES = tuple(Case(text, shape, layout, eager) for shape in SHAPES for text, layout, eager in ((SCALED, "nt", _scaled), (BIASED, "nn", _biased)))


def measured(case: Case) -> dict[str, Any]:
    """One row."""
    (a, b), inputs, kernel = case.operands(), case.inputs(), epigen.compile(case.program)
    contenders: Mapping[str, Callable[[], Tensor]] = {
        BMM: lambda: torch.bmm(a, b), EAGER: lambda: case.eager(torch.bmm(a, b), **inputs), OURS: lambda: kernel(a, b, **inputs),
    }  # fmt: skip
    right = case.eager(torch.bmm(a.float(), b.float()), **{name: v.float() if isinstance(v, Tensor) else v for name, v in inputs.items()})
    torch.testing.assert_close(contenders[OURS]().float(), right, rtol=2e-2, atol=2e-2)
    row = {"program": case.program, "shape": case.shape, "dtype": "bf16", "layout": case.layout, "config": str(kernel.config)}
    return row | {"timing": timing.cold(contenders, budget_s=2.0)}


def of_bmm(row: Mapping[str, Any]) -> float:
    """How many times as fast as the bare products."""
    return float(row["timing"][BMM]["median_us"] / row["timing"][OURS]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claim."""
    return {"claimed": CLAIMED, "holds": all(of_bmm(row) >= CLAIMED for row in rows if row["program"] == SCALED)}


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    options = parser.parse_args()
    record.gpu_at_hand(machine)
    torch.manual_seed(0)
    rows = []
    for case in CASES:
        rows.append(measured(case))
        times = ", ".join(f"{name} {found['median_us']:.1f} us" for name, found in rows[-1]["timing"].items())
        print(f"{extents(case.shape)} {case.program}: {times}; {of_bmm(rows[-1]):.3f} of bmm by {rows[-1]['config']}", flush=True)
    print(record.write("batched", Report("bench.batched", record.environment(options.commit), rows, verdict(rows)), options.out))


if __name__ == "__main__":
    main()
