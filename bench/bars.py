"""The bars that the headline is held to, as data, and what the measured rows say of them. Pure functions over results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import peers
from bench.programs import BY_NAME

BANDWIDTH = "bandwidth of a copy"
"""A baseline that is no contender: the time that the bytes of a call take at the bandwidth of a device copy."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The least ratio of a baseline's time to epigen's, over the rows of some programs.

    mean: in the geometric mean, each: on every shape; None: no target. group: of cases. k: from, and below which, K. extent: least of M and N.
    shapes: these alone. weights_over: bytes of b, which must be more. ours: epigen's contender.
    """

    case: str
    programs: tuple[str, ...]
    baseline: str
    mean: float | None = None
    each: float | None = None
    group: str = "epilogues"
    k: tuple[int, float] = (0, math.inf)
    extent: int = 0
    shapes: tuple[tuple[int, int, int], ...] = ()
    weights_over: int = 0
    ours: str = peers.OURS

    def of(self, row: Mapping[str, Any]) -> bool:
        m, n, k = row["shape"]
        return bool(
            row["group"] == self.group and row["program"] in self.programs and self.k[0] <= k < self.k[1] and min(m, n) >= self.extent
            and (not self.shapes or (m, n, k) in self.shapes) and 2 * n * k > self.weights_over
        )  # fmt: skip

    @property
    def words(self) -> str:
        """The target."""
        targets = ((self.mean, "in the mean"), (self.each, "each"))
        return ", ".join(f"{least:.2f} {words}" for least, words in targets if least is not None)


_BY_K = ((4096, math.inf, "K >= 4096"), (2048, 4096, "K = 2048"), (1024, 2048, "K = 1024"), (512, 1024, "K = 512"))


def _free(program: str, least: tuple[float, ...]) -> list[Bar]:
    """Against the product alone: above 1 the epilogue is more than free."""
    return [
        Bar(f"{program}, M and N >= 4096, {words}", (program,), peers.MM, each=each, k=(low, high), extent=4096)
        for (low, high, words), each in zip(_BY_K, least, strict=True)
    ]


def _cublaslt(program: str, mean: float, each: float) -> list[Bar]:
    """Where cuBLASLt approximates gelu, epigen is held to it with the exact function and with the same approximation."""
    found = [Bar(program, (program,), peers.CUBLASLT, mean, each)]
    if BY_NAME[program].approximated:
        found.append(Bar(f"{program} (the same approximation)", (program,), peers.CUBLASLT, mean, each, ours=peers.OURS_TANH))
    return found


_ALL = tuple(BY_NAME)
_RELU = ("relu + bias",)

BARS = (
    *_free("relu + bias", (1.02, 1.01, 1.01, 1.02)),
    *_free("relu + bias + mask", (1.00, 0.98, 0.97, 0.93)),
    *_free("drelu + bgrad", (1.00, 0.97, 0.95, 0.92)),
    *_cublaslt("relu + bias + mask", 1.05, 1.00),
    *_cublaslt("drelu + bgrad", 2.0, 1.10),
    *_cublaslt("gelu + bias", 1.02, 1.00),
    *_cublaslt("gelu + bias + aux", 1.10, 1.00),
    *_cublaslt("dgelu + bgrad", 1.5, 1.00),
    Bar("every epilogue", _ALL, peers.COMPILED, 1.10, 1.00, group="compiled"),
    Bar("every epilogue", _ALL, peers.EAGER, 1.30),
    # 60 %, 60 % and 50 % less time
    Bar("relu + bias, 64x128x256 and 128x256x256, CUDA graph", _RELU, peers.EAGER, each=2.5, group="small", shapes=((64, 128, 256), (128, 256, 256))),
    Bar("relu + bias, 1024x1024x1024, CUDA graph", _RELU, peers.EAGER, each=2.0, group="small", shapes=((1024, 1024, 1024),)),
    Bar("relu + bias, these three, CUDA graph", _RELU, peers.ADDMM, each=1.00, group="small"),
    Bar("relu + bias, M = 1, 4, 16, 64", _RELU, peers.EAGER, each=1.3, group="skinny"),
    Bar("relu + bias, M = 1, 4, 16, 64", _RELU, peers.MM, each=1.00, group="skinny"),
    Bar("relu + bias, M = 1, 4, 16, 64, weights over 64 MB", _RELU, BANDWIDTH, each=0.75, group="skinny", weights_over=64 << 20),
    Bar("relu + bias, mask, drelu + bgrad, odd extents", ("relu + bias", "relu + bias + mask", "drelu + bgrad"), peers.EAGER, each=1.15, group="odd"),
)  # fmt: skip


def ratio(row: Mapping[str, Any], baseline: str, ours: str = peers.OURS, copy_gbps: float | None = None) -> float | None:
    """The baseline's time over epigen's in one row; None where one of them is missing."""
    timing = row.get("timing", {})
    if ours not in timing:
        return None
    mine = timing[ours]["median_us"]
    if baseline == BANDWIDTH:
        return row["bytes"] / (copy_gbps * 1e3) / mine if copy_gbps else None
    return timing[baseline]["median_us"] / mine if baseline in timing else None


def geometric(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def verdict(bar: Bar, rows: Sequence[Mapping[str, Any]], copy_gbps: float | None = None) -> dict[str, Any]:
    """What the rows say of a bar.

    met: None where nothing of it was measured. missed_by: how much more is needed, as a ratio's part. broken: rows in which epigen itself failed
    or was wrong, with which no bar is met. without: rows that lack the baseline.
    """
    found = []
    covered = [row for row in rows if bar.of(row)]
    for row in covered:
        value = ratio(row, bar.baseline, bar.ours, copy_gbps)
        if value is not None:
            found.append({"shape": list(row["shape"]), "program": row["program"], "dtype": row["dtype"], "layout": row["layout"], "ratio": round(value, 4)})
    broken = sum(bar.ours not in row.get("timing", {}) for row in covered)
    body: dict[str, Any] = {
        "case": bar.case, "baseline": bar.baseline, "ours": bar.ours, "target": bar.words,
        "rows": found, "broken": broken, "without": len(covered) - len(found) - broken, "met": False if broken else None,
    }  # fmt: skip
    if not found:
        return body
    found.sort(key=lambda r: r["ratio"])
    mean, worst = round(geometric([r["ratio"] for r in found]), 4), found[0]["ratio"]
    short = max((least / value - 1 for least, value in ((bar.mean, mean), (bar.each, worst)) if least is not None), default=0.0)
    return body | {"mean": mean, "worst": worst, "met": short <= 0 and not broken, "missed_by": round(max(0.0, short), 4)}


def verdicts(rows: Sequence[Mapping[str, Any]], copy_gbps: float | None = None) -> list[dict[str, Any]]:
    return [verdict(bar, rows, copy_gbps) for bar in BARS]


def outcome(found: Mapping[str, Any]) -> str:
    """Whether a bar is met, in words."""
    if found["met"] is None:
        return "not measured"
    broken = f"{found['broken']} without an answer of epigen's" if found["broken"] else ""
    by = found.get("missed_by")
    short = (f"by {by:.1%}" if by >= 0.0005 else f"by {by:.2%}") if by else ""
    return "met" if found["met"] else f"missed {' and '.join(filter(None, (short, broken)))}"


def line(found: Mapping[str, Any]) -> str:
    """One verdict as a line."""
    head = f"{found['case']} against {found['baseline']}, target {found['target']}: {outcome(found)}"
    if not found["rows"]:
        return head
    worst = found["rows"][0]
    place = f"{'x'.join(map(str, worst['shape']))} {worst['dtype']} {worst['layout']}"
    without = f", {found['without']} more without the baseline" if found["without"] else ""
    return f"{head}: mean {found['mean']:.3f}, worst {found['worst']:.3f} ({place}), {len(found['rows'])} rows{without}"
