"""Recursion over a tree whose depth is held in a list and on no stack: a thread may have a small one, and a caller may have used most of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

Part = TypeVar("Part")
Found = TypeVar("Found")
Whole = TypeVar("Whole")


def walk(visit: Callable[[Part], Generator[Part, Found, Found]], whole: Generator[Part, Found, Whole]) -> Whole:
    """What the generator `whole` returns. It yields each part whose result it needs, and is sent what `visit` returns of it, which does the same.

    An exception of a part is raised where that was yielded.
    """
    running: list[Generator[Part, Found, Any]] = [whole]
    result: Any = None
    raised: Exception | None = None
    while running:
        try:
            part = running[-1].send(result) if raised is None else running[-1].throw(raised)
        except StopIteration as end:
            running.pop()
            result, raised = end.value, None
        except Exception as error:  # noqa: BLE001 (raised again, one level up)
            running.pop()
            raised = error
        else:
            running.append(visit(part))
            result, raised = None, None
    if raised is not None:
        raise raised
    return result  # type: ignore[no-any-return]
