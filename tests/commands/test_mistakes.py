"""What the command line says to mistakes: all of it, in one golden file. Nothing goes to standard output, nothing is run, and there is no traceback."""

from __future__ import annotations

import re
import shlex

import checkout
import pytest
from click.testing import CliRunner
from machines import NO_GPU, ONE_H200

from bench.record import DATA
from epigen import cli

GOLDEN = checkout.GOLDEN / "command_line.txt"
ONE = "tune 'relu(mm + bias)' --shape 16x4096x4096"
TABLE = (DATA / "sweep_skinny.json").relative_to(checkout.ROOT)

CLICKS = (
    "", "frobnicate", "compile", "compile mm mm", "compile mm --wrong", "compile mm -mmm", "compile mm --emmit", "compile mm -n", "compile mm --no-verifi",
    "compile mm --emit asm", "compile mm --target sm_91", "compile mm --layout n", "compile mm --precision tf31", "compile mm --invariant k", "compile mm --backward --save all",
    "explain mm", "explain mm --shape 64x64x64 --layout nx",
    "tune --suite nowhere.toml", "tune --replay nowhere.json", f"{ONE} --trials 0", f"{ONE} --seed=-1", f"{ONE} --seed 111111111111111111111111111111",
    f"{ONE} --budget=-1", f"{ONE} --layout nx",
)  # fmt: skip
"""Which end with status 2, and click has the words."""

USAGE = (
    "compile mm --dtype fp64", "compile mm --shape 4096x4096", "compile mm --shape=-1x2x3", "compile mm --shape 1x2x1234567890", "compile mm --config block_m",
    "compile mm --config ''", "compile mm --config block_m=64,,", "compile mm --save mask", "compile mm --wrt mm", "compile mm --schedule tiled --config block_m=64",
    "explain mm --shape 64x64",
    "tune", "tune 'relu(mm)'", "tune --shape 1x1x1", "tune 'relu(mm)' --shape 64x64", f"{ONE} --replay {TABLE}", f"tune --replay {TABLE} --fresh", f"tune --replay {TABLE} --missing",
    f"{ONE} --fresh --storage x.journal", f"{ONE} --budget nan", f"{ONE} --shape 0x1", f"{ONE} --dtype float61", f"{ONE} --devices ''", f"{ONE} --devices 0,",
    f"{ONE} --devices both", f"{ONE} --devices 0,2",
)  # fmt: skip
"""Which do too, and epigen has."""

GIVEN = (
    "compile ''", "compile 'reluu(mm + bias)'", "compile 'relu(mm + '", "compile 'reluu(mm) + gelo(mm)'", "compile 'mm * s[m] + s[n]'", "compile 'mm + sum(mm)'",
    "compile mm --config schedule=tild,block_m=64", "compile mm --config schedule=5", "compile mm --config blok_m=64", "compile mm --config block_m=48",
    "compile mm --config block_m=big", "compile mm --config block_m=64", "compile mm --config schedule=library", "compile mm --config 1=2",
    "compile 'relu(mm + bias)' --schedule persistent --target sm_80", "compile 'relu(mm + bias)' --emit ttir --target sm_90", "compile mm --schedule library --emit ptx",
    "compile 'amax(mm)' --backward", "compile 'relu(mm + bais)' --backward", "compile 'gelu(mm)' --backward --save mask", "compile 'mm + bias' --backward --wrt mm,bais",
    "compile mm --backward --dtype int8",
    "explain mm --shape 64x64x64 --gpu h2000", "explain 'rleu(mm)' --shape 64x64x64",
    "tune 'relu(mm + bais)' --shape 1x1x1",
)  # fmt: skip
"""Which end with status 1."""


def ended(words: str, status: int) -> str:
    done = CliRunner().invoke(cli.main, shlex.split(words), prog_name="epigen", obj=ONE_H200 if words.startswith("tune") else NO_GPU)
    assert isinstance(done.exception, SystemExit) and done.exit_code == status, done.output
    assert done.stdout == "" and "Traceback" not in done.stderr
    found: str = done.stderr
    return found


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout.ROOT)


@pytest.mark.parametrize("words", CLICKS)
def test_mistakes_that_click_finds(words: str) -> None:
    assert ended(words, 2)


def said(words: str, status: int) -> str:
    """From the mistake on, without what was said of the target and the config before, and of how the command is used."""
    found = re.search(r"^(?:Error: (?:Invalid value for '[^']*': )?|error: |(?=\w+Error: ))(.*)", ended(words, status), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_mistakes_are_told_as_in_the_golden_file(update_golden: bool) -> None:
    found = "\n".join(f"$ epigen {words}\n{said(words, status)}" for status, some in ((2, USAGE), (1, GIVEN)) for words in some)
    if update_golden:
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text(), "pytest tests/commands/test_mistakes.py --update-golden writes it anew"
