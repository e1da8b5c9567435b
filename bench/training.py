"""A training step of a multilayer perceptron of 4 layers: how long it takes and how much memory, beside eager torch, torch.compile and nvmath.

Run: python -m bench.training [--widths N ...] [--batch N] [--without WORD ...] [--memory] [--budget SECONDS] [--commit HASH] [--out FOLDER]
Claim, with relu in bf16: 1.10 times as fast as eager torch at a width of 4096, 1.08 times at 8192, 1.05 times as fast as torch.compile with
max-autotune, and faster than the network by nvmath's epilogues. With relu, gelu and silu no step takes more memory than eager torch's at its peak, within 1 %; with
save="recompute" a forward of gelu or silu leaves less behind, by the pre-activations, and the peak is lower.
What a forward with relu leaves behind may be more than eager torch's, by its masks: each a sixteenth of an activation in bf16, kept beside it
because the backward reads the mask faster. The first claim is of the peak alone, which comes in the backward.
Contenders are timed interleaved, and so is what the step's products take alone, which no epilogue can spare. One whose gradients are wrong is not timed. What torch.compile tunes for long `--without compile` leaves out.
--memory takes the memory alone, which needs no quiet machine, into a result of its own: training_memory.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import clock, networks, record, timing
from bench.networks import ACTIVATIONS, LAYERS, MAKERS, NVMATH, PRODUCTS, Network, Task
from bench.peers import COMPILED, EAGER, OURS, Missing, reason
from bench.record import Report
from epigen.runtime.device import THIS_MACHINE, Machine

_WIDE = 8192


def faster(width: int) -> dict[str, float]:
    """How many times as fast as each peer, at least."""
    return {EAGER: 1.08 if width >= _WIDE else 1.1, COMPILED: 1.05, NVMATH: 1.0}


ALLOWED = 2.0
"""A gradient may be so many times as far from fp32's as eager torch's own: rounding at the same places, in other orders."""

RECOMPUTED = f"{OURS}, recompute"
LESS = ("gelu", "silu")
"""Whose derivatives want the pre-activation."""

SLACK = 0.01
"""Of eager torch's memory: partial sums of bias gradients."""

_ROUND_S = 4.0  # of timing at one width

Time = Callable[[Mapping[str, Callable[[], object]]], dict[str, dict[str, float]]]
Weigh = Callable[[Network], dict[str, int]]


def cold(contenders: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    return timing.cold(contenders, budget_s=_ROUND_S)


def memory(network: Network) -> dict[str, int]:
    """Bytes beyond parameters and data: what a forward leaves for the backward, and the most at any time of a step."""
    network.step()  # whatever a first step allocates to keep
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    left = network.forward()
    held = torch.cuda.memory_allocated() - before
    gradients = network.backward(left)
    del left, gradients
    return {"held_bytes": held, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Of each parameter's gradient: the largest error of a row, in the typical size of rows. A bias is one row."""
    worst = []
    for f, e in zip(found, expected, strict=True):
        if f.shape != e.shape:
            raise ValueError(f"a gradient has shape {list(f.shape)}, its parameter {list(e.shape)}")
        apart, size = (torch.atleast_2d(t).norm(dim=1) for t in (f.float() - e, e))
        worst.append(float(apart.max() / size.square().mean().sqrt()))
    return worst


def _made(name: str, task: Task, expected: Sequence[Tensor], allowed: Sequence[float], row: dict[str, Any]) -> Network | None:
    """A contender whose gradients are right; else None, and the row says why."""
    try:
        one = MAKERS[name](task)
    except Missing as why:
        row["missing"][name] = str(why)
        return None
    except Exception as error:  # noqa: BLE001  # of three libraries, any of which may fail in its own way
        row["missing"][name] = reason(error)
        return None
    try:
        found = errors(one.step(), expected)
    except Exception as error:  # noqa: BLE001
        row["missing"][name] = reason(error)
    else:
        row["errors"][name] = [round(e, 6) for e in found]
        bad = [i for i, (e, most) in enumerate(zip(found, allowed, strict=True)) if not e <= most]
        if not bad:
            if one.note:
                row["notes"][name] = one.note
            return one
        part = f"{'bias' if bad[0] % 2 else 'weight'} of layer {bad[0] // 2}"
        row["missing"][name] = f"wrong gradient of the {part}: error {found[bad[0]]:.3g}, allowed {allowed[bad[0]]:.3g}"
    one.close()
    return None


def timed(width: int, batch: int, names: Sequence[str], on: str = "cuda", how: Time = cold, weigh: Weigh = memory) -> dict[str, Any]:
    """One width with relu: each contender is made and checked, then all that are right are timed interleaved, and their memory is taken."""
    start = time.perf_counter()
    task = networks.task(width, batch, on=on)
    row: dict[str, Any] = {
        "case": f"width {width}, batch {batch}, relu",
        "width": width,
        "batch": batch,
        "errors": {},
        "notes": {},
        "missing": {},
        "timing": {},
    }
    expected = networks.exact(task).step()
    allowed = [ALLOWED * e for e in errors(networks.eager(task).step(), expected)]
    made = {name: one for name in names if (one := _made(name, task, expected, allowed, row))}
    del expected
    try:
        before = clock.sm_mhz()
        row["timing"] = how({**{name: one.step for name, one in made.items()}, PRODUCTS: networks.products(task)}) if made else {}
        row["clock_mhz"] = [before, clock.sm_mhz()]
        row["memory"] = {name: weigh(one) for name, one in made.items()}
    except Exception as error:  # noqa: BLE001  # the other widths go on
        row["failed"] = reason(error)
    finally:
        for one in made.values():
            one.close()
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def weighed(width: int, batch: int, activation: str, on: str = "cuda", weigh: Weigh = memory) -> dict[str, Any]:
    """The memory of eager torch's step, of epigen's with its own choice of what to save, and where it takes the products again."""
    row: dict[str, Any] = {
        "case": f"width {width}, batch {batch}, {activation}",
        "width": width,
        "batch": batch,
        "activation": activation,
        "missing": {},
        "memory": {},
    }
    task = networks.task(width, batch, activation, on)
    for name, make in ((EAGER, networks.eager), (OURS, networks.ours), (RECOMPUTED, functools.partial(networks.ours, save="recompute"))):
        try:
            row["memory"][name] = weigh(make(task))
        except Exception as error:  # noqa: BLE001
            row["missing"][name] = reason(error)
    return row


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the rows say of each claim. met: None where one of the two was not measured."""
    found = []
    for row in rows:
        for name, least in faster(row["width"]).items() if "timing" in row else ():
            ratio = row["timing"][name]["median_us"] / row["timing"][OURS]["median_us"] if {name, OURS} <= row["timing"].keys() else None
            met = None if ratio is None else ratio >= least and (least > 1 or ratio > 1)
            found.append({"case": row["case"], "claim": f"{least:g} times as fast as {name}", "ratio": ratio and round(ratio, 4), "met": met})
        if "activation" in row:
            found += _memory_verdicts(row)
    return found


def _memory_verdicts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    taken, case = row["memory"], row["case"]
    claims = [(OURS, f"{OURS}: no more memory at the peak than eager torch", 0)]
    if row["activation"] in LESS:
        hidden = (LAYERS - 1) * row["batch"] * row["width"] * 2  # the pre-activations' bytes
        claims.append((RECOMPUTED, f"{RECOMPUTED}: less memory than eager torch, after the forward by the pre-activations", hidden))
    found = []
    for name, words, less in claims:
        ratio, met = None, None
        if {name, EAGER} <= taken.keys():
            mine, theirs = taken[name], taken[EAGER]
            ratio = round(mine["peak_bytes"] / theirs["peak_bytes"], 4)
            met = ratio < 1 and mine["held_bytes"] + less <= theirs["held_bytes"] * (1 + SLACK) if less else ratio <= 1 + SLACK
        found.append({"case": case, "claim": words, "ratio": ratio, "met": met})
    return found


def run(
    widths: Sequence[int], batch: int, names: Sequence[str], body: dict[str, Any], budget_s: float, save: Callable[[], object], on: str = "cuda", how: Time = cold,
    weigh: Weigh = memory, now: Callable[[], float] = time.perf_counter,
) -> None:  # fmt: skip
    """Times of the named contenders first, if any, then memory, into body["rows"]; body["left_out"] lists what had not begun when the time was over."""
    start = now()
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"width {w}: times", functools.partial(timed, w, batch, names, on, how, weigh)) for w in widths if names
    ] + [(f"width {w}: memory with {a}", functools.partial(weighed, w, batch, a, on, weigh)) for w in widths for a in ACTIVATIONS]
    body["rows"], body["left_out"] = [], []
    for what, measure in todo:
        if now() - start > budget_s:
            body["left_out"].append(what)
            continue
        body["rows"].append(row := measure())
        print(line(row), flush=True)
        if on == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        save()


def line(row: Mapping[str, Any]) -> str:
    found = [f"FAILED {row['failed']}"] if "failed" in row else []
    found += [f"{name} {one['median_us'] / 1e3:.3f} ms" for name, one in row.get("timing", {}).items()]
    found += [f"{name} {one['held_bytes'] / 1e6:.0f} MB held, {one['peak_bytes'] / 1e6:.0f} MB peak" for name, one in row.get("memory", {}).items()]
    found += [f"no {name}: {why}" for name, why in row["missing"].items()]
    return f"{row['case']}: {'; '.join(found)}"


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--without", nargs="*", default=(), metavar="WORD", help="contenders whose name has one of these words, such as compile or nvmath")
    parser.add_argument("--memory", action="store_true", help="no times")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="after which nothing further is begun")
    record.add_options(parser)
    options = parser.parse_args()
    names = [name for name in MAKERS if not options.memory and not any(word in name for word in options.without)]
    record.gpu_at_hand(machine)
    environment = record.environment(options.commit)
    body: dict[str, Any] = {}

    def save() -> Any:
        about = {"layers": LAYERS, "dtype": "bf16", "without": list(options.without), "left_out": body["left_out"]}
        return record.write("training_memory" if options.memory else "training", Report("bench.training", environment, body["rows"], about), options.out)

    run(options.widths, options.batch, names, body, options.budget, save)
    for one in verdicts(body["rows"]):
        said = "not measured" if one["met"] is None else "holds" if one["met"] else "DOES NOT HOLD"
        print(f"{one['case']}: {one['claim']}: {one['ratio']}, {said}")
    if body["left_out"]:
        print("left out, as the time was over:", *body["left_out"], sep="\n  ")
    print(save())


if __name__ == "__main__":
    main()
