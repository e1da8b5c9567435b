"""`epigen tune`: finds the fastest correct config for problems, on the GPUs at hand or over recorded tables.

The table or JSON goes to standard output, progress and talk to standard error. Exit status: 0, 1 (a mistake in what was given, or a
problem in which no config works), 2 (usage, no GPU), 130 (Ctrl-C: what was found is kept and shown).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from epigen import settings
from epigen.commands.live import Live
from epigen.commands.types import (
    Devices,
    Extents,
    Program,
    ProgramCommand,
    Seconds,
    dtype_option,
    invariant_option,
    pass_machine,
    precision_option,
    sparse_option,
    weight_option,
)
from epigen.errors import TuneError
from epigen.runtime.device import Machine
from epigen.shapes import Shape

if TYPE_CHECKING:
    from epigen.db.database import Database
    from epigen.tuning.fleet import Place
    from epigen.tuning.runner import GpuRunner
    from epigen.tuning.search import Progress
    from epigen.tuning.task import Task
    from epigen.tuning.tune import Tuned

LARGEST_SEED = (1 << 31) - 1  # what numpy and Optuna take, with room for the tuners of a study to part
INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C has ended


@dataclass(slots=True)
class _Run:
    """One run of the command. run: does the tuning, and tells of it. remembers: a second run goes on from this one."""

    tasks: list[Task]
    run: Callable[[Callable[[int, Progress], None], Callable[[int, Tuned], None]], object]
    database: Database | None
    remembers: bool
    tuned: dict[int, Tuned] = field(default_factory=dict)
    interrupted: bool = False

    def go(self) -> None:
        live = Live(self.tasks, sys.stderr)

        def done(index: int, tuned: Tuned) -> None:
            self.tuned[index] = tuned
            live.done(index, tuned)

        live.start()
        try:
            self.run(live.report, done)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            live.clear()
        self.interrupted |= len(self.tuned) < len(self.tasks) or any(t.result is not None and not t.result.complete for t in self.tuned.values())


@click.command("tune", cls=ProgramCommand, short_help="Find the fastest configs, on a GPU.")
@click.argument("programs", nargs=-1, type=Program())
@click.option("--shape", "shapes", multiple=True, type=Extents(), help="M, N and K, of a batch after the number of its products; may be given several times")
@click.option(
    "--suite", "suites", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="a TOML file of problems; may be given several times"
)
@dtype_option
@weight_option
@click.option("--layout", default="nt", show_default=True, type=click.Choice(["nn", "nt", "tn", "tt"]), help="how a and b lie: n row-major, t transposed")
@precision_option
@invariant_option
@click.option("--groups", type=click.Choice(["m", "k"]), help="the products of a batch are groups along it, of which the shape has the mean")
@sparse_option
@click.option("--trials", type=click.IntRange(1, 100_000), default=48, show_default=True, help="configs measured a problem")
@click.option("--budget", type=Seconds(), help="seconds a problem")
@click.option("--devices", type=Devices(), metavar="0,1|all", help="the GPUs to tune on, a problem each at a time (default: the current one)")
@click.option("--seed", type=click.IntRange(0, LARGEST_SEED), default=0, show_default=True)
@click.option(
    "--storage", help="where the trials are kept: PATH.journal, or an Optuna storage URL to share with other tuners (default: a journal in the cache)"
)
@click.option("--fresh", is_flag=True, help="forget the trials of earlier runs, and begin anew")
@click.option("--missing", is_flag=True, help="leave out problems that a database holds, the shipped one too")
@click.option(
    "--db", "path", type=click.Path(path_type=Path), help="the database, a folder or one .json file (default: EPIGEN_DB, else the platform's data folder)"
)
@click.option(
    "--replay", "tables", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="search a recorded table of measurements instead of a GPU; may be given several times",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="write JSON instead of the table")
@pass_machine
@click.pass_context
def tune(context: click.Context, machine: Machine, programs: tuple[str, ...], shapes: tuple[Shape, ...], suites: tuple[Path, ...],
         dtype_name: str, weight_name: str | None, layout: str, precision: str, invariant: str | None, groups: str | None, sparse: str | None, trials: int, budget: float | None, devices: tuple[int, ...] | str | None, seed: int, storage: str | None, fresh: bool, missing: bool, path: Path | None,
         tables: tuple[Path, ...], as_json: bool) -> None:  # fmt: skip
    """Tune PROGRAMS, such as "relu(mm + bias)", at every --shape, and the problems of every --suite; remember the winners in the database.

    Ctrl-C keeps what was found, and a second run goes on from there.
    """
    settings.one_thread()
    budget_s = math.inf if budget is None else budget
    try:
        if tables:
            if programs or shapes or suites or fresh or missing or devices is not None or path is not None:
                raise click.UsageError(
                    "--replay searches the tables' own problems: give it no program, --shape, --suite, --devices, --db, --missing or --fresh"
                )
            going = _replayed(tables, trials, budget_s, seed, storage)
        else:
            if bool(programs) != bool(shapes) or not (programs or suites):
                raise click.UsageError("give a program and a --shape, such as: epigen tune 'relu(mm + bias)' --shape 4096x4096x4096; or a --suite")
            if fresh and storage is not None:
                raise click.UsageError("--fresh forgets what epigen itself remembers: with --storage name a new one instead")
            going = _requested(
                machine, programs, shapes, suites, dtype_name, weight_name or "", layout, precision, invariant or "", groups or "", sparse or "", trials, budget_s, devices, seed, storage, fresh,
                missing, path,
            )  # fmt: skip
        going.go()
    except KeyboardInterrupt:
        click.echo("\ninterrupted before anything was measured", err=True)
        context.exit(INTERRUPTED)
    _show(going, as_json)
    context.exit(_status(going))


def _requested(
    machine: Machine, programs: Sequence[str], shapes: Sequence[Shape], suites: Sequence[Path], dtype_name: str, weight_name: str, layout: str, precision: str, invariant: str, groups: str,
    sparse: str, trials: int, budget_s: float, devices: Sequence[int] | str | None, seed: int, storage: str | None, fresh: bool, missing: bool,
    path: Path | None,
) -> _Run:  # fmt: skip
    """What the options ask for. All mistakes come out here, before the first of many problems is measured."""
    from epigen.tuning import request, suite

    listed = request.every(programs, shapes, [dtype_name], [layout], precision, invariant, [weight_name], groups, sparse)
    for file in suites:
        listed += suite.read(file)
    with contextlib.ExitStack() as unused:
        started = _started(machine, devices)
        for runner in started:
            unused.callback(runner.close)
        try:
            chosen, target = request.gpus_for(devices, machine)
        except TuneError as error:
            raise click.UsageError(f"{error}{'; --replay TABLE searches recorded measurements' if str(error) == request.NO_GPU else ''}") from None

        from epigen.db.database import Database
        from epigen.db.problem import capability
        from epigen.tuning import fleet, remembered, report

        every = [a.task(target, seed) for a in request.distinct(listed)]
        database = Database(path)
        tasks = request.missing(every, database) if missing else every
        if held := len(every) - len(tasks):
            click.echo(f"left out: {held} of {report.count(len(every), 'problem')}, which were tuned for this GPU and Triton", err=True)
        for task in tasks:
            if fresh:
                remembered.forget(task)
        database.demand_writable(target.part, capability(target))
        where: Place = remembered.default_storage if storage is None else storage

        def run(report: Callable[[int, Progress], None], done: Callable[[int, Tuned], None]) -> object:
            return fleet.tune_all(
                tasks, database, devices=chosen, trials=trials, budget_s=budget_s, seed=seed, storage=where, report=report, done=done, started=started
            )

        unused.pop_all()
        return _Run(tasks, run, database, remembers=True)


def _started(machine: Machine, devices: Sequence[int] | str | None) -> list[GpuRunner]:
    """The workers of as many GPUs as there seem to be and are asked for: they import torch, which takes seconds, while this process does."""
    from epigen.tuning.runner import GpuRunner, compile_workers_for

    there = machine.likely()
    gpus = there if isinstance(devices, str) else min(there, 1 if devices is None else len(devices))
    runners = [GpuRunner(compile_workers_for(gpus)) for _ in range(gpus)]
    for runner in runners:
        runner.start()
    return runners


def _replayed(tables: Sequence[Path], trials: int, budget_s: float, seed: int, storage: str | None) -> _Run:
    from epigen.tuning import table
    from epigen.tuning.runner import Replay
    from epigen.tuning.tune import tune_one

    recorded = [table.read(path) for path in tables]

    def run(report: Callable[[int, Progress], None], done: Callable[[int, Tuned], None]) -> None:
        for i, one in enumerate(recorded):

            def report_one(progress: Progress, i: int = i) -> None:
                report(i, progress)

            runner = Replay(one.rows, one.baseline)
            tuned = tune_one(one.task, None, trials=trials, budget_s=budget_s, seed=seed, storage=storage, runner=runner, report=report_one)
            done(i, tuned)
            if tuned.result is not None and not tuned.result.complete:
                return

    return _Run([r.task for r in recorded], run, None, remembers=storage is not None)


def _show(going: _Run, as_json: bool) -> None:
    from epigen.tuning import report

    done = [(going.tasks[i], tuned) for i, tuned in sorted(going.tuned.items())]
    if as_json:
        click.echo(json.dumps([report.record(task, tuned) for task, tuned in done]))
    else:
        click.echo(report.table(done), nl=False)
    if going.interrupted:
        click.echo(_kept(going), err=True)
    elif failed := sum(t.result is None for _, t in done):
        click.echo(f"error: {failed} of {report.count(len(done), 'problem')} without a result", err=True)


def _kept(going: _Run) -> str:
    """What a Ctrl-C has left."""
    results = [t.result for t in going.tuned.values() if t.result is not None]
    whole = sum(r.complete for r in results)
    failed = len(going.tuned) - len(results)
    counted = ((whole, "finished"), (len(results) - whole, "in part"), (failed, "without a config that works"))
    parts = [f"{number} {what}" for number, what in counted if number]
    rest = len(going.tasks) - len(going.tuned)
    where = f" in {going.database.path}" if going.database is not None and any(t.record for t in going.tuned.values()) else ""
    kept = f"what was found is kept{where}: {', '.join(parts)} of {len(going.tasks)}" if parts else "nothing was found yet"
    again = "; the same command goes on from there" if going.remembers and (rest or len(results) > whole) else ""
    return f"interrupted: {kept}{again}"


def _status(going: _Run) -> int:
    if going.interrupted:
        return INTERRUPTED
    return int(any(t.result is None for t in going.tuned.values()))
