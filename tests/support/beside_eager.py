"""What functions and models compute under `torch.compile(model, backend=backend)`, beside eager torch, and what became of their products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

from epigen.training.backend import backend
from epigen.training.report import Seen


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


def agree(function: Any, *given: Tensor, dynamic: bool | None = None, again: tuple[Tensor, ...] = ()) -> dict[str, Any]:
    """That results and gradients are eager's; again: a second call's arguments. Returns what was taken forward and backward, by the product's shape."""
    torch._dynamo.reset()
    seen: list[Seen] = []
    model = torch.compile(function, backend=backend, dynamic=dynamic, options={"rest": "eager", "report": seen.extend})
    for arguments in (given, again) if again else (given,):
        mine, theirs = ([t.clone().requires_grad_(t.is_floating_point()) for t in arguments] for _ in range(2))
        found, expected = model(*mine), function(*theirs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close([t.grad for t in mine], [t.grad for t in theirs], rtol=1e-3, atol=1e-4)
    return {f"{s.graph} {s.shape}": s.program or s.why for s in seen}


def made(name: str) -> zoo.Made:
    if missing := zoo.missing(name):
        pytest.skip(f"{missing} is not installed")
    with zoo.quiet():
        return zoo.ZOO[name]()


def compiled(model: nn.Module, seen: list[Seen], **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, options={"rest": "eager", "report": seen.extend}, **options)


def gradients(call: Any, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of what has any."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = zoo.scalar(call(**inputs))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def agreeing(model: zoo.Made) -> tuple[Any, list[Seen]]:
    """A model compiled, whose loss and gradients are eager's and in one graph, and what became of its products."""
    loss, expected = gradients(model.model, model.model, model.inputs)
    seen: list[Seen] = []
    call = compiled(model.model, seen)
    torch._dynamo.utils.counters.clear()
    found_loss, found = gradients(call, model.model, model.inputs)
    torch.testing.assert_close(found_loss, loss, rtol=1e-4, atol=1e-5)
    assert not torch._dynamo.utils.counters["graph_break"]
    largest = max(g.norm().item() for g in expected.values())
    assert set(expected) <= set(found) | {n for n, g in expected.items() if g.norm() < 1e-5 * largest}
    for parameter, gradient in found.items():
        if parameter in expected:
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-3, atol=1e-5 * max(1.0, largest), msg=lambda text, p=parameter: f"{p}: {text}")
    return call, seen
