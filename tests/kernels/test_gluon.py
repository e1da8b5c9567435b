"""The warp-specialised schedule, run on the CPU against the float64 oracle; and what is out for its mistakes, shown to find them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import batched
import cases
import gluon_on_cpu
import grouped
import pytest
import torch
from cases import Case, mixed_input, warp_specialized
from gluon_hopper import Descriptor, Ragged
from gluon_values import Fault
from golden import Golden
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from programs import programs
from samples import arguments

import epigen
from epigen import ops
from epigen.codegen.lower import lower
from epigen.codegen.render import Rendered
from epigen.codegen.schedules import MIXED_INPUT as MIXED_INPUT_SCHEDULE
from epigen.codegen.schedules import WARP_SPECIALIZED
from epigen.codegen.spec import LAYOUTS, Numerics
from epigen.dtypes import BF16, BY_TORCH, FAST_ACCUM, FP8E4M3, FP8E5M2, FP16, FP32, INT8, UINT8, DType
from epigen.errors import ConfigError
from epigen.gpus import TARGETS
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.graph import Graph
from epigen.perf import model
from epigen.runtime import direct, outputs, verify

PROGRAMS = 3
"""Few, so that each has several tiles; the GPU has one a multiprocessor."""


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    """One thread for torch, which would start more for each partition; descriptors of the executor's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "describe_by_triton", lambda _dialect, t, block, ragged: (Ragged if ragged else Descriptor)(direct.upright(t), block))
        yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Executed:
    """A program that the executor runs, in place of a Kernel. edit: of the generated text. wide: with offsets of 64 bits. more: that it is compiled with."""

    case: Case
    seed: object
    edit: Callable[[str], str] = lambda text: text
    wide: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return epigen.compile(self.case.text).graph

    @property
    def numerics(self) -> Numerics:
        return epigen.compile(self.case.text, precision=self.case.precision, **self.more).numerics

    def load(self, rendered: Rendered) -> SimpleNamespace:
        return gluon_on_cpu.module(self.edit(rendered.text), self.seed)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: Mapping[str, torch.Tensor] | None = None, **inputs: torch.Tensor | float) -> list[torch.Tensor]:
        outs = out or {}
        kernel = epigen.compile(self.case.text, config=self.case.config, backend="triton", precision=self.case.precision, **self.more)
        kernel = kernel._grouped if g.GROUPS in inputs else kernel
        kernel._loaders[False] = self
        if self.wide:
            signature = kernel._signature
            kernel._signature = lambda *given: replace(signature(*given), index_bits=64)
        prepared = kernel._prepare((a, b), inputs, outs, target=replace(TARGETS["sm_90"], multiprocessors=PROGRAMS))
        results = prepared.results(outs)
        values = prepared.values((a, b), inputs, results)
        new = [t for o, t in zip(prepared.outputs, results, strict=True) if o.name not in outs]
        for t in (*new, *(values[b.name] for b in prepared.workspace.buffers)):
            t.untyped_storage().fill_(255)  # NaN, so that what is not written shows
        for launch in prepared.launches:
            launch(values)
        if values.get("num_arrived_ptr", torch.zeros(1)).any():
            raise Fault("the next launch begins to count where this one has ended")
        return results


def check(executed: Executed) -> None:
    case = executed.case
    found = verify.differences(executed, arguments(case, executed, "cpu"), case.precision)
    verify.demand(found)
    assert case.integers or all(d.promised > 0.5 for d in found.values()), found


@pytest.mark.parametrize("more", [{"rounding": "eager"}, {"invariant": "m"}, {"rounding": "eager", "invariant": "m"}], ids=" ".join)
@pytest.mark.parametrize("pingpong", [0, 1])
def test_how_it_is_computed(pingpong: int, more: dict[str, str]) -> None:
    """Tiles by TMA, and sums of rows and columns, beside it."""
    text = "y = silu(mm) * gate[m,n] + residual; y, bitmask(y > 0), bgrad(y), sum(y, n)"
    check(Executed(Case(text, (264, 200, 168), layout="nt", config=warp_specialized(128, 64, 64, pingpong=pingpong, tma_store=1, tma_load=1)), 0, more=more))


def small(case: Case) -> Case:
    """Fewer tiles and steps, with the same remainders."""
    m, n, k = case.shape
    return replace(case, shape=(min(m, 384 + m % 256), min(n, 384 + n % 256), min(k, 640 + k % 64)))


CASES = [small(c) for c in cases.all_cases() if c.config is not None and c.config.schedule == WARP_SPECIALIZED.name]
SCALED = [small(c) for c in cases.scaled_by_warpgroups()]
MIXED_INPUT = [small(c) for c in cases.mixed_input_cases()]


@pytest.mark.parametrize("case", cases.covering([c for c in CASES if not c.integers], 4), ids=str)
def test_warp_specialized(case: Case) -> None:
    check(Executed(case, seed=case))


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_fp8_with_scales_in_blocks(case: Case) -> None:
    check(Executed(case, seed=case))


@pytest.mark.parametrize("case", cases.covering(MIXED_INPUT, 4), ids=str)
def test_mixed_input(case: Case) -> None:
    check(Executed(case, seed=case))


@pytest.mark.parametrize("case", [c for c in CASES if c.integers], ids=str)
def test_integers_bit_for_bit(case: Case) -> None:
    executed = Executed(case, seed=case)
    given = arguments(case, executed, "cpu")
    results = executed(given.a, given.b, **given.inputs)
    expected = reference.evaluate(executed.graph, given.a, given.b, given.inputs, [BY_TORCH[str(r.dtype)] for r in results])
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=0)


@pytest.mark.parametrize("case", [c for c in CASES if c.config and c.config["tma_load"]], ids=str)
def test_what_is_loaded_has_room_on_the_gpu(case: Case) -> None:
    """The executor has no end of shared memory. Of several inputs in fp32 the buffers are more than a block of a Hopper GPU holds."""
    kernel = epigen.compile(case.text, precision=case.precision)
    given = arguments(case, kernel, "cpu")
    spec = lower(kernel.graph, kernel._signature(case.shape, (given.a, given.b), given.inputs, {}, outputs.of(kernel.graph, case.a)))
    assert case.config is not None
    assert model.resources(spec, case.config, TARGETS["sm_90"], case.shape).shared_bytes <= TARGETS["sm_90"].shared_bytes


TMA_LOADED = "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)"
EVERYTHING = "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n), where(mask, z, 0)"


@pytest.mark.parametrize("stages", WARP_SPECIALIZED.dimensions["num_stages"])
@pytest.mark.parametrize("pingpong", [0, 1])
def test_any_number_of_buffers(stages: int, pingpong: int) -> None:
    """Fewer and more than a tile has steps. One buffer would not do: it is handed back when the next step has been issued."""
    config = warp_specialized(128, 64, 32, stages, pingpong=pingpong)
    check(Executed(Case("relu(mm + bias)", (264, 200, 168), layout="nt", config=config), stages))


def test_one_buffer_is_refused(golden: Golden) -> None:
    with golden.raises(ConfigError):
        warp_specialized(num_stages=1)


@pytest.mark.parametrize("pingpong", [0, 1])
def test_offsets_of_64_bits(pingpong: int) -> None:
    check(Executed(Case(EVERYTHING, (264, 200, 72), layout="nt", config=warp_specialized(128, 64, 64, pingpong=pingpong)), 0, wide=True))


@pytest.mark.parametrize(("columns", "stored"), [(40, True), (36, False), (33, False)])
def test_nothing_is_written_past_the_ends_of_rows(columns: int, stored: bool) -> None:
    """TMA writes whole pieces of 16 bytes: only where rows are made of such pieces may it."""
    config = warp_specialized(128, 64, 64, pingpong=1, tma_load=1)
    executed = Executed(Case("relu(mm + residual)", (72, columns, 64), config=config), 0)
    wide, residual = torch.full((72, 48), 7.0).half(), torch.randn(72, 48).half()[:, :columns]
    a, b = torch.randn(72, 64).half(), torch.randn(64, 48).half()[:, :columns]
    kernel = epigen.compile(executed.case.text, config=config)
    signature = kernel._signature((72, columns, 64), (a, b), {"residual": residual}, {"out": wide[:, :columns]}, outputs.of(kernel.graph, FP16))
    assert signature.tma == ("a", "b", "residual", *(["out"] * stored))
    (found,) = executed(a, b, out={"out": wide[:, :columns]}, residual=residual)
    torch.testing.assert_close(found, torch.relu(a.float() @ b.float() + residual).half(), rtol=2e-3, atol=2e-3)
    assert (wide[:, columns:] == 7).all()


@pytest.mark.parametrize("subtiles", [1, 2, 4])
@pytest.mark.parametrize("pingpong", [0, 1])
def test_what_tma_brings_may_be_written_in_its_place(pingpong: int, subtiles: int) -> None:
    """Each tile is there before it leaves, and no other group of warps reads it."""
    case = Case(TMA_LOADED, (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=pingpong, subtiles=subtiles, tma_load=1))
    executed = Executed(case, seed=subtiles)
    given = arguments(case, executed, "cpu")
    z = given.inputs["z"]
    assert isinstance(z, torch.Tensor)
    expected = executed(given.a, given.b, z=z.clone())
    found = executed(given.a, given.b, out={"dz": z}, z=z)
    assert found[0] is z
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, int]:
    config = {name: draw(st.sampled_from(values)) for name, values in WARP_SPECIALIZED.dimensions.items()}
    if not config["pingpong"]:
        config["block_m"] = max(config["block_m"], 128)
    config["block_n"] = 64 if config["subtiles"] == 4 else min(config["block_n"], 64)
    if config["subtiles"] == 4 and config["tma_load"]:
        config["splits"] = 1
    config["num_stages"] = min(config["num_stages"], 3)
    return config


def test_all_that_rows_are_written_in_can_be_run() -> None:
    """Which of it the kernels of random programs meet hangs on how many rows there are."""
    used = set(re.findall(r"\btl\.(\w+)\(", Path(ops.__file__).read_text()))
    assert {"exp2", "sin"} <= used <= set(vars(gluon_on_cpu.LANGUAGE))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=8, tame=True, casts=(FP32, FP16, BF16)), configs(), st.sampled_from(LAYOUTS), st.sampled_from((FP16, BF16)))
def test_random_programs(text: str, values: dict[str, int], layout: str, a: DType) -> None:
    agree(Case(text, (200, 135, 70), a, inputs=FP32, layout=layout, config=warp_specialized(**values)))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=8, tame=True, casts=(FP32, FP16, BF16), second=True), configs(), st.sampled_from(LAYOUTS), st.sampled_from((FP16, BF16)))
def test_random_programs_of_two_products(text: str, values: dict[str, int], layout: str, a: DType) -> None:
    agree(Case(text, (200, 135, 70), a, inputs=FP32, layout=layout, config=warp_specialized(**values | {"splits": 1, "num_stages": 2})))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=8, tame=True, casts=(FP32, FP16, BF16), positions=True), configs(), st.sampled_from(LAYOUTS), st.sampled_from((FP16, BF16)))
def test_random_programs_of_positions(text: str, values: dict[str, int], layout: str, a: DType) -> None:
    agree(Case(text, (200, 135, 70), a, inputs=FP32, layout=layout, config=warp_specialized(**values)))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=8, tame=True, casts=(FP32, FP16, BF16), drawn=True), configs(), st.sampled_from(LAYOUTS), st.sampled_from((FP16, BF16)))
def test_random_programs_of_random_numbers(text: str, values: dict[str, int], layout: str, a: DType) -> None:
    agree(Case(text, (200, 135, 70), a, inputs=FP32, layout=layout, config=warp_specialized(**values)))


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs(most=8, tame=True, casts=(FP32, FP16, BF16)), configs(), st.sampled_from((FP8E4M3, FP8E5M2, INT8)), st.sampled_from(("ieee", FAST_ACCUM)))
def test_random_programs_of_8_bits(text: str, values: dict[str, int], a: DType, precision: str) -> None:
    config = warp_specialized(**values | {"block_k": max(values["block_k"], 32)})
    agree(Case(text, (200, 135, 330), a, inputs=FP32, layout="nt", config=config, precision=precision))


@st.composite
def mixed_configs(draw: st.DrawFn) -> dict[str, int]:
    config = {name: draw(st.sampled_from(values)) for name, values in MIXED_INPUT_SCHEDULE.dimensions.items()}
    return config | {"block_m": min(config["block_m"], 64), "num_stages": min(config["num_stages"], 3)}


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    programs(most=8, tame=True, reductions=False, casts=(FP32, FP16, BF16)),
    mixed_configs(),
    st.sampled_from((INT8, UINT8, FP8E4M3)),
    st.sampled_from((FP16, BF16)),
)
def test_random_programs_of_weights(text: str, values: dict[str, int], b: DType, a: DType) -> None:
    assume(not any(packed in text for packed in ("bitmask(", "bits(", "mask")))
    agree(Case(text, (200, 136, 176), a, b, inputs=FP32, layout="nt", config=mixed_input(**values)))


def agree(case: Case) -> None:
    executed = Executed(case, seed=case.text)
    try:
        verify.demand(verify.differences(executed, arguments(case, executed, "cpu"), case.precision))
    except Fault as fault:
        assume(not str(fault).endswith("bytes of shared memory"))  # many results leave room for small tiles alone
        raise


@pytest.mark.parametrize("config", batched.GROUPED)
@pytest.mark.parametrize("leads", batched.LEADS, ids=str)
@pytest.mark.parametrize("extents", [(33, 45, 20), (150, 72, 136)], ids=str)
def test_products_of_a_batch(leads: tuple[tuple[int, ...], ...], config: str, extents: tuple[int, int, int]) -> None:
    """Copied into aligned rows, and addressed as they lie."""
    a, b, inputs = batched.given(*leads, *extents, dtype=torch.float16)
    found = Executed(Case(batched.EVERYTHING, extents, config=batched.GROUPED[config]), seed=config)(a, b, **inputs)
    batched.same([x if x.dtype == torch.uint8 else x.float() for x in found], batched.expected(a, b, inputs))


@pytest.mark.parametrize(("ends", "config"), grouped.SOME)
def test_groups_of_rows(ends: str, config: str) -> None:
    several = [5 * end for end in grouped.ENDS[ends]]
    a, b, inputs = grouped.given(len(several), shared=False, m=5 * grouped.M, dtype=torch.float16)
    found = Executed(Case(grouped.ROWS, (5 * grouped.M, grouped.N, grouped.K), config=grouped.HOPPER[config]), seed=config)
    grouped.same(found(a, b, groups=grouped.ends_of(several), **inputs), several, a, b, inputs)


@pytest.mark.parametrize(("ends", "config"), grouped.SOME)
def test_groups_along_k(ends: str, config: str) -> None:
    several = [3 * end for end in grouped.ENDS[ends]]
    a, b, inputs = grouped.along_k(len(several), torch.float16, k=3 * grouped.EXTENT)
    found = Executed(Case(grouped.OF_K, (grouped.M, grouped.N, 3 * grouped.EXTENT), layout="tn", config=grouped.HOPPER[config]), seed=config)
    grouped.same_along_k(found(a, b, groups=grouped.ends_of(several), **inputs), several, a, b, inputs)


@pytest.mark.parametrize("config", [name for name, config in batched.GROUPED.items() if config["splits"] == 1])
@pytest.mark.parametrize("leads", batched.LEADS, ids=str)
@pytest.mark.parametrize("extents", [(33, 45, 20), (150, 72, 136)], ids=str)
def test_two_products_of_a_batch(leads: tuple[tuple[int, ...], ...], config: str, extents: tuple[int, int, int]) -> None:
    a, b, inputs = batched.given(*leads, *extents, dtype=torch.float16)
    given = {"up": b.flip(-1).contiguous(), "bias": inputs["bias"], "residual": inputs["residual"]}
    found = Executed(Case(batched.GATED, extents, config=batched.GROUPED[config]), seed=config)(a, b, **given)
    wanted = batched.expected_gated(a.float(), b.float(), given["up"].float(), inputs)
    batched.same([x.float() for x in found], [wanted[0].half().float(), wanted[1]])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("copy_in(a_desc, [batch_id", "copy_in(a_desc, [0"),
        ("copy_in(b_desc, [batch_id", "copy_in(b_desc, [0"),
        ("copy_in(up_desc, [batch_id", "copy_in(up_desc, [0"),
        ("copy_in(residual_desc, [batch_id", "copy_in(residual_desc, [0"),
        ("copy_out(z_desc, [batch_id", "copy_out(z_desc, [0"),
        ("first_bias_ptr + batch_id", "first_bias_ptr + 0 * batch_id"),
        ("first_out1_partial_ptr + batch_id", "first_out1_partial_ptr + 0 * batch_id"),
        ("first_num_arrived_ptr + batch_id", "first_num_arrived_ptr + 0 * batch_id"),
        ("tile_id = item_id % (tiles_m * tiles_n)", "tile_id = item_id"),
        (" * num_products", ""),
    ],
)
def test_what_is_of_another_product_is_found(right: str, wrong: str) -> None:
    def edit(text: str) -> str:
        assert right in text, text
        return text.replace(right, wrong)

    a, b, inputs = batched.given((3,), (3,), (3,), 136, 72, 72, torch.float16)
    bias, residual, up = inputs["bias"], inputs["residual"], b.flip(-1).contiguous()
    case = Case(
        "z = mm + dot(a, up[k,n]) + bias + residual; z, bgrad(z)", (136, 72, 72), config=warp_specialized(64, 64, pingpong=1, tma_load=1, fused_finalize=1)
    )
    z = a.float() @ (b.float() + up.float()) + bias[:, None, :] + residual
    try:
        found = Executed(case, 0, edit)(a, b, up=up, bias=bias, residual=residual)
    except Fault:
        return
    assert not all(torch.equal(x.float(), y) for x, y in zip(found, (z, z.sum(-2)), strict=True))


# -- mistakes that are found

FORWARD = "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)"
PINGPONG = Case(FORWARD, (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=1))
COOPERATIVE = Case(FORWARD, (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3))
LAST_BLOCK = Case(FORWARD, (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=1, fused_finalize=1))
PARTS = Case(FORWARD, (264, 136, 392), layout="nt", config=warp_specialized(128, 64, 64, 3, splits=3))
TWO_PARTS = Case(FORWARD, (264, 136, 392), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=1, splits=2))
SUBTILES = Case(FORWARD, (264, 328, 200), layout="nt", config=warp_specialized(128, 128, 64, 3, subtiles=2))
EARLY_HALVES = Case(FORWARD, (264, 328, 200), layout="nt", config=warp_specialized(128, 128, 64, 3, subtiles=2, prefetch=1))
PROMOTED = Case("relu(mm * scale_a[m])", (264, 272, 592), FP8E4M3, inputs=FP32, layout="nt", config=warp_specialized(128, 128, 64, 3, subtiles=2))
TWO = Case("z = mm + bias; relu(z), z", (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=1))
TMA_LOADED_PINGPONG = Case(TMA_LOADED, (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=1, tma_load=1))
TMA_LOADED_SUBTILES = Case(TMA_LOADED, (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3, subtiles=2, tma_load=1))
TMA_LOADED_IN_TURN = Case(TMA_LOADED, (264, 328, 200), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=1, subtiles=4, tma_load=1))
MIXED = Case("dot(a, int4(b) * s[k/64,n]) + bias", (136, 328, 320), BF16, UINT8, BF16, "nt", config=mixed_input(64, 128, 64, 3))
MIXED_WIDE = Case("dot(a, b * s[k/64,n]) + bias", (72, 520, 320), FP16, INT8, FP16, "nt", config=mixed_input(64, 256, 64, 2))
MIXED_PARTS = Case("silu(mm * s[n])", (72, 264, 528), FP16, INT8, FP16, "nt", config=mixed_input(32, 128, 64, 3, splits=3))

_FULL = "            mbarrier.wait(full_bars.index(slot_id), step_id // STAGES & 1)\n"
_EMPTY = "            mbarrier.wait(empty_bars.index(slot_id), step_id // STAGES & 1 ^ 1)\n"
_RELEASE = "        mbarrier.arrive(empty_bars.index((step_id + STAGES - 1) % STAGES))\n"
_MULTIPLIED = "            acc_turned = warpgroup_mma_wait(0, deps=(acc_turned,))\n"
_RELEASED = "            mbarrier.arrive(empty_bars.index(slot_id))\n"
_LAST = "        acc = warpgroup_mma_wait(0, deps=(acc,))\n"

WAIT = """    if PDL:
        # launched while the kernel before this one may still run, whose results are there from here on
        tl.extra.cuda.gdc_wait()
"""
MISTAKES = {
    # of the two groups' order: a wait for a buffer cannot tell a phase from the next but one
    "no order": (PINGPONG, "mbarrier.wait(order_bars.index(WARPGROUP), phase_id & 1 ^ 1 - WARPGROUP)", "pass"),
    "the other group is never let on": (PINGPONG, "mbarrier.arrive(order_bars.index(1 - WARPGROUP))", "pass"),
    "the other group first": (PINGPONG, "phase_id & 1 ^ 1 - WARPGROUP", "phase_id & 1 ^ WARPGROUP"),
    "always the first turn": (PINGPONG, "        phase_id += 1\n", ""),
    "the other group's steps are not counted": (PINGPONG, "        step_id += num_steps\n", ""),
    # of the buffers
    "no wait for a full buffer": (COOPERATIVE, _FULL, ""),
    "no wait for a full buffer, ping-pong": (PINGPONG, _FULL, ""),
    "no wait for an empty buffer": (COOPERATIVE, _EMPTY, ""),
    "no wait for an empty buffer, ping-pong": (PINGPONG, _EMPTY, ""),
    "the first wait for an empty buffer waits": (COOPERATIVE, "step_id // STAGES & 1 ^ 1", "step_id // STAGES & 1"),
    "a buffer is released a step early": (COOPERATIVE, "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
    "a buffer is released a step early, ping-pong": (PINGPONG, "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
    "the last buffer is released before the last product": (COOPERATIVE, _LAST + _RELEASE, _RELEASE + _LAST),
    "the last buffer is not released": (COOPERATIVE, _LAST + _RELEASE, _LAST),
    "a buffer is released by one group for both": (COOPERATIVE, "mbarrier.init(empty_bars.index(slot_id), count=2)", "mbarrier.init(empty_bars.index(slot_id), count=1)"),
    "fewer bytes are expected than come": (COOPERATIVE, "(BLOCK_M + BLOCK_N) * BLOCK_K * 2", "BLOCK_M * BLOCK_K * 2"),
    "more bytes are expected than come": (COOPERATIVE, "(BLOCK_M + BLOCK_N) * BLOCK_K * 2", "(BLOCK_M + BLOCK_N) * BLOCK_K * 4"),
    "barriers are not shown to the copies": (COOPERATIVE, "    fence_async_shared()\n    if PDL", "    if PDL"),
    "a group reads the other's rows": (COOPERATIVE, "a_bufs.index(2 * slot_id + WARPGROUP)", "a_bufs.index(2 * slot_id + 1 - WARPGROUP)"),
    # of weights that are converted in registers
    "no wait for a full buffer, mixed input": (MIXED, _FULL, ""),
    "no wait for an empty buffer, mixed input": (MIXED, _EMPTY, ""),
    "a buffer is released before it is multiplied": (MIXED, _MULTIPLIED + _RELEASED, _RELEASED + _MULTIPLIED),
    "a buffer of weights is not released": (MIXED, _RELEASED, ""),
    "a buffer of weights is released by one group for both": (MIXED, "mbarrier.init(empty_bars.index(slot_id), count=2)", "mbarrier.init(empty_bars.index(slot_id), count=1)"),
    "a buffer of weights is released by two groups of four": (MIXED_WIDE, "mbarrier.init(empty_bars.index(slot_id), count=4)", "mbarrier.init(empty_bars.index(slot_id), count=2)"),
    "a group converts the other's weights": (MIXED, "slice(COLUMNS * WARPGROUP, COLUMNS)\n", "slice(COLUMNS * (1 - WARPGROUP), COLUMNS)\n"),
    "a group has the other's scales": (MIXED, "slice(COLUMNS * WARPGROUP, COLUMNS, 1)", "slice(COLUMNS * (1 - WARPGROUP), COLUMNS, 1)"),
    "scales of another group along k": (MIXED, "[k // 64, ", "[k // 128, "),
    "scales are not expected": (MIXED, " + BLOCK_N * 2)", ")"),
    "a byte's values change places": (MIXED, "gl.join(in_even, in_odd)", "gl.join(in_odd, in_even)"),
    "bytes of weights are counted as values": (MIXED, "BLOCK_N * BLOCK_K // 2", "BLOCK_N * BLOCK_K"),
    "a step of weights does not add to the one before": (MIXED, "acc_turned, is_async=True)", "acc_turned, use_acc=False, is_async=True)"),
    "all groups store the same columns": (MIXED_WIDE, "part_n * COLUMNS], out_buf", "pid_n * BLOCK_N], out_buf"),
    "groups of a tile count their parts together": (MIXED_PARTS, "num_arrived_ptr + (2 * tile_id + WARPGROUP)", "num_arrived_ptr + 2 * tile_id"),
    "a part of a converted tile is left out": (MIXED_PARTS, "range(1, SPLITS)", "range(2, SPLITS)"),
    "groups leave their sums at one place": (MIXED_PARTS, "(2 * tile_id + WARPGROUP).to", "(2 * tile_id).to"),
    # of products that are promoted
    "a step's products are added before they are there": (PROMOTED, "warpgroup_mma_wait(0,", "warpgroup_mma_wait(1,"),
    "a buffer is released before its second subtile is multiplied": (PROMOTED, "            acc_left += step_acc\n", "            acc_left += step_acc\n            mbarrier.arrive(empty_bars.index(slot_id))\n"),
    "a buffer of promoted products is not released": (PROMOTED, "            mbarrier.arrive(empty_bars.index(slot_id))\n", ""),
    "both subtiles are of the same columns": (PROMOTED, "b.slice(SUBTILE_N, SUBTILE_N, 1)", "b.slice(0, SUBTILE_N, 1)"),
    # of sums over parts of k
    "sums are not shown before they are counted": (PARTS, "block_barrier()\n", "pass\n"),
    "one of two sums is not shown before it is counted": (TWO_PARTS, "block_barrier()\n", "pass\n"),
    "the last part but one is taken for the last": (PARTS, "SPLITS - 1:", "SPLITS - 2:"),
    "the parts' counters are left as they are": (PARTS, "gl.store(num_arrived_ptr", "(num_arrived_ptr"),
    "a part is left out": (PARTS, "range(1, SPLITS)", "range(2, SPLITS)"),
    "a part is added to itself": (TWO_PARTS, "(1 - split_id) *", "split_id *"),
    "each part begins at the first step": (PARTS, "range(split_id * num_steps * BLOCK_K, ", "range(0, "),
    "a part of a tile is left where another's is": (PARTS, "gl.store(split_ptrs + split_id *", "gl.store(split_ptrs + 0 *"),
    "both groups count their parts together": (PARTS, "num_arrived_ptr + (2 * tile_id + WARPGROUP)", "num_arrived_ptr + 2 * tile_id"),
    # of reductions that the last block completes
    "partial results are not shown before they are counted": (LAST_BLOCK, "block_barrier()\n", "pass\n"),
    "the last but one is taken for the last": (LAST_BLOCK, "tiles_m - 1:", "tiles_m - 2:"),
    "counters are left as they are": (LAST_BLOCK, "gl.store(num_arrived_ptr", "(num_arrived_ptr"),
    # of the accumulator
    "the epilogue begins before the last product": (COOPERATIVE, "warpgroup_mma_wait(0,", "warpgroup_mma_wait(1,"),
    "a step does not add to the one before": (COOPERATIVE, "warpgroup_mma(a, b, acc,", "warpgroup_mma(a, b, acc, use_acc=False,"),
    "the first step counts twice": (PINGPONG, "range(BLOCK_K, K,", "range(0, K,"),
    # of the stores
    "no wait before a store's buffer is overwritten": (COOPERATIVE, "        tma.store_wait(0)\n        out0_buf", "        out0_buf"),
    "no wait between subtiles": (SUBTILES, "            tma.store_wait(0)\n            out0_buf", "            out0_buf"),
    "no wait for the last store": (COOPERATIVE, "    tma.store_wait(0)\n\n\n@", "\n\n@"),
    "a store's buffer is not shown to the copy": (COOPERATIVE, "        fence_async_shared()\n        copy_out", "        copy_out"),
    "both groups store through one buffer": (PINGPONG, "out0_bufs.index(1)", "out0_bufs.index(0)"),
    "halves in the wrong order": (SUBTILES, "acc_left, acc_right = ", "acc_right, acc_left = "),
    "a buffer is overwritten while two copies are under way": (TWO, "tma.store_wait(1)", "tma.store_wait(2)"),
    # of inputs that are loaded ahead
    "the left half gets the right one's bias": (EARLY_HALVES, " bias_value = part_0_bias_value", " bias_value = part_1_bias_value"),
    "the right half's bias is of the left": (EARLY_HALVES, "part_n = 2 * pid_n + subtile_id\n            offs_col", "part_n = 2 * pid_n\n            offs_col"),
    # of inputs that come through a store's buffer
    "an input is not waited for": (TMA_LOADED_PINGPONG, "        mbarrier.wait(in_bar, phase_id & 1)\n", ""),
    "an input is waited for as one turn before": (TMA_LOADED_SUBTILES, "mbarrier.wait(in_bar, phase_id & 1)", "mbarrier.wait(in_bar, phase_id & 1 ^ 1)"),
    "all inputs are waited for as in the first turn": (TMA_LOADED_PINGPONG, "mbarrier.wait(in_bar, phase_id & 1)", "mbarrier.wait(in_bar, 0)"),
    "an input comes before the last tile has left": (TMA_LOADED_PINGPONG, "tma.store_wait(0)\n        mbarrier.expect(in_bar", "mbarrier.expect(in_bar"),
    "an input comes before the last tile has left, in subtiles": (TMA_LOADED_SUBTILES, "tma.store_wait(0)\n        mbarrier.expect(in_bar", "mbarrier.expect(in_bar"),
    "two inputs come into one buffer": (TMA_LOADED_SUBTILES, "in_bar, dz_bufs.index(2 * WARPGROUP + 1))", "in_bar, dz_bufs.index(2 * WARPGROUP + 0))"),
    "a half's input comes into the other's buffer": (TMA_LOADED_SUBTILES, "dz_buf = dz_bufs.index(2 * WARPGROUP + subtile_id)", "dz_buf = dz_bufs.index(2 * WARPGROUP + 1 - subtile_id)"),
    "fewer bytes of an input are expected than come": (TMA_LOADED_PINGPONG, "mbarrier.expect(in_bar, BLOCK_M", "mbarrier.expect(in_bar, BLOCK_M // 2"),
    "more bytes of an input are expected than come": (TMA_LOADED_PINGPONG, "mbarrier.expect(in_bar, BLOCK_M", "mbarrier.expect(in_bar, 2 * BLOCK_M"),
    "both groups' inputs share a barrier": (TMA_LOADED_PINGPONG, "in_bars.index(1),", "in_bars.index(0),"),
    "both groups' inputs share a buffer": (TMA_LOADED_PINGPONG, "dz_bufs.index(1),", "dz_bufs.index(0),"),
    "what was computed leaves before it is shown to the copy": (TMA_LOADED_SUBTILES, "            fence_async_shared()\n            copy_out", "            copy_out"),
    # of inputs that come in turn
    "a quarter's input is not waited for": (TMA_LOADED_IN_TURN, "            mbarrier.wait(in_bars.index(2 * WARPGROUP + subtile_id % 2), subtile_id // 2)\n", ""),
    "each quarter's input is waited for as the first": (TMA_LOADED_IN_TURN, "subtile_id % 2), subtile_id // 2)", "subtile_id % 2), 0)"),
    "an input comes before the quarter has left": (TMA_LOADED_IN_TURN, "                tma.store_wait(0)\n                mbarrier.expect", "                mbarrier.expect"),
    "an input comes before the last tile's quarters have left": (TMA_LOADED_IN_TURN, "        tma.store_wait(0)\n        mbarrier.expect", "        mbarrier.expect"),
    "the next quarter's input comes in place of the one after it": (TMA_LOADED_IN_TURN, "(part_n + 2) * SUBTILE_N", "(part_n + 1) * SUBTILE_N"),
    "a quarter's input comes into the other's buffer": (TMA_LOADED_IN_TURN, "dz_bufs.index(2 * WARPGROUP + subtile_id))", "dz_bufs.index(2 * WARPGROUP + 1 - subtile_id))"),
    "two quarters' inputs share a barrier": (TMA_LOADED_IN_TURN, "subtile_id % 2), subtile_id // 2)", "0), subtile_id // 2)"),
    "quarters in the wrong order": (TMA_LOADED_IN_TURN, "acc_0, acc_1 = ", "acc_1, acc_0 = "),
    "halves of quarters in the wrong order": (TMA_LOADED_IN_TURN, "acc_left, acc_right = ", "acc_right, acc_left = "),
    "the last two quarters' inputs do not come": (TMA_LOADED_IN_TURN, "if subtile_id < 2:", "if subtile_id < 0:"),
    # of what the kernel before leaves
    "operands are read before the kernel before has ended": (TMA_LOADED_PINGPONG, WAIT + "    gl.warp_specialize", "    gl.warp_specialize"),
    "a reduction is completed before the main kernel has ended": (TMA_LOADED_PINGPONG, WAIT + "    offs_x", "    offs_x"),
    # of offsets, masks and layouts
    "words of a mask past the last": (PINGPONG, "mask=in_kept_words", "mask=None"),
    "a bias past the last": (PINGPONG, "mask=offs_col < N, other=0.0", ""),
    "rows past the last are summed": (PINGPONG, "gl.where(offs_m < M, z, 0.0)", "z"),
    "tiles past the last": (PINGPONG, "size = min(tiles_m - first, GROUP_M)", "size = GROUP_M"),
    "words that no thread has": (PINGPONG, "[8, 0, 0, 0], *", "[4, 0, 0, 0], *"),
    "sums that no thread has": (PINGPONG, "[[0, 1, 0, 0], [0, 0, 0, 1], *", "[[0, 0, 0, 1], [0, 0, 0, 1], *"),
}  # fmt: skip


def test_what_is_computed_first_leaves_first() -> None:
    """Its copy is under way while the others are computed; and only the copy before it out of its own buffer is waited for."""
    text = epigen.compile(TWO.text, config=TWO.config).plan(TWO.shape, FP16, TARGETS["sm_90"], layout="nt").rendered.text
    assert text.index("z_buf.store(") < text.index("out0_buf.store(") and text.count("tma.store_wait(1)") == 2


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name: str) -> None:
    """By a Fault or by wrong results; in one of three orders of events at least."""
    case, right, wrong = MISTAKES[name]

    def edit(text: str) -> str:
        assert right in text, text
        return text.replace(right, wrong)

    def passes(seed: int) -> bool:
        try:
            check(Executed(case, seed, edit))
        except (Fault, verify.VerificationError):
            return False
        return True

    assert not all(passes(seed) for seed in range(3))


@pytest.mark.parametrize(
    "case", [PINGPONG, COOPERATIVE, LAST_BLOCK, PARTS, TWO_PARTS, SUBTILES, TMA_LOADED_PINGPONG, TMA_LOADED_SUBTILES, MIXED, MIXED_WIDE, MIXED_PARTS], ids=str
)
def test_the_same_without_a_mistake(case: Case) -> None:
    for seed in range(3):
        check(Executed(case, seed))


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("pingpong", [0, 1])
def test_sums_over_parts_of_k_do_not_depend_on_who_comes_last(splits: int, pingpong: int) -> None:
    case = Case("cast(mm, fp32)", (264, 136, 392), layout="nt", config=warp_specialized(128, 64, 64, 3, pingpong=pingpong, splits=splits))
    found = []
    for seed in range(4):
        executed = Executed(case, seed)
        given = arguments(case, executed, "cpu")
        found += executed(given.a, given.b, **given.inputs)
    assert len(found) == 4 and all(torch.equal(f, found[0]) for f in found)


def test_a_deadlock_says_who_waits_for_what() -> None:
    executed = Executed(PINGPONG, 0, lambda text: text.replace("mbarrier.arrive(order_bars.index(1 - WARPGROUP))", "pass"))
    with pytest.raises(Fault, match=r"^deadlock: .*consumer 0 of block 0 .*barrier 0 .*parity 0"):
        check(executed)


LAST_OF_ALL = """
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_up(total_ptr, partial_ptr, num_arrived_ptr, COUNT: gl.constexpr):
    tl.extra.cuda.gdc_wait()
    gl.store(partial_ptr + gl.program_id(0), 1)
    gl.barrier()
    if gl.atomic_add(num_arrived_ptr, 1, sem="acq_rel") == COUNT - 1:
        gl.store(total_ptr, gl.sum(gl.load(partial_ptr + gl.arange(0, COUNT)), 0))
"""


@pytest.mark.parametrize("barrier", [True, False])
def test_what_others_stored_is_seen_behind_their_barrier_alone(barrier: bool) -> None:
    text = LAST_OF_ALL if barrier else LAST_OF_ALL.replace("    gl.barrier()\n", "")
    right = []
    for seed in range(5):
        total, partial, num_arrived = (torch.zeros(size, dtype=torch.int32) for size in (1, 8, 1))
        gluon_on_cpu.module(text, seed).add_up[(8,)](total, partial, num_arrived, COUNT=8, num_warps=4, num_stages=1, enable_fp_fusion=True)
        assert num_arrived.item() == 8
        right.append(total.item() == 8)
    assert all(right) if barrier else not all(right)


COPY = """
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def copy(source_desc, BYTES: gl.constexpr):
    tl.extra.cuda.gdc_wait()
    buf = gl.allocate_shared_memory(source_desc.dtype, [64, 64], source_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, BYTES)
    tma.async_load(source_desc, [0, 0], bar, buf)
    # meanwhile
    mbarrier.wait(bar, 0)
    buf.store(buf.load(gl.AutoLayout()))
    fence_async_shared()
    mbarrier.expect(bar, BYTES)
    tma.async_load(source_desc, [0, 0], bar, buf)
    mbarrier.wait(bar, 1)
"""


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("# meanwhile", "buf.load(gl.AutoLayout())", "a buffer is read, and the copy into it"),
        ("# meanwhile", "buf.store(gl.zeros([64, 64], gl.float16))", "a buffer is written, and the copy into it"),
        ("# meanwhile", "tma.async_load(source_desc, [0, 0], bar, buf)", "a buffer is copied into, and the copy into it before"),
        ("    mbarrier.wait(bar, 0)", "    mbarrier.wait(bar, 1)", "a buffer is read, and the copy into it|deadlock"),
        ("    fence_async_shared()\n    mbarrier.expect(bar, BYTES)\n    tma.async_load(source_desc, [0, 0], bar, buf)\n    mbarrier.wait(bar, 1)",
         "    tma.async_load(source_desc, [0, 0], bar, buf)", "a buffer was written, and no fence has shown it to the copy into it"),
    ],
)  # fmt: skip
def test_a_buffer_is_left_alone_until_the_copy_into_it_was_waited_for(right: str, wrong: str, what: str) -> None:
    """Whether or not it has come by then."""
    source = Descriptor(torch.zeros(64, 64, dtype=torch.float16), (64, 64))
    options = {"BYTES": 64 * 64 * 2, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    assert COPY.count(right) == 1
    for seed in range(5):
        gluon_on_cpu.module(COPY, seed).copy[(1,)](source, **options)
        with pytest.raises(Fault, match=what):
            gluon_on_cpu.module(COPY.replace(right, wrong), seed).copy[(1,)](source, **options)
