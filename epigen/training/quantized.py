"""A linear layer whose weight has few bits: it is converted within the product, and stays as small as it is in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from epigen import packing
from epigen.checkpoints import QuantizedWeight, of_torchao, torchao
from epigen.dtypes import FP8E4M3, INT4, INT8, DType
from epigen.errors import CallError, unknown
from epigen.ir import reference
from epigen.lang.parser import parse
from epigen.lang.substitute import is_product, substituted
from epigen.lang.syntax import Name, Program, names_in, to_text
from epigen.runtime import semi_structured
from epigen.runtime.arguments import NO_SPARSE
from epigen.training import again, linear
from epigen.training.layer import Link, Value

KINDS = {"int8": INT8, "int4": INT4, "fp8": FP8E4M3}
"""What a weight can be rounded to."""

_SCALE, _ZERO = "weight_scale", "weight_zero"


class QuantizedLinear(nn.Module):
    """`torch.nn.Linear` of a weight in int8, int4 or fp8 (e4m3), and what follows it, in one kernel.

    weight[n, k] = (value[n, k] - zero[k // group, n]) * scale[k // group, n]. The weight is frozen: gradients flow to the input, the bias and the epilogue's inputs.
    Made by `from_linear`, which rounds a weight, or by `from_weight`, which takes one that a checkpoint holds rounded (`epigen.checkpoints`).

    Buffers: qweight [N, K], int8, or uint8 that holds the bits of fp8; of int4 uint8 [N, K / 2], as `epigen.pack_int4` packs. scale [ceil(K / group), N]. zero of that shape, or
    None. order int64 [K], the input's columns as the weight has them, or None. N and K are out_features and in_features.

    >>> import torch, epigen
    >>> epigen.nn.QuantizedLinear.from_linear(torch.nn.Linear(256, 64), "int4", group=128)
    QuantizedLinear(in_features=256, out_features=64, bias=True, kind='int4', group=128)
    """

    qweight: Tensor
    scale: Tensor
    bias: nn.Parameter | None
    zero: Tensor | None
    order: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, kind: str = "int8", group: int | None = None, bias: bool = True, *, zero_points: bool = False, ordered: bool = False,
        epilogue: str | None = None, tune: str | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        """group: neighbours along k that share a scale; None: all of a column. zero_points, ordered: whether there are such buffers. epilogue: a program of mm, which is the
        product with the weight as it is computed here; by default mm, and mm + bias with a bias. Its other inputs are given at each call. dtype: of scale, zero and bias.
        The buffers hold zeros until a state dict is loaded. Raises CallError for what does not fit."""
        if _dtype(kind) == INT4 and in_features % 2:
            raise CallError(f"in_features={in_features}: an int4 weight holds two neighbours in a byte, and needs an even number of them")
        if group is not None and group < 1:
            raise CallError(f"group={group}: a scale is for one element at least, or for a column with group=None")
        text = epilogue if epilogue is not None else "mm + bias" if bias else "mm"
        names = linear.names_of_inputs(text)
        if taken := {_SCALE, _ZERO}.intersection(names):
            raise CallError(f"the epilogue {text!r} reads {', '.join(sorted(taken))}, which are names of the layer's own: choose others")
        if bias != ("bias" in names):
            raise CallError(f"bias={bias}, and the epilogue {text!r} {'does not read' if bias else 'reads'} a bias: make them agree")
        if "b" in names_in(*of_product(text, "mm").values):
            raise CallError(f"the epilogue {text!r} reads b, which holds the weight as it is rounded: write a program of mm, the product with the weight")
        super().__init__()
        self.in_features, self.out_features, self.kind, self.tune = in_features, out_features, kind, tune
        self.group = None if group is None or group >= in_features else group
        shape = (1 if self.group is None else -(-in_features // self.group), out_features)
        columns = in_features // 2 if kind == "int4" else in_features
        self.register_buffer("qweight", torch.zeros(out_features, columns, dtype=torch.int8 if kind == "int8" else torch.uint8, device=device))
        self.register_buffer("scale", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("zero", torch.zeros(shape, dtype=dtype, device=device) if zero_points else None)
        self.register_buffer("order", torch.arange(in_features, device=device) if ordered else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None)
        self.epilogue = text
        self.program = with_product(text, self.product)
        """What the layer computes, in epigen's language."""

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, kind: str = "int8", group: int | None = None, *, epilogue: str | None = None, tune: str | None = None
    ) -> QuantizedLinear:
        """Of a layer, whose bias it shares: each group's values rounded to the nearest multiples of a scale, with which the largest is the largest that the kind has.

        A weight that torchao has rounded is taken as it is, with its own groups, and kind and group play no part. Raises CallError for a layer of another class.
        """
        if type(layer) is not nn.Linear:
            raise CallError(f"a {type(layer).__name__} cannot be rounded: a torch.nn.Linear is taken; merge adapters into their layers first")
        weight = layer.weight.detach()
        if type(weight) in semi_structured.TYPES:
            raise CallError(f"the layer's weight {NO_SPARSE}")
        if of_torchao(weight):
            return cls.from_weight(torchao(weight), layer.bias, dtype=weight.dtype, epilogue=epilogue, tune=tune)
        if not weight.is_meta and not weight.isfinite().all():
            raise CallError("the layer's weight has infinities or NaN, which no scale brings to few bits")
        return cls.from_weight(rounded(weight, kind, group), layer.bias, dtype=weight.dtype, epilogue=epilogue, tune=tune)

    @classmethod
    def from_weight(
        cls, weight: QuantizedWeight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None, epilogue: str | None = None, tune: str | None = None
    ) -> QuantizedLinear:
        """Of a weight as `epigen.checkpoints` reads it. bias: [N], or None. dtype: of scales, zero points and activations; by default the scales'."""
        (n, k), values = weight.values.shape, weight.values
        kind = "int4" if weight.bits == 4 else "int8" if values.dtype == torch.int8 else "fp8"
        if kind == "fp8" and values.dtype != torch.float8_e4m3fn:
            raise CallError(f"a weight in {values.dtype} cannot be taken: int8, int4 and float8_e4m3fn can")
        dtype = weight.scale.dtype if dtype is None else dtype
        made = cls(
            k, n, kind, weight.group, bias is not None, zero_points=weight.zero is not None, ordered=weight.order is not None, epilogue=epilogue, tune=tune,
            device="meta", dtype=dtype,
        )  # fmt: skip
        made.qweight = packing.pack_int4(values) if kind == "int4" else values.contiguous() if kind == "int8" else values.contiguous().view(torch.uint8)
        made.scale = weight.scale.to(dtype)
        made.zero = None if weight.zero is None else weight.zero.to(dtype)
        made.order = weight.order
        if bias is not None:
            made.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        return made

    @property
    def product(self) -> str:
        """The product with the weight as it was before it was rounded, in epigen's language."""
        along = "n" if self.group is None else f"k/{self.group},n"
        b = "int4(b)" if self.kind == "int4" else "b"
        if self.zero is not None:
            b = f"({b} - {_ZERO}[{along}])"
        if self.group is None:  # what is the same all along k is multiplied once, after the product
            return f"{'mm' if b == 'b' else f'dot(a, {b})'} * {_SCALE}[n]"
        return f"dot(a, {b} * {_SCALE}[{along}])"

    def forward(self, input: Tensor, inputs: Mapping[str, Value] | None = None, **more: Value) -> Any:  # noqa: A002  # torch.nn.Linear's own name
        """input: [..., in_features]. more: the epilogue's other inputs. inputs: the same as a mapping, for names that are taken here. Returns what `epigen.linear` returns."""
        own: dict[str, Any] = {_SCALE: self.scale if self.group is not None else self.scale[0]}
        if self.zero is not None:
            own[_ZERO] = self.zero if self.group is not None else self.zero[0]
        if self.bias is not None:
            own["bias"] = self.bias
        weight = self.qweight.view(torch.float8_e4m3fn) if self.kind == "fp8" else self.qweight
        x = input if self.order is None else input.index_select(-1, self.order)
        return again.call(x, [Link(weight, linear.joined(own, linear.joined(inputs or {}, more)), self.program, tune=self.tune)])

    def dequantized(self) -> Tensor:
        """The weight as torch's linear takes it: fp32 [N, K]."""
        values = packing.unpack_int4(self.qweight) if self.kind == "int4" else self.qweight.view(torch.float8_e4m3fn) if self.kind == "fp8" else self.qweight
        zero = None if self.zero is None else self.zero.to(torch.int16)
        return QuantizedWeight(values, KINDS[self.kind].bits, self.scale, zero, self.group or self.in_features, self.order).dequantized()

    def extra_repr(self) -> str:
        shown = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, kind={self.kind!r}, group={self.group}"
        return shown if self.epilogue in ("mm", "mm + bias") else f"{shown}, epilogue={self.epilogue!r}"


def with_product(epilogue: str, product: str) -> str:
    """An epilogue of another product, which is written in epigen's language too."""
    if epilogue == "mm":
        return product
    name = next(name for name in ("product", *(f"product{i}" for i in range(len(epilogue)))) if name not in epilogue)
    return f"{name} = {product}; {to_text(of_product(epilogue, name))}"


def of_product(epilogue: str, name: str) -> Program:
    """An epilogue of a value with this name in place of the product."""
    return substituted(parse(epilogue), lambda expr: Name(name, expr.span) if is_product(expr) else None)


def _dtype(kind: str) -> DType:
    if kind not in KINDS:
        raise CallError(unknown("kind of weight", kind, tuple(KINDS)))
    return KINDS[kind]


def rounded(weight: Tensor, kind: str, group: int | None) -> QuantizedWeight:
    """A weight [N, K] in one of the kinds, symmetric: no zero points. The scales have its dtype, and what is rounded is rounded with them as they then are."""
    dtype, (n, k) = _dtype(kind), weight.shape
    group = k if group is None else min(group, k)
    groups = -(-k // group)
    apart = nn.functional.pad(weight.float(), (0, groups * group - k)).view(n, groups, group)
    largest = apart.abs().amax(-1)
    # of values so small that their scale would be 0, the least that the dtype has
    scale = torch.where(largest > 0, (largest / dtype.largest).clamp(min=torch.finfo(weight.dtype).tiny), 1.0).to(weight.dtype)
    scaled = (apart / scale.float()[..., None]).flatten(1)[:, :k]
    values = reference.convert(scaled, dtype) if dtype.is_float else scaled.round().clamp(-dtype.largest - 1, dtype.largest).to(torch.int8)
    return QuantizedWeight(values, dtype.bits, scale.t().contiguous(), None, group)
