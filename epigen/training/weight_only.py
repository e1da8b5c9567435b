"""The forward of a linear layer whose weight torchao has rounded: one kernel, which converts the weight within the product and adds the bias.

The weight stays torchao's. Values of int8 and fp8 are multiplied where they lie; of int4, which torchao keeps in a byte each, a packed copy is made beside the layer. It is
made again at the next call once the weight is another, or was changed in place. Where a call is none for the kernel, the layer's own forward runs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext

from epigen.checkpoints import of_torchao
from epigen.errors import CallError
from epigen.training.attached import FORWARD, Attached, recorded
from epigen.training.deferred import DTYPES, Deferred, Run, in_its_place
from epigen.training.guarded_cache import DEVICES
from epigen.training.quantized import QuantizedLinear

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Made:
    """What computes a layer; None where nothing can, and why. parts: the weight with all that it holds, and the bias. versions: of the tensors of the weight."""

    layer: QuantizedLinear | None
    why: str
    parts: tuple[Any, ...]
    versions: list[int]


class WeightOnly(Attached):
    # It belongs to a torch.nn.Linear. A copy of the model, and what is stored of it, makes what it needs of its own weight.
    def __init__(self, module: nn.Linear):
        super().__init__(module)
        self.made: Made | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"made": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not self.active or kwargs or len(args) != 1 or type(args[0]) not in (*_PLAIN, Deferred):
            return type(self.module).forward(self.module, *args, **kwargs)
        if type(self.module) is not nn.Linear or recorded() or _watched():  # another class: parametrised since, whose weight is computed anew each time
            return self.plain(*args)
        return in_its_place(args[0], self.computed)

    def computed(self, x: Tensor) -> Any:
        layer = self.current().layer
        return layer(x) if layer is not None and _fits(x, layer) else self.plain(x)

    def current(self) -> Made:
        """As the weight and the bias now are."""
        module: Any = self.module
        weight, bias, made = module.weight, module.bias, self.made
        held = vars(weight).values()
        parts = (weight, weight.requires_grad, bias, *held)
        versions = [t._version for t in (weight, *held) if isinstance(t, Tensor) and not t.is_inference()]
        if made is None or len(made.parts) != len(parts) or not all(map(operator.is_, made.parts, parts)) or made.versions != versions:
            try:
                self.made = made = Made(quantized(module), "", parts, versions)
            except CallError as error:
                self.made = made = Made(None, str(error), parts, versions)
        return made


def _fits(x: Tensor, layer: QuantizedLinear) -> bool:
    """Whether the kernel gives what torchao would. Under autocast torchao has rules of its own."""
    if type(x) not in _PLAIN or not x.dim() or x.shape[-1] != layer.in_features or not x.numel() or torch.is_autocast_enabled(x.device.type):
        return False
    return all((t.dtype, t.device) == (x.dtype, x.device) for t in (layer.scale, layer.bias) if t is not None)


def quantized(layer: nn.Module) -> QuantizedLinear:
    """What computes a layer with a weight of torchao's, whose bias it shares, and the weight where it need not be packed. Raises CallError where nothing can."""
    linear: Any = layer
    own = vars(layer).get(FORWARD)
    _demand(type(layer) is nn.Linear, f"a {type(layer).__name__} may compute something else with its weight than a torch.nn.Linear")
    _demand(own is None or isinstance(own, Attached), "its forward was replaced")
    weight, bias = linear.weight, linear.bias
    _demand(of_torchao(weight), f"its weight is a {type(weight).__name__}")
    _demand(not weight.requires_grad, "its weight requires a gradient, which one of few bits has not: call weight.requires_grad_(False)")
    _demand(weight.device.type in DEVICES, f"its weight is on {weight.device.type}")
    _demand(weight.dtype in DTYPES, f"it computes in {weight.dtype}, and fp32, fp16 and bf16 are taken")
    tracked = not any(t.is_inference() for t in (weight, *vars(weight).values()) if isinstance(t, Tensor))
    _demand(tracked, "its weight was made in torch.inference_mode, where torch does not tell of changes: make it under torch.no_grad")
    if bias is not None:
        same = type(bias) is nn.Parameter and (bias.dtype, bias.device) == (weight.dtype, weight.device)
        _demand(same, f"its bias is a {type(bias).__name__} of {bias.dtype} on {bias.device} beside a weight of {weight.dtype} on {weight.device}")
    with torch.inference_mode(False), torch.no_grad():
        return QuantizedLinear.from_linear(linear)


def text(layer: QuantizedLinear) -> str:
    """What its kernel computes, in epigen's language."""
    return layer.product if layer.bias is None else f"{layer.product} + bias"


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CallError(otherwise)


def _watched() -> bool:
    """Whether a mode of torch's is to see the functions that are called, but for a plan's and one that says where tensors are made."""
    stack = range(torch._C._len_torch_function_stack())
    return not all(type(torch._C._get_function_stack_at(place)) in (Run, DeviceContext) for place in stack)
