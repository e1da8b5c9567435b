"""Batches of ever new sizes: few configs and few kernels however many M there are, and nothing that grows with them without end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LIBRARY, SMALL, warp_specialized
from hypothesis import given, settings
from hypothesis import strategies as st
from tuned import RUN, TRITON, config

import epigen
from epigen import gpus
from epigen.choose import choose
from epigen.choose.choose import Chooser
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.render import Rendered, Renderer
from epigen.codegen.spec import LAYOUTS, Choice, KernelConfig, KernelSpec
from epigen.db.database import Database
from epigen.db.lookup import Recorded, distance
from epigen.db.problem import Problem, alignment, coarse_bucket, fine_bucket, fine_bucket_step, problem_of
from epigen.db.records import Record
from epigen.dtypes import FP16
from epigen.ir.program import graph_of
from epigen.lru_cache import LruCache
from epigen.perf import limits, model
from epigen.runtime import calls as memory
from epigen.runtime import kernel as kernel_module
from epigen.runtime.kernel import Kernel
from epigen.settings import seed_database_dir, templates_dir

TEXT = "relu(mm + bias)"
GRAPH = epigen.compile(TEXT).graph
TARGET = gpus.by_name("H200").target
N, K = 4096, 2048


def spec_of(shape: tuple[int, int, int], layout: str = "nt") -> KernelSpec:
    return lower(GRAPH, signature_of_contiguous(GRAPH, FP16, FP16, (("bias", FP16),), shape, layout, "ieee"))


def problem(shape: tuple[int, int, int], layout: str = "nt") -> Problem:
    return problem_of(GRAPH, spec_of(shape, layout), shape, TARGET.part, "9.0")


# -- buckets


@settings(deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from(LAYOUTS))
def test_a_bucket_is_of_one_quarter_of_an_octave_and_one_alignment(m: int, layout: str) -> None:
    for rounded, most in ((coarse_bucket, 2.0), (fine_bucket, 2.0 if m <= 64 else 1.25)):
        stands, *rest = rounded((m, N, K), layout)
        assert rest == [N, K] and rounded((stands, N, K), layout) == (stands, N, K)
        assert m <= stands < max(most * m, 1) or m == stands == 0
        assert (m - 1).bit_length() == (stands - 1).bit_length()
        for size in (1, 2, 4):
            assert alignment((stands, N, K), layout, size) == alignment((m, N, K), layout, size)


def test_how_many_buckets_an_octave_has() -> None:
    """Those of one have as many M each; 0 has its own."""
    found = Counter(fine_bucket((m, N, K), "nt")[0] for m in range(1, 1025))
    assert list(found.items())[:12] == [(1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 16), (64, 32), (80, 16), (96, 16), (112, 16), (128, 16), (160, 32)]
    assert len(found) == 7 + 4 * 4 and all(fine_bucket_step(m) == count for m, count in found.items())
    assert {fine_bucket((0, N, K), layout)[0] for layout in LAYOUTS} == {0}
    assert [fine_bucket((m, N, K), "tn")[0] for m in (65, 70, 72, 80, 3001)] == [79, 78, 72, 80, 3071]


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from((16, 32, 64, 128, 256)), st.sampled_from(LAYOUTS))
def test_what_is_legal_for_a_bucket_is_legal_for_all_of_it(m: int, block_m: int, layout: str) -> None:
    one = config(block_m, num_warps=4)
    shape, stands = (m, N, K), fine_bucket((m, N, K), layout)
    assert bool(limits.refusal(spec_of(shape, layout), one, shape, TARGET)) == bool(limits.refusal(spec_of(stands, layout), one, stands, TARGET))


# -- configs


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Every 50th M was tuned, and hardly two of them alike."""
    monkeypatch.setattr(choose, "triton_version", lambda: TRITON)
    found = Database(tmp_path, seeds=())
    tuned = range(50, 4000, 50)
    configs = [config(16 << i % 3, num_stages=2 + i % 5, group_m=1 << i % 4, num_warps=4) for i in range(len(tuned))]
    found.add(*(Record.make(problem((m, N, K)), c, **RUN | {"median_us": m * 1.0}) for m, c in zip(tuned, configs, strict=True)))
    return found


SOME = [m for m in range(1, 4097, 7) if m % 50]


def test_few_configs_for_many_sizes(database: Database) -> None:
    chooser = Chooser(GRAPH, database)
    found = {m: chooser(spec_of((m, N, K)), (m, N, K), TARGET, "") for m in SOME}
    of_bucket: dict[int, set[KernelConfig]] = {}
    assert len(SOME) > 500 and len({c.config for c in found.values()}) <= 24
    for m, choice in found.items():
        assert not limits.refusal(spec_of((m, N, K)), choice.config, (m, N, K), TARGET)
        (stands, *_) = fine_bucket((m, N, K), "nt")
        if isinstance(choice, Recorded):
            assert choice.how == "shape" and choice.record.kernel_config == choice.config
            assert choice.why.startswith(f"borrowed from {choice.record.shape[0]}x{N}x{K}, the nearest tuned shape of this program on NVIDIA H200")
        else:
            assert choice.why.startswith(("chosen by rule", "the model's choice"))
        first = chooser(spec_of((stands, N, K)), (stands, N, K), TARGET, "")
        near = isinstance(choice, Recorded) or "; by the model faster here than " in choice.why
        assert near == (m > 2)
        if near and m != stands:
            how = "found for" if choice.config == first.config else "by the model faster here than what is found for"
            assert choice.why.endswith(f"; {how} {stands}x{N}x{K}, which stands for M from {stands - fine_bucket_step(stands) + 1} to {stands}")
        of_bucket.setdefault(stands, set()).add(choice.config)
    assert max(map(len, of_bucket.values())) == 2, "a kernel more, where waves of tiles differ"


def test_another_m_of_a_bucket_gets_what_is_faster_there() -> None:
    """Of 1536 columns 544 to 576 rows are 108 tiles of 64x128 and as many of 128x64, and 640, which stand for 513 to 640, are 120 of either."""
    choice = _of_drelu(1536, 8192, "nt")
    tiles = {m: [choice(m).config[side] for side in ("block_m", "block_n")] for m in (544, 560, 577, 640)}
    assert tiles == {544: [64, 128], 560: [64, 128], 577: [128, 64], 640: [128, 64]}
    assert all("by the model faster here than what is found for 640x1536x8192" in choice(m).why for m in (544, 560))
    assert len({choice(m).config for m in range(513, 641, 3)}) == 2


def test_the_vendors_product_is_taken_where_its_tiles_fill_the_gpu_once() -> None:
    """576 rows are three of the vendor's tiles of 192, and 640 two of 320: with a pass they took 200 and 224 us, and the ping-pong kernel 288 and 275
    (drelu and sums of columns, 7680x14336, fp16, "nn", H200, torch 2.11, Triton 3.6.0, 2026-11-28)."""
    program, h200 = graph_of("dz = drelu(mm, mask); dz, bgrad(dz)"), gpus.by_name("H200")
    for m in (552, 576, 600, 640):
        shape = (m, 7680, 14336)
        spec = lower(program, signature_of_contiguous(program, FP16, FP16, (), shape, "nn", "ieee"))
        by_vendor, in_groups = (one.us for one in model.estimates(spec, [LIBRARY, warp_specialized(128, 128, 64, 6, 8, pingpong=1, subtiles=2)], shape, h200))
        assert by_vendor < in_groups


def _of_drelu(n: int, k: int, layout: str) -> Callable[[int], Choice]:
    """What M rows get on an H100, among all that is shipped."""
    program, h100 = "dz = drelu(mm, mask); dz, bgrad(dz)", gpus.by_name("H100").target
    kernel, chooser = epigen.compile(program), Chooser(graph_of(program), Database(seed_database_dir(), seeds=()))
    return lambda m: chooser(kernel.plan((m, n, k), FP16, h100, layout=layout).spec, (m, n, k), h100, "")


def test_a_record_of_the_very_shape_wins_for_that_shape(database: Database) -> None:
    chooser = Chooser(GRAPH, database)
    for _, record in database.records():
        choice = chooser(spec_of(record.shape), record.shape, TARGET, "")
        assert isinstance(choice, Recorded) and choice.how == "exact" and choice.config == record.kernel_config
        assert choice.why == f"tuned for {record.shape[0]}x{N}x{K} on NVIDIA H200 (exact)"


def test_the_shape_that_stands_for_a_bucket_lends_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exact for itself alone."""
    monkeypatch.setattr(choose, "triton_version", lambda: TRITON)
    database = Database(tmp_path, seeds=())
    database.add(Record.make(problem((4096, N, K)), config(64), **RUN))
    chooser = Chooser(GRAPH, database)
    assert chooser(spec_of((4096, N, K)), (4096, N, K), TARGET, "").why == f"tuned for 4096x{N}x{K} on NVIDIA H200 (exact)"
    near = chooser(spec_of((3000, N, K)), (3000, N, K), TARGET, "")
    assert isinstance(near, Recorded) and near.how == "shape" and near.config == config(64)
    borrowed = f"borrowed from 4096x{N}x{K}, the nearest tuned shape of this program on NVIDIA H200"
    assert near.why == f"{borrowed}; found for 3072x{N}x{K}, which stands for M from 2561 to 3072"
    across = spec_of((3001, N, K), "tn")
    chooser.database.add(Record.make(problem((4095, N, K), "tn"), config(32, num_warps=4), **RUN))
    upright = chooser(across, (3001, N, K), TARGET, "")
    assert upright.config == config(32, num_warps=4) and upright.why.endswith(
        f"found for 3071x{N}x{K}, which stands for M from 2561 to 3071, of rows aligned alike"
    )


def test_a_bucket_follows_the_database(database: Database) -> None:
    chooser, shape = Chooser(GRAPH, database), (3001, N, K)
    before = chooser(spec_of(shape), shape, TARGET, "")
    assert chooser(spec_of(shape), shape, TARGET, "") == before
    better = config(128, num_stages=4)
    database.add(Record.make(problem((3072, N, K)), better, **RUN | {"median_us": 0.5}))
    after = chooser(spec_of(shape), shape, TARGET, "")
    assert after.config == better != before.config


def test_the_nearest_is_that_of_the_bucket(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model does not choose among several, the record with the least distance to the shape that stands for it is lent."""
    monkeypatch.setattr(choose, "_SOURCES", 1)
    chooser, records = Chooser(GRAPH, database), [r for _, r in database.records()]
    for m in (130, 701, 1003):
        choice = chooser(spec_of((m, N, K)), (m, N, K), TARGET, "")
        stands = problem(fine_bucket((m, N, K), "nt"))
        assert isinstance(choice, Recorded)
        assert distance(stands, choice.record.problem) == min(distance(stands, r.problem) for r in records)


# -- kernels


class CountingRenderer(Renderer):
    def __init__(self) -> None:
        super().__init__(templates_dir())
        self.count = 0

    def render(self, spec: KernelSpec, config: KernelConfig) -> Rendered:
        self.count += 1
        return super().render(spec, config)


@pytest.mark.triton
@pytest.mark.parametrize("text", [TEXT, "z = mm + bias; relu(z), bitmask(z > 0)", "dz = drelu(mm, mask); dz, bgrad(dz)"])
def test_few_texts_for_many_sizes(database: Database, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is rendered once, and what Triton adds to it, whether 16 divides an integer or it is 1, makes no dozens of them."""
    lowered: list[Any] = []
    monkeypatch.setattr(kernel_module, "lower", lambda graph, signature: lowered.append(signature) or lower(graph, signature))
    graph, renderer = epigen.compile(text).graph, CountingRenderer()
    kernel = Kernel(graph, renderer, Chooser(graph, database), backend="interpreter")
    b, kernels = torch.empty((N, K), dtype=torch.float16, device="meta").T, set()
    for m in SOME:
        a, mask = torch.empty((m, K), dtype=torch.float16, device="meta"), torch.empty((m, N // 8), dtype=torch.uint8, device="meta")
        inputs = {n.name: mask if n.name == "mask" else torch.empty(N, dtype=torch.float16, device="meta") for n in graph.inputs()}
        prepared = kernel._prepare((a, b), inputs, {}, target=TARGET)
        assert prepared.plan is not None
        for launch in prepared.launches:
            special = tuple(1 if v == 1 else 16 if v % 16 == 0 else 0 for v in launch.integers.values())
            kernels.add((prepared.plan.rendered.digest, launch.function.name, special))
    assert len(SOME) > 500 and len(kernels) <= 40 and renderer.count <= 24
    assert len(lowered) == len(set(lowered)) == 1


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_calls_that_are_prepared_do_not_pile_up(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes room is prepared again when it comes back."""
    monkeypatch.setattr(memory, "_KEPT", 4)
    kernel = epigen.compile(TEXT, config=SMALL, backend=backend)
    b, bias = torch.eye(16).half(), torch.zeros(16).half()
    for m in [*range(1, 8), *range(1, 8), 7, 7]:
        a = torch.arange(16 * m).view(m, 16).half()
        assert torch.equal(kernel(a, b, bias=bias), a)
        assert len(kernel._calls) <= 4
    assert len(kernel._calls) == 4


# -- the mapping


def test_the_least_recently_used_makes_room() -> None:
    held = LruCache[str, int](2)
    assert held.put("a", 1) == 1 and held.put("b", 2) == 2
    assert held.get("a") == 1 and held.get("c") is None
    held.put("c", 3)
    assert (held.get("a"), held.get("b"), held.get("c"), len(held)) == (1, None, 3, 2)
    held.put("a", 4)
    held.put("d", 5)
    assert (held.get("a"), held.get("c"), held.get("d")) == (4, None, 5)
    held.clear()
    assert len(held) == 0 and held.get("a") is None


def test_threads_may_share_it() -> None:
    held = LruCache[int, int](8)

    def work(first: int) -> None:
        for i in range(2000):
            key = (first * 7 + i) % 20
            found = held.get(key)
            if found is None:
                held.put(key, key)
            else:
                assert found == key

    with ThreadPoolExecutor(6) as threads:
        assert len(list(threads.map(work, range(6)))) == 6  # raises what one of them has raised
    assert len(held) == 8
