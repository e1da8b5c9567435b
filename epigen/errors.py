"""Error tree, source spans and the caret format shared by every stage.

Two roots: `EpigenError` is something the user can mend, `InternalError` is a bug in epigen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

_SHOWN_MISTAKES = 20
_SHOWN_COLUMNS = 96  # a longer source line is cut around its caret


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of character offsets into a program's text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One mistake: what was found and expected, where, and what to write instead."""

    message: str
    span: Span | None = None
    hint: str = ""


class EpigenError(Exception):
    """A mistake that the user can mend."""


class InternalError(Exception):
    """A bug in epigen: no input of the user's should raise it."""

    def __str__(self) -> str:
        return f"{super().__str__()} (a bug in epigen: please report the program and the call)"


class ProgramError(EpigenError):
    """One or more mistakes in a program's text, all reported together."""

    def __init__(self, text: str, diagnostics: Iterable[Diagnostic]):
        self.text = text
        self.diagnostics = tuple(diagnostics)
        shown = [self._format(d) for d in self.diagnostics[:_SHOWN_MISTAKES]]
        if len(self.diagnostics) > _SHOWN_MISTAKES:
            shown.append(f"and {len(self.diagnostics) - _SHOWN_MISTAKES} more mistakes")
        super().__init__("\n".join(shown))

    def __reduce__(self) -> tuple[type[ProgramError], tuple[str, tuple[Diagnostic, ...]]]:
        return type(self), (self.text, self.diagnostics)  # an exception is else made again of its message alone

    def _format(self, diagnostic: Diagnostic) -> str:
        lines = [f"{type(self).__name__}: {diagnostic.message}"]
        if diagnostic.span is not None:
            lines += caret_lines(self.text, diagnostic.span)
        if diagnostic.hint:
            lines.append(f"  {diagnostic.hint}")
        return "\n".join(lines)


class ParseError(ProgramError):
    """The text is not in the language."""


class CheckError(ProgramError):
    """The text parses, and its names, kinds or indices do not fit together."""


class DerivationError(ProgramError):
    """The program is sound, and a derivative that was asked for cannot be taken, or not by a program of the language."""


class CallError(EpigenError):
    """A kernel was called with arguments that do not fit its program."""


class ConfigError(EpigenError):
    """A schedule or a config is unknown, out of range or illegal for the problem."""


class TargetError(EpigenError):
    """The target cannot run what was asked for, or is unknown."""


class CompileError(EpigenError):
    """Triton refused a generated kernel; the message keeps its last line."""


class DatabaseError(EpigenError):
    """A tuning database cannot be read, written or locked, or a record does not fit the schema."""


class VerificationError(EpigenError):
    """A generated kernel's answer is outside its error bound."""


class SuiteError(EpigenError):
    """A file of problems to tune cannot be read, or an entry of it does not fit; the message names each, with its field."""


class TuneError(EpigenError):
    """A search found no config that works, its storage cannot be used, or there is no GPU to search on."""


def caret_lines(text: str, span: Span) -> list[str]:
    """The source line that holds `span`, and a line of carets under the span's part in that line."""
    start = min(span.start, len(text))
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", start)
    line = text[first : last if last >= 0 else len(text)]
    column = start - first
    width = max(1, min(span.end, first + len(line)) - start)
    if len(line) > _SHOWN_COLUMNS:
        cut = max(0, min(column - _SHOWN_COLUMNS // 3, len(line) - _SHOWN_COLUMNS))
        line, column = line[cut : cut + _SHOWN_COLUMNS], column - cut
        width = max(1, min(width, _SHOWN_COLUMNS - column))
        if cut:
            line = "..." + line[3:]
    # a control character would move the caret or the terminal's cursor
    shown = "".join(c if c.isprintable() else "?" for c in line)
    return [f"  {shown}", f"  {' ' * column}{'^' * width}"]


def shown(value: object) -> str:
    """Something that should not have been given, in a message: of a number with thousands of digits Python itself says nothing."""
    try:
        text = repr(value)
    except ValueError:
        text = "a huge number"
    return text if len(text) <= _SHOWN_COLUMNS else f"{text[:_SHOWN_COLUMNS]}..."


def near_miss(name: str, known: Iterable[str]) -> str:
    """'did you mean relu?' for a misspelt name, or '' where nothing is near."""
    close = get_close_matches(name, sorted(known), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else ""


def unknown(what: str, given: object, known: Iterable[str]) -> str:
    """The message for a name that is none of the known ones, which it lists where none of them is near."""
    names = list(known)
    return f"unknown {what} {shown(given)}: {near_miss(given if isinstance(given, str) else shown(given), names) or 'known are ' + ', '.join(names)}"
