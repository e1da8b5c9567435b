"""The only reader of the environment: where templates, databases and the cache lie.

EPIGEN_CACHE  folder for generated modules (default: the platform's cache folder, per user)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    """A data folder: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def templates_dir() -> Path:
    return _shipped("templates")


def seed_database_dir() -> Path:
    """The shipped, read-only tuning databases."""
    return _shipped("tuning_db")


def cache_dir() -> Path:
    """Folder for generated modules, private to the user."""
    if chosen := os.environ.get("EPIGEN_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "epigen"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "epigen"


def use_interpreter() -> bool:
    """Whether the caller asked for Triton's interpreter, by Triton's own variable."""
    return os.environ.get("TRITON_INTERPRET", "") in {"1", "true", "on", "yes", "y"}


def set_interpreter(on: bool) -> None:
    """Choose Triton's mode for this process; it counts only before Triton is first imported."""
    os.environ["TRITON_INTERPRET"] = "1" if on else "0"
