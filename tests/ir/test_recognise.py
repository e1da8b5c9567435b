"""Activations that are written out become the rows that they are, and nothing else does."""

from __future__ import annotations

import pytest
import torch

import epigen
from epigen import api
from epigen.ir.recognise import recognised
from epigen.ir.unparse import unparse

U = "0.7978845608028654"
SPELT = {
    f"mm * 0.5 * (1 + tanh({U} * (mm + 0.044715 * mm ** 3)))": "gelu_tanh(mm)",
    f"0.5 * mm * (1 + tanh(mm * {U} * (1 + 0.044715 * mm * mm)))": "gelu_tanh(mm)",
    "mm * 0.5 * (1.0 + tanh(0.79788456 * mm * (1 + 0.044715 * mm * mm)))": "gelu_tanh(mm)",
    f"z = mm + bias; t = tanh({U} * (z + 0.044715 * z * z * z)); 0.5 * z * (1 + t), bitmask(z > 0)": "z = mm + bias[n]; gelu_tanh(z), bitmask(z > 0)",
    "mm * 0.5 * (1 + erf(mm / 1.4142135623730951))": "gelu(mm)",
    "mm * sigmoid(1.702 * mm)": "quick_gelu(mm)",
    "1 / (1 + exp(-mm))": "sigmoid(mm)",
    "(mm + bias) / (1 + exp(-(mm + bias)))": "silu(mm + bias[n])",
    "mm * sigmoid(mm) * gate[m,n]": "silu(mm) * gate[m,n]",
    "mm * tanh(softplus(mm))": "mish(mm)",
    "grad[m,n] * (sigmoid(mm) * (1 + mm * (1 - sigmoid(mm))))": "dsilu(grad[m,n], mm)",
    f"t = tanh({U} * (mm + 0.044715 * mm ** 3)); s = mm * 0.5; (1 + t) * 0.5 * g[m,n] + s * (1 - t * t) * ({U} * (1 + 0.134145 * mm * mm)) * g[m,n]": "dgelu_tanh(g[m,n], mm)",
    "g[m,n] * h[m,n] * (0.5 * (1 + erf(mm * 0.7071067811865476)) + mm * 0.3989422804014327 * exp(-0.5 * mm * mm))": "dgelu(g[m,n] * h[m,n], mm)",
}
OTHERS = [
    "mm * sigmoid(1.7 * mm)",  # nearly, and not it
    f"mm * 0.5 * (1 + tanh({U} * (mm + 0.0447 * mm ** 3)))",
    "log(1 + exp(mm))",  # infinite above 88, where softplus is its argument
    "mm * sigmoid(gate[m,n])",
    "tanh(mm) * gate[m,n] + bias",
    "exp(mm) * 2",
    "mm * sigmoid(mm + bias)",
    "sum(exp(mm), n)",
]  # fmt: skip


@pytest.mark.parametrize("text", SPELT)
def test_what_is_spelt_out_is_known(text: str) -> None:
    assert unparse(recognised(api.graph_of(text))) == unparse(api.graph_of(SPELT[text]))


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_something_else_stays(text: str) -> None:
    graph = api.graph_of(text)
    assert recognised(graph) == graph


def test_every_smooth_activation_is_known_by_its_own_formula() -> None:
    """As torch composes it, with its derivative: what a row's `torch` says, in the language."""
    for name, text in {
        "tanhshrink": "mm - tanh(mm)",
        "logsigmoid": "-softplus(-mm)",
        "sigmoid": "0.5 * (1 + tanh(0.5 * mm))",
        "tanh": "2 * sigmoid(2 * mm) - 1",
    }.items():
        assert unparse(recognised(api.graph_of(text))) == f"{name}(mm)", text


@pytest.mark.parametrize("text", SPELT)
def test_the_values_are_the_same(text: str) -> None:
    a, b = torch.randn(9, 16), torch.randn(16, 24)
    inputs = {name: torch.randn(9, 24) for name in ("gate", "grad", "g", "h")} | {"bias": torch.randn(24)}
    found, wanted = (epigen.compile(t)(a, b, **{n.name: inputs[n.name] for n in api.graph_of(t).inputs()}) for t in (SPELT[text], text))
    for x, y in zip(*((r,) if isinstance(r, torch.Tensor) else r for r in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
