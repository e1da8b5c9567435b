"""The stages before source as text, for `epigen compile --emit ast | ir | lowered`."""

from __future__ import annotations

from epigen.codegen import emit
from epigen.codegen.spec import Input, KernelSpec, OverK
from epigen.ir.graph import Graph, describe_indices
from epigen.lang.syntax import Assign, Call, Expr, Name, Number, Power, Program, declared_text, number_text


def ast_text(program: Program) -> str:
    """The untyped tree, a node a line, indented by depth."""
    lines: list[str] = []
    for assign in program.assigns:
        lines.append(f"assign {assign.name}" if isinstance(assign, Assign) else f"{assign.way} {' '.join(assign.names)}")
        _tree(assign.value, 1, lines)
    for output in program.outputs:
        lines.append("output")
        _tree(output, 1, lines)
    return "\n".join(lines) + "\n"


def _tree(expr: Expr, depth: int, lines: list[str]) -> None:
    indent = "  " * depth
    match expr:
        case Number(value):
            lines.append(f"{indent}number {number_text(value)}")
        case Name(name, _, indices):
            lines.append(f"{indent}name {name}{'' if indices is None else '[' + ','.join(indices) + ']'}")
        case Power(base, exponent):
            lines.append(f"{indent}power {exponent}")
            _tree(base, depth + 1, lines)
        case Call(function, args, _, keywords):
            lines.append(f"{indent}call {function}")
            for arg in args:
                _tree(arg, depth + 1, lines)
            for key, argument in keywords:
                lines.append(f"{indent}  {key}=")
                _tree(argument, depth + 2, lines)


def graph_text(graph: Graph) -> str:
    """The typed graph, a node a line: number, operation, arguments, kind and indices."""
    lines = []
    for number, node in enumerate(graph.nodes):
        detail = [f"%{a}" for a in node.args]
        if node.op == "constant":
            detail.append(number_text(node.value))
        detail += [part for part in (node.name, node.axes and f"over {node.axes}", node.dtype and str(node.dtype)) if part]
        label = f"  # {node.label}" if node.label else ""
        lines.append(f"%{number} = {node.op}({', '.join(detail)}): {node.kind} {describe_indices(node.indices)}{label}")
    lines += [f"output {o.name} = %{o.node}{f' as {o.dtype}' if o.dtype else ''}" for o in graph.outputs]
    return "\n".join(lines) + "\n"


def spec_text(spec: KernelSpec) -> str:
    """The lowered kernels: what each loads, computes and stores."""
    sig = spec.signature
    lines = [
        f"kernel {spec.name}",
        f"  product a {sig.a} x b {sig.b} -> {spec.accumulator}" + (f" ({precision})" if (precision := sig.a.precision(sig.precision)) else ""),
    ]
    lines += [f"  k divisible by {sig.k_multiple}, {sig.index_bits}-bit offsets", *(f"  {name} divisible by {factor}" for name, factor in sig.factors)]
    lines += [f"  {name} in bytes" for name in sig.bytewise]
    for operand in spec.computed:
        lines += _loads(operand.inputs)
        lines += [f"  read {operand.packed} of {operand.name}, two in a byte along {sig.packed}"] if operand.packed else []
        lines += [f"  {emit.line(line)}" for line in (*operand.once, *operand.lines)]
        lines.append(f"  multiply {operand.value} for {operand.name} as {sig.multiplied[operand.name]}")
    for over_k in spec.carried:
        lines += _over_k(over_k)
        lines.append(f"  carry {over_k.name} = {over_k.row} of {over_k.value} over k")
    lines += _loads(spec.inputs)
    lines += [f"  {emit.line(line)}" for line in spec.lines]
    lines += [f"  store {s.name}[{','.join(s.indices)}] = {s.value} as {'bits' if s.packed else s.dtype}" for s in (*spec.stores, *spec.vectors)]
    lines += [f"  partial {p.name} = {p.row} of {p.value} over {p.axes}" for p in spec.partials]
    for finish in spec.finishes:
        lines.append(f"finish [{','.join(finish.indices)}]")
        for s in finish.sources:
            lines += _over_k(s.over_k) if s.over_k else []
            of = f"{s.over_k.value} over k" if s.over_k else f"operand {s.operand} over k" if s.operand else "the tiles partial results"
            lines.append(f"  {s.name} = {s.row} of {of}")
        lines += _loads(finish.inputs)
        lines += [f"  {emit.line(line)}" for line in finish.lines]
        lines += [f"  store {s.name} = {s.value} as {s.dtype}" for s in finish.stores]
    return "\n".join(lines) + "\n"


def _over_k(over_k: OverK) -> list[str]:
    return [*_loads(over_k.inputs), *(f"  {emit.line(line)}" for line in (*over_k.once, *over_k.lines))]


def _loads(inputs: tuple[Input, ...]) -> list[str]:
    return [f"  load {i.name}[{declared_text(i.indices, i.periods, i.blocks)}] {'bits' if i.packed else i.dtype or 'number'}" for i in inputs]
