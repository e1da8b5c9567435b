"""A cache of what was worked out for tensors: found again, by one guard, for similar ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from epigen.runtime.fast_call import Check, guard

DEVICES = ("cpu", "cuda")
"""Of whose tensors anything is remembered."""

_RECENT = 16
"""Calls of other shapes, or in other modes, that one is compared with in turn."""

State = tuple[bool, bool, torch.dtype | None]
"""What torch's own state is, as far as results hang on it: whether gradients are recorded, inference mode, autocast's dtype."""


def state(device: str) -> State:
    """device: one of DEVICES, or another, for which there is no autocast here."""
    autocast = torch.get_autocast_dtype(device) if device in DEVICES and torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


Value = TypeVar("Value")


class GuardedCache(Generic[Value]):
    """Values that were worked out for tensors, for similar ones: by one comparison in place of each check."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: tuple[tuple[State, Check, Value], ...] = ()

    def get(self, now: State, tensors: Sequence[Tensor]) -> Value | None:
        for then, check, value in self.seen:
            if then == now and check(*tensors):
                return value
        return None

    def put(self, now: State, tensors: Sequence[Tensor], value: Value) -> None:
        """In place of what was there of such tensors."""
        others = self.seen
        for i, (then, check, _) in enumerate(others):
            if then == now and check(*tensors):
                self.seen = ((now, check, value), *others[:i], *others[i + 1 :])
                return
        new = likeness(tensors)
        if new is not None:
            self.seen = ((now, new, value), *others)[:_RECENT]


def likeness(tensors: Sequence[Tensor]) -> Check | None:
    """Whether as many tensors are like these, as `guard` has it, and the same one where these are; None where torch cannot tell."""
    first: dict[int, int] = {}
    twins = [(i, first[id(t)]) for i, t in enumerate(tensors) if first.setdefault(id(t), i) != i]
    check = guard([tensors[i] for i in first.values()])
    return check if check is None or not twins else _with_twins(check, list(first.values()), twins)


def _with_twins(check: Check, places: Sequence[int], twins: Sequence[tuple[int, int]]) -> Check:
    """Of tensors some of which are the same one, and have to be again. places: of each the first."""
    return lambda *tensors: all(tensors[i] is tensors[j] for i, j in twins) and check(*(tensors[i] for i in places))
