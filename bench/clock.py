"""The clock that a GPU's multiprocessors run at just now, by NVML: a power limit lowers it, and with it every absolute time."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_SM = 1  # NVML_CLOCK_SM


@functools.cache
def _nvml() -> tuple[Any, Any] | None:
    """The library and the current GPU's handle; None where either is missing. torch may number GPUs otherwise, so the UUID names it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    except (OSError, AttributeError, RuntimeError, AssertionError):  # no driver, an older torch, no GPU, a torch without CUDA
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    return library, handle


def sm_mhz() -> int | None:
    """MHz, or None where nobody tells."""
    found = _nvml()
    mhz = ctypes.c_uint()
    if found is None or found[0].nvmlDeviceGetClockInfo(found[1], _SM, ctypes.byref(mhz)):
        return None
    return mhz.value
