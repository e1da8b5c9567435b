"""The shape of a problem: M, N and K of a product, after how many of it there are where operands have leading dimensions."""

from __future__ import annotations

Shape = tuple[int, int, int] | tuple[int, int, int, int]
"""M, N, K; of a batch the number of its products, M, N, K. `shape[-3:]` is M, N, K of each either way."""


def products(shape: Shape) -> int:
    """How many products there are: 1 where operands are matrices."""
    return shape[0] if len(shape) == 4 else 1


def each(shape: Shape, m: int, n: int, k: int) -> Shape:
    """As many products of other extents."""
    return (shape[0], m, n, k) if len(shape) == 4 else (m, n, k)


def extents(shape: Shape) -> str:
    """As people write it: 4096x4096x1024, or 64x1024x1024x128 of 64 products."""
    return "x".join(map(str, shape))


def power_of_two(extent: int) -> int:
    """The least that is no smaller."""
    return 1 << max(0, extent - 1).bit_length()
