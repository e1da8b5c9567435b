"""2:4 sparse tensors without a GPU: dense matrices with their zeros, torch's tensors of them, and torch's products of those, which it has for CUDA alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass, sparse_semi_structured_to_dense_cutlass

from epigen.runtime.semi_structured import Compressed

CUTLASS, CUSPARSELT = SparseSemiStructuredTensorCUTLASS, SparseSemiStructuredTensorCUSPARSELT


def pruned(t: Tensor) -> Tensor:
    """The two larger ones of each four neighbours in a row, and 0 for the others."""
    order = t.float().abs().view(-1, 4).argsort(dim=-1, stable=True).argsort(-1).view(t.shape)
    return torch.where(order >= 2, t.float(), 0).to(t.dtype)


def both_ways(t: Tensor) -> Tensor:
    """The same of rows and of columns: of tiles of 4x4 two blocks of 2x2."""
    block = torch.eye(2).repeat_interleave(2, 0).repeat_interleave(2, 1)
    return (t.float() * block.repeat(t.shape[0] // 4, t.shape[1] // 4)).to(t.dtype)


def sparse(dense: Tensor, kind: Any = CUTLASS, transposed: bool = False) -> Any:
    """torch's tensor of a matrix that has its zeros. transposed: compressed along its columns too."""
    parts = [_compressed(t.contiguous(), kind) for t in (dense, dense.t())[: 1 + transposed]]
    made = Compressed(kind, tuple(dense.shape), *parts[0]).tensor()
    if transposed:
        made.packed_t, made.meta_t = parts[1]
    return made


def _compressed(dense: Tensor, kind: Any) -> tuple[Tensor, Tensor | None]:
    held = dense.view(torch.int8) if dense.element_size() == 1 else dense
    packed, meta = sparse_semi_structured_from_dense_cutlass(held)
    if kind is CUTLASS:
        return packed.view(dense.dtype), meta
    return torch.cat([packed.flatten(), meta.flatten().view(held.dtype)]).view(dense.dtype), None  # as long as cuSPARSELt's own


def _dense(compressed: Tensor, columns: int) -> Tensor:
    """What a tensor holds that stands for one of cuSPARSELt's."""
    held = compressed.view(torch.int8) if compressed.element_size() == 1 else compressed
    rows = held.numel() * 16 // (10 if held.dtype == torch.int8 else 9) // columns
    values, meta = held[: rows * columns // 2].view(rows, -1), held[rows * columns // 2 :]
    where = meta.view(torch.int32 if held.dtype == torch.int8 else torch.int16).view(rows, -1)
    return sparse_semi_structured_to_dense_cutlass(values, where).view(compressed.dtype)


def _rounded(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    sums = a.double() @ b.double()
    wanted = out_dtype or b.dtype
    return sums.clamp(-128, 127).to(wanted) if wanted == torch.int8 else sums.to(wanted)


def _by_cutlass(packed: Tensor, meta: Tensor, dense: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    # of 16 bits CUTLASS writes 16 bits whatever it is asked for
    assert out_dtype is None or (packed.dtype, out_dtype) == (torch.int8, torch.int32)
    assert 1 in dense.stride() and dense.shape[1] % (16 if packed.element_size() == 1 else 8) == 0
    assert packed.element_size() > 1 or dense.stride(0) == 1
    return _rounded(sparse_semi_structured_to_dense_cutlass(packed, meta), dense, out_dtype)


def _with_bias(bias: Tensor, packed: Tensor, meta: Tensor, dense: Tensor, **_: Any) -> Tensor:
    return (_by_cutlass(packed, meta, dense).double() + bias.double()[:, None]).to(dense.dtype)


def _by_cusparselt(
    compressed: Tensor, dense: Tensor, bias: Tensor | None = None, _alpha: Any = None, out_dtype: torch.dtype | None = None, transpose_result: bool = False, *_: Any, **__: Any
) -> Tensor:  # fmt: skip
    assert dense.is_contiguous() or dense.t().is_contiguous()  # else it reads astray
    assert dense.shape[1] % (16 if compressed.element_size() == 1 else 8) == 0 and dense.data_ptr() % 16 == 0
    assert out_dtype is None or compressed.element_size() == 1
    result = _rounded(_dense(compressed, dense.shape[0]), dense, out_dtype)
    result = result if bias is None else (result.double() + bias.double()[:, None]).to(result.dtype)
    return result.t().contiguous() if transpose_result else result


@contextmanager
def products() -> Iterator[None]:
    """torch's products of sparse tensors, for the CPU too."""
    library = torch.library.Library("aten", "IMPL")
    for name, run in (("_sparse_semi_structured_mm", _by_cutlass), ("_sparse_semi_structured_addmm", _with_bias), ("_cslt_sparse_mm", _by_cusparselt)):
        library.impl(name, run, "CPU")
    try:
        yield
    finally:
        library._destroy()
