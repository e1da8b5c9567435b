"""Views of a product's result, told by where their elements lie: all of its columns in rows of another shape, or one of the two parts of them that a program knows.

Whatever function of torch's gives a view, such as `chunk`, `split`, an index or `unbind`, is called once of a tensor without contents for each shape and arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigen.ir.program import MOST_PROGRAMS
from epigen.lang.syntax import WAYS
from epigen.training.elements import channels_second, rows_first
from epigen.training.halved import slices


class View(NamedTuple):
    """shape: as torch has it. columns: how many of a product's it has. part: which of two parts it is; None of all columns. unflattened: whether these are two
    dimensions for the while, of which the parts can be taken."""

    shape: tuple[int, ...]
    columns: int
    part: int | None = None
    unflattened: bool = False


@dataclass(frozen=True, slots=True)
class Viewed:
    """What a function gives. way: how its parts lie, one of WAYS; "" of all columns. several: in a tuple."""

    views: tuple[View, ...]
    way: str
    several: bool

    @property
    def parts(self) -> tuple[int | None, ...]:
        return tuple(view.part for view in self.views)


def viewed(func: Any, of: View, moved: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Viewed | None:
    """What a function of torch's gives of a tensor that lies in one piece; None where that is no view of it, or one of another kind. of: that tensor, all columns.

    moved: whether its channels come second in its shape, and last in memory. args: those after it.
    """
    try:
        given = tuple(map(_frozen, args)), tuple((name, _frozen(value)) for name, value in kwargs.items())
    except _Other:
        return None
    return _viewed(func, of, moved, *given)


class _Other(Exception):
    """An argument that is none of a view's."""


class _Slice(NamedTuple):
    start: int | None
    stop: int | None
    step: int | None


def _frozen(value: Any) -> Any:
    """What can be compared. Raises _Other for what views are not asked for by, such as tensors and truth values, of which each is equal to a number."""
    if value is None or value is Ellipsis or type(value) is int:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    if type(value) is slice:
        return _Slice(_frozen(value.start), _frozen(value.stop), _frozen(value.step))
    raise _Other


def _thawed(value: Any) -> Any:
    if type(value) is _Slice:
        return slice(*value)
    return tuple(map(_thawed, value)) if type(value) is tuple else value


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _viewed(func: Any, of: View, moved: bool, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Viewed | None:
    if func is Tensor.as_strided or func is torch.as_strided:  # which goes by how the tensor lies, and not by its shape
        return None
    rank = len(of.shape)
    rows = [of.shape[d] for d in rows_first(rank)] if moved else of.shape
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        itself = torch.empty(rows, device="meta")
        base = itself.permute(channels_second(rank)) if moved else itself
        try:
            results = func(base, *map(_thawed, args), **{name: _thawed(value) for name, value in kwargs})
        except (RuntimeError, TypeError, IndexError, ValueError):  # as which it comes when it is called in fact
            return None
        several = type(results) is tuple
        found = [_found(r, base, of, moved) for r in (results if several else (results,))]
    views, ways = [view for view, _ in found if view is not None], {way for _, way in found}
    if not views or len(views) < len(found) or len(ways) > 1 or (several and ways == {""}):
        return None
    return Viewed(tuple(views), ways.pop(), several)


def _found(result: Any, base: Tensor, of: View, moved: bool) -> tuple[View | None, str]:
    """A view, and how it parts the columns."""
    nothing = None, ""
    if not isinstance(result, Tensor) or result is base or result.dtype != base.dtype or result.untyped_storage()._cdata != base.untyped_storage()._cdata:
        return nothing
    shape, rank, columns = tuple(result.shape), len(of.shape), of.columns
    if moved:
        if len(shape) != rank:
            return nothing
        result = result.permute(rows_first(rank))
    if result.numel() == base.numel():
        unflattened = shape[-1:] != (columns,)
        if result.storage_offset() or not result.is_contiguous() or moved or (unflattened and shape[-2:] not in ((2, columns / 2), (columns / 2, 2))):
            return nothing
        return View(shape, columns, unflattened=unflattened), ""
    if not shape or 2 * result.shape[-1] != columns or 2 * result.numel() != base.numel():
        return nothing
    whole = torch.empty((*result.shape[:-1], columns), device="meta")
    for way in WAYS:
        for part, at in enumerate(slices(way, columns)):
            if _lie_alike(result, whole[..., slice(*at)]):
                return View(shape, columns // 2, part), way
    return nothing


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Of tensors of one shape."""
    return a.storage_offset() == b.storage_offset() and all(x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)
