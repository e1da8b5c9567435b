"""The README's measured tables, made from the stored results.

Run: python -m bench.readme    rewrites what stands between the markers in README.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.record import RESULTS

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _measured(environment: dict[str, Any]) -> str:
    return f"{environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}, driver {environment['driver']}, {environment['date']}"


def gem() -> str:
    """relu(mm + bias) against three operations of torch."""
    result = _load("gem_fp16")
    lines = [
        f"`relu(mm + bias)`, fp16, microseconds a call ({_measured(result['environment'])}):",
        "",
        "| M x K x N | torch, three operations | `torch._addmm_activation` | epigen | less time than three operations |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        for kind, what in (("graph", "CUDA graph"), ("cold", "L2-cold launch")):
            eager, addmm, ours = (row[kind][name]["median_us"] for name in ("three operations", "_addmm_activation", "epigen"))
            lines.append(f"| {row['m']}x{row['k']}x{row['n']}, {what} | {eager:.2f} | {addmm:.2f} | {ours:.2f} | {1 - ours / eager:.0%} |")
    host = [row["host"] for row in result["rows"]]
    eager, ours = (max(h[name]["median_us"] for h in host) for name in ("three operations", "epigen"))
    lines += ["", f"Host time of a call from Python: {ours:.0f} us, against {eager:.0f} us for the three operations: small problems want a CUDA graph for now."]
    return "\n".join(lines)


def checked() -> str:
    """What ran on the GPU."""
    tests, memory = _load("gpu_tests"), _load("memcheck")
    return (
        f"On the GPU {tests['total']['passed']:,} cases agree with a float64 oracle within a bound derived from dtype and K, or bit for bit "
        f"({_measured(tests['environment'])}, commit {tests['environment']['commit']}); "
        f"compute-sanitizer's memcheck finds {memory['memcheck_errors']} errors in {memory['tests']['passed']} of them."
    )


BLOCKS = {"gem": gem, "checked": checked}


def filled(text: str) -> str:
    """The README with every block made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
