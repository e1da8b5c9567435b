"""A measuring worker that times configs and fails as soon as the vendor's product is to be timed: of 4 configs or more by a hang, else by a kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import faulty_timing_worker

from epigen.tuning.task import Compare, Job, Task


def answer(job: Job) -> object:
    if isinstance(job, Compare):
        if len(job.configs) >= 4:
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGKILL)
    return faulty_timing_worker.answer(job)


def worker(_task: Task) -> Callable[[Job], object]:
    return answer
