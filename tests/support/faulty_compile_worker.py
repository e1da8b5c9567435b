"""A compiling worker that compiles nothing: 16 warps are a compiler's error, and a group of 8 a compiler's crash."""

from __future__ import annotations

import os
from collections.abc import Callable

from epigen.codegen.spec import KernelConfig
from epigen.tuning.task import Outcome, Task


def answer(config: KernelConfig) -> Outcome:
    if config["num_warps"] == 16:
        return Outcome("compile_error", detail="PassManager::run failed")
    if config.schedule == "tiled" and config["group_m"] == 8:
        os.abort()
    return Outcome("ok")


def worker(_task: Task) -> Callable[[KernelConfig], Outcome]:
    return answer
