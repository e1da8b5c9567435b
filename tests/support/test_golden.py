"""Golden texts: another wording fails, and none is left of a test that is gone."""

from __future__ import annotations

import ast
from pathlib import Path

import golden
import pytest
from checkout import TESTS
from golden import Golden


def test_a_text_is_the_golden_one(golden: Golden) -> None:
    golden("What is said,\nin two lines.")
    if not golden.update:
        with pytest.raises(AssertionError):
            golden("What is said,\nin other words.")
        with pytest.raises(AssertionError):
            golden("What is said,\nin two lines.", "of another name")


def test_an_error_is_of_its_class_and_says_the_golden_text(golden: Golden, tmp_path: Path) -> None:
    with golden.raises(ValueError, "in a folder"):
        raise ValueError(f"no such file: {tmp_path}/nothing")
    with pytest.raises(TypeError), golden.raises(ValueError, "in a folder"):
        raise TypeError("no such file: .../nothing")


def test_no_golden_text_is_left_over() -> None:
    for path in golden.FOLDER.rglob("*.txt"):
        tests = ast.walk(ast.parse((TESTS / path.relative_to(golden.FOLDER)).with_suffix(".py").read_text(encoding="utf-8")))
        known = {node.name for node in tests if isinstance(node, ast.FunctionDef) and "golden" in (a.arg for a in node.args.args)}
        assert {name.partition(":")[0] for name in golden.sections(path)} <= known, path
