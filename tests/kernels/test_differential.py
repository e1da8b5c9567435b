"""Every case against the float64 oracle: on the GPU all, and where there is none a share, under Triton's interpreter and by the fp32 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from cases import Case
from samples import arguments

import epigen
from epigen.codegen.lower import output_dtype
from epigen.dtypes import BY_TORCH
from epigen.ir import bound, reference
from epigen.runtime import verify
from epigen.runtime.kernel import Kernel

INTERPRETED = cases.covering(list(cases.interpreter_cases()), 24)
# which knows no config, and to which a large case says no more than a small one
REFERRED = list(dict.fromkeys(replace(c, config=None, shape=(min(c.shape[0], 128), min(c.shape[1], 128), c.shape[2])) for c in cases.all_cases()))
EXACT = [c for c in cases.exact_cases() if c.interpretable]
FAST = {*cases.share(INTERPRETED, 8), *cases.share(EXACT, 4)}


def check(case: Case, kernel: Kernel, device: str) -> None:
    given = arguments(case, kernel, device)
    found = verify.differences(kernel, given, case.precision if device == "cuda" else "ieee")
    verify.demand(found)
    # a bound that promises nothing would make the comparison empty; integers meet their thresholds exactly, and are compared bit for bit
    assert case.integers or all(d.promised > 0.5 for d in found.values()), found


def marked(chosen: list[Case]) -> list[Any]:
    return [pytest.param(c, marks=[pytest.mark.triton, *([] if c in FAST else [pytest.mark.slow])]) for c in chosen]


@pytest.mark.parametrize("case", marked(INTERPRETED), ids=str)
def test_interpreter(case: Case) -> None:
    check(case, epigen.compile(case.text, config=case.config, backend="interpreter", precision=case.precision), "cpu")


@pytest.mark.parametrize("case", cases.share(REFERRED, 4), ids=str)
def test_reference(case: Case) -> None:
    """The fp32 reference that answers CPU tensors, and its rounding points."""
    check(case, epigen.compile(case.text), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.all_cases(), ids=str)
def test_gpu(case: Case) -> None:
    check(case, epigen.compile(case.text, config=case.config, precision=case.precision), "cuda")


@pytest.mark.parametrize("case", marked(EXACT), ids=str)
def test_integers_bit_for_bit(case: Case) -> None:
    check_bits(case, epigen.compile(case.text, config=case.config, backend="interpreter"), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.exact_cases(), ids=str)
def test_gpu_integers_bit_for_bit(case: Case) -> None:
    check_bits(case, epigen.compile(case.text, config=case.config), "cuda")


def check_bits(case: Case, kernel: Kernel, device: str) -> None:
    """Where every sum is exact, in any order, the kernel's bits are the oracle's."""
    given = arguments(case, kernel, device)
    found = kernel(given.a, given.b, **given.inputs)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    dtypes = [output_dtype(kernel.graph, o, BY_TORCH[str(given.a.dtype)]) for o in kernel.graph.outputs]
    for result, expected in zip(results, reference.evaluate(kernel.graph, given.a, given.b, given.inputs, dtypes), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_bound_catches_an_error_of_two_roundings() -> None:
    """The comparison is not so loose that a wrong kernel passes."""
    kernel = epigen.compile("relu(mm + bias)")
    given = verify.sample(kernel.graph, (40, 50, 30), *(3 * (BY_TORCH["torch.float16"],)))
    expected = bound.expect(kernel.graph, given.a, given.b, given.inputs, [BY_TORCH["torch.float16"]], "ieee")[0]
    right = kernel(given.a, given.b, **given.inputs)
    assert bound.compare(right, expected).ok
    wrong = right.clone()
    wrong[right == right.max()] *= 1 + 2**-9
    assert not bound.compare(wrong, expected).ok
    wrong = right.clone()
    wrong[3, 4] = float("nan")
    assert bound.compare(wrong, expected).where == (3, 4)
