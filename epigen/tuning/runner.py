"""What a search measures with: the workers of a GPU, or a recorded table of measurements.

A search sees `prepare` (start compiling), `measure` (an outcome, whatever happens) and `compare` (close calls, with the vendor's product).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from epigen.choose import space
from epigen.codegen.spec import KernelConfig
from epigen.errors import EpigenError
from epigen.tuning.process import Failed, ForkServer, Worker
from epigen.tuning.task import Baseline, Compare, Comparison, Job, Measure, Outcome, Task

MEASURED, RECORDED = "measured", "recorded"
"""Where a runner's outcomes are from: trials of the two kinds never meet in one study."""


class Runner(Protocol):
    kind: str
    spent: dict[str, float]
    """Seconds waited, by what for: "start", "compile", "measure"."""

    def prepare(self, configs: Sequence[KernelConfig]) -> None: ...
    def measure(self, config: KernelConfig, limit_us: float) -> Outcome: ...
    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        """Times configs that were right, and the vendor's product, interleaved; of no configs, the vendor's product alone."""
        ...

    def knows(self, config: KernelConfig) -> bool:
        """Whether it can measure configs of this kind."""
        ...

    def begin(self, task: Task) -> None:
        """Turn to a task, or to another one."""
        ...

    def close(self) -> None: ...
    def available(self, config: KernelConfig) -> KernelConfig:
        """The config itself, or what can be measured in its place."""
        ...


def compile_workers_for(gpus: int) -> int:
    """How many processes compile for each of so many GPUs: more than so many wait for the measuring."""
    return max(1, min(14, ((os.cpu_count() or 2) - 2) // gpus))


class Replay:
    """A recorded table: config -> outcome. In place of a config that was not recorded it answers for the nearest that was."""

    def __init__(self, table: Mapping[KernelConfig, Outcome], baseline: Baseline):
        self.table, self.baseline, self.kind = table, baseline, RECORDED
        self.values = {(c.schedule, *value) for c in table for value in c.values}
        self.spent: dict[str, float] = defaultdict(float)
        self.configs, points = list(table), [space.parameters(c) for c in table]
        names = {name for point in points for name in point}
        self.columns = {n: np.array([point.get(n, np.nan) for point in points]) for n in names}

    def available(self, config: KernelConfig) -> KernelConfig:
        if config in self.table:
            return config
        far = np.zeros(len(self.configs))
        for name, value in space.parameters(config).items():
            if name in self.columns:
                far += np.nan_to_num(np.abs(self.columns[name] - value), nan=100.0)  # of one that has no such parameter
        return self.configs[far.argmin()]

    def knows(self, config: KernelConfig) -> bool:
        return all((config.schedule, *value) in self.values for value in config.values)

    def prepare(self, configs: Sequence[KernelConfig]) -> None:
        pass

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:  # noqa: ARG002  # a table has nothing to cut off
        return self.table[config]

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        return Comparison(tuple(self.table[c] for c in configs), self.baseline)

    def begin(self, task: Task) -> None:
        pass

    def close(self) -> None:
        pass


class GpuRunner:
    """A pool of compiling workers, and one measuring worker, which a lost job costs its process and nothing else."""

    def __init__(
        self, compile_workers: int | None = None, timing_worker: str = "epigen.tuning.timing_worker", compile_worker: str = "epigen.tuning.compile_worker",
        first_s: float = 120.0, measure_s: float = 20.0, build_s: float = 60.0,
    ):  # fmt: skip
        """compile_workers: how many processes compile. timing_worker, compile_worker: the workers' modules. *_s: how long an answer may take, the first included."""
        self.first_s, self.measure_s, self.build_s, self.kind = first_s, measure_s, build_s, MEASURED
        self.fork_server = ForkServer(timing_worker, compile_worker, "epigen.runtime.kernel", "epigen.runtime.verify")
        self.compile_workers = [Worker(self.fork_server, compile_worker) for _ in range(compile_workers or compile_workers_for(1))]
        self.timing_worker = Worker(self.fork_server, timing_worker)
        self.fresh = True
        self.building: dict[KernelConfig, Worker] = {}
        self.built: dict[KernelConfig, Outcome] = {}
        self.waiting: list[KernelConfig] = []
        self.spent: dict[str, float] = defaultdict(float)

    def available(self, config: KernelConfig) -> KernelConfig:
        return config

    def knows(self, config: KernelConfig) -> bool:  # noqa: ARG002  # of every kind
        return True

    def start(self) -> None:
        """Start importing before there is a task, while the caller prepares it."""
        self.fork_server.start()

    def begin(self, task: Task) -> None:
        """Turn to a task. Processes that run already stay, which spares their start."""
        for config in list(self.building):  # begun for the last task, and not wanted any more
            self._collect(config)
        self.waiting.clear()
        self.built.clear()
        self.fresh = True  # the new task's data takes a while to make
        self.spent.clear()
        for worker in (*self.compile_workers, self.timing_worker):
            worker.begin(task)

    def prepare(self, configs: Sequence[KernelConfig]) -> None:
        known = {*self.building, *self.built, *self.waiting}
        self.waiting += [c for c in dict.fromkeys(configs) if c not in known]
        self._feed()

    def _feed(self) -> None:
        busy = set(map(id, self.building.values()))
        for worker in self.compile_workers:
            if self.waiting and id(worker) not in busy:
                config = self.waiting.pop(0)
                worker.submit(config)
                self.building[config] = worker

    def _collect(self, config: KernelConfig) -> None:
        """Wait for a build under way, and keep its outcome."""
        start = time.monotonic()
        answer = self.building.pop(config).answer(self.build_s)
        self.spent["compile"] += time.monotonic() - start
        if isinstance(answer, Failed):
            answer = Outcome("compile_error" if answer.kind == "crashed" else answer.kind, detail=answer.detail)
        self.built[config] = answer

    def _built(self, config: KernelConfig) -> Outcome:
        self.prepare([config])
        while config not in self.built:
            # the requested one first, once it has begun; until then whichever is under way
            current = config if config in self.building else next(iter(self.building))
            self._collect(current)
            self._feed()
        return self.built[config]

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
        built = self._built(config)
        if built.kind != "ok":
            return built
        answer = self._ask(Measure(config, limit_us))
        if isinstance(answer, Failed):
            return Outcome(answer.kind, detail=answer.detail)
        assert isinstance(answer, Outcome)
        return answer

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        answer = self._ask(Compare(tuple(configs)))
        if not isinstance(answer, Comparison):
            what = "the best configs beside the vendor's product" if configs else "the vendor's product"
            raise EpigenError(f"timing {what} failed: {answer.detail}")
        return answer

    def _ask(self, job: Job) -> Outcome | Comparison | Failed:
        start = time.monotonic()
        self.timing_worker.submit(job)
        answer: Outcome | Comparison | Failed = self.timing_worker.answer(self.first_s if self.fresh else self.measure_s)
        self.spent["start" if self.fresh else "measure"] += time.monotonic() - start
        self.fresh = isinstance(answer, Failed) or (isinstance(answer, Outcome) and answer.kind == "crashed")
        if self.fresh:
            self.timing_worker.stop()  # its GPU context may be poisoned
        return answer

    def close(self) -> None:
        self.fork_server.stop()
        for worker in (*self.compile_workers, self.timing_worker):
            worker.stop()
