"""The headline bench without a GPU: contenders on CPU tensors, made-up times, the plan, the budget and the verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_nvmath
import pytest
import torch
from checkout import ROOT
from fake_nvmath import FakeMatmul
from golden import Golden
from machines import NO_GPU, machine
from timed_gpu import Gpu

from bench import ahead, bars, cases, cold, headline, peers, readme, record, tables, timing
from bench.cases import Case
from bench.checked import Demand, Oracle, Wrong
from bench.programs import BY_NAME
from bench.record import Report
from epigen import gpus
from epigen.choose import choose
from epigen.db.problem import graph_digest
from epigen.errors import CompileError
from epigen.runtime.kernel import Kernel
from epigen.tuning import sampling, suite
from epigen.tuning.task import Request
from epigen.tuning.timer import ColdTimer

H200 = gpus.DEFAULT.target
SHAPE = (300, 210, 40)  # M and N beyond the checked strips, N no multiple of 8


pytestmark = pytest.mark.usefixtures("one_thread")


# -- the timer


def test_a_launch_that_comes_late_is_timed_again_behind_a_longer_flush() -> None:
    quick = Gpu(20)
    timer = ColdTimer(quick.flush, quick.event)
    assert timer.once(quick.run) == pytest.approx(10) and (timer.flushes, timer.late) == (1, 0)
    slow = Gpu(300)
    timer = ColdTimer(slow.flush, slow.event)
    assert timer.once(slow.run) == pytest.approx(10) and (timer.flushes, timer.late) == (4, 0)
    hopeless = Gpu(5000)
    timer = ColdTimer(hopeless.flush, hopeless.event)
    assert timer.once(hopeless.run) > 1000 and (timer.flushes, timer.late) == (16, 1)


def test_a_row_has_no_pause() -> None:
    gpu = Gpu(20, 300.0)
    assert ColdTimer(gpu.flush, gpu.event).row([gpu.run, gpu.run, gpu.run]) == pytest.approx([300, 300, 300])
    assert gpu.free == pytest.approx(1 + 130 + 4 * 300), "the first, too, is timed behind another"


def test_contenders_take_turns_and_long_ones_get_fewer_rounds() -> None:
    order: list[str] = []

    class Timer(ColdTimer):
        def once(self, run: Callable[[], object]) -> float:
            run()
            self.late += order[-1] == "b"
            return float(len(order))

    contenders = {name: lambda name=name: order.append(name) for name in "abc"}
    found = timing.cold(contenders, rounds=4, timer=Timer(lambda: None, lambda: None))
    assert "".join(order) == 2 * "abc" + "abc" + "cba" + "abc" + "cba" and {one["samples"] for one in found.values()} == {4}
    assert found["b"]["late"] == 4 and "late" not in found["a"]
    found = timing.cold(contenders, budget_s=0.0, timer=Timer(lambda: None, lambda: None))
    assert found["a"]["samples"] == timing.LEAST


@pytest.mark.parametrize(("microseconds", "heated"), [(sampling.LONG_US - 1, False), (sampling.LONG_US, True)])
def test_long_launches_heat_the_gpu_first(microseconds: float, heated: bool) -> None:
    class Timer(ColdTimer):
        launched = 0

        def once(self, run: Callable[[], object]) -> float:  # noqa: ARG002
            self.launched += 1
            return microseconds

    timer = Timer(lambda: None, lambda: None)
    assert timing.cold({"a": list}, rounds=7, timer=timer)["a"]["samples"] == 7
    assert (timer.launched > 8) == heated


# -- the contenders


def fake_times(contenders: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    for run in contenders.values():
        run()
    return {name: {"median_us": 10.0 + i, "spread_us": 0.1, "samples": 20} for i, name in enumerate(contenders)}


HOW = {cases.COLD: fake_times, cases.GRAPH: fake_times}


@pytest.fixture
def nvmath(monkeypatch: pytest.MonkeyPatch) -> type[FakeMatmul]:
    return fake_nvmath.installed(monkeypatch)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("program", BY_NAME)
def test_every_contender_computes_the_program(program: str, dtype: str, layout: str, nvmath: type[FakeMatmul]) -> None:
    before = nvmath.freed
    case = Case("epilogues", program, SHAPE, dtype, cases.fused(program), layout)
    row = headline.measured(case, "cpu", HOW)
    assert "failed" not in row and not row["missing"] and list(row["timing"]) == list(case.contenders)
    checked = row["checked"]
    assert checked[peers.OURS] == checked[peers.MM] == "within epigen's bound"
    assert "rounded first" in checked[peers.EAGER], "eager torch rounds the product before it goes on"
    # what a bias gradient is rounded to is cuBLASLt's only liberty here
    assert ("rounded first" if program in cases.BACKWARD else "epigen's bound") in checked[peers.CUBLASLT]
    assert nvmath.tuned[-1] == peers.AUTOTUNED and nvmath.freed == before + 1
    assert json.dumps(row) and headline.key(row) == case.key


def test_torch_compile_gets_static_shapes_and_forgets_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    # the real one would import Triton in the mode that other tests of this process do not want
    monkeypatch.setitem(vars(torch), "_dynamo", types.SimpleNamespace(reset=lambda: told.append("reset")))
    monkeypatch.setattr(torch, "compile", lambda run, **options: told.append(options) or run)
    row = headline.measured(Case("compiled", "gelu + bias + aux", SHAPE, "fp16", (peers.OURS, peers.COMPILED)), "cpu", HOW)
    assert told == ["reset", {"mode": "max-autotune-no-cudagraphs", "dynamic": False, "fullgraph": True}]
    assert list(row["timing"]) == [peers.OURS, peers.COMPILED] and row["notes"][peers.COMPILED] == peers.COMPILE_MODE


ONE_GRAPH = """
import torch
from bench import peers
from bench.programs import PROGRAMS
for program in PROGRAMS:
    problem = peers.problem(program, (32, 48, 16), "fp16", "nt", "cpu")
    torch._dynamo.reset()
    traced = torch.compile(program.eager, backend="eager", dynamic=False, fullgraph=True)
    arguments = problem.sample.a, problem.sample.b, problem.eager
    assert all(map(torch.equal, traced(*arguments), program.eager(*arguments)))
"""


@pytest.mark.slow
def test_what_torch_compiles_is_one_graph() -> None:
    """In a process of its own: torch's compiler imports Triton, which other tests of this one want in its other mode."""
    subprocess.run([sys.executable, "-c", ONE_GRAPH], cwd=ROOT, check=True)


def test_a_contender_that_fails_is_recorded_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, nvmath: type[FakeMatmul]) -> None:
    def wrong(p: peers.Problem) -> peers.Contender:
        right = peers.mm(p)
        return replace(right, run=lambda: right.run() + 0.1)

    def broken(_: peers.Problem) -> peers.Contender:
        raise ValueError("no algorithm\nand a long story")

    monkeypatch.setitem(peers.MAKERS, peers.MM, wrong)
    monkeypatch.setitem(peers.MAKERS, peers.EAGER, broken)
    monkeypatch.setattr(nvmath, "autotune", lambda *_, **__: 1 / 0)
    before = nvmath.freed
    row = headline.measured(Case("epilogues", "relu + bias", SHAPE, "fp16", cases.fused("relu + bias")), "cpu", HOW)
    assert row["missing"][peers.MM].startswith("wrong answer: output 'out'") and row["missing"][peers.EAGER] == "ValueError: no algorithm"
    assert row["missing"][peers.CUBLASLT].startswith("ZeroDivisionError") and nvmath.freed == before + 1
    assert list(row["timing"]) == [peers.OURS, peers.ADDMM]
    assert "no mm: wrong answer" in headline.line(row)


def test_without_nvmath_its_rows_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvmath", None)
    row = headline.measured(Case("epilogues", "drelu + bgrad", SHAPE, "bf16", (peers.OURS, peers.CUBLASLT, peers.ADDMM)), "cpu", HOW)
    assert "nvmath-python cannot be imported" in row["missing"][peers.CUBLASLT] and "relu and gelu" in row["missing"][peers.ADDMM]


def test_a_case_that_cannot_be_timed_fails_alone() -> None:
    def broken(_: Any) -> dict[str, dict[str, float]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    row = headline.measured(Case("small", "relu + bias", SHAPE, "fp16", (peers.OURS,), how=cases.GRAPH), "cpu", {cases.GRAPH: broken})
    assert row["failed"].startswith("RuntimeError: operation not permitted") and row["timing"] == {}
    assert "FAILED" in headline.line(row)


def test_a_gpu_that_is_gone_is_told_even_where_nothing_can_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*_: object) -> None:
        raise headline.GpuFailed("gone")

    def close() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setitem(peers.MAKERS, peers.MM, lambda p: replace(peers.ours(p), close=close))
    monkeypatch.setitem(peers.MAKERS, peers.EAGER, lambda _: 1 / 0)
    monkeypatch.setattr(headline, "_demand_life", dead)
    with pytest.raises(headline.GpuFailed, match="gone"):
        headline.measured(Case("odd", "relu + bias", SHAPE, "fp16", (peers.MM, peers.EAGER)), "cpu", HOW)


@pytest.mark.parametrize(("program", "where"), [(p, w) for p in ("relu + bias + mask", "drelu + bgrad") for w in ("first row", "last column", "small output")])
def test_the_oracle_sees_the_edges(program: str, where: str) -> None:
    problem = peers.problem(BY_NAME[program], SHAPE, "fp16", "nt", "cpu")
    demand = Demand("right", BY_NAME[program].text)
    found = [t.clone() for t in peers.ours(problem).run()]
    assert Oracle(problem.sample).demanded(found, [demand]) == "right"
    if where == "first row":
        found[0][0, 100] += 1
    elif where == "last column":
        found[0][200, -1] += 1
    elif found[1].dtype == torch.uint8:
        found[1][-1, -1] ^= 1
    else:
        found[1][-1] += 1
    with pytest.raises(Wrong, match="output '"):
        Oracle(problem.sample).demanded(found, [demand])


def test_an_answer_of_another_kind_is_wrong() -> None:
    problem = peers.problem(BY_NAME["drelu + bgrad"], SHAPE, "fp16", "nt", "cpu")
    demand = Demand("right", BY_NAME["drelu + bgrad"].text)
    dz, db = peers.ours(problem).run()
    for found, words in (((dz,), "1 results in place of 2"), ((dz, db[:-1]), r"'.*' has shape \[209\]"), ((dz.T, db), "has shape")):
        with pytest.raises(Wrong, match=words):
            Oracle(problem.sample).demanded(found, [demand])


# -- the plan, the budget and what is kept


def test_the_headline_is_planned_within_its_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["headline", "--plan"])
    headline.main()
    told = capsys.readouterr().out.splitlines()
    todo = cases.headline()
    assert len(told) == len(todo) + 1 and told[-1].startswith(f"{len(todo)} cases, about ")
    fitting = [c for c, words in zip(todo, told, strict=False) if "LEFT OUT" not in words]
    assert len(fitting) >= 0.95 * len(todo) and {c.group for c in fitting} == {"epilogues", "small", "skinny", "odd"}
    for group in cases.GROUPS:
        keys = [c.key for c in cases.GROUPS[group]()]
        assert len(keys) == len(set(keys)), "a case that comes twice would be measured once"


def test_every_bar_has_cases() -> None:
    """As far as contenders go: each bar finds rows in the whole groups, and in the headline."""
    for todo in (cases.headline(), [c for name in ("epilogues", "small", "skinny", "odd") for c in cases.GROUPS[name]()]):
        rows = [{**row_of(c), "timing": {name: {"median_us": 1.0} for name in c.contenders}} for c in (*todo, *cases.compiled())]
        for found in bars.verdicts(rows, 4280.0):
            assert found["rows"] and not found["without"], found["case"]


def problem_of_request(one: Request) -> tuple[object, ...]:
    """Two spellings of one computation are one problem."""
    return graph_digest(one.graph), one.shape, one.a, one.layout, one.precision


def test_the_shipped_suite_holds_every_problem_of_the_headline() -> None:
    asked = suite.read(cold.SUITE)
    assert len(asked) >= 80
    have = {problem_of_request(a) for a in asked}
    lacking = [a for name in ("headline", "small", "skinny", "odd") for a in cases.requests(cases.GROUPS[name]()) if problem_of_request(a) not in have]
    assert not lacking
    assert {a.a.name for a in asked} == {"fp16", "bf16"} and {a.layout for a in asked} == {"nt", "nn"}


def row_of(case: Case, **times: float) -> dict[str, Any]:
    made = {name: {"median_us": us, "spread_us": us / 100, "samples": 20} for name, us in times.items()}
    return {
        "group": case.group, "program": case.program, "shape": list(case.shape), "dtype": case.dtype, "layout": case.layout, "how": case.how,
        "bytes": case.bytes, "flops": case.flops, "timing": made, "missing": {}, "notes": {}, "checked": {},
    }  # fmt: skip


def test_what_the_time_is_too_short_for_is_listed_and_what_is_known_is_not_measured_again() -> None:
    todo = [Case("epilogues", "relu + bias", (64 << i, 64, 64), "fp16", (peers.OURS,)) for i in range(4)]
    body: dict[str, Any] = {"rows": [row_of(todo[0])]}
    clock = iter([0.0, 1.0, 50.0, 99.9])
    saved: list[int] = []
    headline.run(todo, body, 100.0, lambda: saved.append(len(body["rows"])), row_of, lambda: next(clock))
    assert [headline.key(r) for r in body["rows"]] == [c.key for c in todo[:3]]
    assert body["left_out"] == [str(todo[3])] and saved == [2, 3]


def test_a_lost_gpu_is_recorded_and_not_tried_again() -> None:
    todo = [Case("epilogues", "relu + bias", (64 << i, 64, 64), "fp16", (peers.OURS,)) for i in range(2)]

    def lost(_: Case) -> dict[str, Any]:
        raise headline.GpuFailed("CUDA error: an illegal memory access")

    body: dict[str, Any] = {"rows": []}
    for count in (1, 2):
        with pytest.raises(headline.GpuFailed):
            headline.run(todo, body, 100.0, lambda: None, lost)
        assert len(body["rows"]) == count
    assert "illegal memory access" in body["rows"][0]["failed"] and json.dumps(body)
    headline.run(todo, body, 100.0, lambda: None, lost)


def test_rows_of_another_environment_are_not_kept(tmp_path: Path) -> None:
    here = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "driver": "580", "commit": "abc1234", "date": "2026-11-20"}
    rows = [row_of(cases.small()[0])]
    path = record.write("small", Report("bench.headline", here, rows), tmp_path)
    assert record.earlier(path, here | {"date": "2026-11-21"}) == rows
    assert record.earlier(path, here | {"commit": "def5678"}) == [{"commit": "abc1234"} | row for row in rows]
    assert record.earlier(path, here | {"torch": "2.12.0"}) == [] == record.earlier(tmp_path / "none.json", here)


# -- the verdicts


def times(shape: tuple[int, int, int], dtype: str = "fp16", program: str = "relu + bias", group: str = "epilogues", **given: float) -> dict[str, Any]:
    row = row_of(Case(group, program, shape, dtype, ()))
    row["timing"] = {name: {"median_us": us, "spread_us": 0.0, "samples": 9} for name, us in given.items()}
    return row


def test_a_bar_is_met_by_its_mean_and_its_worst() -> None:
    bar = bars.Bar("made up", ("relu + bias",), peers.EAGER, mean=1.5, each=1.1)
    rows = [times((64, 64, 64), epigen=10.0, eager=12.0), times((128, 64, 64), epigen=10.0, eager=30.0)]
    found = bars.verdict(bar, rows)
    assert (found["mean"], found["worst"], found["met"], found["missed_by"]) == (1.8974, 1.2, True, 0.0)
    assert [r["shape"] for r in found["rows"]] == [[64, 64, 64], [128, 64, 64]], "the worst first"
    found = bars.verdict(replace(bar, each=1.26), rows)
    assert found["met"] is False and found["missed_by"] == 0.05 and "missed by 5.0%" in bars.line(found) and "64x64x64 fp16 nt" in bars.line(found)
    assert bars.outcome(bars.verdict(replace(bar, each=1.2003), rows)) == "missed by 0.03%"
    found = bars.verdict(replace(bar, mean=2.0), rows)
    assert not found["met"] and found["missed_by"] == pytest.approx(2 / 1.8974 - 1, abs=1e-4)
    one_missing = bars.verdict(bar, [*rows, times((256, 64, 64), epigen=10.0)])
    assert one_missing["met"] and one_missing["without"] == 1 and "1 more without the baseline" in bars.line(one_missing)
    assert bars.verdict(bar, [])["met"] is None and "not measured" in bars.line(bars.verdict(bar, []))


def test_no_bar_is_met_where_epigen_has_no_answer() -> None:
    bar = bars.Bar("made up", ("relu + bias",), peers.EAGER, each=1.1)
    right, wrong = times((64, 64, 64), epigen=10.0, eager=12.0), times((128, 64, 64), eager=12.0)
    found = bars.verdict(bar, [right, wrong])
    assert (found["met"], found["missed_by"], found["broken"], found["without"]) == (False, 0.0, 1, 0)
    assert "missed 1 without an answer of epigen's: mean 1.200" in bars.line(found)
    assert bars.verdict(bar, [wrong])["met"] is False and "missed 1 without" in bars.line(bars.verdict(bar, [wrong]))


def test_a_bar_takes_its_own_rows_alone() -> None:
    bar = bars.Bar("made up", ("relu + bias",), peers.MM, each=1.0, k=(1024, 2048), extent=4096)
    inside = times((8192, 4096, 1024), epigen=1.0, mm=1.0)
    outside = [
        times((8192, 4096, 2048)), times((8192, 4096, 1023)), times((8192, 4095, 1024)), times((4095, 8192, 1024)),
        times((8192, 4096, 1024), program="gelu + bias"), times((8192, 4096, 1024), group="odd"),
    ]  # fmt: skip
    assert bar.of(inside) and not any(map(bar.of, outside))
    heavy = bars.Bar("made up", ("relu + bias",), bars.BANDWIDTH, each=0.75, group="skinny", weights_over=64 << 20)
    light, large = (times((1, n, 4096), group="skinny", epigen=50.0) for n in (4096, 14336))
    assert not heavy.of(light) and heavy.of(large)
    # 1x14336x4096: 117,484,544 bytes, of which a copy at 4000 GB/s moves as much in 29.37 us
    assert bars.ratio(large, bars.BANDWIDTH, copy_gbps=4000.0) == pytest.approx(large["bytes"] / 4e6 / 50.0)
    assert bars.ratio(large, bars.BANDWIDTH) is None and bars.verdict(heavy, [large], 4000.0)["worst"] == 0.5874


def test_the_bars_are_those_that_were_set() -> None:
    free = {(b.programs[0], b.k[0]): b.each for b in bars.BARS if b.baseline == peers.MM and b.group == "epilogues"}
    assert free["relu + bias", 512] == 1.02 and free["relu + bias + mask", 1024] == 0.97 and free["drelu + bgrad", 4096] == 1.0 and len(free) == 12
    against = {(b.case, b.baseline): (b.mean, b.each) for b in bars.BARS}
    assert against["drelu + bgrad", peers.CUBLASLT] == (2.0, 1.10) and against["every epilogue", peers.EAGER] == (1.30, None)
    assert against["every epilogue", peers.COMPILED] == (1.10, 1.00) and against["dgelu + bgrad", peers.CUBLASLT] == (1.5, 1.0)


# -- the script as a whole


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Report]:
    """Runs the script on a made-up GPU. Returns what it wrote."""
    monkeypatch.setattr(ahead, "compile_all", lambda requests, _: len(requests))
    monkeypatch.setattr(headline, "copy_gbps", lambda: 4280.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(record, "environment", lambda commit: record.versions(commit) | {"gpu": "NVIDIA H200", "driver": "580"})
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))

    def measured(case: Case) -> dict[str, Any]:
        row = row_of(case, **{name: 10.0 if name == peers.OURS else 12.0 for name in case.contenders})
        return row | {"notes": {name: f"{headline.launched(row, name, H200)}; tuned" for name in (peers.OURS, peers.OURS_TANH) if name in case.contenders}}

    monkeypatch.setattr(headline, "measured", measured)

    def run(*arguments: object, name: str = "headline", commit: str = "abc1234") -> Report:
        monkeypatch.setattr("sys.argv", ["headline", "--out", str(tmp_path), "--commit", commit, *map(str, arguments)])
        headline.main(machine(H200))
        return record.read(tmp_path / f"{name}.json")

    return run


def test_the_script_writes_rows_and_the_readme_shows_the_verdicts(on_a_gpu: Callable[..., Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = on_a_gpu("--budget", 10_000)
    assert len(found.rows) == len(cases.headline()) and found.summary["left_out"] == []
    assert found.summary["copy_gbps"] == 4280.0 and found.environment["commit"] == "abc1234"
    told = capsys.readouterr().out
    assert "every epilogue against eager, target 1.30 in the mean: missed by 8.3%" in told
    shown = readme.headline()
    assert "| every epilogue | eager | 1.30 in the mean | 1.20 | 1.20 | missed by 8.3% |" in shown and "ratios.svg" in shown
    measured = [b for b in bars.verdicts(found.rows, 4280.0) if b["rows"]]
    assert len(measured) == len(bars.BARS) - 1 and f"{sum(b['met'] for b in measured)} of {len(measured)} targets are met" in shown
    once = readme.filled("# epigen\n\n<!-- headline -->\nold\n<!-- end -->\n\nmore\n")
    assert once == f"# epigen\n\n<!-- headline -->\n{shown}\n<!-- end -->\n\nmore\n" == readme.filled(once)
    rows = [row_of(c, **{peers.OURS: 10.0, peers.COMPILED: 12.0}) for c in cases.compiled()]
    record.write("compiled", Report("bench.compiled", {}, rows, {"left_out": ["one"]}), tmp_path)
    both = readme.headline()
    assert "| every epilogue | torch.compile | 1.10 in the mean, 1.00 each | 1.20 | 1.20 | met |" in both
    assert f", {len(rows)} compiled); 1 more left out for time" in both
    assert f"{sum(b['met'] for b in measured) + 1} of {len(measured) + 1} targets are met. " in both
    quick = [row_of(c, **{peers.OURS: 10.0, peers.EAGER: 13.0}) for c in cases.headline()]
    record.write("headline_h100", Report("bench.headline", found.environment | {"gpu": "an H100"}, quick, {"copy_gbps": 3000.0, "left_out": []}), tmp_path)
    beside = readme.headline()
    assert "| every epilogue | eager | 1.30 in the mean | 1.20 | 1.20 | missed by 8.3% | 1.30 | 1.30 | met |" in beside
    assert "| every epilogue | torch.compile | 1.10 in the mean, 1.00 each | 1.20 | 1.20 | met | | | |" in beside
    assert " targets are met, and " in beside and "Measured on an H100" in beside


def test_a_second_run_goes_on_where_the_first_ended(on_a_gpu: Callable[..., Report], capsys: pytest.CaptureFixture[str]) -> None:
    first = on_a_gpu("--group", "skinny", "--only", "bf16", name="skinny")
    assert len(first.rows) == 16
    short = on_a_gpu("--group", "skinny", "--more", "--budget", 0, name="skinny")
    assert short.rows == first.rows and len(short.summary["left_out"]) == 16
    assert "(16):\n  skinny relu + bias" in capsys.readouterr().out
    second = on_a_gpu("--group", "skinny", "--more", name="skinny")
    assert len(second.rows) == 32 and second.summary["left_out"] == []
    assert len(on_a_gpu("--group", "skinny", "--only", "fp16", name="skinny").rows) == 16, "without --more it begins anew"


def test_another_commits_rows_stand_while_the_configs_are_the_same(on_a_gpu: Callable[..., Report], tmp_path: Path) -> None:
    found = on_a_gpu("--only", "gelu + bias 8192x8192x512", "relu + bias 64x128x256", "--budget", 10_000)
    assert len(found.rows) == 6 and not any("commit" in row for row in found.rows)
    exact, tanh = (next(row for row in found.rows if row["program"] == "gelu + bias" and row["dtype"] == dtype) for dtype in ("bf16", "fp16"))
    exact["notes"][peers.OURS] = tanh["notes"][peers.OURS_TANH] = "persistent block_m=64; tuned on another day"
    lost = found.rows[0]
    lost["timing"].pop(peers.OURS)
    record.write("headline", found, tmp_path)
    again = on_a_gpu("--only", "gelu + bias 8192x8192x512", "relu + bias 64x128x256", "--budget", 10_000, "--more", commit="def5678")
    anew = [headline.key(row) for row in again.rows if "commit" not in row]
    assert [headline.key(row) for row in again.rows] == [headline.key(row) for row in found.rows]
    assert sorted(anew) == sorted(map(headline.key, (exact, tanh, lost)))
    assert "3 cases" in readme.headline()


def test_a_lost_gpu_gets_a_new_process_for_the_rest(on_a_gpu: Callable[..., Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(_: Case) -> dict[str, Any]:
        raise headline.GpuFailed("gone")

    class Replaced(Exception):
        pass

    def execve(_: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        assert "PYTHONSAFEPATH" in environment, "nothing of the current folder is run"
        assert arguments[1:5] == ["-m", "bench.headline", "--group", "odd"] and "--more" in arguments and "--tune" not in arguments
        assert arguments[arguments.index("--commit") + 1] == "abc1234" and arguments[-2:] == ["--only", "bf16"]
        raise Replaced

    monkeypatch.setattr(headline, "measured", lost)
    monkeypatch.setattr("os.execve", execve)
    with pytest.raises(Replaced):
        on_a_gpu("--group", "odd", "--only", "bf16", name="odd")
    assert "gone" in record.read(tmp_path / "odd.json").rows[0]["failed"]


def test_problems_are_tuned_first_where_that_is_asked(on_a_gpu: Callable[..., Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def tune(arguments: Sequence[str]) -> int:
        seen.append((list(arguments), suite.read(Path(arguments[2])), headline.os.environ["EPIGEN_DB"]))
        return 0

    monkeypatch.setenv("EPIGEN_DB", "")
    monkeypatch.setattr(headline.command, "plainly", tune)
    on_a_gpu("--group", "small", "--tune", 12, "--db", tmp_path / "db", name="small")
    ((arguments, asked, database),) = seen
    assert arguments[0] == "tune" and arguments[3:] == ["--trials", "12", "--devices", "all"] and database == str(tmp_path / "db")
    assert asked == cases.requests(cases.small()) and len(asked) == 6
    with pytest.raises(SystemExit):
        on_a_gpu("--tune", 12)


def test_without_a_gpu_the_headline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden) -> None:
    monkeypatch.setattr("sys.argv", ["headline", "--out", str(tmp_path)])
    with golden.raises(SystemExit):
        headline.main(NO_GPU)
    assert not list(tmp_path.iterdir())


# -- compiling beforehand


def test_kernels_are_compiled_for_the_gpu_that_will_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (asked,) = cases.requests([Case("small", "drelu + bgrad", (64, 128, 64), "fp16", ())])
    seen: list[Any] = []
    monkeypatch.setattr(Kernel, "warm", lambda _, a, b, target, **inputs: seen.append((a.shape, b.stride(), target, set(inputs))))
    assert ahead.compile_one(asked, H200) == "" and seen == [((64, 64), (1, 64), H200, {"mask"})]

    def fail(*_: Any, **__: Any) -> None:
        raise CompileError("too much shared memory\nand so on")

    monkeypatch.setattr(Kernel, "warm", fail)
    assert ahead.compile_one(asked, H200) == "too much shared memory"
    assert ahead.compile_all([], H200) == 0


@pytest.mark.triton
@pytest.mark.slow
def test_kernels_are_compiled_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PATIENCE_S", 1200.0)  # on a busy machine processes of so low a priority wait long
    asked = cases.requests([Case("small", p, (64, 128, 64), "fp16", ()) for p in ("relu + bias", "drelu + bgrad")])
    assert ahead.compile_all(asked, H200) == 2


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("program", BY_NAME)
def test_every_contender_is_right_and_timed_on_a_gpu(program: str, dtype: str) -> None:
    row = headline.measured(Case("epilogues", program, (1000, 512, 256), dtype, cases.fused(program)))
    assert "failed" not in row and all("cannot be imported" in reason for reason in row["missing"].values()), row
    assert row["checked"][peers.OURS] == "within epigen's bound" and all(one["median_us"] > 0 for one in row["timing"].values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is its own
def test_torch_compile_and_a_cuda_graph_are_timed_on_a_gpu() -> None:
    compiled = headline.measured(Case("compiled", "dgelu + bgrad", (512, 512, 256), "bf16", (peers.OURS, peers.COMPILED)))
    graph = headline.measured(cases.small()[0])
    for row in (compiled, graph):
        assert "failed" not in row and not row["missing"] and len(row["timing"]) >= 2, row
    assert headline.copy_gbps() > 100


# -- another GPU of the architecture


@pytest.mark.slow
def test_an_h100_is_lent_what_is_fast_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two configs that were timed on an H100, one from the H200's records and one from its own, the shipped records choose one that is within 1 % in the mean."""
    monkeypatch.setattr(choose, "triton_version", lambda: "3.6.0")
    target = gpus.by_name("H100").target
    by_h200, by_own = ({headline.key(r): r for r in record.read(record.RESULTS / f"headline_h100{name}.json").rows} for name in ("_borrowed", ""))
    by_now, by_then = [], []
    for key in by_h200.keys() & by_own.keys():
        timed = {row["notes"][peers.OURS].partition(";")[0]: 1 / ratio for row in (by_h200[key], by_own[key]) if (ratio := bars.ratio(row, peers.MM))}
        borrowed = by_h200[key]["notes"].get(peers.OURS, "").partition(";")[0]
        now = headline.launched(by_own[key], peers.OURS, target)
        if now in timed and borrowed in timed:
            by_now.append(timed[now] / min(timed.values()))
            by_then.append(timed[borrowed] / min(timed.values()))
    assert len(by_now) > 150 and bars.geometric(by_now) < 1.01 and max(by_now) < 1.15
    assert bars.geometric(by_then) > 1.02 and max(by_then) > 1.3, "the H200's are not"
