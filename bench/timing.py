"""Timing on a GPU: interleaved contenders, medians, random data, L2 flushed between runs or a CUDA graph of many launches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from epigen.tuning.sampling import heat
from epigen.tuning.timer import ColdTimer

Contenders = Mapping[str, Callable[[], object]]

LEAST = 5
"""Rounds that even the longest kernels get."""


def _summary(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, and the distance between the quartiles, in microseconds."""
    found = {}
    for name, values in samples.items():
        low, middle, high = statistics.quantiles(values, n=4)
        found[name] = {"median_us": round(middle, 3), "spread_us": round(high - low, 3), "samples": len(values)}
    return found


def cold(contenders: Contenders, rounds: int = 100, budget_s: float = math.inf, timer: ColdTimer | None = None) -> dict[str, dict[str, float]]:
    """One launch a sample with the L2 cache flushed before it; contenders take turns within each round, in every second one backwards. Long ones are
    timed on a GPU that they have heated, as it is in the middle of a training run.

    budget_s: after so long no further round is begun, once there are LEAST. timer: what takes a sample; by default the current GPU's.
    """
    timer = timer or ColdTimer()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    late = dict.fromkeys(contenders, 0)
    for run in contenders.values():
        run()  # whatever a first call does besides
    heat(timer.once, list(contenders.values()))
    start = time.perf_counter()
    for number in range(rounds):
        if number >= LEAST and time.perf_counter() - start > budget_s:
            break
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            before = timer.late
            samples[name].append(timer.once(contenders[name]))
            late[name] += timer.late - before
    found = _summary(samples)
    for name, count in late.items():
        if count:  # these hold the host's delay
            found[name]["late"] = count
    return found


def graphed(contenders: Contenders, rounds: int = 50, launches: int = 50) -> dict[str, dict[str, float]]:
    """A CUDA graph of many calls a sample, per call: what the GPU takes when the host is out of the way."""
    graphs = {}
    for name, run in contenders.items():
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
        graphs[name] = graph
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / launches)
    return _summary(samples)


def hosted(contenders: Contenders, rounds: int = 20, calls: int = 100) -> dict[str, dict[str, float]]:
    """Host time of a call among many back to back: what the Python thread pays."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            samples[name].append((time.perf_counter() - start) * 1e6 / calls)
            torch.cuda.synchronize()
    return _summary(samples)
