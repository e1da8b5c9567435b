"""A recorded sweep: one problem, and what every config of a sample measured. What `--replay` searches and what the model is held to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.errors import EpigenError
from epigen.runtime.device import Target
from epigen.tuning.task import OUTCOMES, Baseline, Outcome, Task


@dataclass(frozen=True, slots=True)
class Table:
    """task: the problem. rows: config -> outcome, in the order measured. environment: GPU, versions, date."""

    task: Task
    baseline: Baseline
    rows: Mapping[KernelConfig, Outcome]
    environment: Mapping[str, Any]


def to_json(table: Table) -> str:
    """A config a line, so that a table reviews well."""
    task = asdict(table.task)
    head = {"environment": dict(table.environment), "task": task, "baseline": asdict(table.baseline)}
    rows = [json.dumps([c.schedule, dict(c.values), o.kind, round(o.median_us, 3), round(o.spread_us, 3)]) for c, o in table.rows.items()]
    return json.dumps(head, indent=1, sort_keys=True)[:-2] + ',\n "rows": [\n' + ",\n".join(rows) + "\n]}\n"


def list_to_json(tables: Iterable[Table]) -> str:
    return '{"tables": [\n' + ",\n".join(to_json(table).rstrip() for table in tables) + "\n]}\n"


def list_from_json(text: str) -> list[Table]:
    """Raises EpigenError for text that is no list of tables."""
    try:
        found = json.loads(text)["tables"]
    except (ValueError, KeyError, TypeError) as error:
        raise EpigenError(f"this is no list of tables: {type(error).__name__}: {error}") from error
    return [_from_data(one) for one in found]


def from_json(text: str) -> Table:
    """Raises EpigenError for text that is no table."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise EpigenError(f"this is no table of measurements: {error}") from error
    return _from_data(found)


def _from_data(found: Any) -> Table:
    try:
        task = found["task"]
        target = Target(**task.pop("target"))
        rows = {}
        for schedule, values, kind, median_us, spread_us in found["rows"]:
            if kind not in OUTCOMES:
                raise ValueError(f"unknown outcome {kind!r}")
            rows[schedules.config(schedule, **values)] = Outcome(kind, float(median_us), float(spread_us))
        shape = tuple(int(e) for e in task.pop("shape"))
        return Table(Task(**task, shape=shape, target=target), Baseline(**found["baseline"]), rows, found["environment"])  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError) as error:
        raise EpigenError(f"this is no table of measurements: {type(error).__name__}: {error}") from error


def read(path: Path) -> Table:
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise EpigenError(f"cannot read {path}: {error.strerror}") from error
