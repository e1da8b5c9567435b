"""A forward whose code is straight, as one function: what it hangs on is compared, and the same functions of torch and kernels are called, without its code.

`straight` has read the code, `deferred` has run it by a plan, once with tensors like these. `Flat` is written out of both: guards first, for which no module is
called and no mode of torch's is set; then the steps, in which a chain of layers is the one call that `again` has made of it.
"""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.nn.modules import module as torchs

from epigen.runtime.code_builder import CodeBuilder
from epigen.training.deferred import CONVOLUTIONS, MATMULS, PRODUCTS, Argument, Fixed, Plan, Planned, Ref, Step, Taken, facing, present
from epigen.training.elements import channels_second, rows_first
from epigen.training.guarded_cache import GuardedCache, State
from epigen.training.rehearse import Event, Trial
from epigen.training.straight import PLAIN, Bent, Read, Straight
from epigen.training.views import View, viewed

MISSED: Any = object()
"""What a call gives that is not like those for which it was written: nothing was done."""

Way = Callable[..., Tensor]


class Flat:
    """One forward, for calls with so many arguments of these names, and whatever `straight` has noted as it is.

    call: (args, kwargs) -> what the forward gives, or MISSED; with a third argument that is true nothing is done in any case. bodies: what is run, by the tensors.
    """

    def __init__(self, module: nn.Module, trial: Trial, straight: Straight, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]):
        """args, kwargs: of the call that the trial stands for."""
        self.straight, self.plan = straight, plan
        self.real = dict(zip(trial.module.modules(), module.modules(), strict=True))
        self.bodies: GuardedCache[Callable[..., Any]] = GuardedCache()
        self.given = [*trial.args, *trial.kwargs.values()]
        self.call = self._guarded(args, kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the trial, in the order in which bodies take them."""
        return [*(t for t in self.given if isinstance(t, Tensor)), *self.straight.tensors.values()]

    def actual(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The same of a call."""
        own = [_stored(self.real[read.module], read) for read in self.straight.tensors]
        return [*(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), *own]

    def holds(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], ways: Sequence[tuple[Way, bool]]) -> bool:
        """Whether a body for another call can be written out of what was read for this one."""
        if self.plan is not plan or self.call(args, kwargs, True) is MISSED:
            return False
        tensors, read = self.actual(args, kwargs), self.tensors
        if [t.dtype for t in tensors] != [t.dtype for t in read]:
            return False
        return [t.shape for t in tensors] == [t.shape for t in read] or (not self.straight.exact and all(plain for _, plain in ways))

    def add(self, now: State, args: Sequence[Any], kwargs: Mapping[str, Any], ways: Sequence[tuple[Way, bool]]) -> None:
        """A body for calls like this one, whose chains were computed in these ways. Raises Bent."""
        self.bodies.put(now, self.actual(args, kwargs), _Body(self, ways).function())

    # -- what is compared

    def _guarded(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        text = CodeBuilder("call(args, kwargs, only=False)")
        missed = text.hold(MISSED)
        ways = [f"len(args) != {len(args)}", f"len(kwargs) != {len(kwargs)}" if kwargs else "kwargs"]
        hooks = text.hold(torchs)
        ways += [f"{hooks}.{name}" for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")]
        ways += [f"{text.hold(torch._C._autograd._profiler_enabled)}()", f"{text.hold(forward_ad)}._current_level >= 0"]
        ways.append(f"{text.hold(nn.Module)}.__call__ is not {text.hold(nn.Module.__call__)}")
        guards = [f"if {' or '.join(ways)}:", f"    return {missed}"]
        names = [f"a{i}" for i in range(len(args))]
        if names:
            guards.append(f"{', '.join(names)}, = args")
        for i, name in enumerate(kwargs):
            names.append(f"k{i}")
            guards.append(f"k{i} = kwargs[{name!r}]")
        ways, tensors = [], []
        for name, value in zip(names, (*args, *kwargs.values()), strict=True):
            if isinstance(value, Tensor):
                tensors.append(name)
            elif value is None or isinstance(value, bool):
                ways.append(f"{name} is not {value}")
            elif isinstance(value, PLAIN):
                ways.append(f"type({name}) is not {text.hold(type(value))} or {name} != {text.hold(value)}")
            else:
                raise Bent(f"it is called with a {type(value).__name__}")
        for where, name, value in self.straight.outside.values():
            at = f"{text.hold(where)}[{name!r}]" if isinstance(where, dict) else f"{text.hold(where)}.{name}"
            ways.append(f"{at} is not {text.hold(value)}")
        for function, made_of in self.straight.functions.items():  # a notebook's autoreload replaces all of it within the function
            held = text.hold(function)
            for name, part in zip(("__code__", "__defaults__", "__kwdefaults__"), made_of, strict=True):
                if part is not None or name == "__defaults__":
                    ways.append(f"{held}.{name} is not {text.hold(part)}")
        if ways:
            guards += [f"if {' or '.join(ways)}:", f"    return {missed}"]
        for number, (module, called) in enumerate(self.straight.modules.items()):
            guards += self._of_module(text, f"{number}", module, called, missed)
        tensors += [f"t{i}" for i in range(len(self.straight.tensors))]
        first = tensors[0] if tensors else None
        if first is None:
            raise Bent("it takes no tensor")
        device = text.hold(next(t for t in (*args, *kwargs.values(), *self.tensors) if isinstance(t, Tensor)).device.type)
        autocast = f"{text.hold(torch.get_autocast_dtype)}({device}) if {text.hold(torch.is_autocast_enabled)}({device}) else None"
        now = f"({text.hold(torch.is_grad_enabled)}(), {text.hold(torch.is_inference_mode_enabled)}(), {autocast})"
        text.add("try:", *(f"    {line}" for line in guards), "except (KeyError, AttributeError):", f"    return {missed}")
        text.add("if only:", "    return None", f"now = {now}", f"for then, check, body in {text.hold(self.bodies)}.seen:")
        text.add(f"    if then == now and check({', '.join(tensors)}):", f"        return body({', '.join(tensors)})", f"return {missed}")
        call: Callable[..., Any] = text.function()
        return call

    def _of_module(self, text: CodeBuilder, number: str, module: nn.Module, called: bool, missed: str) -> list[str]:
        straight, real = self.straight, self.real[module]
        d, held = f"d{number}", text.hold(real)
        lines = [f"{d} = {held}.__dict__"]
        ways = [f"type({held}) is not {text.hold(type(real))}"]
        if called:
            ways += [f"{d}[{name!r}]" for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")] + [f"'forward' in {d}"]
        ways.append(f"len({d}) != {len(vars(real))}")  # nothing was put beside what is read, in whose place it would be
        for (of, name), value in straight.own.items():
            if of is module:
                actual = vars(real)[name]
                if type(actual) is not type(value) or (isinstance(actual, PLAIN) and actual != value):
                    raise Bent(f"{name} changes")
                ways.append(f"{d}[{name!r}] is not {text.hold(actual)}")
        children = [(name, child) for (of, name), child in straight.children.items() if of is module]
        if children or module in straight.all_children:
            lines.append(f"c{number} = {d}['_modules']")
            ways += [f"c{number}[{name!r}] is not {text.hold(self.real[child])}" for name, child in children]
            if module in straight.all_children:
                ways.append(f"list(c{number}) != {text.hold(list(real._modules))}")
        stores = sorted({read.store for read in (*straight.tensors, *straight.nothing) if read.module is module and read.store})
        lines += [f"s{number}{store} = {d}[{store!r}]" for store in stores]
        ways += [f"s{number}{read.store}[{read.name!r}] is not None" for read in straight.nothing if read.module is module]
        lines += [f"if {' or '.join(ways)}:", f"    return {missed}"]
        for place, read in enumerate(straight.tensors):
            if read.module is module:
                lines.append(f"t{place} = {f's{number}{read.store}' if read.store else d}[{read.name!r}]")
        return lines


def _stored(module: nn.Module, read: Read) -> Tensor:
    tensor: Tensor = (vars(module)[read.store] if read.store else vars(module))[read.name]
    return tensor


# -- what is run


@dataclass(eq=False)
class _Open:
    """A product whose steps are not all there yet. x, weight: what the text calls them. inputs: (name, indices, value, whose argument it is beside a convolution's
    result, the frame beside which it comes). lead: the leading dimensions of the chain. steps: how many have come. views: of each value that it has given."""

    planned: Planned
    x: str
    weight: str
    inputs: list[tuple[str, str, Tensor, Any, tuple[int, ...]]]
    frame: tuple[int, ...]
    before: _Open | None
    lead: tuple[int, ...]
    steps: int = 0
    views: list[View] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        return self.planned.func in CONVOLUTIONS

    @property
    def next(self) -> Step | None:
        return self.planned.steps[self.steps] if self.steps < len(self.planned.steps) else None

    def links(self) -> list[_Open]:
        return [*(self.before.links() if self.before is not None else ()), self]


class _Body:
    """The steps, as the text of a function of the tensors.

    ways: of each chain in turn, the function for it, and whether it takes its inputs as they come.
    """

    def __init__(self, flat: Flat, ways: Sequence[tuple[Way, bool]]):
        self.flat, self.ways = flat, iter(ways)
        self.names = {id(t): f"t{i}" for i, t in reversed(list(enumerate(flat.tensors)))}
        self.text = CodeBuilder(f"body({', '.join(f't{i}' for i in range(len(flat.tensors)))})")
        self.open: dict[int, _Open] = {}
        self.places: dict[int, int] = {}
        self.count, self.numbers = 0, itertools.count()
        self.lines: list[str] = []

    def function(self) -> Callable[..., Any]:
        for event in self.flat.straight.events:
            self.step(event)
        if self.open or next(self.ways, None) is not None or self.count != len(self.flat.plan.products):
            raise Bent("it does not do what was planned")
        self.lines.append(f"return {self.value(self.flat.straight.result)}")
        self.text.add(*_freed(self.lines))
        return self.text.function()

    def value(self, value: Any) -> str:
        """An expression of it."""
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                raise Bent("it takes a tensor from elsewhere")
            return self.names[id(value)]
        if isinstance(value, tuple | list) and not isinstance(value, torch.Size) and any(isinstance(v, Tensor | tuple | list) for v in value):
            inner = ", ".join(map(self.value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, nn.Module | types.FunctionType):
            raise Bent(f"it hands on a {type(value).__name__}")
        return self.text.hold(value)

    def step(self, event: Event) -> None:
        func = event.func
        if func in PRODUCTS:
            place, self.count = self.count, self.count + 1
            planned = self.flat.plan.products[place] if place < len(self.flat.plan.products) else None
            if planned is not None:
                self.product(planned, event)
                return
            if place in self.flat.plan.seconds:
                self.second(self.flat.plan.products[self.flat.plan.seconds[place]], event)
                return
        if any(id(t) in self.open for t in event.given):
            self.joined(event)
            return
        result, name = event.result, f"v{next(self.numbers)}"
        given = [*map(self.value, event.args), *(f"{k}={self.value(v)}" for k, v in event.kwargs.items())]
        self.lines.append(f"{name} = {self.text.hold(func)}({', '.join(given)})")
        for place, tensor in enumerate(result if isinstance(result, tuple | list) else ()):
            self.flat.straight.exact = True  # how many there are
            self.names[id(tensor)] = f"{name}[{place}]"
        if isinstance(result, Tensor):
            self.names[id(result)] = name

    def product(self, planned: Planned, event: Event) -> None:
        func, args, kwargs = event.func, event.args, event.kwargs
        if planned.func != func:
            raise Bent("it does not do what was planned")
        frame, rows = tuple(event.result.shape), ""
        if func in CONVOLUTIONS:  # as a product of rows, with the channels last
            x, weight, bias = _convolution(*args, **kwargs)
            multiplied, rows = f"{self.value(weight)}.flatten(1)", f".permute({self.text.hold(rows_first(len(frame)))})"
            frame = tuple(frame[d] for d in rows_first(len(frame)))
        elif func is F.linear:
            x, weight, bias = _linear(*args, **kwargs)
            multiplied = self.value(weight)
        else:
            if kwargs:
                raise Bent("a product is called in a rare way")
            bias, x, weight = (None, *args) if func in MATMULS else args
            multiplied = f"{self.value(weight)}.t()"
        before = self.open.get(id(x))
        if (before is not None) != planned.after_chained or (before is not None and before.next is not None):
            raise Bent("it does not do what was planned")
        inputs = [] if bias is None else [("bias", "n", bias, None, frame)]
        lead = frame[:-1] if before is None else before.lead
        opened = _Open(planned, "" if before is not None else self.value(x) + rows, multiplied, inputs, frame, before, lead)
        if before is not None:
            self.forget(before)
        self.keep(opened, event.result)

    def second(self, planned: Planned | None, event: Event) -> None:
        """Another product of the same x, which is the next step of one."""
        opened = next((o for o in self.open.values() if o.planned is planned), None)
        step = opened.next if opened is not None else None
        x, weight, bias = _linear(*event.args, **event.kwargs)
        if opened is None or step is None or not step.second or id(x) not in self.names or self.names[id(x)] != opened.x:
            raise Bent("it does not do what was planned")
        for argument, value in zip(step.args, (weight, bias), strict=False):
            assert isinstance(argument, Taken)
            opened.inputs.append((argument.name, argument.indices, value, None, opened.frame))
        opened.steps += 1
        self.keep(opened, event.result)

    def joined(self, event: Event) -> None:
        """A call that takes what is not computed yet: the next step of a product, or nothing that was planned."""
        opened = next(self.open[id(t)] for t in event.given if id(t) in self.open)
        step = opened.next
        if step is None or step.func != event.func:
            raise Bent("it does not do what was planned")
        if step.views:
            self.viewed(opened, step, event)
            return
        if len(step.args) != len(event.args) or list(step.kwargs) != list(event.kwargs):
            raise Bent("it does not do what was planned")
        for argument, value in zip((*step.args, *step.kwargs.values()), (*event.args, *event.kwargs.values()), strict=True):
            if isinstance(argument, Ref):
                fits = self.holds(opened, value, argument)
            elif isinstance(argument, Taken):
                fits = isinstance(value, Tensor) and id(value) in self.names and id(value) not in self.open
                opened.inputs.append((argument.name, argument.indices, value, event.func if opened.moved else None, opened.frame))
            else:
                assert isinstance(argument, Fixed)
                fits = type(value) is type(argument.value) and bool(value == argument.value)
            if not fits:
                raise Bent("it does not do what was planned")
        opened.steps += 1
        if step.way:
            opened.frame = (*opened.frame[:-1], opened.frame[-1] // 2)
        self.keep(opened, event.result)

    def holds(self, opened: _Open, value: Any, argument: Argument) -> bool:
        """Whether a value is the one that is meant."""
        return self.open.get(id(value)) is opened and argument == Ref(self.places[id(value)])

    def viewed(self, opened: _Open, step: Step, event: Event) -> None:
        of = event.args[0]
        if not self.holds(opened, of, step.args[0]):
            raise Bent("it does not do what was planned")
        found = viewed(event.func, opened.views[self.places[id(of)]], opened.moved, event.args[1:], event.kwargs)
        if found is None or found.way != step.way or found.parts != step.views:
            raise Bent("it does not do what was planned")
        first = found.views[0]
        if not first.unflattened:
            opened.frame = tuple(first.shape[d] for d in rows_first(len(first.shape))) if opened.moved else first.shape
        opened.steps += 1
        for view, result in zip(found.views, event.result if found.several else (event.result,), strict=True):
            self.keep(opened, result, view)

    def keep(self, opened: _Open, result: Tensor, view: View | None = None) -> None:
        """What a product or a step of it gives; with the last one it is computed. view: of a view."""
        if opened.next is not None or opened.planned.chained:
            self.open[id(result)], self.places[id(result)] = opened, len(opened.views)
            opened.views.append(view or View(tuple(result.shape), opened.frame[-1]))
            return
        self.forget(opened)
        way, plain = next(self.ways, (None, True))
        if way is None:
            raise Bent("it does not do what was planned")
        links, given = opened.links(), list[str]()
        for link in links:
            given.append(link.weight)
            for name, indices, value, func, frame in link.inputs:
                expression = f"{self.value(value)}.t()" if indices == "kn" else self.value(value)
                if not plain and name != "bias" and indices != "kn":
                    self.flat.straight.exact = True
                    expression = f"{self.text.hold(_Presented(indices, frame, opened.lead, func))}({expression})"
                given.append(expression)
        name = f"v{next(self.numbers)}"
        shaped = ""
        if opened.frame[:-1] != opened.lead:
            self.flat.straight.exact = True
            shaped = f".view({self.text.hold(opened.frame)})"
        if opened.moved:
            shaped = f".permute({self.text.hold(channels_second(len(opened.frame)))})"
        self.lines.append(f"{name} = {self.text.hold(way)}({', '.join([links[0].x, *given])}){shaped}")
        self.names[id(result)] = name

    def forget(self, opened: _Open) -> None:
        for key in [key for key, value in self.open.items() if value is opened]:
            del self.open[key], self.places[key]


def _linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:  # noqa: A002  # torch's own name
    return input, weight, bias


def _convolution(input: Any, weight: Any, bias: Any = None, *_options: Any, **_more: Any) -> tuple[Any, Any, Any]:  # noqa: A002
    return input, weight, bias


@dataclass(frozen=True, slots=True)
class _Presented:
    """A tensor as a program takes it, where it does not come so. func: whose argument it is beside a convolution's result."""

    indices: str
    frame: tuple[int, ...]
    lead: tuple[int, ...]
    func: Any

    def __call__(self, value: Tensor) -> Tensor:
        faced = value if self.func is None else facing(value, self.func, self.frame)
        result = None if faced is None else present(faced, self.indices, self.frame)
        assert result is not None
        if self.frame[:-1] != self.lead and "m" in self.indices:
            return result.reshape(*self.lead, *result.shape[len(self.frame) - 1 :])
        return result


_NAME = re.compile(r"\bv\d+\b")


def _freed(lines: Sequence[str]) -> list[str]:
    """The same, with each value let go where it is used last: what a forward gives its next name to is freed as well."""
    last = {name: place for place, line in enumerate(lines) for name in _NAME.findall(line)}
    freed: list[str] = []
    for place, line in enumerate(lines):
        freed.append(line)
        gone = sorted(name for name, at in last.items() if at == place)
        if gone and place + 1 < len(lines):
            freed.append(f"del {', '.join(gone)}")
    return freed
