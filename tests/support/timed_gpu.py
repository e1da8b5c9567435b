"""A made-up GPU with events, for what times launches: its host may be ahead of it, or late."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Gpu:
    """A GPU whose flush takes 130 us, its kernel `kernel_us`, and a host that needs `host_us` to launch it. now, free: microseconds on the clock, and when
    the GPU is through with what it was given."""

    host_us: float
    kernel_us: float = 10.0
    now: float = 0.0
    free: float = 0.0

    def busy(self, us: float) -> None:
        self.free = max(self.free, self.now) + us

    def flush(self) -> None:
        self.now += 1
        self.busy(130)

    def run(self) -> None:
        self.now += self.host_us
        self.busy(self.kernel_us)

    def event(self) -> Event:
        return Event(self)


@dataclass
class Event:
    gpu: Gpu
    at: float = 0.0

    def record(self) -> None:
        self.at = max(self.gpu.free, self.gpu.now)

    def query(self) -> bool:
        return self.gpu.now >= self.at

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3
