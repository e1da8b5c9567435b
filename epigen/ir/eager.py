"""Graph -> graph with a cast behind each operation, as eager torch rounds: each result to the dtype that torch promotes its arguments to.

Requires: canonical order. Ensures: it; the same outputs of the same inputs; arithmetic between two casts is one operation of torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from epigen import ops
from epigen.dtypes import BF16, BOOL, BY_TORCH_ON_CPU, FP32, INT8, INT64, DType
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir import rules
from epigen.ir.graph import PRODUCT, Graph, Node, Output
from epigen.ir.passes import order
from epigen.ops import NUMBER

_NUMBER, _ONE_ELEMENT, _TENSOR = range(3)
"""What torch's promotion tells apart: of floats it asks tensors with dimensions first, then those of one element, and numbers last."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A value as torch holds it. node: in the new graph. exact: the node before its cast. dtype: None of numbers and of conditions."""

    node: int
    exact: int
    dtype: DType | None
    category: int = _TENSOR


def product_dtype(operands: DType) -> DType:
    """What the product of such operands is held as before anything is computed of it. What a program gives of fp8 is bf16, and of int8 fp32."""
    return FP32 if operands == INT8 else BF16 if operands.is_fp8 else operands


def as_eager(graph: Graph, a: DType, b: DType, inputs: Mapping[str, DType | None]) -> Graph:
    """a, b: the operands' dtypes; both are the product's where that is an input. inputs: dtypes by name; None for a number.

    Sums and other reductions stay fp32, as the language has them. Raises CallError for operations on fp8, which torch promotes with nothing.
    """
    nodes: list[Node] = []
    held: list[_Held] = []

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def cast(value: int, dtype: DType) -> int:
        node = nodes[value]
        return add(Node(g.CAST, (value,), NUMBER, node.indices, node.reduced, dtype=dtype))

    def rounded(node: Node, dtype: DType, as_it_is: bool = False) -> _Held:
        exact = add(node)
        return _Held(exact if as_it_is or dtype.bits != 16 else cast(exact, dtype), exact, dtype)

    def torchs(node: Node, args: tuple[int, ...]) -> Node:
        """The operation of these arguments, or the last one of the formula that torch has for it; what comes before that is added."""
        formula = rules.eager(node.op)
        if formula is None:
            return replace(node, args=args)
        given, placed = dict(zip((param.name for param in ops.TABLE[node.op].params), args, strict=True)), list[int]()
        for part in formula.nodes:
            part = replace(part, args=tuple(placed[i] for i in part.args), indices=node.indices if part.args else "")
            placed.append(given[part.name] if part.op == g.INPUT else add(part))
        return nodes.pop()

    def promoted(value: _Held, dtype: DType) -> int:
        """An argument as the operation takes it: integers, and one element of another dtype, are rounded first. A number is fp32 in any operation."""
        return cast(value.node, dtype) if dtype.bits == 16 and value.dtype not in (None, BOOL, dtype) else value.node

    for node in graph.nodes:
        given = [held[i] for i in node.args]
        plain = replace(node, args=tuple(value.node for value in given))
        if node.op == g.DOT:
            held.append(rounded(plain, product_dtype(a)))
        elif node.op == g.OPERAND:
            number = add(plain)
            held.append(_Held(number, number, a if node.name == "a" else b))
        elif node.op == g.INPUT:
            dtype, number = inputs.get(node.name, a if node.name == PRODUCT else None), add(plain)
            held.append(_Held(number, number, dtype, _NUMBER if dtype is None else _TENSOR if node.indices else _ONE_ELEMENT))
        elif node.op == g.POSITION:
            number = add(plain)
            held.append(_Held(number, number, INT64))
        elif node.op == g.CAST:
            assert node.dtype is not None
            number = given[0].node if node.dtype in (given[0].dtype, FP32) else add(plain)
            held.append(_Held(number, number, node.dtype, max(given[0].category, _ONE_ELEMENT)))
        elif node.op in (g.REDUCE, g.BLOCKWISE, g.UNIFORM):
            number = add(plain)
            held.append(_Held(number, number, FP32))
        elif node.op in ops.TABLE:
            numbers = [value for value, param in zip(given, ops.TABLE[node.op].params, strict=True) if param.kind == NUMBER]
            dtype, category = _result_type(numbers), max(value.category for value in given)
            args = tuple(promoted(value, dtype) if value in numbers else value.node for value in given)
            if node.kind == NUMBER:
                chosen = ops.TABLE[node.op].error == "0" and all(value.dtype == dtype for value in numbers)
                value = rounded(torchs(node, args), dtype, chosen)
                held.append(replace(value, dtype=dtype if category else None, category=category))
            else:
                number = add(replace(node, args=args))
                held.append(_Held(number, number, None, category))
        else:
            number = add(plain)
            held.append(_Held(number, number, None, _TENSOR if node.op in (g.BITS, g.BITMASK) else _NUMBER))
    return order(Graph(tuple(nodes), tuple(_stored(o, held[o.node], product_dtype(a)) for o in graph.outputs), graph.text))


def as_eager_of(graph: Graph, a: Any, b: Any, inputs: Mapping[str, Any]) -> Graph:
    """The same by the dtypes of a call's tensors. a, b: the operands, or twice the product, where that is an input."""
    held = {name: BY_TORCH_ON_CPU[str(value.dtype)] if hasattr(value, "dtype") else None for name, value in inputs.items()}
    return as_eager(graph, BY_TORCH_ON_CPU[str(a.dtype)], BY_TORCH_ON_CPU[str(b.dtype)], held)


def _stored(output: Output, value: _Held, default: DType) -> Output:
    """An output's store rounds it: a cast to the same dtype before that would say so twice."""
    return replace(output, node=value.exact if value.dtype == (output.dtype or default) else value.node)


def _result_type(values: Sequence[_Held]) -> DType:
    """As `torch.result_type` has it; fp32 where there is no float, as epigen computes integers, and as torch's own default is. Raises CallError."""
    if fp8 := next((value.dtype for value in values if value.dtype is not None and value.dtype.is_fp8), None):
        raise CallError(f"the program computes with {fp8}, which torch computes nothing of: rounding='eager' wants it cast to another dtype before")
    floats = [value for value in values if value.dtype is not None and value.dtype.is_float]
    first = max((value.category for value in floats), default=_NUMBER)
    dtypes = {value.dtype for value in floats if value.category == first}
    only = dtypes.pop() if len(dtypes) == 1 else None
    return only or FP32
