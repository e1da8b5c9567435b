"""pytest in a process of its own, for cases that cannot share one with the other tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def child_pytest(*options: str | Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Keeps no cache. What it prints is in the result, whatever became of it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
