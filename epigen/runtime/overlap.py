"""Whether what a call writes shares memory with what else it is given. Raises CallError, which names both.

An output may take the place of an input from which it is computed element by element: every schedule loads a tile's, a row's or a column's inputs
before it stores anything of them, no block loads what another one stores before that has been told that it did, and a kernel that completes
reductions reads no [m,n] input again. Nothing else of what is read may be written: of operands every block reads what others read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from epigen.errors import CallError
from epigen.ir.graph import PRODUCT
from epigen.runtime.arguments import reach

T = TypeVar("T")

_WORK = 10**6
"""Steps of numpy's search after which two tensors are taken to overlap. Views of one buffer were seen to take less than ten, whatever their strides."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An output and what else is given. what: its name in messages. replaced: whether the output may take its place."""

    output: str
    what: str
    replaced: bool

    def check(self, t: Tensor, other: Tensor) -> None:
        """t: the output's buffer. Raises CallError where the two share memory and may not."""
        if not shared(t, other) or (self.replaced and _same_place(t, other)):
            return
        hint = "give it memory of its own"
        if self.replaced:
            hint += f", or exactly {self.what}'s, in whose place it may be computed: the same addresses and strides"
        raise CallError(f"out for '{self.output}' overlaps {self.what}: {hint}")


Replaces = Mapping[str, frozenset[str]]
"""Of each output the inputs in whose place it may be computed."""


def pairs(replaces: Replaces, operands: Mapping[str, T], inputs: Mapping[str, T], outs: Mapping[str, T]) -> Iterator[tuple[Pair, T, T]]:
    """Each output that is given with each operand, each input and each output before it, and both as they are given here: as tensors, or what stands
    for them. inputs: without numbers."""
    for number, (name, t) in enumerate(outs.items()):
        for operand, other in operands.items():
            yield Pair(name, f"operand {operand}", False), t, other
        for given, other in inputs.items():
            yield Pair(name, given if given == PRODUCT else f"input '{given}'", given in replaces[name]), t, other
        for earlier, other in [*outs.items()][:number]:
            yield Pair(name, f"out for '{earlier}'", False), t, other


def check(replaces: Replaces, operands: Sequence[Tensor], inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> None:
    """All of a call."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    for pair, t, other in pairs(replaces, dict(zip("ab", operands, strict=False)), tensors, outs):
        pair.check(t, other)


def size_bytes(t: Tensor) -> int:
    """From a tensor's first byte to behind its last one; 0 of one without elements."""
    return (reach(t) + 1) * t.element_size() if t.numel() else 0


def near(t: Tensor, other: Tensor) -> bool:
    """Whether the bytes from the first to the last of two tensors of one device have any in common."""
    if t.device.type == "meta" or not t.numel() or not other.numel():
        return False
    return -size_bytes(other) < other.data_ptr() - t.data_ptr() < size_bytes(t)


def shared(t: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one device have a byte in common."""
    if not near(t, other):
        return False
    if t.is_contiguous() and other.is_contiguous():
        return True
    import numpy

    solve: Any = numpy.shares_memory
    try:
        return bool(solve(numpy.asarray(_Described(t)), numpy.asarray(_Described(other)), max_work=_WORK))
    except numpy.exceptions.TooHardError:
        return True


class _Described:
    """A tensor's place as numpy reads it, which looks at no memory to compare two: it may be a GPU's."""

    def __init__(self, t: Tensor):
        size = t.element_size()
        strides = tuple(stride * size for stride in t.stride())
        self.__array_interface__ = {"version": 3, "data": (t.data_ptr(), True), "typestr": f"|V{size}", "shape": tuple(t.shape), "strides": strides}


def _same_place(t: Tensor, other: Tensor) -> bool:
    """Whether each element of one is at the address of the other's."""
    if t.data_ptr() != other.data_ptr() or t.element_size() != other.element_size() or t.shape != other.shape:
        return False
    return all(size < 2 or x == y for size, x, y in zip(t.shape, t.stride(), other.stride(), strict=True))


def within(t: Tensor) -> bool:
    """Whether two elements of a vector or a matrix are at one address."""
    dims = [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
    if not t.numel() or not dims:
        return False
    if len(dims) == 1:
        return dims[0][1] == 0
    # of elements i * x and j * y apart, the nearest that coincide are y / g rows and x / g columns from one another
    (rows, x), (columns, y) = dims
    common = math.gcd(x, y)
    return common == 0 or (y // common < rows and x // common < columns)
