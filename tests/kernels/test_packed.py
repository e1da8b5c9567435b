"""Weights of 4 bits, two in a byte: `int4(b)` and `uint4(b)`, along k and along n, and what packs them."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import torch
from choosing import chosen_runs
from compiling import compiled
from golden import Golden
from specs import RENDERER, source, spec_of
from torch import Tensor

import epigen
from epigen import gpus
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.spec import KernelSpec
from epigen.db.problem import graph_digest, problem_of
from epigen.dtypes import BF16, FP16, FP32, INT8, UINT8, DType
from epigen.errors import CallError, DerivationError
from epigen.ir import nibbles
from epigen.ir.derive import derive
from epigen.ir.graph import is_given
from epigen.ir.program import graph_of
from epigen.perf import model
from epigen.perf.traffic import traffic
from epigen.runtime import verify
from epigen.runtime.ahead import Job

_TEXTS = (
    "dot(a, int4(b))",
    "relu(dot(a, (uint4(b) - zero[k/32,n]) * s[k/128,n]) + bias)",
    "dot(relu(a) * norm[k], int4(b, n) * s[n]) * alpha",
    "z = dot(a, uint4(b, n) * s[k,n]); z, bgrad(z), sum(a, k)",
)


def _spec(text: str, a: DType = FP16, shape: tuple[int, int, int] = (4096, 4096, 4096), layout: str = "nt") -> KernelSpec:
    graph = graph_of(text)
    return lower(graph, signature_of_contiguous(graph, a, UINT8, tuple((n.name, FP16) for n in graph.inputs()), shape, layout, "ieee"))


def _weight(n: int, k: int, signed: bool = True) -> Tensor:
    return torch.randint(-8, 8, (n, k)) if signed else torch.randint(0, 16, (n, k))


# -- what packs them


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("signed", [True, False])
def test_packed_and_unpacked_is_the_same(signed: bool, dim: int) -> None:
    torch.manual_seed(0)
    values = torch.randint(-8, 8, (4, 6, 2)) + (0 if signed else 8)
    packed = epigen.pack_int4(values, dim, signed)
    assert packed.dtype == torch.uint8 and packed.numel() * 2 == values.numel() and packed.shape[dim] * 2 == values.shape[dim]
    found = epigen.unpack_int4(packed, dim, signed)
    assert torch.equal(found.long(), values) and found.dtype == (torch.int8 if signed else torch.uint8)
    assert torch.equal(nibbles.unpack(packed, dim % 3, signed).long(), values)


def test_the_first_of_two_has_the_low_bits() -> None:
    assert epigen.pack_int4(torch.tensor([1, 2, -1, -8])).tolist() == [0x21, 0x8F]
    assert epigen.pack_int4(torch.tensor([1, 2, 15, 8]), signed=False).tolist() == [0x21, 0x8F]
    assert epigen.pack_int4(torch.zeros(3, 0, dtype=torch.int8)).shape == (3, 0)


def test_what_cannot_be_packed_says_why(golden: Golden) -> None:
    wrong: dict[str, Any] = {
        "floats": lambda: epigen.pack_int4(torch.randn(4)),
        "too large": lambda: epigen.pack_int4(torch.tensor([8, 0])),
        "below 0": lambda: epigen.pack_int4(torch.tensor([-1, 0]), signed=False),
        "odd": lambda: epigen.pack_int4(torch.ones(3, 5, dtype=torch.int8)),
        "no dimension": lambda: epigen.pack_int4(torch.tensor(3)),
        "dim": lambda: epigen.pack_int4(torch.ones(2, 2, dtype=torch.int8), 2),
        "unpacked": lambda: epigen.unpack_int4(torch.ones(4, dtype=torch.int8)),
    }
    for name, call in wrong.items():
        with golden.raises(CallError, name):
            call()


# -- values


@pytest.mark.parametrize("a", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_reference_reads_them(a: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, s, z = torch.randn(5, 70).to(a), _weight(24, 70), torch.rand(3, 24).to(a), torch.rand(3, 24).to(a)
    plain = epigen.compile("dot(a, int4(b)), cast(dot(a, int4(b)), fp32)")(x, epigen.pack_int4(w).t())
    assert plain[0].dtype == a
    torch.testing.assert_close(plain[0], epigen.compile("mm")(x, w.to(a).t()))
    of_n = epigen.compile("dot(a, int4(b, n))")(x, epigen.pack_int4(w.t().contiguous()))
    torch.testing.assert_close(of_n, plain[0])
    ours = epigen.compile("dot(a, (uint4(b) - z[k/32,n]) * s[k/32,n])")(x, epigen.pack_int4(w + 8, signed=False).t(), s=s, z=z)
    theirs = epigen.compile("dot(a, (b - z[k/32,n]) * s[k/32,n])")(x, (w + 8).to(torch.uint8).t(), s=s, z=z)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.triton
@pytest.mark.parametrize("text", _TEXTS)
def test_kernels_agree_with_the_oracle(text: str) -> None:
    """Confined to the bytes that there are, with k and n that end within a step and a tile."""
    configs: tuple[Any, ...] = (cases.tiled(32, 32, 32), cases.tiled(16, 32, 64), cases.split_k(), cases.tiled(32, 32, 32, prefetch=1, fused_finalize=1), None)
    for i, (config, shape) in enumerate(itertools.product(configs, ((33, 50, 70), (32, 64, 256), (5, 6, 302), (1, 2, 2), (4, 8, 0)))):
        given = verify.sample(graph_of(text), shape, (FP16, FP32)[i % 2], UINT8, FP16, layout=("nn", "nt", "tn")[i % 3], seed=i)
        verify.demand(verify.differences(epigen.compile(text, config=config, backend="interpreter"), given))


@pytest.mark.triton
def test_batches_and_views() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 20, 64).half(), _weight(24, 64)
    packed = epigen.pack_int4(w)
    kernel = epigen.compile("dot(a, int4(b))", config=cases.SMALL, backend="interpreter")
    for b in (packed.t(), packed.t().contiguous(), packed.t().expand(3, -1, -1), packed.repeat(1, 2)[:, :32].t()):
        torch.testing.assert_close(kernel(x, b).float(), x.float() @ w.float().t(), rtol=2e-3, atol=2e-2)


def test_the_meta_device_and_exported_programs_have_their_shapes() -> None:
    x, b = torch.randn(5, 64), epigen.pack_int4(_weight(24, 64)).t()
    kernel = epigen.compile("dot(a, int4(b))")
    assert kernel(x.to("meta"), b.to("meta")).shape == (5, 24)
    assert epigen.compile("dot(a, int4(b, n))")(x.to("meta"), torch.empty(64, 12, dtype=torch.uint8, device="meta")).shape == (5, 24)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return kernel(x, b)

    assert torch.equal(torch.export.export(Model(), (x,)).module()(x), kernel(x, b))


# -- what a call refuses


def test_calls_that_do_not_fit_say_so(golden: Golden) -> None:
    x, b = torch.ones(4, 8), torch.ones(4, 6, dtype=torch.uint8)
    wrong: dict[str, Any] = {
        "K": lambda: epigen.compile("dot(a, int4(b))")(x, torch.ones(8, 6, dtype=torch.uint8)),
        "odd K": lambda: epigen.compile("dot(a, int4(b))")(torch.ones(4, 7), b),
        "along n": lambda: epigen.compile("dot(a, int4(b, n))")(x, b),
        "int8": lambda: epigen.compile("dot(a, int4(b))")(x, b.to(torch.int8)),
        "a of int8": lambda: epigen.compile("dot(a, int4(b))")(x.to(torch.int8), b),
        "scales": lambda: epigen.compile("dot(a, int4(b) * s[k/4,n])")(x, b, s=torch.ones(1, 6)),
    }
    for name, call in wrong.items():
        with golden.raises(CallError, name):
            call()


# -- what a kernel is


def test_each_byte_is_read_by_its_place() -> None:
    along_k, along_n = source("dot(a, int4(b))", cases.SMALL, b=UINT8), source("dot(a, uint4(b, n))", cases.SMALL, b=UINT8)
    assert "b_ptr + offs_pair[:, None] * stride_bk + offs_n * stride_bn" in along_k and "b_ptrs += BLOCK_K // 2 * stride_bk" in along_k
    assert "even = ((x & 15) ^ 0x6408).to(tl.float16, bitcast=True) - 1032.0" in along_k and "[K / 2, N] uint8" in along_k
    assert "b_ptr + offs_k[:, None] * stride_bk + (offs_n // 2) * stride_bn" in along_n and "b_ptrs += BLOCK_K * stride_bk" in along_n
    assert "b = b >> b_bit & 15" in along_n and "# b holds two values of uint4 in each byte, side by side along n\n" in along_n
    assert "tl.cast(BLOCK_K // 2, tl.int64) * stride_bk" in source("dot(a, int4(b))", cases.SMALL, b=UINT8, index_bits=64)


def test_a_packed_operand_is_none_as_it_is_given() -> None:
    graph = graph_of("dot(a, int4(b))")
    assert graph.computed() == ("b",) and graph.packed_along() == "k" and graph != graph_of("mm")
    assert [is_given(n) for n in graph.nodes if n.op == "operand"] == [True, False]
    assert len({graph_digest(graph_of(text)) for text in ("mm", "dot(a, int4(b))", "dot(a, uint4(b))", "dot(a, int4(b, n))")}) == 4


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1100"])
def test_the_rule_and_the_space_choose_what_can_run(target: str) -> None:
    for text, a, shape, layout in itertools.product(_TEXTS, (FP16, BF16), ((4096, 4096, 4096), (16, 4096, 4096), (1000, 1004, 1002), (1, 2, 2)), ("nn", "nt")):
        chosen_runs(_spec(text, a, shape, layout), shape, gpus.TARGETS[target])


@pytest.mark.triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_ahead(target: str) -> None:
    step = 32 if target == "gfx942" else 64
    jobs = [
        Job(RENDERER.render(spec_of(text, a, b=UINT8, layout=layout, k_multiple=64, index_bits=bits), config), gpus.TARGETS[target], layout)
        for text, (a, layout, bits), config in itertools.product(
            _TEXTS, ((BF16, "nt", 32), (FP16, "nn", 64)), (cases.tiled(64, 64, step, 4, 3), cases.tiled(16, 64, step, 4, 2))
        )
    ]
    assert len(compiled(jobs)) == len(jobs)


@pytest.mark.triton
def test_what_a_block_takes_is_known_beforehand() -> None:
    """Of shared memory no less than it does."""
    config, target = cases.tiled(128, 128, 64, 8, 3), gpus.TARGETS["sm_90"]
    specs = [spec_of(text, BF16, b=UINT8, k_multiple=64, layout="nt") for text in _TEXTS[:2]]
    for spec, (found,) in zip(specs, compiled([Job(RENDERER.render(spec, config), target, "nt") for spec in specs]), strict=True):
        assert found.resources.shared_bytes <= model.resources(spec, config, target).shared_bytes, spec.program


def test_traffic_and_problems_count_half_a_byte() -> None:
    shape = (16, 512, 256)
    packed, whole = _spec("dot(a, int4(b))", shape=shape), _spec("mm", shape=shape)
    assert traffic(whole, shape).bytes - traffic(packed, shape).bytes == 512 * 256 // 2
    problem = problem_of(graph_of("dot(a, int4(b))"), packed, (16, 512, 264), "NVIDIA H200", "9.0")
    assert (problem.a, problem.b, problem.kind, problem.alignment) == ("fp16", "uint8", "load: store:mn reduce: dot:b", 4)
    assert epigen.compile("dot(a, int4(b))").plan((4096, 4096, 4096), target=gpus.TARGETS["sm_90"]).spec.signature.b == UINT8
    assert epigen.compile("mm").plan((4096, 4096, 4096), dtype=INT8, target=gpus.TARGETS["sm_90"]).spec.signature.b == INT8


# -- gradients


def test_programs_of_gradients_read_bytes_along_the_other_index(golden: Golden) -> None:
    graph = graph_of("dot(relu(a), int4(b) * s[k/128,n])")
    (of_a,) = derive(graph, wrt=["mm"]).operands
    assert of_a.operand == "a" and of_a.program.text == "da = drelu(dot(a, int4(b, n) * s[k,n/128]), ~(relu(x[m,n]) <= 0)); da"
    with golden.raises(CallError, "wrt b"):
        derive(graph, wrt=["b"])
    with golden.raises(DerivationError, "wrt s"):
        derive(graph_of("dot(a, int4(b) * s[n])"), wrt=["s"])


@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("signed", [True, False])
def test_a_layer_passes_gradients_by_them(signed: bool, lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, w, s, norm = torch.randn(*lead, 8, dtype=torch.float64), _weight(6, 8, signed), torch.rand(2, 6).double(), torch.rand(8).double()
    bias = torch.randn(6, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, bias, norm)]
    text = f"relu(dot(a * norm[k], {'int4' if signed else 'uint4'}(b) * s[k/5,n]) + bias)"
    for _ in range(3):
        ours = epigen.linear(x, epigen.pack_int4(w, signed=signed), bias, text, s=s, norm=norm)
        theirs = torch.relu((x * norm) @ (w.t() * s.repeat_interleave(5, 0)[:8]) + bias)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves))


def test_a_layers_weight_has_half_of_k(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.linear(torch.ones(3, 8), torch.ones(6, 8, dtype=torch.uint8), epilogue="dot(a, int4(b))")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own of autograd functions that it compiles
def test_under_torch_compile() -> None:
    torch.manual_seed(0)
    x, w, s = torch.randn(5, 8, requires_grad=True), _weight(6, 8), torch.rand(2, 6)
    packed = epigen.pack_int4(w)
    compiled_layer = torch.compile(lambda x: epigen.linear(x, packed, epilogue="dot(a, int4(b) * s[k/4,n])", s=s), backend="aot_eager", fullgraph=True)
    theirs = x @ (w.t() * s.repeat_interleave(4, 0))
    torch.testing.assert_close(compiled_layer(x), theirs)
    torch.testing.assert_close(torch.autograd.grad(compiled_layer(x).sum(), x), torch.autograd.grad(theirs.sum(), x))
