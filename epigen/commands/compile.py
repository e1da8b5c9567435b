"""`epigen compile`: composes the stages, runs the kernel against the oracle, and shows it. `cli` attaches it to its group.

Source, or the stage that was asked for, goes to standard output, talk to standard error: the target and the config first, and a summary last.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import epigen
from epigen import dtypes, gpus
from epigen.codegen.schedules import SCHEDULES, in_triton
from epigen.commands import derivation as cli_derivation
from epigen.commands.types import Extents, Program, ProgramCommand, dtype_option, numerics_options, pass_machine, say, weight_option
from epigen.errors import EpigenError
from epigen.gpus import TARGETS, Target
from epigen.runtime.device import Machine
from epigen.shapes import Shape, extents

if TYPE_CHECKING:
    from epigen.dtypes import DType
    from epigen.ir.bound import Difference
    from epigen.ir.graph import Graph
    from epigen.runtime.ahead import Running
    from epigen.runtime.kernel import Kernel
    from epigen.runtime.loader import Compiled
    from epigen.runtime.prepared import Plan

EARLY = ("ast", "ir", "lowered")
COMPILED = ("ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn", "hsaco")
DEFAULT_SHAPE = (4096, 4096, 4096)
ANYWHERE = "tiled"
"""The schedule that every GPU can run, and Triton's interpreter: what is shown where there is no GPU and none is named."""


class Config(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """schedule=tiled,block_m=64,…"""

    name = "NAME=VALUE,…"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(\w{1,64})\s*", part)
            if not match:
                self.fail(f"{part!r} is not of the form name=value", param, context)
            values[match[1]] = int(match[2]) if re.fullmatch(r"[0-9]{1,9}", match[2]) else match[2]
        return values


@click.command("compile", cls=ProgramCommand, short_help="Compile a program, and show the checked kernel.")
@click.argument("program", type=Program())
@click.option(
    "--shape",
    type=Extents(),
    help="M, N and K, of a batch after the number of its products, that the config is chosen for (default: any, chosen for 4096x4096x4096)",
)
@dtype_option
@weight_option
@click.option("--layout", default="nn", show_default=True, type=click.Choice(["nn", "nt", "tn", "tt"]), help="how a and b lie: n row-major, t transposed")
@numerics_options
@click.option("--target", "target_name", type=click.Choice(tuple(TARGETS)), help="architecture (default: the GPU at hand, else sm_90 and the schedule tiled)")
@click.option("--emit", default="source", show_default=True, type=click.Choice([*EARLY, "source", *COMPILED]), help="which stage to write")
@click.option("--schedule", type=click.Choice(list(SCHEDULES)), help="the best config of this schedule by the model, instead of the best of all")
@click.option("--config", type=Config(), help="a config instead of the chosen one: schedule=tiled,block_m=64,…")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="write to a file; source becomes a stand-alone file with a launcher and a self-check",
)
@click.option("--backward", is_flag=True, help="derive the program of the gradients, and compile that")
@cli_derivation.save_option
@cli_derivation.wrt_option
@click.option("--no-verify", is_flag=True, help="do not run the kernel before showing it")
@click.option("--json", "as_json", is_flag=True, help="write one JSON object instead")
@pass_machine
def compile_command(machine: Machine, program: str, shape: Shape | None, dtype_name: str, weight_name: str | None, layout: str, numerics: dict[str, Any], target_name: str | None,
                    emit: str, schedule: str | None, config: dict[str, Any] | None, output: Path | None, backward: bool, save: str | None, wrt: str | None,
                    no_verify: bool, as_json: bool) -> None:  # fmt: skip
    """Compile PROGRAM, such as "relu(mm + bias)", and show the kernel once it has been checked."""
    if schedule and config:
        raise click.UsageError("--schedule chooses a config, and --config is one: give one of them")
    given, derived = program, cli_derivation.requested(program, dtype_name, backward, save, wrt)
    if derived is not None:
        for name, line in cli_derivation.rows(derived, shape or DEFAULT_SHAPE):
            say(f"{name:<10}{line}")
        program = derived.backward.text
    if emit in EARLY[:2]:
        _write_stage(program, emit, _early(program, emit), output, as_json)
        return

    dtype, weight = dtypes.BY_NAME[dtype_name], dtypes.WEIGHT_BY_NAME[weight_name] if weight_name else None
    target, chosen = _target(target_name, machine)
    anywhere = chosen == _DEFAULT and not config and schedule in (None, ANYWHERE)
    if anywhere:
        target = replace(target, shared_bytes=_least_shared_bytes())
    kernel, plan = _planned(program, shape, dtype, weight, layout, numerics, target, ANYWHERE if anywhere else schedule, config)
    say(f"target    {target.name} ({target.part}), {chosen}")
    say(f"config    {plan.choice.config}")
    say(f"          {plan.choice.why}")
    if emit == "lowered":
        from epigen.commands.show import spec_text

        _write_stage(kernel.program, emit, spec_text(plan.spec), output, as_json)
        return
    if emit != "source":
        _demand_stage(emit, plan, target)
    report: dict[str, Any] = {
        "program": kernel.program, "name": plan.spec.name, "target": target.name, "dtype": dtype.name, "config": {"schedule": plan.choice.config.schedule, **dict(plan.choice.config.values)},
        "why": plan.choice.why, "digest": plan.rendered.digest, "epigen": epigen.__version__,
    }  # fmt: skip
    if weight is not None:
        report["weight"] = weight.name
    if derived is not None:
        report["derivation"] = cli_derivation.record(derived, shape or DEFAULT_SHAPE)
    compiling = None if plan.rendered.whole or (no_verify and emit == "source") else _start_compiling(plan, target, layout)
    summary = [f"compiled  {kernel.program}, {dtype}{f' x {weight}' if weight else ''} for {target.name}: {_size(plan)}"]
    try:
        if not no_verify:
            report["verified"], lines = _verify(kernel, plan, dtype, weight, layout, machine)
            summary += lines
        compiled = compiling.result() if compiling else []
    except BaseException:
        if compiling:
            compiling.stop()
        raise
    report["resources"] = [_resources(f.name, c) for f, c in zip(plan.rendered.functions, compiled, strict=False)]
    summary += [_resources_text(r) for r in report["resources"]]
    if emit == "source":
        text: str | bytes = _standalone(kernel, plan) if output else plan.source
    else:
        text = _stage(compiled, emit, target)
    report[emit] = text if isinstance(text, str) else text.hex()
    _write(text, output, json.dumps(report) if as_json else None)
    for line in summary:
        say(line)
    if emit == "source" and not as_json:
        options = {
            "dtype": (dtype.name, "fp16"),
            "weight": (weight_name, None),
            "layout": (layout, "nn"),
            **{name: (value, "ieee" if name == "precision" else None) for name, value in numerics.items()},
        }
        words = " ".join([shlex.quote(given), *(f"--{name} {value}" for name, (value, default) in options.items() if value != default)])
        for line in _next(words, backward, output, anywhere, chosen == _AT_HAND and numerics["invariant"] is None):
            say(line)


_DEFAULT, _AT_HAND = "the default, since no GPU is at hand", "the GPU at hand"


def _target(name: str | None, machine: Machine) -> tuple[Target, str]:
    """What to compile for, and why that."""
    if name:
        return gpus.target_by_name(name), "as asked"
    return (target, _AT_HAND) if (target := machine.at_hand()) else (gpus.DEFAULT_TARGET, _DEFAULT)


def _least_shared_bytes() -> int:
    """What a block of every GPU has."""
    return min(t.shared_bytes for t in TARGETS.values())


def _planned(
    program: str, shape: Shape | None, dtype: DType, weight: DType | None, layout: str, numerics: dict[str, Any], target: Target, schedule: str | None,
    config: dict[str, Any] | None,
) -> tuple[Kernel, Plan]:  # fmt: skip
    """schedule: the only one to choose a config of; None for the best."""
    from epigen import api
    from epigen.choose.choose import Within
    from epigen.runtime.kernel import Kernel

    kernel = api.compile(program, config=config, **numerics)
    if schedule:
        kernel = Kernel(kernel.graph, kernel.renderer, Within(schedule), numerics=kernel.numerics)
    return kernel, kernel.plan(shape or DEFAULT_SHAPE, target=target, signature=kernel.signature_of(dtype, shape, layout, weight))


def _size(plan: Plan) -> str:
    if plan.rendered.whole:
        return "the vendor's own kernel"
    lines, schedule = plan.source.count("\n"), SCHEDULES[plan.choice.config.schedule]
    return f"{lines} lines of {schedule.dialect.capitalize()}, schedule {schedule.name}"


def _next(words: str, backward: bool, output: Path | None, anywhere: bool, tunes: bool) -> list[str]:
    """What to try next, a command a line. words: the program, as a command takes it. tunes: whether it can be tuned here."""
    flag = " --backward" * backward
    rows = []
    if output is not None:
        rows.append((f"python {shlex.quote(str(output))}", "its self-check; import it for the launcher"))
    else:
        rows.append((f"epigen compile {words}{flag} -o fused.py", "a stand-alone file: kernel, launcher, self-check"))
    if anywhere:
        rows.append((f"epigen compile {words}{flag} --target sm_90", "the best for a Hopper: this one runs on any GPU"))
    if tunes and not backward:
        rows.append((f"epigen tune {words} --shape 4096x4096x4096", "the fastest config for this GPU"))
    rows.append((f"epigen explain {words} --shape 4096x4096x4096", "what bounds it, and what fusing saves"))
    width = max(len(command) for command, _ in rows)
    return [f"{'' if number else 'next':<10}{command:<{width}}  # {what}" for number, (command, what) in enumerate(rows)]


def _demand_stage(emit: str, plan: Plan, target: Target) -> None:
    """Raises EpigenError at once for a stage that the kernel will not have."""
    if plan.rendered.whole:
        raise EpigenError(f"the vendor's library computes all of this program, so there is no {emit} of it: give --schedule tiled, which multiplies")
    stages = ("ttir", "ttgir", "llir", *(("amdgcn", "hsaco") if target.backend == "hip" else ("ptx", "cubin")))
    if emit not in stages:
        raise EpigenError(f"{target.name} has no stage '{emit}': it has {', '.join(stages)}")
    schedule = SCHEDULES[plan.choice.config.schedule]
    if emit == "ttir" and schedule.dialect == "gluon":
        raise EpigenError(f"the schedule {schedule.name} is written in Gluon, which begins at ttgir and has no ttir: give --schedule tiled, or --emit ttgir")


def _write_stage(program: str, emit: str, text: str, output: Path | None, as_json: bool) -> None:
    _write(text, output, json.dumps({"program": program, emit: text}) if as_json else None)


def _early(program: str, emit: str) -> str:
    from epigen.commands import show
    from epigen.ir.check import check
    from epigen.ir.passes import normalise
    from epigen.lang.parser import parse

    parsed = parse(program)
    graph = normalise(check(parsed))
    return show.ast_text(parsed) if emit == "ast" else show.graph_text(graph)


def _start_compiling(plan: Plan, target: Target, layout: str) -> Running:
    from epigen.runtime.ahead import Job, Running

    return Running(Job(plan.rendered, target, layout, plan.by_vendor))


def _resources(name: str, compiled: Compiled) -> dict[str, Any]:
    r = compiled.resources
    return {"name": name, "registers": r.registers, "spills": r.spills, "shared_bytes": r.shared_bytes, "blocks_per_sm": r.blocks_per_sm}


def _resources_text(r: dict[str, Any]) -> str:
    blocks = f"{r['blocks_per_sm']} block{'s' * (r['blocks_per_sm'] != 1)} a multiprocessor"
    return f"resources {r['name']}: {r['registers']} registers a thread, {r['spills']} spilled, {r['shared_bytes']} bytes of shared memory, {blocks}"


def _stage(compiled: list[Compiled], emit: str, target: Target) -> str | bytes:
    stages = compiled[0].stages
    if emit not in stages:
        raise EpigenError(f"{target.name} has no stage '{emit}': it has {', '.join(stages)}")
    texts = [c.stages[emit] for c in compiled]
    if isinstance(texts[0], bytes):
        if len(texts) > 1:
            say(f"note      the {emit} holds the main kernel; {len(texts) - 1} finishing kernels are left out")
        return texts[0]
    return "\n".join(str(t) for t in texts)


def _standalone(kernel: Kernel, plan: Plan) -> str:
    from epigen.codegen.standalone import standalone

    return standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered, kernel.parting)


def _verify(kernel: Kernel, plan: Plan, dtype: DType, weight: DType | None, layout: str, machine: Machine) -> tuple[dict[str, Any], list[str]]:
    """Run the kernel of the plan at a shape with tails, on the GPU or under the interpreter. Returns how far it is from the oracle, as data and as
    lines to say, which are said at once where it is too far: VerificationError is raised then."""
    import torch

    from epigen.codegen.lower import uninterpretable
    from epigen.codegen.standalone import check_shape
    from epigen.runtime import verify
    from epigen.runtime.kernel import Kernel

    on_gpu = bool(machine.indices())
    run, graph = dtype, kernel.graph
    twin = ""
    if not on_gpu and (wrong := uninterpretable(graph, [dtype], [o.dtype for o in plan.spec.outputs])):
        graph, run = _twin(graph), dtypes.FP16 if dtype == dtypes.BF16 or dtype.is_fp8 else dtype
        twin = f" (its twin with fp16 for {wrong}, which Triton's interpreter rounds wrongly: run it on a GPU for {wrong} itself)"
    config = plan.choice.config if on_gpu else in_triton(plan.choice.config)
    if config != plan.choice.config:
        twin += f" (in its place one in Triton's own language, {config}: Gluon cannot be interpreted)"
    one_product = check_shape(plan.spec, config)
    shape: Shape = (2, *one_product) if plan.spec.signature.batched else one_product
    chosen = plan.choice
    one = Kernel(graph, kernel.renderer, lambda *_: chosen, chosen.config, "triton" if on_gpu else "interpreter", kernel.numerics)
    inputs = dtypes.FP32 if run.bits == 8 else run
    given = verify.sample(
        graph, shape, run, dtypes.right_operand(run, weight, graph.packed() is not None), inputs, device="cuda" if on_gpu else "cpu", layout=layout
    )
    # the interpreter multiplies in full precision
    differences = verify.differences(one, given, (kernel.numerics.precision or "ieee") if on_gpu else "ieee")
    same = one.source() == plan.source
    how = torch.cuda.get_device_name() if on_gpu else "torch on the CPU" if plan.rendered.whole else "Triton's interpreter"
    lines = []
    for name, d in differences.items():
        bits = next(o.packed for o in plan.spec.outputs if o.name == name)
        figures = (
            f"{1 - d.promised:.2%} of the bits lie within rounding of their threshold, the others are equal"
            if bits and d.ok
            else f"largest error {d.error:.3g}, bound {d.bound:.3g}"
        )
        lines.append(f"verified  {name}: {figures}")
    lines.append(f"          at {extents(shape)} {run} under {how}, {'this very kernel' if same else 'the kernel'}{twin}, against float64")
    if not all(d.ok for d in differences.values()):
        for line in lines:
            say(line)
        verify.demand(differences)
    return {"backend": how, "shape": list(shape), "dtype": run.name, "same_source": same, "outputs": {n: _difference(d) for n, d in differences.items()}}, lines


def _twin(graph: Graph) -> Graph:
    """The program with fp16 for every dtype that the interpreter gets wrong."""

    def plain(dtype: DType | None) -> DType | None:
        return dtypes.FP16 if dtype is not None and (dtype == dtypes.BF16 or dtype.is_fp8) else dtype

    nodes = tuple(replace(n, dtype=plain(n.dtype)) for n in graph.nodes)
    return replace(graph, nodes=nodes, outputs=tuple(replace(o, dtype=plain(o.dtype)) for o in graph.outputs))


def _difference(d: Difference) -> dict[str, Any]:
    return {"ok": d.ok, "error": d.error, "bound": d.bound, "promised": d.promised}


def _write(text: str | bytes, output: Path | None, as_json: str | None) -> None:
    if output is not None:
        try:
            output.write_bytes(text.encode() if isinstance(text, str) else text)
        except OSError as error:
            raise EpigenError(f"cannot write {output}: {error.strerror}") from error
        say(f"wrote     {output}")
    if as_json is not None:
        click.echo(as_json)
    elif output is None:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            click.echo(text, nl=False)
