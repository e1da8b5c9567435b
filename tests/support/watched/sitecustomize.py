"""Notes who reaches Triton while EPIGEN_TESTS_NOTES names a file: a module's name a line. What other packages import for themselves does not count.

tests/conftest.py has this installed in the tests' own process, and this folder leads the children's import path, where Python imports a
module of this name when it starts.
"""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

NOTES = "EPIGEN_TESTS_NOTES"
_OTHERS = ("", "torch", "triton", "torchao", "compressed_tensors")


def note(who: str) -> None:
    if path := os.environ.get(NOTES):
        with contextlib.suppress(OSError):  # another user's process
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, f"{who}\n".encode())
            os.close(descriptor)


def install() -> None:
    """From now on, for every statement that imports Triton or something of it, also where that has been imported before."""
    imported = builtins.__import__

    def noting(name: str, globals: Mapping[str, Any] | None = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0) -> Any:  # noqa: A002
        if level == 0 and name.partition(".")[0] == "triton":
            who = str((globals or {}).get("__name__", ""))  # what torch generates has none
            if who.partition(".")[0] not in _OTHERS:
                note(who)
        return imported(name, globals, locals, fromlist, level)

    builtins.__import__ = noting


if NOTES in os.environ and __name__ == "sitecustomize":
    install()
