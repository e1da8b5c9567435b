"""Where the trials of earlier searches are kept, so that a second run goes on from the first: one Optuna journal a problem."""

from __future__ import annotations

from pathlib import Path

from epigen import settings
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
    # the lock that lies beside a journal goes too: a killed run leaves it behind
    for file in (path, *path.parent.glob(f"{path.name}.*")):
        file.unlink(missing_ok=True)


def journal(task: Task) -> Path:
    from epigen.tuning.tune import study_name  # with it comes all of Optuna, for which no call of a kernel should wait

    return settings.studies_dir() / f"{study_name(task).replace(' ', '_')}.journal"
