"""bench.compilation: that its ways take turns, and what its rows and the table say."""

from __future__ import annotations

from bench import readme_models
from bench.compilation import EPIGEN, INDUCTOR, rows_of
from bench.record import Report


def test_the_ways_alternate_and_medians_are_compared() -> None:
    """So that neither is always the first, for which a machine reads its files from disk."""
    ran: list[tuple[str, str]] = []
    times = iter([16.0, 12.0, 15.0, 10.0, 11.0, 14.0])

    def run(name: str, way: str) -> float:
        ran.append((name, way))
        return next(times)

    (row,) = rows_of(["bert"], 3, run)
    assert [way for _, way in ran] == [INDUCTOR, EPIGEN, EPIGEN, INDUCTOR, INDUCTOR, EPIGEN] and {name for name, _ in ran} == {"bert"}
    assert row == {"model": "bert", "seconds": {INDUCTOR: [16.0, 10.0, 11.0], EPIGEN: [12.0, 15.0, 14.0]}, "ratio": round(14 / 11, 3)}


def test_what_is_said_of_it() -> None:
    rows = [{"model": name, "seconds": {INDUCTOR: [10.0], EPIGEN: [10.0 * ratio]}, "ratio": ratio} for name, ratio in (("one", 1.0), ("other", 1.44))]
    text = readme_models._compilation(Report("bench.compilation", {"commit": "abc"}, rows, {"target": 1.3, "layers": 6}))
    assert "of 6 layers" in text and "1.20 times" in text and "1.44 at most" in text and "the target is 1.3" in text and "other 14.4 s, Inductor 10.0 s" in text
