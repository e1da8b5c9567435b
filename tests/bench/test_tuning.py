"""The scripts behind the claims about tuning, where there is no GPU: what they reckon, over recorded sweeps in place of measurements."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cases import warp_specialized
from golden import Golden
from machines import NO_GPU, machine

from bench import borrow, cold, command, devices, driver, host, readme, readme_tuning, record, repeat, tables
from bench.record import Report
from epigen.choose import choose, rule
from epigen.codegen.spec import Choice, KernelConfig
from epigen.db.database import Database
from epigen.db.records import Record
from epigen.dtypes import FP16, FP32, INT8, DType
from epigen.ir.program import graph_of
from epigen.runtime.loader import triton_version
from epigen.tuning import suite, table
from epigen.tuning.request import every
from epigen.tuning.runner import Replay
from epigen.tuning.table import Table
from epigen.tuning.task import Comparison, Outcome, Task

SQUARE = table.read(record.DATA / "sweep_square.json")
H200 = SQUARE.task.target


def replay(recorded: Table = SQUARE) -> Replay:
    return Replay(recorded.rows, recorded.baseline)


# -- the command


def test_the_command_runs_as_a_new_process_with_nothing_of_earlier_ones() -> None:
    paths = [str(record.DATA / f"sweep_{name}.json") for name in ("skinny", "drelu_bgrad")]
    run = command.tune(["--replay", paths[0], "--replay", paths[1], "--trials", "12"])
    assert [p["shape"] for p in run.problems] == [[16, 4096, 4096], [4096, 4096, 1024]] and not run.failed
    assert 0 < sum(run.search_s) <= run.searching_s < run.wall_s, "the lines that tell of both problems are found, one after the other"
    told = run.record()
    assert told["problems"][0]["trials"] and told["problems"][1]["winner"] and json.dumps(told)
    row = cold.one(command.Run(9.0, run.searching_s, run.problems[:1]))
    assert row["wall_s"] == 9.0 and row["seconds"] > 0 and row["part"] == "one"
    whole, rows = cold.together(run)
    assert whole["count"] == 2 and whole["wall_a_problem_s"] == pytest.approx(run.wall_s / 2, abs=0.01)
    assert rows == [{"part": "suite", **problem} for problem in told["problems"]]
    gain, rows = devices.gained("suite", command.Run(20.0, 18.0, run.problems), command.Run(12.0, 9.0, run.problems))
    assert (gain["searching"], gain["failed"]) == (2.0, []) and gain["wall"] == pytest.approx(1.667)
    assert rows == [{"part": "suite", "gpus": gpus, **problem} for gpus in (1, 2) for problem in told["problems"]]


def test_two_searches_at_a_time_are_counted_once() -> None:
    """Two GPUs: one search from 5 to 15 s, the other from 6 to 12 s."""
    problems = [{"program": "mm", "shape": [m, 64, 64], "dtype": "fp16", "layout": "nt", "seconds": s} for m, s in ((16, 10.0), (32, 6.0))]
    told = [(1.0, "talk"), (12.0, "1/2 mm 32x64x64 fp16 nt: 9.00 us"), (15.0, "2/2 mm 16x64x64 fp16 nt: 8.00 us")]
    assert command._searching_s(told, problems) == 10.0
    failed = [*problems, {"program": "mm", "shape": [64, 64, 64], "dtype": "fp16", "layout": "nt", "error": "none of 4 configs"}]
    assert command._searching_s([*told, (20.0, "3/3 mm 64x64x64 fp16 nt: none of 4 configs")], failed) == 10.0
    assert command.Run(1.0, 1.0, tuple(failed)).failed == ["mm 64x64x64 fp16 nt: none of 4 configs"]
    assert not cold.together(command.Run(3.0, 1.0, tuple(failed)))[0]["holds"], "a problem without a winner is no success"


@pytest.mark.slow
def test_a_command_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=r"status 2(.|\n)*no GPU"):
        command.tune(["mm", "--shape", "64x64x64"])
    with golden.raises(RuntimeError, "unknown name"):
        command.tune(["relu(mm + bais)", "--shape", "64x64x64"])


def test_part_of_a_suite_is_a_suite() -> None:
    asked = suite.read(cold.SUITE)[:20]
    assert len(asked) == 20 and suite.parse(command.suite_text(asked)) == asked
    other = every(["where(mm > 0, mm, 2 * mm)"], ["1x2x3"], ["fp32"], ["tn"], "tf32")
    assert suite.parse(command.suite_text(other)) == other


# -- repeated tunings


def test_repeated_tunings_are_compared_with_the_best_of_their_winners() -> None:
    found = repeat.repeated(SQUARE.task, replay(), range(3), 2)
    times = {str(c): o.median_us for c, o in SQUARE.rows.items()}
    best = min(times[r["winner"]] for r in found["repetitions"])
    for row in found["repetitions"]:
        assert row["us"] == pytest.approx(times[row["winner"]], abs=1e-3) and row["behind"] == pytest.approx(times[row["winner"]] / best - 1, abs=1e-4)
    assert found["worst"] == max(r["behind"] for r in found["repetitions"]) and found["best_us"] == pytest.approx(best, abs=1e-3)
    assert found["holds"] == (found["worst"] <= repeat.CLAIMED) and json.dumps(found)


def test_a_winner_that_is_wrong_when_checked_again_breaks_the_claim() -> None:
    class Forgetful(Replay):
        compared = 0

        def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
            self.compared += 1
            return super().compare(configs)

        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            # each tuning compares twice: the vendor's product at its begin, and at its end the best
            return Outcome("wrong", detail="planted") if limit_us == 0.0 and self.compared >= 4 else super().measure(config, limit_us)

    found = repeat.repeated(SQUARE.task, Forgetful(SQUARE.rows, SQUARE.baseline), range(2), 2)
    assert not found["holds"] and found["worst"] is None and {w["outcome"] for w in found["winners"].values()} == {"wrong"}


# -- borrowing


def tuned_record(task: Task, config: KernelConfig, **more: object) -> Record:
    run = {"median_us": 10.0, "spread_us": 0.1, "baseline_us": 10.0, "unfused_us": 12.0, "trials": {"ok": 48}, "date": "2026-11-05T12:00:00Z"}
    return Record.make(task.problem, config, **(run | {"triton": triton_version(), "torch": "2.11.0", "epigen": "0.1.0"} | more))


def right(recorded: Table = SQUARE) -> list[KernelConfig]:
    return sorted((c for c, o in recorded.rows.items() if o.kind == "ok"), key=lambda c: recorded.rows[c].median_us)


def database(text: str = "relu(mm + bias)", extents: Sequence[int] = (2048, 4096, 8192, 16384, 32768), **more: str) -> list[Record]:
    """Records of one program at several M; each with a config of its own."""
    tasks = [replace(SQUARE.task, graph=graph_of(text), shape=(m, 4096, 4096), **more) for m in extents]
    return [tuned_record(task, config) for task, config in zip(tasks, right()[: len(tasks)], strict=True)]


def test_every_second_shape_is_held_out() -> None:
    records = [*database(), *database("gelu(mm + bias)", (2048, 4096, 8192, 16384)), *database("mm", (2048, 4096, 8192)), *database(layout="nn")]
    cases = borrow.held_out(records, seed=0)
    held = [c.record.key for c in cases]
    shapes = {c.record.shape for c in cases}
    assert len(held) == len(set(held)) and len(shapes) == 2
    for case in cases:
        assert {r.key for r in case.others} == {r.key for r in records if r.shape not in shapes}, "no program's record of a held-out shape lends"
    assert {r.key for r in records if r.shape in shapes} == set(held)
    assert borrow.held_out(records[::-1], seed=0) == cases
    assert any([c.record.key for c in borrow.held_out(records, seed)] != held for seed in range(1, 5))


def test_one_record_a_problem_is_left() -> None:
    one = database()[0]
    old, new = (tuned_record(SQUARE.task, right()[0], triton=v) for v in ("3.4.0", "3.10.0"))
    here = tuned_record(SQUARE.task, right()[0], triton="3.5.0")
    assert borrow.of_this_version([one, new, old, here], "3.5.0") == [one, here]
    assert borrow.of_this_version([old, new], "3.5.0") == [new]


@pytest.mark.parametrize(
    "text", ["relu(mm + bias)", "dz = drelu(mm, mask); dz, bgrad(dz)", "mm", "mm * alpha + residual + bias", "z = gelu(mm + bias); z, bitmask(z > 0)"]
)
@pytest.mark.parametrize(("dtype", "inputs", "precision"), [(FP16, FP16, "ieee"), (INT8, FP32, "ieee"), (FP32, FP32, "tf32")])
def test_a_record_tells_the_task_it_came_from(text: str, dtype: DType, inputs: DType, precision: str) -> None:
    task = Task(graph_of(text), (4096, 2048, 512), dtype, dtype, (inputs,), "nt", precision, H200)
    again = borrow.task_of(tuned_record(task, right()[0]), H200)
    assert again.problem == task.problem


def test_what_is_borrowed_is_what_a_call_would_get() -> None:
    records = database()
    task = borrow.task_of(records[1], H200)  # M = 4096
    lender = tuned_record(replace(task, shape=(3072, 4096, 4096)), warp_specialized(128, 256, 64, 4, group_m=1, subtiles=2, prefetch=1))
    config, how, why = borrow.borrowed(task, [lender])
    assert (config.with_value("group_m", 1), how) == (lender.kernel_config, "shape") and "borrowed from 3072x4096x4096" in why
    assert config["group_m"] > 1 and why.endswith(f"; here with group_m={config['group_m']}"), "which the model knows better"
    config, how, why = borrow.borrowed(replace(task, shape=(16, 4096, 4096)), records)
    assert how == borrow.RULE and "chosen by rule" in why and config.schedule == "split_k"
    config, how, why = borrow.borrowed(replace(task, shape=(256, 4096, 4096)), records)
    assert how == borrow.PREFERRED and "by the model faster here" in why


def test_borrowed_and_tuned_are_timed_in_turns_and_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    records = database()
    monkeypatch.setattr(choose, "_outlined", lambda *_: [])  # the sweep knows one schedule
    monkeypatch.setattr(rule, "choose", lambda *_: Choice(records[3].kernel_config, "planted"))
    task = borrow.task_of(records[1], H200)
    timed: dict[borrow.Pair, dict[str, Any]] = {}
    row = borrow.measured(borrow.Case(records[1], (records[3],)), task, replay(), 3, timed)
    times = SQUARE.rows
    expected = times[records[3].kernel_config].median_us / times[records[1].kernel_config].median_us
    assert row["how"] == "shape" and row["ratio"] == pytest.approx(expected, abs=1e-4) and not row["same"]
    like = tuned_record(replace(task, shape=(2048, 4096, 4096)), records[1].kernel_config)
    assert borrow.measured(borrow.Case(records[1], (records[3],)), task, Replay({}, SQUARE.baseline), 3, timed) == row, "a pair is timed once"
    same = borrow.measured(borrow.Case(records[1], (like,)), task, replay(), 3, {})
    assert same["same"] and same["ratio"] == 1.0
    failing = dict(SQUARE.rows) | {records[3].kernel_config: Outcome("wrong", detail="planted")}
    failed = borrow.measured(borrow.Case(records[1], (records[3],)), task, Replay(failing, SQUARE.baseline), 3, {})
    assert failed["failed"] == "borrowed: wrong: planted" and "ratio" not in failed
    ruled = {**row, "how": borrow.RULE, "ratio": 2.0}
    found = borrow.summary([{**row, "ratio": 1.21}, same, ruled])
    assert (found["count"], found["ratio"], found["worst"], found["same"]) == (2, 1.1, 1.21, 1) and not found["holds"]
    assert found["rule"] == {"count": 1, "ratio": 2.0}
    assert borrow.summary([same, ruled])["holds"] and not borrow.summary([same, failed])["holds"] and not borrow.summary([])["holds"]
    assert json.dumps(found) and all(borrow._line(r) for r in (row, same, failed))


# -- the scripts as a whole, with a recorded sweep for a GPU


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Report]:
    """Runs a script on a machine with two made-up GPUs. asks: whether the script asks for one. Returns what it wrote."""
    for script in (repeat, borrow):
        monkeypatch.setattr(script, "GpuRunner", replay)
    replayed = command.tune(["--replay", str(record.DATA / "sweep_skinny.json"), "--trials", "2"])
    monkeypatch.setattr(command, "tune", lambda _: replayed)
    monkeypatch.setattr(command, "warm_up", lambda: 1.0)
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(record, "environment", lambda commit: record.versions(commit) | {"gpu": "NVIDIA H200", "driver": "580"})

    def run(script: ModuleType, *arguments: object, asks: bool = True) -> Report:
        name = script.__name__.partition(".")[2]
        monkeypatch.setattr("sys.argv", [name, "--out", str(tmp_path), "--commit", "abc1234", *map(str, arguments)])
        script.main(*[machine(H200, H200)] * asks)
        found = record.read(tmp_path / f"{name}.json")
        assert found.environment["commit"] == "abc1234" and found.script == script.__name__
        return found

    return run


@pytest.mark.slow
def test_repeat_writes_what_it_found(written: Callable[..., Report], capsys: pytest.CaptureFixture[str]) -> None:
    found = written(repeat, "--repetitions", 2)
    assert [len(row["repetitions"]) for row in found.rows] == [2, 2, 2] and isinstance(found.summary["holds"], bool)
    assert "relu(mm + bias) 1024x1024x1024 fp16 nn" in capsys.readouterr().out
    assert "3 problems" in readme.tuning()


def test_borrow_writes_what_it_found(written: Callable[..., Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "db"
    strange = replace(tuned_record(SQUARE.task, right()[0]), spec="0123456789abcdef")
    strangers = [replace(strange, shape=(m, 4096, 4096)) for m in (64, 128, 256, 512)]
    Database(folder, seeds=()).add(*database(), *strangers)
    one = written(borrow, "--db", folder)
    found = one.summary
    assert found["held_out"] == 4 and len(one.rows) == found["count"] == 2 and found["left_out"]
    assert "half 2 of" in readme.tuning()
    two = written(borrow, "--db", folder, "--seeds", 2)
    both = two.summary
    assert both["seeds"] == [0, 1] and {row["seed"] for row in two.rows} == {0, 1} and both["held_out"] == 8
    assert [{**row, "seed": 0} for row in two.rows][: found["count"]] == one.rows and both["count"] > found["count"]
    assert "in 2 ways" in readme.tuning() and f"half {both['count']} of" in readme.tuning()
    assert written(borrow, "--db", folder, "--limit", 1).summary["count"] <= 1
    assert written(borrow, "--db", folder, "--budget", 0).summary["count"] == 0
    assert "nothing" in readme.tuning()
    assert "geometric mean" in capsys.readouterr().out


def test_cold_and_devices_write_what_they_found(written: Callable[..., Report]) -> None:
    assert readme.tuning() == ""
    found = written(cold, asks=False)
    assert [row["part"] for row in found.rows] == ["one"] * 3 + ["suite"]
    assert found.summary["worst_s"] >= found.summary["median_s"] and found.summary["suite"]["count"] == 1
    found = written(devices)
    assert [(row["part"], row["gpus"]) for row in found.rows] == [("suite", 1), ("suite", 2), ("many", 1), ("many", 2)]
    assert found.summary["suite"]["searching"] == found.summary["many"]["wall"] == 1.0 and found.summary["holds"] is False
    assert "each of 1 problems in one command" in readme.tuned_in() and "one problem with 600 trials 1.00 times" in readme.tuning()
    written(cold, "--problems", 0, asks=False)
    assert "in one command" not in readme.tuned_in() and " s | 15 s |" in readme.tuned_in() and len(readme.tuning().splitlines()) == 1


@pytest.mark.parametrize(
    ("behind", "name"),
    [
        ((-0.02, -0.38), "all ahead"),
        (
            (0.005, -0.38),
            "one behind",
        ),
        ((0.0, -0.004), "the same"),
    ],
)
def test_how_winners_stand_to_a_sweep_is_said_in_words(behind: tuple[float, ...], name: str, golden: Golden) -> None:
    environment = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "driver": "580", "date": "2026-11-25"}
    problems = [{"behind": b, "configs": 100 + i} for i, b in enumerate(behind)]
    golden(readme_tuning._winner(Report("bench.winner", environment, problems, {"worst": max(behind)})), name)


def test_without_a_gpu_the_scripts_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(tmp_path)])
    for script, too_few in ((repeat, NO_GPU), (borrow, NO_GPU), (devices, machine(H200))):
        with pytest.raises(SystemExit, match="this wants"):
            script.main(too_few)
    assert not list(tmp_path.iterdir())


# -- host


def test_the_claims_about_the_host_are_of_every_program_with_one_kernel() -> None:
    def row(kernels: int = 1, **us: float) -> dict[str, Any]:
        times = {"epigen, out=": 4.0, "epigen": 7.9, "Triton's launch": 13.0} | {{"out": "epigen, out=", "new": "epigen"}[name]: us[name] for name in us}
        return {"kernels": kernels, "timing": {name: {"median_us": time} for name, time in times.items()}}

    assert host.holds([row(), row()])
    assert not host.holds([row(), row(new=8.1)])
    assert not host.holds([row(), row(out=5.5)]) and host.holds([row(), row(2, out=5.5)])


def test_the_claims_about_layers_are_of_their_time_and_of_eagers() -> None:
    def row(name: str, ours: float, eager: float = 30.0) -> dict[str, Any]:
        return host.layer_row(name, {"epigen": {"median_us": ours}, "eager operations": {"median_us": eager}})

    layer, block = f"{host.LAYER}, forward", "a block under epigen.fuse, forward"
    assert host.layers_hold([row(layer, 25.0, 20.0), row(block, 29.0)]) and host.holds([row(layer, 90.0)])
    assert not host.layers_hold([row(layer, 26.0, 40.0)]) and not host.layers_hold([row(block, 31.0)])


def test_layers_are_timed_as_they_train() -> None:
    """Each way is warmed, gives gradients to all, and leaves none behind."""
    for name, ways in host.layers("cpu").items():
        for contender, run in ways.items():
            result = run()
            assert (result is None) == name.endswith("backward"), f"{name}, {contender}"


def test_the_first_call_is_the_median_of_the_processes() -> None:
    rows = [{"torch_s": 2.0, "imported_s": 0.1, "first_s": s} for s in (0.25, 0.2, 0.9)]
    found = host.summary(rows, 0.3)
    assert (found["first_s"], found["worst_s"], found["processes"], found["holds"]) == (0.25, 0.9, 3, True)
    assert not host.summary([r | {"first_s": 0.31} for r in rows], 0.3)["holds"]


def test_the_first_call_finds_the_modules_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling Python took half of it where the environment forbids to keep that."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(host, "FIRST", "import json, os, sys, bench\nprint(json.dumps({'first_s': os.path.exists(bench.__cached__)}))")
    assert host.first_calls(1) == {"first_s": 1, "worst_s": 1, "processes": 1, "claimed_s": 0.3, "holds": False}


def test_the_first_call_of_an_unknown_program_finds_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In caches of its own, which are as empty in each process; its shape is on the command line."""
    asked = "import json, os, sys\nfolders = {os.environ.get(n) for n in ('TRITON_CACHE_DIR', 'EPIGEN_CACHE')}\n"
    counted = "{f for f in folders if f and not os.listdir(f)}\nopen(min(new) + '/kernel', 'w').close() if new else None\n"
    monkeypatch.setattr(host, "FIRST", f"{asked}new = {counted}print(json.dumps({{'first_s': len(new) * int(sys.argv[2]) / 1000}}))")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    found = host.first_calls(2, (1, 400, 3), known=False)
    assert (found["first_s"], found["processes"], found["claimed_s"], found["holds"]) == (0.4, 2, 0.5, True)
    assert host.first_calls(1, (1, 400, 3))["first_s"] == 0.0


def test_what_the_environment_says_of_compiled_modules_is_left_where_it_lets_them_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/elsewhere")
    assert command.environment()["PYTHONPYCACHEPREFIX"] == "/elsewhere"
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = command.environment()
    assert "PYTHONDONTWRITEBYTECODE" not in found and Path(found["PYTHONPYCACHEPREFIX"]).is_dir()
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"


STUB = """
static int count;
int launched(void) { return count; }
int cuModuleLoadData(void **module, const void *text) { return *(const char *)text == '.' ? 0 : 218; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return 0; }
int cuLaunchKernel() { return ++count % 1000 == 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_driver_is_timed_by_its_own_launches(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "stub.c").write_text(STUB)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "stub.c"], check=True)
    launches, counted = driver.launcher(str(library)), ctypes.CDLL(str(library))
    assert 0 <= launches(0, 600) < 100 and counted.launched() == 600
    with pytest.raises(RuntimeError, match="refused a launch"):
        launches(0, 600)
    with golden.raises(RuntimeError):
        driver.launcher("nothing.so")


def test_without_a_compiler_or_with_one_that_refuses_the_drivers_launch_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is not None:
        (tmp_path / "driver.c").write_text("no C at all")
        monkeypatch.setattr(driver, "_SOURCE", tmp_path / "driver.c")
        with pytest.raises(RuntimeError, match=r"driver\.c .*\n(.|\n)*error"):
            driver.launcher()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="without a C compiler"):
        driver.launcher()


def test_what_the_driver_cannot_be_asked_for_costs_no_other_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: int) -> list[float]:
        raise RuntimeError("libcuda.so.1 has answered with error -1")

    monkeypatch.setattr(driver, "launch_us", fails)
    assert host.of_the_driver() == {} and "left out: libcuda.so.1 has answered with error -1" in capsys.readouterr().out
    monkeypatch.setattr(driver, "launch_us", lambda *_: [3.0, 4.25, 9.0])
    assert host.of_the_driver() == {"driver_us": 4.25} and "4.25 us a launch, 3.00 at least" in capsys.readouterr().out
