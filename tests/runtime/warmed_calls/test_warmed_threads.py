"""Warmed calls in several threads."""

from __future__ import annotations

from fake_gpu import FakeGpu
from threads import in_threads
from warmed import MARKS, K, N, as_triton_does, compiled, half, launched, operands

pytestmark = MARKS


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
