"""A chain of layers called before, called again: the function for it, and for each layer's backward, written out with all that is known.

What `chain.chain` checks and plans hangs on its tensors' shapes, dtypes and whether they require a gradient, and on torch's modes. Where all this is as it was, by
one comparison, the chain is what `prepare` has made of it: a function without its checks, which computes the same by the same kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

from epigen.ir import reference
from epigen.ir.graph import PACKED
from epigen.ir.program import graph_of
from epigen.runtime import arguments
from epigen.runtime.code_builder import CodeBuilder
from epigen.runtime.fast_call import Check
from epigen.training import chain, composed, functions, layer, library, parted, plan
from epigen.training.guarded_cache import DEVICES, GuardedCache, State, likeness, state
from epigen.training.layer import Link, Wanted
from epigen.training.plan import Backward, Step
from epigen.training.site import How, Site, leading

Way = Callable[..., Any]
"""A chain, of x, and of each layer the weight, the inputs in their order and the buffer for its weight's gradient, if there is one."""

Ways = GuardedCache[Way | str]

Shape = tuple[int, ...] | None
"""Of an input; None of a number."""

_ONCE, _NEVER = "called once", "called by chain.chain"
"""In the place of a way: none is made of what is not called again, and of some none can be."""

_KINDS = 1024
"""Of chains that are remembered, by programs and shapes: those called last."""


def call(x: Any, links: Sequence[Link]) -> Any:
    """`chain.chain`, which is left out where a call like this one was made before."""
    given = _row(x, links)
    if is_dynamo_compiling() or has_torch_function(given) or not _remembered(given, links):
        return chain.chain(x, links)
    if all(type(link.epilogue) is str for link in links):
        return _found(x, links, given)
    if composed.needed(given):
        return chain.chain(x, links)
    x, links, trace = chain.written(x, links)
    return chain.returned(trace, _found(x, links, _row(x, links)))


def _row(x: Any, links: Sequence[Link]) -> list[Any]:
    """All tensors and numbers of a chain, as a way takes them."""
    row = [x]
    for link in links:
        row += (link.weight, *link.inputs.values())
        if link.main_grad is not None:
            row.append(link.main_grad)
    return row


def _remembered(row: Sequence[Any], links: Sequence[Link]) -> bool:
    """Whether of such a call a way may be made, and nobody is to see it who does not see that."""
    if torch._C._autograd._profiler_enabled() or forward_ad._current_level >= 0 or not _VALUES.issuperset(map(type, row)):
        return False
    for link in links:
        if type(link.weight) not in arguments.PLAIN or link.weight.is_nested:
            return False
        if type(link.epilogue) is not str and not functions.is_function(link.epilogue):
            return False
    return type(row[0]) in arguments.PLAIN and not row[0].is_nested and row[0].device.type in DEVICES


_NUMBERS = frozenset((float, int, bool))
_VALUES = _NUMBERS.union(arguments.PLAIN)


@functools.lru_cache(maxsize=_KINDS)
def _ways(*_key: Any) -> Ways:
    return GuardedCache()


def _found(x: Tensor, links: Sequence[Link], row: Sequence[Tensor]) -> Any:
    """Of programs."""
    if is_dynamo_compiling():  # where it could not look into all of it, it looks into each function
        return chain.chain(x, links)
    key: list[Any] = [x.shape]
    tensors = row
    if not _NUMBERS.isdisjoint(map(type, row)):
        links = [link._replace(inputs={name: v if isinstance(v, Tensor) else _number(name, v, link) for name, v in link.inputs.items()}) for link in links]
        row = _row(x, links)
        tensors = [v for v in row if isinstance(v, Tensor)]
        key.append(tuple(place for place, v in enumerate(row) if not isinstance(v, Tensor)))
    for link in links:
        key += (link.weight.shape, link.epilogue, link.save, link.of, link.tune, link.main_grad is None, *link.inputs)
    try:
        ways = _ways(*key)
    except TypeError:  # of an option that is of another kind than options are, and cannot be hashed
        return chain.chain(x, links)
    return run(ways, state(x.device.type), tensors, lambda: (x, links), row)[0]


def _number(name: str, value: Any, link: Link) -> Any:
    """What a way takes in the place of a number: a seed as a tensor, which forward and backward share."""
    seeds = (i.name for i in plan.declared(link.epilogue).inputs if i.seed)
    return arguments.seed(name, value, link.weight) if name in seeds else arguments.number(name, value)


def run(
    ways: Ways, now: State, tensors: Sequence[Tensor], of: Callable[[], tuple[Tensor, Sequence[Link]]], row: Sequence[Any] | None = None
) -> tuple[Any, Way | None]:  # fmt: skip
    """The results of a chain, and the way by which it was computed, if there is one. tensors: what is compared. of: the chain. row: what a way takes, where there are
    numbers among it."""
    if is_dynamo_compiling():
        return chain.chain(*of()), None
    way = ways.get(now, tensors)
    if callable(way):
        return way(*(tensors if row is None else row)), way
    x, links = of()
    results = chain.chain(x, links)
    if way is None:  # at the second call: of a batch that is never like another nothing is written out
        ways.put(now, tensors, _ONCE)
    elif way == _ONCE:
        made = prepare(x, links)
        ways.put(now, tensors, made or _NEVER)
        return results, made
    return results, None


def prepare(x: Tensor, links: Sequence[Link]) -> Way | None:
    """What `chain.chain` comes to where it is called with tensors like these, in torch's modes as they are: a function without its checks. None where the chain
    has torch itself run the layers, where a gradient is 0 throughout, where one that trains computes or converts what it multiplies, and where one gives a mask, or within the chain more than a tile. Inputs are taken of exactly the shapes that a program
    declares with x's leading dimensions.
    """
    wholes, links = links, [parted.apart(link) for link in links]
    programs = [plan.declared(link.epilogue) for link in links]
    tensors = [v for v in _row(x, links) if isinstance(v, Tensor)]
    last_graph = graph_of(links[-1].epilogue)
    fits = all(program.tile for program in programs[:-1]) and not any(last_graph.nodes[o.node].kind == PACKED for o in last_graph.outputs)
    of_kernels = all(type(link.weight) in arguments.PLAIN for link in links)  # and no product that the vendor takes of a sparse weight
    if not fits or not of_kernels or not library.unseen(*tensors) or composed.needed(tensors):
        return None
    for link, program in zip(links, programs, strict=True):
        expanded = chain.presented(link, program, x)
        if any(isinstance(value, Tensor) and value is not link.inputs[declared.name] for declared, value in zip(program.inputs, expanded, strict=True)):
            return None
    names = [(f"w{i}", {name: f"v{i}_{j}" for j, name in enumerate(link.inputs)}) for i, link in enumerate(wholes)]
    mains = [[f"m{i}"] if link.main_grad is not None else [] for i, link in enumerate(links)]
    taken_by = [name for (weight, inputs), main in zip(names, mains, strict=True) for name in (weight, *inputs.values(), *main)]
    text = CodeBuilder(f"again(x, {', '.join(taken_by)})")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        second = [inputs[name] for (_, inputs), link in zip(names, links, strict=True) if (name := plan.multiplied(link.epilogue)) in inputs]
        x, wholes = chain.cast(x, dtype), [link._replace(weight=chain.cast(link.weight, dtype), inputs=chain.multiplied(link, dtype)) for link in wholes]
        links = [parted.apart(link) for link in wholes]
        text.add(*(f"{name} = {text.hold(chain.cast)}({name}, {text.hold(dtype)})" for name in ("x", *(weight for weight, _ in names), *second)))
    for i, (whole, link) in enumerate(zip(wholes, links, strict=True)):
        if tuple(whole.inputs) != tuple(link.inputs):
            of_whole, names[i] = names[i], (f"p{i}", {name: f"p{i}_{j}" for j, name in enumerate(link.inputs)})
            parts, given = (", ".join((weight, *named.values())) for weight, named in (names[i], of_whole))
            text.add(f"{parts} = {text.hold(parted.taken_apart(whole))}({given})")
    values: list[list[Any]] = [[link.inputs[declared.name] for declared in program.inputs] for link, program in zip(links, programs, strict=True)]
    steps = chain.steps(x, links, values)
    if any(step.own is not None and step.own.zeros for step in steps):
        return None
    computed = any(graph_of(link.epilogue).through_operands() or arguments.converted(x, link.weight) for link in links)
    if computed and any(step.trains for step in steps):
        return None
    shapes: list[list[Shape]] = [[tuple(value.shape) if isinstance(value, Tensor) else None for value in of] for of in values]
    of_taken: Sequence[Shape] = ()
    lead, taken, a, shape = tuple(x.shape[:-1]), "", "x", tuple(x.shape)
    for i, (link, program, step, (weight, named)) in enumerate(zip(links, programs, steps, names, strict=True)):
        read, last = [named[declared.name] for declared in program.inputs], i + 1 == len(links)
        inputs = "".join(f", {name}" for name in read)
        if step.trains:
            made = _LayerCall(step, link.tune, shape, link.weight.shape[0], lead, lead if last else None, shapes[i], of_taken, bool(mains[i])).made()
            text.add(f"r{i} = {text.hold(_apply)}({text.hold(made)}, {a}, {weight}{inputs}{''.join(f', {m}' for m in mains[i])}{taken})")
        else:
            site = Site(link.epilogue, link.tune, How.TRANSPOSED, _shapes(lead if last else None, link.weight.shape[0], program.outputs))
            text.add(f"r{i} = {site.call(text, [a, weight, *read])}")
        before = None if last else steps[i + 1].before
        taken, of_taken = "", ()
        if before is not None:
            taken = f"{inputs}, *map({text.hold(Tensor.detach)}, {text.hold(layer.kept)}({text.hold(before)}, {a}, {weight}, [{', '.join(read)}], r{i}))"
            of_taken = shapes[i]
        a, shape = f"r{i}[0]", (math.prod(lead), link.weight.shape[0])
    several, count = programs[-1].type, len(programs[-1].outputs)
    results = a if several is None else f"{text.hold(tuple.__new__)}({text.hold(several)}, r{len(links) - 1}[:{count}])"
    text.add(f"return {text.hold(parted.joined)}({wholes[-1].epilogue!r}, {results})" if parted.needed(wholes[-1:]) else f"return {results}")
    return text.function()


def _shapes(lead: Sequence[int] | None, n: int, outputs: Sequence[str]) -> list[tuple[int, ...] | None]:
    """Of a layer's results that have leading dimensions in place of M, by their indices; where `lead` is None they have not."""
    if lead is None or len(lead) == 1:
        return []
    return [{"mn": (*lead, n), "m": tuple(lead)}.get(indices) for indices in outputs]


# -- layers that train


@dataclass(slots=True)
class _Made:
    """A layer's two ways, written out. The backward is, once gradients have arrived, for those like them; missed: how often others have."""

    call: _LayerCall
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Any, ...]] | None = None
    missed: int = 0

    def general(self, ctx: Any, saved: Sequence[Any], *arrived: Any) -> tuple[Any, ...]:
        """The layer's own backward: where one of torch's modes is to see it, or a second derivative is asked for, and for gradients that lie otherwise."""
        tensors = [*arrived[: self.call.arriving], *(t for t in saved if t is not None)]
        gradients = self.call.general(ctx, saved, arrived)
        if not torch.is_grad_enabled() and all(isinstance(t, Tensor) for t in tensors) and library.unseen(*tensors):
            self.missed += 1
            check = likeness(tensors) if self.missed & (self.missed - 1) == 0 else None
            if check is not None:
                self.backward = self.call.backward(check, self.general)
        return gradients


class Again(torch.autograd.Function):
    """(made, x, weight, *the layer's inputs, main_grad if there is one, *those of the layer before) -> as `layer.Layer`."""

    @staticmethod
    def forward(ctx: Any, made: _Made, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.made = made
        return made.forward(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> tuple[Any, ...]:
        made: _Made = ctx.made
        return (made.backward or made.general)(ctx, ctx.saved_tensors, *arrived)


_BEFORE_INPUTS = 3
"""Arguments that come before the layer's inputs."""

_apply: Any = super(torch.autograd.Function, Again).apply
"""Where no transform of torch.func is at work and none has left anything behind, which is all that `Function.apply` asks before it."""


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """A layer as it was called. shape: of x. n: of the weight. lead: of the inputs. to: of the results; None for M itself. inputs, taken: the shapes of its inputs, and of those of the
    layer before, whose derivative it takes. adds: whether the weight's gradient is added to a buffer."""

    step: Step
    tune: str | None
    shape: tuple[int, ...]
    n: int
    lead: tuple[int, ...]
    to: tuple[int, ...] | None
    inputs: Sequence[Shape]
    taken: Sequence[Shape]
    adds: bool

    @property
    def outputs(self) -> int:
        return len(graph_of(self.step.text).outputs)

    @property
    def given(self) -> int:
        """How many results autograd sees."""
        return len(self.step.outputs) if self.step.own is not None else self.outputs

    @property
    def arriving(self) -> int:
        """At how many of them a gradient is read."""
        return self.given if self.step.own is not None else 1

    @property
    def numbers(self) -> tuple[list[int], list[int]]:
        """Which of the inputs, and of those of the layer before, are numbers."""
        own, before = ([i for i, shape in enumerate(shapes) if shape is None] for shapes in (self.inputs, self.taken))
        return own, before

    def made(self) -> _Made:
        return _Made(self, self._forward(self.outputs))

    def _forward(self, outputs: int) -> Callable[..., tuple[Tensor, ...]]:
        step = self.step
        values, results = [f"v{i}" for i in range(len(self.inputs))], [f"y{i}" for i in range(outputs)]
        text = CodeBuilder(f"forward(ctx, x, w{''.join(f', {v}' for v in values)}{', main' if self.adds else ''}, *taken)")
        site = Site(step.text, self.tune, How.TRANSPOSED, _shapes(self.to, self.n, step.outputs))
        text.add(f"{', '.join(results)}, = {site.call(text, ['x', 'w', *(values[place] for place in step.inputs)])}")
        every = [*values, *results, "x", "w"]
        own = [every[i] for i in step.own.kept] if step.own is not None else []
        needs_x, second = step.weight or step.second is not None, [values[i] for i in step.kept]
        saved = ["x" if needs_x else "None", "w" if step.x else "None", *second, *own, *([f"*taken[{len(self.taken)}:]"] if step.before is not None else [])]
        text.add(f"ctx.save_for_backward({', '.join(saved)})")
        if self.adds:
            text.add("ctx.main_grad = main")
        numbers, taken = self.numbers
        if numbers or taken:
            text.add(f"ctx.numbers = [{', '.join(f'v{i}' for i in numbers)}], [{', '.join(f'taken[{i}]' for i in taken)}]")
        given = results[: len(step.outputs)] if step.own is not None else results
        if step.own is None:
            text.add("ctx.set_materialize_grads(False)")
        if constant := [given[i] for i in step.constant if i < len(given)]:
            text.add(f"ctx.mark_non_differentiable({', '.join(constant)})")
        text.add(f"return ({''.join(f'{name}, ' for name in given)})")
        return text.function()

    def backward(self, check: Check, general: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """check: of the gradients that are read and of what was kept. general: where that fails."""
        step, own, before = self.step, self.step.own, self.step.before
        arrived, held = [f"g{i}" for i in range(self.given)], [f"s{i}" for i in range(len(own.kept))] if own is not None else []
        others = [f"t{i}" for i in range(len(before.kept))] if before is not None else []
        second = ["u"] * len(step.kept)  # the right operand of a second product, where x has a gradient
        text = CodeBuilder(f"backward(ctx, saved, {', '.join(arrived)})")
        every = ["x", "w", *second, *held, *others]
        text.add(f"{', '.join(every)} = saved")
        numbers, taken = ([f"{n}{i}" for i in range(len(places))] for n, places in zip("mn", self.numbers, strict=True))
        if numbers or taken:
            text.add(f"[{', '.join(numbers)}], [{', '.join(taken)}] = ctx.numbers")
        there = [name for name in every if (name != "x" or step.weight or step.second is not None) and (name != "w" or step.x)]
        ways = [f"{text.hold(torch.is_grad_enabled)}()", f"{text.hold(torch._C._autograd._profiler_enabled)}()"]
        ways += ["g0 is None"] if own is None else []
        ways.append(f"not {text.hold(check)}({', '.join([*arrived[: self.arriving], *there])})")
        text.add(f"if {' or '.join(ways)}:", f"    return {text.hold(general)}(ctx, saved, {', '.join(arrived)})")
        dmm: str | None = "g0"
        gradients = ["None"] * len(self.inputs)
        if own is not None:
            dmm, gradients = self._gradients(text, "r", own, held, numbers, arrived, None, self.inputs)
        dx, dw, rest = "None", "None", ["None"] * len(self.taken)
        if dmm is not None:
            to = len(self.to) if self.to is not None else 1
            text.add(f"d = {leading(dmm, 'mn', to) if dmm in arrived else dmm}")
            if step.weight:
                rows = leading("x", "mn", len(self.shape) - 1)
                text.add(f"use, dw = {text.hold(layer.wanted)}(ctx), None")
                if self.adds:
                    text.add(f"if use is {text.hold(Wanted.ADDED)}:", f"    {text.hold(library.add_product)}(ctx.main_grad, d.t(), {rows})")
                text.add(f"{'el' if self.adds else ''}if use is not {text.hold(Wanted.NOT)}:", f"    dw = {text.hold(torch.mm)}(d.t(), {rows})")
                dw = "dw"
            if before is not None:
                mm, rest = self._gradients(text, "q", before, others, taken, [], ("d", "w"), self.taken)
                dx = mm or "None"
            elif step.x:
                dx = f"{text.hold(torch.mm)}(d, w)"
        if step.second is not None:
            # the gradient of a second product, as it is found among those of the inputs, and what comes of it
            rows = leading("x", "mn", len(self.shape) - 1)
            text.add(f"e = {gradients[step.second]}")
            for right in second:
                text.add(f"dx = {text.hold(torch.mm)}(e, {right}.t())" if dx == "None" else f"dx = {text.hold(torch.addmm)}({dx}, e, {right}.t())")
                dx = "dx"
            gradients[step.second] = f"{text.hold(torch.mm)}(e.t(), {rows}).t() if ctx.needs_input_grad[{_BEFORE_INPUTS + step.second}] else None"
        if dx != "None" and len(self.shape) != 2:
            dx = f"{dx}.view({text.hold(self.shape)})"
        main, nothing = ["None"] * self.adds, ["None"] * len(others)
        text.add(f"return ({', '.join(['None', dx, dw, *gradients, *main, *rest, *nothing])})")
        return text.function()

    def _gradients(
        self, text: CodeBuilder, r: str, backward: Backward, kept: Sequence[str], numbers: Sequence[str], arrived: Sequence[str], product: tuple[str, str] | None,
        shapes: Sequence[Shape],
    ) -> tuple[str | None, list[str]]:  # fmt: skip
        """As `layer.gradients`: what the text calls the gradients of mm and of the inputs. r: how results are to be called. shapes: of the inputs."""
        if product is not None and backward.product is None:
            text.add(f"e = {text.hold(torch.mm)}({', '.join(product)})")
            arrived, product = ["e"], None
        given, results = [*kept, *numbers, *arrived], list[str]()
        if backward.text:
            results = [f"{r}{i}" for i in range(len(graph_of(backward.text).outputs))]
            if backward.product is None:
                how, first, tune = How.TRANSPOSED, [*kept[-2:]], self.tune
            elif product is not None:
                how, first, tune = How.STRAIGHT, [*product], self.tune
            else:
                how, first, tune = How.OVER, [arrived[backward.product]], None
            site = Site(backward.text, tune, how)
            text.add(f"{', '.join(results)}, = {site.call(text, [*first, *(given[i] for i in backward.arguments)])}")
        available = [*results, *arrived]
        gradients = []
        for place, (i, dtype, shape, periods) in enumerate(zip(backward.inputs, backward.dtypes, shapes, backward.periods, strict=True)):
            if i is None or shape is None:
                gradients.append("None")
                continue
            as_wanted = text.hold(dtype)
            gradients.append(f"({available[i]} if {available[i]}.dtype is {as_wanted} else {available[i]}.to({as_wanted}))")
            if backward is self.step.own and place == self.step.second:  # which is that of its product
                gradients[-1] = leading(gradients[-1], "mn", len(self.to)) if available[i] in arrived and self.to is not None else gradients[-1]
                continue
            if periods:
                if backward is self.step.own and available[i] in arrived and self.to is not None:
                    gradients[-1] = leading(gradients[-1], self.step.outputs[arrived.index(available[i])], len(self.to))
                gradients[-1] = f"{text.hold(reference.summed)}({gradients[-1]}, {text.hold(periods)}, {text.hold(shape)})"
                continue
            as_it_comes = available[i] in arrived and self.to is not None and tuple(shape) == (*self.to, self.n)
            if len(shape) != 1 and not as_it_comes:
                gradients[-1] += f".view({text.hold(shape)})"
        return None if backward.mm is None else available[backward.mm], gradients

    def general(self, ctx: Any, saved: Sequence[Any], arrived: Sequence[Any]) -> tuple[Any, ...]:
        ctx.step, ctx.tune, ctx.main_grad = self.step, self.tune, ctx.main_grad if self.adds else None
        ctx.before_inputs = _BEFORE_INPUTS
        ctx.numbers = ctx.numbers if any(self.numbers) else ((), ())
        ctx.shapes = self.shape, [*self.inputs, *self.taken]
        dx, dweight, _, _, _, _, *rest = layer.backward(ctx, saved, arrived)
        own, main = len(self.inputs), [None] * self.adds
        return None, dx, dweight, *rest[:own], *main, *rest[own:]
