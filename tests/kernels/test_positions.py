"""Numbers of rows and columns as values: what a program may say of them, what they are in each schedule and product, and what their derivatives read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from compiling import compiled
from golden import Golden
from specs import RENDERER, spec_of, spec_over
from torch import Tensor

import epigen
from epigen.codegen.spec import MOST_POSITIONS, KernelConfig
from epigen.codegen.standalone import standalone
from epigen.db.problem import graph_digest
from epigen.dtypes import BF16, FP16
from epigen.errors import CallError
from epigen.gpus import TARGETS
from epigen.ir import bound
from epigen.ir.program import graph_of
from epigen.perf.traffic import traffic
from epigen.runtime.ahead import Job
from epigen.runtime.verify import Oracle, Sample
from epigen.training import sharding

Z = "z = where(n <= m, mm, -inf)"

CONFIGS: dict[str, KernelConfig] = {
    "tiled": cases.SMALL,
    "the last block": cases.tiled(16, 32, 32, prefetch=1, fused_finalize=1),
    "library": cases.LIBRARY,
    "split_k": cases.split_k(16, 32, 32, fused_finalize=1),
    "persistent": cases.persistent(64, 32, flatten=0, subtiles=2, prefetch=1),
}


def by_torch(mm: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of its rows and columns, each as a matrix or a column of the product's dtype."""
    m, n = mm.shape[-2:]
    return torch.arange(m)[:, None].to(mm.dtype), torch.arange(n)[None, :].to(mm.dtype)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "where(n <= m, mm, -inf)": lambda mm, m, n: torch.where(n <= m, mm, -torch.inf),
    "where((n <= m) & (m - n < window), mm, -1e4)": lambda mm, m, n, window: torch.where((n <= m) & (m - n < window), mm, -1e4),
    "mm - slope[m] * (m - n)": lambda mm, m, n, slope: mm - slope[:, None] * (m - n),
    "sum(where(n == labels[m], mm, 0), n)": lambda mm, _, n, labels: torch.where(n == labels[:, None], mm, 0).sum(1),
    "mm - where(n == labels[m], 1, 0)": lambda mm, _, n, labels: mm - (n == labels[:, None]).to(mm.dtype),
    f"{Z}; logsumexp(z, n) - sum(where(n == labels[m], mm, 0), n)": lambda mm, m, n, labels: (
        torch.logsumexp(torch.where(n <= m, mm, -torch.inf), 1) - torch.where(n == labels[:, None], mm, 0).sum(1)
    ),
    "sum(mm, n) * m, sum(mm, m) + n, sum(mm * m)": lambda mm, m, n: (mm.sum(1) * m[:, 0], mm.sum(0) + n[0], (mm * m).sum()),
}


def given(m: int = 70, n: int = 45, k: int = 20, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    labels = torch.randint(0, n, (m,))
    labels[0], labels[1], labels[2] = -100, 2**40, 2**24 + 1
    return torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), {"window": 7, "slope": torch.rand(m), "labels": labels}


def called(kernel: epigen.Kernel, a: Tensor, b: Tensor, inputs: dict[str, Any], **more: Any) -> list[Tensor]:
    found = kernel(a, b, **{node.name: inputs[node.name] for node in kernel.graph.inputs()}, **more)
    return [found] if isinstance(found, Tensor) else list(found)


def expected(text: str, mm: Tensor, inputs: dict[str, Any]) -> list[Tensor]:
    named = {node.name: inputs[node.name] for node in graph_of(text).inputs()}
    wanted = PROGRAMS[text](mm, *by_torch(mm), **named)
    return [wanted] if isinstance(wanted, Tensor) else list(wanted)


# -- the language


def test_which_position_is_meant_is_told_apart() -> None:
    texts = ("mm * m", "mm * n", "mm * row[m]", "mm * extent(m)", "mm - m", "mm - n")
    assert len({graph_digest(graph_of(text)) for text in texts}) == len(texts)
    assert graph_of("row = m; mm * row") == graph_of("mm * m") and graph_of("mm * m").text == "mm * m"


def test_after_a_reduction_they_are_those_of_what_it_leaves() -> None:
    assert [f.indices for f in spec_of("sum(mm, n) * m, sum(mm, m) * n").finishes] == ["n", "m"]


def test_infinity_is_a_number() -> None:
    mm = torch.tensor([[1.0, -2.0]])
    found = epigen.compile("mm * inf, -inf + mm, cast(maximum(mm, -inf), fp32)")(mm.T @ mm, torch.eye(2))
    assert torch.equal(found[0], torch.tensor([[torch.inf, -torch.inf], [-torch.inf, torch.inf]]))
    assert torch.equal(found[1], torch.full((2, 2), -torch.inf)) and torch.equal(found[2], mm.T @ mm)


# -- what they are


@pytest.mark.parametrize("text", PROGRAMS)
def test_the_reference(text: str) -> None:
    a, b, inputs = given(dtype=torch.float64)
    inputs["slope"] = inputs["slope"].double()
    torch.testing.assert_close(called(epigen.compile(text), a, b, inputs), expected(text, a @ b, inputs))


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("text", PROGRAMS)
def test_kernels(text: str, config: str) -> None:
    """In tiles and their parts, in what completes reductions, and where no label fits: int64 and beyond what fp32 counts to."""
    a, b, inputs = given(n=48)  # rows that TMA addresses
    kernel = epigen.compile(text, backend="interpreter", config=CONFIGS[config])
    torch.testing.assert_close(called(kernel, a, b, inputs), expected(text, a @ b, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("leads", [((3,), (3,)), ((2, 3), ()), ((), (2,))], ids=str)
def test_each_product_of_a_batch_has_its_own(leads: tuple[tuple[int, ...], tuple[int, ...]], config: str) -> None:
    a, b = torch.randn(*leads[0], 40, 16), torch.randn(*leads[1], 16, 48)
    mm = a @ b
    m, n = by_torch(mm)
    wanted = [torch.where(n <= m, mm, -1.0), (mm * n).sum(-1) + m[:, 0]]
    text = "where(n <= m, mm, -1), sum(mm * n, n) + m"
    for kernel in (epigen.compile(text), epigen.compile(text, backend="interpreter", config=CONFIGS[config])):
        torch.testing.assert_close(list(kernel(a, b)), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.triton
def test_over_a_product_that_is_given() -> None:
    mm = torch.randn(33, 20)
    m, n = by_torch(mm)
    for backend in ("reference", "interpreter"):
        assert torch.equal(epigen.compile("where(n <= m, mm, -inf)", backend=backend).over(mm), torch.where(n <= m, mm, -torch.inf))
    assert spec_over("mm * m", FP16).positions == {"offs_m"}


def test_a_row_by_itself_knows_its_number() -> None:
    a, b = torch.randn(5, 64).bfloat16(), torch.randn(64, 6).bfloat16()
    text = "where(n <= m, mm, -1), sum(mm, n) * m"
    plain, invariant = (epigen.compile(text, invariant=i)(a.float(), b.float()) for i in (None, "m"))
    torch.testing.assert_close(tuple(plain), tuple(invariant))
    assert torch.equal(epigen.compile(text, invariant="m")(a[:3], b)[0], epigen.compile(text, invariant="m")(a, b)[0][:3])


def test_rounded_as_eager_torch_rounds() -> None:
    x = torch.randn(300, 6).bfloat16()
    found = epigen.compile("relu(mm) + m", rounding="eager")(x, torch.eye(6).bfloat16())
    assert torch.equal(found, torch.relu(x) + torch.arange(300)[:, None])


@pytest.mark.parametrize("index", ["m", "n"])
def test_there_are_no_more_than_fp32_counts(index: str, golden: Golden) -> None:
    kernel = epigen.compile(f"mm * {index}")
    long, short = torch.empty(MOST_POSITIONS + 1, 1, device="meta"), torch.empty(2, 1, device="meta")
    a, b = (long, short) if index == "m" else (short, long)
    with golden.raises(CallError, index):
        kernel(a, b.T)
    assert kernel(b, a.T).shape == (b.shape[0], a.shape[0])
    kernel(a[:-1], b.T[:, :-1] if index == "n" else b.T)


def test_what_infinities_come_to_is_promised_exactly() -> None:
    """A row of which all is masked: any other answer is wrong."""
    text = "logsumexp(where(n < m, mm, -inf), n)"
    a, b = torch.randn(4, 8), torch.randn(8, 5)
    (answer,) = Oracle.of(graph_of(text), Sample(a, b, {})).products[0]
    assert answer.value[0] == -torch.inf and answer.bound[0] == 0 and (answer.bound[1:] > 0).all()
    right = epigen.compile(text)(a, b)
    assert bound.compare(right, answer).ok and not bound.compare(right.nan_to_num(neginf=-1e30), answer).ok


# -- kernels


_PERIODS = ("mm + pos[m % P, n]", "mm * s[m, n % Q], sum(mm * row[m % P], n) * row[m % P], bitmask(mm > col[n % Q])")
_DERIVED = ("dmm = where(n <= m, mm, 0) * 2; dmm, bgrad(dmm)", "where(n < m, mm + grad[m] * exp(z[m,n] - y[m]), 0)")


@pytest.mark.triton
@pytest.mark.parametrize("text", [*PROGRAMS, *_DERIVED, *_PERIODS, "bitmask(n <= m), max(m - n, n), where(n == labels[m], 1, 0), mm"])
def test_kernels_compile_ahead(text: str) -> None:
    in_groups = [
        cases.warp_specialized(128, 128, 64, 3, subtiles=2, prefetch=1, fused_finalize=1),
        cases.warp_specialized(128, 64, 64, 3, pingpong=1, fused_finalize=1),
        cases.warp_specialized(128, 128, 64, 2, pingpong=1, subtiles=4),
        cases.warp_specialized(prefetch=1, splits=2, tma_store=0),
        cases.persistent(64, 64, flatten=0, subtiles=2, prefetch=1, fused_finalize=1),
        cases.tiled(32, 64, 32, fused_finalize=1),
    ]
    spec = spec_of(text, BF16, layout="nt", tma=("a", "b"), k_multiple=64)
    jobs = [Job(RENDERER.render(spec, config), TARGETS["sm_90"], "nt") for config in in_groups]
    jobs += [Job(RENDERER.render(spec, cases.split_k()), TARGETS[other], "nt") for other in ("sm_80", "gfx942")]
    jobs.append(Job(RENDERER.render(spec_of(text, BF16, index_bits=64), cases.SMALL), TARGETS["sm_90"], "nn"))
    compiled(jobs)


@pytest.mark.triton
@pytest.mark.parametrize("config", [cases.tiled(32, 64, 32, fused_finalize=1), cases.warp_specialized(128, 64, 64, pingpong=1, fused_finalize=1)], ids=str)
def test_what_a_tile_and_the_last_block_both_compute_has_two_names(config: KernelConfig) -> None:
    """It is a row there and a column here, or of another layout, and Triton gives one name no two types."""
    text = "row = scale_a[m] * 2; col = scale_b[n] * 2; mm * row * col, sum(mm, m) * col, sum(mm, n) * row"
    compiled([Job(RENDERER.render(spec_of(text, layout="nt", tma=("a", "b", "out0")), config), TARGETS["sm_90"], "nt")])


@pytest.mark.triton
@pytest.mark.parametrize("config", ["tiled", "the last block"])
def test_a_file_of_its_own(config: str, tmp_path: Path, golden: Golden) -> None:
    kernel = epigen.compile(f"{Z} + pos[m % P, n] * col[n % Q]; z, logsumexp(z, n) + m * labels[m % P]", config=CONFIGS[config])
    plan, file = kernel.plan((64, 48, 32), dtype=FP16), tmp_path / "causal.py"
    text = standalone(RENDERER, kernel.graph, plan.spec, plan.choice, plan.rendered)
    file.write_text(text)
    run = subprocess.run([sys.executable, file], capture_output=True, text=True, env={"TRITON_INTERPRET": "1", "PATH": ""})
    assert run.returncode == 0, run.stderr
    golden("\n".join(line for line in text.split("\n") if "2^24" in line), config)


def test_they_are_loaded_from_nowhere() -> None:
    """And cost no more than the instructions of the comparison."""
    shape = (4096, 4096, 512)
    with_mask, without = (traffic(spec_of(text), shape) for text in ("where(n <= m, mm, -inf)", "relu(mm)"))
    assert with_mask.bytes == without.bytes and with_mask.unfused_bytes > without.unfused_bytes


def test_no_process_has_a_part_of_what_it_would_have_to_count() -> None:
    splits = {
        text: [way.outputs for way in sharding.ways(text, 2)]
        for text in ("relu(mm)", "relu(mm) * m", "relu(mm) * n", "where(n <= m, mm, 0)", "relu(mm) + t[m % P, n]")
    }
    assert [len(ways) for ways in splits.values()] == [3, 2, 2, 2, 2]  # of the last one each process may have a summand
    assert splits["relu(mm) * m"][1] != splits["relu(mm) * n"][1]


# -- inputs that begin anew


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 7, 70, 100])
def test_rows_begin_anew(rows: int, config: str) -> None:
    """Also of a table that is longer than it is read."""
    a, b, _ = given(n=48)
    pos, row, col, both = torch.randn(rows, 48), torch.randn(rows).half(), torch.randn(5), torch.randn(rows, 5)
    m, n = torch.arange(70) % rows, torch.arange(48) % 5
    z = a @ b + pos[m] * both[m][:, n]
    wanted = [z, z.sum(1) * row[m], z.sum(0) - col[n]]
    text = "z = mm + pos[m % P, n] * both[m % P, n % Q]; z, sum(z, n) * row[m % P], sum(z, m) - col[n % Q]"
    inputs = {"pos": pos.T.contiguous().T, "row": row, "col": col, "both": both}
    for kernel in (epigen.compile(text), epigen.compile(text, invariant="m"), epigen.compile(text, backend="interpreter", config=CONFIGS[config])):
        torch.testing.assert_close(called(kernel, a, b, inputs), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.triton
def test_rows_begin_anew_in_each_product_of_a_batch() -> None:
    a, b, pos = torch.randn(3, 10, 16), torch.randn(16, 8), torch.randn(4, 8)
    for pos, text in ((torch.randn(4, 8), "mm + pos[m % P, n]"), (torch.randn(3, 4, 8), "mm + pos[m % P, n]")):
        wanted = a @ b + pos[..., torch.arange(10) % 4, :]
        for backend in ("reference", "interpreter"):
            torch.testing.assert_close(epigen.compile(text, backend=backend)(a, b, pos=pos), wanted, rtol=1e-4, atol=1e-4)


def test_of_one_letter_all_have_as_many(golden: Golden) -> None:
    a, b = torch.randn(6, 4), torch.randn(4, 8)
    kernel = epigen.compile("mm + pos[m % P, n] * row[m % P]")
    with golden.raises(CallError, "two extents"):
        kernel(a, b, pos=torch.ones(3, 8), row=torch.ones(2))
    with golden.raises(CallError, "none"):
        kernel(a, b, pos=torch.ones(0, 8), row=torch.ones(0))
    with golden.raises(CallError, "columns"):
        kernel(a, b, pos=torch.ones(3, 7), row=torch.ones(3))


def test_letters_are_no_part_of_a_digest() -> None:
    same = ("mm + pos[m % P, n] * row[m % P]", "mm + x[m % Q, n] * y[m % Q]")
    others = ("mm + pos[m % P, n] * row[m % Q]", "mm + pos[m,n] * row[m]", "mm + pos[m, n % P] * row[m]", "mm + pos[m,n] * row[m % P]")
    assert len({graph_digest(graph_of(text)) for text in same}) == 1
    assert len({graph_digest(graph_of(text)) for text in (same[0], *others)}) == 5


BEGUN: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "rows of a tile": ("gelu(mm + pos[m % P, n]) * pos[m % P, n]", lambda z, pos, **_: torch.nn.functional.gelu(z + pos) * pos),
    "what arrives": ("mm + pos[m % P, n]", lambda z, pos, **_: z + pos),
    "a row": ("mm * row[m % P]", lambda z, row, **_: z * row[:, None]),
    "a column": ("tanh(mm + col[n % Q])", lambda z, col, **_: torch.tanh(z + col)),
    "both": ("mm * both[m % P, n % Q] + col[n % Q]", lambda z, both, col, **_: z * both + col),
    "a reduction": ("sum(mm * pos[m % P, n], n), mm", lambda z, pos, **_: (z * pos).sum(1)),
    "a part": ("x, y = halves(mm * wide[m % P, n]); silu(x) * y", lambda z, wide, **_: (lambda y: torch.nn.functional.silu(y[:, :3]) * y[:, 3:])(z * wide)),
    "steps alone": ("where(pos[m % P, n] > 0, mm, 0)", lambda z, pos, **_: torch.where(pos > 0, z, 0.0)),
}


@pytest.mark.parametrize("name", BEGUN)
@pytest.mark.parametrize("rows", [7, 14, 5, 20, 1])
def test_gradients_of_what_begins_anew_are_summed(name: str, rows: int) -> None:
    """Over all rows of x that share an element, also where the last are fewer, and 0 of what is not read; however often the layer was called."""
    text, function = BEGUN[name]
    x, weight = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    shapes = {"pos": (rows, 6), "row": (rows,), "col": (4,), "both": (rows, 4), "wide": (rows, 6)}
    named = {n: torch.randn(shape, dtype=torch.float64, requires_grad=True) for n, shape in shapes.items() if f"{n}[" in text}
    m, n = torch.arange(14) % rows, torch.arange(6) % 4
    read = {"pos": lambda t: t[m], "row": lambda t: t[m], "col": lambda t: t[n], "both": lambda t: t[m][:, n], "wide": lambda t: t[m]}
    for _ in range(4):
        found = epigen.linear(x, weight, epilogue=text, inputs=named)
        found = found[0] if isinstance(found, tuple) else found
        wanted = function((x @ weight.T).flatten(0, 1), **{k: read[k](t) for k, t in named.items()}).view(found.shape)
        torch.testing.assert_close(found, wanted)
        arriving = torch.randn_like(wanted)
        leaves = (x, weight, *named.values())
        expected = torch.autograd.grad(wanted, leaves, arriving, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(torch.autograd.grad(found, leaves, arriving, allow_unused=True, materialize_grads=True), expected)


def test_a_chain_with_what_begins_anew() -> None:
    """The next layer takes the derivative over."""
    from epigen.training.chain import chain
    from epigen.training.layer import Link

    x, one, other, pos = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((2, 7, 4), (6, 4), (5, 6), (7, 6)))
    found = chain(x, [Link(one, {"pos": pos}, "gelu(mm + pos[m % P, n])"), Link(other, {}, "mm")])
    wanted = torch.nn.functional.gelu(x @ one.T + pos) @ other.T
    torch.testing.assert_close(found, wanted)
    leaves, arriving = (x, one, other, pos), torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, arriving), torch.autograd.grad(wanted, leaves, arriving))


def test_a_derivation_says_what_is_summed(golden: Golden) -> None:
    text = "gelu(mm + pos[m % P, n]) * pos[m % P, n]"
    golden(epigen.derive(text))
    golden(epigen.derive(text, wrt="mm"), "without it")
    golden(epigen.derive("mm + pos[m % P, n]"), "what arrives")


# -- derivatives


@pytest.mark.parametrize(
    "text",
    ["where(n <= m, mm * 2, -inf)", f"{Z}; logsumexp(z, n), z", "gelu(mm) - slope[m] * (m - n)", "relu(mm) * (n + 1), sum(where(n == labels[m], mm, 0), n)"],
)
def test_derivatives_are_programs_of_positions(text: str, golden: Golden) -> None:
    """A mask is computed again, and not read."""
    golden(epigen.derive(text), text)


@pytest.mark.parametrize("text", [text for text in PROGRAMS if not text.startswith("sum(")])  # of which no gradient needs a tile
def test_gradients_are_torchs(text: str) -> None:
    a, b, inputs = given(9, 7, 5, torch.float64)
    inputs["slope"] = inputs["slope"].double().requires_grad_()
    x, weight = a.requires_grad_(), b.T.contiguous().requires_grad_()
    named = {node.name: inputs[node.name] for node in graph_of(text).inputs()}
    found = epigen.linear(x, weight, epilogue=text, inputs=named)
    (wanted,) = expected(text, x @ weight.T, inputs)
    torch.testing.assert_close(found, wanted)
    leaves = [x, weight, *([inputs["slope"]] if "slope" in named else [])]
    arriving = torch.cos(torch.arange(found.numel()).double()).view(found.shape)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, arriving), torch.autograd.grad(wanted, leaves, arriving))


def test_a_layer_counts_all_rows_of_x() -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    found = epigen.linear(x, weight, epilogue="mm * m")
    torch.testing.assert_close(found, (x @ weight.T) * torch.arange(6).view(2, 3, 1))
