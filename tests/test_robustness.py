"""Damaged and random programs through the whole front end: an answer or an EpigenError, soon, and nothing is ever executed."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest
from counting import Counted, calls
from programs import NASTY, damage, write_program

from epigen import dtypes, settings
from epigen.codegen import schedules
from epigen.codegen.lower import lower
from epigen.codegen.render import Renderer
from epigen.codegen.spec import KernelConfig, Signature
from epigen.dtypes import DType
from epigen.errors import CallError, EpigenError
from epigen.ir.check import check
from epigen.ir.passes import normalise
from epigen.lang.parser import parse

PROGRAMS = 8_000  # always the same ones; bench.fuzz has more
PARTS = 2
MOST_CALLS = 500_000
"""Of Python functions, for a text: about half a second, most of it Jinja's, which compiles the templates for the first one."""

CONFIGS = (
    schedules.config("tiled", block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3),
    schedules.config("library", block_m=8, block_n=128, num_warps=4),
)
SIGNATURES = (*((t, t) for t in dtypes.OPERANDS), (dtypes.FP8E4M3, dtypes.FP8E5M2))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(settings.templates_dir())


def source_of(renderer: Renderer, text: str, config: KernelConfig, operands: tuple[DType, DType], random: random.Random) -> str:
    graph = normalise(check(parse(text)))
    inputs = tuple((n.name, None if not n.indices and random.random() < 0.5 else random.choice(dtypes.OPERANDS)) for n in graph.inputs())
    return renderer.render(lower(graph, Signature(*operands, inputs, k_multiple=random.choice((1, 64)), index_bits=random.choice((32, 64)))), config).text


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_any_text_gives_a_kernel_or_an_error(part: int, renderer: Renderer) -> None:
    source = random.Random(part)
    accepted = refused = 0
    most = 0
    text = ""
    for number in range(PROGRAMS // PARTS):
        # one sound program, then seven damaged ones, two of them damaged further
        sound = number % 8 == 0
        if sound:
            text = whole = write_program(source, tame=number % 16 == 0)
        else:
            text = damage(source, text if number % 8 in (3, 6) else whole)
        counted = Counted()
        try:
            with counted:
                generated = source_of(renderer, text, source.choice(CONFIGS), source.choice(SIGNATURES), source)
        except EpigenError as error:
            if sound:
                error.add_note(f"a sound program: {text!r}")
                raise
            refused += bool(str(error))
        except BaseException as error:
            error.add_note(f"program: {text!r}")
            raise
        else:
            accepted += 1
            try:
                compile(generated, "<kernel>", "exec")
            except SyntaxError as error:
                error.add_note(f"program: {text!r}\n{generated}")
                raise
        most = max(most, counted.calls)
    assert accepted > PROGRAMS // PARTS // 7  # sound ones are an eighth
    assert accepted + refused == PROGRAMS // PARTS
    assert most < MOST_CALLS


def assert_message(message: str) -> None:
    first, _, rest = message.partition("\n")
    assert re.match(r"(Parse|Check)Error: ['\w]", first)
    assert rest.startswith("  ")


@pytest.mark.parametrize("piece", NASTY)
@pytest.mark.parametrize(
    "frame",
    [
        "{}",
        "mm + {}",
        "relu({})",
        "{} = mm; mm",
        "z = {}; z + mm",
        "mm, {}",
        "gate[{}] + mm",
        "cast(mm, {})",
        "mm ** {}",
        "sum(mm, {})",
        "leaky_relu(mm, slope={})",
        "bits({})",
    ],
)
def test_nasty_pieces_in_every_place(frame: str, piece: str, renderer: Renderer) -> None:
    text = frame.replace("{}", piece)
    try:
        generated = source_of(renderer, text, CONFIGS[0], SIGNATURES[1], random.Random(0))
    except EpigenError as error:
        assert_message(str(error))
    else:
        assert compile(generated, "<kernel>", "exec").co_names[0] == "triton"


class _Watch:
    """Collects the audit events that running a program's text would cause. Hooks cannot be removed: this one can be turned off."""

    events = frozenset({"exec", "import", "os.system", "subprocess.Popen", "open", "socket.connect", "ctypes.dlopen"})

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if self.seen is not None and event in self.events:
            self.seen.append(f"{event} {args}")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch stolen')", "mm + __import__('os').getpid()", "exec(\"open('stolen', 'w')\")", "open('stolen', 'w')", "print(mm)", "[open('stolen', 'w') for _ in mm]",
        "(lambda: open('stolen', 'w'))()", "f\"{open('stolen', 'w')}\"", "x = open; x('stolen', 'w')", "import stolen", "mm + breakpoint()", "mm ** exit()", "mm if exit() else mm", "9 ** 9 ** 9 ** 9", "mm + 'a' * 10 ** 10",
        "@exit\ndef f(): pass", "class A(exit()): pass", "mm[exit()]", "relu(mm, x=exit())", "cast(mm, exit())", "assert exit()", "{{ 7 * 7 }}", "mm  # {% include 'module.py.j2' %}", "mm  # {{ 1 / 0 }}",
    ],
)  # fmt: skip
def test_nothing_in_a_text_is_executed(text: str, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source_of(renderer, "mm + 1", CONFIGS[0], SIGNATURES[1], random.Random(0))  # the templates themselves are compiled once
    watch = _Watch()
    watch.seen = []
    try:
        generated = source_of(renderer, text, CONFIGS[0], SIGNATURES[1], random.Random(0))
    except EpigenError:
        generated = ""
    seen, watch.seen = watch.seen, None
    assert seen == []
    assert "{%" not in generated
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "z = mm; " + "".join(f"z{i} = z{i - 1} + z{i - 1}; " if i else "z0 = z + z; " for i in range(300)) + "z299",
        ", ".join(f"mm + {i}" for i in range(400)),
        "relu(" * 99 + "mm" + ")" * 99,
        "; ".join(f"alhpa{i} = mm + alpah{i}" for i in range(300)) + "; mm",
        ",".join(f"reul{i}(mm)" for i in range(600)),
        "mm" + " + mm ** 8" * 90,
    ],
)
def test_large_programs_take_no_more_work_than_they_should(text: str, renderer: Renderer) -> None:
    def work() -> None:
        try:
            generated = source_of(renderer, text, CONFIGS[0], SIGNATURES[1], random.Random(0))
        except EpigenError as error:
            generated = str(error)
        assert generated

    assert calls(work) < MOST_CALLS


@pytest.mark.parametrize(("a", "b"), [(dtypes.FP16, dtypes.BF16), (dtypes.INT8, dtypes.FP8E4M3), (dtypes.INT32, dtypes.INT32), (dtypes.UINT8, dtypes.UINT8)])
def test_operands_that_cannot_be_multiplied_are_refused(a: DType, b: DType) -> None:
    with pytest.raises(CallError, match="operand a is"):
        lower(normalise(check(parse("mm"))), Signature(a, b))
