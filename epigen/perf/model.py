"""The analytic model: about how long a config takes, from datasheet figures and a few constants. Pure functions.

In go a kernel's meaning, a config, a shape and a GPU; out come resources, a refusal, or an estimate in microseconds. The
estimate is made to rank the configs of one problem: block sizes, warps, stages, order of tiles, alignment and layouts move it as they
move measured times. It is not a promise of absolute time; on long kernels power limits add about a tenth.

Spearman's rank correlation with measured time over whole search spaces (fp16, H200, Triton 3.6, 2026-11; 5,572 configs of the seven
problems in tests/data/sweep_*.json, printed by `python -m bench.model`): square 0.97, medium, small and drelu_bgrad 0.96, skinny 0.94,
short_k 0.93, odd 0.85.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise, product

from epigen.codegen import schedules
from epigen.codegen.completion import finishing_step
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import LINE_BYTES, KernelConfig, KernelSpec, b_bytes, row_lengths
from epigen.dtypes import FP16, FP32, INT8, DType
from epigen.gpus import Gpu, Target
from epigen.ir.graph import OPERANDS
from epigen.perf.constants import FITTED, Constants
from epigen.perf.resources import WGMMA, Resources, Work
from epigen.perf.traffic import eager_dtype, item_bytes, partial_bytes, size_of, traffic
from epigen.shapes import Shape, products

# rows and columns of the vendor's tiles, and into how many parts it splits k, each at least so long. Its kernels for Hopper have nearly all such: 320x13952x2512
# ran at 659 TFLOP/s on an H200, in one wave of 110 tiles. With the constants they are off by 11 % in the root mean square over 541 products of tuned problems
# on an H100 and an H200, of 1 to 65536 rows (bf16 and fp16, torch 2.11, 2026-11); eleven tiles for all were off by 13 %.
_VENDOR_SIDES, _VENDOR_STEP, _VENDOR_MOST = (64, 128, 192, 256, 320), 32, 40960
# The share of the peak by what a tile multiplies of what it loads, rows * columns / (rows + columns): 21 of 64x32, 64 of 128x128.
_VENDOR_SHARES = ((0.0, 0.0), (21.3, 0.41), (32.0, 0.53), (42.7, 0.66), (52.0, 0.8), (64.0, 0.84), (90.0, 0.86), (math.inf, 0.86))
_VENDOR_SPLITS, _VENDOR_PART = (1, 2, 4, 8, 16, 32), 256
# How much of the shorter of arithmetic and memory nothing hides: of many waves, and how much less of one, which all multiprocessors end together: layers of
# 256 rows, of one wave, took 0.6 to 0.9 of what half of it gives. Of a batch the next product begins while one ends: with its results' own bytes 16 calls
# took 0.93 of what is expected, 13 % off in the root mean square (8 shapes of bench.batched on an H100, torch 2.11, 2026-11-26).
_VENDOR_BARE, _VENDOR_EVEN, _VENDOR_BATCH_BARE = 0.5, 0.4, 0.2
_THIN = 64  # rows: of so few the vendor's product is bound by reading one operand
# Where rows are aligned to fewer than 16 bytes it has older kernels, of one tile and so many times slower: 4095x4097x1023, 1000x1003x1001 and
# 8191x5003x4099 in 16 bits. Between 2 and 16 bytes nothing was measured.
_OLDER_VENDOR_TILE, _VENDOR_UNALIGNED = (128, 128, 0.77), {8: 2.0, 4: 3.0, 2: 5.0, 1: 5.0}
_VENDOR_INT8 = 2.0  # and of int8: 26 products of layers, of 16 to 8192 rows, on an H100 and on an H200
_RUN_BYTES = 256
_SECTOR_BYTES = 32  # of a line of L2
_TMA_ROW_BYTES = 128  # TMA lays a tile out in pieces whose rows are so long
_LANES = 128  # of a multiprocessor: so many numbers are added a clock
_CONVERTED = 3.0  # instructions a weight that is converted in registers, with its load (sm_90, Triton 3.6)
_STREAMED = 0.3  # of L2: what of the operands stays there while others, the epilogue's tiles and the results go through it
_BESIDE = 16  # multiprocessors whose requests meet before L2: those of a processing cluster


@dataclass(frozen=True, slots=True)
class Estimate:
    """Microseconds, and what they are made of. mainloop_us, epilogue_us, launch_us, finish_us and product_us add up to us, but where the
    memory's time memory_us is longer than the kernel's own. product_us: the vendor's, for the schedules that take it.

    tiles, waves: blocks, and how often the GPU is filled with them (the last time in part). blocks_per_sm: at a time. All 0 where the
    vendor computes all of the program, and nobody knows how.
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


def resources(spec: KernelSpec, config: KernelConfig, target: Target, shape: Shape = (0, 0, 0)) -> Resources:
    """What a block of the main kernel takes on a target, before anything is compiled. shape: by default one of aligned rows."""
    return Work(spec, shape, target).resources(config)


# -- time


def estimate_us(spec: KernelSpec, config: KernelConfig, shape: Shape, gpu: Gpu) -> Estimate:
    """About how long one call takes, launches included, with nothing of the operands in L2. shape: M, N, K."""
    return next(iter(estimates(spec, (config,), shape, gpu)))


def estimates(spec: KernelSpec, configs: Iterable[KernelConfig], shape: Shape, gpu: Gpu, constants: Constants = FITTED) -> list[Estimate]:
    """An estimate a config, in the given order; what the problem alone decides is worked out once."""
    work = _Timing(spec, shape, gpu, constants)
    return [work.estimate(config) for config in configs]


def unfused_us(spec: KernelSpec, shape: Shape, gpu: Gpu) -> float:
    """About how long the product takes in the vendor's library, followed by eager PyTorch's operations, each a launch and a pass."""
    moved, (m, n, k) = traffic(spec, shape), shape[-3:]
    each = b_bytes(shape, spec.signature) + m * n * eager_dtype(spec).bytes
    product_bytes = products(shape) * (m * k * spec.signature.a.bytes + len(spec.products) * each)
    beside = max(0.0, moved.unfused_bytes - product_bytes)
    product = len(spec.products) * _Timing(spec, shape, gpu, FITTED).vendor_us(eager_dtype(spec))
    return gpu.launch_us + product + (moved.unfused_launches - 1) * FITTED.gap_us + beside / (gpu.achieved_gbps * 1e3)


def rank(spec: KernelSpec, configs: Iterable[KernelConfig], shape: Shape, gpu: Gpu) -> list[KernelConfig]:
    """The configs, fastest first by estimate; equal estimates keep the given order."""
    given = list(configs)
    times = [e.us for e in estimates(spec, given, shape, gpu)]
    return [given[i] for i in sorted(range(len(given)), key=times.__getitem__)]


class _Timing(Work):
    """Estimates for one problem on one GPU."""

    def __init__(self, spec: KernelSpec, shape: Shape, gpu: Gpu, constants: Constants):
        super().__init__(spec, shape, gpu.target)
        self.gpu, self.c = gpu, constants
        self.count, (m, n, k) = products(shape), shape[-3:]
        sig = spec.signature
        self.sms = gpu.multiprocessors
        # per multiprocessor, in a microsecond
        self.flops_us = gpu.peak(FP32 if self.plain else sig.a, "ieee" if self.plain else sig.precision) * 1e6 / self.sms
        self.bytes_us = gpu.achieved_gbps * 1e3
        self.clock_us = float(gpu.clock_mhz)
        self.operand_bytes = (self.count * m * k * sig.a.bytes, len(spec.products) * self.count * b_bytes(shape, sig))
        self.vector_bytes = sum(item_bytes(i, m, n) for i in spec.inputs if i.indices != "mn")
        self.beside_bytes = sum(item_bytes(i, m, n, k) for i in self.along_k)

    @functools.cached_property
    def product_us(self) -> float:
        """The vendor's product. It takes ten times as long to estimate as all else that the problem alone decides, and few configs ask."""
        return self.vendor_us(eager_dtype(self.spec) if self.spec.bare_product else None, widened=True)

    def estimate(self, config: KernelConfig) -> Estimate:
        if not SCHEDULES[config.schedule].multiplies:
            return self._library(config)
        if config.schedule == "split_k":
            return self._split_k(config)
        return self._persistent(config) if SCHEDULES[config.schedule].persistent else self._tiled(config)

    def _tiled(self, config: KernelConfig, splits: int = 1) -> Estimate:
        """splits: how many blocks share a tile, and k."""
        m, n, k = self.shape[-3:]
        block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
        needs = self.resources(config)
        tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
        tiles = self.count * tiles_m * tiles_n * splits
        resident = min(needs.blocks_per_sm, max(1, -(-tiles // self.sms)))
        slots = resident * self.sms
        steps = -(-k // (block_k * splits))
        moved = self._operand_traffic(config, tiles_m, tiles_n, min(tiles, slots))
        # the first wave finds nothing in L2; the later ones find the operands, where L2 holds them
        cold, later = self._cold_us, self._later_us
        full, rest = divmod(tiles, slots)
        last = -(-rest // self.sms)
        mainloop = epilogue = 0.0
        for count, blocks, latency in ((min(1, full), resident, cold), (max(0, full - 1), resident, later), (min(1, rest), last, later if full else cold)):
            if count:
                bare = self.c.overlap if blocks > 1 and tiles > slots else 1.0
                fill, loop = self._loop_us(config, needs, blocks, latency, steps, tiles)
                mainloop += count * (loop + bare * fill)
                epilogue += count * bare * (self._epilogue_us(block_m, block_n, blocks, config["num_warps"], self.read_bytes) + self._arrival_us(config))
        epilogue += self._late_us(config)  # what the blocks beside it, and those after it, do not cover
        partials = self.count * sum(partial_bytes(p.axes, m, n, (block_m, block_n)) for p in self.spec.partials)
        memory = (moved + self._epilogue_bytes(tiles_n) + partials) / self.bytes_us
        # the memory's time overlaps the kernel's but for a rest
        mainloop += self.c.memory_bare * moved / self.bytes_us
        kernel = self._norm(mainloop + epilogue, memory)
        finish = self._finish_us(config, tiles_m, tiles_n)
        return Estimate(self.gpu.launch_us + kernel + finish, self.gpu.launch_us, mainloop, epilogue, finish, 0.0, memory, tiles, tiles / slots, resident)

    def _split_k(self, config: KernelConfig) -> Estimate:
        """As many times as many tiles of as much shorter a k, then one of each tile reads what all of them have left."""
        whole = self._tiled(config, config["splits"])
        gathered = self._gathered_us(config, self.c.gather_share)
        return replace(whole, us=whole.us + gathered, epilogue_us=whole.epilogue_us + gathered)

    def _gathered_us(self, config: KernelConfig, share: float) -> float:
        """What it takes to add up a tile's parts, where k is split. share: of what L2 feeds a multiprocessor."""
        (m, n, _), splits = self.shape[-3:], schedules.splits(config)
        tiles = self.count * -(-m // config["block_m"]) * -(-n // config["block_n"])
        part_bytes = 4.0 * config["block_m"] * config["block_n"]
        # from L2, where it has just been written, one part after the other
        each = self.c.part_us + part_bytes / (share * self.c.l2_bytes_clock * self.clock_us)
        return 2 * self.c.l2_us + (splits + 1) * each + 0.3 * 2 * splits * tiles * part_bytes / self.bytes_us

    def _persistent(self, config: KernelConfig) -> Estimate:
        """Tile after tile on each multiprocessor.

        What overlaps an epilogue: nothing; the next tile's loads, where the loops are one or a warp of its own loads; or, in ping-pong, the other
        group's main loop.
        """
        m, n, k = self.shape[-3:]
        block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
        values, (down, across) = dict(config.values), schedules.tile_parts(config)
        tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
        splits = schedules.splits(config)
        tiles, steps = self.count * tiles_m * tiles_n * splits, max(1, -(-k // (block_k * splits)))
        rounds = -(-tiles // self.sms)
        step_us, fill_us = self._tma_step_us(config, tiles_m, tiles_n, steps)
        # the first round finds nothing in L2
        mainloop = self._cold_us - self._later_us + rounds * steps * step_us + (1 if values.get("flatten", 1) else rounds) * fill_us
        mainloop += self.c.descriptors_us + self.c.flattened_us * values.get("flatten", 0)
        epilogue = self._persistent_epilogue_us(config, rounds, steps * step_us)
        parts = (block_m // down, block_n // across)
        moved = self._operand_traffic(config, tiles_m, tiles_n, min(tiles, self.sms))
        partials = self.count * sum(partial_bytes(p.axes, m, n, parts) for p in self.spec.partials)
        pointed = self.count * m * n * self.pointed_at(config) if SCHEDULES[config.schedule].architecture == "hopper" else 0.0
        memory = (moved + self._epilogue_bytes(tiles_n * across) + partials + self.c.pointed_again * pointed) / self.bytes_us
        even = self.c.tma_even_smooth * (1 - 1 / tiles_m) / rounds if self.count == 1 else 0.0
        kernel = self._norm(mainloop + epilogue, memory, smooth=self.c.tma_memory_smooth + even)
        finish = self._finish_us(config, tiles_m * down, tiles_n * across)
        launch = self.gpu.launch_us
        for name in schedules.padded(self.spec, config):  # read and written
            copied_bytes = self.operand_bytes[0] if name == "a" else self.operand_bytes[1] / len(self.spec.products)
            launch += self.c.gap_us + 2.0 * copied_bytes / self.bytes_us
        return Estimate(launch + kernel + finish, launch, mainloop, epilogue, finish, 0.0, memory, tiles, tiles / self.sms, 1)

    def _tma_step_us(self, config: KernelConfig, tiles_m: int, tiles_n: int, steps: int) -> tuple[float, float]:
        """A step of a main loop whose operands TMA loads, once the buffers are full; and filling them, for the first step."""
        m, n, _ = self.shape[-3:]
        block_m, right, block_k = config["block_m"], self.right(config), config["block_k"]
        warps, by_producer = schedules.multiplying_warps(config), SCHEDULES[config.schedule].architecture == "hopper"
        # of weights that are converted in registers, the tensor cores' left operand
        converts = SCHEDULES[config.schedule].converts
        rows, columns = (right, block_m) if converts else (block_m, right)
        # from L2 into the multiprocessor
        step_bytes = (block_m * self.element_bytes + right * (self.converted or self.element_bytes)) * block_k
        not_shared = self._rows_apart(config, tiles_m, tiles_n) * block_k * self.element_bytes / _TMA_ROW_BYTES
        # rows and columns of a tile that lie outside, in the mean
        padding = block_m + right - m / max(1, tiles_m) - len(self.spec.products) * n / max(1, tiles_n)
        outside = padding * -(-block_k * self.element_bytes // _TMA_ROW_BYTES)
        clocks = step_bytes / self.c.l2_bytes_clock * self._crowded(self.count * tiles_m * tiles_n * schedules.splits(config)) + self._crossing_clocks(config)
        load = (clocks + not_shared * self.c.apart_clocks + outside * self.c.outside_clocks) / self.clock_us
        in_flight = max(1.0, min(config["num_stages"] - 1 - dict(config.values).get("pingpong", 0) * self.c.held_stages, steps))
        # the tensor cores: their rate, what they read of shared memory, and what waits for what
        products = 2.0 * block_m * right * block_k / (self.flops_us * self.c.tensor_share)
        sharing_rows = max(1, warps // 4 // (rows // 64))  # warpgroups that read the same rows of a
        read_bytes = rows // 64 * (64 * sharing_rows + columns) * block_k * self.element_bytes
        shared_memory = (read_bytes + self.c.arriving_share * step_bytes) / (self.c.shared_bytes_clock * self.clock_us)
        multiply = self._multiply_us(rows, columns, block_k, warps)
        if self.spec.promoted:
            multiply = self._promoted_us(config, products)
        if converts:
            multiply += _CONVERTED * rows * block_k / (_LANES * self.clock_us)
        step = self._norm(products, shared_memory, load, multiply, (self._later_us + load) / in_flight, smooth=self.c.tma_smooth)
        step += (self.c.wait_clocks + (0.0 if by_producer else self.c.issued_clocks)) / self.clock_us + self._turned_us(config, warps)
        # the slower of loading and multiplying is there in each step, the other once more
        return step, self.c.block_us + self._later_us + min(load, max(products, multiply))

    def _turned_us(self, config: KernelConfig, warps: int) -> float:
        """What a step takes to lay an operand of 32 bits along k, as wgmma wants those: through registers, and beside nothing else."""
        if self.element_bytes < 4 or not self.wgmma(config["block_m"], warps):
            return 0.0
        across = config["block_m"] * (self.layout[0] == "t") + self.right(config) * (self.layout[1] == "n")
        return across * config["block_k"] * self.c.turned_clocks / self.clock_us

    def _crowded(self, tiles: int) -> float:
        """What L2's bytes take beside what they take where all multiprocessors have a tile: few of them are fed faster."""
        return self.c.alone_share + (1 - self.c.alone_share) * min(1.0, tiles / self.sms)

    def _persistent_epilogue_us(self, config: KernelConfig, rounds: int, mainloop_us: float) -> float:
        """What of all epilogues nothing hides. mainloop_us: of one tile."""
        block_m, block_n, values = config["block_m"], config["block_n"], dict(config.values)
        arrivals = schedules.tile_parts(config)[1] * self._arrival_us(config)
        # what TMA loads is there by then
        last = self._epilogue_us(block_m, block_n, 1, schedules.multiplying_warps(config), self.pointed_at(config)) + self._late_us(config) + arrivals
        # what TMA stores leaves while the next tile is multiplied
        hidden = (1.0 - self.c.stored_share) * self._moved_us(block_m * block_n * self.written_bytes) if values.get("tma_store") else 0.0
        each = last - hidden
        if values.get("pingpong", 0):
            # what is counted in memory waits for all that a multiprocessor has written, whichever group wrote it
            # one warp a scheduler, and the other group's products beside it
            slow = (self.c.beside_alu - 1) * block_m * block_n * (self.operations + 4.0) / (_LANES * self.clock_us)
            each = arrivals + max(0.0, (each + slow - arrivals - mainloop_us) / 2)
        epilogue = last + (rounds - 1) * each
        if schedules.splits(config) > 1:
            # each part's arrival, and the last one's look at the others
            epilogue += 2 * self.c.arrival_us + self._gathered_us(config, self.c.grouped_share)
        return epilogue

    @property
    def _cold_us(self) -> float:
        """A load's latency where L2 holds nothing of the operands."""
        return self.c.l2_us + self.c.dram_us

    @property
    def _later_us(self) -> float:
        """The same after the first wave: L2 holds the operands, where they are no more than half of it."""
        return self.c.l2_us if sum(self.operand_bytes) <= self.gpu.l2_bytes / 2 else self._cold_us

    def _rows_apart(self, config: KernelConfig, tiles_m: int, tiles_n: int) -> float:
        """Rows of both operands that each of the multiprocessors side by side asks L2 for, beyond those in the best order of the tiles.

        What several of them ask for at once is read once, as the hardware's request coalescer has it; group_m decides how many tiles share what.
        """
        beside, tiles_m, tiles_n = max(1, min(_BESIDE, tiles_m * tiles_n)), max(1, tiles_m), max(1, tiles_n)

        def requested(group: int) -> float:
            rows = min(beside, group) if beside <= group * tiles_n else beside / tiles_n
            return (rows * config["block_m"] + min(tiles_n, (beside - 1) / group + 1) * self.right(config)) / beside

        return requested(min(config["group_m"], tiles_m)) - min(requested(min(group, tiles_m)) for group in SCHEDULES[config.schedule].dimensions["group_m"])

    def _crossing_clocks(self, config: KernelConfig) -> float:
        """What a step's loads take longer since runs of up to 128 bytes lie across two lines of L2, or begin within a sector.

        Operands without gaps are assumed, and copies whose rows begin with a line.
        """
        copied = schedules.padded(self.spec, config)
        block_m, right, block_k = config["block_m"], self.right(config), config["block_k"]
        total = 0.0
        for name, (rows, columns), pitch in zip(
            "ab",
            ((block_m, block_k) if self.layout[0] == "n" else (block_k, block_m), (block_k, right) if self.layout[1] == "n" else (right, block_k)),
            row_lengths(self.shape, self.layout),
            strict=True,
        ):
            if name in copied:
                continue
            width = min(columns * self.element_bytes, _TMA_ROW_BYTES)
            apart = math.gcd(pitch * self.element_bytes, width)  # places in a line where a row may begin
            across, within = (width // apart - 1) * apart / LINE_BYTES, 1 - min(apart, _SECTOR_BYTES) / _SECTOR_BYTES
            total += rows * columns * self.element_bytes / width * (across * self.c.crossing_clocks + within * self.c.torn_clocks)
        return total

    def _loop_us(self, config: KernelConfig, needs: Resources, blocks: int, latency: float, steps: int, tiles: int) -> tuple[float, float]:
        """Until the first step can begin, and all steps over block_k, of all blocks that share a multiprocessor."""
        block_m, right, block_k, warps = config["block_m"], self.right(config), config["block_k"], config["num_warps"]
        a_bytes, b_bytes = block_m * block_k * self.element_bytes, right * block_k * self.element_bytes
        share = self._tensor_share(block_m, warps, blocks)
        products = 2.0 * block_m * right * block_k / (self.flops_us * share)
        if self.wgmma(block_m, warps):
            beside = max(1, warps // 4 // (block_m // 64))  # warpgroups that share rows, and read them again
            read = block_m // 64 * (64 * beside + right) * block_k * self.element_bytes
        else:
            # warps side by side read the same rows: as square a grid of them as the tile has
            rows = min(max(1, block_m // 16), _power_at_most(math.sqrt(warps * block_m / right)), warps)
            read = a_bytes * (warps // rows) + b_bytes * rows
        shared = (read + a_bytes + b_bytes) / (self.c.shared_bytes_clock * self.clock_us)
        # a row of a tile is contiguous in memory: along k, or along m or n
        feed = self._feed_us(*((block_m, block_k) if self.layout[0] == "n" else (block_k, block_m)))
        b_rows = (block_k, right) if self.layout[1] == "n" else (right, block_k)
        feed += self._feed_us(*b_rows, self.converted or self.element_bytes) * (1.0 if self.layout[1] == "n" else self.c.b_along_k)
        feed = feed * self._crowded(tiles) + self._crossing_clocks(config) / self.clock_us
        if any(self.narrow):
            multiply = max(products, shared, self._multiply_us(block_m, right, block_k, warps))
            return self.c.block_us, steps * (self._narrow_step_us(config, needs, blocks, multiply) + self._computed_us(config, blocks))
        spill = self.c.spill if needs.registers > self.c.spilled * needs.most_registers else 1.0
        copies = (a_bytes / self.copy_bytes[0] + b_bytes / self.copy_bytes[1]) / (32 * warps)
        issue, multiply = copies * self.c.copy_clocks / self.clock_us, self._multiply_us(block_m, right, block_k, warps)
        issue += self._computed_us(config, blocks)
        if self.computes and self.wgmma(block_m, warps):  # which waits for what is computed to be in shared memory, and that for its buffer
            multiply = max(multiply, products)
        if config["num_stages"] == 1:  # load, wait, multiply
            return self.c.block_us, steps * spill * (latency + max(issue, blocks * feed) + max(multiply, blocks * products, blocks * shared))
        # the first loads are issued at once; each later one is waited for as long as those in flight do not cover it
        in_flight = max(1, min(config["num_stages"] - 1, steps))
        late = (latency + feed) / in_flight
        busy = (blocks * products, blocks * shared, blocks * feed)
        loop = min(in_flight, steps) * self._norm(*busy, issue + multiply) + max(0, steps - in_flight) * self._norm(*busy, issue + multiply, late)
        return self.c.block_us + latency + feed, spill * loop + steps * blocks * self._turned_us(config, warps)

    def _computed_us(self, config: KernelConfig, blocks: int) -> float:
        """What a step takes to compute what it multiplies of operands, and to load what that is computed of besides."""
        clocks = 0.0
        for name, operations in self.computed.items():
            elements = config[f"block_{OPERANDS[name].strip('k')}"] * config["block_k"]
            read = sum(i.dtype.bytes for i in self.along_k if i.dtype and i.indices == OPERANDS[name])
            clocks += elements * (operations / min(128, 32 * config["num_warps"] * blocks) + read / self.c.l2_bytes_clock)
        return clocks / self.clock_us

    def _feed_us(self, rows: int, columns: int, element_bytes: float = 0.0) -> float:
        """What a multiprocessor takes to load a tile whose rows are contiguous in memory.

        Of tiles that nothing else bounds, rows of 32 and of 64 bytes took the same 1.7 clocks, and rows of 128 bytes 2.9, from 64x64 to
        128x128 and with 2 to 8 warps (4096x4096x4096 "nt" on an H200): the request counts as well as the bytes.
        """
        row_bytes = columns * (element_bytes or self.element_bytes)
        return rows * max(self.c.row_clocks, self.c.request_clocks + row_bytes / self.c.l2_bytes_clock) / self.clock_us

    def _multiply_us(self, block_m: int, block_n: int, block_k: int, warps: int) -> float:
        """What one block's multiplications take in the order that they depend on each other."""
        k16 = block_k * self.element_bytes / 32
        if self.plain:
            return 0.0
        if self.wgmma(block_m, warps):
            return (self.c.wait_clocks + k16 * self.c.chain_clocks) / self.clock_us
        return k16 * max(self.c.mma_chain_clocks, block_m * block_n / (16 * 8 * warps) * self.c.mma_clocks) / self.clock_us

    def _promoted_us(self, config: KernelConfig, products: float) -> float:
        """What a warpgroup takes for its own part of a step whose products are summed by themselves: to multiply, to wait for it and to add them up. In cooperative
        kernels the other's products fill the tensor cores meanwhile; in ping-pong the sums are as slow as an epilogue. products: what those take for the whole step."""
        groups, subtiles = schedules.tile_parts(config)
        added = config["block_m"] * self.right(config) / groups / _LANES * (self.c.beside_alu if dict(config.values).get("pingpong", 0) else 1.0)
        return products / groups + (added + subtiles * self.c.wait_clocks) / self.clock_us

    def _narrow_step_us(self, config: KernelConfig, needs: Resources, blocks: int, multiply: float) -> float:
        """A step whose operands are loaded element by element: nothing of it is asynchronous, so that a block loads, waits and multiplies."""
        warps = config["num_warps"]
        loads = sum(block * config["block_k"] for block, narrow in zip((config["block_m"], self.right(config)), self.narrow, strict=True) if narrow) / 32
        load = loads * self.c.narrow_clocks / self.clock_us
        alone = max(load, loads / warps * self.c.narrow_warp_clocks / self.clock_us)
        own = self.c.narrow_us + alone + multiply + needs.spilled * self.c.narrow_spill_ns * 1e-3
        return self._norm(own, blocks * load, blocks * multiply, smooth=self.c.narrow_smooth)

    def _tensor_share(self, block_m: int, warps: int, blocks: int) -> float:
        if self.plain:
            return self.c.plain_share * min(1.0, blocks * warps / 4)
        if not self.wgmma(block_m, warps):
            return (self.c.sync_share if self.target.name in WGMMA else self.c.older_share) * min(1.0, blocks * warps / 4)
        return self.c.tensor_share

    def _epilogue_us(self, block_m: int, block_n: int, blocks: int, warps: int, read_bytes: float) -> float:
        """Inputs, lines and stores of a wave of tiles: the tiled schedule starts them when its product is done. read_bytes: of inputs, an element."""
        elements = block_m * block_n * blocks
        moved = self._moved_us(elements * (read_bytes + self.written_bytes))
        lanes = min(128, 32 * warps * blocks)
        alu = elements * (self.operations + 4.0) / (lanes * self.clock_us)
        exchange = blocks * self._exchange_us(block_n, warps)
        return moved + alu + exchange + self.c.block_us + (self.c.l2_us if read_bytes else 0.0)

    def _late_us(self, config: KernelConfig) -> float:
        """What an epilogue waits for its inputs."""
        return self.c.late_us if self.spec.loaded and not dict(config.values).get("prefetch") else 0.0

    def _moved_us(self, moved_bytes: float) -> float:
        """What a multiprocessor's own bytes take, of which all move as many at once."""
        return moved_bytes * self.sms / self.bytes_us

    def _exchange_us(self, columns: int, warps: int) -> float:
        """What the warps of a block take to add up the column sums that each holds for itself, through shared memory."""
        return sum("m" in p.axes for p in self.spec.partials) * warps * columns * self.c.exchange_clocks / self.clock_us

    def _epilogue_bytes(self, parts: int) -> float:
        """Of inputs and outputs, and what a piece of an output's row that ends within a line of L2 costs besides. parts: pieces of a row."""
        m, n, _ = self.shape[-3:]
        torn = sum(s.tile and n * s.dtype.bytes % LINE_BYTES > 0 for s in self.spec.stores)
        return self.count * (m * n * (self.read_bytes + self.written_bytes) + self.vector_bytes + torn * m * parts * self.c.torn_bytes)

    def _operand_traffic(self, config: KernelConfig, tiles_m: int, tiles_n: int, concurrent: int) -> float:
        """Bytes of operands that come from memory: group_m decides how much of a wave lies in the same rows and columns.

        Where L2 holds a group's rows of a, and all of b beside them, both are read once; where it holds those rows alone, b is read once a group. On an H100
        relu(mm + bias) at 32768x4096x1024 took 1.17 times as long with groups of 8 as with groups of 4 (bf16, ping-pong, Triton 3.6, 2026-11-27).
        """
        once, held = float(sum(self.operand_bytes)) + self.beside_bytes, _STREAMED * self.gpu.l2_bytes
        if once / self.count <= self.gpu.l2_bytes / 2 or not concurrent:  # of a batch one product after the other
            return once
        concurrent = min(concurrent, tiles_m * tiles_n)
        group = min(config["group_m"], tiles_m)
        columns = min(tiles_n, -(-concurrent // group))
        rows = min(tiles_m, group * -(-concurrent // (group * tiles_n)))

        def panel(rows: int, columns: int) -> float:
            block_m, right = rows * config["block_m"], columns * self.right(config)
            return ((block_m + right) * self.element_bytes + self.spec.beside_bytes(block_m, right, config["block_k"])) * self.shape[-1]

        if panel(rows, tiles_n) <= held:
            return once
        again = self.count * tiles_m * tiles_n / concurrent * panel(rows, columns)  # each wave reads its own
        if panel(rows, 0) <= held:
            again = min(again, self.count * tiles_m / rows * panel(rows, tiles_n))
        return max(once, again)

    def _arrival_us(self, config: KernelConfig) -> float:
        """What a part of a tile waits, where the last block completes reductions, until the GPU sees what it has written and that it is there."""
        return self.c.arrival_us * any(schedules.finished_inside(f, config) for f in self.spec.finishes)

    def _finish_us(self, config: KernelConfig, tiles_m: int, tiles_n: int) -> float:
        m, n, k = self.shape[-3:]
        total = 0.0
        for finish in self.spec.finishes:
            width = self.count * size_of(finish.indices, m, n)
            lengths = [k if s.operand else {"n": tiles_m, "m": tiles_n, "": tiles_m * tiles_n}[finish.indices] for s in finish.sources]
            if schedules.finished_inside(finish, config):
                # the last one reads from L2 what all have left
                total += self.c.l2_us * sum(-(-length // finishing_step(finish, config)) for length in lengths)
                continue
            # 4 warps a block walk over the length, 32 at a time, a load's latency each; the bytes are shared by all blocks
            chunks = sum(-(-length // 32) for length in lengths)
            total += self.c.gap_us + self.c.l2_us * (1 + chunks / 4) + 4.0 * width * sum(lengths) / self.bytes_us
        return total

    def vendor_us(self, result: DType | None, widened: bool = False) -> float:
        """The vendor's product with a result of this dtype, without its launch.

        result: None where a pass over it follows, under which it is written. widened: fp8 to fp16 before it.
        """
        m, n, k = self.shape[-3:]
        sig = self.spec.signature
        widened = sig.a.is_fp8 and (widened or not self.target.multiplies(sig.a, sig.b))
        dtype = FP16 if widened else sig.a
        peak = self.gpu.peak(dtype, sig.precision) * 1e6 / self.sms
        together = math.gcd(16, *(extent * dtype.bytes for extent in row_lengths(self.shape, self.layout) if extent > 1))  # else it is a vector
        slower = max(_VENDOR_UNALIGNED.get(together, 1.0), _VENDOR_INT8 if dtype == INT8 else 1.0)
        tiles = (_OLDER_VENDOR_TILE,) if slower > 1.0 else _vendor_tiles()
        written = 0.0 if result is None else result.bytes * (1.0 if self.count > 1 else self.c.vendor_written)
        moved = ((3 if widened else 1) * sum(self.operand_bytes) + written * self.count * m * n) / self.bytes_us
        parts = [s for s in _VENDOR_SPLITS if s == 1 or (self.count == 1 and k >= s * _VENDOR_PART and slower == 1.0)]
        times = []
        for (rows, columns, share), splits in product(tiles, parts):
            waves = -(-(self.count * -(-m // rows) * -(-n // columns) * splits) // self.sms)
            arithmetic = slower * waves * 2.0 * rows * columns * (k / splits) / (peak * share)
            added = self.c.vendor_split_us + 2 * splits * m * n / self.bytes_us if splits > 1 else 0.0  # they stay in L2 for the most part
            bare = _VENDOR_BATCH_BARE if self.count > 1 else _VENDOR_BARE - _VENDOR_EVEN / max(1, waves)
            if result is None and self.count == 1:
                bare = self.c.followed_thin_bare if m <= _THIN else self.c.followed_bare
            times.append(max(arithmetic, moved) + bare * min(arithmetic, moved) + added)
        return min(times) + self.c.vendor_us + (2 * self.c.gap_us if widened else 0.0)

    def _library(self, config: KernelConfig) -> Estimate:
        if self.spec.bare_product:
            return Estimate(self.gpu.launch_us + self.product_us, self.gpu.launch_us, 0.0, 0.0, 0.0, self.product_us, 0.0, 0, 0.0, 0)
        m, n, _ = self.shape[-3:]
        block_m, block_n, warps = config["block_m"], config["block_n"], config["num_warps"]
        needs = self.resources(config)
        tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
        tiles = self.count * tiles_m * tiles_n
        resident = min(needs.blocks_per_sm, max(1, -(-tiles // self.sms)))
        waves = tiles / (resident * self.sms)
        result_bytes = 4.0 * self.count * m * n
        # read, and for the most part written meanwhile
        again = self.c.followed_again - self.c.followed_held * min(1.0, self.c.followed_l2 * self.gpu.l2_bytes / max(1.0, result_bytes))
        each = (
            (4 * again + self.read_bytes + self.written_bytes) * block_m * block_n * (1.0 + self.c.short_run * max(0.0, math.log2(_RUN_BYTES / (block_n * 4))))
        )
        # what is in flight over the latency, up to the multiprocessor's share of the memory
        latency = self.c.l2_us + self.c.dram_us
        alu = block_m * block_n * (self.operations + 4.0) / (min(128, 32 * warps * resident) * self.clock_us)
        # a warp reads 32 times 8 elements of a row
        exchange = self._exchange_us(min(block_n, 256), warps) if warps > 1 else 0.0
        wave = latency + self.c.block_us + resident * (self._norm(each * self.sms / self.bytes_us, alu) + exchange)
        rest = tiles % (resident * self.sms)
        own = (tiles // (resident * self.sms)) * wave * (0.7 if resident > 1 else 1.0) + (latency + self.c.block_us if rest else 0.0)
        partials = self.count * sum(partial_bytes(p.axes, m, n, (block_m, block_n)) for p in self.spec.partials)
        memory = (again * result_bytes + self._epilogue_bytes(tiles_n) + partials) / self.bytes_us
        kernel = self._norm(own + math.ceil(waves) * self._arrival_us(config), memory)
        finish = self._finish_us(config, tiles_m, tiles_n)
        launch = self.gpu.launch_us + self.c.gap_us
        return Estimate(launch + self.product_us + kernel + finish, launch, 0.0, own, finish, self.product_us, memory, tiles, waves, resident)

    def _norm(self, *parts: float, smooth: float = 0.0) -> float:
        """What overlapping parts take together: a little more than the longest."""
        longest = max(parts)
        if longest <= 0.0:
            return 0.0
        exponent = smooth or self.c.smooth
        return float(longest * sum([(p / longest) ** exponent for p in parts]) ** (1 / exponent))


@functools.cache
def _vendor_tiles() -> tuple[tuple[int, int, float], ...]:
    """Rows, columns, share of the peak. One side is of _VENDOR_SIDES, the other at most four times as long and no longer than 256."""
    sides = [(one, other) for one in _VENDOR_SIDES for other in range(_VENDOR_STEP, 257, _VENDOR_STEP) if one * other <= _VENDOR_MOST and other <= 4 * one]
    return tuple((*tile, _vendor_share(*tile)) for tile in dict.fromkeys([*sides, *((columns, rows) for rows, columns in sides)]))


def _vendor_share(rows: int, columns: int) -> float:
    """Between two of _VENDOR_SHARES."""
    loaded = rows * columns / (rows + columns)
    (below, least), (above, most) = next(pair for pair in pairwise(_VENDOR_SHARES) if loaded <= pair[1][0])
    return most if math.isinf(above) else least + (most - least) * (loaded - below) / (above - below)


def _power_at_most(value: float) -> int:
    return 1 << max(0, int(math.log2(max(1.0, value))))
