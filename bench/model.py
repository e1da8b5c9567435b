"""Holds the analytic model to the recorded sweeps and samples, and fits its constants to them. Needs no GPU.

For each table: Spearman's rank correlation of estimated and measured time over the legal configs that ran, where in the model's order
the first config within 2 % of the best stands, and how far each value of each dimension is mispriced beside the others. Of the samples of
random shapes: how much longer the model's first takes than the best, and the best of its first three.

Run: python -m bench.model [TABLE …] [--residuals] [--worst N] [--fit [--rounds N]]
A fit takes the random shapes in. Of all tables and without --fit, the figures are also written to bench/results/model.json.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median, pstdev

from bench import record
from bench.record import Report
from epigen import gpus
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.perf import model
from epigen.perf.constants import FITTED, Constants
from epigen.tuning import table
from epigen.tuning.table import Table

FIXED = frozenset({
    "tensor_share",  # a share above one would only make up for something else
    "older_share", "plain_share", "vendor_us",  # of other GPUs and dtypes, and of the vendor's product alone
    "followed_bare", "followed_thin_bare", "followed_again", "followed_l2", "followed_held",  # and with a pass: 168 such were fitted by themselves
    "turned_clocks",  # of tf32, of which no sweep is
    "l2_bytes_clock",  # the width of a port
    "pointed_again",  # of kernels that no table here has
    "narrow_clocks", "narrow_warp_clocks", "narrow_us", "narrow_smooth", "narrow_spill_ns",  # read off the loops of compiled kernels
})  # fmt: skip
"""What a fit leaves alone, unless it is named."""

CLOSE = 1.02
"""What counts as the best: repeated runs differ by so much."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One table, and what of it the model is held to: the configs that gave a right answer, and their times in microseconds."""

    name: str
    table: Table
    spec: KernelSpec
    configs: tuple[KernelConfig, ...]
    measured: tuple[float, ...]

    def estimates(self, constants: Constants = FITTED) -> list[float]:
        """Microseconds a config. The table of GPUs must have a row for the one that measured."""
        task = self.table.task
        gpu = gpus.by_name(task.target.part)
        return [e.us for e in model.estimates(self.spec, self.configs, task.shape, gpu, constants)]


@dataclass(frozen=True, slots=True)
class Score:
    """correlation: Spearman's, of all configs. first: how many of the model's best to try until one is within CLOSE of the best.
    bias: geometric mean of estimate over time. spread: standard deviation of its logarithm.
    """

    correlation: float
    first: int
    bias: float
    spread: float


def sweeps(folder: Path = record.DATA, names: Sequence[str] = (), prefix: str = "sweep_") -> list[Sweep]:
    """The tables of a folder, by name, or those that are named. prefix: "sample_" for those that hold a part of their space."""
    return [read(p) for p in sorted(folder.glob(f"{prefix}*.json")) if not names or _name(p) in names]


def _name(path: Path) -> str:
    return path.stem.removeprefix("sweep_")


def read(path: Path) -> Sweep:
    return _sweep(_name(path), table.read(path))


RANDOM = ("shapes", "shapes_h100", "shapes_h200")
"""Tables of random problems: of plain epilogues on an H200; and the trials of the searches of bench.regret on both, of all kinds but int8. Which of them
the constants were set to is said in epigen/perf/constants.py."""


def random_shapes(folder: Path = record.DATA, name: str = RANDOM[0]) -> list[Sweep]:
    """Those of which several configs ran."""
    path = folder / f"{name}.json"
    found = table.list_from_json(path.read_text()) if path.exists() else []
    return [s for s in (_sweep("x".join(map(str, t.task.shape)), t) for t in found) if len(s.configs) > 3]


def _sweep(name: str, found: Table) -> Sweep:
    ran = [(config, outcome.median_us) for config, outcome in found.rows.items() if outcome.kind in ("ok", "slower")]
    return Sweep(name, found, found.task.spec, tuple(c for c, _ in ran), tuple(us for _, us in ran))


def ranked(sweep: Sweep, estimated: Sequence[float]) -> list[float]:
    """The measured times, in the model's order."""
    return [sweep.measured[i] for i in sorted(range(len(estimated)), key=estimated.__getitem__)]


def lost(sweep: Sweep, estimated: Sequence[float], first: int) -> float:
    """How many times as long as the best of all configs the best of the model's first few takes."""
    return min(ranked(sweep, estimated)[:first]) / min(sweep.measured)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    x, y = _ranks(one), _ranks(other)
    mean_x, mean_y = fmean(x), fmean(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    mean = {value: fmean(found) for value, found in places.items()}
    return [mean[value] for value in values]


def score(sweep: Sweep, estimated: Sequence[float]) -> Score:
    logs = [math.log(e / m) for e, m in zip(estimated, sweep.measured, strict=True)]
    best = min(sweep.measured)
    first = 1 + next(place for place, us in enumerate(ranked(sweep, estimated)) if us <= CLOSE * best)
    return Score(spearman(sweep.measured, estimated), first, math.exp(fmean(logs)), pstdev(logs))


def residuals(sweep: Sweep, estimated: Sequence[float]) -> Iterator[tuple[str, dict[int | str, tuple[float, int]]]]:
    """By dimension: for each value, the median of estimate over time beside the table's own, and of how many configs."""
    logs = [math.log(e / m) for e, m in zip(estimated, sweep.measured, strict=True)]
    tiled = [(dict(c.values), r) for c, r in zip(sweep.configs, logs, strict=True) if c.schedule == "tiled"]
    middle = median(r for _, r in tiled)
    groups: dict[str, dict[int | str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for config, log in zip(sweep.configs, logs, strict=True):
        groups["schedule"][config.schedule].append(log)
    for values, log in tiled:
        for name, value in values.items():
            groups[name][value].append(log)
        groups["elements a thread"][values["block_m"] * values["block_n"] // (32 * values["num_warps"])].append(log)
    for name, found in groups.items():
        yield name, {value: (math.exp(median(some) - middle), len(some)) for value, some in sorted(found.items(), key=lambda kv: str(kv[0]).zfill(8))}


# -- fitting


def loss(given: Sequence[Sweep], constants: Constants, shapes: Sequence[Sweep] = ()) -> float:
    """What a fit makes small: ranks lost, the spread of errors, and most of all the distance of the fast configs from the front.

    Of random shapes the same, where the model's first and its first three take the place of its first 6 to 48.
    """
    total = 0.0
    for sweep in given:
        estimated = sweep.estimates(constants)
        found = score(sweep, estimated)
        # the regret of trying the model's first 6, 12, 24 and 48
        regret = fmean(lost(sweep, estimated, n) - 1 for n in (6, 12, 24, 48))
        total += (1 - found.correlation) + 0.3 * found.spread + 2.0 * regret + 0.3 * abs(math.log(found.bias))
    whole = total / len(given) if given else 0.0
    if shapes:
        answers = [(s, s.estimates(constants)) for s in shapes]
        first, three = (geometric_mean(lost(s, e, n) for s, e in answers) for n in (1, 3))
        whole += 2.0 * (first - 1) + three - 1 + 0.3 * fmean(score(s, e).spread for s, e in answers)
    return whole


def fit(given: Sequence[Sweep], constants: Constants, rounds: int, only: Sequence[str] = (), shapes: Sequence[Sweep] = ()) -> Constants:
    """Coordinate descent: each constant in turn, up or down by a factor that shrinks from round to round."""
    best = loss(given, constants, shapes)
    for turn in range(rounds):
        factor = 1 + 0.5 * 0.6**turn
        for name in only or [n for n in asdict(constants) if n not in FIXED]:
            for ratio in (factor, 1 / factor):
                candidate = replace(constants, **{name: getattr(constants, name) * ratio})
                found = loss(given, candidate, shapes)
                if found < best - 1e-5:
                    constants, best = candidate, found
                    print(f"  {name} {getattr(constants, name):.4g}: {best:.4f}", flush=True)
                    break
        print(f"round {turn + 1}: {best:.4f}", flush=True)
    return constants


# -- what is printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tables, such as square and sample_tiny (default: all)")
    parser.add_argument("--folder", type=Path, default=record.DATA)
    parser.add_argument("--residuals", action="store_true", help="how far each value of each dimension is mispriced")
    parser.add_argument("--worst", type=int, default=0, help="list so many of the worst estimates of a table")
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print those that changed")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    given = sweeps(options.folder, options.names) + sweeps(options.folder, options.names, "sample_")
    tables = {} if options.names else {name: random_shapes(options.folder, name) for name in RANDOM}
    constants = FITTED
    if options.fit:
        constants = fit(given, constants, options.rounds, shapes=[s for shapes in tables.values() for s in shapes])
        for name, value in asdict(constants).items():
            if value != getattr(FITTED, name):
                print(f"{name}: {getattr(FITTED, name):.4g} -> {value:.4g}")
    correlations: dict[str, float] = {}
    for sweep in given:
        estimated = sweep.estimates(constants)
        s = score(sweep, estimated)
        correlations[sweep.name] = round(s.correlation, 4)
        print(f"{sweep.name:<19} {len(estimated):>5} configs  Spearman {s.correlation:.3f}  first good {s.first:>4}  bias {s.bias:.2f}  spread {s.spread:.2f}")
        if options.residuals:
            for name, found in residuals(sweep, estimated):
                print(f"    {name:<18}" + "  ".join(f"{value}: {ratio:.2f} ({count})" for value, (ratio, count) in found.items()))
        worst = sorted(zip(sweep.configs, sweep.measured, estimated, strict=True), key=lambda row: -abs(math.log(row[2] / row[1] / s.bias)))
        for config, us, guess in worst[: options.worst]:
            print(f"    {us:9.2f} us measured, {guess:9.2f} estimated ({guess / us:.2f})  {config}")
    chosen: dict[str, dict[str, float]] = {}
    for name, shapes in tables.items():
        if not shapes:
            continue
        answers = [(s, s.estimates(constants)) for s in shapes]
        first, three = ([lost(s, e, n) for s, e in answers] for n in (1, 3))
        chosen[name] = {
            "problems": len(shapes),
            "first": round(geometric_mean(first), 4),
            "worst": round(max(first), 4),
            "three": round(geometric_mean(three), 4),
        }
        print(f"{name}, {len(shapes)} random problems: the model's first takes {chosen[name]['first']:.3f} times as long as the best,", end=" ")
        print(f"at worst {max(first):.2f}; the best of its first three {chosen[name]['three']:.3f}")
    if not options.names and not options.fit and options.folder == record.DATA:
        rows = [{"table": name, "spearman": correlation} for name, correlation in correlations.items()]
        record.write("model", Report("bench.model", record.versions(), rows, chosen))


if __name__ == "__main__":
    main()
