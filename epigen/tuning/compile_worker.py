"""The compiling worker: configs in, resources out; what it compiles lies in Triton's cache for the measuring worker. Uses no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable

from epigen.codegen.spec import KernelConfig
from epigen.errors import EpigenError
from epigen.runtime.rendering import renderer
from epigen.tuning.task import Outcome, Task

_NICE = 10
MOST_SPILLED_BYTES = 1024
"""A main loop that spills more a thread than this has never won."""


def worker(task: Task) -> Callable[[KernelConfig], Outcome]:
    """Answers a config with "ok", or with why it is not worth measuring."""
    os.nice(max(0, _NICE - os.nice(0)))  # the measuring worker goes first: a launch that comes late is a sample lost
    sample = task.sample("meta")

    def build(config: KernelConfig) -> Outcome:
        try:
            given = task.given(sample, config)
            resources = task.kernel(renderer(), config).warm(given.a, given.b, task.target, **given.inputs)
        except EpigenError as error:
            return Outcome("out_of_resources" if "shared memory" in str(error) else "compile_error", detail=str(error))
        main = resources[0] if resources else None
        if main is not None and main.spills > MOST_SPILLED_BYTES:
            return Outcome("out_of_resources", detail=f"{main.spills} bytes a thread are spilled")
        if main is not None and not main.blocks_per_sm:
            return Outcome("out_of_resources", detail=f"{main.registers} registers a thread are too many for one block")
        return Outcome("ok")

    return build
