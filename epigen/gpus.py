"""The table of GPUs: what an architecture's blocks may hold and its tensor cores multiply, and how fast its parts are.

Speeds are what the datasheets promise, and where it was measured, what came of it. Pure data and look-up; needs no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from epigen.dtypes import FP8E4M3, FP32, DType
from epigen.errors import TargetError, near_miss, unknown

ACHIEVED_BANDWIDTH = 0.9
"""Share of the datasheet's bandwidth that a copy reaches where it was not measured: the H200's is 4.28 of 4.8 TB/s."""

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture, or a part of it.

    shared_bytes: most shared memory of one block. sm_*: what one multiprocessor (AMD: compute unit) holds, registers in 32-bit
    words. multiprocessors: of the part named in `part`, or of the device at hand. fp8: Triton multiplies and converts fp8e4m3. tf32: its tensor
    cores multiply fp32 rounded to tf32.
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

    @property
    def takes_ptx(self) -> bool:
        """Whether kernels may have instructions of NVIDIA's in their text, those on two bf16 at a time among them."""
        return self.backend == "cuda" and int(self.arch) >= 80

    def multiplies(self, a: DType, b: DType) -> bool:
        """Whether Triton does, operands of these dtypes."""
        return self.fp8 or FP8E4M3 not in (a, b)

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
# half of a pair's 32. Unconfirmed: the waves (CDNA 4 times 8 of 64 threads, RDNA 2 times 16 of 32). tf32, fp8: what Triton 3.6 and 3.9 take of
# each; CDNA 3 multiplies fp8 of its own kinds alone.
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
        Target("gfx942", "hip", "gfx942", 64, 64 * _KB, 64 * _KB, 131072, 2048, 16, 304, "MI300X", tf32=True),
        Target("gfx950", "hip", "gfx950", 64, 160 * _KB, 160 * _KB, 131072, 2048, 16, 256, "MI355X", fp8=True),
        Target("gfx1100", "hip", "gfx1100", 32, 64 * _KB, 64 * _KB, 98304, 1024, 16, 96, "RX 7900 XTX"),
        Target("gfx1201", "hip", "gfx1201", 32, 64 * _KB, 64 * _KB, 98304, 1024, 16, 64, "RX 9070 XT", fp8=True),
    )
}  # fmt: skip

DEFAULT_TARGET = TARGETS["sm_90"]


def target_by_name(name: str) -> Target:
    """Raises TargetError for an unknown name."""
    if name not in TARGETS:
        raise TargetError(unknown("target", name, TARGETS))
    return TARGETS[name]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One part.

    name: as torch names it. short: what people call it. architecture: key in `TARGETS`, whose limits are the part's.
    peak_tflops: dense, by kind of operand (fp16, bf16, tf32, fp32 without tensor cores, fp8, int8); a kind that is missing is not
    multiplied by tensor cores, and what there is agrees with the architecture's row. bandwidth_gbps: the datasheet's. l2_bytes: the last cache that all multiprocessors share.
    clock_mhz: boost. launch_us: what one launch adds to a cold measurement of one kernel.
    copy_gbps, sustained_tflops: measured; 0 and {} where nobody has.
    """

    name: str
    short: str
    architecture: str
    multiprocessors: int
    peak_tflops: Mapping[str, float]
    bandwidth_gbps: float
    l2_bytes: int
    clock_mhz: int
    launch_us: float
    aliases: tuple[str, ...] = ()
    copy_gbps: float = 0.0
    sustained_tflops: Mapping[str, float] | None = None

    @property
    def target(self) -> Target:
        return replace(TARGETS[self.architecture], multiprocessors=self.multiprocessors, part=self.name)

    @property
    def achieved_gbps(self) -> float:
        """GB/s that a streaming kernel can count on."""
        return self.copy_gbps or ACHIEVED_BANDWIDTH * self.bandwidth_gbps

    def peak(self, dtype: DType, precision: str = "ieee") -> float:
        """Dense TFLOP/s for operands of a dtype. fp8 without fp8 tensor cores counts as fp16, which it is widened to."""
        kind = "fp8" if dtype.is_fp8 else "tf32" if dtype == FP32 and precision == "tf32" else dtype.name
        return self.peak_tflops.get(kind) or self.peak_tflops["fp16" if kind == "fp8" else "fp32"]


def _peak(fp16: float, fp32: float, *, tf32: float = 0.0, fp8: float = 0.0, int8: float = 0.0) -> dict[str, float]:
    given = {"fp16": fp16, "bf16": fp16, "tf32": tf32, "fp32": fp32, "fp8": fp8, "int8": int8}
    return {kind: rate for kind, rate in given.items() if rate}


# Launch overhead: what a one-tile kernel takes cold, between two events, over what its tile takes: 4 us on an H200 (torch 2.11,
# Triton 3.6, 2026-11). The other NVIDIA figures are taken over from it; AMD's launches through HIP are longer.
_NVIDIA_LAUNCH_US, _AMD_LAUNCH_US = 4.0, 7.0

# Each row names the documents that its figures stand in; peaks are dense, so that datasheet figures "with sparsity" are halved. A clock
# was held against the peaks, which are multiprocessors x operations a clock x clock. Checked 2026-11, where the document itself was not
# at hand against what others quote from it; "unconfirmed" marks a figure for which neither was found.

# NVIDIA A100 Tensor Core GPU datasheet (2021: peaks, bandwidths); NVIDIA A100 Tensor Core GPU Architecture white paper, table "Comparison
# of NVIDIA Data Center GPUs" (multiprocessors, L2, boost clock).
_A100 = _peak(312, 19.5, tf32=156, int8=624)
# NVIDIA H100 Tensor Core GPU Architecture white paper, "Comparison of NVIDIA A100 and H100 Data Center GPUs". The boost clock is that of
# the fp32 figure; the tensor cores' figures are for 1830 MHz.
_H100 = _peak(989.4, 66.9, tf32=494.7, fp8=1978.9, int8=1978.9)

GPUS = (
    Gpu("NVIDIA A100-SXM4-80GB", "A100", "sm_80", 108, _A100, 2039, 40 * _MB, 1410, _NVIDIA_LAUNCH_US, ("A100 SXM", "A100 80GB", "A100 80GB SXM")),
    Gpu("NVIDIA A100-SXM4-40GB", "A100 40GB", "sm_80", 108, _A100, 1555, 40 * _MB, 1410, _NVIDIA_LAUNCH_US, ("A100 40GB SXM",)),
    Gpu("NVIDIA A100 80GB PCIe", "A100 PCIe", "sm_80", 108, _A100, 1935, 40 * _MB, 1410, _NVIDIA_LAUNCH_US, ("A100-PCIE-80GB",)),
    Gpu("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe", "sm_80", 108, _A100, 1555, 40 * _MB, 1410, _NVIDIA_LAUNCH_US),
    Gpu("NVIDIA H100 80GB HBM3", "H100", "sm_90", 132, _H100, 3352, 50 * _MB, 1980, _NVIDIA_LAUNCH_US, ("H100 SXM", "H100 80GB", "H100 SXM5")),
    # The same white paper, column "H100 PCIe": 114 multiprocessors, HBM2e. The datasheet rounds the bandwidth to 2 TB/s.
    Gpu("NVIDIA H100 PCIe", "H100 PCIe", "sm_90", 114, _peak(756, 51.2, tf32=378, fp8=1513, int8=1513), 2039, 50 * _MB, 1755, _NVIDIA_LAUNCH_US),
    # NVIDIA H200 Tensor Core GPU datasheet (2024): an H100's peaks, 4.8 TB/s. Measured 2026-11-20 (torch 2.11.0, Triton 3.6.0, driver
    # 580.159, random data): a device copy 4.28 TB/s; fp16 645 to 667 TFLOP/s over milliseconds, where the power limit binds; L2 as the
    # driver reports it.
    Gpu("NVIDIA H200", "H200", "sm_90", 132, _H100, 4800, 60 * _MB, 1980, _NVIDIA_LAUNCH_US, ("H200 SXM",), copy_gbps=4280, sustained_tflops={"fp16": 655}),
    # NVIDIA HGX B200 datasheet (2025), one of eight: peaks, and 62 TB/s for the eight (the DGX B200 datasheet has 64). The architecture's
    # technical brief (2024) has 80 TFLOP/s fp32, which 148 multiprocessors would need 2.1 GHz for. Multiprocessors, L2 and clock: unconfirmed.
    Gpu("NVIDIA B200", "B200", "sm_100", 148, _peak(2250, 75, tf32=1125, fp8=4500, int8=4500), 7700, 126 * _MB, 1965, _NVIDIA_LAUNCH_US),
    # NVIDIA L40S datasheet (2023): peaks, bandwidth. NVIDIA Ada GPU Architecture white paper: AD102's 98304 KB of L2, of which the L40S is
    # taken to have all. Clock: unconfirmed, and what the peaks come to.
    Gpu("NVIDIA L40S", "L40S", "sm_89", 142, _peak(362, 91.6, tf32=183, fp8=733, int8=733), 864, 96 * _MB, 2520, _NVIDIA_LAUNCH_US),
    # NVIDIA Ada GPU Architecture white paper, appendix A, "GeForce RTX 4090": fp16 and fp8 with fp32 accumulation.
    Gpu("NVIDIA GeForce RTX 4090", "RTX 4090", "sm_89", 128, _peak(165.2, 82.6, tf32=82.6, fp8=330.3, int8=660.6), 1008, 72 * _MB, 2520, _NVIDIA_LAUNCH_US, ("4090",)),
    # NVIDIA RTX Blackwell GPU Architecture white paper, appendix A, "GeForce RTX 5090": fp16 and fp8 with fp32 accumulation.
    Gpu("NVIDIA GeForce RTX 5090", "RTX 5090", "sm_120", 170, _peak(209.5, 104.8, tf32=104.8, fp8=419, int8=838), 1792, 96 * _MB, 2407, _NVIDIA_LAUNCH_US, ("5090",)),
    # AMD Instinct MI250X data sheet: 383 TFLOP/s fp16, 47.9 fp32 (vector), 3277 GB/s, halved: torch sees each of the two dies as a GPU. ROCm
    # documentation, "AMD GPU specifications": 110 compute units and 8 MB of L2 a die.
    Gpu("AMD Instinct MI250X", "MI250X", "gfx90a", 110, _peak(191.5, 23.9, int8=191.5), 1638, 8 * _MB, 1700, _AMD_LAUNCH_US, ("MI250X/MI250",)),
    # AMD Instinct MI300X data sheet (2023), and "AMD GPU specifications": the cache is the 256 MB of L3, since each die of 38 compute units
    # has 4 MB of L2 to itself. Its 2614.9 TFLOP/s of fp8 are for kinds of fp8 that epigen does not have.
    Gpu("AMD Instinct MI300X", "MI300X", "gfx942", 304, _peak(1307.4, 163.4, tf32=653.7, int8=2614.9), 5325, 256 * _MB, 2100, _AMD_LAUNCH_US, ("MI300X OAM",)),
    # AMD's page of the MI355X (2025): 2.5 and 5 PFLOP/s, here unrounded, 256 compute units x 4096 fp16 operations a clock; and "AMD GPU
    # specifications", as for the MI300X.
    Gpu("AMD Instinct MI355X", "MI355X", "gfx950", 256, _peak(2516.6, 157.3, fp8=5033.2, int8=5033.2), 8000, 256 * _MB, 2400, _AMD_LAUNCH_US),
    # AMD's product pages ("peak half precision compute performance", bandwidth, boost) and "AMD GPU specifications" (compute units, Infinity
    # Cache). int8 is unconfirmed: RDNA 3 is taken to multiply it at the rate of fp16.
    Gpu("AMD Radeon RX 7900 XTX", "RX 7900 XTX", "gfx1100", 96, _peak(122.8, 61.4, int8=122.8), 960, 96 * _MB, 2500, _AMD_LAUNCH_US, ("7900 XTX",)),
    Gpu("AMD Radeon RX 7900 GRE", "RX 7900 GRE", "gfx1100", 80, _peak(92.0, 46.0, int8=92.0), 576, 64 * _MB, 2245, _AMD_LAUNCH_US, ("7900 GRE",)),
    # The same; AMD announced 779 TOPS of int8 with sparsity, of which fp16 has a quarter. fp8 is unconfirmed: taken to be int8's rate.
    Gpu("AMD Radeon RX 9070 XT", "RX 9070 XT", "gfx1201", 64, _peak(195, 48.7, fp8=389, int8=389), 640, 64 * _MB, 2970, _AMD_LAUNCH_US, ("9070 XT",)),
)  # fmt: skip

_MAKERS = re.compile(r"\b(nvidia|amd|geforce|radeon|instinct|tesla)\b")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", _MAKERS.sub("", name.lower()))


_BY_NAME = {_plain(n): g for g in GPUS for n in (g.name, g.short, *g.aliases)}

DEFAULT = _BY_NAME["h200"]


def find(name: str) -> Gpu | None:
    """The row of "NVIDIA H200" or "h200"; None for a part that has none: a near name may be a slower part."""
    return _BY_NAME.get(_plain(name))


def by_name(name: str) -> Gpu:
    """As `find`. Raises TargetError for a part that has no row."""
    gpu = find(name)
    if gpu is None:
        hint = near_miss(name.lower(), (n for g in GPUS for n in (g.short.lower(), g.name.lower())))
        raise TargetError(f"unknown GPU '{name}': {hint or 'known are ' + ', '.join(g.short for g in GPUS)}")
    return gpu


def of_target(target: Target) -> Gpu:
    """The row of a target's part; where it has none, the first of its architecture (or its nearest kin), by number of multiprocessors."""
    gpu = find(target.part)
    if gpu is not None and gpu.architecture == target.name:
        return gpu
    kin = next((g for g in GPUS if g.architecture == target.name), None) or _kin(target)
    share = target.multiprocessors / kin.multiprocessors
    rates = {kind: rate * share for kind, rate in kin.peak_tflops.items()}
    cache, bandwidth = max(_MB, int(kin.l2_bytes * share)), kin.bandwidth_gbps * share
    known = target.name if target.name in TARGETS else kin.architecture
    return Gpu(target.part, target.part, known, target.multiprocessors, rates, bandwidth, cache, kin.clock_mhz, kin.launch_us)


def _kin(target: Target) -> Gpu:
    """sm_86 and other architectures without a row."""
    if target.backend == "cuda":
        older = [g for g in GPUS if g.target.backend == "cuda" and int(g.target.arch) <= int(target.arch)]
        return max(older or GPUS[:1], key=lambda g: int(g.target.arch))
    return by_name("MI300X" if str(target.arch).startswith("gfx9") else "RX 7900 XTX")
