"""Blocks of numbers and pointers as generated kernels use them, over torch's CPU tensors, which round as the hardware does.

Stricter than torch where Triton is: blocks of two ranks do not broadcast, extents are powers of two, a block is no condition, and an
access outside its tensor is a fault. As in Triton a Python number takes the dtype of the block beside it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


class Fault(Exception):
    """Something that a kernel did, and that a GPU would not have done right, or only by luck."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Fault(what)


class Int(int):
    """A scalar of a kernel. An int, but for `to`, which 64-bit offsets are computed with."""

    def to(self, dtype: torch.dtype) -> Block:
        return Block(torch.tensor(int(self), dtype=dtype))


def _scalar(name: str) -> Callable[[Int, int], Any]:
    def method(self: Int, other: int) -> Any:
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else Int(found)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(Int, f"__{_side}{_name}__", _scalar(f"__{_side}{_name}__"))


class Block:
    """A block of numbers, or one number that the kernel has loaded or widened: data has no dimensions then."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: torch.Tensor):
        self.data, self.shape = data, list(data.shape)

    @property
    def type(self) -> SimpleNamespace:
        """Which layout a block has nobody knows here."""
        return SimpleNamespace(layout=None)

    def __getitem__(self, at: Any) -> Block:
        at = at if isinstance(at, tuple) else (at,)
        demand(all(i is None or i == slice(None) for i in at), f"a block is indexed by {at}")
        demand(sum(i is not None for i in at) == self.data.dim(), f"{at} does not name the {self.data.dim()} axes of a block")
        return Block(self.data[at])

    def __bool__(self) -> bool:
        demand(self.data.dim() == 0, f"a block of shape {list(self.data.shape)} is no condition")
        return bool(self.data)

    def __index__(self) -> int:
        demand(self.data.dim() == 0, f"a block of shape {list(self.data.shape)} is no limit of a loop")
        return int(self.data)

    def __neg__(self) -> Block:
        return Block(-self.data)

    def __invert__(self) -> Block:
        return Block(~self.data)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype))


_UNSIGNED = {torch.uint16: 0xFFFF, torch.uint32: 0xFFFFFFFF}
"""Words of which torch computes next to nothing, with the bits of each."""


def _aligned(*values: Block | float) -> list[torch.Tensor]:
    """The values in one dtype. Raises Fault where their shapes do not broadcast."""
    blocks = [v.data for v in values if isinstance(v, Block)]
    demand(len({b.dim() for b in blocks} - {0}) <= 1, f"blocks of different ranks: {[list(b.shape) for b in blocks]}")
    dtype = blocks[0].dtype if blocks else torch.int32
    for b in blocks[1:]:
        dtype = torch.promote_types(dtype, b.dtype)
    if any(isinstance(v, float) for v in values) and not dtype.is_floating_point:
        dtype = torch.float32
    return [(v.data.to(dtype) if isinstance(v, Block) else torch.tensor(v, dtype=dtype)) for v in values]


def elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Block]:
    return lambda *values: Block(_computed(function, _aligned(*values)))


def _computed(function: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    word = values[0].dtype
    if word not in _UNSIGNED:
        return function(*values)
    found = function(*(x.long() for x in values))
    return found if found.dtype == torch.bool else (found & _UNSIGNED[word]).to(word)


def _operator(function: Callable[..., torch.Tensor], turned: bool) -> Callable[..., Any]:
    compute = elementwise(function)

    def method(self: Block, other: Any) -> Any:
        if not isinstance(other, (Block, int, float)):
            return NotImplemented
        return compute(other, self) if turned else compute(self, other)

    return method


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "floordiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "mod": torch.fmod, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
}.items():  # fmt: skip
    setattr(Block, f"__{_name}__", _operator(_function, turned=False))
    setattr(Block, f"__r{_name}__", _operator(_function, turned=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Block, f"__{_name}__", _operator(getattr(torch, _name), turned=False))


# -- the language's functions of blocks


def _powers_of_two(shape: Sequence[int]) -> list[int]:
    demand(all(size > 0 and size & (size - 1) == 0 for size in shape), f"extents of a block are powers of two: {list(shape)}")
    return list(shape)


def arange(start: int, end: int) -> Block:
    _powers_of_two([end - start])
    return Block(torch.arange(start, end, dtype=torch.int32))


def full(shape: Sequence[int], value: Block | float, dtype: torch.dtype) -> Block:
    number = value.data if isinstance(value, Block) else torch.tensor(value)
    demand(number.dim() == 0, f"a block is filled with another, of shape {list(number.shape)}")
    return Block(number.to(dtype).expand(_powers_of_two(shape)))


def where(condition: Block | bool, x: Block | float, y: Block | float) -> Block:
    chosen, values = _aligned(condition)[0].bool(), _aligned(x, y)
    demand(len({v.dim() for v in (chosen, *values)} - {0}) <= 1, f"a condition of shape {list(chosen.shape)} for {[list(v.shape) for v in values]}")
    return Block(_computed(lambda x, y: torch.where(chosen, x, y), values))


def high_word(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the product of two words, which int64 does not hold."""
    low, high = (x & 0xFFFF) * y, (x >> 16) * y
    return (high + (low >> 16)) >> 16


def reshape(x: Block, shape: Sequence[int]) -> Block:
    demand(x.data.numel() == math.prod(shape), f"{list(x.data.shape)} does not reshape to {list(shape)}")
    return Block(x.data.reshape(_powers_of_two(shape)))


def split(x: Block) -> tuple[Block, Block]:
    demand(x.data.shape[-1] == 2, f"split wants a last extent of 2, not {list(x.data.shape)}")
    return Block(x.data[..., 0]), Block(x.data[..., 1])


ALL = "ALL"
"""PropagateNan: by default a NaN beside a number is dropped."""


def maximum(x: Any, y: Any, propagate_nan: str = "") -> Block:
    return elementwise(torch.maximum if propagate_nan == ALL else torch.fmax)(x, y)


def minimum(x: Any, y: Any, propagate_nan: str = "") -> Block:
    return elementwise(torch.minimum if propagate_nan == ALL else torch.fmin)(x, y)


def reduce(x: Block, axis: int, combine: Callable[[Block, Block], Block], keep_dims: bool = False) -> Block:
    data = x.data
    while (size := data.shape[axis]) > 1:
        data = combine(Block(data.narrow(axis, 0, size // 2)), Block(data.narrow(axis, size // 2, size // 2))).data
    return Block(data if keep_dims else data.squeeze(axis))


def associative_scan(x: Block, axis: int, combine: Callable[[Block, Block], Block]) -> Block:
    demand(x.data.dim() == 1 and axis == 0, f"a scan of {list(x.data.shape)} along {axis}")
    found = [Block(x.data[0])]
    for each in x.data[1:]:
        found.append(combine(found[-1], Block(each)))
    return Block(torch.stack([one.data for one in found]))


def _reduction(combine: Callable[..., Block]) -> Callable[..., Block]:
    return lambda x, axis, keep_dims=False: reduce(x, axis, combine, keep_dims)


DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float8e4nv": torch.float8_e4m3fn, "float8e5": torch.float8_e5m2,
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "uint16": torch.uint16, "uint32": torch.uint32, "int64": torch.int64,
}  # fmt: skip

FUNCTIONS: dict[str, Any] = {
    **DTYPES,
    "constexpr": lambda value: value,  # also an annotation
    "PropagateNan": SimpleNamespace(ALL=ALL),
    "pointer_type": lambda dtype: PointerType(dtype),
    "static_range": range,
    "cdiv": lambda x, y: (x + y - 1) // y,  # as Triton has it, whose division rounds towards 0
    "cast": lambda x, dtype: Int(x).to(dtype),
    "reshape": reshape, "split": split, "join": lambda x, y: Block(torch.stack((x.data, y.data), -1)), "reduce": reduce, "associative_scan": associative_scan,
    "permute": lambda x, order: Block(x.data.permute(*order)), "trans": lambda x: Block(x.data.T),
    "where": where, "broadcast": lambda *values: tuple(Block(x.clone()) for x in torch.broadcast_tensors(*_aligned(*values))),
    "maximum": maximum, "minimum": minimum,
    "sum": _reduction(operator.add), "max": _reduction(maximum), "reduce_or": _reduction(operator.or_),
    **{name: elementwise(getattr(torch, name)) for name in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "sin", "cos", "floor", "ceil")},
    "umulhi": elementwise(high_word), "mul": lambda x, y, sanitize_overflow=True: elementwise(torch.mul)(x, y),  # noqa: ARG005
    "div_rn": elementwise(torch.div), "sqrt_rn": elementwise(torch.sqrt),
    "fma": elementwise(lambda x, y, z: (x.double() * y.double() + z.double()).float()),
}  # fmt: skip


LIBDEVICE = {name: elementwise(getattr(torch, name)) for name in ("exp", "expm1", "log1p", "tanh", "pow")}


# -- pointers

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: what an element is moved and compared as, NaN or not."""
UNKNOWN = -1
"""Bits of what nobody has written: NaN in every dtype that has one."""


@dataclass(frozen=True)
class PointerType:
    dtype: torch.dtype


@dataclass(frozen=True)
class Pointer:
    """Places in the memory of `tensor`. offset: in elements of `dtype` from the tensor's first."""

    tensor: torch.Tensor
    dtype: torch.dtype
    offset: Block | int = 0

    def __add__(self, offset: Block | int) -> Pointer:
        return Pointer(self.tensor, self.dtype, self.offset + offset)

    def __sub__(self, offset: Block | int) -> Pointer:
        return self + -offset

    def to(self, wanted: PointerType) -> Pointer:
        demand(not isinstance(self.offset, Block) or self.offset.data.dim() == 0, "pointers change their type after offsets were added")
        from_first, size = int(self.offset) * self.dtype.itemsize, wanted.dtype.itemsize
        demand(from_first % size == 0, f"a pointer to {from_first} bytes from the first becomes one to elements of {size}")
        return Pointer(self.tensor, wanted.dtype, from_first // size)

    def cells(self, mask: Block | bool | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensor's memory in elements of `dtype`, as bits, the places' indices there, and which of them the mask leaves.

        Raises Fault if one of those lies outside the tensor. Of a packed mask's last word a part may, in the same allocation.
        """
        t, size = self.tensor, self.dtype.itemsize
        memory = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
        first = t.storage_offset() * t.element_size()
        demand((memory.data_ptr() + first) % size == 0, f"an address is no multiple of {size}")
        held = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()
        count = min(-(-held // size), (memory.numel() - first) // size)
        flat = memory[first : first + count * size].view(BITS[size])
        at = (self.offset.data if isinstance(self.offset, Block) else torch.tensor(self.offset)).long()
        inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data if isinstance(mask, Block) else torch.tensor(bool(mask))
        demand(inside.dim() in (0, at.dim()), f"a mask of shape {list(inside.shape)} for {list(at.shape)}")
        at, inside = torch.broadcast_tensors(at, inside)
        outside = inside & ((at < 0) | (at >= count))
        demand(not outside.any(), f"element {at[outside][:1].tolist()} of {count} is accessed")
        return flat, torch.where(inside, at, 0), inside
