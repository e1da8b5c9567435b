"""The measured tables of the README and of bench/README.md, made from the stored results.

Run: python -m bench.readme    rewrites what stands between the markers in both
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import peers, power, record
from bench import training as trainer
from bench.bars import geometric, outcome, ratio, verdicts
from bench.headline import key
from bench.models import better
from bench.record import DATA, RESULTS, Report, Row
from epigen.db.database import Database
from epigen.db.records import Record

FOLDERS = (RESULTS, DATA)
"""Where reports are looked for."""
README = Path(__file__).parent.parent / "README.md"
DOCUMENTS = (README, Path(__file__).with_name("README.md"))
TRAINED = ("epigen", "eager", "torch.compile", "nvmath")
COUNTED = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
)  # fmt: skip
_H100_THEN = 92
"""Records of an H100 when its headline was measured."""
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _there(name: str) -> bool:
    return any((folder / f"{name}.json").exists() for folder in FOLDERS)


def _load(name: str) -> Report:
    return record.read(next(path for folder in FOLDERS if (path := folder / f"{name}.json").exists()))


def _measured(environment: Mapping[str, Any]) -> str:
    return f"{environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}, driver {environment['driver']}, {environment['date']}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def gem() -> str:
    """relu(mm + bias) against three operations of torch."""
    report = _load("gem_fp16")
    rows = []
    for row in report.rows:
        for kind, what in (("graph", "CUDA graph"), ("cold", "L2-cold launch")):
            eager, addmm, ours = (row[kind][name]["median_us"] for name in ("three operations", "_addmm_activation", "epigen"))
            rows.append([f"{row['m']}x{row['k']}x{row['n']}, {what}", f"{eager:.2f}", f"{addmm:.2f}", f"{ours:.2f}", f"{1 - ours / eager:.0%}"])
    columns = ["M x K x N", "torch, three operations", "`torch._addmm_activation`", "epigen", "less time than three operations"]
    return "\n".join([f"`relu(mm + bias)`, fp16, microseconds a call ({_measured(report.environment)}):", "", *_table(columns, rows)])


def host() -> str:
    """What a call costs the Python thread."""
    report = _load("host")
    about = report.summary
    (small,) = (row for row in report.rows if row["program"] == "relu + bias")
    costs = {name: found["median_us"] for name, found in small["timing"].items()}
    others = {"Triton's launch": "Triton's own launch", "eager operations": "the three operations of torch", "nvmath, execute": "nvmath's `execute`"}
    beside = ", ".join(f"{costs[name]:.1f} of {what}" for name, what in others.items() if name in costs)
    first = about["first"]["first_s"]
    alone = f", {costs['the launch alone']:.1f} us of it for the launch itself" if "the launch alone" in costs else ""
    if alone and "driver_us" in about:
        alone += f", of which the driver takes {about['driver_us']:.1f} from C as well"
    return (
        f"Host time of a warmed call of a small `relu(mm + bias)`: {costs['epigen, out=']:.1f} us with `out=` and {costs['epigen']:.1f} us where the result is allocated "
        f"(asked: {about['claimed_out_us']:.0f} and {about['claimed_new_us']:.0f}, of a host where Triton's own launch takes 13 and torch's three operations 20){alone}, "
        f"against {beside}. The first call of a process comes {first:.2f} s after torch has started (asked: {about['claimed_first_s']:.1f}). {_measured(report.environment)}."
    )


def headline() -> str:
    """The bars, and what was measured of them. torch.compile has a result of its own."""
    reports = [_load(name) for name in ("headline", "compiled") if _there(name)]
    measured = [bar for report in reports for bar in _verdicts(report) if bar["rows"]]
    lines = [
        f"How many times as fast as its peers, by geometric mean and at the worst shape ({_measured(reports[0].environment)}):",
        "",
        *_table(
            ["case", "against", "mean", "worst", "asked", ""],
            ([bar["case"], bar["baseline"], f"{bar['mean']:.2f}", f"{bar['worst']:.2f}", bar["asked"], outcome(bar)] for bar in measured),
        ),
    ]
    counts = Counter(row["group"] for report in reports for row in report.rows if row["timing"])
    words = ", ".join(f"{count} {group}" for group, count in counts.items())
    met = f"{sum(bar['met'] for bar in measured)} of {len(measured)} bars are met"
    out = sum(len(report.summary["left_out"]) for report in reports)
    left = f"; {out} more left out for time" if out else ""
    older = sum("commit" in row for report in reports for row in report.rows)
    before = f"; {older} cases were timed at an earlier commit, with the configs that they have now" if older else ""
    how = (
        "Contenders take turns, with the L2 cache flushed before each launch unless a CUDA graph is named; a wrong answer is not timed. `mm` is the product "
        "alone, so that 1 there means a free epilogue; cuBLASLt (nvmath-python, autotuned) approximates gelu by tanh; torch.compile is in the mode "
        f"`{peers.COMPILE_MODE}`."
    )
    figure = "![time of the product alone over that of each contender, by shape](results/ratios.svg)"
    lines += ["", f"fp16 and bf16, {sum(counts.values())} cases ({words}){left}{before}; {met}. {how}", "", figure]
    return "\n".join(lines)


def _verdicts(report: Report) -> list[dict[str, Any]]:
    return verdicts(report.rows, report.summary.get("copy_gbps"))


_SUMMARY = (
    ("every epilogue", "eager"), ("every epilogue", "torch.compile"), ("drelu + bgrad", "cuBLASLt"), ("gelu + bias + aux", "cuBLASLt"),
    ("relu + bias, 64x128x256 and 128x256x256, CUDA graph", "eager"),
)  # fmt: skip


def summary() -> str:
    """Five bars that say what it is good for."""
    reports = [_load(name) for name in ("headline", "compiled")]
    bars = {(bar["case"], bar["baseline"]): bar for report in reports for bar in _verdicts(report) if bar["rows"]}
    rows = ([case, baseline, f"{bars[case, baseline]['mean']:.2f}", f"{bars[case, baseline]['worst']:.2f}"] for case, baseline in _SUMMARY)
    head = f"How many times as fast, tuned, in the geometric mean and at the worst shape; higher is better ({_measured(reports[0].environment)}):"
    picture = "![time of the product alone over that of each contender, by shape: above 1 the epilogue costs less than nothing](bench/results/ratios.svg)"
    return "\n".join([head, "", *_table(["case", "against", "mean", "worst"], rows), "", picture])


def models() -> str:
    """Layers of real models, as torch.compile's backend and fuse run them."""
    report = _load("models")
    last = [row for row in report.rows if "earlier" not in row]
    table: list[list[str]] = []
    reached: dict[str, list[float]] = {"forward": [], "step": []}
    for row in last:
        for what, ratios in reached.items():
            times = row[f"{what}_ms"]
            ratios.append(better(times) / times["epigen"])
            table.append(
                [
                    f"{row['model']}{_tokens(row, report)}, {what}",
                    *(f"{times[way]:.2f} ms" for way in ("eager", "inductor")),
                    *(f"{better(times) / times[way]:.2f}" for way in ("epigen", "fuse")),
                    f"{times['eager'] / times['fuse']:.2f}",
                    f"{times['eager'] / (times['eager'] - row['spared_ms'][what]):.2f}" if "spared_ms" in row else "",
                    f"{row['products_ms'][what] / better(times):.0%}",
                    f"{better(times) / (better(times) - row['pointwise_ms'][what]):.2f}" if "pointwise_ms" in row else "",
                    f"{row['host_ms'][what]['epigen'] / times['epigen']:.0%}",
                ]
            )
    columns = ["", "eager", "Inductor", "epigen, of the better", "fuse, of the better", "fuse, of eager"]
    columns += ["if what it spares cost nothing", "products, of the better"]
    columns += ["Inductor without pointwise kernels", "host, of epigen"]
    first = last[0]
    commits = Counter(row["commit"] for row in last if "commit" in row)
    older = "".join(f"; {count} row{'s are' if count > 1 else ' is'} of commit {commit}" for commit, count in commits.items())
    means = ", ".join(f"{what} {geometric(ratios):.2f} (median {statistics.median(ratios):.2f})" for what, ratios in reached.items())
    head = (
        f"{first['layers']} layers of real models in bf16, {first['tokens']} tokens, random weights, untuned: `torch.compile` with Inductor and with "
        f'`backend="epigen"`, and `epigen.fuse` ({_measured(report.environment)}). Ratios above 1 are faster; epigen\'s geometric means: {means}. '
        "Beside them stand what fuse would gain of eager if its epilogues took no time, what the products take alone, what the better would gain if Inductor's "
        "pointwise kernels took no time, which is the most that fusing could give, and what the host takes to launch: where that is most of the time, the host's "
        "speed is what is compared. "
        f"`python -m bench.models`{older}"
    )
    beside = [
        f"{said}: "
        + "; ".join(
            f"{row['model']}{_tokens(row, report)} " + ", ".join(f"{what} {against(row[f'{what}_ms']) / row[f'{what}_ms'][way]:.2f}" for what in reached)
            for row in rows
        )
        + "."
        for way, other, against, said in _BESIDE
        if (rows := [row for row in report.rows if {way, other} <= set(row["step_ms"])])
    ]
    if before := sorted({row["commit"] for row in report.rows if "earlier" in row}):
        beside.append(f"Of these, models that the last run did not tune are of {', '.join(before)}.")
    if trained := {row["model"]: row["losses"] for row in report.rows if row.get("losses")}:
        worst = {way: max(found["apart"][way] for found in trained.values()) for way in ("epigen", "inductor", "fuse", "fp32")}
        beside.append(
            f"Losses of {' and '.join(trained)} over {max(found['steps'] for found in trained.values())} steps of training lie at most {worst['epigen']:.1g} of them from eager's "
            f"(Inductor's {worst['inductor']:.1g}, fuse's {worst['fuse']:.1g}, eager's own in fp32 {worst['fp32']:.1g})."
        )
    compiled = [row["compile_s"]["epigen"] / row["compile_s"]["inductor"] for row in last]
    beside.append(f"Compilation, of Inductor's: {geometric(compiled):.2f} in the geometric mean, {max(compiled):.2f} at most.")
    return "\n".join([head, "", *_table(columns, table), "", " ".join(beside)])


_BESIDE: tuple[tuple[str, str, Callable[[Mapping[str, float]], float], str], ...] = (
    ("epigen, graphs", "inductor, graphs", lambda times: times["inductor, graphs"], 'As CUDA graphs (`mode="reduce-overhead"`), of Inductor\'s'),
    ("tuned", "eager", better, "Tuned, of the better"),
    ("epigen", "autotune", lambda times: times["autotune"], "Of `max-autotune-no-cudagraphs`"),
)
"""What else a model may be run as: the way, what it is compared with, and how long that takes."""


def _tokens(row: Row, report: Report) -> str:
    """Said where it is another number than the first model's."""
    return "" if row["tokens"] == report.rows[0]["tokens"] else f" with {row['tokens']} tokens"


def checked() -> str:
    """What ran on the GPU, under the oldest Triton and the newest."""
    tests, newest, memory = _load("gpu_tests"), _load("gpu_tests_newest"), _load("memcheck")
    environment, later = tests.environment, newest.environment
    (passed,) = (row["count"] for row in memory.rows if row["outcome"] == "passed")
    return (
        f"On the GPU {_outcome(tests)} with a float64 oracle within a bound derived from dtype and K, or bit for bit "
        f"({_measured(environment)}, commit {environment['commit']}), and {_outcome(newest)} under Triton {later['triton']} (commit {later['commit']}); "
        f"compute-sanitizer's memcheck finds {memory.summary['memcheck_errors']} errors in {passed} of them (commit {memory.environment['commit']})."
    )


def _outcome(tests: Report) -> str:
    total = tests.summary["total"]
    wrong = sum(count for outcome, count in total.items() if outcome not in ("passed", "skipped"))
    return f"{total['passed']:,} cases agree{f' and {wrong} do not' * (wrong > 0)}"


def tuned_in() -> str:
    """How long tuning takes."""
    report, parts = _load("cold"), []
    result = report.summary
    if "worst_s" in result:
        parts.append(
            f"`{result['program']}` at {result['shape']} takes {result['median_s']:.1f} s from start to end, at worst {result['worst_s']:.1f} s "
            f"(asked: {result['claimed_s']:.0f})"
        )
    if "suite" in result:
        suite = result["suite"]
        parts.append(
            f"{suite['count']} problems in one command {suite['wall_a_problem_s']:.1f} s each, the start included (asked: {result['claimed_a_problem_s']:.0f})"
        )
    return f"Time of `epigen tune` with nothing cached: {'; '.join(parts)} ({_measured(report.environment)}, `python -m bench cold`)."


def tuning() -> str:
    """What tuning finds, how soon and how surely: a line for each result that there is."""
    lines = {
        "winner": _winner,
        "replay": _replay,
        "model": _model,
        "repeat": _repeat,
        "devices": _devices,
        "borrow": _borrow,
        "ways": _ways,
        "tuned": _tuned,
        "untuned": _untuned,
    }
    return "\n".join(f"- {line(_load(name))} (`python -m bench {name}`)" for name, line in lines.items() if _there(name))


def _replay(report: Report) -> str:
    result, tables = report.summary, report.rows
    every = result["all"]
    gpus = " and ".join(sorted({one["recorded"]["gpu"] for one in tables}))
    return (
        f"How good a search is, over {len(tables)} recorded sweeps ({gpus}) and {result['seeds']} seeds, with the noise of the recording: after {result['trials']} trials "
        f"{every['epigen']['reached']:.0%} of the runs have a config of at least {result['enough']:.0%} of the best speed; of random choice {every['random']['reached']:.0%}, "
        f"of Optuna's TPE alone {every['TPE alone']['reached']:.0%}. The plot shows it by trial."
    )


def _winner(report: Report) -> str:
    problems, worst = report.rows, report.summary["worst"]
    configs, ahead = [p["configs"] for p in problems], [-p["behind"] for p in problems if p["behind"] < -0.01]
    found = [f"the winner of 48 trials takes {worst:.1%} longer than the best at worst"] if worst > 0 else []
    if ahead:
        those = "1 winner of 48 trials is" if len(ahead) == 1 else f"{len(ahead)} winners of 48 trials are"
        found.append(f"{those} ahead of all of them, by up to {max(ahead):.0%}, for the sweeps know fewer ways")
    return (
        f"A live search against the whole space, {len(problems)} problems of {min(configs)} to {max(configs)} measured configs: "
        f"{'; '.join(found) or 'the winners of 48 trials are the best'} ({_measured(report.environment)})."
    )


def _model(report: Report) -> str:
    found = {row["table"]: row["spearman"] for row in report.rows}
    parts = sum(name.startswith("sample_") for name in found)
    return (
        f"The model without a search: Spearman's rank correlation with the measured times is {min(found.values()):.2f} to {max(found.values()):.2f} "
        f"over all configs of {len(found) - parts} sweeps and {parts} samples."
    )


def _repeat(report: Report) -> str:
    problems = report.rows
    worst = [p["worst"] for p in problems]
    lost = sum(r["behind"] is None for p in problems for r in p["repetitions"])
    wrong = f"; {lost} winners were wrong when timed again" if lost else ""
    return (
        f"Tuning again: of {len(problems)} problems, each tuned {len(problems[0]['repetitions'])} times from nothing, the slowest winner is "
        f"{max((w for w in worst if w is not None), default=0.0):.1%} behind the fastest (asked: {report.summary['claimed']:.0%}){wrong} ({_measured(report.environment)})."
    )


def _devices(report: Report) -> str:
    result, parts = report.summary, []
    if "suite" in result:
        suite = result["suite"]
        parts.append(
            f"{suite['count']} problems are searched {suite['searching']:.2f} times as fast as on one, {suite['wall']:.2f} times with the command's start"
        )
    if "many" in result:
        many = result["many"]
        parts.append(f"one problem with {many['trials']} trials {many['searching']:.2f} times")
    return f"On two GPUs {'; '.join(parts)} ({_measured(report.environment)})."


def _borrow(report: Report) -> str:
    result = report.summary
    if not result["count"]:
        return f"Borrowed configs: nothing to compare yet ({_measured(report.environment)})."
    rule, failed = result["rule"], result["failed"]
    others = f"; for {rule['count']} more nothing was near enough, and the plain rule's config takes {rule['ratio'] - 1:.0%} longer" if rule["count"] else ""
    wrong = f"; {failed} failed" if failed else ""
    ways = len(result.get("seeds", ()))
    held = f"with half of the database held out, in {ways} ways," if ways > 1 else "with half of the database held out,"
    preferred = result["by_how"].get("preferred", {}).get("count", 0)
    rule_too = f" ({preferred} of them with one that nobody measured, which the model prefers)" if preferred else ""
    return (
        f"Borrowed configs: {held} {result['count']} of its problems take {result['ratio'] - 1:.1%} longer in the geometric mean "
        f"with a config of the other half{rule_too} than with their own, at worst {result['worst'] - 1:.0%}{others}{wrong} ({_measured(report.environment)})."
    )


def _ways(report: Report) -> str:
    turns, together = (report.summary["moved"][way] for way in ("ping-pong", "cooperative"))
    gpus = sum(run["gpus"] for run in report.summary["runs"])
    return (
        f"How a long product's work is shared, of {len(report.rows)} problems on {gpus} GPUs that did not tune them: against the product, groups in turns "
        f"are on one GPU {turns['mean']:.1%} faster than on another in the mean, {turns['most']:.0%} at most; groups together {together['mean']:.1%} and "
        f"{together['most']:.0%} ({_measured(report.environment)})."
    )


def _tuned(report: Report) -> str:
    return f"Tuned: for {_drawn(report, 'each tuned with 48 trials')}"


def _untuned(report: Report) -> str:
    return f"Untuned: for {_drawn(report, 'which the database does not know')}"


def _drawn(report: Report, about: str) -> str:
    rows = [row["timing"] for row in report.rows if peers.OURS in row["timing"]]
    fused = [min(row[name]["median_us"] for name in (peers.EAGER, peers.ADDMM, peers.CUBLASLT) if name in row) / row[peers.OURS]["median_us"] for row in rows]
    eager = [row[peers.EAGER]["median_us"] / row[peers.OURS]["median_us"] for row in rows if peers.EAGER in row]
    return (
        f"{len(rows)} random problems, up to 32768x16384x16384, {about}, the fastest of eager torch, `_addmm_activation` and "
        f"cuBLASLt, autotuned, takes {statistics.geometric_mean(fused):.2f} times as long as epigen in the geometric mean, {min(fused):.2f} times at worst; "
        f"eager torch alone {statistics.geometric_mean(eager):.2f} times, {min(eager):.2f} at worst ({_measured(report.environment)})."
    )


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
    columns = ["program", "problems", "mm / fused: geometric mean", "worst and best", "mm and one pass / fused", "worst and best"]
    records = [r for some in by_program.values() for r in some]
    gpus = ", ".join(f"{count} on {gpu}" for gpu, count in Counter(r.gpu for r in records).most_common())
    versions = ", ".join(sorted({f"torch {r.torch}, Triton {r.triton}" for r in records}))
    return (
        f"The problems of the shipped database ({gpus}, {versions}, {max(r.date for r in records)[:10]}); above 1 is faster than the vendor:\n\n"
        + "\n".join(_table(columns, rows))
    )


def training() -> str:
    """A training step beside its peers', what it keeps, and what was learnt by it."""
    report, weighed, learnt = _load("training"), _load("training_memory"), _load("digits_cuda")
    about, rows = report.summary, []
    for row in report.rows:
        if row.get("timing"):
            times = [f"{row['timing'][name]['median_us'] / 1e3:.2f} ms" if name in row["timing"] else "-" for name in TRAINED]
            rows.append([row["case"], *times, _megabytes(row, "epigen"), _megabytes(row, "eager")])
    lines = [
        f"A step, forward and backward, of an MLP of {about['layers']} layers in {about['dtype']} ({_measured(report.environment)}):",
        "",
        *_table(["", *TRAINED, "peak memory: epigen", "eager"], rows),
    ]
    activations = [row for row in weighed.rows if row["activation"] != "relu"]
    kept = "; ".join(
        f'{row["case"]}: {_megabytes(row, "epigen")} at the peak, {_megabytes(row, "epigen, recompute")} with `save="recompute"`, eager {_megabytes(row, "eager")}'
        for row in activations
    )
    claims = {(c["case"], c["claim"]): c for c in trainer.verdicts([*report.rows, *weighed.rows]) if c["met"] is not None}.values()
    missed = "; ".join(f"{c['case']}: {c['claim']}: {c['ratio']:.3f}" for c in claims if not c["met"])
    read = ", ".join(f"{row['right']['epigen']} in {row['dtype']} (eager torch {row['right']['eager'][0]})" for row in learnt.rows)
    return "\n".join(lines) + (
        f"\n\n{kept}. Of {len(claims)} claims {sum(c['met'] for c in claims)} hold{'; missed: ' + missed if missed else ''}. "
        f"Of {learnt.summary['held_out']} of scikit-learn's digits that it was not shown, an MLP learns to read {read}; the losses of all steps agree within "
        "rounding (`python -m bench.training`, `python -m bench.digits`)."
    )


def _megabytes(row: Row, name: str) -> str:
    return f"{row['memory'][name]['peak_bytes'] / 1e6:.0f} MB"


def counters() -> str:
    """Where the time of an epilogue goes, beside the product alone and cuBLASLt's fused product."""
    report = _load("counters")
    rows = []
    for shape, of_shape in itertools.groupby(report.rows, lambda row: "x".join(map(str, row["shape"]))):
        measured = list(of_shape)
        ours = [
            (row["program"] + how, row[name], row.get(peers.CUBLASLT, ()))
            for row in measured
            for name, how in ((peers.OURS, ""), (peers.OURS_TANH, ", by tanh"))
            if name in row
        ]
        for name, kernels, vendor in ((peers.MM, measured[0][peers.MM], ()), *ours):
            metrics = kernels[0]["metrics"]
            busy = [f"{metrics[m]:.0f}%" for m in COUNTED]
            issued = metrics["smsp__issue_active.avg.per_cycle_active"]
            rows.append([f"{shape}, {name}", _counted_us(kernels), _counted_us(vendor), *busy, f"{issued:.2f}"])
    about = f"{_measured(report.environment)}, `python -m bench.counters`"
    lines = [
        f"What the hardware counters say of the main kernel, {report.summary['dtype']}, layout nt, and the time of all kernels, with a cold L2 ({about}):",
        "",
    ]
    return "\n".join(lines + _table(["", "us", "cuBLASLt, us", "tensor cores busy", "L2", "DRAM", "instructions a cycle and scheduler"], rows))


def _counted_us(kernels: Sequence[dict[str, Any]]) -> str:
    return f"{sum(one['metrics']['gpu__time_duration.sum'] for one in kernels) / 1e3:.1f}" if kernels else ""


def power_limited() -> str:
    """What the power limit makes of large products."""
    report = _load("power")
    columns = (peers.CUBLASLT, peers.OURS, power.PINGPONG, power.COOPERATIVE)
    rows = []
    for row in report.rows:
        mm, ratios = row["timing"][peers.MM], power.ratios(row)
        cells = [f"{ratios[name][0]:.2f}, {ratios[name][1]:.2f} ({row['timing'][name]['alone_mhz']:.0f})" if name in ratios else "" for name in columns]
        shape = "x".join(map(str, row["shape"]))
        rows.append([f"{shape}, {row['program']}", f"{mm['median_us']:.0f}, {mm['alone_us']:.0f} ({mm['alone_mhz']:.0f})", *cells])
    about = (
        "At its power limit a GPU lowers its clock, in turns one for all contenders, alone to what each one's power allows. Microseconds of the product, "
        "and how many times as fast the others are: in turns with a cold L2, then each in a loop of its own, with the clock in MHz there "
        f"({_measured(report.environment)}, `python -m bench.power`):"
    )
    return "\n".join([about, "", *_table(["bf16, layout nt", "mm, us", *columns], rows)])


def h100() -> str:
    """What another GPU of the architecture makes of the H200's records, and of its own."""
    borrowed, own = (_load(f"headline_h100{name}") for name in ("_borrowed", ""))
    cases = {key(row): row for row in borrowed.rows}
    pairs = [(cases[key(row)], row) for row in own.rows if key(row) in cases]
    rows = []
    for peer in (peers.MM, peers.EAGER, peers.ADDMM, peers.CUBLASLT):
        both = [(before, after) for before, after in ((ratio(x, peer), ratio(y, peer)) for x, y in pairs) if before and after]
        told = [[f"{geometric(some):.2f}", f"{min(some):.2f}", f"{sum(r >= 1 for r in some) / len(some):.0%}"] for some in zip(*both, strict=True)]
        rows.append([peer, str(len(both)), *told[0], *told[1]])
    about = (
        "On an H100 the H200's records are not enough where products are large, and its own make up for most of it: how many times as fast as its peers "
        "epigen is in the headline's cases, in the mean, at worst, and in how many it is no slower "
        f"({_measured(own.environment)}; first by the H200's records, then by the {_H100_THEN} that there were of its own, while another GPU tuned):"
    )
    columns = ["against", "cases", "H200's records: mean", "worst", "no slower", "its own: mean", "worst", "no slower"]
    return "\n".join([about, "", *_table(columns, rows)])


BLOCKS = {
    "summary": summary, "models": models,
    "headline": headline, "gem": gem, "host": host, "tuned_in": tuned_in, "training": training, "counters": counters, "power": power_limited, "checked": checked,
    "h100": h100, "shipped": shipped, "tuning": tuning,
}  # fmt: skip


def filled(text: str) -> str:
    """A document with every block made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))
