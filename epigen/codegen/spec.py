"""What a kernel means (KernelSpec) and how it is scheduled (KernelConfig): all that a template is given.

Pure data, no text but names and numbers. Equal spec and config render equal bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from epigen.dtypes import BF16, FAST_ACCUM, FP16, FP32, INT8, INT32, DType, multiplied_as
from epigen.errors import ConfigError
from epigen.ir.graph import GROUPS, PRODUCT, periodic
from epigen.shapes import Shape

LAYOUTS = ("nn", "nt", "tn", "tt")
"""How a and b lie in memory: n for row-major, t for the transpose of a row-major matrix."""

INVARIANT = ("m",)
"""What a program can be invariant of: how many rows there are."""
GROUPED = ("m", "k")
"""The indices along which the products of a batch can be groups."""
SPARSE = ("a", "b")
"""Which operand may be one of whose values two of four are 0."""
ROUNDING = ("eager",)
"""How operations may be rounded, but for once an output."""

EXACT_INT8 = (2**31 - 1) // 128**2
"""The largest K for which no sum of products of int8 leaves int32."""

MOST_POSITIONS = 1 << 24
"""How many rows or columns there may be where their numbers are values: up to there fp32 holds each, and rounds no integer to one."""

WIDE = 1 << 31
"""Offsets from here on need 64 bits."""

PAST = 1 << 14
"""How far indices may go past an extent: to the end of a tile or a step, of up to 1024, and in parts along k to the end of the last, 32 * 256 at most."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What of a call the kernel's text depends on.

    a, b: the operands' dtypes as they lie; both are the product's where that is an input.
    inputs: each named input's dtype; None for a Python number, which is passed by value.
    precision: "ieee" or "tf32", for fp32 operands only, or "fast_accum", for fp8 ones.  k_multiple: a power of two that divides K.
    index_bits: 64 where some offset does not fit in 32 bits. layout: how a and b lie.
    tma: those of "a", "b" and the [m,n] inputs' and outputs' names whose tensors a TMA descriptor can address as they lie.  factors: as `factors` finds them.
    bytewise: packed masks that are read or written a byte at a time, since their rows are not whole, aligned words of 4.
    batched: whether operands have leading dimensions, and are several products.
    grouped: the index along which groups, whose ends lie in memory, are such products: "m" of rows of a, each with a b of its own; "k" of both operands'; or "".
    invariant: whether a row of the result is to have the same bits whatever M is, and wherever it lies among the others.
    packed: the index along which b holds two values in a byte, "k" or "n", or "". sparse: the operand of whose values two of four are 0, "a" or "b", or "": what
    such a call is chosen by; its kernels are of its product, or of its dense values.
    rounding: "eager" where each operation is rounded as torch rounds it, else "". interpreted: for Triton's interpreter, which has no libdevice.
    """

    a: DType
    b: DType
    inputs: tuple[tuple[str, DType | None], ...] = ()
    precision: str = "ieee"
    k_multiple: int = 1
    index_bits: int = 32
    layout: str = "nn"
    tma: tuple[str, ...] = ()
    factors: tuple[tuple[str, int], ...] = ()
    bytewise: tuple[str, ...] = ()
    batched: bool = False
    invariant: bool = False
    rounding: str = ""
    interpreted: bool = False
    packed: str = ""
    grouped: str = ""
    sparse: str = ""

    @property
    def multiplied(self) -> Mapping[str, DType]:
        """The dtypes in which operands are multiplied, by name."""
        return {"a": self.a, "b": multiplied_as(self.a, self.b)}

    @property
    def called(self) -> str:
        """What people call the operands' dtypes: "fp16", or of a narrower weight "fp16 x int8"."""
        return str(self.a) if self.multiplied["b"] == self.b else f"{self.a} x {self.b}"

    @property
    def exact(self) -> bool:
        """Whether functions have the bits of torch's own kernels, by what the operation table has for that."""
        return bool(self.rounding) and not self.interpreted

    @property
    def contracted(self) -> bool:
        """Whether the compiler may make one rounded operation of a product and the sum that it goes into."""
        return not (self.invariant or self.rounding)


@dataclass(frozen=True, slots=True)
class Numerics:
    """How the results of a program are computed, as `epigen.compile` has it. precision: None where it is the process's at each call."""

    precision: str | None = None
    invariant: bool = False
    rounding: str = ""


USUAL = Numerics()


@dataclass(frozen=True, slots=True)
class Input:
    """A named input of a kernel. indices: "mn", "m", "n" or ""; of an operand also "k", and "mk" or "kn". dtype None: a number passed by value.
    periods: of each index what a program calls the extent after which it begins anew, or ""; none where no index does. seed: it is no number.
    blocks: of each index how many of its values share one of the input's; none where all have their own."""

    name: str
    indices: str
    dtype: DType | None
    packed: bool
    periods: tuple[str, ...] = ()
    seed: bool = False
    blocks: tuple[int, ...] = ()

    def block(self, index: str) -> int:
        """How many values of an index share one of its."""
        return dict(zip(self.indices, self.blocks, strict=False)).get(index, 1)

    def in_row(self, block_k: int) -> bool:
        """Whether all k of a step share its values, so that the step has one row, or column, of it."""
        return self.block("k") % block_k == 0

    @property
    def periodic(self) -> str:
        """The indices along which it begins anew."""
        return periodic(self.indices, self.periods)

    @property
    def extents(self) -> tuple[str, ...]:
        """What its extents are called."""
        whole = [period or index.upper() for index, period in zip(self.indices, self.periods or self.indices.upper(), strict=True)]
        return tuple(f"ceil({extent} / {b})" if (b := self.block(index)) > 1 else extent for index, extent in zip(self.indices, whole, strict=True))


ENDS = Input(GROUPS, "", INT32, False)
"""Where each of a call's groups ends."""

ACC = "acc"
"""Name of the main kernel's accumulator."""


def accumulator(second: str) -> str:
    """That of a second product, by the name of the input that is its right operand."""
    return f"{ACC}_of_{second}" if second else ACC


CAST, WIDEN, POSITION, UNIFORM = "cast", "widen", "position", "uniform"


LEAST_OF_BYTES = 32
"""Of k, that one instruction of the tensor cores multiplies of operands of 8 bits."""


def k_multiple(k: int) -> int:
    """The largest power of two up to 256 that divides k; 256 for 0."""
    return min(k & -k, 256) if k else 256


def index_bits(shape: tuple[int, int, int], reaches: Iterable[int]) -> int:
    """64 where some index or offset of a call does not fit in 32 bits, else 32. reaches: the largest offset of each tensor, in elements.

    Offsets of elements that a tile has past the last one may not fit in 32 either way: they are masked, and a step along k past the last is not
    read. Partial results have no such reserve, of which each part of a tile leaves some, and one column makes two.
    """
    m, n, _ = shape
    return 64 if max(max(shape) + PAST, max(m, 2) * max(n, 2), *reaches) >= WIDE else 32


TMA_BYTES = 16
"""What a TMA descriptor wants a tensor's first address, and the distance between its rows, to be a multiple of."""
LINE_BYTES = 128
"""A line of L2. A run of so many bytes that lies across two takes TMA about 3 to 5 clocks, and the port's width else 2 (27 shapes on an H200, Triton 3.6, 2026-11)."""
Strided = tuple[str, str, tuple[int, ...]]
"""A tensor's name, its indices, and its stride along each."""

KNOWN = 16
"""What Triton finds of an integer argument by itself: whether this divides it."""


def stride_name(tensor: str, index: str) -> str:
    """What a kernel calls the stride of a tensor along an index."""
    return f"stride_{tensor}{index}" if tensor in ("a", "b") else f"stride_{tensor}_{index}"


def period_name(tensor: str, index: str) -> str:
    """What a kernel calls the extent after which a tensor begins anew along an index."""
    return f"num_{tensor}_{index}"


def batch_stride(tensor: str) -> str:
    """What a kernel calls the distance between a tensor's matrices, or its vectors, of one product of a batch and the next."""
    return f"stride_{tensor}_batch"


LAUNCHER = frozenset(
    """JITCallable backend debug enable_fp_fusion fpsan_homomorphic_casts instrumentation_mode launch_pdl options params sanitize_overflow specialization
    specialize_impl""".split()
)
"""What Triton's launcher calls its own: keywords that it takes or adds beside a kernel's arguments, and variables of the function that it writes around
them, where each argument has its own name (3.6 and 3.9; tests/codegen/test_names.py tries all that they have)."""


def parameter(number: str) -> str:
    """What a kernel calls a number that is passed by value: its own name, unless that is the launcher's. A tensor's parameters are called after what they
    are of it, and collide with nothing."""
    return f"{number}_value" if number in LAUNCHER else number


def offsets(index: str) -> str:
    """What a main kernel calls the numbers of a tile's rows ("m") or columns ("n")."""
    return f"offs_{index}"


def counted(index: str) -> str:
    """The number of rows ("m"), of columns ("n") or of what the product is summed over ("k") as an fp32 number in a kernel, which Triton may hold as a constant."""
    return f"(1.0 * {index.upper()})"


def factors(shape: tuple[int, int, int], tensors: Iterable[Strided], batch_strides: Mapping[str, int] = MappingProxyType({})) -> tuple[tuple[str, int], ...]:
    """What divides the integer arguments that loads and stores of several elements hang on: N, the extent along which a matrix is
    contiguous, and its other stride.

    Each that KNOWN does not divide, with the largest power of two that does. shape: M, N, K. batch_strides: of a batch, by tensor.
    """
    extents = dict(zip("mnk", shape, strict=True))
    values = {"N": extents["n"]}  # of the outputs' rows and of partial results
    values |= {batch_stride(name): stride for name, stride in batch_strides.items()}
    for name, indices, strides in tensors:
        if len(indices) == 2 and 1 in strides:
            along = strides.index(1) if strides[1] != 1 else 1
            values[indices[along].upper()] = extents[indices[along]]
            values[stride_name(name, indices[1 - along])] = strides[1 - along]
    # Triton itself makes a constant of 1, and a larger stride's quotient would be multiplied back in 32 bits
    return tuple((name, value & -value) for name, value in sorted(values.items()) if value % KNOWN and 1 < value < WIDE)


def contiguous(
    shape: tuple[int, int, int], layout: str, tiles: Iterable[str], beside: Iterable[tuple[str, str, int]] = (), packed: str = ""
) -> tuple[Strided, ...]:  # fmt: skip
    """The matrices of a call whose tensors leave no gaps. tiles: names of the [m,n] inputs and outputs, but for packed masks. beside: names, indices and
    lengths of rows of other inputs that are matrices. packed: as of `Signature`."""
    m, n, k = shape
    a, b = (k, 1) if layout[0] == "n" else (1, m), (n // (1 + (packed == "n")), 1) if layout[1] == "n" else (1, k // (1 + (packed == "k")))
    return (
        ("a", "mk", a),
        ("b", "kn", b),
        *((name, "mn", (n, 1)) for name in (PRODUCT, *tiles)),
        *((name, indices, (row, 1)) for name, indices, row in beside),
    )


def whole_words(strides: tuple[int, ...], address: int) -> bool:
    """Whether each row of a packed mask begins at a word of 4 bytes. address: of the first, of which Triton too asks whether 16 divides it.

    The last word may reach past a row's end, but holds some byte of it, so it lies in the same allocation.
    """
    return strides[1] == 1 and strides[0] % 4 == 0 and address % 16 == 0


Arg = str | float
"""The name of a value in the kernel, or a constant."""


def number(value: float) -> str:
    """A constant as text; always a float, so that Triton's arithmetic stays fp32."""
    return repr(float(value)) if math.isfinite(value) else f"float('{value}')"


@dataclass(frozen=True, slots=True)
class Line:
    """`name = op(args)`: one line of the epilogue.

    op: a row of the operation table, CAST (round to `dtype`, stay a number), WIDEN (the int32 accumulator as fp32), POSITION (offsets as fp32) or
        UNIFORM (random numbers of a seed, of rows' and columns' offsets, and of the product's number).
    block: op is a row of the table of reductions, and reduces each block of so many columns; its result is of the tile's extents.
    scalar: the arguments are scalars that Triton would not treat as tensors, so the first is made a block of one element.
    exact: by the row's `exact` text, if it has one.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    dtype: DType | None = None
    scalar: bool = False
    exact: bool = False
    block: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """What the main loop multiplies of one operand, a step along k at a time: the tensor as it lies, or what is computed of it in fp32 and rounded once.

    name: "a" or "b", the tensor's, and of its elements in the lines. value: of what is multiplied. inputs: what the lines read besides.
    once: lines that do not vary along k, before the loop.  lines: those of each step.
    zero: whether the value is 0 past the last k, where tensors and inputs are read as 0.
    converted: whether the tensor has another dtype than what is multiplied.  packed: what it holds two of in a byte, if it does.
    apart: the value but for its factors, where neighbours along k share some.
    """

    name: str
    value: Arg
    inputs: tuple[Input, ...] = ()
    once: tuple[Line, ...] = ()
    lines: tuple[Line, ...] = ()
    zero: bool = True
    converted: bool = False
    packed: DType | None = None
    apart: Arg = ""
    factors: tuple[Arg, ...] = ()

    @property
    def as_loaded(self) -> bool:
        """Whether nothing but a conversion lies between what is loaded and what is multiplied."""
        return self.value == self.name

    @property
    def computed(self) -> bool:
        return self.converted or not self.as_loaded

    @property
    def along_k(self) -> tuple[Input, ...]:
        """The inputs of which each step loads others."""
        return tuple(i for i in self.inputs if "k" in i.indices)


@dataclass(frozen=True, slots=True)
class OverK:
    """A reduction over k of what is computed in fp32 of an operand: a value a row of "a", a column of "b", each in one order whichever tile has it.

    name: of the result. row: of the table of reductions. operand: "a" or "b", and the name of its elements, as they lie but in fp32, in the lines. value: what is reduced.
    inputs, once, lines, zero: as of `Operand`.
    """

    name: str
    row: str
    operand: str
    value: Arg
    inputs: tuple[Input, ...] = ()
    once: tuple[Line, ...] = ()
    lines: tuple[Line, ...] = ()
    zero: bool = True

    @property
    def along_k(self) -> tuple[Input, ...]:
        """The inputs of which each step loads others."""
        return tuple(i for i in self.inputs if "k" in i.indices)


@dataclass(frozen=True, slots=True)
class Store:
    """One output that a kernel writes. packed: a bit mask. block: how many columns share one of its values."""

    name: str
    value: Arg
    indices: str
    dtype: DType
    packed: bool = False
    block: int = 1

    @property
    def tile(self) -> bool:
        """Whether it has an element for each of the result's."""
        return self.indices == "mn" and not self.packed and self.block == 1

    @property
    def tile_bytes(self) -> float:
        """Of one element of what it is stored from."""
        return 0.125 if self.packed else self.dtype.bytes / self.block


@dataclass(frozen=True, slots=True)
class Partial:
    """A reduction of tiles, one result a tile, that the finishing kernel completes. zero_below: its elements are 0 in a tile's rows past M."""

    name: str
    row: str
    value: Arg
    axes: str  # "m", "n" or "mn"
    zero_below: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """What a finishing kernel reduces: a Partial of the main kernel, or `over_k` an operand ("a", "b") or what is computed of it."""

    name: str
    row: str
    operand: str
    dtype: DType
    over_k: OverK | None = None

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What the elements are computed of beside the operand's."""
        return self.over_k.inputs if self.over_k else ()

    @property
    def lines(self) -> tuple[Line, ...]:
        """Those that compute the elements."""
        return (*self.over_k.once, *self.over_k.lines) if self.over_k else ()


@dataclass(frozen=True, slots=True)
class Finish:
    """One small kernel that completes all reductions with the same remaining indices, and stores what follows from them."""

    indices: str  # "m", "n" or ""
    sources: tuple[Source, ...]
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    stores: tuple[Store, ...]

    @property
    def all_inputs(self) -> tuple[Input, ...]:
        """With those that elements are computed of before they are reduced."""
        return tuple(dict.fromkeys([*(i for s in self.sources for i in s.inputs), *self.inputs]))

    @property
    def all_lines(self) -> tuple[Line, ...]:
        """With those that compute what is reduced."""
        return tuple(dict.fromkeys([*(line for s in self.sources for line in s.lines), *self.lines]))


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Meaning of the kernels of one program at one signature. operands: of the product; none where that is given. inputs, lines: the epilogue's.
    outputs: every output in the program's order. carried: the reductions over k that tiles are computed of. vectors: outputs with a value a row, or a column, that are computed of these
    alone. second: the right operand of a second product, of which a is the left one.
    longest_block: of columns that are reduced by themselves, so that an epilogue takes all of them at once; 1 where none are."""

    name: str
    program: str
    signature: Signature
    operands: tuple[Operand, ...]
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    stores: tuple[Store, ...]
    partials: tuple[Partial, ...]
    finishes: tuple[Finish, ...]
    outputs: tuple[Store, ...]
    second: Input | None = None
    longest_block: int = 1
    carried: tuple[OverK, ...] = ()
    vectors: tuple[Store, ...] = ()

    @property
    def products(self) -> tuple[str, ...]:
        """The accumulators' names."""
        return (ACC, accumulator(self.second.name)) if self.second else (ACC,)

    @property
    def multiplied(self) -> tuple[str, ...]:
        """Names of the operands."""
        return ("a", "b", self.second.name) if self.second else ("a", "b")

    @property
    def accumulator(self) -> DType:
        return INT32 if self.signature.a == INT8 else FP32

    @property
    def promoted(self) -> bool:
        """Whether each sum of up to 128 products is added up in fp32: Hopper's tensor cores add those of fp8 in about 14 bits."""
        return self.signature.a.is_fp8 and self.signature.precision != FAST_ACCUM

    @property
    def pointwise(self) -> bool:
        """Whether the product is an input, so that there are no operands and nothing to multiply."""
        return any(name == PRODUCT for name, _ in self.signature.inputs)

    @property
    def computed(self) -> tuple[Operand, ...]:
        """The operands that are no tensors as they lie."""
        return tuple(o for o in self.operands if o.computed)

    @property
    def of_operands(self) -> tuple[Operand | OverK, ...]:
        """All that a main loop computes of operands: what it multiplies, and what it reduces over k."""
        return (*self.operands, *self.carried)

    @property
    def bare_product(self) -> bool:
        """Whether the program is the product alone, in the dtype of its operands: the vendor's library computes that whole, by a kernel of its own.

        What of torch's adds an epilogue does not keep the numerics contract, fp32 sums that are rounded once (H200, torch 2.11, 2026-11): `torch.addmm` rounds
        the product before it adds the bias where there is one row, and raises CUBLAS_STATUS_INVALID_VALUE for some extents and strides of `out`;
        `torch._addmm_activation` turns NaN into 0 by relu in some fp32 problems, and takes gelu in two steps, of a rounded value, where cuBLASLt does not take
        the problem.
        """
        operands = self.signature.a
        alone = (
            not self.pointwise
            and not self.computed
            and not self.second
            and not self.finishes
            and not self.carried
            and [(s.value, s.dtype) for s in self.stores] == [(ACC, operands)]
        )
        return alone and operands in (FP16, BF16, FP32)

    @property
    def apart(self) -> tuple[str, ...]:
        """What is stored or reduced of values that do not depend on the product, and are not drawn in its layout."""
        reached: set[Arg] = {*self.products}
        for line in self.lines:
            if line.op == UNIFORM or reached.intersection(line.args):
                reached.add(line.name)
        values = dict.fromkeys([s.value for s in self.stores] + [p.value for p in self.partials])
        return tuple(value for value in values if isinstance(value, str) and value not in reached)

    def beside_bytes(self, block_m: int, block_n: int, block_k: int = 0) -> int:
        """What a tile's operands are computed of besides, in bytes a step of 1 along k. block_k: of a step, where it is known."""
        rows = {"mk": block_m, "kn": block_n}
        inputs = [i for o in self.operands for i in o.along_k if i.dtype is not None]
        shared = [block_k if block_k and i.in_row(block_k) else 1 for i in inputs]  # of which a step has one row
        return sum(-(-rows.get(i.indices, 1) * i.dtype.bytes // steps) for i, steps in zip(inputs, shared, strict=True) if i.dtype is not None)

    @property
    def longest_step(self) -> int:
        """Of k, what a step of a main loop can have at most: of operands of 8 bits all of it shares the scales."""
        blocks = [i.block("k") for o in self.operands for i in o.along_k] if self.signature.a.bits == 8 else []
        return min([256, *(block & -block for block in blocks)])

    @property
    def main_lines(self) -> tuple[Line, ...]:
        """All that the main kernel computes: operands and what is reduced of them over k, then the epilogue."""
        return (*dict.fromkeys(line for o in self.of_operands for line in (*o.once, *o.lines)), *self.lines)

    @property
    def positions(self) -> frozenset[str]:
        """What the main kernel calls the offsets that values of the epilogue are computed of."""
        used = {arg for line in self.lines if line.op in (POSITION, UNIFORM) for arg in line.args}
        used |= {offsets("n") for line in self.lines if line.block}
        return frozenset(name for name in map(offsets, "mn") if name in used)

    @property
    def counts_k(self) -> bool:
        """Whether the epilogue computes with the number of k."""
        return any(counted("k") in line.args for line in self.lines)

    @property
    def loaded(self) -> tuple[Input, ...]:
        """Inputs of the epilogue that lie in memory; the others are numbers, passed by value."""
        return tuple(i for i in self.inputs if i.dtype is not None)

    @property
    def all_inputs(self) -> tuple[Input, ...]:
        """Inputs of the main and the finishing kernels, each once."""
        of_operands = [i for o in self.operands for i in o.inputs] + [i for r in self.carried for i in r.inputs]
        of_operands += ([self.second] if self.second else []) + ([ENDS] if self.signature.grouped else [])
        over_k = [s.over_k for f in self.finishes for s in f.sources if s.over_k]
        return tuple(dict.fromkeys([*of_operands, *self.inputs, *(i for r in over_k for i in r.inputs), *(i for f in self.finishes for i in f.inputs)]))


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """A schedule and the value of each of its dimensions. Build with `schedules.config`, which checks them."""

    schedule: str
    values: tuple[tuple[str, int], ...]

    def __getitem__(self, dimension: str) -> int:
        for name, value in self.values:
            if name == dimension:
                return value
        raise ConfigError(f"the schedule {self.schedule} has no dimension '{dimension}'")

    def __str__(self) -> str:
        return " ".join([self.schedule, *(f"{name}={value}" for name, value in self.values)])

    def with_value(self, dimension: str, value: int) -> KernelConfig:
        """The same with another value of one dimension, if it has that."""
        return KernelConfig(self.schedule, tuple((name, value if name == dimension else own) for name, own in self.values))


@dataclass(frozen=True, slots=True)
class Choice:
    """A config and the sentence that says where it came from."""

    config: KernelConfig
    why: str


@dataclass(frozen=True, slots=True)
class Provisional(Choice):
    """A choice for one call: the next call of the same signature chooses anew."""


def row_lengths(shape: Shape, layout: str) -> tuple[int, int]:
    """Elements of a row of a and of b as it lies in memory: along k, or of one that lies transposed along the other extent."""
    m, n, k = shape[-3:]
    return k if layout[0] == "n" else m, n if layout[1] == "n" else k


def row_bytes(shape: Shape, signature: Signature) -> tuple[int, int]:
    """The same in bytes, which say how wide loads may be."""
    a, b = row_lengths(shape, signature.layout)
    along = "n" if signature.layout[1] == "n" else "k"
    return a * signature.a.bytes, b * signature.b.bytes // (2 if signature.packed == along else 1)


def b_bytes(shape: Shape, signature: Signature) -> int:
    """Of the right operand of one product."""
    n, k = shape[-2:]
    return k * n * signature.b.bytes // (2 if signature.packed else 1)


def loaded_one_by_one(shape: Shape, signature: Signature, least: int) -> tuple[bool, bool]:
    """Whether a and b are loaded element by element: rows are aligned to fewer bytes than `least`, or b has neighbours along n in a byte."""
    a, b = row_bytes(shape, signature)
    return a % least != 0, b % least != 0 or signature.packed == "n"


def with_layout(spec: KernelSpec, layout: str) -> KernelSpec:
    """The same kernel for operands that lie otherwise. layout: one of LAYOUTS."""
    return replace(spec, signature=replace(spec.signature, layout=layout))


def digest(parts: Iterable[str]) -> str:
    """Short stable name for a kernel: 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
