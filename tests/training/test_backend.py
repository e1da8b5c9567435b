"""`torch.compile(model, backend=backend)`: what is taken of a model's forward and backward graphs, and that it computes what eager torch does."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_eager import agree, drawn
from golden import Golden
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from under_torch import APART

import epigen
from epigen.errors import CallError
from epigen.training import embeddings, report
from epigen.training.backend import Fusing, backend, fuse
from epigen.training.elements import CHANNELS_LAST
from epigen.training.report import Seen

pytestmark = [APART, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own compiler, which imports what it says to leave


class Block(nn.Module):
    """A transformer's two kinds of feed-forward, with their norms and residuals."""

    def __init__(self, width: int = 16, hidden: int = 32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gate, self.value, self.out = (nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.out(F.silu(self.gate(x)) * self.value(x))


FORWARD = {"v = mm + x0[n]; out0 = v; out0, gelu(v)", "x1[m,n] + (mm + x0[n])", "v = dot(a, x0[k,n]); out1 = v; mm, out1, silu(mm) * v", "x0[m,n] + mm"}
BACKWARD = {
    "mm * silu(x0[m,n]), dsilu(mm * x1[m,n], x0[m,n])", "v = x0[m,n] + mm + x1[m,n]; out0 = v; out0, bgrad(v)", "v = dgelu(mm, x0[m,n]); out0 = v; out0, bgrad(v)"
}  # fmt: skip


def compiled(model: nn.Module, **options: Any) -> tuple[Any, list[Seen]]:
    torch._dynamo.reset()
    seen: list[Seen] = []
    return torch.compile(model, backend=backend, options={"rest": "eager", "report": seen.extend, **options}), seen


def gradients(model: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def test_a_block_forward_and_backward() -> None:
    """Gates, residuals and the bias gradient ride in products; norms and weight gradients are left."""
    torch.manual_seed(0)
    module, x = Block(), torch.randn(3, 5, 16)
    expected = gradients(module, module, x)
    model, seen = compiled(module)
    found = gradients(model, module, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert {s.program for s in seen if s.taken} == FORWARD | BACKWARD
    assert len(seen) == 15 and all(s.why for s in seen if not s.taken)


def test_dtypes_and_inference() -> None:
    torch.manual_seed(0)
    module, x = Block().to(torch.bfloat16), torch.randn(2, 7, 16).to(torch.bfloat16)
    model, seen = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=0.05, atol=0.05)
    assert {s.program for s in seen if s.taken} >= {"gelu(mm + x0[n])", "silu(mm) * dot(a, x0[k,n])"}


class Gated(nn.Module):
    """A gated unit as language models write it. first: which of its products comes first."""

    def __init__(self, bias: bool = False, first: str = "gate", act: Callable[[Tensor], Tensor] = F.silu):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32, bias), nn.Linear(16, 32, bias), nn.Linear(32, 16, bias)
        self.first, self.act = first, act

    def forward(self, x: Tensor) -> Tensor:
        if self.first == "gate":
            return self.down(self.act(self.gate(x)) * self.up(x))
        up = self.up(x)
        return self.down(up * self.act(self.gate(x)))


_ONE_KERNEL = {
    "silu": (lambda: Gated(), "silu(mm) * dot(a, x0[k,n])"),
    "biases": (lambda: Gated(True), "silu(mm + x0[n]) * (dot(a, x1[k,n]) + x2[n])"),
    "up first": (lambda: Gated(False, "up", F.gelu), "mm * gelu(dot(a, x0[k,n]))"),
    "relu": (lambda: Gated(act=F.relu), "relu(mm) * dot(a, x0[k,n])"),
}


@pytest.mark.parametrize("name", _ONE_KERNEL)
def test_a_gated_unit_is_one_kernel(name: str) -> None:
    torch.manual_seed(0)
    make, program = _ONE_KERNEL[name]
    module, x = make(), torch.randn(3, 5, 16)
    model, seen = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)
    assert [s.program for s in seen] == [program, program, ""]
    model, seen = compiled(module)
    torch.testing.assert_close(gradients(model, module, x), gradients(module, module, x), rtol=1e-4, atol=1e-4)
    forward = [s.program for s in seen if s.graph == "forward"]
    assert forward[0] == forward[1] and "dot(a, x" in forward[0]


def test_of_a_gated_unit_a_half_counts_for_each_product() -> None:
    model, _ = compiled(Gated())
    with torch.no_grad():
        model(torch.randn(3, 5, 16))
    row = epigen.report(model).rows[0]
    assert row.count == 2 and row.seen.call is not None and row.seen.call.inputs == (("x0", report.Lying((16, 32), (1, 16), torch.float32)),)
    fused, apart = (run() for run in report._runs(row.seen.program, row.seen.call, torch.device("cpu")))
    assert fused.shape == apart.shape == (15, 32)


class InTurn(nn.Module):
    """Two products of one x, of which the later one adds what is computed of the earlier one, or multiplies x with it. activates: which goes through silu."""

    def __init__(self, adds: bool, activates: str):
        super().__init__()
        self.one, self.other, self.adds, self.activates = nn.Linear(16, 15, bias=False), nn.Linear(16, 15, bias=False), adds, activates

    def forward(self, x: Tensor) -> Tensor:
        earlier, weight = self.one(x), self.other.weight.t()
        of_it = earlier.cumsum(0)
        later = torch.addmm(of_it[0], x, weight) if self.adds else x @ (weight + of_it[:1])
        return F.silu(earlier) * later if self.activates == "earlier" else F.silu(later) * earlier


@pytest.mark.parametrize("activates", ["earlier", "later"])
@pytest.mark.parametrize("adds", [False, True])
def test_what_needs_the_other_first_is_no_second_product(adds: bool, activates: str) -> None:
    torch.manual_seed(0)
    module, x = InTurn(adds, activates), torch.randn(16, 16)
    model, seen = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)
    assert len(seen) == 2 and not any("dot(" in s.program for s in seen)


class Stacked(nn.Module):
    """Gate and up in one weight, one after the other or in turn."""

    def __init__(self, how: str, bias: bool, between: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.both, self.down = nn.Linear(16, 64, bias), nn.Linear(32, 16, bias)
        self.how, self.between = how, between

    def forward(self, x: Tensor) -> Any:
        h = self.both(x)
        gate, up = {
            "chunk": lambda: h.chunk(2, -1), "slices": lambda: (h[..., :32], h[..., 32:]), "in turn": lambda: (h[..., ::2], h[..., 1::2]),
            "last first": lambda: h.chunk(2, -1)[::-1], "unlike": lambda: (h[..., :32], h[..., 16:48]),
        }[self.how]()  # fmt: skip
        return self.down(self.between(gate, up))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", ["chunk", "slices", "in turn", "last first"])
def test_a_stacked_gate_is_one_kernel(how: str, bias: bool) -> None:
    """The weight is read where it lies."""
    torch.manual_seed(0)
    module, x = Stacked(how, bias, lambda gate, up: F.silu(gate) * up), torch.randn(3, 5, 16)
    model, seen = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)
        first = epigen.report(model)
        torch.testing.assert_close(model(x[:2].clone()), module(x[:2]), rtol=1e-5, atol=1e-5)
    assert len(seen) in (3, 6) and all("dot(a, x" in s.program and "silu" in s.program for s in seen[:2]) and seen[0].shape == (15, 32, 16)
    assert "-" not in first.summary, "copies of the weight would be counted"
    torch.testing.assert_close(gradients(model, module, x), gradients(module, module, x), rtol=1e-4, atol=1e-4)
    trained = [s for s in seen if s.graph == "forward" and s.shape[1:] == (32, 16)]
    assert len(trained) == 2 and all("dot(a, x" in s.program and "silu" in s.program for s in trained), "it keeps both parts for the backward"


def test_a_stacked_gate_is_one_kernel_where_it_is_computed_again() -> None:
    """By activation checkpointing, in the backward's graph."""
    torch.manual_seed(0)
    module, x = Stacked("chunk", False, lambda gate, up: F.silu(gate) * up), torch.randn(3, 5, 16)
    again = copy.deepcopy(module)
    forward = again.forward
    again.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    model, seen = compiled(again)
    torch.testing.assert_close(gradients(model, again, x), gradients(module, module, x), rtol=1e-4, atol=1e-4)
    assert {s.graph for s in seen if "dot(a, x" in s.program} == {"forward", "backward"}, [(s.graph, s.program, s.why) for s in seen]


def test_gradients_of_a_stacked_gate_come_out_beside_one_another() -> None:
    """What the next products read in one. Of rows, as of columns that are rows of a product, nothing is joined."""
    torch.manual_seed(0)
    module, x = Stacked("chunk", True, lambda gate, up: F.silu(gate) * up), torch.randn(3, 5, 16)
    model, seen = compiled(module)
    torch.testing.assert_close(gradients(model, module, x), gradients(module, module, x), rtol=1e-4, atol=1e-4)
    (derivative,) = (s.program for s in seen if s.graph == "backward" and s.taken)
    assert "dsilu" in derivative and "halves(" in derivative
    one, other = drawn((3, 5, 16), (3, 16, 1))
    for dim, function in ((1, lambda a, b: (a @ b).squeeze(-1)), (0, lambda a, b: a[0] @ b[0].expand(16, 8))):

        def joined(a: Tensor, b: Tensor, dim: int = dim, function: Any = function) -> Tensor:
            y = function(a, b)
            return torch.cat([F.silu(y), y * 2], dim) @ torch.ones(torch.cat([y, y], dim).shape[1], 4)

        found = agree(joined, one, other)
        assert not any("halves" in text for text in found.values())
    found = agree(lambda a, b: torch.cat([F.silu(y := a[0] @ b), y * 2], -1).clamp(max=1) @ torch.ones(16, 4), one, drawn((16, 8))[0])
    assert "forward (5, 8, 16)" in found and "halves(" in found["forward (5, 8, 16)"] and "minimum" in found["forward (5, 8, 16)"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_stacked_gate_of_any_number_of_rows(dynamic: bool) -> None:
    torch.manual_seed(0)
    module = Stacked("chunk", True, lambda gate, up: F.gelu(gate) * up)
    _, seen = compiled(module)
    model = torch.compile(module, backend=backend, options={"rest": "eager", "report": seen.extend}, dynamic=dynamic)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 2, 16)
        torch.testing.assert_close(gradients(model, module, x), gradients(module, module, x), rtol=1e-4, atol=1e-4)
    assert all("dot(a, x" in s.program for s in seen if s.graph == "forward" and s.shape[1:] == (32, 16))


@pytest.mark.parametrize(
    ("how", "between"),
    [
        ("unlike", lambda gate, up: F.silu(gate) * up),
        ("chunk", lambda gate, up: torch.softmax(gate, -1) + torch.softmax(up, -1)),
        ("chunk", lambda gate, up: torch.relu(gate) + up.cumsum(-1)),
    ],
)
def test_what_is_no_gate_stays_one_product(how: str, between: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, x = Stacked(how, True, between), torch.randn(3, 5, 16)
    model, seen = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)
    assert [s.shape for s in seen] == [(15, 64, 16), (15, 16, 32)] and not any(s.taken for s in seen)


class Attending(nn.Module):
    """Three products of one x that meet in no elementwise operation, and two that do, of weights that lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.right = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(F.relu(self.q(x)), F.relu(self.k(x)), self.v(x)) + torch.relu(x @ self.right.weight) * torch.tanh(self.q(x))


def test_products_that_do_not_meet_are_apart() -> None:
    torch.manual_seed(0)
    module, x = Attending(), torch.randn(3, 5, 16)
    model, seen = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)
    assert not any("dot(" in s.program for s in seen) and len(seen) >= 4


def test_other_numbers_of_rows() -> None:
    torch.manual_seed(0)
    module = Block()
    model, _ = compiled(module)
    with torch.no_grad():
        for rows in (5, 7, 11):
            x = torch.randn(rows, 3, 16)
            torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)


def test_three_steps_are_eagers() -> None:
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        module = Block()
        model: Any = compiled(module)[0] if fused else module
        optimizer, x = torch.optim.AdamW(module.parameters(), 1e-2), torch.randn(4, 6, 16)
        losses.append([])
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_masks_slopes_and_activations_of_all_kinds() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
            self.slope = nn.PReLU(8)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            a, b, c, d, e, f, g = self.layers
            x = F.relu(a(x))
            x = F.softplus(b(x))
            x = F.leaky_relu(c(x), 0.2)
            x = torch.where(keep, d(x), 0.0)
            x = F.hardswish(e(x))
            x = F.mish(f(x)) * 0.5
            return self.slope(g(x))

    torch.manual_seed(0)
    module, x, keep = Net(), torch.randn(6, 8), torch.rand(6, 8) > 0.5
    expected = gradients(lambda t: module(t, keep), module, x)
    model, seen = compiled(module)
    torch.testing.assert_close(gradients(lambda t: model(t, keep), module, x), expected, rtol=1e-4, atol=1e-4)
    assert sum(s.taken for s in seen) >= 13


def test_options_are_checked() -> None:
    wrong = {
        "rest is 'inductor' or 'eager'": {"rest": "triton"},
        "tune is 'missing' or None": {"tune": "all"},
        "option 'tunes': did you mean 'tune'": {"tunes": "missing"},
        "report is called with": {"report": 3},
    }
    for said, options in wrong.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=said) as raised:
            torch.compile(nn.Linear(2, 2), backend=backend, options=options)(torch.ones(1, 2))
        assert isinstance(raised.value, CallError) or "CallError" in str(raised.value)


def test_products_of_all_kinds() -> None:
    """A batch that shares its second operand is one product."""
    assert agree(lambda x, w: F.relu(torch.einsum("bsd,df->bsf", x, w)), *drawn((2, 5, 8), (8, 6)))["forward (10, 6, 8)"] == "relu(mm)"
    found = agree(lambda x, w: F.relu(torch.bmm(x, w.expand(3, 8, 6)) + 1), *drawn((3, 5, 8), (8, 6)))
    assert found["forward (15, 6, 8)"] == "relu(mm + 1)" and found["backward (3, 8, 6, 5)"] == "nothing elementwise follows it"
    scaled = agree(lambda y, x, w: F.relu(torch.baddbmm(y, x, w.expand(3, 8, 6), beta=0.5, alpha=2)), *drawn((3, 5, 6), (3, 5, 8), (8, 6)))
    assert scaled["forward (15, 6, 8)"] == "relu(2 * mm + 0.5 * x0[m,n])"
    assert (
        agree(lambda y, x, w: F.relu(torch.addmm(y, x, w, beta=0.5, alpha=2)), *drawn((6,), (5, 8), (8, 6)))["forward (5, 6, 8)"]
        == "relu(2 * mm + 0.5 * x0[n])"
    )
    assert agree(lambda y, x, w: F.relu(torch.addmm(y, x, w, beta=0)), *drawn((6,), (5, 8), (8, 6)))["forward (5, 6, 8)"] == "relu(mm)"
    assert agree(lambda x, w: F.relu(x.t() @ w.t()), *drawn((8, 5), (6, 8)))["forward (5, 6, 8)"] == "relu(mm)"


def test_rows_and_columns_that_change_places() -> None:
    assert agree(lambda x, w, g: F.tanh((x @ w).t() * g), *drawn((5, 8), (8, 6), (5,)))["forward (5, 6, 8)"] == "mm, tanh(mm * x0[m])"
    assert agree(lambda x, w, g: F.tanh((x @ w).t() * g), *drawn((5, 8), (8, 6), (6, 1)))["forward (5, 6, 8)"] == "mm, tanh(mm * x0[n])"
    agree(lambda x, w, g: F.tanh((x @ w).t()) * g, *drawn((6, 8), (8, 6), (6, 6)))  # where extents cannot tell them apart
    heads = agree(lambda x, w: F.tanh((x @ w).view(2, 5, 2, 3).transpose(1, 2) * 0.3), *drawn((2, 5, 8), (8, 6)))
    assert heads["forward (10, 6, 8)"] == "tanh(mm * 0.3)"
    one = agree(lambda x, w: F.tanh((x @ w).view(2, 1, 5, 6).permute(2, 1, 0, 3) * 0.3), *drawn((10, 8), (8, 6)))  # between the two, one element
    assert one["forward (10, 6, 8)"] == "tanh(mm * 0.3)"


def test_what_was_to_be_computed_before_for_its_sake_alone() -> None:
    """One tile is read in place of those that are computed of it."""
    found = agree(lambda x, w, g: F.tanh(x @ w * torch.sigmoid(g) + torch.exp(g) * g.relu()), *drawn((5, 8), (8, 6), (5, 6)))
    assert found["forward (5, 6, 8)"] == "mm, tanh(mm * sigmoid(x0[m,n]) + exp(x0[m,n]) * relu(x0[m,n]))"
    added = agree(lambda x, w, g, h: F.tanh(x @ w + (g + h)), *drawn((5, 8), (8, 6), (5, 6), (5, 6)))
    assert added["forward (5, 6, 8)"] == "tanh(mm + x0[m,n])"  # two tiles would be read in place of one


def test_several_extents_that_vary() -> None:
    first, second = drawn((2, 5, 8), (8, 6), (2, 5, 6)), drawn((3, 7, 8), (8, 6), (3, 7, 6))
    found = agree(lambda x, w, g: F.tanh(x @ w) * g + x[..., :1], *first, dynamic=True, again=tuple(second))
    assert found["forward (10, 6, 8)"] == "mm, tanh(mm) * x0[m,n] + x1[m]" and len(found) == 3  # compiled once
    part = agree(lambda x, w, g: F.tanh(x @ w) * g, *drawn((2, 5, 8), (8, 6), (5, 6)), dynamic=True, again=tuple(drawn((3, 7, 8), (8, 6), (7, 6))))
    assert part["forward (10, 6, 8)"] == "mm, tanh(mm) * x0[m,n]"


@pytest.mark.parametrize("dynamic", [None, True])
def test_views_of_what_varies_over_some_of_the_rows(dynamic: bool | None) -> None:
    """One number for each example, as a layer that is dropped now and then has it."""
    for form, shape, other in (((-1, 1, 1), (2,), (3,)), ((1, -1, 1), (5,), (7,)), ((-1, 1), (5,), (7,)), ((-1, 1, 1), (2, 1), (3, 1))):

        def function(x: Tensor, w: Tensor, g: Tensor, form: tuple[int, ...] = form) -> Tensor:
            return F.tanh(x @ w) * g.view(form)

        found = agree(function, *drawn((2, 5, 8), (8, 6), shape), dynamic=dynamic, again=tuple(drawn((3, 7, 8), (8, 6), other)) if dynamic else ())
        assert found["forward (10, 6, 8)"] == "mm, tanh(mm) * x0[m]"


def test_a_number_of_the_call_is_left_to_torch() -> None:
    first, second = drawn((5, 8), (8, 6)), drawn((7, 8), (8, 6))
    found = agree(lambda x, w: F.tanh(x @ w).exp() * x.shape[0], *first, dynamic=True, again=tuple(second))
    assert len(found) == 3 and not any("x0" in program for program in found.values())


def test_booleans_and_integers_among_the_inputs() -> None:
    for kind in (torch.bool, torch.uint8, torch.int32, torch.int64):
        keep = (torch.arange(30).view(5, 6) % 3).to(kind)

        def function(x: Tensor, w: Tensor, keep: Tensor = keep) -> Tensor:
            y = F.tanh(x @ w)
            return torch.where(keep, y, 0.5) * keep if keep.dtype == torch.bool else y * keep

        assert "x0[m,n]" in agree(function, *drawn((5, 8), (8, 6)))["forward (5, 6, 8)"]


def test_booleans_that_leave_a_region_are_booleans() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        positive = y > 0
        return torch.where(positive, y * y, -y) + positive.cumsum(0)

    assert "int8" in agree(function, *drawn((5, 8), (8, 6)))["forward (5, 6, 8)"]


def test_operations_on_booleans() -> None:
    """What numbers have too, as isfinite multiplies two, is what it is of booleans: one condition leaves the kernel for the backward, not two."""
    for operation in (torch.mul, torch.add, torch.eq, torch.ne, torch.maximum, torch.minimum, lambda p, q: torch.where(p, q, ~q)):

        def function(x: Tensor, w: Tensor, operation: Any = operation) -> Tensor:
            y = x @ w
            return torch.where(operation(y > 0.1, y.abs() < 1), y, 0.25)

        program = agree(function, *drawn((5, 8), (8, 6)))["forward (5, 6, 8)"]
        assert "mm > 0.1" in program and "abs(mm) < 1" in program and program.count("int8") == 1, program
    finite = agree(lambda x, w: torch.nan_to_num(x @ w).exp(), *drawn((5, 8), (8, 6)))["forward (5, 6, 8)"]
    assert "exp(" in finite and "mm == mm" in finite


def test_what_is_refused_as_a_whole_costs_no_more_than_itself() -> None:
    """A sum over the rows of one column, which elements are joined with: the language has both, and not together."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        return (y - y.mean(0)).exp() @ v + y @ v

    assert agree(function, *drawn((5, 8), (8, 1), (1, 3)))["forward (5, 1, 8)"] == "tanh(mm)"


def test_double_precision_is_left() -> None:
    assert agree(lambda x, w: F.tanh((x @ w).double()).float(), *drawn((5, 8), (8, 6)))["forward (5, 6, 8)"] == "nothing elementwise follows it"
    doubles = [t.double() for t in drawn((5, 8), (8, 6))]
    assert agree(lambda x, w: F.tanh(x @ w), *doubles)["forward (5, 6, 8)"] == "operands of torch.float64"


def test_autocast() -> None:
    torch.manual_seed(0)
    module, x = Block(), torch.randn(2, 7, 16)

    def run(model: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, module, x)

    expected = run(module)
    model, seen = compiled(module)
    torch.testing.assert_close(run(model), expected, rtol=0.1, atol=0.1)
    assert {s.program for s in seen if s.taken} >= {"v = dot(a, x0[k,n]); out1 = v; mm, out1, silu(mm) * v"} and {s.dtype for s in seen} == {"torch.bfloat16"}


@pytest.mark.parametrize("scale", [2.0**10, 2.0**60], ids=["plain", "overflow"])
def test_grad_scaler(scale: float) -> None:
    """Three steps in float16; of those that overflow the scale is halved and the weights stay."""
    found = []
    for way in ("eager", "epigen"):
        torch.manual_seed(0)
        module = Block()
        model: Any = module if way == "eager" else compiled(module)[0]
        scaler, optimizer, x = torch.amp.GradScaler("cpu", init_scale=scale), torch.optim.SGD(module.parameters(), lr=0.1), torch.randn(3, 5, 16)
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        found.append([*(p.detach().clone() for p in module.parameters()), torch.tensor(scaler.get_scale())])
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-3)
    assert (found[1][-1].item() == scale) == (scale == 2.0**10)


def test_checkpoints() -> None:
    torch.manual_seed(0)
    module, x = Block(), torch.randn(3, 5, 16)
    expected = gradients(module, module, x)
    model, seen = compiled(module)
    found = gradients(lambda t: torch.utils.checkpoint.checkpoint(model, t, use_reentrant=False), module, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    inside: list[Seen] = []
    whole: Any = torch.compile(
        lambda t: torch.utils.checkpoint.checkpoint(module, t, use_reentrant=False), backend=backend, options={"rest": "eager", "report": inside.extend}
    )
    torch.testing.assert_close(gradients(whole, module, x), expected, rtol=1e-4, atol=1e-4)
    assert {s.graph for s in inside if s.taken} == {"forward", "backward"} == {s.graph for s in seen if s.taken}


def test_a_report(golden: Golden) -> None:
    torch.manual_seed(0)
    module, x = Block(), torch.randn(3, 5, 16)
    model, seen = compiled(module)
    with golden.raises(CallError, "not yet"):
        epigen.report(model)
    gradients(model, module, x)
    report = epigen.report(model)
    assert sum(row.count for row in report.rows) == len(seen) == 15
    *table, last = str(report).splitlines()
    assert any(line.startswith("forward") and "15x32x16" in line and line.endswith("v = mm + x0[n]; out0 = v; out0, gelu(v)") for line in table)
    assert any(line.startswith("backward") and line.endswith("left: nothing elementwise follows it") for line in table)
    assert last.startswith("8 of 15 products taken (53 % of their FLOPs); their kernels move ")
    with golden.raises(CallError, "measure"):
        epigen.report(model, measure=True)


def test_a_report_of_functions_and_of_modules_compiled_in_place() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x, w: torch.tanh(x @ w), backend=backend, options={"rest": "eager"})
    function(*drawn((5, 8), (8, 6)))
    assert [row.seen.program for row in epigen.report(function).rows] == ["tanh(mm)"]
    module = Block()
    module.compile(backend=backend, options={"rest": "eager"})
    with torch.no_grad():
        module(torch.ones(5, 16))
    assert {row.seen.program for row in epigen.report(module).rows} >= {"gelu(mm + x0[n])"}
    plain = nn.Linear(8, 6)
    for other, said in ((plain, "a Linear was given"), (torch.relu, "a builtin"), (torch.compile(plain), "compiled with backend 'inductor' was given")):
        with pytest.raises(CallError, match=said):
            epigen.report(other)


_AGAIN = """
import sys
import torch
from torch.nn import functional as F
import epigen
from epigen.training.backend import backend

torch.manual_seed(0)
x, v, w = (torch.randn(shape, requires_grad=True) for shape in ((6, 8), (8, 16), (16, 32)))
def function(x, v, w):
    return F.gelu(F.relu(x @ v) @ w) + 1
compiled = torch.compile(function, backend=backend)
found = compiled(x, v, w)
found.sum().backward()
torch.testing.assert_close(found, function(x, v, w))
counted = torch._dynamo.utils.counters["inductor"]
print(counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"], counted["fxgraph_cache_bypass"])
print(epigen.report(compiled))
"""


def test_a_second_process_compiles_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor has kept both graphs, and the report says so; for another tuning database it makes them anew. Both processes are new: what others here have
    imported before is in Inductor's keys."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("EPIGEN_DB", str(tmp_path / "db"))
    first, second = (subprocess.run([sys.executable, "-c", _AGAIN], env=os.environ, capture_output=True, text=True, check=False) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("0 2 0") and "forward   1      6x32x16" in first.stdout and "Inductor's cache" not in first.stdout
    assert "bitmask(" in first.stdout and "bits(" in first.stdout
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("2 0 0") and "came from Inductor's cache, with the programs in place" in second.stdout


def test_what_decides_is_in_the_keys_of_inductors_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from epigen.training import backend as module

    keys = {Fusing().uuid(), Fusing("missing").uuid()}
    monkeypatch.setattr(module, "_databases", lambda: "others")
    keys.add(Fusing().uuid())
    monkeypatch.undo()
    assert len(keys) == 3 and Fusing().uuid() in keys
    (tmp_path / "one.py").write_text("x = 1")
    before = module._digest([tmp_path / "one.py"])
    (tmp_path / "one.py").write_text("x = 2")
    assert module._digest([tmp_path / "one.py"]) != before


class Positions(nn.Module):
    """T5's: one of a few rows for each pair of positions."""

    def __init__(self, rows: int, width: int, padding: int | None):
        super().__init__()
        self.table = nn.Embedding(rows, width, padding)

    def forward(self, indices: Tensor) -> Tensor:
        found: Tensor = self.table(indices).permute(2, 0, 1)
        return found


@pytest.mark.parametrize(
    ("rest", "dtype", "padding"),
    [("inductor", torch.float32, None), ("inductor", torch.bfloat16, 2), ("eager", torch.float32, 2), ("eager", torch.float16, None)],
)
def test_the_gradient_of_a_table_whose_rows_many_share(rest: str, dtype: torch.dtype, padding: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a product, on whatever device, where there are many indices a row and few rows, and Inductor's atomic additions else."""
    torch.manual_seed(0)
    model, products = Positions(5, 3, padding).to(dtype), list[str]()
    multiply = embeddings._product

    def counted(x: Tensor, y: Tensor) -> Tensor:
        products.append(f"{list(x.shape)} {list(y.shape)}")
        return multiply(x, y)

    monkeypatch.setattr(embeddings, "_DEVICES", ("cpu",))
    monkeypatch.setattr(embeddings, "_product", counted)
    few, many = [f"[5, 6400] [6400, {9 if dtype == torch.float32 else 3}]"], list[str]()
    # of more rows than columns what names them would be larger than the gradient; which of the two it is matters nothing to Inductor, which compiles for seconds
    for side, most, expected in ((80, 4, few), *([(8, 4, many)] * (rest == "eager")), (80, 1, many)):
        monkeypatch.setattr(embeddings, "_MOST_BESIDE", most)
        indices = torch.randint(5, (side, side))
        grad = torch.randn(3, side, side).to(dtype)
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend, options={"rest": rest, "fx_graph_cache": False})
        found, wanted = (torch.autograd.grad(m(indices), model.table.weight, grad)[0] for m in (run, model))
        exact = torch.autograd.grad(model.double()(indices), model.table.weight, grad.double())[0]
        model.to(dtype)
        assert products == expected
        bound = max(1.1 * (wanted.double() - exact).norm(), torch.finfo(dtype).eps * exact.norm())
        assert (found.double() - exact).norm() <= (1 if expected else 4) * bound  # Inductor's own is in another order
        products.clear()


def test_a_number_that_lies_on_the_cpu_is_no_kernels_input() -> None:
    """As torch lets one stand beside a GPU's tensors: its operation, and those behind it, stay Inductor's, and what comes before is taken."""

    def function(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ w)
        return y, y.exp() * scale

    with FakeTensorMode():
        x, w = (torch.empty(64, 64, device="cuda:0", dtype=torch.float16) for _ in range(2))
        for device in ("cpu", "cuda:0"):
            graph = make_fx(function)(x, w, torch.empty((), device=device, dtype=torch.float16)).graph
            (found,) = fuse(graph)
            assert found.taken and ("x0" in found.program) == (device != "cpu"), found
            assert [n.target for n in graph.nodes if n.op == "call_function"].count(torch.ops.aten.mul.Tensor) == (device == "cpu")


def test_what_is_left_is_inductors_own() -> None:
    """Activations beside no product are taken apart again: forward Inductor computes them to the bit as it would alone."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        x = F.gelu(x) + F.silu(x) + F.elu(x) + F.hardswish(x) + F.softplus(x) + F.leaky_relu(x)
        return torch.softmax(x @ w, -1)

    x, w = drawn((6, 16), (16, 5))
    found = []
    for chosen in ("inductor", backend):
        torch._dynamo.reset()
        model: Any = torch.compile(function, backend=chosen)
        found.append(model(x, w))
    assert torch.equal(*found)


@pytest.mark.parametrize("rest", ["inductor", "eager"])
def test_inductors_options_hold_where_graphs_are_written_down(rest: str) -> None:
    """Which operations are taken apart hangs on them: with fallback_random a model drops what eager torch drops."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 4)), torch.randn(6, 8)
    torch._dynamo.reset()
    results = []
    for model in (module, torch.compile(module, backend=backend, options={"rest": rest, "fallback_random": True})):
        torch.manual_seed(3)
        results.append(gradients(model, module, x))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_mode_of_inductors_holds_for_what_is_left() -> None:
    """What is fused stays fused: a program is no choice of Inductor's."""
    torch._dynamo.reset()
    seen: list[Seen] = []
    told: list[bool] = []
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    options = dict(torch._inductor.list_mode_options("max-autotune-no-cudagraphs"))
    options |= {"report": seen.extend, "post_grad_custom_pre_pass": lambda _graph: told.append(torch._inductor.config.max_autotune)}
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, backend=backend, options=options)(x), model(x), atol=1e-5)
    assert told == [True] and [s.program for s in seen if s.taken] == ["gelu(mm + x0[n])"]
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, backend=backend, mode="max-autotune-no-cudagraphs")(x), model(x), atol=1e-5)


def test_a_users_own_pass_of_inductors_comes_first() -> None:
    """And is called by epigen's, since torch 2.11 takes no list of passes."""
    torch._dynamo.reset()
    order: list[str] = []
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.randn(4, 8)
    options = {"post_grad_custom_pre_pass": lambda _graph: order.append("own"), "report": lambda _seen: order.append("epigen")}
    assert torch.allclose(torch.compile(model, backend=backend, options=options)(x), model(x), atol=1e-5)
    assert order == ["own", "epigen"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_norms_backward_sums_is_left_to_its_kernel(dtype: torch.dtype) -> None:
    """Which reads the same tiles for the gradient of its input: also where the sums are taken in fp32, and the parameters are not."""
    seen: list[Seen] = []
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 16)).to(dtype)
    x = torch.randn(6, 16, dtype=dtype, requires_grad=True)
    torch.compile(model, backend=backend, options={"rest": "eager", "report": seen.extend})(x).square().sum().backward()
    (taken,) = (s for s in seen if s.graph == "backward" and s.taken)
    assert taken.program.startswith("v = dgelu(mm, x0[m,n]); out0 = v; out0, ") and "bgrad(v)" in taken.program


def test_calls_of_a_graph_ask_for_no_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has taken it already; the way by autograd would take as long as the rest of the call."""
    model, seen = compiled(Block())
    x = torch.randn(6, 16)
    gradients(model, model, x)
    assert any(s.taken and s.graph == "backward" for s in seen)
    monkeypatch.setattr("epigen.training.library.REFUSING", {})
    gradients(model, model, x)


# -- convolutions


class Bottleneck(nn.Module):
    """Convolutions of one element with what follows them in ResNets and MobileNets: norms, activations, a residual, a gate for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.first = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.up, self.last = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.deep(F.relu(self.first(self.down(x)))))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return F.relu(self.last(self.up(y)) + x)


def lies(t: Tensor) -> list[int]:
    """The strides of the dimensions that have any."""
    return [step for extent, step in zip(t.shape, t.stride(), strict=True) if extent > 1]


def same_as_eager(model: Any, module: nn.Module, x: Tensor) -> None:
    found, expected = gradients(model, module, x), gradients(module, module, x)
    largest = max(t.abs().max().item() for t in expected)  # a bias before a norm over the batch has the rounding of others as its gradient
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=5e-5 * largest)
    assert [lies(t) for t in found] == [lies(t) for t in expected]


NORM = "(mm - x0[n]) * (reciprocal(sqrt(x1[n] + 1e-05)) * 1) * x2[n] + x3[n]"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
def test_convolutions_of_one_element(memory: torch.memory_format, training: bool) -> None:
    """In memory where channels lie side by side each is a product; elsewhere those of one row an image alone are, and of the others it is said why they are left."""
    torch.manual_seed(0)
    module, x = Bottleneck().to(memory_format=memory).train(training), torch.randn(3, 16, 4, 5).to(memory_format=memory)
    model, seen = compiled(module)
    same_as_eager(model, module, x)
    forward, backward = ({s.shape: s.program or s.why for s in seen if s.graph == graph} for graph in ("forward", "backward"))
    assert len(forward) == 5 and len(backward) == 10 and forward[60, 8, 72] == "a convolution with a kernel of 3x3"
    assert forward[3, 4, 8] == "relu(mm + x0[n])" and forward[3, 8, 4] == "mm + x0[n]"
    assert backward[3, 4, 8].endswith("out0, bgrad(v)") and backward[8, 4, 3] == "nothing elementwise follows it"
    if memory == torch.contiguous_format:
        assert {found[60, 16, 8] for found in (forward, backward)} == {CHANNELS_LAST} == {forward[60, 8, 16], backward[60, 8, 16], backward[16, 8, 60]}
    elif training:  # norms over the batch come next, and read all rows first
        assert forward[60, 8, 16] == "nothing elementwise follows it" and forward[60, 16, 8] == "mm + x0[n]"
        assert backward[60, 16, 8] == "x0[m,n] + mm"
    else:
        assert forward[60, 8, 16] == f"mm, relu({NORM})" and forward[60, 16, 8].startswith("v = mm + x0[n]; out0 = v; out0, relu((v - x1[n]) * ")
        assert backward[60, 16, 8] == "x0[m,n] + mm"


def test_sums_of_what_is_written_for_nobody_else_stay() -> None:
    """Of a norm's parameters, where its statistics are those of the model: no kernel that comes next reads the tile."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)).to(memory_format=torch.channels_last).eval()
    model, seen = compiled(module)
    same_as_eager(model, module, torch.randn(2, 8, 3, 5).to(memory_format=torch.channels_last))
    (program,) = (s.program for s in seen if s.graph == "backward" and s.taken)
    assert program == ("v = drelu(mm, ~(x0[m,n] <= 0)); v1 = rsqrt(x3[n] + 1e-05); bgrad(v), v * (v1 * x4[n]), bgrad(v * (x1[m,n] - x2[n])) * v1")


def test_convolutions_under_inductor() -> None:
    torch.manual_seed(0)
    module = Bottleneck().to(memory_format=torch.channels_last).eval()
    torch._dynamo.reset()
    same_as_eager(torch.compile(module, backend=backend), module, torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last))


def test_convolutions_of_several_batches_and_images() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return F.silu(F.conv2d(x, w, b) * 0.5) + x.mean((1, 2, 3), keepdim=True)

    first, second = drawn((2, 8, 3, 5), (6, 8, 1, 1), (6,)), drawn((4, 8, 7, 6), (6, 8, 1, 1), (6,))
    found = agree(function, *first, dynamic=True, again=tuple(second))
    assert found["forward (30, 6, 8)"] == "v = mm + x0[n]; out0 = v; out0, silu(v * 0.5) + x1[m]" and len(found) == 3  # compiled once


def test_extents_that_vary_and_are_computed_of_others() -> None:
    """Forward those that a stride leaves, and backward those of what was kept."""

    def function(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        y = F.conv2d(x.contiguous(memory_format=torch.channels_last), w, stride=2, padding=1)
        return F.relu(F.conv2d(F.silu(F.conv2d(y, v)), u))

    first, second = drawn((2, 3, 9, 12), (8, 3, 3, 3), (6, 8, 1, 1), (4, 6, 1, 1)), drawn((4, 3, 16, 7), (8, 3, 3, 3), (6, 8, 1, 1), (4, 6, 1, 1))
    found = agree(function, *first, dynamic=True, again=tuple(second))
    assert found["forward (60, 6, 8)"] == "mm, silu(mm)" and found["forward (60, 4, 6)"] == "relu(mm)"
    assert found["backward (60, 6, 4)"].startswith("dsilu(mm") and len(found) == 9  # compiled once
    assert found["forward (60, 8, 27)"] == "a convolution with a kernel of 3x3"


def test_convolutions_of_other_dimensions_and_of_a_part_of_the_channels() -> None:
    def sequence(x: Tensor, w: Tensor) -> Tensor:
        return F.tanh(F.conv1d(x.transpose(1, 2), w))

    def volume(x: Tensor, w: Tensor) -> Tensor:
        return F.tanh(F.conv3d(x.contiguous(memory_format=torch.channels_last_3d), w))

    def part(x: Tensor, w: Tensor) -> Tensor:
        return F.tanh(F.conv2d(x.contiguous(memory_format=torch.channels_last)[:, 2:10], w))

    boxes = drawn((2, 8, 3, 4, 5), (6, 8, 1, 1, 1))
    kept = volume(*boxes).is_contiguous(memory_format=torch.channels_last_3d)  # which torch's convolution does on several threads, and on one not
    assert agree(volume, *boxes)["forward (120, 6, 8)"] == ("tanh(mm)" if kept else CHANNELS_LAST)
    assert agree(part, *drawn((2, 12, 4, 5), (6, 8, 1, 1)))["forward (40, 6, 8)"] in ("tanh(mm)", CHANNELS_LAST)
    assert agree(sequence, *drawn((2, 5, 8), (6, 8, 1)))["forward (10, 6, 8)"] in ("tanh(mm)", CHANNELS_LAST)


def test_convolutions_of_other_kinds_are_named() -> None:
    def left(function: Any, *shapes: tuple[int, ...]) -> str:
        return agree(lambda x, w: F.relu(function(x.contiguous(memory_format=torch.channels_last), w)), *drawn(*shapes))["forward (18, 8, 8)"]

    shapes = (2, 8, 3, 3), (8, 8, 1, 1)
    assert left(lambda x, w: F.conv2d(F.pad(x, (0, 2, 0, 2)), w, stride=2), *shapes).startswith("a convolution of stride 2x2 and padding 0x0")
    assert left(F.conv_transpose2d, *shapes) == "a transposed convolution with a kernel of 1x1"
    assert left(lambda x, w: F.conv2d(x, w, groups=2), (2, 16, 3, 3), shapes[1]) == "a convolution with a kernel of 1x1 in 2 groups"


def _graph_of(function: Any, *given: Tensor) -> Any:
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*given).graph


def test_what_is_left_of_convolutions_is_what_it_was() -> None:
    """The same nodes of one graph; and of a backward that a program takes a part of, all others."""
    x, w, b = (t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in drawn((2, 8, 3, 5), (6, 8, 1, 1), (6,)))
    aten = torch.ops.aten

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return aten.cumsum(aten.convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).double(), 0)

    def backward(g: Tensor, x: Tensor, w: Tensor) -> Any:
        dx, dw, db = aten.convolution_backward(g, x, w, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
        return dx.cumsum(0), dw, db

    def taken(g: Tensor, x: Tensor, w: Tensor) -> Any:
        dx, dw, db = aten.convolution_backward(g, x, w, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
        return aten.threshold_backward(dx, x, 0), dw, db

    g = F.conv2d(x, w, b)
    for graph in (_graph_of(forward, x, w, b), _graph_of(backward, g, x, w)):
        before = str(graph)
        assert {s.why for s in fuse(graph)} <= {"nothing elementwise follows it", "the kernel that reads it next does what follows it as well"}
        assert str(graph) == before
    graph = _graph_of(taken, g, x, w)
    assert [s.program or s.why for s in fuse(graph)] == ["drelu(mm, ~(x0[m,n] <= 0))", "nothing elementwise follows it"]
    (rest,) = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert rest.args[10] == [False, True, True] and {user.args[1] for user in rest.users} == {1, 2}


def test_what_a_product_reads_lies_as_it_did() -> None:
    """A head's keys, copied to where the product of an attention wants them: that product of others is slower, and the copy a kernel that computes what it copies as well."""

    def keys(x: Tensor, w: Tensor, queries: Tensor) -> Tensor:
        heads = (torch.tanh(x @ w) * 0.3).view(2, 5, 3, 4).permute(0, 2, 3, 1)
        return torch.bmm(queries, heads.contiguous().view(6, 4, 5))

    graph = _graph_of(keys, *drawn((10, 8), (8, 12), (6, 5, 4)))
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    first, second = fuse(graph)
    assert (first.why, second.taken) == ("the kernel that reads it next does what follows it as well", False)
    read = product.args[1]
    assert isinstance(read, torch.fx.Node) and read.meta["val"].stride() == (20, 5, 1)
    (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert read.args[0] is copy and copy.meta["val"].is_contiguous()


def test_results_lie_as_eagers_where_torch_runs_the_rest() -> None:
    """Also where rows and columns have changed places, and were to be put so in memory."""
    x, w = drawn((5, 8), (8, 6))
    for function in (lambda x, w: F.tanh(x @ w).t().contiguous(), lambda x, w: F.tanh(x @ w).view(5, 2, 3).transpose(0, 1).contiguous()):
        torch._dynamo.reset()
        found = torch.compile(function, backend=backend, options={"rest": "eager"})(x, w)
        torch.testing.assert_close(found, function(x, w))
        assert found.is_contiguous()


# -- masks and biases of positions


class _Positions(nn.Module):
    """A layer, and what is computed of the numbers of its rows and columns."""

    def __init__(self, after: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.linear, self.after = nn.Linear(16, 24), after

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.after(y, torch.arange(y.shape[-2])[:, None], torch.arange(y.shape[-1]))


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize(
    ("after", "read"),
    [
        (lambda y, m, n: torch.where(n <= m, F.gelu(y), 0.0), "n <= m"),
        (lambda y, m, n: torch.where((n <= m) & (m - n < 5), y, -1e4), ""),
        (lambda y, m, n: F.silu(y) - 0.5 * (m - n).abs(), "abs(m - n)"),
    ],
    ids=["causal", "sliding", "alibi"],
)
def test_what_is_computed_of_positions_reads_no_mask(after: Callable[[Tensor, Tensor, Tensor], Tensor], read: str, lead: tuple[int, ...]) -> None:
    """Of several matrices each counts its own rows."""
    torch.manual_seed(0)
    module, x = _Positions(after), torch.randn(*lead, 20, 16)
    expected = gradients(module, module, x)
    model, seen = compiled(module)
    torch.testing.assert_close(gradients(model, module, x), expected, rtol=1e-4, atol=1e-4)
    (forward,) = [s for s in seen if s.graph == "forward"]
    assert forward.taken and read in forward.program, forward  # a mask of two conditions is kept for the backward, and so read
    with torch.no_grad():
        model, seen = compiled(module)
        torch.testing.assert_close(model(x), expected[0], rtol=1e-4, atol=1e-4)
    assert [(read or "m - n < 5") in s.program and "x1[m,n]" not in s.program for s in seen] == [True]


@pytest.mark.parametrize("extents", [(20, 24), (1, 20, 24)], ids=str)
def test_position_embeddings_are_added_by_the_layer(extents: tuple[int, ...]) -> None:
    """The same for all sequences, and trained."""
    torch.manual_seed(0)
    module, x = _Positions(lambda y, _m, _n: y), torch.randn(3, 20, 16)
    module.embedded = nn.Parameter(torch.randn(extents))
    module.after = lambda y, _m, _n: F.gelu(y + module.embedded)
    expected = gradients(module, module, x)
    model, seen = compiled(module)
    torch.testing.assert_close(gradients(model, module, x), expected, rtol=1e-4, atol=1e-4)
    (forward,) = [s for s in seen if s.graph == "forward"]
    assert forward.taken and "[m,n]" in forward.program
