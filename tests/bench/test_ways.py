"""`bench.ways` without a GPU: the shipped records, and times that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import machine

from bench import readme, record, tables, ways
from bench.record import Report
from bench.ways import Contest
from epigen import gpus, settings
from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.db.records import Record
from epigen.errors import EpigenError
from epigen.tuning.runner import Replay
from epigen.tuning.task import Baseline, Comparison, Outcome, Task

H200 = gpus.DEFAULT.target
RECORDS = [r for _, r in Database(settings.seed_database_dir(), seeds=()).records()]


class Runner(Replay):
    """Each config takes as long as its number in the comparison tells, and the last one is wrong."""

    def __init__(self, mm_us: float = 300.0):
        super().__init__({}, Baseline(mm_us, mm_us + 100))
        self.task: Task | None = None
        self.wrong: KernelConfig | None = None

    def begin(self, task: Task) -> None:
        self.task = task

    def prepare(self, configs: Sequence[KernelConfig]) -> None:
        self.wrong = configs[-1] if len(configs) > 2 else None

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
        return Outcome("wrong", detail="planted") if config == self.wrong else Outcome("ok", limit_us)

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        return Comparison(tuple(Outcome("ok", 310.0 - 10 * i, 1.0) for i in range(len(configs))), self.baseline)


def contests(known: ways.Rows | None = None, records: Sequence[Record] = RECORDS) -> list[Contest]:
    return ways.contests(records, H200, 250.0, 2, known or {})


@pytest.fixture(scope="module")
def every() -> list[Contest]:
    return contests()


def test_rivals_share_the_work_in_the_other_way(every: list[Contest]) -> None:
    assert len(every) > 150 and len({c.name for c in every}) == len(every)
    assert [c.record.median_us for c in every] == sorted(c.record.median_us for c in every) and every[0].record.median_us >= 250
    for one in every:
        assert 1 <= len(one.rivals) <= 2 and {c.schedule for c in one.configs} == {"warp_specialized"}
        assert {c["pingpong"] for c in one.rivals} == {1 - one.record.kernel_config["pingpong"]}


def test_without_a_record_in_the_other_way_there_is_no_contest() -> None:
    alike = [r for r in RECORDS if r.schedule == ways.SCHEDULE and r.kernel_config["pingpong"]]
    assert len(alike) > 100 and contests(records=alike) == []


def row_of(one: Contest, *seen: dict[str, float]) -> dict[str, Any]:
    """seen: on each GPU, what its config takes and what each rival does."""
    configs = {str(c): {"schedule": c.schedule, **dict(c.values)} for c in one.configs}
    measured = [{"mm_us": 300.0, "unfused_us": 400.0, "us": us, "spread_us": dict.fromkeys(us, 1.0), "failed": {}} for us in seen]
    return {"problem": one.name, "recorded": str(one.record.kernel_config), "configs": configs, "seen": measured}


def test_what_other_gpus_measured_takes_part_again(every: list[Contest]) -> None:
    one, other = every[:2]
    strange = other.record.kernel_config.with_value("group_m", 2)
    row = row_of(replace(one, rivals=(strange,)), {})
    again = next(c for c in contests({one.name: row}) if c.name == one.name)
    assert again.rivals == (*one.rivals, strange)


def test_what_was_wrong_is_not_timed(every: list[Contest]) -> None:
    one, runner = every[0], Runner()
    found = ways.timed(one, runner, H200, 1)
    assert runner.task is not None and runner.task.device == 1 and runner.task.shape == one.record.shape
    own, right, wrong = map(str, one.configs)
    assert found["us"] == {own: 310.0, right: 300.0} and found["failed"] == {wrong: "wrong: planted"}
    assert (found["mm_us"], found["unfused_us"], found["spread_us"][own]) == (300.0, 400.0, 1.0)


def test_every_gpu_measures_all_and_adds_to_what_is_known(every: list[Contest]) -> None:
    todo, saved = every[:3], list[int]()

    def measure(one: Contest, gpu: int) -> dict[str, Any]:
        if one is todo[1] and gpu == 1:
            raise EpigenError("the worker was lost")
        return ways.timed(one, Runner(300.0 + gpu), H200, gpu)

    known = {todo[0].name: row_of(todo[0], {str(todo[0].record.kernel_config): 305.0})}
    rows = ways.gather(todo, (0, 1), measure, known, float("inf"), lambda found: saved.append(len(found)))
    assert [len(rows[c.name]["seen"]) for c in todo] == [3, 1, 2] and len(saved) == 5 and len(known[todo[0].name]["seen"]) == 1
    assert {s["mm_us"] for s in rows[todo[2].name]["seen"]} == {300.0, 301.0}
    assert ways.gather(todo, (0, 1), measure, {}, 0.0, lambda _: None) == {}, "the time is over"


def test_a_rival_replaces_a_record_where_it_leads_by_enough_on_all_gpus(every: list[Contest]) -> None:
    one = every[0]
    own, rival, third = map(str, one.configs)
    level = replace(one.record, median_us=300.0, baseline_us=300.0, spread_us=3.0)

    def settled(*seen: dict[str, float]) -> Record | None:
        return ways.settled(row_of(one, *seen), level)

    assert settled({own: 300.0, rival: 296.0}, {own: 300.0, rival: 296.0}) is None, "by 1 %"
    new = settled({own: 300.0, rival: 280.0}, {own: 310.0, rival: 290.0})
    assert new is not None and str(new.kernel_config) == rival and new.problem == level.problem
    assert (new.median_us, new.baseline_us, new.unfused_us, new.spread_us, new.trials) == (290.0, 300.0, 400.0, 1.0, level.trials) and new.date > level.date
    assert settled({own: 300.0, rival: 280.0}, {own: 300.0, rival: 320.0}) is None, "elsewhere it is behind"
    assert settled({own: 300.0, rival: 280.0}, {own: 300.0, third: 250.0}) is None, "neither ran everywhere"
    assert settled({rival: 280.0}) is None, "the record's own did not run"
    faster = replace(level, median_us=270.0)
    assert ways.settled(row_of(one, {own: 300.0, rival: 286.0}), faster) is None, "where it was tuned it was as far ahead"


def test_a_database_is_settled_and_what_has_changed_since_stays(every: list[Contest], tmp_path: Path) -> None:
    first, second, third = every[:3]
    database = Database(tmp_path / "db", seeds=())
    database.add(*(c.record for c in (first, second, third)))
    rows = {c.name: row_of(c, {str(k): 300.0 if k == c.record.kernel_config else 200.0 for k in c.configs[:2]}) for c in (first, second)}
    rows[second.name]["recorded"] = "another"
    told = ways.settle(tmp_path / "db", rows, [r for _, r in database.records()])
    assert len(told) == 1 and told[0].startswith(f"{first.name}: ") and str(first.rivals[0]) in told[0]
    left = {str(r): r.kernel_config for _, r in database.records()}
    assert left == {first.name: first.rivals[0], second.name: second.record.kernel_config, third.name: third.record.kernel_config}
    assert ways.settle(tmp_path / "db", rows, [r for _, r in database.records()]) == [], "once"


def test_how_far_the_ways_move_between_gpus(every: list[Contest]) -> None:
    one = next(c for c in every if c.record.kernel_config["pingpong"])
    own, rival, third = map(str, one.configs)
    rows = {one.name: row_of(one, {own: 300.0, rival: 300.0, third: 1.0}, {own: 330.0, rival: 303.0})}
    assert ways.summary(rows) == {"ping-pong": {"count": 1, "mean": 0.1, "most": 0.1}, "cooperative": {"count": 1, "mean": 0.01, "most": 0.01}}


def test_the_script_writes_and_the_readme_shows_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ways, "GpuRunner", lambda compile_workers: Runner(300.0 + compile_workers))
    monkeypatch.setattr(record, "environment", lambda commit: record.versions(commit) | {"gpu": "NVIDIA H200", "driver": "580"})

    def run(*arguments: object) -> Report:
        monkeypatch.setattr("sys.argv", ["ways", "--out", str(tmp_path), "--commit", "abc1234", *map(str, arguments)])
        ways.main(machine(H200, H200))
        return record.read(tmp_path / "ways.json")

    first = run("--least", 5000)
    count = len(first.rows)
    assert count > 10 and {len(row["seen"]) for row in first.rows} == {2} and first.environment["commit"] == "abc1234"
    assert {len(row["seen"]) for row in run("--least", 5000).rows} == {4}, "what is there stays"
    assert f"{count} problems in" in capsys.readouterr().out
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    assert f"{count} long problems on 4 GPUs that did not tune them" in readme.tuning()
    settled = run("--settle", tmp_path / "none")
    assert ways.by_problem(settled).keys() == ways.by_problem(first).keys() and not (tmp_path / "none").exists()
    record.write("ways", replace(first, environment={"gpu": "another"}), tmp_path)
    assert {len(row["seen"]) for row in run("--least", 5000).rows} == {2}, "what another GPU measured is no help"
