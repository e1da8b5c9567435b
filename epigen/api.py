"""The Python entry points: they compose the stages and hold no logic of their own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from epigen import settings
from epigen.codegen import schedules
from epigen.codegen.render import Renderer
from epigen.codegen.spec import KernelConfig
from epigen.errors import CallError, ConfigError, near_miss
from epigen.ir.check import check
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.lang.parser import parse
from epigen.runtime.kernel import BACKENDS, Kernel
from epigen.tuning.choose import Chooser
from epigen.tuning.database import Database


def graph_of(text: str) -> Graph:
    """Parse, check and normalise a program. Raises ParseError or CheckError."""
    return normalise(check(parse(text)))


@functools.cache
def renderer() -> Renderer:
    return Renderer(settings.templates_dir())


@functools.cache
def database() -> Database:
    """The tuning databases that every kernel of this process looks in: the user's, then the shipped ones."""
    return Database()


def compile(text: str, *, config: KernelConfig | Mapping[str, Any] | None = None, backend: str | None = None, precision: str | None = None) -> Kernel:
    """Compile a program such as "relu(mm + bias)" to a callable kernel.

    text: the program, in the language that `epigen ops` and the README describe.
    config: a schedule and its values, as {"schedule": "tiled", "block_m": 64, …}; by default chosen a call.
    backend: "triton" (a GPU), "interpreter" (the generated kernel under Triton's interpreter) or "reference" (torch, operation by
    operation); by default triton for GPU tensors and reference for CPU tensors.
    precision: "ieee" or "tf32" for fp32 operands; by default as torch.get_float32_matmul_precision() says.
    Raises ParseError or CheckError for the text, ConfigError for the config.

    >>> import torch, epigen
    >>> fused = epigen.compile("relu(mm + bias)")
    >>> fused(torch.ones(2, 3), torch.ones(3, 4), bias=torch.full((4,), -2.0))
    tensor([[1., 1., 1., 1.],
            [1., 1., 1., 1.]])
    """
    if backend is not None and backend not in BACKENDS:
        raise CallError(f"unknown backend '{backend}': {near_miss(str(backend), BACKENDS) or 'known are ' + ', '.join(BACKENDS)}")
    if precision not in (None, "ieee", "tf32"):
        raise CallError(f"precision is 'ieee' or 'tf32', not {precision!r}")
    if not isinstance(text, str):
        raise CallError(f"a program is text, and a {type(text).__name__} was given")
    if isinstance(config, Mapping):
        config = schedules.from_mapping(config)
    elif config is not None and not isinstance(config, KernelConfig):
        raise ConfigError(f"a config is a mapping or a KernelConfig, and a {type(config).__name__} was given")
    graph = graph_of(text)
    return Kernel(graph, renderer(), Chooser(graph, database()), config, backend, precision)
