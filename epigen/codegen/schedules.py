"""The schedules: each a template, its dimensions with their legal values, and its own limits, declared here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epigen.codegen.spec import Finish, Input, KernelConfig, KernelSpec, Signature, Store
from epigen.dtypes import DType
from epigen.errors import ConfigError, near_miss, shown, unknown


@dataclass(frozen=True, slots=True)
class Schedule:
    """template: file name under `templates`. dimensions: each with its legal values. multiplies: the template holds the main loop
    (else the product comes from the vendor's library). descriptors: a and b are addressed by TMA descriptors. persistent: one program a
    multiprocessor, which takes one tile after the other. capabilities: of NVIDIA GPUs, such as 90; None: every GPU of every make. dialect: the
    language of the main kernel, "triton" or "gluon". architecture: whose warpgroups and registers it is written for, "hopper", a folder of `templates`;
    "": no one's, for Triton's compiler lays them out. operand_bytes: of the operands' elements that the main loop is written for. computes: whether that
    loop can multiply what is computed of operands as they are loaded.  converts: whether it is written for a weight of fewer bits alone, which it converts
    in registers: b is the tensor cores' left operand, so that a tile's product lies transposed there.  scales: whether
    it multiplies the sums of a step of fp8 by what all of the step's products share.  carries: whether the loop over k takes reductions of operands along.  groups: the indices, "m" or "mk", along which the products of a launch may be groups.
    """

    name: str
    template: str
    dimensions: Mapping[str, tuple[int, ...]]
    multiplies: bool
    descriptors: bool = False
    persistent: bool = False
    capabilities: range | None = None
    dialect: str = "triton"
    architecture: str = ""
    operand_bytes: tuple[int, ...] = (1, 2, 4)
    computes: bool = False
    converts: bool = False
    scales: bool = False
    carries: bool = False
    groups: str = ""

    def runs_on(self, backend: str, arch: int | str) -> bool:
        """Whether GPUs of this kind have what it takes. backend: "cuda" or "hip"."""
        return self.capabilities is None or (backend == "cuda" and arch in self.capabilities)


TILED = Schedule(
    "tiled",
    "tiled.py.j2",
    {
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (16, 32, 64, 128, 256),
        "block_k": (16, 32, 64, 128, 256),
        "group_m": (1, 2, 4, 8, 16),
        "num_warps": (1, 2, 4, 8, 16),
        "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
        "fused_finalize": (0, 1),
        "prefetch": (0, 1),
    },
    multiplies=True,
    computes=True,
    carries=True,
    groups="mk",
)

LIBRARY = Schedule(
    "library",
    "library.py.j2",
    {
        "block_m": (1, 2, 4, 8, 16, 32, 64, 128),
        "block_n": (16, 32, 64, 128, 256, 512, 1024),
        "num_warps": (1, 2, 4, 8, 16),
        "fused_finalize": (0, 1),
    },
    multiplies=False,
)

SPLIT_K = Schedule(
    "split_k",
    "split_k.py.j2",
    {**TILED.dimensions, "splits": (2, 4, 8, 16, 32)},
    multiplies=True,
    computes=True,
)

PERSISTENT = Schedule(
    "persistent",
    "persistent.py.j2",
    {
        "block_m": (64, 128, 256),
        "block_n": (16, 32, 64, 128, 256),
        "block_k": (16, 32, 64, 128, 256),
        "group_m": (1, 2, 4, 8, 16),
        "flatten": (0, 1),
        "subtiles": (1, 2),
        "tma_store": (0, 1),
        "num_warps": (4, 8, 16),
        "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
        "fused_finalize": (0, 1),
        "prefetch": (0, 1),
    },
    multiplies=True,
    descriptors=True,
    persistent=True,
    capabilities=range(90, 1000),
    carries=True,
)

WARP_SPECIALIZED = Schedule(
    "warp_specialized",
    "hopper/warp_specialized.py.j2",
    {
        "block_m": (64, 128, 256),
        "block_n": (16, 32, 64, 128, 256),
        "block_k": (16, 32, 64, 128),
        "group_m": (1, 2, 4, 8, 16),
        "pingpong": (0, 1),
        "subtiles": (1, 2, 4),
        "prefetch": (0, 1),
        "tma_store": (0, 1),
        "tma_load": (0, 1),
        "num_stages": (2, 3, 4, 5, 6, 7, 8),  # a buffer is handed back a step after its own: the only one would never be filled again
        "fused_finalize": (0, 1),
        "splits": tuple(range(1, 17)),
    },
    multiplies=True,
    descriptors=True,
    persistent=True,
    capabilities=range(90, 91),
    dialect="gluon",
    architecture="hopper",
    operand_bytes=(1, 2),
    scales=True,
    groups="mk",
)

GROUP_COLUMNS = 64
"""Columns of a tile that a warpgroup of the schedule mixed_input has: rows of the left operand of one instruction."""

MIXED_INPUT = Schedule(
    "mixed_input",
    "hopper/warp_specialized.py.j2",
    {
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (128, 256),
        "block_k": (32, 64, 128),
        "group_m": (1, 2, 4, 8, 16),
        "tma_store": (0, 1),
        "num_stages": (2, 3, 4, 5, 6, 7, 8),
        "splits": tuple(range(1, 17)),
    },
    multiplies=True,
    descriptors=True,
    persistent=True,
    capabilities=range(90, 91),
    dialect="gluon",
    architecture="hopper",
    operand_bytes=(2,),
    computes=True,
    converts=True,
)

SCHEDULES = {s.name: s for s in (LIBRARY, TILED, SPLIT_K, PERSISTENT, WARP_SPECIALIZED, MIXED_INPUT)}

_IN_TEXT = {"prefetch", "flatten", "subtiles", "fused_finalize", "pingpong", "tma_load", "tma_store", "num_warps", "num_stages"}
"""Dimensions that decide what the template writes, or how it is launched; the others are the kernel's compile-time arguments."""

_OF_ONE = {("group_m", 1), ("splits", 1)}
"""Values with which the text says less, and needs no number."""

_UNLESS_GIVEN = {"prefetch": 0, "fused_finalize": 0, "splits": 1, "tma_load": 0}
"""Of dimensions that a config may leave out where the value is legal, as those do that are older than the dimension."""


RENAMED = {"early": "prefetch", "halves": "subtiles", "one_launch": "fused_finalize"}
"""Dimensions by the names that they had up to schema 2 of the database."""


def constants(config: KernelConfig) -> tuple[tuple[str, int], ...]:
    """A kernel's compile-time arguments."""
    arguments = tuple((name.upper(), value) for name, value in config.values if name not in _IN_TEXT and (name, value) not in _OF_ONE)
    # Gluon's compiler makes no stages of its own
    return (*arguments, ("STAGES", config["num_stages"])) if SCHEDULES[config.schedule].dialect == "gluon" else arguments


def warps(config: KernelConfig) -> int:
    """Warps that the kernel is launched with. Gluon adds those of the other groups by itself."""
    return dict(config.values).get("num_warps", 4)


def padded(spec: KernelSpec, config: KernelConfig) -> tuple[str, ...]:
    """The operands that are copied into aligned rows first, so that TMA can address them."""
    return tuple(name for name in spec.multiplied if name not in spec.signature.tma) if SCHEDULES[config.schedule].descriptors else ()


RAGGED_LEADING = 2
"""Dimensions in front of rows and columns that a ragged descriptor has."""


def leading(signature: Signature, along: str) -> int:
    """Dimensions in front of rows and columns that a tensor is moved in by TMA: one where it has a place for each product of a batch, and two where it has all groups'
    rows, or all groups' k. along: what the kernel ends it by where groups are along that, "k" of operands and "m" of the epilogue's tiles.

    The rows of `a` in groups of rows end nowhere: what is multiplied of the next group's is not stored.
    """
    return RAGGED_LEADING if signature.grouped == along else int(signature.batched)


def tma_stored(spec: KernelSpec, config: KernelConfig) -> tuple[str, ...]:
    """The outputs that leave by their descriptors."""
    return tuple(s.name for s in tma_storable(spec)) if dict(config.values).get("tma_store") else ()


def tma_loaded(spec: KernelSpec, config: KernelConfig) -> Mapping[str, str]:
    """The inputs that TMA brings while a tile is multiplied, each with whose buffer it comes through: an output's, or its own."""
    values = dict(config.values)
    return tma_loadable(spec, bool(values.get("tma_store"))) if values.get("tma_load") else {}


def tma_loadable(spec: KernelSpec, through_outputs: bool = True) -> Mapping[str, str]:
    """As `tma_loaded`, of a config that has TMA load all that it can. through_outputs: whether an output of the same dtype lends its buffer, each to one input."""
    free: dict[DType, list[str]] = {}
    for store in reversed(tma_storable(spec) if through_outputs else ()):
        free.setdefault(store.dtype, []).append(store.name)
    loadable, tma = {}, set(spec.signature.tma)
    for item in spec.inputs:
        if item.indices == "mn" and not item.packed and item.name in tma and item.dtype is not None:
            if free.get(item.dtype):
                loadable[item.name] = free[item.dtype].pop()
            elif item.dtype.kind == "float":
                loadable[item.name] = item.name
    return loadable


def scales(spec: KernelSpec, config: KernelConfig) -> tuple[Input, ...]:
    """The inputs that TMA brings beside the weights of a step, which has a row of each."""
    return spec.operands[1].along_k if SCHEDULES[config.schedule].converts else ()


AT_ONCE = 2
"""Subtiles whose inputs TMA brings while their tile is multiplied. Of a tile in four the others come as buffers become free: all at once hold up the operands,
which have the same way from L2. On an H100 `mm + residual` at 8192x8192x1024 took 204 us in turn, and 217 at once with one stage less (torch.mm 196; Triton 3.6,
2026-11)."""


def in_own_buffers(spec: KernelSpec, loaded: Mapping[str, str]) -> dict[str, DType]:
    """The inputs that TMA brings into buffers of their own, with their dtypes. loaded: as of `tma_loaded`."""
    return {i.name: i.dtype for i in spec.inputs if i.dtype is not None and loaded.get(i.name) == i.name}


def prefetched(spec: KernelSpec, config: KernelConfig) -> tuple[Input, ...]:
    """The inputs that are loaded before their tile is multiplied, and held."""
    values, from_tma = dict(config.values), tma_loaded(spec, config)
    holds = SCHEDULES[config.schedule].dialect == "triton" or holds_inputs(spec, subtiles(config), splits(config))
    return tuple(i for i in spec.loaded if i.name not in from_tma) if values.get("prefetch") and holds else ()


def holds_inputs(spec: KernelSpec, subtiles: int, splits: int) -> bool:
    """Whether inputs can be held in Gluon, beside a product of which each half, and each of so many parts along k, is taken by itself.

    Where the last of several parts goes on, that is a condition, behind which a name keeps its layout; in halves, and where outputs do not
    depend on the product, names that are held would get another.
    """
    return splits == 1 or (subtiles == 1 and not spec.apart)


def tma_storable(spec: KernelSpec) -> list[Store]:
    """The outputs that can leave by a descriptor."""
    tma = set(spec.signature.tma)
    return [s for s in spec.stores if s.name in tma and s.tile]


def in_triton(config: KernelConfig) -> KernelConfig:
    """The config itself, or the nearest in Triton's own language, which its interpreter can run."""
    if SCHEDULES[config.schedule].dialect == "triton":
        return config
    if SCHEDULES[config.schedule].converts:
        same = {name: value for name, value in config.values if name in TILED.dimensions}
        return _config(TILED, same | {"block_n": 128, "num_warps": 8, "fused_finalize": 0, "prefetch": 0})
    same = {name: value for name, value in config.values if name in PERSISTENT.dimensions}
    same["subtiles"] = min(same["subtiles"], max(PERSISTENT.dimensions["subtiles"]))
    return _config(PERSISTENT, same | {"flatten": int(not same["fused_finalize"] and not same["prefetch"]), "num_warps": 8})


def tile_parts(config: KernelConfig) -> tuple[int, int]:
    """In how many parts, along m and n, the epilogue takes a tile: each leaves its own partial results."""
    if SCHEDULES[config.schedule].converts:
        return 1, sharing(config)
    values = dict(config.values)
    return 1 if values.get("pingpong", 1) else 2, values.get("subtiles", 1)


def subtiles(config: KernelConfig) -> int:
    """Parts along n of a tile that the same warps take, one after the other."""
    return dict(config.values).get("subtiles", 1)


def sharing(config: KernelConfig) -> int:
    """Warpgroups that share a tile, each with a part of its rows, or of its columns, along all of k: in ping-pong one, cooperative two."""
    if SCHEDULES[config.schedule].converts:
        return config["block_n"] // GROUP_COLUMNS
    return 1 if dict(config.values).get("pingpong", 1) else 2


_LEAST_CONSUMERS = 2
CONSUMER_REGISTERS = {2: 240, 4: 112}
"""Of a thread of theirs, by how many consumer warpgroups there are: of 64K a producer's threads leave them so many."""


def consumers(config: KernelConfig) -> int:
    """Consumer warpgroups of a kernel whose warps are specialized: those that share a tile, or in ping-pong two with one each."""
    return max(_LEAST_CONSUMERS, sharing(config))


def multiplying_warps(config: KernelConfig) -> int:
    """Warps that multiply one tile."""
    return dict(config.values).get("num_warps") or 4 * sharing(config)


def finished_inside(finish: Finish, config: KernelConfig) -> bool:
    """Whether the last block to leave partial results completes these reductions; else a kernel of their own does, after all blocks.

    What an operand's k is reduced over, no block has parts of.
    """
    return bool(dict(config.values).get("fused_finalize")) and not any(s.operand for s in finish.sources)


def several_launches(config: KernelConfig) -> KernelConfig:
    """The same, but that all reductions are completed by kernels of their own."""
    return config.with_value("fused_finalize", 0)


def programs(config: KernelConfig, tiles: int, multiprocessors: int) -> int:
    """How many programs the main kernel is launched with."""
    items = tiles * splits(config)
    return min(items, multiprocessors) if SCHEDULES[config.schedule].persistent else items


def splits(config: KernelConfig) -> int:
    """In how many parts of k, each summed for itself, the main kernel takes a tile."""
    return dict(config.values).get("splits", 1)


def accepted(given: object) -> KernelConfig:
    """A config as somebody gives it: a mapping, or a KernelConfig, made by whomever. Raises ConfigError for what is neither, and as `config` does."""
    if isinstance(given, Mapping):
        return from_mapping(given)
    if not isinstance(given, KernelConfig):
        raise ConfigError(f"a config is a mapping or a KernelConfig, and a {type(given).__name__} was given")
    try:
        return config(given.schedule, **dict(given.values))
    except (TypeError, ValueError):
        raise ConfigError(f"{shown(given.values)} are no values of a config: build it with schedules.config, or give a mapping") from None


def from_mapping(given: Mapping[Any, object]) -> KernelConfig:
    """A checked config from {"schedule": …, "block_m": …}; the schedule is tiled by default. A dimension may have its older name."""
    values = {RENAMED.get(name, name) if isinstance(name, str) else shown(name): value for name, value in given.items()}
    schedule = values.pop("schedule", TILED.name)
    if not isinstance(schedule, str):
        raise ConfigError(unknown("schedule", schedule, SCHEDULES))
    return config(schedule, **values)


def config(schedule: str, **values: object) -> KernelConfig:
    """A checked config. Raises ConfigError for an unknown schedule or dimension, a missing dimension, or a value out of range."""
    if schedule not in SCHEDULES:
        raise ConfigError(unknown("schedule", schedule, SCHEDULES))
    dimensions = SCHEDULES[schedule].dimensions
    checked: dict[str, int] = {name: value for name, value in _UNLESS_GIVEN.items() if value in dimensions.get(name, ())}
    for name, value in values.items():
        if name not in dimensions:
            raise ConfigError(f"the schedule {schedule} has no dimension '{name}': {near_miss(name, dimensions) or 'it has ' + ', '.join(dimensions)}")
        if type(value) is not int or value not in dimensions[name]:
            raise ConfigError(f"{name}={shown(value)} is not one of {', '.join(map(str, dimensions[name]))}")
        checked[name] = value
    if missing := [d for d in dimensions if d not in checked]:
        raise ConfigError(f"the schedule {schedule} also needs {', '.join(missing)}")
    if checked.get("flatten") and checked["fused_finalize"]:
        raise ConfigError(
            "flatten=1 and fused_finalize=1 exclude each other: Triton makes one loop of a tile's and the one over k, and finalizing takes a third"
        )
    if checked.get("flatten") and checked["prefetch"]:
        raise ConfigError("flatten=1 and prefetch=1 exclude each other: in the loop that Triton makes of two, inputs would be waited for before the product")
    return _config(SCHEDULES[schedule], checked)


def _config(schedule: Schedule, values: Mapping[str, int]) -> KernelConfig:
    return KernelConfig(schedule.name, tuple((d, values[d]) for d in schedule.dimensions))
