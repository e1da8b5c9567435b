"""What the tests reduce by halves is what Triton's interpreter finds element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_interpreter import reduce_by_halves

import epigen

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("text", ["bitmask(mm > 0), max(mm, n), amax(mm, m), max(mm)", "z = mm + bias; z, bitmask(z > 0), amax(z)"])
def test_both_find_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = torch.randn(24, 16).half(), torch.randn(16, 40).half(), torch.randn(40).half()
    x[3, 5], w[2, 7], bias[11] = float("nan"), float("inf"), float("-inf")
    kernel, given = epigen.compile(text, backend="interpreter"), {"bias": bias} if "bias" in text else {}
    by_halves = kernel(x, w, **given)
    from triton.runtime.interpreter import ReduceOps

    assert ReduceOps.generic_reduce is reduce_by_halves
    calls: list[Any] = []

    def by_elements(*args: Any) -> Any:
        calls.append(args)
        return ReduceOps.by_elements(*args)

    monkeypatch.setattr(ReduceOps, "generic_reduce", by_elements)
    for found, wanted in zip(by_halves, kernel(x, w, **given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert calls
