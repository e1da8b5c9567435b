"""The typed, immutable graph of a product and what is around it, in canonical order.

Invariants: a node's arguments stand before it; no two nodes are equal; every node is reached from an output. Equal programs (but
for spacing, unused structure and the order of assignments) give equal graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from epigen.dtypes import INT64, UINT8, DType
from epigen.ops import NUMBER, TABLE

# node kinds beside the rows of the operation table
DOT, INPUT, BITS, OPERAND, CONSTANT, EXTENT, POSITION, UNIFORM = "dot", "input", "bits", "operand", "constant", "extent", "position", "uniform"
CAST, BITMASK, REDUCE, BLOCKWISE = "cast", "bitmask", "reduce", "blockwise"
PACKED = "packed"
"""Kind of a value that holds one bit an element, beside the operation table's NUMBER and BOOLEAN."""
ENDS = "ends"
"""Kind of what a call names the ends of its groups by: whole numbers that nothing is computed of."""
SEED = "seed"
"""Kind of an input that random numbers are drawn by: 64 bits, and no number that is computed with."""

INDICES = "mkn"
"""The index classes, in the order in which each value names its own: "mn" of a result, "mk" and "kn" of operands."""
OPERANDS = {"a": "mk", "b": "kn"}
"""What a product multiplies, with the indices of each."""

GROUPS = "groups"
"""What a call names the ends of its groups by: of rows of `a`, each of which meets a matrix of `b`, or of k, each of which makes a product."""

PRODUCT = "mm"
"""What the language calls the product: its name where it is an input, and whose gradient is meant; and the kind of its node where that is a leaf."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value.

    op: a row of the operation table or one of the node kinds above.
    args: of a product, its operands: a[m,k] and b[k,n] as they are given, or what is computed of each; of a second one the same of a, and an input [k,n];
        of random numbers their seed.
    indices: which of INDICES it varies over, in that order. Along k only operands do, and what they are computed of.
    kind: NUMBER, BOOLEAN, PACKED or SEED.  reduced: computed from a finished reduction.
    value: a constant's.  name: an input's or operand's, that of a second product's right operand, the index of an extent or a position, or the reduction's row.
    axes: what a reduction contracts; along which one of blocks does, whose result all elements of its block have; along which an operand holds two values in
        a byte.
    periods: of an input whose rows or columns begin anew, of each index what a program calls their number, and "" of one that has none; () of all others.
    blocks: of an input with one value for several of an index, of each index how many, and 1 of one that has none; of a reduction of blocks what they
        are; () of all others.
    dtype: a cast's; of an operand with two values in a byte, theirs.  label: the name that the user gave the value ("" if none); no part of its meaning.
    """

    op: str
    args: tuple[int, ...]
    kind: str
    indices: str
    reduced: bool = False
    value: float = 0.0
    name: str = ""
    axes: str = ""
    dtype: DType | None = None
    periods: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    label: str = field(default="", compare=False)


GIVEN = tuple(Node(OPERAND, (), NUMBER, indices, name=name) for name, indices in OPERANDS.items())
"""The operands as they are given."""


def is_given(node: Node) -> bool:
    """Whether a node is an operand as it is given."""
    return node.op == OPERAND and node.dtype is None


@dataclass(frozen=True, slots=True)
class Output:
    """One result: the value, and the dtype that an outermost cast gave it (None: the default of the call). block: how many columns of a tile share one of its
    values."""

    name: str
    node: int
    dtype: DType | None
    block: int = 1


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    text: str = field(compare=False)
    """The program in canonical text."""

    def inputs(self) -> tuple[Node, ...]:
        """The named inputs, packed masks among them, in order of first use; operands and mm are not listed."""
        return tuple(n for n in self.nodes if n.op in (INPUT, BITS))

    def positions(self) -> str:
        """The indices along which positions are values."""
        return common_indices(n.name for n in self.nodes if n.op == POSITION)

    def numbered(self) -> str:
        """The indices along which it counts which row or column one is: by its number, or by that within a period or of a block, or as random numbers do."""
        drawn = (n.indices for n in self.nodes if n.op == UNIFORM)
        return common_indices([self.positions(), *drawn, *(shared_along(n) for n in self.inputs())])

    def product(self) -> int | None:
        """The number of the node of the product of a and b; None where the program is over a product that is given."""
        return next((i for i, n in enumerate(self.nodes) if n.op == DOT and not n.name), None)

    def second(self) -> Node | None:
        """The input [k,n] that is the right operand of a second product, of which a is the left one, if there is one."""
        return next((self.nodes[n.args[1]] for n in self.nodes if n.op == DOT and n.name), None)

    def computed(self) -> tuple[str, ...]:
        """Names of the operands of which something is computed that is then multiplied."""
        product = self.product()
        return () if product is None else tuple(name for name, arg in zip(OPERANDS, self.nodes[product].args, strict=True) if not is_given(self.nodes[arg]))

    def packed(self) -> Node | None:
        """The operand b, where it holds two values in a byte."""
        return next((n for n in self.nodes if n.op == OPERAND and n.dtype is not None), None)

    def packed_along(self) -> str:
        """The index along which it does, if it does."""
        packed = self.packed()
        return "" if packed is None else packed.axes

    def leaves(self, root: int) -> set[int]:
        """The products, reductions and leaves that a value is computed of element by element."""
        found, seen, pending = set[int](), {root}, [root]
        while pending:
            number = pending.pop()
            if self.nodes[number].op in (DOT, REDUCE) or not self.nodes[number].args:
                found.add(number)
                continue
            new = set(self.nodes[number].args) - seen
            seen |= new
            pending += new
        return found

    def reductions(self, root: int) -> set[int]:
        """The reductions among `leaves`."""
        return {number for number in self.leaves(root) if self.nodes[number].op == REDUCE}

    def carried(self) -> tuple[int, ...]:
        """The reductions over k that tiles are computed of: a kernel's loop over k carries them along."""
        over_k = {number for number, node in enumerate(self.nodes) if node.op == REDUCE and node.axes == "k"}
        if not over_k:
            return ()
        roots = [o.node for o in self.outputs if self.nodes[o.node].indices == "mn"] + [n.args[0] for n in self.nodes if n.op == REDUCE and n.axes != "k"]
        return tuple(sorted(over_k.intersection(itertools.chain.from_iterable(map(self.reductions, roots)))))

    def row_values(self) -> tuple[int, ...]:
        """The values of rows, and of columns, that are computed of such reductions alone, and that tiles or outputs are computed of directly."""
        carried, taken = set(self.carried()), {a for n in self.nodes if n.indices == "mn" for a in n.args} | {o.node for o in self.outputs}
        values = [i for i, n in enumerate(self.nodes) if i in taken and n.reduced and n.indices in ("m", "n") and n.op not in (DOT, INPUT)] if carried else []
        return tuple(i for i in values if self.reductions(i) <= carried)

    def through_operands(self) -> bool:
        """Whether an operand's gradient is more than the product of that of mm and the other one: it is computed before it is multiplied, or reduced over k for the tiles."""
        return bool(self.computed() or self.carried())

    def vectors(self) -> tuple[str, ...]:
        """Names of the outputs [m] and [n] that are computed of reductions which are carried along, and so are there with the tiles."""
        carried = set(self.carried())
        if not carried:
            return ()
        vectors = [o for o in self.outputs if self.nodes[o.node].indices in ("m", "n")]
        return tuple(o.name for o in vectors if (reductions := self.reductions(o.node)) and reductions <= carried)

    def factors(self, number: int, converted: bool) -> tuple[int, tuple[int, ...]]:
        """Of what is multiplied of an operand, what neighbours along k do not share, and its factors that they do: a kernel may multiply the sum over those neighbours instead.

        converted: whether the operand has another dtype than its product, of which any factor is one; else some factor has to lie in blocks along k.
        """

        def shared(at: int) -> bool:
            node = self.nodes[at]
            along_k = node.op == INPUT and "k" in node.indices and "k" not in shared_along(node)
            return node.op != OPERAND and not along_k and all(map(shared, node.args))

        value, found = number, list[int]()
        while self.nodes[value].op in ("mul", "scale"):
            own = [arg for arg in self.nodes[value].args if not shared(arg)]
            if len(own) != 1:
                break
            found += [arg for arg in self.nodes[value].args if arg != own[0]]
            value = own[0]
        return (value, tuple(reversed(found))) if converted or any("k" in self.nodes[f].indices for f in found) else (number, ())

    def scaled(self) -> bool:
        """Whether all that is computed of operands are products with factors, of which neighbours along k share some."""
        product = self.product()
        return product is not None and all(is_given(self.nodes[self.factors(arg, False)[0]]) for arg in self.nodes[product].args)

    def scales(self) -> tuple[Node, ...]:
        """The inputs [k,n] whose values neighbours along k share."""
        return tuple(n for n in self.inputs() if n.indices == "kn" and "k" in shared_along(n))

    def tiles(self) -> tuple[str, ...]:
        """Names of the inputs and outputs with an element for each of the result's, packed masks left out."""
        inputs = [n.name for n in self.inputs() if n.indices == "mn" and n.kind != PACKED and n.op != BITS and not shared_along(n)]
        return (*inputs, *(o.name for o in self.outputs if self.nodes[o.node].indices == "mn" and self.nodes[o.node].kind != PACKED))


def blocks_of(nodes: Sequence[Node]) -> list[int]:
    """Of each value how many columns share one, where it is computed of reductions of such blocks, of rows and of scalars alone; else 1."""
    along_n: list[int] = []  # 0 of what does not vary along n
    for node in nodes:
        if node.op == BLOCKWISE:
            along_n.append(node.blocks[-1])
        elif node.op in TABLE or node.op == CAST:
            along_n.append(math.gcd(*(along_n[a] for a in node.args)))
        else:
            along_n.append(int("n" in node.indices))
    return [max(1, each) for each in along_n]


def given_as(node: Node) -> DType | None:
    """The dtype of an input that can have no other: of a packed mask, or a seed."""
    return UINT8 if node.op == BITS else INT64 if node.kind == SEED else None


def periodic(indices: str, periods: Sequence[str]) -> str:
    """Those of an input's indices that have a period."""
    return "".join(i for i, period in zip(indices, periods, strict=False) if period)


def shared_along(node: Node) -> str:
    """Those of an input's indices along which several share a value: by a period, or by blocks."""
    return periodic(node.indices, node.periods) + "".join(i for i, block in zip(node.indices, node.blocks, strict=False) if block > 1)


def held(indices: str, blocks: Sequence[int], extents: Mapping[str, int]) -> tuple[int, ...]:
    """The extents of an input with these, but for periods."""
    return tuple(-(-extents[i] // block) for i, block in zip(indices, blocks or (1,) * len(indices), strict=True))


def common_indices(several: Iterable[str]) -> str:
    """The indices of what is computed element by element of values with these."""
    present = set("".join(several))
    return "".join(i for i in INDICES if i in present)


def mask_stride(n: int) -> int:
    """Bytes between the rows of a packed mask of N columns: a multiple of 16, as cuBLASLt asks."""
    return -(-n // 128) * 16


def describe_indices(indices: str, periods: Sequence[str] = (), blocks: Sequence[int] = ()) -> str:
    """'[m, n]', '[m % P, n]', '[k/128, n]', '[n]' or 'a scalar'."""
    each = [f"{i}/{b}" if b > 1 else i for i, b in zip(indices, blocks or (1,) * len(indices), strict=True)]
    return f"[{', '.join(f'{i} % {p}' if p else i for i, p in zip(each, periods or [''] * len(indices), strict=True))}]" if indices else "a scalar"
