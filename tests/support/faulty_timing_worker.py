"""A measuring worker that fails in every way a GPU can: the config's num_stages says how where block_k is 32. Run by tests in place of the real one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from epigen.tuning.task import Baseline, Compare, Comparison, Job, Outcome, Task

FAILURES = HANG, KILLED, CRASH, WRONG, MEMORY = 2, 3, 4, 5, 6
"""What a num_stages stands for; the tile decides the time that is answered."""


def answer(job: Job) -> object:
    if isinstance(job, Compare):
        return Comparison(tuple(Outcome("ok", time_of(c["block_m"], c["block_n"]), 0.1, 21) for c in job.configs), Baseline(100.0, 120.0))
    config = job.config
    how = config["num_stages"] if config["block_k"] == 32 else 0
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


def worker(_task: Task) -> Callable[[Job], object]:
    return answer
