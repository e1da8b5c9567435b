"""The operation table's texts against each other: reference, gradient and error; and the error bound that is made of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import programs, write_program
from torch import Tensor

import epigen
from epigen import ops
from epigen.codegen.lower import output_dtype
from epigen.dtypes import BF16, FP8E5M2, FP16, FP32, INT8, DType
from epigen.ir import bound, reference, rules
from epigen.ir import graph as g
from epigen.ir.check import check, check_rule
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.lang.parser import parse
from epigen.ops import BOOLEAN, NUMBER

POINTS = 400
NUMERIC = [op for op in ops.TABLE.values() if op.result == NUMBER]

# draws an argument from where the function is defined and smooth; the default is a normal variable
_DOMAINS: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("log", "x"): lambda x: x.abs() + 0.1,
    ("sqrt", "x"): lambda x: x.abs() + 0.1,
    ("rsqrt", "x"): lambda x: x.abs() + 0.1,
    ("div", "y"): lambda y: y + y.sign() * 0.3,
    ("dsigmoid", "y"): torch.sigmoid,
    ("dtanh", "y"): torch.tanh,
    ("clamp", "lo"): lambda x: x - 0.5,
    ("clamp", "hi"): lambda x: x + 0.5,
    ("hardtanh", "lo"): lambda x: x - 0.5,
    ("hardtanh", "hi"): lambda x: x + 0.5,
    ("log1p", "x"): lambda x: x.abs() - 0.9,
    ("pow", "x"): lambda x: x.abs() + 0.1,
    ("reciprocal", "x"): lambda x: x + x.sign() * 0.3,
    ("celu", "alpha"): lambda x: x.abs() + 0.3,
    ("softshrink", "width"): torch.abs,
    ("hardshrink", "width"): torch.abs,
}
_KINKS = {
    "hardswish": (-3.0, 3.0), "hardsigmoid": (-3.0, 3.0), "relu6": (0.0, 6.0), "relu": (0.0,), "leaky_relu": (0.0,), "prelu": (0.0,), "abs": (0.0,), "elu": (0.0,),
    "selu": (0.0,), "celu": (0.0,), "sign": (0.0,),
}  # fmt: skip
_MEETING = ("minimum", "maximum", "clamp", "hardtanh", "threshold", "softshrink", "hardshrink")
"""What bends, or jumps, where its arguments are equal, or opposite."""


def rule(op: ops.Op, name: str) -> Graph:
    """The gradient that flows to one parameter."""
    found = rules.gradients(op.name)[[p.name for p in op.params].index(name)]
    assert found is not None
    return found


def points(op: ops.Op, spread: float = 2.0, seed: int = 0) -> dict[str, Tensor]:
    """Random arguments in float64, none within 1e-3 of a kink."""
    source = torch.Generator().manual_seed(seed + sum(map(ord, op.name)))
    args = {}
    for p in op.params:
        drawn = torch.randn(POINTS, generator=source, dtype=torch.float64) * spread
        args[p.name] = drawn > 0 if p.kind == BOOLEAN else _DOMAINS.get((op.name, p.name), lambda x: x)(drawn)
    numbers = [args[p.name] for p in op.params if p.kind == NUMBER]
    near = torch.zeros(POINTS, dtype=torch.bool)
    if op.name in _MEETING:
        for i, x in enumerate(numbers):
            for y in numbers[:i]:
                near |= ((x - y).abs() < 1e-3) | ((x + y).abs() < 1e-3)
    for kink in _KINKS.get(op.name, ()):
        near |= (args["x"] - kink).abs() < 1e-3
    return {n: x[~near] for n, x in args.items()}


def call(op: ops.Op, args: Mapping[str, Tensor]) -> Tensor:
    return reference.torch_function(op.name)(*(args[p.name] for p in op.params))


_PAIRS = [(op, p.name) for op in NUMERIC for p, text in zip(op.params, op.gradient, strict=True) if text is not None]
_IDS = [f"{op.name}-{name}" for op, name in _PAIRS]


def test_each_numeric_row_has_a_gradient_for_each_number() -> None:
    steps = {("sign", "x"), ("floor", "x"), ("ceil", "x"), ("round", "x"), ("detach", "x"), ("threshold", "least"), ("hardshrink", "width")}
    expected = {(op.name, p.name) for op in NUMERIC for p in op.params if p.kind == NUMBER} - steps
    assert {(op.name, name) for op, name in _PAIRS} == expected
    assert {op.name for op in NUMERIC if op.jumps} == {name for name, _ in steps}
    assert len(expected) == 85
    assert len(NUMERIC) == 63


def test_a_boolean_has_no_gradient() -> None:
    for op in ops.TABLE.values():
        for p, text in zip(op.params, op.gradient or (None,) * len(op.params), strict=True):
            assert text is None or p.kind == NUMBER == op.result


@pytest.mark.parametrize(("op", "name"), _PAIRS, ids=_IDS)
def test_gradient_agrees_with_finite_differences(op: ops.Op, name: str) -> None:
    args = points(op)
    grad = torch.linspace(-2, 2, len(args[name]), dtype=torch.float64)
    step = 1e-5 * args[name].abs().clamp(min=0.1)
    difference = (call(op, args | {name: args[name] + step}) - call(op, args | {name: args[name] - step})) / (2 * step)
    found = bound.evaluate_rule(rule(op, name), args | {"grad": grad, "out": call(op, args)})
    torch.testing.assert_close(found.expand_as(difference), difference * grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("op", "name"), _PAIRS, ids=_IDS)
def test_gradient_agrees_with_torch(op: ops.Op, name: str) -> None:
    args = points(op, spread=4.0, seed=1)
    # ties and kinks too: torch has a value there, and a user compares with it
    if op.name in ("minimum", "maximum"):
        args["y"][:20] = args["x"][:20]
    if op.name in ("relu", "abs", "leaky_relu"):
        args["x"][:5] = 0.0
    if op.name == "clamp":
        args["x"][:5] = args["lo"][:5]
        args["x"][5:10] = args["hi"][5:10]
        args["lo"][10:15] = args["hi"][10:15] + 1
    leaves = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in args.items()}
    out = call(op, leaves)
    grad = torch.linspace(-2, 2, len(out), dtype=torch.float64)
    (expected,) = torch.autograd.grad(out, leaves[name], grad)
    found = bound.evaluate_rule(rule(op, name), args | {"grad": grad, "out": out.detach()})
    torch.testing.assert_close(found.expand_as(expected), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("op", "name"), _PAIRS, ids=_IDS)
def test_gradient_is_linear_in_what_arrives(op: ops.Op, name: str) -> None:
    args = points(op)
    graph, out, size = rule(op, name), call(op, args), len(args[name])
    one = bound.evaluate_rule(graph, args | {"out": out, "grad": torch.ones(size, dtype=torch.float64)})
    scaled = bound.evaluate_rule(graph, args | {"out": out, "grad": torch.full((size,), -3.0, dtype=torch.float64)})
    torch.testing.assert_close(scaled, -3 * one, rtol=1e-12, atol=0)


@pytest.mark.parametrize("op", NUMERIC, ids=lambda op: op.name)
@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
def test_error_texts_are_finite_and_not_negative(op: ops.Op, spread: float) -> None:
    args = points(op, spread)
    found = bound.evaluate_rule(rules.error(op.name), args | {"out": call(op, args)})
    assert found.isfinite().all()
    assert (found >= 0).all()


class _Language:
    """Triton's names, as torch has them."""

    PropagateNan = SimpleNamespace(ALL=True)

    @staticmethod
    def maximum(x: Tensor, least: float, propagate_nan: bool) -> Tensor:
        assert propagate_nan
        return x.clamp(min=least)

    @staticmethod
    def minimum(x: Tensor, most: float, propagate_nan: bool) -> Tensor:
        assert propagate_nan
        return x.clamp(max=most)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def computed(op: ops.Op, **args: Tensor) -> Tensor:
    """A row's Triton text on torch's numbers, which round as a GPU does."""
    scope: dict[str, object] = {"tl": _Language(), **args}
    names = {name: name for name in args}
    for line in op.body:
        if not line.startswith("#"):
            name, text = line.format(**names).split(" = ", 1)
            scope[name] = eval(text, scope)
    found = eval(op.triton.format(**names), scope)
    assert isinstance(found, Tensor)
    return found


def _normal(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def _by_tanh(x: Tensor) -> Tensor:
    return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize(("name", "exact", "relative", "units", "slope_units"), [("gelu", _normal, 2e-4, 3, 6), ("gelu_tanh", _by_tanh, 3e-6, 6, 8)])
def test_what_gelu_multiplies_by_is_as_close_as_promised(name: str, exact: Callable[[Tensor], Tensor], relative: float, units: int, slope_units: int) -> None:
    x = torch.cat([torch.linspace(-40, 40, 400_001), torch.tensor([0.0, -0.0, 1e30, math.inf, math.nan])])
    found = computed(ops.TABLE[name], x=x).double()
    number, finite = ~x.isnan(), x.abs() < math.inf
    assert found[~number].isnan().all() and found[x == math.inf] == math.inf
    cdf = exact(x.double())
    assert ((found - x * cdf).abs()[finite] <= units * x.abs()[finite] * bound.UNIT).all()
    # small results are right as well, which 1 + erf(x) and 1 + tanh(x) lose
    near = (x < 0) & (x > -5)
    assert ((found / (x * cdf) - 1).abs()[near] < relative).all()
    z = x.double()[x.abs() < 41].requires_grad_()
    (slope,) = torch.autograd.grad((z * exact(z)).sum(), z)
    z = z.detach()
    assert ((computed(ops.TABLE[f"d{name}"], g=torch.ones_like(z).float(), z=z.float()).double() - slope).abs() <= slope_units * bound.UNIT).all()


@pytest.mark.parametrize("name", ["softplus", "logsigmoid"])
def test_softplus_is_right_to_four_units_of_its_result_however_small(name: str) -> None:
    x = torch.cat([torch.linspace(-80, 80, 400_001), torch.linspace(-1, 1, 100_001), torch.tensor([0.0, -0.0, 1e30, -1e30, math.inf, -math.inf, math.nan])])
    found, wide = computed(ops.TABLE[name], x=x).double(), x.double()
    sign = 1 if name == "softplus" else -1
    expected = sign * (torch.clamp(sign * wide, min=0) + torch.log1p(torch.exp(-wide.abs())))
    # as exp has it: what x was rounded by counts as often as x is large
    near = (wide.abs() <= 80) & ~wide.isnan()
    assert ((found / expected - 1).abs()[near] <= (4 + torch.clamp(-sign * wide, min=0)[near]) * bound.UNIT).all()
    assert torch.equal(found[~near].nan_to_num(7.0), expected[~near].nan_to_num(7.0))


@pytest.mark.parametrize(("name", "largest"), [("gelu_16bit", 1e30), ("dgelu_16bit", 1e30), ("dgelu_tanh_16bit", 1e12)])
def test_what_is_rounded_to_16_bits_is_as_close_as_promised(name: str, largest: float) -> None:
    z = torch.cat([torch.linspace(-40, 40, 400_001), torch.tensor([0.0, -0.0, largest])])
    args = {"x": z} if name == "gelu_16bit" else {"g": torch.full_like(z, -3.0), "z": z}
    wide = {n: x.double() for n, x in args.items()}
    found, expected = computed(ops.TABLE[name], **args).double(), call(ops.TABLE[name], wide)
    promised = bound.evaluate_rule(rules.error(name), wide | {"out": expected}) * bound.UNIT
    assert ((found - expected).abs() <= promised).all()


@pytest.mark.parametrize(
    ("dtype", "smallest", "start", "share"), [(torch.float16, 2.0**-14, -40, 0.5), (torch.float16, 2.0**-14, -4, 0.13), (torch.bfloat16, 0.0, -4.5, 0.25)]
)
def test_gelu_to_16_bits_is_off_by_a_part_of_what_rounding_is(dtype: torch.dtype, smallest: float, start: float, share: float) -> None:
    """Of half a step: an eighth of fp16, up to a half where its steps are no longer relative, and a fourth of bf16 where torch's own 1 + erf is off by more."""
    x = torch.linspace(start, 40, 400_001)
    expected = call(ops.TABLE["gelu"], {"x": x.double()})
    half = expected.abs().clamp(min=smallest) * torch.finfo(dtype).eps / 2
    assert ((computed(ops.TABLE["gelu_16bit"], x=x) - expected).abs() <= share * half).all()


def test_gelu_to_16_bits_keeps_infinity_and_nan() -> None:
    found = computed(ops.TABLE["gelu_16bit"], x=torch.tensor([math.inf, math.nan]))
    assert found[0] == math.inf and found[1].isnan()


def test_a_comparison_has_no_error_of_its_own() -> None:
    args = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])]
    for op in (o for o in ops.TABLE.values() if o.result == BOOLEAN and o.params[0].kind == NUMBER):
        assert reference.torch_function(op.name)(*args).dtype == torch.bool


# -- the reference, one number at a time, in plain Python


def _phi(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _inner(z: float) -> float:
    return math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)


def _dgelu_tanh(g: float, z: float) -> float:
    s = _sigmoid(2 * _inner(z))
    return g * (s + z * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z))


def _tanh_softplus(x: float) -> float:
    return math.tanh(math.log1p(math.exp(x)))


_SELU, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717

_NAIVE: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y, "neg": lambda x: -x,
    "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
    "and": lambda x, y: x and y, "or": lambda x, y: x or y, "not": lambda x: not x, "where": lambda c, x, y: x if c else y,
    "minimum": min, "maximum": max, "clamp": lambda x, lo, hi: min(max(x, lo), hi), "abs": abs, "exp": math.exp, "log": math.log, "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x), "erf": math.erf, "scale": lambda x, s: x * s, "relu": lambda x: max(x, 0.0), "leaky_relu": lambda x, slope: x if x >= 0 else slope * x,
    "gelu": lambda x: x * _cdf(x), "gelu_tanh": lambda x: x * (1 + math.tanh(_inner(x))) / 2, "silu": lambda x: x * _sigmoid(x), "sigmoid": _sigmoid, "tanh": math.tanh,
    "softplus": lambda x: math.log1p(math.exp(-abs(x))) + max(x, 0.0), "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6, "drelu": lambda g, p: g if p else 0.0,
    "dgelu": lambda g, z: g * (_cdf(z) + z * _phi(z)),
    "dgelu_tanh": _dgelu_tanh, "gelu_16bit": lambda x: x * _cdf(x), "dgelu_16bit": lambda g, z: g * (_cdf(z) + z * _phi(z)), "dgelu_tanh_16bit": _dgelu_tanh,
    "square": lambda x: x * x, "reciprocal": lambda x: 1 / x, "exp2": lambda x: 2.0**x, "expm1": math.expm1, "log1p": math.log1p, "pow": math.pow, "sin": math.sin,
    "cos": math.cos, "sign": lambda x: math.copysign(1, x) if x else 0.0, "floor": math.floor, "ceil": math.ceil, "round": round, "detach": lambda x: x,
    "relu6": lambda x: min(max(x, 0.0), 6.0), "hardtanh": lambda x, lo, hi: min(max(x, lo), hi), "hardsigmoid": lambda x: min(max(x + 3, 0), 6) / 6,
    "elu": lambda x, alpha: x if x > 0 else alpha * math.expm1(x), "selu": lambda x: _SELU * (x if x > 0 else _SELU_ALPHA * math.expm1(x)),
    "celu": lambda x, alpha: x if x > 0 else alpha * math.expm1(x / alpha), "mish": lambda x: x * _tanh_softplus(x), "softsign": lambda x: x / (1 + abs(x)),
    "logsigmoid": lambda x: min(x, 0.0) - math.log1p(math.exp(-abs(x))), "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "threshold": lambda x, least, value: x if x > least else value, "softshrink": lambda x, width: math.copysign(max(abs(x) - width, 0.0), x),
    "hardshrink": lambda x, width: x if abs(x) > width else 0.0, "tanhshrink": lambda x: x - math.tanh(x), "prelu": lambda x, slope: x if x > 0 else slope * x,
    "dmish": lambda g, z: g * (_tanh_softplus(z) + z * _sigmoid(z) * (1 - _tanh_softplus(z) ** 2)),
    "dsilu": lambda g, z: g * (_sigmoid(z) + z * _sigmoid(z) * (1 - _sigmoid(z))), "dsigmoid": lambda g, y: g * y * (1 - y), "dtanh": lambda g, y: g * (1 - y * y),
}  # fmt: skip


def test_each_row_has_a_naive_formula() -> None:
    assert _NAIVE.keys() == ops.TABLE.keys()


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_reference_is_the_naive_formula(op: ops.Op) -> None:
    args = points(op, spread=3.0)
    if op.symbol in ("==", "!=", ">=", "<="):
        args["y"][:50] = args["x"][:50]
    found = call(op, args)
    expected = torch.tensor([_NAIVE[op.name](*row) for row in zip(*(args[p.name].tolist() for p in op.params), strict=True)], dtype=found.dtype)
    # torch's dgelu_tanh subtracts numbers up to 35 times g from one another, which one of these points shows
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13 if op.name == "dgelu_tanh_16bit" else 1e-14)


@pytest.mark.parametrize(
    ("activation", "derivative"),
    [("relu", None), ("gelu", "dgelu"), ("gelu_tanh", "dgelu_tanh"), ("silu", "dsilu"), ("sigmoid", "dsigmoid"), ("tanh", "dtanh"), ("mish", "dmish")],
)
def test_a_derivative_operation_is_its_activations_gradient(activation: str, derivative: str | None) -> None:
    z = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    y = reference.torch_function(activation)(z)
    grad = torch.linspace(-1, 1, 101, dtype=torch.float64)
    (expected,) = torch.autograd.grad(y, z, grad)
    second = {"dsigmoid": y, "dtanh": y}.get(derivative or "", z).detach()
    found = reference.torch_function(derivative)(grad, second) if derivative else reference.torch_function("drelu")(grad, z > 0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# -- reductions


def test_the_largest_of_equal_elements_have_no_gradient_in_one_kernel() -> None:
    """torch divides what arrives among them, and nothing in the language counts them in time."""
    assert {r.name for r in ops.REDUCTIONS.values() if r.gradient is None} == {"max", "amax"}


@pytest.mark.parametrize("row", [r for r in ops.REDUCTIONS.values() if r.gradient is not None], ids=lambda r: r.name)
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
def test_a_reductions_gradient_agrees_with_torch(row: ops.Reduction, dims: tuple[int, ...]) -> None:
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    out = reference.torch_reduction(row.name)(x, dims)
    grad = torch.linspace(-2, 3, out.numel(), dtype=torch.float64).reshape(out.shape)
    (expected,) = torch.autograd.grad(out, x, grad)
    graph = rules.reduction_gradient(row.name)
    assert graph is not None
    found = bound.evaluate_rule(graph, {"x": x.detach(), "out": out.detach().expand(7, 9), "grad": grad.expand(7, 9)})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


_NAIVE_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "amax": lambda v: max(map(abs, v)),
    "logsumexp": lambda v: math.log(math.fsum(map(math.exp, v))),
}


@pytest.mark.parametrize("row", ops.REDUCTIONS.values(), ids=lambda r: r.name)
def test_a_reductions_reference_is_the_naive_formula(row: ops.Reduction) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    by_column = torch.tensor([[_NAIVE_REDUCTIONS[row.name](c.tolist()) for c in x.T]], dtype=torch.float64)
    torch.testing.assert_close(reference.torch_reduction(row.name)(x, (0,)), by_column, rtol=1e-12, atol=1e-14)
    assert reference.torch_reduction(row.name)(x, (0, 1)).item() == pytest.approx(_NAIVE_REDUCTIONS[row.name](x.flatten().tolist()))


@pytest.mark.parametrize("row", ops.REDUCTIONS.values(), ids=lambda r: r.name)
def test_a_reductions_identity_changes_nothing(row: ops.Reduction) -> None:
    x = torch.randn(6, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with_identity = torch.cat([x, torch.full((2, 1), reference.IDENTITY[row.name], dtype=torch.float64)])
    reduce = reference.torch_reduction(row.name)
    torch.testing.assert_close(reduce(with_identity, (0,)), reduce(x, (0,)), rtol=1e-15, atol=0)


@pytest.mark.parametrize("row", ops.REDUCTIONS.values(), ids=lambda r: r.name)
def test_a_reductions_error_text_is_in_the_language(row: ops.Reduction) -> None:
    assert check_rule(row.error, {"x": NUMBER, "out": NUMBER}).outputs[0].name == "out"


# -- the bound


def problem(graph: Graph, operand: DType, seed: int, k: int = 24) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    m, n = 11, 19
    source = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=source)
        return (x * 20).to(torch.int8) if operand == INT8 else x.to(reference.torch_dtype(operand))

    a, b, inputs = drawn(m, k), drawn(k, n), {}
    for node in graph.inputs():
        if node.op == g.BITS:
            inputs[node.name] = reference.pack(torch.rand(m, n, generator=source) > 0.5)
        else:
            inputs[node.name] = torch.randn([{"m": m, "n": n}[i] for i in node.indices], generator=source)
    return a, b, inputs


def dtypes_of(graph: Graph, operand: DType) -> list[DType]:
    return [output_dtype(graph, o, operand) for o in graph.outputs]


@settings(deadline=None)
@given(programs(tame=True), st.sampled_from((FP32, FP16, BF16, FP8E5M2, INT8)), st.integers(0, 2**32))
def test_the_fp32_reference_lies_within_the_bound(text: str, operand: DType, seed: int) -> None:
    graph = normalise(check(parse(text)))
    a, b, inputs = problem(graph, operand, seed)
    outputs = dtypes_of(graph, operand)
    found = reference.evaluate(graph, a, b, inputs, outputs)
    for output, x, expected in zip(graph.outputs, found, bound.expect(graph, a, b, inputs, outputs, "ieee"), strict=True):
        difference = bound.compare(x, expected)
        assert difference.ok, f"{output.name}: {difference}"


_SIMPLE = [
    "mm", "relu(mm + bias)", "gelu(mm)", "gelu_tanh(mm + bias)", "silu(mm) * gate[m,n]", "sigmoid(mm)", "tanh(mm)", "softplus(mm)", "hardswish(mm)", "exp(tanh(mm))", "dgelu(mm, residual)", "dgelu_tanh(mm, residual)",
    "dsilu(mm, residual)", "dtanh(mm, tanh(residual))", "drelu(mm, mask)", "leaky_relu(mm, 0.1)", "mm / (1 + exp(tanh(bias)))", "sqrt(abs(mm) + 1)", "log(abs(mm) + 1)", "clamp(mm, -1, 1)", "sum(mm, m)", "max(mm, n)", "amax(mm)",
    "logsumexp(mm, n)", "mm * scale_a[m] * scale_b[n]", "elu(mm, 1)", "mish(mm)", "logsigmoid(mm)", "pow(abs(mm) + 1, 1.5)", "softshrink(mm, 0.1) + mm",
]  # fmt: skip


@pytest.mark.parametrize("text", _SIMPLE)
def test_the_bound_is_not_vacuous(text: str) -> None:
    graph = normalise(check(parse(text)))
    a, b, inputs = problem(graph, FP32, seed=1)
    (expected,) = bound.expect(graph, a, b, inputs, [FP32], "ieee")
    share = (expected.bound / expected.value.abs())[expected.value != 0]
    assert share.median() < 1e-3
    assert expected.bound.isfinite().all()
    # and it is not so tight that the last bit of fp32 breaks it
    assert (expected.bound >= expected.value.abs() * 2.0**-25).all()


def test_most_of_what_random_programs_give_is_promised() -> None:
    shares = []
    for seed in range(150):
        graph = normalise(check(parse(write_program(random.Random(seed), most=8, tame=True, casts=()))))
        a, b, inputs = problem(graph, FP32, seed)
        outputs = dtypes_of(graph, FP32)
        found = reference.evaluate(graph, a, b, inputs, outputs)
        for x, expected in zip(found, bound.expect(graph, a, b, inputs, outputs, "ieee"), strict=True):
            assert bound.compare(x, expected).ok
            if expected.unsure is None:
                shares.append((expected.bound / expected.value.abs().clamp(min=1e-2)).median().item())
    assert len(shares) > 150
    assert sum(s < 1e-3 for s in shares) / len(shares) > 0.85


@pytest.mark.parametrize("text", _SIMPLE)
@pytest.mark.parametrize("wrong", ["scaled", "nan", "inf"])
def test_one_wrong_element_is_caught(text: str, wrong: str) -> None:
    graph = normalise(check(parse(text)))
    a, b, inputs = problem(graph, FP32, seed=2)
    (found,) = reference.evaluate(graph, a, b, inputs, [FP32])
    (expected,) = bound.expect(graph, a, b, inputs, [FP32], "ieee")
    assert bound.compare(found, expected).ok
    changed = found.clone()
    at = changed.abs().argmax()
    changed.view(-1)[at] = {"scaled": changed.view(-1)[at] * 1.01, "nan": math.nan, "inf": math.inf}[wrong]
    difference = bound.compare(changed, expected)
    assert not difference.ok
    assert torch.tensor(difference.where).equal(torch.stack(torch.unravel_index(at, found.shape)) if found.dim() else torch.tensor(()))


@pytest.mark.parametrize("text", ["round(mm)", "hardshrink(mm, 1)", "threshold(mm, 1, -5)"])
def test_beside_a_step_both_sides_are_right(text: str) -> None:
    """Within the error of mm another integer is as right; elsewhere the step itself adds nothing."""
    graph = normalise(check(parse(text)))
    a, b = torch.tensor([[1.0, 1.0, 1e-9]]), torch.tensor([[0.5, 1.0, -1.0], [0.5, 1.5, 0.25], [1.0, 1.0, 1.0]])
    a[0, :2] *= {"round(mm)": 0.5}.get(text, 1.0)  # 0.5, 1.25, -0.375
    (expected,) = bound.expect(graph, a, b, {}, [FP32], "ieee")
    far = bound.compare(
        torch.nextafter(expected.value, torch.tensor(torch.inf)).float() + torch.tensor([[{"round(mm)": 1.0}.get(text, 0.0), 0.0, 0.0]]), expected
    )
    assert far.ok
    assert expected.bound[0, 0] > 0.9
    assert (expected.bound[0, 1:] < 1e-5).all()


def test_one_wrong_bit_of_a_mask_is_caught() -> None:
    graph = normalise(check(parse("bitmask(mm > 0)")))
    a, b, inputs = problem(graph, FP32, seed=3)
    (found,) = reference.evaluate(graph, a, b, inputs, dtypes_of(graph, FP32))
    (expected,) = bound.expect(graph, a, b, inputs, dtypes_of(graph, FP32), "ieee")
    assert bound.compare(found, expected).ok
    assert expected.unsure is not None
    assert not expected.unsure.any()
    found[4, 1] ^= 1 << 5
    difference = bound.compare(found, expected)
    assert not difference.ok
    assert difference.where == (4, 13)


def test_a_bit_that_hangs_on_rounding_may_be_either() -> None:
    graph = normalise(check(parse("bitmask(mm > 0)")))
    # 1e-9 beside products of size 1 is less than their rounding
    a, b = torch.tensor([[1.0, 1.0, 1e-9]]), torch.tensor([[1.0], [-1.0], [1.0]])
    for byte in (0, 1):
        (expected,) = bound.expect(graph, a, b, {}, dtypes_of(graph, FP32), "ieee")
        assert bound.compare(torch.tensor([[byte]], dtype=torch.uint8), expected).ok


def test_tf32_is_given_more_room_than_ieee() -> None:
    graph = normalise(check(parse("mm")))
    a, b, inputs = problem(graph, FP32, seed=4)
    (ieee,), (tf32,) = (bound.expect(graph, a, b, inputs, [FP32], p) for p in ("ieee", "tf32"))
    assert (tf32.bound > 20 * ieee.bound).all()


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_values_have_to_arrive(special: float) -> None:
    graph = normalise(check(parse("relu(mm + bias)")))
    a, b, inputs = problem(graph, FP32, seed=5)
    inputs["bias"][3] = special
    (found,) = reference.evaluate(graph, a, b, inputs, [FP32])
    (expected,) = bound.expect(graph, a, b, inputs, [FP32], "ieee")
    assert bound.compare(found, expected).ok
    found[:, 3] = 1.0
    assert not bound.compare(found, expected).ok


def test_a_derivation_reads_as_its_programs() -> None:
    derived = epigen.derive("gelu(mm + bias) + residual")
    assert len(repr(derived)) < 400 and "\n" not in repr(derived)
    for said in (str(derived), repr(derived)):
        assert derived.forward.text in said and derived.backward.text in said and derived.save in said
    assert all(line in str(derived) for line in derived.wiring()) and len(derived.wiring()) >= 1
