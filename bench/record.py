"""A report is what one run of a script measured. This module writes and reads all of them.

A file of `results` is one JSON object:

    schema        SCHEMA
    script        the module that ran
    environment   GPU, driver, versions, date and commit
    summary       what is said of all rows together, a line each
    rows          what was measured, one a line, so that a diff shows a row

A file holds the last run alone. A row from an earlier run that still stands names its own commit.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epigen import gpus
from epigen.files import write_whole
from epigen.gpus import Target
from epigen.runtime.device import Machine
from epigen.shapes import Shape, extents
from epigen.tuning.request import shape_of

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parent.parent / "tests" / "data"
"""Measurements that tests and the fit of the model read: tables of configs, and the report of bench.ways."""

_PACKAGES = ("torch", "triton", "numpy", "optuna", "nvmath-python", "scikit-learn")
ENVIRONMENT = frozenset({"date", "commit", "python", *_PACKAGES, "gpu", "capability", "driver"})

Row = Mapping[str, Any]


class NoReport(Exception):
    """Why a file holds no report, in words."""


@dataclass(frozen=True, slots=True)
class Report:
    """script: the module that measured, such as bench.host. summary: what is no part of a row: settings, limits, and what follows from all rows."""

    script: str
    environment: Mapping[str, Any]
    rows: Sequence[Row]
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """All that was measured: the summary with the rows."""
        return {**self.summary, "rows": self.rows}


def add_options(parser: argparse.ArgumentParser, folder: Path = RESULTS) -> None:
    """What every script that writes a report takes: the commit, where the tree has no git, and the folder to write to."""
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=folder)


def options_with_shapes(about: str | None, shapes: Sequence[Shape], seconds: float | None = None) -> argparse.Namespace:
    """The options of a script that times problems of these shapes, or of those on the command line, tuned or not. about: its docstring.

    seconds: what it takes at most by default, if it can be told.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--tuned", action="store_true")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="after which no further problem is begun")
    parser.add_argument("shapes", nargs="*", type=shape_of, default=shapes)
    return parser.parse_args()


def gpu_at_hand(machine: Machine) -> Target:
    """The GPU to measure on. Ends the script where there is none."""
    target = machine.at_hand()
    if target is None:
        raise SystemExit("this wants a GPU")
    return target


def of_gpu(name: str, target: Target) -> str:
    """What a report is called that each kind of GPU has for itself."""
    return f"{name}_{gpus.of_target(target).short.lower()}"


def versions(commit: str | None = None) -> dict[str, Any]:
    """Packages, date and commit: all of the environment that a report without a GPU depends on."""
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "commit": commit or _commit(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(commit: str | None = None) -> dict[str, Any]:
    """GPU, driver, versions, date and commit. commit: where the tree has no git, the caller says it."""
    import torch

    found = versions(commit) | {"torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        query = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        found["driver"] = query.stdout.strip().split("\n")[0]
    return found


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return answer.stdout.strip() or "unknown"


def earlier(path: Path, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a report that was made by the same GPU and versions; none where there is no such report. Those of another commit name it."""
    try:
        found = read(path)
    except NoReport:
        return []
    if any(found.environment.get(k) != environment.get(k) for k in ("gpu", "torch", "triton", "driver")):
        return []
    return [dated(row, found, environment.get("commit")) for row in found.rows]


def dated(row: Row, report: Report, commit: Any) -> dict[str, Any]:
    """A report's row as it stands in one of `commit`: it names its own where that is another."""
    own = row.get("commit", report.environment.get("commit"))
    return {k: v for k, v in row.items() if k != "commit"} | ({} if own == commit else {"commit": own})


# -- files


def write(name: str, report: Report, folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_whole(path, text(report).encode())
    return path


def write_rows(
    name: str, target: Target, environment: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], options: argparse.Namespace
) -> Path:
    """What `bench.NAME` has measured so far, untuned or tuned: after each row, so that a run which is cut short leaves those that it has."""
    report = Report(f"bench.{name}", dict(environment), list(rows), {**summary, "tuned": options.tuned})
    return write(of_gpu(f"{name}_tuned" if options.tuned else name, target), report, options.out)


def each_shape(
    name: str, doc: str | None, shapes: Sequence[Shape], machine: Machine, measured: Callable[[Shape, bool], Mapping[str, Any]],
    said: Callable[[Mapping[str, Any]], str], verdict: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]],
) -> None:  # fmt: skip
    """Runs `bench.NAME`, which has a row for each shape. measured: one, and whether to tune first. said: a row, as a line."""
    options = options_with_shapes(doc, shapes)
    target, seen = gpu_at_hand(machine), environment(options.commit)
    rows: list[Mapping[str, Any]] = []
    for shape in options.shapes:
        rows.append(row := measured(shape, options.tuned))
        print(f"{extents(shape)}: {said(row)}", flush=True)
        written = write_rows(name, target, seen, rows, verdict(rows), options)
    print(written)


def text(report: Report) -> str:
    """As it stands in a file: a line for each key of the summary and for each row, with sorted keys."""
    head = {"schema": SCHEMA, "script": report.script, "environment": report.environment}
    summary = (f"{_line(key)}: {_line(report.summary[key])}" for key in sorted(report.summary))
    parts = [*(f"{_line(key)}: {_line(value)}" for key, value in head.items())]
    parts += [f'"summary": {{{_lines(summary)}}}', f'"rows": [{_lines(map(_line, report.rows))}]']
    return "{" + _lines(parts) + "}\n"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _lines(parts: Iterable[str]) -> str:
    inside = ",\n".join(parts)
    return f"\n{inside}\n" if inside else ""


def read(path: Path) -> Report:
    """Raises NoReport, which says why in one sentence."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise NoReport(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise NoReport(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise NoReport(f"{path} holds no report of schema {SCHEMA}: measure again")
    if missing := _KINDS.keys() ^ found.keys():
        raise NoReport(f"{path} holds no report: {', '.join(sorted(missing))} is missing or unknown")
    for key, kind in _KINDS.items():
        if not isinstance(found[key], kind):
            raise NoReport(f"{path} holds no report: {key} is no {'list' if kind is list else 'text' if kind is str else 'object'}")
    if unknown := found["environment"].keys() - ENVIRONMENT:
        raise NoReport(f"{path} holds no report: its environment has unknown fields: {', '.join(sorted(unknown))}")
    if not all(isinstance(row, dict) for row in found["rows"]):
        raise NoReport(f"{path} holds no report: a row is no object")
    return Report(**found)


_KINDS: Mapping[str, type] = {"script": str, "environment": dict, "summary": dict, "rows": list}
