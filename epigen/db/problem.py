"""What a tuned config belongs to: the problem, in the terms that decide speed, and how its epilogue is named.

Two programs that compute the same graph share a digest, whatever their names; programs of one class load, store and reduce alike, so
that one's config is a fair guess for the other.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from epigen.codegen.spec import GROUPED, INVARIANT, KNOWN, LAYOUTS, SPARSE, KernelSpec, digest, row_bytes, row_lengths
from epigen.db import fields
from epigen.dtypes import ALL, FP32, INPUTS, PRECISIONS, DType
from epigen.gpus import Target
from epigen.ir import graph as g
from epigen.ir.graph import Graph, Node
from epigen.ir.passes import with_leaf
from epigen.lang.parser import MAX_CHARACTERS
from epigen.lang.syntax import declared_text
from epigen.shapes import Shape, power_of_two

_LEAST_TILE = 64  # rows that every schedule can have in one tile
BITS, SCALAR = "bits", "scalar"
"""The inputs whose dtype decides nothing: packed masks, and numbers or tensors of one element."""


def _gpu(value: str) -> bool:
    # drivers put a slash into some names ("Radeon RX 6800/6800 XT"); file names are made from letters and digits alone
    return len(value) <= 128 and ".." not in value and bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ()+@,./_-]*", value))


def _program(value: str) -> bool:
    """A control character in a program would reach the terminal of whoever lists the database."""
    return 0 < len(value) <= MAX_CHARACTERS and value.replace("\n", "").isprintable()


GPU = fields.text("a GPU's name, of letters, digits, spaces and ()+@,./_-", _gpu)
CAPABILITY = fields.pattern("a compute capability, such as 9.0, or gfx942", r"[0-9]{1,2}\.[0-9]|gfx[0-9a-f]{3,5}")
_DTYPE = fields.one_of([t.name for t in ALL])
_INPUT_KINDS = frozenset({BITS, SCALAR, *(f"{t.name}[{i}]" for t in INPUTS for i in ("mn", "m", "n", "k", "mk", "kn"))})


def _input(value: str) -> bool:
    blocks = re.fullmatch(r"(\w+\[)([mnk])(/[1-9][0-9]{0,6})?(?:,([mnk])(/[1-9][0-9]{0,6})?)?\]", value, re.ASCII)
    return value in _INPUT_KINDS or (blocks is not None and f"{blocks[1]}{blocks[2]}{blocks[4] or ''}]" in _INPUT_KINDS)


_INPUT = fields.text(f"a dtype and its indices, such as fp16[n] or fp16[k/128,n], {BITS} or {SCALAR}", _input)
_KIND = fields.pattern(
    "an epilogue's class, such as load:n store:mn reduce:",
    r"(?!.{4097})load:(?:,|[a-z](?:/[0-9]{1,7})?)* store:[a-z,]* reduce:[a-z,]*( dot:[ab,]+)?( carry:[ab,]+)?",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to tune. Each field with what a file may hold there.

    gpu, capability: as torch names them ("NVIDIA H200", "9.0"). a, b, outputs: dtype names; of an output that is no tile "fp32", whatever
    it is cast to. inputs: the epilogue's, in the graph's order, whatever their names: "fp32[n]", "fp16[mn]", "bits", "scalar". layout: how a and b lie. spec:
    the graph's digest. kind: the epilogue's class. alignment: bytes that K, N and the row strides are a multiple of, up to 16. invariant: "m" where
    a row has the same bits whatever M is, so that k is not split. groups: the index, "m" or "k", that the products of a batch are groups along; the shape has so
    much of it as they have in the mean. sparse: the operand of whose values two of four are 0: a winner that multiplies takes its dense values, and `library` is the vendor's product of it.
    """

    gpu: Annotated[str, GPU]
    capability: Annotated[str, CAPABILITY]
    shape: Annotated[Shape, fields.listed(fields.whole(0, 2**31), 3, 4)]
    a: Annotated[str, _DTYPE]
    b: Annotated[str, _DTYPE]
    inputs: Annotated[tuple[str, ...], fields.listed(_INPUT, 0, 1000)]
    outputs: Annotated[tuple[str, ...], fields.listed(_DTYPE, 1, 1000)]
    layout: Annotated[str, fields.one_of(LAYOUTS)]
    precision: Annotated[str, fields.one_of(("", *PRECISIONS))]
    program: Annotated[str, fields.text("a program in printable text", _program)]
    spec: Annotated[str, fields.pattern("16 hexadecimal digits", "[0-9a-f]{16}")]
    kind: Annotated[str, _KIND]
    alignment: Annotated[int, fields.one_of((1, 2, 4, 8, 16))]
    invariant: Annotated[str, fields.one_of(("", *INVARIANT))] = ""
    groups: Annotated[str, fields.one_of(("", *GROUPED))] = ""
    sparse: Annotated[str, fields.one_of(("", *SPARSE))] = ""


def capability(target: Target) -> str:
    """As torch names it: "9.0" for sm_90, "gfx942" for an AMD part."""
    return f"{target.arch // 10}.{target.arch % 10}" if isinstance(target.arch, int) else target.arch


def coarse_bucket(shape: Shape, layout: str) -> Shape:
    """The shape that stands for those which are tuned by one of them: M rounded up to a power of two, and so is the number of products.

    Where a's rows are M long, up to the largest M below it that powers of two divide alike, so that rows are aligned alike.
    """
    return _rounded(shape, layout, power_of_two(shape[-3]))


def fine_bucket(shape: Shape, layout: str) -> Shape:
    """As `coarse_bucket`, of those M which get one config where M comes in many sizes, as batches do: a quarter of a coarse one, from M = 65 on.

    There how many waves of tiles M makes decides between tiles. One config for all M of a coarse bucket took 6.1 % longer than the best of about
    15 at 132 random shapes, one for each M 4.4 %; of the difference quarters get three fourths back, by the model (H200, Triton 3.6, 2026-11).
    """
    return _rounded(shape, layout, fine_bucket_step(shape[-3]))


def fine_bucket_step(m: int) -> int:
    """How many M lie in the fine bucket of this one."""
    return power_of_two(m) // 8 if m > _LEAST_TILE else max(1, power_of_two(m) // 2)


def _rounded(shape: Shape, layout: str, step: int) -> Shape:
    m, n, k = shape[-3:]
    top, divisor = -(-m // step) * step, m & -m
    rows = top if layout[0] == "n" or divisor >= KNOWN or m == top else top - divisor
    return (power_of_two(shape[0]), rows, n, k) if len(shape) == 4 else (rows, n, k)


def input_kind(node: Node, dtype: DType | None) -> str:
    """An input as a problem spells it: dtype and indices, BITS or SCALAR. dtype: None for a number."""
    if node.op == g.BITS:
        return BITS
    if node.blocks:
        return f"{dtype}[{declared_text(node.indices, (), node.blocks)}]"
    return f"{dtype}[{node.indices}]" if node.indices else SCALAR


def problem_of(graph: Graph, spec: KernelSpec, shape: Shape, gpu: str, capability: str) -> Problem:
    """The problem of one call. graph: the program's, of which spec is the lowered form."""
    sig = spec.signature
    dtypes = dict(sig.inputs)
    return Problem(
        gpu=gpu,
        capability=capability,
        shape=shape,
        a=sig.a.name,
        b=sig.b.name,
        inputs=tuple(input_kind(node, dtypes[node.name]) for node in graph.inputs()),
        outputs=tuple((o.dtype if o.indices == "mn" else FP32).name for o in spec.outputs),
        layout=sig.layout,
        precision=sig.a.precision(sig.precision),
        program=graph.text,
        spec=graph_digest(graph),
        kind=epilogue_kind(spec),
        alignment=alignment(shape, sig.layout, sig.a.bytes, row_bytes(shape, sig)[1]),
        invariant="m" if sig.invariant else "",
        groups=sig.grouped,
        sparse=sig.sparse,
    )


def graph_digest(graph: Graph) -> str:
    """Names the computation: structure, constants, input indices, casts and outputs; no name that a user chose, and no cast of what is reduced, whose few bytes
    decide nothing."""
    graph, inputs, periods, parts = with_leaf(graph), dict[str, str](), dict[str, int](), []
    for node in graph.nodes:
        name = node.name
        begun = "".join(f" {i} % {periods.setdefault(p, len(periods))}" for i, p in zip(node.indices, node.periods, strict=False) if p)
        if node.op in (g.INPUT, g.BITS) or (node.op == g.DOT and name):
            name = inputs.setdefault(name, f"input{len(inputs)}")
        begun += "".join(f" {i} / {b}" for i, b in zip(node.indices, node.blocks, strict=False) if b > 1)
        parts.append(f"{node.op} {node.args} {node.kind} {node.indices} {node.value!r} {name} {node.axes} {node.dtype}{begun}")
    parts += [f"output {o.node} {o.dtype if graph.nodes[o.node].indices == 'mn' else None}" for o in graph.outputs]
    return digest(parts)


def epilogue_kind(spec: KernelSpec) -> str:
    """What the epilogue moves and reduces, such as "load:n store:mn reduce:m"; and which operands are computed, or reduced along the way, if any are."""
    loads = sorted("bits" if i.packed else declared_text(i.indices, (), i.blocks).replace(",", "") or "scalar" for i in spec.all_inputs)
    stores = sorted("bits" if s.packed else s.indices for s in (*spec.stores, *spec.vectors))
    reduced = sorted(p.axes for p in spec.partials) + sorted(s.operand for f in spec.finishes for s in f.sources if s.operand)
    computed = f" dot:{','.join(o.name for o in spec.computed)}" if spec.computed else ""
    carried = f" carry:{','.join(sorted(r.operand for r in spec.carried))}" if spec.carried else ""
    return f"load:{','.join(loads)} store:{','.join(stores)} reduce:{','.join(reduced)}{computed}{carried}"


def alignment(shape: Shape, layout: str, element_bytes: int, b_row_bytes: int | None = None) -> int:
    """The largest power of two, up to 16, that divides the bytes of a's and b's rows as they lie in memory, and of the result's.
    b_row_bytes: of b's rows, where its elements have others than a's."""
    of_a, of_b = row_lengths(shape, layout)
    return math.gcd(16, of_a * element_bytes, of_b * element_bytes if b_row_bytes is None else b_row_bytes, shape[-2] * element_bytes)
