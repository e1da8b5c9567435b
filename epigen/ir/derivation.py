"""What training needs of a program, as plain data: the forward that keeps it, the backward that reads it, and how the two are wired.

`derive` makes it; whoever runs it needs no algebra. By default its `mm` stands
for the gradient that arrives at the forward's first tile output: in a chain of layers that is the product of the next layer's
input-gradient GEMM, into which the derivative and the bias gradient are fused. With "recompute" its `mm` is the forward's own product,
taken again, and the gradient is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from epigen.dtypes import DType
from epigen.ir.graph import Graph
from epigen.shapes import Shape, products

MASK, OUTPUT, PREACTIVATION, RECOMPUTE = "mask", "output", "preactivation", "recompute"
SAVE = (MASK, OUTPUT, PREACTIVATION, RECOMPUTE)
NOTHING = "nothing"
"""What a derivation reports where no tile is needed: every choice is then as good."""

INPUT, SAVED, ARRIVING, OPERAND, ROW = "input", "saved", "gradient", "operand", "row"
"""Where an input of the backward, or of an operand's gradients, comes from."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that the forward keeps and the backward reads.

    output: the forward's output that holds it. extra: written for the derivative alone; else it is one of the program's own outputs.
    indices: "mn", "m", "n" or "". dtype: UINT8 for a packed mask. packed: one bit an element.
    """

    output: str
    extra: bool
    indices: str
    dtype: DType
    packed: bool

    def bytes(self, shape: Shape) -> int:
        m, n, _ = shape[-3:]
        if self.packed:
            return products(shape) * m * -(-n // 8)
        return products(shape) * (m if "m" in self.indices else 1) * (n if "n" in self.indices else 1) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class Option:
    """One way of keeping what the derivative reads. save: one of SAVE, or NOTHING. operands: their dtype. products: how many the program has."""

    save: str
    saved: tuple[Saved, ...]
    operands: DType
    products: int = 1

    def kept_bytes(self, shape: Shape) -> int:
        """Held from forward to backward for the derivative's sake, beyond operands, inputs and the program's own outputs."""
        return sum(s.bytes(shape) for s in self.saved if s.extra)

    def moved_bytes(self, shape: Shape) -> int:
        """Written by the forward for the derivative's sake, and read by the backward beyond what it reads in any case.

        With "recompute" those are the operands, read again, and the gradient, which a product has to write before this one can read it.
        """
        m, n, k = shape[-3:]
        moved = self.kept_bytes(shape) + sum(s.bytes(shape) for s in self.saved)
        return moved + products(shape) * (m * k + self.products * k * n + 2 * m * n) * self.operands.bytes if self.save == RECOMPUTE else moved


@dataclass(frozen=True, slots=True)
class Argument:
    """One named input of the backward program, and where it comes from.

    source: INPUT (the forward's input `of`), SAVED (the forward's output `of`), ARRIVING (the gradient that arrives at the output `of`), OPERAND (the
    forward's operand `of`) or ROW (the gradient of the row value `of`, as `Derivation.rows` has it). transposed: it is that matrix's transpose.
    """

    name: str
    source: str
    of: str
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Gradient:
    """Where the gradient of "mm" or of an input is found; of an input that is multiplied, that of its product.

    output: the backward's output that holds it, in the input's own indices, or the product's. passed: "", or instead the forward's output whose arriving
    gradient it is, unchanged. Two inputs may share one output. periods: of an input whose rows or columns begin anew, as of `ir.graph.Node`: its gradient is what is
    found, summed over all that share an element.
    """

    of: str
    output: str
    passed: str = ""
    periods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperandGradients:
    """The program of the gradients of what one operand of the product is computed of.

    operand: "a" or "b". product: "", or of a second one the input that is its right operand, which stands in the place of b. program: of the gradient of mm, or of that product, G [M, N]. For "a" its operands are G and the transpose of b, and its result is [M, K]; for "b" they
    are the transpose of a, and G, and its result is [K, N]. arguments: its inputs, in its order. gradients: of the operand itself and of inputs, in whose own
    indices they come, whatever letters they have here.
    """

    operand: str
    program: Graph
    arguments: tuple[Argument, ...]
    gradients: tuple[Gradient, ...]
    product: str = ""

    def wiring(self) -> str:
        """Where the operands and inputs of the program come from."""
        of = f"the gradient of {f'the product with {self.product}' if self.product else 'mm'}"
        operands = f"a is {of}; b is the forward's {self.product or 'b'}, transposed" if self.operand == "a" else f"a is the forward's a, transposed; b is {of}"
        renamed = [f"{a.name} is {_whence(a)}{', transposed' * a.transposed}" for a in self.arguments if a.source != INPUT or a.name != a.of or a.transposed]
        return "; ".join([operands, *renamed])


@dataclass(frozen=True, slots=True, repr=False)
class Derivation:
    """A program made ready for training. As text: its two programs, and how they are wired.

    forward: the program; its own outputs first, `results` of them, then what is saved for the derivative alone.
    backward: the program of the gradients. Its mm is the gradient that arrives at the forward's output `product`; where that is "", the
    forward's own product.
    arguments: the backward's inputs, in its order. gradients: of mm and of each input that was asked for and that anything flows to.
    arriving: the program's own outputs at which gradients arrive. save, saved: the choice. options: all that were possible.
    operands: the programs of what the products' operands are computed of; none where they are a and b as they are given, of which the gradients are plain
    products of mm's. An input, or a, that is used in several places has a gradient of each, and the sum of them.
    rows: the gradients, summed along each row, or column, of what is computed of reductions over k and tiles are computed of: what the operands' programs pass on. `of` is what
    the program calls that.
    """

    forward: Graph
    results: int
    backward: Graph
    product: str
    arguments: tuple[Argument, ...]
    gradients: tuple[Gradient, ...]
    arriving: tuple[str, ...]
    save: str
    saved: tuple[Saved, ...]
    options: tuple[Option, ...]
    operands: tuple[OperandGradients, ...] = ()
    rows: tuple[Gradient, ...] = ()

    def __repr__(self) -> str:
        return f"<epigen.Derivation backward: {self.backward.text!r}; forward: {self.forward.text!r}; save: {self.save!r}>"

    def __str__(self) -> str:
        wiring = "".join(f"\n          {line}" for line in self.wiring())
        operands = "".join(f"\nof {o.operand}      {o.program.text}\n          {o.wiring()}" for o in self.operands)
        return f"forward   {self.forward.text}\nbackward  {self.backward.text}{wiring}{operands}\nsaves     {self.save}"

    def wiring(self) -> list[str]:
        """Where the backward's mm and inputs come from, and which gradients need no kernel, a line each."""
        held = [f"mm is {_arriving(self.product)}" if self.product else "mm is the forward's own product, taken again"]
        held += [f"{a.name} is the forward's '{a.of}'" for a in self.arguments if a.source == SAVED and a.name != a.of]
        held += [f"{a.name} is {_arriving(a.of)}" for a in self.arguments if a.source == ARRIVING]
        found = [(g, _arriving(g.passed) if g.passed else g.output) for g in self.gradients if g.passed or g.periods]
        summed = ", summed over all that share an element"
        return ["; ".join(held), *(f"the gradient of {g.of} is {what}{summed if g.periods else ''}" for g, what in found)]


def _whence(argument: Argument) -> str:
    if argument.source == ARRIVING:
        return _arriving(argument.of)
    return f"the backward's gradient of {argument.of}" if argument.source == ROW else f"the forward's {argument.of}"


def _arriving(output: str) -> str:
    return f"the gradient that arrives at '{output}'"
