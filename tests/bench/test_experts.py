"""bench.experts without a GPU: all ways on CPU tensors, and made-up times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import ONE_H200

from bench import experts, readme, record, tables, timing
from bench.checked import Wrong
from bench.experts import COMPILED, FORWARD, GROUPED, LOOP, OURS, OURS_COMPILED, STEP
from bench.grouped import EVEN, SKEWED

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of few numbers, without torch.compile, whose ways are not timed but run once."""
    monkeypatch.setattr(experts, "MODELS", {"small": experts.Sizes(24, 64, 48, 4, 2)})
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(timing, "cold", lambda contenders, budget_s: {name: {"median_us": float(len(run()))} for name, run in contenders.items() if budget_s})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("routing", [EVEN, SKEWED])
def test_all_ways_compute_the_same(routing: str) -> None:
    torch.manual_seed(0)
    forward, step = experts.measured("small", routing, "cpu")
    assert (forward["program"], step["program"]) == (FORWARD, STEP)
    assert set(forward["timing"]) == set(step["timing"]) == {LOOP, GROUPED, COMPILED, OURS, OURS_COMPILED}
    assert forward["timing"][OURS]["median_us"] == 1 and step["timing"][OURS]["median_us"] == 4


@pytest.mark.usefixtures("small")
def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts.ways
    monkeypatch.setattr(experts, "ways", lambda layer: right(layer) | {OURS: lambda *given: right(layer)[OURS](*given) * 1.1})
    with pytest.raises(Wrong, match="epigen, forward of small, even is off by "):
        experts.measured("small", EVEN, "cpu")


def row(name: str, routing: str) -> list[dict[str, Any]]:
    times = {LOOP: 400.0, GROUPED: 100.0, COMPILED: 80.0, OURS: 60.0, OURS_COMPILED: 50.0}
    timed = {way: {"median_us": us} for way, us in times.items()}
    return [{"model": name, "routing": routing, "program": what, "dtype": "bf16", "timing": timed} for what in (FORWARD, STEP)]


def test_the_script_writes_and_the_readme_shows_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(experts, "measured", row)
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    assert readme.expert_rows() == "Not measured yet: `python -m bench experts`."
    monkeypatch.setattr("sys.argv", ["experts", "--commit", "abc1234", "--out", str(tmp_path), "OLMoE"])
    experts.main(ONE_H200)
    assert "OLMoE even forward: loop 0.250, grouped_mm 1.000, grouped_mm, torch.compile 1.250, epigen 1.667" in capsys.readouterr().out
    found = record.read(tmp_path / "experts_h200.json")
    record.write("experts_h200", replace(found, environment={**found.environment, "gpu": "H200", "triton": "3.6.0", "driver": "580"}), tmp_path)
    assert "| OLMoE, skewed | forward and backward | H200 | 0.25 | 1.25 | 1.67 | 2.00 |" in readme.expert_rows()
