"""Products of groups of rows, as a layer of experts has them, against torch's grouped product with one pass behind it that torch.compile makes.

Run: python -m bench.grouped [--commit HASH] [--out FOLDER] [SHAPES]
Claim: of a gated unit, CLAIMED of torch's grouped product and the pass where there are MANY experts or more, and OF_DENSE of one dense product of the same rows
where there are fewer. SHAPES are experts x rows x columns of both weights together x K, in bf16. Rows are shared out evenly, and by a draw that gives most
to few. Beside the unit the product behind it, times each row's score, and the weights' gradients, of which nothing is claimed. Contenders are interleaved, and
the L2 cache is cold. A wrong answer is not timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import checked, record, timing
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, extents

SHAPES: tuple[Shape, ...] = ((64, 8192, 2816, 2048), (128, 8192, 1536, 2048), (8, 8192, 28672, 4096), (128, 32768, 1536, 2048), (8, 256, 28672, 4096), (128, 1024, 1536, 2048), (8, 64, 28672, 4096))  # fmt: skip
"""DeepSeek-V2-Lite's experts, Qwen3-30B-A3B's and Mixtral-8x7B's: 8192 rows and more as in training and prefill, and few as in decoding."""
EVEN, SKEWED = "even", "skewed"
GATED, DOWN, GRADIENT = "g, u = halves(mm); silu(g) * u", "mm * score[m]", "mm"
GROUPED, COMPILED, DENSE, OURS = "grouped_mm", "grouped_mm, torch.compile", "dense", "epigen"
CLAIMED, MANY, OF_DENSE = 1.3, 64, 0.90
CONCENTRATION = 0.5
"""Of the Dirichlet distribution that skewed shares are drawn from: the largest of 64 is about 8 times the mean."""
NEAR = 1e-2


def ends(experts: int, rows: int, routing: str, device: str = "cuda") -> Tensor:
    """Where each expert's rows end, int32 [experts]."""
    share = torch.full((experts,), 1 / experts) if routing == EVEN else torch.distributions.Dirichlet(torch.full((experts,), CONCENTRATION)).sample()
    cut = (share.double().cumsum(0) * rows).round().int()
    cut[-1] = rows
    return cut.to(device)


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def _each(a: Tensor, b: Tensor, cut: Tensor) -> Tensor:
    """The same products one by one, in fp32."""
    spans = list(itertools.pairwise([0, *cut.tolist()]))
    if b.dim() == 2:
        return torch.stack([a[:, i:j].float() @ b[i:j].float() for i, j in spans])
    return torch.cat([a[i:j].float() @ w.float() for (i, j), w in zip(spans, b, strict=True)])


def contenders(program: str, shape: Shape, cut: Tensor, kernel: Callable[..., Any], device: str = "cuda") -> tuple[dict[str, Callable[[], Tensor]], Tensor]:
    """Each of which but GROUPED and DENSE gives the result, and the result in fp32."""
    experts, rows, n, k = shape
    if program == DOWN:
        n, k = k, n // 2
    a = torch.randn(rows, k, device=device).bfloat16()
    torch._dynamo.reset()  # each shape is compiled by itself, and torch gives up after eight
    if program == GRADIENT:
        dz = torch.randn(rows, n, device=device).bfloat16()
        found = {GROUPED: lambda: torch._grouped_mm(a.T, dz, offs=cut), OURS: lambda: kernel(a.T, dz, groups=cut)}
        return found, _each(a.T, dz, cut)
    w = (torch.randn(experts, n, k, device=device) / k**0.5).bfloat16().mT
    score = torch.rand(rows, device=device)
    behind: Callable[[Tensor], Tensor] = _swiglu if program == GATED else lambda z: (z * score[:, None]).bfloat16()
    compiled = torch.compile(behind, dynamic=False)
    inputs = {"score": score} if program == DOWN else {}
    return {
        GROUPED: lambda: torch._grouped_mm(a, w, offs=cut),
        COMPILED: lambda: compiled(torch._grouped_mm(a, w, offs=cut)),
        DENSE: lambda: torch.mm(a, w[0]),
        OURS: lambda: kernel(a, w, groups=cut, **inputs),
    }, behind(_each(a, w, cut)).float()


def of(row: Mapping[str, Any], peer: str) -> float:
    """How many times as fast as a peer epigen is."""
    return float(row["timing"][peer]["median_us"] / row["timing"][OURS]["median_us"])


def of_target(row: Mapping[str, Any]) -> float:
    """1 and more where the claim holds."""
    return of(row, COMPILED) / CLAIMED if row["shape"][0] >= MANY else of(row, DENSE) / OF_DENSE


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claims, which are of 8192 rows and gated units."""
    shares = [of_target(row) for row in rows if row["program"] == GATED and row["shape"][1] == SHAPES[0][1]]
    return {"met": sum(share >= 1 for share in shares), "of": len(shares), "worst": round(min(shares, default=0.0), 3)}


def measured(program: str, shape: Shape, routing: str) -> dict[str, Any]:
    """One row."""
    kernel = epigen.compile(program)
    cut = ends(shape[0], shape[1], routing)
    found, right = contenders(program, shape, cut, kernel)
    for name in (COMPILED if COMPILED in found else GROUPED, OURS):
        checked.near(found[name]().float(), right, NEAR, f"{name} at {extents(shape)}, {program}")
    return {"program": program, "shape": list(shape), "routing": routing, "dtype": "bf16", "timing": timing.cold(found, budget_s=1.0)}


def main(machine: Machine = THIS_MACHINE) -> None:
    options = record.options_with_shapes(__doc__, SHAPES)
    target, environment = record.gpu_at_hand(machine), record.environment(options.commit)
    rows = []
    for shape, routing, program in itertools.product(options.shapes, (EVEN, SKEWED), (GATED, DOWN, GRADIENT)):
        torch.manual_seed(1)
        rows.append(row := measured(program, shape, routing))
        peers = ", ".join(f"{of(row, name):.3f} of {name}" for name in row["timing"] if name != OURS)
        print(f"{extents(shape)} {routing} {program}: {row['timing'][OURS]['median_us']:.1f} us; {peers}", flush=True)
        written = record.write_rows("grouped", target, environment, rows, verdict(rows), options)
    print(written)


if __name__ == "__main__":
    main()
