"""bench.regret without a GPU: what is drawn, and what is said of times that are made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import borrow, regret
from bench.regret import HELD_OUT, PLAIN, PROBLEMS, SHIPPED, Problem
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
        every, others = (regret.shipped(gpu.target)[among] for among in (SHIPPED, HELD_OUT))
        assert {r.gpu for r in every} > {r.gpu for r in others} == {r.gpu for r in every} - {part}


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
def few(tmp_path: Path) -> dict[str, Database]:
    """Thirty records to look up among, and none."""
    databases = {among: Database(tmp_path / among, seeds=()) for among in (SHIPPED, HELD_OUT)}
    databases[SHIPPED].add(*regret.shipped(H100)[SHIPPED][:30])
    return databases


def test_what_a_search_finds_beside_it_is_what_was_lost(drawn: list[Problem], few: dict[str, Database]) -> None:
    """The configs that calls get take 100 and 90 us, all others 80."""
    pairs = ((p, [borrow.chosen(p.task, few[among])[0] for among in (SHIPPED, HELD_OUT)]) for p in drawn)
    problem, (untuned, held_out) = next((p, both) for p, both in pairs if both[0] != both[1])
    row = regret.measured(problem, few, Runner(lambda c: {untuned: 100.0, held_out: 90.0}.get(c, 80.0)), 10.0, trials=4)
    assert row["ratios"] == {SHIPPED: pytest.approx(1.25), HELD_OUT: pytest.approx(1.125)}
    assert str(untuned) == row["untuned"][SHIPPED]["config"] != row["tuned"] and str(held_out) == row["untuned"][HELD_OUT]["config"]
    assert (row["shipped_us"], row["held_out_us"], row["tuned_us"], row["kind"]) == (100.0, 90.0, 80.0, problem.kind)


def test_what_a_short_search_has_not_found_is_nothing_that_was_lost(drawn: list[Problem], few: dict[str, Database]) -> None:
    held_out = borrow.chosen(drawn[1].task, few[HELD_OUT])[0]
    row = regret.measured(drawn[1], few, Runner(lambda c: 70.0 if c == held_out else 80.0), 10.0, trials=1)
    assert row["ratios"][HELD_OUT] == 1.0 and row["tuned"] != str(held_out)


def test_a_search_adds_nothing_to_what_others_borrow(drawn: list[Problem], few: dict[str, Database]) -> None:
    before = {among: database.records() for among, database in few.items()}
    regret.measured(drawn[0], few, Runner(lambda _: 80.0), 10.0, trials=2)
    assert {among: database.records() for among, database in few.items()} == before


def test_what_cannot_be_tuned_is_said(drawn: list[Problem], few: dict[str, Database]) -> None:
    class Broken(Runner):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:  # noqa: ARG002
            return Outcome("wrong", detail="planted")

    row = regret.measured(drawn[0], few, Broken(lambda _: 1.0), 10.0, trials=4)
    assert row["failed"] and "ratios" not in row
    assert not regret.summary([row, _row(PLAIN, 1.0, 1.0)])["holds"]


def _row(kind: str, shipped: float, held_out: float) -> dict[str, Any]:
    return {"kind": kind, "ratios": {SHIPPED: shipped, HELD_OUT: held_out}}


@pytest.mark.parametrize(
    ("own", "others", "within"),
    [
        ((1.0, 1.08), (1.0, 1.08), (True, True)),
        ((1.0, 1.16), (1.0, 1.16), (False, False)),  # 1.077 in the mean
        ((1.0, 1.04), (1.0, 1.11), (True, True)),
        ((1.05, 1.05), (1.05, 1.05), (False, True)),
        ((1.0, 1.0), (1.0, 1.21), (True, False)),
    ],
)
def test_the_claim_is_of_the_mean_and_the_worst(own: tuple[float, float], others: tuple[float, float], within: tuple[bool, bool]) -> None:
    found = regret.summary([_row(kind, *both) for kind, both in zip((PLAIN, "tiles"), zip(own, others, strict=True), strict=True)])
    assert tuple(found[among]["within"] for among in (SHIPPED, HELD_OUT)) == within and found["holds"] is all(within)
    assert found[SHIPPED]["worst"] == max(own) and found[HELD_OUT]["count"] == 2 and set(found[SHIPPED]["by_kind"]) == {PLAIN, "tiles"}


def test_nothing_measured_holds_nothing() -> None:
    assert not regret.summary([])["holds"]
