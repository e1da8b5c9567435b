"""Times launches on a GPU as a program meets them: single ones at random moments with a cold L2, long ones right behind others; the host's own
delay left out.

The L2 cache is flushed before each launch, which also keeps the GPU busy while the host prepares the launch. Where the GPU is through
with that before the launch is there, the sample would hold the host's delay as well: it is taken again behind a longer flush.
The flush reads: one that writes leaves lines to be written back, which takes bandwidth from the launch that is timed (H200: 41 us in place of 33
for a product of 117 MB).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

# several times the largest L2, and long enough (some 130 us on an H200) for the host to have the launch ready when it ends
_FLUSH_BYTES = 512 << 20
_MOST_FLUSHES, _TRIES = 16, 8  # where compiling workers keep the host busy, or a call of several launches takes long to enqueue


def _reader(size: int) -> Callable[[], object]:
    """Reads so many bytes of the current GPU's memory."""
    values, largest = torch.zeros(size // 4, device="cuda"), torch.empty((), device="cuda")
    return lambda: torch.amax(values, dim=0, out=largest)


class ColdTimer:
    """flushes: how many times the cache is flushed before a launch, as the slowest host so far needed. late: samples that were kept
    although the launch came late each time.
    """

    def __init__(self, flush: Callable[[], object] | None = None, event: Callable[[], Any] | None = None):
        """flush: enqueues one flush, event: makes an event that can time; by default the current GPU's."""
        self.flush = flush or _reader(_FLUSH_BYTES)
        self.event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self.flushes, self.late = 1, 0

    def once(self, run: Callable[[], object]) -> float:
        """Microseconds of one call with a cold L2, its launches back to back."""
        for _ in range(_TRIES):
            for _ in range(self.flushes):
                self.flush()
            start, end = self.event(), self.event()
            start.record()
            run()
            end.record()
            late = start.query()
            end.synchronize()
            if not late:
                break
            self.flushes = min(2 * self.flushes, _MOST_FLUSHES)
        else:
            self.late += 1
        return float(start.elapsed_time(end)) * 1e3

    def row(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Microseconds of each of several calls, one right behind the other. The GPU has no rest between them, and the L2 holds what the one before left,
        which hardly matters to a launch that is long."""
        self.flush()  # while it runs the host gets ahead
        runs[0]()  # so that the first one, too, is behind another
        events = [self.event() for _ in range(len(runs) + 1)]
        events[0].record()
        for run, event in zip(runs, events[1:], strict=True):
            run()
            event.record()
        events[-1].synchronize()
        return [float(start.elapsed_time(end)) * 1e3 for start, end in itertools.pairwise(events)]
