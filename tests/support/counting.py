"""Work counted rather than timed: the same on a slow machine and on a busy one."""

from __future__ import annotations

import cProfile
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import pytest


class Counted:
    """Counts the Python functions that are called inside its block, those written in C left out; each step of a generator counts as one."""

    def __enter__(self) -> Self:
        self.profile = cProfile.Profile(builtins=False)
        self.profile.enable()
        return self

    def __exit__(self, *_: object) -> None:
        self.profile.disable()

    @property
    def calls(self) -> int:
        return sum(entry.callcount for entry in self.profile.getstats())


def calls(work: Callable[[], object]) -> int:
    """How many Python functions `work` calls, itself included."""
    with Counted() as counted:
        work()
    return counted.calls


def counted(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> Counter[str]:
    """How often functions are called from now on, by name."""
    found: Counter[str] = Counter()

    def count(home: Any, name: str) -> None:
        function = getattr(home, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(home, name, run)

    for home, name in places:
        count(home, name)
    return found
