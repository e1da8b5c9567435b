"""Recorded tables that are none: whatever stands in the file, `--replay` ends in a sentence with its name, or searches."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from golden import Golden

from bench.record import DATA
from epigen import cli
from epigen.errors import EpigenError
from epigen.tuning import report, table
from epigen.tuning.runner import Replay
from epigen.tuning.tune import tune_one

WHOLE: dict[str, Any] = json.loads((DATA / "sweep_skinny.json").read_text())
SMALL = WHOLE | {"rows": WHOLE["rows"][:24]}


def told(path: Path) -> str:
    with pytest.raises(EpigenError, match=str(path)) as caught:
        table.read(path)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 400 + len(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "value"),
        (b"{", "property"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"[" * 100_000, "deeply"),
        (b"[]", "list"),
        (b"7", "7"),
        (b"1" * 5000, "limit|digits"),
        (b"{}", "task"),
        (b'{"tables": []}', "task"),
        (b"relu(mm + bias)\n", "value"),
    ],
)
def test_another_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert Counter(told(path).split(":"))[" this is no table of measurements"] == 1
    with pytest.raises(EpigenError, match=said):
        table.read(path)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("baseline", "mm_us"), math.nan, "baseline.mm_us: expected a number from 0"),
        (("baseline", "mm_us"), math.inf, "baseline.mm_us: expected a number from 0"),
        (("baseline", "mm_us"), "18", "baseline.mm_us: expected a number from 0"),
        (("baseline",), None, "baseline: expected an object"),
        (("task", "shape"), [16, 4096], "task.shape: expected a list of 3"),
        (("task", "shape", 0), 0, "task.shape.0: expected a whole number from 1"),
        (("task", "a"), "int64", "task.a: expected one of fp32"),
        (("task", "inputs"), "fp16,fp16", "task: inputs: one dtype, or one for each input"),
        (("task", "text"), "relu(mm + bais)", "task.text: no program: unknown name 'bais'"),
        (("task", "text"), "x" * 100_000, "task.text: expected a program of at most"),
        (("task", "target", "name"), "sm_1", "task.target.name: expected one of sm_80"),
        (("task", "target", "arch"), "gfx942", "task.target: sm_90 is cuda 90, not 'cuda' 'gfx942'"),
        (("task", "target", "multiprocessors"), 0, "task.target.multiprocessors: expected a whole number from 1"),
        (("task", "more"), 1, "task.more: there is no such field"),
        (("rows",), [], "rows: expected a list of 1"),
        (("rows",), {}, "rows: expected a list of 1"),
        (("rows", 3), [1, 2], "rows.3: expected a list of 5"),
        (("rows", 3, 0), "best", "rows.3: unknown schedule 'best'"),
        (("rows", 3, 1, "block_m"), 17, "rows.3: block_m=17 is not one of"),
        (("rows", 3, 2), "fine", "rows.3: expected one of ok"),
        (("rows", 0, 3), 0.0, "rows.0: a config that was timed has a time above 0"),
        (("rows", 3, 3), None, "rows.3: expected a number"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, where: tuple[Any, ...], value: Any, said: str) -> None:
    spoilt = json.loads(json.dumps(SMALL))
    holder = spoilt
    for part in where[:-1]:
        holder = holder[part]
    holder[where[-1]] = value
    path = tmp_path / "x.json"
    path.write_text(json.dumps(spoilt))
    assert f"{path}: this is no table of measurements: {said}" in told(path)


def test_what_is_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    golden(told(tmp_path / "nowhere.json"), "nowhere")
    golden(told(tmp_path), "folder")
    monkeypatch.setattr(table, "_MOST_BYTES", 1000)
    golden(told(Path("/dev/zero")), "endless")


def _mutant(rng: random.Random) -> bytes:
    """The table with a byte, or a value, that is another."""
    if rng.random() < 0.5:
        text = bytearray(json.dumps(SMALL).encode())
        at = rng.randrange(len(text))
        if rng.random() < 0.5:
            text[at] ^= 1 << rng.randrange(8)
        else:
            text[at : at + rng.randrange(3)] = rng.choice([b"", b"0", b'"', b"NaN", b"1e999", b"-", b"null", b"{", b"9" * 20])
        return bytes(text)
    spoilt = json.loads(json.dumps(SMALL))
    holder, key = spoilt, rng.choice(list(spoilt))
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    holder[key] = rng.choice([None, True, -1, 0, 1, 7, 10**40, 0.5, math.nan, -math.inf, "", "x", "fp32", "nn", [], [1], {}, {"a": 1}])
    return json.dumps(spoilt).encode()


def test_no_mutant_of_a_table_is_an_internal_error(tmp_path: Path) -> None:
    """Some are still tables: of those every tenth is searched, and the result shown."""
    rng, ends, path = random.Random(7), Counter[str](), tmp_path / "x.json"
    for _ in range(400):
        path.write_bytes(_mutant(rng))
        try:
            found = table.read(path)
        except EpigenError as error:
            ends["told" if str(error).startswith(f"{path}: this is no table of measurements: ") else str(error)] += 1
            continue
        ends["a table"] += 1
        if ends["a table"] % 10 == 0:
            tuned = tune_one(found.task, None, trials=2, runner=Replay(found.rows, found.baseline))
            assert report.table([(found.task, tuned)]) and json.dumps(report.record(found.task, tuned))
    assert set(ends) == {"told", "a table"} and min(ends.values()) > 60, ends


def test_the_command_tells_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(SMALL | {"rows": 3}))
    done = CliRunner().invoke(cli.main, ["tune", "--replay", str(path)], prog_name="epigen")
    assert done.exit_code == 1 and done.stderr == f"error: {path}: this is no table of measurements: rows: expected a list of 1 to 1000000, not 3\n"
