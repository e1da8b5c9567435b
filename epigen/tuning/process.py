"""A worker process: jobs go in, answers come out, and whatever happens to it costs one job.

A hang is killed after its time, a crash or a killed worker is told from its exit, and the next job gets a fresh process. Both ends of
the pipe are epigen's own, so pickle reads only what epigen wrote.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from epigen import settings


@dataclass(frozen=True, slots=True)
class Lost:
    """The answer that never came. kind: "timeout" or "crashed"."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Setup:
    """Tells a worker what the jobs from here on are about."""

    setup: Any


class Worker:
    """One process that runs `python -m MODULE FD` and answers jobs in order.

    module: its `__main__` opens the connection on the file descriptor FD and calls `serve`.
    """

    def __init__(self, module: str):
        self.module = module
        self.setup: Any = None
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def start(self) -> None:
        """Start the process, if there is none: its imports take seconds, and need no setup."""
        if self.process is None:
            self._start()

    def begin(self, setup: Any) -> None:
        """Answer by a setup from the next job on; a process that runs already keeps what it has imported. No job may be under way."""
        self.setup = setup
        if self.process is not None:
            self._send(_Setup(setup))

    def submit(self, job: Any) -> None:
        """Send a job; starts the process if there is none."""
        self.start()
        self._send(job)

    def _send(self, message: Any) -> None:
        assert self.connection is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: `answer` says so
            self.connection.send(message)

    def answer(self, timeout_s: float) -> Any:
        """Wait for the answer of the job under way, `timeout_s` at most; a Lost where there will be none."""
        assert self.connection is not None and self.process is not None
        try:
            if not self.connection.poll(timeout_s):
                self.stop()
                return Lost("timeout", f"no answer within {timeout_s:.0f} s")
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            status = self.process.wait()
            self.stop()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            return Lost("crashed", f"the worker ended with {how}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.connection is not None:
            self.connection.close()
        self.process = self.connection = None

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", self.module, str(theirs.fileno())]
            environment = settings.child_environment(interpret=False)
            # compilers and drivers print to the standard streams: nobody reads them
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the search, which ends its workers itself
            )  # fmt: skip
        if self.setup is not None:
            self._send(_Setup(self.setup))


def serve(answer_with: Any) -> None:
    """A worker's main: `answer_with(setup)` gives the function that answers jobs. Ends when the pipe closes."""
    connection = Connection(int(sys.argv[1]))
    handle: Any = None
    try:
        while True:
            job = connection.recv()
            if isinstance(job, _Setup):
                handle = None  # what the old setup holds goes before the new one is made
                handle = answer_with(job.setup)
            else:
                connection.send(handle(job))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
