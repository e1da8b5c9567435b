"""Layers under torch.compile, torch.export, autocast, checkpoints and several processes: tests/training_cases.py in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from epigen import settings

TESTS = Path(__file__).parent


def cases(tmp_path: Path, *workers: str, **environment: str) -> str:
    """The cases' report, once they have passed."""
    own = settings.child_environment(interpret=False) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | environment
    options = ["-q", "-p", "no:cacheprovider", *workers, "--show-capture=no", "--rootdir", str(TESTS.parent), "--durations=8"]
    run = subprocess.run([sys.executable, "-m", "pytest", *options, str(TESTS / "training_cases.py")], env=own, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
def test_on_the_cpu(tmp_path: Path) -> None:
    """A case that hangs ends before this does, and so is named."""
    assert " passed" in cases(tmp_path, "-p", "no:xdist", "--timeout", "120", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_on_a_gpu(tmp_path: Path) -> None:
    """Of all cases one alone may be skipped: that which needs two GPUs. By workers, since torch compiles for minutes."""
    report = cases(tmp_path, *(("-n", "8") if importlib.util.find_spec("xdist") else ()))
    assert " passed" in report and ("skipped" not in report or ", 1 skipped" in report)
