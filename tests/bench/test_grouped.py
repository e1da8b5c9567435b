"""bench.grouped without a GPU: contenders on CPU tensors, and made-up times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import ONE_H200

import epigen
from bench import checked, grouped, readme, record, tables
from bench.grouped import COMPILED, DENSE, DOWN, EVEN, GATED, GRADIENT, GROUPED, OURS, SKEWED
from epigen.shapes import Shape

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("routing", [EVEN, SKEWED])
@pytest.mark.parametrize("program", [GATED, DOWN, GRADIENT])
def test_contenders_compute_the_same(program: str, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    cut = grouped.ends(4, 48, routing, "cpu")
    assert cut.dtype == torch.int32 and cut[-1] == 48 and (cut.diff() >= 0).all()
    found, right = grouped.contenders(program, (4, 48, 64, 32), cut, epigen.compile(program), "cpu")
    checked.near(found[OURS]().float(), right, grouped.NEAR, OURS)
    assert set(found) == ({GROUPED, OURS} if program == GRADIENT else {GROUPED, COMPILED, DENSE, OURS})


def row(program: str, shape: Shape, routing: str) -> dict[str, Any]:
    times = {GROUPED: 100.0, COMPILED: 130.0, DENSE: 90.0, OURS: 100.0}
    if program == GRADIENT:
        times = {GROUPED: 80.0, OURS: 100.0}
    return {"program": program, "shape": list(shape), "routing": routing, "dtype": "bf16", "timing": {n: {"median_us": us} for n, us in times.items()}}


def test_the_claims_are_of_gated_units_with_many_rows() -> None:
    rows = [row(program, shape, EVEN) for shape in grouped.SHAPES for program in (GATED, DOWN, GRADIENT)]
    assert grouped.verdict(rows) == {"met": 3, "of": 3, "worst": 1.0}
    rows[0]["timing"][OURS]["median_us"] = 130.0
    assert grouped.verdict(rows) == {"met": 2, "of": 3, "worst": 0.769}


def test_the_script_writes_and_the_readme_shows_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(grouped, "measured", row)
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    assert readme.grouped_rows() == "Not measured yet: `python -m bench grouped`."
    monkeypatch.setattr("sys.argv", ["grouped", "--commit", "abc1234", "--out", str(tmp_path), "64x8192x2816x2048"])
    grouped.main(ONE_H200)
    assert f"64x8192x2816x2048 even {GATED}: 100.0 us; 1.000 of grouped_mm, 1.300 of grouped_mm, torch.compile, 0.900 of dense" in capsys.readouterr().out
    found = record.read(tmp_path / "grouped_h200.json")
    record.write("grouped_h200", replace(found, environment={**found.environment, "gpu": "H200", "triton": "3.6.0", "driver": "580"}), tmp_path)
    shown = readme.grouped_rows()
    assert "| 64x8192x2816x2048 | even | H200 | 1.30 | 0.90 | 1.30 | 0.80 |" in shown and "H200: 2 of 2 targets are met, 1.00 of one at worst." in shown
