"""Integers of 4 bits, two in a byte: of two neighbours the first, whose number is even, has the low bits.

Of tensors, by their own methods: the reference calls this, and files that stand alone have its text.
"""

from __future__ import annotations

from typing import Any


def unpack(packed: Any, dim: int, signed: bool) -> Any:
    """The integers, int32: from -8 to 7 in two's complement, or from 0 to 15. packed: uint8, with half as many along `dim`, which is not negative."""
    places = packed.new_tensor([0, 4]).int().reshape([2] + [1] * (packed.dim() - dim - 1))
    integers = ((packed.int().unsqueeze(dim + 1) >> places) & 15).flatten(dim, dim + 1)
    return (integers ^ 8) - 8 if signed else integers
