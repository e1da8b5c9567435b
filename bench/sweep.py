"""Measures the search space of some problems on the GPU: what the search and the model are held to.

Run: python -m bench.sweep [--sample N] [--random SEED ...] [--configs N] [--budget SECONDS] [--only NAME ...] [--commit HASH] [--out FOLDER]
Whole spaces, for replay, are written to sweep_NAME.json. A sample, to sample_NAME.json: the model's first N, and of each schedule as many
again, half of them the model's first and half at random, so that it can be told where the model is wrong about a schedule. Samples of
random problems, as those of the claims "tuned" and "untuned" are drawn, all to shapes.json.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from bench import cases, record
from bench.programs import BY_NAME
from epigen import gpus
from epigen.choose.space import Space
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import BF16, FP16
from epigen.ir.program import graph_of
from epigen.perf import model
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.tuning import table
from epigen.tuning.runner import GpuRunner
from epigen.tuning.task import Outcome, Task

# name, program, shape, layout: the kinds of problem that stress different parts of the model
PROBLEMS = (
    ("square", "relu(mm + bias)", (4096, 4096, 4096), "nt"),
    ("short_k", "relu(mm + bias)", (8192, 8192, 512), "nn"),
    ("skinny", "relu(mm + bias)", (16, 4096, 4096), "nt"),
    ("small", "relu(mm + bias)", (128, 256, 256), "nn"),
    ("odd", "relu(mm + bias)", (1000, 1003, 1001), "nn"),
    ("medium", "gelu(mm + bias)", (2048, 2048, 2048), "nt"),
    ("drelu_bgrad", "dz = drelu(mm, mask); dz, bgrad(dz)", (4096, 4096, 1024), "nn"),
    ("square_drelu", "dz = drelu(mm, mask); dz, bgrad(dz)", (4096, 4096, 4096), "nn"),
    ("short_drelu", "dz = drelu(mm, mask); dz, bgrad(dz)", (8192, 8192, 512), "nn"),
    ("thousand", "relu(mm + bias)", (1000, 1000, 1000), "nn"),
    ("skinny16", "relu(mm + bias)", (16, 14336, 4096), "nt"),
    ("skinny64", "relu(mm + bias)", (64, 8192, 8192), "nt"),
    ("tiny", "relu(mm + bias)", (128, 256, 256), "nn"),
)


def sample(ranked: Sequence[KernelConfig], count: int) -> list[KernelConfig]:
    """The first `count`, and of each schedule as many: half of them the first, half any."""
    chosen = list(ranked[:count])
    for schedule in sorted({c.schedule for c in ranked}):
        own = [c for c in ranked if c.schedule == schedule]
        chosen += own[: count // 2] + random.Random(0).sample(own, min(len(own), count // 2))
    return list(dict.fromkeys(chosen))


def random_problems(seeds: Sequence[int]) -> Iterator[tuple[str, str, tuple[int, int, int], str]]:
    """Of each random shape one of its two programs, as `PROBLEMS`."""
    for seed in seeds:
        found = cases.drawn("shapes", seed)
        for i, pair in enumerate(zip(found[::2], found[1::2], strict=True)):
            case = pair[i % 2]
            yield "x".join(map(str, case.shape)), BY_NAME[case.program].text, case.shape, case.layout


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=100_000, help="no more than so many a problem, in random order")
    parser.add_argument("--sample", type=int, default=0, help="no whole space, but a sample around so many a problem")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds a problem")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--random", nargs="*", type=int, metavar="SEED", help="samples of random shapes instead, in bf16: 44 of each seed")
    record.add_options(parser, record.DATA)
    options = parser.parse_args()
    target = machine.at_hand() or gpus.DEFAULT_TARGET
    runner: GpuRunner | None = None
    dtype, tables = BF16 if options.random else FP16, list[table.Table]()
    for name, text, shape, layout in random_problems(options.random) if options.random else PROBLEMS:
        if options.only and name not in options.only:
            continue
        task = Task(graph_of(text), shape, dtype, dtype, (dtype,), layout, "ieee", target)
        spec = task.spec
        configs = list(Space(spec, shape, target).every())
        legal = len(configs)
        if options.sample:
            configs = sample(model.rank(spec, configs, shape, gpus.by_name(target.part)), options.sample)
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
        tables.append(table.Table(task, baseline, rows, environment))
        if options.random:
            (options.out / "shapes.json").write_text(table.list_to_json(tables))
        else:
            (options.out / f"{'sample' if options.sample else 'sweep'}_{name}.json").write_text(table.to_json(tables[-1]))
    if runner is not None:
        runner.close()


if __name__ == "__main__":
    main()
