"""What the hardware counters say of a kernel beside the vendor's bare product and its fused one: where the time of an epilogue goes.

Run: python -m bench.counters [--commit HASH] [--out FOLDER]
Wants Nsight Compute (ncu). Each kernel of a call is replayed with a cold L2 and at the GPU's own clock, so its time is not that of the headline.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bench import peers, record
from bench.command import import_path
from bench.programs import BY_NAME
from bench.record import Report, Row
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import extents

PROGRAMS = ("relu + bias", "relu + bias + mask", "drelu + bgrad", "gelu + bias + aux", "dgelu + bgrad")
CASES = (
    *((program, shape) for shape in ((8192, 8192, 512), (4096, 4096, 4096)) for program in PROGRAMS),
    *((program, (8192, 8192, 8192)) for program in ("relu + bias", "gelu + bias", "gelu + bias + aux")),
    *(("relu + bias", shape) for shape in ((64, 4096, 4096), (4, 14336, 4096))),
    *(("gelu + bias", shape) for shape in ((2048, 2048, 2048), (65536, 1024, 1024))),
    ("relu + bias", (4096, 28672, 8192)),
    ("relu + bias + mask", (8192, 28672, 8192)),
)
"""Program and M x N x K: a short main loop, a long one, the longest, few rows, and where the headline's ratios have been lowest. The layout is that
of a Linear's weight.T."""

CONTENDERS = (peers.OURS, peers.OURS_TANH, peers.MM, peers.CUBLASLT)

DTYPE = "bf16"

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy")

KEPT = re.compile(
    r"gpu__time_duration\.sum|launch__(registers_per_thread|grid_size|block_size)|(lts_|gpu__dram)_throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|sm__(pipe_tensor_cycles_active|inst_executed_pipe_(lsu|alu|fma|xu)|warps_active)\.avg\.pct_of_peak_sustained_active"
    r"|smsp__issue_active\.avg\.per_cycle_active|smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio"
)
"""The metrics that a record keeps, of the several hundred: time, what the kernel takes up, how busy memory and pipes are, what warps wait for."""

_MARK = "FillFunctor"  # a kernel of torch's that no contender launches: it stands before each contender's


def _watched() -> None:
    """What ncu watches: a mark and a call, for each contender of each case; the mark alone for one that is missing."""
    torch.manual_seed(0)
    mark = torch.empty(1, device="cuda")
    for program, shape in CASES:
        problem = peers.problem(BY_NAME[program], shape, DTYPE, "nt")
        for name in CONTENDERS:
            one = _made(name, problem)
            one.run()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            mark.fill_(0.0)
            one.run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            one.close()


def _made(name: str, problem: peers.Problem) -> peers.Contender:
    """In place of one that is missing, one that does nothing."""
    try:
        return peers.MAKERS[name](problem)
    except peers.Missing:
        return peers.Contender(lambda: None, tuple, ())


def kernels(text: str) -> tuple[list[list[dict[str, Any]]], dict[str, str]]:
    """ncu's raw table, as CSV after whatever else was printed: for each mark, the kernels launched after it with their kept metrics; and the
    metrics' units. Raises ValueError where there is no table."""
    units, *rows = csv.DictReader(io.StringIO(text[text.index('"ID"') :]))
    kept = [name for name in units if KEPT.fullmatch(name)]
    found: list[list[dict[str, Any]]] = []
    for row in rows:
        if _MARK in row["Kernel Name"]:
            found.append([])
        else:
            metrics = {name: float(row[name].replace(",", "")) for name in kept}
            found[-1].append({"kernel": row["Kernel Name"].partition("(")[0], "metrics": metrics})
    return found, {name: units[name] for name in kept if units[name]}


def calls(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """By shape and program: the kernels of each contender's call."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault((extents(row["shape"]), row["program"]), {}).setdefault(row["contender"], []).append(row)
    return found


def us(kernels: Iterable[Row]) -> float:
    return sum(one["metrics"]["gpu__time_duration.sum"] for one in kernels) / 1e3


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Of each contender the kernels with their times."""
    for (shape, program), contenders in calls(rows).items():
        times = (f"{name} " + " + ".join(f"{us([one]):.1f} us ({one['kernel'][:60]})" for one in some) for name, some in contenders.items())
        yield f"{program}, {shape}: {'; '.join(times)}"


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)  # the process that ncu starts
    options = parser.parse_args()
    record.gpu_at_hand(machine)
    if options.watched:
        _watched()
        return
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += [sys.executable, "-m", "bench.counters", "--watched"]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | import_path())
    try:
        found, units = kernels(ran.stdout)
        each = list(zip(CASES, *(found[i :: len(CONTENDERS)] for i in range(len(CONTENDERS))), strict=True))
    except ValueError:  # such as where the driver keeps its counters to administrators
        sys.exit(f"ncu has not measured every case, and ended with status {ran.returncode}: {ran.stdout[-2000:]} {ran.stderr[-2000:]}")
    rows = [
        {"program": program, "shape": list(shape), "contender": name, **kernel}
        for (program, shape), *measured in each
        for name, launched in zip(CONTENDERS, measured, strict=True)
        for kernel in launched
    ]
    print(*lines(rows), sep="\n")
    print(record.write("counters", Report("bench.counters", record.environment(options.commit), rows, {"dtype": DTYPE, "units": units}), options.out))


if __name__ == "__main__":
    main()
