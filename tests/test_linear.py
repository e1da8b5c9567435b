"""`epigen.linear` and chains of layers: their gradients are torch's, whatever is given, saved and asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import epigen
from epigen import api
from epigen.errors import CallError, DerivationError
from epigen.ir.derivation import SAVE
from epigen.runtime import kernel as kernel_module
from epigen.training import library
from epigen.training.linear import Link, chain


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0, grad: bool = True) -> Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return drawn.to(dtype).requires_grad_(grad)


# -- in the dtypes that are trained


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh, "silu": F.silu}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def layers_of(sizes: tuple[int, ...], dtype: torch.dtype, act: str, save: str | None = None) -> tuple[list[Link], list[Tensor]]:
    """A chain of layers, and its parameters."""
    weights = [normal(n, k, seed=n, dtype=dtype, scale=k**-0.5) for k, n in itertools.pairwise(sizes)]
    biases = [normal(n, seed=n + 50, dtype=dtype, scale=0.5) for n in sizes[1:]]
    epilogues = [*(f"{act}(mm + bias)" for _ in sizes[2:]), "mm + bias"]
    layers = [Link(w, {"bias": b}, e, save) for w, b, e in zip(weights, biases, epilogues, strict=True)]
    return layers, [*weights, *biases]


def eager(x: Tensor, layers: list[Link], act: str) -> Tensor:
    """The same by torch in float64, of leaves that share nothing with it."""
    for i, layer in enumerate(layers):
        x = F.linear(x, layer.weight.double(), layer.inputs["bias"].double())  # type: ignore[union-attr]
        x = ACTIVATIONS[act](x) if i + 1 < len(layers) else x
    return x


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("lead", [(7,), (2, 3), (), (0,)], ids=str)
def test_a_chain_in_each_dtype(dtype: torch.dtype, act: str, lead: tuple[int, ...]) -> None:
    layers, parameters = layers_of((13, 17, 9, 5), dtype, act)
    x = normal(*lead, 13, seed=1, dtype=dtype)
    found, expected = chain(x, layers), eager(x.double(), layers, act)
    assert found.shape == (*lead, 5) and found.dtype == dtype
    grad = normal(*lead, 5, seed=2, dtype=dtype, grad=False)
    wanted = torch.autograd.grad(expected, (x, *parameters), grad.double())
    for t, e, leaf in zip(torch.autograd.grad(found, (x, *parameters), grad), wanted, (x, *parameters), strict=True):
        assert t.dtype == leaf.dtype and t.shape == leaf.shape
        torch.testing.assert_close(t, e, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("save", [None, "recompute"])
@pytest.mark.parametrize(("act", "dtype"), [("relu", torch.float16), ("gelu", torch.float32)], ids=str)
def test_the_generated_kernels_run_a_step(act: str, dtype: torch.dtype, save: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Triton's interpreter, beside the reference."""
    layers, parameters = layers_of((24, 40, 33), dtype, act, save)
    x = normal(20, 24, seed=1, dtype=dtype)
    expected = torch.autograd.grad(chain(x, layers).float().square().sum(), (x, *parameters))
    run: list[str] = []

    def interpreted(text: str, _tune: str | None) -> kernel_module.Kernel:
        run.append(text)
        return api.compile(text, backend="interpreter")

    monkeypatch.setattr(library, "kernel", interpreted)
    for t, e in zip(torch.autograd.grad(chain(x, layers).float().square().sum(), (x, *parameters)), expected, strict=True):
        torch.testing.assert_close(t, e, rtol=4 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    backward = "mm, mask" if act == "relu" and not save else "dgelu(mm, z[m,n])" if not save else "grad[m,n]"
    assert len(run) == 4 and backward in run[3]


def test_a_layers_derivative_rides_in_the_next_ones_product(ran: list[str]) -> None:
    """The programs of a step, in order: what runs over a gradient that is there is a pass of its own."""
    layers, _ = layers_of((8, 8, 8, 8), torch.float32, "relu")
    chain(normal(4, 8), layers).sum().backward()
    forward = "out = relu(mm + bias); saved = bitmask(~(out <= 0)); out, saved"
    backward = "dmm = drelu(mm, mask); dbias = bgrad(dmm); dmm, dbias"
    assert ran == [forward, forward, "mm + bias", "dbias = bgrad(mm); dbias", backward, backward]
    ran.clear()
    with torch.no_grad():
        chain(normal(4, 8), layers)
    assert ran == ["relu(mm + bias)"] * 2 + ["mm + bias"]


def test_relu_at_zero_and_nan_is_as_in_pytorch() -> None:
    x = torch.tensor([[0.0, -0.0, float("nan"), 1.0, -1.0, float("inf"), -float("inf")]]).T.requires_grad_()
    weight = torch.ones(1, 1, requires_grad=True)
    grad = torch.arange(1.0, 8.0)[:, None]
    for save in (None, *SAVE):
        found, expected = epigen.linear(x, weight, epilogue="relu(mm)", save=save), torch.relu(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(torch.autograd.grad(found, x, grad), torch.autograd.grad(expected, x, grad), rtol=0, atol=0)


def test_results_of_several_kinds_and_leading_dimensions() -> None:
    text = "z = mm + bias; y = relu(z) * gate[m,n] * scale_a[m]; live = bitmask(z > 0); rows = sum(y, n); columns = sum(y, m); y, live, rows, columns, sum(y)"
    x, w, b = normal(2, 3, 4), normal(9, 4, seed=1), normal(9, seed=2)
    gate, row = normal(2, 3, 9, seed=3), normal(2, 3, seed=4)
    found = epigen.linear(x, w, b, text, gate=gate, scale_a=row)
    y = torch.relu(F.linear(x, w, b)) * gate * row[..., None]
    assert [tuple(t.shape) for t in found] == [(2, 3, 9), (2, 3, 2), (2, 3), (9,), ()]
    torch.testing.assert_close(found.y, y)
    torch.testing.assert_close(found.rows, y.sum(-1))
    assert not found.live.requires_grad and found.columns.requires_grad
    leaves = (x, w, b, gate, row)
    expected = torch.autograd.grad(y.square().sum() + y.sum(-1).exp().sum(), leaves)
    for t, e in zip(torch.autograd.grad(found.y.square().sum() + found.rows.exp().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(t, e, rtol=1e-4, atol=1e-4)
    drawn = epigen.linear(x, w, epilogue="drelu(mm, mask)", mask=found.live)
    torch.testing.assert_close(drawn, torch.where(F.linear(x, w, b) > 0, F.linear(x, w), 0.0))


def test_outputs_without_a_derivative_are_left_out_by_of() -> None:
    x, w = normal(5, 4), normal(9, 4, seed=1)
    with pytest.raises(DerivationError, match="'amax' has no derivative"):
        epigen.linear(x, w, epilogue="y = gelu(mm); y, amax(y)")
    y, top = epigen.linear(x, w, epilogue="y = gelu(mm); y, amax(y)", of="y")
    assert y.requires_grad and not top.requires_grad and top == y.abs().max()


def test_a_gradient_of_another_dtype_and_layout() -> None:
    """What arrives may be fp32 of an output that is cast, expanded or transposed; what goes on has the operands' dtype."""
    x, w, residual = normal(5, 4, dtype=torch.float16), normal(9, 4, seed=1, dtype=torch.float16), normal(5, 9, seed=2)
    y = epigen.linear(x, w, epilogue="cast(gelu(mm) + residual, fp32)", residual=residual)
    assert y.dtype == torch.float32
    for grad in (torch.ones(()).expand(5, 9), normal(9, 5, grad=False).t()):
        dx, dw, dresidual = torch.autograd.grad(y, (x, w, residual), grad, retain_graph=True)
        assert (dx.dtype, dw.dtype) == (torch.float16,) * 2 and torch.equal(dresidual, grad)
        expected = torch.autograd.grad(F.gelu(F.linear(x.double(), w.double())), (x, w), grad.double())
        torch.testing.assert_close((dx, dw), expected, rtol=4e-3, atol=4e-3)


def test_the_input_itself_may_be_a_residual() -> None:
    x, w = normal(5, 4), normal(4, 4, seed=1)
    found = epigen.linear(x, w, epilogue="relu(mm) + residual", residual=x)
    for t, e in zip(*(torch.autograd.grad(y.square().sum(), (x, w)) for y in (found, torch.relu(F.linear(x, w)) + x)), strict=True):
        torch.testing.assert_close(t, e)


def test_a_weights_gradient_is_added_to_a_buffer() -> None:
    """In fp32 whatever the operands, over several steps whose forwards all come first, and at each layer of a chain."""
    layers, (first, second, *biases) = layers_of((6, 8, 5), torch.bfloat16, "relu")
    buffers = [torch.ones_like(t, dtype=torch.float32) for t in (first, second)]
    buffered = [layer._replace(main_grad=b) for layer, b in zip(layers, buffers, strict=True)]
    batches = [normal(7, 6, seed=s, dtype=torch.bfloat16, grad=False) for s in range(3)]
    losses = [chain(x, buffered).float().sum() for x in batches]
    for loss in losses:
        loss.backward()
    expected = torch.autograd.grad(sum(eager(x.double(), layers, "relu").sum() for x in batches), (first, second))
    assert first.grad is None and second.grad is None and all(b.grad is not None for b in biases)
    for buffer, e in zip(buffers, expected, strict=True):
        torch.testing.assert_close(buffer.double() - 1, e.double(), rtol=0.02, atol=0.05)
    with pytest.raises(CallError, match=r"out for 'out' is torch\.bfloat16 \[5, 8\] on cpu, and torch\.float32 \[5, 8\]"):
        chain(batches[0], [layers[0], layers[1]._replace(main_grad=buffers[1].bfloat16())]).sum().backward()


# -- what is refused


def test_double_backward_says_what_to_write() -> None:
    """Also where the gradient that arrives is a constant, as of a sum: else the second derivative would silently be 0."""
    x, w = normal(5, 4), normal(9, 4, seed=1)
    (dx,) = torch.autograd.grad(epigen.linear(x, w, epilogue="gelu(mm)").sum(), x, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(CallError, match=r"no second derivative: for double backward write it in torch's own operations"):
        dx.square().sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (5, 3)}, r"weight is \[9, 4\], and \[N, K\] with K = 3 was expected"),
        ({"x": ()}, "x has no dimensions"),
        ({"weight": (9, 4, 1)}, r"weight is \[9, 4, 1\]"),
        ({"bias": (8,)}, r"input 'bias' is declared as bias\[n\], so \[N\] = \[9\] was expected, and it has shape \[8\]"),
        ({"bias": None}, r"missing input 'bias' of the epilogue 'relu\(mm \+ bias\)': give it, or write the epilogue without it"),
        ({"gaet": (5, 9)}, r"has no input 'gaet': its inputs are bias"),
        ({"epilogue": "mm + bias + gate[m,n]", "gaet": (5, 9)}, "has no input 'gaet': did you mean gate"),
        ({"epilogue": "mm + bias + gate[m,n]", "gate": (4, 9)}, r"input 'gate' is declared as gate\[m,n\]"),
        ({"save": "masks"}, "unknown save='masks': did you mean mask"),
        ({"of": "y"}, "the program has no output 'y'"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": (5, 4), "weight": (9, 4), "bias": (9,)} | change
    given = {name: normal(*value) if isinstance(value, tuple) else value for name, value in given.items()}
    with pytest.raises(CallError, match=message):
        epigen.linear(given.pop("x"), given.pop("weight"), **given)


def test_dtypes_that_do_not_fit_are_said() -> None:
    with pytest.raises(CallError, match=r"operand a is fp32 and operand b is fp16"):
        epigen.linear(normal(5, 4), normal(9, 4, dtype=torch.float16), epilogue="mm")
    with pytest.raises(CallError, match=r"weight is torch\.float64, which epigen does not compute with: train with fp16, bf16 or fp32"):
        epigen.linear(normal(5, 4, dtype=torch.float64), normal(9, 4, dtype=torch.float64), epilogue="mm")
    with pytest.raises(CallError, match="does not give one tile, which the next layer could multiply"):
        chain(normal(5, 4), [Link(normal(4, 4), {}, "mm, sum(mm, n)"), Link(normal(4, 4), {}, "mm")])


def test_a_change_in_place_between_forward_and_backward_is_noticed() -> None:
    layers, _ = layers_of((4, 4, 4), torch.float32, "relu")
    loss = chain(normal(5, 4), layers).sum()
    with torch.no_grad():
        layers[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
