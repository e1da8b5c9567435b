"""Layers of real models, in bf16 with random weights: eager, torch.compile, backend="epigen" and epigen.fuse, forward alone and a training step.

Beside each stands what its products take alone, and what Inductor's pointwise kernels do, which is the most that fusing could spare, as those of eager's are that
a fused model does without. With --models experts,adaptive,weighted,bert-large-written-out those with batches of products. With --graphs as CUDA graphs too, which take the host's time out; with --losses the losses of each way's training.
Run: python -m bench.models [--models a,b] [--tuned a,b] [--graphs a,b] [--losses a,b]; --merge puts such results together.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import list_mode_options
from torch._inductor.utils import fresh_cache

from bench import record
from bench.record import Report, Row
from epigen.runtime.device import THIS_MACHINE, Machine

SEQUENCE = 1024
"""Tokens of one sequence, unless told otherwise."""

_ROUNDS = 15
_IN_A_ROW = 4
"""Runs of one sample: as in training and in serving, the host is ahead of the GPU where it can be. Waiting after each would time the host's first launches."""
_STEPS = 50


def models(layers: int) -> dict[str, Callable[[], nn.Module]]:
    """Each takes [batch, sequence, width] and gives the same. Attention runs as the model has it."""
    import transformers as hf

    wide = {"hidden_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 16, "intermediate_size": 4096, "attn_implementation": "sdpa"}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = hf.GPT2Config(
        n_embd=1600, n_layer=layers, n_head=25, vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, n_positions=4096, attn_implementation="sdpa"
    )
    llama = hf.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    t5 = hf.T5Config(d_model=2048, d_kv=64, d_ff=5120, num_layers=layers, num_heads=32, vocab_size=64, dropout_rate=0.0, feed_forward_proj="gated-gelu")
    opt = hf.OPTConfig(
        hidden_size=4096,
        word_embed_proj_dim=4096,
        ffn_dim=16384,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=64,
        dropout=0.0,
        attn_implementation="sdpa",
    )
    return {
        "bert-large": lambda: _Layers(hf.BertModel(hf.BertConfig(**wide, **none)).encoder.layer),
        "vit-large": lambda: _Layers(_layers_of(hf.ViTModel(hf.ViTConfig(**wide, **none)))),
        "gpt2-xl": lambda: _Embedded(hf.GPT2Model(gpt2)),
        "llama-8b": lambda: _Embedded(hf.LlamaModel(llama)),
        "t5-xl": lambda: _Embedded(hf.T5EncoderModel(t5)),
        "opt-6.7b": lambda: _Embedded(hf.OPTModel(opt)),
        "experts": lambda: nn.Sequential(*(_Experts() for _ in range(layers))),
        "adaptive": lambda: nn.Sequential(*(_Adaptive() for _ in range(layers))),
        "weighted": lambda: nn.Sequential(*(_Weighted() for _ in range(layers))),
        "bert-large-written-out": lambda: _Layers(hf.BertModel(hf.BertConfig(**wide | {"attn_implementation": "eager"}, **none)).encoder.layer),
    }


def _layers_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m))


WIDTHS = {"bert-large": 1024, "vit-large": 1024, "gpt2-xl": 1600, "llama-8b": 4096, "t5-xl": 2048, "opt-6.7b": 4096}
BATCHED = {"experts": 1024, "adaptive": 1024, "weighted": 1024, "bert-large-written-out": 1024}
"""Models whose products are batches, wholly or in part; they are run where they are named."""


class _Layers(nn.Module):
    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x)
            x = found if isinstance(found, Tensor) else found[0]
        return x


class _Embedded(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(inputs_embeds=x)[0]


class _Experts(nn.Module):
    """A gated unit for each of eight experts of equal load, with biases, a residual, and what each token's result counts."""

    def __init__(self, experts: int = 8, width: int = BATCHED["experts"], hidden: int = 4096):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = (nn.Parameter(torch.randn(experts, width, hidden) / width**0.5) for _ in range(2))
        self.down, self.bias = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5), nn.Parameter(torch.zeros(experts, hidden))
        self.router = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        own = x.reshape(len(self.gate), -1, x.shape[-1])
        h = self.norm(own)
        gate = torch.einsum("ecd,edh->ech", h, self.gate) + self.bias[:, None]
        hidden = nn.functional.silu(gate) * torch.einsum("ecd,edh->ech", h, self.up)
        counts = torch.sigmoid((h * self.router).sum(-1, keepdim=True))
        return (own + torch.einsum("ech,ehd->ecd", hidden, self.down) * counts).reshape(x.shape)


class _Adaptive(nn.Module):
    """The MLP of a diffusion transformer, which each image shifts, scales and gates."""

    def __init__(self, width: int = BATCHED["adaptive"]):
        super().__init__()
        self.norm, self.made = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate = self.made(x.mean(1, keepdim=True)).chunk(3, dim=-1)
        hidden = nn.functional.gelu(self.up(self.norm(x) * (1 + scale) + shift), approximate="tanh")
        return x + gate * self.down(hidden)


class _Weighted(nn.Module):
    """Attention that returns its weights, as torch has it, with a mask that is added."""

    def __init__(self, width: int = BATCHED["weighted"]):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.norm(x), torch.full((x.shape[1], x.shape[1]), -1e4, device=x.device, dtype=x.dtype).triu(1)
        y, weights = self.attention(h, h, h, attn_mask=mask, need_weights=True, average_attn_weights=False)
        return x + y * (1 + weights.amax())


def measure(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians in ms of one run, contenders interleaved."""
    for run in runs.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(_ROUNDS):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(_IN_A_ROW):
                runs[name]()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / _IN_A_ROW)
    return {name: round(statistics.median(values), 4) for name, values in samples.items()}


def host_ms(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians in ms that the host takes to launch one run, while the GPU is not waited for: where it takes longer than the run the GPU waits for it."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(values), 4) for name, values in samples.items()}


def better(times: Mapping[str, float]) -> float:
    """What the fastest of torch's own ways takes. times: by way."""
    return min(times[way] for way in ("eager", "inductor", "autotune") if way in times)


_PRODUCTS = ("gemm", "nvjet", "cutlass", "splitK")
_POINTWISE = ("triton_poi_",)


def kernels(run: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """The kernels of a run by name, each with its ms and its launches, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return {e.key: (e.self_device_time_total / 1e3, e.count) for e in found.key_averages() if e.self_device_time_total}


def ms_of(found: Mapping[str, tuple[float, int]], words: Sequence[str]) -> float:
    """Those with one of the words in their names."""
    return round(sum(ms for name, (ms, _) in found.items() if any(word in name for word in words)), 4)


def spared_ms(plain: Mapping[str, tuple[float, int]], fused: Mapping[str, tuple[float, int]]) -> float:
    """What those of eager's kernels take that are no products and that the fused model launches less often: what it would spare if epilogues took no time."""
    fewer = {name: ms - fused.get(name, (0.0, 0))[0] for name, (ms, count) in plain.items() if fused.get(name, (0.0, 0))[1] < count}
    return round(sum(ms for name, ms in fewer.items() if not any(word in name for word in _PRODUCTS)), 4)


def on_the_gpu(name: str, tokens: int, make: Callable[[], nn.Module], sequence: int = SEQUENCE) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with random weights, and its input and the gradient of its result, each [batch, sequence, width], all in bf16."""
    torch.manual_seed(0)
    x = torch.randn(tokens // sequence, sequence, (WIDTHS | BATCHED)[name], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.device("cuda"):
        plain = make().to(torch.bfloat16)
    return plain, x, torch.randn_like(x)


def row_of(name: str, tokens: int, make: Callable[[], nn.Module], options: argparse.Namespace) -> dict[str, Any]:
    """One model: eager, as Inductor compiles it, with epigen's backend, and fused in place."""
    import epigen
    from epigen.training import backend

    def wanted(listed: str) -> bool:
        return not {"all", name, f"{name}@{tokens}"}.isdisjoint(listed.split(","))

    torch._dynamo.reset()  # else another number of tokens is one that varies, for which other code is made
    plain, x, grad = on_the_gpu(name, tokens, make, options.sequence)
    seen: list[backend.Seen] = []
    fused = copy.deepcopy(plain)
    report = str(epigen.fuse(fused))
    ways: dict[str, dict[str, Any]] = {"inductor": {}}
    if wanted(options.autotune):
        ways["autotune"] = {"mode": "max-autotune-no-cudagraphs"}
        ways["epigen, autotune"] = {"backend": backend.backend, "mode": "max-autotune-no-cudagraphs"}  # of what is left to Inductor
        if wanted(options.tuned):
            ways["tuned, autotune"] = {"backend": backend.backend, "options": list_mode_options("max-autotune-no-cudagraphs") | {"tune": "missing"}}
    ways["epigen"] = {"backend": backend.backend, "options": {"report": seen.extend}}
    if wanted(options.tuned):
        ways["tuned"] = {"backend": backend.backend, "options": {"tune": "missing"}}
    if wanted(options.graphs):
        ways["inductor, graphs"] = {"mode": "reduce-overhead"}
        ways["epigen, graphs"] = {"backend": backend.backend, "mode": "reduce-overhead"}
    contenders: dict[str, Any] = {"eager": plain, "fuse": fused}
    for label, way in ways.items():
        # what Inductor has kept of an earlier run is not reported; but where it times each product's kernels for minutes, it need not do so twice
        with contextlib.nullcontext() if "autotune" in label else fresh_cache():
            contenders[label] = compiled = torch.compile(plain, **way)
            compiled(x).backward(grad)
            with torch.no_grad():
                compiled(x)
        print(f"  {name} {label}: compiled", flush=True)

    def step(model: Any) -> None:
        for one in (plain, fused):
            one.zero_grad(set_to_none=True)
        x.grad = None
        model(x).backward(grad)

    def forward(model: Any) -> None:
        with torch.no_grad():
            model(x)

    with torch.no_grad():
        want = plain(x).float()
        errors = {label: round(((model(x).float() - want).norm() / want.norm()).item(), 5) for label, model in contenders.items()}
    both = {what: {label: functools.partial(run, model) for label, model in contenders.items()} for what, run in (("forward", forward), ("step", step))}
    profiled = {what: {label: kernels(runs[label]) for label in ("eager", "inductor", "fuse", "epigen")} for what, runs in both.items()}
    return {
        "model": name,
        "tokens": tokens,
        "layers": options.layers,
        "errors": errors,
        "forward_ms": measure(both["forward"]),
        "step_ms": measure(both["step"]),
        "host_ms": {what: host_ms(runs) for what, runs in both.items()},
        "gpu_ms": {
            what: {label: round(sum(ms for ms, _ in times.values()), 4) for label, times in found.items()} for what, found in profiled.items()
        },  # the host's time left out
        "products_ms": {what: ms_of(found["eager"], _PRODUCTS) for what, found in profiled.items()},
        "pointwise_ms": {what: ms_of(found["inductor"], _POINTWISE) for what, found in profiled.items()},
        "spared_ms": {what: spared_ms(found["eager"], found["fuse"]) for what, found in profiled.items()},
        "taken": sum(s.taken for s in seen),
        "products": len(seen),
        "programs": sorted({s.program for s in seen if s.taken}),
        "left": sorted({f"{list(s.shape)}: {s.why}" for s in seen if not s.taken}),
        "fused": report.strip().splitlines()[-1],
        "report": str(epigen.report(contenders["epigen"], measure=True)).splitlines() if options.report else [],
        "losses": losses(plain, x, {"eager": {}, **{label: ways[label] for label in ("inductor", "epigen")}}) if wanted(options.losses) else {},
    }


def merged(report: Report, newer: Report) -> Report:
    """A report with a newer one's rows in place of the same models' own. Of what these were run as and the newer ones were not, they are kept, as `earlier`."""
    environment, commit = newer.environment, newer.environment["commit"]
    if any(report.environment[k] != environment[k] for k in ("gpu", "torch", "triton")):
        raise SystemExit(
            f"{commit} ran on {environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}: a report holds rows of one GPU and version"
        )

    def model(row: Row) -> tuple[str, int]:
        return row["model"], row["tokens"]

    known = [record.dated(row, report, commit) for row in report.rows]
    rows = {model(row): row for row in known if "earlier" not in row}
    before = [*(row for row in known if "earlier" in row), *rows.values()]
    rows |= {model(row): record.dated(row, newer, commit) for row in newer.rows if "earlier" not in row}
    earlier = [row for row in before if row is not rows[model(row)] and not _measured(row) <= _measured(rows[model(row)])]
    last = {(model(row), _measured(row)): row | {"earlier": True} for row in earlier}  # of those that were run as the same
    return Report("bench.models", environment, [*rows.values(), *last.values()])


def _measured(row: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(row["step_ms"]) | ({"losses"} if row.get("losses") else set())


def losses(plain: nn.Module, x: Tensor, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The losses of training on one batch from the same weights, by way, and how far each way's are from eager's at most, in parts of them.

    "fp32" is eager in that dtype: how far rounding alone takes a way.
    """
    import epigen

    target = torch.randn_like(x)
    found: dict[str, list[float]] = {}
    for label, arguments in {**ways, "fuse": {}, "fp32": {}}.items():
        model = copy.deepcopy(plain)
        given, wanted = x.detach(), target
        if label == "fp32":
            model, given, wanted = model.float(), given.float(), wanted.float()
        if label == "fuse":
            epigen.fuse(model)
        run = torch.compile(model, **arguments) if arguments or label == "inductor" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        listed = []
        for _ in range(_STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(run(given).float(), wanted.float())
            loss.backward()
            optimizer.step()
            listed.append(loss.detach())
        found[label] = [round(v.item(), 6) for v in listed]
    apart = {label: round(max(abs(v / e - 1) for v, e in zip(values, found["eager"], strict=True)), 6) for label, values in found.items()}
    return {"steps": _STEPS, "first": found["eager"][0], "last": {label: values[-1] for label, values in found.items()}, "apart": apart}


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--models", default=",".join(WIDTHS), help="names, or name@tokens")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--tuned", default="", help="models whose programs are tuned too, which takes seconds a program; here and below: names, name@tokens, or all"
    )
    parser.add_argument("--graphs", default="", help="models that run as CUDA graphs too")
    parser.add_argument("--losses", default="", help=f"models whose losses over {_STEPS} steps of training are compared, for which they are compiled once more")
    parser.add_argument("--report", action="store_true", help="what each product's program is measured to save, too")
    parser.add_argument("--autotune", default="", help="models that run as max-autotune-no-cudagraphs compiles them too, which takes minutes")
    parser.add_argument("--more", action="store_true", help="keep the other models' rows that the result holds")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="run nothing, and put these results' rows into the result")
    options = parser.parse_args()
    if options.merge:
        found = record.read(options.out / "models.json")
        for path in options.merge:
            found = merged(found, record.read(path))
        print(record.write("models", found, options.out))
        return
    record.gpu_at_hand(machine)
    torch._dynamo.config.recompile_limit = 64  # each way is another compilation of the same forward
    environment = record.environment(options.commit)
    chosen = [(name, int(tokens or options.tokens)) for name, _, tokens in (entry.partition("@") for entry in options.models.split(","))]
    rows = [row for row in record.earlier(options.out / "models.json", environment) if options.more and (row["model"], row["tokens"]) not in chosen]
    for name, tokens in chosen:
        rows.append(row := row_of(name, tokens, models(options.layers)[name], options))
        for what in ("forward_ms", "step_ms"):
            times = row[what]
            best = better(times)
            ratios = ", ".join(f"{label} {best / times[label]:.3f}" for label in ("epigen", "tuned", "fuse") if label in times)
            if "epigen, graphs" in times:
                ratios += f", graphs {times['inductor, graphs'] / times['epigen, graphs']:.3f}"
            print(f"{name} {what} {times}: of the best other: {ratios}; fuse of eager {times['eager'] / times['fuse']:.3f}", flush=True)
        print(
            f"  errors {row['errors']}; {row['taken']} of {row['products']} products taken; {row['fused']}; products alone {row['products_ms']}; pointwise {row['pointwise_ms']}; spared {row['spared_ms']}; host {row['host_ms']}",
            flush=True,
        )
        print(*row["report"], *([f"  losses {row['losses']}"] if row["losses"] else []), sep="\n", flush=True)
        written = record.write("models", Report("bench.models", environment, rows), options.out)  # each, should time run out
        gc.collect()
        torch.cuda.empty_cache()
    print(written)


if __name__ == "__main__":
    main()
