"""What warmed calls give the driver, on a GPU that is none. Run by tests/test_direct.py in a process of its own: no pytest file by name.

The oracle is Triton itself: a warmed kernel has to launch, parameter by parameter, what a kernel that has seen no call yet launches.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import struct
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from counting import calls
from fake_gpu import FakeGpu, Launched

import epigen
from epigen.codegen import schedules
from epigen.codegen.functions import Argument, Function
from epigen.codegen.render import Rendered
from epigen.codegen.spec import KernelConfig, digest
from epigen.errors import CallError
from epigen.gpus import DEFAULT_TARGET
from epigen.runtime import direct, fast_call, launch, loader, native, vendor, workspace
from epigen.runtime import kernel as kernel_module
from epigen.runtime.code_builder import CodeBuilder
from epigen.runtime.kernel import Kernel
from epigen.runtime.launch import Launch
from epigen.runtime.loader import Loader
from epigen.runtime.prepared import Prepared
from epigen.training import library
from epigen.training.wrapper import Line

pytestmark = pytest.mark.triton

TINY = cases.tiled(16, 16, 16, 1, 1)
LIBRARY = schedules.config("library", block_m=16, block_n=16, num_warps=1)
M, N, K = 32, 48, 64


@pytest.fixture(scope="session")
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture(autouse=True, scope="session")
def _without() -> Iterator[None]:
    """As where native.c cannot be compiled, if tests/test_direct.py asks for that."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("LAUNCHER") == "triton":
            patch.setattr(native, "_module", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _stream(gpu: FakeGpu) -> Iterator[None]:
    gpu.stream = 7
    yield
    gpu.stream = 7


def half(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float16)


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same in all but its address, which is no multiple of 16."""
    held = torch.zeros(t.numel() + 1, dtype=t.dtype)
    return held[1:].view(t.shape) if t.is_contiguous() else held[1:].view(t.T.shape).T


def compiled(text: str, config: Any = TINY) -> Kernel:
    return epigen.compile(text, config=config, backend="triton")


def forget(kernel: Kernel) -> None:
    for memory in (kernel._recent, kernel._prepared, kernel._ready):
        memory.clear()


def direct_calls(kernel: Kernel) -> bool:
    """Whether anything has been readied to be launched without Triton."""
    return any(kernel._recent.values())


class Watch:
    """Counts what goes through Triton's own launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        call = Launch.__call__

        def counted(launch: Launch, values: Any) -> Any:
            self.count += 1
            return call(launch, values)

        monkeypatch.setattr(Launch, "__call__", counted)


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def launched(gpu: FakeGpu, kernel: Kernel, *operands: Any, **inputs: Any) -> list[Launched]:
    """What a call launches that has been made before."""
    kernel(*operands, **inputs)
    return gpu.during(lambda: kernel(*operands, **inputs))


def as_triton_does(gpu: FakeGpu, kernel: Kernel, *operands: Any, **inputs: Any) -> list[Launched]:
    """What the same call launches that no other has come before."""
    forget(kernel)
    return gpu.during(lambda: kernel(*operands, **inputs))


# -- what a compiling worker leaves behind


def test_what_was_warmed_needs_no_c_compiler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton 3.6 makes a launcher for each list of argument types; this program's list is no other's."""
    from triton import knobs
    from triton.runtime import build, driver

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    kernel, (a, b) = compiled("where(keep[m,n] > 0, mm, mm * weight[n] + shift)"), operands()
    inputs = {"keep": torch.zeros(M, N, dtype=torch.int8), "weight": torch.zeros(N, dtype=torch.float32), "shift": 2.0}
    before = driver.active
    kernel.warm(a, b, DEFAULT_TARGET, **inputs)
    driver.set_active(before)

    def compile_c(*_arguments: Any) -> Any:
        raise AssertionError("a C compiler was asked")

    monkeypatch.setattr(build, "_build", compile_c)
    assert launched(gpu, kernel, a, b, **inputs)


# -- the same launch


def operands(layout: str = "nn") -> tuple[torch.Tensor, torch.Tensor]:
    a, b = half(M, K), half(K, N)
    return (a if layout[0] == "n" else half(K, M).T), (b if layout[1] == "n" else half(N, K).T)


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


@pytest.fixture
def captured(gpu: FakeGpu) -> Iterator[None]:
    gpu.capturing = True
    yield
    gpu.capturing, gpu.stream = False, 7


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


def test_buffers_come_in_a_list_or_a_tuple(gpu: FakeGpu, through_triton: Watch) -> None:
    kernel, (a, b) = compiled("mm, relu(mm)"), operands()
    outs = [half(M, N), half(M, N)]
    ways = (outs, tuple(outs), kernel._outputs(*outs))
    for out in ways:
        kernel(a, b, out=out)
    before = through_triton.count
    (first, *others) = [gpu.during(lambda out=out: kernel(a, b, out=out)) for out in ways]
    assert all(other == first for other in others) and through_triton.count == before
    for few in (outs[:1], tuple(outs[:1]), [*outs, *outs]):
        with pytest.raises(CallError, match=f"out holds {len(few)} tensors"):
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
    over = name == "over"

    def given() -> tuple[Any, ...]:
        x, w, mm = half(2, M // 2, K), half(N, K), half(2, M // 2, N)
        values: dict[str, Any] = {"bias": half(N), "gate": half(2, M // 2, N), "row": half(2, M // 2)}
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
        assert {t.data_ptr() for t in (*taken, *inputs.values(), *held[0])} <= addresses
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


# -- never the wrong one


def pool() -> list[Callable[[], tuple[Any, ...]]]:
    """Calls of relu(mm * s + bias), each with something that Triton or epigen treats apart from the others."""

    def call(
        m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.float16, change: str = "", at: int = 0, s: Any = 0.5
    ) -> Callable[[], tuple[Any, ...]]:
        def made() -> tuple[Any, ...]:
            tensors = [torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype), torch.zeros(n, dtype=dtype), torch.zeros(m, n, dtype=dtype)]
            t = tensors[at]
            if change == "shifted":
                tensors[at] = shifted(t)
            elif change == "transposed":
                tensors[at] = torch.zeros(t.shape[1], t.shape[0], dtype=dtype).T
            elif change == "spread":
                tensors[at] = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=dtype)[..., ::2]
            elif change == "wide":
                tensors[at] = torch.zeros(t.shape[0], t.shape[1] + 1, dtype=dtype)[:, :-1]
            elif change == "negative":
                tensors[at] = torch._neg_view(t)
            elif change == "parameter":
                tensors[at] = torch.nn.Parameter(t)
            elif change == "fp32":
                tensors[at] = t.float()
            return (*tensors, s)

        return made

    return [
        call(), call(), call(m=16), call(n=16), call(n=1), call(k=33), call(m=1), call(dtype=torch.bfloat16), call(s=torch.ones(1)), call(s=1),
        *(call(change="shifted", at=i) for i in range(4)), call(change="transposed", at=0), call(change="transposed", at=1),
        call(change="transposed", at=3), call(change="spread", at=2), call(change="wide", at=0), call(change="wide", at=3),
        call(change="negative", at=2), call(change="parameter", at=1), call(change="fp32", at=2),
    ]  # fmt: skip


@pytest.mark.parametrize("guards", [True, False], ids=["torch's guard", "attributes"])
def test_whatever_comes_in_whatever_order(gpu: FakeGpu, guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guards:
        monkeypatch.setattr(fast_call, "_guards", None)
    kernel, oracle = compiled("relu(mm * s + bias)"), compiled("relu(mm * s + bias)")
    makers = pool()
    order = [*range(len(makers)), *random.Random(0).choices(range(len(makers)), k=150)]
    held: list[Any] = []
    with torch.no_grad():
        for number in order:
            a, b, bias, out, s = makers[number]()
            held = [a] if number % 3 else []  # what is freed comes back as something else at the same address
            gpu.stream = number + 1
            expected = as_triton_does(gpu, oracle, a, b, bias=bias, s=s, out=out)
            found = launched(gpu, kernel, a, b, bias=bias, s=s, out=out)
            for x, y in zip(found, expected, strict=True):
                if any(t.is_neg() for t in (a, b, bias)):  # read from a copy of its own, wherever that lies
                    assert (x.kernel, x.grid, x.stream, len(x.parameters)) == (y.kernel, y.grid, y.stream, len(y.parameters))
                else:
                    assert x == y, number
    assert held is not None and len(kernel._prepared) >= len(makers) - 3


def test_more_shapes_than_are_compared_with(gpu: FakeGpu) -> None:
    kernel, oracle = compiled("relu(mm)"), compiled("relu(mm)")
    for _ in range(3):
        for m in range(1, 24):
            a, b, out = half(m, K), half(K, N), half(m, N)
            assert launched(gpu, kernel, a, b, out=out) == as_triton_does(gpu, oracle, a, b, out=out)


def test_an_address_that_comes_back_with_another_shape(gpu: FakeGpu) -> None:
    kernel, oracle = compiled("relu(mm)"), compiled("relu(mm)")
    held, b = half(M * K), half(K, N)
    for m in (32, 16, 32, 1, 16):
        out = half(m, N)
        for a in (held[: m * K].view(m, K), held[: m * K].view(K, m).T):
            assert launched(gpu, kernel, a, b, out=out) == as_triton_does(gpu, oracle, a, b, out=out)


def test_batches_of_ever_new_sizes_need_few_kernels(gpu: FakeGpu, through_triton: Watch) -> None:
    """What compiles is found by Triton's own digest; a size that comes back is launched without Triton, however long ago it was."""
    kernel = compiled("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)", None)
    held, b, bias, kernels = half(4096, 64), half(256, 64).T, half(256), set()
    sizes = [*range(1, 130), *range(130, 4097, 37)]
    for m in sizes:
        kernel(held[:m], b, bias=bias)
        assert kernel._last is not None
        kernels |= {it.hash for it in kernel._last.compiled}
    assert len(sizes) > 200 and len(kernels) <= 24
    before, launches = through_triton.count, gpu.library.fake_launches()
    for m in sizes:
        kernel(held[:m], b, bias=bias)
    assert through_triton.count == before and gpu.library.fake_launches() == launches + len(sizes)
    assert max(calls(lambda: kernel(held[:m], b, bias=bias)) for m in range(2050, 3000, 7)) < 1000  # noqa: B023  # called at once


def test_prepared_calls_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "_KEPT", 4)
    kernel, b = compiled("relu(mm)"), half(K, N)
    for m in [*range(1, 24), *range(1, 24), 23]:
        kernel(half(m, K), b)
    assert len(kernel._prepared) == len(kernel._ready) == 4 and sum(map(len, kernel._recent.values())) == kernel_module._RECENT


def test_no_tensor_is_kept_alive() -> None:
    kernel = compiled("mm * s + bias")
    a, b = operands()
    given = {"a": a, "b": b, "bias": half(N), "out": half(M, N)}
    for s in (0.5, torch.ones(1)):
        for _ in range(3):
            kernel(given["a"], given["b"], bias=given["bias"], s=s, out=given["out"])
    held = [weakref.ref(t) for t in given.values()]
    del a, b, given
    assert direct_calls(kernel) and not any(t() is not None for t in held)


def test_what_is_forgotten_goes_at_once() -> None:
    """Counters lie in the GPU's memory, and garbage collection knows nothing of how little of that is left."""
    kernel, (a, b) = compiled("relu(mm)", cases.split_k(16, 16, 16, 2, 1, 1)), operands()
    for _ in range(3):
        kernel(a, b)
    assert kernel._last is not None and kernel._last.arrivals is not None
    counted = weakref.ref(kernel._last.arrivals)
    gc.disable()
    try:
        forget(kernel)
        kernel._last = None
        assert counted() is None
    finally:
        gc.enable()


def test_a_guard_that_says_otherwise_is_not_trusted(monkeypatch: pytest.MonkeyPatch, through_triton: Watch) -> None:
    class Guard:
        def __init__(self, *_: Any, **__: Any):
            pass

        def check(self, *_: Any) -> bool:
            return False

    monkeypatch.setattr(fast_call, "_guards", Guard)
    kernel = compiled("relu(mm)")
    a, b = operands()
    for _ in range(3):
        kernel(a, b)
    assert through_triton.count == 1


def test_a_gradient_is_refused_however_warm(through_triton: Watch) -> None:
    kernel = compiled("mm + bias")
    a, b = operands()
    for bias in (half(N).requires_grad_(), torch.nn.Parameter(half(N))):
        with torch.no_grad():
            kernel(a, b, bias=bias)
            before = through_triton.count
            kernel(a, b, bias=bias)
            assert through_triton.count == before
        with pytest.raises(CallError, match="requires grad"):
            kernel(a, b, bias=bias)
    plain = half(N)
    kernel(a, b, bias=plain)
    kernel(a, b, bias=plain)
    with pytest.raises(CallError, match="requires grad"):
        kernel(a, b, bias=half(N).requires_grad_())


def test_a_process_wide_precision_that_changes() -> None:
    kernel = compiled("mm")
    a, b = operands()
    a, b = a.float(), b.float()
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(setting)
            for _ in range(2):
                kernel(a, b)
                assert ('input_precision="ieee"' in kernel.source()) == (setting == "highest")
        for setting in ("ieee", "tf32", "ieee"):  # the newer one, which the older may contradict
            torch.backends.cuda.matmul.fp32_precision = setting
            for _ in range(2):
                kernel(a, b)
                assert f'input_precision="{setting}"' in kernel.source()
    finally:
        torch.set_float32_matmul_precision(before)


def test_wrong_arguments_are_refused_however_warm() -> None:
    kernel = compiled("mm * alpha + bias")
    a, b = operands()
    good = {"alpha": 1.0, "bias": half(N)}
    for _ in range(2):
        kernel(a, b, out=half(M, N), **good)
        kernel(a, b, **good)
    for given, message in (
        ({"alpha": "1", "bias": half(N)}, "alpha"), ({"alpha": 1.0, "bias": half(N + 1)}, "bias"), ({"alpha": 1.0}, "missing input: bias"),
        ({"alpha": 1.0, "bias": 3}, "bias"), ({"alpha": 1.0, "bias": half(N), "x": 1}, "no input 'x'"), (good | {"out": half(N, M)}, "out for"),
        (good | {"out": [None]}, "out for"), (good | {"out": ()}, "out holds 0 tensors"), (good | {"out": 3}, "out is a int"), ({"bias": 1.0, "alpha": half(N)}, "alpha"),
    ):  # fmt: skip
        with pytest.raises(CallError, match=message):
            kernel(a, b, **({"out": half(M, N)} | given))
    big = compiled("mm * alpha")
    for _ in range(2):
        big(a, b, alpha=3)
    with pytest.raises(CallError, match="too large"):
        big(a, b, alpha=10**400)


def test_modes_of_torch(through_triton: Watch) -> None:
    """Inference and autocast change how torch sees a tensor, not what the kernel does with it."""
    kernel = compiled("relu(mm)")
    a, b = operands()
    for _ in range(3):
        kernel(a, b)
        with torch.inference_mode():
            assert kernel(a, b).is_inference()
        with torch.autocast("cpu"):
            kernel(a, b)
    assert through_triton.count < 6 and len(kernel._prepared) == 1


@pytest.mark.filterwarnings("ignore")  # of torch.jit, about its age and the shapes that are checked
def test_torch_jit_is_told_of_a_call_however_warm(gpu: FakeGpu) -> None:
    """Or what the kernel had written would be a constant of what it has traced."""
    kernel = compiled("relu(mm)")
    a, b = operands()
    for _ in range(3):
        kernel(a, b)
    launched = gpu.library.fake_launches()
    traced = torch.jit.trace(lambda x, y: kernel(x, y), (a, b), check_trace=False)
    assert gpu.library.fake_launches() == launched
    torch.testing.assert_close(traced(a.neg(), b), torch.relu(-a.float() @ b.float()).to(a.dtype), rtol=0.02, atol=0.02)


# -- who takes part


def test_a_hook_sees_every_launch(through_triton: Watch) -> None:
    import triton

    kernel, seen = compiled("relu(mm)"), []
    a, b = operands()
    kernel(a, b)
    runtime = triton.knobs.runtime
    runtime.launch_enter_hook.add(seen.append)
    try:
        for _ in range(3):
            kernel(a, b)
    finally:
        runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 3
    before = through_triton.count
    kernel(a, b)
    assert through_triton.count == before
    chain, calls = runtime.launch_exit_hook, []
    try:
        runtime.launch_exit_hook = calls.append
        kernel(a, b)
    finally:
        runtime.launch_exit_hook = chain
    assert len(calls) == 1


@pytest.mark.parametrize("own", [{}, {"jit_cache_hook": None}], ids=["the first", "another before"])
@pytest.mark.parametrize(("knob", "value"), [("debug", True), ("add_stages_inspection_hook", print)])
def test_a_knob_that_is_set_is_seen(knob: str, value: Any, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton then compiles another kernel, or is asked to show how; and launches are direct once more when it is as it was."""
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "__dict__", own)
    run, asked = Prepared.run, []
    monkeypatch.setattr(Prepared, "run", lambda *given: (asked.append(1), half(M, N))[1:] if own.get(knob) else run(*given))
    kernel, (a, b) = compiled("relu(mm)"), operands()
    for turn in (1, 2):
        for _ in range(3):
            kernel(a, b)
        assert direct_calls(kernel) and len(asked) == turn - 1
        setattr(knobs.runtime, knob, value)
        kernel(a, b)
        assert len(asked) == turn
        delattr(knobs.runtime, knob)


def test_a_launcher_of_another_make_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    original = CudaLauncher.__call__
    a, b = operands()
    for other in (
        lambda self, x, y, z, stream, function, *rest: original(self, x, y, z, stream, function, *rest[:4], *reversed(rest[4:])),
        lambda self, x, y, z, stream, *rest: original(self, x, y, z, int(stream), *rest),  # does something with the stream
        lambda self, x, *rest: [original(self, x, *rest) for _ in range(2)],
        lambda self, *given: original(types.SimpleNamespace(**vars(self) | {"launch_pdl": False}), *given),
        lambda self: self,
    ):
        kernel = compiled("relu(mm)")
        kernel(a, b)
        assert kernel._last is not None
        monkeypatch.setattr(CudaLauncher, "__call__", other)
        assert direct.start(kernel._last.launches[0].jit, kernel._last.compiled[0], _names(kernel), 4, _count(kernel)) is None
        monkeypatch.setattr(CudaLauncher, "__call__", original)
    monkeypatch.setattr(direct, "start", lambda *_: None)
    kernel = compiled("relu(mm)")
    for _ in range(3):
        kernel(a, b)
    assert not direct_calls(kernel)


def _names(kernel: Kernel) -> list[str]:
    assert kernel._last is not None
    return kernel._last.launches[0].function.names


def _count(kernel: Kernel) -> int:
    return len(_names(kernel))


def test_parameters_in_another_order_are_left_to_triton() -> None:
    kernel = compiled("relu(mm)")
    kernel(*operands())
    assert kernel._last is not None
    launch, it, names = kernel._last.launches[0], kernel._last.compiled[0], _names(kernel)
    assert direct.start(launch.jit, it, names, 4, len(names)) is not None
    assert direct.start(launch.jit, it, [*names[1:], names[0]], 4, len(names)) is None
    assert direct.start(launch.jit, None, names, 4, len(names)) is None


def test_another_device_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compiled("relu(mm)")
    a, b = operands()
    now, seen = [None], []

    class Guard:
        def __init__(self, device: Any):
            self.device = device

        def __enter__(self) -> None:
            seen.append(self.device)
            self.before, now[0] = now[0], self.device

        def __exit__(self, *_: object) -> None:
            now[0] = self.before

    monkeypatch.setattr(fast_call, "current_device", lambda: now[0])
    for _ in range(2):
        kernel(a, b)
    monkeypatch.setattr("torch.cuda.device", Guard)
    now[0] = 3
    kernel(a, b)
    assert seen == [None] and now == [3]  # None is the index of where these tensors lie


def test_where_there_is_one_gpu_nobody_asks_which(monkeypatch: pytest.MonkeyPatch, through_triton: Watch) -> None:
    kernel = compiled("relu(mm)")
    a, b = operands()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(fast_call, "current_device", lambda: pytest.fail("asked"))
    for _ in range(3):
        kernel(a, b)
    assert through_triton.count == 1 and direct_calls(kernel)


# -- straight to the driver


@pytest.fixture
def without_tritons_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a call's second time on."""
    monkeypatch.setattr(direct.Start, "call", lambda *_: pytest.fail("goes through Triton's launcher"))


def addresses(launches: list[Launched]) -> set[int]:
    return {struct.unpack("Q", p)[0] for x in launches for p in x.parameters if len(p) == 8}


@pytest.mark.usefixtures("without_tritons_launcher")
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("relu(mm * 0.5)", TINY),
        ("mm, sum(mm, m), sum(mm, n), amax(mm)", TINY),
        ("mm, bgrad(mm)", TINY.with_value("fused_finalize", 1)),
        ("relu(mm)", cases.split_k(16, 16, 16, 2, 1, 1)),
        ("relu(mm)", LIBRARY),
    ],
    ids=["tiled", "two kernels", "counters", "split_k", "library"],
)
def test_straight_to_the_driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, text: str, config: KernelConfig) -> None:
    monkeypatch.setattr(vendor, "product", lambda _a, _b, _precision: torch.zeros(M, N))
    kernel, (a, b) = compiled(text, config), operands()
    found = kernel(a, b)
    outs = found if isinstance(found, tuple) else (found,)
    expected = as_triton_does(gpu, compiled(text, config), a, b, out=outs)
    kernel(a, b, out=outs)
    launches = launched(gpu, kernel, a, b, out=outs)
    assert [(x.kernel, x.grid, x.block, x.shared, x.ahead) for x in launches] == [(x.kernel, x.grid, x.block, x.shared, x.ahead) for x in expected]
    assert {t.data_ptr() for t in (*((a, b) if config != LIBRARY else ()), *outs)} <= addresses(launches)


@pytest.mark.usefixtures("without_tritons_launcher")
def test_straight_calls_are_told_apart_by_alignment(gpu: FakeGpu, through_triton: Watch) -> None:
    """Of whichever tensor; a launch that is not made leaves the call to one that fits."""
    kernel, (a, b) = compiled("z = mm + bias; z, bgrad(z)"), operands()
    tensors = [a, b, half(N), half(M, N), torch.zeros(N)]
    found = dict[int | None, list[Launched]]()
    for _ in range(2):
        for at in (None, 0, 2, 3, 4, 1, None):
            x, y, bias, *out = [shifted(t) if i == at else t for i, t in enumerate(tensors)]
            before = through_triton.count
            launches = gpu.during(lambda x=x, y=y, bias=bias, out=out: kernel(x, y, bias=bias, out=tuple(out)))
            assert found.setdefault(at, launches)[0].kernel == launches[0].kernel and len(launches) == 2
            assert {t.data_ptr() for t in (x, y, bias, out[0])} <= addresses(launches[:1])
            assert out[1].data_ptr() in addresses(launches[1:])
    assert through_triton.count == before and len({x[0].kernel for at, x in found.items() if at in (None, 0, 1, 2, 3)}) == 5


@pytest.mark.usefixtures("without_tritons_launcher")
def test_straight_from_a_thread_that_cuda_has_not_served(gpu: FakeGpu) -> None:
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    before = gpu.library.fake_launches()
    assert not in_threads(1, lambda _: kernel(a, b))
    assert gpu.library.fake_launches() == before + 1


def test_straight_launches_that_fail_say_why(gpu: FakeGpu) -> None:
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    gpu.library.fake_refuse(700)
    try:
        with pytest.raises(RuntimeError, match=r"the driver refused a launch: FAKE \(700\)"):
            kernel(a, b)
    finally:
        gpu.library.fake_refuse(0)
    assert launched(gpu, kernel, a, b)


def straight_step(kernel: Kernel, *values: Any) -> Any:
    assert kernel._last is not None
    return launch.in_one_step(kernel._last.launchers, values, len(values), None)


def test_straight_steps_take_what_they_were_made_for(gpu: FakeGpu) -> None:
    """And let go of what they were made of."""
    kernel, (a, b), out = compiled("mm * alpha"), operands(), half(M, N)
    kernel(a, b, alpha=0.5)
    step = straight_step(kernel, a, b, 0.5, out)
    (x,) = gpu.during(lambda: step(7, False, a, b, 2.0, out))
    (y,) = gpu.during(lambda: step(7, False, a.data_ptr(), b.data_ptr(), 2.0, out.data_ptr()))
    assert x == y and x.parameters[2] == struct.pack("f", 2.0) and step(7, False, shifted(a), b, 2.0, out) is False
    for wrong in ((), (7, False, a, b, 2.0), (7, False, a, b, 2.0, out, 1), (7, False, "a", b, 2.0, out), ("7", False, a, b, 2.0, out)):
        with pytest.raises(TypeError):
            step(*wrong)
    with pytest.raises(TypeError):
        step(7, False, a, b, 2.0, out=out)
    make, held = type(step), b"===="
    before = sys.getrefcount(held)
    steps = [make(0, torch.Tensor.data_ptr, held, ((1, 2, 3, 4, False, True, ((0, 0), (-1, 9))),), ()) for _ in range(10)]
    assert sys.getrefcount(held) == before + 10
    del steps
    for wrong in (((1, 2),), ((1, 2, 3, 4, 0, 0, ((4, 0),)),), ((1, 2, 3, 4, 0, 0, ((0,),)),), ((1, 2, 3, 4, 0, 0, ((0, "0"),)),)):
        with pytest.raises((TypeError, ValueError)):
            make(0, torch.Tensor.data_ptr, held, wrong, ())
    for pair in ((0, 1, 2), (0, 4, 2, 2), (-1, 0, 2, 2)):
        with pytest.raises((TypeError, ValueError)):
            make(0, torch.Tensor.data_ptr, held, (), (pair,))
    assert sys.getrefcount(held) == before


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("signature", {"a_ptr": "*fp16"}),
        ("signature", {"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp16", "M": "fp64"}),
        ("num_ctas", 2),
        ("launch_cooperative_grid", True),
    ],
    ids=["fewer arguments", "an unknown type", "a cluster", "a cooperative grid"],
)
def test_straight_launches_are_made_of_what_is_known(gpu: FakeGpu, change: str, value: Any) -> None:
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    assert kernel._last is not None and gpu.stream == 7
    it, direct_launch = kernel._last.compiled[0], kernel._last.launchers[0]
    parameters = [(-1, x.value) if isinstance(x, launch.Fixed) else (x.place, 0) for x in direct_launch.arguments]
    assert native.kernel(it, 4, parameters) == replace(direct_launch.native, blocks=4)
    metadata = types.SimpleNamespace(**it.metadata._asdict() | ({} if change == "signature" else {change: value}))
    source = types.SimpleNamespace(signature=it.src.signature | value if change == "signature" and len(value) > 1 else value)
    other = types.SimpleNamespace(metadata=metadata, src=source if change == "signature" else it.src, function=it.function)
    assert native.kernel(other, 4, parameters) is None
    for name in ("shared", "num_warps", "num_ctas", "launch_cooperative_grid", "target"):
        fewer = types.SimpleNamespace(**{key: held for key, held in it.metadata._asdict().items() if key != name})
        assert native.kernel(types.SimpleNamespace(metadata=fewer, src=it.src, function=it.function), 4, parameters) is None


@pytest.mark.parametrize("answer", ["an error", "no context", "no such function"])
def test_straight_or_not_where_the_driver_gives_no_context(gpu: FakeGpu, through_triton: Watch, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    driver = types.SimpleNamespace(cuDeviceGet=lambda _device, _index: 0, cuDevicePrimaryCtxRetain=lambda _found, _device: 201 * (answer == "an error"))
    if answer == "no such function":
        del driver.cuDevicePrimaryCtxRetain
    driver.cuFuncGetParamInfo = native._driver().cuFuncGetParamInfo
    monkeypatch.setattr(native, "_context", native._context.__wrapped__)
    monkeypatch.setattr(native, "_driver", lambda: driver)
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    before = through_triton.count
    assert straight_step(kernel, a, b) is None and len(launched(gpu, kernel, a, b)) == 1 and through_triton.count == before


def test_straight_only_where_the_driver_sees_the_same_parameters(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, through_triton: Watch) -> None:
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    assert kernel._last is not None
    it = kernel._last.compiled[0]
    sizes = gpu.known[it.function][1]
    count = len(sizes)
    assert native._sizes(it.function, count) == sizes and native._sizes(it.function, 2) == sizes[:3]
    for other in ([*sizes, 8], sizes[:-1], [4, *sizes[1:]], []):
        with monkeypatch.context() as patch:
            patch.setattr(native, "_sizes", lambda _function, _most, other=other: other)
            forget(kernel)
            kernel(a, b)
        assert kernel._last.launchers[0].native is None and direct_calls(kernel)
        before = through_triton.count
        assert len(gpu.during(lambda: kernel(a, b))) == 1 and through_triton.count == before


@pytest.mark.parametrize("error", [subprocess.CalledProcessError(1, "cc"), RuntimeError("no compiler"), OSError("no folder")], ids=repr)
def test_straight_or_not_where_nothing_can_be_compiled(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from triton.runtime import build

    tried: list[str] = []

    def fail(_source: str, name: str, **_: Any) -> Any:
        tried.append(name)
        raise error

    monkeypatch.setattr(build, "compile_module_from_src", fail)
    monkeypatch.setattr(loader, "native", functools.cache(loader.native.__wrapped__))
    monkeypatch.setattr(native, "_module", native._module.__wrapped__)
    kernel, oracle, (a, b), out = compiled("relu(mm)"), compiled("relu(mm)"), operands(), half(M, N)
    assert launched(gpu, kernel, a, b, out=out) == as_triton_does(gpu, oracle, a, b, out=out) and direct_calls(kernel)
    kernel(a[:16], b)
    assert tried == ["epigen_native"]


def test_straight_or_not_without_the_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    assert native._module.__wrapped__() is not None
    monkeypatch.setattr(native, "_driver", functools.partial(load, "libcuda.so.1"))
    assert native._module.__wrapped__() is None and native._sizes(1, 3) == []


# -- threads


def in_threads(count: int, work: Callable[[int], None]) -> list[Exception]:
    """What went wrong in threads that begin at one time."""
    ready, failures = threading.Barrier(count), list[Exception]()

    def run(number: int) -> None:
        ready.wait()
        try:
            work(number)
        except Exception as error:  # noqa: BLE001  # the caller wants every kind
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return failures


def test_threads_with_shapes_of_their_own(gpu: FakeGpu) -> None:
    kernel, oracle = compiled("relu(mm + bias)"), compiled("relu(mm + bias)")
    b, bias = half(K, N), half(N)
    given = [(half(m, K), half(m, N)) for m in range(1, 9)]

    def work(number: int) -> None:
        a, out = given[number]
        for _ in range(40):
            assert kernel(a, b, bias=bias, out=out) is out

    before = gpu.library.fake_launches()
    assert not in_threads(8, work)
    assert gpu.library.fake_launches() - before == 8 * 40
    for a, out in given:
        assert launched(gpu, kernel, a, b, bias=bias, out=out) == as_triton_does(gpu, oracle, a, b, bias=bias, out=out)


def test_threads_that_want_the_same_kernel_for_the_first_time() -> None:
    a, b = operands()
    for _ in range(3):
        kernel = compiled("relu(mm)")
        assert not in_threads(8, lambda _number, kernel=kernel: kernel(a, b))


# -- tensors that TMA addresses

TRITON_COPY = """
import triton
import triton.language as tl


@triton.jit
def copy(x_desc, y_desc, alpha, M, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK
    y_desc.store([at, 0], (x_desc.load([at, 0]) * alpha).to(tl.float16))
"""

GLUON_COPY = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def copy(x_desc, y_desc, alpha, M, N, BLOCK: gl.constexpr, PDL: gl.constexpr):
    at = gl.program_id(0) * BLOCK
    held = gl.allocate_shared_memory(gl.float16, x_desc.block_type.shape, x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    load(x_desc, [at, 0], bar, held)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    store(y_desc, [at, 0], held)
    tma.store_wait(0)
"""

BLOCK = (16, 64)


@pytest.fixture(scope="session", params=[TRITON_COPY, GLUON_COPY], ids=["triton", "gluon"])
def copy(request: pytest.FixtureRequest, gpu: FakeGpu) -> tuple[Any, Function]:
    assert gpu.stream == 7
    names = (("x_desc", "*fp16", BLOCK), ("y_desc", "*fp16", BLOCK), ("alpha", "fp32", None), ("M", "i32", None), ("N", "i32", None))
    function = Function(
        "copy", tuple(Argument(n, t, block=b) for n, t, b in names), (("BLOCK", 16),), 4, 1, None, "gluon" if request.param is GLUON_COPY else "triton"
    )
    module: types.ModuleType = Loader(interpret=False).load(Rendered(request.param, (function,), digest([request.param])))
    return module.copy, function


SLOTS = {"x_ptr": 0, "y_ptr": 1, "alpha": 2}


def bound(copy: tuple[Any, Function], x: torch.Tensor, y: torch.Tensor) -> tuple[Launch, Any]:
    """The launch, and the same without Triton."""
    jit, function = copy
    launch = Launch.of(jit, function, -(-x.shape[0] // 16), {"M": x.shape[0], "N": x.shape[1]}, DEFAULT_TARGET, follows=False)
    it = launch({"x_ptr": x, "y_ptr": y, "alpha": 2.0})
    straight = launch.direct(it, SLOTS, (x, y))
    assert straight is not None
    text = CodeBuilder("again(stream, values)")
    text.add(straight.call(text, "stream", [f"values[{i}]" for i in range(3)]))
    return launch, text.function()


def both(gpu: FakeGpu, pair: tuple[Launch, Any], x: torch.Tensor, y: torch.Tensor) -> list[Launched]:
    launch, again = pair
    expected = gpu.during(lambda: launch({"x_ptr": x, "y_ptr": y, "alpha": 2.0}))
    found = gpu.during(lambda: again(gpu.stream, [x.data_ptr(), y.data_ptr(), 2.0]))
    assert found == expected and len(found[0].parameters[0]) == 128
    return found


def test_descriptors_are_tritons(gpu: FakeGpu, copy: tuple[Any, Function]) -> None:
    x, y = half(48, 64), half(48, 64)
    pair = bound(copy, x, y)
    (found,) = both(gpu, pair, x, y)
    assert struct.unpack("Q", found.parameters[0][:8])[0] == x.data_ptr()
    (other,) = both(gpu, pair, half(48, 64), y)
    assert other.parameters[0] != found.parameters[0] and other.parameters[5] == found.parameters[5]


def test_descriptors_are_made_once(gpu: FakeGpu, copy: tuple[Any, Function]) -> None:
    x, y = half(48, 64), half(48, 64)
    _, again = bound(copy, x, y)
    values = [x.data_ptr(), y.data_ptr(), 2.0]
    again(7, values)
    before = gpu.descriptors
    for _ in range(5):
        again(7, values)
    assert gpu.descriptors == before
    buffers = [half(48, 64) for _ in range(direct._REMEMBERED + 1)]
    for t in [*buffers, x]:
        again(7, [t.data_ptr(), y.data_ptr(), 2.0])
    assert gpu.descriptors == before + len(buffers) + 1, "no more are kept than so many"


def test_an_address_that_comes_back_is_described_by_its_own_shape(gpu: FakeGpu, copy: tuple[Any, Function]) -> None:
    held, y = half(64 * 128), half(32, 64)
    tall, wide, transposed = held[: 32 * 64].view(32, 64), held[: 64 * 64].view(32, 128)[:, :64], held[: 64 * 64].view(64, 64)
    pairs = [bound(copy, t, y) for t in (tall, wide, transposed)]
    for _ in range(2):
        found = [both(gpu, pair, t, y)[0].parameters[0] for pair, t in zip(pairs, (tall, wide, transposed), strict=True)]
        assert len(set(found)) == 3


def test_the_transpose_is_described_where_that_has_contiguous_rows(gpu: FakeGpu, copy: tuple[Any, Function]) -> None:
    jit, function = copy
    x = half(64, 48)
    launch = Launch.of(jit, function, 3, {"M": 48, "N": 64}, DEFAULT_TARGET, follows=False)
    plain = gpu.during(lambda: launch({"x_ptr": x, "y_ptr": x, "alpha": 2.0}))
    assert len(plain) == 1
    for t in (x, x.T):
        both(gpu, bound(copy, t, t), t, t)


def test_descriptors_that_cannot_be_made_are_left_to_triton(copy: tuple[Any, Function], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    x = half(48, 64)
    launch, _ = bound(copy, x, x)
    it = launch({"x_ptr": x, "y_ptr": x, "alpha": 2.0})
    make = driver.make_tensordesc_arg
    monkeypatch.setattr(driver, "make_tensordesc_arg", functools.wraps(make)(lambda *given: [*make(*given), 0]))
    assert launch.direct(it, SLOTS, (x, x)) is None
    monkeypatch.delattr(driver, "make_tensordesc_arg")
    assert launch.direct(it, SLOTS, (x, x)) is None
