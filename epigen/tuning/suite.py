"""A suite: a TOML file that lists problems to tune together. Text goes in, checked problems come out.

    [[problem]]
    program = "relu(mm + bias)"                  # or a list of programs
    shapes = ["4096x4096x4096", "16x4096x4096"]  # M, N, K; or a single one
    dtype = ["fp16", "bf16"]                     # or a single one; by default fp16
    layout = "nt"                                # or a list; by default nt: a row-major, b transposed, as a Linear's weight.T
    precision = "ieee"                           # of fp32 operands; ieee or tf32

An entry stands for every combination of what it lists; a problem that comes twice is tuned once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from epigen.errors import CallError, ProgramError, SuiteError, near_miss
from epigen.tuning.asked import Asked, digest_of, distinct, dtype_of, every, layout_of, shape_of
from epigen.tuning.records import short

_MOST = 1000  # of one entry's list
_WORDS = {
    "missing": "this field is missing",
    "model_type": "expected a table, written [[problem]]",
    "list_type": "expected tables, written [[problem]]",
    "too_short": "this list is empty",
    "string_type": "expected text",
}
"""What pydantic's commonest errors are called in words of the file's own format."""


def _checked(check: Callable[[Any], Any]) -> AfterValidator:
    """The value as `check` returns it; its message where it refuses."""

    def convert(value: str) -> Any:
        try:
            return check(value)
        except (CallError, ProgramError) as error:
            raise ValueError(str(error)) from None

    return AfterValidator(convert)


def _program(text: str) -> str:
    digest_of(text)
    return text


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


Program = Annotated[str, Field(max_length=20_000), _checked(_program)]
Shape = Annotated[str, _checked(shape_of)]
DType = Annotated[str, _checked(dtype_of)]
Layout = Annotated[str, _checked(layout_of)]


class Entry(BaseModel):
    """One [[problem]] of a suite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    program: Annotated[list[Program], Field(min_length=1, max_length=_MOST), BeforeValidator(_listed)]
    shapes: Annotated[list[Shape], Field(min_length=1, max_length=_MOST), BeforeValidator(_listed)]
    dtype: Annotated[list[DType], Field(min_length=1, max_length=_MOST), BeforeValidator(_listed)] = ["fp16"]
    layout: Annotated[list[Layout], Field(min_length=1, max_length=_MOST), BeforeValidator(_listed)] = ["nt"]
    precision: Literal["ieee", "tf32"] = "ieee"


class Suite(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    problem: Annotated[list[Entry], Field(min_length=1, max_length=_MOST)]


def read(path: Path) -> list[Asked]:
    """The problems of a suite file, in its order, each once. Raises SuiteError, with every mistake of the file in a line of its own."""
    try:
        return parse(path.read_bytes().decode(), str(path))
    except OSError as error:
        raise SuiteError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SuiteError(f"{path}: this is no text in UTF-8") from None


def parse(text: str, name: str = "the suite") -> list[Asked]:
    """The problems of a suite's text. name: what messages call it."""
    try:
        found = tomllib.loads(text)
        suite = Suite.model_validate(found)
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{name}: this is no TOML: {error}") from None
    except RecursionError:
        raise SuiteError(f"{name}: nested too deeply") from None
    except ValidationError as error:
        raise SuiteError("\n".join(f"{name}: {_mistake(e, found)}" for e in error.errors(include_url=False))) from None
    return distinct(a for e in suite.problem for a in every(e.program, e.shapes, e.dtype, e.layout, e.precision))


def _mistake(error: Any, found: dict[str, Any]) -> str:
    """Where it is, and what is wrong there: "problem 2 (relu(mm)), shapes, item 1: …"."""
    place = list(error["loc"])
    known: dict[str, Any] = dict(Suite.model_fields)
    where: list[str] = []
    if place[:1] == ["problem"] and len(place) > 1:
        known = dict(Entry.model_fields)
        entry = found["problem"][place[1]] if isinstance(found["problem"], list) else {}
        program = entry.get("program") if isinstance(entry, dict) else None
        where.append(f"problem {place[1] + 1}{f' ({short(program)})' if isinstance(program, str) and program.isprintable() else ''}")
        place = place[2:]
        if len(place) > 1 and isinstance(entry, dict) and not isinstance(entry.get(str(place[0])), list):
            place = place[:1]  # a single value, which was made a list of one
    where += [f"item {part + 1}" if isinstance(part, int) else str(part) for part in place]
    what = _WORDS.get(error["type"])
    if error["type"] == "extra_forbidden":
        what = f"there is no such field: {near_miss(str(place[-1]), known) or 'known are ' + ', '.join(known)}"
    elif what is None:
        message = error["msg"].removeprefix("Value error, ")
        what = message if error["type"] == "value_error" else f"{message[0].lower()}{message[1:]}, not {short(repr(error['input']))}"
    elif error["type"] in ("string_type", "list_type"):
        what += f", not {short(repr(error['input']))}"
    if "\n" in what:  # a program's mistakes, with carets that stand under its text
        return f"{', '.join(where)}:\n  " + what.replace("\n", "\n  ")
    return f"{', '.join(where)}: {what}"
