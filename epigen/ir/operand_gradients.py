"""The gradients of what a product's operands are computed of, as programs of their own.

Of dot(A, B), with A computed of a[m,k] and B of b[k,n], and the gradient G[m,n] of the product, that of A is G B^T, and that of B is A^T G. Each is again a
product, which has the other operand for one of its own; and what passes it on, to a or b and to inputs, is its epilogue. What comes by way of a reduction of a over k is
added there: the gradient of a value that each row has, an input [m], times how that follows the row's elements. The letters follow: in the program
of A's gradients, whose result is [M, K], k is called n, and n, over which it sums, k; in that of B's, whose result is [K, N], k is called m, and m is k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import epigen.ir.graph as g
from epigen.errors import DerivationError, Diagnostic
from epigen.ir.autodiff import GRADIENT, followed, gradients, refused_within, shared_gradient
from epigen.ir.derivation import INPUT, OPERAND, SAVED, Argument, Gradient, OperandGradients
from epigen.ir.graph import Graph, Node, Output
from epigen.ir.passes import order
from epigen.ir.unparse import Names
from epigen.ir.written import through_text
from epigen.ops import NUMBER

_LETTERS = {"a": {"m": "m", "k": "n", "n": "k"}, "b": {"k": "m", "n": "n", "m": "k"}}
"""What each index is called where the gradients of an operand are computed."""
_SIDE = {"a": "m", "b": "n"}
"""What a reduction over k leaves of each."""
_TILE = {"a": "x", "b": "w"}
"""What the operand itself is called there, as an input."""


def operand_gradients(
    graph: Graph, wrt: Collection[str], products: Collection[str], rows: Mapping[int, Argument], saved: Callable[[int], str]
) -> tuple[OperandGradients, ...]:  # fmt: skip
    """Of each operand by which a wanted gradient goes, and of each product. wrt: "a", "b" and inputs, by name. products: those at which a gradient arrives, "mm" and by the name of its right
    operand a second one. rows: of the row values at which a gradient arrives, by number, where that comes from.
    saved: the forward's output that holds the value of a reduction over k, or of what is computed of such, by its number. Raises DerivationError."""
    candidates = []
    for product in (n for n in graph.nodes if n.op == g.DOT and (n.name or g.PRODUCT) in products):
        for operand, side in _SIDE.items():
            here = {} if product.name and g.PRODUCT in products else {i: a for i, a in rows.items() if graph.nodes[i].indices == side}  # once
            candidates.append(_gradients(graph, product, operand, wrt, here, saved))
    return tuple(each for each in candidates if each is not None)


def _gradients(
    graph: Graph, product: Node, operand: str, wrt: Collection[str], rows: Mapping[int, Argument], saved: Callable[[int], str]
) -> OperandGradients | None:  # fmt: skip
    letters, itself = _LETTERS[operand], product.name if product.name and operand == "b" else operand
    inputs = {n.name: n for n in graph.inputs()}
    tile = Names([*inputs, *(n.label for n in graph.nodes)]).fresh(_TILE[operand])
    own, other = (product.args[i] for i in ((0, 1) if operand == "a" else (1, 0)))
    renamed = [_renamed(n, letters) for n in graph.nodes]
    of_tile = tuple(Node(g.INPUT, (), NUMBER, "mn", name=tile) if n.op in (g.OPERAND, g.INPUT) and n.name == itself else n for n in renamed)
    if mistakes := [mistake for i in rows for mistake in refused_within(graph, i)]:  # in the letters that the program has
        raise DerivationError(graph.text, mistakes)
    finished = {f"saved{i}": i for i in dict.fromkeys([*rows, *(r for i in rows for r in graph.reductions(i))])}
    values = [Output("out", own, None), *(Output(f"row{i}", i, None) for i in rows), *(Output(name, i, None) for name, i in finished.items())]
    forward = order(Graph(of_tile, tuple(values), graph.text))
    arrived = ["out", *(f"row{i}" for i in rows)]
    wanted = {tile if name == itself else name for name in wrt} & {n.name for n in forward.inputs()}
    reached = followed(forward, arrived, steps=False)
    if operand == "b" and graph.packed():
        wanted -= {tile}
        if flowing := sorted(wanted & reached):
            message = f"the gradient of '{flowing[0]}' is one of tiles of b, which holds two values in a byte"
            raise DerivationError(graph.text, [Diagnostic(message, None, "leave it out (wrt=...), or write b, and pass it unpacked (epigen.unpack_int4)")])
    if shared := [inputs[name] for name in sorted(wanted & reached) if name in inputs and g.shared_along(inputs[name])]:
        raise DerivationError(graph.text, [shared_gradient(graph.text, node) for node in shared])  # in the letters that the program has
    derivative = gradients(forward, arrived, wanted)
    if not derivative.wanted:
        return None

    # what the product multiplies, the product, then the derivative, at which that arrives; what is finished when a row is, is there
    names = Names([*inputs, tile, *(n.label for n in derivative.nodes)])
    whence: dict[str, tuple[Argument | None, int]] = {}

    def given(base: str, indices: str, argument: Argument | None, number: int) -> Node:
        name = names.fresh(base)
        whence[name] = argument, number
        return Node(g.INPUT, (), NUMBER, indices, name=name)

    there = {o.node: finished[o.name] for o in forward.outputs if o.name in finished}
    before = [*(_of(renamed, other) if graph.nodes[other].op != g.INPUT else g.GIVEN[1:]), *g.GIVEN]  # a second right operand is b to the program
    operands = (len(before) - 2, len(before) - 3) if operand == "a" else (len(before) - 3, len(before) - 1)
    arriving = len(before)
    before.append(Node(g.DOT, operands, NUMBER, "mn"))
    places = {i: arriving if n.op == GRADIENT and n.name == "out" else len(before) + i for i, n in enumerate(derivative.nodes)}
    behind: list[Node] = []
    for i, node in enumerate(derivative.nodes):
        if i in there:
            behind.append(given(node.label or "reduced", node.indices, None, there[i]))
        elif node.op == GRADIENT and node.name != "out":
            number = int(node.name.removeprefix("row"))
            behind.append(given(f"d{graph.nodes[number].label or 'reduced'}", node.indices, rows[number], number))
        else:
            behind.append(before[arriving] if node.op == GRADIENT else replace(node, args=tuple(places[a] for a in node.args)))
    flows = [(itself if name == tile else name, number) for name, number in derivative.wanted]
    called: dict[int, str] = {}
    for name, number in flows:
        if number not in called:
            called[number] = names.fresh(f"d{name}")
    program = through_text([*before, *behind], [Output(name, places[number], None) for number, name in called.items()], graph.text)
    arguments = []
    for item in program.inputs():
        if item.name in whence:
            argument, number = whence[item.name]
            arguments.append(replace(argument, name=item.name) if argument else Argument(item.name, SAVED, saved(number)))
        else:
            arguments.append(_argument(item.name, inputs, letters) if item.name != tile else Argument(tile, OPERAND, itself))
    return OperandGradients(operand, program, tuple(arguments), tuple(Gradient(name, called[number]) for name, number in flows), product.name)


def _renamed(node: Node, letters: Mapping[str, str]) -> Node:
    """A value with its indices as they are called there, in their order."""
    blocks = dict(zip((letters[i] for i in node.indices), node.blocks, strict=False))
    indices = g.common_indices(letters[i] for i in node.indices)
    axes = letters[node.axes] if node.axes and (node.op == g.OPERAND or node.axes == "k") else node.axes
    name = letters[node.name] if node.op == g.EXTENT else node.name
    return replace(node, name=name, indices=indices, axes=axes, blocks=tuple(blocks[i] for i in indices if i in blocks))


def _of(nodes: list[Node], root: int) -> list[Node]:
    """A value and what it is computed of, the value last."""
    return list(order(Graph(tuple(nodes), (Output("", root, None),), "")).nodes)


def _argument(name: str, inputs: Mapping[str, Node], letters: Mapping[str, str]) -> Argument:
    """transposed: where the letters of its rows and columns have changed their order."""
    called = "".join(letters[i] for i in inputs[name].indices)
    return Argument(name, INPUT, name, transposed=called != g.common_indices(called))
