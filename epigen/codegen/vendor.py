"""Which programs the vendor's library computes whole, by a kernel of its own: the product alone, which the `library` schedule then calls, and
generates nothing.

What of torch's adds an epilogue does not keep the numerics contract, fp32 sums that are rounded once (H200, torch 2.11, 2026-11):
`torch.addmm` rounds the product before it adds the bias where there is one row, and raises CUBLAS_STATUS_INVALID_VALUE for some extents and
strides of `out`; `torch._addmm_activation` turns NaN into 0 by relu in some fp32 problems, and takes gelu in two steps, of a rounded value,
where cuBLASLt does not take the problem.
"""

from __future__ import annotations

from epigen.codegen.spec import ACC, KernelSpec
from epigen.dtypes import BF16, FP16, FP32

_DTYPES = (FP16, BF16, FP32)


def whole(spec: KernelSpec) -> bool:
    """Whether a program is the product alone, in the dtype of its operands."""
    operands = spec.signature.a
    alone = not spec.pointwise and not spec.finishes and [(s.value, s.dtype) for s in spec.stores] == [(ACC, operands)]
    return alone and operands in _DTYPES
