"""Runs generated Gluon modules on the CPU, and is out for what only a GPU's timing would show: see `gluon_turns` and `gluon_hopper`.

Stores to global memory are seen by others once the partition that made them is past a barrier or ends.

Not modelled: the warps of one partition, which are one here; layouts, but for whether those that are written out give each element an owner;
registers. Neither Triton nor a GPU is needed, so one executor serves both ends of the range of Triton's versions.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from gluon_hopper import HOPPER, after_the_kernel_before, allocate_shared_memory
from gluon_turns import Machine, Program, here, turn
from gluon_values import FUNCTIONS, LIBDEVICE, UNKNOWN, Block, Int, Pointer, arange, demand, full

# -- global memory


def gdc_wait() -> None:
    here().program.waited = True


def load(pointer: Pointer, mask: Block | bool | None = None, other: float | None = None, cache_modifier: str = "") -> Block:  # noqa: ARG001
    after_the_kernel_before()
    memory, at, inside = pointer.cells(mask)
    found = memory.take(at)
    if mask is not None:
        rest = UNKNOWN if other is None else torch.tensor(other, dtype=pointer.dtype).view(found.dtype)
        found = torch.where(inside, found, rest)
    return Block(found.view(pointer.dtype))


def store(pointer: Pointer, value: Block | float, mask: Block | bool | None = None) -> None:
    after_the_kernel_before()
    memory, at, inside = pointer.cells(mask)
    data = value.data if isinstance(value, Block) else torch.tensor(value)
    demand(data.dim() in (0, at.dim()), f"a block of shape {list(data.shape)} is stored at {list(at.shape)}")
    bits = data.to(pointer.dtype).view(memory.dtype).broadcast_to(at.shape)[inside]
    at = at[inside]
    here().unseen.append(lambda: memory.index_put_((at,), bits))


def atomic_add(pointer: Pointer, value: Block | int, mask: Block | bool | None = None, sem: str = "acq_rel") -> Block:  # noqa: ARG001
    """What was there before. The partition's own stores are not shown to others by it: each of its warps may be behind."""
    turn()
    after_the_kernel_before()
    memory, at, inside = pointer.cells(mask)
    before = memory.view(pointer.dtype).take(at)
    data = value.data if isinstance(value, Block) else torch.tensor(value)
    memory.view(pointer.dtype).index_put_((at[inside],), data.to(pointer.dtype).broadcast_to(at.shape)[inside], accumulate=True)
    return Block(before)


def barrier() -> None:
    turn().show()


# -- layouts that are written out


@dataclass(frozen=True)
class Linear:
    """By bases: for each bit of a register's, a thread's, a warp's and a block's number, what it adds to the coordinates."""

    registers: Sequence[Sequence[int]]
    threads: Sequence[Sequence[int]]
    warps: Sequence[Sequence[int]]
    blocks: Sequence[Sequence[int]]
    shape: Sequence[int]

    def check(self, shape: Sequence[int], warps: int) -> None:
        """Raises Fault unless each element of a block of this shape has an owner."""
        demand(list(shape) == list(self.shape), f"a layout of {list(self.shape)} for a block of {list(shape)}")
        demand(len(self.threads) == 5 and 1 << len(self.warps) == warps, f"a layout of {1 << len(self.threads)} threads in {1 << len(self.warps)} warps")
        reached: set[int] = {0}
        for basis in (*self.registers, *self.threads, *self.warps, *self.blocks):
            demand(all(0 <= i < size for i, size in zip(basis, shape, strict=True)), f"{basis} lies outside {list(shape)}")
            step = 0
            for i, size in zip(basis, shape, strict=True):
                step = step * size + i
            if step not in reached:
                reached |= {step ^ other for other in reached}
        demand(len(reached) == math.prod(shape), f"a layout of {list(shape)} leaves out all but {len(reached)} elements")


@dataclass(frozen=True)
class Blocked:
    elements: Sequence[int]
    threads: Sequence[int]
    warps: Sequence[int]
    order: Sequence[int]

    def check(self, shape: Sequence[int], warps: int) -> None:
        demand(len(self.elements) == len(shape) and sorted(self.order) == list(range(len(shape))), f"a layout of {len(self.elements)} axes for {list(shape)}")
        demand(math.prod(self.threads) == 32 and math.prod(self.warps) == warps, f"a layout of {self.threads} threads in {self.warps} warps")


@dataclass(frozen=True)
class Multiplied:
    """How the tensor cores leave a product."""

    version: Sequence[int]
    warps_per_cta: Sequence[int]
    instr_shape: Sequence[int]

    def check(self, shape: Sequence[int], warps: int) -> None:
        demand(
            math.prod(self.warps_per_cta) == warps and self.instr_shape[1] <= 256 and (shape[1] == 1 or shape[1] % self.instr_shape[1] == 0),
            f"a product of {list(shape)} in {self.instr_shape} on {self.warps_per_cta}",
        )


@dataclass(frozen=True)
class Operand:
    """How threads have the left operand of a multiplication in registers, `k_width` neighbours along k together."""

    operand_index: int
    parent: Multiplied
    k_width: int

    def check(self, shape: Sequence[int], warps: int) -> None:
        demand(self.operand_index == 0 and warps == 4 and shape[0] % 64 == 0 and shape[1] % (8 * self.k_width) == 0, f"{list(shape)} as a left operand")


@dataclass(frozen=True)
class Slice:
    """The layout that one axis of another leaves."""

    dim: int
    parent: Any

    def check(self, shape: Sequence[int], warps: int) -> None:
        self.parent.check([*shape[: self.dim], 1, *shape[self.dim :]], warps)


def convert_layout(x: Block, layout: Any, assert_trivial: bool = False) -> Block:  # noqa: ARG001
    """layout: None where it is that of another block."""
    if layout is not None:
        layout.check(x.data.shape, here().warps)
    return x


# -- launches


def warp_specialize(partitions: Sequence[tuple[Callable[..., object], Sequence[Any]]], warps: Sequence[int], registers: Sequence[int]) -> None:
    actor = here()
    demand(len(warps) == len(registers) == len(partitions) - 1, "the partitions but the first need warps and registers")
    names = [f"{f.__name__} {i} of {actor.name}" for i, (f, _) in enumerate(partitions)]
    others = [
        actor.machine.start(actor.program, name, count, lambda f=f, a=a: f(*a)) for name, count, (f, a) in zip(names[1:], warps, partitions[1:], strict=True)
    ]
    function, arguments = partitions[0]
    actor.name, name = names[0], actor.name
    function(*arguments)
    actor.end()
    turn(lambda: not any(o in actor.machine.actors for o in others), "the other partitions")
    actor.name = name


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value, value.dtype)
    return Int(value) if isinstance(value, int) else Block(torch.tensor(value)) if isinstance(value, float) else value


@dataclass(frozen=True)
class Jit:
    """A function of a kernel, which others call; a kernel itself, as it is launched."""

    function: Callable[..., Any]
    seed: object

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: int) -> None:
            for option in ("num_stages", "enable_fp_fusion", "sanitize_overflow", "launch_pdl"):
                constants.pop(option, None)
            constants |= {"PTX": False} if "PTX" in constants else {}  # of which there is none here
            programs = [Program(i, grid[0], num_warps) for i in range(grid[0])]
            Machine(self.seed).run(programs, self.function, [_argument(x) for x in arguments], constants)
            demand(all(p.waited for p in programs), "a kernel may end before the one that was launched before")

        return launch


LANGUAGE = SimpleNamespace(
    **FUNCTIONS,
    program_id=lambda _axis: Int(here().program.id),
    num_programs=lambda _axis: Int(here().program.count),
    num_warps=lambda: here().warps,
    arange=lambda start, end, layout=None: convert_layout(arange(start, end), layout),
    full=lambda shape, value, dtype, layout=None: convert_layout(full(shape, value, dtype), layout),
    zeros=lambda shape, dtype, layout=None: convert_layout(full(shape, 0, dtype), layout),
    load=load, store=store, atomic_add=atomic_add, barrier=barrier, thread_barrier=barrier, debug_barrier=barrier,
    convert_layout=convert_layout, set_auto_layout=lambda x, _layout: x, allocate_shared_memory=allocate_shared_memory, warp_specialize=warp_specialize,
    AutoLayout=lambda: None, DistributedLinearLayout=Linear, BlockedLayout=Blocked, SliceLayout=Slice, NVMMADistributedLayout=Multiplied, DotOperandLayout=Operand,
)  # fmt: skip


def module(text: str, seed: object = 0) -> SimpleNamespace:
    """A generated module's functions, to be launched as Triton's are: `module.kernel[grid](*arguments, **options)`.

    A tensor that the kernel addresses by TMA is passed as a Descriptor. seed: of the order of events, in which alone launches differ.
    A launch raises Fault for what a GPU would not have done right.
    """

    def jit(function: Callable[..., Any]) -> Jit:
        return Jit(function, seed)

    language = SimpleNamespace(**vars(LANGUAGE), nvidia=SimpleNamespace(hopper=HOPPER))
    gluon = SimpleNamespace(jit=jit, constexpr_function=lambda f: f, language=language)
    extra = SimpleNamespace(cuda=SimpleNamespace(gdc_wait=gdc_wait), libdevice=SimpleNamespace(**LIBDEVICE))
    triton = SimpleNamespace(jit=jit, language=SimpleNamespace(**vars(LANGUAGE), extra=extra), experimental=SimpleNamespace(gluon=gluon))

    def imported(name: str, _globals: object = None, _locals: object = None, fromlist: Sequence[str] | None = (), _level: int = 0) -> Any:
        demand(name.partition(".")[0] == "triton", f"a kernel imports {name}")
        return functools.reduce(getattr, name.split(".")[1:] if fromlist else (), triton)

    def counted(*limits: int) -> map[Int]:
        return map(Int, range(*limits))

    names: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": imported, "range": counted}, "__name__": "generated"}
    exec(compile(text, "generated", "exec"), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if isinstance(value, Jit)})
