"""A layer of a mixture of experts that trains: a router, and gated experts in grouped kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from epigen.errors import CallError, unknown
from epigen.training.experts import Options, Weights, experts, scored
from epigen.training.modules import ACTIVATIONS


class Experts(nn.Module):
    """Gated experts without biases: `down(activation(gate(x)) * up(x))`, with the parameters that transformers' modules of experts have.

    gate_up_proj: [E, 2 I, H], the rows of each gate before those of its up. down_proj: [E, H, I]. in_features, hidden_features, experts: H, I and E. activation:
    one of the language's, by name. tune: as for `epigen.linear`. Raises CallError for what does not fit.
    """

    def __init__(
        self, in_features: int, hidden_features: int, experts: int, activation: str = "silu", *, tune: str | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if activation not in ACTIVATIONS:
            raise CallError(unknown("activation", activation, ACTIVATIONS))
        self.in_features, self.hidden_features, self.num_experts, self.activation, self.tune = in_features, hidden_features, experts, activation, tune
        self.gate_up_proj = nn.Parameter(torch.empty((experts, 2 * hidden_features, in_features), device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty((experts, in_features, hidden_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as a torch.nn.Linear is initialised."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [T, in_features]. top_k_index, top_k_weights: the experts of each token and their scores [T, k]. Returns [T, in_features]."""
        options = Options(scored(f"{self.activation}(left) * right", bias=False), self.tune)
        return experts(hidden_states, top_k_index, top_k_weights, Weights(self.gate_up_proj, None, self.down_proj, None), options)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, hidden_features={self.hidden_features}, experts={self.num_experts}, activation={self.activation!r}"


class MoE(nn.Module):
    """A mixture of gated experts, of which each token goes to `top_k`: the router's choice, the experts, and the sum by their scores.

    The router's scores are a softmax over all experts, at least in fp32, of which the `top_k` largest are taken; normalize: divided by their sum, as Mixtral has
    it. Parameters and state dict are those of Mixtral's block: `gate.weight` [E, H], `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I]. Each
    expert has as many tokens as come; where theirs end stays on the device, so that nothing waits for it and a call compiles in one piece.
    in_features, hidden_features, experts: H, I and E. activation: one of the language's, by name. tune: as for `epigen.linear`.
    Raises CallError for what does not fit.

    >>> import torch, epigen
    >>> moe = epigen.nn.MoE(64, 128, experts=8, top_k=2)
    >>> moe(torch.zeros(2, 3, 64)).shape
    torch.Size([2, 3, 64])
    """

    def __init__(
        self, in_features: int, hidden_features: int, experts: int, top_k: int, activation: str = "silu", *, normalize: bool = True, tune: str | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if not 1 <= top_k <= experts:
            raise CallError(f"top_k={top_k}: of {experts} experts a token goes to one at least, and to each at most once")
        self.top_k, self.normalize = top_k, normalize
        self.gate = nn.Linear(in_features, experts, False, device, dtype)
        self.experts = Experts(in_features, hidden_features, experts, activation, tune=tune, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn.Linear's own name
        """input: [..., in_features]. Returns the same shape."""
        hidden = input.reshape(-1, input.shape[-1])
        logits = self.gate(hidden)
        probabilities = torch.softmax(logits, -1, torch.promote_types(logits.dtype, torch.float32))
        scores, index = probabilities.topk(self.top_k)
        if self.normalize:
            scores = scores / scores.sum(-1, keepdim=True)
        mixed: Tensor = self.experts(hidden, index, scores)
        return mixed.view(input.shape)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, normalize={self.normalize}"
