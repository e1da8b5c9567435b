"""Programs as operations of `torch.library`: what torch.compile, torch.export and autograd see of epigen.

An operation names its program by text and takes the inputs in the program's order, a number's place held by None. None has a derivative of
its own: `layer` wires them, and calls them by `below_autograd`. Whoever else calls one under autograd is told so, for torch itself would go
on without the derivative: a tangent is refused at once, and a gradient where it arrives, since a model that torch.export wrote down has
parameters that require one and is run for its results. A fake implementation allocates on torch's fake tensors what the kernel would, by
the same description of the outputs, and checks the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epigen import api
from epigen.dtypes import BY_TORCH
from epigen.errors import CallError
from epigen.ir.graph import Graph
from epigen.runtime import arguments, outputs
from epigen.runtime.kernel import Kernel
from epigen.training.plan import MOST_PROGRAMS

Inputs = Sequence[Tensor | None]
"""In the program's order; None stands for a number."""

ACCUMULATE = "cast(mm + grad[m,n], fp32)"


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def kernel(text: str, tune: str | None) -> Kernel:
    """The process's own kernel of a program. tune: as of `epigen.compile`."""
    return api.compile(text, tune=tune)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _names(text: str) -> tuple[str, ...]:
    return tuple(node.name for node in api.graph_of(text).inputs())


def _named(text: str, inputs: Inputs, numbers: Sequence[float]) -> dict[str, Any]:
    rest = iter(numbers)
    return {name: next(rest) if value is None else value for name, value in zip(_names(text), inputs, strict=True)}


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def _program(text: str, tune: str | None, a: Tensor, b: Tensor, inputs: Inputs, numbers: Sequence[float]) -> list[Tensor]:
    if torch.is_grad_enabled():  # as in a model that torch.export wrote down: below autograd nothing is recorded any more
        with torch.no_grad():
            return _program(text, tune, a, b, inputs, numbers)
    return _listed(kernel(text, tune)(a, b, **_named(text, inputs, numbers)))


def _over(text: str, mm: Tensor, inputs: Inputs, numbers: Sequence[float]) -> list[Tensor]:
    with torch.no_grad():
        return _listed(kernel(text, None).over(mm, **_named(text, inputs, numbers)))


def _accumulate(grad: Tensor, a: Tensor, b: Tensor) -> None:
    with torch.no_grad():
        kernel(ACCUMULATE, None)(a, b, grad=grad, out=grad)


def _fake_program(text: str, tune: str | None, a: Tensor, b: Tensor, inputs: Inputs, numbers: Sequence[float]) -> list[Tensor]:
    graph = kernel(text, tune).graph
    m, n, _ = arguments.check_operands(a, b)
    return _fake(graph, a, m, n, _named(text, inputs, numbers))


def _fake_over(text: str, mm: Tensor, inputs: Inputs, numbers: Sequence[float]) -> list[Tensor]:
    graph = kernel(text, None).graph
    m, n = arguments.check_product(mm)
    return _fake(graph, mm, m, n, _named(text, inputs, numbers))


def _fake(graph: Graph, like: Tensor, m: int, n: int, inputs: dict[str, Any]) -> list[Tensor]:
    arguments.check_inputs({node.name: node for node in graph.inputs()}, inputs, m, n, like.device)
    allocate = outputs.allocator(like.device)
    return [out.held(m, n).empty(allocate) for out in outputs.of(graph, BY_TORCH[str(like.dtype)])]


def _fake_accumulate(grad: Tensor, a: Tensor, b: Tensor) -> None:
    m, n, _ = arguments.check_operands(a, b)
    (out,) = outputs.of(kernel(ACCUMULATE, None).graph, BY_TORCH[str(a.dtype)])
    outputs.check(grad, out, m, n, a.device)


def below_autograd(operation: Any, *args: Any) -> Any:
    """An operation's result, where its derivative is taken care of. It also costs less: the way by autograd doubles an operation's own time."""
    if torch.compiler.is_compiling():
        return operation(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operation(*args)


def _refusing(name: str, keys: Any, *args: Any) -> Any:
    """What autograd runs in place of an operation."""
    operation = getattr(torch.ops.epigen, name).default
    tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]
    if any(arguments.has_tangent(t) for t in tensors):
        raise CallError(f"torch.ops.epigen.{name} has no forward-mode derivative: {_INSTEAD}")
    run = functools.partial(operation.redispatch, keys & torch._C._after_autograd_keyset)
    required = [t for t in tensors if t.requires_grad] if torch.is_grad_enabled() else []
    if required and torch._C._are_functorch_transforms_active():
        raise CallError(f"torch.ops.epigen.{name} has no derivative of its own: {_INSTEAD}")
    with torch._C._AutoDispatchBelowAutograd():
        found = run(*args)
    if not required or found is None:
        return found
    derived: Any = _Underivable.apply  # which torch leaves untyped
    return list(derived(name, found, *required))


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


# defined in torch's own words and not by `custom_op`, whose calls take 18 us of the host where these take 4 (torch 2.13, 2026-11)
# An import that is interrupted leaves its definitions behind, and the next one makes this module anew: where that one finds them, in torch's own
# namespace of these operations, stands whose they are
_operations: Any = torch.ops.epigen
if _earlier := vars(_operations).get("LIBRARY"):
    _earlier._destroy()
_operations.LIBRARY = LIBRARY = torch.library.Library("epigen", "FRAGMENT")
for _signature, _run, _faked in (
    ("program(str text, str? tune, Tensor a, Tensor b, Tensor?[] inputs, float[] numbers) -> Tensor[]", _program, _fake_program),
    ("over(str text, Tensor mm, Tensor?[] inputs, float[] numbers) -> Tensor[]", _over, _fake_over),
    ("accumulate(Tensor(a!) grad, Tensor a, Tensor b) -> ()", _accumulate, _fake_accumulate),
):
    _name = _signature.partition("(")[0]
    LIBRARY.define(_signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, functools.partial(_refusing, _name), "Autograd", with_keyset=True)
    torch.library.register_fake(f"epigen::{_name}", _faked, lib=LIBRARY)


def _each(operation: Any, info: Any, dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
    """What torch.vmap runs in place of an operation, also where a backward is mapped over many gradients at once: one call after another."""
    if not info.batch_size:
        raise CallError("a layer of epigen is mapped over no examples, of which it cannot tell what comes out")
    found = [operation(*(_one(arg, dim, i) for arg, dim in zip(args, dims, strict=True))) for i in range(info.batch_size)]
    results = [torch.stack(several) for several in zip(*found, strict=True)]
    return results, [0] * len(results)


def _one(arg: Any, dim: Any, i: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_one(a, d, i) for a, d in zip(arg, dim, strict=True)]
    return arg if dim is None else arg.select(dim, i)


for _name in ("program", "over"):
    torch.library.register_vmap(f"epigen::{_name}", functools.partial(_each, getattr(torch.ops.epigen, _name).default), lib=LIBRARY)

program: Any = torch.ops.epigen.program.default
"""(text, tune, a, b, inputs, numbers) -> the outputs. As a kernel's call."""
over: Any = torch.ops.epigen.over.default
"""(text, mm, inputs, numbers) -> the outputs. As `Kernel.over`."""
accumulate: Any = torch.ops.epigen.accumulate.default
"""(grad, a, b) adds a @ b to grad, an fp32 buffer, in place."""
