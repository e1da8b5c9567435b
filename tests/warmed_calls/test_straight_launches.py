"""Launches straight to the driver, without Triton's launcher."""

from __future__ import annotations

import functools
import struct
import subprocess
import sys
import types
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from fake_gpu import FakeGpu, Launched
from warmed import LIBRARY, MARKS, TINY, M, N, Watch, as_triton_does, compiled, direct_calls, forget, half, in_threads, launched, operands, shifted

from epigen.codegen.spec import KernelConfig
from epigen.runtime import direct, launch, loader, native, vendor
from epigen.runtime.kernel import Kernel

pytestmark = MARKS


@pytest.fixture(autouse=True)
def launcher() -> None:
    """The driver alone."""


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
