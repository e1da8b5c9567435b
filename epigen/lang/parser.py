"""First stage: text -> untyped Program, on Python's own expression grammar (`ast.parse`; nothing is ever evaluated).

Everything that is Python and not epigen is refused here, with its place; all such mistakes of a text are reported together.
Mistakes of meaning (names, kinds, indices) belong to the checker.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import math
import re
import sys
import unicodedata
import warnings
from collections.abc import Generator, Iterable
from typing import NoReturn

from epigen import ops
from epigen.dtypes import FP32, FP32_TINY
from epigen.errors import Diagnostic, ParseError, Span, near_miss
from epigen.lang.quantised import mistake, quantised
from epigen.lang.syntax import WAYS, Assign, Call, Expr, Name, Number, Parted, Power, Program
from epigen.lang.walk import walk

MAX_CHARACTERS = 20_000
MAX_DEPTH = 100
MAX_NODES = 2_000
MAX_EXPONENT = 8
MOST_BLOCK = 1 << 20
"""Of an index's values, that share one of an input's."""

_WORD = re.compile(r"[A-Za-z_]\w*")
# what Python's parser recurses for; remarks and numbers, which begin the first line, are none
_OPERATOR = re.compile(
    r"#.*|\b\d[\w.]*(?:(?<=[eE])[-+]\d+)?"
    r"|\*\*|//|[<>=!]=|<<|>>|[-+~*/%@&|^<>]|\.|[)\]]\s*[(\[]|\b(?:lambda|not|if|await)\b"
)
_PERIOD = re.compile(r"(?![MNK]$)[A-Z][A-Z0-9]*")
_PREFIXES = re.compile(rf"(?:[-+~]\s*){{{MAX_DEPTH + 2}}}")
_LONG_NUMBER = re.compile(r"[\d_]{1000,}")
_TOO_LARGE, _LARGEST = "a number is too large for fp32", f"the largest is {FP32.largest!r}"

_BINARY = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&", ast.BitOr: "|",
    ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip

_GIVEN = (Name("a", Span(0, 0)), Name("b", Span(0, 0)))
"""The operands of the product that mm is."""

# what to write instead of a piece of Python that is not in the language
_INSTEAD: dict[type[ast.AST], tuple[str, str]] = {
    ast.Attribute: ("an attribute access", "names have no parts: write the bare name"),
    ast.Lambda: ("a lambda", "bind a name with 'name = expression;' instead"),
    ast.ListComp: ("a comprehension", "operations apply to whole tiles: no loop is needed"),
    ast.SetComp: ("a comprehension", "operations apply to whole tiles: no loop is needed"),
    ast.DictComp: ("a comprehension", "operations apply to whole tiles: no loop is needed"),
    ast.GeneratorExp: ("a generator", "operations apply to whole tiles: no loop is needed"),
    ast.JoinedStr: ("an f-string", "the language has numbers and names only"),
    ast.IfExp: ("a conditional expression", "write where(condition, x, y)"),
    ast.BoolOp: ("'and' or 'or'", "join booleans with & or |, each side in parentheses"),
    ast.NamedExpr: ("':='", "bind a name with 'name = expression;' instead"),
    ast.Starred: ("'*' before an argument", "write the arguments out"),
    ast.Dict: ("a dict", "the language has numbers and names only"),
    ast.List: ("a list", "several outputs are separated by commas, without brackets"),
    ast.Set: ("a set", "several outputs are separated by commas, without braces"),
    ast.Tuple: ("a tuple inside an expression", "only the last statement may list several outputs"),
    ast.Await: ("'await'", "the language has no such thing"),
    ast.Import: ("an import", "every operation is built in: see 'epigen ops'"),
    ast.ImportFrom: ("an import", "every operation is built in: see 'epigen ops'"),
    ast.AugAssign: ("an update", "each name is bound once: write 'name = expression'"),
    ast.AnnAssign: ("an annotated name", "write 'name = expression'"),
    ast.FunctionDef: ("a function definition", "bind names with 'name = expression;'"),
    ast.ClassDef: ("a class definition", "bind names with 'name = expression;'"),
    ast.Delete: ("'del'", "a program only binds names and lists outputs"),
    ast.MatMult: ("'@'", "the product is already there, as mm, or dot(a, b)"),
    ast.Mod: ("'%'", "the language has + - * / and small integer powers"),
    ast.FloorDiv: ("'//'", "the language has + - * / and small integer powers"),
    ast.BitXor: ("'^'", "a power is written x ** 2; booleans that differ are (p & ~q) | (q & ~p)"),
    ast.LShift: ("'<<'", "the language has + - * / and small integer powers"),
    ast.RShift: ("'>>'", "the language has + - * / and small integer powers"),
}  # fmt: skip


def parse(text: str) -> Program:
    """Parse a program.

    text: statements separated by ';' or newlines: assignments, then one expression or tuple, the outputs.
    Raises ParseError with every mistake found, each with its place.
    """
    _refuse_length(text)
    text = inspect.cleandoc(text.replace("\r\n", "\n")).strip()
    _refuse_text(text)
    _refuse_operators(text)
    try:
        with warnings.catch_warnings():
            # Python warns of text such as `1 is 1` or `0x1for`; what it means here is decided below
            warnings.simplefilter("ignore")
            body = ast.parse(text, mode="exec").body
    except SyntaxError as error:
        raise _syntax_error(text, error) from None
    except MemoryError:  # of the parser's own limit
        raise ParseError(text, [_too_deep(Span(0, 1))]) from None
    except RecursionError:
        raise _no_room(text) from None
    except ValueError as error:  # an integer literal past Python's digit limit
        raise ParseError(text, [Diagnostic(f"the text cannot be read: {error}", Span(0, len(text)))]) from None
    return _Reader(text).program(body)


def _refuse_length(text: str) -> None:
    """Before anything else is done with a text: all of that takes longer than this."""
    if len(text) > MAX_CHARACTERS:
        message = f"the program has {len(text)} characters, and the limit is {MAX_CHARACTERS}"
        raise ParseError(text, [Diagnostic(message, None, "an epilogue is a few lines: bind repeated parts to names")])


def _too_deep(span: Span) -> Diagnostic:
    return Diagnostic(f"nested more than {MAX_DEPTH} deep", span, "bind inner parts to names: 'z = ...; relu(z)'")


def _too_many(span: Span) -> Diagnostic:
    return Diagnostic(f"the program has more than {MAX_NODES} parts", span, "an epilogue is a few lines: bind repeated parts to names")


def _no_room(text: str) -> ParseError:
    message = f"the program cannot be read within what is left of Python's recursion limit of {sys.getrecursionlimit()}"
    return ParseError(text, [Diagnostic(message, None, "call epigen less deep inside other calls, or raise sys.setrecursionlimit")])


def _refuse_text(text: str) -> None:
    """Refuse what `ast.parse` should not see: nothing, too much, NUL bytes and letters that only look like ASCII."""
    if not text:
        raise ParseError(text, [Diagnostic("the program is empty", None, 'write an epilogue, for example "relu(mm + bias)"')])
    mistakes: list[Diagnostic] = []
    for at, char in enumerate(text):
        if char == "\n" or " " <= char <= "~":
            continue
        plain = unicodedata.normalize("NFKC", char)
        shown = f"U+{ord(char):04X} {unicodedata.name(char, 'control character')}"
        hint = f"write {plain!r}" if plain.isascii() and plain.isprintable() and plain != char else "use plain ASCII letters"
        mistakes.append(Diagnostic(f"the character {shown} is not part of the language", Span(at, at + 1), hint))
        if len(mistakes) == 3:
            break
    if mistakes:
        raise ParseError(text, mistakes)


def _refuse_operators(text: str) -> None:
    """Refuse what `ast.parse` might recurse for too deeply: a thread's stack may be small, and it does not look. Every operator is a part."""
    if run := _PREFIXES.search(text):
        raise ParseError(text, [_too_deep(Span(run.start(), run.start() + 1))])
    operators = [operator for operator in _OPERATOR.finditer(text) if operator[0][0] not in "#0123456789"]
    if len(operators) > MAX_NODES:
        raise ParseError(text, [_too_many(Span(*operators[MAX_NODES].span()))])


def _syntax_error(text: str, error: SyntaxError) -> ParseError:
    lines = text.split("\n")
    row = min((error.lineno or 1) - 1, len(lines) - 1)
    start = sum(len(line) + 1 for line in lines[:row]) + max(0, (error.offset or 1) - 1)
    message = error.msg or "invalid syntax"
    if "too many nested parentheses" in message or "recursion" in message:
        return ParseError(text, [_too_deep(Span(start, start + 1))])
    if "Exceeds the limit" in message and (digits := _LONG_NUMBER.search(text)):  # Python names no column
        return ParseError(text, [Diagnostic(_TOO_LARGE, Span(*digits.span()), _LARGEST)])
    word = _WORD.match(text, start)
    if not word and message == "invalid syntax":  # in `class = mm` Python points at what follows the keyword
        word = next((w for w in _WORD.finditer(text, 0, start) if keyword.iskeyword(w[0]) and not text[w.end() : start].strip()), None)
        start = word.start() if word else start
    hint = ""
    if word and keyword.iskeyword(word[0]):
        message, hint = f"'{word[0]}' is a Python keyword", "choose another name"
    end = word.end() if word else start + 1
    return ParseError(text, [Diagnostic(f"invalid syntax: {message}" if message != "invalid syntax" else message, Span(start, end), hint)])


_Placed = tuple[ast.expr, int]
"""An expression and its depth."""
_Reading = Generator[_Placed, Expr, Expr]


class _Refused(Exception):
    """Leaves one expression after its mistake has been noted; the other statements are still read."""


class _Reader:
    """Turns Python's tree into epigen's, noting every mistake."""

    def __init__(self, text: str):
        self.text = text
        self.mistakes: list[Diagnostic] = []
        self.nodes = 0
        self.line_starts = [0]
        for line in text.split("\n"):
            self.line_starts.append(self.line_starts[-1] + len(line) + 1)

    def program(self, body: list[ast.stmt]) -> Program:
        assigns: list[Assign | Parted] = []
        outputs: tuple[Expr, ...] = ()
        if not body:
            self.mistakes.append(Diagnostic("the program has no statement", None, 'write an epilogue, for example "relu(mm + bias)"'))
        for position, statement in enumerate(body):
            last = position == len(body) - 1
            try:
                match statement:
                    case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
                        assigns.append(Assign(self.identifier(name, target), walk(self.expr, self.expr((value, 0))), self.span(target)))
                        if last:
                            self.note(f"the program ends with the assignment of '{name}', and has no output", statement, f"end with the outputs: '...; {name}'")
                    case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=x) as first, ast.Name(id=y) as second])], value=value):
                        call = walk(self.expr, self.expr((value, 0)))
                        if isinstance(call, Call) and call.function == "quantize":
                            if wrong := mistake(call):
                                self.refuse(wrong, value, f"write {x}, {y} = quantize(mm, fp8e4m3, n/128)")
                            both = (Assign(self.identifier(x, first), call, self.span(first)), Assign(self.identifier(y, second), call, self.span(second)))
                            assigns += quantised(both, call, self.text)
                            continue
                        if not (isinstance(call, Call) and call.function in WAYS and len(call.args) == 1 and not call.keywords):
                            self.refuse(
                                "two names at once are bound to the parts of one value", value, f"write {x}, {y} = {' or '.join(f'{way}(mm)' for way in WAYS)}"
                            )
                        names = self.identifier(x, first), self.identifier(y, second)
                        assigns.append(Parted(names, call.function, call.args[0], (self.span(first), self.span(second))))
                        if last:
                            self.note(
                                f"the program ends with the assignment of '{x}' and '{y}', and has no output",
                                statement,
                                f"end with the outputs: '...; {x} * {y}'",
                            )
                    case ast.Assign(targets=targets):
                        self.refuse("an assignment binds one plain name", targets[-1], "write one 'name = expression' a statement")
                    case ast.Expr(value=value):
                        if not last:
                            self.refuse(
                                "an expression before the last statement has no effect", value, "bind it to a name, or list it among the outputs at the end"
                            )
                        parts = value.elts if isinstance(value, ast.Tuple) else [value]
                        if not parts:
                            self.refuse("the program lists no output", value, "end with an expression")
                        outputs = walk(self.expr, self.each(parts, 0))
                    case _:
                        self.refuse_python(statement)
            except _Refused:
                continue
        if self.mistakes:
            raise ParseError(self.text, self.mistakes)
        return Program(tuple(assigns), outputs, self.text)

    def each(self, nodes: Iterable[ast.expr], depth: int) -> Generator[_Placed, Expr, tuple[Expr, ...]]:
        """Every expression, so that a mistake in one does not hide those in its siblings."""
        read: list[Expr] = []
        refused = False
        for node in nodes:
            try:
                read.append((yield node, depth))
            except _Refused:
                refused = True
        if refused:
            raise _Refused
        return tuple(read)

    def expr(self, placed: _Placed) -> _Reading:
        node, depth = placed
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise ParseError(self.text, [*self.mistakes, _too_deep(self.span(node))])
        if self.nodes > MAX_NODES:
            raise ParseError(self.text, [*self.mistakes, _too_many(self.span(node))])
        match node:
            case ast.Constant(value=value):
                return self.number(value, node)
            case ast.Name(id="inf"):
                return Number(math.inf, self.span(node))
            case ast.Name(id=name):
                return Name(self.identifier(name, node), self.span(node))
            case ast.Subscript(value=ast.Name(id=name) as base, slice=index):
                return Name(self.identifier(name, base), self.span(node), *self.indices(index))
            case ast.Subscript(value=base):
                self.refuse("only a bare name takes indices", base, "bind the expression to a name: no indices are needed there")
            case ast.Call():
                return (yield from self.call(node, depth))
            case ast.UnaryOp(op=ast.USub(), operand=x):
                inner = yield x, depth + 1
                return Number(0.0 - inner.value, self.span(node)) if isinstance(inner, Number) else Call("neg", (inner,), self.span(node), infix=True)
            case ast.UnaryOp(op=ast.UAdd(), operand=x):
                return (yield x, depth + 1)
            case ast.UnaryOp(op=ast.Invert(), operand=x):
                return Call("not", ((yield x, depth + 1),), self.span(node), infix=True)
            case ast.UnaryOp(op=ast.Not()):
                self.refuse("'not' is not in the language", node, "write ~(condition)")
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
                return (yield from self.power(base, exponent, node, depth))
            case ast.BinOp(left=x, op=op, right=y) if type(op) in _BINARY:
                return Call(ops.BINARY[_BINARY[type(op)]], (yield from self.each((x, y), depth + 1)), self.span(node), infix=True)
            case ast.BinOp(op=op):
                what, instead = _INSTEAD[type(op)]
                self.refuse(f"{what} is not in the language", node, instead)
            case ast.Compare(left=x, ops=[op], comparators=[y]) if type(op) in _BINARY:
                return Call(ops.BINARY[_BINARY[type(op)]], (yield from self.each((x, y), depth + 1)), self.span(node), infix=True)
            case ast.Compare(ops=[_]):
                self.refuse("'is' and 'in' are not in the language", node, "compare with > >= < <= == !=")
            case ast.Compare():
                self.refuse("a chained comparison is not in the language", node, "write (0 < x) & (x < 1)")
            case _:
                self.refuse_python(node)
        raise AssertionError(node)

    def call(self, node: ast.Call, depth: int) -> _Reading:
        if not isinstance(node.func, ast.Name):
            if isinstance(node.func, ast.Attribute):
                self.refuse_python(node.func)
            self.refuse("only an operation's name can be called", node.func, "see 'epigen ops' for the operations")
        function = node.func.id
        if function not in ops.FUNCTIONS:
            hint = near_miss(function, ops.FUNCTIONS) or "see 'epigen ops' for the operations"
            self.note(f"unknown operation '{function}'", node.func, hint)
        for k in node.keywords:
            if k.arg is None:
                self.refuse("'**' before an argument is not in the language", k.value, "write the arguments out")
        args = yield from self.each([*node.args, *(k.value for k in node.keywords)], depth + 1)
        keywords = tuple((k.arg or "", v) for k, v in zip(node.keywords, args[len(node.args) :], strict=True))
        if function not in ops.FUNCTIONS:
            raise _Refused
        if function == "dot" and args == _GIVEN and not keywords:
            return Name("mm", self.span(node))
        return Call(function, args[: len(node.args)], self.span(node), keywords)

    def power(self, base: ast.expr, exponent: ast.expr, node: ast.expr, depth: int) -> _Reading:
        match exponent:
            case ast.Constant(value=int(n)) if not isinstance(n, bool) and 2 <= n <= MAX_EXPONENT:
                return Power((yield base, depth + 1), n, self.span(node))
            case ast.Constant(value=0.5):
                self.refuse("a power takes a small integer", exponent, "write sqrt(x)")
        return self.refuse(
            f"a power takes an integer from 2 to {MAX_EXPONENT}", exponent, "write exp(p * log(x)) for other powers of a positive x, 1 / x for the inverse"
        )

    def number(self, value: object, node: ast.expr) -> Number:
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = {str: "a string", bytes: "a byte string", bool: "True or False", type(None): "None", complex: "a complex number"}
            self.refuse(f"{kind.get(type(value), 'this literal')} is not in the language", node, "the language has numbers and names only")
        if abs(value) > FP32.largest:
            self.refuse(_TOO_LARGE, node, _LARGEST)
        span = self.span(node)
        # Python itself reads 1e-400 as 0
        written = value or any(c in "123456789" for c in self.text[span.start : span.end].lower().partition("e")[0])
        if written and abs(value) < FP32_TINY:
            self.refuse("a number is too small for fp32", node, f"write 0: the smallest is {1.17549436e-38}")
        return Number(float(value), span)

    def indices(self, index: ast.expr) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
        """An input's indices, and their periods and blocks, if any has one."""
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        periods, blocks = ["" for _ in parts], [1 for _ in parts]
        for place, part in enumerate(parts):
            match part:
                case ast.BinOp(left=ast.Name(id="m" | "n") as whole, op=ast.Mod(), right=period):
                    parts[place], periods[place] = whole, self.period(whole.id, period)
                case ast.BinOp(left=ast.Name(id="m" | "n" | "k") as whole, op=ast.Div() | ast.FloorDiv(), right=size):
                    parts[place], blocks[place] = whole, self.block(whole.id, part, size)
        names = [p.id if isinstance(p, ast.Name) else None for p in parts]
        if not names or any(n not in ("m", "n", "k") for n in names):
            self.refuse("indices are m, n or k", index, "declare a tile as name[m,n], one value a column as name[n], one a row as name[m]")
        if len(set(names)) != len(names):
            self.refuse("an index stands twice", index, "a tile is name[m,n]")
        return tuple(n for n in names if n), tuple(periods) if any(periods) else (), tuple(blocks) if max(blocks) > 1 else ()

    def block(self, index: str, whole: ast.BinOp, size: ast.expr) -> int:
        example = f"write {index}/128 for one value for each 128 of {index}"
        if isinstance(whole.op, ast.FloorDiv):
            self.refuse("blocks of an index are written with one '/'", whole, example)
        match size:
            case ast.Constant(value=int(block)) if not isinstance(block, bool) and 1 <= block <= MOST_BLOCK:
                return block
        return self.refuse(f"a block of {index} is a whole number of its values, from 1 to {MOST_BLOCK}", size, example)

    def period(self, index: str, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and _PERIOD.fullmatch(node.id):
            return node.id
        return self.refuse(
            f"the period of {index} is a name of capital letters, other than M, N and K",
            node,
            f"write {index} % P: P is how many the input has, whatever it is",
        )

    def identifier(self, name: str, node: ast.expr) -> str:
        if "__" in name:
            self.refuse(f"'{name}' has two underscores in a row", node, "choose a plain name")
        if name.startswith("_"):
            self.refuse(f"'{name}' begins with an underscore", node, "choose a plain name")
        if len(name) > 64:
            self.refuse(f"a name has {len(name)} characters, and the limit is 64", node, "choose a shorter name")
        return name

    def span(self, node: ast.AST) -> Span:
        # the text is ASCII, so Python's byte columns are character columns
        start = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return Span(start, end)

    def note(self, message: str, node: ast.AST, hint: str = "") -> None:
        self.mistakes.append(Diagnostic(message, self.span(node), hint))

    def refuse(self, message: str, node: ast.AST, hint: str = "") -> NoReturn:
        self.note(message, node, hint)
        raise _Refused

    def refuse_python(self, node: ast.AST) -> NoReturn:
        what, instead = _INSTEAD.get(type(node), ("this piece of Python", "a program is assignments, then one expression or tuple"))
        self.refuse(f"{what} is not in the language", node, instead)
