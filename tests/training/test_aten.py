"""torch's code as programs: what a plain function computes of a product, in the language, and what is said of what is not in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden import Golden
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from under_torch import APART

import epigen
from epigen import ops
from epigen.errors import CallError
from epigen.training import aten
from epigen.training.traced import trace

pytestmark = APART

SHAPE = (2, 3, 8)
CPU = torch.device("cpu")


def text_of(function: Callable[..., Any], shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32, **inputs: Any) -> str:
    return trace(function, shape, dtype, CPU, inputs).program.text


ACTIVATIONS = {
    F.relu: "relu(mm)", F.gelu: "gelu(mm)", F.silu: "silu(mm)", F.sigmoid: "sigmoid(mm)", F.tanh: "tanh(mm)", F.softplus: "softplus(mm)", F.hardswish: "hardswish(mm)",
    F.leaky_relu: "leaky_relu(mm, 0.01)", F.mish: "mish(mm)", F.hardtanh: "hardtanh(mm, -1, 1)", F.hardsigmoid: "hardsigmoid(mm)", F.relu6: "relu6(mm)",
    F.elu: "elu(mm, 1)", F.selu: "selu(mm)", F.celu: "celu(mm, 1)", F.logsigmoid: "logsigmoid(mm)", F.softsign: "mm / (abs(mm) + 1)", F.tanhshrink: "tanhshrink(mm)",
    F.softshrink: "softshrink(mm, 0.5)", F.hardshrink: "hardshrink(mm, 0.5)", torch.square: "mm * mm", torch.reciprocal: "reciprocal(mm)", torch.exp2: "exp2(mm)",
    torch.expm1: "expm1(mm)", torch.log1p: "log1p(mm)", torch.sin: "sin(mm)", torch.cos: "cos(mm)", torch.sign: "sign(mm)", torch.floor: "floor(mm)", torch.ceil: "ceil(mm)",
    torch.round: "round(mm)",
}  # fmt: skip


@pytest.mark.parametrize(("function", "text"), ACTIVATIONS.items(), ids=[f.__name__ for f in ACTIVATIONS])
def test_torchs_activations_are_rows(function: Callable[..., Any], text: str) -> None:
    assert text_of(function) == text


def test_others_operations_of_the_same_name_are_theirs(golden: Golden) -> None:
    """What a user's own library calls relu may be anything."""
    own = torch.library.Library("aten_cases", "FRAGMENT")
    own.define("relu(Tensor x) -> Tensor")
    own.impl("relu", lambda x: x + 1, "CompositeExplicitAutograd")
    with golden.raises(CallError):
        text_of(lambda mm: torch.ops.aten_cases.relu(mm))
    own._destroy()


def test_options_and_arithmetic() -> None:
    assert text_of(lambda mm: F.gelu(mm, approximate="tanh")) == "gelu_tanh(mm)"
    assert text_of(lambda mm: F.softplus(mm, beta=2.0)) == "v = 2 * mm; where(v > 20, mm, softplus(v) / 2)"
    assert text_of(lambda mm: torch.add(mm, mm, alpha=3)) == "mm + 3 * mm"
    assert text_of(lambda mm: 1 - mm) == "1 - 1 * mm"
    assert text_of(lambda mm: mm**3 + mm**0.5 + mm**-1 + mm**2) == "v = mm * mm; mm * v + sqrt(mm) + 1 / mm + v"
    assert text_of(lambda mm: mm**2.5 + 2.0**mm) == "pow(mm, 2.5) + exp2(mm)"
    assert text_of(lambda mm: F.celu(mm, 0.5) + F.threshold(mm, 1.0, 2.0)) == "celu(mm, 0.5) + threshold(mm, 1, 2)"
    assert text_of(lambda mm: torch.maximum(mm, torch.max(mm, 2 * mm))) == "maximum(mm, maximum(mm, mm * 2))"
    assert text_of(lambda mm: mm.clamp(min=0.0)) == "where(mm >= 0, mm, where(mm < 0, 0, detach(maximum(mm, 0))))"  # whose gradient at NaN is 0
    assert text_of(lambda mm: torch.where(mm > 1, mm, -mm)) == "where(mm > 1, mm, -mm)"


@pytest.mark.parametrize(
    ("shape", "declared"),
    [((8,), "g[n]"), ((1, 8), "g[n]"), ((2, 3, 8), "g[m,n]"), ((3, 8), "g[m,n]"), ((2, 3, 1), "g[m]"), ((2, 1, 1), "g[m]"), ((), "g"), ((1,), "g")],
)
def test_inputs_broadcast_as_torch_has_them(shape: tuple[int, ...], declared: str) -> None:
    traced = trace(lambda mm, g: mm * g, SHAPE, torch.float32, CPU, {"g": torch.ones(shape)})
    assert traced.program.text == f"mm * {declared}"
    (leaf,) = traced.program.leaves
    # over some of the leading dimensions alone: what it has to be expanded to
    assert leaf.expand == {(3, 8): (2, 3, 8), (2, 1, 1): (2, 3, 1)}.get(shape)


def test_numbers_stay_inputs_and_casts_between_are_left_out() -> None:
    assert text_of(lambda mm, s: (mm * s).float().relu().to(mm.dtype), dtype=torch.bfloat16, s=2.0) == "relu(mm * s)"
    assert text_of(lambda mm: mm.float() * 2, dtype=torch.bfloat16) == "cast(mm * 2, fp32)"


def test_masks_of_booleans() -> None:
    assert text_of(lambda mm, keep: torch.where(keep, mm, 0.0), keep=torch.ones(SHAPE, dtype=torch.bool)) == "where(keep[m,n] != 0, mm, 0)"
    assert text_of(lambda mm, keep: mm.masked_fill(~keep, -1e4), keep=torch.ones(8, dtype=torch.bool)) == "where(~(keep[n] != 0), -10000, mm)"


def test_booleans_are_numbers_where_torch_computes_with_them() -> None:
    keep = torch.ones(8, dtype=torch.bool)
    assert text_of(lambda mm, keep: mm * keep, keep=keep) == "mm * where(keep[n] != 0, 1, 0)"
    assert text_of(lambda mm: mm * (mm > 0)) == "mm * where(mm > 0, 1, 0)"
    assert text_of(lambda mm: torch.where((mm > 0) * (mm < 1), mm, 0.0)) == "where(where(mm > 0, 1, 0) * where(mm < 1, 1, 0) != 0, mm, 0)"
    finite = "where(mm == mm, 1, 0) * where(abs(mm) != inf, 1, 0) != 0"
    assert text_of(lambda mm: torch.where(torch.isfinite(mm), mm, 0.0)) == f"where({finite}, mm, 0)"
    assert text_of(lambda mm, keep: torch.where(torch.logical_and(mm, keep), mm, 0.0), keep=keep) == "where((mm != 0) & (keep[n] != 0), mm, 0)"
    assert (
        text_of(lambda mm, keep: torch.where(torch.where(mm > 1, keep, mm > 0), mm, 0.0), keep=keep)
        == "where(where(mm > 1, where(keep[n] != 0, 1, 0), where(mm > 0, 1, 0)) != 0, mm, 0)"
    )


def test_what_is_detached_stays_so() -> None:
    def unrecorded(mm: Tensor) -> Tensor:
        with torch.no_grad():
            scale = mm.abs()
        return mm * scale

    assert text_of(lambda mm: mm + (mm.round() - mm).detach()) == "mm + detach(round(mm) - mm)"
    assert text_of(lambda mm: mm * mm.data) == "mm * detach(mm)"
    assert text_of(unrecorded) == "mm * detach(abs(mm))"
    assert text_of(lambda mm: mm * torch.sigmoid(mm).detach()) == "mm * detach(sigmoid(mm))", "which is silu's value, and not its derivative"
    assert text_of(lambda mm: torch.where((mm > 0).detach(), mm, 0.0)) == "where(mm > 0, mm, 0)"


def test_integers_are_numbers_where_torch_computes_in_floats() -> None:
    ids, bytes_ = torch.ones(2, 3, 1, dtype=torch.int64), torch.ones(8, dtype=torch.uint8)
    assert text_of(lambda mm, ids: mm * ids, ids=ids) == "mm * ids[m]"
    assert text_of(lambda mm, g: mm + g * 0.5, g=bytes_) == "mm + g[n] * 0.5"
    assert text_of(lambda mm, ids: torch.where(ids == -100, 0.0, mm), ids=ids) == "where(ids[m] == -100, 0, mm)"
    assert text_of(lambda mm, keep: mm * keep.to(mm.dtype), keep=ids == 1) == "mm * where(keep[m] != 0, 1, 0)"


@pytest.mark.parametrize(
    "function",
    [lambda mm, ids: mm + (ids + ids), lambda mm, ids: torch.where(ids == ids + 0, mm, 0.0), lambda mm, ids: torch.where(ids < ids, mm, 0.0),
     lambda mm, ids: torch.where(ids > 2**24, mm, 0.0), lambda mm, ids: mm + ids * 3],
)  # fmt: skip
def test_what_torch_computes_in_integers_is_not_rounded(function: Callable[..., Any]) -> None:
    with pytest.raises(CallError, match="integers"):
        text_of(function, ids=torch.ones(2, 3, 1, dtype=torch.int64))


SQUARE = (8, 8)


def _shared(mm: Tensor) -> Tensor:
    """One count of rows and of columns."""
    i = torch.arange(8) + 1
    return torch.where(i[None] <= i[:, None], mm, -torch.inf)


POSITIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "where(n <= m, mm, -inf)": (lambda mm: torch.where(torch.arange(8) <= torch.arange(3)[:, None], mm, -torch.inf), (3, 8)),
    "where(n + 1 <= m + 1, mm, -inf)": (_shared, SQUARE),
    "where((m - n < 4) & (n <= m), mm, -10000)": (
        lambda mm: torch.where((torch.arange(8)[:, None] - torch.arange(8) < 4) & (torch.arange(8) <= torch.arange(8)[:, None]), mm, -1e4),
        SQUARE,
    ),
    "mm - abs(m - n) * 0.5": (lambda mm: mm - (torch.arange(3.0)[:, None] - torch.arange(8.0)).abs() * 0.5, (3, 8)),
    "mm + (3 + 2 * n)": (lambda mm: mm + torch.arange(3, 19, 2), SQUARE),
    "where(n <= m + 1, mm, 0)": (lambda mm: mm.tril(1), (3, 8)),
    "where(~((1 > 0) & (n <= m)), -inf, mm)": (lambda mm: mm.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf), SQUARE),
    "mm + where(n >= m + 1, -inf, 0)": (lambda mm: mm + torch.full((8, 8), -torch.inf).triu(1), SQUARE),
    "mm - where(ids[m] == n, 1, 0)": (lambda mm, ids: mm - F.one_hot(ids, 8), (3, 8)),
    "sum(where(n == ids[m], mm, 0), n)": (lambda mm, ids: mm.gather(-1, ids[:, None]).squeeze(-1), (3, 8)),
    "logsumexp(mm, n) - sum(where(n == ids[m], mm, 0), n)": (
        lambda mm, ids: mm.logsumexp(-1) - torch.where(torch.arange(8) == ids[:, None], mm, 0.0).sum(-1), (3, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", POSITIONS)
def test_counts_of_rows_and_columns_are_positions(text: str) -> None:
    function, shape = POSITIONS[text]
    inputs = {"ids": torch.tensor([1, 7, 0])} if "ids" in text else {}
    assert text_of(function, shape, **inputs) == text
    a, b = torch.randn(shape[0], 4), torch.randn(4, shape[1])
    torch.testing.assert_close(epigen.compile(function)(a, b, **inputs), function(a @ b, **inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda mm: torch.where(torch.arange(8) <= torch.arange(3)[:, None], mm, 0.0),  # rows of each of two matrices
        lambda mm: mm + torch.arange(8) * 2**24,
        lambda mm: mm.tril(),
        lambda mm: mm.gather(-1, torch.zeros(2, 3, 2, dtype=torch.int64)),
    ],
)
def test_other_counts_are_refused(function: Callable[..., Any], golden: Golden) -> None:
    with pytest.raises(CallError) as caught:
        text_of(function)
    golden(caught.value, str(function.__code__.co_firstlineno - test_other_counts_are_refused.__code__.co_firstlineno))


def test_several_results_views_and_reductions() -> None:
    def function(mm: Tensor, bias: Tensor) -> Any:
        z = mm + bias
        return z.view(-1, 8).relu().view(2, 3, 8), z.sum(dim=-1), z.sum(dim=(0, 1)), z.flatten(0, 1).mean(0), z.amax()

    traced = trace(function, SHAPE, torch.float32, CPU, {"bias": torch.ones(8)})
    assert traced.program.text == "v = mm + bias; v1 = bgrad(v); out2 = v1; relu(v), sum(v, n), out2, v1 / extent(m), max(v)"
    assert traced.program.outputs == ("mn", "m", "n", "n", "")


def test_results_have_the_dtypes_that_torch_gives_them() -> None:
    """Also reductions, which a program leaves in fp32."""
    assert text_of(lambda mm: mm.sum(0), shape=(6, 8), dtype=torch.bfloat16) == "cast(bgrad(mm), bf16)"
    assert text_of(lambda mm: mm.sum(-1, dtype=torch.float32), shape=(6, 8), dtype=torch.bfloat16) == "sum(mm, n)"


def test_a_modules_parameters_become_inputs() -> None:
    layer = nn.Sequential(nn.PReLU(8, init=0.25), nn.GELU())
    traced = trace(layer, (4, 8), torch.float32, CPU, {})
    assert traced.program.text == "gelu(prelu(mm, weight[n]))"
    assert list(traced.held) == ["weight"] and traced.held["weight"] is layer[0].weight


def test_a_functions_own_tensor_has_its_name() -> None:
    tint = torch.ones(8)
    assert text_of(lambda mm: mm * tint) == "mm * tint[n]"


def test_a_traced_program_is_the_texts_kernel() -> None:
    """Byte for byte."""

    def function(mm: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
        return F.silu(mm + bias) * gate

    text = text_of(function, bias=torch.ones(8), gate=torch.ones(SHAPE))
    assert text == "silu(mm + bias) * gate[m,n]"
    assert epigen.compile(text).source(shape=(64, 64, 64)) == epigen.compile("silu(mm+bias)*gate[m,n]").source(shape=(64, 64, 64))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda mm: torch.cumsum(mm, 0), "cumsum"),
        (lambda mm: mm @ mm.mT, "mT"),
        (lambda mm: mm > 0, "booleans"),
        (lambda mm: torch.softmax(mm, -1), "softmax"),
        (nn.Softmax(-1), "nn.Softmax"),
        (lambda mm: mm / mm.sum(-1, keepdim=True), "a reduction joined"),
        (lambda mm: torch.round(mm, decimals=1), "round with decimals"),
        (lambda mm: torch.div(mm, 2, rounding_mode="floor"), "div with floor"),
        (lambda mm: mm.max(1).values, "max"),
        (lambda mm: mm.long(), "long"),
        (lambda mm: mm.undefined(), "undefined"),
        (lambda mm: mm.reshape(3, 2, 8) + mm.reshape(3, 2, 8).sum(0), "reshape"),
    ],
)  # fmt: skip
def test_what_is_not_in_the_language_is_said_with_its_place(function: Callable[..., Any], name: str, golden: Golden) -> None:
    with golden.raises(CallError, name):
        text_of(function)


def test_rows_and_columns_of_one_extent_are_told_apart(golden: Golden) -> None:
    """torch pairs dimensions by place, whatever their extents: a sum of a row is no column."""
    assert text_of(lambda mm: (mm.sum(1, keepdim=True), mm.sum(0)), shape=(8, 8)) == "sum(mm, n), bgrad(mm)"
    with golden.raises(CallError):
        text_of(lambda mm: mm * 2 + (mm + 1).view(8, 8).sum(1), shape=(8, 8))


def test_each_row_and_rule_names_an_operation_of_torchs() -> None:
    names = [pattern.partition("(")[0] for op in ops.TABLE.values() for pattern in op.aten] + [pattern.partition("(")[0] for pattern in aten.SEVERAL]
    missing = [name for name in names if not hasattr(torch.ops.aten, name)]
    assert missing == []
