"""The buffers of one call that are neither the caller's nor its results: partial results, and counters of blocks that have arrived."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from epigen.codegen import schedules
from epigen.codegen.functions import arrivals
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.dtypes import FP32, DType
from epigen.ir import reference
from epigen.runtime.arguments import ALIGNED_BYTES

# what torch.cuda asks, without the Python around it
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def counters(spec: KernelSpec, config: KernelConfig, shape: tuple[int, int, int]) -> int:
    """How many counters of arrived blocks a launch needs. shape: M, N, K."""
    parts_m, parts_n = parts(config, shape)
    count = math.prod(tiles(config, shape))
    counts = {"tiles": count, "parts_m": parts_m, "parts_n": parts_n, "1": 1}
    return sum(schedules.sharing(config) * count if name == "groups" else counts[name] for name in arrivals(spec, config))


def tiles(config: KernelConfig, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Output tiles along M and N. shape: M, N, K."""
    m, n, _ = shape
    return -(-m // config["block_m"]), -(-n // config["block_n"])


def parts(config: KernelConfig, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Parts of output tiles along M and N, each of which leaves partial results of its own."""
    (tiles_m, tiles_n), (down, across) = tiles(config, shape), schedules.tile_parts(config)
    return tiles_m * down, tiles_n * across


@dataclass(frozen=True, slots=True)
class Buffer:
    """name: the argument's. at: bytes from the workspace's start."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    at: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers that lie in one allocation."""

    buffers: tuple[Buffer, ...] = ()
    size_bytes: int = 0

    @classmethod
    def of(cls, spec: KernelSpec, config: KernelConfig, shape: tuple[int, int, int], count: int = 1) -> Workspace:
        """shape: M, N, K of each of so many products."""
        m, n, _ = shape
        tiles_m, tiles_n = parts(config, shape)
        shapes: dict[str, tuple[int, ...]] = {"m": (tiles_m, n), "n": (tiles_n, m), "mn": (tiles_m * tiles_n,)}
        wanted = [(f"{p.name}_partial_ptr", shapes[p.axes], FP32) for p in spec.partials]
        if (splits := schedules.splits(config)) > 1:
            wanted.append(("split_partial_ptr", (math.prod(tiles(config, shape)) * splits, config["block_m"], config["block_n"]), spec.accumulator))
        buffers, end = [], 0
        for name, size, dtype in wanted:
            size = (count * size[0], *size[1:])
            buffers.append(Buffer(name, size, dtype, end))
            end += -(-math.prod(size) * dtype.bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return cls(tuple(buffers), end)

    def tensors(self, on: torch.device) -> dict[str, Tensor]:
        """New buffers by the names of the arguments that they are."""
        if not self.buffers:
            return {}
        held, tensors = torch.empty(self.size_bytes, dtype=torch.uint8, device=on), {}
        for b in self.buffers:
            tensors[b.name] = held[b.at : b.at + math.prod(b.shape) * b.dtype.bytes].view(reference.torch_dtype(b.dtype)).view(b.shape)
        return tensors


class Arrivals:
    """Counters, which a kernel finds at 0 and leaves at 0. Launches of one stream follow one another, so they share a buffer."""

    def __init__(self, count: int, on: torch.device):
        self.count, self.device, self.shared = count, on, on.type == "cuda"
        self.held: dict[int, Tensor] = {}

    def counters(self) -> Tensor:
        """For a launch on the current stream."""
        if not self.shared or capturing():
            # a graph may run beside other work of the stream that it was captured on, so it has counters of its own, which it sets to 0
            return self._new()
        stream = current_stream(self.device.index)
        tensor = self.held.get(stream)
        if tensor is None:
            # torch.compile's CUDA graphs have what a thread allocates put into a pool of theirs, where nothing may outlive the call: this does,
            # and so is allocated by a thread of its own, for the same stream
            with ThreadPoolExecutor(1) as apart:
                tensor = self.held[stream] = apart.submit(self._new_on, torch.cuda.current_stream(self.device)).result()
        return tensor

    def _new_on(self, stream: torch.cuda.Stream) -> Tensor:
        with torch.cuda.stream(stream):
            return self._new()

    def _new(self) -> Tensor:
        return torch.zeros(self.count, dtype=torch.int32, device=self.device)
