"""Measures the search space of some problems on the GPU, whole or a sample of it, for replay: what the search and the model are held to.

Run: python -m bench.sweep [--configs N] [--budget SECONDS] [--commit HASH] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from bench import record
from epigen.codegen.spec import KernelConfig
from epigen.runtime import device
from epigen.tuning import table
from epigen.tuning.runner import GpuRunner
from epigen.tuning.space import Space
from epigen.tuning.task import Outcome, Task
from epigen.tuning.tune import spec_of

# name, program, shape, layout: the kinds of problem that stress different parts of the model
PROBLEMS = (
    ("square", "relu(mm + bias)", (4096, 4096, 4096), "nt"),
    ("short_k", "relu(mm + bias)", (8192, 8192, 512), "nn"),
    ("skinny", "relu(mm + bias)", (16, 4096, 4096), "nt"),
    ("small", "relu(mm + bias)", (128, 256, 256), "nn"),
    ("odd", "relu(mm + bias)", (1000, 1003, 1001), "nn"),
    ("medium", "gelu(mm + bias)", (2048, 2048, 2048), "nt"),
    ("drelu_bgrad", "dz = drelu(mm, mask); dz, bgrad(dz)", (4096, 4096, 1024), "nn"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=100_000, help="no more than so many a problem, in random order")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds a problem")
    parser.add_argument("--only", nargs="*")
    record.add_options(parser)
    options = parser.parse_args()
    target = device.at_hand() or device.DEFAULT
    runner: GpuRunner | None = None
    for name, text, shape, layout in PROBLEMS:
        if options.only and name not in options.only:
            continue
        task = Task(text, shape, "fp16", "fp16", "fp16", layout, "ieee", target)
        configs = list(Space(spec_of(task.graph(), task), shape, target).every())
        legal = len(configs)
        random.Random(0).shuffle(configs)
        runner = runner or GpuRunner()
        runner.begin(task)
        start = time.perf_counter()
        rows: dict[KernelConfig, Outcome] = {}
        runner.prepare(configs[: options.configs])
        baseline = runner.compare([]).baseline
        for config in configs[: options.configs]:
            rows[config] = runner.measure(config, 0.0)
            if time.perf_counter() - start > options.budget:
                break
        seconds = time.perf_counter() - start
        best = min(((o.median_us, str(c)) for c, o in rows.items() if o.kind == "ok"), default=None)
        kinds = dict(Counter(o.kind for o in rows.values()))
        print(f"{name}: {len(rows)} of {legal} configs in {seconds:.0f} s, {kinds}, mm {baseline.mm_us:.2f} us, best {best}", flush=True)
        for kind in ("wrong", "crashed", "timeout", "compile_error"):
            for config, outcome in [(c, o) for c, o in rows.items() if o.kind == kind][:1]:
                print("   ", kind, config, outcome.detail[:200], flush=True)
        environment = record.environment(options.commit) | {"seconds": round(seconds), "legal": legal}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"sweep_{name}.json").write_text(table.to_json(table.Table(task, baseline, rows, environment)))
    if runner is not None:
        runner.close()


if __name__ == "__main__":
    main()
