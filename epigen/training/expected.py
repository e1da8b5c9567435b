"""How long a region of a graph is expected to take: as a program, and as the vendor's product with a kernel of Inductor's. By the databases, else the model."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from epigen import api, gpus
from epigen.codegen.lower import signature_of_contiguous
from epigen.codegen.spec import Signature
from epigen.db.lookup import Index, Recorded
from epigen.dtypes import FP32, DType
from epigen.errors import CompileError
from epigen.gpus import Gpu, Target
from epigen.ir.graph import BITS, Node
from epigen.ir.reference import torch_dtype
from epigen.perf import model, resources
from epigen.runtime import loader
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.kernel import Kernel
from epigen.runtime.prepared import Plan
from epigen.shapes import Shape
from epigen.training import library

Held = tuple[tuple[str, DType | None], ...]
"""The dtypes of a program's inputs, by name."""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A program's call. shape: M, N, K, of a batch after the number of its products. dtype: of the operands. layout: how they lie. inputs: the dtypes of the program's.
    options: as the operations take them."""

    text: str
    shape: Shape
    dtype: DType
    layout: str
    inputs: Held
    options: str | None = None

    def kernel(self, tune: str | None = None) -> Kernel:
        return library.kernel(self.text, tune, self.options)


@dataclass(frozen=True, slots=True)
class Terms:
    """By what a program is taken or left. tune: as of `epigen.compile`; "missing" has what is expected of a program measured. machine: whose GPUs it is for."""

    tune: str | None = None
    machine: Machine = THIS_MACHINE


UNTUNED = Terms()


_DOUBT, _DOUBT_A_TILE = 1.09, 0.06
"""How often an estimate counts beside what it would replace, and how much of it more for each tile that the kernel reads. Of 19 regions of five models' layers
(bf16, 8192 tokens, untuned) kernels took 0.98 of their estimates where they read none, 1.03 with one, 1.17 and 1.24 with two and three; and what they would
replace took 0.92 (H100, torch 2.11, Triton 3.6, 2026-11-25)."""

_MEASURED = 1.03
"""How often a measurement counts. Alone, launch behind launch, Llama's gates took 1.3 and 2.3 % less than product and pass, and its residuals 1.1 and 1.8 %; within the model,
where other kernels leave their results in L2 and the clock higher, the forward took 1.3 % more with them (H100, torch 2.11, Triton 3.6, 2026-11-26)."""

_MOST_SPILLED = 64
"""Bytes a thread. Of the same models' kernels those with up to 32 were no slower than expected; 120, 576 and 1488 bytes took 1.3, 2.6 and 2.5 times as long."""


def kernels_us(call: ProgramCall, target: Target, tune: str | None) -> tuple[float, float]:
    """The program's kernel, and the vendor's product alone, in microseconds. tune: as of `epigen.compile`; what is missing is tuned here, and so is measured."""
    precision = call.kernel()._precision_now(call.dtype)
    fused, bare, measured = _kernels_us(call, target, precision, api.database().index())
    if tune is not None and not measured:
        with _disable_current_modes():  # which are there while torch compiles
            kernel = call.kernel(tune)
            kernel.plan(call.shape, target=target, signature=_signature(kernel, call, precision), as_called=True)
        fused, bare, measured = _kernels_us(call, target, precision, api.database().index())
    return fused * (_MEASURED if measured or tune is not None else _doubt(call)), bare


def _doubt(call: ProgramCall) -> float:
    return _DOUBT * (1 + _DOUBT_A_TILE * sum(i.indices == "mn" and i.op != BITS for i in call.kernel().graph.inputs()))


@functools.lru_cache(maxsize=4096)
def _kernels_us(call: ProgramCall, target: Target, precision: str, _index: Index) -> tuple[float, float, bool]:
    """Both, and whether they were measured. Layers repeat, and a plan takes milliseconds: each call is planned once, as long as the databases stay what they are."""
    shape, gpu = call.shape, gpus.of_target(target)
    plan = _planned(call, target, precision)
    signature = plan.spec.signature
    record = plan.choice.record if isinstance(plan.choice, Recorded) and plan.choice.how in ("exact", "triton") else None
    if record is not None and record.baseline_us is not None:
        return record.median_us, record.baseline_us, True
    bare = library.kernel("mm", None).plan(shape, target=target, signature=replace(signature, inputs=(), tma=tuple(t for t in signature.tma if t in "ab")))
    return model.estimate_us(plan.spec, plan.choice.config, shape, gpu).us, model.unfused_us(bare.spec, shape, gpu), False


def _planned(call: ProgramCall, target: Target, precision: str) -> Plan:
    kernel = call.kernel()
    return kernel.plan(call.shape, target=target, signature=_signature(kernel, call, precision))


def _signature(kernel: Kernel, call: ProgramCall, precision: str) -> Signature:
    return signature_of_contiguous(kernel.graph, call.dtype, call.dtype, call.inputs, call.shape, call.layout, precision)


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
    """Have these compiled, side by side, and while Inductor compiles the rest: nearly all of a compiler's time is LLVM's and ptxas's, outside of Python.

    Their first calls wait for them; before what `spilled` says of one is known it is waited for there.
    """
    for call, target in kernels:
        _compiled(call, target, api.database().index(), os.getpid())


@functools.lru_cache(maxsize=4096)
def _instructions(call: ProgramCall, target: Target, _index: Index) -> float:
    return resources.Work(_planned(call, target, call.kernel()._precision_now(call.dtype)).spec, call.shape, target).operations


@functools.lru_cache(maxsize=4096)
def _compiled(call: ProgramCall, target: Target, _index: Index, process: int) -> Future[str]:
    """What `_spilled` will say. process: whose threads compile, for those of a process that was forked are its parent's."""
    kernel, here = call.kernel(), torch.cuda.current_device() if torch.cuda.is_available() else None
    future = _pool(process).submit(_spilled, call, target, here)
    kernel.wait_for(future)
    return future


@functools.lru_cache(maxsize=1)
def _pool(_process: int) -> ThreadPoolExecutor:
    loader.prepare()
    return ThreadPoolExecutor(os.cpu_count(), "epigen")


def _spilled(call: ProgramCall, target: Target, place: int | None) -> str:
    """place: of the GPU that the process works with."""
    if place is not None:
        torch.cuda.set_device(place)
    (*batch, m, n, k), kernel = call.shape, call.kernel()
    extents, dtypes = {"m": m, "n": n, "k": k}, dict(call.inputs)

    def lying(indices: str, dtype: DType | None) -> torch.Tensor:
        lead = batch if len(indices) == 2 else ()
        return torch.empty([*lead, *(extents[i] for i in indices)], dtype=torch_dtype(dtype or FP32), device="meta")

    def given(node: Node) -> torch.Tensor:
        return torch.empty(*batch, m, -(-n // 8), dtype=torch.uint8, device="meta") if node.op == BITS else lying(node.indices, dtypes[node.name])

    a, b = (lying(i, call.dtype) if at == "n" else lying(i[::-1], call.dtype).mT for i, at in zip(("mk", "kn"), call.layout, strict=True))
    try:
        needs = kernel.warm(a, b, target, **{i.name: given(i) for i in kernel.graph.inputs()})
    except CompileError as error:
        return str(error).partition("\n")[0]
    most = max((x.spills for x in needs), default=0)
    return f"its kernel keeps {most} bytes a thread in memory, for want of registers" if most > _MOST_SPILLED else ""


def moved_us(sizes: Sequence[int], gpu: Gpu) -> float:
    """How long memory takes over so many bytes."""
    return sum(sizes) / (gpu.achieved_gbps * 1e3)
