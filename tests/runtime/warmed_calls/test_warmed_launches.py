"""A warmed call gives the driver what a kernel that has seen no call yet has Triton launch, parameter by parameter."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import struct
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from fake_gpu import FakeGpu, Launched
from golden import Golden
from warmed import LIBRARY, MARKS, TINY, K, M, N, Watch, as_triton_does, compiled, direct_calls, forget, half, launched, operands, shifted

import epigen
from epigen.codegen.spec import KernelConfig
from epigen.errors import CallError
from epigen.gpus import DEFAULT_TARGET
from epigen.runtime import fast_call, native, vendor, workspace
from epigen.runtime.kernel import Kernel
from epigen.training import library
from epigen.training.wrapper import Line

pytestmark = MARKS


def test_what_was_warmed_needs_no_c_compiler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton 3.6 makes a launcher for each list of argument types; this program's list is no other's."""
    from triton import knobs
    from triton.runtime import build, driver

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    kernel, (a, b) = compiled("where(keep[m,n] > 0, mm, mm * weight[n] + shift)"), operands()
    inputs = {"keep": torch.zeros(M, N, dtype=torch.int8), "weight": torch.zeros(N, dtype=torch.float32), "shift": 2.0}
    gc.collect()  # kernels of other tests are unloaded by the driver that is active when they go
    before = driver.active
    kernel.warm(a, b, DEFAULT_TARGET, **inputs)
    driver.set_active(before)

    def compile_c(*_arguments: Any) -> Any:
        raise AssertionError("a C compiler was asked")

    monkeypatch.setattr(build, "_build", compile_c)
    assert launched(gpu, kernel, a, b, **inputs)


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("relu(mm + bias)", {"bias": half(N)}),
        ("mm * alpha + beta", {"beta": 2, "alpha": 1.5}),
        ("mm * alpha + residual", {"residual": half(M, N), "alpha": torch.ones(1)}),
        ("where(bits(mask), mm, 0) * s", {"s": 0.5, "mask": torch.zeros(M, N // 8, dtype=torch.uint8)}),
    ],
    ids=["column", "numbers", "tile", "mask"],
)
def test_a_warmed_call_launches_what_triton_launches(gpu: FakeGpu, through_triton: Watch, text: str, inputs: dict[str, Any], layout: str) -> None:
    kernel, oracle, out = compiled(text), compiled(text), half(M, N)
    a, b = operands(layout)
    expected = as_triton_does(gpu, oracle, a, b, out=out, **inputs)
    kernel(a, b, out=out, **inputs)
    before = through_triton.count
    assert launched(gpu, kernel, a, b, out=out, **inputs) == expected and expected[0].parameters
    assert through_triton.count == before


@pytest.mark.parametrize("config", [None, LIBRARY], ids=["tiled", "library"])
def test_a_warmed_call_of_a_batch_launches_what_triton_launches(
    gpu: FakeGpu, through_triton: Watch, config: KernelConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its products at once, each with a place of its own."""
    product = torch.zeros(6, M, N).view(2, 3, M, N)
    monkeypatch.setattr(vendor, "products", lambda _a, _b, _precision: product)
    text, inputs = "z = mm * alpha + bias + residual; z, bgrad(z)", {"alpha": 0.5, "bias": half(N), "residual": half(2, 3, M, N)}
    kernel, oracle = (compiled(text, config) if config else compiled(text) for _ in range(2))
    a, b, out = half(2, 3, M, K), half(K, N), [half(2, 3, M, N), torch.zeros(2, 3, N)]
    expected = as_triton_does(gpu, oracle, a, b, out=out, **inputs)
    kernel(a, b, out=out, **inputs)
    before = through_triton.count
    found = launched(gpu, kernel, a, b, out=out, **inputs)
    assert through_triton.count == before and len(found) == len(expected) == 2
    assert [x.grid for x in found] == [x.grid for x in expected] and all(x.grid[0] % 6 == 0 for x in found)
    assert [t.shape for t in kernel(a, b, **inputs)] == [t.shape for t in kernel(a, b, **inputs)] == [t.shape for t in out]


@pytest.mark.usefixtures("captured")
def test_a_call_in_a_graph_is_launched_before_the_kernel_before_it_ends(gpu: FakeGpu) -> None:
    """Kernels of its own that follow are so in every stream; the default stream cannot be captured, and is not asked."""
    kernel, (a, b) = compiled("z = relu(mm); z, bgrad(z)"), operands()
    assert [x.ahead for x in launched(gpu, kernel, a, b)] == [True, True]
    gpu.capturing = False
    assert [x.ahead for x in gpu.during(lambda: kernel(a, b))] == [False, True]
    gpu.stream = 0
    assert [x.ahead for x in gpu.during(lambda: kernel(a, b))] == [False, True]
    assert [x.ahead for x in as_triton_does(gpu, kernel, a, b)] == [False, True]


@pytest.mark.parametrize("capturing", [True, False])
def test_an_epilogue_is_launched_before_the_vendors_product_ends(gpu: FakeGpu, capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "product", lambda _a, _b, _precision: torch.zeros(M, N))
    monkeypatch.setattr(gpu, "capturing", capturing)
    (found,) = launched(gpu, compiled("relu(mm)", LIBRARY), *operands())
    assert found.ahead


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ["sm_80", "sm_89"])
def test_older_gpus_end_one_kernel_before_the_next(gpu: FakeGpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "target", replace(DEFAULT_TARGET, name=name, arch=int(name[3:])))
    kernel = compiled("z = relu(mm); z, bgrad(z)")
    assert [x.ahead for x in launched(gpu, kernel, *operands())] == [False, False]
    assert kernel._last is not None and not any("griddepcontrol" in x.asm["ptx"] for x in kernel._last.compiled)


def test_inputs_come_in_any_order(gpu: FakeGpu, through_triton: Watch) -> None:
    kernel, oracle, out = compiled("mm * alpha + beta"), compiled("mm * alpha + beta"), half(M, N)
    a, b = operands()
    expected = as_triton_does(gpu, oracle, a, b, out=out, alpha=1.5, beta=2.5)
    kernel(a, b, out=out, alpha=0.5, beta=0.25)
    before = through_triton.count
    assert gpu.during(lambda: kernel(a, b, beta=2.5, out=out, alpha=1.5)) == expected
    assert through_triton.count == before


def test_buffers_come_in_a_list_or_a_tuple(gpu: FakeGpu, through_triton: Watch, golden: Golden) -> None:
    kernel, (a, b) = compiled("mm, relu(mm)"), operands()
    outs = [half(M, N), half(M, N)]
    ways = (outs, tuple(outs), kernel._outputs(*outs))
    for out in ways:
        kernel(a, b, out=out)
    before = through_triton.count
    (first, *others) = [gpu.during(lambda out=out: kernel(a, b, out=out)) for out in ways]
    assert all(other == first for other in others) and through_triton.count == before
    for few in (outs[:1], tuple(outs[:1]), [*outs, *outs]):
        with golden.raises(CallError, f"{len(few)} of 2"):
            kernel(a, b, out=few)


@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize(
    "config",
    [cases.persistent(64, 16, 32), cases.persistent(64, 16, 32, tma_store=0), cases.warp_specialized(pingpong=1), cases.warp_specialized(tma_load=1)],
    ids=str,
)
def test_a_warmed_call_describes_what_triton_describes(gpu: FakeGpu, through_triton: Watch, config: KernelConfig, layout: str) -> None:
    """Operands, output and an input by TMA, at other addresses in every call."""
    text, bias = "relu(mm + bias + residual)", half(N)
    kernel, oracle = compiled(text, config), compiled(text, config)
    kernel(*operands(layout), bias=bias, residual=half(M, N))
    for _ in range(3):
        a, b = operands(layout)
        out, residual = half(M, N), half(M, N)
        expected = as_triton_does(gpu, oracle, a, b, out=out, bias=bias, residual=residual)
        kernel(a, b, out=out, bias=bias, residual=residual)
        before = through_triton.count
        assert launched(gpu, kernel, a, b, out=out, bias=bias, residual=residual) == expected and len(expected[0].parameters) > 10
        assert through_triton.count == before


@pytest.mark.parametrize(
    ("text", "dtype", "k"), [("relu(dot(a, b * s[k/64,n]) + bias)", torch.int8, K), ("relu(dot(a, int4(b) * s[k/64,n]) + bias)", torch.uint8, K // 2)]
)
def test_a_warmed_call_describes_a_weight_and_its_scales(gpu: FakeGpu, through_triton: Watch, text: str, dtype: torch.dtype, k: int) -> None:
    config = cases.mixed_input(16, 128, 64)
    kernel, oracle, bias = compiled(text, config), compiled(text, config), half(N)
    for repeat in range(4):
        a, b, s, out = half(M, K), torch.zeros(N, k, dtype=dtype).T, half(-(-K // 64), N), half(M, N)
        expected = as_triton_does(gpu, oracle, a, b, out=out, s=s, bias=bias)
        kernel(a, b, out=out, s=s, bias=bias)
        before = through_triton.count
        assert launched(gpu, kernel, a, b, out=out, s=s, bias=bias) == expected and len(expected[0].parameters) > 10
        assert repeat < 1 or through_triton.count == before


@pytest.mark.parametrize("config", [cases.persistent(64, 16, 32), cases.warp_specialized(pingpong=1, tma_load=1)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_a_warmed_call_of_a_batch_describes_what_triton_describes(gpu: FakeGpu, through_triton: Watch, config: KernelConfig, shared: bool) -> None:
    """Each tensor's matrices as one of three dimensions, of which that of the products has stride 0 where all share one matrix."""
    text, bias = "relu(mm + bias + residual)", half(N)
    kernel, oracle = compiled(text, config), compiled(text, config)
    for repeat in range(4):
        a, b, out, residual = half(2, 3, M, K), half(*([] if shared else [2, 3]), N, K).mT, half(2, 3, M, N), half(2, 3, M, N)
        expected = as_triton_does(gpu, oracle, a, b, out=out, bias=bias, residual=residual)
        before = through_triton.count
        found = gpu.during(lambda: kernel(a, b, out=out, bias=bias, residual=residual))  # noqa: B023
        assert found == expected and len(expected[0].parameters) > 10
        assert repeat < 2 or through_triton.count == before


def test_copies_with_aligned_rows_are_left_to_triton(through_triton: Watch) -> None:
    kernel, a, b = compiled("mm", cases.persistent(64, 16, 32)), half(M, K + 1)[:, :K], half(K, N)
    for _ in range(3):
        before = through_triton.count
        kernel(a, b)
        assert through_triton.count == before + 1


def test_counters_and_parts_of_sums_are_handed_on(gpu: FakeGpu, through_triton: Watch) -> None:
    kernel, out = compiled("relu(mm)", cases.split_k(16, 16, 16, 2, 1, 1)), half(M, N)
    a, b = operands()
    (expected,) = as_triton_does(gpu, kernel, a, b, out=out)
    kernel(a, b, out=out)
    before = through_triton.count
    (found,) = launched(gpu, kernel, a, b, out=out)
    assert through_triton.count == before and (found.kernel, found.grid) == (expected.kernel, expected.grid) and found.grid[0] == M // 16 * (N // 16) * 2
    # but for the addresses of what is allocated: the parts of the sums and the counters, after a, b and out
    assert found.parameters[:3] + found.parameters[5:] == expected.parameters[:3] + expected.parameters[5:]


@pytest.mark.parametrize("text", ["dz = drelu(mm, mask); dz, bgrad(dz)", "mm, sum(mm, m), sum(mm, n), amax(mm)", "mm, sum(a, k), sum(b, k)"])
def test_kernels_hand_on_what_lies_between_them(gpu: FakeGpu, through_triton: Watch, text: str) -> None:
    """All but the addresses of what is allocated are Triton's; the partial results are read where they were written, and lie apart."""
    kernel = compiled(text)
    a, b = operands()
    inputs = {"mask": torch.zeros(M, N // 8, dtype=torch.uint8)} if "mask" in text else {}
    outs = tuple(torch.empty_like(t) for t in kernel(a, b, **inputs))
    expected = as_triton_does(gpu, kernel, a, b, out=outs, **inputs)
    kernel(a, b, out=outs, **inputs)
    before = through_triton.count
    found = launched(gpu, kernel, a, b, out=outs, **inputs)
    assert through_triton.count == before and len(found) == len(expected) > 1
    fixed = {t.data_ptr() for t in (a, b, *inputs.values(), *outs)}
    ours, theirs = dict[int, int](), dict[int, int]()
    for f, e in zip(found, expected, strict=True):
        assert (f.kernel, f.grid, f.block, f.shared, f.stream) == (e.kernel, e.grid, e.block, e.shared, e.stream)
        for x, y in zip(f.parameters, e.parameters, strict=True):
            if len(x) == 8 and x != y:
                theirs_at, ours_at = (struct.unpack("Q", v)[0] for v in (y, x))
                assert ours_at % 16 == 0 and ours_at not in fixed and ours.setdefault(theirs_at, ours_at) == ours_at
                theirs.setdefault(ours_at, theirs_at)
            else:
                assert x == y
    assert len(ours) == len(theirs)


def test_new_outputs_are_as_triton_got_them(gpu: FakeGpu, through_triton: Watch) -> None:
    kernel = compiled("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), amax(z)")
    for n in (48, 128):
        a, b, bias = half(M, K), half(K, n), half(n)
        first = kernel(a, b, bias=bias)
        before = through_triton.count
        again = kernel(a, b, bias=bias)
        assert through_triton.count == before and type(first) is type(again) and again._fields == first._fields
        for x, y in zip(first, again, strict=True):
            assert (x.shape, x.stride(), x.dtype, type(x)) == (y.shape, y.stride(), y.dtype, type(y)) and x.data_ptr() != y.data_ptr()
        results = []
        main, *_ = gpu.during(lambda a=a, b=b, bias=bias, results=results: results.append(kernel(a, b, bias=bias)))
        given = {struct.unpack("Q", p)[0] for p in main.parameters if len(p) == 8}
        assert {t.data_ptr() for t in (a, b, bias, *results[0][:2])} <= given


def test_the_vendors_product_is_handed_on(gpu: FakeGpu, through_triton: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.zeros(M, N)
    monkeypatch.setattr(vendor, "product", lambda _a, _b, _precision: product)
    kernel, out = compiled("relu(mm + bias)", LIBRARY), half(M, N)
    a, b = operands()
    kernel(a, b, bias=half(N), out=out)
    before = through_triton.count
    (found,) = launched(gpu, kernel, a, b, bias=half(N), out=out)
    assert through_triton.count == before and struct.unpack("Q", found.parameters[0])[0] == product.data_ptr()


BOUND: dict[str, tuple[str, KernelConfig | None]] = {
    "tiled": ("relu(mm + bias) * gate[m,n] + row[m]", TINY),
    "a number": ("relu(mm * s + bias)", TINY),
    "two outputs": ("z = mm + bias; relu(z), bitmask(z > 0)", TINY),
    "a reduction": ("z = relu(mm); z, bgrad(z)", TINY),
    "split_k": ("relu(mm + bias)", cases.split_k(16, 16, 16, 2, 1, 1)),
    "TMA": ("relu(mm + bias)", cases.persistent(64, 16, 32)),
    "library": ("relu(mm + bias)", LIBRARY),
    "whole": ("mm", LIBRARY),
    "over": ("dz = mm * gate[m,n]; dz, bgrad(dz)", None),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_bound_call_launches_what_a_warmed_one_does(gpu: FakeGpu, name: str, through_triton: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other tensors, in other dimensions, whose outputs are allocated in the shapes that are asked for. What is not aligned is given back."""
    text, config = BOUND[name]
    products: list[tuple[Any, ...]] = []

    def product(a: torch.Tensor, b: torch.Tensor, _precision: str) -> torch.Tensor:
        products.append((a.shape, b.shape, a.stride(), b.stride()))
        return torch.zeros(M, N)

    monkeypatch.setattr(vendor, "product", product)
    kernel = compiled(text, config)
    over, numbers = name == "over", itertools.count(0.5)

    def given() -> tuple[Any, ...]:
        x, w, mm = half(2, M // 2, K), half(N, K), half(2, M // 2, N)
        values: dict[str, Any] = {"bias": half(N), "gate": half(2, M // 2, N), "row": half(2, M // 2), "s": next(numbers)}
        return [mm] if over else [x, w], {n: values[n] for n in kernel._input_names}

    def flat(operands: Any, inputs: Any) -> tuple[Any, ...]:
        rows = {"gate": (M, N), "row": (M,)}
        a = operands[0].view(M, -1)
        return (a,) if over else (a, operands[1].t()), {n: v.view(rows[n]) if n in rows else v for n, v in inputs.items()}

    def call(operands: Any, inputs: Any) -> Any:
        return kernel.over(*operands, **inputs) if over else kernel(*operands, **inputs)

    known = flat(*given())
    expected = gpu.during(lambda: call(*known))
    for _ in range(2):
        expected = gpu.during(lambda: call(*known))
    results = call(*known)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    operands, inputs = known
    bound = kernel.bound(
        () if over else operands, {"mm": operands[0], **inputs} if over else inputs, results, {"a": "a.flatten(0, -2)", "b": "b.t()"}, [(2, M // 2, N)]
    )
    assert bound is not None
    before, calls_before = through_triton.count, len(products)
    operands, inputs = given()
    held: list[Any] = []
    found = gpu.during(lambda: held.append(bound(*operands, *inputs.values())))
    assert through_triton.count == before
    assert [tuple(t.shape) for t in held[0]] == [(2, M // 2, N), *(tuple(t.shape) for t in results[1:])]
    assert [t.dtype for t in held[0]] == [t.dtype for t in results] and held[0][0].is_contiguous()
    assert products[calls_before:] == ([] if name != "library" else products[:1])
    kept = flat(operands, inputs)
    oracle = gpu.during(lambda: call(*kept))
    assert len(found) == len(expected) == len(oracle)
    for one, other in zip(found, oracle, strict=True):  # the same, but for where outputs and what lies between two kernels are
        assert (one.kernel, one.grid, one.block, one.shared, one.stream, one.ahead) == (
            other.kernel,
            other.grid,
            other.block,
            other.shared,
            other.stream,
            other.ahead,
        )
        unlike = [p for p, q in zip(one.parameters, other.parameters, strict=True) if p != q]
        between = {"a reduction": 1, "split_k": 2, "over": 1, "library": 1}.get(name, 0)
        assert len(unlike) <= len(results) + between and (name == "TMA" or all(len(p) == 8 for p in unlike))
    if name not in ("TMA", "whole"):
        addresses = {struct.unpack("Q", p)[0] for one in found for p in one.parameters if len(p) == 8}
        taken = () if name == "library" else operands
        assert {t.data_ptr() for t in (*taken, *inputs.values(), *held[0]) if isinstance(t, torch.Tensor)} <= addresses
        passed = {p for one in found for p in one.parameters}
        assert {struct.pack("f", v) for v in inputs.values() if isinstance(v, float)} <= passed
    shifts = [shifted(operands[0]), *operands[1:]]
    if name != "whole":
        assert bound(*shifts, *inputs.values()) is None


@pytest.mark.parametrize("config", [None, LIBRARY], ids=["chosen", "library"])
def test_a_fused_model_asks_nothing_on_its_way_to_the_driver(
    gpu: FakeGpu, config: KernelConfig | None, through_triton: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward: kernels are launched by calls that compare no tensor, with the addresses of the weights and of what is kept."""
    made: dict[str, Kernel] = {}
    calls: list[str] = []
    call = Kernel.__call__

    def counted(kernel: Kernel, *args: Any, **inputs: Any) -> Any:
        calls.append(kernel.program)
        return call(kernel, *args, **inputs)

    monkeypatch.setattr(library, "kernel", lambda text, _tune, _options=None: made.get(text) or made.setdefault(text, compiled(text, config)))
    monkeypatch.setattr(Kernel, "__call__", counted)
    monkeypatch.setattr(vendor, "product", lambda a, b, _precision: torch.zeros(a.shape[0], b.shape[1]))
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.ReLU(), torch.nn.Linear(N, K), torch.nn.Tanh()).half()
    epigen.fuse(model)
    x, gradient = half(2, M // 2, K).requires_grad_(), half(2, M // 2, K)
    launches: list[list[Launched]] = []
    for _ in range(5):
        calls.clear()
        before = through_triton.count
        held: list[torch.Tensor] = []
        forward = gpu.during(lambda held=held: held.append(model(x)))
        backward = gpu.during(lambda held=held: held[0].backward(gradient))
        launches = [forward, backward]
        assert held[0].shape == x.shape and held[0].dtype == torch.float16 and x.grad is not None and x.grad.shape == x.shape
    assert not calls and through_triton.count == before
    assert len(launches[0]) == 2 and len(launches[1]) >= 2
    if config is None:
        first = {struct.unpack("Q", p)[0] for p in launches[0][0].parameters if len(p) == 8}
        assert {t.data_ptr() for t in (x, *model[0].parameters())} <= first
        last = {struct.unpack("Q", p)[0] for p in launches[0][1].parameters if len(p) == 8}
        assert {t.data_ptr() for t in (held[0], *model[2].parameters())} <= last
        assert all(p.grad is not None for p in model.parameters())


def test_a_line_of_wrapper_code_asks_nothing_on_its_way_to_the_driver(gpu: FakeGpu, through_triton: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where an address is aligned otherwise, and where the extents of its graph vary: these are compared with those of earlier calls."""
    calls: list[str] = []
    call = Kernel.__call__

    def counted(kernel: Kernel, *args: Any, **inputs: Any) -> Any:
        calls.append(kernel.program)
        return call(kernel, *args, **inputs)

    text, (a, b), bias = "relu(mm + x0[n])", operands(), half(N)
    monkeypatch.setattr(library, "kernel", functools.cache(lambda text, _tune, _options=None: compiled(text)))
    monkeypatch.setattr(Kernel, "__call__", counted)
    for static in (True, False):
        line = Line(text, None, static)
        line(text, None, a, b, [bias], [])
        found = [gpu.during(lambda line=line: line(text, None, a, b, [bias], [])) for _ in range(3)]
        assert len(calls) == (1 if static else 4) and through_triton.count == 1 and len(found[0]) == 1
        assert {t.data_ptr() for t in (a, b, bias)} <= {struct.unpack("Q", p)[0] for p in found[-1][0].parameters if len(p) == 8}
        calls.clear()
    line = Line(text, None, True)
    for given in (a, a, shifted(a)):
        (result,) = line(text, None, given, b, [bias], [])
        assert result.shape == (M, N)
    assert len(calls) == 2 and through_triton.count == 2


def test_counters_are_held_until_the_kernel_is_launched(gpu: FakeGpu, through_triton: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a CUDA graph's capture they are new in each call: freed too early, their memory would be the vendor's product."""
    counters: list[weakref.ref[torch.Tensor]] = []
    new = workspace.Arrivals._new

    def made(arrivals: workspace.Arrivals) -> torch.Tensor:
        counters.append(weakref.ref(found := new(arrivals)))
        return found

    def product(_a: Any, _b: Any, _precision: str) -> torch.Tensor:
        assert counters[-1]() is not None
        return torch.zeros(M, N)

    monkeypatch.setattr(workspace.Arrivals, "_new", made)
    monkeypatch.setattr(vendor, "product", product)
    kernel, (a, b) = compiled("relu(mm), bgrad(mm)", LIBRARY.with_value("fused_finalize", 1)), operands()
    for _ in range(3):
        kernel(a, b)
    assert gpu.stream == 7 and len(counters) == 3 and through_triton.count == 1


def test_what_the_vendor_computes_whole_launches_nothing(gpu: FakeGpu, through_triton: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is found again by comparison all the same, whatever changes in between."""
    monkeypatch.setattr(vendor, "product", None)
    kernel, generator = compiled("mm", LIBRARY), torch.Generator().manual_seed(0)

    def whole(*size: int) -> torch.Tensor:
        return torch.randint(-3, 4, size, generator=generator).half()

    for turn in range(12):
        m, layout = (M, 16)[turn % 2], ("nn", "nt")[turn // 2 % 2]
        a, b = whole(m, K), whole(K, N) if layout == "nn" else whole(N, K).T
        out = (None, half(m, N), half(m, 2 * N)[:, ::2])[turn % 3]
        expected = (a.float() @ b.float()).half()
        for _ in range(2):
            found: list[torch.Tensor] = []
            assert gpu.during(lambda a=a, b=b, out=out, found=found: found.append(kernel(a, b, out=out))) == []
            assert torch.equal(found[0], expected) and (out is None or found[0] is out)
    assert through_triton.count == 0 and direct_calls(kernel)
    monkeypatch.setattr(kernel, "_call", None)
    assert torch.equal(kernel(a, b, out=out), expected)


@pytest.mark.parametrize("straight", [True, False], ids=["straight", "no native.c"])
def test_what_the_vendor_computes_whole_is_written_to_nothing_else(through_triton: Watch, monkeypatch: pytest.MonkeyPatch, straight: bool) -> None:
    """However warm, and also where nothing can be launched straight to the driver, as nothing is launched."""
    if not straight:
        monkeypatch.setattr(native, "_module", lambda: None)
    kernel, a, b = compiled("mm", LIBRARY), half(N, N), half(N, N)
    for out in (half(N, N), half(N, N)):
        kernel(a, b, out=out)
    assert direct_calls(kernel) and through_triton.count == 0
    for wrong in (a, b, a[:], b.T):
        with pytest.raises(CallError, match="overlaps"):
            kernel(a, b, out=wrong)


@pytest.mark.parametrize(
    "config",
    [TINY, cases.split_k(16, 16, 16, 2, 1, 1), cases.persistent(64, 16, 32), cases.persistent(64, 16, 32, tma_store=0), LIBRARY, None],
    ids=["tiled", "split_k", "TMA", "pointers", "library", "over a product"],
)
@pytest.mark.parametrize("guards", [True, False], ids=["torch's guard", "attributes"])
def test_in_place_and_not_in_any_order(gpu: FakeGpu, through_triton: Watch, config: KernelConfig | None, guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the buffer is the input itself or another one is no part of what is remembered: each call gets the addresses it was given."""
    if guards:  # which takes no tensor twice: in-place calls used to be compared attribute by attribute, eight times as long
        monkeypatch.setattr(fast_call, "_likeness", None)
    else:
        monkeypatch.setattr(fast_call, "_guards", None)
    monkeypatch.setattr(vendor, "product", lambda _a, _b, _precision: torch.zeros(M, N))
    kernel = compiled("cast(mm + grad[m,n], fp32)", config or LIBRARY)
    a, b = operands("tn")
    grad, other, mm = torch.zeros(M, N), torch.zeros(M, N), half(M, N)

    def call(out: torch.Tensor | None) -> Any:
        return kernel(a, b, grad=grad, out=out) if config else kernel.over(mm, grad=grad, out=out)

    for out in (grad, other, None):
        call(out)
    before = through_triton.count
    for out in random.Random(1).choices((grad, other, grad.view(M, N), None), k=30):
        (found,) = gpu.during(lambda out=out: call(out))
        given = {struct.unpack("Q", p)[0] for p in found.parameters if len(p) == 8} | {struct.unpack("Q", p[:8])[0] for p in found.parameters if len(p) == 128}
        assert grad.data_ptr() in given
        assert out is None or out.data_ptr() in given
        assert (other.data_ptr() in given) == (out is other)
    assert through_triton.count - before <= 2


@pytest.mark.parametrize(
    "config",
    [TINY, cases.persistent(64, 16, 32), LIBRARY.with_value("fused_finalize", 1), None],
    ids=["tiled", "TMA", "library", "over a product"],
)
def test_an_output_that_overlaps_is_refused_however_warm(
    gpu: FakeGpu, through_triton: Watch, config: KernelConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call has other addresses than the one that it is found by, and may be the first to have some that overlap."""
    monkeypatch.setattr(vendor, "product", lambda _a, _b, _precision: torch.zeros(N, N))
    kernel, product, held = compiled("mm + x[m,n], mm * 2", config or LIBRARY), half(N, N), half(N, 4 * N)
    x, b, y, z = (half(N, N) for _ in range(4))
    side = [held[:, i * N : (i + 1) * N] for i in range(4)]  # between the bytes of one another
    good = ((x, [y, z]), (x, [x, z]), (x, [x[:], z]), (side[0], side[1:3]), (side[1], side[2:4]), (side[0], [side[0], side[1]]))
    bad = (
        (x, [y, y]),
        (x, [y, y[:]]),
        (x, [y, x]),
        (x, [y, x[:]]),
        (side[0], [held[:, 8 : N + 8], side[2]]),
        (side[0], [side[1], held[:, 2 * N - 8 : 3 * N - 8]]),
    )

    def call(x: torch.Tensor, out: Any) -> Any:
        return kernel(product, b, x=x, out=out) if config else kernel.over(product, x=x, out=out)

    def refused(x: torch.Tensor, out: Any) -> None:
        with pytest.raises(CallError, match="overlaps"):
            call(x, out)

    for x, out in good * 2:
        call(x, out)
    before = through_triton.count
    for _ in range(2):
        for right, wrong in zip(good, bad, strict=True):
            assert len(gpu.during(lambda right=right: call(*right))) == 1
            assert not gpu.during(lambda wrong=wrong: refused(*wrong))
    assert through_triton.count == before


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("relu(mm)", {}),
        ("mm * alpha + residual", {"residual": half(M, N), "alpha": 0.5}),
        ("dz = drelu(mm, mask); dz, bgrad(dz)", {"mask": torch.zeros(M, N // 8, dtype=torch.uint8)}),
    ],
    ids=["nothing else", "a number", "a reduction"],
)
@pytest.mark.parametrize("view", ["plain", "transposed", "shifted", "fp32"])
def test_a_product_that_is_given_is_handed_on(
    gpu: FakeGpu, through_triton: Watch, monkeypatch: pytest.MonkeyPatch, text: str, inputs: dict[str, Any], view: str
) -> None:
    """All but the address of what is allocated between two kernels is Triton's own, and no call goes through it a second time."""
    kept, tensors = [], workspace.Workspace.tensors
    # what the oracle's call is done with, the allocator would give to the other's
    monkeypatch.setattr(workspace.Workspace, "tensors", lambda self, on: kept.append(tensors(self, on)) or kept[-1])
    kernel, oracle = compiled(text, LIBRARY), compiled(text, LIBRARY)
    for m in (M, 16, M):
        t = half(m, N)
        mm = {"plain": lambda t=t: t, "transposed": lambda m=m: half(N, m).T, "shifted": lambda t=t: shifted(t), "fp32": lambda t=t: t.float()}[view]()
        given = {name: v[:m] if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
        found = kernel.over(mm, **given)
        outs = tuple(torch.empty_like(t) for t in (found if isinstance(found, tuple) else (found,)))
        forget(oracle._over)
        expected = gpu.during(lambda mm=mm, outs=outs, given=given: oracle.over(mm, out=outs, **given))
        kernel.over(mm, out=outs, **given)
        before = through_triton.count
        launches = gpu.during(lambda mm=mm, outs=outs, given=given: kernel.over(mm, out=outs, **given))
        assert through_triton.count == before and len(launches) == len(expected) == (2 if "bgrad" in text else 1)
        for x, y in zip(launches, expected, strict=True):
            assert (x.kernel, x.grid, x.block, x.stream) == (y.kernel, y.grid, y.block, y.stream)
            unlike = [i for i, (p, q) in enumerate(zip(x.parameters, y.parameters, strict=True)) if p != q]
            assert len(unlike) == (1 if "bgrad" in text else 0), "the partial results"
        addresses = {struct.unpack("Q", p)[0] for p in launches[0].parameters if len(p) == 8}
        assert {mm.data_ptr(), outs[0].data_ptr()} <= addresses
    assert direct_calls(kernel._over) and not direct_calls(kernel)
