"""Second stage: untyped Program -> typed Graph, with every mistake of meaning reported together.

What holds afterwards: names are bound once and used, every input has one set of indices, booleans and numbers stand where they
belong, a reduction over m or n feeds nothing that varies over more than it does, one over k no operand, each output can be stored, there is a product, and it is used; a second one has
its left operand. What varies along k is an operand of theirs, or part of one.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from epigen import dtypes, ops
from epigen.errors import CheckError, Diagnostic, InternalError, Span, near_miss
from epigen.ir.graph import (
    BITMASK,
    BITS,
    BLOCKWISE,
    CAST,
    CONSTANT,
    DOT,
    EXTENT,
    GIVEN,
    GROUPS,
    INPUT,
    OPERAND,
    OPERANDS,
    PACKED,
    POSITION,
    REDUCE,
    SEED,
    UNIFORM,
    Graph,
    Node,
    Output,
    blocks_of,
    common_indices,
    describe_indices,
    is_given,
)
from epigen.ir.parting import Parting, WithoutParts, without_parts
from epigen.lang.parser import parse
from epigen.lang.syntax import Assign, Call, Expr, Name, Number, Power, Program, declared_text, expr_text, to_text
from epigen.lang.walk import walk
from epigen.ops import BOOLEAN, NUMBER

PREDECLARED = {"bias": "n", "residual": "mn"}
INDEX_NAMES = frozenset("mnk")
BLOCKS = (8, 16, 32, 64, 128, 256)
"""Of columns, that are reduced by themselves: those of which tiles of some schedule have whole ones."""
POSITIONS = {"m": "row", "n": "column"}
"""The indices that are values too: the number, from 0 on, of what they are an index of."""
_NO_SEEDS = frozenset({"mm", "mask", *OPERANDS, *POSITIONS})
_IN_ORDER = ("m", "n", "mn", "k", "mk", "kn")
"""The indices that an input may have: those with k within an operand of dot."""

# what generated code itself uses; an input of such a name would shadow it
_GENERATED = frozenset(
    """tl triton torch gl gluon acc pid pid_m pid_n group M N K GROUP_M logaddexp maximum out start first size chunk self
    load store dot arange zeros full program_id num_programs cdiv constexpr reduce reshape broadcast_to expand_dims trans cat join
    split atomic_add atomic_max make_block_ptr make_tensor_descriptor static_range assume multiple_of max_contiguous swizzle2d
    tiles tile_id subtile_id split_id step_id slot_id phase_id group_id other_id acc_left acc_right full_bars
    empty_bars order_bars SUBTILE_N ROWS LAYOUT STAGES SPLITS WARPGROUP gluon tma mbarrier fence_async_shared warpgroup_mma warpgroup_mma_wait
    item_id batch_id acc_whole a_padded b_padded copy_in copy_out PDL PTX producer consumer columns_taken_over words_taken_over packed_words
    group_larger group_added group_spans rows_of_tile span_of_group steps_of_tile RAGGED first_row end_m first_k end_k begin_k begin_tile end_tile
    to_int8 float16 float32 float64 bfloat16 int1 int8 int16 int32 int64 uint8 uint32 math extra libdevice language jit""".split()
)
_GENERATED_PATTERN = re.compile(
    r"(stride|offs|columns|block|tiles|num|in|part|split|BLOCK|GROUP|FINISH)_.*|[ab]_(even|odd)|.*_(ptrs?|desc|bufs?|partial|length|value|word|byte|bit|in|of_columns)|.*_of_blocks|finish_.*|acc_.*|out\d+|t\d+|[MNK]_\d+"
)

_Value = int | None  # a node's number, or None where its expression held a mistake
_Typing = Generator[Expr, _Value, _Value]  # yields the expressions whose values it needs


def check(program: Program) -> Graph:
    """Type a program. Raises CheckError with every mistake found."""
    plain = _without_parts(program)
    if plain.mistakes:
        raise CheckError(program.text, plain.mistakes)
    text = to_text(Program(plain.assigns, plain.outputs, program.text))
    builder = _Builder(text if plain.parting else program.text)
    for assign in plain.assigns:
        builder.assign(assign)
    outputs = builder.outputs(plain.outputs)
    builder.finish()
    if builder.mistakes:
        raise CheckError(program.text, builder.mistakes)
    return Graph(tuple(builder.nodes), outputs, text)


def parting(program: Program) -> Parting | None:
    """What a program parts and joins, which its graph does not tell of."""
    return _without_parts(program).parting


def _without_parts(program: Program) -> WithoutParts:
    return without_parts(program, PREDECLARED, lambda name: refused_name(name) is None)


def check_rule(text: str, kinds: Mapping[str, str]) -> Graph:
    """Type one expression over named tiles: the form of the operation table's `gradient` and `error` texts.

    kinds: each name's kind, NUMBER or BOOLEAN. The graph has the tiles as inputs and one output.
    """
    program = parse(text)
    builder = _Builder(text)
    for name, kind in kinds.items():
        builder.names[name] = builder.node(Node(INPUT, (), kind, "mn", name=name))
    value = builder.value(program.outputs[0])
    if builder.mistakes or value is None:
        raise InternalError(str(CheckError(text, builder.mistakes)))
    return Graph(tuple(builder.nodes), (Output("out", value, None),), to_text(program))


def refused_name(name: str, scalar: bool = False, indexed: bool = False) -> tuple[str, str] | None:
    """Why no input or assignment may have this name, and what to do instead; None where one may. scalar: of an input that is a number. indexed: of one that
    always has indices behind it, which no call has."""
    if scalar and name == "target":  # a number by this name in a call of Kernel.warm would be taken for the GPU
        return "'target' without indices is a number, and Kernel.warm has the GPU by that name", "write target[m] for labels, or choose another name"
    another = "choose another name"
    if name == "nan":
        return "'nan' is a number that the language does not have", "pass it as an input of another name"
    if name == "inf":
        return "'inf' is infinity, and can be no other value", another
    if name in ("mm", *OPERANDS):
        return f"'{name}' is predeclared, and cannot be bound", another
    if name == GROUPS:
        return f"'{name}' is what a call names the ends of its groups by, and cannot be bound", another
    if name in POSITIONS:
        return f"'{name}' is the number of the {POSITIONS[name]}, and cannot be bound", another
    if name in INDEX_NAMES:
        hint = f"{another}; within an operand step[k] has the positions, with step=torch.arange(K)"
        return f"'{name}' is an index of the operands, and no value", hint
    if name in ops.FUNCTIONS and not (indexed and name in ops.TABLE and not ops.TABLE[name].body):  # of which generated code has no function by this name
        return f"'{name}' is an operation, not a value", f"call it, as in {name}({', '.join(OPERANDS) if name == 'dot' else 'mm'}), or choose another name"
    if name in dtypes.BY_NAME:
        return f"'{name}' is a dtype, not a value", another
    if keyword.iskeyword(name) or hasattr(builtins, name):
        return f"'{name}' is a Python name that generated code may need", another
    if name in _GENERATED or _GENERATED_PATTERN.fullmatch(name):
        return f"'{name}' is a name that Triton or the generated kernel uses", another
    return None


def _reordered(name: str, indices: str, blocks: tuple[int, ...] = ()) -> str:
    """What to write in place of indices that no tensor has in this order."""
    ordered = next((known for known in _IN_ORDER if set(known) == set(indices)), "")
    if not ordered:
        return f"an input has two indices at most: write {name}[m,n], and in an operand of dot {name}[m,k] or {name}[k,n]"
    size = dict(zip(indices, blocks, strict=False))
    declared = declared_text(ordered, (), [size.get(i, 1) for i in ordered])
    return f"{'columns come last' if ordered == 'kn' else 'rows come first'}: write {name}[{declared}], and pass the transpose"


def letters(name: str) -> str:
    """What a name has in common with those that differ by the order of their letters: a slip of the pen. Numbers are meant as they stand."""
    return "".join(sorted(c for c in name if not c.isdigit())) + " " + "".join(c for c in name if c.isdigit())


class _Builder:
    """Holds the nodes made so far, the names bound so far, and the mistakes found so far."""

    def __init__(self, text: str):
        self.text = text
        self.multiplies = re.search(r"\bdot\b", text) is not None  # by name; else operands are mm's
        self.along_k = (
            self.multiplies or re.search(r",\s*k\s*\)", text) is not None
        )  # whether anything may be computed of operands: what is multiplied, or reduced over k
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}
        self.names: dict[str, _Value] = {}
        self.assigned: dict[str, Assign] = {}
        self.letters: dict[str, str] = {}  # of the names that are bound or declared so far, each with the first that has them
        self.used: set[str] = set()
        self.inputs: dict[str, tuple[str, str, Span, tuple[str, ...], tuple[int, ...]]] = {}  # name -> indices, kind, first use, periods, blocks
        self.place_of_packed = Span(0, 0)  # of the last int4(b), if there is one
        self.mistakes: dict[Diagnostic, None] = {}  # in order, each once

    # -- nodes

    def node(self, node: Node) -> int:
        number = self.numbers.get(node)
        if number is None:
            number = self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        elif node.label and not self.nodes[number].label:
            self.nodes[number] = node
        return number

    def constant(self, value: float) -> int:
        return self.node(Node(CONSTANT, (), NUMBER, "", value=value))

    def error(self, message: str, span: Span, hint: str = "") -> None:
        self.mistakes[Diagnostic(message, span, hint)] = None

    # -- statements

    def assign(self, assign: Assign) -> None:
        name = assign.name
        value = self.value(assign.value)
        if name in self.assigned:
            self.error(f"'{name}' is bound twice", assign.span, "each name is bound once: choose another")
            return
        if name in self.inputs:
            self.error(f"'{name}' is an input above, and cannot be bound here", assign.span, "choose another name")
            self.names[name] = None  # one report a name
            return
        if name in PREDECLARED or name == "mask":
            self.error(f"'{name}' is a predeclared input, and cannot be bound", assign.span, "choose another name")
            self.names[name] = None
            return
        default = name == "out" or re.fullmatch(r"out\d+", name)
        if not (default or self.name_is_free(name, assign.span)) or not self.unlike_scalars(name, assign.span):
            self.names[name] = None
            return
        self.assigned[name] = assign
        self.names[name] = value
        self.letters.setdefault(letters(name), name)
        # an output's default name is no label: that output's own value takes it
        if not default and value is not None and not self.nodes[value].label and self.takes_label(value):
            self.nodes[value] = replace(self.nodes[value], label=name)

    def takes_label(self, value: int) -> bool:
        """Whether a value may have a name of its own. A product that is mm has that."""
        node = self.nodes[value]
        return node.op not in (INPUT, BITS, CONSTANT, EXTENT, POSITION, OPERAND) and not self.is_mm(node)

    def is_mm(self, node: Node) -> bool:
        return node.op == DOT and not node.name and all(is_given(self.nodes[a]) for a in node.args)

    def name_is_free(self, name: str, span: Span, indexed: bool = False) -> bool:
        """Whether an input or an assignment may have this name; notes the mistake if not. indexed: as of `refused_name`."""
        refused = refused_name(name, indexed=indexed)
        if refused is not None:
            message, hint = refused
            self.error(message, span, hint)
        return refused is None

    def unlike_scalars(self, name: str, span: Span) -> bool:
        """As `scalar_name` of the scalars above, so that a program means the same in whatever order it is written; notes the mistake if not."""
        known = self.letters.get(letters(name), name)
        if len(name) > 2 and known != name and known in self.inputs and self.inputs[known][:2] == ("", NUMBER):
            self.error(f"'{name}' has the letters of the scalar input '{known}'", span, "choose a name less like it")
            return False
        return True

    # -- expressions

    def value(self, expr: Expr) -> _Value:
        return walk(self.expr, self.expr(expr))

    def expr(self, expr: Expr) -> _Typing:
        match expr:
            case Number(value):
                return self.constant(value)
            case Name():
                return self.name(expr)
            case Power(base, exponent):
                return self.power((yield base), exponent, expr)
            case Call(function):
                if function == "bgrad":
                    return (yield from self.reduction("sum", expr, axes="m"))
                if function == "mean":
                    return (yield from self.mean(expr))
                if function == "extent":
                    return self.call_extent(expr)
                if function == "uniform":
                    return self.call_uniform(expr)
                if function == "dropout":
                    return (yield from self.call_dropout(expr))
                if function in ops.REDUCTIONS:
                    return (yield from self.reduction(function, expr))
                if function == "bits":
                    return self.call_bits(expr)
                if function == "quantize":
                    self.error("quantize gives two values", expr.span, "bind them: q, s = quantize(mm, fp8e4m3, n/128); ...")
                    return None
                if function == "dot":
                    return (yield from self.call_dot(expr))
                if function in dtypes.PACKED:
                    return (yield from self.call_packed(dtypes.PACKED[function], expr))
                if function == "bitmask":
                    return (yield from self.call_bitmask(expr))
                if function == "cast":
                    return (yield from self.call_cast(expr))
                return (yield from self.elementwise(ops.TABLE[function], expr))

    def name(self, name: Name) -> _Value:
        text, span = name.name, name.span
        if name.periods and (text in self.names or text in ("mm", *OPERANDS)):
            self.error(f"'{text}' is no input, whose rows or columns could begin anew", span, f"write {text}")
            return None
        if name.blocks and (text in self.names or text in ("mm", *OPERANDS)):
            self.error(f"'{text}' is no input, which could have one value for several of an index", span, f"write {text}")
            return None
        declared = None if name.indices is None else "".join(name.indices)
        if declared is not None and declared not in _IN_ORDER and (self.along_k or "k" not in declared):
            self.error(f"'{text}' is declared as {describe_indices(declared, (), name.blocks)}", span, _reordered(text, declared, name.blocks))
            return None
        if text in self.names:
            self.used.add(text)
            if name.indices is not None and text in self.assigned:
                self.error(f"'{text}' is a bound name, and takes no indices", span, f"write {text}")
            return self.names[text]
        if text in POSITIONS:
            if declared is not None:
                self.error(f"'{text}' is the number of the {POSITIONS[text]}, and takes no indices", span, f"write {text}")
            return self.node(Node(POSITION, (), NUMBER, text, name=text))
        if text == "mm":
            if declared not in (None, "mn"):
                self.error(f"mm has indices [m, n], not {describe_indices(declared or '')}", span, "write mm")
            return self.product([self.node(given) for given in GIVEN], span)
        if text in OPERANDS and self.along_k:
            if declared not in (None, OPERANDS[text]):
                self.error(f"{text} has indices {describe_indices(OPERANDS[text])}, not {describe_indices(declared or '')}", span, f"write {text}")
            return self.node(GIVEN[[*OPERANDS].index(text)])
        if text in OPERANDS:
            self.error(f"the operand '{text}' can only be reduced over k", span, f"write sum({text}, k); the product is mm")
            return None
        if text == "mask" and declared is None:
            return self.bits(text, span)
        if name.periods and "k" in (declared or ""):
            self.error(f"'{text}' is an input of an operand, which has no period", span, f"write {text}[{','.join(declared or '')}], and pass it expanded")
            return None
        if declared is not None and "k" in declared and not self.along_k:
            self.error(
                f"'{text}' has the index k, which only the operands have",
                span,
                "an input of the epilogue varies over m, n or both; within an operand, as in dot(a * norm[k], b), and a sum over k it may vary along k",
            )
            return None
        if text not in PREDECLARED and text not in self.inputs and declared is None and not self.scalar_name(text, span):
            return None
        indices = PREDECLARED.get(text, "") if declared is None else declared
        return self.input(text, indices, NUMBER, span, name.periods, name.blocks)

    def scalar_name(self, name: str, span: Span) -> bool:
        """A bare name that is not known yet declares a scalar, unless it looks like a slip of the pen."""
        if refused_name(name) is None and (refused := refused_name(name, scalar=True)):
            self.error(refused[0], span, refused[1])
            return False
        anagram = self.letters.get(letters(name)) if len(name) > 2 else None
        close = near_miss(name, (*PREDECLARED, "mask", *([anagram] if anagram else []))) if len(name) > 3 else ""
        if close or anagram:
            hint = close or f"did you mean {anagram}?"
            self.error(f"unknown name '{name}'", span, f"{hint} (a bare name declares a scalar input: for one, choose a name less like it)")
            return False
        return True

    def input(self, name: str, indices: str, kind: str, span: Span, periods: tuple[str, ...] = (), blocks: tuple[int, ...] = ()) -> _Value:
        """kind: BOOLEAN of a packed mask."""
        if name in self.inputs:
            known, known_kind, _, periods_known, blocks_known = self.inputs[name]
            if known_kind != kind:
                first, second = sorted({BOOLEAN: "a packed mask", SEED: "a seed", NUMBER: "numbers"}[k] for k in (known_kind, kind))
                self.error(f"'{name}' is used as {first} and as {second}", span, "give the two inputs two names")
                return None
            if (known, periods_known, blocks_known) != (indices, periods, blocks):
                self.error(
                    f"'{name}' is {describe_indices(known, periods_known, blocks_known)} above and {describe_indices(indices, periods, blocks)} here", span,
                    f"one input has one set of indices: write {name}{'[' + declared_text(known, periods_known, blocks_known) + ']' if known else ''}, or use another name")  # fmt: skip
                return None
        elif not self.name_is_free(name, span, indexed=bool(indices)) or not self.unlike_scalars(name, span):
            self.names[name] = None  # one report a name
            return None
        self.inputs.setdefault(name, (indices, kind, span, periods, blocks))
        self.letters.setdefault(letters(name), name)
        return self.node(Node(BITS if kind == BOOLEAN else INPUT, (), kind, indices, name=name, periods=periods, blocks=blocks))

    def bits(self, name: str, span: Span) -> _Value:
        return self.input(name, "mn", BOOLEAN, span)

    def power(self, base: _Value, exponent: int, expr: Power) -> _Value:
        if base is None or not self.expect(base, NUMBER, expr.base, "the base of a power"):
            return None
        # by squaring, so that the reference and the kernel round alike
        multiply = ops.TABLE["mul"]
        result: _Value = None
        square: _Value = base
        while exponent and square is not None:
            if exponent & 1:
                result = square if result is None else self.apply(multiply, (result, square), expr.span)
            exponent >>= 1
            if exponent:
                square = self.apply(multiply, (square, square), expr.span)
        return result

    def arguments(self, call: Call, params: tuple[str, ...]) -> list[Expr] | None:
        """The call's arguments in the order of the parameters, or None after noting what does not fit."""
        bound: dict[str, Expr] = dict(zip(params, call.args, strict=False))
        for key, value in call.keywords:
            if key not in params:
                hint = near_miss(key, params) or f"its parameters are {', '.join(params)}"
                self.error(f"{call.function} has no parameter '{key}'", call.span, hint)
                return None
            if key in bound:
                self.error(f"{call.function}'s {key} is given twice", call.span, "once in its place, or once by its name")
                return None
            bound[key] = value
        if len(call.args) > len(params) or len(bound) < len(params):
            given = len(call.args) + len(call.keywords)
            self.error(
                f"{call.function} takes {len(params)} argument{'s' * (len(params) != 1)}, and got {given}",
                call.span,
                f"write {call.function}({', '.join(params)})",
            )
            return None
        return [bound[p] for p in params]

    def elementwise(self, op: ops.Op, call: Call) -> _Typing:
        given = self.arguments(call, tuple(p.name for p in op.params))
        if given is None:
            for arg in call.args:  # their own mistakes are worth reporting too
                _ = yield arg
            return None
        values = []
        for part in given:
            values.append((yield part))
        what = f"'{op.symbol}'" if call.infix else op.name
        ok = [
            v is not None and self.expect(v, p.kind, g, f"{what}'s {p.name}" if not call.infix else f"an operand of {what}")
            for v, p, g in zip(values, op.params, given, strict=True)
        ]
        return self.apply(op, tuple(v for v in values if v is not None), call.span) if all(ok) else None

    def apply(self, op: ops.Op, args: tuple[int, ...], span: Span) -> _Value:
        indices = ""
        for met in (self.nodes[a].indices for a in args):
            both = common_indices((indices, met))
            if len(both) > 2:
                message = f"a value with {describe_indices(indices)} meets one with {describe_indices(met)}"
                hint = "k ends at the product: what varies along it is part of an operand, as in dot(relu(a) * norm[k], b)"
                if any(n.op == UNIFORM for a in args for n in self.reached(a)):
                    message, hint = (
                        "random numbers within an operand",
                        "they are drawn for the elements of the result: drop of a tensor before it is multiplied",
                    )
                self.error(message, span, hint)
                return None
            indices = both
        reduced = [(a, self.nodes[a]) for a in args if self.nodes[a].reduced]
        for number, r in reduced:
            if r.indices != indices:
                if indices == "mn" and self.over_k(number):
                    continue
                if "k" in indices and self.over_k(number):
                    message, hint = (
                        f"a reduction over k, which leaves {describe_indices(r.indices)}, within an operand",
                        f"it is finished when the loop over k is, and then the product is too: compute with it behind that, as in mm * {'r' if 'm' in r.indices else 'c'}",
                    )
                elif indices == "mn":
                    message, hint = (
                        f"a reduction that leaves {describe_indices(r.indices)} feeds a tile",
                        "it is finished only after every tile is: make it an output, and use it in a second kernel",
                    )
                else:
                    message = f"a reduction that leaves {describe_indices(r.indices)} meets a value with {describe_indices(indices)}"
                    hint = "after a reduction, every value needs the reduction's own indices or is a scalar input"
                self.error(message, span, hint)
                return None
        return self.node(Node(op.name, args, op.result, indices, bool(reduced) and indices != "mn"))

    def over_k(self, value: int) -> bool:
        """Whether all reductions that a value is computed of are over k: a tile has them for its own rows, or columns, once its loop over k is done."""
        return all(n.axes == "k" for n in self.reached(value) if n.op == REDUCE)

    def expect(self, value: int, kind: str, expr: Expr, what: str) -> bool:
        actual = self.nodes[value].kind
        if actual == kind:
            return True
        text = expr_text(expr)
        if actual == PACKED:
            self.error(f"{what} has to be a {kind}, and a packed mask was found", expr.span, "bitmask(p) is for outputs: use p itself here")
        elif kind == NUMBER:
            self.error(f"{what} has to be a number, and a boolean was found", expr.span, f"write where({text}, 1, 0)")
        else:
            self.error(
                f"{what} has to be a boolean, and a number was found", expr.span, f"write a comparison such as {text} > 0, or bits(name) for a packed mask"
            )
        return False

    # -- the product

    def call_dot(self, call: Call) -> _Typing:
        given = self.arguments(call, tuple(OPERANDS))
        if given is None:
            return None
        operands: list[int] = []
        second = ""
        for name, part in zip(OPERANDS, given, strict=True):
            value = yield part
            if value is None or not self.expect(value, NUMBER, part, f"dot's {name}"):
                continue
            node = self.nodes[value]
            if name == "b" and node.op == INPUT and node.indices == OPERANDS[name] and not node.blocks:
                second = node.name
            elif not self.is_operand(value, name, part):
                continue
            operands.append(value)
        return self.product(operands, call.span, second) if len(operands) == len(OPERANDS) else None

    def is_operand(self, value: int, name: str, expr: Expr, reduced_by: str = "") -> bool:
        """Whether a value is computed of the operand of this name, and of no other. reduced_by: the call that reduces it over k, where that is not dot."""
        reached = self.reached(value)
        operands = list(dict.fromkeys(n.name for n in reached if n.op == OPERAND))
        indices = describe_indices(OPERANDS[name]).replace(" ", "")
        if operands != [name] or self.nodes[value].indices != OPERANDS[name]:
            found = f"one of {' and '.join(sorted(operands))} with {describe_indices(self.nodes[value].indices)}" if operands else f"one with no {name} in it"
            message, hint = f"dot's {name} is an expression of {name}{indices}, and {found} was found", "the operands stand in their order: write dot(a, b)"
            if reduced_by:
                message = f"{reduced_by} reduces over k an expression of {name}{indices}, and {found} was found"
                hint = f"what no operand has a part in is reduced before: pass the result as an input {describe_indices(OPERANDS[name].replace('k', ''))}"
            elif name == "b" and not operands:
                hint = "write dot(a, b), or a second product as dot(a, up[k,n]), of an input as it is given"
        elif counted := next((n for n in reached if n.op == EXTENT), None):
            message, hint = f"extent({counted.name}) within an operand", "pass the number as a scalar input"
        elif position := next((n.name for n in reached if n.op == POSITION), ""):
            message = f"the position '{position}' within an operand"
            vector = POSITIONS[position]
            hint = f"pass the positions as an input: write {vector}[{position}], and call with {vector}=torch.arange({position.upper()})"
        elif begun := next((n for n in reached if n.periods), None):
            message = f"'{begun.name}' within an operand, where no input has a period"
            hint = f"write {begun.name}[{','.join(begun.indices)}], and pass it expanded"
        else:
            return True
        self.error(message, expr.span, hint)
        return False

    def packed_argument(self, call: Call) -> tuple[Expr | None, str]:
        """What int4 or uint4 is called of, and along which index its values share bytes; None where its arguments are others."""
        match call.args:
            case (operand, Name("k" | "n" as along, _, None)) if not call.keywords:
                return operand, along
            case (operand,) if not call.keywords:
                return operand, "k"
        return None, ""

    def call_packed(self, dtype: dtypes.DType, call: Call) -> _Typing:
        """An operand b as the values that it holds two of in a byte."""
        if not self.multiplies:
            self.error(f"{call.function} stands within what is multiplied", call.span, f"write dot(a, {call.function}(b))")
            return None
        operand, along = self.packed_argument(call)
        if operand is None:
            message = f"write {call.function}(b), or {call.function}(b, n) where neighbours along n share a byte"
            self.error(f"the arguments do not fit {call.function}", call.span, message)
            return None
        value = yield operand
        if value is None:
            return None
        node = self.nodes[value]
        if not is_given(node) or node.name != "b":
            self.error(f"{call.function} reads the operand b as it is given, and '{expr_text(operand)}' was found", operand.span, f"write {call.function}(b)")
            return None
        self.place_of_packed = call.span
        return self.node(Node(OPERAND, (), NUMBER, OPERANDS["b"], name="b", dtype=dtype, axes=along))

    def reached(self, value: int) -> list[Node]:
        """A value and all that it is computed of."""
        seen, pending = {value}, [value]
        while pending:
            new = [a for a in self.nodes[pending.pop()].args if a not in seen]
            seen.update(new)
            pending += new
        return [self.nodes[number] for number in sorted(seen)]

    def product(self, operands: Sequence[int], span: Span, second: str = "") -> _Value:
        """second: the name of the input that is the right operand, where that is not b."""
        node = Node(DOT, tuple(operands), NUMBER, "mn", name=second)
        others = [n for n in self.nodes if n.op == DOT and n != node]
        if any(bool(n.name) == bool(second) for n in others):
            message = "a program has one product of a and b, and one more of a and an input, and this is another"
            self.error(message, span, "mm is dot(a, b): bind the one that is meant to a name, or compile two programs")
            return None
        if any(n.args[0] != operands[0] for n in others):
            self.error("the two products of a program have different left operands", span, "write the same one in both, or compile two programs")
            return None
        return self.node(node)

    # -- calls of the grammar's own

    def call_bits(self, call: Call) -> _Value:
        match call.args:
            case (Name(name, span, indices, (), ()),) if not call.keywords and indices in (None, ("m", "n")):
                if name in self.names and name not in self.assigned:
                    return None  # reported above
                if name in self.names or name in ("mm", *OPERANDS):
                    self.error(f"bits reads a packed input, and '{name}' is computed", span, "a boolean needs no bits(...)")
                    return None
                return self.bits(name, span)
        self.error("bits takes the name of a packed mask [m,n]", call.span, "write bits(name)")
        return None

    def call_bitmask(self, call: Call) -> _Typing:
        given = self.arguments(call, ("p",))
        if not given:
            return None
        value = yield given[0]
        if value is None or not self.expect(value, BOOLEAN, given[0], "what bitmask packs"):
            return None
        if self.nodes[value].indices != "mn":
            self.error(
                f"bitmask packs a tile [m, n]: found {describe_indices(self.nodes[value].indices)}", call.span, "compare something that varies over m and n"
            )
            return None
        return self.node(Node(BITMASK, (value,), PACKED, "mn"))

    def call_cast(self, call: Call) -> _Typing:
        given = self.arguments(call, ("x", "dtype"))
        if not given:
            return None
        value, dtype = (yield given[0]), None
        if isinstance(given[1], Name) and given[1].indices is None:
            dtype = dtypes.BY_NAME.get(given[1].name)
        if dtype is None:
            name = expr_text(given[1])
            hint = near_miss(name, dtypes.BY_NAME) or f"the dtypes are {', '.join(t.name for t in dtypes.OPERANDS)}"
            self.error(f"unknown dtype '{name}'", given[1].span, hint)
            return None
        if value is None or not self.expect(value, NUMBER, given[0], "what cast rounds"):
            return None
        x = self.nodes[value]
        return self.node(Node(CAST, (value,), NUMBER, x.indices, x.reduced, dtype=dtype))

    def mean(self, call: Call) -> _Typing:
        total = yield from self.reduction("sum", call)
        if total is None:
            return None
        axes = self.nodes[total].axes
        if self.nodes[total].op == BLOCKWISE:
            block = self.nodes[total].blocks[-1]
            self.error(
                "a mean of blocks, of which the last may be shorter",
                call.span,
                f"write {expr_text(call).replace('mean', 'sum', 1)} / {block} where all have {block}",
            )
            return None
        counts = [self.node(Node(EXTENT, (), NUMBER, "", name=axis)) for axis in axes]
        count: _Value = counts[0] if len(counts) == 1 else self.apply(ops.TABLE["mul"], (counts[0], counts[1]), call.span)
        return None if count is None else self.apply(ops.TABLE["div"], (total, count), call.span)

    def call_extent(self, call: Call) -> _Value:
        match call.args:
            case (Name("m" | "n" | "k" as axis, _, None),) if not call.keywords:
                return self.node(Node(EXTENT, (), NUMBER, "", name=axis))
        self.error("extent takes the name of an index", call.span, "write extent(m), extent(n) or extent(k)")
        return None

    def call_uniform(self, call: Call) -> _Value:
        given = self.arguments(call, ("seed",))
        seed = None if given is None else self.seed(given[0])
        return None if seed is None else self.node(Node(UNIFORM, (seed,), NUMBER, "mn"))

    def seed(self, expr: Expr) -> _Value:
        match expr:
            case Name(name, span, None) if name not in self.assigned and name not in PREDECLARED and name not in _NO_SEEDS:
                if name in self.names or not (name in self.inputs or self.scalar_name(name, span)):
                    return None  # reported above, or by what has just been asked
                return self.input(name, "", SEED, span)
        self.error(
            f"a seed is an input of its own, and '{expr_text(expr)}' was found",
            expr.span,
            "name one, such as seed, and call with seed=... an int or an int64 tensor",
        )
        return None

    def call_dropout(self, call: Call) -> _Typing:
        given = self.arguments(call, ("x", "p", "seed"))
        if given is None:
            return None
        x, p, seed = (yield given[0]), (yield given[1]), self.seed(given[2])
        typed = [v is not None and self.expect(v, NUMBER, e, f"dropout's {what}") for v, e, what in ((x, given[0], "x"), (p, given[1], "p"))]
        if x is None or p is None or seed is None or not all(typed):
            return None
        rate = self.nodes[p]
        if rate.op == CONSTANT and not 0 <= rate.value <= 1:
            self.error(f"dropout's p is a probability, from 0 to 1, and {expr_text(given[1])} was found", given[1].span, "write 0.1 to drop one element in ten")
            return None

        def apply(op: str, *args: _Value) -> _Value:
            return None if None in args else self.apply(ops.TABLE[op], tuple(a for a in args if a is not None), call.span)

        # torch's p has no gradient either
        kept = apply("sub", self.constant(1.0), p if rate.op == CONSTANT else apply("detach", p))
        drawn = apply("ge", self.node(Node(UNIFORM, (seed,), NUMBER, "mn")), p)
        return apply("where", drawn, apply("mul", x, apply("div", self.constant(1.0), kept)), self.constant(0.0))

    def reduction(self, row: str, call: Call, axes: str | None = None) -> _Typing:
        if call.keywords or not 1 <= len(call.args) <= (2 if axes is None else 1):
            form = f"{call.function}(x)" if axes else f"{call.function}(x, m), {call.function}(x, n) or {call.function}(x)"
            self.error(f"the arguments do not fit {call.function}", call.span, f"write {form}")
            return None
        if axes is None:
            axes = "mn"
            if len(call.args) == 2:
                match call.args[1]:
                    case Name(name, _, None) if name in INDEX_NAMES:
                        axes = name
                    case Call("div", (Name("n", _, None), Number(block))) as along:
                        return (yield from self.blockwise(row, call, block, along.span))
                    case other:
                        hint = (
                            f"write {row}imum({expr_text(call.args[0])}, {expr_text(other)}) for the larger of two values"
                            if row == "max"
                            else f"write {call.function}(x, m), {call.function}(x, n) or {call.function}(x)"
                        )
                        self.error(
                            f"{call.function} reduces over m, n or k, and found '{expr_text(other)}'",
                            other.span,
                            hint,
                        )
                        return None
        value = yield call.args[0]
        if value is None or not self.expect(value, NUMBER, call.args[0], f"what {call.function} reduces"):
            return None
        x = self.nodes[value]
        if axes == "k":
            return (
                self.node(Node(REDUCE, (value,), NUMBER, x.indices.replace("k", ""), True, name=row, axes="k")) if self.reduces_operand(value, call) else None
            )
        if is_given(x):
            self.error(f"the operand '{x.name}' can only be reduced over k", call.span, f"write {call.function}({x.name}, k)")
            return None
        if x.reduced:
            self.error("a reduction of a reduction", call.span, f"reduce the tile at once: {call.function}(x) reduces over m and n")
            return None
        if x.indices != "mn":
            self.error(f"{call.function} reduces a tile [m, n]: found {describe_indices(x.indices)}", call.span, "reduce something that varies over m and n")
            return None
        return self.node(Node(REDUCE, (value,), NUMBER, "".join(i for i in "mn" if i not in axes), True, name=row, axes=axes))

    def reduces_operand(self, value: int, call: Call) -> bool:
        """Whether a value that is reduced over k is computed of an operand, and of one alone."""
        operand = next((name for name, indices in OPERANDS.items() if indices == self.nodes[value].indices), "")
        if not operand:
            hint = f"write {call.function}(a, k), {call.function}(b, k), or of an expression of one of them, such as a * a; mm is already summed over k"
            self.error("only the operands a and b have the index k", call.span, hint)
            return False
        if packed := next((n for n in self.reached(value) if n.op == OPERAND and n.dtype is not None), None):
            self.error(
                f"a reduction over k of {packed.dtype}(b), which holds two values in a byte",
                call.span,
                f"unpack b first, or pass {call.function} of it as an input [n]",
            )
            return False
        return self.is_operand(value, operand, call.args[0], call.function)

    def blockwise(self, row: str, call: Call, block: float, span: Span) -> _Typing:
        """A reduction of each block of so many columns, whose value all of the block's elements have."""
        if block not in BLOCKS:
            self.error(
                f"a block of {expr_text(Number(block, span))} columns",
                span,
                f"blocks of a power of two are reduced, from {BLOCKS[0]} to {BLOCKS[-1]}: write n/128",
            )
            return None
        value = yield call.args[0]
        if value is None or not self.expect(value, NUMBER, call.args[0], f"what {call.function} reduces"):
            return None
        x = self.nodes[value]
        if x.indices != "mn" or x.reduced:
            self.error(
                f"{call.function} reduces blocks of a tile [m, n]: found {describe_indices(x.indices)}", call.span, "reduce something that varies over m and n"
            )
            return None
        return self.node(Node(BLOCKWISE, (value,), NUMBER, "mn", name=row, axes="n", blocks=(1, int(block))))

    def second(self, name: str, span: Span) -> None:
        """What holds of an input that is multiplied, once all of the program is there."""
        if not any(n.op == DOT and not n.name for n in self.nodes):
            self.error(f"the only product of the program is that of a and '{name}'", span, f"write dot(a, b) or mm, and pass {name} as b")
        number = next(i for i, n in enumerate(self.nodes) if n.op == INPUT and n.name == name)
        if any(number in n.args and n.op != DOT for n in self.nodes):
            self.error(f"'{name}' is multiplied as it is given, and something is computed of it besides", span, "pass it a second time, by another name")

    def packed(self) -> None:
        """That an operand that holds two values in a byte does so wherever it stands."""
        used = {a for n in self.nodes for a in n.args}
        ways = [n for i, n in enumerate(self.nodes) if n.op == OPERAND and n.name == "b" and i in used]
        if len(ways) > 1:
            shown = [f"{n.dtype}(b{', n' * (n.axes == 'n')})" if n.dtype else "b" for n in ways]
            self.error(
                f"the operand b is read in two ways, as {shown[0]} and as {shown[1]}", self.place_of_packed, "it holds one kind of values: read it in one way"
            )

    # -- outputs

    def outputs(self, exprs: tuple[Expr, ...]) -> tuple[Output, ...]:
        outputs: dict[str, Output] = {}
        multiplies = re.search(r"\b(mm|dot)\b", self.text) is not None  # where mm is missing, that is the mistake, and not what the outputs vary over
        for position, expr in enumerate(exprs):
            value = self.value(expr)
            bound = isinstance(expr, Name) and expr.name in self.assigned
            name = expr.name if bound and isinstance(expr, Name) else "out" if len(exprs) == 1 else f"out{position}"
            if value is None:
                continue
            x = self.nodes[value]
            dtype = None
            if x.op == CAST:  # the store rounds
                dtype = x.dtype
                self.move_label(value, x.args[0])
                value = x.args[0]
            if x.kind == BOOLEAN:
                self.error("a boolean cannot be an output", expr.span, f"write bitmask({expr_text(expr)}), or where({expr_text(expr)}, 1, 0)")
            elif x.indices != "mn" and not x.reduced and multiplies:
                self.error(f"an output varies over [m, n] or is a reduction: found {describe_indices(x.indices)}", expr.span, "compute it outside the kernel")
            elif name in outputs:
                self.error(f"two outputs are called '{name}'", expr.span, "list each output once, or bind one to another name")
            outputs[name] = Output(name, value, dtype)
        if not self.mistakes and not any(n.op == DOT for n in self.nodes):
            self.without_product(exprs[0].span)
        blocks = blocks_of(self.nodes)
        return tuple(replace(output, block=blocks[output.node]) for output in outputs.values())

    def without_product(self, span: Span) -> None:
        """The program names no mm: what stands for a scalar may be meant as one."""
        message, scalar = "the program never uses mm, the product of a and b", next((n for n, (indices, *_) in self.inputs.items() if not indices), None)
        if scalar is None:
            self.error(message, span, "an epilogue works on mm, for example relu(mm + bias)")
        else:
            self.error(message, self.inputs[scalar][2], f"did you mean mm? '{scalar}' is read as a scalar input, and the product is mm")

    def move_label(self, cast: int, value: int) -> None:
        """The label of an output's cast, for what is cast; no two nodes have the same."""
        label = self.nodes[cast].label
        if label and not self.nodes[value].label and self.takes_label(value):
            self.nodes[cast] = replace(self.nodes[cast], label="")
            self.nodes[value] = replace(self.nodes[value], label=label)

    def finish(self) -> None:
        """Mistakes that only the whole program shows."""
        for node in self.nodes:
            for arg in node.args:
                if self.nodes[arg].kind == PACKED:
                    raise InternalError("a packed mask is used inside")
        if self.mistakes:
            return
        second = next((n for n in self.nodes if n.op == DOT and n.name), None)
        if second is not None:
            self.second(second.name, self.inputs[second.name][2])
        self.packed()
        for name, assign in self.assigned.items():
            if name not in self.used:
                self.error(f"'{name}' is bound and never used", assign.span, "list it among the outputs, or drop it")
