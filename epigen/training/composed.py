"""A layer as torch's own operations, one for each of its program's: where torch itself takes a derivative of what is computed, or maps it.

That is in torch.func (grad, vjp, jvp, jacfwd, hessian, vmap, …) and of dual numbers (torch.autograd.forward_ad): a kernel has no derivative of
that kind, and torch would go on without it. It is the reference, with a kernel's rounding points; every intermediate goes through memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from epigen.dtypes import BY_TORCH
from epigen.ir import reference
from epigen.runtime import arguments, outputs
from epigen.training import library


def asked(values: Iterable[Tensor]) -> bool:
    """Whether a layer of these has to be computed in this way. While torch.compile traces it is not, and the operations refuse."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or any(map(arguments.has_tangent, values))


def run(text: str, x: Tensor, weight: Tensor, inputs: Mapping[str, Tensor | float]) -> list[Tensor]:
    """The program's outputs. x: [M, K]. weight: [N, K]. Raises CallError for what does not fit."""
    graph, b = library.kernel(text, None).graph, weight.t()
    m, n, _ = arguments.check_operands(x, b)
    arguments.check_inputs({node.name: node for node in graph.inputs()}, inputs, m, n, x.device)
    return reference.evaluate(graph, x, b, inputs, [out.dtype for out in outputs.of(graph, BY_TORCH[str(x.dtype)])])
