"""`epigen.db.records` by the path that it had before: programs of users import it."""

from __future__ import annotations

from epigen.db.records import Record, parse

__all__ = ["Record", "parse"]
