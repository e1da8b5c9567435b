"""What a model's backward asks of an activation, one bit an element: `torch.compile(model, backend=backend)` keeps that, and not the activation."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from under_torch import APART

import epigen
from epigen.training import bits, joint, report, whole
from epigen.training.backend import Packing, backend
from epigen.training.regions import Left
from epigen.training.report import Seen

pytestmark = [APART, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own compiler, which imports what it says to leave

PACKS, MASKS = "v = relu(mm + x0[n]); out0 = v; out0, bitmask(~(v <= 0))", "v = drelu(mm, bits(x0)); out0 = v; out0, bgrad(v)"


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """What Inductor keeps of graphs that it has compiled before is not looked at."""
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class Ran:
    """One run forward and backward. results: what came out, and the gradients of the input and of all parameters. saved: by dtype and shape, what was kept."""

    def __init__(self, call: Any, module: nn.Module, x: Tensor):
        module.zero_grad()
        x = x.clone().requires_grad_()
        y = call(x)
        kept = getattr(y.grad_fn, "saved_tensors", ())
        parameters = {p.data_ptr() for p in module.parameters()}
        self.saved = Counter((str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in kept if t.data_ptr() not in {x.data_ptr(), *parameters})
        y.float().square().sum().backward()
        self.results = [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def ran(module: nn.Module, x: Tensor, tolerance: float = 1e-4, **options: Any) -> tuple[Ran, dict[str, list[str]]]:
    """Compiled, and as eager torch does it. Returns also the programs of each graph."""
    torch._dynamo.reset()
    seen: list[Seen] = []
    dynamic = options.pop("dynamic", None)
    model = torch.compile(module, backend=backend, dynamic=dynamic, options={"rest": "eager", "report": seen.extend, **options})
    found = Ran(model, module, x)
    torch.testing.assert_close(found.results, Ran(module, module, x).results, rtol=tolerance, atol=tolerance)
    return found, {graph: [s.program for s in seen if s.graph == graph and s.taken] for graph in ("forward", "backward")}


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation after each but the last."""
    torch.manual_seed(0)
    layers = [layer for k, n in itertools.pairwise(widths) for layer in (nn.Linear(k, n), activation())]
    return nn.Sequential(*layers[:-1])


def drawn(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_chain_of_layers(rest: str) -> None:
    """Every layer's backward reads one bit an element. What is kept beside them are the operands of the weights' gradients."""
    found, programs = ran(mlp(16, 128, 32, 24, 8), drawn(6, 16), rest=rest)
    assert programs == {"forward": [PACKS] * 3, "backward": [MASKS] * 3}
    assert found.saved == {("float32", (6, n)): 1 for n in (128, 32, 24)} | {("uint8", (6, n // 8)): 1 for n in (128, 32, 24)}


def test_what_a_report_would_measure() -> None:
    """Is called with a mask of its own shape."""
    torch._dynamo.reset()
    model = torch.compile(mlp(16, 24, 8), backend=backend, options={"rest": "eager"})
    model(drawn(6, 16)).sum().backward()
    (read,) = (row.seen for row in epigen.report(model).rows if row.seen.program == MASKS)
    assert read.call is not None and read.call.inputs == (("x0", report.Lying((6, 3), (3, 1), torch.uint8)),)
    for run in report._runs(read.program, read.call, torch.device("cpu")):
        assert [t.shape for t in run()] == [(6, 24), (24,)]


def test_batches_and_16_bits() -> None:
    """As in T5: no bias, leading dimensions, bf16."""

    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wi, self.wo = nn.RMSNorm(16), nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.wo(F.relu(self.wi(self.norm(x))))

    torch.manual_seed(0)
    found, programs = ran(Feed().bfloat16(), drawn(2, 5, 16).bfloat16(), 0.05)
    assert programs == {"forward": ["v = relu(mm); out0 = v; out0, bitmask(~(v <= 0))", "x0[m,n] + mm"], "backward": ["drelu(mm, bits(x0))"]}
    assert found.saved["uint8", (2, 5, 8)] == 1
    assert [shape for dtype, shape in found.saved.elements() if dtype == "bfloat16" and shape[-1] == 64] in ([(10, 64)], [(2, 5, 64)])


def test_a_layer_whose_weight_is_frozen_keeps_nothing_but_bits() -> None:
    module = mlp(16, 32, 8)
    module[2].weight.requires_grad_(False)
    found, _ = ran(module, drawn(6, 16))
    assert found.saved == {("uint8", (6, 4)): 1}


SIBLINGS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "leaky_relu": (lambda: nn.LeakyReLU(0.2), "where(bits(x0), mm, mm * 0.2)"),
    "relu6": (nn.ReLU6, "drelu(mm, bits(x0))"),
    "threshold": (lambda: nn.Threshold(0.1, 0.5), "drelu(mm, bits(x0))"),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_other_activations_that_are_asked_no_more(name: str) -> None:
    """Of which torch keeps the argument, beside the result."""
    activation, program = SIBLINGS[name]
    found, programs = ran(mlp(16, 32, 8, activation=activation), drawn(6, 16))
    (forward,), (backward,) = programs.values()
    assert "bitmask(" in forward and program in backward.replace("v = ", ""), (forward, backward)
    assert found.saved == {("float32", (6, 32)): 1, ("uint8", (6, 4)): 1}


class Between(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 32):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first, self.last = function, nn.Linear(16, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def test_conditions_that_are_written_out() -> None:
    for function in (lambda h: h.clamp(min=0.0), lambda h: torch.where(h > 0.25, h, -h), lambda h: torch.where(h.sigmoid() > 0.5, 3 * h, h)):
        found, programs = ran(Between(function), drawn(6, 16))
        assert found.saved == {("float32", (6, 32)): 1, ("uint8", (6, 4)): 1}, programs
        assert all("bit" in text for graph in programs.values() for text in graph)


@pytest.mark.parametrize(
    "function",
    [lambda h: h.relu().square(), lambda h: h.relu() * h.sigmoid(), lambda h: h.cumsum(0).relu(), F.gelu],
    ids=["squared relu", "a gate", "no product's", "gelu"],
)
def test_what_would_spare_nothing_is_left(function: Callable[[Tensor], Tensor]) -> None:
    """Where the backward reads the values as well, or where what they are computed of is no product."""
    found, programs = ran(Between(function), drawn(6, 16))
    assert not any("bit" in text for graph in programs.values() for text in graph)
    assert not any(dtype == "uint8" for dtype, _ in found.saved)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_kernel_of_inductors_reads_it_too(rest: str) -> None:
    """Where no product comes before it in the backward."""
    found, programs = ran(Between(lambda h: h.relu().cumsum(0), 24), drawn(6, 16), rest=rest)
    assert programs == {"forward": [PACKS], "backward": []}
    assert found.saved == {("float32", (6, 24)): 1, ("uint8", (6, 3)): 1}


def test_columns_that_are_no_whole_bytes_are_left() -> None:
    _, programs = ran(mlp(16, 12, 8), drawn(6, 16))
    assert programs["backward"] == ["v = drelu(mm, ~(x0[m,n] <= 0)); out0 = v; out0, bgrad(v)"]


def test_without_a_backward_nothing_changes() -> None:
    torch._dynamo.reset()
    seen: list[Seen] = []
    model = torch.compile(mlp(16, 32, 8), backend=backend, options={"rest": "eager", "report": seen.extend})
    with torch.no_grad():
        model(drawn(6, 16))
    assert [s.program for s in seen if s.taken] == ["relu(mm + x0[n])"]


def test_several_questions_of_one_value() -> None:
    """Each has a mask of its own, and the value is there once."""

    def function(h: Tensor) -> Tensor:
        y = h.relu()
        return torch.where(y > 1, 2 * y, y)

    found, programs = ran(Between(function), drawn(6, 16))
    assert found.saved == {("float32", (6, 32)): 1, ("uint8", (6, 4)): 2}
    assert programs["forward"][0].count("bitmask") == 2 and len(set(re.findall(r"bits\(\w+\)", programs["backward"][0]))) == 2


@pytest.mark.parametrize("name", ["relu", *SIBLINGS])
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_special_values(name: str, rest: str) -> None:
    """At 0, -0, infinities and NaN the gradient is torch's, also where a NaN or an infinity arrives."""
    activation = nn.ReLU() if name == "relu" else SIBLINGS[name][0]()
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 6.0, 0.1, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 7.0])
    arriving = torch.tensor([1.0, float("inf"), float("nan"), -2.0])

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return activation(x @ w) @ v

    torch._dynamo.reset()
    seen: list[Seen] = []
    compiled = torch.compile(function, backend=backend, options={"rest": rest, "report": seen.extend})
    found = []
    for call in (compiled, function):
        x = values[:, None].repeat(len(arriving), 1).requires_grad_()
        y = call(x, torch.ones(1, 8, requires_grad=True), torch.ones(8, 1, requires_grad=True))
        y.backward(arriving.repeat_interleave(len(values))[:, None])
        found.append((y.detach(), x.grad))
    assert any("bits(" in s.program for s in seen)
    if name == "relu6":  # of NaN torch's own kernels say the one thing or the other
        found = [tuple(t[~values.repeat(len(arriving)).isnan()] for t in pair) for pair in found]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


def test_other_numbers_of_rows() -> None:
    torch._dynamo.reset()
    seen: list[Seen] = []
    module = mlp(16, 128, 40, 8)
    model = torch.compile(module, backend=backend, dynamic=True, options={"rest": "eager", "report": seen.extend})
    for rows in (6, 5, 9):
        x = drawn(rows, 3, 16)
        torch.testing.assert_close(Ran(model, module, x).results, Ran(module, module, x).results, rtol=1e-4, atol=1e-4)
    assert [s.program for s in seen if s.taken] == [PACKS] * 2 + [MASKS] * 2  # compiled once


def test_autocast() -> None:
    module, x = mlp(16, 32, 8), drawn(6, 16)
    torch._dynamo.reset()
    seen: list[Seen] = []
    model = torch.compile(module, backend=backend, options={"rest": "eager", "report": seen.extend})
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(Ran(model, module, x).results, Ran(module, module, x).results, rtol=0.1, atol=0.1)
    packs, masks = (s.program for s in seen if s.taken)
    assert packs == PACKS and "bits(x0)" in masks


def test_what_is_computed_again_is_packed_again() -> None:
    """A checkpoint keeps no more than it did: the mask is made where the activation is."""
    module, x = mlp(16, 32, 8), drawn(6, 16)
    torch._dynamo.reset()
    seen: list[Seen] = []

    def function(t: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(module, t, use_reentrant=False)

    found = Ran(torch.compile(function, backend=backend, options={"rest": "eager", "report": seen.extend}), module, x)
    torch.testing.assert_close(found.results, Ran(module, module, x).results, rtol=1e-4, atol=1e-4)
    assert not found.saved
    assert [s.program for s in seen if s.taken and s.graph == "backward"] == [MASKS, PACKS]


def test_what_is_computed_again_of_a_product_that_is_kept_is_not_packed() -> None:
    """There is no program then that could."""
    module, x = mlp(16, 32, 8), drawn(6, 16)
    kept = {torch.ops.aten.addmm.default: CheckpointPolicy.MUST_SAVE}

    def policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return kept.get(operation, CheckpointPolicy.PREFER_RECOMPUTE)

    def function(t: Tensor) -> Any:
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        return torch.utils.checkpoint.checkpoint(module, t, use_reentrant=False, context_fn=context)

    torch._dynamo.reset()
    model = torch.compile(function, backend=backend)
    found = Ran(model, module, x)
    torch.testing.assert_close(found.results, Ran(module, module, x).results, rtol=1e-4, atol=1e-4)
    assert found.saved == {("float32", (6, 32)): 1}
    assert not any("bit" in row.seen.program for row in epigen.report(model).rows)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_programs_that_are_left_after_all(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for want of registers, which is known when they are compiled."""
    monkeypatch.setattr("epigen.training.regions.region_of", lambda *_: Left("for a test"))
    found, programs = ran(mlp(16, 32, 24, 8), drawn(6, 16), rest=rest)
    assert programs == {"forward": [], "backward": []}
    assert found.saved == {("float32", (6, n)): 1 for n in (32, 24)} | {("uint8", (6, n // 8)): 1 for n in (32, 24)}


def test_dropout_between() -> None:
    """What is multiplied next is kept, and of ReLU's result no more than bits."""
    keep = drawn(6, 32) > 0
    found, programs = ran(Between(lambda h: h.relu() * keep * 2.0), drawn(6, 16))
    assert found.saved == {("float32", (6, 32)): 1, ("uint8", (6, 4)): 1, ("bool", (6, 32)): 1}, programs
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 8))
    torch.manual_seed(0)
    own = Ran(torch.compile(module, backend=backend, options={"rest": "eager"}), module, drawn(6, 16))
    assert own.saved == found.saved


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_part_that_is_compiled_once_and_called_twice(rest: str) -> None:
    """It is a graph within each graph, with a pass of its own over its forward and backward."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = mlp(16, 32, 16)

        def forward(self, x: Tensor) -> Tensor:
            part = torch.compiler.nested_compile_region(lambda t: F.linear(F.linear(t, *up).relu(), *down))
            up, down = ((layer.weight, layer.bias) for layer in (self.part[0], self.part[2]))
            return part(part(x))

    _, programs = ran(Twice(), drawn(6, 16), rest=rest)
    assert PACKS in programs["forward"] and MASKS in programs["backward"]


def test_a_users_own_pass_comes_first() -> None:
    """Of the options, or of torch's configuration."""
    packs: list[bool] = []

    def own(graph: torch.fx.Graph) -> None:
        packs.append(bool(graph.find_nodes(op="call_function", target=torch.ops.epigen.bitmask.default)))

    _, programs = ran(mlp(16, 32, 8), drawn(6, 16), joint_custom_pre_pass=own)
    assert packs == [False] and programs["forward"] == [PACKS]
    with torch._inductor.config.patch(joint_custom_pre_pass=own):
        _, programs = ran(mlp(16, 32, 8), drawn(6, 16))
    assert packs == [False, False] and programs["forward"] == [PACKS]
    assert Packing(None, [own]).uuid() is None and Packing().uuid() is not None


# -- the operations


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 24), (5, 128), (2, 136)])
@pytest.mark.parametrize("how", ["called", "written out"])
def test_masks_are_those_of_programs(shape: tuple[int, ...], how: str) -> None:
    condition, x, y = drawn(*shape) > 0, drawn(*shape), drawn(*shape) + 1
    ops = torch.ops.epigen if how == "called" else bits
    packed = ops.bitmask(condition)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], shape[-1] // 8) and packed.stride(-2) % 16 == 0
    order = 2 ** torch.arange(8)
    assert torch.equal(packed, (condition.unflatten(-1, (-1, 8)) * order).sum(-1).to(torch.uint8))
    assert torch.equal(ops.where_bits(packed, x), torch.where(condition, x, 0))
    assert torch.equal(ops.where_bits(packed, x, y), torch.where(condition, x, y))


def _graph_of(function: Any, *given: Tensor) -> torch.fx.GraphModule:
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*given)


def test_what_no_program_takes_is_written_out() -> None:
    """And what is packed and read in one graph is packed by a program, or not at all."""
    ops, x = torch.ops.epigen, drawn(4, 32)
    cases: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        "packs": (lambda x: ops.bitmask(x > 0), (x,)),
        "reads": (lambda b, x: ops.where_bits(b, x), (bits.bitmask(x > 0), x + 1)),
        "reads both": (lambda b, x, y: ops.where_bits(b, x, y), (bits.bitmask(x > 0), x + 1, x + 2)),
        "packs and reads": (lambda x: ops.where_bits(ops.bitmask(x > 0), x + 1), (x,)),
    }
    for name, (function, given) in cases.items():
        module = _graph_of(function, *given)
        joint.settle(module.graph)
        whole.decompose(module.graph)
        module.recompile()
        assert "epigen" not in str(module.graph)
        assert ("sum" in str(module.graph)) == (name == "packs"), name
        assert torch.equal(module(*given), function(*given))
        assert torch.equal(torch.compile(module)(*given), function(*given))


def test_a_mask_is_needed_by_the_nearest_value_that_a_result_needs() -> None:
    """Also where what it packs is computed for the backward alone, and after all that the forward computes."""

    def function(x: Tensor, w: Tensor, v: Tensor, tangents_1: Tensor) -> Any:
        h = x @ w
        y = h.exp() @ v
        grad = (tangents_1 @ v.t()) * 2
        return y, torch.where(h > 0, grad, 0.0)

    given = drawn(6, 16), drawn(16, 32), drawn(32, 8), drawn(6, 8)
    module = _graph_of(function, *given)
    (last,) = (n for n in module.graph.find_nodes(op="placeholder") if "tangents" in n.target or n is module.graph.find_nodes(op="placeholder")[3])
    last.target = last.name = "tangents_1"
    joint.keep_bits(module.graph)
    module.graph.lint()
    (tied,) = module.graph.find_nodes(op="call_function", target=torch.ops.epigen.tied.default)
    assert tied.args[0].target is torch.ops.aten.mm.default and [u.target for u in tied.users] == [torch.ops.aten.exp.default]
    module.recompile()
    torch.testing.assert_close(module(*given), function(*given))
    joint.settle(module.graph)
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.epigen.tied.default)


# -- what is compared with what was found in it


LARGEST: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda y: y - y.amax(-1, keepdim=True),
    "over rows": lambda y: y - y.amax(0),
    "of all": lambda y: y / y.max(),
    "amin": lambda y: y - y.amin(-1, keepdim=True),
    "chosen": lambda y: torch.where(y == y.amax(-1, keepdim=True), y, 0.0),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_is_found_again_where_it_was(name: str) -> None:
    """torch asks which elements equal the largest and divides by their number. Computed again by another kernel, or unrounded, none need."""
    module, x = Between(lambda h: LARGEST[name](F.silu(h) * 1.3).sum(-1, keepdim=True).expand(-1, 32), 32), drawn(256, 16).bfloat16()
    module.bfloat16()
    torch._dynamo.reset()
    found, expected = (Ran(call, module, x).results for call in (torch.compile(module, backend=backend), module))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm()
