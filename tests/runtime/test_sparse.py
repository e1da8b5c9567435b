"""Calls of which one operand is 2:4 sparse: the vendor's product and the program over it, the dense values where those were measured to be faster, and what is refused.
Without a GPU torch's products of such operands are stood for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_on_cpu import CUSPARSELT, CUTLASS, both_ways, products, pruned, sparse
from torch import Tensor
from tuned import RUN, config, opened
from under_torch import APART

import epigen
from epigen.choose.choose import Chooser
from epigen.codegen.lower import lower
from epigen.codegen.spec import KernelConfig, Numerics
from epigen.db.problem import capability, problem_of
from epigen.db.records import Record
from epigen.errors import CallError
from epigen.gpus import DEFAULT_TARGET, TARGETS
from epigen.ir.program import graph_of
from epigen.runtime import semi_structured
from epigen.runtime.kernel import Kernel
from epigen.runtime.loader import triton_version
from epigen.runtime.rendering import renderer
from epigen.runtime.semi_structured import Compressed

M, N, K = 24, 64, 128


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def drawn(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randint(-9, 10, size).to(dtype) if dtype == torch.int8 else torch.randn(size).to(dtype)


def weight(dtype: torch.dtype = torch.float16, n: int = N, k: int = K) -> Tensor:
    return pruned(drawn(n, k, dtype=dtype))


# -- the reference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("text", ["mm", "relu(mm + bias)", "z = mm * bias; z, sum(z, n), bitmask(z > 0)"])
def test_on_the_cpu_the_reference_multiplies_the_dense_values(text: str, dtype: torch.dtype) -> None:
    x, w, kernel = drawn(M, K, dtype=dtype), weight(dtype), epigen.compile(text)
    inputs = {"bias": torch.randn(N)} if "bias" in text else {}
    for a, b, dense in ((x, sparse(w).t(), (x, w.t())), (sparse(w), x.t()[:, :N], (w, x.t()[:, :N]))):
        given = {name: value[: b.shape[1]] for name, value in inputs.items()}
        given = {name: torch.randn(b.shape[1]) for name in given}
        found, wanted = kernel(a, b, **given), kernel(*dense, **given)
        assert all(map(torch.equal, found, wanted)) if isinstance(found, tuple) else torch.equal(found, wanted)


def test_leading_dimensions_of_a_are_rows_of_one_product() -> None:
    x, w, kernel = drawn(2, 3, 4, K), weight(), epigen.compile("relu(mm + bias)")
    bias = drawn(N)
    assert torch.equal(kernel(x, sparse(w).t(), bias=bias), kernel(x, w.t(), bias=bias))


def test_the_meta_device_and_fake_tensors_say_what_comes_out() -> None:
    held = Compressed.without_contents(N, K, torch.float16)
    found = epigen.compile("cast(mm + bias, fp32)")(
        torch.empty(M, K, dtype=torch.float16, device="meta"), held.tensor(True), bias=torch.empty(N, device="meta")
    )
    assert (found.shape, found.dtype, found.device.type) == ((M, N), torch.float32, "meta")


def test_what_no_product_of_a_sparse_operand_is_is_refused_in_words() -> None:
    x, w = drawn(M, K), weight()
    s, plain = sparse(w), epigen.compile("mm")
    for operands, said in (
        ((s, s.t()), "both 2:4 sparse"),
        ((x, s), "2:4 sparse along the other index than k.*weight.t"),
        ((s.t(), x), "as it was made, and not transposed"),
        ((x.float(), s.t()), "fp32 and operand b is fp16"),
        ((drawn(M, K - 4), s.t()), "K differs"),
        ((s, drawn(2, K, M)), r"the other one is \[K, N\]"),
        ((1.0, s.t()), "operand a is a float"),
        ((x.float(), sparse(weight(torch.float32)).t()), "2:4 sparse fp32.*to_dense"),
    ):
        with pytest.raises(CallError, match=said):
            plain(*operands)
    with pytest.raises(CallError, match="has no input 'bais'"):
        epigen.compile("mm + bias")(x, s.t(), bais=drawn(N))
    with pytest.raises(CallError, match="groups has dense operands"):
        plain(x, s.t(), groups=torch.tensor([M], dtype=torch.int32))
    with pytest.raises(CallError, match="no parts"):
        epigen.compile("g, u = halves(mm); silu(g) * u")(x, s.t())
    with pytest.raises(CallError, match="requires grad"):
        epigen.compile("mm")(x, torch.nn.Parameter(s).t())
    with pytest.raises(CallError, match="input 'up' is 2:4 sparse, which here nothing can be"):
        epigen.compile("mm + up[m,n]")(x, s.t(), up=sparse(pruned(drawn(32, N))))
    with pytest.raises(CallError, match="cuSPARSELt's on the CPU"):
        plain(x, sparse(w, CUSPARSELT).t())


def test_one_that_is_compressed_both_ways_multiplies_from_either_side() -> None:
    w = both_ways(drawn(N, K))
    s, x, y, plain = sparse(w, transposed=True), drawn(M, K), drawn(M, N), epigen.compile("mm")
    for a, b, dense in ((x, s.t(), (x, w.t())), (y, s, (y, w)), (s, x.t(), (w, x.t())), (s.t(), y.t(), (w.t(), y.t()))):
        torch.testing.assert_close(plain(a, b), plain(*dense), rtol=0, atol=0)


# -- the vendor's product


def compressed(t: Any, transposed: bool = False) -> Compressed:
    found = Compressed.of(t, transposed)
    assert found is not None
    return found


@pytest.fixture
def libraries() -> Iterator[None]:
    with products():
        yield


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(CUTLASS, torch.float16), (CUTLASS, torch.int8), *((CUSPARSELT, dtype) for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn))],
)
@pytest.mark.parametrize("m", [1, 24, 33])
def test_the_libraries_are_given_what_they_read_right(kind: Any, dtype: torch.dtype, m: int) -> None:
    """Any number of rows, wherever and however they lie."""
    wanted = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.float32}.get(dtype, dtype)
    w = weight(dtype)
    held = compressed(sparse(w, kind))
    wide = drawn(m + 1, 2 * K + 3, dtype=dtype)
    for rows in (
        wide[1:, 3 : K + 3],
        wide[:m, : 2 * K : 2],
        wide[:m, :K].contiguous(),
        wide[:m, :K].t().contiguous().t(),
        wide.flatten()[1 : m * K + 1].view(m, K),
    ):
        right = (rows.double() @ w.double().t()).to(wanted)
        for transposed, expected in ((True, right), (False, right.t())):
            found = held._by_library(rows.t(), transposed, wanted)
            assert found.dtype == wanted and found.is_contiguous() and torch.equal(found, expected)


def test_what_torch_cannot_multiply_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("sparse_semi_structured_mad_op : Supported only on GPUs with compute capability 8.x\nmore")

    held = compressed(sparse(weight()))
    monkeypatch.setattr(torch, "_sparse_semi_structured_mm", refusing)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with pytest.raises(CallError, match=r"CUTLASS does not multiply .*capability 8.x\): pass its dense values"):
        held.times(drawn(K, M), False, torch.float16)


def test_dense_values_are_kept_for_as_long_as_they_are_right() -> None:
    values, w = semi_structured.DenseValues(), weight()
    s = sparse(w)
    first = values.of(compressed(s))
    assert torch.equal(first, w) and values.of(compressed(s.t(), True)) is first
    s.packed.mul_(2)
    assert torch.equal(values.of(compressed(s)), 2 * w)
    assert len(values.held) == 1
    del s
    gc.collect()
    assert len(values.held) == 0


# -- generated kernels


def interpreted(text: str, tmp_path: Path, config: KernelConfig | None = None, rounding: str = "") -> Kernel:
    graph = graph_of(text)
    return Kernel(graph, renderer(), Chooser(graph, opened(tmp_path)), config, "interpreter", Numerics(rounding=rounding))


def as_multiplied(x: Tensor, w: Tensor) -> Tensor:
    """The product as the vendor rounds it."""
    return (x.float() @ w.float().t()).to(x.dtype).float()


@pytest.mark.triton
@pytest.mark.parametrize("lead", [(M,), (2, 12)], ids=str)
def test_the_program_runs_over_the_vendors_product(tmp_path: Path, lead: tuple[int, ...]) -> None:
    x, w, bias, residual = drawn(*lead, K), weight(), drawn(N), drawn(*lead, N)
    kernel = interpreted("z = relu(mm + bias) + residual; z, sum(z, n), bitmask(z > 0)", tmp_path)
    z = torch.relu(as_multiplied(x, w) + bias) + residual
    found = kernel(x, sparse(w).t(), bias=bias, residual=residual)
    torch.testing.assert_close(found[0], z.half())
    torch.testing.assert_close(found[1], z.sum(-1), rtol=1e-4, atol=1e-3)
    assert found[2].dtype == torch.uint8
    out = torch.empty_like(found[0])
    again = kernel(x, sparse(w).t(), out={"z": out}, bias=bias, residual=residual)
    assert again.z is out and torch.equal(out, found.z)
    assert kernel.config.schedule == "library" and "CUTLASS multiplies it, then one fused epilogue" in kernel.explain() and "mm_ptr" in kernel.source()


@pytest.mark.triton
@pytest.mark.parametrize(("text", "dtype"), [("mm", torch.float16), ("mm", torch.int8), ("mm * 0.5 + bias", torch.int8), ("cast(mm, fp16)", torch.int8)])
def test_a_product_alone_is_the_vendors_and_int8s_comes_as_int32(tmp_path: Path, text: str, dtype: torch.dtype) -> None:
    x, w, kernel = drawn(M, K, dtype=dtype), weight(dtype), interpreted(text, tmp_path)
    inputs = {"bias": torch.randn(N)} if "bias" in text else {}
    wanted = epigen.compile(text)(x, w.t(), **inputs)
    found = kernel(x, sparse(w).t(), **inputs)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    out = torch.empty_like(found)
    assert kernel(x, sparse(w).t(), out=out, **inputs) is out and torch.equal(out, found)
    if text == "mm":
        assert "CUTLASS multiplies it, which is the whole program" in kernel.explain()
        with pytest.raises(CallError, match=r"out for 'out' is .* was expected"):
            kernel(x, sparse(w).t(), out=torch.empty(N, M, dtype=found.dtype))


@pytest.mark.triton
def test_eagers_rounding_of_a_sparse_product_is_torchs(tmp_path: Path) -> None:
    x, w, bias = drawn(M, K), weight(), drawn(N)
    found = interpreted("relu(mm + bias)", tmp_path, rounding="eager")(x, sparse(w).t(), bias=bias)
    assert torch.equal(found, torch.relu(as_multiplied(x, w).half() + bias))


@pytest.mark.triton
@pytest.mark.parametrize("m", [32, 24], ids=["measured", "of its bucket"])
def test_dense_values_are_multiplied_where_they_were_measured_to_be_faster(tmp_path: Path, m: int) -> None:
    """And where the sparse product was, that is: of the shape itself, or of the one that stands for its bucket; for other shapes, layouts and dense operands nothing is said."""
    text, x, w, bias = "relu(mm + bias)", drawn(m, K), weight(), drawn(N)
    graph, target = graph_of(text), DEFAULT_TARGET
    kernel, s = interpreted(text, tmp_path), sparse(w)
    given = semi_structured.of_call((drawn(32, K), s.t()))
    found = problem_of(graph, lower(graph, kernel._signature_of_sparse(given, {"bias": bias})), (32, N, K), target.part, capability(target))
    assert found.sparse == "b"
    small = config(block_m=16, block_n=32, block_k=32, group_m=1, num_warps=1, num_stages=2)
    opened(tmp_path).add(Record.make(found, small, **RUN | {"triton": triton_version()}))
    wanted = epigen.compile(text)(x, w.t(), bias=bias)
    torch.testing.assert_close(kernel(x, s.t(), bias=bias), wanted)
    assert kernel.config == small and "its dense values, 0.0164 MB, are kept beside it" in kernel.explain()
    held = semi_structured.dense_values().held
    assert s.packed in held
    kernel(drawn(40, K), s.t(), bias=bias)
    assert kernel.config.schedule == "library"
    kernel(x, w.t(), bias=bias)
    assert "exact" not in kernel.explain()


@pytest.mark.triton
def test_a_config_that_is_given_decides(tmp_path: Path) -> None:
    x, w, bias = drawn(M, K), weight(), drawn(N)
    small = config(block_m=16, block_n=32, block_k=32, group_m=1, num_warps=1, num_stages=2)
    kernel = interpreted("relu(mm + bias)", tmp_path, small)
    torch.testing.assert_close(kernel(x, sparse(w).t(), bias=bias), epigen.compile("relu(mm + bias)")(x, w.t(), bias=bias))
    assert kernel.config == small and "given by the caller" in kernel.explain()


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_what_the_vendors_product_is_none_of_is_refused(tmp_path: Path, backend: str) -> None:
    x, s = drawn(M, K), sparse(weight())
    for text, said in (
        ("mm, sum(a, k)", "reduces operand a over k, and that of a 2:4 sparse operand is the vendor's: pass its dense values"),
        ("dot(relu(a), b)", "multiplies what it computes of operand a, and that of a 2:4"),
        ("mm * dot(a, up[k,n])", "a second product, of a and up, and that of a 2:4"),
    ):
        inputs = {"up": drawn(K, N)} if "up" in text else {}
        with pytest.raises(CallError, match=said):
            epigen.compile(text, backend=backend)(x, s.t(), **inputs)
    invariant = epigen.compile("mm + 1", backend=backend, invariant="m")
    with pytest.raises(CallError, match="the program is invariant"):
        invariant(x, s.t())
    x8, s8 = drawn(M, K, dtype=torch.int8), sparse(weight(torch.int8))
    with pytest.raises(CallError, match="int32 beside other outputs"):
        epigen.compile("mm, mm * 0.5", backend=backend)(x8, s8.t())
    overlapping = x.flatten()[: 8 * N].view(8, N)
    with pytest.raises(CallError, match="overlaps operand a"):
        interpreted("mm + 1", tmp_path)(x[:8], s.t(), out=overlapping)


@APART
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_the_pass_over_a_sparse_product_is_compiled_ahead_of_time(dtype: torch.dtype) -> None:
    x = torch.empty(64, K, dtype=dtype, device="meta")
    b = Compressed.without_contents(N, K, dtype).tensor(True)
    kernel = epigen.compile("relu(mm * alpha + bias)")
    (resources,) = kernel.warm(x, b, TARGETS["sm_90"], bias=torch.empty(N, device="meta"), alpha=0.5)
    assert resources.registers > 0
    assert epigen.compile("mm").warm(x, b, TARGETS["sm_90"]) == []


# -- on a GPU


@pytest.fixture(params=["cusparselt", "cutlass"])
def on_gpu(request: pytest.FixtureRequest) -> Callable[[Tensor], Any]:
    """Makes torch's tensor of a dense one, where this GPU multiplies such."""
    if request.param == "cusparselt" and not torch.backends.cusparselt.is_available():
        pytest.skip("torch was built without cuSPARSELt")
    if request.param == "cutlass" and torch.cuda.get_device_capability()[0] != 8:
        pytest.skip("torch's CUTLASS product of a sparse operand is for compute capability 8.x")
    kind = {"cusparselt": CUSPARSELT, "cutlass": CUTLASS}[request.param]

    def made(dense: Tensor) -> Any:
        with semi_structured.unwarned():
            return kind.from_dense(dense.contiguous())

    return made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("m", [1, 100, 256])
def test_on_a_gpu_the_answer_is_that_of_the_dense_values(on_gpu: Callable[[Tensor], Any], dtype: torch.dtype, m: int) -> None:
    x, w, bias = drawn(m, 512, dtype=dtype).cuda(), weight(dtype, 256, 512).cuda(), torch.randn(256, device="cuda")
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    s = on_gpu(w)
    for text in ("mm", "gelu(mm * 0.05 + bias)", "z = mm * 0.05 + bias; relu(z), bitmask(z > 0)"):
        inputs = {"bias": bias} if "bias" in text else {}
        kernel = epigen.compile(text)
        found, wanted = kernel(x, s.t(), **inputs), epigen.compile(text)(x, w.t(), **inputs)
        found, wanted = (t[0] if isinstance(t, tuple) else t for t in (found, wanted))
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2 * float(wanted.float().abs().max()))
        assert "multiplies it" in kernel.explain()
    dense = semi_structured.dense(compressed(s))
    assert torch.equal(dense.float(), w.float())


@pytest.mark.gpu
def test_on_a_gpu_a_call_is_captured_in_a_graph(on_gpu: Callable[[Tensor], Any]) -> None:
    """Also one that would take dense values which are not there yet."""
    x, w, bias = drawn(256, 512).cuda(), weight(torch.float16, 256, 512).cuda(), drawn(256).cuda()
    s, out = on_gpu(w), torch.empty(256, 256, dtype=torch.float16, device="cuda")
    kernel = epigen.compile("relu(mm + bias)")
    wanted = kernel(x, w.t(), bias=bias)
    kernel(x, s.t(), bias=bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, s.t(), bias=bias, out=out)
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=2e-2)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(out, kernel(x, w.t(), bias=bias), rtol=1e-2, atol=4e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_tuning_records_which_product_is_the_faster(tmp_path: Path) -> None:
    (found,) = epigen.tune("relu(mm + bias)", "512x1024x1024", dtype="bf16", sparse="b", trials=6, database=tmp_path)
    assert found.result is not None and found.record is not None and found.record.sparse == "b" and not found.result.counts["wrong"]
    assert "library" in {config.schedule for config in found.result.outcomes} and len({config.schedule for config in found.result.outcomes}) > 1
