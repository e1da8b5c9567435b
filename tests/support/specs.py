"""Kernels to render: specs of a program's text, without shapes or tensors."""

from __future__ import annotations

from typing import Any

from epigen import settings
from epigen.codegen import schedules
from epigen.codegen.lower import lower, over_product
from epigen.codegen.render import Renderer
from epigen.codegen.spec import KernelConfig, KernelSpec, Signature
from epigen.dtypes import FP16, DType
from epigen.ir.check import check
from epigen.ir.graph import given_as
from epigen.ir.passes import normalise
from epigen.lang.parser import parse

RENDERER = Renderer(settings.templates_dir())
TILED = schedules.config("tiled", block_m=64, block_n=128, block_k=32, group_m=8, num_warps=4, num_stages=3)


def spec_of(
    text: str, a: DType = FP16, by_value: tuple[str, ...] = (), input_dtype: DType | None = None, b: DType | None = None, **signature: Any
) -> KernelSpec:  # fmt: skip
    graph = normalise(check(parse(text)))
    inputs = tuple((n.name, None if n.name in by_value else given_as(n) or input_dtype or a) for n in graph.inputs())
    return lower(graph, Signature(a, b or a, inputs, **signature))


def spec_over(text: str, mm: DType, **signature: Any) -> KernelSpec:
    """The kernel of a program over a product that is given."""
    graph = over_product(normalise(check(parse(text))))
    return lower(graph, Signature(mm, mm, tuple((n.name, given_as(n) or mm) for n in graph.inputs()), **signature))


def source(text: str, config: KernelConfig = TILED, **signature: object) -> str:
    return RENDERER.render(spec_of(text, **signature), config).text
