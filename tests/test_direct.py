"""Warmed calls down to the driver, without a GPU: tests/fake_gpu_cases.py in a process where Triton takes the CPU for one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from child_pytest import child_pytest

from epigen import settings

pytestmark = pytest.mark.triton


TESTS = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real driver is in the way of the one that is none: tests/test_gpu_calls.py has the same on a GPU")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton's launcher is C, and there is no compiler for it")
@pytest.mark.parametrize("launcher", ["driver", "triton"])
def test_warmed_calls_are_tritons_own(tmp_path: Path, launcher: str) -> None:
    """Straight to the driver, and by Triton's launcher, as where nothing can be compiled for the former."""
    environment = settings.child_environment(interpret=False) | {"EPIGEN_CACHE": str(tmp_path), "LAUNCHER": launcher}
    chosen = "not straight" if launcher == "triton" else ""
    run = child_pytest("-p", "no:xdist", "--rootdir", TESTS.parent, TESTS / "fake_gpu_cases.py", "-k", chosen, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout
