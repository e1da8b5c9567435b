"""Runs a selection of the GPU tests under compute-sanitizer's memcheck and records the outcome.

Run: python -m bench.memcheck [--workers N] [--commit HASH] [--out FOLDER]
The caching allocator is off, so that an access past a tensor's end leaves its allocation.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench import record

# extents beside the block size in every layout, then views, masks, reductions and the vendor's product; then small products of the schedules with TMA, also
# in parts of k, and what the last block to arrive completes; then, half of them, with inputs that are loaded before the product
SELECTION = (
    "test_gpu and not integers and (33x127x17 or 127x33x0 or 65x63x31 or (sliced and bf16) or (150x300x96 and fp16)"
    " or ((warp_specialized or persistent) and (1x8x8 or 65x64x2048 or 65x64x4096 or 263x199x391)) or 17x24x16"
    " or 72x136x88 or 17x31x40 or (264x392x136 and (expanded or shifted)))"
)
_PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
_MEMCHECK = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]


@dataclass(frozen=True, slots=True)
class Ran:
    """A process that has ended: its exit status and what it wrote."""

    status: int
    text: str


def collected(text: str) -> list[str]:
    """The tests that pytest lists in what it wrote."""
    return [line for line in text.splitlines() if re.match(r"\S+\.py::", line)]


def shares(tests: Sequence[str], workers: int) -> list[list[str]]:
    """The tests of each worker, of like kinds, which stand together, to each as many; no more workers than tests."""
    return [list(tests[i::workers]) for i in range(min(workers, len(tests)))]


def outcome(ran: Iterable[Ran]) -> dict[str, object]:
    """What all workers have found. memcheck_errors: None where one of them has not said how many."""
    tests: Counter[str] = Counter()
    errors: int | None = 0
    statuses = []
    for one in ran:
        for counts in re.findall(r"^(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", one.text, re.MULTILINE):
            tests.update({kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", counts)})
        said = re.search(r"ERROR SUMMARY: (\d+) error", one.text)
        errors = None if errors is None or said is None else errors + int(said[1])
        statuses.append(one.status)
    return {"tests": dict(tests), "memcheck_errors": errors, "status": max(statuses, key=abs, default=0)}


def run(command: Sequence[str]) -> Ran:
    begun = time.perf_counter()
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    print(f"status {ran.returncode} after {time.perf_counter() - begun:.0f} s: {ran.stdout[-80:].strip()}", flush=True)
    return Ran(ran.returncode, ran.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    # of 15 side by side none had ended after 175 s on an H200
    parser.add_argument("--workers", type=int, default=1, help="how many compute-sanitizers run side by side (default: 1)")
    record.add_options(parser)
    options = parser.parse_args()
    start = time.perf_counter()
    listed = run([*_PYTEST, "--collect-only", "tests/test_differential.py", "-k", SELECTION])
    tests = collected(listed.text)
    if listed.status or not tests:
        sys.exit(f"no tests were found:\n{listed.text[-2000:]}")
    commands = [[*_MEMCHECK, *_PYTEST, "-p", "no:cacheprovider", *share] for share in shares(tests, options.workers)]
    with ThreadPoolExecutor(len(commands)) as pool:
        ran = list(pool.map(run, commands))
    found = {**outcome(ran), "seconds": round(time.perf_counter() - start)}
    print(found)
    for one in ran:
        if one.status:
            print(one.text[-4000:])
    body = {"environment": record.environment(options.commit), "selection": SELECTION, "workers": len(ran), **found}
    print(record.write("memcheck", body, options.out))
    sys.exit(found["status"])


if __name__ == "__main__":
    main()
