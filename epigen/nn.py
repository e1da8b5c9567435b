"""Modules with fused epilogues that train, beside torch.nn: what `epigen.training` builds, under the names that a model uses."""

from epigen.training.modules import MLP, Chain, GatedMLP, Linear

__all__ = ["MLP", "Chain", "GatedMLP", "Linear"]
