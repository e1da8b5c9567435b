"""What the documents' blocks are made with: stored reports, and tables in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bench import record
from bench.record import Report

FOLDERS = (record.RESULTS, record.DATA)
"""Where reports are looked for."""


def there(name: str) -> bool:
    return any((folder / f"{name}.json").exists() for folder in FOLDERS)


def load(name: str) -> Report:
    return record.read(next(path for folder in FOLDERS if (path := folder / f"{name}.json").exists()))


def source(report: Report, claim: str = "") -> str:
    """Where, with what and when it was measured. claim: what `python -m bench` measures it again by."""
    e = report.environment
    where = f"{e['gpu']}, torch {e['torch']}, Triton {e['triton']}, driver {e['driver']}, {e['date']}"
    return f"Measured on {where}; `python -m bench {claim}`." if claim else where


def commits(report: Report) -> str:
    """Of which commit the rows are, and how many of which earlier one."""
    earlier = Counter(row["commit"] for row in report.rows if "commit" in row)
    return ", ".join([f"commit {report.environment['commit']}", *(f"{count} at {commit}" for commit, count in earlier.items())])


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_row(columns), _row(["---"] * len(columns)), *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
