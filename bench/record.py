"""What every result carries: where and with what it was measured."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epigen.files import write_whole
from epigen.gpus import Target
from epigen.runtime import device

RESULTS = Path(__file__).parent / "results"
_NUMBERS = re.compile(r"\[\n(?:\s+(?:-?[\d.]+(?:e[-+]?\d+)?|null),?\n)+\s+\]")  # as JSON with an indent lays them out


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every script that records a result is told: the commit, where the tree has no git, and the folder to write to."""
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)


def gpu_at_hand() -> Target:
    """The GPU to measure on. Ends the script where there is none."""
    target = device.at_hand()
    if target is None:
        raise SystemExit("this wants a GPU")
    return target


def versions(commit: str | None = None) -> dict[str, Any]:
    """Packages, date and commit: all of the environment that a result without a GPU depends on."""
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "commit": commit or _commit(), "python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "optuna", "nvmath-python", "scikit-learn"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(commit: str | None = None) -> dict[str, Any]:
    """GPU, driver, versions, date and commit. commit: where the tree has no git, the caller says it."""
    import torch

    found = versions(commit) | {"torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        query = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        found["driver"] = query.stdout.strip().split("\n")[0]
    return found


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return answer.stdout.strip() or "unknown"


def earlier(path: Path, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result that was made by the same GPU and versions; none where there is no such result. Those of another commit tell it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    about = found.get("environment", {})
    if any(about.get(k) != environment.get(k) for k in ("gpu", "torch", "triton", "driver")):
        return []
    return [dated(row, found, environment.get("commit")) for row in found["rows"]]


def dated(row: Mapping[str, Any], result: Mapping[str, Any], commit: Any) -> dict[str, Any]:
    """A result's row as it stands in one of `commit`: it tells its own where that is another."""
    own = row.get("commit", result["environment"].get("commit"))
    return {k: v for k, v in row.items() if k != "commit"} | ({} if own == commit else {"commit": own})


def write(name: str, body: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write one result, sorted and indented so that a change reads well; a list of numbers is one line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps(body, indent=1, sort_keys=True)
    write_whole(path, (_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n").encode())
    return path
