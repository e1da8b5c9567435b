"""A folder that somebody else filled: no command runs the modules that lie where its user stands."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from checkout import ROOT

from epigen import cli, settings
from epigen.db.database import Database

NAMES = ("abc", "ast", "bench", "ctypes", "dataclasses", "decimal", "epigen", "heapq", "json", "jinja2", "multiprocessing", "numpy", "optuna", "pickle")
NAMES += (
    "click",
    "filelock",
    "logging",
    "platform",
    "random",
    "re",
    "shlex",
    "socket",
    "sqlalchemy",
    "sqlite3",
    "statistics",
    "string",
    "tempfile",
    "torch",
    "triton",
    "typing",
    "usercustomize",
)

COMMANDS = """
import sys
from epigen.cli import main
for line in sys.argv[1:]:
    main(line.split("|"), standalone_mode=False)
"""


def every(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command of the command line."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every(command, (*before, name))
        else:
            yield (*before, name)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules leave their names in `ran`, one each."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\nraise ImportError({name!r})\n")
    return folder


def ran(hostile: Path) -> str:
    found = hostile.parent / "ran"
    return found.read_text() if found.exists() else ""


def started(code: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As an installed command is started: without the current folder among the places of modules."""
    own = settings.child_environment(interpret=False)
    del own["PYTHONSAFEPATH"]  # what has to be there for the command's own children, too
    own |= {"CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], cwd=folder, env=own, capture_output=True, text=True, check=False)


def test_the_folder_is_hostile(hostile: Path) -> None:
    """A child as anybody would start it runs what lies there."""
    subprocess.run([sys.executable, "-c", "import pickle"], cwd=hostile, capture_output=True, check=False)
    assert ran(hostile) == "pickle "


@pytest.mark.triton
@pytest.mark.slow
def test_no_command_runs_modules_of_the_current_folder(hostile: Path) -> None:
    table = ROOT / "tests" / "data" / "sweep_skinny.json"
    database = hostile.parent / "db"
    commands = [
        "compile|relu(mm + bias)|--target|sm_80|--emit|ptx|--no-verify",
        "compile|relu(mm + bias)|--target|sm_90",
        f"compile|relu(mm + bias)|--backward|-o|{hostile.parent / 'fused.py'}",
        f"tune|--replay|{table}|--trials|30",
        "explain|relu(mm + bias)|--shape|512x512x512",
        "info",
        "ops",
        f"db|list|--db|{database}",
        f"db|merge|{ROOT / 'tuning_db'}|--db|{database}",
        f"db|check|{database}",
        f"db|export|{hostile.parent / 'exported.json'}|--db|{database}",
        f"db|show|{next(iter(Database(ROOT / 'tuning_db', seeds=()).records()))[1].name}|--db|{database}",
        f"db|prune|--beaten|--dry-run|--db|{database}",
    ]
    assert {tuple(line.split("|")[: 1 + line.startswith("db|")]) for line in commands} == set(every(cli.main))
    done = started(COMMANDS, hostile, *commands)
    assert (done.returncode, ran(hostile)) == (0, ""), done.stderr


def test_no_worker_of_a_search_runs_modules_of_the_current_folder(hostile: Path) -> None:
    code = (
        "from epigen.tuning.process import ForkServer, Worker\n"
        "fork_server = ForkServer('numpy', 'random', 'epigen.tuning.timing_worker')\n"
        "key, connection = fork_server.fork('json')\n"  # no worker: it ends by itself, when all has been imported
        "connection.poll(None)\n"
        "print(fork_server.end(key))\n"
        "fork_server.stop()\n"
    )
    done = started(code, hostile)
    assert (done.stdout, ran(hostile)) == ("1\n", ""), done.stderr


@pytest.mark.parametrize("spelt", ["", ".", "{here}", "{here}/", "{here}/../downloaded", "{link}", "lib", "{here}/lib:more"])
def test_children_do_not_inherit_the_current_folder(spelt: str, hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it came onto the path of modules, and nothing below it that is not named whole."""
    link = hostile.parent / "link"
    link.symlink_to(hostile)
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", [spelt.format(here=hostile, link=link), *(p for p in sys.path if p), str(hostile / "named")])
    found = settings.child_environment(interpret=False)
    assert found["PYTHONSAFEPATH"] == "1"
    kept = found["PYTHONPATH"].split(os.pathsep)
    assert kept == [p for p in sys.path[1:] if Path(p).is_absolute()] and kept[-1] == str(hostile / "named")


def test_epigen_is_found_by_its_children_even_where_the_user_stands_in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *(p for p in sys.path if os.path.realpath(p) != str(ROOT))])
    path = settings.child_environment(interpret=False)["PYTHONPATH"].split(os.pathsep)
    assert path == [p for p in sys.path[1:] if p] + [str(ROOT)]


def test_a_current_folder_that_is_gone_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert str(ROOT) in settings.child_environment(interpret=False)["PYTHONPATH"].split(os.pathsep)


SOURCES = sorted((*(ROOT / "epigen").rglob("*.py"), *(ROOT / "bench").rglob("*.py")))


def test_every_child_that_runs_python_is_told_where_modules_lie() -> None:
    """Each call that may start sys.executable, in epigen and bench, names an environment by one of the two functions that know."""
    starting = re.compile(r"(subprocess\.(run|Popen|call|check_call|check_output)|os\.(exec|spawn|posix_spawn)\w*)\(")
    known = re.compile(r"child_environment\(|import_path\(\)|environment\(\)|env=environment\b")
    started = [
        f"{path}: {call}"
        for path in SOURCES
        if "sys.executable" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and starting.match(call := ast.unparse(node))
    ]
    assert len(started) >= 9 and not [call for call in started if not known.search(call)]
