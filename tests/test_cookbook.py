"""docs/cookbook.md: each row's torch expression and its program are the same, results and gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from checkout import ROOT
from torch import Tensor

import epigen
from epigen.api import graph_of
from epigen.errors import DerivationError
from epigen.ir import reference
from epigen.ir.graph import BITS, PACKED, Graph, Node, periodic
from epigen.ops import TABLE

PAGE = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
M, N, K = 6, 20, 16
EXTENTS = {"m": M, "n": N, "k": K}
ROW = re.compile(r"^\| `(.*?)` \| `(.*?)` \| .* \|$", re.MULTILINE)
ROWS = [
    (heading, torch_text, program)
    for heading, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for torch_text, program in ROW.findall(section)
]
QUANTISED, EIGHT_BITS = "Quantised outputs, without gradients", "Operands of 8 bits"
UNTRAINED = ("running_mean", "running_var", "valid", "table")  # of these torch has no gradient, or they are frozen
PERIOD = 3


def grid(seed: int, *shape: int) -> Tensor:
    """Eighths from -2 to 2: products and sums of them are exact in fp32, in whatever order they are taken. Some are 0, where functions bend."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)).float() / 8


def operand(node: Node, seed: int) -> Tensor | float:
    """What the program's input is, as the torch expression takes it: packed masks are booleans there."""
    shape = [PERIOD if i in periodic(node.indices, node.periods) else EXTENTS[i] for i in node.indices]
    if node.op == BITS or node.name == "valid":
        return grid(seed, *shape) > 0
    if not shape:
        return 0.5
    if node.name == "labels" and node.indices == "m":
        return torch.randint(0, N, shape, generator=torch.Generator().manual_seed(seed))
    if re.match(r"scale_|step|rstd|running_var", node.name):  # what is divided by, or is a size: a power of two, so that this is exact as well
        return torch.exp2(grid(seed, *shape).round())
    return (4 if node.name == "gate" else 1) * grid(seed, *shape)  # past a gate's limits


def inputs_of(graph: Graph) -> dict[str, Any]:
    return {node.name: operand(node, seed) for seed, node in enumerate(graph.inputs(), 10)}


def operands(heading: str) -> tuple[Tensor, Tensor]:
    x, weight = grid(0, M, K), grid(1, N, K)
    return ((8 * x).to(torch.int8), (8 * weight).to(torch.int8)) if heading == EIGHT_BITS else (x, weight)


def by_torch(text: str, x: Tensor, weight: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    y = F.linear(x.float(), weight.float())
    names = {"F": F, "torch": torch, "x": x, "weight": weight, "y": y, **inputs}
    if "bias" in inputs:
        names["h"] = y + inputs["bias"]
    # the page's own expressions; torch's C code imports by what whoever calls it has
    found = eval(text, {"__builtins__": {"__import__": __import__}}, names)
    return found if isinstance(found, tuple) else (found,)


def by_epigen(graph: Graph, found: Any) -> list[Tensor]:
    several = found if isinstance(found, tuple) else (found,)
    packed = [graph.nodes[o.node].kind == PACKED for o in graph.outputs]
    return [reference.unpack(one, N) if is_packed else one for one, is_packed in zip(several, packed, strict=True)]


def given(graph: Graph, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs as epigen takes them."""
    packed = {node.name for node in graph.inputs() if node.op == BITS}
    return {name: reference.pack(value) if name in packed else value for name, value in inputs.items()}


def test_there_are_rows_in_every_section() -> None:
    headings = {heading for heading, _, _ in ROWS}
    listed = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(listed) > 100
    assert headings == set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE)) - {"What the language cannot do yet"}
    assert len({program for heading, _, program in ROWS if heading != EIGHT_BITS}) == sum(heading != EIGHT_BITS for heading, _, _ in ROWS)


def test_every_activation_of_the_table_has_a_row() -> None:
    used = {node.op for _, _, program in ROWS for node in graph_of(program).nodes}
    assert {name for name, op in TABLE.items() if op.group == "activation"} <= used


@pytest.mark.parametrize(("heading", "torch_text", "program"), ROWS, ids=[program for _, _, program in ROWS])
def test_a_program_is_its_torch_expression(heading: str, torch_text: str, program: str, one_thread: None) -> None:  # noqa: ARG001
    graph = graph_of(program)
    (x, weight), inputs = operands(heading), inputs_of(graph)
    expected = by_torch(torch_text, x, weight, inputs)
    found = by_epigen(graph, epigen.compile(program)(x, weight.T, **given(graph, inputs)))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-5, atol=1e-5)


TRAINED = [row[1:] for row in ROWS if row[0] not in (QUANTISED, EIGHT_BITS)]


@pytest.mark.parametrize(("torch_text", "program"), TRAINED, ids=[program for _, program in TRAINED])
def test_its_gradients_are_torchs(torch_text: str, program: str, one_thread: None) -> None:  # noqa: ARG001
    graph = graph_of(program)
    x, weight = (t.requires_grad_() for t in operands(""))
    inputs = inputs_of(graph)
    leaves = [x, weight]
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name not in UNTRAINED:
            leaves.append(value.requires_grad_())
    expected = [one for one in by_torch(torch_text, x, weight, inputs) if one.requires_grad]
    ours = given(graph, inputs)
    found = by_epigen(graph, epigen.linear(x, weight, ours.pop("bias", None), program, inputs=ours))
    found = [one for one in found if one.requires_grad]
    assert [one.shape for one in found] == [one.shape for one in expected] != []
    arriving = [grid(seed, *one.shape).to(one.dtype) for seed, one in enumerate(expected, 50)]
    wanted = torch.autograd.grad(expected, leaves, arriving, allow_unused=True)
    reached = torch.autograd.grad(found, leaves, arriving, allow_unused=True)
    for mine, theirs in zip(reached, wanted, strict=True):
        zero = theirs if theirs is not None else mine
        assert zero is not None
        torch.testing.assert_close(torch.zeros_like(zero) if mine is None else mine, torch.zeros_like(zero) if theirs is None else theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("program", [program for heading, _, program in ROWS if heading == QUANTISED])
def test_what_is_said_to_have_no_gradients_has_none(program: str) -> None:
    with pytest.raises(DerivationError):
        epigen.derive(program, wrt="mm")
