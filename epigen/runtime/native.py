"""A call's launches straight to the driver: native.c, which Triton's own build compiles once and keeps in its cache.

Triton's launcher reads all of its arguments anew at every launch, and makes the tensor maps of TMA anew. Here what is fixed is laid out once,
and of a tensor map only the address is put in, by the driver's own function for that.
What a kernel's parameters are is Triton's business, which promises nothing: so each kernel's are compared with what the driver says of
the function that it has loaded, and a tensor map with one that Triton made. Wherever something is otherwise, where the driver is older than
CUDA 12.4's and cannot tell, or where there is no C compiler, the answer is None, and each call is launched by Triton.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epigen.runtime import direct, loader
from epigen.runtime.arguments import ALIGNED_BYTES
from epigen.runtime.direct import TENSOR_MAP_BYTES, Loaded

_BYTES = {"i32": 4, "i64": 8, "fp32": 4}
_POINTER_BYTES = 8
_ENTRIES = "cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuGetErrorName", "cuTensorMapReplaceAddress"
"""As native.c takes them."""
_FAR = 0x5A5A5A5A5A00
"""From one address to another that differs in high and low bits, and is as aligned."""
_TRITONS_OWN = 2
"""Parameters that Triton adds behind a kernel's: the addresses of memory for itself and for a profiler, of which none here has any."""

Step = Callable[..., bool]
"""(stream, whether it is captured, *values) -> whether the kernels were launched; if not, a tensor is not aligned as it was, or near to one that is
written. The values are those of the call in the order of the slots: tensors, addresses, numbers."""

Apart = tuple[int, int, int, int]
"""The places of two tensors among the values of a call, of which the first is written, and how many bytes each reaches over: these are apart."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What describes a tensor to TMA. map: for one address. shape, strides: what a kernel is given beside it."""

    map: bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Parameter = tuple[int, int | bytes]
"""The place in the values of a call, or -1; and what it is where it is fixed, or the tensor map that the value's address is put into."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """As the driver launches it. parameters: in the driver's order."""

    loaded: Loaded
    blocks: int
    parameters: tuple[Parameter, ...]


def tensor_map(compiled: Any, number: int, t: Tensor, ragged: bool = False) -> TensorMap | None:
    """That of tensors like `t`. compiled: what a launch has returned. number: the argument's among those that have one. ragged: as of `Argument`."""
    near = t.data_ptr()
    far = near ^ _FAR
    shape, strides = direct.lies(direct.upright(t), ragged)
    maps = direct.tensor_maps(compiled, number, shape, strides, (near, far)) if _module() is not None else None
    if maps is None or _moved(maps[0], far) != maps[1] or _moved(maps[1], near) != maps[0]:
        return None
    return TensorMap(maps[0], shape, strides)


def kernel(loaded: Loaded, blocks: int, arguments: Sequence[tuple[int, int | TensorMap]]) -> Kernel | None:
    """blocks: of the grid. arguments: all of the function's, constants too, each as a `Parameter` is, but that a tensor map comes with its extents."""
    taken: list[Parameter] = []
    sizes: list[int] = []
    for kind, (place, value) in zip(loaded.kinds, arguments, strict=True):
        if isinstance(value, TensorMap):
            taken += [(place, value.map), *((-1, extent) for extent in (*value.shape, *value.strides))]
            sizes += [TENSOR_MAP_BYTES, *[_BYTES["i32"]] * len(value.shape), *[_BYTES["i64"]] * len(value.strides)]
        elif kind != "constexpr":
            taken.append((place, value))
            sizes.append(_POINTER_BYTES if kind.startswith("*") else _BYTES.get(kind, 0))
    taken += [(-1, 0)] * _TRITONS_OWN
    sizes += [_POINTER_BYTES] * _TRITONS_OWN
    return Kernel(loaded, blocks, tuple(taken)) if _module() is not None and sizes == _sizes(loaded.function, len(sizes)) else None


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
    launches = tuple((k.loaded.function, k.blocks, k.loaded.threads, k.loaded.shared_bytes, *dependent, k.parameters) for k, *dependent in kernels)
    result: Step = module.Launches(context, Tensor.data_ptr, alignments, launches, tuple(apart))
    return result


def _alignment(value: Any) -> str:
    """As native.c has it."""
    return "." if not isinstance(value, Tensor) else "!" if value.data_ptr() % ALIGNED_BYTES else "="


@functools.cache
def _module() -> Any:
    """native.c, compiled and bound to the driver; None where there is no compiler for it or another driver."""
    try:
        entries = [getattr(_driver(), name) for name in _ENTRIES]
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
    context, device = ctypes.c_void_p(), ctypes.c_int()
    try:
        failed = _driver().cuDeviceGet(ctypes.byref(device), index) or _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    except (OSError, AttributeError):
        return 0
    return 0 if failed else context.value or 0


def _moved(tensor_map: bytes, address: int) -> bytes:
    """The same for another address."""
    at = (ctypes.c_ubyte * (2 * TENSOR_MAP_BYTES))()
    start = ctypes.addressof(at) + -ctypes.addressof(at) % TENSOR_MAP_BYTES  # the driver wants it aligned
    ctypes.memmove(start, tensor_map, TENSOR_MAP_BYTES)
    failed = _driver().cuTensorMapReplaceAddress(ctypes.c_void_p(start), ctypes.c_void_p(address))
    return b"" if failed else ctypes.string_at(start, TENSOR_MAP_BYTES)


def _sizes(function: int, most: int) -> list[int]:
    """Bytes of each of a loaded function's parameters, of no more than one beyond `most`. Empty where the driver cannot tell (before CUDA 12.4)."""
    try:
        ask = _driver().cuFuncGetParamInfo
    except (OSError, AttributeError):
        return []
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while len(sizes) <= most and not ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes
