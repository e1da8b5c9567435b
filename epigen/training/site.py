"""Where a kernel is called with tensors that are always alike: once it is known how it runs there, it is launched and nothing is asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import Enum

from torch import Tensor

from epigen.ir.graph import GROUPS, PRODUCT
from epigen.ir.program import graph_of
from epigen.runtime.code_builder import CodeBuilder
from epigen.training import layer, library


def leading(name: str, indices: str, lead: int) -> str:
    """As `layer.rows`, of a tensor with so many leading dimensions."""
    if lead == 1 or "m" not in indices:
        return name
    if indices == "m":
        return f"{name}.reshape(-1)"
    return f"{name}.flatten(0, -2)" if lead else f"{name}[None]"


class How(Enum):
    """What a kernel's call takes before the inputs."""

    OVER = "over"
    """The product."""
    TRANSPOSED = "transposed"
    """x and the weight, with whose transpose it is multiplied."""
    STRAIGHT = "straight"
    """A gradient and the weight."""
    GIVEN = "given"
    """Both operands as the kernel takes them, and so are the inputs: leading dimensions are those of a batch."""

    @property
    def count(self) -> int:
        """How many tensors these are."""
        return 1 if self is How.OVER else 2


class Site:
    """Where a kernel is called with tensors that are always alike: `now`, which asks nothing, or `slow` where that has given None.

    Both take operands and inputs in a row, with whatever leading dimensions they have, which are rows but for GIVEN, and return all outputs.
    """

    __slots__ = ("calls", "how", "inputs", "now", "options", "program", "shapes", "tune")

    def __init__(self, program: str, tune: str | None, how: How, shapes: Sequence[tuple[int, ...] | None] = (), options: str | None = None):
        """shapes: of each output, in place of its own. options: as the operations take them."""
        self.program, self.tune, self.how, self.shapes, self.options = program, tune, how, shapes, options
        graph = graph_of(program)
        self.inputs = [(node.name, node.indices) for node in graph.inputs()]
        self.calls = 0
        self.now: Callable[..., tuple[Tensor, ...] | None] = _nothing

    def slow(self, *given: Tensor) -> tuple[Tensor, ...]:
        kernel = library.kernel(self.program, self.tune, self.options)
        first, rest = given[: self.how.count], given[self.how.count :]
        ends = {GROUPS: rest[-1]} if len(rest) > len(self.inputs) else {}
        rows = (lambda t, _indices: t) if self.how is How.GIVEN else layer.rows
        inputs = {name: rows(value, indices) for (name, indices), value in zip(self.inputs, rest[: len(self.inputs)], strict=True)} | ends
        a, views = rows(first[0], "mn"), {"a": "a" if self.how is How.GIVEN else leading("a", "mn", first[0].dim() - 1)}
        operands: tuple[Tensor, ...] = ()
        if self.how is How.OVER:
            returned, inputs = kernel.over(a, **inputs), {PRODUCT: a, **inputs}
        else:
            operands = (a, first[1].t()) if self.how is How.TRANSPOSED else (a, first[1])
            returned, views["b"] = kernel(*operands, **inputs), "b.t()" if self.how is How.TRANSPOSED else "b"
        results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        self.calls += 1
        if self.calls & (self.calls - 1) == 0:  # now and then: it may be chosen by then how the kernel runs
            self.now = kernel.bound(operands, inputs, results, views, self.shapes) or _nothing
        return tuple(t if shape is None else t.resize_(shape) for t, shape in itertools.zip_longest(results, self.shapes[: len(results)]))

    def call(self, text: CodeBuilder, given: Sequence[str]) -> str:
        """The expression of a call. given: what the text calls what it takes."""
        site, row = text.hold(self), ", ".join(given)
        return f"{site}.now({row}) or {site}.slow({row})"


def _nothing(*_given: Tensor) -> None:
    return None
