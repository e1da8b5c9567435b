"""Runs the GPU tests and records what ran: counts, GPU, versions, commit.

Run: python -m bench.differential [--commit HASH] [--out FOLDER] [--workers N] [pytest arguments]
"""

from __future__ import annotations

import argparse
import os
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
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        start = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", options.workers, "-p", "no:cacheprovider", f"--junitxml={report}", *rest]
        status = subprocess.run(command, env=os.environ | import_path()).returncode
        seconds = time.perf_counter() - start
        found: dict[str, Counter[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}::{(case.get('name') or '').split('[')[0]}"
            outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            found.setdefault(name, Counter())[outcome] += 1
    total: Counter[str] = sum(found.values(), Counter())
    print(dict(total), f"{seconds:.0f} s")
    rows = [{"test": test, **outcomes} for test, outcomes in found.items()]
    about = {"seconds": round(seconds), "total": dict(total)}
    print(record.write(options.name, Report("bench.differential", record.environment(options.commit), rows, about), options.out))
    sys.exit(status)


if __name__ == "__main__":
    main()
