"""Epilogues that read or write further tensors of the result's extents, against torch.mm alone.

Run: python -m bench.tiles [--commit HASH] [--out FOLDER] [--tuned] [SHAPES]
Claim: TARGET, of several tensors and of those in fp32 as well. Contenders are interleaved, and the L2 cache is cold. A wrong answer is not timed.
--tuned: tune each first, from what is known of it on, into the user's database; into a result of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import record, timing
from epigen import gpus
from epigen.api import database
from epigen.dtypes import BF16, BY_TORCH
from epigen.gpus import Gpu, Target
from epigen.ir.program import graph_of
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, extents
from epigen.tuning.runner import GpuRunner
from epigen.tuning.task import Task
from epigen.tuning.tune import tune_one

SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 1024), (32768, 4096, 1024), (8192, 8192, 512), (4096, 4096, 4096), (2048, 2048, 2048), (3072, 12288, 3072), (131072, 512, 256),
)  # fmt: skip
MM, EAGER, OURS = "mm", "eager", "epigen"
_SLACK = 1.05
TARGET = f"1.00 of `torch.mm` where K is 2048 and more, 0.97 at 1024, 0.92 at 512, or {_SLACK:.2f} times what all bytes take at the rate of a copy, where that is longer"


@dataclass(frozen=True, slots=True)
class Program:
    """name: in tables. text: for epigen. eager: torch's operations behind the product. inputs: by name, each [M, N]. written: tensors of 16 bits in which it leaves as many bytes."""

    name: str
    text: str
    eager: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: Mapping[str, torch.dtype]
    written: int = 1

    def bytes(self, shape: Shape) -> int:
        """Of the operands, and of all that is read and written beside them: each once."""
        m, n, k = shape
        return 2 * (m * k + n * k + self.written * m * n) + m * n * sum(dtype.itemsize for dtype in self.inputs.values())


def _dgelu(mm: Tensor, z: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(mm, z, approximate="tanh")


_HALF, _WHOLE = torch.bfloat16, torch.float32
PROGRAMS = (
    Program("residual", "mm + residual", lambda mm, residual: mm + residual, {"residual": _HALF}),
    Program("silu * gate", "silu(mm) * gate[m,n]", lambda mm, gate: functional.silu(mm) * gate, {"gate": _HALF}),
    Program("dgelu_tanh", "dgelu_tanh(mm, z[m,n])", _dgelu, {"z": _HALF}),
    Program("gelu_tanh + aux", "gelu_tanh(mm), mm", lambda mm: (functional.gelu(mm, approximate="tanh"), mm), {}, written=2),
    Program("residual in fp32", "cast(mm + residual, fp32)", lambda mm, residual: mm + residual, {"residual": _WHOLE}, written=2),
    Program("silu * gate + residual", "silu(mm) * gate[m,n] + residual", lambda mm, gate, residual: functional.silu(mm) * gate + residual, {"gate": _HALF, "residual": _HALF}),
)  # fmt: skip
BY_NAME = {p.name: p for p in PROGRAMS}


def least(shape: Shape) -> float:
    """Of torch.mm's speed."""
    k = shape[-1]
    return 1.0 if k >= 2048 else 0.97 if k >= 1024 else 0.92


def allowed_us(row: Mapping[str, Any]) -> float:
    """What the claim gives the kernel."""
    by_bytes = _SLACK * BY_NAME[row["program"]].bytes(row["shape"]) / (row["copy_gbps"] * 1e3)
    return float(max(row["timing"][MM]["median_us"] / least(row["shape"]), by_bytes))


def of_mm(row: Mapping[str, Any], contender: str = OURS) -> float:
    """How many times as fast as the bare product."""
    return float(row["timing"][MM]["median_us"] / row["timing"][contender]["median_us"])


def of_target(row: Mapping[str, Any]) -> float:
    """1 and more where the claim holds."""
    return allowed_us(row) / float(row["timing"][OURS]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claim."""
    shares = [of_target(row) for row in rows]
    return {"met": sum(share >= 1 for share in shares), "of": len(shares), "worst": round(min(shares), 3)}


def task_of(program: Program, shape: Shape, target: Target) -> Task:
    """What `measured` calls, for the tuner."""
    graph = graph_of(program.text)
    inputs = tuple(BY_TORCH[str(program.inputs[i.name])] for i in graph.inputs())
    return Task(graph, shape, BF16, BF16, inputs, "nt", "ieee", target)


def measured(program: Program, shape: Shape, gpu: Gpu) -> dict[str, Any]:
    """One row."""
    m, n, k = shape
    a, b = torch.randn(m, k, device="cuda").bfloat16(), (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    inputs = {name: torch.randn(m, n, device="cuda").to(dtype) for name, dtype in program.inputs.items()}
    kernel = epigen.compile(program.text)
    contenders: dict[str, Callable[[], Any]] = {
        MM: lambda: torch.mm(a, b), EAGER: lambda: program.eager(torch.mm(a, b), **inputs), OURS: lambda: kernel(a, b, **inputs),
    }  # fmt: skip
    right = _all(program.eager(a.float() @ b.float(), **{name: x.float() for name, x in inputs.items()}))
    for found, expected in zip(_all(contenders[OURS]()), right, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=3e-2)
    row = {"program": program.name, "shape": list(shape), "dtype": "bf16", "config": str(kernel.config), "copy_gbps": gpu.achieved_gbps}
    return row | {"timing": timing.cold(contenders, budget_s=1.0)}


def _all(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def main(machine: Machine = THIS_MACHINE) -> None:
    options = record.options_with_shapes(__doc__, SHAPES)
    target = record.gpu_at_hand(machine)
    gpu, environment = gpus.of_target(target), record.environment(options.commit)
    torch.manual_seed(0)
    rows = []
    with contextlib.closing(GpuRunner()) as runner:
        for shape, program in product(options.shapes, PROGRAMS):
            if options.tuned:
                tune_one(task_of(program, shape, target), database(), runner=runner)
            rows.append(row := measured(program, shape, gpu))
            print(
                f"{extents(shape)} {program.name}: {row['timing'][OURS]['median_us']:.1f} us, {of_mm(row):.3f} of mm (eager {of_mm(row, EAGER):.3f}), "
                f"{of_target(row):.3f} of the target; {row['config']}",
                flush=True,
            )
            written = record.write_rows("tiles", target, environment, rows, verdict(rows), options)
    print(written)


if __name__ == "__main__":
    main()
