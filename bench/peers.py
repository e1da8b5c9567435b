"""Who is timed at a problem: the vendor's product alone, eager torch, torch's own fused call, torch.compile, cuBLASLt and epigen.

Each contender is made for one problem, and called without arguments. One that does not apply, is not installed or fails while it is made
says why (`Missing`): the others go on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import epigen
from bench.checked import Demand
from bench.programs import Program, with_tanh
from epigen.dtypes import BY_NAME
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.runtime import verify
from epigen.runtime.verify import Sample

MM, EAGER, ADDMM, COMPILED, CUBLASLT, OURS, OURS_TANH = (
    "mm", "eager", "_addmm_activation", "torch.compile", "cuBLASLt", "epigen", "epigen, tanh",
)  # fmt: skip
"""The names that results carry."""

COMPILE_MODE = "max-autotune-no-cudagraphs"
"""max-autotune also records CUDA graphs, which read their inputs from buffers of their own: every call would copy the operands there first,
a cost of the launch that no other contender has. What is compiled and tuned is the same; where launches are to cost nothing, all
contenders are recorded into a CUDA graph alike."""

AUTOTUNED = 5
"""Iterations for each of cuBLASLt's algorithms: after each, nvmath sends as much as the L2 holds from the host, so many of them take seconds."""


ADDMM_KNOWS = ("relu + bias", "gelu + bias")


class Missing(Exception):
    """Why there is no such contender."""


def reason(error: BaseException) -> str:
    """What failed, as one line of a record."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"


@dataclass(frozen=True, slots=True)
class Problem:
    """extra: the program's further input. eager: the same as eager torch takes it, a mask as booleans."""

    program: Program
    sample: Sample
    extra: Tensor
    eager: Tensor


def problem(program: Program, shape: tuple[int, int, int], dtype: str, layout: str, device: str = "cuda", seed: int = 0) -> Problem:
    """Random data, of which mm has a standard deviation near 1, laid out as epigen's tuner does."""
    graph = epigen.compile(program.text).graph
    sample = verify.sample(graph, shape, BY_NAME[dtype], BY_NAME[dtype], BY_NAME[dtype], seed=seed, device=device, layout=layout)
    extra = sample.inputs[program.input]
    return Problem(program, sample, extra, reference.unpack(extra, shape[1]) if program.input == "mask" else extra)


@dataclass(frozen=True, slots=True)
class Contender:
    """run: one call. outputs: its result as the program's outputs. demands: what the answer is held to, the strictest first. note: for the record.

    close: gives back what it holds.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], tuple[Tensor, ...]]
    demands: tuple[Demand, ...]
    note: str = ""
    close: Callable[[], object] = lambda: None


Maker = Callable[[Problem], Contender]


def _plain(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _exact(text: str) -> Demand:
    return Demand("within epigen's bound", text)


def _demands(text: str, rounded: str) -> tuple[Demand, ...]:
    """What others than epigen are held to: they may round the product first, as eager torch must; and cuBLAS may add partial sums of the
    operands' dtype (torch allows it by default), or take tanh from an instruction of 11 bits."""
    return (
        _exact(text),
        Demand("within the bound of a product that is rounded first", rounded),
        Demand("within 2^-8 of the values' size: partial sums or functions of low precision", rounded, rough=True),
    )


def _program_demands(program: Program, tanh: bool = False) -> tuple[Demand, ...]:
    return _demands(with_tanh(program.text), with_tanh(program.rounded)) if tanh else _demands(program.text, program.rounded)


def mm(p: Problem) -> Contender:
    a, b = p.sample.a, p.sample.b
    return Contender(lambda: torch.mm(a, b), _plain, _demands("mm", "cast(mm, T)"))


def eager(p: Problem) -> Contender:
    run, a, b, x = p.program.eager, p.sample.a, p.sample.b, p.eager
    return Contender(lambda: run(a, b, x), _plain, _program_demands(p.program))


def addmm_activation(p: Problem) -> Contender:
    if p.program.name not in ADDMM_KNOWS:
        raise Missing("torch has it for relu and gelu after a bias alone")
    a, b, bias, gelu = p.sample.a, p.sample.b, p.extra, p.program.approximated
    note = "gelu by its tanh approximation" if gelu else ""
    return Contender(lambda: torch._addmm_activation(bias, a, b, use_gelu=gelu), _plain, _program_demands(p.program, gelu), note)


def compiled(p: Problem) -> Contender:
    """Static shapes; everything compiled before is forgotten, so that nothing has become dynamic by other shapes."""
    torch._dynamo.reset()
    run, a, b, x = torch.compile(p.program.eager, mode=COMPILE_MODE, dynamic=False, fullgraph=True), p.sample.a, p.sample.b, p.eager
    run(a, b, x)  # compiles; what goes wrong belongs to the making
    return Contender(lambda: run(a, b, x), _plain, _program_demands(p.program), COMPILE_MODE)


def cublaslt(p: Problem) -> Contender:
    """nvmath-python's stateful call, planned and autotuned. It computes the transposes: y^T = relu(W x^T + b)."""
    try:
        from nvmath.linalg.advanced import Matmul, MatmulEpilog
    except ImportError as error:
        raise Missing(f"nvmath-python cannot be imported: {error}") from None
    a, b, n = p.sample.a, p.sample.b, p.sample.b.shape[1]
    name, taken = _GIVEN[p.program.input]
    inputs = {name: taken(p.extra, n)}
    call = Matmul(b.T, a.T)
    try:
        call.plan(epilog=getattr(MatmulEpilog, p.program.epilog), epilog_inputs=inputs)
        call.autotune(iterations=AUTOTUNED)
        call.execute()
    except BaseException:
        call.free()
        raise

    def outputs(result: Any) -> tuple[Tensor, ...]:
        y, aux = result if isinstance(result, tuple) else (result, {})
        return (y.T, *(_aux(name, x, n) for name, x in aux.items()))

    tanh = p.program.approximated
    note = f"{p.program.epilog}, autotuned" + (", gelu by its tanh approximation" if tanh else "")
    return Contender(call.execute, outputs, _program_demands(p.program, tanh), note, call.free)


def _aux(name: str, x: Tensor, n: int) -> Tensor:
    """A further output of cuBLASLt's as epigen has it."""
    if name == "relu_aux":  # [padded N / 8, M]
        return x.T[:, : -(-n // 8)]
    if name == "gelu_aux":  # [padded N, M]
        return x.T[:, :n]
    return x.reshape(-1)[:n]


def given_bias(bias: Tensor, n: int) -> Tensor:  # noqa: ARG001  # it needs no padding
    return bias[:, None]


def given_mask(mask: Tensor, n: int) -> Tensor:
    """The mask as cuBLASLt takes it: [padded N / 8, M] with strides (1, padded N / 8), N padded to a multiple of 128."""
    padded = torch.zeros((mask.shape[0], g.mask_stride(n)), dtype=torch.uint8, device=mask.device)
    padded[:, : mask.shape[1]] = mask
    return padded.T


def given_tile(z: Tensor, n: int) -> Tensor:
    """A tile as cuBLASLt takes it: [padded N, M], by columns, N padded to a multiple of 8."""
    if n % 8 == 0 and z.is_contiguous():
        return z.T
    padded = torch.zeros((z.shape[0], -(-n // 8) * 8), dtype=z.dtype, device=z.device)
    padded[:, :n] = z
    return padded.T


_GIVEN = {"bias": ("bias", given_bias), "mask": ("relu_aux", given_mask), "z": ("gelu_aux", given_tile)}
"""What cuBLASLt calls an input, and how it takes it."""


def ours(p: Problem) -> Contender:
    return epigen_contender(p, p.program.text)


def ours_tanh(p: Problem) -> Contender:
    """What cuBLASLt's gelu is, so that the same function is compared."""
    if not p.program.approximated:
        raise Missing("there is no gelu in it")
    return epigen_contender(p, p.program.tanh)


def epigen_contender(p: Problem, text: str, config: Mapping[str, Any] | None = None) -> Contender:
    """config: by default the one that epigen chooses."""
    fused, a, b, inputs = epigen.compile(text, config=config), p.sample.a, p.sample.b, dict(p.sample.inputs)
    fused(a, b, **inputs)
    found = fused.explain() if a.is_cuda else ""
    return Contender(lambda: fused(a, b, **inputs), _plain, (_exact(text),), "; ".join(found.splitlines()[1:]))


MAKERS: dict[str, Maker] = {
    MM: mm, EAGER: eager, ADDMM: addmm_activation, COMPILED: compiled, CUBLASLT: cublaslt, OURS: ours, OURS_TANH: ours_tanh,
}  # fmt: skip
