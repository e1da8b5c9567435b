"""Why a kernel takes the time it takes, said from the model, the table of GPUs and the choice's record: nothing is compiled or run.

In go a spec, a shape, a GPU and a `Choice`; out comes an `Explanation`, pure data, and its text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Choice, KernelSpec
from epigen.db.lookup import Recorded
from epigen.gpus import Gpu
from epigen.perf import model
from epigen.perf.model import Estimate
from epigen.perf.traffic import Traffic, traffic
from epigen.shapes import Shape, each, extents

MATH, MEMORY, LATENCY = "math", "memory", "latency"
_LAUNCH_SHARE = 0.5  # with this share of its time in launches, a kernel is bound by them


@dataclass(frozen=True, slots=True)
class Padding:
    """extent ("K", "N" or "M") from value to padded would spare about saved_us. why: what the present extent costs."""

    extent: str
    value: int
    padded: int
    saved_us: float
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What the database knows of this very problem with this config: medians of one run, with a cold L2.

    us: of the fused kernel. mm_us: the vendor's product alone. unfused_us: that and one pointwise pass. Either is None where it was not measured.
    triton: the version it was measured under. date: in UTC.
    """

    us: float
    mm_us: float | None
    unfused_us: float | None
    triton: str
    date: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known about one problem before it runs.

    ridge: FLOPs a byte above which the GPU computes longer than it loads. floor_us: no kernel can be faster. tile_waste: share of
    the computed results that lie outside the matrix. measured: None where nobody has measured this problem.
    """

    program: str
    shape: Shape
    dtype: str
    layout: str
    gpu: Gpu
    gpu_why: str
    traffic: Traffic
    peak_tflops: float
    ridge: float
    floor_us: float
    limit: str
    choice: Choice
    estimate: Estimate
    tile_waste: float
    unfused_us: float
    paddings: tuple[Padding, ...]
    measured: Measured | None = None


def explain(spec: KernelSpec, shape: Shape, gpu: Gpu, choice: Choice, *, gpu_why: str = "as asked") -> Explanation:
    """Everything that can be said about one problem. choice: the config, and where it came from."""
    sig, config = spec.signature, choice.config
    m, n, _ = shape[-3:]
    block = (config["block_m"], config["block_n"])
    work = traffic(spec, shape, config)
    peak = gpu.peak(sig.a, sig.precision)
    math_us, memory_us = work.flops / (peak * 1e6), work.bytes / (gpu.achieved_gbps * 1e3)
    estimate = model.estimate_us(spec, config, shape, gpu)
    tiles = (-(-m // block[0]) * block[0], -(-n // block[1]) * block[1]) if estimate.tiles else (m, n)
    return Explanation(
        program=spec.program,
        shape=shape,
        dtype=sig.called,
        layout=spec.signature.layout,
        gpu=gpu,
        gpu_why=gpu_why,
        traffic=work,
        peak_tflops=peak,
        ridge=peak * 1e3 / gpu.achieved_gbps,
        floor_us=max(math_us, memory_us),
        limit=_limit(math_us, memory_us, estimate),
        choice=choice,
        estimate=estimate,
        tile_waste=1 - m * n / (tiles[0] * tiles[1]) if m and n else 0.0,
        unfused_us=model.unfused_us(spec, shape, gpu),
        paddings=_paddings(spec, choice, shape, gpu, estimate.us),
        measured=_measured(choice),
    )


def _measured(choice: Choice) -> Measured | None:
    """What a borrowed config took is the time of another problem, and none of this one's."""
    if not isinstance(choice, Recorded) or choice.how not in ("exact", "triton"):
        return None
    record = choice.record
    return Measured(record.median_us, record.baseline_us, record.unfused_us, record.triton, record.date)


def _limit(math_us: float, memory_us: float, estimate: Estimate) -> str:
    launches = estimate.launch_us + estimate.finish_us
    work = max(math_us, memory_us)
    # with less work than a launch, or with most of the time spent waiting, neither the math nor the memory is what to mend
    if launches >= _LAUNCH_SHARE * estimate.us or work < 0.25 * (estimate.us - launches):
        return LATENCY
    return MATH if math_us >= memory_us else MEMORY


def _paddings(spec: KernelSpec, choice: Choice, shape: Shape, gpu: Gpu, us: float) -> tuple[Padding, ...]:
    """Extents that are no multiple of what loads want, and what padding each to it would spare, the copy into the padded operand not counted."""
    (m, n, k), schedule = shape[-3:], SCHEDULES[choice.config.schedule]
    layout, each_bytes = spec.signature.layout, {"a": spec.signature.a.bytes, "b": spec.signature.b.bytes}
    rows = {"K" if layout[0] == "n" else "M": "a", "N" if layout[1] == "n" else "K": "b"}
    if layout == "nt":
        rows = {"K": "a and b"}
    paddings = []
    for extent, operand in rows.items() if m and n and k else ():
        value, wanted = {"M": m, "N": n, "K": k}[extent], 16 // min(each_bytes[name] for name in operand.split(" and "))
        if not value or not value % wanted:
            continue
        padded = -(-value // wanted) * wanted
        larger = {"M": m, "N": n, "K": k} | {extent: padded}
        addressed = replace(spec, signature=replace(spec.signature, tma=(*spec.signature.tma, *operand.split(" and "))))
        saved = us - model.estimate_us(addressed, choice.config, each(shape, *larger.values()), gpu).us
        whose = f"{operand}'s rows" if operand != "a and b" else "the rows of a and b"
        loads = f"Triton loads {whose} in vectors of 16 bytes" if schedule.multiplies else f"the vendor's library loads {whose} in vectors of 16 bytes"
        if schedule.descriptors:
            loads = f"TMA reads {whose} as they lie, and not a copy that is made first,"
        paddings.append(Padding(extent, value, padded, max(0.0, saved), f"{loads} where they are a multiple of {wanted} elements"))
    return tuple(paddings)


# -- text


def text(e: Explanation, further: Iterable[tuple[str, str]] = ()) -> str:
    """The explanation, a fact a line, for a person. further: rows beyond those of the kernel, each a name and a line."""
    t, x, g = e.traffic, e.estimate, e.gpu
    side = "above" if t.intensity >= e.ridge else "below"
    rows = [
        ("program", e.program),
        ("problem", f"{extents(e.shape)} {e.dtype}, layout {e.layout}"),
        ("gpu", f"{g.name} ({g.architecture}), {e.gpu_why}"),
        ("", f"{_short(e.peak_tflops)} TFLOP/s {e.dtype} dense, {_short(g.achieved_gbps / 1e3)} TB/s {'measured' if g.copy_gbps else 'expected'}, {g.multiprocessors} multiprocessors"),
        ("work", f"{_scaled(t.flops, 1000, ('', 'K', 'M', 'G', 'T', 'P'))}FLOP, {bytes_text(t.bytes)}: {_short(t.intensity)} FLOPs a byte, {side} the ridge of {_short(e.ridge)}"),
        ("limit", _limit_text(e)),
        ("config", str(e.choice.config)),
        ("", e.choice.why),
        *_tiles(e),
    ]  # fmt: skip
    rows += [("padding", _padding_text(p)) for p in e.paddings] or [("padding", "none would help: the rows of both operands are aligned")]
    less = f"{bytes_text(t.bytes)} instead of {bytes_text(t.unfused_bytes)}, {_count(t.launches, 'launch', 'launches')} instead of {t.unfused_launches}"
    rows.append(("fusing", f"saves {bytes_text(max(0.0, t.bytes_saved))} and {_count(t.launches_saved, 'launch', 'launches')}: {less}"))
    if t.unfused_launches == 1:
        rows[-1] = ("fusing", "there is nothing to fuse: the program is the bare product")
    elif t.bytes_saved < 0 or t.launches_saved < 0:
        rows[-1] = ("fusing", f"is no gain in this config: {less}")
    rows.append(("model", f"{_us(x.us)} fused ({_parts(x)}), {_us(e.unfused_us)} unfused"))
    if e.measured:
        rows += _measured_rows(e.measured, x)
    return "\n".join(f"{name:<10}{line}" for name, line in [*rows, *further]) + "\n"


def _limit_text(e: Explanation) -> str:
    if e.limit == LATENCY:
        return f"latency: launches, first loads and waiting; the work itself takes {_us(e.floor_us)} at full speed"
    return f"{e.limit}: at least {_us(e.floor_us)} at the GPU's full speed"


def _tiles(e: Explanation) -> list[tuple[str, str]]:
    x = e.estimate
    block = f"{e.choice.config['block_m']}x{e.choice.config['block_n']}"
    if not x.tiles:
        return [("tiles", "none: the result is empty" if 0 in e.shape[:-1] else "the vendor's own: its library computes all of the program")]
    waves = math.ceil(x.waves)
    each = f"{_count(x.blocks_per_sm, 'block', 'blocks')} a multiprocessor"
    tail = f"the last wave wastes {x.tail_waste:.1%} of all slots" if x.tail_waste >= 0.0005 else "no waste in the last wave"
    outside = f"{e.tile_waste:.1%} of what the tiles cover lies outside the result" if e.tile_waste >= 0.0005 else "the tiles cover the result exactly"
    what = "" if SCHEDULES[e.choice.config.schedule].multiplies else " of the epilogue"
    return [
        ("tiles", f"{_count(x.tiles, 'tile', 'tiles')}{what} of {block}, {each}: {x.waves:.2f} waves, {_count(waves, 'wave', 'waves')} in time; {tail}"),
        ("", outside),
    ]


def _padding_text(p: Padding) -> str:
    gain = f"saves about {_us(p.saved_us)}" if p.saved_us >= 0.05 else "saves next to nothing here"
    return f"{p.extent} from {p.value} to {p.padded} {gain}: {p.why}"


_UNTIMED = "the vendor's product could not be timed beside it"


def _measured_rows(measured: Measured, x: Estimate) -> list[tuple[str, str]]:
    unfused = f"; with one pointwise pass {_us(measured.unfused_us)}" if measured.unfused_us else ""
    ratio = f"fused takes {measured.us / measured.mm_us:.2f} of it" if measured.mm_us else ""
    return [
        ("measured", f"{_us(measured.us)} fused, of which the model says {x.us / measured.us:.2f}; Triton {measured.triton}, {measured.date[:10]}"),
        ("", f"{_us(measured.mm_us)} for the vendor's product alone: {ratio}{unfused}" if measured.mm_us else _UNTIMED),
    ]


def _parts(x: Estimate) -> str:
    parts = (("launch", x.launch_us), ("product", x.product_us), ("main loop", x.mainloop_us), ("epilogue", x.epilogue_us), ("finishing", x.finish_us))
    said = [f"{name} {_us(us)}" for name, us in parts if us >= 0.05]
    if x.memory_us > x.mainloop_us + x.epilogue_us:
        said.append(f"bound by memory traffic of {_us(x.memory_us)}")
    return ", ".join(said)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _us(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 10_000 else f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def bytes_text(count: float) -> str:
    """Three digits and a unit: 33.6 MB."""
    return f"{_scaled(count, 1000, ('', 'K', 'M', 'G', 'T'))}B"


def _scaled(value: float, base: int, prefixes: tuple[str, ...]) -> str:
    power = 0
    while value >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    return f"{_short(value)} {prefixes[power]}"


def _short(value: float) -> str:
    """Three digits, and no more after the point than they need."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def record(e: Explanation) -> dict[str, object]:
    """The explanation as plain data for JSON; every figure in the unit that its name says."""
    t, x, config = e.traffic, e.estimate, e.choice.config
    return {
        "program": e.program, "shape": list(e.shape), "dtype": e.dtype, "layout": e.layout,
        "gpu": {
            "name": e.gpu.name, "architecture": e.gpu.architecture, "why": e.gpu_why, "multiprocessors": e.gpu.multiprocessors,
            "peak_tflops": e.peak_tflops, "bandwidth_gbps": e.gpu.achieved_gbps, "ridge_flops_per_byte": e.ridge,
        },
        "flops": t.flops, "fused_bytes": t.bytes, "unfused_bytes": t.unfused_bytes, "bytes_saved": t.bytes_saved,
        "launches": t.launches, "unfused_launches": t.unfused_launches, "launches_saved": t.launches_saved,
        "intensity_flops_per_byte": t.intensity, "limit": e.limit, "floor_us": e.floor_us,
        "config": {"schedule": config.schedule, **dict(config.values)}, "why": e.choice.why,
        "tiles": x.tiles, "waves": x.waves, "blocks_per_sm": x.blocks_per_sm, "tail_waste": x.tail_waste, "tile_waste": e.tile_waste,
        "padding": [{"extent": p.extent, "from": p.value, "to": p.padded, "saved_us": p.saved_us, "why": p.why} for p in e.paddings],
        "model": {
            "us": x.us, "launch_us": x.launch_us, "product_us": x.product_us, "mainloop_us": x.mainloop_us, "epilogue_us": x.epilogue_us,
            "finish_us": x.finish_us, "memory_us": x.memory_us, "unfused_us": e.unfused_us,
        },
        "measured": _measured_record(e.measured, x) if e.measured else None,
    }  # fmt: skip


def _measured_record(measured: Measured, x: Estimate) -> dict[str, object]:
    return {
        "us": measured.us, "mm_us": measured.mm_us, "unfused_us": measured.unfused_us, "fused_over_mm": measured.mm_us and measured.us / measured.mm_us,
        "model_over_measured": x.us / measured.us, "triton": measured.triton, "date": measured.date,
    }  # fmt: skip
