"""What the warps of a specialized kernel are given: the producer's and the consumers' parameters, what each is passed, and the buffers between them.

Requires the main kernel's arguments: operands by their descriptors, then the epilogue's. Names and extents are text, which the templates print.
"""

from __future__ import annotations

from dataclasses import dataclass

from epigen.codegen import schedules
from epigen.codegen.functions import PTX, Function
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Input, KernelConfig, KernelSpec
from epigen.ir.graph import GROUPS


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

    groups: consumer warpgroups. users: of them, those that use up each buffer of the ring. registers: of a consumer's thread. scales: what a
    step's weights share. factors: what the sums of a step of fp8 are multiplied by.
    right: names of the products' right operands.
    in_turn: whether TMA brings the inputs of AT_ONCE subtiles while the tile is multiplied, and each other one's once the subtile AT_ONCE before it has left its buffers.
    """

    producer: Partition
    consumer: Partition
    buffers: tuple[Buffers, ...]
    barriers: tuple[Barriers, ...]
    groups: int
    users: int
    registers: int
    scales: tuple[Input, ...]
    factors: tuple[Input, ...]
    right: tuple[str, ...]
    in_turn: bool


def partitions(spec: KernelSpec, config: KernelConfig, main: Function) -> Partitions:
    scales = schedules.scales(spec, config)
    with_descriptors = tuple(f"{i.name}_desc" for i in scales)
    names, constants = [a.of or a.name for a in main.arguments if a.name not in with_descriptors], tuple(name for name, _ in main.constants)
    groups = schedules.consumers(config)
    right, multiplied = spec.multiplied[1:], len(spec.multiplied)
    in_turn = [*right, *(i.name for i in scales)]
    ring = ("a_bufs", *(f"{name}_bufs" for name in in_turn), "full_bars", "empty_bars")  # what the producer fills and the consumers empty, in turn
    loaded = (
        *names[:multiplied],
        *with_descriptors,
        *ring,
        "M",
        "N",
        "K",
        *(["num_products"] if spec.signature.batched else []),
        *[f"{GROUPS}_ptr"] * bool(spec.signature.grouped),
    )
    order = ("order_bars",) if dict(config.values).get("pingpong") else ()
    shared = (*ring, *order, *names[multiplied:])
    factors = tuple(i for operand in spec.operands for i in operand.along_k) if SCHEDULES[config.schedule].scales else ()
    consumer = Partition(
        (*shared, *_own(spec, config, 0)),
        ("WARPGROUP", *constants, *[PTX] * main.ptx),
        tuple((*shared, *_own(spec, config, group).values(), str(group), *constants, *[PTX] * main.ptx) for group in range(groups)),
    )
    barriers = [Barriers(name, groups) for name in order]
    if schedules.tma_loaded(spec, config):
        barriers.append(Barriers("in_bars", groups * schedules.AT_ONCE, "buffer_id") if _in_turn(spec, config) else Barriers("in_bars", groups))
    producer = Partition(loaded, constants, ((*loaded, *constants),))
    users = schedules.sharing(config)
    return Partitions(
        producer, consumer, _buffers(spec, config), tuple(barriers), groups, users, schedules.CONSUMER_REGISTERS[groups], scales, factors, right, _in_turn(spec, config)
    )  # fmt: skip


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
    return bool(schedules.tma_loaded(spec, config)) and schedules.subtiles(config) > schedules.AT_ONCE


def _through_buffers(spec: KernelSpec, config: KernelConfig) -> tuple[str, ...]:
    """The outputs that TMA stores, and the inputs that it loads through no output's buffer."""
    return (*schedules.tma_stored(spec, config), *schedules.in_own_buffers(spec, schedules.tma_loaded(spec, config)))


def _of_subtiles(spec: KernelSpec, config: KernelConfig, name: str) -> bool:
    """Whether each buffer of a group is of another subtile: where inputs are loaded into them."""
    return schedules.subtiles(config) > 1 and name in schedules.tma_loaded(spec, config).values()


def _buffers(spec: KernelSpec, config: KernelConfig) -> tuple[Buffers, ...]:
    down, across = schedules.tile_parts(config)
    rows, columns = (name if count == 1 else f"{name} // {count}" for name, count in (("BLOCK_M", down), ("BLOCK_N", across)))
    a, b = (rows, "BLOCK_K"), ("BLOCK_K // 2" if spec.signature.packed else "BLOCK_K", "BLOCK_N")
    layout, of_operands, of_tiles = spec.signature.layout, *(("1",) * schedules.leading(spec.signature, along) for along in "km")
    buffers = [
        Buffers("a_bufs", "a", ("STAGES" if down == 1 else f"{down} * STAGES", *of_operands, *(a[::-1] if layout[0] == "t" else a))),
        *(Buffers(f"{name}_bufs", name, ("STAGES", *of_operands, *(b[::-1] if layout[1] == "t" else b))) for name in spec.multiplied[1:]),
        *(Buffers(f"{i.name}_bufs", i.name, ("STAGES", "1", "BLOCK_N")) for i in schedules.scales(spec, config)),
    ]
    for name in _through_buffers(spec, config):
        count = schedules.consumers(config) * (schedules.AT_ONCE if _of_subtiles(spec, config, name) else 1)
        buffers.append(Buffers(f"{name}_bufs", name, (str(count), *of_tiles, rows, columns)))
    return tuple(buffers)
