"""Where eager torch rounds, against torch itself, bit for bit: of the same product, whose matrix b is the identity."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bench.random_programs import write_program
from epigen import ops
from epigen.codegen.lower import lower, output_dtype
from epigen.codegen.spec import Signature
from epigen.dtypes import BF16, BOOL, BY_TORCH, FP8E4M3, FP16, FP32, INT8, INT32, DType
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir import reference, rules
from epigen.ir.eager import as_eager, as_eager_of, product_dtype
from epigen.ir.graph import Graph
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
    for text in ("mm + x[m,n]", "exp(x[m,n]) * mm", "mm + cast(mm, fp8e4m3)"):
        with pytest.raises(CallError, match="computes with fp8e4m3"):
            as_eager(graph_of(text), BF16, BF16, {"x": FP8E4M3})
    assert held("cast(mm + cast(x[m,n], bf16), fp8e4m3)", BF16, x=FP8E4M3)[-1] == (g.CAST, "bf16"), "what is cast before and after is computed in bf16"


@pytest.mark.parametrize("name", [name for name, op in ops.TABLE.items() if op.eager])
def test_torchs_formula_is_the_same_function(name: str) -> None:
    formula, x = rules.eager(name), torch.linspace(-5, 5, 1001, dtype=torch.float64)
    assert formula is not None
    values: list[Tensor] = []
    for node in formula.nodes:
        given = x if node.op == g.INPUT else torch.tensor(node.value, dtype=torch.float64)
        values.append(reference.torch_function(node.op)(*(values[i] for i in node.args)) if node.op in ops.TABLE else given)
    torch.testing.assert_close(values[formula.outputs[0].node], reference.torch_function(name)(x))


def natively(graph: Graph, mm: Tensor, inputs: dict[str, Any]) -> list[Any]:
    """Every node's value as torch holds it: each operation of arguments that torch itself has promoted, in fp32, and rounded. Numbers are numbers of Python's."""
    m, n = mm.shape
    values: list[Any] = []
    for node in graph.nodes:
        args = [values[i] for i in node.args]
        if node.op in ops.TABLE:
            op = ops.TABLE[node.op]
            numbers = [a for a, p in zip(args, op.params, strict=True) if p.kind == NUMBER]
            held = functools.reduce(lambda x, y: x + y, numbers).dtype if any(isinstance(a, Tensor) for a in numbers) else torch.float32
            held = held if held.is_floating_point else torch.float32
            ready = [
                (a.to(held).float() if isinstance(a, Tensor) else torch.tensor(a)) if p.kind == NUMBER else a for a, p in zip(args, op.params, strict=True)
            ]
            value = reference.torch_function(node.op)(*ready)
            value = value if op.result != NUMBER else value.to(held) if any(isinstance(a, Tensor) for a in args) else float(value)
        elif node.op == g.INPUT:
            value, indices = inputs[node.name], node.indices
            value = value[:, None] if indices == "m" else value[None, :] if indices == "n" else value
        elif node.op == g.BITS:
            value = reference.unpack(inputs[node.name], n)
        elif node.op == g.CAST:
            assert node.dtype is not None
            value = reference.convert(torch.as_tensor(args[0]).float(), node.dtype)
        elif node.op == g.BITMASK:
            value = reference.pack(args[0].expand(m, n))
        elif node.op == g.REDUCE:
            value = reference.reduce(node, args[0].float().expand(m, n))
        else:
            value = {g.DOT: mm, g.OPERAND: None, g.CONSTANT: node.value, g.EXTENT: {"m": float(m), "n": float(n)}.get(node.name)}[node.op]
        values.append(value)
    return values


def random_call(random: Random, graph: Graph, m: int, n: int) -> tuple[Tensor, dict[str, Any]]:
    """A product of some dtype, and inputs of any; numbers among them."""
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    inputs: dict[str, Any] = {}
    for node in graph.inputs():
        if node.op == g.BITS:
            inputs[node.name] = torch.randint(0, 256, (m, -(-n // 8)), dtype=torch.uint8)
            continue
        values = torch.randn({"mn": (m, n), "m": (m,), "n": (n,), "": ()}[node.indices]) * 2
        held = random.choice((dtype, dtype, torch.float32, torch.bfloat16, torch.float16, torch.int32))
        inputs[node.name] = values.item() if not node.indices and random.random() < 0.4 else values.to(held) if held != torch.int32 else (values * 3).to(held)
    return (torch.randn(m, n) * 2).to(dtype), inputs


def test_random_programs() -> None:
    """Bit for bit, wherever torch computes such a thing at all: not of fp8, for instance. GELU's formula is another than the reference's."""
    compared, (m, n) = 0, (5, 33)
    for seed in range(300):
        random = Random(seed)
        torch.manual_seed(seed)
        graph = graph_of(write_program(random))
        if graph.computed() or any(node.op == "gelu" or (node.op == g.REDUCE and node.axes == "k") for node in graph.nodes):
            continue
        mm, inputs = random_call(random, graph, m, n)
        try:
            values, eager = natively(graph, mm, inputs), as_eager_of(graph, mm, mm, inputs)
        except (RuntimeError, CallError):
            continue
        dtypes = [output_dtype(graph, o, BY_TORCH[str(mm.dtype)]) for o in graph.outputs]
        for output, dtype, found in zip(graph.outputs, dtypes, reference.evaluate(eager, mm, torch.eye(n, dtype=mm.dtype), inputs, dtypes), strict=True):
            want, node = values[output.node], graph.nodes[output.node]
            if node.kind != g.PACKED:
                want = reference.convert(reference.shaped(torch.as_tensor(want).float(), node.indices, m, n), dtype)
            assert torch.equal(found.float().nan_to_num(nan=1e9), want.float().nan_to_num(nan=1e9)), (seed, graph.text)
            compared += 1
    assert compared > 400


def test_it_is_a_program_as_any_other() -> None:
    """It lowers, and its own casts are no outputs'."""
    signature = Signature(BF16, BF16, (("bias", BF16),))
    spec = lower(as_eager(graph_of("y = mm + bias; y, cast(y * y, fp32)"), BF16, BF16, dict(signature.inputs)), signature)
    assert [str(store.dtype) for store in spec.stores] == ["bf16", "fp32"]
