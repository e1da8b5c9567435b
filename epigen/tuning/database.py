"""`epigen.db.database` by the path that it had before: programs of users import it."""

from __future__ import annotations

from epigen.db.database import Database

__all__ = ["Database"]
