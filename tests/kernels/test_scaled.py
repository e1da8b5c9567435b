"""fp8 with scales in blocks along k, as DeepSeek's weights and activations have them: `dot(a * sa[m,k/128], b * sb[k/128,n/128])`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import cases
import pytest
import torch
from compiling import compiled
from golden import Golden
from specs import RENDERER, source, spec_of
from torch import Tensor

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.steps import steps
from epigen.dtypes import BF16, FAST_ACCUM, FP8E4M3, FP8E5M2, FP32, INT8, DType
from epigen.errors import CallError, ConfigError
from epigen.ir.program import graph_of
from epigen.perf import limits, model
from epigen.runtime import verify
from epigen.runtime.ahead import Job

BLOCKS = "dot(a * sa[m,k/128], b * sb[k/128,n/128])"
_TEXTS = (
    BLOCKS,
    "silu(dot(a * sa[m,k/128], b * sb[k/128,n]) + bias)",
    "dot(a, b * sb[k/64,n]) * alpha",
    "dot(a * sa[m,k/32] * row[m], b)",
    "mx = dot(a * exp(e[m,k/32]), b * s[k/32,n]); mx, sum(mx, n)",
)


def quantised(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """x [R, C] in fp8, and the scale of each block of rows x columns, as DeepSeek-V3's own code has it: the largest value of a block becomes 448."""
    r, c = x.shape
    whole = torch.nn.functional.pad(x, (0, -c % columns, 0, -r % rows))
    blocks = whole.view(-(-r // rows), rows, -(-c // columns), columns)
    scale = blocks.abs().amax((1, 3)) / 448
    return (blocks / scale[:, None, :, None]).reshape(whole.shape)[:r, :c].to(torch.float8_e4m3fn), scale


def test_activations_and_weights_as_deepseek_has_them() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 300), torch.randn(200, 300)
    (a, sa), (w, sw) = quantised(x, 1, 128), quantised(weight, 128, 128)
    found = epigen.compile(BLOCKS)(a, w.t(), sa=sa, sb=sw.t())
    assert found.dtype == torch.bfloat16
    written_out = (a.double() * sa.double().repeat_interleave(128, 1)[:, :300]) @ (
        w.double() * sw.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    ).t()
    torch.testing.assert_close(found.double(), written_out, rtol=8e-3, atol=1e-2)
    exact = x.double() @ weight.double().t()
    assert (found.double() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("text", _TEXTS)
@pytest.mark.parametrize(("a", "b"), [(FP8E4M3, FP8E4M3), (FP8E5M2, FP8E4M3)], ids=str)
def test_the_reference_scales_what_it_has_multiplied(text: str, a: DType, b: DType) -> None:
    """Nothing is rounded to fp8 with its scale, as that would lose most of it."""
    graph = graph_of(text)
    for shape, layout in itertools.product(((17, 40, 256), (5, 7, 300), (1, 16, 0)), ("nt", "nn")):
        given = verify.sample(graph, shape, a, b, FP32, layout=layout, seed=shape[0])
        verify.demand(verify.differences(epigen.compile(text), given))


@pytest.mark.triton
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx950"])
def test_kernels_compile_ahead(target: str) -> None:
    configs = (cases.tiled(64, 64, 32, 4, 3), cases.split_k(16, 32, 32, splits=2), cases.tiled(128, 64, 32, 8, 2, prefetch=1))
    jobs = [
        Job(RENDERER.render(spec_of(text, FP8E4M3, input_dtype=FP32, k_multiple=128, layout="nt"), config), gpus.TARGETS[target], "nt")
        for text, config in itertools.product(_TEXTS, configs)
    ]
    assert all(function.resources.spills == 0 for found in compiled(jobs) for function in found)


@pytest.mark.triton
def test_what_a_block_takes_is_known_beforehand() -> None:
    target, spec = gpus.TARGETS["sm_90"], spec_of(BLOCKS, FP8E4M3, input_dtype=FP32, k_multiple=128, layout="nt")
    for config in (cases.tiled(128, 128, 128, 8, 3), cases.tiled(64, 64, 128, 4, 4), cases.tiled(16, 64, 128, 4, 4)):
        ((found,),) = compiled([Job(RENDERER.render(spec, config), target, "nt")])
        needs = model.resources(spec, config, target)
        assert 0.75 * found.resources.registers <= needs.registers <= 1.5 * found.resources.registers, config
        assert found.resources.shared_bytes <= needs.shared_bytes <= 1.3 * found.resources.shared_bytes, config


def test_each_step_is_scaled_by_itself_whatever_the_tile() -> None:
    for config in (cases.tiled(32, 32, 64), cases.tiled(128, 128, 128, 8), cases.split_k(16, 32, 64, splits=2)):
        assert "acc += tl.dot(a, b, max_num_imprecise_acc=" in (text := source(BLOCKS, config, a=FP8E4M3, k_multiple=128)) and "* sa * sb\n" in text
    assert "a_in" not in text and "b_in" not in text


def test_a_step_that_several_scales_share_is_refused_and_not_chosen(golden: Golden) -> None:
    spec, target = (
        lower(graph_of(BLOCKS), signature_of_contiguous(graph_of(BLOCKS), FP8E4M3, FP8E4M3, (("sa", FP32), ("sb", FP32)), (64, 256, 512), "nt", "ieee")),
        gpus.TARGETS["sm_90"],
    )
    golden(limits.unfit(spec, cases.tiled(64, 64, 256), (64, 256, 512), target), "step")
    with pytest.raises(ConfigError, match="a block_k that divides"):
        epigen.compile(BLOCKS, config=cases.tiled(64, 64, 256)).plan((64, 256, 512), target=target, signature=spec.signature)
    golden(limits.unfit(spec, cases.persistent(), (64, 256, 512), target), "schedule")
    assert limits.unfit(spec, cases.warp_specialized(block_k=128), (64, 256, 512), target) == ""
    golden(limits.unfit(spec, cases.warp_specialized(block_k=64).with_value("block_k", 256), (64, 256, 512), target), "step of warpgroups")


def test_what_warpgroups_scale_by_is_an_input_in_blocks(golden: Golden) -> None:
    text, shape, target = "dot(a * sa[m,k/128] * t[m], b * sb[k/128,n/128])", (4096, 4096, 4096), gpus.TARGETS["sm_90"]
    graph = graph_of(text)
    inputs = tuple((i.name, FP32) for i in graph.inputs())
    spec = lower(graph, signature_of_contiguous(graph, FP8E4M3, FP8E4M3, inputs, shape, "nt", "ieee"))
    golden(limits.unfit(spec, cases.warp_specialized(block_k=128), shape, target), "others")
    assert Space(spec, shape, target).schedules == ("tiled",)
    fast = replace(spec, signature=replace(spec.signature, precision=FAST_ACCUM))
    golden(limits.unfit(fast, cases.warp_specialized(block_k=128), shape, target), "fast")


@pytest.mark.parametrize("target", [name for name, target in gpus.TARGETS.items() if target.fp8])
def test_what_is_chosen_multiplies_operands_as_they_are(target: str) -> None:
    for text, shape in itertools.product((BLOCKS, _TEXTS[3]), ((4096, 4096, 4096), (16, 8192, 8192), (1000, 1008, 1024), (1, 16, 128))):
        graph = graph_of(text)
        inputs = tuple((i.name, FP32) for i in graph.inputs())
        spec = lower(graph, signature_of_contiguous(graph, FP8E4M3, FP8E4M3, inputs, shape, "nt", "ieee"))
        configs = [rule.choose(spec, shape, gpus.TARGETS[target]).config, *list(Space(spec, shape, gpus.TARGETS[target]).every())[:200]]
        for config in configs:
            assert config["block_k"] <= spec.longest_step == (128 if text == BLOCKS else 32)
            assert all(step.as_loaded for step in steps(spec, config))


def test_other_programs_of_bytes_are_refused(golden: Golden) -> None:
    a, b = torch.ones(4, 128).to(torch.float8_e4m3fn), torch.ones(8, 128).to(torch.float8_e4m3fn).t()
    scales = {"s": torch.ones(1, 8), "t": torch.ones(8), "q": torch.ones(3, 8)}
    for name, text in {
        "shift": "dot(a, (b + t[n]) * s[k/128,n])",
        "activation": "dot(relu(a), b * s[k/128,n])",
        "column": "dot(a, b * t[n])",
        "block": "dot(a, b * q[k/48,n])",
    }.items():
        with golden.raises(CallError, name):
            epigen.compile(text)(a, b, **{i: scales[i] for i in "stq" if f" {i}[" in text})
    with golden.raises(CallError, "int8"):
        epigen.compile("dot(a, b * s[k/128,n])")(torch.ones(4, 128, dtype=torch.int8), torch.ones(128, 8, dtype=torch.int8), s=scales["s"])
    with golden.raises(CallError, "second"):
        epigen.compile("dot(a * s[m,k/128], b) * dot(a * s[m,k/128], up[k,n])")(a, b, s=torch.ones(4, 1), up=b)
    assert spec_of(BLOCKS, BF16, b=INT8, input_dtype=FP32).computed  # a weight of fewer bits beside 16 is another thing
