"""What the tests of warmed calls share. Their oracle is Triton itself: what a kernel launches that has seen no call yet."""

from __future__ import annotations

import shutil
from typing import Any

import cases
import pytest
import torch
from fake_gpu import FakeGpu, Launched

import epigen
from epigen.codegen import schedules
from epigen.runtime.kernel import Kernel
from epigen.runtime.launch import Launch

MARKS = [
    pytest.mark.triton,
    pytest.mark.apart("fake GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the real driver is in the way of the one that is none: tests/runtime/test_gpu_calls.py has the same on a GPU"
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="Triton's launcher is C, and there is no compiler for it"),
]
"""Of every file: its process takes the CPU for a GPU."""

TINY = cases.tiled(16, 16, 16, 1, 1)
LIBRARY = schedules.config("library", block_m=16, block_n=16, num_warps=1)
M, N, K = 32, 48, 64


def operands(layout: str = "nn") -> tuple[torch.Tensor, torch.Tensor]:
    a, b = half(M, K), half(K, N)
    return (a if layout[0] == "n" else half(K, M).T), (b if layout[1] == "n" else half(N, K).T)


def half(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float16)


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same in all but its address, which is no multiple of 16."""
    held = torch.zeros(t.numel() + 1, dtype=t.dtype)
    return held[1:].view(t.shape) if t.is_contiguous() else held[1:].view(t.T.shape).T


def compiled(text: str, config: Any = TINY) -> Kernel:
    return epigen.compile(text, config=config, backend="triton")


def forget(kernel: Kernel) -> None:
    kernel._calls.clear()


def direct_calls(kernel: Kernel) -> bool:
    """Whether anything has been readied to be launched without Triton."""
    return any(kernel._calls.newest.values())


class Watch:
    """Counts what goes through Triton's own launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        call = Launch.__call__

        def counted(launch: Launch, values: Any) -> Any:
            self.count += 1
            return call(launch, values)

        monkeypatch.setattr(Launch, "__call__", counted)


def launched(gpu: FakeGpu, kernel: Kernel, *operands: Any, **inputs: Any) -> list[Launched]:
    """What a call launches that has been made before."""
    kernel(*operands, **inputs)
    return gpu.during(lambda: kernel(*operands, **inputs))


def as_triton_does(gpu: FakeGpu, kernel: Kernel, *operands: Any, **inputs: Any) -> list[Launched]:
    """What the same call launches that no other has come before."""
    forget(kernel)
    return gpu.during(lambda: kernel(*operands, **inputs))
