"""Each row of the operation table that has a namesake in torch, against it where functions bend, end or overflow: values and gradients, in fp32.

By the table's own texts, and through generated kernels under Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import epigen
from epigen import ops
from epigen.ir import bound, reference, rules
from epigen.ops import BOOLEAN, NUMBER

INF, NAN = math.inf, math.nan
SLOPE, BEND = 0.01, 1.0


def _around(value: float) -> list[float]:
    """A value, and the fp32 numbers next to it."""
    at = torch.tensor(value)
    return [torch.nextafter(at, torch.tensor(-INF)).item(), value, torch.nextafter(at, torch.tensor(INF)).item()]


ENDS = [0.0, -0.0, INF, -INF, NAN]
KINKS = list(itertools.chain.from_iterable(map(_around, (0.0, 1.0, -1.0, 3.0, -3.0, 20.0, 50.0))))
LARGE = [s * x for x in (1e-38, 1e-30, 0.5, 5.0, 10.0, 88.0, 100.0, 65504.0, 1e10, 1e18, 3e38) for s in (1, -1)]
POINTS = [*ENDS, *KINKS, *LARGE]
FEW = [*ENDS, *_around(0.0), *_around(1.0), -1.0, 3.0, 1e18, -3e38]
"""Of which all pairs are taken."""

NAMESAKES: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "where": torch.where, "minimum": torch.minimum, "maximum": torch.maximum,
    "clamp": torch.clamp, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "erf": torch.erf, "scale": torch.mul,
    "relu": F.relu, "leaky_relu": lambda x, _: F.leaky_relu(x, SLOPE), "gelu": lambda x: F.gelu(x.double()).float(), "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "sigmoid": F.sigmoid, "tanh": F.tanh, "softplus": F.softplus, "hardswish": F.hardswish,
    "drelu": lambda g, p: torch.ops.aten.threshold_backward(g, p.float(), 0.0), "dgelu": torch.ops.aten.gelu_backward,
    "dgelu_tanh": lambda g, z: torch.ops.aten.gelu_backward(g, z, approximate="tanh"), "dsilu": torch.ops.aten.silu_backward,
    "dsigmoid": torch.ops.aten.sigmoid_backward, "dtanh": torch.ops.aten.tanh_backward, "dmish": torch.ops.aten.mish_backward,
    "square": torch.square, "reciprocal": torch.reciprocal, "exp2": torch.exp2, "expm1": torch.expm1, "log1p": torch.log1p, "pow": torch.pow, "sin": torch.sin,
    "cos": torch.cos, "sign": torch.sign, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "detach": torch.detach, "relu6": F.relu6,
    "hardtanh": lambda x, *_: F.hardtanh(x, -BEND, BEND), "hardsigmoid": F.hardsigmoid, "elu": lambda x, _: F.elu(x, SLOPE), "selu": F.selu,
    "celu": lambda x, _: F.celu(x, SLOPE), "mish": F.mish, "softsign": F.softsign, "logsigmoid": F.logsigmoid, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "threshold": lambda x, *_: F.threshold(x, BEND, SLOPE), "softshrink": lambda x, _: F.softshrink(x, BEND), "hardshrink": lambda x, _: F.hardshrink(x, BEND),
    "tanhshrink": F.tanhshrink, "prelu": lambda x, _: F.prelu(x, torch.tensor([SLOPE])),
}  # fmt: skip
"""gelu in double precision: oneDNN, which some CPUs take it from in fp32, has NaN at infinity and infinity at 3e38 (torch 2.13)."""

ROWS = [op for op in ops.TABLE.values() if op.result == NUMBER and op.group != "rounded"]
DIFFERENTIABLE = [op for op in ROWS if op.group != "derivative"]
CONSTANT = {("leaky_relu", "slope"): SLOPE, ("prelu", "slope"): SLOPE, ("elu", "alpha"): SLOPE, ("celu", "alpha"): SLOPE, ("hardtanh", "lo"): -BEND, ("hardtanh", "hi"): BEND,
            ("threshold", "least"): BEND, ("threshold", "value"): SLOPE, ("softshrink", "width"): BEND, ("hardshrink", "width"): BEND}  # fmt: skip
"""Parameters that are a number in torch, and have no gradient there."""


def test_each_row_of_numbers_has_a_namesake() -> None:
    assert {op.name for op in ROWS} == NAMESAKES.keys()


def arguments(op: ops.Op) -> dict[str, Tensor]:
    numbers = [p for p in op.params if p.kind == NUMBER and (op.name, p.name) not in CONSTANT]
    drawn = itertools.product(*{1: [POINTS], 2: [FEW] * 2, 3: [[*ENDS, 1.0, -3.0]] * 3}[len(numbers)])
    columns = dict(zip((p.name for p in numbers), torch.tensor(list(drawn)).unbind(1), strict=True))
    size = len(next(iter(columns.values())))
    return {
        p.name: _boolean(size) if p.kind == BOOLEAN else columns.get(p.name, torch.full((size,), CONSTANT.get((op.name, p.name), 0.0))).contiguous()
        for p in op.params
    }


def _boolean(size: int) -> Tensor:
    return torch.arange(size) % 2 == 0


def same(found: Tensor, expected: Tensor, args: dict[str, Tensor], what: str) -> None:
    """But for rounding, and for zeros' signs."""
    wrong = ~torch.isclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    if what.startswith("the gradient of hardswish"):  # at NaN torch's vector loop on a CPU has NaN, and its other loops what arrives, as epigen has
        wrong &= ~args["x"].isnan()
    if "softsign" in what or "quick_gelu" in what:  # finite where torch, which composes them, has inf / inf or 0 * inf
        wrong &= ~expected.isnan() | args["x"].isnan()
    first = {name: x[wrong][:4].tolist() for name, x in args.items()}
    assert not wrong.any(), f"{what} at {first}: {found[wrong][:4].tolist()}, and torch has {expected[wrong][:4].tolist()}"


@pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)
def test_values_are_torchs(op: ops.Op) -> None:
    args = arguments(op)
    same(reference.torch_function(op.name)(*args.values()), NAMESAKES[op.name](*args.values()), args, op.name)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
@pytest.mark.parametrize("arriving", [1.0, -2.5])
def test_gradients_are_torchs(op: ops.Op, arriving: float) -> None:
    args = arguments(op)
    leaves = {name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in args.items()}
    out = NAMESAKES[op.name](*leaves.values())
    grad = torch.full_like(out, arriving).detach()
    for p, rule in zip(op.params, rules.gradients(op.name), strict=True):
        if rule is None or (op.name, p.name) in CONSTANT:
            continue
        (expected,) = torch.autograd.grad(out, leaves[p.name], grad, retain_graph=True)
        found = bound.evaluate_rule(rule, args | {"grad": grad, "out": out.detach()}).float()
        same(found, expected, args, f"the gradient of {op.name} to {p.name}")


# -- the generated kernels


KERNELS = {
    **{op.name: f"{op.name}(mm)" for op in ROWS if op.group == "activation" and len(op.params) == 1},
    "leaky_relu": f"leaky_relu(mm, {SLOPE})", "abs": "abs(mm)", "minimum": "minimum(mm, y[m,n])", "maximum": "maximum(mm, y[m,n])",
    "clamp": "clamp(mm, lo[m,n], hi[m,n])",
}  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what overflows
def test_generated_kernels_have_torchs_values_and_gradients(name: str) -> None:
    """Over a product that is there, for one that is computed would be NaN in a whole row."""
    op, text = ops.TABLE[name], KERNELS[name]
    args = arguments(op)
    tiles = {n: x[None].contiguous() for n, x in args.items() if (name, n) not in CONSTANT}
    leaves = {n: x.clone().requires_grad_() for n, x in tiles.items()}
    x, others = tiles[op.params[0].name], {n: t for n, t in tiles.items() if n != op.params[0].name}
    out = NAMESAKES[name](*leaves.values(), *[None] * (name == "leaky_relu"))
    grad = torch.full_like(out, -2.5)
    same(run(text, x, **others)[0][0], out.detach()[0], args, text)
    derived = epigen.derive(text, dtype="fp32")
    forward = dict(zip((o.name for o in derived.forward.outputs), run(derived.forward.text, x, **others), strict=True))
    sources = {"input": others, "output": forward, "gradient": {"out": grad}}
    given = {a.name: sources["output" if a.source == "saved" else a.source][a.of] for a in derived.arguments}
    found = run(derived.backward.text, grad, **given)
    results = dict(zip((o.name for o in derived.backward.outputs), found, strict=True))
    wanted = dict(zip(("mm", *others), torch.autograd.grad(out, list(leaves.values()), grad), strict=True))
    for g in derived.gradients:
        same(results[g.output][0], wanted[g.of][0], args, f"the gradient of {text} to {g.of}")


def run(text: str, mm: Tensor, **inputs: Tensor) -> list[Tensor]:
    found = epigen.compile(text, backend="interpreter").over(mm, **inputs)
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.triton
@pytest.mark.parametrize(("text", "name"), [("gelu(mm)", "gelu"), ("dgelu(mm, z[m,n])", "dgelu"), ("dgelu_tanh(mm, z[m,n])", "dgelu_tanh")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_forms_for_16_bits_are_finite_where_torchs_are(text: str, name: str) -> None:
    points = torch.tensor(POINTS).half()[None]
    expected = NAMESAKES[name](*([points.float()] if name == "gelu" else [torch.ones_like(points).float(), points.float()]))
    given = {} if name == "gelu" else {"z": points}
    (found,) = run(text, points if not given else torch.ones_like(points), **given)
    finite = expected.isfinite() & (expected.abs() < 65504)
    torch.testing.assert_close(found.float()[finite], expected[finite], rtol=2e-3, atol=2e-3)


# -- functions of torch that are several rows


@pytest.mark.parametrize(
    "function",
    [
        lambda mm: torch.clamp_min(mm, 0.5), lambda mm: torch.clamp_max(mm, 0.5), lambda mm: mm.clamp(min=-1.0), lambda mm: mm.clamp(max=3.0),
        lambda mm: mm.clamp(-1.0, 3.0),
    ],
    ids=["clamp_min", "clamp_max", "clamp(min)", "clamp(max)", "clamp"],
)  # fmt: skip
def test_imported_functions_have_torchs_values_and_gradients(function: Callable[[Tensor], Tensor]) -> None:
    """As epilogues of a product with 1, which leaves every value as it is."""
    x = torch.tensor(POINTS)[:, None]
    given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = epigen.linear(given, torch.ones(1, 1), epilogue=function), function(plain)
    for y in (found, expected):
        y.backward(torch.full_like(y, -2.5))
    assert given.grad is not None and plain.grad is not None
    same(found.detach(), expected.detach(), {"x": x}, "the value")
    same(given.grad, plain.grad, {"x": x}, "the gradient")
