"""How long a region of a graph is expected to take: as a program, and as the vendor's product with a kernel of Inductor's. By the databases, else the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.utils._python_dispatch import _disable_current_modes

from epigen import api, gpus
from epigen.codegen.lower import signature_of_contiguous
from epigen.codegen.spec import Signature
from epigen.db.lookup import Index, Recorded
from epigen.dtypes import INT32, DType
from epigen.gpus import Gpu, Target
from epigen.ir.graph import BITS, GROUPS
from epigen.perf import model
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
    options: as the operations take them. groups: the index along which the products are of groups, "m" or "k", of which the shape has so much as each has in the mean."""

    text: str
    shape: Shape
    dtype: DType
    layout: str
    inputs: Held
    options: str | None = None
    groups: str = ""

    def kernel(self, tune: str | None = None) -> Kernel:
        kernel = library.kernel(self.text, tune, self.options)
        return kernel._grouped if self.groups else kernel

    @property
    def measurable(self) -> bool:
        """Whether a database says how it compares: beside groups it has the vendor's batch, and not torch's product of groups."""
        return not self.groups


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


def kernels_us(call: ProgramCall, target: Target, tune: str | None) -> tuple[float, float]:
    """The program's kernel, and the vendor's product alone, or both of them, in microseconds. tune: as of `epigen.compile`; what is missing is tuned here, and so is measured."""
    precision = call.kernel()._precision_now(call.dtype)
    fused, bare, measured = _kernels_us(call, target, precision, api.database().index())
    tuned = tune is not None and call.measurable
    if tuned and not measured:
        with _disable_current_modes():  # which are there while torch compiles
            kernel = call.kernel(tune)
            kernel.plan(call.shape, target=target, signature=_signature(kernel, call, precision), as_called=True)
        fused, bare, measured = _kernels_us(call, target, precision, api.database().index())
    return fused * (_MEASURED if measured or tuned else _doubt(call)), bare


_FEW_ROWS, _SOME_ROWS, _MANY_ROWS = 64, 256, 1024
_OF_FEW, _OF_MANY, _VENDOR_OF_FEW, _VENDOR_OF_MANY = 0.93, 1.27, 1.3, 1.1
_ALONG_K, _VENDOR_ALONG_FEW, _VENDOR_ALONG_MANY = 1.1, 1.5, 1.28
"""How often estimates of batches count where they are of groups: of few rows in the mean and of many, or of few along k and of many; by epigen, and by torch's grouped
product. Of 28 products of rows with 8 to 128 groups of 8 to 1024 rows, all alike and drawn, kernels are off from that by 10 % in the root mean square, and torch's
by 13 %; of 14 along k by 12 and 11 % (bench.grouped on an H200, bf16, torch 2.11, Triton 3.6, 2026-11-29)."""


def _between(x: float, least: float, most: float, at_least: float, at_most: float) -> float:
    """Even steps from one value to the other while x doubles from least to most, and no further."""
    share = math.log2(min(max(x, least), most) / least) / math.log2(most / least)
    return at_least + share * (at_most - at_least)


def _of_groups(call: ProgramCall) -> tuple[float, float]:
    """How often both estimates count."""
    if not call.groups:
        return _DOUBT, 1.0
    if call.groups == "k":
        return _ALONG_K, _between(call.shape[-1], _SOME_ROWS, _MANY_ROWS, _VENDOR_ALONG_FEW, _VENDOR_ALONG_MANY)
    rows = call.shape[-3]
    return _between(rows, _FEW_ROWS, _MANY_ROWS, _OF_FEW, _OF_MANY), _between(rows, _SOME_ROWS, _MANY_ROWS, _VENDOR_OF_FEW, _VENDOR_OF_MANY)


def _doubt(call: ProgramCall) -> float:
    return _of_groups(call)[0] * (1 + _DOUBT_A_TILE * sum(i.indices == "mn" and i.op != BITS for i in call.kernel().graph.inputs()))


@functools.lru_cache(maxsize=4096)
def _kernels_us(call: ProgramCall, target: Target, precision: str, _index: Index) -> tuple[float, float, bool]:
    """Both, and whether they were measured. Layers repeat, and a plan takes milliseconds: each call is planned once, as long as the databases stay what they are."""
    shape, gpu = call.shape, gpus.of_target(target)
    plan = planned(call, target, precision)
    signature = plan.spec.signature
    record = plan.choice.record if isinstance(plan.choice, Recorded) and plan.choice.how in ("exact", "triton") and call.measurable else None
    if record is not None and record.baseline_us is not None:
        return record.median_us, record.baseline_us, True
    alone = replace(call, text="mm", inputs=(), options=None).kernel()
    inputs = tuple(pair for pair in signature.inputs if pair[0] == GROUPS)
    bare = alone.plan(shape, target=target, signature=replace(signature, inputs=inputs, tma=tuple(t for t in signature.tma if t in "ab")))
    each = model.unfused_us(bare.spec, shape, gpu) * _of_groups(call)[1]
    return model.estimate_us(plan.spec, plan.choice.config, shape, gpu).us, len(plan.spec.products) * each, False


def planned(call: ProgramCall, target: Target, precision: str) -> Plan:
    """What its call would run. precision: of fp32 operands."""
    kernel = call.kernel()
    return kernel.plan(call.shape, target=target, signature=_signature(kernel, call, precision))


def _signature(kernel: Kernel, call: ProgramCall, precision: str) -> Signature:
    inputs = (*call.inputs, (GROUPS, INT32)) if call.groups else call.inputs
    return signature_of_contiguous(kernel.graph, call.dtype, call.dtype, inputs, call.shape, call.layout, precision, call.groups)


def moved_us(sizes: Sequence[int], gpu: Gpu) -> float:
    """How long memory takes over so many bytes."""
    return sum(sizes) / (gpu.achieved_gbps * 1e3)
