"""A worker that is surprised: by every job that is no number, or, asked for it, before the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def worker(about: Any) -> Callable[[Any], Any]:
    if about is None:
        raise FileNotFoundError(2, "No such file or directory", "/opt/triton/cuobjdump")
    return lambda job: job + about
