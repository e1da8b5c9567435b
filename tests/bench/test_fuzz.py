"""bench.fuzz over a small sample, and what it would say of a stage that fails."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from bench import fuzz
from bench.random_programs import ODD_NAMES, hostile, renamed, write_program
from epigen import api
from epigen.errors import ProgramError

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLE = range(120)


@pytest.mark.triton
def test_a_sample_has_no_failure() -> None:
    found = fuzz.fuzz(SAMPLE, seed=1)
    assert found.failures == []
    counts = found.counts
    assert counts["sound programs"] == counts["hostile texts"] == len(SAMPLE) / 2
    for outcome in (
        "refused with a ParseError",
        "refused with a CheckError",
        "agrees with torch's autograd",
        "agrees with the oracle operation by operation",
        "rendered as persistent",
    ):
        assert counts[outcome] > 0, outcome
    assert counts["agrees with the oracle as a kernel"] == 2


def test_texts_can_be_had_alone_and_repeat_themselves() -> None:
    assert fuzz.written(3, 17) == fuzz.written(3, 17) != fuzz.written(4, 17)
    assert len({fuzz.written(4, n).text for n in range(40)}) == 40


def test_odd_names_that_are_legal_are_accepted() -> None:
    seen: set[str] = set()
    for seed in range(200):
        source = random.Random(seed)
        graph = api.graph_of(renamed(source, write_program(source)))
        seen |= {n.name for n in graph.inputs()} & set(ODD_NAMES)
    assert len(seen) > 40


def test_hostile_texts_are_of_every_sort() -> None:
    texts = [hostile(random.Random(seed)) for seed in range(300)]
    assert max(map(len, texts)) > 20_000 and min(map(len, texts)) < 30
    assert any(not t.isascii() for t in texts)
    accepted = 0
    for text in texts:
        try:
            api.graph_of(text)
            accepted += 1
        except ProgramError:
            continue
    assert 10 < accepted < 150


@pytest.mark.parametrize(
    ("stage", "instead", "said"),
    [
        ("parse", lambda _text: [][0], "IndexError"),
        ("unparse", lambda _graph: "relu(mm + 1)", "AssertionError"),
        ("graph_digest", lambda graph: str(id(graph)), "AssertionError"),
        ("undefined", lambda _text: ["missing"], "names that are not there"),
    ],
)
def test_what_no_text_may_cause_is_a_failure(stage: str, instead: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, stage, instead)
    found = fuzz.fuzz(range(2, 3), seed=0)
    assert said in found.failures[0]["error"]
    assert found.failures[0]["number"] == 2 and found.failures[0]["text"] == fuzz.written(0, 2).text


def test_a_sound_program_that_is_refused_and_a_place_outside_the_text_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "write_program", lambda *_args, **_kwargs: "relu(mm + bais)")
    monkeypatch.setattr(fuzz, "hostile", lambda _random: "rleu(mm)")
    assert "did you mean bias" in fuzz.fuzz(range(2, 3), seed=0).failures[0]["error"]
    assert fuzz.fuzz(range(3, 4), seed=0).failures == []


def test_an_undefined_name_of_a_kernel_is_found() -> None:
    text = "import triton\nSIZE = 3\n\n\ndef f(x):\n    y = x + SIZE\n    return triton.g(y) + len(z)\n"
    assert fuzz.undefined(text) == ["z"]


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    given = ["fuzz"]
    monkeypatch.setattr(sys, "argv", given)
    return given


@pytest.mark.triton
def test_the_result_says_what_was_counted(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments += ["--programs", "6", "--commit", "abc", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        fuzz.main()
    found = fuzz.record.read(tmp_path / "fuzz.json")
    assert left.value.code == 0 and found.summary["holds"] is True
    assert found.environment["commit"] == "abc" and {"outcome": "sound programs", "count": 3} in found.rows
    monkeypatch.setattr(fuzz, "undefined", lambda _text: ["missing"])
    with pytest.raises(SystemExit) as left:
        fuzz.main()
    about = fuzz.record.read(tmp_path / "fuzz.json").summary
    assert left.value.code == 1 and about["holds"] is False and about["failures"]


def test_the_recorded_result_is_of_thirty_thousand_and_none_failed() -> None:
    found = fuzz.record.read(fuzz.record.RESULTS / "fuzz.json")
    counts = {row["outcome"]: row["count"] for row in found.rows}
    assert counts["sound programs"] + counts["hostile texts"] >= 30_000 and found.summary["failures"] == [] and found.summary["holds"]
    assert counts["accepted"] + counts["refused with a ParseError"] + counts["refused with a CheckError"] == counts["sound programs"] + counts["hostile texts"]
    assert counts["agrees with the oracle as a kernel"] > 300 and counts["agrees with torch's autograd"] > 1000
