"""Worker processes: jobs go in, answers come out, and whatever happens to a worker costs one job.

A hang is killed after its time, a crash or a killed worker is told from its exit, and the next job gets a fresh process. All are forked
from one fork server, which has imported what they need: the imports take seconds, and so are paid once. Both ends of each pipe are epigen's own,
so pickle reads only what epigen wrote.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from epigen import settings
from epigen.errors import TuneError
from epigen.files import reason

_LAST_S = 10.0  # what the fork server may take to end: it may still be importing
_STARTS = 3  # in a row that come to nothing, until it is given up


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer that never came. kind: "timeout" or "crashed"."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Setup:
    """Tells a worker what the jobs from here on are about."""

    about: Any


@dataclass(frozen=True, slots=True)
class Fork:
    """Asks the fork server for a worker of a module; the file descriptor that it answers on follows."""

    key: int
    module: str


@dataclass(frozen=True, slots=True)
class End:
    """Asks the fork server to end a worker and to say its exit code, negative for a signal, as it was if the worker has ended by itself."""

    key: int


class ForkServer:
    """The process that workers are forked from. modules: what it imports first."""

    def __init__(self, *modules: str):
        self.modules = modules
        self.process: subprocess.Popen[bytes] | None = None
        self.control: Connection | None = None
        self.keys = itertools.count()
        self.answered = False  # whether a worker of this process has answered anything
        self.barren = 0  # processes in a row that ended before that
        self.said: IO[bytes] | None = None  # what it says while it imports

    def start(self) -> None:
        """Start it, if it does not run. Returns before it has imported anything.

        Raises TuneError where it cannot be started, or has ended several times before any worker answered.
        """
        if self.process is not None:
            status = self.process.poll()
            if status is None:
                return
            self.barren = 0 if self.answered else self.barren + 1
            if self.barren >= _STARTS:
                raise TuneError(f"the worker processes end with status {status} before they can measure anything: {self._last_words()}")
        self.stop()
        if getattr(sys, "frozen", False) or not sys.executable:
            raise TuneError("tuning starts processes of Python, and this program does not know where it is: tune with the command `epigen tune`")
        self.answered = False
        with contextlib.suppress(OSError):  # no folder for temporary files: then nobody can say
            self.said = tempfile.TemporaryFile()  # noqa: SIM115  # `stop` closes it
        self.control, theirs = _pipe()
        with theirs:
            command = [sys.executable, "-m", "epigen.tuning.fork_server", str(theirs.fileno()), *self.modules]
            # compilers and drivers print to the standard streams: nobody reads them
            try:
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=settings.child_environment(interpret=False), cwd=_folder(),
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.said or subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's Ctrl-C is for the search, which ends its workers itself
                )  # fmt: skip
            except OSError as error:
                self.stop()
                raise TuneError(f"the worker processes cannot be started with {sys.executable}: {reason(error)}") from None

    def _last_words(self) -> str:
        if self.said is None:
            return "nobody knows why"
        self.said.seek(0)
        lines = [line.strip() for line in self.said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it says nothing"

    def fork(self, module: str) -> tuple[int, Connection]:
        """A new worker's key and connection, at once: what is sent to it waits until the worker is there."""
        self.start()
        assert self.control is not None and self.process is not None
        key = next(self.keys)
        mine, theirs = _pipe()
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: then `mine` has no other end
            self.control.send(Fork(key, module))
            reduction.send_handle(self.control, theirs.fileno(), self.process.pid)
        return key, mine

    def end(self, key: int) -> int | None:
        """End a worker. Its exit code; None where the fork server is gone and nobody knows."""
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
        if self.said is not None:
            self.said.close()
            self.said = None
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LAST_S)
            self.process.kill()
            self.process.wait()
        self.process = self.control = None


Stem = ForkServer
"""Its name before, which programs of users import."""


def _pipe() -> tuple[Connection, Connection]:
    """As `Pipe`, beyond the standard streams' numbers: a process that was started without those has them free, and whatever prints writes to them."""
    one, other = Pipe()
    return _beyond_standard(one), _beyond_standard(other)


def _beyond_standard(connection: Connection) -> Connection:
    if connection.fileno() > 2:
        return connection
    with connection:
        return Connection(fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _folder() -> str | None:
    """Where a child runs: where this process does, so that relative paths of the environment hold, unless that is gone."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return "/"
    return None


class Worker:
    """One process, forked from a fork server, that answers jobs in order. module: its `worker(setup)` gives the function that answers them."""

    def __init__(self, fork_server: ForkServer, module: str):
        self.fork_server, self.module = fork_server, module
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
            self.key, self.connection = self.fork_server.fork(self.module)
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
        """Wait for the answer of the job under way, `timeout_s` at most; a Failed where there will be none."""
        assert self.connection is not None
        try:
            if not self.connection.poll(timeout_s):
                self.stop()
                return Failed("timeout", f"no answer within {timeout_s:.0f} s")
            answer = self.connection.recv()
            if isinstance(answer, Failed):  # its last words
                self.stop()
            else:
                self.fork_server.answered = True
            return answer
        except (EOFError, ConnectionResetError):
            code = self.stop()
            how = "and nobody knows why" if code is None else f"with signal {-code}" if code < 0 else f"with status {code}"
            return Failed("crashed", f"the worker ended {how}")

    def stop(self) -> int | None:
        """End the process. Its exit code; None where there was none, or nobody knows."""
        code = None
        if self.connection is not None and self.key is not None:
            code = self.fork_server.end(self.key)
            self.connection.close()
        self.key = self.connection = None
        return code
