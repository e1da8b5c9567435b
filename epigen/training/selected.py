"""Modules of a model that a user means, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from epigen.errors import CallError


def selected(option: str, names: dict[nn.Module, str], given: Any) -> Callable[[str, nn.Module], bool]:
    """Whether a module, of this name, is meant by an option's value: names or patterns, which mean all that is in those modules too, or a function of name and module.

    None means all. names: of the model's modules. Raises CallError for what names no module.
    """
    if given is None or callable(given):
        return given or (lambda _name, _module: True)
    patterns = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if other := next((p for p in patterns if not isinstance(p, str)), None):
        raise CallError(f"{option}={given!r}: {other!r} names no module; names and patterns are texts, or {option} is a function of name and module")
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names.values()):
            raise CallError(
                f"{option}={pattern!r}: no module of the model has such a name; they are {', '.join(sorted(n for n in names.values() if n)[:8])}, …"
            )

    def inside(name: str, _module: nn.Module) -> bool:
        parts = name.split(".")
        above = [".".join(parts[:n]) for n in range(len(parts) + 1)]
        return any(fnmatch.fnmatchcase(each, pattern) for each in above for pattern in patterns)

    return inside
