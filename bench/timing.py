"""Timing on a GPU: interleaved contenders, medians, random data, L2 flushed between runs or a CUDA graph of many launches; a loop of one kernel."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from epigen.tuning.sampling import HEATED_S, LONG_US, interleave
from epigen.tuning.timer import ColdTimer

Contenders = Mapping[str, Callable[[], object]]

LEAST = 5
"""Rounds that even the longest kernels get."""

_BATCH_US = 10_000.0  # of launches back to back between two looks at the time


def _timed() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _summary(names: Iterable[str], samples: Iterable[Sequence[float]]) -> dict[str, dict[str, float]]:
    """Median, and the distance between the quartiles, in microseconds."""
    found = {}
    for name, values in zip(names, samples, strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        found[name] = {"median_us": round(middle, 3), "spread_us": round(high - low, 3), "samples": len(values)}
    return found


def cold(contenders: Contenders, rounds: int = 100, budget_s: float = math.inf, timer: ColdTimer | None = None) -> dict[str, dict[str, float]]:
    """One launch a sample with the L2 cache flushed before it; contenders are interleaved, in every second round backwards. Long ones are
    timed on a GPU that they have heated, as it is in the middle of a training run.

    budget_s: after so long no further round is begun, once there are LEAST. timer: what takes a sample; by default the current GPU's.
    """
    timer = timer or ColdTimer()
    late = dict.fromkeys(contenders, 0)

    def sample(name: str) -> float:
        before = timer.late
        us = timer.once(contenders[name])
        late[name] += timer.late - before
        return us

    for run in contenders.values():
        run()  # whatever a first call does besides
    begun = time.perf_counter()
    while min(timer.once(run) for run in contenders.values()) >= LONG_US and time.perf_counter() - begun < HEATED_S:
        pass
    found = _summary(contenders, interleave([functools.partial(sample, name) for name in contenders], rounds, LEAST, budget_s))
    for name, count in late.items():
        if count:  # these hold the host's delay
            found[name]["late"] = count
    return found


def graphed(contenders: Contenders, rounds: int = 50, launches: int = 50) -> dict[str, dict[str, float]]:
    """A CUDA graph of many calls a sample, per call: what the GPU takes when the host is out of the way."""
    graphs = []
    for run in contenders.values():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                run()
        graph.replay()
        graphs.append(graph)
    torch.cuda.synchronize()

    def sample(graph: torch.cuda.CUDAGraph) -> float:
        start, end = _timed(), _timed()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / launches

    return _summary(contenders, interleave([functools.partial(sample, graph) for graph in graphs], rounds))


def hosted(contenders: Contenders, rounds: int = 20, calls: int = 100) -> dict[str, dict[str, float]]:
    """Host time of a call among many back to back: what the Python thread pays."""

    def sample(run: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        return took * 1e6 / calls

    for run in contenders.values():
        run()
    return _summary(contenders, interleave([functools.partial(sample, run) for run in contenders.values()], rounds))


def back_to_back(
    run: Callable[[], object], seconds: float, look: Callable[[], object] = lambda: None, now: Callable[[], float] = time.perf_counter,
    event: Callable[[], Any] = _timed,
) -> float:  # fmt: skip
    """Microseconds of a launch of long ones that follow each other for so many seconds, with a batch of them always waiting. look: is called after
    each batch, while the next one runs."""
    first, end, ends, count = event(), event(), deque[Any](), 0
    first.record()
    run()
    end.record()
    end.synchronize()
    batch = max(1, round(_BATCH_US / (1e3 * first.elapsed_time(end))))
    first.record()
    start = now()
    while count == 0 or now() - start < seconds:
        for _ in range(batch):
            run()
        count += batch
        ends.append(event())
        ends[-1].record()
        if len(ends) > 1:
            ends.popleft().synchronize()
            look()
    ends[-1].synchronize()
    return float(first.elapsed_time(ends[-1])) * 1e3 / count
