"""Functions that are written out: what they hold, that a text is compiled once, and what a traceback shows of them."""

from __future__ import annotations

import builtins
import traceback
from typing import Any

import pytest

from epigen.runtime.code_builder import CodeBuilder


def adder(count: int, start: Any) -> Any:
    text = CodeBuilder("add(x)")
    text.add(f"return x + {' + '.join(text.hold(start) for _ in range(count))}")
    return text.function()


def test_a_function_holds_what_it_names() -> None:
    text = CodeBuilder("choose(first)")
    assert (text.hold(None), text.hold(True), text.hold(1), text.hold("a")) == ("None", "True", "int0", "str1")
    assert (text.hold(len), text.hold(dict), text.hold(builtins), text.hold(lambda: 0), text.hold(adder)) == ("len2", "dict3", "builtins4", "x5", "adder6")
    text.add("if first:", "    return int0", "return str1")
    choose = text.function()
    assert (choose(True), choose(False)) == (1, "a")


def test_a_text_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new shape the numbers change and the text does not: to compile it takes longer than all the rest of preparing a call."""
    assert adder(3, 1)(1) == 4
    monkeypatch.setattr(builtins, "compile", None)
    assert adder(3, 2)(1) == 7
    with pytest.raises(TypeError):
        adder(4, 1)


def test_a_traceback_shows_the_line() -> None:
    with pytest.raises(TypeError) as error:
        adder(2, "a")(1)
    assert "return x + str0 + str1" in "".join(traceback.format_exception(error.value))
