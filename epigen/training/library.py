"""What the operations of `operations` do: programs, as torch.compile, torch.export and autograd see them.

An operation names its program by text and takes the inputs in the program's order, a number's place held by None. None has a derivative of
its own: `layer` wires them, and calls them by `below_autograd`. Whoever else calls one under autograd is told so, for torch itself would go
on without the derivative: a tangent is refused at once, and a gradient where it arrives, since a model that torch.export wrote down has
parameters that require one and is run for its results. A fake implementation allocates on torch's fake tensors what the kernel would, by
the same description of the outputs, and checks the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epigen import api
from epigen.codegen.lower import over_product
from epigen.dtypes import BY_TORCH_ON_CPU
from epigen.errors import CallError, InternalError
from epigen.ir.graph import GROUPS, PRODUCT, Graph, Node
from epigen.ir.program import MOST_PROGRAMS, graph_of
from epigen.runtime import arguments, batches, groups, outputs, semi_structured
from epigen.runtime.batches import Batch
from epigen.runtime.kernel import Kernel
from epigen.training import bits

Inputs = Sequence[Tensor | None]
"""In the program's order; None stands for a number."""

ACCUMULATE = "cast(mm + grad[m,n], fp32)"


def kernel(text: str, tune: str | None, options: str | None = None) -> Kernel:
    """The process's own kernel of a program. tune: as of `epigen.compile`. options: its others, as JSON."""
    return _kernel(text, tune, options)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _kernel(text: str, tune: str | None, options: str | None) -> Kernel:
    return api.compile(text, tune=tune, **(json.loads(options) if options else {}))


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def names(text: str) -> tuple[str, ...]:
    return tuple(node.name for node in graph_of(text).inputs())


def named(text: str, inputs: Sequence[Tensor | float | None], numbers: Sequence[float]) -> dict[str, Any]:
    """A program's inputs by name, and behind them where groups end, if the call is of such. numbers: in the places of None."""
    called = names(text)
    if len(inputs) > len(called):
        called = (*called, GROUPS)
    if not numbers:
        return dict(zip(called, inputs, strict=True))
    rest = iter(numbers)
    return {name: next(rest) if value is None else value for name, value in zip(called, inputs, strict=True)}


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _program(
    text: str, tune: str | None, a: Tensor, b: Tensor, inputs: Sequence[Tensor | float | None], numbers: Sequence[float], options: str | None = None
) -> list[Tensor]:
    if torch.is_grad_enabled():  # as in a model that torch.export wrote down: below autograd nothing is recorded any more
        with torch.no_grad():
            return _program(text, tune, a, b, inputs, numbers, options)
    return _listed(kernel(text, tune, options)(a, b, **named(text, inputs, numbers)))


def _over(text: str, mm: Tensor, inputs: Sequence[Tensor | float | None], numbers: Sequence[float], options: str | None = None) -> list[Tensor]:
    with torch.no_grad():
        return _listed(kernel(text, None, options).over(mm, **named(text, inputs, numbers)))


def _into(
    text: str, tune: str | None, operands: Sequence[Tensor], inputs: Sequence[Tensor | float | None], numbers: Sequence[float], out: Sequence[Tensor], options: str | None = None
) -> None:  # fmt: skip
    made = kernel(text, tune, options)
    with torch.no_grad():
        (made if len(operands) == 2 else made.over)(*operands, out=list(out), **named(text, inputs, numbers))


def taken_apart(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`program` or `into` of a sparse operand, by the operation that takes the tensors which it holds. args, options: as torch has them."""
    text, tune, *rest = args
    operands, rest = (rest[0], rest[1:]) if name == "into" else (rest[:2], rest[2:])
    if semi_structured.TYPES.isdisjoint(map(type, operands)):
        raise CallError("an input is 2:4 sparse, and operands a and b alone can be: pass its dense values, as t.to_dense() has them")
    given = semi_structured.of_call(operands)
    semi_structured.check(kernel(text, tune, options.get("options")).graph, given)
    run = torch.ops.epigen.of_sparse_into.default if name == "into" else torch.ops.epigen.of_sparse.default
    return run(text, tune, given.side, given.other, given.held.packed, given.held.meta, given.held.numbers, *rest, **options)


def _again(side: str, other: Tensor, packed: Tensor, meta: Tensor | None, held: Sequence[int]) -> tuple[Any, Any]:
    """The operands that were taken apart."""
    sparse = semi_structured.Compressed.of_numbers(packed, meta, held).tensor(side == "b")
    return (sparse, other) if side == "a" else (other, sparse)


def _standing(side: str, other: Tensor, packed: Tensor, held: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The same without contents."""
    whole = packed.new_empty(held[:2])
    return (whole, other) if side == "a" else (other, whole.t())


def _of_sparse(
    text: str, tune: str | None, side: str, other: Tensor, packed: Tensor, meta: Tensor | None, held: Sequence[int], inputs: Sequence[Tensor | float | None],
    numbers: Sequence[float], options: str | None = None,
) -> list[Tensor]:  # fmt: skip
    return _program(text, tune, *_again(side, other, packed, meta, held), inputs, numbers, options)


def _of_sparse_into(
    text: str, tune: str | None, side: str, other: Tensor, packed: Tensor, meta: Tensor | None, held: Sequence[int], inputs: Sequence[Tensor | float | None],
    numbers: Sequence[float], out: Sequence[Tensor], options: str | None = None,
) -> None:  # fmt: skip
    _into(text, tune, _again(side, other, packed, meta, held), inputs, numbers, out, options)


def _fake_of_sparse(
    text: str, tune: str | None, side: str, other: Tensor, packed: Tensor, _meta: Tensor | None, held: Sequence[int], inputs: Inputs, numbers: Sequence[float],
    options: str | None = None,
) -> list[Tensor]:  # fmt: skip
    return _fake_program(text, tune, *_standing(side, other, packed, held), inputs, numbers, options)


def _fake_of_sparse_into(
    text: str, tune: str | None, side: str, other: Tensor, packed: Tensor, _meta: Tensor | None, held: Sequence[int], inputs: Inputs, numbers: Sequence[float],
    out: Sequence[Tensor], options: str | None = None,
) -> None:  # fmt: skip
    _fake_into(text, tune, _standing(side, other, packed, held), inputs, numbers, out, options)


def _accumulate(grad: Tensor, a: Tensor, b: Tensor) -> None:
    _into(ACCUMULATE, None, [a, b], [grad], [], [grad])


def _fake_program(text: str, tune: str | None, a: Tensor, b: Tensor, inputs: Inputs, numbers: Sequence[float], options: str | None = None) -> list[Tensor]:
    made = kernel(text, tune, options)
    return _joined(made, _fake(made.graph, (a, b), named(text, inputs, numbers)))


def _joined(made: Kernel, results: Sequence[Tensor]) -> list[Tensor]:
    """What a program gives of what its graph does: of two results that it joins one with the columns of both."""
    if made.parting is None or not made.parting.outputs:
        return list(results)
    by_name = dict(zip((o.name for o in made.graph.outputs), results, strict=True))
    wholes = {p.whole: by_name[p.first] for p in made.parting.outputs}
    names = made.parting.as_returned(by_name)
    return [wholes[name].new_empty((*wholes[name].shape[:-1], 2 * wholes[name].shape[-1])) if name in wholes else by_name[name] for name in names]


def _fake_over(text: str, mm: Tensor, inputs: Inputs, numbers: Sequence[float], options: str | None = None) -> list[Tensor]:
    return _fake(over_product(kernel(text, None, options).graph), (), {PRODUCT: mm, **named(text, inputs, numbers)})


def _fake(graph: Graph, operands: tuple[Tensor, ...], inputs: dict[str, Any]) -> list[Tensor]:
    first, shape, batch = _checked(graph, operands, inputs)
    allocate = outputs.allocator(first.device)
    return [
        out.held(*shape[:2], () if batch is None else batch.lead_of(out.indices)).empty(allocate)
        for out in outputs.of(graph, BY_TORCH_ON_CPU[str(first.dtype)])
    ]


def _checked(graph: Graph, operands: tuple[Tensor, ...], inputs: Mapping[str, Any]) -> tuple[Tensor, tuple[int, int, int], Batch | None]:
    """The first operand, or the product that is given, M, N, K, and the products of a batch."""
    declared: Mapping[str, Node] = {node.name: node for node in graph.inputs()}
    declared = groups.declared(declared, inputs)
    one, given, batch = groups.products(graph, declared, operands, inputs)
    shape = arguments.check_operands(graph, *one) if one else (*arguments.check_product(given[PRODUCT]), 0)
    first: Tensor = one[0] if one else given[PRODUCT]
    arguments.check_inputs(declared, given, shape, first)
    if one:
        arguments.check_second(graph, given, one[1])
    return first, shape, batch


def _fake_into(
    text: str, tune: str | None, operands: Sequence[Tensor], inputs: Inputs, numbers: Sequence[float], out: Sequence[Tensor], options: str | None = None
) -> None:  # fmt: skip
    graph, given = kernel(text, tune, options).graph, named(text, inputs, numbers)
    if len(operands) == 1:
        graph, given, operands = over_product(graph), {PRODUCT: operands[0], **given}, ()
    first, shape, batch = _checked(graph, tuple(operands), given)
    all_outputs, written = outputs.of(graph, BY_TORCH_ON_CPU[str(first.dtype)]), dict(enumerate(out))
    buffers: Mapping[str, Tensor] = {o.name: written[i] for i, o in enumerate(all_outputs)}
    if batch is not None:
        buffers, _ = batches.with_outputs(batch, all_outputs, buffers, *shape[:2])
    for o in all_outputs:
        outputs.check(buffers[o.name], o, *shape[:2], first.device)


def _fake_accumulate(grad: Tensor, a: Tensor, b: Tensor) -> None:
    _fake_into(ACCUMULATE, None, [a, b], [grad], [], [grad])


def below_autograd(operation: Any, *args: Any) -> Any:
    """An operation's result, where its derivative is taken care of. It also costs less: the way by autograd doubles an operation's own time."""
    if torch.compiler.is_compiling():
        return operation(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operation(*args)


def run(text: str, tune: str | None, a: Tensor, b: Tensor, values: Sequence[Tensor | float], options: str | None = None) -> list[Tensor]:
    """`program` where its derivative is taken care of. values: the program's inputs in its order, numbers among them.

    Where nobody in torch is to see the operation it is a call of the kernel: torch's way to an operation written in Python takes twice the time of the call.
    """
    if torch.compiler.is_compiling() or not unseen(a, b, *values):
        return list(below_autograd(functools.partial(program, options=options), text, tune, a, b, *split(values)))
    return _program(text, tune, a, b, values, (), options)


def run_over(text: str, mm: Tensor, values: Sequence[Tensor | float]) -> list[Tensor]:
    """`over`, as `run` is `program`."""
    if torch.compiler.is_compiling() or not unseen(mm, *values):
        return list(below_autograd(over, text, mm, *split(values)))
    return _over(text, mm, values, ())


def run_into(text: str, tune: str | None, a: Tensor, b: Tensor, values: Sequence[Tensor | float], out: Sequence[Tensor]) -> None:
    """`into` of a product, as `run` is `program`."""
    if torch.compiler.is_compiling() or not unseen(a, b, *values):
        inputs, rest = split(values)
        below_autograd(into, text, tune, [a, b], inputs, rest, list(out))
    else:
        _into(text, tune, [a, b], values, [], out)


def add_product(grad: Tensor, a: Tensor, b: Tensor) -> None:
    """`accumulate`, as `run` is `program`."""
    if torch.compiler.is_compiling() or not unseen(grad, a, b):
        below_autograd(accumulate, grad, a, b)
    else:
        _accumulate(grad, a, b)


def split(values: Sequence[Tensor | float]) -> tuple[list[Tensor | None], list[float]]:
    """As the operations take them."""
    return [v if isinstance(v, Tensor) else None for v in values], [v for v in values if not isinstance(v, Tensor)]


def unseen(*values: Tensor | float) -> bool:
    """Whether an operation of these would reach its own implementation and nothing of torch's on the way: a mode, a transform, a trace, a profile."""
    return usual() and _UNSEEN.issuperset(map(type, values))


def usual() -> bool:
    """As `unseen`, of an operation of plain tensors."""
    return torch._C._dispatch_tls_local_include_set().raw_repr() in _USUAL and not torch._C._autograd._profiler_enabled()


def _keys(*names: str) -> int:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


_USUAL = (_keys("ADInplaceOrView"), _keys())
"""What torch's dispatcher has of each thread where nothing is going on, without and with inference mode."""
_UNSEEN = {*arguments.PLAIN, *semi_structured.TYPES, float, int, bool}


def _refusing(name: str, keys: Any, *args: Any, **options: Any) -> Any:
    """What autograd runs in place of an operation."""
    operation = getattr(torch.ops.epigen, name).default
    tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]
    if any(arguments.has_tangent(t) for t in tensors):
        raise CallError(f"torch.ops.epigen.{name} has no forward-mode derivative: {_INSTEAD}")
    run = functools.partial(operation.redispatch, keys & torch._C._after_autograd_keyset, **options)
    required = [t for t in tensors if t.requires_grad] if torch.is_grad_enabled() else []
    if required and torch._C._are_functorch_transforms_active():
        raise CallError(f"torch.ops.epigen.{name} has no derivative of its own: {_INSTEAD}")
    with torch._C._AutoDispatchBelowAutograd():
        results = run(*args)
    if not required or results is None:
        return results
    derived: Any = _Underivable.apply  # which torch leaves untyped
    return list(derived(name, results, *required))


_INSTEAD = "use epigen.linear, or write it in torch's own operations"


class _Underivable(torch.autograd.Function):
    """(operation's name, its results, *what requires a gradient) -> the results, at which no gradient may arrive."""

    @staticmethod
    def forward(ctx: Any, name: str, results: list[Tensor], *_required: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_arrived: Any) -> Any:
        raise CallError(f"torch.ops.epigen.{ctx.name} has no derivative of its own: {_INSTEAD}")


# -- many at once


def _each(operation: Any, info: Any, dims: Sequence[Any], *args: Any, **options: Any) -> tuple[list[Tensor], list[int]]:
    """What torch.vmap runs in place of an operation, also where a backward is mapped over many gradients at once: one call after another."""
    results = _one_by_one(operation, info.batch_size, dims, args, options)
    return results, [0] * len(results)


def _one_by_one(operation: Any, count: int, dims: Sequence[Any], args: Sequence[Any], options: Mapping[str, Any]) -> list[Tensor]:
    """Results with a first dimension of `count`. dims: in which dimension an argument has its many; None for one that all share."""
    if not count:
        raise CallError("a layer of epigen is mapped over no examples, of which it cannot tell what comes out")
    results = [operation(*(_one(arg, dim, i) for arg, dim in zip(args, dims, strict=True)), **options) for i in range(count)]
    return [torch.stack(several) for several in zip(*results, strict=True)]


def _one(arg: Any, dim: Any, i: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_one(a, d, i) for a, d in zip(arg, dim, strict=True)]
    return arg if dim is None else arg.select(dim, i)


def _batched(operation: Any, *args: Any, **options: Any) -> list[Tensor]:
    """As `_each`, in torch's older map, which torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) still use (2.13).

    There a tensor knows by itself that it is many, in each of the nested maps in which it is, and its dimension is the first when it is taken out of one.
    """
    nested = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    for level in range(nested, 0, -1):
        counts = set[int]()

        def taken(value: Any, level: int = level, counts: set[int] = counts) -> tuple[Any, Any]:
            if isinstance(value, list):
                pairs = [taken(v) for v in value]
                return [v for v, _ in pairs], [d for _, d in pairs]
            if not isinstance(value, Tensor) or not torch._C._dispatch_keys(value).has(_BATCHED):
                return value, None
            many = torch._remove_batch_dim(value, level, _ABSENT, 0)  # one that is not of this map is expanded to so many
            if many.shape[0] == _ABSENT:
                return value, None
            counts.add(many.shape[0])
            return many, 0

        pairs = [taken(value) for value in args]
        if counts:
            results = _one_by_one(operation, counts.pop(), [d for _, d in pairs], [v for v, _ in pairs], options)
            return [torch._add_batch_dim(t, 0, level) for t in results]
    raise InternalError("an operation is mapped, and none of its tensors is")


_BATCHED: Any = torch._C._parse_dispatch_key("Batched")
_ABSENT = 1 << 40
"""More examples than a tensor holds."""


# -- by name, where `operations` looks for them

_MASKS: Mapping[str, Callable[..., Any]] = {"bitmask": bits.bitmask, "where_bits": bits.where_bits, "tied": bits.tied}
RUN: Mapping[str, Callable[..., Any]] = {
    "program": _program,
    "fused": _program,
    "over": _over,
    "into": _into,
    "accumulate": _accumulate,
    "of_sparse": _of_sparse,
    "of_sparse_into": _of_sparse_into,
    **_MASKS,
}
FAKE: Mapping[str, Callable[..., Any]] = {
    "program": _fake_program,
    "fused": _fake_program,
    "over": _fake_over,
    "into": _fake_into,
    "accumulate": _fake_accumulate,
    "of_sparse": _fake_of_sparse,
    "of_sparse_into": _fake_of_sparse_into,
    **_MASKS,
}
REFUSING = {name: functools.partial(_refusing, name) for name in RUN.keys() - _MASKS.keys()}
MAPPED = {name: functools.partial(_each, getattr(torch.ops.epigen, name).default) for name in ("program", "over")}
BATCHED = {name: functools.partial(_batched, getattr(torch.ops.epigen, name).default) for name in ("program", "over")}

program: Any = torch.ops.epigen.program.default
"""(text, tune, a, b, inputs, numbers, options=None) -> the outputs. As a kernel's call."""
fused: Any = torch.ops.epigen.fused.default
"""The same, of which torch asks no derivative."""
over: Any = torch.ops.epigen.over.default
"""(text, mm, inputs, numbers, options=None) -> the outputs. As `Kernel.over`."""
into: Any = torch.ops.epigen.into.default
"""(text, tune, operands, inputs, numbers, out, options=None): as a call of two operands, or `Kernel.over` of one, with `out`."""
accumulate: Any = torch.ops.epigen.accumulate.default
"""(grad, a, b) adds a @ b to grad, an fp32 buffer, in place."""
