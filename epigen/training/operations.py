"""The operations of `torch.library` by which torch knows epigen's programs: their signatures, and what each part of torch is told of them.

They are there as soon as torch and epigen are, so this module is light, and what an operation does is imported when one is first called: `library`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

SIGNATURES = (
    "program(str text, str? tune, Tensor a, Tensor b, Tensor?[] inputs, float[] numbers, *, str? options=None) -> Tensor[]",
    "fused(str text, str? tune, Tensor a, Tensor b, Tensor?[] inputs, float[] numbers, *, str? options=None) -> Tensor[]",
    "over(str text, Tensor mm, Tensor?[] inputs, float[] numbers, *, str? options=None) -> Tensor[]",
    "into(str text, str? tune, Tensor[] operands, Tensor?[] inputs, float[] numbers, Tensor(a!)[] out, *, str? options=None) -> ()",
    "accumulate(Tensor(a!) grad, Tensor a, Tensor b) -> ()",
)
"""text, tune, options: of `epigen.compile`, the options as JSON. inputs, numbers: the program's inputs in its order, a number's place held by None.

program: as a kernel's call. fused: the same in a graph whose derivative torch has taken already, such as those of `backend`: it is not asked for one.
over: as `Kernel.over`. into: as a call, or of one operand as `Kernel.over`, with `out`. accumulate: adds a @ b to grad, an fp32 buffer, in place.
"""
MASKS = (
    "bitmask(Tensor condition) -> Tensor",
    "where_bits(Tensor bits, Tensor x, Tensor? y=None) -> Tensor",
    "tied(Tensor x, Tensor bits) -> Tensor",
)
"""Of packed masks, in graphs of `backend` alone: what `bits` says."""
SPARSE = (
    (
        "of_sparse(str text, str? tune, str side, Tensor other, Tensor packed, Tensor? meta, int[] held, Tensor?[] inputs, float[] numbers, *, str? options=None) "
        "-> Tensor[]"
    ),
    (
        "of_sparse_into(str text, str? tune, str side, Tensor other, Tensor packed, Tensor? meta, int[] held, Tensor?[] inputs, float[] numbers, Tensor(a!)[] out, *, "
        "str? options=None) -> ()"
    ),
)
"""What program and into are where an operand is one of torch's 2:4 sparse tensors: of the tensors that it holds, since torch.compile writes down no others. side: which
operand it is, "a" or "b". other: the dense one. held: its rows and columns, whether it is cuSPARSELt's, and the number of that one's kernel."""
OF_SPARSE = {"program": "of_sparse", "fused": "of_sparse", "into": "of_sparse_into"}
LOSSES = (
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float[] terms, bool keep, str? tune) -> Tensor[]",
    (
        "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor lse, Tensor? mm, int ignore_index, float[] terms, "
        "bool[] wanted, str? tune) -> Tensor[]"
    ),
)
"""Both ways through a loss, which an autograd function of `cross_entropy` joins."""
DERIVED = ("fused", *(signature.partition("(")[0] for signature in (*MASKS, *LOSSES)))
"""What runs where derivatives are taken care of. A way by autograd in Python would cost as much as the rest of the call: 11 us (H100's host, torch 2.11, 2026-11)."""
MAPPED = ("program", "over")
"""What has results, of which torch.vmap can make many, and what `aten` writes out."""


def define() -> None:
    """Have torch know the operations.

    In torch's own words and not by `custom_op`, whose calls take 18 us of the host where these take 4 (torch 2.13, 2026-11). An import that is interrupted
    leaves its definitions behind, and the next one makes them anew: where that one finds them, in torch's own namespace of these operations, stands whose
    they are, and who defined all of them.
    """
    operations: Any = torch.ops.epigen
    if vars(operations).get("DEFINED") is define:
        return
    if earlier := vars(operations).get("LIBRARY"):
        earlier._destroy()
    operations.LIBRARY = library = torch.library.Library("epigen", "FRAGMENT")
    for signature in (*SIGNATURES, *SPARSE, *MASKS, *LOSSES):
        name = signature.partition("(")[0]
        library.define(signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        library.impl(name, _later("RUN", name), "CompositeExplicitAutograd")
        if name in DERIVED:
            library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        else:
            library.impl(name, _later("REFUSING", name), "Autograd", with_keyset=True)
            library.impl(name, _written_out(name), "Tracer")
        torch.library.register_fake(f"epigen::{name}", _later("FAKE", name), lib=library)
    for kind in (torch.sparse.SparseSemiStructuredTensorCUTLASS, torch.sparse.SparseSemiStructuredTensorCUSPARSELT):
        for name in OF_SPARSE:
            torch.library.register_torch_dispatch(f"epigen::{name}", kind, _taken_apart(name), lib=library)
    for name in MAPPED:
        torch.library.register_vmap(f"epigen::{name}", _later("MAPPED", name), lib=library)
        library.impl(name, _later("BATCHED", name), "Batched")
    operations.DEFINED = define


def _later(table: str, name: str) -> Callable[..., Any]:
    """An implementation of `library`, or of `cross_entropy`, which the first call imports."""
    of_loss = any(signature.startswith(f"{name}(") for signature in LOSSES)

    def run(*args: Any, **options: Any) -> Any:
        return getattr(_implementations(of_loss), table)[name](*args, **options)

    return run


def _taken_apart(name: str) -> Callable[..., Any]:
    """What torch runs in place of an operation of a sparse operand."""

    def run(_class: Any, _operation: Any, _types: Any, args: Sequence[Any], kwargs: Any = None) -> Any:
        return _implementations(False).taken_apart(name, args, kwargs or {})

    return run


def _written_out(name: str) -> Callable[..., Any]:
    """What torch.jit.trace, and torch.onnx.export with dynamo=False, write down of an operation: their graphs have no place for a list of inputs with None in it."""

    def run(*args: Any, **options: Any) -> Any:
        from epigen.training.composed import WRITTEN_OUT

        return WRITTEN_OUT[getattr(torch.ops.epigen, name).default](*args, **options)

    return run


@functools.lru_cache(maxsize=2)
def _implementations(of_loss: bool) -> Any:
    if of_loss:
        from epigen.training import cross_entropy

        return cross_entropy
    from epigen.training import library

    return library


def count_flops() -> None:
    """Have torch.utils.flop_counter count the operations' products, two for each multiplication and addition, as it counts its own."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    formulas: dict[str, Callable[..., int]] = {
        "program": lambda text, _tune, a, b, inputs, *_, **__: _flops([a, b], _grouped(text, inputs)) * _products(text),
        "fused": lambda text, _tune, a, b, inputs, *_, **__: _flops([a, b], _grouped(text, inputs)) * _products(text),
        "over": lambda *_, **__: 0,
        "into": lambda text, _tune, operands, inputs, *_, **__: _flops(operands, _grouped(text, inputs)) * _products(text),
        "accumulate": lambda _grad, a, b, **__: _flops([a, b]),
        **dict.fromkeys(("of_sparse", "of_sparse_into"), lambda _text, _tune, _side, other, _packed, _meta, held, *_, **__: 2 * math.prod(other) * held[0]),
        "linear_cross_entropy": lambda x, weight, *_, **__: _flops([x, weight[::-1]]),
        "linear_cross_entropy_backward": lambda _grad, x, weight, _bias, _target, _lse, mm, _ignored, _terms, wanted, *_, **__: (
            _flops([x, weight[::-1]]) * ((mm is None) + sum(wanted[:2]))
        ),
    }
    for name, formula in formulas.items():
        packet = getattr(torch.ops.epigen, name)
        flop_registry.pop(packet, None)  # of an import that was interrupted
        register_flop_formula(packet)(formula)


def _products(text: str) -> int:
    from epigen.ir.program import graph_of

    return 1 if graph_of(text).second() is None else 2


def _grouped(text: str, inputs: Sequence[Any]) -> bool:
    """Whether a call is of groups, by what it is given behind the program's inputs."""
    from epigen.ir.program import graph_of

    return len(inputs) > len(graph_of(text).inputs())


def _flops(shapes: Sequence[Sequence[int]], grouped: bool = False) -> int:
    """Of the product of what has these shapes, or of as many as they have leading dimensions; a product that is given costs nothing. grouped: of groups, all of whose rows, or k, an operand has."""
    if len(shapes) == 1:
        return 0
    (*lead, m, k), (*others, _, n) = shapes
    count = 1 if grouped else math.prod(torch.broadcast_shapes(lead, others))
    return count * 2 * m * k * n


def share() -> None:
    """Have DTensors take the operations: what they do with them is in `sharding`."""
    from torch.distributed.tensor import DTensor

    own: Any = torch.ops.epigen.LIBRARY
    for signature in SIGNATURES:
        name = signature.partition("(")[0]
        torch.library.register_torch_dispatch(f"epigen::{name}", DTensor, _shared(name), lib=own)


def _shared(name: str) -> Callable[..., Any]:
    def run(_class: Any, operation: Any, _types: Any, args: Sequence[Any], kwargs: Any = None) -> Any:
        from epigen.training import sharding

        return sharding.run(name, operation, args, kwargs or {})

    return run


def accept_layers() -> None:
    """Have torch's two styles of parallel linear layers take those of `epigen.nn`, whose parameters and rows are the same, and which are no torch.nn.Linear.

    They look for that class and offer no place to name others (2.13), so that their method is wrapped. What each does is right for any epilogue.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles: Any = (ColwiseParallel, RowwiseParallel)
    for style in styles:
        style._apply = _accepting(getattr(style._apply, "__wrapped__", style._apply))


def write_out() -> None:
    """Have torch.onnx.export take models with the operations in them: its table of what it writes out in others' has no place to name them (2.13), so that what
    makes it is wrapped. One for which the user has given a translation keeps that."""
    from torch.onnx._internal.exporter import _decomp

    make: Any = _decomp.create_onnx_friendly_decomposition_table
    _decomp.create_onnx_friendly_decomposition_table = _with_own(getattr(make, "__wrapped__", make))


def _with_own(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def table(translated: Any) -> Any:
        from epigen.training.composed import WRITTEN_OUT

        return make(translated) | {operation: run for operation, run in WRITTEN_OUT.items() if operation not in translated}

    return table


def _accepting(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def accepting(style: Any, module: torch.nn.Module, mesh: Any) -> Any:
        from epigen.training.modules import Linear

        if not isinstance(module, Linear):
            return apply(style, module, mesh)
        layer: Any = module
        plain = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        apply(style, plain, mesh)
        layer.weight, layer.bias = plain.weight, plain.bias
        module._forward_pre_hooks.update(plain._forward_pre_hooks)  # what splits what goes in, and what comes out
        module._forward_hooks.update(plain._forward_hooks)
        return module

    return accepting


def offer_experts() -> None:
    """Have transformers take "epigen" for a model's `experts_implementation`. Releases before its table of those (5.0) have none to put it in."""
    from epigen.training import expert_modules

    expert_modules.register()
