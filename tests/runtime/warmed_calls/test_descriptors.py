"""Tensors that TMA addresses: described as Triton describes them, which does it once."""

from __future__ import annotations

import functools
import struct
import types
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, Launched
from warmed import MARKS, half

from epigen.codegen.functions import Argument, Function
from epigen.codegen.render import Rendered
from epigen.codegen.spec import digest
from epigen.gpus import DEFAULT_TARGET
from epigen.runtime import direct, native
from epigen.runtime.launch import Launch, in_one_step
from epigen.runtime.loader import Loader

pytestmark = MARKS


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
    return launch, in_one_step([straight], (), len(SLOTS), None)


def both(gpu: FakeGpu, pair: tuple[Launch, Any], x: torch.Tensor, y: torch.Tensor) -> list[Launched]:
    launch, again = pair
    expected = gpu.during(lambda: launch({"x_ptr": x, "y_ptr": y, "alpha": 2.0}))
    found = gpu.during(lambda: again(gpu.stream, False, x, y, 2.0))
    assert found == expected and len(found[0].parameters[0]) == 128
    return found


def test_descriptors_are_tritons(gpu: FakeGpu, copy: tuple[Any, Function]) -> None:
    x, y = half(48, 64), half(48, 64)
    pair = bound(copy, x, y)
    (found,) = both(gpu, pair, x, y)
    assert struct.unpack("Q", found.parameters[0][:8])[0] == x.data_ptr()
    (other,) = both(gpu, pair, half(48, 64), y)
    assert other.parameters[0] != found.parameters[0] and other.parameters[5] == found.parameters[5]


def test_descriptors_are_made_before_the_calls(gpu: FakeGpu, copy: tuple[Any, Function]) -> None:
    x, y = half(48, 64), half(48, 64)
    pair = bound(copy, x, y)
    before = gpu.descriptors
    for t in (x, *(half(48, 64) for _ in range(5)), x):
        assert gpu.during(lambda t=t: pair[1](7, False, t, y, 2.0))
    assert gpu.descriptors == before


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


@pytest.mark.parametrize("otherwise", ["more arguments", "no such function", "another address", "another map", "an error"])
def test_descriptors_that_cannot_be_made_are_left_to_triton(copy: tuple[Any, Function], monkeypatch: pytest.MonkeyPatch, otherwise: str) -> None:
    from triton.backends.nvidia import driver

    x = half(48, 64)
    launch, _ = bound(copy, x, x)
    it = launch({"x_ptr": x, "y_ptr": x, "alpha": 2.0})
    make, library = driver.make_tensordesc_arg, native._driver()
    changed = {
        "more arguments": lambda *given: [*make(*given), 0],
        "another address": lambda one, *given: make(direct._Described(direct._Place(x.data_ptr()), one.shape, one.strides), *given),
        "another map": lambda *given: [(it, *make(*given))[0], *make(*given)[1:]],
    }
    if otherwise == "no such function":
        monkeypatch.delattr(driver, "make_tensordesc_arg")
    elif otherwise == "an error":
        entries = types.SimpleNamespace(cuTensorMapReplaceAddress=lambda _map, _address: 1, cuFuncGetParamInfo=library.cuFuncGetParamInfo)
        monkeypatch.setattr(native, "_driver", lambda: entries)
    else:
        monkeypatch.setattr(driver, "make_tensordesc_arg", functools.wraps(make)(changed[otherwise]))
    assert launch.direct(it, SLOTS, (x, x)) is None
