"""A call's launches straight to the driver: native.c, which Triton's own build compiles once and keeps in its cache.

Triton's launcher reads all of its arguments anew at every launch; without it, and with the addresses asked for here, a call of a small kernel
took 5.9 us of the host instead of 7.2 (H200, torch 2.11, Triton 3.6, 2026-11).
What a kernel's parameters are is Triton's business, which promises nothing: so each kernel's are compared with what the driver says of
the function that it has loaded. Wherever something is otherwise, or there is no C compiler, the answer is None, and `direct` the way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epigen.runtime import loader
from epigen.runtime.arguments import ALIGNED_BYTES

_BYTES = {"i32": 4, "i64": 8, "fp32": 4}
_POINTER_BYTES = 8
_TRITONS_OWN = 2
"""Parameters that Triton adds behind a kernel's: the addresses of memory for itself and for a profiler, of which none here has any."""

Step = Callable[..., bool]
"""(stream, whether it is captured, *values) -> whether the kernels were launched; if not, a tensor is not aligned as it was, or near to one that is
written. The values are those of the call in the order of the slots: tensors, addresses, numbers."""

Apart = tuple[int, int, int, int]
"""The places of two tensors among the values of a call, of which the first is written, and how many bytes each reaches over: these are apart."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """As the driver launches it. function: its handle. parameters: the place of each in the values of the call, or -1; and what it is where it is fixed."""

    function: int
    blocks: int
    threads: int
    shared_bytes: int
    parameters: tuple[tuple[int, int], ...]


def kernel(compiled: Any, blocks: int, parameters: Sequence[tuple[int, int]]) -> Kernel | None:
    """compiled: what a launch has returned. blocks: of the grid. parameters: as of `Kernel`, those for all of the function's arguments, constants too."""
    try:
        metadata, types = compiled.metadata, list(compiled.src.signature.values())
        threads, shared_bytes = metadata.num_warps * metadata.target.warp_size, metadata.shared
        known = len(types) == len(parameters) and metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    except AttributeError:  # another Triton's
        return None
    if not known:
        return None
    taken = [(kind, parameter) for kind, parameter in zip(types, parameters, strict=True) if kind != "constexpr"]
    sizes = [_POINTER_BYTES if kind.startswith("*") else _BYTES.get(kind, 0) for kind, _ in taken] + [_POINTER_BYTES] * _TRITONS_OWN
    if sizes != _sizes(compiled.function, len(sizes)):
        return None
    found = (*(parameter for _, parameter in taken), *[(-1, 0)] * _TRITONS_OWN)
    return Kernel(compiled.function, blocks, threads, shared_bytes, found)


def step(kernels: Sequence[tuple[Kernel, bool, bool]], values: Sequence[Any], count: int, index: int | None, apart: Sequence[Apart] = ()) -> Step | None:
    """What launches these one after another.

    kernels: each with whether it starts before the one in front of it has ended, in a stream and in a graph. values: those of a call, of which each
    tensor has to be aligned as it is here. count: of all values, of which the rest may be aligned in any way. index: the device's.
    apart: of each call.
    """
    module, context = _module(), _context(index or 0)
    if module is None or not context:
        return None
    alignments = "".join(_alignment(value) for value in values).ljust(count, ".").encode()
    launches = tuple((k.function, k.blocks, k.threads, k.shared_bytes, *dependent, k.parameters) for k, *dependent in kernels)
    found: Step = module.Launches(context, Tensor.data_ptr, alignments, launches, tuple(apart))
    return found


def _alignment(value: Any) -> str:
    """As native.c has it."""
    return "." if not isinstance(value, Tensor) else "!" if value.data_ptr() % ALIGNED_BYTES else "="


@functools.cache
def _module() -> Any:
    """native.c, compiled and bound to the driver; None where there is no compiler for it or another driver."""
    try:
        entries = [getattr(_driver(), name) for name in ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuGetErrorName")]
    except (OSError, AttributeError):
        return None
    built = loader.native()
    if built is not None:
        built.bind(*(ctypes.cast(entry, ctypes.c_void_p).value for entry in entries))
    return built


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver's library, which is in the process already where there is a GPU."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _context(index: int) -> int:
    """The context of a device that torch and Triton use, too, held as long as the process lives; 0 where the driver has none for it."""
    found, device = ctypes.c_void_p(), ctypes.c_int()
    try:
        failed = _driver().cuDeviceGet(ctypes.byref(device), index) or _driver().cuDevicePrimaryCtxRetain(ctypes.byref(found), device)
    except (OSError, AttributeError):
        return 0
    return 0 if failed else found.value or 0


def _sizes(function: int, most: int) -> list[int]:
    """Bytes of each of a loaded function's parameters, of no more than one beyond `most`. Empty where the driver cannot tell (before CUDA 12.4)."""
    try:
        ask = _driver().cuFuncGetParamInfo
    except (OSError, AttributeError):
        return []
    found: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while len(found) <= most and not ask(ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
        found.append(size.value)
    return found
