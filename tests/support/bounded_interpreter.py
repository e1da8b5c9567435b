"""Triton's interpreter reads and writes wherever a kernel points; here only within the tensors that the kernel was given.

What compute-sanitizer looks for on a GPU is so found without one. As there, a tensor that is part of a larger allocation ends where it ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


class OutOfBounds(Exception):
    """A kernel accessed memory that it was not given."""


@dataclass(frozen=True, slots=True)
class Span:
    """Addresses: of a tensor's first byte, beyond its last, and beyond that of the memory allocated with it, where a packed mask's last word may end."""

    low: int
    high: int
    end: int

    @classmethod
    def of(cls, t: torch.Tensor) -> Span:
        held = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size() if t.numel() else 0
        return cls(t.data_ptr(), t.data_ptr() + held, t.untyped_storage().data_ptr() + t.untyped_storage().nbytes())


class _Running(threading.local):
    """The launch of this thread. spans: None outside of one."""

    spans: list[Span] | None = None


_running = _Running()


def check(pointers: Any, mask: Any) -> None:
    """Raises OutOfBounds if one of the places lies outside of what the launch was given. Arguments as the interpreter has them."""
    if _running.spans is None:
        return
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    at, wanted = np.broadcast_arrays(np.asarray(pointers.data).astype(np.uint64), np.asarray(mask.data).astype(bool))
    at = at[wanted]
    if (at % size).any():
        raise OutOfBounds(f"an address is no multiple of {size}")
    inside = np.zeros(at.shape, dtype=bool)
    for s in _running.spans:
        inside |= (at >= s.low) & (at < s.high) & (at + size <= s.end)
    if not inside.all():
        raise OutOfBounds(f"{size} bytes at {_place(int(at[~inside][0]), _running.spans)}: {int((~inside).sum())} of {at.size} places are outside")


def _place(address: int, spans: list[Span]) -> str:
    """Where an address lies, of the nearest tensor."""
    if any(s.low <= address < s.high for s in spans):
        return "the end of memory"
    far = [(address - s.high, f"{address - s.high} bytes beyond the end of argument {i}") for i, s in enumerate(spans) if address >= s.high]
    far += [(s.low - address, f"{s.low - address} bytes before argument {i}") for i, s in enumerate(spans) if address < s.low]
    return min(far)[1] if far else "no tensor"


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(getattr(value, "base", None), torch.Tensor):  # a descriptor
            yield value.base


def _checked(access: Callable[..., Any], pointers: int, mask: int) -> Callable[..., Any]:
    """pointers, mask: which of the arguments they are, after self."""

    @functools.wraps(access)
    def found(self: Any, *given: Any, **named: Any) -> Any:
        check(given[pointers], given[mask])
        return access(self, *given, **named)

    return found


def bound() -> None:
    """From now on, for every launch under the interpreter."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    if hasattr(executor, "unbounded"):
        return
    for name, pointers, mask in (("create_masked_load", 0, 1), ("create_masked_store", 0, 2), ("create_atomic_rmw", 1, 3)):
        setattr(builder, name, _checked(getattr(builder, name), pointers, mask))
    copied, executor.unbounded = executor._init_args_hst, executor.__call__

    def copy(self: Any, args_dev: Any, kwargs: Any) -> Any:
        positional, named = copied(self, args_dev, kwargs)
        _running.spans = [Span.of(t) for t in _tensors((*positional, *named.values()))]
        return positional, named

    def launch(self: Any, *given: Any, **named: Any) -> Any:
        try:
            return executor.unbounded(self, *given, **named)
        finally:
            _running.spans = None

    executor._init_args_hst, executor.__call__ = copy, launch
