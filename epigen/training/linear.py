"""`epigen.linear`, and chains of such layers: from a user's tensors of any leading dimensions to the layers of `layer`, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigen.errors import CallError, near_miss
from epigen.training import plan
from epigen.training.layer import Layer, Value, apply, forward, kept
from epigen.training.plan import Asked, Declared, Step


class Link(NamedTuple):
    """One layer of a chain: its weight [N, K] and inputs, and how it is to be run. Fields as the arguments of `linear`."""

    weight: Tensor
    inputs: Mapping[str, Value]
    epilogue: str
    save: str | None = None
    of: tuple[str, ...] | None = None
    tune: str | None = None
    main_grad: Tensor | None = None


def linear(
    x: Tensor, weight: Tensor, /, bias: Tensor | None = None, epilogue: str = "relu(mm + bias)", *, save: str | None = None, of: str | Iterable[str] | None = None,
    tune: str | None = None, main_grad: Tensor | None = None, **inputs: Value,
) -> Any:  # fmt: skip
    """A linear layer and all that follows it in one kernel, differentiable: with mm = x @ weight.T, as `torch.nn.functional.linear` has it.

    x: [..., K]. weight: [N, K]. bias: [N], the program's input of that name. epilogue: the program. inputs: its further inputs by name: tile
    [..., N], row [...], column [N], packed mask [..., ceil(N / 8)], scalar a number or a tensor with one element. Gradients flow to those
    that require them.
    save: what the forward keeps for the backward, and of: the outputs at which gradients arrive, both as for `epigen.derive`. Without a
    gradient to take nothing is kept. tune: as for `epigen.compile`. main_grad: an fp32 buffer [N, K] to which the backward adds the
    weight's gradient in place, in fp32; the weight's own `grad` is then left alone.
    Under autocast x and weight are cast as by `torch.nn.functional.linear`; the inputs stay as they are, for the kernel reads any dtype.
    Returns a tile as [..., N], a row as [...]; several outputs as a named tuple.
    Raises ParseError or CheckError for the epilogue, DerivationError where it has no derivative, CallError for the rest.

    >>> import torch, epigen
    >>> weight = torch.tensor([[1.0, -1.0], [2.0, 0.0]], requires_grad=True)
    >>> epigen.linear(torch.ones(1, 2), weight, torch.zeros(2)).sum().backward()
    >>> weight.grad
    tensor([[0., 0.],
            [1., 1.]])
    """
    if bias is not None:
        inputs = {"bias": bias, **inputs}
    return chain(x, [Link(weight, inputs, epilogue, save, names(of), tune, main_grad)])


def names(of: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Outputs as an argument `of` gives them."""
    return of if of is None else (of,) if isinstance(of, str) else tuple(of)


def chain(x: Tensor, layers: Sequence[Link]) -> Any:
    """Layers one after another, each but the last with one tile as its result. x: [..., K]. Returns the last one's results.

    What a layer's derivative is runs within the next layer's input-gradient product.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, layers = _cast(x, dtype), [layer._replace(weight=_cast(layer.weight, dtype)) for layer in layers]
    programs = [plan.declared(layer.epilogue) for layer in layers]
    values = [_inputs(layer, program) for layer, program in zip(layers, programs, strict=True)]
    _check(x, layers, programs)
    recorded = torch.is_grad_enabled()
    asked = [_asked(layer, given, recorded) for layer, given in zip(layers, values, strict=True)]
    outputs = _run(_rows(x), layers, values, plan.steps(recorded and x.requires_grad, tuple(asked)))
    lead, last = x.shape[:-1], programs[-1]
    shaped = [_unrolled(t, indices, lead) for t, indices in zip(outputs, last.outputs, strict=True)]
    return shaped[0] if last.type is None else tuple.__new__(last.type, shaped)


def _run(x: Tensor, layers: Sequence[Link], values: Sequence[Sequence[Value]], steps: Sequence[Step]) -> Sequence[Tensor]:
    """The last layer's results."""
    results: Sequence[Tensor] = ()
    taken: list[Value] = []
    for number, (layer, inputs, step) in enumerate(zip(layers, values, steps, strict=True)):
        if step.trains:
            results = apply(Layer, step, layer.tune, layer.main_grad, *_distinct([x, layer.weight, *inputs, *taken]))
        else:
            results = forward(step, layer.tune, x, layer.weight, inputs)
        before = steps[number + 1].before if number + 1 < len(steps) else None
        taken = [*inputs, *(t.detach() for t in kept(before, x, layer.weight, inputs, results))] if before else []
        x = results[0]
    return results


def _distinct(values: list[Value]) -> list[Value]:
    """torch.compile takes no tensor twice as arguments of one autograd function (2.13): there the second is a view of the first."""
    if torch.compiler.is_compiling():
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and any(value is v for v in values[:i]):
                values[i] = value.view_as(value)
    return values


def _asked(layer: Link, values: Sequence[Value], recorded: bool) -> Asked:
    dtypes = tuple(v.dtype if isinstance(v, Tensor) else None for v in values)
    wanted = tuple(recorded and isinstance(v, Tensor) and v.requires_grad for v in values)
    return Asked(layer.epilogue, layer.save, layer.of, layer.weight.dtype, dtypes, wanted, recorded and layer.weight.requires_grad)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does, which leaves float64 alone."""
    return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t


# -- leading dimensions


def _rows(t: Tensor) -> Tensor:
    """[..., N] as [M, N]."""
    return t if t.dim() == 2 else t[None] if t.dim() == 1 else t.flatten(0, -2)


def _unrolled(t: Tensor, indices: str, lead: torch.Size) -> Tensor:
    """An output as the caller's leading dimensions have it."""
    if len(lead) == 1 or "m" not in indices:
        return t
    return t.unflatten(0, lead) if lead else t[0]


def _inputs(layer: Link, program: Declared) -> list[Value]:
    """The layer's inputs in the program's order, without leading dimensions."""
    known = [i.name for i in program.inputs]
    for name in layer.inputs:
        if name not in known:
            hint = near_miss(name, known) or "its inputs are " + (", ".join(known) or "none")
            raise CallError(f"the epilogue {layer.epilogue!r} has no input '{name}': {hint}")
    found = []
    for declared in program.inputs:
        if declared.name not in layer.inputs:
            raise CallError(f"missing input '{declared.name}' of the epilogue {layer.epilogue!r}: give it, or write the epilogue without it")
        value = layer.inputs[declared.name]
        if isinstance(value, Tensor) and declared.indices != "n":
            value = _rows(value) if declared.indices == "mn" else value.reshape(-1) if declared.indices else value.reshape(())
        found.append(value)
    return found


def _check(x: Tensor, layers: Sequence[Link], programs: Sequence[Declared]) -> None:
    """What the kernels would say in words of their own."""
    if x.dim() == 0:
        raise CallError("x has no dimensions, and [..., K] was expected")
    extent = x.shape[-1]
    for number, layer in enumerate(layers):
        if number and not programs[number - 1].tile:
            raise CallError(f"the epilogue {layers[number - 1].epilogue!r} does not give one tile, which the next layer could multiply")
        weight = layer.weight
        if weight.dim() != 2 or weight.shape[1] != extent:
            raise CallError(f"weight is {list(weight.shape)}, and [N, K] with K = {extent} was expected: what it multiplies is [..., K]")
        extent = weight.shape[0]
