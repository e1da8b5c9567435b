"""The schedules: each a template, its dimensions with their legal values, and its own limits, declared here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epigen.codegen.spec import KernelConfig
from epigen.errors import ConfigError, near_miss


@dataclass(frozen=True, slots=True)
class Schedule:
    """template: file name under `templates`. dimensions: each with its legal values. multiplies: the template holds the main loop
    (else the product comes from the vendor's library)."""

    name: str
    template: str
    dimensions: Mapping[str, tuple[int, ...]]
    multiplies: bool


TILED = Schedule(
    "tiled",
    "tiled.py.j2",
    {
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (16, 32, 64, 128, 256),
        "block_k": (16, 32, 64, 128, 256),
        "group_m": (1, 2, 4, 8, 16),
        "num_warps": (1, 2, 4, 8, 16),
        "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
    },
    multiplies=True,
)

LIBRARY = Schedule(
    "library",
    "library.py.j2",
    {"block_m": (1, 2, 4, 8, 16, 32, 64, 128), "block_n": (16, 32, 64, 128, 256, 512, 1024), "num_warps": (1, 2, 4, 8, 16)},
    multiplies=False,
)

SCHEDULES = {s.name: s for s in (TILED, LIBRARY)}


def from_mapping(given: Mapping[str, object]) -> KernelConfig:
    """A checked config from {"schedule": …, "block_m": …}; the schedule is tiled by default."""
    values = {str(name): value for name, value in given.items()}
    return config(str(values.pop("schedule", TILED.name)), **values)


def config(schedule: str, **values: object) -> KernelConfig:
    """A checked config. Raises ConfigError for an unknown schedule or dimension, a missing dimension, or a value out of range."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule '{schedule}': {near_miss(schedule, SCHEDULES) or 'known are ' + ', '.join(SCHEDULES)}")
    dimensions = SCHEDULES[schedule].dimensions
    checked: dict[str, int] = {}
    for name, value in values.items():
        if name not in dimensions:
            raise ConfigError(f"the schedule {schedule} has no dimension '{name}': {near_miss(name, dimensions) or 'it has ' + ', '.join(dimensions)}")
        if type(value) is not int or value not in dimensions[name]:
            raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, dimensions[name]))}")
        checked[name] = value
    if missing := [d for d in dimensions if d not in checked]:
        raise ConfigError(f"the schedule {schedule} also needs {', '.join(missing)}")
    return KernelConfig(schedule, tuple((d, checked[d]) for d in dimensions))
