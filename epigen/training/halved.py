"""Functions of torch's that part the product's columns, such as `F.glu`, or silu of one half times the other: as functions of both parts.

What a traced function calls before it parts a value is called of each part, with the same part of what has an element for each column besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from epigen.lang.parser import parse
from epigen.lang.substitute import is_product, substituted
from epigen.lang.syntax import HALVES, WAYS, Expr, Name, to_text

_aten: Any = torch.ops.aten
_PARTING = (_aten.split.Tensor, _aten.slice.Tensor, _aten.glu.default)
_SAME = ("detach", "alias", "clone", "_to_copy")


Slice = tuple[int, int, int]
"""Columns: from, to and at which distance."""


def slices(way: str, columns: int) -> tuple[Slice, Slice]:
    """Both parts of so many columns."""
    return ((0, columns // 2, 1), (columns // 2, columns, 1)) if way == HALVES else ((0, columns, 2), (1, columns, 2))


@dataclass(frozen=True, slots=True)
class _Both:
    """Both parts of a value."""

    first: Tensor
    second: Tensor


def text_of_parts(way: str, whole: str, text: str, first: str, second: str) -> str:
    """The program that parts a value and computes something of both parts. whole: the value's text. text: of a program of one part, its mm, and of the other, which is
    its tile `second`. first, second: what both are to be called."""

    def instead(expr: Expr) -> Expr | None:
        if is_product(expr):
            return Name(first, expr.span)
        return Name(second, expr.span) if isinstance(expr, Name) and expr.name == second and expr.indices is not None else None

    return f"{first}, {second} = {way}({whole}); {to_text(substituted(parse(text), instead))}"


class _Unparted(Exception):
    """A value is used whole."""


def way_of(module: fx.GraphModule, given: Sequence[Tensor]) -> str:
    """The way in which a traced function parts its first argument; "" where it does not, or does more with it. given: what it is called with, without contents."""
    if not any(node.target in _PARTING for node in module.graph.nodes):
        return ""
    product, *others = given
    columns = product.shape[-1]
    if columns % 2:
        return ""
    for way in WAYS:
        try:
            of_parts(module, way, columns)(*(product[..., : columns // 2] for _ in range(2)), *others)
        except _Unparted:
            continue
        return way
    return ""


def of_parts(module: fx.GraphModule, way: str, columns: int) -> Callable[..., Any]:
    """The same function of both parts of its first argument, in place of that. columns: of the whole."""

    def function(first: Tensor, second: Tensor, *others: Tensor) -> Any:
        results = _Parts(module, way, columns).run(_Both(first, second), *others)
        if any(isinstance(result, _Both) for result in pytree.tree_leaves(results)):
            raise _Unparted
        return results

    return function


class _Parts(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, way: str, columns: int):
        super().__init__(module)
        self.way, self.columns = way, columns
        self.taken: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by tensor and part, with the tensor itself, lest another get its id
        self.slices = slices(way, columns)

    def run_node(self, n: fx.Node) -> Any:
        if n.stack_trace:  # by which an error names the line
            fx.traceback.set_stack_trace([n.stack_trace])
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(x, _Both) for x in pytree.tree_leaves((args, kwargs))):
            return super().call_function(target, args, kwargs)
        whole = args[0]
        if target in _PARTING and isinstance(whole, _Both):
            return self.parted(target, whole, args[1:], kwargs)
        name = target.__name__.partition(".")[0]
        if name in ("view", "reshape", "_unsafe_view") and isinstance(whole, _Both) and args[1][-1] == self.columns:
            sizes = [*args[1][:-1], self.columns // 2]
            return _Both(*(target(part, sizes) for part in (whole.first, whole.second)))
        if torch.Tag.pointwise not in target.tags and name not in _SAME:
            raise _Unparted
        return _Both(*(target(*self.part(args, place), **self.part(kwargs, place)) for place in range(2)))

    def part(self, given: Any, place: int) -> Any:
        """Arguments, with one part of each that has an element for each column."""

        def of(x: Any) -> Any:
            if isinstance(x, _Both):
                return (x.first, x.second)[place]
            if isinstance(x, Tensor) and x.dim() and x.shape[-1] == self.columns:
                return self.taken.setdefault((id(x), place), (x, _aten.slice.Tensor(x, -1, *self.slices[place])))[1]
            return x

        return pytree.tree_map(of, given)

    def parted(self, target: Any, whole: _Both, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last = (-1, whole.first.dim() - 1)
        if target is _aten.glu.default and self.way == HALVES and (rest[0] if rest else kwargs.get("dim", -1)) in last:
            return whole.first * torch.sigmoid(whole.second)
        if target is _aten.split.Tensor and self.way == HALVES and (rest[1] if len(rest) > 1 else kwargs.get("dim", 0)) in last and 2 * rest[0] == self.columns:
            return [whole.first, whole.second]
        if target is _aten.slice.Tensor and (rest[0] if rest else kwargs.get("dim", 0)) in last:
            start, end, step = (rest[place] if len(rest) > place else default for place, default in ((1, None), (2, None), (3, 1)))
            at = slice(start, end, step).indices(self.columns)
            if at in self.slices:
                return (whole.first, whole.second)[self.slices.index(at)]
        raise _Unparted
