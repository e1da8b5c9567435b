"""Reads the first text that Triton's compiler makes of a kernel, TTIR or for Gluon TTGIR: how wide the integers are that become offsets of pointers.

Only what that takes: constants, arithmetic, pointers that move, loops over what an argument gives. Anything else is a value of which nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from compiling import in_a_child

from epigen.errors import CompileError
from epigen.runtime import loader
from epigen.runtime.ahead import Job, layout_constants

_OP = re.compile(r"\s*%(?P<name>[\w$]+)(?::\d+)? = (?P<op>[\w.]+) (?P<rest>.*)")
_ARGUMENT = re.compile(r"%(\w+): (i32|i64)\b")
_LOOP = re.compile(r"scf\.for %(?P<each>[\w$]+) = %(?P<start>[\w$#]+) to %(?P<stop>[\w$#]+) step")
_SAME = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout", "gluon.set_auto_layout"}
_WIDER = {"arith.extsi", "arith.extui"}
_LARGEST_FACTOR = 16
"""Numbers of tiles are multiplied by no more, indices of elements by the size of a tile at least."""


@dataclass(frozen=True)
class Value:
    """bits: of an integer, or of a tensor's. bounds: the least and the largest that it can be, where only constants decide that."""

    op: str
    operands: tuple[Value, ...] = ()
    bits: int = 0
    scalar: bool = True
    bounds: tuple[int, int] | None = None
    name: str = ""

    @property
    def source(self) -> Value:
        """The value itself, before it was spread over a tensor or made wider."""
        return self.operands[0].source if self.op in _SAME | _WIDER else self


@dataclass
class Function:
    """What is wrong in one kernel. described: TMA counts its tiles in 32 bits."""

    described: bool
    values: dict[str, Value] = field(default_factory=dict)
    offsets: int = 0
    faults: list[str] = field(default_factory=list)

    def read(self, text: str) -> Function:
        for line in text.splitlines():
            line = re.sub(r" loc\(.*$", "", line) if "tt.func" not in line else line
            if "tt.func" in line:
                self.values |= {name: Value("argument", bits=int(kind[1:]), name=name) for name, kind in _ARGUMENT.findall(line)}
            for fault in self._faults(line):
                self.faults.append(f"{fault}: {line.strip()}")
        return self

    def _faults(self, line: str) -> Iterator[str]:
        if loop := _LOOP.search(line):
            start, stop = (self.values.get(loop[name], Value("unknown")) for name in ("start", "stop"))
            both = start.bounds is not None and stop.bounds is not None
            self.values[loop["each"]] = Value("unknown", bounds=(start.bounds[0], stop.bounds[1]) if both else None)  # type: ignore[index]
            if not self.described and (stop.op, stop.bits) == ("argument", 32):
                yield "a loop that counts in 32 bits"
        found = _OP.match(line)
        if found is None:
            return
        value = self.values[found["name"]] = self._value(found["op"], found["rest"])
        if value.op == "tt.addptr":
            self.offsets += 1
            yield from self._offset(value.operands[1])
        elif value.op in ("arith.muli", "arith.shli", "arith.addi", "arith.subi") and value.bits == 32 and value.bounds is None:
            arguments = [x.source.name for x in value.operands if x.source.op == "argument"]
            if value.op in ("arith.muli", "arith.shli") and arguments:
                yield f"{arguments} multiplied in 32 bits"
            elif not self.described:
                yield "arithmetic of 32 bits"

    def _value(self, op: str, rest: str) -> Value:
        operands = tuple(self.values.get(name, Value("unknown", name=name)) for name in re.findall(r"%([\w$#]+)", rest.split(" : ")[0].split("{")[0]))
        kind = rest.rpartition(" : ")[2].rpartition(" -> ")[2].rpartition(" to ")[2]
        bits = int(found[1]) if (found := re.match(r"(?:tensor<[\dx]+x)?i(\d+)\b", kind)) else 0
        return Value(op, operands, bits, not kind.startswith("tensor"), _bounds(op, operands, rest))

    def _offset(self, value: Value) -> Iterator[str]:
        if value.bounds is not None:
            return
        if value.bits == 64:
            yield from self._wide(value)
        elif not (self.described and value.scalar and _numbers_tiles(value)):
            yield f"an offset of {value.bits} bits"

    def _wide(self, value: Value) -> Iterator[str]:
        """What of an integer of 64 bits has been computed in 32."""
        if value.bounds is not None or value.op in ("argument", "unknown"):
            return
        if value.op in _WIDER:
            (narrow,) = value.operands
            if narrow.bounds is None and narrow.source.op != "argument" and not _numbers_tiles(narrow):
                yield "an offset that was computed in 32 bits before it was made wider"
            return
        for operand in value.operands:
            yield from self._wide(operand)


def _numbers_tiles(value: Value) -> bool:
    """Whether an integer can be the number of a tile, a part of one or a program: no more than 2^30, as `limits.number_of_tiles` sees to."""
    if value.bounds is not None:
        return True
    if value.op in ("arith.divsi", "arith.remsi", "tt.get_program_id", "tt.get_num_programs", "unknown", "arith.select"):
        return True
    if value.op == "arith.shli":
        number, shift = value.operands
        return _numbers_tiles(number) and shift.bounds is not None and 1 << shift.bounds[1] <= _LARGEST_FACTOR
    if value.op == "arith.muli":
        return all(_numbers_tiles(x) and (x.bounds is None or x.bounds[1] <= _LARGEST_FACTOR) for x in value.operands)
    return value.op in _SAME | {"arith.addi", "arith.subi", "arith.minsi", "arith.maxsi"} and all(map(_numbers_tiles, value.operands))


def _bounds(op: str, operands: tuple[Value, ...], rest: str) -> tuple[int, int] | None:
    if op == "arith.constant":
        found = re.match(r"(?:dense<)?(-?\d+)>? : ", rest)
        return (int(found[1]), int(found[1])) if found else None
    if op == "tt.make_range":
        found = re.search(r"end = (\d+)", rest)
        assert found
        return 0, int(found[1]) - 1
    known = [x.bounds for x in operands if x.bounds is not None]
    if op == "arith.remsi" and len(operands) == 2 and operands[1].bounds and operands[1].bounds[0] > 0:
        return 1 - operands[1].bounds[1], operands[1].bounds[1] - 1
    if not operands or len(known) < len(operands):
        return None
    if op in _SAME | _WIDER:
        return known[0]
    if op in ("arith.addi", "arith.subi", "arith.muli"):
        combine = {"arith.addi": int.__add__, "arith.subi": int.__sub__, "arith.muli": int.__mul__}[op]
        every = [combine(x, y) for x in known[0] for y in known[1]]
        return min(every), max(every)
    if op == "arith.shli" and known[1][0] >= 0:
        return min(x << y for x in known[0] for y in known[1]), max(x << y for x in known[0] for y in known[1])
    return None


# -- compiling no further than that


class _Reached(Exception):
    """The compiler has made its first text."""


def first_texts(jobs: Sequence[Job]) -> list[list[str]]:
    """Of each kernel of each job. By one child process, whose Triton compiles."""
    found: list[list[str]] = in_a_child(_FirstTexts(tuple(jobs)))
    return found


@dataclass(frozen=True)
class _FirstTexts:
    jobs: tuple[Job, ...]

    def run(self) -> list[list[str]]:
        triton = loader._import_triton(interpret=False)
        from triton.backends.amd.compiler import HIPBackend
        from triton.backends.nvidia.compiler import CUDABackend

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton.knobs.compilation, "always_compile", True)
            for backend in (CUDABackend, HIPBackend):
                patch.setattr(backend, "add_stages", _one_stage(backend.add_stages))
            return [[_first_text(job, function) for function in job.rendered.functions] for job in self.jobs]


def _one_stage(add_stages: Callable[..., None]) -> Callable[..., None]:
    def added(self: Any, stages: dict[str, Callable[..., Any]], *given: Any) -> None:
        def reached(module: Any, _metadata: Any) -> None:
            raise _Reached(str(module))

        add_stages(self, stages, *given)
        stages["ttgir" if "ttir" in stages else "llir"] = reached  # Gluon has no TTIR

    return added


def _first_text(job: Job, function: Any) -> str:
    try:
        loader.compile_ahead(job.rendered, function, job.target, layout_constants(function, job.layout))
    except CompileError as error:
        if isinstance(error.__cause__, _Reached):
            return str(error.__cause__)
        raise
    raise AssertionError(f"{function.name} was taken from a cache")
