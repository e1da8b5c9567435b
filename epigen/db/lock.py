"""The kernel's lock on an open file, which goes with the process that holds it. Whoever wants it too waits for a while."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


class Held(Exception):
    """Another process has held the lock all the time."""


def wait(descriptor: int, timeout_s: float, poll_s: float) -> None:
    """Take the lock of an open file. Raises Held, and OSError where the file system has no locks."""
    import fcntl  # readers take no lock, and a kernel's first call is one

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Held from None
            time.sleep(poll_s)


@contextlib.contextmanager
def held(path: Path, timeout_s: float, poll_s: float) -> Iterator[None]:
    """Hold the lock of a file that is there for nothing else, and stays there. What lies under its name is neither followed nor changed.

    Raises Held, and OSError where the file cannot be made or locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        wait(descriptor, timeout_s, poll_s)
        yield
    finally:
        os.close(descriptor)
