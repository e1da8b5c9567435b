"""Random programs of up to 20 operations: generated kernels and the fp32 reference agree with the float64 oracle."""

from __future__ import annotations

from random import Random

import pytest
from cases import LIBRARY, SMALL, split_k
from hypothesis import HealthCheck, given, settings
from programs import programs, write_program

import epigen
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, DType
from epigen.runtime import verify

INTERPRETABLE = (FP16, FP32, INT8)
SHAPE = (37, 45, 34)


def promised(text: str, backend: str, device: str, a: DType, config: object = SMALL) -> float:
    """Check one program, and return the smallest share of elements that some output's bound covers."""
    kernel = epigen.compile(text, backend=backend, config=config)  # type: ignore[arg-type]
    sample = verify.sample(kernel.graph, SHAPE, a, a, FP32 if a.bits == 8 else a, seed=len(text), device=device)
    found = verify.differences(kernel, sample)
    verify.demand(found)
    return min(d.promised for d in found.values())


@pytest.mark.triton
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=20, tame=True, casts=INTERPRETABLE))
def test_interpreter(text: str) -> None:
    promised(text, "interpreter", "cpu", FP16)


@pytest.mark.triton
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=12, tame=True, casts=INTERPRETABLE, second=True))
def test_two_products(text: str) -> None:
    promised(text, "interpreter", "cpu", FP16)


@pytest.mark.triton
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=12, tame=True, casts=INTERPRETABLE, positions=True))
def test_positions(text: str) -> None:
    promised(text, "interpreter", "cpu", FP16)
    promised(text, "reference", "cpu", FP32)


@pytest.mark.triton
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=12, tame=True, casts=INTERPRETABLE, blocks=True))
def test_blocks(text: str) -> None:
    promised(text, "interpreter", "cpu", FP16)
    promised(text, "reference", "cpu", FP32)


@pytest.mark.triton
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=12, tame=True, casts=INTERPRETABLE, drawn=True))
def test_random_numbers(text: str) -> None:
    promised(text, "interpreter", "cpu", FP16)
    promised(text, "reference", "cpu", FP32)


@pytest.mark.triton
def test_what_an_unsure_choice_takes_is_rounded_where_it_lies() -> None:
    """Both sides of the comparison are equal but for rounding, and the branches are far apart: the answer's last bit is that of either."""
    text = (
        "z0 = cast(mm, fp16); y0 = cast(mm, fp16); z1 = tanh(y0) ** 4; x0 = cast(tanh(-0.25) ** 4, fp32) >= (tanh(-0.25) ** 4); h0 = cast(bias, fp16); "
        "q0 = cast(alpha, fp16); v0 = tanh(alpha) ** 2; w0 = alpha * tanh(alpha); y1 = alpha < y0; y2 = gelu_tanh(mm) / (abs(gelu_tanh(mm)) + 1); x1 = mm + mm; "
        "h1 = sum(mm, m); cast(z0, fp16), cast(z1, fp32), cast(y2, fp16), cast(h1, fp16), cast(sum(mm, n), fp16), "
        "cast(where(x0, x1, 0) + h0 + q0 + v0 + w0, fp16), bitmask(y1)"
    )
    promised(text, "interpreter", "cpu", FP16)


@pytest.mark.triton
def test_what_the_sigmoid_lacks_of_one_counts_as_often_as_z_says() -> None:
    """At z = 15.8 dsilu multiplies the rounding error of 1 - s by z, which the bound once left out."""
    promised("dsilu(shift[n], z=sum(mm, m)) + shift[n], cast(bgrad(mm), fp16)", "interpreter", "cpu", FP16)


@pytest.mark.triton
def test_a_width_below_zero_has_softshrink_jump() -> None:
    """There x lies to both sides of the middle, and which is taken hangs on the last bit."""
    promised("z = gelu_16bit(x=mm); width = cast(z, fp16); cast(softshrink(z, width=width), fp16), bitmask(mask)", "interpreter", "cpu", FP16)


@pytest.mark.triton
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=20, tame=True, casts=INTERPRETABLE))
def test_library_schedule(text: str) -> None:
    promised(text, "interpreter", "cpu", FP32, LIBRARY)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=20, tame=True))
def test_reference(text: str) -> None:
    promised(text, "reference", "cpu", FP16)


@pytest.mark.triton
@pytest.mark.parametrize("part", range(2))
def test_of_what_is_computed_of_operands(part: int) -> None:
    random = Random(f"operands {part}")
    for _ in range(12):
        text = write_program(random, 6, tame=True, casts=INTERPRETABLE, operands=True)
        promised(text, "interpreter", "cpu", random.choice((FP16, FP32)), random.choice((SMALL, split_k())))


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_many(part: int) -> None:
    """More programs than Hypothesis shrinks comfortably, and the bounds must cover most of what they compute."""
    random = Random(part)
    shares = []
    for _ in range(30):
        text = write_program(random, 20, tame=True, casts=INTERPRETABLE)
        shares.append(promised(text, "interpreter", "cpu", random.choice((FP16, FP32, INT8))))
    assert sum(s > 0.5 for s in shares) > 0.8 * len(shares)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(150))
def test_gpu_of_what_is_computed_of_operands(seed: int) -> None:
    random = Random(f"gpu operands {seed}")
    text = write_program(random, 12, tame=True, operands=True)
    promised(text, "triton", "cuda", random.choice((FP16, BF16, FP32)), random.choice((SMALL, split_k(), None)))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(300))
def test_gpu(seed: int) -> None:
    random = Random(f"gpu {seed}")
    text = write_program(random, 20, tame=True)
    promised(text, "triton", "cuda", random.choice((FP16, BF16, FP32, INT8, FP8E4M3)), random.choice((SMALL, LIBRARY, None)))
