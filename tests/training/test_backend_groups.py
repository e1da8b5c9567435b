"""torch's products of groups under `torch.compile(model, backend=backend)`: what is taken of them with what follows, and that all is what eager torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from beside_eager import drawn
from expert_models import MODELS, experts_of, made
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from under_torch import APART

import epigen
from epigen.training import behind
from epigen.training.backend import backend
from epigen.training.regions import Region
from epigen.training.report import Seen

pytestmark = [APART, pytest.mark.filterwarnings("ignore")]  # of the packages that the models come from

GROUPS, K, N = 4, 32, 24
NOTHING, NEXT = "nothing elementwise follows it", "the kernel that reads it next does what follows it as well"
BOTH = "v = dot(a, x0[k,n]); out1 = v; mm, out1, silu(mm) * v"
DERIVATIVE = "out_first = dsilu(mm * x1[m,n], x0[m,n]); out_second = mm * silu(x0[m,n]); halves(out_first, out_second)"

Experts = Callable[..., Tensor]


def near(found: Any, expected: Any) -> None:
    """Of bf16, which eager torch rounds to after each operation."""
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y.double()).norm() <= 2e-2 * y.double().norm() + 1e-6 and x.shape == y.shape and x.dtype == y.dtype


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [(t / shape[-1] ** 0.5).to(dtype) for t, shape in zip(drawn(*shapes), shapes, strict=True)]


def ends(*where: int) -> Tensor:
    return torch.tensor(where, dtype=torch.int32)


def agree(function: Experts, calls: list[tuple[Tensor, ...]], **options: Any) -> list[Seen]:
    """That results and gradients of each call are eager's. Returns what became of the products."""
    torch._dynamo.reset()
    seen: list[Seen] = []
    model = torch.compile(function, backend=backend, fullgraph=True, options={"rest": "eager", "report": seen.extend}, **options)
    for given in calls:
        results = []
        for run in (model, function):
            own = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
            y = run(*own)
            y.float().square().sum().backward()
            results.append([y.detach(), *(t.grad for t in own if t.grad is not None)])
        near(*results)
    return seen


def programs(seen: list[Seen], graph: str) -> list[str]:
    return [s.program or s.why for s in seen if s.graph == graph]


def gated(x: Tensor, up: Tensor, down: Tensor, score: Tensor, where: Tensor) -> Tensor:
    """Experts as transformers has them, of rows that are sorted."""
    gate, value = torch._grouped_mm(x, up.transpose(-2, -1), offs=where).chunk(2, -1)
    return torch._grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), offs=where) * score[:, None]


def given(rows: int, *where: int) -> tuple[Tensor, ...]:
    x, up, down, score = weights((rows, K), (GROUPS, 2 * N, K), (GROUPS, K, N), (rows,))
    return x, up, down, score, ends(*where)


class Layer(nn.Module):
    """Whose weights have fixed extents, also where others vary."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = map(nn.Parameter, weights((GROUPS, 2 * N, K), (GROUPS, K, N)))

    def forward(self, x: Tensor, score: Tensor, where: Tensor) -> Tensor:
        return gated(x, self.up, self.down, score, where)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_of_experts(dynamic: bool) -> None:
    """Gate and up are one kernel, and so is what their derivative makes of the product by which the gradient comes. Of any number of rows, and of experts without any."""
    layer, seen = Layer(), list[Seen]()
    model = torch.compile(layer, backend=backend, fullgraph=True, options={"rest": "eager", "report": seen.extend}, dynamic=dynamic)
    for rows, *where in [(16, 3, 3, 9, 16), (24, 0, 20, 20, 24), (40, 40, 40, 40, 40)] if dynamic else [(16, 3, 3, 9, 16), (16, 0, 0, 0, 16)]:
        results = []
        for run in (model, layer):
            x, score = (t.requires_grad_() for t in weights((rows, K), (rows,)))
            y = run(x, score, ends(*where))
            results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, score, *layer.parameters()])])
        near(*results)
    assert programs(seen, "forward") == [BOTH, BOTH, "mm, mm * x0[m]"]
    assert sorted(programs(seen, "backward")) == sorted([DERIVATIVE, NOTHING, NOTHING, NOTHING])
    assert {s.groups for s in seen} == {GROUPS} and [s.shape for s in seen[:3]] == [(16, N, K), (16, N, K), (16, K, N)]
    assert seen[0].flops == 2 * 16 * N * K


def test_weights_of_any_extents() -> None:
    """As inputs of the graph, of which the first call's are counted."""
    seen = agree(gated, [given(16, 3, 3, 9, 16), given(24, 0, 20, 20, 24)], dynamic=True)
    assert {s.groups for s in set(seen)} == {GROUPS} and "mm, mm * x0[m]" in programs(seen, "forward")


def test_inference_alone() -> None:
    torch._dynamo.reset()
    seen: list[Seen] = []
    model, given_ = torch.compile(gated, backend=backend, options={"rest": "eager", "report": seen.extend}), given(16, 3, 3, 9, 16)
    with torch.no_grad():
        near([model(*given_)], [gated(*given_)])
    assert programs(seen, "inference") == ["silu(mm) * dot(a, x0[k,n])"] * 2 + ["mm * x0[m]"]
    rows = str(epigen.report(model)).splitlines()
    assert any("16x24x32 in 4" in row and "silu" in row for row in rows) and rows[-1].startswith("3 of 3 products taken (100 % of their FLOPs)")


def _two(x: Tensor, gate: Tensor, up: Tensor, where: Tensor) -> Tensor:
    return F.gelu(torch._grouped_mm(x, gate, offs=where)) * torch._grouped_mm(x, up, offs=where)


def _other_ends(x: Tensor, gate: Tensor, up: Tensor, where: Tensor) -> Tensor:
    return F.gelu(torch._grouped_mm(x, gate, offs=where)) * torch._grouped_mm(x, up, offs=where + 0)


def _biased(x: Tensor, up: Tensor, bias: Tensor, where: Tensor) -> Tensor:
    rows = torch.searchsorted(where, torch.arange(x.shape[0]), right=True)
    gate, value = (torch._grouped_mm(x, up.transpose(-2, -1), offs=where) + bias[rows]).split(N, -1)
    return gate.clamp(max=1) * (value + 1)


def _in_turn(x: Tensor, up: Tensor, bias: Tensor, where: Tensor) -> Tensor:
    both = torch._grouped_mm(x, up.transpose(-2, -1), offs=where) + bias[0]
    return torch.sigmoid(both[..., ::2]) * both[..., 1::2]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (_two, ((16, K), (GROUPS, K, N), (GROUPS, K, N)), ["gelu(mm) * dot(a, x0[k,n])"] * 2),
        (_other_ends, ((16, K), (GROUPS, K, N), (GROUPS, K, N)), ["gelu(mm) * x0[m,n]", NOTHING]),
        (_biased, ((16, K), (GROUPS, 2 * N, K), (GROUPS, 2 * N)), ["minimum(mm + x1[m,n], 1) * (dot(a, x0[k,n]) + x2[m,n] + 1)"] * 2),
        (_in_turn, ((16, K), (GROUPS, 2 * N, K), (GROUPS, 2 * N)), ["sigmoid(mm + x1[n]) * (dot(a, x0[k,n]) + x2[n])"] * 2),
    ],
    ids=["two weights", "of other groups", "biases", "in turn"],
)
def test_gates_of_all_kinds(function: Experts, shapes: tuple[tuple[int, ...], ...], expected: list[str]) -> None:
    tensors = (*weights(*shapes), ends(3, 3, 9, 16))
    assert programs(agree(function, [tensors]), "forward")
    torch._dynamo.reset()
    seen: list[Seen] = []
    with torch.no_grad():
        near([torch.compile(function, backend=backend, options={"rest": "eager", "report": seen.extend})(*tensors)], [function(*tensors)])
    assert programs(seen, "inference") == expected


def test_what_lies_so_that_no_kernel_reads_it_fast_stays_one_product() -> None:
    """gpt-oss's gate, of every other column of a weight that lies as it is multiplied. Its biases are added by the kernel."""

    def unit(x: Tensor, up: Tensor, bias: Tensor, where: Tensor) -> Tensor:
        rows = torch.searchsorted(where, torch.arange(x.shape[0]), right=True)
        both = torch._grouped_mm(x, up, offs=where) + bias[rows]
        return torch.sigmoid(both[..., ::2]) * both[..., 1::2]

    seen = agree(unit, [(*weights((16, K), (GROUPS, K, 2 * N), (GROUPS, 2 * N)), ends(3, 3, 9, 16))])
    assert [s.shape for s in seen if s.graph == "forward"] == [(16, 2 * N, K)]


def test_products_of_other_kinds_are_named() -> None:
    """Batches are taken as such; of groups of columns there is no program, and none along k where nothing follows it."""

    def several(x: Tensor, y: Tensor, up: Tensor, where: Tensor) -> tuple[Tensor, ...]:
        of_columns = torch._grouped_mm(up, y, offs=where)
        return (
            torch.relu(torch._grouped_mm(up, up.transpose(-2, -1))),
            of_columns,
            torch._grouped_mm(x.t(), x, offs=where),
            torch._grouped_mm(x.t(), x, offs=where) * 2,
        )

    torch._dynamo.reset()
    seen: list[Seen] = []
    tensors = *weights((16, K), (K, 16), (GROUPS, N, K)), ends(3, 3, 9, 16)
    with torch.no_grad():
        near(torch.compile(several, backend=backend, options={"rest": "eager", "report": seen.extend})(*tensors), several(*tensors))
    assert programs(seen, "inference") == ["it is of groups of columns, and a program's are of rows or along k", "relu(mm)", NOTHING, "mm * 2"]
    assert [s.shape for s in seen] == [(GROUPS * N, 16, K), (GROUPS, N, N, K), (K, K, 16), (K, K, 16)]
    assert [s.flops for s in seen[2:]] == [2 * K * K * 16] * 2


def _filled(x: Tensor, up: Tensor, down: Tensor, score: Tensor, where: Tensor) -> Tensor:
    """As transformers has it where experts are shared out over several devices, with other numbers than 0."""
    behind = (torch.arange(x.shape[0]) >= where[-1])[:, None]
    gate, value = torch._grouped_mm(x.masked_fill(behind, 0), up.transpose(-2, -1), offs=where).masked_fill(behind, 2.0).chunk(2, -1)
    return torch._grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), offs=where).masked_fill(behind, 0.5) * score[:, None]


@pytest.mark.parametrize("read", [False, True])
def test_rows_behind_the_last_end_are_what_they_are_filled_with(read: bool) -> None:
    """And computed of it. What only products of groups read is left undefined: no pass of its own fills it."""

    def all_rows(x: Tensor, up: Tensor, where: Tensor) -> Tensor:
        behind = (torch.arange(x.shape[0]) >= where[-1])[:, None]
        z = torch._grouped_mm(x.masked_fill(behind, 0), up.transpose(-2, -1), offs=where).masked_fill(behind, 2.0)
        return F.silu(z) * z

    x, up, down, score, where = given(24, 3, 3, 9, 16)
    seen = agree(all_rows, [(x, up, where)]) if read else agree(_filled, [(x, up, down, score, where)])
    assert all("where(" in text for text in programs(seen, "forward"))


def test_how_many_passes_fill_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind the last product, which others read than products of groups."""
    mended: list[tuple[str, tuple[int, ...]]] = []
    once = behind._mended

    def noted(graph: Any, region: Region, node: Any, *rest: Any) -> Any:
        mended.append((region.imported.text, tuple(node.meta["val"].shape)))
        return once(graph, region, node, *rest)

    monkeypatch.setattr(behind, "_mended", noted)
    x, up, down, score, where = given(24, 3, 3, 9, 16)
    agree(_filled, [(x, up, down, score, where)])
    assert [shape for _, shape in mended] == [(24, K)] * len(mended) and not any("silu" in text for text, _ in mended), mended


# -- transformers


def _outcome(run: Any, module: Any, hidden: Tensor, index: Tensor, scores: Tensor) -> list[Tensor]:
    own = [hidden.clone().requires_grad_(), scores.clone().requires_grad_()]
    y = run(own[0], index, own[1])
    found = torch.autograd.grad(y.float().square().sum(), [*own, *module.parameters()])
    return [y.detach(), *found]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_experts_of_transformers(name: str, dtype: torch.dtype) -> None:
    """In bf16 it calls torch's products, and in other dtypes a loop over groups of its own, of which nothing is left."""
    model: Any = made(name).to(dtype)
    model.set_experts_implementation("grouped_mm")
    module = next(iter(experts_of(model).values()))
    count, width = module.num_experts, model.config.hidden_size
    torch._dynamo.reset()
    seen: list[Seen] = []
    run = torch.compile(module, backend=backend, fullgraph=True, options={"rest": "eager", "report": seen.extend}, dynamic=True)
    for tokens, highest in ((12, count), (7, count - 1)):
        index = torch.rand(tokens, highest).topk(2).indices
        hidden, scores = torch.randn(tokens, width).to(dtype), torch.rand(tokens, 2).to(dtype)
        results = [_outcome(call, module, hidden, index, scores) for call in (run, module)]
        if dtype == torch.float32:
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        else:
            near(*results)
    grouped = [s for s in seen if s.groups]
    assert {s.groups for s in grouped} == {count}
    if dtype == torch.float32:
        assert len(grouped) in (6, 7) and all(s.taken for s in grouped) and len(grouped) == len(seen)
    elif name != "gpt_oss":
        assert BOTH in programs(seen, "forward") and DERIVATIVE in programs(seen, "backward")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_of_which_others_are_elsewhere(dtype: torch.dtype) -> None:
    """Rows of theirs are behind the last end, and transformers fills them with 0."""
    model: Any = made("mixtral").to(dtype)
    model.set_experts_implementation("grouped_mm")
    module: Any = next(iter(experts_of(model).values()))
    module._is_expert_parallel = True
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend, fullgraph=True, options={"rest": "eager"})
    index = torch.tensor([[0, 4], [4, 4], [3, 1], [2, 4], [4, 1]])
    hidden, scores = torch.randn(5, model.config.hidden_size).to(dtype), (torch.rand(5, 2) * (index < 4)).to(dtype)
    near(*(_outcome(call, module, hidden, index, scores) for call in (run, module)))


@pytest.mark.slow
def test_a_model_with_experts() -> None:
    model: Any = made("qwen3_moe").to(torch.float32)
    model.set_experts_implementation("grouped_mm")
    torch._dynamo.reset()
    seen: list[Seen] = []
    run = torch.compile(model, backend=backend, fullgraph=True, options={"rest": "eager", "report": seen.extend})
    results = []
    for call in (run, model):
        model.zero_grad()
        y = zoo.first(call(input_ids=zoo._tokens()))
        zoo.scalar(y).backward()
        results.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert sum(s.taken for s in seen if s.groups) == 14


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_line_of_inductors_code_runs_it(dynamic: bool) -> None:
    torch._dynamo.reset()
    model = torch.compile(gated, backend=backend, dynamic=dynamic, options={"fx_graph_cache": False})
    with torch.no_grad():
        tensors = given(16, 3, 3, 9, 16)
        found, (code,) = run_and_get_code(model, *tensors)
        for y in (found, model(*tensors), model(*tensors)):
            near([y], [gated(*tensors)])
    assert f"static={not dynamic})" in code and "torch.ops.epigen.fused.default(" not in code
