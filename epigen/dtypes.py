"""The dtype table: bits, range and rounding, and each dtype's spelling in Triton and torch.

Pure data: neither torch nor Triton is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

FAST_ACCUM = "fast_accum"
"""Of fp8 operands: Hopper's tensor cores add up all of k by themselves, in about 14 bits. By default each sum of up to 128 products is added in fp32."""

_FP32_PRECISIONS = ("ieee", "tf32")

PRECISIONS = (*_FP32_PRECISIONS, FAST_ACCUM)
"""How products are taken: of fp32 operands the first two, of fp8 operands the last."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    name: epigen's spelling. triton, torch: attribute names in `triton.language` and `torch`.
    largest: largest finite value. epsilon: spacing of the floats just above 1 (0 for integers).
    smallest: smallest positive value, subnormals counted.
    """

    name: str
    bits: int
    kind: str  # "float" or "int"
    triton: str
    torch: str
    largest: float
    epsilon: float = 0.0
    smallest: float = 0.0

    def __str__(self) -> str:
        return self.name

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_fp8(self) -> bool:
        return self.is_float and self.bits == 8

    def precision(self, given: str) -> str:
        """What of a precision decides how operands of this dtype are multiplied; "" where it is none of theirs."""
        return given if given in (_FP32_PRECISIONS if self.name == "fp32" else (FAST_ACCUM,) if self.is_fp8 else ()) else ""


FP32 = DType("fp32", 32, "float", "float32", "float32", 3.4028234663852886e38, 2.0**-23, 2.0**-149)
FP16 = DType("fp16", 16, "float", "float16", "float16", 65504.0, 2.0**-10, 2.0**-24)
BF16 = DType("bf16", 16, "float", "bfloat16", "bfloat16", 3.3895313892515355e38, 2.0**-7, 2.0**-133)
FP8E4M3 = DType("fp8e4m3", 8, "float", "float8e4nv", "float8_e4m3fn", 448.0, 2.0**-3, 2.0**-9)
FP8E5M2 = DType("fp8e5m2", 8, "float", "float8e5", "float8_e5m2", 57344.0, 2.0**-2, 2.0**-16)
FP64 = DType("fp64", 64, "float", "float64", "float64", 1.7976931348623157e308, 2.0**-52, 2.0**-1074)  # the reference's alone: no kernel computes in it
INT8 = DType("int8", 8, "int", "int8", "int8", 127.0)
INT32 = DType("int32", 32, "int", "int32", "int32", 2147483647.0)
INT64 = DType("int64", 64, "int", "int64", "int64", 2.0**63)
UINT8 = DType("uint8", 8, "int", "uint8", "uint8", 255.0)  # a number of an input; of a packed mask eight bits
INT4 = DType("int4", 4, "int", "int8", "int8", 7.0)  # of no tensor: two of them are one byte of uint8
UINT4 = DType("uint4", 4, "int", "uint8", "uint8", 15.0)
BOOL = DType("bool", 8, "int", "int1", "bool", 1.0)

FP32_TINY = 2.0**-126
"""Smallest normal fp32 number. Triton types a smaller constant as fp64, and GPUs may flush a smaller result to zero."""

OPERANDS = (FP32, FP16, BF16, FP8E4M3, FP8E5M2, INT8)
"""What `a` and `b` may hold, and what `cast` may name."""

PACKED = {t.name: t for t in (INT4, UINT4)}
"""What an operand b of uint8 may hold two of in each byte, by the names that programs call them."""

WEIGHTS = (INT8, UINT8, FP8E4M3, FP8E5M2)
"""What `b` may hold beside an `a` of more bits, as whose dtype it is then multiplied. fp32, fp16 and bf16 have each of their values."""


def multiplied_as(a: DType, b: DType) -> DType:
    """The dtype in which operand b is multiplied beside such an a: its own, or that of a where b is a narrower weight, converted as it is loaded."""
    return a if b in WEIGHTS and a.is_float and a.bits > b.bits else b


def right_operand(a: DType, weight: DType | None, packed: bool) -> DType:
    """The dtype of b: that of a weight of fewer bits, where one is named; else a's own, or bytes where the program reads two values in each."""
    return weight or (UINT8 if packed else a)


INPUTS = (*OPERANDS, BOOL, UINT8, INT32, INT64)
"""What inputs of the epilogue may hold. It computes in fp32, so booleans are 0 and 1, and integers past 2^24 are rounded to 24 bits, as torch's own conversion does."""

ALL = INPUTS

_ALIASES = {
    "float32": FP32, "float": FP32, "float16": FP16, "half": FP16, "bfloat16": BF16,
    "float8_e4m3fn": FP8E4M3, "float8_e5m2": FP8E5M2,
}  # fmt: skip
BY_NAME: dict[str, DType] = {t.name: t for t in OPERANDS} | _ALIASES
WEIGHT_BY_NAME: dict[str, DType] = {t.name: t for t in WEIGHTS}
BY_TORCH: dict[str, DType] = {f"torch.{t.torch}": t for t in ALL}
"""From `str(tensor.dtype)` to the row, so that the table needs no torch."""
BY_TORCH_ON_CPU = BY_TORCH | {"torch.float64": FP64}
"""The same of what the reference computes with, for torch.autograd.gradcheck and those who want to know what is exact."""
