"""rounding="eager": a kernel's results are eager torch's, of the same product."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import compiling
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cases import tiled, warp_specialized
from checkout import ROOT
from golden import Golden
from torch import Tensor, nn

import epigen
from epigen import ops
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import FP16, FP32
from epigen.errors import CallError
from epigen.gpus import TARGETS
from epigen.runtime import verify
from epigen.runtime.ahead import Job
from epigen.runtime.loader import triton_version

M, N = 48, 80
PROGRAM = "y = silu(mm) * gate[m,n]; y + residual"


def eager(mm: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
    return F.silu(mm) * gate + residual


def given(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """a, an identity, so that the product is a; and the inputs."""
    torch.manual_seed(0)
    a, gate, residual = ((torch.randn(M, N) * 2).to(device=device, dtype=dtype) for _ in range(3))
    return a, torch.eye(N, dtype=dtype, device=device), {"gate": gate, "residual": residual}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_kernels_bits_on_the_cpu(dtype: torch.dtype) -> None:
    a, b, inputs = given(dtype)
    want, kernel = eager(a, **inputs), epigen.compile(PROGRAM, rounding="eager")
    assert torch.equal(kernel(a, b, **inputs), want)
    assert torch.equal(kernel.over(a, **inputs), want)
    assert dtype == torch.float32 or not torch.equal(epigen.compile(PROGRAM)(a, b, **inputs), want)


def test_a_batch() -> None:
    a, b, inputs = given(torch.bfloat16)
    several = {name: torch.stack([t, -t]) for name, t in inputs.items()}
    found = epigen.compile(PROGRAM, rounding="eager")(torch.stack([a, 2 * a]), b, **several)
    assert torch.equal(found, eager(torch.stack([a, 2 * a]), **several))


def test_a_function_keeps_its_casts() -> None:
    """Without them `mm.float() + bias` would be rounded before the bias is added, or not before GELU."""

    def function(mm: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + F.gelu((mm.float() + bias).to(mm.dtype), approximate="tanh")

    a, b, inputs = given(torch.bfloat16)
    given_to = {"bias": torch.randn(N), "residual": inputs["residual"]}
    kernel = epigen.compile(function, rounding="eager")
    assert torch.equal(kernel(a, b, **given_to), function(a, **given_to))
    assert kernel.program == "residual + gelu_tanh(cast(cast(mm, fp32) + bias, bf16))"
    assert torch.equal(epigen.compile(kernel.program, rounding="eager")(a, b, **given_to), function(a, **given_to))


@pytest.mark.triton
@pytest.mark.parametrize(
    "function", [lambda mm, gate, residual: torch.relu(mm * gate) + residual, lambda mm, gate, residual: (mm - residual) / 3 * gate, eager]
)
def test_the_kernel_under_the_interpreter(function: Callable[..., Tensor]) -> None:
    """In fp16: what is exact has eager's bits; of exponentials the last bit of fp32 differs, which the rounding that follows hides but for one in thousands."""
    a, b, inputs = given(torch.float16)
    kernel = epigen.compile(function, rounding="eager", backend="interpreter", config=tiled(32, 32, 32))
    found, want = kernel(a, b, **inputs), function(a, **inputs)
    assert (found != want).float().mean() <= (0.002 if function is eager else 0)
    torch.testing.assert_close(found, want, rtol=2 * torch.finfo(torch.float16).eps, atol=1e-3)


@pytest.mark.triton
def test_no_product_and_sum_are_made_one() -> None:
    """In fp32 nothing is rounded between them but by each."""
    plan = epigen.compile("mm * gate[m,n] + residual", rounding="eager").plan((64, 64, 64), FP32, TARGETS["sm_90"])
    assert not any(function.contracted for function in plan.rendered.functions)


@pytest.mark.triton
@pytest.mark.parametrize("text", [PROGRAM, "gelu(mm + bias), sum(mm * mm, n)", "exp(mm * 0.1) / (1 + sigmoid(row[m]))"])
def test_the_bound_has_the_error_of_each_rounding(text: str) -> None:
    kernel = epigen.compile(text, rounding="eager", backend="interpreter", config=tiled(32, 32, 32))
    sample = verify.sample(kernel.graph, (67, 61, 45), FP16, FP16, FP16)
    verify.demand(verify.differences(kernel, sample))


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")  # torch's own
def test_it_is_the_same_wherever_the_kernel_goes() -> None:
    a, b, inputs = given(torch.bfloat16)
    kernel, want = epigen.compile(PROGRAM, rounding="eager"), eager(a, **inputs)
    for again in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert torch.equal(again(a, b, **inputs), want)

    class Layer(nn.Module):
        def forward(self, a: Tensor, b: Tensor, gate: Tensor, residual: Tensor) -> Any:
            return kernel(a, b, gate=gate, residual=residual)

    exported = torch.export.export(Layer(), (a, b, *inputs.values()))
    assert torch.equal(exported.module()(a, b, *inputs.values()), want)
    assert torch.equal(exported.run_decompositions(epigen.decompositions()).module()(a, b, *inputs.values()), want)


def test_mistakes(golden: Golden) -> None:
    with golden.raises(CallError, "unknown"):
        epigen.compile(PROGRAM, rounding="eagre")
    with golden.raises(CallError, "fp8"):
        epigen.compile("mm + x[m,n]", rounding="eager")(torch.ones(2, 2), torch.ones(2, 2), x=torch.ones(2, 2).to(torch.float8_e4m3fn))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda mm, gate, residual: torch.relu(mm * gate) + residual,
    "where": lambda mm, gate, residual: torch.where(mm > gate, mm * 0.3, residual - mm) * gate,
    "clamp": lambda mm, gate, residual: torch.clamp(mm * gate, -1, 1) * residual + gate,
    "swiglu": eager,
    "gelu_tanh": lambda mm, gate, residual: F.gelu(mm + gate, approximate="tanh") + residual,
    "gated": lambda mm, gate, residual: torch.sigmoid(gate) * torch.tanh(mm) / (residual.abs() + 1),
    "exponentials": lambda mm, gate, residual: torch.exp(mm) + torch.expm1(gate) * torch.exp2(residual),
    "logarithms": lambda mm, gate, residual: torch.log(mm.abs()) + torch.log1p(gate.abs()) * residual,
    "roots": lambda mm, gate, residual: torch.sqrt(mm.abs()) + torch.rsqrt(gate.abs()) * torch.reciprocal(residual),
    "softplus": lambda mm, gate, residual: F.softplus(mm * 8) + F.logsigmoid(gate) * residual,
    "mish": lambda mm, gate, residual: F.mish(mm) + gate / residual,
    "waves": lambda mm, gate, residual: torch.sin(mm) + torch.cos(gate) * residual,
}


def on_gpu(function: Callable[..., Tensor], dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    """What a kernel gives, and what eager torch does."""
    a, b, inputs = given(dtype, "cuda")
    return epigen.compile(function, rounding="eager", precision="ieee", **options)(a, b, **inputs), function(a, **inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_bits_on_a_gpu(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    a, b, inputs = given(dtype, "cuda")
    kernel, want = epigen.compile(function, rounding="eager", precision="ieee"), function(a, **inputs)
    torch.testing.assert_close(kernel(a, b, **inputs), want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(kernel.over(a, **inputs), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [tiled(64, 64, 32), warp_specialized()], ids=lambda config: config.schedule)
def test_the_bits_by_each_dialect(config: KernelConfig) -> None:
    if config.schedule == "warp_specialized" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's")
    found, want = on_gpu(FUNCTIONS["swiglu"], torch.bfloat16, config=config)
    assert torch.equal(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_exact_gelu_on_a_gpu(dtype: torch.dtype) -> None:
    """The error function is that of the CUDA that Triton has libdevice from: 3.6's has other bits than torch's of CUDA 13, of which little is left of a gelu below 0."""
    found, want = on_gpu(lambda mm, gate, residual: F.gelu(mm + gate) * residual, dtype)
    assert (found != want).float().mean() <= (0.03 if triton_version().startswith("3.6.") else 0.005)
    torch.testing.assert_close(found, want, rtol=3 * torch.finfo(dtype).eps, atol=1e-3)


def test_the_functions_that_may_differ_are_named() -> None:
    section = (ROOT / "docs" / "language.md").read_text().partition("## Rounding as eager torch does")[2].partition("\n## ")[0]
    approximate = re.compile(r"tl\.(exp|log|erf|sqrt|rsqrt)| / ")
    rows = [op for op in ops.TABLE.values() if op.group == "activation" and not op.exact and approximate.search("\n".join((op.triton, *op.body)))]
    assert {"gelu", "elu"} <= {op.name for op in rows}
    assert [op.name for op in rows if f"`{op.name}`" not in section] == []


@pytest.mark.triton
def test_a_gpus_kernels_have_torchs_functions() -> None:
    """They compile; the interpreter's, which has no libdevice, have Triton's."""
    text = "y = silu(mm) / gate[m,n]; y, sum(y + expm1(bias), n)"
    kernel = epigen.compile(text, rounding="eager")
    jobs = []
    for name in ("sm_80", "sm_90", "gfx942", "gfx1201"):
        plan = kernel.plan((4096, 4096, 4096), FP16, TARGETS[name])
        assert "libdevice.exp(" in plan.source and "div_rn(" in plan.source
        jobs.append(Job(plan.rendered, TARGETS[name], "nn", plan.by_vendor))
    assert "ex2.approx" in compiling.assembly(compiling.compiled(jobs)[1])
    interpreted = epigen.compile(text, rounding="eager", backend="interpreter", config=tiled(32, 32, 32))
    a, b, inputs = given(torch.float16)
    interpreted(a, b, gate=inputs["gate"], bias=inputs["residual"][0])
    assert "libdevice" not in interpreted.source()
