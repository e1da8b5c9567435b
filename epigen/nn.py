"""Modules with fused epilogues that train, beside torch.nn: what `epigen.training` builds, under the names that a model uses."""

from epigen.training.float8 import Float8Linear, float8
from epigen.training.modules import MLP, Chain, GatedMLP, Linear
from epigen.training.moe import Experts, MoE
from epigen.training.quantized import QuantizedLinear

__all__ = ["MLP", "Chain", "Experts", "Float8Linear", "GatedMLP", "Linear", "MoE", "QuantizedLinear", "float8"]
