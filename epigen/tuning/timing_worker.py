"""The measuring worker, one a GPU: checks a candidate's answer, then times it as it will be launched.

Timing: random data, the L2 cache flushed before a short launch and no pause before a long one (`timer`), CUDA events, medians of as many samples as are
needed (`sampling`).
Close calls are decided by `Compare`, in which the candidates are interleaved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from epigen.codegen import sparse
from epigen.codegen.spec import KernelConfig
from epigen.errors import EpigenError
from epigen.runtime import vendor, verify
from epigen.runtime.kernel import Kernel
from epigen.runtime.rendering import renderer
from epigen.tuning.sampling import Sampler
from epigen.tuning.task import Baseline, Compare, Comparison, Job, Measure, Outcome, Task
from epigen.tuning.timer import ColdTimer

_CHECKED_EXTENT = 4096  # answers are checked at no more than this and the tail, which the float64 oracle manages in milliseconds
_CHECKED_PRODUCTS = 3


class Meter:
    """The state of one task on one GPU."""

    def __init__(self, task: Task):
        torch.cuda.set_device(task.device)
        self.task = task
        self.sample = task.sample("cuda")
        self.right = right_operands(task, self.sample)
        m, n, k = (e if e <= _CHECKED_EXTENT else _CHECKED_EXTENT + e % 256 for e in task.shape[-3:])
        self.checked = task.sample("cuda", (min(task.shape[0], _CHECKED_PRODUCTS), m, n, k) if len(task.shape) == 4 else (m, n, k))
        self.oracle = verify.Oracle.of(task.graph, self.checked, task.precision, product=sparse.product_of(task.a) if task.sparse else None)
        self.sampler = Sampler(ColdTimer(), self.product)

    def answer(self, job: Job) -> Outcome | Comparison:
        try:
            return self.compare(job) if isinstance(job, Compare) else self.measure(job)
        except torch.OutOfMemoryError as error:
            _give_memory_back()
            return Outcome("out_of_resources", detail=str(error).split(".")[0])
        except EpigenError as error:
            return Outcome("out_of_resources" if "does not fit" in str(error) else "compile_error", detail=str(error))
        except RuntimeError as error:  # an illegal access and its like: the parent ends this process
            return Outcome("crashed", detail=str(error).splitlines()[0])

    def kernel(self, config: KernelConfig) -> Kernel:
        return self.task.kernel(renderer(), config)

    def runner(self, config: KernelConfig) -> Callable[[], Any]:
        return self.task.given(self.sample, config).call(self.kernel(config))

    def measure(self, job: Measure) -> Outcome:
        kernel = self.kernel(job.config)
        differences = self.oracle.differences(self.task.given(self.checked, job.config).call(kernel)())
        for output, difference in zip(self.task.graph.outputs, differences, strict=True):
            if not difference.ok:
                detail = f"output '{output.name}' at {list(difference.where)}: error {difference.error:.3g}, bound {difference.bound:.3g}"
                return Outcome("wrong", detail=detail)
        run = self.runner(job.config)
        run()
        return self.sampler.single(run, job.limit_us)

    def compare(self, job: Compare) -> Comparison:
        candidates = [self.runner(c) for c in job.configs]
        for run in candidates:
            run()
        vendors, untimed = self.vendors()
        if not candidates and not vendors:
            return Comparison((), Baseline(0.0, 0.0), untimed)
        outcomes = self.sampler.interleaved([*candidates, *vendors], hot=bool(candidates))
        product_us, with_pass_us = (*(o.median_us for o in outcomes[len(candidates) :]), 0.0, 0.0)[:2]
        return Comparison(tuple(outcomes[: len(candidates)]), Baseline(product_us, with_pass_us), untimed)

    def vendors(self) -> tuple[list[Callable[[], Any]], str]:
        """The vendor's product alone and with one pointwise pass, as far as they run, and why the others do not."""
        runs: list[Callable[[], Any]] = []
        for what, run in (("the vendor's product", self.product), ("the vendor's product with a pointwise pass", lambda: torch.relu(self.product()))):
            try:
                run()
                torch.cuda.synchronize()  # so that a fault is not taken for the next launch's
            except (EpigenError, RuntimeError) as error:
                torch.cuda.synchronize()  # raises where the GPU has failed: then this process can launch nothing any more
                _give_memory_back()
                return runs, f"{what} could not be timed: {(str(error).splitlines() or [type(error).__name__])[0]}"
            runs.append(run)
        return runs, ""

    def product(self) -> torch.Tensor:
        """The vendor's product, without any epilogue; of groups, which are all alike here, of the batch that they are."""
        a, b = self.sample.a, self.right
        if a.is_floating_point() and a.element_size() > 1:
            return torch.matmul(a, b)
        if a.is_floating_point():
            return vendor.scaled_product(a, b, self.task.precision)
        return vendor.product(a, b, self.task.precision)


def right_operands(task: Task, sample: verify.Sample) -> torch.Tensor:
    """What the vendor's product multiplies a with: b, or of a program with two products both their right operands side by side."""
    second, b = task.graph.second(), sample.b
    if second is None:
        return b
    both, along_k = (b, sample.inputs[second.name]), task.layout[1] == "t"
    return torch.cat([t.mT for t in both], -2).mT if along_k else torch.cat(both, -1)


def _give_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def worker(task: Task) -> Callable[[Job], Outcome | Comparison]:
    return Meter(task).answer
