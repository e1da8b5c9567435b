"""The schema of a tuning database: one record a tuned problem, one document a GPU, and their text.

JSON text goes in and checked records come out, or the other way round; no file is touched here. Nothing that is read is executed: names
are held against patterns and tables, numbers against ranges. Of two records with one key the better stays, by a total order, so that
merging is commutative, associative and idempotent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass
from dataclasses import fields as dataclass_fields
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.db import fields
from epigen.db.fields import quoted
from epigen.db.migrations import MIGRATIONS
from epigen.db.problem import CAPABILITY, GPU, Problem
from epigen.db.salvage import load
from epigen.errors import ConfigError, DatabaseError
from epigen.shapes import extents

SCHEMA = 3
"""2 added the inputs' dtypes, 3 has other names for three dimensions of a config; `migrations` has the steps from older ones."""

OutcomeKind = Literal["ok", "slower", "wrong", "compile_error", "out_of_resources", "timeout", "crashed"]
OUTCOMES: tuple[OutcomeKind, ...] = get_args(OutcomeKind)
"""How a trial can end. slower: cut off early, far behind the best so far."""

_MAX_RECORDS = 100_000
_SHOWN = 60  # characters of a program

Key = tuple[Any, ...]


class Damaged(DatabaseError):
    """The text is no tuning database, in whole: truncated, edited by hand, or something else altogether."""


def _date(value: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value, re.ASCII):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


_TIME, _SPREAD = fields.number(0.001, 1e9, digits=3), fields.number(0, 1e9, digits=3)  # what lies below a nanosecond no clock of a GPU tells
_VERSION = fields.pattern("a version, such as 3.9.0", r"[0-9][0-9A-Za-z.+_-]{0,63}")
_NAME = fields.pattern("a name, of small letters, digits and _", r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, kw_only=True)
class Record(Problem):
    """The winner of one problem, and how it was found. Made by `make` and `of`, which check it.

    median_us, spread_us: of the winner. baseline_us: the vendor's product alone, measured in the same run. unfused_us: the vendor's
    product and one pointwise pass. Neither is there where it could not be timed. trials: how many ended how. date: in UTC.
    """

    schedule: Annotated[str, _NAME]
    config: Annotated[dict[str, int], fields.named(_NAME, fields.whole(0, 2**31))]
    median_us: Annotated[float, _TIME]
    spread_us: Annotated[float, _SPREAD]
    baseline_us: Annotated[float | None, fields.optional(_TIME)] = None
    unfused_us: Annotated[float | None, fields.optional(_TIME)] = None
    trials: Annotated[dict[OutcomeKind, int], fields.named(fields.one_of(OUTCOMES), fields.whole(0, 10**9))]
    date: Annotated[str, fields.text("a time in UTC, such as 2026-11-05T12:00:00Z", _date)]
    triton: Annotated[str, _VERSION]
    torch: Annotated[str, _VERSION]
    epigen: Annotated[str, _VERSION]
    driver: Annotated[str | None, fields.optional(_VERSION)] = None

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """The record of these values. Raises `fields.Wrong`."""
        record = cls(**fields.held(values, _CHECKS, without=_OPTIONAL))
        if "schedule" in record.config:
            raise fields.Wrong("config: the schedule has a field of its own")
        try:
            _ = record.kernel_config
        except ConfigError as error:
            raise fields.Wrong(f"config: {error}") from None
        return record

    @classmethod
    def make(cls, problem: Problem, config: KernelConfig, **measured: Any) -> Self:
        """A record of `config`, the winner of `problem`. measured: the other fields. Raises DatabaseError."""
        try:
            return cls.of(asdict(problem) | {"schedule": config.schedule, "config": dict(config.values)} | measured)
        except fields.Wrong as wrong:
            raise DatabaseError(f"this is no record of a tuned problem: {wrong}") from None

    @cached_property
    def problem(self) -> Problem:
        return Problem(**{name: getattr(self, name) for name in Problem.__dataclass_fields__})

    @cached_property
    def kernel_config(self) -> KernelConfig:
        return schedules.config(self.schedule, **self.config)

    @cached_property
    def problem_key(self) -> Key:
        return problem_key(self)

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
                "precision": self.precision, "alignment": self.alignment, "invariant": self.invariant or None,
                "groups": self.groups or None, "sparse": self.sparse or None,
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
        return f"{short(self.program)}{self.apart} {extents(self.shape)} {self.a} {self.layout} on {self.gpu}, Triton {self.triton}"

    @property
    def apart(self) -> str:
        """What sets the problem apart from the usual one of its program, such as " (inputs fp32[n], invariant)": inputs of another dtype than the operands',
        the same bits for all M, groups, and a sparse operand; else ''."""
        unlike = any("[" in kind and not kind.startswith(f"{self.a}[") for kind in self.inputs)
        words = [f"inputs {', '.join(self.inputs)}"] * unlike + ["invariant"] * bool(self.invariant) + [f"groups along {self.groups}"] * bool(self.groups)
        words += [f"sparse {self.sparse}"] * bool(self.sparse)
        return f" ({', '.join(words)})" if words else ""


_CHECKS: Mapping[str, fields.Check] = {name: hint.__metadata__[0] for name, hint in get_type_hints(Record, include_extras=True).items()}
_OPTIONAL = [field.name for field in dataclass_fields(Record) if field.default is not MISSING]


def problem_key(problem: Problem) -> Key:
    p = problem
    usual = p.gpu, p.capability, p.spec, p.a, p.b, p.inputs, p.outputs, p.precision, p.layout, p.shape, p.alignment
    return (*usual, *[p.invariant] * bool(p.invariant), *[f"groups {p.groups}"] * bool(p.groups), *[f"sparse {p.sparse}"] * bool(p.sparse))


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
        before = kept.get(record.key)
        kept[record.key] = record if before is None else better(before, record)
    return kept


# -- documents


@dataclass(frozen=True, slots=True)
class Document:
    """One GPU's records, as read from a text. complaints: what of the text is left out, one line each, with its place."""

    gpu: str
    capability: str
    records: tuple[Record, ...]
    complaints: tuple[str, ...] = ()


_HEAD = {"schema": fields.one_of((SCHEMA,)), "gpu": GPU, "capability": CAPABILITY, "records": fields.listed(lambda record: record, 0, _MAX_RECORDS)}


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
        values = json.loads(text)
        record = Record.of(values | {"gpu": gpu, "capability": capability})
    except (ValueError, TypeError, RecursionError):
        return None
    return record if record.text == text else None


def parse(data: bytes) -> Document:
    """Reads a file's bytes. Records that do not fit the schema are left out, each with a complaint.

    Raises Damaged where the whole is unusable, DatabaseError where it was written by a newer epigen.
    """
    try:
        # what is no UTF-8 comes out as characters that no field lets pass
        loaded = load(data.decode("utf-8-sig", "surrogateescape"), "records", _MAX_RECORDS)
        head = fields.held(_migrate(loaded.document), _HEAD)
    except ValueError as wrong:  # of which `fields.Wrong` is one
        raise Damaged(_no_text(data) or str(wrong)) from None
    gpu, capability = head["gpu"], head["capability"]
    records, complaints = [], list(loaded.complaints)
    for number, item in enumerate(head["records"]):
        try:
            if not isinstance(item, dict) or {"gpu", "capability"} & item.keys():
                raise fields.unexpected("an object of a record's fields, without gpu and capability", item)
            records.append(Record.of({"gpu": gpu, "capability": capability} | item))
        except fields.Wrong as wrong:
            complaints.append(f"record {number}{_program_of(item)}: {wrong}")
    return Document(gpu, capability, tuple(records), tuple(complaints))


def _no_text(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8 text"
    return ""


def _migrate(document: object) -> dict[str, Any]:
    if isinstance(document, fields.Broken):
        raise Damaged(document.why)
    if not isinstance(document, dict):
        raise Damaged(f"expected an object with schema, gpu, capability and records, not {quoted(document)}")
    schema = document.get("schema")
    if type(schema) is not int:
        raise Damaged(f"schema: {fields.unexpected('a whole number', schema)}")
    if schema > SCHEMA:
        raise DatabaseError(f"written in schema {quoted(schema)} by a newer epigen, and this one reads up to {SCHEMA}: update epigen, or name another database")
    while schema != SCHEMA:
        if schema not in MIGRATIONS:
            raise Damaged(f"schema: {quoted(schema)} was never in use")
        try:
            document = MIGRATIONS[schema](document)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise Damaged(f"does not keep to its schema, {schema}: {type(error).__name__} {quoted(str(error))}") from None
        schema += 1
        document = document | {"schema": schema}
    return document


def _program_of(item: object) -> str:
    whole = item.content if isinstance(item, fields.Broken) else item
    program = whole.get("program") if isinstance(whole, dict) else None
    return f" ({quoted(short(program))})" if isinstance(program, str) else ""
