"""The claim about the search, over recorded sweeps with the noise of the recording; and what the noise and the figures are made of."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from bench import readme, record, replay, tables
from bench.record import Report
from epigen.tuning import table
from epigen.tuning.task import Outcome
from epigen.tuning.tune import tune_one

SWEEPS = {p.stem.removeprefix("sweep_"): p for p in replay.sweeps()}


@pytest.fixture(scope="module")
def some() -> Report:
    """Two tables and a few seeds."""
    return replay.replayed([SWEEPS["drelu_bgrad"], SWEEPS["skinny"]], seeds=3, workers=0)


@pytest.mark.slow
def test_ours_finds_a_good_config_and_is_the_best_of_the_searches(some: Report) -> None:
    every = some.summary["all"]
    assert every["epigen"]["reached"] >= replay.CLAIMED
    assert every["epigen"]["mean"] < min(every["random"]["mean"], every["TPE alone"]["mean"])
    assert some.summary["holds"] and every["epigen"]["runs"] == 6


@pytest.mark.slow
def test_a_search_finds_the_best_where_the_model_ranks_it_behind_another_schedule() -> None:
    """1000x1000x1000: of 16 seeds none kept a config within 1 % while the model took a tile's first loads for one step more than they are."""
    recorded = table.read(record.DATA / "sample_thousand.json")
    found = []
    for seed in range(3):  # how far each gets hangs on the versions of the packages that search
        runner = replay.Noisy(recorded, [seed, 1])
        tune_one(recorded.task, None, trials=replay.AT, seed=seed, runner=runner)
        found.append(runner.curve()[replay.AT - 1])
    assert statistics.median(found) <= 1.01


@pytest.mark.slow
def test_ours_finds_a_good_config_in_the_other_tables() -> None:
    found = replay.replayed([path for name, path in SWEEPS.items() if name not in ("drelu_bgrad", "skinny")], seeds=2, workers=0)
    every = found.summary["all"]
    assert every["epigen"]["reached"] >= replay.CLAIMED, {row["table"]: row["searches"]["epigen"]["reached"] for row in found.rows}
    assert every["epigen"]["mean"] < min(every["random"]["mean"], every["TPE alone"]["mean"])


@pytest.mark.slow
def test_curves_never_rise_but_by_noise_and_end_at_what_is_found(some: Report) -> None:
    for one in some.rows:
        assert set(one["searches"]) == set(replay.SEARCHES)
        for search in one["searches"].values():
            assert len(search["median"]) == len(search["low"]) == len(search["high"]) == replay.TRIALS
            known = [(low, middle, high) for low, middle, high in zip(search["low"], search["median"], search["high"], strict=True) if None not in (low, high)]
            assert all(1.0 <= low <= middle <= high for low, middle, high in known)
            assert known[-1][1] <= known[0][1]
        assert one["every_config"]["mean"] < 1.05
    assert json.loads(json.dumps(some.body)) == some.body


@pytest.mark.slow
def test_the_curve_is_what_the_search_itself_keeps() -> None:
    """But for its ties, of which the model's first wins."""
    recorded = table.read(SWEEPS["skinny"])
    for seed in range(3):
        runner = replay.Noisy(recorded, (seed,))
        result = tune_one(recorded.task, None, trials=replay.AT, seed=seed, runner=runner).result
        longer = replay.Noisy(recorded, (seed,))
        replay.ours(recorded, longer, seed)
        assert longer.history[: replay.AT] == runner.history, "a search with more trials begins as one with fewer"
        kept = runner.again[result.winner].median_us
        curve = runner.curve()
        assert curve[: replay.AT] == longer.curve()[: replay.AT] and len(curve) == replay.TRIALS
        here = [c for c in runner.history if recorded.rows[c].median_us == pytest.approx(curve[-1] * replay.best_us(recorded.rows))]
        assert kept <= 1.006 * runner.again[here[0]].median_us


def test_measurements_are_disturbed_as_those_of_the_recording() -> None:
    recorded = table.read(SWEEPS["skinny"])
    config = next(c for c, o in recorded.rows.items() if o.kind == "ok" and 0.01 < o.spread_us / o.median_us < replay._MOST_SPREAD)
    outcome = recorded.rows[config]
    runs = [replay.Noisy(recorded, (seed,)) for seed in range(120)]
    for times, samples in (([r.first[config] for r in runs], 9), ([r.again[config] for r in runs], 21)):
        logarithms = [math.log(t.median_us / outcome.median_us) for t in times]
        expected = outcome.spread_us / outcome.median_us / 1.349 * 1.2533 / samples**0.5
        assert statistics.stdev(logarithms) == pytest.approx(expected, rel=0.25)
        assert abs(statistics.fmean(logarithms)) < expected / 3
    assert replay.Noisy(recorded, (1,)).first == runs[1].first != runs[2].first


def test_before_the_first_right_answer_there_is_no_time() -> None:
    recorded = table.read(SWEEPS["skinny"])
    wrong, ok, *_ = recorded.rows
    recorded = replace(recorded, rows={**recorded.rows, wrong: Outcome("wrong")})
    runner = replay.Noisy(recorded, (0,))
    assert runner.first[wrong] == recorded.rows[wrong], "a failure stays one"
    for config in (wrong, ok):
        runner.measure(config, 0.0)
    curve = runner.curve()
    assert curve[0] == math.inf and curve[1] == curve[-1] == recorded.rows[ok].median_us / replay.best_us(recorded.rows)
    assert replay.summary([curve])["median"][:2] == [None, round(curve[1], 4)]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_curves() -> None:
    assert replay.run(SWEEPS["short_k"], 3) == replay.run(SWEEPS["short_k"], 3)


def test_what_is_written_is_read_by_the_readme(some: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record.read(record.write("replay", some, tmp_path)) == some
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    assert "2 recorded sweeps (NVIDIA H200)" in readme.tuning()


def test_the_recorded_result_is_of_the_recorded_sweeps() -> None:
    found = record.read(record.RESULTS / "replay.json")
    assert found.summary["seeds"] == replay.SEEDS and sorted(row["table"] for row in found.rows) == sorted(SWEEPS)
    for one in found.rows:
        recorded = table.read(SWEEPS[one["table"]])
        assert one["best_us"] == replay.best_us(recorded.rows) and one["configs"] == len(recorded.rows), "run: python -m bench.replay"
    assert found.summary["holds"] == replay.holds(found.summary["all"])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws the results, and no test needs it")
def test_equal_results_are_drawn_alike(some: Report, tmp_path: Path) -> None:
    from bench import plot

    one, other = (plot.draw(some, tmp_path / name) for name in "ab")
    assert [p.name for p in one] == ["replay.svg"]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other]
    text = one[0].read_text()
    assert "<dc:date>" not in text and len(text) < 400_000
