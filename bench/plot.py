"""Draws the recorded results of `python -m bench.replay`: the best time so far by trial, a panel a table.

Run: python -m bench.plot [--results FOLDER]; wants matplotlib (pip install "epigen[bench]"). Equal results give equal bytes.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench import record
from bench.record import Report, Row

mpl.use("agg")
from matplotlib import pyplot  # it takes the backend that is chosen by then
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

COLOURS = {"epigen": "#0b6e4f", "random": "#8a8d91", "TPE alone": "#d1603d"}
_COLUMNS, _WIDTH, _HEIGHT = 4, 2.7, 2.6  # inches a panel
_TICKS = (0, 1, 2, 5, 10, 20, 50, 100)
_LINEAR, _MOST = 2.0, 100.0  # per cent: the axis is linear up to the one, logarithmic from there, and ends at the other
STYLE: dict[str, Any] = {
    "svg.hashsalt": "epigen", "svg.fonttype": "none",  # letters stay letters, which a viewer without the first font takes from the second
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana"], "font.size": 8.0, "axes.titlesize": 8.0,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def panel(axes: Axes, one: Row, about: Mapping[str, Any]) -> None:
    """One table: medians as lines, with the 10th to the 90th percentile as bands."""
    for name in reversed(COLOURS):  # ours on top
        search = one["searches"][name]
        low, middle, high = ([_lost(ratio) for ratio in search[key]] for key in ("low", "median", "high"))
        count = len(middle)
        # where nothing changes no point is needed: the file is a third of the size
        marks = [i for i in range(count) if i in (0, count - 1) or any(c[i] != c[i - 1] for c in (low, middle, high))]
        low, middle, high = ([c[i] for i in marks] for c in (low, middle, high))
        trials = [i + 1 for i in marks]
        axes.fill_between(trials, low, high, step="post", color=COLOURS[name], alpha=0.15, linewidth=0)
        axes.step(trials, middle, where="post", color=COLOURS[name], label=name, linewidth=1.4)
    axes.axhline(_lost(1 / about["enough"]), color="black", linewidth=0.6, linestyle=(0, (4, 3)))
    axes.axvline(about["trials"], color="black", linewidth=0.6, linestyle=(0, (1, 2)))
    program, *call = one["problem"].rsplit(" ", 3)
    axes.set_title(f"{program}\n{' '.join(call)}")
    axes.set_xlim(1, count)
    axes.set_xticks([1, 24, 48, 72, 96])
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=0.6)
    axes.set_ylim(-0.15, _MOST)
    axes.yaxis.set_major_locator(FixedLocator(_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _lost(ratio: float | None) -> float:
    """Per cent over the best time. None: before the first right answer there is no time, and the curve comes from beyond the axis."""
    return 10 * _MOST if ratio is None else 100 * (ratio - 1)


def draw(report: Report, folder: Path) -> list[Path]:
    """report: what bench.replay has written. Returns the files."""
    tables, about = report.rows, report.summary
    with mpl.rc_context(STYLE):
        rows = math.ceil((len(tables) + 1) / _COLUMNS)
        figure, grid = pyplot.subplots(rows, _COLUMNS, figsize=(_COLUMNS * _WIDTH, rows * _HEIGHT), squeeze=False, layout="constrained")
        panels = [axes for row in grid for axes in row]
        for axes, one in zip(panels, tables, strict=False):
            panel(axes, one, about)
        for axes in panels[len(tables) :]:
            axes.axis("off")
        lines = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
        words = [f"{name}: {about['all'][name]['reached']:.0%} of all runs there" for name in COLOURS]
        title = f"median of {about['seeds']} runs,\nband: 10th to 90th percentile\ndashed: {about['enough']:.0%} of the best speed\ndotted: {about['trials']} trials"
        panels[len(tables)].legend([lines[name] for name in COLOURS], words, loc="center", frameon=False, title=title, alignment="left")
        figure.supxlabel("trials")
        figure.supylabel("time of the best config so far, over the best in the table")
        return save(figure, folder, "replay")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """An SVG, a line for each thing that is drawn, without what would differ from one run to the next."""
    folder.mkdir(parents=True, exist_ok=True)
    path, drawn = folder / f"{name}.svg", io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    path.write_text(" ".join(drawn.getvalue().split()).replace("> <", "><").replace("<g id=", "\n<g id=") + "\n")
    return [path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    for file in draw(record.read(options.results / "replay.json"), options.results):
        print(file)


if __name__ == "__main__":
    main()
