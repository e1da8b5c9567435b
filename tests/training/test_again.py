"""A call of `epigen.linear`, or of a layer of `epigen.nn`, like one before: it is known by one comparison, and gives what it gave, whatever surrounds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counting import counted
from golden import Golden
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import epigen
from epigen.errors import CallError
from epigen.training import again, chain, library, plan
from epigen.training.layer import Link

pytestmark = pytest.mark.usefixtures("one_thread", "_forgotten")

CHECKS = ((chain, "chain"), (plan, "steps"), (library, "below_autograd"))


@pytest.fixture
def _forgotten() -> Iterator[None]:
    again._ways.cache_clear()
    yield
    again._ways.cache_clear()


def drawn(*size: int, seed: int = 0, grad: bool = True) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def given() -> dict[str, Tensor]:
    return {"x": drawn(2, 3, 8), "w": drawn(16, 8, seed=1), "bias": drawn(16, seed=2), "gate": drawn(2, 3, 16, seed=3), "row": drawn(2, 3, seed=4)}


def ours(x: Tensor, w: Tensor, bias: Tensor, gate: Tensor, row: Tensor) -> Tensor:
    result: Tensor = epigen.linear(x, w, bias, "gelu(mm + bias) * gate[m,n] * row[m]", gate=gate, row=row)
    return result


def torchs(x: Tensor, w: Tensor, bias: Tensor, gate: Tensor, row: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias)) * gate * row[..., None]


def gradients(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> list[Tensor]:
    """The result, and the gradients of what requires one."""
    y = call(**tensors)
    wanted = [t for t in tensors.values() if t.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y.square().sum(), wanted) if wanted else ())]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def warm(tensors: dict[str, Tensor]) -> None:
    """So that the next call is known by comparison, and its backward too."""
    for _ in range(4):
        gradients(ours, tensors)


# -- what is compared


WEIGHT, BIAS = drawn(16, 8, seed=1), drawn(16, seed=2)
MADE: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "linear": lambda: lambda x: epigen.linear(x, WEIGHT, BIAS, "gelu(mm + bias)"),
    "its inputs in a mapping": lambda: lambda x: epigen.linear(x, WEIGHT, epilogue="gelu(mm + bias)", inputs={"bias": BIAS}, save="preactivation"),
    "Linear": lambda: epigen.nn.Linear(8, 16, epilogue="silu(mm + bias)"),
    "MLP": lambda: epigen.nn.MLP([8, 16, 8], "gelu"),
    "a function": lambda: lambda x: epigen.linear(x, WEIGHT, BIAS, F.silu),
    "functions in a chain": lambda: epigen.nn.MLP([8, 16, 8], F.gelu),
    "GatedMLP": lambda: epigen.nn.GatedMLP(8, 16),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_call_like_one_before_is_known_by_comparison(made: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs on shapes, dtypes and torch's modes is found out once for calls that are alike in them, and anew for others."""
    call, seen = MADE[made](), counted(monkeypatch, *CHECKS)

    def checks(x: Tensor) -> int:
        seen.clear()
        with torch.set_grad_enabled(recorded):
            y = call(x)
        if recorded:
            y.sum().backward()
        return seen["chain"] or seen.total()

    inputs = {
        "two leading dimensions": drawn(2, 3, 8),
        "one": drawn(5, 8),
        "rows that lie apart": drawn(5, 16, grad=False)[:, ::2].requires_grad_(),
        "none": drawn(8),
        "no gradient": drawn(5, 8, grad=False),
    }
    for _ in range(2):
        assert {name: checks(x) for name, x in inputs.items()} == dict.fromkeys(inputs, 1)
    assert {name: checks(x) for name, x in inputs.items()} == dict.fromkeys(inputs, 0)
    assert checks(drawn(5, 8, seed=7)) == 0, "another tensor, of the same kind"


def test_a_call_that_differs_is_another() -> None:
    """Each kind in turn, three times: checked, written out, and called as written."""
    base = given()
    kinds = {
        "as it is": base,
        "a frozen weight": base | {"w": base["w"].detach()},
        "a frozen bias": base | {"bias": base["bias"].detach()},
        "a frozen gate": base | {"gate": base["gate"].detach()},
        "nothing to train": {name: t.detach() for name, t in base.items()},
        "a transposed weight": base | {"w": drawn(8, 16, seed=1).detach().t().requires_grad_()},
        "fewer rows": base | {"x": drawn(1, 3, 8), "gate": drawn(1, 3, 16), "row": drawn(1, 3)},
        "another N": base | {"w": drawn(24, 8), "bias": drawn(24), "gate": drawn(2, 3, 24)},
        "a gate that broadcasts": base | {"gate": drawn(3, 16)},
        "a gate that is one number": base | {"gate": drawn(1, 1)},
        "a row that is one number": base | {"row": drawn(1, 1)},
        "one tensor twice": base | {"row": base["gate"].detach()[..., 0], "gate": base["gate"].detach()},
        "a gate of another dtype": base | {"gate": base["gate"].detach().bfloat16()},
    }
    for _ in range(3):
        for tensors in kinds.values():
            close(gradients(ours, tensors), gradients(torchs, tensors))


@pytest.mark.parametrize("autocast", [False, True])
def test_functions_are_the_programs_that_they_are_for_a_calls_shapes_and_dtypes(autocast: bool) -> None:
    w, bias, gate = drawn(16, 8, seed=1), drawn(16, seed=2), drawn(3, 1, seed=3)
    for _ in range(4):
        for x in (drawn(2, 3, 8), drawn(5, 3, 8), drawn(3, 8)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = epigen.linear(x, w, bias, lambda mm, gate: (F.silu(mm) * gate, mm.sum(-1)), gate=gate)
                z = F.linear(x, w, bias)
                expected = F.silu(z) * gate, z.sum(-1)
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close([t.float() for t in found], [t.float() for t in expected], **tolerance)
            gradients = [torch.autograd.grad(sum(t.float().square().sum() for t in results), (x, w, bias, gate)) for results in (found, expected)]
            for actual, wanted in zip(*gradients, strict=True):
                assert (actual - wanted).norm() <= (0.03 if autocast else 1e-4) * wanted.norm()


def test_the_program_and_its_options_are_compared() -> None:
    x, w, bias = drawn(5, 8), drawn(16, 8, seed=1), drawn(16, seed=2)
    ways: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: epigen.linear(x, w, bias), lambda: F.linear(x, w, bias)),
        (lambda: epigen.linear(x, w, bias, "relu(mm + bias)"), lambda: F.relu(F.linear(x, w, bias))),
        (lambda: epigen.linear(x, w, bias, "relu(mm + bias)", save="output"), lambda: F.relu(F.linear(x, w, bias))),
        (lambda: epigen.linear(x, w, bias, F.silu), lambda: F.silu(F.linear(x, w, bias))),
        (lambda: epigen.linear(x, w, bias, 0.5), lambda: 0.5 * F.linear(x, w) + bias),
        (lambda: epigen.linear(x, w, None, "mm * u[n] + v[n]", u=bias, v=bias * 2), lambda: F.linear(x, w) * bias + bias * 2),
        (lambda: epigen.linear(x, w, None, "mm * u[n] + v[n]", v=bias * 2, u=bias), lambda: F.linear(x, w) * bias + bias * 2),
        (lambda: epigen.linear(x, w, None, "mm * u[n] + v[n]", v=bias, u=bias * 2), lambda: F.linear(x, w) * bias * 2 + bias),
    ]
    for _ in range(3):
        for ours, torchs in ways:
            results = [[y, *torch.autograd.grad(y.square().sum(), (x, w, bias))] for y in (ours(), torchs())]
            close(*results)


@pytest.mark.parametrize("recorded", [False, True])
def test_another_number_is_no_other_call(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer, and in one whose derivative rides in the next one's product; a tensor in a number's place is another call."""
    x, w, v, seen = drawn(2, 3, 8), drawn(16, 8, seed=1), drawn(8, 16, seed=2), counted(monkeypatch, *CHECKS)

    def run(s: Any, t: Any) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(recorded):
            ours: Tensor = again.call(x, [Link(w, {"s": s}, "gelu(mm * s)"), Link(v, {"t": t, "u": 2}, "tanh(mm * t) * u")])
            return ours, torch.tanh(F.gelu(F.linear(x, w) * s) @ v.T * t) * 2

    def checks(s: Any, t: Any) -> int:
        seen.clear()
        results = run(s, t)
        if recorded:
            close(*(torch.autograd.grad(y.square().sum(), (x, w, v)) for y in results))
        close(*results)
        return seen["chain"] or seen.total()

    assert [checks(s, t) for s, t in ((1.5, 0.5), (2.5, 1), (0.5, True), (3, 0.25), (1.5, 0.5))] == [1, 1, 0, 0, 0]
    assert [checks(torch.tensor(1.5), 0.5) for _ in range(3)] == [1, 1, 0]
    assert [checks(1.5, torch.tensor(2.0, requires_grad=True)) for _ in range(3)] == [1, 1, 0]
    assert checks(0.5, 1.5) == 0
    with pytest.raises(CallError, match="too large"):
        run(10**400, 1.0)


def test_what_is_kept_and_where_a_gradient_goes_is_compared() -> None:
    x, w, main = drawn(5, 8), drawn(16, 8, seed=1), torch.zeros(16, 8)
    for turn in range(1, 5):
        results = {save: epigen.linear(x, w, None, "relu(mm)", save=save) for save in ("mask", "output")}
        kept = {save: result.grad_fn.saved_tensors[-1].dtype for save, result in results.items()}
        assert kept == {"mask": torch.uint8, "output": torch.float32}
        for _ in range(3):
            w.grad = None
            epigen.linear(x, w, None, "relu(mm)").sum().backward()
        gradient, w.grad = w.grad, None
        epigen.linear(x, w, None, "relu(mm)", main_grad=main).sum().backward()
        assert w.grad is None
        close(main, gradient * turn)


_GATED = {
    "a gate": ("silu(mm + bias) * dot(a, up[k,n])", lambda z, u: F.silu(z) * u),
    "a sum, whose gradient is what arrives": ("(mm + bias) + dot(a, up[k,n])", lambda z, u: z + u),
    "one followed in a product": ("tanh(mm + bias) - gelu(dot(a, up[k,n]))", lambda z, u: torch.tanh(z) - F.gelu(u)),
}


@pytest.mark.parametrize("wanted", [w for n in range(1, 5) for w in itertools.combinations(("x", "w", "bias", "up"), n)], ids="+".join)
@pytest.mark.parametrize("save", [None, "recompute"])
@pytest.mark.parametrize("gate", _GATED)
@pytest.mark.parametrize("lead", [(6,), (2, 3), ()], ids=str)
def test_two_products(lead: tuple[int, ...], gate: str, save: str | None, wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it wants a gradient; the weights are leaves, of which the second one is read as its transpose."""
    text, torchs = _GATED[gate]
    through = {"x": ["mm", "up"], "w": ["mm"], "bias": ["bias"], "up": ["up"]}
    if save is not None and save not in [o.save for o in epigen.derive(text, wrt=sorted({n for name in wanted for n in through[name]})).options]:
        pytest.skip("the product of x and w need not be taken again")
    for seed in range(5):
        sizes = {"x": (*lead, 8), "w": (16, 8), "bias": (16,), "up": (16, 8)}
        t = {name: drawn(*size, seed=seed + i, grad=name in wanted) for i, (name, size) in enumerate(sizes.items())}
        seen = counted(monkeypatch, *CHECKS)
        found = epigen.linear(t["x"], t["w"], t["bias"], text, up=t["up"].t(), save=save)
        expected = torchs(F.linear(t["x"], t["w"], t["bias"]), F.linear(t["x"], t["up"]))
        close(found, expected)
        leaves, arriving = [t[name] for name in wanted], drawn(*lead, 16, seed=seed, grad=False)
        close(torch.autograd.grad(found, leaves, arriving), torch.autograd.grad(expected, leaves, arriving))
        assert seed < 3 or not seen.total(), "known by comparison"


def test_two_products_under_autocast() -> None:
    for seed in range(4):
        x, w, up = drawn(2, 3, 8, seed=seed), drawn(16, 8, seed=seed + 1), drawn(16, 8, seed=seed + 2)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = epigen.linear(x, w, None, "silu(mm) * dot(a, up[k,n])", up=up.t()), F.silu(F.linear(x, w)) * F.linear(x, up)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        arriving = drawn(2, 3, 16, seed=seed, grad=False).bfloat16()
        for ours, torchs in zip(torch.autograd.grad(found, (x, w, up), arriving), torch.autograd.grad(expected, (x, w, up), arriving), strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, torchs, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("lead", [(6,), (2, 3), ()])
def test_several_results(lead: tuple[int, ...], recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile, a row, a column and a number, of which any may have a gradient; a mask is no tensor of these shapes, and is right as well."""
    x, w, bias, seen = drawn(*lead, 8), drawn(16, 8, seed=1), drawn(16, seed=2), counted(monkeypatch, *CHECKS)
    text = "z = mm + bias; tile = silu(z); row = sum(z * z, n); column = sum(tanh(z), m); whole = sum(z); tile, row, column, whole"
    masked = "z = mm + bias; tile = relu(z); packed = bitmask(z > 0); tile, packed"

    def torchs() -> tuple[Tensor, ...]:
        z = F.linear(x, w, bias)
        return F.silu(z), (z * z).sum(-1), z.reshape(-1, 16).tanh().sum(0), z.sum()

    weights = [drawn(*t.shape, seed=7, grad=False) for t in torchs()]
    for turn in range(5):
        seen.clear()
        with torch.set_grad_enabled(recorded):
            found, expected = epigen.linear(x, w, bias, text), torchs()
            assert found._fields == ("tile", "row", "column", "whole")
            close(tuple(found), expected)
            for wanted in ((0, 1, 2, 3), (0,), (1, 2)) if recorded else ():
                losses = [sum((results[i] * weights[i]).sum() for i in wanted) for results in (found, expected)]
                close(*(torch.autograd.grad(loss, (x, w, bias), retain_graph=True) for loss in losses))
            assert seen["chain"] == (turn < 2)
            tile, mask = epigen.linear(x, w, bias, masked)
            close(tile, F.relu(F.linear(x, w, bias)))
            assert mask.shape == (*lead, 2)


def test_a_buffer_is_added_to_by_a_backward_that_would_add_to_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither by one that returns the weight's gradient nor by one of something else, whatever gradients arrive."""
    x, w, v, seen = drawn(2, 3, 8), drawn(16, 8, seed=1), drawn(8, 16, seed=2), counted(monkeypatch, *CHECKS)
    buffers = torch.zeros(16, 8), torch.zeros(8, 16)
    z = torch.tanh(F.gelu(F.linear(x, w) * 0.5) @ v.T)
    expected = torch.autograd.grad(z.sum(), (x, w, v))

    def run() -> Tensor:
        links = [Link(w, {"s": 0.5}, "gelu(mm * s)", main_grad=buffers[0]), Link(v, {}, "tanh(mm)", main_grad=buffers[1])]
        result: Tensor = again.call(x, links)
        return result

    for turn in range(1, 5):
        run().backward(torch.ones(2, 3, 8) if turn % 2 else torch.ones(()).expand(2, 3, 8))
        close(buffers, [g * turn for g in expected[1:]])
    close(x.grad, expected[0] * 4)
    assert w.grad is None and v.grad is None
    seen.clear()
    close(torch.autograd.grad(run().sum(), x), expected[:1])
    close(torch.autograd.grad(run(), (x, w, v), torch.ones(2, 3, 8)), expected)
    assert not +seen
    close(buffers, [g * 4 for g in expected[1:]])


# -- what surrounds it


def _watching(kind: type, told: list[str]) -> Any:
    def seen(_self: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told.append(str(func))
        return func(*args, **(kwargs or {}))

    return type("Watching", (kind,), {"__torch_dispatch__": seen, "__torch_function__": seen})()


def test_whoever_watches_is_told() -> None:
    tensors = {name: t.detach() for name, t in given().items()}
    warm(tensors)
    told: list[str] = []
    with _watching(TorchDispatchMode, told):
        for _ in range(4):
            ours(**tensors)
    assert told.count("epigen.program.default") == 4
    layer = MADE["Linear"]()
    for call, name in ((lambda: ours(**tensors), "linear"), (lambda: layer(tensors["x"]), "chain")):
        for _ in range(3):
            call()
        told.clear()
        with _watching(TorchFunctionMode, told):
            call()
        assert any(f"function {name} " in each for each in told)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        ours(**tensors)
    assert [e.count for e in profile.key_averages() if e.key == "epigen::program"] == [1]


def _in_bfloat16(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(**tensors).bfloat16().float()


def _pushed_forward(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Any:
    for _ in range(3):
        call(**tensors | {"x": tensors["x"].detach()})
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(**tensors | {"x": forward_ad.make_dual(tensors["x"].detach(), torch.ones(2, 3, 8))}))


def _moved_away(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
        return gradients(call, tensors)


def _in_inference(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Any:
    with torch.inference_mode():
        y = call(**tensors)
        return y, torch.tensor(y.is_inference())


def _many_gradients(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Any:
    y = call(**tensors)
    return torch.autograd.grad(y, tensors["w"], torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)


def _from_elsewhere(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Any:
    """Gradients of another layout, and expanded ones."""
    y = call(**tensors)
    wanted = list(tensors.values())
    one = torch.autograd.grad(y, wanted, torch.ones(16, 3, 2).permute(2, 1, 0), retain_graph=True)
    return *one, *torch.autograd.grad(y, wanted, torch.ones(()).expand(2, 3, 16))


def _in_anomaly_mode(call: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return gradients(call, tensors)


AROUND: dict[str, Callable[[Callable[..., Tensor], dict[str, Tensor]], Any]] = {
    "autocast": _in_bfloat16,
    "no gradients": torch.no_grad()(lambda call, tensors: call(**tensors)),
    "inference mode": _in_inference,
    "torch.func.grad": lambda call, tensors: torch.func.grad(lambda w: call(**tensors | {"w": w}).square().sum())(tensors["w"].detach()),
    "torch.func.vmap": lambda call, tensors: torch.func.vmap(lambda w: call(**tensors | {"w": w}))(torch.stack([tensors["w"].detach()] * 2)),
    "forward-mode derivatives": _pushed_forward,
    "a checkpoint": lambda call, tensors: gradients(lambda **t: checkpoint(lambda: call(**t), use_reentrant=False), tensors),
    "saved tensors that are moved away": _moved_away,
    "many gradients at once": _many_gradients,
    "gradients of other layouts": _from_elsewhere,
    "anomaly mode": _in_anomaly_mode,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("around", AROUND)
def test_what_surrounds_a_call_is_heeded(around: str) -> None:
    tensors = given()
    warm(tensors)
    for _ in range(4):
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if around == "autocast" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(AROUND[around](ours, tensors), AROUND[around](torchs, tensors), **tolerance)
        close(gradients(ours, tensors), gradients(torchs, tensors))


# -- what is refused


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_does_not_fit_is_still_said(golden: Golden) -> None:
    tensors = given()
    warm(tensors)
    x, w, bias = (tensors[name] for name in ("x", "w", "bias"))
    for _ in range(2):
        ours(**tensors)
    with golden.raises(CallError, "no gate"):
        epigen.linear(x, w, bias, "gelu(mm + bias) * gate[m,n] * row[m]", row=tensors["row"])
    with golden.raises(CallError, "K differs"):
        ours(**tensors | {"x": drawn(2, 3, 7)})
    with golden.raises(CallError, "another dtype"):
        ours(**tensors | {"w": w.detach().bfloat16()})
    with golden.raises(CallError, "a sparse weight"):
        ours(**tensors | {"w": w.detach().to_sparse()})
    with golden.raises(CallError, "a nested x"):
        ours(**tensors | {"x": torch.nested.nested_tensor([drawn(3, 8, grad=False)] * 2)})
    with golden.raises(CallError, "a nested weight"):
        ours(**tensors | {"w": torch.nested.nested_tensor([drawn(16, 8, grad=False)])})
    with golden.raises(CallError, "a second derivative"):
        torch.autograd.grad(ours(**tensors).sum(), w, create_graph=True)


def test_a_change_in_place_is_noticed() -> None:
    tensors = given()
    warm(tensors)
    y = ours(**tensors)
    with torch.no_grad():
        tensors["w"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
