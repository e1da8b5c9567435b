"""Compiles the kernels of a graph's programs side by side, in threads, while Inductor compiles the rest: most of a compiler's time is LLVM's and ptxas's, outside of Python.

Inductor's own processes would be no faster: in a new process their pool answered after 8 to 11 s, and the threads were done after 3 (H100, torch 2.11, 2026-11-27).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from epigen import api
from epigen.db.lookup import Index
from epigen.dtypes import FP32, DType
from epigen.errors import CompileError
from epigen.gpus import Target
from epigen.ir.graph import BITS, GROUPS, Node
from epigen.ir.reference import torch_dtype
from epigen.perf import resources
from epigen.runtime import loader
from epigen.training.expected import ProgramCall, planned

_MOST_SPILLED = 64
"""Bytes a thread. Of five models' kernels those with up to 32 were no slower than expected; 120, 576 and 1488 bytes took 1.3, 2.6 and 2.5 times as long (H100,
torch 2.11, Triton 3.6, 2026-11-25)."""

_CALM = 50
"""Instructions an element, by the model: of 48 kernels with up to 46 none kept more than 40 bytes a thread in memory, of 7 with 57 to 107 all but one kept 240
to 2576 (sm_90, Triton 3.6, 2026-11-26)."""


def spilled(call: ProgramCall, target: Target) -> str:
    """Why a program's kernel is slower than anything here expects: it has more values than registers. "" where it has not, or is not to be doubted.

    It is compiled for that, into Triton's cache, where the first call finds it.
    """
    index = api.database().index()
    return _compiled(call, target, index, os.getpid()).result() if _instructions(call, target, index) > _CALM else ""


def compile_ahead(kernels: Iterable[tuple[ProgramCall, Target]]) -> None:
    """Have these compiled. Their first calls wait for them; before what `spilled` says of one is known it is waited for there."""
    for call, target in kernels:
        _compiled(call, target, api.database().index(), os.getpid())


@functools.lru_cache(maxsize=4096)
def _instructions(call: ProgramCall, target: Target, _index: Index) -> float:
    return resources.Work(planned(call, target, call.kernel()._precision_now(call.dtype)).spec, call.shape, target).operations


@functools.lru_cache(maxsize=4096)
def _compiled(call: ProgramCall, target: Target, _index: Index, process: int) -> Future[str]:
    """What `_spilled` will say. process: whose threads compile, for those of a process that was forked are its parent's."""
    kernel, here = call.kernel(), torch.cuda.current_device() if torch.cuda.is_available() else None
    threads, prepared = _threads(process)
    future = threads.submit(_ready, call, target, here, prepared)
    kernel.wait_for(future)
    return future


@functools.lru_cache(maxsize=1)
def _threads(_process: int) -> tuple[ThreadPoolExecutor, Future[None]]:
    """With what each waits for before it compiles, and so every launch of what they compile: a C compiler takes half a second for it."""
    threads = ThreadPoolExecutor(os.cpu_count(), "epigen")
    return threads, threads.submit(loader.prepare)


def _ready(call: ProgramCall, target: Target, place: int | None, prepared: Future[None]) -> str:
    """place: of the GPU that the process works with."""
    prepared.result()
    if place is not None:
        torch.cuda.set_device(place)
    return _spilled(call, target)


def _spilled(call: ProgramCall, target: Target) -> str:
    (*batch, m, n, k), kernel = call.shape, call.kernel()
    extents, dtypes, ends = {"m": m, "n": n, "k": k}, dict(call.inputs), dict[str, torch.Tensor]()
    if call.groups:
        extents[call.groups] *= batch[0]  # one's behind another's
        ends[GROUPS] = torch.empty(batch, dtype=torch.int32, device="meta")

    def of(indices: str, *size: int, dtype: torch.dtype) -> torch.Tensor:
        lead = batch if len(indices) == 2 and not (call.groups and call.groups in indices) else ()
        return torch.empty(*lead, *size, dtype=dtype, device="meta")

    def lying(indices: str, dtype: DType | None) -> torch.Tensor:
        return of(indices, *(extents[i] for i in indices), dtype=torch_dtype(dtype or FP32))

    def given(node: Node) -> torch.Tensor:
        return of("mn", extents["m"], -(-n // 8), dtype=torch.uint8) if node.op == BITS else lying(node.indices, dtypes[node.name])

    a, b = (lying(i, call.dtype) if at == "n" else lying(i[::-1], call.dtype).mT for i, at in zip(("mk", "kn"), call.layout, strict=True))
    try:
        needs = kernel.warm(a, b, target, **{i.name: given(i) for i in kernel.graph.inputs()}, **ends)
    except CompileError as error:
        return str(error).partition("\n")[0]
    most = max((x.spills for x in needs), default=0)
    return f"its kernel keeps {most} bytes a thread in memory, for want of registers" if most > _MOST_SPILLED else ""
