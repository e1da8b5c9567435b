"""Linear layers of few bits: what they round to, what they compute beside the weight written out, gradients, models, and weights that others rounded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor, nn
from zoo import allow_torchvision, quiet

import epigen
from epigen import checkpoints
from epigen.checkpoints import QuantizedWeight
from epigen.errors import CallError
from epigen.nn import QuantizedLinear
from epigen.training import chain

WAYS = [("int8", None), ("int8", 32), ("int4", None), ("int4", 32), ("int4", 128), ("fp8", None), ("fp8", 64)]


def linear(k: int = 96, n: int = 40, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias, dtype=dtype)


def of_zero_points() -> QuantizedWeight:
    torch.manual_seed(1)
    values = torch.randint(-8, 8, (40, 96), dtype=torch.int8)
    return QuantizedWeight(values, 4, torch.rand(3, 40).bfloat16() / 8, torch.randint(-8, 9, (3, 40), dtype=torch.int16), 32)


def close(found: Tensor, wanted: Tensor) -> None:
    """As far apart as 16 bits are: what is multiplied is rounded to them, and so is the result."""
    assert found.shape == wanted.shape
    apart = (found.double() - wanted).abs()
    assert apart.norm() < 2**-7 * wanted.double().norm() and apart.max() < 2**-5 * wanted.abs().max()


@pytest.mark.parametrize(("kind", "group"), WAYS)
def test_a_layer_beside_its_weight_written_out(kind: str, group: int | None) -> None:
    plain = linear()
    layer = QuantizedLinear.from_linear(plain, kind, group)
    x = torch.randn(2, 5, 96, dtype=torch.bfloat16)
    assert layer(x).shape == (2, 5, 40) and layer(x).dtype == torch.bfloat16
    close(layer(x), x.double() @ layer.dequantized().double().t() + plain.bias.double())
    steps = {"int8": 1 / 127, "int4": 1 / 7, "fp8": 32 / 448}[kind]  # fp8 is 32 apart from 256 on
    largest = plain.weight.float().abs().max()
    assert (layer.dequantized() - plain.weight.float()).abs().max() <= largest * steps * 0.51


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "group"), WAYS)
def test_its_program_in_a_kernel(kind: str, group: int | None, dtype: torch.dtype) -> None:
    layer = QuantizedLinear.from_linear(linear(dtype=dtype), kind, group, epilogue="gelu(mm + bias) * gain")
    x = torch.randn(5, 96, dtype=dtype)
    given: dict[str, Any] = {"weight_scale": layer.scale if layer.group else layer.scale[0], "bias": layer.bias.detach(), "gain": 2.0}
    weight = layer.qweight.view(torch.float8_e4m3fn) if kind == "fp8" else layer.qweight
    found = epigen.compile(layer.program, backend="interpreter")(x, weight.t(), **given)
    close(found, layer(x, gain=2.0).detach())


@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", 64)])
def test_gradients_flow_past_the_weight(kind: str, group: int | None, with_zero: bool) -> None:
    layer = QuantizedLinear.from_weight(of_zero_points(), linear().bias) if with_zero else QuantizedLinear.from_linear(linear(), kind, group)
    x = torch.randn(3, 7, 96, dtype=torch.bfloat16, requires_grad=True)
    weight = layer.dequantized().double()
    grad = torch.randn(3, 7, 40, dtype=torch.bfloat16)
    layer(x).backward(grad)
    assert x.grad is not None and layer.bias.grad is not None
    close(x.grad, grad.double() @ weight)
    close(layer.bias.grad, grad.double().sum((0, 1)))
    assert not any(p.requires_grad for p in (layer.qweight, layer.scale))


def test_a_weight_with_zero_points() -> None:
    layer = QuantizedLinear.from_weight(of_zero_points())
    assert layer.bias is None and "weight_zero[k/32,n]" in layer.program
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    assert torch.equal(layer.dequantized(), of_zero_points().dequantized())
    close(layer(x), x.double() @ layer.dequantized().double().t())


def test_columns_in_the_order_of_their_activations() -> None:
    weight = of_zero_points()
    weight = QuantizedWeight(weight.values, 4, weight.scale, weight.zero, 32, torch.randperm(96))
    layer = QuantizedLinear.from_weight(weight)
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    close(layer(x), x.double() @ weight.dequantized().double().t())


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_groups_of_zeros_and_of_tiny_values(kind: str) -> None:
    plain = linear(dtype=torch.float16)
    with torch.no_grad():
        plain.weight[0] = 0
        plain.weight[1] = 2.0**-24
    layer = QuantizedLinear.from_linear(plain, kind, 32)
    weight = layer.dequantized()
    assert weight.isfinite().all() and not weight[0].any() and (weight[1] - 2.0**-24).abs().max() <= torch.finfo(torch.float16).tiny / 2
    assert layer(torch.ones(1, 96, dtype=torch.float16)).isfinite().all()


def test_a_weight_that_is_not_finite_is_refused() -> None:
    plain = linear()
    with torch.no_grad():
        plain.weight[3, 5] = torch.inf
    with pytest.raises(CallError, match="the layer's weight has infinities or NaN, which no scale brings to few bits"):
        QuantizedLinear.from_linear(plain)


def test_a_last_group_that_is_shorter() -> None:
    layer = QuantizedLinear.from_linear(linear(k=100), "int4", 32)
    assert layer.scale.shape == (4, 40)
    x = torch.randn(4, 100, dtype=torch.bfloat16)
    close(layer(x), x.double() @ layer.dequantized().double().t() + layer.bias.detach().double())


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", None)])
def test_a_state_dict_goes_round(kind: str, group: int | None, tmp_path: Any) -> None:
    layer = QuantizedLinear.from_linear(linear(), kind, group)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = QuantizedLinear(96, 40, kind, group, dtype=torch.bfloat16)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    assert torch.equal(other(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", None)])
def test_in_another_dtype_the_weight_stays(kind: str, group: int | None) -> None:
    layer = QuantizedLinear.from_linear(linear(), kind, group)
    before = layer.qweight.clone()
    layer = layer.half()
    assert torch.equal(layer.qweight, before) and layer.scale.dtype == torch.float16
    close(layer(torch.ones(2, 96, dtype=torch.float16)), (layer.dequantized().double().sum(1) + layer.bias.detach().double()).expand(2, 40))


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", None)])
def test_under_autocast(kind: str, group: int | None) -> None:
    layer = QuantizedLinear.from_linear(linear(dtype=torch.float32), kind, group)
    x = torch.randn(4, 96)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    close(found, x.bfloat16().double() @ layer.dequantized().double().t() + layer.bias.detach().double())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own of autograd functions that it compiles
@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", None)])
def test_exported_and_compiled(kind: str, group: int | None) -> None:
    layer = QuantizedLinear.from_linear(linear(), kind, group, epilogue="relu(mm + bias)")
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_an_epilogue_with_names_of_its_own() -> None:
    layer = QuantizedLinear.from_linear(linear(), "int4", 32, epilogue="product1 = mm + bias; silu(product1) * gate[m,n]")
    x, gate = torch.randn(4, 96, dtype=torch.bfloat16), torch.randn(4, 40, dtype=torch.bfloat16)
    product = x.double() @ layer.dequantized().double().t() + layer.bias.detach().double()
    close(layer(x, gate=gate), F.silu(product) * gate.double())


# -- models


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaModel(config).bfloat16().eval()


def replaced(model: nn.Module, kind: str, group: int | None) -> int:
    """How many of a model's layers are made of few bits."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, QuantizedLinear.from_linear(child, kind, group))
                count += 1
    return count


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", None)])
def test_llamas_layers(kind: str, group: int | None) -> None:
    """All 14 of them, beside the same model with the weights written out."""
    with quiet():
        allow_torchvision()
        model = llama()
    written_out = copy.deepcopy(model)
    assert replaced(model, kind, group) == 14
    layers = dict(model.named_modules())
    for name, module in written_out.named_modules():
        if isinstance(module, nn.Linear):
            module.weight.data = layers[name].dequantized().bfloat16()
    ids = torch.randint(0, 99, (2, 12))
    with torch.no_grad():
        found, wanted = (m(ids).last_hidden_state.float() for m in (model, written_out))
    assert (found - wanted).norm() / wanted.norm() < 0.02
    epigen.fuse(model)
    with torch.no_grad():
        fused = model(ids).last_hidden_state.float()
    assert (fused - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", None)])
def test_an_epilogue_may_write_the_product_out(kind: str, group: int | None) -> None:
    """dot(a, b) is mm: the product with the weight as it is computed, and not with its rounded values."""
    plain = linear()
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    layer = QuantizedLinear.from_linear(plain, kind, group, epilogue="relu(dot(a, b) + bias), mm, amax(a, k)")
    activated, product, largest = layer(x)
    close(product, F.linear(x.float(), layer.dequantized()))
    close(activated, F.linear(x.float(), layer.dequantized(), plain.bias.float()).relu())
    assert torch.equal(largest, x.float().abs().amax(1))
    assert layer.program.count("dot(") <= 1 and "relu(product + bias), product, amax(a, k)" in layer.program


@pytest.mark.parametrize("epilogue", ["dot(relu(a), b)", "mm, sum(b, k)", "z = dot(a, b); z, amax(b, k)"])
def test_an_epilogue_that_reads_the_rounded_weight_is_refused(epilogue: str) -> None:
    with pytest.raises(CallError, match="reads b, which holds the weight as it is rounded"):
        QuantizedLinear(96, 40, bias=False, epilogue=epilogue)


# -- what others have rounded


@pytest.mark.parametrize("config", ["int8", "int4", "fp8"])
def test_a_layer_that_torchao_rounded(config: str) -> None:
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerGroup

    plain = linear()
    made = {"int8": ao.Int8WeightOnlyConfig(version=2), "int4": ao.IntxWeightOnlyConfig(torch.int4, PerGroup(32)), "fp8": ao.Float8WeightOnlyConfig()}[config]
    ao.quantize_(plain, made)
    layer = QuantizedLinear.from_linear(plain)
    assert layer.kind == config and layer.bias is plain.bias
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    close(layer(x), plain(x))


def test_a_layer_of_a_checkpoint() -> None:
    qweight, qzeros = torch.randint(-(2**31), 2**31, (12, 40), dtype=torch.int32), torch.randint(-(2**31), 2**31, (3, 5), dtype=torch.int32)
    weight = checkpoints.gptq(qweight, qzeros, (torch.rand(3, 40) / 8).half(), torch.randperm(96) // 32)
    layer = QuantizedLinear.from_weight(weight, torch.randn(40).half())
    x = torch.randn(4, 96).half()
    close(layer(x), x.double() @ weight.dequantized().double().t() + layer.bias.detach().double())


# -- what does not fit


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((96, 40, "int3"), "unknown kind of weight"),
        ((97, 40, "int4"), "in_features=97: an int4 weight holds two neighbours in a byte"),
        ((96, 40, "int8", 0), "group=0: a scale is for one element at least"),
    ],
)
def test_sizes_and_kinds(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(CallError, match=says):
        QuantizedLinear(*arguments)


def test_epilogues_that_disagree() -> None:
    with pytest.raises(CallError, match="bias=True, and the epilogue 'relu\\(mm\\)' does not read a bias"):
        QuantizedLinear(96, 40, epilogue="relu(mm)")
    with pytest.raises(CallError, match="reads weight_scale, which are names of the layer's own"):
        QuantizedLinear(96, 40, bias=False, epilogue="mm * weight_scale")
    with pytest.raises(CallError, match="a Conv1d cannot be rounded"):
        QuantizedLinear.from_linear(nn.Conv1d(1, 1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 32), ("fp8", None)])
def test_without_gradients_a_call_like_the_last_is_not_planned_again(kind: str, group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as a model that generates calls it; where gradients flow, it is, since those of what is computed of a weight follow from programs of their own."""

    def planned(*_given: Any) -> Any:
        raise AssertionError("it is planned again")

    torch.manual_seed(0)
    layer, x = QuantizedLinear.from_linear(torch.nn.Linear(64, 48), kind, group), torch.randn(2, 3, 64)
    with torch.no_grad():
        expected = [layer(x) for _ in range(3)]
        monkeypatch.setattr(chain, "chain", planned)
        other = torch.randn(2, 3, 64)
        assert torch.equal(layer(x), expected[0]) and all(torch.equal(e, expected[0]) for e in expected)
        torch.testing.assert_close(layer(other), torch.nn.functional.linear(other, layer.dequantized(), layer.bias), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="planned again"):
        layer(x.requires_grad_())
