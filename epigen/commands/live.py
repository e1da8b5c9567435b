"""What `epigen tune` shows while it runs: on a terminal a line for each search under way, drawn over and over; elsewhere a line a finished problem."""

from __future__ import annotations

import io
import shutil
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epigen.tuning.search import Progress
    from epigen.tuning.task import Task
    from epigen.tuning.tune import Tuned

_EVERY_S = 0.1  # trials over a recorded table come by the thousand a second


class Live:
    """Draws on `stream`. Its methods are called under the tuner's lock."""

    def __init__(self, tasks: Sequence[Task], stream: TextIO | None):
        """stream: None where the process was started without one: nobody reads what is drawn then."""
        self.tasks, self.stream = tasks, stream or io.StringIO()
        self.terminal = self.stream.isatty()
        self.running: dict[int, Progress] = {}
        self.finished_s: list[float] = []
        self.finished = 0
        self._drawn = 0  # lines on the terminal that the next drawing replaces
        self._last = 0.0

    def start(self) -> None:
        if self.terminal:
            self._draw([f"{len(self.tasks)} problem{'s' * (len(self.tasks) != 1)} to tune, starting"])

    def report(self, index: int, progress: Progress) -> None:
        self.running[index] = progress
        if self.terminal and time.monotonic() - self._last >= _EVERY_S:
            self._draw(self._lines())

    def done(self, index: int, tuned: Tuned) -> None:
        from epigen.tuning import report

        self.running.pop(index, None)
        self.finished += 1
        if tuned.result is not None:
            self.finished_s.append(tuned.result.seconds)
        if self.terminal and len(self.tasks) == 1:
            return  # the table says it all
        self.clear()
        self.stream.write(f"{self._place(self.finished)}{report.finished(tuned)}\n")
        self.stream.flush()
        if self.terminal and self.running:
            self._draw(self._lines())

    def clear(self) -> None:
        """Take what is drawn off the terminal."""
        if self._drawn:
            self.stream.write("\r" + f"\033[{self._drawn - 1}A" * (self._drawn > 1) + "\033[J")
            self.stream.flush()
            self._drawn = 0

    def _place(self, number: int) -> str:
        return f"{number}/{len(self.tasks)} " if len(self.tasks) > 1 else ""

    def _lines(self) -> list[str]:
        from epigen.tuning import report

        several = len(self.tasks) > 1
        failed = self.finished - len(self.finished_s)
        left = report.left_s(self.running, self.finished_s, len(self.tasks) - failed) if several else None
        first = self.finished + 1
        return [f"{self._place(first + i)}{report.progress(self.tasks[index], self.running[index], left)}" for i, index in enumerate(sorted(self.running))]

    def _draw(self, lines: list[str]) -> None:
        self.clear()
        width = max(20, shutil.get_terminal_size().columns - 1)  # a line that wraps could not be drawn over
        self.stream.write("\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in lines))
        self.stream.flush()
        self._drawn, self._last = len(lines), time.monotonic()
