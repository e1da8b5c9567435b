"""Ahead-of-time compilation for every target with no GPU at hand: stages, resources and refusals.

Triton's mode is fixed at its first import in a process, so compilers run in child processes. A child costs seconds to start: a test
sends it all of its jobs at once.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import cases
import pytest
from cases import persistent, split_k, warp_specialized
from compiling import BIG, assembly, compiled, job, outcomes, tiled
from golden import Golden
from programs import write_program
from strange_jobs import Chatter, Crash, Heavy, Refusal

from epigen import api, ops, settings
from epigen.codegen import lower, schedules
from epigen.codegen.spec import LAYOUTS
from epigen.commands import compile as cli_compile
from epigen.dtypes import BF16, BOOL, FAST_ACCUM, FP8E4M3, FP8E5M2, FP16, FP32, INT8, INT64, UINT8
from epigen.errors import CompileError, ConfigError
from epigen.gpus import TARGETS
from epigen.runtime import ahead, loader
from epigen.runtime.ahead import Job, Running, layout_constants
from epigen.runtime.loader import COMPILED_STAGES, Compiled

LIBRARY = schedules.config("library", block_m=8, block_n=128, num_warps=4)
pytestmark = pytest.mark.triton

PLAIN = "relu(mm + bias)"
FORWARD = "z = mm * alpha + bias; relu(z), bitmask(z > 0), bgrad(z), amax(z)"
ELABORATE = "y = gelu(mm) * gate[m,n] * scale_b[n]; y, sum(y, n), logsumexp(y), max(y, m) * 2, cast(tanh(y), fp16)"
BACKWARD = "dz = drelu(mm, mask) * scale_a[m]; dz, bgrad(dz), sum(dz, n), sum(a, k)"


def checked(one: Job, results: list[Compiled]) -> None:
    """What holds of every compiled module: each stage of the target is there and is its own, and the kernel can run there."""
    cuda = one.target.backend == "cuda"
    # Gluon is written at the level that Triton's own language is lowered to
    stages = ("ttir", "ttgir", "llir", "ptx", "cubin") if cuda else ("ttir", "ttgir", "llir", "amdgcn", "hsaco")
    assert len(results) == len(one.rendered.functions)
    for function, result in zip(one.rendered.functions, results, strict=True):
        assert tuple(result.stages) == stages[function.dialect == "gluon" :]
        for name in stages[1:-1]:
            text = result.stages[name]
            assert isinstance(text, str) and function.name in text
        binary = result.stages[stages[-1]]
        assert isinstance(binary, bytes) and binary.startswith(b"\x7fELF")
        assembly = result.stages[stages[3]]
        assert isinstance(assembly, str)
        where = rf"\.target {one.target.name}a?\b" if cuda else rf'\.amdgcn_target "[^"]*{one.target.name}"'
        assert re.search(where, assembly)
        r = result.resources
        assert 0 < r.registers <= (255 if cuda else 512)
        assert 0 <= r.shared_bytes <= one.target.shared_bytes
        assert 1 <= r.blocks_per_sm <= one.target.sm_blocks


def test_every_row_compiles_of_blocks_and_of_constants() -> None:
    """All rows in one program, of tiles; and of a constant and a scalar in the first place, which Triton takes otherwise than a block."""
    rows = [op for op in ops.TABLE.values() if op.result == ops.NUMBER and op.group != "rounded" and not op.symbol]

    def program(*others: str) -> str:
        calls = []
        for op in rows:
            args = ["mm > 0.25" if p.kind == ops.BOOLEAN else x for p, x in zip(op.params, (*others, "1.5"), strict=False)]
            calls.append(f"{op.name}({', '.join(args)})")
        return " + ".join([*calls, "mm"])

    texts = [program("mm", "mm + 1"), program("0.75", "mm"), program("s", "w[n]"), program("w[n]", "s")]
    jobs = [job(text, target, FP16, tiled(32, 32, 32, 4, 2)) for text, target in zip(texts, ("sm_90", "sm_90", "sm_80", "gfx942"), strict=True)]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


def test_means_compile_wherever_reductions_are_completed() -> None:
    """In kernels of their own and in the block that is the last, by Triton and by Gluon."""
    text = "z = mm + bias; z * extent(n), mean(z, m), mean(z, n), mean(z)"
    configs = [tiled(32, 32, 32, 4, 2), warp_specialized(fused_finalize=1)]
    jobs = [job(text, "sm_90", FP16, config, "nt") for config in configs]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


def test_booleans_and_integers_are_inputs() -> None:
    """Loaded as they lie, early or late, by Triton and by Gluon."""
    graph = api.graph_of("z = where(keep[m,n] != 0, mm * s, r[m]) + c[n]; z, bitmask(z > 0)")
    small, hopper = tiled(32, 32, 32, 4, 2), warp_specialized(prefetch=1, subtiles=2, block_n=128)
    jobs = []
    for dtype, config in ((BOOL, small), (UINT8, small), (INT64, small), (BOOL, hopper), (INT64, hopper)):
        held = tuple((n.name, dtype) for n in graph.inputs())
        signature = lower.signature_of_contiguous(graph, FP16, FP16, held, BIG, "nt", "ieee")
        jobs.append(Job(api.renderer().render(lower.lower(graph, signature), config), TARGETS["sm_90"], "nt"))
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


# -- TMA


def test_the_persistent_schedule_multiplies_straight_from_what_tma_brings() -> None:
    large = persistent(128, 256, 64, 8, 4, flatten=0, subtiles=2)
    jobs = [job(PLAIN, "sm_90", BF16, large, layout) for layout in LAYOUTS]
    jobs += [job(FORWARD, "sm_90", BF16, large, layout) for layout in ("nt", "tn")]
    jobs += [job(PLAIN, "sm_90", FP16, persistent(128, 256, 64, 8, 3, flatten=f, tma_store=0), "nt") for f in (0, 1)]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        text = assembly(results)
        loads, stores = (len(re.findall(rf"cp\.async\.bulk\.tensor\.2d\.{way}", text)) for way in (r"shared::\w+\.global", r"global\.shared"))
        assert "wgmma.mma_async" in text and loads >= 2, one.layout
        assert results[0].resources.spills == 0
        # each half leaves by itself
        assert (stores >= 2) == ("tma_store=1" in one.rendered.text) and (stores > 0) == (stores >= 2), one.layout
        # nothing else reads the operands: what is loaded otherwise belongs to the epilogue
        assert "cp.async.c" not in text


def test_groups_of_warps_multiply_straight_from_what_another_warp_loads() -> None:
    """Any epilogue is written in Gluon by the same lines: layouts follow from use."""
    pingpong, large = warp_specialized(128, 128, 64, 3, pingpong=1), warp_specialized(128, 256, 64, 2, subtiles=2)
    jobs = [job(PLAIN, "sm_90", FP16, pingpong, layout) for layout in LAYOUTS]
    jobs += [job(FORWARD, "sm_90", BF16, large, "nt"), job(ELABORATE, "sm_90", BF16, warp_specialized(128, 128, 64, 2, subtiles=2), "nt")]
    jobs.append(job(BACKWARD, "sm_90", FP16, warp_specialized(128, 128, 64, 3, pingpong=1, subtiles=2), "tn"))
    jobs.append(job(PLAIN, "sm_90", FP16, warp_specialized(256, 128, 64, 3, tma_store=0), "nt"))
    jobs.append(job("cast(mm, fp8e4m3), cast(mm, fp8e5m2), cast(mm, int8)", "sm_90", FP16, pingpong, "nt"))
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        text = assembly(results)
        assert "wgmma.mma_async" in text and "setmaxnreg.inc.sync.aligned.u32 \t240" in text.replace("u32 240", "u32 \t240"), one.rendered.text
        assert results[0].resources.registers == 168  # of three groups of 128 threads
        # a tile's first product is added to nothing: zeros to add it to would be written first, one an element
        assert re.search(r"wgmma\.mma_async.*\}, %rd\d+, %rd\d+, 0, 1, 1", text), one.rendered.text
        assert "cp.async.c" not in text
        assert all("griddepcontrol.wait" in str(r.stages["ptx"]) for r in results)


def test_a_kernel_waits_for_the_one_before_it_and_accesses_memory_after_that() -> None:
    """Where GPUs can launch it before that one has ended."""
    configs = [tiled(64, 64, 32, 2), split_k(), persistent(128, 128, 64, 8), persistent(128, 128, 64, 8, subtiles=2), LIBRARY]
    for one, results in zip(jobs := [job(FORWARD, "sm_90", FP16, config) for config in configs], compiled(jobs), strict=True):
        for result in results:
            before, wait, after = str(result.stages["ptx"]).partition("griddepcontrol.wait")
            accesses = re.compile(r"\b(ld\.global|st\.global|cp\.async|atom\.|red\.)")
            assert wait and not accesses.search(before) and accesses.search(after), one.rendered.text
    for one, results in zip(jobs := [job(FORWARD, target, FP16, tiled(64, 64, 32, 2)) for target in ("sm_80", "gfx942")], compiled(jobs), strict=True):
        assert "gdc_wait" in one.rendered.text and all("griddepcontrol" not in str(r.stages.get("ptx", r.stages.get("amdgcn"))) for r in results)


@pytest.mark.slow
def test_outputs_that_do_not_depend_on_the_product_have_its_layout() -> None:
    """Inputs that TMA brings, whole or in halves, among them."""
    configs = [warp_specialized(128, 128, 64, 2, pingpong=p, subtiles=1 + p, tma_load=1) for p in (0, 1)]
    configs.append(warp_specialized(128, 64, 64, 3, pingpong=0, subtiles=1))
    jobs = [job(text, "sm_90", FP16, configs[(i + more) % 3], "nt") for i, text in enumerate(cases.APART) for more in (0, 1)]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


@pytest.mark.slow
def test_any_program_can_be_written_in_gluon() -> None:
    """Where layouts follow from use, whatever uses what; at the tile that the plain rule takes."""
    configs = [warp_specialized(128, 128, 64, 3, pingpong=1, subtiles=2), warp_specialized(128, 64, 64, 2, tma_load=1)]
    jobs = [job(write_program(Random(seed), most=8, tame=True), "sm_90", FP16, configs[seed % 3 // 2], LAYOUTS[seed % 4]) for seed in range(6)]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


@pytest.mark.slow
def test_what_tma_brings_is_read_from_shared_memory() -> None:
    """No thread loads it from global memory, and none overwrites a buffer from which another has still to read."""
    backward, residual = "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)", "relu(mm + bias + residual)"
    jobs = [job(backward, "sm_90", (BF16, FP16)[p], warp_specialized(128, 128, 64, 4, pingpong=p, subtiles=2 - p, tma_load=1), "nt") for p in (0, 1)]
    jobs += [job(residual, "sm_90", (FP16, BF16)[p], warp_specialized(128, 128, 64, 4, pingpong=p, subtiles=1 + p, tma_load=1), "nt") for p in (0, 1)]
    jobs.append(job("cast(mm, fp8e5m2), cast(mm * residual, fp16)", "sm_90", FP16, warp_specialized(128, 64, 64, 2, tma_load=1), "tn"))
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        text = assembly(results)
        assert ("ld.global" in text) == ("bias" in one.rendered.text)
        # what happens between a barrier and the next, of each group of warps: a thread may read what another wrote, and the other way round
        phases = [set(re.findall(r"ldmatrix|stmatrix", phase)) for phase in re.split(r"bar\.sync", text)]
        assert {"ldmatrix"} in phases and {"stmatrix"} in phases and {"ldmatrix", "stmatrix"} not in phases, one.rendered.text
        assert results[0].resources.spills <= 16


@pytest.mark.slow
def test_what_tma_brings_into_buffers_of_its_own_comes_after_all_have_read_the_last() -> None:
    """No output is stored there, whose way out would be waited for."""
    gated, wider, largest = "silu(mm) * gate[m,n] + residual", "cast(mm + residual, fp32)", "amax(relu(mm + residual), n)"
    jobs = [job(gated, "sm_90", (BF16, FP16)[p], warp_specialized(128, 128, 64, 3, pingpong=p, subtiles=2, tma_load=1), "nt") for p in (0, 1)]
    jobs.append(job(wider, "sm_90", FP16, warp_specialized(128, 64, 64, 3, pingpong=1, tma_load=1), "nt"))
    jobs.append(job(largest, "sm_90", BF16, warp_specialized(128, 128, 64, 3, pingpong=1, subtiles=2, tma_store=0, tma_load=1), "nt"))
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        text = assembly(results)
        order = re.findall(r"bar\.sync|ldmatrix|bulk\.tensor\.2d\.shared", text)
        pairs = set(itertools.pairwise(order))
        assert "ld.global" not in text and ("ldmatrix", "bar.sync") in pairs and ("ldmatrix", "bulk.tensor.2d.shared") not in pairs, one.rendered.text
        assert results[0].resources.spills <= 32


@pytest.mark.slow
def test_softplus_of_a_whole_tile_stays_in_registers() -> None:
    """By a logarithm and a division it spilled 1,784 bytes a thread, and logsigmoid beside another function in halves 1,816, which took the compiler 7 s."""
    tile = {"block_m": 128, "block_n": 128, "num_stages": 5, "pingpong": 1}
    long = "h = logsigmoid(mm); z = dsigmoid(gain, sigmoid(gain)); exp(tanh(dgelu_tanh(mm, mm))) + z + tanh(rows[m]) ** 2, h"
    cases = (("softplus(mm + bias) * gate[m,n]", 1, 0), ("softplus(mm + bias)", 2, 0), ("logsigmoid(mm + bias)", 2, 0), (long, 2, 64))
    jobs = [job(text, "sm_90", BF16, warp_specialized(**tile, subtiles=subtiles), "nt") for text, subtiles, _ in cases]
    for one, results, (_, _, most) in zip(jobs, compiled(jobs), cases, strict=True):
        checked(one, results)
        assert results[0].resources.spills <= most, one.rendered.text


@pytest.mark.slow
def test_whoever_is_the_last_completes_narrow_reductions_in_registers() -> None:
    """A tile's part narrower than 128 columns: were each value held by several threads, up to 152 bytes a thread would be spilled, and each launch
    would take 9 to 13 us longer (Triton 3.6.0, H200: 22.2 against 13.3 us at 192x3072x896, in halves)."""
    parts = (
        {"block_m": 64, "block_n": 128, "num_stages": 6, "subtiles": 2},
        {"block_m": 64, "block_n": 16, "num_stages": 6},
        {"block_m": 64, "block_n": 32, "block_k": 128, "num_stages": 6},
        {"block_n": 128, "num_stages": 5, "subtiles": 2},
    )
    jobs = [job("dz = drelu(mm, mask); dz, bgrad(dz)", "sm_90", BF16, warp_specialized(**part, pingpong=1, fused_finalize=1), "nt") for part in parts]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        assert results[0].resources.spills == 0, one.rendered.text


@pytest.mark.slow
def test_sums_over_parts_of_k_move_sixteen_bytes_a_thread_and_fit_the_registers() -> None:
    """Each thread leaves its values side by side and finds them so: no exchange, and no more registers than the product takes."""
    shapes = (
        {"block_n": 256, "subtiles": 2, "splits": 3},
        {"block_m": 256, "block_n": 128, "subtiles": 2, "prefetch": 1, "splits": 2},
        {"block_n": 128, "pingpong": 1, "prefetch": 1, "splits": 4},
    )
    jobs = [job((PLAIN, BACKWARD)[i % 2], "sm_90", BF16, warp_specialized(**values), "nt") for i, values in enumerate((*shapes, shapes[2]))]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        moved = re.findall(r"(st\.global|ld\.global\.cg)\.(v4\.b32|v2\.b32|b32)", assembly(results))
        assert {("st.global", "v4.b32"), ("ld.global.cg", "v4.b32")} <= set(moved) and not any(
            way == "ld.global.cg" and size != "v4.b32" for way, size in moved
        )
        # with the rows of a mask apart, as they are at a launch: Triton 3.9 spills 24 bytes for one of these, 3.6 no more than 8
        assert results[0].resources.spills <= 24, one.rendered.text


@pytest.mark.slow
def test_parts_of_k_compile_with_whatever_is_held_meanwhile() -> None:
    """A name that is defined before the last part is told from the others keeps its layout behind that."""
    shapes = [{"pingpong": p, "subtiles": h, "prefetch": 1, "fused_finalize": o, "splits": 2} for p in (0, 1) for h, o in ((1, 0), (2, 1))]
    texts = (*cases.APART, BACKWARD)
    jobs = [job(text, "sm_90", FP16, warp_specialized(**shapes[(i + more) % 4]), "nt") for i, text in enumerate(texts) for more in (0, 1)]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


def test_the_last_block_completes_reductions_on_every_make() -> None:
    """The counter's addition orders memory for the whole GPU, and what others have left is read past the first cache."""
    configs = [cases.tiled(64, 64, 32, fused_finalize=1), persistent(flatten=0, fused_finalize=1), warp_specialized(pingpong=1, fused_finalize=1)]
    jobs = [job(text, "sm_90", BF16, config, "nt") for text in (BACKWARD, ELABORATE) for config in configs]
    jobs += [job(ELABORATE, target, FP16, configs[0]) for target in ("sm_80", "sm_120", "gfx90a", "gfx1201")]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        assert len(results) == 1 + ("sum(a, k)" in one.rendered.text)
        if one.target.backend == "cuda":
            assert re.search(r"atom\.global\.gpu\.acq_rel\.add|atom\.global\.acq_rel\.gpu\.add", assembly(results)) and "ld.global.cg" in assembly(results)


def test_operands_of_8_bits_are_multiplied_straight_from_shared_memory() -> None:
    """Promoted or not, whole or in subtiles, in several parts along k, and of a batch: none keeps a register in memory."""
    scaled, bare = "cast(relu(mm * s[m] * t[n] + bias[n]), bf16)", "mm"
    configs = [
        warp_specialized(128, 256, 128, 4, subtiles=2), warp_specialized(128, 128, 128, 5), warp_specialized(128, 128, 128, 3, subtiles=2, splits=3),
        warp_specialized(64, 256, 128, 4, pingpong=1, subtiles=2),
    ]  # fmt: skip
    jobs = [job(scaled, "sm_90", FP8E4M3, config, "nt") for config in configs]
    jobs += [job(scaled, "sm_90", FP8E4M3, config, "nt", precision=FAST_ACCUM) for config in configs]
    jobs += [job(scaled, "sm_90", INT8, config, "nt") for config in configs] + [job(bare, "sm_90", INT8, configs[1], "nt")]
    jobs.append(job(scaled, "sm_90", FP8E5M2, warp_specialized(128, 128, 128, 5, pingpong=1, prefetch=1), "nt", precision=FAST_ACCUM))
    jobs.append(job(scaled, "sm_90", FP8E4M3, configs[0], "nt", (8, 1024, 1024, 512)))
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        text = assembly(results)
        kind = "s32.s8.s8" if "accumulated in int32" in one.rendered.text else r"f32.e\dm\d.e\dm\d"
        assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.{kind}", text), one.rendered.text
        assert results[0].resources.spills == 0, one.rendered.text


@pytest.mark.slow
def test_the_persistent_schedule_multiplies_every_dtype_that_space_lets_it() -> None:
    jobs = [job(PLAIN, t, dtype, persistent(64, 64, 64), "nt") for t in ("sm_90", "sm_100", "sm_120") for dtype in (FP16, BF16, INT8, FP8E4M3, FP8E5M2)]
    jobs += [job(PLAIN, "sm_90", FP32, persistent(64, 64, 32), "nt", precision="tf32")]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


def test_a_config_that_is_given_compiles_for_a_dtype_or_says_why_it_cannot() -> None:
    """And does not end in a pass of Triton's."""
    jobs, refused = [], []
    for config in (persistent(64, 64, 64), warp_specialized(64, 64, 64, pingpong=1)):
        for dtype in (FP16, BF16, FP32, INT8, FP8E4M3, FP8E5M2):
            for layout in ("nt", "nn"):
                try:
                    jobs.append(job(PLAIN, "sm_90", dtype, config, layout, precision="tf32" if dtype == FP32 else None))
                except ConfigError as error:
                    refused.append(str(error))
    assert refused == [
        *["the schedule warp_specialized multiplies operands of 8 or 16 bits, and these are fp32"] * 2,
        *["the schedule warp_specialized multiplies operands of 8 bits that lie along k, as layout nt has them, and these lie as nn"] * 3,
    ]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


# -- all targets


def test_the_command_line_names_the_stages_that_there_are() -> None:
    assert cli_compile.COMPILED == COMPILED_STAGES


def test_every_target_compiles() -> None:
    jobs = [job(PLAIN, t, config=tiled(32, 32, 32, num_stages=2)) for t in TARGETS.values()]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)
        assert results[0].resources.spills == 0


OTHER = {"sm_80": INT8, "sm_86": BF16, "sm_89": FP8E4M3, "sm_90": FP8E5M2, "sm_100": FP8E4M3, "sm_120": FP32,
         "gfx90a": BF16, "gfx942": INT8, "gfx950": FP8E4M3, "gfx1100": FP32, "gfx1201": BF16}  # fmt: skip
# the instruction that multiplies fp16 tiles
MATRIX = {"sm_80": r"mma\.sync", "sm_86": r"mma\.sync", "sm_89": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma", "sm_120": r"mma\.sync",
          "gfx90a": "v_mfma", "gfx942": "v_mfma", "gfx950": "v_mfma", "gfx1100": "v_wmma", "gfx1201": "v_wmma"}  # fmt: skip


def test_the_tables_above_name_every_target() -> None:
    assert OTHER.keys() == MATRIX.keys() == TARGETS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_rules_configs_compile(target: str) -> None:
    """Both schedules, with and without masks and reductions, in fp16 and one more dtype."""
    by_rule, by_library = ((PLAIN, FP16), (BACKWARD, FP16), (FORWARD, OTHER[target])), ((FORWARD, FP16), (PLAIN, OTHER[target]))
    jobs = [job(text, target, dtype, config) for config, problems in ((None, by_rule), (LIBRARY, by_library)) for text, dtype in problems]
    found = compiled(jobs)
    for one, results in zip(jobs, found, strict=True):
        checked(one, results)
    assert re.search(MATRIX[target], assembly(found[0]))
    plain = [found[0], *found[len(by_rule) :]]
    assert [r.resources.spills for results in plain for r in results] == [0] * sum(map(len, plain))


def test_a_large_fp16_tile_on_hopper() -> None:
    """relu(mm + bias) by rule: warp-group products, nothing spilled."""
    one = job(PLAIN, "sm_90")
    (results,) = compiled([one])
    checked(one, results)
    assert ".target sm_90a" in assembly(results) and "wgmma.mma_async" in assembly(results)
    assert results[0].resources.spills == 0
    assert "cp.async" in assembly(results)  # loads run ahead of the products


def test_masks_and_reductions_on_cdna() -> None:
    one = job(FORWARD, "gfx942", config=tiled(num_stages=2))
    (results,) = compiled([one])
    checked(one, results)
    assert "v_mfma" in assembly(results)
    assert [f.name.removeprefix(one.rendered.functions[0].name) for f in one.rendered.functions] == ["", "_finish_n", "_finish"]


@pytest.mark.slow
def test_every_operand_dtype_and_layout_on_hopper() -> None:
    config = tiled(64, 64, 32)
    jobs = [job(PLAIN, "sm_90", dtype, config, layout) for dtype in (FP32, FP16, BF16, INT8, FP8E4M3, FP8E5M2) for layout in ("nn", "nt", "tn", "tt")]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


@pytest.mark.slow
def test_every_output_dtype_on_hopper() -> None:
    text = "cast(mm, fp32), cast(mm, fp16), cast(mm, bf16), cast(mm, fp8e4m3), cast(mm, fp8e5m2), cast(mm, int8)"
    jobs = [job(text, "sm_90", FP16, tiled(32, 32, 32)), job(text, "sm_90", FP16, LIBRARY), job(text, "gfx950", FP16, tiled(32, 32, 32, num_stages=2))]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


@pytest.mark.slow
def test_shapes_from_nothing_to_large_have_a_config_that_compiles() -> None:
    """What the rule gives for skinny, empty and odd problems is legal for the compiler too."""
    shapes = ((0, 0, 0), (1, 1, 1), (1, 4096, 4096), (17, 33, 5), (64, 64, 64), (300, 9, 1000), (2048, 2048, 128))
    jobs = [job(FORWARD, target, (FP16, INT8)[(i + j) % 2], shape=shape) for i, target in enumerate(("sm_90", "gfx942")) for j, shape in enumerate(shapes)]
    for one, results in zip(jobs, compiled(jobs), strict=True):
        checked(one, results)


def test_fp32_precision_reaches_the_assembly() -> None:
    ieee, tf32 = compiled([job("mm", "sm_80", FP32, tiled(32, 32, 32), precision=p) for p in ("ieee", "tf32")])
    assert "tf32" in assembly(tf32)
    assert "tf32" not in assembly(ieee) and "fma.rn" in assembly(ieee)
    (amd,) = compiled([job("mm", "gfx942", FP32, tiled(32, 32, 32), precision="tf32")])
    assert "xf32" in assembly(amd)


def test_the_layout_reaches_the_loads() -> None:
    """A contiguous operand is loaded in 16-byte pieces along its rows or its columns: both ways there is some vector load, and the texts differ."""
    texts = {
        layout: assembly(r)
        for layout, (r,) in zip(
            ("nn", "nt", "tn", "tt"), [[r] for r in compiled([job("mm", "sm_80", config=tiled(), layout=x) for x in ("nn", "nt", "tn", "tt")])], strict=True
        )
    }
    assert len(set(texts.values())) == 4
    for text in texts.values():
        assert re.search(r"cp\.async\.c[ag]\.shared\.global \[.*\], \[.*\], 0x10|ld\.global\S*\.v4", text)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("nn", {"stride_ak", "stride_bn"}), ("nt", {"stride_ak", "stride_bk"}), ("tn", {"stride_am", "stride_bn"}), ("tt", {"stride_am", "stride_bk"})],
)
def test_the_strides_that_contiguous_tensors_fix(layout: str, expected: set[str]) -> None:
    main, *_ = job("mm * scale_a[m] + bias + residual", "sm_90", config=tiled(64, 64, 32)).rendered.functions
    fixed = layout_constants(main, layout)
    assert set(fixed) == expected | {"stride_scale_a_m", "stride_bias_n", "stride_residual_n", "stride_out_n"}
    assert set(fixed.values()) == {1} and set(fixed) <= {a.name for a in main.arguments}


@pytest.mark.parametrize("text", ["mm + h_m[m] + g_n[n]", "mm * s_n", "sum(mm, m) * w_n[n] + s_m, mm"])
def test_only_strides_are_fixed(text: str) -> None:
    """An input may have a name that ends as a stride does."""
    for function in job(text, "sm_90", config=tiled(64, 64, 32)).rendered.functions:
        assert all(name.startswith("stride_") for name in layout_constants(function))


# -- refusals


def test_a_dtype_that_a_target_lacks_is_refused_in_one_line() -> None:
    """Not in kilobytes of intermediate code."""
    small = tiled(32, 32, 32)
    cast, operands, short_k = outcomes(
        [job("cast(mm, fp8e4m3)", "sm_80", config=small), job("mm", "sm_80", FP8E4M3, small), job("mm", "sm_90", INT8, tiled(32, 32, 16))]
    )
    for message in (cast, operands):
        assert re.fullmatch(r"epigen_\w+ does not compile for sm_80: .*fp8e4nv not supported.*", message)
        assert len(message) < 400
    assert re.fullmatch(r"epigen_mm does not compile for sm_90: .*K >= 32.*", short_k)


def test_what_a_called_function_is_refused_for_is_quoted() -> None:
    """Triton's refusal of the kernel says only where it calls; the cause is chained to it."""
    refused = CompileError("at 20:4:\n    gl.warp_specialize(\n    ^")
    refused.__cause__ = CompileError("at 46:23:\n    gl.clamp(x)\n    ^\nAttributeError(\"has no attribute 'clamp'\")")
    assert loader._last_words(refused) == "AttributeError(\"has no attribute 'clamp'\")"


def test_a_config_that_does_not_fit_in_shared_memory_is_refused() -> None:
    (message,) = outcomes([job("mm", "sm_86", config=tiled(64, 64, 128, 4, 6))])
    assert isinstance(message, str), message[0].resources
    assert "shared memory" in message and str(TARGETS["sm_86"].shared_bytes) in message


def test_a_crash_of_the_compiler_is_an_error_that_quotes_its_last_words(golden: Golden) -> None:
    with golden.raises(CompileError):
        Running(Crash()).result()  # type: ignore[arg-type]


def test_a_refusal_in_the_child_is_raised_here(golden: Golden) -> None:
    with golden.raises(CompileError):
        Running(Refusal()).result()  # type: ignore[arg-type]


def test_what_the_compiler_prints_does_not_disturb_the_answer() -> None:
    assert Running(Chatter()).result() == []  # type: ignore[arg-type]


def test_a_child_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    """It is gone before it has read the job."""
    monkeypatch.setattr(ahead.sys, "executable", "/bin/false")
    with golden.raises(CompileError):
        Running(Heavy()).result()  # type: ignore[arg-type]


def test_equal_jobs_give_equal_stages() -> None:
    """In two processes; the binary is left out, since it may hold what its assembler puts in of its own."""
    one = job(PLAIN, "sm_90", config=tiled(32, 32, 32))
    first, second = (Running(one).result() for _ in range(2))
    assert first[0].resources == second[0].resources
    assert {n: s for n, s in first[0].stages.items() if n != "cubin"} == {n: s for n, s in second[0].stages.items() if n != "cubin"}


# -- what the tuner's workers compile

WARMING = """
import cases
import epigen
from epigen.dtypes import FP16
from epigen.runtime import verify
from epigen.gpus import DEFAULT_TARGET

for config in (cases.tiled(), cases.LIBRARY, cases.split_k(), cases.persistent(), cases.warp_specialized(pingpong=1)):
    for shape in ((128, 128, 512), (135, 129, 513)):
        kernel = epigen.compile("relu(mm + bias)", config=config)
        given = verify.sample(kernel.graph, shape, FP16, FP16, FP16, device="meta", layout="nt")
        main, *_ = kernel.warm(given.a, given.b, DEFAULT_TARGET, **given.inputs)
        assert main.registers > 0
print("warmed")
"""


def test_every_schedule_is_compiled_for_tensors_that_are_not_there() -> None:
    environment = settings.child_environment(interpret=False)
    done = subprocess.run([sys.executable, "-c", WARMING], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "warmed\n", done.stderr


FOUND = """
import sys
from pathlib import Path

import cases
import epigen
from epigen.dtypes import FP16
from epigen.gpus import TARGETS
from epigen.runtime import verify
from epigen.runtime.ahead import Job

cache, shape = Path(sys.argv[1]), (384, 384, 512)
for target, config in (
    ("sm_80", cases.tiled()), ("sm_90", cases.split_k()), ("sm_90", cases.persistent()), ("sm_90", cases.warp_specialized(pingpong=1)),
    ("sm_90", cases.LIBRARY), ("gfx942", cases.tiled()), ("gfx1100", cases.LIBRARY), ("gfx1201", cases.tiled()),
):
    kernel = epigen.compile("z = mm * alpha + bias + gate[m,n]; z, bitmask(z > 0), bgrad(z)", config=config)
    plan = kernel.plan(shape, FP16, TARGETS[target], layout="nt")
    Job(plan.rendered, TARGETS[target], "nt", plan.by_vendor).run()
    known = set(cache.glob("*/*.ttgir"))
    given = verify.sample(kernel.graph, shape, FP16, FP16, FP16, device="meta", layout="nt")
    kernel.warm(given.a, given.b, TARGETS[target], **given.inputs)
    assert known and set(cache.glob("*/*.ttgir")) == known, (target, str(config))
print("found")
"""


def test_what_is_compiled_ahead_is_what_a_launch_runs(tmp_path: Path) -> None:
    """On AMD too, where a kernel of tensors of less than 2 GB is another one: a call finds all of it in Triton's cache."""
    environment = settings.child_environment(interpret=False) | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FOUND, str(tmp_path)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "found\n", done.stderr


def test_an_installation_without_its_tools_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of whoever strips what seems not to be needed: it was a traceback of a thread, and in tuning a process's status."""

    def run(command: list[str], **_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", command[0])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CompileError, match="cuobjdump"):
        loader._cubin_usage(b"")


# -- what ptxas gets wrong

ROUNDING = """
import cases
import epigen
from epigen.dtypes import BF16
from epigen.runtime import verify
from epigen.gpus import DEFAULT_TARGET

for text in ("x = cast(gate[m,n], fp8e4m3); cast(silu(x), fp8e4m3), x * mm", "x = cast(gate[m,n], fp8e5m2); x, x * mm"):
    kernel = epigen.compile(text, config=cases.SMALL)
    for shape in ((37, 45, 34), (128, 128, 64)):  # strides that align with nothing, and with everything
        given = verify.sample(kernel.graph, shape, BF16, BF16, BF16, device="meta", layout="nn")
        kernel.warm(given.a, given.b, DEFAULT_TARGET, **given.inputs)
"""


def misread(ptx: str) -> list[str]:
    """Pairs of fp8 that are packed with others after them and read elsewhere too: of those ptxas 12.8 and 12.9 read an undefined register."""
    pairs = set(re.findall(r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32 +(%rs\d+),", ptx))
    assert pairs
    first = pairs.intersection(re.findall(r"mov\.b32\s+%r\d+, {(%rs\d+), %rs\d+}", ptx))
    return sorted(r for r in first if len(re.findall(rf"{r}\b", ptx)) > 2)  # where it is written, and packed


def test_ptxas_loses_no_fp8(tmp_path: Path) -> None:
    """The register held the thread's number, and 127 is a NaN."""
    environment = settings.child_environment(interpret=False) | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ROUNDING], env=environment, capture_output=True, text=True, check=False)
    found = [misread(path.read_text()) for path in tmp_path.glob("*/epigen_*.ptx")]
    assert found == [[]] * 4, done.stderr
    packed = "cvt.rn.satfinite.e4m3x2.f32  %rs5, %r2, %r1;\nmov.b32 \t%r3, {%rs5, %rs6};\n"
    assert not misread(packed) and misread(packed + "cvt.u32.u16 \t%r4, %rs5;\n") == ["%rs5"]
