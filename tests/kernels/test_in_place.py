"""An output that takes the place of an input: every schedule reads an element before it writes it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import LIBRARY, SMALL, persistent, split_k, tiled, warp_specialized
from compiling import assembly, compiled, job
from torch import Tensor

import epigen
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import BF16, FP16, FP32

ACCUMULATE = "cast(mm + grad[m,n], fp32)"
M, N, K = 40, 72, 56

CONFIGS = {
    "tiled": SMALL,
    "tiled, prefetch": tiled(32, 32, 32, prefetch=1),
    "split_k": split_k(),
    "split_k, prefetch": split_k(prefetch=1),
    "persistent": persistent(tma_store=0),
    "persistent, TMA stores": persistent(tma_store=1),
    "persistent, in subtiles": persistent(block_n=128, subtiles=2, flatten=0),
    "persistent, in halves, prefetch": persistent(block_n=128, subtiles=2, flatten=0, prefetch=1),
    "library": LIBRARY,
}


def whole(*size: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Small integers: their products' sums are exact."""
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def kernels() -> list[Any]:
    return [pytest.param(None, "reference", id="reference"), *(pytest.param(c, "interpreter", id=name) for name, c in CONFIGS.items())]


@pytest.mark.triton
@pytest.mark.parametrize(("config", "backend"), kernels())
@pytest.mark.parametrize(
    ("shape", "view"),
    [((M, N, K), "plain"), ((M, N, K), "transposed"), ((41, 73, 57), "sliced")],
    ids=["aligned", "transposed", "sliced, after copies with aligned rows"],
)
def test_a_weight_gradient_accumulates(config: KernelConfig | None, backend: str, shape: tuple[int, int, int], view: str) -> None:
    """db = a^T @ dmm, twice into one buffer; what lies beside the buffer is left alone."""
    m, n, k = shape
    kernel = epigen.compile(ACCUMULATE, config=config, backend=backend)
    around = torch.full((2 * m, 2 * n), 7.0) if view == "sliced" else torch.zeros((n, m) if view == "transposed" else (m, n))
    grad = around[::2, ::2] if view == "sliced" else around.T if view == "transposed" else around
    grad.copy_(whole(m, n, seed=9))
    expected = grad.clone()
    for step in range(2):
        x, dmm = whole(k, m, seed=step), whole(k, n, seed=step + 5)
        expected += x.float().T @ dmm.float()
        assert kernel(x.T, dmm, grad=grad, out=grad) is grad
    assert torch.equal(grad, expected)
    if view == "sliced":
        assert (around[1::2] == 7).all() and (around[:, 1::2] == 7).all()


@pytest.mark.triton
@pytest.mark.parametrize(("config", "backend"), kernels())
def test_what_else_is_computed_sees_the_value_from_before(config: KernelConfig | None, backend: str) -> None:
    """A second output, a mask and reductions of what was read in place, and reductions that accumulate themselves."""
    text = "z = mm + grad[m,n]; cast(z, fp32), cast(z * 2, fp16), bitmask(z > 0), cast(bgrad(z) + db[n], fp32), sum(z, n) + rows[m], sum(z) + whole"
    kernel = epigen.compile(text, config=config, backend=backend)
    a, b = whole(M, K), whole(K, N, seed=1)
    grad, db, rows, total = (whole(*size, seed=3, dtype=torch.float32) for size in ((M, N), (N,), (M,), ()))
    inputs = {"grad": grad, "db": db, "rows": rows, "whole": total}
    expected = kernel(a, b, **{name: t.clone() for name, t in inputs.items()})
    found = kernel(a, b, **inputs, out={"out0": grad, "out3": db, "out4": rows, "out5": total})
    assert found.out0 is grad and found.out3 is db and found.out4 is rows and found.out5 is total
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_over_a_product_that_is_given(backend: str) -> None:
    kernel = epigen.compile("z = mm * 2 + grad[m,n]; cast(z, fp32), bgrad(z)", backend=backend)
    mm, grad = whole(M, N), whole(M, N, seed=1, dtype=torch.float32)
    expected = kernel.over(mm, grad=grad.clone())
    found = kernel.over(mm, grad=grad, out={"out0": grad})
    assert found[0] is grad and torch.equal(grad, expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_in_place_and_not_in_turn(backend: str) -> None:
    kernel = epigen.compile(ACCUMULATE, config=SMALL, backend=backend)
    a, b, grad, other = whole(M, K), whole(K, N), torch.zeros(M, N), torch.zeros(M, N)
    product = a.float() @ b.float()
    for step in range(1, 4):
        kernel(a, b, grad=grad, out=grad)
        assert torch.equal(grad, step * product)
        assert torch.equal(kernel(a, b, grad=grad), (step + 1) * product)
        kernel(a, b, grad=grad, out=other)
        assert torch.equal(grad, step * product) and torch.equal(other, (step + 1) * product)


@pytest.mark.triton
def test_no_schedule_reads_past_the_caches_that_are_kept_up_to_date() -> None:
    """A read through the read-only path, or one moved into a loop over k, might see what another tile has not written yet."""
    large = tiled(128, 128, 64, 8, 3), split_k(64, 64, 64, 4), persistent(128, 128, 64, 8), persistent(128, 256, 64, 8, subtiles=2, tma_store=0), LIBRARY
    configs = (*large, warp_specialized(128, 128, 64, 3, pingpong=1), warp_specialized(128, 256, 64, 3, subtiles=2, prefetch=1))
    jobs = [job(ACCUMULATE, "sm_90", (FP16, BF16)[i % 2], config, "tn") for i, config in enumerate(configs)]
    jobs.append(job(ACCUMULATE, "sm_90", FP32, tiled(64, 64, 32), "tn", precision="tf32"))
    for one, results, config in zip(jobs, compiled(jobs), (*configs, None), strict=True):
        text = assembly(results)
        assert ".nc" not in text, one.rendered.text
        if config is not None and dict(config.values).get("prefetch"):  # which reads a tile before it is multiplied, into registers
            continue
        reads = [at.start() for at in re.finditer(r"\bld\.global", text)]
        writes = [at.start() for at in re.finditer(r"\bst\.global|cp\.async\.bulk\.tensor\.2d\.global\.shared", text)]
        assert reads and writes and (max(reads) < max(writes)), one.rendered.text
