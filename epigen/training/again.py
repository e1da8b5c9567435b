"""A chain of layers called before, called again: the function for it, and for each layer's backward, written out with all that is known.

What `linear.chain` checks and plans hangs on its tensors' shapes, dtypes and whether they require a gradient, and on torch's modes. Whoever knows that all this is
as it was (`deferred` does, by one comparison) calls what `prepare` has made of it. It computes what the chain would, by the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigen import api
from epigen.runtime.written import Written
from epigen.training import composed, layer, library, linear, plan
from epigen.training.layer import Wanted
from epigen.training.linear import Link
from epigen.training.plan import Backward, Step


def prepare(x: Tensor, links: Sequence[Link]) -> Callable[..., Tensor] | None:
    """What `linear.chain` comes to where it is called with tensors like these, in torch's modes as they are: a function without its checks. None where the chain
    has torch itself run the layers, and where one takes numbers or a buffer for its weight's gradient, or gives more than a tile.

    It takes x, and of each layer the weight and the inputs in their order, each of exactly the shape that its program declares with x's leading dimensions.
    """
    programs = [plan.declared(link.epilogue) for link in links]
    tensors: list[Any] = [x, *(v for link in links for v in (link.weight, *link.inputs.values()))]
    plain = all(isinstance(t, Tensor) for t in tensors) and all(program.tile for program in programs) and all(link.main_grad is None for link in links)
    if not plain or not library.unseen(*tensors) or composed.asked(tensors):
        return None
    names = [(f"w{i}", {name: f"v{i}_{j}" for j, name in enumerate(link.inputs)}) for i, link in enumerate(links)]
    text = Written(f"again(x, {', '.join(name for weight, inputs in names for name in (weight, *inputs.values()))})")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, links = linear.cast(x, dtype), [link._replace(weight=linear.cast(link.weight, dtype)) for link in links]
        text.add(*(f"{name} = {text.hold(linear.cast)}({name}, {text.hold(dtype)})" for name in ("x", *(weight for weight, _ in names))))
    values: list[list[Any]] = [[link.inputs[declared.name] for declared in program.inputs] for link, program in zip(links, programs, strict=True)]
    steps = linear.steps(x, links, values)
    shapes: list[list[tuple[int, ...]]] = [[tuple(value.shape) for value in of] for of in values]
    of_taken: Sequence[tuple[int, ...]] = ()
    lead, taken, a, shape = tuple(x.shape[:-1]), "", "x", tuple(x.shape)
    for i, (link, program, step, (weight, named)) in enumerate(zip(links, programs, steps, names, strict=True)):
        given, last = [named[declared.name] for declared in program.inputs], i + 1 == len(links)
        inputs = "".join(f", {name}" for name in given)
        if step.trains:
            made = _Like(step, link.tune, shape, lead, lead if last else None, shapes[i], of_taken).made()
            text.add(f"r{i} = {text.hold(_apply)}({text.hold(made)}, {a}, {weight}{inputs}{taken})")
        else:
            keywords = [f", {declared.name}={_rows(name, declared.indices, len(lead))}" for declared, name in zip(program.inputs, given, strict=True)]
            text.add(f"y = {_kernel(text, link.epilogue, link.tune)}({_rows(a, 'mn', len(shape) - 1)}, {weight}.t(){''.join(keywords)})")
            text.add(f"r{i} = (y{_shaped(text, 'mn', lead, link.weight.shape[0]) if last else ''},)")
        before = None if last else steps[i + 1].before
        taken, of_taken = "", ()
        if before is not None:
            taken = f"{inputs}, *map({text.hold(Tensor.detach)}, {text.hold(layer.kept)}({text.hold(before)}, {a}, {weight}, [{', '.join(given)}], r{i}))"
            of_taken = shapes[i]
        a, shape = f"r{i}[0]", (math.prod(lead), link.weight.shape[0])
    text.add(f"return {a}")
    return text.function()


def _kernel(text: Written, program: str, tune: str | None) -> str:
    return f"{text.hold(library)}.kernel({text.hold(program)}, {text.hold(tune)})"


def _rows(name: str, indices: str, lead: int) -> str:
    """As `layer.rows`, of a tensor with so many leading dimensions."""
    if lead == 1 or "m" not in indices:
        return name
    if indices == "m":
        return f"{name}.reshape(-1)"
    return f"{name}.flatten(0, -2)" if lead else f"{name}[None]"


def _shaped(text: Written, indices: str, lead: Sequence[int], n: int) -> str:
    """As `layer.shaped`, of memory that nobody else has."""
    if len(lead) == 1 or "m" not in indices:
        return ""
    return f".resize_({text.hold((*lead, n) if indices == 'mn' else tuple(lead))})"


# -- layers that train


@dataclass(frozen=True, slots=True)
class _Made:
    """A layer's two ways, written out."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Any, ...]]


class Again(torch.autograd.Function):
    """(made, x, weight, *values) -> as `layer.Layer`."""

    @staticmethod
    def forward(ctx: Any, made: _Made, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.made = made
        return made.forward(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = ctx.made.backward(ctx, *arrived)
        return found


_apply: Any = super(torch.autograd.Function, Again).apply
"""Where no transform of torch.func is at work and none has left anything behind, which is all that `Function.apply` asks before it."""


@dataclass(frozen=True, slots=True)
class _Like:
    """A layer as it was called. shape: of x. lead: of the inputs. to: of the results; None for M itself. inputs, taken: the shapes of its inputs, and of those of the
    layer before, whose derivative it takes."""

    step: Step
    tune: str | None
    shape: tuple[int, ...]
    lead: tuple[int, ...]
    to: tuple[int, ...] | None
    inputs: Sequence[tuple[int, ...]]
    taken: Sequence[tuple[int, ...]]

    def made(self) -> _Made:
        outputs = len(api.graph_of(self.step.text).outputs)
        return _Made(self._forward(outputs), self._backward(len(self.step.outputs) if self.step.own is not None else outputs))

    def _forward(self, outputs: int) -> Callable[..., tuple[Tensor, ...]]:
        step = self.step
        values, results = [f"v{i}" for i in range(len(self.inputs))], [f"y{i}" for i in range(outputs)]
        text = Written(f"forward(ctx, x, w{''.join(f', {v}' for v in values)}, *taken)")
        names = zip(library.names(step.text), step.inputs, step.indices, strict=True)
        keywords = "".join(f", {name}={_rows(values[place], indices, len(self.lead))}" for name, place, indices in names)
        text.add(f"{', '.join(results)} = {_kernel(text, step.text, self.tune)}({_rows('x', 'mn', len(self.shape) - 1)}, w.t(){keywords})")
        if self.to is not None and len(self.to) != 1:
            for name, indices in zip(results, step.outputs, strict=False):
                if "m" in indices:
                    text.add(f"{name}.resize_({text.hold(self.to)}{f' + {name}.shape[1:]' if indices == 'mn' else ''})")
        every = [*values, *results, "x", "w"]
        own = [every[i] for i in step.own.kept] if step.own is not None else []
        saved = ["x" if step.weight else "None", "w" if step.x else "None", *own, *([f"*taken[{len(self.taken)}:]"] if step.before is not None else [])]
        text.add(f"ctx.save_for_backward({', '.join(saved)})")
        given = results[: len(step.outputs)] if step.own is not None else results
        if step.own is None:
            text.add("ctx.set_materialize_grads(False)")
        if constant := [given[i] for i in step.constant if i < len(given)]:
            text.add(f"ctx.mark_non_differentiable({', '.join(constant)})")
        text.add(f"return ({''.join(f'{name}, ' for name in given)})")
        return text.function()

    def _backward(self, given: int) -> Callable[..., tuple[Any, ...]]:
        step, own, before = self.step, self.step.own, self.step.before
        arrived, held = [f"g{i}" for i in range(given)], [f"s{i}" for i in range(len(own.kept))] if own is not None else []
        others = [f"t{i}" for i in range(len(before.kept))] if before is not None else []
        text = Written(f"backward(ctx, {', '.join(arrived)})")
        every = ["x", "w", *held, *others]
        text.add(f"{', '.join(every)} = ctx.saved_tensors")
        there = [name for name in every if (name != "x" or step.weight) and (name != "w" or step.x)]
        ways = f"{text.hold(torch.is_grad_enabled)}() or not {text.hold(library.unseen)}({', '.join((*(arrived if own is not None else arrived[:1]), *there))})"
        text.add(f"if {ways}:", f"    return {text.hold(self.general)}(ctx, {', '.join(arrived)})")
        dmm: str | None = "g0"
        found = ["None"] * len(self.inputs)
        if own is not None:
            to = len(self.to) if self.to is not None else 1
            at = [g if "m" not in indices else _rows(g, indices, to) for g, indices in zip(arrived, step.outputs, strict=True)]
            text.add(*(f"{g} = {rows}" for g, rows in zip(arrived, at, strict=True) if rows != g))
            # by place: the layer's inputs, its results, what else its forward gives, x and the weight
            leads = [len(self.lead)] * len(self.inputs) + [to] * len(step.outputs)
            kept = [_rows(name, indices, leads[i] if i < len(leads) else 1) for name, i, indices in zip(held, own.kept, own.indices, strict=True)]
            if own.product is None:
                kept[-2] = _rows(held[-2], "mn", len(self.shape) - 1)
            dmm, found = self._gradients(text, "r", own, kept, arrived, None, self.inputs)
        dx, dw, rest = "None", "None", ["None"] * len(self.taken)
        if dmm is not None:
            text.add(f"d = {dmm}")
            if step.weight:
                rows = _rows("x", "mn", len(self.shape) - 1)
                text.add(f"dw = {text.hold(torch.mm)}(d.t(), {rows}) if {text.hold(layer.wanted)}(ctx) is not {text.hold(Wanted.NOT)} else None")
                dw = "dw"
            if before is not None:
                leads = [len(self.lead)] * len(self.taken)
                kept = [_rows(name, indices, leads[i] if i < len(leads) else 1) for name, i, indices in zip(others, before.kept, before.indices, strict=True)]
                if before.product is None:
                    kept[-2] = f"{text.hold(layer.rows)}({others[-2]}, 'mn')"
                mm, rest = self._gradients(text, "q", before, kept, [], ("d", "w"), self.taken)
                dx = mm or "None"
            elif step.x:
                dx = f"{text.hold(torch.mm)}(d, w)"
            if dx != "None" and len(self.shape) != 2:
                dx = f"{dx}.view({text.hold(self.shape)})"
        nothing = ["None"] * len(others)
        text.add(f"return ({', '.join(['None', dx, dw, *found, *rest, *nothing])})")
        return text.function()

    def _gradients(
        self, text: Written, r: str, backward: Backward, kept: Sequence[str], arrived: Sequence[str], product: tuple[str, str] | None, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[str | None, list[str]]:  # fmt: skip
        """As `layer._gradients`: what the text calls the gradients of mm and of the inputs. r: how results are to be called. shapes: of the inputs."""
        if product is not None and backward.product is None:
            text.add(f"e = {text.hold(torch.mm)}({', '.join(product)})")
            arrived, product = ["e"], None
        given, results = [*kept, *arrived], list[str]()
        if backward.text:
            inputs = zip(library.names(backward.text), (given[i] for i in backward.arguments), strict=True)
            keywords = "".join(f", {name}={value}" for name, value in inputs)
            results = [f"{r}{i}" for i in range(len(api.graph_of(backward.text).outputs))]
            if backward.product is None:
                call = f"{_kernel(text, backward.text, self.tune)}({kept[-2]}, {kept[-1]}.t(){keywords})"
            elif product is not None:
                call = f"{_kernel(text, backward.text, self.tune)}({', '.join(product)}{keywords})"
            else:
                call = f"{_kernel(text, backward.text, None)}.over({arrived[backward.product]}{keywords})"
            text.add(f"{', '.join(results)} = {call}")
        found = [*results, *arrived]
        gradients = []
        for i, dtype, shape in zip(backward.inputs, backward.dtypes, shapes, strict=True):
            gradients.append("None" if i is None else f"{found[i]}.to({text.hold(dtype)}){f'.view({text.hold(shape)})' if len(shape) != 1 else ''}")
        return None if backward.mm is None else found[backward.mm], gradients

    def general(self, ctx: Any, *arrived: Any) -> tuple[Any, ...]:
        """The layer's own backward, where one of torch's modes is to see it, or a second derivative is asked for."""
        ctx.step, ctx.tune, ctx.main_grad, ctx.numbers = self.step, self.tune, None, ((), ())
        ctx.shapes = self.shape, [*self.inputs, *self.taken]
        dx, dweight, _, _, _, _, *rest = layer.Layer.backward(ctx, *arrived)
        return None, dx, dweight, *rest
