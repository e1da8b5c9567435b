"""epigen among what else torch does with a model: writing it down, lowering it, tracing and counting it, mapping it, and splitting it over processes.

Run by tests/training/test_processes.py in a process of its own: all of it imports torch's compiler, which imports Triton.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_process
import pytest
import torch
import torch._dynamo
import torch.multiprocessing
import zoo
from golden import Golden
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.utils.flop_counter import FlopCounterMode
from under_torch import APART

import epigen
from epigen import settings
from epigen.errors import CallError
from epigen.training import composed, library, sharding

pytestmark = [
    APART,
    pytest.mark.filterwarnings(  # torch's own
        "ignore:.*isinstance.treespec, LeafSpec.:FutureWarning",
        "ignore:.*torch.jit.script:DeprecationWarning",
        "ignore:.*should not be instantiated:DeprecationWarning",
    ),
]


def drawn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Gated(nn.Module):
    """Inputs of every kind, a number among them, and results of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(drawn(20, 8)), nn.Parameter(drawn(20, seed=1))

    def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        text = "z = mm + bias; silu(z) * gate[m,n] * t, bitmask(z > 0), sum(z, n), gate[m,n]"
        y, mask, rows, same = epigen.linear(x, self.weight, self.bias, text, gate=gate, t=0.3)
        return y, mask, rows, same


class Masked(nn.Module):
    """What reads a mask that another layer has packed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(drawn(20, 8)), nn.Parameter(drawn(20, 8, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        y, mask = epigen.linear(x, self.first, None, "relu(mm), bitmask(mm > 0)")
        found: Tensor = epigen.linear(x, self.second, None, "where(mask, mm, y[m,n])", mask=mask, y=y)
        return found


def operations(graph: fx.Graph) -> list[str]:
    """The programs that a graph names."""
    return [str(n.args[0]) for n in graph.nodes if n.op == "call_function" and "epigen" in str(n.target)]


# -- torch.export


@pytest.mark.parametrize("order", ["import torch, epigen", "import epigen, torch", "import epigen, torch.export"])
def test_a_process_that_has_imported_epigen_loads_a_program(order: str, tmp_path: Path) -> None:
    model, x = epigen.nn.MLP([8, 16, 4], "gelu"), drawn(3, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save((x, model(x).detach()), tmp_path / "io.pt")
    code = (
        f"{order}\n"
        "assert 'epigen.training.library' not in __import__('sys').modules\n"
        f"x, y = torch.load({str(tmp_path / 'io.pt')!r})\n"
        f"torch.testing.assert_close(torch.export.load({str(tmp_path / 'model.pt2')!r}).module()(x), y)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], env=settings.child_environment(interpret=False), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_what_is_exported_keeps_nothing_for_a_backward(strict: bool, training: bool) -> None:
    model = nn.Sequential(epigen.nn.MLP([8, 16, 4], "gelu"), epigen.nn.Linear(4, 4, epilogue="silu(mm + bias)")).train(training)
    x = drawn(3, 8)
    written = torch.export.export(model, (x,), strict=strict)
    assert operations(written.graph) == ["gelu(mm + bias)", "mm + bias", "silu(mm + bias)"]
    torch.testing.assert_close(written.module()(x), model(x))
    with pytest.raises(CallError, match=r"torch\.ops\.epigen\.program"):
        written.module()(x.clone().requires_grad_()).sum().backward()
    model(x).sum().backward()
    assert model[0][0].weight.grad is not None, "the model itself trains as before"


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_written_out_in_torchs_own_operations(strict: bool) -> None:
    for model, given in ((epigen.nn.MLP([8, 16, 4], "gelu"), (drawn(5, 8),)), (Gated(), (drawn(5, 8), drawn(5, 20)))):
        dims = tuple({0: torch.export.Dim("M", min=2)} for _ in given)
        written = torch.export.export(model, given, dynamic_shapes=dims, strict=strict)
        assert operations(written.graph)
        out = written.run_decompositions(epigen.decompositions())
        assert not operations(out.graph) and all(n.target.namespace == "aten" for n in out.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        for m in (5, 9):
            more = tuple(drawn(m, *t.shape[1:], seed=m) for t in given)
            with torch.no_grad():
                torch.testing.assert_close(out.module()(*more), model(*more))


class Called(nn.Module):
    """A kernel's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = epigen.compile("z = silu(mm + bias); z, sum(z, n)")
        self.weight, self.bias = nn.Buffer(drawn(8, 20)), nn.Buffer(drawn(20, seed=1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.kernel(x, self.weight, bias=self.bias))


def fused() -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8))
    assert "2 of 2 linear layers fused" in str(epigen.fuse(model))
    return model


@pytest.mark.parametrize("written_before", [False, True])
@pytest.mark.parametrize(
    "make", [Called, Gated, Masked, fused, lambda: epigen.nn.MLP([8, 16, 4], "gelu")], ids=["a kernel", "several results", "masks", "fused", "MLP"]
)
def test_a_model_becomes_onnx(make: Callable[[], nn.Module], written_before: bool, tmp_path: Path) -> None:
    """And another runtime computes the same of it, of any number of rows. written_before: as a program that torch.export wrote down and took apart."""
    import onnxruntime

    model = make().eval()
    given = [drawn(5, 8), *([drawn(5, 20)] if isinstance(model, Gated) else [])]
    dims = tuple({0: torch.export.Dim.DYNAMIC} for _ in given)
    if written_before:
        written = torch.export.export(model, tuple(given), dynamic_shapes=dims).run_decompositions(epigen.decompositions())
        program = torch.onnx.export(written, dynamo=True, verbose=False)
    else:
        program = torch.onnx.export(model, tuple(given), dynamic_shapes=dims, dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for m in (5, 9):
        more = [drawn(m, *t.shape[1:], seed=m) for t in given]
        results = session.run(None, {place.name: t.numpy() for place, t in zip(session.get_inputs(), more, strict=True)})
        with torch.no_grad():
            expected = model(*more)
        for result, e in zip(results, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(result), e, rtol=1e-4, atol=1e-5)


class Positional(nn.Module):
    """A model of the zoo by the values of its inputs."""

    def __init__(self, made: zoo.Made) -> None:
        super().__init__()
        self.model, self.names = made.model, list(made.inputs)

    def forward(self, *values: Any) -> Tensor:
        return zoo.first(self.model(**dict(zip(self.names, values, strict=True))))


@pytest.mark.parametrize("name", ["bert", "llama", "timm_vit"])
def test_a_fused_model_that_people_have_becomes_onnx(name: str, tmp_path: Path) -> None:
    import onnxruntime

    if package := zoo.missing(name):
        pytest.skip(f"{package} is not installed")
    made = zoo.ZOO[name]()
    model, given = Positional(made).eval(), tuple(made.inputs.values())
    assert epigen.fuse(made.model).replaced
    program = torch.onnx.export(model, given, dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    tensors = [t for t in given if isinstance(t, Tensor)]
    (result,) = session.run(None, {place.name: t.numpy() for place, t in zip(session.get_inputs(), tensors, strict=True)})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(result), model(*given), rtol=1e-4, atol=1e-5)


def test_a_translation_of_the_users_own_is_kept() -> None:
    """To what another runtime has in place of a program, say."""
    from onnxscript import opset18

    model = Called().eval()

    def translated(text: str, tune: Any, a: Any, b: Any, inputs: Any, numbers: Any, options: Any = None) -> Any:  # noqa: ARG001
        product = opset18.MatMul(a, b)
        return [product, opset18.ReduceSum(product, keepdims=0)]

    program = torch.onnx.export(
        model, (drawn(5, 8),), dynamo=True, verbose=False, custom_translation_table={torch.ops.epigen.program.default: translated}, optimize=False
    )
    assert program is not None and "Sigmoid" not in {node.op_type for node in program.model.graph}


def test_each_operation_is_what_it_is_written_out_as() -> None:
    """Of int8 and bf16 too, and what writes its results in place."""
    a, b, r = drawn(5, 12), drawn(12, 20, seed=1), drawn(5, 20, seed=2)
    text = "y = relu(mm * s + r[m,n]); y, cast(y, fp8e4m3), sum(y), amax(y, m), bitmask(y > 1)"
    for dtype in (torch.float32, torch.bfloat16):
        call = (text, None, a.to(dtype), b.to(dtype), [None, r], [0.3])
        torch.testing.assert_close(composed.WRITTEN_OUT[library.program](*call), library.program(*call))
    eights = [(t * 20).to(torch.int8) for t in (a, b)]
    assert torch.equal(composed.WRITTEN_OUT[library.program]("mm", None, *eights, [], [])[0], library.program("mm", None, *eights, [], [])[0])
    over = (text, r, [None, r], [0.3])
    torch.testing.assert_close(composed.WRITTEN_OUT[library.over](*over), library.over(*over))
    for operands in ([a, b], [r]):
        outs = [[torch.zeros(5, 20), torch.zeros(5)] for _ in range(2)]
        for into, run in zip(outs, (composed.WRITTEN_OUT[library.into], library.into), strict=True):
            run("relu(mm), sum(mm, n)", None, operands, [], [], into)
        torch.testing.assert_close(*outs)
        assert outs[0][0].any()
    grads = [torch.ones(5, 20) for _ in range(2)]
    composed.WRITTEN_OUT[library.accumulate](grads[0], a, b)
    library.accumulate(grads[1], a, b)
    torch.testing.assert_close(*grads)


# -- a Kernel's call where torch traces


def test_a_kernels_call_is_one_graph() -> None:
    """Of any number of rows, and of any number that it is given."""
    kernel, w, bias = epigen.compile("z = mm * s + bias; relu(z), sum(z, n)"), drawn(8, 4), drawn(4, seed=1)
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, s: kernel(x, w, bias=bias, s=s), fullgraph=True, backend=counted)
    for i in range(5):
        x = drawn(3 + i, 8, seed=i)
        found, expected = compiled(x, 0.5 + i), kernel(x, w, bias=bias, s=0.5 + i)
        assert found._fields == expected._fields
        torch.testing.assert_close(tuple(found), tuple(expected))
    assert counted.frame_count == 2, "static at first, dynamic from the second on"


CONFIG = {"schedule": "library", "block_m": 32, "block_n": 64, "num_warps": 4}
KERNELS: list[Callable[[], Any]] = [
    lambda: epigen.compile("relu(mm)", backend="reference", precision="ieee"),
    lambda: epigen.compile("relu(mm)", config=CONFIG, backend="reference"),
    lambda: epigen.compile("relu(mm)", tune="missing"),
]


@pytest.mark.parametrize("made", KERNELS, ids=["precision", "config", "tune"])
def test_a_kernel_is_traced_with_its_options(made: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    kernel, x, w = made(), drawn(3, 8), drawn(8, 4)

    def written(x: Tensor) -> Tensor:
        y, out = kernel(x, w), torch.empty(x.shape[0], 4)
        kernel.over(y - 1, out=out)
        kernel(x + 1, w, out={"out": y})
        return y + out

    expected = torch.relu((x + 1) @ w) + torch.relu(torch.relu(x @ w) - 1)
    torch.testing.assert_close(torch.compile(written, fullgraph=True, backend="aot_eager")(x), expected)
    graph = make_fx(written)(x)
    torch.testing.assert_close(graph(x), expected)
    called = [n for n in graph.graph.nodes if "epigen" in str(n.target)]
    assert len(called) == 3, "not what a kernel does, and no constant in the place of what it gives"
    (again,) = {(n.kwargs.get("options"), n.args[1] if n.target is not library.over else None) for n in called}
    remade = library.kernel("relu(mm)", again[1], again[0])
    assert remade.plan().choice.config == kernel.plan().choice.config and remade.numerics == kernel.numerics and remade._backend == kernel._backend


def test_a_buffer_is_accumulated_in_place_in_a_graph() -> None:
    kernel, x, w = epigen.compile("cast(mm + grad[m,n], fp32)"), drawn(3, 8), drawn(8, 4)

    def step(grad: Tensor) -> Tensor:
        kernel(x, w, grad=grad, out=grad)
        return grad * 2

    ours, theirs = torch.ones(3, 4), torch.ones(3, 4)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(ours), step(theirs))
    torch.testing.assert_close(ours, theirs)


def test_a_kernels_mistakes_are_told_while_compiling() -> None:
    kernel, x, w = epigen.compile("mm * s"), drawn(3, 8), drawn(8, 4)
    mistakes: dict[str, Callable[[Tensor], Any]] = {
        "missing input: s": lambda x: kernel(x, w),
        "the program has no input 'S'": lambda x: kernel(x, w, S=1.0),
        "K differs": lambda x: kernel(x, w.t(), s=1.0),
        "an argument requires grad": lambda x: kernel(x.clone().requires_grad_(), w, s=1.0),
    }
    for message, call in mistakes.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        with pytest.raises(CallError, match=message):
            call(x)


# -- torch.fx


def test_a_model_is_traced_symbolically() -> None:
    """Each layer or chain is one node, and what the graph computes trains as the model does."""
    model = nn.Sequential(epigen.nn.MLP([8, 16, 4], "gelu"), nn.Tanh(), epigen.nn.Linear(4, 4, epilogue="silu(mm + bias)"))
    for traced in (fx.symbolic_trace(model), copy.deepcopy(fx.symbolic_trace(model))):
        assert [n.target.__name__ for n in traced.graph.nodes if n.op == "call_function" and "epigen" in n.target.__module__ and "chain" in n.name] == [
            "chain"
        ] * 2
        x = drawn(3, 8)
        grads = [torch.autograd.grad(f(x).square().sum(), list(f.parameters())) for f in (traced, model)]
        torch.testing.assert_close(*grads)
    gated, given = Gated(), (drawn(5, 8), drawn(5, 20))
    with torch.no_grad():
        torch.testing.assert_close(fx.symbolic_trace(gated)(*given), gated(*given))


def test_a_kernels_call_is_traced_symbolically(golden: Golden) -> None:
    """With several results too, and over a product that is there."""
    w, bias = drawn(8, 4), drawn(4, seed=1)
    one, several = epigen.compile("relu(mm + bias)"), epigen.compile("z = mm * s; z, sum(z, n)")

    class Calls(nn.Module):
        def forward(self, x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            z, rows = several(x, w, s=0.5)
            return one(x, w, bias=bias) * 2, z, rows, one.over(x @ w, bias=bias)

    traced = fx.symbolic_trace(Calls())
    assert operations(traced.graph) == ["z = mm * s; z, sum(z, n)", "relu(mm + bias)", "relu(mm + bias)"]
    for m in (3, 5):
        torch.testing.assert_close(traced(drawn(m, 8), w, bias), Calls()(drawn(m, 8), w, bias))
    with golden.raises(CallError):
        one("x", w, bias=bias)


@pytest.mark.parametrize(
    "make", [Called, Gated, Masked, fused, lambda: epigen.nn.MLP([8, 16, 4], "gelu")], ids=["a kernel", "several results", "masks", "fused", "MLP"]
)
def test_a_model_is_traced_by_torch_jit(make: Callable[[], nn.Module]) -> None:
    """In torch's own operations: nothing that a kernel did is a constant there, and its results hang on what goes in."""
    model = make().eval()
    given = [drawn(5, 8), *([drawn(5, 20)] if isinstance(model, Gated) else [])]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, about its age and the shapes that are checked
        traced = torch.jit.trace(model, tuple(given), check_trace=False)
    assert "epigen::" not in str(traced.inlined_graph)
    more = [drawn(*t.shape, seed=7) for t in given]
    torch.testing.assert_close(traced(*more), model(*more))


def test_torch_jit_scripts_a_model_that_is_not_fused(golden: Golden) -> None:
    """The text of a forward is compiled there; a fused one says what to do, wherever in the model it is, and the model keeps it."""
    model = nn.Sequential(fused().eval())
    with golden.raises(CallError):
        torch.jit.script(model)
    assert "forward" in vars(model[0])
    epigen.unfuse(model)
    x = drawn(5, 8)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


def test_torch_jit_sees_what_runs_as_an_operation_too() -> None:
    """As on a GPU a kernel does, of which torch.jit sees nothing."""
    call = ("relu(mm + bias), sum(mm, n)", None, drawn(5, 8), drawn(8, 4), [drawn(4)], [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda a, b, c: tuple(library.program(*call[:2], a, b, [c], [])), (*call[2:4], *call[4]), check_trace=False)
    given = drawn(5, 8, seed=3), drawn(8, 4, seed=4), drawn(4, seed=5)
    torch.testing.assert_close(traced(*given), tuple(library.program(*call[:2], *given[:2], [given[2]], [])))


def test_a_traced_layer_adds_to_its_buffer() -> None:
    layer = epigen.nn.Linear(8, 4, epilogue="mm + bias")
    layer.weight.main_grad = torch.zeros(4, 8)
    x = drawn(3, 8)
    fx.symbolic_trace(nn.Sequential(layer))(x).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, torch.ones(3, 4).t() @ x)
    assert layer.weight.grad is None


def test_a_subclass_is_told_of_a_layer() -> None:
    """By torch's protocol for functions, as of torch.nn.functional.linear."""
    told = []

    class Told(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = drawn(3, 8).as_subclass(Told), drawn(4, 8)
    found = epigen.linear(x, w, epilogue="relu(mm)")
    assert isinstance(found, Told) and epigen.linear in told
    with torch.device("cpu"):  # a mode, which is told of all functions
        torch.testing.assert_close(epigen.linear(drawn(3, 8), w, epilogue="relu(mm)"), torch.relu(drawn(3, 8) @ w.t()))


# -- FLOPs


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_both_products_of_a_gate_are_counted() -> None:
    mlp, x = epigen.nn.GatedMLP(8, 16), torch.randn(5, 8)
    assert flops(lambda: mlp(x)) == 2 * 5 * 3 * 8 * 16


@pytest.mark.parametrize(("act", "save"), [("relu", None), ("gelu", None), ("silu", "recompute")])
def test_products_are_counted(act: str, save: str | None) -> None:
    x = drawn(5, 8).requires_grad_()
    model = epigen.nn.MLP([8, 16, 4], act, save=save)
    plain = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    assert flops(lambda: model(x)) == flops(lambda: plain(x)) == 2 * 5 * (8 * 16 + 16 * 4)
    again = 2 * 5 * 8 * 16 if save == "recompute" else 0
    assert flops(lambda: model(x).sum().backward()) == flops(lambda: plain(x).sum().backward()) + again
    for layer in model:
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    assert flops(lambda: model(x).sum().backward()) == flops(lambda: plain(x).sum().backward()) + again
    kernel, y = epigen.compile("relu(mm)"), torch.empty(5, 16)
    assert flops(lambda: kernel(x.detach(), drawn(8, 16))) == flops(lambda: kernel(x.detach(), drawn(8, 16), out=y)) == 2 * 5 * 8 * 16
    assert flops(lambda: kernel.over(y)) == flops(lambda: kernel.over(y, out=y)) == 0


def test_products_of_batches_and_of_groups_are_counted() -> None:
    """Of groups each row has one, and each k."""
    kernel, ends = epigen.compile("relu(mm)"), torch.tensor([2, 5], dtype=torch.int32)
    assert flops(lambda: kernel(drawn(3, 5, 8), drawn(8, 16))) == flops(lambda: kernel(drawn(5, 8), drawn(3, 8, 16))) == 3 * 2 * 5 * 8 * 16
    assert flops(lambda: kernel(drawn(5, 8), drawn(2, 8, 16), groups=ends)) == flops(lambda: kernel(drawn(8, 5), drawn(5, 16), groups=ends)) == 2 * 5 * 8 * 16


# -- many at once


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_jacobians_of_many_gradients_at_once(act: str) -> None:
    """By torch's older map, which its functional API and gradcheck still use."""
    model, x = epigen.nn.MLP([8, 6, 4], act), drawn(2, 3, 8)
    jacobian: Any = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(model, x, vectorize=True), jacobian(model, x))
    given = (drawn(3, 8), drawn(5, 8, seed=1), drawn(5, seed=2))

    def layer(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(epigen.linear(x, w, b, f"z = mm + bias; {act}(z) * s, sum(z, n)", s=0.5))

    torch.testing.assert_close(jacobian(layer, given, vectorize=True), jacobian(layer, given))
    y = model(x)
    grads = drawn(2, 3, *y.shape)

    def nested(grad: Tensor) -> Tensor:
        return torch.autograd.grad(y, model[0].weight, grad, retain_graph=True, is_grads_batched=True)[0]

    one_by_one = torch.stack([torch.stack([torch.autograd.grad(y, model[0].weight, g, retain_graph=True)[0] for g in gs]) for gs in grads])
    torch.testing.assert_close(torch._vmap_internals._vmap(nested, 0, 0)(grads), one_by_one)


# -- float64 on the CPU


@pytest.mark.parametrize("save", [None, "recompute"])
@pytest.mark.parametrize("text", ["relu(mm + bias)", "gelu(mm * s + bias) * gate[m,n] + row[m]", "z = mm + bias; tanh(z), sum(z * z, n), sum(z, m)"])
def test_gradcheck(text: str, save: str | None) -> None:
    x, w, b, gate, row = (drawn(*size, seed=i, dtype=torch.float64).requires_grad_() for i, size in enumerate([(2, 3, 4), (5, 4), (5,), (2, 3, 5), (2, 3)]))
    more = (gate, row) if "gate" in text else ()

    def run(x: Tensor, w: Tensor, b: Tensor, *more: Tensor) -> Any:
        return epigen.linear(x, w, b, text, save=save, **(dict(zip(("gate", "row"), more, strict=True)) | {"s": 0.3} if more else {}))

    assert torch.autograd.gradcheck(run, (x, w, b, *more), check_forward_ad=True, check_batched_grad=True)


def test_double_is_as_exact_as_torchs() -> None:
    model, x = epigen.nn.MLP([8, 16, 4], "gelu").double(), drawn(3, 8, dtype=torch.float64)
    expected = F.linear(F.gelu(F.linear(x, model[0].weight, model[0].bias)), model[1].weight, model[1].bias)
    grads = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (model(x), expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)
    kernel, w = epigen.compile("mm * s + bias, sum(mm)"), drawn(8, 4, dtype=torch.float64)
    found = kernel(x, w, s=0.1, bias=torch.ones(4))
    torch.testing.assert_close(tuple(found), (x @ w * 0.1 + 1, (x @ w).sum()), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(kernel.over(x @ w, s=0.1, bias=torch.ones(4))[0], found[0], rtol=1e-13, atol=1e-13)


def test_double_elsewhere_is_refused(golden: Golden) -> None:
    x, w = drawn(3, 8), drawn(4, 8)
    with golden.raises(CallError, "input"):
        epigen.linear(x, w, drawn(4, dtype=torch.float64))
    with torch._subclasses.FakeTensorMode(), golden.raises(CallError, "operand"):
        epigen.linear(torch.empty(3, 8, device="cuda", dtype=torch.float64), torch.empty(4, 8, device="cuda", dtype=torch.float64))


# -- several processes


@pytest.mark.parametrize(
    ("text", "operands", "along"),
    [
        ("mm + bias", 2, "-mnk"), ("relu(mm + bias)", 2, "-mn"), ("relu(mm) + bias", 1, "-mn"), ("mm * s + r[m,n]", 1, "-mnk"), ("sum(relu(mm), m)", 2, "-mn"),
        ("sum(relu(mm), m) * 2", 2, "-n"), ("max(mm, n)", 2, "-m"), ("cast(mm, int8)", 2, "-mn"), ("mm * r[m,n] + r[m,n]", 2, "-mn"), ("mm + 1", 2, "-mn"),
        ("mm, bitmask(mm > 0)", 2, "-mn"),
    ],
)  # fmt: skip
def test_the_ways_to_compute_a_program_in_parts(text: str, operands: int, along: str) -> None:
    """along: whole, in parts of M, of N, as summands."""
    first = "a" if operands == 2 else "mm"
    found = []
    for way in sharding.ways(text, operands):
        at = (str(way.inputs[first]), str(way.inputs.get("b", way.inputs[first])))
        found.append(
            {
                ("R", "R"): "-",
                ("S(0)", "R"): "m",
                ("R", "S(1)"): "n",
                ("S(1)", "S(0)"): "k",
                ("S(0)", "S(0)"): "m",
                ("S(1)", "S(1)"): "n",
                ("P(sum)", "P(sum)"): "k",
            }[at]
        )
    assert "".join(found) == along


def test_processes_share_layers(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(distributed_process.run, (2, str(tmp_path / "meet")), nprocs=2, daemon=True)
