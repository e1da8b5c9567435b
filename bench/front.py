"""What epigen's own Python costs where there is no GPU: starting, the way from a text to a kernel, ranking, look-up, a study's journal.

Run: python -m bench.front [--rounds N] [--commit HASH] [--out FOLDER]
Claims, each against the time that a process takes to import torch on the same machine, which a user waits for anyway: LIMITS. The tests
count calls and modules instead, which no other load of the machine changes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import command, record
from bench.record import Report
from epigen import gpus, settings
from epigen.choose.space import Space
from epigen.codegen import schedules
from epigen.codegen.lower import lower
from epigen.codegen.render import Renderer
from epigen.codegen.spec import KernelSpec, Signature
from epigen.db.database import Database
from epigen.db.problem import problem_of
from epigen.dtypes import FP16
from epigen.ir.check import check
from epigen.ir.passes import normalise
from epigen.lang.parser import parse
from epigen.perf import model
from epigen.tuning.runner import RECORDED, Replay
from epigen.tuning.search import search
from epigen.tuning.task import Baseline, Outcome

TEXT = "z = gelu(mm * alpha + bias) + residual; z, bitmask(z > 0), bgrad(z), amax(z)"
SHAPE = (4096, 4096, 4096)
GPU = gpus.by_name("H200")

LIMITS = {
    "import epigen": 0.05,
    "epigen --help": 0.2,
    "a text to a kernel's source": 0.005,
    "ranking 2000 configs": 0.4,
    "a look-up among the shipped records": 0.005,
    "a journal of 48 trials, beside memory": 0.5,
}
"""Of the time that torch's import takes."""


def processes() -> dict[str, Callable[[], object]]:
    def run(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=command.environment())

    helped = "from epigen.cli import main\nmain(['--help'], prog_name='epigen', standalone_mode=False)"
    return {"nothing": run("pass"), "torch": run("import torch"), "import epigen": run("import epigen"), "epigen --help": run(helped)}


def works() -> dict[str, Callable[[], object]]:
    """What is timed in this process."""
    graph = normalise(check(parse(TEXT)))
    spec = _spec(TEXT)
    configs = random.Random(0).sample(list(Space(spec, SHAPE, GPU.target).every()), 2000)
    renderer, config = Renderer(settings.templates_dir()), schedules.config("tiled", block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3)
    database, problem = Database(Path(tempfile.gettempdir()) / "epigen-none"), problem_of(graph, spec, SHAPE, GPU.target.part, "9.0")
    return {
        "a text to a kernel's source": lambda: renderer.render(_spec(TEXT), config),
        "ranking 2000 configs": lambda: model.rank(spec, configs, SHAPE, GPU),
        "a look-up among the shipped records": lambda: database.find(problem, "3.6.0"),
        "memory": lambda: _searched(spec, None),
        "journal": lambda: _journalled(spec),
    }


def _spec(text: str) -> KernelSpec:
    graph = normalise(check(parse(text)))
    return lower(graph, Signature(FP16, FP16, tuple((n.name, FP16) for n in graph.inputs()), k_multiple=64))


def _searched(spec: KernelSpec, storage: str | None) -> None:
    space = Space(spec, SHAPE, GPU.target)
    table = {config: Outcome("ok", 50.0 + i % 97, 0.1, 9) for i, config in enumerate(space.every()) if not i % 8}
    search(space, Replay(table, Baseline(100.0, 120.0)), prior=dict.fromkeys(table, 1.0), trials=48, storage=storage, name=RECORDED)


def _journalled(spec: KernelSpec) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _searched(spec, f"{folder}/study.journal")


def timed(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, interleaved, so that what else the machine does is shared; the first of each is left out."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of each claim to torch's import; a process's time is taken beyond that of one which does nothing."""
    torch_s = seconds["torch"] - seconds["nothing"]
    started = {name: seconds[name] - seconds["nothing"] for name in ("import epigen", "epigen --help")}
    journal = {"a journal of 48 trials, beside memory": seconds["journal"] - seconds["memory"]}
    return {name: (started | journal | dict(seconds))[name] / torch_s for name in LIMITS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    record.add_options(parser)
    options = parser.parse_args()
    seconds = timed(processes() | works(), options.rounds)
    found = ratios(seconds)
    for name, ratio in found.items():
        print(f"{name:<40} {ratio:7.4f} of torch's import, claimed {LIMITS[name]}: {'holds' if ratio <= LIMITS[name] else 'MISSED'}")
    rows = [{"what": name, "ratio": found[name], "claimed": limit, "holds": found[name] <= limit} for name, limit in LIMITS.items()]
    print(record.write("front", Report("bench.front", record.versions(options.commit), rows, {"seconds": seconds}), options.out))


if __name__ == "__main__":
    main()
