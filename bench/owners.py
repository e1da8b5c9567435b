"""What `epigen.fuse` costs the Python thread, forward by forward: each fused forward of a few models' layers, called alone, against the plain one.

Run: python -m bench.owners [--device cpu|cuda] [--rounds N] [--out FOLDER]
Without a GPU nothing is computed in kernels: each call of one only allocates its results, so that what remains of a fused forward is its Python; the plain one
pays for its (tiny) products there. On a GPU both launch what they launch.
Beside the times stand counts that do not vary: functions of Python's and of C's that a call goes through, and nodes that autograd is given.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import epigen
from bench import models, record
from bench.record import Report
from epigen.runtime.code_builder import CodeBuilder
from epigen.runtime.kernel import Kernel
from epigen.training.fuse import Forward

_WIDTH, _ROWS, _CALLS = 32, 4, 200


def layers() -> dict[str, Callable[[], nn.Module]]:
    """One layer of each model, tiny. Each takes [batch, sequence, width]."""
    import transformers as hf

    wide = {"hidden_size": _WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * _WIDTH, "attn_implementation": "sdpa"}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = hf.GPT2Config(
        n_embd=_WIDTH, n_layer=1, n_head=2, vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa", use_cache=False
    )
    llama = hf.LlamaConfig(**wide, num_key_value_heads=2, vocab_size=64, use_cache=False)
    t5 = hf.T5Config(d_model=_WIDTH, d_kv=16, d_ff=2 * _WIDTH, num_layers=1, num_heads=2, vocab_size=64, dropout_rate=0.0, feed_forward_proj="gated-gelu")
    return {
        "bert": lambda: models._Layers(hf.BertModel(hf.BertConfig(**wide, **none)).encoder.layer),
        "vit": lambda: models._Layers(models._layers_of(hf.ViTModel(hf.ViTConfig(**wide, **none)))),
        "gpt2": lambda: models._Embedded(hf.GPT2Model(gpt2)),
        "llama": lambda: models._Embedded(hf.LlamaModel(llama)),
        "t5": lambda: models._Embedded(hf.T5EncoderModel(t5)),
        "mlp": lambda: nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH)),
    }


@contextmanager
def hollow() -> Iterator[None]:
    """Kernels that allocate their results, and compute nothing."""

    def bound(
        self: Kernel, operands: Any, inputs: Any, results: Any, views: Any, shapes: Sequence[tuple[int, ...] | None] = ()  # noqa: ARG001
    ) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
        found = [(shape or t.shape, t.dtype) for t, shape in itertools.zip_longest(results, shapes)]
        text = CodeBuilder("call(*_given)")
        made = [
            f"{text.hold(torch.empty_strided)}({text.hold(tuple(shape))}, {text.hold(_strides(shape))}, dtype={text.hold(dtype)})" for shape, dtype in found
        ]
        text.add(f"return ({', '.join(made)},)")
        return text.function()

    before, Kernel.bound = Kernel.bound, bound  # type: ignore[method-assign]
    try:
        yield
    finally:
        Kernel.bound = before  # type: ignore[method-assign]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def owners(make: Callable[[], nn.Module], device: str) -> Iterator[tuple[str, nn.Module, nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Of each module that fuse changes, its class, itself as it was, changed, and what it is called with."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    plain = make().to(device, dtype)
    fused = copy.deepcopy(plain)
    epigen.fuse(fused)
    x = torch.randn(1, _ROWS, _WIDTH, device=device, dtype=dtype)
    for (_, before), (_, after) in zip(list(plain.named_modules()), list(fused.named_modules()), strict=True):
        if isinstance(vars(after).get("forward"), Forward):
            given: list[Any] = []
            handle = before.register_forward_pre_hook(lambda _m, args, kwargs, given=given: given.append((args, kwargs)), with_kwargs=True)
            plain(x)
            handle.remove()
            yield type(before).__name__, before, after, *given[0]


def least_us(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of a call, of calls that are interleaved: what else runs on the host only adds to it."""
    found = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        for _ in range(5):
            way()
    for _, (name, way) in itertools.product(range(rounds), ways.items()):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            way()
        found[name] = min(found[name], (time.perf_counter() - start) * 1e6 / _CALLS)
    return {name: round(us, 2) for name, us in found.items()}


def calls(way: Callable[[], object]) -> int:
    """Functions that one call goes through, as Python's profiler is told of them."""
    count = 0

    def profiled(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    way()
    before = sys.getprofile()
    sys.setprofile(profiled)
    try:
        way()
    finally:
        sys.setprofile(before)
    return count


def nodes(y: Any) -> int:
    """Of autograd, up to the leaves."""
    pending = [t.grad_fn for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, Tensor) and t.grad_fn is not None]
    seen = set(pending)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                pending.append(node)
    return sum(type(node).__name__ != "AccumulateGrad" for node in seen)


def row(name: str, before: nn.Module, after: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: int) -> dict[str, Any]:
    args, kwargs = tree_map(lambda a: a.detach() if isinstance(a, Tensor) else a, (args, kwargs))
    leaves = tuple(a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in args)

    def forward(module: nn.Module) -> Any:
        with torch.no_grad():
            return module(*args, **kwargs)

    def step(module: nn.Module) -> None:
        y = module(*leaves, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(torch.ones_like(y))
        for p in module.parameters():
            p.grad = None

    found: dict[str, Any] = {"owner": name}
    for mode, run in (("forward", forward), ("step", step)):
        for module in (before, after):
            module.train(mode == "step")
        ways = {"plain": functools.partial(run, before), "fused": functools.partial(run, after)}
        found[mode] = least_us(ways, rounds) | {f"{way} calls": calls(call) for way, call in ways.items()}
    found["nodes"] = {"plain": nodes(before(*leaves, **kwargs)), "fused": nodes(after(*leaves, **kwargs))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--device", default="cpu", help="cuda: with all that kernels take of the host")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':6} {'owner':22} {'forward us':>18} {'calls':>9} {'step us':>18} {'calls':>9} {'nodes':>6}")
    for model, make in layers().items():
        if options.models and model not in options.models.split(","):
            continue
        for name, before, after, args, kwargs in owners(make, options.device):
            if options.device == "cpu":
                with hollow():
                    found = row(name, before, after, args, kwargs, options.rounds)
            else:
                found = row(name, before, after, args, kwargs, options.rounds)
            rows.append({"model": model, **found})
            shown = [
                f"{found[m]['plain']:7.1f} -> {found[m]['fused']:7.1f} {found[m]['plain calls']:3} -> {found[m]['fused calls']:3}" for m in ("forward", "step")
            ]
            print(f"{model:6} {name:22} {shown[0]} {shown[1]} {found['nodes']['plain']:2} ->{found['nodes']['fused']:2}", flush=True)
    print(record.write("owners", Report("bench.owners", record.environment(options.commit), rows, {"device": options.device}), options.out))


if __name__ == "__main__":
    main()
