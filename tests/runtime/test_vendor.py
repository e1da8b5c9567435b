"""Programs that the vendor's library computes whole: which they are, that what comes out is what a generated kernel would give, and the
process's settings around it. What warmed calls of them do is in tests/runtime/warmed_calls; on a GPU, below."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import LIBRARY
from specs import spec_of, spec_over

import epigen
from epigen.dtypes import BF16, FAST_ACCUM, FP8E4M3, FP16, FP32, INT8, DType
from epigen.runtime import vendor, verify
from epigen.runtime.arguments import process_precision
from epigen.runtime.kernel import Kernel


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("text", ["mm", "z = mm; z", "mm[m,n]"])
def test_the_vendor_computes_the_product_alone(text: str, dtype: DType) -> None:
    assert spec_of(text, dtype).bare_product


@pytest.mark.parametrize(("m", "n", "k"), [(32, 48, 64), (32, 40, 64), (32, 48, 72), (0, 16, 16)], ids=str)
@pytest.mark.parametrize("dtypes", [("float8_e4m3fn",) * 2, ("float8_e5m2",) * 2, ("float8_e4m3fn", "float8_e5m2")], ids=" ".join)
@pytest.mark.parametrize("row_major", [False, True])
def test_torchs_own_product_of_fp8_stands_beside_programs_of_it(m: int, n: int, k: int, dtypes: tuple[str, str], row_major: bool) -> None:
    """For any extents and layout: where torch has none, that of what they are widened to."""
    torch.manual_seed(0)
    a, b = (torch.randn(rows, k).to(getattr(torch, dtype)) for rows, dtype in zip((m, n), dtypes, strict=True))
    b = b.t().contiguous() if row_major else b.t()
    for precision in ("ieee", FAST_ACCUM):
        found = vendor.scaled_product(a, b, precision)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("text", ["mm + bias", "bias + mm", "relu(mm)", "relu(mm + bias)", "gelu(mm)", "gelu_tanh(mm + bias)"])
def test_no_epilogue_is_the_vendors_though_it_has_a_call_for_it(text: str, dtype: DType) -> None:
    """torch.addmm rounded the product of one row before it added the bias, and refused some strides of `out`."""
    assert not spec_of(text, dtype).bare_product


@pytest.mark.parametrize(
    "text",
    ["mm + residual", "mm + alpha", "z = mm + 0; z", "-mm", "mm, mm", "mm, mm + bias", "mm, sum(mm)", "mm, sum(a, k)", "sum(mm, m)", "cast(mm, fp32)", "cast(mm, bf16)",
     "bitmask(mm > 0)", "drelu(mm, mask)"],
)  # fmt: skip
def test_nor_is_any_other(text: str) -> None:
    assert not spec_of(text, FP16).bare_product


@pytest.mark.parametrize("dtype", [INT8, FP8E4M3], ids=str)
def test_the_result_has_the_operands_dtype(dtype: DType) -> None:
    assert not spec_of("mm", dtype).bare_product


@pytest.mark.triton
def test_a_product_that_is_given_is_no_product_of_the_vendors() -> None:
    assert not spec_over("mm", FP16).bare_product
    mm = half(20, 37)
    assert torch.equal(epigen.compile("mm", config=LIBRARY, backend="interpreter").over(mm), mm)


# -- numerics on the CPU


def half(*size: int, seed: int = 0, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def compiled(text: str = "mm", backend: str | None = "interpreter", **options: Any) -> Kernel:
    kernel = epigen.compile(text, config=LIBRARY, backend=backend, **options)
    assert kernel.plan(dtype=FP16).rendered.whole == (text == "mm")
    return kernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(20, 37, 24), (1, 1, 1), (0, 5, 7), (5, 0, 7), (5, 7, 0)], ids=str)
def test_the_answer_is_the_references_wherever_it_is_written(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = half(m, k, dtype=dtype), half(n, k, seed=1, dtype=dtype).T
    kernel = compiled()
    torch.testing.assert_close(kernel(a, b), epigen.compile("mm")(a, b), rtol=1e-3, atol=1e-5)
    for out in (torch.full((m, n), 7.0, dtype=dtype), torch.full((n, m), 7.0, dtype=dtype).T, torch.full((m, 3 * n + 1), 7.0, dtype=dtype)[:, : 3 * n : 3]):
        assert kernel(a, b, out=out) is out
        assert torch.equal(out, kernel(a, b))


@pytest.mark.triton
def test_a_sum_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2049 - 2048 is 1, and in fp16 2049 is 2048. How torch's own 16-bit products add depends on the CPU, so they are not asked."""
    own, dtypes = torch.mm, list[torch.dtype]()
    monkeypatch.setattr(torch, "mm", lambda *given, **named: dtypes.extend(t.dtype for t in given) or own(*given, **named))
    a, b = torch.ones(1, 2049).half(), torch.ones(2049, 1).half()
    assert compiled()(a, b).item() == 2048
    assert compiled("mm + bias")(a, b, bias=torch.tensor([-2048.0]).half()).item() == 1
    b[-1] = -2048
    assert compiled()(a, b).item() == 0
    assert dtypes == [torch.float32] * 6


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
    attempts: tuple[Callable[[], object], ...] = (lambda: vendor.product(a, a, "tf32"), lambda: vendor.compute(a, a, a.clone(), "tf32"))
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="no"):
            attempt()
        assert settings() == process
    for precision, fp16, bf16, accumulation in seen:
        assert precision == process[0] if given != FP32 else precision != "highest"
        assert not (given == FP16 and (fp16 or accumulation)) and not (given == BF16 and bf16)
    assert len(seen) == 2


NEWER = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn, torch.backends.mkldnn.matmul)


@pytest.fixture
def _precision() -> Iterator[None]:
    """Puts torch's settings of fp32 products back, of both kinds."""
    yield
    torch.set_float32_matmul_precision("highest")
    for module in NEWER:
        module.fp32_precision = "none"  # type: ignore[attr-defined]


def newer() -> list[str]:
    return [module.fp32_precision for module in NEWER]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize(
    "chosen",
    [
        (None, None, None),
        ("high", None, None),
        ("medium", None, None),
        (None, "tf32", None),
        (None, None, "tf32"),
        ("high", "ieee", None),
        ("high", "ieee", "tf32"),
    ],
    ids=str,
)
def test_the_newer_precision_settings_are_put_back(chosen: tuple[str | None, str | None, str | None], precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older one, that of CUDA's products and that of all products, also where they disagree; and what follows the setting above it goes on doing so."""
    older, of_cuda, of_all = chosen
    if older is not None:
        torch.set_float32_matmul_precision(older)
    if of_cuda is not None:
        torch.backends.cuda.matmul.fp32_precision = of_cuda
    if of_all is not None:
        torch.backends.fp32_precision = of_all  # type: ignore[attr-defined]
    seen, own, before = [], torch.mm, newer()

    def watched(*given: Any, **named: Any) -> torch.Tensor:
        seen.append(process_precision())
        return own(*given, **named)

    monkeypatch.setattr(torch, "mm", watched)
    a = torch.ones(2, 2)
    assert torch.equal(vendor.product(a, a, precision), own(a, a))
    assert seen == [precision] and newer() == before
    if older is None and of_cuda is None:
        torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
        assert newer() == ["ieee"] * 4


def test_threads_put_back_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to come in used to take the first one's setting for the process's own, and lost it when the first was done."""
    before, seen, own = torch.get_float32_matmul_precision(), list[str](), torch.mm
    multiplying, waited_for = threading.Event(), threading.Event()

    class Door:
        """The lock that is there, and an event for when somebody waits for it."""

        def __init__(self) -> None:
            self.lock = vendor._SETTINGS

        def __enter__(self) -> None:
            if not self.lock.acquire(blocking=False):
                waited_for.set()
                self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def slow(*given: Any, **named: Any) -> torch.Tensor:
        if not multiplying.is_set():
            multiplying.set()
            assert waited_for.wait(250), "the second changes the setting while the first multiplies"
        seen.append(torch.get_float32_matmul_precision())
        return own(*given, **named)

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setattr(vendor, "_SETTINGS", Door())
    a, other = torch.ones(2, 2), "tf32" if before == "highest" else "ieee"
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(vendor.product, a, a, other)
        multiplying.wait()
        two = pool.submit(vendor.product, a, a, other)
        assert torch.equal(one.result(), two.result())
    assert len(seen) == 2 and all((found == "highest") != (before == "highest") for found in seen)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.triton
@pytest.mark.parametrize("text", ["mm", "relu(mm)"])
def test_autocast_is_no_business_of_ours(text: str) -> None:
    """It used to hand the epilogue a product of 16 bits, which was read as one of 32."""
    a, b = half(20, 24).float(), half(24, 37, seed=1).float()
    kernel = compiled(text)
    expected = kernel(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kernel(a, b), expected)


# -- on a GPU


def keeps_the_bound(text: str, dtype: DType, layout: str, shapes: Sequence[tuple[int, int, int]]) -> None:
    for precision in ("ieee", "tf32") if dtype == FP32 else ("ieee",):
        kernel = compiled(text, None, precision=precision)
        for m, n, k in shapes:
            given = verify.sample(kernel.graph, (m, n, k), dtype, dtype, dtype, device="cuda", layout=layout)
            for out in (None, torch.empty(n, m, device="cuda", dtype=given.a.dtype).T, torch.empty(m, 2 * n, device="cuda", dtype=given.a.dtype)[:, ::2]):
                verify.demand(verify.differences(kernel, given, precision, out))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_the_vendors_kernel_keeps_the_oracles_bound(dtype: DType, layout: str) -> None:
    keeps_the_bound("mm", dtype, layout, ((300, 520, 264), (65, 63, 31), (1, 256, 128), (256, 1, 128), (16, 64, 40_000), (64, 64, 0), (0, 8, 8), (8, 0, 8)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_so_does_a_bias_after_it(dtype: DType) -> None:
    """Where torch.addmm did not: of one row it rounded the product first, and it refused such extents and strides of `out`."""
    keeps_the_bound("mm + bias", dtype, "nn", ((1, 256, 128), (65, 63, 31)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, 64, 65_536), (64, 128, 65_536), (8, 8, 262_144), (128, 256, 16_384)], ids=str)
def test_parts_of_a_long_k_are_not_rounded_before_they_are_added(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Whole numbers, whose sums fp32 holds and 16 bits do not."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randint(-5, 6, size, device="cuda", generator=generator).to(dtype) for size in ((m, k), (k, n)))
    exact = a.double() @ b.double()
    kernel = compiled(backend=None)
    for _ in range(3):
        assert torch.equal(kernel(a, b), exact.to(dtype))


@pytest.mark.gpu
def test_a_captured_call_is_replayed_on_new_contents() -> None:
    kernel = compiled(backend=None)
    a, b = (torch.randint(-3, 4, size, device="cuda").half() for size in ((96, 128), (128, 160)))
    for _ in range(3):
        kernel(a, b)
    out, graph = torch.empty(96, 160, device="cuda", dtype=torch.float16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(a, b)
        kernel(a, b, out=out)
    for _ in range(3):
        a.copy_(torch.randint(-3, 4, a.shape, device="cuda"))
        graph.replay()
        expected = (a.double() @ b.double()).half()
        assert torch.equal(captured, expected) and torch.equal(out, expected)


@pytest.mark.gpu
def test_whatever_changes_between_two_calls() -> None:
    kernel = compiled(backend=None)
    for turn in range(40):
        m, n, k = (64, 96, 1)[turn % 3], (160, 64)[turn % 2], (128, 127, 64, 40)[turn % 4]
        a, b = (torch.randint(-3, 4, size, device="cuda").half() for size in ((m, k), (n, k)))
        out = torch.empty(n + 1, m, device="cuda", dtype=torch.float16)[1:].T if turn % 3 else None
        assert torch.equal(kernel(a, b.T, out=out), (a.double() @ b.T.double()).half()), turn


@pytest.mark.gpu
def test_nan_and_infinity() -> None:
    a, b = half(64, 64, device="cuda"), half(64, 96, device="cuda").abs()
    a[3, 5], a[7] = float("nan"), float("-inf")
    found = compiled(backend=None)(a, b)
    assert found[3].isnan().all() and (found[7] == float("-inf")).all() and found[8:].isfinite().all()
