"""The functions of a kernel that make numbers of bytes by their bits, and not by conversions, of which a multiprocessor does few a clock.

PTX where there is some, else the same in Triton's own operations, which its interpreter has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from epigen.codegen.emit import GLUON
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.dtypes import BF16, FP16, INT4, INT8, DType

SPLIT_BYTES = "split_bytes"
"""The function that makes two numbers of each byte, of the values of 4 bits in its low and in its high half, in the dtype that b is multiplied in."""
WIDENED_BYTES = "widened_bytes"
"""The function that makes a number of each int8, in that dtype, where threads have neighbours along k together."""


def used(spec: KernelSpec, config: KernelConfig) -> bool:
    """Whether bytes become numbers by a function that has PTX of its own: two in a byte along k, and int8 in the schedule mixed_input."""
    return spec.signature.packed == "k" or (SCHEDULES[config.schedule].converts and spec.signature.b == INT8)


def functions(spec: KernelSpec, config: KernelConfig) -> list[str]:
    """That function, if there is one."""
    if not used(spec, config):
        return []
    dtype, in_order = BF16 if spec.signature.multiplied["b"] == BF16 else FP16, SCHEDULES[config.schedule].converts
    text = _split(dtype, spec.operands[1].packed == INT4, in_order) if spec.signature.packed else _widened(dtype)
    return [GLUON.rename(text) if in_order else text]


@dataclass(frozen=True, slots=True)
class _Bits:
    """Of a dtype of 16 bits. kind: what PTX calls two of it. one: 1.0. base: the number whose last bits count by ones, which is `first`."""

    kind: str
    one: int
    base: int
    first: int


_BITS = {BF16: _Bits("bf16x2", 0x3F80, 0x4300, 128), FP16: _Bits("f16x2", 0x3C00, 0x6400, 1024)}
_TWICE = 0x10001


def _asm(lines: Iterable[str]) -> str:
    """PTX as a kernel writes it."""
    return "\n            ".join(["{", *lines, "}"])


def _split(dtype: DType, signed: bool, in_order: bool) -> str:
    """A value set in the last bits of such a number needs no conversion, and of what is then more or less than it is the same number is subtracted.

    in_order: both values of a byte go to neighbours of one register, a byte at a time; else PTX takes four bytes, and has those in the low halves together.
    """
    bits = _BITS[dtype]
    joined, table, sign = ("^", "0x6A", 8) if signed else ("|", "0xEA", 0)
    base = bits.base + sign
    known = [
        f"mov.b32 base, 0x{base * _TWICE:08X};",
        f"mov.b32 one, 0x{bits.one * _TWICE:08X};",
        f"mov.b32 less, 0x{(base ^ 0x8000) * _TWICE:08X};",
    ]
    if in_order:
        asm = _asm([
            ".reg .b32 both, base, one, less;",
            *known,
            "mul.lo.u32 both, $2, 0x1001;  // the high half 16 bits from the low one",
            f"lop3.b32 both, both, 0x000F000F, base, {table};",
            f"fma.rn.{bits.kind} both, both, one, less;",
            "mov.b32 {$0, $1}, both;",
        ])  # fmt: skip
        taken = '"=h,=h,r", [x.to(tl.int32)]', 1
    else:
        names = ("even0", "even1", "odd0", "odd1")
        asm = _asm([
            f".reg .b32 {', '.join(names)}, base, one, less;",
            *known,
            "prmt.b32 even0, $4, 0, 0x3120;  // neighbours 16 bits apart",
            *(f"shr.u32 {name}, even0, {by};" for name, by in (("even1", 8), ("odd0", 4), ("odd1", 12))),
            *(f"lop3.b32 {name}, {name}, 0x000F000F, base, {table};" for name in names),
            *(f"fma.rn.{bits.kind} ${i}, {name}, one, less;" for i, name in enumerate(names)),
        ])  # fmt: skip
        taken = '"=r,=r,=r,=r,r", [x]', 4
    return f'''@triton.jit
def {SPLIT_BYTES}(x, PTX: tl.constexpr):
    # the last bits of {bits.first} count by ones, so that no value is converted
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            """
            {asm}
            """,
            {taken[0]}, dtype=(tl.{dtype.triton}, tl.{dtype.triton}), is_pure=True, pack={taken[1]},
        )
    else:
        x = x.to(tl.uint16)
        even = ((x & 15) {joined} 0x{base:04X}).to(tl.{dtype.triton}, bitcast=True) - {bits.first + sign}.0
        odd = ((x >> 4) {joined} 0x{base:04X}).to(tl.{dtype.triton}, bitcast=True) - {bits.first + sign}.0
    return even, odd
'''


def _widened(dtype: DType) -> str:
    """As `_split` has it. The last bits of 128 in bf16 are seven: of the eighth another number is subtracted, 256 where it is set."""
    bits = _BITS[dtype]
    spread = f"prmt.b32 low, $1, 0x{bits.base * _TWICE:08X}, 0x5150;  // neighbours 16 bits apart"
    if dtype == BF16:
        lines = [
            ".reg .b32 low, less;",
            spread,
            "and.b32 less, low, 0xFF80FF80;",
            "and.b32 low, low, 0xFF7FFF7F;",
            f"sub.rn.{bits.kind} $0, low, less;",
        ]
    else:
        lines = [
            ".reg .b32 low, less;",
            f"mov.b32 less, 0x{(bits.base + 128) * _TWICE:08X};",
            spread,
            "xor.b32 low, low, 0x00800080;",
            f"sub.rn.{bits.kind} $0, low, less;",
        ]
    return f'''@triton.jit
def {WIDENED_BYTES}(x, PTX: tl.constexpr):
    # the last bits of {bits.first} count by ones, so that no value is converted
    if PTX:
        x = tl.inline_asm_elementwise(
            """
            {_asm(lines)}
            """,
            "=r,r", [x], dtype=tl.{dtype.triton}, is_pure=True, pack=2,
        )
    else:
        x = x.to(tl.{dtype.triton})
    return x
'''
