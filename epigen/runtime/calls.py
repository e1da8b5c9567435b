"""The calls that a kernel has made: one bounded memory by what they have in common, and in front of it the newest, which are compared with and need no key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epigen.lru_cache import LruCache
from epigen.runtime.fast_call import Again
from epigen.runtime.prepared import Prepared

_KEPT = 1024
"""Of other shapes, dtypes or strides. To prepare one again compiles nothing, and takes two thirds of a millisecond of the host (0.5 to 0.8 for a
new M; Triton 3.6 and 3.9 without a GPU, 2026-11)."""
_NEWEST = 16
"""Calls that are compared with one after another, a third of a microsecond each, before the key is looked up."""


@dataclass(frozen=True, slots=True)
class Known:
    """Calls that are alike. again: what makes them once more, by the type of their `out`; it holds what is prepared, which therefore does not hold it."""

    prepared: Prepared
    again: dict[type, Again] = field(default_factory=dict)


class Calls(LruCache[tuple[Any, ...], Known]):
    """Safe to use from several threads. newest: by the type of `out`, what was called last, the newest first."""

    def __init__(self) -> None:
        super().__init__(_KEPT)
        self.newest: dict[type, tuple[tuple[Again, Prepared], ...]] = {}

    def is_new(self, again: Again, form: type) -> bool:
        """Whether calls are compared with it."""
        return any(known is again for known, _ in self.newest.get(form, ()))

    def remember(self, known: Known, form: type, again: Again) -> None:
        """Have the next call like this one found by comparison."""
        known.again[form] = again
        self.newest[form] = ((again, known.prepared), *self.newest.get(form, ()))[:_NEWEST]

    def clear(self) -> None:
        self.newest.clear()
        super().clear()
