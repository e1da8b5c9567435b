"""Weights of few bits as checkpoints hold them, read as one form: whole numbers or fp8, with a scale and at times a zero point for each group along k.

Sources: AutoGPTQ's and GPTQModel's `QuantLinear` (`gptq`), AutoAWQ's `WQLinear_GEMM` (`awq`), compressed-tensors' `pack-quantized`, which LLM Compressor and vLLM
write and read, and torchao's tensors. All of a layer's tensors stay on the device where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epigen.errors import CallError


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[n, k] = (values[n, k] - zero[k // group, n]) * scale[k // group, n].

    values: int8 [N, K], or fp8 of 8 bits. bits: 4 or 8, of a value: those of 4 are -8 to 7. scale: [ceil(K / group), N]. zero: int16 of that shape; None where all are 0.
    group: elements along k that share a scale, K for one a column. order: int64 [K] where input column order[k] is multiplied by values[:, k]; None where each has its own.
    """

    values: Tensor
    bits: int
    scale: Tensor
    zero: Tensor | None
    group: int
    order: Tensor | None = None

    def dequantized(self) -> Tensor:
        """The weight as torch's linear takes it: fp32 [N, K], the columns in the input's order."""

        def along_k(groups: Tensor) -> Tensor:
            return groups.float().repeat_interleave(self.group, 0)[: self.values.shape[1]].t()

        weight = self.values.float() if self.zero is None else self.values.float() - along_k(self.zero)
        weight = weight * along_k(self.scale)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)


def gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, bits: int = 4, zeros_less_one: bool = True) -> QuantizedWeight:
    """A layer of a GPTQ checkpoint.

    qweight: int32 [K * bits / 32, N], the lowest bits first along k. qzeros: int32 [groups, N * bits / 32], likewise along n. scales: [groups, N]. g_idx: [K], the group
    of each input column; with "act order" they are not in a row, and the weight's columns are sorted by them. zeros_less_one: whether a zero point is stored less 1, as
    all but `gptq_v2` checkpoints do. Raises CallError where a shape does not follow from the others.
    """
    values = _unpacked(qweight, bits, 0)
    zero = _unpacked(qzeros, bits, 1)[:, : values.shape[1]] + int(zeros_less_one)
    group = _group(values, zero, scales)
    _demand(
        g_idx is None or g_idx.shape == values.shape[:1], f"g_idx has shape {list(() if g_idx is None else g_idx.shape)}, and qweight {values.shape[0]} rows"
    )
    order = _order(g_idx, group)
    return _signed((values if order is None else values[order]).t(), bits, scales, zero, group, order)


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, bits: int = 4) -> QuantizedWeight:
    """A layer of an AWQ checkpoint, version `gemm`.

    qweight: int32 [K, N / 8], of eight columns the even ones in the lower half of a word. qzeros: int32 [groups, N / 8], likewise. scales: [groups, N]. Raises CallError for other
    than 4 bits, and where a shape does not follow from the others.
    """
    _demand(bits == 4, f"AWQ packs 4 bits, not {bits}")
    values, zero = (_even_first(_unpacked(words, bits, 1)) for words in (qweight, qzeros))
    return _signed(values.t(), bits, scales, zero, _group(values, zero, scales), None)


def compressed_tensors(state: Mapping[str, Tensor], *, bits: int = 4) -> QuantizedWeight:
    """A layer of a checkpoint in the format `pack-quantized`.

    state: weight_packed int32 [N, ceil(K * bits / 32)], weight_scale [N, groups], weight_shape [2], and where they are: weight_zero_point int32 [ceil(N * bits / 32), groups], packed along
    n, and weight_g_idx [K]. Raises CallError where one is missing or has another shape.
    """
    missing = [name for name in ("weight_packed", "weight_scale", "weight_shape") if name not in state]
    _demand(not missing, f"a layer of pack-quantized has {', '.join(missing)} too, and these were given: {', '.join(state)}")
    n, k = map(int, state["weight_shape"])
    values = _unpacked(state["weight_packed"], bits, 1)[:, :k]
    _demand(values.shape == (n, k), f"weight_packed holds {list(values.shape)} values, and weight_shape says {[n, k]}")
    scale = _matrix(state["weight_scale"], "weight_scale").t()
    groups = scale.shape[0]
    _demand(scale.shape[1] in (1, n), f"weight_scale has {scale.shape[1]} rows, and weight_packed {n}")
    _demand(k % groups == 0, f"{groups} groups do not divide the {k} columns of weight_packed")
    g_idx = state.get("weight_g_idx")
    _demand(g_idx is None or g_idx.shape == (k,), f"weight_g_idx has shape {list(() if g_idx is None else g_idx.shape)}, and the weight {k} columns")
    group = k // groups
    order = _order(None if g_idx is None or bool((g_idx < 0).any()) else g_idx, group)  # below 0 where groups are in a row
    values = values if order is None else values[:, order]
    zero = state.get("weight_zero_point")
    middle = 1 << (bits - 1)
    points = torch.full_like(scale, middle, dtype=torch.int32) if zero is None else _unpacked(zero, bits, 0)[:n].t()
    _demand(points.shape == scale.shape, f"weight_zero_point holds {list(points.t().shape)} values for scales of {list(scale.t().shape)}")
    return _signed(values, bits, scale.expand(groups, n), points.expand(groups, n), group, order)


def of_torchao(weight: object) -> bool:
    """Whether a weight is of a class of torchao's."""
    return type(weight).__module__.partition(".")[0] == "torchao"


def torchao(weight: Tensor) -> QuantizedWeight:
    """A weight that torchao's `quantize_` left: Int8Tensor, IntxUnpackedToInt8Tensor or Float8Tensor, [N, K].

    Raises CallError for another class, where activations are quantised too, and where a block has more than one row, unless it is the whole weight.
    """
    kind = type(weight).__name__
    of_whole_numbers = kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor")
    _demand(
        of_whole_numbers or kind == "Float8Tensor",
        f"a weight of the class {kind} cannot be read: torchao's Int8WeightOnlyConfig, IntxWeightOnlyConfig and Float8WeightOnlyConfig leave such that can",
    )
    by_activations = [name for name in ("act_quant_kwargs", "activation_quantization", "act_pre_scale") if getattr(weight, name, None) is not None]
    _demand(not by_activations, f"torchao quantises or scales the layer's input too ({', '.join(by_activations)}): leave the layer to torchao")
    (n, k), block = weight.shape, [int(size) for size in weight.block_size]  # type: ignore[attr-defined]
    _demand(block[0] in (1, n), f"a scale for {block[0]} rows together is neither one a row nor one for all")
    scale, zero = (None if groups is None else groups.expand(n, -(-k // block[1])).t() for groups in (weight.scale, getattr(weight, "zero_point", None)))  # type: ignore[attr-defined]
    assert scale is not None
    if zero is not None:
        _demand(not zero.dtype.is_floating_point, "zero points that are no whole numbers cannot be read")
        zero = zero.to(torch.int16) if bool(zero.any()) else None
    bits = 4 if str(getattr(weight, "target_dtype", "")) == "torch.int4" else 8
    return QuantizedWeight(weight.qdata, bits, scale.contiguous(), None if zero is None else zero.contiguous(), block[1])  # type: ignore[attr-defined]


def _group(values: Tensor, zero: Tensor, scales: Tensor) -> int:
    """How many neighbours along k share a scale. values: [K, N]. zero: the zero points, of the scales' shape."""
    (k, n), groups = values.shape, _matrix(scales, "scales").shape[0]
    _demand(scales.shape[1] == n, f"scales have {scales.shape[1]} columns and qweight has {n}")
    _demand(zero.shape == scales.shape, f"qzeros hold {list(zero.shape)} zero points for scales of {list(scales.shape)}")
    _demand(k % groups == 0, f"{groups} groups do not divide the {k} rows of qweight")
    return k // groups


def _order(g_idx: Tensor | None, group: int) -> Tensor | None:
    """The input's columns, those of a group side by side; None where they lie so. g_idx: the group of each, if any is told."""
    if g_idx is None or torch.equal(g_idx.long(), torch.arange(len(g_idx), device=g_idx.device) // group):
        return None
    sizes = torch.bincount(g_idx.long(), minlength=len(g_idx) // group)
    _demand(bool((sizes == group).all()), f"the groups of g_idx are of {sorted(set(sizes.tolist()))} columns, where all of {group} are wanted")
    return torch.argsort(g_idx.long(), stable=True)


def _signed(values: Tensor, bits: int, scale: Tensor, zero: Tensor, group: int, order: Tensor | None) -> QuantizedWeight:
    """Of values and zero points from 0 on, [N, K] and [groups, N]: both less half of their range, which takes a symmetric weight's zero points away."""
    middle = 1 << (bits - 1)
    zero = (zero - middle).to(torch.int16)
    return QuantizedWeight(
        (values - middle).to(torch.int8).contiguous(), bits, scale.contiguous(), zero.contiguous() if bool(zero.any()) else None, group, order
    )


def _unpacked(words: Tensor, bits: int, along: int) -> Tensor:
    """The values from 0 on that int32 words hold along a dimension, the lowest bits first: int32."""
    _demand(bits in (4, 8), f"values of 4 or 8 bits can be read, not of {bits}")
    _demand(_matrix(words, "packed values").dtype == torch.int32, f"packed values are int32, not {words.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    apart = (words.movedim(along, -1)[..., None] >> shifts) & ((1 << bits) - 1)
    return apart.flatten(-2).movedim(-1, along)


def _even_first(values: Tensor) -> Tensor:
    """Of each eight columns, stored as 0, 2, 4, 6, 1, 3, 5, 7, in order."""
    rows, columns = values.shape
    return values.view(rows, columns // 8, 2, 4).transpose(2, 3).reshape(rows, columns)


def _matrix(given: Tensor, name: str) -> Tensor:
    _demand(given.dim() == 2, f"{name} have two dimensions, and {list(given.shape)} was found")
    return given


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CallError(otherwise)
