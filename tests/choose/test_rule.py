"""The plain rule: for every problem a config that is legal, fits the target, and says where it came from."""

from __future__ import annotations

import itertools

import pytest

import epigen
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.spec import Choice, KernelSpec, with_layout
from epigen.dtypes import BF16, FAST_ACCUM, FP8E4M3, FP8E5M2, FP16, FP32, INT8, OPERANDS, DType
from epigen.gpus import TARGETS, Target
from epigen.perf import limits
from epigen.shapes import Shape

EXTENTS = (0, 1, 15, 16, 17, 64, 65, 300, 4096, 100_000)
PLAIN = "relu(mm + bias)"
LONG = "z = gelu(mm * alpha + bias) + residual; z, bitmask(z > 0), bgrad(z), sum(z, n), amax(z), logsumexp(z, n)"
GRAPHS = {text: epigen.compile(text) for text in (PLAIN, LONG)}


def spec_of(text: str, dtype: DType, k: int, precision: str = "ieee") -> KernelSpec:
    kernel = GRAPHS[text] if precision == "ieee" else epigen.compile(text, precision=precision)
    # the rule is asked for a spec; which config this plan took is of no interest here
    return kernel.plan((64, 64, k), dtype=dtype, target=TARGETS["sm_90"], signature=kernel.signature_of(dtype, (64, 64, k))).spec


def legal(choice: Choice, spec: KernelSpec, shape: tuple[int, int, int], target: Target) -> None:
    space = Space(spec, shape, target)
    assert choice.why
    assert space.legal(choice.config), f"{choice.config} of {shape} on {target.name} is no point of the search space: near is {space.nearest(choice.config)}"
    assert limits.refusal(spec, choice.config, shape, target) == ""


@pytest.mark.slow
@pytest.mark.parametrize("text", [PLAIN, LONG], ids=["plain", "long"])
@pytest.mark.parametrize("dtype", OPERANDS, ids=str)
def test_every_shape_has_a_legal_config_on_every_target(dtype: DType, text: str) -> None:
    """On a third of them, by turns: each two extents, and each extent, meet each target."""
    for c, k in enumerate(EXTENTS):
        spec = spec_of(text, dtype, k)
        for (a, m), (b, n) in itertools.product(enumerate(EXTENTS), enumerate(EXTENTS)):
            for target in tuple(TARGETS.values())[(a + b + c) % 3 :: 3]:
                legal(rule.choose(spec, (m, n, k), target), spec, (m, n, k), target)


SHAPES = (
    (1, 4096, 4096), (16, 4096, 4096), (64, 1024, 8192), (128, 128, 128), (300, 1000, 5000), (1024, 1024, 1024), (4096, 4096, 4096), (4095, 4097, 1023),
    (8192, 28672, 8192), (65536, 512, 256),
)  # fmt: skip


@pytest.mark.parametrize("text", ["relu(mm + bias)", "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)", "mm"], ids=["an activation", "a derivative", "the product"])
@pytest.mark.parametrize("dtype", [FP16, FP32, INT8, FP8E4M3], ids=str)
def test_real_shapes_have_a_legal_config_on_every_target(dtype: DType, text: str) -> None:
    """By the rule, by the vendor's product, and of the epilogue alone."""
    graph = epigen.compile(text).graph
    inputs = tuple((n.name, FP32 if dtype.bits == 8 else dtype) for n in graph.inputs())
    for layout, precision in (("nn", "ieee"), ("nt", "tf32" if dtype == FP32 else "ieee")):
        for shape in SHAPES:
            spec = lower(graph, signature_of_contiguous(graph, dtype, dtype, inputs, shape, layout, precision))
            for target in TARGETS.values():
                legal(rule.choose(spec, shape, target), spec, shape, target)
                legal(rule.by_vendor(spec, shape, target, "because"), spec, shape, target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_vendor_multiplies_fp8e4m3_where_triton_does_not(target: str) -> None:
    choice = rule.choose(spec_of(PLAIN, FP8E4M3, 512), (512, 512, 512), TARGETS[target])
    assert choice.config.schedule == ("tiled" if TARGETS[target].fp8 else "library")
    if not TARGETS[target].fp8:
        assert f"{target} does not multiply fp8e4m3" in choice.why
    assert rule.choose(spec_of(PLAIN, FP8E5M2, 512), (512, 512, 512), TARGETS[target]).config.schedule == "tiled"


def test_large_ieee_fp32_products_go_to_the_vendor() -> None:
    spec = spec_of(PLAIN, FP32, 4096)
    assert rule.choose(spec, (4096, 4096, 4096), TARGETS["sm_90"]).config.schedule == "library"
    assert rule.choose(spec, (64, 64, 4096), TARGETS["sm_90"]).config.schedule == "split_k"
    assert rule.choose(spec_of(PLAIN, FP32, 4096, "tf32"), (4096, 4096, 4096), TARGETS["sm_90"]).config.schedule == "tiled"


def test_a_large_product_alone_is_the_vendors() -> None:
    alone, biased = (epigen.compile(text).plan((64, 64, 64), dtype=FP16, target=TARGETS["sm_90"]).spec for text in ("mm", "mm + bias"))
    for shape, schedule in (((1024, 1024, 1024), "library"), ((64, 8192, 8192), "split_k"), ((512, 512, 512), "tiled")):
        assert rule.choose(alone, shape, TARGETS["sm_90"]).config.schedule == schedule
        assert rule.choose(biased, shape, TARGETS["sm_90"]).config.schedule == ("split_k" if shape[0] == 64 else "tiled")
    assert rule.choose(alone, (1024, 1024, 1024), TARGETS["sm_90"]).why.startswith("the vendor's kernel is the whole program: ")


def test_a_refusal_leads_to_the_vendors_product_and_is_quoted() -> None:
    choice = rule.choose(spec_of(PLAIN, FP16, 512), (512, 512, 512), TARGETS["sm_90"], "the kernel does not compile: no such luck")
    assert choice.config.schedule == "library" and "no such luck" in choice.why


def test_columns_are_reduced_by_high_tiles_and_in_one_launch_where_no_tile_goes_along() -> None:
    def config(text: str) -> tuple[int, int, int, int]:
        spec = epigen.compile(text).plan((4096, 4096, 64), dtype=BF16, target=TARGETS["sm_90"]).spec
        found = rule.pointwise(spec, (4096, 4096, 64), TARGETS["sm_90"]).config
        return found["block_m"], found["block_n"], found["num_warps"], found["fused_finalize"]

    assert config("bgrad(mm)") == config("bgrad(mm * row[m])") == (128, 64, 4, 1)
    assert config("d = dgelu(mm, z[m,n]); d, bgrad(d)") == config("y = relu(mm); y, amax(y)") == config("amax(mm * gate[m,n])") == (128, 64, 8, 0)
    assert config("relu(mm)") == config("y = mm * 2; y, sum(y, n)") == (8, 128, 1, 0)


def test_the_problem_and_the_target_are_named() -> None:
    choice = rule.choose(spec_of(PLAIN, INT8, 64), (100, 200, 64), TARGETS["gfx942"])
    assert "100x200x64 int8 on gfx942" in choice.why and "no measurement" in choice.why


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_blocks_are_no_larger_than_they_need_be(target: str) -> None:
    """Never twice an extent and more, but for the least that a product takes."""
    for m, n, k in itertools.product((1, 16, 17, 40, 100, 1000), repeat=3):
        config = rule.choose(spec_of(PLAIN, FP16, k), (m, n, k), TARGETS[target]).config
        assert config["block_n"] < max(2 * n, 32) and config["block_k"] < max(2 * k, 32)
        assert config["block_m"] < max(2 * m, 32) or m > 64


def test_a_long_skinny_problem_fills_the_device() -> None:
    """A tile for each multiprocessor where the result is large enough to be cut into so many."""
    for target in TARGETS.values():
        for m, n in ((4096, 4096), (1024, 2048), (65_536, 512)):
            config = rule.choose(spec_of(PLAIN, FP16, 4096), (m, n, 4096), target).config
            assert -(-m // config["block_m"]) * -(-n // config["block_n"]) >= target.multiprocessors


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_a_skinny_product_of_few_tiles_splits_k(target: str) -> None:
    """So that all multiprocessors read the weights: with a tile for half of them it took 1.7 times as long as it need at 16x4096x4096."""
    there = TARGETS[target]
    for (m, n, k), split in {(16, 4096, 4096): True, (1, 512, 8192): True, (64, 16, 1024): True, (16, 32768, 4096): False, (16, 4096, 256): False}.items():
        config = rule.choose(spec_of(PLAIN, FP16, k), (m, n, k), there).config
        assert (config.schedule == "split_k") == split and not limits.refusal(spec_of(PLAIN, FP16, k), config, (m, n, k), there)
        if split:
            tiles, steps = -(-m // config["block_m"]) * -(-n // config["block_n"]), -(-k // config["block_k"])
            assert config["splits"] <= steps and (tiles * config["splits"] >= there.multiprocessors or config["splits"] in (steps, 32))


def test_long_epilogues_take_smaller_tiles() -> None:
    shape, target = (8192, 8192, 512), TARGETS["sm_80"]
    plain, long = (rule.choose(spec_of(text, FP16, 512), shape, target).config for text in (PLAIN, LONG))
    assert long["block_m"] * long["block_n"] < plain["block_m"] * plain["block_n"]


def test_rows_of_whole_words_need_no_vendor() -> None:
    """What 4 bytes divide is copied ahead."""
    for n, schedule in ((4098, "tiled"), (4099, "library")):
        shape = (4096, n, 4096)
        assert rule.choose(spec_of(PLAIN, FP16, shape[2]), shape, TARGETS["sm_80"]).config.schedule == schedule


@pytest.mark.parametrize(("layout", "schedule"), [("nn", "library"), ("nt", "tiled"), ("tt", "library")])
def test_large_products_with_unaligned_rows_go_to_the_vendor(layout: str, schedule: str) -> None:
    """Rows of b are N long where it is row-major and K long where it is transposed."""
    shape = (1001, 4099, 4096)
    assert rule.choose(with_layout(spec_of(PLAIN, FP16, shape[2]), layout), shape, TARGETS["sm_80"]).config.schedule == schedule


SHAPES = ((65536, 1024, 1024), (3072, 3072, 768), (2048, 16384, 64), (100_000, 4096, 4096))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("text", [PLAIN, LONG, "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)", "cast(mm, fp32), cast(relu(mm), fp32), cast(gelu(mm), fp32)"])
def test_many_tiles_of_aligned_rows_are_for_groups_of_warps_on_hopper(text: str, shape: tuple[int, int, int]) -> None:
    """A config that the tuner could have found, where the outputs leave through TMA."""
    for dtype in (FP16, BF16):
        spec = epigen.compile(text).plan(shape, dtype=dtype, target=TARGETS["sm_90"]).spec
        config = rule.choose(spec, shape, TARGETS["sm_90"]).config
        assert config.schedule == "warp_specialized"
        assert not config["tma_store"] or Space(spec, shape, TARGETS["sm_90"]).legal(config), config
        assert not limits.refusal(spec, config, shape, TARGETS["sm_90"])
        for target in ("sm_80", "sm_100", "gfx942"):
            assert rule.choose(spec, shape, TARGETS[target]).config.schedule == "tiled"


@pytest.mark.parametrize(
    ("dtype", "precision", "shape", "tile", "pingpong"),
    [
        (FP8E4M3, None, (8192, 8192, 8192), (128, 256), 0),
        (FP8E4M3, None, (8192, 8192, 1024), (128, 256), 0),
        (FP8E4M3, None, (512, 4096, 4096), (128, 128), 0),
        (FP8E4M3, FAST_ACCUM, (8192, 8192, 8192), (128, 256), 0),
        (FP8E5M2, FAST_ACCUM, (8192, 8192, 1024), (128, 128), 1),
        (INT8, None, (4096, 14336, 4096), (128, 256), 0),
        (INT8, None, (8, 1024, 1024, 512), (128, 128), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["cast(relu(mm * s[m] * t[n] + bias), bf16)", "cast(silu(mm) * gate[m,n], bf16)"])
def test_operands_of_8_bits_are_shared_out_as_their_sums_and_k_want_it(
    text: str, dtype: DType, precision: str | None, shape: Shape, tile: tuple[int, int], pingpong: int
) -> None:
    target = TARGETS["sm_90"]
    spec = epigen.compile(text, precision=precision).plan(shape, dtype=dtype, target=target, layout="nt").spec
    config = rule.choose(spec, shape, target).config
    assert config.schedule == "warp_specialized"
    assert ((config["block_m"], config["block_n"]), config["pingpong"]) == (tile, pingpong)
    assert Space(spec, shape, target).legal(config) and not limits.refusal(spec, config, shape, target)
    other = epigen.compile(text, precision=precision).plan(shape, dtype=dtype, target=target, layout="nn").spec
    assert rule.choose(other, shape, target).config.schedule == "tiled"


def test_inputs_are_asked_for_early_where_no_other_tile_covers_the_wait() -> None:
    for target in ("sm_80", "gfx942"):
        few, many = (rule.choose(spec_of(PLAIN, FP16, 256), (m, m, 256), TARGETS[target]).config for m in (128, 8192))
        assert (few["prefetch"], many["prefetch"]) == (1, 0)
    for text in ("mm", "mm * alpha"):  # a number that is passed by value is there when the kernel begins
        bare = epigen.compile(text).plan((128, 256, 256), dtype=FP16, target=TARGETS["sm_80"]).spec
        assert rule.choose(bare, (128, 256, 256), TARGETS["sm_80"]).config["prefetch"] == 0


@pytest.mark.parametrize(
    ("text", "shape", "schedule"),
    [
        (PLAIN, (4095, 4097, 1023), "warp_specialized"),
        ("mm", (4095, 4097, 1023), "warp_specialized"),
        ("mm", (4096, 4096, 1024), "library"),
        (PLAIN, (64, 65536, 1024), "tiled"),
        (PLAIN, (1024, 1024, 4096), "tiled"),
        (PLAIN, (2048, 2048, 30), "tiled"),
    ],
    ids=str,
)
def test_groups_of_warps_want_a_tile_for_each_multiprocessor_and_pay_for_copies_where_products_are_large(
    text: str, shape: tuple[int, int, int], schedule: str
) -> None:
    spec = epigen.compile(text).plan(shape, dtype=FP16, target=TARGETS["sm_90"]).spec
    assert rule.choose(spec, shape, TARGETS["sm_90"]).config.schedule == schedule
