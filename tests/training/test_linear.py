"""`epigen.linear` and chains of layers: their gradients are torch's, whatever is given, saved and asked for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from golden import Golden
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import epigen
from epigen import api
from epigen.errors import CallError, DerivationError
from epigen.ir.derivation import SAVE
from epigen.runtime import kernel as kernel_module
from epigen.training import library
from epigen.training.again import call as chain
from epigen.training.layer import Link


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0, grad: bool = True) -> Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return drawn.to(dtype).requires_grad_(grad)


# -- what is read


def test_a_layer_that_trains_reads_its_users_program_alone(parsed: list[str]) -> None:
    """The forward that keeps more, and the backward, are written for torch's operations by name, and become kernels by their graphs."""
    text = "gelu(mm + bias) * 0.37"
    x, w, b = normal(8, 4), normal(6, 4, seed=1), normal(6, seed=2)
    found = epigen.linear(x, w, b, text)
    expected = F.gelu(F.linear(x, w, b)) * 0.37
    grad = normal(8, 6, seed=3, grad=False)
    for mine, torchs in zip(torch.autograd.grad(found, (x, w, b), grad), torch.autograd.grad(expected, (x, w, b), grad), strict=True):
        torch.testing.assert_close(mine, torchs)
    assert parsed == [text] and found.grad_fn is not None


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


@pytest.mark.triton
@pytest.mark.parametrize("save", [None, "recompute"])
@pytest.mark.parametrize(("act", "dtype"), [("relu", torch.float16), ("gelu", torch.float32)], ids=str)
def test_the_generated_kernels_run_a_step(act: str, dtype: torch.dtype, save: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Triton's interpreter, beside the reference."""
    layers, parameters = layers_of((24, 40, 33), dtype, act, save)
    x = normal(20, 24, seed=1, dtype=dtype)
    expected = torch.autograd.grad(chain(x, layers).float().square().sum(), (x, *parameters))
    run: list[str] = []

    def interpreted(text: str, _tune: str | None, _options: str | None = None) -> kernel_module.Kernel:
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


@pytest.mark.parametrize(
    ("dtype", "bias", "expected"), [(torch.float16, torch.float16, "cast(bgrad(dmm), fp16)"), (torch.bfloat16, torch.float32, "bgrad(dmm)")]
)
def test_a_kernel_writes_the_biass_gradient_in_its_dtype(dtype: torch.dtype, bias: torch.dtype, expected: str, ran: list[str]) -> None:
    """No launch follows that only rounds it: it is rounded where it is summed."""
    x, weight, shift = normal(4, 8, dtype=dtype), normal(8, 8, dtype=dtype), normal(8, dtype=bias)
    found = epigen.linear(x, weight, epilogue="tanh(mm + bias)", bias=shift)
    grads = torch.autograd.grad(found, (x, weight, shift), torch.ones_like(found))
    assert expected in ran[-1] and ran[-1].endswith("dmm, dbias") and ("cast(bgrad" in ran[-1]) == ("cast" in expected)
    assert [g.dtype for g in grads] == [dtype, dtype, bias]
    wanted = torch.autograd.grad(torch.tanh(x.float() @ weight.float().t() + shift.float()), shift, torch.ones(4, 8))
    torch.testing.assert_close(grads[2].float(), wanted[0].float(), rtol=1e-2, atol=1e-2)


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


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sign(mm)": lambda mm, _g, _v: torch.sign(mm),
    "sign(mm) * g[m,n] + v[n]": lambda mm, g, v: torch.sign(mm) * g + v,
    "floor(mm * g[m,n])": lambda mm, g, _v: torch.floor(mm * g),
    "ceil(mm) + round(v[n])": lambda mm, _g, v: torch.ceil(mm) + torch.round(v),
    "mm + detach(round(mm) - mm)": lambda mm, _g, _v: mm + (torch.round(mm) - mm).detach(),
    "where(v[n] > 0, sign(mm), g[m,n])": lambda mm, g, v: torch.where(v > 0, torch.sign(mm), g),
    "z = sign(mm) * g[m,n]; z, sum(z, m)": lambda mm, g, _v: torch.sign(mm) * g,
}


@pytest.mark.parametrize("text", STEPS)
@pytest.mark.parametrize("frozen", ["", "x", "w", "g"])
def test_what_is_followed_in_steps_alone_has_a_gradient_of_zeros(text: str, frozen: str) -> None:
    """As torch has it, whose optimisers pass over a parameter without any; what is compared or detached has none. At the first call, and at those that are like it."""
    tensors = {"x": normal(2, 5, 8), "w": normal(6, 8, seed=1), "g": normal(2, 5, 6, seed=2), "v": normal(6, seed=3)}
    given = {name: t.detach().requires_grad_(name != frozen) for name, t in tensors.items()}
    asked = [t for t in given.values() if t.requires_grad]
    inputs = {name: given[name] for name in ("g", "v") if f"{name}[" in text}
    for _ in range(4):
        found = epigen.linear(given["x"], given["w"], epilogue=text, **inputs)
        found = found[0] if isinstance(found, tuple) else found
        expected = STEPS[text](given["x"] @ given["w"].t(), given["g"], given["v"])
        assert found.requires_grad == expected.requires_grad
        if expected.requires_grad:
            both = (torch.autograd.grad(y.square().sum(), asked, allow_unused=True) for y in (found, expected))
            torch.testing.assert_close(*both)


@pytest.mark.parametrize(
    "text", ["sign(mm), sum(a, k)", "sum(a, k), tanh(sign(mm)) ** 2", "detach(mm), sum(b, k)", "sign(mm) * bias, amax(a, k)", "relu(mm), sum(b, k)"]
)
@pytest.mark.parametrize("frozen", ["", "x", "w"])
def test_a_gradient_that_no_product_gives_is_refused_and_not_zero(text: str, frozen: str) -> None:
    """Also where the product itself is followed in steps alone."""
    x, w = (t.requires_grad_(name != frozen) for name, t in (("x", normal(3, 4)), ("w", normal(5, 4))))
    with pytest.raises(DerivationError, match=r"a reduction of the operand '[ab]' gives it a gradient that does not pass through mm"):
        epigen.linear(x, w, *([normal(5)] if "bias" in text else []), epilogue=text)
    with torch.no_grad():
        assert len(epigen.linear(x, w, *([normal(5)] if "bias" in text else []), epilogue=text)) == 2


def test_a_layer_behind_a_step_has_gradients_of_zeros_too() -> None:
    x, w, v = normal(5, 8), normal(6, 8, seed=1), normal(3, 6, seed=2)
    found = chain(x, [Link(w, {}, "relu(mm)"), Link(v, {}, "round(mm)")])
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (x, w, v)), tuple(map(torch.zeros_like, (x, w, v))))
    found = chain(x, [Link(w, {}, "round(mm)"), Link(v, {}, "relu(mm)")])
    expected = torch.relu(torch.round(x @ w.t()) @ v.t())
    both = (torch.autograd.grad(y.sum(), (x, w, v)) for y in (found, expected))
    torch.testing.assert_close(*both)


def test_outputs_without_a_derivative_are_left_out_by_of(golden: Golden) -> None:
    x, w = normal(5, 4), normal(9, 4, seed=1)
    with golden.raises(DerivationError):
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


def test_a_weights_gradient_is_added_to_a_buffer(golden: Golden) -> None:
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
    with golden.raises(CallError):
        chain(batches[0], [layers[0], layers[1]._replace(main_grad=buffers[1].bfloat16())]).sum().backward()


@pytest.mark.parametrize("option", [{"save": ["recompute"]}, {"tune": ["missing"]}, {"of": 3}, {"of": [3]}], ids=str)
def test_an_option_of_another_kind_is_named(option: dict[str, Any], golden: Golden) -> None:
    with golden.raises(CallError, str(option)):
        epigen.linear(normal(2, 4), normal(9, 4, seed=1), normal(9, seed=2), "gelu(mm + bias)", **option)


def test_without_an_epilogue_it_is_torchs_linear() -> None:
    x, w, b = normal(2, 3, 4), normal(9, 4, seed=1), normal(9, seed=2)
    torch.testing.assert_close(epigen.linear(x, w, b), F.linear(x, w, b))
    torch.testing.assert_close(epigen.linear(x, w), F.linear(x, w))


def test_a_number_scales_the_product_as_addmms_alpha_does(golden: Golden) -> None:
    x, w, b = normal(2, 3, 4), normal(9, 4, seed=1).requires_grad_(), normal(9, seed=2)
    torch.testing.assert_close(epigen.linear(x, w, epilogue=2), F.linear(x, w) * 2)
    result = epigen.linear(x, w, b, -0.5)
    torch.testing.assert_close(result, torch.addmm(b, x.view(6, 4), w.T, alpha=-0.5).view(2, 3, 9))
    (gradient,) = torch.autograd.grad(result.sum(), w)
    torch.testing.assert_close(gradient, -0.5 * x.sum((0, 1)).expand(9, 4))
    with golden.raises(CallError):
        epigen.linear(x, w, epilogue=2.0, alpha=3.0)


@pytest.mark.parametrize("name", ["save", "of", "tune", "main_grad", "epilogue", "inputs", "x", "weight", "more"])
def test_an_input_may_have_any_name(name: str) -> None:
    """As a keyword, but for that of the program itself; and in a mapping."""
    x, w, text = normal(5, 4), normal(9, 4, seed=1), f"gelu(mm) * {name}"
    expected = F.gelu(F.linear(x, w)) * 2
    torch.testing.assert_close(epigen.linear(x, w, epilogue=text, inputs={name: 2.0}), expected)
    torch.testing.assert_close(epigen.nn.Linear(4, 9, bias=False, epilogue=text)(x, inputs={name: torch.tensor(2.0)}).shape, expected.shape)
    if name != "epilogue":
        given: dict[str, Any] = {name: 2.0}
        torch.testing.assert_close(epigen.linear(x, w, epilogue=text, **given), expected)
    if name in ("save", "of"):
        given = {name: {"save": "recompute", "of": "out"}[name]}
        torch.testing.assert_close(epigen.linear(x, w, epilogue=text, inputs={name: 2.0}, **given), expected)
    if name == "main_grad":
        buffer = torch.zeros(9, 4)
        epigen.linear(x, w, epilogue=text, inputs={name: 2.0}, main_grad=buffer).sum().backward()
        assert buffer.any() and w.grad is None


# -- leading dimensions


@pytest.mark.parametrize(
    ("declared", "shape"),
    [("g[m,n]", (3, 2, 9)), ("g[m,n]", (6, 9)), ("g[m,n]", (2, 1, 8)), ("g[m,n]", (2, 3, 1, 9)), ("g[m]", (3, 2)), ("g[m]", (1, 6)), ("g[m]", (6,)), ("g[m]", (2, 3, 2)),
     ("g[n]", (8,)), ("g[n]", (2, 9)), ("bits(g)", (3, 2, 2)), ("bits(g)", (6, 2)), ("bits(g)", (2, 3, 1))],
)  # fmt: skip
def test_inputs_that_do_not_broadcast_are_refused(declared: str, shape: tuple[int, ...]) -> None:
    """Not as many elements in another order."""
    text = f"where({declared}, mm, 0)" if "bits" in declared else f"mm * {declared}"
    g = torch.zeros(shape, dtype=torch.uint8) if "bits" in declared else normal(*shape)
    for x in (normal(2, 3, 4), normal(2, 3, 4, grad=False)):
        with pytest.raises(
            CallError,
            match=rf"'g' .*{re.escape(str(list(shape)))}",
        ):
            epigen.linear(x, normal(9, 4), epilogue=text, g=g)


@pytest.mark.parametrize(
    ("declared", "shape", "seen"),
    [("g[m,n]", (1, 3, 9), None), ("g[m,n]", (9,), None), ("g[m,n]", (2, 1, 1), None), ("g[m,n]", (1,), None), ("g[m,n]", (), None), ("g[n]", (1, 1, 9), None), ("g[n]", (1,), None),
     ("g[m]", (2, 3, 1), None), ("g[m]", (2, 1, 1), None), ("g[m]", (2, 1), (2, 1, 1)), ("g[m]", (3,), (3, 1)), ("g[m]", (2, 3), (2, 3, 1))],
)  # fmt: skip
def test_inputs_broadcast_as_torchs_do(declared: str, shape: tuple[int, ...], seen: tuple[int, ...] | None) -> None:
    """With gradients of their own shape. seen: what torch would have to be given, where a row has no column's place."""
    x, w, g = normal(2, 3, 4), normal(9, 4, seed=1), normal(*shape, seed=2)
    found = epigen.linear(x, w, epilogue=f"tanh(mm) * {declared}", g=g)
    expected = torch.tanh(F.linear(x, w)) * (g if seen is None else g.view(seen))
    torch.testing.assert_close(found, expected)
    for t, e in zip(*(torch.autograd.grad((y * y).sum(), (x, w, g)) for y in (found, expected)), strict=True):
        torch.testing.assert_close(t, e)


def test_a_packed_mask_broadcasts_over_leading_dimensions() -> None:
    x, w = normal(2, 3, 4), normal(9, 4, seed=1)
    bits = torch.tensor([[[7, 1]], [[5, 0]]], dtype=torch.uint8)
    given = [epigen.linear(x, w, epilogue="where(mask, mm, 0)", mask=m) for m in (bits, bits.expand(2, 3, 2).contiguous())]
    assert torch.equal(*given)


def test_booleans_and_integers_are_inputs_without_a_gradient() -> None:
    x, w, row = normal(5, 4), normal(9, 4, seed=1), normal(5, seed=2)
    keep, step = torch.rand(5, 9, generator=torch.Generator().manual_seed(3)) > 0.5, torch.arange(9)
    found = epigen.linear(x, w, epilogue="where(keep[m,n] != 0, gelu(mm + step[n]), 0) * row[m]", keep=keep, step=step, row=row)
    expected = torch.where(keep, F.gelu(F.linear(x, w) + step), 0) * row[:, None]
    torch.testing.assert_close(found, expected)
    for t, e in zip(*(torch.autograd.grad(y.sum(), (x, w, row)) for y in (found, expected)), strict=True):
        torch.testing.assert_close(t, e)


LEADS = [(), (5,), (2, 3), (2, 1, 3), (0, 3)]


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_results_are_ordinary_tensors(lead: tuple[int, ...], grad: bool) -> None:
    """No views, and no memory that two share: what is done to them in place is what it is to torch's own."""
    text = "z = mm + bias; mm, mm, tanh(z), residual, z, bitmask(z > 0), sum(z, n), sum(z, m), sum(z)"
    x, w, b, residual = normal(*lead, 4, grad=grad), normal(9, 4, seed=1, grad=grad), normal(9, seed=2, grad=grad), normal(*lead, 9, seed=3, grad=grad)
    found = epigen.linear(x, w, b, text, residual=residual)
    held = [t for t in found if t.numel()]
    assert len({t.untyped_storage().data_ptr() for t in held}) == len(held)
    before = [t.detach().clone() for t in (x, w, b, residual)]
    for t in found:
        assert t.dtype == torch.uint8 or not t._is_view()
        if t.dim():
            t[...] = 0
    assert all(torch.equal(t.detach(), e) for t, e in zip((x, w, b, residual), before, strict=True))
    if grad:
        y = epigen.linear(x, w, b, "gelu(mm + bias)")
        y += residual
        y *= 2.0
        expected = 2 * (F.gelu(F.linear(x, w, b)) + residual)
        for t, e in zip(*(torch.autograd.grad(r.sum(), (x, w, b, residual)) for r in (y, expected)), strict=True):
            torch.testing.assert_close(t, e)


@pytest.mark.parametrize("lead", LEADS[:-1], ids=str)
def test_a_result_that_the_derivative_reads_may_not_change(lead: tuple[int, ...]) -> None:
    """As with torch.tanh: an error, and no gradient of what is there by then."""
    y = epigen.linear(normal(*lead, 4), normal(9, 4, seed=1), epilogue="tanh(mm)", save="output")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


# -- whose gradient is wanted


def test_a_buffer_is_added_to_by_a_backward_of_the_weight_alone() -> None:
    x, (w, b) = normal(7, 6), (normal(5, 6, seed=1), normal(5, seed=2))
    buffer = torch.zeros(5, 6)
    loss = epigen.linear(x, w, b, "tanh(mm + bias)", main_grad=buffer).sum()
    expected = torch.autograd.grad(torch.tanh(F.linear(x, w, b)).sum(), (x, w, b))
    for leaf, e in ((x, expected[0]), (b, expected[2]), (w, expected[1])):
        torch.testing.assert_close(torch.autograd.grad(loss, leaf, retain_graph=True)[0], e)
    loss.backward(inputs=[x], retain_graph=True)
    assert not buffer.any() and w.grad is None
    loss.backward(inputs=[w], retain_graph=True)
    torch.testing.assert_close(buffer, expected[1])
    loss.backward()
    torch.testing.assert_close(buffer, 2 * expected[1])
    assert w.grad is None


# -- what is refused


def test_double_backward_says_what_to_write(golden: Golden) -> None:
    """When it is asked for, whatever requires a gradient: of a detached x the second derivative would be 0 or None without a word."""
    w = normal(9, 4, seed=1)
    for x in (normal(5, 4), normal(5, 4, grad=False)):
        y = epigen.linear(x, w, epilogue="gelu(mm)")
        with golden.raises(CallError, "create_graph"):
            torch.autograd.grad(y.sum(), w, create_graph=True)
    functional = torch.autograd.functional
    x, run = normal(5, 4, grad=False), lambda w: epigen.linear(normal(5, 4, grad=False), w, epilogue="gelu(mm)")
    for ask in (
        lambda: functional.hessian(lambda w: run(w).sum(), w), lambda: functional.hvp(lambda w: run(w).sum(), w, w), lambda: functional.jvp(run, w, w),
        lambda: functional.vhp(lambda w: run(w).sum(), w, w),
    ):  # fmt: skip
        with golden.raises(CallError, "each way"):
            ask()
    expected = functional.jacobian(lambda w: F.gelu(F.linear(x, w)), w)
    torch.testing.assert_close(functional.jacobian(run, w), expected)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"x": (5, 3)}, "K differs"),
        ({"x": ()}, "no dimensions"),
        ({"weight": (9, 4, 1)}, "a weight of three dimensions"),
        ({"bias": (8,)}, "bias"),
        ({"bias": None, "epilogue": "mm + bias"}, "no bias"),
        ({"gaet": (5, 9)}, "an unknown input"),
        ({"epilogue": "mm + bias + gate[m,n]", "gaet": (5, 9)}, "a misspelt input"),
        (
            {"epilogue": "mm + bias + gate[m,n]", "gate": (4, 9)},
            "gate",
        ),
        ({"epilogue": "mm + bias + gate[m,n]", "gate": (5, 8)}, "gate of N"),
        ({"x": [1.0]}, "a list"),
        ({"weight": numpy.ones((9, 4), numpy.float32)}, "an array"),
        ({"weight": torch.eye(4).to_sparse()}, "a sparse weight"),
        ({"x": torch.ones(5, 4, device="meta")}, "x on meta"),
        ({"x": torch.ones(5, 4, dtype=torch.complex64)}, "complex64"),
        ({"epilogue": [2.0]}, "a list for epilogue"),
        ({"epilogue": True}, "a bool for epilogue"),
        ({"inputs": 2.0}, "a number for inputs"),
        ({"inputs": {"bias": 1.0}}, "bias twice"),
        ({"epilogue": "(mm + bias) * s", "s": [1.0]}, "a list for a scalar"),
        ({"epilogue": "(mm + bias) * s", "s": (2,)}, "two for a scalar"),
        ({"epilogue": "(mm + bias) * s", "s": 10**400}, "too large"),
        ({"bias": 1.0}, "a number for bias"),
        ({"save": "masks"}, "masks"),
        ({"of": "y"}, "of"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], name: str, golden: Golden) -> None:
    given: dict[str, Any] = {"x": (5, 4), "weight": (9, 4), "bias": (9,)} | change
    given = {name: normal(*value) if isinstance(value, tuple) else value for name, value in given.items()}
    with golden.raises(CallError, name):
        epigen.linear(given.pop("x"), given.pop("weight"), **given)


def test_dtypes_that_do_not_fit_are_said(golden: Golden) -> None:
    with golden.raises(CallError, "two dtypes"):
        epigen.linear(normal(5, 4), normal(9, 4, dtype=torch.float16), epilogue="mm")
    with golden.raises(CallError, "complex64"):
        epigen.linear(normal(5, 4, dtype=torch.complex64), normal(9, 4, dtype=torch.complex64), epilogue="mm")
    with golden.raises(CallError, "chain"):
        chain(normal(5, 4), [Link(normal(4, 4), {}, "mm, sum(mm, n)"), Link(normal(4, 4), {}, "mm")])


def test_a_change_in_place_between_forward_and_backward_is_noticed() -> None:
    layers, _ = layers_of((4, 4, 4), torch.float32, "relu")
    loss = chain(normal(5, 4), layers).sum()
    with torch.no_grad():
        layers[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
