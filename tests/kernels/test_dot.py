"""`dot(a, b)`: the product as a node, what is computed of its operands, and the gradients of that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from compiling import compiled, outcomes
from derived import agree_with_autograd
from golden import Golden
from specs import RENDERER, TILED, source, spec_of
from torch import Tensor

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.lower import lower, over_product, signature_of_contiguous
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelSpec
from epigen.db.problem import graph_digest
from epigen.dtypes import BF16, FP16, FP32, INT8, DType
from epigen.errors import CallError, ConfigError, DerivationError
from epigen.ir import bound, reference
from epigen.ir.derive import derive
from epigen.ir.program import graph_of
from epigen.lang.parser import parse
from epigen.perf import limits, model
from epigen.perf.traffic import traffic
from epigen.runtime.ahead import Job
from epigen.runtime.loader import triton_version
from epigen.training.again import call as chain
from epigen.training.layer import Link

# -- dot(a, b) is mm


@pytest.mark.parametrize("text", ["relu({} + bias)", "{}", "z = {} * alpha; z, bitmask(z > 0), bgrad(z), sum(a, k), amax(b, k)", "sum(b, k), {} * {}"])
def test_of_operands_as_they_are_given_it_is_mm(text: str) -> None:
    ours, theirs = text.replace("{}", "dot(a, b)"), text.replace("{}", "mm")
    assert parse(ours) == parse(theirs)
    assert graph_of(ours) == graph_of(theirs) and graph_of(ours).text == graph_of(theirs).text
    assert graph_digest(graph_of(ours)) == graph_digest(graph_of(theirs))
    assert source(ours) == source(theirs)


def test_an_operand_may_have_another_name() -> None:
    assert graph_of("x = a; dot(x, b)") == graph_of("mm") and graph_of("dot(b=b, a=a)") == graph_of("mm")
    assert graph_of("x = relu(a) * norm[k]; dot(x, b)") == graph_of("dot(relu(a) * norm[k], b)")


def test_digests_are_those_of_the_records() -> None:
    """As they were when a product was a leaf."""
    assert {text: graph_digest(graph_of(text)) for text in _DIGESTS} == _DIGESTS


_DIGESTS = {
    "mm": "41bb6fdfc5fc0006",
    "relu(mm + bias)": "bf8b77c839c41d3c",
    "dz = drelu(mm, mask); dz, bgrad(dz)": "163a0432fe6c94ea",
    "mm, sum(a, k), amax(b, k)": "849cf0dbc146b803",
}


def test_digests_tell_what_is_computed() -> None:
    texts = ("mm", "dot(relu(a), b)", "dot(a, relu(b))", "dot(a * u[k], b)", "dot(a * u[m], b)", "dot(a, b * u[k])")
    assert len({graph_digest(graph_of(text)) for text in texts}) == len(texts)
    assert graph_digest(graph_of("dot(a * u[k], b)")) == graph_digest(graph_of("dot(a * v[k], b)"))


# -- what a kernel is


def test_what_does_not_vary_along_k_is_computed_once() -> None:
    a, b = spec_of("dot(a * exp(row[m]) * alpha, b * norm[k])").operands
    assert [line.op for line in a.once] == ["exp"] and [line.op for line in a.lines] == ["mul", "mul"]
    assert [i.name for i in a.inputs] == ["row", "alpha"] and not a.along_k
    assert not b.once and [i.name for i in b.along_k] == ["norm"]


@pytest.mark.parametrize(
    ("operand", "zero"),
    [
        ("relu(a)", True),
        ("relu(a) * norm[k]", True),
        ("-a + abs(a)", True),
        ("cast(a, bf16)", True),
        ("a * row[m]", False),
        ("exp(a)", False),
        ("a - row[m]", False),
    ],
)
def test_past_the_last_k_is_zero(operand: str, zero: bool) -> None:
    """What tensors and inputs are read as there gives 0 by itself, or 0 is put in its place; 0 * inf is NaN, so both operands have to have it."""
    assert spec_of(f"dot({operand}, b)").operands[0].zero == zero
    assert ("tl.where(offs_ak < K" in source(f"dot({operand}, b)")) == (not zero)
    assert "tl.where(offs_ak < K" not in source(f"dot({operand}, b)", k_multiple=64)


@pytest.mark.parametrize("name", [s.name for s in SCHEDULES.values() if not s.computes])
def test_other_schedules_are_refused_by_name(name: str) -> None:
    config = {"library": cases.LIBRARY, "persistent": cases.persistent(), "warp_specialized": cases.warp_specialized()}[name]
    spec, shape, target = _spec("dot(relu(a), b)"), (4096, 4096, 4096), gpus.TARGETS["sm_90"]
    assert f"the schedule {name} multiplies operands as they lie" in limits.unfit(spec, config, shape, target)
    assert limits.unfit(_spec("relu(mm)"), config, shape, target) == "" and name not in Space(spec, shape, target).schedules
    with pytest.raises(ConfigError, match="tiled and split_k"):
        epigen.compile("dot(relu(a), b)", config=config).plan(shape, target=target)


def _spec(text: str, a: DType = FP16, shape: tuple[int, int, int] = (4096, 4096, 4096), layout: str = "nt") -> KernelSpec:
    graph = graph_of(text)
    return lower(graph, signature_of_contiguous(graph, a, a, tuple((n.name, a) for n in graph.inputs()), shape, layout, "ieee"))


_TEXTS = ("dot(relu(a) * norm[k], b)", "relu(dot(a * row[m], b * s[k]) + bias)", "dot(silu(a) * g[m,k], exp(b) * w[k,n])")
_SHAPES = ((4096, 4096, 4096), (16, 4096, 4096), (1000, 1003, 1001), (70000, 64, 8), (1, 1, 1), (8192, 8192, 64))


@pytest.mark.parametrize("target", gpus.TARGETS)
def test_the_rule_and_the_space_choose_what_can_run(target: str) -> None:
    for text, a, shape, layout in itertools.product(_TEXTS, (FP16, BF16, FP32), _SHAPES, ("nn", "nt")):
        spec = _spec(text, a, shape, layout)
        space = Space(spec, shape, gpus.TARGETS[target])
        config = rule.choose(spec, shape, gpus.TARGETS[target]).config
        assert SCHEDULES[config.schedule].computes and space.legal(config) and limits.refusal(spec, config, shape, gpus.TARGETS[target]) == ""
        assert set(space.schedules) <= {"tiled", "split_k"}


@pytest.mark.triton
def test_kernels_compile_ahead() -> None:
    """For each kind of target, in one process."""
    jobs = []
    for target, (text, bits) in itertools.product(("sm_80", "sm_90", "gfx942"), zip(_TEXTS, (32, 64, 32), strict=True)):
        step = 32 if target == "gfx942" else 64  # else as below
        for config, a in ((cases.tiled(64, 64, step, 4, 3), BF16), (cases.split_k(), FP16)):
            jobs.append(Job(RENDERER.render(spec_of(text, a, index_bits=bits), config), gpus.TARGETS[target], "nn"))
    assert all(function.resources.spills == 0 for found in compiled(jobs) for function in found)


def test_a_product_that_is_given_has_no_operands(golden: Golden) -> None:
    with golden.raises(CallError):
        over_product(graph_of("dot(relu(a), b)"))
    graph = over_product(graph_of("relu(mm + bias)"))
    assert graph.product() is None and [n.name for n in graph.inputs()] == ["mm", "bias"]


@pytest.mark.triton
def test_what_gfx942_cannot_transpose_is_never_chosen() -> None:
    """What is refused fails in the oldest Triton, and what is chosen compiles."""
    target, shape, chosen, refused = gpus.TARGETS["gfx942"], (4096, 4096, 4096), [], []
    large = {BF16: cases.tiled(64, 64, 64, 4, 2), FP32: cases.tiled(64, 64, 32, 4, 2)}
    for text, layout in (("dot(a, relu(b) + s[k])", "nn"), ("dot(a * s[k], b)", "tn"), ("dot(a * s[k], b)", "nt"), ("dot(a, b * s[n])", "nn")):
        fails = layout != "nt" and "s[k]" in text
        for a, config in large.items():
            spec = _spec(text, a, shape, layout)
            why = limits.refusal(spec, config, shape, target)
            assert ("where an operand meets a vector along k: 8 are the fewest" in why) == fails
            assert limits.refusal(spec, config, shape, gpus.TARGETS["gfx90a"]) == ""
            chosen.append(Job(RENDERER.render(spec, rule.choose(spec, shape, target).config), target, layout))
            refused += [Job(RENDERER.render(spec, config), target, layout)] * fails
    found = outcomes([*chosen, *refused])
    assert not any(isinstance(one, str) for one in found[: len(chosen)])
    assert len(refused) == 4 and all(("PassManager" in str(one)) == triton_version().startswith("3.6") for one in found[len(chosen) :])


def test_of_8_bits_nothing_is_computed(golden: Golden) -> None:
    with golden.raises(CallError, "call"):
        spec_of("dot(relu(a), b)", INT8)
    eight = torch.ones(4, 4, dtype=torch.int8)
    with golden.raises(CallError, "plan"):
        epigen.compile("dot(relu(a), b)")(eight, eight)
    assert epigen.compile("relu(mm)")(eight, eight).dtype == torch.float32


def test_traffic_counts_what_operands_are_computed_of() -> None:
    m, n, k = shape = (100, 60, 40)
    plain = traffic(spec_of("mm"), shape)
    for text, elements, launches in (
        ("dot(relu(a), b)", 0, 1),
        ("dot(a * u[k], b)", k, 1),
        ("dot(a * u[m,k] * v[m], b)", m * k + m, 2),
        ("dot(a, b * u[k,n])", k * n, 1),
    ):
        found = traffic(spec_of(text), shape)
        assert found.bytes == plain.bytes + 2 * elements
        assert found.unfused_launches == plain.unfused_launches + launches and found.unfused_bytes > plain.unfused_bytes


def test_the_model_counts_what_is_computed_and_loaded() -> None:
    shape, gpu, config = (4096, 4096, 4096), gpus.of_target(gpus.TARGETS["sm_90"]), cases.tiled(128, 128, 64, 8, 3)
    bare, cheap, dear, loaded = (
        model.estimate_us(_spec(text), config, shape, gpu) for text in ("mm", "dot(relu(a), b)", "dot(erf(a), erf(b))", "dot(a * g[m,k], b)")
    )
    assert bare.us < cheap.us < dear.us and cheap.memory_us < loaded.memory_us


@pytest.mark.triton
def test_what_a_block_takes_is_known_beforehand() -> None:
    """Of shared memory no less than it does, lest a kernel be chosen that does not start."""
    config, target = cases.tiled(128, 128, 64, 8, 3), gpus.TARGETS["sm_90"]
    texts = ("dot(relu(a) * norm[k], b)", "dot(a, b * s[k])", "dot(silu(a) * g[m,k], exp(b) * w[k,n])")
    specs = [spec_of(text, BF16, k_multiple=64, layout="nt") for text in texts]
    for spec, (found,) in zip(specs, compiled([Job(RENDERER.render(spec, config), target, "nt") for spec in specs]), strict=True):
        needs = model.resources(spec, config, target)
        assert 0.95 * found.resources.registers <= needs.registers <= 1.3 * found.resources.registers, spec.program
        assert found.resources.shared_bytes <= needs.shared_bytes <= 1.4 * found.resources.shared_bytes, spec.program


# -- values


def test_an_operand_is_rounded_once_to_its_own_dtype() -> None:
    """As torch's own operations in fp32 have it, whose result is rounded before the product."""
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        a, b, norm = torch.randn(9, 17).to(dtype), torch.randn(17, 5).to(dtype), torch.rand(17)
        expected = (torch.exp(a.float()) * norm).to(dtype).float() @ b.float()
        assert torch.equal(epigen.compile("cast(dot(exp(a) * norm[k], b), fp32)")(a, b, norm=norm), expected)


def test_the_bound_covers_an_operand_that_may_be_rounded_to_either_side() -> None:
    """And no more: where what is computed is exact, it is that of a plain product."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 32).half(), torch.randn(32, 6).half()
    (plain,) = bound.expect(graph_of("cast(mm, fp32)"), torch.relu(a), b, {}, [FP32], "ieee")
    (exact,) = bound.expect(graph_of("cast(dot(relu(a), b), fp32)"), a, b, {}, [FP32], "ieee")
    assert torch.equal(plain.value, exact.value) and torch.allclose(plain.bound, exact.bound, rtol=0.1)
    # 1 + 2^-11 lies in the middle between two numbers of fp16: of these each is right
    middle = {"s": torch.full((32,), 1 + 2.0**-11)}
    ones, graph = torch.ones(8, 32).half(), graph_of("cast(dot(exp(a - a) * s[k], b), fp32)")
    (either,) = bound.expect(graph, ones, b, middle, [FP32], "ieee")
    for factor in (1.0, 1 + 2.0**-10):
        assert bound.compare(torch.full((8, 32), factor) @ b.float(), either).ok
    assert not bound.compare(torch.full((8, 32), 1 + 2.0**-9) @ b.float(), either).ok


@pytest.mark.parametrize(("text", "missing"), [("dot(a * u[k], b)", (7,)), ("dot(a * u[m,k], b)", (5, 6)), ("dot(a, b * u[k,n])", (4, 6))])
def test_inputs_have_the_extents_of_their_operand(text: str, missing: tuple[int, ...]) -> None:
    with pytest.raises(CallError, match=r"'u' .*u\["):
        epigen.compile(text)(torch.ones(4, 5), torch.ones(5, 6), u=torch.ones(missing))


# -- gradients

_DERIVED = (
    "dot(relu(a), b)",
    "dot(relu(a) * norm[k], b)",
    "relu(dot(tanh(a) * norm[k] * row[m], b * w[k,n] * norm[k]) + bias) * row[m] * alpha",
    "dot(a * g[m,k] * alpha, exp(b * alpha)) + gate[m,n] * alpha",
    "z = dot(a, b * s[n]); z * z",
    "z = dot(silu(a), b); gelu(z), sum(z, n), bgrad(z)",
    "z = dot(a - mu[m], b) * scale_b[n]; z, bitmask(z > 0)",
)


@pytest.mark.parametrize("text", _DERIVED)
def test_gradients_are_autograds(text: str) -> None:
    agree_with_autograd(text)


def test_programs_of_gradients() -> None:
    derived = derive(graph_of("dot(relu(a) * norm[k], b)"))
    assert derived.backward.text == "dmm = mm; dmm"
    assert {o.operand: o.program.text for o in derived.operands} == {
        "a": "v = relu(x[m,n]); da = drelu(mm * norm[n], ~(v <= 0)); dnorm = bgrad(mm * v); da, dnorm",
        "b": "db = dot(relu(a) * norm[m], b); db",
    }
    assert "a is the forward's a, transposed; b is the gradient of mm" in str(derived)
    assert derive(graph_of("relu(mm)")).operands == ()


def test_only_what_is_wanted_has_a_program(golden: Golden) -> None:
    graph = graph_of("dot(relu(a) * norm[k], b)")
    assert [o.operand for o in derive(graph, wrt=["b"]).operands] == ["b"]
    assert [o.operand for o in derive(graph, wrt=["a"]).operands] == ["a"]
    (only,) = derive(graph, wrt=["norm"]).operands
    assert [x.of for x in only.gradients] == ["norm"]
    assert [o.operand for o in derive(graph, wrt=["mm"]).operands] == ["a", "b"]
    with golden.raises(CallError, "unused"):
        derive(graph_of("relu(mm)"), wrt=["a"])
    with golden.raises(DerivationError, "no gradient"):
        derive(graph_of("dot(round(a * u[k]), b)"), wrt=["u"])


def test_an_operand_by_which_nothing_flows_has_none() -> None:
    assert [o.operand for o in derive(graph_of("dot(round(a), b)")).operands] == ["b"]
    assert derive(graph_of("z = dot(relu(a), b); bitmask(z > 0), residual * 2")).operands == ()


def test_a_program_that_takes_the_product_again_computes_operands_again() -> None:
    assert "dot(relu(a) * norm[k], b)" in derive(graph_of("silu(dot(relu(a) * norm[k], b))"), save="recompute").backward.text


# -- a layer


def _row(t: Tensor) -> Tensor:
    return t[..., None]


_LAYERS: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {
    "dot(relu(a), b)": (lambda x, w: torch.relu(x) @ w.T, {}),
    "relu(dot(relu(a) * norm[k] * s[m], b * v[k,n] * norm[k]) + c[n]) * s[m] * alpha": (
        lambda x, w, norm, s, v, c, alpha: torch.relu((torch.relu(x) * norm * _row(s)) @ (w.T * v * norm[:, None]) + c) * _row(s) * alpha,
        {"norm": "k", "s": "m", "v": "kn", "c": "n", "alpha": ""},
    ),
    "dot(a * g[m,k] * alpha, exp(b * alpha)) + gate[m,n] * alpha": (
        lambda x, w, g, alpha, gate: (x * g * alpha) @ torch.exp(w.T * alpha) + gate * alpha,
        {"g": "mk", "alpha": "", "gate": "mn"},
    ),
    "z = dot(silu(a), b); gelu(z)": (lambda x, w: torch.nn.functional.gelu(torch.nn.functional.silu(x) @ w.T), {}),
}


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("text", _LAYERS)
def test_a_layer_trains(text: str, lead: tuple[int, ...]) -> None:
    function, declared = _LAYERS[text]
    n, k = 6, 7
    torch.manual_seed(0)
    extents = {"k": (k,), "m": lead, "n": (n,), "": (), "mk": (*lead, k), "kn": (k, n), "mn": (*lead, n)}
    given = [torch.randn(*lead, k), torch.randn(n, k), *(torch.rand(extents[indices]) + 0.5 for indices in declared.values())]
    leaves = [t.double().requires_grad_() for t in given]
    for chosen in (leaves, *([leaf] for leaf in leaves)):
        now = [t if any(t is c for c in chosen) else t.detach() for t in leaves]
        ours = epigen.linear(now[0], now[1], epilogue=text, inputs=dict(zip(declared, now[2:], strict=True)))
        theirs = function(now[0], now[1], **dict(zip(declared, now[2:], strict=True)))
        torch.testing.assert_close(ours, theirs)
        grad = torch.randn_like(ours)
        torch.testing.assert_close(torch.autograd.grad(ours, chosen, grad), torch.autograd.grad(theirs, chosen, grad))


@pytest.mark.parametrize("second", ["dot(a * s[k], b)", "mm * 2"])
@pytest.mark.parametrize("first", ["relu(mm)", "relu(dot(tanh(a) * g[k], b))"])
def test_a_chain_trains(first: str, second: str) -> None:
    torch.manual_seed(0)
    x, w, v, g, s = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((4, 7), (6, 7), (5, 6), (7,), (6,)))
    of_first, of_second = ({"g": g} if "g[k]" in first else {}), ({"s": s} if "s[k]" in second else {})
    ours = chain(x, [Link(w, of_first, first), Link(v, of_second, second)])
    hidden = torch.relu((torch.tanh(x) * g if of_first else x) @ w.T)
    theirs = (hidden * s) @ v.T if of_second else (hidden @ v.T) * 2
    leaves = [x, w, v, *of_first.values(), *of_second.values()]
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves))


def test_a_number_and_a_buffer_for_the_weights_gradient() -> None:
    torch.manual_seed(0)
    x, w, buffer = torch.randn(4, 7), torch.randn(6, 7, requires_grad=True), torch.ones(6, 7)
    epigen.linear(x, w, epilogue="dot(relu(a) * alpha, b)", alpha=0.5, main_grad=buffer).sum().backward()
    assert w.grad is None
    torch.testing.assert_close(buffer, 1 + (torch.relu(x) * 0.5).sum(0).expand(6, 7))


def test_a_buffer_takes_what_is_not_rounded() -> None:
    torch.manual_seed(0)
    x, w, buffer = torch.randn(64, 7).bfloat16(), torch.randn(6, 7).bfloat16().requires_grad_(), torch.zeros(6, 7)
    epigen.linear(x, w, epilogue="dot(exp(a), b)", main_grad=buffer).sum().backward()
    torch.testing.assert_close(buffer, torch.exp(x.float()).bfloat16().float().sum(0).expand(6, 7), rtol=1e-6, atol=0)


def test_gradients_have_the_dtypes_of_what_they_are_of() -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(size).bfloat16().requires_grad_() for size in ((4, 7), (6, 7)))
    norm, gate = torch.rand(7, requires_grad=True), torch.rand(4, 7).half().requires_grad_()
    epigen.linear(x, w, epilogue="dot(relu(a) * norm[k] * gate[m,k], b)", inputs={"norm": norm, "gate": gate}).sum().backward()
    leaves: Any = (x, w, norm, gate)
    assert all(t.grad.dtype == t.dtype and t.grad.shape == t.shape for t in leaves)


def test_in_torchs_own_derivatives_it_is_the_reference() -> None:
    x, w = torch.randn(4, 7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    found = torch.func.grad(lambda w: epigen.linear(x, w, epilogue="dot(relu(a), b)").sum())(w)
    torch.testing.assert_close(found, torch.relu(x).sum(0).expand(6, 7))


def test_processes_share_what_operands_are_computed_of() -> None:
    """By rows, by columns, and by parts along k, where each has a summand of the product."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    from epigen.training.sharding import ways

    _, rows, columns, summands = ways("dot(relu(a) * norm[k] * g[m,k], b * w[k,n]) + residual", 2)
    whole = Replicate()
    assert rows.inputs == {"a": Shard(0), "b": whole, "norm": whole, "g": Shard(0), "w": whole, "residual": Shard(0)}
    assert columns.inputs == {"a": whole, "b": Shard(1), "norm": whole, "g": whole, "w": Shard(1), "residual": Shard(1)}
    assert summands.inputs == {"a": Shard(1), "b": Shard(0), "norm": Shard(0), "g": Shard(1), "w": Shard(0), "residual": Partial()}
    assert len(ways("relu(dot(relu(a), b))", 2)) == 3  # which is no sum of the processes'
    assert len(ways("dot(a * alpha, b) + alpha", 2)) == 3  # the operand wants all of alpha


def test_the_reference_broadcasts_what_both_operands_have_of_k() -> None:
    a, b, u = torch.randn(3, 4), torch.randn(4, 4), torch.rand(4)  # of one extent, so that a wrong way round shows
    found = reference.evaluate(graph_of("dot(a * (u[k] + 1), b * (u[k] + 1) * v[n])"), a, b, {"u": u, "v": u}, [FP32])
    torch.testing.assert_close(found[0], (a * (u + 1)) @ (b * (u + 1)[:, None] * u))


def test_the_module_says_what_is_multiplied() -> None:
    text = RENDERER.render(spec_of("dot(relu(a), b)"), TILED).text
    assert "# what is multiplied of a is computed in fp32 and rounded once, to fp16\n" in text and "of b is" not in text
    assert "acc = tl.dot(a_in, b, acc)" in text
