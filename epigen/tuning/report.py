"""What tuning says of itself: a line while it runs, a table and plain data when it is done. Pure text: nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from epigen import gpus
from epigen.choose import explain
from epigen.choose.explain import LATENCY, Explanation
from epigen.codegen.spec import Choice, KernelConfig
from epigen.db.records import short
from epigen.shapes import extents
from epigen.tuning.search import Progress, Result
from epigen.tuning.task import Task
from epigen.tuning.tune import Tuned

_PROGRAM = 40  # characters of a program in a line that has more to say
_REASON = 110  # characters of what the vendor's library says
_COLUMNS = f"  {'M x N x K':<17} {'us':>9} {'vs mm':>6} {'vs mm+1':>7}  {'bound by':<10} {'search':<11} winner"
_LEGEND = """\
vs mm, vs mm+1: times as fast as the vendor's product alone, and as that with one pointwise pass after it
bound by: what limits such a kernel by the model, and the share of the GPU's full speed there that was reached"""


def name(task: Task) -> str:
    """A problem in a few words, such as "relu(mm + bias) 4096x4096x4096 fp16 nt"."""
    program = short(task.graph.text)
    program = program if len(program) <= _PROGRAM else f"{program[: _PROGRAM - 3]}..."
    return f"{program} {extents(task.shape)} {_operands(task)} {task.layout}"


def _operands(task: Task) -> str:
    plain = str(task.a) if task.a == task.b else f"{task.a}x{task.b}"
    return " ".join(
        filter(
            None,
            (
                plain,
                task.a.precision(task.precision),
                "invariant" * bool(task.invariant),
                f"groups along {task.groups}" * bool(task.groups),
                f"sparse {task.sparse}" * bool(task.sparse),
            ),
        )
    )


# -- while it runs


def progress(task: Task, seen: Progress, all_left_s: float | None = None) -> str:
    """One search under way: trials, the best so far and against the vendor's product, time left, what was rejected. all_left_s: for what is
    tuned together. The least needed comes last: a narrow terminal cuts it off."""
    parts = [f"{name(task)}  {seen.trials}/{seen.wanted} trials"]
    if seen.best is not None:
        mm_us = seen.baseline.mm_us if seen.baseline else 0.0
        parts.append(f"best {us(seen.best_us)} us{f', {mm_us / seen.best_us:.2f}x mm' if mm_us else ''}")
    if seen.left_s is not None:
        parts.append(f"{span(seen.left_s)} left{f' (all: {span(all_left_s)})' if all_left_s is not None else ''}")
    if rejected := rejections(seen.counts):
        parts.append(f"rejected {rejected}")
    return ", ".join(parts)


def left_s(running: Mapping[int, Progress], finished_s: Sequence[float], problems: int) -> float | None:
    """Seconds until all problems are tuned, as many at a time as now; None while nothing is known.

    running: what is under way, by index. finished_s: how long each finished problem took. Problems that have not begun are taken to last as long as
    those did, or as those under way are going to.
    """
    known = [(p.seconds, p.left_s) for p in running.values() if p.left_s is not None]
    whole = list(finished_s) or [seconds + left for seconds, left in known]
    if not whole or not running:
        return None
    waiting = problems - len(finished_s) - len(running)
    mean = sum(whole) / len(whole)
    under_way = [left for _, left in known] + [mean] * (len(running) - len(known))
    return max(max(under_way), (sum(under_way) + waiting * mean) / len(running))


def finished(tuned: Tuned) -> str:
    """One finished problem in a line."""
    result = tuned.result
    if result is None:
        return str(tuned)
    rejected = rejections(result.counts)
    return f"{tuned}; {count(sum(result.counts.values()), 'trial')} in {span(result.seconds)}{f', rejected {rejected}' if rejected else ''}"


def rejections(counts: Mapping[str, int]) -> str:
    """How many trials ended otherwise than well, by cause: "3 slower, 1 out of resources"."""
    causes = sorted(((n, kind) for kind, n in counts.items() if n and kind != "ok"), key=lambda c: (-c[0], c[1]))
    return ", ".join(f"{n} {kind.replace('_', ' ')}" for n, kind in causes)


# -- when it is done


def table(done: Sequence[tuple[Task, Tuned]]) -> str:
    """What was found, a problem a line under its program, and where the search's own time went."""
    if not done:
        return ""
    lines = [_COLUMNS]
    heading = ""
    for task, tuned in done:
        mine = f"{short(task.graph.text)}  {_operands(task)} {task.layout}"
        if mine != heading:
            lines.append(mine)
            heading = mine
        lines.append(_line(task, tuned))
        if tuned.result is not None and tuned.result.untimed:
            lines.append(f"    {tuned.result.untimed[:_REASON]}")
    results = [t.result for _, t in done if t.result is not None]
    if results:
        lines += ["", _LEGEND, _spent(results)]
    return "\n".join(lines) + "\n"


def _line(task: Task, tuned: Tuned) -> str:
    result = tuned.result
    if result is None:
        return f"  {extents(task.shape):<17} failed: {tuned.error}"
    ratios = (_ratio(result.baseline.mm_us, result), _ratio(result.baseline.unfused_us, result))
    vs_mm, vs_unfused = ("-" if r is None else f"{r:.2f}" for r in ratios)
    why = _explained(task, result)
    share = why.floor_us / result.outcome.median_us
    bound = why.limit if why.limit == LATENCY else f"{why.limit} {share:.0%}"
    search = f"{sum(result.counts.values())} in {span(result.seconds).replace(' ', '')}"
    interrupted = " (interrupted)" * (not result.complete)
    return f"  {extents(task.shape):<17} {us(result.outcome.median_us):>9} {vs_mm:>6} {vs_unfused:>7}  {bound:<10} {search:<11} {brief(result.winner)}{interrupted}"


def _ratio(vendor_us: float, result: Result) -> float | None:
    """None where the vendor's product was not timed."""
    return vendor_us / result.outcome.median_us if vendor_us and result.outcome.median_us else None


def _explained(task: Task, result: Result) -> Explanation:
    choice = Choice(result.winner, "the winner")
    return explain.explain(task.spec, task.shape, gpus.of_target(task.target), choice)


def _spent(results: Sequence[Result]) -> str:
    parts: dict[str, float] = {}
    for result in results:
        for what, seconds in result.spent.items():
            parts[what] = parts.get(what, 0.0) + seconds
    said = ", ".join(f"{what} {span(seconds)}" for what, seconds in sorted(parts.items(), key=lambda p: -p[1]) if seconds >= 0.05)
    trials = sum(sum(r.counts.values()) for r in results)
    rejected = rejections({kind: sum(r.counts[kind] for r in results) for r in results for kind in r.counts})
    text = f"search: {count(trials, 'trial')} in {span(sum(r.seconds for r in results))}{f' ({said})' if said else ''}"
    return f"{text}, rejected {rejected}" if rejected else text


def brief(config: KernelConfig) -> str:
    """A config in little space, without what it does not do: "tiled 128x256x64 group_m=8 warps=8 stages=3"."""
    values = dict(config.values)
    block = "x".join(str(values.pop(d)) for d in ("block_m", "block_n", "block_k") if d in values)
    return " ".join([config.schedule, *([block] if block else []), *(f"{n.removeprefix('num_')}={v}" for n, v in values.items() if v)])


def record(task: Task, tuned: Tuned) -> dict[str, Any]:
    """One problem as plain data for JSON: what was asked, what won, all its times in microseconds, and what the model says of it."""
    row: dict[str, Any] = {
        "program": tuned.problem.program, "shape": list(task.shape), "dtype": task.a.name, "layout": task.layout, "precision": tuned.problem.precision or None,
        "invariant": tuned.problem.invariant or None, "groups": tuned.problem.groups or None, "sparse": tuned.problem.sparse or None,
        "gpu": tuned.problem.gpu, "capability": tuned.problem.capability,
    }  # fmt: skip
    result = tuned.result
    if result is None:
        return row | {"error": tuned.error}
    mm, unfused = _ratio(result.baseline.mm_us, result), _ratio(result.baseline.unfused_us, result)
    model = explain.record(_explained(task, result))
    row |= {"winner": str(result.winner), "config": {"schedule": result.winner.schedule, **dict(result.winner.values)}}
    row |= {"median_us": round(result.outcome.median_us, 3), "spread_us": round(result.outcome.spread_us, 3)}
    row |= {"mm_us": round(result.baseline.mm_us, 3) or None, "unfused_us": round(result.baseline.unfused_us, 3) or None}
    row |= {"vs_mm": mm and round(mm, 4), "vs_unfused": unfused and round(unfused, 4), "untimed": result.untimed or None}
    row |= {"trials": dict(result.counts), "seconds": round(result.seconds, 3), "spent_s": {k: round(v, 3) for k, v in result.spent.items()}}
    row |= {"complete": result.complete, "record": tuned.record.name if tuned.record else None}
    return row | {"limit": model["limit"], "floor_us": model["floor_us"], "model": model["model"]}


# -- figures


def us(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}"


def span(seconds: float) -> str:
    """A time in the unit that reads best: "0.3 s", "42 s", "7 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def count(number: int, one: str) -> str:
    return f"{number} {one}{'s' * (number != 1)}"
