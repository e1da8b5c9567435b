"""What random problems lose that nobody tuned: the config that a call gets, against the winner of a search of each, in the same minutes.

Half of the problems are plain epilogues. The others have [M, N] inputs, operands of 8 bits or of tf32, batches, and programs that no database knows.
Run: python -m bench.regret [--held-out] [--count N] [--earlier FILE] [--seconds S] [--budget S] [--commit HASH] [--out FOLDER]
--held-out: with what other GPUs measured alone. --earlier: a report of the same GPU and versions, whose rows stay and whose problems are passed over.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench import borrow, record
from bench.cases import extent
from bench.random_programs import write_program
from bench.record import Report, Row
from epigen import gpus, settings
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
LIMITS = {False: (1.04, 1.15), True: (1.06, 1.20)}
"""Of the geometric mean and of the worst, by whether the GPU's own records are held out."""

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


def shipped(held_out: bool, target: Target) -> list[Record]:
    """The shipped records that a call may look among."""
    return [r for _, r in Database(settings.seed_database_dir(), seeds=()).records() if not (held_out and r.gpu == target.part)]


def measured(problem: Problem, database: Database, runner: Runner, seconds: float, trials: int = 48, comparisons: int = 3) -> dict[str, Any]:
    """One row. ratio: of the untuned config's time to that of the better of both: what a search of so many seconds did not find is nothing that was lost."""
    kind, task = problem
    config, how, why = borrow.chosen(task, database)
    row: dict[str, Any] = {"kind": kind, "problem": report.name(task), "how": how, "why": why, "untuned": str(config)}
    try:
        winner = tune_one(task, None, trials=trials, budget_s=seconds, runner=runner).result.winner
    except EpigenError as error:
        return row | {"failed": str(error)}
    row |= {"tuned": str(winner)}
    if winner == config:
        return row | {"ratio": 1.0}
    times = borrow.times(winner, config, task, runner, comparisons)
    return row | times | ({"ratio": max(1.0, times["ratio"])} if "ratio" in times else {})


def summary(rows: Iterable[Row], held_out: bool) -> dict[str, Any]:
    """The geometric mean and the worst of all, and each kind's. holds: whether these are within the limits, and nothing failed."""
    rows = list(rows)
    of_kind: dict[str, list[float]] = {}
    for row in rows:
        if "ratio" in row:
            of_kind.setdefault(row["kind"], []).append(row["ratio"])
    ratios = list(itertools.chain.from_iterable(of_kind.values()))
    failed = sum("failed" in row for row in rows)
    mean, worst = (round(geometric_mean(ratios), 4), round(max(ratios), 4)) if ratios else (None, None)
    within = mean is not None and worst is not None and mean <= LIMITS[held_out][0] and worst <= LIMITS[held_out][1]
    return {
        "held_out": held_out, "limits": LIMITS[held_out], "count": len(ratios), "failed": failed, "mean": mean, "worst": worst,
        "by_kind": {kind: {"count": len(some), "mean": round(geometric_mean(some), 4), "worst": round(max(some), 4)} for kind, some in sorted(of_kind.items())},
        "holds": within and not failed,
    }  # fmt: skip


def left(wanted: Iterable[Problem], rows: Iterable[Row]) -> Iterator[Problem]:
    """Those that no row is of."""
    known = {row["problem"] for row in rows}
    return (problem for problem in wanted if report.name(problem.task) not in known)


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--count", type=int, default=PROBLEMS)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds after which no further problem is begun")
    options = parser.parse_args()
    target, start = record.gpu_at_hand(machine), time.monotonic()
    environment = record.environment(options.commit)
    rows: list[dict[str, Any]] = record.earlier(options.earlier, environment) if options.earlier else []
    name = f"regret_{gpus.of_target(target).short.lower()}{'_held_out' * options.held_out}"
    save = functools.partial(record.write, name, folder=options.out)
    with contextlib.closing(GpuRunner()) as runner, tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder), seeds=())
        database.add(*shipped(options.held_out, target))
        for problem in left(problems(target, options.count), rows):
            if time.monotonic() - start > options.budget:
                break
            rows.append(measured(problem, database, runner, options.seconds))
            print({k: v for k, v in rows[-1].items() if k != "why"}, flush=True)
            save(Report("bench.regret", environment, rows, summary(rows, options.held_out)))
    print(summary(rows, options.held_out))


if __name__ == "__main__":
    main()
