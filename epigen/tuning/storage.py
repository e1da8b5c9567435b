"""Where studies live: in memory, in Optuna's journal files, or in a database that Optuna can use.

A URL goes in, an open Storage comes out, and whatever goes wrong with it is a TuneError in words. One open storage serves many studies
and several threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import BaseJournalBackend
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from epigen.errors import TuneError

_KNOWN = "a file that ends in .journal, journal://FILE, sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
_CONNECT_S = 10  # what a server that does not answer may take
_LOCK_S = 30.0  # an append takes well under a millisecond
_POLL_S = 0.001
_OPENINGS = 5
_FIRST_KEY = b'{"op_code"'  # what every line of a journal begins with


class Storage:
    """An open storage. label: its URL, without the password. lasting: other processes and later runs see it too."""

    def __init__(self, label: str, backend: BaseStorage | None, folder: Path | None = None):
        """backend: serves all studies. folder: in its place, holds one journal file a study."""
        self.label, self.folder = label, folder
        self.lasting = not isinstance(backend, InMemoryStorage)
        self._backend = backend

    def backend(self, study: str) -> BaseStorage:
        """Optuna's storage that holds a study of this name."""
        if self._backend is not None:
            return self._backend
        assert self.folder is not None
        # two long names may meet in one file, which is no harm: a study is found by its whole name there
        return _journal(self.folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', study)[:150]}.journal")

    @contextlib.contextmanager
    def in_words(self) -> Iterator[None]:
        """Whatever fails of the storage inside the block becomes a TuneError."""
        try:
            yield
        except (StorageInternalError, SQLAlchemyError, OSError) as error:
            raise TuneError(f"the storage {self.label} failed: {_reason(error)}") from error

    def close(self) -> None:
        if isinstance(self._backend, RDBStorage):
            self._backend.remove_session()
            self._backend.engine.dispose()


def open_storage(url: str | None) -> Storage:
    """Open a place for studies.

    url: None for memory; `journal://FILE`, or a path that ends in .journal, for Optuna's journal file; `journal://FOLDER/` for one such
    file a study, which stays quick however many studies there are; else a database's URL as Optuna takes it.
    Raises TuneError where it is malformed or cannot be reached, or lacks its driver.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None:
        return Storage("memory", InMemoryStorage())
    scheme, found, rest = url.partition("://")
    if (found and scheme == "journal") or url.endswith(".journal"):
        place = rest if found else url
        if not place.strip("/"):
            raise TuneError(f"'{url}' names no file: write journal://FILE, or journal://FOLDER/ for one file a study")
        path = Path(place).expanduser()
        try:
            if place.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                return Storage(url, None, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            return Storage(url, _journal(path))
        except OSError as error:
            raise TuneError(f"the storage {url} cannot be opened: {_reason(error)}") from error
    return _database(url)


def _database(url: str) -> Storage:
    try:
        parsed = sqlalchemy.make_url(url)
    except (ArgumentError, ValueError):
        raise TuneError(f"'{_without_password(url)}' is no storage: write {_KNOWN}") from None
    label = parsed.render_as_string(hide_password=True)
    for opening in range(1, _OPENINGS + 1):
        try:
            return Storage(label, RDBStorage(url, engine_kwargs=_engine(parsed)))
        except ImportError as error:
            driver = _reason(error.__cause__ or error)
            raise TuneError(
                f"the storage {label} needs a driver: {driver}\n  for PostgreSQL: pip install 'psycopg[binary]', and a URL that begins with postgresql+psycopg://"
            ) from error
        except ArgumentError as error:  # no such kind of database
            raise TuneError(f"the storage {label} is of no known kind ({_reason(error)}): write {_KNOWN}") from error
        except (StorageInternalError, SQLAlchemyError, OSError, ValueError, RuntimeError) as error:
            # two tuners that open a new database make its tables at the same time: the one that lost finds them when it tries again
            if isinstance(error, SQLAlchemyError) and not isinstance(error, OperationalError) and opening < _OPENINGS:
                time.sleep(0.1 * opening)
                continue
            raise TuneError(f"the storage {label} cannot be used: {_reason(error)}") from error
    raise AssertionError


def _engine(url: sqlalchemy.URL) -> dict[str, Any]:
    """What SQLAlchemy is told beside the URL: not to wait for ever."""
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 30}}
    known = url.get_backend_name() in ("postgresql", "mysql", "mariadb") and not url.drivername.endswith(("pg8000", "asyncpg", "connector"))
    connect = {"connect_timeout": _CONNECT_S} if known and "connect_timeout" not in url.query else {}
    return {"connect_args": connect, "pool_pre_ping": True}  # a server may restart between two trials


def _without_password(url: str) -> str:
    """A malformed URL may hold a password all the same."""
    return re.sub(r":[^:/@]*@", ":***@", url)


def _reason(error: BaseException) -> str:
    """One line of what went wrong at the root of an error."""
    root = error
    while isinstance(root, StorageInternalError) and root.__cause__ is not None:
        root = root.__cause__
    original = getattr(root, "orig", None) or root
    if isinstance(original, OSError) and original.strerror:
        return f"{original.strerror}: {original.filename}" if original.filename else original.strerror
    lines = [line.strip() for line in str(original).splitlines() if line.strip()]
    return (lines[0] if lines else type(original).__name__)[:300]


def _journal(path: Path) -> BaseStorage:
    return JournalStorage(_JournalFile(path))


class _JournalFile(BaseJournalBackend):
    """Optuna's journal format, appended to without waiting for the disk, and mended after a kill.

    Optuna's own file backend waits for the disk after every line, and its lock outlives a killed process by half a minute. Here the lock
    is the kernel's, which goes with its process. A line that a kill left unfinished is read by nobody, and cut off before the next.
    A loss of power may lose the last trials, which are then measured again.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines, self.bytes = 0, 0  # how far it has been read
        os.close(self._open())

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if log_number_from < self.lines:
            self.lines = self.bytes = 0
        with self.path.open("rb") as file:
            if self.bytes > os.fstat(file.fileno()).st_size:
                raise TuneError(f"the journal {self.path} was cut short while in use")
            file.seek(self.bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # under way, or left unfinished
                log = self._parsed(line)
                self.lines, self.bytes = self.lines + 1, self.bytes + len(line)
                if self.lines > log_number_from:
                    yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        descriptor = self._open()
        try:
            self._lock(descriptor)
            self._cut(descriptor)
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)  # and the lock goes

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TuneError(f"the journal {self.path} has been locked by another process for {_LOCK_S:.0f} s") from None
                time.sleep(_POLL_S)

    def _cut(self, descriptor: int) -> None:
        """Cut off a last line without its end: whoever was writing it is gone, or would hold the lock."""
        size = os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return
        tail, start = b"", size
        while start and b"\n" not in tail:
            start = max(0, start - 4096)
            tail = os.pread(descriptor, size - start, start)
        tail = tail[tail.rfind(b"\n") + 1 :]
        if tail[: len(_FIRST_KEY)] != _FIRST_KEY[: len(tail)]:
            raise self._damaged()  # some other file, which is left as it is
        os.ftruncate(descriptor, size - len(tail))

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            log = json.loads(line)
        except ValueError:
            raise self._damaged() from None
        if not isinstance(log, dict) or "op_code" not in log:
            raise self._damaged()
        return log

    def _damaged(self) -> TuneError:
        return TuneError(f"{self.path} is no journal of Optuna's, or is damaged in line {self.lines + 1}: remove it, or name another file")
