"""Programs and configs for the model of times, and the GPU whose times are known best."""

from __future__ import annotations

from epigen import gpus
from epigen.codegen import schedules
from epigen.codegen.lower import lower
from epigen.codegen.spec import KernelConfig, KernelSpec, Signature
from epigen.dtypes import FP16, FP32, DType
from epigen.ir import graph as g
from epigen.ir.check import check
from epigen.ir.passes import normalise
from epigen.lang.parser import parse

H200 = gpus.by_name("H200")
PLAIN = "relu(mm + bias)"
BACKWARD = "dz = drelu(mm, mask); dz, bgrad(dz)"
LIBRARY = schedules.config("library", block_m=8, block_n=128, num_warps=4)


def spec_of(text: str, a: DType = FP16, k: int = 0, precision: str = "ieee") -> KernelSpec:
    """A spec with inputs of the operands' dtype (fp32 beside 8-bit operands), scalars by value."""
    graph = normalise(check(parse(text)))
    other = FP32 if a.bits == 8 else a
    inputs = tuple((n.name, g.given_as(n) or (other if n.indices else None)) for n in graph.inputs())
    return lower(graph, Signature(a, a, inputs, precision, min(k & -k, 256) or 256))


def tiled(block_m: int, block_n: int, block_k: int, warps: int, stages: int, group_m: int = 8) -> KernelConfig:
    return schedules.config("tiled", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, num_warps=warps, num_stages=stages)
