"""Reductions over k that tiles are computed of: norms before a product, in its kernel, and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, get_type_hints

import batched
import cases
import pytest
import torch
import zoo
from compiling import compiled
from derived import agree_with_autograd
from golden import Golden
from specs import RENDERER, TILED, source, spec_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen import steps
from epigen.codegen.lower import lower, over_product, signature_of_contiguous
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.db.problem import Problem, epilogue_kind
from epigen.dtypes import BF16, FP16, FP32, DType
from epigen.errors import CallError, ConfigError, DerivationError
from epigen.ir.derive import derive
from epigen.ir.program import graph_of
from epigen.perf import limits, model
from epigen.perf.traffic import traffic
from epigen.runtime.ahead import Job
from epigen.training.again import call as chain
from epigen.training.layer import Link

RMS = "dot(a * norm[k], b) * rsqrt(mean(a * a, k) + eps)"
FOLDED = "mu = mean(a, k); (mm - mu * colsum[n]) * rsqrt(mean(a * a, k) - mu * mu + eps) + shift[n]"
GATED = "r = rsqrt(mean(a * a, k) + eps); g, u = halves(dot(a * norm[k], b)); silu(g * r) * (u * r)"
SCALED = "mm / maximum(amax(abs(a), k), 1e-12)"
LAYER, SM_90 = (4096, 4096, 4096), gpus.TARGETS["sm_90"]


# -- what a kernel is


def test_what_is_carried_along() -> None:
    spec = spec_of("r = rsqrt(mean(a * a * u[k] * exp(s), k)); z = mm * r + sum(b, k); z, r, sum(z, n) * r, sum(a, k)")
    of_a, of_b = spec.carried
    assert (of_a.row, of_a.operand, of_a.zero, [i.name for i in of_a.along_k]) == ("sum", "a", False, ["u"])  # 0 * inf is NaN
    assert [line.op for line in of_a.once] == ["exp"] and [line.op for line in of_a.lines] == ["mul", "mul", "mul"]
    assert (of_b.operand, of_b.value, of_b.zero, of_b.inputs, of_b.lines) == ("b", "b", True, (), ())
    assert [s.name for s in spec.vectors] == ["r"]  # which the tiles have; what no tile needs a finishing kernel reduces
    (finish,) = spec.finishes
    assert sorted((s.row, s.operand) for s in finish.sources) == [("sum", ""), ("sum", "a"), ("sum", "a")]
    kind = epilogue_kind(spec)
    assert kind == "load:k,scalar store:m,mn reduce:n,a,a carry:a,b" and get_type_hints(Problem, include_extras=True)["kind"].__metadata__[0](kind) == kind


def test_what_the_loop_has_of_the_product_is_not_computed_again() -> None:
    spec = spec_of("x = silu(a) * norm[k]; dot(x, b) * rsqrt(sum(x * x, k))")
    (carried,) = steps.carried(spec, TILED)
    assert [line.op for line in carried.lines] == ["mul"] and not carried.inputs and not carried.widened and not carried.offsets
    assert source("mm * sum(a, k)").count("a = a.to(tl.float32)") == 1 and "tl.dot(a, b, acc)" in source("mm * sum(a, k)")


@pytest.mark.parametrize(("text", "bounded"), [("sum(a * a, k)", False), ("sum(exp(a), k)", True), ("max(a, k)", True), ("amax(a, k)", False)])
def test_what_lies_past_the_last_k_does_not_count(text: str, bounded: bool) -> None:
    assert ("tl.where(offs_ak < K" in source(f"mm * {text}")) == bounded
    assert "offs_ak < K" not in source(f"mm * {text}", k_multiple=64)


def test_a_row_value_is_stored_by_one_tile() -> None:
    text = source("r = sqrt(sum(a * a, k)); mm / r, r")
    assert text.count("if pid_n == 0:") == 1 and "finish" not in text


_REFUSED: tuple[tuple[str, KernelConfig, str], ...] = (
    (FOLDED, cases.LIBRARY, "leaves the loop over k to the vendor: tiled and persistent can"),
    (SCALED, cases.LIBRARY, "tiles are computed of amax over k of what is computed of a, and the schedule library leaves"),
    (SCALED, cases.split_k(), "of which each part along k of split_k would have a part"),
    (SCALED, cases.warp_specialized(), "has operands in shared memory alone"),
    ("mm * sum(a, k)", cases.mixed_input(), "multiplies a weight of fewer bits"),
    ("mm * sum(a * row[m], k)", cases.persistent(), "with row, which varies along m"),
    ("mm * sum(b, k)", cases.persistent(subtiles=2), "subtiles=1 is needed"),
)


@pytest.mark.parametrize(("text", "config", "why"), _REFUSED)
def test_what_cannot_carry_them_is_refused(text: str, config: KernelConfig, why: str) -> None:
    assert why in limits.unfit(spec_of(text), config, LAYER, SM_90)
    with pytest.raises(ConfigError, match=why.partition("(")[0]):
        epigen.compile(text, config=config).plan(LAYER, dtype=BF16, target=SM_90)


def _spec(text: str, a: DType, shape: tuple[int, ...], layout: str = "nt") -> KernelSpec:
    graph = graph_of(text)
    return lower(graph, signature_of_contiguous(graph, a, a, tuple((n.name, a) for n in graph.inputs()), shape, layout, "ieee"))


_SHAPES = (LAYER, (16, 4096, 4096), (1000, 1003, 1001), (70000, 64, 8), (1, 1, 1), (8192, 8192, 64))


@pytest.mark.parametrize("target", gpus.TARGETS)
def test_the_rule_and_the_space_choose_what_can_run(target: str) -> None:
    for text, a, shape in itertools.product((RMS, FOLDED, GATED, "mm * sum(b * s[n], k)"), (FP16, FP32), _SHAPES):
        spec = _spec(text, a, shape)
        space, config = Space(spec, shape, gpus.TARGETS[target]), rule.choose(spec, shape, gpus.TARGETS[target]).config
        assert SCHEDULES[config.schedule].carries and space.legal(config) and limits.refusal(spec, config, shape, gpus.TARGETS[target]) == ""
        assert set(space.schedules) <= {"tiled", "persistent"}


@pytest.mark.triton
def test_kernels_compile_ahead_without_a_spill() -> None:
    """And take no more shared memory than is known beforehand."""
    jobs, configs = [], []
    for target, text in itertools.product(("sm_80", "sm_90", "gfx942"), (RMS, FOLDED)):
        configs.append((cases.tiled(64, 64, 32 if target == "gfx942" else 64, 4, 3), target, spec_of(text, BF16, layout="nt", tma=("a", "b", "out"))))
    plain = spec_of(FOLDED, BF16, k_multiple=64, layout="nt", tma=("a", "b", "out"))
    configs += [(cases.persistent(128, 128, 64, 8, 3, flatten=f, subtiles=s), "sm_90", plain) for f, s in ((1, 1), (0, 2))]
    jobs = [Job(RENDERER.render(spec, config), gpus.TARGETS[target], "nt") for config, target, spec in configs]
    for (config, target, spec), (found,) in zip(configs, compiled(jobs), strict=True):
        assert found.resources.spills == 0
        assert found.resources.shared_bytes <= model.resources(spec, config, gpus.TARGETS[target]).shared_bytes


def test_traffic_counts_what_is_spared() -> None:
    m, n, k = shape = (100, 60, 40)
    plain, carried, finished = (traffic(spec_of(text), shape) for text in ("mm", "mm * sum(a * a, k)", "mm, sum(a * a, k)"))
    assert (carried.bytes, carried.launches) == (plain.bytes, 1)
    assert finished.bytes == plain.bytes + 2 * m * k + 4 * m and finished.launches == 2
    # torch squares, adds up, and multiplies the product
    assert carried.unfused_launches == plain.unfused_launches + 3
    assert carried.unfused_bytes - plain.unfused_bytes == 2 * (2 * m * k) + (2 * m * k + 4 * m) + (2 * 2 * m * n + 4 * m)


def test_rows_of_an_invariant_program_have_one_config() -> None:
    """A row is added up a step at a time, and steps are the config's."""
    for text, one in ((FOLDED, True), ("mm * sum(b, k)", True), ("relu(mm), sum(a * a, k)", False), ("relu(mm)", False)):
        assert limits.one_config(spec_of(text, invariant=True), SM_90) == one, text
    assert "sum_in_order(" in source(FOLDED, invariant=True)


@pytest.mark.triton
def test_rows_of_an_invariant_program_have_the_same_bits() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(40, 72).half(), torch.randn(72, 33).half()
    kernel = epigen.compile("r = rsqrt(mean(a * a, k) + 1); mm * r, r", backend="interpreter", invariant="m", config=cases.SMALL)
    whole = kernel(a, b)
    for first, count in ((0, 1), (7, 17)):
        part = kernel(a[first : first + count], b)
        assert all(torch.equal(x[first : first + count], y) for x, y in zip(whole, part, strict=True))


# -- calls


def test_a_product_that_is_given_has_none_of_them(golden: Golden) -> None:
    for text, name in ((SCALED, "reduced"), ("mm * extent(k)", "counted")):
        with golden.raises(CallError, name):
            over_product(graph_of(text))


@pytest.mark.triton
@pytest.mark.parametrize("config", [cases.SMALL, cases.persistent(64, 16, 32)], ids=str)
def test_of_each_product_of_a_batch(config: KernelConfig) -> None:
    for leads in batched.LEADS:
        a, b, inputs = batched.given(*leads)
        y, r = epigen.compile("r = sum(a * a, k); mm * r + bias, r * 2", backend="interpreter", config=config)(a, b, bias=inputs["bias"])
        rows, bias = (a * a).sum(-1, keepdim=True), inputs["bias"]
        expected = a @ b * rows + (bias[..., None, :] if bias.dim() > 1 else bias)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(r, (2 * rows[..., 0]).expand(r.shape))


@pytest.mark.triton
def test_of_groups() -> None:
    """Of rows, where each has a right operand of its own, and along k, of which each has a part."""
    torch.manual_seed(0)
    a, b, ends = torch.randn(40, 24), torch.randn(3, 24, 20), torch.tensor([7, 7, 40], dtype=torch.int32)
    kernels = [
        epigen.compile("r = sum(a * a, k); mm / r + sum(b * s[k], k), r", backend=backend, config=cases.SMALL if backend else None)
        for backend in ("interpreter", None)
    ]
    s = torch.rand(24)
    for kernel in kernels:
        y, r = kernel(a, b, groups=ends, s=s)
        rows, columns = (a * a).sum(1), (b * s[:, None]).sum(1)
        owner = torch.tensor([0] * 7 + [2] * 33)
        torch.testing.assert_close(y, torch.einsum("mk,mkn->mn", a, b[owner]) / rows[:, None] + columns[owner], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(r, rows)
    x, w = torch.randn(40, 24).T, torch.randn(40, 20)
    for backend in ("interpreter", None):
        y, r = epigen.compile("r = max(a, k); mm - r, r", backend=backend, config=cases.SMALL if backend else None)(x, w, groups=ends)
        for g, (begin, end) in enumerate(((0, 7), (7, 40))):
            at = (0, 2)[g]
            torch.testing.assert_close(r[at], x[:, begin:end].amax(1))
            torch.testing.assert_close(y[at], x[:, begin:end] @ w[begin:end] - r[at][:, None], rtol=1e-4, atol=1e-4)


def test_a_group_without_rows_has_no_tile_that_could_store() -> None:
    spec = spec_of("c = sum(b, k); mm * c, c", batched=True, grouped="m")
    assert "a group without rows has no tile, which would store c" in limits.unfit(spec, TILED, LAYER, SM_90)


@pytest.mark.triton
def test_a_row_value_is_there_where_no_tile_is() -> None:
    a, b = torch.randn(5, 8), torch.randn(8, 0)
    y, r = epigen.compile("r = sum(a * a, k); mm * r, r", backend="interpreter")(a, b)
    assert y.shape == (5, 0)
    torch.testing.assert_close(r, (a * a).sum(1))


def test_no_input_that_other_tiles_read_is_overwritten(golden: Golden) -> None:
    row = torch.ones(4)
    with golden.raises(CallError):
        epigen.compile("r = sum(a * a, k) + row[m]; mm * r, r")(torch.ones(4, 5), torch.ones(5, 6), row=row, out=(torch.empty(4, 6), row))


def test_processes_share_them() -> None:
    """By rows and by columns; parts along k have parts of what is then no sum of theirs."""
    from torch.distributed.tensor import Replicate, Shard

    from epigen.training.sharding import ways

    _, rows, columns = ways(RMS, 2)
    assert (rows.inputs["a"], rows.inputs["norm"], columns.inputs["a"], columns.inputs["b"]) == (Shard(0), Replicate(), Replicate(), Shard(1))
    assert len(ways("mm + extent(k)", 2)) == 3 and len(ways("mm * extent(n)", 2)) == 3 and len(ways("mm + sum(a, k)", 2)) == 4


# -- gradients

_DERIVED = (
    RMS.replace("eps", "1e-6"),
    FOLDED.replace("eps", "1e-3"),
    "r = rsqrt(sum(square(a), k)); gelu(mm * r + bias), r, log(r)",
    "x = silu(a) * norm[k]; dot(x, b) * logsumexp(x * g[m,k], k)",
    "mm * sum(b * s[n], k) / (1 + sum(square(b), k)) + sum(a * row[m], k)",
    "mm * (1 + detach(amax(a, k))) * sum(a, k)",
    "r = mean(a * a, k) * extent(n); z = mm * r; z, sum(z, n) * r, bgrad(z)",
    "x = relu(a) * norm[k]; silu(dot(x, b)) * dot(x, up[k,n])",
    "r = sqrt(mean(a * a, k) + 1); silu(dot(a * norm[k], b) / r) * (dot(a * norm[k], up[k,n]) / r)",
    "silu(dot(a, b * s[n])) * dot(a, up[k,n]) * up2[m,n]",
)


@pytest.mark.parametrize("text", _DERIVED)
def test_gradients_are_autograds(text: str) -> None:
    agree_with_autograd(text)


def test_programs_of_gradients() -> None:
    derived = derive(graph_of("r = rsqrt(mean(a * a, k) + 1e-6); dot(a * norm[k], b) * r"))
    assert derived.forward.text == "z = dot(a * norm[k], b); r = rsqrt(sum(a * a, k) / extent(k) + 1e-06); out = z * r; out, z, r"
    assert derived.backward.text == "dmm = mm * r[m]; dr = sum(mm * z[m,n], n); dmm, dr"
    of_a, of_b = derived.operands
    assert of_a.program.text == (
        "v = -0.5 * dr[m] * (r1[m] * r1[m] * r1[m]) / extent(n) * x[m,n]; da = v + v + mm * norm[n]; dnorm = bgrad(mm * x[m,n]); da, dnorm"
    )
    assert "dr is the backward's gradient of r; r1 is the forward's r" in of_a.wiring()
    assert of_b.program.text == "db = dot(a * norm[m], b); db"
    # nothing of a row is kept for a gradient that does not read it
    assert derive(graph_of("mm * sum(a, k)"), wrt=["b"]).rows == ()


def test_what_cannot_be_derived_says_so(golden: Golden) -> None:
    for name, text in (
        ("largest", SCALED),
        ("number", "mm * rsqrt(mean(a * a, k) + eps)"),
        ("steps", "sign(mm) * sum(a, k)"),
        ("extent", "mm * extent(k) * gate[m,n]"),
    ):
        with golden.raises(DerivationError, name):
            derive(graph_of(text))


# -- a layer


def _rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _gated(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    g, u = F.linear(_rms(x) * norm, w).chunk(2, -1)
    return F.silu(g) * u


_LAYERS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    RMS: (lambda x, w, norm: F.linear(F.rms_norm(x, (7,), norm, 1e-6), w), {"norm": "k"}),
    GATED: (_gated, {"norm": "k"}),
    "r = rsqrt(mean(a * a, k) + eps); gelu(mm * r + bias) * s[m], r": (
        lambda x, w, bias, s: (F.gelu(F.linear(_rms(x), w, bias)) * s[..., None], torch.rsqrt(x.square().mean(-1) + 1e-6)),
        {"bias": "n", "s": "m"},
    ),
}


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("text", _LAYERS)
def test_a_layer_trains(text: str, lead: tuple[int, ...]) -> None:
    function, declared = _LAYERS[text]
    torch.manual_seed(0)
    extents = {"k": (7,), "m": lead, "n": (6,)}
    leaves = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in ((*lead, 7), (6, 7), *(extents[i] for i in declared.values()))]
    for chosen in (leaves, *([leaf] for leaf in leaves)):
        now = [t if any(t is c for c in chosen) else t.detach() for t in leaves]
        ours = epigen.linear(now[0], now[1], epilogue=text, inputs=dict(zip(declared, now[2:], strict=True)), eps=1e-6)
        theirs = function(now[0], now[1], **dict(zip(declared, now[2:], strict=True)))
        both = [[y] if isinstance(y, Tensor) else [t for t in y if t.requires_grad] for y in (ours, theirs)]
        torch.testing.assert_close(both[0][: len(both[1])], both[1])
        grads = [torch.randn_like(t) for t in both[1]]
        found, expected = (torch.autograd.grad(ys[: len(grads)], chosen, grads) for ys in both)
        torch.testing.assert_close(found, expected)


def test_a_layer_norm_whose_weight_is_folded_in_trains() -> None:
    """The product is of x as it is: what the norm does follows from the row's sums."""
    torch.manual_seed(0)
    x, w, gamma, beta = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 5, 7), (6, 7), (7,), (7,)))
    folded = w * gamma
    ours = epigen.linear(x, folded, epilogue=FOLDED, colsum=folded.sum(1), shift=w @ beta, eps=1e-5)
    theirs = F.linear(F.layer_norm(x, (7,), gamma, beta, 1e-5), w)
    torch.testing.assert_close(ours, theirs)
    grad, leaves = torch.randn_like(theirs), (x, w, gamma, beta)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad))


@pytest.mark.parametrize("first", ["relu(mm)", RMS.replace("eps", "1e-6")])
@pytest.mark.parametrize("second", [RMS.replace("eps", "1e-6"), "mm * 2"])
def test_a_chain_trains(first: str, second: str) -> None:
    torch.manual_seed(0)
    x, w, v, g, s = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((4, 7), (6, 7), (5, 6), (7,), (6,)))
    of_first, of_second = ({"norm": g} if "norm" in first else {}), ({"norm": s} if "norm" in second else {})
    ours = chain(x, [Link(w, of_first, first), Link(v, of_second, second)])
    hidden = (_rms(x) * g) @ w.T if of_first else torch.relu(x @ w.T)
    theirs = (_rms(hidden) * s) @ v.T if of_second else hidden @ v.T * 2
    leaves = [x, w, v, *of_first.values(), *of_second.values()]
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves))


def test_a_buffer_for_the_weights_gradient_and_dtypes() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 7).bfloat16().requires_grad_(), torch.randn(6, 7).bfloat16().requires_grad_()
    norm, buffer = torch.rand(7, requires_grad=True), torch.zeros(6, 7)
    epigen.linear(x, w, epilogue=RMS, norm=norm, eps=1e-6, main_grad=buffer).sum().backward()
    assert w.grad is None and all(t.grad is not None and t.grad.dtype == t.dtype for t in (x, norm))
    expected = torch.autograd.grad(F.linear(F.rms_norm(x.float(), (7,), norm, 1e-6), w.float()).sum(), w)[0]
    torch.testing.assert_close(buffer, expected.float(), rtol=2e-2, atol=2e-2)


def test_in_torchs_own_derivatives_it_is_the_reference() -> None:
    x, w, norm = (torch.randn(size, dtype=torch.float64) for size in ((4, 7), (6, 7), (7,)))
    found = torch.func.grad(lambda x: epigen.linear(x, w, epilogue=RMS, norm=norm, eps=1e-6).square().sum())(x)
    expected = torch.func.grad(lambda x: F.linear(F.rms_norm(x, (7,), norm, 1e-6), w).square().sum())(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own of autograd functions that it compiles
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_llamas_norm_and_projection(compile: bool) -> None:
    """Forward and backward as transformers computes them, in one kernel, and under torch.compile too."""
    zoo.allow_torchvision()
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    norm, q_proj = llama.LlamaRMSNorm(32, eps=1e-5), torch.nn.Linear(32, 48, bias=False)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 6, 32, requires_grad=True)

    def ours(x: Tensor) -> Tensor:
        y: Tensor = epigen.linear(x, q_proj.weight, epilogue=RMS, norm=norm.weight, eps=norm.variance_epsilon)
        return y

    found, expected = (torch.compile(ours, backend="aot_eager") if compile else ours)(x), q_proj(norm(x))
    torch.testing.assert_close(found, expected)
    grad, leaves = torch.randn_like(expected), (x, q_proj.weight, norm.weight)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", [RMS, GATED])
def test_a_layer_trains_on_the_gpu(text: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes: tuple[tuple[int, ...], ...] = ((300, 512), (384, 512), (512,))
    x, w, norm = ((torch.randn(size, device="cuda") / size[-1] ** 0.5).to(dtype).requires_grad_() for size in sizes)
    ours = epigen.linear(x, w, epilogue=text, norm=norm, eps=1e-6)
    wide = [t.detach().double().requires_grad_() for t in (x, w, norm)]
    theirs = _gated(*wide) if text == GATED else F.linear(_rms(wide[0]) * wide[2], wide[1])
    grad = torch.randn_like(ours)
    found, expected = torch.autograd.grad(ours, (x, w, norm), grad), torch.autograd.grad(theirs, wide, grad.double())
    for one, other in zip((ours, *found), (theirs, *expected), strict=True):
        assert (one.double() - other).norm() <= 2e-2 * other.norm()
