"""The six epilogues at every shape of the bars against torch.compile, tuned at its utmost.

Run: python -m bench.compiled [--processes N] [--budget SECONDS] [--more] [--commit HASH] [--out FOLDER]
A case takes torch.compile ten seconds and more, nearly all of which compiles on the CPU. So several processes share each GPU: while one
compiles, another measures. Who measures has the GPU alone, torch.compile's own tuning too, but for the first launch of what has just been
compiled; times that such a launch has disturbed are taken again. Its caches are empty at the start; the programs of one shape and dtype
are one process's, so that it tunes their bare product once, as it does in a user's process.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench import ahead, bars, cases, headline, peers, record, timing
from bench.cases import Case
from bench.peers import Contender, Maker, Problem
from bench.record import Report
from epigen.gpus import Target
from epigen.runtime.device import THIS_MACHINE, Machine

_CORES = 3  # that each process keeps busy: its own, and two that compile for it


def beside(make: Maker, lock: Any) -> Maker:
    """A contender that is made while others have the GPU: who makes it holds the lock before and after."""

    def made(problem: Problem) -> Contender:
        lock.release()
        try:
            return make(problem)
        finally:
            lock.acquire()

    return made


def alone(benchmarker: type, lock: Any) -> None:
    """Let torch.compile's benchmarker take the lock for as long as it measures. What is called compiles at its first call, which is not measured."""
    measure = benchmarker.benchmark_gpu  # type: ignore[attr-defined]

    def benchmark_gpu(self: Any, call: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        call()
        with lock:
            return measure(self, call, *arguments, **options)

    benchmarker.benchmark_gpu = benchmark_gpu  # type: ignore[attr-defined]


# -- a process that measures

_lock: Any  # of its GPU

_TRIES, _STEADY = 4, 0.2


def disturbed(times: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether the quartiles of a contender's times are further apart than clocks explain: by more than a fifth of the median."""
    return any(one["spread_us"] > _STEADY * one["median_us"] for one in times.values())


def cold(contenders: timing.Contenders, measure: headline.Time = headline.cold) -> dict[str, dict[str, float]]:
    """As the headline's, again while it is disturbed."""
    for _ in range(_TRIES - 1):
        found = measure(contenders)
        if not disturbed(found):
            return found
    return measure(contenders)


def _begin(gpus: Sequence[int], locks: Sequence[Any], begun: Any) -> None:
    """Processes are dealt to the GPUs one after the other."""
    global _lock
    from torch._inductor import config
    from torch._inductor.runtime import benchmarking

    with begun:
        place = begun.value % len(gpus)
        begun.value += 1
    torch.cuda.set_device(gpus[place])
    _lock = locks[place]
    alone(type(benchmarking.benchmarker), _lock)
    config.autotune_num_choices_displayed, config.max_autotune_report_choices_stats = 0, False
    logging.getLogger("torch._inductor").setLevel(logging.CRITICAL)  # a config that does not fit is no news


def _measured(group: Sequence[Case], until: float) -> list[dict[str, Any]]:
    """The rows of a group; none of the cases that would begin after `until`."""
    makers, found = peers.MAKERS | {peers.COMPILED: beside(peers.compiled, _lock)}, []
    for case in group:
        if time.monotonic() < until:
            with _lock:
                found.append(headline.measured(case, how={cases.COLD: cold}, makers=makers))
                torch.cuda.empty_cache()  # the memory is that of several processes
    return found


# -- a run


def groups(todo: Sequence[Case]) -> list[list[Case]]:
    """The cases of each shape and dtype, the longest first: so none of them begins when all others are done."""
    found: dict[Any, list[Case]] = {}
    for case in todo:
        found.setdefault((case.shape, case.dtype), []).append(case)
    return sorted(found.values(), key=lambda group: -group[0].flops)


def stands(row: Mapping[str, Any], target: Target) -> bool:
    """Whether all were timed, undisturbed, and epigen with the config that it has by now."""
    return peers.COMPILED in row["timing"] and not disturbed(row["timing"]) and headline.stands(row, target)


def gather(
    todo: Sequence[Case], known: Sequence[dict[str, Any]], pool: concurrent.futures.Executor,
    measure: Callable[[Sequence[Case], float], list[dict[str, Any]]], until: float, save: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:  # fmt: skip
    """Measure the groups in the pool. known: rows that are there. Returns, and saves after each group, the rows in the order of the cases, and what
    is left out so far."""
    order = {case.key: case for case in todo}
    rows = {headline.key(row): row for row in known}

    def body() -> dict[str, Any]:
        return {"rows": [rows[key] for key in order if key in rows], "left_out": [str(case) for key, case in order.items() if key not in rows]}

    waiting = [pool.submit(measure, group, until) for group in groups([case for key, case in order.items() if key not in rows])]
    for done in concurrent.futures.as_completed(waiting):
        try:
            found = done.result()
        except (headline.GpuFailed, concurrent.futures.BrokenExecutor) as lost:
            print(f"lost: {peers.reason(lost)}", flush=True)
            continue
        rows.update({headline.key(row): row for row in found})
        for row in found:
            print(headline.line(row), flush=True)
        save(body())
    return body()


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, help="that share a GPU")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no further case is begun")
    parser.add_argument(
        "--more", action="store_true", help="keep the rows that the result holds, but for disturbed ones and those of another config, and measure the others"
    )
    record.add_options(parser)
    options = parser.parse_args()
    start = time.monotonic()
    target, gpus, todo = record.gpu_at_hand(machine), machine.indices(), cases.compiled()
    each = options.processes or max(1, min(6, (os.cpu_count() or 2) // len(gpus) // _CORES))
    environment = record.environment(options.commit)
    about = {"budget_s": options.budget, "gpus": len(gpus), "processes": each}
    known = record.earlier(options.out / "compiled.json", environment) if options.more else []
    known = [row for row in known if stands(row, target)]
    there = {headline.key(row) for row in known}
    count = ahead.compile_all(cases.requests(case for case in todo if case.key not in there), target)
    print(f"{count} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)

    def save(body: dict[str, Any]) -> None:
        summary = about | {"left_out": body["left_out"], "seconds": round(time.monotonic() - start)}
        record.write("compiled", Report("bench.compiled", environment, body["rows"], summary), options.out)

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": str(_CORES - 1)}
        shared = (gpus, [context.RLock() for _ in gpus], context.Value("i", 0))
        with concurrent.futures.ProcessPoolExecutor(each * len(gpus), context, _begin, shared) as pool:
            body = gather(todo, known, pool, _measured, start + options.budget, save)
    for found in bars.verdicts(body["rows"]):
        if found["met"] is not None:
            print(bars.line(found))
    if body["left_out"]:
        print(f"left out, as the time was over ({len(body['left_out'])}):", *body["left_out"], sep="\n  ")


if __name__ == "__main__":
    main()
