"""`torch.compile(model, backend=backend)`: what is taken of a model's forward and backward graphs, and that it computes what eager torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

from epigen.errors import CallError
from epigen.training.backend import Seen, backend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler, which imports what it says to leave


class Block(nn.Module):
    """A transformer's two kinds of feed-forward, with their norms and residuals."""

    def __init__(self, width: int = 16, hidden: int = 32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gate, self.value, self.out = (nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.out(F.silu(self.gate(x)) * self.value(x))


FORWARD = {"v = mm + x0[n]; out0 = v; out0, gelu(v)", "x1[m,n] + (mm + x0[n])", "mm, silu(mm) * x0[m,n]", "x0[m,n] + mm"}
BACKWARD = {
    "mm * x0[m,n], dsilu(mm * x1[m,n], x2[m,n])", "v = x0[m,n] + mm + x1[m,n]; out0 = v; out0, bgrad(v)", "v = dgelu(mm, x0[m,n]); out0 = v; out0, bgrad(v)"
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
    assert {s.program for s in seen if s.taken} >= {"gelu(mm + x0[n])", "silu(mm) * x0[m,n]"}


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
    for options, said in (({"rest": "triton"}, "rest is 'inductor' or 'eager'"), ({"tune": "all"}, "tune is 'missing' or None")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=said) as raised:
            torch.compile(nn.Linear(2, 2), backend=backend, options=options)(torch.ones(1, 2))
        assert isinstance(raised.value, CallError) or "CallError" in str(raised.value)
