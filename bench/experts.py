"""A layer of experts, forward and with its gradients, against a loop over experts and torch's grouped products, each as it is and by torch.compile.

Run: python -m bench.experts [--commit HASH] [--out FOLDER] [MODELS]
Nothing is claimed. Tokens go to the experts that random scores choose, evenly or with some experts liked better. The loop waits for the device, as
transformers' eager experts do; GROUPED is what its "grouped_mm" does. In bf16. Contenders are interleaved, and the L2 cache is cold. One whose answer or
gradients are wrong is not timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench import checked, record, timing
from bench.grouped import EVEN, SKEWED
from epigen.nn import Experts
from epigen.runtime.device import THIS_MACHINE, Machine

LOOP, GROUPED, COMPILED, OURS, OURS_COMPILED = "loop", "grouped_mm", "grouped_mm, torch.compile", "epigen", "epigen, torch.compile"
FORWARD, STEP = "forward", "forward and backward"
NEAR = 3e-2
LIKED = 2.0
"""The standard deviation of what is added to all scores of an expert, where routing is skewed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: int
    width: int
    between: int
    experts: int
    each: int
    """Experts of a token."""


MODELS: Mapping[str, Sizes] = {
    "Mixtral-8x7B": Sizes(4096, 4096, 14336, 8, 2),
    "Qwen3-30B-A3B": Sizes(8192, 2048, 768, 128, 8),
    "OLMoE": Sizes(4096, 2048, 1024, 64, 8),
    "Qwen3-30B-A3B, few tokens": Sizes(64, 2048, 768, 128, 8),
}

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens [T, H], their experts [T, k], scores [T, k]) -> [T, H]."""


def ways(layer: Experts) -> dict[str, Way]:
    """All with the layer's own parameters."""

    def unit(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up

    def loop(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in index.unique().tolist():
            token, place = torch.where(index == e)
            z = functional.linear(unit(functional.linear(x[token], layer.gate_up_proj[e])), layer.down_proj[e])
            y = y.index_add(0, token, (z * scores[token, place, None]).to(x.dtype))
        return y

    def grouped(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        chosen, order = index.reshape(-1).sort(stable=True)
        numbers = torch.arange(layer.num_experts, device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        z = torch._grouped_mm(x[order // index.shape[1]], layer.gate_up_proj.mT, offs=ends)
        z = torch._grouped_mm(unit(z), layer.down_proj.mT, offs=ends) * scores.reshape(-1)[order][:, None]
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
        return z[places].view(*index.shape, -1).sum(1).to(x.dtype)

    torch._dynamo.reset()  # each model is compiled by itself, and torch gives up after eight
    return {LOOP: loop, GROUPED: grouped, COMPILED: torch.compile(grouped), OURS: layer, OURS_COMPILED: torch.compile(layer)}


def tokens(sizes: Sizes, routing: str, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """What a way is given, of which the tokens and the scores want a gradient."""
    x = torch.randn(sizes.tokens, sizes.width, device=device).bfloat16().requires_grad_()
    logits = torch.randn(sizes.tokens, sizes.experts, device=device)
    if routing == SKEWED:
        logits = logits + LIKED * torch.randn(sizes.experts, device=device)
    scores, index = logits.softmax(-1).topk(sizes.each)
    return x, index, (scores / scores.sum(-1, keepdim=True)).requires_grad_()


def runs(layer: Experts, way: Way, given: tuple[Tensor, Tensor, Tensor], dy: Tensor) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The layer alone, and with the gradients of tokens, scores and both weights."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (way(*given),)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(way(*given), [given[0], given[2], layer.gate_up_proj, layer.down_proj], dy)

    return {FORWARD: forward, STEP: step}


def of(row: Mapping[str, Any], peer: str, contender: str = OURS) -> float:
    """How many times as fast as a peer."""
    return float(row["timing"][peer]["median_us"] / row["timing"][contender]["median_us"])


def measured(name: str, routing: str, device: str = "cuda") -> list[dict[str, Any]]:
    """A row forward, and one with the gradients."""
    sizes = MODELS[name]
    layer = Experts(sizes.width, sizes.between, sizes.experts, device=device, dtype=torch.bfloat16)
    given = tokens(sizes, routing, device)
    dy = torch.randn_like(given[0])
    by_way = {way: runs(layer, function, given, dy) for way, function in ways(layer).items()}
    rows = []
    for what in (FORWARD, STEP):
        right = [t.float() for t in by_way[LOOP][what]()]
        for way, run in by_way.items():
            for found, wanted in zip(run[what](), right, strict=True):
                checked.near(found.float(), wanted, NEAR, f"{way}, {what} of {name}, {routing}")
        timed = timing.cold({way: run[what] for way, run in by_way.items()}, budget_s=3.0)
        rows.append({"model": name, "routing": routing, "program": what, "dtype": "bf16", "timing": timed})
    return rows


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.set_defaults(tuned=False)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    target, environment = record.gpu_at_hand(machine), record.environment(options.commit)
    rows: list[dict[str, Any]] = []
    for name, routing in itertools.product(options.models or MODELS, (EVEN, SKEWED)):
        torch.manual_seed(1)
        for row in measured(name, routing):
            rows.append(row)
            print(f"{name} {routing} {row['program']}: {', '.join(f'{way} {of(row, GROUPED, way):.3f}' for way in row['timing'])} of {GROUPED}", flush=True)
            written = record.write_rows("experts", target, environment, rows, {}, options)
    print(written)


if __name__ == "__main__":
    main()
