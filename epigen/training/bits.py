"""Packed masks in graphs of torch's: operations that stand for the language's `bitmask` and `bits`, and what each is in torch's own.

`aten` reads them as parts of a program. What no program takes is written out by `whole`, for Inductor to fuse. A mask lies as a program's: uint8 [..., N / 8],
rows a multiple of 16 bytes apart, bit n % 8 of byte n // 8. N is a multiple of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epigen.ir import reference


def bitmask(condition: Tensor) -> Tensor:
    """condition: bool [..., N]. Returns it packed."""
    return reference.pack(condition)


def where_bits(bits: Tensor, x: Tensor, y: Tensor | None = None) -> Tensor:
    """bits: a packed mask, uint8 [..., N / 8]. x, y: [..., N]. Returns x where a bit is set, else y, or 0."""
    condition = reference.unpack(bits, 8 * bits.shape[-1])
    return torch.where(condition, x, 0 if y is None else y)


def tied(x: Tensor, _bits: Tensor) -> Tensor:
    """x, as what needs the mask: torch computes again in the backward what the forward's results do not need, and would pack there. See `joint`."""
    return x.clone()
