"""The way from an older schema of the tuning database to the present one: a step a schema, document to document. Pure functions.

A step changes only what it understands: a record that it cannot carry over is left as it is, and then held against the present schema
like any other, so that one bad record costs no other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from epigen.codegen.schedules import RENAMED
from epigen.db.fields import Broken
from epigen.db.problem import input_kind
from epigen.dtypes import BY_NAME, FP32
from epigen.errors import EpigenError
from epigen.ir.graph import Graph
from epigen.ir.program import graph_of
from epigen.lang.parser import MAX_CHARACTERS

Migration = Callable[[dict[str, Any]], dict[str, Any]]


MOST_CHARACTERS = 100_000
"""Of the different programs in a file of schema 1: to parse them takes time, and every process does it at its first look-up."""


def _from_1(document: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 did not name the inputs' dtypes: they were the operands', fp32 beside 8-bit operands. The program says which there are."""
    records = document.get("records")
    if not isinstance(records, list):
        return document
    graphs: dict[str, Graph | None] = {}
    return document | {"records": [_with_inputs(r, graphs) for r in records]}


def _with_inputs(record: object, graphs: dict[str, Graph | None]) -> object:
    if not isinstance(record, dict) or "inputs" in record:
        return record
    program, a = record.get("program"), record.get("a")
    if not isinstance(program, str) or not isinstance(a, str) or a not in BY_NAME:
        return record
    if program not in graphs:
        if len(program) > MAX_CHARACTERS:
            return record | {"inputs": Broken(f"schema 1 did not name them, and the program has more than {MAX_CHARACTERS} characters")}
        if sum(map(len, graphs)) + len(program) > MOST_CHARACTERS:
            return record | {"inputs": Broken(f"schema 1 did not name them, and the programs of this file have more than {MOST_CHARACTERS} characters")}
        graphs[program] = _graph(program)
    graph, dtype = graphs[program], BY_NAME[a]
    if graph is None:
        return record
    return record | {"inputs": [input_kind(node, FP32 if dtype.bits == 8 else dtype) for node in graph.inputs()]}


def _graph(program: str) -> Graph | None:
    try:
        return graph_of(program)
    except EpigenError:
        return None


def _from_2(document: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 had other names for three dimensions of a config."""
    records = document.get("records")
    return document | {"records": [_with_new_names(r) for r in records]} if isinstance(records, list) else document


def _with_new_names(record: object) -> object:
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict) or not record["config"].keys().isdisjoint(RENAMED.values()):
        return record
    return record | {"config": {RENAMED.get(name, name): value for name, value in record["config"].items()}}


MIGRATIONS: Mapping[int, Migration] = MappingProxyType({1: _from_1, 2: _from_2})
"""From a schema's number to the step that turns its document into the next one's."""
