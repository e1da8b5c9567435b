"""`epigen tune` over recorded tables, and what a tuned record changes for a later call."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import epigen
from bench.record import RESULTS
from epigen import api
from epigen.cli import main
from epigen.dtypes import FP16
from epigen.errors import EpigenError
from epigen.runtime.device import DEFAULT
from epigen.runtime.kernel import Kernel
from epigen.tuning import table
from epigen.tuning.choose import Chooser
from epigen.tuning.database import Database
from epigen.tuning.runner import Replay
from epigen.tuning.tune import tune_one

SWEEPS = sorted(RESULTS.glob("sweep_*.json"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_replay_of_a_recorded_sweep_comes_within_two_per_cent_of_its_best(path: Path) -> None:
    recorded = table.read(path)
    best = min(o.median_us for o in recorded.rows.values() if o.kind == "ok")
    tuned = tune_one(recorded.task, None, runner=Replay(recorded.rows, recorded.baseline))
    assert tuned.result.outcome.median_us <= 1.02 * best
    assert len(tuned.result.outcomes) <= 48


def test_a_table_reads_back_as_written() -> None:
    recorded = table.read(SWEEPS[0])
    assert table.from_json(table.to_json(recorded)) == recorded


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": 3}', '{"task": {"target": {}}}', "\x00"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(EpigenError, match="this is no table of measurements"):
        table.from_json(text)


def test_a_tuned_config_is_found_by_a_kernel(tmp_path: Path) -> None:
    recorded = table.read(next(p for p in SWEEPS if "skinny" in p.stem))
    database = Database(tmp_path, seeds=())
    tuned = tune_one(recorded.task, database, runner=Replay(recorded.rows, recorded.baseline))
    assert tuned.record is not None and tuned.record.median_us == pytest.approx(tuned.result.outcome.median_us, abs=1e-3)
    graph = api.graph_of(recorded.task.text)
    kernel = Kernel(graph, api.renderer(), Chooser(graph, database))
    here = replace(DEFAULT, part=recorded.task.target.part, multiprocessors=132)
    plan = kernel.plan(recorded.task.shape, dtype=FP16, target=here, layout=recorded.task.layout)
    assert plan.choice.config == tuned.result.winner
    assert "NVIDIA H200" in plan.choice.why
    near = kernel.plan((16, 4096, 6144), dtype=FP16, target=here, layout=recorded.task.layout)
    assert near.choice.config == tuned.result.winner and "16x4096x4096" in near.choice.why


def test_without_a_gpu_the_command_says_so() -> None:
    result = CliRunner().invoke(main, ["tune", "relu(mm)", "--shape", "64x64x64"])
    assert result.exit_code == 2 and "no GPU is at hand" in result.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["relu(mm)"], ["relu(mm)", "--shape", "64x64"], ["relu(mm)", "--shape", "axbxc"], ["--replay", "nowhere.json"]], ids=str
)
def test_usage_is_refused_in_words(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["tune", *arguments])
    assert result.exit_code == 2 and "Error" in result.stderr


def test_replay_prints_a_table_and_json(tmp_path: Path) -> None:
    path = str(SWEEPS[0])
    result = CliRunner().invoke(main, ["tune", "--replay", path, "--trials", "20"])
    assert result.exit_code == 0 and "x".join(map(str, table.read(SWEEPS[0]).task.shape)) in result.stdout
    result = CliRunner().invoke(main, ["tune", "--replay", path, "--trials", "20", "--json"])
    (row,) = json.loads(result.stdout)
    assert row["complete"] and row["median_us"] > 0 and sum(row["trials"].values()) <= 20
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    result = CliRunner().invoke(main, ["tune", "--replay", str(broken)])
    assert result.exit_code == 1 and "this is no table" in result.stderr and "Traceback" not in result.stderr


def test_the_shipped_database_is_valid() -> None:
    found = Database(Path("nowhere"))
    assert all(r.program for _, r in found.records()) and not found.complaints
    assert epigen.compile("relu(mm + bias)").config.schedule in ("tiled", "library")
