"""The search space: every schedule's dimensions with the bounds that a problem and a GPU set, so that no illegal point is proposed.

A point is suggested dimension by dimension, each bound following from those before it. `Suggest` is Optuna's `trial.suggest_int` in
a search, and an enumeration elsewhere: one walk serves both, so they cannot disagree. Powers of two are searched by exponent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType

from epigen.codegen import schedules
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Input, KernelConfig, KernelSpec, loaded_one_by_one
from epigen.gpus import Target
from epigen.perf import limits
from epigen.perf.resources import without_tensor_cores
from epigen.shapes import Shape, products

Suggest = Callable[[str, int, int], int]
"""(name, low, high) -> a whole number in between, both ends included."""

Settle = Callable[[int, int], int]
"""(low, high) -> the value that is taken."""

SCHEDULE_NAMES = tuple(SCHEDULES)
LARGE = 1 << 27  # multiply-adds
LEAST_SPLIT = 512  # k from which on splitting it may pay
_MOST_ACCUMULATORS = 128  # fp32 values a thread: with more, little is left of the 255 registers for the epilogue
_LEAST_ACCUMULATORS = 8  # a thread with fewer waits more than it multiplies
_MOST_TILE = 256 * 128  # sixteen warps' worth of accumulators would leave no second block on a multiprocessor to hide the epilogue
_MOST_TILES = 16  # tiles a multiprocessor; more of them, and so smaller ones, fill the GPU no better and read the operands more often
_MOST_RATIO = 4  # between the sides of a tile, but where the result itself is narrower: a longer one reads more for as many products
_LEAST_STEP, _MOST_STEP = 4 << 10, 64 << 10  # bytes that a step of the main loop loads: fewer do not cover its latency, more leave no second stage
_MOST_LOADED = 96  # elements a thread loads one by one in a step; all of 40 measured configs with more than 136 spilled
_MOST_MULTIPLIED = 2048  # multiply-adds a thread in a step where there is no tensor core: with more, the compiler takes minutes
_RUN, _LEAST_RUN = 128, 64  # bytes of a row that TMA lays out in one piece, and fewer that still pay
_BARRIER_BYTES = 1 << 10  # of shared memory, for the barriers of all stages
_SUBTILED = 128 * 128  # values of a tile from which on the epilogue may take subtiles
_MOST_GROUP = _MOST_ACCUMULATORS * 128  # values that four warps accumulate
_MOST_PARTS = schedules.WARP_SPECIALIZED.dimensions["splits"][-1]
_MOST_SPLIT = 2 * 64 * 128  # values of the result a multiprocessor up to which it may: beyond, there are tiles enough
_SPLIT_BLOCKS = 4  # a multiprocessor: with more, each has too little to add up
_LEAST_PART = 256  # of k, that TMA brings: with less, adding the parts up takes longer than multiplying them
_BY_VALUE = {
    "num_stages",
    "prefetch",
    "flatten",
    "fused_finalize",
    "pingpong",
    "tma_load",
    "tma_store",
    "warp_specialized.splits",
    "mixed_input.splits",
}  # searched by value; the other dimensions are powers of two, searched by exponent
_SETTLED: Mapping[str, Settle] = (
    dict.fromkeys((f"{s}.{name}" for s in SCHEDULE_NAMES for name in ("num_stages", "group_m", "prefetch", "tma_store")), max)
    | dict.fromkeys(
        ("persistent.flatten", "persistent.fused_finalize", "warp_specialized.fused_finalize", "warp_specialized.tma_load", "library.fused_finalize"), min
    )
    | dict.fromkeys(("tiled.fused_finalize", "split_k.fused_finalize"), max)
)
"""What shape and GPU do not decide, by the name of the dimension, and as it mostly pays."""
_MOST_WARPS = 8  # that share a tile of pointers, but where more are needed
_GROUPS = (1, 8, 2, 4, 16)  # rows of tiles that share columns: the first two for all kernels, the others where TMA's requests show the difference


@dataclass(frozen=True, slots=True)
class Space:
    """The configs worth trying for one problem."""

    spec: KernelSpec
    shape: Shape
    target: Target

    # of all points, and so found once
    schedules: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The schedules that can run, and may pay."""
    _plain: bool = field(init=False, repr=False, compare=False)
    _scalar_rows: tuple[bool, bool] = field(init=False, repr=False, compare=False)
    """Whether a and b are loaded element by element: what is copied ahead is no fewer than 4 bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_scalar_rows", loaded_one_by_one(self.shape, self.spec.signature, 4))
        object.__setattr__(self, "_plain", without_tensor_cores(self.spec.signature, self.target))
        object.__setattr__(self, "schedules", self._able())

    def point(self, suggest: Suggest) -> KernelConfig:
        """One legal config, as `suggest` chooses."""
        names = self.schedules
        schedule = names[suggest("schedule", 0, len(names) - 1)]
        walks = {
            "library": self._library, "tiled": self._tiled, "split_k": self._split_k, "persistent": self._persistent,
            "warp_specialized": self._warp_specialized, "mixed_input": self._mixed_input,
        }  # fmt: skip
        return walks[schedule](suggest)

    def every(self, settled: Mapping[str, Settle] = MappingProxyType({})) -> Iterator[KernelConfig]:
        """All legal configs, in a fixed order. settled: dimensions of which one value is taken, by name."""
        path: list[tuple[int, int]] = []  # each choice made on the way to the current point, and its upper bound
        while True:
            depth = 0

            def walk(name: str, low: int, high: int) -> int:
                nonlocal depth
                if settle := settled.get(name):
                    return settle(low, high)
                if depth == len(path):
                    path.append((low, high))
                value = path[depth][0]
                depth += 1
                return value

            yield self.point(walk)
            while path and path[-1][0] >= path[-1][1]:
                path.pop()
            if not path:
                return
            path[-1] = (path[-1][0] + 1, path[-1][1])

    def outline(self) -> Iterator[KernelConfig]:
        """The configs that differ in what shape and GPU decide: schedule, tile, step, warps, ping-pong and parts. All else is as it mostly pays."""
        return self.every(_SETTLED)

    def orders(self, config: KernelConfig) -> list[KernelConfig]:
        """A config, and those like it that take their tiles in another order."""
        if not SCHEDULES[config.schedule].descriptors:
            return [config]
        groups = _GROUPS[: 1 + _orders(-(-self.shape[-3] // config["block_m"]))]
        return [config, *(config.with_value("group_m", group) for group in groups if group != config["group_m"])]

    def samples(self) -> list[KernelConfig]:
        """The first config of each schedule that has any."""
        return [self.point(lambda name, least, _, s=schedule: s if name == "schedule" else least) for schedule in range(len(self.schedules))]  # type: ignore[misc]

    def legal(self, config: KernelConfig) -> bool:
        """Whether a config, borrowed from another problem say, is a point of this space."""
        return config.schedule in self.schedules and self.at(self.parameters(config)) == config

    def nearest(self, config: KernelConfig, open_choices: Collection[str] = ()) -> tuple[KernelConfig, ...]:
        """The points nearest to a config of one of these schedules, each dimension within its bounds. open_choices: of 0 and 1, to be taken both ways."""
        own = self.parameters(config)
        both = [name for name in (f"{config.schedule}.{choice}" for choice in open_choices) if name in own]
        points: dict[KernelConfig, None] = {}
        for values in product(*((own[name], 1 - own[name]) for name in both)):
            wanted = own | dict(zip(both, values, strict=True))
            points[self.point(lambda name, low, high, w=wanted: min(max(w.get(name, low), low), high))] = None  # type: ignore[misc]
        return tuple(points)

    def parameters(self, config: KernelConfig) -> dict[str, int]:
        """A config of one of these schedules as the names and numbers that `point` would have suggested."""
        return parameters(config) | {"schedule": self.schedules.index(config.schedule)}

    def at(self, values: Mapping[str, int]) -> KernelConfig | None:
        """The config of these parameters; None where one is out of its bounds or missing."""
        inside = True

        def walk(name: str, low: int, high: int) -> int:
            nonlocal inside
            value = values.get(name, low - 1)
            inside &= low <= value <= high
            return min(max(value, low), high)

        config = self.point(walk)
        return config if inside else None

    def _able(self) -> tuple[str, ...]:
        (m, n, k), sig, target = self.shape[-3:], self.spec.signature, self.target
        count = products(self.shape)
        vendors = [] if limits.adds_in_order(self.spec) or self.spec.computed or self.spec.carried or self.spec.second or sig.grouped else ["library"]
        names = ["tiled"]
        if k >= LEAST_SPLIT and self._splits and count * m * n <= _MOST_SPLIT * target.multiprocessors:
            names.append("split_k")
        # what TMA cannot address as it lies is copied first, which pays for large products alone
        addressed = 0 not in self.shape and (set(self.spec.multiplied) <= set(sig.tma) or count * m * n * k > LARGE)
        along_k = sig.a.bytes > 1 or sig.layout == "nt"  # as the tensor cores want 8-bit operands, which nothing turns round on the way
        if addressed and along_k and not self._plain:
            names += ["persistent", *["warp_specialized"] * (m > 64 or bool(sig.grouped)), "mixed_input"]  # two warpgroups want rows for both
        return (*vendors, *(name for name in names if not limits.schedule_unfit(name, self.spec, self.shape, target)))

    def _tiled(self, suggest: Suggest) -> KernelConfig:
        return schedules.config("tiled", **self._pointers(suggest, "tiled"))

    def _split_k(self, suggest: Suggest) -> KernelConfig:
        values = self._pointers(suggest, "split_k")
        (m, n, k), slots = self.shape[-3:], _SPLIT_BLOCKS * self.target.multiprocessors
        tiles, steps = products(self.shape) * -(-m // values["block_m"]) * -(-n // values["block_n"]), -(-k // values["block_k"])
        most = max(2, min(32, _down(max(1, steps)), _down(max(1, slots // max(1, tiles)))))
        return schedules.config("split_k", **values, splits=1 << suggest("split_k.splits", 1, _log2(most)))

    def _pointers(self, suggest: Suggest, schedule: str) -> dict[str, int]:
        """The dimensions of the schedules that address operands by pointers."""
        target, element_bytes = self.target, self.spec.signature.a.bytes
        (m, _, k), threads = self.shape[-3:], self.target.warp_size

        exponent = _powers(suggest, schedule)
        fixed = limits.step_of_fp8(self.spec, target)
        block_m, block_n = self._tile(exponent, rows=64 if fixed else 16)
        right = block_n * len(self.spec.products)
        tile = block_m * right
        fewest = max(4 if fixed else 1, tile // (_MOST_ACCUMULATORS * threads), min(4, tile // (_MOST_ACCUMULATORS // 2 * threads)))
        most = max(fewest, min(16 if threads == 32 else 8, max(4, 2 * fewest), tile // (_LEAST_ACCUMULATORS * threads)))
        # what a thread does one by one grows with block_k, and Triton unrolls it
        unrolled = (
            (_MOST_MULTIPLIED, tile if self._plain else 0),
            (_MOST_LOADED, sum(block for block, scalar in zip((block_m, right), self._scalar_rows, strict=True) if scalar)),
        )
        # of scales in blocks a step of 32 or more along k has one, or several of as many bytes
        step_bytes, room = (block_m + right) * element_bytes + self.spec.beside_bytes(block_m, right, 32), target.shared_bytes
        most_k = min(
            room // step_bytes,
            _MOST_STEP // step_bytes,
            self.spec.longest_step,
            _padded(k),
            *(int(limit * most * threads / each) for limit, each in unrolled if each),
        )
        least_k = 32 if element_bytes == 1 else 16
        if (warps := limits.transposing_warps(self.spec, target, block_m, block_n, _down(most_k))) > _MOST_WARPS:
            most_k = max(least_k, _down(most_k) * _MOST_WARPS // warps)
        block_k = exponent("block_k", fixed or max(least_k, min(most_k, _LEAST_STEP // step_bytes)), fixed or most_k)
        fewest = max(fewest, *(_up(math.ceil(block_k * each / (limit * threads))) for limit, each in unrolled))
        transposing = limits.transposing_warps(self.spec, target, block_m, block_n, block_k)
        warps = exponent("num_warps", max(min(fewest, most), transposing), max(most, transposing))
        # what is loaded element by element is not fetched ahead: stages change nothing, and two say so
        deepest = 3 if all(self._scalar_rows) else 8 if m <= 64 else 6
        most_stages = max(1, min(deepest, -(-k // block_k), room // (step_bytes * block_k)))
        stages = suggest(f"{schedule}.num_stages", min(2, most_stages), most_stages)
        group_m = _GROUPS[suggest(f"{schedule}.group_m", 0, int(m > block_m and schedule == "tiled"))]
        return {
            "block_m": block_m, "block_n": block_n, "block_k": block_k, "group_m": group_m, "num_warps": warps, "num_stages": stages,
            "fused_finalize": self._fused_finalize(suggest, schedule), "prefetch": suggest(f"{schedule}.prefetch", 0, int(bool(self._loaded()))),
        }  # fmt: skip

    def _loaded(self, from_tma: Collection[str] = ()) -> list[Input]:
        """The inputs that a kernel loads by pointers, which it may prefetch. from_tma: those that come by TMA."""
        return [i for i in self.spec.loaded if i.indices and i.name not in from_tma]

    def _fused_finalize(self, suggest: Suggest, schedule: str, possible: bool = True) -> int:
        reduces = any(not s.operand for f in self.spec.finishes for s in f.sources)
        return suggest(f"{schedule}.fused_finalize", 0, int(possible and reduces and self.spec.signature.grouped != "m"))

    def _tile(self, exponent: Callable[[str, int, int], int], rows: int = 16, most: int = _MOST_TILE) -> tuple[int, int]:
        """block_m and block_n. rows: the fewest. most: of values in a tile."""
        m, n, _ = self.shape[-3:]
        target, element_bytes, fewest, count = self.target, self.spec.signature.a.bytes, rows, len(self.spec.products)
        rows, columns = min(256, _padded(m, fewest)), min(256, max(_padded(n), self.spec.longest_block))
        least = min(_down(products(self.shape) * m * n // (_MOST_TILES * target.multiprocessors)), 128 * 128, rows * columns)
        most = (128 * 128 if self._plain else most) // count
        least = min(least, most)
        extents = target.shared_bytes // ((32 if element_bytes == 1 else 16) * element_bytes)  # of both sides together
        block_m = exponent("block_m", max(fewest, least // columns, min(rows, _root(least // _MOST_RATIO))), min(rows, extents - 16 * count))
        widest = columns if block_m == rows else min(columns, _MOST_RATIO * block_m)
        narrowest = max(16, least // block_m, min(columns, block_m // _MOST_RATIO))
        block_n = exponent("block_n", min(widest, narrowest), min(widest, most // block_m, (extents - block_m) // count))
        return block_m, block_n

    def _persistent(self, suggest: Suggest) -> KernelConfig:
        """One block a multiprocessor, of which no stage is too many as long as it fits."""
        (m, _, k), target, element_bytes = self.shape[-3:], self.target, self.spec.signature.a.bytes

        exponent = _powers(suggest, "persistent")
        block_m, block_n = self._tile(exponent, rows=64)
        tile, right = block_m * block_n, block_n * len(self.spec.products)
        warps = exponent("num_warps", max(4, block_m * right // (_MOST_ACCUMULATORS * 32)), 8)
        subtiles = 1 + suggest("persistent.subtiles", 0, int(tile > _SUBTILED))
        row_bytes, room = (block_m + right) * element_bytes, target.shared_bytes - _BARRIER_BYTES
        stored_bytes = sum(tile // subtiles * s.dtype.bytes for s in schedules.tma_storable(self.spec))
        fixed = limits.step_of_fp8(self.spec, target)
        tma_store = suggest("persistent.tma_store", 0, int(0 < stored_bytes <= room - 2 * (block_m + right) * (fixed or _LEAST_RUN)))
        room -= tma_store * stored_bytes
        most_k = min(256, _down(room // (2 * row_bytes)), max(_LEAST_RUN // element_bytes, _padded(k)))
        block_k = exponent("block_k", fixed or min(most_k, _LEAST_RUN // element_bytes), fixed or min(most_k, 2 * _RUN // element_bytes))
        most_stages = min(8, room // (row_bytes * block_k))
        stages = suggest("persistent.num_stages", max(2, most_stages - 1), most_stages)
        flatten = suggest("persistent.flatten", 0, 1)
        prefetch = suggest("persistent.prefetch", 0, int(not flatten and bool(self._loaded())))
        group_m = _GROUPS[suggest("persistent.group_m", 0, _orders(-(-m // block_m)))]
        return schedules.config(
            "persistent", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, flatten=flatten, subtiles=subtiles, tma_store=tma_store,
            num_warps=warps, num_stages=stages, fused_finalize=self._fused_finalize(suggest, "persistent", not flatten), prefetch=prefetch,
        )  # fmt: skip

    def _warp_specialized(self, suggest: Suggest) -> KernelConfig:
        (m, n, k), target, element_bytes = self.shape[-3:], self.target, self.spec.signature.a.bytes

        exponent = _powers(suggest, "warp_specialized")
        pingpong = suggest("warp_specialized.pingpong", 0, 1)
        # a group of four warps has a tile of its own, or half of the rows of one
        block_m, block_n = self._tile(exponent, rows=64 if pingpong else 128, most=_MOST_GROUP if pingpong else 2 * _MOST_GROUP)
        # parts in ping-pong gain nothing
        parts = min(
            (1 + pingpong) * target.multiprocessors // max(1, products(self.shape) * -(-m // block_m) * -(-n // block_n)), k // _LEAST_PART, _MOST_PARTS
        )
        splits = suggest("warp_specialized.splits", 1, max(1, parts) if self._splits and not self.spec.signature.grouped else 1)
        subtiles = 1 << suggest("warp_specialized.subtiles", 0, self._halvings(block_n, splits))
        stored_bytes = {s.name: (1 + pingpong) * block_m * block_n // subtiles * s.dtype.bytes for s in schedules.tma_storable(self.spec)}
        fixed = limits.step_of_fp8(self.spec, target)
        right = block_n * len(self.spec.products)
        row_bytes, room, least = (block_m + right) * element_bytes, target.shared_bytes - _BARRIER_BYTES, 2 * (block_m + right) * (fixed or _LEAST_RUN)
        # the products lie such that a pointer would store four bytes at a time
        by_tma = int(0 < sum(stored_bytes.values()) <= room - least)
        tma_store = suggest("warp_specialized.tma_store", by_tma, by_tma)
        room -= tma_store * sum(stored_bytes.values())
        from_tma = schedules.tma_loadable(self.spec, bool(tma_store))
        # subtiles that are loaded at once have a buffer each
        at_once = min(subtiles, schedules.AT_ONCE)
        again = (at_once - 1) * sum(size for name, size in stored_bytes.items() if name in from_tma.values())
        again += (1 + pingpong) * block_m * block_n * at_once // subtiles * sum(dtype.bytes for dtype in schedules.in_own_buffers(self.spec, from_tma).values())
        tma_load = suggest("warp_specialized.tma_load", 0, int(bool(from_tma) and again <= room - least and splits == 1))
        room -= tma_load * again
        loaded = self._loaded(from_tma if tma_load else ())
        # of two subtiles both inputs have to be held while the tile is multiplied, for which registers are left where it is a row, a column or bits
        whole = subtiles > 1 and any(i.indices == "mn" and not i.packed for i in loaded)
        prefetch = suggest("warp_specialized.prefetch", 0, int(bool(loaded) and not whole and schedules.holds_inputs(self.spec, subtiles, splits)))
        most_k = min(max(_LEAST_RUN // element_bytes, min(128, _down(room // (2 * row_bytes)), _padded(k))), self.spec.longest_step)
        block_k = exponent("block_k", fixed or min(most_k, _RUN // element_bytes), fixed or most_k)
        most_stages = min(8, room // (row_bytes * block_k))
        stages = suggest("warp_specialized.num_stages", max(2, most_stages - 1), most_stages)
        rows_of_tiles = -(-m // block_m) * (self.shape[0] if self.spec.signature.grouped == "m" else 1)  # one group's follow another's
        group_m = _GROUPS[suggest("warp_specialized.group_m", 0, _orders(rows_of_tiles))]
        return schedules.config(
            "warp_specialized", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, pingpong=pingpong, subtiles=subtiles, prefetch=prefetch,
            tma_store=tma_store, tma_load=tma_load, num_stages=stages, fused_finalize=self._fused_finalize(suggest, "warp_specialized"), splits=splits,
        )  # fmt: skip

    def _mixed_input(self, suggest: Suggest) -> KernelConfig:
        (m, n, k), target, sig = self.shape[-3:], self.target, self.spec.signature

        exponent = _powers(suggest, "mixed_input")
        rows = min(256, _padded(m))
        block_m = exponent("block_m", max(16, rows // 4), rows)
        # of 256 columns four warpgroups have 64 each, which leaves each thread registers for the sums of 128 rows
        block_n = exponent("block_n", 128, 256 if block_m <= 128 and n > 128 else 128)
        most_k = min([128, max(32, _padded(k)), *(i.block("k") & -i.block("k") for i in self.spec.operands[1].along_k)])
        block_k = exponent("block_k", min(64, most_k), most_k)
        b_bytes = sig.b.bytes / (2 if sig.packed else 1)
        parts = min(target.multiprocessors // max(1, -(-m // block_m) * -(-n // block_n)), k // _LEAST_PART, _MOST_PARTS)
        splits = suggest("mixed_input.splits", 1, max(1, parts) if self._splits else 1)
        scales = block_n * sum(i.dtype.bytes for i in self.spec.operands[1].along_k if i.dtype)
        step_bytes, room = int((block_m * sig.a.bytes + block_n * b_bytes) * block_k) + scales, target.shared_bytes - _BARRIER_BYTES
        stored = sum(block_m * block_n * s.dtype.bytes for s in schedules.tma_storable(self.spec))
        by_tma = int(0 < stored <= room - 2 * step_bytes)
        tma_store = suggest("mixed_input.tma_store", by_tma, by_tma)
        most_stages = max(2, min(8, (room - tma_store * stored) // step_bytes))
        stages = suggest("mixed_input.num_stages", max(2, most_stages - 1), most_stages)
        group_m = _GROUPS[suggest("mixed_input.group_m", 0, _orders(-(-m // block_m)))]
        return schedules.config(
            "mixed_input", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, tma_store=tma_store, num_stages=stages, splits=splits,
        )  # fmt: skip

    def _halvings(self, block_n: int, splits: int) -> int:
        """How often the epilogue may halve a tile of the schedule warp_specialized. In quarters where there are several tiles to bring or take away."""
        tiles = len(schedules.tma_storable(self.spec)) + len(schedules.tma_loadable(self.spec))
        return 0 if block_n < 64 else 2 if tiles > 1 and block_n >= 128 and splits == 1 and not self.spec.promoted else 1

    @property
    def columns_alone(self) -> bool:
        """Whether columns are reduced, and no tile is read or written beside the product."""
        tiles = "mn" in [i.indices for i in self.spec.loaded] + [s.indices for s in self.spec.stores]
        return not tiles and any(p.axes != "n" for p in self.spec.partials)

    @property
    def _splits(self) -> bool:
        """Whether k may be split."""
        return not self.spec.second and not limits.adds_in_order(self.spec) and not limits.one_config(self.spec, self.target)

    def _library(self, suggest: Suggest) -> KernelConfig:
        m, n, _ = self.shape[-3:]
        if self.spec.bare_product:  # by one kernel, which has no dimensions
            return schedules.config("library", block_m=8, block_n=128, num_warps=1, fused_finalize=0)
        exponent = _powers(suggest, "library")
        block_m = exponent("block_m", 1, min(128, max(8, _padded(m, 1))))
        block_n = exponent("block_n", min(_padded(n), max(32, 1024 // block_m)), min(1024, _padded(n), 8192 // block_m))
        # 32 values a thread: fewer are no faster in a pass over memory, and far slower where columns are summed; 64 where that is all
        warps = max(1, block_m * block_n // (2048 if self.columns_alone else 1024))
        fused_finalize = self._fused_finalize(suggest, "library")
        return schedules.config("library", block_m=block_m, block_n=block_n, num_warps=warps, fused_finalize=fused_finalize)


def _powers(suggest: Suggest, schedule: str) -> Callable[[str, int, int], int]:
    """Suggests a dimension of a schedule that is a power of two, by its exponent. Takes name, low and high."""
    return lambda name, low, high: 1 << suggest(f"{schedule}.{name}", _log2(low), _log2(max(low, high)))


def parameters(config: KernelConfig) -> dict[str, int]:
    """A config as names and numbers, of which near ones are near in speed. Those of the schedules are for all spaces."""
    named = {"schedule": SCHEDULE_NAMES.index(config.schedule)}
    for name, value in config.values:
        named[f"{config.schedule}.{name}"] = value if {name, f"{config.schedule}.{name}"} & _BY_VALUE else _group(value) if name == "group_m" else _log2(value)
    return named


def _orders(tiles_m: int) -> int:
    """The last of the groups that makes a difference: four rows of tiles or fewer are one group of four, of eight and of sixteen."""
    return min(len(_GROUPS) - 1, _log2(_up(tiles_m)))


def _group(value: int) -> int:
    return _GROUPS.index(value) if value in _GROUPS else len(_GROUPS)  # beyond the last: no point of any space, and nearest to the last


def _log2(value: int) -> int:
    return max(0, value.bit_length() - 1)


def _down(value: int) -> int:
    """The greatest power of two that is no more; 1 below that."""
    return 1 << _log2(value)


def _root(value: int) -> int:
    """The square root of a power of two, rounded up to one."""
    return 1 << (_log2(value) + 1) // 2


def _up(value: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, value - 1).bit_length()


def _padded(extent: int, least: int = 16) -> int:
    return max(least, _up(extent))
