"""Launches straight to the driver, without Triton's launcher."""

from __future__ import annotations

import functools
import struct
import subprocess
import sys
import types
from typing import Any

import cases
import pytest
import torch
from fake_gpu import FakeGpu, Launched
from golden import Golden
from threads import in_threads
from warmed import LIBRARY, MARKS, TINY, M, N, Watch, as_triton_does, compiled, direct_calls, forget, half, launched, operands, shifted

from epigen.codegen.spec import KernelConfig
from epigen.runtime import launch, loader, native, vendor
from epigen.runtime.kernel import Kernel

pytestmark = MARKS


def addresses(launches: list[Launched]) -> set[int]:
    return {struct.unpack("Q", p)[0] for x in launches for p in x.parameters if len(p) == 8}


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
def test_straight_to_the_driver(gpu: FakeGpu, through_triton: Watch, monkeypatch: pytest.MonkeyPatch, text: str, config: KernelConfig) -> None:
    monkeypatch.setattr(vendor, "product", lambda _a, _b, _precision: torch.zeros(M, N))
    kernel, (a, b) = compiled(text, config), operands()
    found = kernel(a, b)
    outs = found if isinstance(found, tuple) else (found,)
    expected = as_triton_does(gpu, compiled(text, config), a, b, out=outs)
    kernel(a, b, out=outs)
    before = through_triton.count
    launches = launched(gpu, kernel, a, b, out=outs)
    assert through_triton.count == before
    assert [(x.kernel, x.grid, x.block, x.shared, x.ahead) for x in launches] == [(x.kernel, x.grid, x.block, x.shared, x.ahead) for x in expected]
    assert {t.data_ptr() for t in (*((a, b) if config != LIBRARY else ()), *outs)} <= addresses(launches)


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


def test_straight_from_a_thread_that_cuda_has_not_served(gpu: FakeGpu, through_triton: Watch) -> None:
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    before, count = gpu.library.fake_launches(), through_triton.count
    assert not in_threads(1, lambda _: kernel(a, b))
    assert gpu.library.fake_launches() == before + 1 and through_triton.count == count


def test_straight_launches_that_fail_say_why(gpu: FakeGpu, golden: Golden) -> None:
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    gpu.library.fake_refuse(700)
    try:
        with golden.raises(RuntimeError):
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
def test_straight_launches_are_made_of_what_is_known(monkeypatch: pytest.MonkeyPatch, change: str, value: Any) -> None:
    kernel, (a, b) = compiled("relu(mm)"), operands()
    kernel(a, b)
    assert kernel._last is not None
    prepared, it = kernel._last, kernel._last.compiled[0]

    def straight(metadata: dict[str, Any], signature: dict[str, str]) -> Any:
        monkeypatch.setattr(it, "metadata", types.SimpleNamespace(**metadata))
        monkeypatch.setattr(it.src, "signature", signature)
        return prepared.launches[0].direct(it, prepared.slots(()), (a, b))

    metadata, signature = it.metadata._asdict(), it.src.signature
    assert straight(metadata, signature) == prepared.launchers[0]
    if change == "signature":
        assert straight(metadata, signature | value if len(value) > 1 else value) is None
    else:
        assert straight(metadata | {change: value}, signature) is None
    for name in ("shared", "num_warps", "num_ctas", "launch_cooperative_grid"):
        assert straight({key: held for key, held in metadata.items() if key != name}, signature) is None


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
    assert len(launched(gpu, kernel, a, b)) == 1 and through_triton.count == before + 2 and not direct_calls(kernel)
    assert straight_step(kernel, a, b) is None


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
        assert not kernel._last.launchers and not direct_calls(kernel)
        before = through_triton.count
        assert len(gpu.during(lambda: kernel(a, b))) == 1 and through_triton.count == before + 1


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
    assert launched(gpu, kernel, a, b, out=out) == as_triton_does(gpu, oracle, a, b, out=out) and not direct_calls(kernel)
    kernel(a[:16], b)
    assert tried == ["epigen_native"]


def test_straight_or_not_without_the_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    assert native._module.__wrapped__() is not None
    monkeypatch.setattr(native, "_driver", functools.partial(load, "libcuda.so.1"))
    assert native._module.__wrapped__() is None and native._sizes(1, 3) == []
