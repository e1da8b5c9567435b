"""Fuzzes the language: sound programs and hostile texts, mixed, through every stage; each is an answer or an error in words.

Sound programs are never refused. Refused texts are refused by a ParseError or a CheckError whose places lie in the text. What is accepted is the
same program after it was written out and read again; has a derivative, or an error that says why not; renders to Python that compiles and whose
names are all there; and gives, operation by operation in fp32, what the float64 oracle says within its bound. Of some programs the generated kernel
runs as well, under Triton's interpreter, and of some the derivative is held against torch's autograd.

Run: python -m bench.fuzz [--programs N] [--seed N] [--only NUMBER ...] [--commit HASH] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import builtins
import random as random_module
import symtable
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import epigen
from bench import gradients, record
from bench.random_programs import hostile, renamed, write_program
from bench.record import Report
from epigen import dtypes, settings
from epigen.codegen import schedules
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.render import Renderer
from epigen.codegen.schedules import SCHEDULES
from epigen.db.problem import graph_digest
from epigen.dtypes import FP16, FP32, INT8, DType
from epigen.errors import CallError, DerivationError, ProgramError
from epigen.ir import graph as g
from epigen.ir.check import check
from epigen.ir.derive import derive
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.ir.unparse import unparse
from epigen.lang.parser import parse
from epigen.runtime import verify

KERNELS, GRADIENTS = 40, 8  # of so many sound programs one is run as a kernel, and one differentiated
LONGEST = 600  # nodes of what is evaluated and rendered: a longer program says no more
SHAPE = (5, 11, 6)
INTERPRETED = (11, 37, 20)
INTERPRETABLE = (FP16, FP32, INT8)  # what Triton's interpreter rounds rightly


def _tiled(**values: int) -> schedules.KernelConfig:
    return schedules.config("tiled", **{"block_m": 32, "block_n": 32, "block_k": 32, "group_m": 4, "num_warps": 4, "num_stages": 2} | values)


_HOPPER = {"block_m": 128, "block_n": 128, "block_k": 64, "group_m": 8, "num_stages": 3}
CONFIGS = (
    _tiled(), _tiled(prefetch=1), _tiled(fused_finalize=1), schedules.config("library", block_m=8, block_n=64, num_warps=4), schedules.config("library", block_m=4, block_n=128, num_warps=4, fused_finalize=1),
    schedules.config("split_k", **dict(_tiled().values) | {"splits": 4}), schedules.config("split_k", **dict(_tiled().values) | {"splits": 2, "fused_finalize": 1, "prefetch": 1}),
    schedules.config("persistent", **_HOPPER, flatten=1, subtiles=2, tma_store=1, num_warps=8), schedules.config("persistent", **_HOPPER, flatten=0, subtiles=1, tma_store=0, num_warps=8, fused_finalize=1, prefetch=1),
    schedules.config("warp_specialized", **_HOPPER, pingpong=0, subtiles=2, tma_store=1, tma_load=1, prefetch=1), schedules.config("warp_specialized", **_HOPPER, pingpong=1, subtiles=1, tma_store=0, fused_finalize=1, splits=2),
)  # fmt: skip
_SIXTEEN = dict.fromkeys(("block_m", "block_n", "block_k"), 16)  # the interpreter reduces a tile element by element
INTERPRETED_CONFIGS = (_tiled(**_SIXTEEN), _tiled(**_SIXTEEN, fused_finalize=1, prefetch=1), schedules.config("library", block_m=4, block_n=32, num_warps=4),
                       schedules.config("split_k", **dict(_tiled(**_SIXTEEN).values) | {"splits": 2}))  # fmt: skip
OPERANDS = (*((t, t) for t in dtypes.OPERANDS), (dtypes.FP8E4M3, dtypes.FP8E5M2))


@dataclass(frozen=True, slots=True)
class CodeBuilder:
    """One text. sound: it is a program, and may not be refused. tame: finite inputs give it finite values of moderate size."""

    number: int
    text: str
    sound: bool
    tame: bool


@dataclass(slots=True)
class Found:
    """counts: by outcome. failures: what no text may cause, each with the text."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)


def source_of(seed: int, number: int) -> random_module.Random:
    """Each text has numbers of its own, so that it can be had alone."""
    return random_module.Random(f"{seed} {number}")


def written(seed: int, number: int) -> CodeBuilder:
    random, sound = source_of(seed, number), number % 2 == 0
    if not sound:
        return CodeBuilder(number, hostile(random), False, False)
    interpreted, differentiated = number // 2 % KERNELS == 0, number // 2 % GRADIENTS == 1
    tame = interpreted or differentiated or random.random() < 0.6
    # of what is held against autograd nothing is rounded: torch rounds the gradient of a cast as well
    casts = INTERPRETABLE if interpreted else () if differentiated else dtypes.OPERANDS
    text = write_program(random, random.choice((4, 12, 20)), tame, casts=casts, operands=number // 2 % 3 == 0)
    return CodeBuilder(number, renamed(random, text) if random.random() < 0.4 else text, True, tame)


class Fuzzer:
    """Holds the renderer. Every check raises AssertionError, or whatever a stage should not have raised."""

    def __init__(self, seed: int):
        self.seed = seed
        self.renderer = Renderer(settings.templates_dir())

    def examine(self, given: CodeBuilder) -> Iterator[str]:
        """The outcome of each stage in words."""
        random = source_of(self.seed, ~given.number)
        try:
            graph = normalise(check(parse(given.text)))
        except ProgramError as error:
            refused(error)
            if given.sound:
                raise
            yield f"refused with a {type(error).__name__}"
            return
        yield "accepted"
        written_back(graph)
        yield from self.derived(graph, given, random)
        if len(graph.nodes) > LONGEST:
            return
        if given.number // 2 % KERNELS == 1:
            self.rendered_alike(graph)
        for config in random.sample([c for c in CONFIGS if SCHEDULES[c.schedule].computes or not graph.computed()], 2):
            self.rendered(graph, config, random)
            yield f"rendered as {config.schedule}"
        if given.tame:
            self.evaluated(
                epigen.compile(given.text, backend="reference"),
                SHAPE,
                random.choice(_multiplied(graph, dtypes.OPERANDS)),
                random,
                integers=random.random() < 0.5,
            )
            yield "agrees with the oracle operation by operation"
        if given.sound and given.number // 2 % KERNELS == 0:
            config = random.choice([c for c in INTERPRETED_CONFIGS if SCHEDULES[c.schedule].computes or not graph.computed()])
            kernel = epigen.compile(given.text, backend="interpreter", config=config)
            self.evaluated(kernel, INTERPRETED, random.choice(_multiplied(graph, INTERPRETABLE)), random, integers=False)
            yield "agrees with the oracle as a kernel"

    def derived(self, graph: Graph, given: CodeBuilder, random: random_module.Random) -> Iterator[str]:
        try:
            found = derive(graph, FP32)  # what is saved is then as exact as what it is held against
            found = derive(graph, FP32, save=random.choice(found.options).save if len(found.options) > 1 else None)
        except (DerivationError, CallError) as error:
            if isinstance(error, ProgramError):
                refused(error)
            yield f"no derivative: {type(error).__name__}"
            return
        yield f"derived, keeping {found.save}"
        for program in (found.forward, found.backward, *(o.program for o in found.operands)):
            assert normalise(check(parse(program.text))) == program
        if given.tame and given.number // 2 % GRADIENTS == 1 and not _bounds_vary(graph):
            source = torch.Generator().manual_seed(given.number)
            a, b = gradients.normal("mk", SHAPE, source), gradients.normal("kn", SHAPE, source)
            inputs = gradients.inputs_of(graph, SHAPE, source)
            indices = {o.name: graph.nodes[o.node].indices for o in graph.outputs}
            arriving = {name: gradients.normal(indices[name], SHAPE, source) for name in found.arriving}
            try:
                if graph.computed():
                    ours_by_name = gradients.all_gradients(found, a, b, inputs, arriving)
                    wanted = list(ours_by_name)
                    expected, found_gradients = gradients.autograd_of_operands(graph, a, b, inputs, arriving, wanted), list(ours_by_name.values())
                else:
                    wanted = [x.of for x in found.gradients]
                    expected, found_gradients = (
                        gradients.autograd(graph, a @ b, inputs, arriving, wanted),
                        gradients.derived_gradients(found, a, b, inputs, arriving),
                    )
            except RuntimeError as error:
                if "broadcast shape" in str(error):  # torch's own clamp
                    return
                raise
            for name, ours, theirs in zip(wanted, found_gradients, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8, equal_nan=True, msg=lambda words, x=name: f"the gradient of {x}: {words}")
            yield "agrees with torch's autograd"

    def rendered(self, graph: Graph, config: schedules.KernelConfig, random: random_module.Random) -> None:
        pairs = (
            [(FP16, FP16), (dtypes.BF16, dtypes.BF16)] if config.schedule == "warp_specialized" else [p for p in OPERANDS if p[0] in _multiplied(graph, [p[0]])]
        )
        inputs = tuple((n.name, random.choice(dtypes.OPERANDS) if n.indices or random.random() < 0.5 else None) for n in graph.inputs())
        shape, layout = random.choice(((64, 64, 64), (100, 37, 19))), random.choice(("nn", "nt", "tn"))
        spec = lower(graph, signature_of_contiguous(graph, *random.choice(pairs), inputs, shape, layout, "ieee"))
        text = self.renderer.render(spec, config).text
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(text, "<kernel>", "exec")
        assert undefined(text) == [], f"names that are not there: {undefined(text)}\n{text}"

    def rendered_alike(self, graph: Graph) -> None:
        """Equal inputs render equal bytes."""
        inputs = tuple((n.name, FP16) for n in graph.inputs())
        specs = [lower(graph, signature_of_contiguous(graph, FP16, FP16, inputs, (64, 64, 64), "nn", "ieee")) for _ in range(2)]
        assert len({self.renderer.render(spec, CONFIGS[0]).text for spec in specs}) == 1

    def evaluated(self, kernel: epigen.Kernel, shape: tuple[int, int, int], a: DType, random: random_module.Random, integers: bool) -> None:
        inputs = FP32 if a.bits == 8 else a
        sample = verify.sample(kernel.graph, shape, a, a, inputs, seed=random.randrange(1 << 20), integers=integers, scalars_by_value=random.random() < 0.5)
        verify.demand(verify.differences(kernel, sample))


def _multiplied(graph: Graph, operands: Iterable[DType]) -> list[DType]:
    """Of these dtypes, those that the operands may have: of 8 bits nothing is computed."""
    return [dtype for dtype in operands if dtype.bits > 8 or not graph.computed()]


def _bounds_vary(graph: Graph) -> bool:
    """Whether a hardtanh has bounds that are no constants: torch's takes numbers, and torch.clamp, which stands for it, shares a gradient at ties otherwise."""
    return any(node.op == "hardtanh" and any(graph.nodes[i].op != g.CONSTANT for i in node.args[1:]) for node in graph.nodes)


def refused(error: ProgramError) -> None:
    assert str(error).strip() and error.diagnostics
    for diagnostic in error.diagnostics:
        assert diagnostic.message
        assert diagnostic.span is None or 0 <= diagnostic.span.start <= diagnostic.span.end <= len(error.text) + 1, diagnostic


def written_back(graph: Graph) -> None:
    """Read anew, a program's text is the program, with the same names and the same digest."""
    text = unparse(graph)
    again = normalise(check(parse(text)))
    assert again == graph and [o.name for o in again.outputs] == [o.name for o in graph.outputs], text
    assert unparse(again) == text == again.text
    assert graph_digest(again) == graph_digest(graph)


def undefined(text: str) -> list[str]:
    """Names that the functions of a module read and nothing gives a value: parameters, assignments, imports and Python's own do."""
    module = symtable.symtable(text, "<kernel>", "exec")
    given = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()} | set(dir(builtins))
    return sorted({name for function in module.get_children() for name in function.get_globals()} - given)  # type: ignore[attr-defined]


def fuzz(numbers: range, seed: int, report: Callable[[int, Found], None] = lambda _number, _found: None) -> Found:
    fuzzer, found = Fuzzer(seed), Found()
    for number in numbers:
        given = written(seed, number)
        found.counts["sound programs" if given.sound else "hostile texts"] += 1
        try:
            found.counts.update(fuzzer.examine(given))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is what is looked for)
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.failures.append(
                {
                    "number": number,
                    "text": given.text[:2000],
                    "error": f"{type(error).__name__}: {error}"[:2000],
                    "at": f"{where.filename.rpartition('/')[2]}:{where.lineno}",
                }
            )
        report(number, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these texts alone, shown; nothing is recorded")
    record.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small: threads would wait for each other longer than they compute
    if options.only:
        fuzzer = Fuzzer(options.seed)
        for number in options.only:
            given = written(options.seed, number)
            print(repr(given.text), flush=True)
            print(*fuzzer.examine(given), sep="\n")
        return

    def report(number: int, found: Found) -> None:
        if (number + 1) % 500 == 0:
            print(f"{number + 1} texts, {len(found.failures)} failures", flush=True)

    started = time.perf_counter()
    found = fuzz(range(options.programs), options.seed, report)
    for failure in found.failures:
        print(failure, flush=True)
    rows = [{"outcome": outcome, "count": count} for outcome, count in found.counts.items()]
    about = {"seed": options.seed, "seconds": round(time.perf_counter() - started), "failures": found.failures, "holds": not found.failures}
    print(record.write("fuzz", Report("bench.fuzz", record.versions(options.commit), rows, about), options.out))
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
