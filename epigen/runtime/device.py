"""Targets: what a kernel can be compiled for, and the limits that a config must keep. Pure data but for what asks which GPUs are at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from epigen import settings
from epigen.errors import TargetError, near_miss


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture.

    shared_bytes: most shared memory of one block. sm_*: what one multiprocessor (AMD: compute unit) holds, registers in 32-bit
    words. multiprocessors: of the part named in `part`, or of the device at hand. fp8: Triton multiplies and converts fp8e4m3.
    """

    name: str
    backend: str  # "cuda" or "hip"
    arch: int | str
    warp_size: int
    shared_bytes: int
    sm_shared_bytes: int
    sm_registers: int
    sm_threads: int
    sm_blocks: int
    multiprocessors: int
    part: str
    fp8: bool = False
    tf32: bool = False

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can be launched while the one before it still runs, for whose end it then waits by itself: CUDA's programmatic
        dependent launch, since compute capability 9.0."""
        return self.backend == "cuda" and int(self.arch) >= 90

    def blocks_per_sm(self, threads: int, registers: int, shared_bytes: int) -> int:
        """How many blocks of a kernel one multiprocessor can hold at a time."""
        # registers are handed out in units of 8 a thread; CUDA keeps 1 KB of shared memory a block for itself
        registers_each = max(1, -(-registers // 8) * 8 * threads)
        reserved = 1024 if self.backend == "cuda" else 0
        shared_each = shared_bytes + reserved
        by_shared = self.sm_shared_bytes // shared_each if shared_each else self.sm_blocks
        return min(self.sm_threads // threads, self.sm_registers // registers_each, by_shared, self.sm_blocks)


_KB = 1024

# NVIDIA: CUDA C++ Programming Guide 12.9, table "Technical Specifications per Compute Capability" (of 7.5 to 12.0; all six rows checked).
# AMD: ROCm documentation, "AMD GPU specifications" (compute units, LDS, vector register file; of RDNA a pair of compute units shares
# 128 KB and 768 KB, of which one block can have 64 KB). Blocks: 16 of more than one wave, as LLVM's AMDGPU back end reckons; of RDNA
# half of a pair's 32. Unconfirmed: the waves (CDNA 4 times 8 of 64 threads, RDNA 2 times 16 of 32).
TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", "cuda", 80, 32, 163 * _KB, 164 * _KB, 65536, 2048, 32, 108, "A100", tf32=True),
        Target("sm_86", "cuda", 86, 32, 99 * _KB, 100 * _KB, 65536, 1536, 16, 84, "RTX A6000", tf32=True),
        Target("sm_89", "cuda", 89, 32, 99 * _KB, 100 * _KB, 65536, 1536, 24, 142, "L40S", fp8=True, tf32=True),
        Target("sm_90", "cuda", 90, 32, 227 * _KB, 228 * _KB, 65536, 2048, 32, 132, "H100, H200", fp8=True, tf32=True),
        Target("sm_100", "cuda", 100, 32, 227 * _KB, 228 * _KB, 65536, 2048, 32, 148, "B200", fp8=True, tf32=True),
        Target("sm_120", "cuda", 120, 32, 99 * _KB, 100 * _KB, 65536, 1536, 24, 170, "RTX 5090", fp8=True, tf32=True),
        Target("gfx90a", "hip", "gfx90a", 64, 64 * _KB, 64 * _KB, 131072, 2048, 16, 110, "MI250X, one die"),
        Target("gfx942", "hip", "gfx942", 64, 64 * _KB, 64 * _KB, 131072, 2048, 16, 304, "MI300X"),
        Target("gfx950", "hip", "gfx950", 64, 160 * _KB, 160 * _KB, 131072, 2048, 16, 256, "MI355X", fp8=True),
        Target("gfx1100", "hip", "gfx1100", 32, 64 * _KB, 64 * _KB, 98304, 1024, 16, 96, "RX 7900 XTX"),
        Target("gfx1201", "hip", "gfx1201", 32, 64 * _KB, 64 * _KB, 98304, 1024, 16, 64, "RX 9070 XT", fp8=True),
    )
}  # fmt: skip

DEFAULT = TARGETS["sm_90"]


def by_name(name: str) -> Target:
    """Raises TargetError for an unknown name."""
    if name not in TARGETS:
        raise TargetError(f"unknown target '{name}': {near_miss(name, TARGETS) or 'known are ' + ', '.join(TARGETS)}")
    return TARGETS[name]


def indices() -> tuple[int, ...]:
    """The GPUs of this machine, the current one first; none without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return ()
    current = torch.cuda.current_device()
    return (current, *(i for i in range(torch.cuda.device_count()) if i != current))


def likely(nodes: Path = Path("/dev")) -> int:
    """How many GPUs this process will see, by the drivers' device nodes: a guess, in no time and without torch."""
    there = sum(node.name.removeprefix("nvidia").isdigit() for node in nodes.glob("nvidia*")) or int((nodes / "dxg").exists() or (nodes / "kfd").exists())
    return min(there, settings.visible_gpus(there))


def at_hand(index: int | None = None) -> Target | None:
    """The target of a GPU of this machine, the current one by default, with its own multiprocessor count; None without a GPU.

    An architecture that is not in the table is taken as its nearest older kin.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        known = TARGETS.get(name) or replace(TARGETS["gfx942" if name.startswith("gfx9") else "gfx1100"], name=name, arch=name)
    else:
        arch = properties.major * 10 + properties.minor
        kin = max((t for t in TARGETS.values() if t.backend == "cuda" and int(t.arch) <= arch), key=lambda t: int(t.arch), default=None)
        if kin is None:
            raise TargetError(f"{properties.name} (sm_{arch}) is older than sm_80, the oldest supported")
        known = replace(kin, name=f"sm_{arch}", arch=arch, shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", kin.shared_bytes)))
    return replace(known, multiprocessors=properties.multi_processor_count, part=properties.name)
