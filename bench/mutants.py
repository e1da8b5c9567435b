"""Damages tuning databases in thousands of ways, and looks at what a reader, a check, a merge, an export and a write make of each.

Each mutant is a file of a dozen records of a shipped database, of the present schema or of an older one, as epigen writes it or as other tools do,
with one to three changes of bytes, tokens or structure. None may raise anything but an error of epigen's or take long; what comes out of it keeps
to the schema; records that were not touched stay in use, what was left out is said, and a write keeps the damaged file.

Run: python -m bench.mutants [--commit HASH] [--out FOLDER] [--count N] [--seed N]. Exit status 1 where a mutant fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import record
from bench.record import Report
from epigen import settings
from epigen.codegen.schedules import RENAMED
from epigen.db import database
from epigen.db.database import Database
from epigen.db.records import SCHEMA, Document, Record, parse, render
from epigen.errors import EpigenError

RECORDS = 12
LIMIT_S = 20.0
"""For all that is done with one mutant, on a slow and busy machine: a hundred times what it takes."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null|[\[\]{},:]')
_DEEP = 100_000
VALUES = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 5000, "-0.0", "-1", "0", "2147483648", "0.0005", "1e-400", "true", "false", "null",
    "[]", "{}", "[[]]", '{"a": {"a": {}}}', "[" * 50 + "]" * 50, "[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "0" + "}" * _DEEP, '""', '"x"', '"\\ud800"',
    '"\\u0000"', '"\\u202e"', '"' + "x" * 100_000 + '"', '"' + "(" * 15_000 + '"', '"' + "mm + " * 3000 + 'mm"', '"../../etc/passwd"', '"__class__"',
)  # fmt: skip
"""That stand in the place of others. Each is a whole value, so that brackets and quotes go on fitting together."""
SCRAPS = (*'[]{},:"\\', "NaN", "\x00", "\x1b[2J", "\ufeff", "\n", "<<<<<<< HEAD\n", "// ", "'", "é", "\U0001f600", "nul", "1e", "--1", "0x10")
SCRAP_BYTES = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00" * 9, b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged file. kinds: of the changes. sound: the records that were not touched, and have to stay in use whatever became of the others.

    whole: how many records were there, if as many must be in use or complained of. new: one more of the same GPU, to be written.
    """

    data: bytes
    kinds: tuple[str, ...]
    sound: tuple[Record, ...]
    whole: int
    new: Record


@dataclass(slots=True)
class Found:
    """outcomes: how many mutants ended how. failures: what no mutant may do, with its number. longest_s: the time of the slowest."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0


@functools.cache
def shipped() -> tuple[Document, ...]:
    return tuple(parse(file.read_bytes()) for file in sorted(settings.seed_database_dir().glob("*.json")))


def mutant(seed: int) -> Mutant:
    """The same one for the same number."""
    chance = random.Random(seed)
    document = chance.choice(shipped())
    new, *others = chance.sample(document.records, min(RECORDS + 1, len(document.records)))
    some = tuple(sorted(others, key=lambda r: (r.program, r.key)))
    text = render(document.gpu, document.capability, some)
    if (older := chance.random()) < 0.4:
        text = _of_schema(1 if older < 0.25 else 2, text, some)
    layout = chance.choice(("as written", "as written", "as written", "one line", "indented"))
    if layout != "as written":
        text = json.dumps(json.loads(text), indent=None if layout == "one line" else 2, sort_keys=chance.random() < 0.5)
    if chance.random() < 0.3:
        return _restructured(text, some, new, chance)
    return _edited(text, some, new, layout, chance)


def _of_schema(number: int, text: str, some: tuple[Record, ...]) -> str:
    """As an older schema would have it: up to the second dimensions had other names, and the first knew no inputs but those of the operands' dtype."""
    new = text.replace(f'"schema": {SCHEMA}', f'"schema": {number}', 1)
    for then, now in RENAMED.items():
        new = new.replace(f'"{now}": ', f'"{then}": ')
    for r in some if number == 1 else ():
        new = new.replace(f'"inputs": {json.dumps(r.inputs)}, ', "")
    read = parse(new.encode()).records
    return new if {r.key for r in read} == {r.key for r in some} else text


# -- changes of the text


@dataclass(frozen=True, slots=True)
class _Change:
    """begin, end: of what is taken away. new: what comes there. fitting: brackets and quotes fit together after it as before."""

    kind: str
    begin: int
    end: int
    new: bytes
    fitting: bool = False


def _edited(text: str, some: tuple[Record, ...], new: Record, layout: str, chance: random.Random) -> Mutant:
    """One to three changes, the last one first, so that places stay what they are."""
    data = text.encode()
    places = _places(text, some)
    wanted = sorted((chance.choice(_CHANGES)(data, chance) for _ in range(chance.choice((1, 1, 2, 3)))), key=lambda c: c.begin, reverse=True)
    changes: list[_Change] = []
    for change in wanted:
        if not changes or change.end <= changes[-1].begin:
            changes.append(change)
    touched: set[int] = set()
    confined = True
    for change in changes:
        inside = next((i for i, (begin, end) in enumerate(places) if begin < change.begin and change.end < end), None)
        if inside is None or not (change.fitting or layout == "as written"):
            confined = False
        else:
            touched.add(inside)
        data = data[: change.begin] + change.new + data[change.end :]
    sound = tuple(r for i, r in enumerate(some) if i not in touched) if confined else ()
    return Mutant(data, tuple(c.kind for c in changes), sound, len(some) if confined else 0, new)


def _places(text: str, some: tuple[Record, ...]) -> list[tuple[int, int]]:
    """Where each record begins and ends, in bytes: the texts here are ASCII."""
    start = text.index('"records"')
    decoder = json.JSONDecoder()
    found = []
    at = text.index("[", start) + 1
    for _ in some:
        at = text.index("{", at)
        _, end = decoder.raw_decode(text, at)
        found.append((at, end))
        at = end
    return found


def _flip(data: bytes, chance: random.Random) -> _Change:
    at = chance.randrange(len(data))
    return _Change("a byte", at, at + 1, bytes([data[at] ^ 1 << chance.randrange(8)]))


def _other(data: bytes, chance: random.Random) -> _Change:
    at = chance.randrange(len(data))
    return _Change("another byte", at, at + 1, bytes([chance.randrange(256)]))


def _cut(data: bytes, chance: random.Random) -> _Change:
    at = chance.randrange(len(data))
    return _Change("bytes away", at, min(len(data), at + chance.choice((1, 1, 2, 5, 40, 400))), b"")


def _truncated(data: bytes, chance: random.Random) -> _Change:
    return _Change("truncated", chance.randrange(len(data)), len(data), b"")


def _scrap(data: bytes, chance: random.Random) -> _Change:
    at = chance.randrange(len(data) + 1)
    return _Change("a scrap", at, at, chance.choice((*(s.encode() for s in SCRAPS), *SCRAP_BYTES)))


def _copied(data: bytes, chance: random.Random) -> _Change:
    begin, at = chance.randrange(len(data)), chance.randrange(len(data) + 1)
    return _Change("a part twice", at, at, data[begin : begin + chance.choice((1, 4, 30, 200))])


def _token(data: bytes, chance: random.Random) -> tuple[int, int]:
    tokens = list(_TOKEN.finditer(data.decode()))
    return chance.choice(tokens).span()


def _value(data: bytes, chance: random.Random) -> _Change:
    """A value, or a name, that is another one."""
    for _ in range(100):
        begin, end = _token(data, chance)
        if end - begin > 1 or data[begin:end].isdigit():
            return _Change("another value", begin, end, chance.choice(VALUES).encode(), fitting=True)
    return _scrap(data, chance)


def _twice(data: bytes, chance: random.Random) -> _Change:
    """A name that stands twice."""
    names = list(re.finditer(r'"[a-z_]+": ', data.decode()))
    name = chance.choice(names)
    return _Change("a name twice", name.start(), name.start(), f"{name[0]}{chance.choice(VALUES)}, ".encode(), fitting=True)


def _token_away(data: bytes, chance: random.Random) -> _Change:
    return _Change("a token away", *_token(data, chance), b"")


_CHANGES: tuple[Callable[[bytes, random.Random], _Change], ...] = (_flip, _other, _cut, _truncated, _scrap, _copied, _value, _value, _twice, _token_away)


# -- changes of the structure


def _restructured(text: str, some: tuple[Record, ...], new: Record, chance: random.Random) -> Mutant:
    """The document with a field missing, misnamed, of another type or from another record; still JSON."""
    document = json.loads(text)
    found = document["records"]
    kinds = []
    touched: set[int] = set()
    head = False
    for _ in range(chance.choice((1, 1, 2, 3))):
        kind = chance.choice(("no field", "a new field", "another type", "of another one", "a record twice", "no object", "the head"))
        kinds.append(kind)
        at = chance.randrange(len(some))
        if kind == "the head":
            head = True
            document[chance.choice((*document, "hook"))] = _nasty(chance)
            continue
        if kind == "a record twice":
            found.append(found[at])
            continue
        touched.add(at)
        if kind == "no object" or not isinstance(found[at], dict):
            found[at] = _nasty(chance)
            continue
        name, other = chance.choice(list(found[at])), chance.choice(list(found[at]))
        found[at] = dict(found[at])
        match kind:
            case "no field":
                del found[at][name]
            case "a new field":
                found[at][chance.choice(("hook", "__class__", "gpu", "", "x" * 1000, name.upper()))] = _nasty(chance)
            case "another type":
                found[at][name] = _nasty(chance)
            case "of another one":
                found[at][name] = found[at][other]
    sound = () if head else tuple(r for i, r in enumerate(some) if i not in touched)
    indent = chance.choice((None, 2))
    return Mutant(json.dumps(document, indent=indent).encode(), tuple(kinds), sound, 0 if head else len(some), new)


def _nasty(chance: random.Random) -> Any:
    return chance.choice(
        (None, True, -1, 0, 1.5, 10**400, float("nan"), float("inf"), "", "x", "\ud800", "\x00", "x" * 50_000, [], [[[[]]]], {}, {"a": 1}, [1] * 2000)
    )


# -- what becomes of it


def outcome(one: Mutant, folder: Path) -> str:
    """How a mutant ended, in a folder of its own. Raises AssertionError, with what is wrong, or whatever epigen lets through."""
    path = folder / "db" / database.file_name(one.new.gpu, one.new.capability)
    path.parent.mkdir(parents=True)
    path.write_bytes(one.data)
    chain = Database(path.parent, seeds=())
    chain.index()
    found, complaints = [r for _, r in chain.records()], list(chain.complaints)
    in_use = {r.key: r for r in found}
    for r in found:
        _demand(Record.of(asdict(r)) == r and r.kernel_config.schedule == r.schedule, f"a record does not keep to the schema: {r}")
        nearest = chain.find(r.problem, r.triton)
        _demand(nearest is not None and nearest.how == "exact", f"a record is not found: {r}")
    for r in one.sound:
        _demand(r in found, f"a record that was not touched is not in use: {r}; {complaints}")
    _demand(len(found) + len(complaints) >= one.whole, f"of {one.whole} records {len(found)} are in use, and {len(complaints)} complaints: {complaints}")
    _demand(all(c.isprintable() and len(c) < len(str(path)) + 300 for c in complaints), f"a complaint is no short line: {complaints}")
    _demand(path.read_bytes() == one.data, "reading has changed the file")
    _demand(database.check(path)[: len(complaints)] == complaints, "a check says otherwise than a look-up")

    merged, exported = Database(folder / "merged", seeds=()), Database(folder / "exported.json", seeds=())
    report = merged.merge(path)
    try:
        chain.export(folder / "exported.json")
    except EpigenError as error:
        _demand(not found and str(error).startswith("nothing is exported"), f"an export is refused: {error}")
    for other in (merged, exported):
        _demand({r.key for _, r in other.records()} == in_use.keys() and not other.complaints, "a merge or an export has other records")
    _demand(report.complaints == complaints, "a merge complains of something else")

    try:
        report = chain.add(one.new)
    except EpigenError as error:
        _demand(
            path.read_bytes() == one.data and sorted(path.parent.glob("*.json*")) == [path, path.with_name(f"{path.name}.lock")],
            "a refused write left something",
        )
        why = next((words for words in ("by a newer epigen", "holds records of") if words in str(error)), "")
        _demand(bool(why), f"a write is refused: {error}")
        return f"a write is refused: {why}"
    _demand({r.key for _, r in chain.records()} == in_use.keys() | {one.new.key} and database.check(path) == [], "a write has lost records, or mended nothing")
    _demand([kept.read_bytes() for kept in report.aside] == [one.data] * bool(complaints), "the damaged file is not kept")
    return "nothing is left out" if not complaints else "some records are left out" if found else "all are left out"


def _demand(right: bool, words: str) -> None:
    if not right:
        raise AssertionError(words)


def run(count: int, seed: int, report: Callable[[int, Found], None] = lambda _number, _found: None) -> Found:
    """As many mutants, whatever one of them does."""
    found = Found()
    for number in range(count):
        one = mutant(seed + number)
        found.kinds.update(one.kinds)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="epigen-mutant-") as folder:
            try:
                how = outcome(one, Path(folder))
            except Exception as error:  # noqa: BLE001  # all that may come out is caught within
                how = "FAILED"
                found.failures.append(f"mutant {seed + number} ({', '.join(one.kinds)}): {''.join(traceback.format_exception_only(error)).strip()[:2000]}")
        took_s = time.perf_counter() - start
        if took_s > LIMIT_S:
            how = "FAILED"
            found.failures.append(f"mutant {seed + number} ({', '.join(one.kinds)}): it took {took_s:.0f} s")
        found.outcomes[how] += 1
        found.longest_s = max(found.longest_s, took_s)
        report(number, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    def report(number: int, found: Found) -> None:
        if (number + 1) % 500 == 0:
            print(f"{number + 1} of {options.count}: {len(found.failures)} failed", flush=True)

    start = time.perf_counter()
    found = run(options.count, options.seed, report)
    rows = [{what: name, "count": count} for what, counts in (("outcome", found.outcomes), ("kind", found.kinds)) for name, count in counts.items()]
    about = {
        "count": options.count, "seed": options.seed, "failures": found.failures, "longest_s": round(found.longest_s, 2),
        "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    print(*found.failures, dict(found.outcomes), sep="\n")
    print(record.write("mutants", Report("bench.mutants", record.versions(options.commit), rows, about), options.out))
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
