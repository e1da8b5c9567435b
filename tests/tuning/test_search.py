"""The search over recorded and failing workers: it ends with a right winner whatever happens, and says why where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import faulty_timing_worker
import pytest
from cases import persistent, split_k, warp_specialized
from golden import Golden

import epigen
from epigen.choose import rule
from epigen.choose.space import Space, parameters
from epigen.codegen import schedules
from epigen.codegen.lower import lower
from epigen.codegen.spec import KernelConfig, KernelSpec, Signature, with_layout
from epigen.dtypes import FP8E4M3, FP16, FP32, INT8
from epigen.errors import ConfigError, TuneError
from epigen.gpus import DEFAULT_TARGET, TARGETS
from epigen.ir.program import graph_of
from epigen.perf.resources import Work
from epigen.tuning.runner import GpuRunner, Replay
from epigen.tuning.search import _head, search
from epigen.tuning.task import Baseline, Comparison, Outcome, Task

SHAPE = (1024, 1024, 1024)
SHAPES = (SHAPE, (1, 1, 1), (0, 7, 0), (0, 4096, 4096), (4096, 0, 4096), (16, 4096, 4096), (128, 256, 256), (1000, 1003, 17))


def spec_of(text: str = "relu(mm + bias)", shape: tuple[int, int, int] = SHAPE, dtype: object = FP16) -> KernelSpec:
    return epigen.compile(text).plan(shape, dtype=dtype, target=DEFAULT_TARGET).spec  # type: ignore[arg-type]


SPACE = Space(lower(epigen.compile("relu(mm + bias)").graph, Signature(FP16, FP16, (("bias", FP16),), k_multiple=256)), SHAPE, DEFAULT_TARGET)
"""Of the schedules with pointers alone: the tables below are made up for them."""


def tiled(block_m: int = 64, block_n: int = 64, block_k: int = 64, num_warps: int = 4, num_stages: int = 3, group_m: int = 1) -> KernelConfig:
    return schedules.config("tiled", block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages, group_m=group_m)


# -- the space


@pytest.mark.parametrize(("text", "values"), [("relu(mm + bias)", {0}), ("mm, sum(a, k)", {0}), ("mm, bgrad(mm)", {0, 1}), ("sum(mm), sum(a, k)", {0, 1})])
def test_one_launch_is_a_choice_where_a_kernel_can_complete_what_it_reduces(text: str, values: set[int]) -> None:
    shape = (1024, 1024, 1024)
    spec = lower(epigen.compile(text).graph, Signature(FP16, FP16, tuple((n, FP16) for n in ("bias",) if n in text), k_multiple=256, tma=("a", "b")))
    found: dict[str, set[int]] = {}
    for config in Space(spec, shape, DEFAULT_TARGET).every():
        found.setdefault(config.schedule, set()).add(config["fused_finalize"])
        assert not (dict(config.values).get("flatten") and (config["fused_finalize"] or config["prefetch"]))
    assert found == dict.fromkeys(("library", "tiled", "split_k", "persistent", "warp_specialized"), values)


@pytest.mark.parametrize(("text", "values"), [("relu(mm + bias)", {0, 1}), ("mm", {0}), ("mm * alpha", {0}), ("dz = drelu(mm, mask); dz, bgrad(dz)", {0, 1})])
def test_inputs_can_be_asked_for_early_where_there_are_any(text: str, values: set[int]) -> None:
    kernel = epigen.compile(text)
    spec = lower(kernel.graph, kernel.signature_of(FP16, SHAPE, "nt"))
    found: dict[str, set[int]] = {}
    for config in Space(spec, SHAPE, DEFAULT_TARGET).every():
        found.setdefault(config.schedule, set()).add(dict(config.values).get("prefetch", -1))
    assert found.pop("library") == {-1}
    assert found and set(map(frozenset, found.values())) == {frozenset(values)}


@pytest.mark.parametrize(("text", "one"), [("mm", True), ("mm + bias", False)])
def test_a_kernel_of_the_vendors_is_tried_once(text: str, one: bool) -> None:
    space = Space(spec_of(text), SHAPE, DEFAULT_TARGET)
    found = [c for c in space.every() if c.schedule == "library"]
    assert (found == [rule.by_vendor(space.spec, SHAPE, DEFAULT_TARGET, "").config]) == one and all(map(space.legal, found))


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "target"), [*enumerate(TARGETS.values())], ids=lambda t: getattr(t, "name", None))
@pytest.mark.parametrize(("place", "dtype"), [*enumerate((FP16, FP32, FP8E4M3, INT8))], ids=lambda d: getattr(d, "name", None))
def test_every_point_is_legal_and_is_found_again(turn: int, target: object, place: int, dtype: object) -> None:
    """Half of the shapes by turns: each meets each target and each dtype."""
    for shape in SHAPES[(turn + place) % 2 :: 2]:
        spec = spec_of(shape=shape, dtype=dtype)
        here = Space(with_layout(spec, "nn" if shape[0] % 2 else "nt"), shape, target)  # type: ignore[arg-type]
        configs = list(here.every())
        assert len(set(configs)) == len(configs) > 0
        for config in configs[:: 1 + len(configs) // 40]:
            values = here.parameters(config)

            def again(name: str, low: int, high: int, values: dict[str, int] = values) -> int:
                assert low <= values[name] <= high
                return values[name]

            assert here.point(again) == config and here.nearest(config) == (config,)
            if config.schedule == "tiled":
                fits = (config["block_m"] + config["block_n"]) * config["block_k"] * spec.signature.a.bytes * config["num_stages"]
                assert fits <= target.shared_bytes  # type: ignore[attr-defined]


def test_the_nearest_point_is_legal() -> None:
    """Each dimension goes to its nearest bound, an order of tiles that is not searched to the nearest that is, and a choice that is open both ways."""
    spec = spec_of("dz = dgelu(mm, z[m,n]); dz, bgrad(dz)")
    for shape in ((16, 4096, 4096), (128, 256, 256), (4096, 4096, 4096)):
        here, there = Space(spec, shape, DEFAULT_TARGET), Space(SPACE.spec, (8192, 8192, 512), DEFAULT_TARGET)
        for config in list(there.every())[::97]:
            if config.schedule in here.schedules:
                found = here.nearest(config, ("fused_finalize", "tma_load"))
                assert found and len(set(found)) == len(found) and all(map(here.legal, found))
    here = Space(spec, (4096, 4096, 4096), DEFAULT_TARGET)
    assert [c["group_m"] for g in (1, 2, 4, 8, 16) for c in here.nearest(tiled(128, 128, group_m=g))] == [1, 8, 8, 8, 8]
    assert [c["fused_finalize"] for c in here.nearest(tiled(128, 128), ("fused_finalize",))] == [0, 1]
    assert not here.legal(tiled(128, 128, group_m=4))


@pytest.mark.parametrize(
    "text", ["relu(mm + bias)", "relu(mm + residual)", "mm, relu(mm), cast(mm, fp32)", "cast(mm, fp32), cast(relu(mm), fp32), cast(gelu(mm), fp32)"]
)
@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (4096, 4096, 64)], ids=str)
def test_groups_of_warps_have_two_buffers_beside_what_is_stored(text: str, shape: tuple[int, int, int]) -> None:
    """With one, the kernel would never end: it is filled again only when the step after its own has been issued."""
    spec = spec_of(text, shape)
    configs = [c for c in Space(spec, shape, DEFAULT_TARGET).every() if c.schedule == "warp_specialized"]
    work = Work(spec, shape, DEFAULT_TARGET)
    assert configs and all(c["num_stages"] >= 2 and work.resources(c).shared_bytes <= DEFAULT_TARGET.shared_bytes for c in configs)
    assert {c["tma_store"] for c in configs} == ({1} if text.startswith("relu") else {0, 1})


def test_a_config_may_be_older_than_loads_by_tma_and_parts_of_k() -> None:
    older = {name: value for name, value in warp_specialized(tma_load=0).values if name not in ("tma_load", "fused_finalize", "splits")}
    assert schedules.from_mapping({"schedule": "warp_specialized", **older}) == warp_specialized(tma_load=0)


def test_split_k_always_says_how_often(golden: Golden) -> None:
    with golden.raises(ConfigError):
        schedules.from_mapping({name: value for name, value in [("schedule", "split_k"), *split_k().values] if name != "splits"})


@pytest.mark.parametrize(("shape", "most"), [((256, 1024, 7168), 16), ((256, 4096, 14336), 4), ((4096, 4096, 4096), 1), ((256, 1024, 512), 2)], ids=str)
def test_groups_of_warps_take_parts_of_k_where_there_are_few_tiles(shape: tuple[int, int, int], most: int) -> None:
    """No more than the GPU takes at a time, each of 256 steps of k at least; and what TMA would bring to parts that do not finish a tile is not brought."""
    spec = spec_of("relu(mm + residual)", shape)
    configs = [c for c in Space(spec, shape, DEFAULT_TARGET).every() if c.schedule == "warp_specialized"]
    assert {c["splits"] for c in configs} == set(range(1, most + 1))
    for c in configs:
        tiles = -(-shape[0] // c["block_m"]) * -(-shape[1] // c["block_n"])
        assert c["splits"] == 1 or (c["tma_load"] == 0 and tiles * c["splits"] <= (1 + c["pingpong"]) * DEFAULT_TARGET.multiprocessors)


@pytest.mark.parametrize(
    ("text", "aligned", "loads"),
    [
        ("relu(mm + bias)", True, {0}),
        ("cast(mm, fp32), drelu(mm, mask)", True, {0}),
        ("relu(mm + bias + residual)", True, {0, 1}),
        ("relu(mm + bias + residual)", False, {0}),
        ("cast(mm + residual, fp32)", True, {0, 1}),  # through a buffer of its own, for the output's has another dtype
        ("sum(mm + residual, m)", True, {0, 1}),  # as well, for no output leaves by TMA
        ("silu(mm) * gate[m,n] + residual", True, {0, 1}),
    ],
)
def test_what_tma_can_bring_is_tried_both_ways(text: str, aligned: bool, loads: set[int]) -> None:
    shape = (4096, 4096 if aligned else 4095, 512)
    spec = spec_of(text, shape)
    configs = [c for c in Space(with_layout(spec, "nt"), shape, DEFAULT_TARGET).every() if c.schedule == "warp_specialized"]
    assert {c["tma_load"] for c in configs} == loads


# -- replay


def made_up(configs: Sequence[KernelConfig]) -> dict[KernelConfig, Outcome]:
    """A smooth landscape with one best config, and some that fail."""
    found = {}
    for config in configs:
        if config.schedule != "tiled":
            found[config] = Outcome("ok", (140.0 if config.schedule == "library" else 240.0) + config["block_m"] / 10)
            continue
        values = parameters(config)
        far = abs(values["tiled.block_m"] - 7) + abs(values["tiled.block_n"] - 8) + abs(values["tiled.block_k"] - 6) + abs(values["tiled.num_stages"] - 4) / 2
        far += abs(values["tiled.num_warps"] - 3) + values["tiled.group_m"] / 2
        found[config] = Outcome("wrong", detail="planted") if far < 1 and values["tiled.group_m"] == 1 else Outcome("ok", 100.0 * (1 + far / 5))
    return found


@pytest.fixture(scope="module")
def table() -> dict[KernelConfig, Outcome]:
    return made_up(list(SPACE.every()))


def best_of(table: dict[KernelConfig, Outcome]) -> float:
    return min(o.median_us for o in table.values() if o.kind == "ok")


@pytest.mark.parametrize("shape", [SHAPE, (64, 320, 16320), (100, 72, 64), (32768, 1344, 9424)], ids=str)
def test_an_outline_is_the_part_of_a_space_that_shape_and_gpu_decide(shape: tuple[int, int, int]) -> None:
    space = Space(SPACE.spec, shape, DEFAULT_TARGET)
    outline = list(space.outline())
    assert len(outline) == len(set(outline)) <= 1000 and all(map(space.legal, outline))
    assert {c.schedule for c in outline} == set(space.schedules)
    tiles = {(c.schedule, c["block_m"], c["block_n"]) for c in space.every()}
    assert {(c.schedule, c["block_m"], c["block_n"]) for c in outline} == tiles


@pytest.mark.parametrize(("rows", "groups"), [(2, [1, 8]), (3, [1, 2, 8]), (4, [1, 2, 8]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 16]), (100, [1, 2, 4, 8, 16])])
def test_each_order_of_the_tiles_is_there_once(rows: int, groups: list[int]) -> None:
    """As many rows of tiles as there are, or more, are one group whatever it is called."""
    shape = (64 * rows, 512, 512)
    space = Space(spec_of(shape=shape), shape, DEFAULT_TARGET)
    config = warp_specialized(64, 128, 64, 8, pingpong=1, group_m=1)
    assert space.legal(config) and sorted(c["group_m"] for c in space.orders(config)) == groups
    assert all(map(space.legal, space.orders(config))) and space.orders(tiled()) == [tiled()]


@pytest.mark.slow
def test_search_beats_random_choice_on_a_recorded_space(table: dict[KernelConfig, Outcome]) -> None:
    """Without a model's ranking, and with a small schedule as a trap: 60 trials, mean over seeds."""
    best = best_of(table)
    found = [search(SPACE, Replay(table, Baseline(100, 120)), trials=60, seed=s).outcome.median_us / best for s in range(4)]
    configs = list(table)
    random_ = [min(table[c].median_us or 1e9 for c in Random(s).sample(configs, 60)) / best for s in range(30)]
    assert sum(found) / len(found) < sum(random_) / len(random_) - 0.05


def test_a_good_ranking_is_enough_in_few_trials(table: dict[KernelConfig, Outcome]) -> None:
    noisy = Random(0)
    ranked = sorted(table, key=lambda c: (table[c].median_us or 1e9) * noisy.uniform(0.8, 1.25))
    result = search(SPACE, Replay(table, Baseline(100, 120)), prior={c: float(i + 1) for i, c in enumerate(ranked)}, trials=48, seed=3)
    assert result.outcome.median_us <= 1.05 * best_of(table)


def test_the_same_seed_gives_the_same_winner_and_no_config_is_measured_twice(table: dict[KernelConfig, Outcome]) -> None:
    asked: list[KernelConfig] = []

    class Counting(Replay):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            asked.append(config)
            return super().measure(config, limit_us)

    first = search(SPACE, Counting(table, Baseline(100, 120)), trials=40, seed=5)
    assert len(asked) == len(set(asked)) == 40
    again = search(SPACE, Replay(table, Baseline(100, 120)), trials=40, seed=5)
    assert again.winner == first.winner


def test_a_small_space_is_searched_whole_and_ends() -> None:
    shape = (1, 1, 1)
    small = Space(spec_of(shape=shape), shape, DEFAULT_TARGET)
    table = {c: Outcome("ok", float(i + 1)) for i, c in enumerate(small.every())}
    result = search(small, Replay(table, Baseline(1, 1)), prior=dict.fromkeys(table, 1.0), trials=500)
    assert set(result.outcomes) == set(table) and result.outcome.median_us == 1.0


def test_a_search_begins_with_two_of_the_passes_behind_one_product() -> None:
    """2048x2048x2048 with gelu began with twelve of them, which took the same 39 us, and the best 34.5 was none (H200, Triton 3.6, 2026-11)."""
    passes = [schedules.config("library", block_m=rows, block_n=128, num_warps=4, fused_finalize=0) for rows in (1, 2, 4, 8, 16, 32, 64, 128)]
    tiles = [tiled(rows, columns, num_stages=stages) for rows in (64, 128) for columns in (64, 128, 256) for stages in (2, 3, 4)]
    head = _head([*passes, *tiles])
    assert head == [*passes[:2], *(config for config in tiles if config["num_stages"] < 4)][:12] and len(head) == 12


def test_ties_within_the_noise_go_to_the_first_by_rank() -> None:
    configs = [tiled(num_stages=s) for s in (2, 3, 4, 5)]
    table = {c: Outcome("ok", 100.0 + i / 10) for i, c in enumerate(configs)}
    for ranked in (configs, configs[::-1]):
        result = search(SPACE, Replay(table, Baseline(1, 1)), prior={c: 1.0 + i for i, c in enumerate(ranked)}, trials=4)
        assert result.winner == ranked[0]


def test_what_may_be_behind_by_chance_is_timed_again() -> None:
    """5 % behind in 15 samples that scatter by a tenth, and the fastest when all take turns."""
    first, second, far = (tiled(num_stages=s) for s in (2, 3, 4))
    table = {first: Outcome("ok", 50.0, 5.0, 15), second: Outcome("ok", 52.5, 5.0, 15), far: Outcome("ok", 57.5, 5.0, 15)}

    class Again(Replay):
        def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
            assert far not in configs
            return Comparison(tuple(Outcome("ok", 49.0 if c == second else 50.0, 0.5, 41) for c in configs), self.baseline)

    def winner(spread_us: float) -> KernelConfig:
        rows = {c: replace(o, spread_us=spread_us) for c, o in table.items()}
        return search(SPACE, Again(rows, Baseline(1, 1)), prior={c: 1.0 + i for i, c in enumerate(rows)}, trials=3).winner

    assert winner(5.0) == second and winner(0.5) == first


@pytest.mark.parametrize(("scale", "place"), [(0.05, 0), (1.0, 1)])
def test_of_long_launches_a_steady_one_is_preferred(scale: float, place: int) -> None:
    """The first is 1 % ahead in the median, and scatters by 6 %."""
    first, second = tiled(num_stages=2), tiled(num_stages=3)
    table = {first: Outcome("ok", 990.0 * scale, 60.0 * scale, 20), second: Outcome("ok", 1000.0 * scale, 10.0 * scale, 20)}
    found = search(SPACE, Replay(table, Baseline(1, 1)), prior={c: 1.0 + i for i, c in enumerate(table)}, trials=2)
    assert found.winner == (first, second)[place]


@pytest.mark.parametrize(("scale", "names"), [(0.05, "first"), (1.0, "other")])
def test_of_long_launches_every_way_is_timed_again(scale: float, names: str) -> None:
    """A tile is 5 % behind nine configs of another one on a cool GPU, and ahead of them on a hot one."""
    first, other = [c for c in SPACE.every() if (c.schedule, c["block_m"], c["block_n"]) == ("tiled", 128, 128)][:9], tiled(128, 64)
    space = {c: Outcome("ok", scale * (1000.0 + i)) for i, c in enumerate(first)} | {other: Outcome("ok", scale * 1050.0)}

    class Hot(Replay):
        def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
            assert not configs or (other in configs) == (names == "other")
            return Comparison(tuple(Outcome("ok", scale * (1180.0 if c == other else 1200.0)) for c in configs), self.baseline)

    found = search(SPACE, Hot(space, Baseline(1, 1)), prior={c: 1.0 + i for i, c in enumerate(space)}, trials=len(space))
    assert found.winner == {"first": first[0], "other": other}[names]


def test_in_place_of_what_a_table_lacks_its_nearest_answers() -> None:
    """By steps of the parameters; of another schedule none is near, and of equally near ones the first answers."""
    small, large, other = tiled(32, 64), tiled(128, 64), persistent(64, 64, 64)
    for rows in ((other, small, large), (large, other, small)):
        recorded = Replay(dict.fromkeys(rows, Outcome("ok", 1.0)), Baseline(1, 1))
        wanted = (large, tiled(256, 128), tiled(16, 64), persistent(128, 64, 64))
        assert [recorded.available(c) for c in wanted] == [large, large, small, other]
        assert recorded.available(tiled(64, 64)) == next(c for c in rows if c != other)


def test_the_last_trials_are_a_fine_step_from_the_best() -> None:
    """The right tile comes first, and all others before its right group_m."""
    tile, best = tiled(128, 128), tiled(128, 128, group_m=8)
    table = {c: Outcome("ok", 90.0 if c == best else 100.0 if c == tile else 200.0) for c in SPACE.every()}
    ranked = sorted(table, key=lambda c: (c != tile, c["block_m"] == c["block_n"] == 128, c != best))
    assert search(SPACE, Replay(table, Baseline(1, 1)), prior={c: 1.0 + i for i, c in enumerate(ranked)}, trials=24).winner == best


def test_interrupted_search_keeps_what_it_found(table: dict[KernelConfig, Outcome]) -> None:
    class Interrupted(Replay):
        left = 10

        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().measure(config, limit_us)

    result = search(SPACE, Interrupted(table, Baseline(100, 120)), trials=40)
    assert not result.complete and len(result.outcomes) == 10
    assert result.outcomes[result.winner].kind == "ok"


def test_budget_ends_the_search(table: dict[KernelConfig, Outcome]) -> None:
    result = search(SPACE, Replay(table, Baseline(100, 120)), trials=40, budget_s=0.0)
    assert len(result.outcomes) == 1


def test_where_all_fail_the_commonest_cause_is_quoted() -> None:
    table = {c: Outcome("wrong", detail="planted") for c in SPACE.every()}
    table |= dict.fromkeys(list(table)[::3], Outcome("compile_error", detail="PTXAS error"))
    with pytest.raises(TuneError, match=r"20 configs .*planted"):
        search(SPACE, Replay(table, Baseline(1, 1)), trials=20)


# -- isolation


def failing(how: int) -> KernelConfig:
    return tiled(32, 32, block_k=32, num_stages=how)


class Runner(GpuRunner):
    """Waits as long as it takes for every answer, but for one that never comes."""

    def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
        self.wait(hangs=config["block_k"] == 32 and config["num_stages"] == faulty_timing_worker.HANG)
        return super().measure(config, limit_us)

    def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
        self.wait(hangs=len(configs) >= 4 and self.timing_worker.module == "faulty_vendor")
        return super().compare(configs)

    def wait(self, hangs: bool) -> None:
        self.first_s = self.measure_s = 1.0 if hangs else 1000.0


@pytest.fixture
def runner() -> Iterator[GpuRunner]:
    task = Task(graph_of("relu(mm + bias)"), SHAPE, FP16, FP16, (FP16,), "nn", "ieee", DEFAULT_TARGET)
    made = Runner(compile_workers=2, timing_worker="faulty_timing_worker", compile_worker="faulty_compile_worker", build_s=1000.0)
    made.begin(task)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "detail"),
    [
        (failing(faulty_timing_worker.HANG), "timeout", "no answer"),
        (failing(faulty_timing_worker.KILLED), "crashed", "signal 9"),
        (failing(faulty_timing_worker.CRASH), "crashed", "illegal memory access"),
        (failing(faulty_timing_worker.WRONG), "wrong", "nan"),
        (failing(faulty_timing_worker.MEMORY), "out_of_resources", "out of memory"),
        (tiled(128, 256, num_warps=16), "compile_error", "PassManager"),
        (tiled(group_m=8), "compile_error", "signal 6"),
    ],
    ids=["hang", "signal 9", "illegal access", "NaN", "out of memory", "compile error", "compiler crash"],
)
def test_each_failure_costs_one_trial(runner: GpuRunner, config: KernelConfig, kind: str, detail: str) -> None:
    assert runner.measure(tiled(), 0.0).kind == "ok"
    found = runner.measure(config, 0.0)
    assert found.kind == kind and detail in found.detail
    assert runner.measure(tiled(block_m=128), 0.0).kind == "ok"


@pytest.mark.slow
def test_the_search_survives_all_of_them(runner: GpuRunner) -> None:
    bad = [failing(how) for how in faulty_timing_worker.FAILURES] + [tiled(128, 256, num_warps=16), tiled(group_m=8)]
    assert all(SPACE.legal(c) for c in bad)
    good = [tiled(block_m=m, block_n=n) for m in (32, 64, 128) for n in (32, 64, 128)]
    ranked = [c for pair in zip(bad, good, strict=False) for c in pair] + good[len(bad) :]
    result = search(SPACE, runner, first=ranked, trials=len(ranked))
    assert (result.winner["block_m"], result.winner["block_n"]) == (64, 128)
    assert set(result.counts) == {"ok", "timeout", "crashed", "wrong", "out_of_resources", "compile_error"}
    assert result.baseline == Baseline(100.0, 120.0)


def test_workers_go_on_with_another_task(runner: GpuRunner) -> None:
    """The processes stay, and answer for the new task; what was under way for the old one is put aside."""
    runner.prepare([tiled(block_m=m) for m in (16, 32, 64, 128)])
    assert runner.measure(tiled(), 0.0).kind == "ok"
    before = [runner.timing_worker.key, *(w.key for w in runner.compile_workers)]
    runner.begin(Task(graph_of("gelu(mm)"), SHAPE, FP16, FP16, (FP16,), "nn", "ieee", DEFAULT_TARGET))
    assert not runner.built and not runner.building and not runner.waiting
    assert runner.measure(tiled(), 0.0).kind == "ok"
    assert [runner.timing_worker.key, *(w.key for w in runner.compile_workers)] == before


def test_workers_import_no_more_than_they_need() -> None:
    """A dozen of them start at once. torch's random functions on the meta device import its compiler, and its unravel_index its symbolic
    shapes: seconds each."""
    code = """
import sys
from epigen.ir import bound, reference
from epigen.dtypes import FP32, INT8
from epigen.gpus import DEFAULT_TARGET
from epigen.ir.program import graph_of
from epigen.tuning.task import Task
task = Task(graph_of("drelu(mm + bias, mask) + residual"), (64, 64, 64), INT8, INT8, (FP32,), "nt", "ieee", DEFAULT_TARGET)
task.sample("meta")
given = task.sample("cpu")
(expected,) = bound.expect(task.graph, given.a, given.b, given.inputs, [FP32], "ieee")
assert bound.compare(expected.value.float(), expected).ok
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_where_the_vendors_product_ends_its_worker_the_trials_decide() -> None:
    """It is killed at the start, hangs in the run-off, and is killed again where it is timed by itself at last."""
    task = Task(graph_of("relu(mm + bias)"), SHAPE, FP16, FP16, (FP16,), "nn", "ieee", DEFAULT_TARGET)
    made = Runner(compile_workers=2, timing_worker="faulty_vendor", compile_worker="faulty_compile_worker", build_s=1000.0)
    try:
        made.begin(task)
        good = [tiled(64, 128, num_warps=warps, num_stages=stages) for warps in (4, 8) for stages in (3, 4)]
        result = search(SPACE, made, prior=dict.fromkeys(good, 1.0), trials=4)
    finally:
        made.close()
    assert result.complete and result.counts == {"ok": 4} and result.outcome.median_us == faulty_timing_worker.time_of(64, 128)
    assert result.baseline == Baseline(0.0, 0.0) and result.untimed == "timing the vendor's product failed: the worker ended with signal 9"
