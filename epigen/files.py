"""Files that appear whole or not at all, in folders where others may write too."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


def write_new(path: Path, data: bytes, mode: int | None = None, lasting: bool = False) -> None:
    """Write a file that was not there. Whatever lies under its name is removed: a link or a pipe is neither followed nor waited for.

    mode: its permissions, where the file system knows any; by default those that the process gives its files. lasting: on the disk when this returns. Raises OSError, and then
    leaves nothing.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            if lasting:
                sync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write aside and rename, so that no reader sees half of it; a link under the name is replaced, not followed. As `write_new` otherwise."""
    aside = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    write_new(aside, data, mode)
    try:
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sync(descriptor: int) -> None:
    """Wait for the disk, where the file system knows how to."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def sync_folder(folder: Path) -> None:
    """Wait until the folder's names are on the disk; a folder that may be written to and not read cannot be waited for."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def reason(error: OSError) -> str:
    """What went wrong, in the system's words."""
    return error.strerror or str(error) or type(error).__name__
