"""A stand-alone file around a rendered module: the kernels, a plain launcher, and a self-check against torch.

The file needs torch and triton only. Its reference is the operation table's torch column, so what it checks against is what epigen's
own oracle computes.
"""

from __future__ import annotations

from epigen import ops
from epigen.codegen import schedules
from epigen.codegen.render import PDL, Argument, Function, Rendered, Renderer, arrivals, units
from epigen.codegen.schedules import SCHEDULES, parts
from epigen.codegen.spec import EXACT_INT8, LINE_BYTES, TMA_BYTES, Choice, KernelConfig, KernelSpec, number, parameter
from epigen.dtypes import BF16, FP32, INT8, DType
from epigen.ir import graph as g
from epigen.ir.graph import Graph

_COUNTED = {"parts_m": "tiles_m", "parts_n": "tiles_n", "1": "1"}
"""How many counters there are, as text over the launcher's variables; else one a tile, or two."""


def standalone(renderer: Renderer, graph: Graph, spec: KernelSpec, choice: Choice, rendered: Rendered) -> str:
    """The file's text."""
    heading, body = rendered.text.split("import torch\n" if rendered.whole else "import triton\n", 1)
    config, schedule = choice.config, SCHEDULES[choice.config.schedule]
    return renderer.text(
        "standalone.py.j2",
        spec=spec, choice=choice, graph=graph, heading=heading, body=body if rendered.whole else "import triton\n" + body, whole=rendered.whole,
        launcher=spec.name.removeprefix("epigen_"),
        launches=[_launch(spec, config, f) for f in rendered.functions],
        schedule=schedule, multiplies=schedule.multiplies, parts=parts(config), splits=schedules.splits(config), tiles=_tiles(config),
        counters=" + ".join(_COUNTED.get(name) or f"{'2 * ' * (name == 'groups')}{_tiles(config)}" for name in arrivals(spec, config)),
        block_m=config["block_m"], block_n=config["block_n"], block_k=dict(config.values).get("block_k", 32),
        brought=list(schedules.loaded_by_tma(spec, config)),
        words=[i.name for i in spec.inputs if i.name in units(spec, config)["in_words"]],
        padded=[a for f in rendered.functions[:1] for a in f.arguments if a.padded], tma_bytes=TMA_BYTES, line_bytes=LINE_BYTES, exact_int8=EXACT_INT8,
        check_shape=check_shape(spec, config), divisors=_divisors(spec, rendered), transposed=[t for t in "ab" if _transposed(spec, config, t)],
        reference=_reference(graph, spec), results=_results(graph), tolerance=_tolerance(graph, spec),
        interpretable=rendered.whole or (schedule.dialect == "triton" and not any(t == BF16 or t.is_fp8 for t in _dtypes(graph, spec))),
        packed_in=any(i.packed for i in spec.all_inputs), packed_out=any(o.packed for o in spec.outputs),
    )  # fmt: skip


def check_shape(spec: KernelSpec, config: KernelConfig) -> tuple[int, int, int]:
    """M, N, K that leave a tail in each where the kernel's text allows one, for a check of the kernel."""
    if SCHEDULES[config.schedule].descriptors:  # rows that TMA can address
        return config["block_m"] + TMA_BYTES, config["block_n"] + TMA_BYTES, 2 * config["block_k"] + TMA_BYTES
    divisors = dict(spec.signature.factors)

    def tail(odd: int, divisor: int) -> int:
        return divisor if divisor > 1 else odd

    block_k, multiple = dict(config.values).get("block_k", 32), spec.signature.k_multiple
    k = max(2 * block_k, 64) + (0 if multiple % block_k == 0 else tail(-3, multiple))
    return config["block_m"] + tail(3, divisors.get("M", 1)), config["block_n"] + tail(5, divisors.get("N", 1)), k


def _divisors(spec: KernelSpec, rendered: Rendered) -> dict[str, int]:
    """What the launcher divides without remainder, as text over its variables."""
    return {_argument(a.of, spec): a.factor for f in rendered.functions for a in f.arguments if a.of}


def _transposed(spec: KernelSpec, config: KernelConfig, operand: str) -> bool:
    """Whether the kernel takes it that this operand lies transposed."""
    if SCHEDULES[config.schedule].descriptors:
        return spec.signature.layout["ab".index(operand)] == "t"
    return f"stride_{operand}{'k' if operand == 'a' else 'n'}" in dict(spec.signature.factors)


def _dtypes(graph: Graph, spec: KernelSpec) -> list[DType]:
    named = [spec.signature.a, spec.signature.b, *(o.dtype for o in spec.outputs), *(i.dtype for i in spec.all_inputs)]
    return [t for t in (*named, *(n.dtype for n in graph.nodes)) if t is not None]


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
    options = [f"{n}={v}" for n, v in function.constants] + [f"{PDL}=pdl"]
    options += [f"num_warps={function.num_warps}", f"num_stages={function.num_stages}", "enable_fp_fusion=True"]
    return {"name": function.name, "grid": grid, "arguments": [_passed(a, spec, function.dialect) for a in function.arguments], "options": options}


def _tiles(config: KernelConfig) -> str:
    """How many output tiles there are, as text over the launcher's variables, which count parts of them."""
    return " * ".join(f"tiles_{i}{f' // {count}' if count > 1 else ''}" for i, count in zip("mn", parts(config), strict=True))


def _passed(argument: Argument, spec: KernelSpec, dialect: str) -> str:
    if argument.block:
        tensor, shared = argument.name.removesuffix("_desc"), ""
        if dialect == "gluon":
            held = {o.name: o.dtype for o in spec.outputs} | {i.name: i.dtype for i in spec.inputs if i.dtype is not None}
            element = held.get(tensor, spec.signature.a)
            shared = f", gl.NVMMASharedLayout.get_default_for({list(argument.block)}, gl.{element.triton})"
        tensor += "_padded" if argument.padded else ".T" * argument.transposed
        return f"TensorDescriptor.from_tensor({tensor}, {list(argument.block)}{shared})"
    return f"{_argument(argument.of, spec)} // {argument.factor}" if argument.of else _argument(argument.name, spec)


def _argument(name: str, spec: KernelSpec) -> str:
    if name.endswith("_ptr"):
        return name.removesuffix("_ptr")
    if name == "tiles":
        return "tiles_m * tiles_n"
    if name.startswith("stride_"):
        rest = name.removeprefix("stride_")
        if rest in ("am", "ak", "bk", "bn"):
            return f"{rest[0]}.stride({'mk'.find(rest[1]) if rest[0] == 'a' else 'kn'.find(rest[1])})"
        tensor, index = rest.rsplit("_", 1)
        indices = {"mm": "mn"} | {i.name: i.indices for i in spec.all_inputs} | {o.name: o.indices for o in spec.outputs}
        return f"{tensor}.stride({indices[tensor].find(index)})"
    return next((i.name for i in spec.all_inputs if parameter(i.name) == name), name)


def _reference(graph: Graph, spec: KernelSpec) -> list[str]:
    """The program in float64 torch, a line a node, in shapes that broadcast. No name of a user's begins with an underscore."""
    lines = []
    for number_, node in enumerate(graph.nodes):
        args = [f"_v{a}" for a in node.args]
        match node.op:
            case g.MM:
                text = "(a.double() @ b.double()).long().int().double()" if spec.signature.a == INT8 else "a.double() @ b.double()"
            case g.CONSTANT:
                text = f"torch.tensor({number(node.value)}, dtype=torch.float64, device=a.device)"
            case g.INPUT:
                text = (
                    f"{node.name}.double(){({'m': '[:, None]', 'n': '[None, :]'}).get(node.indices, '')}"
                    if node.indices
                    else f"torch.tensor(float({node.name}), dtype=torch.float64, device=a.device)"
                )
            case g.BITS:
                text = f"_unpack({node.name}, b.shape[1])"
            case g.OPERAND:
                text = f"{node.name}.double()"
            case g.CAST:
                assert node.dtype is not None
                low = -128.0 if not node.dtype.is_float else -node.dtype.largest
                clamped = f"{args[0]}.clamp({low}, {node.dtype.largest})" if node.dtype.bits == 8 else args[0]
                text = f"{clamped}{'.round()' if not node.dtype.is_float else '.float()'}.to(torch.{node.dtype.torch}).double()"
            case g.BITMASK:
                text = args[0]
            case g.REDUCE:
                dims = {"m": "0", "n": "1", "mn": "(0, 1)", "k": "1" if node.indices == "m" else "0"}[node.axes]
                text = ops.REDUCTIONS[node.name].torch.format(x=args[0], dim=f"{dims}, keepdim=True")
            case _:
                op = ops.TABLE[node.op]
                text = op.torch.format(**{p.name: a for p, a in zip(op.params, args, strict=True)})
        lines.append(f"_v{number_} = {text}")
    return lines


def _results(graph: Graph) -> list[str]:
    shapes = {"mn": ".expand(a.shape[0], b.shape[1])", "m": ".reshape(-1)", "n": ".reshape(-1)", "": ".reshape(())"}
    results = []
    for output in graph.outputs:
        text = f"_v{output.node}{shapes[graph.nodes[output.node].indices]}"
        if output.dtype is not None and output.dtype.bits == 8:  # 8-bit outputs saturate
            text += f".clamp({-128.0 if output.dtype == INT8 else -output.dtype.largest}, {output.dtype.largest})"
        results.append(text)
    return results


def _tolerance(graph: Graph, spec: KernelSpec) -> list[float]:
    """Relative (and, near 0, absolute) error allowed to each output: its own rounding and the casts' within, and fp32 arithmetic's."""
    inner = max([1e-4 if spec.signature.precision == "ieee" else 4e-3, *(n.dtype.epsilon for n in graph.nodes if n.dtype is not None)])
    own = {INT8: 0.5, FP32: 0.0}  # int8 is off by up to half a step of 1
    return [max(inner, own.get(o.dtype, o.dtype.epsilon)) for o in spec.outputs]
