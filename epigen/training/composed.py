"""A layer as torch's own operations, one for each of its program's: where torch itself takes a derivative of what is computed, maps it, or writes it down for
a machine without epigen.

That is in torch.func (grad, vjp, jvp, jacfwd, hessian, vmap, …), of dual numbers (torch.autograd.forward_ad): a kernel has no derivative of that kind, and torch
would go on without it; in what torch.jit.trace writes down; and in a program that torch.export wrote down, by `decompositions`. It is the reference, with a
kernel's rounding points; every intermediate goes through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epigen.codegen import sparse
from epigen.codegen.lower import over_product
from epigen.dtypes import BY_TORCH_ON_CPU
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.eager import as_eager_of
from epigen.ir.graph import PRODUCT, Graph
from epigen.runtime import arguments, batches, outputs, semi_structured
from epigen.runtime.arguments import NO_SPARSE
from epigen.runtime.kernel import Kernel
from epigen.training import library


def needed(values: Iterable[Tensor]) -> bool:
    """Whether a layer of these has to be computed in this way. While torch.compile traces it is not, and the operations refuse."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None or any(map(arguments.has_tangent, values))


def run(text: str, x: Tensor, weight: Tensor, inputs: Mapping[str, Tensor | float]) -> list[Tensor]:
    """The program's outputs. x: [M, K]. weight: [N, K]. Raises CallError for what does not fit."""
    _check(weight)
    graph, b = library.kernel(text, None).graph, weight.t()
    arguments.check_inputs({node.name: node for node in graph.inputs()}, inputs, arguments.check_operands(graph, x, b), x)
    return _evaluated(graph, x, b, inputs, x.dtype)


def _check(*operands: Tensor) -> None:
    if not semi_structured.TYPES.isdisjoint(map(type, operands)):
        raise CallError(f"an operand {NO_SPARSE}; in torch.func, forward-mode derivatives and torch.jit.trace torch's own operations run")


def _evaluated(graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """dtype: of the operands, by which outputs have theirs."""
    return reference.evaluate(graph, a, b, inputs, [out.dtype for out in outputs.of(graph, BY_TORCH_ON_CPU[str(dtype)])])


# -- the operations of `library`


def decompositions() -> dict[Any, Callable[..., Any]]:
    """epigen's operations in torch's own: what `run_decompositions` of a program that torch.export wrote down takes, beside torch's default table.

    >>> import torch, epigen
    >>> program = torch.export.export(epigen.nn.MLP([8, 16, 4]), (torch.zeros(2, 8),))
    >>> written_out = program.run_decompositions(epigen.decompositions())
    >>> [node.target for node in written_out.graph.nodes if "epigen" in str(node.target)]
    []
    """
    return {**torch.export.default_decompositions().materialize(), **WRITTEN_OUT, torch.ops.epigen.of_sparse.default: _of_sparse_on_gpu}


def _kernel(text: str, options: str | None) -> Kernel:
    """Raises CallError for an invariant program: torch's own product has other bits for another M."""
    kernel = library.kernel(text, None, options)
    if kernel.numerics.invariant:
        raise CallError(f"{kernel.program} was compiled with invariant='m', which torch's own operations do not keep: it cannot be written out in them")
    return kernel


def _program(text: str, _tune: str | None, a: Tensor, b: Tensor, inputs: library.Inputs, numbers: Sequence[float], options: str | None = None) -> list[Tensor]:
    _check(a, b)
    kernel, named = _kernel(text, options), library.named(text, inputs, numbers)
    graph = as_eager_of(kernel.graph, a, b, named) if kernel.numerics.rounding else kernel.graph
    return _apart(graph, a, b, named, a.dtype)


def _over(text: str, mm: Tensor, inputs: library.Inputs, numbers: Sequence[float], options: str | None = None) -> list[Tensor]:
    m, n = mm.shape[-2:] if mm.dim() > 2 else arguments.check_product(mm)
    a, b = (torch.empty(shape, device=mm.device) for shape in ((m, 0), (0, n)))
    kernel, named = _kernel(text, options), {PRODUCT: mm, **library.named(text, inputs, numbers)}
    graph = over_product(kernel.graph)
    graph = as_eager_of(graph, mm, mm, named) if kernel.numerics.rounding else graph
    return _apart(graph, a, b, named, mm.dtype)


def _into(
    text: str, tune: str | None, operands: Sequence[Tensor], inputs: library.Inputs, numbers: Sequence[float], out: Sequence[Tensor], options: str | None = None
) -> None:  # fmt: skip
    a, *b = operands
    results = _program(text, tune, a, b[0], inputs, numbers, options) if b else _over(text, a, inputs, numbers, options)
    for into, result in zip(out, results, strict=True):
        into.copy_(result)


def _of_sparse(
    text: str, tune: str | None, side: str, other: Tensor, packed: Tensor, meta: Tensor | None, held: Sequence[int], inputs: library.Inputs, numbers: Sequence[float],
    options: str | None = None,
) -> list[Tensor]:  # fmt: skip
    """By torch's own product of the sparse operand, which has no other name in it."""
    given = semi_structured.Operands(side, semi_structured.Compressed.of_numbers(packed, meta, held), other)
    graph, operands = _kernel(text, options).graph, BY_TORCH_ON_CPU[str(other.dtype)]
    if (whole := sparse.alone(graph, operands)) is not None:
        return [given.product(reference.torch_dtype(whole))]
    rounding = library.kernel(text, tune, options).numerics.rounding
    product = semi_structured.as_given(given.product(reference.torch_dtype(sparse.product_of(operands, rounding))))
    a, b = (torch.empty(shape, device=product.device) for shape in ((product.shape[-2], 0), (0, product.shape[-1])))
    named = {PRODUCT: product, **library.named(text, inputs, numbers)}
    over = sparse.over(graph, operands, rounding)
    return _apart(as_eager_of(over, product, product, named) if rounding else over, a, b, named, product.dtype)


def _of_sparse_on_gpu(*args: Any, **options: Any) -> Any:
    """As `_of_sparse`. On the CPU it stays what it is, for torch's way to the dense values writes in place."""
    _, _, _, other, *_ = args
    run: Callable[..., Any] = _of_sparse
    return run(*args, **options) if other.is_cuda else NotImplemented


def _of_sparse_into(
    text: str, tune: str | None, side: str, other: Tensor, packed: Tensor, meta: Tensor | None, held: Sequence[int], inputs: library.Inputs, numbers: Sequence[float],
    out: Sequence[Tensor], options: str | None = None,
) -> None:  # fmt: skip
    for into, result in zip(out, _of_sparse(text, tune, side, other, packed, meta, held, inputs, numbers, options), strict=True):
        into.copy_(result)


def _accumulate(grad: Tensor, a: Tensor, b: Tensor) -> None:
    grad.add_(reference.product(a, b, grad.dtype))


def _apart(graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Results that are no inputs, as an operation's are."""
    one, given, batch = batches.one({node.name: node for node in graph.inputs()}, () if PRODUCT in inputs else (a, b), inputs)
    if batch is not None:
        shape = arguments.check_operands(graph, *one) if one else (*arguments.check_product(given[PRODUCT]), 0)
        return batches.evaluate(graph, batch.lead, () if not one else (a, b), inputs, shape, outputs.of(graph, BY_TORCH_ON_CPU[str(dtype)]), a.device)
    results = _evaluated(graph, a, b, inputs, dtype)
    return [t.clone() if graph.nodes[o.node].op in (g.INPUT, g.BITS) else t for t, o in zip(results, graph.outputs, strict=True)]


WRITTEN_OUT: Mapping[Any, Callable[..., Any]] = {
    torch.ops.epigen.program.default: _program,
    torch.ops.epigen.over.default: _over,
    torch.ops.epigen.into.default: _into,
    torch.ops.epigen.accumulate.default: _accumulate,
    torch.ops.epigen.of_sparse.default: _of_sparse,
    torch.ops.epigen.of_sparse_into.default: _of_sparse_into,
}
