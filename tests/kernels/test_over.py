"""A program over a product that is given: what a call does after its product, by each backend."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from golden import Golden
from hypothesis import HealthCheck, assume, given, settings
from programs import programs
from torch import Tensor

import epigen
from epigen.codegen import schedules
from epigen.codegen.lower import output_dtype
from epigen.codegen.spec import WIDE
from epigen.dtypes import BF16, BY_TORCH, FP16, FP32, INT8, DType
from epigen.errors import CallError, ConfigError
from epigen.gpus import TARGETS
from epigen.ir import bound, reference
from epigen.runtime import outputs, verify
from epigen.runtime.kernel import Kernel

BACKENDS = ("reference", "interpreter")
BACKWARD = "dz = drelu(mm, mask); dz, bgrad(dz)"
M, N, K = 20, 37, 24


def whole(*size: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sample(kernel: Kernel, dtype: DType, shape: tuple[int, int] = (M, N), **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """A product and the program's inputs."""
    inputs = dict(verify.sample(kernel._over.graph, (*shape, 0), dtype, dtype, dtype, **options).inputs)
    return inputs.pop("mm"), inputs


def demand(kernel: Kernel, mm: Tensor, inputs: dict[str, Any]) -> None:
    """Each output within the oracle's bound, which nearly every element has."""
    graph, found = kernel._over.graph, kernel.over(mm, **inputs)
    dtypes = [output_dtype(graph, o, BY_TORCH[str(mm.dtype)]) for o in graph.outputs]
    expected = bound.expect(graph, mm.new_empty(mm.shape[0], 0), mm.new_empty(0, mm.shape[1]), {"mm": mm, **inputs}, dtypes, "ieee")
    results = [found] if isinstance(found, Tensor) else list(found)
    assert [t.dtype for t in results] == [reference.torch_dtype(d) for d in dtypes]
    differences = {o.name: bound.compare(t, e) for o, t, e in zip(graph.outputs, results, expected, strict=True)}
    verify.demand(differences)
    assert all(d.promised > 0.5 for d in differences.values())


PROGRAMS = (
    "mm",
    "relu(mm + bias)",
    BACKWARD,
    "z = gelu(mm + bias); z, bitmask(z > 0), cast(z, fp32), sum(z, n), logsumexp(z)",
    "dz = dgelu(mm, z[m,n]) * alpha; dz, bgrad(dz), sum(dz * up[m,n], n), amax(dz)",
    "sum(mm, m), max(mm, n) * scale_a[m], cast(amax(mm) * s, fp16)",
)


@pytest.mark.triton
@pytest.mark.parametrize("text", PROGRAMS)
@pytest.mark.parametrize(
    ("backend", "dtype"), [("interpreter", FP16), ("interpreter", FP32), ("reference", FP16), ("reference", BF16), ("reference", FP32)], ids=str
)
def test_every_output_is_within_the_oracles_bound(text: str, backend: str, dtype: DType) -> None:
    kernel = epigen.compile(text, backend=backend)
    demand(kernel, *sample(kernel, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("text", PROGRAMS)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(M, N), (1000, 520), (8192, 1001)], ids=str)
def test_gpu(text: str, dtype: DType, shape: tuple[int, int]) -> None:
    kernel = epigen.compile(text)
    mm, inputs = sample(kernel, dtype, shape, device="cuda")
    for product in (mm, mm.T.contiguous().T):
        for _ in range(2):
            demand(kernel, product, inputs)


@pytest.mark.triton
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=12, tame=True, casts=(FP16, FP32, INT8)))
def test_random_programs(text: str) -> None:
    kernel = epigen.compile(text, backend="interpreter")
    assume(", k)" not in kernel.program)
    mm, inputs = sample(kernel, FP32, seed=len(text))
    found, expected = kernel.over(mm, **inputs), epigen.compile(text).over(mm, **inputs)
    graph = kernel._over.graph
    dtypes = [output_dtype(graph, o, FP32) for o in graph.outputs]
    for result in (found, expected):
        results = [result] if isinstance(result, Tensor) else list(result)
        oracle = bound.expect(graph, torch.empty(M, 0), torch.empty(0, N), {"mm": mm, **inputs}, dtypes, "ieee")
        verify.demand({o.name: bound.compare(t, e) for o, t, e in zip(graph.outputs, results, oracle, strict=True)})


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", [BACKWARD, "z = mm * alpha + residual; relu(z), bitmask(z > 0), bgrad(z), sum(z, n)"])
def test_it_is_what_a_call_does_with_its_product(backend: str, text: str) -> None:
    """Bit for bit: every sum is exact."""
    kernel = epigen.compile(text, backend=backend)
    a, b = whole(M, K, dtype=torch.float32), whole(K, N, seed=1, dtype=torch.float32)
    mask = reference.pack(torch.rand(M, N, generator=torch.Generator().manual_seed(2)) < 0.5)
    inputs = {"mask": mask} if "drelu" in text else {"alpha": 2.0, "residual": whole(M, N, seed=3)}
    called, over = kernel(a, b, **inputs), kernel.over(a @ b, **inputs)
    assert over._fields == called._fields
    for x, y in zip(over, called, strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride()


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded", "shifted", "rows apart", "negated"])
def test_a_product_may_lie_anyhow(backend: str, view: str) -> None:
    kernel = epigen.compile(BACKWARD, backend=backend)
    mm, mask = whole(M, N), reference.pack(torch.rand(M, N, generator=torch.Generator().manual_seed(2)) < 0.5)
    viewed = {
        "transposed": lambda: mm.T.contiguous().T,
        "sliced": lambda: torch.zeros(2 * M, 3 * N).half()[::2, ::3].copy_(mm),
        "expanded": lambda: mm[:1].expand(M, N),
        "shifted": lambda: torch.zeros(M * N + 1).half()[1:].view(M, N).copy_(mm),
        "rows apart": lambda: torch.zeros(M, N + 3).half()[:, :N].copy_(mm),
        "negated": lambda: torch._neg_view(mm),
    }[view]()
    expected = torch.where(reference.unpack(mask, N), viewed.float(), 0)
    dz, db = kernel.over(viewed, mask=mask)
    assert torch.equal(dz, expected.half()) and dz.is_contiguous() and torch.equal(db, expected.sum(0))


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, N), (M, 0), (0, 0), (1, 1), (1, N), (M, 1)], ids=str)
def test_extents_of_zero_and_one(backend: str, shape: tuple[int, int]) -> None:
    mm = whole(*shape)
    y, mask, total, top, everything = epigen.compile("mm, bitmask(mm >= 0), sum(mm, m), max(mm, n), sum(mm)", backend=backend).over(mm)
    assert torch.equal(y, mm) and torch.equal(reference.unpack(mask, shape[1]), mm >= 0)
    assert torch.equal(total, mm.float().sum(0)) and torch.equal(everything, mm.float().sum())
    assert torch.equal(top, mm.float().amax(1) if shape[1] else torch.full(shape[:1], -torch.inf))


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_infinity_go_through(backend: str) -> None:
    mm = whole(M, N)
    mm[3], mm[4] = torch.nan, torch.inf
    y = epigen.compile("relu(mm)", backend=backend).over(mm)
    assert y[3].isnan().all() and y[4].isinf().all() and torch.equal(y[:3], mm[:3].relu())


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_go_where_they_are_told(backend: str) -> None:
    kernel = epigen.compile(BACKWARD, backend=backend)
    mm, mask = whole(M, N), reference.pack(torch.rand(M, N, generator=torch.Generator().manual_seed(2)) < 0.5)
    expected = kernel.over(mm, mask=mask)
    dz, db = torch.zeros(N, M).half().T, torch.zeros(2 * N)[::2]
    found = kernel.over(mm, mask=mask, out=(dz, db))
    assert found.dz is dz and found[1] is db and torch.equal(dz, expected.dz) and torch.equal(db, expected[1])
    kernel.over(mm, mask=mask, out={"dz": mm})
    assert torch.equal(mm, expected.dz)


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_is_never_a_view_of_an_input(backend: str) -> None:
    """On the CPU it was one, where nothing had to be computed: it changed with the input, and with an output that took the input's place."""
    mm = whole(M, N, dtype=torch.float32)
    before = mm.clone()
    y, copy, again = epigen.compile("mm, mm, mm + 1", backend=backend).over(mm, out={"out2": mm})
    assert torch.equal(y, before) and torch.equal(copy, before) and torch.equal(again, before + 1) and again is mm
    assert len({t.data_ptr() for t in (y, copy, mm)}) == 3
    residual = whole(M, N, dtype=torch.float32)
    kept, _ = epigen.compile("residual, mm", backend=backend, config=cases.SMALL)(whole(M, K).float(), whole(K, N).float(), residual=residual)
    assert torch.equal(kept, residual) and kept.data_ptr() != residual.data_ptr()
    turned = epigen.compile("mm * 2", backend=backend).over(whole(N, M).T)
    assert turned.is_contiguous(), "outputs lie alike, whatever the backend and the inputs"


# -- what is refused

MM = whole(M, N)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("program", "mm", "inputs", "name"),
    [
        ("mm", [1.0], {}, "a list"),
        ("mm", MM[0], {}, "a row"),
        ("mm", MM.to(torch.complex64), {}, "complex64"),
        ("mm", MM.to(torch.int8), {}, "int8"),
        ("mm, sum(a, k)", MM, {}, "a sum over k"),
        ("mm + bias", MM, {}, "no bias"),
        ("mm + bias", MM, {"bias": whole(M)}, "a bias of M"),
        ("mm + bias", MM, {"bias": whole(N).to("meta")}, "a bias on meta"),
        ("mm", MM, {"bais": 1.0}, "bais"),
        ("mm", MM, {"mm": MM}, "mm"),
        ("mm", MM, {"out": MM.float()}, "out"),
        ("mm", MM.clone().requires_grad_(), {}, "requires grad"),
    ],
)  # fmt: skip
def test_what_does_not_fit(backend: str, program: str, mm: Any, inputs: dict[str, Any], name: str, golden: Golden) -> None:
    with golden.raises(epigen.EpigenError, name):
        epigen.compile(program, backend=backend).over(mm, **inputs)


def test_operands_are_not_a_product(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.compile("mm").over(MM, MM)


def test_the_interpreter_does_not_take_bf16(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.compile("mm", backend="interpreter").over(MM.bfloat16())


def test_compiled_kernels_want_a_gpu(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.compile("mm", backend="triton").over(MM)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_config_with_a_main_loop_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"tiled .*library"):
        epigen.compile("mm", config=cases.SMALL, backend=backend).over(MM)


# -- the kernel


@pytest.mark.triton
def test_it_is_one_kernel_and_one_for_its_reductions() -> None:
    kernel = epigen.compile(BACKWARD, backend="interpreter")
    mask = reference.pack(MM > 0)
    kernel.over(MM, mask=mask)
    text = kernel.source()
    assert text.count("@triton.jit\ndef epigen_") == 2 and "tl.dot" not in text and "acc" not in text and "a_ptr" not in text
    assert "# mm[m, n] is given" in text and "mm_ptr" in text and "[M, N] fp16" in text
    assert kernel.config.schedule == "library"
    assert kernel.explain() == f"{kernel.program}\n{kernel.config}\none fused epilogue: the product is given"
    kernel.over(MM.float(), mask=mask)
    assert "[M, N] fp32" in kernel.source() and kernel.source() != text
    kernel(whole(M, K), whole(K, N), mask=mask)
    assert "a_ptr" in kernel.source(), "of the last call, whichever it was"


@pytest.mark.triton
def test_a_config_of_the_epilogues_own_is_kept() -> None:
    config = schedules.config("library", block_m=1, block_n=64, num_warps=2)
    kernel = epigen.compile(BACKWARD, config=config, backend="interpreter")
    dz, db = kernel.over(MM, mask=reference.pack(MM > 0))
    assert torch.equal(dz, MM.relu()) and torch.equal(db, MM.float().relu().sum(0)) and kernel.config == config


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(8, 128), (8, 1000), (20, 33)])
def test_a_call_has_the_text_that_was_planned_for_its_problem(shape: tuple[int, int]) -> None:
    """So that what is compiled ahead is what runs; rows that 16 elements do not divide are read as wide as they can be."""
    kernel = epigen.compile("mm * gate[m,n]", backend="interpreter")
    kernel.over(torch.ones(shape).half(), gate=torch.ones(shape).half())
    plan = kernel._over.plan((*shape, 0), FP16, TARGETS["sm_90"])
    assert kernel.source() == plan.source and (f"stride_mm_m_{shape[1] & -shape[1]} " in plan.source.replace(",", " ")) == (shape[1] == 1000)


@pytest.mark.parametrize(
    ("shape", "row_stride", "bits"),
    [((WIDE // 4096 - 1, 4096), 4096, 32), ((WIDE // 4096, 4096), 4096, 64), ((3, 8), WIDE // 2, 64)],
    ids=["just below", "just above", "small, in rows far apart"],
)
def test_offsets_past_32_bits(shape: tuple[int, int], row_stride: int, bits: int) -> None:
    kernel = epigen.compile("relu(mm)")._over
    mm = torch.empty_strided(shape, (row_stride, 1), dtype=torch.float16, device="meta")
    signature = kernel._signature((*shape, 0), (), {"mm": mm}, {}, outputs.of(kernel.graph, FP16))
    assert signature.index_bits == bits and ("tl.int64" in kernel.plan((*shape, 0), signature=signature).source) == (bits == 64)


@pytest.mark.triton
def test_equal_products_are_specialised_once() -> None:
    kernel = epigen.compile("relu(mm)", backend="interpreter")
    for m in (5, 6, 5, 7):
        kernel.over(whole(m, N))
    assert len(kernel._over._loaders[True].modules) == 1
