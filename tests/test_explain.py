"""`epigen explain`: what it says, for people and for programs, without running anything."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner
from test_model import BACKWARD, H200, PLAIN, spec_of, tiled

from epigen.cli_explain import explain_command
from epigen.codegen.spec import Choice
from epigen.errors import EpigenError
from epigen.runtime import device
from epigen.runtime.device import TARGETS
from epigen.tuning import explain, gpus, rule


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers on every machine."""
    monkeypatch.setattr(device, "at_hand", lambda index=None: None)  # noqa: ARG005


def run(*arguments: str) -> Any:
    return CliRunner().invoke(explain_command, arguments, catch_exceptions=False)


GOLDEN = {
    (PLAIN, "--shape", "4096x4096x4096"): """\
program   relu(mm + bias)
problem   4096x4096x4096 fp16, layout nn
gpu       NVIDIA H200 (sm_90), the default, since no GPU is at hand
          989 TFLOP/s fp16 dense, 4.28 TB/s measured, 132 multiprocessors
work      137 GFLOP, 101 MB: 1365 FLOPs a byte, above the ridge of 231
limit     math: at least 139 us at the GPU's full speed
config    tiled block_m=128 block_n=256 block_k=64 group_m=8 num_warps=8 num_stages=4
          chosen by rule for 4096x4096x4096 fp16 on sm_90: no measurement is at hand
tiles     512 tiles of 128x256, 1 block a multiprocessor: 3.88 waves, 4 waves in time; the last wave wastes 3.0% of all slots
          the tiles cover the result exactly
padding   none would help: the rows of both operands are aligned
fusing    saves 134 MB and 2 launches: 101 MB instead of 235 MB, 1 launch instead of 3
model     209 us fused (launch 4.0 us, main loop 193 us, epilogue 12.1 us), 223 us unfused
""",
    (BACKWARD, "--shape", "1000x4099x11008", "--dtype", "bf16", "--layout", "nt", "--gpu", "rtx 4090"): """\
program   dz = drelu(mm, mask); dz, bgrad(dz)
problem   1000x4099x11008 bf16, layout nt
gpu       NVIDIA GeForce RTX 4090 (sm_89), as asked
          165 TFLOP/s bf16 dense, 0.91 TB/s expected, 128 multiprocessors
work      90.2 GFLOP, 121 MB: 745 FLOPs a byte, above the ridge of 182
limit     math: at least 546 us at the GPU's full speed
config    tiled block_m=128 block_n=256 block_k=64 group_m=8 num_warps=8 num_stages=2
          chosen by rule for 1000x4099x11008 bf16 on sm_89: no measurement is at hand
tiles     136 tiles of 128x256, 1 block a multiprocessor: 1.06 waves, 2 waves in time; the last wave wastes 46.9% of all slots
          8.0% of what the tiles cover lies outside the result
padding   none would help: the rows of both operands are aligned
fusing    saves 32.7 MB and 2 launches: 121 MB instead of 154 MB, 2 launches instead of 4
model     2010 us fused (launch 4.0 us, main loop 1980 us, epilogue 23.1 us, finishing 2.0 us), 1177 us unfused
""",
}


@pytest.mark.parametrize(("arguments", "expected"), GOLDEN.items(), ids=["forward", "backward"])
def test_golden_text(arguments: tuple[str, ...], expected: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (0, expected)


def test_json_says_the_same() -> None:
    found = json.loads(run(PLAIN, "--shape", "4096x4096x4096", "--json").stdout)
    assert found["flops"] == 2 * 4096**3
    assert found["limit"] == "math" and found["config"]["block_n"] == 256
    assert found["bytes_saved"] == found["unfused_bytes"] - found["fused_bytes"] > 0
    assert (found["launches"], found["unfused_launches"], found["measured_us"]) == (1, 3, None)
    assert found["gpu"]["name"] == "NVIDIA H200" and "default" in found["gpu"]["why"]
    assert found["model"]["us"] > found["floor_us"]


def test_the_gpu_at_hand_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "at_hand", lambda index=None: gpus.by_name("L40S").target)  # noqa: ARG005
    assert "gpu       NVIDIA L40S (sm_89), the GPU at hand\n" in run(PLAIN, "--shape", "64x64x64").stdout
    assert "gpu       NVIDIA A100-SXM4-80GB (sm_80), as asked\n" in run(PLAIN, "--shape", "64x64x64", "--gpu", "a100").stdout


def test_a_gpu_without_a_row_is_taken_as_its_kin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "at_hand", lambda index=None: TARGETS["sm_86"])  # noqa: ARG005
    assert "gpu       RTX A6000 (sm_86), the GPU at hand\n" in run(PLAIN, "--shape", "64x64x64").stdout


@pytest.mark.parametrize(
    ("shape", "dtype", "limit"),
    [("8192x8192x8192", "fp16", "math"), ("16x16384x16384", "fp16", "memory"), ("64x128x256", "fp16", "latency"), ("8192x8192x64", "fp16", "memory")],
)
def test_which_limit_binds(shape: str, dtype: str, limit: str) -> None:
    done = run(PLAIN, "--shape", shape, "--dtype", dtype).stdout
    assert f"\nlimit     {limit}: " in done


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("nn", [("K", 1016)]), ("nt", [("K", 1016)]), ("tn", [("M", 1008)]), ("tt", [("M", 1008), ("K", 1016)])],
)
def test_padding_is_told_for_the_rows_as_they_lie(layout: str, expected: list[tuple[str, int]]) -> None:
    found = json.loads(run("mm", "--shape", "1001x2048x1010", "--layout", layout, "--json").stdout)["padding"]
    assert [(p["extent"], p["to"]) for p in found] == expected
    assert all(p["saved_us"] >= 0 for p in found) and any(p["saved_us"] > 0 for p in found)


def test_the_choice_and_its_reason_are_those_given() -> None:
    spec, choice = spec_of(PLAIN), Choice(tiled(64, 64, 64, 4, 4), "measured on this very GPU")
    e = explain.explain(spec, (1024, 1024, 1024), H200, choice, measured_us=11.0)
    said = explain.text(e)
    assert "config    tiled block_m=64 block_n=64 block_k=64 group_m=8 num_warps=4 num_stages=4\n          measured on this very GPU\n" in said
    assert f"measured  11.0 us: the model says {e.estimate.us / 11:.2f} of it\n" in said
    assert explain.record(e)["measured_us"] == 11.0


def test_the_library_schedule_reads_its_product_back() -> None:
    spec = spec_of(PLAIN)
    e = explain.explain(spec, (1024, 1024, 1024), H200, rule.library(spec, "because"))
    assert e.traffic.launches == 2
    assert "tiles of the epilogue of 8x128" in explain.text(e) and "product" in explain.text(e)


def test_nothing_to_fuse_and_nothing_to_compute() -> None:
    assert "fusing    there is nothing to fuse: the program is the bare product\n" in run("mm", "--shape", "64x64x64").stdout
    empty = run(PLAIN, "--shape", "0x64x64").stdout
    assert "tiles     none: the result is empty\n" in empty
    assert run(PLAIN, "--shape", "64x64x0").exit_code == 0


@pytest.mark.parametrize("text", [PLAIN, BACKWARD, "mm, sum(b, k), amax(mm), logsumexp(mm, n)"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp8e4m3", "int8"])
@pytest.mark.parametrize("gpu", gpus.GPUS, ids=lambda gpu: gpu.short)
def test_every_gpu_and_dtype_can_be_explained(text: str, dtype: str, gpu: gpus.Gpu) -> None:
    done = run(text, "--shape", "300x500x700", "--dtype", dtype, "--gpu", gpu.short)
    assert done.exit_code == 0
    assert all(len(line) < 300 and "nan" not in line and "inf " not in line for line in done.stdout.splitlines())


def test_mistakes_are_errors_of_the_user() -> None:
    with pytest.raises(EpigenError, match="unknown GPU 'h2000': did you mean h200"):
        run(PLAIN, "--shape", "64x64x64", "--gpu", "h2000")
    with pytest.raises(EpigenError):
        run("rleu(mm)", "--shape", "64x64x64")
    assert run(PLAIN, "--shape", "64x64").exit_code == 2
    assert run(PLAIN).exit_code == 2
    assert isinstance(explain_command, click.Command)
