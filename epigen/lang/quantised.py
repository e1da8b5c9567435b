"""`q, s = quantize(x, fp8e4m3, n/128)` as what it stands for: a scale for each block of columns, and the block in few bits by it."""

from __future__ import annotations

import re

from epigen import dtypes
from epigen.lang.syntax import Assign, Call, Expr, Name, Number, expr_text

LEAST = 1e-12
"""The largest magnitude of a block counts as at least this, so that one of zeros has a scale."""
_LARGEST = {name: (dtype.largest if dtype.is_fp8 else 127.0) for name, dtype in dtypes.BY_NAME.items() if dtype.is_fp8 or dtype == dtypes.INT8}


def mistake(call: Call) -> str:
    """'' or what is wrong with the arguments of a quantize."""
    if len(call.args) != 3 or call.keywords:
        return f"quantize takes a tile, a dtype and blocks of columns, and {len(call.args) + len(call.keywords)} arguments were found"
    _, dtype, block = call.args
    if not (isinstance(dtype, Name) and dtype.indices is None and dtype.name in _LARGEST):
        return f"quantize gives {', '.join(sorted({dtypes.BY_NAME[name].name for name in _LARGEST}))}, and '{expr_text(dtype)}' was found"
    if not (isinstance(block, Call) and block.function == "div" and isinstance(block.args[0], Name) and isinstance(block.args[1], Number)):
        return f"quantize has a scale for each block of columns, as n/128, and '{expr_text(block)}' was found"
    return ""


def quantised(assigns: tuple[Assign, Assign], call: Call, text: str) -> list[Assign]:
    """The assignments of values and of scales. assigns: those two names, of anything. text: the program's, whose names are taken."""
    values, scales = assigns
    x, dtype, block = call.args
    span, made = call.span, list[Assign]()

    def binary(function: str, left: Expr, right: Expr) -> Call:
        return Call(function, (left, right), span, infix=True)

    if not isinstance(x, Name):
        taken = set(re.findall(r"\w+", text))
        name = next(n for n in (f"{values.name}_exact", *(f"{values.name}_exact{i}" for i in range(2, 10_000))) if n not in taken)
        made.append(Assign(name, x, values.span))
        x = Name(name, span)
    assert isinstance(dtype, Name)
    largest = Call("maximum", (Call("amax", (x, block), span), Number(LEAST, span)), span)
    made.append(Assign(scales.name, binary("div", largest, Number(_LARGEST[dtype.name], span)), scales.span))
    inverse = binary("div", Number(1.0, span), Name(scales.name, span))
    made.append(Assign(values.name, Call("cast", (binary("mul", x, inverse), dtype), span), values.span))
    return made
