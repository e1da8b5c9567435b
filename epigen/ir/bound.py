"""How far a correct kernel may be from the float64 oracle: an elementwise bound, carried through the graph.

Each value travels with a bound on its error. An operation adds its own rounding error (the table's `error` text) and passes on its
arguments' errors through its derivative (the table's `gradient` texts), taken at the corners of the arguments' intervals so that
kinks are covered. A comparison whose sides are closer than their errors is unsure: both answers are right. Where fp32 would
overflow, nothing is promised.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epigen import ops
from epigen.dtypes import BY_TORCH_ON_CPU, FAST_ACCUM, FP32, INT8, DType
from epigen.ir import graph as g
from epigen.ir import reference, rules
from epigen.ir.graph import Graph, Node
from epigen.ir.passes import rounded
from epigen.ops import BOOLEAN, NUMBER

UNIT = 2.0**-24  # unit roundoff of fp32
TINY = 2.0**-110  # what is smaller may be flushed to zero, here or in an intermediate result


@dataclass(frozen=True, slots=True)
class Expected:
    """An output as the oracle has it. value: float64, or the mask's booleans. bound: largest allowed error; infinite where nothing is
    promised. For a mask, `unsure` marks the bits that may be either."""

    value: Tensor
    bound: Tensor
    unsure: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One output against its expectation. error, bound: at the element with the largest error in proportion to its bound.
    promised: the share of elements with a finite bound."""

    ok: bool
    error: float
    bound: float
    promised: float
    where: tuple[int, ...]


def expect(
    graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, reference.Number], dtypes: list[DType], precision: str, first_row: int = 0, number: int = 0,
    product: DType | None = None,
) -> list[Expected]:  # fmt: skip
    """The oracle's outputs with their bounds. precision: "ieee" or "tf32", for fp32 operands, or "fast_accum", for fp8 ones. first_row: the number of a's first row.
    number: the product's in a batch. product: what it is rounded to before anything is computed of it, as that of a sparse operand is.

    The product's bound is 4 sqrt(K) 2^-23 |a| @ |b| (Higham and Mary's probabilistic bound for K roundings, with a factor 4 and
    one bit for the tensor cores' truncation), and 2^-9 |a| @ |b| more for tf32. fp8 accumulates in tensor-core steps of about 14
    bits: 2^-12 |a| @ |b| more, and where nothing else adds up all of k, 2^-11 of each sum up to a multiple of 128 of it. What is computed of an operand is rounded before it is multiplied, and may be rounded to either side where its own error
    reaches over the middle between two numbers of its dtype: those differences are multiplied with the other operand, and added.
    """
    graph = rounded(graph, dtypes)
    values = reference.node_values(graph, a, b, inputs, torch.float64, first_row, number)
    errors: list[Tensor] = []
    for number, node in enumerate(graph.nodes):
        kinds = [graph.nodes[i].kind for i in node.args]
        args = [*zip(reference.arguments(graph, node, values), reference.arguments(graph, node, errors), kinds, strict=True)]
        if node.op == g.INPUT and node.kind == NUMBER:
            error = _input_error(inputs[node.name], values[number])
        elif node.op == g.DOT:
            error = _product_error(graph, number, values, errors, (a, b), inputs, precision)
            if product is not None and product.bits == 16:
                error = error + (values[number].abs() + error) * product.epsilon * 0.5 + product.smallest
                error = torch.where(values[number].abs() + error > product.largest, torch.inf, error)
        else:
            error = _error(node, values[number], args, reference.extents(graph, a, b), a.device)
        if node.kind == NUMBER:
            overflow = ~(values[number].abs() + error <= FP32.largest) & values[number].isfinite()
            error = torch.where(overflow | error.isnan(), torch.inf, error)
        errors.append(error)
    expected = []
    m, n = reference.extents(graph, a, b)
    for output, dtype in zip(graph.outputs, dtypes, strict=True):
        node = graph.nodes[output.node]
        if node.kind == g.PACKED:
            unsure = errors[output.node].expand(m, n) != 0
            expected.append(Expected(values[node.args[0]].expand(m, n), torch.zeros(()), unsure))
            continue
        value = reference.shaped(values[output.node], node.indices, m, n)
        error = reference.shaped(errors[output.node], node.indices, m, n)
        if output.block > 1:
            value, error = (t[:, :: output.block] for t in (value, error))
        if dtype == INT8 or dtype.is_fp8:
            low = -128.0 if dtype == INT8 else -dtype.largest
            value = value.clamp(low, dtype.largest)
        if dtype == INT8:
            error = torch.where(value.isnan(), 0, error + 0.5)
            value = torch.nan_to_num(value)
        elif dtype.is_float:
            # what is rounded may lie anywhere within the error, as far as the other branch of an unsure choice
            rounding = (value.abs() + error) * dtype.epsilon * 0.5 * (1 + 2.0**-10) + dtype.smallest
            error = error + torch.where(value.isfinite(), rounding, 0.0)  # NaN and infinities are exact
            if not dtype.is_fp8:  # near overflow both the largest number and infinity are right
                error = torch.where(value.isfinite() & (value.abs() + error > dtype.largest * (1 - dtype.epsilon)), torch.inf, error)
        expected.append(Expected(value, error))
    return expected


def compare(actual: Tensor, expected: Expected) -> Difference:
    """Elementwise: NaN needs NaN, an infinity needs the same infinity, all else lies within its bound."""
    if expected.unsure is not None:
        bits = reference.unpack(actual, expected.value.shape[1])
        wrong = (bits != expected.value) & ~expected.unsure
        promised = 1 - expected.unsure.double().mean().item() if wrong.numel() else 1.0
        ok = not wrong.any().item()
        return Difference(ok, float(not ok), 0.0, promised, () if ok else _place(wrong))
    value, bound = expected.value, expected.bound
    x = actual.to(torch.float64)
    if not x.numel():
        return Difference(True, 0.0, 0.0, 1.0, ())
    difference = (x - value).abs()
    same = (x == value) | (x.isnan() & value.isnan())
    difference = torch.where(same | (bound == torch.inf), 0.0, difference)
    difference = torch.where(difference.isnan(), torch.inf, difference)
    wrong = difference > bound
    share = torch.where(bound > 0, difference / bound, torch.where(difference > 0, torch.inf, 0.0))
    share = torch.where(bound == torch.inf, 0.0, share)
    at = int(share.argmax())
    ok = not wrong.any().item()
    return Difference(
        ok, difference.flatten()[at].item(), bound.expand_as(x).flatten()[at].item(), bound.isfinite().double().mean().item(), _place(share if ok else wrong)
    )


def _place(of: Tensor) -> tuple[int, ...]:
    """The indices of the first of the largest values."""
    # numpy's, because torch's imports its symbolic shapes: seconds, in a worker that has just started
    return tuple(int(i) for i in np.unravel_index(int(of.flatten().int().argmax() if of.dtype == torch.bool else of.argmax()), of.shape))


def _error(node: Node, value: Tensor, args: list[tuple[Tensor, Tensor, str]], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Error bound of one node; for a boolean, 1 where it is unsure."""
    match node.op:
        case g.CONSTANT | g.EXTENT:
            return torch.where(value.float() == value, 0.0, value.abs() * UNIT)  # which may lie at a step of what follows
        case g.BITS | g.INPUT | g.OPERAND | g.POSITION | g.UNIFORM:
            return torch.zeros((), dtype=torch.float64, device=device)
        case g.CAST:
            assert node.dtype is not None
            before = args[0][1]
            ulp = 1.0 if node.dtype == INT8 else (value.abs() + before) * node.dtype.epsilon + node.dtype.smallest
            return before + ulp
        case g.BITMASK:
            return args[0][1]
        case g.REDUCE:
            return _reduction_error(node, value, args[0], shape)
        case g.BLOCKWISE:
            x, ex, _ = args[0]
            x, ex = (reference.blocks_apart(t.expand(shape), node.blocks[-1]) for t in (x, torch.nan_to_num(ex, nan=torch.inf, posinf=torch.inf)))
            own = _reduction_error(reference.of_block(node), reference.reduce(reference.of_block(node), x), (x, ex, args[0][2]), (x.shape[0], x.shape[1]))
            return reference.blocks_together(own, node.blocks[-1], shape)
        case "where" | "drelu":
            if node.op == "where":
                (condition, unsure, _), (x, ex, _), (y, ey, _) = args
            else:
                (x, ex, _), (condition, unsure, _) = args
                y = ey = torch.zeros_like(ex)
            return torch.where(unsure != 0, torch.maximum(ex, ey) + (x - y).abs(), torch.where(condition, ex, ey))
        case "and" | "or" | "not":
            return functools.reduce(torch.maximum, [e for _, e, _ in args])
    if node.kind == BOOLEAN:
        (x, ex, _), (y, ey, _) = args
        near = (x - y).abs() <= ex + ey
        return (near & (ex + ey > 0)).double()
    return _elementwise_error(node.op, args)


def _input_error(given: reference.Number, value: Tensor) -> Tensor:
    """That of integers which fp32 does not hold; other numbers are widened."""
    wide = isinstance(given, Tensor) and given.dtype in (torch.int32, torch.int64)
    return torch.where(value.abs() > 2.0**24, value.abs() * UNIT, 0.0) if wide else torch.zeros((), dtype=torch.float64, device=value.device)


def _product_error(
    graph: Graph, number: int, values: list[Tensor], errors: list[Tensor], given: tuple[Tensor, Tensor], inputs: Mapping[str, reference.Number], precision: str
) -> Tensor:
    node = graph.nodes[number]
    a, b = reference.multiplied(graph, node, values, *given, inputs)
    lies = BY_TORCH_ON_CPU[str(given[0].dtype)]
    if lies == INT8:
        return values[number].abs() * UNIT  # exact, then widened to fp32
    k = a.shape[1]
    left, right = a.double().abs(), b.double().abs()
    magnitude = left @ right
    factor = 4 * k**0.5 * 2.0**-23
    if lies == FP32 and precision == "tf32":
        factor += 2.0**-9
    if lies.is_fp8:
        factor += 2.0**-12
    error: Tensor = magnitude * factor + k * TINY
    if lies.precision(precision) == FAST_ACCUM:
        error = error + 2.0**-11 * _sums_on_the_way(a.double(), b.double())
    off = [_rounding(graph, i, values[i], errors[i], *tensors, scaled=lies.is_fp8) for i, *tensors in zip(node.args, given, (a, b), strict=True)]
    if off[0] is not None:
        error = error + off[0] @ (right if off[1] is None else right + off[1])
    return error if off[1] is None else error + left @ off[1]


def _sums_on_the_way(a: Tensor, b: Tensor) -> Tensor:
    """The magnitudes of the product's sums over the first 128, 256, ... of k, added up."""
    partial = torch.zeros((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    total = partial.clone()
    for left, right in zip(a.split(128, 1), b.split(128, 0), strict=True):
        partial += left @ right
        total += partial.abs()
    return total


def _rounding(graph: Graph, number: int, value: Tensor, error: Tensor, given: Tensor, rounded: Tensor, *, scaled: bool) -> Tensor | None:
    """How far what is multiplied of an operand may be from where its exact value is rounded to; None of an operand as it is given. scaled: it is not rounded."""
    node = graph.nodes[number]
    if node.op == g.INPUT or g.is_given(node):
        return None
    error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf).expand(value.shape)
    if scaled:
        return error
    dtype, exact = BY_TORCH_ON_CPU[str(rounded.dtype)], rounded.double()
    ends = [reference.convert(value + sign * error, dtype).double() for sign in (-1, 1)]
    apart = [torch.where((end == exact) | (exact.isnan() & error.isfinite()), 0.0, (end - exact).abs()) for end in ends]
    off = torch.maximum(*apart)
    if graph.factors(number, given.dtype != rounded.dtype)[1]:  # what is without them may be rounded in its place, and what is with them not at all
        off = off + torch.where(value.isfinite(), value.abs() * dtype.epsilon + dtype.smallest, 0.0)
    return torch.nan_to_num(off, nan=torch.inf, posinf=torch.inf)


def _reduction_error(node: Node, value: Tensor, arg: tuple[Tensor, Tensor, str], shape: tuple[int, int]) -> Tensor:
    x, ex, _ = arg
    if node.axes != "k":
        x = x.expand(shape)
    ex = ex.expand(x.shape)
    if node.name == "sum":
        own = reference.reduce(_as_sum(node), x.abs()) * 64 * UNIT
        return reference.reduce(_as_sum(node), ex) + own + TINY
    largest = torch.nan_to_num(reference.reduce(_as_amax(node), ex), nan=torch.inf, posinf=torch.inf)
    # that of infinities, as where all of a row is masked, is one itself, and exact
    return largest + torch.where(value.isinf(), 0.0, (64 + 16 * value.abs()) * UNIT) if node.name == "logsumexp" else largest


def _as_sum(node: Node) -> Node:
    return Node(g.REDUCE, (), NUMBER, node.indices, True, name="sum", axes=node.axes)


def _as_amax(node: Node) -> Node:
    return Node(g.REDUCE, (), NUMBER, node.indices, True, name="amax", axes=node.axes)


def evaluate_rule(graph: Graph, values: Mapping[str, Tensor]) -> Tensor:
    """A rule's value; every name is a tensor of one shape, numbers in float64."""
    results: list[Tensor] = []
    for node in graph.nodes:
        if node.op == g.INPUT:
            results.append(values[node.name])
        elif node.op == g.CONSTANT:
            results.append(torch.tensor(node.value, dtype=torch.float64))
        else:
            results.append(reference.torch_function(node.op)(*(results[i] for i in node.args)))
    return results[graph.outputs[0].node]


def _elementwise_error(name: str, args: list[tuple[Tensor, Tensor, str]]) -> Tensor:
    op = ops.TABLE[name]
    gradients, own = rules.gradients(name), rules.error(name)
    names = [p.name for p in op.params]
    tensors = torch.broadcast_tensors(*(t for x, e, _ in args for t in (x, e)))
    points, errors = (
        list(tensors[::2]),
        [torch.nan_to_num(e.double(), nan=torch.inf, posinf=torch.inf) if k == NUMBER else e for e, (_, _, k) in zip(tensors[1::2], args, strict=True)],
    )
    worst = torch.zeros((), dtype=torch.float64)
    for signs in {(0,) * len(args), *itertools.product((-1, 1), repeat=len(args))}:
        at = {n: x + s * e if s and k == NUMBER else x for n, x, e, s, (_, _, k) in zip(names, points, errors, signs, args, strict=True)}
        at["out"] = reference.torch_function(name)(*(at[n] for n in names))
        passed = torch.zeros((), dtype=torch.float64)
        for gradient, error in zip(gradients, errors, strict=True):
            if gradient is not None:
                passed = passed + torch.where(error == 0, 0.0, evaluate_rule(gradient, at | {"grad": error}).abs())
        step = torch.nan_to_num((at["out"] - reference.torch_function(name)(*points)).abs())
        passed = torch.where(step > passed, step + passed, passed)  # a slope does not tell of a jump, as of softshrink by a width below 0
        total = evaluate_rule(own, at).abs() * UNIT + TINY + passed
        worst = torch.maximum(worst, torch.nan_to_num(total, nan=torch.inf, posinf=torch.inf))
    # an argument that is not finite has a definite result (NaN or an infinity), and no error
    finite = functools.reduce(torch.logical_and, [x.isfinite() for x, (_, _, k) in zip(points, args, strict=True) if k == NUMBER])
    unsure = functools.reduce(torch.logical_or, [e.isinf() for e, (_, _, k) in zip(errors, args, strict=True) if k == NUMBER])
    return torch.where(finite | unsure, worst, 0.0)
