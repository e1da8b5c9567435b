"""Products of 8-bit operands with a scale a row, a scale a column and a bias, against cuBLAS, which has the same in one call, and against bf16's product.

Run: python -m bench.eight_bit [--commit HASH] [--out FOLDER] [--tuned] [SHAPES]
Claims: fp8 with fast accumulation 1.00 of cuBLAS with it, and promoted 1.02 of cuBLAS without it, where M is above 64, and 1.3 up to there; with an activation
behind it 1.10 of cuBLAS and one pass; int8 1.6 of bf16's product at 8192x8192x8192. Contenders are interleaved, and the L2 cache is cold. A wrong answer is
not timed. --tuned: tune each problem first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import epigen
from bench import checked, record, timing
from bench.record import Report
from epigen.dtypes import FAST_ACCUM
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, extents

SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192), (4096, 14336, 4096), (8192, 8192, 1024), (512, 4096, 4096), (2048, 2048, 2048), (16, 4096, 4096), (64, 14336, 4096),
)  # fmt: skip
SCALED = "cast(mm * s[m] * t[n] + bias[n], bf16)"
ACTIVATED = {"gelu_tanh": "cast(gelu_tanh(mm * s[m] * t[n] + bias[n]), bf16)", "silu * gate": "cast(silu(mm * s[m] * t[n] + bias[n]) * gate[m,n], bf16)"}
PASSES = {"gelu_tanh": "gelu_tanh(mm)", "silu * gate": "silu(mm) * gate[m,n]"}
OURS, CUBLAS, BF16, INT_MM = "epigen", "cuBLAS", "bf16 mm", "_int_mm"
SKINNY = 64
"""M up to which more is claimed: all of the time goes into reading the weights."""
CLAIMED = {"fast": 1.00, "promoted": 1.02, "skinny": 1.3, "activated": 1.10, "int8": 1.6}


@dataclass(frozen=True, slots=True)
class Case:
    """dtype: of both operands. precision: as of `epigen.compile`. activation: a key of ACTIVATED, or "" for none."""

    shape: Shape
    dtype: str
    precision: str | None = None
    activation: str = ""

    @property
    def program(self) -> str:
        return ACTIVATED.get(self.activation, SCALED)

    @property
    def claimed(self) -> float | None:
        """How many times as fast as its baseline the kernel is to be; None where nothing is claimed."""
        if self.dtype == "int8":
            return CLAIMED["int8"] if self.shape == (8192, 8192, 8192) else None
        if self.activation:
            return CLAIMED["activated"] if self.shape[0] > SKINNY else None
        return CLAIMED["skinny" if self.shape[0] <= SKINNY else "promoted" if self.precision is None else "fast"]


def cases(shapes: Iterable[Shape]) -> Iterator[Case]:
    for shape in shapes:
        for precision in (FAST_ACCUM, None):
            yield Case(shape, "fp8e4m3", precision)
        for activation in ACTIVATED:
            yield Case(shape, "fp8e4m3", FAST_ACCUM, activation)
        yield Case(shape, "int8")


def _random(shape: tuple[int, int], dtype: str) -> Tensor:
    if dtype == "int8":
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)


def measured(case: Case) -> dict[str, Any]:
    """One row."""
    m, n, k = case.shape
    a, b = _random((m, k), case.dtype), _random((n, k), case.dtype).t()
    scale = 1 / (k**0.5 * (5000 if case.dtype == "int8" else 1))
    s, t, bias = torch.rand(m, device="cuda") + 0.5, (torch.rand(n, device="cuda") + 0.5) * scale, torch.randn(n, device="cuda")
    gate = {"gate": torch.randn(m, n, device="cuda").bfloat16()} if "gate" in case.program else {}
    kernel = epigen.compile(case.program, precision=case.precision)
    contenders: dict[str, Callable[[], Any]] = {OURS: lambda: kernel(a, b, s=s, t=t, bias=bias, **gate)}
    halves = a.bfloat16(), b.bfloat16()
    contenders[BF16] = lambda: torch.mm(*halves)
    if case.dtype == "int8":
        if m > 16:  # as torch asks
            contenders[INT_MM] = lambda: torch._int_mm(a, b)
    else:
        fast, beside = case.precision == FAST_ACCUM, epigen.compile(PASSES[case.activation]) if case.activation else None
        arguments = {"scale_a": s[:, None], "scale_b": t[None, :], "bias": bias.bfloat16(), "out_dtype": torch.bfloat16, "use_fast_accum": fast}

        def vendors() -> Tensor:
            product = torch._scaled_mm(a, b, **arguments)  # type: ignore[arg-type]
            return beside.over(product, **gate) if beside else product  # type: ignore[return-value]

        contenders[CUBLAS] = vendors
    right = _right(case, a, b, s, t, bias, **gate)
    for name in (OURS, CUBLAS):
        if name in contenders:
            checked.near(contenders[name](), right, 1e-2, f"{name} at {extents(case.shape)}")
    row = {"program": case.program, "shape": case.shape, "dtype": case.dtype, "precision": case.precision, "config": str(kernel.config)}
    return row | {"claimed": case.claimed, "timing": timing.cold(contenders, budget_s=1.0)}


def _right(case: Case, a: Tensor, b: Tensor, s: Tensor, t: Tensor, bias: Tensor, gate: Tensor | None = None) -> Tensor:
    z = a.float() @ b.float() * s[:, None] * t + bias
    if case.activation == "gelu_tanh":
        return torch.nn.functional.gelu(z, approximate="tanh")
    return z if gate is None else torch.nn.functional.silu(z) * gate.float()


def of_baseline(row: Mapping[str, Any]) -> float:
    """How many times as fast as cuBLAS for the same, or for int8 as bf16's product."""
    times = row["timing"]
    return float(times[CUBLAS if CUBLAS in times else BF16]["median_us"] / times[OURS]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claims."""
    return {"claimed": CLAIMED, "holds": all(of_baseline(row) >= row["claimed"] for row in rows if row["claimed"])}


def main(machine: Machine = THIS_MACHINE) -> None:
    options = record.options_with_shapes(__doc__, SHAPES)
    name = record.of_gpu("eight_bit", record.gpu_at_hand(machine))
    torch.manual_seed(0)
    rows = []
    for case in cases(options.shapes):
        if options.tuned:
            epigen.tune(case.program, case.shape, dtype=case.dtype, precision=case.precision)
        rows.append(measured(case))
        times = ", ".join(f"{name} {found['median_us']:.1f} us" for name, found in rows[-1]["timing"].items())
        print(
            f"{extents(case.shape)} {case.dtype} {case.precision or ''} {case.activation}: {of_baseline(rows[-1]):.3f} ({case.claimed}); {times}; {rows[-1]['config']}",
            flush=True,
        )
    print(record.write(name, Report("bench.eight_bit", record.environment(options.commit), rows, verdict(rows)), options.out))


if __name__ == "__main__":
    main()
