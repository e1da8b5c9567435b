"""What of an operand's factors a step's product is multiplied by, and how values of 4 bits come out of their bytes."""

from __future__ import annotations

import itertools

import cases
import pytest
import torch
from compiling import compiled
from specs import RENDERER, source, spec_of

import epigen
from epigen import gpus
from epigen.codegen.steps import Step, steps
from epigen.dtypes import BF16, FP16, FP32, INT8, UINT8, DType
from epigen.ir.program import graph_of
from epigen.runtime import verify
from epigen.runtime.ahead import Job


def of_b(text: str, block_k: int = 64, block_m: int = 32, a: DType = BF16, b: DType = INT8, **signature: object) -> Step:
    spec = spec_of(text, a, b=b, input_dtype=a, k_multiple=256, layout="nt", **signature)
    return steps(spec, cases.tiled(block_m, 32, block_k))[1]


@pytest.mark.parametrize(
    ("text", "value", "factors", "last"),
    [
        ("dot(a, b * s[k/128,n])", "b", ("s",), ()),
        ("dot(a, b * s[n])", "b", (), ("s",)),
        ("dot(a, s[n] * b * alpha)", "b", (), ("s", "alpha")),
        ("dot(a, (b - z[k/64,n]) * s[k/128,n] * g[k/192])", "t0", ("s", "g"), ()),
        ("dot(a, b * exp(s[k/128,n]) * t[n])", "b", ("t0",), ("t",)),
        ("dot(a, b * s[k/128,n] * s[k/128,n])", "b", ("s", "s"), ()),
        ("dot(a, b * s[k/128,n] * w[k,n])", "t1", (), ()),  # what varies within a step, and what is before it, stays
        ("dot(a, b * s[k/32,n])", "t0", (), ()),  # a block that ends within a step
        ("dot(a, b * s[k/96,n])", "t0", (), ()),
        ("dot(a, b / s[k/128,n])", "t0", (), ()),
        ("dot(a, b * s[k/128,n] + h[n])", "t1", (), ()),
        ("mm * s[n]", "b", (), ()),
    ],
)
def test_factors_that_a_step_shares_are_taken_of_its_product(text: str, value: str, factors: tuple[str, ...], last: tuple[str, ...]) -> None:
    step = of_b(text)
    assert (step.value, step.factors, step.last) == (value, factors, last)
    assert not {line.name for line in step.lines}.intersection({"t0", "t1"} if value == "b" and factors != ("t0",) else ())


def test_an_operand_in_the_dtype_of_its_product_keeps_factors_without_blocks() -> None:
    """It is rounded with them, as torch has it where the same is written in fp32 and converted."""
    assert of_b("dot(a, b * s[n])", b=BF16).factors == of_b("dot(a, b * s[n])", b=BF16).last == ()
    assert of_b("dot(a, b * s[k/128,n] * t[n])", b=BF16).factors == ("s",)


def test_where_tiles_are_high_or_each_operation_is_rounded_or_there_are_two_products_factors_stay() -> None:
    assert of_b("dot(a, b * s[k/128,n])", block_m=64).factors and not of_b("dot(a, b * s[k/128,n])", block_m=128).factors
    assert not of_b("dot(a, b * s[k/128,n])", rounding="eager").factors
    spec = spec_of("dot(a * s[m,k/128], b) * dot(a * s[m,k/128], up[k,n])", BF16, k_multiple=256)
    assert not steps(spec, cases.tiled(32, 32, 64))[0].factors
    spec = spec_of("dot(a * s[m,k/128], b)", BF16, k_multiple=256)
    assert steps(spec, cases.tiled(32, 32, 64))[0].factors == ("s",) and not steps(spec, cases.warp_specialized())[0].factors


def test_both_operands_factors_multiply_one_product() -> None:
    text = source("dot(a * sa[m,k/128], b * sb[k/128,n/128]) * t[n]", cases.tiled(32, 32, 64), k_multiple=128)
    assert "acc += tl.dot(a, b) * sa * sb\n" in text and "a_in" not in text and "b_in" not in text


@pytest.mark.parametrize(
    ("text", "paired", "zero"),
    [
        ("dot(a, int4(b))", True, ""),
        ("dot(a, uint4(b) * s[k/128,n])", True, ""),
        ("dot(a, (int4(b) - z[k/128,n]) * s[k/128,n])", True, "z"),
        ("dot(a, (int4(b) - z[n]) * s[n])", True, "z"),
        ("dot(a, (int4(b) - z[k/32,n]) * s[k/128,n])", False, ""),  # of which a step has several
        ("dot(a, (z[n] - int4(b)) * s[n])", False, ""),
        ("dot(a, relu(int4(b)) * s[n])", False, ""),
        ("dot(a, int4(b) * w[k,n])", False, ""),
        ("dot(a, int4(b, n) * s[n])", False, ""),  # neighbours along n
    ],
)
def test_even_and_odd_k_are_multiplied_apart_where_bytes_hold_what_is_multiplied(text: str, paired: bool, zero: str) -> None:
    step = of_b(text, b=UINT8)
    assert (step.paired, step.zero) == (paired, zero)


def test_a_zero_point_of_another_dtype_is_subtracted_in_fp32() -> None:
    """In the dtype of its product it would be rounded first."""
    spec = spec_of("dot(a, (int4(b) - z[n]) * s[n])", BF16, b=UINT8, input_dtype=FP32, k_multiple=256, layout="nt")
    assert not steps(spec, cases.tiled(32, 32, 64))[1].paired


def test_steps_too_short_for_two_products_and_operands_of_32_bits_join_them() -> None:
    assert of_b("dot(a, int4(b))", block_k=32, b=UINT8).paired and not of_b("dot(a, int4(b))", block_k=16, b=UINT8).paired
    assert not of_b("dot(a, int4(b))", a=FP32, b=UINT8).paired


@pytest.mark.triton
def test_kernels_agree_with_the_oracle() -> None:
    """Whatever is factored and paired, in what dtype, with what rows beyond k."""
    texts = (
        "dot(a, (int4(b) - z[k/64,n]) * s[k/64,n] * t[n]) + bias", "dot(relu(a) * u[m,k/64], uint4(b) * s[k/64,n/2])", "dot(a, int4(b) * exp(s[k/128,n]) * alpha)",
        "dot(a * u[m,k/64] * v[m], b * s[k/64,n] * t[n])",
    )  # fmt: skip
    configs = (cases.tiled(32, 32, 32), cases.tiled(16, 64, 64), cases.split_k(16, 32, 64, splits=2), cases.tiled(128, 32, 64))
    for i, (text, config, shape) in enumerate(itertools.product(texts, configs, ((33, 50, 70), (17, 64, 256)))):
        graph = graph_of(text)
        b = UINT8 if graph.packed() else INT8
        given = verify.sample(graph, shape, (FP16, FP32)[i % 5 == 0], b, (FP16, FP32)[i % 3 == 0], layout="nt", seed=i)
        verify.demand(verify.differences(epigen.compile(text, config=config, backend="interpreter"), given))


@pytest.mark.triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_bytes_are_split_by_instructions_of_nvidias_alone(target: str) -> None:
    texts, config = (
        ("dot(a, int4(b) * s[k/128,n])", "dot(a, (uint4(b) - z[k/128,n]) * s[k/128,n])", "dot(a, int4(b) * w[k,n])"),
        cases.split_k(16, 64, 64, splits=2),
    )
    jobs = [
        Job(RENDERER.render(spec_of(text, a, b=UINT8, layout="nt", k_multiple=128), config), gpus.TARGETS[target], "nt")
        for text, a in itertools.product(texts, (BF16, FP16))
    ]
    for job, (found,) in zip(jobs, compiled(jobs), strict=True):
        assert found.resources.spills == 0
        kind = "bf16x2" if "bfloat16" in job.rendered.text else "f16x2"
        assert (f"fma.rn.{kind}" in "".join(map(str, found.stages.values()))) == (target != "gfx942")


@pytest.mark.triton
def test_every_byte_has_both_its_values_in_each_dtype() -> None:
    """Of the function that a kernel calls, without the instructions: all 256 bytes."""
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for text, low in (("dot(a, int4(b))", -8), ("dot(a, uint4(b))", 0)):
        b = every.repeat(2, 1)
        found = epigen.compile(text, config=cases.tiled(16, 16, 64), backend="interpreter")(torch.eye(64).half()[:, :64], b)
        nibbles = torch.stack([b & 15, b >> 4], 1).reshape(64, 16).int()
        expected = torch.where(nibbles > 7, nibbles - 16, nibbles) if low else nibbles
        torch.testing.assert_close(found, expected.half(), rtol=0, atol=0)
