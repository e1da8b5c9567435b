"""A gated unit: two products of one left operand, and an activation of one times the other, against torch.mm with twice the columns.

Run: python -m bench.gated [--commit HASH] [--out FOLDER] [--tuned] [SHAPES]
Claim: TARGET. In bf16; SHAPES are those of one of the two products. Beside it eager torch, and epigen's product whose epilogue reads the other product.
And of the whole MLP of a Llama, forward and a training step, CLAIMED times as fast as eager torch: the unit and the layer behind it by `epigen.linear`.
Contenders are interleaved, and the L2 cache is cold. A wrong answer is not timed. --tuned: tune each unit first, into the user's database; into a result of
its own, and without the MLPs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import record, timing
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, extents
from epigen.training import backend

SHAPES: tuple[Shape, ...] = (
    (8192, 14336, 4096), (4096, 14336, 4096), (8192, 8192, 1024), (2048, 5504, 2048), (512, 14336, 4096), (64, 14336, 4096), (16, 14336, 4096), (1, 14336, 4096),
)  # fmt: skip
TARGET = "1.00 of the product"
MLPS = ((8192, 4096, 14336), (4096, 2048, 5632))
"""Rows, width, and what is in between."""
STACKED = ((8192, 3072, 8192),)
"""The same of Phi-3's, whose gate and up are one weight: nothing is claimed of it."""
FORWARD, STEP = "forward", "step"
CLAIMED = {(MLPS[0], FORWARD): 1.12, (MLPS[0], STEP): 1.08, (MLPS[1], FORWARD): 1.22, (MLPS[1], STEP): 1.17}
GATED, BESIDE = "silu(mm) * dot(a, up[k,n])", "silu(mm) * up[m,n]"
MM, EAGER, OURS, APART, COMPILED = "mm of both", "eager", "epigen", "two calls", "torch.compile"
RECOMPUTED, BACKEND = "epigen, recompute", "epigen's backend"


def of_mm(row: Mapping[str, Any], contender: str = OURS) -> float:
    """How many times as fast as the bare product."""
    return float(row["timing"][MM]["median_us"] / row["timing"][contender]["median_us"])


def of_eager(row: Mapping[str, Any], contender: str = OURS) -> float:
    """How many times as fast as eager torch."""
    return float(row["timing"][EAGER]["median_us"] / row["timing"][contender]["median_us"])


def of_target(row: Mapping[str, Any]) -> float:
    """1 and more where the claim holds."""
    return of_eager(row) / CLAIMED[tuple(row["shape"]), row["program"]] if row["program"] in (FORWARD, STEP) else of_mm(row)


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claims."""
    shares = [of_target(row) for row in rows if not row.get("stacked")]
    return {"met": sum(share >= 1 for share in shares), "of": len(shares), "worst": round(min(shares), 3)}


def measured(shape: Shape) -> dict[str, Any]:
    """One row."""
    m, n, k = shape[-3:]
    x, both = torch.randn(m, k, device="cuda").bfloat16(), (torch.randn(2 * n, k, device="cuda") / k**0.5).bfloat16().t()
    gate, up = both[:, :n], both[:, n:]
    fused, beside = epigen.compile(GATED), epigen.compile(BESIDE)
    contenders: dict[str, Callable[[], Any]] = {
        MM: lambda: torch.mm(x, both),
        EAGER: lambda: functional.silu(torch.mm(x, gate)) * torch.mm(x, up),
        APART: lambda: beside(x, gate, up=torch.mm(x, up)),
        OURS: lambda: fused(x, gate, up=up),
    }  # fmt: skip
    right = functional.silu(x.float() @ gate.float()) * (x.float() @ up.float())
    for name in (EAGER, APART, OURS):
        torch.testing.assert_close(contenders[name]().float(), right, rtol=2e-2, atol=3e-2)
    return {"program": GATED, "shape": list(shape), "dtype": "bf16", "config": str(fused.config), "timing": timing.cold(contenders, budget_s=1.0)}


def _of_three(width: int, between: int) -> tuple[list[tuple[int, int]], dict[str, Callable[..., Tensor]]]:
    """The sizes of the weights, and the MLP in several ways."""

    def eager(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

    def fused(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, save: str | None = None) -> Tensor:
        return epigen.linear(epigen.linear(x, gate, None, GATED, up=up.t(), save=save), down)  # type: ignore[no-any-return]

    def apart(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return epigen.linear(epigen.linear(x, gate, None, BESIDE, up=functional.linear(x, up)), down)  # type: ignore[no-any-return]

    return [(between, width), (between, width), (width, between)], {
        EAGER: eager,
        OURS: fused,
        RECOMPUTED: functools.partial(fused, save="recompute"),
        APART: apart,
    }


def _of_two(width: int, between: int) -> tuple[list[tuple[int, int]], dict[str, Callable[..., Tensor]]]:
    """The same of a stacked weight."""

    def eager(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
        gate, up = functional.linear(x, both).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, down)

    def fused(x: Tensor, both: Tensor, down: Tensor, save: str | None = None) -> Tensor:
        return epigen.linear(epigen.linear(x, both, None, "g, u = halves(mm); silu(g) * u", save=save), down)  # type: ignore[no-any-return]

    return [(2 * between, width), (width, between)], {EAGER: eager, OURS: fused, RECOMPUTED: functools.partial(fused, save="recompute")}


def of_mlp(sizes: tuple[int, int, int], stacked: bool = False) -> Iterator[dict[str, Any]]:
    """Two rows: forward without gradients, and a step from a given gradient of the result on. stacked: gate and up are one weight."""
    rows, width, between = sizes
    of_weights, units = (_of_two if stacked else _of_three)(width, between)
    weights = [(torch.randn(n, k, device="cuda") / k**0.5).bfloat16().requires_grad_() for n, k in of_weights]
    x = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    torch._dynamo.reset()
    units |= {COMPILED: torch.compile(units[EAGER]), BACKEND: torch.compile(units[EAGER], backend=backend.backend)}
    gradient = torch.randn(rows, width, device="cuda").bfloat16()

    def forward(unit: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return unit(x, *weights)

    def step(unit: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(unit(x, *weights), [x, *weights], gradient)

    for program, run in ((FORWARD, forward), (STEP, step)):
        right = run(units[EAGER])
        for unit in units.values():
            for found, expected in zip(run(unit), right, strict=True):
                assert (found.float() - expected.float()).norm() < 2e-2 * expected.float().norm()
        timed = timing.cold({name: functools.partial(run, unit) for name, unit in units.items()}, budget_s=4.0)
        yield {"program": program, "shape": list(sizes), "dtype": "bf16", "timing": timed} | ({"stacked": True} if stacked else {})


def main(machine: Machine = THIS_MACHINE) -> None:
    options = record.options_with_shapes(__doc__, SHAPES)
    target, environment = record.gpu_at_hand(machine), record.environment(options.commit)
    torch.manual_seed(0)
    rows = []
    for shape in options.shapes:
        if options.tuned:
            epigen.tune(GATED, shape, dtype="bf16")
        rows.append(row := measured(shape))
        shares = ", ".join(f"{name} {of_mm(row, name):.3f}" for name in (OURS, APART, EAGER))
        print(f"{extents(shape)}: {row['timing'][MM]['median_us']:.1f} us; {shares}; {row['config']}", flush=True)
        written = record.write_rows("gated", target, environment, rows, verdict(rows), options)
    for sizes, stacked in () if options.tuned else (*((sizes, False) for sizes in MLPS), *((sizes, True) for sizes in STACKED)):
        for row in of_mlp(sizes, stacked):
            rows.append(row)
            print(
                f"{extents(sizes)} {'stacked ' * stacked}{row['program']}: {', '.join(f'{name} {of_eager(row, name):.3f}' for name in row['timing'])} of eager",
                flush=True,
            )
            written = record.write_rows("gated", target, environment, rows, verdict(rows), options)
    print(written)


if __name__ == "__main__":
    main()
