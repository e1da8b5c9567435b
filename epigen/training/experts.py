"""The experts of a mixture as one differentiable function: rows sorted by expert, two grouped products, and four more for their gradients.

A row is a token at one of its experts. Rows are sorted by expert, and where each expert's rows end stays on the device: nobody waits for it. The first product's
epilogue is the activation and the row's score, the second product adds nothing. Backward, the derivative of that epilogue, which `epigen.derive` gives, is the
epilogue of the product by which the gradient reaches it: it is written once, as one tensor, and with it the gradients of scores and biases.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

from epigen.dtypes import BY_TORCH_ON_CPU
from epigen.errors import CallError
from epigen.ir.derivation import PREACTIVATION, SAVED
from epigen.ir.derive import derive
from epigen.ir.graph import PRODUCT
from epigen.ir.program import MOST_PROGRAMS, graph_of, parting_of
from epigen.runtime.parted import together, views
from epigen.training import composed, library
from epigen.training.layer import no_second_derivative

SCORE, BIAS = "score", "bias"


@dataclass(frozen=True, slots=True)
class Programs:
    """What experts run. way: how the columns of the first product are parted; "" where they are not. second: the input that is the second part of the weight.
    biases: those that are the parts of its bias, or it.

    plain: the first product with its epilogue. saving: the same, which gives besides what the backward reads. plain_inputs, saving_inputs: their inputs, in order.
    results: those of `saving`, of which the first is what `plain` gives. backward: of the gradient of that. backward_inputs: its inputs, by the names that these
    have among the inputs of `saving` and, behind "saved", its results. outputs: the indices of its own. parts: where the gradients of both parts of the product are
    among those, or of the one. score, bias: where theirs are.
    """

    way: str
    second: str
    biases: tuple[str, ...]
    plain: str
    plain_inputs: tuple[str, ...]
    saving: str
    saving_inputs: tuple[str, ...]
    results: tuple[str, ...]
    backward: str
    backward_inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[int, ...]
    score: int
    bias: tuple[int, ...]


def scored(activation: str, bias: bool) -> str:
    """The program of the first product. activation: of `left` and `right`, both halves of its columns, such as "silu(left) * right"."""
    return f"left, right = halves({'mm + bias' if bias else 'mm'}); ({activation}) * {SCORE}[m]"


def programs(text: str, dtype: torch.dtype) -> Programs:
    """text: of the first product, with an input score[m], and perhaps bias. Raises what `epigen.derive` raises."""
    return _programs(text, dtype)


# torch.compile is not to look into it, as into those of `plan`
programs._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _programs(text: str, dtype: torch.dtype) -> Programs:
    graph, parting = graph_of(text), parting_of(text)
    names = tuple(node.name for node in graph.inputs())
    second = parting.inputs[0].second if parting else ""
    biases = next(((p.first, p.second) for p in parting.inputs if p.whole == BIAS), ()) if parting else (BIAS,) if BIAS in names else ()
    if SCORE not in names or len(graph.outputs) != 1 or (unknown := {*names} - {SCORE, second, *biases}):
        said = f", and beside those {', '.join(sorted(unknown))}" if SCORE in names and len(graph.outputs) == 1 else ""
        raise CallError(f"the program of experts gives one tile, and has inputs score[m] and perhaps bias{said}: {text}")
    operands = BY_TORCH_ON_CPU[str(dtype)]
    derived = derive(graph, operands)
    derived = derived if derived.product else derive(graph, operands, PREACTIVATION)
    outputs = tuple(o.name for o in derived.backward.outputs)
    at = {gradient.of: outputs.index(gradient.output) for gradient in derived.gradients}
    return Programs(
        way=parting.inputs[0].way if parting else "",
        second=second,
        biases=biases,
        plain=graph.text,
        plain_inputs=names,
        saving=derived.forward.text,
        saving_inputs=tuple(node.name for node in derived.forward.inputs()),
        results=tuple(o.name for o in derived.forward.outputs),
        backward=derived.backward.text,
        backward_inputs=tuple(_saved(a.of) if a.source == SAVED else a.of for a in derived.arguments),
        outputs=tuple(derived.backward.nodes[o.node].indices for o in derived.backward.outputs),
        parts=(at[PRODUCT], *([at[second]] if second else [])),
        score=at[SCORE],
        bias=tuple(at[name] for name in biases),
    )


def _saved(result: str) -> str:
    """Its name among inputs, which may have the same."""
    return f"{SAVED} {result}"


class Weights(NamedTuple):
    """up: [E, N, H], of which the first product is, and its bias [E, N]. down: [E, H, I], of the second, and its bias [E, H]. transposed: both are [E, K, N] instead."""

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    transposed: bool = False


class Options(NamedTuple):
    """text: of the first product. tune: as for `epigen.compile`. foreign: whether tokens may go to experts that are not here, whose numbers are past those of all that are."""

    text: str
    tune: str | None = None
    foreign: bool = False


class Rows(NamedTuple):
    """Tokens [T] at their experts, k each, as rows sorted by expert. tokens: of each row [T k]. places: the row of each token at each of its experts [T, k].
    order: the place in [T k] of each row. ends: where each expert's rows end, int32 [E]. foreign: the rows of no expert [T k, 1], None where none can be."""

    tokens: Tensor
    places: Tensor
    order: Tensor
    ends: Tensor
    foreign: Tensor | None


def experts(hidden: Tensor, index: Tensor, scores: Tensor, weights: Weights, options: Options) -> Tensor:
    """The sum of each token's experts, each times its score: `down(activation(up(token))) * score`. Differentiable in all but the index; rows of no expert are 0.

    hidden: [T, H]. index: the experts of each token, integers [T, k]. scores: [T, k]. Returns [T, H], of hidden's dtype. Under autocast hidden and the weights
    are cast. A score is multiplied within the first product's epilogue, before its only rounding.
    Raises CallError for what does not fit, DerivationError where the epilogue has no derivative.
    """
    _check(hidden, index, scores, weights)
    dtype, kind = hidden.dtype, hidden.device.type
    computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and dtype != torch.float64 else weights.up.dtype
    up, down = weights.up.to(computed), weights.down.to(computed)
    up_bias, down_bias = (t if t is None else t.to(computed) for t in (weights.up_bias, weights.down_bias))
    tensors = hidden.to(computed), scores, up, up_bias, down, down_bias
    if composed.needed(t for t in tensors if t is not None):
        raise CallError("experts have no derivatives of torch.func's or of forward mode, and torch.jit.trace cannot write them down: unfuse the model there")
    result: Tensor
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        result = _Experts.apply(*tensors, index, weights.transposed, options)  # type: ignore[no-untyped-call]
    else:
        result = _forward(*tensors, index, weights.transposed, options)[0]
    return result.to(dtype)


def _check(hidden: Tensor, index: Tensor, scores: Tensor, weights: Weights) -> None:
    if hidden.dim() != 2 or index.dim() != 2 or index.shape != scores.shape or index.shape[0] != hidden.shape[0]:
        shapes = f"hidden is {list(hidden.shape)}, index {list(index.shape)} and scores {list(scores.shape)}"
        raise CallError(f"{shapes}: [T, H], [T, k] and [T, k] were expected, of T tokens at k experts each")
    if index.is_floating_point() or index.dtype == torch.bool:
        raise CallError(f"index is {index.dtype}: integers were expected, the number of each expert")
    up, down = (w.transpose(1, 2) if weights.transposed and w.dim() == 3 else w for w in (weights.up, weights.down))
    width = hidden.shape[1]
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0] or up.shape[2] != width or down.shape[1] != width:
        raise CallError(f"the weights are {list(weights.up.shape)} and {list(weights.down.shape)}, which do not fit each other and tokens of {width} numbers")


# -- rows


def _rows(index: Tensor, experts: int, foreign: bool) -> Rows:
    flat = index.reshape(-1)
    sorted_index, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(sorted_index, torch.arange(experts, device=flat.device, dtype=flat.dtype), right=True, out_int32=True)
    numbers = torch.arange(flat.shape[0], device=flat.device)
    places = torch.empty_like(order).scatter_(0, order, numbers).view(index.shape)
    return Rows(order // index.shape[1], places, order, ends, (numbers >= ends[-1])[:, None] if foreign else None)


def _of_tokens(rows: Tensor, of: Rows) -> Tensor:
    """The sum of each token's rows. rows: [T k, N]. Returns [T, N], the same bit for bit every time."""
    if of.foreign is not None:  # of which a kernel has written nothing
        rows = rows.masked_fill(of.foreign, 0)
    if torch.compiler.is_compiling():
        return rows[of.places].sum(1)  # which Inductor makes one kernel of
    return F.embedding_bag(of.places, rows, mode="sum")  # one kernel, which does not write what it adds up


def _of_scores(rows: Tensor, of: Rows) -> Tensor:
    """A number for each row as one for each score."""
    if of.foreign is not None:
        rows = rows.masked_fill(of.foreign[:, 0], 0)
    return rows[of.places]


# -- the function


def _forward(
    hidden: Tensor, scores: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, index: Tensor, transposed: bool, options: Options,
    saving: bool = False,
) -> tuple[Tensor, Rows, dict[str, Tensor], list[Tensor]]:  # fmt: skip
    """The result, and for the backward the rows, the inputs of the first program and its results."""
    p, tune = programs(options.text, up.dtype), options.tune
    rows = _rows(index, up.shape[0], options.foreign)
    score = scores.reshape(-1)[rows.order]
    first, inputs = _inputs(p, score, up, up_bias, transposed)
    text, names = (p.saving, p.saving_inputs) if saving else (p.plain, p.plain_inputs)
    results = library.run(text, tune, hidden[rows.tokens], first, [*(inputs[name] for name in names), rows.ends])
    second = down if transposed else down.transpose(1, 2)
    if down_bias is None:
        (y,) = library.run("mm", tune, results[0], second, [rows.ends])
    else:
        (y,) = library.run(_DOWN, tune, results[0], second, [down_bias, score, rows.ends])
    return _of_tokens(y, rows), rows, inputs, results


_DOWN = f"mm + {BIAS} * {SCORE}[m]"
"""The second product with a bias: of rows that have been multiplied by their scores."""


def _inputs(p: Programs, score: Tensor, up: Tensor, bias: Tensor | None, transposed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Operand b of the first product, and the inputs of its program."""
    b = up if transposed else up.transpose(1, 2)
    given = {SCORE: score}
    if p.second:
        b, given[p.second] = views(b, p.way)
    if bias is not None:
        given |= zip(p.biases, views(bias, p.way) if p.second else (bias,), strict=True)
    return b, given


class _Experts(torch.autograd.Function):
    """The tensors of `_forward` -> its result."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, scores: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, index: Tensor, transposed: bool,
        options: Options,
    ) -> Tensor:  # fmt: skip
        y, rows, _, results = _forward(hidden, scores, up, up_bias, down, down_bias, index, transposed, options, saving=True)
        ctx.save_for_backward(hidden, scores, up, up_bias, down, down_bias, *rows, *results)
        ctx.transposed, ctx.options = transposed, options
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        no_second_derivative()
        hidden, scores, up, up_bias, down, down_bias, *rest = ctx.saved_tensors
        rows, results = Rows(*rest[:5]), rest[5:]
        transposed, tune, p = ctx.transposed, ctx.options.tune, programs(ctx.options.text, up.dtype)
        of_hidden, of_scores, of_up, of_up_bias, of_down, of_down_bias, *_ = ctx.needs_input_grad
        score, ends = scores.reshape(-1)[rows.order], rows.ends
        _, given = _inputs(p, score, up, up_bias, transposed)
        given |= {_saved(name): result for name, result in zip(p.results, results, strict=True)}
        dy = dy.to(up.dtype)[rows.tokens]
        back = down.transpose(1, 2) if transposed else down
        dz, sums = _through_epilogue(p, tune, dy, back, [*(given[name] for name in p.backward_inputs), ends])

        def product(left: Tensor, right: Tensor) -> Tensor:
            return library.run("mm", tune, left, right, [ends])[0]

        def of_weight(gradient: Tensor, x: Tensor) -> Tensor:
            return product(x.t(), gradient) if transposed else product(gradient.t(), x)

        d_hidden = _of_tokens(product(dz, up.transpose(1, 2) if transposed else up), rows) if of_hidden else None
        d_up = of_weight(dz, hidden[rows.tokens]) if of_up else None
        d_down = of_weight(dy, results[0]) if of_down else None
        d_up_bias = None
        if of_up_bias:
            d_up_bias = _joined([sums[place].to(up.dtype) for place in p.bias], p)
        d_down_bias, d_scores = None, None
        if of_down_bias:
            d_down_bias = product(score.to(dy.dtype)[None], dy)[:, 0]
        if of_scores:
            d_score = sums[p.score]
            if down_bias is not None:
                d_score = d_score + product(dy, down_bias[:, :, None])[:, 0]
            d_scores = _of_scores(d_score, rows).to(scores.dtype)
        return d_hidden, d_scores, d_up, d_up_bias, d_down, d_down_bias, None, None, None


def _through_epilogue(p: Programs, tune: str | None, dy: Tensor, down: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the first product [T k, N], and all results of the program, of which its parts are views. dy: [T k, H]. down: [E, H, I]."""
    if not p.second or torch.compiler.is_compiling():
        results = library.run(p.backward, tune, dy, down, values)
        return _joined([results[place] for place in p.parts], p), results
    (count, _), (groups, _, columns) = dy.shape, down.shape
    sums = torch.float64 if dy.dtype == torch.float64 else torch.float32
    shapes = {"m": (count,), "n": (groups, columns)}
    dz = dy.new_empty((count, 2 * columns))
    out = [dy.new_empty(shapes[indices], dtype=sums) if indices in shapes else dz for indices in p.outputs]
    for place, part in zip(p.parts, views(dz, p.way), strict=True):
        out[place] = part
    library.run_into(p.backward, tune, dy, down, values, out)
    return dz, out


def _joined(parts: Sequence[Tensor], p: Programs) -> Tensor:
    """What is of both parts of the first product as of the whole."""
    return together(parts[0], parts[1], p.way) if p.second else parts[0]
