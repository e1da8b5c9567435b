"""A mapping of bounded size: what was used least recently makes room. For caches that calls of ever new shapes would fill without end."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps `limit` entries. Safe to use from several threads."""

    def __init__(self, limit: int):
        self.limit = limit
        self._held: dict[K, V] = {}  # in the order of use
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: K) -> V | None:
        with self._mutex:
            value = self._held.pop(key, None)
            if value is not None:
                self._held[key] = value
            return value

    def put(self, key: K, value: V) -> V:
        with self._mutex:
            self._held.pop(key, None)
            self._held[key] = value
            if len(self._held) > self.limit:
                del self._held[next(iter(self._held))]
            return value

    def clear(self) -> None:
        with self._mutex:
            self._held.clear()
