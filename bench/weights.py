"""A linear layer whose weight has 8 or 4 bits, against torch.mm with the weight in bf16.

Run: python -m bench.weights [--commit HASH] [--out FOLDER] [--tuned] [SHAPES]
Claim: TARGETS, how many times as fast as the bf16 product each kind is, by the number of rows. Beside it torch's own kernel for 4 bits, which torchao's tile-packed
weights run (groups of 128, no zero points taken), torch.compile of a product with a weight that is converted first, and a copy that moves as many bytes as the weight has.
Contenders are interleaved, and the L2 cache is cold. A wrong answer is not timed. --tuned: tune each first, into the user's database; into a result of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import record, timing
from epigen.checkpoints import QuantizedWeight
from epigen.nn import QuantizedLinear
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.shapes import Shape

SHAPES: tuple[Shape, ...] = tuple((m, n, k) for m in (1, 16, 64, 512, 4096) for n, k in ((14336, 4096), (8192, 8192), (28672, 8192)))
GROUP = 128
MM, W8, W4, ZEROS, TINY, COMPILED = "mm", "int8", "int4", "int4, zero points", "torch's int4", "torch.compile, int8"
COPIES = {W8: "copy of int8", W4: "copy of int4"}
"""A copy whose bytes, read and written, are those of the weight."""
TARGETS = {W8: {16: 1.9, 64: 1.6, 4096: 0.95}, W4: {16: 2.7, 64: 1.9, 4096: 0.95}}
"""By the most rows that each is for."""


def of_mm(row: Mapping[str, Any], contender: str) -> float:
    """How many times as fast as the bf16 product."""
    return float(row["timing"][MM]["median_us"] / row["timing"][contender]["median_us"])


def of_copy(row: Mapping[str, Any], kind: str) -> float:
    """The share of a copy's bandwidth at which the weight is read."""
    return float(row["timing"][COPIES[kind]]["median_us"] / row["timing"][kind]["median_us"])


def target(kind: str, rows: int) -> float:
    return next(claimed for most, claimed in TARGETS[kind].items() if rows <= most)


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say of the claims."""
    shares = [of_mm(row, kind) / target(kind, row["shape"][0]) for row in rows for kind in TARGETS]
    return {"met": sum(share >= 1 for share in shares), "of": len(shares), "worst": round(min(shares), 3)}


def layers(weight: Tensor) -> dict[str, QuantizedLinear]:
    """The weight [N, K] in each kind."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], False, device="meta", dtype=weight.dtype)
    linear.weight = torch.nn.Parameter(weight)
    found = {W8: QuantizedLinear.from_linear(linear, "int8"), W4: QuantizedLinear.from_linear(linear, "int4", GROUP)}
    of_four = found[W4]
    values, zero = epigen.unpack_int4(of_four.qweight), torch.randint(-2, 3, of_four.scale.shape, device=weight.device).to(weight.dtype)
    return found | {ZEROS: QuantizedLinear.from_weight(QuantizedWeight(values, 4, of_four.scale, zero, GROUP), dtype=weight.dtype)}


def _tiny(layer: QuantizedLinear) -> Callable[[Tensor], Tensor]:
    """The kernel of torch's own, of the same weight."""
    values = (epigen.unpack_int4(layer.qweight) + 8).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack((values[:, 0::2] << 4 | values[:, 1::2]).to(torch.uint8), 8)
    scales = torch.stack([layer.scale, torch.zeros_like(layer.scale)], -1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)  # type: ignore[no-any-return]


def measured(shape: Shape, tuned: bool = False) -> dict[str, Any]:
    """One row."""
    m, n, k = shape[-3:]
    x, weight = torch.randn(m, k, device="cuda").bfloat16(), (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    ways: dict[str, Callable[[Tensor], Any]] = {}
    configs = {}
    for name, layer in layers(weight).items():
        if tuned:
            epigen.tune(layer.program, shape, dtype="bf16", weight="int8" if name == W8 else None, layout="nt")
        kernel = epigen.compile(layer.program)
        inputs = {f"weight_{key}": (t if layer.group else t[0]) for key, t in (("scale", layer.scale), ("zero", layer.zero)) if t is not None}
        own: dict[str, Callable[[Tensor], Any]] = {
            name: functools.partial(lambda x, kernel, q, inputs: kernel(x, q, **inputs), kernel=kernel, q=layer.qweight.t(), inputs=inputs)
        }
        if name == W4 and hasattr(torch.ops.aten, "_weight_int4pack_mm"):
            own[TINY] = _tiny(layer)
        right = x.float() @ layer.dequantized().t()
        for way, run in own.items():
            assert (run(x).float() - right).norm() < 1e-2 * right.norm(), way
        configs[name] = str(kernel.config)
        ways |= own
        if name == W8 and m == 16:
            q, s = layer.qweight, layer.scale[0]
            ways[COMPILED] = torch.compile(functools.partial(lambda x, q, s: functional.linear(x, q.to(torch.bfloat16)) * s, q=q, s=s))
        del right
    contenders: dict[str, Callable[[], Any]] = {MM: functools.partial(functional.linear, x, weight)}
    contenders |= {name: functools.partial(run, x) for name, run in ways.items()}
    for kind, copy in COPIES.items():
        source = torch.empty(n * k // (2 if kind == W8 else 4), dtype=torch.int8, device="cuda")
        contenders[copy] = functools.partial(torch.empty_like(source).copy_, source)
    return {"program": "weights", "shape": list(shape), "dtype": "bf16", "configs": configs, "timing": timing.cold(contenders, budget_s=1.0)}


def said(row: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{name} {of_mm(row, name):.2f}" for name in row["timing"] if name != MM)
    return f"{row['timing'][MM]['median_us']:.1f} us; {shares}; of a copy {', '.join(f'{of_copy(row, kind):.2f}' for kind in COPIES)}"


def main(machine: Machine = THIS_MACHINE) -> None:
    torch.manual_seed(0)
    record.each_shape("weights", __doc__, SHAPES, machine, measured, said, verdict)


if __name__ == "__main__":
    main()
