"""Who else takes part in a launch is asked however warm the call is: hooks, knobs, launchers of another make, other devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from warmed import MARKS, M, N, Watch, compiled, direct_calls, forget, half, operands

from epigen.runtime import direct, fast_call
from epigen.runtime.kernel import Kernel
from epigen.runtime.prepared import Prepared

pytestmark = MARKS


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
    kernel, (a, b) = compiled("relu(mm)"), operands()
    assert straight(kernel, a, b) is not None
    monkeypatch.setattr(CudaLauncher, "__call__", lambda self, *given: original(self, *given))
    assert straight(kernel, a, b) is None
    for _ in range(3):
        kernel(a, b)
    assert not direct_calls(kernel), "what stands around it sees every launch"


def straight(kernel: Kernel, a: torch.Tensor, b: torch.Tensor) -> direct.Loaded | None:
    """After a first call: what is known of its kernel's launches."""
    forget(kernel)
    kernel(a, b)
    assert kernel._last is not None
    return direct.loaded(kernel._last.launches[0].jit, kernel._last.compiled[0], _names(kernel))


def _names(kernel: Kernel) -> list[str]:
    assert kernel._last is not None
    return kernel._last.launches[0].function.names


def test_parameters_in_another_order_are_left_to_triton() -> None:
    kernel = compiled("relu(mm)")
    kernel(*operands())
    assert kernel._last is not None
    launch, it, names = kernel._last.launches[0], kernel._last.compiled[0], _names(kernel)
    assert direct.loaded(launch.jit, it, names) is not None
    assert direct.loaded(launch.jit, it, [*names[1:], names[0]]) is None
    assert direct.loaded(launch.jit, None, names) is None


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
