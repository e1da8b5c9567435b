"""The analytic model on what its constants were not fitted to: a sweep that a fit has not seen, and tuned problems of a GPU of which it has seen few."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from statistics import fmean, median, pstdev

import pytest
from checkout import ROOT

from bench import borrow
from bench import model as held
from bench.model import Sweep
from epigen import gpus, settings
from epigen.choose.space import Space
from epigen.codegen.schedules import SCHEDULES
from epigen.db.database import Database
from epigen.db.problem import Problem
from epigen.db.records import Record
from epigen.perf import model
from epigen.perf.constants import FITTED, Constants
from epigen.tuning import suite
from epigen.tuning.task import Task

H100 = gpus.by_name("H100")


def unfitted() -> Constants:
    """Half as much again, and two thirds, of what a fit gave, by turns."""
    names = [name for name in asdict(FITTED) if name not in held.FIXED]
    return replace(FITTED, **{name: getattr(FITTED, name) * (1.5 if i % 2 else 1 / 1.5) for i, name in enumerate(names)})


def thinned(sweep: Sweep, one_in: int) -> Sweep:
    return replace(sweep, configs=sweep.configs[::one_in], measured=sweep.measured[::one_in])


# -- a sweep


@pytest.mark.slow
def test_a_fit_to_other_problems_ranks_a_sweep_that_it_has_not_seen() -> None:
    """8192x8192x512, whose products are short: a part of all other tables but those of this shape, two rounds. Twice as large a part gives no more."""
    (unseen,) = held.sweeps(names=["short_k"])
    seen = [thinned(s, 16) for s in held.sweeps() if s.name != unseen.name]
    seen += [thinned(s, 6) for s in held.sweeps(prefix="sample_") if s.table.task.shape != unseen.table.task.shape]
    assert len(seen) == 12 and sum(len(s.configs) for s in seen) > 500
    start = unfitted()
    found = held.fit(seen, start, rounds=2)
    before, after = (held.score(unseen, unseen.estimates(constants)) for constants in (start, found))
    assert before.correlation < 0.87 and before.spread > 0.12, "else this would show nothing"
    assert after.correlation > 0.91 and after.spread < 0.09 and 0.9 < after.bias < 1.1
    assert held.lost(unseen, unseen.estimates(found), 24) < 1.02


# -- a GPU: of an H100 the constants have seen 29 random problems and a few by hand, and none of the tuned ones


@cache
def all_of(gpu: str) -> tuple[tuple[Record, Task], ...]:
    own = gpus.by_name(gpu)
    found = [r for _, r in Database(settings.seed_database_dir(), seeds=()).records() if r.gpu == own.name]
    return tuple((r, borrow.task_of(r, own.target)) for r in found)


@cache
def layers(gpu: str) -> frozenset[Problem]:
    """The problems of the suite of models: few rows and some hundred, gates, and 8 bits. One constant was set to those of 256 rows on an H100, and none to others."""
    target = gpus.by_name(gpu).target
    return frozenset(replace(asked.task(target).problem, program="") for asked in suite.read(ROOT / "bench" / "suite_models.toml"))


@cache
def on_an_h100() -> tuple[tuple[Record, Task], ...]:
    """What was tuned there, and is shipped; but for the layers of models, which are held to by themselves."""
    found = [one for one in all_of("H100") if replace(one[1].problem, program="") not in layers("H100")]
    assert len(found) > 130
    return tuple(found)


def estimates(constants: Constants) -> list[float]:
    return [model.estimates(task.spec, [r.kernel_config], task.shape, H100, constants)[0].us for r, task in on_an_h100()]


def test_times_on_a_gpu_that_the_model_was_not_fitted_to() -> None:
    """Of the winners: within a tenth on the whole, and ranked by how fast they multiply, where the sizes of the problems do not help."""

    def against_measured(constants: Constants) -> tuple[float, float, float]:
        estimated = estimates(constants)
        logs = [math.log(us / r.median_us) for us, (r, _) in zip(estimated, on_an_h100(), strict=True)]
        work = [math.prod(task.shape) for _, task in on_an_h100()]
        speeds = ([w / us for w, us in zip(work, times, strict=True)] for times in ([r.median_us for r, _ in on_an_h100()], estimated))
        return math.exp(fmean(logs)), pstdev(logs), held.spearman(*speeds)

    bias, spread, correlation = against_measured(FITTED)
    assert 0.9 < bias < 1.1 and spread < 0.085 and correlation > 0.88
    _, without, _ = against_measured(unfitted())
    assert without > 1.2 * spread, "the constants say something of this GPU too"


def few(r: Record) -> bool:
    return r.shape[-3] <= 64


def some(r: Record) -> bool:
    return 64 < r.shape[-3] <= 512


def many(r: Record) -> bool:
    return r.shape[-3] > 512


def held_to_layers(those: Callable[[Record], bool]) -> tuple[float, float, float]:
    """Of the winners' estimates, against what was measured: bias, spread of the logarithms, and how they rank by the speed of multiplying, where the sizes
    of the problems do not help."""
    found = [
        (r, task, model.estimate_us(task.spec, r.kernel_config, task.shape, H100).us)
        for r, task in all_of("H100")
        if replace(task.problem, program="") in layers("H100") and those(r)
    ]
    logs = [math.log(us / r.median_us) for r, _, us in found]
    measured, estimated = (
        [math.prod(task.shape) / us for (_, task, _), us in zip(found, times, strict=True)]
        for times in ([r.median_us for r, *_ in found], [us for *_, us in found])
    )
    return math.exp(fmean(logs)), pstdev(logs), held.spearman(measured, estimated)


@pytest.mark.parametrize(("rows", "bias"), [(few, 1.05), (some, 1.1), (many, 0.9)], ids=["to 64 rows", "to 512 rows", "more rows"])
def test_times_of_layers_on_a_gpu_that_the_model_was_not_fitted_to(rows: Callable[[Record], bool], bias: float) -> None:
    """In 16 bits, as those were that it was fitted to. Of some hundred rows, which they lack, it takes all to be slower by a tenth: that ranks none of them."""
    found, spread, correlation = held_to_layers(lambda r: rows(r) and r.a in ("fp16", "bf16"))
    assert 0.95 < found / bias < 1.05 and spread < 0.12 and correlation > 0.75


def test_even_rounds_on_the_gpu_whose_times_their_constant_was_not_set_to() -> None:
    """Kernels whose operands come by TMA, of layers of some hundred rows on an H200: without it they are taken to be slower by a tenth."""
    h200, found = gpus.by_name("H200"), dict[float, float]()
    those = [(r, task) for r, task in all_of("H200") if replace(task.problem, program="") in layers("H200") and some(r) and r.a in ("fp16", "bf16")]
    by_tma = [(r, task) for r, task in those if SCHEDULES[r.schedule].descriptors]
    for smooth in (0.0, FITTED.tma_even_smooth):
        constants = replace(FITTED, tma_even_smooth=smooth)
        estimated = [model.estimates(task.spec, [r.kernel_config], task.shape, h200, constants)[0].us for r, task in by_tma]
        found[smooth] = math.exp(fmean(math.log(us / r.median_us) for us, (r, _) in zip(estimated, by_tma, strict=True)))
    assert len(by_tma) > 8 and 0.95 < found[FITTED.tma_even_smooth] < 1.08 < found[0.0]


def test_times_in_8_bits_which_the_model_was_not_fitted_to() -> None:
    bias, spread, correlation = held_to_layers(lambda r: r.a not in ("fp16", "bf16"))
    assert 0.9 < bias < 1.1 and spread < 0.16 and correlation > 0.9


@pytest.mark.slow
def test_the_fastest_on_a_gpu_that_the_model_was_not_fitted_to_are_among_its_first() -> None:
    """Each winner among its whole search space. Trials begin with the model's first, and go on without it."""
    places = []
    for r, task in on_an_h100()[::8]:
        space = [e.us for e in model.estimates(task.spec, list(Space(task.spec, task.shape, H100.target).every())[::7], task.shape, H100)]
        (us,) = (e.us for e in model.estimates(task.spec, [r.kernel_config], task.shape, H100))
        places.append(sum(other < us for other in space) / len(space))
    assert len(places) > 15 and median(places) < 0.01 and max(places) < 0.15
