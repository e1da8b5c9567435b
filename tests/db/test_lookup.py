"""Which tuned config a problem gets: the order of look-up, its sentences, and the distance between problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import persistent, warp_specialized
from counting import calls
from golden import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from tuned import A100, H100, NAME, OTHER_KIND, OTHER_SPEC, RUN, TRITON, config, opened, problem, record

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.choose import Chooser
from epigen.choose.space import Space
from epigen.codegen.lower import lower
from epigen.codegen.spec import LAYOUTS, Choice, KernelConfig, Signature, with_layout
from epigen.db.database import Database
from epigen.db.lookup import FARTHEST, Index, Recorded, distance, version_order
from epigen.db.problem import Problem, problem_of
from epigen.db.records import Record, merged
from epigen.dtypes import FP16
from epigen.gpus import TARGETS
from epigen.ir.check import check
from epigen.ir.passes import normalise
from epigen.lang.parser import parse
from epigen.perf import limits, model


def test_look_up_takes_the_steps_in_order(tmp_path: Path) -> None:
    """From the last step to the first, each new record is preferred to all before it, and says why."""
    chain = opened(tmp_path)
    wanted = problem((4096, 4096, 4096), a="bf16", b="bf16", inputs=("bf16[n]",), outputs=("bf16",))
    like: dict[str, Any] = {"a": "bf16", "b": "bf16", "inputs": ("bf16[n]",), "outputs": ("bf16",)}
    h100: dict[str, Any] = {"gpu": H100[0]}
    other: dict[str, Any] = {"program": "gelu(mm + bias)", "spec": OTHER_SPEC}
    steps: list[tuple[Record, str, str]] = [
        (record(**h100, **other), "architecture", "borrowed from 4096x4096x4096 (with fp16 operands, with inputs fp16[n]), the nearest tuned shape of an epilogue of this class, gelu(mm + bias), on NVIDIA H100 80GB HBM3, of the same architecture; not scaled, since both have 132 multiprocessors"),
        (record(**h100, **other, **like), "architecture", "borrowed from 4096x4096x4096, the nearest tuned shape of an epilogue of this class, gelu(mm + bias), on NVIDIA H100 80GB HBM3, of the same architecture; not scaled, since both have 132 multiprocessors"),
        (record(**h100), "architecture", "borrowed from 4096x4096x4096 (with fp16 operands, with inputs fp16[n]), the nearest tuned shape of this program on NVIDIA H100 80GB HBM3, of the same architecture; not scaled, since both have 132 multiprocessors"),
        (record(**h100, **like), "architecture", "borrowed from 4096x4096x4096, the nearest tuned shape of this program on NVIDIA H100 80GB HBM3, of the same architecture; not scaled, since both have 132 multiprocessors"),
        (record(**other), "kind", "borrowed from 4096x4096x4096 (with fp16 operands, with inputs fp16[n]), the nearest tuned shape of an epilogue of this class, gelu(mm + bias), on NVIDIA H200"),
        (record(**other, **like), "kind", "borrowed from 4096x4096x4096, the nearest tuned shape of an epilogue of this class, gelu(mm + bias), on NVIDIA H200"),
        (record((16384, 4096, 4096), alignment=8, **like), "shape", "borrowed from 16384x4096x4096 (with rows aligned to 8 bytes), the nearest tuned shape of this program on NVIDIA H200"),
        (record((8192, 4096, 4096), **like), "shape", "borrowed from 8192x4096x4096, the nearest tuned shape of this program on NVIDIA H200"),
        (record(), "shape", "borrowed from 4096x4096x4096 (with fp16 operands, with inputs fp16[n]), the nearest tuned shape of this program on NVIDIA H200"),
        (record(triton="3.6.0", **like), "triton", "tuned for 4096x4096x4096 on NVIDIA H200 under Triton 3.6.0, and 3.9.0 is the present one"),
        (record(triton="3.10.0", **like), "triton", "tuned for 4096x4096x4096 on NVIDIA H200 under Triton 3.10.0, and 3.9.0 is the present one"),
        (record(**like), "exact", "tuned for 4096x4096x4096 on NVIDIA H200 (exact)"),
    ]  # fmt: skip
    assert chain.find(wanted, TRITON) is None
    for added, how, why in steps:
        chain.add(added)
        found = chain.find(wanted, TRITON)
        assert found is not None
        assert (found.record, found.how, found.why, found.config) == (added, how, why, added.kernel_config)
    assert chain.complaints == ()


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": A100[0], "capability": A100[1]},
        {"a": "fp32", "b": "fp32", "precision": "tf32"},
        {"a": "fp8e4m3", "b": "fp8e4m3"},
        {"b": "fp32"},
        {"shape": (4096, 4096, 4096 * 2**9)},
        {"shape": (4096 * 2**5, 4096, 4096)},
        {"shape": (4096, 128, 4096)},
        {"shape": (0, 4096, 4096)},
    ],
)
def test_what_is_too_different_is_not_borrowed(tmp_path: Path, other: dict[str, Any]) -> None:
    chain = opened(tmp_path)
    chain.add(record(**other))
    assert chain.find(problem(), TRITON) is None


def test_another_program_lends_last(tmp_path: Path, golden: Golden) -> None:
    """Even one of another class, since the product is the same; but one of the same class goes first, however far."""
    chain = opened(tmp_path)
    chain.add(record(spec=OTHER_SPEC, kind=OTHER_KIND, config=config(64)))
    found = chain.find(problem(), TRITON)
    assert found and (found.how, found.record.spec) == ("program", OTHER_SPEC)
    golden(found.why)
    chain.add(record((2048, 4096, 4096), spec=OTHER_SPEC, config=config(128)))
    assert [f.how for f in chain.nearest(problem(), TRITON, 9)] == ["kind", "program"]


def test_full_precision_does_not_borrow_from_tf32(tmp_path: Path) -> None:
    chain = opened(tmp_path)
    chain.add(record(a="fp32", b="fp32", precision="tf32"))
    assert chain.find(problem(a="fp32", b="fp32", precision="ieee"), TRITON) is None
    assert chain.find(problem(a="fp32", b="fp32", precision="tf32"), TRITON)


def test_integers_do_not_borrow_from_floats(tmp_path: Path) -> None:
    chain = opened(tmp_path)
    chain.add(record(a="fp8e5m2", b="fp8e5m2"))
    assert chain.find(problem(a="int8", b="int8"), TRITON) is None
    found = chain.find(problem(a="fp8e4m3", b="fp8e5m2"), TRITON)
    assert found and (found.record.a, found.record.b) == ("fp8e5m2", "fp8e5m2")


def test_the_same_shape_in_the_other_half_precision_goes_before_a_shape_twice_as_large(tmp_path: Path) -> None:
    bf16: dict[str, Any] = {"a": "bf16", "b": "bf16", "inputs": ("bf16[n]",), "outputs": ("bf16",)}
    chain = opened(tmp_path)
    chain.add(record(config=config(64), **bf16), record((8192, 4096, 4096), config=config(128)))
    found = chain.find(problem(), TRITON)
    assert found and found.config == config(64) and (found.record.shape, found.record.a) == ((4096, 4096, 4096), "bf16")
    chain.add(record((4096, 4096, 4000), config=config(32)))
    assert chain.find(problem(), TRITON).config == config(32)  # type: ignore[union-attr]


def test_another_layout_is_borrowed_from_where_tma_loads(tmp_path: Path) -> None:
    chain = opened(tmp_path)
    chain.add(record(layout="nt"))
    assert chain.find(problem(), TRITON) is None
    chain.add(record((8192, 8192, 4096), config=warp_specialized(128, 256), layout="nt"))
    found = chain.find(problem(), TRITON)
    assert found and found.config == warp_specialized(128, 256) and found.record.layout == "nt"
    assert found.why.startswith("borrowed from 8192x8192x4096 (in layout nt)")


# -- another GPU of the same architecture

PCIE: dict[str, Any] = {"gpu": "NVIDIA H100 PCIe"}  # 114 multiprocessors, and an H200 has 132


def test_on_a_smaller_gpu_the_shape_of_as_many_waves_is_borrowed(tmp_path: Path, golden: Golden) -> None:
    """4096x3584 is to 114 multiprocessors what 4096x4150 is to 132: 4096x4096 goes before 4096x3584 itself."""
    chain = opened(tmp_path)
    chain.add(record((4096, 3584, 4096), config=config(64)), record(config=config(128)))
    assert chain.find(problem((4096, 3584, 4096)), TRITON).config == config(64)  # type: ignore[union-attr]
    found = chain.find(problem((4096, 3584, 4096), **PCIE), TRITON)
    assert found and (found.how, found.config) == ("architecture", config(128))
    golden(found.why)
    # and the other way: what the smaller one was tuned for is larger to the larger one
    chain = opened(tmp_path / "back")
    chain.add(record((4096, 3584, 4096), config=config(64), **PCIE), record(config=config(128), **PCIE))
    back = chain.find(problem(), TRITON)
    assert back and (back.config, back.record.gpu) == (config(64), "NVIDIA H100 PCIe")


def test_a_skinny_shape_is_scaled_along_its_long_side(tmp_path: Path) -> None:
    assert distance(problem((16, 4096, 4096)), problem((16, 4096 * 132 // 114, 4096), **PCIE)) > distance(
        problem((16, 4096, 4096)), problem((16, 4096 * 114 // 132, 4096), **PCIE)
    )
    chain = opened(tmp_path)
    chain.add(record((16, 4096, 4096), config=config(16)), record((16, 4736, 4096), config=config(32)))
    assert chain.find(problem((16, 4096, 4096), **PCIE), TRITON).config == config(32)  # type: ignore[union-attr]


def test_the_gpu_with_the_likest_bandwidth_goes_first(tmp_path: Path) -> None:
    """An H100 has an H200's multiprocessors, and 70 % of its bandwidth; an H100 PCIe has 15 % fewer, with half an H200's bandwidth each."""
    chain = opened(tmp_path)
    chain.add(record(config=config(32), gpu="NVIDIA H100 PCIe"), record(config=config(64), gpu="NVIDIA H100 80GB HBM3"))
    assert chain.find(problem(), TRITON).config == config(64)  # type: ignore[union-attr]


def test_a_gpu_of_no_table_lends_unscaled(tmp_path: Path) -> None:
    chain = opened(tmp_path)
    chain.add(record(gpu="NVIDIA H200 MIG 3g.71gb"), record((4096, 4096, 2048), gpu="NVIDIA H200 MIG 3g.71gb", config=config(64)))
    found = chain.find(problem(), TRITON)
    assert found and found.config == config()
    assert found.why.endswith("on NVIDIA H200 MIG 3g.71gb, of the same architecture; not scaled, since the size of one of the two is unknown")


def test_a_borrowed_config_is_legal_where_it_goes(tmp_path: Path) -> None:
    """As a kernel asks: the nearest record's tile is larger than the result there is, so the next nearest serves."""
    database = opened(tmp_path)
    graph = normalise(check(parse("relu(mm + bias)")))
    spec = lower(graph, Signature(FP16, FP16, (("bias", FP16),), k_multiple=256))
    pcie = gpus.by_name("H100 PCIe").target
    for shape, block_m in (((64, 8192, 4096), 64), ((72, 8192, 4096), 128)):
        tuned = problem_of(graph, spec, shape, "NVIDIA H200", "9.0")
        database.add(Record.make(tuned, config(block_m, group_m=1), **RUN))
    wanted = (60, 8192, 4096)
    first = database.find(problem_of(graph, spec, wanted, pcie.part, "9.0"), TRITON)
    assert first and first.config == config(128, group_m=1), "by distance alone"
    found = Chooser(graph, database)(spec, wanted, pcie, "")
    assert found.config == config(64, group_m=1) and not limits.refusal(spec, found.config, wanted, pcie)
    assert isinstance(found, Recorded) and (found.record.shape, found.record.gpu) == ((64, 8192, 4096), "NVIDIA H200")


def test_a_borrowed_config_has_as_many_stages_as_there_is_room_for(tmp_path: Path) -> None:
    """What was measured for the very problem is taken as it is, though the model thinks it too large."""
    database, here = opened(tmp_path), gpus.by_name("H200").target
    shape, deep = (8192, 8192, 1024), warp_specialized(128, 128, 64, 6, pingpong=1, subtiles=2, group_m=8)

    def asked(text: str, own: KernelConfig | None = None) -> Choice:
        kernel = epigen.compile(text)
        spec = kernel.plan(shape, FP16, here, layout="nt").spec
        if own is not None:
            database.add(Record.make(problem_of(kernel.graph, spec, shape, here.part, "9.0"), own, **RUN))
        return Chooser(kernel.graph, database)(spec, shape, here, "")

    assert asked("relu(mm + bias)", deep).config == deep
    found = asked("z = mm + bias; relu(z), z")
    assert found.config == warp_specialized(128, 128, 64, 5, pingpong=1, subtiles=2, group_m=8)
    assert found.why.endswith("; here with num_stages=5")
    assert asked("z = mm + bias; relu(z), z", deep).config == deep


BOTH = "relu(mm + bias) + residual"


def test_other_inputs_are_near_and_said_so(tmp_path: Path) -> None:
    """An fp32 bias beside an fp16 residual is another problem; a residual of another size lies farther than a bias of another size."""
    chain = opened(tmp_path)
    wanted = problem(program=BOTH, inputs=("fp32[n]", "fp16[mn]"))
    steps = [
        (("fp32[n]", "fp32[mn]"), "with inputs fp32[n], fp32[mn]"),
        (("fp16[n]", "fp16[mn]"), "with inputs fp16[n], fp16[mn]"),
        (("fp32[n]", "bf16[mn]"), "with inputs fp32[n], bf16[mn]"),
    ]
    for inputs, how in steps:
        chain.add(record(program=BOTH, inputs=inputs))
        found = chain.find(wanted, TRITON)
        assert found and (found.how, found.record.inputs) == ("shape", inputs) and f"({how})" in found.why
    chain.add(record(program=BOTH, inputs=wanted.inputs, median_us=500))
    found = chain.find(wanted, TRITON)
    assert found and (found.how, found.record.median_us) == ("exact", 500)
    assert len(chain.records()) == 4, "none takes another one's place"


def test_the_distance_of_inputs() -> None:
    def apart(one: tuple[str, ...], other: tuple[str, ...]) -> float:
        return distance(problem(inputs=one), problem(inputs=other))

    assert apart(("fp16[n]",), ("bf16[n]",)) == 0
    assert apart(("fp16[n]", "fp32[mn]"), ("fp32[mn]", "fp16[n]")) == 0, "programs of one class may name them in any order"
    assert 0 < apart(("fp16[n]",), ("fp32[n]",)) < apart(("fp16[mn]",), ("fp32[mn]",)) < 1
    assert apart(("fp16[mn]", "fp16[mn]"), ("fp32[mn]", "fp32[mn]")) == 2 * apart(("fp16[mn]",), ("fp32[mn]",))
    assert apart(("bits", "scalar"), ("scalar", "bits")) == 0


def test_the_users_record_goes_before_a_shipped_one(tmp_path: Path) -> None:
    opened(tmp_path / "seed").add(record(median_us=5, config=config(64)), record((2048, 2048, 2048)))
    chain = opened(tmp_path / "own", tmp_path / "seed")
    assert chain.find(problem(), TRITON).config == config(64)  # type: ignore[union-attr]
    chain.add(record(median_us=6, config=config(32)))
    assert chain.find(problem(), TRITON).config == config(32)  # type: ignore[union-attr]
    # a nearer shipped shape still goes before a farther one of the user's
    found = chain.find(problem((2048, 2048, 2304)), TRITON)
    assert found and found.record.shape == (2048, 2048, 2048)


def test_a_config_that_is_not_legal_is_passed_over(tmp_path: Path) -> None:
    chain = opened(tmp_path)
    chain.add(record(config=config(256)), record((4096, 4096, 8192), config=config(64)), record(triton="3.8.0", config=config(256, num_warps=4)))
    found = chain.find(problem(), TRITON, accept=lambda c: c["block_m"] < 256)
    assert found and (found.how, found.config) == ("shape", config(64))
    assert chain.find(problem(), TRITON, accept=lambda _: False) is None


def test_the_nearest_configs_differ(tmp_path: Path) -> None:
    chain = opened(tmp_path)
    chain.add(*(record((m, 4096, 4096), config=config(64 if m > 5000 else 128)) for m in (4096, 4200, 4500, 6000, 7000)))
    found = chain.nearest(problem((4400, 4096, 4096)), TRITON, 4)
    assert [(f.record.shape[0], f.config["block_m"]) for f in found] == [(4500, 128), (6000, 64)]


def test_a_damaged_user_database_leaves_the_shipped_one(tmp_path: Path) -> None:
    opened(tmp_path / "seed").add(record())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / NAME).write_text("{")
    chain = opened(tmp_path / "own", tmp_path / "seed")
    assert chain.find(problem(), TRITON) is not None
    assert len(chain.complaints) == 1


extents = st.integers(0, 2**20)
inputs = st.lists(st.sampled_from(["fp16[n]", "fp32[n]", "fp16[mn]", "fp32[mn]", "bits", "scalar"]), max_size=3).map(tuple)
problems = st.builds(problem, st.tuples(extents, extents, extents), inputs=inputs, layout=st.sampled_from(LAYOUTS), alignment=st.sampled_from([1, 2, 4, 8, 16]))


@given(problems, problems, problems)
def test_the_distance_is_one(one: Problem, two: Problem, three: Problem) -> None:
    assert distance(one, one) == 0
    assert distance(one, two) == distance(two, one) >= 0
    assert distance(one, three) <= distance(one, two) + distance(two, three) + 1e-9
    for axis in range(3):  # a longer extent is a farther one
        shapes = [tuple(x << (i if a == axis else 0) for a, x in enumerate(one.shape)) for i in (0, 1, 2)]
        near, far = (distance(replace(one, shape=shapes[0]), replace(one, shape=s)) for s in shapes[1:])
        assert near <= far


gpu_names = st.sampled_from(["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200 MIG 3g.71gb"])


@given(problems, st.lists(st.tuples(problems, gpu_names), min_size=1, max_size=12))
@settings(deadline=None)
def test_the_nearest_on_other_gpus_is_what_a_search_of_all_would_find(wanted: Problem, tuned: list[tuple[Problem, str]]) -> None:
    some = list(merged(Record.make(replace(p, gpu=gpu), config(), **RUN) for p, gpu in tuned).values())
    found = [f for f in Index([some]).candidates(wanted, TRITON) if f.how == "architecture"]
    assert all(distance(wanted, r.problem) == pytest.approx(distance(r.problem, wanted)) for r in some)
    near = [distance(wanted, r.problem) for r in some if r.gpu != wanted.gpu]
    assert [distance(wanted, f.record.problem) for f in found] == pytest.approx(sorted(d for d in near if d <= FARTHEST))


@given(problems, st.lists(problems, min_size=1, max_size=12))
@settings(deadline=None)
def test_the_nearest_is_what_a_search_of_all_would_find(wanted: Problem, tuned: list[Problem]) -> None:
    some = list(merged(Record.make(p, config(), **RUN) for p in tuned).values())
    index = Index([some])
    found = [f for f in index.candidates(wanted, TRITON) if f.how == "shape"]
    near = [distance(wanted, r.problem) for r in some if r.problem != wanted]
    assert [distance(wanted, f.record.problem) for f in found] == pytest.approx(sorted(d for d in near if d <= FARTHEST))
    assert [f.record for f in found] == [f.record for f in Index([some[::-1]]).candidates(wanted, TRITON) if f.how == "shape"]
    for p in tuned:
        exact = next(iter(index.candidates(p, TRITON)))
        assert (exact.how, exact.record.problem) == ("exact", p)


def test_versions_are_ordered_by_number() -> None:
    ordered = ["3", "3.6.0", "3.6.1rc1", "3.9.0", "3.10.0", "10.0"]
    mixed = ordered[1::2] + ordered[::2]
    assert sorted(mixed, key=version_order) == ordered


def far_shapes() -> Iterator[tuple[int, int, int]]:
    return itertools.islice(
        itertools.product((16, 64, 512, 2048, 3072, 4096, 5000, 6000, 8192, 9000), range(512, 5120, 512), range(1024, 12 * 1024, 1024)), 1000
    )


@pytest.mark.parametrize("wanted", [(4096, 4096, 4096), (4100, 2000, 5000), (10**9, 1, 1), (17, 600, 700), (2048, 8, 8)])
@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 PCIe"])
def test_a_look_up_does_not_go_through_all_records(tmp_path: Path, wanted: tuple[int, int, int], gpu: str) -> None:
    """bench.front has it in milliseconds."""
    chain = opened(tmp_path)
    chain.add(*(record(shape, config=config(b)) for shape, b in zip(far_shapes(), itertools.cycle((64, 128)), strict=False)))
    call: Callable[[], object] = lambda: chain.find(problem(wanted, gpu=gpu), TRITON)  # noqa: E731
    call()
    assert len(chain.records()) > 800
    assert calls(call) < 500


def test_of_several_lenders_the_model_takes_the_fastest_here(tmp_path: Path) -> None:
    """The nearest shape has a tile that leaves most of the GPU idle where the product is as narrow as this."""
    database = opened(tmp_path)
    graph = normalise(check(parse("relu(mm + bias)")))
    spec = lower(graph, Signature(FP16, FP16, (("bias", FP16),), k_multiple=256))
    here = gpus.by_name("H200").target
    wide, narrow = config(16, block_n=128, block_k=128, group_m=1, num_stages=4), config(16, block_n=32, block_k=128, group_m=1, num_warps=2, num_stages=8)
    for shape, best in (((16, 16384, 4096), wide), ((16, 4096, 8192), narrow)):
        database.add(Record.make(problem_of(graph, with_layout(spec, "nt"), shape, here.part, "9.0"), best, **RUN))
    wanted = (16, 8192, 4096)
    problem_here = problem_of(graph, with_layout(spec, "nt"), wanted, here.part, "9.0")
    nearest = database.find(problem_here, TRITON)
    found = Chooser(graph, database)(with_layout(spec, "nt"), wanted, here, "")
    assert nearest is not None and nearest.config == wide
    assert found.config == narrow and found.why.startswith("borrowed from 16x4096x8192")
    assert found.why.endswith("of the configs of 2 near problems the fastest here by the model")


def tuned_here(database: Database, text: str, shape: tuple[int, int, int], best: KernelConfig, **run: float) -> None:
    kernel, here = epigen.compile(text), gpus.by_name("H200").target
    spec = kernel.plan(shape, FP16, here, layout="nt").spec
    database.add(Record.make(problem_of(kernel.graph, spec, shape, here.part, "9.0"), best, **RUN | run))


def chosen_here(database: Database, text: str, shape: tuple[int, int, int]) -> tuple[Choice, Space]:
    kernel, here = epigen.compile(text), gpus.by_name("H200").target
    spec = kernel.plan(shape, FP16, here, layout="nt").spec
    return Chooser(kernel.graph, database)(spec, shape, here, ""), Space(spec, shape, here)


def test_the_models_choice_goes_before_a_lender_that_does_not_suit(tmp_path: Path) -> None:
    """Tiles of 64 rows for a product of 16: at 16x4096x14336 on an H200 (Triton 3.6, 2026-11) they took 1.86 times as long as the best."""
    database, lent = opened(tmp_path), persistent(64, 32, 128, num_stages=8, group_m=1, flatten=0, tma_store=0)
    tuned_here(database, "relu(mm + bias)", (64, 4096, 4096), lent)
    found, _ = chosen_here(database, "relu(mm + bias)", (16, 4096, 14336))
    assert not isinstance(found, Recorded) and found.config["block_m"] == 16
    assert found.why.startswith("the model's choice for 16x4096x14336 fp16 on sm_90: no measurement is at hand") and found.why.endswith(
        "; by the model faster here than the configs of 1 near problem"
    )
    same, _ = chosen_here(database, "relu(mm + bias)", (64, 4096, 4200))
    assert same.config == lent
    rest, _ = chosen_here(database, "relu(mm + bias)", (13, 4096, 14336))
    assert rest.config == found.config and rest.why == f"{found.why}; found for 16x4096x14336, which stands for M from 9 to 16"


def test_where_nothing_is_near_the_model_chooses(tmp_path: Path, golden: Golden) -> None:
    """At 88x320x16320 bf16 on an H200 what 128x256x256 lent took 84 us, the plain rule's tile 40, the vendor's product and an epilogue 15."""
    database = opened(tmp_path)
    tuned_here(database, "relu(mm + bias)", (8192, 8192, 8192), config(128))
    found, space = chosen_here(database, "relu(mm + bias)", (128, 320, 16320))
    golden(found.why)
    ruled = rule.choose(space.spec, space.shape, space.target).config
    chosen, plain = model.estimates(space.spec, (found.config, ruled), space.shape, gpus.by_name("H200"))
    assert chosen.us < 0.5 * plain.us and space.legal(found.config)
    near, _ = chosen_here(database, "relu(mm + bias)", (8192, 8192, 7168))
    assert near.config == config(128), "what was measured so near by is not doubted"


def test_a_gpu_on_which_nothing_was_measured_gets_the_plain_rule(tmp_path: Path) -> None:
    """The model's constants are held to measurements of one architecture."""
    database, kernel = opened(tmp_path), epigen.compile("relu(mm + bias)")
    tuned_here(database, "relu(mm + bias)", (8192, 8192, 8192), config(128))
    for target in (TARGETS["sm_80"], TARGETS["gfx942"]):
        shape = (128, 320, 16320)
        spec = kernel.plan(shape, FP16, target, layout="nt").spec
        assert Chooser(kernel.graph, database)(spec, shape, target, "").why.startswith("chosen by rule for 128x320x16320 fp16 on ")


def test_the_model_is_held_to_what_the_nearest_record_knows(tmp_path: Path) -> None:
    """It takes a tile of 64x128 for far slower than the rule's, but where that was tuned nothing was faster."""
    database, lent = opened(tmp_path), config(64, num_warps=4)
    tuned_here(database, "relu(mm + bias)", (4096, 4096, 4096), lent)
    found, space = chosen_here(database, "relu(mm + bias)", (4096, 4096, 4224))
    assert found.config == lent
    ruled = rule.choose(space.spec, space.shape, space.target).config
    doubtful, trusted = model.estimates(space.spec, (lent, ruled), space.shape, gpus.by_name("H200"))
    assert doubtful.us > 1.2 * trusted.us
    far, _ = chosen_here(database, "relu(mm + bias)", (8192, 8192, 8192))
    assert far.config != lent, "the farther it is, the less it knows"


def test_how_fast_a_lender_was_decides_nothing(tmp_path: Path) -> None:
    """Ratios of measured to estimated time have nothing in common from one problem to another."""
    for i, us in enumerate((1.0, 1e6)):
        database = opened(tmp_path / str(i))
        tuned_here(database, "relu(mm + bias)", (16, 16384, 4096), config(16, block_n=128, block_k=128, group_m=1, num_stages=4), median_us=us)
        tuned_here(database, "relu(mm + bias)", (16, 4096, 8192), config(16, block_n=32, block_k=128, group_m=1, num_warps=2, num_stages=8))
        assert chosen_here(database, "relu(mm + bias)", (16, 8192, 4096))[0].config["block_n"] == 32


MASKED, TILED = "dz = drelu(mm, mask); dz, bgrad(dz)", "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)"


def test_what_the_lenders_epilogue_had_no_choice_in_is_tried_both_ways(tmp_path: Path) -> None:
    """A mask is no tile that TMA could bring, and may be loaded early; both halves of a whole tile would not fit into the registers.

    dgelu at 4096x4096x4096 took 1.6 times as long with drelu's config (H200, Triton 3.6, 2026-11).
    """
    database, lent = opened(tmp_path), warp_specialized(128, 128, 64, 6, group_m=8, pingpong=1, subtiles=2, prefetch=1)
    tuned_here(database, MASKED, (8192, 8192, 512), lent)
    found, space = chosen_here(database, TILED, (4096, 4096, 4096))
    late = warp_specialized(128, 128, 64, 6, group_m=8, pingpong=1, subtiles=2, prefetch=0)
    by_tma = warp_specialized(128, 128, 64, 5, group_m=8, pingpong=1, subtiles=2, prefetch=0, tma_load=1)  # the tile takes the place of a stage
    assert found.config.with_value("group_m", 8) in (late, by_tma) and space.legal(found.config)
    assert isinstance(found, Recorded) and "; here with " in found.why and "prefetch=0" in found.why
    own, _ = chosen_here(database, MASKED, (4096, 4096, 4096))
    assert own.config.with_value("group_m", 8) == lent, "its own class of epilogue has it as it was measured, but for the order of the tiles"


def test_a_program_without_reductions_does_not_say_how_to_complete_them(tmp_path: Path) -> None:
    database = opened(tmp_path)
    tuned_here(database, "relu(mm + bias)", (64, 256, 256), config(32, block_n=16, block_k=256, group_m=1, num_warps=2, num_stages=1))
    found, _ = chosen_here(database, MASKED, (128, 256, 256))
    assert isinstance(found, Recorded) and (found.config["block_n"], found.config["fused_finalize"]) == (16, 1)
