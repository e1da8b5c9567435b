"""`epigen tune` over recorded tables, and what a tuned record changes for a later call."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from golden import Golden
from machines import machine

import epigen
from bench.record import DATA
from epigen import gpus, settings
from epigen.choose import explain
from epigen.choose.choose import Chooser
from epigen.choose.space import Space
from epigen.cli import main
from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.db.database import check as check_database
from epigen.dtypes import BF16, FP16, FP32
from epigen.errors import CallError, DatabaseError, EpigenError
from epigen.gpus import DEFAULT_TARGET, TARGETS
from epigen.ir.program import graph_of
from epigen.runtime.kernel import Kernel
from epigen.runtime.rendering import renderer
from epigen.tuning import report, table
from epigen.tuning import tune as tune_module
from epigen.tuning.runner import Replay
from epigen.tuning.task import Baseline, Comparison, Outcome, Task
from epigen.tuning.tune import study_name, tune_one

SKINNY = table.read(DATA / "sweep_skinny.json")
SWEEPS = sorted(DATA.glob("sweep_*.json"))


@pytest.mark.slow
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
    assert table.list_from_json(table.list_to_json([recorded, recorded])) == [recorded, recorded] and table.list_from_json(table.list_to_json([])) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": 3}', '{"task": {"target": {}}}', "\x00"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(EpigenError, match="no table"):
        table.from_json(text)
    with pytest.raises(EpigenError, match="list of tables"):
        table.list_from_json(text)


def test_a_tuned_config_is_found_by_a_kernel(tmp_path: Path) -> None:
    recorded = table.read(next(p for p in SWEEPS if "skinny" in p.stem))
    database = Database(tmp_path, seeds=())
    tuned = tune_one(recorded.task, database, runner=Replay(recorded.rows, recorded.baseline))
    assert tuned.record is not None and tuned.record.median_us == pytest.approx(tuned.result.outcome.median_us, abs=1e-3)
    graph = recorded.task.graph
    kernel = Kernel(graph, renderer(), Chooser(graph, database))
    here = replace(DEFAULT_TARGET, part=recorded.task.target.part, multiprocessors=132)
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


def test_a_replayed_problem_is_parsed_once(parsed: list[str], tmp_path: Path) -> None:
    """By whatever reads the table: problem, study, space, report and JSON go by its graph."""
    result = CliRunner().invoke(main, ["tune", "--replay", str(DATA / "sweep_skinny.json"), "--trials", "3", "--storage", f"{tmp_path}/x.journal", "--json"])
    assert result.exit_code == 0 and parsed == ["relu(mm + bias)"]


def test_a_worker_parses_nothing(parsed: list[str]) -> None:
    """A task reaches it pickled, with all that follows from its program."""
    task = replace(SKINNY.task, inputs=(FP32,))
    again = pickle.loads(pickle.dumps(task))
    assert again == task and (again.spec, again.problem) == (task.spec, task.problem) != (SKINNY.task.spec, SKINNY.task.problem)
    sample, config = again.sample("meta"), next(iter(SKINNY.rows))
    assert again.kernel(renderer(), config).plan(again.shape, dtype=again.a).spec.name == task.spec.name and sample.a.shape == task.shape[::2]
    assert not parsed


def test_a_task_whose_dtypes_do_not_fit_is_none(golden: Golden) -> None:
    with golden.raises(CallError):
        replace(SKINNY.task, b=FP32)


def test_the_shipped_database_is_valid() -> None:
    found = Database(Path("nowhere"))
    assert all(r.program for _, r in found.records()) and not found.complaints
    assert epigen.compile("relu(mm + bias)").config.schedule in ("persistent", "warp_specialized")  # of 4096x4096x4096 on an H200


def test_a_study_is_named_by_all_that_decides_its_outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = Task(graph_of("relu(mm + bias)"), (256, 512, 64), FP16, FP16, (FP16,), "nn", "ieee", DEFAULT_TARGET)

    name = study_name(task)
    assert name.startswith(f"{DEFAULT_TARGET.part.lower().replace(', ', '_')} 256x512x64 fp16 nn ") and len(name) < 150
    assert name == study_name(replace(task, seed=3, device=1))  # neither changes an outcome
    changes: list[dict[str, object]] = [
        {"graph": graph_of("gelu(mm + bias)")},
        {"shape": (256, 512, 128)},
        {"a": BF16, "b": BF16},
        {"inputs": (FP32,)},
        {"layout": "nt"},
        {"invariant": "m"},
    ]
    changes += [{"target": replace(DEFAULT_TARGET, part="another")}, {"target": TARGETS["sm_80"]}, {"a": FP32, "b": FP32}]
    changes += [{"a": FP32, "b": FP32, "precision": "tf32"}]
    names = [name, *(study_name(replace(task, **c)) for c in changes)]
    assert len(set(names)) == len(names)
    folder = tmp_path / "templates"
    shutil.copytree(settings.templates_dir(), folder)
    with (folder / "library.py.j2").open("a") as file:
        file.write("# another\n")
    monkeypatch.setattr(settings, "templates_dir", lambda: folder)
    assert study_name(task) != name
    monkeypatch.undo()
    for module, attribute in ((epigen, "__version__"), (tune_module, "triton_version")):
        monkeypatch.setattr(module, attribute, "9.9.9" if attribute == "__version__" else lambda: "9.9.9")
        assert study_name(task) != name
        monkeypatch.undo()


def test_tuning_again_times_what_is_known(tmp_path: Path) -> None:
    recorded = table.read(next(p for p in SWEEPS if "skinny" in p.stem))
    runner = Replay(recorded.rows, recorded.baseline)
    first = tune_one(recorded.task, Database(tmp_path / "none", seeds=()), trials=20, runner=runner)
    assert first.record is not None
    known = next(c for c, o in recorded.rows.items() if o.kind == "ok" and c not in first.result.outcomes)
    database = Database(tmp_path / "one", seeds=())
    lucky = replace(first.record, schedule=known.schedule, config=dict(known.values), median_us=first.record.median_us / 2)
    database.add(lucky)
    stop = threading.Event()
    part = tune_one(recorded.task, database, trials=20, runner=runner, stop=stop, report=lambda p: stop.set() if p.trials == 5 else None)
    assert part.result.complete is False and [r for _, r in database.records()] == [lucky], "a part of a search knows no better"
    again = tune_one(recorded.task, database, trials=20, runner=runner)
    assert known in again.result.outcomes and len(again.result.outcomes) == 20
    assert [r for _, r in database.records()] == [again.record], "what a GPU was on another day counts no more"


class Untimed(Replay):
    """The vendor's product has no time: nothing but the answers to `compare` tells."""

    def __init__(self, how: str):
        super().__init__(SKINNY.rows, SKINNY.baseline)
        self.how = how

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        found = super().compare(configs)
        if self.how == "lost" or (self.how == "lost at the end" and configs):
            raise EpigenError("timing the vendor's product failed: the worker ended with signal 9")
        if self.how == "no memory":
            return replace(found, baseline=Baseline(0.0, 0.0), untimed="the vendor's product could not be timed: CUDA out of memory")
        if self.how == "no memory for a pass":
            return replace(found, baseline=replace(SKINNY.baseline, unfused_us=0.0), untimed="the vendor's product with a pointwise pass could not be timed")
        return found


@pytest.mark.parametrize("how", ["lost", "lost at the end", "no memory", "no memory for a pass"])
def test_a_winner_is_recorded_whatever_becomes_of_the_vendors_product(how: str, tmp_path: Path) -> None:
    database = Database(tmp_path, seeds=())
    tuned = tune_one(SKINNY.task, database, trials=8, runner=Untimed(how))
    ((file, record),) = Database(tmp_path, seeds=()).records()
    assert tuned.result and tuned.result.complete and record == tuned.record and record.kernel_config == tuned.result.winner
    timed = how in ("lost at the end", "no memory for a pass")
    assert (record.baseline_us is not None, record.unfused_us is not None) == (timed, how == "lost at the end")
    assert bool(tuned.result.untimed) == (how != "lost at the end")
    assert not check_database(tmp_path) and Database(tmp_path, seeds=()).complaints == ()

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(main, [*arguments, "--db", str(file)])
        assert done.exit_code == 0, done.output
        return done.stdout

    rows = report.table([(SKINNY.task, tuned)]).splitlines()
    assert rows[2].split()[2:4] == [f"{SKINNY.baseline.mm_us / record.median_us:.2f}" if timed else "-", rows[2].split()[3]]
    assert rows[3].strip() == tuned.result.untimed
    assert json.loads(json.dumps(report.record(SKINNY.task, tuned)))["untimed"] == (tuned.result.untimed or None)
    assert ("   - vs mm" in said("db", "list")) == (not timed) and ("could not be timed" in said("db", "show", record.name)) == (not timed)
    merged = Database(tmp_path / "other", seeds=())
    assert merged.merge(tmp_path).added == 1 and [r for _, r in merged.records()] == [record]
    kernel = Kernel(SKINNY.task.graph, renderer(), Chooser(SKINNY.task.graph, database))
    here = replace(DEFAULT_TARGET, part=SKINNY.task.target.part, multiprocessors=132)
    plan = kernel.plan(SKINNY.task.shape, dtype=FP16, target=here, layout=SKINNY.task.layout)
    assert plan.choice.config == record.kernel_config and plan.choice.why.endswith("(exact)")
    explained = explain.explain(plan.spec, SKINNY.task.shape, gpus.DEFAULT, plan.choice)
    assert explained.measured and explained.measured.mm_us == record.baseline_us and json.dumps(explain.record(explained))
    assert ("could not be timed" in explain.text(explained)) == (not timed)


def test_a_database_that_cannot_be_written_is_found_out_before_anything_is_measured(tmp_path: Path) -> None:
    class Never(Replay):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            raise AssertionError((config, limit_us))

    (tmp_path / "file").touch()
    database = Database(tmp_path / "file" / "db", seeds=())
    with pytest.raises(DatabaseError, match=f"{tmp_path}/file"):
        tune_one(SKINNY.task, database, runner=Never(SKINNY.rows, SKINNY.baseline))
    with pytest.raises(DatabaseError, match=f"{tmp_path}/file"):
        epigen.tune("relu(mm)", "64x64x64", database=database, machine=machine(SKINNY.task.target))


class Anything(Replay):
    """Could measure whatever there is."""

    def knows(self, config: KernelConfig) -> bool:  # noqa: ARG002
        return True


def test_a_search_begins_with_what_is_sure_and_without_what_is_hopeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long epilogue a near record's ping-pong spills 2,080 bytes a thread: it took a budget of 8 s to compile, after which there was no right answer."""
    h200 = gpus.by_name("H200").target
    shipped, tried = Database(tmp_path, seeds=(settings.seed_database_dir(),)), list[KernelConfig]()

    def begun(*_: object, first: Sequence[KernelConfig], **_more: object) -> None:
        tried[:] = first
        raise EpigenError("begun")

    def firsts(program: str) -> tuple[list[str], list[KernelConfig]]:
        task = Task(graph_of(program), (4736, 616, 64), BF16, BF16, (BF16,), "nt", "ieee", h200)
        with pytest.raises(EpigenError, match="begun"):
            tune_one(task, shipped, runner=Anything({}, SKINNY.baseline))
        lent = shipped.nearest(task.problem, tune_module.triton_version(), 3, Space(task.spec, task.shape, h200).legal)
        return [c.schedule for c in tried], [found.config for found in lent if found.config in tried]

    monkeypatch.setattr(tune_module, "search", begun)
    schedules, lent = firsts("h0 = logsigmoid(mm); z0 = dsigmoid(gain, sigmoid(gain)); exp(tanh(dgelu_tanh(mm, mm))) + z0 + tanh(rows[m]) ** 2, h0")
    assert schedules[0] == "library" and lent == []
    schedules, lent = firsts("relu(mm + bias)")
    assert schedules[0] == "library" and len(lent) == 3


def test_a_storage_keeps_a_tuned_problem_for_the_next_run(tmp_path: Path) -> None:
    recorded = table.read(SWEEPS[0])
    path = f"journal://{tmp_path}/studies/"
    first = tune_one(recorded.task, None, trials=10, runner=Replay(recorded.rows, recorded.baseline), storage=path)
    again = tune_one(recorded.task, None, trials=10, runner=Replay(recorded.rows, recorded.baseline), storage=path)
    assert (first.result.measured, again.result.measured) == (10, 0) and again.result.winner == first.result.winner
    assert len(list((tmp_path / "studies").iterdir())) == 1


def test_a_storage_that_cannot_be_used_is_told_in_words() -> None:
    result = CliRunner().invoke(main, ["tune", "--replay", str(SWEEPS[0]), "--storage", "postgresql+psycopg://me:secret@127.0.0.1:1/x"])
    assert result.exit_code == 1 and "cannot be used" in result.stderr and "refused" in result.stderr
    assert "Traceback" not in result.stderr and "secret" not in result.stderr and len(result.stderr.splitlines()) <= 2
