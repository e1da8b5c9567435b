"""Tunes problems and remembers the winners: composes space, model, runner, search and database."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.spec import KernelConfig, digest
from epigen.db.database import Database
from epigen.db.problem import Problem
from epigen.db.records import Record, short
from epigen.perf import limits, model
from epigen.runtime.loader import triton_version
from epigen.runtime.rendering import renderer
from epigen.shapes import extents
from epigen.tuning.runner import MEASURED, GpuRunner, Runner
from epigen.tuning.search import Progress, Result, assist, search
from epigen.tuning.storage import Storage
from epigen.tuning.task import Task

# Times the model's best, of which a near problem's config is not tried first. One of a short epilogue, 1.9 times as slow by the model, spilled 2,080 bytes a
# thread of a long one: ptxas took 8 s, a search's whole budget (Triton 3.6.0, 2026-11-28).
_HOPELESS = 1.5


@dataclass(frozen=True, slots=True)
class Tuned:
    """One tuned problem. record: what went into the database. error: why there is no result, where no config works."""

    problem: Problem
    result: Result | None
    record: Record | None
    error: str = ""

    def __str__(self) -> str:
        p, result = self.problem, self.result
        apart = f"{' invariant' * bool(p.invariant)}{f' groups along {p.groups}' * bool(p.groups)}{f' sparse {p.sparse}' * bool(p.sparse)}"
        name = f"{short(p.program)} {extents(p.shape)} {p.a} {p.layout}{apart}"
        if result is None:
            return f"{name}: {self.error}"
        mm_us = result.baseline.mm_us
        ratio = f", {mm_us / result.outcome.median_us:.2f}x the speed of the vendor's product alone" if mm_us else ""
        return f"{name}: {result.outcome.median_us:.2f} us{ratio} [{result.winner}]{' (interrupted)' * (not result.complete)}"


def study_name(task: Task, kind: str = MEASURED) -> str:
    """A name for the trials of a task: under one name, an outcome counts for every tuner.

    Its digest therefore covers the kernels' text, which follows from program, dtypes, templates and epigen's version, and what else
    decides an outcome: shape, layout, precision, invariance, GPU, versions, and whether it was measured or read from a table (kind).
    """
    problem = replace(task.problem, program="")
    texts = [renderer().render(task.spec, config).digest for config in Space(task.spec, task.shape, task.target).samples()]
    versions = (epigen.__version__, triton_version(), importlib.metadata.version("torch"))
    part = re.sub("[^a-z0-9]+", "_", task.target.part.lower()).strip("_")
    return f"{part} {extents(task.shape)} {task.a} {task.layout} {digest([repr(problem), repr(task.target), *versions, *texts, kind])}"


def tune_one(
    task: Task, database: Database | None, *, trials: int = 48, budget_s: float = math.inf, seed: int = 0, storage: str | Storage | None = None,
    runner: Runner | None = None, report: Callable[[Progress], None] = lambda _: None, stop: threading.Event | None = None,
) -> Tuned:  # fmt: skip
    """Tune one problem, and add the winner to the database.

    runner: what measures, by default workers of the task's GPU, for this task alone. storage, stop: as for `search`. Raises TuneError
    where no config works, DatabaseError where the winner could not be added, before anything is measured.
    """
    if database is not None:
        database.demand_writable(task.problem.gpu, task.problem.capability)
    measuring = runner or GpuRunner()
    measuring.begin(task)
    try:
        problem, (space, prior) = task.problem, _space(task, measuring)
        # a sparse operand's dense values are multiplied as others are
        kinds = dict.fromkeys((problem, replace(problem, sparse="")))
        near = [found for kind in kinds for found in database.nearest(kind, triton_version(), 3, space.legal)] if database else []
        longest = _HOPELESS * min(prior.values(), default=0.0)
        hopeful = [found for found in near if found.how in ("exact", "triton") or prior.get(found.config, 0.0) <= longest]
        ruled = rule.choose(replace(task.spec, signature=replace(task.spec.signature, sparse="")), space.shape, space.target)
        # the vendor's at first: whatever the time is, there is a right answer
        vendors = [rule.by_vendor(space.spec, space.shape, space.target, "")] if "library" in space.schedules else []
        result = search(
            space, measuring, first=[f.config for f in (*vendors, *hopeful, ruled)], prior=prior, trials=trials, budget_s=budget_s, seed=seed,
            storage=storage, name=study_name(task, measuring.kind), report=report, stop=stop,
        )  # fmt: skip
    finally:
        if runner is None:
            measuring.close()
    record = None
    if database is not None:
        record = _record(problem, result)
        # a complete search has timed what was known anew: its time of another day, on a cooler GPU, says less
        database.add(record, replacing=result.complete)
    return Tuned(problem, result, record)


def assist_one(task: Task, runner: Runner, *, trials: int = 48, seed: int = 0, storage: str | Storage, stop: threading.Event | None = None) -> int:
    """Measure configs of a problem whose search another runner leads. Returns how many."""
    runner.begin(task)
    space, prior = _space(task, runner)
    return assist(space, runner, prior=prior, trials=trials, seed=seed, storage=storage, name=study_name(task, runner.kind), stop=stop)


def _space(task: Task, runner: Runner) -> tuple[Space, dict[KernelConfig, float]]:
    """What is searched, and the model's time in microseconds of each config that the runner can measure."""
    space = Space(task.spec, task.shape, task.target)
    configs = [c for c in space.every() if runner.knows(c)]
    hopeful = [c for c in configs if not limits.refusal(space.spec, c, task.shape, task.target)] or configs
    estimates = model.estimates(space.spec, hopeful, task.shape, gpus.of_target(task.target))
    return space, {config: e.us for config, e in zip(hopeful, estimates, strict=True)}


def _record(problem: Problem, result: Result) -> Record:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Record.make(
        problem,
        result.winner,
        median_us=result.outcome.median_us,
        spread_us=result.outcome.spread_us,
        baseline_us=result.baseline.mm_us or None,
        unfused_us=result.baseline.unfused_us or None,
        trials=dict(result.counts),
        date=now,
        triton=triton_version(),
        torch=importlib.metadata.version("torch"),
        epigen=epigen.__version__,
    )
