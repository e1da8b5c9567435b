"""Reports: one form for all that scripts write, and every stored file is of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from golden import Golden

from bench import model, record
from bench.record import NoReport, Report
from epigen.tuning import table

TABLES = sorted({*record.DATA.glob("*.json")} - {record.DATA / "ways.json"})
REPORTS = [*sorted(record.RESULTS.glob("*.json")), record.DATA / "ways.json"]
MADE_UP = Report("bench.host", {"date": "2026-11-26", "commit": "abc1234"}, [{"b": 1, "a": [1, {"c": None}]}, {"us": 2.5}], {"holds": True, "count": 2})


def test_a_row_is_a_line_and_so_is_each_key_of_the_summary(tmp_path: Path) -> None:
    path = record.write("host", MADE_UP, tmp_path)
    assert path.read_text().splitlines() == [
        "{",
        '"schema": 1,',
        '"script": "bench.host",',
        '"environment": {"commit": "abc1234", "date": "2026-11-26"},',
        '"summary": {',
        '"count": 2,',
        '"holds": true',
        "},",
        '"rows": [',
        '{"a": [1, {"c": null}], "b": 1},',
        '{"us": 2.5}',
        "]",
        "}",
    ]
    assert record.read(path) == MADE_UP and MADE_UP.body == {"holds": True, "count": 2, "rows": MADE_UP.rows}
    empty = Report("bench.host", {}, [])
    assert record.read(record.write("empty", empty, tmp_path)) == empty


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_stored_report_is_as_a_script_writes_it(path: Path) -> None:
    report = record.read(path)
    assert path.read_text() == record.text(report)
    assert report.environment.keys() >= {"date", "commit", "python", "torch", "triton"} and report.rows
    assert importlib.util.find_spec(report.script) is not None


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_stored_table_is_as_it_would_be_written(path: Path) -> None:
    text = path.read_text()
    again = table.list_to_json(table.list_from_json(text)) if path.stem in model.RANDOM else table.to_json(table.from_json(text))
    assert text == again, "a config a line"


def test_nothing_else_is_stored() -> None:
    assert len(REPORTS) > 20 and len(TABLES) > 10
    assert {path.suffix for path in record.RESULTS.iterdir()} == {".json", ".svg"} and {path.suffix for path in record.DATA.iterdir()} == {".json", ".journal"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": None}, "no schema"),
        ({"more": 1}, "more"),
        ({"rows": {}}, "rows"),
        ({"rows": [1]}, "a row"),
        ({"summary": []}, "summary"),
        ({"script": 1}, "script"),
        ({"environment": {"gpus": 2, "host": "here"}}, "environment"),
    ],
)
def test_what_is_no_report_is_said_in_words(change: dict[str, Any], name: str, tmp_path: Path, golden: Golden) -> None:
    path = record.write("host", MADE_UP, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with golden.raises(NoReport, name):
        record.read(path)
    path.write_text("[]")
    with pytest.raises(NoReport, match="schema"):
        record.read(path)
    assert record.earlier(path, MADE_UP.environment) == []
