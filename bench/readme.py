"""The measured tables of the README and of bench/README.md, made from the stored reports.

Run: python -m bench.readme    rewrites what stands between the markers in both
Each block is a sentence that says what is compared, the table, and below it how it was measured.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import batched, block_scales, cross_entropy, eight_bit, experts, gated, grouped, invariant, peers, power, quantized_outputs, sparse, tiles, weights
from bench.bars import geometric, outcome, ratio, verdicts
from bench.counters import calls as calls_of
from bench.counters import us
from bench.headline import key
from bench.networks import PRODUCTS
from bench.quantized_outputs import COMPILED, PLAIN, PRODUCT
from bench.readme_models import models, reach
from bench.readme_tuning import tuned_in, tuning
from bench.record import Report, Row
from bench.tables import commits, load, paragraphs, source, table, there
from bench.training import verdicts as claims_of
from epigen.db.database import Database
from epigen.db.records import Record
from epigen.shapes import extents

README = Path(__file__).parent.parent / "README.md"
DOCUMENTS = (README, Path(__file__).with_name("README.md"))
TRAINED = ("epigen", "eager", "torch.compile", "nvmath", PRODUCTS)
COUNTED = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
)  # fmt: skip
_H100_THEN = 92
"""Records of an H100 when its headline was measured."""
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def gem() -> str:
    """relu(mm + bias) against three operations of torch."""
    report = load("gem_fp16")
    rows = []
    for row in report.rows:
        for kind, what in (("graph", "CUDA graph"), ("cold", "L2-cold launch")):
            eager, addmm, ours = (row[kind][name]["median_us"] for name in ("three operations", "_addmm_activation", "epigen"))
            rows.append([f"{row['m']}x{row['k']}x{row['n']}, {what}", f"{eager:.2f}", f"{addmm:.2f}", f"{ours:.2f}", f"{1 - ours / eager:.0%}"])
    columns = ["M x K x N", "torch, three operations", "`torch._addmm_activation`", "epigen", "less time than three operations"]
    return paragraphs("Microseconds of a call of `relu(mm + bias)` in fp16; lower is better:", table(columns, rows), source(report, "gem"))


_HOST = {
    "the launch alone": "epigen's launch, without the checks of a call", "Triton's launch": "Triton's own launch",
    "eager operations": "the three operations of torch", "nvmath, execute": "nvmath's `execute`",
}  # fmt: skip


def host() -> str:
    """What a call costs the Python thread."""
    report = load("host")
    about = report.summary
    (small,) = (row for row in report.rows if row["program"] == "relu + bias")
    costs = {name: found["median_us"] for name, found in small["timing"].items()}
    by_descriptors = [row["timing"]["epigen, out="]["median_us"] for row in report.rows if row["program"] == "relu + bias, by TMA"]
    trained = [row for row in report.rows if "claimed_us" in row]
    rows = [
        ["a call with `out=`", f"{costs['epigen, out=']:.1f} us", f"{about['claimed_out_us']:.0f} us"],
        ["a call whose result is allocated", f"{costs['epigen']:.1f} us", f"{about['claimed_new_us']:.0f} us"],
        *(["a call with `out=` of a kernel with TMA descriptors", f"{us:.1f} us", f"{about['claimed_out_us']:.0f} us"] for us in by_descriptors),
        *([what, f"{costs[name]:.1f} us", ""] for name, what in _HOST.items() if name in costs),
        *([["the driver's own launch, from C", f"{about['driver_us']:.1f} us", ""]] if "driver_us" in about else []),
        *(
            [f"{row['program']}: {contender}", f"{one['median_us']:.1f} us", f"{row['claimed_us']:.0f} us" if contender == "epigen" else ""]
            for row in trained
            for contender, one in row["timing"].items()
        ),
        ["a process's first call, after torch has started", f"{about['first']['first_s']:.2f} s", f"{about['first']['claimed_s']:.1f} s"],
        *(
            [f"the same of a program that was never compiled, {shape}", f"{first['first_s']:.2f} s", f"{first['claimed_s']:.1f} s"]
            for shape, first in about.get("unknown", {}).items()
        ),
    ]
    return paragraphs(
        "What a warmed call of a small `relu(mm + bias)` costs the Python thread; lower is better:",
        table(["", "measured", "target"], rows),
        f"The targets of a call are of a host on which Triton's own launch takes 13 us and torch's three operations 20. {source(report, 'host')}",
    )


def headline() -> str:
    """The bars, and what was measured of them. torch.compile has a report of its own."""
    reports = [load(name) for name in ("headline", "compiled") if there(name)]
    others = [load("headline_h100")] if there("headline_h100") else []
    measured = {"H200": _bars(reports)} | ({"H100": _bars(others)} if others else {})
    columns = [f"{gpu}: {what}" for gpu in measured for what in ("mean", "worst", "result")]
    rows = []
    for which, bar in measured["H200"].items():
        found = (bars.get(which) for bars in measured.values())
        cells = ([f"{b['mean']:.2f}", f"{b['worst']:.2f}", outcome(b)] if b else [""] * 3 for b in found)
        rows.append([*which, bar["target"], *itertools.chain(*cells)])
    met, *met_too = (f"{sum(bar['met'] for bar in bars.values())} of {len(bars)}" for bars in measured.values())
    counts = Counter(row["group"] for report in reports for row in report.rows if row["timing"])
    words = ", ".join(f"{count} {group}" for group, count in counts.items())
    out = sum(len(report.summary["left_out"]) for report in reports)
    left = f"; {out} more left out for time" if out else ""
    older = sum("commit" in row for report in reports for row in report.rows)
    before = f" {older} cases were timed at an earlier commit, with the configs that they have now." if older else ""
    return paragraphs(
        "A peer's time over epigen's, in the geometric mean over the shapes and at the worst one; higher is better:",
        table(["case", "against", "target", *columns], rows),
        f"{met} targets are met{''.join(f', and {also} on the H100' for also in met_too)}. {sum(counts.values())} cases were timed, in fp16 and bf16 ({words}){left}.{before}",
        "Contenders are interleaved. The L2 cache is flushed before each launch, unless a CUDA graph is named. A wrong answer is not timed. "
        "`mm` is the product alone: 1.00 against it means that the epilogue is free. cuBLASLt (nvmath-python, autotuned) approximates gelu by tanh; "
        f'with "the same approximation" epigen does so too. torch.compile runs in the mode `{peers.COMPILE_MODE}`.',
        source(reports[0], "headline compiled"),
        *(source(other, "headline") for other in others),
        "![time of the product alone over that of each contender, by shape](results/ratios.svg)",
    )


def _bars(reports: Iterable[Report]) -> dict[tuple[str, str], dict[str, Any]]:
    """Those that something was measured of, by case and baseline."""
    found = (bar for report in reports for bar in verdicts(report.rows, report.summary.get("copy_gbps")))
    return {(bar["case"], bar["baseline"]): bar for bar in found if bar["rows"]}


_SUMMARY = (
    ("every epilogue", "eager"), ("every epilogue", "torch.compile"), ("drelu + bgrad", "cuBLASLt"), ("gelu + bias + aux", "cuBLASLt"),
    ("relu + bias, 64x128x256 and 128x256x256, CUDA graph", "eager"),
)  # fmt: skip


def summary() -> str:
    """Five bars that say what it is good for."""
    reports = [load(name) for name in ("headline", "compiled")]
    bars = _bars(reports)
    rows = ([case, baseline, f"{bars[case, baseline]['mean']:.2f}", f"{bars[case, baseline]['worst']:.2f}"] for case, baseline in _SUMMARY)
    return paragraphs(
        f"How many times as fast, tuned, in the geometric mean and at the worst shape; higher is better ({source(reports[0])}):",
        table(["case", "against", "mean", "worst"], rows),
        "![time of the product alone over that of each contender, by shape: above 1 the epilogue costs less than nothing](bench/results/ratios.svg)",
    )


def checked() -> str:
    """What ran on the GPU, under the oldest Triton and the newest."""
    tests, memory = [load("gpu_tests"), load("gpu_tests_newest")], load("memcheck")
    (passed,) = (row["count"] for row in memory.rows if row["outcome"] == "passed")
    rows = [[f"tests, Triton {one.environment['triton']}", *_outcome(one), one.environment["gpu"], one.environment["commit"]] for one in tests]
    errors = memory.summary["memcheck_errors"]
    rows.append(["compute-sanitizer's memcheck, of a part of them", f"{passed:,}", str(errors), memory.environment["gpu"], memory.environment["commit"]])
    return paragraphs(
        "Answers on the GPU that agree with a float64 oracle, within a bound derived from dtype and K or bit for bit:",
        table(["", "right", "wrong", "GPU", "commit"], rows),
        source(tests[0], "differential memcheck"),
    )


def _outcome(tests: Report) -> tuple[str, str]:
    total = tests.summary["total"]
    wrong = sum(count for outcome, count in total.items() if outcome not in ("passed", "skipped"))
    return f"{total['passed']:,}", str(wrong)


def shipped() -> str:
    """The shipped database, by program: how its winners compare with the vendor's product."""
    database = Database(Path("nothing"))
    by_program: dict[str, list[Record]] = {}
    for _, one in database.records():
        by_program.setdefault(one.program, []).append(one)
    rows = []
    for program, found in sorted(by_program.items()):
        cells = []
        for ratios in ([r.baseline_us / r.median_us for r in found], [r.unfused_us / r.median_us for r in found]):
            cells += [f"{statistics.geometric_mean(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        rows.append([f"`{program}`", str(len(found)), *cells])
    columns = ["program", "problems", "mm: mean", "worst and best", "mm and one pass: mean", "worst and best"]
    records = [r for some in by_program.values() for r in some]
    gpus = ", ".join(f"{count} on {gpu}" for gpu, count in Counter(r.gpu for r in records).most_common())
    versions = ", ".join(sorted({f"torch {r.torch}, Triton {r.triton}" for r in records}))
    return paragraphs(
        "The time of the vendor's product alone, and of that and one pointwise pass, over the fused kernel's, in the geometric mean; higher is better:",
        table(columns, rows),
        f"Problems: {gpus}. Measured by `epigen tune` with {versions}, the last on {max(r.date for r in records)[:10]}.",
    )


def training() -> str:
    """A training step beside its peers', what it keeps, and what was learnt by it."""
    report, weighed, learnt = load("training"), load("training_memory"), load("digits_cuda")
    about, rows = report.summary, []
    for row in report.rows:
        if row.get("timing"):
            times = [f"{row['timing'][name]['median_us'] / 1e3:.2f} ms" if name in row["timing"] else "-" for name in TRAINED]
            rows.append([row["case"], *times])
    names = ("epigen", "epigen, recompute", "eager")
    kept = ([row["case"], *(_megabytes(row, name) for name in names)] for row in weighed.rows)
    claims = {(c["case"], c["claim"]): c for c in claims_of([*report.rows, *weighed.rows]) if c["met"] is not None}.values()
    missed = "; ".join(f"{c['case']}, {c['claim']}: {c['ratio']:.3f}" for c in claims if not c["met"])
    read = ", ".join(f"{row['right']['epigen']} in {row['dtype']} (eager torch {row['right']['eager'][0]})" for row in learnt.rows)
    return paragraphs(
        f"Time of a step, forward and backward, of an MLP of {about['layers']} layers in {about['dtype']}; lower is better:",
        table(["", *TRAINED], rows),
        "Its memory at the peak:",
        table(["", "epigen", 'epigen with `save="recompute"`', "eager"], kept),
        f"{sum(c['met'] for c in claims)} of {len(claims)} targets are met{'. Missed: ' + missed if missed else ''}. {source(report, 'training')}",
        f"Of {learnt.summary['held_out']} of scikit-learn's digits that it was not shown, an MLP learns to read {read}. "
        "The losses of all steps agree within rounding (`python -m bench digits`).",
    )


def _megabytes(row: Row, name: str) -> str:
    return f"{row['memory'][name]['peak_bytes'] / 1e6:.0f} MB" if name in row["memory"] else ""


def counters() -> str:
    """Where the time of an epilogue goes, beside the product alone and cuBLASLt's fused product."""
    report = load("counters")
    rows, calls = [], calls_of(report.rows)
    for shape, programs in itertools.groupby(calls, lambda call: call[0]):
        measured = [(program, calls[shape, program]) for _, program in programs]
        ours = [
            (program + how, call[name], call.get(peers.CUBLASLT, []))
            for program, call in measured
            for name, how in ((peers.OURS, ""), (peers.OURS_TANH, ", by tanh"))
            if name in call
        ]
        for name, kernels, vendor in ((peers.MM, measured[0][1][peers.MM], []), *ours):
            metrics = kernels[0]["metrics"]
            busy = [f"{metrics[m]:.0f}%" for m in COUNTED]
            issued = metrics["smsp__issue_active.avg.per_cycle_active"]
            rows.append([f"{shape}, {name}", _counted_us(kernels), _counted_us(vendor), *busy, f"{issued:.2f}"])
    return paragraphs(
        f"Times of all kernels of a call, and what the hardware's counters say of the main one ({report.summary['dtype']}, layout nt, cold L2):",
        table(["", "us", "cuBLASLt, us", "tensor cores busy", "L2 busy", "DRAM busy", "instructions a cycle and scheduler"], rows),
        source(report, "counters"),
    )


def _counted_us(kernels: Sequence[Row]) -> str:
    return f"{us(kernels):.1f}" if kernels else ""


def power_limited() -> str:
    """What the power limit makes of large products."""
    report = load("power")
    columns = (peers.CUBLASLT, peers.OURS, power.PINGPONG, power.COOPERATIVE)
    rows = []
    for row in report.rows:
        mm, ratios = row["timing"][peers.MM], power.ratios(row)
        cells = [f"{ratios[name][0]:.2f}, {ratios[name][1]:.2f} ({row['timing'][name]['alone_mhz']:.0f})" if name in ratios else "" for name in columns]
        rows.append([f"{extents(row['shape'])}, {row['program']}", f"{mm['median_us']:.0f}, {mm['alone_us']:.0f} ({mm['alone_mhz']:.0f})", *cells])
    return paragraphs(
        "The product's time over the kernel's, interleaved and then alone in a loop, with the clock in MHz that it has there; higher is better. "
        "`mm` in microseconds (bf16, layout nt):",
        table(["", "mm, us", *columns], rows),
        "When power-limited, interleaved kernels share one clock. Run alone, each gets the clock that its own power draw allows. "
        f"Interleaved launches have a cold L2. {source(report, 'power')}",
    )


def several() -> str:
    """Products of a batch, each with its epilogue."""
    report = load("batched")
    rows = []
    for row in report.rows:
        times = [f"{row['timing'][name]['median_us']:.1f}" for name in (batched.BMM, batched.EAGER, batched.OURS)]
        rows.append([f"{extents(row['shape'])}, `{row['program']}`", *times, f"{batched.of_bmm(row):.2f}"])
    scaled = [batched.of_bmm(row) for row in report.rows if row["program"] == batched.SCALED]
    met = sum(speed >= report.summary["claimed"] for speed in scaled)
    return paragraphs(
        "Microseconds of a batch of products in bf16, each with its epilogue, in one launch of a kernel that nobody tuned; lower is better, but for the last "
        "column, how many times as fast as the bare products it is:",
        table(["products x M x N x K", "`torch.bmm` alone", "with the epilogue", "epigen", "of `torch.bmm`"], rows),
        f"{met} of {len(scaled)} with `{batched.SCALED}` reach the target of {report.summary['claimed']:.2f}. gelu's arithmetic takes longer than a short product. "
        + source(report, "batched"),
    )


def of_bytes() -> str:
    """Products of fp8 and int8, GPUs side by side."""
    reports = {gpu: load(name) for gpu in ("H100", "H200") if there(name := f"eight_bit_{gpu.lower()}")}
    columns = [f"{gpu}: {what}" for gpu in reports for what in ("cuBLAS", "bf16", "epigen", "speed")]
    cells: dict[str, dict[str, str]] = {}
    met: dict[str, list[bool]] = {gpu: [] for gpu in reports}
    for gpu, report in reports.items():
        for row in report.rows:
            dtype = {"fast_accum": "fp8, fast accumulation", None: "fp8, promoted"}[row["precision"]] if row["dtype"] != "int8" else "int8"
            behind = next((f", `{activation}`" for activation, text in eight_bit.ACTIVATED.items() if text == row["program"]), "")
            speed, claimed = eight_bit.of_baseline(row), row["claimed"]
            here = cells.setdefault(f"{extents(row['shape'])}, {dtype}{behind}", {"target": f"{claimed:.2f}" if claimed else ""})
            for what, peer in (("cuBLAS", eight_bit.CUBLAS), ("bf16", eight_bit.BF16), ("epigen", eight_bit.OURS)):
                here[f"{gpu}: {what}"] = f"{row['timing'][peer]['median_us']:.1f}" if peer in row["timing"] else ""
            here[f"{gpu}: speed"] = f"{speed:.2f}"
            if claimed:
                met[gpu].append(speed >= claimed)
    return paragraphs(
        "Microseconds of a product of 8-bit operands with a scale a row, a scale a column and a bias, by kernels that nobody tuned, beside cuBLAS's call and `torch.mm` of "
        "bf16; lower is better, but for the speed, how many times as fast as cuBLAS's call it is, with one pass behind it where there is an activation, and of int8 as "
        "bf16's product:",
        table(["M x N x K", *columns, "target"], [[name, *(found.get(column, "") for column in (*columns, "target"))] for name, found in cells.items()]),
        *(f"{gpu}: {sum(met[gpu])} of {len(met[gpu])} targets are met. {source(report, 'eight_bit')}" for gpu, report in reports.items()),
    )


def _by_gpu(name: str) -> dict[tuple[str, bool], Report]:
    """What `bench.NAME` has reported: by GPU, and whether tuned."""
    names = {(gpu, tuned): f"{name}_{'tuned_' * tuned}{gpu.lower()}" for gpu in ("H100", "H200") for tuned in (False, True)}
    return {which: load(name) for which, name in names.items() if there(name)}


def tile_rows() -> str:
    """Epilogues with further tensors of the result's extents: GPUs side by side, untuned and, where that was run, tuned."""
    reports = _by_gpu("tiles")
    if not reports:
        return "Not measured yet: `python -m bench tiles`."
    columns = [column for gpu, tuned in reports for column in ([f"{gpu}: tuned"] if tuned else [f"{gpu}: eager", f"{gpu}: epigen"])]
    cells: dict[str, dict[str, str]] = {}
    for (gpu, tuned), report in reports.items():
        for row in report.rows:
            here = cells.setdefault(f"{extents(row['shape'])}, {row['program']}", {})
            share = tiles.of_target(row)
            here[f"{gpu}: tuned" if tuned else f"{gpu}: epigen"] = f"{tiles.of_mm(row):.2f} ({share:.2f})"
            here.setdefault(f"{gpu}: eager", f"{tiles.of_mm(row, tiles.EAGER):.2f}")
    return paragraphs(
        "How many times as fast as `torch.mm` alone a product is with an epilogue that reads or writes further [M, N] tensors, in bf16, by what a call finds in the "
        f"database or borrows, and tuned; higher is better. In brackets, how near that comes to the target: {tiles.TARGET}:",
        table(["M x N x K", *columns], [[name, *(found.get(column, "") for column in columns)] for name, found in cells.items()]),
        *(f"{gpu}{', tuned' if tuned else ''}: {about['met']} of {about['of']} targets are met, {about['worst']:.2f} at worst, {commits(report)}. {source(report, 'tiles')}"
          for (gpu, tuned), report in reports.items() for about in [report.summary]),
    )  # fmt: skip


def gated_rows() -> str:
    """Two products of one operand in one kernel, and the MLPs that have them: GPUs side by side."""
    reports = _by_gpu("gated")
    if not reports:
        return "Not measured yet: `python -m bench gated`."
    units: dict[str, dict[str, str]] = {}
    mlps = []
    for (gpu, tuned), report in reports.items():
        for row in report.rows:
            if row["program"] in (gated.FORWARD, gated.STEP):
                claimed = "" if row.get("stacked") else f"{gated.CLAIMED[tuple(row['shape']), row['program']]:.2f}"
                contenders = (gated.APART, gated.RECOMPUTED, gated.BACKEND, gated.COMPILED)
                others = [f"{gated.of_eager(row, name):.2f}" if name in row["timing"] else "" for name in contenders]
                what = f"{extents(row['shape'])}, {'of a stacked weight, ' * bool(row.get('stacked'))}{row['program']}"
                mlps.append([what, gpu, f"{gated.of_eager(row):.2f}", *others, claimed])
                continue
            here = units.setdefault(extents(row["shape"]), {})
            here[f"{gpu}: tuned" if tuned else f"{gpu}: epigen"] = f"{gated.of_mm(row):.2f}"
            here.setdefault(f"{gpu}: eager", f"{gated.of_mm(row, gated.EAGER):.2f}")
            here.setdefault(f"{gpu}: two calls", f"{gated.of_mm(row, gated.APART):.2f}")
    columns = [
        column
        for gpu in ("H100", "H200")
        for column in (f"{gpu}: {name}" for name in ("eager", "two calls", "epigen", "tuned"))
        if any(column in found for found in units.values())
    ]
    return paragraphs(
        f"How many times as fast as `torch.mm` of both matrices at once a gated unit is, `{gated.GATED}`, in bf16; higher is better. `two calls` are epigen's as well, the second "
        f"one with the other product as an input. The target is {gated.TARGET}:",
        table(["M x N x K", *columns], [[name, *(found.get(column, "") for column in columns)] for name, found in units.items()]),
        "How many times as fast as eager torch the MLP of a Llama is, by `epigen.linear` or by torch.compile, untuned; rows, width, and what is in between:",
        table(["MLP", "GPU", "epigen", "two calls", '`save="recompute"`', "epigen's backend", "torch.compile", "target"], mlps),
        *(f"{gpu}{', tuned' if tuned else ''}: {about['met']} of {about['of']} targets are met, {about['worst']:.2f} at worst. {source(report, 'gated')}"
          for (gpu, tuned), report in reports.items() for about in [report.summary]),
    )  # fmt: skip


def weight_rows() -> str:
    """Weights of few bits: GPUs side by side."""
    reports = _by_gpu("weights")
    if not reports:
        return "Not measured yet: `python -m bench weights`."
    cells = []
    for (gpu, tuned), report in reports.items():
        for row in report.rows:
            kinds = [f"{weights.of_mm(row, kind):.2f} ({weights.target(kind, row['shape'][0]):.2f})" for kind in weights.TARGETS]
            others = [f"{weights.of_mm(row, name):.2f}" if name in row["timing"] else "" for name in (weights.ZEROS, weights.TINY, weights.COMPILED)]
            bandwidth = [f"{weights.of_copy(row, kind):.2f}" for kind in weights.TARGETS]
            cells.append([extents(row["shape"]), f"{gpu}{', tuned' * tuned}", *kinds, *others, *bandwidth])
    return paragraphs(
        "How many times as fast as the product with the weight in bf16 one with a weight of 8 or 4 bits is, with its target in brackets: int8 with a scale a column, and int4 with a scale "
        f"for each {weights.GROUP} of k, with and without zero points; higher is better. Then the same of torch's own kernel for 4 bits, and of torch.compile of "
        "`F.linear(x, weight.to(bf16)) * scale`; and at what share of a copy's bandwidth epigen's kernels read the weight:",
        table(["M x N x K", "GPU", *weights.TARGETS, "zero points", "torch's int4", "torch.compile, int8", *(f"{kind}: of a copy" for kind in weights.TARGETS)], cells),
        *(f"{gpu}{', tuned' * tuned}: {about['met']} of {about['of']} targets are met, {about['worst']:.2f} of one at worst. {source(report, 'weights')}"
          for (gpu, tuned), report in reports.items() for about in [report.summary]),
    )  # fmt: skip


def sparse_rows() -> str:
    """2:4 sparse weights: GPUs side by side."""
    reports = _by_gpu("sparse")
    if not reports:
        return "Not measured yet: `python -m bench sparse`."
    peers_of = (sparse.DENSE, sparse.COMPILED, sparse.MM)
    cells = []
    for (gpu, tuned), report in reports.items():
        for row in report.rows:
            ratios = [f"{sparse.of(row, peer):.2f}" for peer in peers_of]
            products = [f"{sparse.of(row, sparse.MM, name):.2f}" if name in row["timing"] else "" for name in (sparse.SPARSE_MM, sparse.SEARCHED)]
            chosen = f"{row['configs'][sparse.CHOSEN].split()[0]}, {sparse.of(row, sparse.DENSE, sparse.CHOSEN):.2f}" if sparse.CHOSEN in row["timing"] else ""
            cells.append([f"{extents(row['shape'])} {row['program']}", f"{gpu}{', tuned' * tuned}", *ratios, *products, chosen])
    return paragraphs(
        "A layer with a 2:4 sparse weight in bf16, by the vendor's product and one pass: how many times as fast as epigen's kernel of the dense values, as torch's own sparse layer with a pass by torch.compile, and "
        "as `torch.mm` of the dense values alone; then how many times as fast as that the sparse product alone is, and by the kernel that cuSPARSELt's search finds; and what tuning chose, and how many times as "
        "fast as the dense kernel that is:",
        table(["M x N x K", "GPU", "of dense", "of torch's", "of mm", "product: of mm", "searched: of mm", "chosen"], cells),
        *(f"{gpu}{', tuned' * tuned}: the sparse product is faster in {about['faster']} of {about['of']}. {source(report, 'sparse')}"
          for (gpu, tuned), report in reports.items() for about in [report.summary]),
    )  # fmt: skip


def block_scale_rows() -> str:
    """fp8 with scales in blocks: GPUs side by side."""
    reports = _by_gpu("block_scales")
    if not reports:
        return "Not measured yet: `python -m bench block_scales`."
    cells = []
    for (gpu, tuned), report in reports.items():
        for row in report.rows:
            times = {name: found["median_us"] for name, found in row["timing"].items()}
            tflops = [f"{2e-6 * math.prod(row['shape']) / times[name]:.0f}" for name in (block_scales.OURS, block_scales.TORCH, block_scales.ROWS)]
            cells.append([extents(row["shape"]), f"{gpu}{', tuned' * tuned}", f"{block_scales.of_torch(row):.2f}", *tflops])
    return paragraphs(
        "fp8 with a scale for each 1x128 of the left operand and each 128x128 of the right one: how many times as fast as `torch.nn.functional.scaled_mm` with the same scales, of which "
        f"{block_scales.CLAIMED:.2f} is the target; and TFLOP/s of both, and of cuBLAS with scales of rows and columns and without fast accumulation:",
        table(["M x N x K", "GPU", "of torch's", *(f"{name}, TFLOP/s" for name in ("epigen", "torch", "scales of rows"))], cells),
        *(f"{gpu}{', tuned' * tuned}: {about['met']} of {about['of']} reach it, {about['worst']:.2f} at worst. {source(report, 'block_scales')}"
          for (gpu, tuned), report in reports.items() for about in [report.summary]),
    )  # fmt: skip


def quantized_output_rows() -> str:
    """Outputs in fp8 with scales in blocks: GPUs side by side."""
    reports = _by_gpu("quantized_outputs")
    if not reports:
        return "Not measured yet: `python -m bench quantized_outputs`."
    cells, below = [], []
    for (gpu, tuned), report in reports.items():
        for row in report.rows:
            of = functools.partial(quantized_outputs.of, row)
            shares = (of(PRODUCT), of(PRODUCT, COMPILED), of(COMPILED), of(PLAIN))
            cells.append([f"{extents(row['shape'])}, {row['program']}", f"{gpu}{', tuned' * tuned}", *(f"{share:.2f}" for share in shares)])
        about = report.summary
        missing = f", and {about['left_out']} cases were not timed" if about["left_out"] else ""
        met = f"{about['met']} of {about['of']} targets are met, {about['worst']:.2f} of one at worst{missing}."
        below.append(f"{gpu}{', tuned' * tuned}: {met} {source(report, 'quantized_outputs')}")
    return paragraphs(
        f"`q, s = quantize(x, fp8e4m3, n/{quantized_outputs.BLOCK})` in one kernel, of a bf16 product, of `gelu(mm + bias)`, of SwiGLU and of fp8 with scales in blocks: how many times as fast as "
        "torch's product alone it is, which is `torch.mm`, of SwiGLU one with twice the columns, and of fp8 `scaled_mm` with the same scales; the same of that product and a pass by torch.compile; and "
        f"how many times as fast as the product and the pass it is, of which {quantized_outputs.CLAIMED:.2f} is the target for fp8, and as epigen's kernel that leaves x in bf16:",
        table(["M x N x K", "GPU", "of the product", "of the product: torch.compile", "of torch.compile", "of epigen's in bf16"], cells),
        *below,
    )


def grouped_rows() -> str:
    """Products of groups of rows: GPUs below each other."""
    reports = _by_gpu("grouped")
    if not reports:
        return "Not measured yet: `python -m bench grouped`."
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for (gpu, _), report in reports.items():
        for row in report.rows:
            here = cells.setdefault((extents(row["shape"]), row["routing"], gpu), {})
            if row["program"] == grouped.GATED:
                here |= {"unit": f"{grouped.of(row, grouped.COMPILED):.2f}", "dense": f"{grouped.of(row, grouped.DENSE):.2f}"}
            else:
                here[row["program"]] = f"{grouped.of(row, grouped.COMPILED if row['program'] == grouped.DOWN else grouped.GROUPED):.2f}"
    columns = ("unit", "dense", grouped.DOWN, grouped.GRADIENT)
    return paragraphs(
        f"Products of groups of rows whose ends lie on the GPU, as experts have them, in bf16: how many times as fast as `torch._grouped_mm` and a pass by torch.compile a gated unit is, "
        f"`{grouped.GATED}`, and as one dense product of all rows with one expert's weight, which reads no other's; the product behind the unit, `{grouped.DOWN}`; and the weights' gradient as "
        f"`torch._grouped_mm` alone. Of units with 8192 rows {grouped.CLAIMED} of the first is the target at {grouped.MANY} experts and more, and {grouped.OF_DENSE:.2f} of the second at 8:",
        table(["experts x rows x N x K", "rows are shared out", "GPU", "unit", "unit: of dense", "down", "weights' gradient"],
              [[*which, *(here.get(column, "") for column in columns)] for which, here in cells.items()]),
        *(f"{gpu}: {report.summary['met']} of {report.summary['of']} targets are met, {report.summary['worst']:.2f} of one at worst. {source(report, 'grouped')}"
          for (gpu, _), report in reports.items()),
    )  # fmt: skip


def expert_rows() -> str:
    """Layers of experts: GPUs below each other."""
    reports = _by_gpu("experts")
    if not reports:
        return "Not measured yet: `python -m bench experts`."
    shown = (experts.LOOP, experts.COMPILED, experts.OURS, experts.OURS_COMPILED)
    cells = [
        [f"{row['model']}, {row['routing']}", row["program"], gpu, *(f"{experts.of(row, experts.GROUPED, way):.2f}" for way in shown)]
        for (gpu, _), report in reports.items()
        for row in report.rows
    ]
    return paragraphs(
        "A whole layer of experts by `epigen.nn.Experts`, in bf16, with sorting tokens and adding up what their experts give: how many times as fast as the same by `torch._grouped_mm` it is; a loop over experts, "
        "and torch.compile, beside it. Nothing is claimed:",
        table(["experts, routing", "", "GPU", *shown], cells),
        *(source(report, "experts") for report in reports.values()),
    )


_CONTENDERS = (cross_entropy.OURS, cross_entropy.KEPT, cross_entropy.COMPILED, cross_entropy.LIGER, cross_entropy.TORCH)


def cross_entropy_rows() -> str:
    """A last layer and its loss: forward, both ways, and memory."""
    reports = _by_gpu("cross_entropy")
    if not reports:
        return "Not measured yet: `python -m bench cross_entropy`."
    rows = []
    for (gpu, tuned), report in reports.items():
        for row in report.rows:
            ways = [name for name in _CONTENDERS if name in row["both"]]
            both = " / ".join(f"{cross_entropy.of_eager(row, name):.2f}" for name in ways)
            held = " / ".join(f"{row['bytes'][name] / 1e9:.2f}" for name in (cross_entropy.EAGER, *ways))
            forward = f"{cross_entropy.of_mm(row):.2f} ({cross_entropy.of_mm(row, cross_entropy.EAGER):.2f})"
            rows.append([f"{row['program']}, {extents(row['shape'])}", f"{gpu}{', tuned' * tuned}", forward, both, held])
    names = " / ".join(
        (
            cross_entropy.OURS,
            *(n for n in (cross_entropy.COMPILED, cross_entropy.LIGER, cross_entropy.TORCH) if n in next(iter(reports.values())).rows[0]["both"]),
        )
    )
    return paragraphs(
        "A last layer and its cross entropy in bf16, from a mean: forward as a share of `torch.mm` alone, with eager torch's in brackets; both ways, how many times as fast as eager torch; "
        "and GB at a time beside operands and gradients:",
        table(["Model, M x N x K", "GPU", "forward", f"both ways: {names}", f"GB: eager / {names}"], rows),
        *(f"{gpu}{', tuned' * tuned}: {about['met']} of {about['of']} targets are met at the first shape: forward {about['forward']:.2f} of {cross_entropy.FORWARD}, both ways "
          f"{about.get('both', 0):.2f} of {cross_entropy.BOTH} times Liger Kernel's speed, memory {about['memory']:.2f} of the bound. {source(report, 'cross_entropy')}"
          for (gpu, tuned), report in reports.items() for about in [report.summary]),
    )  # fmt: skip


def invariant_rows() -> str:
    """What it costs that a row has the same bits whatever M is."""
    if not there("invariant"):
        return "Not measured yet: `python -m bench invariant`."
    return paragraphs(
        'How many times as fast as an ordinary kernel, and as `torch.mm` alone, one with `invariant="m"` is, of a layer\'s product with its bias in bf16; higher is better. '
        "On the H200 both kernels are of records, those of 1 and 8 rows tuned as invariant; on the H100 of what a call borrows:",
        *(_invariant_on(load(name)) for name in ("invariant", "invariant_h100") if there(name)),
    )


def _invariant_on(report: Report) -> str:
    """The table of one GPU."""
    by_layer: dict[str, dict[int, str]] = {}
    for row in report.rows:
        m, n, k = row["shape"]
        speeds = " / ".join(f"{invariant.speed(row, peer):.2f}" for peer in (invariant.ORDINARY, invariant.MM))
        by_layer.setdefault(f"{n}x{k}, `{row['program']}`", {})[m] = speeds if row["same_bits"] else f"{speeds}, OTHER BITS"
    counts = sorted({row["shape"][0] for row in report.rows})
    about = report.summary
    return paragraphs(
        table(["N x K", *(f"M = {m}" for m in counts)], [[layer, *(speeds.get(m, "") for m in counts)] for layer, speeds in by_layer.items()]),
        f"{about['mean']:.2f} in the geometric mean, {about['worst']:.2f} at worst, of the ordinary kernel; {about['claimed_mean']:.2f} and "
        f"{about['claimed_worst']:.2f} are the targets. {'All rows have the same bits for every M.' if about['same_bits'] else 'Some rows have other bits.'} "
        + source(report, "invariant"),
    )


def h100() -> str:
    """What another GPU of the architecture makes of the H200's records, and of its own."""
    borrowed, own = (load(f"headline_h100{name}") for name in ("_borrowed", ""))
    cases = {key(row): row for row in borrowed.rows}
    pairs = [(cases[key(row)], row) for row in own.rows if key(row) in cases]
    rows = []
    for peer in (peers.MM, peers.EAGER, peers.ADDMM, peers.CUBLASLT):
        both = [(before, after) for before, after in ((ratio(x, peer), ratio(y, peer)) for x, y in pairs) if before and after]
        cells = [[f"{geometric(some):.2f}", f"{min(some):.2f}", f"{sum(r >= 1 for r in some) / len(some):.0%}"] for some in zip(*both, strict=True)]
        rows.append([peer, str(len(both)), *cells[0], *cells[1]])
    columns = ["against", "cases", "borrowed: mean", "worst", "no slower", "tuned: mean", "worst", "no slower"]
    return paragraphs(
        f"The headline's cases on an H100, first with configs borrowed from the H200, then with {_H100_THEN} tuned on the H100: a peer's time over epigen's, "
        "in the geometric mean and at the worst shape, and the share of cases in which epigen is no slower; higher is better:",
        table(columns, rows),
        f"Where products are large, borrowed configs are not enough, and tuned ones make up for most of it. {source(own, 'headline')}",
    )


BLOCKS = {
    "summary": summary, "models": models, "reach": reach,
    "headline": headline, "gem": gem, "host": host, "tuned_in": tuned_in, "training": training, "counters": counters, "power": power_limited, "checked": checked,
    "several": several, "tiles": tile_rows, "gated": gated_rows, "cross_entropy": cross_entropy_rows, "weights": weight_rows, "sparse": sparse_rows, "block_scales": block_scale_rows, "quantized_outputs": quantized_output_rows, "grouped": grouped_rows, "experts": expert_rows, "of_bytes": of_bytes, "invariant": invariant_rows, "h100": h100, "shipped": shipped, "tuning": tuning,
}  # fmt: skip


def filled(text: str) -> str:
    """A document with every block made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))
