"""The analytic model: what a config needs, and about how long it takes, from datasheet figures alone. Pure functions.

In go a kernel's meaning, a config, a shape and a GPU; out come resources, a refusal, or an estimate in microseconds. The
estimate is made to rank the configs of one problem: block sizes, warps, stages, order of tiles, alignment and layouts move it as they
move measured times. It is not a promise of absolute time; on long kernels power limits add about a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from epigen import ops
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.dtypes import FP8E4M3, FP16, FP32
from epigen.runtime.device import Target
from epigen.tuning.gpus import Gpu
from epigen.tuning.traffic import Shape, eager_dtype, item_bytes, partial_bytes, size_of, traffic

# Constants of the estimate. Fitted to the log of 37 measured times of relu(mm + bias) on an H200, fp16, cold L2 (torch 2.11, Triton 3.6,
# 2026-11-20; the table is in tests/test_model.py), to 8 % in the root mean square, then rounded. Each stands for something that other
# GPUs share, and none for a single shape or config.
_TENSOR_SHARE = 0.88  # of the tensor cores' peak while they have work
_SYNC_SHARE = 0.55  # Hopper without wgmma: the older instruction reaches about 60 % of the peak
_OLDER_SHARE = 0.8  # the older instruction where it is the only one
_PLAIN_SHARE = 0.5  # fp32 without tensor cores: the operands come through the same ports as the results
_ONE_WARPGROUP = 0.97  # whole main loop: the only four warps also issue the loads
_SHARED_BYTES_CLOCK = 128  # shared memory of one multiprocessor, bytes a clock, on every GPU in the table
_L2_BYTES_CLOCK = 64  # from L2 into one multiprocessor, bytes a clock: the port's width
_SHORT_RUN = 0.46  # each halving of a tile's row below 256 contiguous bytes adds this share of the feeding time, beside the products: "nt" against "nn"
_SHORT_HIDDEN = 0.58  # of that, where another block multiplies meanwhile
_SMOOTH = 8.0  # exponent of the norm that joins what overlaps: higher is nearer to a plain maximum
_STEP_US = 0.02  # barriers and late loads of one step; each further stage in flight absorbs some
_L2_US, _DRAM_US = 0.3, 0.35  # a load's latency, and what missing L2 adds: 16x4096x4096, which waits for nothing else
_CHAIN_CLOCKS = 33  # one product of 16 fp16 along k, before the next can add to the same accumulators
_MEMORY_BARE = 0.05  # of the memory's time for the operands that nothing hides: the order of tiles shows a little even where the math binds
_START_US = 0.015  # a multiprocessor starts its blocks one by one
_BLOCK_US = 0.1  # starting a block, and again the barriers around its epilogue
_OVERLAP = 0.85  # of fill and epilogue left bare where another block computes meanwhile
_SCALAR_NS = 1.0  # one element loaded by itself, for want of an asynchronous copy below 4 bytes: 4095x4097x1023
_SPILLED, _SPILL = 1.14, 1.35  # beyond this share of the registers a thread can have, the main loop takes so much longer: 128x256 with 4 warps
_GAP_US = 1.5  # between two kernels of one stream
_VENDOR_TILES = ((128, 256, 0.86), (128, 128, 0.77), (64, 128, 0.66), (64, 64, 0.53))  # rows, columns, share of the peak
_VENDOR_US = 2.0  # the vendor's kernel beyond its arithmetic: fill and drain
_VENDOR_UNALIGNED = {16: 1.0, 8: 2.0, 4: 3.0, 2: 5.5, 1: 5.5}  # by bytes: 4095x4097x1023 fp16 at 125 instead of 755 TFLOP/s
_WGMMA = ("sm_90", "sm_100")
_RUN_BYTES = 256
_VECTOR_ELEMENTS = 16  # Triton specialises integers on divisibility by 16; other strides get loads of one element
_MOST_ACCUMULATORS = 0.88  # of the registers a thread can have: 224 of 255


@dataclass(frozen=True, slots=True)
class Resources:
    """What one block takes. stage_bytes: one step's operands. accumulators: fp32 values a thread. registers: what a thread would like to
    have, estimated to about 15 %. most_registers: what it can have.
    """

    shared_bytes: int
    stage_bytes: int
    accumulators: int
    registers: int
    most_registers: int
    blocks_per_sm: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Microseconds, and what they are made of. mainloop_us, epilogue_us, launch_us, finish_us and product_us add up to us, but where the
    memory's time memory_us is longer than the kernel's own. product_us: the vendor's, for the schedules that take it.

    tiles, waves: blocks, and how often the GPU is filled with them (the last time in part). blocks_per_sm: at a time.
    """

    us: float
    launch_us: float
    mainloop_us: float
    epilogue_us: float
    finish_us: float
    product_us: float
    memory_us: float
    tiles: int
    waves: float
    blocks_per_sm: int

    @property
    def tail_waste(self) -> float:
        """Share of all slots of all waves that stay empty."""
        return 1 - self.waves / math.ceil(self.waves) if self.waves > 0 else 0.0


# -- resources


def resources(spec: KernelSpec, config: KernelConfig, target: Target, layout: str = "nn") -> Resources:
    """What a block of the main kernel takes on a target, before anything is compiled."""
    return _Work(spec, (0, 0, 0), target, layout).resources(config)


def refusal(spec: KernelSpec, config: KernelConfig, shape: Shape, target: Target, layout: str = "nn") -> str:
    """'' or why a config cannot run, or is hopeless."""
    if not SCHEDULES[config.schedule].multiplies:
        return ""
    sig = spec.signature
    block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
    threads = config["num_warps"] * target.warp_size
    if FP8E4M3 in (sig.a, sig.b) and not target.fp8:
        return f"{target.name} does not multiply fp8e4m3"
    least = 32 if sig.a.bytes == 1 else 16
    if block_k < least:
        return f"block_k={block_k} is below {least}, the least for {sig.a}"
    if threads > 1024:
        return f"{config['num_warps']} warps are {threads} threads, and a block holds 1024"
    for extent, (name, block, floor) in zip(shape, (("block_m", block_m, 16), ("block_n", block_n, 16), ("block_k", block_k, least)), strict=True):
        padded = max(floor, 1 << max(0, extent - 1).bit_length())
        if block > padded:
            return f"{name}={block} is {block // padded} times what {extent} fills"
    needs = resources(spec, config, target, layout)
    if needs.shared_bytes > target.shared_bytes:
        return f"{needs.shared_bytes} bytes of shared memory, and a block of {target.name} has {target.shared_bytes}"
    if needs.accumulators > _MOST_ACCUMULATORS * needs.most_registers:
        return f"{needs.accumulators} accumulators a thread, and it has {needs.most_registers} registers"
    # a warp multiplies 16 rows by 8 columns at least; with fewer for each, warps repeat each other's work
    if block_m * block_n < 128 * config["num_warps"]:
        return f"{config['num_warps']} warps share {block_m}x{block_n} values: less than 16x8 each"
    return ""


# -- time


def estimate_us(spec: KernelSpec, config: KernelConfig, shape: Shape, gpu: Gpu, layout: str = "nn") -> Estimate:
    """About how long one call takes, launches included, with nothing of the operands in L2. shape: M, N, K. layout: how a and b lie."""
    return next(iter(estimates(spec, (config,), shape, gpu, layout)))


def estimates(spec: KernelSpec, configs: Iterable[KernelConfig], shape: Shape, gpu: Gpu, layout: str = "nn") -> list[Estimate]:
    """An estimate a config, in the given order; what the problem alone decides is worked out once."""
    work = _Timing(spec, shape, gpu, layout)
    return [work.estimate(config) for config in configs]


def unfused_us(spec: KernelSpec, shape: Shape, gpu: Gpu, layout: str = "nn") -> float:
    """About how long the product takes in the vendor's library, followed by eager PyTorch's operations, each a launch and a pass."""
    moved = traffic(spec, shape)
    operands = shape[0] * shape[2] * spec.signature.a.bytes + shape[2] * shape[1] * spec.signature.b.bytes
    beside = max(0.0, moved.unfused_bytes - operands - shape[0] * shape[1] * eager_dtype(spec).bytes)
    product = _Timing(spec, shape, gpu, layout).product_us
    return gpu.launch_us + product + (moved.unfused_launches - 1) * _GAP_US + beside / (gpu.achieved_gbps * 1e3)


def rank(spec: KernelSpec, configs: Iterable[KernelConfig], shape: Shape, gpu: Gpu, layout: str = "nn") -> list[KernelConfig]:
    """The configs, fastest first by estimate; equal estimates keep the given order."""
    given = list(configs)
    times = [e.us for e in estimates(spec, given, shape, gpu, layout)]
    return [given[i] for i in sorted(range(len(given)), key=times.__getitem__)]


def _operations(op: str) -> float:
    """Instructions an element for a row of the operation table, read off its Triton text: the slow functions are 10 to 30 instructions."""
    if op not in ops.TABLE:
        return 1.0
    text = "\n".join([ops.TABLE[op].triton, *ops.TABLE[op].body])
    return 1.0 + sum(
        weight * text.count(part) for part, weight in (("*", 1), (" + ", 1), (" - ", 1), (" / ", 8), ("exp(", 8), ("log(", 12), ("sqrt(", 8), ("erf(", 25))
    )


class _Work:
    """What a spec decides about every config: bytes and instructions an element of a tile, and registers."""

    def __init__(self, spec: KernelSpec, shape: Shape, target: Target, layout: str):
        self.spec, self.shape, self.target, self.layout = spec, shape, target, layout
        sig = spec.signature
        self.element_bytes = max(sig.a.bytes, sig.b.bytes)
        self.plain = sig.a == FP32 and (sig.precision == "ieee" or not target.tf32)
        tiles = [i for i in spec.inputs if i.indices == "mn" and i.dtype is not None]
        self.read_bytes = sum(0.125 if i.packed else i.dtype.bytes for i in tiles if i.dtype)
        self.written_bytes = sum(0.125 if s.packed else float(s.dtype.bytes) for s in spec.stores)
        bits = sum(i.packed for i in tiles) + sum(s.packed for s in spec.stores)
        # a reduction costs its own instructions and the exchange between threads, a mask its shifts
        self.operations = sum(_operations(line.op) for line in spec.lines) + 4.0 * bits + sum(16.0 if p.row == "logsumexp" else 4.0 for p in spec.partials)
        self.store_bytes = max((s.dtype.bytes for s in spec.stores if s.indices == "mn" and not s.packed), default=0)
        self.held_an_element = min(1.0, self.read_bytes / 4 + 0.3 * sum(s.packed for s in spec.stores) + 0.01 * max(0.0, self.operations - 4))

    def wgmma(self, block_m: int, warps: int) -> bool:
        """Hopper and later datacentre parts multiply straight from shared memory, 64 rows and four warps at a time."""
        return self.target.name in _WGMMA and block_m >= 64 and warps % 4 == 0 and not self.plain

    def resources(self, config: KernelConfig) -> Resources:
        threads = config["num_warps"] * self.target.warp_size
        block_m, block_n = config["block_m"], config["block_n"]
        accumulators = -(-block_m * block_n // threads)
        most = min(255, self.target.sm_registers // threads)
        if not SCHEDULES[config.schedule].multiplies:
            registers = 24 + int((1 + self.read_bytes / 4) * accumulators)
            return Resources(0, 0, accumulators, registers, most, max(1, self.target.blocks_per_sm(threads, min(most, registers), 0)))
        block_k, stages = config["block_k"], config["num_stages"]
        wgmma = self.wgmma(block_m, config["num_warps"])
        # Seen in 62 kernels that Triton 3.9 compiled, 2026-11: wgmma keeps `num_stages` buffers, the older instruction (sm_80, sm_120, gfx942,
        # gfx1100, and sm_90 where block_m < 64 or there are fewer than four warps) one less.
        buffers = max(1, stages if wgmma else stages - 1)
        along_k = (self.layout[0] == "n", self.layout[1] == "t")
        # wgmma wants 8-bit operands along k: another one goes through registers, and has one buffer
        each = [buffers if k or self.element_bytes > 1 or not wgmma else 1 for k in along_k]
        shared = (each[0] * block_m + each[1] * block_n) * block_k * self.element_bytes
        if self.target.backend == "cuda":  # the stores' layout is reached through shared memory
            shared = max(shared, min(block_m * block_n * self.store_bytes, 1 << 16))
        # The same kernels: 36, the accumulators, what the epilogue holds beside them, and two for the address of each copy of 16 bytes. The
        # older instruction also holds the operands, about as much again; fp8 a second accumulator, since the tensor cores' own is narrow.
        again = 1.0 if not wgmma else 0.8 if self.spec.signature.a.is_fp8 else 0.0
        copies = max(1, (block_m + block_n) * block_k * self.element_bytes // 16 // threads)
        registers = int(36 + accumulators * (1 + self.held_an_element + again) + 2 * copies)
        stage = (block_m + block_n) * block_k * self.element_bytes
        return Resources(shared, stage, accumulators, registers, most, max(1, self.target.blocks_per_sm(threads, min(most, registers), shared)))


class _Timing(_Work):
    """Estimates for one problem on one GPU."""

    def __init__(self, spec: KernelSpec, shape: Shape, gpu: Gpu, layout: str):
        super().__init__(spec, shape, gpu.target, layout)
        self.gpu = gpu
        m, n, k = shape
        sig = spec.signature
        self.sms = gpu.multiprocessors
        # per multiprocessor, in a microsecond
        self.flops_us = gpu.peak(FP32 if self.plain else sig.a, "ieee" if self.plain else sig.precision) * 1e6 / self.sms
        self.bytes_us = gpu.achieved_gbps * 1e3
        self.clock_us = float(gpu.clock_mhz)
        # the extent along which each operand lies in memory, which is its other stride
        runs = (k if layout[0] == "n" else m, n if layout[1] == "n" else k)
        self.vectors = tuple(extent % _VECTOR_ELEMENTS == 0 for extent in runs)
        self.operand_bytes = (m * k * sig.a.bytes, k * n * sig.b.bytes)
        self.vector_bytes = sum(item_bytes(i, m, n) for i in spec.inputs if i.indices != "mn")
        self.product_us = self._vendor_us()

    def estimate(self, config: KernelConfig) -> Estimate:
        return self._tiled(config) if SCHEDULES[config.schedule].multiplies else self._library(config)

    def _tiled(self, config: KernelConfig) -> Estimate:
        m, n, k = self.shape
        block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
        needs = self.resources(config)
        tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
        tiles = tiles_m * tiles_n
        resident = min(needs.blocks_per_sm, max(1, -(-tiles // self.sms)))
        slots = resident * self.sms
        steps = -(-k // block_k)
        moved = self._operand_traffic(config, tiles_m, tiles_n, min(tiles, slots))
        # the first wave finds nothing in L2; the later ones find the operands, where L2 holds them
        cold = _L2_US + _DRAM_US
        later = _L2_US if sum(self.operand_bytes) <= self.gpu.l2_bytes / 2 else cold
        full, rest = divmod(tiles, slots)
        last = -(-rest // self.sms)
        mainloop = epilogue = 0.0
        for count, blocks, latency in ((min(1, full), resident, cold), (max(0, full - 1), resident, later), (min(1, rest), last, later if full else cold)):
            if count:
                bare = _OVERLAP if blocks > 1 and tiles > slots else 1.0
                fill = latency + _BLOCK_US + needs.stage_bytes / (_L2_BYTES_CLOCK * self.clock_us)
                mainloop += count * (steps * self._step_us(config, needs, blocks, latency, steps) + bare * fill)
                epilogue += count * bare * self._epilogue_us(block_m, block_n, blocks, config["num_warps"])
        partials = sum(partial_bytes(p.axes, m, n, (block_m, block_n)) for p in self.spec.partials)
        memory = (moved + self._epilogue_bytes() + partials) / self.bytes_us
        # the memory's time overlaps the kernel's but for a rest
        mainloop += tiles / self.sms * _START_US + _MEMORY_BARE * moved / self.bytes_us
        kernel = _norm(mainloop + epilogue, memory)
        finish = self._finish_us(tiles_m, tiles_n)
        return Estimate(self.gpu.launch_us + kernel + finish, self.gpu.launch_us, mainloop, epilogue, finish, 0.0, memory, tiles, tiles / slots, resident)

    def _step_us(self, config: KernelConfig, needs: Resources, blocks: int, latency: float, steps: int) -> float:
        """One step over block_k, of all blocks that share a multiprocessor."""
        block_m, block_n, block_k, warps = config["block_m"], config["block_n"], config["block_k"], config["num_warps"]
        a_bytes, b_bytes = block_m * block_k * self.element_bytes, block_n * block_k * self.element_bytes
        share = self._tensor_share(block_m, warps, blocks)
        products = 2.0 * block_m * block_n * block_k / (self.flops_us * share)
        if self.wgmma(block_m, warps):
            beside = max(1, warps // 4 // (block_m // 64))  # warpgroups that share rows, and read them again
            read = block_m // 64 * (64 * beside + block_n) * block_k * self.element_bytes
        else:
            # warps side by side read the same rows: as square a grid of them as the tile has
            rows = min(max(1, block_m // 16), _power_at_most(math.sqrt(warps * block_m / block_n)), warps)
            read = a_bytes * (warps // rows) + b_bytes * rows
        shared = (read + a_bytes + b_bytes) / (_SHARED_BYTES_CLOCK * self.clock_us)
        along_k = block_k * self.element_bytes
        a_run = along_k if self.layout[0] == "n" else block_m * self.element_bytes
        b_run = block_n * self.element_bytes if self.layout[1] == "n" else along_k
        port = _L2_BYTES_CLOCK * self.clock_us
        feed = (a_bytes + b_bytes) / port
        short = (a_bytes * _short_runs(a_run) + b_bytes * _short_runs(b_run)) / port
        chain = 0.0 if self.plain else block_k * self.element_bytes / 32 * _CHAIN_CLOCKS / self.clock_us
        in_flight = max(1, min(config["num_stages"] - 1, steps))
        scalar = (0 if self.vectors[0] else block_m * block_k) + (0 if self.vectors[1] else block_n * block_k)
        late = (latency + feed + short) / in_flight
        step = _norm(blocks * products, blocks * shared, blocks * feed, late, chain) + _STEP_US * (0.5 + warps / 16) * (latency / _L2_US) / in_flight
        step += short * (1.0 if blocks == 1 else blocks * _SHORT_HIDDEN)
        if blocks * warps <= 4:
            step /= _ONE_WARPGROUP
        if config["num_stages"] == 1:  # load, wait, multiply
            step = latency + blocks * (max(products, shared) + feed + short) + chain
        if scalar:
            step += blocks * scalar * _SCALAR_NS * 1e-3 + latency
        return step * (_SPILL if needs.registers > _SPILLED * needs.most_registers else 1.0)

    def _tensor_share(self, block_m: int, warps: int, blocks: int) -> float:
        if self.plain:
            return _PLAIN_SHARE * min(1.0, blocks * warps / 4)
        if not self.wgmma(block_m, warps):
            return (_SYNC_SHARE if self.target.name in _WGMMA else _OLDER_SHARE) * min(1.0, blocks * warps / 4)
        return _TENSOR_SHARE

    def _epilogue_us(self, block_m: int, block_n: int, blocks: int, warps: int) -> float:
        """Inputs, lines and stores of a wave of tiles: the tiled schedule starts them when its product is done."""
        elements = block_m * block_n * blocks
        moved = elements * (self.read_bytes + self.written_bytes) * self.sms / self.bytes_us
        lanes = min(128, 32 * warps * blocks)
        return moved + elements * (self.operations + 4.0) / (lanes * self.clock_us) + _BLOCK_US + (_L2_US if self.read_bytes else 0.0)

    def _epilogue_bytes(self) -> float:
        m, n, _ = self.shape
        return m * n * (self.read_bytes + self.written_bytes) + self.vector_bytes

    def _operand_traffic(self, config: KernelConfig, tiles_m: int, tiles_n: int, concurrent: int) -> float:
        """Bytes of operands that come from memory: group_m decides how much of a wave lies in the same rows and columns."""
        once = float(sum(self.operand_bytes))
        if once <= self.gpu.l2_bytes / 2 or not concurrent:
            return once
        group = min(config["group_m"], tiles_m)
        columns = min(tiles_n, -(-concurrent // group))
        rows = min(tiles_m, group * -(-concurrent // (group * tiles_n)))
        panel = (rows * config["block_m"] + columns * config["block_n"]) * self.shape[2] * self.element_bytes
        return max(once, tiles_m * tiles_n / concurrent * panel)

    def _finish_us(self, tiles_m: int, tiles_n: int) -> float:
        m, n, k = self.shape
        total = 0.0
        for finish in self.spec.finishes:
            width = size_of(finish.indices, m, n)
            lengths = [k if s.operand else {"n": tiles_m, "m": tiles_n, "": tiles_m * tiles_n}[finish.indices] for s in finish.sources]
            # 4 warps a block walk over the length, 32 at a time, a load's latency each; the bytes are shared by all blocks
            chunks = sum(-(-length // 32) for length in lengths)
            total += _GAP_US + _L2_US * (1 + chunks / 4) + 4.0 * width * sum(lengths) / self.bytes_us
        return total

    def _vendor_us(self) -> float:
        """The vendor's product with an fp32 result, without its launch."""
        m, n, k = self.shape
        sig = self.spec.signature
        dtype = FP16 if sig.a.is_fp8 else sig.a  # fp8 is widened first
        peak = self.gpu.peak(dtype, sig.precision) * 1e6 / self.sms
        arithmetic = min(
            -(-(-(-m // rows) * -(-n // columns)) // self.sms) * 2.0 * rows * columns * k / (peak * share) for rows, columns, share in _VENDOR_TILES
        )
        together = 16
        for extent in (k if self.layout[0] == "n" else m, n if self.layout[1] == "n" else k):
            while extent * dtype.bytes % together:
                together //= 2
        arithmetic *= _VENDOR_UNALIGNED[max(1, together)]
        widened = 2 * sum(self.operand_bytes) if sig.a.is_fp8 else 0
        moved = (sum(self.operand_bytes) + widened + 4 * m * n) / self.bytes_us
        return max(arithmetic, moved) + 0.5 * min(arithmetic, moved) + _VENDOR_US + (2 * _GAP_US if widened else 0.0)

    def _library(self, config: KernelConfig) -> Estimate:
        m, n, _ = self.shape
        block_m, block_n, warps = config["block_m"], config["block_n"], config["num_warps"]
        needs = self.resources(config)
        tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
        tiles = tiles_m * tiles_n
        resident = min(needs.blocks_per_sm, max(1, -(-tiles // self.sms)))
        waves = tiles / (resident * self.sms)
        each = (4 + self.read_bytes + self.written_bytes) * block_m * block_n * (1.0 + 0.5 * _short_runs(block_n * 4))
        # what is in flight over the latency, up to the multiprocessor's share of the memory
        latency = _L2_US + _DRAM_US
        alu = block_m * block_n * (self.operations + 4.0) / (min(128, 32 * warps * resident) * self.clock_us)
        wave = latency + _BLOCK_US + resident * _norm(each * self.sms / self.bytes_us, alu)
        rest = tiles % (resident * self.sms)
        own = (tiles // (resident * self.sms)) * wave * (0.7 if resident > 1 else 1.0) + (latency + _BLOCK_US if rest else 0.0)
        memory = (4 * m * n + self._epilogue_bytes() + sum(partial_bytes(p.axes, m, n, (block_m, block_n)) for p in self.spec.partials)) / self.bytes_us
        own += tiles / self.sms * _START_US
        kernel = _norm(own, memory)
        finish = self._finish_us(tiles_m, tiles_n)
        launch = self.gpu.launch_us + _GAP_US
        return Estimate(launch + self.product_us + kernel + finish, launch, 0.0, own, finish, self.product_us, memory, tiles, waves, resident)


def _norm(*parts: float) -> float:
    """What overlapping parts take together: a little more than the longest."""
    longest = max(parts)
    if longest <= 0.0:
        return 0.0
    return float(longest * sum([(p / longest) ** _SMOOTH for p in parts]) ** (1 / _SMOOTH))


def _short_runs(run_bytes: float) -> float:
    """How much longer short runs of contiguous bytes take: a row of 128 bytes instead of 256."""
    return _SHORT_RUN * max(0.0, math.log2(_RUN_BYTES / run_bytes))


def _power_at_most(value: float) -> int:
    return 1 << max(0, int(math.log2(max(1.0, value))))
