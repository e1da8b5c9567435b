"""Text -> untyped program: every form of statement and expression, the printer's inverse, and hostile text."""

from __future__ import annotations

import random

import pytest
from counting import calls
from hypothesis import given
from hypothesis import strategies as st
from programs import programs, write_program

from epigen import ops
from epigen.errors import CheckError, ParseError, ProgramError, Span, caret_lines
from epigen.ir.check import check
from epigen.lang.parser import MAX_DEPTH, MAX_EXPONENT, MAX_NODES, parse
from epigen.lang.syntax import Assign, Call, Expr, Name, Number, Power, Program, to_text

S = Span(0, 0)


def _name(name: str, *indices: str) -> Name:
    return Name(name, S, indices or None)


def _infix(function: str, *args: Expr) -> Call:
    return Call(function, args, S, infix=True)


MM = _name("mm")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mm", MM),
        ("2", Number(2, S)),
        ("0x10", Number(16, S)),
        ("1_000.5", Number(1000.5, S)),
        ("-1.5", Number(-1.5, S)),
        ("--1.5", Number(1.5, S)),
        ("+mm", MM),
        ("(mm)", MM),
        ("gate[m,n]", _name("gate", "m", "n")),
        ("scale_b[ n ]", _name("scale_b", "n")),
        ("-mm", _infix("neg", MM)),
        ("~mm", _infix("not", MM)),
        ("mm ** 3", Power(MM, 3, S)),
        ("-mm ** 2", _infix("neg", Power(MM, 2, S))),
        ("relu(mm)", Call("relu", (MM,), S)),
        ("leaky_relu(mm, slope=2)", Call("leaky_relu", (MM,), S, (("slope", Number(2, S)),))),
        ("sum(a, k)", Call("sum", (_name("a"), _name("k")), S)),
        ("mm + bias * 2", _infix("add", MM, _infix("mul", _name("bias"), Number(2, S)))),
        ("mm - 1 - 2", _infix("sub", _infix("sub", MM, Number(1, S)), Number(2, S))),
        ("mm > 0 | 1", _infix("gt", MM, _infix("or", Number(0, S), Number(1, S)))),
    ],
)
def test_reads_each_form_of_expression(text: str, expected: Expr) -> None:
    assert parse(text).outputs == (expected,)


@pytest.mark.parametrize("symbol", list(ops.BINARY))
def test_reads_each_binary_operator(symbol: str) -> None:
    assert parse(f"mm {symbol} bias").outputs == (_infix(ops.BINARY[symbol], MM, _name("bias")),)


@pytest.mark.parametrize(
    "text",
    [
        "z = mm; z, mm",
        "z = mm\nz, mm",
        " z=mm ;\n\n z , mm",
        "z = mm; (z, mm)",
        "z = mm;\n# a remark\nz, mm  # and another",
        "z = mm\r\nz, mm\r\n",
        "\n    z = mm\n    z, mm\n",
    ],
)
def test_reads_statements_however_they_are_laid_out(text: str) -> None:
    assert parse(text) == Program((Assign("z", MM, S),), (_name("z"), MM), "")


def test_spans_point_into_the_cleaned_text() -> None:
    program = parse("\n    z = relu(mm + bias)\n    z, sum(z, m)\n")
    spans = [program.assigns[0].span, program.assigns[0].value.span, *(o.span for o in program.outputs)]
    assert [program.text[s.start : s.end] for s in spans] == ["z", "relu(mm + bias)", "z", "sum(z, m)"]


def test_zero_has_one_sign() -> None:
    # 0.0 == -0.0, so equal programs would otherwise differ in what they compute
    (value,) = parse("-0.0").outputs
    assert isinstance(value, Number)
    assert str(value.value) == "0.0"


@pytest.mark.parametrize("literal", ["0", "0.0", "0x0", "0e5", "00"])
def test_zero_in_each_spelling_is_accepted(literal: str) -> None:
    assert parse(literal).outputs == (Number(0, S),)


@pytest.mark.parametrize("text", ["mm * 1e39", "mm * 1e-60"])
def test_the_limit_that_a_message_names_is_accepted(text: str) -> None:
    with pytest.raises(ParseError, match=r"the (largest|smallest) is") as caught:
        parse(text)
    limit = caught.value.diagnostics[0].hint.split()[-1]
    assert parse(f"{limit}, -{limit}").outputs[0] == Number(float(limit), S)


# -- the printer

_IDENTIFIERS = st.sampled_from(["mm", "bias", "z", "gate", "alpha", "e", "x1"])
_NUMBERS = st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False).map(lambda v: Number(v + 0.0, S))
_LEAVES = _NUMBERS | st.builds(_name, _IDENTIFIERS) | st.builds(lambda n: _name(n, "m", "n"), _IDENTIFIERS)


def _forms(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    binary = st.builds(_infix, st.sampled_from(sorted(ops.BINARY.values())), inner, inner)
    # the parser reads a sign before a number as part of the number
    negated = inner.filter(lambda x: not isinstance(x, Number)).map(lambda x: _infix("neg", x))
    inverted = inner.map(lambda x: _infix("not", x))
    powers = st.builds(lambda x, n: Power(x, n, S), inner, st.integers(2, MAX_EXPONENT))
    calls = st.builds(
        lambda f, args, k: Call(f, tuple(args), S, tuple(k.items())),
        st.sampled_from(sorted(ops.FUNCTIONS)),
        st.lists(inner, max_size=3),
        st.dictionaries(_IDENTIFIERS, inner, max_size=2),
    )
    return binary | negated | inverted | powers | calls


_TREES = st.recursive(_LEAVES, _forms, max_leaves=12)


@given(st.lists(st.tuples(_IDENTIFIERS, _TREES), max_size=3), st.lists(_TREES, min_size=1, max_size=3))
def test_parse_after_print_is_the_identity(assigns: list[tuple[str, Expr]], outputs: list[Expr]) -> None:
    program = Program(tuple(Assign(n, v, S) for n, v in assigns), tuple(outputs), "")
    assert parse(to_text(program)) == program


@given(programs())
def test_print_is_canonical(text: str) -> None:
    program = parse(text)
    printed = to_text(program)
    assert parse(printed) == program
    assert to_text(parse(printed)) == printed


# -- mistakes: where the caret stands. The messages' wording is the golden files' business.


def _culprit(text: str) -> tuple[ProgramError, list[str | None]]:
    """The error and the piece of text under each of its carets."""
    with pytest.raises(ProgramError, match=r"Error: ") as caught:
        check(parse(text))
    error = caught.value
    for line in str(error).split("\n"):
        assert len(line) < 300
    return error, [None if d.span is None else error.text[d.span.start : d.span.end] for d in error.diagnostics]


@pytest.mark.parametrize(
    ("text", "culprit", "message"),
    [
        ("rleu(mm)", "rleu", "unknown operation 'rleu'"),
        ("mm + foo(1)", "foo", "unknown operation 'foo'"),
        ("mm.T", "mm.T", "attribute"),
        ("mm.T()", "mm.T", "attribute"),
        ("relu(mm)(mm)", "relu(mm)", "can be called"),
        ("lambda x: mm", "lambda x: mm", "lambda"),
        ("[mm for x in mm]", "[mm for x in mm]", "comprehension"),
        ("{mm for x in mm}", "{mm for x in mm}", "comprehension"),
        ("{1: mm for x in mm}", "{1: mm for x in mm}", "comprehension"),
        ("relu(mm for x in mm)", "(mm for x in mm)", "generator"),
        ("mm + 'x'", "'x'", "a string"),
        ("mm + b'x'", "b'x'", "byte string"),
        ("mm + f'{mm}'", "f'{mm}'", "f-string"),
        ("mm + 1j", "1j", "complex"),
        ("mm + True", "True", "True or False"),
        ("mm + None", "None", "None"),
        ("mm + ...", "...", "literal"),
        ("import os; mm", "import os", "import"),
        ("from os import path; mm", "from os import path", "import"),
        ("mm + __name__", "__name__", "underscores"),
        ("mm + x__y", "x__y", "underscores"),
        ("mm + _x", "_x", "underscore"),
        ("mm + " + "x" * 65, "x" * 65, "65 characters"),
        ("class = mm; mm", "class", "Python keyword"),
        ("mm + class", "class", "Python keyword"),
        ("mm * 1e999", "1e999", "too large"),
        ("mm * 1e39", "1e39", "too large"),
        ("mm * 0x" + "f" * 5000, "0x" + "f" * 5000, "too large"),
        ("mm * " + "9" * 5000, "9" * 5000, "too large"),
        ("z = mm;\nz + " + "9" * 5000, "9" * 5000, "too large"),
        ("mm * 1e-60", "1e-60", "too small"),
        ("mm * 1e-400", "1e-400", "too small"),
        ("mm * 0.000001e-999", "0.000001e-999", "too small"),
        ("mm\x00", "\x00", "U+0000"),
        ("m\u043c", "\u043c", "CYRILLIC"),
        ("m\uff4d + 1", "\uff4d", "FULLWIDTH"),
        ("mm\u200b", "\u200b", "ZERO WIDTH SPACE"),
        ("mm \u2212 1", "\u2212", "MINUS SIGN"),
        ("mm + \ud800", "\ud800", "U+D800"),
        ("0 < mm < 1", "0 < mm < 1", "chained comparison"),
        ("mm if mm > 0 else 0", "mm if mm > 0 else 0", "conditional"),
        ("where(mm > 0 and mm < 1, mm, 0)", "mm > 0 and mm < 1", "'and' or 'or'"),
        ("where(mm > 0 or mm < 1, mm, 0)", "mm > 0 or mm < 1", "'and' or 'or'"),
        ("where(not mm, mm, 0)", "not mm", "'not'"),
        ("(x := mm)", "x := mm", "':='"),
        ("relu(*mm)", "*mm", "argument"),
        ("relu(**mm)", "mm", "argument"),
        ("mm @ mm", "mm @ mm", "'@'"),
        ("mm % 2", "mm % 2", "'%'"),
        ("mm // 2", "mm // 2", "'//'"),
        ("mm ^ 2", "mm ^ 2", "'^'"),
        ("mm << 2", "mm << 2", "'<<'"),
        ("mm >> 2", "mm >> 2", "'>>'"),
        ("mm is mm", "mm is mm", "'is'"),
        ("mm in mm", "mm in mm", "'in'"),
        ("{1: mm}", "{1: mm}", "dict"),
        ("{mm}", "{mm}", "a set"),
        ("[mm, mm]", "[mm, mm]", "a list"),
        ("relu((mm, mm))", "(mm, mm)", "tuple"),
        ("x = mm, mm; x", "mm, mm", "tuple"),
        ("x += mm; x", "x += mm", "update"),
        ("x: int = mm; x", "x: int = mm", "annotated"),
        ("del mm; mm", "del mm", "'del'"),
        ("if mm: mm", "if mm: mm", "Python"),
        ("pass; mm", "pass", "Python"),
        ("def f(): pass\nmm", "def f(): pass", "function definition"),
        ("class A: pass\nmm", "class A: pass", "class definition"),
        ("x, y = mm; x", "mm", "parts of one value"),
        ("x, y, z = mm; x", "x, y, z", "plain name"),
        ("x = y = mm; x", "y", "plain name"),
        ("x[0] = mm; mm", "x[0]", "plain name"),
        ("mm; mm", "mm", "no effect"),
        ("z = mm", "z = mm", "no output"),
        ("()", "()", "no output"),
        ("relu(mm)[m,n]", "relu(mm)", "bare name"),
        ("gate[0] + mm", "0", "m, n or k"),
        ("gate[m:n] + mm", "m:n", "m, n or k"),
        ("gate[()] + mm", "()", "m, n or k"),
        ("gate[m,m] + mm", "m,m", "twice"),
        ("mm ** 0.5", "0.5", "small integer"),
        ("mm ** 9", "9", "integer from 2"),
        ("mm ** True", "True", "integer from 2"),
        ("mm ** mm", "mm", "integer from 2"),
        ("relu(mm", "(", "never closed"),
        ("relu(mm))", ")", "unmatched"),
        ("relu(mm]", "]", "match"),
        ("mm mm", "mm", "invalid syntax"),
        ("mm + 'a", "'", "unterminated"),
        ("mm ? 1", "?", "invalid syntax"),
    ],
)
def test_a_mistake_in_the_text_is_marked(text: str, culprit: str, message: str) -> None:
    error, marked = _culprit(text)
    assert isinstance(error, ParseError)
    assert marked[0] == culprit
    assert message in error.diagnostics[0].message


@pytest.mark.parametrize(
    ("text", "culprit", "message"),
    [
        ("relu(mm, mm)", "relu(mm, mm)", "got 2"),
        ("relu()", "relu()", "got 0"),
        ("leaky_relu(mm)", "leaky_relu(mm)", "got 1"),
        ("leaky_relu(mm, x=mm)", "leaky_relu(mm, x=mm)", "twice"),
        ("leaky_relu(mm, slop=1)", "leaky_relu(mm, slop=1)", "'slop'"),
        ("gate[m,n]", "gate[m,n]", "mm"),
        ("gate[m,n] + gate[n] + mm", "gate[n]", "'gate' is [m, n]"),
        ("mm - max(mm, n)", "mm - max(mm, n)", "[m]"),
        ("relu(mm > 0)", "mm > 0", "be a number"),
        ("(mm > 0) + 1", "mm > 0", "be a number"),
        ("where(mm, 1, 0)", "mm", "be a boolean"),
        ("bitmask(mm)", "mm", "be a boolean"),
        ("bitmask(~mm)", "mm", "be a boolean"),
        ("mm + tl", "tl", "Triton"),
        ("mm + tl[n]", "tl[n]", "Triton"),
        ("mm + print", "print", "Python name"),
        ("g = mm + gate[m,n]; gate = relu(g); gate", "gate", "input"),
        ("gate = mm; gate + gate[m,n]", "gate[m,n]", "no indices"),
        ("z = mm; z = relu(mm); z", "z", "bound twice"),
        ("z = mm; mm", "z", "never used"),
        ("mm > 0", "mm > 0", "boolean"),
        ("mm, bias", "bias", "found [n]"),
    ],
)
def test_a_mistake_of_meaning_is_marked(text: str, culprit: str, message: str) -> None:
    error, marked = _culprit(text)
    assert isinstance(error, CheckError)
    assert marked == [culprit]
    assert message in error.diagnostics[0].message


@pytest.mark.parametrize("text", ["", " ", "\n \t\n", "\x0c", "# a remark only"])
def test_text_without_a_program_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match=r"empty|statement"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 9000 + "mm" + ")" * 9000, f"{MAX_DEPTH} deep"),
        ("(" * 10_000 + "mm" + ")" * 10_000, "20000"),
        ("relu(" * 3000 + "mm" + ")" * 3000, f"{MAX_DEPTH} deep"),
        ("relu(" * 101 + "mm" + ")" * 101, f"{MAX_DEPTH} deep"),
        ("-" * 5000 + "mm", f"{MAX_DEPTH} deep"),
        ("~" * 5000 + "mm", f"{MAX_DEPTH} deep"),
        ("+" * 5000 + "mm", f"{MAX_DEPTH} deep"),
        ("+".join("1" * 9000), f"{MAX_NODES} parts"),
        ("+".join("1" * 150), f"{MAX_DEPTH} deep"),
        ("mm" + "+mm" * 9000, "20000"),
        ("mm" + "**2" * 500, "power"),
        ("mm" + ".T" * 5000, f"{MAX_NODES} parts"),
        ("mm" + "[m]" * 3000, f"{MAX_NODES} parts"),
        ("mm" + "()" * 3000, f"{MAX_NODES} parts"),
        ("mm, " * 4000 + "mm", f"{MAX_NODES} parts"),
        ("z = 1; " * 2500 + "mm", f"{MAX_NODES} parts"),
        ("mm + " * 200_000 + "mm", "20000"),
        ("mm\x00" * 300_000, "20000"),
        ("(" * 19_000, "nested|closed"),
        ("lambda:" * 2800 + "mm", f"{MAX_NODES} parts"),
        ("not " * 4900 + "mm", f"{MAX_NODES} parts"),
    ],
    ids=range(21),
)
def test_excess_is_refused_before_much_is_done(text: str, message: str) -> None:
    def refused() -> None:
        with pytest.raises(ParseError, match=message) as caught:
            parse(text)
        assert len(str(caught.value)) < 2000

    assert calls(refused) < 50_000  # without the limits some take minutes


def test_what_is_just_within_the_limits_is_accepted() -> None:
    assert check(parse("relu(" * MAX_DEPTH + "mm" + ")" * MAX_DEPTH)).outputs[0].name == "out"
    assert len(parse(", ".join(["mm"] * MAX_NODES)).outputs) == MAX_NODES
    # signs of exponents and points of numbers are no operators
    assert len(parse(", ".join(["1.5e-3", "-2.e+4"] * (MAX_NODES // 3))).outputs) == MAX_NODES // 3 * 2
    assert parse("-" * MAX_DEPTH + "mm").outputs


def test_all_mistakes_of_a_text_are_reported_together() -> None:
    _, marked = _culprit("rleu(mm)\nx = mm.T\ny = [mm]\n'a' + 1, foo(2), mm ** 9, bar(baz(1))")
    assert marked == ["rleu(mm)", "mm.T", "[mm]", "'a'", "foo", "9", "bar", "baz"]


def test_all_mistakes_of_meaning_are_reported_together() -> None:
    _, marked = _culprit("x = relu(mm > 0); y = where(mm, 1, 0); z = exp(mm, 1); relu(x), y, z, bias, tl + mm")
    assert marked == ["mm > 0", "mm", "exp(mm, 1)", "bias", "tl"]


@pytest.mark.parametrize(
    "text",
    [
        "tl = mm; relu(tl), tl",
        "mask = mm; mask, relu(mask)",
        "bias = mm; bias + bias[n]",
        "g = mm + gate[n]; gate = g; gate",
        "bits(print) | bits(print)",
        "mm = 1; mm",
        "tl[n] + tl[n] + tl",
    ],
)
def test_a_refused_name_is_reported_once(text: str) -> None:
    error, marked = _culprit(text)
    assert len(marked) == 1, str(error)


def test_carets_of_a_long_line_stay_in_sight() -> None:
    text = " + ".join(["mm"] * 60) + " + rleu(mm) + " + " + ".join(["mm"] * 30)
    error, marked = _culprit(text)
    shown, carets = str(error).split("\n")[1:3]
    assert marked == ["rleu"]
    assert shown[carets.index("^") : carets.index("^") + 4] == "rleu"
    assert carets.count("^") == 4


@given(st.text(alphabet="mn \n\t\x00", max_size=300), st.integers(0, 400), st.integers(0, 400))
def test_caret_lines_are_two_printable_lines(text: str, start: int, length: int) -> None:
    shown, carets = caret_lines(text, Span(start, start + length))
    assert shown.isprintable()
    assert set(carets) == {" ", "^"}
    assert len(carets) <= 100


@given(st.text(max_size=60))
def test_any_text_parses_or_is_a_parse_error(text: str) -> None:
    try:
        outputs = parse(text).outputs
    except ParseError as error:
        outputs = error.diagnostics
    assert outputs


def test_the_seeded_generator_repeats_itself() -> None:
    assert [write_program(random.Random(7)) for _ in range(2)] == [write_program(random.Random(7))] * 2


def test_random_programs_are_well_typed() -> None:
    for seed in range(300):
        graph = check(parse(write_program(random.Random(seed), tame=seed % 2 == 0, operands=seed % 3 == 0)))
        assert any(node.op == "dot" for node in graph.nodes)
