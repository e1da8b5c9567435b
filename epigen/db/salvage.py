"""JSON text -> a document, of which a damaged part costs that part alone.

A text that is sound is read at once. Of any other the items of one list are read each by itself: what cannot be read of it is a `Broken` in its
place. Where items begin and end is told from brackets and commas, and from lines as epigen writes them, at which one that lacks a bracket
ends too. All of it takes time in proportion to the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from epigen.db.fields import Broken, quoted

_FIRST_LINE = "    {"
"""Of an item, as epigen writes it: by itself, and so far in."""

_TOKEN = re.compile(r'^ {4}\{$|"(?:[^"\\\n]|\\.)*+"?|[\[\]{},]', re.MULTILINE)  # a string that never ends goes on to the end of its line
_MOST_TOKENS = 4_000_000  # of a sound file there is one in seven bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """document: any JSON value. complaints: what was left out of it besides its `Broken` items."""

    document: object
    complaints: tuple[str, ...] = ()


def load(text: str, name: str, most: int) -> Loaded:
    """name: of the list whose items may be damaged. most: how many of them are read. Raises ValueError, in words, where the rest cannot be read."""
    try:
        return Loaded(_value(text))
    except (ValueError, RecursionError) as error:
        damage = _words(error)
    parts = _split(text, name, most)
    if parts is None:
        raise ValueError(damage)
    head, complaints = _head(text, parts, damage)
    items: list[object] = []
    line, seen = 0, 0
    for start, end in parts.items:
        line, seen = line + text.count("\n", seen, start), start
        try:
            items.append(_value(text[start:end]))
        except (ValueError, RecursionError) as error:
            items.append(Broken(_words(error, line)))
    return Loaded(head | {name: items}, complaints if complaints or any(isinstance(item, Broken) for item in items) else (damage,))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of a text: where the list begins and ends, and each of its items."""

    begin: int
    end: int
    items: list[tuple[int, int]]


def _split(text: str, name: str, most: int) -> _Parts | None:
    """None where there is no such list in the document, or too much of it. Raises ValueError for too many items."""
    items: list[tuple[int, int]] = []
    last = text.rfind(f"\n{_FIRST_LINE}\n")
    depth, key, begin, start = 0, "", -1, 0
    for count, token in enumerate(_TOKEN.finditer(text)):
        what, at = token[0], token.start()
        if count > _MOST_TOKENS:
            return None
        if begin < 0:
            depth += (what in ("[", "{", _FIRST_LINE)) - (what in ("]", "}"))
            if what == "[" and depth == 2 and key == name:
                begin = start = token.end()
            elif what[0] == '"' and depth == 1:
                key = what[1:-1]
        elif what == _FIRST_LINE:
            if text[start:at].strip():  # the one before lacks a bracket, or a comma behind it
                items.append((start, at))
            start, depth = at, 3
        elif what in ("[", "{"):
            depth += 1
        elif what == "]" and depth == 2 and at > last:
            break
        elif what in ("]", "}"):
            depth = max(2, depth - 1)
        elif what == "," and depth == 2:
            items.append((start, at))
            start = token.end()
        if len(items) > most:
            raise ValueError(f"more than {most} {name}")
    else:
        at = len(text)
    if begin < 0:
        return None
    if text[start:at].strip():
        items.append((start, at))
    return _Parts(begin, at, items)


def _head(text: str, parts: _Parts, damage: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The document with an empty list, and what is left out of it. Raises ValueError."""
    before, after = text[: parts.begin], text[parts.end :]
    place = f"line {text.count(chr(10), 0, parts.end) + 1}"
    complaint = f"{place}: what follows the records cannot be read" if after else f"{place}: the file ends in the middle"
    for rest, complaints in ((after, ()), ("]}", (complaint,))):
        try:
            head = _value(before + rest)
        except (ValueError, RecursionError):
            continue
        if isinstance(head, dict):
            return head, complaints
    raise ValueError(damage)


def _value(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)


def _object(pairs: list[tuple[str, Any]]) -> object:
    content = dict(pairs)
    if len(content) == len(pairs):
        return content
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    return Broken(f"the name {quoted(twice)} stands twice in one object", content)


def _constant(name: str) -> Broken:
    return Broken(f"{name} is no number")


def _words(error: Exception, line: int = 0) -> str:
    """line: how many there are before the text that was read."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {line + error.lineno}, column {error.colno}: {error.msg}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error).split(";")[0]  # a number of thousands of digits
