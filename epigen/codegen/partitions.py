"""What the warps of a specialized kernel are given: the producer's and the consumers' parameters, what each is passed, and the buffers between them.

Requires the main kernel's arguments: operands by their descriptors, then the epilogue's. Names and extents are text, which the templates print.
"""

from __future__ import annotations

from dataclasses import dataclass

from epigen.codegen import schedules
from epigen.codegen.functions import Function
from epigen.codegen.spec import KernelConfig, KernelSpec

GROUPS = 2
"""Consumer warpgroups of a kernel."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A function that some of the warps run. constants: its compile-time parameters, which come last. arguments: what each group of warps that runs it
    is passed, in the order of the parameters."""

    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Tiles in shared memory, which TMA fills or empties. tensor: whose descriptor has their dtype and layout. extents: how many there are, and the
    extents of what TMA moves at a time."""

    name: str
    tensor: str
    extents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Barriers:
    """Of which each consumer has as many of its own. each: what a number of one is called."""

    name: str
    count: int
    each: str = "group_id"


@dataclass(frozen=True, slots=True)
class Partitions:
    """Of a kernel. buffers: in shared memory, between its partitions and memory. barriers: beside those of the ring of operands.

    right: names of the products' right operands.
    in_turn: whether TMA brings the inputs of AT_ONCE subtiles while the tile is multiplied, and each other one's once the subtile AT_ONCE before it has left its buffers.
    """

    producer: Partition
    consumer: Partition
    buffers: tuple[Buffers, ...]
    barriers: tuple[Barriers, ...]
    right: tuple[str, ...]
    in_turn: bool


def partitions(spec: KernelSpec, config: KernelConfig, main: Function) -> Partitions:
    names, constants = [a.of or a.name for a in main.arguments], tuple(name for name, _ in main.constants)
    right, multiplied = spec.multiplied[1:], len(spec.multiplied)
    ring = ("a_bufs", *(f"{name}_bufs" for name in right), "full_bars", "empty_bars")  # what the producer fills and the consumers empty, in turn
    loaded = (*names[:multiplied], *ring, "M", "N", "K", *(["num_products"] if spec.signature.batched else []))
    order = ("order_bars",) if config["pingpong"] else ()
    shared = (*ring, *order, *names[multiplied:])
    consumer = Partition(
        (*shared, *_own(spec, config, 0)),
        ("WARPGROUP", *constants),
        tuple((*shared, *_own(spec, config, group).values(), str(group), *constants) for group in range(GROUPS)),
    )
    barriers = [Barriers(name, GROUPS) for name in order]
    if schedules.tma_loaded(spec, config):
        barriers.append(Barriers("in_bars", GROUPS * schedules.AT_ONCE, "buffer_id") if _in_turn(spec, config) else Barriers("in_bars", GROUPS))
    return Partitions(Partition(loaded, constants, ((*loaded, *constants),)), consumer, _buffers(spec, config), tuple(barriers), right, _in_turn(spec, config))


def _own(spec: KernelSpec, config: KernelConfig, group: int) -> dict[str, str]:
    """What a consumer has of its own, by the parameter's name: what outputs and inputs go through, and what the inputs arrive at that TMA loads there."""
    own = {}
    for name in _through_buffers(spec, config):
        if _of_subtiles(spec, config, name):
            own[f"{name}_bufs"] = f"{name}_bufs"
        else:
            own[f"{name}_buf"] = f"{name}_bufs.index({group})"
    if _in_turn(spec, config):
        return own | {"in_bars": "in_bars"}
    return own | ({"in_bar": f"in_bars.index({group})"} if schedules.tma_loaded(spec, config) else {})


def _in_turn(spec: KernelSpec, config: KernelConfig) -> bool:
    return bool(schedules.tma_loaded(spec, config)) and schedules.tile_parts(config)[1] > schedules.AT_ONCE


def _through_buffers(spec: KernelSpec, config: KernelConfig) -> tuple[str, ...]:
    """The outputs that TMA stores, and the inputs that it loads through no output's buffer."""
    return (*schedules.tma_stored(spec, config), *schedules.in_own_buffers(spec, schedules.tma_loaded(spec, config)))


def _of_subtiles(spec: KernelSpec, config: KernelConfig, name: str) -> bool:
    """Whether each buffer of a group is of another subtile: where inputs are loaded into them."""
    return schedules.tile_parts(config)[1] > 1 and name in schedules.tma_loaded(spec, config).values()


def _buffers(spec: KernelSpec, config: KernelConfig) -> tuple[Buffers, ...]:
    down, across = schedules.tile_parts(config)
    rows, columns = (name if count == 1 else f"{name} // {count}" for name, count in (("BLOCK_M", down), ("BLOCK_N", across)))
    a, b = (rows, "BLOCK_K"), ("BLOCK_K", "BLOCK_N")
    layout, one = spec.signature.layout, ("1",) if spec.signature.batched else ()
    buffers = [
        Buffers("a_bufs", "a", ("STAGES" if down == 1 else f"{down} * STAGES", *one, *(a[::-1] if layout[0] == "t" else a))),
        *(Buffers(f"{name}_bufs", name, ("STAGES", *one, *(b[::-1] if layout[1] == "t" else b))) for name in spec.multiplied[1:]),
    ]
    for name in _through_buffers(spec, config):
        count = GROUPS * schedules.AT_ONCE if _of_subtiles(spec, config, name) else GROUPS
        buffers.append(Buffers(f"{name}_bufs", name, (str(count), *one, rows, columns)))
    return tuple(buffers)
