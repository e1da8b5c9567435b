"""Hopper's asynchronous machinery: shared memory, barriers, TMA's copies and the tensor cores' multiplications.

What is asynchronous happens as late as it may: a copy into shared memory some turns after it was issued (until then the buffer holds NaN), a
multiplication and a copy out of shared memory when they are waited for. An operand that changes meanwhile is a Fault. A barrier knows
whether it has completed an even or an odd number of phases, and nothing else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from gluon_turns import CopyIn, here, turn
from gluon_values import BITS, UNKNOWN, Block, Fault, demand

from epigen.runtime import direct

SHARED_BYTES = 232_448  # of one block on sm_90


def after_the_kernel_before() -> None:
    """Every kernel may have been launched while the one before it still runs, and accesses no global memory until it has waited for its end."""
    demand(here().program.waited, "memory is accessed before the kernel that was launched before has ended")


# -- shared memory and barriers


class Shared:
    """A buffer of shared memory, or several."""

    def __init__(self, data: torch.Tensor, layout: object):
        self.data, self.layout = data, layout

    def index(self, at: int) -> Shared:
        number = operator.index(at)
        demand(0 <= number < len(self.data), f"buffer {number} of {len(self.data)}")
        return Shared(self.data[number], self.layout)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape), self.layout)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order), self.layout)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length), self.layout)

    def load(self, layout: Any = None) -> Block:
        actor = turn()
        demand(self.place not in actor.program.arriving, "a buffer is read, and the copy into it was not waited for")
        if layout is not None:
            layout.check(self.data.shape, actor.warps)
        return Block(self.data.clone())

    def store(self, value: Block) -> None:
        actor = turn()
        demand(self.place not in actor.program.arriving, "a buffer is written, and the copy into it was not waited for")
        demand(
            value.data.shape == self.data.shape and value.data.dtype == self.data.dtype,
            f"{value.data.dtype} {list(value.data.shape)} is stored in another buffer",
        )
        self.data.copy_(value.data)
        actor.program.unfenced[self.place] = actor

    @property
    def place(self) -> int:
        return self.data.data_ptr()

    def bits(self) -> torch.Tensor:
        return self.data.view(BITS[self.data.itemsize])

    def spoil(self) -> None:
        self.bits().fill_(UNKNOWN)


class Barrier:
    """Counts arrivals and bytes; knows its phase by its parity alone."""

    def __init__(self, name: str):
        self.name, self.count, self.missing, self.bytes, self.parity = name, 0, 0, 0, 0

    def arrive(self, count: int = 1) -> None:
        demand(self.count > 0, f"{self.name} was not initialised")
        self.missing -= count
        demand(self.missing >= 0, f"{self.name} counts {self.count} arrivals, and one more has come")
        self._complete()

    def deliver(self, count: int) -> None:
        self.bytes -= count
        demand(self.bytes >= 0, f"{self.name} was told of {-self.bytes} bytes too few")
        self._complete()

    def _complete(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.parity = self.count, self.parity ^ 1


class Barriers(list[Barrier]):
    def index(self, at: int) -> Barrier:
        number = operator.index(at)
        demand(0 <= number < len(self), f"barrier {number} of {len(self)}")
        return self[number]


@dataclass(frozen=True)
class MBarrierLayout:
    pass


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared | Barriers:
    program = here().program
    size = math.prod(shape)
    program.shared_bytes += size * dtype.itemsize
    demand(program.shared_bytes <= SHARED_BYTES, f"{program.shared_bytes} bytes of shared memory")
    if isinstance(layout, MBarrierLayout):
        return Barriers(Barrier(f"barrier {i} of {size} at {program.shared_bytes}") for i in range(shape[0]))
    buffers = Shared(torch.empty(tuple(shape), dtype=dtype), layout)
    buffers.spoil()
    return buffers


def _init(barrier: Barrier, count: int) -> None:
    actor = turn()
    barrier.count = barrier.missing = count
    actor.program.unfenced[id(barrier)] = actor


def _expect(barrier: Barrier, expected: int, pred: bool = True) -> None:
    turn()
    if pred:
        barrier.bytes += expected
        barrier.arrive()


def _arrive(barrier: Barrier, *, count: int = 1, pred: bool = True) -> None:
    turn()
    if pred:
        barrier.arrive(count)


def _wait(barrier: Barrier, phase: int) -> None:
    demand(phase in (0, 1), f"a barrier is waited for with parity {phase}")
    demand(barrier.count > 0, f"{barrier.name} was not initialised")
    program = turn(lambda: barrier.parity != phase, f"{barrier.name} to complete a phase of parity {phase}").program
    program.arriving = {at: copy for at, copy in program.arriving.items() if copy.barrier is not barrier or copy in here().machine.copies}


def fence_async_shared() -> None:
    actor = turn()
    actor.program.unfenced = {at: a for at, a in actor.program.unfenced.items() if a is not actor}


# -- what is asynchronous


class Descriptor:
    """What TMA addresses: a matrix with contiguous rows, or several evenly apart, in blocks."""

    def __init__(self, tensor: torch.Tensor, block: tuple[int, ...]):
        *steps, last = tensor.stride()
        demand(last == 1 and all(step * tensor.itemsize % 16 == 0 for step in steps) and tensor.data_ptr() % 16 == 0, "rows that TMA cannot address")
        demand(tensor.dim() == len(block) and max(block) <= 256 and block[-1] * tensor.itemsize >= 16, f"TMA moves no block of {block}")
        self.tensor, self.block, self.dtype, self.layout = tensor, block, tensor.dtype, ("TMA", block)

    def part(self, at: Sequence[int]) -> torch.Tensor:
        """The elements of a block that the tensor has."""
        return self.tensor[tuple(slice(i, i + size) for i, size in zip(at, self.block, strict=True))]

    def check(self, buffer: Shared) -> None:
        demand(buffer.layout == self.layout and tuple(buffer.data.shape) == self.block and buffer.data.dtype == self.dtype,
               f"a block of {self.block} does not fit a buffer of {list(buffer.data.shape)}")  # fmt: skip


class Ragged(Descriptor):
    """A matrix of which a block ends where its coordinates say. All is as Triton is told it: extents, and strides by which addresses go round all of memory."""

    def __init__(self, tensor: torch.Tensor, block: tuple[int, ...]):
        super().__init__(tensor, block[2:])
        self.shape, self.strides = direct.lies(tensor, ragged=True)
        demand(all(step * tensor.itemsize < 1 << 40 and step * tensor.itemsize % 16 == 0 for step in self.strides[:-1]), f"TMA knows no strides {self.strides}")
        self.block, self.layout = block, ("TMA", block)

    def part(self, at: Sequence[int]) -> torch.Tensor:
        at = [operator.index(i) for i in at]
        within = [max(0, min(i + size, extent) - i) for i, size, extent in zip(at, self.block, self.shape, strict=True)]
        demand(min(at) >= 0, f"a ragged block begins at {list(at)}")
        if 0 in within:
            return self.tensor[None, None, :0, :0]
        first, apart = divmod(
            sum(i * step for i, step in zip(at[:3], self.strides, strict=False)) * self.tensor.itemsize % (1 << 64), self.strides[2] * self.tensor.itemsize
        )
        demand(not apart and first + within[2] <= self.tensor.shape[0], f"rows {first} and {within[2]} on are not the tensor's")
        return self.tensor[None, None, first : first + within[2], at[3] : at[3] + within[3]]


def copy_in(source: Descriptor, at: Sequence[int], barrier: Barrier, buffer: Shared) -> None:
    after_the_kernel_before()
    actor = turn()
    source.check(buffer)
    demand(id(barrier) not in actor.program.unfenced, f"{barrier.name} was initialised, and no fence has shown it to the copies")
    demand(buffer.place not in actor.program.unfenced, "a buffer was written, and no fence has shown it to the copy into it")
    demand(buffer.place not in actor.program.arriving, "a buffer is copied into, and the copy into it before was not waited for")
    buffer.spoil()

    def land() -> None:
        part = source.part(at)
        buffer.data.zero_()
        buffer.data[_corner(part)] = part
        barrier.deliver(buffer.data.nbytes)

    copy = actor.program.arriving[buffer.place] = CopyIn(actor.program, actor.machine.copy_weight, land, barrier)
    actor.machine.copies.append(copy)


class CopyOut:
    """A copy out of shared memory. What it reads has to stay as it is until it has been waited for; others see it when the launch has ended."""

    def __init__(self, target: Descriptor, at: Sequence[int], buffer: Shared):
        self.target, self.at, self.buffer, self.seen = target, tuple(at), buffer, buffer.bits().clone()

    def end(self) -> None:
        demand(torch.equal(self.seen, self.buffer.bits()), "a buffer was overwritten while it was copied out")
        part, data = self.target.part(self.at), self.buffer.data.clone()
        here().machine.late.append(lambda: part.copy_(data[_corner(part)]))


def _corner(part: torch.Tensor) -> tuple[slice, ...]:
    """Where a block has the elements of which there are any."""
    return tuple(slice(0, size) for size in part.shape)


def copy_out(target: Descriptor, at: Sequence[int], buffer: Shared) -> None:
    after_the_kernel_before()
    actor = turn()
    target.check(buffer)
    demand(buffer.place not in actor.program.unfenced, "a buffer was written, and no fence has shown it to the copy out of it")
    demand(target.tensor.shape[-1] * target.tensor.itemsize % 16 == 0, "TMA writes pieces of 16 bytes whole, past the ends of these rows")
    actor.stores.append(CopyOut(target, at, buffer))


def _store_wait(pending: int) -> None:
    actor = turn()
    while len(actor.stores) > pending:
        actor.stores.popleft().end()


class Product(Block):
    """A multiplication in flight. Its operands have to stay as they are until it has been waited for; a left one may be in registers."""

    def __init__(self, a: Shared | Block, b: Shared, acc: Block | None, shape: torch.Size):
        self.a, self.b, self.acc, self.shape = a, b, acc, shape
        self.shared = [operand for operand in (a, b) if isinstance(operand, Shared)]
        self.seen = [operand.bits().clone() for operand in self.shared]
        self.value: Block | None = None

    @property
    def data(self) -> torch.Tensor:
        raise Fault("a product is used, and it was not waited for")

    def end(self) -> None:
        for seen, operand in zip(self.seen, self.shared, strict=True):
            demand(torch.equal(seen, operand.bits()), "an operand changed while it was multiplied")
        sums = _sums(self.a.data.dtype)
        product = self.a.data.to(sums) @ self.b.data.to(sums)
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = Block(product if acc is None else acc.data + product)


def _sums(operands: torch.dtype) -> torch.dtype:
    """What the tensor cores sum products of these in."""
    return torch.int32 if operands == torch.int8 else torch.float32


def warpgroup_mma(a: Shared | Block, b: Shared, acc: Block, *, use_acc: bool = True, is_async: bool = False) -> Any:
    actor = turn()
    shape = acc.shape if isinstance(acc, Product) else acc.data.shape
    demand(actor.warps == 4 and shape[0] % 64 == 0, f"{actor.warps} warps multiply a tile of {list(shape)}")
    demand((a.data.shape[0], b.data.shape[1]) == shape and a.data.shape[1] == b.data.shape[0] and a.data.dtype.itemsize == b.data.dtype.itemsize,
           f"{list(a.data.shape)} times {list(b.data.shape)} into {list(shape)}")  # fmt: skip
    demand(isinstance(acc, Product) or acc.data.dtype == _sums(a.data.dtype), f"products of {a.data.dtype} are not summed in that")
    along_k = (isinstance(a, Block) or a.data.stride(1) == 1) and b.data.stride(0) == 1
    demand(along_k or a.data.dtype.itemsize > 1, "operands of 8 bits have to lie along k")
    product = Product(a, b, acc if use_acc else None, shape)
    actor.products.append(product)
    return product if is_async else warpgroup_mma_wait(0, (product,))


def warpgroup_mma_wait(outstanding: int = 0, deps: Sequence[Block] = ()) -> Any:
    """What is still in flight stays a Product, with which nothing can be computed."""
    actor = turn()
    while len(actor.products) > outstanding:
        actor.products.popleft().end()
    found = tuple(d.value if isinstance(d, Product) and d.value is not None else d for d in deps)
    return found[0] if len(found) == 1 else found


HOPPER = SimpleNamespace(
    fence_async_shared=fence_async_shared, warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait,
    mbarrier=SimpleNamespace(init=_init, expect=_expect, arrive=_arrive, wait=_wait, MBarrierLayout=MBarrierLayout),
    tma=SimpleNamespace(async_load=copy_in, async_store=copy_out, store_wait=_store_wait),
)  # fmt: skip
