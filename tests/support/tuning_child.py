"""A search with workers that need no GPU, in a process of its own whose surroundings a test has spoilt: `python tuning_child.py RESULT [HOW]`.

RESULT: an absolute path, of the file that the number of measured configs is written to. HOW: "thread", "gone" or "locked": run in a thread
that is not the main one; in a folder that is removed, or that may not be read.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path


def main() -> None:
    from epigen.codegen import schedules
    from epigen.dtypes import FP16
    from epigen.gpus import DEFAULT_TARGET
    from epigen.ir.program import graph_of
    from epigen.tuning.runner import GpuRunner
    from epigen.tuning.task import Task

    task = Task(graph_of("relu(mm + bias)"), (1024, 1024, 1024), FP16, FP16, (FP16,), "nn", "ieee", DEFAULT_TARGET)
    runner = GpuRunner(compile_workers=2, timing_worker="faulty_timing_worker", compile_worker="faulty_compile_worker", first_s=300.0, measure_s=60.0)
    try:
        runner.begin(task)
        configs = [schedules.config("tiled", block_m=m, block_n=64, block_k=64, group_m=1, num_warps=4, num_stages=3) for m in (32, 64, 128)]
        runner.prepare(configs)
        found = [runner.measure(c, 0.0) for c in configs]
    finally:
        runner.close()
    Path(sys.argv[1]).write_text(" ".join(o.kind for o in found))


how = sys.argv[2] if len(sys.argv) > 2 else ""
if how in ("gone", "locked"):
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    if how == "gone":
        folder.rmdir()
    else:
        folder.chmod(0)
if how == "thread":
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
else:
    main()
