"""Whether a config may run, as data: restrictions, each a function that says why not. Nobody else answers that question.

`unfit` asks those that no launch gets past, for the config that is about to run, whoever gave it; `refusal` asks all, for those that epigen chooses. The
search space proposes no config that any of them refuses.

Of an invariant program a row has the same bits whatever M is. No config that may run splits k, or leaves the product to the vendor; where two configs might
still add up in another order, `one_config` says so, and all M have the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from epigen.codegen import schedules
from epigen.codegen.groups import RAGGED
from epigen.codegen.schedules import SCHEDULES, Schedule
from epigen.codegen.spec import LEAST_OF_BYTES, PAST, WIDE, KernelConfig, KernelSpec
from epigen.codegen.steps import steps
from epigen.dtypes import FP32, INT8
from epigen.gpus import Target
from epigen.perf.resources import Resources, Work
from epigen.shapes import Shape, extents, products

MOST_TILES = 1 << 30
"""So many tiles, or parts of them along k, can be numbered: a grid has less than 2^31 blocks, and a program's next tile may be twice as far."""

_MOST_ACCUMULATORS = 0.88  # of the registers a thread can have: 224 of 255
# ... with what it keeps beside them all along: 168 of 240. Of 141 kernels of six epilogues that Triton 3.6 compiled for sm_90 all those beyond that spill,
# at least 208 bytes a thread: dgelu at 65536x8192x16384 took 30.4 ms so, 26.5 with its input loaded by TMA (H200, 2026-11).
_MOST_HELD = 0.7


TRANSPOSED_BYTES = 16
"""Of an operand's step, that a thread can transpose, where it has to."""


@dataclass(frozen=True)
class Candidate:
    """A config for one problem on one GPU. work: what the problem decides for all of its configs, where they are estimated."""

    config: KernelConfig
    schedule: Schedule
    spec: KernelSpec
    shape: Shape
    target: Target
    work: Work | None = None

    @property
    def warps(self) -> int:
        """Warps that multiply a tile."""
        return schedules.multiplying_warps(self.config)

    @property
    def least_k(self) -> int:
        """Of k, that one instruction of the tensor cores multiplies."""
        return LEAST_OF_BYTES if self.spec.signature.a.bytes == 1 else 16

    @cached_property
    def needs(self) -> Resources:
        return (self.work or Work(self.spec, self.shape, self.target)).resources(self.config)


Restriction = Callable[[Candidate], str]
"""'' or why the candidate breaks it."""


# -- without these nothing is launched


def architecture(c: Candidate) -> str:
    if c.schedule.runs_on(c.target.backend, c.target.arch):
        return ""
    return f"the schedule {c.schedule.name} does not run on {c.target.name}"


def rows_of_warpgroups(c: Candidate) -> str:
    if c.schedule.architecture != "hopper" or c.schedule.converts or c.config["block_m"] >= 64 * schedules.tile_parts(c.config)[0]:
        return ""
    return f"two groups of warps share a tile's rows and multiply 64 each at least: {c.schedule.name} with block_m={c.config['block_m']} needs pingpong=1"


def quarters(c: Candidate) -> str:
    if c.schedule.architecture != "hopper" or schedules.subtiles(c.config) <= schedules.AT_ONCE:
        return ""
    if c.config["block_n"] < 64:
        return f"a quarter of a tile has 16 columns at least: subtiles={c.config['subtiles']} needs block_n=64 or more, and it is {c.config['block_n']}"
    if c.config["tma_load"] and schedules.splits(c.config) > 1:
        return f"inputs come in turn with subtiles={c.config['subtiles']}, while the epilogue runs, which of several parts along k the last alone does: splits=1 is needed"
    return ""


def empty_tensors(c: Candidate) -> str:
    if not c.schedule.descriptors or 0 not in c.shape[-3:]:
        return ""
    return f"the schedule {c.schedule.name} addresses operands by TMA descriptors, and there are none of empty tensors"


def number_of_tiles(c: Candidate) -> str:
    m, n, _ = c.shape[-3:]
    items = products(c.shape) * -(-m // c.config["block_m"]) * -(-n // c.config["block_n"]) * schedules.splits(c.config)
    if items <= MOST_TILES:
        return ""
    tile = f"{c.config['block_m']}x{c.config['block_n']}"
    return f"{extents(c.shape)} has {items} tiles of {tile}, and {MOST_TILES} can be numbered: larger ones are needed"


def coordinates(c: Candidate) -> str:
    longest = max(c.shape[-3:])
    if not c.schedule.descriptors or longest + PAST < WIDE:
        return ""
    return f"TMA's coordinates have 32 bits, and {longest} is too long an extent for the schedule {c.schedule.name}: tiled takes any"


def vendors_extents(c: Candidate) -> str:
    m, n, k = c.shape[-3:]
    longest = max(m, n, 0 if c.spec.signature.a == INT8 else k)  # int8's product is taken in parts along k
    if c.schedule.multiplies or c.spec.pointwise or longest < WIDE:
        return ""
    return f"the vendor's product takes extents below 2^31, and {longest} was found: the schedule tiled takes any"


def operands(c: Candidate) -> str:
    signature = c.spec.signature
    if not c.schedule.multiplies or signature.a.bytes in c.schedule.operand_bytes:
        return ""
    sizes = " or ".join(str(8 * size) for size in c.schedule.operand_bytes)
    return f"the schedule {c.schedule.name} multiplies operands of {sizes} bits, and these are {signature.a}"


def along_k(c: Candidate) -> str:
    signature = c.spec.signature
    if c.schedule.architecture != "hopper" or signature.a.bytes > 1 or signature.layout == "nt":
        return ""
    return f"the schedule {c.schedule.name} multiplies operands of 8 bits that lie along k, as layout nt has them, and these lie as {signature.layout}"


def computed_operands(c: Candidate) -> str:
    if not c.spec.computed or c.schedule.computes or (c.schedule.scales and c.spec.promoted):
        return ""
    able, operand = " and ".join(s.name for s in SCHEDULES.values() if s.computes and not s.converts), c.spec.computed[0]
    if operand.as_loaded:
        held = c.spec.signature
        return f"the schedule {c.schedule.name} multiplies operands as they lie, and b is {held.b}, converted to {held.multiplied['b']} as it is loaded: {able} can"
    return f"the schedule {c.schedule.name} multiplies operands as they lie, and the program computes what it multiplies of {operand.name}: {able} can"


def mixed_input(c: Candidate) -> str:
    """What the schedule of that name is for; and of what a weight is computed of besides, a step has one row, since each of its threads has a column's values."""
    if not c.schedule.converts:
        return ""
    spec, sig = c.spec, c.spec.signature
    if not spec.operands or not spec.operands[1].converted:
        return f"the schedule {c.schedule.name} multiplies a weight of fewer bits than a has, and b is {sig.b} beside {sig.a}"
    if sig.layout[1] != "t" or sig.packed == "n" or "b" not in sig.tma:
        return f"the schedule {c.schedule.name} multiplies weights that lie along k, in rows of a multiple of 16 bytes, as layout nt has them"
    if spec.operands[0].computed:
        return f"the schedule {c.schedule.name} multiplies a as it lies, and the program computes what it multiplies of it"
    if apart := [i.name for i in spec.operands[1].along_k if i.indices != "kn" or i.block("n") > 1 or i.block("k") % 32 or i.name not in sig.tma]:
        return (
            f"the schedule {c.schedule.name} has TMA bring what b is computed of along k, for groups of a multiple of 32 and each column, in rows of a multiple of 16 bytes: "
            f"{apart[0]} is not so"
        )
    if sig.batched or spec.second or spec.finishes or any(i.packed for i in spec.inputs) or spec.longest_block > 1 or any(s.packed for s in spec.stores):
        return f"the schedule {c.schedule.name} has one product, whose outputs are tiles: no batch, no second product, no reductions and no bit masks"
    if c.config.values and (changing := [i for i in spec.operands[1].along_k if not i.in_row(c.config["block_k"])]):
        blocks = ", ".join(f"{i.name}[k/{i.block('k')}]" for i in changing)
        return f"block_k={c.config['block_k']}: a step of {c.schedule.name} has one row of what b is computed of, and there are several of {blocks}: a block_k that divides those"
    return ""


def whole_blocks(c: Candidate) -> str:
    """Columns that are reduced by themselves lie in one part of a tile."""
    block, columns = c.spec.longest_block, c.config["block_n"] // schedules.tile_parts(c.config)[1]
    if columns % block == 0:
        return ""
    return f"the program reduces each {block} columns, and an epilogue of {c.config.schedule} takes {columns} at a time: a block_n of {c.config['block_n'] * block // columns} is the least"


def scales(c: Candidate) -> str:
    """Of fp8 nothing is computed before it is multiplied: a step's sums are scaled."""
    if c.spec.signature.a.bits > 8 or not c.spec.computed or not (c.schedule.computes or c.schedule.scales):
        return ""
    if c.schedule.scales and any(not {i.name for i in o.along_k}.issuperset(o.factors) for o in c.spec.operands):
        return f"the schedule {c.schedule.name} multiplies a step's sums by inputs in blocks along k as they are: tiled computes others"
    if not c.config.values:
        return ""
    within = next((s.operand for s in steps(c.spec, c.config) if not s.as_loaded), None)
    if within is None:
        return ""
    blocks = ", ".join(f"{i.name}[k/{i.block('k')}]" for i in within.along_k)
    return f"block_k={c.config['block_k']}: a step has several of the scales of {within.name}, {blocks}, and operands of {c.spec.signature.a} are multiplied as they are: a block_k that divides those"


def second_product(c: Candidate) -> str:
    if c.spec.second is None:
        return ""
    name = c.spec.second.name
    if not c.schedule.multiplies:
        return f"the schedule {c.schedule.name} takes one product of the vendor's, and the program has a second, with {name}"
    if c.config.values and schedules.splits(c.config) > 1:
        return f"{c.schedule.name} with splits={schedules.splits(c.config)} adds up parts of one product, and the program has a second, with {name}"
    return ""


def carried(c: Candidate) -> str:
    """Reductions over k that tiles are computed of."""
    if not c.spec.carried:
        return ""
    over_k, name = c.spec.carried[0], c.schedule.name
    why = f"tiles are computed of {over_k.row} over k of {'what is computed of ' * (over_k.value != over_k.operand)}{over_k.operand}"
    can = f"{' and '.join(s.name for s in SCHEDULES.values() if s.carries)} can carry that along"
    if not c.schedule.multiplies:
        return f"{why}, and the schedule {name} leaves the loop over k to the vendor: {can}"
    if c.schedule.computes and "splits" in c.schedule.dimensions and not c.schedule.converts:
        return f"{why}, of which each part along k of {name} would have a part, and it adds up parts of the product alone: {can}"
    if not c.schedule.carries:
        return f"{why}, and the loop over k of the schedule {name} has operands in shared memory alone: {can}"
    inputs = [i for r in c.spec.carried for i in r.inputs if set(i.indices) & {"m", "n"}]
    if c.schedule.descriptors and inputs:
        return f"{why}, with {inputs[0].name}, which varies along {inputs[0].indices.strip('k')}: {name} knows a tile's rows and columns behind its loop over k alone, and tiled before it"
    if c.config.values and schedules.subtiles(c.config) > 1 and any(r.operand == "b" for r in c.spec.carried):
        return f"the program reduces b over k for the tiles, whose columns have a value each, and subtiles={schedules.subtiles(c.config)} takes them in parts: subtiles=1 is needed"
    return ""


def grouped(c: Candidate) -> str:
    along = c.spec.signature.grouped
    if not along:
        return ""
    if along not in c.schedule.groups:
        able = " and ".join(s.name for s in SCHEDULES.values() if along in s.groups)
        return f"the schedule {c.schedule.name} takes no groups along {along}, which end anywhere: {able} can"
    if along == "m" and (columns := [s.name for s in c.spec.vectors if s.indices == "n"]):
        return f"tiles store what they have of reductions over k, and a group without rows has no tile, which would store {columns[0]}: compute it by a program of its own"
    values = dict(c.config.values)
    if along == "m" and values.get("fused_finalize") and any(not s.operand for f in c.spec.finishes for s in f.sources):
        return "fused_finalize=1: blocks do not know how many tiles a group of rows has, of which the last completes reductions: fused_finalize=0 is needed"
    if schedules.splits(c.config) > 1:
        return f"{c.schedule.name} with splits={schedules.splits(c.config)} counts parts of a product along k, and not by groups: splits=1 is needed"
    return _ragged(c, along)


def _ragged(c: Candidate, along: str) -> str:
    """Of groups, whose end TMA knows of by a descriptor whose rows they are."""
    if not c.schedule.descriptors:
        return ""
    if along == "k" and c.spec.signature.layout != "tn":
        return f"{c.schedule.name} ends groups along k by rows of k, as layout tn has them, and these lie as {c.spec.signature.layout}: a.T and b with contiguous rows are needed"
    rows = c.shape[-3] if along == "m" else c.shape[-1]
    if rows * (c.shape[0] if len(c.shape) > 3 else 1) > RAGGED:
        return f"{c.schedule.name} tells {RAGGED} of {along} apart"
    return ""


def one_order(c: Candidate) -> str:
    if not adds_in_order(c.spec):
        return ""
    if not c.schedule.multiplies:
        return "an invariant program adds up all of k in one order, and the vendor's product in one that depends on M: a schedule that multiplies is needed"
    if schedules.splits(c.config) == 1:
        return ""
    return (
        f"an invariant program adds up all of k in one order, and {c.schedule.name} with splits={c.config['splits']} adds up parts: "
        "a config that does not split k is needed"
    )


def adds_in_order(spec: KernelSpec) -> bool:
    """Whether the bits of an invariant program's product depend on the order in which it is added up. Sums of int8 are exact in any."""
    return spec.signature.invariant and not spec.pointwise and spec.signature.a != INT8


def one_config(spec: KernelSpec, target: Target) -> bool:
    """Whether an invariant program has one config for all M, since two might add up in another order.

    They might where rows are reduced along n, whose elements are shared out by tiles, or operands along k, a step at a time, for the tiles, and wherever nobody has compared configs bit for bit. On sm_90 all that
    do not split k gave the same bits of bf16 and fp16 products: tiles of 16 to 128 rows, by mma and by wgmma, steps of 32 and 64, in the schedules
    tiled, persistent and warp_specialized; fp8 did by wgmma in steps of 128, which `instruction` asks for (K = 4096, 256x512, H100, torch 2.11, Triton 3.6,
    2026-11-27). Configs of fp32 operands were not compared.
    """
    # a factor that neighbours along k share is taken of what is rounded by one config, and not by another
    scaled = any(operand.factors or operand.converted for operand in spec.operands)
    along_n, compared = any(p.axes == "n" for p in spec.partials), target.name == COMPARED and spec.signature.a != FP32 and not scaled
    return spec.signature.invariant and (along_n or bool(spec.carried) or (adds_in_order(spec) and not compared))


COMPARED = "sm_90"
"""The target on which configs were compared bit for bit."""


def step_of_fp8(spec: KernelSpec, target: Target) -> int:
    """block_k of all configs of an invariant program of fp8, where each M may have another; 0 of other programs."""
    return 128 if adds_in_order(spec) and spec.signature.a.is_fp8 and target.name == COMPARED else 0


# -- without this an invariant program's rows differ in bits from those of another M, where each may have another config


def instruction(c: Candidate) -> str:
    """fp8 by mma, and by wgmma in steps of 64, gave other bits than by wgmma in steps of 128 (H100, Triton 3.6, 2026-11-27)."""
    wanted = step_of_fp8(c.spec, c.target)
    if not wanted or not c.schedule.multiplies:
        return ""
    wgmma = (c.work or Work(c.spec, c.shape, c.target)).wgmma(c.config["block_m"], c.warps)
    if wgmma and c.config["block_k"] == wanted:
        return ""
    return f"an invariant program adds up fp8 by wgmma, 64 rows and four warps at a time, in steps of {wanted}"


# -- without these a kernel that multiplies does not compile, and Triton says so


def fp8(c: Candidate) -> str:
    if c.target.multiplies(c.spec.signature.a, c.spec.signature.b):
        return ""
    if c.spec.signature.multiplied["b"] != c.spec.signature.b:
        return f"{c.target.name} does not convert fp8e4m3: quantise b to fp8e5m2 or int8, or pass it converted"
    return f"{c.target.name} does not multiply fp8e4m3"


def transposed_in_threads(c: Candidate) -> str:
    if not c.schedule.multiplies:
        return ""
    block_m, block_n, block_k = (c.config[name] for name in ("block_m", "block_n", "block_k"))
    fewest = transposing_warps(c.spec, c.target, block_m, block_n, block_k)
    if c.warps >= fewest:
        return ""
    return f"{c.target.name} does not compile steps of {block_m}x{block_n}x{block_k} for {c.warps} warps, where an operand meets a vector along k: {fewest} are the fewest"


def transposing_warps(spec: KernelSpec, target: Target, block_m: int, block_n: int, block_k: int) -> int:
    """How many warps a kernel must have at least, for Triton to compile it.

    Of an operand that meets a vector along k, and does not lie along it, Triton 3.6 has gfx942's threads transpose what they loaded, and fails where each
    has more than 16 bytes of it; 3.9 does not.
    """
    fewest, signature = 0, spec.signature
    for operand, lies, extent in zip(spec.computed and spec.operands, signature.layout, (block_m, block_n), strict=False):
        along = lies == ("n" if operand.name == "a" else "t")
        if target.arch == "gfx942" and not along and any(i.indices == "k" for i in operand.inputs):
            fewest = max(fewest, extent * block_k * signature.a.bytes // (TRANSPOSED_BYTES * target.warp_size))
    return fewest


def step(c: Candidate) -> str:
    if c.config["block_k"] >= c.least_k:
        return ""
    return f"block_k={c.config['block_k']} is below {c.least_k}, the least for {c.spec.signature.a}"


def threads(c: Candidate) -> str:
    count = c.warps * c.target.warp_size
    return f"{c.warps} warps are {count} threads, and a block holds 1024" if count > 1024 else ""


# -- without these it is hopeless


def shared_memory(c: Candidate) -> str:
    if c.needs.shared_bytes <= c.target.shared_bytes:
        return ""
    return f"{c.needs.shared_bytes} bytes of shared memory, and a block of {c.target.name} has {c.target.shared_bytes}"


def filled(c: Candidate) -> str:
    fewest, least = (64 * schedules.tile_parts(c.config)[0], max(c.least_k, 64 // c.spec.signature.a.bytes)) if c.schedule.descriptors else (16, c.least_k)
    narrowest = max(16, c.spec.longest_block)
    if c.schedule.converts:  # b is the left operand, of which two warpgroups have 64 columns each at least
        fewest, narrowest = 16, 2 * schedules.GROUP_COLUMNS
    if step := step_of_fp8(c.spec, c.target):
        fewest, least = max(fewest, 64), step
    for extent, (name, floor) in zip(c.shape[-3:], (("block_m", fewest), ("block_n", narrowest), ("block_k", least)), strict=True):
        padded = max(floor, 1 << max(0, extent - 1).bit_length())
        if c.config[name] > padded:
            return f"{name}={c.config[name]} is {c.config[name] // padded} times what {extent} fills"
    return ""


def accumulators(c: Candidate) -> str:
    needs = c.needs
    if needs.accumulators <= _MOST_ACCUMULATORS * needs.most_registers:
        return ""
    return f"{needs.accumulators} accumulators a thread, and it has {needs.most_registers} registers"


def held_inputs(c: Candidate) -> str:
    needs = c.needs
    if not needs.held or needs.accumulators + needs.held <= _MOST_HELD * needs.most_registers:
        return ""
    return f"{needs.accumulators} accumulators and {needs.held} registers for inputs a thread, and it has {needs.most_registers}"


def work_of_a_warp(c: Candidate) -> str:
    # a warp multiplies 16 rows by 8 columns at least; with fewer for each, warps repeat each other's work
    block_m, block_n = c.config["block_m"], c.config["block_n"]
    return f"{c.warps} warps share {block_m}x{block_n} values: less than 16x8 each" if block_m * block_n < 128 * c.warps else ""


LAUNCHES: tuple[Restriction, ...] = (
    architecture,
    operands,
    along_k,
    rows_of_warpgroups,
    quarters,
    empty_tensors,
    number_of_tiles,
    coordinates,
    vendors_extents,
    computed_operands,
    mixed_input,
    scales,
    second_product,
    carried,
    whole_blocks,
    grouped,
    one_order,
)
SAME_BITS: tuple[Restriction, ...] = (instruction,)
"""Of configs that epigen chooses: one that is given is the same for all M."""
OF_SCHEDULE: tuple[Restriction, ...] = (architecture, operands, along_k, computed_operands, mixed_input, scales, second_product, carried, grouped, fp8)
"""Those of LAUNCHES and COMPILES that say the same of all configs of a schedule."""
COMPILES: tuple[Restriction, ...] = (fp8, step, threads, transposed_in_threads)
PAYS: tuple[Restriction, ...] = (filled, shared_memory, accumulators, held_inputs, work_of_a_warp)
"""Of kernels that multiply, as those of COMPILES are. Some are estimates: for a config that is given, the compiler has the last word."""


def unfit(spec: KernelSpec, config: KernelConfig, shape: Shape, target: Target, chosen: bool = False) -> str:
    """'' or why a config cannot be launched. shape: M, N, K. chosen: for this M alone, so that an invariant program's has to be like those of all others."""
    return _first((*LAUNCHES, *SAME_BITS) if chosen else LAUNCHES, Candidate(config, SCHEDULES[config.schedule], spec, shape, target))


def schedule_unfit(schedule: str, spec: KernelSpec, shape: Shape, target: Target) -> str:
    """'' or why no config of a schedule that multiplies can be launched."""
    return _first(OF_SCHEDULE, Candidate(KernelConfig(schedule, ()), SCHEDULES[schedule], spec, shape, target))


def refusal(spec: KernelSpec, config: KernelConfig, shape: Shape, target: Target) -> str:
    """'' or why a config cannot run, or is hopeless. shape: M, N, K."""
    return refused(config, Work(spec, shape, target))


def refused(config: KernelConfig, work: Work) -> str:
    """As `refusal`, for many configs of one problem."""
    candidate = Candidate(config, SCHEDULES[config.schedule], work.spec, work.shape, work.target, work)
    return _first((*LAUNCHES, *SAME_BITS, *COMPILES, *PAYS) if candidate.schedule.multiplies else LAUNCHES, candidate)


def _first(restrictions: tuple[Restriction, ...], candidate: Candidate) -> str:
    for restriction in restrictions:
        if why := restriction(candidate):
            return why
    return ""


def fitted(spec: KernelSpec, config: KernelConfig, shape: Shape, target: Target) -> KernelConfig | None:
    """A config as it was found for another problem, with as many of its stages as there is room for; None where it cannot run with any."""
    work = Work(spec, shape, target)
    while refused(config, work):
        stages = dict(config.values).get("num_stages", 0)
        if stages <= 2:
            return None
        config = config.with_value("num_stages", stages - 1)
    return config
