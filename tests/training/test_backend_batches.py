"""Batches of products under `torch.compile(model, backend=backend)`: what is taken of them, why others are left, and that all is what eager torch computes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from beside_eager import agree, agreeing, drawn, made
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from under_torch import APART

from epigen.training.backend import backend
from epigen.training.report import Seen

pytestmark = [APART, pytest.mark.filterwarnings("ignore")]  # of the packages that the models come from

NOTHING, NEXT = "nothing elementwise follows it", "the kernel that reads it next does what follows it as well"
ATTENTION = drawn((2, 4, 5, 8), (2, 4, 8, 16))


def first(found: Mapping[str, str]) -> str:
    """What became of the first product."""
    return next(iter(found.values()))


def test_a_product_of_matrices_with_what_follows_it() -> None:
    found = agree(lambda a, b: F.gelu(torch.einsum("bmk,bkn->bmn", a, b) * 0.3), *drawn((3, 5, 8), (3, 8, 16)))
    assert found["forward (3, 5, 16, 8)"] == "mm, gelu(mm * 0.3)"
    added = agree(lambda y, a, b: F.relu(torch.baddbmm(y, a, b, beta=0.5, alpha=2)), *drawn((3, 5, 6), (3, 5, 8), (3, 8, 6)))
    assert added["forward (3, 5, 6, 8)"] == "relu(2 * mm + 0.5 * x0[m,n])" and added["backward (3, 5, 8, 6)"] == "mm * 2"
    assert first(agree(lambda y, a, b: F.relu(torch.baddbmm(y, a, b)), *drawn((6,), (3, 5, 8), (3, 8, 6)))) == "relu(mm + x0[n])"
    assert first(agree(lambda a, b: F.tanh(a @ b), *drawn((4, 1, 8), (4, 8, 16)))) == "tanh(mm)"


@pytest.mark.parametrize(
    ("shape", "index"), [((3, 1, 16), "n"), ((3, 5, 1), "m"), ((3, 1, 1), "m"), ((3, 5, 16), "m,n"), ((5, 16), "m,n"), ((16,), "n"), ((5, 1), "m"), ((1, 1, 1), "")]
)  # fmt: skip
def test_inputs_of_each_product_or_of_all(shape: tuple[int, ...], index: str) -> None:
    """A number of each product is a row of it, in which all elements are the same."""
    found = first(agree(lambda a, b, c: F.silu(torch.bmm(a, b) * c), *drawn((3, 5, 8), (3, 8, 16), shape)))
    assert found == f"mm, silu(mm * x0{f'[{index}]' if index else ''})"


@pytest.mark.parametrize(
    ("shape", "program"),
    [
        ((5, 16), "tanh(mm * 0.3 + x0[m,n])"),
        ((2, 1, 1, 16), "tanh(mm * 0.3 + x0[n])"),
        ((1, 4, 1, 16), "tanh(mm * 0.3 + x0[n])"),
        ((2, 4, 5, 16), "tanh(mm * 0.3 + x0[m,n])"),
        ((2, 1, 1, 1), "tanh(mm * 0.3 + x0[m])"),
    ],
)
def test_masks_of_attention(shape: tuple[int, ...], program: str) -> None:
    """Those of rows or of columns that some heads share are copied for all."""
    assert first(agree(lambda q, k, mask: F.tanh(q @ k * 0.3 + mask), *ATTENTION, *drawn(shape))) == program


def test_a_mask_without_matrices_of_each_product_is_left() -> None:
    found = first(agree(lambda q, k, mask: F.tanh(q @ k + mask), *ATTENTION, *drawn((2, 1, 5, 16))))
    assert found.startswith(f"{NOTHING} that a program computes: its argument") and "a matrix of which some products share each" in found
    one = drawn((1, 4, 5, 8), (1, 4, 8, 16), (4, 5, 16))
    assert first(agree(lambda q, k, mask: F.tanh(q @ k + mask), *one)) == "tanh(mm + x0[m,n])"


def test_matrices_in_another_order() -> None:
    heads = agree(lambda q, k: F.tanh((q @ k).transpose(1, 2) * 0.3), *ATTENTION)
    assert first(heads) == "tanh(mm * 0.3)"
    moved = agree(lambda a, b, c: F.tanh((a @ b) * c.transpose(0, 1)), *drawn((4, 5, 8), (4, 8, 16), (5, 4, 16)))
    assert first(moved) == "mm, tanh(mm * x0[m,n])"
    apart = agree(lambda q, k, c: F.tanh((q @ k) * c.transpose(1, 2)), *ATTENTION, *drawn((2, 5, 4, 16)))
    assert first(apart).endswith("whose matrices do not lie evenly in memory")
    joined = agree(lambda a, b, c: F.tanh((a @ b).view(-1, 16) * c), *drawn((4, 5, 8), (4, 8, 16), (20, 1)))
    assert first(joined) == "mm, tanh(mm * x0[m])"
    added = agree(lambda a, b, c: F.tanh((a @ b).view(2, 10, 16) + c), *drawn((4, 5, 8), (4, 8, 16), (2, 10, 16)))
    assert first(added) == "tanh(mm + x0[m,n])"
    mixed = agree(lambda a, b, c: F.tanh((a @ b).view(4, 80) * c), *drawn((4, 5, 8), (4, 8, 16), (80,)))
    assert first(mixed).endswith("moves elements between products, rows and columns")


def test_operands_that_are_shared() -> None:
    """All rows are those of one product where they lie as one matrix's do; else each product has its own, and nothing is copied."""
    a, shared = drawn((3, 5, 8), (8, 6))
    assert agree(lambda x, w: F.relu(torch.bmm(x, w.expand(3, 8, 6))), a, shared)["forward (15, 6, 8)"] == "relu(mm)"
    assert agree(lambda x, w: F.relu(torch.bmm(x.mT, w.expand(3, 8, 6))), *drawn((3, 8, 5), (8, 6)))["forward (3, 5, 6, 8)"] == "relu(mm)"
    assert agree(lambda x, w: F.relu(torch.bmm(x.expand(3, 5, 8), w)), *drawn((5, 8), (3, 8, 6)))["forward (3, 5, 6, 8)"] == "relu(mm)"


@pytest.mark.parametrize("dynamic", [None, True])
def test_rows_of_which_many_share_a_gate(dynamic: bool | None) -> None:
    """They are parted into a batch, in which each product has one, as adaptive norms have it: no matrix is made of it."""
    shapes = [[(b, s, 8), (16, 8), (16,), (b, 1, 16), (b, s, 16)] for b, s in ((4, 5), (3, 7))]
    again = tuple(drawn(*shapes[1])) if dynamic else ()
    found = agree(lambda x, w, c, gate, y: y + gate * F.linear(x, w, c), *drawn(*shapes[0]), dynamic=dynamic, again=again)
    assert first(found) == "v = mm + x0[n]; out0 = v; out0, x2[m,n] + x1[n] * v"
    several = agree(lambda x, w, g, h: F.tanh(x @ w * g + h), *drawn((2, 3, 5, 8), (8, 16), (2, 1, 1, 16), (2, 3, 1, 16)))
    assert first(several) == "mm, tanh(mm * x0[n] + x1[n])"
    assert first(agree(lambda x, w, c: F.tanh(x @ w + c), *drawn((4, 5, 8), (8, 16), (5, 16)))) == "tanh(mm + x0[m,n])"  # another row each


def test_extents_that_vary() -> None:
    """Products, their rows, or both."""

    def run(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.gelu(torch.bmm(a, b) * 0.3 + c)

    for again in (drawn((7, 5, 8), (7, 8, 16), (7, 1, 16)), drawn((3, 9, 8), (3, 8, 16), (3, 1, 16)), drawn((7, 9, 8), (7, 8, 16), (7, 1, 16))):
        assert first(agree(run, *drawn((3, 5, 8), (3, 8, 16), (3, 1, 16)), dynamic=True, again=tuple(again))) == "mm, gelu(mm * 0.3 + x0[n])"
    heads = [drawn((b, 4, s, 8), (b, 4, 8, s), (b, 1, 1, s)) for b, s in ((2, 5), (3, 7))]
    assert first(agree(lambda q, k, mask: F.tanh(q @ k * 0.3 + mask), *heads[0], dynamic=True, again=tuple(heads[1]))) == "tanh(mm * 0.3 + x0[n])"


def test_bits_of_a_batch() -> None:
    found = agree(lambda a, b, w: torch.bmm(F.relu(torch.bmm(a, b)), w), *drawn((3, 5, 8), (3, 8, 16), (3, 16, 8)))
    assert found["forward (3, 5, 16, 8)"] == "v = relu(mm); out0 = v; out0, bitmask(~(v <= 0))"
    assert found["backward (3, 5, 16, 8)"] == "drelu(mm, bits(x0))"


class Experts(nn.Module):
    """As many tokens for each: a gated unit with biases, and what each token's result counts."""

    def __init__(self, experts: int = 3, width: int = 8, hidden: int = 16):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, hidden) / 3) for _ in range(2))
        self.down, self.bias = nn.Parameter(torch.randn(experts, hidden, width) / 3), nn.Parameter(torch.randn(experts, hidden))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate = torch.einsum("ecd,edh->ech", x, self.gate) + self.bias[:, None]
        hidden = F.silu(gate) * torch.einsum("ecd,edh->ech", x, self.up)
        return x + torch.einsum("ech,ehd->ecd", hidden, self.down) * weights[..., None]


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_experts(rest: str) -> None:
    """Gate, residual and what a token counts ride in their products, and in the backward the gate's derivative and each expert's gradient of its bias."""
    torch.manual_seed(0)
    module, x, weights = Experts(), torch.randn(3, 5, 8), torch.rand(3, 5)
    seen: list[Seen] = []
    torch._dynamo.reset()
    call = torch.compile(module, backend=backend, options={"rest": rest, "report": seen.extend, "fx_graph_cache": False})
    results = []
    for model in (module, call):
        given = x.clone().requires_grad_()
        module.zero_grad()
        y = model(given, weights)
        y.square().sum().backward()
        results.append([y.detach(), given.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert {s.program for s in seen if s.taken} == {
        "mm, silu(mm + x0[n]) * x1[m,n]",
        "x1[m,n] + mm * x0[m]",
        "v = dsilu(mm * x1[m,n], x2[m,n]); out1 = v; mm * x0[m,n], out1, bgrad(v)",
        "x0[m,n] + mm + x1[m,n]",
    }
    assert {s.shape for s in seen} == {(3, 5, 16, 8), (3, 5, 8, 16), (3, 8, 16, 5), (3, 16, 8, 5)}


def test_experts_whose_matrices_each_token_brings() -> None:
    """Mixtral's, where they are gathered for each."""
    model = made("mixtral")
    model.model.set_experts_implementation("batched_mm")
    _, seen = agreeing(model)
    assert all(s.why for s in seen if not s.taken) and any(len(s.shape) == 4 for s in seen)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5_relu", "vit", "llama"])
def test_attention_that_is_written_out(name: str) -> None:
    """Softmax reads its scores in any case and scales and masks them as it does; what it weighs is copied to where heads lie side by side."""
    model = made(name)
    if name == "bert":
        model.inputs["attention_mask"][0, 4:] = 0
    model.model.set_attn_implementation("eager")
    batches = [s for s in agreeing(model)[1] if len(s.shape) == 4]
    assert len(batches) >= 2 * 2 * 3 and not any(s.taken for s in batches)
    scores = [s for s in batches if s.graph == "forward" and s.shape[2] != 8]
    assert len(scores) >= 2 and {s.why.partition(" that a program")[0] for s in scores} <= {NEXT, NOTHING}


def test_multihead_attention_with_weights() -> None:
    """Its mask is added by baddbmm, for which torch copies it to where the scores go."""
    torch.manual_seed(0)
    module, mask = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(5, 5)
    seen: list[Seen] = []
    torch._dynamo.reset()
    call = torch.compile(module, backend=backend, options={"rest": "eager", "report": seen.extend})
    results = []
    for model in (module, call):
        given = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y, weights = model(given, given, given, attn_mask=mask, need_weights=True)
        (y.square().sum() + weights.square().sum()).backward()
        results.append([y.detach(), weights.detach(), given.grad])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    batches = {(s.graph, s.shape): s.program or s.why for s in seen if len(s.shape) == 4}
    assert batches["forward", (8, 5, 5, 4)] == "mm + x0[m,n]" and len(batches) == 5 and batches["backward", (8, 5, 4, 5)] == NEXT
