"""The headline: every contender at the shapes of the bars, timed interleaved, and a verdict on each bar.

Run: python -m bench.headline [--group NAME] [--plan] [--budget SECONDS] [--more] [--tune TRIALS --db PATH] [--only WORD ...]
                              [--commit HASH] [--out FOLDER]
Group "headline" is a part of all the others that is done in under 5 minutes on an H200; `epilogues`, `small`, `skinny` and `odd` are the whole
of it. torch.compile, which tunes for long, has a script of its own, bench.compiled. Each case is timed with the L2 cache flushed, or under a CUDA
graph, all of its contenders interleaved, on random data. Absolute times move with power and temperature, so what counts is the ratio within a
case. An answer that is wrong is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import epigen
from bench import ahead, bars, cases, clock, command, peers, record, timing
from bench.cases import Case
from bench.checked import Oracle, Wrong
from bench.peers import Contender, Maker, Missing
from bench.programs import BY_NAME, with_tanh
from bench.record import Report
from epigen import dtypes
from epigen.gpus import Target
from epigen.ir.program import graph_of
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.tuning.timer import ColdTimer

BUDGET_S = 275.0
"""Of a run: with torch's start and the end of the last case it stays under 5 minutes."""

_MUCH = 40 << 30  # bytes of freed memory that torch may keep from one case to the next
_COPIED = 1 << 30
_WRITTEN_S = 10.0  # the result is kept so often while a run goes on

Time = Callable[[Mapping[str, Callable[[], object]]], dict[str, dict[str, float]]]


class GpuFailed(Exception):
    """The GPU answers nothing any more: this process has to end."""


def cold(contenders: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    return timing.cold(contenders, budget_s=cases.ROUND_S)


def graphed(contenders: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    return timing.graphed(contenders, rounds=30)


HOW: dict[str, Time] = {cases.COLD: cold, cases.GRAPH: graphed}


def measured(case: Case, on: str = "cuda", how: Mapping[str, Time] = HOW, makers: Mapping[str, Maker] = peers.MAKERS) -> dict[str, Any]:
    """One case: each contender is made and checked, then all that are right are timed interleaved.

    on: the device. how: what times them. makers: of the contenders. Raises GpuFailed where the GPU is gone.
    """
    start = time.perf_counter()
    row: dict[str, Any] = {
        "group": case.group, "program": case.program, "text": BY_NAME[case.program].text, "shape": list(case.shape), "dtype": case.dtype,
        "layout": case.layout, "how": case.how, "bytes": case.bytes, "flops": case.flops, "checked": {}, "notes": {}, "missing": {}, "timing": {},
    }  # fmt: skip
    made: dict[str, Contender] = {}
    try:
        problem = peers.problem(BY_NAME[case.program], case.shape, case.dtype, case.layout, on)
        oracle = Oracle(problem.sample)
        for name in case.contenders:
            reason = _made(name, makers[name], problem, oracle, made, row)
            if reason is not None:
                row["missing"][name] = reason
                _demand_life(on)
        del oracle
        before = clock.sm_mhz()
        if made:
            row["timing"] = how[case.how]({name: one.run for name, one in made.items()})
        row["clock_mhz"] = [before, clock.sm_mhz()]
    except GpuFailed:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, the other cases go on
        row["failed"] = peers.reason(error)
        _demand_life(on)
    finally:
        for one in made.values():
            _close(one)
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def _made(name: str, make: Maker, problem: peers.Problem, oracle: Oracle, made: dict[str, Contender], row: dict[str, Any]) -> str | None:
    """Make a contender and check its answer. Returns why it does not take part, if so."""
    try:
        one = make(problem)
    except Missing as why:
        return str(why)
    except Exception as error:  # noqa: BLE001  # of four libraries, any of which may fail in its own way
        return peers.reason(error)
    try:
        row["checked"][name] = oracle.demanded(one.outputs(one.run()), one.demands)
    except Wrong as wrong:
        _close(one)
        return f"wrong answer: {wrong}"
    except Exception as error:  # noqa: BLE001
        _close(one)
        return peers.reason(error)
    made[name] = one
    if one.note:
        row["notes"][name] = one.note
    return None


def _close(one: Contender) -> None:
    with contextlib.suppress(Exception):  # of a GPU that is gone nothing can be given back
        one.close()


def _demand_life(on: str) -> None:
    if on == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise GpuFailed(peers.reason(error)) from None


def copy_gbps() -> float:
    """GB/s read and written by a copy within the GPU's memory."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timer = ColdTimer()
    return round(2 * _COPIED / (statistics.median(timer.once(lambda: target.copy_(source)) for _ in range(11)) * 1e3), 1)


# -- a run


def chosen(group: str, only: Sequence[str]) -> list[Case]:
    """The cases of a group; only: those whose name has one of the words."""
    return [c for c in cases.GROUPS[group]() if not only or any(word in str(c) for word in only)]


def run(
    todo: Sequence[Case], body: dict[str, Any], budget_s: float, save: Callable[[], object], measure: Callable[[Case], dict[str, Any]] = measured,
    now: Callable[[], float] = time.perf_counter,
) -> None:  # fmt: skip
    """Measure the cases in order into body["rows"]; body["left_out"] lists those for which the time was too short. Raises GpuFailed."""
    start = now()
    known = {key(row) for row in body["rows"]}
    body["left_out"] = []
    for case in todo:
        if case.key in known:
            continue
        if now() - start + case.seconds > budget_s:
            body["left_out"].append(str(case))
            continue
        try:
            row = measure(case)
        except GpuFailed as lost:
            body["rows"].append(_blank(case) | {"failed": f"the GPU's context was lost: {lost}"})
            raise
        body["rows"].append(row)
        print(line(row), flush=True)
        save()


def _blank(case: Case) -> dict[str, Any]:
    return {"group": case.group, "program": case.program, "shape": list(case.shape), "dtype": case.dtype, "layout": case.layout, "how": case.how, "timing": {}}


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """As Case.key."""
    return (row["group"], row["program"], "x".join(map(str, row["shape"])), row["dtype"], row["layout"], row["how"])


def line(row: Mapping[str, Any]) -> str:
    head = " ".join(key(row))
    if "failed" in row:
        return f"{head}: FAILED {row['failed']}"
    times = row["timing"]
    found = [f"{name} {one['median_us']:.2f} us" for name, one in times.items() if name == peers.OURS]
    for name in times:
        value = bars.ratio(row, name)
        if name != peers.OURS and value is not None:
            found.append(f"{name} {value:.3f}")
    found += [f"no {name}: {reason[:120]}" for name, reason in row["missing"].items()]
    return f"{head}: {', '.join(found)}"


def launched(row: Mapping[str, Any], name: str, target: Target) -> str:
    """The config that a call of the row's problem launches by now. name: of the contender, one of epigen's."""
    program = BY_NAME[row["program"]]
    kernel = epigen.compile(program.tanh if name == peers.OURS_TANH else program.text)
    return str(kernel.plan(tuple(row["shape"]), dtypes.BY_NAME[row["dtype"]], target, layout=row["layout"]).choice.config)


def stands(row: Mapping[str, Any], target: Target) -> bool:
    """Whether epigen was timed, and with the configs that it has by now."""
    ours = [name for name in (peers.OURS, peers.OURS_TANH) if name in row["timing"]]
    return peers.OURS in ours and all(row["notes"][name].startswith(f"{launched(row, name, target)};") for name in ours)


def plan(todo: Sequence[Case], budget_s: float) -> str:
    """The cases, each with its estimated seconds, and what would be left out."""
    lines, total, left = [], cases.START_S, Counter[str]()
    for case in todo:
        fits = total + case.seconds <= budget_s
        total += case.seconds if fits else 0.0
        left[case.group] += not fits
        lines.append(f"{case}: {case.seconds:.1f} s, {', '.join(case.contenders)}{'' if fits else '  LEFT OUT'}")
    out = ", ".join(f"{count} of {group}" for group, count in left.items() if count) or "nothing"
    return "\n".join([*lines, f"{len(todo)} cases, about {total:.0f} s of at most {budget_s:.0f} s; left out: {out}"])


def _tune(todo: Sequence[Case], trials: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "suite.toml"
        file.write_text(command.suite_text(cases.requests(todo)))
        status = command.plainly(["tune", "--suite", str(file), "--trials", str(trials), "--devices", "all"])
    if status not in (0, 1):  # 1: some problem has no config that works, which its row will show
        raise SystemExit(f"tuning ended with status {status}")


def _compile(todo: Sequence[Case], target: Target) -> None:
    start = time.perf_counter()
    wanted = cases.requests(todo)
    wanted += [replace(a, graph=graph_of(with_tanh(a.graph.text))) for a in wanted if with_tanh(a.graph.text) != a.graph.text]
    count = ahead.compile_all(wanted, target)
    print(f"{count} of {len(wanted)} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)


def measure_all(todo: Sequence[Case], target: Target, options: argparse.Namespace) -> None:
    """Measure what the result does not hold yet, and write and print what came of it. A GPU that is lost gets a new process for the rest."""
    start = time.perf_counter()
    environment = record.environment(options.commit)
    body: dict[str, Any] = {"rows": [], "left_out": []}
    if options.more:
        rows = record.earlier(options.out / f"{options.group}.json", environment)
        body["rows"] = [row for row in rows if "commit" not in row or stands(row, target)]
    known = {key(row) for row in body["rows"]}
    _compile([c for c in todo if c.key not in known], target)
    copied_gbps = copy_gbps()
    written = time.perf_counter()
    order = {case.key: place for place, case in enumerate(todo)}

    def save() -> Path:
        nonlocal written
        written = time.perf_counter()
        body["rows"].sort(key=lambda row: order.get(key(row), len(order)))
        about = {"budget_s": options.budget, "copy_gbps": copied_gbps, "left_out": body["left_out"]}
        return record.write(options.group, Report("bench.headline", environment, body["rows"], about), options.out)

    def now_and_then() -> None:
        if time.perf_counter() - written > _WRITTEN_S:
            save()

    try:
        run(todo, body, options.budget - (time.perf_counter() - start), now_and_then, one_after_another)
    except GpuFailed as lost:
        save()
        print(f"{lost}: a new process goes on with the other cases", flush=True)
        go_on(options, environment["commit"], options.budget - (time.perf_counter() - start))
    path = save()
    for found in bars.verdicts(body["rows"], copied_gbps):
        if found["met"] is not None:
            print(bars.line(found))
    if body["left_out"]:
        print(f"left out, as the time was over ({len(body['left_out'])}):", *body["left_out"], sep="\n  ")
    print(path)


def one_after_another(case: Case) -> dict[str, Any]:
    """One case, after which large tensors are given back."""
    row = measured(case)
    if torch.cuda.memory_reserved() > _MUCH:
        gc.collect()
        torch.cuda.empty_cache()
    return row


def go_on(options: argparse.Namespace, commit: str, left_s: float) -> None:
    """Become a new process that measures the rest."""
    again = ["--group", options.group, "--more", "--budget", f"{left_s:.0f}", "--out", str(options.out), "--commit", commit]
    again += [*(["--db", str(options.db)] if options.db else []), *(["--only", *options.only] if options.only else [])]
    os.execve(sys.executable, [sys.executable, "-m", "bench.headline", *again], os.environ | command.import_path())


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=tuple(cases.GROUPS), default="headline")
    parser.add_argument("--only", nargs="*", default=(), help="cases whose name has one of these words, such as bf16 or 4096x4096x4096")
    parser.add_argument("--plan", action="store_true", help="print the cases and the estimated time, and measure nothing")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no further case is begun")
    parser.add_argument(
        "--more", action="store_true", help="keep the rows that the result holds, but for another commit's with another config, and measure the others"
    )
    parser.add_argument("--tune", type=int, metavar="TRIALS", help="first tune the problems, into --db")
    parser.add_argument("--db", type=Path, help="the user's tuning database (default: EPIGEN_DB, else the platform's data folder)")
    record.add_options(parser)
    options = parser.parse_args()
    todo = chosen(options.group, options.only)
    if options.plan:
        print(plan(todo, options.budget))
        return
    if options.tune and not options.db:
        parser.error("--tune wants --db, a database to write to")
    target = record.gpu_at_hand(machine)
    if options.db:
        os.environ["EPIGEN_DB"] = str(options.db.resolve())  # before anything looks there
    if options.tune:
        _tune(todo, options.tune)
    measure_all(todo, target, options)


if __name__ == "__main__":
    main()
