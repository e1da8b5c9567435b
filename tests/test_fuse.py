"""`epigen.fuse`: what it replaces in a model, what it leaves, and that nothing else changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.nn.utils import parametrizations, prune

import epigen
from epigen.training.fuse import Fused


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def fused(model: nn.Module, *inputs: Any) -> Fused:
    """What was done, once results, gradients, parameters and state are as before."""
    before, parameters = copy.deepcopy(model), list(model.parameters())
    found = epigen.fuse(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before.state_dict())
    for mode in (True, False):
        for given in (inputs or (drawn(3, 8),),):
            torch.manual_seed(0)
            ours = model.train(mode)(*given)
            torch.manual_seed(0)
            theirs = before.train(mode)(*given)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            grads = [torch.autograd.grad(y.square().sum(), list(m.parameters()), allow_unused=True) for m, y in ((model, ours), (before, theirs))]
            torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    return found


# -- what is replaced


@pytest.mark.parametrize(
    ("activation", "epilogue"),
    [
        (nn.ReLU(), "relu(mm + bias)"), (nn.ReLU(inplace=True), "relu(mm + bias)"), (nn.GELU(), "gelu(mm + bias)"),
        (nn.GELU(approximate="tanh"), "gelu_tanh(mm + bias)"), (nn.SiLU(), "silu(mm + bias)"), (nn.Sigmoid(), "sigmoid(mm + bias)"),
        (nn.Tanh(), "tanh(mm + bias)"), (nn.LeakyReLU(0.2), "leaky_relu(mm + bias, 0.2)"), (nn.LeakyReLU(-1e-7), "leaky_relu(mm + bias, -1e-07)"),
        (nn.Softplus(), "softplus(mm + bias)"), (nn.Hardswish(), "hardswish(mm + bias)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_pair_becomes_one_layer(activation: nn.Module, epilogue: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.LayerNorm(16))
    found = fused(model)
    assert [(r.name, r.activation, r.epilogue) for r in found.replaced] == [("0", "1", epilogue)]
    assert (type(model[0]), type(model[1])) == (epigen.nn.Linear, nn.Identity) and type(model) is nn.Sequential
    assert not found.left and not found.chains


def test_layers_that_follow_one_another_become_a_chain() -> None:
    """Those without an activation join; the sequence stays the same object, and keeps its keys."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.GELU(), nn.Linear(16, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    found = fused(model)
    assert str(found).splitlines() == [
        "0          relu(mm + bias), with 1",
        "2          gelu(mm), with 3",
        "4          mm + bias",
        "the model  layers that follow one another run as a chain",
        "6          left: its result goes out of its module's forward, and no activation follows there",
    ]
    assert type(model) is epigen.nn.Chain
    assert str(epigen.fuse(model)) == "6  left: its result goes out of its module's forward, and no activation follows there", "a second time changes nothing"


class Block(nn.Module):
    """forward: what the test is about."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.how = forward

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.how(self, x, mask)


def linears(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(8, 8) for name in names}


def test_modules_held_by_name_and_called_in_a_forward() -> None:
    """At any depth, also in lists, and one activation that serves several layers."""
    inner = Block(lambda s, x, _: s.drop(s.act(s.up(x))), **linears("up"), act=nn.GELU(), drop=nn.Dropout(0.1))
    model = Block(
        lambda s, x, _: s.inner(s.act(s.first(x)) + s.act(s.list[0](x))), **linears("first"), act=nn.SiLU(), list=nn.ModuleList([nn.Linear(8, 8)]), inner=inner
    )
    found = fused(model)
    assert {(r.name, r.activation) for r in found.replaced} == {("first", "act"), ("list.0", "act"), ("inner.up", "inner.act")}
    assert not found.left


def test_a_layer_called_twice_with_the_same_activation() -> None:
    model = Block(lambda s, x, _: s.act(s.fc(s.act(s.fc(x)))), **linears("fc"), act=nn.ReLU())
    model.again = model.fc
    assert [r.name for r in fused(model).replaced] == ["fc"] and model.again is model.fc


# -- what is left


def hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(lambda *_: None)
    return model


def hooked_activation() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[1].register_forward_hook(lambda *_: None)
    return model


def another_forward() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    forward = model[0].forward
    model[0].forward = lambda x: forward(x) + 1
    return model


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * 2


class Subclass(nn.Parameter):
    pass


def subclassed_weight() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].weight = Subclass(model[0].weight.detach())
    return model


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no activation of the language": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ELU()), r"1 \(ELU\) follows, which no epilogue computes"),
    "its options": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Softplus(beta=2)), r"1 \(Softplus\) follows, with options that the language does not have"),
    "hooks": (hooked, "it has hooks, which would see the activation's result"),
    "hooks of the activation": (hooked_activation, r"1 \(ReLU\) follows, which has hooks or a forward of its own"),
    "another forward": (another_forward, "its forward was replaced"),
    "a subclass": (lambda: nn.Sequential(Own(8, 8), nn.ReLU()), "it is a Own, and of that only its own class knows what it does"),
    "parametrised": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU()), "it is a ParametrizedLinear"),
    "pruned": (lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), nn.ReLU()), "it has hooks"),
    "a subclass of Parameter": (subclassed_weight, "its weight is a Subclass"),
    "no module": (lambda: Block(lambda s, x, _: F.relu(s.fc(x)), **linears("fc")), "relu follows, a function in a forward: only modules can be replaced"),
    "used twice": (lambda: Block(lambda s, x, _: s.act(h := s.fc(x)) + h, **linears("fc"), act=nn.ReLU()), "its result is used in 2 places"),
    "the activation elsewhere": (
        lambda: Block(lambda s, x, _: s.act(s.act(s.fc(x)) - 1), **linears("fc"), act=nn.ReLU()),
        "its activation act is called elsewhere too",
    ),
    "one with the activation of another that is left": (
        lambda: Block(lambda s, x, _: s.act(s.a(x)) + s.act(h := s.b(x)) + h, **linears("a", "b"), act=nn.ReLU()),
        "its activation act is called elsewhere too",
    ),
    "several activations": (
        lambda: Block(lambda s, x, _: s.relu(s.fc(x)) + s.silu(s.fc(x)), **linears("fc"), relu=nn.ReLU(), silu=nn.SiLU()),
        "several activations follow it in turn",
    ),
    "in training alone": (
        lambda: Block(lambda s, x, _: s.act(s.fc(x) * 2 if s.training else s.fc(x)), **linears("fc"), act=nn.ReLU()),
        "mul follows, a function in a forward",
    ),
    "without a mask alone": (
        lambda: Block(lambda s, x, mask: s.act(s.fc(x) * 2 if mask is None else s.fc(x)), **linears("fc"), act=nn.ReLU()),
        "mul follows, a function in a forward",
    ),
    "by the values": (
        lambda: Block(lambda s, x, _: s.act(s.fc(x)) if x.sum() > 0 else x, **linears("fc"), act=nn.ReLU()),
        r"the forward of the model \(Block\) cannot be traced: symbolically traced variables cannot be used as inputs to control flow",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why(name: str) -> None:
    make, why = LEFT[name]
    model = make()
    before = [type(m) for m in model.modules()]
    if name in ("a subclass", "parametrised", "pruned", "another forward", "a subclass of Parameter"):  # which do not all copy
        found = epigen.fuse(model)
    else:
        found = fused(model)
    assert not found.replaced and not found.chains and [type(m) for m in model.modules()] == before
    assert len(found.left) == len([m for m in model.modules() if isinstance(m, nn.Linear)])
    assert re.match(why, found.left[0].why)


def test_a_dtype_that_is_not_trained() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).double()
    (left,) = epigen.fuse(model).left
    assert left.why == "its weight is torch.float64, and fp32, fp16 and bf16 are trained"


def test_a_layer_alone_and_a_model_without_any() -> None:
    (left,) = epigen.fuse(nn.Linear(8, 8)).left
    assert left.why == "it is the model itself, and only what a module holds is replaced"
    assert str(epigen.fuse(nn.Sequential(nn.ReLU()))) == "there is no linear layer"


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    model[2].weight = model[0].weight
    assert len(fused(model).replaced) == 2 and model[2].weight is model[0].weight


def test_torchs_own_transformer_is_left_whole() -> None:
    """Its activation is a function: every layer of it is reported, and it runs as before."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    found = epigen.fuse(model)
    assert not found.replaced and {x.name for x in found.left} >= {"linear1", "linear2"}
    model(drawn(2, 3, 8)).sum().backward()
