"""The tests run alike whatever they are started from."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from child_pytest import child_pytest

from epigen import settings
from epigen.runtime import loader

_ASKED = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_ctrl_c_reaches_the_tests_of_a_background_job_and_what_they_start() -> None:
    script = f"import subprocess, sys, tests.conftest; {_ASKED}; sys.stdout.flush(); subprocess.run([sys.executable, '-c', {_ASKED!r}], check=True)"

    def ran(script: str) -> list[str]:
        command = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, script]
        own = settings.child_environment(interpret=False)
        return subprocess.run(command, cwd=ROOT, env=own, check=True, capture_output=True, text=True).stdout.split()

    assert ran(_ASKED) == ["False"], "else this would show nothing"
    assert ran(script) == ["True", "True"]


@pytest.mark.triton
def test_who_reaches_triton_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where Triton may have been imported before, and in one that it starts; by torch does not count."""
    loader._import_triton(interpret=True)  # as all tests in this process have it
    notes = tmp_path / "notes"
    monkeypatch.setenv("EPIGEN_TESTS_NOTES", str(notes))
    for name, text in (
        ("one", "import triton"),
        ("two", "from triton.language import load"),
        ("torch.some", "import triton"),
        ("three", "import tritonclient_"),
    ):
        with contextlib.suppress(ModuleNotFoundError):
            exec(text, {"__name__": name})
    assert notes.read_text().split() == ["one", "two"]
    for environment in (None, settings.child_environment(interpret=False)):
        subprocess.run([sys.executable, "-c", "import triton"], env=environment, check=True)
    assert notes.read_text().split() == ["one", "two", "__main__", "__main__"]


THREE = """
import pytest

def test_does():
    import triton

@pytest.mark.triton
def test_says_so():
    import triton

def test_does_not():
    pass
"""


def run_of(text: str, file: Path, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest's, of a file with these tests, or of all in a folder, with this project's conftest."""
    file.write_text(text)
    return child_pytest(
        *_own_conftest(folder or file), *(("--rootdir", folder) if folder else ()), env=settings.child_environment(interpret=False) | environment
    )


def _own_conftest(file: Path) -> tuple[str | Path, ...]:
    """By the name that no other folder's has. The file's own name is its module's."""
    return ("-p", "tests.conftest", "--import-mode=prepend", "-p", "no:xdist", "-c", ROOT / "pyproject.toml", file)


@pytest.mark.triton
@pytest.mark.slow
def test_a_test_that_reaches_triton_wants_the_mark(tmp_path: Path) -> None:
    run = run_of(THREE, tmp_path / "test_three.py")
    assert re.search(r"^1 failed, 2 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr
    assert "test_does reaches Triton, by test_three: it wants the mark @pytest.mark.triton" in run.stdout


@pytest.mark.triton
@pytest.mark.slow
def test_cases_of_a_child_are_noted_by_the_test_that_runs_it(tmp_path: Path) -> None:
    """They have no marks of their own: on a GPU all of them reach Triton."""
    notes = tmp_path / "notes"
    run = run_of(THREE, tmp_path / "three_cases.py", EPIGEN_TESTS_NOTES=str(notes))
    assert re.search(r"^3 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr
    assert set(notes.read_text().split()) == {"three_cases"}


BOTH = """
import pytest
import torch

def test_torch_imports_triton():
    import torch._dynamo

@pytest.mark.triton
def test_a_kernel_is_interpreted():
    import epigen
    a, b = torch.randn(4, 8), torch.randn(8, 16)
    torch.testing.assert_close(epigen.compile("relu(mm)", backend="interpreter")(a, b), torch.relu(a @ b))
"""


@pytest.mark.triton
@pytest.mark.slow
def test_kernels_are_interpreted_also_where_torch_imports_triton_first(tmp_path: Path) -> None:
    """Which of the tests of a process comes first is chance."""
    file = tmp_path / "test_both.py"
    file.write_text(BOTH)
    undecided = {name: value for name, value in settings.child_environment(interpret=False).items() if name != "TRITON_INTERPRET"}
    run = child_pytest(*_own_conftest(file), env=undecided)
    assert re.search(r"^2 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr


APART = """
import os
import time
import pytest

@pytest.fixture(scope="session")
def process():
    return [os.getpid()]

@pytest.mark.apart("one")
@pytest.mark.parametrize("n", [1, 2])
def test_in_one_process(process, n, request):
    process.append(n)
    assert len(process) == n + 1 and request.config.getoption("--served")

@pytest.mark.apart("one")
def test_fails():
    assert 1 + 1 == 3, "as it should"

@pytest.mark.apart("one")
@pytest.mark.skip(reason="for no reason")
def test_is_skipped():
    raise AssertionError

@pytest.mark.apart("one")
def test_takes_its_process_along():
    os._exit(7)

@pytest.mark.apart("one")
def test_in_another_process(process):
    assert len(process) == 1

@pytest.mark.apart("one")
@pytest.mark.timeout(0.5)
def test_hangs():
    time.sleep(100)

@pytest.mark.apart("one")
def test_in_a_third_process(process):
    assert len(process) == 1

@pytest.mark.apart("two")
def test_of_another_kind(process):
    assert len(process) == 1

def test_here(request):
    assert request.config.getoption("--served", None) is None
"""


def test_tests_that_run_apart_are_told_of_by_name(tmp_path: Path) -> None:
    """Those of a kind in one process, which is started anew where a test has ended it, or has gone on for too long."""
    run = run_of(APART, tmp_path / "test_apart.py", PYTEST_ADDOPTS="-rA")
    assert re.search(r"^3 failed, 6 passed, 1 skipped", run.stdout, re.MULTILINE), run.stdout + run.stderr
    assert re.search(r"^FAILED \S*::test_fails - AssertionError: as it should$", run.stdout, re.MULTILINE)
    assert re.search(r"^FAILED \S*::test_takes_its_process_along - the process of this test ended", run.stdout, re.MULTILINE)
    assert re.search(r"^SKIPPED .*: for no reason$", run.stdout, re.MULTILINE)
    assert "the process of this test ended with status 7" in run.stdout
    assert re.search(r"^FAILED \S*::test_hangs - .*Timeout", run.stdout, re.MULTILINE)


FOLDERS = """
import pytest

def test_here():
    pass
"""


def test_a_test_that_runs_apart_may_be_the_last_of_its_folder(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "test_one.py").write_text(FOLDERS + '\n@pytest.mark.apart("one")\ndef test_there():\n    pass\n')
    run = run_of(FOLDERS, tmp_path / "two" / "test_two.py", tmp_path)
    assert re.search(r"^3 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr


COLLECTED = """
import pytest
import torch._dynamo

@pytest.mark.triton
def test_a_kernel_is_interpreted():
    import epigen, torch
    a, b = torch.randn(4, 8), torch.randn(8, 16)
    torch.testing.assert_close(epigen.compile("relu(mm)", backend="interpreter")(a, b), torch.relu(a @ b))
"""


@pytest.mark.triton
def test_kernels_are_interpreted_also_where_triton_is_imported_as_tests_are_collected(tmp_path: Path) -> None:
    file = tmp_path / "test_collected.py"
    file.write_text(COLLECTED)
    undecided = {name: value for name, value in settings.child_environment(interpret=False).items() if name != "TRITON_INTERPRET"}
    run = child_pytest(*_own_conftest(file), env=undecided)
    assert re.search(r"^1 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr
