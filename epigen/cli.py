"""The command line: composes the stages and prints. Source goes to standard output, talk to standard error.

Exit status: 0, 1 (a mistake in what was given), 2 (usage), 3 (a kernel failed its verification). Torch and Triton are imported by
the commands that need them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import epigen
from epigen import cli_db, cli_derivation, cli_explain, cli_info, cli_tune, dtypes, ops
from epigen.cli_types import Program, ProgramCommand, Shape, dtype_option
from epigen.errors import EpigenError, InternalError, VerificationError

if TYPE_CHECKING:
    from epigen.dtypes import DType
    from epigen.ir.bound import Difference
    from epigen.ir.graph import Graph
    from epigen.runtime.ahead import Running
    from epigen.runtime.device import Target
    from epigen.runtime.kernel import Kernel
    from epigen.runtime.loader import Compiled
    from epigen.runtime.prepared import Plan

EARLY = ("ast", "ir", "lowered")
COMPILED = ("ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn", "hsaco")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
DEFAULT_SHAPE = (4096, 4096, 4096)


def say(text: str) -> None:
    click.echo(text, err=True)


class Group(click.Group):
    """Turns the user's mistakes into a message and a status: no traceback reaches the user of a command line."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except VerificationError as error:
            say(f"error: {error}")
            context.exit(3)
        except EpigenError as error:
            say(str(error) if "\n" in str(error) else f"error: {error}")
            context.exit(1)
        except InternalError as error:
            say(f"internal error: {error}")
            context.exit(1)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click's own business
        except Exception as error:  # noqa: BLE001  # a bug of ours, which is still no reason for a traceback
            say(f"internal error: {InternalError(f'{type(error).__name__}: {error}')}")
            context.exit(1)


class Config(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """schedule=tiled,block_m=64,…"""

    name = "NAME=VALUE,…"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(\w{1,64})\s*", part)
            if not match:
                self.fail(f"{part!r} is not of the form name=value", param, context)
            found[match[1]] = int(match[2]) if re.fullmatch(r"[0-9]{1,9}", match[2]) else match[2]
        return found


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(epigen.__version__, prog_name="epigen")
def main() -> None:
    """Fused matrix-multiplication epilogues, from one line of text to a Triton kernel."""


@main.command("compile", cls=ProgramCommand)
@click.argument("program", type=Program())
@click.option("--shape", type=Shape(), help="M, N and K the config is chosen for (default: any, chosen for 4096x4096x4096)")
@dtype_option
@click.option("--layout", default="nn", show_default=True, type=click.Choice(["nn", "nt", "tn", "tt"]), help="how a and b lie: n row-major, t transposed")
@click.option("--precision", type=click.Choice(["ieee", "tf32"]), default="ieee", show_default=True, help="of fp32 operands")
@click.option("--target", "target_name", type=click.Choice(TARGETS), help="architecture (default: the GPU at hand, else sm_90)")
@click.option("--emit", default="source", show_default=True, type=click.Choice([*EARLY, "source", *COMPILED]), help="which stage to write")
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
def compile_command(program: str, shape: tuple[int, int, int] | None, dtype_name: str, layout: str, precision: str, target_name: str | None,
                    emit: str, config: dict[str, Any] | None, output: Path | None, backward: bool, save: str | None, wrt: str | None, no_verify: bool,
                    as_json: bool) -> None:  # fmt: skip
    """Compile PROGRAM, such as "relu(mm + bias)", and show the kernel once it has been checked."""
    derived = cli_derivation.asked(program, dtype_name, backward, save, wrt)
    if derived is not None:
        for name, line in cli_derivation.rows(derived, shape or DEFAULT_SHAPE):
            say(f"{name:<10}{line}")
        program = derived.backward.text
    if emit in EARLY[:2]:
        _write_stage(program, emit, _early(program, emit), output, as_json)
        return

    from epigen import api
    from epigen.runtime import device

    dtype = dtypes.BY_NAME[dtype_name]
    kernel = api.compile(program, config=config, precision=precision)
    target = device.by_name(target_name) if target_name else device.at_hand() or device.DEFAULT
    where = "as asked" if target_name else "the GPU at hand" if device.at_hand() else "the default, since no GPU is at hand"
    say(f"target    {target.name} ({target.part}), {where}")
    signature = kernel.signature_of(dtype, shape, layout)
    plan = kernel.plan(shape or DEFAULT_SHAPE, target=target, signature=signature)
    say(f"config    {plan.choice.config}")
    say(f"          {plan.choice.why}")
    if emit == "lowered":
        from epigen.show import spec_text

        _write_stage(kernel.program, emit, spec_text(plan.spec), output, as_json)
        return
    report: dict[str, Any] = {
        "program": kernel.program, "name": plan.spec.name, "target": target.name, "dtype": dtype.name, "config": {"schedule": plan.choice.config.schedule, **dict(plan.choice.config.values)},
        "why": plan.choice.why, "digest": plan.rendered.digest, "epigen": epigen.__version__,
    }  # fmt: skip
    if derived is not None:
        report["derivation"] = cli_derivation.record(derived, shape or DEFAULT_SHAPE)
    if plan.rendered.whole and emit != "source":
        raise EpigenError(f"the vendor's library computes all of this program, so there is no {emit} of it: give --config with a schedule that multiplies")
    compiling = None if plan.rendered.whole or (no_verify and emit == "source") else _start_compiling(plan, target, layout)
    try:
        if not no_verify:
            report["verified"] = _verify(kernel, plan, dtype, precision, layout)
        compiled = compiling.result() if compiling else []
    except BaseException:
        if compiling:
            compiling.stop()
        raise
    report["resources"] = [_resources(f.name, c) for f, c in zip(plan.rendered.functions, compiled, strict=False)]
    if emit == "source":
        text: str | bytes = _standalone(kernel, plan) if output else plan.source
    else:
        text = _stage(compiled, emit, target)
    report[emit] = text if isinstance(text, str) else text.hex()
    _write(text, output, json.dumps(report) if as_json else None)


def _write_stage(program: str, emit: str, text: str, output: Path | None, as_json: bool) -> None:
    _write(text, output, json.dumps({"program": program, emit: text}) if as_json else None)


def _early(program: str, emit: str) -> str:
    from epigen import show
    from epigen.ir.check import check
    from epigen.ir.passes import normalise
    from epigen.lang.parser import parse

    parsed = parse(program)
    graph = normalise(check(parsed))
    return show.ast_text(parsed) if emit == "ast" else show.graph_text(graph)


def _start_compiling(plan: Plan, target: Target, layout: str) -> Running:
    from epigen.runtime.ahead import Job, Running

    return Running(Job(plan.rendered, target, layout))


def _resources(name: str, compiled: Compiled) -> dict[str, Any]:
    r = compiled.resources
    say(
        f"resources {name}: {r.registers} registers a thread, {r.spills} spilled, {r.shared_bytes} bytes of shared memory, {r.blocks_per_sm} block{'s' * (r.blocks_per_sm != 1)} a multiprocessor"
    )
    return {"name": name, "registers": r.registers, "spills": r.spills, "shared_bytes": r.shared_bytes, "blocks_per_sm": r.blocks_per_sm}


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

    return standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered)


def _verify(kernel: Kernel, plan: Plan, dtype: DType, precision: str, layout: str) -> dict[str, Any]:
    """Run the kernel of the plan at a shape with tails, on the GPU or under the interpreter, and say how far it is from the oracle."""
    import torch

    from epigen.codegen.schedules import in_triton
    from epigen.codegen.standalone import check_shape
    from epigen.runtime import verify
    from epigen.runtime.arguments import uninterpretable
    from epigen.runtime.kernel import Kernel

    on_gpu = torch.cuda.is_available()
    run, graph = dtype, kernel.graph
    twin = ""
    if not on_gpu and (wrong := uninterpretable(graph, [dtype], [o.dtype for o in plan.spec.outputs])):
        graph, run = _twin(graph), dtypes.FP16 if dtype == dtypes.BF16 or dtype.is_fp8 else dtype
        twin = f" (its twin with fp16 for {wrong}, which Triton's interpreter rounds wrongly: run it on a GPU for {wrong} itself)"
    config = plan.choice.config if on_gpu else in_triton(plan.choice.config)
    if config != plan.choice.config:
        twin += f" (its like in Triton's own language, {config}: Gluon cannot be interpreted)"
    shape = check_shape(plan.spec, config)
    chosen = plan.choice
    one = Kernel(graph, kernel.renderer, lambda *_: chosen, None, "triton" if on_gpu else "interpreter", precision)
    inputs = dtypes.FP32 if run.bits == 8 else run
    given = verify.sample(graph, shape, run, run, inputs, device="cuda" if on_gpu else "cpu", layout=layout)
    # the interpreter multiplies in full precision
    found = verify.differences(one, given, precision if on_gpu else "ieee")
    same = one.source() == plan.source
    how = torch.cuda.get_device_name() if on_gpu else "torch on the CPU" if plan.rendered.whole else "Triton's interpreter"
    for name, d in found.items():
        bits = next(o.packed for o in plan.spec.outputs if o.name == name)
        figures = (
            f"{1 - d.promised:.2%} of the bits lie within rounding of their threshold, the others are equal"
            if bits and d.ok
            else f"largest error {d.error:.3g}, bound {d.bound:.3g}"
        )
        say(f"verified  {name}: {figures}")
    say(f"          at {'x'.join(map(str, shape))} {run} under {how}, {'this very kernel' if same else 'the kernel'}{twin}, against float64")
    verify.demand(found)
    return {"backend": how, "shape": list(shape), "dtype": run.name, "same_source": same, "outputs": {n: _difference(d) for n, d in found.items()}}


def _twin(graph: Graph) -> Graph:
    """The program with fp16 for every dtype that the interpreter gets wrong."""
    from dataclasses import replace

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


@main.command("ops")
@click.option("--json", "as_json", is_flag=True, help="write one JSON object instead")
def ops_command(as_json: bool) -> None:
    """List the operations, with their formulas."""
    rows: list[tuple[str, str, str]] = []
    for op in ops.TABLE.values():
        params = [p.name for p in op.params]
        call = (
            f"{op.symbol}{params[0]}" if op.symbol and len(params) == 1 else f" {op.symbol} ".join(params) if op.symbol else f"{op.name}({', '.join(params)})"
        )
        rows.append((op.group, call, op.formula))
    rows += [("reduction", f"{r.name}(x, m | n), {r.name}(x), {r.name}(a | b, k)", r.formula) for r in ops.REDUCTIONS.values()]
    rows += [
        ("special", text.split(":")[0].split(" = ")[0], text.split(": ", 1)[1] if ": " in text else text.split(" = ", 1)[1]) for text in ops.SPECIAL.values()
    ]
    if as_json:
        click.echo(json.dumps([{"group": g, "call": c, "formula": f} for g, c, f in rows]))
        return
    width = max(len(call) for _, call, _ in rows)
    group = ""
    for row_group, call, formula in rows:
        if row_group != group:
            click.echo(f"{row_group}:")
            group = row_group
        click.echo(f"  {call:<{width}}  {formula}")


main.add_command(cli_db.db)
main.add_command(cli_explain.explain_command)
main.add_command(cli_info.info_command)
main.add_command(cli_tune.tune)

if __name__ == "__main__":
    main()
