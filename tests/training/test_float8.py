"""Layers that train in fp8: beside float64 of what they multiply, beside torchao's own, under torch's modes, and in models."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from golden import Golden
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from under_torch import APART

import epigen
from epigen import nn as ours
from epigen.errors import CallError
from epigen.gpus import TARGETS
from epigen.nn import Float8Linear
from epigen.training import fp8
from epigen.training.fp8 import RECIPES, quantised

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
K, N = 200, 72


def linear(k: int = K, n: int = N, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias, dtype=dtype)


def drawn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dequantised(x: Tensor, rows: int, columns: int | None) -> Tensor:
    """float64, as the kernels multiply it."""
    values, scale = quantised(x, rows, columns)
    whole = scale.double().repeat_interleave(rows, 0)[: x.shape[0]]
    return values.double() * whole.repeat_interleave(columns or x.shape[1], 1)[:, : x.shape[1]]


def apart(x: Tensor, rows: int, columns: int | None) -> Tensor:
    """How far a matrix and its values in fp8 lie apart at most: by half a step, which is 2**-3 of the power of two below, or 2**-9 of the scale."""
    _, scale = quantised(x, rows, columns)
    whole = scale.double().repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(columns or x.shape[1], 1)[:, : x.shape[1]]
    return torch.maximum(x.double().abs() * 2**-4, whole * 2**-10) * (1 + 2**-20)


def demand_close(found: Tensor, a: Tensor, b: Tensor) -> None:
    """found: a @ b.T of float64 in fp32's sums, rounded once."""
    wanted, sums = a @ b.t(), a.abs() @ b.abs().t()
    assert ((found.double() - wanted).abs() <= torch.finfo(found.dtype).eps * wanted.abs() + 2**-22 * sums + torch.finfo(found.dtype).tiny).all()


# -- what is rounded


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, None), (1, 128), (128, 128)])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_rounded_lies_within_half_a_step(rows: int, columns: int | None, dtype: torch.dtype, transposed: bool) -> None:
    x = drawn(150, 270, dtype=dtype) * torch.logspace(-6, 4, 270).to(dtype)
    x = x.t() if transposed else x
    values, scale = quantised(x, rows, columns)
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous() and values.shape == x.shape and scale.dtype == torch.float32
    assert scale.shape == (-(-x.shape[0] // rows), -(-x.shape[1] // (columns or x.shape[1])))
    assert ((dequantised(x, rows, columns) - x.double()).abs() <= apart(x, rows, columns)).all()
    assert values.float().abs().amax() == 448


def test_zeros_tiny_numbers_and_what_is_no_number() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-10, -2e-10], [1.0, float("nan")], [float("inf"), 1.0], [3e38, 1.0]])
    values, scale = quantised(x, 1, None)
    found = values.float() * scale
    assert torch.equal(found[0], x[0]) and (scale > 0)[:2].all()
    torch.testing.assert_close(found[1], x[1], rtol=2**-4, atol=0)
    assert found[2:4].isnan().any(1).all() and found[4].isfinite().all()  # of which a gradient's scaler is told
    assert quantised(torch.zeros(0, 5), 1, None)[0].shape == (0, 5) and quantised(torch.zeros(5, 0), 1, 128)[1].shape == (5, 0)


# -- a layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_its_three_products_are_those_of_what_is_rounded(recipe: str, dtype: torch.dtype) -> None:
    layer, (block, in_fp8) = Float8Linear.from_linear(linear(bias=False, dtype=dtype), recipe), dataclasses.astuple(RECIPES[recipe])
    x, grad = drawn(2, 75, K, dtype=dtype).requires_grad_(), drawn(2, 75, N, dtype=dtype, seed=2)
    y = layer(x)
    y.backward(grad)
    flat, of_y, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), layer.weight.detach()
    of_weight = block or 1
    assert y.shape == grad.shape and y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    demand_close(y.detach().flatten(0, 1), dequantised(flat, 1, block), dequantised(weight, of_weight, block))
    demand_close(x.grad.flatten(0, 1), dequantised(of_y, 1, block), dequantised(weight.t(), of_weight, block))
    if in_fp8:
        demand_close(layer.weight.grad, dequantised(of_y.t(), 1, block), dequantised(flat.t(), 1, block))
    else:
        demand_close(layer.weight.grad, of_y.t().double(), flat.t().double())


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu(mm + bias)": F.silu, "relu(mm + bias)": F.relu, "mm + bias": lambda z: z, "gelu(mm + bias)": F.gelu}


@pytest.mark.parametrize("epilogue", ACTIVATIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_through_an_epilogue(recipe: str, epilogue: str) -> None:
    """Beside float64, of what the forward multiplies: as far apart as fp8's steps are, of each of the operands."""
    layer, (block, in_fp8) = Float8Linear.from_linear(linear(), recipe, epilogue=epilogue), dataclasses.astuple(RECIPES[recipe])
    x, grad = drawn(50, K).requires_grad_(), drawn(50, N, seed=2)
    y = layer(x)
    y.backward(grad)
    weight = layer.weight.detach()
    z = (dequantised(x.detach(), 1, block) @ dequantised(weight, block or 1, block).t() + layer.bias.detach().double()).requires_grad_()
    wanted = ACTIVATIONS[epilogue](z)
    (dz,) = torch.autograd.grad(wanted, z, grad.double())
    torch.testing.assert_close(y.detach().double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad.double(), dz.sum(0), rtol=1e-5, atol=1e-4)

    def demand(found: Tensor, a: Tensor, b: Tensor, rows: int, rounded: bool = True) -> None:
        of_a, of_b = (apart(a, 1, block) + 1e-5, apart(b, rows, block)) if rounded else (1e-5 + 0 * a.double(), 0 * b.double())
        bound = of_a @ b.double().abs().t() + (a.double().abs() + of_a) @ of_b.t() + 1e-4
        assert ((found.double() - a.double() @ b.double().t()).abs() <= bound).all()

    demand(x.grad, dz.float(), weight.t(), block or 1)
    demand(layer.weight.grad, dz.t().float(), x.detach().t(), 1, in_fp8)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_it_computes_what_torchaos_does(recipe: str) -> None:
    """Whose scales are inverted, and by default rounded to powers of two. Its second recipe has one scale for all of the weight where x has its gradient."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Torchaos

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, round_scales_to_power_of_2=False)
    plain = linear(192, 80)
    layer, theirs = Float8Linear.from_linear(plain, recipe), Torchaos.from_float(copy.deepcopy(plain), config=config)
    found: list[list[Tensor]] = []
    for each in (layer, theirs):
        x = drawn(3, 32, 192).requires_grad_()
        y = each(x)
        y.backward(drawn(3, 32, 80, seed=2))
        assert x.grad is not None and each.weight.grad is not None
        found.append([y.detach(), each.weight.grad, *([x.grad] if recipe == "rowwise" else [])])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 2e-3 * other.norm()  # a value in a thousand lies between two of fp8, and goes the other way


@pytest.mark.triton
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_its_programs_in_kernels(block: int | None, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(5, K, dtype=dtype), drawn(N, K, dtype=dtype, seed=2), drawn(N, dtype=dtype)
    (a, of_a), (b, of_b) = quantised(x, 1, block), quantised(weight, rows if block else 1, block)
    scales = {"a_scale": of_a, "b_scale": of_b.t()} if block else {"a_scale": of_a[:, 0], "b_scale": of_b[:, 0]}
    text = fp8.scaled("z = mm + bias; silu(z), z", block, rows, dtype)
    by = {backend: epigen.compile(text, backend=backend)(a, b.t(), bias=bias, **scales) for backend in ("interpreter", "reference")}
    for found, wanted in zip(by["interpreter"], by["reference"], strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_a_layer_takes_inputs_and_gives_several_outputs() -> None:
    layer = Float8Linear(K, N, epilogue="y = silu(mm + bias) * gate[m,n] * s + row[m]; y, amax(y)", of="y")
    x, gate, row = drawn(2, 3, K), drawn(2, 3, N).requires_grad_(), drawn(2, 3).requires_grad_()
    y, top = layer(x, {"s": 2.0}, gate=gate, row=row)
    assert y.shape == (2, 3, N) and top == y.abs().max()
    y.sum().backward()
    assert gate.grad.shape == gate.shape and torch.equal(row.grad, torch.full((2, 3), float(N))) and layer.weight.grad.any()


def test_a_layer_behind_steps_has_gradients_of_zeros() -> None:
    layer, x = Float8Linear(K, N, epilogue="sign(mm + bias)"), drawn(3, K).requires_grad_()
    layer(x).sum().backward()
    assert not any(t.grad.any() for t in (x, layer.weight, layer.bias))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (1,), (2, 1, 3)])
def test_leading_dimensions_and_empty_batches(lead: tuple[int, ...], recipe: str) -> None:
    layer, x = Float8Linear(K, N, recipe=recipe), drawn(*lead, K).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*lead, N) and x.grad.shape == x.shape and layer.weight.grad.isfinite().all() and layer.weight.grad.any() == bool(x.numel())


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias"), ("weight", "bias"), ()])
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_what_is_wanted_has_a_gradient(wanted: tuple[str, ...], recipe: str) -> None:
    whole, layer = (Float8Linear.from_linear(linear(), recipe, epilogue="silu(mm + bias)") for _ in range(2))
    x, every = drawn(3, K).requires_grad_("x" in wanted), drawn(3, K).requires_grad_()
    for name, p in layer.named_parameters():
        p.requires_grad_(name in wanted)
    whole(every).sum().backward()
    if y := layer(x).sum() if wanted else None:
        y.backward()
    for mine, its in ((x, every), (layer.weight, whole.weight), (layer.bias, whole.bias)):
        assert mine.grad is None if not mine.requires_grad else torch.equal(mine.grad, its.grad)
    if "x" in wanted and "weight" not in wanted:
        (gradient,) = torch.autograd.grad(layer(x).sum(), x)
        assert torch.equal(gradient, every.grad)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise_with_gw_hp"])
def test_a_weight_with_a_main_grad_adds_to_it(recipe: str) -> None:
    plain, layer = (Float8Linear.from_linear(linear(dtype=torch.bfloat16), recipe) for _ in range(2))
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    x = drawn(40, K, dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).sum().backward()
    plain(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
    torch.testing.assert_close(layer.weight.main_grad, 2 * plain.weight.grad.float(), rtol=2**-7, atol=1e-3)


# -- as a module


@pytest.mark.parametrize("bias", [True, False])
def test_it_has_the_state_of_torchs_layer_and_shares_it(bias: bool) -> None:
    plain = linear(bias=bias)
    layer = Float8Linear.from_linear(plain.eval())
    assert layer.weight is plain.weight and layer.bias is plain.bias and not layer.training
    assert layer.state_dict().keys() == plain.state_dict().keys()
    other = Float8Linear(K, N, bias)
    other.load_state_dict(plain.state_dict())
    x = drawn(3, K)
    assert torch.equal(other(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert repr(other) == repr(plain)[:-1].replace("Linear", "Float8Linear") + f", epilogue='{'mm + bias' if bias else 'mm'}', recipe='rowwise')"
    other.weight = nn.Parameter(torch.zeros(N, K))  # as who shards parameters puts others in their place
    assert not (other(x) - (other.bias if bias else 0)).any()
    assert layer.half()(x.half()).dtype == torch.float16


def test_modes_of_torch() -> None:
    layer, x = Float8Linear.from_linear(linear(), epilogue="relu(mm + bias)"), drawn(3, K)
    wanted = layer(x)
    assert wanted.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(layer(x), wanted) and not layer(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), wanted, rtol=0.1, atol=0.1)
    assert layer.to("meta")(x.to("meta")).shape == (3, N)


@APART
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore::DeprecationWarning:torch")  # torch's own, of autograd functions
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_takes_it_whole(recipe: str, dynamic: bool) -> None:
    model = nn.Sequential(Float8Linear(K, 256, epilogue="silu(mm + bias)", recipe=recipe), Float8Linear(256, N, recipe=recipe))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = []
    for each in (model, compiled):
        x = drawn(2, 20, K).requires_grad_()
        y = each(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_has_no_derivative_says_so(golden: Golden) -> None:
    layer, x = Float8Linear(K, N), drawn(3, K).requires_grad_()
    with golden.raises(CallError, "twice"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with golden.raises(CallError, "func"):
        torch.func.grad(lambda t: layer(t).sum())(x.detach())


# -- what does not fit


def test_what_does_not_fit_says_so(golden: Golden) -> None:
    with golden.raises(CallError, "recipe"):
        Float8Linear(K, N, recipe="rowise")
    with golden.raises(CallError, "function"):
        Float8Linear(K, N, epilogue=F.relu)  # type: ignore[arg-type]
    with golden.raises(CallError, "scale"):
        Float8Linear(K, N, epilogue="(mm + bias) * a_scale[m]")
    for name, text in (
        ("second", "silu(mm + bias) * dot(a, up[k,n])"),
        ("halves", "g, u = halves(mm + bias); silu(g) * u"),
        ("operand", "mm + bias, sum(a, k)"),
    ):
        with golden.raises(CallError, name):
            Float8Linear(K, N, epilogue=text)
    with golden.raises(CallError, "bias"):
        Float8Linear(K, N, bias=False, epilogue="mm + bias")
    with golden.raises(CallError, "class"):
        Float8Linear.from_linear(nn.Bilinear(3, 3, 3))  # type: ignore[arg-type]
    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    with golden.raises(CallError, "hooks"):
        Float8Linear.from_linear(hooked)
    with golden.raises(CallError, "dtype"):
        Float8Linear(K, N).double()(drawn(3, K).double())
    with golden.raises(CallError, "two dtypes"):
        Float8Linear(K, N)(drawn(3, K).half())
    with golden.raises(CallError, "in a model"):
        ours.float8(nn.Sequential(linear(), hooked))
    with golden.raises(CallError, "skip"):
        ours.float8(nn.Sequential(linear()), skip="lm_haed")


def test_a_gpu_that_does_not_multiply_fp8(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def of(self, _place: Any) -> Any:
            return TARGETS["sm_80"]

    monkeypatch.setattr(fp8, "THIS_MACHINE", Old())
    with golden.raises(CallError):
        Float8Linear(K, N)(drawn(3, K))


# -- models


def steps(model: nn.Module, loss: Callable[[], Tensor], count: int = 12) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for _ in range(count):
        optimizer.zero_grad()
        now = loss()
        now.backward()
        optimizer.step()
        losses.append(now.item())
    return losses


class Gated(nn.Module):
    """A Llama's MLP, with its activation in the first layer's kernel."""

    def __init__(self, recipe: str):
        super().__init__()
        options: dict[str, Any] = {"bias": False, "recipe": recipe, "dtype": torch.bfloat16}
        self.gate_proj = Float8Linear(64, 160, epilogue="silu(mm) * up[m,n]", **options)
        self.up_proj, self.down_proj = Float8Linear(64, 160, **options), Float8Linear(160, 64, **options)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.gate_proj(x, up=self.up_proj(x)))
        return down


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp_learns(recipe: str) -> None:
    torch.manual_seed(0)
    model = Gated(recipe)
    x, wanted = drawn(4, 32, 64, dtype=torch.bfloat16), drawn(4, 32, 64, seed=2)
    losses = steps(model, lambda: F.mse_loss(model(x).float(), wanted), 25)
    assert losses[-1] < 0.8 * losses[0]


def test_a_walk_leaves_what_is_skipped_and_keeps_what_is_shared() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"body": nn.Sequential(shared, nn.ReLU(), shared), "head": nn.Linear(8, 4), "attention": nn.MultiheadAttention(8, 2)})
    names, parameters = list(model.state_dict()), set(model.parameters())
    assert ours.float8(model, "blockwise", skip="head") is model
    assert isinstance(model["body"][0], Float8Linear) and model["body"][0] is model["body"][2] and model["body"][0].recipe == "blockwise"
    assert type(model["head"]) is nn.Linear and not any(isinstance(m, Float8Linear) for m in model["attention"].modules())
    assert list(model.state_dict()) == names and set(model.parameters()) == parameters
    assert isinstance(ours.float8(nn.Linear(8, 8)), Float8Linear)


@pytest.mark.skipif(bool(zoo.missing("llama")), reason="transformers is not installed")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_llama_learns(recipe: str) -> None:
    made = zoo.ZOO["llama"]()
    plain, model = made.model, ours.float8(copy.deepcopy(made.model), recipe, skip="lm_head")
    assert sum(isinstance(m, Float8Linear) for m in model.modules()) == sum(isinstance(m, nn.Linear) for m in plain.modules()) - 1
    tokens = made.inputs["input_ids"]
    beside = steps(plain, lambda: plain(input_ids=tokens, labels=tokens).loss)
    losses = steps(model, lambda: model(input_ids=tokens, labels=tokens).loss)
    assert losses[-1] < 0.9 * losses[0] and abs(losses[-1] - beside[-1]) < 0.1 * beside[0]
