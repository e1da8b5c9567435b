"""Ping-pong or cooperative: which way to share a long product among warpgroups is fast on every GPU at hand.

Run: python -m bench.ways [--least US] [--rivals N] [--budget SECONDS] [--settle PATH] [--commit HASH] [--out FOLDER]
Between two GPUs of one kind the time of `warp_specialized`'s ping-pong, against the product's, moves by several percent, that of cooperative by
little. So what one GPU's tuner decided is held on others against the nearest problem's configs in the other way. What earlier runs saw stays in
the report. --settle: needs no GPU; of each problem the config that is the faster in the mean over all GPUs goes into this database.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import datetime
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import record
from bench.borrow import of_this_version, task_of
from bench.record import Report
from epigen import settings
from epigen.choose.space import Space
from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.db.lookup import Index
from epigen.db.records import Record, problem_key
from epigen.errors import EpigenError
from epigen.gpus import Target
from epigen.perf import limits
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.loader import triton_version
from epigen.tuning import sampling
from epigen.tuning.runner import GpuRunner, Runner, compile_workers_for

SCHEDULE = "warp_specialized"
AHEAD = 1.03
"""A rival replaces a record's config from here on. The GPU that tuned the problem saw it behind, which is not in the mean of the others: so it has
to lead by more than those differ on average."""


Rows = Mapping[str, Mapping[str, Any]]
"""By problem: "recorded", the record's config; "configs", each by its name; "seen", what each GPU measured."""


@dataclass(frozen=True, slots=True)
class Contest:
    """A record, and configs of near problems that share the work in the other way."""

    record: Record
    rivals: tuple[KernelConfig, ...]

    @property
    def name(self) -> str:
        return str(self.record)

    @property
    def configs(self) -> tuple[KernelConfig, ...]:
        return self.record.kernel_config, *self.rivals


def contests(records: Sequence[Record], target: Target, least_us: float, rivals: int, known: Rows) -> list[Contest]:
    """Those of the long problems, the shorter ones first: so a run that is cut short has seen the most. What other GPUs measured takes part."""
    index, found = Index([records]), []
    for one in sorted(records, key=lambda r: r.median_us):
        task = task_of(one, target)
        if one.median_us < least_us or one.schedule != SCHEDULE or problem_key(task.problem) != one.problem_key:
            continue
        spec, other = task.spec, 1 - one.kernel_config["pingpong"]
        space = Space(spec, task.shape, target)

        def runs(config: KernelConfig, other: int = other) -> bool:
            return config.schedule == SCHEDULE and config["pingpong"] == other

        fitting = (limits.fitted(spec, near.config, task.shape, target) for near in index.near(one.problem, triton_version(), runs))
        legal = dict.fromkeys(c for c in fitting if c is not None and space.legal(c))
        row = known.get(str(one), {"configs": {}})
        every = dict.fromkeys([*itertools.islice(legal, rivals), *(config_of(row, name) for name in row["configs"])])
        if others := tuple(c for c in every if c != one.kernel_config):
            found.append(Contest(one, others))
    return found


def timed(contest: Contest, runner: Runner, target: Target, index: int = 0) -> dict[str, Any]:
    """All configs of a contest, and the vendor's product, interleaved on one GPU. "us" and "spread_us" are by config, of those that were right."""
    task = replace(task_of(contest.record, target), device=index)
    runner.begin(task)
    runner.prepare(contest.configs)
    outcomes = {c: runner.measure(c, 0.0) for c in contest.configs}
    right = [c for c in contest.configs if outcomes[c].kind in ("ok", "slower")]
    compared = runner.compare(right)
    found = dict(zip(map(str, right), compared.outcomes, strict=True))
    return {
        "mm_us": round(compared.baseline.mm_us, 3),
        "unfused_us": round(compared.baseline.unfused_us, 3),
        "us": {name: round(o.median_us, 3) for name, o in found.items()},
        "spread_us": {name: round(o.spread_us, 3) for name, o in found.items()},
        "failed": {str(c): f"{o.kind}: {o.detail}" for c, o in outcomes.items() if c not in right},
    }


def gather(
    todo: Sequence[Contest], gpus: Sequence[int], measure: Callable[[Contest, int], dict[str, Any]], known: Rows, until: float,
    save: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:  # fmt: skip
    """Every GPU measures all contests, begun before `until`. known: what each problem's rows hold already. Returns, and now and then saves, all of it."""
    found: dict[str, Any] = copy.deepcopy(dict(known))
    lock = threading.Lock()

    def work(gpu: int) -> None:
        for contest in todo:
            if time.monotonic() > until:
                return
            try:
                seen = measure(contest, gpu)
            except EpigenError as error:
                print(f"{contest.name}: {error}", flush=True)
                continue
            with lock:
                row = found.setdefault(contest.name, {"problem": contest.name, "configs": {}, "seen": []})
                row["recorded"] = str(contest.record.kernel_config)
                row["configs"] |= {str(c): {"schedule": c.schedule, **dict(c.values)} for c in contest.configs}
                row["seen"].append(seen)
                print(f"{contest.name}: {_line(row['recorded'], seen)}", flush=True)
                save(found)

    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(work, gpus))
    return found


def _line(own: str, seen: Mapping[str, Any]) -> str:
    return ", ".join(f"{'own' if name == own else 'rival'} {seen['mm_us'] / us:.3f}" for name, us in seen["us"].items())


def by_problem(report: Report) -> Rows:
    return {row["problem"]: row for row in report.rows}


def earlier(path: Path, environment: Mapping[str, Any]) -> tuple[Rows, list[dict[str, Any]]]:
    """What runs on GPUs of this kind with these versions left, and the runs; nothing of others."""
    if not path.exists():
        return {}, []
    found = record.read(path)
    similar = all(found.environment.get(k) == environment.get(k) for k in ("gpu", "torch", "triton"))
    return (by_problem(found), found.summary["runs"]) if similar else ({}, [])


# -- what follows from it


def config_of(row: Mapping[str, Any], name: str) -> KernelConfig:
    return schedules.from_mapping(row["configs"][name])


def times(row: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of each config that was right on every GPU, in the geometric mean over these."""
    every = {name: [seen["us"][name] for seen in row["seen"] if name in seen["us"]] for name in row["configs"]}
    return {name: statistics.geometric_mean(some) for name, some in every.items() if len(some) == len(row["seen"])}


def standing(row: Mapping[str, Any], own: Record) -> dict[str, float]:
    """How many times as fast as the product each config is that was right on every GPU, in the mean over these; the record's own over the GPU that tuned it as well."""
    ratios: dict[str, list[float]] = {}
    for seen in row["seen"]:
        for name, us in seen["us"].items():
            ratios.setdefault(name, []).append(seen["mm_us"] / us)
    found = {name: some for name, some in ratios.items() if len(some) == len(row["seen"])}
    if row["recorded"] in found:
        found[row["recorded"]] = [*found[row["recorded"]], own.baseline_us / own.median_us]
    return {name: statistics.geometric_mean(some) for name, some in found.items()}


def settled(row: Mapping[str, Any], own: Record) -> Record | None:
    """The record that replaces `own`, if a rival is ahead. Its times are those of the GPU on which that is the least of an advantage."""
    means, recorded = standing(row, own), str(own.kernel_config)
    best = max(means, key=means.__getitem__, default=recorded)
    if recorded not in means or means[best] < AHEAD * means[recorded]:
        return None
    seen = min(row["seen"], key=lambda s: s["mm_us"] / s["us"][best])
    return replace(
        own,
        config=dict(config_of(row, best).values),
        median_us=seen["us"][best],
        spread_us=seen["spread_us"][best],
        baseline_us=seen["mm_us"],
        unfused_us=seen["unfused_us"],
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def settle(path: Path, rows: Rows, records: Iterable[Record]) -> list[str]:
    """Replaces records of the database at `path`. Returns a line for each. Those that have changed since they were measured stay."""
    database, changes = Database(path, seeds=()), []
    for own in records:
        row = rows.get(str(own))
        if row is None or row["recorded"] != str(own.kernel_config) or not (new := settled(row, own)):
            continue
        means = standing(row, own)
        changes.append(f"{own}: {means[str(own.kernel_config)]:.3f} -> {means[str(new.kernel_config)]:.3f}, {new.kernel_config}")
        database.add(new, replacing=True)
    return changes


def summary(rows: Rows) -> dict[str, Any]:
    """How far each way's speed against the product moves between two GPUs of this result, over all configs that ran on several: the mean and the most."""
    moved: dict[str, list[float]] = {"ping-pong": [], "cooperative": []}
    for row in rows.values():
        names = {name for seen in row["seen"] for name in seen["us"]}
        for name in names:
            ratios = [seen["mm_us"] / seen["us"][name] for seen in row["seen"] if name in seen["us"]]
            if len(ratios) > 1:
                moved["ping-pong" if config_of(row, name)["pingpong"] else "cooperative"].append(max(ratios) / min(ratios) - 1)
    return {way: {"count": len(some), "mean": round(statistics.fmean(some), 5), "most": round(max(some), 5)} for way, some in moved.items() if some}


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=float, default=sampling.LONG_US, help="microseconds from which on a product is long")
    parser.add_argument("--rivals", type=int, default=2, help="to each record")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which no further problem is begun")
    parser.add_argument("--settle", type=Path, metavar="PATH", help="measure nothing, and write what the result says into this database")
    record.add_options(parser, record.DATA)
    options = parser.parse_args()
    start = time.monotonic()
    every = [r for _, r in Database(options.settle or settings.seed_database_dir(), seeds=()).records()]
    if options.settle:
        print(*settle(options.settle, by_problem(record.read(options.out / "ways.json")), every), sep="\n")
        return
    target, gpus, environment = record.gpu_at_hand(machine), machine.indices(), record.environment(options.commit)
    known, runs = earlier(options.out / "ways.json", environment)
    todo = contests(of_this_version([r for r in every if r.gpu == target.part], triton_version()), target, options.least, options.rivals, known)
    runs = [*runs, {"gpus": len(gpus), "date": environment["date"]}]
    print(f"{len(todo)} problems on {len(gpus)} GPUs", flush=True)
    runners = {gpu: GpuRunner(compile_workers=compile_workers_for(len(gpus))) for gpu in gpus}

    def save(rows: dict[str, Any]) -> None:
        record.write("ways", Report("bench.ways", environment, list(rows.values()), {"runs": runs, "moved": summary(rows)}), options.out)

    try:
        rows = gather(todo, gpus, lambda c, gpu: timed(c, runners[gpu], target, gpu), known, start + options.budget, save)
    finally:
        for runner in runners.values():
            runner.close()
    save(rows)
    print(f"{len(rows)} problems in {time.monotonic() - start:.0f} s; moved between GPUs: {summary(rows)}")


if __name__ == "__main__":
    main()
