"""Graph and signature -> KernelSpec: chooses dtypes and names, and parts the work into the main kernel and finishing kernels.

Requires a normalised graph. Ensures that every name is used, and that a line's arguments are named above it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from epigen import ops
from epigen.codegen.spec import (
    CAST,
    LEAST_OF_BYTES,
    POSITION,
    TMA_BYTES,
    UNIFORM,
    WIDEN,
    Arg,
    Finish,
    Input,
    KernelSpec,
    Line,
    Operand,
    OverK,
    Partial,
    Signature,
    Source,
    Store,
    accumulator,
    contiguous,
    counted,
    digest,
    factors,
    index_bits,
    k_multiple,
    offsets,
    parameter,
    row_lengths,
)
from epigen.dtypes import BF16, FP32, FP64, INT8, INT32, OPERANDS, UINT8, WEIGHTS, DType, multiplied_as
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir.eager import as_eager, product_dtype
from epigen.ir.graph import Graph, Node, Output
from epigen.ir.passes import order, rounded
from epigen.shapes import Shape

_LONGEST_NAME = 60


def lower(graph: Graph, signature: Signature) -> KernelSpec:
    """Raises CallError where the operands' dtypes cannot be multiplied, or nothing can be computed of them."""
    check_operands(signature.a, signature.b)
    check_computed(graph, signature.a)
    check_packed(graph, signature.a, signature.b)
    signature = replace(signature, packed=graph.packed_along())
    graph = as_computed(graph, signature)
    body = _Body(graph, signature)
    stores = [_store(graph, output, body) for output in graph.outputs]
    reduced = [graph.nodes[o.node].reduced for o in graph.outputs]
    finishes, partials, roots, zero = [], [], [], _zero_below(graph)
    names = graph.vectors()
    vectors = [i for i, o in enumerate(graph.outputs) if o.name in names]
    past_k = _zero_past_k(graph)
    for indices in ("n", "m", ""):
        chosen = [i for i, s in enumerate(stores) if reduced[i] and s.indices == indices and i not in vectors]
        if chosen:
            nodes = [graph.outputs[i].node for i in chosen]
            finishes.append(_finish(body, indices, nodes, tuple(stores[i] for i in chosen), past_k))
            reductions = [n for n in _reached(graph, nodes, through=True) if graph.nodes[n].op == g.REDUCE and graph.nodes[n].axes != "k"]
            partials += [_partial(graph, n, body, zero) for n in reductions]
            roots += [graph.nodes[n].args[0] for n in reductions]
    tiles = [i for i in range(len(stores)) if not reduced[i]]
    roots += [_stored_node(graph, graph.outputs[i]) for i in tiles if stores[i].dtype != INT32] + [graph.outputs[i].node for i in vectors]
    inputs, lines = body.lines(roots)
    # what is there first is stored first: its copy is on the way while the others are computed
    computed: dict[Arg, int] = {line.name: i for i, line in enumerate(lines)}
    return KernelSpec(
        name=kernel_name(graph.text),
        program=graph.text,
        signature=signature,
        operands=_operands(graph, body, past_k),
        inputs=inputs,
        lines=lines,
        stores=tuple(sorted((stores[i] for i in tiles), key=lambda s: computed.get(s.value, -1))),
        partials=tuple(partials),
        finishes=tuple(finishes),
        outputs=tuple(stores),
        longest_block=max([1, *(line.block for line in lines)]),
        second=None if (second := graph.second()) is None else Input(second.name, second.indices, dict(signature.inputs)[second.name], False),
        carried=tuple(_over_k(body, number, past_k) for number in graph.carried()),
        vectors=tuple(stores[i] for i in vectors),
    )


def as_computed(graph: Graph, signature: Signature) -> Graph:
    """What is computed of a program: with a cast wherever eager torch rounds, or with rows in their form for 16 bits where no more is seen of them."""
    if signature.rounding:
        return as_eager(graph, signature.a, signature.b, dict(signature.inputs))
    return rounded(graph, [output_dtype(graph, o, signature.a) for o in graph.outputs])


def signature_of_contiguous(
    graph: Graph, a: DType, b: DType, inputs: tuple[tuple[str, DType | None], ...], shape: Shape, layout: str, precision: str, groups: str = ""
) -> Signature:
    """The signature of a call whose tensors lie in memory without gaps. layout: how a and b lie. groups: the index along which several products are groups.

    Of several products vectors are the same for all, and each has operands, tiles and masks of its own.
    """
    m, n, k = one = shape[-3:]
    tiles, second = set(graph.tiles()), graph.second()
    inputs = tuple((name, b if second and name == second.name else dtype) for name, dtype in inputs)
    lengths = row_lengths(one, layout)
    along = "n" if layout[1] == "n" else "k"
    rows = {"a": lengths[0] * a.bytes, "b": lengths[1] * b.bytes // (2 if graph.packed_along() == along else 1)}
    rows |= {name: n * dtype.bytes for name, dtype in inputs if dtype is not None and name in tiles}
    scales = {node.name for node in graph.scales()}
    rows |= {name: n * dtype.bytes for name, dtype in inputs if dtype is not None and name in scales}
    rows |= {o.name: n * output_dtype(graph, o, a).bytes for o in graph.outputs if describable(graph, o)}
    if second:  # it lies as b does
        rows[second.name] = rows["b"]
    tma = tuple(name for name, row_bytes in rows.items() if row_bytes % TMA_BYTES == 0 and 0 not in shape)
    masks = [m * g.mask_stride(n)] if any(graph.nodes[o.node].kind == g.PACKED for o in graph.outputs) else []
    bits = index_bits(one, (m * n, m * k, k * n, *masks))
    matrices = [n for n in graph.inputs() if n.indices in g.OPERANDS.values() or (len(n.indices) == 2 and g.shared_along(n))]
    beside = [(n.name, n.indices, _held(n, one)[1]) for n in matrices]
    batched = len(shape) == 4
    held = contiguous(one, layout, graph.tiles(), beside, graph.packed_along())
    divisors = factors(one, held, _apart(graph, one) if batched else {})
    return Signature(a, b, inputs, precision, 1 if groups == "k" else k_multiple(k), bits, layout, tma, divisors, batched=batched, grouped=groups)


def _apart(graph: Graph, shape: tuple[int, int, int]) -> dict[str, int]:
    """Of each tensor, the elements from one product's to the next one's."""
    m, n, k = shape
    sizes = {"mk": m * k, "kn": k * n, "mn": m * n, "m": m, "n": n, "": 1}
    apart = {name: sizes[indices] for name, indices in g.OPERANDS.items()} | {g.PRODUCT: m * n}
    apart["b"] //= 2 if graph.packed() else 1
    apart |= {i.name: m * g.mask_stride(n) if i.op == g.BITS else math.prod(_held(i, shape)) for i in graph.inputs() if len(i.indices) == 2}
    held = [(o.name, graph.nodes[o.node]) for o in graph.outputs]
    return apart | {name: m * g.mask_stride(n) if node.kind == g.PACKED else sizes[node.indices] for name, node in held}


def _held(node: Node, shape: tuple[int, int, int]) -> tuple[int, ...]:
    """An input's extents in a call of this shape."""
    return g.held(node.indices, node.blocks, dict(zip("mnk", shape, strict=True)))


def check_grouped(graph: Graph, along: str, invariant: bool = False) -> None:
    """Whether a program can be taken of groups along an index, "m" or "k", or "" where that is not known yet. Raises CallError."""
    if invariant:
        raise CallError("the program is invariant, and groups have no order of sums that is kept for all M: compile it without invariant")
    for node in graph.nodes:
        if node.op == g.EXTENT and node.name == along:
            raise CallError(f"the program computes with the number of {'rows' if along == 'm' else 'k'}, and each group has another: pass it as an input")
        if along == "k" and "k" in g.shared_along(node) and node.op == g.INPUT:
            raise CallError(f"input '{node.name}' has one value for several of k, and groups along k begin anywhere: expand it along k")
    if along == "k" and graph.packed():
        raise CallError("the program reads two values of operand b in a byte, and groups along k begin anywhere: unpack b")


def over_product(graph: Graph) -> Graph:
    """The program with the product as an input, `mm`, in place of the operands. Raises CallError where it needs them besides."""
    for node in graph.nodes:
        if node.op == g.REDUCE and node.axes == "k":
            operand = "a" if node.indices == "m" else "b"
            raise CallError(f"the program reduces operand {operand} over k, and a product that is given has no operands: call the kernel with a and b")
        if node.op == g.EXTENT and node.name == "k":
            raise CallError("the program computes with the number of k, and a product that is given has none: call the kernel with a and b")
    if computed := graph.computed():
        raise CallError(
            f"the program multiplies what it computes of operand {computed[0]}, and a product that is given has no operands: call the kernel with a and b"
        )
    if second := graph.second():
        raise CallError(
            f"the program has a second product, of a and {second.name}, and one product that is given does not give it: call the kernel with a and b"
        )
    nodes = tuple(replace(n, op=g.INPUT, args=(), name=g.PRODUCT) if n.op == g.DOT else n for n in graph.nodes)
    return order(replace(graph, nodes=nodes))


def describable(graph: Graph, output: Output) -> bool:
    """Whether an output is a plain matrix, which a TMA descriptor may address."""
    node = graph.nodes[output.node]
    return node.indices == "mn" and node.kind != g.PACKED and not node.reduced and output.block == 1


def check_operands(a: DType, b: DType) -> None:
    if multiplied_as(a, b) != b and a in OPERANDS:
        return
    for name, dtype in (("a", a), ("b", b)):
        if dtype not in OPERANDS:
            beside = f"; beside an a of fp16, bf16 or fp32, b may also be {UINT8}" if dtype in WEIGHTS and name == "b" else ""
            raise CallError(f"operand {name} is {dtype}, and the operands are one of {', '.join(map(str, OPERANDS))}{beside}")
    if multiplied_as(b, a) != a:
        raise CallError(f"operand a is {a} and operand b is {b}: b alone may be the narrower one: pass a as {b}")
    if a != b and not (a.is_fp8 and b.is_fp8):
        raise CallError(f"operand a is {a} and operand b is {b}: both need the same dtype (the two fp8 kinds may be mixed)")


def check_packed(graph: Graph, a: DType, b: DType) -> None:
    """a, b: the operands' dtypes."""
    packed = graph.packed()
    if packed is not None and not (b == UINT8 and multiplied_as(a, b) == a):
        raise CallError(
            f"the program reads {packed.dtype} of operand b, two in a byte, so an a of fp16, bf16 or fp32 and a b of uint8 were expected, and they are {a} and {b}: "
            "pack b with epigen.pack_int4"
        )


def check_computed(graph: Graph, a: DType) -> None:
    """a: the operands' dtype."""
    computed = graph.computed()
    if a.bits > 8 or not computed:
        return
    if not a.is_fp8 or not graph.scaled() or graph.second():
        raise CallError(
            f"the program computes what it multiplies of operand {computed[0]}, and that is rounded to the operand's own dtype, fp16, bf16 or fp32: "
            f"operands of {a} are multiplied as they are given{', or with scales in blocks along k, as s[k/128,n] is' if a.is_fp8 else ''}"
        )
    for item in graph.inputs():
        if (block := dict(zip(item.indices, item.blocks, strict=False)).get("k", LEAST_OF_BYTES)) % LEAST_OF_BYTES:
            raise CallError(
                f"the scales {item.name} of {a} change each {block} of k, and tensor cores multiply {LEAST_OF_BYTES} at a time: blocks of a multiple of that were expected"
            )


def output_dtype(graph: Graph, output: Output, a: DType) -> DType:
    """The dtype of one output: its outermost cast, else the default of the language for operands of dtype `a`."""
    node = graph.nodes[output.node]
    if node.kind == g.PACKED:
        return UINT8
    if output.dtype is not None:
        return output.dtype
    if node.reduced or output.block > 1:
        return FP64 if a == FP64 else FP32
    return INT32 if a == INT8 and node.op == g.DOT else product_dtype(a)


def uninterpretable(graph: Graph, held: Iterable[DType | None], outputs: Iterable[DType]) -> DType | None:
    """A dtype of the call that Triton's interpreter gets wrong, if any: bf16 anywhere, and rounding to fp8 (seen in 3.6.0 and 3.9.0)."""
    rounded = [*outputs, *(n.dtype for n in graph.nodes if n.dtype is not None)]
    return next((t for t in held if t == BF16), None) or next((t for t in rounded if t == BF16 or t.is_fp8), None)


def kernel_name(text: str) -> str:
    """`epigen_relu_mm_bias` for relu(mm + bias): the program's words in order, each once, and a digest where they are too many."""
    words = list(dict.fromkeys(re.findall(r"(?<![\w.])[A-Za-z]\w*", text)))
    name = "_".join(["epigen", *words])
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 9].rstrip('_')}_{digest([text])[:8]}"


def _stored_node(graph: Graph, output: Output) -> int:
    """What a tile output stores: the mask's boolean, or the value itself."""
    node = graph.nodes[output.node]
    return node.args[0] if node.op == g.BITMASK else output.node


def _store(graph: Graph, output: Output, body: _Body) -> Store:
    node = graph.nodes[output.node]
    dtype = output_dtype(graph, output, body.signature.a)
    value = accumulator(node.name) if dtype == INT32 else body.arg(_stored_node(graph, output))
    return Store(output.name, value, node.indices, dtype, packed=node.kind == g.PACKED, block=output.block)


def _finish(body: _Body, indices: str, roots: Sequence[int], stores: tuple[Store, ...], zero: Sequence[bool]) -> Finish:
    """zero: as of `_over_k`."""
    sources = []
    for number in _reached(body.graph, roots, through=False):
        node = body.graph.nodes[number]
        if node.op == g.REDUCE:
            over_k = _over_k(body, number, zero) if node.axes == "k" else None
            operand = over_k.operand if over_k else ""
            dtype = {"a": body.signature.a, "b": body.signature.b}.get(operand, FP32)
            sources.append(Source(body.name(number), node.name, operand, dtype, over_k if over_k and over_k.value != operand else None))
    inputs, lines = body.lines(roots)
    return Finish(indices, tuple(sources), inputs, lines, stores)


def _partial(graph: Graph, number: int, body: _Body, zero: Sequence[bool]) -> Partial:
    node = graph.nodes[number]
    return Partial(body.name(number), node.name, body.arg(node.args[0]), node.axes, zero[node.args[0]])


def _zero_below(graph: Graph) -> list[bool]:
    """Of each value whether it is 0, or false, in a tile's rows past the last, where inputs of such rows are read as 0 and bits as unset.

    Nothing is known of the product there, nor of what varies along n alone: 0 * inf is NaN.
    """
    zero: list[bool] = []
    for node in graph.nodes:
        zero.append(_stays_zero(node, [zero[a] for a in node.args]))
    return zero


def _stays_zero(node: Node, zero: Sequence[bool]) -> bool:
    """zero: of each argument."""
    match node.op:
        case g.INPUT:
            return "m" in node.indices
        case g.BITS:
            return True
        case g.CONSTANT:
            return node.value == 0
        case "drelu":
            return all(zero) or zero[1]
        case "where":
            return zero[2] and (zero[0] or zero[1])
        case "and":
            return any(zero)
        case "or" | "add" | "sub" | "neg" | "abs" | "relu" | "maximum" | "minimum" | g.CAST:
            return all(zero)
    return False


def _zero_past_k(graph: Graph) -> list[bool]:
    """Of each value of an operand whether it is 0 past the last k, where tensors and inputs are read as 0."""
    zero: list[bool] = []
    for node in graph.nodes:
        args = [zero[a] for a in node.args]
        along_k = node.op in (g.INPUT, g.OPERAND) and "k" in node.indices and "k" not in g.shared_along(node)
        zero.append(along_k or (all(args) if node.op in ("mul", "scale") else node.op not in (g.INPUT, g.BITS) and _stays_zero(node, args)))
    return zero


def _of_operand(body: _Body, number: int) -> tuple[tuple[Input, ...], tuple[Line, ...], tuple[Line, ...]]:
    """What a value of an operand is computed of: inputs, the lines that do not vary along k, and those of each step."""
    inputs, lines = body.lines([number])
    each = {body.name(i) for i in _reached(body.graph, [number], through=False) if "k" in body.graph.nodes[i].indices}
    once, steps = (tuple(line for line in lines if (line.name in each) == varies) for varies in (False, True))
    return inputs, once, steps


def _over_k(body: _Body, number: int, zero: Sequence[bool]) -> OverK:
    """zero: as `_zero_past_k` has it."""
    node = body.graph.nodes[number]
    (value,) = node.args
    return OverK(body.name(number), node.name, "a" if node.indices == "m" else "b", body.arg(value), *_of_operand(body, value), zero[value])


def _operands(graph: Graph, body: _Body, zero: Sequence[bool]) -> tuple[Operand, ...]:
    """zero: as `_zero_past_k` has it."""
    product = graph.product()
    if product is None:
        return ()
    nodes, operands = graph.nodes, []
    for name, number in zip(g.OPERANDS, nodes[product].args, strict=True):
        inputs, once, steps = _of_operand(body, number)
        sig, packed = body.signature, graph.packed() if name == "b" else None
        converted = sig.multiplied[name] != {"a": sig.a, "b": sig.b}[name]
        apart, factors = graph.factors(number, converted)
        held = packed.dtype if packed else None
        operands.append(Operand(name, body.arg(number), inputs, once, steps, zero[number], converted, held, body.arg(apart), tuple(map(body.arg, factors))))
    return tuple(operands)


def _reached(graph: Graph, roots: Sequence[int], through: bool) -> list[int]:
    """Nodes that the roots depend on, in graph order, but for what a product multiplies. through: also what the reductions among them reduce."""
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        number = pending.pop()
        if number not in seen:
            seen.add(number)
            if graph.nodes[number].op != g.DOT and (through or graph.nodes[number].op != g.REDUCE):
                pending += graph.nodes[number].args
    return sorted(seen)


class _Body:
    """Names of one graph's values in the kernels, and the lines that compute some of them."""

    def __init__(self, graph: Graph, signature: Signature):
        self.graph, self.signature = graph, signature
        self.by_value = {name for name, dtype in signature.inputs if dtype is None}
        self.names: dict[int, str] = {}
        self.scalar = self._scalar_lines()
        temporaries = 0
        given: set[str] = set()
        from_output = {_stored_node(graph, o): o.name for o in reversed(graph.outputs) if graph.nodes[o.node].op != g.BITMASK}
        for number, node in enumerate(graph.nodes):
            if node.op in (g.INPUT, g.BITS):
                self.names[number] = parameter(node.name) if node.name in self.by_value else node.name
            elif node.op in (g.OPERAND, g.POSITION):
                self.names[number] = node.name
            elif node.op == g.DOT:
                widened = f"{accumulator(node.name)}_value" if node.name else "mm"
                self.names[number] = widened if signature.a == INT8 else accumulator(node.name)
            elif node.op == g.EXTENT:
                self.names[number] = counted(node.name)
            elif node.op not in (g.CONSTANT, g.BITMASK):
                # a cast at an output is the store's, so what is stored has the output's name; the cast's value, used elsewhere, may have it as label
                name = next((name for name in (node.label, from_output.get(number)) if name and name not in given), "")
                if not name:
                    name, temporaries = f"t{temporaries}", temporaries + 1
                self.names[number] = name
            if number in self.names:
                given.add(self.names[number])

    def _scalar_lines(self) -> set[int]:
        """Lines over scalars alone whose first argument has to be made a block: Triton's operations want a tensor among their
        arguments, and its interpreter cannot broadcast a boolean that is not one."""
        nodes = self.graph.nodes
        made: set[int] = set()
        blocks: set[int] = set()
        for number, node in enumerate(nodes):
            if (node.op not in ops.TABLE and node.op != g.CAST) or node.indices or node.reduced:
                continue
            python = all(nodes[a].op in (g.CONSTANT, g.EXTENT) or (nodes[a].op == g.INPUT and nodes[a].name in self.by_value) for a in node.args)
            if python or (node.kind == ops.BOOLEAN and not any(a in blocks for a in node.args)):
                made.add(number)
            if number in made or any(a in blocks for a in node.args):
                blocks.add(number)
        return made

    def name(self, number: int) -> str:
        return self.names[number]

    def arg(self, number: int) -> Arg:
        node = self.graph.nodes[number]
        return node.value if node.op == g.CONSTANT else self.names[number]

    def lines(self, roots: Sequence[int]) -> tuple[tuple[Input, ...], tuple[Line, ...]]:
        """Inputs and lines that compute the roots, from the accumulator, from reductions that are already there, or from an operand's elements."""
        dtypes = dict(self.signature.inputs)
        inputs, lines = [], []
        for number in _reached(self.graph, roots, through=False):
            node = self.graph.nodes[number]
            if node.op in (g.INPUT, g.BITS):
                dtype = UINT8 if node.op == g.BITS else dtypes[node.name]
                inputs.append(Input(node.name, node.indices, dtype, node.op == g.BITS, node.periods, node.kind == g.SEED, node.blocks))
            elif node.op == g.DOT:
                if self.signature.a == INT8:
                    lines.append(Line(self.names[number], WIDEN, (accumulator(node.name),)))
            elif node.op == g.POSITION:
                lines.append(Line(node.name, POSITION, (offsets(node.name),)))
            elif node.op == g.UNIFORM:
                product = "batch_id" if self.signature.batched and self.signature.grouped != "m" else "0"
                lines.append(Line(self.names[number], UNIFORM, (self.arg(node.args[0]), offsets("m"), offsets("n"), product)))
            elif node.op == g.BLOCKWISE:
                lines.append(Line(self.names[number], node.name, (self.arg(node.args[0]),), block=node.blocks[-1]))
            elif node.op in ops.TABLE or node.op == g.CAST:
                op = CAST if node.op == g.CAST else node.op
                lines.append(Line(self.names[number], op, tuple(self.arg(a) for a in node.args), node.dtype, number in self.scalar, self.signature.exact))
        return tuple(inputs), tuple(lines)
