"""Derived programs: their gradients are torch's autograd's, for every way of keeping what they read; and which way is chosen."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import cases
import pytest
import torch
from golden import Golden
from hypothesis import HealthCheck, assume, given, settings
from programs import programs, write_program
from torch import Tensor

import epigen
from bench import gradients
from bench.gradients import Values, derived_gradients
from epigen import api, ops
from epigen.db.problem import graph_digest
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, UINT8, DType
from epigen.errors import CallError, DerivationError
from epigen.ir import autodiff, reference
from epigen.ir import graph as g
from epigen.ir.derivation import ARRIVING, INPUT, NOTHING, SAVE, SAVED, Argument, Derivation, Gradient, Saved
from epigen.ir.derive import derive
from epigen.ir.graph import Graph
from epigen.tuning import suite

M, N, K = 6, 9, 4


def graph_of(text: str) -> Graph:
    return api.graph_of(text)


def normal(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def autograd(graph: Graph, mm: Tensor, inputs: Values, arriving: Values, wanted: Sequence[str]) -> list[Tensor]:
    try:
        return gradients.autograd(graph, mm, inputs, arriving, wanted)
    except RuntimeError as error:
        assume("broadcast shape" not in str(error))
        raise


def agree(text: str, seed: int = 0, rtol: float = 1e-8, **asked: list[str]) -> list[Derivation]:
    """Every possible way of keeping gives torch's gradients, by programs that are canonical text."""
    graph, source = graph_of(text), normal(seed)
    a, b = torch.randn(M, K, generator=source, dtype=torch.float64), torch.randn(K, N, generator=source, dtype=torch.float64)
    inputs = gradients.inputs_of(graph, (M, N), source)
    first = derive(graph, **asked)  # type: ignore[arg-type]
    indices = {o.name: graph.nodes[o.node].indices for o in graph.outputs}
    arriving = {name: torch.randn([{"m": M, "n": N}[i] for i in indices[name]], generator=source, dtype=torch.float64) for name in first.arriving}
    expected = autograd(graph, a @ b, inputs, arriving, [x.of for x in first.gradients])
    ways = []
    for option in first.options:
        derived = derive(graph, save=None if option.save == NOTHING else option.save, **asked)  # type: ignore[arg-type]
        assert derived.save == option.save and derived.saved == option.saved
        for program in (derived.forward, derived.backward):
            assert graph_of(program.text) == program
        assert [o.name for o in derived.forward.outputs[: derived.results]] == [o.name for o in graph.outputs]
        assert [n.name for n in derived.backward.inputs()] == [x.name for x in derived.arguments]
        for gradient, found, wanted in zip(derived.gradients, derived_gradients(derived, a, b, inputs, arriving), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-9, msg=lambda m, w=derived, x=gradient: f"{w.backward.text}, {x}: {m}")
        ways.append(derived)
    assert len({w.save for w in ways}) == len(ways) > 0
    return ways


# -- the gradients are torch's

_CONSTANT = "where((mm > 0.25), 0.75, 0.75)"
_OPERATIONS = sorted({c.text for c in cases.operation_cases() if not c.text.startswith("bitmask")} - {_CONSTANT})


def test_each_operation_is_there() -> None:
    """Every row that gives numbers; of those with several arguments, the others with every set of indices."""
    said = " ".join(_OPERATIONS)
    assert all((op.symbol or f"{op.name}(") in said for op in ops.TABLE.values() if op.result == ops.NUMBER)


_STEPS = [f"{op.name}(mm)" for op in ops.TABLE.values() if op.jumps and len(op.params) == 1]


@pytest.mark.parametrize("text", sorted(set(_OPERATIONS) - set(_STEPS)))
def test_operations(text: str) -> None:
    agree(text)


@pytest.mark.parametrize("text", _STEPS)
def test_what_goes_in_steps_or_is_detached_passes_no_gradient_on(text: str) -> None:
    """torch says 0 of it; a step that all of mm takes is trained in vain, and one beside it changes nothing."""
    assert len(_STEPS) == 5
    with pytest.raises(DerivationError, match=r"\bmm\b"):
        derive(graph_of(text))
    agree(f"mm * {text} + bias")


def test_what_is_computed_of_what_is_detached_needs_no_derivative() -> None:
    """As a scale that is looked for beside what is trained."""
    agree("v = relu(mm + bias); v, max(detach(v), n), amax(round(mm))")
    assert derive(graph_of("v = silu(mm); v, max(detach(v), n)")).backward.text == derive(graph_of("silu(mm)")).backward.text


_E = math.e
_BRANCHES: dict[str, tuple[list[float], list[float]]] = {
    "where(mm > 0, mm, exp(mm) - 1)": ([1000.0, -1.0], [1.0, 1 / _E]),
    "s * where(mm > 0, mm, 3 * (exp(mm) - 1)) + bias": ([1000.0, -1.0], [2.0, 6 / _E]),
    "where(mm > 20, mm, log(1 + exp(mm))) * gate[m,n]": ([1000.0, -1.0], [2.0, 2 / (1 + _E)]),
    "where(mm > 0, sqrt(mm), 0)": ([0.0, 4.0], [0.0, 0.25]),
    "where(mm != 0, 1 / mm, 0) + residual": ([0.0, 4.0], [0.0, -1 / 16]),
    "where(mm > 0, mm, mm * exp(mm))": ([1000.0, -2.0], [1.0, -1 / _E**2]),
    "where(mm > 0, mm, where(mm < -1, exp(mm), 3 * exp(mm)))": ([1000.0, -2.0, -0.5], [1.0, 1 / _E**2, 3 / _E**0.5]),
    "where(mm > 0, where(mm < 50, exp(mm), 1), mm)": ([1000.0, -1.0, 2.0], [0.0, 1.0, _E**2]),
    "drelu(exp(mm), mm < 50)": ([1000.0, 2.0], [0.0, _E**2]),
}
"""mm, and the gradient, where the branch that is not taken, or its slope, is infinite."""


@pytest.mark.parametrize("text", _BRANCHES)
def test_a_branch_that_is_not_taken_passes_0_on(text: str) -> None:
    """However large it is: torch multiplies 0 with it, and has NaN."""
    mm, expected = (torch.tensor([x], dtype=torch.float64) for x in _BRANCHES[text])
    graph, n = graph_of(text), mm.shape[1]
    eye = torch.eye(n, dtype=torch.float64)
    inputs = {x.name: torch.full([{"m": 1, "n": n}[i] for i in x.indices], 2.0, dtype=torch.float64) for x in graph.inputs()}
    for option in derive(graph, wrt=["mm"]).options:
        derived = derive(graph, save=option.save, wrt=["mm"])
        (found,) = derived_gradients(derived, mm, eye, inputs, {"out": torch.ones(1, n, dtype=torch.float64)})
        torch.testing.assert_close(found, expected, msg=lambda m, d=derived: f"{d.save}, {d.backward.text}: {m}")


def test_a_selection_before_what_stays_finite_is_taken_once() -> None:
    assert derive(graph_of("clamp(mm * scale_a[m] + bias, -1, 1)"), wrt=["mm", "bias"], save="recompute").backward.text == (
        "v = mm * scale_a[m] + bias; v1 = where((v >= -1) & (v <= 1), grad[m,n], 0); dmm = v1 * scale_a[m]; dbias = bgrad(v1); dmm, dbias"
    )


_PROGRAMS = (
    "relu(mm + bias)", "gelu(mm + bias)", "gelu_tanh(mm + bias)", "silu(mm + bias)", "tanh(mm + bias)", "sigmoid(mm + bias)", "hardswish(mm + bias)",
    "silu(mm) * gate[m,n]", "z = mm + bias; gelu(z) * gate[m,n] + residual", "mm * scale_a[m] * scale_b[n] + bias", "alpha * mm + beta * residual",
    "relu(mm * scale_a[m] + bias) + residual", "z = mm + bias; relu(z), bitmask(z > 0)", "y = relu(mm + bias); y, y * y + residual",
    "z = mm + bias; z, gelu(z), tanh(z) * gate[m,n]", "where(mask, mm + bias, residual)", "drelu(gelu(mm), bits(keep)) * 1.25",
    "clamp(mm + bias, -1, 1)", "clamp(mm, lo[n], hi[m])", "minimum(maximum(mm, residual), bias)", "leaky_relu(mm + bias, slope)", "abs(mm - residual) ** 3",
    "where(mm > residual, exp(tanh(mm)), residual * 2)", "mm, logsumexp(mm + bias, n)", "z = mm + bias; z, mean(z * z, n), mean(z, m), mean(z)", "mm * extent(n) / extent(m)", "logsumexp(mm * alpha + bias, n)", "z = mm + bias; z, sum(z * z, n), sum(z)",
    "relu(mm), sqrt(sum(mm * mm, n) + 1) * scale_a[m]", "sum(relu(mm + bias) * residual, m)", "y = exp(tanh(mm)); y, sum(y, m) * 2", "z = mm * bias; h = exp(bias * s); z * h + h, sum(z, m)",
    "where(n <= m, mm * alpha, -inf)", "relu(mm) - scale_a[m] * (m - n)", "z = where(n < m, mm + bias, -inf); z, logsumexp(z, n)", "gelu(mm) * (n + 1), sum(where(n == m, mm, 0), n)",
    "tanh(mm * (m - 2) + n)", "z = mm + bias * m; z, sum(z, n) * m, sum(z, m) * n",
    "gelu(mm + pos[m % P, n]) * row[m % P]", "mm * both[m % P, n % Q] + col[n % Q]", "relu(mm + pos[m % P, n]), sum(mm * pos[m % P, n], m)",
)  # fmt: skip


@pytest.mark.parametrize("text", _PROGRAMS)
def test_programs(text: str) -> None:
    # what follows a reduction is a value a row or column, of which no kernel takes sums
    agree(text, **({"wrt": ["mm", "bias"][: 1 + ("bias" in text)]} if "sqrt(sum" in text else {}))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs(most=12, tame=True, casts=()) | programs(most=12, tame=True, casts=(), positions=True) | programs(most=12, tame=True, casts=(), drawn=True))
def test_random_programs(text: str) -> None:
    try:
        agree(text, seed=len(text), rtol=1e-6)
    except DerivationError:
        assume(False)


def test_most_random_programs_have_a_derivative() -> None:
    """Refusals are those of max, amax and the operands' own reductions, and few others."""
    refused = []
    for seed in range(200):
        try:
            derive(graph_of(write_program(random.Random(seed), most=12, tame=True, casts=())))
        except DerivationError as error:
            refused.append({d.message.split(" of ")[0].split(" has ")[0] for d in error.diagnostics})
    assert len(refused) < 100
    assert sum(not messages & {"'max'", "'amax'", "a reduction"} for messages in refused) < 20


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_a_cast_passes_gradients_straight_through(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's `to` does, which also rounds them: here it does not, so that the rest is compared in float64."""
    convert = reference.convert
    monkeypatch.setattr(reference, "convert", lambda x, to: x + (convert(x, to).to(x.dtype) - x).detach())
    for derived in agree(f"h = cast(mm + bias, {dtype}); gelu(h) * h"):
        assert ("cast" in derived.backward.text) == (derived.save == "recompute")
    (plain,) = agree(f"cast(mm + bias, {dtype})")
    assert plain.backward.text == "dbias = bgrad(mm); dmm = mm; dmm, dbias"


@pytest.mark.parametrize("save", SAVE)
def test_relu_at_zero_and_nan_is_as_in_pytorch(save: str) -> None:
    derived = derive(graph_of("relu(mm)"), save=save)
    z = torch.tensor([[0.0, -0.0, float("nan"), 1.0, -1.0, float("inf"), -float("inf"), 5e-324]], dtype=torch.float64, requires_grad=True)
    grad = torch.arange(1.0, 9.0, dtype=torch.float64)[None, :]
    (expected,) = torch.autograd.grad(torch.relu(z), z, grad)
    mm = z.detach()

    def values(graph: Graph, product: Tensor, inputs: Values) -> list[Tensor]:
        results = []
        for node in graph.nodes:
            args = [results[i] for i in node.args]
            # no product: a NaN would spread along its row
            results.append(product if node.op == g.DOT else reference._value(node, args, product, product.T, inputs, torch.float64, 1, 8))
        return [results[o.node] for o in graph.outputs]

    kept = dict(zip([o.name for o in derived.forward.outputs], values(derived.forward, mm, {}), strict=True))
    inputs = {x.name: kept[x.of] if x.source == SAVED else grad for x in derived.arguments}
    (found,) = values(derived.backward, grad if derived.product else mm, inputs)
    assert torch.equal(found, expected)


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize("save", SAVE)
def test_kernels_of_a_derivation_run_as_eager_does(save: str, backend: str) -> None:
    """A layer's step in fp16, the gradient arriving as the product of a next layer; saved values are rounded as eager PyTorch's are."""
    source = normal(3)
    x, w, bias, w2, dy = (
        torch.randn(s, generator=source).half() * scale for s, scale in (((40, 24), 1), ((24, 33), 0.2), ((33,), 1), ((33, 16), 0.3), ((40, 16), 1))
    )
    text = "gelu(mm + bias)" if save in ("preactivation", "recompute") else "relu(mm + bias)"
    derived = epigen.derive(text, save=save)
    config = cases.SMALL if backend == "interpreter" else None
    forward = epigen.compile(derived.forward.text, backend=backend, config=config)
    outputs = forward(x, w, bias=bias)
    kept = dict(zip([o.name for o in derived.forward.outputs], outputs if isinstance(outputs, tuple) else [outputs], strict=True))
    operands = (dy, w2.T) if derived.product else (x, w)
    arguments = {n.name: {INPUT: {"bias": bias}, SAVED: kept, ARRIVING: {"out": dy @ w2.T}}[n.source][n.of] for n in derived.arguments}
    dmm, dbias = epigen.compile(derived.backward.text, backend=backend, config=config)(*operands, **arguments)

    leaves = [t.double().requires_grad_() for t in (x @ w, bias)]
    z = leaves[0] + leaves[1]
    y = torch.nn.functional.gelu(z) if text.startswith("gelu") else torch.relu(z)
    expected = torch.autograd.grad(y, leaves, dy.double() @ w2.double().T)
    torch.testing.assert_close(dmm.double(), expected[0], rtol=2**-9, atol=0.02)
    torch.testing.assert_close(dbias.double(), expected[1], rtol=2**-9, atol=0.05)


# -- which way is chosen


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("relu(mm + bias)", "mask output preactivation recompute"),
        ("leaky_relu(mm + bias, 0.1)", "mask preactivation recompute"),
        ("clamp(mm, -1, 1) + residual", "mask preactivation recompute"),
        ("abs(mm)", "mask preactivation recompute"),
        ("maximum(mm + bias, residual)", "mask preactivation recompute"),
        ("where((mm > 0) & bits(keep), mm, 0)", "mask preactivation recompute"),
        ("tanh(mm + bias)", "output preactivation recompute"),
        ("sigmoid(mm)", "output preactivation recompute"),
        ("exp(mm)", "output preactivation recompute"),
        ("z = mm + bias; z, gelu(z)", "output preactivation recompute"),
        ("gelu(mm + bias)", "preactivation recompute"),
        ("silu(mm) * gate[m,n]", "preactivation recompute"),
        ("logsumexp(mm, n)", "recompute"),
        ("mm + bias", "nothing"),
        ("where(mask, mm, 0) * scale_a + residual", "preactivation recompute"),
        ("cast(mm, fp32), bitmask(mm > 0)", "nothing"),
    ],
)
def test_possible_ways_and_the_choice(text: str, possible: str) -> None:
    derived = derive(graph_of(text))
    assert " ".join(o.save for o in derived.options) == possible
    assert derived.save == possible.split()[0]
    shape = (1024, 512, 256)
    assert min(o.moved_bytes(shape) for o in derived.options) == next(o for o in derived.options if o.save == derived.save).moved_bytes(shape)


def test_bytes_kept_and_moved() -> None:
    """By hand, at M = 100, N = 60, K = 40 in bf16."""
    derived = derive(graph_of("relu(mm + bias)"), BF16)
    found = {o.save: (o.kept_bytes((100, 60, 40)), o.moved_bytes((100, 60, 40))) for o in derived.options}
    tile = 100 * 60 * 2
    assert found == {
        "mask": (100 * 8, 2 * 100 * 8),
        "output": (0, tile),
        "preactivation": (tile, 2 * tile),
        "recompute": (0, (100 * 40 + 40 * 60) * 2 + 2 * tile),
    }
    assert [o.moved_bytes((100, 60, 40)) for o in derive(graph_of("mm"), BF16).options] == [0]


def test_a_mask_or_an_output_that_is_there_serves() -> None:
    derived = derive(graph_of("y = relu(mm); y, bitmask(~(y <= 0))"))
    assert derived.saved == (Saved("out1", False, "mn", UINT8, True),) and derived.forward.text == "y = relu(mm); y, bitmask(~(y <= 0))"
    assert derive(graph_of("cast(tanh(mm), fp32)"), FP16).saved == (Saved("out", False, "mn", FP32, False),)
    # a coarser one than a saved tile would be does not
    assert derive(graph_of("cast(tanh(mm), bf16)"), FP32).save == "preactivation"
    assert derive(graph_of("y = tanh(mm); cast(y, fp8e4m3), y * 2")).save == "preactivation"


def test_a_finished_reduction_is_kept_in_full() -> None:
    derived = derive(graph_of("mm, cast(logsumexp(mm, n), fp16)"))
    assert derived.saved == (Saved("out0", False, "mn", FP16, False), Saved("reduced", True, "m", FP32, False))
    assert derived.forward.text == "v = logsumexp(mm, n); reduced = v; mm, cast(v, fp16), reduced".replace(
        "v = logsumexp(mm, n); reduced = v", "reduced = logsumexp(mm, n)"
    ).replace("cast(v,", "cast(reduced,")
    assert derived.backward.text == "dmm = mm + grad_out1[m] * exp(y[m,n] - reduced[m]); dmm"


def test_a_choice_that_is_not_possible_says_which_are(golden: Golden) -> None:
    with golden.raises(CallError, "mask"):
        derive(graph_of("gelu(mm)"), save="mask")
    with golden.raises(CallError, "masks"):
        derive(graph_of("relu(mm)"), save="masks")
    for save in SAVE:  # where there is nothing to keep, every choice is kept to
        assert derive(graph_of("mm + bias"), save=save).save == NOTHING


@pytest.mark.parametrize("dtype", [INT8, FP8E4M3], ids=str)
def test_operands_without_a_gradient(dtype: DType) -> None:
    with pytest.raises(CallError, match=f"{dtype}"):
        derive(graph_of("relu(mm)"), dtype)


# -- the programs and their wiring


def test_relu_and_bias_are_wired_as_by_hand() -> None:
    derived = epigen.derive("relu(mm + bias)")
    assert derived.forward.text == "out = relu(mm + bias); saved = bitmask(~(out <= 0)); out, saved"
    assert derived.backward.text == "dmm = drelu(mm, mask); dbias = bgrad(dmm); dmm, dbias"
    assert (derived.results, derived.product, derived.arriving) == (1, "out", ("out",))
    assert derived.arguments == (Argument("mask", SAVED, "saved"),)
    assert derived.gradients == (Gradient("mm", "dmm"), Gradient("bias", "dbias"))
    assert derived.saved == (Saved("saved", True, "mn", UINT8, True),)


def test_the_derived_backward_is_the_tuned_one() -> None:
    """Its digest is that of the program which users write and the suite tunes, so that both find one record."""
    derived = derive(graph_of("relu(mm + bias)"))
    written = "dz = drelu(mm, mask); dz, bgrad(dz)"
    assert graph_digest(derived.backward) == graph_digest(graph_of(written))
    tuned = Path(api.__file__).parent.parent / "bench" / "suite_h200.toml"
    assert written in {a.graph.text for a in suite.parse(tuned.read_text())}


def test_wrt_drops_what_is_not_wanted(golden: Golden) -> None:
    """And with it what would have been saved for that."""
    text = "relu(mm + bias) * gate[m,n]"
    assert derive(graph_of(text)).save == "preactivation"
    (mask, *_) = agree(text, wrt=["mm", "bias"])
    assert (mask.save, mask.backward.text) == ("mask", "dmm = drelu(mm * gate[m,n], mask); dbias = bgrad(dmm); dmm, dbias")
    (alone, *_) = agree(text, wrt=["bias"])
    assert alone.backward.text == "dbias = bgrad(drelu(mm * gate[m,n], mask)); dbias" and alone.gradients == (Gradient("bias", "dbias"),)
    with golden.raises(CallError, "bais"):
        derive(graph_of(text), wrt=["bais"])
    with golden.raises(CallError, "int"):
        derive(graph_of(text), wrt=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, 7, b"mm"])
def test_what_is_no_text_is_no_program(text: object) -> None:
    for entry in (epigen.derive, epigen.compile):
        with pytest.raises(CallError, match=rf"{type(text).__name__}"):
            entry(text)  # type: ignore[operator]


def test_of_leaves_outputs_without_a_gradient(golden: Golden) -> None:
    text = "y = relu(mm + bias); y, amax(y), sum(a, k)"
    (mask, *_) = agree(text, of=["y"])
    assert mask.arriving == ("y",) and mask.backward.text == "dmm = drelu(mm, mask); dbias = bgrad(dmm); dmm, dbias"
    assert [o.name for o in mask.forward.outputs] == ["y", "out1", "out2", "saved"]
    with golden.raises(CallError):
        derive(graph_of(text), of="z")


def test_quantised_outputs_and_masks_carry_no_gradient() -> None:
    derived = derive(graph_of("y = relu(mm); cast(y, fp8e4m3), cast(y, int8), bitmask(y > 1), y"))
    assert (derived.arriving, derived.product) == (("y",), "y")


def test_a_gradient_that_is_another_is_not_computed_twice() -> None:
    """Two inputs share one output, and what arrives unchanged at a tensor is passed on as it is."""
    derived = derive(graph_of("gelu(mm + one[m,n] + two[m,n])"))
    assert derived.gradients == (Gradient("mm", "dmm"), Gradient("one", "dmm"), Gradient("two", "dmm"))
    passed = derive(graph_of("gelu(mm) + residual"), save="recompute")
    assert passed.gradients == (Gradient("mm", "dmm"), Gradient("residual", "", passed="out")) and passed.backward.text == "dmm = dgelu(grad[m,n], mm); dmm"
    fused = derive(graph_of("gelu(mm) + residual"))
    assert fused.gradients[1] == Gradient("residual", "dresidual"), "the product is in no tensor yet"


def test_names_keep_out_of_each_others_way() -> None:
    """Inputs and values with every name that the derivation would have chosen."""
    text = "saved = mm + dmm[m,n]; z = relu(saved * dbias[n] + bias) + grad[m,n]; y = z * grad_out1; z, y * y1[m,n]"
    for derived in agree(text):
        names = [*(n.name for n in derived.backward.inputs()), *(o.name for o in derived.backward.outputs)]
        assert len(set(names)) == len(names)
    agree(
        "mask1 = mm > 0; mask0 = mm < 1; where(mask1, mm, where(mask0 & mask, 0, mm * bits(mask2_of) if 0 else mm))".replace(
            " * bits(mask2_of) if 0 else mm", ""
        )
    )


def test_programs_with_long_names_and_many_steps() -> None:
    name = "x" * 64
    agree(f"relu(mm + {name}[m,n]) * {name[:63]}y")
    steps = "; ".join(f"z{i} = silu(z{i - 1}) + bias" for i in range(1, 40))
    agree(f"z0 = mm; {steps}; z39", rtol=1e-6)


def test_what_is_followed_by_more_than_steps_has_a_gradient() -> None:
    """Of random programs: the walk over a graph that says so, and its derivative."""
    in_steps = 0
    for seed in range(300):
        graph = graph_of(write_program(random.Random(seed), 10, tame=True))
        names = [o.name for o in graph.outputs]
        followed, surely = (autodiff.followed(graph, names, steps=steps) for steps in (True, False))
        try:
            wanted = autodiff.gradients(graph, names, followed).wanted
        except DerivationError:  # of all that stands in the way of one kernel
            continue
        assert {name for name, _ in wanted} == surely <= followed
        in_steps += surely != followed
    assert in_steps > 10
