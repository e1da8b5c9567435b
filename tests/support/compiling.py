"""Kernels compiled ahead of time in children, many at once, that are forked from one process which has imported Triton's compiler.

That process imports this file: it must not import torch, nor pytest, which take a second.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import epigen
from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import FP16, DType
from epigen.errors import CompileError
from epigen.gpus import TARGETS, Target
from epigen.runtime.ahead import Job
from epigen.runtime.loader import Compiled
from epigen.shapes import Shape
from epigen.tuning.process import Failed, ForkServer, Worker

BIG: Shape = (4096, 4096, 4096)


def tiled(block_m: int = 64, block_n: int = 64, block_k: int = 32, num_warps: int = 4, num_stages: int = 3) -> KernelConfig:
    return schedules.config("tiled", block_m=block_m, block_n=block_n, block_k=block_k, group_m=4, num_warps=num_warps, num_stages=num_stages)


def job(
    text: str,
    target: Target | str,
    dtype: DType = FP16,
    config: KernelConfig | None = None,
    layout: str = "nn",
    shape: Shape = BIG,
    precision: str | None = None,
) -> Job:
    target = TARGETS[target] if isinstance(target, str) else target
    plan = epigen.compile(text, config=config, precision=precision).plan(shape, dtype=dtype, target=target, layout=layout)
    return Job(plan.rendered, target, layout, plan.by_vendor)


@dataclass(frozen=True)
class Batch:
    """Several jobs for one child; a job that is refused answers with the message."""

    jobs: tuple[Job, ...]

    def run(self) -> list[list[Compiled] | str]:
        return [_outcome(j) for j in self.jobs]


def _outcome(one: Job) -> list[Compiled] | str:
    try:
        return one.run()
    except CompileError as error:
        return str(error)


class Runs(Protocol):
    def run(self) -> Any: ...


def worker(_: None) -> Callable[[Runs], Any]:
    """Answers a job with what it gives."""
    return lambda one: one.run()


@functools.cache
def _fork_server() -> ForkServer:
    server = ForkServer("compiling", "triton.compiler", "triton.experimental.gluon")
    atexit.register(server.stop)
    return server


def in_a_child(one: Runs) -> Any:
    child = Worker(_fork_server(), "compiling")
    child.submit(one)
    answer = child.answer(600)
    child.stop()
    assert not isinstance(answer, Failed), answer
    return answer


def outcomes(jobs: Iterable[Job]) -> list[list[Compiled] | str]:
    found: list[list[Compiled] | str] = in_a_child(Batch(tuple(jobs)))
    return found


def compiled(jobs: Sequence[Job]) -> list[list[Compiled]]:
    """All of them, none refused."""
    found = outcomes(jobs)
    refused = [f for f in found if isinstance(f, str)]
    assert not refused, refused
    return [f for f in found if not isinstance(f, str)]


def assembly(results: list[Compiled]) -> str:
    stages = results[0].stages
    text = stages["ptx"] if "ptx" in stages else stages["amdgcn"]
    assert isinstance(text, str)
    return text
