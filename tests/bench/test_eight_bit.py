"""bench.eight_bit: which cases it times, what it claims of each, and what its rows say."""

from __future__ import annotations

from typing import Any

import pytest

import epigen
from bench import eight_bit, readme
from bench.eight_bit import BF16, CUBLAS, OURS, Case
from epigen.dtypes import BY_NAME, FAST_ACCUM


def row(claimed: float | None, **times: float) -> dict[str, Any]:
    return {"claimed": claimed, "timing": {name: {"median_us": us} for name, us in times.items()}}


def test_what_is_claimed_of_a_case() -> None:
    large, skinny = (4096, 4096, 4096), (16, 4096, 4096)
    claimed = {c: c.claimed for shape in (large, skinny) for c in eight_bit.cases([shape])}
    assert claimed[Case(large, "fp8e4m3", FAST_ACCUM)] == 1.00 and claimed[Case(large, "fp8e4m3")] == 1.02
    assert claimed[Case(skinny, "fp8e4m3", FAST_ACCUM)] == claimed[Case(skinny, "fp8e4m3")] == 1.3
    assert claimed[Case(large, "fp8e4m3", FAST_ACCUM, "silu * gate")] == 1.10 and claimed[Case(skinny, "fp8e4m3", FAST_ACCUM, "gelu_tanh")] is None
    assert claimed[Case(large, "int8")] is None and Case((8192, 8192, 8192), "int8").claimed == 1.6


@pytest.mark.parametrize("case", list(eight_bit.cases([(8192, 8192, 1024)])), ids=str)
def test_its_programs_have_the_results_that_are_compared(case: Case) -> None:
    """One of bf16, as cuBLAS's."""
    kernel = epigen.compile(case.program, precision=case.precision)
    (out,) = kernel.plan(case.shape, dtype=BY_NAME[case.dtype], layout="nt").spec.outputs
    assert out.dtype.name == "bf16"


def test_fp8_is_compared_with_cublas_and_int8_with_bf16() -> None:
    fp8, int8 = row(1.0, **{OURS: 10.0, CUBLAS: 11.0, BF16: 20.0}), row(1.6, **{OURS: 10.0, BF16: 15.0})
    assert (eight_bit.of_baseline(fp8), eight_bit.of_baseline(int8)) == (1.1, 1.5)
    assert (
        eight_bit.verdict([fp8])["holds"] and not eight_bit.verdict([fp8, int8])["holds"] and eight_bit.verdict([row(None, **{OURS: 2.0, BF16: 1.0})])["holds"]
    )


def test_the_readme_has_a_row_for_each_with_both_gpus() -> None:
    text = readme.of_bytes()
    named = [{(tuple(r["shape"]), r["dtype"], r["precision"], r["program"]) for r in readme.load(f"eight_bit_{gpu}").rows} for gpu in ("h100", "h200")]
    assert text.count("\n| ") == len(named[0] | named[1]) + 2
    assert "fp8, promoted" in text and "fast accumulation, `silu * gate`" in text and "H100: speed" in text and "H200: speed" in text
