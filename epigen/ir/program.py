"""The front end in one step: a program's text -> its normalised graph, which is what every later stage takes.

A process reads a text once. What it has written itself, such as a derivative, it does not read at all: the text names an operation of
torch's, and the graph is at hand.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from epigen.errors import CallError
from epigen.ir.check import check, parting
from epigen.ir.graph import Graph
from epigen.ir.parting import Parting
from epigen.ir.passes import normalise
from epigen.lang.parser import parse
from epigen.lang.syntax import WAYS, Program
from epigen.lru_cache import LruCache

MOST_PROGRAMS = 1024
"""How many programs, or chains of them, a process keeps what it has made of: those used last."""

_KNOWN: LruCache[str, Graph] = LruCache(MOST_PROGRAMS)


def graph_of(text: str) -> Graph:
    """Parse, check and normalise a program. Raises ParseError or CheckError, and CallError for what is no text.

    >>> [o.name for o in graph_of("relu(mm + bias)").outputs]
    ['out']
    """
    if not isinstance(text, str):
        raise CallError(f"a program is text, and a {type(text).__name__} was given")
    return _KNOWN.get(text) or _KNOWN.put(text, read(text))


def read(text: str) -> Graph:
    """`graph_of`, whether the text is known or not."""
    return normalise(check(parse(text)))


@functools.lru_cache(MOST_PROGRAMS)
def parting_of(text: str) -> Parting | None:
    """What a program parts and joins, so that its graph has other inputs and outputs than a call of it; None where that is nothing. Raises as `graph_of`."""
    graph_of(text)
    return parting(parse(text)) if any(way in text for way in WAYS) else None


def graph_of_written(program: Program, text: str) -> Graph:
    """What `graph_of` gives for the canonical text of a program that was written by `unparse.program_of`, without reading it."""
    return _KNOWN.get(text) or _KNOWN.put(text, normalise(check(replace(program, text=text))))
