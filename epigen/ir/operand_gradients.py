"""The gradients of what a product's operands are computed of, as programs of their own.

Of dot(A, B), with A computed of a[m,k] and B of b[k,n], and the gradient G[m,n] of the product, that of A is G B^T, and that of B is A^T G. Each is again a
product, which has the other operand for one of its own; and what passes it on, to a or b and to inputs, is its epilogue. The letters follow: in the program
of A's gradients, whose result is [M, K], k is called n, and n, over which it sums, k; in that of B's, whose result is [K, N], k is called m, and m is k.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import epigen.ir.graph as g
from epigen.errors import DerivationError, Diagnostic
from epigen.ir.autodiff import GRADIENT, followed, gradients, shared_gradient
from epigen.ir.derivation import INPUT, OPERAND, Argument, Gradient, OperandGradients
from epigen.ir.graph import Graph, Node, Output
from epigen.ir.passes import order
from epigen.ir.unparse import Names
from epigen.ir.written import through_text
from epigen.ops import NUMBER

_LETTERS = {"a": {"m": "m", "k": "n", "n": "k"}, "b": {"k": "m", "n": "n", "m": "k"}}
"""What each index is called where the gradients of an operand are computed."""
_TILE = {"a": "x", "b": "w"}
"""What the operand itself is called there, as an input."""


def operand_gradients(graph: Graph, wrt: Collection[str]) -> tuple[OperandGradients, ...]:
    """Of each operand by which a wanted gradient goes. wrt: "a", "b" and inputs, by name. Raises DerivationError."""
    candidates = (_gradients(graph, operand, wrt) for operand in g.OPERANDS)
    return tuple(each for each in candidates if each is not None)


def _gradients(graph: Graph, operand: str, wrt: Collection[str]) -> OperandGradients | None:
    letters, product = _LETTERS[operand], graph.nodes[graph.product() or 0]
    inputs = {n.name: n for n in graph.inputs()}
    tile = Names([*inputs, *(n.label for n in graph.nodes)]).fresh(_TILE[operand])
    own, other = (product.args[i] for i in ((0, 1) if operand == "a" else (1, 0)))
    renamed = [_renamed(n, letters) for n in graph.nodes]
    of_tile = tuple(Node(g.INPUT, (), NUMBER, "mn", name=tile) if n.op == g.OPERAND and n.name == operand else n for n in renamed)
    forward = order(Graph(of_tile, (Output("out", own, None),), graph.text))
    wanted = {tile if name == operand else name for name in wrt} & {n.name for n in forward.inputs()}
    reached = followed(forward, ["out"], steps=False)
    if operand == "b" and graph.packed():
        wanted -= {tile}
        if flowing := sorted(wanted & reached):
            message = f"the gradient of '{flowing[0]}' is one of tiles of b, which holds two values in a byte"
            raise DerivationError(graph.text, [Diagnostic(message, None, "leave it out (wrt=...), or write b, and pass it unpacked (epigen.unpack_int4)")])
    if shared := [inputs[name] for name in sorted(wanted & reached) if name in inputs and g.shared_along(inputs[name])]:
        raise DerivationError(graph.text, [shared_gradient(graph.text, node) for node in shared])  # in the letters that the program has
    derivative = gradients(forward, ["out"], wanted)
    if not derivative.wanted:
        return None

    # what the product multiplies, the product, then the derivative, at which that arrives
    before = [*_of(renamed, other), *g.GIVEN]
    operands = (len(before) - 2, len(before) - 3) if operand == "a" else (len(before) - 3, len(before) - 1)
    arriving = len(before)
    before.append(Node(g.DOT, operands, NUMBER, "mn"))
    places = {i: arriving if n.op == GRADIENT else len(before) + i for i, n in enumerate(derivative.nodes)}
    behind = [replace(n, args=tuple(places[a] for a in n.args)) if n.op != GRADIENT else before[arriving] for n in derivative.nodes]
    names = Names([*inputs, tile, *(n.label for n in derivative.nodes)])
    flows = [(operand if name == tile else name, number) for name, number in derivative.wanted]
    called: dict[int, str] = {}
    for name, number in flows:
        if number not in called:
            called[number] = names.fresh(f"d{name}")
    program = through_text([*before, *behind], [Output(name, places[number], None) for number, name in called.items()], graph.text)
    return OperandGradients(
        operand,
        program,
        tuple(_argument(n.name, inputs, letters) if n.name != tile else Argument(tile, OPERAND, operand) for n in program.inputs()),
        tuple(Gradient(name, called[number]) for name, number in flows),
    )


def _renamed(node: Node, letters: Mapping[str, str]) -> Node:
    """A value with its indices as they are called there, in their order."""
    blocks = dict(zip((letters[i] for i in node.indices), node.blocks, strict=False))
    indices = g.common_indices(letters[i] for i in node.indices)
    axes = letters[node.axes] if node.op == g.OPERAND and node.axes else node.axes
    return replace(node, indices=indices, axes=axes, blocks=tuple(blocks[i] for i in indices if i in blocks))


def _of(nodes: list[Node], root: int) -> list[Node]:
    """A value and what it is computed of, the value last."""
    return list(order(Graph(tuple(nodes), (Output("", root, None),), "")).nodes)


def _argument(name: str, inputs: Mapping[str, Node], letters: Mapping[str, str]) -> Argument:
    """transposed: where the letters of its rows and columns have changed their order."""
    called = "".join(letters[i] for i in inputs[name].indices)
    return Argument(name, INPUT, name, transposed=called != g.common_indices(called))
