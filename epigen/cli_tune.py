"""`epigen tune`: finds the fastest correct config for problems, on the GPU at hand or over a recorded table."""

from __future__ import annotations

import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from epigen import dtypes
from epigen.cli_types import Shape

if TYPE_CHECKING:
    from epigen.tuning.search import Progress
    from epigen.tuning.tune import Tuned


@click.command("tune")
@click.argument("programs", nargs=-1)
@click.option("--shape", "shapes", multiple=True, type=Shape(), help="M, N and K; may be given several times")
@click.option(
    "--dtype", "dtype_name", default="fp16", show_default=True, type=click.Choice([t.name for t in dtypes.OPERANDS]), help="dtype of the operands and inputs"
)
@click.option("--layout", default="nt", show_default=True, type=click.Choice(["nn", "nt", "tn", "tt"]), help="how a and b lie: n row-major, t transposed")
@click.option("--precision", type=click.Choice(["ieee", "tf32"]), default="ieee", show_default=True, help="of fp32 operands")
@click.option("--trials", type=click.IntRange(1, 100_000), default=48, show_default=True, help="configs measured a problem")
@click.option("--budget", type=click.FloatRange(0, 1e6), help="seconds a problem")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--storage", help="an Optuna storage URL, to share the study with other tuners")
@click.option(
    "--db", "path", type=click.Path(path_type=Path), help="the database, a folder or one .json file (default: EPIGEN_DB, else the platform's data folder)"
)
@click.option("--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="search a recorded table of measurements instead of a GPU")
@click.option("--json", "as_json", is_flag=True, help="write JSON instead of the table")
def tune(programs: tuple[str, ...], shapes: tuple[tuple[int, int, int], ...], dtype_name: str, layout: str, precision: str, trials: int, budget: float | None,
         seed: int, storage: str | None, path: Path | None, replay: Path | None, as_json: bool) -> None:  # fmt: skip
    """Tune PROGRAMS, such as "relu(mm + bias)", at every --shape, and remember the winners in the database.

    Ctrl-C keeps what was found.
    """
    from epigen.tuning.database import Database
    from epigen.tuning.tune import tune_one

    limit = math.inf if budget is None else budget
    done: list[Tuned] = []
    if replay is not None:
        from epigen.tuning import table
        from epigen.tuning.runner import Replay

        recorded = table.read(replay)
        runner = Replay(recorded.rows, recorded.baseline)
        done.append(tune_one(recorded.task, None, trials=trials, budget_s=limit, seed=seed, storage=storage, runner=runner, report=_progress))
    else:
        if not programs or not shapes:
            raise click.UsageError("give a program and a --shape, such as: epigen tune 'relu(mm + bias)' --shape 4096x4096x4096")
        from epigen.runtime import device
        from epigen.tuning.runner import GpuRunner
        from epigen.tuning.task import Task

        target = device.at_hand()
        if target is None:
            raise click.UsageError("no GPU is at hand to tune on; --replay TABLE searches recorded measurements")
        database = Database(path)
        workers: GpuRunner | None = None
        inputs = "fp32" if dtypes.BY_NAME[dtype_name].bits == 8 else dtype_name
        try:
            for program, shape in product(programs, shapes):
                task = Task(program, shape, dtype_name, dtype_name, inputs, layout, precision, target, seed=seed)
                if workers is None:
                    workers = GpuRunner(task)
                else:
                    workers.renew(task)
                done.append(tune_one(task, database, trials=trials, budget_s=limit, seed=seed, storage=storage, runner=workers, report=_progress))
                if not done[-1].result.complete:
                    click.echo("interrupted: what was found so far is kept", err=True)
                    break
        finally:
            if workers is not None:
                workers.close()
    _show(done, as_json)


def _progress(progress: Progress) -> None:
    if not sys.stderr.isatty():
        return
    counts = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in progress.counts.most_common())
    click.echo(f"\r\033[K{progress.trials} trials, {progress.seconds:.0f} s, best {progress.best_us:.2f} us ({counts})", nl=False, err=True)


def _row(tuned: Tuned) -> dict[str, Any]:
    result, problem = tuned.result, tuned.problem
    row: dict[str, Any] = {"program": problem.program, "shape": list(problem.shape), "dtype": problem.a, "layout": problem.layout}
    row |= {"winner": str(result.winner), "median_us": round(result.outcome.median_us, 3), "spread_us": round(result.outcome.spread_us, 3)}
    row |= {"mm_us": round(result.baseline.mm_us, 3), "unfused_us": round(result.baseline.unfused_us, 3)}
    row |= {"trials": dict(result.counts), "seconds": round(result.seconds, 2), "complete": result.complete}
    return row


def _show(done: list[Tuned], as_json: bool) -> None:
    if sys.stderr.isatty():
        click.echo(err=True)
    rows = [_row(t) for t in done]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        us = row["median_us"]
        against = f"mm / this {row['mm_us'] / us:.2f}, mm and a pass / this {row['unfused_us'] / us:.2f}" if us and row["mm_us"] else "no baseline"
        click.echo(f"{row['program']}  {'x'.join(map(str, row['shape']))} {row['dtype']} {row['layout']}")
        click.echo(f"  {row['winner']}")
        click.echo(f"  {us:.2f} us, {against}; {sum(row['trials'].values())} trials in {row['seconds']:.1f} s")
