"""A derivation's gradients beside those of torch's autograd, both in float64: of programs as the reference evaluates them, never of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.derivation import ARRIVING, INPUT, OPERAND, ROW, SAVED, Derivation
from epigen.ir.graph import PRODUCT, Graph

Values = dict[str, Tensor]


def inputs_of(graph: Graph, shape: tuple[int, ...], source: torch.Generator) -> Values:
    """Random inputs of a program, in float64, and packed masks. shape: M, N, and K for those of operands."""
    found: Values = {}
    for node in graph.inputs():
        if node.op == g.BITS:
            found[node.name] = reference.pack(torch.rand(shape[:2], generator=source) > 0.5)
        elif node.kind == g.SEED:
            found[node.name] = torch.randint(1 << 62, (1,), generator=source)
        elif node.periods:  # of one letter all have as many
            extents = [max(1, min(shape[:2]) // 2) if period else shape["mnk".index(i)] for i, period in zip(node.indices, node.periods, strict=True)]
            found[node.name] = torch.randn(extents, generator=source, dtype=torch.float64)
        else:
            held = g.held(node.indices, node.blocks, dict(zip("mnk", shape, strict=False)))
            found[node.name] = torch.randn(held, generator=source, dtype=torch.float64)
    return found


def normal(indices: str, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn([shape["mnk".index(i)] for i in indices], generator=source, dtype=torch.float64)


def outputs_of(graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Tensor]) -> Values:
    """In float64 but for casts, by name; packed masks as bytes."""
    values = reference.node_values(graph, a, b, inputs, torch.float64)
    found = {}
    for output in graph.outputs:
        node = graph.nodes[output.node]
        value = values[output.node] if output.dtype is None else reference.convert(values[output.node], output.dtype).to(torch.float64)
        found[output.name] = value if node.kind == g.PACKED else reference.shaped(value, node.indices, a.shape[0], b.shape[1])
    return found


def autograd(graph: Graph, mm: Tensor, inputs: Values, arriving: Values, wanted: Sequence[str]) -> list[Tensor]:
    """What torch says; zeros where nothing flows. arriving: the gradients of outputs, by name. wanted: "mm" and names of inputs.

    Raises RuntimeError "broadcast shape" of torch's own clamp where its x is broadcast (2.13).
    """
    leaves = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in inputs.items()} | {"mm": mm.clone().requires_grad_()}
    outputs = outputs_of(graph, leaves["mm"], torch.eye(mm.shape[1], dtype=torch.float64), leaves)
    reached = [(outputs[name], grad) for name, grad in arriving.items() if outputs[name].requires_grad]
    found = torch.autograd.grad([x for x, _ in reached], [leaves[w] for w in wanted], [grad for _, grad in reached], allow_unused=True)
    return [torch.zeros_like(leaves[w]) if x is None else x for w, x in zip(wanted, found, strict=True)]


def derived_gradients(derived: Derivation, a: Tensor, b: Tensor, inputs: Values, arriving: Values) -> list[Tensor]:
    """As a training step takes them, in float64: by the wiring alone."""
    found = _backward(derived, a, b, inputs, arriving)
    whole = [arriving[x.passed] if x.passed else found[x.output] for x in derived.gradients]
    return [reference.summed(t, x.periods, inputs[x.of].shape) if x.periods else t for x, t in zip(derived.gradients, whole, strict=True)]


def _backward(derived: Derivation, a: Tensor, b: Tensor, inputs: Values, arriving: Values) -> Values:
    """The outputs of the backward program."""
    kept = outputs_of(derived.forward, a, b, inputs)
    sources = {INPUT: inputs, SAVED: kept, ARRIVING: arriving}
    arguments = {x.name: sources[x.source][x.of] for x in derived.arguments}
    if derived.product:
        a, b = arriving[derived.product], torch.eye(b.shape[1], dtype=torch.float64)
    return outputs_of(derived.backward, a, b, arguments)


def autograd_of_operands(graph: Graph, a: Tensor, b: Tensor, inputs: Values, arriving: Values, wanted: Sequence[str]) -> list[Tensor]:
    """As `autograd`, by the operands themselves. wanted: "a", "b" and names of inputs."""
    leaves = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in ({"a": a, "b": b} | inputs).items()}
    outputs = outputs_of(graph, leaves["a"], leaves["b"], leaves)
    reached = [(outputs[name], grad) for name, grad in arriving.items() if outputs[name].requires_grad]
    if not wanted:
        return []
    found = torch.autograd.grad([x for x, _ in reached], [leaves[w] for w in wanted], [grad for _, grad in reached], allow_unused=True)
    return [torch.zeros_like(leaves[w]) if x is None else x for w, x in zip(wanted, found, strict=True)]


def all_gradients(derived: Derivation, a: Tensor, b: Tensor, inputs: Values, arriving: Values) -> Values:
    """Those of operands that are computed and of all inputs, by name: of an input that is used in several places the sum."""
    by_epilogue = zip((x.of for x in derived.gradients), derived_gradients(derived, a, b, inputs, arriving), strict=True)
    found: Values = dict(by_epilogue)
    of_products = {name: found.pop(name) for name in (PRODUCT, *(each.product for each in derived.operands)) if name in found}
    by_backward = _backward(derived, a, b, inputs, arriving) if derived.rows else {}
    sources = {OPERAND: {"a": a, "b": b} | inputs, INPUT: inputs, ARRIVING: arriving, SAVED: outputs_of(derived.forward, a, b, inputs)}
    sources[ROW] = {x.of: arriving[x.passed] if x.passed else by_backward[x.output] for x in derived.rows}
    for each in derived.operands:
        given = {x.name: sources[x.source][x.of] for x in each.arguments}
        given = {x.name: given[x.name].T if x.transposed else given[x.name] for x in each.arguments}
        right, dmm = inputs[each.product] if each.product else b, of_products[each.product or PRODUCT]
        results = outputs_of(each.program, *((dmm, right.T) if each.operand == "a" else (a.T, dmm)), given)
        for x in each.gradients:
            found[x.of] = found[x.of] + results[x.output] if x.of in found else results[x.output]
    return found
