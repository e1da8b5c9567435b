"""Lines of Inductor's wrapper code that run programs: what they are, that they compute what eager torch does, and who sees an operation all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.utils.flop_counter import FlopCounterMode
from under_torch import APART

from epigen.training import library
from epigen.training.backend import backend
from epigen.training.wrapper import Line

pytestmark = [APART, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own compiler, which imports what it says to leave


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def code_of(function: Callable[..., Tensor], *args: Tensor, dynamic: bool | None = None) -> tuple[Any, list[str]]:
    """What it is compiled to: the function, and the wrapper code, once it agrees with eager torch."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, options={"fx_graph_cache": False})
    found, code = run_and_get_code(compiled, *args)
    torch.testing.assert_close(found, function(*args))
    return compiled, code


def test_a_line_calls_the_kernel_and_not_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x @ w + b)

    compiled, (code,) = code_of(function, drawn(6, 8), drawn(8, 10), drawn(10))
    assert "static=True)" in code and "torch.ops.epigen.fused.default(" not in code
    monkeypatch.setattr(library, "fused", None)
    torch.testing.assert_close(compiled(drawn(6, 8), drawn(8, 10), drawn(10)), function(drawn(6, 8), drawn(8, 10), drawn(10)))


def test_extents_that_vary_are_compared() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x @ w + b)

    compiled, (code,) = code_of(function, drawn(6, 8), drawn(8, 10), drawn(10), dynamic=True)
    assert "static=False)" in code and "torch.ops.epigen.fused.default(" not in code
    for m, k, n in ((6, 8, 10), (9, 8, 10), (5, 7, 3), (9, 8, 10)):
        torch.testing.assert_close(compiled(drawn(m, k), drawn(k, n), drawn(n)), function(drawn(m, k), drawn(k, n), drawn(n)))


def test_a_graph_within_a_graph_has_its_lines_at_the_head_of_the_code() -> None:
    def one(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) + 1

    def other(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w) - 1

    def function(x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, one, other, (x, w))
        return torch.sigmoid(found @ w.t())

    compiled, (code,) = code_of(function, drawn(6, 8).abs(), drawn(8, 10))
    assert code.count("= Line(") == 3
    torch.testing.assert_close(compiled(-drawn(6, 8).abs(), drawn(8, 10)), function(-drawn(6, 8).abs(), drawn(8, 10)))


def test_in_inference_mode_and_with_parameters_nothing_asks_for_a_derivative() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 10), torch.nn.Tanh()).requires_grad_()
    torch._dynamo.reset()
    compiled, x = torch.compile(model, backend=backend), drawn(6, 8)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x).detach(), model(x).detach())


@pytest.mark.parametrize("static", [True, False])
def test_who_is_to_see_an_operation_is_given_it(static: bool) -> None:
    line, args = Line("relu(mm + x0[n])", None, static), ("relu(mm + x0[n])", None, drawn(6, 8), drawn(8, 10), [drawn(10)], [])
    (expected,) = line(*args)
    torch.testing.assert_close(expected, torch.relu(args[2] @ args[3] + args[4][0]))
    with FlopCounterMode(display=False) as counter:
        (found,) = line(*args)
    assert counter.get_total_flops() == 2 * 6 * 8 * 10 and torch.equal(found, expected)
    with torch.profiler.profile(acc_events=True) as profiled:
        line(*args)
    assert "epigen::fused" in {event.key for event in profiled.key_averages()}
    assert torch.equal(line(*args)[0], expected)
