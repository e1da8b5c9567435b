"""`epigen info`: GPUs and what they can run, versions, databases, cache; with GPUs, without, and where something is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from machines import NO_GPU, Machine
from tuned import opened, record

import epigen
from epigen import cli, settings
from epigen.codegen.schedules import SCHEDULES
from epigen.commands import info as cli_info
from epigen.errors import TargetError
from epigen.gpus import TARGETS, Target

GIB = 1 << 30


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIGEN_DB", str(tmp_path / "own"))
    monkeypatch.setenv("EPIGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(settings, "seed_database_dir", lambda: tmp_path / "seed")


def info(*arguments: object, machine: Machine = NO_GPU) -> Any:
    done = CliRunner().invoke(cli.main, ["info", *map(str, arguments)], prog_name="epigen", obj=machine)
    assert done.exit_code == 0 and not done.stderr, done.output
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


class Mixed(Machine):
    """Also knows the GPUs' memory."""

    def properties(self, index: int) -> Any:
        found = self.gpus[index]
        return SimpleNamespace(name=found.part if isinstance(found, Target) else "Tesla V100", total_memory=(80 + 60 * (index == 0)) * GIB)


MIXED = Mixed(
    {
        1: replace(TARGETS["sm_80"], part="NVIDIA A100-SXM4-80GB"),
        0: replace(TARGETS["sm_90"], part="NVIDIA H200"),
        2: TargetError("Tesla V100 (sm_70) is older than sm_80, the oldest supported"),
    }
)
"""A GPU that is too old is among them."""


def test_without_a_gpu_it_says_so_and_what_the_default_target_runs(tmp_path: Path) -> None:
    text = info()
    assert re.search(r"^gpu +none at hand; kernels are compiled for sm_90 \(H100, H200\) unless another target is named", text, re.MULTILINE)
    assert re.search(r"^ +tiled +fp32, fp16, bf16, fp8e4m3, fp8e5m2, int8$", text, re.MULTILINE)
    assert f"database  {tmp_path / 'own'}, yours: empty\n" in text and f"database  {tmp_path / 'seed'}, shipped: empty\n" in text
    assert text.endswith(f"cache     {tmp_path / 'cache'}\n")
    found = info("--json")
    assert found["gpus"] == [] and found["driver"] is None and found["default"]["target"] == "sm_90" and "tiled" in found["default"]["schedules"]


def test_versions() -> None:
    found = info("--json")["versions"]
    assert list(found) == ["epigen", "python", "torch", "triton", "optuna"] and found["epigen"] == epigen.__version__ and all(found.values())
    first = info().splitlines()[0]
    assert first == "epigen    " + ", ".join([found.pop("epigen"), *(f"{name} {version}" for name, version in found.items())])


def test_a_package_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_info, "PACKAGES", ("torch", "no-such-package"))
    assert info("--json")["versions"]["no-such-package"] is None
    assert info().splitlines()[0].endswith("no-such-package is missing")


def test_each_gpu_with_the_schedules_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_info, "driver", lambda: "580.65.06")
    text = info(machine=MIXED)
    lines = text.splitlines()
    assert "gpu 0     NVIDIA H200 (sm_90), 132 multiprocessors, 140 GiB, driver 580.65.06" in lines
    a100 = lines.index("gpu 1     NVIDIA A100-SXM4-80GB (sm_80), 108 multiprocessors, 80 GiB, driver 580.65.06")
    assert lines[a100 + 1].split(maxsplit=1)[1] == "fp32, fp16, bf16, fp8e4m3, fp8e5m2, int8"
    assert lines[a100 + 2].split(maxsplit=1) == ["tiled", "fp32, fp16, bf16, fp8e5m2, int8"]
    assert [line.split()[0] for line in lines if "fp16" in line] == [*SCHEDULES, "library", "tiled", "split_k"]
    assert "gpu 2     Tesla V100, 80 GiB: Tesla V100 (sm_70) is older than sm_80, the oldest supported" in lines
    found = info("--json", machine=MIXED)
    assert [g["index"] for g in found["gpus"]] == [0, 1, 2] and found["default"] is None and found["driver"] == "580.65.06"
    assert "fp8e4m3" not in found["gpus"][1]["schedules"]["tiled"] and "error" in found["gpus"][2] and "schedules" not in found["gpus"][2]


def test_databases_with_their_records_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    opened(tmp_path / "own").add(record(), record((16, 16, 16)))
    opened(tmp_path / "seed").add(record(gpu="NVIDIA H100"))
    (tmp_path / "own" / "x.json").write_text("{")
    text = info()
    assert (
        f"database  {tmp_path / 'own'}, yours: 2 records in 2 files (NVIDIA H200)\n          warning: {tmp_path / 'own' / 'x.json'}: line 1, column 2" in text
    )
    assert f"database  {tmp_path / 'seed'}, shipped: 1 record in 1 file (NVIDIA H100)\n" in text
    own, seed = info("--json")["databases"]
    assert (own["records"], own["files"], own["writable"], len(own["complaints"])) == (2, 2, True, 1)
    assert (seed["records"], seed["gpus"], seed["writable"], seed["complaints"]) == (1, ["NVIDIA H100"], False, [])
    assert info("--json", "--db", tmp_path / "seed")["databases"][0]["records"] == 1


def test_remembered_searches_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "studies"
    folder.mkdir(parents=True)
    for name in ("a.journal", "b.journal", "b.journal.lock"):
        (folder / name).touch()
    assert info("--json")["cache"] == {"path": str(tmp_path / "cache"), "studies": 2}
    assert info().endswith("cache, 2 remembered searches\n")


def test_the_drivers_version_is_read_from_its_own_file(tmp_path: Path) -> None:
    file = tmp_path / "version"
    for line in (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)  Thu Jul 10 2026",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Jul  1 12:00:00 UTC 2026",
    ):
        file.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
        assert cli_info.driver(file) == "580.159.04"
    file.write_text("something else")
    assert cli_info.driver(file) is None and cli_info.driver(tmp_path / "nowhere") is None


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_target_runs_some_schedule_with_every_dtype(target: Target) -> None:
    found = cli_info.schedules(target)
    assert set().union(*found.values()) == {"fp32", "fp16", "bf16", "fp8e4m3", "fp8e5m2", "int8"}
    assert ("fp8e4m3" in found["tiled"]) == target.fp8
