"""bench.regret without a GPU: what is drawn, and what is said of times that are made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import borrow, regret
from bench.regret import PLAIN, PROBLEMS, Problem
from epigen import gpus
from epigen.choose.choose import Chooser
from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.dtypes import FP8E4M3, FP32, INT8
from epigen.tuning import report
from epigen.tuning.runner import Replay
from epigen.tuning.task import Baseline, Comparison, Outcome

H100 = gpus.by_name("H100").target


@pytest.fixture(scope="module")
def drawn() -> list[Problem]:
    return regret.problems(H100)


def test_half_are_plain_and_the_others_of_all_kinds(drawn: list[Problem]) -> None:
    kinds = Counter(p.kind for p in drawn)
    assert len(drawn) == PROBLEMS and kinds[PLAIN] == PROBLEMS // 2 and kinds["tiles"] >= 15
    assert set(kinds) == {PLAIN, "tiles", "fp8", "int8", "tf32", "batched", "unknown"} and min(kinds.values()) >= 8
    for kind, task in drawn:
        assert (task.a == FP8E4M3, task.a == INT8, task.a == FP32, len(task.shape) == 4) == tuple(kind == k for k in ("fp8", "int8", "tf32", "batched"))
        assert kind != "tiles" or any(i.indices == "mn" for i in task.spec.inputs) or len(task.spec.stores) > 1
        assert not task.spec.bare_product
    assert len({report.name(p.task) for p in drawn}) == PROBLEMS


def test_all_calls_draw_the_same(drawn: list[Problem]) -> None:
    assert [report.name(p.task) for p in regret.problems(H100, 30)] == [report.name(p.task) for p in drawn[:30]]


def test_nobody_tuned_them(drawn: list[Problem]) -> None:
    for task in [p.task for p in drawn[::20]]:
        found = Chooser(task.graph, Database(None))(task.spec, task.shape, task.target, "")
        assert not found.why.startswith("tuned for")


def test_what_is_held_out_was_measured_elsewhere() -> None:
    for part in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        gpu = gpus.find(part)
        assert gpu is not None
        own, others = (regret.shipped(held_out, gpu.target) for held_out in (False, True))
        assert {r.gpu for r in own} > {r.gpu for r in others} == {r.gpu for r in own} - {part}


def test_problems_of_an_earlier_run_are_passed_over(drawn: list[Problem]) -> None:
    known = [{"problem": report.name(p.task)} for p in drawn[:7]]
    assert next(regret.left(drawn, known)) is drawn[7] and len(list(regret.left(drawn, known))) == PROBLEMS - 7


class Runner(Replay):
    """A config takes as long as it is told."""

    def __init__(self, us: Callable[[KernelConfig], float]):
        super().__init__({}, Baseline(100.0, 120.0))
        self.us = us

    def available(self, config: KernelConfig) -> KernelConfig:
        return config

    def knows(self, config: KernelConfig) -> bool:  # noqa: ARG002  # all
        return True

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:  # noqa: ARG002
        return Outcome("ok", self.us(config), 0.1, 15)

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        return Comparison(tuple(self.measure(c, 0.0) for c in configs), self.baseline)


@pytest.fixture
def few(tmp_path: Path) -> Database:
    database = Database(tmp_path, seeds=())
    database.add(*regret.shipped(False, H100)[:30])
    return database


def test_what_a_search_finds_beside_it_is_what_was_lost(drawn: list[Problem], few: Database) -> None:
    """The config that a call gets takes 100 us, all others 80."""
    problem = drawn[0]
    untuned, _, _ = borrow.chosen(problem.task, few)
    row = regret.measured(problem, few, Runner(lambda c: 100.0 if c == untuned else 80.0), 10.0, trials=4)
    assert row["ratio"] == pytest.approx(1.25) and row["untuned"] == str(untuned) != row["tuned"]
    assert (row["borrowed_us"], row["tuned_us"], row["kind"]) == (100.0, 80.0, PLAIN)
    row = regret.measured(problem, few, Runner(lambda c: 70.0 if c == untuned else 80.0), 10.0, trials=4)
    assert row["ratio"] == 1.0, "what a short search has not found is nothing that was lost"


def test_what_cannot_be_tuned_is_said(drawn: list[Problem], few: Database) -> None:
    class Broken(Runner):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:  # noqa: ARG002
            return Outcome("wrong", detail="planted")

    row = regret.measured(drawn[0], few, Broken(lambda _: 1.0), 10.0, trials=4)
    assert row["failed"] and "ratio" not in row
    assert not regret.summary([row, {"kind": PLAIN, "problem": "x", "ratio": 1.0}], held_out=False)["holds"]


@pytest.mark.parametrize(("ratios", "held_out", "holds"), [((1.0, 1.08), False, True), ((1.0, 1.16), False, False), ((1.0, 1.16), True, False), ((1.0, 1.11), True, True), ((1.05, 1.05), False, False)])  # fmt: skip
def test_the_claim_is_of_the_mean_and_the_worst(ratios: tuple[float, ...], held_out: bool, holds: bool) -> None:
    found = regret.summary([{"kind": kind, "problem": kind, "ratio": r} for kind, r in zip(("plain", "tiles"), ratios, strict=True)], held_out)
    assert found["holds"] is holds and found["worst"] == max(ratios) and found["count"] == 2 and set(found["by_kind"]) == {"plain", "tiles"}


def test_nothing_measured_holds_nothing() -> None:
    assert not regret.summary([], held_out=False)["holds"]
