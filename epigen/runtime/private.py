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
from pathlib import Path

from epigen.errors import EpigenError


class Private:
    """Writes to the first folder that will do."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.own: Path | None = None

    def write(self, name: str, text: str) -> Path:
        """The text's file. One with the same text is left as it is, so that any number of processes may write it at a time."""
        for folder in (self.cache, Path(tempfile.gettempdir()) / f"epigen-{os.getuid()}"):
            with contextlib.suppress(OSError):
                if _make(folder):
                    return _write(folder / name, text)
        try:
            if self.own is None:  # for as long as this process runs
                self.own = Path(tempfile.mkdtemp(prefix="epigen-"))
                atexit.register(shutil.rmtree, self.own, ignore_errors=True)
            return _write(self.own / name, text)
        except OSError:
            raise EpigenError(f"no folder for generated modules can be written: tried {self.cache} and the temporary folder; set EPIGEN_CACHE") from None

    def read(self, name: str) -> str | None:
        """What an earlier process wrote to the cache folder; None where there is nothing, or where somebody else might have written it."""
        try:
            return _read(self.cache / name) if _safe(self.cache) else None
        except (OSError, UnicodeDecodeError):
            return None


def _make(folder: Path) -> bool:
    """Make the folder, or find it. False where others can change what is in it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _safe(folder)


def _safe(folder: Path) -> bool:
    """Whether a folder is this user's, and only this user may write to it; what a link leads to is not."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, text: str) -> Path:
    """Written aside and renamed, so that no reader sees half of it; a link under the name is replaced, not followed."""
    try:
        if _read(path) == text:
            return path
    except (OSError, UnicodeDecodeError):
        pass
    file = tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8")  # noqa: SIM115  # it outlives its closing
    try:
        with file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        Path(file.name).unlink(missing_ok=True)
        raise
    return path


def _read(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:  # nor does a pipe hold us up
        return file.read()
