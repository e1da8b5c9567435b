"""The block about real models: what torch.compile's backend and fuse make of them, beside eager torch and Inductor."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from bench.bars import geometric
from bench.compilation import EPIGEN, INDUCTOR
from bench.models import better
from bench.record import Report, Row
from bench.tables import load, paragraphs, source, table

_PASSES = ("forward", "step")
_COLUMNS = (
    "", "eager", "Inductor", "epigen", "fuse", "fuse against eager", "with free epilogues", "products' share", "Inductor, free pointwise", "host's share",
)  # fmt: skip


def models() -> str:
    """Layers of real models, as torch.compile's backend and fuse run them."""
    report = load("models")
    last = [row for row in report.rows if "earlier" not in row]
    first = last[0]
    gains = {what: [better(row[f"{what}_ms"]) / row[f"{what}_ms"]["epigen"] for row in last] for what in _PASSES}
    autotuned = [f"{row['model']}{_tokens(row, report)}" for row in last if "autotune" in row["step_ms"]]
    too = f" (for {', '.join(autotuned)} of its max-autotune too)" if autotuned else ""
    means = ", ".join(f"{what} {geometric(ratios):.2f} (median {statistics.median(ratios):.2f})" for what, ratios in gains.items())
    commits = Counter(row["commit"] for row in last if "commit" in row)
    older = "".join(f" {count} row{'s are' if count > 1 else ' is'} of commit {commit}." for commit, count in commits.items())
    return paragraphs(
        f"{first['layers']} layers of real models in bf16, {first['tokens']} tokens, random weights, untuned. `epigen` is "
        f'`torch.compile(backend="epigen")`, `fuse` is `epigen.fuse`, each against the better of eager torch and Inductor{too}; higher is better. '
        f"Geometric means of `epigen`: {means}.",
        table(_COLUMNS, [_cells(row, what, report) for row in last for what in _PASSES]),
        f"{source(report, 'models')}{older}",
        "- `with free epilogues`: what fuse would gain against eager if its epilogues took no time.\n"
        "- `products' share`: of the better's time. No fusing shortens it.\n"
        "- `Inductor, free pointwise`: the better's gain if Inductor's pointwise kernels took no time, the most that fusing could give.\n"
        "- `host's share`: of epigen's time, what the host takes to launch. Near 100 % and above, hosts are compared and not kernels.",
        "Other ways to run them, training and compilation:",
        "\n".join(f"- {line}" for line in _others(report, last)),
    )


def reach() -> str:
    """The same in a sentence or two, for those who read no table."""
    last = [row for row in load("models").rows if "earlier" not in row]
    steps = [better(row["step_ms"]) / row["step_ms"]["epigen"] for row in last]
    fused = [row[f"{what}_ms"]["eager"] / row[f"{what}_ms"]["fuse"] for row in last for what in _PASSES if what == "forward" or not _waits(row)]
    waiting = [row["step_ms"]["eager"] / row["step_ms"]["fuse"] for row in last if _waits(row)]
    forwards = [better(row["forward_ms"]) / row["forward_ms"]["epigen"] for row in last]
    return (
        f"- On an H100 forwards of {len({row['model'] for row in last})} transformers' layers ran {_span(forwards)} times as fast by `torch.compile` with epigen as the best of eager torch and Inductor, and training "
        f"steps {_span(sorted(steps)[:-1])}, but for one, {max(steps):.1f}. `epigen.fuse` was {_span(fused)} of eager torch; of steps for which the GPU waits for the host {_span(waiting)}."
    )


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _cells(row: Row, what: str, report: Report) -> list[str]:
    times = row[f"{what}_ms"]
    best = better(times)
    return [
        f"{row['model']}{_tokens(row, report)}, {what}",
        *(f"{times[way]:.2f} ms" for way in ("eager", "inductor")),
        *(f"{best / times[way]:.2f}" for way in ("epigen", "fuse")),
        f"{times['eager'] / times['fuse']:.2f}",
        f"{times['eager'] / (times['eager'] - row['spared_ms'][what]):.2f}" if "spared_ms" in row else "",
        f"{row['products_ms'][what] / best:.0%}",
        f"{_free(row, what):.2f}" if "pointwise_ms" in row else "",
        f"{row['host_ms'][what]['epigen'] / times['epigen']:.0%}",
    ]


_RUN_AS: tuple[tuple[str, str, Callable[[Mapping[str, float]], float], str], ...] = (
    ("epigen, graphs", "inductor, graphs", lambda times: times["inductor, graphs"], 'As CUDA graphs (`mode="reduce-overhead"`), against Inductor\'s'),
    ("tuned", "eager", better, "Tuned, against the better"),
    ("epigen", "autotune", lambda times: times["autotune"], "Against Inductor's `max-autotune-no-cudagraphs`"),
    ("epigen, autotune", "autotune", lambda times: times["autotune"], "The same, with `max-autotune-no-cudagraphs` for what epigen leaves to Inductor too"),
    ("tuned, autotune", "autotune", lambda times: times["autotune"], "The same, tuned"),
)
"""What else a model may be run as: the way, what it is compared with, and how long that takes."""


def _others(report: Report, last: list[Row]) -> list[str]:
    """A line for each way that some models were run as, and for what was trained and compiled."""
    lines = []
    for way, other, against, words in _RUN_AS:
        rows: dict[tuple[str, int], Row] = {}
        for row in report.rows:  # a model's last row comes first
            if {way, other} <= set(row["step_ms"]):
                rows.setdefault((row["model"], row["tokens"]), row)
        if rows:
            lines.append(f"{words}: {'; '.join(_ratios(row, way, against, report) for row in rows.values())}.")
    if short := [_short_of(row, what, report) for row in last for what in _PASSES if "pointwise_ms" in row and _free(row, what) < _AIM]:
        lines.append(f"Where free pointwise kernels would give less than {_AIM}, epigen's gain of that: {'; '.join(short)}.")
    if bound := [f"{row['model']}{_tokens(row, report)} {_gpu_gains(row)}" for row in last if "gpu_ms" in row and _waits(row)]:
        lines.append(f"The GPU's time alone, of models whose step waits for the host: {'; '.join(bound)}.")
    if before := sorted({row["commit"] for row in report.rows if "earlier" in row}):
        lines.append(f"Of these, models that the last run did not tune are of {', '.join(before)}.")
    if trained := {row["model"]: row["losses"] for row in report.rows if row.get("losses")}:
        worst = {way: max(found["apart"][way] for found in trained.values()) for way in ("epigen", "inductor", "fuse", "fp32")}
        steps = max(found["steps"] for found in trained.values())
        lines.append(
            f"Losses of {', '.join(sorted(trained))} over {steps} steps of training differ from eager's by at most {worst['epigen']:.1g} of them "
            f"(Inductor's by {worst['inductor']:.1g}, fuse's by {worst['fuse']:.1g}, eager's own in fp32 by {worst['fp32']:.1g})."
        )
    lines += [_compilation(load(name)) for name in ("compilation", "compilation_whole")]
    return lines


def _compilation(report: Report) -> str:
    """Each model's seconds as well: processes that do the same differ by a half."""
    rows = [f"{row['model']} {_seconds(row, EPIGEN)} s, Inductor {_seconds(row, INDUCTOR)} s" for row in report.rows]
    ratios = [row["ratio"] for row in report.rows]
    return (
        f"Compilation of {report.summary['layers']} layers, in a new process with empty caches, until they have run forward, backward and without gradients, takes {geometric(ratios):.2f} times as long as with Inductor "
        f"in the geometric mean, {max(ratios):.2f} at most; the target is {report.summary['target']} ({'; '.join(rows)}; commit {report.environment['commit']})."
    )


def _seconds(row: Row, way: str) -> str:
    return ", ".join(f"{s:.1f}" for s in row["seconds"][way])


def _ratios(row: Row, way: str, against: Callable[[Mapping[str, float]], float], report: Report) -> str:
    ratios = ", ".join(f"{what} {against(row[f'{what}_ms']) / row[f'{what}_ms'][way]:.2f}" for what in _PASSES)
    return f"{row['model']}{_tokens(row, report)} {ratios}"


_AIM = 1.05


def _free(row: Row, what: str) -> float:
    """How many times as fast the better would be if Inductor's pointwise kernels took no time."""
    best = better(row[f"{what}_ms"])
    return best / (best - row["pointwise_ms"][what])


def _short_of(row: Row, what: str, report: Report) -> str:
    gain = better(row[f"{what}_ms"]) / row[f"{what}_ms"]["epigen"]
    return f"{row['model']}{_tokens(row, report)} {what} {gain:.3f} of {_free(row, what):.3f}"


def _waits(row: Row) -> bool:
    """Whether the GPU waits for the host in a training step, so that hosts are compared and not kernels."""
    return row["host_ms"]["step"]["epigen"] > 0.9 * row["step_ms"]["epigen"]


def _gpu_gains(row: Row) -> str:
    """What the backend gains against the better, and fuse against eager, where the host's time is left out."""
    return ", ".join(
        f"{what} {better(times) / times['epigen']:.2f} (fuse of eager {times['eager'] / times['fuse']:.2f})" for what, times in row["gpu_ms"].items()
    )


def _tokens(row: Row, report: Report) -> str:
    """Where it is another number than the first model's."""
    return "" if row["tokens"] == report.rows[0]["tokens"] else f" with {row['tokens']} tokens"
