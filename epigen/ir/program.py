"""The front end in one step: a program's text -> its normalised graph, which is what every later stage takes."""

from __future__ import annotations

from epigen.errors import CallError
from epigen.ir.check import check
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.lang.parser import parse


def graph_of(text: str) -> Graph:
    """Parse, check and normalise a program. Raises ParseError or CheckError, and CallError for what is no text.

    >>> [o.name for o in graph_of("relu(mm + bias)").outputs]
    ['out']
    """
    if not isinstance(text, str):
        raise CallError(f"a program is text, and a {type(text).__name__} was given")
    return normalise(check(parse(text)))
