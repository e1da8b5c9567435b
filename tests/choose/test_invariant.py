"""The configs of invariant programs: none that changes the order of a row's sums, for any M, target or layout, whatever the databases hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from golden import Golden
from tuned import RUN, TRITON

import epigen
from epigen.choose import choose
from epigen.choose.choose import Chooser, Within
from epigen.choose.space import Space
from epigen.codegen import schedules
from epigen.codegen.render import Renderer
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import EXACT_INT8, Choice, KernelConfig, Signature, k_multiple
from epigen.db.database import Database
from epigen.db.problem import problem_of
from epigen.db.records import Record
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, DType
from epigen.errors import CallError, ConfigError
from epigen.gpus import TARGETS, Target, by_name
from epigen.perf import limits
from epigen.runtime.kernel import Kernel
from epigen.shapes import Shape
from epigen.tuning.request import distinct, every
from epigen.tuning.tune import study_name

ROWS = (1, 7, 17, 64, 100, 257, 1000, 4096, 8192)
FEW = (1, 100, 1000, 8192)
"""From one row to the most, and between them none that a tile divides."""
SIZES = ((4096, 4096), (28672, 4096), (4096, 14336), (1003, 4097), (4099, 4096), (64, 100))
KINDS = ((FP16, "ieee"), (BF16, "ieee"), (FP32, "ieee"), (FP32, "tf32"), (FP8E4M3, "ieee"), (FP8E4M3, "fast_accum"), (INT8, "ieee"))
TILES, BY_ROWS = ("mm", "relu(mm + bias)", "y = silu(mm) * gate[m,n]; y, bitmask(y > 0), bgrad(y)"), ("mm, sum(mm, n)", "logsumexp(mm * gate[m,n], n)")
H200 = by_name("H200").target


def kernel_of(text: str, precision: str = "ieee") -> Kernel:
    return epigen.compile(text, precision=precision, invariant="m")


def placed(signature: Signature, k: int) -> Iterator[Signature]:
    """As the tensors of a call may lie: without gaps, in rows that TMA cannot address, in rows of odd lengths, and past 2^31."""
    yield signature
    yield replace(signature, tma=(), factors=(("stride_am", 2), ("stride_gate_m", 4)))
    yield replace(signature, tma=("b",), k_multiple=k_multiple(k), index_bits=64)
    yield replace(signature, tma=(), bytewise=("out",), batched=True)


def chosen(kernel: Kernel, shape: Shape, dtype: DType, target: Target, layout: str) -> Iterator[Choice]:
    for signature in placed(kernel.signature_of(dtype, shape, layout), shape[-1]):
        yield kernel.plan((3, *shape) if signature.batched else shape, target=target, signature=signature).choice


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans have no text, which takes as long as all else: of thousands that are chosen alone none is read."""
    monkeypatch.setattr(Renderer, "render", lambda *_: None)


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(("dtype", "precision", "text"), [(*kind, text) for kind in KINDS for text in (TILES if kind[0] == FP16 else TILES[-1:])], ids=str)
def test_on_hopper_no_m_splits_k_or_asks_the_vendor(dtype: DType, precision: str, text: str) -> None:
    kernel = kernel_of(text, precision)
    layouts = itertools.cycle(("nn", "nt"))  # of an odd number of M, so that each size meets both
    for (n, k), m in itertools.product(SIZES, ROWS):
        for choice in chosen(kernel, (m, n, k), dtype, H200, next(layouts)):
            config = choice.config
            if dtype != INT8:
                assert schedules.splits(config) == 1 and SCHEDULES[config.schedule].multiplies
            if dtype == FP8E4M3:
                assert config["block_k"] == 128 and config["block_m"] >= 64 and schedules.multiplying_warps(config) % 4 == 0


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
def test_elsewhere_and_where_rows_are_reduced_all_m_have_one_config(dtype: DType, precision: str, target: str) -> None:
    there = TARGETS[target]
    for text in BY_ROWS if target == "sm_90" or dtype == INT8 else (*BY_ROWS, *TILES):
        kernel = kernel_of(text, precision)
        layouts = itertools.cycle(("nn", "nt", "tt"))  # of four M, so that each meets all of them
        for n, k in SIZES[1:-1]:
            if not there.multiplies(dtype, dtype):
                with pytest.raises(ConfigError, match="does not multiply fp8e4m3; and the vendor's product"):
                    kernel.plan((16, n, k), target=there, signature=kernel.signature_of(dtype, (16, n, k)))
                continue
            found = {c.config: c for m in FEW for c in chosen(kernel, (m, n, k), dtype, there, next(layouts))}
            (config,) = found
            assert "one config for all M" in found[config].why
            assert not SCHEDULES[config.schedule].descriptors and schedules.splits(config) == 1
            assert SCHEDULES[config.schedule].multiplies or dtype == INT8
            spec = kernel.plan((64, n, k), target=there, signature=kernel.signature_of(dtype, (64, n, k))).spec
            assert limits.refusal(spec, config, (8192, n, k), there) == "", f"{config} is hopeless at 8192x{n}x{k} on {target}"


@pytest.mark.parametrize(
    ("text", "dtype", "weight"),
    [
        ("dot(a, int4(b) * s[k/128,n])", BF16, None),
        ("dot(a, b * s[k/64,n])", FP16, INT8),
        ("mm * s[n]", BF16, INT8),
        ("dot(a * sa[m,k/128], b * sb[k/128,n/128])", FP8E4M3, None),
    ],
)
def test_where_scales_may_be_taken_of_the_product_all_m_have_one_config(text: str, dtype: DType, weight: DType | None) -> None:
    """Tiles of few rows multiply the product by them, and higher ones the operand, which is then rounded: up to 64 rows had other bits than more."""
    kernel = epigen.compile(text, invariant="m")
    shapes = [(m, 4096, 4096) for m in (1, 16, 64, 65, 300, 4096)]
    plans = [kernel.plan(shape, target=TARGETS["sm_90"], signature=kernel.signature_of(dtype, shape, "nt", weight)) for shape in shapes]
    assert len({plan.choice.config for plan in plans}) == 1 and plans[0].choice.config.schedule == "tiled"


def test_a_product_that_is_given_has_one_config_where_its_rows_are_reduced() -> None:
    for text, count in (("sum(mm, n), amax(mm, n)", 1), ("relu(mm) + residual", 2)):
        kernel = kernel_of(text)._over
        assert len({kernel.plan((m, 1000, 0), dtype=BF16, target=H200).choice.config for m in (1, 3, 4096)}) <= count


def test_int8_past_what_is_exact_is_the_vendors_whose_sums_are_exact() -> None:
    kernel = kernel_of("mm * s, sum(mm, n)")
    plans = [kernel.plan((m, 64, EXACT_INT8 + 16), dtype=INT8, target=H200) for m in (1, 64, 3000)]
    assert len({p.choice.config for p in plans}) == 1 and all(p.by_vendor for p in plans)


def test_a_schedule_by_name_is_that_of_all_m_where_there_is_one() -> None:
    kernel = kernel_of("sum(mm, n)")
    for m in (1, 4096):
        signature = kernel.signature_of(FP16, (m, 4096, 4096))
        spec = kernel.plan((m, 4096, 4096), target=H200, signature=signature).spec
        assert Within("tiled")(spec, (m, 4096, 4096), H200, "").config == kernel.plan((m, 4096, 4096), target=H200, signature=signature).choice.config
        with pytest.raises(ConfigError, match="one config for all M, of the schedule tiled"):
            Within("persistent")(spec, (m, 4096, 4096), H200, "")


# -- what was tuned

SHAPE = (16, 4096, 4096)
WHOLE = schedules.config("tiled", block_m=16, block_n=32, block_k=128, group_m=8, num_warps=2, num_stages=5)
PARTS = schedules.config("split_k", **dict(WHOLE.values), splits=4)


@pytest.mark.parametrize("shape", [SHAPE, (13, 4096, 4096), (16, 4096, 4608)], ids=["the very one", "of its bucket", "near"])
def test_a_record_that_splits_k_is_not_taken(shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "triton_version", lambda: TRITON)
    for invariant, tuned, splits in ((None, PARTS, 4), ("m", PARTS, 1), ("m", WHOLE, 1)):
        kernel = epigen.compile("relu(mm + bias)", invariant=invariant)
        database = Database(tmp_path / f"{invariant}_{tuned.schedule}", seeds=())
        signature = kernel.signature_of(FP16, SHAPE, "nt")
        spec = kernel.plan(SHAPE, target=H200, signature=signature).spec
        database.add(Record.make(replace(problem_of(kernel.graph, spec, SHAPE, H200.part, "9.0"), invariant=""), tuned, **RUN))
        asked = kernel.signature_of(FP16, shape, "nt")
        config = Chooser(kernel.graph, database)(kernel.plan(shape, target=H200, signature=asked).spec, shape, H200, "").config
        assert schedules.splits(config) == splits, str(config)
        if tuned is WHOLE and shape[2] == SHAPE[2]:
            assert config == WHOLE, "what keeps the order is borrowed"


def test_of_two_records_of_a_problem_the_one_that_keeps_the_order_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "triton_version", lambda: TRITON)
    kernel = kernel_of("relu(mm + bias)")
    spec = kernel.plan(SHAPE, target=H200, signature=kernel.signature_of(FP16, SHAPE, "nt")).spec
    database = Database(tmp_path, seeds=())
    problem = replace(problem_of(kernel.graph, spec, SHAPE, H200.part, "9.0"), invariant="")
    database.add(Record.make(problem, PARTS, **RUN), Record.make(problem, WHOLE, **{**RUN, "triton": "3.6.0"}))
    found = Chooser(kernel.graph, database)(spec, SHAPE, H200, "")
    assert found.config == WHOLE and "under Triton 3.6.0" in found.why


@pytest.mark.parametrize("shape", [SHAPE, (13, 4096, 4096), (16, 4096, 4608)], ids=["the very one", "of its bucket", "near"])
@pytest.mark.parametrize("ordinary", [PARTS, WHOLE], ids=lambda config: config.schedule)
def test_what_was_tuned_as_invariant_is_for_such_programs_alone(
    ordinary: KernelConfig, shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get it before what was tuned otherwise, and others never do, were it the only one. Where it is borrowed it may be either that keeps the order."""
    monkeypatch.setattr(choose, "triton_version", lambda: TRITON)
    own = WHOLE.with_value("block_n", 16)
    for configs in ((ordinary, own), (None, own), (ordinary, None)):
        database = Database(tmp_path / f"{configs[0]}{configs[1]}", seeds=())
        found = []
        for invariant, config in zip((None, "m"), configs, strict=True):
            kernel = epigen.compile("relu(mm + bias)", invariant=invariant)
            spec = kernel.plan(SHAPE, target=H200, signature=kernel.signature_of(FP16, SHAPE, "nt")).spec
            if config is not None:
                database.add(Record.make(problem_of(kernel.graph, spec, SHAPE, H200.part, "9.0"), config, **RUN))
        for invariant in (None, "m"):
            kernel = epigen.compile("relu(mm + bias)", invariant=invariant)
            spec = kernel.plan(shape, target=H200, signature=kernel.signature_of(FP16, shape, "nt")).spec
            found.append(Chooser(kernel.graph, database)(spec, shape, H200, ""))
        plain, rows = found
        if configs[1] and shape[2] == SHAPE[2] and (shape == SHAPE or configs[0] != WHOLE):
            assert rows.config == own
        assert schedules.splits(rows.config) == 1
        if configs[0] is None:
            assert plain.config != own and "tuned" not in plain.why
        elif shape[2] == SHAPE[2]:
            assert plain.config == ordinary


def test_a_task_is_one_of_configs_that_keep_the_order() -> None:
    (asked,) = every(["relu(mm + bias)"], [SHAPE], ["bf16"], invariant="m")
    task = asked.task(H200)
    space = Space(task.spec, SHAPE, H200)
    assert task.problem.invariant == "m" and "split_k" not in space.schedules and "library" not in space.schedules
    assert all(schedules.splits(config) == 1 for config in space.outline())
    (ordinary,) = every(["relu(mm + bias)"], [SHAPE], ["bf16"])
    assert len(distinct([asked, ordinary, asked])) == 2 and study_name(task) != study_name(ordinary.task(H200))


@pytest.mark.parametrize(("text", "dtype", "target"), [("sum(mm, n)", "bf16", H200), ("mm", "fp32", H200), ("mm", "bf16", TARGETS["sm_80"])])
def test_where_all_m_have_one_config_there_is_nothing_to_tune(text: str, dtype: str, target: Target, golden: Golden) -> None:
    (asked,) = every([text], [SHAPE], [dtype], invariant="m")
    with golden.raises(CallError, f"{text} {dtype} {target.name}"):
        asked.task(target)


def test_why_a_given_config_is_refused() -> None:
    def plan(config: KernelConfig, text: str = "relu(mm)") -> Choice:
        return epigen.compile(text, config=config, invariant="m").plan(SHAPE, target=H200).choice

    with pytest.raises(ConfigError, match=r"adds up all of k in one order, and split_k with splits=4 adds up parts"):
        plan(PARTS)
    with pytest.raises(ConfigError, match="the vendor's product in one that depends on M"):
        plan(schedules.config("library", block_m=8, block_n=128, num_warps=1, fused_finalize=0))
    assert plan(WHOLE).config == plan(WHOLE, "sum(mm, n)").config == WHOLE
