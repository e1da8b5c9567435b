"""`epigen explain`: what it says, for people and for programs, without running anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import checkout
import click
import pytest
from click.testing import CliRunner
from golden import Golden
from machines import NO_GPU, Machine, machine
from modelled import BACKWARD, H200, PLAIN, spec_of, tiled

from epigen import api, gpus, settings
from epigen.choose import choose, explain, rule
from epigen.codegen.spec import Choice
from epigen.commands.explain import explain_command
from epigen.db.database import Database
from epigen.db.problem import Problem, problem_of
from epigen.db.records import Record
from epigen.errors import EpigenError
from epigen.gpus import TARGETS
from epigen.runtime.loader import triton_version


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The user's database, as the command finds it, empty at first; and no shipped one."""
    monkeypatch.setenv("EPIGEN_DB", str(tmp_path))
    monkeypatch.setattr(settings, "seed_database_dir", lambda: tmp_path / "none")
    api.database.cache_clear()
    yield Database()
    api.database.cache_clear()


def run(*arguments: str, on: Machine = NO_GPU) -> Any:
    """Without a GPU: the same answers on every machine."""
    return CliRunner().invoke(explain_command, arguments, obj=on, catch_exceptions=False)


def explained(text: str, shape: tuple[int, int, int], choice: Choice | None = None) -> str:
    """On an H200. choice: by default that by the vendor's product."""
    spec = spec_of(text)
    return explain.text(explain.explain(spec, shape, H200, choice or rule.by_vendor(spec, shape, H200.target, "because")))


def of_a_record(database: Database, **more: Any) -> str:
    version = remember(database, **more).triton
    return run(PLAIN, "--shape", "1024x1024x1024").stdout.replace(f"Triton {version}", "Triton VERSION")


GOLDEN: dict[str, Callable[[Database], str]] = {
    "forward": lambda _: run(PLAIN, "--shape", "4096x4096x4096").stdout,
    "backward": lambda _: run(BACKWARD, "--shape", "1000x4099x11008", "--dtype", "bf16", "--layout", "nt", "--gpu", "rtx 4090").stdout,
    "measured": of_a_record,
    "measured_without_an_unfused_time": lambda database: of_a_record(database, unfused_us=None),
    "padding": lambda _: run(PLAIN, "--shape", "4096x4096x4095", "--gpu", "L40S").stdout,
    "the_bare_product": lambda _: run("mm", "--shape", "64x64x64").stdout,
    "an_empty_result": lambda _: run(PLAIN, "--shape", "0x64x64").stdout,
    "an_empty_sum": lambda _: run(PLAIN, "--shape", "64x64x0").stdout,
    "no_derivative": lambda _: run("amax(mm)", "--shape", "64x64x64").stdout,
    "wasted_tiles": lambda _: explained(PLAIN, (1200, 1100, 4096), Choice(tiled(128, 128, 64, 4, 3), "given by the caller")),
    "the_vendors_product": lambda _: explained(PLAIN, (1024, 1024, 1024)),
    "the_vendors_whole": lambda _: explained("mm", (1001, 1024, 1024)),
}
"""Each sentence of an explanation stands in one of these at least; all other tests here ask for data."""


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text(name: str, database: Database, update_golden: bool) -> None:
    file = checkout.GOLDEN / "explain" / f"{name}.txt"
    said = GOLDEN[name](database)
    if update_golden:
        file.write_text(said)
    assert said == file.read_text(), "pytest tests/commands/test_explain.py --update-golden writes it anew"


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in (checkout.GOLDEN / "explain").iterdir()} == GOLDEN.keys()


def test_json_says_the_same() -> None:
    found = json.loads(run(PLAIN, "--shape", "4096x4096x4096", "--json").stdout)
    assert found["flops"] == 2 * 4096**3
    assert found["limit"] == "math" and found["config"]["schedule"] == "warp_specialized"
    assert found["bytes_saved"] == found["unfused_bytes"] - found["fused_bytes"] > 0
    assert (found["launches"], found["unfused_launches"], found["measured"]) == (1, 3, None)
    assert found["gpu"]["name"] == "NVIDIA H200" and "default" in found["gpu"]["why"]
    assert found["model"]["us"] > found["floor_us"]


def gpu_of(*more: str, on: Machine) -> tuple[str, str]:
    found = json.loads(run(PLAIN, "--shape", "64x64x64", "--json", *more, on=on).stdout)["gpu"]
    return found["name"], found["why"]


def test_the_gpu_at_hand_comes_first() -> None:
    l40s = machine(gpus.by_name("L40S").target)
    assert gpu_of(on=l40s) == ("NVIDIA L40S", "the GPU at hand")
    assert gpu_of("--gpu", "a100", on=l40s) == ("NVIDIA A100-SXM4-80GB", "as asked")


def test_a_gpu_without_a_row_is_taken_as_its_kin() -> None:
    assert gpu_of(on=machine(TARGETS["sm_86"])) == ("RTX A6000", "the GPU at hand")


@pytest.mark.parametrize(
    ("shape", "dtype", "limit"),
    [("8192x8192x8192", "fp16", "math"), ("16x16384x16384", "fp16", "memory"), ("64x128x256", "fp16", "latency"), ("8192x8192x64", "fp16", "memory")],
)
def test_which_limit_binds(shape: str, dtype: str, limit: str) -> None:
    assert json.loads(run(PLAIN, "--shape", shape, "--dtype", dtype, "--json").stdout)["limit"] == limit


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("nn", [("K", 1016)]), ("nt", [("K", 1016)]), ("tn", [("M", 1008)]), ("tt", [("M", 1008), ("K", 1016)])],
)
def test_padding_is_told_for_the_rows_as_they_lie(layout: str, expected: list[tuple[str, int]]) -> None:
    found = json.loads(run("mm", "--shape", "1001x2048x1010", "--layout", layout, "--json").stdout)["padding"]
    assert [(p["extent"], p["to"]) for p in found] == expected
    assert all(p["saved_us"] >= 0 for p in found) and any(p["saved_us"] > 0 for p in found)


def test_the_choice_and_its_reason_are_those_given() -> None:
    choice = Choice(tiled(64, 64, 64, 4, 4), "given by the caller")
    e = explain.explain(spec_of(PLAIN), (1024, 1024, 1024), H200, choice)
    assert e.choice == choice and e.measured is None


# -- what the database knows

SHAPE = (1024, 1024, 1024)
WINNER = tiled(64, 64, 64, 4, 4)


def remember(database: Database, shape: tuple[int, int, int] = SHAPE, part: str = "NVIDIA H200", triton: str | None = None, **more: Any) -> Record:
    """A record of PLAIN, as `epigen tune` would write it."""
    graph, target = api.graph_of(PLAIN), gpus.by_name(part).target
    spec = spec_of(PLAIN, k=shape[2])
    problem = problem_of(graph, spec, shape, part, choose.capability(target))
    run: dict[str, Any] = {"median_us": 11.0, "spread_us": 0.1, "baseline_us": 10.0, "unfused_us": 14.5, "trials": {"ok": 40}}
    run |= {"date": "2026-11-05T12:00:00Z", "triton": triton or triton_version(), "torch": "2.13.0", "epigen": "0.1.0"} | more
    found = Record.make(problem, WINNER, **run)
    assert database.add(found).added == 1
    return found


def command(shape: tuple[int, int, int], *more: str, on: Machine = NO_GPU) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(PLAIN, "--shape", "x".join(map(str, shape)), *more, "--json", on=on).stdout)
    return found


def test_a_record_of_this_problem_is_chosen_and_its_times_are_told(database: Database) -> None:
    remember(database)
    found = command(SHAPE, "--gpu", "h200")
    measured = found["measured"]
    assert (measured["us"], measured["mm_us"], measured["unfused_us"], measured["fused_over_mm"]) == (11.0, 10.0, 14.5, 1.1)
    assert measured["model_over_measured"] == pytest.approx(found["model"]["us"] / 11) and found["why"] == "tuned for 1024x1024x1024 on NVIDIA H200 (exact)"
    assert found["config"]["block_m"] == 64


def test_a_record_without_an_unfused_time(database: Database) -> None:
    remember(database, unfused_us=None)
    assert command(SHAPE)["measured"]["unfused_us"] is None


def test_another_version_of_triton_is_said_with_its_times(database: Database) -> None:
    remember(database, triton="3.0.0")
    found = command(SHAPE)
    assert found["measured"]["us"] == 11.0 and found["measured"]["triton"] == "3.0.0" and "under Triton 3.0.0" in found["why"]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (((1024, 1024, 2048), "--gpu", "h200"), "shape"),
        ((SHAPE, "--gpu", "h100"), "gpu"),
        ((SHAPE, "--dtype", "bf16"), "dtype"),
        ((SHAPE, "--gpu", "a100"), "none"),
    ],
)
def test_a_borrowed_config_brings_no_time_of_another_problem(database: Database, asked: tuple[Any, ...], name: str, golden: Golden) -> None:
    remember(database)
    found = command(*asked)
    assert found["measured"] is None
    golden(found["why"], name)


def test_a_gpu_at_hand_without_a_row_finds_its_own_records(database: Database) -> None:
    """Its row is made up from its kin; its name and capability are the driver's."""
    part = replace(TARGETS["sm_100"], name="sm_103", arch=103, part="NVIDIA B300", multiprocessors=148)
    problem = problem_of(api.graph_of(PLAIN), spec_of(PLAIN, k=SHAPE[2]), SHAPE, "NVIDIA B300", "10.3")
    database.add(replace_problem(remember(database), problem))
    found = command(SHAPE, on=machine(part))
    assert found["why"] == "tuned for 1024x1024x1024 on NVIDIA B300 (exact)" and found["measured"]["us"] == 11.0


def replace_problem(found: Record, problem: Problem) -> Record:
    return replace(found, **asdict(problem))


# -- every item of an explanation


def test_waste_of_tiles_and_of_the_last_wave() -> None:
    """By hand: 10 x 9 tiles of 128x128 cover 1280x1152, of which 1200x1100 are wanted; two blocks a multiprocessor make 264 places."""
    spec, shape = spec_of(PLAIN), (1200, 1100, 4096)
    e = explain.explain(spec, shape, H200, Choice(tiled(128, 128, 64, 4, 3), "given"))
    x = e.estimate
    assert (x.tiles, x.blocks_per_sm) == (90, 1)
    assert x.waves == pytest.approx(90 / 132) and x.tail_waste == pytest.approx(1 - 90 / 132)
    assert e.tile_waste == pytest.approx(1 - 1200 * 1100 / (1280 * 1152))


def test_the_work_is_counted_and_held_against_the_ridge() -> None:
    m, n, k = 1024, 512, 256
    found = json.loads(run(PLAIN, "--shape", f"{m}x{n}x{k}", "--json").stdout)
    assert found["flops"] == 2 * m * n * k
    assert found["fused_bytes"] == 2 * (m * k + k * n + n + m * n)
    assert found["unfused_bytes"] == found["fused_bytes"] + 2 * 4 * m * n
    assert found["intensity_flops_per_byte"] == pytest.approx(found["flops"] / found["fused_bytes"])
    assert found["gpu"]["ridge_flops_per_byte"] == pytest.approx(found["gpu"]["peak_tflops"] * 1e3 / found["gpu"]["bandwidth_gbps"])
    assert round(found["gpu"]["ridge_flops_per_byte"]) == 231


@pytest.mark.parametrize(
    ("gpu", "least", "most", "why"),
    [("L40S", 50, 10_000, "vectors of 16 bytes"), ("H200", 10, 40, "TMA")],
)
def test_padding_that_helps_is_said_with_what_it_saves(gpu: str, least: float, most: float, why: str) -> None:
    """On Hopper: reading and writing 34 MB once more."""
    odd = (PLAIN, "--shape", "4096x4096x4095", "--gpu", gpu)
    (padding,) = json.loads(run(*odd, "--json").stdout)["padding"]
    assert (padding["extent"], padding["from"], padding["to"]) == ("K", 4095, 4096) and least < padding["saved_us"] < most
    assert why in padding["why"]


def test_the_library_schedule_reads_its_product_back() -> None:
    spec = spec_of(PLAIN)
    e = explain.explain(spec, (1024, 1024, 1024), H200, rule.by_vendor(spec, (1024, 1024, 1024), H200.target, "because"))
    assert e.traffic.launches == 2 and e.estimate.product_us > 0


def test_a_program_that_the_vendor_computes_whole() -> None:
    spec = spec_of("mm")
    e = explain.explain(spec, (1001, 1024, 1024), H200, rule.by_vendor(spec, (1001, 1024, 1024), H200.target, "because"))
    assert (e.traffic.launches, e.traffic.launches_saved, e.tile_waste) == (1, 0, 0) and e.choice.config.schedule == "library"


def test_nothing_to_fuse_and_nothing_to_compute() -> None:
    bare, empty, nothing = (
        json.loads(run(text, "--shape", shape, "--json").stdout) for text, shape in (("mm", "64x64x64"), (PLAIN, "0x64x64"), (PLAIN, "64x64x0"))
    )
    assert (bare["bytes_saved"], bare["launches_saved"]) == (0, 0)
    assert (empty["tiles"], empty["flops"]) == (0, 0) and (nothing["tiles"] > 0, nothing["flops"]) == (True, 0)


@pytest.mark.parametrize("text", [PLAIN, BACKWARD, "mm, sum(b, k), amax(mm), logsumexp(mm, n)"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp8e4m3", "int8"])
@pytest.mark.parametrize("gpu", gpus.GPUS, ids=lambda gpu: gpu.short)
def test_every_gpu_and_dtype_can_be_explained(text: str, dtype: str, gpu: gpus.Gpu) -> None:
    done = run(text, "--shape", "300x500x700", "--dtype", dtype, "--gpu", gpu.short)
    assert done.exit_code == 0
    assert all(len(line) < 300 and "nan" not in line and "inf " not in line for line in done.stdout.splitlines())


def test_the_derivative_is_explained_in_bytes() -> None:
    found = json.loads(run("gelu(mm + bias)", "--shape", "512x300x200", "--dtype", "fp32", "--json").stdout)["backward"]
    assert (found["save"], found["product"], found["program"]) == ("preactivation", "out", "dmm = dgelu(mm, z[m,n]); dbias = bgrad(dmm); dmm, dbias")
    kept, tile = 512 * 300 * 4, 512 * 300 * 4
    assert found["options"] == [
        {"save": "preactivation", "kept_bytes": kept, "moved_bytes": 2 * kept},
        {"save": "recompute", "kept_bytes": 0, "moved_bytes": (512 * 200 + 200 * 300) * 4 + 2 * tile},
    ]
    masks = json.loads(run("relu(mm)", "--shape", "512x300x200", "--json").stdout)["backward"]["options"][0]
    assert masks == {"save": "mask", "kept_bytes": 512 * 38, "moved_bytes": 2 * 512 * 38}


@pytest.mark.parametrize(("text", "dtype", "why"), [("amax(mm)", "fp16", "'amax'"), ("mm", "int8", "int8")])
def test_a_program_without_a_derivative_is_explained_all_the_same(text: str, dtype: str, why: str) -> None:
    asked = (text, "--shape", "64x64x64", "--dtype", dtype)
    found = json.loads(run(*asked, "--json").stdout)
    assert found["backward"]["program"] is None and why in found["backward"]["why"] and found["flops"] > 0


def test_an_invariant_program_is_explained_as_it_runs() -> None:
    asked = ("relu(mm)", "--shape", "4096x4096x4096", "--dtype", "fp32")
    plain, invariant = (json.loads(run(*asked, *more, "--json").stdout) for more in ((), ("--invariant", "m")))
    assert plain["config"]["schedule"] == "library" and invariant["config"]["schedule"] == "tiled"
    assert "one config for all M" in run("sum(mm, n)", "--shape", "16x4096x4096", "--invariant", "m").stdout
    assert run(PLAIN, "--shape", "64x64x64", "--invariant", "n").exit_code == 2


def test_mistakes_are_errors_of_the_user(golden: Golden) -> None:
    with golden.raises(EpigenError):
        run(PLAIN, "--shape", "64x64x64", "--gpu", "h2000")
    with pytest.raises(EpigenError):
        run("rleu(mm)", "--shape", "64x64x64")
    assert run(PLAIN, "--shape", "64x64").exit_code == 2
    assert run(PLAIN).exit_code == 2
    assert isinstance(explain_command, click.Command)
