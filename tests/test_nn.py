"""`epigen.nn`: modules that take the place of torch's own."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from golden import Golden
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import epigen
from epigen.errors import CallError, CheckError


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# -- Linear


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_starts_as_torchs_does_and_takes_its_state(bias: bool) -> None:
    options: dict[str, Any] = {"bias": bias, "dtype": torch.bfloat16}
    torch.manual_seed(3)
    ours = epigen.nn.Linear(6, 5, epilogue="gelu(mm + bias)" if bias else "gelu(mm)", **options)
    torch.manual_seed(3)
    theirs = nn.Linear(6, 5, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(t, theirs.state_dict()[name]) and t.dtype == torch.bfloat16 for name, t in ours.state_dict().items())
    other = nn.Linear(6, 5, **options)
    ours.load_state_dict(other.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, other.weight)
    assert repr(ours) == repr(theirs)[:-1] + f", epilogue={ours.epilogue!r})"


def test_a_layer_takes_the_programs_inputs_at_the_call() -> None:
    layer = epigen.nn.Linear(6, 5, epilogue="y = silu(mm + bias) * gate[m,n] * s; y, amax(y)", of="y")
    x, gate = drawn(2, 3, 6), drawn(2, 3, 5, seed=1).requires_grad_()
    y, top = layer(x, gate=gate, s=2.0)
    torch.testing.assert_close(y, F.silu(F.linear(x, layer.weight, layer.bias)) * gate * 2)
    assert top == y.abs().max() and not top.requires_grad
    y.sum().backward()
    assert all(t.grad is not None for t in (gate, layer.weight, layer.bias))


def test_a_layer_moves_copies_and_is_stored() -> None:
    layer = epigen.nn.Linear(6, 5, epilogue="relu(mm + bias)", save="output")
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for other in (copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert repr(other) == repr(layer) and other.save == "output" and torch.equal(other(drawn(3, 6)), layer(drawn(3, 6)))
    assert layer.half()(drawn(3, 6).half()).dtype == torch.float16


def test_the_bias_and_the_epilogue_agree(golden: Golden) -> None:
    with golden.raises(CallError, "bias=False"):
        epigen.nn.Linear(6, 5, bias=False, epilogue="relu(mm + bias)")
    with golden.raises(CallError, "bias=True"):
        epigen.nn.Linear(6, 5, epilogue="relu(mm)")
    with golden.raises(CheckError, "bais"):
        epigen.nn.Linear(6, 5, epilogue="relu(mm + bais)")


def test_a_weight_with_a_main_grad_adds_to_it() -> None:
    model = epigen.nn.MLP([6, 5, 4], dtype=torch.float16)
    for layer in model:
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    for _ in range(2):
        model(drawn(3, 6).half()).sum().backward()
    assert all(layer.weight.grad is None and layer.weight.main_grad.any() and layer.bias.grad is not None for layer in model)


class Noisy(nn.Module):
    """A parametrisation that counts how often it is computed, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def forward(self, t: Tensor) -> Tensor:
        self.computed += 1
        return t + torch.randn_like(t)


@pytest.mark.parametrize("make", [lambda: epigen.nn.Linear(6, 6, epilogue="gelu(mm + bias)"), lambda: epigen.nn.MLP([6, 6, 6])], ids=["Linear", "MLP"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrised_parameter_is_computed_once_a_forward(make: Callable[[], nn.Module], name: str) -> None:
    model = make()
    layer = model[0] if isinstance(model, epigen.nn.MLP) else model
    noise = Noisy()
    nn.utils.parametrize.register_parametrization(layer, name, noise, unsafe=True)
    noise.computed = 0
    model(drawn(2, 6))
    assert noise.computed == 1


# -- chains


def test_an_mlp_is_its_layers_in_turn(ran: list[str], golden: Golden) -> None:
    model = epigen.nn.MLP([6, 8, 5, 4], "silu")
    layers = nn.Sequential(*(nn.Linear(k, n) for k, n in itertools.pairwise((6, 8, 5, 4))))
    layers.load_state_dict(model.state_dict())
    x = drawn(2, 3, 6)
    first, second, last = layers
    torch.testing.assert_close(model(x), last(F.silu(second(F.silu(first(x))))))
    ran.clear()
    model(x).sum().backward()
    assert len(ran) == 6, "three products forward, a pass over the gradient, and two products with a derivative"
    assert epigen.nn.MLP([6, 4], bias=False)[0].epilogue == "mm"
    with golden.raises(CallError, "rleu"):
        epigen.nn.MLP([6, 8, 4], "rleu")
    with golden.raises(CallError, "sizes"):
        epigen.nn.MLP([6])


def test_a_chain_breaks_where_something_else_stands() -> None:
    parts = [epigen.nn.Linear(6, 8, epilogue="relu(mm + bias)"), epigen.nn.Linear(8, 8, epilogue="gelu(mm + bias)")]
    chain = epigen.nn.Chain(*parts, nn.LayerNorm(8), nn.Identity(), epigen.nn.Linear(8, 2, epilogue="y = mm + bias; y, sum(y, n)"))
    x = drawn(3, 6)
    y, total = chain(x)
    expected = chain[4](chain[2](parts[1](parts[0](x))))
    torch.testing.assert_close((y, total), tuple(expected))
    assert torch.equal(epigen.nn.Chain()(x), x)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_layer_with_hooks_is_called(register: str) -> None:
    model = epigen.nn.MLP([6, 8, 4])
    seen: list[nn.Module] = []
    getattr(model[0], register)(lambda module, *_: seen.append(module))
    x = drawn(3, 6).requires_grad_()
    model(x).sum().backward()
    assert seen == [model[0]]
    again = copy.deepcopy(x.grad)
    model[0]._forward_hooks.clear()
    x.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, again)


def test_saved_tensors_are_those_of_the_policy() -> None:
    """Bytes from forward to backward, of a chain of three layers."""

    def kept(**options: Any) -> int:
        torch.manual_seed(0)
        model = epigen.nn.MLP([64, 128, 128, 32], dtype=torch.float16, **options)
        held: dict[int, int] = {}
        mine = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in mine:
                held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(x).sum()
        assert loss.requires_grad
        return sum(held.values())

    x = drawn(16, 64).half()
    tile, mask = 16 * 128 * 2, 16 * 128 // 8
    assert kept(activation="relu") == 2 * (tile + mask)
    assert kept(activation="relu", save="output") == kept(activation="gelu", save="recompute") == 2 * tile
    assert kept(activation="gelu") == 2 * (tile + tile)


# -- GatedMLP


def gated(mlp: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    found: Tensor = mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))
    return found


@pytest.mark.parametrize("save", [None, "preactivation", "recompute"])
@pytest.mark.parametrize(("name", "activation"), [("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")), ("relu", F.relu)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_mlp_is_torchs(bias: bool, name: str, activation: Callable[[Tensor], Tensor], save: str | None) -> None:
    torch.manual_seed(0)
    mlp, x = epigen.nn.GatedMLP(16, 24, 8, name, bias, save=save), drawn(2, 5, 16).requires_grad_()
    found, expected, wanted = mlp(x), gated(mlp, x, activation), [x, *mlp.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    arriving = drawn(2, 5, 8, seed=1)
    for ours, torchs in zip(torch.autograd.grad(found, wanted, arriving), torch.autograd.grad(expected, wanted, arriving), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj", "x"])
def test_of_a_gated_mlp_what_is_frozen_has_no_gradient(frozen: str) -> None:
    torch.manual_seed(0)
    mlp, x = epigen.nn.GatedMLP(16, 24), drawn(5, 16).requires_grad_(frozen != "x")
    if frozen != "x":
        getattr(mlp, frozen).requires_grad_(False)
    wanted = [t for t in (x, *mlp.parameters()) if t.requires_grad]
    mlp(x).sum().backward()
    found = [t.grad for t in wanted]
    expected = torch.autograd.grad(gated(mlp, x, F.silu).sum(), wanted)
    for ours, torchs in zip(found, expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    assert all(t.grad is None for t in mlp.parameters() if not t.requires_grad)


def test_a_gated_mlp_runs_the_hooks_and_adapters_of_its_layers() -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return 2 * super().forward(input)

    mlp, x, seen = epigen.nn.GatedMLP(16, 24), drawn(5, 16), list[str]()
    handle = mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    torch.testing.assert_close(mlp(x), gated(mlp, x, F.silu), rtol=1e-5, atol=1e-6)
    assert seen == ["up", "up"]
    handle.remove()
    mlp.gate_proj.__class__ = Adapted
    torch.testing.assert_close(mlp(x), gated(mlp, x, F.silu), rtol=1e-5, atol=1e-6)
    mlp.gate_proj.__class__ = nn.Linear
    mlp(x)
    assert seen == ["up", "up"]


def test_what_a_gated_mlp_cannot_be_made_of(golden: Golden) -> None:
    with golden.raises(CallError, "activation"):
        epigen.nn.GatedMLP(16, 24, activation="swish")
    one, other, small = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 24, bias=False)
    with golden.raises(CallError, "shapes"):
        epigen.nn.GatedMLP.from_layers(one, other, other)
    with golden.raises(CallError, "biases"):
        epigen.nn.GatedMLP.from_layers(one, small, other)
    with golden.raises(CallError, "classes"):
        epigen.nn.GatedMLP.from_layers(nn.Sequential(one), one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "activation"), [("llama", "silu"), ("qwen2", "silu"), ("gemma2", "gelu_tanh")])
def test_the_gated_mlps_of_a_model_in_place_of_its_own(name: str, activation: str) -> None:
    """With the same state dict, the same results and gradients."""
    if package := zoo.missing(name):
        pytest.skip(f"{package} is not installed")
    made, other = zoo.ZOO[name](), zoo.ZOO[name]()
    replaced = 0
    for module in list(other.model.modules()):
        if hasattr(module, "mlp") and hasattr(module.mlp, "gate_proj"):
            own: Any = module.mlp
            module.mlp, replaced = epigen.nn.GatedMLP.from_layers(own.gate_proj, own.up_proj, own.down_proj, activation), replaced + 1
    assert replaced >= 2 and list(other.model.state_dict()) == list(made.model.state_dict())
    for model in (made, other):
        model.loss().backward()
    torch.testing.assert_close(other.loss(), made.loss(), rtol=1e-5, atol=1e-6)
    for ours, torchs in zip(other.model.parameters(), made.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, torchs.grad, rtol=1e-3, atol=1e-6)
