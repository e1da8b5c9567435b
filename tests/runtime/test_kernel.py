"""The callable on the CPU: what a call accepts, how it refuses, when it specialises, where it writes, and what it says of itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import cases
import pytest
import torch
from golden import Golden
from threads import in_threads
from torch.utils._python_dispatch import TorchDispatchMode

import epigen
from epigen import settings
from epigen.choose import rule
from epigen.codegen import schedules
from epigen.codegen.render import Rendered, Renderer
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.db.problem import problem_of
from epigen.dtypes import BF16, FAST_ACCUM, FP8E4M3, FP8E5M2, FP16, FP32, INT8, DType
from epigen.errors import CallError, ConfigError
from epigen.gpus import TARGETS
from epigen.ir import reference
from epigen.ir.program import graph_of
from epigen.runtime import arguments, kernel, vendor, verify, workspace
from epigen.runtime.kernel import Kernel
from epigen.runtime.loader import Loader

SMALL = cases.SMALL
BACKENDS = ("reference", "interpreter")
M, N, K = 20, 37, 24


def half(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).half()


def whole(*size: int, seed: int = 0) -> torch.Tensor:
    """Small integers: their products' sums are exact, so that results can be compared bit for bit."""
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(seed)).half()


def compiled(text: str, backend: str | None = None, **options: Any) -> Kernel:
    return epigen.compile(text, config=SMALL, backend=backend, **options)


# -- what a call returns


def test_one_output_is_a_tensor() -> None:
    y = epigen.compile("relu(mm + bias)")(torch.ones(2, 3), torch.ones(3, 4), bias=torch.tensor([-2.0, -3.0, -4.0, 0.5]))
    assert torch.equal(y, torch.tensor([[1.0, 0.0, 0.0, 3.5]] * 2))


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_outputs_are_a_named_tuple(backend: str) -> None:
    """By the name that the program assigned, else by position."""
    a, b = whole(M, K), whole(K, N)
    found = compiled("z = mm * 2; z, bgrad(z), relu(z)", backend)(a, b)
    assert found._fields == ("z", "out1", "out2")
    z = 2 * (a.float() @ b.float())
    assert torch.equal(found.z, z.half()) and torch.equal(found.out1, z.sum(0)) and torch.equal(found.out2, z.relu().half())
    assert isinstance(found, tuple) and found[0] is found.z


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_default_dtypes_of_outputs(backend: str) -> None:
    found = compiled("mm, sum(mm, n), bitmask(mm > 0), cast(mm, int8), cast(sum(mm), fp16)", backend)(whole(M, K), whole(K, N))
    assert [t.dtype for t in found] == [torch.float16, torch.float32, torch.uint8, torch.int8, torch.float16]
    assert [tuple(t.shape) for t in found] == [(M, N), (M,), (M, 5), (M, N), ()]
    int8 = compiled("mm, mm + 0.5", backend)(whole(M, K).to(torch.int8), whole(K, N).to(torch.int8))
    assert [t.dtype for t in int8] == [torch.int32, torch.float32]


@pytest.mark.triton
@pytest.mark.parametrize("program", ["mm + bias", "z = mm + bias; relu(z), bgrad(z)"])
def test_operands_of_any_strides(program: str) -> None:
    a, b, bias = whole(M, K), whole(K, N), whole(N)
    expected = compiled(program, "interpreter")(a, b, bias=bias)
    spread = torch.zeros(2 * N, dtype=torch.float16)[::2].copy_(bias)
    found = compiled(program, "interpreter")(a.T.contiguous().T, b.T.contiguous().T, bias=spread)
    for x, y in zip(found if isinstance(found, tuple) else [found], expected if isinstance(expected, tuple) else [expected], strict=True):
        assert torch.equal(x, y)


# -- the two CPU backends


@pytest.mark.triton
@pytest.mark.parametrize(
    "program",
    [
        "relu(mm + bias)",
        "h = cast(mm * 0.3, fp16); cast(h + bias, fp32), h",
        "cast(mm * 0.37, int8)",
        "z = mm * alpha + residual; relu(z), bitmask(z > 0), amax(z)",
        "cast(mm * 0.3, fp16) * 3 - scale_a[m], max(mm, n)",
    ],
)
def test_reference_and_generated_kernel_round_at_the_same_points(program: str) -> None:
    """Exact sums, so every difference would come from a rounding in another place."""
    given = {"bias": whole(N), "residual": whole(M, N), "scale_a": whole(M), "alpha": 0.7}
    results = []
    for backend in BACKENDS:
        kernel = compiled(program, backend)
        inputs = {n.name: given[n.name] for n in kernel.graph.inputs()}
        found = kernel(whole(M, K), whole(K, N, seed=1), **inputs)
        results.append(found if isinstance(found, tuple) else (found,))
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_backends_are_within_the_oracles_bound(backend: str) -> None:
    kernel = compiled("z = gelu(mm + bias); z, bitmask(z > 0), bgrad(z), logsumexp(z, n)", backend)
    verify.demand(verify.differences(kernel, verify.sample(kernel.graph, (M, N, K), FP16, FP16, FP16)))


def test_cpu_tensors_take_the_reference_by_default() -> None:
    kernel = epigen.compile("silu(mm)")
    a, b = half(M, K), half(K, N)
    assert torch.equal(kernel(a, b), epigen.compile("silu(mm)", backend="reference")(a, b))
    assert kernel._last is not None and kernel._last.plan is None


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, N, K), (M, 0, K), (M, N, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_extents_of_zero(backend: str, shape: tuple[int, int, int]) -> None:
    """An empty sum is 0, an empty maximum and logarithm of a sum -inf, an empty largest magnitude 0; nothing is left unwritten."""
    m, n, k = shape
    program = "mm, bitmask(mm >= 0), sum(mm, m), max(mm, n), amax(mm), logsumexp(mm, n), sum(a, k), max(b, k), sum(mm)"
    y, mask, total, top, largest, log, rows, columns, all_of_it = compiled(program, backend)(whole(m, k), whole(k, n))
    z = whole(m, k).float() @ whole(k, n).float()
    assert torch.equal(y, z.half())
    assert mask.shape == (m, -(-n // 8)) and torch.equal(reference.unpack(mask, n), z >= 0)
    assert torch.equal(total, z.sum(0))
    assert torch.equal(top, z.amax(1) if n else torch.full((m,), -torch.inf))
    assert torch.equal(largest, z.abs().amax() if m * n else torch.tensor(0.0))
    torch.testing.assert_close(log, z.logsumexp(1), rtol=1e-6, atol=1e-6)
    assert torch.equal(rows, whole(m, k).float().sum(1))
    assert torch.equal(columns, whole(k, n).float().amax(0) if k else torch.full((n,), -torch.inf))
    assert torch.equal(all_of_it, z.sum())


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_infinity_go_through(backend: str) -> None:
    a = whole(M, K)
    a[3] = torch.nan
    y = compiled("relu(mm + bias)", backend)(a, whole(K, N), bias=torch.full((N,), -torch.inf).half())
    assert y[3].isnan().all() and (y[:3] == 0).all()


# -- scalars


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [3, 3.0, torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([[3.0]]).half(), torch.tensor(3, dtype=torch.int32)], ids=repr)
def test_a_scalar_is_a_number_or_one_element(backend: str, alpha: Any) -> None:
    a, b = whole(M, K), whole(K, N)
    assert torch.equal(compiled("mm * alpha", backend)(a, b, alpha=alpha), (3 * (a.float() @ b.float())).half())


@pytest.mark.triton
def test_a_scalars_value_is_not_part_of_the_specialisation() -> None:
    kernel, renders = counting("mm * alpha")
    a, b = whole(M, K), whole(K, N)
    for alpha in (0.0, 1.0, 2.5, torch.inf):
        assert torch.equal(kernel(a, b, alpha=alpha).nan_to_num(), (alpha * (a.float() @ b.float())).half().nan_to_num())
    assert len(renders) == 1


def test_an_integer_beyond_floating_point_is_refused() -> None:
    with pytest.raises(CallError, match="input 'alpha'"):
        compiled("mm * alpha")(half(M, K), half(K, N), alpha=10**400)


# -- masks


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_have_padded_rows_and_go_round(backend: str) -> None:
    """The row stride is a multiple of 16 bytes and the padding bits are zero, as cuBLASLt asks."""
    a, b, bias = half(M, K), half(K, N), half(N)
    y, mask = compiled("z = mm + bias; relu(z), bitmask(z > 0)", backend)(a, b, bias=bias)
    assert mask.stride() == (16, 1) and mask.shape == (M, 5)
    assert torch.equal(reference.unpack(mask, N), y > 0)
    assert (mask[:, -1] >> (N % 8) == 0).all()
    dz, db = compiled("dz = drelu(mm, mask); dz, bgrad(dz)", backend)(whole(M, K), whole(K, N), mask=mask)
    expected = torch.where(y > 0, whole(M, K).float() @ whole(K, N).float(), 0)
    assert torch.equal(dz, expected.half()) and torch.equal(db, expected.sum(0))


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [5, 7, 64])
def test_a_mask_of_any_row_stride_is_read(backend: str, width: int) -> None:
    keep = torch.rand(M, N, generator=torch.Generator().manual_seed(1)) < 0.5
    held = torch.full((M, width), 255, dtype=torch.uint8)
    held[:, :5] = reference.pack(keep)
    y = compiled("where(bits(keep), mm, 0)", backend)(whole(M, K), whole(K, N), keep=held[:, :5])
    assert torch.equal(y, torch.where(keep, whole(M, K).float() @ whole(K, N).float(), 0).half())


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_written_beside_a_masks_buffer(backend: str) -> None:
    held = torch.full((M + 2, 9), 0xA5, dtype=torch.uint8)
    compiled("bitmask(mm > 0)", backend)(whole(M, K), whole(K, N), out=held[1:-1, 2:7])
    assert (held[[0, -1]] == 0xA5).all() and (held[:, :2] == 0xA5).all() and (held[:, 7:] == 0xA5).all()
    assert torch.equal(reference.unpack(held[1:-1, 2:7], N), whole(M, K).float() @ whole(K, N).float() > 0)


# -- the caller's buffers


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
class TestOut:
    def test_a_tensor(self, backend: str) -> None:
        kernel = compiled("relu(mm)", backend)
        buffer = torch.full((M, N), 7.0).half()
        assert kernel(half(M, K), half(K, N), out=buffer) is buffer
        assert torch.equal(buffer, kernel(half(M, K), half(K, N)))

    @pytest.mark.parametrize("given", ["list", "tuple", "mapping", "part of a mapping"])
    def test_several(self, backend: str, given: str) -> None:
        kernel = compiled("z = mm * 2; z, bgrad(z)", backend)
        z, total = torch.empty(M, N).half(), torch.empty(N)
        out: Any = {"list": [z, total], "tuple": (z, total), "mapping": {"out1": total, "z": z}, "part of a mapping": {"out1": total}}[given]
        found = kernel(half(M, K), half(K, N), out=out)
        assert found.out1 is total and (found.z is z) == (given != "part of a mapping")
        for x, y in zip(found, kernel(half(M, K), half(K, N)), strict=True):
            assert torch.equal(x, y)

    def test_strided_and_transposed(self, backend: str) -> None:
        """Elements between those of the buffer stay as they were."""
        held = torch.full((2 * N, 3 * M), 7.0).half()
        buffer = held[::2, ::3].T
        kernel = compiled("mm + 1", backend)
        kernel(half(M, K), half(K, N), out=buffer)
        assert torch.equal(buffer, kernel(half(M, K), half(K, N)))
        assert (held[1::2] == 7).all() and (held[:, 1::3] == 7).all() and (held[:, 2::3] == 7).all()

    def test_in_place_on_the_residual(self, backend: str) -> None:
        kernel = compiled("mm + residual", backend)
        residual = half(M, N, seed=3)
        expected = kernel(half(M, K), half(K, N), residual=residual)
        kernel(half(M, K), half(K, N), residual=residual, out=residual)
        assert torch.equal(residual, expected)

    @pytest.mark.parametrize(
        ("out", "name"),
        [
            (torch.empty(M, N), "dtype"),
            (torch.empty(N, M).half(), "shape"),
            (torch.empty(M, N, device="meta").half(), "device"),
            (torch.empty(1, N).half().expand(M, N), "expanded"),
            ([torch.empty(M, N).half()] * 2, "count"),
            ({"z": torch.empty(M, N).half()}, "name"),
            ([3], "int"),
            ([None], "None"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, backend: str, out: Any, name: str, golden: Golden) -> None:
        with golden.raises(CallError, name):
            compiled("relu(mm)", backend)(half(M, K), half(K, N), out=out)

    def test_what_holds_no_tensors_is_refused(self, backend: str) -> None:
        with pytest.raises(CallError, match="out"):
            compiled("relu(mm)", backend)(half(M, K), half(K, N), out=5)

    def test_a_buffer_that_requires_grad_is_refused(self, backend: str) -> None:
        with pytest.raises(CallError, match="requires grad"):
            compiled("relu(mm)", backend)(half(M, K), half(K, N), out=torch.empty(M, N).half().requires_grad_())


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "config", [SMALL, SMALL.with_value("fused_finalize", 1), cases.LIBRARY, cases.split_k()], ids=["tiled", "completing", "library", "split_k"]
)
def test_means_are_torchs(backend: str, config: KernelConfig) -> None:
    """Of any number of rows and columns, 1 and 0 among them, by one kernel's text; and a tile may use how many there are."""
    kernel = epigen.compile("z = relu(mm); z / (extent(m) * extent(n)), mean(z, m), mean(z, n) * 2, mean(z)", backend=backend, config=config)
    for m, n in ((M, N), (1, N), (M, 1), (0, N)):
        a, b = whole(m, K).float(), whole(K, n, seed=1).float()
        z = torch.relu(a @ b)
        for found, expected in zip(kernel(a, b), (z / z.numel() if m else z, z.mean(0), z.mean(1) * 2, z.mean()), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)


# -- what inputs may hold


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [SMALL, cases.LIBRARY], ids=["tiled", "library"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_booleans_and_integers_are_numbers(backend: str, config: KernelConfig, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(3)

    def drawn(*size: int) -> torch.Tensor:
        low, high = (0, 2) if dtype == torch.bool else (0, 256) if dtype == torch.uint8 else (-100, 100)
        return torch.randint(low, high, size, generator=source).to(dtype)

    a, b = whole(M, K).float(), whole(K, N, seed=1).float()
    given = {"keep": drawn(M, N), "r": drawn(M), "c": drawn(N), "s": drawn(1)}
    z, total = epigen.compile("z = where(keep[m,n] != 0, mm * s, r[m]) + c[n]; z, sum(z, m)", backend=backend, config=config)(a, b, **given)
    expected = torch.where(given["keep"] != 0, a @ b * given["s"], given["r"][:, None]) + given["c"]
    assert torch.equal(z, expected) and torch.equal(total, expected.sum(0))


def test_integers_that_fp32_does_not_hold_are_rounded_as_torch_does() -> None:
    large = torch.tensor([[2**24 + 1, 2**40 + 12345, -(2**31) + 1]])
    kernel = epigen.compile("mm + large[m,n]")
    given = verify.Sample(torch.zeros(1, 1), torch.zeros(1, 3), {"large": large})
    assert torch.equal(kernel(given.a, given.b, large=large), large.float())
    verify.demand(verify.differences(kernel, given))


# -- what a call refuses


A, B, BIAS = half(M, K), half(K, N), half(N)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("program", "operands", "inputs", "name"),
    [
        # operands
        ("mm", ([1.0], B), {}, "a list"),
        ("mm", (A, None), {}, "no b"),
        ("mm", (A[0], B), {}, "a row for a"),
        ("mm", (A, B[0]), {}, "a row for b"),
        ("mm", (A, B[None, :23]), {}, "K differs"),
        ("mm", (A.double(), B), {}, "fp64 and fp16"),
        ("mm", (A, B.bool()), {}, "bool"),
        ("mm", (A.to(torch.uint8), B), {}, "uint8"),
        ("mm", (A, B.to(torch.int32)), {}, "int32"),
        ("mm", (A, B.float()), {}, "fp16 and fp32"),
        ("mm", (A, B.T), {}, "b as a weight"),
        ("mm", (A, B.to("meta")), {}, "b on meta"),
        # names
        ("mm", (A, B), {"bias": BIAS}, "an input of none"),
        ("mm + bias", (A, B), {"bais": BIAS}, "a misspelt input"),
        ("mm + bias", (A, B), {"qqq": BIAS, "bias": BIAS}, "an unknown input"),
        ("mm + bias", (A, B), {}, "no bias"),
        ("drelu(mm * alpha, mask) + gate[m,n]", (A, B), {}, "three missing"),
        # shapes
        ("mm + bias", (A, B), {"bias": half(M)}, "a bias of M"),
        ("mm + bias", (A, B), {"bias": half(1, N)}, "a bias of two dimensions"),
        ("mm * scale_a[m]", (A, B), {"scale_a": half(M, 1)}, "a scale of two dimensions"),
        ("mm + gate[m,n]", (A, B), {"gate": half(N, M)}, "a gate transposed"),
        ("mm + gate[m,n]", (A, B), {"gate": half(1, N)}, "a gate to expand"),
        ("mm * alpha", (A, B), {"alpha": half(2)}, "two alphas"),
        ("drelu(mm, mask)", (A, B), {"mask": torch.zeros(M, N, dtype=torch.uint8)}, "a mask unpacked"),
        # dtypes, kinds and devices
        ("drelu(mm, mask)", (A, B), {"mask": torch.zeros(M, 5, dtype=torch.bool)}, "a mask of bool"),
        ("mm + bias", (A, B), {"bias": BIAS.double()}, "a bias of fp64"),
        ("mm + bias", (A, B), {"bias": BIAS.to(torch.int16)}, "a bias of int16"),
        ("mm + bias", (A, B), {"bias": 1.0}, "a number for bias"),
        ("drelu(mm, mask)", (A, B), {"mask": 3}, "a number for mask"),
        ("mm * alpha", (A, B), {"alpha": "2"}, "a text for alpha"),
        ("mm * alpha", (A, B), {"alpha": 1j}, "a complex alpha"),
        ("mm * alpha", (A, B), {"alpha": None}, "None for alpha"),
        ("mm + bias", (A, B), {"bias": BIAS.to("meta")}, "a bias on meta"),
        # derivatives
        ("mm", (A.clone().requires_grad_(), B), {}, "a requires grad"),
        ("mm + bias", (A, B), {"bias": BIAS.clone().requires_grad_()}, "bias requires grad"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit(backend: str, program: str, operands: tuple[Any, Any], inputs: dict[str, Any], name: str, golden: Golden) -> None:
    with golden.raises(CallError, name):
        compiled(program, backend)(*operands, **inputs)


def test_two_tensors_that_do_not_fit_are_still_refused_after_a_good_call() -> None:
    """What is kept of a good call is found by everything that the checks look at."""
    kernel = compiled("mm + bias")
    kernel(A, B, bias=BIAS)
    for wrong in (BIAS[:-1], BIAS.double(), BIAS.to("meta"), BIAS[None], 0.5):
        with pytest.raises(CallError, match="input 'bias'"):
            kernel(A, B, bias=wrong)
    with pytest.raises(CallError, match="requires grad"):
        kernel(A, B, bias=BIAS.clone().requires_grad_())


def test_an_argument_that_requires_grad_is_fine_where_no_graph_is_recorded() -> None:
    weight = torch.nn.Parameter(B)
    with torch.no_grad():
        y = epigen.compile("mm")(A, weight)
    assert not y.requires_grad and torch.equal(y, epigen.compile("mm")(A, B))
    assert torch.equal(epigen.compile("mm")(A, weight.detach()), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_a_kernels_arithmetic_alone(dtype: torch.dtype) -> None:
    """It would round the operands of an fp32 product, and the product itself, to half precision."""
    kernel, a, b = epigen.compile("gelu(mm + bias)"), torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    expected, product = kernel(a, b, bias=torch.ones(N)), vendor.product(a, b, "ieee")
    with torch.autocast("cpu", torch.bfloat16):
        found, again = kernel(a, b, bias=torch.ones(N)), vendor.product(a, b, "ieee")
    assert torch.equal(found, expected) and found.dtype == dtype
    assert torch.equal(again, product) and again.dtype == torch.float32


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_tensors_are_read_negated(backend: str) -> None:
    """`z.conj().imag` is a view whose elements in memory have the opposite sign."""
    complex_ = torch.complex(torch.zeros(M, K), whole(M, K).float())
    lazy = complex_.conj().imag
    assert lazy.is_neg()
    assert torch.equal(compiled("mm", backend)(lazy, whole(K, N).float()), -(whole(M, K).float() @ whole(K, N).float()))


def test_operands_are_given_by_position_and_inputs_by_name() -> None:
    kernel: Any = epigen.compile("mm + bias * s")
    for call, words in (
        (lambda: kernel(A, B, BIAS), r"by position operands a and b are given, and 1 more came: pass the program's inputs by name \(bias, s\)"),
        (lambda: kernel.over(A, BIAS), r"by position mm is given, and 1 more came"),
        (lambda: kernel(A), r"operand b is missing \(operands are given by position\)"),
        (lambda: kernel(a=A, b=B, bias=BIAS, s=1.0), r"operand a is missing \(operands are given by position\)"),
        (lambda: kernel.over(), r"mm is missing"),
    ):
        with pytest.raises(CallError, match=words):
            call()


def test_compiled_kernels_want_a_gpu(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.compile("mm", backend="triton")(A, B)


@pytest.mark.parametrize(
    ("program", "dtype", "culprit"),
    [
        ("mm", torch.bfloat16, "bf16"),
        ("cast(mm, bf16)", torch.float16, "bf16"),
        ("cast(mm, bf16) * 2 + bias", torch.float16, "bf16"),
        ("cast(mm, fp8e4m3)", torch.float16, "fp8e4m3"),
        ("mm", torch.float8_e4m3fn, "bf16"),  # by default fp8 operands have a bf16 result
        ("cast(mm, fp8e5m2)", torch.float8_e5m2, "fp8e5m2"),
    ],
)
def test_what_the_interpreter_rounds_wrongly_is_refused_there_only(program: str, dtype: torch.dtype, culprit: str) -> None:
    a, b, inputs = whole(M, K).to(dtype), whole(K, N).to(dtype), {"bias": BIAS} if "bias" in program else {}
    with pytest.raises(CallError, match=f"{culprit}"):
        compiled(program, "interpreter")(a, b, **inputs)
    kernel = compiled(program)
    expected = reference.evaluate(kernel.graph, a, b, inputs, [{"bf16": BF16}.get(culprit, kernel.graph.outputs[0].dtype or FP16)])
    if "bias" not in program:
        assert torch.equal(kernel(a, b, **inputs).float(), expected[0].float())


def test_a_bf16_input_is_refused_under_the_interpreter_too(golden: Golden) -> None:
    with golden.raises(CallError):
        compiled("mm + bias", "interpreter")(A, B, bias=BIAS.bfloat16())


# -- what is compiled, and when


class CountingRenderer(Renderer):
    """Keeps the spec of every rendering."""

    def __init__(self) -> None:
        super().__init__(settings.templates_dir())
        self.specs: list[KernelSpec] = []

    def render(self, spec: KernelSpec, config: KernelConfig) -> Rendered:
        self.specs.append(spec)
        return super().render(spec, config)


def counting(text: str, config: KernelConfig | None = SMALL) -> tuple[Kernel, list[KernelSpec]]:
    renderer = CountingRenderer()
    return Kernel(
        epigen.compile(text).graph, renderer, lambda spec, shape, target, refused: rule.choose(spec, shape, target, refused), config, "interpreter"
    ), renderer.specs


@pytest.mark.triton
def test_a_signature_is_specialised_once() -> None:
    kernel, renders = counting("mm + bias")
    for seed in range(3):
        kernel(half(M, K, seed=seed), half(K, N), bias=half(N, seed=seed))
    assert len(renders) == 1


@pytest.mark.triton
@pytest.mark.parametrize(
    ("change", "same_module"),
    [
        (lambda a, b, c: (a[:-3], b, c), True),
        (lambda a, b, c: (a.T.contiguous().T, b, c), False),  # rows of 24 elements become columns of 20
        (lambda a, b, c: (a, b[:, :-2], c[:-2]), True),
        (lambda a, b, c: (a, b[:, :-1], c[:-1]), False),
        (lambda a, b, c: (a.float(), b.float(), c), False),
        (lambda a, b, c: (a, b, c.float()), False),
        (lambda a, b, c: (a[:, :-16], b[:-16], c), True),
        (lambda a, b, c: (a[:, :-1], b[:-1], c), False),
        (lambda _, __, c: (half(M, 2 * 32), half(2 * 32, N), c), False),  # no tail along K
    ],
    ids=["M", "layout", "N", "N divisible by 4", "operand dtype", "input dtype", "K", "odd K", "K divisible by the block"],
)
def test_what_a_module_depends_on(change: Callable[..., Any], same_module: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = Loader._load
    monkeypatch.setattr(Loader, "_load", lambda self, rendered: loads.append(rendered.digest) or load(self, rendered))
    kernel, _ = counting("mm + bias")
    for a, b, bias in ((A, B, BIAS), change(A, B, BIAS), (A, B, BIAS)):
        torch.testing.assert_close(kernel(a, b, bias=bias).float(), a.float() @ b.float() + bias.float(), rtol=2e-3, atol=2e-3)
    assert len(set(loads)) == len(loads) == (1 if same_module else 2)


@pytest.mark.triton
def test_the_order_of_named_inputs_does_not_matter() -> None:
    kernel = compiled("mm * x[m,n] - y[m,n]", "interpreter")
    x, y = whole(M, N), whole(M, N, seed=5)
    assert torch.equal(kernel(A, B, x=x, y=y), kernel(A, B, y=y, x=x))
    assert not torch.equal(kernel(A, B, x=x, y=y), kernel(A, B, x=y, y=x))


@pytest.mark.triton
def test_the_process_wide_precision_is_read_at_every_call() -> None:
    kernel, renders = counting("mm")
    a, b = half(M, K).float(), half(K, N).float()
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "high", "medium", "highest"):
            torch.set_float32_matmul_precision(setting)
            kernel(a, b)
            assert ('input_precision="ieee"' in kernel.source()) == (setting == "highest")
    finally:
        torch.set_float32_matmul_precision(before)
    assert [s.signature.precision for s in renders] == ["ieee", "tf32"]


@pytest.mark.triton
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_newer_precision_settings_are_read_too(backend: str) -> None:
    """The setting of CUDA's products wins over that of all products, and the one that was set last over the older one; none of it makes a call raise."""
    newer: Any = torch.backends
    kernel, a, b, mixed = compiled("mm", backend), half(M, K).float(), half(K, N).float(), 0

    def readable() -> bool:
        try:
            return bool(torch.get_float32_matmul_precision())
        except RuntimeError:
            return False

    steps: tuple[tuple[Any, str, str, str], ...] = (
        (newer.cuda.matmul, "fp32_precision", "tf32", "tf32"), (newer.cuda.matmul, "fp32_precision", "ieee", "ieee"),
        (newer.cuda.matmul, "fp32_precision", "none", "ieee"), (newer, "fp32_precision", "tf32", "tf32"), (newer.cuda.matmul, "fp32_precision", "ieee", "ieee"),
        (torch, "set_float32_matmul_precision", "high", "tf32"), (newer.cuda.matmul, "fp32_precision", "ieee", "ieee"),
    )  # fmt: skip
    try:
        for holder, name, value, expected in steps:
            holder.set_float32_matmul_precision(value) if holder is torch else setattr(holder, name, value)
            kernel(a, b)
            assert kernel.plan(dtype=FP32).spec.signature.precision == expected
            if backend == "interpreter":
                assert f'input_precision="{expected}"' in kernel.source()
            epigen.compile("mm", backend=backend, precision="tf32")(a, b)
            epigen.linear(a, b.T, epilogue="relu(mm)")
            mixed += not readable()
        assert mixed  # and so every call raised that asked the older one
    finally:
        torch.set_float32_matmul_precision("highest")
        for module in (newer, newer.cuda.matmul, newer.mkldnn.matmul):
            module.fp32_precision = "none"


@pytest.mark.triton
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precision_can_be_fixed(precision: str) -> None:
    kernel = compiled("mm", "interpreter", precision=precision)
    a, b = whole(M, K).float(), whole(K, N).float()
    assert torch.equal(kernel(a, b), a @ b)
    assert f'input_precision="{precision}"' in kernel.source()


@pytest.mark.parametrize("dtype", [FP32, FP16, INT8, FP8E4M3, FP8E5M2], ids=str)
def test_fast_accumulation_is_for_fp8_alone(dtype: DType) -> None:
    """Of other operands it says nothing, and what torch's own products go by counts."""
    plain, fast = (
        epigen.compile("relu(mm + bias)", precision=precision).plan((4096, 4096, 4096), dtype=dtype, layout="nt") for precision in (None, FAST_ACCUM)
    )
    assert plain.spec.promoted == dtype.is_fp8 and not fast.spec.promoted
    assert (plain.rendered.text == fast.rendered.text) != dtype.is_fp8
    problems = [problem_of(graph_of("relu(mm + bias)"), plan.spec, (4096, 4096, 4096), "H100", "9.0") for plan in (plain, fast)]
    assert [p.precision for p in problems] == (["", FAST_ACCUM] if dtype.is_fp8 else [plain.spec.signature.precision * (dtype == FP32)] * 2)


def test_a_precision_is_one_of_three(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.compile("mm", precision="tf31")


@pytest.mark.parametrize("name", ["interpretor", "cuda"])
def test_unknown_backend(name: str, golden: Golden) -> None:
    with golden.raises(CallError, name):
        epigen.compile("mm", backend=name)


# -- configs


VALUES = {"block_m": 32, "block_n": 32, "block_k": 32, "group_m": 4, "num_warps": 4, "num_stages": 2}


def test_a_config_is_a_mapping_or_an_object() -> None:
    kernels = [epigen.compile("relu(mm)", config=c) for c in (VALUES, {"schedule": "tiled"} | VALUES, SMALL)]
    assert all(k.config == SMALL for k in kernels)
    assert len({k.source() for k in kernels}) == 1


def test_a_mapping_that_is_given_is_left_as_it_was() -> None:
    given = {"schedule": "tiled"} | VALUES
    epigen.compile("mm", config=given)
    assert given == {"schedule": "tiled"} | VALUES


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"schedule": "tild"}, "tild"),
        ({"schedule": "qq"}, "qq"),
        ({"blok_m": 32}, "blok_m"),
        ({"q": 32}, "q"),
        (VALUES | {"block_m": 48}, "block_m=48"),
        (VALUES | {"block_m": "32"}, "text for block_m"),
        (VALUES | {"group_m": True}, "bool for group_m"),
        ({"block_m": 32, "num_warps": 4}, "what is missing"),
        ({"schedule": "library", "block_k": 32}, "block_k of library"),
        ({"schedule": 5}, "schedule=5"),
        (dict(cases.persistent().values) | {"schedule": "persistent", "prefetch": 1}, "flatten and prefetch"),
    ],
)
def test_a_config_that_does_not_fit(config: dict[str, Any], name: str, golden: Golden) -> None:
    with golden.raises(ConfigError, name):
        epigen.compile("mm", config=config)


def test_groups_of_warps_that_share_a_tile_need_64_rows_each() -> None:
    """With fewer, Triton 3.6 and 3.9 refuse the product, and a reduction takes the process down with the compiler."""
    with pytest.raises(ConfigError, match="block_m=64 needs pingpong=1"):
        epigen.compile("mm, sum(mm, m)", config=cases.warp_specialized(block_m=64)).plan()
    assert epigen.compile("mm", config=cases.warp_specialized(block_m=64, pingpong=1)).plan().choice.config["block_m"] == 64


@pytest.mark.triton
def test_operands_that_tma_cannot_address_are_copied(golden: Golden) -> None:
    kernel = epigen.compile("relu(mm), sum(a, k)", config=cases.persistent(tma_store=1), backend="interpreter")
    right = whole(24, 32) @ whole(32, 40)

    def copied(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> int:
        found = kernel(a, b, out=None if out is None else {"out0": out})
        torch.testing.assert_close(found[0], torch.relu(right), rtol=0, atol=0)
        torch.testing.assert_close(found[1], whole(24, 32).float().sum(1), rtol=0, atol=0)
        return kernel.source().count("a copy with aligned rows")

    a, b = whole(24, 32), whole(32, 40)
    assert copied(a, b) == 0 and ".store([" in kernel.source()
    assert copied(a.T.contiguous().T, b.T.contiguous().T) == 0
    shifted = torch.zeros(a.numel() + 1, dtype=torch.half)[1:].view(a.shape).copy_(a)
    assert copied(shifted, b) == 1
    assert copied(a, torch.zeros(32, 41, dtype=torch.half)[:, :40].copy_(b)) == 1
    assert copied(torch.zeros(25, 32, dtype=torch.half).T.contiguous().T[:24].copy_(a), b.T.contiguous().T) == 1
    assert copied(shifted, torch.zeros(32, 80, dtype=torch.half)[:, ::2].copy_(b)) == 2
    # an output that it cannot address is stored by pointers
    wide = torch.zeros(24, 41, dtype=torch.half)
    assert copied(a, b, out=wide[:, 1:]) == 0 and ".store([" not in kernel.source() and wide[:, 0].eq(0).all()
    assert copied(a, b, out=torch.zeros(24, 64, dtype=torch.half)[:, 8:48]) == 0 and ".store([" in kernel.source()
    with golden.raises(ConfigError, "sm_80"):
        epigen.compile("relu(mm)", config=cases.persistent()).plan((64, 64, 64), FP16, TARGETS["sm_80"])
    with golden.raises(ConfigError, "empty"):
        kernel(half(24, 0), half(0, 40))


def test_launches_of_a_stream_share_counters_and_those_of_a_graph_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, capturing = [1], [False]
    monkeypatch.setattr(workspace, "current_stream", lambda _index: stream[0])
    monkeypatch.setattr(workspace, "capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream[0])
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    made: list[int] = []
    new = workspace.Arrivals._new
    monkeypatch.setattr(workspace.Arrivals, "_new", lambda self: made.append(threading.get_ident()) or new(self))
    arrivals = workspace.Arrivals(5, torch.device("cpu"))
    assert arrivals.counters() is not arrivals.counters(), "the interpreter may be stopped in mid-launch"
    arrivals.shared = True
    first = arrivals.counters()
    assert made.pop() != threading.get_ident(), "what outlives a call is not put into the pool that this thread allocates from"
    assert first.tolist() == [0] * 5 and arrivals.counters() is first
    stream[0] = 2
    assert arrivals.counters() is not first and arrivals.counters() is arrivals.counters()
    capturing[0] = True
    assert arrivals.counters() is not arrivals.counters()
    stream[0], capturing[0] = 1, False
    assert arrivals.counters() is first


@pytest.mark.triton
def test_a_split_sum_is_the_same_every_time() -> None:
    kernel = epigen.compile("z = mm + bias; relu(z), sum(z, m)", config=cases.split_k(splits=8), backend="interpreter")
    a, b, bias = half(40, 300), half(300, 50), half(50)
    found = [kernel(a, b, bias=bias) for _ in range(3)]
    assert all(torch.equal(x, y) for one in found[1:] for x, y in zip(one, found[0], strict=True))


@pytest.mark.triton
def test_a_value_before_and_after_its_cast_has_two_names() -> None:
    text = """w = cast(cast(cast(mm, fp16), fp32), int8); y = cast(cast(mm, fp16), fp32)
    w, y, cast(cast(cast(mm, fp16), fp32), int8) + 1, cast(cast(mm, fp16), fp32) * 2"""
    kernel = epigen.compile(text, config=cases.tiled(32, 32, 32), backend="interpreter")
    found = kernel(half(20, 16), half(16, 24))
    assert torch.equal(found[3].float(), 2 * found[1]) and not torch.equal(found[1], found[0].float())
    assert torch.equal(found[2].float(), found[0].float() + 1)


@pytest.mark.triton
def test_the_last_block_leaves_what_the_next_launch_finds() -> None:
    text = "z = mm + bias; sum(z, m), sum(z, n) * 2, amax(z)"
    inside, after = (epigen.compile(text, config=cases.tiled(32, 32, 32, fused_finalize=i), backend="interpreter") for i in (1, 0))
    a, b, bias = half(40, 64), half(64, 50), half(50)
    found = [inside(a, b, bias=bias) for _ in range(3)]
    assert all(torch.equal(x, y) for one in found[1:] for x, y in zip(one, found[0], strict=True))
    for x, y in zip(found[0], after(a, b, bias=bias), strict=True):
        torch.testing.assert_close(x, y)
    plans = [kernel.plan((40, 50, 64)) for kernel in (inside, after)]
    assert [len(plan.rendered.functions) for plan in plans] == [1, 4]


@pytest.mark.triton
def test_of_an_empty_result_no_block_is_the_last() -> None:
    """A kernel of its own completes what no block has left anything of."""
    kernel = epigen.compile("sum(mm, m) + 1, sum(mm)", config=cases.tiled(32, 32, 32, fused_finalize=1), backend="interpreter")
    found = kernel(half(0, 16), half(16, 40))
    assert found[0].tolist() == [1.0] * 40 and found[1].item() == 0.0
    assert kernel.config["fused_finalize"] == 0 and kernel.plan((64, 64, 64)).choice.config["fused_finalize"] == 1


@pytest.mark.triton
def test_what_is_in_gluon_is_interpreted_in_tritons_own_language() -> None:
    kernel = epigen.compile("z = mm; relu(z), bitmask(z > 0)", config=cases.warp_specialized(subtiles=2), backend="interpreter")
    a, b = whole(136, 64), whole(64, 72)
    found = kernel(a, b)
    torch.testing.assert_close(found[0], torch.relu(a @ b), rtol=0, atol=0)
    assert kernel.config == cases.persistent(128, 64, 64, 8, subtiles=2)
    assert "in place of warp_specialized" in kernel.explain() and "cannot be interpreted" in kernel.explain()


# -- what a kernel says of itself


def test_repr(golden: Golden) -> None:
    kernel = epigen.compile("z = mm * alpha + bias; relu(z), drelu(z, mask) * gate[m,n]")
    golden(repr(kernel), "several")
    golden(repr(epigen.compile("mm")), "none")
    assert kernel.program == "z = mm * alpha + bias; relu(z), drelu(z, mask) * gate[m,n]"


def test_source_config_and_explain_of_a_problem() -> None:
    kernel = epigen.compile("relu(mm + bias)")
    for target in (TARGETS["sm_80"], TARGETS["gfx942"]):
        problem = {"shape": (1024, 512, 256), "dtype": BF16, "target": target}
        plan = kernel.plan(**problem)
        assert kernel.source(**problem) == plan.source
        program, config, why = kernel.explain(**problem).split("\n")
        assert (program, config, why) == ("relu(mm + bias)", str(plan.choice.config), plan.choice.why)
        assert "1024x512x256 bf16" in why and target.name in why
        assert "[M, K] bf16" in kernel.source(**problem) and f"# schedule {config}" in kernel.source(**problem)


@pytest.mark.triton
def test_source_config_and_explain_of_the_last_call() -> None:
    kernel = compiled("relu(mm + bias)", "interpreter")
    kernel(A.float(), B.float(), bias=BIAS)
    assert "[M, K] fp32" in kernel.source() and "[N] fp16" in kernel.source()
    assert kernel.config == SMALL
    assert kernel.explain() == f"relu(mm + bias)\n{SMALL}\ngiven by the caller"
    kernel(A, B, bias=BIAS)
    assert "[M, K] fp16" in kernel.source()


def test_without_a_call_the_default_problem_is_meant() -> None:
    kernel = epigen.compile("relu(mm + bias)")
    assert kernel.source() == kernel.source(shape=(4096, 4096, 4096), dtype=FP16)
    kernel(torch.ones(2, 3), torch.ones(3, 4), bias=torch.ones(4))
    assert kernel.source() != kernel.source(shape=(4096, 4096, 4096), dtype=FP16)  # of a call on the CPU it is what a GPU would run


@pytest.mark.triton
def test_the_source_is_what_ran() -> None:
    kernel = compiled("relu(mm + bias)", "interpreter")
    kernel(A, B, bias=BIAS)
    assert len(kernel._loaders[True].modules) == 1
    module = kernel._loaders[True].load(kernel.plan((M, N, K), signature=kernel._last.plan.spec.signature).rendered)  # type: ignore[union-attr]
    assert len(kernel._loaders[True].modules) == 1 and module.__file__ is not None
    with open(module.__file__) as file:  # noqa: PTH123
        assert file.read() == kernel.source()


def test_a_program_with_a_mistake_is_refused_when_it_is_compiled(golden: Golden) -> None:
    with golden.raises(epigen.EpigenError):
        epigen.compile("reluu(mm + bias)")


# -- schedules, threads


@pytest.mark.triton
@pytest.mark.parametrize("block_m", [1, 32])
def test_the_library_schedule_agrees(block_m: int) -> None:
    config = schedules.config("library", block_m=block_m, block_n=64, num_warps=4)
    kernel = epigen.compile("z = mm * alpha + residual; relu(z), bitmask(z > 0), bgrad(z), sum(a, k)", config=config, backend="interpreter")
    for a, b in ((whole(M, K), whole(K, N)), (whole(M, K).float(), whole(K, N).float()), (whole(M, K).to(torch.int8), whole(K, N).to(torch.int8))):
        given = {"alpha": 2.0, "residual": whole(M, N)}
        for x, y in zip(kernel(a, b, **given), epigen.compile(kernel.program)(a, b, **given), strict=True):
            assert torch.equal(x, y)


def test_the_vendors_product_leaves_the_precision_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    epigen.compile("mm", config=cases.LIBRARY, backend="interpreter", precision="tf32")(A.float(), B.float())
    assert torch.get_float32_matmul_precision() == before


def test_several_threads_call_one_kernel() -> None:
    """Different signatures at once, some new and some known; each thread gets the answer to its own call."""
    kernel = epigen.compile("z = mm * alpha + bias; relu(z), bgrad(z)")
    problems = []
    for i in range(24):
        m, k, dtype = 5 + i % 7, 8 + 8 * (i % 3), (torch.float16, torch.float32, torch.bfloat16)[i % 3]
        problems.append((whole(m, k, seed=i).to(dtype), whole(k, N, seed=i + 1).to(dtype), {"alpha": float(i), "bias": whole(N, seed=i + 2)}))
    expected = [tuple(epigen.compile(kernel.program)(a, b, **inputs)) for a, b, inputs in problems]
    wrong: list[int] = []

    def work(first: int) -> None:
        for turn in range(3 * len(problems)):
            at = (first * 5 + turn) % len(problems)
            a, b, inputs = problems[at]
            if not all(torch.equal(x, y) for x, y in zip(kernel(a, b, **inputs), expected[at], strict=True)):
                wrong.append(at)

    assert in_threads(8, work) == [] and wrong == []


@pytest.mark.triton
def test_several_threads_interpret_kernels_of_their_own() -> None:
    """Triton's interpreter has one place for the program that runs: launches beside one another took each other's, and left tiles unwritten."""
    kernels = [compiled(f"relu(mm) * {i + 1}", "interpreter") for i in range(4)]
    problems = [(whole(24 + 16 * i, K, seed=i), whole(K, 72 - 16 * i, seed=i + 9)) for i in range(4)]
    expected = [torch.relu(a.float() @ b.float()).mul(i + 1).half() for i, (a, b) in enumerate(problems)]
    right: list[bool] = []
    assert in_threads(4, lambda i: right.extend(torch.equal(kernels[i](*problems[i]), expected[i]) for _ in range(6))) == []
    assert right == [True] * 24


@pytest.mark.triton
def test_a_kernel_can_be_made_in_one_thread_and_called_in_another() -> None:
    found: list[torch.Tensor] = []
    kernel = compiled("relu(mm)", "interpreter")
    thread = threading.Thread(target=lambda: found.append(kernel(A, B)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], kernel(A, B))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_a_copy_for_tma_has_rows_of_whole_lines(dtype: torch.dtype) -> None:
    """Of the transpose where that has contiguous rows, and where neither has, of the matrix."""
    given = torch.randint(-8, 8, (7, 1003)).to(dtype)
    for matrix, held in ((given, given), (given.T, given), (given[:, ::2], given[:, ::2])):
        copy = arguments.padded(matrix, arguments.layout(matrix))
        assert torch.equal(copy, held) and copy.stride(1) == 1
        assert copy.stride(0) * copy.element_size() % 128 == 0 and copy.stride(0) * copy.element_size() - held.shape[1] * copy.element_size() < 128


class Copies(TorchDispatchMode):
    """Keeps what each copy is of."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert args[0].dtype == args[1].dtype
            self.dtypes.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "columns", "first", "word"),
    [
        (torch.int8, 7928, 0, torch.int64), (torch.int8, 7924, 0, torch.int32), (torch.int8, 7922, 0, torch.int16), (torch.int8, 7921, 0, torch.int8),
        (torch.int8, 7928, 4, torch.int32), (torch.float8_e4m3fn, 7928, 0, torch.int64), (torch.float16, 1004, 0, torch.int64),
        (torch.bfloat16, 1004, 1, torch.int16), (torch.float16, 1003, 0, torch.int16), (torch.float32, 1003, 0, torch.int32),
    ],
)  # fmt: skip
def test_a_copy_for_tma_is_of_the_longest_words_that_rows_allow(dtype: torch.dtype, columns: int, first: int, word: torch.dtype) -> None:
    """1664x7928 of int8 takes eight times as many threads byte by byte. first: elements before the matrix, so that it begins within a word."""
    whole = torch.randint(-8, 8, (first + 3 * 5 * columns,)).to(torch.int8).float().to(dtype)
    batch = whole[first:].view(3, 5, columns)
    for matrix in (batch[0], batch, batch[0].T):
        with Copies() as seen:
            copy = arguments.padded(matrix, arguments.layout(matrix))
        held = matrix if arguments.layout(matrix) == "n" else matrix.mT
        assert copy.dtype == dtype and torch.equal(copy.float(), held.float())
        assert seen.dtypes == [word]


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_the_plan_needs_no_gpu_and_no_call(dtype: Any) -> None:
    plan = epigen.compile("relu(mm + bias)").plan((64, 64, 64), dtype=dtype, target=TARGETS["sm_90"])
    assert plan.spec.signature.a == dtype and plan.rendered.functions[0].name == "epigen_relu_mm_bias"


def test_the_source_after_a_call_of_cpu_tensors_is_of_their_dtypes_and_extents() -> None:
    kernel = epigen.compile("relu(mm + bias)")
    before = kernel.source()
    for dtype, short in ((torch.float32, "fp32"), (torch.float16, "fp16")):
        kernel(torch.ones(4, 8, dtype=dtype), torch.ones(8, 4, dtype=dtype), bias=torch.ones(4))
        assert f"[M, K] {short}" in kernel.source() and "[N] fp32" in kernel.source()
        assert kernel.config["block_m"] <= 16 and "4x4x8" in kernel.explain()
    assert kernel.source(shape=(4096, 4096, 4096)) == before
    kernel.over(torch.ones(4, 4), bias=torch.ones(4))
    assert kernel.config.schedule == "library"


def test_a_first_call_waits_for_those_who_compile_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the threads of the process that this one was forked from: here they are none."""
    made, compiling = epigen.compile("relu(mm)"), Future[str]()
    waited: list[Any] = []
    monkeypatch.setattr(kernel, "wait", waited.extend)
    made.wait_for(compiling)
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    made(torch.ones(2, 3), torch.ones(3, 4))
    assert waited == []
    monkeypatch.setattr(os, "getpid", lambda: process)
    made(torch.ones(2, 3), torch.ones(3, 5))
    assert waited == [compiling]
    compiling.set_result("")
    made.wait_for(later := Future[str]())
    made(torch.ones(2, 3), torch.ones(3, 6))
    assert waited == [compiling, later]
