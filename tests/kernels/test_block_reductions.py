"""Reductions of blocks of columns, and the quantised outputs that are made of them."""

from __future__ import annotations

import pytest
import torch

import epigen
from epigen.codegen import schedules
from epigen.errors import ConfigError, DerivationError

FP8, LARGEST = torch.float8_e4m3fn, 448


def quantised(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As eager torch has it. x: [M, N], of whole blocks."""
    apart = x.float().unflatten(1, (-1, block))
    scale = apart.abs().amax(2, keepdim=True).clamp(min=1e-12) / LARGEST
    return (apart * (1 / scale)).flatten(1).to(FP8), scale.squeeze(2)


def test_values_and_scales_are_torchs() -> None:
    a, b = torch.randn(40, 64), torch.randn(64, 256)
    b[:, 128:] = 0
    q, s = epigen.compile("q, s = quantize(relu(mm), fp8e4m3, n/128); q, s")(a, b)
    wanted, scales = quantised((a @ b).relu(), 128)
    assert (q.dtype, s.dtype, s.shape) == (FP8, torch.float32, (40, 2))
    torch.testing.assert_close(s, scales)
    assert (q[:, 128:].float() == 0).all()
    assert s[:, 1].max() < 1e-14
    assert ((q.float() - wanted.float()).abs() <= 2.0**-3 * wanted.float().abs()).all()  # next to a step it may be rounded otherwise


def test_what_one_product_quantises_the_next_one_takes() -> None:
    x, w, v = torch.randn(24, 64), torch.randn(64, 256) / 8, torch.randn(256, 48) / 16
    q, s = epigen.compile("q, s = quantize(gelu(mm), fp8e4m3, n/128); q, s")(x, w)
    qv, sv = quantised(v.T.contiguous(), 128)
    found = epigen.compile("dot(a * sa[m,k/128], b * sb[k/128,n])")(q, qv.T, sa=s, sb=sv.T)
    exact = torch.nn.functional.gelu(x @ w) @ v
    assert (found.float() - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_the_last_block_may_be_shorter(n: int) -> None:
    a, b = torch.randn(9, 16), torch.randn(16, n) + 3
    found = epigen.compile("amax(mm, n/64), max(-mm, n/64), mm / sum(mm, n/64)")(a, b)
    blocks = (a @ b).split(64, 1)
    torch.testing.assert_close(found[0], torch.stack([x.abs().amax(1) for x in blocks], 1))
    torch.testing.assert_close(found[1], torch.stack([(-x).amax(1) for x in blocks], 1))
    torch.testing.assert_close(found[2], torch.cat([x / x.sum(1, keepdim=True) for x in blocks], 1), rtol=1e-3, atol=1e-3)


def test_what_is_computed_of_blocks_and_rows_has_one_value_a_block() -> None:
    a, b, row = torch.randn(8, 16), torch.randn(16, 96), torch.randn(8)
    found = epigen.compile("x = sum(mm, n/32) * row[m] + 1; x, max(mm, n/16) + sum(mm, n/32), mm + x")(a, b, row=row)
    assert [t.shape for t in found] == [(8, 3), (8, 6), (8, 96)]
    sums = (a @ b).unflatten(1, (3, 32)).sum(2) * row[:, None] + 1
    torch.testing.assert_close(found[0], sums)
    torch.testing.assert_close(found[2], a @ b + sums.repeat_interleave(32, 1))


def test_results_go_into_given_tensors() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 128)
    q, s = torch.empty(8, 128, dtype=torch.int8), torch.empty(4, 8).T
    epigen.compile("q, s = quantize(mm, int8, n/32); q, s")(a, b, out=(q, s))
    torch.testing.assert_close(s, (a @ b).unflatten(1, (4, 32)).abs().amax(2) / 127)


def test_of_parts() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 128)
    q, s = epigen.compile("g, u = halves(mm); q, s = quantize(silu(g) * u, fp8e4m3, n/32); q, s")(a, b)
    g, u = (a @ b).chunk(2, 1)
    torch.testing.assert_close(s, quantised(torch.nn.functional.silu(g) * u, 32)[1])
    assert q.shape == (8, 64)


def test_gradients_flow_through_sums_of_blocks() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, w: epigen.linear(x, w, epilogue="mm * rsqrt(sum(mm * mm, n/16) / 16 + 0.1)"), (x, w))
    torch.autograd.gradcheck(lambda x, w: epigen.linear(x, w, epilogue="mm - logsumexp(mm, n/8)"), (x, w))


@pytest.mark.parametrize("text", ["q, s = quantize(mm, fp8e4m3, n/64); q, s", "mm, sum(mm, n/64)", "mm / amax(mm, n/64)"])
def test_what_has_no_derivative_says_so(text: str) -> None:
    with pytest.raises(DerivationError, match="derivative"):
        epigen.derive(text)


def test_a_value_of_blocks_may_stay_out_of_the_derivation() -> None:
    derived = epigen.derive("mm, sum(mm, n/64)", of=("out0",))
    assert [gradient.of for gradient in derived.gradients] == ["mm"]


def test_a_tile_that_holds_no_whole_block_is_refused() -> None:
    config = schedules.config("tiled", block_m=32, block_n=32, block_k=32, group_m=1, num_warps=4, num_stages=2)
    kernel = epigen.compile("mm / sum(mm, n/64)", backend="interpreter", config=config)
    with pytest.raises(ConfigError, match=r"reduces each 64 columns.*a block_n of 64 is the least"):
        kernel(torch.randn(32, 32).half(), torch.randn(32, 64).half())
