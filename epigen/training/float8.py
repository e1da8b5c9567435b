"""A linear layer that trains in fp8, and a model with such layers in the places of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from epigen.checkpoints import of_torchao
from epigen.errors import CallError, unknown
from epigen.ir.program import parting_of
from epigen.lang.syntax import names_in
from epigen.runtime import semi_structured
from epigen.runtime.arguments import NO_SPARSE
from epigen.training import fp8, linear
from epigen.training.fp8 import A_SCALE, B_SCALE, RECIPES
from epigen.training.layer import Value
from epigen.training.modules import Linear, as_it_is
from epigen.training.quantized import of_product
from epigen.training.selected import selected


class Float8Linear(Linear):
    """`epigen.nn.Linear` whose products are in fp8 (e4m3), forward and backward, as torchao's float8 training has them. Parameters and state dict are `torch.nn.Linear`'s.

    Operands are rounded at each call with scales of their own, in fp32: what is largest becomes the largest value of fp8. recipe:

    "rowwise": a scale for all that is summed, of each row of x and of the weight; backward, of each row of the gradient and each column of the weight, and for the weight's
    gradient of each column of x and of the gradient.
    "blockwise": as DeepSeek-V3 has it, a scale for 128 neighbours of those, and of the weight for 128x128.
    "rowwise_with_gw_hp", "blockwise_with_gw_hp": the weight's gradient is a product in the dtype of x.

    epilogue: the program, elementwise of the product; by default mm, and mm + bias with a bias. Its other inputs are given at each call. of, tune: as for `epigen.linear`. A weight's
    `main_grad` is added to, as by `epigen.nn.Linear`. Raises CallError for what does not fit.

    >>> import torch, epigen
    >>> epigen.nn.Float8Linear(256, 64, epilogue="silu(mm + bias)")
    Float8Linear(in_features=256, out_features=64, bias=True, epilogue='silu(mm + bias)', recipe='rowwise')
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, epilogue: str | None = None, recipe: str = "rowwise", of: str | Iterable[str] | None = None,
        tune: str | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        if recipe not in RECIPES:
            raise CallError(unknown("recipe", recipe, tuple(RECIPES)))
        text = epilogue if epilogue is not None else "mm + bias" if bias else "mm"
        if not isinstance(text, str):
            raise CallError(f"the epilogue of a layer in fp8 is a text, such as 'silu(mm + bias)', and a {type(text).__name__} was given")
        names = linear.names_of_inputs(text)
        if taken := {A_SCALE, B_SCALE}.intersection(names):
            raise CallError(f"the epilogue {text!r} reads {', '.join(sorted(taken))}, which are names of the layer's own: choose others")
        if parting_of(text) is not None or {"a", "b"} & names_in(*of_product(text, "mm").values):
            raise CallError(
                f"the epilogue {text!r} reads more of the operands than their product, and in fp8 they are rounded: write a program of mm, elementwise"
            )
        super().__init__(in_features, out_features, bias, epilogue=text, of=of, tune=tune, device=device, dtype=dtype)
        self.recipe = recipe

    @classmethod
    def from_linear(cls, layer: nn.Linear, recipe: str = "rowwise", *, epilogue: str | None = None, tune: str | None = None) -> Float8Linear:
        """Of a layer, whose parameters it shares. Raises CallError for a layer that computes something else, or has hooks, which would not be called."""
        if type(layer) is not nn.Linear or of_torchao(layer.weight):
            raise CallError(
                f"a {type(layer).__name__} cannot train in fp8: a torch.nn.Linear whose weight nobody has rounded is taken; merge adapters into their layers first"
            )
        if type(layer.weight) in semi_structured.TYPES:
            raise CallError(f"the layer's weight {NO_SPARSE}")
        if not as_it_is(layer, nn.Linear):
            raise CallError("the layer has hooks or a forward of its own, which would not be called any more: remove them, and add them to the new layer")
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, epilogue=epilogue, recipe=recipe, tune=tune, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    def forward(self, input: Tensor, inputs: Mapping[str, Value] | None = None, **more: Value) -> Any:  # noqa: A002  # torch.nn.Linear's own name
        """As `epigen.nn.Linear`'s."""
        return fp8.call(input, self.link(linear.joined(inputs or {}, more)), RECIPES[self.recipe])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"


def float8(
    model: nn.Module, recipe: str = "rowwise", *, skip: str | Iterable[str] | Callable[[str, nn.Module], bool] = (), tune: str | None = None
) -> nn.Module:  # fmt: skip
    """The model with a `Float8Linear` in the place of each `torch.nn.Linear`, whose parameters it shares, so that optimisers and state dicts stay what they were.

    The model is changed in place, and returned; a model that is itself such a layer is returned as another. Subclasses of `torch.nn.Linear` are left. skip: layers
    that are left too, such as a last one, `skip="lm_head"`: names or patterns ("*.router"), with all that is in those modules, or a function of name and module.
    Raises CallError for what does not fit, before anything is changed.

    >>> import torch, epigen
    >>> epigen.nn.float8(torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)), skip="2")
    Sequential(
      (0): Float8Linear(in_features=256, out_features=64, bias=True, epilogue='mm + bias', recipe='rowwise')
      (1): ReLU()
      (2): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    left = selected("skip", {module: name for name, module in model.named_modules()}, skip)
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and not left(name, module)}
    made: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        try:
            made[layer] = Float8Linear.from_linear(layer, recipe, tune=tune)
        except CallError as error:
            raise CallError(f"{name or 'the model'}: {error}") from None
    for owner in list(model.modules()):
        for name, module in owner._modules.items():
            if module in made:
                owner._modules[name] = made[module]
    return made.get(model, model)
