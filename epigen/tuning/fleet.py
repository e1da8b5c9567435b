"""Tunes many problems on the GPUs of one host: a thread, a measuring worker and compiling workers a GPU.

Each GPU leads one problem after the other, and where none is left to begin, takes part in one that another GPU still leads.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from epigen.db.database import Database
from epigen.errors import EpigenError, TuneError
from epigen.tuning.interrupt import heeded
from epigen.tuning.runner import GpuRunner, Runner, compile_workers_for
from epigen.tuning.search import Progress
from epigen.tuning.storage import Storage, open_storage
from epigen.tuning.task import Task
from epigen.tuning.tune import Tuned, assist_one, tune_one

Place = str | Storage | Callable[[Task], str | None] | None
"""Where studies are kept: one storage for all problems, or one for each; None for memory."""

_POLL_S = 0.1
_PATIENCE_S = 1.0
_WORTH_S = 4.0  # an idle GPU needs about a second for another problem's data and first kernels


@dataclass(slots=True)
class _Job:
    """One problem. state: "waiting", "led" (a GPU leads its search) or "over"."""

    index: int
    task: Task
    state: str = "waiting"
    storage: Storage | None = None
    left_s: float | None = None
    helpers: int = 0
    tuned: Tuned | None = None


@dataclass
class _Fleet:
    """What the threads share."""

    jobs: list[_Job]
    database: Database | None
    trials: int
    budget_s: float
    seed: int
    place: Place
    report: Callable[[int, Progress], None]
    done: Callable[[int, Tuned], None]
    make: Callable[[], Runner]
    lock: threading.Condition = field(default_factory=threading.Condition)
    stop: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def work(self, device: int) -> None:
        """One GPU's part. Whatever unexpected happens ends all of them."""
        runner: Runner | None = None
        try:
            while (assignment := self.next()) is not None:
                job, leads = assignment
                task = replace(job.task, device=device)
                runner = runner or self.make()
                if leads:
                    self.lead(job, task, runner)
                else:
                    self.help(job, task, runner)
        except BaseException as error:  # noqa: BLE001  # raised again where the threads are waited for
            self.failure = self.failure or error
            self.stop.set()
            with self.lock:
                self.lock.notify_all()
        finally:
            if runner is not None:
                runner.close()

    def next(self) -> tuple[_Job, bool] | None:
        """A problem to lead, else one to take part in; None when there will be no more of either."""
        with self.lock:
            while not self.stop.is_set():
                for job in self.jobs:
                    if job.state == "waiting" and self.opened(job):
                        job.state = "led"
                        return job, True
                running = [j for j in self.jobs if j.state == "led"]
                if not running:
                    return None
                worth = [j for j in running if (j.left_s or 0.0) / (1 + j.helpers) > _WORTH_S]
                if worth:
                    job = max(worth, key=lambda j: (j.left_s or 0.0) / (1 + j.helpers))
                    job.helpers += 1
                    return job, False
                self.lock.wait(_POLL_S)
            return None

    def opened(self, job: _Job) -> bool:
        """Open a problem's storage. Where it has one of its own, one that is damaged is the error of that problem alone."""
        try:
            place = self.place(job.task) if callable(self.place) else self.place
            job.storage = place if isinstance(place, Storage) else open_storage(place)
        except TuneError as error:
            if not callable(self.place):
                raise
            job.state, job.tuned = "over", Tuned(job.task.problem, None, None, str(error))
            self.done(job.index, job.tuned)
        return job.storage is not None

    def lead(self, job: _Job, task: Task, runner: Runner) -> None:
        def tell(progress: Progress) -> None:
            with self.lock:
                job.left_s = progress.left_s
                self.report(job.index, progress)

        assert job.storage is not None
        tuned: Tuned | None = None
        try:
            tuned = tune_one(
                task, self.database, trials=self.trials, budget_s=self.budget_s, seed=self.seed, storage=job.storage, runner=runner, report=tell, stop=self.stop
            )
        except EpigenError as error:
            if not self.stop.is_set():
                tuned = Tuned(task.problem, None, None, str(error))
        with self.lock:
            job.state = "over"
            while job.helpers:
                self.lock.wait(_POLL_S)
            if job.storage is not self.place:
                job.storage.close()
            job.tuned = tuned
            if tuned is not None:
                self.done(job.index, tuned)
            self.lock.notify_all()

    def help(self, job: _Job, task: Task, runner: Runner) -> None:
        assert job.storage is not None
        try:
            with contextlib.suppress(EpigenError):  # the one who leads meets it too, and tells of it
                assist_one(task, runner, trials=self.trials, seed=self.seed, storage=job.storage, stop=self.stop)
        finally:
            with self.lock:
                job.helpers -= 1
                self.lock.notify_all()


def tune_all(
    tasks: Sequence[Task], database: Database | None, *, devices: Sequence[int] = (0,), trials: int = 48, budget_s: float = math.inf, seed: int = 0,
    storage: Place = None, report: Callable[[int, Progress], None] = lambda _i, _p: None, done: Callable[[int, Tuned], None] = lambda _i, _t: None,
    started: Sequence[Runner] = (), make: Callable[[], Runner] | None = None,
) -> list[Tuned]:  # fmt: skip
    """Tune several problems on one or more GPUs, and add the winners to the database.

    devices: indices of GPUs of one kind; `Task.device` is overruled. report, done: told of the problem with an index, under one lock, from
    any thread. A problem in which no config works is told of in its `error`. started: runners to begin with, which are closed at the end.
    make: makes a further one; by default workers.
    Ctrl-C ends it all with what was found: a search under way is marked as not complete, and what has found nothing yet is left out.
    """
    compile_workers, ready = compile_workers_for(len(devices)), list(started)

    def runner() -> Runner:
        with fleet.lock:
            return ready.pop() if ready else (make or partial(GpuRunner, compile_workers))()

    fleet = _Fleet([_Job(i, t) for i, t in enumerate(tasks)], database, trials, budget_s, seed, storage, report, done, runner)
    threads = [threading.Thread(target=fleet.work, args=(d,), name=f"tuning on GPU {d}", daemon=True) for d in devices]
    with heeded(fleet.stop, _PATIENCE_S):
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # a wait without an end sleeps through a Ctrl-C that came just before it, or to another thread
                thread.join(_POLL_S)
    for left in ready:
        left.close()
    if fleet.failure is not None:
        raise fleet.failure
    return [j.tuned for j in fleet.jobs if j.tuned is not None]
