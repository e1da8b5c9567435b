"""The schema of a tuning database: one record a tuned problem, one document a GPU, and their text.

JSON text goes in and checked records come out, or the other way round; no file is touched here. Nothing that is read is executed: names
are held against patterns and tables, numbers against ranges. Of two records with one key the better stays, by a total order, so that
merging is commutative, associative and idempotent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from epigen.codegen import schedules
from epigen.codegen.spec import LAYOUTS, KernelConfig
from epigen.dtypes import ALL, OPERANDS
from epigen.errors import ConfigError, DatabaseError
from epigen.tuning.migrations import MIGRATIONS
from epigen.tuning.problem import BITS, SCALAR, Problem
from epigen.tuning.task import OUTCOMES, OutcomeKind

SCHEMA = 2
"""2 added the inputs' dtypes; `migrations` has the steps from older ones."""

_INPUT_KINDS = frozenset({BITS, SCALAR, *(f"{t.name}[{i}]" for t in OPERANDS for i in ("mn", "m", "n"))})
_MAX_RECORDS = 100_000
_SHOWN = 60  # characters of a wrong value that a message quotes

Key = tuple[Any, ...]


class Damaged(DatabaseError):
    """The text is no tuning database, in whole: truncated, edited by hand, or something else altogether."""


def _one_of(values: Iterable[str | int]) -> AfterValidator:
    """Unlike `Literal`, it leaves the type to the field: True is no 1."""
    known = tuple(values)

    def check(value: str | int) -> str | int:
        if value not in known:
            raise ValueError(f"expected one of {', '.join(map(str, known))}")
        return value

    return AfterValidator(check)


def _printable(value: str) -> str:
    """A control character in a program would reach the terminal of whoever lists the database."""
    if not all(c.isprintable() or c == "\n" for c in value):
        raise ValueError("expected printable text")
    return value


def _gpu(value: str) -> str:
    # drivers put a slash into some names ("Radeon RX 6800/6800 XT"); file names are made from letters and digits alone
    if ".." in value or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ()+@,./_-]*", value):
        raise ValueError("expected a GPU's name, of letters, digits, spaces and ()+@,./_-")
    return value


def _input_kind(value: str) -> str:
    if value not in _INPUT_KINDS:
        raise ValueError(f"expected a dtype and its indices, such as fp16[n], {BITS} or {SCALAR}")
    return value


def _date(value: str) -> str:
    try:
        if len(value) != 20 or not value.isascii():
            raise ValueError
        datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise ValueError("expected a time in UTC, such as 2026-11-05T12:00:00Z") from None
    return value


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _time(value: float) -> float:
    """Three decimals of a microsecond are below what any clock of a GPU tells."""
    return round(value, 3)


Gpu = Annotated[str, StringConstraints(max_length=128), AfterValidator(_gpu)]
Capability = Annotated[str, StringConstraints(pattern=r"^([0-9]{1,2}\.[0-9]|gfx[0-9a-f]{3,5})$")]
Program = Annotated[str, StringConstraints(min_length=1, max_length=20_000), AfterValidator(_printable)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Kind = Annotated[str, StringConstraints(max_length=4096, pattern=r"^load:[a-z,]* store:[a-z,]* reduce:[a-z,]*$")]
Extent = Annotated[int, Field(ge=0, le=2**31)]
DTypeName = Annotated[str, _one_of(t.name for t in ALL)]
InputKind = Annotated[str, AfterValidator(_input_kind)]
Alignment = Annotated[int, _one_of((1, 2, 4, 8, 16))]
Time = Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False), AfterValidator(_time)]
Spread = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False), AfterValidator(_time)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+_-]{0,63}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class Record(BaseModel):
    """The winner of one problem, and how it was found. The first fields are those of `problem.Problem`.

    median_us, spread_us: of the winner. baseline_us: the vendor's product alone, measured in the same run. unfused_us: the vendor's
    product and one pointwise pass. trials: how many ended how. date: in UTC.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    gpu: Gpu
    capability: Capability
    shape: Annotated[tuple[Extent, Extent, Extent], BeforeValidator(_tuple)]
    a: DTypeName
    b: DTypeName
    inputs: Annotated[tuple[InputKind, ...], Field(max_length=1000), BeforeValidator(_tuple)]
    outputs: Annotated[tuple[DTypeName, ...], Field(min_length=1, max_length=1000), BeforeValidator(_tuple)]
    layout: Annotated[str, _one_of(LAYOUTS)]
    precision: Literal["", "ieee", "tf32"]
    program: Program
    spec: Digest
    kind: Kind
    alignment: Alignment
    schedule: Name
    config: Annotated[dict[Name, int], Field(max_length=64)]
    median_us: Time
    spread_us: Spread
    baseline_us: Time
    unfused_us: Time | None = None
    trials: dict[OutcomeKind, Count]
    date: Annotated[str, AfterValidator(_date)]
    triton: Version
    torch: Version
    epigen: Version
    driver: Version | None = None

    @model_validator(mode="after")
    def _legal(self) -> Self:
        if "schedule" in self.config:
            raise ValueError("config: the schedule has a field of its own")
        try:
            schedules.config(self.schedule, **self.config)
        except ConfigError as error:
            raise ValueError(f"config: {error}") from None
        return self

    @classmethod
    def make(cls, problem: Problem, config: KernelConfig, **measured: Any) -> Self:
        """A record of `config`, the winner of `problem`. measured: the other fields. Raises DatabaseError."""
        try:
            return cls(**asdict(problem), schedule=config.schedule, config=dict(config.values), **measured)
        except ValidationError as error:
            raise DatabaseError(f"this is no record of a tuned problem: {_mistake(error)}") from None

    @cached_property
    def problem(self) -> Problem:
        return Problem(**{name: getattr(self, name) for name in Problem.__dataclass_fields__})

    @cached_property
    def kernel_config(self) -> KernelConfig:
        return schedules.config(self.schedule, **self.config)

    @cached_property
    def problem_key(self) -> Key:
        return problem_key(self.problem)

    @cached_property
    def key(self) -> Key:
        """What one record is kept for: all of the problem that decides speed, and Triton's version."""
        return (*self.problem_key, self.triton)

    @cached_property
    def name(self) -> str:
        """A short name for people to point at the record with, as `epigen db show` does."""
        return hashlib.sha256(repr(self.key).encode()).hexdigest()[:10]

    @cached_property
    def text(self) -> str:
        """The record as it stands in a file: a few lines, each with what belongs together. GPU and capability stand in the file's head."""
        lines = (
            {"program": self.program},
            {"spec": self.spec, "kind": self.kind},
            {
                "shape": self.shape, "a": self.a, "b": self.b, "inputs": self.inputs, "outputs": self.outputs, "layout": self.layout,
                "precision": self.precision, "alignment": self.alignment,
            },
            {"schedule": self.schedule, "config": dict(self.kernel_config.values)},
            {"median_us": self.median_us, "spread_us": self.spread_us, "baseline_us": self.baseline_us, "unfused_us": self.unfused_us},
            {"trials": {o: self.trials[o] for o in OUTCOMES if o in self.trials}},
            {"date": self.date, "triton": self.triton, "torch": self.torch, "epigen": self.epigen, "driver": self.driver},
        )  # fmt: skip
        shown = (json.dumps({k: v for k, v in line.items() if v is not None})[1:-1] for line in lines)
        return "{\n      " + ",\n      ".join(shown) + "\n    }"

    def __str__(self) -> str:
        """The problem in one line."""
        return f"{short(self.program)}{self.unlike_inputs} {extents(self.shape)} {self.a} {self.layout} on {self.gpu}, Triton {self.triton}"

    @property
    def unlike_inputs(self) -> str:
        """Such as " (inputs fp32[n])" where an input's dtype is not the operands'; else ''."""
        unlike = any("[" in kind and not kind.startswith(f"{self.a}[") for kind in self.inputs)
        return f" (inputs {', '.join(self.inputs)})" if unlike else ""


def problem_key(problem: Problem) -> Key:
    p = problem
    return p.gpu, p.capability, p.spec, p.a, p.b, p.inputs, p.outputs, p.precision, p.layout, p.shape, p.alignment


def extents(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))


def short(program: str) -> str:
    """A program in one short line."""
    line = "; ".join(part.strip() for part in program.splitlines() if part.strip())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def better(one: Record, other: Record) -> Record:
    """Which of two records of one key stays: the faster, then the newer, then the one whose text sorts first."""
    if one.median_us != other.median_us:
        return one if one.median_us < other.median_us else other
    if one.date != other.date:
        return one if one.date > other.date else other
    return one if one.text <= other.text else other


def merged(records: Iterable[Record]) -> dict[Key, Record]:
    """The better record of each key."""
    kept: dict[Key, Record] = {}
    for record in records:
        kept[record.key] = better(kept.get(record.key, record), record)
    return kept


# -- documents


@dataclass(frozen=True, slots=True)
class Document:
    """One GPU's records, as read from a text. complaints: what of the text is left out, one line each, with its place."""

    gpu: str
    capability: str
    records: tuple[Record, ...]
    complaints: tuple[str, ...] = ()


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_: Annotated[int, Field(ge=0, alias="schema")]
    gpu: Gpu
    capability: Capability
    records: list[Any]


_BETWEEN = ",\n    "
_TAIL = "\n  ]\n}\n"


def _head(gpu: str, capability: str) -> str:
    return f'{{\n  "schema": {SCHEMA},\n  "gpu": {json.dumps(gpu)},\n  "capability": {json.dumps(capability)},\n  "records": [\n    '


def render(gpu: str, capability: str, records: Iterable[Record]) -> str:
    """The file's text. Equal records give equal bytes, in whatever order they come."""
    ordered = sorted(records, key=lambda r: (r.program, r.key))
    if not ordered:
        return _head(gpu, capability).rstrip() + "]\n}\n"
    return _head(gpu, capability) + _BETWEEN.join(r.text for r in ordered) + _TAIL


def split(text: str, gpu: str, capability: str) -> list[str]:
    """The texts of the records of a file that `render` wrote; empty for any other text.

    Joined again they are the whole file, so that a file whose every part is known, or is a record by itself, needs no reading as a whole.
    """
    head = _head(gpu, capability)
    if not (text.startswith(head) and text.endswith(_TAIL)):
        return []
    inner = text[len(head) : -len(_TAIL)]
    parts = inner.split("\n    }" + _BETWEEN + "{\n")
    return [("" if i == 0 else "{\n") + part + ("" if i == len(parts) - 1 else "\n    }") for i, part in enumerate(parts)]


def parse_record(text: str, gpu: str, capability: str) -> Record | None:
    """One part of `split` as a record, if it is one in just the form that `render` writes."""
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        record = Record(gpu=gpu, capability=capability, **found)
    except (ValueError, TypeError, RecursionError):
        return None
    return record if record.text == text else None


def parse(data: bytes) -> Document:
    """Reads a file's bytes. Records that do not fit the schema are left out, each with a complaint.

    Raises Damaged where the whole is unusable, DatabaseError where it was written by a newer epigen.
    """
    document = _migrate(_load(data))
    try:
        head = _Head.model_validate(document)
    except ValidationError as error:
        raise Damaged(_mistake(error)) from None
    if len(head.records) > _MAX_RECORDS:
        raise Damaged(f"{len(head.records)} records, and the limit is {_MAX_RECORDS}")
    records, complaints = [], []
    for number, found in enumerate(head.records):
        try:
            if not isinstance(found, dict) or {"gpu", "capability"} & found.keys():
                complaints.append(f"record {number}: expected an object of a record's fields, without gpu and capability, not {_quoted(found)}")
                continue
            records.append(Record.model_validate(found | {"gpu": head.gpu, "capability": head.capability}))
        except ValidationError as error:
            complaints.append(f"record {number}{_of(found)}: {_mistake(error)}")
    return Document(head.gpu, head.capability, tuple(records), tuple(complaints))


def _load(data: bytes) -> object:
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise Damaged(f"byte {error.start} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise Damaged(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise Damaged("nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, and what the two functions below refuse
        raise Damaged(str(error).split(";")[0]) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {_quoted(next(n for n in names if names.count(n) > 1))} stands twice in one object")
    return found


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _migrate(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise Damaged(f"expected an object with schema, gpu, capability and records, not {_quoted(document)}")
    found = document.get("schema")
    if type(found) is not int:
        raise Damaged(f"schema: expected a whole number, not {_quoted(found)}")
    if found > SCHEMA:
        raise DatabaseError(f"written in schema {_quoted(found)} by a newer epigen, and this one reads up to {SCHEMA}: update epigen, or name another database")
    while found != SCHEMA:
        if found not in MIGRATIONS:
            raise Damaged(f"schema: {_quoted(found)} was never in use")
        try:
            document = MIGRATIONS[found](document)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise Damaged(f"does not keep to its schema, {found}: {type(error).__name__} {_quoted(str(error))}") from None
        found += 1
        document = document | {"schema": found}
    return document


def _of(found: dict[str, Any]) -> str:
    program = found.get("program")
    return f" ({_quoted(short(program))})" if isinstance(program, str) else ""


def _mistake(error: ValidationError) -> str:
    """The first mistake in one line: where, what was expected, what was found."""
    first = error.errors(include_url=False)[0]
    place = ".".join(_plain(str(part)) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if first["type"] in ("missing", "extra_forbidden"):
        return f"{place}: {'this field is missing' if first['type'] == 'missing' else 'there is no such field'}"
    if not place:  # a check of the whole record, which names its field itself
        return message
    return f"{place}: {message}, not {_quoted(first['input'])}"


def _quoted(value: object) -> str:
    """A value as a message may show it: short, in one line, ASCII."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of many digits"
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _plain(name: str) -> str:
    return _quoted(name) if not re.fullmatch(r"\w{1,40}", name, re.ASCII) else name
