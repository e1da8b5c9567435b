"""The operations on DTensors: for tensor parallelism, sequence parallelism and what else torch.distributed.tensor splits.

In each dimension of the mesh a program can be computed in parts: of M, where each process has rows, of N, where each has columns, of K, where each has a summand
of the product, if the program is linear in it (x @ w.T + bias is, and relu of that is not), and not in parts at all. The way is taken that moves the fewest bytes
between processes; the whole comes first, so that of whole tensors whole results come.

All of it is by what torch.distributed.tensor offers everybody: a tensor is redistributed, and the operation runs on each process's own part.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from epigen.codegen.lower import over_product
from epigen.dtypes import BY_TORCH_ON_CPU
from epigen.errors import CallError
from epigen.ir import graph as g
from epigen.ir.graph import PRODUCT, Graph
from epigen.ir.program import MOST_PROGRAMS
from epigen.runtime import outputs
from epigen.training import library

REPLICATE, SUMMAND = Replicate(), Partial()


class Way(NamedTuple):
    """How one dimension of a mesh shares a program. packs: whether masks are split along n, eight columns a byte."""

    inputs: Mapping[str, Placement]
    outputs: tuple[Placement, ...]
    packs: bool = False


# -- which ways there are


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def ways(text: str, operands: int) -> tuple[Way, ...]:
    """operands: 2, or 1 where the product is given."""
    graph = _graph(text, operands)
    candidates = [_along("", graph, operands), _along("m", graph, operands), _along("n", graph, operands), _summed(graph, operands)]
    return tuple(way for way in candidates if way is not None)


def _graph(text: str, operands: int) -> Graph:
    graph = library.kernel(text, None).graph
    return graph if operands == 2 else over_product(graph)


def _indices(graph: Graph, operands: int) -> dict[str, str]:
    """Of all that a program takes, by name."""
    return {**({"a": "mk", "b": "kn"} if operands == 2 else {}), **{i.name: i.indices for i in graph.inputs()}}


def _split(indices: str, axis: str) -> Placement:
    return Shard(indices.index(axis)) if axis and axis in indices else REPLICATE


def _along(axis: str, graph: Graph, operands: int) -> Way | None:
    """Each process has a part of M or of N. A sum along it is then a summand of the whole one, of which nothing else can be computed; and no process knows
    which of all rows or columns it has."""
    if axis and (axis in graph.numbered() or _counts(axis, graph)):
        return None
    sums = {i for i, node in enumerate(graph.nodes) if axis and node.op == g.REDUCE and axis in node.axes}
    if any(graph.nodes[i].name != "sum" for i in sums) or any(sums & {*node.args} for node in graph.nodes):
        return None
    results = [SUMMAND if o.node in sums else _split(graph.nodes[o.node].indices, axis) for o in graph.outputs]
    if any(o.node in sums and o.dtype is not None and not _sums(o.dtype.torch) for o in graph.outputs):
        return None
    packs = axis == "n" and any(n.op == g.BITS or n.kind == g.PACKED for n in graph.nodes)
    return Way({name: _split(indices, axis) for name, indices in _indices(graph, operands).items()}, tuple(results), packs)


def _summed(graph: Graph, operands: int) -> Way | None:
    """Each process has a summand of the product, and of what is added to it, and so of the results. What is computed of operands has parts along k, too."""
    roles: dict[int, bool] = {}
    if _counts("k", graph):
        return None
    if not all(graph.nodes[o.node].kind != g.PACKED and (o.dtype is None or _sums(o.dtype.torch)) for o in graph.outputs):
        return None
    if not all(_plays(graph, o.node, True, roles) for o in graph.outputs):
        return None
    summands = {graph.nodes[i].name for i, linear in roles.items() if linear and graph.nodes[i].op == g.INPUT}
    if summands & _of_operands(graph):  # what is multiplied has to be whole
        return None
    if any("k" in g.shared_along(i) for i in graph.inputs()):  # a block may lie across two processes' parts
        return None
    taken: dict[str, Placement] = {i.name: SUMMAND if i.name in summands else _split(i.indices, "k") for i in graph.inputs()}
    if operands == 2:
        taken |= {"a": Shard(1), "b": Shard(0)}
    elif taken.get(PRODUCT) != SUMMAND:
        return None
    return Way(taken, (SUMMAND,) * len(graph.outputs))


def _counts(axis: str, graph: Graph) -> bool:
    """Whether it computes with how many rows, columns or k there are, of which a process has some."""
    return any(node.op == g.EXTENT and node.name == axis for node in graph.nodes)


def _of_operands(graph: Graph) -> set[str]:
    """The inputs of which operands are computed."""
    product = graph.product()
    seen: set[int] = set()
    pending = [] if product is None else [*graph.nodes[product].args]
    while pending:
        number = pending.pop()
        if number not in seen:
            seen.add(number)
            pending += graph.nodes[number].args
    return {graph.nodes[i].name for i in seen if graph.nodes[i].op == g.INPUT}


def _sums(dtype: str) -> bool:
    """Whether summands may be rounded to it: as torch's own products are."""
    return dtype in ("float64", "float32", "float16", "bfloat16")


def _plays(graph: Graph, number: int, linear: bool, roles: dict[int, bool]) -> bool:
    """Whether a value can be a sum of the processes' (linear), or is the same for all. roles: what has been said of the values so far."""
    if number in roles:
        return roles[number] == linear
    roles[number] = linear
    node = graph.nodes[number]
    parts: list[tuple[int, bool]]
    if not linear:
        if node.op in (g.DOT, g.OPERAND):
            return False
        parts = [(i, False) for i in node.args]
    elif node.op in (g.DOT, g.INPUT, g.OPERAND):
        return True
    elif node.op in ("add", "sub", "neg") or (node.op == g.REDUCE and node.name == "sum"):
        parts = [(i, True) for i in node.args]
    elif node.op == g.CAST:
        parts = [(i, node.dtype is not None and _sums(node.dtype.torch)) for i in node.args]
    elif node.op in ("mul", "scale", "div"):
        first, second = node.args
        of = (
            second
            if node.op != "div" and (_multiplies(graph, second), graph.nodes[second].indices) > (_multiplies(graph, first), graph.nodes[first].indices)
            else first
        )
        parts = [(i, i == of) for i in node.args] if first != second else [(first, False)]
        if first == second:
            return False
    elif node.op == "where":
        condition, *both = node.args
        parts = [(condition, False), *((i, True) for i in both)]
    else:
        return node.op == g.CONSTANT and node.value == 0
    return all(_plays(graph, i, role, roles) for i, role in parts)


def _multiplies(graph: Graph, number: int) -> bool:
    """Whether a value is computed from the product."""
    node = graph.nodes[number]
    return node.op == g.DOT or (node.op == g.INPUT and node.name == PRODUCT) or any(_multiplies(graph, i) for i in node.args)


# -- which is taken, and run


class Call(NamedTuple):
    """What an operation was called with."""

    text: str
    operands: list[Tensor]
    inputs: list[Tensor | None]
    outs: list[Tensor]

    @classmethod
    def of(cls, name: str, args: Sequence[Any]) -> Call:
        match name, args:
            case "accumulate", (grad, a, b):
                return cls(library.ACCUMULATE, [a, b], [grad], [grad])
            case "into", (text, _, operands, inputs, _, outs):
                return cls(text, operands, inputs, outs)
            case "program" | "fused", (text, _, a, b, inputs, _):
                return cls(text, [a, b], inputs, [])
        text, mm, inputs, _ = args
        return cls(text, [mm], inputs, [])

    def arguments(self, name: str, args: Sequence[Any]) -> list[Any]:
        """The inverse of `of`. args: what the rest is taken from."""
        match name:
            case "accumulate":
                return [*self.outs, *self.operands]
            case "into":
                return [*args[:2], self.operands, self.inputs, args[4], self.outs]
            case "program" | "fused":
                return [*args[:2], *self.operands, self.inputs, args[5]]
        return [self.text, *self.operands, self.inputs, args[3]]


def run(name: str, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What torch runs in place of an operation of which any tensor is a DTensor."""
    call = Call.of(name, args)
    if any(t.dim() > 2 for t in call.operands):
        raise CallError("operands with leading dimensions are not divided between processes: call with the local tensors (t.to_local()), or product by product")
    graph = _graph(call.text, len(call.operands))
    if graph.packed():
        raise CallError("an operand with two values in a byte is not divided between processes: call with the local tensors (t.to_local())")
    names = [*("ab" if len(call.operands) == 2 else [PRODUCT]), *(i.name for i in graph.inputs() if i.name != PRODUCT)]
    tensors = {what: t for what, t in zip(names, [*call.operands, *call.inputs], strict=True) if t is not None}
    mesh = _mesh(tensors, call.outs)
    m, n = call.operands[0].shape[0], call.operands[-1].shape[1]
    chosen = _chosen(mesh, ways(call.text, len(call.operands)), tensors, call.outs, n)
    with torch.no_grad():
        outs = [t.to_local() for t in call.outs]  # type: ignore[attr-defined]  # which `_mesh` has seen to
        local = {what: _local(t, mesh, [way.inputs[what] for way in chosen]) for what, t in tensors.items()}
        for whole, out in zip(call.outs, outs, strict=True):  # an input that is written is one tensor with its output
            local |= {what: out for what, t in tensors.items() if t is whole}
        given = [local.get(what) for what in names]
        own = Call(call.text, given[: len(call.operands)], given[len(call.operands) :], outs)  # type: ignore[arg-type]  # operands are there
        results = operation(*own.arguments(name, args), **kwargs)
        if results is None:
            return None
        held = [out.held(m, n) for out in outputs.of(graph, BY_TORCH_ON_CPU[str(call.operands[0].dtype)])]
        shapes = [torch.Size(h.shape if h.width is None else (h.shape[0], h.width)) for h in held]
        return [
            DTensor.from_local(t, mesh, [way.outputs[i] for way in chosen], run_check=False, shape=shape, stride=h.strides)
            for i, (t, shape, h) in enumerate(zip(results, shapes, held, strict=True))
        ]


def _mesh(tensors: Mapping[str, Tensor], outs: Sequence[Tensor]) -> DeviceMesh:
    named = [*tensors.items(), *(("out", t) for t in outs)]
    distributed = [t for _, t in named if isinstance(t, DTensor)]
    mesh: DeviceMesh = distributed[0].device_mesh
    if any(t.device_mesh != mesh for t in distributed):
        raise CallError(f"the tensors of a layer are distributed over several meshes, of which one was expected: {', '.join(name for name, _ in named)}")
    for name, t in named:
        if not isinstance(t, DTensor) and (name == "out" or t.numel() != 1):
            raise CallError(f"'{name}' is a plain tensor, and other tensors of the call are DTensors: make it one, by distribute_tensor or DTensor.from_local")
    return mesh


def _chosen(mesh: DeviceMesh, possible: Sequence[Way], tensors: Mapping[str, Tensor], outs: Sequence[Tensor], n: int) -> list[Way]:
    """One way for each dimension of the mesh: that which moves the fewest bytes, of those that have the results where `outs` are."""
    chosen = []
    for d in range(mesh.ndim):
        costs = [(_cost(way, d, mesh.size(d), tensors, outs, n), way) for way in possible]
        here = [(cost, way) for cost, way in costs if cost is not None]
        if not here:
            placed = ", ".join(str(getattr(t, "placements", "")) for t in outs)
            raise CallError(
                f"out is distributed as {placed}, and no way to compute the program gives that: have it whole (Replicate), or split as its operands are"
            )
        _, way = min(here, key=lambda x: x[0])
        chosen.append(way)
        n = n // mesh.size(d) if way.packs else n
    return chosen


def _cost(way: Way, d: int, processes: int, tensors: Mapping[str, Tensor], outs: Sequence[Tensor], n: int) -> float | None:
    """What a process sends, about, in dimension d of the mesh; None where the way is none."""
    if way.packs and n % (8 * processes):
        return None
    if any(p == SUMMAND and not isinstance(tensors.get(name), DTensor) for name, p in way.inputs.items()):  # each process would add a number
        return None
    if any(_at(t, d) != p for t, p in zip(outs, way.outputs, strict=False)):
        return None
    return sum(_moved(t, _at(t, d), way.inputs[name], processes) for name, t in tensors.items())


def _at(t: Tensor, d: int) -> Placement:
    return t.placements[d] if isinstance(t, DTensor) else REPLICATE


def _moved(t: Tensor, now: Placement, then: Placement, processes: int) -> float:
    """Bytes that a process sends, about: a sum of all is two passes, and to hand on what others lack is one."""
    if now in (then, REPLICATE):
        return 0
    each = t.numel() * t.element_size()
    if then in (SUMMAND, REPLICATE):
        return each * (2 if now.is_partial() else 1)
    return each if now.is_partial() else each / processes


def _local(t: Tensor, mesh: DeviceMesh, wanted: Sequence[Placement]) -> Tensor:
    """A process's own part."""
    if not isinstance(t, DTensor):
        return t
    summed = [d for d, p in enumerate(wanted) if p == SUMMAND and t.placements[d] != SUMMAND]
    placements = tuple(REPLICATE if d in summed else p for d, p in enumerate(wanted))
    # as DTensor.redistribute, which below autograd asks torch up to 2.12 for what it has no rule for: to detach in place
    local = redistribute_local_tensor(t.to_local(), t._spec, DTensorSpec(t.device_mesh, placements, tensor_meta=t._spec.tensor_meta))
    # of a whole tensor one process has all, and the others nothing: so the sum is that
    return local if all(mesh.get_local_rank(d) == 0 for d in summed) else torch.zeros_like(local)
