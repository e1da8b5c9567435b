"""bench.tiles: what it compares, what it allows a kernel, and what its rows say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epigen
from bench import readme, tiles
from bench.record import Report
from bench.tiles import EAGER, MM, OURS, Program
from epigen import gpus
from epigen.codegen.lower import lower
from epigen.dtypes import BF16
from epigen.runtime import outputs


def row(program: str, shape: tuple[int, int, int], mm: float, ours: float) -> dict[str, Any]:
    times = {MM: {"median_us": mm}, EAGER: {"median_us": 2 * ours}, OURS: {"median_us": ours}}
    return {"program": program, "shape": list(shape), "copy_gbps": 3000.0, "timing": times}


@pytest.mark.parametrize(("k", "least"), [(4096, 1.0), (2048, 1.0), (1024, 0.97), (512, 0.92), (256, 0.92)])
def test_the_share_of_mm_that_is_claimed(k: int, least: float) -> None:
    """Of products so large that their bytes take no time to speak of."""
    mm = 1e5
    assert tiles.allowed_us(row("residual", (8192, 8192, k), mm, 1.0)) == pytest.approx(mm / least)


def test_where_bytes_take_longer_they_are_what_is_claimed() -> None:
    """131072x512x256: of operands 67 MB, and of residual and result 268 MB."""
    found = row("residual", (131072, 512, 256), 60.0, 110.0)
    moved = 2 * (131072 * 256 + 512 * 256 + 2 * 131072 * 512)
    assert tiles.allowed_us(found) == pytest.approx(1.05 * moved / 3e6) and tiles.of_mm(found) == pytest.approx(60 / 110)
    assert tiles.BY_NAME["residual in fp32"].bytes((64, 64, 64)) == 2 * 2 * 64 * 64 + 8 * 64 * 64


def test_what_the_rows_say() -> None:
    met, missed = row("residual", (4096, 4096, 4096), 100.0, 99.0), row("residual", (4096, 4096, 4096), 100.0, 125.0)
    assert tiles.verdict([met, missed]) == {"met": 1, "of": 2, "worst": 0.8}


@pytest.mark.parametrize("program", tiles.PROGRAMS, ids=lambda p: p.name)
def test_eager_torch_computes_the_same(program: Program) -> None:
    """On the CPU; with results of the same dtypes."""
    torch.manual_seed(0)
    a, b = torch.randn(33, 64).bfloat16(), (torch.randn(48, 64) / 8).bfloat16().t()
    inputs = {name: torch.randn(33, 48).to(dtype) for name, dtype in program.inputs.items()}
    ours, eager = epigen.compile(program.text)(a, b, **inputs), program.eager(torch.mm(a, b), **inputs)
    for found, expected in zip(tiles._all(ours), tiles._all(eager), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=3e-2)
    assert program.bytes((33, 48, 64)) == sum(t.nbytes for t in (a, b, *inputs.values(), *tiles._all(eager)))


@pytest.mark.parametrize("program", tiles.PROGRAMS, ids=lambda p: p.name)
def test_what_is_tuned_is_what_is_called(program: Program) -> None:
    """A record of the task answers for the call."""
    m, n, k = shape = (256, 512, 64)
    kernel, task = epigen.compile(program.text), tiles.task_of(program, shape, gpus.by_name("H100").target)
    a, b = torch.zeros(m, k).bfloat16(), torch.zeros(n, k).bfloat16().t()
    inputs = {name: torch.zeros(m, n).to(dtype) for name, dtype in program.inputs.items()}
    called = kernel._signature(shape, (a, b), inputs, {}, outputs.of(kernel.graph, BF16))
    assert lower(kernel.graph, called) == task.spec


def test_the_readme_has_gpus_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"gpu": "an H100", "torch": "2.11", "triton": "3.6", "driver": "580", "date": "2026-11-27", "commit": "b1"}
    rows = [row("residual", (4096, 4096, 4096), 100.0, 99.0), row("silu * gate", (2048, 2048, 2048), 100.0, 125.0)]
    counts = {"tiles_h100": 2, "tiles_h200": 1, "tiles_tuned_h200": 1}
    reports = {name: Report("bench.tiles", environment, rows[:count], tiles.verdict(rows[:count])) for name, count in counts.items()}
    monkeypatch.setattr(readme, "there", lambda name: name in reports)
    monkeypatch.setattr(readme, "load", reports.__getitem__)
    text = readme.tile_rows()
    assert "| 4096x4096x4096, residual | 0.51 | 1.01 (1.01) | 0.51 | 1.01 (1.01) | 1.01 (1.01) |" in text
    assert "| 2048x2048x2048, silu * gate | 0.40 | 0.80 (0.80) | | | |" in text and "H100: 1 of 2 targets are met, 0.80 at worst" in text
    assert "H200, tuned: 1 of 1 targets" in text and "0.80 at worst, commit b1. " in text
    reports["tiles_h100"].rows[0]["commit"] = "a0"
    assert "0.80 at worst, commit b1, 1 at a0. " in readme.tile_rows()
