"""Derivatives that torch takes in other ways than a backward of one graph: torch.func, dual numbers, vmap, checkpoints.

Run by tests/training/test_processes.py in a process of its own, on the GPU where there is one: torch imports its compiler for them, which imports Triton.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from golden import Golden
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.utils.checkpoint import checkpoint
from under_torch import APART

import epigen
from epigen.errors import CallError
from epigen.training import library

pytestmark = [
    APART,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]  # torch's own, at a process's first tangent (2.13)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mlp(activation: str) -> epigen.nn.MLP:
    torch.manual_seed(0)
    return epigen.nn.MLP([4, 6, 3], activation, device=DEVICE)


# -- torch.func and dual numbers


def test_derivatives_of_a_layer_are_torchs() -> None:
    """Of each argument, whether it requires a gradient or not, and of several outputs."""
    given = x, w, b, gate = tuple(drawn(*size, seed=i) for i, size in enumerate([(2, 3, 4), (5, 4), (5,), (2, 3, 5)]))

    def ours(x: Tensor, w: Tensor, b: Tensor, gate: Tensor) -> Any:
        y, rows = epigen.linear(x, w, b, "z = mm + bias; gelu(z) * gate[m,n] * s, sum(z, n)", gate=gate, s=0.5)
        return y, rows

    def theirs(x: Tensor, w: Tensor, b: Tensor, gate: Tensor) -> Any:
        z = F.linear(x, w, b)
        return F.gelu(z) * gate * 0.5, z.sum(-1)

    both = (ours, theirs)
    for n in range(4):
        torch.testing.assert_close(*(torch.func.jacfwd(f, n)(*given) for f in both))
        torch.testing.assert_close(*(torch.func.jacrev(f, n)(*given) for f in both))
        for requires in (False, True):
            primals = [t.clone().requires_grad_(requires) for t in given]
            tangents = [drawn(*t.shape, seed=9) if i == n else torch.zeros_like(t) for i, t in enumerate(given)]
            torch.testing.assert_close(*(torch.func.jvp(f, tuple(primals), tuple(tangents)) for f in both))
            with forward_ad.dual_level():
                primals[n] = forward_ad.make_dual(primals[n], tangents[n])
                torch.testing.assert_close(*([forward_ad.unpack_dual(t).tangent for t in f(*primals)] for f in both))
    torch.testing.assert_close(*(torch.func.hessian(lambda w, f=f: f(x, w, b, gate)[0].sum())(w) for f in both))
    torch.testing.assert_close(*(torch.func.vmap(f, (0, None, None, 0))(*given) for f in both))


def test_derivatives_of_a_model_are_torchs() -> None:
    model, x = mlp("silu"), drawn(5, 4)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def ours(p: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, p, (x,))
        return found

    def theirs(p: dict[str, Tensor]) -> Tensor:
        return F.linear(F.silu(F.linear(x, p["0.weight"], p["0.bias"])), p["1.weight"], p["1.bias"])

    torch.testing.assert_close(*(torch.func.grad(lambda p, f=f: f(p).square().sum())(parameters) for f in (ours, theirs)))
    torch.testing.assert_close(*(torch.func.jvp(f, (parameters,), (parameters,)) for f in (ours, theirs)))
    frozen = copy.deepcopy(model).requires_grad_(False)
    torch.testing.assert_close(torch.func.jacfwd(frozen)(x), torch.autograd.functional.jacobian(frozen, x))


def test_a_dual_number_elsewhere_changes_nothing(ran: list[str]) -> None:
    w = drawn(9, 4, seed=1).requires_grad_()
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(2), torch.ones(2))
        epigen.linear(drawn(5, 4), w, epilogue="gelu(mm)").sum().backward()
    assert len(ran) == 2, "the kernels ran, forward and backward"


@pytest.mark.parametrize("operation", ["program", "over"])
def test_an_operation_by_itself_refuses_derivatives(operation: str) -> None:
    x, w = drawn(5, 4), drawn(9, 4, seed=1)

    def run(x: Tensor) -> Tensor:
        return library.program("tanh(mm)", None, x, w.t(), [], [])[0] if operation == "program" else library.over("tanh(mm)", x, [], [])[0]

    assert not run(x).requires_grad
    with pytest.raises(CallError, match=rf"epigen\.{operation} .*forward-mode"):
        torch.func.jvp(run, (x,), (x,))
    leaf = x.clone().requires_grad_()
    for attempt in (lambda: run(leaf).sum().backward(), lambda: torch.func.grad(lambda x: run(x).sum())(x)):
        with pytest.raises(CallError, match=rf"epigen\.{operation} has no derivative"):
            attempt()
    with torch.no_grad():
        assert not run(leaf).requires_grad


@pytest.mark.parametrize("n", range(3))
def test_a_kernel_refuses_derivatives(n: int) -> None:
    """Also in a call like one that was made before."""
    kernel, given = epigen.compile("tanh(mm) * s"), [drawn(5, 4), drawn(4, 9, seed=1), torch.tensor(2.0, device=DEVICE)]
    t = given[n]

    def run(t: Tensor) -> Any:
        a, b, s = (t if i == n else v for i, v in enumerate(given))
        return kernel(a, b, s=s)

    for _ in range(3):
        run(t)
    with forward_ad.dual_level(), pytest.raises(CallError, match="tangent"):
        run(forward_ad.make_dual(t, t))
    for ask in (lambda: torch.func.jvp(run, (t,), (t,)), lambda: torch.func.grad(lambda t: run(t).sum())(t)):
        with pytest.raises(CallError, match=r"torch\.func"):
            ask()
    with pytest.raises(CallError, match="requires grad"):
        run(t.clone().requires_grad_())
    with torch.no_grad():
        assert not run(t.clone().requires_grad_()).requires_grad


# -- vmap


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
def test_a_backward_is_mapped_over_many_gradients(lead: tuple[int, ...]) -> None:
    model = mlp("relu")
    y = model(drawn(*lead, 4))
    grads = drawn(4, *y.shape, seed=5)

    def backward(grad: Tensor) -> Tensor:
        return torch.autograd.grad(y, model[0].weight, grad, retain_graph=True)[0]

    torch.testing.assert_close(torch.func.vmap(backward)(grads), torch.stack([backward(g) for g in grads]))


def test_an_operation_is_mapped() -> None:
    x, w, s = drawn(7, 5, 4), drawn(4, 9), drawn(7)
    found = torch.func.vmap(lambda x, s: library.program("z = mm * s * t; z, sum(z, n)", None, x, w, [s, None], [2.0]))(x, s)
    z = x @ w * s[:, None, None] * 2
    torch.testing.assert_close(found, [z, z.sum(-1)])


# -- what else imports torch's compiler


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_buffer_is_added_to_once_by_a_checkpoint(reentrant: bool) -> None:
    model, x = mlp("relu"), drawn(7, 4).requires_grad_()
    weights = [layer.weight for layer in model]
    expected = torch.autograd.grad(model(x).sum(), weights)
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(tuple(weight.main_grad for weight in weights), expected)


def test_a_nested_tensor_is_refused(golden: Golden) -> None:
    with golden.raises(CallError):
        epigen.linear(torch.nested.nested_tensor([torch.ones(5, 4)], layout=torch.jagged), torch.ones(9, 4))


@pytest.mark.parametrize("grad", [True, False])
def test_tensors_without_memory(grad: bool) -> None:
    x, w = torch.empty(2, 3, 4, device="meta"), torch.empty(9, 4, device="meta", requires_grad=grad)
    y, rows = epigen.linear(x, w, epilogue="y = gelu(mm) * s; y, sum(y, n)", s=0.5)
    assert (y.shape, rows.shape, y.device.type) == ((2, 3, 9), (2, 3), "meta")
    if grad:
        (y.sum() + rows.sum()).backward()
        assert w.grad is not None and w.grad.shape == w.shape


def test_functions_of_tensors_without_memory() -> None:
    """Which are traced for the shapes of the first call."""
    x, w = torch.empty(2, 3, 4, device="meta"), torch.empty(9, 4, device="meta", requires_grad=True)
    for y in (
        epigen.linear(x, w, epilogue=F.gelu),
        epigen.nn.Linear(4, 9, epilogue=lambda mm, bias: F.mish(mm + bias), device="meta")(x),
        epigen.nn.MLP([4, 6, 9], activation=nn.GELU(), device="meta")(x),
    ):
        assert (y.shape, y.device.type) == ((2, 3, 9), "meta")
        y.sum().backward()
    assert w.grad is not None and w.grad.shape == w.shape
    kernel = epigen.compile(F.gelu)
    assert kernel(x[0], w.detach().t()).shape == (3, 9) and kernel.program == "gelu(mm)"
