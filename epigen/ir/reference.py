"""The oracle: a graph evaluated with torch, operation by operation, never through generated code.

In fp32 it has the kernel's rounding points (fp32 arithmetic, each output rounded once) and answers for CPU tensors. In fp64 it is
what every other answer is measured against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from epigen import ops
from epigen.dtypes import BY_TORCH_ON_CPU, INT4, INT8, INT32, DType, multiplied_as
from epigen.errors import InternalError
from epigen.ir import graph as g
from epigen.ir import nibbles, philox
from epigen.ir.graph import Graph, Node

Number = float | Tensor


@functools.cache
def torch_function(name: str) -> Callable[..., Tensor]:
    """The reference of an elementwise row, as a function of tensors. The text is the table's own, never a user's."""
    op = ops.TABLE[name]
    params = {p.name: p.name for p in op.params}
    return _function(", ".join(params), op.torch.format(**params))


@functools.cache
def torch_reduction(name: str) -> Callable[..., Tensor]:
    """The reference of a reduction's row: (x, dims) -> x reduced over dims, which it keeps with extent 1."""
    text = ops.REDUCTIONS[name].torch.format(x="x", dim="dim, keepdim=True")
    return _function("x, dim", text)


def _function(params: str, text: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = eval(f"lambda {params}: {text}", {"torch": torch})
    return function


IDENTITY = {name: float(row.identity.removeprefix("float('").removesuffix("')")) for name, row in ops.REDUCTIONS.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    result: torch.dtype = getattr(torch, dtype.torch)
    return result


def evaluate(
    graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Number], dtypes: Sequence[DType], by_rows: bool = False, first_row: int = 0, number: int = 0
) -> list[Tensor]:  # fmt: skip
    """The program's outputs, in fp32 arithmetic, each rounded once to its dtype; in fp64 where there is any, as torch has it.

    a: [M, K]. b: [K, N]. inputs: tile [M, N], row [M], column [N], mask uint8 [M, ceil(N / 8)], scalar; of operands also [K], and [M, K] or [K, N].
    dtypes: one an output. by_rows: a row of the result has the same bits whatever M is, and wherever the row lies. first_row: the number of a's first row.
    number: the product's in a batch. A seed is a tensor of one element, int64.
    """
    if by_rows:
        return _by_rows(graph, a, b, inputs, dtypes, number)
    compute = torch.float64 if any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in (a, *inputs.values())) else torch.float32
    if compute == torch.float64:  # a number is one as well, where a kernel's is fp32
        inputs = {name: v if isinstance(v, Tensor) else torch.full((), v, dtype=compute, device=a.device) for name, v in inputs.items()}
    values = node_values(graph, a, b, inputs, compute, first_row, number)
    m, n = extents(graph, a, b)
    results = []
    for output, dtype in zip(graph.outputs, dtypes, strict=True):
        value = values[output.node]
        if graph.nodes[output.node].kind == g.PACKED:
            results.append(value)
        elif dtype == INT32:
            operands = multiplied(graph, graph.nodes[output.node], values, a, b, inputs)
            results.append(product(*operands, torch.float64).to(torch.int32))
        else:
            value = shaped(value, graph.nodes[output.node].indices, m, n)
            results.append(convert(value[:, :: output.block] if output.block > 1 else value, dtype))
    return results


def _by_rows(graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Number], dtypes: Sequence[DType], product_number: int) -> list[Tensor]:
    """One row after the other, each in memory of its own: torch's products, its sums and even its functions have other bits for other M, and for the last elements
    of a tensor. What all rows have a part in is evaluated once. About 5 times as slow as all rows at once (512x512x512, two cores, torch 2.13, 2026-11).
    """
    shared = _of_all_rows(graph)
    results = evaluate(graph, a, b, inputs, dtypes, number=product_number) if any(o.node in shared for o in graph.outputs) or not a.shape[0] else []
    own = [i for i, o in enumerate(graph.outputs) if o.node not in shared]
    if not own or not a.shape[0]:
        return results
    of_rows = {n.name for n in graph.inputs() if ("m" in n.indices and "m" not in g.shared_along(n)) or n.op == g.BITS}
    rows = []
    for i in range(a.shape[0]):
        of_row = {name: value[i : i + 1].clone() if name in of_rows and isinstance(value, Tensor) else value for name, value in inputs.items()}
        rows.append(evaluate(graph, a[i : i + 1].contiguous().clone(), b, of_row, dtypes, first_row=i, number=product_number))
    joined = {i: torch.cat([row[i] for row in rows]) if "m" in graph.nodes[graph.outputs[i].node].indices else rows[0][i] for i in own}
    return [joined[i] if i in joined else results[i] for i in range(len(graph.outputs))]


def _of_all_rows(graph: Graph) -> set[int]:
    """The nodes that depend on how many rows there are, or on more than one."""
    numbers: set[int] = set()
    for number, node in enumerate(graph.nodes):
        reduces = node.op == g.REDUCE and "m" in node.axes
        if reduces or (node.op == g.EXTENT and node.name == "m") or numbers.intersection(node.args):
            numbers.add(number)
    return numbers


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The meta device has none that could be left."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def node_values(
    graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Number], compute: torch.dtype, first_row: int = 0, number: int = 0
) -> list[Tensor]:  # fmt: skip
    """Every node's value, in shapes that broadcast: [M, N], [M, 1], [1, N] or a scalar, of operands also [M, K], [K, N] and [K]; packed masks as bytes."""
    m, n = extents(graph, a, b)
    values: list[Tensor] = []
    with without_autocast(a.device):  # which would round the operands and the product of fp32 values to half precision
        for node in graph.nodes:
            if node.op == g.DOT:
                values.append(product(*multiplied(graph, node, values, a, b, inputs), compute))
            elif node.op == g.POSITION:
                values.append(broadcastable(_positions(node.name, m, n, first_row, a.device), node.name, compute, a.device))
            elif node.op == g.UNIFORM:
                rows, columns = (_positions(index, m, n, first_row, a.device) for index in node.indices)
                values.append(philox.random_numbers(values[node.args[0]], rows, columns, number).to(compute))
            elif node.op == g.INPUT and (node.periods or node.blocks):
                given = inputs[node.name]
                assert isinstance(given, Tensor)
                for dim, (index, period) in enumerate(zip(node.indices, node.periods, strict=False)):
                    if period:
                        given = given.index_select(dim, _positions(index, m, n, first_row, a.device) % given.shape[dim])
                for dim, (index, block) in enumerate(zip(node.indices, node.blocks, strict=False)):
                    if block > 1:
                        along = torch.arange(a.shape[1], device=a.device) if index == "k" else _positions(index, m, n, first_row, a.device)
                        given = given.index_select(dim, along // block)
                values.append(broadcastable(given, node.indices, compute, a.device))
            else:
                values.append(_value(node, arguments(graph, node, values), a, b, inputs, compute, m, n))
    return values


def extents(graph: Graph, a: Tensor, b: Tensor) -> tuple[int, int]:
    """M and N."""
    return a.shape[0], b.shape[1] * (2 if graph.packed_along() == "n" else 1)


def summed(gradient: Tensor, periods: Sequence[str], shape: Sequence[int]) -> Tensor:
    """The gradient of an input whose rows or columns begin anew, of one in which each has an element of its own. periods: as of `ir.graph.Node`, of the last dimensions.
    shape: the input's."""
    for dim, period in enumerate(periods, -len(periods)):
        if period:
            extent, count = shape[dim], -(-gradient.shape[dim] // shape[dim])
            added = [0, 0] * (-1 - dim) + [0, count * extent - gradient.shape[dim]]
            gradient = torch.nn.functional.pad(gradient, added).unflatten(dim, (count, extent)).sum(dim - 1)
    return gradient


def _positions(index: str, m: int, n: int, first_row: int, device: torch.device) -> Tensor:
    first, extent = (first_row, m) if index == "m" else (0, n)
    return torch.arange(first, first + extent, device=device)


def arguments(graph: Graph, node: Node, values: Sequence[Tensor]) -> list[Tensor]:
    """Those of a node, in shapes that broadcast to its own: where rows lie along k, what varies along k alone is a column."""
    with_indices = [(values[i], graph.nodes[i].indices) for i in node.args]
    return [x[:, None] if (node.indices, indices) == ("kn", "k") and x.dim() == 1 else x for x, indices in with_indices]


def multiplied(graph: Graph, node: Node, values: Sequence[Tensor], a: Tensor, b: Tensor, inputs: Mapping[str, Number]) -> tuple[Tensor, Tensor]:
    """What a product multiplies: operands as they are given, or what is computed of them, rounded once, in the dtypes that they are multiplied in. Scales of fp8 are
    no part of what is: kernels multiply sums by them, of operands as they are given."""
    other = inputs[node.name] if node.name else b
    assert isinstance(other, Tensor)
    held = [BY_TORCH_ON_CPU[str(t.dtype)] for t in (a, other)]
    left, right = (
        given.to(torch_dtype(dtype)) if graph.nodes[i].op == g.INPUT or g.is_given(graph.nodes[i]) else values[i] if dtype.is_fp8 else convert(values[i], dtype)
        for i, given, dtype in zip(node.args, (a, other), (held[0], multiplied_as(*held)), strict=True)
    )
    return left, right


def _value(node: Node, args: list[Tensor], a: Tensor, b: Tensor, inputs: Mapping[str, Number], compute: torch.dtype, m: int, n: int) -> Tensor:
    match node.op:
        case g.CONSTANT:
            return torch.full((), node.value, dtype=compute, device=a.device)  # in fp32 as the kernel sees it
        case g.EXTENT:
            return torch.full((), {"m": m, "n": n, "k": a.shape[1]}[node.name], dtype=compute, device=a.device)
        case g.INPUT if node.kind == g.SEED:
            seed = inputs[node.name]
            assert isinstance(seed, Tensor)
            return seed.reshape(())
        case g.INPUT:
            return broadcastable(inputs[node.name], node.indices, compute, a.device)
        case g.BITS:
            mask = inputs[node.name]
            assert isinstance(mask, Tensor)
            return unpack(mask, n)
        case g.OPERAND if node.dtype is not None:
            integers: Tensor = nibbles.unpack(b, node.indices.index(node.axes), node.dtype == INT4)
            return integers.to(compute)
        case g.OPERAND:
            return (a if node.name == "a" else b).to(compute)
        case g.CAST:
            assert node.dtype is not None
            return convert(args[0], node.dtype).to(compute)
        case g.BITMASK:
            return pack(args[0].expand(m, n))
        case g.BLOCKWISE:
            apart = blocks_apart(args[0].expand(m, n), node.blocks[-1], IDENTITY[node.name])
            return blocks_together(reduce(of_block(node), apart), node.blocks[-1], (m, n))
        case g.REDUCE:
            x = args[0] if node.axes == "k" else args[0].expand(m, n)
            return reduce(node, x)
        case op if op in ops.TABLE:
            return torch_function(op)(*args)
    raise InternalError(f"no reference for {node.op}")


def product(a: Tensor, b: Tensor, compute: torch.dtype) -> Tensor:
    """a @ b in `compute`; of int8 operands the int32 sums, rounded to `compute`."""
    if a.dtype == torch.int8:
        return int8_product(a, b).to(compute)
    return a.to(compute) @ b.to(compute)


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of int8 operands in int32, where sums past 2^31 wrap around."""
    exact = a.double() @ b.double()  # up to K = 2^39
    return exact.to(torch.int64).to(torch.int32)


def reduce(node: Node, x: Tensor) -> Tensor:
    dims = {"m": (0,), "n": (1,), "mn": (0, 1), "k": (1,) if node.indices == "m" else (0,)}[node.axes]
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
        return torch.full(shape, IDENTITY[node.name], dtype=x.dtype, device=x.device)
    return torch_reduction(node.name)(x, dims)


def of_block(node: Node) -> Node:
    """The reduction of each row of `blocks_apart` that a reduction of blocks is."""
    return Node(g.REDUCE, (), node.kind, "m", True, name=node.name, axes="n")


def blocks_apart(x: Tensor, block: int, identity: float = 0.0) -> Tensor:
    """[M, N] -> [M * ceil(N / block), block]: blocks of columns one below the other, the last of a row filled up."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=identity).reshape(-1, block)


def blocks_together(x: Tensor, block: int, shape: tuple[int, int]) -> Tensor:
    """[M * ceil(N / block), 1] -> [M, N]: a value of each block, for all of its elements."""
    m, n = shape
    return x.reshape(m, -(-n // block)).repeat_interleave(block, 1)[:, :n]


def broadcastable(value: Number, indices: str, compute: torch.dtype, device: torch.device) -> Tensor:
    """An input in a shape that broadcasts against [M, N], or against its operand but for what varies along k alone, which is [K]."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float64, device=device).to(torch.float32).to(compute)  # what is too large for fp32 is infinite
    value = value.to(compute)
    return {"m": lambda: value[:, None], "n": lambda: value[None, :], "": lambda: value.reshape(())}.get(indices, lambda: value)()


def shaped(value: Tensor, indices: str, m: int, n: int) -> Tensor:
    """A node's value in the shape of an output: [M, N], [M], [N] or []."""
    if indices == "mn":
        return value if value.shape == (m, n) else value.expand(m, n)
    return value.reshape({"m": (m,), "n": (n,), "": ()}[indices])


def convert(x: Tensor, dtype: DType) -> Tensor:
    """x rounded once to nearest even. fp8 and int8 saturate, as the hardware's conversions and cuBLASLt do; NaN becomes 0 in int8."""
    if dtype == INT8:
        return torch.nan_to_num(x, nan=0.0).round().clamp(-128, 127).to(torch.int8)
    if dtype.is_fp8:
        x = x.clamp(-dtype.largest, dtype.largest).to(torch.float32)
    return x.to(torch_dtype(dtype))


def pack(p: Tensor) -> Tensor:
    """Boolean [..., N] -> uint8 [..., ceil(N / 8)]: bit n % 8 of byte n // 8 is column n; padding bits are zero. Rows are a multiple of 16 bytes apart.

    Source: the layout of cuBLASLt's CUBLASLT_EPILOGUE_RELU_AUX for a column-major result, seen from its transpose.
    """
    *rows, n = p.shape
    width = -(-n // 8)
    # by operations that change nothing in place, of which torch.export writes down no other; of integers that other runtimes shift, too
    bits = torch.nn.functional.pad(p.to(torch.int32), (0, width * 8 - n)).reshape(*rows, width, 8)
    packed = torch.bitwise_left_shift(bits, torch.arange(8, dtype=torch.int32, device=p.device)).sum(-1, dtype=torch.int32).to(torch.uint8)
    return torch.nn.functional.pad(packed, (0, g.mask_stride(n) - width))[..., :width]


def unpack(mask: Tensor, n: int) -> Tensor:
    """uint8 [..., ceil(N / 8)] -> boolean [..., N]; the inverse of `pack`."""
    places = torch.arange(8, dtype=torch.int32, device=mask.device)
    bits = torch.bitwise_right_shift(mask[..., None].to(torch.int32), places) & 1
    return bits.flatten(-2)[..., :n].bool()
