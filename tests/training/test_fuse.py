"""`epigen.fuse`: what of a model it fuses, that the model computes as before, whatever is done to it later, and that nothing else changes."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT
from counting import counted
from fusing import Block, agree, drawn, fused
from golden import Golden
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import epigen
from epigen.errors import CallError
from epigen.training import chain, deferred, elements, library, plan
from epigen.training.fuse import Forward

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("one_thread")]


def linears(*names: str) -> dict[str, Any]:
    return {name: nn.Linear(8, 8) for name in names}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def calls(ran: list[str], model: nn.Module, *inputs: Any) -> list[str]:
    """The programs of one call."""
    ran.clear()
    model(*(inputs or (drawn(3, 8),)))
    return list(ran)


# -- what is fused


class Quick(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, tuple[nn.Module | Callable[[Tensor], Tensor], str]] = {
    "relu": (nn.ReLU(), "relu(mm + bias)"),
    "relu in place": (nn.ReLU(inplace=True), "relu(mm + bias)"),
    "gelu": (nn.GELU(), "gelu(mm + bias)"),
    "gelu by tanh": (nn.GELU(approximate="tanh"), "gelu_tanh(mm + bias)"),
    "leaky relu": (nn.LeakyReLU(0.2), "leaky_relu(mm + bias, 0.2)"),
    "hardtanh": (nn.Hardtanh(), "hardtanh(mm + bias, -1, 1)"),
    "softplus with options": (nn.Softplus(beta=2), "v = mm + bias; v1 = 2 * v; where(v1 > 20, v, softplus(v1) / 2)"),
    "a module of the user's": (Quick(), "quick_gelu(mm + bias)"),
    "a function": (F.silu, "silu(mm + bias)"),
    "a method": (lambda x: x.tanh(), "tanh(mm + bias)"),
    "several": (lambda x: F.dropout(F.relu(x), 0.0) * 2 + 1, "relu(mm + bias) * 2 + 1"),
    "in place": (lambda x: x.mul_(2).relu_(), "relu((mm + bias) * 2)"),
    "an operator in place": (lambda x: added_in_place(x), "mm + bias + 1"),
}  # fmt: skip


def added_in_place(x: Tensor) -> Tensor:
    x += 1
    return x


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_layer_and_what_follows_it_are_one_program(name: str, ran: list[str]) -> None:
    """Whatever computes it: a module, a function, a method, operators."""
    activation, text = ACTIVATIONS[name]
    model = Block(lambda s, x, _: s.norm(activation(s.fc(x))), **linears("fc"), norm=nn.LayerNorm(8))
    found = fused(model)
    assert [(r.name, r.epilogue) for r in found.replaced] == [("fc", text)] and not found.left
    assert calls(ran, model.requires_grad_(False)) == [text]


@pytest.mark.parametrize("activation", [F.relu_, lambda y: F.silu(y, inplace=True), lambda y: added_in_place(y).relu_()])
def test_what_changes_a_result_in_place_is_the_result(activation: Callable[[Tensor], Tensor]) -> None:
    """Also where that goes out of the forward, and its own tensor with it."""
    model = Block(lambda s, x, _: activation(s.fc(x)), **linears("fc"))
    assert fused(model).replaced


def test_layers_that_follow_one_another_run_as_a_chain(ran: list[str], golden: Golden) -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.Identity(), nn.GELU(), nn.Linear(16, 4), nn.Dropout(0.5), nn.Linear(4, 4)
    )
    found = fused(model.train())
    golden(found)
    ran.clear()
    model.train()(drawn(3, 8)).sum().backward()
    assert len(ran) == 6 and ran[-1] == "dmm = drelu(mm, mask); dbias = bgrad(dmm); dmm, dbias", (
        "three products, a pass over a gradient, two products with a derivative"
    )
    again = epigen.fuse(model)
    assert str(again) == str(found), "a second time changes nothing"


class Stepping(nn.Module):
    """What is rounded on its way; twice of one layer, and before another."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.step, self.one, self.other, self.scale = step, nn.Linear(8, 6), nn.Linear(6, 4), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.step(self.one(x)) * self.scale) + self.other(self.step(self.one(x)))


@pytest.mark.parametrize(
    "step", [torch.sign, torch.round, torch.floor, torch.ceil, torch.trunc, lambda x: x + (x.round() - x).detach(), lambda x: (x > 0).float()]
)
def test_steps_are_trained_as_torch_trains_them(step: Callable[[Tensor], Tensor]) -> None:
    """Gradients of zeros, and none where torch has none."""
    fused(Stepping(step))


def test_gates_residuals_and_dropout_that_drops_nothing() -> None:
    def gated(s: Any, x: Tensor, _: Any) -> Tensor:
        return x + s.drop(s.down(F.silu(s.gate(x)) * s.up(x)))

    model = Block(gated, gate=nn.Linear(8, 16), up=nn.Linear(8, 16), down=nn.Linear(16, 8), drop=nn.Dropout(0.1)).eval()
    found = fused(model)
    model.eval()
    both = "silu(mm + bias) * (dot(a, x0[k,n]) + x1[n])"
    assert {r.name: r.epilogue for r in epigen.fuse(model).replaced} == {"gate": both, "up": both, "down": "x0[m,n] + (mm + bias)"}
    assert not found.left
    assert "down" in {r.name for r in epigen.fuse(model.train()).replaced}, "in the chain: what drops is left"


_BOTH: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "gate first": (lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)), "silu(mm) * dot(a, x0[k,n])"),
    "both, then the activation": (lambda s, x: (lambda g, u: s.down(F.gelu(g) * u))(s.gate(x), s.up(x)), "gelu(mm) * dot(a, x0[k,n])"),
    "a sum": (lambda s, x: s.down(torch.tanh(s.gate(x) + s.up(x))), "tanh(mm + dot(a, x0[k,n]))"),
    "in place": (lambda s, x: s.down(F.silu(s.gate(x), inplace=True).mul_(s.up(x))), "silu(mm) * dot(a, x0[k,n])"),
    "with a scale": (lambda s, x: s.down(F.silu(s.gate(x)) * (s.up(x) * 0.5)), ""),
}


@pytest.mark.parametrize("name", _BOTH)
@pytest.mark.parametrize("size", [(3, 8), (2, 3, 8), (8,)], ids=str)
def test_two_products_of_one_x_are_one_kernel(name: str, size: tuple[int, ...]) -> None:
    forward, program = _BOTH[name]
    layers = {"gate": nn.Linear(8, 16, bias=False), "up": nn.Linear(8, 16, bias=False), "down": nn.Linear(16, 8)}
    model = Block(lambda s, x, _: forward(s, x), **layers)
    found = {r.name: r.epilogue for r in fused(model, drawn(*size)).replaced}
    assert found.get("gate", "") == found.get("up", "") == program or not program


_APART: dict[str, Callable[[Any, Tensor], Any]] = {
    "of another x": lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x + 1)),
    "used twice": lambda s, x: (lambda u: s.down(F.silu(s.gate(x)) * u) + u.sum())(s.up(x)),
    "what is computed of it": lambda s, x: s.down(F.silu(s.gate(x)) * torch.tanh(s.up(x))),
    "by the same weight": lambda s, x: s.down(F.silu(s.gate(x)) * s.gate(x)),
    "never joined": lambda s, x: s.down(F.silu(s.gate(x))) + s.down(F.relu(s.up(x))),
}


@pytest.mark.parametrize("name", _APART)
def test_what_are_no_two_products_of_one_kernel(name: str) -> None:
    model = Block(lambda s, x, _: _APART[name](s, x), gate=nn.Linear(8, 16), up=nn.Linear(8, 16), down=nn.Linear(16, 8))
    assert not any("dot(" in r.epilogue for r in fused(model).replaced)


def test_a_forward_that_multiplies_another_x_this_time() -> None:
    """Is computed by what it calls."""

    def forward(s: Any, x: Tensor, other: Tensor | None) -> Tensor:
        result: Tensor = s.down(F.silu(s.gate(x)) * s.up(x if other is None else other))
        return result

    model = Block(forward, gate=nn.Linear(8, 16), up=nn.Linear(8, 16), down=nn.Linear(16, 8))
    plain, x = copy.deepcopy(model), drawn(3, 8, seed=4)
    epigen.fuse(model)
    for other in (None, None, drawn(3, 8, seed=5), None, drawn(3, 8, seed=6), None):
        torch.testing.assert_close(model(x, other), plain(x, other), rtol=1e-5, atol=1e-6)
    assert any("dot(" in r.epilogue for r in epigen.fuse(model).replaced)
    for m in (model, plain):
        m.up.weight = nn.Parameter(drawn(16, 8, seed=9))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_two_products_under_autocast() -> None:
    model = Block(lambda s, x, _: s.down(F.silu(s.gate(x)) * s.up(x)), gate=nn.Linear(8, 16), up=nn.Linear(8, 16), down=nn.Linear(16, 8))
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    for seed in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = model(drawn(3, 8, seed=seed)), plain(drawn(3, 8, seed=seed))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("shape", "indices"), [((8,), "n"), ((1, 8), "n"), ((2, 3, 8), "m,n"), ((3, 8), "m,n"), ((2, 3, 1), "m"), ((), "")])
def test_what_is_joined_is_broadcast_as_torch_does(shape: tuple[int, ...], indices: str) -> None:
    model = Block(lambda s, x, _: F.relu(s.fc(x) * s.scale), **linears("fc"))
    model.scale = nn.Parameter(drawn(*shape, seed=3))
    (found,) = fused(model, drawn(2, 3, 8)).replaced
    assert found.epilogue == f"relu((mm + bias) * x0{f'[{indices}]' if indices else ''})"


class Transposed(nn.Module):
    """As Hugging Face's Conv1D."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(drawn(nx, nf)), nn.Parameter(drawn(nf, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.size()[:-1], self.nf))


def test_a_transposed_layer() -> None:
    found = fused(nn.Sequential(Transposed(16, 8), nn.GELU(), Transposed(8, 16)), drawn(2, 3, 8))
    assert [r.epilogue for r in found.replaced] == ["gelu(mm + bias)", "mm + bias"]


class Multiplied(nn.Linear):
    """As Falcon's layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


MULTIPLIED: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "a layer by its transposed weight": (lambda s, x: s.down(F.gelu(s.up(x))), ["gelu(mm + x0[n])", "mm + x0[n]"]),
    "a weight that lies so": (lambda s, x: torch.matmul(F.silu(torch.matmul(x, s.weight)), s.up.weight), ["silu(mm)"]),
    "rows alone": (lambda s, x: torch.mm(x[0], s.weight).relu() + x[0].mm(s.weight).tanh(), ["tanh(mm)", "relu(mm) + x0[m,n]"]),
    "a matrix that was computed": (lambda s, x: (x[0] @ x[1].mT) * s.weight.exp().mean(), ["mm * x0"]),
    "what has more dimensions": (lambda s, x: s.up(x) @ s.up(x).mT * 0.5, []),
    "the other operand waits": (lambda s, x: x[0] @ F.gelu(s.up(x[1][:, :3])), []),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_products_by_a_matrix(name: str, ran: list[str]) -> None:
    forward, texts = MULTIPLIED[name]
    torch.manual_seed(0)
    model = Block(lambda s, x, _: forward(s, x), up=Multiplied(8, 16), down=Multiplied(16, 8))
    model.weight = nn.Parameter(drawn(8, 16))
    if name == "the other operand waits":
        model.up = Multiplied(3, 5)
    plain = copy.deepcopy(model)
    x = drawn(2, 8, 8)
    epigen.fuse(model)
    agree(model, plain, x)
    with torch.no_grad():
        assert set(texts) <= set(calls(ran, model, x)), ran
    with torch.inference_mode():
        assert set(texts) <= set(calls(ran, model, x)), ran
    agree(model, plain, x)


# -- convolutions


class Bottleneck(nn.Module):
    """As ResNet's, with what it does in place, and a gate that varies over an image."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.first = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.deep, self.gate = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.up, self.last, self.act = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.act(self.first(self.down(x))))
        y = y * F.hardsigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = self.last(self.up(y))
        y += x
        return self.act(y)


def lies(t: Tensor) -> list[int]:
    """The strides of the dimensions that have any."""
    return [step for extent, step in zip(t.shape, t.stride(), strict=True) if extent > 1]


NORMED = "(mm - x0[n]) * rsqrt(x1[n] + 1e-05) * x2[n] + x3[n]"


def test_convolutions_of_one_element(ran: list[str]) -> None:
    """In eval mode and in memory where channels lie side by side, with norms and residuals, in the memory that torch gives its results."""
    torch.manual_seed(0)
    model, x = Bottleneck().to(memory_format=torch.channels_last).eval(), drawn(2, 16, 4, 5).contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    found = epigen.fuse(model)
    assert {r.name for r in found.replaced} == {"down", "gate", "up"} and str(found).endswith("3 of 3 layers fused")
    agree(model, plain, x)
    with torch.no_grad():
        assert calls(ran, model, x) == [f"relu({NORMED})", "hardsigmoid(mm + bias)", f"relu({NORMED.replace('mm', 'mm + bias')} + x4[m,n])"]
        assert lies(model(x)) == lies(plain(x)) and model(x).is_contiguous(memory_format=torch.channels_last)
    trained = epigen.fuse(model.train())
    model(x)
    why = "batch_norm follows, which no epilogue computes: it takes its statistics of all rows first"
    assert {x.name: x.why for x in trained.left} == {"down": why, "up": why}


def test_convolutions_that_are_left_say_why(ran: list[str], golden: Golden) -> None:
    side_by_side = "its channels do not lie side by side in memory: memory_format=torch.channels_last, of the model and of its input, puts them there"
    for model, why in (
        (nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU()), side_by_side),
        (nn.Sequential(nn.Conv2d(16, 8, 1, stride=2), nn.ReLU()), "a convolution of stride 2x2 and padding 0x0, whose rows are not those of its input"),
        (nn.Sequential(nn.Conv2d(16, 8, 1, padding=1), nn.ReLU()), "a convolution of stride 1x1 and padding 1x1, whose rows are not those of its input"),
    ):
        found = fused(model, drawn(2, 16, 4, 5))
        assert [x.why for x in found.left] == [why] and not ran
    golden(epigen.fuse(nn.Conv2d(16, 8, 3)))


def test_a_plan_for_one_memory_is_none_for_another() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 8, 1), nn.SiLU())
    plain, x = copy.deepcopy(model), drawn(2, 16, 4, 5)
    epigen.fuse(model)
    for memory in (torch.channels_last, torch.contiguous_format, torch.channels_last):
        agree(model, plain, x.contiguous(memory_format=memory))


def test_what_a_linear_layer_takes_of_a_convolution(ran: list[str]) -> None:
    """Rows of images, and no rows of the product that was before."""
    x = drawn(2, 8, 3, 8).contiguous(memory_format=torch.channels_last)
    model = Block(lambda s, x, _: F.relu(s.fc(F.relu(s.conv(x)))), conv=nn.Conv2d(8, 8, 1), **linears("fc"))
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    agree(model, plain, x)
    assert calls(ran, model.requires_grad_(False), x) == ["relu(mm + bias)"] * 2
    whole = nn.Sequential(nn.Conv2d(8, 4, 1), nn.GELU(), nn.Flatten(), nn.Linear(96, 4), nn.Tanh())
    agree(whole, copy.deepcopy(whole), x)


def test_arguments_beside_a_convolution_that_would_be_copied_are_left() -> None:
    """A gate of each image, and a residual in other memory: no tile is made of the one, nor of the other."""
    x = drawn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    gate, residual = drawn(2, 8, 1, 1, seed=1), drawn(2, 8, 3, 5, seed=2)
    rows = drawn(2, 1, 3, 5, seed=3)
    for other, taken in ((gate, False), (residual, False), (rows, True), (drawn(8, 1, 1), True), (drawn(1), True)):
        model = Block(lambda s, x, _, other=other: F.relu(s.conv(x) * other), conv=nn.Conv2d(8, 8, 1))
        plain = copy.deepcopy(model)
        found = epigen.fuse(model)
        agree(model, plain, x)
        assert len(found.replaced) == taken, other.shape


def test_norms_over_the_batch_after_a_linear_layer() -> None:
    """Of [N, C] it is an epilogue in eval mode; of [N, C, L] the channels are no columns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()).eval()
    found, plain = epigen.fuse(model), copy.deepcopy(model)
    epigen.unfuse(plain)
    torch.testing.assert_close(model(drawn(5, 8)), plain(drawn(5, 8)))
    assert [r.epilogue for r in found.replaced] == [f"relu({NORMED.replace('mm', 'mm + bias')})"]
    other = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(3), nn.ReLU()).eval()
    found, plain = epigen.fuse(other), copy.deepcopy(other)
    epigen.unfuse(plain)
    torch.testing.assert_close(other(drawn(5, 3, 8)), plain(drawn(5, 3, 8)))
    assert "batch_norm" in found.left[0].why and len(found.left) == 1


def test_convolutions_whose_products_would_be_in_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "precision", lambda: "tf32")
    monkeypatch.setattr(elements, "process_precision", lambda: "ieee")
    for dtype, on_gpu, said in (
        (torch.float32, True, "convolutions are in TF32 here, and products in full fp32"),
        (torch.float32, False, ""),
        (torch.half, True, ""),
    ):
        x: Any = SimpleNamespace(dtype=dtype, is_cuda=on_gpu)
        assert elements.why_not_as_fast(x).startswith(said) and bool(elements.why_not_as_fast(x)) == bool(said)


def test_no_forward_around_need_be_traceable() -> None:
    """What encloses the MLP takes keywords, branches on values and gives a tuple."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = mlp(), nn.LayerNorm(8)

        def forward(self, x: Tensor, **kwargs: Any) -> Any:
            y = self.inner(self.norm(x))
            return (y if float(y.detach().sum()) > 0 else -y), kwargs

    model, x = Outer(), drawn(2, 3, 8)
    plain = copy.deepcopy(model)
    assert len(epigen.fuse(model).replaced) == 2
    torch.testing.assert_close(model(x, mask=None), plain(x, mask=None))


def test_a_forward_that_cannot_be_tried_out_is_rehearsed_at_its_first_call(ran: list[str]) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(8, 8), nn.GELU()

        def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
            return self.act(self.fc(x))[: sizes[0]]

    model = Odd().requires_grad_(False)
    found = epigen.fuse(model)
    assert re.match(r"the forward of the model \(Odd\) is rehearsed at its first call, since beforehand", found.left[0].why)
    assert calls(ran, model, drawn(3, 8), [2]) == ["gelu(mm + bias)"] and len(found.replaced) == 1


class Cache:
    """What earlier calls have computed, as decoders keep it; each call adds to it."""

    def __init__(self, held: list[Any]) -> None:
        self.held, self.calls = held, 0

    def update(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.held.append(x)
        return torch.cat([t for t in self.held if isinstance(t, Tensor)], -2)


class Named(Tensor):
    """Of a kind of its own."""


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        found: Tensor = self.act(self.fc(cache.update(x)))
        return found


def test_an_argument_that_the_forward_changes_is_tried_out_as_a_copy(ran: list[str]) -> None:
    model = Cached().requires_grad_(False)
    plain = copy.deepcopy(model)
    found = epigen.fuse(model)
    caches = [Cache([drawn(2, 8)]) for _ in range(2)]
    for seed in range(4):
        x = drawn(3, 8, seed=seed)
        ran.clear()
        torch.testing.assert_close(model(x, caches[1]), plain(x, caches[0]))
        assert ran == ["gelu(mm + bias)"] and len(found.replaced) == 1
    torch.testing.assert_close(caches[1].held, caches[0].held)
    assert caches[1].calls == 4 and {type(t) for t in caches[1].held} == {Tensor}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (lambda: [drawn(2, 8).as_subclass(Named)], "Named"),
        (lambda: [nn.Linear(2, 2)], "Linear"),
        (lambda: [threading.Lock()], "TypeError"),
        (lambda: [[[i, str(i)] for i in range(20_000)]], "too much"),
    ],
    ids=["a subclass", "a module", "a lock", "much"],
)
def test_an_argument_that_cannot_be_copied_is_left_alone(held: Callable[[], list[Any]], said: str, ran: list[str]) -> None:
    model = Cached().requires_grad_(False)
    found, cache = epigen.fuse(model), Cache(held())
    ran.clear()
    try:
        model(drawn(3, 8), cache)
    finally:
        assert ran == [] and said in found.left[0].why and cache.calls == 1


def test_reports_of_a_part_and_of_none(golden: Golden) -> None:
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    found = epigen.fuse(model, only="a", dry_run=True)
    assert [r.name for r in found.replaced] == ["a.0", "a.2"] and {x.why for x in found.left} == {"b (Sequential) is not in only"}
    assert not any(isinstance(vars(m).get("forward"), Forward) for m in model.modules()), "a dry run changes nothing"
    epigen.fuse(model, only=lambda name, _: name == "b")
    assert isinstance(model["b"].forward, Forward) and "forward" not in vars(model["a"])
    with golden.raises(CallError, "only"):
        epigen.fuse(model, only="c")
    with golden.raises(CallError, "str"):
        epigen.fuse("model")  # type: ignore[arg-type]
    golden(epigen.fuse(nn.Sequential(nn.ReLU())), "none")
    (left,) = epigen.fuse(nn.Linear(8, 8)).left
    golden(left.why, "the model itself")


def test_only_and_models_of_another_kind_are_refused(golden: Golden) -> None:
    model = mlp()
    for wrong in (3, [3]):
        with golden.raises(CallError, f"only={wrong}"):
            epigen.fuse(model, only=wrong)  # type: ignore[arg-type]
    with golden.raises(CallError, "int"):
        epigen.unfuse(3)  # type: ignore[arg-type]
    assert "forward" not in vars(model)


def test_a_layer_with_two_callers(ran: list[str]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    model = Block(lambda s, x, _: s.a(x) + s.b(x), a=nn.Sequential(layer, nn.GELU()), b=nn.Sequential(layer, nn.ReLU()))
    assert [(r.name, r.epilogue) for r in fused(model).replaced] == [("a.0", "gelu(mm + bias)")]
    with torch.no_grad():
        assert calls(ran, model) == ["gelu(mm + bias)", "relu(mm + bias)"]


def test_layers_whose_parameters_are_not_there_yet(ran: list[str]) -> None:
    lazy = nn.Sequential(nn.LazyLinear(16), nn.GELU(), nn.LazyLinear(8))
    found = epigen.fuse(lazy)
    assert {x.why.partition("since ")[2] for x in found.left} == {"beforehand its parameters are not there yet"} and "0 of 2" in str(found)
    lazy(drawn(3, 8))  # which makes them
    with torch.no_grad():
        assert calls(ran, lazy) == ["gelu(mm + bias)", "mm + bias"] and len(found.replaced) == 2
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    found = epigen.fuse(model)
    assert {x.why.partition("since ")[2] for x in found.left} == {"beforehand its parameters are on meta"}
    model.to_empty(device="cpu").load_state_dict(mlp().state_dict())
    agree(model, mlp(), drawn(3, 8))
    with torch.no_grad():
        assert calls(ran, model) == ["gelu(mm + bias)", "mm + bias"] and len(found.replaced) == 2


class Unrecorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x)) * 2


def test_a_forward_without_gradients(ran: list[str]) -> None:
    model = Unrecorded()
    plain = copy.deepcopy(model)
    assert [r.epilogue for r in epigen.fuse(model).replaced] == ["gelu(mm + bias) * 2"]
    for _ in range(3):
        assert calls(ran, model) == ["gelu(mm + bias) * 2"]
        torch.testing.assert_close(model(drawn(3, 8)), plain(drawn(3, 8)))


# -- what is left


def with_weight(weight: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].weight = weight
    return model


class Subclass(nn.Parameter):
    pass


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # noqa: ARG004
        return dy * 2


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "not in the language": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), "softmax follows, which no epilogue computes: _softmax is not in the language"),
    "a subclass of Parameter": (lambda: with_weight(Subclass(drawn(8, 8))), "its weight is a Subclass|the forward of the model .* cannot be rehearsed: .* Multiple dispatch failed"),
    "used twice": (lambda: Block(lambda s, x, _: s.norm(h := s.fc(x)) + h, **linears("fc"), norm=nn.LayerNorm(8)), "its result is used in 2 places"),
    "a gradient cut": (lambda: Block(lambda s, x, _: s.fc(x).detach() * x, **linears("fc")), "detach follows, which no epilogue computes: it has no gradient"),
    "a function of autograd": (lambda: Block(lambda s, x, _: Doubled.apply(s.fc(x)).relu(), **linears("fc")), "the forward of the model .* cannot be rehearsed: it calls a torch.autograd.Function"),
    "by the values": (lambda: Block(lambda s, x, _: F.relu(s.fc(x)) if x.sum() > 0 else x, **linears("fc")), "the forward of the model .* cannot be rehearsed: on tensors without contents it raises"),
    "what drops": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()), "dropout follows, which no epilogue computes"),
    "not called": (lambda: Block(lambda s, x, _: F.linear(x, s.fc.weight * 1).relu(), **linears("fc")), "the forward of the model .* does not call it"),
    "fp64": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()).double(), "its product is torch.float64, and fp32, fp16 and bf16 are fused"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why(name: str) -> None:
    make, why = LEFT[name]
    model = make()
    plain, found = copy.deepcopy(model), epigen.fuse(model)
    agree(model, plain, drawn(3, 8).to(next(model.parameters()).dtype))
    (left,) = epigen.fuse(model.train()).left if name == "what drops" else found.left
    assert re.match(why, left.why), left.why


# -- nothing changes


def test_fusing_and_calling_change_no_state() -> None:
    """Buffers, counters, lists, and the random state of torch, Python and numpy."""
    import numpy as np

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.register_buffer("steps", torch.zeros(()))
            self.calls, self.kept, self.nested = 0, [], {"a": [1]}

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.fc(x))
            self.steps += 1
            self.calls += 1
            self.kept.append(h.square().mean())
            self.nested["a"].append(random.random() + np.random.rand())
            return self.norm(h) * (1 + 0 * torch.rand(1))

    model = Counting().train()
    state, own = copy.deepcopy(model.state_dict()), (model.calls, list(model.kept), copy.deepcopy(model.nested))
    draws = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    assert len(epigen.fuse(model).replaced) == 1
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert (model.calls, model.kept, model.nested) == own
    assert torch.equal(torch.get_rng_state(), draws[0]) and random.getstate() == draws[1] and np.random.get_state()[1].tolist() == draws[2]
    (model(drawn(4, 8)).sum() + sum(model.kept)).backward()
    assert model.calls == 1 and type(model.kept[0]) is Tensor and model.fc.weight.grad is not None


def test_unfuse_and_what_others_see() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    before = dict(vars(model))
    epigen.fuse(model)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    wrapped = model.forward
    epigen.unfuse(model)
    assert vars(model).keys() == before.keys()
    torch.testing.assert_close(wrapped(drawn(3, 8)), plain(drawn(3, 8)), rtol=0, atol=0)


def test_copies_pickles_and_averages(ran: list[str]) -> None:
    """Each runs its own parameters, fused."""
    model = mlp()
    epigen.fuse(model)
    model(drawn(3, 8))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False), averaged.module):
        with torch.no_grad():
            other[0].weight.mul_(2)
        expected = F.linear(F.gelu(F.linear(drawn(3, 8), other[0].weight, other[0].bias)), other[2].weight, other[2].bias)
        torch.testing.assert_close(other(drawn(3, 8)), expected)
        assert calls(ran, other), "fused as well"
        other.load_state_dict(mlp().state_dict())


# -- right whatever is done later


class Lora(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        torch.manual_seed(1)
        self.base, self.a, self.b = base, nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 0.5


class Quantised(nn.Module):
    """A layer whose weight is made anew at each call."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.scale, self.bias = nn.Parameter(base.weight.abs().amax() / 127), base.bias
        self.register_buffer("q", torch.round(base.weight.detach() / self.scale.detach()).to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.q * self.scale, self.bias)


class Tagged(Tensor):
    """A weight of a class of its own, which computes by its own rule."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.as_subclass(Tensor) * 3, bias)
        return super().__torch_function__(func, types, args, kwargs)


def wrap(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    model[0] = make(model[0])  # type: ignore[operator, index]


def tag(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Tagged), requires_grad=False)  # type: ignore[index, union-attr]


def scaled_forward(model: nn.Module, place: int) -> None:
    forward = model[place].forward  # type: ignore[index]
    model[place].forward = lambda x: forward(x) * 2  # type: ignore[index]


def hook(model: nn.Module, place: int, how: str) -> None:
    getattr(model[place], how)(lambda *given: given[-1] * 2 if how == "register_forward_hook" else None)  # type: ignore[index]


LATER: dict[str, Callable[[nn.Module], Any]] = {
    "an adapter": lambda m: wrap(m, Lora),
    "a quantised layer": lambda m: wrap(m, Quantised),
    "a weight of another class": tag,
    "a parametrised weight": lambda m: parametrizations.weight_norm(m[0]),
    "a pruned weight": lambda m: prune.l1_unstructured(m[2], "weight", 0.5),
    "another forward of a layer": lambda m: scaled_forward(m, 0),
    "another forward of an activation": lambda m: scaled_forward(m, 1),
    "a hook on a layer": lambda m: hook(m, 0, "register_forward_hook"),
    "a hook on an activation": lambda m: hook(m, 1, "register_forward_hook"),
    "a backward hook": lambda m: hook(m, 0, "register_full_backward_hook"),
    "another activation": lambda m: m.__setitem__(1, nn.ReLU()),
    "an activation's option": lambda m: setattr(m[1], "approximate", "tanh"),
    "a layer less": lambda m: m.__delitem__(2),
    "a layer more": lambda m: m.append(mlp()[0]).append(nn.ReLU()),
    "another dtype": lambda m: m.to(torch.bfloat16).float(),
    "a frozen layer": lambda m: m[0].requires_grad_(False),
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(drawn(16, 8, seed=9))),
}


@pytest.mark.parametrize("called", [0, 1, 3], ids=["before the first call", "after it", "once its code is written out"])
@pytest.mark.parametrize("name", LATER)
def test_what_is_done_to_a_fused_model_is_done(name: str, called: int) -> None:
    """As to one that is not, and the other way round."""
    model, plain, before = mlp(), mlp(), mlp()
    epigen.fuse(model)
    for mode in (False, True):
        for _ in range(called):
            model.train(mode)(drawn(3, 8)).sum().backward()
    model.zero_grad()
    assert bool(vars(model)["forward"].known.flats) == (called > 1)
    for m in (model, plain, before):
        LATER[name](m)
    epigen.fuse(before)
    agree(model, plain, drawn(3, 8))
    agree(before, plain, drawn(3, 8))


def test_a_flag_that_its_code_reads(ran: list[str]) -> None:
    """The forward's own code runs, so that what was planned is given up, and planned anew."""
    model = Block(lambda s, x, _: F.gelu(s.fc(x)) * s.scale if s.activate else s.fc(x) - 1, **linears("fc"), activate=True, scale=2.0).requires_grad_(False)
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    x = drawn(3, 8)
    for activate, scale in ((True, 2.0), (False, 2.0), (False, 2.0), (True, 2.0), (True, 3.0)):
        for m in (model, plain):
            m.activate, m.scale = activate, scale
        torch.testing.assert_close(model(x), plain(x))
    assert calls(ran, model) == ["gelu(mm + bias) * 3"]
    model.activate = False
    assert calls(ran, model) == [] and calls(ran, model) == ["mm + bias - 1"]


def test_a_forward_that_is_never_twice_the_same_runs_as_it_is() -> None:
    model = Block(lambda s, x, _: F.gelu(s.fc(x)) * s.count(), **linears("fc"))
    counts = iter(range(1, 100))
    model.count = lambda: next(counts)
    epigen.fuse(model)
    start = next(counts)
    for step in range(12):
        expected = F.gelu(model.fc(drawn(3, 8))) * (start + 1 + step)
        # each plan's rehearsal counts too
        ratio = model(drawn(3, 8)) / expected
        torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio))
    assert vars(model)["forward"].known.deviations


HELD: dict[str, Callable[[], nn.Module]] = {
    "a list": lambda: listed(Block(lambda s, x, _: s.act(s.layers[0](x)), **linears("fc"), act=nn.GELU())),
    "a closure": lambda: closed(Block(lambda s, x, _: s.act(s.project(x)), **linears("fc"), act=nn.GELU())),
    "a partial": lambda: closed(Block(lambda s, x, _: s.act(s.project(x)), **linears("fc"), act=nn.GELU()), functools.partial),
    "a dict of activations": lambda: acts(Block(lambda s, x, _: s.acts["gelu"](s.fc(x)), **linears("fc"), act=nn.GELU())),
}


def listed(model: Any) -> Any:
    model.layers = [model.fc]
    return model


def closed(model: Any, by: Callable[[Any], Any] = lambda fc: lambda v: fc(v)) -> Any:
    model.project = by(model.fc)
    return model


def acts(model: Any) -> Any:
    model.acts = {"gelu": model.act}
    return model


@pytest.mark.parametrize("name", HELD)
def test_layers_that_are_reached_in_other_ways(name: str) -> None:
    model = HELD[name]()
    plain = [p.detach().clone() for p in model.fc.parameters()]
    found, x = epigen.fuse(model), drawn(3, 8)
    assert [r.name for r in found.replaced] == ["fc"]
    torch.testing.assert_close(model(x), F.gelu(F.linear(x, *plain)))
    model.fc = nn.Linear(8, 8)  # what the list or the closure holds is another layer now
    torch.testing.assert_close(model(x), HELDS_OWN[name](model, x, plain))


HELDS_OWN: dict[str, Callable[[Any, Tensor, list[Tensor]], Tensor]] = {
    "a list": lambda _, x, plain: F.gelu(F.linear(x, *plain)),
    "a closure": lambda _, x, plain: F.gelu(F.linear(x, *plain)),
    "a partial": lambda _, x, plain: F.gelu(F.linear(x, *plain)),
    "a dict of activations": lambda m, x, _: F.gelu(F.linear(x, m.fc.weight, m.fc.bias)),
}


def test_other_methods_run_as_they_are() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(8, 4)

        def features(self, x: Tensor) -> Tensor:
            return self.body[0](x)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)).relu()

    model = Features()
    expected = model.features(drawn(3, 8))
    epigen.fuse(model)
    torch.testing.assert_close(model.features(drawn(3, 8)), expected, rtol=0, atol=0)


# -- what a forward does while its results wait


WAITING: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "its weight is changed": lambda s, x, _: (y := s.fc(x), s.bump(), F.relu(y))[-1],
    "it is changed in part": lambda s, x, _: (y := s.fc(x), y.__setitem__((0, 0), 0.0), F.relu(y))[-1],
    "a view of it is changed": lambda s, x, _: (y := s.fc(x), y.view(-1).mul_(2), F.relu(y))[-1],
    "what gives its input is changed": lambda s, x, _: (y := s.fc(x), d := F.dropout(y, 0.0), d.add_(1), F.relu(y))[-1],
    "its hook is set": lambda s, x, _: (y := s.fc(x), y.register_hook(lambda g: g * 2) if y.requires_grad else None, F.relu(y))[-1],
    "it is kept": lambda s, x, _: (y := s.fc(x), setattr(s, "kept", F.relu(y)), F.relu(y) + s.kept)[-1],
    "its value is read": lambda s, x, _: (y := s.fc(x), F.relu(y) * float(y.detach().sum() > 0))[-1],
    "gradients are off for a part": lambda s, x, _: (y := s.fc(x), without_gradient(y), F.relu(y))[-1],
    "a part of it alone": lambda s, x, _: F.relu(s.fc(x)[:, :4]),
    "it is used again": lambda s, x, _: F.relu(y := s.fc(x)) + F.layer_norm(y, (8,)),
    "another product of it": lambda s, x, _: F.gelu(s.fc(F.gelu(s.fc(x)))) + s.fc(F.gelu(s.fc(x))).mean(),
    "it is asked how it is made": lambda s, x, _: F.relu(s.fc(x).to(s.fc.weight.dtype).contiguous()) if x.dtype == s.fc.weight.dtype else x,
}  # fmt: skip


def without_gradient(y: Tensor) -> None:
    with torch.no_grad():
        y.mean().item()


@pytest.mark.parametrize("name", WAITING)
def test_a_forward_that_does_something_with_what_waits(name: str) -> None:
    """However far it is fused, it computes the same."""

    def bump() -> None:
        with torch.no_grad():
            model.fc.weight.data.add_(0)

    model = Block(WAITING[name], **linears("fc"))
    model.bump = bump
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    x = drawn(3, 8)
    results = []
    for m in (model, plain, model, plain):
        given = x.clone().requires_grad_()
        y = m(given)
        results.append((y, torch.autograd.grad(y.square().sum(), [given, *m.parameters()])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[2], results[3], rtol=1e-4, atol=1e-5)


def test_its_input_is_changed_while_it_waits() -> None:
    model = Block(lambda s, x, _: (y := s.fc(x := x * 1), x.zero_(), F.relu(y))[-1], **linears("fc"))
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    flagged = Block(lambda s, x, _: (y := s.fc(x := x * 1), s.flag and x.zero_(), F.relu(y))[-1], **linears("fc"), flag=False)
    with torch.no_grad():
        torch.testing.assert_close(model(drawn(3, 8)), plain(drawn(3, 8)))
        before = flagged(drawn(3, 8))
        epigen.fuse(flagged)
        for flagged.flag in (False, True, False, True):
            torch.testing.assert_close(flagged(drawn(3, 8)), before)


def test_what_torch_does_not_tell_of_is_an_error(golden: Golden) -> None:
    """A plan that no longer holds, and a function of autograd that is given what waits."""
    model = Block(lambda s, x, _: F.relu(Doubled.apply(s.fc(x)) if s.flag else s.fc(x) * 2), **linears("fc"), flag=False)
    epigen.fuse(model)
    model(drawn(3, 8))
    model.flag = True
    with golden.raises(CallError):
        model(drawn(3, 8).requires_grad_())
    epigen.fuse(model)
    torch.testing.assert_close(model(drawn(3, 8)), F.relu(F.linear(drawn(3, 8), model.fc.weight, model.fc.bias) * 2))


def test_an_error_of_the_users_comes_out_as_it_is() -> None:
    model = Block(lambda s, x, _: F.relu(s.fc(x)) if x.shape[0] == 3 else s.kept.append(s.fc(x)) or 1 / 0, **linears("fc"), kept=[])
    epigen.fuse(model)
    model(drawn(3, 8))
    with pytest.raises(ZeroDivisionError):
        model(drawn(4, 8))
    torch.testing.assert_close(model.kept[0] * 1, model.fc(drawn(4, 8)))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(drawn(3, 7))
    torch.testing.assert_close(model(drawn(3, 8)), F.relu(model.fc(drawn(3, 8))))


# -- what the host does in a call


CHECKS = ((Forward, "key"), (deferred, "fits"), (chain, "chain"), (chain, "check_operands"), (plan, "steps"), (library, "below_autograd"))


def residual() -> Block:
    torch.manual_seed(0)
    return Block(lambda s, x, y: s.norm(s.drop(s.fc(x)) + (x if y is None else y)), **linears("fc"), drop=nn.Dropout(0.0), norm=nn.LayerNorm(8))


@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_like_one_before_is_checked_by_comparison(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that hangs on shapes, dtypes and torch's modes is found out once for calls that are alike in them, and anew for others."""
    model, plain = residual(), residual()
    epigen.fuse(model)
    seen = counted(monkeypatch, *CHECKS)

    def call(*inputs: Tensor) -> Counter[str]:
        seen.clear()
        with torch.set_grad_enabled(gradients):
            y = model(*inputs)
            found = Counter(seen)
            torch.testing.assert_close(y, plain(*inputs), rtol=1e-4, atol=1e-5)
        return found

    ways: dict[str, tuple[Tensor, ...]] = {
        "a shape": (drawn(2, 3, 8), drawn(2, 3, 8, seed=1)),
        "more rows": (drawn(2, 5, 8), drawn(2, 5, 8, seed=1)),
        "rows that lie apart": (drawn(2, 3, 16)[..., ::2], drawn(2, 3, 8, seed=1)),
        "its input again": (drawn(2, 3, 8),),
        "fewer dimensions": (drawn(8), drawn(8, seed=1)),
    }
    for _ in range(2):
        for name, inputs in ways.items():
            assert call(*inputs)["chain"] == 1, name
    for name, inputs in ways.items():
        assert not +call(*inputs), name
    if gradients:
        model.fc.weight.requires_grad_(False)
        assert [call(*ways["a shape"])["chain"] for _ in range(3)] == [1, 1, 0]
    else:
        with torch.inference_mode():
            assert [call(*ways["a shape"])["chain"] for _ in range(3)] == [1, 1, 0]
    with torch.autocast("cpu", torch.bfloat16):
        seen.clear()
        assert model(*ways["a shape"]).dtype == plain(*ways["a shape"]).dtype and seen["chain"] == 1


def test_a_chain_is_checked_once_and_has_no_nodes_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its backward goes past torch's dispatcher, and leading dimensions are none of autograd's business."""
    model, x = mlp(), drawn(2, 3, 8).requires_grad_()
    epigen.fuse(model)
    for _ in range(2):
        model(x).sum().backward()
    seen = counted(monkeypatch, *CHECKS)
    y = model(x)
    y.sum().backward()
    assert not +seen
    nodes = [y.grad_fn]
    for node in nodes:
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert [name for n in nodes if (name := type(n).__name__) != "AccumulateGrad"] == ["AgainBackward", "AgainBackward"]


FROZEN = ("", "0.weight", "0.bias", "0.weight 0.bias", "2.weight", "2.weight 2.bias", "0.weight 0.bias 2.weight", "0.weight 2.weight x")


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_written_out_has_the_gradients_that_are_wanted(frozen: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain with a residual beside it, whatever of it is frozen and whatever is asked for."""
    inner, x, y = mlp(), drawn(2, 3, 8), drawn(2, 3, 8, seed=1).requires_grad_()
    for name, p in inner.named_parameters():
        p.requires_grad_(name not in frozen.split())
    x.requires_grad_("x" not in frozen.split())
    model = Block(lambda s, x, y: s.last(s.act(s.first(x))) * 2 + y, first=inner[0], act=inner[1], last=inner[2])
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    rtol, atol = (5e-2, 5e-2) if autocast else (1e-4, 1e-5)

    def run(m: nn.Module, asked: slice) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = m(x, y)
        leaves = [t for t in (x, y, *m.parameters()) if t.requires_grad]
        return found, torch.autograd.grad(found.float().square().sum(), leaves[asked])

    for asked in (slice(None), slice(1), slice(1, 2), slice(-1, None)):
        for _ in range(3):
            torch.testing.assert_close(run(model, asked), run(plain, asked), rtol=rtol, atol=atol)
    seen = counted(monkeypatch, *CHECKS)
    run(model, slice(None))
    assert not +seen
    with pytest.raises(CallError, match="second derivative"):
        torch.autograd.grad(model(x, y).sum(), y if frozen else x, create_graph=True)


def test_whoever_watches_torchs_operations_sees_them() -> None:
    """A dispatch mode, a profile: also of calls like one before."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    x = drawn(3, 8)
    weight, bias = drawn(16, 8), drawn(16)
    expected = epigen.linear(x, weight, bias, "relu(mm + bias)")
    found: list[str] = []
    with Watching():
        torch.testing.assert_close(epigen.linear(x, weight, bias, "relu(mm + bias)"), expected)
    assert "epigen.program.default" in found
    model = mlp().requires_grad_(False)
    epigen.fuse(model)
    for _ in range(2):
        model(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        model(x)
    assert [e.count for e in profile.key_averages() if e.key == "epigen::program"] == [2]


# -- torch's other ways to run a model


def test_autocast(ran: list[str]) -> None:
    model, plain = mlp(), mlp()
    epigen.fuse(model)
    x = drawn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(x), plain(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(ran, model.requires_grad_(False)) == ["gelu(mm + bias)", "mm + bias"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """The second forward keeps what the first one did."""
    model, plain = nn.Sequential(mlp(), mlp()), nn.Sequential(mlp(), mlp())
    epigen.fuse(model)
    results = []
    for m in (model, plain):
        x = drawn(3, 8).requires_grad_()
        y = x
        for part in m:
            y = checkpoint(part, y, use_reentrant=reentrant)
        results.append((y, torch.autograd.grad(y.sum(), [x, *m.parameters()]) if not reentrant else _backward(y, x, m)))
    torch.testing.assert_close(*results)


def _backward(y: Tensor, x: Tensor, model: nn.Module) -> list[Tensor | None]:
    y.sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any], ran: list[str]) -> None:
    model = mlp()
    expected = model(drawn(3, 8)).detach()
    epigen.fuse(model)
    with mode():
        y = model(drawn(3, 8))
        assert calls(ran, model) == ["gelu(mm + bias)", "mm + bias"]
    assert not y.requires_grad and y.is_inference() == (mode is torch.inference_mode)
    torch.testing.assert_close(y, expected)


def test_torch_func_meta_and_fx() -> None:
    model, plain = mlp(), mlp()
    epigen.fuse(model)
    x = drawn(3, 8)
    torch.testing.assert_close(torch.func.vmap(model)(x), plain(x))
    torch.testing.assert_close(torch.func.jacrev(model)(x[0]), torch.func.jacrev(plain)(x[0]))
    state = {name: p * 2 for name, p in model.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(model, state, x), torch.func.functional_call(plain, state, x))
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), plain(x))
    assert copy.deepcopy(model).to("meta")(x.to("meta")).shape == (3, 8)


@pytest.mark.slow
def test_compiled_and_exported() -> None:
    """torch.compile and torch.export see the plain model; in a process of its own, for what they leave behind."""
    code = """
import torch, epigen
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
x = torch.randn(3, 8)
expected = model(x)
epigen.fuse(model)
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(x), expected)
compiled(x).sum().backward()
exported = torch.export.export(model, (x,))
assert not any("epigen" in str(n.target) for n in exported.graph.nodes), exported.graph
torch.testing.assert_close(exported.module()(x), expected)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_global_hooks_see_every_module() -> None:
    model, seen = mlp(), []
    epigen.fuse(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, _given, result: seen.append((module, type(result))))
    try:
        model(drawn(3, 8))
    finally:
        handle.remove()
    assert seen == [(m, Tensor) for m in [*model, model]]


def test_accelerate_moves_weights_in_and_out() -> None:
    """As its hooks do: weights are there for the time of a layer's own forward alone."""
    model, plain = mlp(), mlp()
    epigen.fuse(model)
    for layer in model:
        real = {n: p.detach().clone() for n, p in layer.named_parameters()}
        layer.to("meta")

        def forward(v: Tensor, layer: Any = layer, old: Any = layer.forward, real: Any = real) -> Tensor:
            for n, p in real.items():
                setattr(layer, n, nn.Parameter(p))
            result = old(v)
            for n, p in real.items():
                setattr(layer, n, nn.Parameter(p.to("meta")))
            return result

        layer.forward = forward
    with torch.no_grad():
        torch.testing.assert_close(model(drawn(3, 8)), plain(drawn(3, 8)))


def test_parametrised_weights_are_computed_once_a_forward() -> None:
    class Counted(nn.Module):
        count = 0

        def forward(self, w: Tensor) -> Tensor:
            Counted.count += 1
            return w * 2

    model, plain = mlp(), mlp()
    for m in (model, plain):
        parametrize.register_parametrization(m[0], "weight", Counted())
    epigen.fuse(model)
    Counted.count = 0
    model(drawn(3, 8))
    assert Counted.count == 1
    agree(model, plain, drawn(3, 8))


@pytest.mark.parametrize("kept", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["as it is", "copied", "pickled"])
def test_a_replica_of_data_parallel_runs_its_own_parameters(kept: Callable[[nn.Module], nn.Module]) -> None:
    """torch.nn.DataParallel copies a module's attributes and gives the copy other parameters."""
    fused = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    epigen.fuse(fused)
    model, x = kept(fused), drawn(3, 8)
    replica: Any = model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica._modules["0"] = nn.Linear(8, 8)
    for each in (model, replica):
        torch.testing.assert_close(each(x), torch.relu(each[0](x)))
    epigen.unfuse(model)
    assert not {"forward", "_replicate_for_data_parallel", "__prepare_scriptable__"} & set(vars(model))
