"""What every result carries: where and with what it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment(commit: str | None = None) -> dict[str, Any]:
    """GPU, driver, versions, date and commit. commit: where the tree has no git, the caller says it."""
    import torch

    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "commit": commit or _commit(), "python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "nvmath-python"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
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


def write(name: str, body: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write one result, sorted and indented so that a change reads well."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return path
