"""A tuner whose GPU is made up: for tests of several tuners on one study, in this process or in processes of their own.

As a program: `python tuner_process.py URL NAME TRIALS HANG DEAD_S LOG OTHER...`. It says "ready", waits for a line, searches, and prints what it
found as JSON. It writes each config into LOG before and after it is measured, and never ends the measurement with the number HANG. Others of
the study are dead to it when their beat has not changed for DEAD_S seconds. Its first measurement ends when those that write the logs OTHER
have begun one too.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from epigen.choose.space import Space, parameters
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import FP16
from epigen.gpus import DEFAULT_TARGET
from epigen.ir.program import graph_of
from epigen.tuning import search as searching
from epigen.tuning.runner import RECORDED
from epigen.tuning.search import Result, search
from epigen.tuning.storage import Storage
from epigen.tuning.study import Study
from epigen.tuning.task import Baseline, Comparison, Outcome, Task

SHAPE = (1024, 1024, 1024)
TASK = Task(graph_of("relu(mm + bias)"), SHAPE, FP16, FP16, (FP16,), "nn", "ieee", DEFAULT_TARGET)
SPACE = Space(TASK.spec, SHAPE, DEFAULT_TARGET)
BASELINE = Baseline(100.0, 120.0)


def known(config: KernelConfig) -> bool:
    """A fixed choice of one config in 12: ranking all of them takes a second, and shows no more."""
    return zlib.crc32(str(config).encode()) % 12 == 0


CONFIGS = [c for c in SPACE.every() if known(c)]


def prior(seed: int = 0) -> dict[KernelConfig, float]:
    """All alike, in an order of the seed's, as a search has it that is given none."""
    return dict.fromkeys(random.Random(seed).sample(CONFIGS, len(CONFIGS)), 1.0)


def outcome_of(config: KernelConfig) -> Outcome:
    """Every seventh fails."""
    values = parameters(config)
    mixed = sum((i + 3) * v for i, v in enumerate(values.values()))
    return Outcome("wrong", detail="planted") if mixed % 7 == 0 else Outcome("ok", 50.0 + mixed, 0.1, 9)


class MadeUp:
    """A runner. log: a line "begin CONFIG" and a line "done CONFIG" for each that it measures."""

    def __init__(self, log: Path | None = None, seconds: float = 0.0, hang: int = 0, others: Sequence[Path] = ()):
        self.log, self.seconds, self.hang, self.others, self.kind = log, seconds, hang, others, RECORDED
        self.spent: dict[str, float] = {}
        self.measured: list[KernelConfig] = []
        self.compared: list[tuple[KernelConfig, ...]] = []

    def available(self, config: KernelConfig) -> KernelConfig:
        return config

    def knows(self, config: KernelConfig) -> bool:
        return known(config)

    def prepare(self, configs: Sequence[KernelConfig]) -> None:
        pass

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:  # noqa: ARG002  # nothing to cut off
        self.note("begin", config)
        self.measured.append(config)
        if len(self.measured) == self.hang:
            threading.Event().wait()
        while len(self.measured) == 1 and not all(log.exists() for log in self.others):
            time.sleep(0.01)
        time.sleep(self.seconds)
        self.note("done", config)
        return outcome_of(config)

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        self.compared.append(tuple(configs))
        return Comparison(tuple(outcome_of(c) for c in configs), BASELINE)

    def begin(self, task: Task) -> None:
        pass

    def close(self) -> None:
        pass

    def note(self, what: str, config: KernelConfig) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{what} {config}\n")


def run(runner: MadeUp, trials: int, storage: str | Storage | None, name: str = "one", seed: int = 0, **more: object) -> Result:
    return search(SPACE, runner, prior=prior(seed), trials=trials, storage=storage, name=name, seed=seed, **more)  # type: ignore[arg-type]


def main() -> None:
    url, name, trials, hang, dead_s, log, *others = sys.argv[1:]
    searching.Study = functools.partial(Study, beat_s=0.2, dead_s=float(dead_s))  # type: ignore[assignment,misc]
    runner = MadeUp(Path(log), 0.01, int(hang), [Path(other) for other in others])
    print("ready", flush=True)
    sys.stdin.readline()
    result = run(runner, int(trials), url, name)
    print(json.dumps({"measured": result.measured, "trials": len(result.outcomes), "complete": result.complete, "winner": str(result.winner)}))


if __name__ == "__main__":
    main()
