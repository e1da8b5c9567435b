"""The gradients of a program with operands that are computed, beside autograd's of its reference."""

from __future__ import annotations

import torch

from bench import gradients
from epigen.dtypes import FP32
from epigen.ir.derive import SAVE, derive
from epigen.ir.program import graph_of


def agree_with_autograd(text: str) -> None:
    """Those of both operands and of all inputs, by each way of saving."""
    graph, shape, generator = graph_of(text), (5, 4, 6), torch.Generator().manual_seed(0)
    a, b = gradients.normal("mk", shape, generator), gradients.normal("kn", shape, generator)
    inputs = gradients.inputs_of(graph, shape, generator)
    for option in derive(graph, FP32).options:
        derived = derive(graph, FP32, save=option.save if option.save in SAVE else None)
        arriving = {o.name: gradients.normal(graph.nodes[o.node].indices, shape, generator) for o in graph.outputs if o.name in derived.arriving}
        found = gradients.all_gradients(derived, a, b, inputs, arriving)
        assert {"a", "b", *inputs} == set(found)
        for name, expected in zip(found, gradients.autograd_of_operands(graph, a, b, inputs, arriving, list(found)), strict=True):
            torch.testing.assert_close(found[name], expected, msg=lambda m, d=derived, n=name: f"{n} of {d}: {m}")
