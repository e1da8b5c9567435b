"""Rows that 16 elements do not divide still get the widest loads, copies and stores that their alignment allows, in every layout."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from cases import persistent, warp_specialized
from compiling import assembly, compiled, job, tiled
from hypothesis import given
from hypothesis import strategies as st

import epigen
from epigen.codegen.spec import KNOWN, LAYOUTS, WIDE, KernelConfig, contiguous, factors
from epigen.dtypes import BF16, FP16, FP32, INT8, DType
from epigen.gpus import TARGETS
from epigen.runtime import verify
from epigen.runtime.ahead import Job
from epigen.runtime.kernel import Kernel

TEXT = "relu(mm + bias) + residual"
CONFIG = tiled(128, 128, 64, num_warps=8)


def widths(ptx: str) -> tuple[set[int], set[int], set[int]]:
    """Bytes that each instruction moves: asynchronous copies, loads and stores of global memory."""
    copies = {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (0x[0-9a-f]+)", ptx)}
    found: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx):
        found[kind][int(vector or 1) * int(bits) // 8] += 1
    return copies, set(found["ld"]), set(found["st"])


# extent of rows, elements that divide it
ROWS = ((1024, 16), (1000, 8), (1004, 4), (1002, 2), (1001, 1))


@pytest.mark.triton
@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_rows_are_copied_loaded_and_stored_as_wide_as_they_are_aligned(target: str) -> None:
    """Each layout with every other alignment, and on the other target with those between."""
    every = [(layout, extent, elements) for layout in LAYOUTS for extent, elements in ROWS]
    cases = every[target == "sm_90" :: 2]
    jobs = [job(TEXT, target, FP16, CONFIG, layout, (extent, extent, extent)) for layout, extent, _ in cases]
    for (layout, extent, elements), results in zip(cases, compiled(jobs), strict=True):
        copies, loads, stores = widths(assembly(results))
        row_bytes = min(16, 2 * elements)
        # a copy of fewer than 4 bytes cannot be asynchronous
        assert copies == ({row_bytes} if row_bytes >= 4 else set()), (layout, extent)
        assert stores == {row_bytes}, (layout, extent)
        assert max(loads) == row_bytes, (layout, extent)  # of the residual


@pytest.mark.triton
def test_one_unaligned_operand_does_not_narrow_the_other() -> None:
    """In K alone, and in N alone: a is [M, K], b is [K, N]."""
    odd_k, odd_n = ((r,) for r in compiled([job("mm", "sm_90", FP16, CONFIG, "nn", shape) for shape in ((1024, 1024, 1002), (1024, 1002, 1024))]))
    assert widths(assembly(*odd_k))[0] == widths(assembly(*odd_n))[0] == {4, 16}
    assert widths(assembly(*odd_k))[2] == {16}
    assert widths(assembly(*odd_n))[2] == {4}


@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "elements", "row_bytes"), [(FP32, 4, 16), (FP32, 2, 8), (FP32, 1, 4), (INT8, 8, 8), (INT8, 4, 4)])
def test_other_dtypes(dtype: DType, elements: int, row_bytes: int) -> None:
    extent = 1024 + elements
    (results,) = compiled([job("mm", "sm_90", dtype, tiled(64, 64, 32), "nt", (extent, extent, extent), "tf32" if dtype == FP32 else None)])
    assert widths(assembly(results))[0] == {row_bytes}


@pytest.mark.triton
def test_a_product_that_is_given_is_read_as_wide_as_its_rows_are_aligned() -> None:
    """The main kernel and the finishing one, of each dtype that a gradient may have, and for another maker's GPU."""
    cases = [(FP16, *row) for row in ROWS[:4]] + [(BF16, *ROWS[1]), (FP32, *ROWS[1]), (FP32, *ROWS[3])]
    jobs = [over("dz = drelu(mm, mask); dz, bgrad(dz)", "sm_90", dtype, (extent, extent, 0)) for dtype, extent, _ in cases]
    *found, amd = compiled([*jobs, over("dz = drelu(mm, mask); dz, bgrad(dz)", "gfx942", FP16, (1024, 1024, 0))])
    for (dtype, extent, elements), results in zip(cases, found, strict=True):
        _, loads, stores = widths(assembly(results))
        assert len(results) == 2 and max(loads) == max(stores) == min(16, dtype.bytes * elements), (dtype, extent)
    assert len(amd) == 2


def over(text: str, target: str, dtype: DType, shape: tuple[int, int, int]) -> Job:
    plan = epigen.compile(text)._over.plan(shape, dtype=dtype, target=TARGETS[target])
    return Job(plan.rendered, TARGETS[target])


def test_what_is_known_of_aligned_extents_is_left_to_triton() -> None:
    text = "z = mm * alpha + bias; relu(z), bitmask(z > 0), bgrad(z), amax(z)"
    for one in (job(text, "sm_90"), job(text, "sm_90", shape=(4095, 4096, 48))):
        assert not any(a.of for f in one.rendered.functions for a in f.arguments)


def test_kernels_of_one_alignment_are_one() -> None:
    """What is passed is divided, so that the text depends on the divisor alone."""
    texts = [job(TEXT, "sm_90", FP16, CONFIG, "nn", (m, n, k)).rendered.digest for m, n, k in ((1, 1000, 1000), (77, 24, 8), (4096, 8 * 257, 8 * 33))]
    assert len(set(texts)) == 1
    assert job(TEXT, "sm_90", FP16, CONFIG, "nn", (1, 1000, 1004)).rendered.digest not in texts


extents = st.one_of(st.integers(0, 70), st.integers(0, 1 << 33))


@given(st.tuples(extents, extents, extents), st.sampled_from(LAYOUTS))
def test_a_factor_divides_its_argument_and_fits_32_bits(shape: tuple[int, int, int], layout: str) -> None:
    m, n, k = shape
    strides = {"a": {"n": "stride_am", "t": "stride_ak"}[layout[0]], "b": {"n": "stride_bk", "t": "stride_bn"}[layout[1]]}
    values = {"M": m, "N": n, "K": k, "stride_y_m": n, "stride_mm_m": n, strides["a"]: k if layout[0] == "n" else m, strides["b"]: n if layout[1] == "n" else k}
    found = dict(factors(shape, contiguous(shape, layout, ["y"])))
    assert found.keys() <= values.keys()
    for name, factor in found.items():
        value = values[name]
        assert value % factor == 0 and value % (2 * factor) and factor in (1, 2, 4, 8) and 1 < value < WIDE
    assert {"N", "stride_y_m", strides["a"], strides["b"]} - found.keys() <= {x for x, v in values.items() if v % KNOWN == 0 or v == 1 or v >= WIDE}


def test_neither_gaps_nor_a_stride_of_zero_hide_a_factor() -> None:
    """Rows that lie apart count with their stride, expanded ones not at all, and a matrix without a stride of 1 is read element by element."""
    tensors = [("a", "mk", (1004, 1)), ("b", "kn", (0, 1)), ("x", "mn", (1002, 2)), ("y", "mn", (1, 40)), ("v", "n", (1,))]
    assert factors((24, 999, 16), tensors) == (("M", 8), ("N", 1), ("stride_am", 4), ("stride_y_n", 8))


SUMS = "z = mm + residual; z, bgrad(z), sum(a, k)"
SLICED = ((40, 48), (40, 44), (40, 42), (40, 41), (33, 48), (24, 24))


@pytest.mark.triton
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("extent", "stride"), SLICED)
def test_any_mix_of_extents_and_strides_computes_the_same(extent: int, stride: int, layout: str) -> None:
    check_slices(epigen.compile(SUMS, config=tiled(32, 32, 32), backend="interpreter"), extent, stride, layout, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("extent", "stride"), [*SLICED, (1000, 1000), (1000, 1004), (1004, 1008), (1002, 1002), (1001, 1001), (999, 1016)])
@pytest.mark.parametrize(
    "config",
    [CONFIG, tiled(32, 64, 32), warp_specialized(128, 64, 64, pingpong=1, tma_load=1), persistent(flatten=0), None],
    ids=["large", "small", "specialized", "persistent", "chosen"],
)
def test_gpu_mix_of_extents_and_strides(config: KernelConfig | None, extent: int, stride: int, layout: str) -> None:
    check_slices(epigen.compile(SUMS, config=config), extent, stride, layout, "cuda")


def check_slices(kernel: Kernel, extent: int, stride: int, layout: str, device: str) -> None:
    """Operands, an input and an output whose rows are slices of longer ones."""
    given_ = verify.sample(kernel.graph, (extent, extent, extent), FP16, FP16, FP16, seed=1, device=device, layout=layout)

    def apart(t: torch.Tensor) -> torch.Tensor:
        if t.stride(0) == 1:
            return apart(t.T).T
        wide = torch.full((t.shape[0], stride), float("nan"), dtype=t.dtype, device=device)
        return wide[:, : t.shape[1]].copy_(t)

    a, b, residual = (apart(t) for t in (given_.a, given_.b, given_.inputs["residual"]))
    verify.demand(verify.differences(kernel, verify.Sample(a, b, {"residual": residual})))
    wide = torch.full((extent, stride), 7.0, dtype=torch.float16, device=device)
    kernel(a, b, residual=residual, out={"z": wide[:, :extent]})
    assert torch.equal(wide[:, :extent], kernel(a, b, residual=residual).z)
    assert (wide[:, extent:] == 7).all()
