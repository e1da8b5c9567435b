"""Tunes problems and remembers the winners: composes space, model, runner, search and database."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import epigen
from epigen import dtypes
from epigen.codegen.lower import lower
from epigen.codegen.spec import KernelSpec, Signature, index_bits, k_multiple
from epigen.errors import EpigenError, TuneError
from epigen.ir import graph as g
from epigen.ir.graph import Graph
from epigen.runtime.loader import triton_version
from epigen.tuning import gpus, model, rule
from epigen.tuning.choose import capability
from epigen.tuning.database import Database
from epigen.tuning.problem import Problem, problem_of
from epigen.tuning.records import Record, extents, short
from epigen.tuning.runner import GpuRunner, Runner
from epigen.tuning.search import Progress, Result, search
from epigen.tuning.space import Space
from epigen.tuning.task import Task

Storage = str | Callable[[Task], str | None] | None
"""Where a study is kept: one place for all problems, or a place for each."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """One tuned problem. record: what went into the database. error: why there is no result, where no config works."""

    problem: Problem
    result: Result | None
    record: Record | None
    error: str = ""

    def __str__(self) -> str:
        p, found = self.problem, self.result
        name = f"{short(p.program)} {extents(p.shape)} {p.a} {p.layout}"
        if found is None:
            return f"{name}: {self.error}"
        mm_us = found.baseline.mm_us
        ratio = f", {mm_us / found.outcome.median_us:.2f}x the speed of the vendor's product alone" if mm_us else ""
        return f"{name}: {found.outcome.median_us:.2f} us{ratio} [{found.winner}]{' (interrupted)' * (not found.complete)}"


def spec_of(graph: Graph, task: Task) -> KernelSpec:
    """The kernel that a task's calls run: contiguous operands, scalars by value."""
    a, b, inputs = (dtypes.BY_NAME[n] for n in (task.a, task.b, task.inputs))
    named = tuple((node.name, dtypes.UINT8 if node.op == g.BITS else inputs if node.indices else None) for node in graph.inputs())
    return lower(graph, Signature(a, b, named, task.precision, k_multiple(task.shape[2]), index_bits(task.shape)))


def tune_one(
    task: Task, database: Database | None, *, trials: int = 48, budget_s: float = math.inf, seed: int = 0, storage: str | None = None,
    runner: Runner | None = None, report: Callable[[Progress], None] = lambda _: None,
) -> Tuned:  # fmt: skip
    """Tune one problem, and add the winner to the database.

    runner: what measures, by default workers of the task's GPU, for this task alone. Raises TuneError where no config works.
    """
    graph = task.graph()
    spec = spec_of(graph, task)
    target, shape = task.target, task.shape
    problem = problem_of(graph, spec, shape, task.layout, target.part, capability(target))
    space = Space(spec, shape, target, task.layout)
    legal = list(space.every())
    hopeful = [c for c in legal if not model.refusal(spec, c, shape, target, task.layout)] or legal
    ranked = model.rank(spec, hopeful, shape, _gpu(task), task.layout)
    near = database.nearest(problem, triton_version(), 3, space.legal) if database else ()
    first = [*(f.config for f in near), rule.choose(spec, shape, target, layout=task.layout).config, rule.library(spec, "").config]
    if storage is not None and storage.endswith(".journal"):
        storage = None  # Optuna's journal is not wired in yet
    name = f"{problem.spec} {'x'.join(map(str, shape))} {task.a} {task.layout} {target.part} {triton_version()}"
    measuring = runner or GpuRunner(task)
    try:
        result = search(space, measuring, first=first, ranked=ranked, trials=trials, budget_s=budget_s, seed=seed, storage=storage, name=name, report=report)
    finally:
        if runner is None:
            measuring.close()
    record = None
    if database is not None and result.baseline.mm_us:
        record = _record(problem, result)
        database.add(record)
    return Tuned(problem, result, record)


def tune_all(
    tasks: Sequence[Task], database: Database | None, *, devices: Sequence[int] = (0,), trials: int = 48, budget_s: float = math.inf, seed: int = 0,
    storage: Storage = None, report: Callable[[int, Progress], None] = lambda _i, _p: None, done: Callable[[int, Tuned], None] = lambda _i, _t: None,
) -> list[Tuned]:  # fmt: skip
    """Tune several problems, in their order, and add the winners to the database.

    report, done: told of the problem with an index, under one lock. A problem in which no config works is told of in its `error`. Ctrl-C
    ends it all with what was found: a search under way is marked as not complete, and what has found nothing yet is left out.
    """
    found: list[Tuned] = []
    runner: GpuRunner | None = None
    try:
        for index, task in enumerate(tasks):
            here = replace(task, device=devices[0])
            if runner is None:
                runner = GpuRunner(here)
            else:
                runner.renew(here)
            where = storage(task) if callable(storage) else storage
            try:
                tuned = tune_one(here, database, trials=trials, budget_s=budget_s, seed=seed, storage=where, runner=runner, report=partial(report, index))
            except TuneError as error:
                graph = task.graph()
                problem = problem_of(graph, spec_of(graph, task), task.shape, task.layout, task.target.part, capability(task.target))
                tuned = Tuned(problem, None, None, str(error))
            found.append(tuned)
            done(index, tuned)
            if tuned.result is not None and not tuned.result.complete:
                break
    except KeyboardInterrupt:
        pass
    finally:
        if runner is not None:
            runner.close()
    return found


def _gpu(task: Task) -> gpus.Gpu:
    try:
        return gpus.by_name(task.target.part)
    except EpigenError:
        return gpus.of_target(task.target)


def _record(problem: Problem, result: Result) -> Record:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Record.make(
        problem,
        result.winner,
        median_us=result.outcome.median_us,
        spread_us=result.outcome.spread_us,
        baseline_us=result.baseline.mm_us,
        unfused_us=result.baseline.unfused_us,
        trials=dict(result.counts),
        date=now,
        triton=triton_version(),
        torch=importlib.metadata.version("torch"),
        epigen=epigen.__version__,
    )
