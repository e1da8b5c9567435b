"""Fixtures of the tests of stand-alone files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """A folder where importing epigen fails, wherever it is installed."""
    (tmp_path / "epigen.py").write_text("raise ImportError('not here')\n")
    return tmp_path
