"""One word for one thing, and the field's where it has one: identifiers that were called otherwise are not called so again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from checkout import ROOT

FORMER = {
    "early": "prefetch", "halves": "subtiles", "one_launch": "fused_finalize", "brought": "tma_loaded", "leaving": "tma_stored", "described": "with_descriptors",
    "load_tiles": "producer", "multiply_tiles": "consumer", "turn_id": "phase", "asked": "requested", "told": "report", "lent": "borrowed", "lender": "source",
    "alike": "similar", "octave": "M bucket", "stem": "fork server", "meter": "timing worker", "Lost": "Failed", "but": "with_value", "laid": "with_layout",
}  # fmt: skip
ELSEWHERE = {"halves": ("eight_bit.py",), "described": ("functions.py",)}
"""Where they are words for something else: operands of 16 bits; an error's words for a function."""


def bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name


@pytest.mark.parametrize("folder", ["epigen", "bench"])
def test_names_that_were_given_up(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts]
    used = {(path.name, name) for path in files for name in {*bound(ast.parse(path.read_text()))} & FORMER.keys() if path.name not in ELSEWHERE.get(name, ())}
    assert len(files) > 40 and not used, {where: FORMER[where[1]] for where in used}
