"""A stand-alone file around a rendered module: the kernels, a plain launcher, and a self-check against torch.

The file needs torch and triton only. Its launcher refuses, in words, what the kernel was not made for: other dtypes, extents and devices, offsets
past its width, GPUs that it does not run on. What the file itself names, beside what no program may name, begins with an underscore: no input or
output does. Its reference is the operation table's torch column, so what it checks against is what epigen's own oracle computes.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from epigen import ops
from epigen.codegen import emit, schedules
from epigen.codegen.functions import PDL, PTX, Argument, Function, arrivals, units
from epigen.codegen.lower import as_computed, uninterpretable
from epigen.codegen.render import Rendered, Renderer
from epigen.codegen.schedules import SCHEDULES, Schedule, tile_parts
from epigen.codegen.spec import EXACT_INT8, LINE_BYTES, MOST_POSITIONS, PAST, TMA_BYTES, Choice, KernelConfig, KernelSpec, number, parameter, period_name
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT4, INT8, DType
from epigen.errors import ConfigError
from epigen.ir import graph as g
from epigen.ir import nibbles, passes, philox
from epigen.ir.graph import Graph
from epigen.ir.parting import Parting

_COUNTED = {"parts_m": "tiles_m", "parts_n": "tiles_n", "1": "1"}
"""How many counters there are, as text over the launcher's variables; else one a tile, or two."""

_BESIDE = {"m": "[:, None]", "n": "[None, :]"}
"""Of each index of the result, as text: what makes a vector along it broadcast."""


def standalone(renderer: Renderer, graph: Graph, spec: KernelSpec, choice: Choice, rendered: Rendered, parting: Parting | None = None) -> str:
    """The file's text. parting: what the program was written with in place of parts. Raises ConfigError for a kernel of several products."""
    if spec.signature.batched:
        raise ConfigError("a file of its own computes one product: compile for M, N and K without a number of products")
    graph = passes.with_leaf(as_computed(graph, spec.signature) if spec.signature.rounding else graph)
    heading, body = rendered.text.split("import torch\n" if rendered.whole else "import triton\n", 1)
    config, schedule = choice.config, SCHEDULES[choice.config.schedule]
    return renderer.text(
        "standalone.py.j2",
        spec=spec, choice=choice, graph=graph, heading=heading, body=body if rendered.whole else "import triton\n" + body, whole=rendered.whole,
        launcher=spec.name.removeprefix("epigen_"), parting=parting,
        given=parting.as_given(i.name for i in spec.all_inputs) if parting else (), returned=parting.as_returned(o.name for o in spec.outputs) if parting else (),
        launches=[_launch(spec, config, f) for f in rendered.functions],
        schedule=schedule, multiplies=schedule.multiplies, parts=tile_parts(config), splits=schedules.splits(config), tiles=_tiles(config),
        counters=" + ".join(_COUNTED.get(name) or f"{'2 * ' * (name == 'groups')}{_tiles(config)}" for name in arrivals(spec, config)),
        block_m=config["block_m"], block_n=config["block_n"], block_k=dict(config.values).get("block_k", 32),
        words=[i.name for i in spec.inputs if i.name in units(spec, config)["in_words"]],
        positions=graph.positions().upper(), most_positions=MOST_POSITIONS, tma_bytes=TMA_BYTES, line_bytes=LINE_BYTES, exact_int8=EXACT_INT8, past=PAST, nonempty=_nonempty(spec, config),
        check_shape=check_shape(spec, config), divisors=_divisors(spec, config, rendered), transposed=[t for t in "ab" if _transposed(spec, config, t)],
        reference=_reference(graph, spec), random=_random(graph), nibbles=_unpacking(graph), results=_results(graph), tolerance=_tolerance(graph, spec),
        **_where(graph, spec, schedule, rendered.whole), setting=_setting(spec),
        packed_in=any(i.packed for i in spec.all_inputs), packed_out=any(o.packed for o in spec.outputs),
    )  # fmt: skip


def check_shape(spec: KernelSpec, config: KernelConfig) -> tuple[int, int, int]:
    """M, N, K that leave a tail in each where the kernel's text allows one, for a check of the kernel."""
    if spec.signature.packed:  # two values in a byte
        return (
            config["block_m"] + 3,
            config["block_n"] + 6,
            2 * config["block_k"] + (0 if spec.signature.k_multiple % config["block_k"] == 0 else spec.signature.k_multiple + spec.signature.k_multiple % 2),
        )
    if SCHEDULES[config.schedule].descriptors:  # rows that TMA can address
        return config["block_m"] + TMA_BYTES, config["block_n"] + TMA_BYTES, 2 * config["block_k"] + TMA_BYTES
    divisors = dict(spec.signature.factors)

    def tail(odd: int, divisor: int) -> int:
        return divisor if divisor > 1 else odd

    block_k, multiple = dict(config.values).get("block_k", 32), spec.signature.k_multiple
    k = max(2 * block_k, 64) + (0 if multiple % block_k == 0 else tail(-3, multiple))
    return config["block_m"] + tail(3, divisors.get("M", 1)), config["block_n"] + tail(5, divisors.get("N", 1)), k


def _where(graph: Graph, spec: KernelSpec, schedule: Schedule, whole: bool) -> dict[str, Any]:
    """Where the file runs: the GPUs that its kernel needs, if not all will do, and whether Triton's interpreter can run it.

    needs, capability: what the only GPUs are called, and a comparison of theirs. nvidia_from: the least compute capability, of NVIDIA's.
    """
    rounded = uninterpretable(graph, [spec.signature.a, spec.signature.b, *(i.dtype for i in spec.all_inputs)], [o.dtype for o in spec.outputs])
    by_libdevice = emit.by_libdevice(spec)
    interpretable = whole or (schedule.dialect == "triton" and rounded is None and not by_libdevice)
    needs = capability = ""
    if schedule.capabilities is not None:
        least, only = schedule.capabilities.start, len(schedule.capabilities) == 1
        needs = f"an NVIDIA GPU of compute capability {least // 10}.{least % 10}{' (Hopper)' if only else ' or later'}"
        capability = f"{'==' if only else '>='} {divmod(least, 10)}"
    fp8 = FP8E4M3 in (*(t for t in (spec.signature.a, spec.signature.b)), *(o.dtype for o in spec.outputs), *(n.dtype for n in graph.nodes))
    why = "it is written in Gluon, which Triton's interpreter cannot run (epigen compile --schedule tiled makes one that it can)"
    if schedule.dialect == "triton":
        why = f"Triton's interpreter {'has no libdevice' if by_libdevice else f'rounds to {rounded} wrongly'}"
    beside = "" if not interpretable else ", or without one on the CPU" if whole else ", or without one under Triton's interpreter"
    return {
        "interpretable": interpretable, "needs": needs, "capability": capability, "nvidia_from": (8, 9) if fp8 else (), "no_interpreter": why,
        "runs": f"on {needs or 'a GPU'}{beside}",
    }  # fmt: skip


def _setting(spec: KernelSpec) -> tuple[str, str] | None:
    """The setting of torch's products that sums in fp32 want, if one does: else the vendor may round what it adds."""
    sig = spec.signature
    if sig.a == FP32:
        return "fp32_precision", f'"{sig.precision}"'
    return (f"allow_{sig.a}_reduced_precision_reduction", "False") if sig.a in (FP16, BF16) else None


def _nonempty(spec: KernelSpec, config: KernelConfig) -> list[str]:
    """The extents of which none may be 0."""
    if SCHEDULES[config.schedule].descriptors:
        return ["M", "N", "K"]
    return ["M", "N"] if any(schedules.finished_inside(f, config) for f in spec.finishes) else []


def _divisors(spec: KernelSpec, config: KernelConfig, rendered: Rendered) -> dict[str, int]:
    """What the launcher divides without remainder, and rows that are stored by TMA, as text over its variables."""
    divisors = {_argument(a.of, spec): a.factor for f in rendered.functions for a in f.arguments if a.of}
    stored = [TMA_BYTES // s.dtype.bytes for s in spec.stores if s.name in schedules.tma_stored(spec, config)]
    return divisors | ({"N": max(stored)} if stored else {})


def _transposed(spec: KernelSpec, config: KernelConfig, operand: str) -> bool:
    """Whether the kernel takes it that this operand lies transposed."""
    if SCHEDULES[config.schedule].descriptors:
        return spec.signature.layout["ab".index(operand)] == "t"
    return f"stride_{operand}{'k' if operand == 'a' else 'n'}" in dict(spec.signature.factors)


def _launch(spec: KernelSpec, config: KernelConfig, function: Function) -> dict[str, object]:
    """Grid and arguments of one launch, as text over the launcher's variables."""
    if function.finish is None:
        splits = schedules.splits(config)
        grid = f"{_tiles(config)}{f' * {splits}' if splits > 1 else ''}"
        grid = f"min({grid}, num_programs)" if SCHEDULES[config.schedule].persistent else grid
    elif function.finish.indices:
        grid = f"triton.cdiv({function.finish.indices.upper()}, {dict(function.constants)['BLOCK_X']})"
    else:
        grid = "1"
    options = [f"{n}={v}" for n, v in function.constants] + [f"{PTX}=a.is_cuda and torch.version.hip is None"] * function.ptx + [f"{PDL}=False"]
    options += [f"num_warps={function.num_warps}", f"num_stages={function.num_stages}", f"enable_fp_fusion={function.contracted}"]
    return {"name": function.name, "grid": grid, "arguments": [_passed(a, spec, function.dialect) for a in function.arguments], "options": options}


def _tiles(config: KernelConfig) -> str:
    """How many output tiles there are, as text over the launcher's variables, which count parts of them."""
    return " * ".join(f"tiles_{i}{f' // {count}' if count > 1 else ''}" for i, count in zip("mn", tile_parts(config), strict=True))


def _passed(argument: Argument, spec: KernelSpec, dialect: str) -> str:
    if argument.block:
        tensor = argument.name.removesuffix("_desc")
        written = {o.name: o.dtype for o in spec.outputs}
        held = {"a": spec.signature.a, "b": spec.signature.b} | {i.name: i.dtype for i in spec.all_inputs if i.dtype is not None} | written
        element = f", gl.{held[tensor].triton}" if dialect == "gluon" else ""
        rows = tensor if tensor in written else f"_aligned({tensor}{'.T' * argument.transposed})"
        return f"_described({rows}, {list(argument.block)}{element})"
    return f"{_argument(argument.of, spec)} // {argument.factor}" if argument.of else _argument(argument.name, spec)


def _argument(name: str, spec: KernelSpec) -> str:
    if name.endswith("_ptr"):
        return name.removesuffix("_ptr")
    if name == "tiles":
        return "tiles_m * tiles_n"
    if name.startswith("num_") and (begun := next((i for i in spec.all_inputs if name in [period_name(i.name, x) for x in i.indices]), None)):
        return f"{begun.name}.shape[{begun.indices.find(name[-1])}]"
    if name.startswith("stride_"):
        rest = name.removeprefix("stride_")
        if rest in ("am", "ak", "bk", "bn"):
            return f"{rest[0]}.stride({'mk'.find(rest[1]) if rest[0] == 'a' else 'kn'.find(rest[1])})"
        tensor, index = rest.rsplit("_", 1)
        indices = {"mm": "mn"} | {i.name: i.indices for i in spec.all_inputs} | {o.name: o.indices for o in spec.outputs}
        return f"{tensor}.stride({indices[tensor].find(index)})"
    return next((i.name for i in spec.all_inputs if parameter(i.name) == name), name)


def _random(graph: Graph) -> str:
    """The functions by which the reference draws random numbers, if it does."""
    if not any(n.op == g.UNIFORM for n in graph.nodes):
        return ""
    functions = [inspect.getsource(f) for f in (philox.philox, philox.random_numbers)]
    return re.sub(r"\b(philox|random_numbers)\(", r"_\1(", "\n\n".join(functions))


def _unpacking(graph: Graph) -> str:
    """The function by which the reference reads two values of a byte, if it does."""
    return inspect.getsource(nibbles.unpack).replace("def unpack(", "def _unpack4(") if graph.packed() else ""


def _extents(graph: Graph) -> dict[str, str]:
    """Of each index, as text: how many there are."""
    return {"m": "a.shape[0]", "n": f"b.shape[1]{' * 2' * (graph.packed_along() == 'n')}", "k": "a.shape[1]"}


def _reference(graph: Graph, spec: KernelSpec) -> list[str]:
    """The program in float64 torch, a line a node, in shapes that broadcast. No name of a user's begins with an underscore."""
    lines, extents = [], _extents(graph)
    for number_, node in enumerate(graph.nodes):
        # where rows lie along k, what varies along k alone is a column
        args = [f"_v{a}{'[:, None]' * ((node.indices, graph.nodes[a].indices) == ('kn', 'k'))}" for a in node.args]
        match node.op:
            case g.DOT:
                left, right = (_multiplied(graph, i, dtype) for i, dtype in zip(node.args, spec.signature.multiplied.values(), strict=True))
                text = f"{left} @ {right}"
            case g.PRODUCT:
                text = "(a.double() @ b.double()).long().int().double()" if spec.signature.a == INT8 else "a.double() @ b.double()"
            case g.CONSTANT:
                text = f"torch.tensor({number(node.value)}, dtype=torch.float64, device=a.device)"
            case g.EXTENT:
                text = f"torch.tensor(float({extents[node.name]}), dtype=torch.float64, device=a.device)"
            case g.POSITION:
                text = f"torch.arange({extents[node.name]}, device=a.device).double(){_BESIDE[node.name]}"
            case g.UNIFORM:
                rows, columns = (f"torch.arange({extents[index]}, device=a.device)" for index in node.indices)
                text = f"_random_numbers({args[0]}, {rows}, {columns}, 0)"
            case g.INPUT if node.kind == g.SEED:
                text = node.name
            case g.INPUT if node.periods or node.blocks:
                text = f"{node.name}.double()"
                for dim, (index, period) in enumerate(zip(node.indices, node.periods, strict=False)):
                    if period:
                        text += f".index_select({dim}, torch.arange({extents[index]}, device=a.device) % {node.name}.shape[{dim}])"
                for dim, (index, block) in enumerate(zip(node.indices, node.blocks, strict=False)):
                    if block > 1:
                        text += f".index_select({dim}, torch.arange({extents[index]}, device=a.device) // {block})"
                text += _BESIDE.get(node.indices, "")
            case g.INPUT:
                text = (
                    f"{node.name}.double(){_BESIDE.get(node.indices, '')}"
                    if node.indices
                    else f"torch.tensor(float({node.name}), dtype=torch.float64, device=a.device)"
                )
            case g.BITS:
                text = f"_unpack({node.name}, {extents['n']})"
            case g.OPERAND if node.dtype is not None:
                text = f"_unpack4(b, {node.indices.index(node.axes)}, {node.dtype == INT4}).double()"
            case g.OPERAND:
                text = f"{node.name}.double()"
            case g.CAST:
                assert node.dtype is not None
                low = -128.0 if not node.dtype.is_float else -node.dtype.largest
                clamped = f"{args[0]}.clamp({low}, {node.dtype.largest})" if node.dtype.bits == 8 else args[0]
                text = f"{clamped}{'.round()' if not node.dtype.is_float else '.float()'}.to(torch.{node.dtype.torch}).double()"
            case g.BITMASK:
                text = args[0]
            case g.BLOCKWISE:
                block, row = node.blocks[-1], ops.REDUCTIONS[node.name]
                whole = f"{args[0]}.expand(a.shape[0], {extents['n']})"
                padded = f"torch.nn.functional.pad({whole}, (0, -({extents['n']}) % {block}), value={row.identity})"
                text = row.torch.format(x=f"{padded}.unflatten(1, (-1, {block}))", dim="2, keepdim=True")
                text = f"{text}.expand(-1, -1, {block}).flatten(1)[:, : {extents['n']}]"
            case g.REDUCE:
                dims = {"m": "0", "n": "1", "mn": "(0, 1)", "k": "1" if node.indices == "m" else "0"}[node.axes]
                text = ops.REDUCTIONS[node.name].torch.format(x=args[0], dim=f"{dims}, keepdim=True")
            case _:
                op = ops.TABLE[node.op]
                text = op.torch.format(**{p.name: a for p, a in zip(op.params, args, strict=True)})
        lines.append(f"_v{number_} = {text}")
    return lines


def _multiplied(graph: Graph, number: int, dtype: DType) -> str:
    """An operand in float64, as it is given, or as it is computed and rounded. dtype: its own."""
    node = graph.nodes[number]
    return f"{node.name}.double()" if g.is_given(node) else f"_v{number}.to(torch.{dtype.torch}).double()"


def _results(graph: Graph) -> list[str]:
    shapes = {"mn": f".expand(a.shape[0], {_extents(graph)['n']})", "m": ".reshape(-1)", "n": ".reshape(-1)", "": ".reshape(())"}
    results = []
    for output in graph.outputs:
        text = f"_v{output.node}{shapes[graph.nodes[output.node].indices]}"
        text += f"[:, :: {output.block}]" if output.block > 1 else ""
        if output.dtype is not None and output.dtype.bits == 8:  # 8-bit outputs saturate
            text += f".clamp({-128.0 if output.dtype == INT8 else -output.dtype.largest}, {output.dtype.largest})"
        results.append(text)
    return results


def _tolerance(graph: Graph, spec: KernelSpec) -> list[float]:
    """Relative (and, near 0, absolute) error allowed to each output: its own rounding and the casts' within, and fp32 arithmetic's. What lies next to where it
    is rounded otherwise may be rounded otherwise at each cast that eager torch has."""
    casts = [n.dtype for n in graph.nodes if n.dtype is not None] + [spec.signature.a] * bool(spec.computed)
    inner = max([1e-4 if spec.signature.precision == "ieee" else 4e-3, *(dtype.epsilon for dtype in casts)]) * (
        max(1, len(casts)) if spec.signature.rounding else 1
    )
    own = {INT8: 0.5, FP32: 0.0}  # int8 is off by up to half a step of 1
    return [max(inner, own.get(o.dtype, o.dtype.epsilon)) for o in spec.outputs]
