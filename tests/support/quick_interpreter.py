"""Triton's interpreter combines what a kernel reduces element by element, in Python; here it does by halves, in numpy.

Both call the kernel's own combine function. Only the order differs, which Triton leaves open.
"""

from __future__ import annotations

from typing import Any


def reduce_by_halves(ops: Any, given: tuple[Any, ...]) -> list[Any]:
    """Takes the place of `ReduceOps.generic_reduce`: `given` are tensors of one shape whose extents are powers of two, as all in Triton."""
    tensors, axis = ops.unravel(given, ops.axis)
    extent = tensors[0].handle.data.shape[axis]
    while extent > 1:
        extent //= 2
        first, second = ([ops.to_tensor(t.handle.data.take(range(at, at + extent), axis), t.dtype) for t in tensors] for at in (0, extent))
        found = ops.combine_fn.fn(*first, *second)
        tensors = found if isinstance(found, tuple) else (found,)
    if ops.axis is None:
        shape: tuple[int, ...] = (1,) * given[0].handle.data.ndim if ops.keep_dims else ()
    else:
        kept = list(given[0].handle.data.shape)
        kept[axis : axis + 1] = [1] if ops.keep_dims else []
        shape = tuple(kept)
    return [ops.to_tensor(t.handle.data.reshape(shape) if shape else t.handle.data.item(), t.dtype) for t in tensors]


def quicken() -> None:
    from triton.runtime.interpreter import ReduceOps

    if ReduceOps.generic_reduce is not reduce_by_halves:
        ReduceOps.by_elements = ReduceOps.generic_reduce
        ReduceOps.generic_reduce = reduce_by_halves
