"""The plain rule: a config from shape, dtype and the device's limits, where nothing was measured. It is a point of the search space, as all that is chosen."""

from __future__ import annotations

from dataclasses import replace

from epigen.choose.space import LARGE, Space
from epigen.codegen import schedules
from epigen.codegen.spec import Choice, KernelConfig, KernelSpec, k_multiple, row_bytes
from epigen.dtypes import FP32
from epigen.errors import ConfigError
from epigen.gpus import Target
from epigen.perf import limits
from epigen.shapes import Shape, extents, products

# block_m, block_n, num_warps; largest first. Read off the first measurements on an H200 (torch 2.11, Triton 3.6, 2026-11).
_TILES = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4), (32, 64, 4), (32, 32, 4), (16, 32, 2))
# tiles of 8-bit operands a multiprocessor: 512x4096x4096 has 0.97, and took 18.0 us with promoted sums where tiled took 23.1 (H100, 2026-11)
_LEAST_OF_BYTES = 0.75
_LEAST_PART = {False: 512, True: 1024}  # of k, that a part of a weight's product has, by whether rows are few
_LEAST_GROUP = 64  # of k, with which tiled kernels take a scale out of a step's product
_PADDING = 1.25  # times as many rows as there are, with which tiles of 256 are too high
_SHORT_OF_BYTES = 2048  # k of theirs up to which one group's epilogue is better hidden under the other's main loop
_SKINNY = {16: (16, 64, 4), 32: (32, 64, 4), 64: (64, 64, 4)}


def choose(spec: KernelSpec, shape: Shape, target: Target, refused: str = "") -> Choice:
    """A legal config for one problem. refused: why a tiled config did not work, if one was tried."""
    m, n, k = shape[-3:]
    space = Space(spec, shape, target)
    sig, at_once, count = spec.signature, products(shape), len(spec.products)
    large = at_once * m * n * k > LARGE

    def vendor_multiplies() -> bool:
        return "library" in space.schedules and not limits.unfit(spec, _epilogue(space), shape, target)

    def by_vendors(why: str) -> Choice:
        return by_vendor(spec, shape, target, why)

    if refused:
        return by_vendors(refused)
    if sig.sparse:
        return of_sparse(spec, shape, target)
    if why := limits.schedule_unfit("tiled", spec, shape, target):
        return by_vendors(why)
    if sig.a == FP32 and sig.precision == "ieee" and large and vendor_multiplies():
        return by_vendors("the vendor's fp32 product is faster than Triton's, which has no tensor cores for it")
    # Tuned, a tiled `mm` took 1.05 to 1.13 times as long as the vendor's in 6 problems of M from 128 on, 0.90 to 0.96 in 3 of M up to 16 (H200,
    # torch 2.11, Triton 3.6, 2026-11); of rows that TMA cannot address the vendor's took twice as long as a fused kernel
    whole, addressed = spec.bare_product and large and m > 64 and vendor_multiplies(), set(spec.multiplied) <= set(sig.tma)
    # where TMA cannot address them, operands are copied first, which pays for large products alone
    if sig.grouped:
        specialized = _of_groups(space) if addressed else None
    else:
        specialized = _warp_specialized(space) if (not whole if addressed else large) else None
    if specialized:
        return Choice(specialized, _why(spec, shape, target))
    if mixed := _mixed_input(space):
        return Choice(mixed, _why(spec, shape, target))
    if whole:
        return by_vendors("large products of Triton's are slower")
    if any(each % 4 for each in row_bytes(shape, sig)) and large and vendor_multiplies():
        return by_vendors("rows that are not aligned to 4 bytes are read element by element, which the vendor's product avoids")
    block_k = {4: 32, 2: 64, 1: 128}[sig.a.bytes]
    if target.backend == "hip" and target.warp_size == 32:
        block_k //= 2  # two stages of twice as long a step spill 42 registers at 128x128 (gfx1100, fp16, Triton 3.9, 2026-11)
    tiles: tuple[tuple[int, int, int], ...] = _TILES
    if sig.a == FP32 and sig.precision == "ieee":
        tiles, block_k = tuple(t for t in _TILES if t[0] * t[1] <= 64 * 64), 16
    if len(spec.lines) + 2 * (len(spec.partials) + sum(s.packed for s in spec.stores)) > 6 or sig.a.bits == 8 or spec.computed or spec.carried:
        # long epilogues, what 8-bit operands need beside the accumulator, and operands that are computed or reduced, spill registers at 128x256
        tiles = tuple(t for t in tiles if t[0] * t[1] * count <= 128 * 128)
    tiles = tuple(t for t in tiles if t[0] * t[1] * count <= 128 * 256)
    if m <= 64:
        block_m = max(16, 1 << max(0, m - 1).bit_length())
        tiles = (_SKINNY[block_m],)
    elif target.backend == "hip":
        tiles = tuple(t for t in tiles if t[0] * t[1] * count <= 128 * 128)
    # the largest tile that still gives every multiprocessor one, else a small one
    enough = (t for t in tiles if at_once * -(-m // t[0]) * -(-n // t[1]) >= target.multiprocessors)
    block_m, block_n, warps = next(enough, tiles[max(0, len(tiles) - 2)])
    block_n = max(spec.longest_block, min(block_n, max(16, 1 << max(0, n - 1).bit_length())))
    floor = 16 if sig.a.bytes > 1 else 32
    block_k = max(floor, min(block_k, spec.longest_step, 1 << max(0, k - 1).bit_length()))
    if m <= 64 and spec.operands and spec.operands[1].converted:
        block_n, block_k, warps = max(spec.longest_block, min(block_n, 64)), _step_of_weights(spec, block_m, block_k, k), 4
    a_and_b = (block_m + block_n * count) * block_k * sig.a.bytes
    stages = next((s for s in (4, 3, 2) if s * a_and_b <= target.shared_bytes - 1024), 1)
    if target.backend == "hip":
        stages = min(stages, 2)
    shared_out = at_once * -(-m // block_m) * -(-n // block_n)
    few = shared_out <= target.multiprocessors
    # a second launch takes longer than the last block's way over what few tiles have left
    finalize = int(few and any(not s.operand for f in spec.finishes for s in f.sources))
    prefetch = int(few and bool(spec.loaded))  # where no other tile's work covers the wait for the epilogue's inputs
    values = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "group_m": 8, "num_warps": warps, "num_stages": stages}
    values |= {"fused_finalize": finalize, "prefetch": prefetch}
    # of two values in a byte there is twice as much to compute as of one, for which more warps are wanted
    resident = 4 if m <= 32 and sig.packed else 1
    if m <= 64 and "split_k" in space.schedules and 0 < shared_out < resident * target.multiprocessors:
        config = schedules.config("split_k", **values, splits=_splits(shared_out, -(-k // block_k), resident * target.multiprocessors))
    else:
        config = schedules.config("tiled", **values)
    return Choice(_legal(config, space), _why(spec, shape, target))


def _legal(config: KernelConfig, space: Space) -> KernelConfig:
    """The nearest point of the search space, with as many stages as there is room for."""
    point, *_ = space.nearest(config)
    return limits.fitted(space.spec, point, space.shape, space.target) or point


def _step_of_weights(spec: KernelSpec, block_m: int, block_k: int, k: int) -> int:
    """128 values along k, or of single bytes and up to 32 rows 256, as far as those share their factors.

    The fastest of some 300 configs at 16x8192x8192, 16x4096x14336, 16x8192x28672 and 64x8192x8192 had those, or took at most 1.05 times as long (H200,
    Triton 3.6, 2026-11).
    """
    wanted = 256 if block_m <= 32 and not spec.signature.packed else 128
    blocks = [i.block("k") for i in spec.operands[1].along_k]
    return min([max(block_k, wanted), *(b & -b for b in blocks if b % 64 == 0), max(32, 1 << max(0, k - 1).bit_length())])


def _splits(tiles: int, steps: int, programs: int) -> int:
    """Into how many parts k is split, that each multiprocessor has one, or as many `programs` are there: the weights are all that a skinny product reads,
    and all have to read them.

    At 16x4096x4096 a tile for every second multiprocessor took 27.9 us, and the best config 16.7 (H200, fp16, Triton 3.6, 2026-11).
    """
    wanted = -(-programs // tiles)
    return max(2, min(1 << (wanted - 1).bit_length(), 1 << (steps.bit_length() - 1), 32))


def _why(spec: KernelSpec, shape: Shape, target: Target) -> str:
    return f"chosen by rule for {extents(shape)} {spec.signature.called} on {target.name}: no measurement is at hand"


def _warp_specialized(space: Space) -> KernelConfig | None:
    """Ping-pong over tiles of 128x128, where there is one for each multiprocessor.

    Such configs won 72 of 105 tuned problems of so many tiles. At 65536x1024x1024 the tiled kernel took 1.43 to 1.62 times as long as they do; at
    4095x4097x1023, where operands are copied first, the vendor's product and a pass took 2.35 to 2.46 times as long (H200, torch 2.11, Triton
    3.6, 2026-11). In subtiles, since registers spill where a whole tile's inputs are read by pointers. Of 15 batches of `mm * s` with so many tiles they
    were 0.98 times as fast as the best of up to 17 configs in the mean, and 0.87 at worst (H100, torch 2.11, Triton 3.6, 2026-11).
    """
    spec, one_byte = space.spec, space.spec.signature.a.bytes == 1
    enough = _tiles_a_multiprocessor(space, 128) >= (_LEAST_OF_BYTES if one_byte else 1)
    if not enough or "warp_specialized" not in space.schedules:
        return None
    # Two products have as many accumulators as one of twice the columns. Of 12 configs of each of five gated units with 512 to 8192 rows this one was the
    # fastest, or within 0.1 % of it; 128x128 by cooperative warpgroups took 1.02 to 1.09 times as long (H200, torch 2.11, Triton 3.6.0, 2026-11-28).
    block_n, group_m = (64, 16) if spec.second else (128, 8)
    shared = _of_bytes(space) if one_byte else {"block_n": block_n, "block_k": 64, "group_m": group_m, "pingpong": 1, "subtiles": 2, "prefetch": 0}
    if spec.longest_block > shared["block_n"] // shared["subtiles"]:  # which a whole row of a part has to hold
        columns = 256 // len(spec.products)
        shared |= {"block_n": columns, "pingpong": 0, "subtiles": 2 if columns // 2 >= spec.longest_block else 1}
    for tma in (1, 0) if schedules.tma_storable(spec) else (0,):
        loads = int(bool(schedules.tma_loadable(spec, bool(tma))))
        config = schedules.config("warp_specialized", block_m=128, **shared, tma_store=tma, tma_load=loads, num_stages=8, fused_finalize=0)
        point, *_ = space.nearest(config)
        if fitting := limits.fitted(spec, point, space.shape, space.target):
            return fitting
    return None


_FEW_ROWS = 64
"""In the mean, up to which half as high a tile pays, and below which it does of two products."""
_SHORT = 512
"""k in the mean, that groups have less than where what a tile stores takes as long as what it multiplies."""


def _of_groups(space: Space) -> KernelConfig | None:
    """Groups of rows: tiles of 128 rows by cooperative warpgroups, or of 64 in ping-pong where groups have fewer rows, and of 256 columns of the products together.
    Groups along k: cooperative tiles of 128x256 where they are short, else as a product of all of k has them.

    Of 4 or 5 configs of each of 7 shapes, of 8, 64 and 128 groups of 8 to 1024 rows in the mean, all alike or drawn by a Dirichlet distribution of 0.5, that was the
    fastest or took at most 1.02 times as long in 28 gated units and products with a row's factor, and at most 1.04 in 14 weights' gradients (H200, bf16, Triton 3.6, 2026-11).
    """
    spec, (m, n, k) = space.spec, space.shape[-3:]
    along_k = spec.signature.grouped == "k"
    if along_k and k >= _SHORT:
        return _warp_specialized(space)
    high = along_k or m > _FEW_ROWS - bool(spec.second)
    block_m, block_n = 128 if high else 64, 256 // len(spec.products)
    tiles = products(space.shape) * -(-m // block_m) * -(-n // block_n)
    if "warp_specialized" not in space.schedules or tiles < _WAVE * space.target.multiprocessors:
        return None
    subtiles = 2 if block_n // 2 >= spec.longest_block else 1
    config = schedules.config(
        "warp_specialized", block_m=block_m, block_n=block_n, block_k=128 // spec.signature.a.bytes, group_m=8, pingpong=int(not high), subtiles=subtiles, prefetch=0,
        tma_store=1, tma_load=0, num_stages=8, fused_finalize=0,
    )  # fmt: skip
    point, *_ = space.nearest(config)
    return limits.fitted(spec, point, space.shape, space.target)


_WAVE, _LEAST_WAVE = 0.75, 0.4
"""Of the multiprocessors, that have a tile of groups or of a weight of fewer bits, or a part of one."""


def _mixed_input(space: Space) -> KernelConfig | None:
    """A weight of fewer bits: tiles as high as there are rows, up to 256, of 256 columns where they are low, and k in as many parts as there are multiprocessors
    for them. None where those leave too many multiprocessors without a part; and up to 16 rows, which tiled kernels with scales of long groups read as fast, where
    parts would be short, and of single bytes where columns alone do not fill the multiprocessors.

    Of up to 8 configs of each of 51 problems with 1 to 4096 rows such a one was the fastest or took at most 1.07 times as long; tiled ones of 17 to 256 rows took 1.1
    to 3 times as long, of 512 and 4096 1.5 to 2 (8192x8192, 28672x8192, 14336x4096, H200, Triton 3.6, 2026-11).
    """
    if "mixed_input" not in space.schedules:
        return None
    (m, n, k), multiprocessors, weight = space.shape[-3:], space.target.multiprocessors, space.spec.operands[1]
    few = m <= 16 and all(i.block("k") >= _LEAST_GROUP for i in weight.along_k)
    block_m = min(256, max(16, 1 << (m - 1).bit_length()))
    if -(-m // 256) * 256 >= _PADDING * (-(-m // 128) * 128):
        block_m = min(128, block_m)
    wide = -(-n // 256)
    filled = wide >= _WAVE * multiprocessors
    packed = weight.packed is not None and 4 * wide >= _WAVE * multiprocessors
    block_n, block_k = 256 if (m <= 64 and (packed or filled or few)) or m > block_m == 128 else 128, 128 if m <= 128 else 64
    tiles = -(-m // block_m) * -(-n // block_n)
    splits = max(1, min(multiprocessors // tiles, k // _LEAST_PART[few], 16))
    if tiles * splits < (_WAVE if few else _LEAST_WAVE) * multiprocessors or (few and weight.packed is None and not filled):
        return None
    values = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "group_m": 1, "tma_store": 1, "num_stages": 8, "splits": splits}
    point, *_ = space.nearest(schedules.config("mixed_input", **values))
    return limits.fitted(space.spec, point, space.shape, space.target)


def _of_bytes(space: Space) -> dict[str, int]:
    """How operands of 8 bits are shared out. Promoted sums want both groups in turn at the tensor cores, so cooperative; others do where k is long.

    Of the 40 configs tried of each of nine problems, such a one took at most 1.07 times as long as the fastest (H100, torch 2.11, Triton 3.6, 2026-11).
    """
    if not space.spec.promoted and space.shape[-1] <= _SHORT_OF_BYTES:
        return {"block_n": 128, "block_k": 128, "group_m": 4, "pingpong": 1, "subtiles": 2, "prefetch": 1}
    if _tiles_a_multiprocessor(space, 256) >= 1 and not space.spec.computed:
        return {"block_n": 256, "block_k": 128, "group_m": 16, "pingpong": 0, "subtiles": 2, "prefetch": 0}
    vectors = all(i.indices != "mn" for i in space.spec.loaded)  # for a tile of values no registers are left
    return {"block_n": 128, "block_k": 128, "group_m": 8, "pingpong": 0, "subtiles": 1, "prefetch": int(vectors)}


def _tiles_a_multiprocessor(space: Space, columns: int) -> float:
    """How many tiles of 128 rows there are for each."""
    m, n, _ = space.shape[-3:]
    return products(space.shape) * -(-m // 128) * -(-n // columns) / space.target.multiprocessors


def by_vendor(spec: KernelSpec, shape: Shape, target: Target, why: str) -> Choice:
    """The vendor's product and one generated kernel for the epilogue, or the vendor's alone: the answer where no tiled config fits.

    Raises ConfigError where the vendor's product is none that the program has.
    """
    if limits.adds_in_order(spec):
        raise ConfigError(f"{why}; and the vendor's product, which would take its place, adds up in an order that depends on M, and the program is invariant")
    if spec.computed:
        computed = spec.computed[0]
        raise ConfigError(f"{why}; and the vendor's product does not {'convert' if computed.as_loaded else 'compute'} operand {computed.name}")
    if spec.carried:
        raise ConfigError(
            f"{why}; and the vendor's product, which would take its place, does not reduce operand {spec.carried[0].operand} over k for the tiles"
        )
    if spec.second:
        raise ConfigError(f"{why}; and the vendor's product, which would take its place, is one, and the program has a second, with {spec.second.name}")
    how = "the vendor's kernel is the whole program" if spec.bare_product else "vendor product, then one fused epilogue"
    return Choice(_epilogue(Space(spec, shape, target)), f"{how}: {why}")


_FIXED_ROWS, _GROUPED = 64, 8


def for_all_rows(spec: KernelSpec, shape: Shape, target: Target, refused: str = "") -> Choice:
    """The config of an invariant program that has one for all M, and however tensors lie: the plain rule's for 64 rows without gaps, by N and K alone.

    It addresses nothing by TMA, so that it runs wherever a tensor lies. refused: as of `choose`; what says so does not depend on M.
    """
    n, k = shape[-2:]
    common = replace(spec.signature, layout="nn", tma=(), factors=(), k_multiple=k_multiple(k), index_bits=32, bytewise=(), batched=False)
    one, fixed = replace(spec, signature=common), (_FIXED_ROWS, n, k)
    choice = pointwise(one, fixed, target) if spec.pointwise else choose(one, fixed, target, refused)
    config = choice.config.with_value("group_m", _GROUPED)  # which decides no sum, and at 64 rows nothing at all
    return Choice(config, f"one config for all M, since the program is invariant: {choice.why}")


def pointwise(spec: KernelSpec, shape: Shape, target: Target) -> Choice:
    """The epilogue alone, over a product that is given."""
    return Choice(_epilogue(Space(spec, shape, target)), "one fused epilogue: the product is given")


def of_sparse(spec: KernelSpec, shape: Shape, target: Target) -> Choice:
    """The vendor's product of a sparse operand, and the epilogue."""
    return Choice(
        _epilogue(Space(spec, shape, target)), "the vendor's 2:4 sparse product, and what follows it: no measurement says that the dense values are faster"
    )


def _epilogue(space: Space) -> KernelConfig:
    """High tiles where columns are reduced, since what is left of those is a chain of loads: of 16384x1024 and 8192x16384 bf16 the sums took 20 and 99 us by
    them, 37 and 182 by tiles of 32x128, and 34 and 98 by torch. Beside a tile that is read or written without a launch less: 144 us for GELU's derivative and
    the sums of 16384x4096, of 156 (H100, torch 2.11, Triton 3.6, 2026-11).
    """
    high = any(p.axes != "n" for p in space.spec.partials)
    block_m, block_n = (128, max(64, space.spec.longest_block)) if high else (8, max(128, space.spec.longest_block))
    return _legal(schedules.config("library", block_m=block_m, block_n=block_n, num_warps=8, fused_finalize=int(space.columns_alone)), space)
