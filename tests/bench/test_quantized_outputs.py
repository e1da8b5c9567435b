"""bench.quantized_outputs without a GPU: contenders on CPU tensors, and made-up times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import ONE_H200
from torch import Tensor

import epigen
from bench import quantized_outputs, readme, record, tables
from bench.block_scales import Operands
from bench.checked import Wrong
from bench.quantized_outputs import BLOCK_SCALES, CASES, CLAIMED, COMPILED, OURS, PLAIN, PRODUCT, Case
from epigen.shapes import Shape

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile is given runs as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def on_the_cpu(case: Case) -> tuple[dict[str, Callable[[], Any]], Operands]:
    """Contenders at a small shape. torch's CPU has no product with scales in blocks: it is taken in fp32."""
    given = quantized_outputs.operands(case, (24, 256, 384), "cpu")
    if case is BLOCK_SCALES:
        given = replace(given, product=lambda: given.exact().bfloat16())
    return quantized_outputs.contenders(case, given, {name: epigen.compile(program) for name, program in case.programs.items()}), given


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contenders_compute_the_same(case: Case) -> None:
    found, given = on_the_cpu(case)
    quantized_outputs.check(found, case.right(given), "24x256x384")
    values, scales = found[OURS]()
    assert (values.shape, values.dtype, scales.shape, scales.dtype) == ((24, 256), torch.float8_e4m3fn, (24, 2), torch.float32)
    assert found[PLAIN]().dtype == torch.bfloat16 and found[PRODUCT]().shape == (24, 256 * case.products)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("name", "of"), [(OURS, lambda q, s: (q, s * 1.05)), (COMPILED, lambda q, s: ((q.float() * 1.1).to(q.dtype), s)), (PLAIN, lambda q, _: q.float())]
)
def test_a_wrong_answer_is_not_timed(name: str, of: Callable[[Tensor, Tensor], Any]) -> None:
    found, given = on_the_cpu(CASES[0])
    values, scales = found[OURS]()
    with pytest.raises(Wrong, match=rf"{name} at 24x256x384 is off by "):
        quantized_outputs.check(found | {name: lambda: of(values, scales)}, CASES[0].right(given), "24x256x384")


def row(case: Case, shape: Shape) -> dict[str, Any]:
    times = {PRODUCT: 100.0, COMPILED: 126.0, PLAIN: 110.0, OURS: 120.0}
    configs = dict.fromkeys((OURS, PLAIN), "tiled")
    return {"program": case.name, "shape": list(shape), "dtype": case.dtype, "configs": configs, "timing": {n: {"median_us": us} for n, us in times.items()}}


def test_the_claim_is_of_block_scales_alone() -> None:
    rows = [row(case, (64, 128, 128)) for case in CASES]
    assert quantized_outputs.verdict(rows) == {"claimed": CLAIMED, "met": 1, "of": 1, "worst": 1.0}
    assert quantized_outputs.verdict(rows[:1])["of"] == 0
    rows[-1]["timing"][OURS]["median_us"] = 160.0
    assert quantized_outputs.verdict(rows) == {"claimed": CLAIMED, "met": 0, "of": 1, "worst": 0.75}


def test_the_script_tunes_writes_and_the_readme_shows_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned: list[tuple[str, ...]] = []
    monkeypatch.setattr(epigen, "tune", lambda programs, _, dtype, **__: tuned.append((*programs, dtype)))
    monkeypatch.setattr(quantized_outputs, "measured", row)
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    assert readme.quantized_output_rows() == "Not measured yet: `python -m bench quantized_outputs`."
    for options in ([], ["--tuned"]):
        monkeypatch.setattr("sys.argv", ["quantized_outputs", "--commit", "abc1234", "--out", str(tmp_path), *options, "64x8192x8192"])
        quantized_outputs.main(ONE_H200)
    assert tuned[0] == ("mm", "q, s = quantize(mm, fp8e4m3, n/128); q, s", "bf16") and len(tuned) == len(CASES)
    assert "64x8192x8192 mm: 100.0 us; of the product 0.833, torch.compile 0.794; 1.050 of torch.compile, 0.917 of bf16; tiled" in capsys.readouterr().out
    for name in ("quantized_outputs_h200", "quantized_outputs_tuned_h200"):
        found = record.read(tmp_path / f"{name}.json")
        record.write(name, replace(found, environment={**found.environment, "gpu": "H200", "triton": "3.6.0", "driver": "580"}), tmp_path)
    shown = readme.quantized_output_rows()
    assert "| 64x8192x8192, SwiGLU | H200 | 0.83 | 0.79 | 1.05 | 0.92 |" in shown and "| 64x8192x8192, mm | H200, tuned | 0.83 |" in shown
    assert "H200, tuned: 1 of 1 targets are met, 1.00 of one at worst. Measured on H200" in shown


def test_what_there_is_no_time_for_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 11.0])
    monkeypatch.setattr(quantized_outputs.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(quantized_outputs, "measured", row)
    monkeypatch.setattr("sys.argv", ["quantized_outputs", "--seconds", "10", "--out", str(tmp_path)])
    quantized_outputs.main(ONE_H200)
    found = record.read(tmp_path / "quantized_outputs_h200.json")
    assert len(found.rows) == 1 and found.summary["left_out"] == 27
    assert capsys.readouterr().out.endswith("27 of 28 left out\n")
    environment = {"gpu": "H200", "torch": "2.11", "triton": "3.6", "driver": "580", "date": "2026-11-29"}
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    record.write("quantized_outputs_h200", replace(found, environment=environment), tmp_path)
    assert "0 of 0 targets are met, 0.00 of one at worst, and 27 cases were not timed." in readme.quantized_output_rows()
