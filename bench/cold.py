"""How long `epigen tune` takes where nothing is cached yet: one problem, and a suite of problems in one command.

Run: python -m bench.cold [--runs N] [--problems N] [--commit HASH] [--out FOLDER]
Claims: one problem within 15 s, start of the process included, every time; in a suite 6 s a problem.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench import command, record
from bench.record import Report
from epigen.tuning import suite

PROGRAM, SHAPE = "relu(mm + bias)", "4096x4096x4096"
SUITE = Path(__file__).parent / "suite_h200.toml"
CLAIMED_S, CLAIMED_A_PROBLEM_S = 15.0, 6.0


def one(run: command.Run) -> dict[str, Any]:
    """A run of one problem, for the record."""
    (problem,) = run.record()["problems"]
    return {"part": "one", **problem, "wall_s": round(run.wall_s, 2)}


def together(run: command.Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run of a suite, for the record: of the whole, and of its problems."""
    count = len(run.problems)
    seconds = run.search_s
    whole = run.record()
    rows = [{"part": "suite", **problem} for problem in whole.pop("problems")]
    return whole | {
        "count": count,
        "wall_a_problem_s": round(run.wall_s / count, 2),
        "search_a_problem_s": round(sum(seconds) / max(1, len(seconds)), 2),
        "holds": not run.failed and run.wall_s / count <= CLAIMED_A_PROBLEM_S,
    }, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of the one problem")
    parser.add_argument("--problems", type=int, default=20, help="the first so many of bench/suite_h200.toml")
    record.add_options(parser)
    options = parser.parse_args()
    found: dict[str, Any] = {"program": PROGRAM, "shape": SHAPE, "claimed_s": CLAIMED_S, "claimed_a_problem_s": CLAIMED_A_PROBLEM_S}
    found["imports_s"] = round(command.warm_up(), 2)
    runs = []
    for number in range(options.runs):
        runs.append(one(command.tune([PROGRAM, "--shape", SHAPE])))
        print(f"run {number + 1}: {runs[-1]['wall_s']:.1f} s in all, {runs[-1]['seconds']} s searching {runs[-1]['spent_s']}, {runs[-1]['winner']}", flush=True)
    # only now, because asking for the GPU's name leaves the driver awake, which would spare the runs above a part of their start
    environment = record.environment(options.commit)
    rows = runs
    if runs:
        wall = [r["wall_s"] for r in runs]
        found |= {"median_s": statistics.median(wall), "worst_s": max(wall), "holds": max(wall) <= CLAIMED_S}
        print(f"one problem: median {found['median_s']:.1f} s, worst {found['worst_s']:.1f} s; claimed <= {CLAIMED_S:.0f} s: {found['holds']}", flush=True)
        record.write("cold", Report("bench.cold", environment, rows, found), options.out)
    if options.problems:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "suite.toml"
            file.write_text(command.suite_text(suite.read(SUITE)[: options.problems]))
            whole, problems = together(command.tune(["--suite", str(file)]))
        found["suite"], rows = whole, [*runs, *problems]
        for problem in problems:
            print(f"  {problem['problem']}: {problem['seconds']} s {problem['spent_s']} {problem['error'] or problem['winner']}")
        print(
            f"{whole['count']} problems: {whole['wall_s']:.1f} s in all, {whole['wall_a_problem_s']:.2f} s a problem, of the searches alone "
            f"{whole['search_a_problem_s']:.2f} s; claimed <= {CLAIMED_A_PROBLEM_S:.0f} s: {whole['holds']}"
        )
    print(record.write("cold", Report("bench.cold", environment, rows, found), options.out))


if __name__ == "__main__":
    main()
