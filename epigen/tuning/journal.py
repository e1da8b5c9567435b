"""Optuna's journal format in a file: appended to without waiting for the disk, mended after a kill, and read defensively.

Bytes go in and sound log entries come out. A line that is damaged costs no more than what it tells, as long as all others keep their
meaning: trials are numbered by the order of their lines, so one that began a trial leaves a failed one in its place, and one whose kind cannot be told any
more makes the file unusable.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.distributions import json_to_distribution
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection
from optuna.trial import TrialState

from epigen.db import lock
from epigen.errors import TuneError

_LOCK_S = 30.0  # an append takes well under a millisecond
_POLL_S = 0.001
_LONGEST = 16 << 20  # bytes of a line
_FIRST_KEY = b'{"op_code"'  # what every line of a journal begins with


class JournalFile(BaseJournalBackend):
    """Optuna's own file backend waits for the disk after every line, and its lock outlives a killed process by half a minute. Here the lock
    is the kernel's, which goes with its process. A line that a kill left unfinished is read by nobody, and cut off before the next.
    A loss of power may lose the last trials, which are then measured again.
    """

    def __init__(self, path: Path):
        """Raises OSError for a file that cannot be opened to be read and written, TuneError for a device or a pipe."""
        self.path = path
        self.lines, self.bytes = 0, 0  # how far it has been read
        descriptor = self._open()
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        if not regular:
            raise TuneError(f"the journal {path} is no regular file")

    def _open(self) -> int:
        # a pipe in the file's place must not hold up whoever opens it
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if log_number_from < self.lines:
            self.lines = self.bytes = 0
        with self.path.open("rb") as file:
            if self.bytes > os.fstat(file.fileno()).st_size:
                raise TuneError(f"the journal {self.path} was cut short while in use")
            file.seek(self.bytes)
            while line := file.readline(_LONGEST):
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    return  # under way, or left unfinished
                log = _parsed(line)
                if log is None:
                    raise self._damaged()
                self.lines, self.bytes = self.lines + 1, self.bytes + len(line)
                if self.lines > log_number_from:
                    yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        descriptor = self._open()
        try:
            lock.wait(descriptor, _LOCK_S, _POLL_S)
            self._cut(descriptor)
            while data:
                data = data[os.write(descriptor, data) :]
        except lock.Held:
            raise TuneError(f"the journal {self.path} has been locked by another process for {_LOCK_S:.0f} s") from None
        finally:
            os.close(descriptor)  # and the lock goes

    def _cut(self, descriptor: int) -> None:
        """Cut off a last line without its end: whoever was writing it is gone, or would hold the lock."""
        size = os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return
        tail, start = b"", size
        while start and b"\n" not in tail and len(tail) < _LONGEST:
            start = max(0, start - 4096)
            tail = os.pread(descriptor, size - start, start)
        tail = tail[tail.rfind(b"\n") + 1 :]
        if tail[: len(_FIRST_KEY)] != _FIRST_KEY[: len(tail)]:
            raise self._damaged()  # some other file, which is left as it is
        os.ftruncate(descriptor, size - len(tail))

    def _damaged(self) -> TuneError:
        return TuneError(
            f"{self.path} is no journal of Optuna's, or is damaged in line {self.lines + 1}: remove it, or name another file (epigen tune --fresh removes those "
            "that it keeps by itself)"
        )


# -- lines


_CREATE_TRIAL, _SET_PARAMETER, _SET_STATE, _DISCARD = 4, 5, 6, 10  # codes of some kinds of lines
_LOSABLE = frozenset({2, 3, 5, 6, 7, 8, 9})
"""Codes of lines that number nothing: what they set of a study or a trial, later lines do not build on."""
_NOTHING: Mapping[str, Any] = {"op_code": 2, "worker_id": "", "study_id": -1, "user_attr": {"": None}}
"""Sets an attribute of a study that there is not, which Optuna passes over."""
_BEGINNING = re.compile(rb'\{"op_code": ?(\d{1,2}), ?"worker_id": ?"[^"\\]*", ?"(?:study|trial)_id": ?(\d{1,9})[,}]')


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The log of a line, or what takes the place of a damaged one; None where that would change what other lines mean."""
    try:
        log = json.loads(line)
    except (ValueError, RecursionError):
        log = None
    if _sound(log):
        entry: dict[str, Any] = log
        return dict(_NOTHING) if entry["op_code"] == _DISCARD else entry  # which Optuna 4 does not know, and later ones pass over
    code, about = _kind(log, line)
    if code == _CREATE_TRIAL and _whole(about):
        return {"op_code": code, "worker_id": "", "study_id": about, "state": TrialState.FAIL.value, "datetime_start": None}
    return dict(_NOTHING) if code in _LOSABLE else None


def _kind(log: object, line: bytes) -> tuple[int | None, int | None]:
    """The code of a damaged line and the study or trial that it is about, as far as either can be told."""
    if isinstance(log, dict):
        code, about = log.get("op_code"), log.get("study_id")
        return code if _whole(code) else None, about if _whole(about) else None
    beginning = _BEGINNING.match(line)
    if beginning is None or line.count(b'op_code"') > 1:  # two lines, of which the end of the first is damaged
        return None, None
    return int(beginning[1]), int(beginning[2])


def _sound(log: object) -> bool:
    """Whether Optuna can take an entry in, whatever stands before it. Fields that nobody knows are left to it."""
    if not isinstance(log, dict):
        return False
    code = log.get("op_code")
    if type(code) is not int or code not in _FIELDS or not isinstance(log.get("worker_id"), str):
        return False
    fields = _FIELDS[code]
    optional = _OPTIONAL if code == _CREATE_TRIAL else {}
    try:
        return (
            all(fits(log[name]) for name, fits in fields.items())
            and all(fits(log[name]) for name, fits in optional.items() if name in log)
            and (code != _CREATE_TRIAL or _sound_trial(log))
            and (code != _SET_PARAMETER or _sound_value(json_to_distribution(log["distribution"]), log["param_value_internal"]))
            and (code != _SET_STATE or _sound_state(log))
        )
    except Exception:  # noqa: BLE001  # whatever it is that a reader stumbles over: the line is damaged
        return False


def _sound_trial(log: Mapping[str, Any]) -> bool:
    distributions = {name: json_to_distribution(text) for name, text in log.get("distributions", {}).items()}
    both = log.get("value") is not None and log.get("values") is not None
    return not both and all(_sound_value(distributions[name], value) for name, value in log.get("params", {}).items())


def _sound_state(log: Mapping[str, Any]) -> bool:
    state = TrialState(log["state"])
    needed = "datetime_start" if state == TrialState.RUNNING else "datetime_complete" if state.is_finished() else None
    return needed is None or (log[needed] is not None and _moment(log[needed]))


def _sound_value(distribution: Any, value: Any) -> bool:
    """value: as Optuna keeps it, for a category its index."""
    distribution.to_external_repr(value)  # raises where that is nothing of it
    return _number(value)


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _moment(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(datetime.fromisoformat(value).astimezone()))


def _named(value: object) -> bool:
    return isinstance(value, dict)


def _one(value: object) -> bool:
    return isinstance(value, dict) and len(value) == 1


def _numbers(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(map(_number, value)))


def _text(value: object) -> bool:
    return isinstance(value, str)


_FIELDS: Mapping[int, Mapping[str, Callable[[Any], bool]]] = {
    0: {"study_name": _text, "directions": lambda value: isinstance(value, list) and bool(list(map(StudyDirection, value)))},
    1: {"study_id": _whole},
    2: {"study_id": _whole, "user_attr": _one},
    3: {"study_id": _whole, "system_attr": _one},
    4: {"study_id": _whole, "datetime_start": _moment},
    5: {"trial_id": _whole, "param_name": _text, "param_value_internal": _number, "distribution": _text},
    6: {"trial_id": _whole, "state": _whole, "values": _numbers},
    7: {"trial_id": _whole, "step": _whole, "intermediate_value": _number},
    8: {"trial_id": _whole, "user_attr": _one},
    9: {"trial_id": _whole, "system_attr": _one},
    10: {},
}
"""What entries have to hold, by code: a study made, deleted, described (two kinds of attributes), a trial begun, given a parameter, ended,
given a value on its way, described (two kinds again), trials discarded."""
_OPTIONAL: Mapping[str, Callable[[Any], bool]] = {
    "state": lambda value: TrialState(value) is not None,
    "value": lambda value: value is None or _number(value),
    "values": _numbers,
    "distributions": _named,
    "params": _named,
    "user_attrs": _named,
    "system_attrs": _named,
    "intermediate_values": lambda value: isinstance(value, dict) and all(int(step) >= 0 and _number(v) for step, v in value.items()),
    "datetime_complete": lambda value: value is not None and _moment(value),
}
"""Of a trial that begins as it was drafted."""
