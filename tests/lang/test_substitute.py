"""One value of a program for another."""

from __future__ import annotations

import pytest

from epigen.lang.parser import parse
from epigen.lang.substitute import is_product, substituted
from epigen.lang.syntax import Expr, Name, within
from epigen.lang.syntax import to_text as text_of


def of_product(text: str) -> str:
    def instead(expr: Expr) -> Expr | None:
        return Name("y", expr.span) if is_product(expr) else None

    return text_of(substituted(parse(text), instead))


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("mm", "y"),
        ("dot(a, b) * (mm + 1) ** 2", "y * (y + 1) ** 2"),
        ("z = relu(mm); cast(z, fp16), sum(mm, n)", "z = relu(y); cast(z, fp16), sum(y, n)"),
        ("g, u = halves(mm); silu(g) * u", "g, u = halves(y); silu(g) * u"),
        ("leaky_relu(dot(a, b), negative_slope=0.1) + commm", "leaky_relu(y, negative_slope=0.1) + commm"),
        ("dot(relu(a), b) + dot(a, c[k,n])", "dot(relu(a), b) + dot(a, c[k,n])"),
        ("-mm if_ - mm".replace(" if_", ""), "-y - y"),
    ],
)
def test_each_product_is_replaced_and_nothing_else(text: str, becomes: str) -> None:
    assert of_product(text) == becomes


def test_a_tree_as_deep_as_the_parser_takes_is_no_matter() -> None:
    text = "relu(" * 90 + "mm" + ")" * 90
    assert of_product(text) == text.replace("mm", "y")
    assert sum(map(is_product, within(*parse(text).outputs))) == 1
