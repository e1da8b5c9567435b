"""`epigen.fuse` where a forward parts the columns of a layer's result, as gates do that are stacked on what they are multiplied with: one kernel of both parts."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from counting import counted
from fusing import Block, agree, drawn, fused
from golden import Golden
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import epigen
from epigen.errors import CallError
from epigen.training import chain, deferred, library, parted, plan
from epigen.training.fuse import Forward

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("one_thread")]


class Packed(nn.Module):
    """An MLP as Phi-3's, whose code is straight."""

    def __init__(self, bias: bool = True, columns: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(8, columns, bias=bias), nn.SiLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


SWIGLU = "right * silu(left)"


def both(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda parts: function(*parts)


gated = both(lambda g, u: u * F.silu(g))

WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "chunk": (lambda s, x: gated(s.up(x).chunk(2, dim=-1)), f"left, right = halves(mm + bias); {SWIGLU}"),
    "a function of torch's": (lambda s, x: gated(torch.chunk(s.up(x), 2, x.dim() - 1)), f"left, right = halves(mm + bias); {SWIGLU}"),
    "split": (lambda s, x: gated(s.up(x).split(8, -1)), f"left, right = halves(mm + bias); {SWIGLU}"),
    "split by sizes": (lambda s, x: gated(torch.split(s.up(x), [8, 8], dim=-1)), f"left, right = halves(mm + bias); {SWIGLU}"),
    "tensor_split": (lambda s, x: gated(s.up(x).tensor_split(2, dim=-1)), f"left, right = halves(mm + bias); {SWIGLU}"),
    "unbind": (lambda s, x: gated(s.up(x).unflatten(-1, (2, 8)).unbind(-2)), f"left, right = halves(mm + bias); {SWIGLU}"),
    "a view of two dimensions": (lambda s, x: (y := s.up(x).view(*x.shape[:-1], 2, 8), gated((y[..., 0, :], y[..., 1, :])))[-1], f"left, right = halves(mm + bias); {SWIGLU}"),
    "slices": (lambda s, x: (y := s.up(x), y[..., 8:] * F.silu(y[..., :8]))[-1], "left, right = halves(mm + bias); right * silu(left)"),
    "narrow": (lambda s, x: (y := s.up(x), gated((y.narrow(-1, 0, 8), y.narrow(-1, 8, 8))))[-1], f"left, right = halves(mm + bias); {SWIGLU}"),
    "the gate comes second": (lambda s, x: both(lambda u, g: u * F.gelu(g))(s.up(x).chunk(2, -1)), "left, right = halves(mm + bias); left * gelu(right)"),
    "glu": (lambda s, x: F.glu(s.up(x)), "left, right = halves(mm + bias); left * sigmoid(right)"),
    "glu, and more": (lambda s, x: F.glu(s.up(x), -1) * 2 + x, "left, right = halves(mm + bias); left * sigmoid(right) * 2 + x0[m,n]"),
    "in turn": (lambda s, x: (y := s.up(x), gated((y[..., ::2], y[..., 1::2])))[-1], f"left, right = pairs(mm + bias); {SWIGLU}"),
    "in turn, unbound": (lambda s, x: gated(s.up(x).unflatten(-1, (8, 2)).unbind(-1)), f"left, right = pairs(mm + bias); {SWIGLU}"),
    "as gpt-oss": (
        lambda s, x: (y := s.up(x), g := y[..., ::2].clamp(max=7.0), u := y[..., 1::2].clamp(min=-7.0, max=7.0), (u + 1) * (g * torch.sigmoid(g * 1.702)))[-1],
        "left, right = pairs(mm + bias); ",
    ),
    "arithmetic before": (lambda s, x: gated((s.up(x) * s.scale).tanh().chunk(2, -1)), f"left, right = halves(tanh((mm + bias) * x0[n])); {SWIGLU}"),
    "values used twice before": (
        lambda s, x: both(lambda g, u: F.softplus(g, beta=2) * F.softplus(u, beta=2))((y := s.up(x) * 2, (y * y.tanh()).chunk(2, -1))[-1]),
        "w = (mm + bias) * 2; left, right = halves(w * tanh(w)); ",
    ),
    "a tile before": (lambda s, x: gated((s.up(x) + torch.cat((x, x), -1)).chunk(2, -1)), f"left, right = halves(mm + bias + x0[m,n]); {SWIGLU}"),
    "a part used twice": (lambda s, x: both(lambda g, u: F.silu(g) * u + g)(s.up(x).chunk(2, -1)), "left, right = halves(mm + bias); silu(left) * right + left"),
    "tiles beside": (lambda s, x: gated(s.up(x).chunk(2, -1)) * x.detach() + x, f"left, right = halves(mm + bias); {SWIGLU} * x0[m,n] + x1[m,n]"),
    "in place, what is no view": (lambda s, x: both(lambda g, u: F.silu(g).mul_(u).add_(1))(s.up(x).chunk(2, -1)), "left, right = halves(mm + bias); silu(left) * right + 1"),
    "dropout that drops nothing": (lambda s, x: F.dropout(gated(s.up(x).chunk(2, -1)), 0.0), f"left, right = halves(mm + bias); {SWIGLU}"),
    "rows of another shape": (lambda s, x: gated(s.up(x).view(-1, 16).chunk(2, -1)).view(x.shape), f"left, right = halves(mm + bias); {SWIGLU}"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("size", [(3, 8), (2, 3, 8), (8,)], ids=str)
def test_a_view_that_parts_is_joined(name: str, size: tuple[int, ...], ran: list[str]) -> None:
    forward, program = WAYS[name]
    model = Block(lambda s, x, _: s.down(forward(s, x)), up=nn.Linear(8, 16), down=nn.Linear(8, 8))
    model.scale = nn.Parameter(drawn(16, seed=3))
    found = fused(model, drawn(*size))
    program = program if len(size) > 1 else program.replace("x0[n]", "x0[m,n]")  # which is a row as x is
    assert {r.name for r in found.replaced} == {"up", "down"} and found.replaced[0].epilogue.startswith(program), str(found)
    ran.clear()
    model.requires_grad_(False)(drawn(*size))
    assert any("dot(a, b_right[k,n])" in text for text in ran) and len(ran) == 2, ran


ALONE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "one part alone": (lambda s, x: F.silu(s.up(x)[..., :8]), "of its columns one part alone is taken"),
    "one of both": (lambda s, x: F.silu(s.up(x).chunk(2, -1)[1]), "chunk follows|of its columns"),
    "rows": (lambda s, x: gated(s.up(x).chunk(2, 0)), "chunk follows"),
    "four parts": (lambda s, x: (lambda a, b, c, d: (a * b * c * d).relu())(*s.up(x).chunk(4, -1)), "chunk follows"),
    "parts of two sizes": (lambda s, x: (lambda a, b: a.relu().sum() + b.relu().sum())(*s.up(x).split([4, 12], -1)), "split follows"),
    "parts in two ways": (lambda s, x: (y := s.up(x), y[..., ::2] * y[..., 8:].relu())[-1], "its result is used in|of its columns"),
    "a part of a part": (lambda s, x: (lambda g, u: g[..., :4].relu() * u[..., 4:])(*s.up(x).chunk(2, -1)), "."),
    "the whole besides": (lambda s, x: (y := s.up(x), gated(y.chunk(2, -1)) + y.mean())[-1], "its result is used in 2 places"),
    "all of it again": (lambda s, x: (y := s.up(x), gated(y.chunk(2, -1)) + F.silu(y)[..., 8:])[-1], "."),
    "not in the language": (lambda s, x: both(lambda g, u: g.softmax(-1) * u)(s.up(x).chunk(2, -1)), "softmax follows"),
    "a gradient cut": (lambda s, x: both(lambda g, u: g.detach() * u)(s.up(x).chunk(2, -1)), "."),
    "put together": (lambda s, x: torch.cat(s.up(x).chunk(2, -1)[::-1], -1), "cat follows"),
    "heads": (lambda s, x: s.up(x).view(*x.shape[:-1], 2, 8).transpose(-2, -3).relu(), "view follows, which no epilogue computes: it moves elements"),
    "by how it lies": (lambda s, x: gated((y := s.up(x), (y.as_strided((3, 8), (16, 1)), y.as_strided((3, 8), (16, 1), 8)))[-1]), "."),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_what_parts_in_another_way_is_left(name: str) -> None:
    forward, why = ALONE[name]
    model = Block(lambda s, x, _: forward(s, x), up=nn.Linear(8, 16))
    found = fused(model, drawn(3, 8) if name != "rows" else drawn(4, 8))
    assert not any("halves" in r.epilogue or "pairs" in r.epilogue for r in found.replaced)
    assert found.replaced or re.match(why, found.left[0].why), str(found)


@pytest.mark.parametrize(
    "parts", [lambda y: F.glu(y, 2), lambda y: gated(y.chunk(2, 2)), lambda y: gated((y[:, :, :8], y[:, :, 8:])), lambda y: F.glu(y, dim=-1)]
)
def test_a_dimension_by_its_number_is_the_last_one_or_not(parts: Callable[[Tensor], Tensor]) -> None:
    """As many dimensions as the input has."""
    model = Block(lambda s, x, _: parts(s.up(x)), up=nn.Linear(8, 16))
    plain = copy.deepcopy(model)
    assert epigen.fuse(model).replaced
    for size in ((2, 3, 8), (2, 3, 8), (2, 3, 16, 8), (2, 3, 16, 8), (2, 3, 8), (3, 2, 16, 8)):
        torch.testing.assert_close(model(drawn(*size)), plain(drawn(*size)), rtol=1e-5, atol=1e-6)


def test_an_odd_number_of_columns_is_parted_by_torch() -> None:
    model = Block(lambda s, x, _: both(lambda g, u: F.silu(g)[..., :3] * u)(s.up(x).chunk(2, -1)), up=nn.Linear(8, 7))
    assert not fused(model).replaced


# -- models


def timms(name: str, **options: Any) -> nn.Module:
    if package := zoo.missing("timm_vit"):
        pytest.skip(f"{package} is not installed")
    zoo.allow_torchvision()
    from timm.layers import mlp

    torch.manual_seed(0)
    module: nn.Module = getattr(mlp, name)(8, 16, **options)
    return module


@pytest.mark.parametrize(
    ("name", "options", "program"),
    [
        ("SwiGLUPacked", {}, "left, right = halves(mm + bias); silu(left) * right"),
        ("SwiGLUPacked", {"bias": False, "drop": 0.1}, "left, right = halves(mm); silu(left) * right"),
        ("GluMlp", {}, "left, right = halves(mm + bias); left * sigmoid(right)"),
        ("GluMlp", {"act_layer": nn.GELU, "gate_last": False}, "left, right = halves(mm + bias); gelu(left) * right"),
    ],
)
def test_the_mlps_of_timm(name: str, options: dict[str, Any], program: str) -> None:
    model = nn.Sequential(timms(name, **options)).eval()
    found = fused(model, drawn(2, 3, 8))
    assert {r.name: r.epilogue for r in epigen.fuse(model.eval()).replaced}["0.fc1"] == program, str(found)


def test_a_gated_mlp_of_convolutions(ran: list[str]) -> None:
    """Its parts are channels, which lie last in memory."""
    model = timms("GluMlp", use_conv=True).to(memory_format=torch.channels_last).eval()
    x = drawn(2, 8, 4, 5).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    assert epigen.fuse(model).replaced[0].epilogue == "left, right = halves(mm + bias); left * sigmoid(right)"
    agree(model, plain, x)
    y, expected = model.eval()(x), plain.eval()(x)
    assert y.stride() == expected.stride()
    ran.clear()
    with torch.no_grad():
        model(drawn(2, 8, 6, 5).to(memory_format=torch.channels_last))
    assert len(ran) == 1 and "dot(a, b_right[k,n])" in ran[0]


@pytest.mark.parametrize(
    ("name", "more", "program"),
    [
        ("Phi3", {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}, "right * silu(left)"),
        ("Glm", {"num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2}, "right * silu(left)"),
        ("Glm4", {"num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2}, "right * silu(left)"),
        ("ModernBert", {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}, "gelu(left) * right"),
    ],
)
def test_stacked_gates_of_models_that_people_have(name: str, more: dict[str, Any], program: str, ran: list[str]) -> None:
    """Results and gradients, in both modes; from the third call on the MLPs are one function each, whatever the length of the text."""
    if package := zoo.missing("llama"):
        pytest.skip(f"{package} is not installed")
    with zoo.quiet():
        transformers = zoo._transformers()
        sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes, **more)).eval()
    plain = copy.deepcopy(model)
    found = epigen.fuse(model)
    assert [r.epilogue for r in found.replaced if "halves" in r.epilogue] == [f"left, right = halves(mm); {program}"] * 2, str(found)
    for mode in (False, True) * 3:
        results = []
        for m in (model.train(mode), plain.train(mode)):
            torch.manual_seed(0)
            y = m(input_ids=zoo._tokens())[0]
            results.append((y, torch.autograd.grad(zoo.scalar(y), list(m.parameters()), allow_unused=True)))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        for length in (6, 6, 6, 3, 5, 4):
            ran.clear()
            y = model.eval()(input_ids=zoo._tokens(length))[0]
            assert sum("dot(a, b_right[k,n])" in text for text in ran) == 2
            torch.testing.assert_close(y, plain.eval()(input_ids=zoo._tokens(length))[0], rtol=1e-3, atol=1e-5)
    mlps = [layer.forward for layer in found.layers if layer.forward is not None and "mlp" in layer.owner]
    assert all(not mlp.known.bent and not mlp.known.deviations and mlp.known.flats for mlp in mlps)


# -- what a forward does with its parts


def kept(s: Any, *values: Any) -> None:
    s.kept = values


ESCAPES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a part is returned": lambda s, x: both(lambda g, u: (u * F.silu(g), g))(s.up(x).chunk(2, -1)),
    "both are returned": lambda s, x: (parts := s.up(x).chunk(2, -1), (gated(parts), *parts))[-1],
    "a part is kept": lambda s, x: (parts := s.up(x).chunk(2, -1), kept(s, parts[0]), gated(parts))[-1],
    "both are kept": lambda s, x: (parts := s.up(x).chunk(2, -1), kept(s, *parts), gated(parts))[-1],
    "the whole is kept": lambda s, x: (y := s.up(x), kept(s, y), gated(y.chunk(2, -1)))[-1],
    "a part is used again": lambda s, x: both(lambda g, u: u * F.silu(g) + F.layer_norm(g, (8,)))(s.up(x).chunk(2, -1)),
    "the whole is used again": lambda s, x: (y := s.up(x), gated(y.chunk(2, -1)) + F.layer_norm(y, (16,))[..., :8])[-1],
    "a part is changed": lambda s, x: (y := s.up(x), g := y[..., :8], g.mul_(2), gated((g, y[..., 8:])))[-1],
    "a part is changed, and the whole parted again": lambda s, x: (y := s.up(x), y[..., :8].mul_(2), gated((y[..., :8], y[..., 8:])))[-1],
    "the other part is changed": lambda s, x: (y := s.up(x), g := F.silu(y[..., :8]), u := y[..., 8:], u.add_(1), g * u)[-1],
    "the whole is changed": lambda s, x: (y := s.up(x), g := y[..., :8], u := y[..., 8:], y.mul_(2), gated((g, u)))[-1],
    "the whole of several parts is changed": lambda s, x: (y := s.up(x), parts := y.chunk(2, -1), z := gated(parts), y.mul_(2), z)[-1],
    "a part is set": lambda s, x: (y := s.up(x), y.__setitem__((..., slice(0, 8)), 0.5), gated(y.chunk(2, -1)))[-1],
    "its value is read": lambda s, x: both(lambda g, u: u * F.silu(g) * float(g.detach().sum() > 0))(s.up(x).chunk(2, -1)),
    "its hook is set": lambda s, x: both(lambda g, u: (g.register_hook(lambda d: d * 2) if g.requires_grad else None, u * F.silu(g))[-1])(s.up(x).chunk(2, -1)),
    "it is asked how it is made": lambda s, x: both(lambda g, u: u * F.silu(g.contiguous()) * (g.is_contiguous() + g.stride(0) + g.storage_offset()))(s.up(x).chunk(2, -1)),
    "what is the result is changed": lambda s, x: gated(s.up(x).chunk(2, -1)).mul_(3),
    "a flag's, parts in turn": lambda s, x: (y := s.up(x), gated((y[..., ::2], y[..., 1::2]) if s.flag else (y[..., :8], y[..., 8:])))[-1],
    "a flag's, parts changed about": lambda s, x: both(lambda g, u: F.silu(u) * g if s.flag else F.silu(g) * u)(s.up(x).chunk(2, -1)),
    "a flag's, a part besides": lambda s, x: both(lambda g, u: u * F.silu(g) + (g.sum() if s.flag else 0))(s.up(x).chunk(2, -1)),
    "a flag's, a part changed": lambda s, x: (y := s.up(x), g := y[..., :8], s.flag and g.mul_(2), gated((g, y[..., 8:])))[-1],
    "a flag's, the whole changed": lambda s, x: (y := s.up(x), g := y[..., :8], s.flag and y.mul_(2), gated((g, y[..., 8:])))[-1],
    "a flag's, a part changed when all is computed": lambda s, x: (y := s.up(x), g := y[..., :8], z := F.layer_norm(gated((g, y[..., 8:])), (8,)), s.flag and g.mul_(2), z + (g if s.flag else 0))[-1],
    "a flag's, one part alone": lambda s, x: (y := s.up(x), F.silu(y[..., :8]) * (1.0 if s.flag else y[..., 8:]))[-1],
    "a flag's, its input changed when all is computed": lambda s, x: (x := x * 1, y := s.up(x), g := y[..., :8], z := F.layer_norm(gated((g, y[..., 8:])), (8,)), s.flag and x.detach().zero_(), z + (g if s.flag else 0))[-1],
}  # fmt: skip


NO_BACKWARD = (
    "the other part is changed",
    "the whole of several parts is changed",
    "a flag's, a part changed when all is computed",
    "a flag's, its input changed when all is computed",
)
"""For which torch has none: what it would need was changed."""


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", ESCAPES)
def test_parts_that_are_used_otherwise(name: str, gradients: bool) -> None:
    """However much of it is fused, the same comes out, and the same is kept."""
    model = Block(lambda s, x, _: ESCAPES[name](s, x), up=nn.Linear(8, 16), flag=False, kept=())
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    gradients = gradients and name not in NO_BACKWARD
    for flag in (False, False, False, True, True, True, False, True):
        results = []
        for m in (model, plain):
            m.flag = flag
            given = drawn(3, 8, seed=2).requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                y = m(given)
            values = [*(y if isinstance(y, tuple) else (y,)), *m.kept]
            assert all(type(v) is Tensor for v in values)
            wanted = [given, *m.parameters()]
            results.append((values, torch.autograd.grad(sum(v.square().sum() for v in values), wanted) if gradients else None))  # type: ignore[arg-type]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_parts_of_a_part_that_is_a_view_of_several_are_not_changed_in_place() -> None:
    """As torch has it: the error is torch's own."""

    def forward(s: Any, x: Tensor, _: Any) -> Tensor:
        g, u = s.up(x).chunk(2, -1)
        return u * F.silu(g.mul_(2) if s.flag else g)

    model = Block(forward, up=nn.Linear(8, 16), flag=False)
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    model(drawn(3, 8))
    for m in (model, plain):
        m.flag = True
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            m(drawn(3, 8))
        with torch.no_grad():
            m.found = m(drawn(3, 8))
    torch.testing.assert_close(model.found, plain.found)


def test_what_an_error_leaves_behind_is_a_tensor() -> None:
    def forward(s: Any, x: Tensor, _: Any) -> Tensor:
        s.kept = s.up(x).chunk(2, -1)
        if s.flag:
            raise ValueError("in between")
        return gated(s.kept)

    model = Block(forward, up=nn.Linear(8, 16), flag=False, kept=())
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    model(drawn(3, 8))
    for m in (model, plain):
        m.flag = True
        with pytest.raises(ValueError, match="in between"):
            m(drawn(3, 8))
    torch.testing.assert_close([p + 1 for p in model.kept], [p + 1 for p in plain.kept])


# -- what is done to the model, and around it

LATER: dict[str, Callable[[Any], Any]] = {
    "another weight": lambda m: setattr(m.up, "weight", nn.Parameter(drawn(16, 8, seed=5))),
    "no bias": lambda m: setattr(m.up, "bias", None),
    "frozen": lambda m: m.up.requires_grad_(False),
    "the bias frozen": lambda m: m.up.bias.requires_grad_(False),
    "a hook": lambda m: m.up.register_forward_hook(lambda _m, _x, y: y * 2),
    "a hook of the activation": lambda m: m.act.register_forward_hook(lambda _m, _x, y: y * 2),
    "a hook of a gradient": lambda m: m.up.weight.register_hook(lambda g: g * 2),
    "another activation": lambda m: setattr(m, "act", nn.Tanh()),
    "a norm of the weight": lambda m: parametrizations.weight_norm(m.up),
    "wider": lambda m: (setattr(m, "up", nn.Linear(8, 20)), setattr(m, "down", nn.Linear(10, 8))),
    "twice the layer": lambda m: setattr(m, "up", nn.Sequential(m.up, nn.Identity())),
    "in fp64": lambda m: m.double(),
}  # fmt: skip


@pytest.mark.parametrize("called", [0, 1, 3], ids=["before the first call", "after it", "once its code is written out"])
@pytest.mark.parametrize("name", LATER)
def test_what_is_done_to_a_model_with_stacked_gates_is_done(name: str, called: int) -> None:
    model = Packed()
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    for _ in range(called):
        model(drawn(3, 8).requires_grad_()).sum().backward()
    model.zero_grad()
    for m in (model, plain):
        torch.manual_seed(7)
        LATER[name](m)
    agree(model, plain, drawn(3, 8).to(plain.down.weight.dtype))


def test_a_weight_of_another_width_is_parted_by_torch() -> None:
    """Of an odd number of columns the parts are not alike, and of slices by numbers another one is no half."""
    model = Block(lambda s, x, _: both(lambda g, u: u * F.silu(g)[..., : u.shape[-1]])(s.up(x).chunk(2, -1)), up=nn.Linear(8, 16))
    sliced = Block(lambda s, x, _: (y := s.up(x), F.silu(y[..., :8]) * y[..., 8:16])[-1], up=nn.Linear(8, 16))
    for m in (model, sliced):
        plain = copy.deepcopy(m)
        epigen.fuse(m)
        for columns in (16, 16, 16, 18, 17, 20, 16):
            for each in (m, plain):
                each.up.weight, each.up.bias = nn.Parameter(drawn(columns, 8)), nn.Parameter(drawn(columns, seed=1))
            torch.testing.assert_close(m(drawn(3, 8)), plain(drawn(3, 8)), rtol=1e-5, atol=1e-6)


FROZEN = ("", "up.weight", "up.bias", "up.weight up.bias", "down.weight", "up.weight up.bias down.weight down.bias", "x", "up.weight x")
CHECKS = ((Forward, "key"), (deferred, "fits"), (deferred, "viewed"), (chain, "chain"), (parted, "apart"), (plan, "steps"), (library, "below_autograd"))


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_that_are_wanted_of_what_is_written_out(frozen: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Packed(), drawn(2, 3, 8).requires_grad_("x" not in frozen.split())
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen.split())
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    rtol, atol = (5e-2, 5e-2) if autocast else (1e-4, 1e-5)

    def run(m: nn.Module, asked: slice) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = m(x)
        leaves = [t for t in (x, *m.parameters()) if t.requires_grad]
        return y, torch.autograd.grad(y.float().square().sum(), leaves[asked])

    for asked in (slice(None), slice(1), slice(-1, None)):
        for _ in range(3):
            torch.testing.assert_close(run(model, asked), run(plain, asked), rtol=rtol, atol=atol)
    seen = counted(monkeypatch, *CHECKS)
    run(model, slice(None))
    assert not +seen
    with pytest.raises(CallError, match="second derivative"):
        torch.autograd.grad(model(x).sum(), [t for t in (x, *model.parameters()) if t.requires_grad][:1], create_graph=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any], ran: list[str]) -> None:
    model = Packed()
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    for size in ((3, 8), (3, 8), (3, 8), (2, 5, 8), (1, 8), (8,), (4, 8)):
        with mode():
            ran.clear()
            torch.testing.assert_close(model(drawn(*size)), plain(drawn(*size)), rtol=1e-5, atol=1e-6)
            assert len(ran) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool) -> None:
    model = Packed()
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    for _ in range(3):
        results = []
        for m in (model, plain):
            m.zero_grad()
            x = drawn(3, 8).requires_grad_()
            y = checkpoint(m, x, use_reentrant=reentrant)
            y.square().sum().backward()
            results.append((y, x.grad, [p.grad for p in m.parameters()]))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_gated_model_is_trained() -> None:
    models = [Packed(), Packed()]
    epigen.fuse(models[0])
    losses = []
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses.append([])
        for step in range(6):
            optimizer.zero_grad()
            loss = (model(drawn(4, 8, seed=step)) - drawn(4, 8, seed=9)).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-3, atol=1e-5)


def test_a_report_of_stacked_gates(golden: Golden) -> None:
    model = Block(
        lambda s, x, _: SimpleNamespace(a=F.glu(s.glu(x)), b=gated(s.gates(x).chunk(2, -1)), c=F.silu(s.part(x)[..., :8]), d=s.three(x).chunk(3, -1)),
        glu=nn.Linear(8, 16), gates=nn.Linear(8, 16, bias=False), part=nn.Linear(8, 16), three=nn.Linear(8, 24),
    )  # fmt: skip
    golden(str(epigen.fuse(model)))
