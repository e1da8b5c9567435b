"""Layers that train, among what torch itself does with models. Run by tests/training/test_processes.py in a process of its own, on the GPU where there is one.

torch's compiler imports Triton, which other tests want in another of its modes.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.multiprocessing
import training_process
from golden import Golden
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from under_torch import APART

import epigen
from epigen.errors import CallError
from epigen.training import library
from epigen.training.linear import linear

# torch's own, of what its compiler does with any autograd function (2.13)
pytestmark = [
    APART,
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning",
        "ignore::DeprecationWarning:torch",
        "ignore::FutureWarning:torch",
        "ignore:TensorFloat32 tensor cores:UserWarning",
    ),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDUCTOR = DEVICE == "cuda" or shutil.which("g++") is not None
WIDTHS = (24, 40, 33, 7)


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    torch._dynamo.reset()


def drawn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_(grad)


def mlp(activation: str = "relu", dtype: torch.dtype = torch.float32, **options: Any) -> epigen.nn.MLP:
    torch.manual_seed(0)
    return epigen.nn.MLP(WIDTHS, activation, device=DEVICE, dtype=dtype, **options)


def plain(model: nn.Sequential, act: Callable[[Tensor], Tensor] = torch.relu) -> Callable[[Tensor], Tensor]:
    """The same by torch's own operations, with the same parameters."""
    layers = [m for m in model if isinstance(m, nn.Linear | epigen.nn.Linear)]

    def run(x: Tensor) -> Tensor:
        for layer in layers[:-1]:
            x = act(nn.functional.linear(x, layer.weight, layer.bias))
        return nn.functional.linear(x, layers[-1].weight, layers[-1].bias)

    return run


def step(run: Callable[[Tensor], Tensor], x: Tensor, model: nn.Module) -> list[Tensor]:
    """A result, and the gradients of its squares' sum."""
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [*([x] if x.requires_grad else []), *model.parameters()])]


def close(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-4) -> None:
    for t, e in zip(found, expected, strict=True):
        assert t.dtype == e.dtype and t.shape == e.shape
        torch.testing.assert_close(t, e, rtol=rtol, atol=rtol * max(float(e.abs().max()), 1e-3) if e.numel() else 0)


# -- the operations


@pytest.mark.parametrize(
    ("text", "inputs", "numbers"),
    [
        ("z = mm + bias; relu(z), bitmask(z > 0)", [drawn(33)], []),
        ("y = gelu(mm * s + t) * gate[m,n]; y, sum(y, n), sum(y, m), amax(y), cast(y, bf16)", [None, drawn(), drawn(5, 33)], [0.5]),
        ("mm, mm", [], []),
        ("residual, mm", [drawn(5, 33)], []),
    ],
)
@pytest.mark.parametrize("m", [5, 0])
def test_operations_are_what_they_say(text: str, inputs: list[Tensor | None], numbers: list[float], m: int) -> None:
    given = [t[:m] if t is not None and t.dim() == 2 else t for t in inputs]
    torch.library.opcheck(library.program, (text, None, drawn(m, 12), drawn(33, 12).t(), given, numbers))
    torch.library.opcheck(library.over, (text, drawn(m, 33), given, numbers))
    for t in library.program(text, None, drawn(m, 12), drawn(33, 12).t(), given, numbers):
        assert not t.requires_grad


def test_accumulation_says_what_it_writes() -> None:
    torch.library.opcheck(library.accumulate, (torch.ones(6, 8, device=DEVICE), drawn(6, 5, dtype=torch.float16), drawn(5, 8, dtype=torch.float16)))


# -- torch.compile


@pytest.mark.parametrize(
    ("backend", "act", "save"), [("aot_eager", "relu", None), ("aot_eager", "gelu", "recompute"), *[("inductor", "gelu", None)] * INDUCTOR]
)
def test_a_model_compiles_whole(backend: str, act: str, save: str | None) -> None:
    model, x = mlp(act, save=save), drawn(9, 24, grad=True)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    close(step(compiled, x, model), step(plain(model, getattr(nn.functional, act)), x, model))
    with torch.no_grad():
        close([compiled(x)], [model(x)])


@pytest.mark.parametrize(
    "text",
    ["relu(mm + bias) + residual", "y = s * silu(mm + bias) * residual + t * gate[m,n]; y, rows = sum(y, n), bitmask(y > 0)".replace("rows = ", "")],
)
def test_inputs_of_every_kind_compile(text: str) -> None:
    x, w, b, s = drawn(2, 5, 8, grad=True), drawn(8, 8, seed=1, grad=True), drawn(8, seed=2, grad=True), drawn(1, seed=3, grad=True)

    def run(x: Tensor) -> Any:
        more = {"gate": x, "s": s, "t": 0.5} if "gate" in text else {}
        return linear(x, w, b, text, residual=x, **more)

    found, expected = torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x)
    assert type(found).__name__ == type(expected).__name__ and getattr(found, "_fields", None) == getattr(expected, "_fields", None)
    of = [y if isinstance(y, Tensor) else y.y.exp() + y.out1[..., None] for y in (found, expected)]
    leaves = (x, w, b, *[s] * ("gate" in text))
    close(*(list(torch.autograd.grad(y.sum(), leaves)) for y in of))


def test_batches_of_any_size_share_a_graph() -> None:
    model = mlp()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counted, dynamic=True)
    for m in (5, 9, 64, 1000):
        x = drawn(m, 24, seed=m)
        close(step(compiled, x, model), step(plain(model), x, model))
    assert counted.frame_count == 1
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counted)
    for m in (5, 9, 64, 1000):
        compiled(drawn(m, 24, seed=m))
    assert counted.frame_count == 2, "static at first, dynamic from the second size on"


def test_a_number_that_changes_needs_no_graph_of_its_own() -> None:
    """Beyond the first, of which torch.compile cannot know that it will change."""
    w = drawn(9, 8, grad=True)

    def run(x: Tensor, s: float) -> Tensor:
        found: Tensor = linear(x, w, epilogue="silu(mm * s) * s", s=s)
        return found

    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counted)
    for i in range(5):
        x = drawn(2, 3, 8, seed=i)
        close(*(list(torch.autograd.grad(f(x, 0.5 + i).sum(), w)) for f in (compiled, run)))
    assert counted.frame_count == 2


def test_results_may_change_in_place_in_a_graph() -> None:
    w = drawn(8, 8, grad=True)

    def run(x: Tensor) -> Tensor:
        y: Tensor = linear(x, w, epilogue="gelu(mm)")
        y += x
        return y.mul_(2)

    for x in (drawn(5, 8), drawn(2, 3, 8)):
        close(*(list(torch.autograd.grad(f(x).sum(), w)) for f in (torch.compile(run, fullgraph=True, backend="aot_eager"), run)))


def test_a_fused_model_compiles() -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Dropout(0.0), nn.Linear(40, 33), nn.SiLU(), nn.Linear(33, 7)).to(DEVICE)
    x, before = drawn(9, 24), copy.deepcopy(model)
    epigen.fuse(model)
    close(step(torch.compile(model, fullgraph=True, backend="aot_eager"), x, model), step(before, x, before))


def test_a_compiled_step_adds_to_a_buffer() -> None:
    model, x = mlp(), drawn(9, 24)
    expected = step(plain(model), x, model)[1::2]
    for layer in model:
        layer.weight.main_grad = torch.ones_like(layer.weight)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    close([layer.weight.main_grad - 1 for layer in model], expected)
    assert all(layer.weight.grad is None for layer in model)


def test_mistakes_are_told_while_compiling(golden: Golden) -> None:
    x, w, b = drawn(5, 8), drawn(9, 8), drawn(8)
    compiled = torch.compile(lambda x: linear(x, w, b), backend="aot_eager")
    with golden.raises(Exception):
        compiled(x)


# -- torch.export


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11's own
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_is_exported_and_comes_back(strict: bool, tmp_path: Path) -> None:
    """For inference: the operations have no derivative of their own."""
    model = mlp("gelu")
    written = torch.export.export(model, (drawn(9, 24),), dynamic_shapes=[{0: torch.export.Dim("M", min=2)}], strict=strict)
    torch.export.save(written, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for m in (9, 200):
        close([loaded(drawn(m, 24))], [model(drawn(m, 24)).detach()])


# -- mixed precision


@pytest.mark.parametrize(("dtype", "compiled"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)], ids=str)
def test_autocast_is_as_for_torchs_linear(dtype: torch.dtype, compiled: bool) -> None:
    model, x = mlp("gelu"), drawn(3, 9, 24, grad=True)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with torch.autocast(DEVICE, dtype):
        found, expected = run(x), plain(model, nn.functional.gelu)(x)
    assert found.dtype == expected.dtype == dtype
    grads = [torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]) for y in (found, expected)]
    close([found.detach(), *grads[0]], [expected.detach(), *grads[1]], rtol=0.05 if dtype == torch.bfloat16 else 0.01)
    assert all(g.dtype == torch.float32 for g in grads[0])
    with torch.autocast(DEVICE, dtype), torch.autocast(DEVICE, enabled=False):
        assert model(x).dtype == torch.float32


def test_a_scaler_skips_a_step_that_overflows() -> None:
    model, x = mlp(), drawn(9, 24)
    scaler, optimizer = torch.amp.GradScaler(DEVICE, init_scale=2.0**60), torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    for turn in range(2):
        with torch.autocast(DEVICE, torch.float16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(1024.0)
        same = [torch.equal(t, before[name]) for name, t in model.state_dict().items()]
        assert all(same) if turn == 0 else not any(same)


# -- checkpoints, several processes, optimizers


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("save", [None, "recompute"])
def test_activation_checkpointing(reentrant: bool, save: str | None) -> None:
    model, x = mlp("gelu", save=save), drawn(9, 24, grad=True)
    found = step(lambda x: checkpoint(model, x, use_reentrant=reentrant), x, model) if not reentrant else None
    if found is None:  # that way torch.autograd.grad is not supported
        y = checkpoint(model, x, use_reentrant=True)
        y.square().sum().backward()
        found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    close(found, step(plain(model, nn.functional.gelu), x, model))


def test_training_follows_torchs_own_step_for_step() -> None:
    torch.manual_seed(0)
    ours = mlp("relu")
    theirs = copy.deepcopy(ours)
    reference = plain(theirs)
    data, target = drawn(64, 24), torch.randint(0, 7, (64,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (ours, theirs)]
    losses = []
    for _ in range(30):
        pair = [nn.functional.cross_entropy(run(data), target) for run in (ours, reference)]
        for loss, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append([loss.item() for loss in pair])
    assert losses[-1][0] < 0.5 * losses[0][0]
    for a, b in losses:
        assert abs(a - b) < 1e-3 * b + 1e-4


def test_processes_share_their_gradients(tmp_path: Path) -> None:
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two processes on GPUs need two GPUs")
    torch.multiprocessing.spawn(training_process.run, (2, DEVICE, str(tmp_path / "meet")), nprocs=2, daemon=True)


# -- a GPU's own


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("act", "save"), [("relu", None), ("relu", "output"), ("gelu", None), ("silu", "recompute")])
@pytest.mark.parametrize("shape", [(1, 24), (9, 24), (3, 127, 24)], ids=str)
def test_odd_shapes(dtype: torch.dtype, act: str, save: str | None, shape: tuple[int, ...]) -> None:
    """Twice, as the second call goes another way; backward runs on autograd's own thread."""
    model = mlp(act, dtype, save=save)
    exact = copy.deepcopy(model).double()
    # where a relu's argument is about 0, both sides of it are right: one such element is 2 % of these gradients
    tolerance = {torch.float16: 0.04, torch.bfloat16: 0.05, torch.float32: 0.003}[dtype]
    function = getattr(nn.functional, act)
    for seed in range(2):
        x = drawn(*shape, seed=seed, dtype=dtype, grad=True)
        expected = step(plain(exact, function), x.detach().double().requires_grad_(), exact)
        for found, rounded, exactly in zip(step(model, x, model), step(plain(model, function), x, model), expected, strict=True):
            allowed = max(tolerance * exactly.norm(), 2 * (rounded.double() - exactly).norm())
            assert (found.double() - exactly).norm() <= allowed


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # the parameters were made on the stream outside, as always
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_step_in_a_cuda_graph(dtype: torch.dtype) -> None:
    model, x = mlp("gelu", dtype), drawn(96, 24, dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            model(x).float().square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        y = model(x)
        y.float().square().sum().backward()
    for seed in (1, 2):
        x.copy_(drawn(96, 24, seed=seed, dtype=dtype))
        for p in model.parameters():
            p.grad.zero_()  # type: ignore[union-attr]
        graph.replay()
        found = [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
        close(found, step(model, x, model), rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_makes_cuda_graphs_of_a_step() -> None:
    model = mlp("gelu", torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed, m in itertools.product(range(4), (64, 96)):
        torch.compiler.cudagraph_mark_step_begin()
        x = drawn(m, 24, seed=seed, dtype=torch.bfloat16)
        found = [t.clone() for t in step(compiled, x, model)]
        close(found, step(model, x, model), rtol=0.03)


@pytest.mark.gpu
def test_new_batch_sizes_build_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a bucket of M, forward and backward."""
    from epigen.codegen.render import Renderer

    model = mlp("gelu", torch.float16)
    step(model, drawn(160, 24, dtype=torch.float16, grad=True), model)
    step(model, drawn(256, 24, dtype=torch.float16, grad=True), model)
    monkeypatch.setattr(Renderer, "render", lambda *_: pytest.fail("a kernel is built anew"))
    for m in range(136, 256, 8):
        step(model, drawn(m, 24, dtype=torch.float16, grad=True), model)


@pytest.mark.gpu
def test_a_step_waits_for_nothing() -> None:
    model, x = mlp("relu", torch.float16), drawn(96, 24, dtype=torch.float16, grad=True)
    step(model, x, model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode announces itself as a prototype
            torch.cuda.set_sync_debug_mode("error")
        step(model, x, model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_double_backward_is_refused(golden: Golden) -> None:
    model, x = mlp("gelu"), drawn(5, 24, grad=True)
    with golden.raises(CallError):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
