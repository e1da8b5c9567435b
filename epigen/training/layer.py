"""One layer of a chain as an autograd function: its forward program, its two products backward, and the derivative that rides in one.

Between two layers of a chain autograd sees one tensor: the first layer's result, whose gradient is by agreement that of the first layer's
product, since the second layer's backward has applied the first one's derivative already. So each layer is a node of its own: what it keeps
is freed, and its weight's gradient there, before the layer before it begins. Nothing outside a chain sees such a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigen.errors import CallError
from epigen.ir import reference
from epigen.runtime import semi_structured
from epigen.training import library
from epigen.training.plan import Backward, Step

Value = Tensor | float
"""An input of a program."""


class Link(NamedTuple):
    """One layer of a chain: its weight [N, K] and inputs, and how it is to be run. Fields as the arguments of `linear`; below `chain` epilogues are texts."""

    weight: Tensor
    inputs: Mapping[str, Value]
    epilogue: Any
    save: str | None = None
    of: tuple[str, ...] | None = None
    tune: str | None = None
    main_grad: Tensor | None = None


def numbers(values: Sequence[Value]) -> list[float]:
    return [v for v in values if not isinstance(v, Tensor)]


def forward(step: Step, tune: str | None, x: Tensor, weight: Tensor, inputs: Sequence[Value], lead: Sequence[int] | None) -> list[Tensor]:
    """All outputs of the forward program. x: [..., K]. weight: [N, K]. inputs: the layer's. lead: what its results have in place of M; None for M itself."""
    values = [rows(inputs[i], indices) for i, indices in zip(step.inputs, step.indices, strict=True)]
    return led(library.run(step.text, tune, rows(x, "mn"), weight.t(), values), step.outputs, lead)


def led(results: list[Tensor], outputs: Sequence[str], lead: Sequence[int] | None) -> list[Tensor]:
    """Results with leading dimensions in place of M. outputs: the indices of each that has them. lead: as of `forward`."""
    if lead is not None and len(lead) != 1:
        plain = not torch.compiler.is_compiling() and library.unseen(*results)
        for i, indices in enumerate(outputs):
            if "m" in indices:
                t = results[i]
                # of memory that is its own and without gaps, which a mask has: half the time of a view that says of itself that it is none
                results[i] = t.resize_((*lead, *t.shape[1:])) if plain and t.is_contiguous() else shaped(t, indices, lead)
    return results


# -- leading dimensions


def rows(t: Any, indices: str) -> Any:
    """A tile [..., N] as [M, N], or a row [...] as [M]; anything else as it is. indices: of the value."""
    if indices == "m":
        return t if t.dim() == 1 else t.reshape(-1)
    if indices not in ("mn", "mk") or t.dim() == 2:
        return t
    return t[None] if t.dim() == 1 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])  # as flatten, but in older parts of torch too


def shaped(t: Tensor, indices: str, lead: Sequence[int]) -> Tensor:
    """The inverse of `rows`, of a result that nothing else holds: no view of it, so that a change in place is one of an ordinary tensor."""
    if "m" not in indices or len(lead) == 1:
        return t
    whole: Tensor = torch.ops.aten._unsafe_view.default(t, [*lead, *t.shape[1:]])
    return whole


# -- the function


def kept(backward: Backward | None, x: Tensor, weight: Tensor, inputs: Sequence[Value], outputs: Sequence[Tensor]) -> list[Tensor]:
    """What a layer's derivative needs. outputs: all of its forward program."""
    if backward is None or not backward.kept:
        return []
    values: list[Any] = [*inputs, *outputs, x, weight]
    return [values[i] for i in backward.kept]


class Layer(torch.autograd.Function):
    """(x, weight, step, tune, main_grad, lead, *values) -> the layer's results; where the next layer takes its derivative over, all outputs.

    x: [..., K]. lead: the leading dimensions that the results have in place of M; None within a chain, where they have M itself. values: the layer's inputs, and
    with `step.before` those of the layer before and what its derivative needs. main_grad: None, or the fp32 buffer to which the weight's gradient is added in
    place. Leading dimensions are taken together in here and not around it, where autograd would have a node for each that is.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, step: Step, tune: str | None, main_grad: Tensor | None, lead: Sequence[int] | None, *values: Value
    ) -> tuple[Tensor, ...]:  # fmt: skip
        inputs, taken = values[: len(step.inputs)], values[len(step.inputs) :]
        before = 0 if step.before is None else len(step.before.inputs)
        outputs = forward(step, tune, x, weight, inputs, lead)
        own = kept(step.own, x, weight, inputs, outputs)
        computed = [inputs[i] if i < len(inputs) else outputs[i - len(inputs)] for i in step.kept]
        of_operands = [v for v in computed if isinstance(v, Tensor)]
        needs_x, needs_weight = step.weight or bool(step.operands) or step.second is not None, step.x or bool(step.operands)
        ctx.save_for_backward(x if needs_x else None, weight if needs_weight else None, *of_operands, *own, *taken[before:])
        ctx.step, ctx.tune, ctx.main_grad, ctx.numbers = step, tune, main_grad, (numbers(inputs), numbers(taken[:before]))
        ctx.before_inputs = 6  # arguments that come before the layer's inputs
        if step.operands:
            ctx.dtypes = [v.dtype if isinstance(v, Tensor) else None for v in inputs]
            ctx.computed = [None if isinstance(v, Tensor) else v for v in computed]
        if step.own is not None and None in step.own.zeros:
            ctx.mm = (x.shape[:-1].numel(), weight.shape[0]), x.dtype
        ctx.shapes = x.shape, [v.shape if isinstance(v, Tensor) else None for v in (*inputs, *taken[:before])]
        given = tuple(outputs[: len(step.outputs)] if step.own else outputs)
        if step.own is None:
            ctx.set_materialize_grads(False)
        if step.constant:
            ctx.mark_non_differentiable(*(given[i] for i in step.constant if i < len(given)))
        return given

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[Any, ...]:
        return backward(ctx, ctx.saved_tensors, arrived)


def apply(function: type[torch.autograd.Function], *args: Any) -> tuple[Any, ...]:
    """Of what torch leaves untyped."""
    results: tuple[Any, ...] = function.apply(*args)
    return results


def no_second_derivative() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise CallError(
            "a layer of epigen has no second derivative, for which create_graph=True asks: for double backward write it in torch's own operations, "
            "such as torch.relu(F.linear(x, weight, bias)), or use torch.func (hessian, jvp, …), where epigen.linear runs as such; "
            "epigen.unfuse(model) undoes epigen.fuse"
        )


def backward(ctx: Any, tensors: Sequence[Any], arrived: Sequence[Tensor]) -> tuple[Any, ...]:
    """tensors: what ctx has saved, which may be asked for once. arrived: the gradients of the layer's results. Raises CallError."""
    no_second_derivative()
    step, own, before = ctx.step, ctx.step.own, ctx.step.before
    x, weight, *saved = tensors
    if x is not None:
        x = rows(x, "mn")
    of_operands = ctx.computed.count(None) if step.operands else len(step.kept)
    computed, saved = saved[:of_operands], saved[of_operands:]
    dmm: Tensor | None = arrived[0]
    inputs: list[Tensor | None] = [None] * len(step.inputs)
    of_rows: list[Tensor | None] = []
    if own is not None:
        held, saved = saved[: len(own.kept)], saved[len(own.kept) :]
        dmm, inputs = through_epilogue(ctx, own, held, arrived)
        inputs, of_rows = inputs[: len(own.inputs)], inputs[len(own.inputs) :]
    dx, dweight = None, None
    taken: list[Tensor | None] = [None] * len(before.inputs) if before is not None else []
    if step.operands and (dmm is not None or step.second is not None):
        rest = iter(computed)
        given = [rows(next(rest), _of(step, i)) if v is None else v for v, i in zip(ctx.computed, step.kept, strict=True)]
        dx, dweight = _through_operands(step, ctx, dmm, x, weight, [*given, *of_rows], inputs)
    elif dmm is not None:
        use = wanted(ctx) if step.weight else Wanted.NOT
        if use is Wanted.ADDED and ctx.main_grad is not None:
            library.add_product(ctx.main_grad, dmm.t(), x)
        elif use is not Wanted.NOT:
            dweight = torch.mm(dmm.t(), x)
        if before is not None:
            dx, taken = _gradients(before, ctx.tune, saved, ctx.numbers[1], (), (dmm, weight))
        elif step.x:
            dx = product(dmm, weight, ctx.tune)
    if step.second is not None and not step.operands and step.second not in (own.zeros if own is not None else ()):
        dx = _through_second(step, x, computed, inputs, dx, ctx.needs_input_grad[ctx.before_inputs + step.second])
    shape, shapes = ctx.shapes
    periods = [*(own.periods if own is not None else [()] * len(inputs)), *(before.periods if before is not None else ())]
    given = [of_input(t, p, s) for t, p, s in zip((*inputs, *taken), periods, shapes, strict=False)]
    return dx if dx is None else dx.view(shape), dweight, None, None, None, None, *given, *(None for _ in saved)


def through_epilogue(ctx: Any, own: Backward, held: Sequence[Tensor], arrived: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of mm and of the inputs, and behind those of what reductions over k leave, by a layer's own derivative. held: of what ctx has saved, what that reads. arrived: as of `backward`."""
    arrived = [rows(t, indices) for t, indices in zip(arrived, ctx.step.outputs, strict=True)]
    dmm, inputs = _gradients(own, ctx.tune, held, ctx.numbers[0], arrived)
    for place in own.zeros:
        if place is None:
            dmm = arrived[0].new_zeros(ctx.mm[0], dtype=ctx.mm[1])
        else:
            inputs[place] = arrived[0].new_zeros(ctx.shapes[1][place], dtype=own.dtypes[place])
    return dmm, inputs


def of_input(gradient: Tensor | None, periods: Sequence[str], shape: Sequence[int]) -> Tensor | None:
    """As autograd takes it of an input of this shape. periods: along which it is to be summed."""
    if gradient is None:
        return None
    whole = reference.summed(gradient, periods, shape) if periods else gradient
    return whole if whole.shape == shape else whole.view(tuple(shape))


def _through_second(
    step: Step, x: Tensor, computed: Sequence[Value], inputs: list[Tensor | None], dx: Tensor | None, itself: bool
) -> Tensor | None:  # fmt: skip
    """The gradient of x with what comes by way of a second product. The gradient of that, which is among those of the inputs, becomes its right operand's.

    computed: that operand, where x has a gradient. dx: of the first product. itself: whether its own is wanted.
    """
    assert step.second is not None
    of_product = inputs[step.second]
    assert of_product is not None
    for right in computed:
        assert isinstance(right, Tensor)
        if dx is None or right.dtype != of_product.dtype:
            passed = product(of_product, right.t(), None)
            dx = passed if dx is None else dx + passed
        else:
            dx = torch.addmm(dx, of_product, right.t())
    inputs[step.second] = torch.mm(of_product.t(), x).t() if itself else None
    return dx


def product(a: Tensor, b: Tensor, tune: str | None) -> Tensor:
    """a @ b, of a narrower or sparse weight b too. a: [M, K]. b: [K, N]."""
    return torch.mm(a, b) if a.dtype == b.dtype and type(b) not in semi_structured.TYPES else library.run("mm", tune, a, b, [])[0]


def _of(step: Step, place: int) -> str:
    """The indices of one of the layer's inputs, or of what a reduction over k has left behind these."""
    return step.indices[step.inputs.index(place)] if place in step.inputs else "m"


def _through_operands(
    step: Step, ctx: Any, dmm: Tensor | None, x: Tensor, weight: Tensor, computed: Sequence[Value | None], inputs: list[Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x and the weight where something is computed of one before it is multiplied. To those of the inputs it adds theirs.

    x: [M, K]. computed: what the programs read of the layer's inputs and outputs, and the gradients of rows. inputs: the gradients so far.
    """
    dx, dweight, dsecond = None, None, None
    of_second = None if step.second is None else inputs[step.second]
    use = wanted(ctx) if step.weight else Wanted.NOT
    adds = use is Wanted.ADDED and ctx.main_grad is not None
    for each in step.operands:
        if each.operand == "b" and each.right is None and use is Wanted.NOT and not each.inputs:
            continue
        right, arrived = (weight.t(), dmm) if each.right is None else (computed[each.right], of_second)
        if arrived is None or not isinstance(right, Tensor):
            continue
        itself = x if each.operand == "a" else right
        given = [itself if place is None else computed[place] for place, _ in each.arguments]
        values = [v.t() if transposed and isinstance(v, Tensor) else v for v, (_, transposed) in zip(given, each.arguments, strict=True) if v is not None]
        operands = (arrived, right.t()) if each.operand == "a" else (x.t(), arrived)
        results = library.run(each.wide if adds and each.operand == "b" and each.right is None else each.text, ctx.tune, *operands, values)
        if each.own is not None and each.operand == "a":
            dx = results[each.own] if dx is None else dx + results[each.own]
        elif each.own is not None and each.right is None:
            dweight = results[each.own]
        elif each.own is not None:
            dsecond = results[each.own]
        for place, output in each.inputs:
            before, gradient = inputs[place], results[output].to(ctx.dtypes[place])
            inputs[place] = gradient if before is None else before + gradient
    if step.second is not None:  # its right operand's, in place of the product's
        inputs[step.second] = dsecond
    if dweight is not None and adds:
        ctx.main_grad.add_(dweight.t())
        dweight = None
    return dx if step.x else None, dweight.t() if dweight is not None and use is not Wanted.NOT else None


class Wanted(Enum):
    """What a backward wants a weight's gradient for."""

    NOT = auto()
    """It is one of something else, as torch.autograd.grad(loss, x) is."""
    ADDED = auto()
    """To add it to what the weight has."""
    RETURNED = auto()
    """To return it, as torch.autograd.grad(loss, weight) does, which adds to nothing."""


def wanted(ctx: Any) -> Wanted:
    """A compiled backward is always a whole one."""
    if torch.compiler.is_compiling():
        return Wanted.ADDED
    node = ctx.next_functions[1][0]
    try:
        return Wanted.ADDED if torch._C._will_engine_execute_node(node) else Wanted.NOT
    except RuntimeError:  # torch's answer for a leaf whose gradient torch.autograd.grad was asked for
        return Wanted.RETURNED


def _gradients(
    backward: Backward, tune: str | None, held: Sequence[Tensor], scalars: Sequence[float], arrived: Sequence[Tensor], multiplied: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """The gradients of mm and of the inputs, and behind those of rows. multiplied: the two matrices whose product is the gradient that arrives."""
    if multiplied is not None and backward.product is None:
        arrived, multiplied = (product(*multiplied, tune),), None
    held = [rows(t, indices) for t, indices in zip(held, backward.indices, strict=True)]
    given: list[Value] = [*held, *scalars, *arrived]
    inputs = [given[i] for i in backward.arguments]
    results: list[Tensor] = []
    if backward.product is None:
        results = library.run(backward.text, tune, held[-2], held[-1].t(), inputs)
    elif multiplied is not None:
        results = library.run(backward.text, tune, *multiplied, inputs)
    elif backward.text:
        results = library.run_over(backward.text, arrived[backward.product], inputs)
    available = [*results, *arrived]
    gradients = [None if i is None else available[i].to(dtype) for i, dtype in zip(backward.inputs, backward.dtypes, strict=True)]
    return None if backward.mm is None else available[backward.mm], [*gradients, *(rows(available[i], "m") for i in backward.rows)]
