"""A call made before, made again: one comparison of all tensors with those of that call, then the outputs and the launches.

What the comparison covers is what a prepared call depends on: types, devices, dtypes, shapes, strides, negative bits. Addresses are
looked at anew in every call, and their alignment has to be as it was; numbers are handed on. No tensor is remembered, so one that is
freed and another that lies at its address are told apart like any two.

Each such call has a function of its own, written out for it: Python takes longer over what it need not ask than over what it must. That of
"relu(mm + bias)" with an `out` reads like this. Names with a number are objects that it holds: dict, list and hookchain are where a setting or a hook of
Triton's would be. The test that holds the text here has a device without an index.

    def again(itself, a, b, inputs, out):
        try:
            v0 = inputs['bias']
        except KeyError:
            return None
        if len(inputs) != 1:
            return None
        if not check5(a, b, v0, out):
            return None
        if forward_ad8._current_level >= 0 or _len_torch_dispatch_stack6() or _get_tracing_state7() is not None or dict4 or hookchain1.calls or hookchain2.calls or list3:
            return None
        if current_device10() != None:
            return _elsewhere9(None, itself, a, b, inputs, out)
        stream = current_stream11(None)
        if not launches13(stream, stream and capturing14(), a, b, v0, out):
            return None
        return out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from epigen.dtypes import FP32
from epigen.ir.graph import PRODUCT, SEED
from epigen.runtime import arguments, direct, launch, outputs, overlap
from epigen.runtime.arguments import ALIGNED_BYTES
from epigen.runtime.code_builder import CodeBuilder
from epigen.runtime.prepared import Operands, Plan, Prepared
from epigen.runtime.workspace import current_stream

_guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # torch may take it away, as it promises nothing

Again = Callable[[Any, Any, Any, Mapping[str, Any], Any], Any]
"""(itself, a, b, inputs, out) -> what the call returns; None where it is not the same call after all, and nothing was done.

itself: the function, which would live until the next garbage collection if it were in its own closure. a, b: None where the product is
among the inputs. out: as the caller gave it, of the type that it had in the call before.
"""

Check = Callable[..., bool]

# what torch.cuda asks, without its Python around it
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def fast_call(prepared: Prepared, operands: Operands, inputs: Mapping[str, Any], out: Any, results: Sequence[Tensor], named: Any) -> Again | None:
    """After `prepared` has run with these arguments: what makes calls like it from now on; None where only Triton can.

    out: None, a tensor, or a sequence of tensors. results: that call's outputs. named: makes of several outputs what a call returns.
    """
    values = (*operands, *inputs.values())
    tensors = [v for v in (*values, *(() if out is None else results)) if isinstance(v, Tensor)]
    if prepared.plan is None or prepared.interpreted or prepared.padded or prepared.needs_triton or not all(type(t) in arguments.PLAIN for t in tensors):
        return None
    text = CodeBuilder("again(itself, a, b, inputs, out)")
    observed = direct.observed([x.jit for x in prepared.launches], text)
    launches = prepared.direct(tuple(inputs), (*values, *results)) if observed is not None else None
    if launches is None:
        return None
    names = [*"ab"[: len(operands)], *_inputs(text, inputs)]
    called = dict(zip(inputs, names[len(operands) :], strict=True))
    for node in prepared.graph.inputs():
        if node.kind == SEED:
            text.add(f"{called[node.name]} = {text.hold(arguments.seed)}({node.name!r}, {called[node.name]}, {'a' if operands else called[PRODUCT]})")
    returned = _outputs(text, out, len(results))
    given = dict(zip(names, values, strict=True)) | (dict(zip(returned, results, strict=True)) if out is not None else {})
    _compare(text, given)
    # one of torch's modes is to see the call, or torch.jit writes it down
    ways = [f"{text.hold(torch._C._len_torch_dispatch_stack)}()", f"{text.hold(torch._C._get_tracing_state)}() is not None"]
    if any(t.requires_grad for t in tensors):
        ways.append(f"{text.hold(torch.is_grad_enabled)}()")
    _refuse(text, *_modes(text, prepared.plan), *ways, *filter(None, [observed]))
    pairs = _pairs(prepared, operands, inputs, given, returned) if out is not None else []
    elsewhere = f"{text.hold(_elsewhere)}({text.hold(prepared.device.index)}, itself, a, b, inputs, out)"
    if not _launched(text, prepared, launches, given, inputs, returned if out is None else (), pairs, elsewhere, returned[0]):
        return None
    # by the tuple's own constructor: that of a named tuple is written in Python, and takes three times as long
    text.add(f"return {text.hold(tuple.__new__)}({text.hold(named)}, ({', '.join(returned)}))" if len(returned) > 1 else f"return {returned[0]}")
    again: Again = text.function()
    return again


def bound(
    prepared: Prepared, operands: Operands, inputs: Mapping[str, Any], order: Sequence[str], results: Sequence[Tensor], views: Mapping[str, str],
    shapes: Sequence[tuple[int, ...] | None],
) -> Callable[..., tuple[Tensor, ...] | None] | None:  # fmt: skip
    """As `fast_call`, for who knows that all tensors are like these, and all numbers floats, whatever dimensions they have their elements in, but for their addresses' alignment.

    The function takes operands and inputs in a row, and compares none of them: nobody in torch may be there to see it. It returns the
    outputs as a tuple; None where nothing was done.
    inputs: in the program's order. order: that in which the function takes them.
    views: operands, by name, as expressions of what is given for them, for what the vendor multiplies. shapes: of each output, in place of its own.
    """
    values = (*operands, *inputs.values())
    if (
        prepared.plan is None
        or prepared.interpreted
        or prepared.padded
        or prepared.needs_triton
        or not all(type(v) in (*arguments.PLAIN, float) for v in values)
    ):
        return None
    called = {name: f"v{i}" for i, name in enumerate(order)}
    names = [*"ab"[: len(operands)], *(called[name] for name in inputs)]
    text = CodeBuilder(f"bound({', '.join([*'ab'[: len(operands)], *called.values()])})")
    observed = direct.observed([x.jit for x in prepared.launches], text)
    launches = prepared.direct(tuple(inputs), (*values, *results)) if observed is not None else None
    if launches is None:
        return None
    _refuse(text, *_modes(text, prepared.plan), *filter(None, [observed]))
    returned = _outputs(text, None, len(results))
    if not _launched(text, prepared, launches, dict(zip(names, values, strict=True)), inputs, returned, (), "None", returned[0], views, shapes):
        return None
    text.add(f"return ({', '.join(returned)},)")
    return text.function()


def _launched(
    text: CodeBuilder, prepared: Prepared, launches: Sequence[launch.Direct], given: Mapping[str, Any], inputs: Mapping[str, Any], new: Sequence[str],
    pairs: Sequence[tuple[overlap.Pair, str, str]], elsewhere: str, whole: str, views: Mapping[str, str] = MappingProxyType({}),
    shapes: Sequence[tuple[int, ...] | None] = (),
) -> bool:  # fmt: skip
    """Allocates and launches; whether that can be done without Triton. given: the arguments by what the text calls them, operands first. new: the outputs to allocate. pairs: what of given outputs has to
    be apart. elsewhere: what is returned where another device is the current one. whole: the output of what the vendor computes. The rest as of `bound`."""
    assert prepared.plan is not None
    index = text.hold(prepared.device.index)
    if torch.cuda.device_count() != 1:  # else it is the current one
        text.add(f"if {text.hold(current_device)}() != {index}:", f"    return {elsewhere}")
    # the vendor's product takes long: whether all is aligned as it was has to be known before it, and not by the launches, of which there may be none
    now = not launches or prepared.plan.by_vendor or any(overlap.near(given[t], given[other]) for _, t, other in pairs)
    places = {name: place for place, name in enumerate(given)}
    apart = [(places[t], places[other], overlap.size_bytes(given[t]), overlap.size_bytes(given[other])) for _, t, other in pairs if not now]
    step = None
    if launches:
        step = launch.in_one_step(launches, () if now else tuple(given.values()), len(prepared.slots(tuple(inputs))), prepared.device.index, apart)
        if step is None:
            return False
    addresses = _Addresses(text, now=now)
    slots = _slots(text, given, dict(zip([name for name in given if name.startswith("v")], inputs, strict=True)), addresses)
    if addresses.now:
        _apart(text, given, pairs)
    if new:
        slots += _new(text, prepared, new, addresses, shapes)
    a, b = views.get("a", "a"), views.get("b", "b")
    if prepared.plan.rendered.whole:
        (out,) = prepared.outputs
        viewed = f"{whole}.view({text.hold(prepared.held(out).shape)})" if any(shapes) else whole
        text.add(f"{text.hold(prepared.compute)}({a}, {b}, {viewed})")
        return True
    slots += _between(text, prepared, addresses, a, b)
    if step is not None:
        text.add(f"stream = {text.hold(current_stream)}({index})")
        _refuse(text, f"not {launch.step_call(text, step, launches, 'stream', slots)}")
    return True


def _refuse(text: CodeBuilder, *ways: str) -> None:
    """Where one of these expressions is true, it is another call."""
    text.add(f"if {' or '.join(ways)}:", "    return None")


def _inputs(text: CodeBuilder, inputs: Mapping[str, Any]) -> list[str]:
    """Takes the inputs by their names, in whatever order they come."""
    names = [f"v{i}" for i in range(len(inputs))]
    if inputs:
        text.add("try:", *(f"    {v} = inputs[{name!r}]" for v, name in zip(names, inputs, strict=True)), "except KeyError:", "    return None")
    _refuse(text, f"len(inputs) != {len(inputs)}")
    return names


def _outputs(text: CodeBuilder, out: Any, count: int) -> list[str]:
    """What the outputs are called, which are taken apart here if the caller gave several."""
    if isinstance(out, Tensor):
        return ["out"]
    names = [f"r{i}" for i in range(count)]
    if out is not None:
        _refuse(text, f"len(out) != {count}")
        text.add(f"({', '.join(names)},) = out")
    return names


def _compare(text: CodeBuilder, given: Mapping[str, Any]) -> None:
    """Whether the arguments are as those of that call. given: those, by what the text calls them."""
    ways = [f"type({name}) is not {text.hold(type(value))}" for name, value in given.items() if not isinstance(value, Tensor)]
    once: dict[int, str] = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and once.setdefault(id(value), name) != name:
            # an input that is an output in place as well, and has to be again: the comparison takes no tensor twice
            ways.append(f"{name} is not {once[id(value)]}")
    compare = text.hold(_comparison([given[name] for name in once.values()]))
    _refuse(text, *ways, f"not {compare}({', '.join(once.values())})")


def _modes(text: CodeBuilder, plan: Plan) -> list[str]:
    """What torch's modes must not be, of the thread or of the process, wherever they make a difference."""
    ways = [f"{text.hold(forward_ad)}._current_level >= 0"]  # a tensor may have a tangent
    if plan.spec.signature.a == FP32:
        ways.append(f"{text.hold(arguments.process_precision)}() != {text.hold(arguments.process_precision())}")
    return ways


def _elsewhere(index: int, again: Again, *given: Any) -> Any:
    """The same where the current device is another one."""
    with torch.cuda.device(index):
        return again(again, *given)


@dataclass(frozen=True, slots=True)
class _Addresses:
    """now: the text asks tensors for their addresses; else the launches do."""

    text: CodeBuilder
    now: bool

    def of(self, name: str) -> str:
        if not self.now:
            return name
        self.text.add(f"of_{name} = {name}.data_ptr()")
        return f"of_{name}"


def _slots(text: CodeBuilder, given: Mapping[str, Any], inputs: Mapping[str, str], addresses: _Addresses) -> list[str]:
    """The addresses of tensors, which have to be aligned as they were, and the numbers. inputs: the inputs' own names."""
    slots: list[str] = []
    together: list[str] = []
    apart: list[str] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            slots.append(addresses.of(name))
            if addresses.now:
                (apart if value.data_ptr() % ALIGNED_BYTES else together).append(slots[-1])
        elif type(value) is float:
            slots.append(name)
        else:
            text.add(f"of_{name} = {text.hold(arguments.number)}({inputs[name]!r}, {name})")
            slots.append(f"of_{name}")
    ways = [f"({' | '.join(together)}) % {ALIGNED_BYTES}"] if together else []
    ways += [f"not {slot} % {ALIGNED_BYTES}" for slot in apart]
    if ways:
        _refuse(text, *ways)
    return slots


def _pairs(
    prepared: Prepared, operands: Operands, inputs: Mapping[str, Any], given: Mapping[str, Any], returned: Sequence[str]
) -> list[tuple[overlap.Pair, str, str]]:
    """Each output that is given and what else is that it may not share memory with, by what the text calls them, as `given` and `returned` do.

    One tensor given twice is left out: that call was allowed it, and it is compared with that call.
    """
    names = list(given)
    tensors = {name: held for name, held in zip(inputs, names[len(operands) :], strict=False) if isinstance(given[held], Tensor)}
    outs = dict(zip((o.name for o in prepared.outputs), returned, strict=True))
    pairs = overlap.pairs(prepared.replaces, dict(zip("ab", names[: len(operands)], strict=False)), tensors, outs)
    return [(pair, t, other) for pair, t, other in pairs if given[t] is not given[other]]


def _apart(text: CodeBuilder, given: Mapping[str, Any], pairs: Sequence[tuple[overlap.Pair, str, str]]) -> None:
    """Refuses outputs that share memory with what else is given, of which this is asked only where they are near: 0.05 us a pair."""
    for pair, t, other in pairs:
        before, behind = text.hold(-overlap.size_bytes(given[other])), text.hold(overlap.size_bytes(given[t]))
        text.add(f"if {before} < of_{other} - of_{t} < {behind}:", f"    {text.hold(pair.check)}({t}, {other})")


def _new(text: CodeBuilder, prepared: Prepared, names: Sequence[str], addresses: _Addresses, shapes: Sequence[tuple[int, ...] | None] = ()) -> list[str]:
    """Allocates the outputs. shapes: of each, in place of its own."""
    slots: list[str] = []
    allocate = text.hold(outputs.quick_allocator(prepared.device))
    for place, (name, new) in enumerate(zip(names, map(prepared.held, prepared.outputs), strict=True)):
        shape = shapes[place] if place < len(shapes) else None
        if shape is None:
            narrow = "" if new.width is None else f".narrow({len(new.shape) - 1}, 0, {text.hold(new.width)})"
            text.add(f"{name} = {allocate}({', '.join(map(text.hold, (new.shape, new.strides, new.dtype)))}){narrow}")
        else:
            strides = tuple(max(1, math.prod(shape[d + 1 :])) for d in range(len(shape)))
            text.add(f"{name} = {allocate}({', '.join(map(text.hold, (shape, strides, new.dtype)))})")
        slots.append(addresses.of(name))
    return slots


def _between(text: CodeBuilder, prepared: Prepared, addresses: _Addresses, a: str, b: str) -> list[str]:
    """Allocates what is neither given nor returned: workspace, counters, the vendor's product of a and b. Each is held until the launches are made."""
    slots: list[str] = []
    if prepared.workspace.buffers:
        allocate = text.hold(outputs.quick_allocator(prepared.device))
        text.add(f"workspace = {allocate}({text.hold((prepared.workspace.size_bytes,))}, (1,), {text.hold(torch.uint8)})", "start = workspace.data_ptr()")
        for number, buffer in enumerate(prepared.workspace.buffers):
            text.add(f"w{number} = start + {text.hold(buffer.at)}")
            slots.append(f"w{number}")
    if prepared.arrivals is not None:
        text.add(f"counters = {text.hold(prepared.arrivals.counters)}()")
        slots.append(addresses.of("counters"))
    assert prepared.plan is not None
    if prepared.plan.by_vendor:
        text.add(f"product = {text.hold(prepared.product)}({a}, {b})")
        slots.append(addresses.of("product"))
    return slots


def _comparison(tensors: Sequence[Tensor]) -> Check:
    """Whether as many tensors are like these in type, device, dtype, shape, strides and negative bit.

    torch.compile's own guard asks all of it of all tensors in one call; attribute by attribute it takes ten times as long.
    """
    check = guard(tensors)
    if check is not None:
        return check
    expected = [_likeness(t) for t in tensors]
    return lambda *given: all(isinstance(t, Tensor) and _likeness(t) == e for t, e in zip(given, expected, strict=True))


def guard(tensors: Sequence[Tensor]) -> Check | None:
    """Whether as many tensors, each of them another, are like these, in whether they require a gradient too, and are met by torch's dispatcher as these are now:
    by autocast, inference mode, torch's modes, transforms and traces. None where torch cannot tell."""
    if _guards is None:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Check = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if check(*tensors) else None


def _likeness(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.device, t.dtype, t.shape, t.stride(), t.is_neg()
