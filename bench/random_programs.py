"""Random programs of the language, as text: well-typed ones, and hostile ones.

One generator serves both callers: seeded with `random.Random` it fuzzes, and fed by Hypothesis, in the tests, it shrinks.
"""

from __future__ import annotations

import random as random_module
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from epigen import ops
from epigen.dtypes import OPERANDS, DType
from epigen.errors import near_miss
from epigen.ir.check import PREDECLARED, letters, refused_name
from epigen.ir.graph import common_indices
from epigen.lang.parser import MAX_CHARACTERS, MAX_NODES
from epigen.ops import BOOLEAN, NUMBER

_TILES = ("residual", "gate[m,n]", "up[m,n]", "aux[m, n]")
_COLUMNS = ("bias", "scale_b[n]", "shift[n]")
_ROWS = ("scale_a[m]", "weight[m]")
_SCALARS = ("alpha", "gain", "s")
_LEAVES = ((_TILES, "mn"), (_COLUMNS, "n"), (_ROWS, "m"), (("norm[k]", "step[k]"), "k"), (("left[m,k]",), "mk"), (("right[k,n]",), "kn"))
_MASKS = ("mask", "bits(keep)", "bits(drop)")
_NAMES = tuple(f"{letter}{number}" for number in range(10) for letter in "zyxhqvw")
_CONSTANTS = ("0", "1", "2", "0.5", "-1", "-0.25", "3", "1e-3", "0.1", "1.5", "-2.75")

# an argument that keeps the result near 1 for any finite value of the plain one; {} is the plain argument
_TAMED = {
    ("div", 1): "(abs({}) + 1)", ("mul", 1): "tanh({})", ("scale", 1): "tanh({})", ("exp", 0): "tanh({})", ("log", 0): "abs({}) + 1",
    ("sqrt", 0): "abs({}) + 1", ("rsqrt", 0): "abs({}) + 1", ("leaky_relu", 1): "tanh({})", ("dsigmoid", 1): "sigmoid({})", ("dtanh", 1): "tanh({})",
    ("square", 0): "tanh({})", ("reciprocal", 0): "abs({}) + 1", ("exp2", 0): "tanh({})", ("expm1", 0): "tanh({})", ("log1p", 0): "abs({})",
    ("pow", 0): "abs(tanh({})) + 0.5", ("pow", 1): "tanh({})", ("prelu", 1): "tanh({})", ("elu", 1): "tanh({})", ("celu", 1): "abs({}) + 1",
}  # fmt: skip

_COMPUTED = tuple(ops.TABLE.values())


@dataclass(slots=True)
class _Value:
    """An expression. atom: needs no parentheses as an operand."""

    text: str
    kind: str = NUMBER
    indices: str = "mn"
    reduced: bool = False
    atom: bool = True


@dataclass(slots=True)
class _Writer:
    random: random_module.Random
    tame: bool
    casts: tuple[DType, ...]
    statements: list[str] = field(default_factory=list)
    pool: list[_Value] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: list(_NAMES))

    def source(self, kind: str, indices: str) -> _Value:
        """A value of this kind that varies over no more than `indices`, and is no reduction."""
        fits = [v for v in self.pool if v.kind == kind and not v.reduced and set(v.indices) <= set(indices)]
        if fits and (kind == BOOLEAN or self.random.random() < 0.65):
            # late values first: long chains, and few names left over
            return fits[max(self.random.randrange(len(fits)), self.random.randrange(len(fits)))]
        if kind == BOOLEAN:
            if indices == "mn" and self.random.random() < 0.5:
                return _Value(self.random.choice(_MASKS), BOOLEAN)
            x = self.source(NUMBER, indices)
            return _Value(f"{self.use(x)} {self.random.choice(('>', '>=', '<', '<=', '==', '!='))} {self.constant().text}", BOOLEAN, x.indices, atom=False)
        leaves = [_SCALARS] + [names for names, needs in _LEAVES if set(needs) <= set(indices)]
        chosen = self.random.choice([*leaves, None])
        if chosen is None:
            return self.constant()
        return _Value(self.random.choice(chosen), NUMBER, dict(_LEAVES).get(chosen, ""))

    def constant(self) -> _Value:
        return _Value(self.random.choice(_CONSTANTS), NUMBER, "")

    def use(self, value: _Value, bare: bool = False) -> str:
        """The value's text as an operand; `bare` inside a call's parentheses."""
        return value.text if value.atom or bare else f"({value.text})"

    def keep(self, value: _Value, assign: float = 0.4) -> None:
        """Put a value into the pool, with chance `assign` under a name."""
        if self.names and self.random.random() < assign:
            name = self.names.pop(self.random.randrange(min(7, len(self.names))))
            self.statements.append(f"{name} = {value.text}")
            value = _Value(name, value.kind, value.indices, value.reduced)
        self.pool.append(value)

    def apply(self, op: ops.Op, args: list[_Value]) -> _Value:
        texts = []
        for position, arg in enumerate(args):
            tamed = _TAMED.get((op.name, position)) if self.tame else None
            inside = tamed is not None or not op.symbol
            text = self.use(arg, bare=inside)
            texts.append(tamed.format(text) if tamed else text)
        indices = common_indices(a.indices for a in args)
        reduced = any(a.reduced for a in args)
        if not op.symbol:
            if self.random.random() < 0.2:
                texts[-1] = f"{op.params[-1].name}={texts[-1]}"
            return _Value(f"{op.name}({', '.join(texts)})", op.result, indices, reduced)
        text = f"{op.symbol}{texts[0]}" if len(texts) == 1 else f"{texts[0]} {op.symbol} {texts[1]}"
        return _Value(text, op.result, indices, reduced, atom=False)

    def step(self) -> None:
        """One more operation on tiles, rows, columns and scalars."""
        choice = self.random.random()
        if choice < 0.08 and self.casts:
            x = self.source(NUMBER, "mn")
            self.keep(_Value(f"cast({self.use(x, bare=True)}, {self.random.choice(self.casts)})", NUMBER, x.indices))
        elif choice < 0.14:
            x, exponent = self.source(NUMBER, "mn"), self.random.randint(2, 8)
            base = f"tanh({self.use(x, bare=True)})" if self.tame else self.use(_Value(self.use(x), atom=not x.text.startswith("-")))
            self.keep(_Value(f"{base} ** {exponent}", NUMBER, x.indices, atom=False))
        elif choice < 0.17:
            self.keep(self.source(NUMBER, "mn"), assign=1)  # a plain alias
        else:
            op = self.random.choice(_COMPUTED)
            indices = "mn" if self.random.random() < 0.8 else self.random.choice(("m", "n", ""))
            self.keep(self.apply(op, [self.source(p.kind, indices) for p in op.params]))

    def product(self) -> None:
        """Of operands, or of what is computed of them, under a name."""
        self.keep(_Value(f"dot({self.operand('a', 'mk')}, {self.operand('b', 'kn')})"), assign=1)

    def operand(self, name: str, indices: str) -> str:
        value = _Value(name, NUMBER, indices)
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            op = self.random.choice([op for op in _COMPUTED if op.result == NUMBER])
            position = self.random.choice([i for i, p in enumerate(op.params) if p.kind == NUMBER])
            value = self.apply(op, [value if i == position else self.source(p.kind, indices) for i, p in enumerate(op.params)])
        return self.use(value, bare=True)

    def reduction(self) -> None:
        """One finished reduction, sometimes with arithmetic after it."""
        row = self.random.choice((*ops.REDUCTIONS, "bgrad", "mean"))
        axes = "m" if row == "bgrad" else self.random.choice(("m", "n", "") if row == "mean" else ("m", "n", "", "k"))
        if axes == "k":
            operand = self.random.choice("ab")
            value = _Value(f"{row}({operand}, k)", NUMBER, {"a": "m", "b": "n"}[operand], True)
        else:
            tiles = [v for v in self.pool if v.kind == NUMBER and v.indices == "mn" and not v.reduced]
            text = self.use(self.random.choice(tiles), bare=True)
            value = _Value(f"{row}({text})" if row == "bgrad" or not axes else f"{row}({text}, {axes})", NUMBER, {"m": "n", "n": "m", "": ""}[axes], True)
        for _ in range(self.random.choice((0, 0, 1, 2))):
            op = self.random.choice([op for op in _COMPUTED if op.result == NUMBER])
            position = self.random.choice([i for i, p in enumerate(op.params) if p.kind == NUMBER])
            value = self.apply(op, [value if i == position else self.partner(p.kind, value.indices) for i, p in enumerate(op.params)])
        self.keep(value)

    def partner(self, kind: str, indices: str) -> _Value:
        """What a reduction may meet: its own indices or a scalar."""
        x = self.source(NUMBER, indices)
        return x if kind == NUMBER else _Value(f"{self.use(x)} > {self.constant().text}", BOOLEAN, x.indices, atom=False)

    def outputs(self) -> list[str]:
        """Every assigned name is used, and so is mm."""
        tiles = [v for v in self.pool if v.kind == NUMBER and v.indices == "mn" and not v.reduced]
        read = set(re.findall(r"\w+", " ".join(s.partition(" = ")[2] for s in self.statements)))
        left = [v for v in self.pool if _is_name(v.text) and v.text not in read]
        results = [v for v in left if v.reduced or (v.indices == "mn" and v.kind == NUMBER)]
        # reductions without a name are outputs too, or they would not be there at all
        results += [v for v in self.pool if v.reduced and not _is_name(v.text)]
        masks = [v for v in left if v.kind == BOOLEAN and v.indices == "mn"]
        others = [v for v in left if not v.reduced and v.indices != "mn"]
        if others or not results:
            main = tiles[-1]
            if main in results:
                results.remove(main)
            text = self.use(main, bare=not others)
            for v in others:
                text = f"{text} + {self.use(v)}" if v.kind == NUMBER else f"where({self.use(v, bare=True)}, {text}, 0)"
            results.append(_Value(text, atom=not others))
        texts = [self.use(v, bare=True) for v in results] + [f"bitmask({self.use(v, bare=True)})" for v in masks]
        if self.casts:
            texts = [
                f"cast({t}, {self.random.choice(self.casts)})" if v.kind == NUMBER and self.random.random() < 0.2 else t
                for t, v in zip(texts, [*results, *masks], strict=True)
            ]
        if self.random.random() < 0.2:
            p = self.source(BOOLEAN, "mn")
            if p.indices == "mn":
                texts.append(f"bitmask({self.use(p, bare=True)})")
        texts = list(dict.fromkeys(texts))
        self.random.shuffle(texts)
        if not re.search(r"\b(mm|dot)\b", " ".join([*self.statements, *texts])):
            texts.append("mm")
        return texts


def _is_name(text: str) -> bool:
    return text in _NAMES


_SECOND = "dot(a, other[k,n])"


def with_second(random: random_module.Random, text: str) -> str:
    """A program, in some places with a second product instead of mm; as it is where there is no mm, and now and then."""
    found = [m.span() for m in re.finditer(r"\bmm\b", text)]
    if not found or random.random() < 0.2:
        return text
    if len(found) == 1:
        instead = f"(mm - {_SECOND})"
    else:
        found, instead = random.sample(found, random.randrange(1, len(found))), _SECOND
    for start, end in sorted(found, reverse=True):
        text = text[:start] + instead + text[end:]
    return text


_POSITIONS = {
    "scale_a[m]": "(0.01 * m)",
    "weight[m]": "(m - 7)",
    "scale_b[n]": "(n * n)",
    "shift[n]": "(3 - 0.1 * n)",
    "aux[m, n]": "aux[m % P, n]",
    "gate[m,n]": "tanh(m - n)",
    "up[m,n]": "where(n <= m, mm, 0)",
}
_RANDOM = {"gate[m,n]": "uniform(seed)", "up[m,n]": "dropout(mm, 0.25, seed)", "aux[m, n]": "dropout(aux[m, n], 0.5, other_seed)"}

_BLOCKS = {
    "scale_a[m]": "scale_a[m/3]",
    "scale_b[n]": "scale_b[n/4]",
    "aux[m, n]": "aux[m/2, n/16]",
    "gate[m,n]": "gate[m,n/64]",
    "norm[k]": "norm[k/8]",
    "left[m,k]": "left[m,k/32]",
    "right[k,n]": "right[k/5,n/2]",
}


def with_positions(random: random_module.Random, text: str) -> str:
    """A program, with what is computed of positions in place of some inputs."""
    return _with(random, text, _POSITIONS)


def with_random_numbers(random: random_module.Random, text: str) -> str:
    """A program, with random numbers, and what is dropped by some, in place of some inputs."""
    return _with(random, text, _RANDOM)


def with_blocks(random: random_module.Random, text: str) -> str:
    """A program, with one value for several of an index in place of some inputs."""
    return _with(random, text, _BLOCKS)


def _with(random: random_module.Random, text: str, others: Mapping[str, str]) -> str:
    for declared, instead in others.items():
        if random.random() < 0.7:
            text = text.replace(declared, instead)
    return text


def write_program(
    random: random_module.Random, most: int = 20, tame: bool = False, reductions: bool = True, casts: Iterable[DType] = OPERANDS, operands: bool = False
) -> str:  # fmt: skip
    """A well-typed program of at most `most` operations, not counting those that keep it tame.

    tame: arguments are bounded so that finite inputs give finite values of moderate size. casts: the dtypes that casts may name.
    operands: the product is written as dot, and something may be computed of its operands.
    """
    writer = _Writer(random, tame, tuple(casts))
    if operands:
        writer.product()
    else:
        writer.pool.append(_Value("mm"))
    count = random.randint(1, most)
    reduced = random.randint(0, min(3, count)) if reductions and random.random() < 0.5 else 0
    for _ in range(count - reduced):
        writer.step()
    for _ in range(reduced):
        writer.reduction()
    outputs = writer.outputs()
    separator = random.choice(("; ", ";", "\n", " ;  "))
    return separator.join([*writer.statements, ", ".join(outputs)])


# names that Triton, torch, the templates or the runtime have a use for
ODD_NAMES = tuple(
    """debug options params backend grid warmup enable_fp_fusion target key kernel fn args kwargs device stream dtype shape seed config cls lib x y e r u w s1 cdf pdf
    tail large small log1p top np numpy inspect knobs cache grad saved output result workspace num_ctas maxnreg arch gate_ptr acc tl pid offs_m stride_am num_pid BLOCK_M
    rows cols row col i j index offset base axis name types module launch run store_ load_ tile tiles_ desc tensor pointer M_ N_ K_ k1 EVEN width height lo hi signature
    constants save of tune main_grad epilogue wrt weight input other out1 outs t0 t1x mm_ mask_ bias_ residual1 print len range min_ int float abs1 __x _y""".split()
)


def renamed(random: random_module.Random, text: str, legal: bool = True) -> str:
    """The program with other names, odd ones, in place of some. legal: those alone that it may have."""
    declared = [
        n
        for n in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text))
        if n in _NAMES or n in ("gate", "up", "aux", "scale_b", "shift", "scale_a", "weight", *_SCALARS, "keep", "drop")
    ]
    pool = [n for n in ODD_NAMES if n not in declared and (not legal or (n[0] != "_" and refused_name(n) is None and not near_miss(n, (*PREDECLARED, "mask"))))]
    random.shuffle(pool)
    taken = set(map(letters, declared))
    chosen: dict[str, str] = {}
    for name in declared:
        new = pool.pop() if pool else name
        if random.random() < 0.5 and (not legal or (letters(new) not in taken and refused_name(new, scalar=name in _SCALARS) is None)):
            chosen[name] = new
            taken.add(letters(new))
    # not a parameter's name, as in leaky_relu(x, slope=…)
    return re.sub(r"[A-Za-z_]\w*(?!=[^=])", lambda found: chosen.get(found[0], found[0]), text) if chosen else text


# -- hostile texts

NASTY = (
    "__import__('os').system('touch epigen_was_here')", "().__class__.__bases__[0]", "lambda: mm", "[mm for mm in mm]", "f'{mm}'", "'text'", "b'x'", "import os",
    "from os import *", "1e999", "-1e-60", "0x" + "f" * 300, "9" * 5000, "1" + "0" * 400, "1_000", "1j", "None", "True", "...", "def", "yield", "await mm", "mm.T", "mm()()", "(",
    ")", "[", "]", "{", "}", "((((((((((", "))))", "\x00", "\u0430", "\uff4d\uff4d", "\u200b", "\U0001f600", "\ud800", "\\", "\\\n", "#", "'", '"', "'''", ";", ";;", ",", "=", "==", ":=",
    "->", "**", "** 2", "** -1", "** 99", "** mm", "//", "%", "@", "^", "<<", "not", "and", "or", "is", "in", "if mm else", "*mm", "**mm", "tl", "tl.load", "print", "len",
    "exec('1')", "eval('1')", "a", "b", "k", "m", "n", "mm", "mask", "bias", "out", "out0", "t0", "acc", "sum(a, k)", "sum(b, k)", "bits(mask)", "bitmask(mm > 0)", "bgrad(mm)",
    "logsumexp(mm, n)", "[m,n]", "[k]", "[m,m]", "[]", "[0]", "[m:n]", "cast(mm, fp8e4m3)", "cast(mm, float)", "fp16", "drelu(mm, mask)", "~", "~~", "- -", "-" * 90, "relu(" * 30,
    "\n", "\t", "\r", "\n    ", "x = ", "mm = ", "mask = ", "with x: pass", "while 1: pass", "@mm", "global x", "type x = int", "match mm:", "0777", "1.e", "1if 1else 1", "x" * 100, "_x", "__x__",
)  # fmt: skip

_TOKEN = re.compile(r"\w+|\s+|\*\*|[<>=!]=|.", re.DOTALL)


def damage(random: random_module.Random, text: str) -> str:
    """The text with one to four random mistakes: a flipped character, swapped, lost or doubled tokens, or a nasty piece put in."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        tokens = _TOKEN.findall(text) or [""]
        at, other = random.randrange(len(tokens)), random.randrange(len(tokens))
        match random.randrange(7):
            case 0:
                spot = random.randrange(len(text) + 1)
                text = text[:spot] + chr(random.choice((random.randrange(32, 127), random.randrange(0x110000)))) + text[spot + 1 :]
                continue
            case 1:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 2:
                del tokens[at]
            case 3:
                tokens.insert(other, tokens[at])
            case 4:
                tokens.insert(at, random.choice(NASTY))
            case 5:
                tokens[at] = random.choice(NASTY)
            case 6:
                first, last = sorted((at, other))
                tokens[first:last] = tokens[first:last] * 2 if last - first < 40 else []
        text = "".join(tokens)
    return text


_NESTS = (
    ("(", ")"), ("relu(", ")"), ("-(", ")"), ("(mm + ", ")"), ("where(mm > 0, ", ", 0)"), ("[", "]"), ("{", "}"), ("lambda x=(", "): 1"), ("(x := ", ")"), ("mm[", "]"),
    ("sum(", ")"), ("f'{", "}'"), ("-", ""), ("~", ""), ("not ", ""), ("", " + 1"), ("", " ** 2"), ("", ".T"), ("", "()"), ("", "[m]"), ("", " < 1"), ("", " if 1 else 1"), ("", "; mm"),
    ("x = ", ""), ("await ", ""), ("", ", mm"), ("- ", " - 1"), ("cast(", ", fp16)"), ("bitmask(", " > 0)"), ("\n", ""), ("#\n", ""), ("    ", "\n"), ("if mm:\n ", ""),
)  # fmt: skip
_DIGITS = ("0", "9", "123456789", "1e", ".", "e-", "_", "0x", "f", "1.7976931348623157e308", "3.4028235e38", "1e-38", "j", "inf", "nan", "-")
_SOUP = (
    "mm", "bias", "residual", "mask", "gate", "[m,n]", "[n]", "[m]", "(", ")", "+", "-", "*", "/", ">", "&", "|", "~", "==", "=", ";", ",", " ", "\n", "0", "1.5", "relu", "gelu",
    "where", "sum", "max", "logsumexp", "bgrad", "cast", "fp16", "int8", "bitmask", "bits", "** 2", "m", "n", "k", "a", "b", "z", "out", "out0", "slope=",
)  # fmt: skip


def hostile(random: random_module.Random) -> str:
    """A text that is rarely a program: damaged, nested, long, of odd names, numbers or characters."""
    match random.randrange(12):
        case 0:
            nests = [random.choice(_NESTS) for _ in range(random.randint(1, 3))]
            count = random.choice((3, 20, 99, 101, 190, 700, 2500, 9000))
            return "".join(left for left, _ in nests) * count + "mm" + "".join(right for _, right in reversed(nests)) * count
        case 1:
            return f"mm * {''.join(random.choice(_DIGITS) for _ in range(random.randint(1, 12)))}{random.choice(('', '0' * 5000, ' + bias'))}"
        case 2 | 3:
            return renamed(random, write_program(random), legal=False)
        case 4:
            return "".join(random.choice(_SOUP) for _ in range(random.randint(1, 60)))
        case 5:
            letters_of = random.choice((range(32), range(127, 0x300), range(0x2000, 0x2100), range(0xD7F0, 0xE010), range(0x110000)))
            text = write_program(random, 4)
            at = random.randrange(len(text) + 1)
            return text[:at] + "".join(chr(random.choice(letters_of)) for _ in range(random.choice((1, 2, 40)))) + text[at:]
        case 6:
            piece = random.choice(
                (
                    "mm + {}, ",
                    "z{} = mm + {}; ",
                    "rleu{}(mm), ",
                    "mm * s{}, ",
                    "alpha{} + alhpa{}, ",
                    "cast(mm, fp{}), ",
                    "mm > {}, ",
                    "g{}[m,n] * mm, ",
                    "max(mm, {}), ",
                    "q = mm; ",
                )
            )
            count = random.choice((5, 200, MAX_NODES // 6, MAX_NODES // 2, MAX_NODES, MAX_CHARACTERS // len(piece)))
            return "".join(piece.replace("{}", str(i)) for i in range(count)) + "mm"
        case _:
            return damage(random, damage(random, write_program(random)) if random.random() < 0.3 else write_program(random))
