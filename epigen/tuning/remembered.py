"""Where the trials of earlier searches are kept, so that a second run goes on from the first: one Optuna journal a problem."""

from __future__ import annotations

import re
from pathlib import Path

import epigen
from epigen import settings
from epigen.codegen.spec import digest
from epigen.runtime.loader import triton_version
from epigen.tuning.problem import graph_digest
from epigen.tuning.task import Task


def default_storage(task: Task) -> str | None:
    """The journal of a task's problem, under the user's cache folder; None where that folder cannot be written.

    A new version of Triton or of epigen, or a changed template, makes other kernels: it begins with an empty journal.
    """
    path = journal(task)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return str(path)


def forget(task: Task) -> None:
    """Remove what is remembered of a task's problem."""
    path = journal(task)
    # the lock that Optuna keeps beside a journal goes too: a killed run leaves it behind
    for file in (path, *path.parent.glob(f"{path.name}.*")):
        file.unlink(missing_ok=True)


def journal(task: Task) -> Path:
    precision = task.precision if task.a == "fp32" else ""
    shape = "x".join(map(str, task.shape))
    templates = [p.read_text() for p in sorted(settings.templates_dir().rglob("*.j2"))]
    key = (graph_digest(task.graph()), shape, task.a, task.b, task.inputs, task.layout, precision, task.target.part, task.target.name)
    name = digest([*key, triton_version(), epigen.__version__, *templates])
    part = re.sub("[^a-z0-9]+", "_", task.target.part.lower()).strip("_")
    return settings.studies_dir() / f"{part}_{shape}_{name}.journal"
