"""A call made before, made again: one comparison of all tensors with those of that call, then the outputs and the launches.

What the comparison covers is what a prepared call depends on: types, devices, dtypes, shapes, strides, negative bits. Addresses are
looked at anew in every call, and their alignment has to be as it was; numbers are handed on. No tensor is remembered, so one that is
freed and another that lies at its address are told apart like any two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from epigen.dtypes import FP32
from epigen.runtime import arguments, direct, outputs
from epigen.runtime.arguments import ALIGNED_BYTES
from epigen.runtime.launch import Direct
from epigen.runtime.prepared import Plan, Prepared
from epigen.runtime.workspace import current_stream

_guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # torch may take it away, as it promises nothing

Check = Callable[..., bool]
Pick = Callable[[Sequence[Any]], Sequence[Tensor]]

_address = Tensor.data_ptr
_UNALIGNED = ALIGNED_BYTES - 1

# what torch.cuda and Triton ask, without their Python around it
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Warmed:
    """check: whether arguments are as those of the call that this was made from. It takes what `again` takes, one by one."""

    def __init__(self, prepared: Prepared, names: Sequence[str], given: Sequence[Any], launches: Sequence[Direct], unobserved: Callable[[], bool]):
        """names: the inputs', in the caller's order. given: the operands, the inputs in that order, and the caller's buffers if it gave any."""
        assert prepared.plan is not None
        self.prepared, self.launches, self.unobserved, self.index = prepared, launches, unobserved, prepared.device.index
        operands = count_operands(prepared.plan)
        self.numbers = [(place, name) for place, name in enumerate(names, operands) if not isinstance(given[place], Tensor)]
        self.pick = _picker([place for place, value in enumerate(given) if isinstance(value, Tensor)])
        tensors = self.pick(given)
        self.check = _check(given, self.numbers, self.pick)
        self.aligned = [not _address(t) & _UNALIGNED for t in tensors]
        self.all_aligned = all(self.aligned)
        self.gradient = any(t.requires_grad for t in tensors)
        self.precision = torch.get_float32_matmul_precision() if prepared.plan.spec.signature.a == FP32 else None
        self.buffers = operands + len(names) if len(given) > operands + len(names) else None
        self.new = [o.held(*prepared.shape[:2]) for o in prepared.outputs]
        self.allocate = outputs.quick_allocator(prepared.device)
        self.workspace_bytes = prepared.workspace.size_bytes
        self.offsets, self.arrivals = [b.at for b in prepared.workspace.buffers], prepared.arrivals
        self.by_vendor, self.whole = prepared.plan.by_vendor, prepared.plan.rendered.whole

    def again(self, given: Sequence[Any]) -> Sequence[Tensor] | None:
        """The outputs; None where the call is not the same after all, and nothing was done."""
        if self.gradient and torch.is_grad_enabled():
            return None
        if self.precision is not None and self.precision != torch.get_float32_matmul_precision():
            return None
        if not self.unobserved():
            return None
        if current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.again(given)
        addresses: list[Any] = list(map(_address, self.pick(given) if self.numbers else given))
        values = addresses
        if self.numbers:
            values = addresses.copy()
            for place, name in self.numbers:
                values.insert(place, arguments.number(name, given[place]))
        bits = 0
        for address in addresses:
            bits |= address
        if (bits & _UNALIGNED or not self.all_aligned) and [not address & _UNALIGNED for address in addresses] != self.aligned:
            return None
        results: Sequence[Tensor]
        if self.buffers is None:
            results = [new.empty(self.allocate) for new in self.new]
            values += map(_address, results)
        else:
            results = given[self.buffers :]
        if self.whole:
            self.prepared.compute(given[0], given[1], results[0])
            return results
        if self.offsets:
            workspace = self.allocate((self.workspace_bytes,), (1,), torch.uint8)
            start = _address(workspace)
            values += [start + at for at in self.offsets]
        if self.arrivals is not None:
            values.append(_address(self.arrivals.counters()))
        if self.by_vendor:
            product = self.prepared.product(given[0], given[1])
            values.append(_address(product))
        stream = current_stream(self.index)
        for launch in self.launches:
            launch(stream, values)
        return results


def warmed(prepared: Prepared, names: Sequence[str], given: Sequence[Any], results: Sequence[Tensor]) -> Warmed | None:
    """After `prepared` has run with these arguments: what makes calls like it from now on; None where only Triton can.

    given: as for `Warmed`. results: that call's outputs.
    """
    if prepared.plan is None or prepared.interpreted or prepared.padded or not all(type(v) in arguments.PLAIN for v in given if isinstance(v, Tensor)):
        return None
    unobserved = direct.unobserved([launch.jit for launch in prepared.launches])
    if unobserved is None or not unobserved():
        return None
    launches = prepared.direct(names, (*given[: count_operands(prepared.plan) + len(names)], *results))
    return None if launches is None else Warmed(prepared, names, given, launches, unobserved)


def count_operands(plan: Plan) -> int:
    return 0 if plan.spec.pointwise else 2


def _picker(places: Sequence[int]) -> Pick:
    """Those at some places, of which there is one at least."""
    if len(places) > 1:
        return itemgetter(*places)
    (only,) = places
    return lambda given: (given[only],)


def _check(given: Sequence[Any], numbers: Sequence[tuple[int, str]], pick: Pick) -> Check:
    compare = _distinct(pick(given))
    if not numbers:
        return compare
    kinds = [(place, type(given[place])) for place, _ in numbers]
    return lambda *found: all(type(found[place]) is kind for place, kind in kinds) and compare(*pick(found))


def _distinct(tensors: Sequence[Tensor]) -> Check:
    """As `_comparison`, which takes no tensor twice: one that is an input and, in place, an output has to be the same in both places."""
    first = {id(t): place for place, t in reversed([*enumerate(tensors)])}
    twice = [place for place, t in enumerate(tensors) if first[id(t)] != place]
    if not twice:
        return _comparison(tensors)
    once, again, before = _picker(sorted(first.values())), _picker(twice), _picker([first[id(tensors[place])] for place in twice])
    compare = _comparison(once(tensors))
    return lambda *found: all(map(is_, again(found), before(found))) and compare(*once(found))


def _comparison(tensors: Sequence[Tensor]) -> Check:
    """Whether as many tensors are like these in type, device, dtype, shape, strides and negative bit.

    torch.compile's own guard asks all of it of all tensors in one call; attribute by attribute it takes ten times as long.
    """
    if _guards is not None:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        check: Check = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        if check(*tensors):
            return check
    expected = [_likeness(t) for t in tensors]
    return lambda *found: all(isinstance(t, Tensor) and _likeness(t) == e for t, e in zip(found, expected, strict=True))


def _likeness(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.device, t.dtype, t.shape, t.stride(), t.is_neg()
