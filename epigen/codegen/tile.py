"""What an epilogue takes of a tile, and the offsets and masks that a main kernel declares for it: spec and config say which, and the templates print them.

Ensures that a kernel declares each name that it uses, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from epigen.codegen import emit, schedules
from epigen.codegen.functions import counts, inside, units
from epigen.codegen.schedules import SCHEDULES, Schedule
from epigen.codegen.spec import Input, KernelConfig, KernelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tile that an epilogue takes, as text. m, n: its number along each. rows, columns: its extents. down, across: how many there are
    along m and n."""

    m: str
    n: str
    rows: str
    columns: str
    down: str
    across: str


def part_of_tile(config: KernelConfig) -> Part:
    (down, across), count = schedules.tile_parts(config), counts(config)
    m, rows = ("pid_m", "BLOCK_M") if down == 1 else ("part_m", "ROWS")
    of_groups = SCHEDULES[config.schedule].converts
    n, columns = ("pid_n", "BLOCK_N") if across == 1 else ("part_n", "COLUMNS" if of_groups else "SUBTILE_N")
    return Part(m, n, rows, columns, count["parts_m"], count["parts_n"])


@dataclass(frozen=True, slots=True)
class MaskUnit:
    """What packed masks are accessed by. name: of one. rows: what the offsets of their rows are called. bits: how many columns one holds."""

    name: str
    rows: str
    bits: int

    @property
    def offsets(self) -> frozenset[str]:
        """The names by which masks are accessed in these units."""
        return frozenset({self.rows, f"offs_{self.name}", f"in_{self.name}s"})


def mask_units(schedule: Schedule, stored: bool) -> Mapping[str, MaskUnit]:
    """By "word" and "byte". Gluon's layouts follow from use: what is stored lies in other threads than what was read, and neither as the columns do."""
    by_unit = {}
    for unit, bits in (("word", 32), ("byte", 8)):
        name = f"kept_{unit}" if stored and schedule.dialect == "gluon" else unit
        by_unit[unit] = MaskUnit(name, "offs_m" if schedule.dialect == "triton" else f"offs_{name}_m", bits)
    return by_unit


def packs(spec: KernelSpec) -> bool:
    """Whether the main kernel packs a mask. Vectors are then loaded in one dimension: a load of [1, BLOCK_N] spreads its own layout over the tile, and
    every bit moves to another thread (Triton 3.6 and 3.9, sm_90: 384 shuffles a thread of a 128x256 tile, against 32)."""
    return any(s.packed for s in spec.stores)


@dataclass(frozen=True, slots=True)
class Declared:
    """Names of offsets and masks, and of the number of tiles along m where only some kernels of the schedule have it, that the main kernel declares:
    before a tile is multiplied, and after that."""

    before: frozenset[str]
    after: frozenset[str]


def declared(spec: KernelSpec, config: KernelConfig) -> Declared:
    schedule, prefetched = SCHEDULES[config.schedule], schedules.prefetched(spec, config)
    loads = _loads(spec, config, prefetched or spec.loaded)
    epilogue = _stores(spec, config) | _partials(spec, config) | spec.positions
    if not schedule.descriptors:
        return Declared(_whole(loads | epilogue | _product(spec, config)), frozenset())
    if not prefetched:
        return Declared(frozenset(), _whole(loads | epilogue))
    if schedules.tile_parts(config)[1] == 1:  # the offsets serve both
        return Declared(_whole(loads | epilogue), frozenset())
    return Declared(_whole(loads), _whole(epilogue))


def _whole(names: Iterable[str]) -> frozenset[str]:
    """The names and what they are made of."""
    return frozenset(names) | (frozenset({"offs_m", "offs_n"}) if "in_tile" in names else frozenset())


def _product(spec: KernelSpec, config: KernelConfig) -> set[str]:
    """What a kernel without descriptors needs to number its tile, and to read operands or the product."""
    completes = {f.indices for f in inside(spec, config)}
    # counters of columns and of the whole count tiles along m, and the first counters may be those of tiles
    counts_rows = completes & {"n", ""} or (completes and schedules.splits(config) > 1)
    batch = spec.signature.batched and spec.signature.grouped != "m"
    rows = {"tiles_m"} if batch or counts_rows or dict(config.values).get("group_m", 1) > 1 else set()
    if SCHEDULES[config.schedule].multiplies:
        return {"offs_m", "offs_n"} | rows
    return rows if spec.pointwise else {"in_tile"} | rows


def _loads(spec: KernelSpec, config: KernelConfig, inputs: Iterable[Input]) -> set[str]:
    offsets: set[str] = set()
    in_units, by_tma = mask_units(SCHEDULES[config.schedule], stored=False), schedules.tma_loaded(spec, config)
    for i in inputs:
        if i.packed:
            offsets |= in_units[_unit(spec, config, i.name)].offsets
        elif i.indices == "mn":
            offsets |= {"in_tile"} if i.name not in by_tma else set()
        elif i.indices:
            offsets.add({"m": "offs_row", "n": "offs_col"}[i.indices] if packs(spec) else f"offs_{i.indices}")
    return offsets


def _stores(spec: KernelSpec, config: KernelConfig) -> set[str]:
    offsets = {f"offs_{index}" for s in spec.vectors for index in s.indices}
    schedule = SCHEDULES[config.schedule]
    in_units, by_tma = mask_units(schedule, stored=True), schedules.tma_stored(spec, config)
    for s in spec.stores:
        if s.packed:
            unit = in_units[_unit(spec, config, s.name)]
            offsets |= unit.offsets | {f"columns_{unit.name}"}
        elif s.block > 1:
            offsets |= {"offs_m"} if schedule.dialect == "triton" else set()  # Gluon's layouts follow from use
        elif s.name not in by_tma:
            offsets.add("in_tile")
    return offsets


def _partials(spec: KernelSpec, config: KernelConfig) -> set[str]:
    offsets: set[str] = set()
    sums = "offs_sum" if SCHEDULES[config.schedule].architecture else "offs_n"  # which its registers' own way to add up columns leaves where they are stored
    for p in spec.partials:
        if emit.masked(p):
            offsets.add({"m": "offs_m", "n": "offs_n", "mn": "in_tile"}[p.axes])
        offsets |= {"m": {sums}, "n": {"offs_m"}, "mn": set[str]()}[p.axes]
    return offsets


def _unit(spec: KernelSpec, config: KernelConfig, mask: str) -> str:
    return "word" if mask in units(spec, config)["in_words"] else "byte"
