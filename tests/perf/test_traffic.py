"""FLOPs, bytes and launches of fused and unfused programs, counted by hand at M, N, K = 256, 512, 1024."""

from __future__ import annotations

import cases
import pytest
from modelled import BACKWARD, LIBRARY, PLAIN, spec_of, tiled

from epigen.dtypes import INT8
from epigen.perf.traffic import traffic

M, N, K = 256, 512, 1024
OPERANDS_16 = 2 * (M * K + K * N)
TILE_16, COLUMN_16 = 2 * M * N, 2 * N


@pytest.mark.parametrize(
    ("text", "fused", "launches", "unfused", "unfused_launches"),
    [
        ("mm", TILE_16, 1, TILE_16, 1),
        # product written; + bias reads it, writes; relu reads, writes
        (PLAIN, COLUMN_16 + TILE_16, 1, 5 * TILE_16 + COLUMN_16, 3),
        ("mm + residual", 2 * TILE_16, 1, 4 * TILE_16, 2),
        # product; + bias; relu; > 0 reads z and writes booleans; packing reads them and writes bits
        ("z = mm + bias; relu(z), bitmask(z > 0)", COLUMN_16 + TILE_16 + M * N // 8, 1, 6 * TILE_16 + COLUMN_16 + 2 * M * N + M * N // 8, 5),
        # product; unpacking; drelu reads product and booleans, writes; the sum reads and writes fp32; partials: two rows of tiles
        (BACKWARD, TILE_16 + M * N // 8 + 4 * N + 2 * 4 * N, 2, 4 * TILE_16 + M * N // 8 + 2 * M * N + 4 * N, 4),
        # a sum over k reads b once more, fused or not
        ("mm, sum(b, k)", TILE_16 + 4 * N + 2 * K * N, 2, TILE_16 + 4 * N + 2 * K * N, 2),
        ("cast(relu(mm), fp32)", 4 * M * N, 1, 3 * TILE_16 + TILE_16 + 4 * M * N, 3),
    ],
)
def test_traffic(text: str, fused: int, launches: int, unfused: int, unfused_launches: int) -> None:
    t = traffic(spec_of(text), (M, N, K))
    assert t.flops == 2 * M * N * K
    assert (t.bytes, t.launches) == (OPERANDS_16 + fused, launches)
    assert (t.unfused_bytes, t.unfused_launches) == (OPERANDS_16 + unfused, unfused_launches)
    assert t.bytes_saved == unfused - fused and t.launches_saved == unfused_launches - launches
    assert t.intensity == t.flops / t.bytes


def test_traffic_of_the_library_schedule_counts_its_product_twice() -> None:
    spec = spec_of(PLAIN)
    own, vendor = traffic(spec, (M, N, K), tiled(128, 128, 64, 8, 3)), traffic(spec, (M, N, K), LIBRARY)
    assert (vendor.bytes - own.bytes, vendor.launches) == (2 * 4 * M * N, 2)


def test_a_program_that_the_vendor_computes_whole_is_one_launch() -> None:
    spec = spec_of("mm")
    assert traffic(spec, (M, N, K), LIBRARY) == traffic(spec, (M, N, K), tiled(128, 128, 64, 8, 3))


def test_a_reduction_that_the_last_block_completes_takes_no_launch() -> None:
    for text, launches in ((BACKWARD, 1), ("mm, bgrad(mm), sum(b, k), sum(mm)", 2)):
        inside, after = (traffic(spec_of(text), (M, N, K), cases.tiled(128, 128, 64, 8, 3, fused_finalize=i)) for i in (1, 0))
        assert (inside.launches, inside.bytes) == (launches, after.bytes)


def test_smaller_tiles_leave_more_partial_results() -> None:
    spec = spec_of(BACKWARD)
    small, large = (traffic(spec, (M, N, K), tiled(block, 128, 64, 4, 3)).bytes for block in (32, 128))
    assert small - large == 4 * N * (M // 32 - M // 128)


def test_scalars_and_int8() -> None:
    assert traffic(spec_of("mm * alpha"), (M, N, K)).bytes == OPERANDS_16 + TILE_16
    t = traffic(spec_of("cast(mm * scale_b[n], fp16)", INT8), (M, N, K))
    assert t.bytes == M * K + K * N + 4 * N + TILE_16
    # int32 product; as fp32; scaled; as fp16
    assert t.unfused_bytes == M * K + K * N + 4 * M * N + 8 * M * N + (8 * M * N + 4 * N) + (4 * M * N + TILE_16)
