"""What is measured for the headline: groups of cases, their order, and about how long each takes. Pure data; needs no GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from bench import peers
from bench.programs import BACKWARD, BY_NAME, PROGRAMS
from epigen.tuning import sampling
from epigen.tuning.request import distinct, every
from epigen.tuning.task import Request

Shape = tuple[int, int, int]
COLD, GRAPH = "cold", "graph"

TABLE: tuple[Shape, ...] = (
    (8192, 8192, 512), (8192, 8192, 1024), (8192, 8192, 2048), (8192, 8192, 4096), (8192, 8192, 8192), (4096, 4096, 4096), (65536, 1024, 1024),
    (8192, 14336, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (16, 4096, 4096), (128, 256, 256), (64, 128, 256), (65536, 8192, 16384),
)  # fmt: skip
"""M, N, K."""
LAYERS: tuple[Shape, ...] = ((2048, 14336, 5120), (4096, 11008, 4096), (4096, 28672, 8192), (8192, 28672, 8192), (16384, 14336, 5120))
"""Of transformers with hidden 4096, 5120 and 8192."""
GEM: tuple[Shape, ...] = ((64, 128, 256), (128, 256, 256), (1024, 1024, 1024))
SKINNY: tuple[Shape, ...] = tuple((m, n, k) for m in (1, 4, 16, 64) for n, k in ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192)))
ODD: tuple[Shape, ...] = ((4095, 4097, 1023), (1000, 1000, 1000), (8191, 5003, 4099))
DTYPES = ("bf16", "fp16")


def fused(program: str) -> tuple[str, ...]:
    """Everyone who knows the program."""
    known = {peers.ADDMM: program in peers.ADDMM_KNOWS, peers.OURS_TANH: BY_NAME[program].approximated}
    return tuple(c for c in (peers.OURS, peers.MM, peers.EAGER, peers.ADDMM, peers.CUBLASLT, peers.OURS_TANH) if known.get(c, True))


@dataclass(frozen=True, slots=True)
class Case:
    """Contenders that are timed together. layout: of the operands, "nt" as a Linear's weight.T. how: L2-cold launches, or a CUDA graph of many."""

    group: str
    program: str
    shape: Shape
    dtype: str
    contenders: tuple[str, ...]
    layout: str = "nt"
    how: str = COLD

    @property
    def key(self) -> tuple[str, ...]:
        return (self.group, self.program, "x".join(map(str, self.shape)), self.dtype, self.layout, self.how)

    def __str__(self) -> str:
        return " ".join(self.key)

    @property
    def bytes(self) -> int:
        """Of the operands, the tiles and the mask: each once."""
        m, n, k = self.shape
        tiles = {"relu + bias": 1.0, "gelu + bias": 1.0, "gelu + bias + aux": 2.0, "dgelu + bgrad": 2.0}.get(self.program, 1 + 1 / 16)
        return int(2 * (m * k + n * k + tiles * m * n))

    @property
    def flops(self) -> int:
        m, n, k = self.shape
        return 2 * m * n * k

    @property
    def kernel_s(self) -> float:
        """About what one contender takes."""
        return max(self.flops / 600e12, self.bytes / 4e12) + 8e-6

    @property
    def seconds(self) -> float:
        """About what the case takes: data, checks, a first call each, cuBLASLt's autotuning, and the timed rounds."""
        found = 0.05 + 0.03 * len(self.contenders) + 40 * self.kernel_s + min(max(ROUND_S, 5 * self._round_s), 100 * self._round_s)
        if self.kernel_s * 1e6 >= sampling.LONG_US:
            found += sampling.HEATED_S
        if peers.CUBLASLT in self.contenders:
            found += peers.AUTOTUNED * 8 * (0.004 + self.kernel_s)
        return found

    @property
    def _round_s(self) -> float:
        return len(self.contenders) * (self.kernel_s + 200e-6)


ROUND_S = 0.5
"""What the timed rounds of a case may take, once each contender has had its least."""


START_S = 25.0
"""What compiling all kernels of the headline beforehand takes, about."""


def _cases(
    group: str, programs: Iterable[str], shapes: tuple[Shape, ...], contenders: tuple[str, ...] = (), dtypes: tuple[str, ...] = DTYPES, **more: str
) -> list[Case]:
    """contenders: by default whoever knows the program."""
    return [Case(group, p, s, d, contenders or fused(p), **more) for d, s, p in product(dtypes, shapes, programs)]


def epilogues(dtypes: tuple[str, ...] = DTYPES, shapes: tuple[Shape, ...] = TABLE + LAYERS) -> list[Case]:
    return _cases("epilogues", BY_NAME, shapes, dtypes=dtypes)


def gradients() -> list[Case]:
    """The backward programs with a weight as it lies, dy @ weight."""
    return _cases("epilogues", BACKWARD, TABLE[:8] + LAYERS, layout="nn")


def small() -> list[Case]:
    return _cases("small", ("relu + bias",), GEM, (peers.OURS, peers.EAGER, peers.ADDMM, peers.MM), how=GRAPH)


def skinny() -> list[Case]:
    return _cases("skinny", ("relu + bias",), SKINNY, (peers.OURS, peers.MM, peers.EAGER))


def odd() -> list[Case]:
    return _cases("odd", ("relu + bias", "relu + bias + mask", "drelu + bgrad"), ODD, (peers.OURS, peers.MM, peers.EAGER))


def compiled() -> list[Case]:
    """Those of bench.compiled."""
    return _cases("compiled", BY_NAME, TABLE + LAYERS, (peers.OURS, peers.COMPILED))


_DRAWN = 44  # problems


def tuned() -> list[Case]:
    """Problems that nobody chose: what the tuner makes of them."""
    return drawn("tuned", 11)


def untuned() -> list[Case]:
    """Others as `tuned`'s, which nobody tuned. The model was fitted to those of the seeds 13, 17, 41 and 42, and to none of these."""
    return drawn("untuned", 19)


def drawn(group: str, seed: int) -> list[Case]:
    """Random extents, a third of them multiples of 8 alone, each with two programs."""
    rng, found = random.Random(seed), list[Case]()
    while len(found) < 2 * _DRAWN:
        m, n, k = (extent(rng, least, most) for least, most in ((32, 32768), (64, 16384), (64, 16384)))
        if 1 << 24 <= m * n * k <= 750_000_000_000 and m * n + n * k + m * k <= 750_000_000:
            other = ("drelu + bgrad", "gelu + bias", "relu + bias + mask")[len(found) // 2 % 3]
            layout = "nn" if len(found) // 2 % 4 == 3 else "nt"
            found += _cases(group, ("relu + bias", other), ((m, n, k),), dtypes=("bf16",), layout=layout)
    return found


def extent(rng: random.Random, least: int, most: int) -> int:
    """Between both, its logarithm evenly drawn; of three, one is a multiple of 8 alone, and two of 64."""
    unit = 64 if rng.random() < 2 / 3 else 8
    return max(unit, round(math.exp(rng.uniform(math.log(least), math.log(most))) / unit) * unit)


def headline() -> list[Case]:
    """A part of every group, so ordered that what comes last is missed least."""
    huge = _cases("epilogues", [p.name for p in PROGRAMS[:3]], TABLE[-1:], dtypes=DTYPES[1:])
    return [*small(), *skinny(), *odd(), *epilogues(shapes=TABLE[:-1] + LAYERS), *huge]


def every_epilogue() -> list[Case]:
    return [*epilogues(), *gradients()]


GROUPS = {
    "headline": headline, "epilogues": every_epilogue, "small": small, "skinny": skinny, "odd": odd, "tuned": tuned, "untuned": untuned,
}  # fmt: skip
"""What each claim measures."""


def requests(cases: Iterable[Case]) -> list[Request]:
    """The problems of cases, for the tuner, each once."""
    return distinct(one for c in cases for one in every([BY_NAME[c.program].text], [c.shape], [c.dtype], [c.layout]))
