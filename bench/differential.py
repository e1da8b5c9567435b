"""Runs the GPU tests and records what ran: counts, GPU, versions, commit.

Run: python -m bench.differential [--commit HASH] [--out FOLDER] [--workers N] [--seconds N] [pytest arguments]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from bench import record
from bench.command import import_path
from bench.record import Report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--workers", default="14")
    parser.add_argument("--name", default="gpu_tests")
    parser.add_argument("--seconds", type=float, help="after which the tests are ended, and those that ran are recorded")
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        start = time.perf_counter()
        # the tests that take turns for memory hold up their worker: its others are taken by those that have none left
        how = ["-q", "-m", "gpu", "-n", options.workers, "--dist", "worksteal", "-p", "no:cacheprovider", f"--junitxml={report}"]
        process = subprocess.Popen([sys.executable, "-m", "pytest", *how, *rest], env=os.environ | import_path())
        try:
            status = process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # on which pytest still writes what it has
            status = process.wait() or 2
        seconds = time.perf_counter() - start
        found: dict[str, Counter[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            if case.get("name") is None:  # it was ended while it ran
                continue
            name = f"{case.get('classname')}::{(case.get('name') or '').split('[')[0]}"
            outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            found.setdefault(name, Counter())[outcome] += 1
    total: Counter[str] = sum(found.values(), Counter())
    print(dict(total), f"{seconds:.0f} s")
    rows = [{"test": test, **outcomes} for test, outcomes in found.items()]
    about = {"seconds": round(seconds), "total": dict(total), "ended": status == 2}
    print(record.write(options.name, Report("bench.differential", record.environment(options.commit), rows, about), options.out))
    sys.exit(status)


if __name__ == "__main__":
    main()
