"""What an invariant program may not have, as data: parts of k, the vendor's product, and of fp8 what adds up in another order than the rest; and quarters of a tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specs import TILED, spec_of, spec_over

from epigen.choose.space import Space
from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig, KernelSpec
from epigen.dtypes import BF16, FP8E4M3, FP8E5M2, FP16, FP32, INT8, OPERANDS, DType
from epigen.gpus import TARGETS
from epigen.perf import limits

H100 = TARGETS["sm_90"]
SHAPE = (1024, 4096, 4096)
PARTS = schedules.config("split_k", **dict(TILED.values), splits=4)
TWICE = schedules.config(
    "warp_specialized", block_m=128, block_n=128, block_k=64, group_m=8, pingpong=0, subtiles=1, prefetch=0, tma_store=1, tma_load=0, num_stages=4,
    fused_finalize=0, splits=2,
)  # fmt: skip
VENDORS = schedules.config("library", block_m=8, block_n=128, num_warps=1, fused_finalize=0)


def bytewise(**values: int) -> KernelConfig:
    return schedules.config("tiled", **({"block_m": 64, "block_n": 128, "block_k": 128, "group_m": 8, "num_warps": 4, "num_stages": 3} | values))


def plain(spec: KernelSpec) -> KernelSpec:
    return replace(spec, signature=replace(spec.signature, invariant=False))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP8E4M3], ids=str)
@pytest.mark.parametrize(("config", "why"), [(PARTS, "splits=4"), (TWICE, "splits=2"), (VENDORS, "vendor's product")], ids=["split_k", "two parts", "library"])
def test_one_product_adds_up_all_of_k(dtype: DType, config: KernelConfig, why: str) -> None:
    if config is TWICE and dtype == FP32:
        pytest.skip("the schedule multiplies no fp32")
    spec = spec_of("relu(mm)", dtype, layout="nt", tma=("a", "b", "out"), invariant=True)
    said = limits.unfit(spec, config, SHAPE, H100)
    assert why in said and "invariant" in said and limits.refusal(spec, config, SHAPE, H100) == said
    assert limits.unfit(plain(spec), config, SHAPE, H100) == ""


def test_sums_of_int8_are_exact_and_a_given_product_is_nobodys() -> None:
    """So that nothing is asked of them."""
    exact = spec_of("relu(mm)", INT8, layout="nt", tma=("a", "b", "out"), invariant=True)
    for config in (PARTS, TWICE, VENDORS):
        assert limits.unfit(exact, config, SHAPE, H100, chosen=True) == ""
    assert limits.unfit(spec_over("relu(mm)", FP16, invariant=True), VENDORS, SHAPE, H100) == ""


@pytest.mark.parametrize("precision", ["ieee", "fast_accum"])
@pytest.mark.parametrize("dtype", [FP8E4M3, FP8E5M2], ids=str)
def test_fp8_is_added_up_by_one_instruction_in_steps_of_128(dtype: DType, precision: str) -> None:
    spec = spec_of("relu(mm)", dtype, layout="nt", tma=("a", "b", "out"), precision=precision, invariant=True)
    for config in (bytewise(block_m=16), bytewise(block_m=32), bytewise(num_warps=2, block_n=32), bytewise(block_k=64), bytewise(block_k=256)):
        assert "by wgmma" in limits.unfit(spec, config, SHAPE, H100, chosen=True) and limits.refusal(spec, config, SHAPE, H100)
        assert limits.unfit(spec, config, SHAPE, H100) == "", "one that is given is the same for all M"
        assert limits.unfit(plain(spec), config, SHAPE, H100, chosen=True) == ""
    for config in (bytewise(), bytewise(block_m=128, num_warps=8), TWICE.with_value("splits", 1).with_value("block_k", 128)):
        assert limits.refusal(spec, config, SHAPE, H100) == ""
        assert limits.refusal(spec, config, (1, 4096, 4096), H100) == "" or config["block_m"] > 64, "a row has the tile that all have"


def test_quarters_of_a_tile_have_columns_enough_and_inputs_in_turn_one_epilogue() -> None:
    spec = spec_of("relu(mm + residual)", FP16, layout="nt", tma=("a", "b", "residual", "out"))
    fits = TWICE.with_value("subtiles", 4).with_value("splits", 1).with_value("tma_load", 1)
    assert limits.refusal(spec, fits, SHAPE, H100) == ""
    assert "block_n=64 or more, and it is 32" in limits.unfit(spec, fits.with_value("block_n", 32), SHAPE, H100)
    assert limits.unfit(spec, fits.with_value("block_n", 32).with_value("subtiles", 2), SHAPE, H100) == ""
    assert "splits=1 is needed" in limits.unfit(spec, fits.with_value("splits", 2), SHAPE, H100)
    for other in (fits.with_value("tma_load", 0), fits.with_value("subtiles", 2)):
        assert limits.unfit(spec, other.with_value("splits", 2), SHAPE, H100) == ""


def test_the_space_quarters_tiles_where_there_are_several_to_move() -> None:
    for text, tma, most in (
        ("relu(mm + bias)", ("a", "b", "out"), 2),
        ("mm + residual", ("a", "b", "residual", "out"), 4),
        ("z = mm; gelu(z), z", ("a", "b", "out0", "z"), 4),
        ("amax(relu(mm + residual), n)", ("a", "b", "residual"), 2),
    ):
        spec = spec_of(text, FP16, layout="nt", tma=tma)
        found = {c["subtiles"] for c in Space(spec, (8192, 8192, 1024), H100).outline() if c.schedule == "warp_specialized"}
        assert max(found) == most, text


@pytest.mark.parametrize("k", [16, 64, 100, 4096])
@pytest.mark.parametrize("m", [1, 16, 64, 65, 1000, 8192])
@pytest.mark.parametrize("dtype", OPERANDS, ids=str)
def test_the_space_proposes_none_of_these(dtype: DType, m: int, k: int) -> None:
    spec = spec_of("relu(mm + bias)", dtype, layout="nt", tma=("a", "b", "out"), k_multiple=k & -k, invariant=True)
    found = list(Space(spec, (m, 4096, k), H100).outline())
    assert found
    for config in found:
        assert limits.unfit(spec, config, (m, 4096, k), H100, chosen=True) == "", str(config)


@pytest.mark.parametrize("target", TARGETS)
def test_where_configs_were_compared_each_m_may_have_its_own(target: str) -> None:
    def one(text: str, dtype: DType = FP16, **more: object) -> bool:
        return limits.one_config(spec_of(text, dtype, invariant=True, **more), TARGETS[target])

    assert [one("relu(mm)", t) for t in (FP16, BF16, FP8E4M3)] == [target != "sm_90"] * 3
    assert one("relu(mm)", FP32), "configs of fp32 operands were compared on no GPU"
    assert one("bgrad(mm)") == one("mm * gate[m,n], sum(a, k)") == (target != "sm_90")
    assert not one("relu(mm)", INT8)
    assert one("mm, sum(mm, n)") and one("logsumexp(mm, n)", INT8)
    assert limits.one_config(spec_over("sum(mm, n)", FP16, invariant=True), TARGETS[target])
    assert not limits.one_config(spec_over("relu(mm)", FP16, invariant=True), TARGETS[target])
    assert not limits.one_config(spec_of("sum(mm, n)"), TARGETS[target])
