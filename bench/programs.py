"""The six epilogues of the headline: as epigen writes them, as eager torch does, and which of cuBLASLt's they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Eager = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """name: what tables call it. text: for epigen. eager: torch's separate operations, of the operands and the one further input, with the same
    outputs. rounded: the program with eager's rounding points, "T" standing for the operands' dtype. epilog: cuBLASLt's name.
    input: the further input's name; a mask comes to eager as booleans, of which torch has no packed kind.
    """

    name: str
    text: str
    eager: Eager
    rounded: str
    epilog: str
    input: str

    @property
    def tanh(self) -> str:
        """The text with the tanh approximation of gelu in place of gelu: what cuBLASLt computes. Else the text itself."""
        return with_tanh(self.text)

    @property
    def approximated(self) -> bool:
        """Whether cuBLASLt computes an approximation of it."""
        return self.tanh != self.text


def with_tanh(text: str) -> str:
    return text.replace("gelu(", "gelu_tanh(")


def _relu(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (torch.relu(torch.mm(a, b) + bias),)


def _relu_mask(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    z = torch.mm(a, b) + bias
    return torch.relu(z), z > 0  # a byte an element: torch does not pack, which spares it time


def _drelu(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    dz = torch.mm(a, b) * mask
    return dz, dz.sum(0)


def _gelu(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (torch.nn.functional.gelu(torch.mm(a, b) + bias),)


def _gelu_aux(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    z = torch.mm(a, b) + bias
    return torch.nn.functional.gelu(z), z


def _dgelu(a: Tensor, b: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    dz = torch.ops.aten.gelu_backward(torch.mm(a, b), z)
    return dz, dz.sum(0)


_Z = "cast(cast(mm, T) + bias, T)"

PROGRAMS = (
    Program("relu + bias", "relu(mm + bias)", _relu, f"relu({_Z})", "RELU_BIAS", "bias"),
    Program("relu + bias + mask", "z = mm + bias; relu(z), bitmask(z > 0)", _relu_mask, f"z = {_Z}; relu(z), bitmask(z > 0)", "RELU_AUX_BIAS", "bias"),
    Program("drelu + bgrad", "dz = drelu(mm, mask); dz, bgrad(dz)", _drelu, "dz = drelu(cast(mm, T), mask); dz, cast(bgrad(dz), T)", "DRELU_BGRAD", "mask"),
    Program("gelu + bias", "gelu(mm + bias)", _gelu, f"gelu({_Z})", "GELU_BIAS", "bias"),
    Program("gelu + bias + aux", "z = mm + bias; gelu(z), z", _gelu_aux, f"z = {_Z}; gelu(z), z", "GELU_AUX_BIAS", "bias"),
    Program("dgelu + bgrad", "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)", _dgelu, "dz = cast(dgelu(cast(mm, T), z[m,n]), T); dz, cast(bgrad(dz), T)",
            "DGELU_BGRAD", "z"),
)  # fmt: skip

BY_NAME = {p.name: p for p in PROGRAMS}
BACKWARD = ("drelu + bgrad", "dgelu + bgrad")
