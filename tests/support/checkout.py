"""Where things lie in this checkout."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
WATCHED = TESTS / "support" / "watched"
"""What leads the import path of the tests' processes: it tells which tests reach Triton, and holds nothing else."""
