"""What outlives a process or is handed to another: kernels, their results, plans and errors, pickled and copied."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import forked
import pytest
import torch
from golden import Golden
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import epigen
from epigen import errors, settings
from epigen.codegen import schedules
from epigen.codegen.spec import Choice
from epigen.errors import CallError, CheckError, DerivationError, Diagnostic, EpigenError, InternalError, ParseError, ProgramError, Span
from epigen.runtime import outputs
from epigen.runtime.kernel import Kernel

TEXT = "z = mm * alpha + bias; relu(z), bitmask(z > 0), bgrad(z)"
X, W, BIAS = torch.arange(12.0).reshape(3, 4) - 5, torch.ones(4, 6), torch.linspace(-3, 3, 6)


def called(kernel: Any) -> Any:
    return kernel(X, W, alpha=0.5, bias=BIAS)


def equal(found: Any, expected: Any) -> bool:
    return found._fields == expected._fields and all(map(torch.equal, found, expected))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = pytest.mark.parametrize("way", [pickled, saved, copy.copy, copy.deepcopy], ids=["pickle", "torch.save", "copy", "deepcopy"])


class Holds(nn.Module):
    """A module with a kernel, as a user's may have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kernel = nn.Parameter(torch.ones(4, 6)), epigen.compile("relu(mm)")

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.kernel(x, self.weight)
        return found


# -- kernels


@pytest.mark.triton
@WAYS
@pytest.mark.parametrize(
    "options",
    [{}, {"config": cases.SMALL, "backend": "interpreter", "precision": "tf32"}, {"tune": "missing"}],
    ids=["plain", "with options", "tuned at first use"],
)
def test_a_kernel(way: Callable[[Any], Any], options: dict[str, Any]) -> None:
    """Before a call and after one, which leaves behind it what cannot be pickled."""
    kernel = epigen.compile(TEXT, **options)
    for _ in range(2):
        found = way(kernel)
        assert isinstance(found, Kernel) and found.program == kernel.program
        assert equal(called(found), called(kernel))
        if "config" in options:
            assert found.config == kernel.config == cases.SMALL and 'input_precision="tf32"' in found.source()
    assert (found._at_call != found._choose) == (kernel._at_call != kernel._choose) == ("tune" in options)


def test_a_bound_call_of_a_kernel() -> None:
    over = pickled(epigen.compile("relu(mm)").over)
    assert torch.equal(over(X), torch.relu(X))


def test_a_kernel_made_for_one_problem_says_that_it_cannot(golden: Golden) -> None:
    kernel = epigen.compile(TEXT)
    config = schedules.config("library", block_m=16, block_n=16, num_warps=1)
    with golden.raises(CallError):
        pickle.dumps(Kernel(kernel.graph, kernel.renderer, lambda *_: Choice(config, "fixed")))


@WAYS
@pytest.mark.parametrize("make", [Holds, lambda: epigen.nn.MLP([4, 8, 2]), lambda: epigen.nn.Linear(4, 2, epilogue="gelu(mm + bias)")])
def test_a_module(way: Callable[[Any], Any], make: Callable[[], nn.Module]) -> None:
    module = make()
    expected = module(X)
    assert torch.equal(way(module)(X), expected)


def test_the_average_of_a_model() -> None:
    average: nn.Module = torch.optim.swa_utils.AveragedModel(Holds())
    assert torch.equal(average(X), Holds()(X))


# -- results


def results() -> list[Any]:
    text = "z = mm; relu(z), bitmask(z > 0), sum(z)"
    return [called(epigen.compile(TEXT)), epigen.linear(X, W.T, epilogue=text), epigen.compile("z = mm; z, bgrad(z)").over(X)]


@WAYS
@pytest.mark.parametrize("which", range(3), ids=["call", "linear", "over"])
def test_outputs(way: Callable[[Any], Any], which: int) -> None:
    expected = results()[which]
    found = way(expected)
    assert type(found) is type(expected) and equal(found, expected)
    assert found._asdict().keys() == expected._asdict().keys() and equal(found._replace(), expected)


def test_torch_load_takes_outputs_as_it_does_by_default() -> None:
    file = io.BytesIO()
    torch.save(results()[0], file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), results()[0])


def test_outputs_are_leaves_of_a_tree_by_their_names() -> None:
    """Equal names are one type, so that trees of two kernels' results are alike."""
    leaves, tree = pytree.tree_flatten(results()[0])
    assert len(leaves) == 3 and equal(pytree.tree_unflatten(leaves, tree), results()[0])
    other = called(epigen.compile(TEXT.replace("relu", "tanh")))
    assert pytree.tree_structure(other) == tree and pytree.tree_structure(results()[1]) == tree
    assert equal(torch.utils._pytree.tree_map(lambda t: t, other), other)


def test_types_of_outputs_do_not_pile_up() -> None:
    limit = outputs.named.cache_parameters()["maxsize"]
    for i in range(limit + 50):
        outputs.named((f"a{i}", "b"))
    assert outputs.named.cache_info().currsize <= limit


# -- other processes


def answer(kernel: Any, found: Any, queue: Any, read: Any) -> None:
    queue.put(called(kernel))
    queue.put(found)
    read.wait()  # the tensors' memory is this process's


def test_a_spawned_worker_and_its_queue() -> None:
    kernel, context = epigen.compile(TEXT), multiprocessing.get_context("spawn")
    expected, queue = called(kernel), torch.multiprocessing.get_context("spawn").SimpleQueue()
    read = context.Event()
    worker = context.Process(target=answer, args=(kernel, expected, queue, read))
    worker.start()
    found = queue.get(), queue.get()
    read.set()
    worker.join()
    assert equal(found[0], expected) and equal(found[1], expected)
    assert worker.exitcode == 0


def test_a_process_that_has_not_imported_epigen(tmp_path: Path) -> None:
    path = tmp_path / "pickled"
    path.write_bytes(pickle.dumps((epigen.compile("relu(mm)"), results()[0])))
    code = f"import pickle; kernel, found = pickle.load(open({str(path)!r}, 'rb')); print(kernel.program, found._fields)"
    run = forked.python("-c", code, cwd=tmp_path, env=settings.child_environment(interpret=True))
    assert run.stdout.strip() == f"relu(mm) {results()[0]._fields}", run.stderr


# -- plain data, and errors


@WAYS
def test_plain_data(way: Callable[[Any], Any]) -> None:
    kernel = epigen.compile(TEXT, config=cases.SMALL)
    plan = kernel.plan((64, 64, 64))
    for value in (kernel.config, kernel.graph, plan, plan.choice, plan.spec, epigen.derive("gelu(mm + bias) * gate[m,n]")):
        assert way(value) == value


def raised(call: Callable[[], Any]) -> EpigenError:
    with pytest.raises(EpigenError) as found:
        call()
    return found.value


def test_errors() -> None:
    """With their arguments, and the same words."""
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, (EpigenError, InternalError))]
    made = [kind("a + b", [Diagnostic("wrong", Span(0, 1), "hint")]) if issubclass(kind, ProgramError) else kind("wrong") for kind in kinds]
    found = [raised(lambda: epigen.compile("relu(mm +")), raised(lambda: epigen.compile("relu(bais)")), raised(lambda: epigen.derive("mm, max(mm)", of="out1"))]
    assert [type(e) for e in found] == [ParseError, CheckError, DerivationError]
    for error in (*made, *found):
        for again in (pickled(error), copy.deepcopy(error)):
            assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
