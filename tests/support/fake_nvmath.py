"""A stand-in for nvmath-python's stateful product, which wants a GPU: the same contract, over torch's CPU tensors."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from bench.programs import PROGRAMS
from epigen.ir import reference


class FakeMatmul:
    """nvmath's stateful call as version 1.0 has it, over torch: D [M, N] by columns, masks and tiles padded, by columns too."""

    tuned: ClassVar[list[int]] = []
    freed = 0

    def __init__(self, a: torch.Tensor, b: torch.Tensor):
        self.m, self.n = a.shape[0], b.shape[1]
        self.like = [(t.shape, t.stride(), t.dtype) for t in (a, b)]
        self.a: torch.Tensor | None = a
        self.b: torch.Tensor | None = b

    def plan(self, *, epilog: str = "", epilog_inputs: Mapping[str, torch.Tensor] | None = None) -> None:
        self.epilog = epilog
        self._take(epilog_inputs or {})
        self.names = self.inputs.keys()

    def reset_operands(self, *, a: torch.Tensor | None = None, b: torch.Tensor | None = None, epilog_inputs: Mapping[str, torch.Tensor] | None = None) -> None:
        """Some of them, or all where they were released."""
        if a is None and b is None and epilog_inputs is None:
            raise ValueError("reset_operands() requires at least one operand to be provided.")
        released = self.a is None or self.b is None
        if released and (a is None or b is None or (self.names and epilog_inputs is None)):
            raise ValueError("After release_operands(), all required operands must be provided to reset_operands().")
        a, b = self.a if a is None else a, self.b if b is None else b
        assert a is not None and b is not None
        if [(t.shape, t.stride(), t.dtype) for t in (a, b)] != self.like:
            raise ValueError(f"the operands are {a.shape} {a.stride()} and {b.shape} {b.stride()}, planned was {self.like}")
        if epilog_inputs is not None:
            self._take(epilog_inputs)
        self.a, self.b = a, b

    def release_operands(self) -> None:
        self.a = self.b = None
        self.inputs = {}

    def _take(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.inputs = dict(inputs)
        if bool(inputs) != any(word in self.epilog for word in ("BIAS", "DRELU", "DGELU")):
            raise ValueError(f"{self.epilog or 'no epilog'} was given {list(inputs)}")
        rows = {"bias": self.m, "relu_aux": -(-self.m // 128) * 16, "gelu_aux": -(-self.m // 8) * 8}
        for name, given in self.inputs.items():
            if tuple(given.shape) != (rows[name], 1 if name == "bias" else self.n) or given.stride(0) != 1:
                raise ValueError(f"{name} has shape {tuple(given.shape)} and strides {given.stride()}")

    def autotune(self, iterations: int) -> None:
        self.tuned.append(iterations)

    def free(self) -> None:
        FakeMatmul.freed += 1

    def execute(self) -> Any:
        if self.a is None or self.b is None:
            raise RuntimeError("Execution cannot be performed after the operands have been released.")
        x, dtype = self.a.float() @ self.b.float(), self.a.dtype
        if "BIAS" in self.epilog:
            x = x + self.inputs["bias"].float()
        aux: dict[str, torch.Tensor] = {}
        if self.epilog == "RELU_AUX_BIAS":
            packed = reference.pack((x >= 0).T)
            aux["relu_aux"] = torch.zeros((self.n, -(-self.m // 128) * 16), dtype=torch.uint8)
            aux["relu_aux"][:, : packed.shape[1]] = packed
            aux["relu_aux"] = aux["relu_aux"].T
        if self.epilog == "GELU_AUX_BIAS":
            padded = torch.zeros((self.n, -(-self.m // 8) * 8), dtype=dtype)
            padded[:, : self.m] = x.T
            aux["gelu_aux"] = padded.T
        if self.epilog.startswith("RELU"):
            x = torch.relu(x)
        elif self.epilog.startswith("GELU"):
            x = torch.nn.functional.gelu(x, approximate="tanh")
        elif self.epilog == "DRELU_BGRAD":
            x = x * reference.unpack(self.inputs["relu_aux"].T, self.m).T
        elif self.epilog == "DGELU_BGRAD":
            x = torch.ops.aten.gelu_backward(x, self.inputs["gelu_aux"][: self.m].float(), approximate="tanh")
        if "BGRAD" in self.epilog:
            aux[self.epilog.lower()] = x.sum(1).to(dtype)
        y = x.T.contiguous().to(dtype).T
        return (y, aux) if aux else y


def installed(monkeypatch: pytest.MonkeyPatch) -> type[FakeMatmul]:
    """What an import of nvmath finds from now on."""
    names = types.SimpleNamespace(**{name: name for name in ("BIAS", *(p.epilog for p in PROGRAMS))})
    module = types.SimpleNamespace(Matmul=FakeMatmul, MatmulEpilog=names)
    for name, one in (("nvmath", types.SimpleNamespace()), ("nvmath.linalg", types.SimpleNamespace()), ("nvmath.linalg.advanced", module)):
        monkeypatch.setitem(sys.modules, name, one)  # type: ignore[misc]
    return FakeMatmul
