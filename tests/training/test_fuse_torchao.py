"""`epigen.fuse` of layers whose weights torchao has rounded: what they compute beside torchao and in floats, what is left and why, and weights that change later."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkout import ROOT
from fusing import Block, drawn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchao_configs import torchao_config
from zoo import allow_torchvision, quiet

import epigen
from epigen.nn import QuantizedLinear

GROUP = 32
TAKEN = {
    "int8": "mm * weight_scale[n] + bias",
    "int8 in groups": "dot(a, b * weight_scale[k/32,n]) + bias",
    "int4": "dot(a, int4(b) * weight_scale[k/32,n]) + bias",
    "int4 with zero points": "dot(a, (int4(b) - weight_zero[k/32,n]) * weight_scale[k/32,n]) + bias",
    "fp8": "mm * weight_scale[n] + bias",
}


def quantize(model: nn.Module, name: str, *names: str) -> None:
    """names: the layers; by default all."""
    from torchao.quantization import quantize_

    quantize_(model, torchao_config(name, GROUP), filter_fn=lambda module, at: isinstance(module, nn.Linear) and (not names or at in names))


def model(name: str = "int8", seed: int = 0) -> nn.Sequential:
    """A layer that is rounded, and one that is not."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.GELU()).bfloat16()
    quantize(made, name, "0")
    return made


def x(*size: int) -> Tensor:
    return drawn(*(size or (5, 64))).bfloat16()


def close(found: Tensor, wanted: Tensor) -> None:
    """As far apart as 16 bits are, which torchao rounds its weights or products to."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    apart = (found.double() - wanted.double()).abs()
    assert apart.norm() < 2**-6 * wanted.double().norm() and apart.max() < 2**-4 * wanted.abs().max()


@pytest.fixture
def by_epigen(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedLinear]:
    """The layers that epigen computes, one for each call."""
    called: list[QuantizedLinear] = []
    forward = QuantizedLinear.forward

    def noted(self: QuantizedLinear, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(QuantizedLinear, "forward", noted)
    return called


@pytest.mark.parametrize("name", TAKEN)
def test_a_layer_and_its_bias_are_one_program(name: str, by_epigen: list[QuantizedLinear]) -> None:
    fused, plain = model(name), model(name)
    weight, keys = fused[0].weight, list(fused.state_dict())
    found = epigen.fuse(fused)
    assert [(r.name, r.epilogue) for r in found.replaced] == [("0", TAKEN[name]), ("2", "gelu(mm + bias)")]
    assert f"0  {TAKEN[name]}\n2  gelu(mm + bias), with gelu\n2 of 2 linear layers fused" in str(found)
    for called in (1, 2, 3):
        close(fused(x()), plain(x()))
        assert len(by_epigen) == called
    assert by_epigen[0] is by_epigen[-1] and by_epigen[0].bias is fused[0].bias
    if "int4" not in name:
        assert by_epigen[0].qweight.data_ptr() == weight.qdata.data_ptr()
    assert fused[0].weight is weight and list(fused.state_dict()) == keys and list(dict(fused.named_modules())) == list(dict(plain.named_modules()))
    assert torch.equal(fused.state_dict()["0.weight"].dequantize(), plain[0].weight.dequantize())


def test_layers_around_are_fused_with_what_follows_them(ran: list[str], by_epigen: list[QuantizedLinear]) -> None:
    torch.manual_seed(0)
    fused = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64), nn.SiLU()).bfloat16()
    quantize(fused, "int4", "2")
    plain = copy.deepcopy(fused)
    epigen.fuse(fused)
    ran.clear()
    with torch.no_grad():
        close(fused(x()), plain(x()))
    assert ran == ["gelu(mm + bias)", TAKEN["int4"].removesuffix(" + bias"), "silu(mm + bias)"] and len(by_epigen) == 1


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_llama(name: str, by_epigen: list[QuantizedLinear]) -> None:
    """All 14 layers, beside torchao and beside floats that the rounded weights stand for."""
    with quiet():
        allow_torchvision()
        from transformers import LlamaConfig, LlamaModel
    torch.manual_seed(0)
    of = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    fused = LlamaModel(of).bfloat16().eval()
    floats = copy.deepcopy(fused)
    quantize(fused, name)
    for key, module in fused.named_modules():
        if isinstance(module, nn.Linear):
            floats.get_submodule(key).weight = nn.Parameter(module.weight.dequantize())
    ids = torch.randint(0, 99, (2, 12))
    with torch.no_grad():
        by_torchao, keys = fused(ids).last_hidden_state, list(fused.state_dict())
        found = epigen.fuse(fused)
        assert len(found.replaced) == 14 and not found.left
        result = fused(ids).last_hidden_state
        assert len(by_epigen) == 14 and list(fused.state_dict()) == keys
        close(result, by_torchao)
        close(result, floats(ids).last_hidden_state)
        epigen.unfuse(fused)
        assert torch.equal(fused(ids).last_hidden_state, by_torchao) and len(by_epigen) == 14


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_gradients_flow_to_input_and_bias(name: str, by_epigen: list[QuantizedLinear]) -> None:
    gradients = []
    for fuse in (True, False):
        made, given = model(name), x().requires_grad_()
        if fuse:
            epigen.fuse(made)
        made(given).float().square().sum().backward()
        gradients.append((given.grad, made[0].bias.grad, made[2].weight.grad))
        assert made[0].weight.grad is None
    assert len(by_epigen) == 1
    for found, wanted in zip(*gradients, strict=True):
        close(found, wanted)


# -- what is left


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn.Linear's own name
        return super().forward(input) * 2


def doubled() -> nn.Sequential:
    made = nn.Sequential(Doubled(64, 32), nn.ReLU()).bfloat16()
    quantize(made, "int8")
    return made


def changed(change: Callable[[Any], Any]) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        made = model()
        change(made[0])
        return made

    return make


def in_inference_mode() -> nn.Sequential:
    with torch.inference_mode():
        return model()


LEFT: dict[str, tuple[Callable[[], nn.Sequential], str]] = {
    "a layout that is not read": (lambda: model("fp4"), "a weight of the class NVFP4Tensor cannot be read: torchao's Int8WeightOnlyConfig, .* leave such that can"),
    "activations in int8": (lambda: model("of activations"), r"torchao quantises or scales the layer's input too \(act_quant_kwargs\)"),
    "activations in int8, the weight in int4": (lambda: model("int4, of activations"), r"torchao quantises or scales the layer's input too \(activation_quantization\)"),
    "a subclass": (doubled, "a Doubled may compute something else with its weight than a torch.nn.Linear"),
    "another forward": (changed(lambda m: setattr(m, "forward", lambda x: nn.Linear.forward(m, x) * 2)), "its forward was replaced"),
    "a weight that trains": (changed(lambda m: m.weight.requires_grad_()), "its weight requires a gradient, which one of few bits has not"),
    "a bias in another dtype": (changed(lambda m: setattr(m, "bias", nn.Parameter(m.bias.float()))), "its bias is a Parameter of torch.float32 on cpu beside a weight of torch.bfloat16"),
    "a weight of inference mode": (in_inference_mode, "its weight was made in torch.inference_mode"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why(name: str, by_epigen: list[QuantizedLinear]) -> None:
    make, why = LEFT[name]
    made = make()
    with torch.no_grad():
        wanted = made[0](x())
        found = {left.name: left.why for left in epigen.fuse(made).left}
        assert re.match(why, found["0"]), found
        assert torch.equal(made[0](x()), wanted) and not by_epigen


def test_only_dry_run_and_unfuse(by_epigen: list[QuantizedLinear]) -> None:
    made = model()
    wanted = made(x())
    before = {at: dict(vars(module)) for at, module in made.named_modules()}
    assert len(epigen.fuse(made, dry_run=True).replaced) == 2
    assert {at: dict(vars(module)) for at, module in made.named_modules()} == before
    (left,) = epigen.fuse(made, only=lambda name, _: name != "0").left
    assert left.why == "0 (Linear) is not in only"
    found = epigen.fuse(made, only="0")
    assert [r.name for r in found.replaced] == ["0"]
    assert not by_epigen
    made(x())
    assert len(by_epigen) == 1
    wrapped = made[0].forward
    epigen.unfuse(made)
    assert {at: dict(vars(module)) for at, module in made.named_modules()} == before
    assert torch.equal(made(x()), wanted)
    assert torch.equal(wrapped(x()), made[0](x())) and len(by_epigen) == 1


def test_hooks_run_around_it(by_epigen: list[QuantizedLinear]) -> None:
    made, plain = model(), model()
    epigen.fuse(made)
    for each in (made, plain):
        each[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        each[0].register_forward_hook(lambda _, args, y: y + args[0].sum())
    close(made(x()), plain(x()))
    assert len(by_epigen) == 1


# -- afterwards


def load(model: nn.Sequential, other: nn.Sequential) -> None:
    model.load_state_dict(other.state_dict())


def assign(model: nn.Sequential, other: nn.Sequential) -> None:
    model.load_state_dict(other.state_dict(), assign=True)


def replace(model: nn.Sequential, other: nn.Sequential) -> None:
    model[0].weight, model[0].bias = other[0].weight, other[0].bias


def scale_in_place(model: nn.Sequential, _: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.scale.mul_(2)


def values_in_place(model: nn.Sequential, _: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.qdata.bitwise_not_()


def bias_in_place(model: nn.Sequential, _: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].bias.add_(1)


def floats(model: nn.Sequential, _: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.dequantize() * 2)


def requires_a_gradient(model: nn.Sequential, _: nn.Sequential) -> None:
    model[0].weight.requires_grad_()


def anew(model: nn.Sequential, other: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(other[0].weight.dequantize())
    quantize(model, "fp8", "0")


def to_fp32_and_back(model: nn.Sequential, _: nn.Sequential) -> None:
    model.float().bfloat16()


LATER = {f.__name__: f for f in (load, assign, replace, scale_in_place, values_in_place, bias_in_place, floats, requires_a_gradient, anew, to_fp32_and_back)}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_weight_that_changes_is_followed(name: str, change: str, called: bool, by_epigen: list[QuantizedLinear]) -> None:
    made, plain = model(name), model(name)
    assert [r.name for r in epigen.fuse(made).replaced] == ["0", "2"]
    if called:
        made(x())
    by_epigen.clear()
    for each in (made, plain):
        LATER[change](each, model(name, seed=1))
    close(made(x()), plain(x()))
    assert len(by_epigen) == (change not in ("floats", "requires_a_gradient"))


def test_copies_and_pickles_compute_by_their_own_weights(by_epigen: list[QuantizedLinear]) -> None:
    made = model("int4")
    vars(made[0]).pop("extra_repr", None)  # torchao's, of which pickle can make nothing
    epigen.fuse(made)
    wanted = made(x())
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        by_epigen.clear()
        assert torch.equal(other(x()), wanted) and len(by_epigen) == 1
        replace(other, model("int4", seed=1))
        close(other(x()), nn.Sequential(model("int4", seed=1)[:2], *made[2:])(x()))
    assert torch.equal(made(x()), wanted)


def test_it_takes_what_a_layer_gives_that_was_to_wait(by_epigen: list[QuantizedLinear]) -> None:
    torch.manual_seed(0)
    made = Block(lambda s, x, _: s.rounded(s.fc(x) if s.alone else s.fc(x).relu()), fc=nn.Linear(64, 64), rounded=nn.Linear(64, 32)).bfloat16()
    made.alone = False
    quantize(made, "int8", "rounded")
    plain = copy.deepcopy(made)
    assert [r.epilogue for r in epigen.fuse(made).replaced] == ["relu(mm + bias)", TAKEN["int8"]]
    for alone in (False, True, True, False):
        made.alone = plain.alone = alone
        close(made(x()), plain(x()))
    assert len(by_epigen) == 4


def test_in_inference_mode_and_out_of_it(by_epigen: list[QuantizedLinear]) -> None:
    """What is made of a weight in one is not of it, and trains."""
    made, plain = model("int4"), model("int4")
    epigen.fuse(made)
    with torch.inference_mode():
        close(made(x()), plain(x()))
    made(x().requires_grad_()).sum().backward()
    assert made[0].bias.grad is not None and len(by_epigen) == 2


def test_fused_again_once_another_layer_is_rounded(by_epigen: list[QuantizedLinear]) -> None:
    made, plain = model("int4"), model("int4")
    epigen.fuse(made)
    close(made(x()), plain(x()))
    for each in (made, plain):
        quantize(each, "int8", "2")
    close(made(x()), plain(x()))
    assert len(by_epigen) == 2
    assert [r.epilogue for r in epigen.fuse(made).replaced] == [TAKEN["int4"], TAKEN["int8"]]
    close(made(x()), plain(x()))
    assert len(by_epigen) == 4


# -- where the layer's own code runs


class Told(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def under_autocast(made: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return made(x())


def watched(made: nn.Module) -> Tensor:
    with Told() as told:
        result = made(x())
    assert nn.functional.linear in told.called
    return result


class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def dispatched(made: nn.Module) -> Tensor:
    with torch.no_grad(), Counted():
        return made(x())


ITS_OWN: dict[str, Callable[[nn.Module], Tensor]] = {
    "autocast": under_autocast,
    "another dtype": lambda m: m(x().float()),
    "an empty batch": lambda m: m(x(0, 64)),
    "by name": lambda m: m(input=x()),
    "a mode that is told of functions": watched,
    "a mode that is told of operations": dispatched,
}


@pytest.mark.parametrize("name", ITS_OWN)
def test_where_torchao_computes_the_layer(name: str, by_epigen: list[QuantizedLinear]) -> None:
    made, plain = model()[0], model()[0]
    assert epigen.fuse(made).replaced
    found, wanted = ITS_OWN[name](made), ITS_OWN[name](plain)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted) and not by_epigen
    made(x())
    assert len(by_epigen) == 1


@pytest.mark.slow
def test_compiled_and_exported() -> None:
    """torch.compile and torch.export see torchao's own layer; in a process of its own, for what they leave behind."""
    code = """
import torch, epigen
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).bfloat16().eval()
quantize_(model, Int8WeightOnlyConfig(version=2), filter_fn=lambda m, name: name == "0")
x = torch.randn(3, 64).bfloat16()
with torch.no_grad():
    expected = model(x)
    assert [r.name for r in epigen.fuse(model).replaced] == ["0"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    exported = torch.export.export(model, (x,))
    assert not any("epigen" in str(n.target) for n in exported.graph.nodes), exported.graph
    torch.testing.assert_close(exported.module()(x), expected)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
