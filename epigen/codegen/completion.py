"""How a main kernel completes reductions itself: the block that is the last to leave a part of what one is taken over goes on with all of them.

The parts are counted in memory, in counters that `functions.arrivals` lists. Names and numbers here are text, which the templates print.
"""

from __future__ import annotations

from dataclasses import dataclass

from epigen.codegen import schedules
from epigen.codegen.functions import arrivals, counts, inside
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Finish, KernelConfig, KernelSpec
from epigen.codegen.tile import part_of_tile


@dataclass(frozen=True, slots=True)
class Completion:
    """The reductions with the same remaining indices. counter: where a part's arrival is counted. count: how many parts there are.

    number, width: of the tile's part, along the remaining index, its number and its extent; "" and "1" where none remains. step: how many partial results
    of each a block holds at a time. layout, threads, order: of [step, width] in Gluon.
    """

    finish: Finish
    counter: str
    count: str
    number: str
    width: str
    step: int
    layout: str
    threads: tuple[list[int], list[int]]
    order: list[int]


def completions(spec: KernelSpec, config: KernelConfig) -> list[Completion]:
    part = part_of_tile(config)
    counters, parts = counts(config), {"n": part.down, "m": part.across, "": f"{part.down} * {part.across}"}
    of_part = {"n": (part.n, part.columns), "m": (part.m, part.rows), "": ("", "1")}
    finishes, order = inside(spec, config), arrivals(spec, config)
    planned = []
    for i, finish in enumerate(finishes, start=len(order) - len(finishes)):
        number, width = of_part[finish.indices]
        counter = " + ".join(("num_arrived_ptr", *(counters[name] for name in order[:i]), *filter(None, [number])))
        threads, step = finishing_threads(finish.indices, config), finishing_step(finish, config)
        layout, across = f"FINISH_{finish.indices.upper() or 'ALL'}", [1, 0] if finish.indices else [0, 1]
        planned.append(Completion(finish, counter, parts[finish.indices], number, width, step, layout, threads, across))
    return planned


def finishing_step(finish: Finish, config: KernelConfig) -> int:
    """How many partial results of each of a tile's rows or columns a block holds at a time: 32 values a thread, and 16 on Hopper, where the other
    half of a tile may wait in registers."""
    values = (16 if SCHEDULES[config.schedule].architecture == "hopper" else 32) * 32 * schedules.warps(config)
    return max(1, min(128, values // _width(finish.indices, config))) if finish.indices else values // 4


def finishing_threads(indices: str, config: KernelConfig) -> tuple[list[int], list[int]]:
    """How the threads of a warp, and the warps, lie over such a [step, width]: across it first, and what is left over down, so that no value
    is held twice."""
    width = _width(indices, config)
    threads, warps = min(32, width), schedules.warps(config)
    across = min(warps, max(1, width // 32))
    return [32 // threads, threads], [warps // across, across]


def _width(indices: str, config: KernelConfig) -> int:
    """How many rows ("m") or columns ("n") a part of a tile has; 1 where both are reduced."""
    if not indices:
        return 1
    return config[f"block_{indices}"] // schedules.tile_parts(config)["mn".index(indices)]
