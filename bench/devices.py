"""What a second GPU gains: a suite of problems, and one problem with many trials, on one GPU and on two.

Run, where there are two GPUs: python -m bench.devices [--problems N] [--trials N] [--commit HASH] [--out FOLDER]
Claim: the searches of a suite of 20 problems take at least 1.8 times as long on one GPU as on two. All caches are empty for each run.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench import command, record
from bench.record import Report
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.tuning import suite

SUITE = Path(__file__).parent / "suite_h200.toml"
MANY = ("gelu(mm + bias)", "--shape", "2048x2048x2048")
CLAIMED = 1.8


def gained(part: str, single: command.Run, double: command.Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same work on one GPU and on two: how many times faster, by the searches' wall time and by the whole processes'; and the problems."""
    one, two = single.record(), double.record()
    rows = [{"part": part, "gpus": gpus, **problem} for gpus, run in ((1, one), (2, two)) for problem in run.pop("problems")]
    return {
        "one": one,
        "two": two,
        "searching": round(single.searching_s / double.searching_s, 3) if double.searching_s else None,
        "wall": round(single.wall_s / double.wall_s, 3),
        "failed": sorted({*single.failed, *double.failed}),
    }, rows


def _line(what: str, found: dict[str, Any]) -> str:
    one, two = found["one"], found["two"]
    return (
        f"{what}: searching {one['searching_s']:.1f} s on one GPU, {two['searching_s']:.1f} s on two, {found['searching']} times as fast; "
        f"whole processes {one['wall_s']:.1f} s and {two['wall_s']:.1f} s, {found['wall']} times{'; failed: ' + '; '.join(found['failed']) if found['failed'] else ''}"
    )


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=20, help="the first so many of bench/suite_h200.toml; 0: leave the suite out")
    parser.add_argument("--trials", type=int, default=600, help="of the one problem; 0: leave it out")
    record.add_options(parser)
    options = parser.parse_args()
    if len(machine.indices()) < 2:
        raise SystemExit("this wants two GPUs")
    environment = record.environment(options.commit)
    found: dict[str, Any] = {"claimed": CLAIMED, "imports_s": round(command.warm_up(), 2)}
    rows: list[dict[str, Any]] = []
    if options.problems:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "suite.toml"
            file.write_text(command.suite_text(suite.read(SUITE)[: options.problems]))
            single, double = (command.tune(["--suite", str(file), "--devices", d]) for d in ("0", "0,1"))
        gain, problems = gained("suite", single, double)
        found["suite"] = gain | {"count": len(single.problems)}
        rows += problems
        found["holds"] = not found["suite"]["failed"] and (found["suite"]["searching"] or 0.0) >= CLAIMED
        print(_line(f"{len(single.problems)} problems", found["suite"]))
        print(f"claimed >= {CLAIMED}: {found['holds']}", flush=True)
        record.write("devices", Report("bench.devices", environment, rows, found), options.out)
    if options.trials:
        single, double = (command.tune([*MANY, "--trials", str(options.trials), "--devices", d]) for d in ("0", "0,1"))
        gain, problems = gained("many", single, double)
        found["many"] = gain | {"program": MANY[0], "shape": MANY[2], "trials": options.trials}
        rows += problems
        for run in (single, double):
            print([(p.get("winner"), p.get("median_us"), p.get("trials"), p.get("error")) for p in run.problems])
        print(_line(f"one problem, {options.trials} trials", found["many"]))
    print(record.write("devices", Report("bench.devices", environment, rows, found), options.out))


if __name__ == "__main__":
    main()
