"""What the driver itself takes of a launch, without Python and without Triton: the least that any call can cost the host."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("driver.c")


def launcher(library: str = "libcuda.so.1") -> Callable[[int, int], float]:
    """Compiles `driver.c`. Returns what takes a stream's handle and a count, launches an empty kernel so often and returns microseconds a launch.

    library: the driver's. Raises RuntimeError where there is no driver or no C compiler that takes it, or where a launch fails.
    """
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        raise RuntimeError("the driver's launch cannot be timed without Triton, which has CUDA's header")
    include = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    with tempfile.TemporaryDirectory(prefix="epigen-driver-") as folder:
        built = Path(folder) / "driver.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-w", f"-I{include}", "-o", str(built), str(_SOURCE), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"the driver's launch cannot be timed without a C compiler: {error}") from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{_SOURCE.name} does not compile here:\n{error.stderr}") from None
        code = ctypes.CDLL(str(built))
    code.prepare.argtypes = [ctypes.c_char_p]
    code.launches.argtypes, code.launches.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_double
    if error := code.prepare(library.encode()):
        raise RuntimeError(f"{library} has answered with error {error}")

    def launches(stream: int, count: int) -> float:
        us = float(code.launches(stream, count))
        if us < 0:
            raise RuntimeError("the driver has refused a launch")
        return us

    return launches


def launch_us(rounds: int, calls: int) -> list[float]:
    """Microseconds of a launch in the current stream, one figure a round."""
    launches, stream, found = launcher(), torch.cuda.current_stream().cuda_stream, []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        found.append(launches(stream, calls))
    torch.cuda.synchronize()
    return found[1:]
