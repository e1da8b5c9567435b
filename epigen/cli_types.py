"""Parameter types that several commands share."""

from __future__ import annotations

import re
from typing import Any

import click


class Shape(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """MxNxK"""

    name = "MxNxK"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, int, int]:
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", str(value))
        if not match:
            self.fail(f"{value!r} is not of the form MxNxK, such as 4096x4096x1024", param, context)
        return int(match[1]), int(match[2]), int(match[3])
