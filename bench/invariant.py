"""What it costs that a row has the same bits whatever M is: invariant kernels against ordinary ones of the same program, and against torch.mm.

Run: python -m bench.invariant [--commit HASH] [--out FOLDER]
Claims: the rows of every M are, bit for bit, those of the largest, from the first row on and from the middle; and the invariant kernel is 0.9 times as fast as
the ordinary one in the geometric mean, and 0.8 times at worst. The layers are those of a model of 8 billion parameters, in bf16. Contenders are interleaved, and
the L2 cache is cold. Each kernel has the config that a call gets: from a record where there is one. A wrong answer is not timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import epigen
from bench import record, timing
from bench.bars import geometric
from bench.record import Report
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.kernel import Kernel
from epigen.shapes import extents

LAYERS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
"""N and K: what attention gives out, what goes into it, what goes into the MLP, and what comes out."""
ROWS = (1, 8, 64, 256, 1024, 4096, 8192)
PROGRAMS = ("mm + bias", "relu(mm + bias)")
INVARIANT, ORDINARY, MM = "invariant", "ordinary", "mm"
MEAN, WORST = 0.9, 0.8
"""Claimed of the ordinary kernel's speed."""


def unlike(kernel: Kernel, a: Tensor, b: Tensor, bias: Tensor) -> list[int]:
    """The M of which some row has other bits than in a call of all rows. a: [M, K] with the most rows."""
    whole, differ = kernel(a, b, bias=bias), []
    for m in ROWS:
        for first in (0, (len(a) - m) // 2):
            if not torch.equal(kernel(a[first : first + m], b, bias=bias), whole[first : first + m]):
                differ.append(m)
    return sorted(set(differ))


def measured(program: str, n: int, k: int, rows: Iterable[int] = ROWS) -> list[dict[str, Any]]:
    """A row for each M."""
    a, weight = torch.randn(max(ROWS), k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16() / k**0.5
    b, bias = weight.t(), torch.randn(n, device="cuda").bfloat16()
    ours, plain = epigen.compile(program, invariant="m"), epigen.compile(program)
    differ, found = unlike(ours, a, b, bias), []
    for m in rows:
        x = a[:m]
        right = x.float() @ b.float() + bias.float()
        torch.testing.assert_close(ours(x, b, bias=bias).float(), right.relu() if "relu" in program else right, rtol=2e-2, atol=2e-2)
        contenders = {INVARIANT: lambda x=x: ours(x, b, bias=bias), ORDINARY: lambda x=x: plain(x, b, bias=bias), MM: lambda x=x: torch.mm(x, b)}
        row = {"program": program, "shape": (m, n, k), "dtype": "bf16", "layout": "nt", "same_bits": m not in differ}
        times = timing.cold(contenders, budget_s=1.0)  # type: ignore[arg-type]  # of a lambda with a default mypy knows no type
        ours(x, b, bias=bias)
        plain(x, b, bias=bias)
        found.append(row | {"config": str(ours.config), "ordinary_config": str(plain.config), "timing": times})
    return found


def speed(row: Mapping[str, Any], peer: str = ORDINARY) -> float:
    """How many times as fast as a peer the invariant kernel is."""
    return float(row["timing"][peer]["median_us"] / row["timing"][INVARIANT]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claims."""
    rows = list(rows)
    speeds = [speed(row) for row in rows]
    mean, worst, same = geometric(speeds), min(speeds), all(row["same_bits"] for row in rows)
    return {
        "claimed_mean": MEAN, "claimed_worst": WORST, "mean": round(mean, 3), "worst": round(worst, 3), "same_bits": same,
        "holds": same and mean >= MEAN and worst >= WORST,
    }  # fmt: skip


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    options = parser.parse_args()
    record.gpu_at_hand(machine)
    torch.manual_seed(0)
    rows = []
    for n, k in LAYERS:
        for program in PROGRAMS:
            for row in measured(program, n, k):
                rows.append(row)
                times = ", ".join(f"{name} {found['median_us']:.1f} us" for name, found in row["timing"].items())
                bits = "the same bits" if row["same_bits"] else "OTHER BITS"
                print(f"{extents(row['shape'])} {program}: {times}; {speed(row):.3f} of the ordinary, {bits}, by {row['config']}", flush=True)
    print(record.write("invariant", Report("bench.invariant", record.environment(options.commit), rows, verdict(rows)), options.out))


if __name__ == "__main__":
    main()
