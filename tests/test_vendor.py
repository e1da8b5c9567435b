"""Programs that the vendor's library computes whole: which they are, that what comes out is what a generated kernel would give, and the
process's settings around it. What warmed calls of them do is in tests/fake_gpu_cases.py; on a GPU, below."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import LIBRARY
from test_codegen_render import spec_of, spec_over

import epigen
from epigen.codegen import vendor as calls
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, DType
from epigen.runtime import vendor, verify
from epigen.runtime.kernel import Kernel

MM, ADDMM = calls.CALLS[()], calls.CALLS["add",]
PROGRAMS = {"mm": "mm", "bias": "mm + bias"}


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("text", "call"),
    [("mm", MM), ("z = mm; z", MM), ("mm + bias", ADDMM), ("bias + mm", ADDMM), ("z = mm + 0; z", ""), ("z = shift[n] + mm; z", ADDMM)],
)
def test_what_the_vendor_computes_whole(text: str, call: str, dtype: DType) -> None:
    assert calls.whole(spec_of(text, dtype)) == call


@pytest.mark.parametrize(
    "text",
    [
        "mm + residual", "mm + scale_a[m]", "mm + alpha", "mm + 0.5", "mm - bias", "bias - mm", "mm + bias + shift[n]", "mm + mm", "relu(mm)", "relu(mm + bias)",
        "gelu_tanh(mm + bias)", "mm, mm + bias", "mm, sum(mm)", "sum(mm, m)", "cast(mm, fp32)", "cast(mm + bias, bf16)", "cast(mm, fp16) + bias", "bitmask(mm > 0)",
        "(mm + bias) + bias", "drelu(mm, mask)",
    ],
)  # fmt: skip
def test_what_it_does_not(text: str) -> None:
    assert calls.whole(spec_of(text, FP16)) == ""


@pytest.mark.parametrize("dtype", [INT8, FP8E4M3], ids=str)
def test_the_result_has_the_operands_dtype(dtype: DType) -> None:
    assert calls.whole(spec_of("mm", dtype)) == ""
    assert calls.whole(spec_of("mm + bias", FP16, input_dtype=FP32)) == calls.whole(spec_over("mm + bias", FP16)) == ""


# -- numerics on the CPU


def half(*size: int, seed: int = 0, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def compiled(text: str, backend: str | None = "interpreter", **options: Any) -> Kernel:
    kernel = epigen.compile(text, config=LIBRARY, backend=backend, **options)
    assert not kernel.plan(dtype=FP16).rendered.functions
    return kernel


def call(kernel: Kernel, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, out: torch.Tensor | None = None) -> Any:
    return kernel(a, b, **({"bias": bias} if "bias" in kernel.program else {}), out=out)


@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(20, 37, 24), (1, 1, 1), (0, 5, 7), (5, 0, 7), (5, 7, 0)], ids=str)
def test_the_answer_is_the_references_wherever_it_is_written(text: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, bias = half(m, k, dtype=dtype), half(n, k, seed=1, dtype=dtype).T, half(2 * n, seed=2, dtype=dtype)[::2]
    kernel, expected = compiled(text), call(epigen.compile(text), a, b, bias)
    torch.testing.assert_close(call(kernel, a, b, bias), expected, rtol=1e-3, atol=1e-5)
    for out in (torch.full((m, n), 7.0, dtype=dtype), torch.full((n, m), 7.0, dtype=dtype).T, torch.full((m, 3 * n + 1), 7.0, dtype=dtype)[:, : 3 * n : 3]):
        assert call(kernel, a, b, bias, out) is out
        assert torch.equal(out, call(kernel, a, b, bias))


def test_a_sum_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2049 - 2048 is 1, and in fp16 2049 is 2048. How torch's own 16-bit products add depends on the CPU, so they are not asked."""
    own, dtypes = torch.addmm, list[torch.dtype]()
    monkeypatch.setattr(torch, "addmm", lambda *given, **named: dtypes.extend(t.dtype for t in given) or own(*given, **named))
    a, b = torch.ones(1, 2049).half(), torch.ones(2049, 1).half()
    assert compiled("mm")(a, b).item() == 2048
    assert compiled("mm + bias")(a, b, bias=torch.tensor([-2048.0]).half()).item() == 1
    assert dtypes == [torch.float32] * 3


def test_a_product_that_is_given_is_no_product_of_the_vendors() -> None:
    mm, bias = half(20, 37), half(37, seed=1)
    assert torch.equal(epigen.compile("mm + bias", config=LIBRARY, backend="interpreter").over(mm, bias=bias), mm + bias)


# -- the process's settings

SETTINGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")
Settings = tuple[object, ...]


def settings() -> Settings:
    return (torch.get_float32_matmul_precision(), *(getattr(torch.backends.cuda.matmul, name) for name in SETTINGS))


@pytest.fixture(params=itertools.product(("highest", "medium"), (True, False), (True, False), (True, False)), ids=str)
def process(request: pytest.FixtureRequest) -> Any:
    before = settings()

    def put(found: Settings) -> None:
        torch.set_float32_matmul_precision(str(found[0]))
        for name, value in zip(SETTINGS, found[1:], strict=True):
            setattr(torch.backends.cuda.matmul, name, value)

    put(request.param)
    yield request.param
    put(before)


@pytest.mark.parametrize("given", [FP16, BF16, FP32], ids=str)
def test_sums_are_taken_in_fp32_and_the_settings_put_back(given: DType, process: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the product fails."""
    seen: list[Settings] = []

    def refuse(*_: object, **__: object) -> torch.Tensor:
        seen.append(settings())
        raise RuntimeError("no")

    monkeypatch.setattr(torch, "mm", refuse)
    a = torch.ones(2, 2, dtype=getattr(torch, given.torch))
    attempts: tuple[Callable[[], object], ...] = (lambda: vendor.product(a, a, "tf32"), lambda: vendor.compute(MM, (a, a), a.clone(), "tf32"))
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="no"):
            attempt()
        assert settings() == process
    for precision, fp16, bf16, accumulation in seen:
        assert precision == process[0] if given != FP32 else precision != "highest"
        assert not (given == FP16 and (fp16 or accumulation)) and not (given == BF16 and bf16)
    assert len(seen) == 2


def test_threads_put_back_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to come in used to take the first one's setting for the process's own, and lost it when the first was done."""
    before, seen, own = torch.get_float32_matmul_precision(), list[str](), torch.mm

    multiplying = threading.Event()

    def slow(*given: Any, **named: Any) -> torch.Tensor:
        first = not multiplying.is_set()
        multiplying.set()
        time.sleep(0.03 if first else 0.06)
        seen.append(torch.get_float32_matmul_precision())
        return own(*given, **named)

    monkeypatch.setattr(torch, "mm", slow)
    a, other = torch.ones(2, 2), "tf32" if before == "highest" else "ieee"
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(vendor.product, a, a, other)
        multiplying.wait()
        two = pool.submit(vendor.product, a, a, other)
        assert torch.equal(one.result(), two.result())
    assert len(seen) == 2 and all((found == "highest") != (before == "highest") for found in seen)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("text", ["mm", "mm + bias", "relu(mm + bias)"])
def test_autocast_is_no_business_of_ours(text: str) -> None:
    """It used to hand the epilogue a product of 16 bits, which was read as one of 32."""
    a, b, bias = half(20, 24).float(), half(24, 37, seed=1).float(), half(37, seed=2).float()
    kernel = epigen.compile(text, config=LIBRARY, backend="interpreter")
    expected = call(kernel, a, b, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(kernel, a, b, bias), expected)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_the_vendors_kernel_keeps_the_oracles_bound(text: str, dtype: DType, layout: str) -> None:
    for precision in ("ieee", "tf32") if dtype == FP32 else ("ieee",):
        kernel = compiled(text, None, precision=precision)
        for m, n, k in ((300, 520, 264), (65, 63, 31), (1, 256, 128), (256, 1, 128), (16, 64, 40_000), (64, 64, 0), (0, 8, 8), (8, 0, 8)):
            given = verify.sample(kernel.graph, (m, n, k), dtype, dtype, dtype, device="cuda", layout=layout)
            for out in (None, torch.empty(n, m, device="cuda", dtype=given.a.dtype).T, torch.empty(m, 2 * n, device="cuda", dtype=given.a.dtype)[:, ::2]):
                verify.demand(verify.differences(kernel, given, precision, out))


@pytest.mark.gpu
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, 64, 65_536), (64, 128, 65_536), (8, 8, 262_144), (128, 256, 16_384)], ids=str)
def test_parts_of_a_long_k_are_not_rounded_before_they_are_added(text: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Whole numbers, whose sums fp32 holds and 16 bits do not."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b, bias = (torch.randint(-5, 6, size, device="cuda", generator=generator).to(dtype) for size in ((m, k), (k, n), (n,)))
    exact = a.double() @ b.double() + (bias.double() if "bias" in text else 0)
    kernel = compiled(text, None)
    for _ in range(3):
        assert torch.equal(call(kernel, a, b, bias), exact.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_a_captured_call_is_replayed_on_new_contents(text: str) -> None:
    kernel = compiled(text, None)
    a, b, bias = (torch.randint(-3, 4, size, device="cuda").half() for size in ((96, 128), (128, 160), (160,)))
    for _ in range(3):
        call(kernel, a, b, bias)
    out, graph = torch.empty(96, 160, device="cuda", dtype=torch.float16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(kernel, a, b, bias)
        call(kernel, a, b, bias, out)
    for _ in range(3):
        a.copy_(torch.randint(-3, 4, a.shape, device="cuda"))
        graph.replay()
        expected = (a.double() @ b.double() + (bias.double() if "bias" in text else 0)).half()
        assert torch.equal(captured, expected) and torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_whatever_changes_between_two_calls(text: str) -> None:
    kernel = compiled(text, None)
    for turn in range(40):
        m, n, k = (64, 96, 1)[turn % 3], (160, 64)[turn % 2], (128, 127, 64, 40)[turn % 4]
        a, b, bias = (torch.randint(-3, 4, size, device="cuda").half() for size in ((m, k), (n, k), (n,)))
        expected = (a.double() @ b.T.double() + (bias.double() if "bias" in text else 0)).half()
        out = torch.empty(n + 1, m, device="cuda", dtype=torch.float16)[1:].T if turn % 3 else None
        assert torch.equal(call(kernel, a, b.T, bias, out), expected), turn


@pytest.mark.gpu
def test_nan_and_infinity() -> None:
    a, b, bias = (half(*size, device="cuda") for size in ((64, 64), (64, 96), (96,)))
    a[3], bias[7], bias[9] = float("nan"), float("-inf"), float("nan")
    found = compiled("mm + bias", None)(a, b, bias=bias)
    assert found[3].isnan().all() and found[:, 9].isnan().all() and (found[:3, 7] == float("-inf")).all()
