"""Warmed calls on a GPU: the right kernel and the right memory whatever changes between two calls. tests/runtime/warmed_calls has the same without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from threads import in_threads

import epigen
from epigen.codegen import schedules
from epigen.codegen.functions import Function
from epigen.codegen.render import Rendered
from epigen.codegen.spec import KernelConfig, digest
from epigen.runtime.kernel import Kernel
from epigen.runtime.launch import Launch
from epigen.runtime.loader import Loader

pytestmark = pytest.mark.gpu

LIBRARY = schedules.config("library", block_m=16, block_n=64, num_warps=4)


def whole(*size: int, dtype: torch.dtype = torch.float16, device: str = "cuda") -> torch.Tensor:
    """Small integers, whose products' sums are exact."""
    return torch.randint(-3, 4, size, device=device).to(dtype)


def expected(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.double() @ w.double() + bias.double()).to(x.dtype)


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that go through Triton's own Python."""
    seen: list[Launch] = []
    call = Launch.__call__

    def counted(launch: Launch, values: Any) -> Any:
        seen.append(launch)
        return call(launch, values)

    monkeypatch.setattr(Launch, "__call__", counted)
    return seen


@pytest.fixture(params=[None, LIBRARY, cases.persistent(), cases.warp_specialized()], ids=["chosen", "library", "persistent", "warp_specialized"])
def fused(request: pytest.FixtureRequest) -> Kernel:
    """The last two address their tensors by TMA."""
    major, minor = torch.cuda.get_device_capability()
    if request.param is not None and not schedules.SCHEDULES[request.param.schedule].runs_on("cuda", 10 * major + minor):
        pytest.skip(f"the schedule {request.param.schedule} does not run on this GPU")
    return epigen.compile("relu(mm + bias)", config=request.param)


def test_a_second_call_needs_no_triton(fused: Kernel, through_triton: list[Launch]) -> None:
    """Else every other test here is of the slow way."""
    x, w, bias = whole(64, 128), whole(128, 256), whole(256)
    fused(x, w, bias=bias)
    fused(x, w, bias=bias, out=torch.empty(64, 256, device="cuda", dtype=torch.float16))
    first = len(through_triton)
    for _ in range(3):
        out = torch.empty(64, 256, device="cuda", dtype=torch.float16)
        assert fused(x, w, bias=bias, out=out) is out
        assert torch.equal(out, expected(x, w, bias)) and torch.equal(fused(x, w, bias=bias), out)
    assert first == 2 and len(through_triton) == first


@pytest.mark.parametrize(
    "text", ["z = mm + bias; relu(z), bitmask(z > 0)", "z = mm + bias; z, bgrad(z), sum(z, n), amax(z)", "mm + bias, sum(a, k), sum(b, k)"]
)
def test_several_kernels_and_what_lies_between_them(text: str, through_triton: list[Launch]) -> None:
    kernel = epigen.compile(text)
    x, w, bias = whole(200, 128), whole(128, 328), whole(328)
    first = kernel(x, w, bias=bias)
    before = len(through_triton)
    for _ in range(3):
        for found, wanted in zip(kernel(x, w, bias=bias), first, strict=True):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    assert len(through_triton) == before


def variations() -> list[Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Calls that differ from the first in one thing that a kernel is specialised on."""

    def shifted(t: torch.Tensor) -> torch.Tensor:
        held = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
        return held[1:].view(t.shape).copy_(t)

    m, n, k = 96, 160, 128
    return [
        lambda: (whole(m, k), whole(k, n), whole(n)),
        lambda: (shifted(whole(m, k)), whole(k, n), whole(n)),
        lambda: (whole(m, k), shifted(whole(k, n)), whole(n)),
        lambda: (whole(m, k), whole(k, n), shifted(whole(n))),
        lambda: (whole(k, m).T, whole(k, n), whole(n)),
        lambda: (whole(m, k), whole(n, k).T, whole(n)),
        lambda: (whole(m, k + 1)[:, :-1], whole(k, n), whole(n)),
        lambda: (whole(m, k), whole(k, n), whole(2 * n)[::2]),
        lambda: (whole(m, k), whole(k, n), whole(1).expand(n)),
        lambda: (whole(m, k), whole(k, n), torch._neg_view(whole(n))),
        lambda: (whole(m, k), whole(k, n), whole(n, dtype=torch.float32)),
        lambda: (whole(m, k, dtype=torch.bfloat16), whole(k, n, dtype=torch.bfloat16), whole(n, dtype=torch.bfloat16)),
        lambda: (whole(1, k), whole(k, n), whole(n)),
        lambda: (whole(m, k), whole(k, 1), whole(1)),
        lambda: (whole(m - 1, k - 1), whole(k - 1, n - 1), whole(n - 1)),
    ]


def test_whatever_changes_between_two_calls(fused: Kernel) -> None:
    makers = variations()
    generator = torch.Generator().manual_seed(0)
    order = [*range(len(makers)), *torch.randint(len(makers), (200,), generator=generator).tolist()]
    for number in order:
        x, w, bias = makers[number]()
        assert torch.equal(fused(x, w, bias=bias), expected(x, w, bias)), number
        out = torch.full((w.shape[1] + 1, x.shape[0]), 7.0, device="cuda", dtype=x.dtype)[1:].T  # strides, and at times the alignment, of its own
        assert torch.equal(fused(x, w, bias=bias, out=out), expected(x, w, bias)), number


def test_an_address_that_comes_back_with_another_shape(fused: Kernel) -> None:
    """The allocator hands out what was freed last: the same place, another matrix."""
    places: dict[int, set[tuple[int, ...]]] = {}
    w, bias = whole(128, 256), whole(256)
    for turn in range(60):
        m = (64, 128, 32, 256)[turn % 4]
        held = whole(64 * 128 * 4)
        x = held[: m * 128].view(m, 128)
        places.setdefault(x.data_ptr(), set()).add(tuple(x.shape))
        assert torch.equal(fused(x, w, bias=bias), expected(x, w, bias))
        del held, x
    assert any(len(shapes) > 1 for shapes in places.values()), "no address came back, so nothing was shown"


def test_work_is_ordered_on_the_current_stream(fused: Kernel) -> None:
    x, w, bias = whole(512, 512), whole(512, 512), whole(512)
    out = torch.empty(512, 512, device="cuda", dtype=torch.float16)
    for _ in range(2):
        fused(x, w, bias=bias, out=out)
    busy = torch.empty(1 << 28, device="cuda")
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        later = whole(512, 512)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                busy.normal_()  # keeps the stream occupied: on another one the kernel would read x before it is written
            x.copy_(later)
            fused(x, w, bias=bias, out=out)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()
        assert torch.equal(out, expected(later, w, bias))


def to_the_end(count: int, work: Callable[[int], None]) -> None:
    """In threads that begin at one moment, and wait for what they launched."""
    failures = in_threads(count, lambda number: (work(number), torch.cuda.synchronize()))
    if failures:
        raise failures[0]


@pytest.mark.parametrize("same", [True, False], ids=["one shape", "a shape each"])
def test_threads(same: bool) -> None:
    """From the first call on, each on a stream of its own."""
    kernel = epigen.compile("relu(mm + bias)")

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x, w, bias = whole(64 if same else 16 * (number + 1), 128), whole(128, 192), whole(192)
            out = torch.empty(x.shape[0], 192, device="cuda", dtype=torch.float16)
            wanted = expected(x, w, bias)
            for _ in range(50):
                assert torch.equal(kernel(x, w, bias=bias, out=out), wanted) and torch.equal(kernel(x, w, bias=bias), wanted)

    to_the_end(8, work)


class Linear(torch.autograd.Function):
    """Both directions by generated kernels; the backward one runs in a thread of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, forward: Kernel, backward: Kernel) -> torch.Tensor:
        y, mask = forward(x, w, bias=bias)
        ctx.save_for_backward(w, mask)
        ctx.backward_kernel, ctx.thread = backward, threading.get_ident()
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        assert threading.get_ident() != ctx.thread
        w, mask = ctx.saved_tensors
        eye = torch.eye(dy.shape[1], device=dy.device, dtype=dy.dtype)
        dz, db = ctx.backward_kernel(dy, eye, mask=mask)
        return dz @ w.T, None, db.to(dy.dtype), None, None


def test_autograds_own_thread() -> None:
    forward, backward = epigen.compile("z = mm + bias; relu(z), bitmask(z > 0)"), epigen.compile("dz = drelu(mm, mask); dz, bgrad(dz)")
    for _ in range(4):
        x, w, bias = whole(64, 128).requires_grad_(), whole(128, 96), whole(96).requires_grad_()
        dy = whole(64, 96)
        Linear.apply(x, w, bias, forward, backward).backward(dy)
        z = x.detach().double() @ w.double() + bias.detach().double()
        dz = torch.where(z > 0, dy.double(), 0)
        assert x.grad is not None and bias.grad is not None
        assert torch.equal(x.grad, (dz @ w.double().T).half()) and torch.equal(bias.grad, dz.sum(0).half())


@pytest.mark.parametrize("text", ["relu(mm + bias)", "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)"])
@pytest.mark.parametrize("buffers", [True, False], ids=["out", "allocating"])
def test_a_captured_call_is_replayed_on_new_contents(text: str, buffers: bool, through_triton: list[Launch]) -> None:
    kernel = epigen.compile(text)
    x, w, bias = whole(96, 128), whole(128, 160), whole(160)
    first = kernel(x, w, bias=bias)
    outs = [torch.empty_like(t) for t in (first if isinstance(first, tuple) else [first])] if buffers else None
    for _ in range(2):
        kernel(x, w, bias=bias, out=outs)
    before = len(through_triton)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(x, w, bias=bias, out=outs)
    assert len(through_triton) == before
    for _ in range(3):
        x.copy_(whole(96, 128))
        bias.copy_(whole(160))
        graph.replay()
        wanted = kernel(x, w, bias=bias)
        pairs = zip(captured, wanted, strict=True) if isinstance(wanted, tuple) else [(captured, wanted)]
        for found, right in pairs:
            assert torch.equal(found, right)


LATE = """
import triton
import triton.language as tl


@triton.jit
def late(source_ptr, target_ptr, COUNT: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < 200_000:
        pass
    offsets = tl.arange(0, COUNT)
    tl.store(target_ptr + offsets, tl.load(source_ptr + offsets))
"""
"""Lets the kernel after it begin at once, and writes 0.2 ms later."""


@pytest.fixture(scope="module")
def late() -> Any:
    return Loader(interpret=False).load(Rendered(LATE, (Function("late", (), (), 4, 1, None),), digest([LATE]))).late


@pytest.mark.parametrize(
    "config", [None, cases.tiled(), cases.split_k(), cases.persistent(), cases.persistent(subtiles=2), cases.warp_specialized(), cases.warp_specialized(pingpong=1),
               cases.warp_specialized(splits=2)],
    ids=lambda c: str(c) if c is None else "-".join([c.schedule, *(f"{n}{v}" for n, v in c.values if n in ("subtiles", "pingpong", "splits"))]),
)  # fmt: skip
def test_a_captured_call_waits_for_the_kernel_before_it(config: KernelConfig | None, late: Any) -> None:
    """Which lets it begin before it has written any of the operands: an activation, weights, a bias or a residual."""
    kernel = epigen.compile("y = relu(mm + bias + residual); y, bgrad(y)", config=config)
    given = [whole(128, 128), whole(128, 128), whole(128), whole(128, 128)]
    for which in range(4):
        held = [t.clone() for t in given]
        x, w, bias, residual = held
        source = whole(*given[which].shape)
        late[(1,)](source, held[which], COUNT=source.numel(), enable_fp_fusion=True)
        for _ in range(3):
            kernel(x, w, bias=bias, residual=residual)
        graph = torch.cuda.CUDAGraph()
        held[which].zero_()
        with torch.cuda.graph(graph):
            late[(1,)](source, held[which], COUNT=source.numel(), enable_fp_fusion=True)
            y, sums = kernel(x, w, bias=bias, residual=residual)
        for _ in range(3):
            source.copy_(whole(*source.shape))
            graph.replay()
            wanted = torch.relu(x.double() @ w.double() + bias.double() + residual.double())
            assert torch.equal(held[which], source) and torch.equal(y, wanted.half()) and torch.equal(sums.double(), wanted.sum(0))


def test_a_captured_call_follows_what_is_no_kernel() -> None:
    """The graph's first node; a copy; what another stream has done; and calls that follow one another."""
    kernel, side = epigen.compile("relu(mm + bias)"), torch.cuda.Stream()
    x, w, bias, other = whole(64, 64), whole(64, 64).clamp(-1, 1), whole(64), whole(64, 64)
    w *= torch.rand(64, 64, device="cuda") < 0.05
    for _ in range(3):
        kernel(x, w, bias=bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = kernel(x, w, bias=bias)
        copied = torch.empty_like(x)
        copied.copy_(other)
        second = kernel(copied, w, bias=bias)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            apart = kernel(second, w, bias=bias)
        beside = kernel(first, w, bias=bias)
        torch.cuda.current_stream().wait_stream(side)
        joined = kernel(apart, w, bias=bias)
        for _ in range(4):
            joined = kernel(joined, w, bias=bias)
        total = joined + beside
    for _ in range(3):
        x.copy_(whole(64, 64))
        other.copy_(whole(64, 64))
        graph.replay()
        wanted, aside = kernel(other, w, bias=bias), kernel(kernel(x, w, bias=bias), w, bias=bias)
        for _ in range(6):
            wanted = kernel(wanted, w, bias=bias)
        assert torch.equal(total, wanted + aside)


def test_a_gradient_is_refused_however_warm(fused: Kernel) -> None:
    x, w, bias = whole(64, 128), whole(128, 256), torch.nn.Parameter(whole(256))
    for _ in range(2):
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(fused(x, w, bias=bias), expected(x, w, bias.detach()))
        with pytest.raises(epigen.EpigenError, match="requires grad"):
            fused(x, w, bias=bias)


def test_a_hook_sees_every_launch(fused: Kernel) -> None:
    import triton

    x, w, bias = whole(64, 128), whole(128, 256), whole(256)
    fused(x, w, bias=bias)
    seen: list[Any] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        for _ in range(3):
            fused(x, w, bias=bias)
    finally:
        hook.remove(seen.append)
    assert len(seen) == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("text", ["relu(mm + bias)", "z = mm + bias; z, bgrad(z), amax(z)"])
def test_tensors_on_another_device_than_the_current_one(text: str) -> None:
    """Warmed on both in turn, with either current, and in threads that have never used a GPU."""
    kernel = epigen.compile(text)
    given = {d: [t.to(d) for t in (whole(64, 128), whole(128, 192), whole(192))] for d in ("cuda:0", "cuda:1")}
    wanted = {d: expected(x, w, bias) if text.startswith("relu") else None for d, (x, w, bias) in given.items()}

    def check(device: str) -> None:
        x, w, bias = given[device]
        for out in (None, None, "given", "given"):
            first = kernel(x, w, bias=bias)
            buffers = None if out is None else [torch.empty_like(t) for t in (first if isinstance(first, tuple) else [first])]
            found = kernel(x, w, bias=bias, out=buffers)
            for t, right in zip(found if isinstance(found, tuple) else [found], first if isinstance(first, tuple) else [first], strict=True):
                assert t.device == x.device and torch.equal(t, right)
            if wanted[device] is not None:
                assert torch.equal(found, wanted[device])

    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:0", "cuda:1", "cuda:0"):
                check(device)
                assert torch.cuda.current_device() == current
    to_the_end(4, lambda number: check(f"cuda:{number % 2}"))
