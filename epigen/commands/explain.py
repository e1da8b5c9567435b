"""`epigen explain`: what bounds a kernel, which config it gets and why, without running anything. `cli` attaches it to its group."""

from __future__ import annotations

import json
from typing import Any

import click

from epigen import dtypes
from epigen.commands import derivation as cli_derivation
from epigen.commands.types import Extents, Program, ProgramCommand, dtype_option, numerics_options, pass_machine, weight_option
from epigen.runtime.device import Machine
from epigen.shapes import Shape


@click.command("explain", cls=ProgramCommand, short_help="Explain what bounds a program, and its config.")
@click.argument("program", type=Program())
@click.option("--shape", type=Extents(), required=True, help="M, N and K, of a batch after the number of its products")
@dtype_option
@weight_option
@click.option("--layout", default="nn", show_default=True, type=click.Choice(["nn", "nt", "tn", "tt"]), help="how a and b lie: n row-major, t transposed")
@numerics_options
@click.option("--gpu", "gpu_name", help="a GPU by name, such as H200 or 'RTX 4090' (default: the GPU at hand, else H200)")
@click.option("--json", "as_json", is_flag=True, help="write one JSON object instead")
@pass_machine
def explain_command(
    machine: Machine, program: str, shape: Shape, dtype_name: str, weight_name: str | None, layout: str, numerics: dict[str, Any], gpu_name: str | None, as_json: bool
) -> None:  # fmt: skip
    """Explain what bounds PROGRAM, such as "relu(mm + bias)", at a shape: work, limits, config, waste, what fusing saves, and its derivative."""
    from epigen import api, gpus
    from epigen.choose import explain

    kernel = api.compile(program, **numerics)
    # a GPU at hand stays what its driver calls it: that name is in the database's key
    if gpu_name is not None:
        gpu, why = gpus.by_name(gpu_name), "as asked"
        target = gpu.target
    elif (at_hand := machine.at_hand()) is not None:
        gpu, why, target = gpus.of_target(at_hand), "the GPU at hand", at_hand
    else:
        gpu, why = gpus.DEFAULT, "the default, since no GPU is at hand"
        target = gpu.target
    signature = kernel.signature_of(dtypes.BY_NAME[dtype_name], shape, layout, dtypes.WEIGHT_BY_NAME[weight_name] if weight_name else None)
    plan = kernel.plan(shape, target=target, signature=signature)
    explained = explain.explain(plan.spec, shape, gpu, plan.choice, gpu_why=why)
    rows, record = cli_derivation.explained(program, shape, dtype_name)
    click.echo(json.dumps(explain.record(explained) | {"backward": record}) if as_json else explain.text(explained, rows), nl=as_json)
