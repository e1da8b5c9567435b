"""What `torch.compile(model, backend="epigen")` did with each product of a model: `epigen.report`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from epigen.dtypes import BY_TORCH
from epigen.errors import CallError
from epigen.ir.graph import GROUPS, PRODUCT
from epigen.runtime import vendor
from epigen.training import library
from epigen.training.plan import multiplied


@dataclass(frozen=True, slots=True)
class Lying:
    """A tensor of a call, without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, device: torch.device) -> Tensor:
        if not self.dtype.is_floating_point:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).zero_()
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.normal_() if self.dtype.itemsize > 1 else made.copy_(torch.randn(self.shape, device=device))


@dataclass(frozen=True, slots=True)
class Call:
    """What a program is called with, the inputs by name. tune: as of `epigen.compile`. options: its others, as JSON. groups: how many of rows or along k, or 0."""

    tune: str | None
    a: Lying
    b: Lying
    inputs: tuple[tuple[str, Lying], ...]
    options: str | None = None
    groups: int = 0

    def ends(self, device: torch.device) -> Tensor:
        """Where groups end that are all alike."""
        (extent, depth), own = self.a.shape, len(self.b.shape) == 3
        along = extent if own else depth
        return torch.tensor([along * (place + 1) // self.groups for place in range(self.groups)], dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was done with one product of a graph.

    shape: M, N, K, of a batch after the number of its products; of extents that vary those of the first call, and None for one that is known at run time alone. dtype: of the operands, as torch calls it.
    program: what is computed in its kernel; "" where it is left, and then `why` says why. neighbour: something elementwise follows it. absorbed: it is left,
    since the kernel that comes next computes all that follows it as well. times_us: expected of the program, and of the vendor's product with a kernel of
    Inductor's; None where nothing is known of the device. groups: how many it is of, whose rows, or k, the shape counts together, or 0. graph: "forward", "backward" or "inference".
    """

    shape: tuple[int | None, ...]
    dtype: str
    program: str
    why: str
    neighbour: bool
    absorbed: bool
    times_us: tuple[float, float] | None
    graph: str = ""
    call: Call | None = None
    groups: int = 0

    @property
    def taken(self) -> bool:
        return bool(self.program)

    @property
    def flops(self) -> int:
        return 2 * math.prod(e or 0 for e in self.shape)


@dataclass(frozen=True, slots=True)
class GraphSeen:
    """One graph. before, after: bytes that its kernels move, without epigen and with it. programs: those of epigen's kernels."""

    products: tuple[Seen, ...]
    before: int
    after: int
    programs: int


@dataclass
class Record:
    """All graphs of one call of torch.compile. restored: how many Inductor had kept from before, of which nothing is known."""

    graphs: list[GraphSeen] = field(default_factory=list)
    restored: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Products that are alike. saved_us: expected of each, and of two in one kernel of either a half; measured_us: measured."""

    seen: Seen
    count: int
    saved_us: float | None
    measured_us: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """rows: all products, those that are alike in one row. Its text is the table, and its last line the shares that were taken."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    summary: str

    def __str__(self) -> str:
        head = ("graph", "count", "M x N x K", "dtype", "expected", "measured", "program, or why it is left")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(head) - 1)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip() for line in cells]
        return "\n".join([*lines, *self.notes, self.summary])


def _cells(row: Row) -> tuple[str, ...]:
    seen = row.seen
    shape = "x".join("?" if e is None else str(e) for e in seen.shape)
    shape = f"{shape} in {seen.groups}" if seen.groups else shape
    what = seen.program if seen.taken else f"left: {seen.why}"
    return (seen.graph, str(row.count), shape, seen.dtype.removeprefix("torch."), _saving(row.saved_us), _saving(row.measured_us), what)


def _saving(us: float | None) -> str:
    return "-" if us is None else f"{us:+.1f} us"


def report(compiled: Any, measure: bool = False) -> Report:
    """What was done with the products of a model, forward and backward: shape, program, taken or left and why, and what is saved.

    compiled: what torch.compile(…, backend="epigen") returned, or a module on which `.compile(backend="epigen")` was called, after it has run: torch compiles
    at the first call, and the backward at the first backward. The expected saving of a product is that over the vendor's product and one kernel of
    Inductor's, by the databases or the model; negative is slower. measure: time both on the GPU, the second with epigen's own kernel for what follows.
    Raises CallError for what was not compiled so, or has not run yet, and for measure=True without a GPU.

    >>> import torch, epigen
    >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> model = torch.compile(layers, backend="epigen")  # doctest: +SKIP
    >>> _ = model(torch.ones(4, 8))  # doctest: +SKIP
    >>> print(epigen.report(model))  # doctest: +SKIP
    """
    record: Record | None = getattr(_wrapper_of(compiled), RECORD, None)
    if record is None or not (record.graphs or record.restored):
        raise CallError(
            "nothing has been compiled yet: run it once before the report (a model compiled a second time with the same options "
            "runs what the first made of it, and that one has the report)"
        )
    if measure and not torch.cuda.is_available():
        raise CallError("measure=True takes times on a GPU, and torch sees none here: leave it out for what is expected")
    seen = [product for graph in record.graphs for product in graph.products]
    measured = _measured(seen) if measure else {}
    rows = tuple(
        Row(s, count, None if s.times_us is None else s.times_us[1] - s.times_us[0], measured.get((s.program, s.call))) for s, count in Counter(seen).items()
    )
    return Report(rows, tuple(_notes(record)), _summary(record, seen))


def _notes(record: Record) -> list[str]:
    if not record.restored:
        return []
    what = "1 more graph" if record.restored == 1 else f"{record.restored} more graphs"
    return [f"{what}, and the backward of each, came from Inductor's cache, with the programs in place: TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 makes them anew"]


def _summary(record: Record, seen: Sequence[Seen]) -> str:
    taken = [s for s in seen if s.taken]
    flops, moved, after, programs = (
        sum(s.flops for s in seen), sum(g.before for g in record.graphs), sum(g.after for g in record.graphs), sum(g.programs for g in record.graphs)
    )  # fmt: skip
    return (
        f"{len(taken)} of {len(seen)} products taken ({_share(sum(s.flops for s in taken), flops)} of their FLOPs); their kernels move "
        f"{_share(programs, after)} of the model's bytes, and spare {_share(moved - after, moved)} of what it would move without"
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _measured(seen: Sequence[Seen]) -> dict[tuple[str, Call | None], float]:
    from epigen.tuning.sampling import Sampler
    from epigen.tuning.timer import ColdTimer

    measured_us: dict[tuple[str, Call | None], float] = {}
    place = torch.device("cuda", torch.cuda.current_device())
    timer = ColdTimer()
    for s in seen:
        if s.call is None or (s.program, s.call) in measured_us:
            continue
        runs = _runs(s.program, s.call, place)
        for run in runs:
            run()
        fused, unfused = Sampler(timer, runs[1]).interleaved(list(runs), hot=False)
        measured_us[s.program, s.call] = (unfused.median_us - fused.median_us) / (2 if multiplied(s.program) else 1)
    return measured_us


def _runs(program: str, call: Call, place: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The program's kernel, and the vendor's product, or both, with a kernel for what follows."""
    kernel = library.kernel(program, call.tune, call.options)
    a, b = call.a.made(place), call.b.made(place)
    inputs = {name: lying.made(place) for name, lying in call.inputs}
    ends = {GROUPS: call.ends(place)} if call.groups else {}

    def multiply(right: Tensor) -> Tensor:
        return torch._grouped_mm(a, right, offs=ends[GROUPS]) if ends else torch.matmul(a, right)

    if a.element_size() == 1:
        precision = kernel.signature_of(BY_TORCH[str(a.dtype)]).precision
        return (lambda: kernel(a, b, **inputs)), (lambda: kernel.over(vendor.scaled_product(a, b, precision), **inputs))
    if other := multiplied(program):
        reading = library.kernel(program.replace(f"dot(a, {other}[k,n])", f"{other}[m,n]"), None, call.options)
        right = inputs[other]
        return (lambda: kernel(a, b, **inputs, **ends)), (lambda: reading.over(multiply(b), **{**inputs, other: multiply(right)}))
    if program == PRODUCT:
        return (lambda: kernel(a, b, **inputs, **ends)), (lambda: multiply(b))
    return (lambda: kernel(a, b, **inputs, **ends)), (lambda: kernel.over(multiply(b), **inputs))


# -- where a record is kept

RECORD = "_epigen_record"
"""What torch's object of one call of torch.compile is given: it lives as long as what was compiled."""


def record_of(caller: Any) -> Record:
    """That of torch's object for one call of torch.compile; one of its own for any other caller."""
    if not isinstance(caller, torch._TorchCompileWrapper):
        return Record()
    record: Record | None = getattr(caller, RECORD, None)
    if record is None:
        setattr(caller, RECORD, record := Record())
    return record


def _wrapper_of(compiled: Any) -> Any:
    """torch's object for the call of torch.compile that gave this."""
    from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext, innermost_backend

    context: Any = None
    if isinstance(compiled, OptimizedModule):
        context = compiled.dynamo_ctx
    else:
        called = compiled._compiled_call_impl if isinstance(compiled, torch.nn.Module) else compiled
        cells = getattr(getattr(called, "__func__", called), "__closure__", None) or ()
        context = next((cell.cell_contents for cell in cells if isinstance(_contents(cell), _TorchDynamoContext)), None)
    wrapper = innermost_backend(context.callback) if context is not None and callable(context.callback) else None
    if getattr(wrapper, "compiler_name", None) != "epigen" and getattr(getattr(wrapper, "compiler_fn", None), "__module__", "") != "epigen.training.backend":
        raise CallError(f"a report is on what torch.compile(model, backend='epigen') returned, and {_described(compiled, wrapper)} was given")
    return wrapper


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _described(compiled: Any, wrapper: Any) -> str:
    kind = f"a {type(compiled).__name__}"
    return kind if wrapper is None else f"{kind} compiled with backend {getattr(wrapper, 'compiler_name', wrapper)!r}"


def in_graph(products: Sequence[Seen], graph: str) -> tuple[Seen, ...]:
    return tuple(replace(s, graph=graph) for s in products)
