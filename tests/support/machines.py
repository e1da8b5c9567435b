"""Machines that are made up, for what asks which GPUs are at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from epigen.errors import EpigenError
from epigen.gpus import DEFAULT, Target
from epigen.runtime import device


@dataclass(frozen=True)
class Machine(device.Machine):
    """gpus: by index, the current one first; an error where epigen has no use for one. seems: how many are guessed at."""

    gpus: Mapping[int, Target | EpigenError] = field(default_factory=dict)
    seems: int = 0

    def indices(self) -> tuple[int, ...]:
        return tuple(self.gpus)

    def likely(self, *_: object) -> int:
        return self.seems

    def at_hand(self, index: int | None = None) -> Target | None:
        if not self.gpus:
            return None
        found = self.gpus[next(iter(self.gpus)) if index is None else index]
        if isinstance(found, EpigenError):
            raise found
        return found


class Everywhere(Machine):
    """On whose GPU all tensors lie, those of the CPU and fake ones too."""

    def of(self, _place: object) -> Target | None:
        return self.at_hand()


def machine(*gpus: Target) -> Machine:
    """With these GPUs, numbered as they are given."""
    return Machine(dict(enumerate(gpus)))


NO_GPU, ONE_H200 = Machine(), machine(DEFAULT.target)
