"""How long a region of a graph is expected to take: as a program, and as the vendor's product with a kernel of Inductor's. By the databases, else the model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from epigen import api
from epigen.codegen.lower import signature_of_contiguous
from epigen.dtypes import DType
from epigen.runtime import device
from epigen.runtime.device import Target
from epigen.training import library
from epigen.tuning import gpus, model
from epigen.tuning.gpus import Gpu
from epigen.tuning.lookup import Found, Index

Held = tuple[tuple[str, DType | None], ...]
"""The dtypes of a program's inputs, by name."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A program's call. shape: M, N, K. dtype: of the operands. layout: how they lie. inputs: the dtypes of the program's."""

    text: str
    shape: tuple[int, int, int]
    dtype: DType
    layout: str
    inputs: Held


def target_of(place: torch.device) -> Target | None:
    """None where nothing is known of how long anything takes."""
    return device.at_hand(place.index) if place.type == "cuda" else None


def kernels_us(problem: Problem, target: Target) -> tuple[float, float]:
    """The program's kernel, and the vendor's product alone, in microseconds."""
    precision = library.kernel(problem.text, None)._precision_now()
    return _kernels_us(problem, target, precision, api.database().index())


@functools.lru_cache(maxsize=4096)
def _kernels_us(problem: Problem, target: Target, precision: str, _index: Index) -> tuple[float, float]:
    """Layers repeat, and a plan takes milliseconds: each problem is planned once, as long as the databases stay what they are."""
    shape, gpu = problem.shape, gpus.of_target(target)
    kernel = library.kernel(problem.text, None)
    signature = signature_of_contiguous(kernel.graph, problem.dtype, problem.dtype, problem.inputs, shape, problem.layout, precision)
    plan = kernel.plan(shape, target=target, signature=signature)
    found = plan.choice.record if isinstance(plan.choice, Found) and plan.choice.how in ("exact", "triton") else None
    if found is not None and found.baseline_us is not None:
        return found.median_us, found.baseline_us
    bare = library.kernel("mm", None).plan(shape, target=target, signature=replace(signature, inputs=(), tma=tuple(t for t in signature.tma if t in "ab")))
    return model.estimate_us(plan.spec, plan.choice.config, shape, gpu).us, model.unfused_us(bare.spec, shape, gpu)


def moved_us(sizes: Sequence[int], gpu: Gpu) -> float:
    """How long memory takes over so many bytes."""
    return sum(sizes) / (gpu.achieved_gbps * 1e3)
