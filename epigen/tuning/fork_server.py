"""The process that workers are forked from, run as `python -m epigen.tuning.fork_server FD MODULES…`. It uses no GPU itself.

FD: its end of the pipe to the tuner, over which it is told what to fork and what to end. When that pipe closes, all its workers end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from epigen.tuning.process import End, Failed, Fork, Setup


def main() -> None:
    control = Connection(int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    with open(os.devnull, "wb") as nobody:  # noqa: PTH123  # what was said until here may tell why it could not begin
        os.dup2(nobody.fileno(), 2)
    gc.freeze()  # what is imported stays: workers need not look through it again, nor copy its pages
    children: dict[int, int] = {}
    try:
        while True:
            request = control.recv()
            if isinstance(request, Fork):
                handle = reduction.recv_handle(control)
                child = os.fork()
                if child == 0:
                    _become(request.module, control, handle)
                os.close(handle)
                children[request.key] = child
            elif isinstance(request, End):
                child = children.pop(request.key)
                os.kill(child, signal.SIGKILL)  # it is not reaped yet, so the number is its own; one that has ended keeps its status
                control.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for child in children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _become(module: str, control: Connection, handle: int) -> None:
    """A worker's whole life, in the forked process."""
    status = 1
    try:
        control.close()
        serve(importlib.import_module(module).worker, Connection(handle))
        status = 0
    finally:
        os._exit(status)


def serve(worker: Callable[[Any], Callable[[Any], Any]], connection: Connection) -> None:
    """Answer jobs until the pipe closes. worker: makes, of a setup, the function that answers. What either raises is told, and ends the process: nobody expected it."""
    answer: Callable[[Any], Any] | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            job = connection.recv()
            try:
                if isinstance(job, Setup):
                    answer = None  # what the old setup holds goes before the new one is made
                    answer = worker(job.about)
                    continue
                assert answer is not None
                reply = answer(job)
            except Exception as error:
                connection.send(Failed("crashed", f"the worker failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"))
                raise
            connection.send(reply)


if __name__ == "__main__":
    main()
