"""What is installed: a light import, and wheels that hold all they need and run away from the checkout."""

from __future__ import annotations

import ast
import email
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT, WATCHED

import epigen
from epigen.uncollected import uncollected

SHIPPED = ("templates", "tuning_db")


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run with nothing of this process's own choices: paths, Triton's mode, epigen's settings."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and (k == "EPIGEN_TESTS_NOTES" or not k.startswith("EPIGEN_"))}
    kept.update(PYTHONPATH=str(WATCHED))  # which tells who reaches Triton, and holds nothing else
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


COMMAND_LINE = "from epigen.cli import main\ntry:\n    main({args!r}, prog_name='epigen')\nexcept SystemExit as done:\n    assert not done.code"
STARTS = {
    "import": "import epigen",
    "help": COMMAND_LINE.format(args=["--help"]),
    "help of tune": COMMAND_LINE.format(args=["tune", "--help"]),
    "version": COMMAND_LINE.format(args=["--version"]),
}


@pytest.mark.parametrize(("start", "packages", "most"), [("import", [], 80), *((s, ["click"], 220) for s in STARTS if s != "import")])
def test_starting_is_light(start: str, packages: list[str], most: int) -> None:
    """Nothing of what others install but click, and few modules at all: torch alone has more than a thousand. bench.front has it in seconds."""
    code = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        f"{STARTS[start]}\n"
        "new = set(sys.modules) - before\n"
        "installed = {name.partition('.')[0] for name in new} - sys.stdlib_module_names - {'epigen'}\n"
        "print(json.dumps([sorted(installed), len(new)]), file=sys.stderr)\n"
    )
    found, count = json.loads(run([sys.executable, "-c", code], ROOT).stderr)
    assert found == packages
    assert count < most


def test_a_first_call_waits_for_nothing_that_only_tuning_needs() -> None:
    """Finding a config in the shipped database and rendering its kernel."""
    code = (
        "import sys, epigen\n"
        "why = epigen.compile('relu(mm + bias)').plan().choice.why\n"
        "heavy = {'optuna', 'sqlalchemy', 'click', 'epigen.ir.derive', 'epigen.tuning.request', 'epigen.tuning.first_use'}\n"
        "print(why, sorted(heavy & set(sys.modules)))\n"
    )
    assert re.fullmatch(r"(tuned for|borrowed from) .* \[\]\n", run([sys.executable, "-c", code], ROOT).stdout)


def test_a_recorded_search_waits_for_no_torch() -> None:
    """Where importing torch fails. It takes seconds, which a tuner on a GPU spends while its workers import it too."""
    blocked = "import sys\nsys.modules['torch'] = sys.modules['triton'] = None\n"
    table = ROOT / "tests" / "data" / "sweep_square.json"
    command = COMMAND_LINE.format(args=["tune", "--replay", str(table), "--trials", "8"])
    assert "4096x4096x4096" in run([sys.executable, "-c", blocked + command], ROOT).stdout


@pytest.mark.triton
def test_nothing_is_collected_on_the_way_to_a_first_kernel() -> None:
    """A look through all that torch has made takes 0.1 s: at the first import, at the database, or at Triton's import. The collector is as it was after."""
    code = (
        "import gc, sys, torch\n"
        "from epigen.dtypes import FP16\n"
        "looks = []\n"
        "gc.callbacks.append(lambda phase, info: looks.append(info['generation']) if phase == 'start' else None)\n"
        "import epigen\n"
        "from epigen.gpus import TARGETS\n"
        "kernel = epigen.compile('relu(mm + bias)')\n"
        "plan = kernel.plan((64, 256, 128), FP16, TARGETS['sm_90'], layout='nt')\n"
        "kernel._loaders[False].load(plan.rendered)\n"
        "assert 'triton' in sys.modules and gc.isenabled()\n"
        "print(looks.count(2))\n"
    )
    assert run([sys.executable, "-c", code], ROOT).stdout == "0\n"
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_programs_import_by_earlier_paths_is_what_stands_at_the_new_ones() -> None:
    code = (
        "from epigen.tuning.database import Database; from epigen.tuning.records import Record, parse\n"
        "from epigen.tuning.process import Stem; from epigen.runtime import device; from epigen import cli, db, gpus\n"
        "import epigen.tuning.process as process, epigen.db.database, epigen.db.records as records, click\n"
        "assert (Database, Record, parse) == (db.database.Database, records.Record, records.parse)\n"
        "assert Stem is process.ForkServer and device.by_name is gpus.target_by_name and isinstance(cli.main, click.Group)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    done = subprocess.run([sys.executable, "-m", "epigen.cli", "--version"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"epigen, version {epigen.__version__}\n"), "the module is the command too"


def test_the_version_is_printed() -> None:
    assert epigen.__version__ in run([sys.executable, "-c", STARTS["version"]], ROOT).stdout


def build_wheel(source: Path, folder: Path) -> Path:
    run([sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--wheel-dir", folder], ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def shipped_files() -> dict[str, bytes]:
    """The data folders' files, under the names that they have in a wheel: all but the locks that tuning into a checkout leaves."""
    files = (p for folder in SHIPPED for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".lock")
    return {f"epigen/{p.relative_to(ROOT).as_posix()}": p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of an environment that holds the wheel, and sees this environment's packages for the rest."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], home)
    packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], home).stdout.strip()
    # after the environment's own packages, and without following the .pth files found there: no other epigen comes first
    others = [p for p in sys.path if Path(p).name in {"site-packages", "dist-packages"}]
    (Path(packages) / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    return home / "bin"


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_data(wheel: Path) -> None:
    files = contents(wheel)
    sources = {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in (ROOT / "epigen").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    data = shipped_files()
    assert any(name.endswith(".j2") for name in data)
    assert "epigen/tuning_db/README.md" in data
    inside = {name: content for name, content in files.items() if ".dist-info/" not in name}
    assert inside.keys() == sources.keys() | data.keys()
    assert inside == sources | data


@pytest.mark.slow
def test_a_lock_that_tuning_left_in_the_checkout_stays_there(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("epigen", *SHIPPED):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "tuning_db" / "nvidia_h200_sm90.json.lock").touch()
    inside = contents(build_wheel(tmp_path, tmp_path / "wheels"))
    assert "epigen/tuning_db/nvidia_h200_sm90.json" in inside and not [name for name in inside if name.endswith(".lock")]


@pytest.mark.slow
def test_the_wheels_metadata_says_what_pyproject_says(wheel: Path) -> None:
    files = contents(wheel)
    info = f"epigen-{epigen.__version__}.dist-info"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = email.message_from_bytes(files[f"{info}/METADATA"])
    assert metadata["Version"] == epigen.__version__
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert len(required) == len(project["dependencies"])
    assert any(r.startswith("triton") and "sys_platform == 'linux'" in r for r in required)
    assert set(metadata.get_all("Provides-Extra", [])) == {"test", "bench", "dev"}
    assert b"epigen = epigen.cli:main" in files[f"{info}/entry_points.txt"]
    assert files[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Built by the backend in a folder of its own, as a build front end does it; pip has no command for it."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    backend = tmp_path / "backend"
    run([sys.executable, "-m", "pip", "install", "--target", backend, *requires], tmp_path)
    code = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = run([sys.executable, "-c", code, tmp_path], ROOT, PYTHONPATH=str(backend)).stdout.split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        files = {member.split("/", 1)[1] for member in archive.getnames() if "/" in member}
    assert files >= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs/cookbook.md", "tests/test_docs.py", "bench/README.md"}
    assert contents(build_wheel(tmp_path / name, tmp_path / "again")) == contents(wheel)


@pytest.mark.slow
def test_an_installed_epigen_finds_its_data_in_the_package(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, pathlib, epigen\n"
        "from epigen import settings\n"
        "from importlib.metadata import version\n"
        "found = [pathlib.Path(epigen.__file__).parent, settings.templates_dir(), settings.seed_database_dir()]\n"
        "print(json.dumps([version('epigen'), epigen.__version__, *map(str, found)]))\n"
    )
    told, version, package, templates, database = json.loads(run([installed / "python", "-c", code], tmp_path).stdout)
    assert told == version == epigen.__version__
    assert Path(package).resolve().is_relative_to(installed.parent.resolve())
    assert Path(templates).resolve() == Path(package).resolve() / "templates"
    assert Path(database).resolve() == Path(package).resolve() / "tuning_db"
    assert list(Path(templates).glob("*.j2"))


@pytest.mark.slow
def test_an_installed_command_prints_its_version(installed: Path, tmp_path: Path) -> None:
    assert epigen.__version__ in run([installed / "epigen", "--version"], tmp_path).stdout


@pytest.mark.slow
def test_an_installed_command_prints_a_kernel(installed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    text = run([installed / "epigen", "compile", "relu(mm+bias)", "--no-verify"], tmp_path, EPIGEN_CACHE=str(cache)).stdout
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    # whichever schedule the shipped database takes for the fastest there
    assert any({"triton.jit", "gluon.jit"} & {ast.unparse(d) for d in f.decorator_list} for f in functions)
    assert "tl.dot(" in text or "warpgroup_mma(" in text
    assert "tl.maximum(" in text or "gl.maximum(" in text


def test_what_the_package_offers_is_what_completion_and_help_show() -> None:
    """In a process of its own, where nothing of it is imported yet."""
    code = (
        "import pydoc, sys, epigen\n"
        "names = dir(epigen)\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
        "print(*(n for n in names if not n.startswith('__')))\n"
        "text = pydoc.render_doc(epigen, renderer=pydoc.plaintext)\n"
        "print(all(f'    {name}(' in text for name in ('compile', 'derive', 'fuse', 'linear', 'tune')))\n"
    )
    offered, helped = run([sys.executable, "-c", code], ROOT).stdout.splitlines()
    assert offered.split() == sorted(name for name in epigen.__all__ if name != "__version__")
    assert helped == "True"
