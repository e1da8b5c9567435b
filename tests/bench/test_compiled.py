"""`bench.compiled` without a GPU: whose turn it is, and what becomes of a run."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from golden import Golden
from machines import machine

from bench import bars, cases, compiled, headline, peers, record, timing
from bench.cases import Case
from bench.programs import BY_NAME
from epigen import gpus

pytestmark = pytest.mark.usefixtures("one_thread")


class Owned:
    """A lock that says who has it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0

    def acquire(self) -> None:
        self.lock.acquire()
        self.depth += 1

    def release(self) -> None:
        self.depth -= 1
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_the_gpu_is_given_up_while_a_contender_is_made_and_for_no_longer(golden: Golden) -> None:
    lock = Owned()
    depths: list[int] = []

    def make(problem: peers.Problem) -> peers.Contender:
        depths.append(lock.depth)
        return peers.eager(problem)

    def broken(_: peers.Problem) -> peers.Contender:
        depths.append(lock.depth)
        raise ValueError("it does not compile")

    problem = peers.problem(BY_NAME["relu + bias"], (8, 16, 8), "fp16", "nt", "cpu")
    with lock:
        assert compiled.beside(make, lock)(problem).outputs is not None and lock.depth == 1
        with golden.raises(ValueError):
            compiled.beside(broken, lock)(problem)
        assert lock.depth == 1, "it is taken back whatever happens"
    assert depths == [0, 0]


def test_what_tuning_measures_has_the_gpu_alone_and_is_compiled_before() -> None:
    lock = Owned()
    depths: list[int] = []

    class Benchmarker:
        def benchmark_gpu(self, call: Any, *, rep: int) -> tuple[int, int]:
            call()
            return lock.depth, rep

    compiled.alone(Benchmarker, lock)
    assert Benchmarker().benchmark_gpu(lambda: depths.append(lock.depth), rep=7) == (1, 7)
    assert depths == [0, 1] and lock.depth == 0


def test_times_that_another_process_has_disturbed_are_taken_again() -> None:
    told = [25.0, 2.1, 2.0, 1.0]

    def measure(contenders: timing.Contenders) -> dict[str, dict[str, float]]:
        return {name: {"median_us": 10.0, "spread_us": told.pop(0), "samples": 20} for name in contenders}

    assert compiled.cold({"a": print}, measure) == {"a": {"median_us": 10.0, "spread_us": 2.0, "samples": 20}} and told == [1.0]
    told[:] = [9.0] * 9
    assert compiled.cold({"a": print}, measure)["a"]["spread_us"] == 9.0 and len(told) == 5, "in the end it is as it is"


def row_of(case: Case) -> dict[str, Any]:
    return {
        "group": case.group, "program": case.program, "shape": list(case.shape), "dtype": case.dtype, "layout": case.layout, "how": case.how,
        "timing": {name: {"median_us": 10.0 + i, "spread_us": 1.0} for i, name in enumerate(case.contenders)}, "missing": {},
        "notes": {peers.OURS: f"config {case.shape[2]}; tuned"},
    }  # fmt: skip


def test_the_programs_of_a_shape_are_one_group_and_the_longest_come_first() -> None:
    todo = cases.compiled()
    found = compiled.groups(todo)
    assert {len(group) for group in found} == {len(BY_NAME)} and {c for group in found for c in group} == set(todo)
    assert all(len({(c.shape, c.dtype) for c in group}) == 1 for group in found)
    work = [math.prod(group[0].shape) for group in found]
    assert work == sorted(work, reverse=True)


def test_rows_come_in_order_and_what_is_left_out_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    todo = [c for c in cases.compiled() if max(c.shape) <= 1024]
    saved: list[tuple[int, int]] = []

    def measure(group: Sequence[Case], until: float) -> list[dict[str, Any]]:
        assert until == 5.0
        if group[0].shape == (1024, 1024, 1024) and group[0].dtype == "bf16":
            raise BrokenExecutor("a process ended")
        return [row_of(case) for case in group[: 3 if group[0].dtype == "fp16" else None]]

    with ThreadPoolExecutor(2) as pool:
        body = compiled.gather(todo, [], pool, measure, 5.0, lambda body: saved.append((len(body["rows"]), len(body["left_out"]))))
    lost = [c for c in todo if c.shape[0] == 1024 and c.dtype == "bf16"]
    late = [c for c in todo if c.dtype == "fp16" and c.program in list(BY_NAME)[3:]]
    there = [c for c in todo if c not in lost and c not in late]
    assert [headline.key(row) for row in body["rows"]] == [c.key for c in there] and len(there) > 12
    assert sorted(body["left_out"]) == sorted(map(str, [*lost, *late]))
    assert len(saved) == 5 and all(sum(one) == len(todo) for one in saved) and saved[-1][0] == len(there)
    told = capsys.readouterr().out
    assert "lost: BrokenExecutor: a process ended" in told and told.count("torch.compile 1.100") == len(there)
    (verdict,) = [v for v in bars.verdicts(body["rows"]) if v["rows"]]
    assert verdict["baseline"] == peers.COMPILED and verdict["met"] is True and verdict["mean"] == 1.1


def test_the_script_writes_what_the_processes_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[Any] = []

    def pool(count: int, _: object, begin: object, shared: tuple[Any, ...]) -> ThreadPoolExecutor:
        begun.append((count, begin, len(shared[1]), os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(compiled.ahead, "compile_all", lambda requests, _: len(requests))
    monkeypatch.setattr(headline, "launched", lambda row, *_: f"config {row['shape'][2]}")
    monkeypatch.setattr(compiled.concurrent.futures, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(compiled, "_measured", lambda group, until: [row_of(case) for case in group if until > 100])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("sys.argv", ["compiled", "--processes", "3", "--commit", "abc1234", "--out", str(tmp_path)])
    compiled.main(machine(gpus.DEFAULT.target, gpus.DEFAULT.target))
    assert begun[0][:3] == (6, compiled._begin, 2) and not Path(begun[0][3]).exists(), "torch.compile's caches were fresh, and are gone"
    found = record.read(tmp_path / "compiled.json")
    assert found.summary["gpus"] == 2 and found.summary["processes"] == 3 and found.environment["commit"] == "abc1234"
    assert [headline.key(row) for row in found.rows] == [c.key for c in cases.compiled()] and found.summary["left_out"] == []
    found.rows[5]["timing"][peers.OURS]["spread_us"] = 5.0
    del found.rows[7]["timing"][peers.COMPILED]
    del found.rows[9]
    found.rows[10]["notes"][peers.OURS] = "config 1; tuned on another day"
    record.write("compiled", found, tmp_path)
    monkeypatch.setattr("sys.argv", ["compiled", "--more", "--commit", "def5678", "--out", str(tmp_path)])
    compiled.main(machine(gpus.DEFAULT.target, gpus.DEFAULT.target))
    more = record.read(tmp_path / "compiled.json")
    assert [headline.key(row) for row in more.rows] == [c.key for c in cases.compiled()] and more.environment["commit"] == "def5678"
    assert [i for i, row in enumerate(more.rows) if "commit" not in row] == [5, 7, 9, 11]
    assert {row.get("commit") for row in more.rows} == {"abc1234", None}
    assert "1.10 in the mean, 1.00 each: met" in capsys.readouterr().out
