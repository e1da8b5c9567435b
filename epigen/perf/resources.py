"""What a block of the main kernel takes before anything is compiled: shared memory, registers, and so how many blocks fit side by side.

In go a kernel's meaning, a config and a target's limits. The rules were read off kernels that Triton compiled, and say which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from epigen import ops
from epigen.codegen import schedules, steps
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import POSITION, UNIFORM, KernelConfig, KernelSpec, Signature, row_bytes
from epigen.dtypes import FP32
from epigen.gpus import Target
from epigen.ir.graph import OPERANDS
from epigen.shapes import Shape

WGMMA = ("sm_90", "sm_100")
_PROMOTED = 0.8  # of the accumulators, what Triton's compiler takes again where fp8 products are promoted
_VECTOR_BYTES, _ASYNC_BYTES = 16, 4  # the most that one load or copy moves, and the least that a copy can move asynchronously


@dataclass(frozen=True, slots=True)
class Resources:
    """What one block takes. accumulators: fp32 values a thread. held: registers for inputs that it loads before the main loop and keeps beside them.
    registers: what a thread would like to have, estimated to about 15 %. most_registers: what it can have. spilled: those that go to memory in a
    loop of narrow loads."""

    shared_bytes: int
    accumulators: int
    registers: int
    most_registers: int
    blocks_per_sm: int
    spilled: int = 0
    held: int = 0


def _operations(op: str) -> float:
    """Instructions an element for a row of the operation table, read off its Triton text: the slow functions are 10 to 30 instructions."""
    if op == POSITION:  # of rows and columns, and not of elements
        return 0.0
    if (
        op == UNIFORM
    ):  # 8 multiplications of integers, which take two turns each, and 2 others: a quarter of what four columns have together (Triton 3.6, sm_90, 2026-11)
        return 20.0
    if op not in ops.TABLE:
        return 1.0
    text = "\n".join([ops.TABLE[op].triton, *ops.TABLE[op].body])
    return 1.0 + sum(
        weight * text.count(part)
        for part, weight in (("*", 1), (" + ", 1), (" - ", 1), (" / ", 8), ("exp(", 8), ("exp2(", 6), ("log(", 12), ("sqrt(", 8), ("erf(", 25))
    )


def _passing(elements: int, element_bytes: int) -> int:
    """Bytes that a part of a tile takes on its way to another layout: of 16 bits no more than half of the largest at a time."""
    return elements * element_bytes if element_bytes > 2 else min(elements * element_bytes, 1 << 15)


def without_tensor_cores(signature: Signature, target: Target) -> bool:
    return signature.a == FP32 and (signature.precision == "ieee" or not target.tf32)


class Work:
    """What a spec decides about every config: bytes and instructions an element of a tile, and registers."""

    def __init__(self, spec: KernelSpec, shape: Shape, target: Target):
        layout = spec.signature.layout
        self.spec, self.shape, self.target, self.layout = spec, shape, target, layout
        sig = spec.signature
        self.element_bytes = max(sig.a.bytes, sig.b.bytes)
        self.converted = 0.0 if sig.multiplied["b"] == sig.b else sig.b.bytes / (2 if sig.packed else 1)
        """Bytes of a value of b, where it lies in fewer than it is multiplied in."""
        self.plain = without_tensor_cores(sig, target)
        tiles = [i for i in spec.loaded if i.indices == "mn"]
        self.read_bytes = sum(0.125 if i.packed else i.dtype.bytes for i in tiles if i.dtype)
        self.written_bytes = sum(s.tile_bytes for s in spec.stores)
        bits = sum(i.packed for i in tiles) + sum(s.packed for s in spec.stores)
        # a reduction costs its own instructions and the exchange between threads, a mask its shifts
        self.operations = (
            sum(4.0 if line.block else _operations(line.op) for line in spec.lines)
            + 4.0 * bits
            + sum(16.0 if p.row == "logsumexp" else 4.0 for p in spec.partials)
        )
        self.computed = {o.name: sum(_operations(line.op) for line in o.lines) + 2.0 for o in spec.computed}
        self.computes = bool(self.computed)
        for reduction in spec.carried:  # its elements are computed, widened and added up
            operations = sum(_operations(line.op) for line in reduction.lines) + 2.0
            self.computed[reduction.operand] = self.computed.get(reduction.operand, 0.0) + operations
        """Instructions an element of an operand that is computed as it is loaded, or reduced over k meanwhile, with those that widen and round it."""
        self.along_k = [i for o in spec.of_operands for i in o.along_k if i.dtype]
        self.store_bytes = max((s.dtype.bytes for s in spec.stores if s.tile), default=0)
        self.pointed_bytes = max((i.dtype.bytes for i in tiles if i.dtype and not i.packed), default=0)
        self.copy_bytes = tuple(1 if sig.packed == "n" and i else math.gcd(_VECTOR_BYTES, each) for i, each in enumerate(row_bytes(shape, sig)))
        self.narrow = tuple(copy < _ASYNC_BYTES for copy in self.copy_bytes)  # they lead through registers
        self.held_an_element = min(1.0, self.read_bytes / 4 + 0.3 * sum(s.packed for s in spec.stores) + 0.01 * max(0.0, self.operations - 4))

    def right(self, config: KernelConfig) -> int:
        """Columns of a tile's right operands together: one for each product."""
        return config["block_n"] * len(self.spec.products)

    def wgmma(self, block_m: int, warps: int) -> bool:
        """Hopper and later datacentre parts multiply straight from shared memory, 64 rows and four warps at a time."""
        return self.target.name in WGMMA and block_m >= 64 and warps % 4 == 0 and not self.plain

    def resources(self, config: KernelConfig) -> Resources:
        if SCHEDULES[config.schedule].architecture == "hopper":
            return self._grouped(config)
        threads = config["num_warps"] * self.target.warp_size
        block_m, block_n, right = config["block_m"], config["block_n"], self.right(config)
        accumulators = -(-block_m * right // threads)
        most = min(255, self.target.sm_registers // threads)
        if not SCHEDULES[config.schedule].multiplies:
            registers = 24 + int((1 + self.read_bytes / 4) * accumulators)
            return Resources(0, accumulators, registers, most, max(1, self.target.blocks_per_sm(threads, min(most, registers), 0)))
        block_k, stages = config["block_k"], config["num_stages"]
        held = self._held(config, accumulators)
        if SCHEDULES[config.schedule].descriptors:
            if self.spec.promoted:
                accumulators = int(accumulators * (1 + _PROMOTED))
            registers = int(36 + accumulators * (1 + self.held_an_element / config["subtiles"])) + held
            return Resources(self._bytes_with_descriptors(config), accumulators, registers, most, 1, held=held)
        wgmma = self.wgmma(block_m, config["num_warps"])
        # Seen in 62 kernels that Triton 3.9 compiled, 2026-11: wgmma keeps `num_stages` buffers, the older instruction (sm_80, sm_120, gfx942,
        # gfx1100, and sm_90 where block_m < 64 or there are fewer than four warps) one less.
        buffers = max(1, stages if wgmma else stages - 1)
        along_k = (self.layout[0] == "n", self.layout[1] == "t")
        # wgmma wants 8-bit operands along k: another one goes through registers, and has one buffer
        each = [buffers if k or self.element_bytes > 1 or not wgmma else 1 for k in along_k]
        each = [1 if narrow else count for narrow, count in zip(self.narrow, each, strict=True)]
        multiplied = steps.steps(self.spec, config) if self.computed else ()
        waiting: float = each[1] * self.element_bytes
        if self.converted:  # it waits as it lies, and what it becomes is there once, but where the older instruction has it from registers
            before, right_step = max(1, stages - 1), multiplied[1]
            if right_step.paired:  # rows of a too come from registers; with a zero point half a step is there at a time
                once = self.element_bytes / 2 if right_step.zero else float(self.element_bytes) if wgmma else 0.0
                each[0] = min(each[0], before)
            else:
                once = 0.0 if not wgmma and self.layout[1] == "t" and not self.spec.signature.packed else float(self.element_bytes)
            waiting = min(each[1], before) * self.converted + once
        shared = int((each[0] * block_m * self.element_bytes + waiting * right) * block_k)
        shared += buffers * block_k * self.spec.beside_bytes(block_m, block_n, block_k)
        if self.target.backend == "cuda":  # the stores' layout is reached through shared memory
            shared = max(shared, min(block_m * block_n * self.store_bytes, 1 << 16))
        # The same kernels: 36, the accumulators, what the epilogue holds beside them, and two for the address of each copy of 16 bytes, or
        # two and a half of a narrower one (16 more kernels, Triton 3.6, sm_90: rows of 1004 and 1002 elements of fp16). The older
        # instruction also holds the operands, about as much again; fp8 a second accumulator, since the tensor cores' own is narrow.
        scaled = bool(multiplied) and any(step.factors for step in multiplied)  # which needs sums of the step's own, those of fp8 as well
        again = (0.0 if wgmma else 1.0) + scaled if scaled or not self.spec.promoted or not wgmma else _PROMOTED
        both = accumulators * (1 + scaled)
        bytes_a_thread = [block * block_k * self.element_bytes / threads for block in (block_m, right)]
        copies = max(2.0, sum(held * (2.0 if copy == _VECTOR_BYTES else 2.5) / copy for held, copy in zip(bytes_a_thread, self.copy_bytes, strict=True)))
        registers, spilled = int(36 + accumulators * (1 + self.held_an_element + again) + copies), 0
        if any(self.narrow):
            registers, spilled = self._narrow_registers(config, accumulators, wgmma)
        # What is computed of a step's operands, in fp32: with it, 1 % below to 21 % above what 10 kernels take that Triton 3.9 compiled for sm_90 (2026-11).
        # Of values that nothing but a conversion is done to, fewer, and none that are loaded as they are: 22 % below to 38 % above what 46 more kernels take, and 2.3
        # times what one does whose scales change within a step (Triton 3.6, sm_90, 2026-11).
        registers += held
        for step in multiplied:
            if not step.operand.computed:
                continue
            share = 1.0 if not step.as_loaded else 0.5 if (wgmma and step.factors) or step.zero else 0.25 * step.paired
            share *= step.operand.converted or not step.as_loaded
            registers += int(share * config[f"block_{OPERANDS[step.name].strip('k')}"] * block_k / threads)
        return Resources(shared, both, registers, most, max(1, self.target.blocks_per_sm(threads, min(most, registers), shared)), spilled, held)

    def _grouped(self, config: KernelConfig) -> Resources:
        """Of a kernel whose groups of four warps have a tile each, or half of one: registers are handed out by the kernel itself."""
        if SCHEDULES[config.schedule].converts:
            return self._mixed_input(config)
        groups, subtiles = schedules.tile_parts(config)
        accumulators = config["block_m"] // groups * self.right(config) // 128
        if self.spec.promoted:
            # each subtile of a step is summed by itself first; and of rows that are prefetched a thread keeps a quarter beside all that
            rows = sum(i.dtype.bytes for i in self.spec.loaded if i.indices == "n" and i.dtype)
            # with factors of steps all subtiles' sums are there at once: at 128x256 652 bytes a thread spilled, and 8192x8192x8192 took 1.6 times as long as at
            # 128x128 (H200, Triton 3.6, 2026-11)
            accumulators += (
                accumulators // (subtiles if subtiles <= schedules.AT_ONCE and not self.computed else 1) + config["prefetch"] * config["block_n"] * rows // 16
            )
        loaded = config["num_stages"] * ((config["block_m"] + self.right(config)) * config["block_k"] * self.element_bytes + 16)
        buffers = (2 // groups) * config["block_m"] * config["block_n"] // subtiles
        stored, loaded_by_tma = schedules.tma_stored(self.spec, config), schedules.tma_loaded(self.spec, config)
        at_once = min(subtiles, schedules.AT_ONCE)
        passing = sum(buffers * s.dtype.bytes * (at_once if s.name in loaded_by_tma.values() else 1) for s in self.spec.stores if s.name in stored)
        passing += sum(buffers * dtype.bytes * at_once for dtype in schedules.in_own_buffers(self.spec, loaded_by_tma).values())
        # each of eight warps leaves its sums of the columns of a part, where the warps were handed what they begin with: of fewer than 64 columns its threads'
        # several; and 192 bytes, of barriers and the like, or 224, and where nothing is exchanged 32 for each two subtiles
        exchanged = 32 * max(64, config["block_n"] // subtiles) if any("m" in p.axes for p in self.spec.partials) else 0
        beside = (224 if loaded_by_tma else 192) + (0 if exchanged else 32 * -(-subtiles // schedules.AT_ONCE))
        registers = int(36 + accumulators * (1 + self.held_an_element / subtiles))
        return Resources(
            loaded + passing + exchanged + beside,
            accumulators,
            registers,
            schedules.CONSUMER_REGISTERS[schedules.consumers(config)],
            1,
            held=self._held(config, accumulators),
        )

    def _mixed_input(self, config: KernelConfig) -> Resources:
        """Of a kernel whose warpgroups have 64 columns of a tile each, and convert those weights in registers."""
        block_m, block_n, block_k, groups = config["block_m"], config["block_n"], config["block_k"], schedules.sharing(config)
        accumulators = block_m * block_n // (128 * groups)
        weights = 64 * block_k * 2 // (128 * 4)  # of a step, as they are multiplied
        scales = block_n * sum(i.dtype.bytes for i in schedules.scales(self.spec, config) if i.dtype)
        loaded = config["num_stages"] * (int((block_m * self.spec.signature.a.bytes + block_n * self.converted) * block_k) + scales + 16)
        stored = schedules.tma_stored(self.spec, config)
        passing = sum(block_m * block_n * s.dtype.bytes for s in self.spec.stores if s.name in stored)
        registers = int(36 + accumulators * (1 + self.held_an_element) + weights)
        return Resources(loaded + passing + 256, accumulators, registers, schedules.CONSUMER_REGISTERS[groups], 1)

    def _held(self, config: KernelConfig, accumulators: int) -> int:
        """Registers of a thread for what the epilogue reads of an [m, n] input, as it lies in memory, where it is loaded before the main loop."""
        return int(accumulators * self.pointed_at(config) / 4) if dict(config.values).get("prefetch") else 0

    def pointed_at(self, config: KernelConfig) -> float:
        """Bytes an element of the inputs with a value for each, but for those that TMA brings."""
        from_tma = schedules.tma_loaded(self.spec, config)
        return self.read_bytes - sum(i.dtype.bytes for i in self.spec.inputs if i.dtype and i.name in from_tma)

    def _bytes_with_descriptors(self, config: KernelConfig) -> int:
        """Shared memory of a kernel whose operands come by TMA: 72 that Triton 3.6 and 3.9 compiled for sm_90, and 96 of 3.6, 2026-11.

        All stages, and what each store goes through: the part of the tile itself for TMA, else the change to the layout of the stores, which
        may take the stages' place where no load is under way meanwhile, as may the change of what a pointer loads to the accumulator's layout.
        """
        tile, stages = config["block_m"] * config["block_n"] // config["subtiles"], config["num_stages"]
        loaded = stages * (config["block_m"] + self.right(config)) * config["block_k"] * self.element_bytes + 32
        loaded += 8 * stages * (len(self.spec.products) - 1)  # barriers
        # what the warps exchange for a reduction or a mask, or to change a layout, has a place of its own where loads may be under way
        sums = 4 * config["num_warps"] * config["block_n"] // config["subtiles"]  # each warp's, of the columns of a part
        masks = 2048 if any(s.packed for s in self.spec.stores) else 0
        across = max((sums if "m" in p.axes else 4096 for p in self.spec.partials), default=masks)
        exchanged = max(across, _passing(tile, self.pointed_bytes))
        if config["tma_store"]:
            return loaded + tile * sum(s.dtype.bytes for s in schedules.tma_storable(self.spec)) + exchanged * config["flatten"]
        passing = _passing(tile, max(self.store_bytes, self.pointed_bytes))
        return loaded + passing if config["flatten"] else max(loaded, passing)

    def _narrow_registers(self, config: KernelConfig, accumulators: int, wgmma: bool) -> tuple[int, int]:
        """What a thread takes where operands are loaded element by element, and how many registers too few it has.

        Fitted to 109 configs that Triton 3.6 compiled for sm_90, fp16, both operands narrow, 2026-11. An element whose row lies along k
        takes an address and a mask; those along m or n share theirs. The compiler makes do with fewer before it spills, and in a block of
        one warp the row is the same for all threads, and so is its mask.
        """
        warps = config["num_warps"]
        threads = warps * self.target.warp_size
        taken, least = 28 + 1.4 * accumulators + 17 * wgmma, 4 + 1.2 * accumulators + 29 * wgmma - 87 * (warps == 1)
        for block, along_k, narrow in zip((config["block_m"], self.right(config)), (self.layout[0] == "n", self.layout[1] == "t"), self.narrow, strict=True):
            each = block * config["block_k"] / threads * narrow
            taken, least = taken + each * (3.5 if along_k else 1.7), least + each * (3.5 if along_k else 0.5)
        return int(taken), max(0, int(least) - min(255, self.target.sm_registers // threads))
