"""Draws the recorded speed: ratio by shape, the roofline with every kernel on it, the prototypes' figures beside ours, the host's cost; and the digits.

Run: python -m bench.figures [--results FOLDER]; wants matplotlib (pip install "epigen[bench]"). Equal results give equal bytes.
What has no result is not drawn. seed.json holds the prototypes' figures, with their source.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench import bars, peers, record
from bench.plot import STYLE, pyplot, save
from bench.record import Report, Row
from epigen import gpus
from epigen.dtypes import BY_NAME as DTYPES

COLOURS = {
    peers.OURS: "#0b6e4f", peers.OURS_TANH: "#5fb08f", peers.CUBLASLT: "#d1603d", peers.EAGER: "#8a8d91", peers.ADDMM: "#3d6fb4", peers.COMPILED: "#8a5fa8",
    "prototype": "#c9a227",
}  # fmt: skip
_MARKERS = {"bf16": "o", "fp16": "^"}
OWN = (peers.OURS, f"{peers.OURS}, out=", "the launch alone")
"""Of the contenders of bench.host those that are epigen."""
SEED = Path(__file__).parent / "seed.json"


def _shape(row: Row) -> str:
    return "x".join(map(str, row["shape"]))


def _places(rows: Sequence[Row]) -> dict[str, int]:
    """Each shape's place on an axis: by K within M x N."""
    return {_shape({"shape": s}): i for i, s in enumerate(sorted({tuple(r["shape"]) for r in rows}, key=lambda s: (math.prod(s), s)))}


def ratios(report: Report, folder: Path) -> list[Path]:
    """By program and shape: the time of the product alone over each contender's, of L2-cold launches."""
    panels_of: dict[str, list[Row]] = {}
    for row in sorted(report.rows, key=lambda r: r["group"] != "epilogues"):
        known = row["how"] == "cold" and row["layout"] == "nt" and peers.MM in row["timing"]
        if known and (row["group"] == "epilogues" or row["program"] == "relu + bias"):
            panels_of.setdefault(row["program"] if row["group"] == "epilogues" else f"{row['program']}, {row['group']}", []).append(row)
    if not panels_of:
        return []
    columns = min(3, len(panels_of))
    lines = math.ceil(len(panels_of) / columns)
    with mpl.rc_context(STYLE):
        figure, grid = pyplot.subplots(lines, columns, figsize=(columns * 4.2, lines * 3.0), squeeze=False, layout="constrained")
        panels = [axes for line in grid for axes in line]
        for axes in panels[len(panels_of) :]:
            axes.axis("off")
        seen: dict[str, Any] = {}
        for axes, (title, mine) in zip(panels, panels_of.items(), strict=False):
            places = _places(mine)
            axes.axhline(1, color="black", linewidth=0.6)
            for name, colour in COLOURS.items():
                for dtype, marker in _MARKERS.items():
                    points = [(places[_shape(r)], bars.ratio(r, peers.MM, name)) for r in mine if r["dtype"] == dtype and name in r["timing"]]
                    if points:
                        shift = 0.12 if dtype == "fp16" else -0.12
                        seen[f"{name}, {dtype}"] = axes.scatter(
                            [x + shift for x, _ in points], [y for _, y in points], color=colour, marker=marker, s=16, zorder=3 if name == peers.OURS else 2
                        )
            axes.set_title(title)
            axes.set_xticks(list(places.values()), list(places), rotation=90, fontsize=6)
            axes.grid(axis="y", linewidth=0.3)
        figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=6, frameon=False, fontsize=7)
        figure.supylabel("time of the product alone, over the contender's")
        return save(figure, folder, "ratios")


def roofline(report: Report, folder: Path) -> list[Path]:
    """Every kernel of epigen: TFLOP/s over FLOPs a byte, under the memory's bandwidth and the tensor cores' peak."""
    rows = [r for r in report.rows if peers.OURS in r["timing"]]
    if not rows:
        return []
    gpu = gpus.find(report.environment.get("gpu", "")) or gpus.DEFAULT
    bandwidth, peak = (report.summary.get("copy_gbps") or gpu.achieved_gbps) * 1e9, gpu.peak(DTYPES["fp16"]) * 1e12
    groups = {"epilogues": "#0b6e4f", "skinny": "#d1603d", "odd": "#8a5fa8", "small": "#3d6fb4"}
    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 4.4), layout="constrained")
        intensities = [r["flops"] / r["bytes"] for r in rows]
        low, high = min(intensities) / 2, max(intensities) * 2
        knee = peak / bandwidth
        axes.plot(
            [low, min(knee, high), max(knee, high)], [low * bandwidth / 1e12, min(knee, high) * bandwidth / 1e12, peak / 1e12], color="black", linewidth=0.8
        )
        for group, colour in groups.items():
            mine = [r for r in rows if r["group"] == group]
            if mine:
                x = [r["flops"] / r["bytes"] for r in mine]
                y = [r["flops"] / r["timing"][peers.OURS]["median_us"] / 1e6 for r in mine]
                axes.scatter(x, y, color=colour, s=10, label=group, alpha=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("FLOPs a byte, operands, inputs and outputs counted once")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"{gpu.name}: copy {bandwidth / 1e12:.2f} TB/s, dense peak {peak / 1e12:.0f} TFLOP/s")
        axes.legend(frameon=False)
        return save(figure, folder, "roofline")


def _best(row: Row) -> float | None:
    """The best of the prototypes in a row of the seed: the product's time over it."""
    if "mm_over" in row:
        return max((v for name, v in row["mm_over"].items() if name != peers.CUBLASLT), default=None)
    return row["us"][peers.MM] / row["us"]["prototype"] if "prototype" in row["us"] else None


def seeds(report: Report, folder: Path, seed: Mapping[str, Any]) -> list[Path]:
    """The best prototype of the seed beside epigen's kernels, each against the product alone as timed in its own run."""
    ours = {
        (r["program"], _shape(r), r["dtype"]): bars.ratio(r, peers.MM)
        for r in report.rows
        if r["group"] == "epilogues" and r["layout"] == "nt" and peers.MM in r["timing"] and peers.OURS in r["timing"]
    }
    both = [(row, _best(row), ours.get((row["program"], _shape(row), row["dtype"]))) for row in (*seed["times"], *seed["ratios"])]
    pairs = [(row, theirs, mine) for row, theirs, mine in both if theirs is not None and mine is not None]
    programs = list(dict.fromkeys(row["program"] for row, _, _ in pairs))
    if not programs:
        return []
    with mpl.rc_context(STYLE):
        figure, grid = pyplot.subplots(1, len(programs), figsize=(4.2 * len(programs), 3.4), squeeze=False, sharey=True, layout="constrained")
        for axes, program in zip(grid[0], programs, strict=True):
            mine = sorted((p for p in pairs if p[0]["program"] == program), key=lambda p: (p[0]["dtype"], math.prod(p[0]["shape"])))
            places = range(len(mine))
            axes.axhline(1, color="black", linewidth=0.6)
            axes.bar([i - 0.2 for i in places], [theirs for _, theirs, _ in mine], 0.38, color=COLOURS["prototype"], label="best prototype")
            axes.bar([i + 0.2 for i in places], [value for _, _, value in mine], 0.38, color=COLOURS[peers.OURS], label="epigen")
            axes.set_xticks(list(places), [f"{_shape(row)} {row['dtype']}" for row, _, _ in mine], rotation=90, fontsize=6)
            axes.set_title(program)
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
        figure.supylabel("time of the product alone, over the kernel's")
        return save(figure, folder, "seeds")


def host(report: Report, folder: Path) -> list[Path]:
    """Microseconds of host time a call, of each program by each contender, the quickest first."""
    found = [
        (f"{row['program']}: {contender}", contender, one["median_us"], one["spread_us"])
        for row in report.rows
        for contender, one in sorted(row["timing"].items(), key=lambda of: of[1]["median_us"])
    ]
    if not found:
        return []
    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 0.6 + 0.2 * len(found)), layout="constrained")
        places = list(range(len(found)))[::-1]
        colours = [COLOURS[peers.OURS] if contender in OWN else COLOURS[peers.EAGER] for _, contender, _, _ in found]
        axes.barh(places, [us for _, _, us, _ in found], xerr=[spread / 2 for *_, spread in found], color=colours, height=0.7)
        axes.set_yticks(places, [name for name, *_ in found], fontsize=7)
        axes.set_xlabel("host time of a call, microseconds")
        return save(figure, folder, "host")


def digits(report: Report, folder: Path) -> list[Path]:
    """The loss of every step, by epigen and by eager torch, and below how far they are apart, under the tolerance; a column a dtype."""
    rows, about = report.rows, report.summary
    with mpl.rc_context(STYLE):
        figure, grid = pyplot.subplots(2, len(rows), figsize=(3.6 * len(rows), 4.4), squeeze=False, sharex=True, sharey="row", layout="constrained")
        for above, below, row in zip(*grid, rows, strict=True):
            losses = row["losses"]
            steps = range(1, len(losses["eager"]) + 1)
            above.plot(steps, losses["eager"], color=COLOURS[peers.EAGER], linewidth=2.2, label="eager torch")
            above.plot(steps, losses["epigen"], color=COLOURS[peers.OURS], linewidth=0.7, label="epigen")
            apart = [abs(a - b) for a, b in zip(losses["epigen"], losses["eager"], strict=True)]
            below.plot(steps, apart, color=COLOURS[peers.OURS], linewidth=0.7)
            below.axhline(row["tolerance"], color="black", linewidth=0.6, linestyle=(0, (4, 3)))
            above.set_yscale("log")
            below.set_yscale("log")
            above.set_title(
                f"{row['dtype']}, {about['device']}: {row['right']['epigen']} of {about['held_out']} read rightly, eager torch {row['right']['eager'][0]}"
            )
            below.set_xlabel("step")
        grid[0][0].set_ylabel("loss")
        grid[1][0].set_ylabel("distance (dashed: tolerance)")
        grid[0][0].legend(frameon=False)
        return save(figure, folder, f"digits_{about['device']}")


def draw(results: Path, folder: Path) -> list[Path]:
    """Whatever there are results of."""
    seed = json.loads(SEED.read_text())
    of: dict[str, Sequence[Callable[[Report], list[Path]]]] = {
        "headline": (lambda r: ratios(r, folder), lambda r: roofline(r, folder), lambda r: seeds(r, folder, seed)),
        "host": (lambda r: host(r, folder),),
        **{f"digits_{device}": (lambda r: digits(r, folder),) for device in ("cpu", "cuda")},
    }
    files = []
    for name, figures in of.items():
        path = results / f"{name}.json"
        if path.exists():
            report = record.read(path)
            for figure in figures:
                files += figure(report)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    for file in draw(options.results, options.results):
        print(file)


if __name__ == "__main__":
    main()
