"""The vendor library's product with an fp32 (int8: int32) result: what the `library` schedule puts its epilogue after."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """a [M, K] @ b [K, N] -> [M, N] fp32, or int32 for int8 operands.

    precision: "ieee" or "tf32", for fp32 operands; the process's own setting is put back afterwards. fp8 is widened to fp16,
    which holds every fp8 value, so the products are exact.
    """
    if torch.is_autocast_enabled(a.device.type):  # it would round fp32 operands to half precision
        with torch.autocast(a.device.type, enabled=False):
            return product(a, b, precision)
    m, n = a.shape[0], b.shape[1]
    if a.dtype == torch.int8:
        return _int8(a, b)
    if 0 in (m, n, a.shape[1]):
        return torch.zeros((m, n), dtype=torch.float32, device=a.device)
    if a.dtype == torch.float32:
        return _fp32(a, b, precision)
    if a.element_size() == 1:
        a, b = a.to(torch.float16), b.to(torch.float16)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _fp32(a: Tensor, b: Tensor, precision: str) -> Tensor:
    wanted = "highest" if precision == "ieee" else "high"
    before = torch.get_float32_matmul_precision()
    if (before == "highest") == (wanted == "highest"):
        return a @ b
    torch.set_float32_matmul_precision(wanted)
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)


def _int8(a: Tensor, b: Tensor) -> Tensor:
    """torch._int_mm wants more than 16 rows, and cuBLASLt refuses extents off its tiles: pad with zeros, which change no sum."""
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    if not a.is_cuda or 0 in (m, n, k):
        return (a.double() @ b.double()).to(torch.int32)
    a = torch.nn.functional.pad(a, (0, -k % 32, 0, -m % 32))
    b = torch.nn.functional.pad(b, (0, -n % 32, 0, -k % 32))
    return torch._int_mm(a.contiguous(), b.contiguous())[:m, :n]
