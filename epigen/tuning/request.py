"""What is asked to be tuned: programs, shapes, dtypes and layouts, checked before anything is measured, and the GPUs to do it on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from epigen import dtypes
from epigen.codegen.spec import GROUPED, INVARIANT, LAYOUTS, SPARSE
from epigen.db.database import Database
from epigen.db.problem import graph_digest
from epigen.dtypes import DType
from epigen.errors import CallError, TuneError, near_miss, unknown
from epigen.gpus import Target
from epigen.ir.graph import Graph
from epigen.ir.program import graph_of
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.loader import triton_version
from epigen.shapes import Shape
from epigen.tuning.task import Request, Task

NO_GPU = "no GPU is at hand to tune on"


def every(
    programs: Iterable[str | Graph], shapes: Iterable[Shape | str], dtype_names: Iterable[Any] = ("fp16",), layouts: Iterable[str] = ("nt",),
    precision: str = "ieee", invariant: str = "", weights: Iterable[Any] = ("",), groups: str = "", sparse: str = "",
) -> list[Request]:  # fmt: skip
    """All combinations, in the order of the arguments, the programs' first.

    programs: texts, or the graphs of such. shapes: as of `shape_of`. dtype_names: epigen's names, torch's, or torch dtypes. invariant: "" or "m".
    weights: dtypes of b as a weight of fewer bits, named likewise; "" for that of the operands. groups: "m" or "k" where the products of a batch are groups along it.
    sparse: the operand of whose values two of four are 0, or "".
    Raises ParseError or CheckError for a program, CallError for the rest.
    """
    graphs = [p if isinstance(p, Graph) else graph_of(p) for p in programs]
    extents, operands, lies = [shape_of(s) for s in shapes], [dtypes.BY_NAME[dtype_of(t)] for t in dtype_names], [layout_of(x) for x in layouts]
    if precision not in dtypes.PRECISIONS:
        raise CallError(unknown("precision", precision, dtypes.PRECISIONS))
    if invariant and invariant not in INVARIANT:
        raise CallError(unknown("invariant", invariant, INVARIANT))
    if groups and groups not in GROUPED:
        raise CallError(unknown("groups", groups, GROUPED))
    if sparse and sparse not in SPARSE:
        raise CallError(unknown("sparse operand", sparse, SPARSE))
    rights = [dtypes.WEIGHT_BY_NAME[weight_of(w)] if w else None for w in weights]
    of_each = {a: a.precision(precision) or "ieee" for a in operands}
    return [
        Request(
            graph,
            shape,
            a,
            dtypes.right_operand(a, weight, graph.packed() is not None),
            (_beside(a),),
            layout,
            of_each[a],
            invariant=invariant,
            groups=groups,
            sparse=sparse,
        )
        for graph, shape, a, weight, layout in product(graphs, extents, operands, rights, lies)
    ]


def _beside(operands: DType) -> DType:
    """The inputs' dtype: fp32 beside 8-bit operands, as the numerics of such programs want."""
    return dtypes.FP32 if operands.bits == 8 else operands


def distinct(requests: Iterable[Request]) -> list[Request]:
    """Each problem once, the first as it stands: two spellings of one computation are one problem."""
    named = {
        (graph_digest(r.graph), r.shape, r.a, r.b, r.inputs, r.layout, r.a.precision(r.precision), r.invariant, r.groups, r.sparse): r
        for r in reversed(list(requests))
    }
    return list(named.values())[::-1]


def missing(tasks: Iterable[Task], database: Database) -> list[Task]:
    """Those whose very problem was not tuned under this version of Triton: by the user, or for the databases that epigen ships with."""
    index, triton = database.index(), triton_version()
    return [task for task in tasks if next((found.how for found in index.same(task.problem, triton)), "") != "exact"]


def shape_of(given: Any) -> Shape:
    """M, N, K of "4096x4096x1024" or of three whole numbers; of "64x1024x1024x128" or four the number of products, and M, N, K of each. Raises CallError."""
    several: Sequence[Any] = ()
    if isinstance(given, str):
        several = [int(e) for e in given.split("x")] if re.fullmatch(r"\d{1,9}(x\d{1,9}){2,3}", given, re.ASCII) else ()
    elif isinstance(given, Sequence):
        several = given
    if any(type(e) is not int or not 0 <= e < 10**9 for e in several):
        several = ()
    match several:
        case [m, n, k]:
            return m, n, k
        case [count, m, n, k]:
            return count, m, n, k
    raise CallError(f"{given!r} is not of the form MxNxK, such as 4096x4096x1024, nor BxMxNxK, such as 64x1024x1024x128")


def dtype_of(given: Any) -> str:
    """epigen's name of an operand's dtype. given: that name, torch's name, or a torch dtype. Raises CallError."""
    name = str(given).removeprefix("torch.")
    dtype = dtypes.BY_NAME.get(name)
    if dtype is None:
        known = [t.name for t in dtypes.OPERANDS]
        raise CallError(f"unknown dtype '{name}': {near_miss(name, dtypes.BY_NAME) or 'known are ' + ', '.join(known)}")
    return dtype.name


def weight_of(given: Any) -> str:
    """epigen's name of the dtype of a weight of fewer bits. given: as for `dtype_of`. Raises CallError."""
    name = str(given).removeprefix("torch.")
    found = [t.name for t in dtypes.WEIGHTS if name in (t.name, t.torch)]
    if not found:
        raise CallError(unknown("dtype of a weight", name, [t.name for t in dtypes.WEIGHTS]))
    return found[0]


def layout_of(given: Any) -> str:
    if given not in LAYOUTS:
        raise CallError(f"unknown layout {given!r}: it is one of {', '.join(LAYOUTS)}, how a and b lie (n row-major, t transposed)")
    return str(given)


def gpus_for(wanted: Sequence[int] | str | None, machine: Machine = THIS_MACHINE) -> tuple[tuple[int, ...], Target]:
    """The GPUs to tune on, each once, and what they are. wanted: their indices, "all", or None for the current one.

    Raises TuneError without a GPU, for an index that there is not, and for GPUs that differ: what is best on one says nothing of another.
    """
    there = machine.indices()
    if not there:
        raise TuneError(NO_GPU)
    if isinstance(wanted, str) and wanted != "all":
        raise TuneError(f"devices are 'all' or their indices, and {wanted!r} was given")
    chosen = there[:1] if wanted is None else tuple(sorted(there)) if isinstance(wanted, str) else tuple(dict.fromkeys(wanted))
    if not chosen:
        raise TuneError("no device is named to tune on")
    if absent := [i for i in chosen if i not in there]:
        raise TuneError(f"there is no GPU {', '.join(map(str, absent))}: this machine has {', '.join(map(str, sorted(there)))}")
    targets = [machine.at_hand(i) for i in chosen]
    first = targets[0]
    if first is None:
        raise TuneError(NO_GPU)
    if other := next(((i, t) for i, t in zip(chosen, targets, strict=True) if t != first), None):
        name = other[1].part if other[1] else "none"
        raise TuneError(f"the GPUs differ ({chosen[0]} is {first.part}, {other[0]} is {name}): tune each kind by itself")
    return chosen, first
