"""Modules of experts as transformers has them, computed by grouped kernels: as the experts' implementation "epigen", and as what `epigen.fuse` sets as their forward.

Such a module says of itself how its weights lie, whether it has biases, and how a gate's columns are parted and joined again: that is traced, as any function
after a product is. Its parameters are read at each call, wherever an adapter has them computed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from epigen.dtypes import BY_TORCH_ON_CPU
from epigen.errors import CallError, EpigenError
from epigen.lang.syntax import WAYS
from epigen.training.attached import Attached, recorded
from epigen.training.experts import BIAS, SCORE, Options, Weights, experts, programs
from epigen.training.traced import trace

NAME = "epigen"
"""Of the implementation, as in `model.set_experts_implementation("epigen")`."""

_SAID = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")
"""What such a module has; of other modules nothing is known."""

_PLAIN = (Tensor, nn.Parameter)
_COLUMNS = 16
"""Of the product on which a gate is traced where the module does not say how many it has."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of experts, as transformers' decorator makes them."""
    return all(hasattr(module, name) for name in _SAID) and hasattr(type(module), "_apply_gate")


def program(module: nn.Module) -> str:
    """Of the first product, with what follows it. Raises CallError where it is none of the language's."""
    experts: Any = module
    if getattr(experts, "has_post_expert_norm", False):
        raise CallError("a norm follows each expert, between its last product and its score")
    up = _up(experts)
    for name, weight in (("first", up), ("second", experts.down_proj)):
        if not isinstance(weight, Tensor) or weight.dim() != 3 or str(weight.dtype) not in BY_TORCH_ON_CPU or not weight.is_floating_point():
            found = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
            raise CallError(f"the {name} weight is {found}: floats [experts, N, K] were expected")
    columns = up.shape[2 if experts.is_transposed else 1]
    follows = experts._apply_gate if experts.has_gate else experts.act_fn
    with_bias = experts.has_bias and not experts.has_gate

    def function(mm: Tensor, score: Tensor, bias: Tensor | None = None) -> Any:
        return follows(mm if bias is None else mm + bias) * score

    cpu, rows = torch.device("cpu"), columns + 1
    inputs = {SCORE: torch.empty((rows, 1), device=cpu)} | ({BIAS: torch.empty(columns, device=cpu)} if with_bias else {})
    traced = trace(function, (rows, columns), torch.float32, cpu, inputs, what="what follows the experts' first product")
    if traced.held or traced.renamed or traced.viewed:
        raise CallError("what follows the experts' first product reads a tensor of its own")
    text = traced.program.text
    if experts.has_bias and not with_bias:
        for way in WAYS:
            text = text.replace(f"{way}(mm)", f"{way}(mm + {BIAS})")
    programs(text, up.dtype)
    return text


def flops(module: nn.Module) -> int:
    """Multiplications a token, at as many experts as it goes to."""
    own: Any = module
    each: int = (_up(own).numel() + own.down_proj.numel()) // own.num_experts
    return each * int(getattr(getattr(own, "config", None), "num_experts_per_tok", 1))


def _up(experts: Any) -> Tensor:
    weight: Tensor = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return weight


def run(module: nn.Module, text: str, hidden: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """The module's result. text: of `program`. The rest as of `experts`."""
    own: Any = module
    up_bias, down_bias = None, None
    if own.has_bias:
        up_bias, down_bias = own.gate_up_proj_bias if own.has_gate else own.up_proj_bias, own.down_proj_bias
    weights = Weights(_up(own), up_bias, own.down_proj, down_bias, own.is_transposed)
    return experts(hidden, index, scores, weights, Options(text, foreign=getattr(own, "_is_expert_parallel", False)))


class Experts(Attached):
    # It belongs to one module of experts.
    def __init__(self, module: nn.Module):
        """Raises CallError where no kernel computes what the module does."""
        super().__init__(module)
        self.text = program(module)
        self.names = tuple(self.__signature__.parameters)[:3]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or (recorded() and not is_dynamo_compiling()):
            return type(self.module).forward(self.module, *args, **kwargs)
        given = (*args, *(kwargs[name] for name in self.names[len(args) :] if name in kwargs))
        if len(given) != 3 or len(args) + len(kwargs) != 3 or not _fits(self.module, *given):
            return type(self.module).forward(self.module, *args, **kwargs)
        return run(self.module, self.text, *given)


def _fits(module: nn.Module, hidden: Any, index: Any, scores: Any) -> bool:
    """Whether they are plain tensors of a module's call. What a tensor parallel model has is not."""
    own: Any = module
    return all(type(t) in _PLAIN for t in (hidden, index, scores, _up(own), own.down_proj)) and hidden.dim() == 2 and index.dim() == 2 == scores.dim()


# -- the implementation


def implementation(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls for `experts_implementation="epigen"`. Raises CallError where no kernel computes what the module does."""
    return run(self, _program_of(self), hidden_states, top_k_index, top_k_weights)


def _program_of(module: nn.Module) -> str:
    """As `program`, which is found once for each module."""
    text: str | None = vars(module).get(_KNOWN)
    if text is None:
        try:
            text = program(module)
        except EpigenError as error:
            raise CallError(
                f"epigen does not compute a {type(module).__name__}: {error}; choose another experts_implementation, such as 'grouped_mm'"
            ) from error
        vars(module)[_KNOWN] = text
    return text


_KNOWN = "_epigen_program"
_program_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register() -> None:
    """Have transformers, which has been imported, know the implementation."""
    sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.register(NAME, implementation)
