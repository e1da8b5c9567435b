"""What torchao's `quantize_` takes, by the names that tests call it. torchao is imported where one is asked for."""

from __future__ import annotations

from typing import Any

import torch


def torchao_config(name: str, group: int) -> Any:
    """group: of k, that share a scale, where any do."""
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerAxis, PerGroup, PerTensor

    return {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "int8 in groups": lambda: ao.IntxWeightOnlyConfig(torch.int8, PerGroup(group)),
        "int4": lambda: ao.IntxWeightOnlyConfig(torch.int4, PerGroup(group)),
        "int4 with zero points": lambda: ao.IntxWeightOnlyConfig(torch.int4, PerGroup(group), mapping_type=ao.MappingType.ASYMMETRIC),
        "int4 a row": lambda: ao.IntxWeightOnlyConfig(torch.int4, PerAxis(0)),
        "fp8": lambda: ao.Float8WeightOnlyConfig(),
        "fp4": _nvfp4,
        "of activations": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4, of activations": lambda: ao.Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(group)),
        "one for all": lambda: ao.Int8WeightOnlyConfig(version=2, granularity=PerTensor()),
        "2 bits": lambda: ao.IntxWeightOnlyConfig(torch.int2, PerGroup(group)),
    }[name]()


def _nvfp4() -> Any:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig()
