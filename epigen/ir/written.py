"""Graphs that epigen makes itself, as programs: each goes through its own text, so that it is what a user would get who wrote that."""

from __future__ import annotations

from collections.abc import Sequence

from epigen.errors import DerivationError, Diagnostic
from epigen.ir.graph import Graph, Node, Output
from epigen.ir.passes import normalise
from epigen.ir.program import graph_of_written
from epigen.ir.unparse import program_of
from epigen.lang.parser import MAX_CHARACTERS, MAX_NODES
from epigen.lang.syntax import parts, to_text


def through_text(nodes: Sequence[Node], outputs: Sequence[Output], of: str) -> Graph:
    """A program of what these outputs need, as a user would get it who wrote its text.

    of: the program that it is made for. Raises DerivationError where the text would be longer than a program's may be.
    """
    program = program_of(normalise(Graph(tuple(nodes), tuple(outputs), "")))
    count, text = parts(program), to_text(program)
    if count > MAX_NODES or len(text) > MAX_CHARACTERS:
        message = f"what training needs of it is a program of {count} parts in {len(text)} characters, and the limits are {MAX_NODES} and {MAX_CHARACTERS}"
        raise DerivationError(of, [Diagnostic(message, None, "divide the program, or derive less of it: fewer outputs (of=...), or fewer inputs (wrt=...)")])
    return graph_of_written(program, text)
