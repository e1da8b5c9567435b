"""How long `torch.compile` takes until a model has run forward, backward and without gradients: with Inductor alone, and with epigen's backend.

Each way runs in processes of its own, whose caches are empty, so that what a process does once counts for both. The ways alternate; medians are compared.
Run: python -m bench.compilation [--models a,b] [--layers N] [--rounds N] [--name NAME] [--commit HASH] [--out FOLDER]
Claim: TARGET times what Inductor takes, at most.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import epigen
from bench import command, models, record
from bench.record import Report, Row
from epigen.runtime.device import THIS_MACHINE, Machine

TARGET = 1.3
INDUCTOR, EPIGEN = "inductor", "epigen"
WAYS = (INDUCTOR, EPIGEN)
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "EPIGEN_CACHE")


def seconds(name: str, way: str, tokens: int, layers: int) -> float:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {variable: str(Path(folder) / variable) for variable in _CACHES}
        one = [sys.executable, "-m", "bench.compilation", "--one", name, way, str(tokens), str(layers)]
        run = subprocess.run(one, env=command.environment() | caches, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{name} by {way} failed:\n{run.stderr}")
    return float(run.stdout.split()[-1])


def _one(name: str, way: str, tokens: int, layers: int) -> float:
    """In this process. The model is there and the GPU awake before the clock starts; what a way imports is its own."""
    model, x, grad = models.on_the_gpu(name, tokens, models.models(layers)[name])
    torch.cuda.synchronize()
    start = time.perf_counter()
    if way == EPIGEN:
        from epigen.training import backend

        compiled = torch.compile(model, backend=backend.backend)
    else:
        compiled = torch.compile(model)
    compiled(x).backward(grad)
    with torch.no_grad():
        compiled(x)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def rows_of(names: Iterable[str], rounds: int, run: Callable[[str, str], float]) -> list[Row]:
    """A row for each model. run: how long one takes by a way, in seconds."""
    rows = []
    for name in names:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                taken[way].append(round(run(name, way), 2))
        rows.append({"model": name, "seconds": taken, "ratio": round(statistics.median(taken[EPIGEN]) / statistics.median(taken[INDUCTOR]), 3)})
        print(rows[-1], flush=True)
    return rows


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--models", default="gpt2-xl,bert-large,vit-large,t5-xl,llama-8b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--name", default="compilation", help="of the results: compilation_whole is of models with all of their layers")
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "WAY", "TOKENS", "LAYERS"), help="time one here, and print the seconds")
    options = parser.parse_args()
    record.gpu_at_hand(machine)
    if options.one:
        name, way, tokens, layers = options.one
        print(_one(name, way, int(tokens), int(layers)))
        return
    # as an installed package is; else the first of epigen's processes would compile its modules
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(Path(epigen.__file__).parent)], env=command.environment(), check=True)
    rows = rows_of(options.models.split(","), options.rounds, lambda name, way: seconds(name, way, options.tokens, options.layers))
    about: dict[str, Any] = {"target": TARGET, "tokens": options.tokens, "layers": options.layers}
    print(record.write(options.name, Report("bench.compilation", record.environment(options.commit), rows, about), options.out))


if __name__ == "__main__":
    main()
