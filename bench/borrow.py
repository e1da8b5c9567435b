"""What a problem that was never tuned loses: half of a tuning database answers for the other half.

Run: python -m bench.borrow [--db PATH] [--seed N] [--seeds N] [--limit N] [--budget SECONDS] [--commit HASH] [--out FOLDER]
The shapes are split in two, by each seed otherwise. For each problem of a held-out shape the config is looked up among the records of the
other shapes, as a call would look it up, and timed interleaved with the config that was tuned for it; what several seeds have in common is timed
once. Claim: the geometric mean of the loss is at most 5 %.
"""

from __future__ import annotations

import argparse
import math
import operator
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.record import Report
from epigen import dtypes, settings
from epigen.choose.choose import Chooser
from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.db.lookup import Recorded, version_order
from epigen.db.records import Key, Record, problem_key
from epigen.errors import EpigenError
from epigen.gpus import Target
from epigen.ir.program import graph_of
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.loader import triton_version
from epigen.tuning import report
from epigen.tuning.runner import GpuRunner, Runner
from epigen.tuning.task import Task

CLAIMED = 1.05
RULE, PREFERRED = "rule", "preferred"
"""How a config that nobody measured was found: the plain rule's where the database has nothing near enough; and one that the model prefers."""

Pair = tuple[str, str, str]
"""A problem's name, and its tuned and its borrowed config."""


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out problem. others: the records that may be borrowed from."""

    record: Record
    others: tuple[Record, ...]


def held_out(records: Iterable[Record], seed: int) -> list[Case]:
    """The problems of every second shape, in a random order; no program's record of such a shape may lend."""
    known = sorted(records, key=lambda r: r.key)
    shapes = sorted({r.shape for r in known})
    shuffled = random.Random(seed)
    shuffled.shuffle(shapes)
    held = set(shapes[1::2])
    others = tuple(r for r in known if r.shape not in held)
    cases = [Case(r, others) for r in known if r.shape in held]
    shuffled.shuffle(cases)  # so that a run cut short has seen some of all kinds
    return cases


def of_this_version(records: Iterable[Record], triton: str) -> list[Record]:
    """One record a problem: of the present Triton, else of the newest."""
    best: dict[Key, Record] = {}
    for one in records:
        best[one.problem_key] = max(best.get(one.problem_key, one), one, key=lambda r: (r.triton == triton, version_order(r.triton)))
    return list(best.values())


_DTYPES = {t.name: t for t in dtypes.ALL}


def task_of(one: Record, target: Target) -> Task:
    """The task that the record was tuned by."""
    dense = [kind.partition("[")[0] for kind in one.inputs if "[" in kind]
    a, b, *inputs = (_DTYPES[name] for name in (one.a, one.b, *(dense or [one.a])))
    return Task(graph_of(one.program), one.shape, a, b, tuple(inputs), one.layout, one.precision or "ieee", target)


def borrowed(task: Task, others: Sequence[Record]) -> tuple[KernelConfig, str, str]:
    """What a call gets where only `others` were tuned: config, how it was found, and the sentence that says why."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder), seeds=())
        database.add(*others)
        return chosen(task, database)


def chosen(task: Task, database: Database) -> tuple[KernelConfig, str, str]:
    """What a call gets of a database: config, how it was found, and the sentence that says why."""
    chooser = Chooser(task.graph, database)
    found = chooser(task.spec, task.shape, task.target, "")
    near = bool(chooser.bucket(task.spec, task.shape, task.target).found)
    return found.config, found.how if isinstance(found, Recorded) else PREFERRED if near else RULE, found.why


def measured(case: Case, task: Task, runner: Runner, comparisons: int, timed: dict[Pair, dict[str, Any]]) -> dict[str, Any]:
    """The borrowed config against the tuned one. ratio: of their times, 1 where they are the same; missing where one gave no right answer.

    timed: what each pair took, to which a new one is added.
    """
    tuned = case.record.kernel_config
    config, how, why = borrowed(task, case.others)
    row: dict[str, Any] = {"problem": report.name(task), "how": how, "why": why, "tuned": str(tuned), "borrowed": str(config), "same": config == tuned}
    if config == tuned:
        return row | {"ratio": 1.0}
    pair = (row["problem"], row["tuned"], row["borrowed"])
    if pair not in timed:
        timed[pair] = _pair(times({"tuned": tuned, "borrowed": config}, task, runner, comparisons))
    return row | timed[pair]


def _pair(taken: dict[str, Any]) -> dict[str, Any]:
    if "failed" in taken:
        return taken
    return {k: v for k, v in taken.items() if k != "ratios"} | {"ratio": taken["ratios"]["borrowed"]}


def times(configs: Mapping[str, KernelConfig], task: Task, runner: Runner, comparisons: int) -> dict[str, Any]:
    """Of a row: what each takes, and the ratios of the others to the first one, all medians of the comparisons; or why one of them gave no right answer."""
    distinct = list(dict.fromkeys(configs.values()))
    runner.begin(task)
    runner.prepare(distinct)
    for name, config in configs.items():
        outcome = runner.measure(config, 0.0)
        if outcome.kind != "ok":
            return {"failed": f"{name}: {outcome.kind.replace('_', ' ')}: {outcome.detail}"}
    try:
        compared = [runner.compare(distinct) for _ in range(comparisons)]
    except EpigenError as error:
        return {"failed": str(error)}
    us = {name: [c.outcomes[distinct.index(config)].median_us for c in compared] for name, config in configs.items()}
    first, *others = us
    return {
        **{f"{name}_us": round(statistics.median(taken), 3) for name, taken in us.items()},
        "mm_us": round(statistics.median(c.baseline.mm_us for c in compared), 3),
        "ratios": {name: round(statistics.median(map(operator.truediv, us[name], us[first])), 5) for name in others},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of the ratios: of what was borrowed or preferred to it, of what the rule alone chose, and of each step of the look-up."""
    by_how: dict[str, list[float]] = {}
    for row in rows:
        if "ratio" in row:
            by_how.setdefault(row["how"], []).append(row["ratio"])
    found = [ratio for how, ratios in by_how.items() if how != RULE for ratio in ratios]
    failed = [row for row in rows if "failed" in row]
    mean = _geometric(found)
    return {
        "count": len(found),
        "ratio": mean,
        "worst": max(found, default=None),
        "same": sum(row["same"] for row in rows),
        "rule": {"count": len(by_how.get(RULE, [])), "ratio": _geometric(by_how.get(RULE, []))},
        "by_how": {how: {"count": len(ratios), "ratio": _geometric(ratios)} for how, ratios in sorted(by_how.items())},
        "failed": len(failed),
        "holds": mean is not None and mean <= CLAIMED and not failed,
    }


def _geometric(ratios: Sequence[float]) -> float | None:
    return round(math.exp(statistics.fmean(map(math.log, ratios))), 5) if ratios else None


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"FAILED {row['failed'][:200]}"
    if row["same"]:
        return "the same config"
    return f"{row['borrowed_us']:.2f} us against {row['tuned_us']:.2f} us, ratio {row['ratio']:.3f}; {row['borrowed']} against {row['tuned']}"


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", type=Path, default=settings.seed_database_dir(), help="the database, a folder or a file (default: the shipped one)")
    parser.add_argument("--limit", type=int, default=1000, help="no more than so many problems")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no further problem is begun")
    parser.add_argument("--comparisons", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    record.add_options(parser)
    options = parser.parse_args()
    target = record.gpu_at_hand(machine)
    start = time.monotonic()
    database = Database(options.db, seeds=())
    here = [r for _, r in database.records() if r.gpu == target.part]
    for complaint in database.complaints:
        print(complaint)
    known = of_this_version(here, triton_version())
    seeds = range(options.seed, options.seed + options.seeds)
    cases = [(seed, case) for seed in seeds for case in held_out(known, seed)]
    print(f"{len(here)} records of {target.part} in {options.db}, {len(cases)} problems are held out by {len(seeds)} seeds", flush=True)
    environment = record.environment(options.commit)
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    timed: dict[Pair, dict[str, Any]] = {}
    runner = GpuRunner()

    def save() -> Path:
        about = {"claimed": CLAIMED, "seeds": list(seeds), "held_out": len(cases), "left_out": dict(left_out)}
        return record.write("borrow", Report("bench.borrow", environment, rows, about | summary(rows)), options.out)

    try:
        for seed, case in cases[: options.limit]:
            if time.monotonic() - start > options.budget:
                break
            task = task_of(case.record, target)
            if problem_key(task.problem) != case.record.problem_key:
                left_out["made by an epigen whose problems are named otherwise"] += 1
                continue
            rows.append({"seed": seed} | measured(case, task, runner, options.comparisons, timed))
            print(f"{rows[-1]['problem']}: {rows[-1]['how']}: {_line(rows[-1])}", flush=True)
            save()
    finally:
        runner.close()
    found = summary(rows)
    print(
        f"{found['count']} borrowed, {len(timed)} pairs timed: geometric mean {found['ratio']}, worst {found['worst']}, {found['same']} the same config; "
        f"by rule: {found['rule']}; failed: {found['failed']}; left out: {dict(left_out)}"
    )
    print(f"claimed <= {CLAIMED}: {found['holds']}")
    print(save())


if __name__ == "__main__":
    main()
