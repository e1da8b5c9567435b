"""A linear layer whose weight is 2:4 sparse, with what follows it: the vendor's sparse product and one pass, against epigen's kernel of the dense values.

Run: python -m bench.sparse [--commit HASH] [--out FOLDER] [--tuned] [SHAPES]
Nothing is claimed: the result says where the sparse product is the faster, which is where `--tuned` is to choose it. Beside these two torch's own sparse layer and a
pass by torch.compile, both products alone, and the sparse one by the kernel that cuSPARSELt's own search finds (`alg_id`). Contenders are interleaved, and the L2
cache is cold. A wrong answer is not timed. --tuned: tune each first, dense and sparse, into the user's database, and time what is then chosen; into a result of its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import checked, record, timing
from epigen.runtime import semi_structured, verify
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.semi_structured import Compressed
from epigen.runtime.verify import Sample
from epigen.shapes import Shape, extents

SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (4096, 4096, 4096), (4096, 14336, 4096), (512, 8192, 8192))
MM, DENSE, SPARSE_MM, SEARCHED, OURS, CHOSEN, COMPILED = (
    "mm", "epigen, dense values", "sparse mm", "sparse mm, searched", "epigen", "epigen, tuned", "torch's sparse layer, torch.compile",
)  # fmt: skip
NEAR = 1e-2
"""How far off an answer may be as a whole; of bf16 rounding makes 0.003."""
BY_LIBRARY = {"schedule": "library", "block_m": 8, "block_n": 128, "num_warps": 8, "fused_finalize": 0}
"""What runs where nothing is recorded."""


@dataclass(frozen=True, slots=True)
class Case:
    """name: in tables. text: the program. eager: the same behind torch's linear layer with a bias."""

    name: str
    text: str
    eager: Callable[..., Tensor]


CASES = (
    Case("gelu + bias", "gelu(mm + bias)", lambda z: functional.gelu(z)),
    Case("silu + bias, gate, residual", "silu(mm + bias) * gate[m,n] + residual", lambda z, gate, residual: functional.silu(z) * gate + residual),
)


def operands(case: Case, shape: Shape, device: str = "cuda") -> tuple[Sample, dict[str, Tensor]]:
    """Random ones, b with its zeros; and the case's inputs but for the bias."""
    m, n, k = shape[-3:]
    x, w = torch.randn(m, k, device=device).bfloat16(), (torch.randn(n, k, device=device) / k**0.5).bfloat16()
    beside = {name: torch.randn(m, n, device=device).bfloat16() for name in ("gate", "residual") if name in case.text}
    given = Sample(x, w.t(), {"bias": torch.randn(n, device=device).bfloat16(), **beside})
    return verify.pruned(given, "b"), beside


def contenders(case: Case, given: Sample, beside: Mapping[str, Tensor], weight: Any, tuned: bool) -> dict[str, Callable[[], Any]]:
    """weight: the sparse one [N, K]."""
    torch._dynamo.reset()  # each shape is compiled by itself, and torch gives up after eight
    layer = torch.compile(lambda x, w, bias, inputs: case.eager(functional.linear(x, w, bias), **inputs), fullgraph=True, dynamic=False)
    product = semi_structured.Operands("b", _held(weight), given.a)
    found: dict[str, Callable[[], Any]] = {
        MM: functools.partial(torch.mm, given.a, given.b),
        DENSE: functools.partial(epigen.compile(case.text), given.a, given.b, **given.inputs),
        SPARSE_MM: functools.partial(product.product, torch.bfloat16),
        OURS: functools.partial(epigen.compile(case.text, config=BY_LIBRARY), given.a, weight.t(), **given.inputs),
        COMPILED: functools.partial(layer, given.a, weight, given.inputs["bias"], beside),
    }
    if (searched := _searched(product)) is not None:
        found[SEARCHED] = functools.partial(searched.product, torch.bfloat16)
    if tuned:
        found[CHOSEN] = functools.partial(epigen.compile(case.text), given.a, weight.t(), **given.inputs)
    return found


def _held(weight: Any) -> Compressed:
    held = Compressed.of(weight, False)
    assert held is not None
    return held


def _searched(product: semi_structured.Operands) -> semi_structured.Operands | None:
    """The same by the kernel that cuSPARSELt's search has found; None of CUTLASS's."""
    if product.held.called != "cuSPARSELt":
        return None
    alg_id = int(torch._cslt_sparse_mm_search(product.held.packed, product.rows.t(), transpose_result=True))
    return replace(product, held=replace(product.held, alg_id=alg_id))


def check(found: Mapping[str, Callable[[], Any]], case: Case, given: Sample, where: str) -> None:
    """Raises Wrong where one of the contenders is."""
    mm = given.a.float() @ given.b.float()
    beside = {name: t.float() for name, t in given.inputs.items() if name != "bias"}
    right = case.eager(mm + given.inputs["bias"].float(), **beside)
    for name, run in found.items():
        checked.near(run(), mm if name in (MM, SPARSE_MM, SEARCHED) else right, NEAR, f"{name} at {where}")


def of(row: Mapping[str, Any], peer: str, contender: str = OURS) -> float:
    """How many times as fast as a peer."""
    return float(row["timing"][peer]["median_us"] / row["timing"][contender]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the sparse product and its pass are faster than the kernel of the dense values, and how much what was chosen loses against the better of the two."""
    held = list(rows)
    found: dict[str, Any] = {"faster": sum(of(row, DENSE) > 1 for row in held), "of": len(held)}
    chosen = [max(of(row, CHOSEN, DENSE), of(row, CHOSEN)) for row in held if CHOSEN in row["timing"]]
    return found | ({"chosen_takes_at_most": round(max(chosen), 3)} if chosen else {})


def measured(case: Case, shape: Shape, tuned: bool = False) -> dict[str, Any]:
    """One row."""
    given, beside = operands(case, shape)
    weight = semi_structured.compressed(given.a, given.b, "b")[1].t()
    if tuned:
        for side in (None, "b"):
            epigen.tune(case.text, shape, dtype="bf16", layout="nt", sparse=side)
    found = contenders(case, given, beside, weight, tuned)
    check(found, case, given, f"{extents(shape)}, {case.name}")
    configs = {name: str(run.func.config) for name, run in found.items() if name in (DENSE, CHOSEN)}  # type: ignore[attr-defined]
    numbers = {"alg_id": found[SEARCHED].func.__self__.held.alg_id} if SEARCHED in found else {}  # type: ignore[attr-defined]
    return {"program": case.name, "shape": list(shape), "dtype": "bf16", "configs": configs, **numbers, "timing": timing.cold(found, budget_s=1.0)}


def said(row: Mapping[str, Any]) -> str:
    ratios = ", ".join(f"{name} {of(row, name):.2f}" for name in row["timing"] if name != OURS)
    searched = f"; {of(row, MM, SEARCHED):.2f} by its own search, alg_id {row['alg_id']}" if SEARCHED in row["timing"] else ""
    return f"{row['timing'][OURS]['median_us']:.1f} us, times as fast as: {ratios}; of mm the sparse product {of(row, MM, SPARSE_MM):.2f}{searched}"


def main(machine: Machine = THIS_MACHINE) -> None:
    options = record.options_with_shapes(__doc__, SHAPES)
    target, environment = record.gpu_at_hand(machine), record.environment(options.commit)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for shape, case in product(options.shapes, CASES):
        rows.append(row := measured(case, shape, options.tuned))
        print(f"{extents(shape)} {case.name}: {said(row)}", flush=True)
        written = record.write_rows("sparse", target, environment, rows, verdict(rows), options)
    print(written)


if __name__ == "__main__":
    main()
