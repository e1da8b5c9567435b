"""What tests/training shows on the CPU, on a GPU; and torch.compile's backend in a process that has imported nothing of epigen."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from checkout import ROOT, TESTS
from child_pytest import child_pytest

from epigen import settings


def cases(file: str, tmp_path: Path, *workers: str, **environment: str) -> str:
    """The cases' report, once they have passed."""
    own = settings.child_environment(interpret=False) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | environment
    run = child_pytest(*workers, "-p", "no:apart", "--show-capture=no", "--rootdir", ROOT, "--durations=8", TESTS / "training" / file, env=own)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


_BY_NAME = """
import sys
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
assert not any(name.partition(".")[0] == "epigen" for name in sys.modules)
compiled = torch.compile(model, backend="epigen", options={"rest": "eager"})
x = torch.randn(3, 4)
torch.testing.assert_close(compiled(x), model(x))
import epigen
print(epigen.report(compiled))
"""


@pytest.mark.triton
@pytest.mark.slow
def test_the_backend_is_found_by_its_name() -> None:
    """By the installation's entry point, in a process that imports nothing of epigen."""
    found = {entry.name: entry.value for entry in entry_points(group="torch_dynamo_backends")}
    again = "what is installed is older than this checkout's pyproject.toml: install it again (pip install -e ., which make does by itself)"
    assert found.get("epigen") == "epigen.training.backend:backend", again
    own = settings.child_environment(interpret=False)
    run = subprocess.run([sys.executable, "-c", _BY_NAME], env=own, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "tanh(mm + x0[n])" in run.stdout
    assert "1 of 2 products taken" in run.stdout.splitlines()[-1]


@pytest.mark.gpu
def test_derivatives_on_a_gpu(tmp_path: Path) -> None:
    report = cases("test_layer_derivatives.py", tmp_path, "-p", "no:xdist")
    assert " passed" in report and "skipped" not in report


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["test_expected.py", "test_precompile.py"])
def test_what_is_expected_and_compiled_on_a_gpu(file: str, tmp_path: Path) -> None:
    report = cases(file, tmp_path, "-p", "no:xdist")
    assert " passed" in report and "skipped" not in report


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Of all cases one alone may be skipped: that which needs two GPUs. By workers, since torch compiles for minutes."""
    report = cases("test_layers_under_torch.py", tmp_path, *(("-n", "8") if importlib.util.find_spec("xdist") else ()))
    assert " passed" in report and ("skipped" not in report or ", 1 skipped" in report)
