"""Epilogue lines as text, from the operation table. Python emits lines and never a loop; templates own loops, loads and stores.

A Dialect supplies the names of a language: Triton's here; Gluon's would rename the module and the decorator.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from epigen import ops
from epigen.codegen.spec import ACC, CAST, POSITION, UNIFORM, WIDEN, Arg, KernelSpec, Line, OverK, Partial, Source, number
from epigen.codegen.spec import offsets as tile_offsets
from epigen.dtypes import INT8, INT32, UINT8, DType

_TL = re.compile(r"\btl\.(?!PropagateNan|extra\.)")  # which Gluon takes from Triton's language


@dataclass(frozen=True, slots=True)
class Dialect:
    """jit: the decorator. module: what `tl` is called."""

    jit: str
    module: str

    def rename(self, text: str) -> str:
        return text if self.module == "tl" else _TL.sub(f"{self.module}.", text.replace(TRITON.jit, self.jit))


TRITON = Dialect("@triton.jit", "tl")
GLUON = Dialect("@gluon.jit", "gl")
DIALECTS = {"triton": TRITON, "gluon": GLUON}


def _arg(arg: Arg) -> str:
    return arg if isinstance(arg, str) else number(arg)


def scaled(value: str, factors: Iterable[Arg]) -> str:
    """A value times each of these."""
    return " * ".join([value, *map(_arg, factors)])


def line(line: Line, dialect: Dialect = TRITON, offsets: str = "") -> str:
    """`z = acc + bias`. offsets: what a position's are called, where it is no main kernel's tile that has them."""
    args = [_arg(a) for a in line.args]
    if line.scalar:
        args[0] = f"tl.full([1, 1], {args[0]}, tl.float32)"
    if line.op == POSITION:
        text = f"{offsets or args[0]}.to(tl.float32)"
    elif line.op == UNIFORM:
        text = f"{UNIFORM}({', '.join((*args, ACC) if dialect is GLUON else args)})"
    elif line.block:
        text = f"{of_blocks(line.op)}({args[0]}, {tile_offsets('n')} < N, {line.block})"
    elif line.op == WIDEN:
        text = f"{args[0]}.to(tl.float32)"
    elif line.op == CAST:
        assert line.dtype is not None
        text = rounded(args[0], line.dtype)
    else:
        op, (expression, body) = ops.TABLE[line.op], _spelled(line)
        text = f"{op.name}({', '.join(args)})" if body else expression.format(**{p.name: a for p, a in zip(op.params, args, strict=True)})
    return dialect.rename(f"{line.name} = {text}")


def _spelled(line: Line) -> tuple[str, tuple[str, ...]]:
    """The Triton expression of a row, and what its function has before that, if it needs one."""
    op = ops.TABLE[line.op]
    return (op.exact, ()) if line.exact and op.exact else (op.triton, op.body)


def by_libdevice(spec: KernelSpec) -> bool:
    """Whether a kernel calls libdevice, which Triton's interpreter lacks."""
    lines = [*spec.main_lines, *(line for finish in spec.finishes for line in finish.all_lines)]
    return any(line.op in ops.TABLE and "libdevice." in _spelled(line)[0] for line in lines)


def convert(value: str, dtype: DType) -> str:
    """An fp32 value rounded once to `dtype`. fp8 and int8 saturate, as the hardware's conversions and cuBLASLt do; NaN becomes 0 in int8."""
    if dtype in (INT32, UINT8) or dtype.bits == 32:
        return value
    if dtype == INT8:
        return f"to_int8({value})"
    if dtype.is_fp8:
        saturated = ops.TABLE["clamp"].triton.format(x=value, lo=-dtype.largest, hi=dtype.largest)
        return f"{saturated}.to(tl.{dtype.triton})"
    return f"{value}.to(tl.{dtype.triton})"


def rounded(value: str, dtype: DType) -> str:
    """An fp32 value rounded to `dtype` and widened again.

    Of two fp8 numbers that are packed with two others ptxas loses the first pair where anything else reads it too: it then reads a register
    that nothing has written (ptxas 12.8.93 and 12.9.86, which Triton 3.6 to 3.9 have; not 13.4.59). So what is fp8 here has one reader. It is
    widened to fp16, which holds every fp8, lest Triton take it to another layout as fp8; and it is clamped in another order than an output is, lest
    the two be one.
    """
    if not dtype.is_fp8:
        return f"{convert(value, dtype)}.to(tl.float32)"
    below = ops.TABLE["minimum"].triton.format(x=value, y=dtype.largest)
    saturated = ops.TABLE["maximum"].triton.format(x=below, y=-dtype.largest)
    return f"{saturated}.to(tl.{dtype.triton}).to(tl.float16).to(tl.float32)"


_TO_INT8 = (
    "# adding 1.5 * 2^23 leaves no fraction bits, so the addition rounds to nearest even",
    "x = tl.where(x == x, tl.minimum(tl.maximum(x, -128.0), 127.0), 0.0)",
    "return ((x + 12582912.0) - 12582912.0).to(tl.int8)",
)


_PHILOX = (
    "# Philox4x32-10 gives four words at a time: to columns n, n + 1, n + 8 and n + 9, which a thread has together of what tensor cores multiplied",
    "c0, c1 = quarter(n), quarter(m)",
    "c0 = ((c0 >> 4) << 2) | ((c0 >> 1) & 3)",
    "c3 = c0 ^ c0  # 0, in the layout of the others",
    "c2 = (c3 | product).to(tl.uint32)",
    "k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF",
    "for _ in tl.static_range(10):",
    "    x, y = tl.mul(c0, 0xD2511F53, sanitize_overflow=False), tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)",
    "    c0, c2 = tl.umulhi(c2, 0xCD9E8D57) ^ c1 ^ k0.to(tl.uint32), tl.umulhi(c0, 0xD2511F53) ^ c3 ^ k1.to(tl.uint32)",
    "    c1, c3 = y, x",
    "    k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF",
    "words = tl.join(tl.join(c0, c1), tl.join(c2, c3))",
    "words = tl.reshape(words, [n.shape[0], n.shape[1] // 16, 4, 2, 2])",
    "words = tl.reshape(tl.permute(words, [0, 1, 4, 2, 3]), n.shape)",
)
_QUARTER = (
    "# the columns whose number has neither bit 0 nor bit 3",
    "x = tl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 4, 2])",
    "x, _ = tl.split(tl.permute(x, [0, 1, 3, 4, 2]))",
    "x, _ = tl.split(x)",
    "return tl.reshape(x, [x.shape[0], x.shape[1] * 4])",
)


def _uniform(dialect: Dialect) -> tuple[str, list[str]]:
    """Parameters and body of the function that draws a tile's numbers."""
    params, body = "seed, m, n, product", ["m, n = tl.broadcast(m.to(tl.uint32), n.to(tl.uint32))", *_PHILOX]
    if dialect is GLUON:  # what Triton's compiler finds by itself is said here: the words come about in the product's layout, and need not move
        params += ", acc"
        body.insert(1, "m, n = tl.set_auto_layout(m, acc.type.layout), tl.set_auto_layout(n, acc.type.layout)")
        body.append("words = tl.convert_layout(words, acc.type.layout, assert_trivial=True)")
    return params, [*body, "return (words >> 8).to(tl.float32) * 5.9604644775390625e-08"]


def masked(partial: Partial) -> bool:
    """Whether elements outside the matrix would count in a reduction of a tile, so that the identity takes their place."""
    return not (partial.zero_below and partial.axes == "m" and ops.REDUCTIONS[partial.row].identity == "0.0")


def reduce_tile(partial: Partial, inside: str, in_order: bool = False) -> tuple[str, str]:
    """The elements to reduce, with the identity outside the matrix, and their reduction over the tile. inside: which of them lie in the matrix.
    in_order: as of `reduce`."""
    row = ops.REDUCTIONS[partial.row]
    elements = row.prepare.format(x=_arg(partial.value))
    if masked(partial):
        elements = f"tl.where({inside}, {elements}, {row.identity})"
    text = f"{partial.name}_in"
    for axis in {"m": (0,), "n": (1,), "mn": (1, 0)}[partial.axes]:
        text = reduce(partial.row, text, axis, in_order)
    return elements, text


def prepare_operand(source: Source, loaded: str) -> str:
    """An element of an operand, or what is computed of it, as the reduction takes it; partial results are taken as they are."""
    row = ops.REDUCTIONS[source.row]
    element = _arg(source.over_k.value) if source.over_k else f"{loaded}.to(tl.float32)"
    return row.prepare.format(x=element) if source.operand else loaded


def identity(source: Source | OverK) -> str:
    return ops.REDUCTIONS[source.row].identity


def combine(source: Source | OverK, x: str, y: str) -> str:
    return ops.REDUCTIONS[source.row].combine.format(x=x, y=y)


def carried(over_k: OverK, inside: str, in_order: bool) -> str:
    """What a reduction over k is once a step's elements have joined it. inside: which of them lie in the matrix, where the others would count. in_order: as of `reduce`."""
    row = ops.REDUCTIONS[over_k.row]
    elements = row.prepare.format(x=_arg(over_k.value))
    of_step = reduce(over_k.row, f"tl.where({inside}, {elements}, {row.identity})" if inside else elements, 1 if over_k.operand == "a" else 0, in_order)
    return combine(over_k, over_k.name, of_step)


def reduce(row: str, x: str, axis: int, in_order: bool = False) -> str:
    """A reduction along one axis, which is kept with extent 1. in_order: added up in an order that does not depend on which threads have what, which Triton
    decides by what it knows to divide strides and extents, M among them."""
    text = ops.REDUCTIONS[row].triton.format(x=x, axis=axis)
    return _in_order(text) if in_order else text


def _in_order(text: str) -> str:
    return text.replace("tl.sum(", f"{_SUM_IN_ORDER}(")


def of_blocks(row: str) -> str:
    """The function that reduces each block of a tile's columns."""
    return f"{row}_of_blocks"


def _reduces_blocks(row: str, dialect: Dialect, in_order: bool) -> list[str]:
    """Its body. A block is a row of a matrix, which reductions along an axis know."""
    prepared, identity = ops.REDUCTIONS[row].prepare.format(x="x"), ops.REDUCTIONS[row].identity
    body = [
        f"each = tl.reshape(tl.where(inside, {prepared}, {identity}), [x.shape[0] * (x.shape[1] // block), block])",
        f"each, _ = tl.broadcast({reduce(row, 'each', 1, in_order)}, each)",
        "return tl.reshape(each, x.shape)",
    ]
    if dialect is GLUON:  # a value that each thread has of its own elements need not move
        body[-1] = "return tl.convert_layout(tl.reshape(each, x.shape), x.type.layout, assert_trivial=True)"
    return body


_SUM_IN_ORDER = "sum_in_order"
_BY_PAIRS = (
    "# neighbours are added until one value is left: an order that does not depend on which threads have what",
    "if axis == 0:",
    "    x = tl.trans(x)",
    "for _ in tl.static_range(10):  # a block has 2^10 values along an axis at most",
    "    if x.shape[1] > 1:",
    "        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))",
    "        x = even + odd",
    "if axis == 0:",
    "    x = tl.trans(x)",
    "return x",
)


def helpers(
    lines: Iterable[Line], rows: Iterable[str], converts_to: Iterable[DType], combining: Collection[str], dialect: Dialect = TRITON, in_order: bool = False
) -> dict[str, str]:
    """The small jit functions that the lines, reductions and conversions call, by name in a fixed order.

    combining: those of the rows whose partial results are joined here, so that their combine functions are needed too. in_order: as of `reduce`.
    """
    functions: dict[str, str] = {}

    def define(name: str, params: str, body: Iterable[str]) -> None:
        text = "\n    ".join(body)
        functions[name] = dialect.rename(f"{dialect.jit}\ndef {name}({params}):\n    {text}\n")

    lines = list(lines)
    for item in lines:
        if item.op == UNIFORM:
            define("quarter", "x", _QUARTER)
            define(UNIFORM, *_uniform(dialect))
        op = ops.TABLE.get(item.op)
        if op is not None and _spelled(item)[1]:
            same = {p.name: p.name for p in op.params}
            define(op.name, ", ".join(same), [*(b.format(**same) for b in op.body), f"return {op.triton.format(**same)}"])
    of_lines = dict.fromkeys(item.op for item in lines if item.block)
    for name in of_lines:
        define(of_blocks(name), "x, inside, block: tl.constexpr", _reduces_blocks(name, dialect, in_order))
    for name in (*rows, *of_lines):
        row = ops.REDUCTIONS[name]
        if row.body:
            define(name, "x, axis: tl.constexpr", map(_in_order, row.body) if in_order else row.body)
        if in_order and _in_order(own := "".join((row.triton, *row.body))) != own:
            define(_SUM_IN_ORDER, "x, axis: tl.constexpr, keep_dims: tl.constexpr", _BY_PAIRS)
        function = re.match(r"(\w+)\(", row.combine)
        if function and (name in combining or function[1] in row.triton):
            define(function[1], "x, y", row.combine_body)
    if INT8 in converts_to:
        define("to_int8", "x", _TO_INT8)
    return {name: functions[name] for name in sorted(functions)}


def renamed(text: str, functions: Iterable[str]) -> str:
    """A finishing kernel's text, or one of the functions that it calls, with `finish_` before the functions' names."""
    names = "|".join(map(re.escape, functions))
    return re.sub(rf"(?<![.\w])({names})\b", r"finish_\1", text) if names else text
