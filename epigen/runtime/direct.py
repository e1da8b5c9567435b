"""What is known of Triton's launches: how a kernel that it compiled is started, how it describes a tensor to TMA, and who else takes part.

`jit[grid](...)` binds, specialises and looks up anew at every launch, and describes each tensor to TMA anew. Its first launch returns the
compiled kernel; with arguments of the same types, the same integers and the same alignments every later one would come to that kernel
again, so it may as well be launched at once (native.py). Whether they are the same is for the caller to know.

Nothing here is promised by Triton, so what is found is looked at, not assumed. Seen alike in Triton 3.6 and 3.9. Where something looks
otherwise the answer is None, and `jit[grid]` stays the way.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epigen.codegen.groups import RAGGED
from epigen.runtime.code_builder import CodeBuilder

if TYPE_CHECKING:
    from torch import Tensor

TENSOR_MAP_BYTES = 128
"""Of what the driver calls a CUtensorMap."""
_ANY, _ROUND = 0x7FFF0000, 1 << 64
"""An extent that no coordinate of a ragged descriptor reaches, and elements after which addresses begin anew, whatever their size."""


def describe_by_triton(dialect: str, t: Tensor, block: tuple[int, ...], ragged: bool = False) -> Any:
    """A matrix, or the several of a batch, as an argument of `jit[grid]` that its kernel addresses by TMA, in blocks; rows or columns are contiguous.

    dialect: the kernel's, "triton" or "gluon". ragged: as of `Argument`.
    """
    t = upright(t)
    return descriptor(dialect, t, *lies(t, ragged), block)


def lies(t: Tensor, ragged: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The extents and strides by which TMA addresses a matrix with contiguous rows, or the several of a batch; in elements. ragged: as of `Argument`.

    The strides of a ragged one's first three dimensions, r * RAGGED, s * end and s * (RAGGED - end + row) with r = 2^34 - s, add up to 2^64 elements and s * row,
    and addresses of 64 bits drop the former.
    """
    if not ragged:
        return tuple(t.shape), tuple(t.stride())
    step = t.stride(0)
    return (_ANY, _ANY, RAGGED, t.shape[1]), (_ROUND // RAGGED - step, step, step, 1)


def descriptor(dialect: str, base: Any, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]) -> Any:
    """The same of a tensor, or of what stands for one. strides: the last one is 1."""
    if dialect == "triton":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(base, list(shape), list(strides), list(block))
    from triton import language as tl
    from triton._utils import canonicalize_dtype
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    element = canonicalize_dtype(base.dtype)
    layout = gl.NVMMASharedLayout.get_default_for(list(block), tl.dtype({"i": "int", "u": "uint"}.get(element[0], element[0]) + element[1:]))
    return GluonDescriptor(base, list(shape), list(strides), list(block), layout)


def upright(t: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has contiguous rows: TMA addresses nothing else. Of several, each."""
    return t if t.stride(-1) == 1 else t.mT


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel that is launched with its own arguments alone. function: the driver's handle. kinds: of the arguments, as Triton's signature has them, in the
    order of the function's parameters, constants too. owner: of its code."""

    function: int
    threads: int
    shared_bytes: int
    kinds: tuple[str, ...]
    owner: Any


def loaded(jit: Any, compiled: Any, names: Sequence[str]) -> Loaded | None:
    """jit, compiled: a function, and what a launch of it returned. names: its parameters in the order of the arguments to come."""
    if _launcher(compiled) is None or [p.name for p in jit.params] != list(names):
        return None
    try:
        metadata, kinds = compiled.metadata, tuple(compiled.src.signature.values())
        threads, shared_bytes = metadata.num_warps * metadata.target.warp_size, metadata.shared
        alone = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    except AttributeError:  # another Triton's
        return None
    return Loaded(compiled.function, threads, shared_bytes, kinds, compiled) if alone and len(kinds) == len(names) else None


def _launcher(compiled: Any) -> Any:
    """Triton's launcher of a kernel for CUDA that needs no memory of its own; None for any other.

    For AMD, Triton specialises on the size of a tensor's memory as well, which no caller here keeps account of.
    """
    from triton.compiler import CompiledKernel

    if not isinstance(compiled, CompiledKernel) or compiled.metadata.target.backend != "cuda":
        return None
    launcher = compiled.run
    if type(launcher).__name__ != "CudaLauncher" or getattr(launcher, "gsan_enabled", False):
        return None
    if type(launcher).__call__.__module__ != type(launcher).__module__:  # somebody has put a call of theirs around it
        return None
    sizes = (getattr(launcher, "global_scratch_size", None), getattr(launcher, "profile_scratch_size", None))
    return launcher if sizes == (0, 0) and hasattr(launcher, "launch") else None


# -- tensor maps


@dataclass(frozen=True, slots=True)
class _Place:
    """As much of a tensor as a descriptor is made from."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class _Described:
    """What Triton's own TensorDescriptor holds, without its checks, which the first launch has made."""

    base: _Place
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False
    element_strides: None = None


def tensor_maps(compiled: Any, number: int, shape: tuple[int, ...], strides: tuple[int, ...], addresses: Sequence[int]) -> list[bytes] | None:
    """What describes tensors that lie so to TMA, at each of these addresses, as Triton makes it for a launch.

    compiled: what a launch has returned. number: the argument's among those that have a descriptor. shape, strides: as `lies` has them.
    """
    launcher = _launcher(compiled)
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) if launcher is not None else None
    make = getattr(sys.modules.get(type(launcher).__module__), "make_tensordesc_arg", None)
    if make is None or not metadata or not 0 <= number < len(metadata) or metadata[number] is None:
        return None
    rest = (None,) * (len(inspect.signature(make).parameters) - 2)  # Triton 3.9 hands on arguments of the launch, which it does not read
    maps = []
    for address in addresses:
        try:
            one, *others = make(_Described(_Place(address), shape, strides), metadata[number], *rest)
        except (TypeError, AttributeError, KeyError):  # it wants to know something else
            return None
        if tuple(others) != (*shape, *strides) or type(one).__basicsize__ < object.__basicsize__ + TENSOR_MAP_BYTES:
            return None
        # an object of C that ends with the map
        maps.append(ctypes.string_at(id(one) + type(one).__basicsize__ - TENSOR_MAP_BYTES, TENSOR_MAP_BYTES))
    return maps


# -- who else takes part in a launch


def observed(jits: Sequence[Any], text: CodeBuilder) -> str | None:
    """An expression that is true once a launch of these is not Triton's own business any more: somebody has hooked into it or changed how it
    compiles. None where that is so already, or cannot be known."""
    from triton import knobs

    runtime = knobs.runtime
    enter: Any = getattr(runtime, "launch_enter_hook", None)
    leave: Any = getattr(runtime, "launch_exit_hook", None)
    watched = [getattr(j, "pre_run_hooks", None) for j in jits]
    if any(not isinstance(calls, list) for calls in (*watched, getattr(enter, "calls", None), getattr(leave, "calls", None))):
        return None
    if runtime.debug or getattr(runtime, "add_stages_inspection_hook", None) is not None or enter.calls or leave.calls or any(watched):
        return None
    x, y, z = map(text.hold, (runtime, enter, leave))
    ways = [f"{y}.calls", f"{z}.calls", *map(text.hold, watched)]
    own = getattr(runtime, "__dict__", None)
    if own == {}:  # nothing has been set, and all has the class's values: one question in place of four
        return " or ".join([text.hold(own), *ways])
    ways += [f"{x}.launch_enter_hook is not {y}", f"{x}.launch_exit_hook is not {z}", f"{x}.debug"]
    ways += [f"{x}.add_stages_inspection_hook is not None"] * hasattr(runtime, "add_stages_inspection_hook")
    return " or ".join(ways)
