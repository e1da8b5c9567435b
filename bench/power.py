"""What large products take interleaved, where contenders share a clock, and alone, where each has the clock that its own power leaves it.

Run: python -m bench.power [--commit HASH] [--out FOLDER]
At its power limit a GPU lowers its clock. So of two kernels of as many cycles the one that draws more power is slower alone, and slows what it is
interleaved with. The schedule `warp_specialized` is measured in both its ways, beside the config that the database has: ping-pong, with tiles of
128x128, hides the epilogue; cooperative, with tiles of 128x256, reads less for each multiplication.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench import cases, clock, headline, peers, record
from bench.cases import Case
from bench.peers import Contender, Maker, Problem
from bench.record import Report
from bench.timing import back_to_back
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.tuning.sampling import interleave

PINGPONG, COOPERATIVE = "epigen, ping-pong", "epigen, cooperative"
_WAY = {"schedule": "warp_specialized", "block_m": 128, "block_k": 64, "group_m": 8, "tma_store": 1, "tma_load": 0, "fused_finalize": 0, "splits": 1}
WAYS = {
    PINGPONG: _WAY | {"block_n": 128, "pingpong": 1, "subtiles": 2, "prefetch": 0, "num_stages": 6},
    COOPERATIVE: _WAY | {"block_n": 256, "pingpong": 0, "subtiles": 1, "prefetch": 1, "num_stages": 3},
}

CASES = tuple(
    Case("power", program, shape, "bf16", (peers.OURS, peers.MM, peers.CUBLASLT, *WAYS))
    for shape in ((8192, 8192, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (8192, 28672, 8192))
    for program in ("relu + bias", "gelu + bias", "drelu + bgrad")
)

SETTLED_S, MEASURED_S = 0.3, 0.3
"""How long a contender runs alone before its clock has settled, and how long it is timed then; both twice."""


def _way(config: Mapping[str, Any]) -> Maker:
    def make(problem: Problem) -> Contender:
        return peers.epigen_contender(problem, problem.program.text, config)

    return make


MAKERS = peers.MAKERS | {name: _way(config) for name, config in WAYS.items()}


def loop(run: Callable[[], object], seconds: float) -> tuple[float, float | None]:
    """Microseconds of a launch, back to back, and the median clock in MHz meanwhile, if anyone tells it."""
    clocks: list[int | None] = []
    us = back_to_back(run, seconds, lambda: clocks.append(clock.sm_mhz()))
    known = [found for found in clocks if found is not None]
    return us, statistics.median(known) if known else None


def both(
    contenders: Mapping[str, Callable[[], object]], interleaved: headline.Time = headline.cold,
    loop: Callable[[Callable[[], object], float], tuple[float, float | None]] = loop,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """As the headline times them, and then each alone: alone_us, alone_mhz."""
    found: dict[str, dict[str, Any]] = {name: dict(one) for name, one in interleaved(contenders).items()}
    clocks: dict[str, list[float]] = {name: [] for name in contenders}

    def alone(name: str) -> float:
        loop(contenders[name], SETTLED_S)
        us, mhz = loop(contenders[name], MEASURED_S)
        clocks[name] += [] if mhz is None else [mhz]
        return us

    measured = interleave([functools.partial(alone, name) for name in contenders], 2)
    for name, us in zip(contenders, measured, strict=True):
        found[name] |= {"alone_us": round(statistics.mean(us), 3), "alone_mhz": statistics.mean(clocks[name]) if clocks[name] else None}
    return found


def ratios(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """How many times as fast as the product each contender is: interleaved, and alone."""
    times = row["timing"]
    mm = times[peers.MM]
    return {n: (mm["median_us"] / one["median_us"], mm["alone_us"] / one["alone_us"]) for n, one in times.items() if n != peers.MM}


def line(row: Mapping[str, Any]) -> str:
    if "failed" in row or peers.MM not in row["timing"]:
        return headline.line(row)
    mm = row["timing"][peers.MM]
    figures = "; ".join(f"{name} {interleaved:.3f}, {alone:.3f} ({row['timing'][name]['alone_mhz']} MHz)" for name, (interleaved, alone) in ratios(row).items())
    return f"{row['program']} {'x'.join(map(str, row['shape']))}: mm {mm['median_us']:.0f}, {mm['alone_us']:.0f} us ({mm['alone_mhz']} MHz); {figures}"


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    options = parser.parse_args()
    record.gpu_at_hand(machine)
    rows = []
    for case in CASES:
        rows.append(headline.measured(case, how={cases.COLD: both}, makers=MAKERS))
        print(line(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    print(record.write("power", Report("bench.power", record.environment(options.commit), rows), options.out))


if __name__ == "__main__":
    main()
