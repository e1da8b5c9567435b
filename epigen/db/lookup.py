"""Which tuned config a problem gets: the records in memory, indexed, and the order in which they are asked.

Records go in; a config comes out with the record it is from and one sentence that explains it. Pure data: no file is read here.

Order: the same problem; the same under another Triton version; the nearest shape of this program on this GPU; the nearest of another
program of the same epilogue class on this GPU; that of any program on this GPU; then the same three on another GPU of the same
architecture, where the nearest shape is the one that fills as many waves there: extents are scaled by the ratio of multiprocessors.
Operands of another dtype of the same size are a little farther. Within one step the user's own records go before the shipped ones where
they are equally near. An invariant program gets what was tuned for such, or else for any; other programs never what may not split k.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from epigen import gpus
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Choice, KernelConfig
from epigen.db.problem import Problem, coarse_bucket
from epigen.db.records import Key, Record, problem_key, short
from epigen.dtypes import ALL
from epigen.shapes import Shape, extents, products

# Distances are in doublings. One of M or of N doubles the output tiles, which decides the tile that fills the GPU; one of K only
# makes each tile's loop longer, which the best config notices half as much.
WEIGHT_M = WEIGHT_N = 1.0
WEIGHT_K = 0.5
WEIGHT_PRODUCTS = 0.5
"""Of a batch. Twice as many products are twice as many tiles, as of a longer M, but a batch has enough of them for most tiles to fill the GPU."""
LAYOUT_STEP = 4.5
"""For each operand that lies otherwise, and so beyond FARTHEST: the best config of one layout can lose in another. relu(mm + bias) at
4096x4096x4096 fp16 on an H200 (Triton 3.6, 2026-11): 193 us tiled against 213 us by the vendor's product where b is row-major, 256
against 212 where it is transposed."""
LAYOUT_STEP_TMA = 0.5
"""The same where TMA loads the operands, which lays them out alike. At 8192x8192x4096 and x512 bf16 the winners of "nn" and "nt" were the
same but for the order of tiles, and their times within 1 %."""
ALIGNMENT_STEP = 1.5
"""For each halving of the alignment: narrower loads, until none can be asynchronous. relu(mm + bias) at 1000x1003x1001 fp16 on an H200
(Triton 3.6, 2026-11): the best config of aligned shapes is 1.4 to 2 times slower than the best one."""
DTYPE_STEP = 0.25
"""Where the operands have another dtype of the same size: bf16 and fp16 take the same time but for the power that their bits draw."""
OUTPUT_STEP = 0.5
"""Where the outputs have other sizes: the epilogue moves other numbers of bytes."""
INPUT_STEP = 0.5
"""For each [m, n] input of another size, an fp32 residual instead of an fp16 one say: as with outputs, other numbers of bytes."""
VECTOR_STEP = 0.125
"""For each input of rows or columns of another size, whose bytes hardly count: enough to prefer the record that has them alike."""
BANDWIDTH_STEP = 0.5
"""For each doubling of the memory bandwidth that a multiprocessor of the other GPU has: whether math or memory binds moves with it."""
CLASS_STEP, PROGRAM_STEP = 1.0, 2.0
"""What another program of the same epilogue class, and one of any class, add once a problem is near enough to lend: they go in order of likeness,
and then of distance, but are trusted less."""
FARTHEST = 4.0
"""Beyond this nothing is borrowed, for instance where both M and N are more than four times as large."""

Accept = Callable[[KernelConfig], bool]
_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.intp]

_DTYPES = {t.name: t for t in ALL}
_UNLIKE = {"spec": 0.0, "kind": CLASS_STEP, "any": PROGRAM_STEP}  # by a step's likeness


@dataclass(frozen=True, slots=True)
class Recorded(Choice):
    """A config from a record. how: "exact", "triton", "shape", "kind", "program" or "architecture": the step that found it. far: the distance
    of its problem, in doublings, another program's step included.
    """

    record: Record
    how: str
    far: float = 0.0


@dataclass(frozen=True, slots=True)
class _Entry:
    record: Record
    source: int


class _Cell:
    """Records among which the nearest is looked for: every one at each look-up, which is arithmetic on arrays that the first one makes."""

    def __init__(self, entries: Sequence[_Entry]):
        self.entries = entries

    @functools.cached_property
    def logs(self) -> _Floats:
        """A row for the number of products, one for M, one for N and one for K."""
        return _logs([e.record.shape for e in self.entries])

    @functools.cached_property
    def gpus(self) -> tuple[list[str], _Integers]:
        """Each one once, and which of them an entry has."""
        names = list(dict.fromkeys(e.record.gpu for e in self.entries))
        place = {name: i for i, name in enumerate(names)}
        return names, np.array([place[e.record.gpu] for e in self.entries])


@dataclass(frozen=True, slots=True)
class _Step:
    how: str
    cell: Key
    likeness: str  # "spec" where the program is the same, "kind" where its class is, else "any"
    other_gpu: bool = False


def distance(one: Problem, other: Problem, layout_step: float = LAYOUT_STEP) -> float:
    """How far two problems lie apart, in weighted doublings; 0 for equal extents, alignment, layout, dtypes, and sizes of inputs and outputs.

    layout_step: of what is borrowed. On two GPUs that `gpus` knows, a shape is as far as it is from the one that fills as many waves of the other, and their bandwidths count.
    """
    scale = _scale(one.gpu, other.gpu) or _UNKNOWN
    (apart,) = _apart(one, _logs([other.shape]), np.array([scale.waves]), np.array([scale.step]))
    return float(apart) + _penalty(one, other, layout_step)


def _apart(one: Problem, logs: _Floats, waves: _Floats, steps: _Floats) -> _Floats:
    """The part of the distance that the extents and the GPUs make, to each of several. waves, steps: of their `_Scale`s; M and N may share
    the doublings of the output in any way.
    """
    count, m, n, k = logs - _logs([one.shape])
    part = np.clip(m, np.minimum(waves, 0.0), np.maximum(waves, 0.0))
    apart: _Floats = WEIGHT_M * np.abs(m - part) + WEIGHT_N * np.abs(n - (waves - part)) + WEIGHT_K * np.abs(k) + WEIGHT_PRODUCTS * np.abs(count) + steps
    return apart


@dataclass(frozen=True, slots=True)
class _Scale:
    """From one GPU to another. waves: doublings of multiprocessors. step: what the bandwidths add to a distance."""

    waves: float
    step: float
    sentence: str


_UNKNOWN = _Scale(0.0, 0.0, "not scaled, since the size of one of the two is unknown")


def _scale(here: str, there: str) -> _Scale | None:
    """None for the same GPU, and where the table lacks one of the two: nothing is known to scale by."""
    own, other = gpus.find(here), gpus.find(there)
    if own is None or other is None or here == there:
        return None
    waves = math.log2(other.multiprocessors / own.multiprocessors)
    step = BANDWIDTH_STEP * abs(math.log2(other.bandwidth_gbps / own.bandwidth_gbps) - waves)
    if other.multiprocessors == own.multiprocessors:
        sentence = f"not scaled, since both have {own.multiprocessors} multiprocessors"
    else:
        sentence = f"its shape scaled by {own.multiprocessors}/{other.multiprocessors} multiprocessors"
    return _Scale(waves, step, sentence)


def _layout_step(record: Record) -> float:
    return LAYOUT_STEP_TMA if SCHEDULES[record.schedule].descriptors else LAYOUT_STEP


def _penalty(one: Problem, other: Problem, layout_step: float) -> float:
    layouts = sum(x != y for x, y in zip(one.layout, other.layout, strict=True))
    halvings = abs(one.alignment.bit_length() - other.alignment.bit_length())
    outputs = one.outputs != other.outputs and [_DTYPES[o].bits for o in one.outputs] != [_DTYPES[o].bits for o in other.outputs]
    inputs = _input_steps(one.inputs, other.inputs) if one.inputs != other.inputs else 0.0
    dtypes = _operands(one) != _operands(other)
    return layout_step * layouts + ALIGNMENT_STEP * halvings + DTYPE_STEP * dtypes + OUTPUT_STEP * outputs + inputs


def _input_steps(one: tuple[str, ...], other: tuple[str, ...]) -> float:
    """By how many inputs of which size: their order counts for nothing, since programs of one class may name them in any order."""
    counts = _input_sizes(one)
    counts.subtract(_input_sizes(other))
    return sum((INPUT_STEP if indices == "mn" else VECTOR_STEP) * abs(n) for (_, indices), n in counts.items()) / 2


def _input_sizes(inputs: tuple[str, ...]) -> Counter[tuple[int, str]]:
    split = (kind.rstrip("]").partition("[") for kind in inputs)
    return Counter((_DTYPES[dtype].bits if indices else 0, indices) for dtype, _, indices in split)


def _logs(shapes: Sequence[Shape]) -> _Floats:
    """Of the number of products, M, N and K, a row each. Not numpy's logarithm, whose last bit depends on the processor and would decide between equally near shapes."""
    rows = zip(*((products(shape), *shape[-3:]) for shape in shapes), strict=True)
    return np.array([[math.log2(max(1, extent)) for extent in row] for row in rows])


def _operands(problem: Problem) -> Key:
    return problem.a, problem.b


def _sizes(problem: Problem) -> Key:
    """fp32 in full precision has no tensor cores, so precision counts as a size does. What one product gets is no guess for a batch, and the other way round, nor what a
    batch gets for groups, and what a dense operand gets for a sparse one."""
    a, b = _DTYPES[problem.a], _DTYPES[problem.b]
    return a.kind, a.bits, b.kind, b.bits, problem.precision, len(problem.shape), problem.groups, problem.sparse


def _steps(p: Problem) -> Iterator[_Step]:
    """The cells of one problem, in order. A record lies in the same ones."""
    gpu = (p.gpu, p.capability)
    for where, other_gpu in ((gpu, False), (p.capability, True)):
        for how, likeness, what in (("shape", "spec", p.spec), ("kind", "kind", p.kind), ("program", "any", "")):
            yield _Step("architecture" if other_gpu else how, (likeness, where, what, _sizes(p)), likeness, other_gpu)


def version_order(version: str) -> tuple[int, ...]:
    """Sorts versions by their leading numbers, so that 3.10.0 is newer than 3.9.1."""
    numbers = []
    for part in version.split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdecimal()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


class Index:
    """The records of some databases, ready to be asked. Build it anew when one changes."""

    def __init__(self, sources: Iterable[Iterable[Record]]):
        self._exact: dict[Key, list[_Entry]] = {}
        self._capabilities: set[str] = set()
        self._coarse_keys: set[Key] = set()  # tuned problems but for M, by its coarse bucket
        cells: dict[Key, list[_Entry]] = defaultdict(list)
        for source, records in enumerate(sources):
            # of equally near records the one of the smaller M is found, and whatever their order on disk the same one
            for record in sorted(records, key=lambda r: (r.shape[-3], r.key)):
                entry = _Entry(record, source)
                self._exact.setdefault(record.problem_key, []).append(entry)
                self._coarse_keys.add((*coarse_key(record.problem), record.triton))
                self._capabilities.add(record.capability)
                for step in _steps(record):
                    cells[step.cell].append(entry)
        self._cells = {key: _Cell(entries) for key, entries in cells.items()}

    def candidates(self, problem: Problem, triton: str, accept: Accept | None = None) -> Iterator[Recorded]:
        """All records that may serve, best first, each config with its sentence. accept: which configs are legal for the problem."""
        yield from self.same(problem, triton, accept)
        yield from self._near(problem, triton, accept, {id(e) for e in self._very(problem)})

    def near(self, problem: Problem, triton: str, accept: Accept | None = None) -> Iterator[Recorded]:
        """As `candidates`, for one that is not there: a record of this very problem is only the nearest one."""
        return self._near(problem, triton, accept, set())

    def same(self, problem: Problem, triton: str, accept: Accept | None = None) -> Iterator[Recorded]:
        """Those of this very problem."""
        same = self._very(problem)
        for entry in same:
            if entry.record.triton == triton and _fits(entry.record, accept):
                yield _recorded(entry.record, "exact", f"tuned for {_where(entry.record)} (exact)")
        others = [e for e in same if e.record.triton != triton]
        for entry in sorted(others, key=lambda e: (version_order(e.record.triton), -e.source), reverse=True):
            if _fits(entry.record, accept):
                yield _recorded(entry.record, "triton", f"tuned for {_where(entry.record)} under Triton {entry.record.triton}, and {triton} is the present one")

    def _very(self, problem: Problem) -> list[_Entry]:
        own = self._exact.get(problem_key(problem), [])
        return own + self._exact.get(problem_key(replace(problem, invariant="")), []) if problem.invariant else own

    def measured(self, capability: str) -> bool:
        """Whether any problem was tuned on a GPU of this architecture."""
        return capability in self._capabilities

    def tuned_in_coarse_bucket(self, problem: Problem, triton: str) -> bool:
        """Whether some M of this one's coarse bucket was tuned, under this version of Triton."""
        return (*coarse_key(problem), triton) in self._coarse_keys

    def _near(self, problem: Problem, triton: str, accept: Accept | None, seen: set[int]) -> Iterator[Recorded]:
        """seen: entries that are passed over."""
        for step in _steps(problem):
            for far, entry in self._nearest(problem, triton, step):
                if id(entry) not in seen and entry.record.invariant in ("", problem.invariant) and _fits(entry.record, accept):
                    seen.add(id(entry))
                    yield _recorded(entry.record, step.how, _sentence(step, problem, entry.record), far + _UNLIKE[step.likeness])

    def _nearest(self, problem: Problem, triton: str, step: _Step) -> Iterator[tuple[float, _Entry]]:
        cell = self._cells.get(step.cell)
        if cell is None:
            return
        names, which = cell.gpus
        scales = [_scale(problem.gpu, name) or _UNKNOWN for name in names]
        apart = _apart(problem, cell.logs, np.array([s.waves for s in scales])[which], np.array([s.step for s in scales])[which])
        near: list[tuple[float, bool, int, bool, int, _Entry]] = [
            (float(apart[order]), False, 0, False, order, cell.entries[order])
            for order in np.flatnonzero(apart <= FARTHEST).tolist()
            if not step.other_gpu or cell.entries[order].record.gpu != problem.gpu
        ]
        # mostly only the first is asked for, so the rest of the distance is added when an entry comes to the top
        heapq.heapify(near)
        while near:
            far, whole, _, _, order, e = heapq.heappop(near)
            if whole:
                yield far, e
            elif (far := far + _penalty(problem, e.record, _layout_step(e.record))) <= FARTHEST:
                heapq.heappush(near, (far, True, e.source, e.record.triton != triton, order, e))


def distinct(choices: Iterable[Recorded], count: int) -> tuple[Recorded, ...]:
    """The first `count` that differ in their configs."""
    seen: dict[KernelConfig, Recorded] = {}
    for one in choices:
        seen.setdefault(one.config, one)
        if len(seen) == count:
            break
    return tuple(seen.values())


def coarse_key(problem: Problem) -> Key:
    """Of problems that one was tuned for: all whose M lie in one coarse bucket."""
    return problem_key(replace(problem, shape=coarse_bucket(problem.shape, problem.layout)))


def _fits(record: Record, accept: Accept | None) -> bool:
    return accept is None or accept(record.kernel_config)


def _recorded(record: Record, how: str, why: str, far: float = 0.0) -> Recorded:
    return Recorded(record.kernel_config, why, record, how, far)


def _where(record: Record) -> str:
    return f"{extents(record.shape)} on {record.gpu}"


def _sentence(step: _Step, problem: Problem, record: Record) -> str:
    another = {"kind": "an epilogue of this class", "any": "another program"}
    what = "this program" if step.likeness == "spec" else f"{another[step.likeness]}, {short(record.program)},"
    where = record.gpu
    if step.other_gpu:
        scale = _scale(problem.gpu, record.gpu)
        where += (
            f", of the same architecture; {scale.sentence}" if scale else ", of the same architecture; not scaled, since the size of one of the two is unknown"
        )
    unlike = []
    if _operands(record) != _operands(problem):
        unlike.append(f"with {record.a} operands" if record.a == record.b else f"with {record.a} and {record.b} operands")
    if record.inputs != problem.inputs and step.likeness != "any":
        unlike.append(f"with inputs {', '.join(record.inputs)}")
    if record.layout != problem.layout:
        unlike.append(f"in layout {record.layout}")
    if record.alignment != problem.alignment:
        unlike.append(f"with rows aligned to {record.alignment} byte{'s' * (record.alignment > 1)}")
    how = f" ({', '.join(unlike)})" if unlike else ""
    return f"borrowed from {extents(record.shape)}{how}, the nearest tuned shape of {what} on {where}"
