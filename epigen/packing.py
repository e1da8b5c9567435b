"""Weights of 4 bits as programs read them, `int4(b)` and `uint4(b)`: two in a byte, of neighbours along one dimension the first in the low bits."""

from __future__ import annotations

import torch
from torch import Tensor

from epigen.errors import CallError
from epigen.ir import nibbles


def pack_int4(values: Tensor, dim: int = -1, signed: bool = True) -> Tensor:
    """Two integers in a byte: uint8, with half as many elements along `dim`.

    values: of any integer dtype, from -8 to 7, or from 0 to 15 with signed=False. dim: along which neighbours share a byte, the first of them, whose number
    is even, in the low bits. A Linear's weight [N, K] is packed along K, the last one: `epigen.compile("dot(a, int4(b) * s[n])")(x, packed.t(), s=scales)`.
    Raises CallError for other values, and for an odd number along `dim`.

    >>> import torch, epigen
    >>> packed = epigen.pack_int4(torch.tensor([[1, -1, 7, -8]]))
    >>> packed, epigen.unpack_int4(packed)
    (tensor([[241, 135]], dtype=torch.uint8), tensor([[ 1, -1,  7, -8]], dtype=torch.int8))
    """
    if values.is_floating_point() or values.is_complex() or values.dim() == 0:
        raise CallError(f"what is packed is {values.dtype} {list(values.shape)}, and integers with a dimension were expected: round them first")
    dim = _dim(dim, values)
    least, most = (-8, 7) if signed else (0, 15)
    if values.numel() and not least <= int(values.min()) <= int(values.max()) <= most:
        raise CallError(f"integers from {least} to {most} have 4 bits, and these are from {int(values.min())} to {int(values.max())}")
    if values.shape[dim] % 2:
        raise CallError(f"two neighbours share a byte, and along dimension {dim} there are {values.shape[dim]}: pad one")
    low, high = ((values.to(torch.int32) & 15).unflatten(dim, (-1, 2)).select(dim + 1, place) for place in (0, 1))
    packed: Tensor = (low | (high << 4)).to(torch.uint8)
    return packed


def unpack_int4(packed: Tensor, dim: int = -1, signed: bool = True) -> Tensor:
    """The inverse of `pack_int4`: int8, or uint8 with signed=False. packed: uint8. Raises CallError for another dtype."""
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise CallError(f"what is unpacked is {packed.dtype} {list(packed.shape)}, and uint8 with a dimension was expected")
    integers: Tensor = nibbles.unpack(packed, _dim(dim, packed), signed)
    return integers.to(torch.int8 if signed else torch.uint8)


def _dim(dim: int, t: Tensor) -> int:
    if not -t.dim() <= dim < t.dim():
        raise CallError(f"dim is {dim}, and the tensor has {t.dim()} dimensions")
    return dim % t.dim()
