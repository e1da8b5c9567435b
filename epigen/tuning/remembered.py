"""Where the trials of earlier searches are kept, so that a second run goes on from the first: one Optuna journal a problem."""

from __future__ import annotations

import os
from pathlib import Path

from epigen import settings
from epigen.errors import TuneError
from epigen.files import reason
from epigen.tuning.task import Task


def default_storage(task: Task) -> str | None:
    """The journal of a task's problem, under the user's cache folder; None where that folder cannot be written.

    A new version of Triton or of epigen, or a changed template, makes other kernels: it begins with an empty journal.
    """
    path = journal(task)
    if path is None:
        return None
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # the cache folder: no other may write to it whatever the umask
        path.parent.mkdir(exist_ok=True, mode=0o700)
    except OSError:
        return None
    return str(path) if os.access(path.parent, os.W_OK | os.X_OK) else None


def forget(task: Task) -> None:
    """Remove what is remembered of a task's problem. Raises TuneError where it cannot be removed."""
    path = journal(task)
    if path is None:
        return
    # the lock that lies beside a journal goes too: a killed run leaves it behind
    try:
        for file in (path, *path.parent.glob(f"{path.name}.*")):
            file.unlink(missing_ok=True)
    except OSError as error:
        if os.access(path.parent, os.W_OK | os.X_OK):
            raise TuneError(f"cannot forget what {path} remembers: {reason(error)}") from None
        # else nothing is remembered there: see `default_storage`


def journal(task: Task) -> Path | None:
    from epigen.tuning.tune import study_name  # with it comes all of Optuna, for which no call of a kernel should wait

    folder = settings.studies_dir()
    return folder and folder / f"{study_name(task).replace(' ', '_')}.journal"
