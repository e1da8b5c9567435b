"""Convolutions with a kernel of one element are products, with a row an element of an image: when they are, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epigen.runtime.arguments import process_precision

CHANNELS_LAST = "its channels do not lie side by side in memory: memory_format=torch.channels_last, of the model and of its input, puts them there"


def rows_first(rank: int) -> list[int]:
    """The dimensions of [N, C, H, W] in the order [N, H, W, C]."""
    return [0, *range(2, rank), 1]


def channels_second(rank: int) -> list[int]:
    """The dimensions of [N, H, W, C] in the order [N, C, H, W]."""
    return [0, rank - 1, *range(1, rank - 1)]


def precision() -> str:
    """What this process has chosen for convolutions of fp32, as `process_precision` has it for products."""
    backend: Any = torch.backends.cudnn
    return "tf32" if backend.conv.fp32_precision == "tf32" else "ieee"


def why_no_product(weight: torch.Tensor, stride: Any, padding: Any, groups: Any, transposed: bool = False) -> str:
    """Why a convolution is no product of its channels; "" where it is one. Its memory and its precision are not looked at."""
    kernel = list(weight.shape[2:])
    if transposed or groups != 1 or any(extent != 1 for extent in kernel):
        return f"a {'transposed ' * transposed}convolution with a kernel of {_times(kernel)}" + (f" in {groups} groups" if groups != 1 else "")
    steps, borders = _listed(stride), _listed(padding)
    if any(step != 1 for step in steps) or any(border not in (0, "valid", "same") for border in borders):
        return f"a convolution of stride {_times(steps)} and padding {_times(borders)}, whose rows are not those of its input"
    return ""


def why_not_as_fast(x: torch.Tensor) -> str:
    """Why a product of x takes longer than the convolution would, or is rounded otherwise: in fp32 each has a precision of its own. "" where it does not."""
    if x.dtype != torch.float32 or not x.is_cuda or process_precision() == precision():
        return ""
    one, other = ("TF32", "full fp32") if precision() == "tf32" else ("full fp32", "TF32")
    return f"convolutions are in {one} here, and products in {other}: torch.backends.cudnn.conv and torch.backends.cuda.matmul have an fp32_precision each"


def _listed(extents: Any) -> Sequence[Any]:
    return extents if isinstance(extents, tuple | list) else [extents]


def _times(extents: Sequence[Any]) -> str:
    """Those that vary as they are in the first call."""
    return "x".join(str(x.node.hint if isinstance(x, torch.SymInt) and x.node.has_hint() else x) for x in extents)
