"""Threads that begin at one moment."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(count: int, work: Callable[[int], object]) -> list[BaseException]:
    """What went wrong in them, which a thread else keeps to itself. work: is given the number of its thread."""
    ready, failures = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        ready.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001  # the caller wants every kind
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return failures
