"""A GPU that is none: Triton compiles for sm_90 and launches for real, down to the driver, which keeps what it is given (fake_cuda.c).

For a process of its own, since it changes torch and Triton for good. Tensors lie in the CPU's memory and say that they are on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[a-z](\d+) [^,\[]+(?:\[(\d+)\])?")
"""Of a kernel in PTX: how many bits, or how many at a time and how many times."""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_int * 3), ("block", ctypes.c_int), ("shared", ctypes.c_int), ("ahead", ctypes.c_int), ("bytes", ctypes.c_int),
        ("stream", ctypes.c_ulonglong), ("function", ctypes.c_ulonglong), ("parameters", ctypes.c_ubyte * 2048),
    ]  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """What the driver was given at one launch. kernel: Triton's digest of the source and of what it was compiled for. ahead: before the kernel before it ends.
    parameters: by value."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    stream: int
    ahead: bool
    parameters: tuple[bytes, ...]


class FakeGpu:
    """stream, capturing, target: of all launches to come."""

    def __init__(self) -> None:
        import triton
        from triton.backends import nvidia

        from epigen.gpus import DEFAULT_TARGET

        self._folder = tempfile.TemporaryDirectory(prefix="fake-cuda-")  # goes with this object
        folder = Path(self._folder.name)
        library = folder / "libcuda.so.1"
        include = Path(nvidia.__path__[0]) / "include"
        source = Path(__file__).with_name("fake_cuda.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.library.fake_launch.restype = ctypes.POINTER(_Launch)
        triton.knobs.nvidia.libcuda_path = str(folder)
        self.stream, self.capturing, self.target = 7, False, DEFAULT_TARGET
        self.known: dict[int, tuple[str, list[int]]] = {}
        self._pretend()

    def _pretend(self) -> None:
        import torch
        from triton.backends.nvidia.driver import CudaDriver
        from triton.compiler import CompiledKernel
        from triton.runtime import driver

        from epigen.runtime import device, fast_call, launch

        cuda = CudaDriver()
        cuda.get_current_device = lambda: 0
        cuda.get_current_stream = lambda _index: self.stream
        cuda.get_device_capability = lambda _index=0: (9, 0)
        driver.set_active(cuda)
        load = CompiledKernel._init_handles
        CompiledKernel._init_handles = lambda kernel: (load(kernel), self._know(kernel))[0]
        torch.Tensor.is_cuda = property(lambda _t: True)  # type: ignore[assignment, method-assign]
        torch.cuda.device = lambda _device: nullcontext()  # type: ignore[assignment, misc]
        device.Machine.at_hand = lambda _machine, index=None: self.target  # type: ignore[method-assign]  # noqa: ARG005

        def current_device() -> Any:
            return None

        def current_stream(_index: Any) -> int:
            return self.stream

        def capturing() -> bool:
            return self.capturing

        fast_call.current_device, fast_call.current_stream, launch.capturing = current_device, current_stream, capturing

    @property
    def descriptors(self) -> int:
        """How many have been made so far."""
        return int(self.library.fake_described())

    def _know(self, compiled: Any) -> None:
        """A kernel that has been loaded: what its parameters are, the driver would read in its binary, and this one in its text."""
        if compiled.function in self.known:
            return
        text = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
        sizes = [int(bits) // 8 * int(times or 1) for bits, times in _PARAMETER.findall(text)]
        self.known[compiled.function] = (compiled.hash, sizes)
        self.library.fake_parameters(ctypes.c_ulonglong(compiled.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def during(self, call: Callable[[], object]) -> list[Launched]:
        """The launches that a call makes."""
        before = self.library.fake_launches()
        call()
        return [self._launched(self.library.fake_launch(i).contents) for i in range(before, self.library.fake_launches())]

    def _launched(self, it: Any) -> Launched:
        kernel, sizes = self.known[it.function]
        held, parameters = bytes(it.parameters[: it.bytes]), []
        for size in sizes:
            parameters.append(held[:size])
            held = held[size:]
        return Launched(kernel, tuple(it.grid), it.block, it.shared, it.stream, bool(it.ahead), tuple(parameters))
