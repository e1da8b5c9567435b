"""bench.invariant: what it finds of bits, what it claims, and what its rows say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epigen
from bench import invariant, readme
from bench.invariant import INVARIANT, MM, ORDINARY
from bench.record import Report
from epigen.dtypes import BF16
from epigen.gpus import by_name


def row(ordinary: float, same_bits: bool = True, m: int = 8, program: str = "relu(mm + bias)") -> dict[str, Any]:
    times = {INVARIANT: {"median_us": 10.0}, ORDINARY: {"median_us": ordinary}, MM: {"median_us": 5.0}}
    return {"program": program, "shape": (m, 4096, 4096), "same_bits": same_bits, "timing": times}


def test_what_is_claimed() -> None:
    assert invariant.speed(row(9.0)) == 0.9 and invariant.speed(row(9.0), MM) == 0.5
    found = invariant.verdict([row(8.0), row(11.0)])
    assert found["holds"] and (found["mean"], found["worst"]) == (0.938, 0.8)
    assert not invariant.verdict([row(7.9), row(20.0)])["holds"], "slower at worst than is claimed"
    assert not invariant.verdict([row(8.5), row(8.5)])["holds"], "slower in the mean"
    assert not invariant.verdict([row(20.0), row(20.0, same_bits=False)])["holds"]


def test_rows_of_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "ROWS", (1, 3, 20))
    a, b, bias = torch.randn(20, 64), torch.randn(64, 8), torch.randn(8)
    kernel = epigen.compile("mm + bias", invariant="m")
    assert invariant.unlike(kernel, a, b, bias) == []

    def wrong(a: torch.Tensor, *rest: Any, **inputs: Any) -> torch.Tensor:
        return kernel(a, *rest, **inputs) + (len(a) == 3)

    assert invariant.unlike(wrong, a, b, bias) == [3]  # type: ignore[arg-type]


@pytest.mark.parametrize("program", invariant.PROGRAMS)
def test_its_kernels_do_not_split_k(program: str) -> None:
    for n, k in invariant.LAYERS:
        for m in invariant.ROWS:
            config = epigen.compile(program, invariant="m").plan((m, n, k), dtype=BF16, layout="nt", target=by_name("H100").target).choice.config
            assert config.schedule in ("tiled", "persistent", "warp_specialized")


def test_the_table_has_a_row_for_each_layer_and_m(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(9.0, m=1), row(9.6, m=8, program="mm + bias"), row(8.0, m=8)]
    about = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11", "triton": "3.6.0", "driver": "580", "date": "2026-11-27T00:00:00Z"}
    monkeypatch.setattr(readme, "there", lambda name: name == "invariant")
    monkeypatch.setattr(readme, "load", lambda name: Report(f"bench.{name}", about, rows, invariant.verdict(rows)))
    text = readme.invariant_rows()
    assert "| N x K | M = 1 | M = 8 |" in text and text.count("\n| 4096x4096") == 2
    assert "| 0.90 / 0.50 | 0.80 / 0.50 |" in text and "0.88 in the geometric mean, 0.80 at worst" in text and "the same bits" in text
    rows.append(row(9.0, same_bits=False))
    assert "OTHER BITS" in readme.invariant_rows()
