"""The tuning database: the user's files, then the shipped ones; what tuning writes to and what a kernel's config is looked up in.

A database is a folder with one file a GPU, or one such file. Reading never fails: what cannot be read is left out and reported in
`complaints`. Writing goes to the user's database alone.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from epigen import settings
from epigen.db.database_file import LOCK_TIMEOUT_S, DatabaseFile, Saved
from epigen.db.lookup import Accept, Index, Recorded, distinct
from epigen.db.problem import Problem
from epigen.db.records import Key, Record, better, merged
from epigen.errors import DatabaseError
from epigen.files import reason
from epigen.uncollected import uncollected

_SUFFIX = ".json"


@dataclass(slots=True)
class Report:
    """What became of records that were added or merged. dropped: one line for each that lost to a better one; complaints: what could
    not be read; aside: where damaged files are kept."""

    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    dropped: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)


@dataclass(slots=True)
class _Seen:
    """A file as last read. stamp: what tells that it has changed."""

    stamp: tuple[int, ...]
    store: DatabaseFile
    records: tuple[Record, ...] = ()
    complaints: tuple[str, ...] = ()


def file_name(gpu: str, capability: str) -> str:
    """Such as nvidia_h200_sm90.json: letters and digits alone, whatever the driver calls its GPU."""
    part = capability if capability.startswith("gfx") else f"sm{capability.replace('.', '')}"
    return f"{re.sub('[^a-z0-9]+', '_', gpu.lower()).strip('_')}_{part}{_SUFFIX}"


def _one_file(path: Path) -> bool:
    """Whether `path` names a file, there already or not, and no folder."""
    # unlike Path's own methods these two raise nothing, as where a folder on the way may not be searched
    return os.path.isfile(path) or (path.suffix == _SUFFIX and not os.path.isdir(path))  # noqa: PTH112, PTH113


def files(path: Path) -> list[Path]:
    """The database's files: `path` itself, or those of the folder. Raises DatabaseError for a folder that cannot be read."""
    one = _one_file(path)
    try:
        if one:
            path.lstat()
            return [path]
        with os.scandir(path) as entries:
            return sorted(Path(e.path) for e in entries if e.name.endswith(_SUFFIX) and not e.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DatabaseError(f"cannot read {'' if one else 'the folder '}{path}: {reason(error)}") from None
    except ValueError as error:  # a NUL in the name
        raise DatabaseError(f"cannot read {str(path)!r}: {error}") from None


def there(path: Path) -> bool:
    """Whether there is such a file or folder. Raises DatabaseError where that cannot be found out."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise DatabaseError(f"cannot read {path}: {reason(error) if isinstance(error, OSError) else error}") from None
    return True


def _own_place() -> tuple[Path | None, str]:
    """The user's database; or else why there is none."""
    try:
        return settings.user_database_dir(), ""
    except DatabaseError as error:
        return None, str(error)


def check(path: Path) -> list[str]:
    """All that is wrong with the database's files, one line each, with its place."""
    complaints: list[str] = []
    for file in files(path):
        try:
            document = DatabaseFile(file).read()
        except DatabaseError as error:
            complaints.append(str(error))
            continue
        if document is not None:
            complaints += document.complaints
            if document.records and len(merged(document.records)) < len(document.records):
                complaints.append(f"{file}: {len(document.records) - len(merged(document.records))} records share another one's key")
    return complaints


class Database:
    """path: the user's, a folder or one .json file (default: EPIGEN_DB, else the platform's data folder; None where there is no such place). seeds: read-only ones, looked
    up after it (default: the shipped one).

    Reads follow the files: what another process writes is found at the next look-up.
    """

    def __init__(self, path: Path | None = None, seeds: Sequence[Path] | None = None, timeout_s: float = LOCK_TIMEOUT_S):
        self.path, self._nowhere = _own_place() if path is None else (path, "")
        given = (settings.seed_database_dir(),) if seeds is None else seeds
        self.seeds = tuple(s for s in given if self.path is None or s.absolute() != self.path.absolute())
        self._timeout_s = timeout_s
        self._seen: dict[Path, _Seen] = {}
        self._unreadable = self._homeless()
        self._stores: dict[Path, DatabaseFile] = {}
        self._index = Index(())
        self._mutex = threading.RLock()

    # -- reading

    @property
    def complaints(self) -> tuple[str, ...]:
        """What could not be read as of the last look-up, one line each, with its place. The rest is in use."""
        with self._mutex:
            return (*self._unreadable, *(c for seen in self._seen.values() for c in seen.complaints))

    def find(self, problem: Problem, triton: str, accept: Accept | None = None) -> Recorded | None:
        """The config to use, with the sentence that says why; None where nothing near enough was tuned.

        triton: the present version. accept: which configs are legal for the problem (default: all).
        """
        return next(iter(self.nearest(problem, triton, 1, accept)), None)

    def nearest(self, problem: Problem, triton: str, count: int, accept: Accept | None = None) -> tuple[Recorded, ...]:
        """Up to `count` different configs, best first, in the order that `lookup` describes."""
        return distinct(self.index().candidates(problem, triton, accept), count)

    def index(self) -> Index:
        """The records as they are now, in the order of look-up: another object once a file has changed."""
        with self._mutex:
            with uncollected():
                self._refresh()
            return self._index

    def records(self, seeds: bool = True) -> list[tuple[Path, Record]]:
        """Every record that can be read, with its file: the user's, then those of the seeds."""
        with self._mutex:
            self._refresh()
            own = None if seeds else {f for f in self._seen if self._own(f)}
            return [(file, record) for file, seen in self._seen.items() if own is None or file in own for record in seen.records]

    def _homeless(self) -> list[str]:
        return [self._nowhere] if self._nowhere else []

    @property
    def roots(self) -> tuple[Path, ...]:
        """Where records are looked up, in this order."""
        return self.seeds if self.path is None else (self.path, *self.seeds)

    def _source(self, file: Path) -> int:
        return next(i for i, root in enumerate(self.roots) if file == root or file.parent == root)

    def _own(self, file: Path) -> bool:
        return self.path is not None and self._source(file) == 0

    def _refresh(self) -> None:
        """Reads what is new or has changed on disk since the last time."""
        self._unreadable = self._homeless()
        now: dict[Path, _Seen] = {}
        for root in self.roots:
            try:
                listed = files(root)
            except DatabaseError as error:
                self._unreadable.append(str(error))
                continue
            for file in listed:
                if file not in now:
                    now[file] = self._read(file)
        if len(now) != len(self._seen) or any(self._seen.get(f) is not seen for f, seen in now.items()):
            self._seen = now
            sources: list[list[Record]] = [[] for _ in self.roots]
            for file, seen in now.items():
                sources[self._source(file)] += seen.records
            self._index = Index(merged(source).values() for source in sources)

    def _read(self, file: Path) -> _Seen:
        try:
            status = file.stat()
            stamp: tuple[int, ...] = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)
        except OSError:
            stamp = ()  # it went away, or cannot be reached: reading says which
        before = self._seen.get(file)
        if before is not None and before.stamp == stamp:
            return before
        seen = _Seen(stamp, before.store if before else DatabaseFile(file))
        try:
            document = seen.store.read()
        except DatabaseError as error:
            seen.complaints = (str(error),)
        else:
            if document is not None:
                seen.records, seen.complaints = document.records, document.complaints
        return seen

    # -- writing

    def demand_writable(self, gpu: str, capability: str) -> None:
        """Raises DatabaseError where nothing could be added for that GPU, so that nobody measures for an hour before it is found out."""
        DatabaseFile(self._file(gpu, capability), self._timeout_s).demand_writable()

    def add(self, *records: Record, replacing: bool = False) -> Report:
        """Adds records to the user's database; where it has a better one of the same key, that one stays. Raises DatabaseError.

        replacing: it goes, whatever its time. When this returns, the records are on disk, whatever becomes of this process.
        """
        self._demand_place()
        report = Report()
        by_gpu: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            by_gpu.setdefault((record.gpu, record.capability), []).append(record)
        for (gpu, capability), some in sorted(by_gpu.items()):

            def change(before: Mapping[Key, Record], some: list[Record] = some) -> Iterable[Record]:
                return _add(dict(before), some, report, replacing)

            self._update(gpu, capability, change, report)
        return report

    def merge(self, *paths: Path) -> Report:
        """Adds the records of other databases, folders or files. Raises DatabaseError for a path that does not exist."""
        records: list[Record] = []
        complaints: list[str] = []
        for path in paths:
            if not there(path):
                raise DatabaseError(f"{path} does not exist")
            other = Database(path, seeds=())
            records += (record for _, record in other.records())
            complaints += other.complaints
        report = self.add(*records)
        report.complaints[:0] = complaints
        return report

    def prune(self, triton: str | None = None, beaten: bool = False, dry: bool = False) -> Report:
        """Drops records of the user's database. Raises DatabaseError.

        triton: drop what was measured under other versions. beaten: drop what is slower than the same problem's record under another
        version. dry: only say what would be dropped.
        """
        self._demand_place()
        report = Report()

        def change(before: Mapping[Key, Record]) -> Iterable[Record]:
            best: dict[Key, Record] = {}
            for record in before.values():
                best[record.problem_key] = better(best.get(record.problem_key, record), record)
            kept = []
            for record in before.values():
                winner = best[record.problem_key]
                if triton is not None and record.triton != triton:
                    report.dropped.append(f"dropped {record}: not of Triton {triton}")
                elif beaten and winner is not record:
                    report.dropped.append(f"dropped {record}: {record.median_us:g} us, and {winner.median_us:g} us under Triton {winner.triton}")
                else:
                    kept.append(record)
            report.unchanged += len(kept)
            return kept

        own = [record for _, record in self.records(seeds=False)]
        for gpu, capability in sorted({(r.gpu, r.capability) for r in own}):
            if dry:
                change(merged(r for r in own if (r.gpu, r.capability) == (gpu, capability)))
            else:
                self._update(gpu, capability, change, report)
        return report

    def export(self, target: Path, wanted: Callable[[Record], bool] | None = None, seeds: bool = False) -> Report:
        """Adds the database's records to another one, a folder or a .json file. Raises DatabaseError, also where there is none to add."""
        chosen = [record for _, record in self.records(seeds) if wanted is None or wanted(record)]
        if not chosen:
            which = "no records that were asked for" if self.records(seeds) else "no records"
            raise DatabaseError("; ".join([f"nothing is exported: there are {which} in {self.path}", *self.complaints]))
        report = Database(target, seeds=()).add(*chosen)
        report.complaints[:0] = self.complaints
        return report

    def _update(self, gpu: str, capability: str, change: Callable[[Mapping[Key, Record]], Iterable[Record]], report: Report) -> None:
        with self._mutex:
            file = self._file(gpu, capability)
            store = self._stores.setdefault(file, DatabaseFile(file, self._timeout_s))
            written: Saved = store.update(gpu, capability, change)
        report.complaints += written.complaints
        if written.aside:
            report.aside.append(written.aside)

    def _demand_place(self) -> Path:
        if self.path is None:
            raise DatabaseError(self._nowhere)
        return self.path

    def _file(self, gpu: str, capability: str) -> Path:
        """The file that is written to. Raises DatabaseError where there is none."""
        path = self._demand_place()
        return path if _one_file(path) else path / file_name(gpu, capability)


def _add(kept: dict[Key, Record], records: Iterable[Record], report: Report, replacing: bool) -> Iterable[Record]:
    for record in records:
        before = kept.get(record.key)
        if before is None:
            report.added += 1
            kept[record.key] = record
        elif before == record:
            report.unchanged += 1
        else:
            winner = record if replacing else better(before, record)
            loser = before if winner is record else record
            report.replaced += winner is record
            kept[record.key] = winner
            report.dropped.append(f"dropped {loser}: {loser.median_us:g} us of {loser.date}, and {winner.median_us:g} us of {winner.date} stays")
    return kept.values()
