"""Functions written out for one case of many: statements as text, and the objects that they name.

What is known beforehand is then no longer looked at in each call: there are no loops and no lists, and nothing is asked that has one answer.
`dataclasses` and `namedtuple` make their methods in this way. One text is compiled once, however many functions are made of it.
"""

from __future__ import annotations

import functools
import linecache
import types
import weakref
from collections.abc import Callable
from typing import Any

_NAMED = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


class CodeBuilder:
    """A function under way. signature: its name and parameters."""

    def __init__(self, signature: str):
        self.signature = signature
        self.lines: list[str] = []
        self.held: dict[str, Any] = {}

    def hold(self, value: Any) -> str:
        """What the text calls an object: by its own name, or its type's, and a number that no other has."""
        if value is None or isinstance(value, bool):
            return repr(value)
        word = (value.__name__ if isinstance(value, _NAMED) else type(value).__name__.lower()).rpartition(".")[2]
        name = f"{word if word.isidentifier() and len(word) > 2 else 'x'}{len(self.held)}"
        self.held[name] = value
        return name

    def add(self, *lines: str) -> None:
        """Statements; what is indented belongs to the line before."""
        self.lines += lines

    def function(self) -> Callable[..., Any]:
        made: Callable[..., Any] = _factory(self.signature, tuple(self.lines), tuple(self.held))(*self.held.values())
        return made


@functools.lru_cache(maxsize=256)  # 10 KB each; a text hangs on how many tensors of which kind a call has, and on inputs' names, not on shapes
def _factory(signature: str, lines: tuple[str, ...], held: tuple[str, ...]) -> Callable[..., Any]:
    """Takes the held objects, by these names, and returns the function, of which they are the closure."""
    body = "".join(f"        {line}\n" for line in lines)
    text = f"def made({', '.join(held)}):\n    def {signature}:\n{body}    return {signature.partition('(')[0]}\n"
    name = f"<epigen: {signature}, {hash(text):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks
    namespace: dict[str, Any] = {}
    exec(compile(text, name, "exec"), namespace)
    made: Callable[..., Any] = namespace["made"]
    weakref.finalize(made, linecache.cache.pop, name, None)
    return made
