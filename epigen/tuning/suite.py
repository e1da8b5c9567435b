"""A suite: a TOML file that lists problems to tune together. Text goes in, checked problems come out.

    [[problem]]
    program = "relu(mm + bias)"                  # or a list of programs
    shapes = ["4096x4096x4096", "16x4096x4096"]  # M, N, K; or a single one
    dtype = ["fp16", "bf16"]                     # or a single one; by default fp16
    weight = "int8"                              # or a list: dtypes of b as a weight of fewer bits; by default b has the others' dtype
    layout = "nt"                                # or a list; by default nt: a row-major, b transposed, as a Linear's weight.T
    precision = "ieee"                           # of fp32 operands, ieee or tf32; of fp8 ones fast_accum
    invariant = "m"                              # of programs that are compiled so; by default not
    groups = "m"                                 # or "k": the products of a batch are groups along it, of which the shape has the mean
    sparse = "b"                                 # the operand of whose values two of four are 0; by default none

An entry stands for every combination of what it lists; a problem that comes twice is tuned once.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epigen import dtypes
from epigen.codegen.spec import GROUPED, INVARIANT, SPARSE
from epigen.db import fields
from epigen.db.records import short
from epigen.errors import CallError, ProgramError, SuiteError, near_miss
from epigen.files import reason
from epigen.ir.graph import Graph
from epigen.ir.program import graph_of
from epigen.tuning.request import distinct, dtype_of, every, layout_of, shape_of, weight_of
from epigen.tuning.task import Request

_MOST = 1000  # of one list
_MOST_PROBLEMS = 100_000
_MOST_BYTES = 16 << 20
_LONGEST = 20_000  # characters of a program


def _filled(each: fields.Check) -> fields.Check:
    several = fields.listed(each, 1, _MOST)

    def check(value: Any) -> Any:
        if value == []:
            raise fields.Wrong("this list is empty")
        return several(value)

    return check


def _texts(convert: Callable[[str], Any]) -> fields.Check:
    """A list of texts, or a single one, each as `convert` returns it, whose message stands where it refuses."""

    def each(value: Any) -> Any:
        if not isinstance(value, str):
            raise fields.unexpected("text", value)
        try:
            return convert(value)
        except (CallError, ProgramError) as error:
            raise fields.Wrong(str(error)) from None

    several = _filled(each)
    return lambda value: several(value) if isinstance(value, list) else (each(value),)


def _program(text: str) -> Graph:
    if len(text) > _LONGEST:
        raise fields.Wrong(f"a program has at most {_LONGEST} characters, and this one has {len(text)}")
    return graph_of(text)


_ENTRY = {
    "program": _texts(_program),
    "shapes": _texts(shape_of),
    "dtype": _texts(dtype_of),
    "weight": _texts(weight_of),
    "layout": _texts(layout_of),
    "precision": fields.one_of(dtypes.PRECISIONS),
    "invariant": fields.one_of(INVARIANT),
    "groups": fields.one_of(GROUPED),
    "sparse": fields.one_of(SPARSE),
}
_DEFAULTS = {"dtype": ("fp16",), "weight": ("",), "layout": ("nt",), "precision": "ieee", "invariant": "", "groups": "", "sparse": ""}


def _entry(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.Wrong("expected a table, written [[problem]]")
    return _DEFAULTS | fields.held(value, _ENTRY, without=_DEFAULTS)


def _entries(value: Any) -> Any:
    if not isinstance(value, list):
        raise fields.Wrong(f"expected tables, written [[problem]], not {short(repr(value))}")
    return _filled(_entry)(value)


_SUITE = {"problem": _entries}


def read(path: Path) -> list[Request]:
    """The problems of a suite file, in its order, each once. Raises SuiteError, with every mistake of the file in a line of its own."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SuiteError(f"{path} has more than {_MOST_BYTES} bytes, and a suite has no more")
        return parse(data.decode("utf-8-sig"), str(path))
    except OSError as error:
        raise SuiteError(f"cannot read {path}: {reason(error)}") from None
    except UnicodeDecodeError:
        raise SuiteError(f"{path}: this is no text in UTF-8") from None


def parse(text: str, name: str = "the suite") -> list[Request]:
    """The problems of a suite's text. name: what messages call it."""
    try:
        document = tomllib.loads(text)
        entries = fields.held(document, _SUITE)["problem"]
    except fields.Wrong as wrong:
        raise SuiteError("\n".join(f"{name}: {_mistake(one, document)}" for one in (wrong, *wrong.others))) from None
    except ValueError as error:  # TOML's own, and a number of thousands of digits
        raise SuiteError(f"{name}: this is no TOML: {str(error).split(';')[0]}") from None
    except RecursionError:
        raise SuiteError(f"{name}: nested too deeply") from None
    count = sum(math.prod(len(e[part]) for part in ("program", "shapes", "dtype", "weight", "layout")) for e in entries)
    if count > _MOST_PROBLEMS:
        raise SuiteError(f"{name}: {count} problems, and a suite has at most {_MOST_PROBLEMS}")
    parts = ("program", "shapes", "dtype", "layout", "precision", "invariant", "weight", "groups", "sparse")
    return distinct(itertools.chain.from_iterable(every(*(e[part] for part in parts)) for e in entries))


def _mistake(wrong: fields.Wrong, document: dict[str, Any]) -> str:
    """Where it is, and what is wrong there: "problem 2 (relu(mm)), shapes, item 1: …"."""
    place: list[Any] = list(wrong.place)
    known: dict[str, Any] = _SUITE
    where: list[str] = []
    what = wrong.message
    if len(place) > 1:
        number, known = place[1], _ENTRY
        entry = document["problem"][number]
        program = entry.get("program") if isinstance(entry, dict) else None
        where.append(f"problem {number + 1}{f' ({short(program)})' if isinstance(program, str) and program.isprintable() else ''}")
        place = place[2:]
    if place and place[0] not in known:
        what += f": {near_miss(place[0], known) or 'known are ' + ', '.join(known)}"
    where += [f"item {part + 1}" if isinstance(part, int) else part for part in place]
    if "\n" in what:  # a program's mistakes, with carets that stand under its text
        return f"{', '.join(where)}:\n  " + what.replace("\n", "\n  ")
    return f"{', '.join(where)}: {what}"
