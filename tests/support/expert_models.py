"""Models of transformers with experts, small and with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import nn

from epigen.training.expert_modules import is_experts

_OPTIONS: dict[str, Any] = {**zoo._DECODER, "num_experts_per_tok": 2}
_SWIGLU = "left, right = halves(mm); silu(left) * right * score[m]"
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}, 75, _SWIGLU),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}, 67, _SWIGLU),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}, 53, _SWIGLU),
    "olmoe": ("Olmoe", {"num_experts": 4}, 75, _SWIGLU),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}, 55, _SWIGLU),
    "gpt_oss": (
        "GptOss", {"num_local_experts": 4, "head_dim": 8}, 75,
        "left, right = pairs(mm + bias); (clamp(right, -7, 7) + 1) * quick_gelu(where(left <= 7, left, where(left > 7, 7, detach(minimum(left, 7))))) * score[m]",
    ),
}  # fmt: skip
"""By name: of transformers' classes, what their config takes, the share of the model's FLOPs that is fused, and the experts' program."""


def made(name: str, **more: Any) -> nn.Module:
    if package := zoo.missing("mixtral"):
        pytest.skip(f"{package} is not installed")
    t = zoo._transformers()
    if int(t.__version__.partition(".")[0]) < 5:
        pytest.skip("experts are modules since transformers 5.0")
    kind, options, *_ = MODELS[name]
    torch.manual_seed(0)
    with zoo.quiet():
        model: nn.Module = getattr(t, f"{kind}ForCausalLM")(getattr(t, f"{kind}Config")(**{**_OPTIONS, **options, **more}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_experts(module)}
