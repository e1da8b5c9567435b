"""How soon a search finds a good config: ours, random choice and Optuna's TPE alone, over every recorded sweep and many seeds.

Run: python -m bench.replay [--seeds N] [--only NAME ...] [--commit HASH] [--out FOLDER]; needs no GPU. `python -m bench.plot` draws it.
Claim: ours keeps a config of at least 98 % of the best speed after 48 trials in 9 of 10 runs, and is the best of the three on average.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from bench import record
from bench.record import Report
from epigen.choose.space import Space
from epigen.codegen.spec import KernelConfig
from epigen.tuning import report, table
from epigen.tuning.runner import Replay
from epigen.tuning.table import Table
from epigen.tuning.task import Comparison, Outcome, median_error
from epigen.tuning.tune import tune_one

TRIALS, AT, SEEDS = 96, 48, 50
ENOUGH = 0.98
"""Of the speed of the table's best."""
CLAIMED = 0.9
ALL = "every config"
_FIRST, _AGAIN = 15, 41  # samples
_MOST_SPREAD = 0.1  # of the time: what is recorded beyond that, of one config in fifty, is a few samples that something held up, and no median's
_CLOSE, _FINALISTS = 1.02, 8  # which configs are timed again in the end, for every search alike

Curve = list[float]
"""After each trial: the recorded time of the config that a search would keep, as a ratio to the table's best; inf before the first that is right."""


class Noisy(Replay):
    """A recorded table as another run would measure it, with a history of what was.

    Each time is the recorded one with a lognormal factor: that of a median of samples whose quartiles are as far apart as the recorded ones.
    """

    def __init__(self, recorded: Table, seed: Sequence[int]):
        super().__init__(recorded.rows, recorded.baseline)
        generator = np.random.default_rng(list(seed))
        self.first = {c: _disturbed(o, _FIRST, generator.standard_normal()) for c, o in recorded.rows.items()}
        self.again = {c: _disturbed(o, _AGAIN, generator.standard_normal()) for c, o in recorded.rows.items()}
        self.history: list[KernelConfig] = []

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:  # noqa: ARG002  # nothing to cut off
        self.history.append(config)
        return self.first[config]

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        return Comparison(tuple(self.again[c] for c in configs), self.baseline)

    def curve(self) -> Curve:
        """After each trial: of the configs near the best so far, the one that is fastest when timed again. At least TRIALS long."""
        best = best_us(self.table)
        found: Curve = []
        right: list[tuple[float, int, KernelConfig]] = []
        for number, config in enumerate(self.history):
            if self.first[config].kind == "ok":
                right = sorted([*right, (self.first[config].median_us, number, config)])[:_FINALISTS]
            close = [c for us, _, c in right if us <= _CLOSE * right[0][0]]
            kept = min(close, key=lambda c: self.again[c].median_us, default=None)
            found.append(math.inf if kept is None else self.table[kept].median_us / best)
        return found + found[-1:] * (TRIALS - len(found))


def _disturbed(outcome: Outcome, samples: int, deviations: float) -> Outcome:
    if outcome.kind != "ok":
        return outcome
    error = median_error(min(outcome.spread_us / outcome.median_us, _MOST_SPREAD), samples)
    return replace(outcome, median_us=outcome.median_us * math.exp(error * deviations), samples=samples)


def best_us(rows: Mapping[KernelConfig, Outcome]) -> float:
    return min(o.median_us for o in rows.values() if o.kind == "ok")


# -- the searches: each measures up to TRIALS configs of the space, none twice


def ours(recorded: Table, runner: Noisy, seed: int) -> None:
    tune_one(recorded.task, None, trials=TRIALS, seed=seed, runner=runner)


def by_chance(recorded: Table, runner: Noisy, seed: int) -> None:
    configs = list(dict.fromkeys(runner.available(c) for c in _space(recorded).every()))
    for config in random.Random(seed).sample(configs, min(TRIALS, len(configs))):
        runner.measure(config, 0.0)


def tpe_alone(recorded: Table, runner: Noisy, seed: int) -> None:
    """Optuna as it comes, over the same space. Two thirds of its proposals are repeats: these are answered from memory and cost no trial,
    but it ends after TRIALS proposals of any kind."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    space = _space(recorded)
    for _ in range(TRIALS):
        trial = study.ask()
        config = runner.available(space.point(trial.suggest_int))
        outcome = runner.first[config] if config in runner.history else runner.measure(config, 0.0)
        if outcome.kind == "ok":
            study.tell(trial, math.log(outcome.median_us))
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _space(recorded: Table) -> Space:
    task = recorded.task
    return Space(task.spec, task.shape, task.target)


def everything(recorded: Table, runner: Noisy, seed: int) -> None:  # noqa: ARG001  # there is nothing to choose
    """No search: what the noise leaves of the truth where each config is measured once."""
    for config in recorded.rows:
        runner.measure(config, 0.0)


SEARCHES: dict[str, Callable[[Table, Noisy, int], None]] = {"epigen": ours, "random": by_chance, "TPE alone": tpe_alone}


def run(path: Path, seed: int) -> dict[str, Curve]:
    """Every search once over one table, all with the same disturbed measurements; and what measuring all of it gives, as a curve's last point."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    recorded = table.read(path)
    found = {}
    for name, search in (SEARCHES | {ALL: everything}).items():
        runner = Noisy(recorded, (seed, *path.stem.encode()))
        search(recorded, runner, seed)
        found[name] = runner.curve()[:TRIALS] if name != ALL else runner.curve()[-1:]
    return found


# -- what came of them


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Of many runs: by trial the median and the 10th and 90th percentile; after AT trials the share that is good enough, and the mean ratio."""
    # no interpolation: between a number and infinity there is none
    low, middle, high = np.percentile(np.array(curves), (10, 50, 90), axis=0, method="inverted_cdf")
    return {"median": _plain(middle), "low": _plain(low), "high": _plain(high)} | _reached([c[AT - 1] for c in curves])


def _reached(ratios: Sequence[float]) -> dict[str, Any]:
    return {
        "reached": round(sum(r <= 1 / ENOUGH for r in ratios) / len(ratios), 4),
        "mean": round(sum(ratios) / len(ratios), 5),
        "runs": len(ratios),
    }  # fmt: skip


def _plain(values: Iterable[float]) -> list[float | None]:
    """JSON knows no infinity."""
    return [round(float(v), 4) if math.isfinite(v) else None for v in values]


def enough(found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether ours is good enough often enough: the claim for one table."""
    return bool(found["epigen"]["reached"] >= CLAIMED)


def holds(found: Mapping[str, Mapping[str, Any]]) -> bool:
    """The claim, of all tables together."""
    return enough(found) and all(found["epigen"]["mean"] < found[name]["mean"] for name in SEARCHES if name != "epigen")


def replayed(paths: Sequence[Path], seeds: int, workers: int, commit: str | None = None) -> Report:
    """All searches over all tables. workers: processes; 0 stays in this one."""
    jobs = [(path, seed) for path in paths for seed in range(seeds)]
    if workers:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(run, *zip(*jobs, strict=True), chunksize=5))
    else:
        done = [run(*job) for job in jobs]
    rows = []
    for path in paths:
        mine = [curves for (job, _), curves in zip(jobs, done, strict=True) if job == path]
        recorded = table.read(path)
        found = {name: summary([curves[name] for curves in mine]) for name in SEARCHES}
        rows.append({
            "table": path.stem.removeprefix("sweep_"), "problem": report.name(recorded.task), "configs": len(recorded.rows), "best_us": best_us(recorded.rows), "holds": enough(found), "searches": found,
            "recorded": {k: recorded.environment[k] for k in ("gpu", "date", "commit", "triton") if k in recorded.environment},
            "every_config": _reached([curves[ALL][-1] for curves in mine]),
        })  # fmt: skip
    together = {name: _reached([curves[name][AT - 1] for curves in done]) for name in SEARCHES}
    every_config = _reached([curves[ALL][-1] for curves in done])
    about = {
        "trials": AT, "enough": ENOUGH, "claimed": CLAIMED, "seeds": seeds, "all": together, "every_config": every_config, "holds": holds(together)
    }  # fmt: skip
    return Report("bench.replay", record.versions(commit), rows, about)


def sweeps(only: Sequence[str] = ()) -> list[Path]:
    paths = sorted(record.DATA.glob("sweep_*.json"))
    return [p for p in paths if not only or p.stem.removeprefix("sweep_") in only]


def _line(name: str, found: Mapping[str, Mapping[str, Any]], every_config: Mapping[str, Any]) -> str:
    return f"{name:<12}" + "".join(f"  {search}: {one['reached']:4.0%}, mean {one['mean']:.3f}" for search, one in (*found.items(), (ALL, every_config)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    record.add_options(parser)
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers share the cores already
    report = replayed(sweeps(options.only), options.seeds, options.workers, options.commit)
    every = report.summary
    print(f"share of runs within {ENOUGH:.0%} of the best speed after {AT} trials, and mean ratio of times:")
    for row in report.rows:
        print(_line(row["table"], row["searches"], row["every_config"]))
    print(_line("all", every["all"], every["every_config"]))
    print(f"claimed: in {CLAIMED:.0%} of the runs, and the best of the three on average: {every['holds']}; tables with fewer:", end=" ")
    print(", ".join(row["table"] for row in report.rows if not row["holds"]) or "none")
    print(record.write("replay", report, options.out))


if __name__ == "__main__":
    main()
