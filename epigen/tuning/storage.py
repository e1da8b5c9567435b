"""Where studies live: in memory, in Optuna's journal files, or in a database that Optuna can use.

A URL goes in, an open Storage comes out, and whatever goes wrong with it is a TuneError in words. One open storage serves many studies
and several threads. A URL may hold a password: of a server's, no more than scheme and host is ever shown.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from epigen.errors import TuneError
from epigen.tuning.journal import JournalFile

_KNOWN = "a file that ends in .journal, journal://FILE, sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
_CREDENTIALS = re.compile(r":.*@", re.DOTALL)  # in what should be a path: this was to be a server's URL
_CONNECT_S = 10  # what a server that does not answer may take
_OPENINGS, _PAUSE_S = 100, 0.05  # while other tuners make the tables of a new database: each time one more of them is there
_TABLES = frozenset({"studies", "version_info", "trials", "alembic_version"})  # some of Optuna's
_HARMLESS = frozenset({"host", "port", "user", "sslmode", "connect_timeout", "timeout", "application_name", "driver", "charset", "mode", "uri"})
"""What a URL's query may name without being kept secret."""
_NAMES = frozenset({"password", "passwd", "pwd", "odbc_connect", "DRIVER", "PWD", "UID"})
"""What a password stands behind: to show these gives nothing away, and may say what is wrong."""
_DATA = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError)
"""What Optuna raises over rows and lines that somebody else has written."""


class Storage:
    """An open storage. label: its URL, without what is secret. lasting: other processes and later runs see it too."""

    def __init__(self, label: str, backend: BaseStorage | None, folder: Path | None = None, secrets: frozenset[str] = frozenset()):
        """backend: serves all studies. folder: in its place, holds one journal file a study. secrets: are never shown."""
        self.label, self.folder = label, folder
        self.lasting = not isinstance(backend, InMemoryStorage)
        self._backend, self._secrets = backend, secrets

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
        except (StorageInternalError, SQLAlchemyError, OSError, *_DATA) as error:
            raise TuneError(f"the storage {self.label} failed: {_reason(error, self._secrets)}") from (None if self._secrets else error)

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
    scheme, separator, rest = url.partition("://")
    if scheme == "journal" if separator else url.endswith(".journal"):
        return _journals(url, rest if separator else url)
    return _database(url)


def _journals(url: str, place: str) -> Storage:
    if not place.strip("/"):
        raise TuneError(f"'{url}' names no file: write journal://FILE, or journal://FOLDER/ for one file a study")
    if _CREDENTIALS.search(place) or "\0" in place:
        raise _malformed(url)
    try:
        path = Path(place).expanduser()
        if place.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            return Storage(url, None, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return Storage(url, _journal(path))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user whose home nobody knows
        raise TuneError(f"the storage {url} cannot be opened: {_reason(error)}") from error


def _journal(path: Path) -> BaseStorage:
    return JournalStorage(JournalFile(path))


# -- databases


def _database(url: str) -> Storage:
    try:
        parsed = sqlalchemy.make_url(url)
    except (ArgumentError, ValueError):
        raise _malformed(url) from None
    lite = parsed.get_backend_name() == "sqlite"
    # what follows an @ or a / in a password SQLAlchemy takes for part of the host or of the database
    place = parsed.database or ""
    if _CREDENTIALS.search(place) if lite else "@" in place or not re.fullmatch(r"[\w.:%-]*", parsed.host or ""):
        raise _malformed(url)
    if lite and parsed.database in (None, "", ":memory:"):
        return Storage("memory", InMemoryStorage())
    label, secrets = _label(parsed), _secrets(parsed)
    if lite:
        _check_file(label, parsed)
    for opening in range(1, _OPENINGS + 1):
        try:
            # at first without a pool, which would keep the connection of an opening that fails
            for pool in ({"poolclass": sqlalchemy.NullPool}, {}):
                backend = RDBStorage(_untemplated(url), engine_kwargs=_engine(parsed) | pool)
            return Storage(label, backend, secrets=secrets)
        except ImportError as error:
            driver = _reason(error.__cause__ or error, secrets)
            raise TuneError(
                f"the storage {label} needs a driver: {driver}\n  for PostgreSQL: pip install 'psycopg[binary]', and a URL that begins with postgresql+psycopg://"
            ) from None
        except ArgumentError as error:  # no such kind of database
            raise TuneError(f"the storage {label} is of no known kind ({_reason(error, secrets)}): write {_KNOWN}") from None
        except Exception as error:  # noqa: BLE001  # of Optuna, SQLAlchemy, alembic or any driver
            if _overtaken(error) and opening < _OPENINGS:
                time.sleep(random.uniform(0, _PAUSE_S))
                continue
            raise TuneError(f"the storage {label} cannot be used: {_reason(error, secrets)}") from None
    raise AssertionError


def _overtaken(error: Exception) -> bool:
    """Whether another tuner has just made what this one was about to make in a new database: it finds that when it tries again."""
    while isinstance(error, StorageInternalError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if not isinstance(error, SQLAlchemyError):
        return False
    original = getattr(error, "orig", None)
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    return isinstance(error, IntegrityError) or state in ("42P07", "42710") or "already exists" in str(original)


def _check_file(label: str, url: sqlalchemy.URL) -> None:
    """What SQLite calls "unable to open database file", and a file that another program keeps its own tables in. Raises TuneError."""
    path = Path(url.database or "")
    if url.query.get("uri") or path.name.startswith("file:"):
        return
    try:
        if path.is_dir():
            raise TuneError(f"the storage {label} cannot be used: this is a folder, and a file is wanted")
        if not path.absolute().parent.is_dir():
            raise TuneError(f"the storage {label} cannot be used: there is no folder {path.absolute().parent}")
        if not path.exists() or not path.stat().st_size:
            return
    except OSError as error:
        raise TuneError(f"the storage {label} cannot be used: {_reason(error)}") from None
    engine = sqlalchemy.create_engine(url, **_engine(url))
    try:
        there = sqlalchemy.inspect(engine).get_table_names()
    except SQLAlchemyError as error:
        raise TuneError(f"the storage {label} cannot be used: {_reason(error, _secrets(url))}") from None
    finally:
        engine.dispose()
    if there and not _TABLES & {*there}:
        raise TuneError(f"the storage {label} cannot be used: it holds tables of another program ({', '.join(sorted(there)[:3])}): name a new file")


def _engine(url: sqlalchemy.URL) -> dict[str, Any]:
    """What SQLAlchemy is told beside the URL: not to wait for ever."""
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 30}}
    known = url.get_backend_name() in ("postgresql", "mysql", "mariadb") and not url.drivername.endswith(("pg8000", "asyncpg", "connector"))
    connect = {"connect_timeout": _CONNECT_S} if known and "connect_timeout" not in url.query else {}
    return {"connect_args": connect, "pool_pre_ping": True}  # a server may restart between two trials


def _untemplated(url: str) -> str:
    """Optuna formats a URL with its schema's version: a brace in a password is none of that."""
    return url.replace("{", "{{").replace("}", "}}")


# -- what is said of it


def _label(url: sqlalchemy.URL) -> str:
    """Scheme and host, or a file."""
    if url.get_backend_name() == "sqlite":
        return f"{url.drivername}:///{url.database}"
    return f"{url.drivername}://{url.host or ''}"


def _secrets(url: sqlalchemy.URL) -> frozenset[str]:
    """Parts of a URL, each as it is written and as it is meant, that nobody should read in a message."""
    secrets = {str(url.password)} if url.password else set()
    for name, values in url.query.items():
        if name not in _HARMLESS:
            texts = (values,) if isinstance(values, str) else values
            secrets |= {part for text in (name, *texts) for part in (text, *re.split(r"[;=,\s{}]+", text)) if len(part) > 2}
    secrets -= _NAMES
    return frozenset(form for part in secrets for form in (part, urllib.parse.quote(part, safe=""), urllib.parse.unquote(part)))


def _malformed(url: str) -> TuneError:
    scheme, separator, _ = url.partition("://")
    plain = re.fullmatch(r"[\w./~ +-]*", url)
    shown = url if plain else f"{scheme}://…" if separator and re.fullmatch(r"[\w+]+", scheme) else "what was given"
    password = "; in a password @ is written %40, : is %3A and / is %2F" if "@" in url else ""
    return TuneError(f"{shown if shown == 'what was given' else repr(shown)} is no storage: write {_KNOWN}{password}")


def _reason(error: BaseException, secrets: frozenset[str] = frozenset()) -> str:
    """One line of what went wrong at the root of an error, where it repeats nothing secret."""
    root = error
    while isinstance(root, StorageInternalError) and root.__cause__ is not None:
        root = root.__cause__
    original = getattr(root, "orig", None) or root
    kind = type(original).__name__
    if isinstance(original, OSError) and original.strerror:
        said = f"{original.strerror}: {original.filename}" if original.filename else original.strerror
    else:
        lines = [line.strip() for line in str(original).splitlines() if line.strip()]
        said = (lines[0] if lines else kind)[:300]
        if isinstance(original, _DATA):
            said = f"{kind}: {said}"
    return f"{kind}, of which the message repeats a part of the URL" if any(secret in said for secret in secrets) else said
