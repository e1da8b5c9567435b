"""Kernels of programs with `halves` and `pairs`: a call gives and gets whole tensors, of which the kernel has views of both parts.

Nothing is copied, but for what TMA cannot address as it lies: of a stacked weight's transpose, as a linear layer has it, either way of parting lies well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from epigen.codegen.sparse import DENSE
from epigen.dtypes import BY_TORCH_ON_CPU
from epigen.errors import CallError
from epigen.gpus import Target
from epigen.ir import reference
from epigen.ir.graph import GROUPS
from epigen.ir.parting import Part, Parting
from epigen.lang.syntax import HALVES
from epigen.runtime import arguments, groups, outputs, semi_structured
from epigen.runtime.kernel import Kernel, traced
from epigen.runtime.loader import Resources


def views(t: Any, way: str) -> tuple[Any, Any]:
    """Both parts of a tensor, along its last dimension."""
    if way == HALVES:
        both = t.chunk(2, -1)
        return both[0], both[1]
    return t[..., ::2], t[..., 1::2]


def together(first: Tensor, second: Tensor, way: str) -> Tensor:
    """A new tensor of both parts."""
    return torch.cat((first, second), -1) if way == HALVES else torch.stack((first, second), -1).flatten(-2)


def _even(what: str, t: Any, way: str) -> Any:
    """What is to be parted, if it can be. Raises CallError."""
    if isinstance(t, Tensor) and (t.dim() == 0 or t.shape[-1] % 2):
        raise CallError(f"{what} is parted in {way}, and its shape is {list(t.shape)}: an even last extent was expected")
    return t


class PartedKernel(Kernel):
    """As a `Kernel`, with operand b [K, 2 N] and each input that is parted with it in one, and with a result [M, 2 N] for each two that are joined.

    `plan`, `config` and `source` are of the program of parts, so N is of one of them.
    """

    parting: Parting

    def __init__(self, parting: Parting, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.parting = parting
        self._as_returned = parting.as_returned(self._names)
        seconds = {p.second for p in parting.inputs}
        names = [name for name in self._input_names if name not in seconds]
        self._as_given = {given: self._inputs[name] for given, name in zip(parting.as_given(names), names, strict=True)}
        self._results: Any = outputs.named(self._as_returned) if len(self._as_returned) > 1 else None

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; in one: {', '.join(f'{p.whole}, in {p.way}' for p in (*self.parting.inputs, *self.parting.outputs))}>"

    def __call__(self, a: Any = None, b: Any = None, /, *extra: Any, out: Any = None, **inputs: Any) -> Any:
        arguments.check_positional("operands a and b are", len(extra), self._as_given)
        b, inputs = self._apart(b, inputs)
        if not self.parting.outputs:
            return super().__call__(a, b, out=out, **inputs)
        if out is None and (is_dynamo_compiling() or traced() or not all(isinstance(t, Tensor) for t in (a, b))):
            results = dict(zip(self._names, super().__call__(a, b, **inputs), strict=True))
            wholes = {p.whole: together(results[p.first], results[p.second], p.way) for p in self.parting.outputs}
            results |= wholes
            return self._returned(results)
        given = outputs.given(out, self._as_returned)
        wholes = {p.whole: given[p.whole] if p.whole in given else self._empty(p, a, b, inputs.get(GROUPS)) for p in self.parting.outputs}
        into = {name: t for name, t in given.items() if name not in wholes}
        for part in self.parting.outputs:
            into[part.first], into[part.second] = views(_even(f"out for '{part.whole}'", wholes[part.whole], part.way), part.way)
        results = dict(zip(self._names, super().__call__(a, b, out=into, **inputs), strict=True))
        return self._returned(results | wholes)

    def _returned(self, results: Mapping[str, Any]) -> Any:
        several = [results[name] for name in self._as_returned]
        return several[0] if self._results is None else self._results(*several)

    def _empty(self, part: Part, a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
        """For a result of two. a, b: of which the kernel itself is to say it, where they do not fit. ends: of groups, if the call is of such."""
        m, n = (t.shape[d] if t.dim() > 1 else 0 for t, d in ((a, -2), (b, -1)))
        if ends is not None:
            lead = tuple(ends.shape) if b.dim() == 2 else ()
        else:
            lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.dim() > 2 or b.dim() > 2 else ()
        dtype = next(o.dtype for o in outputs.of(self._graph, BY_TORCH_ON_CPU[str(a.dtype)]) if o.name == part.first)
        return torch.empty((*lead, m, 2 * n), dtype=reference.torch_dtype(dtype), device=a.device)

    def warm(self, a: Tensor, b: Tensor, target: Target | None = None, /, **inputs: Any) -> list[Resources]:
        target = inputs.pop("target", None) if target is None else target
        b, inputs = self._apart(b, inputs)
        return super().warm(a, b, target, **inputs)

    def _apart(self, b: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Operand b and the inputs as the program has them."""
        if not self.parting.inputs:
            return b, dict(inputs)
        arguments.check_names(groups.declared(self._as_given, inputs), inputs)
        if not isinstance(b, Tensor) and not arguments.stands_for_one(b):
            return b, dict(inputs)  # which the kernel refuses
        if type(b) in semi_structured.TYPES:
            raise CallError(f"operand b is parted, and a 2:4 sparse one has no parts: {DENSE}")
        of_b, *others = self.parting.inputs
        first, second = views(_even("operand b", b, of_b.way), of_b.way)
        given = {**inputs, of_b.second: second}
        for part in others:
            whole = given.pop(part.whole)
            if isinstance(whole, Tensor) and isinstance(b, Tensor) and whole.shape[-1:] != b.shape[-1:]:
                found = f"its last extent is to be b's, {b.shape[-1]}, and it has shape {list(whole.shape)}"
                raise CallError(f"input '{part.whole}' is parted in {part.way} as b is: {found}")
            if not isinstance(whole, Tensor) and not arguments.stands_for_one(whole):
                raise CallError(f"input '{part.whole}' is parted in {part.way} as b is, and a {type(whole).__name__} was given: pass a tensor")
            given[part.first], given[part.second] = views(whole, part.way)
        return first, given
