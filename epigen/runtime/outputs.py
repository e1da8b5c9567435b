"""The outputs of a call: their dtypes and shapes, new tensors for them, the caller's own buffers, checked, and the named tuple of several.
Raises CallError."""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigen.codegen.lower import output_dtype
from epigen.dtypes import DType
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.graph import Graph, Node
from epigen.runtime import overlap

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""(shape, strides, dtype) -> a tensor of unknown contents."""


@dataclass(frozen=True, slots=True)
class Out:
    """One output of a call. block: how many columns share a value. replaces: the inputs of the same indices from which it is computed element by element, in whose place it may be."""

    name: str
    indices: str
    dtype: DType
    packed: bool
    replaces: frozenset[str] = frozenset()
    block: int = 1

    def shape(self, m: int, n: int) -> tuple[int, ...]:
        if self.packed:
            return (m, -(-n // 8))
        return tuple({"m": m, "n": -(-n // self.block)}[i] for i in self.indices)

    def held(self, m: int, n: int, lead: tuple[int, ...] = ()) -> Held:
        """lead: leading dimensions, where several products are computed at once."""
        shape, dtype = self.shape(m, n), reference.torch_dtype(self.dtype)
        if not self.packed:
            return Held((*lead, *shape), _contiguous((*lead, *shape)), dtype, None)
        held = (*lead, m, g.mask_stride(n))
        return Held(held, _contiguous(held), dtype, shape[1] if shape[1] < held[-1] else None)


@dataclass(frozen=True, slots=True)
class Held:
    """What a new output is allocated as. width: where it is only so many columns of that, as a mask with padded rows is."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    width: int | None

    def empty(self, allocate: Allocate) -> Tensor:
        held = allocate(self.shape, self.strides, self.dtype)
        return held if self.width is None else held.narrow(-1, 0, self.width)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return tuple(math.prod(max(1, size) for size in shape[d + 1 :]) for d in range(len(shape)))


_namedtuple: Any = namedtuple  # of names that no type checker can see


@functools.lru_cache(maxsize=1024)  # a type takes 5 KB, and all but unending streams of programs have fewer lists of names
def named(names: tuple[str, ...]) -> Any:
    """The type of what a program of several outputs returns: a named tuple, the same for equal names. Its instances are pickled by their names, of
    which whoever reads them makes the type anew."""
    made = _namedtuple("Outputs", names)
    made.__reduce__ = lambda results: (remade, (names, tuple(results)))
    return made


def remade(names: tuple[str, ...], results: Iterable[Any]) -> Any:
    """A pickled named tuple, read back."""
    return named(names)._make(results)


torch.serialization.add_safe_globals([remade])  # without it torch.load refuses what torch.save wrote; it makes a tuple, and runs nothing that it reads


def of(graph: Graph, a: DType) -> list[Out]:
    """The outputs of a program for operands of dtype `a`. One that a tile leaves of reductions over k takes no input's place: other tiles may still read that."""
    outs, vectors = [], graph.vectors()
    for output in graph.outputs:
        node = graph.nodes[output.node]
        packed = node.kind == g.PACKED
        replaces = frozenset(
            i.name
            for i in _elementwise(graph, output.node)
            if output.block == 1 and output.name not in vectors and i.indices == node.indices and (i.op == g.BITS) == packed and not g.shared_along(i)
        )
        outs.append(Out(output.name, node.indices, output_dtype(graph, output, a), packed, replaces, output.block))
    return outs


def _elementwise(graph: Graph, root: int) -> Iterator[Node]:
    """The inputs from which a value is computed, but for those of reductions and products within it."""
    seen, pending = set[int](), [root]
    while pending:
        number = pending.pop()
        node = graph.nodes[number]
        if number in seen or node.op in (g.REDUCE, g.BLOCKWISE, g.DOT):
            continue
        seen.add(number)
        pending += node.args
        if node.op in (g.INPUT, g.BITS):
            yield node


def allocator(on: torch.device) -> Allocate:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=on)


def quick_allocator(on: torch.device) -> Allocate:
    """As `allocator`; a CUDA device has to be the current one. It is what the code that torch.compile generates allocates with: it
    leaves the dispatcher out, a half of the time."""
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{on.type}", None)
    return allocator(on) if quick is None else quick


def given(out: Any, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The caller's buffers by name. names: the program's outputs."""
    if out is None:
        return {}
    if isinstance(out, Tensor):
        out = (out,)
    if isinstance(out, Mapping):
        if unknown := out.keys() - set(names):
            raise CallError(f"out has no place for {', '.join(sorted(map(str, unknown)))}: the outputs are {', '.join(names)}")
        return out
    if not isinstance(out, Sequence):
        raise CallError(f"out is a {type(out).__name__}: pass a tensor, or for several outputs a sequence or a mapping by name")
    if len(out) != len(names):
        raise CallError(f"out holds {len(out)} tensors, and the program has {len(names)} outputs: {', '.join(names)}")
    return dict(zip(names, out, strict=True))


def check(t: Any, out: Out, m: int, n: int, on: torch.device) -> None:
    """One of the caller's buffers."""
    shape, dtype = out.shape(m, n), reference.torch_dtype(out.dtype)
    if isinstance(t, Tensor) and t.is_neg():
        raise CallError(f"out for '{out.name}' is a lazily negated view: pass a plain tensor")
    if not isinstance(t, Tensor) or tuple(t.shape) != shape or t.dtype != dtype or t.device != on:
        actual = f"{t.dtype} {list(t.shape)} on {t.device}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise CallError(f"out for '{out.name}' is {actual}, and {dtype} {list(shape)} on {on} was expected")
    if overlap.within(t):
        raise CallError(f"out for '{out.name}' has strides {list(t.stride())}: several elements share one place, and each wants its own")
