"""The scripts behind the claims about training, where there is no GPU: few steps of the digits, and the contenders of a step on CPU tensors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fake_nvmath
import pytest
import torch
from checkout import ROOT
from golden import Golden
from machines import NO_GPU, ONE_H200
from torch import Tensor

import epigen
from bench import digits, models, networks, peers, record, training
from bench.digits import Digits
from bench.networks import LAYERS, Network
from bench.record import Report

WIDTH, BATCH = 128, 40  # cuBLASLt pads masks to 128 columns


pytestmark = pytest.mark.usefixtures("one_thread")


# -- the digits

SOME = Digits(torch.rand(160, 64, generator=torch.Generator().manual_seed(0)), torch.arange(160) % 10, held_out=32)


@pytest.fixture(autouse=True)
def _two_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "ORDERS", 2)


needs_sklearn = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn has the digits, and no other test needs it")


def test_both_networks_begin_alike() -> None:
    ours, eager = digits.start(by_epigen=True), digits.start()
    assert isinstance(ours, epigen.nn.MLP) and not any(isinstance(m, epigen.nn.Linear) for m in eager)
    assert all(map(torch.equal, ours.parameters(), eager.parameters())) and len(list(eager.parameters())) == 6
    with torch.no_grad():
        torch.testing.assert_close(digits.reordered(digits.start(), 1)(SOME.x), eager(SOME.x))
    assert not torch.equal(digits.reordered(digits.start(), 1)[0].weight, eager[0].weight), "the sums are in another order"


def test_a_few_steps_of_every_dtype_agree() -> None:
    rows, about = digits.measure(SOME, list(digits.DTYPES), epochs=2)
    assert [row["dtype"] for row in rows] == ["fp32", "bf16", "fp16"] and json.dumps([rows, about])
    for row in rows:
        assert len(row["losses"]["epigen"]) == len(row["losses"]["eager"]) == 4 and len(row["right"]["eager"]) == 1 + digits.ORDERS
        assert row["apart"] <= row["tolerance"] == 2 * row["from_float64"]["eager"] and row["losses"]["epigen"][0] == pytest.approx(2.3, abs=0.1)
    apart = [row["apart"] for row in rows]
    assert apart[0] < 1e-5 < max(apart[1:]) < 0.05, "bf16 and fp16 are what they are called"


def test_a_run_that_goes_astray_breaks_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    right = digits.trained(digits.start(), SOME, torch.float64, 1)

    def start(by_epigen: bool = False) -> torch.nn.Sequential:
        torch.manual_seed(digits.SEED)
        return networks.plain(digits.SIZES, "silu" if by_epigen else "relu")

    monkeypatch.setattr(digits, "start", start)
    row = digits.compared("fp32", SOME, right, 1)
    assert not row["holds"]["curves"] and "False" in digits.line(row, 32)


def read(both: int, ours: int, eager: int, neither: int) -> tuple[digits.Trained, digits.Trained]:
    """Two networks by how many images each reads rightly, alone or with the other."""
    return digits.Trained((), (*[True] * (both + ours), *[False] * (eager + neither))), digits.Trained(
        (), (*[True] * both, *[False] * ours, *[True] * eager, *[False] * neither)
    )


def test_accuracy_is_compared_image_by_image() -> None:
    found, other = read(340, 5, 6, 9)
    assert (found.right, other.right, found.alone(other), other.alone(found)) == (345, 346, 5, 6)
    assert digits.as_well(found, other) and digits.as_well(other, found) and digits.as_well(other, other)
    assert not digits.as_well(*read(320, 10, 14, 16)), "4 of 360 are more than 1 %, whatever chance allows"
    assert digits.as_well(*read(990, 1, 6, 3)) and not digits.as_well(*read(990, 0, 6, 4)), "6 to none in 1000 are no chance"
    assert [round(digits.mcnemar(*n), 6) for n in ((0, 0), (0, 5), (6, 0), (1, 6), (5, 6))] == [1, 0.0625, 0.03125, 0.125, 1]


def test_the_test_is_the_one_that_statisticians_have() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")
    for one in range(8):
        for other in range(not one, 20):
            assert digits.mcnemar(one, other) == pytest.approx(stats.binomtest(one, one + other).pvalue)


@needs_sklearn
@pytest.mark.parametrize("dtype", digits.DTYPES)
def test_a_network_that_reads_worse_breaks_the_claim(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All it sees of an image goes through 8 units in place of 256."""
    monkeypatch.setattr(digits, "ORDERS", 1)
    found = digits.digits("cpu")
    exact = digits.trained(digits.start(), found, torch.float64, 2)
    assert all(digits.compared(dtype, found, exact, 2)["holds"].values())

    def start(by_epigen: bool = False) -> torch.nn.Sequential:
        torch.manual_seed(digits.SEED)
        return networks.plain((64, 8, 128, 10)) if by_epigen else networks.plain(digits.SIZES)

    monkeypatch.setattr(digits, "start", start)
    row = digits.compared(dtype, found, exact, 2)
    assert not row["holds"]["accuracy"] and row["right"]["epigen"] < row["right"]["eager"][0] and row["mcnemar_p"] < 0.05, row


@needs_sklearn
def test_the_script_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = digits.digits("cpu")
    assert found.x.shape == (1797, 64) and found.x.max() == 1 and found.y.bincount().min() > 170
    monkeypatch.setattr(digits, "digits", lambda _: SOME)
    monkeypatch.setattr("sys.argv", ["digits", "--dtypes", "fp32", "--epochs", "1", "--device", "cpu", "--commit", "abc1234", "--out", str(tmp_path)])
    digits.main()
    report = record.read(tmp_path / "digits_cpu.json")
    assert report.environment["commit"] == "abc1234" and report.summary["holds"] and "claimed: True" in capsys.readouterr().out
    if importlib.util.find_spec("matplotlib") is not None:
        from bench import figures

        before = (tmp_path / "digits_cpu.svg").read_bytes()
        assert len(before) > 2000 and [p.read_bytes() for p in figures.draw(tmp_path, tmp_path)] == [before], "it is a figure like the others"


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with golden.raises(SystemExit):
        digits.digits("cpu")


def test_the_stored_run_holds() -> None:
    report = record.read(record.RESULTS / "digits_cpu.json")
    held_out = report.summary["held_out"]
    assert report.summary["holds"] and {row["dtype"] for row in report.rows} == set(digits.DTYPES)
    for row in report.rows:
        ours, eager = row["losses"].values()
        assert max(abs(a - b) for a, b in zip(ours, eager, strict=True)) == pytest.approx(row["apart"], rel=1e-2)
        right, alone = row["right"], row["right_alone"]
        assert right["epigen"] - right["eager"][0] == alone["epigen"] - alone["eager"] and right["epigen"] > 0.95 * held_out
        assert abs(right["epigen"] - right["eager"][0]) <= digits.SLACK * held_out and row["mcnemar_p"] > digits.SIGNIFICANT
    first = report.rows[0]["right"]
    assert {first["epigen"]} == set(first["eager"]), "in fp32 all orders read the same number"


# -- a training step


def times(contenders: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """In place of a GPU's: 20 ms by eager torch, 2 ms less by each that comes earlier in the table."""
    for run in contenders.values():
        run()
    return {name: {"median_us": 18e3 + 2e3 * i, "spread_us": 10.0, "samples": 20} for i, name in enumerate(contenders)}


def saved(network: Network) -> dict[str, int]:
    """What autograd keeps from forward to backward, beside parameters and x; on the CPU nobody counts what is allocated."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not t.requires_grad or t.grad_fn is not None:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        left = network.forward()
    held = sum(size for size in kept.values() if size == 2 * BATCH * WIDTH)
    network.backward(left)
    return {"held_bytes": held, "peak_bytes": held}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch.compile, which would import Triton in the mode that other tests of this process do not want."""
    told: list[Any] = []
    monkeypatch.setattr(networks.torch, "_dynamo", type("", (), {"reset": lambda: told.append("reset")}), raising=False)
    monkeypatch.setattr(torch, "compile", lambda run, **options: told.append(options) or run)
    seed = torch.manual_seed.__wrapped__  # at its first call in a process torch asks torch._dynamo how to run it
    monkeypatch.setattr(seed, "__dynamo_disable", seed, raising=False)
    return told


def test_every_contender_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch, compiler: list[Any]) -> None:
    nvmath = fake_nvmath.installed(monkeypatch)
    freed = nvmath.freed
    row = training.timed(WIDTH, BATCH, list(networks.MAKERS), "cpu", times, saved)
    assert list(row["memory"]) == ["epigen", "eager", "torch.compile", "nvmath"] and not row["missing"] and "failed" not in row
    assert list(row["timing"]) == [*row["memory"], networks.PRODUCTS]
    assert all(len(e) == 2 * LAYERS and min(e) > 0 and max(e) < 0.5 for e in row["errors"].values())
    assert compiler == ["reset", {"mode": peers.COMPILE_MODE, "dynamic": False, "fullgraph": True}]
    assert nvmath.freed == freed + 4 and nvmath.tuned[-4:] == [peers.AUTOTUNED] * 4
    assert json.dumps(row) and "epigen 18.000 ms; eager 20.000 ms" in training.line(row)


def test_the_products_alone_are_those_of_the_step() -> None:
    task = networks.task(WIDTH, BATCH, on="cpu")
    found = networks.products(task)()
    module = task.plain()
    y, results = task.x, []
    for m in module:
        y = m(y)
        results += [y - m.bias] if isinstance(m, torch.nn.Linear) else []
    for y, expected in zip(found[:LAYERS], results, strict=True):
        torch.testing.assert_close(y, expected.detach(), atol=0.05, rtol=0.05)
    weights = [g for g in networks.eager(task).step() if g.ndim == 2]
    assert len(found) == 3 * LAYERS - 1, "the first layer's input has no gradient"
    assert all(map(torch.equal, found[LAYERS::2], weights[::-1]))


def test_nvmath_holds_no_operands_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would count among what a step leaves behind."""
    fake_nvmath.installed(monkeypatch)
    one = networks.nvmath(networks.task(WIDTH, BATCH, on="cpu"))
    left = one.forward()
    between = weakref.ref(left[2])
    assert between() is not None
    one.backward(left)
    assert not left and between() is None
    one.close()


def test_a_step_begins_anew_each_time() -> None:
    task = networks.task(WIDTH, BATCH, on="cpu")
    for make in (networks.ours, networks.eager):
        one = make(task)
        first, second = one.step(), one.step()
        assert all(map(torch.equal, first, second)), "gradients do not add up"


@pytest.mark.parametrize("spoil", [lambda g: g[0].mul_(1.5), lambda g: g[5].__setitem__(3, 9.0), lambda g: g[2][:4].zero_(), lambda g: g[7].fill_(torch.nan)])
def test_a_wrong_gradient_is_not_timed(spoil: Callable[[list[Tensor]], object], monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def wrong(task: networks.Task) -> Network:
        right = networks.eager(task)

        def backward(left: Any) -> list[Tensor]:
            found = [g.clone() for g in right.backward(left)]
            spoil(found)
            return found

        return Network(right.forward, backward, close=lambda: closed.append("closed"))

    monkeypatch.setitem(networks.MAKERS, peers.OURS, wrong)
    row = training.timed(WIDTH, BATCH, [peers.OURS, peers.EAGER], "cpu", times, saved)
    assert row["missing"][peers.OURS].startswith("wrong gradient of the ") and list(row["timing"]) == [peers.EAGER, networks.PRODUCTS] and closed == ["closed"]
    assert [one["met"] for one in training.verdicts([row])] == [None] * 3


def test_a_peer_that_is_missing_or_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: networks.Task) -> Network:
        raise RuntimeError("no algorithm\nand a long story")

    monkeypatch.setitem(sys.modules, "nvmath", None)
    monkeypatch.setitem(networks.MAKERS, peers.COMPILED, fails)
    row = training.timed(WIDTH, BATCH, list(networks.MAKERS), "cpu", times, saved)
    assert "nvmath-python cannot be imported" in row["missing"]["nvmath"] and row["missing"][peers.COMPILED] == "RuntimeError: no algorithm"
    assert list(row["timing"]) == [peers.OURS, peers.EAGER, networks.PRODUCTS]


def test_a_timer_that_fails_leaves_the_other_widths() -> None:
    body: dict[str, Any] = {}
    training.run([WIDTH], BATCH, [peers.OURS], body, 1e9, lambda: None, "cpu", lambda _: 1 / 0, saved)
    assert body["rows"][0]["failed"] == "ZeroDivisionError: division by zero" and len(body["rows"]) == 4 and "FAILED" in training.line(body["rows"][0])


@pytest.mark.parametrize("activation", networks.ACTIVATIONS)
def test_what_a_forward_leaves_behind(activation: str) -> None:
    """In tiles: between layers, and the pre-activations. The verdict follows from it."""
    row = training.weighed(WIDTH, BATCH, activation, "cpu", saved)
    assert not row["missing"]
    tiles = {name: one["held_bytes"] / (2 * BATCH * WIDTH) for name, one in row["memory"].items()}
    hidden = LAYERS - 1
    eager = hidden * (1 if activation == "relu" else 2) + 1  # and x
    assert tiles == {peers.EAGER: eager, peers.OURS: eager, training.RECOMPUTED: hidden + 1}
    found = training.verdicts([row])
    assert [one["met"] for one in found] == [True] * (1 if activation == "relu" else 2)
    row["memory"][peers.OURS]["held_bytes"] *= 2
    assert training.verdicts([row])[0]["met"], "masks are kept beside the activations, and the claim is of the peak"
    row["memory"][peers.OURS]["peak_bytes"] *= 2
    assert training.verdicts([row])[0]["met"] is False
    if activation != "relu":
        row["memory"][training.RECOMPUTED]["held_bytes"] *= 2
        assert training.verdicts([row])[1]["met"] is False


def test_the_bars_of_speed() -> None:
    def met(**us: float) -> list[Any]:
        timing = {name.replace("_", "."): {"median_us": value} for name, value in us.items()}
        return [one["met"] for one in training.verdicts([{"case": "", "width": width, "timing": timing}])]

    width = 4096
    assert met(epigen=100, eager=110, torch_compile=105, nvmath=100.1) == [True] * 3
    assert met(epigen=100, eager=109.9, torch_compile=104.9, nvmath=100) == [False] * 3
    assert met(epigen=100, nvmath=120) == [None, None, True] and met(eager=100) == [None] * 3
    width = 8192
    assert met(epigen=100, eager=108) == [True, None, None] and met(epigen=100, eager=107.9) == [False, None, None]


def test_the_budget_leaves_out_what_has_not_begun(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    body, clock, saves = {}, iter([0.0, 1.0, 2.0, 99.0, 99.0, 99.0, 99.0, 99.0, 99.0]), []
    training.run([WIDTH, 2 * WIDTH], BATCH, [peers.EAGER], body, 10.0, lambda: saves.append(1), "cpu", times, saved, lambda: next(clock))
    assert [row["width"] for row in body["rows"]] == [WIDTH, 2 * WIDTH] and len(saves) == 2
    assert body["left_out"] == [f"width {w}: memory with {a}" for w in (WIDTH, 2 * WIDTH) for a in networks.ACTIVATIONS]
    golden(capsys.readouterr().out)


def on_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script takes the CPU for a GPU."""

    def run(*given: Any, **_: Any) -> None:
        whole(*given, "cpu", times, saved)

    whole = training.run
    monkeypatch.setattr(training, "run", run)


def test_the_whole_script_with_a_stand_in_for_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_a_stand_in(monkeypatch)
    arguments = ["--widths", str(WIDTH), "--batch", str(BATCH), "--without", "compile", "nvmath", "--commit", "abc1234", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["training", *arguments])
    training.main(ONE_H200)
    found = record.read(tmp_path / "training.json")
    assert found.environment["commit"] == "abc1234" and found.summary["without"] == ["compile", "nvmath"] and len(found.rows) == 4
    assert len(training.verdicts(found.rows)) == 3 + 5
    told = capsys.readouterr().out
    assert "1.1 times as fast as eager: 1.1111, holds" in told and "as fast as nvmath: None, not measured" in told


def test_memory_alone_is_a_result_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_a_stand_in(monkeypatch)
    monkeypatch.setattr("sys.argv", ["training", "--memory", "--widths", str(WIDTH), "--batch", str(BATCH), "--out", str(tmp_path)])
    training.main(ONE_H200)
    (result,) = tmp_path.iterdir()
    rows = record.read(result).rows
    assert result.name == "training_memory.json" and [row["activation"] for row in rows] == list(networks.ACTIVATIONS) and len(training.verdicts(rows)) == 5


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden) -> None:
    monkeypatch.setattr("sys.argv", ["training", "--out", str(tmp_path)])
    with golden.raises(SystemExit):
        training.main(NO_GPU)
    assert not list(tmp_path.iterdir())


ONE_GRAPH = """
import torch
from bench import networks
task = networks.task(64, 16, on="cpu")
module = task.plain()
traced = networks.of_module(module, task.x, task.gradient, torch.compile(module, backend="aot_eager", dynamic=False, fullgraph=True))
assert all(map(torch.allclose, traced.step(), networks.eager(task).step()))
"""


@pytest.mark.slow
def test_what_torch_compiles_is_one_graph() -> None:
    """In a process of its own: torch's compiler imports Triton, which other tests of this one want in its other mode."""
    subprocess.run([sys.executable, "-c", ONE_GRAPH], cwd=ROOT, check=True)


@pytest.mark.gpu
# a backward that begins with a product is the first of autograd's thread to need the CUDA context, which torch then sets, with a warning
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning")
def test_every_contender_is_right_timed_and_weighed_on_a_gpu() -> None:
    names = [name for name in networks.MAKERS if name != peers.COMPILED]
    row = training.timed(1024, 512, names)
    assert "failed" not in row and all("cannot be imported" in why for why in row["missing"].values()), row
    assert all(one["median_us"] > 0 for one in row["timing"].values()) and all(one["peak_bytes"] >= one["held_bytes"] > 0 for one in row["memory"].values())
    for activation in networks.ACTIVATIONS:  # as in the claim, activations are larger than weights
        claims = training.verdicts([training.weighed(1024, 4096, activation)])
        assert all(one["met"] for one in claims), claims


# -- models


def test_a_newer_run_of_models_keeps_what_it_did_not_measure(golden: Golden) -> None:
    def result(commit: str, **rows: tuple[tuple[str, ...], dict[str, Any]]) -> Report:
        about = {"gpu": "H100", "torch": "2.11", "triton": "3.6", "commit": commit}
        made = [{"model": name, "tokens": 8192, "step_ms": dict.fromkeys(ways, 1.0)} | more for name, (ways, more) in rows.items()]
        return Report("bench.models", about, made)

    def last(report: Report) -> dict[str, str | None]:
        return {row["model"]: row.get("commit") for row in report.rows if "earlier" not in row}

    def earlier(report: Report) -> list[tuple[str, str]]:
        return [(row["model"], row["commit"]) for row in report.rows if "earlier" in row]

    plain = ("eager", "epigen")
    first = result("a", bert=((*plain, "tuned"), {}), llama=(plain, {}), opt=(plain, {"losses": {"steps": 50}}))
    found = models.merged(first, result("b", bert=(plain, {}), opt=(plain, {})))
    assert last(found) == {"bert": None, "llama": "a", "opt": None} and earlier(found) == [("bert", "a"), ("opt", "a")]
    again = models.merged(found, result("c", bert=((*plain, "tuned"), {}), llama=(plain, {})))
    assert last(again) == {"bert": None, "llama": None, "opt": "b"} and earlier(again) == [("opt", "a")]
    with golden.raises(SystemExit):
        models.merged(found, Report("bench.models", {**first.environment, "gpu": "H200"}, []))
