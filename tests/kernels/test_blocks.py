"""Inputs with one value for several of an index, `scale[k/128,n]`: within operands and in the epilogue, whatever the steps of the main loop are."""

from __future__ import annotations

import itertools

import cases
import pytest
import torch
from compiling import compiled
from golden import Golden
from specs import RENDERER, source, spec_of

import epigen
from bench import gradients
from epigen import gpus
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.spec import KernelConfig
from epigen.db import fields
from epigen.db.problem import _INPUT, epilogue_kind, graph_digest, problem_of
from epigen.dtypes import BF16, FP16, FP32, INT8, UINT8
from epigen.errors import CallError, DerivationError
from epigen.ir import reference
from epigen.ir.derive import derive
from epigen.ir.program import graph_of
from epigen.perf import model
from epigen.perf.traffic import traffic
from epigen.runtime import verify
from epigen.runtime.ahead import Job

_TEXTS = (
    "dot(a, (b - zero[k/32,n]) * s[k/128,n])",
    "dot(a * sa[m,k/128], b * sb[k/128,n/128])",
    "relu(dot(a, b * s[k/48,n/5]) + bias)",
    "dot(a, b * g[k/64]) * alpha",
    "dot(a * v[k/3] + u[m/4], b + h[k/16,n])",
    "dot(a, b * (exp(g[k/64]) + w[k,n/2]))",
    "mm * s[m/7,n/16] * r[m/3] + c[n/9]",
    "z = mm * pos[m/2,n]; z, sum(z, n) * r[m/5], bgrad(z) + c[n/2]",
)


# -- values


def test_the_reference_repeats_each_value() -> None:
    torch.manual_seed(0)
    a, b, s, z = torch.randn(5, 70), torch.randn(70, 9), torch.rand(3, 9), torch.rand(9, 3)
    found = epigen.compile("dot(a, (b - z[k/8,n/4]) * s[k/32,n])")(a, b, s=s, z=z)
    weight = (b - z.repeat_interleave(8, 0)[:70].repeat_interleave(4, 1)[:, :9]) * s.repeat_interleave(32, 0)[:70]
    torch.testing.assert_close(found, a @ weight)
    tiles = epigen.compile("mm * t[m/2,n/4] + c[n/3]")(a, b, t=z[:3], c=s[:, 0])
    torch.testing.assert_close(tiles, a @ b * z[:3].repeat_interleave(2, 0)[:5].repeat_interleave(4, 1)[:, :9] + s[:, 0].repeat_interleave(3))


def test_a_block_of_one_is_the_index_itself() -> None:
    assert graph_of("dot(a, b * s[k/1,n/1])") == graph_of("dot(a, b * s[k,n])")


_CONFIGS = (cases.tiled(32, 32, 32), cases.tiled(16, 32, 64), cases.split_k(), cases.persistent(), cases.tiled(32, 32, 32, prefetch=1, fused_finalize=1))


@pytest.mark.triton
@pytest.mark.parametrize("text", _TEXTS)
def test_kernels_agree_with_the_oracle(text: str) -> None:
    """Steps along k that a block holds several of, that hold several blocks, and that do neither; k that ends within a block. Confined to the tensors as they are."""
    for i, (config, shape) in enumerate(itertools.product(_CONFIGS, ((33, 50, 70), (32, 64, 256), (5, 7, 300), (1, 16, 0)))):
        graph, b = graph_of(text), (FP16, INT8)[i % 2]
        if config.schedule == "persistent" and ("dot(" in text or shape[2] == 0):
            continue
        if config.schedule == "persistent":
            shape, b = (40, 64, 72), FP16
        given = verify.sample(graph, shape, FP16, b, FP16, layout=("nn", "nt")[i % 2], seed=i)
        verify.demand(verify.differences(epigen.compile(text, config=config, backend="interpreter"), given))


@pytest.mark.triton
def test_offsets_of_64_bits_and_inputs_that_lie_otherwise() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(20, 96).half(), torch.randint(-9, 9, (96, 24), dtype=torch.int8)
    s = torch.rand(24, 3).t()
    expected = (a.double() @ (b.double() * s.double().repeat_interleave(32, 0))).half()
    torch.testing.assert_close(epigen.compile("dot(a, b * s[k/32,n])", config=cases.SMALL, backend="interpreter")(a, b, s=s), expected)
    text = source("dot(a, b * s[k/32,n])", cases.SMALL, index_bits=64)
    assert "s_ptr + (k // 32) * stride_s_k" in text and "K = tl.cast(K, tl.int64)" in text


@pytest.mark.triton
def test_products_of_a_batch_share_scales_or_have_their_own() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 20, 70).half(), torch.randint(-9, 9, (70, 24), dtype=torch.int8)
    for s in (torch.rand(3, 24), torch.rand(3, 3, 24)):
        found = epigen.compile("dot(a, b * s[k/32,n])", config=cases.SMALL, backend="interpreter")(a, b, s=s)
        each = s if s.dim() == 3 else s.expand(3, 3, 24)
        weight = (b.float() * each.repeat_interleave(32, 1)[:, :70]).half().float()
        torch.testing.assert_close(found.float(), a.float() @ weight, rtol=2e-3, atol=2e-2)


def test_rows_of_an_invariant_program() -> None:
    torch.manual_seed(0)
    a, b, inputs = torch.randn(5, 64), torch.randn(64, 6), {"t": torch.rand(3, 2), "s": torch.rand(2, 6)}
    text = "dot(a, b * s[k/32,n]) * t[m/2,n/3]"
    torch.testing.assert_close(epigen.compile(text, invariant="m")(a, b, **inputs), epigen.compile(text)(a, b, **inputs))


# -- what a kernel is


@pytest.mark.parametrize(("block", "block_k", "row"), [(128, 64, True), (64, 64, True), (64, 128, False), (96, 64, False), (32, 64, False)])
def test_of_steps_within_a_block_each_loads_one_row(block: int, block_k: int, row: bool) -> None:
    text = source(f"dot(a, b * s[k/{block},n])", cases.tiled(64, 64, block_k), k_multiple=256)
    assert (f"s_ptr + (k // {block}) * stride_s_k" in text) == row
    assert (f"s_ptr + (offs_bk // {block}) * stride_s_k" in text) != row
    assert ("offs_bk =" in text) != row


def test_past_the_last_k_is_zero() -> None:
    """Where a block goes on: what is loaded of it there is no 0, and 0 takes the operand's place."""
    assert "tl.where(offs_bk < K, t0, 0.0)" in source("dot(a, b - s[k/128,n])", cases.SMALL)
    assert "tl.where(" not in source("dot(a, b * s[k/128,n])", cases.SMALL, k_multiple=32)


@pytest.mark.triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_ahead(target: str) -> None:
    step = 32 if target == "gfx942" else 64
    quantised: tuple[KernelConfig, ...] = (cases.tiled(64, 64, step, 4, 3), cases.tiled(64, 64, 128, 8, 2), cases.split_k())
    jobs = [
        Job(RENDERER.render(spec_of(text, a, b=b, layout=layout, k_multiple=128), config), gpus.TARGETS[target], layout)
        for (text, a, b, layout), config in itertools.product(
            ((_TEXTS[0], BF16, INT8, "nt"), (_TEXTS[0], FP16, UINT8, "nn"), (_TEXTS[1], BF16, BF16, "nt"), (_TEXTS[3], FP16, INT8, "nn")), quantised
        )
    ]
    if target == "sm_90":
        for config in (cases.persistent(), cases.warp_specialized(), cases.warp_specialized(subtiles=2)):
            jobs.append(Job(RENDERER.render(spec_of(_TEXTS[6], layout="nt", tma=("a", "b", "out")), config), gpus.TARGETS[target], "nt"))
    assert len(compiled(jobs)) == len(jobs)


@pytest.mark.triton
def test_what_a_block_takes_is_known_beforehand() -> None:
    """Of shared memory no less than it does."""
    target = gpus.TARGETS["sm_90"]
    for config in (cases.tiled(128, 128, 64, 8, 3), cases.tiled(64, 64, 256, 4, 2)):
        specs = [spec_of(text, BF16, b=INT8, k_multiple=256, layout="nt") for text in _TEXTS[:1]]
        for spec, (one,) in zip(specs, compiled([Job(RENDERER.render(spec, config), target, "nt") for spec in specs]), strict=True):
            assert one.resources.shared_bytes <= model.resources(spec, config, target).shared_bytes, spec.program


def test_digests_and_problems_tell_of_blocks() -> None:
    texts = ("dot(a, b * s[k,n])", "dot(a, b * s[k/128,n])", "dot(a, b * s[k/64,n])", "dot(a, b * s[k/128,n/128])", "dot(a, b * s[k/128])")
    assert len({graph_digest(graph_of(text)) for text in texts}) == len(texts)
    assert graph_digest(graph_of(texts[1])) == graph_digest(graph_of(texts[1].replace("s[", "t[")))
    shape, found = (4096, 4096, 4096), []
    for text in texts:
        spec = lower(graph_of(text), signature_of_contiguous(graph_of(text), FP16, INT8, (("s", FP16),), shape, "nt", "ieee"))
        problem = problem_of(graph_of(text), spec, shape, "NVIDIA H200", "9.0")
        assert [_INPUT(kind) for kind in problem.inputs] == [*problem.inputs]
        found.append((problem.inputs, epilogue_kind(spec).split()[0]))
    assert found[1:] == [
        (("fp16[k/128,n]",), "load:k/128n"),
        (("fp16[k/64,n]",), "load:k/64n"),
        (("fp16[k/128,n/128]",), "load:k/128n/128"),
        (("fp16[k/128]",), "load:k/128"),
    ]
    for damaged in ("fp16[k/0,n]", "fp16[n,k/2]", "fp16[k/128", "fp16[j/2]", "fp17[k/2]"):
        with pytest.raises(fields.Wrong):
            _INPUT(damaged)


def test_traffic_counts_what_there_is() -> None:
    m, n, _ = shape = (100, 60, 40)
    plain = traffic(spec_of("mm"), shape).bytes
    for text, elements in (("dot(a, b * s[k/16,n])", 3 * n), ("dot(a * s[m,k/16], b)", 3 * m), ("mm * s[m/3,n/7]", 34 * 9), ("dot(a, b * s[k/64])", 1)):
        assert traffic(spec_of(text), shape).bytes == plain + 2 * elements


# -- calls


def test_a_call_names_the_extents_that_it_expects(golden: Golden) -> None:
    a, b = torch.ones(4, 70), torch.ones(70, 6)
    for name, text, shape in (
        ("rows", "dot(a, b * s[k/32,n])", (2, 6)),
        ("no blocks", "dot(a, b * s[k/32,n])", (70, 6)),
        ("both", "dot(a, b * s[k/32,n/4])", (3, 1)),
        ("transposed", "dot(a, b * s[k/32,n])", (6, 3)),
        ("epilogue", "mm * s[m/3]", (1,)),
    ):
        with golden.raises(CallError, name):
            epigen.compile(text)(a, b, s=torch.ones(shape))
    assert "inputs: s[k/32,n];" in repr(epigen.compile("dot(a, b * s[k/32,n])"))


# -- gradients


@pytest.mark.parametrize("text", ["dot(a, b * s[k/3,n])", "relu(dot(a * sa[m/2,k/3], (b - zero[k/2,n/4]) * s[k/3,n]) + bias) * t[m/2,n]"])
def test_gradients_flow_past_them(text: str) -> None:
    """To the operands, and to inputs that have a value for each element: by programs whose indices have other letters, and blocks with them."""
    graph, shape, generator = graph_of(text), (5, 6, 7), torch.Generator().manual_seed(0)
    a, b = gradients.normal("mk", shape, generator), gradients.normal("kn", shape, generator)
    inputs = gradients.inputs_of(graph, shape, generator)
    wanted = [n.name for n in graph.inputs() if not n.blocks]
    derived = derive(graph, FP32, wrt=["mm", *wanted])
    arriving = {"out": gradients.normal("mn", shape, generator)}
    found = gradients.all_gradients(derived, a, b, inputs, arriving)
    assert {"a", "b", *wanted} <= set(found)
    names = ["a", "b", *wanted]
    for name, expected in zip(names, gradients.autograd_of_operands(graph, a, b, inputs, arriving, names), strict=True):
        torch.testing.assert_close(found[name], expected)


def test_programs_of_gradients_have_the_blocks_under_their_letters() -> None:
    of_a, of_b = derive(graph_of("dot(a, b * s[k/128,n])"), wrt=["mm"]).operands
    assert of_a.program.text == "da = dot(a, b * s[k,n/128]); da" and "s is the forward's s, transposed" in of_a.wiring()
    assert of_b.program.text == "db = mm * s[m/128,n]; db"


def test_none_flows_to_them(golden: Golden) -> None:
    with golden.raises(DerivationError):
        derive(graph_of("dot(a, b * s[k/128,n])"), wrt=["s"])
    assert derive(graph_of("dot(a, b * round(s[k/128,n]))"), wrt=["mm", "s"]).operands


@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
def test_a_layer_trains(lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, w, s, t = torch.randn(*lead, 7, dtype=torch.float64), torch.randint(-9, 9, (6, 7), dtype=torch.int8), torch.rand(3, 6).double(), torch.rand(2).double()
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    x.requires_grad_()
    text = "relu(dot(a, b * s[k/3,n]) * t[n/4] + bias)"
    for _ in range(3):
        ours = epigen.linear(x, w, bias, text, s=s, t=t)
        theirs = torch.relu(x @ (w.t() * s.repeat_interleave(3, 0)[:7]) * t.repeat_interleave(4)[:6] + bias)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), [x, bias]), torch.autograd.grad(theirs.sum(), [x, bias]))


def test_processes_do_not_share_what_a_block_may_lie_across() -> None:
    pytest.importorskip("torch.distributed.tensor")
    from epigen.training.sharding import ways

    assert len(ways("dot(a, b * s[k,n])", 2)) == 4
    _, rows, columns = ways("dot(a, b * s[k/128,n])", 2)
    assert rows.inputs["s"].is_replicate() and columns.inputs["s"].is_shard(1)
    assert len(ways("dot(a, b * s[k/128,n/128])", 2)) == 2


def test_float64_has_them_too() -> None:
    a, b, s = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    (found,) = reference.evaluate(graph_of("dot(a, b * s[k/5,n])"), a, b, {"s": s}, [FP32])
    torch.testing.assert_close(found, (a @ (b * s.repeat_interleave(5, 0)[:8])).float())
