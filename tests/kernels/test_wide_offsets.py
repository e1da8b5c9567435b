"""Offsets past 32 bits, in every schedule and of every kind of input and output: the integers of the compiled kernels, small cases under the interpreter
in memory of which few pages are touched, and large ones on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LIBRARY, mixed_input, persistent, split_k, tiled, warp_specialized
from integer_types import Function, first_texts
from samples import sparse

import epigen
from epigen.choose import rule
from epigen.codegen import schedules
from epigen.codegen.lower import signature_of_contiguous
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import PAST, WIDE, KernelConfig, index_bits
from epigen.dtypes import FP16, FP32, INT8
from epigen.errors import ConfigError
from epigen.gpus import TARGETS
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.perf import limits
from epigen.runtime import outputs, vendor
from epigen.runtime.ahead import Job, layout_constants

EVERYTHING = "z = mm * alpha + bias + scale_a[m] + gate[m,n] + shift; y = drelu(z, mask); y, bitmask(z > 0), bgrad(y), sum(y, n), amax(y), sum(a, k), sum(b, k) * scale_b[n]"
"""Inputs and outputs of every kind."""

LARGE = (65536, 65536, 4096)

CONFIGS = {
    "tiled": tiled(group_m=8),
    "tiled, inputs first": tiled(prefetch=1, fused_finalize=1, group_m=1),
    "split_k": split_k(group_m=4),
    "split_k, completed by the last": split_k(fused_finalize=1),
    "library": LIBRARY,
    "library, completed by the last": LIBRARY.with_value("fused_finalize", 1),
    "persistent": persistent(flatten=0, tma_store=0),
    "persistent, flattened": persistent(128, 128, 64, 8),
    "persistent, in subtiles": persistent(128, 128, 64, 8, flatten=0, subtiles=2, fused_finalize=1, prefetch=1),
    "cooperative": warp_specialized(128, 128, subtiles=2, fused_finalize=1),
    "cooperative, in parts": warp_specialized(128, 128, splits=3, fused_finalize=1, tma_store=0),
    "ping-pong": warp_specialized(128, 64, pingpong=1, prefetch=1, fused_finalize=1),
    "ping-pong, loaded by TMA": warp_specialized(128, 64, pingpong=1, subtiles=2, tma_load=1),
    "mixed input": mixed_input(64, 256),
    "mixed input, in parts": mixed_input(128, 128, splits=3, tma_store=0),
}
WEIGHT = "z = dot(a, b * s[k/128,n]) * t[n] + bias + scale_a[m] + gate[m,n] * alpha; z, silu(z)"
"""What the schedule mixed_input has."""


def job(config: KernelConfig, text: str = EVERYTHING, shape: tuple[int, int, int] = LARGE, layout: str = "nn", target: str = "sm_90") -> Job:
    converts = SCHEDULES[config.schedule].converts
    text, layout, weight = (WEIGHT, f"{layout[0]}t", INT8) if converts else (text, layout, None)
    kernel = epigen.compile(text, config=config)
    signature = kernel.signature_of(FP16, shape, layout, weight)
    if "shift" in text:  # one number that is passed by value, and one in memory
        signature = replace(signature, inputs=tuple((name, FP16 if name == "shift" else dtype) for name, dtype in signature.inputs))
    return Job(kernel.plan(shape, target=TARGETS[target], signature=signature).rendered, TARGETS[target], layout)


def faults(one: Job, texts: list[str]) -> list[str]:
    """Of all kernels of a module."""
    seen = []
    for function, text in zip(one.rendered.functions, texts, strict=True):
        described = function.finish is None and any(a.block for a in function.arguments)
        read = Function(described).read(text)
        assert read.offsets >= 2, function.name
        seen += [f"{function.name}: {fault}" for fault in read.faults]
    return seen


@pytest.mark.triton
def test_what_becomes_an_offset_has_64_bits() -> None:
    """Where some offset needs as many, as Triton compiles it: for strides that fit in 32 bits, which are then passed in 32."""
    jobs = {(name, layout): job(config, layout=layout) for name, config in CONFIGS.items() for layout in ("nn", "tt")}
    jobs |= {(name, "gfx942"): job(CONFIGS[name], target="gfx942") for name in ("tiled", "split_k", "library")}
    jobs |= {("over", config.schedule): over(config) for config in (LIBRARY, LIBRARY.with_value("fused_finalize", 1))}
    assert {SCHEDULES[config.schedule].name for config in CONFIGS.values()} == set(SCHEDULES)
    for name, one, found in zip(jobs, jobs.values(), first_texts(list(jobs.values())), strict=True):
        assert "int64" in one.rendered.text, name
        assert faults(one, found) == [], name


def over(config: KernelConfig) -> Job:
    kernel = epigen.compile("z = mm * gate[m,n] + scale_a[m]; z, bitmask(z > bias), sum(z, m), sum(z, n), amax(z)", config=config)._over
    return Job(kernel.plan((65536, 65536, 0), FP16, TARGETS["sm_90"]).rendered, TARGETS["sm_90"])


@pytest.mark.triton
def test_the_reader_of_types_finds_what_is_32_bits_wide() -> None:
    """Kernels for small problems: each schedule has offsets of 32 bits there."""
    jobs = {name: job(config, shape=(4096, 4096, 4096)) for name, config in CONFIGS.items()}
    for name, one, found in zip(jobs, jobs.values(), first_texts(list(jobs.values())), strict=True):
        seen = faults(one, found)
        assert any("an offset of 32 bits" in fault for fault in seen), name
        if not SCHEDULES[CONFIGS[name].schedule].descriptors:
            assert any("multiplied in 32 bits" in fault for fault in seen), name


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("%s = arith.muli %stride_bk, %c64_i32 : i32", "multiplied in 32 bits"),
        ("%s = arith.muli %stride_bk, %c64_i32 : i32\n%w = arith.extsi %s : i32 to i64\n%p = tt.addptr %b, %w : !tt.ptr<f16>, i64", "before it was made wider"),
        ("%s = arith.addi %K, %c64_i32 : i32", "arithmetic of 32 bits"),
        ("%x = tt.get_program_id x : i32\n%p = tt.addptr %b, %x : !tt.ptr<f16>, i32", "an offset of 32 bits"),
        ("scf.for %k = %c64_i32 to %K step %c64_i32  : i32 {", "counts in 32 bits"),
        ("%w = arith.extsi %stride_bk : i32 to i64\n%s = arith.muli %w, %c64_i64 : i64\n%p = tt.addptr %b, %s : !tt.ptr<f16>, i64", ""),
        ("%r = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>\n%p = tt.addptr %b, %r : tensor<64x!tt.ptr<f16>>, tensor<64xi32>", ""),
    ],
)
def test_the_reader_of_types_by_the_line(line: str, fault: str) -> None:
    text = (
        f"tt.func public @kernel(%b: !tt.ptr<f16>, %K: i32, %stride_bk: i32) {{\n%c64_i32 = arith.constant 64 : i32\n%c64_i64 = arith.constant 64 : i64\n{line}"
    )
    found = Function(described=False).read(text).faults
    assert any(fault in f for f in found) if fault else found == []


def test_a_masks_rows_are_apart_where_it_is_compiled_ahead() -> None:
    """A mask that is read in words has one stride, which is none of 1."""
    one = job(tiled(), "dz = drelu(mm, mask) * scale_a[m] + gate[m,n]; dz, bitmask(dz > 0), sum(dz, n)")
    main, *_ = one.rendered.functions
    found = layout_constants(main)
    assert {"stride_scale_a_m", "stride_gate_n", "stride_dz_n", "stride_ak", "stride_bn"} == found.keys() and "stride_mask_m" in main.names


# -- which problems need 64 bits


@pytest.mark.parametrize(
    ("shape", "reaches", "bits"),
    [
        ((32768, 65535, 64), (), 32),
        ((32768, 65536, 64), (), 64),
        ((4, 4, 64), (WIDE - 1,), 32),
        ((4, 4, 64), (5, WIDE), 64),
        ((1, 4, WIDE - PAST - 1), (), 32),  # the last step along k, or the last tile, ends below 2^31
        ((1, 4, WIDE - PAST), (), 64),
        ((WIDE // 2 - 1, 1, 1), (), 32),
        ((WIDE // 2, 1, 1), (), 64),  # two halves of the only column leave partial results of M each
        ((1, WIDE // 2, 1), (), 64),
        ((WIDE, 0, 1), (), 64),
    ],
)
def test_which_problems_need_64_bits(shape: tuple[int, int, int], reaches: tuple[int, ...], bits: int) -> None:
    assert index_bits(shape, reaches) == bits


def test_past_holds_the_largest_step_of_every_schedule() -> None:
    for schedule in SCHEDULES.values():
        largest = {name: max(values) for name, values in schedule.dimensions.items()}
        assert max(largest["block_m"], largest["block_n"], largest.get("splits", 1) * largest.get("block_k", 0)) <= PAST // 2


@pytest.mark.parametrize("n", [1, 8])
def test_a_masks_padded_rows_count(n: int) -> None:
    """Of one byte of mask a row 16 are allocated: offsets past 2^31 where the product has but 2^27 elements."""
    kernel = epigen.compile("bitmask(mm > 0)")
    for m, bits in ((WIDE // g.mask_stride(n) - 1, 32), (WIDE // g.mask_stride(n) + 1, 64)):
        a, b = (torch.empty(size, dtype=torch.float16, device="meta") for size in ((m, 16), (16, n)))
        signature = kernel._signature((m, n, 16), (a, b), {}, {}, outputs.of(kernel.graph, FP16))
        assert signature.index_bits == bits
        assert signature_of_contiguous(kernel.graph, FP16, FP16, (), (m, n, 16), "nn", "ieee").index_bits == bits


def test_strides_that_no_element_is_reached_by_do_not_count() -> None:
    kernel = epigen.compile("mm + gate[m,n]")
    a, b = torch.empty_strided((1, 64), (WIDE * 4, 1), device="meta"), torch.empty_strided((64, 128), (0, 1), device="meta")
    gate = torch.empty_strided((1, 128), (0, 0), device="meta")
    assert kernel._signature((1, 128, 64), (a, b), {"gate": gate}, {}, outputs.of(kernel.graph, FP32)).index_bits == 32


@pytest.mark.parametrize(
    ("config", "shape", "why"),
    [
        (tiled(16, 16), (1 << 20, 1 << 20, 16), "numbered"),
        (tiled(256, 256), (1 << 20, 1 << 20, 16), ""),
        (split_k(16, 16, splits=32), (1 << 17, 1 << 17, 4096), "numbered"),
        (persistent(), (WIDE - PAST, 16, 16), "TMA"),
        (persistent(), (WIDE - PAST - 1, 16, 16), ""),
        (warp_specialized(), (16, 16, WIDE), "warp_specialized"),
        (LIBRARY, (16, 16, WIDE), r"2\^31"),
        (tiled(), (16, 16, WIDE * 4), ""),
    ],
)
def test_what_is_too_large_for_a_config_is_refused(config: KernelConfig, shape: tuple[int, int, int], why: str) -> None:
    kernel = epigen.compile("relu(mm + bias)", config=config)
    signature = replace(kernel.signature_of(FP16, shape), tma=("a", "b", "out"))
    if why:
        with pytest.raises(ConfigError, match=why):
            kernel.plan(shape, target=TARGETS["sm_90"], signature=signature)
        spec = epigen.compile("relu(mm + bias)").plan((64, 64, 64)).spec
        assert limits.refusal(spec, config, shape, TARGETS["sm_90"])
    else:
        assert kernel.plan(shape, target=TARGETS["sm_90"], signature=signature).choice.config == config


@pytest.mark.parametrize("text", ["mm", "relu(mm + bias)"])
@pytest.mark.parametrize("shape", [(WIDE, 2, 16), (2, WIDE + 8, 1), (4, 4, WIDE), (128, 128, WIDE + 64)])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_whatever_the_extents_are_something_runs(text: str, shape: tuple[int, int, int], dtype: Any) -> None:
    for target in ("sm_80", "sm_90", "gfx942"):
        plan = epigen.compile(text, precision="ieee").plan(shape, dtype, TARGETS[target])
        assert plan.multiplies and plan.spec.signature.index_bits == 64
        ruled = rule.choose(plan.spec, shape, TARGETS[target]).config
        assert [limits.unfit(plan.spec, config, shape, TARGETS["sm_90"]) for config in (ruled, plan.choice.config)] == ["", ""]


# -- under the interpreter


SMALL: Mapping[str, KernelConfig] = {
    "tiled": tiled(16, 16, 16),
    "split_k": split_k(16, 16, 16, splits=2, fused_finalize=1),
    "persistent": persistent(64, 16, 16, flatten=0),
    "library": schedules.config("library", block_m=4, block_n=16, num_warps=1),
}


@pytest.mark.triton
@pytest.mark.parametrize("gap", [WIDE // 16, WIDE // 16 + 3, 2 * WIDE // 16], ids=["step of 2^31", "past 2^31", "step of 2^32"])
@pytest.mark.parametrize("schedule", SMALL)
def test_a_step_along_k_past_32_bits(schedule: str, gap: int) -> None:
    """Rows of b so far apart that a step over 16 of them is one of 2^31 or 2^32 elements; there are three."""
    a, b = torch.randint(-2, 3, (5, 40)).to(torch.int8), sparse((40, 7), (gap, 1), torch.int8)
    found = epigen.compile("mm", config=SMALL[schedule], backend="interpreter")(a, b)
    assert torch.equal(found, (a.double() @ b.double()).int())


@pytest.mark.triton
@pytest.mark.parametrize("schedule", SMALL)
def test_columns_of_a_past_32_bits(schedule: str) -> None:
    a, b = sparse((5, 40), (1, 2 * WIDE // 16), torch.int8), torch.randint(-2, 3, (40, 7)).to(torch.int8)
    found = epigen.compile("mm", config=SMALL[schedule], backend="interpreter")(a, b)
    assert torch.equal(found, (a.double() @ b.double()).int())


@pytest.mark.triton
@pytest.mark.parametrize("schedule", SMALL)
def test_inputs_outputs_and_masks_past_32_bits(schedule: str) -> None:
    """Each in rows that are 2^31 bytes or elements apart, or near to that."""
    m, n, k = 70, 20, 24
    gap = WIDE // 64
    kernel = epigen.compile(
        "y = where(bits(keep), mm, 0) * gate[m,n] + offset[m]; y, bitmask(y > 0), sum(y, m), sum(y, n)", config=SMALL[schedule], backend="interpreter"
    )
    a, b = torch.randint(-2, 3, (m, k)).half(), torch.randint(-2, 3, (k, n)).half()
    keep = sparse((m, 3), (gap, 1), torch.uint8)
    keep.copy_(torch.randint(0, 256, keep.shape))
    gate, offset = sparse((m, n), (gap, 1), torch.float16), sparse((m,), (gap + 1,), torch.float16)
    out = {"y": sparse((m, n), (gap, 1), torch.float16), "out1": sparse((m, 3), (gap, 1), torch.uint8), "out3": sparse((m,), (gap,))}
    y, mask, columns, rows = kernel(a, b, keep=keep, gate=gate, offset=offset, out=out)
    want = torch.where(reference.unpack(keep, n), a.double() @ b.double(), 0) * gate.double() + offset.double()[:, None]
    assert torch.equal(y.double(), want) and torch.equal(reference.unpack(mask, n), want > 0)
    assert torch.equal(columns.double(), want.sum(0)) and torch.equal(rows.double(), want.sum(1))


@pytest.mark.triton
def test_over_a_product_past_32_bits() -> None:
    mm = sparse((70, 20), (WIDE // 64, 1), torch.float16)
    y, rows = epigen.compile("relu(mm), sum(mm, n)", config=SMALL["library"], backend="interpreter").over(mm)
    assert torch.equal(y, mm.relu()) and torch.equal(rows.double(), mm.double().sum(1))


@pytest.mark.triton
def test_reductions_of_operands_past_32_bits() -> None:
    """Over k, in a kernel of their own."""
    a, b = sparse((5, 200), (1, WIDE // 128), torch.int8), sparse((200, 7), (WIDE // 128, 1), torch.int8)
    _, rows, columns = epigen.compile("mm, sum(a, k), sum(b, k)", config=SMALL["tiled"], backend="interpreter")(a, b)
    assert torch.equal(rows.double(), a.double().sum(1)) and torch.equal(columns.double(), b.double().sum(0))


# -- on a GPU


GPU: Mapping[str, KernelConfig | None] = {
    "default": None,
    "tiled": tiled(16, 64, 64, 4, 3),
    "tiled, inputs first": tiled(64, 64, 32, prefetch=1),
    "split_k": split_k(16, 64, 32, splits=4),
    "persistent": persistent(64, 64, 64, flatten=0),
    "persistent, in subtiles": persistent(128, 128, 64, 8, flatten=0, subtiles=2, tma_store=0),
    "cooperative": warp_specialized(128, 128, 64, subtiles=2),
    "cooperative, in parts": warp_specialized(128, 128, 64, splits=2),
    "ping-pong": warp_specialized(64, 128, 64, pingpong=1),
    "library": schedules.config("library", block_m=8, block_n=128, num_warps=4),
}


def sums_gigabytes(name: str, m: int, n: int) -> float:
    """What the sums of parts of k take, which lie in memory as whole tiles of fp32."""
    config = GPU[name]
    splits = dict(config.values).get("splits", 1) if config is not None else 1
    if config is None or splits == 1:
        return 0.0
    return splits * -(-m // config["block_m"]) * config["block_m"] * n * 4 / 2**30


def compile_for(name: str, text: str) -> Any:
    config = GPU[name]
    if config is not None and not SCHEDULES[config.schedule].runs_on(
        "cuda", 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    ):
        pytest.skip(f"the schedule {config.schedule} does not run on this GPU")
    return epigen.compile(text, config=config)


def integers(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randint(-2, 3, size, device="cuda", dtype=torch.int8).to(dtype)


def spread(size: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small integers in rows or columns that lie far apart."""
    reach = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return torch.empty(reach + 1, dtype=dtype, device="cuda").as_strided(size, stride).copy_(integers(*size, dtype=dtype))


def parts(extent: int, each: int) -> list[slice]:
    """Of what is compared in float64, which would not fit the GPU as a whole."""
    return [slice(start, min(extent, start + each)) for start in range(0, extent, each)]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2**25, 2**26, 2**26 + 8], ids=["2^25", "2^26", "past 2^26"])
@pytest.mark.parametrize("name", GPU)
def test_wide_rows_of_b_on_a_gpu(name: str, n: int, room: Callable[[float], None]) -> None:
    """16 x 2^26 x 128 in fp16, where a step along k was one of 2^32 elements, and taken as none."""
    kernel = compile_for(name, "mm + 0.0")
    room((128 * n * 2 + 16 * n * 2 * 2) / 2**30 + sums_gigabytes(name, 16, n) + 8)
    a, b = integers(16, 128), torch.empty((128, n), dtype=torch.float16, device="cuda")
    b.random_(-2, 3)
    y = kernel(a, b)
    for part in parts(n, 2**21):
        assert torch.equal(y[:, part].double(), a.double() @ b[:, part].double())


@pytest.mark.gpu
@pytest.mark.parametrize("step", [2**31, 2**32], ids=["2^31", "2^32"])
@pytest.mark.parametrize("which", ["a along k", "b along k", "rows of a", "columns of b"])
@pytest.mark.parametrize("name", GPU)
def test_far_strides_on_a_gpu(name: str, which: str, step: int, room: Callable[[float], None]) -> None:
    """Operands of few elements, of which 64 rows or columns span 2^31 or 2^32."""
    kernel = compile_for(name, "mm * 1.0")
    room(160 * (step // 64) * 2 / 2**30)
    far = spread((160, 160), (1, step // 64) if which in ("a along k", "columns of b") else (step // 64, 1))
    a, b = (integers(160, 160), far) if "b" in which else (far, integers(160, 160))
    assert torch.equal(kernel(a, b).double(), a.double() @ b.double())


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_a_tall_result_with_masks_and_tiles_on_a_gpu(name: str, room: Callable[[float], None]) -> None:
    """M * N just past 2^31: outputs, an [m,n] input, packed masks in and out, and partial results."""
    kernel = compile_for(name, "z = drelu(mm, mask) + gate[m,n]; z, bitmask(z > 0), bgrad(z), sum(z, n)")
    m, n, k = 2**20 + 64, 2048, 32
    room(20 + (8 if name == "library" else 0) + sums_gigabytes(name, m, n))
    a, b = integers(m, k), integers(k, n)
    gate = torch.empty((m, n), dtype=torch.float16, device="cuda").random_(-2, 3)
    mask = torch.empty((m, n // 8), dtype=torch.uint8, device="cuda").random_(0, 256)
    z, positive, columns, rows = kernel(a, b, gate=gate, mask=mask)
    for part in parts(m, 2**17):
        want = torch.where(reference.unpack(mask[part], n), (a[part].float() @ b.float()), 0) + gate[part].float()
        assert torch.equal(z[part].float(), want) and torch.equal(reference.unpack(positive[part], n), want > 0)
        assert torch.equal(rows[part], want.sum(1))
    total = torch.stack([z[part].sum(0, dtype=torch.float64) for part in parts(m, 2**17)]).sum(0)
    assert ((columns.double() - total).abs() <= 1e-5 * (1 + total.abs())).all()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [2**31 // 4096 + 3, 2**32 // 4096 + 3], ids=["2^31", "2^32"])
def test_over_a_large_product_on_a_gpu(m: int, room: Callable[[float], None]) -> None:
    room(m * 4096 * 2 * 3 / 2**30 + 2)
    mm = torch.empty((m, 4096), dtype=torch.float16, device="cuda").random_(-2, 3)
    y, mask, rows = epigen.compile("relu(mm), bitmask(mm > 0), sum(mm, n)").over(mm)
    for part in (slice(0, 300), slice(m // 2, m // 2 + 300), slice(m - 300, m)):
        assert torch.equal(y[part], mm[part].relu()) and torch.equal(reference.unpack(mask[part], 4096), mm[part] > 0)
    for part in parts(m, 2**15):
        assert torch.equal(rows[part].double(), mm[part].sum(1, dtype=torch.float64)) and torch.equal(y[part], mm[part].relu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("default", 2**31 - 8),
        ("default", 2**31 + 24),
        ("default", 2**32 + 8),
        ("split_k", 2**31 - 8),
        ("split_k", 2**32 + 8),
        ("tiled", 2**31 - 8),
        ("tiled", 2**31 + 24),
    ],
)
def test_a_long_k_on_a_gpu(name: str, k: int, room: Callable[[float], None]) -> None:
    """One row by one column: of int8 by the vendor's product, in parts whose sums stay in int32; of fp16 by kernels, which of int8 would saturate."""
    dtype = torch.int8 if name == "default" else torch.float16
    room(2 * k * dtype.itemsize / 2**30 + 1)
    config = {"default": None, "split_k": split_k(16, 16, 256, splits=32), "tiled": tiled(16, 16, 256, 4, 4)}[name]
    a, b = torch.zeros((1, k), dtype=dtype, device="cuda"), torch.ones((k, 1), dtype=dtype, device="cuda")
    a[0, :100], a[0, -100:], a[0, k // 2] = 3, 5, 7
    assert epigen.compile("mm", config=config)(a, b).item() == (807 if dtype == torch.int8 else 807.0)


@pytest.mark.gpu
@pytest.mark.parametrize("extent", [2**31 - 8, 2**31 + 24], ids=["below 2^31", "past 2^31"])
def test_a_long_column_on_a_gpu(extent: int, room: Callable[[float], None]) -> None:
    room(10)  # rows of 32 are what the vendor multiplies, in parts
    a = torch.ones((extent, 1), dtype=torch.int8, device="cuda")
    a[-70:], a[extent // 2] = -3, 5
    assert torch.equal(epigen.compile("cast(mm, int8)")(a, torch.ones((1, 1), dtype=torch.int8, device="cuda")), a)


@pytest.mark.gpu
@pytest.mark.parametrize("extent", [2**31 - 8, 2**31 + 24], ids=["below 2^31", "past 2^31"])
def test_a_long_row_on_a_gpu(extent: int, room: Callable[[float], None]) -> None:
    room(3 * extent / 2**30)
    b = torch.ones((1, extent), dtype=torch.int8, device="cuda")
    b[:, -70:], b[:, extent // 2] = -3, 5
    y, mask, total = epigen.compile("cast(mm, int8), bitmask(mm > 0), sum(mm, n)")(torch.ones((1, 1), dtype=torch.int8, device="cuda"), b)
    assert torch.equal(y, b) and torch.equal(reference.unpack(mask[:, -9:], 72), b[:, -72:] > 0)
    assert total.item() == pytest.approx(extent - 71 + 5 - 3 * 70, rel=1e-6)


@pytest.mark.gpu
def test_a_masks_padded_rows_on_a_gpu(room: Callable[[float], None]) -> None:
    """A column of 2^27 elements and more has a mask of 2^31 bytes."""
    m = 2**27 + 1000
    room(16 * m / 2**30 + m * 40 / 2**30)
    a = integers(m, 16)
    b = torch.zeros((16, 1), dtype=torch.float16, device="cuda")
    b[0] = 1
    mask = epigen.compile("bitmask(mm > 0)")(a, b)
    assert torch.equal(mask[:, 0], (a[:, 0] > 0).to(torch.uint8))


@pytest.mark.gpu
def test_the_vendors_product_of_far_rows_on_a_gpu(room: Callable[[float], None]) -> None:
    """cuBLAS takes rows less than 2^31 elements apart."""
    room(9)
    far, b = spread((3, 64), (2**31 + 8, 1)), integers(64, 40)
    want = far.double() @ b.double()
    assert torch.equal(vendor.product(far, b, "ieee").double(), want)
    assert torch.equal(epigen.compile("relu(mm)", config=GPU["library"])(far, b).double(), want.relu())
    assert torch.equal(epigen.compile("mm", config=GPU["library"])(far, b).double(), want)
