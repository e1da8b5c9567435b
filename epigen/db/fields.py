"""What the fields of a document may hold: checks that a value read from a file passes, or is refused by in words.

A check takes any value and returns it as it is to be held; for any other it raises `Wrong`, with the mistakes of all its parts. Types are
strict: True is no 1, and "1" is none either. Plain functions, since a process's first call reads a database: to import pydantic and make
models of it took longer than to read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any], Any]

_SHOWN = 60  # characters of a wrong value that a message quotes


class Wrong(ValueError):
    """What is wrong, in words. place: the names and numbers on the way to it, from the outside in. others: what else is wrong, after it."""

    def __init__(self, message: str, place: tuple[object, ...] = ()):
        super().__init__(": ".join(filter(None, (".".join(_plain(str(part)) for part in place), message))))
        self.message, self.place = message, place
        self.others: list[Wrong] = []

    def within(self, part: object) -> list[Wrong]:
        """This one and the others, seen from around a part of what holds them."""
        return [Wrong(one.message, (part, *one.place)) for one in (self, *self.others)]


@dataclass(frozen=True, slots=True)
class Broken:
    """Stands where a document holds what cannot be read, and passes no check. why: in words. content: what there is of it, to name it by."""

    why: str
    content: object = None


def _all(parts: Iterable[tuple[object, Check, Any]]) -> list[Any]:
    """Each part as its check returns it. parts: place, check and value. Raises Wrong with the mistakes of all."""
    values, mistakes = [], []
    for place, check, value in parts:
        try:
            values.append(check(value))
        except Wrong as wrong:
            mistakes += wrong.within(place)
    if mistakes:
        mistakes[0].others = mistakes[1:]
        raise mistakes[0]
    return values


def unexpected(what: str, value: object) -> Wrong:
    """what: was expected where `value` is."""
    return Wrong(value.why) if isinstance(value, Broken) else Wrong(f"expected {what}, not {quoted(value)}")


def text(what: str, fits: Callable[[str], object]) -> Check:
    """what: the text is. fits: returns something true for such a one."""

    def check(value: Any) -> str:
        if type(value) is not str or not fits(value):
            raise unexpected(what, value)
        return value

    return check


def pattern(what: str, expression: str) -> Check:
    """All of the text matches an expression, in ASCII."""
    return text(what, re.compile(expression, re.ASCII).fullmatch)


def one_of(known: Collection[str | int]) -> Check:
    kinds = {type(k) for k in known}

    def check(value: Any) -> Any:
        if type(value) not in kinds or value not in known:
            raise unexpected(f"one of {', '.join(filter(None, map(str, known)))}", value)
        return value

    return check


def whole(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise unexpected(f"a whole number from {low} to {high}", value)
        return value

    return check


def number(low: float, high: float, digits: int) -> Check:
    """digits: that are kept behind the point."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise unexpected(f"a number from {low:g} to {high:g}", value)
        return round(float(value), digits)

    return check


def listed(each: Check, least: int, most: int) -> Check:
    """Held as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            raise unexpected(f"a list of {least}{f' to {most}' * (most > least)}", value)
        return tuple(_all((place, each, item) for place, item in enumerate(value)))

    return check


def named(name: Check, each: Check) -> Check:
    """An object with any names that `name` lets pass."""

    def pair(item: tuple[Any, Any]) -> tuple[Any, Any]:
        return name(item[0]), each(item[1])

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise unexpected("an object", value)
        return dict(_all((item[0], pair, item) for item in value.items()))

    return check


def optional(each: Check) -> Check:
    return lambda value: None if value is None else each(value)


def held(values: Mapping[str, Any], checks: Mapping[str, Check], without: Collection[str] = ()) -> dict[str, Any]:
    """An object's values under the names of `checks`, each as its check returns it. without: names that may be missing."""
    names = [name for name in checks if name in values or name not in without]
    parts = [(name, checks[name], values[name]) if name in values else (name, _refused, "this field is missing") for name in names]
    parts += [(name, _refused, "there is no such field") for name in values if name not in checks]
    return dict(zip(names, _all(parts), strict=True))


def _refused(why: str) -> Any:
    raise Wrong(why)


def quoted(value: object) -> str:
    """A value as a message may show it: short, in one line, ASCII."""
    if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of many digits"
    return _short(ascii(value))


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def _plain(name: str) -> str:
    return quoted(name) if not re.fullmatch(r"\w{1,40}", name, re.ASCII) else name
