"""Graph -> graph: each pass keeps what the oracle computes, and equal programs end as equal graphs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from golden import Golden
from hypothesis import given
from hypothesis import strategies as st
from programs import programs
from torch import Tensor

from epigen import settings
from epigen.codegen import schedules
from epigen.codegen.lower import lower
from epigen.codegen.render import Renderer
from epigen.codegen.spec import Signature
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, UINT8, DType
from epigen.errors import CheckError
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.check import check
from epigen.ir.graph import Graph
from epigen.ir.passes import fold_constants, normalise, order, rounded
from epigen.lang.parser import parse
from epigen.lang.syntax import Assign, Expr, Program, to_text

M, N, K = 5, 11, 4


def graph_of(text: str) -> Graph:
    return normalise(check(parse(text)))


def operands(seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=source, dtype=torch.float64), torch.randn(K, N, generator=source, dtype=torch.float64)


def inputs_of(graph: Graph, seed: int = 1) -> dict[str, Tensor]:
    # each name's values depend on the name alone, so that a pass may drop or reorder inputs
    made = {}
    for node in graph.inputs():
        source = torch.Generator().manual_seed(seed + sum(map(ord, node.name)))
        if node.op == g.BITS:
            made[node.name] = reference.pack(torch.rand(M, N, generator=source) > 0.5)
        else:
            made[node.name] = torch.randn([{"m": M, "n": N}[i] for i in node.indices], generator=source, dtype=torch.float64)
    return made


def outputs_of(graph: Graph) -> list[Tensor]:
    a, b = operands()
    values = reference.node_values(graph, a, b, inputs_of(graph), torch.float64)
    return [values[o.node] for o in graph.outputs]


PASSES = [fold_constants, order, normalise]


@pytest.mark.parametrize("rewrite", PASSES, ids=lambda f: f.__name__)
@given(text=programs(tame=True))
def test_a_pass_keeps_the_oracles_value(rewrite: Callable[[Graph], Graph], text: str) -> None:
    graph = check(parse(text))
    changed = rewrite(graph)
    assert [(o.name, o.dtype) for o in changed.outputs] == [(o.name, o.dtype) for o in graph.outputs]
    for found, expected in zip(outputs_of(changed), outputs_of(graph), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == torch.uint8 or found.isfinite().all()


@pytest.mark.parametrize("rewrite", PASSES, ids=lambda f: f.__name__)
@given(text=programs())
def test_a_pass_leaves_its_argument_and_repeats_to_nothing(rewrite: Callable[[Graph], Graph], text: str) -> None:
    graph = check(parse(text))
    before = (graph.nodes, graph.outputs)
    once = rewrite(graph)
    assert (graph.nodes, graph.outputs) == before
    assert rewrite(once) == once


@given(programs())
def test_a_normal_graph_has_no_dead_and_no_double_node(text: str) -> None:
    graph = graph_of(text)
    used = {o.node for o in graph.outputs} | {a for n in graph.nodes for a in n.args}
    assert used == set(range(len(graph.nodes)))
    assert len(set(graph.nodes)) == len(graph.nodes)
    assert all(a < number for number, node in enumerate(graph.nodes) for a in node.args)


def test_an_unused_assignment_cannot_be_written(golden: Golden) -> None:
    with golden.raises(CheckError):
        check(parse("z = exp(mm); mm"))


# -- canonical order


def _spaced(text: str, source: random.Random) -> str:
    """The text with other blanks and line ends; a line's indentation would be Python's business."""
    spread = re.sub(r"[ ,;()+/-]", lambda m: m[0] if source.random() < 0.5 else f" {m[0]} ", to_text(parse(text)).replace("; ", " ;\n"))
    return re.sub(r"(^|\n) +", r"\1", spread)


@given(programs(), st.integers(0, 2**32))
def test_spacing_does_not_matter(text: str, seed: int) -> None:
    spaced = _spaced(text, random.Random(seed))
    assert graph_of(spaced) == graph_of(text)
    assert graph_of(spaced).text == graph_of(text).text


def _read(expr: Expr, names: set[str]) -> set[str]:
    return set(re.findall(r"\w+", to_text(Program((), (expr,), "")))) & names


def _shuffled(program: Program, source: random.Random) -> Program:
    """The assignments in another order that still binds each name before its use."""
    names = {a.name for a in program.assigns}
    left, placed = list(program.assigns), list[Assign]()
    while left:
        bound = {a.name for a in placed}
        ready = [a for a in left if _read(a.value, names) <= bound]
        chosen = source.choice(ready)
        left.remove(chosen)
        placed.append(chosen)
    return Program(tuple(placed), program.outputs, "")


@given(programs(), st.integers(0, 2**32))
def test_the_order_of_assignments_does_not_matter(text: str, seed: int) -> None:
    other = to_text(_shuffled(parse(text), random.Random(seed)))
    assert graph_of(other) == graph_of(text)


@given(programs())
def test_names_of_temporaries_do_not_matter(text: str) -> None:
    # each assigned name that is no output
    program = parse(text)
    shown = {to_text(Program((), (o,), "")) for o in program.outputs}
    renamed = text
    for assign in program.assigns:
        if assign.name not in shown:
            renamed = re.sub(rf"\b{assign.name}\b", f"other_{assign.name}", renamed)
    assert graph_of(renamed) == graph_of(text)


def test_a_name_is_as_good_as_its_expression() -> None:
    assert graph_of("z = mm + bias; relu(z) * z") == graph_of("relu(mm + bias) * (mm + bias)")


def test_equal_programs_render_equal_bytes() -> None:
    renderer = Renderer(settings.templates_dir())
    config = schedules.config("tiled", block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3)
    signature = Signature(FP16, FP16, (("bias", FP16),))
    first, second = (lower(graph_of(t), signature) for t in ("z = mm+bias;relu(z)", "\n  z = (mm + bias)\n  relu( z )  # as above\n"))
    assert first == second
    assert renderer.render(first, config).digest == renderer.render(second, config).digest


def test_the_order_of_assignments_shows_in_the_header_alone() -> None:
    signature = Signature(FP16, FP16, (("bias", FP16), ("alpha", None)))
    first, second = (lower(graph_of(t), signature) for t in ("x = mm * alpha; y = relu(bias); x + y", "y = relu(bias); x = mm * alpha; x + y"))
    assert replace(first, program="", name="") == replace(second, program="", name="")


# -- what is rounded to 16 bits


@pytest.mark.parametrize(
    ("text", "dtypes", "found"),
    [
        ("gelu(mm + bias)", [FP16], {"gelu_16bit"}),
        ("gelu(mm + bias)", [FP8E4M3], {"gelu_16bit"}),
        ("gelu(mm + bias)", [FP32], {"gelu"}),
        ("gelu(mm + bias)", [INT8], {"gelu"}),  # a half of a step is no small error
        ("z = mm + bias; gelu(z), z", [BF16, FP32], {"gelu_16bit"}),
        ("y = gelu(mm); y, cast(y, fp32)", [BF16, FP32], {"gelu"}),
        ("y = gelu(mm); y, sum(y, m)", [BF16, FP32], {"gelu_16bit"}),
        ("sum(gelu(mm), m), mm", [FP32, BF16], {"gelu"}),  # nothing rounds what is summed
        ("y = gelu(mm); y, max(y, m)", [BF16, FP32], {"gelu"}),
        ("y = gelu(mm); y, bitmask(y > 0.5)", [BF16, UINT8], {"gelu"}),
        ("where(gelu(mm) > 0.5, mm, 0)", [BF16], {"gelu"}),
        ("where(mm > 0.5, gelu(mm), -gelu(-mm) * up[m,n] / s)", [BF16], {"gelu_16bit"}),
        ("gelu(mm) + residual[m,n]", [BF16], {"gelu"}),  # the sum may be small beside it
        ("cast(gelu(mm), bf16) + residual[m,n]", [FP32], {"gelu_16bit"}),
        ("cast(gelu(mm), int8) + residual[m,n]", [BF16], {"gelu"}),
        ("gelu(gelu(mm))", [BF16], {"gelu", "gelu_16bit"}),
        ("dz = dgelu(mm, z[m,n]); dz, bgrad(dz)", [FP16, FP32], {"dgelu_16bit"}),
        ("dz = dgelu(mm, z[m,n]); dz, bgrad(dz)", [FP32, FP32], {"dgelu"}),
        ("dz = dgelu_tanh(mm, z[m,n]); dz, bgrad(dz)", [BF16, FP32], {"dgelu_tanh_16bit"}),
        ("dgelu_tanh(mm, z[m,n])", [FP32], {"dgelu_tanh"}),
    ],
)
def test_gelu_is_cheaper_where_nothing_but_rounded_results_come_of_it(text: str, dtypes: list[DType], found: set[str]) -> None:
    graph = graph_of(text)
    assert {n.op for n in rounded(graph, dtypes).nodes if "gelu" in n.op} == found
    assert rounded(rounded(graph, dtypes), dtypes) == rounded(graph, dtypes)


def test_what_has_become_one_is_computed_once() -> None:
    graph = rounded(graph_of("gelu(mm), gelu_16bit(mm) * 2"), [FP16, FP16])
    assert [n.op for n in graph.nodes].count("gelu_16bit") == 1
    assert len(graph.outputs) == 2 and order(graph) == graph


# -- common parts and constants


@pytest.mark.parametrize(
    ("text", "op", "count"),
    [
        ("relu(mm + bias) + relu(mm + bias)", "relu", 1),
        ("x = exp(mm); y = exp(mm); x * y", "exp", 1),
        ("sum(mm * mm, m), sum(mm * mm, n), mm * mm", "mul", 1),
        ("sum(mm, m) + sum(mm, m)", "reduce", 1),
        ("bitmask(mm > 0), where(mm > 0, mm, 0)", "gt", 1),
        ("mm ** 2 * mm ** 4", "mul", 3),
        ("mm * (1 + 1) + mm * 2", "mul", 1),
        ("mm + 1, mm + 2", "add", 2),
        ("mm - bias, bias - mm", "sub", 2),
        ("cast(mm, fp16) + 0, cast(mm, bf16) + 0", "cast", 2),
    ],
)
def test_equal_parts_are_computed_once(text: str, op: str, count: int) -> None:
    assert sum(n.op == op for n in graph_of(text).nodes) == count


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("-(2 - 5)", 3),
        ("1 / 4", 0.25),
        ("scale(3, 0.5)", 1.5),
        ("2 ** 8", 256),
        ("(1 + 1) ** 2", 4),
        ("0.1 + 0.2", 0.1 + 0.2),
        ("1e38 * 2", 2e38),
        ("0 * -1", 0),
        ("-0.0", 0),
        ("2e-38 + 0", 2e-38),
    ],
)
def test_constants_are_folded(text: str, value: float) -> None:
    graph = graph_of(f"mm + ({text})")
    assert [n.op for n in graph.nodes] == ["operand", "operand", "dot", "constant", "add"]
    assert repr(graph.nodes[3].value) == repr(float(value))


@pytest.mark.parametrize("text", ["1 / 0", "3e38 * 10", "-3e38 - 3e38", "1e-30 * 1e-30", "1 / 2e-38 / 2e-38"])
def test_what_fp32_cannot_hold_is_left_to_the_kernel(text: str) -> None:
    graph = graph_of(f"mm + ({text})")
    assert any(n.op in ("div", "mul", "sub") for n in graph.nodes)
    assert all(abs(n.value) <= FP32.largest for n in graph.nodes)


@pytest.mark.parametrize("text", ["mm + exp(1)", "mm + relu(-1)", "where(1 > 2, mm, 0)"])
def test_only_arithmetic_is_folded(text: str) -> None:
    # a function of constants is rounded as the kernel rounds it
    assert any(n.op in ("exp", "relu", "gt") for n in graph_of(text).nodes)


def test_zero_of_either_sign_is_one_constant() -> None:
    # equal nodes merge, and 0.0 == -0.0: whichever came first would decide the sign for both
    graph = graph_of("mm / (0 * -1) + mm / (0 * 1) + where(mask, -0.0, 0.0)")
    assert [repr(n.value) for n in graph.nodes if n.op == "constant"] == ["0.0"]


def test_a_long_chain_of_assignments_needs_no_recursion() -> None:
    text = "z0 = mm + 1; " + "; ".join(f"z{i} = exp(z{i - 1}) + {i}" for i in range(1, 450)) + "; z449"
    assert len(graph_of(text).nodes) > 1300
