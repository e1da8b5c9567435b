"""What only a GPU can show: streams, graphs, devices, syncs, offsets past 2^31, reproducible reductions, exchange with cuBLASLt."""

from __future__ import annotations

import warnings

import pytest
import torch

import epigen
from epigen import api
from epigen.choose import rule
from epigen.codegen import schedules
from epigen.codegen.spec import Choice
from epigen.dtypes import FP16
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.runtime import verify
from epigen.runtime.kernel import Kernel
from epigen.runtime.rendering import renderer
from epigen.tuning import first_use

pytestmark = pytest.mark.gpu


def half(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda").half()


def test_returns_on_the_current_stream_without_a_sync() -> None:
    kernel = epigen.compile("z = mm * alpha + bias; relu(z), bgrad(z), amax(z)")
    x, w, bias, alpha = half(256, 128), half(128, 192), half(192), torch.tensor(0.5, device="cuda")
    kernel(x, w, bias=bias, alpha=alpha)  # the first call loads modules, which may wait
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode announces itself as a prototype
            torch.cuda.set_sync_debug_mode("error")
        results = kernel(x, w, bias=bias, alpha=alpha)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(results[0]).all()


def test_runs_on_the_current_stream() -> None:
    kernel = epigen.compile("relu(mm + bias)")
    x, w, bias = half(512, 512), half(512, 512), half(512)
    expected = kernel(x, w, bias=bias)
    stream = torch.cuda.Stream()
    busy = torch.empty(1 << 28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy.normal_()  # keeps the stream occupied: a kernel on another stream would read x too early
        late = x.mul(1)
        found = kernel(late, w, bias=bias)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert torch.equal(found, expected)


def test_cuda_graph() -> None:
    kernel = epigen.compile("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)")
    x, w, bias = half(96, 64), half(64, 80), half(80)
    kernel(x, w, bias=bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(x, w, bias=bias)
    x.copy_(half(96, 64))
    graph.replay()
    for found, expected in zip(captured, kernel(x, w, bias=bias), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("config", [None, {"schedule": "library", "block_m": 16, "block_n": 128, "num_warps": 4}], ids=["tiled", "library"])
def test_reductions_are_reproducible_bit_for_bit(config: dict[str, object] | None) -> None:
    kernel = epigen.compile("mm, bgrad(mm), sum(mm, n), sum(mm), logsumexp(mm, n), sum(a, k), sum(b, k)", config=config)
    x, w = half(1000, 700), half(700, 900)
    first = kernel(x, w)
    for _ in range(10):
        for found, expected in zip(kernel(x, w), first, strict=True):
            assert torch.equal(found, expected)


def test_offsets_past_32_bits() -> None:
    """An output, an operand and a mask of more than 2^31 elements."""
    m, n, k = 70_000, 40_000, 16
    kernel = epigen.compile("z = mm + residual; relu(z), bitmask(z > 0), bgrad(z)")
    x, w = half(m, k), half(k, n)
    residual = half(1, n).expand(m, n)
    y, mask, db = kernel(x, w, residual=residual)
    rows = torch.tensor([0, 1, m // 2, m - 2, m - 1], device="cuda")
    z = x[rows].double() @ w.double() + residual[rows].double()
    assert (y[rows].double() - z.clamp(min=0)).abs().max() < 0.02
    sure = z.abs() > 0.01
    assert ((reference.unpack(mask[rows], n) == (z > 0)) | ~sure).all()
    total = x.double().sum(0) @ w.double() + m * residual[0].double()
    assert ((db - total).abs() / (1 + total.abs()) < 1e-2).all()
    assert kernel._last is not None and kernel._last.plan is not None and kernel._last.plan.spec.signature.index_bits == 64
    wide = torch.empty(m, 40_000, device="cuda", dtype=torch.float16)[:, :k].copy_(x)  # row stride 40,000: offsets past 2^31
    assert torch.equal(epigen.compile("mm")(wide, w[:, :64]), epigen.compile("mm")(x, w[:, :64]))


@pytest.mark.parametrize("shape", [(128, 256, 128), (1000, 520, 264), (4096, 4096, 4096)], ids=str)
def test_nan_and_infinity(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w, bias = half(m, k), half(k, n), half(n)
    x[3], x[5, 0], bias[7] = float("nan"), float("inf"), float("-inf")
    found = epigen.compile("relu(mm + bias)")(x, w, bias=bias)
    assert found[3].isnan().all() and (found[:3, 7] == 0).all()
    assert torch.equal(found[5].isnan() | found[5].isinf() | (found[5] == 0), torch.ones_like(found[5], dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_logistic_function_is_1_where_it_rounds_to_1(dtype: torch.dtype) -> None:
    """Far from 0 its derivative by tanh multiplies 1 - s by a thousand: were s off by its last bit, that would be seen."""
    z = torch.linspace(-60, 60, 256 * 1024, device="cuda").reshape(256, 1024).to(dtype)
    found = epigen.compile("dgelu_tanh(mm, z[m,n])").over(torch.ones_like(z), z=z).double()
    expected = torch.ops.aten.gelu_backward(torch.ones_like(z).double(), z.double(), approximate="tanh")
    assert ((found - expected).abs() <= 2.5e-5 + expected.abs() * torch.finfo(dtype).eps / 2).all()


def test_out_in_place_on_the_residual() -> None:
    kernel = epigen.compile("mm + residual")
    x, w, residual = half(300, 200), half(200, 100), half(300, 100)
    expected = kernel(x, w, residual=residual)
    kernel(x, w, residual=residual, out=residual)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("n", [128, 1024, 4096])
@pytest.mark.parametrize("m", [64, 257, 1000])
def test_masks_are_exchanged_with_cublaslt(m: int, n: int) -> None:
    """A mask from RELU_AUX_BIAS is read by drelu, and one from bitmask by DRELU_BGRAD, bit for bit.

    cuBLASLt computes the transposes: y^T = relu(W x^T + b), so its [N / 8, M] mask with strides (1, N / 8) is epigen's [M, N / 8].
    """
    nvmath = pytest.importorskip("nvmath", reason="nvmath-python is not installed")
    epilog, matmul = nvmath.linalg.advanced.MatmulEpilog, nvmath.linalg.advanced.matmul
    k = 256
    # small integers: exact sums, so both sides see the same sign everywhere, and some exact zeros, whose bit cuBLASLt sets
    x, weight, bias = (torch.randint(-2, 3, s, device="cuda").half() for s in ((m, k), (n, k), (n,)))
    y_t, aux = matmul(weight, x.T, epilog=epilog.RELU_AUX_BIAS, epilog_inputs={"bias": bias[:, None]})
    theirs = aux["relu_aux"].T
    ours_y, ours = epigen.compile("z = mm + bias; relu(z), bitmask(z >= 0)")(x, weight.T, bias=bias)
    assert torch.equal(ours_y, y_t.T)
    assert theirs.shape[0] == m and torch.equal(theirs[:, : n // 8], ours)

    dy, other = (torch.randint(-2, 3, s, device="cuda").half() for s in ((m, k), (n, k)))
    drelu = epigen.compile("dz = drelu(mm, mask); dz, bgrad(dz)")
    from_theirs = drelu(dy, other.T, mask=theirs[:, : n // 8])
    dz_t, aux = matmul(other, dy.T, epilog=epilog.DRELU_BGRAD, epilog_inputs={"relu_aux": lent(ours, n)})
    assert torch.equal(from_theirs[0], dz_t.T)
    key = next(name for name in aux if "bgrad" in name)
    torch.testing.assert_close(from_theirs[1], aux[key].reshape(-1).float(), rtol=2e-3, atol=1.0)


def lent(mask: torch.Tensor, n: int) -> torch.Tensor:
    """The mask as cuBLASLt takes it: [padded N / 8, M] with strides (1, padded N / 8), N padded to a multiple of 128."""
    m, width = mask.shape[0], g.mask_stride(n)
    padded = torch.zeros((m, width), dtype=torch.uint8, device=mask.device)
    padded[:, : mask.shape[1]] = mask
    return padded.T


def test_a_large_problem_by_rule() -> None:
    """The default config at a size of real work, every output."""
    kernel = epigen.compile("z = gelu(mm + bias); z, bitmask(z > 0), bgrad(z)")
    given = verify.sample(kernel.graph, (4096, 4096, 2048), FP16, FP16, FP16, device="cuda")
    verify.demand(verify.differences(kernel, given))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    kernel = epigen.compile("relu(mm + bias)")
    x, w, bias = half(64, 64).to("cuda:1"), half(64, 64).to("cuda:1"), half(64).to("cuda:1")
    found = kernel(x, w, bias=bias)
    assert found.device == x.device and torch.cuda.current_device() == 0
    assert torch.equal(found.cpu(), kernel(x.to("cuda:0"), w.to("cuda:0"), bias=bias.to("cuda:0")).cpu())


def test_devices_must_agree() -> None:
    with pytest.raises(epigen.EpigenError, match=r"cuda:0 .*cpu"):
        epigen.compile("mm")(half(4, 4), torch.ones(4, 4).half())


def test_a_config_that_does_not_fit_gives_way_to_the_vendor() -> None:
    """Out of shared memory: the library schedule answers, and says why; a config that the caller insists on is refused in words."""
    large = schedules.config("tiled", block_m=256, block_n=256, block_k=128, group_m=8, num_warps=8, num_stages=6)
    kernel = Kernel(
        api.graph_of("relu(mm + bias)"),
        renderer(),
        lambda spec, shape, target, refused: rule.choose(spec, shape, target, refused) if refused else Choice(large, "too large"),
    )
    given = verify.sample(kernel.graph, (512, 512, 512), FP16, FP16, FP16, device="cuda")
    verify.demand(verify.differences(kernel, given))
    assert kernel.config.schedule == "library" and "does not fit" in kernel.explain()
    with pytest.raises(epigen.EpigenError, match="does not fit"):
        epigen.compile("relu(mm + bias)", config=large)(given.a, given.b, **given.inputs)


def test_what_is_missing_is_tuned_at_first_use_and_captured_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "TRIALS", 4)
    kernel = epigen.compile("relu(mm + bias) * 0.8125", tune="missing")
    x, w, bias = half(256, 128), half(192, 128), half(192)
    y = kernel(x, w.T, bias=bias)
    found = [r for _, r in api.database().records(seeds=False) if r.program == kernel.program]
    assert [r.shape for r in found] == [(256, 192, 128)] and sum(found[0].trials.values()) <= 4 and kernel.config == found[0].kernel_config
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(x, w.T, bias=bias)
    graph.replay()
    assert torch.equal(captured, y)
    assert len([r for _, r in api.database().records(seeds=False) if r.program == kernel.program]) == 1


def test_tune_from_python_is_found_by_the_next_call() -> None:
    (tuned,) = epigen.tune("relu(mm + bias) * 0.6875", (256, 192, 128), trials=4)
    assert tuned.error == "" and tuned.record is not None
    kernel = epigen.compile("relu(mm + bias) * 0.6875")
    kernel(half(256, 128), half(192, 128).T, bias=half(192))
    assert kernel.config == tuned.record.kernel_config and kernel.explain().endswith("(exact)")
