"""torch's products of fp8 operands with scales under `torch.compile(model, backend=backend)`, as torchao's layers have them: taken with what follows, and eager's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from beside_eager import drawn
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from under_torch import APART

from epigen.training import backend as backend_module
from epigen.training import library
from epigen.training.backend import backend
from epigen.training.report import Seen

pytestmark = [APART, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own compiler, which imports what it says to leave

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _scales_of_rows() -> bool:
    """Whether torch's product on the CPU takes them: that of torch 2.11 takes one scale for each operand alone."""
    held, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(held, held.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


ROWS = pytest.mark.skipif(not _scales_of_rows(), reason="on the CPU this torch takes one scale for each operand alone")


def quantised(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """In fp8, and the scale of all, or of each row or column along `dim`, as torchao's dynamic quantisation computes it."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (largest.float() / LARGEST).clamp(min=1e-12)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


class Layer(nn.Module):
    """A linear layer whose weight is held in fp8, and whose input is quantised at each call. rows: each row and column has a scale of its own."""

    def __init__(self, k: int, n: int, rows: bool, fast: bool, bias: bool = True):
        super().__init__()
        weight, bias_ = drawn((n, k), (n,))
        self.rows, self.fast = rows, fast
        held, scale = quantised(weight, 1 if rows else None)
        self.register_buffer("weight", held)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias_.bfloat16() if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        held, scale = quantised(x.flatten(0, -2), -1 if self.rows else None)
        y = torch._scaled_mm(
            held, self.weight.t(), scale_a=scale, scale_b=self.scale.t() if self.rows else self.scale, bias=self.bias, out_dtype=torch.bfloat16,
            use_fast_accum=self.fast,
        )  # fmt: skip
        return y.view(*x.shape[:-1], -1)


def run(function: Any, *given: Tensor, step: float = 2e-2, **options: Any) -> tuple[Any, list[Seen]]:
    """step: between two numbers of what comes out: eager rounds before what follows a product as well."""
    torch._dynamo.reset()
    seen: list[Seen] = []
    model = torch.compile(function, backend=backend, options={"rest": "eager", "report": seen.extend}, **options)
    with torch.no_grad():
        found, expected = model(*given), function(*given)
    torch.testing.assert_close(found.float(), expected.float(), rtol=step, atol=step)
    return model, seen


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=ROWS)])
def test_a_layer_with_an_activation(rows: bool, fast: bool) -> None:
    """A scale a row and a column, or one for all, and the bias, in the kernel of the product; whose sums are torch's use_fast_accum's."""
    layer = Layer(64, 48, rows, fast)
    model, seen = run(lambda x: F.gelu(layer(x)), drawn((2, 16, 64))[0].bfloat16())
    (only,) = [s for s in seen if s.graph == "inference"]
    # the scale of the rows is computed of what was largest in each
    largest, scale = ("x0[m]", "x1[n]") if rows else ("x0", "x1")
    assert re.fullmatch(rf"gelu\(mm \* maximum\({re.escape(largest)} / 448, 1e-12\) \* {re.escape(scale)} \+ x2\[n\]\)", only.program)
    assert only.shape == (32, 48, 64)
    assert only.call is not None and only.call.options == ('{"precision": "fast_accum"}' if fast else None)
    assert library.kernel(only.program, None, only.call.options).plan(dtype=_fp8()).spec.promoted != fast
    assert model is not None


@ROWS
def test_a_gated_mlp_with_a_residual() -> None:
    """What is quantised next is computed by the kernel that looks for the largest of its rows. What is added comes by the last product's kernel."""
    gate, up, down = Layer(64, 96, True, True, False), Layer(64, 96, True, True, False), Layer(96, 64, True, True, False)
    _, seen = run(lambda x: x + down(F.silu(gate(x)) * up(x)), drawn((2, 16, 64))[0].bfloat16())
    *others, last = seen
    assert [s.why for s in others] == ["the kernel that reads it next does what follows it as well"] * 2
    assert last.program == "x2[m,n] + mm * maximum(x0[m] / 448, 1e-12) * x1[n]"


@ROWS
def test_rows_that_vary() -> None:
    layer = Layer(64, 48, True, False)
    model, seen = run(lambda x: F.relu(layer(x)), drawn((16, 64))[0].bfloat16(), dynamic=True)
    with torch.no_grad():
        again = drawn((32, 64))[0].bfloat16()
        torch.testing.assert_close(model(again).float(), F.relu(layer(again)).float(), rtol=2e-2, atol=2e-2)
    assert seen[0].program.endswith("* x2[n] + x3[n])") and "relu(mm * " in seen[0].program


@ROWS
@pytest.mark.parametrize("dynamic", [False, True])
def test_how_it_is_summed_is_said_in_the_code_of_inductor(dynamic: bool) -> None:
    layer, (x,) = Layer(64, 48, True, True), drawn((16, 64))
    torch._dynamo.reset()
    model = torch.compile(lambda x: F.gelu(layer(x)), backend=backend, dynamic=dynamic, options={"fx_graph_cache": False})
    with torch.no_grad():
        found, (code,) = run_and_get_code(model, x.bfloat16())
        expected = F.gelu(layer(x.bfloat16())).float()
        for y in (found, model(x.bfloat16())):
            torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    assert f'static={not dynamic}, options=\'{{"precision": "fast_accum"}}\')' in code and "torch.ops.epigen.fused.default(" not in code


@ROWS
def test_what_is_made_fp8_again() -> None:
    """The next layer's operand is computed of the product, scaled as it was the last time, and comes out of the same kernel."""
    layer, step = Layer(64, 48, True, False), torch.tensor(0.05)

    def delayed(x: Tensor, step: Tensor) -> Tensor:
        return (F.relu(layer(x)) / step).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

    _, seen = run(delayed, drawn((16, 64))[0].bfloat16(), step, step=0.13)
    assert seen[0].program == "cast(minimum(maximum(relu(mm * maximum(x0[m] / 448, 1e-12) * x1[n] + x2[n]) / x3, -448), 448), fp8e4m3)"


def test_other_scales_are_left() -> None:
    """Of blocks along k there is no kernel yet, and the product stays torch's."""

    def blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return F.relu(torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16))

    held = [torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in ((256, 512), (128, 512))]
    graph = make_fx(lambda a, b: blocks(a, b.t(), torch.ones(256, 1), torch.ones(1, 128)), tracing_mode="fake")(*held).graph
    (product,) = [n for n in graph.nodes if n.target is torch.ops.aten._scaled_mm.default]
    scale = product.args[2]
    scale.meta["val"] = scale.meta["val"].expand(256, 4)
    (only,) = backend_module.fuse(graph)
    assert only.why == "its scales are [256, 4] of torch.float32 and [1, 128] of torch.float32, and not one each, or one a row and a column, of fp32"


def _fp8() -> Any:
    from epigen.dtypes import FP8E4M3

    return FP8E4M3
