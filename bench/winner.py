"""Whether a search finds what measuring everything finds: a live search of each recorded sweep's problem, against the sweep's best configs.

Run: python -m bench.winner [--commit HASH] [--out FOLDER]
Claim: on every problem the winner of 48 trials is within 2 % of the best of the whole space. The winner and the sweep's five best configs
are timed at the end, interleaved, since a config's time moves by more than that between one day and another.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench import record
from bench.record import Report
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.tuning import report, table
from epigen.tuning.runner import GpuRunner, Runner
from epigen.tuning.table import Table
from epigen.tuning.tune import tune_one

CLAIMED = 0.02
BEST = 5
"""The sweep's own order is that of single measurements, so the best of it is among so many."""


def held(sweep: Table, runner: Runner, comparisons: int) -> dict[str, Any]:
    """behind: how much longer the live winner takes than the fastest of the sweep's best, by the medians over the comparisons."""
    found = tune_one(sweep.task, None, runner=runner).result
    assert found is not None  # a problem in which no config works is an error
    best = sorted((c for c, o in sweep.rows.items() if o.kind == "ok"), key=lambda c: sweep.rows[c].median_us)[:BEST]
    configs = list(dict.fromkeys([found.winner, *best]))
    runner.begin(sweep.task)
    runner.prepare(configs)
    right = [c for c in configs if runner.measure(c, 0.0).kind == "ok"]
    compared = [runner.compare(right) for _ in range(comparisons)]
    middle = {c: statistics.median(t.outcomes[i].median_us for t in compared) for i, c in enumerate(right)}
    fastest = min((c for c in best if c in middle), key=middle.__getitem__)
    return {
        "problem": report.name(sweep.task),
        "configs": len(sweep.rows),
        "trials": dict(found.counts),
        "seconds": round(found.seconds, 2),
        "winner": str(found.winner),
        "winner_us": round(middle[found.winner], 3),
        "best": str(fastest),
        "best_us": round(middle[fastest], 3),
        "mm_us": round(statistics.median(t.baseline.mm_us for t in compared), 3),
        "behind": round(middle[found.winner] / middle[fastest] - 1, 5),
    }


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=5)
    record.add_options(parser)
    options = parser.parse_args()
    record.gpu_at_hand(machine)
    environment = record.environment(options.commit)
    rows = []
    runner = GpuRunner()
    try:
        for path in sorted(record.DATA.glob("sweep_*.json")):
            rows.append(row := held(table.read(path), runner, options.comparisons))
            print(
                f"{row['problem']}: {row['winner_us']:.2f} us, best of {row['configs']} {row['best_us']:.2f} us, {row['behind']:+.2%}; "
                f"{row['seconds']:.1f} s, {row['winner']}",
                flush=True,
            )
    finally:
        runner.close()
    worst = max(row["behind"] for row in rows)
    print(f"worst {worst:.2%}; claimed <= {CLAIMED:.0%}: {worst <= CLAIMED}")
    report = Report("bench.winner", environment, rows, {"claimed": CLAIMED, "worst": worst, "holds": worst <= CLAIMED})
    print(record.write("winner", report, options.out))


if __name__ == "__main__":
    main()
