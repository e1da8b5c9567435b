"""`epigen info`: what epigen finds here: GPUs and what they can run, versions, tuning databases, folders. `cli` attaches it to its group."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import click

import epigen
from epigen import dtypes, settings
from epigen.commands.types import pass_machine
from epigen.errors import DatabaseError, TargetError
from epigen.gpus import DEFAULT_TARGET, Target
from epigen.runtime.device import Machine

PACKAGES = ("torch", "triton", "optuna")
_SHAPES = ((4096, 4096, 4096), (16, 4096, 4096))  # aligned; large and skinny enough for every schedule


@click.command("info", short_help="Show GPUs, versions, databases and folders.")
@click.option("--db", "path", type=click.Path(path_type=Path), help="a database to look at instead of the user's, a folder or one .json file")
@click.option("--json", "as_json", is_flag=True, help="write one JSON object instead")
@pass_machine
def info_command(machine: Machine, path: Path | None, as_json: bool) -> None:
    """Show the GPUs and the schedules that each can run, versions, the tuning databases found, and the cache folder."""
    facts = gather(machine, path)
    click.echo(json.dumps(facts) if as_json else text(facts), nl=as_json)


def gather(machine: Machine, path: Path | None = None) -> dict[str, Any]:
    """All of it as plain data. path: of a database in place of the user's."""
    versions = {"epigen": epigen.__version__, "python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    here = [_gpu(machine, index) for index in sorted(machine.indices())]
    default = None if here else {"target": DEFAULT_TARGET.name, "part": DEFAULT_TARGET.part, "schedules": schedules(DEFAULT_TARGET)}
    cache, folder = settings.cache_dir(), settings.studies_dir()
    studies = sorted(folder.glob("*.journal")) if folder is not None and os.path.isdir(folder) else []  # noqa: PTH112  # Path.is_dir may raise
    return {
        "versions": versions, "driver": driver() if here else None, "gpus": here, "default": default, "databases": _databases(path),
        "cache": {"path": None if cache is None else str(cache), "studies": len(studies)},
    }  # fmt: skip


def _gpu(machine: Machine, index: int) -> dict[str, Any]:
    properties = machine.properties(index)
    facts: dict[str, Any] = {"index": index, "name": properties.name, "memory_bytes": properties.total_memory}
    try:
        target = machine.at_hand(index)
    except TargetError as error:
        return facts | {"error": str(error)}
    assert target is not None
    return facts | {"target": target.name, "multiprocessors": target.multiprocessors, "schedules": schedules(target)}


def schedules(target: Target) -> dict[str, list[str]]:
    """The dtypes of operands that each schedule multiplies on a target: those of which its search space holds a config, beside a weight of 8 bits where it takes
    no other."""
    from epigen import api
    from epigen.choose import space
    from epigen.codegen.lower import lower
    from epigen.ir.program import graph_of

    graph = graph_of("relu(mm)")
    kernel = api.compile("relu(mm)", precision="ieee")
    by_schedule: dict[str, list[str]] = {}
    for dtype in dtypes.OPERANDS:
        # not every schedule may pay at every shape
        weights = [None, *[dtypes.INT8] * (dtypes.multiplied_as(dtype, dtypes.INT8) != dtypes.INT8)]
        spaces = [
            space.Space(lower(graph, kernel.signature_of(dtype, shape, "nt", weight)), shape, target) for shape, weight in itertools.product(_SHAPES, weights)
        ]
        for name in {name: None for here in spaces for name in here.schedules}:
            by_schedule.setdefault(name, []).append(dtype.name)
    return {name: by_schedule[name] for name in space.SCHEDULE_NAMES if name in by_schedule}


def _databases(path: Path | None) -> list[dict[str, Any]]:
    from epigen.db import database

    chain = database.Database(path)
    summaries: list[dict[str, Any]] = []
    for root in (chain.path, *chain.seeds):
        one = database.Database(root, seeds=())
        records = one.records()
        try:
            files = len(database.files(root)) if root is not None else 0
        except DatabaseError:  # said among the complaints
            files = 0
        parts = sorted({r.gpu for _, r in records})
        summaries.append(
            {
                "path": None if root is None else str(root),
                "writable": root == chain.path,
                "files": files,
                "records": len(records),
                "gpus": parts,
                "complaints": list(one.complaints),
            }
        )
    return summaries


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver(version_file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """NVIDIA's kernel driver, from the file where it says so; None where there is no such file."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", version_file.read_text())
    except OSError:
        return None
    return match[1] if match else None


def text(facts: dict[str, Any]) -> str:
    """What was gathered, for a person: a fact a line."""
    rows: list[tuple[str, str]] = []
    versions = dict(facts["versions"])
    own = versions.pop("epigen")
    rows.append(("epigen", ", ".join([own, *(f"{name} {version or 'is missing'}" for name, version in versions.items())])))
    for gpu in facts["gpus"]:
        driver_text = f", driver {facts['driver']}" if facts["driver"] else ""
        memory = f"{gpu['memory_bytes'] / (1 << 30):.0f} GiB"
        if "error" in gpu:
            rows.append((f"gpu {gpu['index']}", f"{gpu['name']}, {memory}: {gpu['error']}"))
            continue
        rows.append((f"gpu {gpu['index']}", f"{gpu['name']} ({gpu['target']}), {gpu['multiprocessors']} multiprocessors, {memory}{driver_text}"))
        rows += _schedule_rows(gpu["schedules"])
    if not facts["gpus"]:
        default = facts["default"]
        rows.append(("gpu", f"none at hand; kernels are compiled for {default['target']} ({default['part']}) unless another target is named, which runs:"))
        rows += _schedule_rows(default["schedules"])
    for base in facts["databases"]:
        whose = "yours" if base["writable"] else "shipped"
        count = f"{base['records']} record{'s' * (base['records'] != 1)} in {base['files']} file{'s' * (base['files'] != 1)}"
        parts = f" ({', '.join(base['gpus'])})" if base["gpus"] else ""
        rows.append(("database", f"{base['path'] or 'none'}, {whose}: {count if base['files'] else 'empty'}{parts}"))
        rows += [("", f"warning: {complaint}") for complaint in base["complaints"]]
    cache = facts["cache"]
    studies = f", {cache['studies']} remembered search{'es' * (cache['studies'] != 1)}" if cache["studies"] else ""
    rows.append(("cache", f"{cache['path'] or 'no folder: this user has no home, or EPIGEN_CACHE names none that can be found'}{studies}"))
    return "\n".join(f"{name:<10}{line}".rstrip() for name, line in rows) + "\n"


def _schedule_rows(by_schedule: dict[str, list[str]]) -> list[tuple[str, str]]:
    width = max(map(len, by_schedule))
    return [("", f"{name:<{width}}  {', '.join(runs) if runs else 'cannot run here'}") for name, runs in by_schedule.items()]
