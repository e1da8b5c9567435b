"""`python -m bench`: the table of claims, comparing two results, and the figures, over made-up results."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from golden import Golden
from machines import NO_GPU

from bench import __main__ as bench
from bench import cases, compare, peers, record, registry
from bench.record import Report
from bench.registry import Claim

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws the results, and no test needs it")

# -- the table of claims


@pytest.mark.parametrize(
    "claim", [pytest.param(c, marks=needs_matplotlib if c.name in ("plot", "figures") else ()) for c in registry.CLAIMS], ids=lambda c: c.name
)
def test_every_claim_has_a_script_that_takes_what_the_table_says(claim: Claim, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [claim.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(claim.module).main()
    told = capsys.readouterr().out
    assert ended.value.code == 0 and claim.what and ("--commit" in told and "--out" in told) == claim.recorded
    assert all(option in told for option in claim.arguments[::2])


# those that run a command or tests of their own are told by these
_ASKED_BY_OTHERS = {"bench.differential", "bench.memcheck", "bench.gem", "bench.sweep", "bench.cold"}


@pytest.mark.parametrize("claim", [c for c in registry.CLAIMS if c.gpus and c.module not in _ASKED_BY_OTHERS], ids=lambda c: c.name)
def test_a_script_that_wants_a_gpu_says_so(claim: Claim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [claim.name, *claim.arguments, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="GPU"):
        importlib.import_module(claim.module).main(NO_GPU)
    assert not list(tmp_path.iterdir())


def test_no_script_is_forgotten() -> None:
    """Every module of bench that runs by itself is a claim, but for those that the command itself is made of."""
    folder = Path(registry.__file__).parent
    scripts = {p.stem for p in folder.glob("*.py") if '__name__ == "__main__"' in p.read_text()}
    assert scripts - {"__main__", "compare", "readme"} == {c.script or c.name for c in registry.CLAIMS}
    assert {c.name for c in registry.CLAIMS} >= set(cases.GROUPS)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have run. One of bench.gem fails."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 3 if "bench.gem" in command else 0)

    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(bench.shutil, "which", lambda _: None)
    return commands


def on(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(bench, "gpus", lambda: gpus)


def test_without_a_gpu_what_wants_one_is_skipped_in_words(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on(monkeypatch, 0)
    assert bench.main([]) == 0
    assert [c[1] for c in ran] == [
        "bench.mutants",
        "bench.owners",
        "bench.fuzz",
        "bench.digits",
        "bench.front",
        "bench.replay",
        "bench.model",
        "bench.plot",
        "bench.figures",
    ]
    told = capsys.readouterr().out
    assert "headline: skipped: it wants a GPU, and there is none" in told and "devices: skipped: it wants 2 GPUs, and there is none" in told


def test_everything_runs_in_order_whatever_fails(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on(monkeypatch, 1)
    assert bench.main(["--commit", "abc1234", "--out", str(tmp_path)]) == 1
    done = [c for c in registry.CLAIMS if not c.needs and c.gpus < 2]
    recorded = ["--out", str(tmp_path), "--commit", "abc1234"]
    assert ran == [["-m", c.module, *c.arguments, *(recorded if c.recorded else [])] for c in done]
    told = capsys.readouterr().out
    assert "gem: FAILED with status 3" in told and "headline: done" in told
    assert "memcheck: skipped: it wants compute-sanitizer, which is not installed" in told and "counters: skipped: it wants ncu" in told
    assert "devices: skipped: it wants 2 GPUs, and there is 1" in told


def test_one_claim_runs_by_its_name(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 1)
    assert bench.main(["skinny", "--", "--budget", "30"]) == 0
    (command,) = ran
    assert command[:4] == ["-m", "bench.headline", "--group", "skinny"] and command[-2:] == ["--budget", "30"]


def test_an_unknown_claim_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["haedline"])
    assert ended.value.code == 2 and "did you mean headline?" in capsys.readouterr().err


def test_the_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)
    assert bench.gpus() == 0


def test_the_claims_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [c.name for c in registry.CLAIMS]


def test_the_command_is_there() -> None:
    ran = subprocess.run([sys.executable, "-m", "bench", "compare", "nowhere", "else"], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (2, "there is no nowhere\n")


# -- comparing


def time_of(us: float, spread: float = 0.01, samples: int = 50) -> dict[str, float]:
    return {"median_us": us, "spread_us": us * spread, "samples": samples}


def result(ours: float = 10.0, mm: float = 10.0, gpu: str = "NVIDIA H200", spread: float = 0.01, samples: int = 50) -> Report:
    """Two rows as bench.headline writes them, of which the second never changes."""
    rows = [
        {"group": "epilogues", "program": "relu + bias", "shape": [4096, 4096, k], "dtype": "fp16", "layout": "nt", "how": "cold", "notes": {"epigen": str(ours)},
         "timing": {"epigen": time_of(mine, spread, samples), "mm": time_of(other, spread, samples)}}
        for k, mine, other in ((4096, ours, mm), (512, 3.0, 3.0))
    ]  # fmt: skip
    return Report("bench.headline", {"gpu": gpu, "date": str(ours)}, rows)


def compared(tmp_path: Path, old: Report, new: Report, *options: str) -> int:
    paths = [record.write(name, report, tmp_path) for name, report in (("old", old), ("new", new))]
    return compare.main([*map(str, paths), *options])


def changed(report: Report, *pairs: tuple[str, str]) -> Report:
    """With some texts in its rows in place of others."""
    text = json.dumps(report.rows)
    for old, new in pairs:
        text = text.replace(old, new)
    return replace(report, rows=json.loads(text))


def test_a_regression_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tmp_path, result(), result(ours=11.0)) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "new: epilogues relu + bias 4096x4096x4096 fp16 nt cold: epigen against mm: 1.000 before, 0.909 now: 10.0% slower, noise 3.8%"
    assert told[1:] == ["2 ratios compared: 1 slower by more than the noise, 0 faster"]


def test_a_gain_and_a_slower_machine_are_no_regressions(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert compared(tmp_path, result(), result(ours=9.0)) == 0
    golden(capsys.readouterr().out)
    assert compared(tmp_path, result(), result(ours=20.0, mm=20.0)) == 0, "twice the time of everything is the power limit's"


def test_noise_is_what_the_samples_say(tmp_path: Path) -> None:
    """5 % slower: beyond 3 % and three deviations where many samples agree, and within them where few differ by much."""
    assert compared(tmp_path, result(), result(ours=10.5)) == 1
    assert compared(tmp_path, result(spread=0.1, samples=9), result(ours=10.5, spread=0.1, samples=9)) == 0
    assert compared(tmp_path, result(), result(ours=10.5), "--drift", "0.06") == 0
    assert compare.deviation(time_of(10.0, 0.01349, 314)) == pytest.approx(0.01 * (3.14159265 / 2 / 314) ** 0.5)


def test_other_layouts_of_results_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    """bench.gem's and a host's: contenders under "host", or beside the program, the config being no part of the name."""
    times = {"epigen": time_of(30.0), "three operations": time_of(20.0)}
    gem = Report("bench.gem", {}, [{"m": 64, "k": 256, "n": 128, "config": "tiled", "host": times}], {"program": "relu(mm + bias)"})
    assert compared(tmp_path, gem, changed(gem, ("30.0", "40.0"), ("tiled", "persistent"))) == 1
    golden(capsys.readouterr().out, "host")
    host = Report("bench.host", {}, [{"program": "relu(mm + bias)", "epigen": time_of(8.0), "epigen, out=": time_of(5.0), "eager": time_of(20.0)}])
    assert compared(tmp_path, host, changed(host, ("5.0", "6.0"))) == 1
    golden(capsys.readouterr().out, "calls")
    alone = Report("bench.made_up", {}, [{"case": "first call", "epigen": time_of(8.0)}])
    assert compared(tmp_path, alone, changed(alone, ("8.0", "10.0"))) == 1
    golden(capsys.readouterr().out, "first call")


@pytest.mark.parametrize("name", ["headline", "host", "compiled", "gem_fp16", "training"])
def test_a_stored_result_whose_every_kernel_takes_twice_as_long_is_slower_throughout(name: str) -> None:
    """The forms that the scripts write are those that are compared."""
    old = record.read(record.RESULTS / f"{name}.json").body
    new = json.loads(json.dumps(old))
    for _, timed in compare.timings(new):
        for contender, time in timed.items():
            time["median_us"] *= 2 if contender.startswith("epigen") else 1  # type: ignore[index]
    found = list(compare.changes(old, new))
    assert len(found) > 5 and all(change.slower == pytest.approx(1) for change in found)
    assert not any(change.slower for change in compare.changes(old, old))


def test_a_kernel_that_gives_no_answer_any_more_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    broken, fewer = result(), result()
    del broken.rows[0]["timing"]["epigen"]
    del fewer.rows[0]
    assert compared(tmp_path, result(), broken) == 1
    golden(capsys.readouterr().out, "no time")
    assert compared(tmp_path, result(), fewer) == 0, "a part of the cases was measured"
    golden(capsys.readouterr().out, "fewer cases")


def test_different_gpus_are_not_compared_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    other = result(gpu="NVIDIA H100 80GB HBM3")
    assert compared(tmp_path, result(), other) == 2
    golden(capsys.readouterr().err, "refused")
    assert compared(tmp_path, result(), other, "--across-gpus") == 0
    golden(capsys.readouterr().out, "across")


def test_what_cannot_be_compared_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, nothing = record.write("good", result(), tmp_path), record.write("nothing", replace(result(), rows=[]), tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    folder, empty = tmp_path / "folder", tmp_path / "empty"
    for path in (folder, empty):
        path.mkdir()
    (folder / "good.json").write_text(good.read_text())
    for arguments, words in (
        ((good, tmp_path / "none.json"), "there is no "), ((good, bad), "is no JSON"), ((good, folder), "a file and a folder"),
        ((folder, empty), "no result in common"), ((nothing, nothing), "no timed case in common"),
    ):  # fmt: skip
        assert compare.main([str(a) for a in arguments]) == 2
        assert words in capsys.readouterr().err


def test_folders_are_compared_file_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, ours in ((old, 10.0), (new, 12.0)):
        record.write("headline", result(ours), folder)
    record.write("gone", result(), old)
    assert compare.main([str(old), str(new)]) == 1
    told = capsys.readouterr().out
    assert f"gone.json: {new} has none" in told and "headline: epilogues relu + bias" in told and "20.0% slower" in told


# -- the figures


def drawn_rows() -> list[dict[str, Any]]:
    """Two shapes a group, so that drawing is quick."""
    chosen = [c for c in cases.headline() if c.shape in (*cases.TABLE[5:7], *cases.GEM[1:], *cases.SKINNY[::9], *cases.ODD[:1])]
    return [
        {"group": c.group, "program": c.program, "shape": list(c.shape), "dtype": c.dtype, "layout": c.layout, "how": c.how, "bytes": c.bytes, "flops": c.flops,
         "missing": {}, "timing": {name: time_of(c.kernel_s * 1e6 * (1.4 if name == peers.EAGER else 1.0)) for name in c.contenders}}
        for c in chosen
    ]  # fmt: skip


@needs_matplotlib
def test_figures_are_drawn_from_the_stored_results_alone(tmp_path: Path) -> None:
    from bench import figures

    rows = drawn_rows()
    record.write("headline", Report("bench.headline", {"gpu": "NVIDIA H200"}, rows, {"copy_gbps": 4280.0}), tmp_path)
    times = {"epigen": time_of(7.0), "eager operations": time_of(20.0)}
    record.write("host", Report("bench.host", {}, [{"program": "relu + bias", "timing": times}]), tmp_path)
    found = figures.draw(tmp_path, tmp_path)
    assert [p.name for p in found] == [f"{name}.svg" for name in ("ratios", "roofline", "seeds", "host")]
    before = [p.read_bytes() for p in found]
    assert [p.read_bytes() for p in figures.draw(tmp_path, tmp_path)] == before
    assert all(p.stat().st_size > 2000 for p in found)


@needs_matplotlib
def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    from bench import figures

    assert figures.draw(tmp_path, tmp_path) == []
    record.write("headline", Report("bench.headline", {"gpu": "NVIDIA H200"}, []), tmp_path)
    record.write("host", Report("bench.host", {}, []), tmp_path)
    assert figures.draw(tmp_path, tmp_path) == []


@needs_matplotlib
def test_every_stored_result_that_has_a_figure_has_it_beside_it(tmp_path: Path) -> None:
    from bench import figures

    found = {p.name for p in figures.draw(record.RESULTS, tmp_path)}
    assert found <= {p.name for p in record.RESULTS.iterdir()}, "run: python -m bench.figures"
    assert {f"{name}.svg" for name in ("ratios", "roofline", "seeds", "host")} <= found
    assert {p.suffix for p in record.RESULTS.iterdir()} == {".json", ".svg"}
