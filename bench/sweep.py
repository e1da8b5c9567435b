"""Measures a sample of the search space on the GPU, for replay: what the search and the model are held to.

Run: python -m bench.sweep [--configs N] [--budget SECONDS] [--commit HASH] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch

from bench import record
from epigen import api, dtypes
from epigen.codegen.lower import lower
from epigen.runtime import device
from epigen.tuning import rule, table
from epigen.tuning.runner import GpuRunner
from epigen.tuning.space import Space
from epigen.tuning.task import Outcome, Task

# name, program, shape, layout: the kinds of problem that stress different parts of the model
PROBLEMS = (
    ("square", "relu(mm + bias)", (4096, 4096, 4096), "nt"),
    ("short_k", "relu(mm + bias)", (8192, 8192, 512), "nn"),
    ("skinny", "relu(mm + bias)", (16, 4096, 4096), "nt"),
    ("small", "relu(mm + bias)", (128, 256, 256), "nn"),
    ("odd", "relu(mm + bias)", (1000, 1003, 1001), "nn"),
    ("drelu_bgrad", "dz = drelu(mm, mask); dz, bgrad(dz)", (4096, 4096, 1024), "nn"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=320)
    parser.add_argument("--budget", type=float, default=70.0, help="seconds a problem")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    target = device.at_hand() or device.DEFAULT
    for name, text, shape, layout in PROBLEMS:
        if options.only and name not in options.only:
            continue
        start = time.perf_counter()
        task = Task(text, shape, "fp16", "fp16", "fp16", layout, "ieee", target)
        graph = task.graph()
        kernel = api.compile(text)
        spec = lower(graph, kernel.signature_of(dtypes.FP16, shape))
        configs = list(Space(spec, shape, target, layout).every())
        random.Random(0).shuffle(configs)
        configs = list(dict.fromkeys([rule.choose(spec, shape, target, layout=layout).config, rule.library(spec, "").config, *configs]))[: options.configs]
        runner = GpuRunner(task)
        rows: dict[object, Outcome] = {}
        first = 0.0
        try:
            runner.prepare(configs)
            baseline = runner.compare([]).baseline
            for config in configs:
                rows[config] = runner.measure(config, 0.0)
                first = first or time.perf_counter() - start
                if time.perf_counter() - start > options.budget:
                    break
        finally:
            runner.close()
        seconds = time.perf_counter() - start
        right = [(o.median_us, str(c)) for c, o in rows.items() if o.kind == "ok"]
        kinds: dict[str, int] = {}
        for outcome in rows.values():
            kinds[outcome.kind] = kinds.get(outcome.kind, 0) + 1
        print(
            f"{name}: {len(rows)} configs in {seconds:.0f} s (first after {first:.1f} s), {kinds}, mm {baseline.mm_us:.2f} us, best {min(right, default=None)}",
            flush=True,
        )
        for kind in ("wrong", "crashed", "timeout", "compile_error"):
            bad = next(((c, o) for c, o in rows.items() if o.kind == kind), None)
            if bad:
                print("   ", kind, bad[0], bad[1].detail[:200], flush=True)
        environment = record.environment(options.commit) | {"seconds": round(seconds)}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"sweep_{name}.json").write_text(table.to_json(table.Table(task, baseline, rows, environment)))  # type: ignore[arg-type]
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
