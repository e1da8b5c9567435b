"""A model fused, beside the same model as it is: for tests of what `epigen.fuse` computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import epigen
from epigen.training.fuse import Fused


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def agree(model: nn.Module, plain: nn.Module, *inputs: Any) -> None:
    """Results and all gradients, in both modes, of two models that have the same parameters. Three times: a call is checked, written out, and called as written."""
    for mode in (True, False) * 3:
        results = []
        for m in (model.train(mode), plain.train(mode)):
            given = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
            torch.manual_seed(0)
            y = m(*given)
            leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad] + [p for p in m.parameters() if p.requires_grad]
            results.append((y, torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def fused(model: nn.Module, *inputs: Any) -> Fused:
    """What was done, once results, gradients, parameters, modules and state are as before."""
    before, parameters, modules = copy.deepcopy(model), list(model.parameters()), [(m, type(m)) for m in model.modules()]
    found = epigen.fuse(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(m is n and type(m) is of for m, (n, of) in zip(model.modules(), modules, strict=True))
    assert list(model.state_dict()) == list(before.state_dict())
    agree(model, before, *(inputs or (drawn(3, 8),)))
    return found


class Block(nn.Module):
    """forward: what the test is about."""

    def __init__(self, forward: Callable[..., Any], **modules: Any):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.how = forward

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.how(self, x, mask)
