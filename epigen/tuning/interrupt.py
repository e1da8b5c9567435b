"""Ctrl-C: put off while a step must not be broken, and noticed even where Python loses it.

A KeyboardInterrupt may be raised between any two instructions, so also between what is stored and what is noted of it; and one that is
raised in a finalizer or in a weak reference's callback is printed and forgotten. Threads other than the main one are never interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Puts Ctrl-C off until the block has ended. A second Ctrl-C breaks it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


@contextlib.contextmanager
def noticed() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets inside the block, beside what it does else."""
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield event
        return

    def note(number: int, frame: FrameType | None) -> None:
        event.set()
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def heeded(event: threading.Event, patience_s: float) -> Iterator[None]:
    """Inside the block Ctrl-C sets the event and does nothing else, for code that watches it. One that comes later than `patience_s` after
    the first does what it always does: the first may come as two signals, to a process and to its group."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    first: list[float] = []

    def heed(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        event.set()
        if first[-1] - first[0] > patience_s:
            before(number, frame)

    signal.signal(signal.SIGINT, heed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
