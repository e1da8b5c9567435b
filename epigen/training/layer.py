"""One layer of a chain as an autograd function: its forward program, its two products backward, and the derivative that rides in one.

Between two layers of a chain autograd sees one tensor: the first layer's result, whose gradient is by agreement that of the first layer's
product, since the second layer's backward has applied the first one's derivative already. So each layer is a node of its own: what it keeps
is freed, and its weight's gradient there, before the layer before it begins. Nothing outside a chain sees such a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigen.errors import CallError
from epigen.training import library
from epigen.training.plan import Backward, Step

Value = Tensor | float
"""An input of a program."""


def split(values: Sequence[Value]) -> tuple[list[Tensor | None], list[float]]:
    """As the operations of `library` take them."""
    return [v if isinstance(v, Tensor) else None for v in values], numbers(values)


def numbers(values: Sequence[Value]) -> list[float]:
    return [v for v in values if not isinstance(v, Tensor)]


def forward(step: Step, tune: str | None, x: Tensor, weight: Tensor, inputs: Sequence[Value]) -> list[Tensor]:
    """All outputs of the forward program. x: [M, K]. weight: [N, K]. inputs: the layer's."""
    found: list[Tensor] = library.program(step.text, tune, x, weight.t(), *split([inputs[i] for i in step.inputs]))
    return found


def kept(backward: Backward | None, x: Tensor, weight: Tensor, inputs: Sequence[Value], outputs: Sequence[Tensor]) -> list[Tensor]:
    """What a layer's derivative needs. outputs: all of its forward program."""
    values: list[Any] = [*inputs, *outputs, x, weight]
    return [] if backward is None else [values[i] for i in backward.kept]


class Layer(torch.autograd.Function):
    """(step, tune, main_grad, x, weight, *values) -> the layer's results; where the next layer takes its derivative over, all outputs.

    values: the layer's inputs, and with `step.before` those of the layer before and what its derivative needs. main_grad: None, or the fp32
    buffer to which the weight's gradient is added in place.
    """

    @staticmethod
    def forward(ctx: Any, step: Step, tune: str | None, main_grad: Tensor | None, x: Tensor, weight: Tensor, *values: Value) -> tuple[Tensor, ...]:
        inputs, taken = values[: len(step.inputs)], values[len(step.inputs) :]
        outputs = forward(step, tune, x, weight, inputs)
        before = len(step.before.inputs) if step.before else 0
        own = kept(step.own, x, weight, inputs, outputs)
        ctx.save_for_backward(x if step.weight else None, weight if step.x else None, *own, *taken[before:])
        ctx.step, ctx.tune, ctx.main_grad, ctx.numbers = step, tune, main_grad, (numbers(inputs), numbers(taken[:before]))
        given = tuple(outputs[: step.results] if step.own else outputs)
        ctx.set_materialize_grads(step.own is not None)
        ctx.mark_non_differentiable(*(given[i] for i in step.constant if i < len(given)))
        return given

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return _backward(ctx, arrived)
        with torch.no_grad():  # create_graph=True
            found = _backward(ctx, arrived)
        return apply(Undifferentiable, torch.zeros((), requires_grad=True), *found)


class Undifferentiable(torch.autograd.Function):
    """(anchor, *gradients) -> the gradients, which a second backward cannot pass. anchor: anything that requires a gradient, so that it tries."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Any) -> tuple[Any, ...]:  # noqa: ARG004  # autograd's own signature
        return gradients

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:  # noqa: ARG004
        raise CallError(
            "a layer of epigen has no second derivative: for double backward write it in torch's own operations, such as torch.relu(F.linear(x, weight, bias))"
        )


def apply(function: type[torch.autograd.Function], *args: Any) -> tuple[Any, ...]:
    """Of what torch leaves untyped."""
    found: tuple[Any, ...] = function.apply(*args)
    return found


def _backward(ctx: Any, arrived: Sequence[Tensor]) -> tuple[Any, ...]:
    step, own, before = ctx.step, ctx.step.own, ctx.step.before
    x, weight, *saved = ctx.saved_tensors
    dmm: Tensor | None = arrived[0]
    inputs: list[Tensor | None] = [None] * len(step.inputs)
    if own is not None:
        held, saved = saved[: len(own.kept)], saved[len(own.kept) :]
        dmm, inputs = _gradients(own, ctx.tune, held, ctx.numbers[0], arrived)
    dx, dweight = None, None
    taken: list[Tensor | None] = []
    if dmm is not None:
        if step.weight and ctx.main_grad is not None:
            library.accumulate(ctx.main_grad, dmm.t(), x)
        elif step.weight:
            dweight = torch.mm(dmm.t(), x)
        if before is not None:
            dx, taken = _gradients(before, ctx.tune, saved, ctx.numbers[1], (), (dmm, weight))
        elif step.x:
            dx = torch.mm(dmm, weight)
    return None, None, None, dx, dweight, *inputs, *taken, *(None for _ in saved)


def _gradients(
    backward: Backward, tune: str | None, held: Sequence[Tensor], scalars: Sequence[float], arrived: Sequence[Tensor], product: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The gradients of mm and of the inputs. product: the two matrices whose product is the gradient that arrives."""
    if product is not None and backward.product is None:
        arrived, product = (torch.mm(*product),), None
    given: list[Value] = [*held, *scalars, *arrived]
    inputs = split([given[i] for i in backward.arguments])
    results: list[Tensor] = []
    if backward.product is None:
        results = library.program(backward.text, tune, held[-2], held[-1].t(), *inputs)
    elif product is not None:
        results = library.program(backward.text, tune, *product, *inputs)
    elif backward.text:
        results = library.over(backward.text, arrived[backward.product], *inputs)
    found = [*results, *arrived]
    gradients = [None if i is None else found[i].to(dtype) for i, dtype in zip(backward.inputs, backward.dtypes, strict=True)]
    return None if backward.mm is None else found[backward.mm], gradients
