"""The tuning database: what a record may hold, damaged files, merging, writers that are killed, and the order of look-up."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from golden import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from tuned import A100, H200, NAME, OTHER_KIND, OTHER_SPEC, SPEC, TRITON, config, opened, problem, record

from epigen import settings as places
from epigen.codegen import schedules
from epigen.db import database as db
from epigen.db import database_file, lock, migrations, records, salvage
from epigen.db.database import Database
from epigen.db.problem import Problem
from epigen.db.records import Damaged, Record, better, merged, parse, render
from epigen.errors import DatabaseError, EpigenError


def text_of(*found: Record) -> str:
    return render(*H200, found)


def document(*found: Record) -> dict[str, Any]:
    return json.loads(text_of(*found))


def only(tmp_path: Path, content: str | bytes) -> Path:
    (tmp_path / NAME).write_bytes(content.encode() if isinstance(content, str) else content)
    return tmp_path / NAME


# -- one record


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    some = [
        record(),
        record((1, 0, 2**31), baseline_us=None, unfused_us=None, driver="580.65.06"),
        record((6, 8, 9), inputs=()),
        record((6, 9, 9), inputs=("fp32[n]", "fp16[mn]", "bits", "scalar", "fp8e4m3[m]")),
        record((7, 8, 9), program='z = mm\nrelu(z)  # "é"', a="int8", b="int8", outputs=("int32", "uint8", "fp32"), layout="tt", alignment=1),
        record((5, 5, 5), a="fp32", b="fp32", precision="tf32", median_us=0.001, spread_us=0),
        record(config=schedules.config("library", block_m=8, block_n=128, num_warps=4), triton="3.6.0+git1a2b"),
    ]
    report = opened(tmp_path).add(*some)
    assert (report.added, report.replaced, report.unchanged, report.dropped, report.complaints) == (7, 0, 0, [], [])
    assert by_key(opened(tmp_path)) == {r.key: r for r in some}
    assert [r.problem for r in some] == [
        Record.make(r.problem, r.kernel_config, **{n: v for n, v in asdict(r).items() if n not in WITHOUT}).problem for r in some
    ]
    assert (tmp_path / NAME).read_text().isascii()


WITHOUT = {*Problem.__dataclass_fields__, "schedule", "config"}


def test_the_text_is_stable_and_reviews_well() -> None:
    one, two = record(), record((16, 4096, 4096), 7.25)
    assert text_of(one, two) == text_of(two, one)
    changed = text_of(one, record((16, 4096, 4096), 7.25, config(64)))
    lines = list(zip(text_of(one, two).splitlines(), changed.splitlines(), strict=True))
    assert sum(old != new for old, new in lines) == 1
    assert all(len(old) < 200 for old, _ in lines)
    assert parse(text_of().encode()).records == ()


def test_the_example_of_the_documentation_is_a_database() -> None:
    text = (ROOT / "tuning_db" / "README.md").read_text(encoding="utf-8")
    block = "".join(line[4:] + "\n" for line in text.splitlines() if line.startswith("    ") and not line.startswith("    epigen"))
    found = parse(block.encode())
    assert (len(found.records), found.complaints) == (1, ())
    assert render(found.gpu, found.capability, found.records) == block
    fields = {name.strip("` ") for row in text.split("| --- | --- |")[1].split("\n\n")[0].strip().splitlines() for name in row.split("|")[1].split(",")}
    assert fields == {*Record.__dataclass_fields__, "schema"}


@pytest.mark.parametrize(
    ("gpu", "capability", "name"),
    [
        (*H200, NAME),
        (*A100, "nvidia_a100_sxm4_80gb_sm80.json"),
        ("NVIDIA B200", "10.0", "nvidia_b200_sm100.json"),
        ("AMD Instinct MI300X", "gfx942", "amd_instinct_mi300x_gfx942.json"),
        ("AMD Radeon RX 6800/6800 XT", "gfx1030", "amd_radeon_rx_6800_6800_xt_gfx1030.json"),
    ],
)
def test_a_file_is_named_after_its_gpu(tmp_path: Path, gpu: str, capability: str, name: str) -> None:
    opened(tmp_path).add(record(gpu=gpu, capability=capability))
    assert [f.name for f in db.files(tmp_path)] == [name]
    assert opened(tmp_path).records()[0][1].gpu == gpu


# What an edited file may hold in a field, and part of what is said of it.
WRONG: list[tuple[str, Any, str]] = [
    *(("shape", v, "shape") for v in ([1, 2], [1, 2, 3, 4, 5], [-1, 2, 3], [1, 2, 2**31 + 1], [1.5, 2, 3], ["1", 2, 3], [True, 2, 3], "4096x1x1", None, {"m": 1})),
    *((f, v, f) for f in ("a", "b") for v in ("fp64", "../fp16", "", 16, ["fp16"], None)),
    *(("inputs", v, "inputs") for v in (["fp16"], ["fp64[n]"], ["fp16[nk]"], ["fp16[nm]"], ["bits[mn]"], ["bias"], "fp16[n]", [1], [True], ["bits"] * 1001, None)),
    *(("outputs", v, "outputs") for v in ([], ["fp64"], "fp16", [1], ["fp16"] * 1001, None)),
    *(("layout", v, "layout") for v in ("n", "xx", 1, None)),
    *(("precision", v, "precision") for v in ("fast", 1, None)),
    *(("program", v, "program") for v in ("", "mm\x1b[2J", "mm\x00", "mm\u202e", "\ud800", "m" * 20_001, 1, None, ["mm"])),
    *(("spec", v, "spec") for v in ("0123", "0123456789abcdeg", "../../etc/passwd", 0, None, "0123456789abcdef\n")),
    *(("kind", v, "kind") for v in ("", "load: store:", "load:/ store: reduce:", "load:" + "n," * 4000 + " store: reduce:", 1)),
    *(("alignment", v, "alignment") for v in (0, 3, 32, -16, 16.5, "16", True, None)),
    *(("schedule", v, "") for v in ("", "tile", "Tiled", "/bin/sh", "__import__('os')", 1, None)),
    *(("config", v, "config") for v in ({}, [], None, "tiled", {"block_m": 128}, {"__import__('os')": 1}, {"schedule": 1})),
    *((f, v, f) for f in ("median_us", "baseline_us", "unfused_us") for v in (0, -1.0, 1e10, "12", "os.system('x')", "/etc/passwd", [1], True, {"us": 1})),
    *(("spread_us", v, "spread_us") for v in (-0.5, 2e9, "1", None, True)),
    *(("trials", v, "trials") for v in ({"won": 1}, {"ok": -1}, {"ok": 1.5}, {"ok": "1"}, {"ok": 10**10}, {"ok": True}, [], None)),
    *(("date", v, "date") for v in ("", "today", "2026-13-05T12:00:00Z", "2026-11-05", "2026-11-05T12:00:00+00:00", "٢026-11-05T12:00:00Z", 20261105, None)),
    *((f, v, f) for f in ("triton", "torch", "epigen", "driver") for v in ("", "latest", "3.9/../..", "3.9\n", "3" * 65, 3.9, ["3.9"])),
    ("gpu", "NVIDIA H100", "without gpu and capability"),
    ("capability", "9.0", "without gpu and capability"),
    ("extra", 1, "there is no such field"),
    ("key", "x", "there is no such field"),
    ("model_config", {}, "there is no such field"),
    ("__class__", "x", "there is no such field"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_an_edited_field_is_refused_in_one_line(tmp_path: Path, number: int) -> None:
    field, value, part = WRONG[number]
    whole = document(record(), record((16, 16, 16)))
    whole["records"][0][field] = value
    refused(tmp_path, json.dumps(whole), part, salvaged=1)


@pytest.mark.parametrize(
    "field", [f for f in Record.__dataclass_fields__ if f not in ("gpu", "capability", "baseline_us", "unfused_us", "driver", "invariant", "groups", "sparse")]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    whole = document(record(), record((16, 16, 16)))
    del whole["records"][1][field]
    refused(
        tmp_path,
        json.dumps(whole),
        f"record 1 ('relu(mm + bias)'): {field}: this field is missing".replace(" ('relu(mm + bias)')", "" if field == "program" else " ('relu(mm + bias)')"),
        salvaged=1,
    )


@pytest.mark.parametrize("dimension", ["block_m", "num_stages"])
@pytest.mark.parametrize("value", [0, -128, 100, 2**40, 128.0, "128", "os.getpid()", True, None, [128]])
def test_a_config_is_held_against_its_schedule(tmp_path: Path, dimension: str, value: Any) -> None:
    whole = document(record())
    whole["records"][0]["config"][dimension] = value
    refused(tmp_path, json.dumps(whole), dimension, salvaged=0)


def refused(tmp_path: Path, text: str | bytes, part: str, salvaged: int) -> None:
    """The file is complained of in one line with its place; look-up goes on, and a write keeps the file aside."""
    path = only(tmp_path, text)
    before = path.read_bytes()
    chain = opened(tmp_path)
    assert chain.find(problem((3, 3, 3), spec=OTHER_SPEC, kind=OTHER_KIND), TRITON) is None
    assert len(chain.records()) == salvaged
    (complaint,) = chain.complaints
    assert (
        complaint.startswith(f"{path}: ") and part in complaint and "\n" not in complaint and complaint.isprintable() and len(complaint) < len(str(path)) + 250
    )
    assert db.check(tmp_path) == [complaint] == db.check(path)
    assert path.read_bytes() == before, "reading changes nothing"

    report = chain.add(record((64, 64, 64)))
    aside = tmp_path / f"{NAME}.damaged-1"
    assert (report.added, report.complaints, report.aside) == (1, [complaint], [aside])
    assert aside.read_bytes() == before
    assert len(chain.records()) == salvaged + 1 and chain.complaints == () and db.check(tmp_path) == []


# -- whole files


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "line 1, column 1"),
        ("null", "expected an object"),
        ("[]", "expected an object"),
        ("{}", "schema: expected a whole number, not None"),
        ("import os", "line 1, column 1"),
        (b"\xff\xfe{}", "byte 0 is not UTF-8"),
        (b"\x80\x04\x95", "byte 0 is not UTF-8"),
        ("<<<<<<< HEAD\n{}", "line 1, column 1"),
        ('{"schema": 1}', "gpu: this field is missing"),
        ('{"schema": 1, "schema": 1}', "'schema' stands twice"),
        ('{"schema": "1"}', "expected a whole number, not '1'"),
        ('{"schema": true}', "expected a whole number, not True"),
        ('{"schema": 1.0}', "expected a whole number, not 1.0"),
        ('{"schema": -1}', "-1 was never in use"),
        ('{"schema": 0}', "0 was never in use"),
        ('{"schema": 1, "gpu": "H", "capability": "9.0", "records": {}}', "records"),
        ('{"schema": 1, "gpu": "/etc/../x", "capability": "9.0", "records": []}', "gpu: expected a GPU's name"),
        ('{"schema": 1, "gpu": "H", "capability": "9", "records": []}', "capability"),
        ('{"schema": 1, "gpu": "H", "capability": "9.0", "records": [], "hook": "x"}', "hook: there is no such field"),
        ('{"schema": NaN}', "NaN is no number"),
        ('{"schema": ' + "1" * 5000 + "}", "digits"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"schema": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ],
    ids=range(24),
)
def test_what_is_no_database_is_refused_in_one_line(tmp_path: Path, text: str | bytes, part: str) -> None:
    refused(tmp_path, text, part, salvaged=0)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    for wrong, part in (("NaN", "NaN is no number"), ("-Infinity", "-Infinity is no number")):
        refused(tmp_path, text_of(record()).replace("100.0", wrong), part, salvaged=0)
        (tmp_path / f"{NAME}.damaged-1").unlink()
    refused(tmp_path, text_of(record()).replace("100.0", "1e999"), "median_us", salvaged=0)
    (tmp_path / f"{NAME}.damaged-1").unlink()
    refused(tmp_path, text_of(record()).replace("4096, 4096, 4096", f"4096, 4096, 1{'0' * 400}"), "shape.2: ", salvaged=0)


def test_a_record_that_is_no_object(tmp_path: Path) -> None:
    for wrong in (1, "x", None, [], [[]], True):
        whole = document(record())
        whole["records"].append(wrong)
        refused(tmp_path, json.dumps(whole), "record 1: expected an object", salvaged=1)
        (tmp_path / f"{NAME}.damaged-1").unlink()


def test_a_file_truncated_at_any_byte_is_reported(tmp_path: Path) -> None:
    """And the records before that byte are in use; no prefix but the one that lacks the last line's end is taken for a whole database."""
    both = (record((16, 16, 16)), record())
    whole = text_of(*both).encode()
    path = tmp_path / NAME
    ends = [whole.index(b"\n    }") + 6, whole.rindex(b"\n    }") + 6]
    salvaged = 0
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        chain = opened(tmp_path)
        assert tuple(r for _, r in chain.records()) == both[: sum(length >= end for end in ends)]
        assert chain.complaints and all(re.match(rf"{path}: (record \d.*: )?line \d+(, column \d+)?: ", c) for c in chain.complaints)
        salvaged += bool(chain.records())
    assert salvaged == len(whole) - 1 - ends[0]
    path.write_bytes(whole[:-1])
    assert len(opened(tmp_path).records()) == 2


def test_a_truncated_file_is_kept_and_never_overwritten(tmp_path: Path) -> None:
    whole = text_of(record()).encode()
    for number in (1, 2, 3):
        only(tmp_path, whole[: 100 * number])
        report = opened(tmp_path).add(record((number, 1, 1)))
        assert report.aside == [tmp_path / f"{NAME}.damaged-{number}"]
    assert [(tmp_path / f"{NAME}.damaged-{n}").read_bytes() for n in (1, 2, 3)] == [whole[: 100 * n] for n in (1, 2, 3)]


def test_a_damaged_file_is_kept_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / f"{NAME}.damaged-1").write_text("older")
    only(tmp_path, "{")
    assert opened(tmp_path).add(record()).aside == [tmp_path / f"{NAME}.damaged-2"]
    assert [(tmp_path / f"{NAME}.damaged-{n}").read_text() for n in (1, 2)] == ["older", "{"]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_file_with_any_byte_changed_never_crashes_a_look_up(data: st.DataObject) -> None:
    whole = bytearray(text_of(record(), record((16, 16, 16), driver="1.2")).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DatabaseError):  # nothing else may come out
        found = parse(bytes(whole))
        assert len(found.records) <= 2 <= len(found.records) + len(found.complaints)


def test_a_huge_file_is_refused_unread(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / NAME
    with path.open("wb") as file:
        file.truncate(1 << 30)
    chain = opened(tmp_path)
    tracemalloc.start()
    try:
        assert chain.find(problem(), TRITON) is None
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20
    (complaint,) = chain.complaints
    golden(complaint, "complaint")
    with golden.raises(DatabaseError):
        chain.add(record())
    assert path.stat().st_size == 1 << 30


def test_a_database_does_not_outgrow_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = opened(tmp_path)
    chain.add(record())
    before = (tmp_path / NAME).read_bytes()
    monkeypatch.setattr(database_file, "MAX_BYTES", len(before) + 10)
    with pytest.raises(DatabaseError, match="prune"):
        chain.add(record((16, 16, 16)))
    assert (tmp_path / NAME).read_bytes() == before


def test_a_pipe_or_a_folder_in_a_files_place_holds_nobody_up(tmp_path: Path, golden: Golden) -> None:
    os.mkfifo(tmp_path / NAME)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "gone")
    chain = opened(tmp_path)
    assert chain.find(problem(), TRITON) is None
    assert sorted(c.split("/")[-1] for c in chain.complaints) == ["folder.json: Is a directory", f"{NAME} is no regular file"]
    with golden.raises(DatabaseError):
        chain.add(record())


def test_files_that_are_none_of_ours_are_left_alone(tmp_path: Path) -> None:
    for name in ("README.md", f"{NAME}.lock", f"{NAME}.damaged-1", f".{NAME}.writing", ".hidden.json"):
        (tmp_path / name).write_text("x")
    chain = opened(tmp_path)
    assert chain.records() == [] and chain.complaints == () and db.check(tmp_path) == []


# -- what is damaged in one place

SOUND = (record((16, 16, 16)), record((32, 32, 32)), record((64, 64, 64)))
DEEP = "[" * 100_000 + "]" * 100_000
DAMAGES = {
    "NaN": ('"median_us": 100.0', '"median_us": NaN', "median_us: NaN is no number"),
    "infinite": ('"median_us": 100.0', '"median_us": -Infinity', "median_us: -Infinity is no number"),
    "too large": ('"median_us": 100.0', '"median_us": 1e999', "median_us: expected a number from"),
    "many digits": ('"median_us": 100.0', f'"median_us": 1{"0" * 5000}', "digits"),
    "twice": ('"layout": "nn"', '"layout": "nn", "layout": "tn"', "the name 'layout' stands twice in one object"),
    "twice, within": ('"block_m": 128', '"block_m": 128, "block_m": 64', "config: the name 'block_m' stands twice in one object"),
    "deep": ('"block_m": 128', f'"block_m": {DEEP}', "nested too deeply"),
    "a text": ('"median_us": 100.0', '"median_us": "100.0"', "median_us: expected a number from"),
    "true": ('"alignment": 16', '"alignment": true', "alignment: expected one of"),
    "a control character": ('"layout": "nn"', '"layout": "n\0t"', "Invalid control character"),
    "no UTF-8": ('"layout": "nn"', '"layout": "n\udcfft"', "layout: expected one of"),
    "half a character": ('"layout": "nn"', '"layout": "\\ud800"', "layout: expected one of"),
    "no comma": ('"layout": "nn",', '"layout": "nn"', "Expecting ',' delimiter"),
    "no quote": ('"layout": "nn"', '"layout": nn', "Expecting value"),
}  # fmt: skip
"""Text, what stands in its place in the second record, and what is said of that."""

LAID_OUT = {
    "no bracket": ('"epigen": "0.1.0"\n    }', '"epigen": "0.1.0"\n', "record 1"),
    "no bracket in front": ('\n    {\n      "program"', '\n\n      "program"', "record 1"),
    "a bracket": ('"layout": "nn"', '"layout": "nn"}', "record 1"),
    "a list's end": ('"layout": "nn"', '"layout": "nn"]]', "record 1"),
    "a list": ('"layout": "nn"', '"layout": [["nn"', "record 1"),
    "half a text": ('"layout": "nn"', '"layout": "nn', "record 1"),
    "a merge": ('      "schedule"', '<<<<<<< HEAD\n      "schedule"', "record 1"),
}
"""As above, where the records lie as epigen writes them: brackets do not fit together, and nothing but the lines tells the records apart."""


def damaged(text: str, old: str, new: str) -> bytes:
    """The text, with something else in its second record."""
    at = text.index(old, text.index(old) + 1)
    return (text[:at] + new + text[at + len(old) :]).encode("utf-8", "surrogateescape")


EVERYWHERE = [(kind, layout) for kind in DAMAGES for layout in ("as written", "in one line", "by others")]


@pytest.mark.parametrize(("kind", "layout"), [*EVERYWHERE, *((kind, "as written") for kind in LAID_OUT)])
def test_a_damaged_record_costs_no_other_one(kind: str, layout: str, tmp_path: Path) -> None:
    old, new, words = (DAMAGES | LAID_OUT)[kind]
    text = text_of(*SOUND)
    if layout != "as written":
        text = json.dumps(json.loads(text), indent=None if layout == "in one line" else 3, sort_keys=True)
        old = old.rstrip(",")
        new = new if kind != "no comma" else '"layout" "nn"'
        words = words if kind != "no comma" else "Expecting ':' delimiter"
    path = only(tmp_path, damaged(text, old, new))
    before = path.read_bytes()
    chain = opened(tmp_path)
    assert {r.key: r for _, r in chain.records()} == {r.key: r for r in (SOUND[0], SOUND[2])}
    complaints = list(chain.complaints)
    assert complaints[0].startswith(f"{path}: record 1") and words in complaints[0] and (len(complaints) == 1 or kind in LAID_OUT)
    assert all(c.isprintable() and len(c) < len(str(path)) + 250 for c in complaints) and db.check(tmp_path) == complaints
    report = chain.add(SOUND[1])
    assert report.aside == [tmp_path / f"{NAME}.damaged-1"] and report.aside[0].read_bytes() == before
    assert len(chain.records()) == 3 and chain.complaints == ()


def test_records_without_a_comma_between_them_are_in_use_and_that_is_said(tmp_path: Path) -> None:
    path = only(tmp_path, text_of(*SOUND).replace("},\n    {", "}\n    {", 1))
    chain = opened(tmp_path)
    assert len(chain.records()) == 3
    (complaint,) = chain.complaints
    assert complaint.startswith(f"{path}: line 15, column 5: ")


@pytest.mark.parametrize("tail", ["}", "]}", "x", '{"schema": 2}', "\n\0"])
def test_what_follows_a_database_is_complained_of(tail: str, tmp_path: Path) -> None:
    path = only(tmp_path, text_of(*SOUND) + tail)
    chain = opened(tmp_path)
    assert len(chain.records()) == 3
    (complaint,) = chain.complaints
    assert complaint.startswith(f"{path}: line {text_of(*SOUND).count(chr(10)) - 1}: what follows")


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    only(tmp_path, b"\xef\xbb\xbf" + text_of(*SOUND).encode())
    chain = opened(tmp_path)
    assert len(chain.records()) == 3 and chain.complaints == ()


def test_a_damaged_file_of_too_many_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is one of too many records, sound or not."""
    monkeypatch.setattr(salvage, "_MOST_TOKENS", 1000)
    only(tmp_path, "{" + "[]," * 1000 + text_of(*SOUND)[1:])
    chain = opened(tmp_path)
    assert chain.records() == [] and "line 1, column 2" in chain.complaints[0]
    monkeypatch.setattr(records, "_MAX_RECORDS", 3)
    path = only(tmp_path, '{"records": [1,2,3,4,')
    chain = opened(tmp_path)
    assert chain.records() == [] and chain.complaints == (f"{path}: more than 3 records",)


def test_a_name_among_very_many_is_found_twice_in_a_moment(golden: Golden) -> None:
    names = ", ".join(f'"n{i}": 0' for i in range(300_000))
    with golden.raises(Damaged):
        parse(f'{{{names}, "n299999": 1}}'.encode())


# -- schemas


def test_a_newer_schema_is_refused_in_words_and_never_touched(tmp_path: Path, golden: Golden) -> None:
    path = only(tmp_path, json.dumps({"schema": 4, "records": "another matter"}))
    before = path.read_bytes()
    chain = opened(tmp_path)
    assert chain.find(problem(), TRITON) is None
    (complaint,) = chain.complaints
    golden(complaint, "complaint")
    with golden.raises(DatabaseError):
        chain.add(record())
    assert path.read_bytes() == before and db.files(tmp_path) == [path]


def test_an_older_schema_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    """By steps: schema -2 called medians `ms` and meant milliseconds, schema -1 had no outcomes by name."""

    def from_minus_2(old: dict[str, Any]) -> dict[str, Any]:
        return old | {"records": [{k: v for k, v in r.items() if k != "ms"} | {"median_us": r["ms"] * 1000} for r in old["records"]]}

    def from_minus_1(old: dict[str, Any]) -> dict[str, Any]:
        return old | {"records": [r | {"trials": {"ok": r["trials"]}} for r in old["records"]]}

    monkeypatch.setattr(records, "MIGRATIONS", {-2: from_minus_2, -1: from_minus_1, 0: lambda old: old, **records.MIGRATIONS})
    whole = document(record(median_us=250.0, trials={"ok": 7}))
    whole["schema"] = -2
    whole["records"][0] |= {"trials": 7, "ms": 0.25}
    del whole["records"][0]["median_us"]
    path = only(tmp_path, json.dumps(whole))
    chain = opened(tmp_path)
    assert [r for _, r in chain.records()] == [record(median_us=250.0, trials={"ok": 7})] and chain.complaints == ()
    assert chain.add(record((16, 16, 16))).aside == []
    assert json.loads(path.read_text())["schema"] == records.SCHEMA and len(chain.records()) == 2
    whole["records"] = [{"program": "mm"}]
    with golden.raises(Damaged):
        parse(json.dumps(whole).encode())


def shipped() -> list[Record]:
    return [r for file in sorted(places.seed_database_dir().glob("*.json")) for r in parse(file.read_bytes()).records]


def schema_2(*found: Record) -> str:
    """The text of a file as schema 2 wrote it."""
    whole = document(*found) | {"schema": 2}
    older = {"prefetch": "early", "subtiles": "halves", "fused_finalize": "one_launch"}
    for r in whole["records"]:
        r["config"] = {older.get(name, name): value for name, value in r["config"].items()}
    return json.dumps(whole)


def schema_1(*found: Record) -> str:
    """The text of a file as schema 1 wrote it."""
    whole = json.loads(schema_2(*found)) | {"schema": 1}
    for r in whole["records"]:
        del r["inputs"]
    return json.dumps(whole)


def by_key(chain: Database) -> dict[records.Key, Record]:
    return {r.key: r for _, r in chain.records()}


def test_records_of_schema_1_had_inputs_of_the_operands_dtype(tmp_path: Path) -> None:
    """fp32 beside 8-bit operands. The program says which inputs there are, and in which order."""
    many = "z = drelu(mm, mask) * alpha + residual; z + bias, bgrad(z)"
    some = [
        record(),
        record((1, 1, 1), program="mm", inputs=()),
        record((2, 2, 2), program=many, a="bf16", b="bf16", inputs=("bits", "scalar", "bf16[mn]", "bf16[n]")),
        record((3, 3, 3), program=many, a="int8", b="int8", inputs=("bits", "scalar", "fp32[mn]", "fp32[n]")),
        record((4, 4, 4), program="mm * gate[m]", a="fp8e4m3", b="fp8e5m2", inputs=("fp32[m]",)),
    ]
    path = only(tmp_path, schema_1(*some))
    before = path.read_bytes()
    chain = opened(tmp_path)
    assert by_key(chain) == {r.key: r for r in some} and chain.complaints == () and db.check(tmp_path) == []
    found = chain.find(problem(), TRITON)
    assert found and found.how == "exact" and path.read_bytes() == before, "reading changes nothing"

    report = chain.add(record(inputs=("fp32[n]",), median_us=120))
    assert (report.added, report.aside, report.complaints) == (1, [], [])
    assert json.loads(path.read_text())["schema"] == records.SCHEMA
    assert by_key(opened(tmp_path)) == {r.key: r for r in [*some, record(inputs=("fp32[n]",), median_us=120)]}


def test_configs_of_schema_2_had_other_names_for_three_dimensions(tmp_path: Path) -> None:
    configs = [
        schedules.config("warp_specialized", block_m=128, block_n=256, block_k=64, group_m=8, pingpong=0, subtiles=2, prefetch=1, tma_store=1, num_stages=3),
        schedules.config("persistent", block_m=128, block_n=128, block_k=64, group_m=8, flatten=0, subtiles=1, tma_store=1, num_warps=8, num_stages=3, fused_finalize=1),
        *(r.kernel_config for r in shipped()),
    ]  # fmt: skip
    some = [record((i + 1, 64, 64), config=config) for i, config in enumerate(configs)]
    path = only(tmp_path, schema_2(*some))
    assert not {"prefetch", "subtiles", "fused_finalize"} & set(re.findall(r"\w+", path.read_text()))
    chain = opened(tmp_path)
    assert by_key(chain) == {r.key: r for r in some} and chain.complaints == ()
    assert chain.add(record()).added == 1
    assert json.loads(path.read_text())["schema"] == records.SCHEMA and "one_launch" not in path.read_text()
    assert by_key(opened(tmp_path)) == {r.key: r for r in [*some, record()]}


def test_what_is_no_config_of_schema_2_is_left_out_alone(tmp_path: Path) -> None:
    whole = json.loads(schema_2(record((8, 8, 8)), record((16, 16, 16)), record((32, 32, 32))))
    whole["records"][0]["config"] |= {"fused_finalize": 0}  # of both schemas
    whole["records"][1]["config"] = "early"
    only(tmp_path, json.dumps(whole))
    chain = opened(tmp_path)
    assert [r.shape for _, r in chain.records()] == [(32, 32, 32)] and len(chain.complaints) == 2


def test_programs_of_schema_1_are_parsed_as_far_as_a_look_up_can_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, none that is too long for a program, and no more than so many characters of them together."""
    parsed: list[str] = []
    real = migrations.graph_of
    monkeypatch.setattr(migrations, "graph_of", lambda text: (parsed.append(text), real(text))[1])
    monkeypatch.setattr(migrations, "MOST_CHARACTERS", 60_000)
    programs = ["relu(mm + bias)", "\n" * 1_000_000 + "mm", *(f"mm * {i}{' ' * 19_000}" for i in range(5)), "relu(mm + bias)"]
    some = [json.loads(schema_1(record((i + 1, 64, 64))))["records"][0] | {"program": program} for i, program in enumerate(programs)]
    path = only(tmp_path, json.dumps(json.loads(schema_1()) | {"records": some}))
    chain = opened(tmp_path)
    assert {r.shape[0] for _, r in chain.records()} == {1, 3, 4, 5, 8} and parsed == [programs[i] for i in (0, 2, 3, 4)]
    long, *rest = chain.complaints
    assert long.startswith(f"{path}: record 1 (") and long.endswith("the program has more than 20000 characters") and len(rest) == 2
    words = "inputs: schema 1 did not name them, and the programs of this file have more than 60000 characters"
    assert all(c.endswith(words) for c in rest)


@pytest.mark.parametrize("program", ["mm +", "relu(", "mm\x00", "\ud800", "(" * 5000, "m" * 20_001, 'relu(mm)  # "é"', "fp16(mm)", "", 5, None])
def test_a_record_of_schema_1_that_says_nothing_of_its_inputs_is_left_out_alone(tmp_path: Path, program: Any) -> None:
    whole = json.loads(schema_1(record((8, 8, 8)), record((16, 16, 16))))
    whole["records"][0]["program"] = program
    only(tmp_path, json.dumps(whole))
    chain = opened(tmp_path)
    assert [r.shape for _, r in chain.records()] == [(16, 16, 16)]
    assert len(chain.complaints) == 1 and "record 0" in chain.complaints[0]
    whole["records"] = [1, None, [], {"a": "fp16"}, {"program": "mm", "a": ["fp16"]}]
    assert len(parse(json.dumps(whole).encode()).complaints) == 5


# -- which record stays, and merging

dates = st.sampled_from(["2026-11-05T12:00:00Z", "2026-11-06T12:00:00Z"])
some_records = st.builds(
    record,
    st.sampled_from([(16, 16, 16), (16, 16, 32)]),
    st.sampled_from([10.0, 10.5, 11.0]),
    st.sampled_from([config(), config(64), config(64, num_warps=4)]),
    st.sampled_from(["3.8.0", TRITON]),
    dates,
    spec=st.sampled_from([SPEC, OTHER_SPEC]),
    program=st.sampled_from(["mm", "relu(mm)"]),
    gpu=st.sampled_from(["NVIDIA H200", "NVIDIA H100"]),
)


@given(st.lists(some_records, max_size=8), st.lists(some_records, max_size=8), st.lists(some_records, max_size=8))
@settings(deadline=None)
def test_merging_is_idempotent_commutative_and_associative(one: list[Record], two: list[Record], three: list[Record]) -> None:
    def merge(*parts: list[Record]) -> list[Record]:
        return list(merged(itertools.chain(*parts)).values())

    def text(found: list[Record]) -> str:
        return text_of(*found)

    assert text(merge(one, one)) == text(merge(merge(one))) == text(merge(one))
    assert text(merge(one, two)) == text(merge(two, one))
    assert text(merge(merge(one, two), three)) == text(merge(one, merge(two, three)))
    for r in merge(one, two):
        assert r.median_us == min(o.median_us for o in one + two if o.key == r.key)


@given(st.lists(some_records, min_size=1, max_size=6), st.randoms())
@settings(max_examples=20, deadline=None)
def test_databases_merge_the_same_in_any_order(tmp_path_factory: pytest.TempPathFactory, found: list[Record], chance: random.Random) -> None:
    folder = tmp_path_factory.mktemp("merge")
    sources = []
    for number, some in enumerate((found[::2], found[1::2])):
        (folder / f"{number}").mkdir()
        opened(folder / f"{number}").add(*some)
        sources.append(folder / f"{number}")
    results = []
    for number, order in enumerate((sources, sources[::-1], chance.choices(sources, k=3) + sources)):
        target = folder / f"to{number}"
        for source in order:
            opened(target).merge(source)
        assert not (again := opened(target).merge(*order)).added and not again.replaced
        results.append({f.name: f.read_bytes() for f in db.files(target)})
    assert results[0] == results[1] == results[2]


def test_the_better_record_stays() -> None:
    fast, slow = record(median_us=9.0, date="2026-11-05T12:00:00Z"), record(median_us=10.0, date="2026-11-06T12:00:00Z")
    newer = record(median_us=9.0, date="2026-11-05T12:00:01Z", config=config(64))
    assert better(fast, slow) is better(slow, fast) is fast
    assert better(fast, newer) is better(newer, fast) is newer


def test_merge_says_what_it_dropped(tmp_path: Path, golden: Golden) -> None:
    one, two = opened(tmp_path / "one"), opened(tmp_path / "two.json")
    one.add(record(median_us=10), record((16, 16, 16), 5), record((32, 32, 32)))
    two.add(record(median_us=9), record((16, 16, 16), 6), record((32, 32, 32)), record((64, 64, 64)))
    report = one.merge(tmp_path / "two.json")
    assert (report.added, report.replaced, report.unchanged) == (1, 1, 1)
    golden("\n".join(report.dropped), "dropped")
    again = one.merge(tmp_path / "two.json", tmp_path / "two.json")
    assert (again.added, again.replaced) == (0, 0)
    with golden.raises(DatabaseError):
        one.merge(tmp_path / "three")
    only(tmp_path, "{")
    (complaint,) = one.merge(tmp_path / NAME).complaints
    assert complaint.startswith(f"{tmp_path / NAME}: line 1, column 2: ")


def test_a_record_may_take_the_place_of_a_better_one(tmp_path: Path) -> None:
    chain, slow = opened(tmp_path), record(median_us=10, config=config(64))
    chain.add(record(median_us=9))
    assert chain.add(slow).replaced == 0 and chain.add(slow, replacing=True).replaced == 1
    assert [r for _, r in opened(tmp_path).records()] == [slow]


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    chain = opened(tmp_path)
    chain.add(record())
    before = (tmp_path / NAME).stat()
    assert chain.add(record()).unchanged == 1
    after = (tmp_path / NAME).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_prune(tmp_path: Path, golden: Golden) -> None:
    chain = opened(tmp_path)
    chain.add(record(median_us=10), record(median_us=9, triton="3.8.0"), record((16, 16, 16), triton="3.8.0"), record((16, 16, 16), gpu="NVIDIA H100"))
    before = (tmp_path / NAME).read_bytes()
    dry = chain.prune(beaten=True, dry=True)
    assert (tmp_path / NAME).read_bytes() == before
    report = chain.prune(beaten=True)
    assert dry.dropped == report.dropped
    golden("\n".join(report.dropped), "beaten")
    assert report.unchanged == 3
    golden("\n".join(chain.prune(triton="3.8.0").dropped), "of another Triton")
    assert {r.triton for _, r in chain.records()} == {"3.8.0"} and len(chain.records()) == 2


def test_export(tmp_path: Path, golden: Golden) -> None:
    opened(tmp_path / "seed").add(record((8, 8, 8)))
    chain = opened(tmp_path / "own", tmp_path / "seed")
    chain.add(record(), record(gpu="NVIDIA H100"))
    assert chain.export(tmp_path / "out").added == 2
    assert [f.name for f in db.files(tmp_path / "out")] == ["nvidia_h100_sm90.json", NAME]
    assert chain.export(tmp_path / "one.json", lambda r: r.gpu == "NVIDIA H200", seeds=True).added == 2
    with golden.raises(DatabaseError):
        chain.export(tmp_path / "one.json")


# -- files and places


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("EPIGEN_DB", str(tmp_path / "mine.json"))
    assert Database().path == tmp_path / "mine.json"
    assert Database().seeds == (places.seed_database_dir(),)
    monkeypatch.setenv("EPIGEN_DB", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert places.user_database_dir() == tmp_path / "data" / "epigen"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places.user_database_dir() == tmp_path / ".local" / "share" / "epigen"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert places.user_database_dir() == tmp_path / "Library" / "Application Support" / "epigen"


def test_a_seed_is_never_written_to(tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    opened(seed).add(record(median_us=10))
    before = (seed / NAME).read_bytes()
    chain = opened(tmp_path / "own", seed)
    assert chain.add(record(median_us=9)).added == 1
    chain.prune(triton="1.0")
    assert (seed / NAME).read_bytes() == before
    assert Database(seed, seeds=(seed,)).seeds == ()


def test_what_another_process_writes_is_found(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    assert two.find(problem(), TRITON) is None
    for median, block in ((10, 128), (9, 64), (8, 32)):
        one.add(record(median_us=median, config=config(block)))
        found = two.find(problem(), TRITON)
        assert found and found.config == config(block)
    (tmp_path / NAME).unlink()
    assert two.find(problem(), TRITON) is None and two.complaints == ()


def test_a_linked_file_stays_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "db").mkdir()
    target = tmp_path / "real" / "h200.json"
    target.write_text(text_of(record()))
    target.chmod(0o640)
    (tmp_path / "db" / NAME).symlink_to(target)
    opened(tmp_path / "db").add(record((16, 16, 16)))
    assert (tmp_path / "db" / NAME).is_symlink() and len(parse(target.read_bytes()).records) == 2
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_lock_that_is_held_is_reported(tmp_path: Path, golden: Golden) -> None:
    with lock.held(tmp_path / f"{NAME}.lock", 1.0, 0.01), golden.raises(DatabaseError):
        Database(tmp_path, seeds=(), timeout_s=0.05).add(record())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path: Path, golden: Golden) -> None:
    tmp_path.chmod(0o555)
    with golden.raises(DatabaseError):
        opened(tmp_path).add(record())
    tmp_path.chmod(0o755)


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    chain = opened(tmp_path)
    chain.add(record())
    before = (tmp_path / NAME).read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with golden.raises(DatabaseError):
        chain.add(record((16, 16, 16)))
    assert (tmp_path / NAME).read_bytes() == before
    monkeypatch.undo()
    assert chain.add(record((16, 16, 16))).added == 1


def everything(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("name", [f".{NAME}.writing", f"{NAME}.lock"])
@pytest.mark.parametrize("kind", ["a pipe", "a hard link", "a link", "a dangling link"])
def test_what_lies_under_the_names_of_a_write_is_neither_followed_nor_changed(name: str, kind: str, tmp_path: Path) -> None:
    """In a folder where others may write too."""
    folder, precious = tmp_path / "db", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    match kind:
        case "a pipe":
            os.mkfifo(folder / name)
        case "a hard link":
            os.link(precious, folder / name)
        case "a link":
            (folder / name).symlink_to(precious)
        case "a dangling link":
            (folder / name).symlink_to(tmp_path / "nothing")
    chain = Database(folder, seeds=(), timeout_s=0.05)
    if name.endswith(".lock") and kind.endswith("link") and kind != "a hard link":
        with pytest.raises(DatabaseError, match="cannot lock"):
            chain.add(record())
    else:
        assert chain.add(record()).added == 1 and everything(folder) == [NAME]
    assert precious.read_text() == "precious" and not (tmp_path / "nothing").exists()


def test_a_folder_under_the_name_of_a_write_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.writing").mkdir()
    with pytest.raises(DatabaseError, match="cannot write"):
        opened(tmp_path).add(record())


def failing(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["fsync", "rename"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "sound"])
def test_writes_that_fail_leave_all_as_it_was(step: str, links: bool, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = only(tmp_path, text_of(record(), record((16, 16, 16))))
    if damaged:
        path.write_text(path.read_text().replace('"median_us"', '"medianus"', 1))
    before = path.read_bytes()
    chain = opened(tmp_path)
    with monkeypatch.context() as patch:
        if not links:
            patch.setattr(os, "link", lambda *_: failing())
        patch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), failing)
        for _ in range(3):
            with pytest.raises(DatabaseError, match="cannot write"):
                chain.add(record((32, 32, 32)))
            assert path.read_bytes() == before and everything(tmp_path) == [NAME]
    report = chain.add(record((32, 32, 32)))
    assert report.added == 1 and everything(tmp_path) == [NAME, *[f"{NAME}.damaged-1"] * damaged]


def test_a_file_system_without_permissions_or_synced_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = only(tmp_path, text_of(record()))
    fsync = os.fsync

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fchmod", refused)
    monkeypatch.setattr(os, "fsync", of_files)
    assert opened(tmp_path).add(record((16, 16, 16))).added == 1 and len(parse(path.read_bytes()).records) == 2


def test_a_folder_whose_names_cannot_be_listed_may_hold_a_file_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may be written and not read."""
    opened_for_real = os.open

    def unlisted(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(13, "Permission denied", path)
        return opened_for_real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", unlisted)
    assert opened(tmp_path / NAME).add(record()).added == 1


def test_an_error_without_the_systems_words_still_says_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    def interrupted(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(os, "fsync", interrupted)
    with golden.raises(DatabaseError):
        opened(tmp_path).add(record())


@pytest.mark.parametrize("below", ["x" * 300, f"{'x' * 300}.json", "file/db", "file/x.json"])
def test_a_path_that_cannot_be_is_left_out_in_words(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    chain = opened(tmp_path / below)
    assert chain.find(problem(), TRITON) is None
    (complaint,) = chain.complaints
    assert complaint.startswith("cannot read ") and complaint.endswith((": File name too long", ": Not a directory"))
    for attempt in (lambda: chain.add(record()), lambda: chain.demand_writable(*H200)):
        with pytest.raises(DatabaseError, match=r"^cannot lock "):
            attempt()
    with pytest.raises(DatabaseError, match=r"^cannot read "):
        opened(tmp_path / "other").merge(tmp_path / below)


def test_whether_something_can_be_written_is_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    chain = opened(tmp_path / "db")
    chain.demand_writable(*H200)
    assert chain.records() == [] and everything(tmp_path / "db") == []
    monkeypatch.setattr(os, "access", lambda *_: False)
    with golden.raises(DatabaseError):
        chain.demand_writable(*H200)


def test_a_path_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    chain = opened(tmp_path / "file" / "below")
    assert chain.find(problem(), TRITON) is None and "cannot read the folder" in chain.complaints[0]
    with pytest.raises(DatabaseError, match="cannot lock"):
        chain.add(record())


def test_a_record_of_wrong_numbers_cannot_be_made(golden: Golden) -> None:
    with golden.raises(DatabaseError):
        record(median_us=-1.0)
    with pytest.raises(EpigenError, match="not nan"):
        record(median_us=float("nan"))


def test_only_changed_parts_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding one record to a large file stays cheap, and whatever is in the file comes out as if it were read whole."""
    ours, theirs = opened(tmp_path), opened(tmp_path)
    ours.add(*(record((m, 64, 64)) for m in range(1, 100)))
    theirs.add(record((100, 64, 64)))
    parsed: list[str] = []
    real = records.parse_record
    monkeypatch.setattr(records, "parse_record", lambda text, *rest: (parsed.append(text), real(text, *rest))[1])
    monkeypatch.setattr(records, "parse", lambda _: pytest.fail("the whole was parsed"))
    ours.add(record((101, 64, 64)))
    assert [json.loads(text)["shape"] for text in parsed] == [[100, 64, 64]]
    monkeypatch.undo()
    assert len(parse((tmp_path / NAME).read_bytes()).records) == 101
    # an edit that keeps the layout, and one that does not
    for old, new in (('"shape": [7, 64, 64]', '"shape": [70000, 64, 64]'), ('"shape": [8, 64, 64]', '"shape":  [80000, 64, 64]')):
        text = (tmp_path / NAME).read_text()
        (tmp_path / NAME).write_text(text.replace(old, new))
        ours.add(record((9, 64, 64), median_us=1.0))
        assert tuple(json.loads("{" + new + "}")["shape"]) in {r.shape for _, r in ours.records()}
    assert len(ours.records()) == 101


def test_a_look_up_writes_no_record_as_text(tmp_path: Path) -> None:
    """That takes longer than to read it, and only a file that is read a second time is held against its records' text."""
    opened(tmp_path).add(record(), record((16, 16, 16)))
    chain = opened(tmp_path)
    assert chain.find(problem(), TRITON) is not None
    assert not any("text" in vars(r) for _, r in chain.records())


# -- writers that are killed

WRITER = """
import sys, time
from pathlib import Path
from tuned import record
from epigen.db.database import Database

number, count, looked_at = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
database = Database(Path(sys.argv[1]), seeds=())
done = 0
while done < count or not count:
    if count - done < 4 and count:  # the last are written once the reader has seen enough of this
        while not looked_at.exists():
            time.sleep(0.01)
    batch = [record((number + 1, i + 1, 64)) for i in range(done, min(done + 1 + done % 3, count or sys.maxsize))]
    database.add(*batch)
    for r in batch:
        print(r.shape[1], flush=True)  # acknowledged: from here on it must be there, whatever happens
    done += len(batch)
"""


@pytest.mark.slow
def test_writers_that_are_killed_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """8 processes write into one file: 4 of them 200 records each, 4 until they are killed at random; a reader finds a valid file throughout."""
    chance = random.Random(5)
    path = tmp_path / "db" / NAME
    environment = places.child_environment(interpret=False)
    logs = [tmp_path / f"acknowledged-{n}" for n in range(8)]
    writers, looked_at = [], tmp_path / "looked at"
    for n, log in enumerate(logs):
        command = [sys.executable, "-c", WRITER, path.parent, str(n), "200" if n % 2 else "0", looked_at]
        with log.open("wb") as out:
            writers.append(subprocess.Popen(command, stdout=out, env=environment))
    doomed = {writer: chance.randrange(1, 180) for writer in writers[::2]}
    polls = 0
    try:
        while any(w.poll() is None for w in writers):
            if path.exists():
                assert parse(path.read_bytes()).complaints == ()  # raises if it is damaged
                polls += 1
                time.sleep(0.01)  # else the reader takes the processor from those whom it reads
                if polls > 20:
                    looked_at.touch()
            for writer, after in doomed.items():
                if writer.poll() is None and logs[writers.index(writer)].read_bytes().count(b"\n") >= after:
                    time.sleep(chance.random() * 0.02)
                    writer.send_signal(signal.SIGKILL)
    finally:
        for writer in writers:
            writer.kill()
    assert polls > 20
    assert [w.wait() for w in writers] == [-signal.SIGKILL, 0] * 4
    there = {r.shape for r in parse(path.read_bytes()).records}
    for n, log in enumerate(logs):
        acknowledged = {(n + 1, int(line), 64) for line in log.read_text().splitlines()}
        assert acknowledged <= there
        assert len(acknowledged) == 200 or n % 2 == 0
    assert not list(path.parent.glob("*.damaged-*")) and opened(path).add(record()).added == 1


DYING = """
import os, sys
from pathlib import Path
from epigen.db.database import Database
from tuned import record

folder, left = sys.argv[1], int(sys.argv[2])

def count_down(event, arguments):
    global left
    if event == "fcntl.flock" or (event in ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove") and folder in str(arguments[0])):
        left -= 1
        if left < 0:
            os._exit(9)

database = Database(Path(folder), seeds=())
new = record((7, 7, 7))
sys.addaudithook(count_down)
database.add(new)
"""


@pytest.mark.slow
def test_a_kill_at_each_step_of_a_write_leaves_a_valid_file(tmp_path: Path) -> None:
    """The process ends, without any clean-up, at every system call of a write in turn; then another one writes."""
    environment = places.child_environment(interpret=False)
    ended = []
    for step in range(40):
        folder = tmp_path / str(step)
        opened(folder).add(record())
        done = subprocess.run([sys.executable, "-c", DYING, str(folder), str(step)], env=environment, check=False)
        found = parse((folder / NAME).read_bytes())
        assert found.complaints == () and record() in found.records
        assert opened(folder).add(record((8, 8, 8))).added == 1
        ended.append(done.returncode)
        if done.returncode == 0:
            break
    assert ended[-1] == 0 and len(ended) > 5 and set(ended[:-1]) == {9}
