"""Sums of int8 products past 2^31: they wrap around, as int32 does, whoever multiplies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LIBRARY, tiled
from torch import Tensor

import epigen
from epigen import settings
from epigen.codegen.spec import EXACT_INT8, KernelConfig
from epigen.codegen.standalone import standalone
from epigen.dtypes import FP16, INT8
from epigen.errors import ConfigError
from epigen.gpus import TARGETS
from epigen.ir import reference
from epigen.runtime import vendor, verify

M, N, PAST = 3, 5, EXACT_INT8 + 42
LONG = tiled(16, 16, 256, 1, 1)


def operands(k: int) -> tuple[Tensor, Tensor]:
    """The largest sums that there are, in one row the smallest, and one of either sign."""
    a, b = torch.full((M, k), -128, dtype=torch.int8), torch.full((k, N), -128, dtype=torch.int8)
    a[1], a[2, ::2] = 127, 127
    return a, b


def wrapped(a: Tensor, b: Tensor) -> Tensor:
    """By Python's integers: the rows and columns of `operands` are each of one or two values."""
    rows = [sum(int(a[i, s]) * int(b[s, 0]) * len(range(s, a.shape[1], 2)) for s in (0, 1)) for i in range(M)]
    return torch.tensor([[(r + 2**31) % 2**32 - 2**31] * N for r in rows], dtype=torch.int32)


@pytest.mark.triton
@pytest.mark.parametrize(("backend", "config"), [("reference", None), ("interpreter", LONG), ("interpreter", LIBRARY)], ids=["reference", "tiled", "library"])
def test_every_backend_wraps_around(backend: str, config: Any) -> None:
    """The product itself, and what is computed of it, in fp32 of the wrapped sum; within the bound of the oracle, which wraps around, too."""
    a, b = operands(PAST)
    expected = wrapped(a, b)
    assert sorted(set(expected[:, 0].tolist())) != sorted(set((a.double() @ b.double())[:, 0].tolist()))
    kernel = epigen.compile("mm, mm * 0.5, sum(mm, n)", backend=backend, config=config)
    product, half, total = kernel(a, b)
    assert torch.equal(product, expected)
    assert torch.equal(half, expected.float() * 0.5) and torch.allclose(total, expected.double().sum(1).float(), rtol=1e-6)
    verify.demand(verify.differences(kernel, verify.Sample(a, b, {})))


def test_no_sum_leaves_int32_up_to_the_largest_exact_k() -> None:
    assert EXACT_INT8 * 128**2 < 2**31 <= (EXACT_INT8 + 1) * 128**2


def saturating(a: Tensor, b: Tensor) -> Tensor:
    assert a.is_contiguous() and (b.t().is_contiguous() or (a.shape[1] >= 128 and b.is_contiguous()))  # else cuBLASLt refuses many rows, or reads astray
    assert a.shape[1] % 32 == 0 and a.shape[0] % 32 == 0 and a.shape[0] > 16
    return (a.double() @ b.double()).clamp(-(2**31), 2**31 - 1).to(torch.int32)


@pytest.mark.parametrize("k", [40, EXACT_INT8, EXACT_INT8 + 1, 2 * EXACT_INT8 + 7])
def test_the_vendors_product_may_saturate(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For it is taken in parts that cannot."""
    monkeypatch.setattr(vendor, "_int_mm", saturating)
    a, b = operands(k)
    assert torch.equal(vendor._int8_in_parts(a, b), wrapped(a, b)) and torch.equal(reference.int8_product(a, b), wrapped(a, b))


def test_a_long_column_is_padded_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole it would take 32 times its memory."""
    seen: list[int] = []

    def noted(a: Tensor, b: Tensor) -> Tensor:
        seen.append(max(a.numel(), b.numel()))
        return saturating(a, b)

    monkeypatch.setattr(vendor, "_int_mm", noted)
    monkeypatch.setattr(vendor, "_PADDED", 1 << 12)
    a, b = torch.randint(-128, 128, (1000, 3), dtype=torch.int8), torch.randint(-128, 128, (3, 300), dtype=torch.int8)
    assert torch.equal(vendor._int8_in_parts(a, b), (a.int() @ b.int()))
    assert len(seen) == 8 * 3 and max(seen) <= 1 << 12
    seen.clear()
    a, b = torch.randint(-128, 128, (1000, 32), dtype=torch.int8), torch.randint(-128, 128, (32, 300), dtype=torch.int8)
    assert torch.equal(vendor._int8_in_parts(a, b), (a.int() @ b.int())) and len(seen) == 1  # nothing grows
    seen.clear()
    monkeypatch.setattr(vendor, "_MOST", 256)
    assert torch.equal(vendor._int8_in_parts(a, b), (a.int() @ b.int())) and len(seen) == 4 * 2  # and cuBLASLt takes no more at once


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120"])
def test_where_tritons_product_saturates_it_is_the_vendors(name: str) -> None:
    kernel, target = epigen.compile("relu(mm)"), TARGETS[name]
    for k in (EXACT_INT8 + 1, 2**31 + 24):  # the latter is past what the vendor takes at once
        plan = kernel.plan((16, 16, k), INT8, target)
        assert plan.by_vendor and f"int8 sums may pass 2^31 at K = {k} (beyond {EXACT_INT8})" in plan.choice.why
    for k, dtype in ((EXACT_INT8, INT8), (EXACT_INT8 + 1, FP16)):
        assert "sums" not in kernel.plan((4096, 4096, k), dtype, target).choice.why
    given = epigen.compile("relu(mm)", config=tiled(64, 64, 64))
    with pytest.raises(ConfigError, match=r"tiled .*K = 200000"):
        given.plan((64, 64, 200000), INT8, target)
    assert given.plan((64, 64, 200000), INT8, TARGETS["gfx942"]).multiplies  # whose products wrap around


@pytest.mark.triton
@pytest.mark.parametrize("config", [LIBRARY, LONG], ids=["library", "tiled"])
def test_a_standalone_file_wraps_around(config: KernelConfig, tmp_path: Path) -> None:
    kernel = epigen.compile("mm * 1", config=config)
    plan = kernel.plan((M, N, 1), INT8)
    (tmp_path / "fused.py").write_text(standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered))
    a, b = operands(PAST)
    torch.save((a, b, wrapped(a, b).float()), tmp_path / "operands.pt")
    code = "import sys; sys.path.insert(0, '.'); import torch, fused; a, b, y = torch.load('operands.pt'); assert torch.equal(fused.mm(a, b), y)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=settings.child_environment(interpret=True), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for k in (EXACT_INT8, PAST):
        a, b = operands(k)
        assert torch.equal(epigen.compile("mm")(a.cuda(), b.cuda()).cpu(), wrapped(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [8, 32, 64, 96, 128])
@pytest.mark.parametrize(("m", "n"), [(65504, 4096), (2**20 + 32, 32), (32, 2**20 + 32)])
def test_many_rows_of_a_narrow_product_on_a_gpu(m: int, n: int, k: int) -> None:
    """Of two row-major matrices cuBLASLt refused from 65,504 rows on."""
    a, b = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda"), torch.randint(-128, 128, (k, n), dtype=torch.int8, device="cuda")
    for given in (b, b.t().contiguous().t()):
        assert torch.equal(epigen.compile("mm", config=LIBRARY)(a, given), (a.float() @ b.float()).int())


@pytest.mark.parametrize(("m", "n"), [(5, 1), (1, 5), (1, 300), (300, 1), (40, 40), (33, 64)])
def test_a_product_that_was_padded_holds_no_more_than_twice_its_memory(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a column of 2^31 rows there are 64 parts, and all are held until they are joined: as views of what was padded they were 64 times 4 GiB."""
    monkeypatch.setattr(vendor, "_int_mm", lambda a, b: a.int() @ b.int())
    a, b = torch.randint(-128, 128, (m, 7), dtype=torch.int8), torch.randint(-128, 128, (7, n), dtype=torch.int8)
    found = vendor._padded_product(a, b)
    assert torch.equal(found, a.int() @ b.int()) and found.untyped_storage().nbytes() <= 2 * m * n * 4
