"""What random problems lose that nobody tuned: the configs that a call gets, against the winner of a search of each, in the same minutes.

Half of the problems are plain epilogues. The others have [M, N] inputs, operands of 8 bits or of tf32, batches, and programs that no database knows.
A call's config is looked up twice: among all shipped records, and with this GPU's own held out, as on a GPU that nobody has tuned for.
Run: python -m bench.regret [--count N] [--first N] [--earlier FILE] [--seconds S] [--budget S] [--commit HASH] [--out FOLDER]
--first: where to begin, as behind the problems whose trials the model has seen. --earlier: a report of the same GPU and versions, whose rows stay and
whose problems are passed over.
Claim: LIMITS of the geometric mean and of the worst.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench import borrow, record
from bench.cases import extent
from bench.random_programs import write_program
from bench.record import Report, Row
from epigen import settings
from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.db.records import Record
from epigen.dtypes import BF16, FAST_ACCUM, FP8E4M3, FP16, FP32, INT8, DType
from epigen.errors import EpigenError
from epigen.gpus import Target
from epigen.ir.program import graph_of
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape, products
from epigen.tuning import report
from epigen.tuning.runner import GpuRunner, Runner
from epigen.tuning.task import Task
from epigen.tuning.tune import tune_one

PROBLEMS = 120
SHIPPED, HELD_OUT = "shipped", "held_out"
"""What a config is looked up among: all shipped records, or those of other GPUs alone."""

LIMITS = {SHIPPED: (1.04, 1.15), HELD_OUT: (1.06, 1.20)}
"""Of the geometric mean and of the worst."""

PLAIN = "plain"


class Program(NamedTuple):
    """inputs: the dtype of those that have indices."""

    text: str
    a: DType
    inputs: DType
    precision: str = "ieee"
    batch: int = 0


_PLAIN = ("relu(mm + bias)", "z = mm + bias; relu(z), bitmask(z > 0)", "gelu_tanh(mm + bias)", "dz = drelu(mm, mask); dz, bgrad(dz)")
_TILES = (
    "mm + residual",
    "silu(mm) * gate[m,n]",
    "dz = dgelu_tanh(mm, z[m,n]); dz, bgrad(dz)",
    "z = mm + bias; gelu_tanh(z), z",
    "silu(mm) * gate[m,n] + residual",
)
_SCALED = ("cast(mm * s[m] * t[n] + bias, bf16)", "cast(gelu_tanh(mm * s[m] * t[n] + bias), bf16)")


def _plain(rng: random.Random) -> Program:
    text, a = rng.choice(_PLAIN), rng.choice((FP16, BF16))
    return Program(text, a, a)


def _tiles(rng: random.Random) -> Program:
    return Program(rng.choice(_TILES), BF16, BF16)


def _fp8(rng: random.Random) -> Program:
    return Program(rng.choice(_SCALED), FP8E4M3, FP32, rng.choice(("ieee", FAST_ACCUM)))


def _int8(rng: random.Random) -> Program:
    return Program(rng.choice(_SCALED), INT8, FP32)


def _tf32(rng: random.Random) -> Program:
    return Program(rng.choice(_PLAIN[:3]), FP32, FP32, "tf32")


def _batched(rng: random.Random) -> Program:
    return Program(rng.choice(("mm * s", "gelu_tanh(mm + bias)", "mm + residual")), BF16, BF16, batch=2 ** rng.randint(1, 6))


def _unknown(rng: random.Random) -> Program:
    return Program(write_program(rng, most=8, tame=True, casts=(FP32, FP16, BF16)), BF16, BF16)


_OTHERS: tuple[tuple[str, Callable[[random.Random], Program]], ...] = (
    ("tiles", _tiles), ("fp8", _fp8), ("unknown", _unknown), ("tiles", _tiles), ("int8", _int8), ("batched", _batched), ("tf32", _tf32),
)  # fmt: skip


class Problem(NamedTuple):
    kind: str
    task: Task


def problems(target: Target, count: int = PROBLEMS) -> list[Problem]:
    """Plain ones and others in turn, the same on every GPU of a kind. What the language or the schedules refuse is drawn anew."""
    rng, kinds = random.Random(2026), itertools.cycle(_OTHERS)
    return [_drawn(rng, *((PLAIN, _plain) if number % 2 == 0 else next(kinds)), target) for number in range(count)]


def _drawn(rng: random.Random, kind: str, program: Callable[[random.Random], Program], target: Target) -> Problem:
    while True:
        text, a, inputs, precision, batch = program(rng)
        m, n, k = (extent(rng, least, most) for least, most in ((16, 32768), (64, 16384), (64, 16384)))
        shape: Shape = (batch, m, n, k) if batch else (m, n, k)
        count = products(shape)
        if not (1 << 24 <= count * m * n * k <= 400_000_000_000 and count * (m * n + n * k + m * k) <= 400_000_000):
            continue
        layout = "nt" if a.bytes == 1 or rng.random() < 0.75 else "nn"
        try:
            task = Task(graph_of(text), shape, a, a, (inputs,), layout, precision, target)
        except (EpigenError, ValueError):
            continue
        if not task.spec.bare_product:
            return Problem(kind, task)


def shipped(target: Target) -> dict[str, list[Record]]:
    """The shipped records, by what a config is looked up among."""
    records = [r for _, r in Database(settings.seed_database_dir(), seeds=()).records()]
    return {SHIPPED: records, HELD_OUT: [r for r in records if r.gpu != target.part]}


def measured(
    problem: Problem, databases: Mapping[str, Database], runner: Runner, seconds: float, trials: int = 48, comparisons: int = 3, storage: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """One row. ratios: of each untuned config's time to the winner's, and 1 where it is the faster one: what a search of so many seconds did not find is nothing that was lost.

    The search begins with what the first of the databases knows, and adds nothing to it. storage: where its trials go.
    """
    kind, task = problem
    row: dict[str, Any] = {"kind": kind, "problem": report.name(task), "untuned": {}}
    configs: dict[str, KernelConfig] = {}
    for among, database in databases.items():
        config, how, why = borrow.chosen(task, database)
        configs[among] = config
        row["untuned"][among] = {"how": how, "why": why, "config": str(config)}
    known = next(iter(databases.values()))
    with tempfile.TemporaryDirectory() as folder:
        own = Database(Path(folder), seeds=known.roots)
        try:
            winner = tune_one(task, own, trials=trials, budget_s=seconds, runner=runner, storage=storage).result.winner
        except EpigenError as error:
            return row | {"failed": str(error)}
    return row | {"tuned": str(winner)} | _lost(borrow.times({"tuned": winner} | configs, task, runner, comparisons))


def _lost(times: dict[str, Any]) -> dict[str, Any]:
    if "failed" in times:
        return times
    return times | {"ratios": {among: max(1.0, ratio) for among, ratio in times["ratios"].items()}}


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """The geometric mean and the worst of all, and each kind's, by what was looked up among. holds: whether all are within the limits, and nothing failed."""
    rows = list(rows)
    failed = sum("failed" in row for row in rows)
    found = {among: _among([(row["kind"], row["ratios"][among]) for row in rows if "ratios" in row], *limits) for among, limits in LIMITS.items()}
    return {"failed": failed, **found, "holds": not failed and all(part["within"] for part in found.values())}


def _among(ratios: list[tuple[str, float]], mean_limit: float, worst_limit: float) -> dict[str, Any]:
    if not ratios:
        return {"count": 0, "within": False}
    of_kind: dict[str, list[float]] = {}
    for kind, ratio in ratios:
        of_kind.setdefault(kind, []).append(ratio)
    every = [ratio for _, ratio in ratios]
    mean, worst = geometric_mean(every), max(every)
    return {
        "count": len(every), "mean": round(mean, 4), "worst": round(worst, 4), "limits": [mean_limit, worst_limit],
        "by_kind": {kind: {"count": len(some), "mean": round(geometric_mean(some), 4), "worst": round(max(some), 4)} for kind, some in sorted(of_kind.items())},
        "within": mean <= mean_limit and worst <= worst_limit,
    }  # fmt: skip


def left(wanted: Iterable[Problem], rows: Iterable[Row]) -> Iterator[Problem]:
    """Those that no row is of."""
    known = {row["problem"] for row in rows}
    return (problem for problem in wanted if report.name(problem.task) not in known)


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    parser.add_argument("--count", type=int, default=PROBLEMS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds after which no further problem is begun")
    parser.add_argument("--storage", help="where the trials go, as of `epigen tune`")
    options = parser.parse_args()
    target, start = record.gpu_at_hand(machine), time.monotonic()
    environment = record.environment(options.commit)
    rows: list[dict[str, Any]] = record.earlier(options.earlier, environment) if options.earlier else []
    name = record.of_gpu("regret", target)
    save = functools.partial(record.write, name, folder=options.out)
    with contextlib.closing(GpuRunner()) as runner, tempfile.TemporaryDirectory() as folder:
        databases = {among: Database(Path(folder, among), seeds=()) for among in LIMITS}
        for among, records in shipped(target).items():
            databases[among].add(*records)
        for problem in left(problems(target, options.count)[options.first :], rows):
            if time.monotonic() - start > options.budget:
                break
            rows.append(measured(problem, databases, runner, options.seconds, storage=options.storage))
            print({k: rows[-1].get(k) for k in ("problem", "tuned", "ratios", "failed")}, flush=True)
            save(Report("bench.regret", environment, rows, summary(rows)))
    print(summary(rows))


if __name__ == "__main__":
    main()
