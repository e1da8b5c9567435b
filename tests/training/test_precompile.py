"""What compiles kernels before their first calls: epigen.training.precompile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import precompiled
import pytest
import torch
from machines import Everywhere
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from under_torch import APART

import epigen
from epigen.gpus import TARGETS
from epigen.training import backend, expected, library, precompile
from epigen.training.expected import ProgramCall

pytestmark = [APART, pytest.mark.triton, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own compiler

HOPPER = expected.Terms(machine=Everywhere({0: TARGETS["sm_90"]}))


@pytest.fixture(autouse=True)
def nothing_is_left_to_compile() -> Iterator[None]:
    yield
    precompiled.end()


def test_the_kernels_of_a_graph_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and while the graph goes on; what may have more values than registers is waited for, and judged."""
    precompile._compiled.cache_clear()
    started, going_on, alone = threading.Barrier(2, timeout=60), threading.Event(), threading.get_ident()
    asked: list[str] = []

    def spilled(call: ProgramCall, _target: Any) -> str:
        assert threading.get_ident() != alone
        asked.append(call.text)
        if call.text in ("cos(mm)", "sin(mm)"):
            started.wait()  # of one after another the first would wait for ever
        if call.text == "sin(mm)" and not going_on.wait(60):
            return "the graph waits for a kernel that is not to be doubted"
        return "it spills" if "erf" in call.text else ""

    monkeypatch.setattr(precompile, "_spilled", spilled)

    def several(x: Any, u: Any, v: Any, w: Any, y: Any) -> Any:
        return torch.cos(x @ u), torch.sin(x @ v), torch.cos(x @ w), torch.erf(x @ w) * torch.tanh(y[0]) * torch.sigmoid(y[1])

    graph = make_fx(several, tracing_mode="fake")(*(torch.empty(s, dtype=torch.bfloat16) for s in ((8192, 2048), *[(2048, 4096)] * 3, (2, 8192, 4096)))).graph
    assert [s.program or s.why for s in backend.fuse(graph, HOPPER)] == ["cos(mm)", "sin(mm)", "cos(mm)", "it spills"]
    kernels = [library.kernel(text, None)._compiling[1] for text in ("cos(mm)", "sin(mm)")]  # of programs that no other test here has compiled
    going_on.set()
    assert [f.result(60) for (f,) in kernels] == ["", ""] and len(asked) == len(set(asked)) == 3
    precompile._compiled.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_compiling_for_the_gpu_at_hand_leaves_its_driver() -> None:
    """What only asks for resources would otherwise put a stand-in where the launches of all threads look."""
    from epigen.runtime.device import THIS_MACHINE

    kernel, target = epigen.compile("relu(mm + bias)"), THIS_MACHINE.at_hand()
    assert target is not None
    a, b, bias = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((64, 128), (128, 256), (256,)))
    (needs, *_) = kernel.warm(*(t.to("meta") for t in (a, b)), target, bias=bias.to("meta"))
    assert needs.registers > 0
    torch.testing.assert_close(kernel(a, b, bias=bias), torch.relu(a.float() @ b.float() + bias).bfloat16(), rtol=1e-2, atol=1e-2)


class Block(torch.nn.Module):
    """An MLP with its residual, as transformers have it."""

    def __init__(self, activation: Any):
        super().__init__()
        self.up, self.activation, self.down = torch.nn.Linear(1024, 4096), activation, torch.nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(x)))


@pytest.mark.parametrize("tune", [None, "missing"])
def test_the_backwards_kernels_are_compiled_while_the_forward_is(tune: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its own graph asks for later, which comes with the first backward alone. What is tuned has to be measured first."""
    asked: list[str] = []
    monkeypatch.setattr(precompile, "compile_ahead", lambda kernels: asked.extend(call.text for call, _ in kernels))
    monkeypatch.setattr(precompile, "spilled", lambda *_: "")
    monkeypatch.setattr(expected, "kernels_us", lambda *_: (100.0, 110.0))
    monkeypatch.setattr(backend, "Terms", lambda tune=None: expected.Terms(tune, HOPPER.machine))
    with FakeTensorMode(), torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        for activation, derivative in ((torch.nn.GELU(), "dgelu"), (torch.nn.SiLU(), "dsilu"), (torch.nn.ReLU(), "drelu")):
            torch._dynamo.reset()
            asked.clear()
            x = torch.empty(8192, 1024, requires_grad=True)
            result = torch.compile(Block(activation), backend=backend.backend, options={"rest": "eager", "tune": tune})(x)
            before, forward = asked[:-2], asked[-2:]
            result.backward(torch.empty_like(result))
            backwards = asked[len(before) + 2 :]
            assert any(derivative in text for text in backwards) and not any(derivative in text for text in forward)
            assert before == ([] if tune else backwards)
