"""How the work of each stage grows with the program: counted in calls, which no slow machine changes; and what is refused before any is done."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from epigen import settings
from epigen.codegen import schedules
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.render import Renderer
from epigen.codegen.spec import KernelSpec
from epigen.dtypes import FP16
from epigen.errors import DerivationError, EpigenError, ParseError, ProgramError
from epigen.ir import autodiff, program
from epigen.ir.check import check
from epigen.ir.derive import derive
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.ir.unparse import unparse
from epigen.lang.parser import MAX_CHARACTERS, MAX_NODES, parse
from epigen.lang.syntax import parts, to_text
from epigen.uncollected import uncollected

CONFIGS = (
    schedules.config("tiled", block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3),
    schedules.config("persistent", block_m=64, block_n=64, block_k=32, group_m=8, flatten=0, subtiles=1, tma_store=1, num_warps=4, num_stages=3),
    schedules.config("library", block_m=8, block_n=128, num_warps=4),
)

Family = Callable[[int], str]


def listed(form: str) -> Family:
    return lambda n: ", ".join(form.format(i) for i in range(n))


def chained(form: str) -> Family:
    """form: of the name before and the number."""
    return lambda n: "; ".join(["q0 = mm", *(f"q{i} = {form.format(f'q{i - 1}', i)}" for i in range(1, n)), f"q{n - 1}"])


SOUND: dict[str, Family] = {
    "statements": chained("{0} + {0}"),
    "activations": chained("silu({0}) * scale_b[n] + {0}"),
    "casts": chained("relu(cast({0}, fp32) + 1)"),
    "unnamed values": lambda n: "; ".join([*(f"s{j} = mm" + "".join(f" + g{j}[n] * {i}" for i in range(12)) for j in range(n // 6)), ", ".join(f"s{j}" for j in range(n // 6))]),
    "tiles": listed("mm * gate{0}[m,n]"),
    "scalars": listed("mm * s{0:04d}"),
    "long names": lambda n: "; ".join([*(f"{'q' * 30}{i:03d} = mm + {i}" for i in range(n)), ", ".join(f"{'q' * 30}{i:03d}" for i in range(n))]),
    "outputs": listed("mm + {0}"),
    "masks": listed("drelu(mm, bits(kept{0}))"),
    "reductions": listed("sum(mm + {0}, m)"),
    "what has no derivative": listed("max(mm + {0}, m)"),
}  # fmt: skip

MISTAKEN: dict[str, Family] = {
    "operations": listed("reul{0}(mm)"),
    "names": lambda n: "; ".join([*(f"alpha{i} = mm + alhpa{i}" for i in range(n)), "mm"]),
    "dtypes": listed("cast(mm, fp{0}x)"),
    "parameters": listed("leaky_relu(mm, slpe={0})"),
    "one name bound again": lambda n: "; ".join(["q = mm"] * n + ["q"]),
    "booleans": listed("mm > {0}"),
}


def calls(run: Callable[[], object]) -> int:
    """How many functions are called, Python's own among them."""
    count = 0
    # patterns and programs that are kept would make a second run less work than a first
    re.purge()
    program._KNOWN.clear()

    def watch(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    with uncollected():  # what earlier tests have left would be finalised here, at one count or at the other
        sys.setprofile(watch)
        try:
            run()
        except ProgramError:
            pass
        finally:
            sys.setprofile(before)
    return count


def graph_of(text: str) -> Graph:
    return normalise(check(parse(text)))


def spec_of(graph: Graph) -> KernelSpec:
    inputs = tuple((n.name, FP16 if n.indices else None) for n in graph.inputs())
    return lower(graph, signature_of_contiguous(graph, FP16, FP16, inputs, (64, 64, 64), "nn", "ieee"))


def assert_in_proportion(one: Callable[[], object], two: Callable[[], object]) -> None:
    """two: the same of twice as much."""
    calls(one)  # what a process does once is done
    once, twice = calls(one), calls(two)
    assert twice < 2.3 * once, f"{once} calls, and {twice} for twice as much"


def test_a_count_is_of_its_own_calls_whatever_was_left_before() -> None:
    class Left:
        def __del__(self) -> None:
            for _ in range(100):
                len("")

    def leave() -> None:
        left = Left()
        left.itself = left  # type: ignore[attr-defined]

    leave()
    assert calls(gc.collect) > 100  # a collection, and so its finalisers, is counted where it is what runs
    leave()
    assert calls(lambda: [[] for _ in range(100_000)]) < 10
    gc.collect()


@pytest.mark.parametrize("family", SOUND)
def test_the_language_stages_take_work_in_proportion(family: str) -> None:
    one, two = SOUND[family](100), SOUND[family](200)
    assert_in_proportion(lambda: check(parse(one)), lambda: check(parse(two)))
    checked = check(parse(one)), check(parse(two))
    assert_in_proportion(lambda: unparse(normalise(checked[0])), lambda: unparse(normalise(checked[1])))


@pytest.mark.parametrize("family", SOUND)
def test_derivation_takes_work_in_proportion(family: str) -> None:
    graphs = graph_of(SOUND[family](80)), graph_of(SOUND[family](160))
    assert_in_proportion(lambda: derive(graphs[0]), lambda: derive(graphs[1]))


@pytest.mark.parametrize("family", SOUND)
def test_generation_takes_work_in_proportion(family: str) -> None:
    graphs = graph_of(SOUND[family](80)), graph_of(SOUND[family](160))
    assert_in_proportion(lambda: spec_of(graphs[0]), lambda: spec_of(graphs[1]))
    one, two = map(spec_of, graphs)
    renderer = Renderer(settings.templates_dir())
    for config in CONFIGS:
        assert_in_proportion(lambda c=config: renderer.render(one, c), lambda c=config: renderer.render(two, c))  # type: ignore[misc]


@pytest.mark.parametrize("family", MISTAKEN)
def test_many_mistakes_take_work_in_proportion(family: str) -> None:
    one, two = MISTAKEN[family](100), MISTAKEN[family](200)
    with pytest.raises(ProgramError):
        graph_of(one)
    assert_in_proportion(lambda: graph_of(one), lambda: graph_of(two))


@pytest.mark.parametrize("text", ["\n" * MAX_CHARACTERS + "mm", "mm" + "\r\n" * MAX_CHARACTERS, "\t" * MAX_CHARACTERS + "mm"])
def test_a_long_text_is_refused_before_it_is_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[int] = []
    monkeypatch.setattr(inspect, "cleandoc", lambda given: cleaned.append(len(given)) or given)
    with pytest.raises(ParseError, match=rf"{len(text)} .*{MAX_CHARACTERS}"):
        parse(text)
    assert cleaned == []


@pytest.mark.parametrize(("family", "number"), [("activations", 190), ("tiles", 400)])
def test_a_derivative_past_the_limits_is_refused_in_words_about_the_program(family: str, number: int) -> None:
    """Of the user's text, not of one that nobody wrote."""
    graph = graph_of(SOUND[family](number))
    with pytest.raises(DerivationError, match=rf"\d+ .*\d+ .*{MAX_NODES} .*{MAX_CHARACTERS}") as caught:
        derive(graph)
    assert caught.value.text == graph.text


def test_a_derivation_tries_no_way_for_each_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile to save is found in one pass, however far from the outputs it lies."""
    from epigen.ir import derive as module

    counted: list[int] = []
    cut = module._cut
    monkeypatch.setattr(module, "_cut", lambda *given: counted.append(1) or cut(*given))
    for n in (5, 50):
        derive(graph_of(chained("tanh({0})")(n)), save="preactivation")
    assert len(counted) <= 2 * 5


def test_the_parts_of_a_program_are_those_that_the_parser_counts() -> None:
    for form in ("mm", "-1", "mm ** 2", "relu(-mm + 1)", "cast(mm, fp16)", "leaky_relu(mm, slope=-0.5)", "s[m]", "sum(mm, m)", "~(mm > 0) & mask"):
        one = parts(parse(form))
        most = MAX_NODES // one
        accepted = parse(", ".join([form] * most + ["mm"] * (MAX_NODES - most * one)))
        assert parts(accepted) == parts(parse(to_text(accepted))) == MAX_NODES
        with pytest.raises(ParseError, match="parts"):
            parse(", ".join([form] * most + ["mm"] * (MAX_NODES - most * one + 1)))


def test_a_refusal_names_as_many_places_as_there_are() -> None:
    with pytest.raises(EpigenError) as caught:
        autodiff.differentiate(graph_of(SOUND["what has no derivative"](30)), [f"out{i}" for i in range(30)], ["mm"])
    assert isinstance(caught.value, DerivationError)
    assert len({d.span for d in caught.value.diagnostics}) == 30
