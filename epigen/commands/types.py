"""Parameter types that several commands share."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import click

from epigen import dtypes
from epigen.codegen.spec import INVARIANT, ROUNDING, SPARSE
from epigen.errors import CallError
from epigen.runtime.device import Machine
from epigen.shapes import Shape

pass_machine = click.make_pass_decorator(Machine, ensure=True)
"""Gives a command the machine that its context holds, which is this one unless the caller of the command line has put another there."""


def say(text: str) -> None:
    """Talk, beside the results on standard output."""
    click.echo(text, err=True)


class Program(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """A program of the language."""

    name = "PROGRAM"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> str:  # noqa: ARG002
        return str(value).removeprefix(_BLANK)


class ProgramCommand(click.Command):
    """A command whose programs may begin with a minus, as options do."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        valued = {name for p in self.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
        marked = []
        for number, arg in enumerate(args):
            if arg == "--":
                marked += args[number:]
                break
            follows = number > 0 and args[number - 1] in valued
            marked.append(f"{_BLANK}{arg}" if not follows and _negated(arg) else arg)
        return super().parse_args(context, marked)


_BLANK = " "  # before a program that begins with a minus: it is then no option


def _negated(arg: str) -> bool:
    """Whether an argument that looks like an option is a program. -oFILE is the option, unless it is written as no file is."""
    return arg.startswith("-") and re.search(r"\bmm\b", arg) is not None and (not arg.startswith("-o") or re.search(r"[ *+()]", arg) is not None)


class Extents(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """MxNxK, or BxMxNxK of B products"""

    name = "[Bx]MxNxK"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Shape:
        from epigen.tuning.request import shape_of

        try:
            return shape_of(value)
        except CallError as error:
            self.fail(str(error), param, context)


class Dtype(click.ParamType):  # type: ignore[type-arg]
    """A dtype by epigen's name or by torch's; epigen's comes out. of_weight: of a weight of fewer bits, and not of the operands."""

    def __init__(self, of_weight: bool = False):
        self.name, self.of_weight = "weight" if of_weight else "dtype", of_weight

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002  # the names are in small letters
        return f"[{'|'.join(t.name for t in (dtypes.WEIGHTS if self.of_weight else dtypes.OPERANDS))}]"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> str:
        from epigen.tuning.request import dtype_of, weight_of

        try:
            return weight_of(value) if self.of_weight else dtype_of(value)
        except CallError as error:
            self.fail(str(error), param, context)


def dtype_option(command: Any) -> Any:
    help_text = "dtype of the operands and inputs, by epigen's name or torch's"
    return click.option("--dtype", "dtype_name", default="fp16", show_default=True, type=Dtype(), help=help_text)(command)


def weight_option(command: Any) -> Any:
    help_text = "dtype of b where it is a weight of fewer bits, which is multiplied in --dtype"
    return click.option("--weight", "weight_name", type=Dtype(of_weight=True), help=help_text)(command)


def precision_option(command: Any) -> Any:
    help_text = "of fp32 operands ieee or tf32; of fp8 ones fast_accum"
    return click.option("--precision", type=click.Choice(dtypes.PRECISIONS), default="ieee", show_default=True, help=help_text)(command)


def invariant_option(command: Any) -> Any:
    return click.option("--invariant", type=click.Choice(INVARIANT), help="m: a row of the result has the same bits whatever M is")(command)


def sparse_option(command: Any) -> Any:
    help_text = "the operand of whose values two of four are 0, as torch.sparse.to_sparse_semi_structured makes it"
    return click.option("--sparse", type=click.Choice(SPARSE), help=help_text)(command)


def numerics_options(command: Any) -> Any:
    """--precision, --invariant and --rounding, which the command gets as `numerics`, by the names that `epigen.compile` has for them."""

    @functools.wraps(command)
    def with_numerics(*given: Any, precision: str, invariant: str | None, rounding: str | None, **options: Any) -> Any:
        return command(*given, numerics={"precision": precision, "invariant": invariant, "rounding": rounding}, **options)

    eager = click.option("--rounding", type=click.Choice(ROUNDING), help="eager: each operation is rounded as eager torch rounds it")
    return precision_option(invariant_option(eager(with_numerics)))


class Seconds(click.FloatRange):
    """A time that is a number: "nan" is none, and compares with nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1e6)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        seconds: float = super().convert(value, param, context)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, context)
        return seconds


class Devices(click.ParamType):  # type: ignore[type-arg]
    """0,1 or all: indices of GPUs."""

    name = "0,1|all"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...] | str:
        if value == "all" or isinstance(value, tuple):
            return value  # type: ignore[no-any-return]
        if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", str(value), re.ASCII):
            self.fail(f"{value!r} is neither 'all' nor a list of GPUs such as 0,1", param, context)
        return tuple(map(int, str(value).split(",")))
