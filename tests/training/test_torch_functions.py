"""Torch functions as epilogues, in a process of their own: tracing imports Triton."""

from __future__ import annotations

import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from golden import Golden
from torch import Tensor, nn
from under_torch import APART

import epigen
from epigen.errors import CallError
from epigen.training import functions, traced

pytestmark = APART

K, N = 16, 8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry a trace."""
    made: list[Any] = []
    own = traced.trace

    def noted(*args: Any, **kwargs: Any) -> traced.Traced:
        found = own(*args, **kwargs)
        made.append(found.program.text)
        return found

    monkeypatch.setattr(traced, "trace", noted)
    return made


def close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and found.dtype == wanted.dtype and torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


def gelu_gate(mm: Tensor, bias: Tensor, gate: Tensor, scale: float = 2.0) -> Tensor:
    return F.gelu(mm + bias) * gate * scale


# -- epigen.compile(function)


def test_a_function_is_a_kernel_of_the_text_that_it_is(golden: Golden) -> None:
    a, b, bias = torch.randn(6, K), torch.randn(K, N), torch.randn(N)
    kernel = epigen.compile(lambda mm, bias: torch.relu(mm + bias))
    with golden.raises(CallError):
        _ = kernel.program
    assert close(kernel(a, b, bias=bias), torch.relu(a @ b + bias))
    assert kernel.program == "relu(mm + bias)"
    assert kernel.kernel.source(shape=(512, 256, 128)) == epigen.compile("relu(mm+bias)").source(shape=(512, 256, 128))


@pytest.mark.parametrize("lead", [(6,), (2, 3), (), (1,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("shape", [(N,), (1, N), (3, N), (3, 1), (1,), (), (2, 3, N), (2, 3, 1), (2, 1, 1)], ids=str)
def test_inputs_broadcast_as_in_torch(lead: tuple[int, ...], shape: tuple[int, ...]) -> None:
    def function(mm: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(mm * x) + x

    a, b, x = torch.randn(*lead, K), torch.randn(K, N), torch.randn(shape)
    try:
        larger = torch.broadcast_shapes(shape, (*lead, N)) != (*lead, N)
    except RuntimeError:
        larger = True
    if larger:
        with pytest.raises(CallError):
            epigen.compile(function)(a, b, x=x)
        return
    assert close(epigen.compile(function)(a, b, x=x), function(a @ b, x))
    assert close(epigen.compile(function).over(a @ b, x=x), function(a @ b, x))


def test_results_come_as_the_function_returns_them() -> None:
    def function(mm: Tensor, bias: Tensor) -> dict[str, Any]:
        z = mm + bias
        return {"y": z, "more": (z.sum(-1, keepdim=True), [z.flatten(0, 1).sum(0), z.amax()]), "half": z.to(torch.float16)}

    a, b, bias = torch.randn(2, 3, K), torch.randn(K, N), torch.randn(N)
    found, wanted = epigen.compile(function)(a, b, bias=bias), function(a @ b, bias)
    assert list(found) == list(wanted) and isinstance(found["more"], tuple) and isinstance(found["more"][1], list)
    row, (column, largest) = found["more"]
    assert close(found["y"], wanted["y"]) and close(row, wanted["more"][0]) and close(column, wanted["more"][1][0]) and close(largest, wanted["more"][1][1])
    assert found["half"].dtype == torch.float16 and torch.allclose(found["half"], wanted["half"], atol=1e-2)
    found["y"] += 1  # ordinary tensors


def test_numbers_are_inputs_where_torch_takes_tensors(traces: list[str]) -> None:
    a, b, bias, gate = torch.randn(6, K), torch.randn(K, N), torch.randn(N), torch.randn(6, N)
    kernel = epigen.compile(gelu_gate)
    for scale in (1.0, 2.0, 3.0):
        assert close(kernel(a, b, bias=bias, gate=gate, scale=scale), gelu_gate(a @ b, bias, gate, scale))
    assert traces == ["gelu(mm + bias) * gate[m,n] * scale_1"]
    assert close(kernel(a, b, bias=bias, gate=gate), gelu_gate(a @ b, bias, gate))  # its default is a constant
    slope = epigen.compile(lambda mm, slope: F.leaky_relu(mm, slope))
    for value in (0.1, 0.2, 0.1):
        assert close(slope(a, b, slope=value), F.leaky_relu(a @ b, value))
    assert traces[2:] == ["leaky_relu(mm, 0.1)", "leaky_relu(mm, 0.2)"]


def test_a_function_is_traced_once_for_calls_alike(traces: list[str]) -> None:
    kernel = epigen.compile(gelu_gate)
    b, bias = torch.randn(K, N), torch.randn(N)
    for m in (4, 5, 4, 5):
        a, gate = torch.randn(m, K), torch.randn(m, N)
        kernel(a, b, bias=bias, gate=gate)
        one = kernel.kernel
    assert len(traces) == 2
    kernel(torch.randn(7, K), b, bias=bias, gate=torch.randn(7, N))
    assert kernel.kernel is one  # the same program has one kernel


def test_pickled() -> None:
    kernel = pickle.loads(pickle.dumps(epigen.compile(gelu_gate, precision="ieee")))
    a, b, bias, gate = torch.randn(6, K), torch.randn(K, N), torch.randn(N), torch.randn(6, N)
    assert close(kernel(a, b, bias=bias, gate=gate), gelu_gate(a @ b, bias, gate))


def test_names_that_the_language_has_for_itself() -> None:
    def function(mm: Tensor, relu: Tensor, n: Tensor, sum: float, where_1: Tensor, where: float) -> Tensor:  # noqa: A002
        return (mm + relu) * n * sum + where_1 * where

    a, b = torch.randn(6, K), torch.randn(K, N)
    given: dict[str, Any] = {"relu": torch.randn(N), "n": torch.randn(6, 1), "sum": 3.0, "where_1": torch.randn(N), "where": 5.0}
    kernel = epigen.compile(function)
    assert close(kernel(a, b, **given), function(a @ b, **given))
    assert kernel.program == "(mm + relu_1[n]) * n_1[m] * sum_1 + where_1[n] * where_2"


# -- what a function reads besides its arguments


SCALE = 1.0


def by_a_global(mm: Tensor) -> Tensor:
    return mm * SCALE


def by_another(mm: Tensor) -> Tensor:
    return by_a_global(mm).relu()


def test_what_a_function_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(6, K), torch.randn(N, K)
    held = {"scale": 1.0}
    tint = torch.ones(N)

    def by_a_closure(mm: Tensor) -> Tensor:
        return mm * held["scale"]

    def by_a_tensor(mm: Tensor) -> Tensor:
        return mm * tint

    class ByAnAttribute(nn.Module):
        scale = 1.0

        def forward(self, mm: Tensor) -> Tensor:
            return mm * self.scale

    class Holder:
        def method(self, mm: Tensor) -> Tensor:
            return mm * held["scale"]

    module = ByAnAttribute()
    holder = Holder()
    several: list[Callable[..., Any]] = [by_a_global, by_another, by_a_closure, by_a_tensor, module, functools.partial(torch.mul, other=2.0), holder.method]
    first = [epigen.linear(x, weight, epilogue=f) for f in several]
    assert all(close(y, f(F.linear(x, weight))) for y, f in zip(first, several, strict=True))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    held["scale"], module.scale, tint = 5.0, 7.0, torch.full((N,), 9.0)
    for f in several:
        assert close(epigen.linear(x, weight, epilogue=f), f(F.linear(x, weight))), f


class Owner:
    """Whose method reads of it what is its own, its class's, and what another method reads; slope lies in a slot."""

    __slots__ = ("__dict__", "__weakref__", "slope")
    gain = 1.0

    def __init__(self) -> None:
        self.slope, self.scale, self.others = 0.5, 2.0, [0] * 10

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    @staticmethod
    def act(mm: Tensor) -> Tensor:
        return torch.tanh(mm)

    def leaky(self, mm: Tensor) -> Tensor:
        return F.leaky_relu(mm, self.slope)

    def method(self, mm: Tensor) -> Tensor:
        return self.act(self.leaky(mm) * self.gain) + self.doubled

    def __call__(self, mm: Tensor) -> Tensor:
        return self.leaky(mm) * self.gain + self.doubled


class OwnerModule(nn.Module):
    gain = 1.0

    def helped(self, mm: Tensor) -> Tensor:
        return mm * self.gain

    def forward(self, mm: Tensor) -> Tensor:
        return torch.relu(self.helped(mm))


def plus_one(self: Any, mm: Tensor) -> Tensor:  # noqa: ARG001
    return mm + 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda owner, _module, _mp: setattr(owner, "scale", 3.0),
        lambda owner, _module, _mp: setattr(owner, "slope", 0.25),
        lambda _owner, _module, mp: [mp.setattr(c, "gain", 4.0) for c in (Owner, OwnerModule)],
        lambda _owner, _module, mp: [mp.setattr(c, name, plus_one) for c, name in ((Owner, "leaky"), (OwnerModule, "helped"))],
        lambda _owner, _module, mp: [mp.setattr(f, "__code__", plus_one.__code__) for f in (Owner.leaky, OwnerModule.helped)],
        lambda _owner, _module, mp: [mp.setattr(f, "__code__", plus_one.__code__) for f in (Owner.method, Owner.__call__, OwnerModule.forward)],
        lambda _owner, _module, mp: mp.setattr(OwnerModule, "forward", plus_one),
        lambda _owner, _module, mp: mp.setattr(Owner, "act", staticmethod(torch.sin)),
    ],
    ids=["an attribute", "a slot", "a class's attribute", "another method", "another method's code", "its code", "a forward", "a static method"],
)  # fmt: skip
def test_what_a_method_reads_of_its_owner_may_change(change: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, module, x, weight = Owner(), OwnerModule(), torch.randn(6, K), torch.randn(N, K)
    kernels = [epigen.compile(f) for f in (owner.method, owner, module)]
    for changed in (False, True):
        if changed:
            change(owner, module, monkeypatch)
        for f, kernel in zip((owner.method, owner, module), kernels, strict=True):
            expected = f(F.linear(x, weight))
            assert close(epigen.linear(x, weight, epilogue=f), expected) and close(kernel(x, weight.t()), expected), f


def test_other_attributes_of_an_owner_are_not_looked_at(traces: list[str]) -> None:
    owner, x, weight = Owner(), torch.randn(6, K), torch.randn(N, K)
    epigen.linear(x, weight, epilogue=owner.method)
    before = len(traces)
    owner.others.append(1)
    owner.more = 1  # type: ignore[attr-defined]
    epigen.linear(x, weight, epilogue=owner.method)
    assert len(traces) == before


def test_a_modules_mode_is_looked_at(golden: Golden) -> None:
    module = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    x, weight = torch.randn(6, K), torch.randn(N, K)
    assert close(epigen.linear(x, weight, epilogue=module.eval()), F.gelu(F.linear(x, weight)))
    with golden.raises(CallError):
        epigen.linear(x, weight, epilogue=module.train())


def test_nothing_is_kept_of_a_function_that_is_gone() -> None:
    module = nn.PReLU(1)
    gone = weakref.ref(module.weight)
    epigen.linear(torch.randn(6, K), torch.randn(N, K), epilogue=module)
    del module
    gc.collect()
    assert gone() is None


def test_a_function_that_is_made_anew_is_traced_once(traces: list[str]) -> None:
    """It is the code, and what it reads, that is compared."""
    x, weight, gate = torch.randn(6, K), torch.randn(N, K), torch.randn(6, N)
    before = len(traces)

    def layer(scale: float, power: int = 1) -> Tensor:
        result: Tensor = epigen.linear(x, weight, None, lambda mm, gate, by=power: (F.silu(mm) * gate * scale) ** by, gate=gate)
        return result

    for scale, power, new in ((2.0, 1, 1), (2.0, 1, 1), (3.0, 1, 2), (2.0, 2, 3), (2.0, 1, 3), (3.0, 1, 3)):
        assert close(layer(scale, power), (F.silu(F.linear(x, weight)) * gate * scale) ** power)
        assert len(traces) == before + new


def test_what_a_function_that_is_made_anew_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(6, K), torch.randn(N, K)
    settings, module = types.SimpleNamespace(scale=1.0), types.ModuleType("settings")
    module.scale, module.inner = 1.0, types.ModuleType("inner")  # type: ignore[attr-defined]
    module.inner.shift = 0.0  # type: ignore[attr-defined]
    monkeypatch.setitem(globals(), "settings_module", module)

    def wrapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def inside(*given: Any, **more: Any) -> Tensor:
            return function(*given, **more)

        return inside

    def the_same(mm: Tensor) -> Tensor:
        result: Tensor = mm + settings_module.inner.shift  # type: ignore[name-defined]  # noqa: F821
        return result

    for scale in (1.0, 2.0, 3.0):
        monkeypatch.setattr(torch, "table_of_a_user", torch.full((N,), scale), raising=False)
        settings.scale, module.scale, module.inner.shift = scale, scale, scale  # type: ignore[attr-defined]
        table = torch.full((N,), scale)
        functions: dict[str, tuple[Callable[..., Tensor], dict[str, Any], Tensor]] = {
            "an object's": (lambda mm: mm * settings.scale, {}, F.linear(x, weight) * scale),
            "a module's": (lambda mm: mm * settings_module.scale, {}, F.linear(x, weight) * scale),  # type: ignore[name-defined]  # noqa: F821
            "an inner module's": (lambda mm: mm + settings_module.inner.shift, {}, F.linear(x, weight) + scale),  # type: ignore[name-defined]  # noqa: F821
            "the same function": (the_same, {}, F.linear(x, weight) + scale),
            "a tensor where none is looked for": (lambda mm: mm * torch.table_of_a_user, {}, F.linear(x, weight) * scale),  # type: ignore[attr-defined]
            "a tensor": (lambda mm: mm * table, {}, F.linear(x, weight) * scale),  # noqa: B023  # it is called within the loop
            "of one name": (wrapped(lambda mm, a: mm + a), {"a": table}, F.linear(x, weight) + scale),
            "of another": (wrapped(lambda mm, b: mm * b), {"b": table}, F.linear(x, weight) * scale),
        }
        for name, (function, inputs, expected) in functions.items():
            assert close(epigen.linear(x, weight, None, function, **inputs), expected), name


def test_nothing_is_kept_of_what_a_function_that_is_made_anew_has_read() -> None:
    x, weight, gone = torch.randn(6, K), torch.randn(N, K), []
    for _ in range(3):
        table = torch.randn(N)
        gone.append(weakref.ref(table))
        epigen.linear(x, weight, None, lambda mm, held=table: mm * held)
        del table
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


# -- epigen.linear


def test_a_linear_layer_trains_through_a_function() -> None:
    def run(linear: Callable[..., Tensor], act: nn.Module, given: list[Tensor]) -> list[Tensor]:
        x, weight, bias, gate = (t.clone().requires_grad_() for t in given)
        y = linear(x, weight, bias, act, gate)
        y.square().sum().backward()
        return [y, *(t.grad for t in (x, weight, bias, gate)), *(p.grad for p in act.parameters())]  # type: ignore[list-item]

    class Act(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.PReLU(1)
            self.register_buffer("shift", torch.full((N,), 0.1))

        def forward(self, mm: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
            return self.inner(mm + bias) * torch.sigmoid(gate) + self.shift  # type: ignore[operator]

    given = [torch.randn(*shape) for shape in ((2, 3, K), (N, K), (N,), (3, 1))]
    found = run(lambda x, w, bias, act, gate: epigen.linear(x, w, bias, act, gate=gate), Act(), given)
    wanted = run(lambda x, w, bias, act, gate: act(F.linear(x, w), bias, gate), Act(), given)
    assert len(found) == 6 and all(map(close, found, wanted))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch's own forward-mode derivatives
def test_where_torch_derives_or_traces_itself() -> None:
    x, weight, gate = torch.randn(6, K), torch.randn(N, K), torch.randn(6, N)

    def layer(x: Tensor) -> Any:
        return epigen.linear(x, weight, None, lambda mm, gate: F.silu(mm) * gate, gate=gate)

    def wanted(x: Tensor) -> Tensor:
        return F.silu(F.linear(x, weight)) * gate

    assert close(torch.compile(layer, backend="eager", fullgraph=True)(x), wanted(x))
    assert close(torch.func.jvp(layer, (x,), (x,))[1], torch.func.jvp(wanted, (x,), (x,))[1])
    assert close(torch.func.grad(lambda x: layer(x).sum())(x), torch.func.grad(lambda x: wanted(x).sum())(x))
    assert close(torch.func.vmap(lambda row: epigen.linear(row, weight, epilogue=torch.relu))(x), F.linear(x, weight).relu())


def test_torch_fx_writes_down_what_a_function_calls() -> None:
    """Of layers, chains and kernels; a text beside a function stays one node."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(epigen.nn.MLP([K, N, N], F.gelu), epigen.nn.Linear(N, N, epilogue=lambda mm, bias: F.mish(mm + bias)))
            self.text = epigen.nn.Linear(N, N, epilogue="relu(mm + bias)")
            self.kernel = epigen.compile(lambda mm, gate: F.silu(mm) * gate)

        def forward(self, x: Tensor, w: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
            y = self.text(self.layers(x))
            return y, epigen.linear(y, w, epilogue=torch.tanh), self.kernel(y, w, gate=gate), self.kernel.over(y, gate=gate)

    model, given = Calls(), (torch.randn(6, K), torch.randn(N, N), torch.randn(N))
    traced = torch.fx.symbolic_trace(model)
    called = [getattr(n.target, "__name__", "") for n in traced.graph.nodes if n.op == "call_function"]
    assert called.count("chain") == 2 and {"gelu", "mish", "tanh", "silu"} <= {*called}
    with torch.no_grad():
        torch.testing.assert_close(traced(*given), model(*given))


def test_a_kernel_of_a_function_says_what_torch_func_needs() -> None:
    """Before the function is traced, which cannot be with such tensors."""
    kernel, w = epigen.compile(lambda mm: F.gelu(mm)), torch.randn(K, N)
    for call in (lambda x: kernel(x, w).sum(), lambda x: kernel.over(x).sum()):
        with pytest.raises(CallError, match=r"use epigen\.linear"):
            torch.func.grad(call)(torch.randn(6, K))


def test_in_place_on_the_product_is_a_new_value() -> None:
    x, weight = torch.randn(6, K), torch.randn(N, K)
    assert close(epigen.linear(x, weight, epilogue=nn.ReLU(inplace=True)), F.linear(x, weight).relu())
    assert close(epigen.linear(x, weight, epilogue=lambda mm: mm.add_(1).mul_(2)), (F.linear(x, weight) + 1) * 2)


# -- modules


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (F.silu, F.silu),
        (nn.GELU("tanh"), nn.GELU("tanh")),
        (nn.PReLU(1), nn.PReLU(1)),
        (lambda mm, bias: F.softplus(mm - bias), None),
    ],
    ids=["a function", "a module", "a module with a parameter", "a function of the bias"],
)
def test_a_layer_with_a_function(function: Any, plain: Any) -> None:
    layer = epigen.nn.Linear(K, N, epilogue=function)
    x = torch.randn(2, 3, K)
    wanted = nn.Linear(K, N)
    wanted.load_state_dict({name: layer.state_dict()[name] for name in ("weight", "bias")})
    y = F.softplus(F.linear(x, wanted.weight) - wanted.bias) if plain is None else plain(wanted(x))
    y.square().sum().backward()
    of_plain = list(plain.parameters()) if isinstance(plain, nn.Module) else []
    found = trained(layer, x)
    assert len(found) == 3 + len(of_plain) and all(map(close, found, [y, *(p.grad for p in (wanted.weight, wanted.bias, *of_plain))]))
    assert "epilogue=silu" in repr(layer) if function is F.silu else "Linear" in repr(layer)
    assert close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_a_perceptron_with_a_function() -> None:
    model = epigen.nn.MLP([K, 24, 24, N], activation=F.silu)
    plain = nn.Sequential(nn.Linear(K, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, N))
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    x = torch.randn(6, K)
    assert all(map(close, trained(model, x), trained(plain, x)))


def test_a_bias_that_the_function_takes_is_asked_for(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.nn.Linear(K, N, bias=False, epilogue=lambda mm, bias: mm + bias)
    x, weight, bias = torch.randn(6, K), torch.randn(N, K), torch.randn(N)
    assert close(epigen.linear(x, weight, bias, F.gelu), F.gelu(F.linear(x, weight, bias)))


# -- what is refused, and how


def widens(mm: Tensor, gate: Tensor) -> Tensor:
    return mm * gate


def asks(mm: Tensor) -> Tensor:
    if mm.requires_grad:
        mm.register_hook(lambda g: 2 * g)
    return mm * 2


def changes_what_is_not_recorded(mm: Tensor) -> Tensor:
    z = mm * 2
    with torch.no_grad():
        z.clamp_(min=0)
    return z


def branches(mm: Tensor, g: Tensor) -> Tensor:
    if g.sum() > 0:
        return mm
    return -mm


class _Straight(torch.autograd.Function):
    """With a derivative of its own, of which its operations do not tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


class _Tripled(torch.autograd.Function):
    """The same in torch's newer way."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return 3 * grad


def changes_its_input(mm: Tensor, g: Tensor) -> Tensor:
    g.add_(1)
    return mm * g


@pytest.mark.parametrize(
    ("function", "inputs", "name"),
    [
        (lambda mm: torch.cumsum(mm, 0), {}, "cumsum"),
        (lambda mm: mm[0], {}, "select"),
        (lambda _mm, g: g, {"g": 1}, "an input as it is"),
        (lambda _mm: 3, {}, "a number"),
        (lambda mm: mm > 0, {}, "booleans"),
        (lambda _mm: torch.ones(3), {}, "ones"),
        (lambda mm, z: mm + z, {"z": torch.ones(3)}, "does not broadcast"),
        (lambda mm, z: mm + z, {}, "no z"),
        (lambda mm, bias: mm + bias, {"bais": torch.ones(N), "bias": torch.ones(N)}, "bais"),
        (lambda: 1, {}, "no arguments"),
        (changes_its_input, {"g": torch.ones(N)}, "in place"),
        (F.dropout, {}, "dropout"),
        (widens, {"gate": torch.ones(5, 6, N)}, "a wider gate"),
        (asks, {}, "asks"),
        (changes_what_is_not_recorded, {}, "in place unrecorded"),
        (branches, {"g": torch.ones(N)}, "a branch"),
        (lambda mm: mm * mm.max().item(), {}, "a value"),
        (lambda mm: _Straight.apply(mm), {}, "autograd.Function"),
        (lambda mm: _Tripled.apply(mm), {}, "custom_function_call"),
    ],
)
def test_what_no_epilogue_computes(function: Callable[..., Any], inputs: dict[str, Any], name: str, golden: Golden) -> None:
    with golden.raises(CallError, name):
        epigen.linear(torch.randn(6, K), torch.randn(N, K), epilogue=function, inputs=inputs)
    with golden.raises(CallError, f"{name}, compiled"):
        epigen.compile(function)(torch.randn(6, K), torch.randn(K, N), **inputs)
    before = inputs.get("g")
    assert before is None or not isinstance(before, Tensor) or torch.equal(before, torch.ones(N))  # tracing changed nothing


def test_torch_says_nothing_of_what_is_an_error_of_epigens(capfd: pytest.CaptureFixture[str], golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.compile(lambda mm, z: mm + z)(torch.ones(6, K), torch.ones(K, N), z=torch.ones(3))
    assert capfd.readouterr().err == ""


def straight(mm: Tensor) -> Tensor:
    return mm + (mm.round() - mm).detach()


def unrecorded(mm: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sigmoid(mm)
    return mm * scale


@pytest.mark.parametrize("function", [straight, unrecorded, lambda mm: mm * mm.data, lambda mm: mm * (mm > 0.5), lambda mm: mm.detach() * mm.exp()])
def test_gradients_are_those_of_the_function(function: Callable[[Tensor], Tensor]) -> None:
    """Also where it detaches, as quantisation does."""
    x, weight = torch.randn(6, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    grad = torch.randn(6, N)
    found = torch.autograd.grad(epigen.linear(x, weight, epilogue=function), (x, weight), grad)
    for ours, theirs in zip(found, torch.autograd.grad(function(x @ weight.T), (x, weight), grad), strict=True):
        assert close(ours, theirs)


def test_a_scale_of_what_is_detached() -> None:
    x, weight = torch.randn(6, K, requires_grad=True), torch.randn(N, K)
    y, scale = epigen.linear(x, weight, epilogue=lambda mm: (F.silu(mm), mm.detach().amax(-1)))
    assert close(scale, (x @ weight.T).amax(-1))
    assert close(*torch.autograd.grad(y.sum(), x), *torch.autograd.grad(F.silu(x @ weight.T).sum(), x))


def test_an_input_that_is_detached_has_no_gradient() -> None:
    x, weight, gate = torch.randn(6, K), torch.randn(N, K, requires_grad=True), torch.randn(N, requires_grad=True)
    epigen.linear(x, weight, epilogue=lambda mm, gate: mm * gate.detach(), gate=gate).sum().backward()
    assert gate.grad is None and close(weight.grad, torch.autograd.grad((x @ weight.T * gate.detach()).sum(), weight)[0])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "made",
    [lambda: torch.compile(nn.GELU()), lambda: torch.compile(F.gelu), lambda: torch.jit.script(nn.GELU()), lambda: torch.jit.trace(F.gelu, torch.ones(2))],
)
def test_functions_that_are_compiled_already(made: Callable[[], Any]) -> None:
    x, weight = torch.randn(6, K), torch.randn(N, K)
    assert close(epigen.linear(x, weight, epilogue=made()), F.gelu(x @ weight.T))


VIEWED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "a row": (lambda mm, s: mm * s[..., None] + s.unsqueeze(-1), (2, 3)),
    "a row of one dimension": (lambda mm, s: mm.flatten(0, 1) * s[:, None], (6,)),
    "of the first dimension": (lambda mm, s: mm * s[:, None, None], (2,)),
    "of the second": (lambda mm, s: mm * (s.view(1, -1, 1) * 2).exp(), (3,)),
    "a column": (lambda mm, s: mm * s.view(2, 4).flatten(), (N,)),
    "expanded": (lambda mm, s: mm * s.expand_as(mm), (N,)),
    "parted": (lambda mm, s: mm * s.view(2, 3, 1).expand(2, 3, N), (6,)),
    "transposed": (lambda mm, s: mm * s.mT + s.T.tanh(), (N, 3)),
    "a part": (lambda mm, s: mm * s[0] + s[1, :3, None], (2, N)),
    "squeezed": (lambda mm, s: mm * s.squeeze(), (1, 1, N)),
}


@pytest.mark.parametrize("name", VIEWED)
def test_inputs_that_the_function_views(name: str) -> None:
    function, shape = VIEWED[name]
    x, weight = torch.randn(2, 3, K), torch.randn(N, K)
    for seed in range(2):
        s = torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        expected = function(x @ weight.T, s)
        found = epigen.linear(x, weight, epilogue=function, s=s)
        assert close(found, expected) and close(epigen.compile(function)(x, weight.T.contiguous(), s=s.detach()), expected)
        grad = torch.randn(expected.shape)
        assert close(*torch.autograd.grad(found, s, grad), *torch.autograd.grad(expected, s, grad))


def test_a_tensor_of_its_own_that_the_function_views() -> None:
    table = torch.randn(4, N, requires_grad=True)
    x, weight = torch.randn(6, K), torch.randn(N, K)
    found, expected = epigen.linear(x, weight, epilogue=lambda mm: mm * table[2]), x @ weight.T * table[2]
    assert close(found, expected) and close(*torch.autograd.grad(found.sum(), table), *torch.autograd.grad(expected.sum(), table))


def test_double_precision_is_the_references_own() -> None:
    act = nn.PReLU(N).double()
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, K), (N, K), (N,)))
    for function in (F.gelu, lambda mm, bias: torch.where(mm > 0, mm, bias).double(), lambda mm, bias: (mm * bias).sum(-1), act):
        assert torch.autograd.gradcheck(lambda *given, f=function: epigen.linear(*given, epilogue=f), (x, weight, bias))


def test_what_is_told_of_a_layer(golden: Golden) -> None:
    leaky = functools.partial(F.leaky_relu, negative_slope=0.3)
    assert repr(epigen.nn.Linear(4, 4, epilogue=leaky)) == "Linear(in_features=4, out_features=4, bias=True, epilogue=partial)"
    with golden.raises(CallError, "Dropout"):
        epigen.nn.MLP([4, 4, 4], activation=nn.Dropout(0.5))(torch.ones(2, 4))
    with golden.raises(CallError, "Kernel"):
        epigen.linear(torch.ones(2, 4), torch.ones(4, 4), epilogue=epigen.compile("relu(mm)"))


def test_wrong_operands() -> None:
    kernel = epigen.compile(torch.relu)
    for a, b in ((torch.ones(3, 4), torch.ones(5, 6)), (torch.ones(3), 4), (torch.tensor(1.0), torch.ones(2, 2)), (torch.ones(3, 4), torch.ones(4))):
        with pytest.raises(CallError):
            kernel(a, b)
    assert functions.parameters(torch.relu) == ()


_HF = {
    "gelu_new": "gelu_tanh(mm)", "gelu_fast": "gelu_tanh(mm)", "gelu_accurate": "gelu_tanh(mm)", "gelu_python": "gelu(mm)", "gelu_python_tanh": "gelu_tanh(mm)",
    "gelu_10": "clamp(gelu(mm), -10, 10)", "quick_gelu": "quick_gelu(mm)", "mish": "mish(mm)", "swish": "silu(mm)", "sqrtsoftplus": "sqrt(softplus(mm))",
}  # fmt: skip


@pytest.mark.parametrize("name", _HF)
def test_activations_of_transformers_are_known_by_what_they_compute(name: str) -> None:
    activations = pytest.importorskip("transformers.activations")
    act = activations.ACT2FN[name]
    kernel = epigen.compile(lambda mm: act(mm))
    a, b = torch.randn(4, 8), torch.randn(8, 16)
    torch.testing.assert_close(kernel(a, b), act(a @ b), rtol=1e-5, atol=1e-5)
    assert kernel.program == _HF[name]


# -- invariant


def test_an_invariant_function_is_an_invariant_kernel() -> None:
    fused = epigen.compile(gelu_gate, invariant="m")
    x, w, bias, gate = torch.randn(70, 40), torch.randn(40, N), torch.randn(N), torch.randn(70, N)
    whole = fused(x, w, bias=bias, gate=gate)
    assert fused.kernel.numerics.invariant
    for low, high in ((0, 1), (3, 20), (69, 70)):
        assert torch.equal(fused(x[low:high], w, bias=bias, gate=gate[low:high]), whole[low:high])
    assert pickle.loads(pickle.dumps(fused))(x, w, bias=bias, gate=gate).equal(whole)


@pytest.mark.parametrize("more", [{"invariant": "m"}, {"rounding": "eager"}], ids=" ".join)
def test_torch_compile_does_not_take_apart_what_it_computes_otherwise(more: dict[str, str]) -> None:
    fused = epigen.compile(lambda mm: mm * 2, **more)  # type: ignore[call-overload]
    for call in (lambda: fused(torch.ones(2, 3), torch.ones(3, 4)), lambda: fused.over(torch.ones(2, 3))):
        with pytest.raises(Exception, match=r"is not seen by torch\.compile and torch\.fx"):
            torch.compile(call, fullgraph=True, backend="eager")()
