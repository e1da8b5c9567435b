"""`epigen tune` and `epigen.tune` as their users see them: what is asked for, progress, table, JSON, Ctrl-C, and what a second run goes on from.

Where a GPU would measure, a recorded sweep answers.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import persistent
from checkout import ROOT
from click.testing import CliRunner
from golden import Golden
from machines import NO_GPU, Machine, machine

import epigen
from bench.record import DATA
from epigen import api, cli, gpus, settings
from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.commands import tune as cli_tune
from epigen.commands.live import Live
from epigen.db.database import Database
from epigen.dtypes import BF16, FP32
from epigen.errors import CallError, CheckError, TuneError
from epigen.ir.program import graph_of
from epigen.runtime.device import THIS_MACHINE
from epigen.tuning import fleet, remembered, report, request, table
from epigen.tuning.runner import GpuRunner, Replay, compile_workers_for
from epigen.tuning.search import Progress, Result
from epigen.tuning.task import Baseline, Outcome, Task
from epigen.tuning.tune import Tuned, tune_one

SWEEPS = sorted(DATA.glob("sweep_*.json"))
RECORDED = table.read(DATA / "sweep_skinny.json")
H200 = RECORDED.task.target
TWO = machine(H200, H200)
ONE = ("relu(mm + bias)", "--shape", "16x4096x4096")


def run(*arguments: object, status: int = 0, on: Machine = TWO) -> Any:
    done = CliRunner().invoke(cli.main, ["tune", *map(str, arguments)], prog_name="epigen", obj=on)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    assert "Traceback" not in done.output
    return done


class Tuner:
    """Stands in for `tune_all`: tunes over the recorded sweep, whatever the shape, and notes what it was asked."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.options: dict[str, Any] = {}
        self.fails: Callable[[Task], bool] = lambda _: False
        self.stops_after: int | None = None
        self.partial = False

    def __call__(
        self, tasks: Sequence[Task], database: Database, *, trials: int, budget_s: float, seed: int, report: Callable[[int, Progress], None],
        done: Callable[[int, Tuned], None] = lambda _i, _t: None, **options: Any,
    ) -> list[Tuned]:  # fmt: skip
        self.tasks, self.options = list(tasks), options | {"trials": trials, "budget_s": budget_s, "seed": seed}
        found = []
        for i, task in enumerate(tasks):
            if i == self.stops_after:
                break
            runner = Replay(RECORDED.rows, RECORDED.baseline)
            tuned = tune_one(task, database, trials=trials, seed=seed, runner=runner, report=lambda p, i=i: report(i, p))  # type: ignore[misc]
            if self.fails(task):
                tuned = Tuned(tuned.problem, None, None, "none of 4 configs gave a right answer in time; 4 ended as wrong: planted")
            elif self.partial and i == len(tasks) - 1:
                assert tuned.result
                tuned = replace(tuned, result=replace(tuned.result, complete=False))
            found.append(tuned)
            done(i, tuned)
        return found


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Tuner]:
    """In place of the tuning; cache and database lie in the test's folder."""
    made = Tuner()
    monkeypatch.setattr(fleet, "tune_all", made)
    monkeypatch.setenv("EPIGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EPIGEN_DB", str(tmp_path / "db"))
    api.database.cache_clear()
    yield made
    api.database.cache_clear()


# -- what is asked for


def test_several_programs_and_shapes_in_one_go(tuner: Tuner, tmp_path: Path) -> None:
    run(
        "relu(mm + bias)", "gelu(mm + bias)", "--shape", "16x4096x4096", "--shape", "64x4096x4096", "--dtype", "bf16", "--trials", 4, "--seed", 7, "--budget", 9
    )
    assert [(t.graph.text, t.shape) for t in tuner.tasks] == [
        (program, (m, 4096, 4096)) for program in ("relu(mm + bias)", "gelu(mm + bias)") for m in (16, 64)
    ]  # fmt: skip
    assert {(t.a, t.b, t.inputs, t.layout, t.seed) for t in tuner.tasks} == {(BF16, BF16, (BF16,), "nt", 7)}
    assert (tuner.options["trials"], tuner.options["budget_s"], tuner.options["seed"], tuner.options["devices"]) == (4, 9.0, 7, (0,))
    assert len(Database(tmp_path / "db", seeds=()).records()) == 4


def test_suites_come_after_the_programs_and_each_problem_once(tuner: Tuner, tmp_path: Path) -> None:
    suite = tmp_path / "my.toml"
    suite.write_text('[[problem]]\nprogram = ["relu( mm+bias )", "mm"]\nshapes = ["16x4096x4096", "32x4096x4096"]\n')
    run(*ONE, "--suite", suite, "--suite", suite, "--trials", 4)
    assert [(t.graph.text, t.shape[0]) for t in tuner.tasks] == [("relu(mm + bias)", 16), ("relu(mm + bias)", 32), ("mm", 16), ("mm", 32)]
    suite.write_text("[[problem]]\n")
    assert run("--suite", suite, status=1).stderr.splitlines() == [
        f"{suite}: problem 1, program: this field is missing",
        f"{suite}: problem 1, shapes: this field is missing",
    ]


def test_a_dtype_by_torchs_name(tuner: Tuner) -> None:
    for given, name in (("float16", "fp16"), ("torch.bfloat16", "bf16"), ("half", "fp16"), ("float32", "fp32"), ("fp32", "fp32")):
        run(*ONE, "--trials", 1, "--dtype", given)
        assert tuner.tasks[0].a.name == name
    assert "--dtype [fp32|fp16|bf16|fp8e4m3|fp8e5m2|int8]" in run("--help").stdout


def test_where_the_winners_go_can_be_said(tuner: Tuner, tmp_path: Path) -> None:  # noqa: ARG001
    run(*ONE, "--trials", 4, "--db", tmp_path / "mine.json")
    ((file, record),) = Database(tmp_path / "mine.json", seeds=()).records()
    assert file == tmp_path / "mine.json" and record.shape == (16, 4096, 4096) and not (tmp_path / "db").exists()


def test_devices(tuner: Tuner, golden: Golden) -> None:
    for given, chosen in (("all", (0, 1)), ("1", (1,)), ("1,0", (1, 0))):
        run(*ONE, "--trials", 1, "--devices", given)
        assert tuner.options["devices"] == chosen
    for wrong in ("", "0,", "-1", "both", "0 1", "0,2"):
        run(*ONE, "--devices", wrong, status=2)
    mixed = machine(*(replace(H200, part=f"part {index}") for index in (0, 1)))
    golden(run(*ONE, "--devices", "all", status=2, on=mixed).stderr)


@pytest.mark.parametrize(
    ("nodes", "visible", "count"),
    [
        ((), None, 0),
        (("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"), None, 2),
        (("nvidiactl", "nvidia0", "nvidia1"), "1", 1),
        (("nvidiactl", "nvidia0"), "", 0),
        (("nvidiactl", "nvidia0"), "GPU-a,GPU-b", 1),
        (("kfd",), None, 1),
        (("dxg",), None, 1),
    ],
)
def test_how_many_gpus_there_seem_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[str, ...], visible: str | None, count: int) -> None:
    for node in nodes:
        (tmp_path / node).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert THIS_MACHINE.likely(tmp_path) == count


@pytest.mark.parametrize(("asked", "gpus"), [(None, 1), ("all", 3), ((0, 2), 2), ((0, 1, 2, 3), 3)])
def test_as_many_workers_import_early_as_gpus_will_tune(monkeypatch: pytest.MonkeyPatch, asked: tuple[int, ...] | str | None, gpus: int) -> None:
    begun: list[GpuRunner] = []
    monkeypatch.setattr(GpuRunner, "start", lambda runner: begun.append(runner))
    assert cli_tune._started(Machine(seems=3), asked) == begun and [len(r.compile_workers) for r in begun] == [compile_workers_for(gpus)] * gpus


def test_without_a_gpu_every_way_in_says_so(tmp_path: Path, golden: Golden) -> None:
    suite = tmp_path / "my.toml"
    suite.write_text('[[problem]]\nprogram = "mm"\nshapes = "1x1x1"\n')
    for way in (ONE, ("--suite", suite), (*ONE, "--devices", "all")):
        assert "Error: no GPU is at hand to tune on; --replay TABLE searches recorded measurements" in run(*way, status=2, on=NO_GPU).stderr
    with golden.raises(TuneError):
        epigen.tune("relu(mm)", "64x64x64", machine=NO_GPU)


@pytest.mark.parametrize("arguments", [("relu(mm + bais)", "--shape", "1x1x1"), ("--replay", SWEEPS[0], "--fresh")])
def test_nothing_is_tuned_after_a_mistake(tuner: Tuner, arguments: tuple[object, ...]) -> None:
    """tests/commands/test_mistakes.py has what is said."""
    run(*arguments, status=2 if "--replay" in arguments else 1)
    assert not tuner.tasks


def test_a_mistake_in_a_program_comes_before_the_lack_of_a_gpu() -> None:
    run("relu(mm + bais)", "--shape", "1x1x1", status=1, on=NO_GPU)


# -- what comes out


def test_the_table_holds_what_was_found_in_120_columns() -> None:
    done = run(*(a for path in SWEEPS for a in ("--replay", path)), "--trials", 20)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0].split() == ["M", "x", "N", "x", "K", "us", "vs", "mm", "vs", "mm+1", "bound", "by", "search", "winner"]
    assert "dz = drelu(mm, mask); dz, bgrad(dz)  fp16 nn" in lines
    rows = [line for line in lines if re.match(r"  \d+x\d+x\d+ ", line)]
    assert len(rows) == len(SWEEPS)
    (skinny,) = (r for r in rows if "16x4096x4096" in r)
    shape, us, vs_mm, vs_unfused, limit, share, trials, _in, seconds, *winner = skinny.split()
    assert (shape, limit, _in) == ("16x4096x4096", "memory", "in") and int(trials) <= 20 and seconds.endswith("s") and winner[0] in schedules.SCHEDULES
    assert float(vs_mm) == pytest.approx(RECORDED.baseline.mm_us / float(us), abs=0.01)
    assert float(vs_unfused) == pytest.approx(RECORDED.baseline.unfused_us / float(us), abs=0.01)
    # 16x4096x4096 fp16 reads its 33.5 MB of weights at least: 7.9 us at the 4.28 TB/s that an H200 copies with
    assert float(share.rstrip("%")) == pytest.approx(100 * 7.9 / float(us), abs=3)
    assert lines[-1].startswith("search: ") and "trials in" in lines[-1]


def test_where_the_search_spent_its_time_is_summed_up() -> None:
    tuned = tune_one(RECORDED.task, None, trials=4, runner=Replay(RECORDED.rows, RECORDED.baseline))
    assert tuned.result
    slow = replace(tuned, result=replace(tuned.result, seconds=61.0, spent={"compile": 20.0, "measure": 40.5, "final": 0.01}))
    text = report.table([(RECORDED.task, slow)] * 3)
    assert text.splitlines()[-1].startswith("search: 12 trials in 3 min (measure 2 min, compile 60 s)")
    assert report.record(RECORDED.task, slow)["spent_s"] == {"compile": 20.0, "measure": 40.5, "final": 0.01}


def test_json_has_everything(tuner: Tuner) -> None:
    tuner.fails = lambda task: task.shape[0] == 64
    done = run(*ONE, "--shape", "64x4096x4096", "--trials", 6, "--json", status=1)
    found, failed = json.loads(done.stdout)
    assert found["program"] == "relu(mm + bias)" and found["shape"] == [16, 4096, 4096] and (found["dtype"], found["layout"]) == ("fp16", "nt")
    assert found["gpu"] == "NVIDIA H200" and found["capability"] == "9.0" and found["complete"] is True
    assert schedules.from_mapping(found["config"]) in RECORDED.rows
    assert found["vs_mm"] == pytest.approx(found["mm_us"] / found["median_us"], abs=1e-3) and found["spread_us"] >= 0
    assert found["vs_unfused"] == pytest.approx(found["unfused_us"] / found["median_us"], abs=1e-3)
    assert sum(found["trials"].values()) <= 6 and found["seconds"] > 0 and found["spent_s"] is not None
    assert found["limit"] == "memory" and 0 < found["floor_us"] < found["median_us"] and found["model"]["us"] > 0
    assert found["record"] == json.loads(CliRunner().invoke(cli.main, ["db", "list", "--json"]).stdout)[0]["name"]
    assert failed["shape"] == [64, 4096, 4096] and failed["error"].endswith("4 ended as wrong: planted") and "median_us" not in failed


def test_a_problem_without_a_working_config_fails_and_the_others_are_shown(tuner: Tuner, golden: Golden) -> None:
    tuner.fails = lambda task: task.shape[0] == 64
    done = run(*ONE, "--shape", "64x4096x4096", "--trials", 4, status=1)
    assert "  64x4096x4096      failed: none of 4 configs gave a right answer in time; 4 ended as wrong: planted" in done.stdout
    assert re.search(r"^  16x4096x4096 +\d", done.stdout, re.MULTILINE)
    golden(done.stderr.splitlines()[-1])


def test_off_a_terminal_progress_is_a_line_a_finished_problem(tuner: Tuner, golden: Golden) -> None:
    tuner.fails = lambda task: task.shape[0] == 64
    first, second = run(*ONE, "--shape", "64x4096x4096", "--trials", 4, status=1).stderr.splitlines()[:2]
    assert re.fullmatch(
        r"1/2 relu\(mm \+ bias\) 16x4096x4096 fp16 nt: \d+\.\d\d us, \d\.\d\dx the speed of the vendor's product alone \[.*\]; \d trials? in .* s.*", first
    )
    golden(second)


def test_a_result_reads_well_when_printed() -> None:
    tuned = tune_one(RECORDED.task, None, trials=4, runner=Replay(RECORDED.rows, RECORDED.baseline))
    text = str(tuned)
    assert text.startswith("relu(mm + bias) 16x4096x4096 fp16 nt: ") and " us, " in text and "num_warps=" in text and len(text) < 200


# -- Ctrl-C


def test_ctrl_c_shows_and_keeps_what_was_found(tuner: Tuner, tmp_path: Path, golden: Golden) -> None:
    tuner.stops_after = 2
    done = run(*ONE, "--shape", "32x4096x4096", "--shape", "64x4096x4096", "--trials", 4, status=130)
    assert str(tmp_path / "db") in done.stderr.splitlines()[-1]
    golden(done.stderr.splitlines()[-1], "kept")
    assert len(re.findall(r"^  \d+x4096x4096 ", done.stdout, re.MULTILINE)) == 2
    tuner.stops_after, tuner.partial = None, True
    done = run(*ONE, "--shape", "32x4096x4096", "--trials", 4, "--json", status=130)
    assert done.stderr.splitlines()[-1].endswith("1 finished, 1 in part of 2; the same command goes on from there")
    assert [row["complete"] for row in json.loads(done.stdout)] == [True, False]
    tuner.stops_after = 0
    golden(run(*ONE, status=130).stderr)


def test_ctrl_c_that_gets_away_is_no_traceback(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet, "tune_all", interrupted)
    golden(run(*ONE, status=130).stderr, "found nothing")
    monkeypatch.setattr(Machine, "indices", interrupted)
    golden(run(*ONE, status=130).stderr, "measured nothing")
    assert not tuner.tasks


def test_ctrl_c_from_a_terminal_ends_a_replay_with_a_table() -> None:
    command = [sys.executable, "-m", "epigen", "tune", *(a for _ in range(12) for path in SWEEPS for a in ("--replay", str(path)))]
    environment = settings.child_environment(interpret=False)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert first.startswith("1/84 ")
    assert process.returncode == 130, err
    assert out.startswith("  M x N x K") and re.search(r"^  \d+x\d+x\d+ ", out, re.MULTILINE)
    assert "Traceback" not in err and re.search(r"^interrupted: what was found is kept: \d+ finished.* of 84$", err.splitlines()[-1])


# -- what a second run goes on from


def test_trials_are_kept_a_problem_in_the_cache_unless_told_otherwise(tuner: Tuner, tmp_path: Path) -> None:
    run(*ONE, "--shape", "32x4096x4096", "--trials", 1)
    where = tuner.options["storage"]
    paths = [Path(where(task)) for task in tuner.tasks]
    assert all(p.parent == tmp_path / "cache" / "studies" and p.parent.is_dir() and p.suffix == ".journal" for p in paths) and len(set(paths)) == 2
    assert paths[0].name.startswith("nvidia_h200_16x4096x4096_")
    run(*ONE, "--trials", 1, "--storage", "my.journal")
    assert tuner.options["storage"] == "my.journal"


def test_a_journal_belongs_to_what_is_measured() -> None:
    task = RECORDED.task
    mine = remembered.journal(task)
    assert remembered.journal(replace(task, graph=graph_of("relu( mm+bias )"), seed=3, device=1)) == mine
    others = [
        replace(task, graph=graph_of("gelu(mm + bias)")), replace(task, shape=(16, 4096, 8192)), replace(task, a=BF16, b=BF16), replace(task, inputs=(FP32,)),
        replace(task, layout="nn"), replace(task, target=replace(task.target, part="NVIDIA H100")),
    ]  # fmt: skip
    assert len({mine, *map(remembered.journal, others)}) == 1 + len(others)


def test_a_new_version_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = remembered.journal(RECORDED.task)
    monkeypatch.setattr(epigen, "__version__", "9.9.9")
    assert remembered.journal(RECORDED.task) != before


def test_fresh_forgets_the_named_problems_alone(tuner: Tuner) -> None:
    run(*ONE, "--shape", "32x4096x4096", "--trials", 1)
    paths = [Path(remembered.default_storage(task) or "") for task in tuner.tasks]
    for path in paths:
        path.write_text("trials")
        path.with_name(f"{path.name}.lock").write_text("")
    run(*ONE, "--trials", 1)
    assert paths[0].exists()
    run(*ONE, "--trials", 1, "--fresh")
    assert [p.exists() for p in paths] == [False, True] and not paths[0].with_name(f"{paths[0].name}.lock").exists()


def test_what_is_missing_alone(tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version of Triton had tuned is missing, and what was tuned for another GPU."""
    run(*ONE, "--trials", 1)
    done = run(*ONE, "--shape", "32x4096x4096", "--trials", 1, "--missing")
    assert [t.shape[0] for t in tuner.tasks] == [32]
    assert done.stderr.splitlines()[0] == "left out: 1 of 2 problems, which were tuned for this GPU and Triton"
    all_of_it = run(*ONE, "--shape", "32x4096x4096", "--trials", 1, "--missing")
    assert tuner.tasks == [] and all_of_it.stdout == "" and all_of_it.stderr.startswith("left out: 2 of 2 problems")
    assert json.loads(run(*ONE, "--missing", "--json").stdout) == []
    assert len(epigen.tune("relu(mm + bias)", [(16, 4096, 4096), (48, 4096, 4096)], trials=1, missing=True, machine=TWO)) == 1
    assert [t.shape[0] for t in tuner.tasks] == [48]
    h100 = gpus.by_name("H100").target
    run(*ONE, "--trials", 1, "--missing", on=machine(h100))
    assert len(tuner.tasks) == 1
    monkeypatch.setattr(request, "triton_version", lambda: "3.99.0")
    run(*ONE, "--trials", 1, "--missing")
    assert len(tuner.tasks) == 1 and len(Database(tmp_path / "db", seeds=()).records()) == 4


def test_what_is_shipped_is_not_missing(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the models' suite is, for the H200."""
    monkeypatch.setattr(request, "triton_version", lambda: "3.6.0")
    done = run("--suite", ROOT / "bench" / "suite_models.toml", *ONE, "--shape", "48x4096x4096", "--trials", 1, "--missing")
    assert [task.shape for task in tuner.tasks] == [(48, 4096, 4096)] and "of 1" in done.stderr


def test_a_cache_that_cannot_be_written_remembers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("EPIGEN_CACHE", str(tmp_path / "cache"))
    assert remembered.default_storage(RECORDED.task) is None


# -- the live line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(
    trials: int = 17, seconds: float = 34.0, best_us: float = 16.9, counts: dict[str, int] | None = None, mm_us: float | None = 18.9, **more: Any
) -> Progress:
    best: KernelConfig | None = next(iter(RECORDED.rows)) if best_us else None
    baseline = None if mm_us is None else Baseline(mm_us, 20.0)
    return Progress(
        trials=trials, wanted=48, best=best, best_us=best_us, baseline=baseline, counts=Counter({"ok": trials} if counts is None else counts), seconds=seconds, **more
    )  # fmt: skip


def test_a_line_of_progress_tells_trials_best_ratio_time_left_and_rejections(golden: Golden) -> None:
    text = report.progress(RECORDED.task, seen(counts={"ok": 10, "slower": 4, "wrong": 0, "out_of_resources": 2, "timeout": 1}))
    golden(text, "progress")
    assert report.progress(RECORDED.task, seen(), 3000.0).endswith("62 s left (all: 50 min)")
    assert report.progress(RECORDED.task, seen(mm_us=None)).endswith("best 16.90 us, 62 s left")
    nothing = report.progress(RECORDED.task, seen(trials=0, seconds=0.0, best_us=0.0, mm_us=None))
    golden(nothing, "begun")
    long = replace(RECORDED.task, graph=graph_of("gelu(mm + bias) * gate[m,n] + residual * 0.125 + shift[n]"))
    assert report.name(long) == "gelu(mm + bias) * gate[m,n] + residua... 16x4096x4096 fp16 nt"


def test_the_budget_bounds_the_time_left() -> None:
    assert "10 s left" in report.progress(RECORDED.task, seen(budget_s=44.0))


def test_time_left_of_all_counts_what_has_not_begun() -> None:
    one = seen(trials=24, seconds=30.0)  # 30 s more
    assert report.left_s({}, [], 5) is None
    assert report.left_s({0: one}, [], 1) == pytest.approx(30)
    assert report.left_s({1: one}, [50.0, 70.0], 5) == pytest.approx(30 + 2 * 60)  # two waiting, each as long as the finished ones
    assert report.left_s({0: one}, [], 3) == pytest.approx(30 + 2 * 60)  # as long as this one
    assert report.left_s({0: one, 1: one}, [60.0], 5) == pytest.approx((60 + 2 * 60) / 2)  # two at a time
    assert report.left_s({0: one, 1: seen(trials=0, seconds=0.0)}, [], 2) == pytest.approx(60)


def test_a_terminal_shows_a_line_a_search_and_never_wraps(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((60, 24)))
    stream = Terminal()
    live = Live([RECORDED.task] * 3, stream)
    live.start()
    golden(stream.getvalue())

    def drawn(act: Callable[[], None]) -> str:
        before = len(stream.getvalue())
        live._last = 0.0
        act()
        return stream.getvalue()[before:]

    first = drawn(lambda: live.report(0, seen()))
    assert first.startswith("\r\033[J1/3 relu(mm + bias) 16x4096x4096 fp16 nt  17/48 trials")
    both = drawn(lambda: live.report(1, seen(trials=3)))
    assert both.startswith("\r\033[J1/3 ") and "\n2/3 relu" in both and all(len(line) < 60 + len("\r\033[J") for line in both.split("\n"))
    tuned = Tuned(tune_one(RECORDED.task, None, trials=1, runner=Replay(RECORDED.rows, RECORDED.baseline)).problem, None, None, "no luck")
    finished = drawn(lambda: live.done(0, tuned))
    assert finished.startswith("\r\033[1A\033[J1/3 relu(mm + bias) 16x4096x4096 fp16 nt: no luck\n2/3 relu")
    assert drawn(live.clear) == "\r\033[J" and drawn(live.clear) == ""


def test_a_terminal_is_not_flooded() -> None:
    stream = Terminal()
    live = Live([RECORDED.task], stream)
    for trials in range(1, 1001):
        live.report(0, seen(trials=trials))
    assert 0 < stream.getvalue().count("\r\033[J") + 1 < 20
    assert Live([RECORDED.task], io.StringIO()).terminal is False


def test_a_process_without_an_error_stream_draws_nothing() -> None:
    live = Live([RECORDED.task] * 2, None)
    live.start()
    live.report(0, seen())
    live.clear()
    assert not live.terminal


def test_one_problem_on_a_terminal_needs_no_line_of_its_own() -> None:
    stream = Terminal()
    live = Live([RECORDED.task], stream)
    config, outcome = next(iter(RECORDED.rows.items()))
    problem = tune_one(RECORDED.task, None, trials=1, runner=Replay(RECORDED.rows, RECORDED.baseline)).problem
    live.report(0, seen())
    live.done(0, Tuned(problem, Result(config, outcome, Baseline(1, 1), {config: outcome}), None))
    assert "\n" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (89.6, "90 s"), (90, "2 min"), (3000, "50 min"), (5400, "1.5 h"), (86400, "24.0 h")]
)
def test_a_time_is_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert report.span(seconds) == text


def test_a_config_in_little_space() -> None:
    config = schedules.config("tiled", block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3)
    assert report.brief(config) == "tiled 128x256x64 group_m=8 warps=8 stages=3"
    assert report.brief(schedules.config("library", block_m=8, block_n=128, num_warps=4)) == "library 8x128 warps=4"
    assert report.brief(persistent(flatten=0, fused_finalize=1)) == "persistent 64x64x32 group_m=2 subtiles=1 tma_store=1 warps=4 stages=3 fused_finalize=1"


def test_an_interrupted_search_that_has_no_baseline_is_shown_without_ratios() -> None:
    config = next(c for c, o in RECORDED.rows.items() if o.kind == "ok")
    problem = tune_one(RECORDED.task, None, trials=1, runner=Replay(RECORDED.rows, RECORDED.baseline)).problem
    tuned = Tuned(problem, Result(config, Outcome("ok", 20.0), Baseline(0.0, 0.0), {}, complete=False), None)
    row = report.table([(RECORDED.task, tuned)]).splitlines()[2]
    assert row.split()[:4] == ["16x4096x4096", "20.00", "-", "-"] and row.endswith("(interrupted)")
    assert report.record(RECORDED.task, tuned)["vs_mm"] is None and str(tuned).endswith("(interrupted)")


# -- from Python


def test_from_python(tuner: Tuner, tmp_path: Path) -> None:
    told: list[int] = []
    found = epigen.tune(
        ["relu(mm + bias)", "mm"], ["16x4096x4096", (32, 4096, 4096)], dtype=torch.bfloat16, layout="nn", devices="all", trials=4, budget_s=60, seed=2, machine=TWO,
        report=lambda index, progress: told.append(index),  # noqa: ARG005
    )  # fmt: skip
    assert [(t.problem.program, t.problem.shape[0], t.problem.a, t.problem.layout) for t in found] == [
        (program, m, "bf16", "nn") for program in ("relu(mm + bias)", "mm") for m in (16, 32)
    ]  # fmt: skip
    assert set(told) == {0, 1, 2, 3} and isinstance(found[0], epigen.Tuned)
    assert (tuner.options["devices"], tuner.options["budget_s"], tuner.options["seed"]) == ((0, 1), 60, 2)
    assert Path(tuner.options["storage"](tuner.tasks[0])).parent == tmp_path / "cache" / "studies"
    assert len(Database(tmp_path / "db", seeds=()).records()) == 4
    kernel = epigen.compile("relu(mm + bias)")
    plan = kernel.plan((16, 4096, 4096), dtype=BF16, target=H200, layout="nn")
    assert plan.choice.why.endswith("(exact)") and found[0].result and plan.choice.config == found[0].result.winner


def test_from_python_one_of_each(tuner: Tuner, tmp_path: Path) -> None:
    for shape in ("16x4096x4096", (16, 4096, 4096), [(16, 4096, 4096)]):
        (one,) = epigen.tune("relu(mm)", shape, trials=1, database=tmp_path / "mine.json", storage="x.journal", machine=TWO)
        assert one.problem.shape == (16, 4096, 4096) and one.problem.a == "fp16" and one.problem.layout == "nt"
    assert tuner.options["storage"] == "x.journal" and tuner.options["budget_s"] == float("inf")
    epigen.tune("relu(mm)", "16x4096x4096", trials=1, database=Database(tmp_path / "mine.json"), fresh=True, machine=TWO)
    assert len(Database(tmp_path / "mine.json", seeds=()).records()) == 1 and not (tmp_path / "db").exists()


def test_invariant_programs_are_tuned_by_themselves(tuner: Tuner, tmp_path: Path) -> None:
    """The record is theirs alone: a kernel that may split k does not find it."""
    (found,) = epigen.tune("relu(mm + bias)", "16x4096x4096", dtype="bf16", invariant="m", trials=4, machine=TWO)
    assert found.result and str(found).startswith("relu(mm + bias) 16x4096x4096 bf16 nt invariant: ")
    result = run("relu(mm + bias)", "--shape", "16x8192x4096", "--dtype", "bf16", "--invariant", "m")
    assert "relu(mm + bias)  bf16 invariant nt" in result.stdout and [t.invariant for t in tuner.tasks] == ["m"]
    assert [r.invariant for _, r in Database(tmp_path / "db", seeds=()).records()] == ["m", "m"]
    for invariant, exact in (("m", True), (None, False)):
        plan = epigen.compile("relu(mm + bias)", invariant=invariant).plan((16, 4096, 4096), dtype=BF16, target=H200, layout="nt")
        assert plan.choice.why.endswith("(exact)") == exact


def test_from_python_precision_is_that_of_the_process(tuner: Tuner) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        epigen.tune("mm", "16x4096x4096", dtype="fp32", trials=1, machine=TWO)
        assert tuner.tasks[0].precision == "tf32"
        epigen.tune("mm", "16x4096x4096", dtype="fp32", trials=1, precision="ieee", machine=TWO)
        assert tuner.tasks[0].precision == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_from_python_mistakes_are_refused(tuner: Tuner) -> None:
    for error, said, arguments in (
        (CheckError, "did you mean bias", {"programs": "mm + bais"}),
        (CallError, "is not of the form MxNxK", {"shapes": "64"}),
        (CallError, "is not of the form MxNxK", {"shapes": (64, 64)}),
        (CallError, "unknown dtype 'int64'", {"dtype": torch.int64}),
        (CallError, "unknown layout 'nx'", {"layout": "nx"}),
        (CallError, "unknown precision 'highest'", {"precision": "highest"}),
        (CallError, "unknown invariant 'k'", {"invariant": "k"}),
        (CallError, "all M of relu.mm. fp32 have one config.*nothing to tune", {"invariant": "m", "dtype": "fp32"}),
        (CallError, "trials=0", {"trials": 0}),
        (CallError, "seed=-1: a seed is", {"seed": -1}),
        (CallError, "budget_s=nan: a problem's time", {"budget_s": float("nan")}),
        (TuneError, "there is no GPU 7", {"devices": [7]}),
    ):
        with pytest.raises(error, match=said):
            epigen.tune(**({"programs": "relu(mm)", "shapes": "64x64x64", "machine": TWO} | arguments))  # type: ignore[arg-type]
    assert not tuner.tasks
