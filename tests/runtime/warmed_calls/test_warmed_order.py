"""Whatever comes in whatever order, a warmed call runs its own kernel on its own tensors, and what is wrong is refused however warm it is."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from counting import calls
from fake_gpu import FakeGpu
from warmed import MARKS, K, M, N, Watch, as_triton_does, compiled, direct_calls, forget, half, launched, operands, shifted

from epigen.errors import CallError
from epigen.runtime import calls as memory
from epigen.runtime import fast_call

pytestmark = MARKS


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
    assert held is not None and len(kernel._calls) >= len(makers) - 3


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
    assert max(calls(lambda: kernel(held[:m], b, bias=bias)) for m in range(2050, 3000, 7)) < 1050  # noqa: B023  # called at once


def test_prepared_calls_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_KEPT", 4)
    kernel, b = compiled("relu(mm)"), half(K, N)
    for m in [*range(1, 24), *range(1, 24), 23]:
        kernel(half(m, K), b)
    assert len(kernel._calls) == 4 and sum(map(len, kernel._calls.newest.values())) == memory._NEWEST


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
    assert through_triton.count < 6 and len(kernel._calls) == 1


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
