"""Runs `epigen tune` as its user does: a new process, with an empty Triton cache, an empty epigen cache and an empty database."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epigen.db.records import short
from epigen.shapes import extents
from epigen.tuning.task import Request

_ROOT = Path(__file__).resolve().parent.parent
_MAIN = "from epigen.cli import main; main(prog_name='epigen')"  # the installed command is the same two steps
_IMPORTS = "import torch, triton, optuna, epigen.cli"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command.

    wall_s: of the whole process. searching_s: from the begin of the first search to the end of the last. problems: what --json tells of each.
    """

    wall_s: float
    searching_s: float
    problems: tuple[dict[str, Any], ...]

    @property
    def search_s(self) -> list[float]:
        """Seconds of each problem's search, of those that found a config."""
        return [p["seconds"] for p in self.problems if "seconds" in p]

    @property
    def failed(self) -> list[str]:
        """The problems in which no config works, each with its reason."""
        return [f"{_name(p)}: {p['error']}" for p in self.problems if "error" in p]

    def record(self) -> dict[str, Any]:
        rows = [
            {"problem": _name(p), "seconds": p.get("seconds"), "spent_s": p.get("spent_s"), "median_us": p.get("median_us"), "vs_mm": p.get("vs_mm"),
             "winner": p.get("winner"), "trials": p.get("trials"), "error": p.get("error")}
            for p in self.problems
        ]  # fmt: skip
        return {"wall_s": round(self.wall_s, 2), "searching_s": round(self.searching_s, 2), "failed": self.failed, "problems": rows}


def tune(arguments: Sequence[str], timeout_s: float = 550.0) -> Run:
    """Run `epigen tune ARGUMENTS --json`. Raises RuntimeError, with what the command said, where it ends otherwise than with results."""
    with tempfile.TemporaryDirectory(prefix="epigen-bench-", ignore_cleanup_errors=True) as folder:
        fresh = {"TRITON_CACHE_DIR": f"{folder}/triton", "EPIGEN_CACHE": f"{folder}/epigen", "EPIGEN_DB": f"{folder}/db"}
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, "tune", *arguments, "--json"], env=environment() | fresh, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        lines: list[tuple[float, str]] = []
        listening = threading.Thread(target=_listen, args=(process.stderr, start, lines))
        killing = threading.Timer(timeout_s, process.kill)
        listening.start()
        killing.start()
        try:
            output = process.stdout.read()
            status = process.wait()
            wall_s = time.perf_counter() - start
        finally:
            killing.cancel()
            process.kill()  # nothing where it has ended
            process.wait()
            listening.join()
            process.stdout.close()
            process.stderr.close()
    said = "\n".join(line for _, line in lines[-20:])
    if status not in (0, 1):
        raise RuntimeError(f"epigen tune {' '.join(arguments)} ended with status {status} after {wall_s:.0f} s:\n{said}")
    try:
        problems = tuple(json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError):
        raise RuntimeError(f"epigen tune {' '.join(arguments)} printed no JSON, status {status}:\n{said}") from None
    return Run(wall_s, _searching_s(lines, problems), problems)


def plainly(arguments: Sequence[str]) -> int:
    """Run `epigen ARGUMENTS` with this terminal and this environment's caches. Returns its exit status."""
    return subprocess.run([sys.executable, "-c", _MAIN, *arguments], env=environment(), stdin=subprocess.DEVNULL).returncode


def warm_up() -> float:
    """Seconds that one process needs to import what the command imports: it brings those files into the system's own cache, so that all
    runs after it find them there, whatever the machine did before."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", _IMPORTS], env=environment(), check=True)
    return time.perf_counter() - start


def suite_text(requests: Iterable[Request]) -> str:
    """Problems as the text of a suite file. JSON's strings are TOML's."""
    return "\n".join(
        f"[[problem]]\nprogram = {json.dumps(a.graph.text)}\nshapes = {json.dumps(extents(a.shape))}\ndtype = {json.dumps(a.a.name)}\n"
        f"layout = {json.dumps(a.layout)}\nprecision = {json.dumps(a.precision)}\n"
        for a in requests
    )


def import_path() -> dict[str, str]:
    """What a child's environment says of where modules are found: in this checkout first, and not for lying in the current folder."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))), "PYTHONSAFEPATH": "1"}


def environment() -> dict[str, str]:
    """This process's own, with this checkout's epigen first, and with Python's modules compiled once, as an installed package has them.

    Where the environment forbids to keep them, half of a process's first call goes into compiling Python: 0.25 of 0.55 s under a profiler (an H200's
    host, 2026-11). They then lie in a folder that goes with this process.
    """
    found = os.environ | import_path()
    if found.pop("PYTHONDONTWRITEBYTECODE", None):
        found["PYTHONPYCACHEPREFIX"] = _modules()
    return found


@functools.cache
def _modules() -> str:
    folder = tempfile.mkdtemp(prefix="epigen-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _listen(stream: Iterable[str], start: float, lines: list[tuple[float, str]]) -> None:
    for line in stream:
        lines.append((time.perf_counter() - start, line.rstrip("\n")))


def _searching_s(lines: Sequence[tuple[float, str]], problems: Sequence[dict[str, Any]]) -> float:
    """The command tells of each problem when it is done, and in the end how long its search took: together that is when it began."""
    begins, ends = [], []
    for problem in problems:
        heading = f"{_name(problem)}: "
        end = next((at_s for at_s, line in lines if re.sub(r"^\d+/\d+ ", "", line).startswith(heading)), None)
        if end is not None and "seconds" in problem:
            begins.append(end - problem["seconds"])
            ends.append(end)
    return max(ends) - min(begins) if ends else 0.0


def _name(problem: dict[str, Any]) -> str:
    """A row of --json as the command's lines begin."""
    m, n, k = problem["shape"]
    return f"{short(problem['program'])} {extents((m, n, k))} {problem['dtype']} {problem['layout']}"
