"""Runs a selection of the GPU tests under compute-sanitizer's memcheck and records the outcome.

Run: python -m bench.memcheck [--commit HASH] [--out FOLDER]
The caching allocator is off, so that an access past a tensor's end leaves its allocation.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

from bench import record
from bench.command import import_path
from bench.record import Report

# extents beside the block size in every layout, then views, masks, reductions and the vendor's product; then small products of the schedules with TMA, also
# in parts of k, and what the last block to arrive completes; then, half of them, with inputs that are loaded before the product
SELECTION = (
    "test_gpu and not integers and (33x127x17 or 127x33x0 or 65x63x31 or (sliced and bf16) or (150x300x96 and fp16)"
    " or ((warp_specialized or persistent) and (1x8x8 or 65x64x2048 or 65x64x4096 or 263x199x391)) or 17x24x16"
    " or 72x136x88 or 17x31x40 or (264x392x136 and (expanded or shifted)))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    options = parser.parse_args()
    command = [
        "compute-sanitizer",
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/kernels/test_differential.py",
        "-k",
        SELECTION,
    ]
    start = time.perf_counter()
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | import_path() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    counts = {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|skipped)", ran.stdout)}
    summary = re.search(r"ERROR SUMMARY: (\d+) error", ran.stdout)
    found = {"memcheck_errors": int(summary[1]) if summary else None, "status": ran.returncode, "seconds": round(time.perf_counter() - start)}
    print(counts, found)
    if ran.returncode:
        print(ran.stdout[-4000:], ran.stderr[-2000:])
    rows = [{"outcome": outcome, "count": count} for outcome, count in counts.items()]
    print(record.write("memcheck", Report("bench.memcheck", record.environment(options.commit), rows, {"selection": SELECTION, **found}), options.out))
    sys.exit(ran.returncode)


if __name__ == "__main__":
    main()
