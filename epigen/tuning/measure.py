"""The measuring worker, one a GPU: checks a candidate's answer, then times it as it will be launched.

Timing: random data, the L2 cache flushed before every launch (`timer`), CUDA events, medians of as many samples as are needed (`sampling`).
Close calls are decided by `Compare`, in which the candidates take turns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from epigen.codegen.lower import output_dtype
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import BY_NAME
from epigen.errors import EpigenError
from epigen.ir import bound
from epigen.runtime.kernel import Kernel
from epigen.runtime.rendering import renderer
from epigen.tuning.sampling import Sampler
from epigen.tuning.task import Baseline, Compare, Comparison, Job, Measure, Outcome, Task
from epigen.tuning.timer import ColdTimer

_CHECKED_EXTENT = 4096  # answers are checked at no more than this and the tail, which the float64 oracle manages in milliseconds


class Meter:
    """The state of one task on one GPU."""

    def __init__(self, task: Task):
        torch.cuda.set_device(task.device)
        self.task, self.graph = task, task.graph()
        self.sample = task.sample(self.graph, "cuda")
        m, n, k = (e if e <= _CHECKED_EXTENT else _CHECKED_EXTENT + e % 256 for e in task.shape)
        self.checked = task.sample(self.graph, "cuda", (m, n, k))
        dtypes = [output_dtype(self.graph, o, BY_NAME[task.a]) for o in self.graph.outputs]
        self.expected = bound.expect(self.graph, self.checked.a, self.checked.b, self.checked.inputs, dtypes, task.precision)
        self.sampler = Sampler(ColdTimer().once, self.product)

    def answer(self, job: Job) -> Outcome | Comparison:
        if isinstance(job, Compare):
            return self.compare(job)
        try:
            return self.measure(job)
        except torch.OutOfMemoryError as error:
            gc.collect()
            torch.cuda.empty_cache()
            return Outcome("out_of_resources", detail=str(error).split(".")[0])
        except EpigenError as error:
            return Outcome("out_of_resources" if "does not fit" in str(error) else "compile_error", detail=str(error))
        except RuntimeError as error:  # an illegal access and its like: the parent ends this process
            return Outcome("crashed", detail=str(error).splitlines()[0])

    def kernel(self, config: KernelConfig) -> Kernel:
        return self.task.kernel(self.graph, renderer(), config)

    def runner(self, kernel: Kernel) -> Callable[[], Any]:
        return lambda: kernel(self.sample.a, self.sample.b, **self.sample.inputs)

    def measure(self, job: Measure) -> Outcome:
        kernel = self.kernel(job.config)
        found = kernel(self.checked.a, self.checked.b, **self.checked.inputs)
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        for output, result, expected in zip(self.graph.outputs, results, self.expected, strict=True):
            difference = bound.compare(result, expected)
            if not difference.ok:
                detail = f"output '{output.name}' at {list(difference.where)}: error {difference.error:.3g}, bound {difference.bound:.3g}"
                return Outcome("wrong", detail=detail)
        del found, results
        run = self.runner(kernel)
        run()
        return self.sampler.single(run, job.limit_us)

    def compare(self, job: Compare) -> Comparison:
        runs: list[Callable[[], Any]] = [*(self.runner(self.kernel(c)) for c in job.configs), self.product, lambda: torch.relu(self.product())]
        for run in runs:
            run()
        *outcomes, product, with_pass = self.sampler.turns(runs, hot=bool(job.configs))
        return Comparison(tuple(outcomes), Baseline(product.median_us, with_pass.median_us))

    def product(self) -> torch.Tensor:
        """The vendor's product, without any epilogue."""
        from epigen.runtime import vendor

        a, b = self.sample.a, self.sample.b
        if a.is_floating_point() and a.element_size() > 1:
            return torch.mm(a, b)
        return vendor.product(a, b, self.task.precision)


def worker(task: Task) -> Callable[[Job], Outcome | Comparison]:
    return Meter(task).answer
