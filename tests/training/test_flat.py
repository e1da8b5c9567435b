"""What `epigen.fuse` makes of a forward whose code is straight: one function, which runs only where the code would do the same."""

from __future__ import annotations

import copy
import dis
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import counting
import pytest
import torch
from golden import Golden
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import epigen
from bench import owners
from epigen.training import deferred, straight
from epigen.training import fuse as fuse_module
from epigen.training.flat import MISSED
from epigen.training.fuse import Forward, Met

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("one_thread")]

SCALE = 2.0


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def times(x: Tensor, more: bool = False) -> Tensor:
    return x * SCALE * SCALE if more else x * SCALE


def bare(self: Any, x: Any = None) -> Any:
    return x if isinstance(x, Tensor) else self


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return times(F.gelu(x))


class Layer(nn.Module):
    """As a transformer's: a layer, an activation, a layer that comes back to the width, what drops, a residual and a norm."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(8, 16), Act(), nn.Linear(16, 8, bias=False)
        self.drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(8)
        self.scale, self.fn = 1.5, F.silu
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor, residual: Tensor | None = None, twice: bool = False) -> Tensor:
        y = self.act(self.up(x)) * self.gain
        y = self.drop(self.down(y)) * self.scale
        if residual is not None:
            y = y + residual
        y = self.fn(self.norm(y + self.shift))
        return y + y if twice else y


def pair(make: Callable[[], nn.Module] = Layer) -> tuple[Any, Any]:
    model = make()
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    return model, plain


def warm(model: nn.Module, *given: Any, **more: Any) -> list[Any]:
    """Until its code is written out. Returns the functions."""
    for _ in range(3):
        model(*given, **more)
    forward = vars(model)["forward"]
    assert not forward.known.bent, forward.known.bent
    return list(forward.known.flats)


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the forward's own code was run, and modes of torch's entered."""
    found: Counter[str] = Counter()

    def count(home: Any, name: str, what: str) -> None:
        function = getattr(home, name)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            found[what] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(home, name, run)

    count(deferred.Run, "__init__", "runs")
    count(TorchFunctionMode, "__enter__", "modes")
    count(TorchDispatchMode, "__enter__", "modes")
    count(Met, "again", "comparisons")
    count(Forward, "plain", "plain")
    return found


# -- what runs


def test_a_straight_forward_is_one_function_without_modes_and_modules(flat: Counter[str]) -> None:
    """Also in training, where autograd has one node for each layer and those of what no layer takes."""
    model, plain = pair()
    x, r = drawn(2, 3, 8).requires_grad_(), drawn(2, 3, 8, seed=1)
    entered = Counter[str]()
    for name, module in model.named_children():
        module.__dict__["_was_called"] = name
    for mode in (True, False):
        warm(model.train(mode), x, r)
        flat.clear()
        y = model(x, r)
        assert not flat
        torch.testing.assert_close(y, plain.train(mode)(x, r), rtol=1e-4, atol=1e-5)
        nodes = [y.grad_fn]
        for node in nodes:
            nodes += [n for n, _ in node.next_functions if n is not None]  # type: ignore[union-attr]
        entered = Counter(type(n).__name__ for n in nodes)
        assert entered == {"AgainBackward": 2, "NativeLayerNormBackward0": 1, "SiluBackward0": 1, "AccumulateGrad": 7}


class Multiplied(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class OfMultiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = Multiplied(8, 16), Multiplied(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def test_products_by_a_matrix_are_in_it(flat: Counter[str]) -> None:
    model, plain = pair(OfMultiplied)
    x = drawn(2, 3, 8).requires_grad_()
    assert len(warm(model, x)) == 1
    flat.clear()
    found, expected = ((y := m(x), *torch.autograd.grad(y.square().sum(), (x, *m.parameters()))) for m in (model, plain))
    assert not flat
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # a weight is read when it is multiplied
        model.up.weight.mul_(2)
        plain.up.weight.mul_(2)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_functions_of_torch_that_a_call_makes_are_those_that_no_kernel_computes() -> None:
    model, _ = pair()
    x = drawn(2, 3, 8)
    with torch.no_grad():
        warm(model.eval(), x)
        (flat,) = vars(model)["forward"].known.flats
        ((_, _, body),) = flat.bodies.seen
        called = [c.cell_contents for c in body.__closure__ if callable(c.cell_contents)]
    names = [f.__name__ for f in called]
    assert names == ["again", "layer_norm", "silu"], names


def test_a_fused_forward_goes_through_fewer_functions_than_the_plain_one() -> None:
    """Of Python's and of C's, the kernels' own left out: what the host does, counted where it cannot be timed."""
    x, r = drawn(2, 3, 8), drawn(2, 3, 8, seed=1)
    with torch.no_grad(), owners.hollow():
        model, plain = pair()
        warm(model, x, r)
        for count in (owners.calls, counting.calls):  # with functions written in C, and without
            fused, before = (count(functools.partial(m, x, r)) for m in (model, plain))
            assert fused < before, (fused, before)


def test_one_function_serves_all_shapes_of_a_forward_that_asks_for_none(flat: Counter[str]) -> None:
    model, plain = pair()
    ways = [drawn(2, 3, 8), drawn(4, 8), drawn(1, 1, 5, 8), drawn(1, 8), drawn(2, 3, 16)[..., ::2]]
    for x in ways * 3:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    flat.clear()
    for x in ways:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert not flat and len(vars(model)["forward"].known.flats) == 1


class Asking(nn.Module):
    """As GPT-2's layers, which ask for extents."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.size()[:-1], 4)
        y = F.relu(self.fc(x.view(-1, x.shape[-1])))
        first, second = self.last(y).view(shape), None
        return first if x.dim() > 2 and second is None else first * math.sqrt(len(shape))


def test_one_that_asks_for_extents_has_a_function_for_each(flat: Counter[str]) -> None:
    model = Asking()
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    ways = [drawn(2, 3, 8), drawn(2, 5, 8), drawn(4, 8)]
    for x in ways * 3:
        torch.testing.assert_close(model(x), plain(x))
    flat.clear()
    for x in ways:
        torch.testing.assert_close(model(x), plain(x))
    assert not flat and [len(flats) for flats in vars(model)["forward"].known.extents.values()] == [1, 1, 1]


def test_code_is_read_once_for_calls_with_gradients_and_without() -> None:
    for make, x in ((Layer, drawn(2, 3, 8)), (Asking, drawn(4, 8))):
        model, plain = pair(make)
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                for _ in range(3):
                    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        assert vars(model)["forward"].known.read == 1


def test_extents_that_come_ever_anew_are_not_read_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes as long as many calls: it has to pay."""
    model = Asking()
    epigen.fuse(model)
    known = vars(model)["forward"].known
    for m in range(2, 22):
        for _ in range(3):
            model(drawn(m, 8))
    assert known.read == len(known.extents) == 4
    monkeypatch.setattr("epigen.training.fuse._WORTH", 5)
    for _ in range(8):
        model(drawn(21, 8))
    assert known.read == len(known.extents) == 5 and torch.Size([21, 8]) in known.extents


def test_an_attribute_that_is_another_each_time_is_not_read_each_time() -> None:
    model, plain = pair()
    for m in (model, plain):
        m.scale = None
        m.norm.eps = 0.0
    known = vars(model)["forward"].known
    for step in range(20):
        for m in (model, plain):
            m.scale, m.norm.eps = 1.0, 1e-3 * step
        for _ in range(2):
            torch.testing.assert_close(model(drawn(2, 3, 8)), plain(drawn(2, 3, 8)), rtol=1e-4, atol=1e-5)
    assert known.read == 4


CONDITIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "another residual": lambda m, x: m(x, drawn(2, 3, 8, seed=5)),
    "no residual by name": lambda m, x: m(x, residual=None),
    "one by name": lambda m, x: m(x, residual=drawn(2, 3, 8, seed=5)),
    "its input as one": lambda m, x: m(x, x),
    "one that broadcasts": lambda m, x: m(x, drawn(8, seed=5)),
    "a flag": lambda m, x: m(x, None, True),
    "a flag by name": lambda m, x: m(x, twice=True),
    "a number as the flag": lambda m, x: m(x, None, 1),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_other_arguments(name: str) -> None:
    """Each before and after all others."""
    model, plain = pair()
    x = drawn(2, 3, 8)
    for _ in range(4):
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(CONDITIONS[name](model, x), CONDITIONS[name](plain, x), rtol=1e-4, atol=1e-5)
    for other in CONDITIONS.values():
        torch.testing.assert_close(other(model, x), other(plain, x), rtol=1e-4, atol=1e-5)


def test_a_default_device_is_in_nobodys_way(flat: Counter[str]) -> None:
    model, plain = pair()
    x = drawn(2, 3, 8)
    with torch.device("cpu"):
        warm(model, x)
        flat.clear()
        torch.testing.assert_close(model(x), plain(x))
        assert not flat


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.first, self.gate = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.up, self.last, self.act = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(self.down(x)))
        y = y * torch.sigmoid(self.gate(F.avg_pool2d(y, 3, 1, 1)))
        y = self.last(self.up(y))
        y += x
        return self.act(y)


def test_convolutions(flat: Counter[str]) -> None:
    """With norms, a residual, and what is done in place; in the memory that torch gives its results, for each size of images."""
    model, plain = (m.to(memory_format=torch.channels_last).eval() for m in pair(Bottleneck))
    for grad in (False, True):
        for size in (4, 5):
            x = drawn(2, 16, size, 6).contiguous(memory_format=torch.channels_last).requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                warm(model, x)
                flat.clear()
                y, expected = model(x), plain(x)
            assert not flat and y.stride() == expected.stride()
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
            if grad:
                of = [x, *model.parameters()]
                torch.testing.assert_close(
                    torch.autograd.grad(y.square().sum(), of), torch.autograd.grad(expected.square().sum(), [x, *plain.parameters()]), rtol=1e-3, atol=1e-4
                )
    known = vars(model)["forward"].known
    assert known.read == 2 and not known.bent
    other = drawn(2, 16, 4, 6)
    torch.testing.assert_close(model(other), plain(other), rtol=1e-4, atol=1e-5)


# -- what is compared


def patched_class(_m: nn.Module, mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Act, "forward", lambda self, x: F.relu(x))  # noqa: ARG005


def in_the_dict(m: Any, name: str, value: Any) -> None:
    m.__dict__[name] = value


def kept_in_the_way(m: Any) -> None:
    """As many attributes as before, of which one is another."""
    m.act.__dict__["mark"] = 1


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def scaled(module: Any) -> Callable[..., Any]:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = type(module).forward(module, x)
        return result * 3

    return forward


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "an attribute": lambda m, _: setattr(m, "scale", 2.5),
    "an attribute of a class": lambda _m, mp: mp.setattr(Layer, "gain", 3.0),
    "a function that is an attribute": lambda m, _: setattr(m, "fn", F.relu),
    "a method of a class": patched_class,
    "a method's code": lambda _m, mp: mp.setattr(Act.forward, "__code__", bare.__code__),
    "a function's code": lambda _m, mp: mp.setattr(times, "__code__", bare.__code__),
    "a function's default": lambda _m, mp: mp.setattr(times, "__defaults__", (True,)),
    "a global of its module": lambda _m, mp: mp.setitem(globals(), "SCALE", 0.5),
    "a function of torch's": lambda _m, mp: mp.setattr(F, "gelu", lambda x: x * 7),
    "how modules are called": lambda _m, mp: mp.setattr(nn.Module, "__call__", tripled(nn.Module.__call__)),
    "an option of a layer": lambda m, _: setattr(m.norm, "eps", 10.0),
    "what drops": lambda m, _: setattr(m.drop, "p", 1.0),
    "another layer of its kind": lambda m, _: setattr(m, "up", seeded(lambda: nn.Linear(8, 16))),
    "a layer of another kind": lambda m, _: setattr(m, "down", seeded(lambda: Doubling(16, 8, bias=False))),
    "a kind that changes": lambda m, _: setattr(m.down, "__class__", Doubling),
    "a bias": lambda m, _: setattr(m.down, "bias", nn.Parameter(torch.ones(8))),
    "no bias": lambda m, _: setattr(m.up, "bias", None),
    "a buffer": lambda m, _: setattr(m, "shift", torch.ones(8)),
    "a buffer in place": lambda m, _: m.shift.add_(1),
    "a weight's data": lambda m, _: setattr(m.up.weight, "data", drawn(16, 8, seed=4)),
    "a weight that lies otherwise": lambda m, _: setattr(m.up, "weight", nn.Parameter(drawn(8, 16, seed=4).t())),
    "a weight beside the parameter": lambda m, _: in_the_dict(m.up, "weight", drawn(16, 8, seed=4)),
    "a forward": lambda m, _: in_the_dict(m.act, "forward", scaled(m.act)),
    "a hook": lambda m, _: m.act.register_forward_hook(lambda _m, _x, y: y * 2),
    "a hook before": lambda m, _: m.up.register_forward_pre_hook(lambda _m, x: (x[0] * 2,)),
    "a hook backward": lambda m, _: m.down.register_full_backward_hook(lambda _m, gx, _gy: (gx[0] * 2,)),
    "a hook before backward": lambda m, _: m.down.register_full_backward_pre_hook(lambda _m, gy: (gy[0] * 2,)),
    "a hook of the whole": lambda m, _: m.register_forward_hook(lambda _m, _x, y: y * 2),
    "a hook of a weight": lambda m, _: m.up.weight.register_hook(lambda g: g * 2),
    "a frozen weight": lambda m, _: m.up.weight.requires_grad_(False),
    "another dtype": lambda m, _: m.norm.double(),
}  # fmt: skip


def tripled(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = call(self, *args, **kwargs)
        return found * 3 if isinstance(self, Act) else found

    return run


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_its_code_hangs_on_is_seen_when_it_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = pair()
    x = drawn(2, 3, 8)
    for mode in (True, False):
        assert warm(model.train(mode), x.clone().requires_grad_())  # as below: else what was written out would not be met there
    for m in (model, plain):
        CHANGES[name](m, monkeypatch)
    outcomes = []
    for mode in (False, True, True, True, False, False):
        for m in (plain, model):
            given = x.clone().requires_grad_()
            try:
                y = m.train(mode)(given)
                found: Any = (y, torch.autograd.grad(y.square().sum(), [given, *(p for p in m.parameters() if p.requires_grad)], allow_unused=True))
            except Exception as error:  # noqa: BLE001  # whatever it is, it has to be the same
                found = type(error)
            outcomes.append(found)
    for expected, found in zip(outcomes[::2], outcomes[1::2], strict=True):
        if isinstance(expected, type):
            assert found is expected
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_hooks_of_all_modules_are_called() -> None:
    model, _ = pair()
    x = drawn(2, 3, 8)
    warm(model, x)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, _x, _y: seen.append(module))
    model(x)
    handle.remove()
    assert seen == [model.up, model.act, model.down, model.drop, model.norm, model]


# -- torch's own state


class Watched(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


names: list[str] = []


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names.append(str(func))
        return func(*args, **(kwargs or {}))


def dual(m: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        y = m(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(y).tangent


STATES: dict[str, Callable[[Any, Tensor], Any]] = {
    "no_grad": lambda m, x: torch.no_grad()(m)(x),
    "inference mode": lambda m, x: torch.inference_mode()(m)(x).clone(),
    "autocast": lambda m, x: torch.autocast("cpu", torch.bfloat16)(m)(x),
    "autocast to another dtype": lambda m, x: torch.autocast("cpu", torch.float16)(m)(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x),
    "a derivative by torch.func": lambda m, x: torch.func.grad(lambda v: m(v).sum())(x),
    "a forward derivative": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "a dual number": dual,
    "make_fx": lambda m, x: torch.fx.experimental.proxy_tensor.make_fx(m)(x)(x),
    "fake tensors": lambda m, x: fake(m, x),
    "meta": lambda m, x: tuple(copy.deepcopy(m).to("meta")(x.to("meta")).shape),
    "other parameters": lambda m, x: torch.func.functional_call(m, {"up.weight": drawn(16, 8, seed=6)}, (x,)),
    "a subclass": lambda m, x: m(x.as_subclass(Own)),
    "a parameter": lambda m, x: m(nn.Parameter(x)),
    "another dtype": lambda m, x: copy.deepcopy(m).double()(x.double()),
}  # fmt: skip


class Own(Tensor):
    pass


def fake(m: nn.Module, x: Tensor) -> tuple[int, ...]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = m(mode.from_tensor(x))
    assert type(found).__name__ == "FakeTensor"
    return tuple(found.shape)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own, in its forward derivatives
@pytest.mark.parametrize("name", STATES)
def test_whatever_torch_does_around_it(name: str) -> None:
    model, plain = pair()
    x = drawn(2, 3, 8)
    for _ in range(2):
        assert warm(model, x)
        found, expected = STATES[name](model, x), STATES[name](plain, x)
        if isinstance(found, Tensor):
            assert type(found) is type(expected) and found.requires_grad == expected.requires_grad
            rounded = {"rtol": 5e-2, "atol": 5e-2} if "autocast" in name else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(found, expected, **rounded)
        else:
            assert found == expected


@pytest.mark.parametrize("mode", [Watched, Dispatched])
def test_modes_see_what_is_called(mode: Callable[[], Any]) -> None:
    model, _ = pair()
    x = drawn(2, 3, 8)
    warm(model, x)
    names.clear()
    with mode():
        model(x)
    assert any("layer_norm" in name for name in names) and any("silu" in name for name in names)


def test_random_numbers_are_drawn_as_ever() -> None:
    model, plain = pair()
    for m in (model, plain):
        m.drop.p = 0.5
    x = drawn(2, 3, 8)
    for _ in range(4):
        results = []
        for m in (model.train(), plain.train()):
            torch.manual_seed(1)
            results.append((m(x), torch.rand(1)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert vars(model)["forward"].known.flats


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_from_the_first_call_on(reentrant: bool) -> None:
    """Whichever way the first forward took, the second keeps as much: also where code is read in between."""
    results = []
    for m in pair():
        found = []
        for step in range(5):
            x = drawn(2, 3, 8, seed=step).requires_grad_()
            y = checkpoint(m, x, use_reentrant=reentrant)
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
        results.append((found, [p.grad for p in m.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# -- what is no straight code


BENT: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "it counts": (lambda s, x: count(s, F.relu(s.fc(x))), "its code changes something in place"),
    "it keeps": (lambda s, x: s.kept.append(x.shape) or F.relu(s.fc(x)), "it reads a list"),
    "it asks how a tensor lies": (lambda s, x: F.relu(s.fc(x)) if x.is_contiguous() else x, "a tensor becomes a number"),
    "it asks for torch's state": (lambda s, x: F.relu(s.fc(x)) if torch.is_grad_enabled() else x, "of no tensor"),
    "it draws": (lambda s, x: F.relu(s.fc(x)) * torch.ones(()), "it calls ones of no tensor"),
    "it prints": (lambda s, x: print(end="") or F.relu(s.fc(x)), "it calls print"),
    "it reads a setting": (lambda s, x: F.relu(s.fc(x)) * s.settings["gain"], "it reads a dict"),
}  # fmt: skip


def count(module: Any, y: Tensor) -> Tensor:
    module.calls += 1
    return y


@pytest.mark.parametrize("name", BENT)
def test_what_cannot_be_compared_runs_by_its_code(name: str) -> None:
    how, why = BENT[name]

    class Bending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.how, self.calls, self.kept, self.settings = nn.Linear(8, 8), how, 0, [], {"gain": 2.0}

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.how(self, x)
            return found

    model = Bending()
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    for _ in range(3):
        torch.testing.assert_close(model(drawn(3, 8)), plain(drawn(3, 8)))
    assert model.calls == plain.calls and model.kept == plain.kept
    known = vars(model)["forward"].known
    assert not known.flats and [why in said for said in known.bent.values()] == [True], known.bent


def test_code_is_read_where_it_is_the_one_that_runs(golden: Golden) -> None:
    """And not where a decorator or an edited file lies about it."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(self: Any, x: Tensor) -> Any:
            return forward(self, x) * 2

        return run

    class Wrapped(nn.Sequential):
        forward = wrapped(nn.Sequential.forward)

    torch.manual_seed(0)
    model = Wrapped(nn.Linear(8, 8), nn.ReLU())
    plain = copy.deepcopy(model)
    epigen.fuse(model)
    for _ in range(3):
        torch.testing.assert_close(model(drawn(3, 8)), plain(drawn(3, 8)))
    assert list(vars(model)["forward"].known.bent.values()) == ["run is no plain function"]
    namespace: dict[str, Any] = {"F": F}
    exec(compile("def forward(self, x):\n    return F.relu(self.fc(x)) + 1\n", __file__, "exec"), namespace)
    with golden.raises(straight.Bent):
        straight._written(namespace["forward"].__code__)


class Written(nn.Module):
    """Whose code is not read, for it is a closure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (lambda: self.down(F.gelu(self.up(x))) + x)()


def test_a_forward_by_its_plan_runs_as_it_is_where_the_plan_costs_more_than_it_spares(flat: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For each size, in training and without gradients, where a host launches kernels ahead of the GPU; a forward that is one function costs nothing."""
    monkeypatch.setattr(fuse_module, "_AHEAD", ("cpu",))
    monkeypatch.setattr(deferred, "_BYTES_A_US", 640.0)  # so that of hundreds of rows much is spared
    (model, plain), (straight_model, _) = pair(Written), pair()
    few, many = drawn(3, 8), drawn(300, 8)

    def runs(x: Tensor, recorded: bool) -> int:
        flat.clear()
        results = []
        for m in (model, plain):
            with torch.set_grad_enabled(recorded):
                y = m(x)
            results.append([y, *(torch.autograd.grad(y.square().sum(), list(m.parameters())) if recorded else ())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        return flat["runs"]

    for recorded, by_plan in ((False, [1, 1, 0, 0]), (True, [1, 0, 0, 0])):
        assert [runs(few, recorded) for _ in range(4)] == by_plan, "until its code was read, and once for each size"
        assert [runs(many, recorded) for _ in range(5)] == [1] * 5
    assert runs(few, recorded=False) == 0
    for _ in range(5):
        straight_model(drawn(1, 3, 8))
    assert not vars(straight_model)["forward"].known.light


def test_a_checkpoints_second_forward_goes_by_the_plan_that_its_first_went_by(flat: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_module, "_AHEAD", ("cpu",))
    (model, plain), x = pair(Written), drawn(3, 8).requires_grad_()
    for _ in range(5):
        flat.clear()
        results = [torch.autograd.grad(checkpoint(m, x, use_reentrant=False).square().sum(), (x, *m.parameters())) for m in (model, plain)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        assert flat["runs"] == 2
    model(x)
    flat.clear()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert not flat["runs"]


def test_what_is_let_go_early_is_freed_as_the_code_frees_it() -> None:
    model, _ = pair()
    warm(model.eval(), x := drawn(2, 3, 8))
    (flat,) = vars(model)["forward"].known.flats
    ((_, _, body),) = flat.bodies.seen
    assert [i.opname for i in dis.get_instructions(body)].count("DELETE_FAST") == 2
    assert flat.call((x, x), {}) is MISSED


def test_a_chain_is_computed_once_however_it_is_run() -> None:
    """By the plan too nothing is computed a second time for what nobody holds: as much is kept for the backward in each call, and nothing of torch's products."""
    model, _ = pair()
    kept = []
    for _ in range(4):
        count = Counter[str]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, count=count: count.update(["kept"]) or t, lambda t: t):  # type: ignore[misc]
            y = model(drawn(2, 3, 8))
        kept.append(count["kept"])
        assert "AddmmBackward" not in str([n for n, _ in y.grad_fn.next_functions])
    assert len(set(kept)) == 1, kept
