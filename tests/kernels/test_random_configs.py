"""Random configs of random programs, compiled ahead of time for a Hopper GPU: what does not compile is refused by a restriction that says why.

Run as a program it draws as many as it is told, and prints what becomes of them.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import compiling
import pytest

import epigen
from bench.random_programs import write_program
from epigen.codegen import schedules
from epigen.codegen.spec import LAYOUTS, KernelConfig
from epigen.dtypes import BF16, FAST_ACCUM, FP8E4M3, FP16, FP32, INT8, DType
from epigen.errors import ConfigError
from epigen.gpus import TARGETS
from epigen.perf import limits
from epigen.shapes import Shape

TARGET = TARGETS["sm_90"]
SHAPE: Shape = (4096, 4096, 4096)


class Drawn(NamedTuple):
    text: str
    config: KernelConfig
    a: DType
    layout: str
    precision: str | None

    @property
    def refused(self) -> str:
        """By a restriction that does not go by an estimate."""
        plan = epigen.compile(self.text, precision=self.precision).plan(SHAPE, dtype=self.a, target=TARGET, layout=self.layout)
        candidate = limits.Candidate(self.config, schedules.SCHEDULES[self.config.schedule], plan.spec, SHAPE, TARGET)
        return next((why for check in (*limits.LAUNCHES, *limits.COMPILES, limits.shared_memory) if (why := check(candidate))), "")


def draw(seed: int, schedule: str = "warp_specialized") -> Iterator[Drawn]:
    """Whatever `schedules.config` accepts."""
    rng = random.Random(seed)
    while True:
        a = rng.choice((FP16, BF16, FP8E4M3, INT8))
        values = {name: rng.choice(choices) for name, choices in schedules.SCHEDULES[schedule].dimensions.items()}
        try:
            config = schedules.config(schedule, **values)
        except ConfigError:
            continue
        text = write_program(rng, most=8, tame=True, casts=(FP32, FP16, BF16))
        yield Drawn(
            text, config, a, "nt" if a.bytes == 1 and rng.random() < 0.8 else rng.choice(LAYOUTS), FAST_ACCUM if a == FP8E4M3 and rng.random() < 0.5 else None
        )


def outcomes(drawn: Sequence[Drawn]) -> list[str]:
    """What is refused, and why, by a restriction or by the compiler; "" of what compiles."""
    refused = [one.refused for one in drawn]
    tried = [one for one, why in zip(drawn, refused, strict=True) if not why]
    jobs = [compiling.job(one.text, TARGET, one.a, one.config, one.layout, SHAPE, one.precision) for one in tried]
    answers = iter(compiling.outcomes(jobs))
    return [f"restricted: {why}" if why else f"failed: {answer}" if isinstance(answer := next(answers), str) else "" for why in refused]


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_what_does_not_compile_is_refused_with_a_reason(seed: int) -> None:
    drawn = list(islice(draw(seed), 24))
    found = outcomes(drawn)
    assert not (failed := [(one, why) for one, why in zip(drawn, found, strict=True) if why.startswith("failed")]), failed
    assert found.count("") >= 4


if __name__ == "__main__":
    seed, count = map(int, sys.argv[1:])
    drawn = list(islice(draw(seed), count))
    found = outcomes(drawn)
    print(Counter("compiles" if not why else re.sub(r"[\d.]+(x[\d.]+)*", "N", why) for why in found).most_common())
    for one, why in zip(drawn, found, strict=True):
        if why.startswith("failed"):
            print(one, why)
