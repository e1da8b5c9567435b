"""Chains of layers, as `layer` has them: from tensors of any leading dimensions to layers, and back. Everything is checked, planned and traced by shape anew."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from epigen.codegen.sparse import DENSE
from epigen.errors import CallError, near_miss
from epigen.runtime import arguments, semi_structured
from epigen.training import composed, functions, parted, plan
from epigen.training.layer import Layer, Link, Value, apply, forward, kept, rows, shaped
from epigen.training.plan import Declared, Input, LayerRequest, Step

if TYPE_CHECKING:
    from epigen.training.traced import Traced


def chain(x: Tensor, layers: Sequence[Link]) -> Any:
    """Layers one after another, each but the last with one tile as its result. x: [..., K]. Returns the last one's results.

    What a layer's derivative is runs within the next layer's input-gradient product.
    """
    given = (x, *(value for layer in layers for value in (layer.weight, *layer.inputs.values())))
    of_functions = any(functions.is_function(layer.epilogue) for layer in layers)
    if has_torch_function(given):
        if of_functions and any(map(arguments.stands_for_one, given)):  # torch.fx writes down what a function calls, for it cannot write down a function
            return _one_by_one(x, layers)
        return handle_torch_function(chain, given, x, layers)
    if not of_functions:
        return _of_texts(*dense(x, layers))
    if torch.compiler.is_compiling() or composed.needed(value for value in given if isinstance(value, Tensor)):
        return _one_by_one(*dense(x, layers))
    x, layers, trace = written(x, layers)
    return returned(trace, _of_texts(x, layers))


def _one_by_one(x: Tensor, layers: Sequence[Link]) -> Any:
    """With functions as torch runs them, unfused."""
    for layer in layers:
        x = chain(x, [layer]) if isinstance(layer.epilogue, str) else functions.plain(layer.epilogue, x, layer.weight, layer.inputs)
    return x


def dense(x: Tensor, layers: Sequence[Link]) -> tuple[Tensor, Sequence[Link]]:
    """The same, cast as autocast has it, if all of them are what layers multiply."""
    for what, t in (("x", x), *(("weight", layer.weight) for layer in layers)):
        _check_dense(what, t)
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return x, layers
    dtype = torch.get_autocast_dtype(x.device.type)
    return cast(x, dtype), [layer._replace(weight=cast(layer.weight, dtype), inputs=multiplied(layer, dtype)) for layer in layers]


def multiplied(layer: Link, dtype: torch.dtype) -> Mapping[str, Any]:
    """A layer's inputs under autocast: one that is multiplied is cast as the weight is."""
    name = plan.multiplied(layer.epilogue) if isinstance(layer.epilogue, str) else ""
    given = layer.inputs.get(name)
    return {**layer.inputs, name: cast(given, dtype)} if isinstance(given, Tensor) and name else layer.inputs


def written(x: Tensor, layers: Sequence[Link]) -> tuple[Tensor, list[Link], Traced | None]:
    """A chain in which functions stand for some of the texts, with the program in each one's place that it is for these shapes, and what the last layer's function
    returns, if that is one."""
    x, layers = dense(x, layers)
    check_operands(x, layers)
    lead, links, trace = x.shape[:-1], list[Link](), None
    for layer in layers:
        trace = None
        if not isinstance(layer.epilogue, str):
            shape = (*lead, layer.weight.shape[0])
            trace = functions.traced(layer.epilogue, shape, functions.result_dtype(operands(x, layer.weight)), x.device, layer.inputs)
            layer = layer._replace(epilogue=trace.program.text, inputs=functions.presented(trace, layer.inputs, shape))
        links.append(layer)
    return x, links, trace


def returned(trace: Traced | None, results: Any) -> Any:
    """A chain's results, of a function that was traced as that returns them."""
    return results if trace is None else functions.returned(trace, [results] if isinstance(results, Tensor) else list(results))


def steps(x: Tensor, layers: Sequence[Link], values: Sequence[Sequence[Value]]) -> tuple[Step, ...]:
    # what is exported is run for its results, and has no backward to keep for. By the flag, since in torch.compile of torch up to 2.12 is_exporting() is true
    recorded = torch.is_grad_enabled() and not torch.compiler._is_exporting_flag
    requests = [_request(layer, given, recorded, operands(x, layer.weight)) for layer, given in zip(layers, values, strict=True)]
    return plan.steps(recorded and x.requires_grad, tuple(requests))


def _named(results: Sequence[Tensor], several: Any) -> Any:
    return results[0] if several is None else tuple.__new__(several, results)


def _of_texts(x: Tensor, layers: Sequence[Link]) -> Any:
    if not semi_structured.TYPES.isdisjoint(type(layer.weight) for layer in layers):
        _check_sparse(x, layers)
    if parted.needed(layers):
        return parted.run(layers, functools.partial(_of_texts, x))
    check_operands(x, layers)
    programs = [plan.declared(layer.epilogue) for layer in layers]
    for layer, program in zip(layers[:-1], programs, strict=False):
        if not program.tile:
            raise CallError(f"the epilogue {layer.epilogue!r} does not give one tile, which the next layer could multiply")
    values = [presented(layer, program, x) for layer, program in zip(layers, programs, strict=True)]
    lead, last = x.shape[:-1], programs[-1]
    tensors = [t for layer, given in zip(layers, values, strict=True) for t in (layer.weight, *given) if isinstance(t, Tensor)]
    if composed.needed([x, *tensors]):
        results = _composed(rows(x, "mn"), lead, layers, values, programs)
    else:
        results = _run(x, lead, layers, values, steps(x, layers, values))
    return _named(results, last.type)


def _run(x: Tensor, lead: Sequence[int], layers: Sequence[Link], values: Sequence[Sequence[Value]], steps: Sequence[Step]) -> Sequence[Tensor]:
    """The last layer's results. lead: the leading dimensions that they have, as x and the inputs do."""
    results: Sequence[Tensor] = ()
    taken: list[Value] = []
    for number, (layer, inputs, step) in enumerate(zip(layers, values, steps, strict=True)):
        at_end = number + 1 == len(steps)
        if step.trains:
            tensors = distinct([x, layer.weight, *inputs, *taken])
            results = apply(Layer, *tensors[:2], step, layer.tune, layer.main_grad, lead if at_end else None, *tensors[2:])
        else:
            results = forward(step, layer.tune, x, layer.weight, inputs, lead if at_end else None)
        before = None if at_end else steps[number + 1].before
        taken = [*inputs, *(t.detach() for t in kept(before, x, layer.weight, inputs, results))] if before else []
        x = results[0]
    return results


def _composed(
    x: Tensor, lead: Sequence[int], layers: Sequence[Link], values: Sequence[Sequence[Value]], programs: Sequence[Declared]
) -> Sequence[Tensor]:  # fmt: skip
    """As `_run`, by torch's own operations."""
    results: Sequence[Tensor] = ()
    for layer, given, program in zip(layers, values, programs, strict=True):
        inputs = {i.name: rows(value, i.indices) for i, value in zip(program.inputs, given, strict=True)}
        results = composed.run(layer.epilogue, x, layer.weight, inputs)
        x = results[0]
    return [shaped(t, indices, lead) for t, indices in zip(results, programs[-1].outputs, strict=True)]


def distinct(values: list[Value]) -> list[Value]:
    """torch.compile takes no tensor twice as arguments of one autograd function (2.13): there the second is a view of the first."""
    if torch.compiler.is_compiling():
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and any(value is v for v in values[:i]):
                values[i] = value.view_as(value)
    return values


def operands(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which a layer of a chain multiplies. x: of the chain, whose tiles have its dtype."""
    return x.dtype if arguments.converted(x, weight) else weight.dtype


def _request(layer: Link, values: Sequence[Value], recorded: bool, multiplied: torch.dtype) -> LayerRequest:
    """multiplied: as of `operands`."""
    for what, option in (("save", layer.save), ("tune", layer.tune)):
        if option is not None and not isinstance(option, str):
            raise CallError(f"{what} is a {type(option).__name__}, and a text was expected, or None")
    second = plan.multiplied(layer.epilogue)  # whose gradient is that of its product, up to where it is one of a weight
    names = [i.name for i in plan.declared(layer.epilogue).inputs]
    dtypes = tuple((multiplied if name == second else v.dtype) if isinstance(v, Tensor) else None for name, v in zip(names, values, strict=True))
    wanted = tuple(recorded and isinstance(v, Tensor) and v.requires_grad for v in values)
    return LayerRequest(layer.epilogue, layer.save, layer.of, multiplied, dtypes, wanted, recorded and layer.weight.requires_grad)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does, which leaves float64 alone."""
    if t.dtype == dtype or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    if type(t) in semi_structured.TYPES:
        raise CallError(f"weight is 2:4 sparse {t.dtype}, and autocast computes in {dtype}, which torch converts no such tensor to: make it of {dtype}")
    return t.to(dtype)


# -- what is given


def presented(layer: Link, program: Declared, x: Tensor) -> list[Value]:
    """The layer's inputs in the program's order, with x's leading dimensions. x: of the call."""
    known = [i.name for i in program.inputs]
    for name in layer.inputs:
        if name not in known:
            hint = near_miss(name, known) or "its inputs are " + (", ".join(known) or "none")
            raise CallError(f"the epilogue {layer.epilogue!r} has no input '{name}': {hint}")
    for name in known:
        if name not in layer.inputs:
            raise CallError(f"missing input '{name}' of the epilogue {layer.epilogue!r}: give it, or write the epilogue without it")
    n, k = layer.weight.shape
    k = 2 * k if plan.packed(layer.epilogue) else k
    return [_input(declared, layer.inputs[declared.name], x.shape[:-1], layer.weight, (n, k)) for declared in program.inputs]


def _input(declared: Input, value: Any, lead: Sequence[int], weight: Tensor, extents: tuple[int, int]) -> Value:
    """extents: N and K."""
    what, number = f"input '{declared.name}'", value
    if declared.seed:
        value = arguments.seed(declared.name, value, weight)
        arguments.check_seed(what, value)
    if not isinstance(value, Tensor):
        if declared.indices or not isinstance(value, numbers.Real):
            wanted = f"{declared}, and a tensor" if declared.indices else "a scalar, and a number or a tensor with one element"
            raise CallError(f"{what} is {wanted} was expected, not a {type(value).__name__}")
        if torch.compiler.is_dynamo_compiling():
            return arguments.traced_number(number, weight.device)
        return arguments.number(declared.name, value)
    _check_dense(what, value)
    if not declared.indices:
        if value.numel() != 1:
            raise CallError(f"{what} is a scalar, and has shape {list(value.shape)}: one element was expected")
        return value if value.dim() == 0 else value.reshape(())
    if declared.periods or declared.blocks:  # the kernel's own check tells of its extents
        return value
    return _broadcast(declared, value, lead, *extents)


def _broadcast(declared: Input, value: Tensor, lead: Sequence[int], n: int, k: int) -> Tensor:
    """As torch.broadcast_to has it, but for a packed mask's bytes; a row may come as [..., 1] too, as torch's own reductions keep it."""
    last = -(-n // 8) if declared.packed else n
    wanted = {"mn": (*lead, last), "m": tuple(lead), "n": (last,), "k": (k,), "mk": (*lead, k), "kn": (k, n)}[declared.indices]
    if value.shape == wanted:
        return value
    given = value[..., 0] if declared.indices == "m" and value.dim() > len(lead) and value.shape[-1] == 1 else value
    while given.dim() > len(wanted) and given.shape[0] == 1:
        given = given[0]
    pairs = list(zip(reversed(given.shape), reversed(wanted), strict=False))
    if given.dim() > len(wanted) or any(size not in (1, extent) for size, extent in pairs) or (declared.packed and pairs[:1] != [(last, last)]):
        raise CallError(
            f"input '{declared.name}' is {declared}, so {list(wanted)} was expected, the leading dimensions of x being {list(lead)}, and it has shape "
            f"{list(value.shape)}, which torch does not broadcast to that: expand it"
        )
    return given.expand(wanted)


def check_operands(x: Tensor, layers: Sequence[Link]) -> None:
    """What the kernels would say in words of their own."""
    if x.dim() == 0:
        raise CallError("x has no dimensions, and [..., K] was expected")
    extent = x.shape[-1]
    for layer in layers:
        weight = layer.weight
        halved = isinstance(layer.epilogue, str) and plan.packed(layer.epilogue)
        if weight.dim() != 2 or weight.shape[1] * (2 if halved else 1) != extent:
            held = "[N, K / 2], of two values in a byte," if halved else "[N, K]"
            raise CallError(f"weight is {list(weight.shape)}, and {held} with K = {extent} was expected: what it multiplies is [..., K]")
        if weight.device != x.device:
            raise CallError(f"x is on {x.device} and weight on {weight.device}")
        extent = weight.shape[0]
    weight = layers[0].weight
    if weight.dtype != x.dtype and not (x.dtype in _FP8 and weight.dtype in _FP8) and not arguments.converted(x, weight):
        raise CallError(f"x is {x.dtype} and weight is {weight.dtype}: both need the same dtype, as by x.to(weight.dtype)")
    for name, value in (right for layer in layers for right in _right_operands(layer)):
        if value.requires_grad and torch.is_grad_enabled() and arguments.converted(x, value):
            raise CallError(
                f"{name} is {value.dtype} beside x of {x.dtype}, and what is rounded to so few values is not trained: pass {name}.detach(), or train the "
                f"weight that it was made of, in {x.dtype}"
            )


def _check_sparse(x: Tensor, layers: Sequence[Link]) -> None:
    """What a 2:4 sparse weight cannot be: trained, or the way of a gradient where it is compressed along k alone."""
    recorded, wanted = torch.is_grad_enabled() and not torch.compiler._is_exporting_flag, x.requires_grad
    for layer in layers:
        weight: Any = layer.weight
        if type(weight) in semi_structured.TYPES:
            if isinstance(layer.epilogue, str) and parted.needed([layer]):
                raise CallError(f"the epilogue {layer.epilogue!r} parts the weight, and a 2:4 sparse one has no parts: {DENSE}")
            if recorded and weight.requires_grad:
                raise CallError(
                    "weight is 2:4 sparse and requires a gradient, which it has not: call weight.requires_grad_(False), or run it under torch.no_grad()"
                )
            if recorded and wanted and (weight.packed is None or weight.packed_t is None):
                raise CallError(
                    "x requires a gradient, and weight is 2:4 sparse along k alone, by which none is multiplied back: torch.sparse.SparseSemiStructuredTensorCUSPARSELT's "
                    "prune_dense_static_sort makes one that is so both ways; else run it under torch.no_grad()"
                )
        wanted = wanted or any(isinstance(v, Tensor) and v.requires_grad for v in (weight, *layer.inputs.values()))


def _right_operands(layer: Link) -> Iterator[tuple[str, Tensor]]:
    """What a layer multiplies x with, by name."""
    yield "weight", layer.weight
    second = layer.inputs.get(plan.multiplied(layer.epilogue)) if isinstance(layer.epilogue, str) else None
    if isinstance(second, Tensor):
        yield plan.multiplied(layer.epilogue), second


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _check_dense(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise CallError(f"{what} is a {type(value).__name__}, and a tensor was expected: torch.as_tensor makes one of numbers")
    if value.is_nested or value.layout != torch.strided:
        raise CallError(f"{what} is a {'nested' if value.is_nested else 'sparse'} tensor, and a dense one was expected")
