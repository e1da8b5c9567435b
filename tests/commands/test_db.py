"""`epigen db`: what goes to which stream, exit statuses, and what each command does to which file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from golden import Golden
from tuned import NAME, OTHER_SPEC, opened, record

from epigen import cli, settings
from epigen.commands import db as cli_db


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own database and a shipped one, both in the test's folder."""
    monkeypatch.setenv("EPIGEN_DB", str(tmp_path / "own"))
    monkeypatch.setattr(settings, "seed_database_dir", lambda: tmp_path / "seed")


def run(*arguments: str | Path, status: int = 0) -> Any:
    """As a subcommand of a group like epigen's own, which turns mistakes into messages."""
    group = cli.Group("epigen", commands=[cli_db.db])
    done = CliRunner().invoke(group, ["db", *map(str, arguments)], prog_name="epigen")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for name in ("list", "show", "merge", "export", "check", "prune"):
        assert f"\n  {name} " in text
        assert "--db PATH" in run(name, "--help").stdout and "--json" in run(name, "--help").stdout


def test_list(tmp_path: Path, golden: Golden) -> None:
    golden(run("list").stderr)
    opened(tmp_path / "own").add(record(), record((16, 8192, 4096), 9.5, b="bf16", program="z = mm\nz * 2", spec=OTHER_SPEC))
    opened(tmp_path / "seed").add(record(gpu="NVIDIA H100"))
    done = run("list")
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'own' / NAME}: NVIDIA H200 (9.0)"
    assert lines[3] == f"{tmp_path / 'seed' / 'nvidia_h100_sm90.json'}: NVIDIA H100 (9.0)"
    assert lines[1].split()[1:] == (
        "4096x4096x4096 fp16 nn 100.00 us 0.90 vs mm relu(mm + bias) "
        "[tiled block_m=128 block_n=128 block_k=64 group_m=8 num_warps=8 num_stages=3 fused_finalize=0 prefetch=0; Triton 3.9.0]"
    ).split()  # fmt: skip
    assert "16x8192x4096" in lines[2] and "fp16xbf16" in lines[2] and "z = mm; z * 2" in lines[2]
    assert len(lines) == 5
    assert "(inputs" not in done.stdout
    opened(tmp_path / "other").add(record(), record(inputs=("fp32[n]",)))
    assert [" (inputs fp32[n])" in line for line in run("list", "--db", tmp_path / "other", "--gpu", "H200").stdout.splitlines()[1:]] == [False, True]
    assert "H100" not in run("list", "--gpu", "h200").stdout
    assert len(run("list", "--program", "z * 2").stdout.splitlines()) == 2
    whole = json.loads(run("list", "--json").stdout)
    assert [r["shape"] for r in whole] == [[4096] * 3, [16, 8192, 4096], [4096] * 3]
    assert whole[0]["name"] == lines[1].split()[0] and whole[0]["config"]["block_m"] == 128 and "driver" not in whole[0]
    assert len(json.loads(run("list", "--json", "--db", tmp_path / "seed").stdout)) == 1


def test_damage_is_a_warning_and_the_rest_is_listed(tmp_path: Path) -> None:
    opened(tmp_path / "own").add(record())
    (tmp_path / "own" / "x.json").write_text("{")
    done = run("list", "--json")
    assert len(json.loads(done.stdout)) == 1
    assert done.stderr.startswith(f"warning: {tmp_path / 'own' / 'x.json'}: line 1, column 2: ")


def test_show(tmp_path: Path, golden: Golden) -> None:
    one, two = record(driver="580.65.06", a="fp32", b="fp32", precision="tf32"), record((16, 8192, 4096), unfused_us=None)
    opened(tmp_path / "own").add(one, two, bare := record((9, 9, 9), program="mm", inputs=()))
    assert "9x9x9, fp16 x fp16 -> fp16, layout nn" in run("show", bare.name).stdout
    text = run("show", one.name[:6], two.name).stdout
    for part in (one.name, two.name, "4096x4096x4096, fp32 x fp32, inputs fp16[n] -> fp16, layout nn, rows aligned to 16, tf32", "NVIDIA H200 (9.0, driver 580.65.06)",
                 "100 us, spread 1 us", "90 us for the product alone; with one pointwise pass 130 us", "40 ok, 1 crashed",
                 "2026-11-05T12:00:00Z, Triton 3.9.0, torch 2.13.0+cu130, epigen 0.1.0", str(tmp_path / "own" / NAME)):  # fmt: skip
        assert part in text
    assert json.loads(run("show", two.name, "--json").stdout)[0]["shape"] == [16, 8192, 4096]
    golden(run("show", "xyz", status=1).stderr, "nothing")
    assert "Missing argument" in run("show", status=2).stderr
    assert "begins with ''" in run("show", "", status=1).stderr


def test_a_short_name_may_be_that_of_several(tmp_path: Path) -> None:
    some = [record((m, 1, 1)) for m in range(17)]
    opened(tmp_path / "own").add(*some)
    firsts = [r.name[0] for r in some]
    twice = next(f for f in firsts if firsts.count(f) > 1)  # 17 names begin with 16 digits
    assert "write more" in run("show", twice, status=1).stderr


def test_merge_and_export(tmp_path: Path, golden: Golden) -> None:
    opened(tmp_path / "theirs").add(record(median_us=9), record((16, 16, 16)))
    opened(tmp_path / "own").add(record(median_us=10))
    done = run("merge", tmp_path / "theirs")
    assert done.stdout.splitlines()[-1] == f"1 added, 1 replaced, 0 unchanged, 1 dropped into {tmp_path / 'own'}"
    assert "9 us of 2026-11-05T12:00:00Z stays" in done.stdout
    report = json.loads(run("merge", tmp_path / "theirs", "--json").stdout)
    assert report == {"added": 0, "replaced": 0, "unchanged": 2, "dropped": [], "complaints": [], "aside": []}
    golden(run("merge", tmp_path / "nowhere", status=1).stderr, "nowhere")

    run("export", tmp_path / "out.json", "--gpu", "H200")
    assert len(opened(tmp_path / "out.json").records()) == 2
    opened(tmp_path / "seed").add(record((5, 5, 5)))
    golden(run("export", tmp_path / "out.json", "--shipped").stdout, "shipped")


def test_a_damaged_file_is_kept_and_said_so(tmp_path: Path) -> None:
    opened(tmp_path / "theirs").add(record())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / NAME).write_text("{")
    done = run("merge", tmp_path / "theirs")
    assert f"warning: the damaged file is kept as {tmp_path / 'own' / NAME}.damaged-1" in done.stderr
    assert "1 added" in done.stdout


def test_check(tmp_path: Path, golden: Golden) -> None:
    golden(run("check").stdout, "none")
    opened(tmp_path / "own").add(record())
    golden(run("check").stdout, "one")
    path = tmp_path / "seed" / "bad.json"
    path.parent.mkdir()
    path.write_text((tmp_path / "own" / NAME).read_text().replace('"layout": "nn"', '"layout": "no"'))
    done = run("check", status=1)
    assert done.stdout.splitlines() == [
        f"{path}: record 0 ('relu(mm + bias)'): layout: expected one of nn, nt, tn, tt, not 'no'",
        "2 files checked, 1 problem",
    ]
    assert json.loads(run("check", path, "--json", status=1).stdout)["files"] == 1
    run("check", "--db", tmp_path / "own")
    golden(run("check", tmp_path / "nowhere", status=1).stderr)


def test_prune(tmp_path: Path, golden: Golden) -> None:
    own = opened(tmp_path / "own")
    own.add(record(median_us=10), record(median_us=9, triton="3.8.0"))
    golden(run("prune", status=2).stderr, "nothing to drop")
    assert run("prune", "--beaten", "--dry-run").stdout.splitlines()[-1].endswith("1 dropped in " + str(tmp_path / "own") + ", if it were no dry run")
    assert len(own.records()) == 2
    golden(run("prune", "--beaten").stdout, "beaten")
    assert len(own.records()) == 1
    assert len(json.loads(run("prune", "--triton", "3.9.0", "--json").stdout)["dropped"]) == 1
    assert own.records() == []


@pytest.mark.parametrize("target", ["x.json", "folder"])
def test_an_export_of_nothing_is_a_mistake_and_writes_nothing(target: str, tmp_path: Path) -> None:
    assert str(tmp_path / "own") in run("export", tmp_path / target, status=1).stderr
    opened(tmp_path / "own").add(record())
    for arguments in (("--gpu", "MI300"), ("--program", "gelu")):
        assert "asked for" in run("export", tmp_path / target, *arguments, status=1).stderr
    assert not (tmp_path / target).exists()
    assert run("export", tmp_path / target).stdout.startswith("1 added") and (tmp_path / target).exists()
