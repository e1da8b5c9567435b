"""Weights of fewer bits than what they are multiplied with: b is multiplied in the dtype of a, to which it is converted as it is loaded."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import torch
from choosing import chosen_runs
from compiling import compiled
from golden import Golden
from specs import RENDERER, TILED, spec_of
from torch import Tensor

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen import schedules
from epigen.codegen.lower import check_operands, lower, signature_of_contiguous
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelSpec
from epigen.db.problem import problem_of
from epigen.dtypes import BF16, FP8E4M3, FP8E5M2, FP16, FP32, INT8, UINT8, WEIGHTS, DType, multiplied_as
from epigen.errors import CallError, ConfigError
from epigen.ir import reference
from epigen.ir.derive import derive
from epigen.ir.program import graph_of
from epigen.perf import limits, model
from epigen.perf.traffic import traffic
from epigen.runtime import verify
from epigen.runtime.ahead import Job

_TEXTS = (
    "mm",
    "relu(mm * s[n] + bias)",
    "dot(a, b * s[n])",
    "dot(a, b * s[k,n]) * alpha",
    "gelu(dot(relu(a) * norm[k], (b - zero[n]) * s[n]) + bias)",
    "z = mm * s[n]; z, bgrad(z), sum(b, k)",
)
_TWO = "silu(mm * s[n]) * (dot(a, up[k,n]) * t[n])"


def _spec(text: str, a: DType = FP16, b: DType = INT8, shape: tuple[int, int, int] = (4096, 4096, 4096), layout: str = "nt") -> KernelSpec:
    graph = graph_of(text)
    return lower(graph, signature_of_contiguous(graph, a, b, tuple((n.name, FP16) for n in graph.inputs()), shape, layout, "ieee"))


def _weight(b: torch.dtype, *size: int) -> Tensor:
    """Of all values that such a dtype has, but for NaN."""
    bits = torch.arange(size[0] * size[1], dtype=torch.int32).remainder(256).to(torch.uint8)[torch.randperm(size[0] * size[1])].reshape(size)
    if not b.is_floating_point:
        return bits.view(b)
    return torch.nan_to_num(bits.view(b).float(), 0.0, 64.0, -64.0).clamp(-64, 64).to(b)


# -- values


@pytest.mark.parametrize("a", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("b", WEIGHTS, ids=str)
def test_each_value_of_a_weight_is_one_of_as(a: DType, b: DType) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(reference.torch_dtype(b))
    same = every.double() == every.to(reference.torch_dtype(a)).double()
    assert (same | every.double().isnan()).all() and multiplied_as(a, b) == a


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("b", WEIGHTS, ids=str)
@pytest.mark.parametrize("a", [FP32, FP16, BF16], ids=str)
def test_the_reference_multiplies_in_as_dtype(a: DType, b: DType, layout: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9, 32).to(reference.torch_dtype(a)), _weight(reference.torch_dtype(b), 32, 16)
    w = w.t().contiguous().t() if layout == "nt" else w
    found = epigen.compile("mm, cast(mm, fp32), cast(dot(a, b), fp16)")(x, w)
    assert [t.dtype for t in found] == [x.dtype, torch.float32, torch.float16]
    torch.testing.assert_close(found[1], x.float() @ w.float())
    s = torch.rand(32, 16)
    (scaled,) = reference.evaluate(graph_of("dot(a, b * s[k,n])"), x, w, {"s": s}, [FP32])
    assert torch.equal(scaled, x.float() @ (w.float() * s).to(x.dtype).float())


@pytest.mark.triton
@pytest.mark.parametrize("b", WEIGHTS, ids=str)
def test_kernels_agree_with_the_oracle(b: DType) -> None:
    """Confined to the tensors that they are given, as all interpreted kernels of these tests are."""
    configs: tuple[Any, ...] = (cases.SMALL, cases.split_k(), None)
    for i, (text, config) in enumerate(itertools.product((*_TEXTS, _TWO), configs)):
        if text == _TWO and config is not None and config.schedule == "split_k":
            continue
        graph, shape = graph_of(text), ((33, 50, 70), (1, 17, 1), (32, 64, 64), (5, 7, 0))[i % 4]
        given = verify.sample(graph, shape, (FP16, FP32)[i % 2], b, FP16, layout=("nn", "nt", "tn")[i % 3], seed=i)
        verify.demand(verify.differences(epigen.compile(text, config=config, backend="interpreter"), given))
        verify.demand(verify.differences(epigen.compile(text), given))


@pytest.mark.triton
def test_batches_share_a_weight_or_have_their_own() -> None:
    torch.manual_seed(0)
    x, s = torch.randn(3, 20, 40).half(), torch.rand(24)
    for w in (_weight(torch.int8, 40, 24), torch.stack([_weight(torch.int8, 40, 24) for _ in range(3)])):
        found = epigen.compile("mm * s[n]", config=cases.SMALL, backend="interpreter")(x, w, s=s)
        torch.testing.assert_close(found.float(), (x.float() @ w.float()) * s, rtol=2e-3, atol=1e-2)


def test_float64_and_the_meta_device_take_them() -> None:
    x, w = torch.randn(3, 8, dtype=torch.float64), _weight(torch.uint8, 8, 5)
    assert torch.equal(epigen.compile("mm")(x, w), x @ w.double())
    assert epigen.compile("mm")(x.half().to("meta"), w.to("meta")).dtype == torch.float16


def test_rounding_as_eager_torch_does() -> None:
    torch.manual_seed(0)
    x, w, s = torch.randn(9, 32).half(), _weight(torch.int8, 32, 16), torch.rand(32, 16).half()
    found = epigen.compile("dot(a, (b + 1) * s[k,n])", rounding="eager")(x, w, s=s)
    assert torch.equal(found, (x.float() @ ((w.float() + 1) * s).half().float()).half())


# -- what is refused


def test_other_pairs_of_dtypes_are_refused(golden: Golden) -> None:
    for a, b in ((FP16, BF16), (INT8, FP16), (FP8E4M3, BF16), (INT8, UINT8), (FP8E5M2, INT8), (UINT8, FP16)):
        with golden.raises(CallError, f"{a} x {b}"):
            check_operands(a, b)
    for a, b in ((FP16, UINT8), (BF16, FP8E4M3), (FP32, INT8), (FP8E4M3, FP8E5M2)):
        check_operands(a, b)


@pytest.mark.parametrize("name", [s.name for s in SCHEDULES.values() if not s.computes])
def test_schedules_that_multiply_operands_as_they_lie_are_refused_by_name(name: str, golden: Golden) -> None:
    config = {"library": cases.LIBRARY, "persistent": cases.persistent(), "warp_specialized": cases.warp_specialized()}[name]
    spec, shape, target = _spec("mm * s[n]"), (4096, 4096, 4096), gpus.TARGETS["sm_90"]
    golden(limits.unfit(spec, config, shape, target), name)
    assert name not in Space(spec, shape, target).schedules
    with pytest.raises(ConfigError, match="tiled and split_k"):
        epigen.compile("mm * s[n]", config=config).plan(shape, target=target, signature=spec.signature)


def test_a_gpu_without_fp8_says_what_to_do(golden: Golden) -> None:
    with golden.raises(ConfigError):
        rule.choose(_spec("mm * s[n]", b=FP8E4M3), (4096, 4096, 4096), gpus.TARGETS["sm_80"])
    assert rule.choose(_spec("mm * s[n]", b=FP8E5M2), (4096, 4096, 4096), gpus.TARGETS["sm_80"]).config.schedule == "tiled"


# -- what is chosen, compiled and said


@pytest.mark.parametrize("target", gpus.TARGETS)
def test_the_rule_and_the_space_choose_what_can_run(target: str) -> None:
    shapes = ((4096, 4096, 4096), (16, 4096, 4096), (1000, 1003, 1001), (1, 1, 1))
    for text, (a, b), shape, layout in itertools.product(_TEXTS[1:4], ((FP16, INT8), (BF16, FP8E5M2), (FP32, UINT8)), shapes, ("nn", "nt")):
        chosen_runs(_spec(text, a, b, shape, layout), shape, gpus.TARGETS[target])


@pytest.mark.triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_ahead(target: str) -> None:
    jobs = []
    for b, (text, a, layout) in itertools.product(
        WEIGHTS, (("relu(mm * s[n] + bias)", BF16, "nt"), ("dot(a, (b - zero[n]) * s[k,n])", FP16, "nn"), (_TWO, BF16, "nn"))
    ):
        if b == FP8E4M3 and not gpus.TARGETS[target].fp8:
            continue
        config = cases.tiled(64, 64, 32 if target == "gfx942" else 64, 4, 3)
        jobs.append(Job(RENDERER.render(spec_of(text, a, b=b, layout=layout, k_multiple=64), config), gpus.TARGETS[target], layout))
    assert all(function.resources.spills == 0 for found in compiled(jobs) for function in found)


@pytest.mark.triton
def test_what_a_block_takes_is_known_beforehand() -> None:
    config, target = cases.tiled(128, 128, 64, 8, 3), gpus.TARGETS["sm_90"]
    specs = [spec_of(text, BF16, b=b, k_multiple=64, layout="nt") for text, b in (("mm * s[n]", INT8), ("dot(a, b * s[n])", FP8E4M3))]
    for spec, (found,) in zip(specs, compiled([Job(RENDERER.render(spec, config), target, "nt") for spec in specs]), strict=True):
        needs = model.resources(spec, config, target)
        assert 0.85 * found.resources.registers <= needs.registers <= 1.5 * found.resources.registers, spec.program
        assert found.resources.shared_bytes <= needs.shared_bytes <= 1.8 * found.resources.shared_bytes, spec.program


def test_the_module_says_what_is_converted() -> None:
    text = RENDERER.render(spec_of("mm * s[n]", BF16, b=INT8), TILED).text
    assert "# b is converted to bf16 as it is loaded\n" in text and "b = b.to(tl.bfloat16)" in text and "tl.dot(a, b, acc)" in text
    assert "# mm[m, n] = sum over k of a[m, k] * b[k, n], accumulated in fp32\n" in text
    computed = RENDERER.render(spec_of("dot(a, b - s[n])", BF16, b=INT8), TILED).text
    assert "b = b.to(tl.float32)" in computed and "rounded once, to bf16\n" in computed
    scaled = RENDERER.render(spec_of("dot(a, b * s[n])", BF16, b=INT8), TILED).text
    assert "tl.dot(a, b, acc)" in scaled and "    acc = acc * s\n" in scaled and "the factors that a step's values share multiply its product\n" in scaled


def test_a_problem_is_known_by_both_dtypes() -> None:
    """Whose rows are aligned by their own bytes."""
    shape = (4096, 4096, 4100)
    problems = [problem_of(graph_of("mm * s[n]"), _spec("mm * s[n]", FP16, b, shape), shape, "NVIDIA H200", "9.0") for b in (FP16, INT8, FP8E4M3)]
    assert [(p.a, p.b, p.kind, p.alignment) for p in problems] == [
        ("fp16", "fp16", "load:n store:mn reduce:", 8),
        ("fp16", "int8", "load:n store:mn reduce: dot:b", 4),
        ("fp16", "fp8e4m3", "load:n store:mn reduce: dot:b", 4),
    ]
    assert len({p.spec for p in problems}) == 1
    why = rule.choose(_spec("mm * s[n]", FP16, INT8, shape), shape, gpus.TARGETS["sm_90"]).why
    assert "4096x4096x4100 fp16 x int8 on sm_90" in why


def test_traffic_counts_a_weights_own_bytes() -> None:
    shape = (16, 512, 256)
    wide, narrow = traffic(_spec("mm", FP16, FP16, shape), shape), traffic(_spec("mm", FP16, INT8, shape), shape)
    assert wide.bytes - narrow.bytes == 512 * 256
    assert narrow.unfused_launches == wide.unfused_launches + 1 and narrow.unfused_bytes > wide.unfused_bytes


# -- gradients


@pytest.mark.parametrize("epilogue", ["mm * s[n]", "relu(mm * s[n] + bias)", "dot(relu(a) * norm[k], b * s[n])", "dot(a, (b - zero[n]) * w[k,n])", _TWO])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_layer_passes_gradients_by_its_weight(epilogue: str, dtype: torch.dtype) -> None:
    """To x, and to what is computed with; in fp64, by torch's own operations of the weight converted."""
    torch.manual_seed(0)
    n, k = 6, 7
    x, weight, up = torch.randn(5, k, dtype=torch.float64), _weight(dtype, n, k), _weight(dtype, n, k)
    sizes = {"s": (n,), "bias": (n,), "norm": (k,), "zero": (n,), "w": (k, n), "t": (n,)}
    given = {name: torch.rand(size, dtype=torch.float64) for name, size in sizes.items() if name in {i.name for i in graph_of(epilogue).inputs()}}
    second = {"up": up.t()} if "up" in epilogue else {}
    leaves = [t.requires_grad_() for t in (x, *given.values())]
    ours = epigen.linear(x, weight, epilogue=epilogue, inputs={**given, **second})
    theirs = epigen.linear(x, weight.double(), epilogue=epilogue, inputs={**given, **{name: t.double() for name, t in second.items()}})
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad))


def test_a_chain_passes_gradients_by_its_weights() -> None:
    from epigen.training.again import call as chain
    from epigen.training.layer import Link

    torch.manual_seed(0)
    x, w, v = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), _weight(torch.int8, 6, 7), _weight(torch.int8, 4, 6)
    for _ in range(3):  # the second and third might be written out
        ours = chain(x, [Link(w, {}, "relu(mm)"), Link(v, {}, "mm * 0.5")])
        theirs = torch.relu(x @ w.double().t()) @ v.double().t() * 0.5
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))


def test_a_function_stands_for_the_text() -> None:
    x, w = torch.randn(5, 8).bfloat16(), _weight(torch.int8, 4, 8)
    found = epigen.linear(x, w, epilogue=lambda mm: torch.relu(mm))
    assert found.dtype == torch.bfloat16 and torch.equal(found, torch.relu(x.float() @ w.float().t()).bfloat16())


def test_a_weight_of_few_values_is_not_trained(golden: Golden) -> None:
    x, w = torch.randn(5, 8).bfloat16(), torch.randn(4, 8).to(torch.float8_e4m3fn).requires_grad_()
    with golden.raises(CallError):
        epigen.linear(x, w)
    assert epigen.linear(x, w.detach()).dtype == torch.bfloat16


def test_programs_of_gradients_do_not_tell_of_dtypes() -> None:
    derived = derive(graph_of("mm * s[n]"), wrt=["mm"])
    assert derived.backward.text == "dmm = mm * s[n]; dmm" and schedules.SCHEDULES["tiled"].computes
