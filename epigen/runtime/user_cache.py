"""Files for this user alone: a folder that nobody else can write to, and files that appear in it whole or not at all.

The cache folder, or else one in the temporary folder, where anybody may have put something under the expected name before.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from epigen.files import write_whole


class UserCache:
    """Writes to the first folder that will do. cache: the cache folder, if there is one."""

    def __init__(self, cache: Path | None):
        self.cache = cache
        self.own: Path | None = None

    def write(self, name: str, text: str) -> Path | None:
        """The text's file; None where no folder can be written. One with the same text is left as it is, so that any number of processes
        may write it at a time."""
        for folder in self._folders():
            with contextlib.suppress(OSError):
                return _write(folder / name, text)
        return None

    def folder(self, name: str) -> Path | None:
        """A folder of that name, which only this user can change; None where none can be made."""
        for folder in self._folders():
            with contextlib.suppress(OSError):
                if os.access(folder, os.W_OK | os.X_OK) and _make(folder / name):
                    return folder / name
        return None

    def read(self, name: str) -> str | None:
        """What an earlier process wrote to the cache folder; None where there is nothing, or where somebody else might have written it."""
        try:
            return _read(self.cache / name) if self.cache is not None and _safe(self.cache) else None
        except (OSError, UnicodeDecodeError):
            return None

    def _folders(self) -> Iterator[Path]:
        """Those that are there and this user's alone, best first."""
        if self.cache is not None:
            with contextlib.suppress(OSError):
                if _make(self.cache):
                    yield self.cache
        with contextlib.suppress(OSError):  # there may be no temporary folder
            shared = Path(tempfile.gettempdir()) / f"epigen-{os.getuid()}"
            if _make(shared):
                yield shared
        with contextlib.suppress(OSError):
            if self.own is None:  # for as long as this process runs
                self.own = Path(tempfile.mkdtemp(prefix="epigen-"))
                atexit.register(shutil.rmtree, self.own, ignore_errors=True)
            yield self.own


def can_be_written(folder: Path) -> bool:
    """Whether files can be made in a folder, which need not be there yet."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return folder.parent != folder and can_be_written(folder.parent)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and os.access(folder, os.W_OK | os.X_OK)


def _make(folder: Path) -> bool:
    """Make the folder, or find it. False where others can change what is in it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _safe(folder)


def _safe(folder: Path) -> bool:
    """Whether a folder is this user's, and only this user may write to it; what a link leads to is not."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, text: str) -> Path:
    """Whole, unless it is there."""
    try:
        if _read(path) == text:
            return path
    except (OSError, UnicodeDecodeError):
        pass
    write_whole(path, text.encode(), 0o600)
    return path


def _read(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:  # nor does a pipe hold us up
        return file.read()
