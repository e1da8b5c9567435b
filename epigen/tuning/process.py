"""Worker processes: jobs go in, answers come out, and whatever happens to a worker costs one job.

A hang is killed after its time, a crash or a killed worker is told from its exit, and the next job gets a fresh process. All are forked
from one stem, which has imported what they need: the imports take seconds, and so are paid once. Both ends of each pipe are epigen's own,
so pickle reads only what epigen wrote.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import Any

from epigen import settings

_LAST_S = 10.0  # what the stem may take to end: it may still be importing


@dataclass(frozen=True, slots=True)
class Lost:
    """The answer that never came. kind: "timeout" or "crashed"."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Setup:
    """Tells a worker what the jobs from here on are about."""

    about: Any


@dataclass(frozen=True, slots=True)
class Fork:
    """Asks the stem for a worker of a module; the file descriptor that it answers on follows."""

    key: int
    module: str


@dataclass(frozen=True, slots=True)
class End:
    """Asks the stem to end a worker and to say its exit code, negative for a signal, as it was if the worker has ended by itself."""

    key: int


class Stem:
    """The process that workers are forked from. modules: what it imports first."""

    def __init__(self, *modules: str):
        self.modules = modules
        self.process: subprocess.Popen[bytes] | None = None
        self.control: Connection | None = None
        self.keys = itertools.count()

    def start(self) -> None:
        """Start it, if it does not run. Returns before it has imported anything."""
        if self.process is not None and self.process.poll() is None:
            return
        self.stop()
        self.control, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "epigen.tuning.stem", str(theirs.fileno()), *self.modules]
            # compilers and drivers print to the standard streams: nobody reads them
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=settings.child_environment(interpret=False),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the search, which ends its workers itself
            )  # fmt: skip

    def fork(self, module: str) -> tuple[int, Connection]:
        """A new worker's key and connection, at once: what is sent to it waits until the worker is there."""
        self.start()
        assert self.control is not None and self.process is not None
        key = next(self.keys)
        mine, theirs = Pipe()
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: then `mine` has no other end
            self.control.send(Fork(key, module))
            reduction.send_handle(self.control, theirs.fileno(), self.process.pid)
        return key, mine

    def end(self, key: int) -> int | None:
        """End a worker. Its exit code; None where the stem is gone and nobody knows."""
        if self.control is None:
            return None
        try:
            self.control.send(End(key))
            code: int | None = self.control.recv()
        except (EOFError, OSError):
            return None
        return code

    def stop(self) -> None:
        """End it and all its workers."""
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LAST_S)
            self.process.kill()
            self.process.wait()
        self.process = self.control = None


class Worker:
    """One process, forked from a stem, that answers jobs in order. module: its `worker(setup)` gives the function that answers them."""

    def __init__(self, stem: Stem, module: str):
        self.stem, self.module = stem, module
        self.setup: Any = None
        self.key: int | None = None
        self.connection: Connection | None = None

    def begin(self, setup: Any) -> None:
        """Answer by a setup from the next job on; a process that runs already keeps what it has. No job may be under way."""
        self.setup = setup
        if self.connection is not None:
            self._send(Setup(setup))

    def start(self) -> None:
        """Start the process, if there is none."""
        if self.connection is None:
            self.key, self.connection = self.stem.fork(self.module)
            self._send(Setup(self.setup))

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
        assert self.connection is not None
        try:
            if not self.connection.poll(timeout_s):
                self.stop()
                return Lost("timeout", f"no answer within {timeout_s:.0f} s")
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            code = self.stop()
            how = "and nobody knows why" if code is None else f"with signal {-code}" if code < 0 else f"with status {code}"
            return Lost("crashed", f"the worker ended {how}")

    def stop(self) -> int | None:
        """End the process. Its exit code; None where there was none, or nobody knows."""
        code = None
        if self.connection is not None and self.key is not None:
            code = self.stem.end(self.key)
            self.connection.close()
        self.key = self.connection = None
        return code
