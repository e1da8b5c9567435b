"""Where eager torch rounds, against torch itself, bit for bit: of the same product, whose matrix b is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from epigen import ops
from epigen.codegen.lower import lower
from epigen.codegen.spec import Signature
from epigen.dtypes import BF16, BOOL, BY_TORCH, FP8E4M3, FP16, FP32, INT8, INT32, DType
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir import reference, rules
from epigen.ir.eager import as_eager, product_dtype
from epigen.ir.program import graph_of
from epigen.ops import NUMBER
from epigen.training import functions

M, N = 64, 96
CASES: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {
    "relu": (lambda mm, bias: torch.relu(mm + bias), {"bias": "n"}),
    "gelu_tanh": (lambda mm, bias: F.gelu(mm + bias, approximate="tanh"), {"bias": "n"}),
    "swiglu": (lambda mm, gate: F.silu(mm) * gate, {"gate": "mn"}),
    "scaled residual": (lambda mm, r, s: r + s * mm, {"r": "mn", "s": ""}),
    "numbers": (lambda mm, r: (mm * 0.1 - r) / 3.0 + 1, {"r": "mn"}),
    "where": (lambda mm, r: torch.where(mm > r, mm * mm, r * 0.3), {"r": "mn"}),
    "chain": (lambda mm, c: F.mish(mm) + F.softplus(c) * torch.tanh(mm), {"c": "m"}),
    "exponential": (lambda mm, c: torch.exp(mm * 0.1) + torch.sigmoid(c), {"c": "m"}),
    "three activations": (lambda mm, r: F.leaky_relu(mm, 0.1) + F.elu(r) + F.hardswish(mm), {"r": "mn"}),
    "clamped": (lambda mm, r: torch.clamp(mm * r, -1.3, 2.7) ** 2, {"r": "mn"}),
    "widened": (lambda mm, r: mm.float() * r + 1, {"r": "mn"}),
    "widened and narrowed": (lambda mm, r: (mm.float() * r).to(mm.dtype) * mm, {"r": "mn"}),
    "layer scale": (lambda mm, bias, gamma, r: r + gamma * (mm + bias), {"bias": "n", "gamma": "n", "r": "mn"}),
}
SHAPES = {"mn": (M, N), "n": (N,), "m": (M, 1), "": ()}


def drawn(indices: str, dtype: torch.dtype) -> Tensor:
    values = torch.randn(SHAPES[indices]) * 2
    return values.to(dtype) if dtype.is_floating_point else (values * 8).to(dtype)


def run(function: Callable[..., Tensor], mm: Tensor, inputs: dict[str, Tensor], eager: bool = True) -> tuple[Tensor, Tensor]:
    """What torch gives, and what the program of the same function does, in the same dtype. eager: else each output is rounded once."""
    want = function(mm, **inputs)
    graph = graph_of(functions.traced(function, mm.shape, mm.dtype, torch.device("cpu"), inputs, casts=True).program.text)
    given: dict[str, Any] = {name: t.flatten() if t.dim() == 2 and 1 in t.shape else t for name, t in inputs.items()}
    of = BY_TORCH[str(mm.dtype)]
    if eager:
        graph = as_eager(graph, of, of, {name: BY_TORCH[str(t.dtype)] for name, t in given.items()})
    (found,) = reference.evaluate(graph, mm, torch.eye(mm.shape[1], dtype=mm.dtype), given, [BY_TORCH[str(want.dtype)]])
    return want, found


@pytest.mark.parametrize("other", [None, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_eager_torch(name: str, dtype: torch.dtype, other: torch.dtype | None) -> None:
    """other: of the inputs; integers where functions of them are no part of the case."""
    function, indices = CASES[name]
    if other == torch.int32 and name in ("chain", "exponential", "three activations"):
        pytest.skip("torch has no such function of integers, or gives another dtype")
    torch.manual_seed(0)
    want, found = run(function, drawn("mn", dtype), {i: drawn(at, other or dtype) for i, at in indices.items()})
    assert found.dtype == want.dtype
    assert torch.equal(found, want)


@pytest.mark.parametrize("name", ["gelu_tanh", "swiglu", "scaled residual", "layer scale"])
def test_one_rounding_gives_other_bits(name: str) -> None:
    """Else the test above would show nothing."""
    function, indices = CASES[name]
    torch.manual_seed(0)
    want, found = run(function, drawn("mn", torch.bfloat16), {i: drawn(at, torch.bfloat16) for i, at in indices.items()}, eager=False)
    assert (found != want).float().mean() > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [op.name for op in ops.TABLE.values() if op.result == NUMBER and op.aten and len(op.params) == 1])
def test_a_row_is_one_operation_of_torchs(name: str, dtype: torch.dtype) -> None:
    """Of fp32 arithmetic rounded once; of some functions the processor's vectors give other last bits than its numbers."""
    torch.manual_seed(0)
    mm = torch.cat([torch.linspace(-9, 9, M * N // 2), torch.randn(M * N // 2) * 3]).reshape(M, N).to(dtype)
    text = ops.TABLE[name].aten[0]
    function = getattr(torch.ops.aten, text.partition("(")[0])
    options = (
        {"approximate": "tanh"} if "'tanh'" in text else {k: float(v) for k, _, v in (p.partition("=") for p in text.strip(")").split(", ")[1:]) if v[0] != "'"}
    )
    want = function(mm, **options)
    graph = as_eager(graph_of("-mm" if name == "neg" else f"{name}(mm)"), BY_TORCH[str(dtype)], BY_TORCH[str(dtype)], {})
    (found,) = reference.evaluate(graph, mm, torch.eye(N, dtype=dtype), {}, [BY_TORCH[str(want.dtype)]])
    other = (found != want) & ~(found.isnan() & want.isnan())
    torch.testing.assert_close(found, want, equal_nan=True, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert other.float().mean() <= (0.05 if name == "gelu" else 0.001), "of gelu the CPU has another formula than a GPU, which is the one here"


def held(text: str, a: DType, **inputs: DType | None) -> list[tuple[str, str]]:
    """What of a program is computed, in order: operations, and in what dtypes casts are."""
    graph = as_eager(graph_of(text), a, a, inputs)
    return [(n.op, str(n.dtype or "")) for n in graph.nodes if n.op not in (g.OPERAND, g.INPUT, g.CONSTANT)]


def test_where_it_rounds() -> None:
    bf16 = (g.CAST, "bf16")
    assert held("relu(mm + bias)", BF16, bias=BF16) == [("dot", ""), bf16, ("add", ""), bf16, ("relu", "")], "relu rounds nothing, nor does the last cast"
    assert held("relu(mm + bias)", BF16, bias=FP32) == [("dot", ""), bf16, ("add", ""), ("relu", "")]
    assert held("relu(mm + bias)", FP32, bias=FP32) == [("dot", ""), ("add", ""), ("relu", "")]
    assert held("mm * s", BF16, s=FP32) == [("dot", ""), bf16, bf16, ("mul", "")], "one element counts as what it meets"
    assert held("mm * s", BF16, s=None) == held("mm * 0.3", BF16) == [("dot", ""), bf16, ("mul", "")]
    assert held("cast(mm, fp32) * s", BF16, s=FP32) == [("dot", ""), bf16, ("mul", "")]
    assert held("mm * flag[m,n]", BF16, flag=BOOL) == [("dot", ""), bf16, ("mul", "")]
    assert held("mm * count[m,n]", BF16, count=INT32)[1:3] == [bf16, bf16]
    assert held("mm + x[m,n]", BF16, x=FP16) == [("dot", ""), bf16, ("add", "")], "of two kinds of 16 bits torch makes fp32"
    assert held("mm * s", FP8E4M3, s=FP32)[1] == bf16 and product_dtype(INT8) == FP32
    assert held("sum(mm * mm, n)", BF16)[-2:] == [bf16, ("reduce", "")], "sums stay fp32"


def test_operands_are_computed_as_torch_has_them() -> None:
    assert held("dot(relu(a) * norm[k], b)", BF16, norm=BF16)[:2] == [("relu", ""), ("mul", "")]
    assert held("dot(silu(a) * norm[k], b)", FP16, norm=FP16)[:3] == [("silu", ""), (g.CAST, "fp16"), ("mul", "")]


def test_torch_promotes_nothing_with_fp8() -> None:
    with pytest.raises(CallError, match="the input 'x' is fp8e4m3"):
        as_eager(graph_of("mm + x[m,n]"), BF16, BF16, {"x": FP8E4M3})


@pytest.mark.parametrize("name", [name for name, op in ops.TABLE.items() if op.eager])
def test_torchs_formula_is_the_same_function(name: str) -> None:
    formula, x = rules.eager(name), torch.linspace(-5, 5, 1001, dtype=torch.float64)
    assert formula is not None
    values: list[Tensor] = []
    for node in formula.nodes:
        given = x if node.op == g.INPUT else torch.tensor(node.value, dtype=torch.float64)
        values.append(reference.torch_function(node.op)(*(values[i] for i in node.args)) if node.op in ops.TABLE else given)
    torch.testing.assert_close(values[formula.outputs[0].node], reference.torch_function(name)(x))


def test_it_is_a_program_as_any_other() -> None:
    """It lowers, and its own casts are no outputs'."""
    signature = Signature(BF16, BF16, (("bias", BF16),))
    spec = lower(as_eager(graph_of("y = mm + bias; y, cast(y * y, fp32)"), BF16, BF16, dict(signature.inputs)), signature)
    assert [str(store.dtype) for store in spec.stores] == ["bf16", "fp32"]
