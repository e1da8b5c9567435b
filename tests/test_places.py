"""Homes that are missing, closed or read-only: what epigen keeps on disk has another place or none, and calls work all the same."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from golden import Golden
from tuned import TRITON, opened, problem, record

from epigen import settings
from epigen.cli import main
from epigen.db.database import Database
from epigen.errors import DatabaseError, EpigenError
from epigen.runtime import loader
from epigen.runtime.user_cache import can_be_written

PLACES = ("EPIGEN_DB", "EPIGEN_CACHE", "XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME", "TRITON_CACHE_DIR", "TRITON_HOME")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without a home folder, and without an entry in passwd, as in a container that runs under any number."""

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)


# -- where they would lie


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("EPIGEN_DB", "~/db")
    monkeypatch.setenv("EPIGEN_CACHE", "~/cache")
    assert (settings.user_database_dir(), settings.cache_dir()) == (Path("/home/me/db"), Path("/home/me/cache"))


def test_a_relative_path_is_below_the_folder_that_is_the_current_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPIGEN_DB", "db.json")
    monkeypatch.setenv("EPIGEN_CACHE", "cache")
    assert (settings.user_database_dir(), settings.cache_dir()) == (tmp_path / "db.json", tmp_path / "cache")


def test_the_platforms_variables_count_where_they_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert settings.cache_dir() == Path("/var/cache/epigen")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # has no meaning, by their specification
    assert settings.cache_dir() is None
    monkeypatch.setenv("HOME", "/home/me")
    assert settings.cache_dir() == Path("/home/me/.cache/epigen") and settings.studies_dir() == Path("/home/me/.cache/epigen/studies")


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "none"), ({"HOME": "here"}, "relative"), ({"EPIGEN_DB": "~/db"}, "tilde"), ({"HOME": "/", "EPIGEN_DB": "~nobody-here/x"}, "unknown user")],
)
def test_without_a_place_the_shipped_records_serve_and_writing_says_why(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    opened(tmp_path).add(record())
    chain = Database(seeds=(tmp_path,))
    found = chain.find(problem(), TRITON)
    assert found is not None and found.how == "exact" and chain.path is None
    (words,) = chain.complaints
    golden(words, name)
    assert len(chain.records()) == 1 and chain.records(seeds=False) == []
    attempts = (
        lambda: chain.add(record()),
        lambda: chain.prune(beaten=True),
        lambda: chain.merge(tmp_path),
        lambda: chain.demand_writable("NVIDIA H200", "9.0"),
    )
    for attempt in attempts:
        with pytest.raises(DatabaseError) as refused:
            attempt()
        assert str(refused.value) == words
    assert chain.export(tmp_path / "out", seeds=True).added == 1


def test_the_commands_say_so_in_one_line(tmp_path: Path) -> None:
    words = "this user has no home folder: set EPIGEN_DB to a folder or a .json file"
    opened(tmp_path / "other").add(record())
    listed, checked = CliRunner().invoke(main, ["db", "list"]), CliRunner().invoke(main, ["db", "check"])
    assert (listed.exit_code, checked.exit_code) == (0, 0) and f"warning: {words}" in listed.stderr and f"warning: {words}" in checked.stderr
    merged = CliRunner().invoke(main, ["db", "merge", "other"])
    assert merged.exit_code == 1 and merged.stderr.count("\n") == 1 and words in merged.stderr
    info = CliRunner().invoke(main, ["info"])
    assert info.exit_code == 0 and f"warning: {words}" in info.stdout and "no folder: this user has no home" in info.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["other"], "no folder called ~"


def test_a_folder_that_can_be_written_is_told_from_one_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert can_be_written(tmp_path) and can_be_written(tmp_path / "a" / "b")
    assert not can_be_written(tmp_path / "file") and not can_be_written(tmp_path / "file" / "below") and not can_be_written(tmp_path / ("x" * 300))
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # as on a file system that is read-only
    assert not can_be_written(tmp_path) and not can_be_written(tmp_path / "a" / "b")


# -- for real, under the number of a user whom nobody knows

STRANGER = """
import os, pwd, sys, tempfile
import torch, epigen
from epigen import api
from epigen.errors import EpigenError
from epigen.runtime import rendering
from pathlib import Path

x, w, b = torch.ones(16, 16), torch.ones(16, 16), torch.zeros(16)

def everything():
    api.database.cache_clear()
    rendering._of.cache_clear()
    programs = ("relu(mm)", "relu(mm + bias)")
    assert torch.equal(epigen.compile(programs[0])(x, w), x @ w)
    kernel = epigen.compile(programs[1], backend="interpreter")
    assert torch.equal(kernel(x, w, bias=b), x @ w)
    assert "@triton.jit" in kernel.source() and torch.equal(epigen.linear(x, w, b), x @ w)
    try:
        api.database().merge(Path(sys.argv[1]))
    except EpigenError as error:
        return str(error)
    return "written"

everything()  # whatever has to be imported, before the user changes
def unknown(uid):
    raise KeyError(uid)

pwd.getpwuid = unknown
if os.getuid() == 0:
    os.setgid(45678)
    os.setuid(45678)
for name in list(os.environ):
    if name.startswith(("EPIGEN_", "XDG_")) or name == "HOME":
        del os.environ[name]
closed, current = sys.argv[2:]
os.chdir(current)
for said in ({}, {"HOME": closed}, {"HOME": f"{closed}/below"}, {"HOME": "/dev/null"}, {"HOME": "/"}, {"HOME": "/proc"}, {"EPIGEN_DB": closed},
    {"EPIGEN_DB": f"{closed}/x.json", "EPIGEN_CACHE": f"{closed}/cache"}, {"EPIGEN_DB": "~nobody-here/x", "EPIGEN_CACHE": "~nobody-here/x"},
    {"EPIGEN_DB": "/" + "x" * 300, "EPIGEN_CACHE": "/" + "x" * 300}, {"EPIGEN_DB": "/dev/null/db", "EPIGEN_CACHE": "/dev/null/cache"}):
    os.environ.update(said)
    print(said or "no home", everything(), sep=": ")
    tempfile.tempdir = "/nonexistent"  # nothing at all can be written
    everything()
    tempfile.tempdir = None
    for name in said:
        del os.environ[name]
assert os.listdir(".") == [], os.listdir(".")
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can look into, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="epigen-stranger-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.triton
@pytest.mark.slow
def test_calls_work_for_a_user_who_may_write_nothing(public: Path) -> None:
    closed, current = public / "closed", public / "current"
    closed.mkdir(mode=0o700)
    current.mkdir()
    opened(public / "some").add(record())
    if os.getuid() != 0:
        closed.chmod(0)
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, public / "some", closed, current],
        env=settings.child_environment(interpret=True) | {"HOME": str(public)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 11 and not [line for line in lines if line.endswith("written")], done.stdout


# -- Triton's own cache


@pytest.mark.triton
@pytest.mark.parametrize("own", ["~/.triton/cache", "/dev/null/.triton/cache"])
def test_tritons_cache_gets_a_place_where_it_has_none(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home it would make a folder called ~ in the current one."""
    triton = SimpleNamespace(knobs=SimpleNamespace(cache=SimpleNamespace(dir=str(tmp_path / "good"))))
    monkeypatch.setenv("EPIGEN_CACHE", str(tmp_path / "cache"))
    loader._place_cache(triton)
    assert not settings.triton_cache_chosen()
    triton.knobs.cache.dir = own
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back
    loader._place_cache(triton)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
    assert stat.S_IMODE((tmp_path / "cache" / "triton").stat().st_mode) == 0o700
    loader._place_cache(SimpleNamespace())  # chosen: nothing is looked at


@pytest.mark.triton
def test_a_kernel_is_compiled_where_the_home_folder_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null/home")
    monkeypatch.setenv("EPIGEN_CACHE", str(tmp_path / "cache"))
    command = ["compile", "relu(mm + bias)", "--target", "sm_80", "--no-verify", "--emit", "ptx"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0 and "epigen_relu_mm_bias" in done.stdout, done.output
    assert [p.name for p in tmp_path.iterdir()] == ["cache"] and any((tmp_path / "cache" / "triton").iterdir())


@pytest.mark.triton
def test_a_cache_that_triton_cannot_write_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/triton")
    done = CliRunner().invoke(main, ["compile", "relu(mm + bias)", "--target", "sm_80", "--no-verify", "--emit", "ptx"])
    assert done.exit_code == 1
    assert (
        "Triton cannot write its cache: Not a directory (/dev/null/triton" in done.stderr
        and "set TRITON_CACHE_DIR to a folder that can be written" in done.stderr
    )


def test_a_disk_that_is_full_is_no_internal_error() -> None:
    error = loader.unwritten(OSError(28, "No space left on device", "/home/me/.triton/x"))
    assert isinstance(error, EpigenError)
    assert str(error) == "Triton cannot write its cache: No space left on device (/home/me/.triton/x): set TRITON_CACHE_DIR to a folder that can be written"
