"""Odd values for every option and argument of every command: a result, or a message and a status, and never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from machines import NO_GPU

from epigen import api, cli, settings

BASE: dict[tuple[str, ...], tuple[str, ...]] = {
    ("compile",): ("mm", "--no-verify"), ("explain",): ("mm", "--shape", "64x64x64"), ("tune",): ("mm", "--shape", "64x64x64"), ("ops",): (), ("info",): (),
    ("db", "list"): (), ("db", "show"): ("0",), ("db", "merge"): ("there.json",), ("db", "export"): ("new.json",), ("db", "check"): (), ("db", "prune"): ("--beaten",),
}  # fmt: skip
"""Each command with what it cannot do without."""
NEEDS = {"save": "--backward", "wrt": "--backward"}
ALONE = {"suites", "tables"}  # options of tune that take the place of a program

VALUES = (
    "", "-", "--", "mm", "\u2028\u00e9", "\udcff", "x" * 5000, "folder", "bytes", "empty", "there.json", "/", "..", "\n", "0", "-1", "nan", "1e999", "%s", "{}",
    "/dev/null", "/nonexistent/x", "64x64x64",
)  # fmt: skip


def commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name), command


COMMANDS = dict(commands(cli.main))


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with files of many kinds, and databases of its own."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("bytes").write_bytes(b"\x00\xff\xfe")
    Path("empty").touch()
    Path("there.json").write_text("{}")
    monkeypatch.setenv("EPIGEN_DB", str(tmp_path / "own"))
    monkeypatch.setattr(settings, "seed_database_dir", lambda: tmp_path / "nothing")
    api.database.cache_clear()
    yield
    api.database.cache_clear()


def end(words: tuple[str, ...]) -> str:
    """'' or what is wrong with the end of a command."""
    done: Any = CliRunner().invoke(cli.main, words, prog_name="epigen", obj=NO_GPU)
    said = done.stdout + done.stderr
    wrong = not isinstance(done.exception, SystemExit | None) or done.exit_code not in (0, 1, 2) or "Traceback" in said or "internal error" in said
    silent = done.exit_code != 0 and not said.strip()
    return f"{[w[:40] for w in words]}: {done.exit_code} {done.exception!r} {said[-200:]}" if wrong or silent else ""


def test_each_command_has_a_base() -> None:
    assert set(BASE) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_odd_values_end_in_words(name: tuple[str, ...]) -> None:
    tried = []
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            base = () if parameter.name in ALONE else BASE[name]
            extra = (NEEDS[parameter.name],) if parameter.name in NEEDS else ()
            tried += [(*name, *base, *extra, parameter.opts[-1], value) for value in VALUES]
        elif isinstance(parameter, click.Argument):
            tried += [(*name, value, *BASE[name][1:]) for value in VALUES]
    tried += [(*name, *BASE[name], value) for value in VALUES]
    assert [wrong for words in tried if (wrong := end(words))] == []


@pytest.mark.parametrize("name", [(), ("db",), *COMMANDS], ids=lambda n: " ".join(n) or "epigen")
def test_each_help_is_short_and_names_every_option(name: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli.main, (*name, "--help"), prog_name="epigen", terminal_width=100)
    assert done.exit_code == 0 and done.stdout.count("\n") < 60
    assert not [line for line in done.stdout.splitlines() if line.startswith("  ") and line.endswith("...")], "a command's line is cut off"
    for parameter in COMMANDS[name].params if name in COMMANDS else ():
        if isinstance(parameter, click.Option):
            assert all(option in done.stdout for option in parameter.opts)
