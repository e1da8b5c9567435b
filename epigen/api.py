"""The Python entry points: they compose the stages and hold no logic of their own. What `compile` does not need is imported where it is used."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from epigen import dtypes
from epigen.choose.choose import Chooser
from epigen.codegen import schedules
from epigen.codegen.spec import INVARIANT, ROUNDING, KernelConfig, Numerics
from epigen.db.database import Database
from epigen.db.problem import capability
from epigen.errors import CallError, near_miss, shown, unknown
from epigen.ir.program import graph_of, parting_of
from epigen.runtime.arguments import process_precision
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.kernel import BACKENDS, Kernel, KnownAs
from epigen.runtime.parted import PartedKernel
from epigen.runtime.rendering import renderer
from epigen.training import functions
from epigen.training.functions import FunctionKernel

if TYPE_CHECKING:
    from epigen.ir.derivation import Derivation
    from epigen.tuning.first_use import FirstUse
    from epigen.tuning.search import Progress
    from epigen.tuning.tune import Tuned

TUNE = (None, "missing")


def derive(
    text: str, *, save: str | None = None, wrt: str | Iterable[str] | None = None, of: str | Iterable[str] | None = None, dtype: Any = "fp16"
) -> Derivation:
    """The program of the gradients of a program, what the forward keeps for it, and how the two are wired.

    text: the forward. save: what it keeps: "mask", "output", "preactivation" or "recompute"; by default the way that moves the fewest bytes.
    wrt: whose gradients are wanted, of "mm" and the inputs; by default all. of: the outputs at which gradients arrive; by default all that
    carry any, which masks, int8 and fp8 do not. dtype: of the operands, by epigen's or torch's name, or a torch dtype.
    Raises ParseError or CheckError for the text, DerivationError where there is no derivative, CallError for the rest.

    >>> import epigen
    >>> derived = epigen.derive("relu(mm + bias)")
    >>> print(derived.forward.text)
    out = relu(mm + bias); saved = bitmask(~(out <= 0)); out, saved
    >>> print(derived.backward.text)
    dmm = drelu(mm, mask); dbias = bgrad(dmm); dmm, dbias
    """
    from epigen.ir.derive import derive
    from epigen.tuning import request

    operands = dtypes.BY_NAME[request.dtype_of(dtype)]
    return derive(graph_of(text), operands, save, wrt, of)


@functools.cache
def database() -> Database:
    """The tuning databases that every kernel of this process looks in: the user's, then the shipped ones."""
    return Database()


@functools.cache
def first_use() -> FirstUse:
    """What tunes at first use, one problem at a time for all kernels of this process."""
    from epigen.tuning.first_use import FirstUse

    return FirstUse(database())


@overload
def compile(
    text: str,
    *,
    config: KernelConfig | Mapping[str, Any] | None = ...,
    backend: str | None = ...,
    precision: str | None = ...,
    tune: str | None = ...,
    invariant: str | None = ...,
    rounding: str | None = ...,
) -> Kernel: ...


@overload
def compile(
    text: Callable[..., Any],
    *,
    config: KernelConfig | Mapping[str, Any] | None = ...,
    backend: str | None = ...,
    precision: str | None = ...,
    tune: str | None = ...,
    invariant: str | None = ...,
    rounding: str | None = ...,
) -> FunctionKernel: ...


def compile(
    text: str | Callable[..., Any],
    *,
    config: KernelConfig | Mapping[str, Any] | None = None,
    backend: str | None = None,
    precision: str | None = None,
    tune: str | None = None,
    invariant: str | None = None,
    rounding: str | None = None,
) -> Kernel | FunctionKernel:
    """Compile a program such as "relu(mm + bias)" to a callable kernel.

    text: the program, in the language that `epigen ops` and the README describe; or a function of torch's, such as `lambda mm, bias: torch.relu(mm + bias)`,
    of the product and of inputs by name: it is traced by the first call, with the shapes that it has there.
    config: a schedule and its values, as {"schedule": "tiled", "block_m": 64, …}; by default chosen a call.
    backend: "triton" (a GPU), "interpreter" (the generated kernel under Triton's interpreter) or "reference" (torch, operation by
    operation); by default triton for GPU tensors and reference for CPU tensors.
    precision: "ieee" or "tf32" for fp32 operands; by default what torch's own CUDA products go by at each call, which is
    `torch.backends.cuda.matmul.fp32_precision`: of that and torch.set_float32_matmul_precision() the one that was set last. "fast_accum" for fp8
    operands: Hopper's tensor cores add up all of k in about 14 bits, as torch._scaled_mm has them do with use_fast_accum=True; by default each sum of
    up to 128 products is added in fp32.
    tune: "missing" tunes at the first call of GPU tensors of whose problem, or one alike but for M up to the same power of two, no database
    has a record: that call waits for 48 trials, the winner goes into the user's database, and later calls of any process find it. Never
    inside a CUDA graph capture. By default nothing is tuned.
    invariant: "m" gives a row of the result the same bits whatever M is, wherever the row lies among the others, and however a and the inputs of its rows lie
    in memory: what a request is answered does not depend on what else is in its batch. k is not split, and no product is the vendor's. It holds for tiles
    and for what is reduced along n or k; what is reduced along m takes all rows by its meaning. On the CPU the reference takes one row after the other.
    A config that is given is the same for all M, and is refused where it splits k. With `tune` those that keep the order of sums are measured.
    rounding: "eager" rounds each operation as eager torch does, to the dtype that torch promotes its arguments to, the product first; by default all between the
    product and an output is fp32, and rounded once. Of the same product CPU tensors get eager's bits, and so do CUDA tensors, by the functions of Triton's
    libdevice; the few functions that docs/language.md names may differ in fp32's last bits, which the rounding that follows mostly hides. Reductions stay fp32.
    Raises ParseError or CheckError for the text, ConfigError for the config, CallError for the rest.

    >>> import torch, epigen
    >>> fused = epigen.compile("relu(mm + bias)")
    >>> fused(torch.ones(2, 3), torch.ones(3, 4), bias=torch.full((4,), -2.0))
    tensor([[1., 1., 1., 1.],
            [1., 1., 1., 1.]])
    """
    if backend is not None and backend not in BACKENDS:
        raise CallError(unknown("backend", backend, BACKENDS))
    if precision is not None and precision not in dtypes.PRECISIONS:
        raise CallError(unknown("precision", precision, dtypes.PRECISIONS))
    if tune not in TUNE:
        hint = near_miss(shown(tune), ["missing"]) or "it is 'missing' or None"
        raise CallError(f"unknown tune={shown(tune)}: {hint}")
    if tune is not None and config is not None:
        raise CallError("config and tune exclude each other: a given config leaves nothing to tune")
    if invariant is not None and invariant not in INVARIANT:
        raise CallError(unknown("invariant", invariant, INVARIANT))
    if rounding is not None and rounding not in ROUNDING:
        raise CallError(unknown("rounding", rounding, ROUNDING))
    config = schedules.accepted(config) if config is not None else None
    numerics = Numerics(precision, invariant is not None, rounding or "")
    arithmetic = {"precision": precision, "invariant": invariant, "rounding": rounding}
    if functions.is_function(text):
        options: dict[str, Any] = {"config": config, "backend": backend, "tune": tune, **arithmetic}
        again = functools.partial(compile, text, **options)
        return functions.FunctionKernel(text, functools.partial(compile, **options), again, numerics)  # type: ignore[arg-type]
    graph = graph_of(text)  # type: ignore[arg-type]  # which refuses what is no text
    assert isinstance(text, str)
    parting = parting_of(text)
    at_call = first_use().chooser(graph) if tune else None
    made_by = functools.partial(compile, text, config=config, backend=backend, tune=tune, **arithmetic)
    options = {"config": config and {"schedule": config.schedule, **dict(config.values)}, "backend": backend, **arithmetic}
    known_as = KnownAs(
        graph.text if parting else text, tune, json.dumps({k: v for k, v in options.items() if v is not None}) if any(options.values()) else None
    )
    kernel = functools.partial(PartedKernel, parting) if parting else Kernel
    return kernel(graph, renderer(), Chooser(graph, database()), config, backend, numerics, at_call, made_by, known_as)


def tune(
    programs: str | Iterable[str], shapes: str | Iterable[Any], *, dtype: Any = "fp16", weight: Any = None, layout: str = "nt", precision: str | None = None,
    invariant: str | None = None, groups: str | None = None, sparse: str | None = None, devices: Sequence[int] | str | None = None, trials: int = 48, budget_s: float | None = None, seed: int = 0, storage: str | None = None,
    fresh: bool = False, missing: bool = False, database: Database | Path | str | None = None, report: Callable[[int, Progress], None] | None = None,
    machine: Machine = THIS_MACHINE,
) -> list[Tuned]:  # fmt: skip
    """Find the fastest correct config of each program at each shape, and add the winners to the database, where later calls find them.

    programs: one or several. shapes: (M, N, K) or "MxNxK", one or several; of a batch the number of its products in front. dtype: of operands and inputs, by epigen's or torch's name, or a
    torch dtype. weight: the dtype of b where it is a weight of fewer bits, such as "int8". layout: how a and b lie, n row-major and t transposed: "nt" is x @ weight.T. precision, invariant: as for `compile`.
    groups: "m" or "k" where the products of a batch are groups along it, as `kernel(a, b, groups=ends)` takes them; the shape has so much of it as they have in the mean.
    sparse: the operand of whose values two of four are 0, "b" for x @ weight.T of `torch.sparse.to_sparse_semi_structured(weight)`: the vendor's product of it competes with all
    kernels of its dense values.
    devices: indices of GPUs of one kind, or "all"; by default the current one. trials: configs measured a problem. budget_s: seconds a
    problem. storage: where trials are kept, a "PATH.journal" or an Optuna storage URL; by default a journal a problem in the user's cache,
    from which the next search of the same problem goes on, unless `fresh` forgets it first. missing: leave out what was tuned for this GPU
    under this version of Triton, by the user or for what epigen ships with. database: a Database or its path; by default
    the user's. report: told of the progress of the problem with an index, from any thread. machine: whose GPUs `devices` names.
    Returns one `Tuned` a problem, each problem once; one in which no config works has no result and says why in `error`. Ctrl-C ends it
    with what was found.
    Raises TuneError without a GPU, DatabaseError where no winner could be added, ParseError or CheckError for a program, CallError for the
    rest; all before anything is measured.

    >>> import torch, epigen
    >>> if torch.cuda.is_available():
    ...     for tuned in epigen.tune("relu(mm + bias)", ["4096x4096x4096", (16, 4096, 4096)], dtype=torch.bfloat16):
    ...         print(tuned)
    """
    from epigen.tuning import remembered, request
    from epigen.tuning.fleet import tune_all

    if trials < 1:
        raise CallError(f"trials={trials}: at least one config is measured")
    if not 0 <= seed < 1 << 31:
        raise CallError(f"seed={seed}: a seed is a whole number from 0 to {(1 << 31) - 1}")
    if budget_s is not None and not budget_s >= 0:
        raise CallError(f"budget_s={budget_s}: a problem's time is 0 seconds or more")
    several = [programs] if isinstance(programs, str) else list(programs)
    given = [shapes] if isinstance(shapes, str) else list(shapes)
    if given and all(isinstance(e, int) for e in given):
        given = [tuple(given)]
    if precision is None:
        precision = process_precision()
    wanted = request.distinct(request.every(several, given, [dtype], [layout], precision, invariant or "", [weight or ""], groups or "", sparse or ""))
    chosen, target = request.gpus_for(devices, machine)
    tasks = [a.task(target, seed) for a in wanted]  # what does not fit together comes out before anything is measured
    base = _database() if database is None else database if isinstance(database, Database) else Database(Path(database))
    if missing:
        tasks = request.missing(tasks, base)
    for task in tasks:
        if fresh:
            remembered.forget(task)
    base.demand_writable(target.part, capability(target))
    where = remembered.default_storage if storage is None else storage
    limit = math.inf if budget_s is None else budget_s
    report = report or (lambda _index, _progress: None)
    return tune_all(tasks, base, devices=chosen, trials=trials, budget_s=limit, seed=seed, storage=where, report=report)


_database = database  # under a name that the argument of `tune` does not hide
