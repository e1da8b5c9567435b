"""Whether tuning again gives as fast a kernel: repeated tunings of some problems, each from nothing and with a seed of its own.

Run: python -m bench.repeat [--problems N] [--repetitions N] [--commit HASH] [--out FOLDER]
Claim: every repetition's winner is within 1 % of the fastest of the winners. All winners of a problem are timed at the end, interleaved.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import record
from bench.record import Report
from epigen.dtypes import FP16
from epigen.ir.program import graph_of
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.tuning import report
from epigen.tuning.runner import GpuRunner, Runner
from epigen.tuning.task import Task
from epigen.tuning.tune import tune_one

# program, shape, layout
PROBLEMS = (
    ("relu(mm + bias)", (4096, 4096, 4096), "nt"),
    ("relu(mm + bias)", (1024, 1024, 1024), "nn"),
    ("dz = drelu(mm, mask); dz, bgrad(dz)", (4096, 4096, 1024), "nn"),
)
CLAIMED = 0.01


def repeated(task: Task, runner: Runner, seeds: Sequence[int], comparisons: int) -> dict[str, Any]:
    """Tune once a seed, in memory and without a database; then time the distinct winners interleaved, `comparisons` times over.

    behind: how much longer a winner takes than the fastest of them, by the medians over the comparisons; None where it gave no right answer then.
    """
    tuned = []
    for seed in seeds:
        found = tune_one(replace(task, seed=seed), None, seed=seed, runner=runner).result
        assert found is not None  # a problem in which no config works is an error
        tuned.append(found)
        print(f"  seed {seed}: {report.us(found.outcome.median_us)} us, {found.seconds:.1f} s, {report.brief(found.winner)}", flush=True)
    runner.begin(task)
    winners = list(dict.fromkeys(t.winner for t in tuned))
    runner.prepare(winners)
    checked = {c: runner.measure(c, 0.0) for c in winners}
    right = [c for c in winners if checked[c].kind == "ok"]
    compared = [runner.compare(right) for _ in range(comparisons)]
    times = {c: [one.outcomes[i].median_us for one in compared] for i, c in enumerate(right)}
    middle = {c: statistics.median(samples) for c, samples in times.items()}
    best = min(middle.values(), default=0.0)
    rows: list[dict[str, Any]] = [
        {
            "seed": seed, "winner": str(t.winner), "seconds": round(t.seconds, 2), "trials": dict(t.counts), "found_us": round(t.outcome.median_us, 3),
            "us": round(middle[t.winner], 3) if t.winner in middle else None,
            "behind": round(middle[t.winner] / best - 1, 5) if t.winner in middle else None,
        }
        for seed, t in zip(seeds, tuned, strict=True)
    ]  # fmt: skip
    return {
        "problem": report.name(task),
        "best_us": round(best, 3),
        "mm_us": round(statistics.median(one.baseline.mm_us for one in compared), 3),
        "winners": {str(c): {"us": [round(us, 3) for us in times.get(c, [])], "outcome": checked[c].kind, "detail": checked[c].detail} for c in winners},
        "repetitions": rows,
        "worst": max((r["behind"] for r in rows if r["behind"] is not None), default=None),
        "holds": all(r["behind"] is not None and r["behind"] <= CLAIMED for r in rows),
    }


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=len(PROBLEMS), help="the first so many")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--comparisons", type=int, default=11)
    record.add_options(parser)
    options = parser.parse_args()
    target = record.gpu_at_hand(machine)
    environment = record.environment(options.commit)
    rows: list[dict[str, Any]] = []

    def save() -> Path:
        return record.write("repeat", Report("bench.repeat", environment, rows, {"claimed": CLAIMED, "holds": all(row["holds"] for row in rows)}), options.out)

    runner = GpuRunner()
    try:
        for text, shape, layout in PROBLEMS[: options.problems]:
            task = Task(graph_of(text), shape, FP16, FP16, (FP16,), layout, "ieee", target)
            print(report.name(task), flush=True)
            found = repeated(task, runner, range(options.repetitions), options.comparisons)
            rows.append(found)
            for row in found["repetitions"]:
                behind = "gave no right answer when timed again" if row["behind"] is None else f"{row['us']:.2f} us, {row['behind']:.2%} behind"
                print(f"  seed {row['seed']}: {behind}, {row['winner']}")
            print(f"  worst {found['worst']}, {len(found['winners'])} winners; claimed <= {CLAIMED:.0%} behind: {found['holds']}", flush=True)
            save()
    finally:
        runner.close()
    print(save())


if __name__ == "__main__":
    main()
