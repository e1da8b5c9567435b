"""The vendor library's kernels: the product with an fp32 (int8: int32) result that the `library` schedule puts its epilogue after, and that
which is a whole program.

All add in fp32. That is a matter of the process's own settings, which are put back after each call.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from epigen.codegen.spec import EXACT_INT8, WIDE
from epigen.dtypes import FAST_ACCUM
from epigen.ir import reference
from epigen.runtime.arguments import process_precision

_SETTINGS = threading.RLock()
"""Held from changing a setting to putting it back: of two threads, the second would take the first one's value for the process's own."""

_REDUCED = {torch.float16: "allow_fp16_reduced_precision_reduction", torch.bfloat16: "allow_bf16_reduced_precision_reduction"}
"""Whether parts of a product that is split along k may be rounded before they are added. They may, unless the user says otherwise."""


def product(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """a [M, K] @ b [K, N] -> [M, N] fp32, or int32 for int8 operands; with leading dimensions, which broadcast, as many products.

    precision: "ieee" or "tf32", for fp32 operands. fp8 is widened to fp16, which holds every fp8 value, so the products are exact.
    """
    if a.dim() > 2 or b.dim() > 2:
        return products(a, b, precision)
    if torch.is_autocast_enabled(a.device.type):  # it would take the product in half precision
        with torch.autocast(a.device.type, enabled=False):
            return product(a, b, precision)
    m, n, (a, b) = a.shape[0], b.shape[1], map(_near, (a, b))
    if a.dtype == torch.int8:
        return _int8(a, b)
    if 0 in (m, n, a.shape[1]):
        return torch.zeros((m, n), dtype=torch.float32, device=a.device)
    if a.element_size() == 1:
        a, b = a.to(torch.float16), b.to(torch.float16)
    with _sums_in_fp32(a.dtype, precision):
        if a.is_cuda and a.dtype != torch.float32:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a.float(), b.float())


def products(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """As `product`, of operands with leading dimensions, which broadcast: [..., M, N]."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    several = [_in_a_row(t, lead) for t in (a, b)]
    if not several[0].is_cuda or several[0].dtype not in _REDUCED or 0 in (*several[0].shape, *several[1].shape):
        results = [product(x, y, precision) for x, y in zip(*several, strict=True)]
        whole = (
            torch.stack(results)
            if results
            else torch.empty((0, a.shape[-2], b.shape[-1]), dtype=torch.int32 if a.dtype == torch.int8 else torch.float32, device=a.device)
        )
    else:
        with torch.autocast(a.device.type, enabled=False), _sums_in_fp32(a.dtype, precision):
            whole = torch.bmm(several[0], several[1], out_dtype=torch.float32)
    return whole.view(*lead, *whole.shape[1:])


def scaled_product(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """What programs of fp8 operands stand beside: torch's own product of them, [M, N] bf16, with a scale of 1 for each.

    precision: "fast_accum" is its use_fast_accum=True.
    It wants K and N to be multiples of 16, and rows of both along K. Of other operands it is `product`, which is exact, and takes more than twice the time.
    """
    aligned = a.dim() == 2 and a.shape[1] % 16 == 0 == b.shape[1] % 16 and a.stride(1) == 1 == b.stride(0)
    if not aligned or 0 in (*a.shape, *b.shape) or torch.float8_e4m3fn not in (a.dtype, b.dtype):
        return product(a, b, precision).bfloat16()
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=precision == FAST_ACCUM)


def compute(a: Tensor, b: Tensor, out: Tensor, precision: str) -> None:
    """Write a [M, K] @ b [K, N] to `out` [M, N], rounded once, of a program that is no more than that (`KernelSpec.bare_product`).

    All three of one dtype; with leading dimensions all of out's, to which those of a and b broadcast. precision: as for `product`.
    """
    if not out.is_cuda or max(out.stride()) >= WIDE:  # on the CPU torch says nothing of how it adds 16-bit products
        out.copy_(product(a, b, precision))
        return
    with _sums_in_fp32(out.dtype, precision):
        if out.dim() == 2:
            torch.mm(_near(a), _near(b), out=out)
        else:
            lead = out.shape[:-2]
            torch.bmm(_in_a_row(a, lead), _in_a_row(b, lead), out=_in_a_row(out, lead))


def _in_a_row(t: Tensor, lead: Sequence[int]) -> Tensor:
    """All matrices of a tensor, whose leading dimensions broadcast to these, along one dimension: a view, where they lie evenly."""
    return t.expand(*lead, *t.shape[-2:]).reshape(math.prod(lead), *t.shape[-2:])


def _near(t: Tensor) -> Tensor:
    """The same in rows less than 2^31 elements apart: cuBLAS takes no others."""
    return t if not t.is_cuda or max(t.stride()) < WIDE else t.clone(memory_format=torch.contiguous_format)


@contextmanager
def _sums_in_fp32(dtype: torch.dtype, precision: str) -> Iterator[None]:
    """dtype: of the operands."""
    with _SETTINGS:
        undo = _set(dtype, precision)
        try:
            yield
        finally:
            for put_back in undo:
                put_back()


def _set(dtype: torch.dtype, precision: str) -> list[Callable[[], None]]:
    """Returns what puts the settings back."""
    if dtype == torch.float32:
        return [] if process_precision() == precision else _set_precision(precision)
    matmul = torch.backends.cuda.matmul
    names = [_REDUCED[dtype], *["allow_fp16_accumulation"] * (dtype == torch.float16)]
    settings = [(name, value) for name in names if (value := getattr(matmul, name))]
    for name, _ in settings:
        setattr(matmul, name, False)
    return [functools.partial(setattr, matmul, name, value) for name, value in settings]


def _set_precision(precision: str) -> list[Callable[[], None]]:
    """Of fp32 products. By torch's older setting where that may still be read, lest the two disagree before the eyes of another thread's torch.compile."""
    backends: Any = torch.backends  # whose modules have the newer settings as properties
    above = ((backends.cuda.matmul, backends.fp32_precision), (backends.mkldnn.matmul, backends.mkldnn.fp32_precision))
    undo: list[Callable[[], None]] = []
    for newer, inherited in above:  # both of which the older one sets as well
        own = newer.fp32_precision
        # what is as the setting above it goes on following that
        undo.append(functools.partial(setattr, newer, "fp32_precision", "none" if own == inherited else own))
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the older and the newer settings disagree already
        backends.cuda.matmul.fp32_precision = precision
        return undo[:1]
    torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    return [functools.partial(torch.set_float32_matmul_precision, before), *undo]


_STEPS = 32
"""Of the extents that cuBLASLt multiplies int8 matrices of."""
_LONGEST = EXACT_INT8 // _STEPS * _STEPS
_PADDED = 1 << 30
"""Bytes of an operand that grows more than twofold by being padded: of larger ones a part at a time, so that a column takes no 32 times its memory."""
_MOST = 1 << 22
"""Rows or columns at a time: cuBLASLt's int8 kernels were tried up to 2^25 (H100, CUDA 13.0)."""
_NARROW = 128
"""Below this k cuBLASLt multiplies two row-major int8 matrices wrongly: it refuses 65,504 rows and reads astray for results of 2^32 elements (H100, CUDA 13.0)."""


def _int8(a: Tensor, b: Tensor) -> Tensor:
    """[M, N] int32; sums past 2^31 wrap around."""
    if not a.is_cuda or 0 in (a.shape[0], *b.shape):
        return reference.int8_product(a, b)
    return _int8_in_parts(a, b)


def _int8_in_parts(a: Tensor, b: Tensor) -> Tensor:
    """torch._int_mm may saturate where a sum leaves int32, and so is given parts along k in which none does; their sum wraps around."""
    k = min(a.shape[1], _LONGEST)
    strips = []
    for part in a.split(_at_a_time(a.shape[0], k), 0):
        tiles = []
        for beside in b.split(_at_a_time(b.shape[1], k), 1):
            parts = zip(part.split(_LONGEST, 1), beside.split(_LONGEST, 0), strict=True)
            tiles.append(functools.reduce(torch.add, (_padded_product(x, y) for x, y in parts)))
        strips.append(tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1))
    return strips[0] if len(strips) == 1 else torch.cat(strips)


def _at_a_time(extent: int, k: int) -> int:
    """How many rows or columns of `k` elements are padded together."""
    padded = -(-k // _STEPS) * _STEPS
    return min(extent if extent * padded <= max(_PADDED, 2 * extent * k) else _PADDED // padded, _MOST)


def _padded_product(a: Tensor, b: Tensor) -> Tensor:
    """torch._int_mm wants more than 16 rows, and cuBLASLt refuses extents off its tiles: pad with zeros, which change no sum."""
    (m, k), n = a.shape, b.shape[1]
    a = torch.nn.functional.pad(a, (0, -k % _STEPS, 0, -m % _STEPS))
    b = torch.nn.functional.pad(b, (0, -n % _STEPS, 0, -k % _STEPS))
    columns = b.t().contiguous().t() if b.shape[0] < _NARROW or b.t().is_contiguous() else b.contiguous()
    padded = _int_mm(a.contiguous(), columns)
    part = padded[:m, :n]
    return part if padded.numel() <= 2 * part.numel() else part.clone()  # a view of a row or a column would hold 32 times its memory, and several may wait


_int_mm: Callable[[Tensor, Tensor], Tensor] = torch._int_mm
