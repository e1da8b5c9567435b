"""Compares two results, or two folders of results, and points out what has become slower by more than the noise.

Run: python -m bench compare OLD NEW [--drift SHARE] [--across-gpus]
Exit status: 0 nothing has, 1 something has, 2 the two cannot be compared.

Every group of contenders that were timed together is looked at, whichever script wrote it: epigen's time is taken as a ratio to each other
contender's, since absolute times move with power and temperature. The noise of a ratio follows from the recorded spreads and numbers of samples
of the four medians in it, and from `drift`: what the same kernels differ by from one run or machine to another, whatever the spread within one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.record import NoReport, Report
from epigen.tuning.task import median_error

DRIFT = 0.03
"""Between runs of the same prototype kernels on H200s, 2026-11."""

_SIGMAS = 3.0
_IDENTITY = ("group", "program", "case", "shape", "m", "n", "k", "dtype", "layout", "how", "contender")
"""The fields of a row that say what was measured; all others, such as the config, are how."""


Timing = Mapping[str, Mapping[str, float]]


class Incomparable(Exception):
    """Why two results say nothing of each other."""


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio in both results. name: the case. old, new: the baseline's time over ours. noise: the part by which they may differ anyhow."""

    name: str
    ours: str
    baseline: str
    old: float
    new: float
    noise: float

    @property
    def slower(self) -> float:
        """How much longer ours takes than before, beside the baseline; negative where it is faster."""
        return self.old / self.new - 1

    @property
    def regression(self) -> bool:
        return self.slower > self.noise

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.ours} against {self.baseline}: {self.old:.3f} before, {self.new:.3f} now: "
            f"{abs(self.slower):.1%} {'slower' if self.slower > 0 else 'faster'}, noise {self.noise:.1%}"
        )


def is_time(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("median_us"), int | float) and "spread_us" in value and "samples" in value


def timings(found: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[str, Timing]]:
    """Every group of contenders in a result, by the name of its case."""
    if isinstance(found, list):
        for one in found:
            yield from timings(one, name)
    if not isinstance(found, dict):
        return
    own = tuple(
        "x".join(map(str, found[f])) if isinstance(found[f], list) else str(found[f]) for f in _IDENTITY if f in found and not isinstance(found[f], dict)
    )
    timed = {key: value for key, value in found.items() if is_time(value)}
    if timed:
        yield " ".join((*name, *own)), timed
    for key, value in found.items():
        if key not in timed and isinstance(value, dict | list):
            inner = key in ("rows", "problems", "timing") or isinstance(value, list)  # what only holds rows is no part of a case's name
            yield from timings(value, (*name, *own) if inner else (*name, *own, key))


def deviation(one: Mapping[str, float]) -> float:
    """Standard deviation of a median, as a part of it: that of a normal distribution with the recorded quartiles."""
    return median_error(one["spread_us"], max(1, one["samples"])) / one["median_us"]


def changes(old: Any, new: Any, drift: float = DRIFT) -> Iterator[Change]:
    """Every ratio that both results have. A group in which epigen was timed alone is compared by its time."""
    before = dict(timings(old))
    for name, now in timings(new):
        then = before.get(name)
        if then is None:
            continue
        for ours in (c for c in now if c.startswith("epigen") and c in then):
            others = [c for c in now if not c.startswith("epigen") and c in then]
            for other in others:
                four = (then[ours], then[other], now[ours], now[other])
                noise = drift + _SIGMAS * math.hypot(*map(deviation, four))
                ratios = (t[other]["median_us"] / t[ours]["median_us"] for t in (then, now))
                yield Change(name, ours, other, *ratios, noise)
            if not others:
                noise = drift + _SIGMAS * math.hypot(deviation(then[ours]), deviation(now[ours]))
                yield Change(name, ours, "one microsecond", 1 / then[ours]["median_us"], 1 / now[ours]["median_us"], noise)


def gone(old: Any, new: Any) -> tuple[list[str], int]:
    """What epigen gave a time for and gives none any more though others are timed there; and how many cases the new result does not have."""
    before, now = dict(timings(old)), dict(timings(new))
    lost = [f"{name}: {ours}" for name, then in before.items() if name in now for ours in then if ours.startswith("epigen") and ours not in now[name]]
    return lost, len(before.keys() - now.keys())


def read(path: Path) -> Report:
    try:
        return record.read(path)
    except NoReport as why:
        raise Incomparable(str(why)) from None


def pairs(old: Path, new: Path) -> list[tuple[str, Path, Path]]:
    """The files to compare, with what to call them; of two folders, those that both have."""
    for path in (old, new):
        if not path.exists():
            raise Incomparable(f"there is no {path}")
    if old.is_dir() != new.is_dir():
        raise Incomparable(f"{old} and {new} are a file and a folder: give two files or two folders")
    if not old.is_dir():
        return [(new.stem, old, new)]
    names = {p.name for p in old.glob("*.json")}
    shared = sorted(names & {p.name for p in new.glob("*.json")})
    if not shared:
        raise Incomparable(f"{old} and {new} have no result in common")
    for name in sorted(names - set(shared)):
        print(f"{name}: {new} has none")
    return [(Path(name).stem, old / name, new / name) for name in shared]


def compared(old: Path, new: Path, drift: float = DRIFT, across: bool = False) -> tuple[list[tuple[str, Change]], list[str], int]:
    """Every change, by result; what epigen gives no time for any more; and how many cases are missing. Raises Incomparable."""
    found, lost, missing = [], [], 0
    for name, one, other in pairs(old, new):
        before, now = read(one), read(other)
        gpus = tuple(report.environment.get("gpu", "") for report in (before, now))
        if gpus[0] != gpus[1]:
            words = f"{name}: measured on different GPUs, {gpus[0] or 'none'} and {gpus[1] or 'none'}"
            if not across:
                raise Incomparable(f"{words}: --across-gpus compares them all the same")
            print(f"WARNING: {words}")
        found += [(name, change) for change in changes(before.body, now.body, drift)]
        here, fewer = gone(before.body, now.body)
        lost += [f"{name}: {one}" for one in here]
        missing += fewer
    if not found and not lost:
        raise Incomparable(f"{old} and {new} have no timed case in common")
    return found, lost, missing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--drift", type=float, default=DRIFT, help=f"what runs differ by anyhow, as a part (default: {DRIFT})")
    parser.add_argument("--across-gpus", action="store_true", help="compare results of different GPUs, with a warning")
    options = parser.parse_args(arguments)
    try:
        found, lost, missing = compared(options.old, options.new, options.drift, options.across_gpus)
    except Incomparable as why:
        print(why, file=sys.stderr)
        return 2
    worse = sorted(((n, c) for n, c in found if c.regression), key=lambda nc: -nc[1].slower)
    better = sum(-c.slower > c.noise for _, c in found)
    for name, change in worse:
        print(f"{name}: {change}")
    for one in lost:
        print(f"{one} has no time any more")
    if missing:
        print(f"{missing} cases of the old result are not in the new one")
    print(f"{len(found)} ratios compared: {len(worse)} slower by more than the noise, {better} faster")
    return 1 if worse or lost else 0


if __name__ == "__main__":
    sys.exit(main())
