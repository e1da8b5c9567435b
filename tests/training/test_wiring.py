"""How a layer's programs are wired into autograd, in float64: exact enough for random programs, whose gradients are then torch's.

Kernels are put by that compute in float64; what training does in the dtypes that it is for is in tests/training/test_linear.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from programs import programs
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import epigen
from epigen import api
from epigen.dtypes import FP32, DType
from epigen.errors import CallError, DerivationError
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.derivation import NOTHING, SAVE
from epigen.training import again, library, plan
from epigen.training.again import call as chain
from epigen.training.layer import Link

M, K, N = 6, 4, 9
Values = dict[str, Tensor]


def normal(*size: int, seed: int = 0, grad: bool = True) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_(grad)


class Exact:
    """A kernel that computes in float64."""

    def __init__(self, graph: g.Graph):
        self.graph = graph

    def __call__(self, a: Tensor, b: Tensor, **inputs: Any) -> list[Tensor]:
        return outputs_of(self.graph, a, b, inputs)

    def over(self, mm: Tensor, **inputs: Any) -> list[Tensor]:
        return outputs_of(self.graph, mm, torch.eye(mm.shape[1], dtype=torch.float64), inputs)

    def bound(self, *_given: Any) -> None:
        """It launches nothing that could be launched again."""


def outputs_of(graph: g.Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> list[Tensor]:
    values = reference.node_values(graph, a, b, inputs, torch.float64)
    shaped = [
        values[o.node] if graph.nodes[o.node].kind == g.PACKED else reference.shaped(values[o.node], graph.nodes[o.node].indices, a.shape[0], b.shape[1])
        for o in graph.outputs
    ]
    return [t.clone() for t in shaped]


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    def dtype(given: torch.dtype, what: str) -> DType:
        return FP32 if given == torch.float64 else plan_dtype(given, what)

    plan_dtype = plan._dtype
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(library, "kernel", lambda text, _tune, _options=None: Exact(api.graph_of(text)))
        patched.setattr(plan, "_dtype", dtype)
        yield
    plan._steps.cache_clear()  # of what it remembers of float64
    again._ways.cache_clear()


def inputs_of(text: str, seed: int) -> Values:
    found: Values = {}
    for i, node in enumerate(api.graph_of(text).inputs()):
        drawn = normal(*({"m": M, "n": N, "k": K}[x] for x in node.indices), seed=seed + i)
        found[node.name] = reference.pack(drawn.detach() > 0) if node.op == g.BITS else drawn
    return found


def agree(text: str, seed: int = 0, rtol: float = 1e-8, **options: Any) -> None:
    """With torch's autograd of the same operations: a layer by itself, and between two others in a chain."""
    graph = api.graph_of(text)
    x, w = normal(M, K, seed=seed + 91), normal(N, K, seed=seed + 92)
    first, last = normal(K, K, seed=seed + 93), normal(5, N, seed=seed + 94)
    inputs = inputs_of(text, seed)
    leaves = [t for t in (x, w, *inputs.values()) if t.requires_grad]
    compare(epigen.linear(x, w, epilogue=text, **options, **inputs), outputs_of(graph, x, w.t(), inputs), leaves, rtol)
    if [graph.nodes[o.node].indices for o in graph.outputs] != ["mn"] or graph.nodes[graph.outputs[0].node].kind != "number":
        return
    found = chain(x, [Link(first, {}, "tanh(mm)"), Link(w, inputs, text, options.get("save")), Link(last, {}, "mm")])
    expected = outputs_of(graph, torch.tanh(x @ first.t()), w.t(), inputs)[0] @ last.t()
    compare(found, [expected], [*leaves, first, last], rtol)


def compare(found: Any, expected: list[Tensor], leaves: list[Tensor], rtol: float) -> None:
    results = [found] if isinstance(found, Tensor) else list(found)
    differentiable = [i for i, t in enumerate(expected) if t.requires_grad]
    for t, e in zip(results, expected, strict=True):
        torch.testing.assert_close(t.detach(), e.detach(), rtol=rtol, atol=1e-9)
    grads = [torch.randn(expected[i].shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in differentiable]
    asked: dict[str, Any] = {"grad_outputs": grads, "allow_unused": True, "materialize_grads": True}
    wanted = torch.autograd.grad([expected[i] for i in differentiable], leaves, **asked)
    for t, e in zip(torch.autograd.grad([results[i] for i in differentiable], leaves, **asked), wanted, strict=True):
        torch.testing.assert_close(t, e, rtol=rtol, atol=1e-9)


PROGRAMS = (
    "mm", "mm + bias", "relu(mm + bias)", "gelu(mm + bias)", "silu(mm) * gate[m,n]", "tanh(mm + bias)", "relu(mm * scale_a[m] + bias) + residual",
    "alpha * mm + beta * residual", "z = mm + bias; relu(z), bitmask(z > 0)", "y = relu(mm + bias); y, y * y + residual", "z = mm + bias; z, gelu(z), sum(z, n), sum(z)",
    "logsumexp(mm * alpha + bias, n)", "where(mask, mm + bias, residual)", "clamp(mm, lo[n], hi[m])", "gelu(mm + one[m,n] + two[m,n])", "gelu(mm) + residual", "mm + residual",
    "mm, sum(gelu(residual), m)", "out0 = mm; saved[m,n] + out0 * dmm[n]",
    "silu(mm) * dot(a, up[k,n])", "g = mm + bias; u = dot(a, up[k,n]) + shift[n]; gelu(g) * u + residual, u", "mm + dot(a, up[k,n])", "relu(mm) - silu(dot(a, up[k,n]))",
    "where(n <= m, mm + bias, -1e4)", "gelu(mm) - scale_a[m] * (m - n)", "z = where(n < m, mm, -inf); logsumexp(z, n) - sum(where(n == scale_a[m], mm, 0), n)",
)  # fmt: skip


@pytest.mark.parametrize("save", [None, *SAVE])
@pytest.mark.parametrize("text", PROGRAMS)
def test_gradients_are_torchs(text: str, save: str | None) -> None:
    possible = [o.save for o in epigen.derive(text).options]
    if save is None or save in possible or possible == [NOTHING]:
        agree(text, save=save)
    else:
        with pytest.raises(CallError, match=f"save='{save}'"):
            agree(text, save=save)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs(most=10, tame=True, casts=()) | programs(most=6, tame=True, casts=(), second=True))
@example("hardtanh(alpha, mm, mm)")  # where both bounds are one, torch gives neither a gradient to what it raises
@example("clamp(alpha, mm, mm)")
@example("sign(mm), sum(a, k)")
def test_gradients_of_random_programs(text: str) -> None:
    try:
        agree(text, seed=len(text), rtol=1e-6)
    except DerivationError:
        assume(False)
    except RuntimeError as error:
        assume("broadcast shape" not in str(error))  # torch's own clamp fails where x is broadcast (2.13)
        raise


@pytest.mark.parametrize("save", [None, "recompute"])
def test_gradcheck(save: str | None) -> None:
    sizes = (3, 4, 5, 2)
    weights = [normal(n, k, seed=n) for k, n in itertools.pairwise(sizes)]
    gate, row, s = normal(6, 5, seed=8), normal(6, seed=9), normal(seed=10)

    def run(x: Tensor, first: Tensor, second: Tensor, third: Tensor, gate: Tensor, row: Tensor, s: Tensor) -> Tensor:
        layers = [
            Link(first, {"scale_a": row}, "silu(mm * scale_a[m])", save),
            Link(second, {"gate": gate, "s": s, "t": 0.5}, "gelu(s * mm + t) * gate[m,n]", save),
            Link(third, {}, "tanh(mm)", save),
        ]
        found: Tensor = chain(x, layers)
        return found

    assert torch.autograd.gradcheck(run, (normal(6, 3, seed=1), *weights, gate, row, s))


@pytest.mark.parametrize("wanted", [w for n in range(6) for w in itertools.combinations(("x", "w1", "b1", "w2", "b2"), n)], ids="+".join)
@pytest.mark.parametrize("save", [None, "recompute"])
def test_only_what_requires_a_gradient_gets_one(wanted: tuple[str, ...], save: str | None) -> None:
    """And only what that needs is computed: frozen weights, frozen first layers, biases alone."""
    tensors = {"x": (M, K), "w1": (N, K), "b1": (N,), "w2": (5, N), "b2": (5,)}
    t = {name: normal(*size, seed=i, grad=name in wanted) for i, (name, size) in enumerate(tensors.items())}
    found = chain(t["x"], [Link(t["w1"], {"bias": t["b1"]}, "gelu(mm + bias)", save), Link(t["w2"], {"bias": t["b2"]}, "tanh(mm + bias)", save)])
    expected = torch.tanh(F.linear(F.gelu(F.linear(t["x"], t["w1"], t["b1"])), t["w2"], t["b2"]))
    assert found.requires_grad == bool(wanted)
    if wanted:
        compare(found, [expected], [t[name] for name in wanted], 1e-8)
