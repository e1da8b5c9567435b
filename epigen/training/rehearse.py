"""What a module's forward does with its products: found by running it once on tensors without contents -> the plan by which `deferred` runs it.

What runs is a copy of the module, hooks left out, whose parameters and buffers are stand-ins of the same shapes: whatever the forward changes, counts or keeps,
it does to the copy. The modules inside that have plans of their own are called, and not looked into.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from epigen.lang.syntax import HALVES
from epigen.runtime import semi_structured
from epigen.training import deferred, programs
from epigen.training.deferred import CONVOLUTIONS, DTYPES, PRODUCTS, Argument, Fixed, Plan, Planned, Product, Ref, Step, Taken
from epigen.training.elements import channels_second, rows_first
from epigen.training.guarded_cache import State, state
from epigen.training.unlogged import unlogged
from epigen.training.views import View, Viewed, viewed

_FIXED = (int, float, bool, str, type(None), torch.dtype, torch.device)
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_MOVES = "it moves elements between rows and columns"
_NO_PARTS = "a product by a 2:4 sparse weight has no parts"
_MOST_HELD = 10_000
"""Objects that an argument may hold."""


class Unseen(Exception):
    """A forward that cannot be rehearsed: why, as the end of a sentence."""


@dataclass
class Seen:
    """What became of one product of a forward. layer: the module whose own code calls it, by its name in the one that was rehearsed; None where it is none of its
    own. taken: the functions that were joined to it. why: nothing was, where nothing was."""

    layer: str | None
    planned: Planned | None
    taken: tuple[str, ...] = ()
    why: str = ""

    @property
    def fused(self) -> bool:
        return self.planned is not None


@dataclass
class Rehearsed:
    plan: Plan
    seen: list[Seen]


def rehearse(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool | None = None) -> Rehearsed:
    """args, kwargs: those of a call of the module's forward. training: the mode to rehearse it in; by default that which each module in it has. Raises Unseen."""
    with tried(module, args, kwargs, training) as trial, trial.observed:
        try:
            result = type(trial.module).forward(trial.module, *trial.args, **trial.kwargs)
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            raise Unseen(f"on tensors without contents it raises {type(error).__name__}: {said}") from error
    return _analysed(trial.observed, result)


@dataclass(frozen=True)
class Trial:
    """A copy of a module, and of what its forward is called with, without contents; and what sees the functions that it calls."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    observed: Observed


@contextmanager
def tried(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool | None = None) -> Iterator[Trial]:
    """Where a forward can be run and changes nothing. Arguments as of `rehearse`. Raises Unseen."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    given, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for value in given:
        if isinstance(value, Tensor | nn.Module) and type(value) not in (Tensor, nn.Parameter):
            raise Unseen(f"it is called with a {type(value).__name__}, which is not tried out")
    given = [value.detach() if isinstance(value, Tensor) else value for value in given]
    with _nothing_drawn(), _nothing_said(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        stand_in = _copied(module, fakes)
        if training is not None:
            stand_in.train(training)
        names = {m: name for of in (module, stand_in) for name, m in of.named_modules()}  # a closure holds the module's own
        # what keeps tensors for a backward in a way of its own, such as a checkpoint, is not to count those without contents
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            fake_args, fake_kwargs = pytree.tree_unflatten([_fake(value, fakes) for value in given], structure)
            yield Trial(stand_in, fake_args, fake_kwargs, Observed(names))


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """What a forward draws of Python's and numpy's random numbers is put back; torch's own draw nothing without contents."""
    numpy = sys.modules.get("numpy")
    before, numpys, torchs = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before)
        torch.set_rng_state(torchs)
        if numpy:
            numpy.random.set_state(numpys)


@contextmanager
def _nothing_said() -> Iterator[None]:
    """What a forward warns of, its next call warns of."""
    with unlogged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _copied(module: nn.Module, fakes: Any) -> nn.Module:
    memo: dict[int, Any] = {}
    try:
        for tensor in [*module.parameters(), *module.buffers()]:
            if type(tensor) in semi_structured.TYPES:
                memo[id(tensor)] = _in_place_of_sparse(tensor, fakes)
            else:
                memo[id(tensor)] = fakes.from_tensor(tensor) if type(tensor) in (Tensor, nn.Parameter) else tensor
        stand_in: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        raise Unseen(f"a {type(module).__name__} cannot be copied to try it out: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    for inner in stand_in.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(inner, hooks).clear()
    return stand_in


def _in_place_of_sparse(tensor: Tensor, fakes: Any) -> nn.Parameter:
    """A dense one of the same extents, which says of itself that it has no parts."""
    with fakes:
        stand_in: Any = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor.requires_grad)
    stand_in.is_semi_structured = True
    return stand_in  # type: ignore[no-any-return]


def _whole(weight: Tensor) -> bool:
    """Whether a product by it is the vendor's, and so no second one in a kernel, nor one of parts."""
    return getattr(weight, "is_semi_structured", False)


def _fake(value: Any, fakes: Any) -> Any:
    if isinstance(value, _FIXED):
        return value
    if not isinstance(value, Tensor):
        return _held(value, fakes)
    fake = fakes.from_tensor(value)
    # of what has a gradient, so that a torch.autograd.Function shows; and no leaf, which could not be changed in place
    return fake.requires_grad_().clone() if fake.is_floating_point() else fake


def _held(value: Any, fakes: Any) -> Any:
    """A copy of an object of any other kind, such as a cache of keys and values, which the forward may change: its tensors are without contents."""
    memo, seen, pending = dict[int, Any](), set[int](), [value]
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, (*_FIXED, *_SHARED)):
            continue
        seen.add(id(each))
        if len(seen) > _MOST_HELD:
            raise Unseen(f"it is called with a {type(value).__name__}, which holds too much to be tried out")
        if type(each) in (Tensor, nn.Parameter):
            memo[id(each)] = fakes.from_tensor(each.detach())
        elif isinstance(each, Tensor | nn.Module):
            raise Unseen(f"it is called with a {type(value).__name__} that holds a {type(each).__name__}, which is not tried out")
        else:
            pending += gc.get_referents(each)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise Unseen(f"it is called with a {type(value).__name__}, which cannot be copied: {type(error).__name__}") from error


# -- what was called


@dataclass(slots=True)
class Event:
    """One call. given: the tensors among its arguments, at any depth. unseen: whether one of them is a torch.autograd.Function's. layer: of a product, the module whose
    code calls it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    given: list[Tensor]
    unseen: bool
    state: State
    layer: str | None


def _of_function(tensor: Tensor) -> bool:
    """Whether a torch.autograd.Function has given it."""
    try:
        return isinstance(tensor.grad_fn, torch._C._FunctionBase)
    except RuntimeError:  # a view whose base was changed since, of which torch knows no gradient any more
        return False


class Observed(TorchFunctionMode):
    """The functions that a forward calls, in order, and what they give. names: of the modules that may call them."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.names = names
        self.events: list[Event] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = given[0].device.type if given else "cpu"
        now, unseen = state(device), any(map(_of_function, given))
        result = func(*args, **kwargs)
        if not deferred.asks(func):
            self.events.append(Event(func, tuple(args), dict(kwargs), result, given, unseen, now, self.caller() if func in PRODUCTS else None))
        return result

    def caller(self) -> str | None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            own = frame.f_locals.get("self")
            if isinstance(own, nn.Module):
                return self.names.get(own)
            frame = frame.f_back
        return None


# -- what it comes to


@dataclass(eq=False)
class _Region:
    """A product and the functions of it that the language has. shape: as torch has it, of what may come next. ends, views: by place, how many steps had come with the
    value that is there, and of which columns it is. aliased: places of views, and of what has some, each with that of the value itself. whole: where the value is
    whose columns are parted. outside: by place, by whom else its value is read. borrowed: by input, of which other region's values it is."""

    number: int
    event: Event
    product: Product
    dtype: torch.dtype
    shape: tuple[int, ...]
    ends: list[int] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    aliased: dict[int, int] = field(default_factory=dict)
    whole: int | None = None
    steps: list[Step] = field(default_factory=list)
    outside: dict[int, list[str]] = field(default_factory=dict)
    fed: list[tuple[_Region, int]] = field(default_factory=list)
    multiplied: dict[int, list[int]] = field(default_factory=dict)
    borrowed: dict[str, tuple[_Region, int]] = field(default_factory=dict)
    open: bool = True
    why: str = ""
    names: list[str] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        """Whether torch has the channels in another place."""
        return self.event.func in CONVOLUTIONS

    @property
    def frame(self) -> tuple[int, ...]:
        """The same with channels last."""
        return tuple(self.shape[d] for d in rows_first(len(self.shape))) if self.moved else self.shape

    @property
    def last(self) -> int:
        """The place of the value that came last."""
        return len(self.ends) - 1

    def read(self, place: int, by: str) -> None:
        self.outside.setdefault(place, []).append(by)

    def given(self, step: Step | None, values: Sequence[View]) -> range:
        """Add a step, and return the places of what it gives. step: None for the product."""
        if step is not None:
            self.steps.append(step)
        self.ends += [len(self.steps)] * len(values)
        self.views += values
        return range(len(self.ends) - len(values), len(self.ends))

    def program(self, steps: Sequence[Step]) -> tuple[str, str]:
        """Of some of its steps, as `programs` has it."""
        bias = self.product.bias
        return programs.program(None if bias is None else bias.dtype, self.dtype, steps)

    @property
    def parts_read(self) -> set[int | None]:
        """Which parts of its columns anybody reads."""
        places = {a.place for step in self.steps for a in (*step.args, *step.kwargs.values()) if isinstance(a, Ref)}
        return {self.views[place].part for place in (*places, *self.outside, *self.multiplied)} - {None}

    def result(self, k: int) -> int | None:
        """The place of what so many steps come to, which is a tile of its own; None where they come to none."""
        at = [place for place, end in enumerate(self.ends) if end == k]
        return at[0] if len(at) == 1 and not self.views[at[0]].unflattened and self.views[at[0]].part is None else None

    @property
    def cut(self) -> int:
        """How many steps can be joined: up to a value that is all that is read of them. Of a part alone none is."""
        for k in range(len(self.steps), 0, -1):
            inner = [place for place, end in enumerate(self.ends) if end < k]
            read = {a.place for step in self.steps[:k] for a in (*step.args, *step.kwargs.values()) if isinstance(a, Ref)}
            parts = {self.views[place].part for place in inner} - {None}
            if (
                self.result(k) is not None
                and len(parts) != 1
                and all(place in read and place not in self.outside and place not in self.multiplied for place in inner)
                and not any(isinstance(a, Ref) and a.place in inner for step in self.steps[k:] for a in (*step.args, *step.kwargs.values()))
            ):
                return k
        return 0


def _analysed(observed: Observed, result: Any) -> Rehearsed:
    regions, products = _gathered(observed, result, {})
    if seconds := _seconds(regions):
        regions, products = _gathered(observed, result, seconds)
    return _planned(regions, products, seconds)


def _seconds(regions: Sequence[_Region | None]) -> dict[int, int]:
    """Products that an earlier one of the same x, by a weight of the same shape, takes as they are, and nobody else, such as that which a gate is multiplied with; by the
    numbers of both. One of each earlier one."""
    found: dict[int, int] = {}
    for region in regions:
        for name, (other, place) in ({} if region is None else region.borrowed).items():
            assert region is not None
            own, its = region.product, other.product
            taken = any(isinstance(a, Taken) and a.name == name for step in region.steps[: region.cut] for a in (*step.args, *step.kwargs.values()))
            alone = place == 0 and not other.steps and not other.multiplied and len(other.outside.get(0, ())) == 1
            of_one_form = its.x is own.x and its.weight.shape == own.weight.shape and its.weight.dtype == own.weight.dtype and its.weight is not own.weight
            linear = region.event.func is F.linear and other.event.func is F.linear and other.event.state == region.event.state
            if (
                taken
                and alone
                and of_one_form
                and linear
                and other.number > region.number
                and region.number not in found.values()
                and not any(s.views or s.way for s in region.steps)
                and not _whole(own.weight)
                and not _whole(its.weight)
            ):
                found[other.number] = region.number
    return found


def _gathered(observed: Observed, result: Any, seconds: Mapping[int, int]) -> tuple[list[_Region | None], list[tuple[Event, str]]]:
    """The products of a forward, each with its region, or why it has none. seconds: as of `_seconds`, which are steps of others."""
    regions: list[_Region | None] = []
    products: list[tuple[Event, str]] = []
    now: dict[int, tuple[_Region, int]] = {}
    for event in observed.events:
        if event.unseen:
            raise Unseen("it calls a torch.autograd.Function, of whose arguments torch does not tell")
        values = {id(t): now[id(t)] for t in event.given if id(t) in now}
        read = PRODUCTS.get(event.func)
        first = regions[seconds[len(regions)]] if read is not None and len(regions) in seconds else None
        if first is not None and first.open:
            for other, place in values.values():
                other.read(place, "another product takes its result")
            now[id(event.result)] = (first, _joined(first, event))
            regions.append(None)
            products.append((event, ""))
        elif read is not None:
            region, why = _begun(len(regions), event, read)
            regions.append(region)
            products.append((event, why))
            for other, place in values.values():
                other.multiplied.setdefault(place, []).append(len(regions) - 1) if region is not None and _is_x(region, other, place, now) else other.read(
                    place, "another product takes its result"
                )
            if region is not None:
                now[id(event.result)] = (region, 0)
        elif values:
            _stepped(event, values, now)
        elif not deferred.pure(event.func) or event.kwargs.get("inplace"):
            for r in regions:
                if r is not None:
                    r.open = False
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, Tensor) and _of_function(tensor):
            raise Unseen("it calls a torch.autograd.Function, of whose arguments torch does not tell")
        if id(tensor) in now:
            r, place = now[id(tensor)]
            if place < r.last:
                r.read(place, "its result goes out of its module's forward")
    return regions, products


def _joined(region: _Region, event: Event) -> int:
    """A second product becomes a step of the first one. Returns the place of what it gives."""
    product = PRODUCTS[event.func](*event.args, **event.kwargs)
    assert not isinstance(product, str)
    names = itertools.count(sum(isinstance(a, Taken) for s in region.steps for a in (*s.args, *s.kwargs.values())))
    args = [Taken(f"x{next(names)}", "kn", product.weight.dtype)]
    if product.bias is not None:
        args.append(Taken(f"x{next(names)}", "n", product.bias.dtype))
    region.names.append("linear")
    (place,) = region.given(Step(event.func, tuple(args), {}, event.result.dtype, second=True), [View(region.shape, region.shape[-1])])
    return place


def _is_x(region: _Region, other: _Region, place: int, now: Mapping[int, tuple[_Region, int]]) -> bool:
    return isinstance(region.product.x, Tensor) and now.get(id(region.product.x)) == (other, place)


def _begun(number: int, event: Event, read: Any) -> tuple[_Region | None, str]:
    product = read(*event.args, **event.kwargs)
    if isinstance(product, str):
        return None, product
    x, weight, bias = product
    if type(event.result) is not type(x) and not isinstance(event.result, Tensor):
        return None, "it gives no tensor"
    for what, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and not _ordinary(tensor):
            return None, f"its {what} is a {type(tensor).__name__}"
    dtype = event.result.dtype
    if dtype not in DTYPES:
        return None, f"its product is {dtype}, and fp32, fp16 and bf16 are fused"
    if x.device != weight.device or not deferred.fits(product, tuple(x.shape), x.dtype, event.state, dtype):
        return None, f"a product of {list(x.shape)} by a weight of {list(weight.shape)} is not taken"
    region = _Region(number, event, product, dtype, tuple(event.result.shape))
    region.given(None, [View(region.shape, weight.shape[0])])
    return region, ""


def _ordinary(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def _stepped(event: Event, values: dict[int, tuple[_Region, int]], now: dict[int, tuple[_Region, int]]) -> None:
    """A call that takes values of regions: a step of one of them, or read from outside."""
    name = getattr(event.func, "__name__", str(event.func)).strip("_")
    tried = sorted({id(r): r for r, _ in values.values()}.values(), key=lambda r: (-len(r.steps), r.number))
    why = ""
    for region in tried:
        step, why = _step(region, event, values)
        if step is not None and not region.open:
            step, why = None, "another tensor is changed in between"
        if step is None:
            called, because = (region.names[-1], _MOVES) if region.views[region.last].unflattened else (name, why)
            region.why = region.why or f"{called} follows{', which no epilogue computes' + (': ' + because if because else '')}"
            continue
        for r, place in values.values():
            if r is not region:
                r.read(place, f"the kernel of another layer takes its result, in {name}")
        region.names.append(name)
        _given(region, step, event, values, now)
        return
    for key, (r, place) in values.items():
        r.read(place, name)
        if not deferred.pure(event.func) or event.kwargs.get("inplace"):
            r.open = False
            del now[key]


def _given(region: _Region, step: Step, event: Event, values: Mapping[int, tuple[_Region, int]], now: dict[int, tuple[_Region, int]]) -> None:
    """Add a step, and note what it gives."""
    if not step.views:
        shape = tuple(event.result.shape)
        (place,) = region.given(step, [View(shape, shape[1] if region.moved else shape[-1])])
        region.whole = next(a.place for a in step.args if isinstance(a, Ref)) if step.way else region.whole
        region.shape, now[id(event.result)] = shape, (region, place)
        return
    _, source = values[id(event.args[0])]
    found = _views_of(region, source, event)
    assert found is not None
    of = region.aliased.setdefault(source, source)
    results = event.result if found.several else (event.result,)
    for place, result in zip(region.given(step, found.views), results, strict=True):
        region.aliased[place], now[id(result)] = of, (region, place)
    region.whole = of if found.way else region.whole
    if not found.views[0].unflattened:
        region.shape = found.views[0].shape


def _views_of(region: _Region, source: int, event: Event) -> Viewed | None:
    return viewed(event.func, region.views[source], region.moved, event.args[1:], event.kwargs)


def _step(region: _Region, event: Event, values: Mapping[int, tuple[_Region, int]]) -> tuple[Step | None, str]:
    result = event.result
    first = event.args[0] if event.args else None
    if event.state != region.event.state:
        return None, "autocast or gradients are switched in between"
    if _is_view(event):
        return _view(region, event, values)
    if not isinstance(result, Tensor):
        return None, "it gives no tensor"
    if event.func is F.batch_norm and not region.moved and len(region.frame) != 2:
        return None, "its channels are no columns"
    way = HALVES if event.func is F.glu and event.args and tuple(result.shape) == _halved(region) else ""
    if way and _whole(region.product.weight):
        return None, _NO_PARTS
    if (tuple(result.shape) != region.shape and not way) or result.dtype not in DTYPES:
        return None, ""
    if event.state[0] and not result.requires_grad:
        return None, "it has no gradient"
    changes = not deferred.pure(event.func) or bool(event.kwargs.get("inplace"))
    in_place = result is first  # changed, or given as it was
    if changes and (not in_place or region not in [r for r, _ in (values.get(id(first), (None, 0)),)] or deferred.functional(event.func) is None):
        return None, "it changes a tensor in place"
    if "out" in event.kwargs or (changes and values[id(first)][1] in region.aliased):  # another value would change too
        return None, "it changes a tensor in place"
    step = Step(event.func, (), {}, result.dtype, in_place, way=way)
    count = sum(isinstance(a, Taken) for s in region.steps for a in (*s.args, *s.kwargs.values()))
    args: list[Argument] = []
    for value in [*event.args, *event.kwargs.values()]:
        if isinstance(value, Tensor):
            place = values.get(id(value))
            if place is not None and place[0] is region:
                args.append(Ref(place[1]))
                continue
            faced = deferred.facing(value, event.func, region.frame) if region.moved else value
            indices = None if faced is None else deferred.kind(faced.shape, region.frame)
            if indices is None or not _ordinary(value) or value.dtype not in DTYPES or value.device != region.product.weight.device:
                return None, f"it takes a tensor of {list(value.shape)} and {value.dtype} beside it"
            if place is not None:
                region.borrowed[f"x{count}"] = place
            args.append(Taken(f"x{count}", indices, value.dtype))
            count += 1
        elif isinstance(value, _FIXED):
            args.append(Fixed(value))
        else:
            return None, f"it takes a {type(value).__name__}"
    split = len(event.args)
    step = replace(step, args=tuple(args[:split]), kwargs=dict(zip(event.kwargs, args[split:], strict=True)))
    text, why = region.program([*region.steps, step])
    return (step, "") if text else (None, why)


def _halved(region: _Region) -> tuple[int, ...] | None:
    """The shape of a part of the columns; None where these cannot be parted, or have been."""
    *others, columns = region.frame
    if columns % 2 or region.whole is not None:
        return None
    frame = (*others, columns // 2)
    return tuple(frame[d] for d in channels_second(len(frame))) if region.moved else frame


def _is_view(event: Event) -> bool:
    """Whether a call gives parts of the memory of its first argument, and not that itself."""
    results = event.result if isinstance(event.result, tuple) else (event.result,)
    of = event.args[0] if event.args else None
    if not isinstance(of, Tensor) or not results or not all(isinstance(r, Tensor) and r is not of for r in results):
        return False
    return all(r.untyped_storage()._cdata == of.untyped_storage()._cdata for r in results)


def _view(region: _Region, event: Event, values: Mapping[int, tuple[_Region, int]]) -> tuple[Step | None, str]:
    at = values.get(id(event.args[0]))
    found = _views_of(region, at[1], event) if at is not None and at[0] is region else None
    results = event.result if isinstance(event.result, tuple) else (event.result,)
    if at is None or found is None or region.views[at[1]].part is not None:
        return None, _MOVES
    if event.state[0] and not all(r.requires_grad for r in results):
        return None, "it has no gradient"
    _, source = at
    if found.way and _whole(region.product.weight):
        return None, _NO_PARTS
    if found.way:
        # all parts are of one value, which is the last one when the first of them is taken
        if region.whole is None:
            fits = source == region.last
        else:
            fits = region.aliased.get(source) == region.whole and {found.way} == {s.way for s in region.steps if s.way}
        if not fits:
            return None, "its columns are parted twice"
    elif region.moved or source != region.last or (region.whole is not None and found.views[0].unflattened):
        return None, _MOVES
    return Step(event.func, (Ref(source),), {}, results[0].dtype, views=found.parts, way=found.way), ""


def _planned(regions: Sequence[_Region | None], products: Sequence[tuple[Event, str]], seconds: Mapping[int, int]) -> Rehearsed:
    cuts = {r.number: r.cut for r in regions if r is not None}
    for r in regions:
        if r is not None and cuts[r.number] and r.program(r.steps[: cuts[r.number]])[0] in ("mm", "mm + bias"):
            r.why = r.why or f"{', '.join(r.names[: cuts[r.number]])} follows, and gives what it takes; nothing follows there"
            cuts[r.number] = 0
    chained: dict[int, int] = {}
    for r in regions:
        if r is not None and (k := cuts[r.number]) and k == len(r.steps) and len(r.multiplied.get(r.last, [])) == 1 and r.last not in r.outside:
            follower = regions[r.multiplied[r.last][0]]
            # torch adds a bias within its product by a 2:4 sparse weight: with nothing behind it, that is all there is to do
            pays = follower is not None and (cuts[follower.number] or not _whole(follower.product.weight))
            if follower is not None and pays and follower.event.state == r.event.state and r.open and not r.moved:
                chained[r.number] = follower.number
    plans: list[Planned | None] = []
    seen: list[Seen] = []
    joined: dict[int, int] = {}
    for number, ((event, why), r) in enumerate(zip(products, regions, strict=True)):
        planned = None
        first = plans[seconds[number]] if number in seconds else None
        if first is not None and any(step.second for step in first.steps):
            joined[number] = seconds[number]
            plans.append(None)
            seen.append(Seen(event.layer, first, ("linear",)))
            continue
        if number in seconds:
            why = "the kernel of another layer takes its result"
        if r is not None and (cuts[r.number] or r.number in chained.values()):
            k = cuts[r.number]
            text, why = r.program(r.steps[:k])
            if text and all(f"{a.name}[" in text for step in r.steps[:k] if step.second for a in step.args if isinstance(a, Taken)):
                planned = Planned(event.func, r.dtype, r.product.bias is not None, tuple(r.steps[:k]), text, r.number in chained, r.number in chained.values())
        plans.append(planned)
        names = tuple(r.names[: cuts[r.number]]) if r is not None and planned else ()
        seen.append(Seen(event.layer, planned, names, why or (_why(r) if r is not None else "")))
    return Rehearsed(Plan(tuple(plans), joined), seen)


def _why(region: _Region) -> str:
    """Why nothing is joined to a product."""
    if readers := region.outside.get(0):
        if len(readers) + bool(region.steps) > 1 or (region.steps and readers):
            return f"its result is used in {len(readers) + bool(region.steps)} places"
        if region.why:
            return region.why
        return readers[0] if " " in readers[0] else f"{readers[0]} follows, which no epilogue computes"
    if len(region.parts_read) == 1:
        return "of its columns one part alone is taken"
    if 0 in region.multiplied:
        return "another product follows it, and nothing between them"
    return region.why or "its result goes out of its module's forward, and nothing follows there"
