"""Many problems on several GPUs: each is led once, idle GPUs take part, and whatever ends one of them ends none of the others wrongly."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from golden import Golden
from tuner_process import BASELINE, MadeUp, outcome_of

from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.dtypes import FP16
from epigen.errors import EpigenError, TuneError
from epigen.gpus import DEFAULT_TARGET
from epigen.ir.program import graph_of
from epigen.tuning import fleet
from epigen.tuning.fleet import tune_all
from epigen.tuning.interrupt import heeded
from epigen.tuning.search import Progress
from epigen.tuning.storage import open_storage
from epigen.tuning.study import Study
from epigen.tuning.task import Comparison, Outcome, Task
from epigen.tuning.tune import Tuned, study_name


def task(m: int = 256, text: str = "relu(mm + bias)") -> Task:
    return Task(graph_of(text), (m, 512, 512), FP16, FP16, (FP16,), "nt", "ieee", DEFAULT_TARGET)


HANGS_S = 250.0
"""What nothing takes that is not hanging, however slow or busy the machine is."""


class Gpu(MadeUp):
    """A made-up GPU, that notes which task each config was measured for. meet: is called with it before each measurement."""

    task: Task

    def __init__(self, log: list[tuple[int, Task, KernelConfig]], meet: Callable[[Gpu], object] = lambda _: None):
        super().__init__()
        self.all, self.meet, self.closed, self.begun = log, meet, False, 0

    def begin(self, task: Task) -> None:
        self.task = task
        self.begun += 1

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
        self.meet(self)
        self.all.append((self.task.device, self.task, config))
        return super().measure(config, limit_us)

    def close(self) -> None:
        self.closed = True


class Gpus:
    """Makes the runners, and remembers them."""

    def __init__(self, meet: Callable[[Gpu], object] = lambda _: None):
        self.meet = meet
        self.log: list[tuple[int, Task, KernelConfig]] = []
        self.made: list[Gpu] = []

    def __call__(self) -> Gpu:
        self.made.append(Gpu(self.log, self.meet))
        return self.made[-1]


@pytest.mark.slow
def test_every_problem_is_tuned_once_and_the_gpus_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both GPUs are at work at a time: each begins its second problem when the other does."""
    monkeypatch.setattr(fleet, "_WORTH_S", math.inf)  # nobody helps
    together = threading.Barrier(2)
    seen: set[tuple[Gpu, int]] = set()

    def meet(gpu: Gpu) -> None:
        if gpu.begun <= 2 and (gpu, gpu.begun) not in seen:
            seen.add((gpu, gpu.begun))
            together.wait(HANGS_S)

    database = Database(tmp_path, seeds=())
    gpus = Gpus(meet)
    told: list[tuple[int, int]] = []
    ended: list[int] = []
    tasks = [task(64 << i) for i in range(6)]
    found = tune_all(
        tasks, database, devices=(0, 1), trials=12, make=gpus, report=lambda i, p: told.append((i, p.trials)), done=lambda i, _: ended.append(i)
    )  # fmt: skip
    assert [t.problem.shape for t in found] == [t.shape for t in tasks]
    assert sorted(ended) == list(range(6)) and {i for i, _ in told} == set(range(6))
    assert len(database.records()) == 6
    by_gpu = Counter(device for device, _, _ in gpus.log)
    assert set(by_gpu) == {0, 1} and min(by_gpu.values()) >= 24, "each GPU leads some of the problems"
    assert Counter(t.shape for _, t, _ in gpus.log) == {t.shape: 12 for t in tasks}
    assert len(gpus.made) == 2 and all(g.closed for g in gpus.made)


@pytest.mark.slow
def test_an_idle_gpu_takes_part_in_the_last_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first trial that is over: from then on the two measure in step for a while."""
    monkeypatch.setattr(fleet, "_WORTH_S", 0.0)
    in_step = threading.Barrier(2)

    def meet(gpu: Gpu) -> None:
        leads = gpu is gpus.made[0]
        if 0 <= len(gpu.measured) - leads < 15:  # the leader's first trial brings the other
            in_step.wait(HANGS_S)

    gpus = Gpus(meet)
    (tuned,) = tune_all([task()], None, devices=(0, 1), trials=80, make=gpus)
    assert tuned.result is not None and len(tuned.result.outcomes) == 80
    configs = [c for _, _, c in gpus.log]
    assert len(configs) == len(set(configs)) == 80, "trials are shared and none is repeated"
    by_gpu = Counter(device for device, _, _ in gpus.log)
    assert min(by_gpu[0], by_gpu[1]) >= 15
    best = min(outcome_of(c).median_us for c in configs if outcome_of(c).kind == "ok")
    assert tuned.result.outcome.median_us <= 1.02 * best


def test_a_problem_without_a_config_that_works_ends_alone() -> None:
    class Wrong(Gpu):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            return Outcome("wrong", detail="planted") if self.task.shape[0] == 128 else super().measure(config, limit_us)

    log: list[tuple[int, Task, KernelConfig]] = []
    found = tune_all([task(64), task(128), task(256)], None, trials=6, make=lambda: Wrong(log))
    assert [bool(t.error) for t in found] == [False, True, False]
    assert found[1].result is None and "ended as wrong: planted" in found[1].error


def test_a_lost_run_off_leaves_the_best_of_the_trials() -> None:
    class Failed(Gpu):
        def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
            if configs and self.task.shape[0] == 64:
                raise EpigenError("timing the best configs beside the vendor's product failed: signal 9")
            return Comparison(tuple(outcome_of(c) for c in configs), BASELINE)

    log: list[tuple[int, Task, KernelConfig]] = []
    found = tune_all([task(64), task(128)], None, trials=4, make=lambda: Failed(log))
    first, second = (t.result for t in found)
    assert first is not None and first.complete and first.outcome == outcome_of(first.winner)
    assert first.baseline == BASELINE and second is not None


def test_what_nobody_expects_ends_all_and_is_raised() -> None:
    class Broken(Gpu):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:  # noqa: ARG002  # it fails whatever it is given
            raise ZeroDivisionError

    log: list[tuple[int, Task, KernelConfig]] = []
    made: list[Broken] = []

    def make() -> Broken:
        made.append(Broken(log))
        return made[-1]

    with pytest.raises(ZeroDivisionError):
        tune_all([task(64 << i) for i in range(4)], None, devices=(0, 1), make=make)
    assert all(g.closed for g in made)


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that tune are told, and end with what they have; and one key press may come as two signals."""
    stops: list[threading.Event] = []

    def heed(stop: threading.Event, patience_s: float) -> contextlib.AbstractContextManager[None]:  # noqa: ARG001  # however late the second is handled
        stops.append(stop)
        return heeded(stop, math.inf)

    monkeypatch.setattr(fleet, "heeded", heed)
    gpus = Gpus()
    storage = open_storage(None)
    ended: dict[int, Tuned] = {}
    sent: list[bool] = []

    def told(index: int, progress: Progress) -> None:
        if index == 1 and progress.trials >= 5 and not sent:
            sent.append(True)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            assert stops[0].wait(HANGS_S)

    tasks = [task(64 << i) for i in range(4)]
    found = tune_all(tasks, None, trials=60, make=gpus, report=told, done=lambda i, t: ended.update({i: t}), storage=storage)
    assert sent
    assert len(found) == 2 and list(ended) == [0, 1]
    whole, part = (t.result for t in found)
    assert whole is not None and whole.complete and part is not None and not part.complete
    assert len(part.outcomes) == 5 and part.baseline == BASELINE
    with Study(storage, study_name(tasks[1], gpus.made[0].kind)) as study:
        assert len(study.outcomes) == len(part.outcomes) and not study.under_way, "nothing is left for another run to wait for"


def test_an_impatient_ctrl_c_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second key press ends what does not end by itself.

    Each comes to another thread than the main one, which no wait of that is interrupted by, as by one that comes just before the wait.
    """
    monkeypatch.setattr(fleet, "_PATIENCE_S", 0.0)
    hangs, hanging, stops = threading.Event(), threading.Event(), list[threading.Event]()

    class Hanging(Gpu):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            hangs.set()
            hanging.wait(HANGS_S)
            return super().measure(config, limit_us)

    def seen(stop: threading.Event, patience_s: float) -> contextlib.AbstractContextManager[None]:
        stops.append(stop)
        return heeded(stop, patience_s)

    def press() -> None:
        for before in (hangs, stops[0]):  # the second no sooner than the first was heeded, however late that is
            before.wait(HANGS_S)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    monkeypatch.setattr(fleet, "heeded", seen)
    log: list[tuple[int, Task, KernelConfig]] = []
    pressing = threading.Thread(target=press)

    def make() -> Hanging:
        pressing.start()
        return Hanging(log)

    try:
        with pytest.raises(KeyboardInterrupt):
            tune_all([task()], None, make=make)
    finally:
        hanging.set()
        pressing.join()


def test_a_damaged_journal_is_the_error_of_its_own_problem(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "256.journal").write_text("no journal\n")
    told: list[tuple[int, str]] = []
    gpus = Gpus()
    found = tune_all(
        [task(), task(512)], None, trials=4, storage=lambda one: f"{tmp_path}/{one.shape[0]}.journal", make=gpus, done=lambda i, tuned: told.append((i, tuned.error)),
    )  # fmt: skip
    assert found[0].result is None and found[0].error.startswith(f"{tmp_path}/256.journal is no journal of Optuna's, or is damaged in line 1: remove it")
    assert found[1].result is not None and [i for i, _ in told] == [0, 1]
    with golden.raises(TuneError):
        tune_all([task(), task(512)], None, trials=4, storage=f"{tmp_path}/256.journal", make=gpus)
