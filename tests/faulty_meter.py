"""A measuring worker that fails in every way a GPU can: the config's block_k says how. Run by tests in place of the real one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from epigen.tuning.process import serve
from epigen.tuning.task import Baseline, Compare, Comparison, Job, Outcome, Task

HANG, KILLED, CRASH, WRONG, MEMORY = 16, 32, 64, 128, 256
"""What a block_k stands for; tests take block_m for the time that it measures."""


def answer(job: Job) -> object:
    if isinstance(job, Compare):
        return Comparison(tuple(Outcome("ok", time_of(c["block_m"], c["block_n"]), 0.1, 21) for c in job.configs), Baseline(100.0, 120.0))
    config = job.config
    how = config["block_k"] if config["num_stages"] == 6 else 0
    if how == HANG:
        time.sleep(1000)
    if how == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == CRASH:  # the worker's own report of an illegal access
        return Outcome("crashed", detail="CUDA error: an illegal memory access was encountered")
    if how == WRONG:
        return Outcome("wrong", detail="output 'out' at [0, 0]: error nan, bound 0.01")
    if how == MEMORY:
        return Outcome("out_of_resources", detail="CUDA out of memory")
    return Outcome("ok", time_of(config["block_m"], config["block_n"]), 0.1, 9)


def time_of(block_m: int, block_n: int) -> float:
    """Least, 50, at 64x128."""
    return 50.0 + abs(block_m - 64) + abs(block_n - 128) / 2


def meter(_task: Task) -> Callable[[Job], object]:
    return answer


if __name__ == "__main__":
    serve(meter)
