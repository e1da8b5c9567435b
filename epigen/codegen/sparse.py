"""Programs of a product of which one operand has two of four values: the vendor's, and then the program over it. What of them there is; nothing here knows tensors.

The vendor takes the product in the dtypes of `AS_IT_COMES`: of 16 bits it is rounded to the operands' own before anything is computed of it, as in eager torch.
Raises CallError.
"""

from __future__ import annotations

from dataclasses import replace

from epigen.codegen.lower import output_dtype, over_product
from epigen.codegen.spec import EXACT_INT8, Signature
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, INT32, DType
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir.graph import Graph
from epigen.shapes import Shape, extents

AS_IT_COMES = {FP16: (FP16,), BF16: (BF16,), INT8: (INT32,), FP8E4M3: (BF16, FP16, FP32)}
"""What is multiplied, and the dtypes in which the vendor gives the product. torch has fp32 too, with one of two values and in TF32."""

MULTIPLES = {1: (32, 32), 2: (16, 16)}
"""What cuSPARSELt wants rows and columns of the sparse matrix to be multiples of, by the bytes of an element (torch 2.13's own table)."""

DENSE = "pass its dense values, as t.to_dense() has them"


def product_of(operands: DType, rounding: str = "") -> DType:
    """The dtype in which the product of such operands is asked for. rounding: "eager" where each operation is rounded, as torch's own of fp8 is to bf16."""
    return INT32 if operands == INT8 else (BF16 if rounding else FP32) if operands.is_fp8 else operands


def alone(graph: Graph, operands: DType) -> DType | None:
    """The dtype of the vendor's product, where the program is no more than that."""
    output, *more = graph.outputs
    wanted, bare = output_dtype(graph, output, operands), not graph.computed() and graph.second() is None
    return wanted if graph.nodes[output.node].op == g.DOT and not more and bare and wanted in AS_IT_COMES[operands] else None


def over(graph: Graph, operands: DType, rounding: str = "") -> Graph:
    """The program over that product, of int8 as fp32."""
    wanted = [output_dtype(graph, o, operands) for o in graph.outputs]
    if INT32 in wanted:
        raise CallError(f"the program gives int8's product as int32 beside other outputs, which that of a 2:4 sparse operand does not: {DENSE}")
    try:
        made = over_product(graph)
    except CallError as error:
        found = str(error).partition(", and a product")[0].partition(", and one product")[0]
        raise CallError(f"{found}, and that of a 2:4 sparse operand is the vendor's: {DENSE}") from None
    product = product_of(operands, rounding)
    given = FP32 if product == INT32 else product
    own = [output_dtype(made, o, given) for o in made.outputs]
    return replace(made, outputs=tuple(o if there == here else replace(o, dtype=here) for o, here, there in zip(made.outputs, wanted, own, strict=True)))


def check_program(graph: Graph, operands: DType) -> None:
    """Whether it can be computed of the vendor's product."""
    if alone(graph, operands) is None:
        over(graph, operands)


def check_operands(side: str, dtype: DType, k: int) -> None:
    """side: of the sparse one."""
    if dtype not in AS_IT_COMES:
        raise CallError(f"operand {side} is 2:4 sparse {dtype}, and what is multiplied so is one of {', '.join(map(str, AS_IT_COMES))}: {DENSE}")
    if dtype == INT8 and k > EXACT_INT8:
        raise CallError(f"int8 sums may pass 2^31 at K = {k} (beyond {EXACT_INT8}), where the product of a 2:4 sparse operand saturates: {DENSE}")


def check(graph: Graph, signature: Signature, shape: Shape) -> None:
    """Whether a problem of which nothing but this is known can have such an operand, to be tuned."""
    side, dtype, (m, n, k) = signature.sparse, signature.a, shape[-3:]
    if len(shape) > 3:
        raise CallError(f"{extents(shape)} is a batch, and a 2:4 sparse operand meets one matrix, of all rows: give the rows of all products as M")
    if signature.invariant:
        raise CallError("the program is invariant, and the product of a 2:4 sparse operand is the vendor's, which adds up in an order that depends on M")
    if signature.b != dtype:
        raise CallError(f"operand a is {dtype} and b {signature.b}, and beside a 2:4 sparse operand both need the same dtype")
    check_operands(side, dtype, k)
    wanted = {"a": (0, "n"), "b": (1, "t")}[side]
    if signature.layout[wanted[0]] != wanted[1]:
        raise CallError(f"layout {signature.layout}: a 2:4 sparse {side} lies along k, as layout {'nt' if side == 'b' else 'nn'} has it")
    rows = n if side == "b" else m
    (of_rows, of_k) = MULTIPLES[dtype.bytes]
    if rows % of_rows or k % of_k or 0 in (rows, k):
        raise CallError(
            f"a 2:4 sparse {side} of {dtype} has {'N' if side == 'b' else 'M'} a multiple of {of_rows} and K one of {of_k}, and they are {rows} and {k}"
        )
    check_program(graph, dtype)
