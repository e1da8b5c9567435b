"""Graph -> text -> graph: the identity, for programs that users write and for names that they might choose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from programs import programs

from epigen.errors import near_miss
from epigen.ir.check import PREDECLARED, check, refused_name
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.ir.unparse import Names, unparse
from epigen.lang.parser import parse


def graph_of(text: str) -> Graph:
    return normalise(check(parse(text)))


@settings(deadline=None)
@given(programs() | programs(second=True) | programs(positions=True) | programs(drawn=True) | programs(blocks=True))
def test_a_graph_written_back_is_the_same_graph(text: str) -> None:
    graph = graph_of(text)
    again = graph_of(unparse(graph))
    assert again == graph
    assert [o.name for o in again.outputs] == [o.name for o in graph.outputs]
    assert unparse(again) == unparse(graph) == again.text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("relu(mm+bias[n])", "relu(mm + bias)"),
        ("z = mm + gate[m,n]; relu(z), bitmask(z>0), sum(z, m), sum(z)", "z = mm + gate[m,n]; relu(z), bitmask(z > 0), bgrad(z), sum(z)"),
        ("cast(mm ** 3, bf16)", "cast(mm * (mm * mm), bf16)"),
        ("(mm * 2 + 1) * (mm * 2 + 1)", "v = mm * 2 + 1; v * v"),
        ("y = cast(relu(mm), fp16); y, y * 2", "v = relu(mm); y = cast(v, fp16); y, cast(v, fp16) * 2"),
        ("z = mm; w = z; w", "w = mm; w"),
        ("y = mm - (1 - s); out0 = -y; out0, y", "y = mm - (1 - s); -y, y"),
        ("out = relu(mm); out, mm", "out = relu(mm); out, mm"),
        ("where(n<=m, mm, -inf)", "where(n <= m, mm, -inf)"),
        ("row = m; z = mm + (row - n); z * row, sum(z, n) * row", "z = mm + (m - n); z * m, sum(z, n) * m"),
        ("mm+pos[m%P,n]*residual[m, n % Q2]", "mm + pos[m % P, n] * residual[m, n % Q2]"),
        ("dot(a*sa[m, k/128],b*s[k / 64,n/1])*t[m/3,n/5]", "dot(a * sa[m,k/128], b * s[k/64,n]) * t[m/3,n/5]"),
        ("mm * bias[n/2] + residual[m/1,n]", "mm * bias[n/2] + residual"),
        ("w = int4(b, k); dot(a,(w - z[k/32,n])*s[n])", "dot(a, (int4(b) - z[k/32,n]) * s[n])"),
        ("dot(a,uint4(b, n))", "dot(a, uint4(b, n))"),
        ("-(-inf) * mm", "inf * mm"),
        ("dropout(mm, 0.5, seed)", "where(uniform(seed) >= 0.5, mm * 2, 0)"),
        ("dropout(mm, p, seed)", "where(uniform(seed) >= p, mm * (1 / (1 - detach(p))), 0)"),
        ("r = uniform(seed); mm * r, r, bgrad(r)", "r = uniform(seed); mm * r, r, bgrad(r)"),
        ("where(~mask & bits(keep), mm, 0), amax(a, k)", "where(~mask & bits(keep), mm, 0), amax(a, k)"),
    ],
)
def test_what_is_written(text: str, written: str) -> None:
    assert unparse(graph_of(text)) == written
    assert graph_of(written) == graph_of(text)


def test_deep_expressions_are_written_in_steps() -> None:
    text = "mm" + " + bias" * 60
    written = unparse(graph_of(text))
    assert graph_of(written) == graph_of(text)
    assert 3 < written.count(";") < 10 and max(map(len, written.split(";"))) < 150


@pytest.mark.parametrize("base", ["z", "dz", "out", "out3", "t", "grad_value", "stride_x", "mm", "relu", "del", "x" * 60])
def test_new_names_are_legal_and_new(base: str) -> None:
    names = Names(["z", "dz1", "t"])
    found = [names.fresh(base) for _ in range(3)]
    assert len({*found, "z", "dz1", "t"}) == 6
    for name in found:
        assert refused_name(name) is None
        assert name in graph_of(f"{name} = mm + 1; {name}").text


@pytest.mark.parametrize("base", ["biases", "masked", "s", "grad_bias"])
def test_a_new_scalar_is_no_slip_of_the_pen(base: str) -> None:
    name = Names([]).fresh(base, scalar=True)
    assert not near_miss(name, (*PREDECLARED, "mask"))
    assert [n.name for n in graph_of(f"mm * {name}").inputs()] == [name]
