"""Layers whose programs part and join, as chains of layers have them: with the parts of weights and inputs in place of the whole.

A gradient comes back to a whole tensor by torch's own derivative of the views, in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from epigen.errors import CallError
from epigen.ir.parting import Part, Parting
from epigen.ir.program import graph_of, parting_of
from epigen.lang.syntax import HALVES
from epigen.runtime import outputs
from epigen.runtime.parted import together
from epigen.training import plan
from epigen.training.layer import Link


class _Program(NamedTuple):
    """text, outputs: of the program of parts."""

    text: str
    outputs: tuple[str, ...]
    parting: Parting


def _program(text: str) -> _Program | None:
    """None of a program that parts and joins nothing."""
    parting = parting_of(text)
    if parting is None:
        return None
    graph = graph_of(text)
    return _Program(graph.text, tuple(o.name for o in graph.outputs), parting)


def inputs(text: str) -> tuple[str, ...]:
    """The names of a layer's inputs as a call gives them. Raises CallError for what is no text."""
    names = tuple(i.name for i in plan.declared(text).inputs)
    program = _program(text)
    return program.parting.as_given(names) if program else names


# torch.compile is not to look into these, as into those of `plan`
_program._dynamo_marked_constant = True  # type: ignore[attr-defined]
inputs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def needed(links: Sequence[Link]) -> bool:
    return any(isinstance(link.epilogue, str) and _program(link.epilogue) is not None for link in links)


def apart(link: Link) -> Link:
    """A layer of the parts."""
    program = _program(link.epilogue) if isinstance(link.epilogue, str) else None
    if program is None:
        return link
    (text, _, parting), of = program, link.of
    if of is not None:
        parts = {p.whole: (p.first, p.second) for p in parting.outputs}
        of = tuple(part for name in of for part in parts.get(name, (name,)))
    if not parting.inputs:
        return link._replace(epilogue=text, of=of)
    if link.main_grad is not None:
        raise CallError("main_grad of a weight whose parts are multiplied one by one: without it the gradient is the weight's own, in `grad`")
    weight, *others = parting.inputs
    if link.weight.dim() != 2 or link.weight.shape[0] % 2:
        raise CallError(f"the weight is parted in {weight.way}, and its shape is {list(link.weight.shape)}: [2 N, K] was expected")
    for part in others:
        whole: Any = link.inputs.get(part.whole)
        if whole is None:
            raise CallError(f"missing input '{part.whole}' of the epilogue {link.epilogue!r}: give it, or write the epilogue without it")
        if not isinstance(whole, Tensor) or whole.dim() == 0 or whole.shape[-1] != link.weight.shape[0]:
            found = f"of shape {list(whole.shape)}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
            raise CallError(f"input '{part.whole}' is parted as the weight is, so its last extent is to be {link.weight.shape[0]}, and it is {found}")
    first, inputs = _parts(parting, link.weight, link.inputs)
    return link._replace(weight=first, inputs=inputs, epilogue=text, of=of)


def taken_apart(link: Link) -> Callable[..., tuple[Any, ...]]:
    """What `apart` makes of the weight and the inputs of a layer like this, which it is given in a row: the same of parts. It checks nothing."""
    program = _program(link.epilogue)
    names = tuple(link.inputs)
    if program is None or not program.parting.inputs:
        return lambda *given: given
    parting = program.parting

    def parts(weight: Tensor, *inputs: Any) -> tuple[Any, ...]:
        first, of_parts = _parts(parting, weight, dict(zip(names, inputs, strict=True)))
        return first, *of_parts.values()

    return parts


def _parts(parting: Parting, weight: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    of_weight, *others = parting.inputs
    first, second = _views(weight, 0, of_weight.way)
    given = {**inputs, of_weight.second: second.t()}
    for part in others:
        given[part.first], given[part.second] = _views(given.pop(part.whole), -1, part.way)
    return first, given


def _views(t: Tensor, dim: int, way: str) -> tuple[Tensor, Tensor]:
    """Both parts along a dimension. Their derivatives are put together by one operation, where those of slices each fill a tensor of the whole size."""
    dim %= t.dim()
    first, second = t.unflatten(dim, (2, -1)).unbind(dim) if way == HALVES else t.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return first, second


def run(links: Sequence[Link], chain: Callable[[Sequence[Link]], Any]) -> Any:
    """The results of a chain, by one of the parts. chain: runs that."""
    return joined(links[-1].epilogue, chain([apart(link) for link in links]))


def joined(epilogue: Any, results: Any) -> Any:
    """A layer's results, with those that it joins as one."""
    program = _program(epilogue) if isinstance(epilogue, str) else None
    if program is None or not program.parting.outputs:
        return results
    _, names, parting = program
    by_name = dict(zip(names, results, strict=True))
    parts: dict[str, Part] = {p.whole: p for p in parting.outputs}
    wholes = [together(by_name[parts[n].first], by_name[parts[n].second], parts[n].way) if n in parts else by_name[n] for n in parting.as_returned(names)]
    return wholes[0] if len(wholes) == 1 else tuple.__new__(outputs.named(parting.as_returned(names)), wholes)
