"""The search space: every schedule's dimensions with the bounds that a problem and a GPU set, so that no illegal point is proposed.

A point is suggested dimension by dimension, each bound following from those before it. `Suggest` is Optuna's `trial.suggest_int` in
a search, and an enumeration elsewhere: one walk serves both, so they cannot disagree. Powers of two are searched by exponent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from epigen.codegen import schedules
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.dtypes import FP8E4M3, FP32
from epigen.runtime.device import Target

Suggest = Callable[[str, int, int], int]
"""(name, low, high) -> a whole number in between, both ends included."""

SCHEDULE_NAMES = tuple(SCHEDULES)
_MOST_ACCUMULATORS = 128  # fp32 values a thread: with more, little is left of the 255 registers for the epilogue
_MOST_UNROLLED = 2048  # multiply-adds a thread that Triton unrolls where there is no tensor core: more compile for minutes


def point(suggest: Suggest, spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> KernelConfig:
    """One legal config, as `suggest` chooses."""
    schedule = SCHEDULE_NAMES[suggest("schedule", *_schedule_bounds(spec, target))]
    if schedule == "library":
        return _library(suggest, shape)
    return _tiled(suggest, spec, shape, target)


def _schedule_bounds(spec: KernelSpec, target: Target) -> tuple[int, int]:
    tiled, library = SCHEDULE_NAMES.index("tiled"), SCHEDULE_NAMES.index("library")
    if FP8E4M3 in (spec.signature.a, spec.signature.b) and not target.fp8:
        return library, library
    return min(tiled, library), max(tiled, library)


def _tiled(suggest: Suggest, spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> KernelConfig:
    m, n, k = shape
    element_bytes = spec.signature.a.bytes
    plain = spec.signature.a == FP32 and (spec.signature.precision == "ieee" or not target.tf32)
    most_warps = 16 if target.warp_size == 32 else 8

    def exponent(name: str, low: int, high: int) -> int:
        return 1 << suggest(f"tiled.{name}", _log2(low), _log2(max(low, high)))

    most_tile = _MOST_ACCUMULATORS * most_warps * target.warp_size
    least_k = 32 if element_bytes == 1 else 16
    room = target.shared_bytes // element_bytes
    if plain:
        most_tile = min(most_tile, 128 * 128)
    block_m = exponent("block_m", 16, min(256, _padded(m), room // least_k - 16))
    block_n = exponent("block_n", 16, min(256, _padded(n), most_tile // block_m, room // least_k - block_m))
    tile = block_m * block_n
    most_k = room // (block_m + block_n)
    if plain:
        most_k = min(most_k, max(16, _MOST_UNROLLED * most_warps * target.warp_size // tile))
    block_k = exponent("block_k", least_k, min(256, _padded(k), most_k))
    least_warps = max(1, tile // (_MOST_ACCUMULATORS * target.warp_size))
    if plain:
        least_warps = max(least_warps, -(-tile * block_k // (_MOST_UNROLLED * target.warp_size)))
    warps = exponent("num_warps", _up(least_warps), min(most_warps, max(4, tile // 1024)))
    stages = suggest("tiled.num_stages", 1, max(1, min(6, room // ((block_m + block_n) * block_k))))
    group_m = exponent("group_m", 1, min(16, -(-m // block_m)))
    return schedules.config("tiled", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, num_warps=warps, num_stages=stages)


def _library(suggest: Suggest, shape: tuple[int, int, int]) -> KernelConfig:
    m, n, _ = shape

    def exponent(name: str, low: int, high: int) -> int:
        return 1 << suggest(f"library.{name}", _log2(low), _log2(max(low, high)))

    block_m = exponent("block_m", 1, min(128, _padded(m, 1)))
    block_n = exponent("block_n", 16, min(1024, _padded(n), (1 << 14) // block_m))
    # 4 to 64 values a thread
    warps = exponent("num_warps", _up(-(-block_m * block_n // 2048)), min(16, max(1, block_m * block_n // 128)))
    return schedules.config("library", block_m=block_m, block_n=block_n, num_warps=warps)


def every(spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> Iterator[KernelConfig]:
    """All legal configs of a problem, in a fixed order."""
    path: list[tuple[int, int]] = []  # each choice made on the way to the current point, and its upper bound
    while True:
        depth = 0

        def walk(_name: str, low: int, high: int) -> int:
            nonlocal depth
            if depth == len(path):
                path.append((low, high))
            value = path[depth][0]
            depth += 1
            return value

        yield point(walk, spec, shape, target)
        while path and path[-1][0] >= path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1] = (path[-1][0] + 1, path[-1][1])


def legal(config: KernelConfig, spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> bool:
    """Whether a config, borrowed from another problem say, is a point of this one's space."""
    return _at(parameters(config), spec, shape, target) == config


def around(config: KernelConfig, spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> list[KernelConfig]:
    """The legal configs that differ from a legal one by one step of one dimension."""
    values = parameters(config)
    steps = [values | {name: values[name] + step} for name in values if name != "schedule" for step in (-1, 1)]
    return [found for found in (_at(s, spec, shape, target) for s in steps) if found is not None]


def _at(values: Mapping[str, int], spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> KernelConfig | None:
    """The config of these parameters; None where one is out of its bounds."""
    inside = True

    def walk(name: str, low: int, high: int) -> int:
        nonlocal inside
        value = values.get(name, low)
        inside &= low <= value <= high
        return min(max(value, low), high)

    found = point(walk, spec, shape, target)
    return found if inside else None


def parameters(config: KernelConfig) -> dict[str, int]:
    """A config as the names and numbers that `point` would have suggested."""
    found = {"schedule": SCHEDULE_NAMES.index(config.schedule)}
    for name, value in config.values:
        found[f"{config.schedule}.{name}"] = value if name == "num_stages" else _log2(value)
    return found


def _log2(value: int) -> int:
    return max(0, value.bit_length() - 1)


def _up(value: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, value - 1).bit_length()


def _padded(extent: int, least: int = 16) -> int:
    return max(least, _up(extent))
