"""A recorded sweep: one problem, and what every config of a sample measured. What `--replay` searches and what the model is held to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epigen import dtypes
from epigen.codegen import schedules
from epigen.codegen.spec import GROUPED, INVARIANT, LAYOUTS, SPARSE, KernelConfig
from epigen.db import fields
from epigen.db.fields import quoted
from epigen.db.records import OUTCOMES
from epigen.dtypes import DType
from epigen.errors import CallError, ConfigError, EpigenError, ProgramError
from epigen.files import reason
from epigen.gpus import TARGETS, Target
from epigen.ir.graph import Graph
from epigen.ir.program import graph_of
from epigen.tuning.task import Baseline, Outcome, Task

_MOST_BYTES = 256 << 20
_LONGEST = 20_000  # characters of a program


@dataclass(frozen=True, slots=True)
class Table:
    """task: the problem. rows: config -> outcome, in the order measured. environment: GPU, versions, date."""

    task: Task
    baseline: Baseline
    rows: Mapping[KernelConfig, Outcome]
    environment: Mapping[str, Any]


def to_json(table: Table) -> str:
    """A line for each part of the head and for each config, so that a table reviews well."""
    head = {"environment": dict(table.environment), "task": _written(table.task), "baseline": asdict(table.baseline)}
    parts = [f'"{name}": {json.dumps(part, sort_keys=True)}' for name, part in head.items()]
    rows = [json.dumps([c.schedule, dict(c.values), o.kind, round(o.median_us, 3), round(o.spread_us, 3)]) for c, o in table.rows.items()]
    return "{" + ",\n".join(parts) + ',\n"rows": [\n' + ",\n".join(rows) + "\n]}\n"


def list_to_json(tables: Iterable[Table]) -> str:
    return '{"tables": [\n' + ",\n".join(to_json(table).rstrip() for table in tables) + "\n]}\n"


def list_from_json(text: str) -> list[Table]:
    """Raises EpigenError for text that is no list of tables."""
    document = _parsed(text, "list of tables")
    try:
        return [_table(one) for one in fields.held(_object(document), {"tables": _list})["tables"]]
    except fields.Wrong as wrong:
        raise EpigenError(f"this is no list of tables: {wrong}") from None


def from_json(text: str) -> Table:
    """Raises EpigenError for text that is no table."""
    try:
        return _table(_parsed(text, "table of measurements"))
    except fields.Wrong as wrong:
        raise EpigenError(f"this is no table of measurements: {wrong}") from None


def read(path: Path) -> Table:
    """Raises EpigenError, with the file's name, where it cannot be read or is no table."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise EpigenError(f"cannot read {path}: {reason(error)}") from None
    if len(data) > _MOST_BYTES:
        raise EpigenError(f"{path} has more than {_MOST_BYTES} bytes, and a table of measurements has no more")
    try:
        return from_json(data.decode())
    except UnicodeDecodeError:
        raise EpigenError(f"{path}: this is no table of measurements: no text in UTF-8") from None
    except EpigenError as error:
        raise EpigenError(f"{path}: {error}") from None


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise EpigenError(f"this is no {what}: nested too deeply") from None
    except ValueError as error:
        raise EpigenError(f"this is no {what}: {str(error).split(';')[0]}") from None


def _written(task: Task) -> dict[str, Any]:
    return {
        "text": task.graph.text, "shape": task.shape, "a": task.a.name, "b": task.b.name, "inputs": ",".join(t.name for t in task.inputs), "layout": task.layout,
        "precision": task.precision, "target": asdict(task.target), "device": task.device, "seed": task.seed,
    } | {name: value for name, value in (("invariant", task.invariant), ("groups", task.groups), ("sparse", task.sparse)) if value}  # fmt: skip


# -- what the fields may hold


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.unexpected("an object", value)
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise fields.unexpected("a list", value)
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise fields.unexpected("true or false", value)
    return value


def _program(value: Any) -> Graph:
    try:
        if isinstance(value, str) and len(value) <= _LONGEST:
            return graph_of(value)
    except ProgramError as error:
        raise fields.Wrong(f"no program: {error.diagnostics[0].message}") from None
    raise fields.unexpected(f"a program of at most {_LONGEST} characters", value)


def _dtype(value: Any) -> DType:
    return dtypes.BY_NAME[_NAME(value)]


def _inputs(value: Any) -> tuple[DType, ...]:
    parsed: tuple[DType, ...] = fields.listed(_dtype, 1, 1000)(value.split(",") if isinstance(value, str) else value)
    return parsed


def _target(value: Any) -> Target:
    target = Target(**fields.held(_object(value), _TARGET, without=("fp8", "tf32")))
    known = TARGETS[target.name]
    if (target.backend, target.arch) != (known.backend, known.arch):
        raise fields.Wrong(f"{target.name} is {known.backend} {known.arch}, not {quoted(target.backend)} {quoted(target.arch)}")
    return target


def _task(value: Any) -> Task:
    held = fields.held(_object(value), _TASK, without=("invariant", "groups", "sparse"))
    try:
        return Task(held.pop("text"), **held)
    except CallError as error:
        raise fields.Wrong(str(error)) from None
    except ValueError:
        raise fields.Wrong("inputs: one dtype, or one for each input that has indices") from None


def _row(value: Any) -> tuple[KernelConfig, Outcome]:
    schedule, values, kind, median_us, spread_us = fields.listed(lambda part: part, 5, 5)(value)
    outcome = Outcome(_KIND(kind), _US(median_us), _US(spread_us))
    if outcome.kind in ("ok", "slower") and not outcome.median_us:
        raise fields.Wrong("a config that was timed has a time above 0")
    try:
        return schedules.from_mapping(_object(values) | {"schedule": schedule}), outcome
    except ConfigError as error:
        raise fields.Wrong(str(error)) from None


def _table(value: Any) -> Table:
    held = fields.held(_object(value), _TABLE)
    return Table(held["task"], Baseline(**held["baseline"]), dict(held["rows"]), held["environment"])


_NAME = fields.one_of([t.name for t in dtypes.OPERANDS])
_KIND = fields.one_of(OUTCOMES)
_US = fields.number(0, 1e9, digits=17)
_COUNT = fields.whole(1, 1 << 31)
_TARGET: Mapping[str, fields.Check] = {
    "name": fields.one_of(TARGETS), "backend": fields.one_of(("cuda", "hip")), "arch": lambda value: value, "part": fields.text("a GPU's name", str.isprintable),
    **dict.fromkeys(("warp_size", "shared_bytes", "sm_shared_bytes", "sm_registers", "sm_threads", "sm_blocks", "multiprocessors"), _COUNT),
    "fp8": _flag, "tf32": _flag,
}  # fmt: skip
_TASK: Mapping[str, fields.Check] = {
    "text": _program, "shape": fields.listed(fields.whole(1, 10**9), 3, 4), "a": _dtype, "b": _dtype, "inputs": _inputs,
    "layout": fields.one_of(LAYOUTS), "precision": fields.one_of(dtypes.PRECISIONS), "invariant": fields.one_of(("", *INVARIANT)), "groups": fields.one_of(("", *GROUPED)), "sparse": fields.one_of(("", *SPARSE)), "target": _target, "device": fields.whole(0, 1000), "seed": fields.whole(0, 1 << 31),
}  # fmt: skip
_TABLE: Mapping[str, fields.Check] = {
    "task": _task,
    "baseline": lambda value: fields.held(_object(value), {"mm_us": _US, "unfused_us": _US}),
    "rows": fields.listed(_row, 1, 1_000_000),
    "environment": _object,
}
