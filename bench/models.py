"""Layers of real models, in bf16 with random weights: eager, torch.compile and backend="epigen", forward alone and a training step.

Run: python -m bench.models [--commit HASH] [--out FOLDER] [--models a,b] [--tokens N] [--layers N]
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench import record

_ROUNDS = 15


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
    return {
        "bert-large": lambda: _Layers(hf.BertModel(hf.BertConfig(**wide, **none)).encoder.layer),
        "vit-large": lambda: _Layers(_layers_of(hf.ViTModel(hf.ViTConfig(**wide, **none)))),
        "gpt2-xl": lambda: _Embedded(hf.GPT2Model(gpt2)),
        "llama-8b": lambda: _Embedded(hf.LlamaModel(llama)),
        "t5-xl": lambda: _Embedded(hf.T5EncoderModel(t5)),
    }


def _layers_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m))


WIDTHS = {"bert-large": 1024, "vit-large": 1024, "gpt2-xl": 1600, "llama-8b": 4096, "t5-xl": 2048}


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


def measure(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians in ms, contenders in turns."""
    for run in runs.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(_ROUNDS):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            runs[name]()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end))
    return {name: round(statistics.median(values), 4) for name, values in samples.items()}


def row_of(name: str, make: Callable[[], nn.Module], options: argparse.Namespace) -> dict[str, Any]:
    """One model: eager, as Inductor compiles it, and with epigen's backend."""
    from epigen.training import backend
    from epigen.training.report import Seen

    torch.manual_seed(0)
    x = torch.randn(options.tokens // options.sequence, options.sequence, WIDTHS[name], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.device("cuda"):
        plain = make().to(torch.bfloat16)
    grad = torch.randn_like(x)
    seen: list[Seen] = []
    ways: dict[str, dict[str, Any]] = {"inductor": {}}
    if options.autotune:
        ways["autotune"] = {"mode": "max-autotune-no-cudagraphs"}
    ways["epigen"] = {"backend": backend.backend, "options": {"report": seen.extend}}
    contenders: dict[str, Any] = {"eager": plain}
    compile_s = {}
    for label, arguments in ways.items():
        start = time.perf_counter()
        contenders[label] = compiled = torch.compile(plain, **arguments)
        compiled(x).backward(grad)
        with torch.no_grad():
            compiled(x)
        torch.cuda.synchronize()
        compile_s[label] = round(time.perf_counter() - start, 1)

    def step(model: Any) -> None:
        plain.zero_grad(set_to_none=True)
        x.grad = None
        model(x).backward(grad)

    def forward(model: Any) -> None:
        with torch.no_grad():
            model(x)

    with torch.no_grad():
        want = plain(x).float()
        errors = {label: round(((model(x).float() - want).norm() / want.norm()).item(), 5) for label, model in contenders.items()}
    return {
        "model": name,
        "tokens": options.tokens,
        "layers": options.layers,
        "compile_s": compile_s,
        "errors": errors,
        "forward_ms": measure({label: functools.partial(forward, model) for label, model in contenders.items()}),
        "step_ms": measure({label: functools.partial(step, model) for label, model in contenders.items()}),
        "taken": sum(s.taken for s in seen),
        "products": len(seen),
        "programs": sorted({s.program for s in seen if s.taken}),
        "left": sorted({f"{list(s.shape)}: {s.why}" for s in seen if not s.taken}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--models", default=",".join(WIDTHS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--autotune", action="store_true", help="max-autotune-no-cudagraphs too, which takes minutes")
    options = parser.parse_args()
    record.gpu_at_hand()
    torch._dynamo.config.recompile_limit = 64  # each model is another size of the same forward
    rows = []
    for name in options.models.split(","):
        rows.append(row := row_of(name, models(options.layers)[name], options))
        for what in ("forward_ms", "step_ms"):
            times = row[what]
            best = min(ms for label, ms in times.items() if label != "epigen")
            print(f"{name} {what} {times}: {best / times['epigen']:.3f} of the best other, {times['inductor'] / times['epigen']:.3f} of Inductor", flush=True)
        print(f"  {row['compile_s']} s to compile; errors {row['errors']}; {row['taken']} of {row['products']} products taken", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(record.write("models", {"environment": record.environment(options.commit), "rows": rows}, options.out))


if __name__ == "__main__":
    main()
