"""A linear layer and its cross entropy, without the logits in memory, against eager torch, torch.compile and Liger Kernel's fused loss.

Run: python -m bench.cross_entropy [--commit HASH] [--out FOLDER] [--tuned]
Claim: forward FORWARD of the bare product, both ways BOTH of Liger Kernel, and no more than SPARE_BYTES in memory beside operands and gradients; in bf16, at the
first of MODELS. The others are models' last layers at their widths. Each contender runs forward and backward from a mean's gradient; contenders are
interleaved, and the L2 cache is cold. A wrong loss or gradient is not timed. --tuned: tune first, into the user's database; into a result of its own.
Liger Kernel and torch's own fused loss are left out where they are not installed.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import epigen
from bench import record, timing
from epigen.runtime.device import THIS_MACHINE, Machine


@dataclass(frozen=True)
class Model:
    """Rows, classes and width of a model's last layer. softcap: of its logits."""

    name: str
    rows: int
    classes: int
    width: int
    softcap: float | None = None


MODELS = (
    Model("131072 classes", 8192, 131072, 4096),
    Model("Llama 3 8B", 8192, 128256, 4096),
    Model("Llama 3.2 1B", 16384, 128256, 2048),
    Model("Qwen 2.5 7B", 8192, 152064, 3584),
    Model("Gemma 2 2B", 8192, 256000, 2304, 30.0),
    Model("GPT-2", 8192, 50257, 768),
)
FORWARD, BOTH, SPARE_BYTES = 0.97, 1.10, 300_000_000
MM, OURS, KEPT, EAGER, COMPILED, LIGER, TORCH = "mm", "epigen", "epigen, keep_logits", "eager", "torch.compile", "Liger", "torch's own"

Loss = Callable[[Tensor, Tensor], Tensor]


def losses(target: Tensor, softcap: float | None, tune: str | None) -> dict[str, Loss]:
    """Each way to a mean loss of x and weight."""

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        logits = functional.linear(x, weight).float()
        return functional.cross_entropy(softcap * torch.tanh(logits / softcap) if softcap else logits, target)

    found: dict[str, Loss] = {
        OURS: lambda x, weight: epigen.linear_cross_entropy(x, weight, target, softcap=softcap, tune=tune),
        KEPT: lambda x, weight: epigen.linear_cross_entropy(x, weight, target, softcap=softcap, keep_logits=True, tune=tune),
        EAGER: eager,
        COMPILED: torch.compile(eager),
    }
    own = getattr(functional, "linear_cross_entropy", None)
    if own is not None and not softcap:
        found[TORCH] = lambda x, weight: own(x, weight, target)
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger
    except ImportError:
        return found

    def by_liger(x: Tensor, weight: Tensor) -> Tensor:
        loss = liger(x, weight, target, softcap=softcap)
        return loss[0] if isinstance(loss, tuple) else loss  # type: ignore[no-any-return]

    return found | {LIGER: by_liger}


def both_ways(loss: Loss, x: Tensor, weight: Tensor) -> Tensor:
    x.grad = weight.grad = None
    result = loss(x, weight)
    result.backward()  # type: ignore[no-untyped-call]
    return result.detach()


def peak_bytes(run: Callable[[], object], gradients: Iterable[Tensor]) -> int:
    """The most that is held at a time beside what is there and the gradients themselves."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in gradients)


def measured(model: Model, tune: str | None = None) -> dict[str, Any]:
    """One row."""
    torch._dynamo.reset()
    m, n, k = model.rows, model.classes, model.width
    x = torch.randn(m, k, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().requires_grad_()
    target = torch.randint(0, n, (m,), device="cuda")
    ways = losses(target, model.softcap, tune)
    expected: tuple[Tensor, ...] | None = None
    memory = {}
    for name, loss in sorted(ways.items(), key=lambda item: item[0] != EAGER):
        found = (both_ways(loss, x, weight), x.grad, weight.grad)
        assert found[1] is not None and found[2] is not None
        if expected is None:
            expected = tuple(t.clone() for t in found if t is not None)
        for t, of in zip(found, expected, strict=True):
            assert t is not None
            assert (t.float() - of.float()).norm() < 2e-2 * of.float().norm(), name
        del found, t
        x.grad = weight.grad = None
        memory[name] = peak_bytes(functools.partial(both_ways, loss, x, weight), (x, weight))
    x.grad = weight.grad = expected = None
    gc.collect()
    with torch.no_grad():
        product = functools.partial(torch.mm, x, weight.t(), out=torch.empty(m, n, dtype=torch.bfloat16, device="cuda"))
        forward = timing.cold({MM: product} | {name: functools.partial(loss, x, weight) for name, loss in ways.items()}, budget_s=5.0)
        del product
    both = timing.cold({name: functools.partial(both_ways, loss, x, weight) for name, loss in ways.items()}, budget_s=6.0)
    shape = {"program": model.name, "shape": [m, n, k], "softcap": model.softcap, "dtype": "bf16"}
    return {**shape, "timing": forward, "both": both, "bytes": memory}


def of_mm(row: Mapping[str, Any], contender: str = OURS) -> float:
    """How many times as fast as the bare product, forward."""
    return float(row["timing"][MM]["median_us"] / row["timing"][contender]["median_us"])


def of_eager(row: Mapping[str, Any], contender: str = OURS) -> float:
    """How many times as fast as eager torch, both ways."""
    return float(row["both"][EAGER]["median_us"] / row["both"][contender]["median_us"])


def verdict(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the first row says of the claims."""
    row = next(iter(rows))
    found = {"forward": of_mm(row) / FORWARD, "memory": SPARE_BYTES / max(1, row["bytes"][OURS])}
    if LIGER in row["both"]:
        found["both"] = row["both"][LIGER]["median_us"] / row["both"][OURS]["median_us"] / BOTH
    return {"met": sum(share >= 1 for share in found.values()), "of": len(found), **{name: round(share, 3) for name, share in found.items()}}


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", action="store_true")
    record.add_options(parser)
    options = parser.parse_args()
    target, environment = record.gpu_at_hand(machine), record.environment(options.commit)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        rows.append(row := measured(model, "missing" if options.tuned else None))
        both = ", ".join(f"{name} {of_eager(row, name):.3f} in {row['bytes'][name] >> 20} MiB" for name in row["both"])
        print(f"{model}: forward {of_mm(row):.3f} of mm, {of_mm(row, EAGER):.3f} eager; both ways, of eager: {both}", flush=True)
        written = record.write_rows("cross_entropy", target, environment, rows, verdict(rows), options)
        torch.cuda.empty_cache()
    print(written)


if __name__ == "__main__":
    main()
