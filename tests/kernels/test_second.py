"""Two products of one left operand in one kernel: what a program may say, what may run it, and what it is expected to take."""

from __future__ import annotations

import itertools
from typing import Any

import batched
import cases
import pytest
import torch
from compiling import compiled
from golden import Golden
from specs import RENDERER

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen import schedules
from epigen.codegen.lower import lower, over_product, signature_of_contiguous
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.db.problem import graph_digest
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, DType
from epigen.errors import CallError, ConfigError
from epigen.gpus import TARGETS
from epigen.ir.program import graph_of
from epigen.perf import limits, model
from epigen.perf.traffic import traffic
from epigen.runtime.ahead import Job
from epigen.shapes import Shape
from epigen.tuning import timing_worker
from epigen.tuning.task import Task

GATED = "silu(mm) * dot(a, up[k,n])"
LAYER: Shape = (4096, 14336, 4096)
SM_90 = TARGETS["sm_90"]


def spec_of(text: str, a: DType = BF16, shape: Shape = LAYER, layout: str = "nt") -> KernelSpec:
    graph = graph_of(text)
    return lower(graph, signature_of_contiguous(graph, a, a, tuple((n.name, a) for n in graph.inputs()), shape, layout, "ieee"))


# -- the language


def test_mm_is_the_first_of_them() -> None:
    assert graph_of(GATED) == graph_of("silu(dot(a, b)) * dot(a, up[k,n])")
    assert graph_of(GATED).text == GATED
    assert graph_of("u = dot(a, up[k,n]); g = mm; silu(g) * u, u") == graph_of("g = mm; u = dot(a, up[k,n]); silu(g) * u, u")


def test_digests_tell_which_product_is_meant() -> None:
    texts = (GATED, "silu(dot(a, up[k,n])) * mm", "silu(mm) * up[m,n]", "silu(mm) * mm", "dot(relu(a), b) * dot(relu(a), up[k,n])")
    assert len({graph_digest(graph_of(text)) for text in texts}) == len(texts)
    assert graph_digest(graph_of(GATED)) == graph_digest(graph_of("silu(mm) * dot(a, right[k,n])"))


def test_both_may_be_of_what_is_computed_of_a() -> None:
    text = "x = relu(a) * norm[k]; silu(dot(x, b)) * dot(x, up[k,n])"
    a, b, up, norm = (torch.randn(*size, dtype=torch.float64) for size in ((5, 8), (8, 6), (8, 6), (8,)))
    x = torch.relu(a) * norm
    torch.testing.assert_close(epigen.compile(text)(a, b, up=up, norm=norm), torch.nn.functional.silu(x @ b) * (x @ up))
    assert Space(spec_of(text), LAYER, SM_90).schedules == ("tiled",)


def test_beside_computed_operands_each_product_has_its_programs() -> None:
    derived = epigen.derive("x = relu(a) * norm[k]; silu(dot(x, b)) * dot(x, up[k,n])")
    assert [(o.operand, o.product, [x.of for x in o.gradients]) for o in derived.operands] == [
        ("a", "", ["a", "norm"]),
        ("b", "", ["b"]),
        ("a", "up", ["a", "norm"]),
        ("b", "up", ["up"]),
    ]
    assert derived.operands[2].wiring() == "a is the gradient of the product with up; b is the forward's up, transposed; x1 is the forward's a"


# -- calls


def test_the_second_operand_has_the_dtype_of_the_first(golden: Golden) -> None:
    a, b = torch.ones(4, 8).half(), torch.ones(8, 6).half()
    with golden.raises(CallError, "dtype"):
        epigen.compile(GATED)(a, b, up=b.float())
    with golden.raises(CallError, "extents"):
        epigen.compile(GATED)(a, b, up=b[:, :5])
    with golden.raises(CallError, "given"):
        epigen.compile(GATED).over(torch.ones(4, 6), up=b)


def test_over_a_product_there_is_no_second(golden: Golden) -> None:
    with golden.raises(CallError):
        over_product(graph_of(GATED))


@pytest.mark.triton
@pytest.mark.parametrize("lies", ["halves", "pairs", "apart", "the other way", "shifted"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_however_the_second_operand_lies(lies: str, layout: str) -> None:
    """Halves of one weight, every other row of one, a tensor of its own, and such as TMA cannot address as it does b, which are copied."""
    m, n, k = 70, 48, 64
    a, stacked = torch.randn(m, k).half(), torch.randn(2 * n, k).half() if layout == "nt" else torch.randn(k, 2 * n).half().T
    gate, up = (stacked[::2], stacked[1::2]) if lies == "pairs" else (stacked[:n], stacked[n:])
    if lies == "apart":
        up = up.clone()
    elif lies == "the other way":
        up = up.T.contiguous().T if layout == "nt" else up.contiguous()
    elif lies == "shifted":
        flat = torch.zeros(n * k + 1).half()
        up = flat[1:].view(n, k).copy_(up) if layout == "nt" else flat[1:].view(k, n).copy_(up.T).T
    expected = epigen.compile(GATED)(a, gate.T, up=up.T)
    for config in (cases.SMALL, cases.persistent()):
        kernel = epigen.compile(GATED, backend="interpreter", config=config)
        torch.testing.assert_close(kernel(a, gate.T, up=up.T), expected, rtol=1e-2, atol=1e-2)


def test_several_products_of_a_batch() -> None:
    a, b, up = torch.randn(3, 5, 8), torch.randn(3, 8, 6), torch.randn(3, 8, 6)
    found = epigen.compile(GATED)(a, b, up=up)
    torch.testing.assert_close(found, torch.nn.functional.silu(a @ b) * (a @ up), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(epigen.compile(GATED)(a, b[0], up=up[0]), torch.nn.functional.silu(a @ b[0]) * (a @ up[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [{"rounding": "eager"}, {"invariant": "m"}], ids=" ".join)
def test_how_it_is_computed(more: dict[str, Any]) -> None:
    a, b, up = torch.randn(5, 64).bfloat16(), torch.randn(64, 6).bfloat16(), torch.randn(64, 6).bfloat16()
    kernel = epigen.compile(GATED, **more)
    found = kernel(a, b, up=up)
    if "rounding" in more:
        assert torch.equal(found, torch.nn.functional.silu(a @ b) * (a @ up))
    else:
        assert torch.equal(kernel(a[2:3], b, up=up), found[2:3])


# -- what may run it


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (cases.LIBRARY, "takes one product of the vendor's"),
        (cases.split_k(), "adds up parts of one product"),
        (cases.warp_specialized(splits=2), "adds up parts of one product"),
    ],
    ids=str,
)
def test_what_has_one_product_alone_is_refused(config: KernelConfig, why: str) -> None:
    said = limits.unfit(spec_of(GATED), config, LAYER, SM_90)
    assert why in said and "with up" in said and limits.unfit(spec_of("silu(mm)"), config, LAYER, SM_90) == ""
    with pytest.raises(ConfigError, match=why):
        epigen.compile(GATED, config=config).plan(LAYER, dtype=BF16, target=SM_90)


_TEXTS = (
    GATED,
    "g = mm + bias; u = dot(a, up[k,n]); h = gelu(g) * u; h, g, u",
    "u = dot(a, up[k,n]); s = sigmoid(mm); du = grad[m,n] * mm * s; grad[m,n] * u * s, du, bgrad(du)",
)
_SHAPES: tuple[Shape, ...] = (LAYER, (16, 4096, 4096), (64, 14336, 4096), (1000, 1003, 1001), (70000, 64, 8), (1, 1, 1), (8192, 8192, 64), (4, 512, 1408, 2048))


@pytest.mark.parametrize("target", TARGETS)
def test_the_rule_and_the_space_choose_what_can_run(target: str) -> None:
    there = TARGETS[target]
    for text, a, shape, layout in itertools.product(_TEXTS, (FP16, FP32, FP8E4M3, INT8), _SHAPES, ("nn", "nt")):
        spec = spec_of(text, a, shape, layout)
        if not there.multiplies(a, a):
            continue
        space, config = Space(spec, shape, there), rule.choose(spec, shape, there).config
        assert space.legal(config) and limits.refusal(spec, config, shape, there) == "", f"{text} {a} {shape} {layout}: {config}"
        assert not {"library", "split_k"} & set(space.schedules)
        assert all(limits.unfit(spec, one, shape, there) == "" for one in space.samples())


@pytest.mark.parametrize("shape", [LAYER, (8192, 8192, 1024), (512, 14336, 4096)], ids=str)
def test_large_ones_are_warp_specialized_with_tiles_that_hold_both(shape: Shape) -> None:
    spec = spec_of(GATED, shape=shape)
    for choice in (rule.choose(spec, shape, SM_90), epigen.compile(GATED).plan(shape, dtype=BF16, target=SM_90, layout="nt").choice):
        config = choice.config
        assert config.schedule == "warp_specialized" and model.resources(spec, config, SM_90).accumulators == 128
        assert config["block_m"] * config["block_n"] == (128 * 64 if config["pingpong"] else 128 * 128)


@pytest.mark.triton
@pytest.mark.parametrize("text", _TEXTS)
def test_kernels_compile_ahead_without_a_spill(text: str) -> None:
    configs = [
        cases.warp_specialized(128, 128, 64, 3, subtiles=2),
        cases.warp_specialized(128, 64, 64, 4, pingpong=1, subtiles=2),
        cases.persistent(128, 128, 64, 8, 3, subtiles=2),
        cases.tiled(64, 64, 64, 4, 3),
    ]
    jobs = [Job(RENDERER.render(spec_of(text), config), SM_90, "nt") for config in configs]
    jobs += [Job(RENDERER.render(spec_of(text), cases.tiled(64, 64, 32, 4, 2)), TARGETS[other], "nt") for other in ("sm_80", "gfx942", "sm_120")]
    assert all(function.resources.spills == 0 for found in compiled(jobs) for function in found)


# -- what it is expected to take


def test_traffic_counts_both() -> None:
    m, n, k = shape = (100, 60, 40)
    one, both = traffic(spec_of("silu(mm)", shape=shape), shape), traffic(spec_of(GATED, shape=shape), shape)
    assert both.flops == 2 * one.flops and both.bytes == one.bytes + 2 * k * n
    assert both.unfused_launches == one.unfused_launches + 2 and both.unfused_bytes > one.unfused_bytes + 2 * k * n + 2 * m * n


def test_the_model_takes_it_for_a_product_of_twice_the_columns() -> None:
    """A tile of 128x128 of both for one of 128x256 (2786 and 1423 us of 8192 and 4096 rows with 28672 columns; H200, torch 2.11, Triton 3.6, 2026-11-28)."""
    gpu = gpus.by_name("H200")
    twice = cases.warp_specialized(128, 256, 64, 4, 8, subtiles=2)
    for (m, n, k), measured in ((LAYER, 1306.0), ((8192, 14336, 4096), 2682.0)):
        shape = (m, n, k)
        both = model.estimate_us(spec_of(GATED, shape=shape), cases.warp_specialized(128, 128, 64, 4, 8, subtiles=2), shape, gpu)
        one = model.estimate_us(spec_of("silu(mm)", shape=(m, 2 * n, k)), twice, (m, 2 * n, k), gpu)
        assert both.mainloop_us == pytest.approx(one.mainloop_us, rel=0.05) and both.us < one.us
        assert both.us == pytest.approx(measured, rel=0.25)


def test_what_is_tuned_is_timed_beside_the_product_of_both() -> None:
    task = Task(graph_of(GATED), (64, 48, 32), FP32, FP32, (FP32,), "nt", "ieee", SM_90)
    sample = task.sample("cpu")
    right = timing_worker.right_operands(task, sample)
    assert right.shape == (32, 96) and right.stride() == (1, 32)
    assert torch.equal(right[:, :48], sample.b) and torch.equal(right[:, 48:], sample.inputs["up"])
    other = Task(graph_of("relu(mm)"), (64, 48, 32), FP32, FP32, (), "nn", "ieee", SM_90)
    assert (given := other.sample("cpu")) and timing_worker.right_operands(other, given) is given.b


def test_space_has_no_dimension_that_it_cannot_use() -> None:
    found = list(Space(spec_of(GATED), LAYER, SM_90).outline())
    assert {c.schedule for c in found} == {"tiled", "persistent", "warp_specialized"}
    assert {schedules.splits(c) for c in found} == {1}


@pytest.mark.triton
@pytest.mark.parametrize("config", [cases.SMALL, cases.persistent(64, 16, 32), cases.persistent(64, 64, 32, subtiles=2, flatten=0)], ids=str)
@pytest.mark.parametrize("leads", batched.LEADS, ids=str)
def test_of_each_product_of_a_batch(leads: tuple[tuple[int, ...], ...], config: KernelConfig) -> None:
    a, b, inputs = batched.given(*leads)
    given = {"up": b.flip(-1).contiguous(), "bias": inputs["bias"], "residual": inputs["residual"]}
    found = epigen.compile(batched.GATED, backend="interpreter", config=config)(a, b, **given)
    batched.same(found, batched.expected_gated(a, b, given["up"], inputs))
