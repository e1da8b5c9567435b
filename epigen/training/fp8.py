"""Products in fp8 of a layer that trains: what they multiply is rounded with scales of its own, forward and backward, and the parameters keep their precision.

Each of a layer's three products is one kernel, whose operands have been rounded along the index that it sums: x and the weight along k, then the gradient of their
product and the weight along n, and that gradient and x along m. The derivative of the epilogue is `plan`'s, as of any layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

from epigen.dtypes import BF16, BY_TORCH
from epigen.errors import CallError
from epigen.ir.graph import Node
from epigen.ir.program import MOST_PROGRAMS, graph_of
from epigen.ir.written import through_text
from epigen.ops import NUMBER
from epigen.runtime.device import THIS_MACHINE
from epigen.training import chain, composed, library, plan
from epigen.training.layer import Link, Value, Wanted, apply, kept, led, no_second_derivative, numbers, of_input, rows, through_epilogue, wanted
from epigen.training.plan import Step
from epigen.training.quantized import with_product

A_SCALE, B_SCALE = "a_scale", "b_scale"
"""What programs call the scales of their operands."""

_TRAINED = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Recipe:
    """block: neighbours along what a product sums that share a scale, and of the weight the rows that do; None: all that is summed, and one row.
    weight_gradient: whether that product is in fp8 too."""

    block: int | None
    weight_gradient: bool


RECIPES = {
    "rowwise": Recipe(None, True),
    "rowwise_with_gw_hp": Recipe(None, False),
    "blockwise": Recipe(128, True),
    "blockwise_with_gw_hp": Recipe(128, False),
}
"""By torchao's names, where it has them."""


# -- what is multiplied


def quantised(x: Tensor, rows: int, columns: int | None) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 (e4m3) with a scale for each block, with which the block's largest value is the largest that fp8 has.

    x: [R, C]. rows, columns: of a block; None: all columns. Returns values [R, C], one row after the other in memory, and fp32 scales [ceil(R / rows), ceil(C / columns)].
    A block with NaN or infinities has NaN.
    """
    down, across = x.shape
    width = columns or max(across, 1)
    high, wide = -(-down // rows), 1 if columns is None else -(-across // width)
    if (high * rows, wide * width) != (down, across):
        x = F.pad(x, (0, wide * width - across, 0, high * rows - down))
    blocks = x.unflatten(1, (wide, width)).unflatten(0, (high, rows))
    # a constant to torch.compile, for which a number that an object holds is another in each of two layers (torch 2.13)
    largest = torch.finfo(torch.float8_e4m3fn).max
    # as torchao has it, the largest value is 1e-12 at least, so that a scale is never 0
    scale = blocks.abs().amax((1, 3)).float().clamp(min=1e-12) / largest
    values = (blocks / scale[:, None, :, None]).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:down, :across].contiguous(), scale


def scaled(text: str, block: int | None, rows: int, dtype: torch.dtype) -> str:
    """The program of such operands: of the product with both scales, and with tiles in the dtype that they have where operands are of that one.

    text: the program without scales. block: neighbours along k that share a scale. rows: those of b's transpose that do.
    """
    return _scaled(text, block, rows, dtype)


scaled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of `plan`'s


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _scaled(text: str, block: int | None, rows: int, dtype: torch.dtype) -> str:
    graph, tiles = graph_of(text), BY_TORCH[str(dtype)]
    if tiles != BF16:  # which tiles are by themselves, of operands in fp8
        outputs = [replace(o, dtype=o.dtype or tiles) if _is_tile(graph.nodes[o.node]) else o for o in graph.outputs]
        text = through_text(graph.nodes, outputs, text).text
    if block is None:
        return with_product(text, f"mm * {A_SCALE}[m] * {B_SCALE}[n]")
    along_n = "n" if rows == 1 else f"n/{rows}"
    return with_product(text, f"dot(a * {A_SCALE}[m,k/{block}], b * {B_SCALE}[k/{block},{along_n}])")


def _is_tile(node: Node) -> bool:
    return node.indices == "mn" and node.kind == NUMBER


def run(text: str, tune: str | None, recipe: Recipe, a: Tensor, b: Tensor, rows: int, dtype: torch.dtype, inputs: dict[str, Value]) -> list[Tensor]:
    """The outputs of a program of a @ b.T, with the operands rounded. a: [M, K]. b: [N, K]. rows: of b that share a scale. dtype: of tiles. inputs: by name."""
    (a, of_a), (b, of_b) = quantised(a, 1, recipe.block), quantised(b, rows, recipe.block)
    scales = {A_SCALE: of_a[:, 0], B_SCALE: of_b[:, 0]} if recipe.block is None else {A_SCALE: of_a, B_SCALE: of_b.t()}
    program, given = scaled(text, recipe.block, rows, dtype), {**inputs, **scales}
    return library.run(program, tune, a, b.t(), [given[i.name] for i in plan.declared(program).inputs])


# -- the layer


def call(x: Tensor, link: Link, recipe: Recipe) -> Any:
    """`chain.chain` of one layer whose products are in fp8. Its epilogue is a text."""
    x, (link,) = chain.dense(x, [link])
    chain.check_operands(x, [link])
    for what, t in (("x", x), ("weight", link.weight)):
        if t.dtype not in _TRAINED:
            raise CallError(f"{what} is {t.dtype}: a layer in fp8 rounds what it multiplies itself, and takes fp16, bf16 or fp32")
    if refusal := _refusal(x.device):
        raise CallError(refusal)
    program = plan.declared(link.epilogue)
    values = chain.presented(link, program, x)
    if composed.needed([x, link.weight, *(v for v in values if isinstance(v, Tensor))]):
        raise CallError(
            "a layer in fp8 has no derivative in torch.func, nor a forward-mode one, and is not traced: make it an epigen.nn.Linear, which has the same state dict"
        )
    (step,) = chain.steps(x, [link], [values])
    if step.trains:
        tensors = chain.distinct([x, link.weight, *values])
        results = apply(Layer, *tensors[:2], step, recipe, link.tune, link.main_grad, x.shape[:-1], *tensors[2:])
    else:
        results = tuple(_forward(step, recipe, link.tune, x, link.weight, values, x.shape[:-1]))
    return results[0] if program.type is None else tuple.__new__(program.type, results)


def _refusal(device: torch.device) -> str:
    """Why there is no training in fp8 on a device; "" where there is. On the CPU the reference computes it."""
    target = THIS_MACHINE.of(device)
    if target is None or target.fp8:
        return ""
    return (
        f"{target.part} ({target.name}) does not multiply fp8: train in bf16, with torch.nn.Linear or epigen.nn.Linear, which have the same state dict. sm_89, sm_90 and newer "
        "do, and gfx950 and gfx1201"
    )


_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forward(step: Step, recipe: Recipe, tune: str | None, x: Tensor, weight: Tensor, inputs: Sequence[Value], lead: Sequence[int]) -> list[Tensor]:
    """As `layer.forward`."""
    names = [i.name for i in plan.declared(step.text).inputs]
    named = {name: rows(inputs[place], indices) for name, place, indices in zip(names, step.inputs, step.indices, strict=True)}
    results = run(step.text, tune, recipe, rows(x, "mn"), weight, recipe.block or 1, x.dtype, named)
    return led(results, step.outputs, lead)


class Layer(torch.autograd.Function):
    """(x, weight, step, recipe, tune, main_grad, lead, *the layer's inputs) -> its results. As `layer.Layer`, of a layer alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, step: Step, recipe: Recipe, tune: str | None, main_grad: Tensor | None, lead: Sequence[int], *inputs: Value
    ) -> tuple[Tensor, ...]:  # fmt: skip
        outputs = _forward(step, recipe, tune, x, weight, inputs, lead)
        ctx.save_for_backward(x if step.weight else None, weight if step.x else None, *kept(step.own, x, weight, inputs, outputs))
        ctx.step, ctx.recipe, ctx.tune, ctx.main_grad, ctx.numbers = step, recipe, tune, main_grad, (numbers(inputs),)
        ctx.dtype = x.dtype
        if step.own is not None and None in step.own.zeros:
            ctx.mm = (x.shape[:-1].numel(), weight.shape[0]), x.dtype
        ctx.shapes = x.shape, [v.shape if isinstance(v, Tensor) else None for v in inputs]
        given = tuple(outputs[: len(step.outputs)])
        if step.constant:
            ctx.mark_non_differentiable(*(given[i] for i in step.constant if i < len(given)))
        return given

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[Any, ...]:
        no_second_derivative()
        x, weight, *held = ctx.saved_tensors
        step, recipe, own = ctx.step, ctx.recipe, ctx.step.own
        dmm, inputs = through_epilogue(ctx, own, held, arrived)
        dx, dweight = None, None
        if dmm is not None and step.x:
            (dx,) = run("mm", ctx.tune, recipe, dmm, weight.t(), recipe.block or 1, ctx.dtype, {})
            dx = dx.view(ctx.shapes[0])
        use = wanted(ctx) if dmm is not None and step.weight else Wanted.NOT
        if dmm is not None and use is not Wanted.NOT:
            dweight = _of_weight(ctx, dmm, rows(x, "mn"), use)
        given = [of_input(t, p, s) for t, p, s in zip(inputs, own.periods, ctx.shapes[1], strict=True)]
        return dx, dweight, None, None, None, None, None, *given


def _of_weight(ctx: Any, dmm: Tensor, x: Tensor, use: Wanted) -> Tensor | None:
    """The weight's gradient; None where it was added to a buffer. x: [M, K]."""
    buffer = ctx.main_grad if use is Wanted.ADDED else None
    if not ctx.recipe.weight_gradient:
        if buffer is None:
            return torch.mm(dmm.t(), x)
        library.add_product(buffer, dmm.t(), x)
        return None
    (gradient,) = run("mm", ctx.tune, ctx.recipe, dmm.t(), x.t(), 1, ctx.dtype if buffer is None else buffer.dtype, {})
    if buffer is None:
        return gradient
    buffer.add_(gradient)
    return None
