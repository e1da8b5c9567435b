"""relu(mm + bias) at the shapes of the GEM paper, against torch's three separate operations.

Run: python -m bench.gem [--commit HASH] [--out FOLDER]
GEM reports 38.8 %, 33.5 % and 28.9 % less time than unfused on a Radeon RX 7900 GRE at these (M, K, N).
"""

from __future__ import annotations

import argparse

import torch

import epigen
from bench import record, timing
from bench.record import Report

SHAPES = ((64, 256, 128), (128, 256, 256), (1024, 1024, 1024))  # M, K, N


def _config(fused: epigen.Kernel, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> str:
    fused(x, w, bias=bias)
    return str(fused.config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    fused = epigen.compile("relu(mm + bias)")
    rows = []
    for m, k, n in SHAPES:
        x, w, bias = (torch.randn(s, device="cuda").half() for s in ((m, k), (k, n), (n,)))
        out = torch.empty(m, n, device="cuda", dtype=torch.float16)
        contenders = {
            "three operations": lambda x=x, w=w, bias=bias: torch.relu(torch.mm(x, w) + bias),
            "_addmm_activation": lambda x=x, w=w, bias=bias: torch._addmm_activation(bias, x, w),
            "epigen": lambda x=x, w=w, bias=bias: fused(x, w, bias=bias),
            "epigen, out=": lambda x=x, w=w, bias=bias, out=out: fused(x, w, bias=bias, out=out),
        }
        row = {"m": m, "k": k, "n": n, "config": _config(fused, x, w, bias), "graph": timing.graphed(contenders), "cold": timing.cold(contenders), "host": timing.hosted(contenders)}  # fmt: skip
        rows.append(row)
        for kind in ("graph", "cold", "host"):
            eager, ours = (row[kind][name]["median_us"] for name in ("three operations", "epigen"))
            print(
                f"{m}x{k}x{n} {kind:5} {row['config']}: eager {eager:.2f} us, epigen {ours:.2f} us, {1 - ours / eager:.1%} less; { ({c: v['median_us'] for c, v in row[kind].items()}) }"
            )
    report = Report("bench.gem", record.environment(options.commit), rows, {"program": fused.program, "dtype": "fp16"})
    print(record.write("gem_fp16", report, options.out))


if __name__ == "__main__":
    main()
