"""`python -m bench.mutants`: a sample of the damaged databases, and that the script would see what no mutant may do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import mutants
from epigen.db import database, records
from epigen.db.database import Database

SAMPLE = 60


def test_a_sample_of_mutants_does_nothing_that_none_may_do() -> None:
    found = mutants.run(SAMPLE, seed=100_000)
    assert found.failures == [] and sum(found.outcomes.values()) == SAMPLE
    assert found.outcomes["some records are left out"] > SAMPLE // 4 and len(found.kinds) > 10


def test_a_mutant_is_the_same_for_the_same_number() -> None:
    assert [mutants.mutant(n) for n in range(5)] == [mutants.mutant(n) for n in range(5)]
    assert len({mutants.mutant(n).data for n in range(20)}) == 20


def test_mutants_are_of_every_kind() -> None:
    some = [mutants.mutant(n) for n in range(300)]
    assert {k for one in some for k in one.kinds} == {
        "a byte", "another byte", "bytes away", "truncated", "a scrap", "a part twice", "another value", "a name twice", "a token away", "no field",
        "a new field", "another type", "of another one", "a record twice", "no object", "the head",
    }  # fmt: skip
    assert sum(bool(one.sound) for one in some) > 150 and sum(b'"schema": 1' in one.data for one in some) > 30
    assert sum(b"\n" not in one.data for one in some) > 30


def seen(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Any) -> str:
    """The failures of some mutants, where something works otherwise."""
    with monkeypatch.context() as patch:
        patch.setattr(where, name, wrong)
        return "\n".join(mutants.run(12, seed=0).failures)


def test_what_no_mutant_may_do_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, find, add = records.parse, Database.find, Database.add

    def forgetful(data: bytes) -> records.Document:
        found = parse(data)
        return replace(found, records=found.records[:-1]) if len(found.records) > 1 else found

    def wordless(data: bytes) -> records.Document:
        return replace(parse(data), complaints=())

    def failing(_: bytes) -> records.Document:
        raise KeyError("program")

    def writing(self: Database, *rest: Any) -> Any:
        found = find(self, *rest)
        for file in database.files(self.path or Path()):
            file.write_text("changed")
        self.find = lambda *_: found  # type: ignore[method-assign]  # for the records after this one
        return found

    assert "that was not touched is not in use" in seen(monkeypatch, records, "parse", forgetful)
    assert "records 10 are in use, and 0 complaints" in seen(monkeypatch, records, "parse", wordless)
    assert "KeyError: 'program'" in seen(monkeypatch, records, "parse", failing)
    assert "reading has changed the file" in seen(monkeypatch, Database, "find", writing)
    assert "a merge or an export has other records" in seen(monkeypatch, Database, "add", lambda self, *some, **_: add(self, *some[:1]))
    assert "it took" in seen(monkeypatch, mutants, "LIMIT_S", 0.0)


def test_the_script_records_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mutants", "--commit", "abc1234", "--out", str(tmp_path), "--count", "3", "--seed", "7"])
    with pytest.raises(SystemExit) as ended:
        mutants.main()
    found = mutants.record.read(tmp_path / "mutants.json")
    about = found.summary
    assert ended.value.code in (0, False) and found.environment["commit"] == "abc1234" and (about["count"], about["seed"], about["failures"]) == (3, 7, [])
    assert sum(row["count"] for row in found.rows if "outcome" in row) == 3 and str(tmp_path / "mutants.json") in capsys.readouterr().out


def test_the_recorded_result_is_of_five_thousand_and_none_failed() -> None:
    found = mutants.record.read(mutants.record.RESULTS / "mutants.json")
    outcomes = {row["outcome"]: row["count"] for row in found.rows if "outcome" in row}
    assert sum(outcomes.values()) == found.summary["count"] >= 5000 and found.summary["failures"] == [] and "FAILED" not in outcomes
