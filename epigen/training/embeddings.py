"""The gradient of a small table whose rows many indices share, such as T5's relative positions: a product with what is 1 where an index names a row.

Inductor adds each index's gradient to its row by an atomic addition, and those to one row wait for one another: for T5's 32 rows and a million indices,
25 ms, where torch's own kernel, which sorts, takes 1.1 and the product 0.1 to 0.4 (H100, torch 2.11, 2026-11).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table

from epigen.training.aten import size_hint

_CROWDED = 1024
"""Indices a row, in the mean: from so many on the product is faster than atomic additions, for at most 256 it is slower in fp32 (measured as above)."""
_MOST_ROWS, _MOST_BESIDE = 128, 4
"""Rows, alone and as a multiple of their width: what names them takes so many times the memory of the gradient that arrives."""
_DEVICES = ("cuda",)
GRADIENT: Any = torch.ops.aten.embedding_dense_backward.default


def gradient(arriving: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool) -> Any:
    """[rows, W], of [..., W] and [...]; as `GRADIENT`, whose decomposition it is. A NaN or an infinity that arrives makes its column NaN in all rows."""
    if (
        by_frequency
        or arriving.device.type not in _DEVICES
        or arriving.dtype not in (torch.float16, torch.bfloat16, torch.float32)
        or not _crowded(size_hint(rows), size_hint(indices.numel()), size_hint(arriving.shape[-1]))
    ):
        return select_decomp_table()[GRADIENT](arriving, indices, rows, padding, by_frequency)
    named = torch.arange(rows, device=indices.device)
    if padding >= 0:
        named = torch.where(named == padding, -1, named)
    hot = indices.reshape(-1, 1) == named
    parts = _parts(arriving.reshape(-1, arriving.shape[-1]))
    summed = _product(hot.to(parts[0].dtype).t(), torch.cat(parts, 1) if len(parts) > 1 else parts[0])
    return sum(summed.split(arriving.shape[-1], 1)).to(arriving.dtype)


def _crowded(rows: int | None, indices: int | None, width: int | None) -> bool:
    """None: known at run time alone."""
    if not rows or not indices or not width:
        return False
    return rows <= min(_MOST_ROWS, _MOST_BESIDE * width) and indices >= _CROWDED * rows


def _parts(x: Tensor) -> list[Tensor]:
    """What sums up to x and is multiplied without being rounded, whichever precision fp32 products have: three numbers of bf16 have all 24 bits of one.

    Each is what remains with its lower bits cut off, which are those of a bf16 at once: a conversion to bf16 and back Inductor leaves out.
    """
    if x.dtype != torch.float32:
        return [x]
    parts: list[Tensor] = []
    for _ in range(3):
        upper = (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
        parts.append(upper.to(torch.bfloat16))
        x = x - upper
    return parts


def _product(x: Tensor, y: Tensor) -> Tensor:
    """In fp32, for there are many terms."""
    return torch.mm(x, y, out_dtype=torch.float32) if x.is_cuda else x.float() @ y.float()
