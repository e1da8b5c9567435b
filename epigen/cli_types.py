"""Parameter types that several commands share."""

from __future__ import annotations

import re
from typing import Any

import click

from epigen import dtypes
from epigen.errors import CallError


class Shape(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """MxNxK"""

    name = "MxNxK"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, int, int]:
        from epigen.tuning.asked import shape_of

        try:
            return shape_of(value)
        except CallError as error:
            self.fail(str(error), param, context)


class Dtype(click.ParamType):  # type: ignore[type-arg]
    """An operand's dtype, by epigen's name or by torch's; epigen's comes out."""

    name = "dtype"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002  # the names are in small letters
        return f"[{'|'.join(t.name for t in dtypes.OPERANDS)}]"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> str:
        from epigen.tuning.asked import dtype_of

        try:
            return dtype_of(value)
        except CallError as error:
            self.fail(str(error), param, context)


class Devices(click.ParamType):  # type: ignore[type-arg]
    """0,1 or all: indices of GPUs."""

    name = "0,1|all"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...] | str:
        if value == "all" or isinstance(value, tuple):
            return value  # type: ignore[no-any-return]
        if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", str(value), re.ASCII):
            self.fail(f"{value!r} is neither 'all' nor a list of GPUs such as 0,1", param, context)
        return tuple(map(int, str(value).split(",")))
