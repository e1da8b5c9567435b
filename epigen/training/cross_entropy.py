"""`epigen.linear_cross_entropy`: a linear layer and the cross entropy of its results, the logits, of which no more than a part is ever in memory.

Forward is one kernel: each row's logsumexp and the logit of its target, which are finished as any reduction is. Backward takes the logits of some columns again,
turns them into their gradient in the same kernel, and multiplies that: the weight's gradient of these columns is then there, summed over all rows in fp32 within
one product, and that of x grows by a part. What torch's own operations keep and pass over, [M, N] several times, is 2 GB at 8192 rows of 131072 in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from epigen.errors import CallError, unknown
from epigen.runtime import semi_structured
from epigen.runtime.arguments import NO_SPARSE
from epigen.training import chain, composed, library
from epigen.training.layer import apply, no_second_derivative

REDUCTIONS = ("mean", "sum", "none")
WORKSPACE_BYTES = 128 << 20
"""What the gradient of some columns' logits takes, unless there are so many rows that it is LEAST_COLUMNS of them."""
LEAST_COLUMNS = 2048
"""At a time in the backward. Of less the gradient of x, which grows with each, would take a tenth of the time and more."""
_COLUMNS_MULTIPLE = 256


_FORWARD: Any = torch.ops.epigen.linear_cross_entropy.default
_BACKWARD: Any = torch.ops.epigen.linear_cross_entropy_backward.default


class Terms(NamedTuple):
    """label_smoothing: the share of all classes alike. scale: of the logits. softcap: c of c * tanh(logits / c); 0 for none. z_loss: of logsumexp ** 2."""

    label_smoothing: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0
    z_loss: float = 0.0


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    logit_scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, keep_logits: bool = False, tune: str | None = None,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight, bias), target)` without the logits in memory, differentiable.

    x: [..., K]. weight: [N, K], of x's dtype. target: [...], the number of each row's class, int64 or int32. bias: [N]. ignore_index, reduction,
    label_smoothing: as of `torch.nn.functional.cross_entropy`. logit_scale: what the logits are multiplied with, first. softcap: c of c * tanh(logits / c), next, as
    Gemma 2 has it. z_loss: what the square of each row's logsumexp counts for, added to its loss. keep_logits: keep the product [M, N]
    from forward to backward, in x's dtype, in place of taking it again: a quarter less work for so much memory, and gradients of logits that are rounded, as those of eager
    torch are. tune: as for `epigen.compile`.
    The logits are fp32, and so is the loss, [] or with reduction="none" [...]. Gradients have the dtypes of what they are of, and are summed in fp32. The backward takes the logits again, and holds
    128 MiB at a time, or 2048 columns where that is more, and with many columns x's gradient in fp32. A target that is no class and not ignored is what it is to torch:
    an IndexError on the CPU, and an assertion on a GPU.
    Raises CallError for what does not fit.

    >>> import torch, epigen
    >>> x, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> epigen.linear_cross_entropy(x, weight, torch.tensor([0, 1]))
    tensor(0.2395)
    """
    values = (x, weight, target, bias)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "logit_scale": logit_scale}
    options |= {"softcap": softcap, "z_loss": z_loss, "keep_logits": keep_logits, "tune": tune}
    if has_torch_function(values):
        return handle_torch_function(linear_cross_entropy, values, x, weight, target, bias, **options)
    terms = _terms(label_smoothing, logit_scale, softcap, z_loss)
    if reduction not in REDUCTIONS:
        raise CallError(unknown("reduction", reduction, REDUCTIONS))
    _check(x, weight, target, bias)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = chain.cast(x, dtype), chain.cast(weight, dtype)
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    if composed.needed([t for t in values if t is not None]):
        losses = _composed(rows, weight, labels, bias, ignore_index, terms)
    else:
        keeps = keep_logits and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
        (losses,) = apply(_Losses, rows, weight, bias, labels, ignore_index, terms, keeps, tune)
    if reduction == "none":
        return losses.reshape(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _terms(label_smoothing: float, logit_scale: float, softcap: float | None, z_loss: float) -> Terms:
    if not 0 <= label_smoothing <= 1:
        raise CallError(f"label_smoothing={label_smoothing}: a share is from 0 to 1")
    if softcap is not None and not 0 < softcap < math.inf:
        raise CallError(f"softcap={softcap}: a number above 0 was expected, or None")
    for name, value in (("logit_scale", logit_scale), ("z_loss", z_loss)):
        if not -math.inf < value < math.inf:
            raise CallError(f"{name}={value}: a finite number was expected")
    return Terms(float(label_smoothing), float(logit_scale), float(softcap or 0), float(z_loss))


def _check(x: Any, weight: Any, target: Any, bias: Any) -> None:
    for what, t in (("x", x), ("weight", weight), ("target", target), ("bias", bias)):
        if not isinstance(t, Tensor) and (what != "bias" or t is not None):
            raise CallError(f"{what} is a {type(t).__name__}, and a tensor was expected")
        if type(t) in semi_structured.TYPES:
            raise CallError(f"{what} {NO_SPARSE}")
        if t is not None and t.device != x.device:
            raise CallError(f"x is on {x.device} and {what} on {t.device}")
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise CallError(f"x is {list(x.shape)} and weight is {list(weight.shape)}: [..., K] and [N, K] were expected")
    if not weight.shape[0]:
        raise CallError("weight has no rows, and so there is no class")
    if target.is_floating_point() and target.shape[-1:] == weight.shape[:1]:
        raise CallError("target holds a probability for each class, and the number of a class was expected: use torch.nn.functional.cross_entropy")
    if target.dtype not in (torch.int64, torch.int32, torch.uint8, torch.int8):
        raise CallError(f"target is {target.dtype}, and the numbers of classes were expected: torch.int64, or another integer")
    if target.shape != x.shape[:-1]:
        raise CallError(f"target is {list(target.shape)}, and one number a row of x was expected: {list(x.shape[:-1])}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise CallError(f"bias is {list(bias.shape)}, and [N] = [{weight.shape[0]}] was expected")


class _Losses(torch.autograd.Function):
    """(x [M, K], weight, bias, target [M], ignore_index, terms, keep, tune) -> ([M] in fp32, which is 0 where a row is ignored,)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, terms: Terms, keep: bool, tune: str | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        losses, lse, *kept = library.below_autograd(_FORWARD, x, weight, bias, target, ignore_index, list(terms), keep, tune)
        ctx.save_for_backward(x, weight, bias, target, lse, kept[0] if kept else None)
        ctx.ignore_index, ctx.terms, ctx.tune = ignore_index, terms, tune
        return (losses,)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> Any:
        no_second_derivative()
        *saved, lse, kept = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = iter(library.below_autograd(_BACKWARD, arrived[0], *saved, lse, kept, ctx.ignore_index, list(ctx.terms), wanted, ctx.tune))
        return *(next(found) if each else None for each in wanted), None, None, None, None, None


# -- the programs


def _logits(bias: bool, scaled: bool, capped: bool) -> str:
    z = "mm + bias" if bias else "mm"
    z = f"({z}) * factor" if scaled else z
    return f"cap * tanh(({z}) / cap)" if capped else z


def forward_program(bias: bool, scaled: bool, capped: bool, smoothed: bool, keeps: bool) -> str:
    """Of each row the logsumexp, the logit of its target and, with label smoothing, the sum of all; and the product, if it is kept."""
    outputs = "logsumexp(z, n), sum(where(n == target[m], z, 0), n)" + ", sum(z, n)" * smoothed + ", mm" * keeps
    return f"z = {_logits(bias, scaled, capped)}; {outputs}"


def backward_program(bias: bool, scaled: bool, capped: bool, smoothed: bool, bias_gradient: bool) -> str:
    """The gradient of mm, for columns that begin with that of number `offset`. share[m]: of each row's softmax; right[m]: of its target. A row without one is 0 whatever
    its logits are."""
    z = _logits(bias, scaled, capped)
    d = "exp(z - lse[m]) * share[m] - where(n + offset == target[m], right[m], 0)" + " - evenly[m]" * smoothed
    d = f"({d})" + " * (1 - (z / cap) ** 2)" * capped + " * factor" * scaled
    d = f"z = {z}; d = where(right[m] == 0, 0, {d})"
    return f"{d}; d, bgrad(d)" if bias_gradient else f"{d}; d"


def _numbers(terms: Terms) -> dict[str, float]:
    return ({"factor": terms.scale} if terms.scale != 1 else {}) | ({"cap": terms.softcap} if terms.softcap else {})


# -- what the operations do


def run_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, terms: Sequence[float], keep: bool, tune: str | None
) -> list[Tensor]:  # fmt: skip
    """The losses and the logsumexp of each row, [M] in fp32, fp64 of such operands; and the product, if it is to be kept."""
    of, n = Terms(*terms), weight.shape[0]
    counted = target != ignore_index
    _demand_classes(target, counted, n)
    kernel = library.kernel(forward_program(bias is not None, of.scale != 1, of.softcap != 0, of.label_smoothing != 0, keep), tune)
    with torch.no_grad():
        lse, right, *total = kernel(x, weight.t(), target=target, **_numbers(of), **({} if bias is None else {"bias": bias}))
        kept = [total.pop()] if keep else []
        losses = lse - right if not total else lse - right * (1 - of.label_smoothing) - total[0] * (of.label_smoothing / n)
        if of.z_loss:
            losses = losses + of.z_loss * lse**2
        return [losses.masked_fill_(~counted, 0.0), lse, *kept]


def _demand_classes(target: Tensor, counted: Tensor, n: int) -> None:
    """As torch's own loss has it, without waiting for a GPU."""
    right = (target >= 0) & (target < n) | ~counted
    if target.device.type == "cpu":
        if not right.all():
            raise IndexError(f"Target {target[~right][0].item()} is out of bounds.")
    else:
        torch._assert_async(right.all(), "a target is no class, and not ignore_index")


def run_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, mm: Tensor | None, ignore_index: int, terms: Sequence[float],
    wanted: Sequence[bool], tune: str | None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of x, weight and bias, those that are wanted. grad: of the losses, [M]. mm: the product, if it was kept."""
    of, (m, _), n = Terms(*terms), x.shape, weight.shape[0]
    of_x, of_weight, of_bias = wanted
    with torch.no_grad():
        grad = grad.masked_fill(target == ignore_index, 0.0)
        # fp16 has no room for what a mean over thousands of rows makes of a probability, so that it comes in at the end
        largest = grad.abs().amax().clamp_min(torch.finfo(grad.dtype).tiny) if x.dtype == torch.float16 and m else None
        if largest is not None:
            grad = grad / largest
        rows = {"lse": lse, "target": target, "right": grad * (1 - of.label_smoothing), "share": grad * (1 + 2 * of.z_loss * lse) if of.z_loss else grad}
        if of.label_smoothing:
            rows["evenly"] = grad * (of.label_smoothing / n)
        kernel = library.kernel(backward_program(bias is not None, of.scale != 1, of.softcap != 0, of.label_smoothing != 0, of_bias), tune)
        columns = columns_at_once(m, n, x.element_size())
        held = torch.empty((m, columns), dtype=x.dtype, device=x.device)
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else None
        dbias = torch.empty(n, dtype=lse.dtype, device=x.device) if of_bias else None
        dx = torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if of_x else None
        for first in range(0, n, columns):
            here = slice(first, min(n, first + columns))
            part, d = weight[here], held[:, : here.stop - first]
            out = [d] if dbias is None else [d, dbias[here]]
            run, operands = (kernel, (x, part.t())) if mm is None else (kernel.over, (mm[:, here],))
            run(*operands, offset=float(first), out=out, **rows, **_numbers(of), **({} if bias is None else {"bias": bias[here]}))
            if dweight is not None:
                torch.mm(d.t(), x, out=dweight[here])
            if dx is not None:
                _add_product(dx, d, part)
        results = [(dx, x), (dweight, weight), (dbias, bias)]
        found = [(t if largest is None else t.mul_(largest.to(t.dtype)), given) for t, given in results if t is not None and given is not None]
        return [t.to(given.dtype) for t, given in found]


def columns_at_once(m: int, n: int, element_bytes: int) -> int:
    """How many columns' logits the backward holds the gradient of."""
    fitting = WORKSPACE_BYTES // max(1, m * element_bytes) // _COLUMNS_MULTIPLE * _COLUMNS_MULTIPLE
    return min(n, max(LEAST_COLUMNS, fitting))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        library.add_product(total, a, b)


def fake(x: Tensor, weight: Tensor, _bias: Tensor | None, _target: Tensor, _ignore_index: int, _terms: Any, keep: bool, _tune: str | None) -> list[Tensor]:
    row = x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    return [row, torch.empty_like(row), *([x.new_empty(x.shape[0], weight.shape[0])] if keep else [])]


def fake_backward(_grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    *_, wanted, _ = rest
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t, each in zip((x, weight, bias), wanted, strict=True) if each and t is not None]


def _composed(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, terms: Terms) -> Tensor:
    """The losses by torch's own operations, logits and all, which have all derivatives."""
    z = functional.linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32)) * terms.scale
    z = terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z
    losses = functional.cross_entropy(z, target.long(), ignore_index=ignore_index, reduction="none", label_smoothing=terms.label_smoothing)
    return losses + terms.z_loss * torch.logsumexp(z, -1).masked_fill(target == ignore_index, 0.0) ** 2 if terms.z_loss else losses


# -- by name, where `operations` looks for them

RUN: Mapping[str, Callable[..., Any]] = {"linear_cross_entropy": run_forward, "linear_cross_entropy_backward": run_backward}
FAKE: Mapping[str, Callable[..., Any]] = {"linear_cross_entropy": fake, "linear_cross_entropy_backward": fake_backward}
