"""What a fast call's function reads like: the golden file has some whole, and the module's docstring the simplest of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from fake_gpu import FakeGpu
from warmed import LIBRARY, MARKS, M, N, compiled, half, launched, operands

from epigen.codegen.spec import KernelConfig
from epigen.runtime import fast_call, vendor

pytestmark = MARKS

GOLDEN = Path(__file__).parents[2] / "golden" / "fast_calls.txt"
SAMPLE = "relu(mm + bias), into out"
CALLS: dict[str, tuple[str, KernelConfig | None, dict[str, Any], bool]] = {
    SAMPLE: ("relu(mm + bias)", None, {"bias": half(N)}, True),
    "relu(mm + bias), allocated": ("relu(mm + bias)", None, {"bias": half(N)}, False),
    "a number, a mask and sums, by a kernel of their own": ("z = mm * s; z, bitmask(z > 0), sum(z, m)", None, {"s": 0.5}, False),
    "the vendor's product first": ("relu(mm + bias)", LIBRARY, {"bias": half(N)}, False),
    "TMA descriptors": ("relu(mm + bias)", cases.persistent(), {"bias": half(N)}, True),
}


def text_of(function: Any) -> str:
    return "".join(line[4:] for line in inspect.getsource(function).splitlines(keepends=True))


def test_the_texts_are_those_of_the_golden_file(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, update_golden: bool) -> None:
    multiplied = torch.zeros(M, N)
    monkeypatch.setattr(vendor, "product", lambda _a, _b, _precision: multiplied)
    shown: dict[str, str] = {}
    for what, (text, config, inputs, given) in CALLS.items():
        kernel = compiled(text) if config is None else compiled(text, config)
        a, b = operands()
        out = half(M, N) if given else None
        kernel(a, b, out=out, **inputs)
        assert launched(gpu, kernel, a, b, out=out, **inputs)
        ((again, _),) = kernel._calls.newest[type(out)]
        shown[what] = text_of(again)
    written = "\n".join(f"== {what}\n{text}" for what, text in shown.items())
    if update_golden:
        GOLDEN.write_text(written)
    assert written == GOLDEN.read_text(), "pytest tests/runtime/warmed_calls/test_texts.py --update-golden writes it anew"
    sample = "".join(f"    {line}\n" if line else "\n" for line in shown[SAMPLE].splitlines())
    assert fast_call.__doc__ is not None and sample in fast_call.__doc__, sample
