"""What a call costs the Python thread, and what the first call of a process costs.

Run: python -m bench.host [--processes N] [--commit HASH] [--out FOLDER]
Claims: a warmed call of one small kernel takes at most 5 us of host time with `out=` and 8 us where it allocates its outputs (a program
whose reductions want a second kernel is timed beside it), where the driver's own share of a launch is told as well; the first call of a
process, the kernel in the cache on disk and the modules in Python's own, comes at most 0.3 s after torch has started, and that of a program
that was never compiled, of a small product and of a large one, at most 0.5 s after it. A warmed forward of
`epigen.linear` takes at most 25 us of host time and its backward as long, and a block under `epigen.fuse` no longer than in eager.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

import epigen
from bench import command, driver, record, timing
from bench.record import Report, Row
from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.runtime import launch
from epigen.runtime.code_builder import CodeBuilder
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.prepared import Prepared
from epigen.shapes import Shape, extents

M, N, K = 64, 256, 128
ROUNDS, CALLS = 20, 100  # 2,000 calls of each contender, interleaved; so few at a time that the GPU's queue never fills
CLAIMED_OUT_US, CLAIMED_NEW_US, CLAIMED_FIRST_S, CLAIMED_LAYER_US = 5.0, 8.0, 0.3, 25.0
CLAIMED_UNKNOWN_S, UNKNOWN = 0.5, ((64, 256, 128), (4096, 4096, 4096))
LAYER = "epigen.linear"

PROGRAMS = {
    "relu + bias": "relu(mm + bias)",
    "relu + bias + mask": "z = mm + bias; relu(z), bitmask(z > 0)",
    "drelu + bgrad": "dz = drelu(mm, mask); dz, bgrad(dz)",
    "relu + bias, by TMA": "relu(mm + bias)",
}
CONFIGS = {
    "relu + bias, by TMA": schedules.config(
        "persistent", block_m=64, block_n=64, block_k=64, group_m=1, num_warps=4, num_stages=2, flatten=1, subtiles=1, tma_store=1
    )
}
"""Of programs for which none is chosen: a kernel whose tensors have descriptors."""

FIRST = """
import json, sys, time
started = time.perf_counter()
import torch
m, n, k = map(int, sys.argv[1:])
x, w, bias = (torch.randn(s, device="cuda").half() for s in ((m, k), (k, n), (n,)))
torch.relu(torch.mm(x, w) + bias).sum().item()
torch_s = time.perf_counter() - started
import epigen
fused = epigen.compile("relu(mm + bias)")
imported_s = time.perf_counter() - started - torch_s
y = fused(x, w, bias=bias)
torch.cuda.synchronize()
first_s = time.perf_counter() - started - torch_s
print(json.dumps({"torch_s": torch_s, "imported_s": imported_s, "first_s": first_s}))
"""


def contenders(text: str, config: KernelConfig | None = None) -> tuple[dict[str, Callable[[], object]], epigen.Kernel]:
    """Ways to the same outputs, the last one where nvmath is installed; and epigen's kernel, with a config where one is given."""
    kernel = epigen.compile(text, config=config)
    x, w, bias = (torch.randn(s, device="cuda").half() for s in ((M, K), (K, N), (N,)))
    _, mask = epigen.compile(PROGRAMS["relu + bias + mask"])(x, w, bias=bias)
    inputs = {n.name: {"bias": bias, "mask": mask}[n.name] for n in kernel.graph.inputs()}
    found = kernel(x, w, **inputs)
    outs = tuple(torch.empty_like(t) for t in found) if isinstance(found, tuple) else torch.empty_like(found)
    kernel(x, w, out=outs, **inputs)
    ways: dict[str, Callable[[], object]] = {
        "epigen, out=": lambda: kernel(x, w, out=outs, **inputs),
        "epigen": lambda: kernel(x, w, **inputs),
        "the launch alone": _launch_alone(kernel, x, w, inputs),
        "Triton's launch": _through_triton(kernel, x, w, inputs),
    }
    if "drelu" in text:
        keep = torch.rand(M, N, device="cuda").half()

        def eager() -> object:
            dz = torch.mm(x, w) * keep
            return dz, dz.sum(0)

        ways["eager operations"] = eager
    elif "bitmask" not in text:
        ways["eager operations"] = lambda: torch.relu(torch.mm(x, w) + bias)
        ways["_addmm_activation"] = lambda: torch._addmm_activation(bias, x, w)
    if importlib.util.find_spec("nvmath") is not None:
        ways["nvmath, execute"] = _nvmath(text, x, w, bias)
    return ways, kernel


def _launches(kernel: epigen.Kernel) -> int:
    assert kernel._last is not None
    return len(kernel._last.launches)


def _arguments(kernel: epigen.Kernel, x: torch.Tensor, w: torch.Tensor, inputs: Mapping[str, Any]) -> tuple[Prepared, dict[str, Any]]:
    """The last call, and what its launches take by name, with buffers of their own."""
    prepared = kernel._last
    assert prepared is not None and prepared.plan is not None
    values = prepared.values((x, w), inputs, prepared.results({}))
    if prepared.plan.by_vendor:
        values["mm_ptr"] = prepared.product(x, w)
    return prepared, values


def _launch_alone(kernel: epigen.Kernel, x: torch.Tensor, w: torch.Tensor, inputs: Mapping[str, Any]) -> Callable[[], object]:
    """The same kernels by the same C function, with all of its arguments made beforehand: what the driver and the launcher take of a call."""
    prepared, values = _arguments(kernel, x, w, inputs)
    launches = prepared.launchers
    assert launches
    text = CodeBuilder("launch()")
    text.hold(values)  # the tensors live as long as the function
    given = [values[name] for name in prepared.slots(tuple(inputs))]
    slots = [text.hold(v.data_ptr() if isinstance(v, torch.Tensor) else v) for v in given]
    stream = text.hold(torch.cuda.current_stream().cuda_stream)
    step = launch.in_one_step(launches, (), len(slots), prepared.device.index)
    assert step is not None
    text.add(launch.step_call(text, step, launches, stream, slots))
    return text.function()


def _through_triton(kernel: epigen.Kernel, x: torch.Tensor, w: torch.Tensor, inputs: Mapping[str, Any]) -> Callable[[], object]:
    """The same kernels by `jit[grid](...)`, with buffers made beforehand."""
    prepared, values = _arguments(kernel, x, w, inputs)
    launches = [(x.jit, x.grid, x.arguments(values), x.options) for x in prepared.launches]

    def run() -> None:
        for jit, grid, arguments, options in launches:
            jit[grid](*arguments, **options)

    return run


def _nvmath(text: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> Callable[[], object]:
    """cuBLASLt's transposes, y^T = relu(w^T x^T + b), planned once."""
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    if "drelu" in text:
        _, aux = _executed(Matmul(w.T, x.T), MatmulEpilog.RELU_AUX_BIAS, {"bias": bias[:, None]})
        epilog, given = MatmulEpilog.DRELU_BGRAD, {"relu_aux": aux["relu_aux"]}
    else:
        epilog, given = MatmulEpilog.RELU_AUX_BIAS if "bitmask" in text else MatmulEpilog.RELU_BIAS, {"bias": bias[:, None]}
    planned = Matmul(w.T, x.T)
    _executed(planned, epilog, given)
    execute: Callable[[], object] = planned.execute
    return execute


def _executed(planned: Any, epilog: Any, given: Mapping[str, torch.Tensor]) -> Any:
    planned.plan(epilog=epilog, epilog_inputs=given)
    return planned.execute()


class Block(nn.Module):
    """The half of a BERT layer that is linear layers and what follows them."""

    def __init__(self, n: int, k: int):
        super().__init__()
        self.up, self.act, self.down, self.norm = nn.Linear(k, n), nn.GELU(), nn.Linear(n, k), nn.LayerNorm(k)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.down(self.act(self.up(x))) + x)
        return y


def layers(device: str = "cuda") -> dict[str, dict[str, Callable[[], object]]]:
    """Layers that train, forward and backward apart, by epigen and by eager torch."""
    x = torch.randn(M, K, device=device).half().requires_grad_()
    plain = Block(N, K).to(device).half()
    fused, layer = copy.deepcopy(plain), plain.up
    epigen.fuse(fused)
    parameters = [*plain.parameters(), *fused.parameters()]

    def linear() -> Tensor:
        y: Tensor = epigen.linear(x, layer.weight, layer.bias, "gelu(mm + bias)")
        return y

    forwards: dict[str, dict[str, Callable[[], Tensor]]] = {
        LAYER: {"epigen": linear, "eager operations": lambda: F.gelu(F.linear(x, layer.weight, layer.bias))},
        "a block under epigen.fuse": {"epigen": lambda: fused(x), "eager operations": lambda: plain(x)},
    }

    def backward(y: Tensor) -> Callable[[], None]:
        gradient = torch.randn_like(y)

        def run() -> None:
            y.backward(gradient, retain_graph=True)
            for t in (x, *parameters):
                t.grad = None

        return run

    ways: dict[str, dict[str, Callable[[], object]]] = {}
    for name, each in forwards.items():
        for _ in range(3):  # what is written out at a second call is run at the third
            results = {contender: run() for contender, run in each.items()}
            backwards = {contender: backward(y) for contender, y in results.items()}
            for run in backwards.values():
                run()
        ways |= {f"{name}, forward": dict(each), f"{name}, backward": dict(backwards)}
    return ways


def layer_row(name: str, timed: dict[str, dict[str, float]]) -> dict[str, Any]:
    """name: of `layers`. A layer is held to a time, a block to eager's."""
    return {"program": name, "timing": timed, "claimed_us": CLAIMED_LAYER_US if name.startswith(LAYER) else timed["eager operations"]["median_us"]}


def layers_hold(rows: Sequence[Row]) -> bool:
    return all(row["timing"]["epigen"]["median_us"] <= row["claimed_us"] for row in rows if "claimed_us" in row)


def first_calls(processes: int, shape: Shape = (M, N, K), known: bool = True) -> dict[str, Any]:
    """Seconds in as many fresh processes, after one that fills Python's own cache of compiled modules. known: kernels are in that on disk too."""
    rows = []
    for _ in range(processes + 1):
        with tempfile.TemporaryDirectory() as folder:
            own = {} if known else {"TRITON_CACHE_DIR": folder, "EPIGEN_CACHE": folder}
            arguments = [sys.executable, "-c", FIRST, *map(str, shape)]
            run = subprocess.run(arguments, capture_output=True, text=True, check=True, env=command.environment() | own)
        rows.append(json.loads(run.stdout))
    return summary(rows[1:], CLAIMED_FIRST_S if known else CLAIMED_UNKNOWN_S)


def summary(rows: list[dict[str, float]], claimed_s: float) -> dict[str, Any]:
    """torch_s: until torch has multiplied; imported_s and first_s: from there until a kernel is compiled from its text, and has run."""
    found: dict[str, Any] = {name: round(statistics.median(r[name] for r in rows), 4) for name in rows[0]}
    worst = max(r["first_s"] for r in rows)
    return found | {"worst_s": round(worst, 4), "processes": len(rows), "claimed_s": claimed_s, "holds": found["first_s"] <= claimed_s}


def holds(rows: Sequence[Row]) -> bool:
    """Of every program that launches one kernel."""
    claimed = {"epigen, out=": CLAIMED_OUT_US, "epigen": CLAIMED_NEW_US}
    return all(row["timing"][name]["median_us"] <= limit for row in rows if row.get("kernels") == 1 for name, limit in claimed.items())


def of_the_driver() -> dict[str, float]:
    """Microseconds of the driver's own launch; nothing where that cannot be timed, as on another vendor's GPU."""
    try:
        found = driver.launch_us(ROUNDS, CALLS)
    except RuntimeError as error:
        print(f"the driver alone: left out: {error}", flush=True)
        return {}
    print(f"the driver alone, from C: {statistics.median(found):.2f} us a launch, {min(found):.2f} at least", flush=True)
    return {"driver_us": round(statistics.median(found), 3)}


def main(machine: Machine = THIS_MACHINE) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=7, help="for the first call; 0: leave it out")
    record.add_options(parser)
    options = parser.parse_args()
    record.gpu_at_hand(machine)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, text in PROGRAMS.items():
        ways, kernel = contenders(text, CONFIGS.get(name))
        found = timing.hosted(ways, ROUNDS, CALLS)
        rows.append({"program": name, "text": text, "config": str(kernel.config), "kernels": _launches(kernel), "timing": found})
        print(f"{name} {M}x{N}x{K} {kernel.config}: { {c: v['median_us'] for c, v in found.items()} }", flush=True)
    for name, trained in layers().items():
        found = timing.hosted(trained, ROUNDS, CALLS)
        rows.append(layer_row(name, found))
        print(f"{name}: { {c: v['median_us'] for c, v in found.items()} }", flush=True)
    about = {
        "shape": [M, N, K], "dtype": "fp16", "calls": ROUNDS * CALLS, **of_the_driver(), "claimed_out_us": CLAIMED_OUT_US, "claimed_new_us": CLAIMED_NEW_US,
        "holds": holds(rows), "claimed_layer_us": CLAIMED_LAYER_US, "layers_hold": layers_hold(rows),
    }  # fmt: skip
    print(f"claimed <= {CLAIMED_OUT_US} us with out=, <= {CLAIMED_NEW_US} us without: {about['holds']}", flush=True)
    print(f"claimed <= {CLAIMED_LAYER_US} us of {LAYER} each way, and no more than eager's of a block: {about['layers_hold']}", flush=True)
    environment = record.environment(options.commit)
    record.write("host", Report("bench.host", environment, rows, about), options.out)
    if options.processes:
        about["first"] = first_calls(options.processes)
        about["unknown"] = {extents(shape): first_calls(options.processes, shape, known=False) for shape in UNKNOWN}
        for name, first in {"of a known program": about["first"], **about["unknown"]}.items():
            print(
                f"first call, {name}: {first['first_s']:.3f} s after torch's start of {first['torch_s']:.2f} s, at worst {first['worst_s']:.3f} s, "
                f"{first['imported_s']:.3f} s of it until compiled from text; claimed <= {first['claimed_s']} s: {first['holds']}"
            )
    print(record.write("host", Report("bench.host", environment, rows, about), options.out))


if __name__ == "__main__":
    main()
