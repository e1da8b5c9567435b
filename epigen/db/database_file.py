"""One file of a tuning database: read defensively, written under a lock, never half.

The file's bytes go in and its document comes out. A write merges with what is on disk, so two tuners lose nothing, and replaces the file
by a rename, so that a reader, or a kill at any moment, finds the old file or the new one. A damaged file is kept beside the new one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from epigen.db import lock, records
from epigen.db.records import Damaged, Document, Key, Record
from epigen.errors import DatabaseError
from epigen.files import reason, sync_folder, write_new

MAX_BYTES = 16 << 20
"""Of one file, which every process reads whole at its first look-up. A record takes about 700 bytes."""

LOCK_TIMEOUT_S = 60.0
_POLL_S = 0.005  # about as long as a write takes

Change = Callable[[Mapping[Key, Record]], Iterable[Record]]
"""From what is on disk, by key, to what shall be."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a write found and did. complaints: what was wrong with the old file. aside: where it is kept, if it was damaged."""

    count: int
    complaints: tuple[str, ...] = ()
    aside: Path | None = None


class DatabaseFile:
    """One file, and what was last read from or written to it: only parts that changed are parsed again."""

    def __init__(self, path: Path, timeout_s: float = LOCK_TIMEOUT_S):
        # a link stays a link, and its target has one lock, whatever name it is opened by
        self.path = Path(os.path.realpath(path))
        self._timeout_s = timeout_s
        self._known: tuple[str, str, tuple[Record, ...]] = ("", "", ())

    def read(self) -> Document | None:
        """The file's document; None where there is no file. Raises Damaged, DatabaseError; messages begin with the path."""
        data = self._bytes()
        if data is None:
            return None
        try:
            document = self._quickly(data) or records.parse(data)
        except Damaged as error:
            raise Damaged(f"{self.path}: {error}") from None
        except DatabaseError as error:
            raise DatabaseError(f"{self.path}: {error}") from None
        self._remember(document.gpu, document.capability, document.records)
        return replace(document, complaints=tuple(f"{self.path}: {c}" for c in document.complaints))

    def demand_writable(self) -> None:
        """Take the lock and give it back. Raises DatabaseError where nothing could be written."""
        with self._locked():
            pass
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise DatabaseError(f"cannot write {self.path}: the folder may not be written to")

    def update(self, gpu: str, capability: str, change: Change) -> Saved:
        """Replaces the file by `change` of its content. Raises DatabaseError, and then leaves the file as it was."""
        with self._locked():
            complaints, document = self._to_change(gpu, capability)
            before = records.merged(document.records if document else ())
            after = list(change(before))
            if document is not None and not complaints and len(after) == len(document.records) and all(before.get(r.key) is r for r in after):
                return Saved(len(after))  # nothing new: the file is not touched
            data = records.render(gpu, capability, after).encode()
            if len(data) > MAX_BYTES:
                raise DatabaseError(f"{self.path} would take {len(data)} bytes, and the limit is {MAX_BYTES}: prune it, or name another database")
            try:
                aside = self._replace(data, damaged=bool(complaints))
            except OSError as error:
                raise DatabaseError(f"cannot write {self.path}: {reason(error)}") from None
            self._remember(gpu, capability, after)
        return Saved(len(after), complaints, aside)

    def _to_change(self, gpu: str, capability: str) -> tuple[tuple[str, ...], Document | None]:
        """What is on disk, and what is wrong with it."""
        try:
            document = self.read()
        except Damaged as error:
            return (str(error),), None
        if document is None:
            return (), None
        if (document.gpu, document.capability) != (gpu, capability):
            raise DatabaseError(
                f"{self.path} holds records of {document.gpu} ({document.capability}), and this is one of {gpu} ({capability}): name a folder, or another file"
            )
        return document.complaints, document

    def _bytes(self) -> bytes | None:
        try:
            # a pipe in the file's place must not hold up whoever opens it
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatabaseError(f"cannot read {self.path}: {reason(error)}") from None
        try:
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise DatabaseError(f"{self.path} is no regular file")
                data = file.read(MAX_BYTES + 1) if status.st_size <= MAX_BYTES else b""
        except OSError as error:
            raise DatabaseError(f"cannot read {self.path}: {reason(error)}") from None
        if max(status.st_size, len(data)) > MAX_BYTES:
            raise DatabaseError(f"{self.path} has {status.st_size} bytes, and the limit is {MAX_BYTES}")
        return data

    def _quickly(self, data: bytes) -> Document | None:
        """The document, if the bytes are what `render` writes: parts seen before are known, and only new ones are parsed."""
        gpu, capability, before = self._known
        if not gpu:
            return None
        known = {r.text: r for r in before}
        try:
            text = data.decode("ascii")
        except UnicodeDecodeError:
            return None
        parsed = []
        for part in records.split(text, gpu, capability):
            record = known.get(part) or records.parse_record(part, gpu, capability)
            if record is None:
                return None
            parsed.append(record)
        return Document(gpu, capability, tuple(parsed)) if parsed else None

    def _remember(self, gpu: str, capability: str, kept: Iterable[Record]) -> None:
        self._known = (gpu, capability, tuple(kept))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        held = self.path.with_name(f"{self.path.name}.lock")
        with contextlib.ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.held(held, self._timeout_s, _POLL_S))
            except lock.Held:
                raise DatabaseError(f"another process has held {held} for more than {self._timeout_s:g} s: nothing was written") from None
            except OSError as error:
                raise DatabaseError(f"cannot lock {held}: {reason(error)}") from None
            yield

    def _replace(self, data: bytes, damaged: bool) -> Path | None:
        """Write aside, fsync, rename, fsync the folder. damaged: the old file is kept too, under the name that is returned.

        Raises OSError, and then all is as it was.
        """
        # one name is enough under the lock, and what a killed process left is used up by the next
        aside = self.path.with_name(f".{self.path.name}.writing")
        mode = stat.S_IMODE(self.path.stat().st_mode) if os.path.lexists(self.path) else None
        write_new(aside, data, mode, lasting=True)
        kept = None
        try:
            kept = self._keep_damaged() if damaged else None
            aside.replace(self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            if kept is not None:
                self._give_back(kept)
            raise
        sync_folder(self.path.parent)
        return kept

    def _keep_damaged(self) -> Path:
        """Keeps the file under another name too: the lowest free `.damaged-N`. Nothing is ever overwritten."""
        number = 1
        while True:
            kept = self.path.with_name(f"{self.path.name}.damaged-{number}")
            try:
                os.link(self.path, kept)  # unlike a rename it fails where the name is taken
            except FileExistsError:
                number += 1
            except OSError:  # a file system without links; the lock keeps others of our kind away
                if os.path.lexists(kept):
                    number += 1
                    continue
                self.path.rename(kept)
                return kept
            else:
                return kept

    def _give_back(self, kept: Path) -> None:
        """Undo `_keep_damaged`."""
        if os.path.lexists(self.path):
            kept.unlink()
        else:
            kept.rename(self.path)
