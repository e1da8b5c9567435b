"""Experts in grouped kernels, beside a loop over them: results and all gradients, whatever the tokens' choice is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

import epigen
from epigen.errors import CallError
from epigen.training.backend import backend
from epigen.training.experts import Options, Weights, experts, scored

H, I, E, K = 16, 24, 5, 2  # noqa: E741  # as the docstrings of experts have it

GATED = scored("silu(left) * right", bias=False)
KINDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "halves": (GATED, lambda z: F.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]),
    "pairs": (GATED.replace("halves", "pairs"), lambda z: F.silu(z[..., ::2]) * z[..., 1::2]),
    "one": ("v = relu(mm); v * v * score[m]", lambda z: torch.relu(z) ** 2),
}
"""By how columns are parted: the program, and torch's function."""


def made(kind: str = "halves", bias: bool = False, transposed: bool = False, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Weights:
    torch.manual_seed(0)
    columns = I if kind == "one" else 2 * I

    def drawn(*size: int) -> Tensor:
        return (torch.randn(size, dtype=torch.float64) / 4).to(device, dtype).requires_grad_()

    up, down = drawn(E, columns, H), drawn(E, H, I)
    if transposed:
        up, down = (w.detach().transpose(1, 2).contiguous().requires_grad_() for w in (up, down))
    return Weights(up, drawn(E, columns) if bias else None, down, drawn(E, H) if bias else None, transposed)


def looped(function: Callable[[Tensor], Tensor], hidden: Tensor, index: Tensor, scores: Tensor, weights: Weights) -> Tensor:
    """What transformers' own loop computes."""
    up, up_bias, down, down_bias, transposed = weights
    result = torch.zeros_like(hidden)
    for e in range(E):
        tokens, places = torch.where(index == e)
        first, second = (up[e].t(), down[e].t()) if transposed else (up[e], down[e])
        z = F.linear(hidden[tokens], first, None if up_bias is None else up_bias[e])
        y = F.linear(function(z), second, None if down_bias is None else down_bias[e])
        result = result.index_add(0, tokens, (y * scores[tokens, places, None]).to(result.dtype))
    return result


def gradients(y: Tensor, tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
    weight = torch.arange(y.numel(), device=y.device).view(y.shape).sin().to(y.dtype)
    return torch.autograd.grad((y * weight).sum(), [t for t in tensors if t is not None])


def chosen(tokens: int, most: int = E) -> Tensor:
    """Different experts for each token."""
    return torch.stack([torch.randperm(most, generator=torch.Generator().manual_seed(t))[:K] for t in range(tokens)])


ROUTINGS: dict[str, Tensor] = {
    "all": chosen(13),
    "some have none": chosen(13, 3),
    "all to two": torch.tensor([[3, 1]]).expand(13, K),
    "one token": chosen(1),
    "no token": torch.zeros((0, K), dtype=torch.int64),
    "int32": chosen(13).int(),
}


def same(function: Callable[..., Tensor], kind: str, weights: Weights, index: Tensor, tolerance: dict[str, float], dtype: torch.dtype | None = None) -> None:
    torch.manual_seed(1)
    device = weights.up.device
    hidden = torch.randn((index.shape[0], H), dtype=torch.float64).to(device, weights.up.dtype).requires_grad_()
    scores = torch.rand(index.shape, dtype=torch.float64).to(device, dtype or weights.up.dtype).requires_grad_()
    tensors = (hidden, scores, *weights[:4])
    y, wanted = function(hidden, index.to(device), scores, weights), looped(KINDS[kind][1], hidden, index.to(device), scores, weights)
    torch.testing.assert_close(y, wanted, **tolerance)
    torch.testing.assert_close(gradients(y, tensors), gradients(wanted, tensors), **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(function(hidden, index.to(device), scores, weights), wanted, **tolerance)


TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def run(kind: str, bias: bool = False, foreign: bool = False) -> Callable[..., Tensor]:
    text = KINDS[kind][0].replace("(mm)", "(mm + bias)") if bias else KINDS[kind][0]
    return lambda hidden, index, scores, weights: experts(hidden, index, scores, weights, Options(text, foreign=foreign))


@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_all_gradients(kind: str, bias: bool, transposed: bool) -> None:
    same(run(kind, bias), kind, made(kind, bias, transposed), ROUTINGS["all"], TIGHT)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_without_tokens_and_few_tokens(routing: str) -> None:
    same(run("halves", bias=True), "halves", made(bias=True), ROUTINGS[routing], TIGHT)


def test_tokens_of_experts_that_are_elsewhere_are_0() -> None:
    index = ROUTINGS["all"].clone()
    index[::2, 0] = E
    index[5] = E
    same(run("halves", bias=True, foreign=True), "halves", made(bias=True), index, TIGHT)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_dtypes_with_scores_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    same(run("halves", bias=True), "halves", made(bias=True, dtype=dtype), ROUTINGS["all"], {"rtol": tolerance, "atol": 4 * tolerance}, torch.float32)


def test_frozen_weights_take_no_products(ran: list[str]) -> None:
    """As with adapters elsewhere in a model: of six products four are left."""
    weights = Weights(*(t if t is None else t.detach() for t in made()[:4]))
    hidden = torch.randn((13, H), dtype=torch.float64, requires_grad=True)
    y = run("halves")(hidden, ROUTINGS["all"], torch.rand((13, K), dtype=torch.float64), weights)
    y.sum().backward()
    assert hidden.grad is not None and len([text for text in ran if text]) == 4


def test_the_second_product_of_the_backward_gives_the_derivative_and_the_scores(ran: list[str]) -> None:
    weights = made()
    hidden, scores = torch.randn((13, H), dtype=torch.float64), torch.rand((13, K), dtype=torch.float64, requires_grad=True)
    run("halves")(hidden, ROUTINGS["all"], scores, weights).sum().backward()
    assert len(ran) == 5 and "dsilu" in ran[2] and "dscore" in ran[2], "no pass of its own"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own of autograd functions that it compiles
def test_compiled_in_one_piece() -> None:
    torch._dynamo.reset()
    for bias, foreign in ((False, False), (True, True)):
        compiled = torch.compile(run("halves", bias, foreign), backend="aot_eager", fullgraph=True)
        same(compiled, "halves", made(bias=bias), ROUTINGS["all"], TIGHT)


def test_autocast_casts_tokens_and_weights() -> None:
    weights = made(dtype=torch.float32)
    hidden, scores = torch.randn(13, H), torch.rand(13, K)
    with torch.autocast("cpu", torch.bfloat16):
        y = run("halves")(hidden, ROUTINGS["all"], scores, weights)
    halved = Weights(*(t if t is None else t.bfloat16() for t in weights[:4]))
    assert y.dtype == torch.float32 and torch.equal(y, run("halves")(hidden.bfloat16(), ROUTINGS["all"], scores, halved).float())
    y.sum().backward()
    assert weights.up.grad is not None and weights.up.grad.dtype == torch.float32


def test_what_does_not_fit() -> None:
    weights, hidden = made(), torch.randn((13, H), dtype=torch.float64)
    scores = torch.rand((13, K), dtype=torch.float64)
    call = run("halves")
    with pytest.raises(CallError, match=r"index \[13, 2\] and scores \[12, 2\]: \[T, H\], \[T, k\] and \[T, k\] were expected"):
        call(hidden, ROUTINGS["all"], scores[1:], weights)
    with pytest.raises(CallError, match=r"index is torch\.float64: integers were expected"):
        call(hidden, scores, scores, weights)
    with pytest.raises(CallError, match=r"which do not fit each other and tokens of 15 numbers"):
        call(hidden[:, 1:], ROUTINGS["all"], scores, weights)
    with pytest.raises(CallError, match=r"has inputs score\[m\] and perhaps bias, and beside those gate"):
        experts(hidden, ROUTINGS["all"], scores, weights, Options("mm * gate[m,n] * score[m]"))
    with pytest.raises(CallError, match="unfuse the model there"):
        torch.func.grad(lambda x: call(x, ROUTINGS["all"], scores, weights).sum())(hidden)
    x = hidden.clone().requires_grad_()
    with pytest.raises(CallError, match="no second derivative"):
        torch.autograd.grad(call(x, ROUTINGS["all"], scores, weights).sum(), x, create_graph=True)


# -- the layer


def test_a_mixture_beside_torch() -> None:
    torch.manual_seed(0)
    moe = epigen.nn.MoE(H, I, E, K, "gelu", dtype=torch.float64)
    x = torch.randn((3, 4, H), dtype=torch.float64, requires_grad=True)
    probabilities = torch.softmax(moe.gate(x.view(-1, H)), -1)
    scores, index = probabilities.topk(K)
    weights = Weights(moe.experts.gate_up_proj, None, moe.experts.down_proj, None)
    gated: Callable[[Tensor], Tensor] = lambda z: F.gelu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]  # noqa: E731
    for normalize in (True, False):
        moe.normalize = normalize
        wanted = looped(gated, x.view(-1, H), index, scores / scores.sum(-1, keepdim=True) if normalize else scores, weights).view(x.shape)
        tensors = (x, *moe.parameters())
        torch.testing.assert_close(moe(x), wanted, **TIGHT)
        torch.testing.assert_close(gradients(moe(x), tensors), torch.autograd.grad((wanted * _sines(wanted)).sum(), tensors, retain_graph=True), **TIGHT)
    assert sorted(moe.state_dict()) == ["experts.down_proj", "experts.gate_up_proj", "gate.weight"]


def _sines(y: Tensor) -> Tensor:
    return torch.arange(y.numel()).view(y.shape).sin().to(y.dtype)


def test_a_mixture_that_cannot_be() -> None:
    with pytest.raises(CallError, match="top_k=6: of 5 experts a token goes to one at least, and to each at most once"):
        epigen.nn.MoE(H, I, E, 6)
    with pytest.raises(CallError, match="unknown activation 'swish'"):
        epigen.nn.MoE(H, I, E, K, "swish")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": 4 * tolerance}
    for routing in ("all", "some have none", "one token"):
        same(run(kind, bias=True), kind, made(kind, True, dtype=dtype, device="cuda"), ROUTINGS[routing], close, torch.float32)
    index = ROUTINGS["all"].clone()
    index[::2, 0] = E
    same(run(kind, bias=True, foreign=True), kind, made(kind, True, dtype=dtype, device="cuda"), index, close, torch.float32)


@pytest.mark.gpu
def test_a_mixture_in_a_cuda_graph() -> None:
    """Nothing waits for the device: what may not be captured would be refused."""
    moe, x = epigen.nn.MoE(64, 128, 8, 2, device="cuda", dtype=torch.bfloat16), torch.randn((256, 64), device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = moe(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe(x)
        graph.replay()
    assert torch.equal(y, wanted)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("dynamic", [False, True])
def test_torchs_products_of_groups_under_the_backend(dynamic: bool) -> None:
    """A gated unit with rows behind the last end, forward and backward, in epigen's kernels. Several calls, as what is launched without asking is known after the first ones."""
    torch._dynamo.reset()
    groups, k, n = 4, 128, 64
    parameters = [torch.nn.Parameter((torch.randn(shape, device="cuda") / k**0.5).bfloat16()) for shape in ((groups, 2 * n, k), (groups, k, n))]

    class Unit(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = parameters

        def forward(self, x: Tensor, score: Tensor, where: Tensor) -> Tensor:
            behind = (torch.arange(x.shape[0], device=x.device) >= where[-1])[:, None]
            gate, value = torch._grouped_mm(x, self.up.mT, offs=where).chunk(2, -1)
            return torch._grouped_mm(torch.nn.functional.silu(gate) * value, self.down.mT, offs=where).masked_fill(behind, 0.5) * score[:, None]

    unit, seen = Unit(), list[Any]()
    compiled = torch.compile(unit, backend=backend, dynamic=dynamic, fullgraph=True, options={"report": seen.extend})
    for rows, *ends in [(256, 40, 40, 200, 256), (256, 0, 5, 7, 200), (256, 1, 2, 3, 4), *([(384, 384, 384, 384, 384)] if dynamic else [])]:
        where = torch.tensor(ends, dtype=torch.int32, device="cuda")
        for _ in range(3):
            x, score = torch.randn((rows, k), device="cuda").bfloat16().requires_grad_(), torch.rand(rows, device="cuda").requires_grad_()
            results = []
            for run in (compiled, unit):
                y = run(x, score, where)
                found = torch.autograd.grad(y.float().square().sum(), [x, score, *parameters])
                results.append([y.detach(), found[0][: ends[-1]], *found[1:]])  # behind it the gradient of x is undefined
            for mine, theirs in zip(*results, strict=True):
                assert (mine.double() - theirs.double()).norm() <= 2e-2 * theirs.double().norm() + 1e-6
    assert any("silu" in s.program and s.groups == groups for s in seen)
