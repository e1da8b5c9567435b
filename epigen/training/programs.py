"""The steps that follow a product, traced -> the text of their program, where the language has them.

Steps that part the columns make a program of two: what is computed of all columns, and of that what is computed of both parts.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

from epigen.errors import EpigenError
from epigen.ir.program import MOST_PROGRAMS, graph_of
from epigen.training import deferred
from epigen.training.deferred import Argument, Ref, Step, Taken
from epigen.training.halved import text_of_parts

_ROWS, _COLUMNS = 6, 7
"""Extents of the tensors on which steps are traced: a program is the same whatever they are."""

_PRODUCT, _LEFT, _RIGHT = "mm", "left", "right"
"""What programs call the product, and the parts of its columns."""

_VALUE = re.compile(r"\bv(\d*)\b")
"""The names of values that a traced program uses twice."""


class _Call(NamedTuple):
    """A step, as far as its program hangs on it. places: of what it gives."""

    func: Any
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    dtype: torch.dtype
    in_place: bool
    second: bool
    views: tuple[int | None, ...]
    way: str
    places: tuple[int, ...]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return (*self.args, *(value for _, value in self.kwargs))

    def parts(self, needed: set[int]) -> set[int]:
        """Which parts it gives of those places, or reads itself."""
        if not self.way:
            return set()
        return {part for place, part in zip(self.places, self.views, strict=True) if place in needed and part is not None} if self.views else {0, 1}


def program(bias: torch.dtype | None, dtype: torch.dtype, steps: Sequence[Step]) -> tuple[str, str]:
    """The text for the value that the last step gives, or why there is none. Of one that hangs on one part of the columns alone the text says what is computed of that.

    bias: its dtype, if there is one. dtype: of the product.
    """
    calls: list[_Call] = []
    count = 1
    for s in steps:
        places = tuple(range(count, count + (len(s.views) or 1)))
        count += len(places)
        func, kwargs = (None, ()) if s.views else (s.func, tuple(s.kwargs.items()))
        calls.append(_Call(func, s.args, kwargs, s.dtype, s.in_place, s.second, s.views, s.way, places))
    needed, read = {count - 1}, list[_Call]()
    for call in reversed(calls):
        if not needed.isdisjoint(call.places):
            read.insert(0, call)
            needed |= {a.place for a in call.arguments if isinstance(a, Ref)}
    try:
        return _program(bias, dtype, tuple(read), frozenset(part for call in read for part in call.parts(needed)))
    except TypeError:  # what cannot be hashed
        return "", "it takes arguments that are not plain"


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _program(bias: torch.dtype | None, dtype: torch.dtype, calls: tuple[_Call, ...], parts: frozenset[int]) -> tuple[str, str]:
    """parts: on which it hangs."""
    split = next((i for i, call in enumerate(calls) if call.way), len(calls))
    whole, why = _whole(bias, dtype, calls[:split], calls[split].args[0] if split < len(calls) else None)
    if not whole or split == len(calls):
        return whole, why
    behind, dtype = calls[split:], calls[split - 1].dtype if split else dtype
    if len(parts) == 1:
        return _traced(behind, dtype, {}, {}, (_PRODUCT, _PRODUCT))
    text, why = _traced(behind, dtype, {}, {_RIGHT: dtype}, (_PRODUCT, _RIGHT))
    if not text:
        return "", why
    *before, last = _VALUE.sub(r"w\1", whole).split("; ")
    text = "; ".join([*before, text_of_parts(behind[0].way, last, text, _LEFT, _RIGHT)])
    try:
        graph_of(text)
    except EpigenError as error:
        return "", str(error).partition("\n")[0]
    return text, ""


def _whole(bias: torch.dtype | None, dtype: torch.dtype, calls: tuple[_Call, ...], of: Argument | None) -> tuple[str, str]:
    """What is computed of all columns. of: the value; by default that which came last."""
    product = _PRODUCT if bias is None else f"{_PRODUCT} + bias"
    if all(call.views for call in calls):
        return product, ""
    return _traced(calls, dtype, {} if bias is None else {"bias": bias}, {}, (), of)


def _traced(
    calls: tuple[_Call, ...], dtype: torch.dtype, columns: Mapping[str, torch.dtype], tiles: Mapping[str, torch.dtype], parts: tuple[str, ...],
    of: Argument | None = None,
) -> tuple[str, str]:  # fmt: skip
    """columns, tiles: what is taken beside what the calls take, "bias" or the second part. parts: what both parts are called. of: as of `_whole`."""
    from epigen.training.traced import trace

    shapes = {"mn": (_ROWS, _COLUMNS), "m": (_ROWS, 1), "n": (_COLUMNS,), "": (), "kn": (_ROWS, _COLUMNS)}  # of what is multiplied its product's
    cpu = torch.device("cpu")
    inputs: dict[str, Any] = {name: torch.empty(shapes["n"], dtype=of_input, device=cpu) for name, of_input in columns.items()}
    inputs |= {name: torch.empty(shapes["mn"], dtype=of_input, device=cpu) for name, of_input in tiles.items()}
    inputs |= {a.name: torch.empty(shapes[a.indices], dtype=a.dtype, device=cpu) for call in calls for a in call.arguments if isinstance(a, Taken)}

    def function(mm: Tensor, **given: Tensor) -> Tensor:
        both = [mm if name == _PRODUCT else given[name] for name in parts]
        values: dict[int, Tensor] = {} if parts else {0: mm + given["bias"] if "bias" in given else mm}
        for call in calls:
            values |= zip(call.places, _called(call, values, given, both), strict=True)
        return values[of.place if isinstance(of, Ref) else calls[-1].places[-1]]

    try:
        traced = trace(function, (_ROWS, _COLUMNS), dtype, cpu, inputs)
    except EpigenError as error:
        said = str(error).partition("\n")[0]
        return "", said.partition("which no epilogue computes: ")[2] or said
    if traced.held:
        return "", "it reads a tensor of its own"
    joined = {a.name: a.indices for call in calls if call.second for a in call.args if isinstance(a, Taken)}
    if {leaf.name for leaf in traced.program.leaves} | set(joined) != set(inputs):
        return "", "its result does not hang on all that it takes"
    text = traced.program.text
    for name in (name for name, indices in joined.items() if indices == "kn"):
        text = text.replace(f"{name}[m,n]", f"dot(a, {name}[k,n])")
    return graph_of(text).text, ""


def _called(call: _Call, values: Mapping[int, Tensor], given: Mapping[str, Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """What a step gives. values: by place. given: by name."""

    def content(argument: Argument) -> Any:
        return values[argument.place] if isinstance(argument, Ref) else given[argument.name] if isinstance(argument, Taken) else argument.value

    if call.views:  # of all columns, of which another step takes parts, what it is of
        return [content(call.args[0]) if part is None else parts[part] for part in call.views]
    if call.second:
        return [functools.reduce(operator.add, map(content, call.args)).to(call.dtype)]
    if call.way:  # which F.glu alone has
        return [(parts[0] * torch.sigmoid(parts[1])).to(call.dtype)]
    named = {name: content(value) for name, value in call.kwargs}
    function = _normed if call.func is F.batch_norm else deferred.functional(call.func) if call.in_place else call.func
    result = function(*map(content, call.args), **(named | {"inplace": False} if "inplace" in named else named))
    if tuple(result.shape) != (_ROWS, _COLUMNS):
        raise EpigenError("it changes the shape")
    return [result.to(call.dtype)]


def _normed(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,  # noqa: ARG001  # as F.batch_norm has it
) -> Tensor:  # fmt: skip
    """A norm by statistics of the model, as arithmetic."""
    if training or mean is None or variance is None:
        raise EpigenError("it takes its statistics of all rows first")
    y = (x - mean) * torch.rsqrt(variance + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
