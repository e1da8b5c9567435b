"""Timing on a GPU: interleaved contenders, medians, random data, L2 flushed between runs or a CUDA graph of many launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Contenders = Mapping[str, Callable[[], object]]


def _summary(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, and the distance between the quartiles, in microseconds."""
    found = {}
    for name, values in samples.items():
        low, middle, high = statistics.quantiles(values, n=4)
        found[name] = {"median_us": round(middle, 3), "spread_us": round(high - low, 3), "samples": len(values)}
    return found


def cold(contenders: Contenders, rounds: int = 100) -> dict[str, dict[str, float]]:
    """One launch a sample with the L2 cache flushed before it; contenders take turns within each round."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, run in contenders.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3)
    return _summary(samples)


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
