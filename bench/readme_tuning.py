"""The blocks about the tuner: how long it takes, and what it finds, how soon and how surely."""

from __future__ import annotations

import statistics

from bench import model, peers, regret
from bench.record import Report
from bench.tables import commits, load, paragraphs, source, table, there


def tuned_in() -> str:
    """How long tuning takes."""
    report = load("cold")
    about, rows = report.summary, []
    if "worst_s" in about:
        what = f"`{about['program']}` at {about['shape']}"
        rows.append([f"{what}, start to end, median", f"{about['median_s']:.1f} s", ""])
        rows.append([f"{what}, start to end, at worst", f"{about['worst_s']:.1f} s", f"{about['claimed_s']:.0f} s"])
    if "suite" in about:
        suite = about["suite"]
        rows.append(
            [f"each of {suite['count']} problems in one command, start included", f"{suite['wall_a_problem_s']:.1f} s", f"{about['claimed_a_problem_s']:.0f} s"]
        )
    return paragraphs("Time of `epigen tune` with nothing cached; lower is better:", table(["", "measured", "target"], rows), source(report, "cold"))


def tuning() -> str:
    """What tuning finds, how soon and how surely: a line for each report that there is."""
    lines = {
        "winner": _winner,
        "replay": _replay,
        "model": _model,
        "repeat": _repeat,
        "devices": _devices,
        "borrow": _borrow,
        "regret_h100": _regret,
        "regret_h200": _regret,
        "ways": _ways,
        "tuned": _tuned,
        "untuned": _untuned,
    }
    return "\n".join(f"- {line(load(name))} (`python -m bench {name.split('_')[0]}`)" for name, line in lines.items() if there(name))


def _winner(report: Report) -> str:
    problems, worst = report.rows, report.summary["worst"]
    configs, ahead = [p["configs"] for p in problems], [-p["behind"] for p in problems if p["behind"] < -0.01]
    head = f"**A search against measuring everything.** {len(problems)} recorded problems, {min(configs)} to {max(configs)} configs each, searched anew with 48 trials. "
    found = [f"At worst the winner takes {worst:.1%} longer than the best measured config."] if worst > 0 else []
    if ahead:
        found.append(
            f"{len(ahead)} of {len(problems)} winners {'beats' if len(ahead) == 1 else 'beat'} the best measured config, by up to {max(ahead):.0%}: the recordings predate later schedules."
        )
    return f"{head}{' '.join(found) or 'The winners are the best measured configs.'} {source(report)}."


def _replay(report: Report) -> str:
    about, every = report.summary, report.summary["all"]
    gpus = " and ".join(sorted({row["recorded"]["gpu"] for row in report.rows}))
    return (
        f"**How good a search is.** Over {len(report.rows)} recorded sweeps ({gpus}) and {about['seeds']} seeds, with the recording's noise: after {about['trials']} trials "
        f"{every['epigen']['reached']:.0%} of the searches have a config of at least {about['enough']:.0%} of the best speed. Random choice: {every['random']['reached']:.0%}. "
        f"Optuna's TPE alone: {every['TPE alone']['reached']:.0%}. The plot below shows it by trial."
    )


def _model(report: Report) -> str:
    found = {row["table"]: row["spearman"] for row in report.rows}
    samples = sum(name.startswith("sample_") for name in found)
    return (
        f"**The model without a search.** Spearman's rank correlation of its estimates with the measured times is {min(found.values()):.2f} to {max(found.values()):.2f} "
        f"over all configs of {len(found) - samples} sweeps and {samples} samples, which its constants were fitted to."
        + "".join(f" {_first(name, about)}" for name, about in report.summary.items() if name in model.RANDOM)
    )


def _first(name: str, about: dict[str, float]) -> str:
    gpu = {"shapes": "an H200, of plain epilogues", "shapes_h100": "an H100, of all kinds but int8", "shapes_h200": "an H200, of all kinds but int8"}[name]
    return f"Of {about['problems']} random problems on {gpu}, its first choice takes {about['first'] - 1:.1%} longer than the best that was measured, the best of its first three {about['three'] - 1:.1%}."


def _repeat(report: Report) -> str:
    worst = [row["worst"] for row in report.rows]
    lost = sum(r["behind"] is None for row in report.rows for r in row["repetitions"])
    wrong = f" {lost} winners were wrong when timed again." if lost else ""
    return (
        f"**Tuning again.** {len(report.rows)} problems, each tuned {len(report.rows[0]['repetitions'])} times from nothing: the slowest winner is "
        f"{max((w for w in worst if w is not None), default=0.0):.1%} behind the fastest (target: {report.summary['claimed']:.0%}).{wrong} {source(report)}."
    )


def _devices(report: Report) -> str:
    about, parts = report.summary, []
    if "suite" in about:
        suite = about["suite"]
        parts.append(
            f"{suite['count']} problems are searched {suite['searching']:.2f} times as fast as on one, {suite['wall']:.2f} times with the command's start"
        )
    if "many" in about:
        parts.append(f"one problem with {about['many']['trials']} trials {about['many']['searching']:.2f} times")
    return f"**Two GPUs.** On two GPUs {'; '.join(parts)}. {source(report)}."


def _borrow(report: Report) -> str:
    about = report.summary
    head = "**Borrowed configs.** "
    if not about["count"]:
        return f"{head}There is nothing to compare yet. {source(report)}."
    rule, failed, ways = about["rule"], about["failed"], len(about.get("seeds", ()))
    held = f"Half of the database was held out{f' in {ways} ways' if ways > 1 else ''}."
    others = f" For {rule['count']} more nothing was near enough: the plain rule's config takes {rule['ratio'] - 1:.0%} longer." if rule["count"] else ""
    wrong = f" {failed} failed." if failed else ""
    preferred = about["by_how"].get("preferred", {}).get("count", 0)
    by_model = f" For {preferred} of them the model preferred a config that nobody had measured." if preferred else ""
    return (
        f"{head}{held} With a config of the other half {about['count']} of its problems take {about['ratio'] - 1:.1%} longer than with their own in the "
        f"geometric mean, {about['worst'] - 1:.0%} at worst.{by_model}{others}{wrong} {source(report)}."
    )


def _regret(report: Report) -> str:
    found = {among: report.summary[among] for among in regret.LIMITS}
    longer = " and ".join(
        f"{part['mean'] - 1:.1%} longer in the geometric mean, {part['worst'] - 1:.0%} at worst, {among} (targets: {part['limits'][0] - 1:.0%} and {part['limits'][1] - 1:.0%})"
        for among, part in zip(("looked up among all records", "with the GPU's own held out"), found.values(), strict=True)
    )
    kinds = ", ".join(f"{kind} {part['mean'] - 1:.0%}" for kind, part in found[regret.SHIPPED]["by_kind"].items())
    failed = f" {report.summary['failed']} failed." if report.summary["failed"] else ""
    return (
        f"**What nobody tuned, against a search of each.** {found[regret.SHIPPED]['count']} of {regret.PROBLEMS} random problems: the config that a call gets takes {longer}. "
        f"By kind, among all records: {kinds}.{failed} {source(report)}, {commits(report)}."
    )


def _ways(report: Report) -> str:
    pingpong, cooperative = (report.summary["moved"][way] for way in ("ping-pong", "cooperative"))
    gpus = sum(run["gpus"] for run in report.summary["runs"])
    return (
        f"**From GPU to GPU.** {len(report.rows)} long problems on {gpus} GPUs that did not tune them. Against the product, ping-pong varies between two GPUs of a kind "
        f"by {pingpong['mean']:.1%} in the mean (max {pingpong['most']:.0%}), cooperative by {cooperative['mean']:.1%} (max {cooperative['most']:.0%}). {source(report)}."
    )


def _tuned(report: Report) -> str:
    return f"**Tuned.** {_drawn(report, 'each tuned with 48 trials')}"


def _untuned(report: Report) -> str:
    return f"**Untuned.** {_drawn(report, 'none of them in the database')}"


def _drawn(report: Report, about: str) -> str:
    rows = [row["timing"] for row in report.rows if peers.OURS in row["timing"]]
    fused = [min(row[name]["median_us"] for name in (peers.EAGER, peers.ADDMM, peers.CUBLASLT) if name in row) / row[peers.OURS]["median_us"] for row in rows]
    eager = [row[peers.EAGER]["median_us"] / row[peers.OURS]["median_us"] for row in rows if peers.EAGER in row]
    return (
        f"{len(rows)} random problems, up to 32768x16384x16384, {about}. Against the fastest of eager torch, `_addmm_activation` and autotuned cuBLASLt epigen is "
        f"{statistics.geometric_mean(fused):.2f} times as fast in the geometric mean, {min(fused):.2f} at worst. Against eager torch alone it is "
        f"{statistics.geometric_mean(eager):.2f} times as fast, {min(eager):.2f} at worst. {source(report)}."
    )
