"""Reverse differentiation: a forward graph -> one graph of its values and of the gradients of `mm` and of its inputs.

Requires a normalised graph. The gradient of a second product has the name of the input that is its right operand. The rules are the operation table's `gradient` texts. Broadcasting is undone by sums over the missing indices,
taken last: every rule is linear in what arrives, so up to there a gradient stays a tile, and each sum is one fused reduction.
A gradient that a selection has made 0 stays 0 where it meets an infinite derivative: of where(mm > 0, mm, exp(mm) - 1) the part of exp is
selected once more after it has been multiplied, for 0 * inf is NaN.
What stands in the way of one kernel is refused: all of it together, each with its place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import epigen.ir.graph as g
from epigen import ops
from epigen.dtypes import INT8, DType
from epigen.errors import DerivationError, Diagnostic, Span
from epigen.ir import rules
from epigen.ir.graph import Graph, Node, Output
from epigen.ir.passes import order
from epigen.ir.unparse import unparse
from epigen.lang.syntax import declared_text
from epigen.ops import BOOLEAN, NUMBER

GRADIENT = "gradient"
"""Node kind of the gradient that arrives at the output of the node's name."""


_APART = "leave its output out of the derivation (of=...), or take it of a stored output, outside the kernel"


@dataclass(frozen=True, slots=True)
class Gradients:
    """nodes: the forward graph's, with their numbers, then the derivative's. wanted: "mm" or an input's name, and its gradient's node."""

    nodes: tuple[Node, ...]
    wanted: tuple[tuple[str, int], ...]


def carries_gradient(graph: Graph, output: Output) -> bool:
    """Whether a gradient can arrive at an output: numbers of a dtype that training computes in; no mask, int8 or fp8."""
    return graph.nodes[output.node].kind == NUMBER and not _quantised(output.dtype)


def _passing(node: Node) -> tuple[Any, ...]:
    """Of each argument, None where no gradient flows to it: past a step, or to what is detached."""
    return rules.gradients(node.op) if node.op in ops.TABLE else node.args


def followed(graph: Graph, of: Collection[str], steps: bool = True) -> frozenset[str]:
    """Of "mm" and the inputs those that outputs follow as numbers; of one that is multiplied, its product. Where they do in steps alone, as sign(mm), the gradient is 0; of what is compared or detached there is none.

    of: names of the outputs whose gradients arrive. steps: whether what is followed in steps alone is among them.
    """
    pending = [o.node for o in graph.outputs if o.name in of and carries_gradient(graph, o)]
    seen, names = set(pending), set[str]()
    while pending:
        node = graph.nodes[pending.pop()]
        if node.op in (g.DOT, g.OPERAND):  # of an operand by itself a reduction along k has come, whose gradient no product gives: `gradients` says so
            names.add(node.name if node.op == g.DOT and node.name else g.PRODUCT)
        elif node.op == g.INPUT:
            names.add(node.name)
        elif node.op != "detach":
            passing = zip(node.args, _passing(node), strict=True)
            further = {a for a, rule in passing if graph.nodes[a].kind == NUMBER and (steps or rule is not None)} - seen
            seen |= further
            pending += further
    return frozenset(names)


def differentiate(graph: Graph, of: Collection[str], wrt: Collection[str]) -> Gradients:
    """of: names of the outputs whose gradients arrive. wrt: "mm" and the inputs whose gradients are wanted, if anything flows to them. Where it flows to what
    an operand is computed of, the gradient of mm is among those that are found: theirs follow from it.

    Raises DerivationError, also where nothing flows to any of them.
    """
    derivative = gradients(graph, of, wrt)
    if not derivative.wanted:
        message = "no gradient flows to mm or to an input"
        hint = "comparisons, masks and steps such as round have none: what is trained has to reach an output as a number that varies with it"
        raise DerivationError(graph.text, [Diagnostic(message, None, hint)])
    return derivative


def gradients(graph: Graph, of: Collection[str], wrt: Collection[str]) -> Gradients:
    """As `differentiate`, but that nothing need flow."""
    tape = _Tape(graph, wrt)
    for output in graph.outputs:
        if output.name in of and carries_gradient(graph, output):
            indices = graph.nodes[output.node].indices
            if output.block > 1:
                tape.refuse(
                    f"no derivative begins at the output '{output.name}', which has one value for each block",
                    None,
                    "leave it out of the derivation (of=...), or list detach(...) of it",
                )
                continue
            tape.add(output.node, indices, tape.node(Node(GRADIENT, (), NUMBER, indices, name=output.name)))
    if not tape.arrived and not tape.mistakes:
        tape.refuse("no output carries a gradient: masks, int8 and fp8 have none", None, "list a number among the outputs, such as relu(mm + bias)")
    wanted = tape.run()
    if tape.mistakes:
        raise DerivationError(graph.text, sorted(tape.mistakes, key=lambda d: d.span.start if d.span else -1))
    return Gradients(tuple(tape.nodes), wanted)


def shared_gradient(text: str, node: Node) -> Diagnostic:
    """Of an input that several elements share a value of: that it has no gradient. text: the program's."""
    match = re.search(rf"(?<!\w){re.escape(f'{node.name}[{declared_text(node.indices, node.periods, node.blocks)}]')}", text)
    what = f"{node.name}{g.describe_indices(node.indices, node.periods, node.blocks)}"
    return Diagnostic(
        f"the gradient of {what} is a sum over all that share an element, which no kernel finishes",
        Span(*match.span()) if match else None,
        f"leave it out (wrt=...), or write {node.name}[{','.join(node.indices)}] and pass it expanded, whose gradient torch sums",
    )


def refused_within(graph: Graph, number: int) -> list[Diagnostic]:
    """Of a value those reductions whose gradient it wants, and that have none: what is to be said of them."""
    tape = _Tape(graph, ())
    seen, pending = {number}, [number]
    while pending:
        at = pending.pop()
        node = graph.nodes[at]
        if node.op == g.REDUCE and rules.reduction_gradient(node.name) is None:
            tape.no_rule(at)
        elif node.op != g.REDUCE:
            further = {a for a, rule in zip(node.args, _passing(node), strict=True) if rule is not None} - seen
            seen |= further
            pending += further
    return tape.mistakes


def _quantised(dtype: DType | None) -> bool:
    return dtype is not None and (dtype == INT8 or dtype.is_fp8)


class _Tape:
    """The nodes so far, and the gradients that have arrived at the forward's nodes.

    A gradient is held as tiles that still have to be summed, by the indices to sum over: at bias[n], the sum over m of a tile, and what
    arrived there directly.
    """

    def __init__(self, graph: Graph, wrt: Collection[str]):
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.numbers = {node: i for i, node in enumerate(graph.nodes)}
        self.arrived: dict[int, dict[str, int]] = {}
        self.mistakes: list[Diagnostic] = []
        self.leads: list[bool] = []
        """Whether a forward node's gradient is needed, for itself or on the way to one that is wanted."""
        for node in graph.nodes:
            wanted = node.op in (g.DOT, g.INPUT) and node.kind == NUMBER and (node.name or g.PRODUCT) in wrt
            wanted |= node.op == g.OPERAND and g.PRODUCT in wrt
            passing = _passing(node)
            leads = bool(passing) and any(self.leads[a] for a, rule in zip(node.args, passing, strict=True) if rule is not None)
            self.leads.append(wanted or (node.kind == NUMBER and leads))
        self.grows: list[bool] = []
        """Whether a forward node, or its derivative, may be infinite where what it is computed of is finite."""
        for node in graph.nodes:
            self.grows.append((node.op in ops.TABLE and ops.TABLE[node.op].grows) or (node.op != g.DOT and any(self.grows[a] for a in node.args)))
        self.selected: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Gradients that are 0 where a condition is false: that, if the node itself selects by one, and the gradients that it is made of."""
        self.live: dict[int, int | None] = {}

    def node(self, node: Node) -> int:
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def apply(self, op: str, args: tuple[int, ...], kind: str = NUMBER) -> int:
        indices = "".join(i for i in "mn" if any(i in self.nodes[a].indices for a in args))
        made = self.node(Node(op, args, kind, indices))
        if made >= len(self.graph.nodes) and made not in self.selected:
            self.note(made)
        return made

    def note(self, number: int) -> None:
        """What is known of a new node's zeros."""
        node = self.nodes[number]
        match node.op:
            case "drelu":
                self.selected[number] = (node.args[1], node.args[:1])
            case "where" if self.zero(node.args[2]):
                self.selected[number] = (node.args[0], node.args[1:2])
            case "where" if self.zero(node.args[1]):
                self.selected[number] = (self.apply("not", node.args[:1], BOOLEAN), node.args[2:])
            case "add" | "sub" if all(a in self.selected for a in node.args):
                self.selected[number] = (None, node.args)
            case "neg" | "mul" | "scale" | "div":
                if selecting := tuple(a for a in node.args if a in self.selected):
                    self.selected[number] = (None, selecting[:1])

    def zero(self, number: int) -> bool:
        return self.nodes[number].op == g.CONSTANT and self.nodes[number].value == 0

    def where_live(self, number: int) -> int | None:
        """The condition outside of which a gradient is 0, if it has one."""
        pending = [number]
        while pending:
            each = pending[-1]
            condition, parts = self.selected.get(each, (None, ()))
            if missing := [p for p in parts if p not in self.live]:
                pending += missing
                continue
            pending.pop()
            conditions = [self.live[p] for p in parts]
            either = None
            if conditions and None not in conditions:
                either = functools.reduce(lambda x, y: self.apply("or", (x, y), BOOLEAN), conditions)  # type: ignore[arg-type]
            both = [c for c in (either, condition) if c is not None]
            self.live[each] = self.apply("and", (both[0], both[1]), BOOLEAN) if len(both) == 2 else both[0] if both else None
        return self.live[number]

    def passed(self, rule: Graph, values: Mapping[str, int], grows: bool) -> int:
        """What a rule makes of a gradient. grows: whether it may multiply it with what is infinite."""
        live = self.where_live(values["grad"]) if grows else None
        if live is None:
            return self.rule(rule, values)
        gradient = values["grad"]
        while gradient in self.selected and self.selected[gradient][0] is not None:
            (gradient,) = self.selected[gradient][1]
        return self.apply("drelu", (self.rule(rule, {**values, "grad": gradient}), live))

    def rule(self, rule: Graph, values: Mapping[str, int]) -> int:
        made: list[int] = []
        for node in rule.nodes:
            if node.op == g.INPUT:
                made.append(values[node.name])
            elif node.op == g.CONSTANT:
                made.append(self.node(node))
            else:
                made.append(self.apply(node.op, tuple(made[a] for a in node.args), node.kind))
        return made[rule.outputs[0].node]

    def refuse(self, message: str, number: int | None, hint: str) -> None:
        span = None if number is None else self.place(number)
        self.mistakes.append(Diagnostic(message, span, hint))

    @functools.cached_property
    def named(self) -> tuple[Node, ...]:
        """The forward's nodes, those that have a name as what stands in their place where they are used."""
        nodes = self.graph.nodes
        return tuple(replace(n, op=g.INPUT, args=(), indices="", name=n.label, label="") if n.label else n for n in nodes)

    def place(self, number: int) -> Span | None:
        """Where a forward node's expression stands in the program, if it is written there as epigen writes it."""
        own = replace(self.graph.nodes[number], label="")
        text = unparse(order(Graph((*self.named[:number], own, *self.named[number + 1 :]), (Output("out", number, None),), "")))
        match = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", self.graph.text)
        return Span(*match.span()) if match else None

    def add(self, number: int, had: str, gradient: int) -> None:
        """A gradient that arrives at a node, of the indices `had`: those that the node has not are to be summed over."""
        axes = "".join(i for i in had if i not in self.graph.nodes[number].indices)
        parts = self.arrived.setdefault(number, {})
        parts[axes] = self.apply("add", (parts[axes], gradient)) if axes in parts else gradient

    def run(self) -> tuple[tuple[str, int], ...]:
        for number in reversed(range(len(self.graph.nodes))):
            if self.leads[number]:
                for axes, gradient in self.arrived.get(number, {}).items():
                    self.pass_on(number, axes, gradient)
        wanted = []
        for number, node in enumerate(self.graph.nodes):
            if node.op in (g.DOT, g.INPUT) and self.leads[number] and number in self.arrived:
                wanted.append((node.name or g.PRODUCT, self.total(number)))
        # the gradient of mm first: the others reduce it
        return tuple(sorted(wanted, key=lambda w: w[0] != g.PRODUCT))

    def pass_on(self, number: int, axes: str, gradient: int) -> None:
        """What flows from a node to its arguments."""
        node = self.graph.nodes[number]
        had = "".join(i for i in "mn" if i in node.indices + axes)
        if node.op == g.CAST:
            if _quantised(node.dtype):
                self.refuse(
                    f"a cast to {node.dtype} has no derivative",
                    number,
                    "it rounds to few values and saturates: cast at an output, which then carries no gradient",
                )
            else:
                self.add(node.args[0], had, gradient)
        elif node.op == g.REDUCE:
            self.reduction(number, gradient)
        elif node.op == g.BLOCKWISE:
            self.reduction(number, self.node(replace(node, args=(gradient,), name="sum", label="")))
        elif node.op in ops.TABLE:
            op = ops.TABLE[node.op]
            values = dict(zip((p.name for p in op.params), node.args, strict=True)) | {"grad": gradient, "out": number}
            grows = op.grows or any(self.grows[a] for a in node.args)
            for arg, rule in zip(node.args, rules.gradients(node.op), strict=True):
                if rule is not None and self.leads[arg]:
                    self.add(arg, had, self.passed(rule, values, grows))

    def reduction(self, number: int, gradient: int) -> None:
        node = self.graph.nodes[number]
        (x,) = node.args
        rule = rules.reduction_gradient(node.name)
        if node.axes == "k":
            operand = "a" if node.indices == "m" else "b"
            self.refuse(f"a reduction of the operand '{operand}' gives it a gradient that does not pass through mm", number, _APART)
        elif rule is None:
            self.no_rule(number)
        else:
            self.add(x, "mn", self.rule(rule, {"x": x, "grad": gradient, "out": number}))

    def no_rule(self, number: int) -> None:
        name, over_k = self.graph.nodes[number].name, self.graph.nodes[number].axes == "k"
        what = f"'{name}' has no derivative within one kernel: equal elements share it, and how many there are is known too late"
        self.refuse(what, number, "detach what is computed of it, which is then a scale like any other, or take it outside the kernel" if over_k else _APART)

    def total(self, number: int) -> int:
        """A leaf's gradient in the leaf's own indices, as though none began anew: what shares an element has one each."""
        node = self.nodes[number]
        if any(block > 1 for block in node.blocks):
            self.mistakes.append(shared_gradient(self.graph.text, node))
            return number
        parts = [self.summed(tile, axes) for axes, tile in self.arrived[number].items()]
        total = parts[0]
        for part in parts[1:]:
            total = self.apply("add", (total, part)) if total is not None and part is not None else None
        whole = total is not None and (node.indices == self.nodes[total].indices)
        if total is None or not whole or not (node.indices == "mn" or self.nodes[total].op == GRADIENT or any(self.arrived[number])):
            what = f"{node.name or g.PRODUCT}[{declared_text(node.indices, node.periods)}]" if node.indices else node.name
            self.refuse(
                f"the gradient of {what} follows from reductions alone, and a kernel computes its outputs from tiles", number,
                "make the reductions themselves the outputs, and compute with them outside the kernel; or leave it out (wrt=...)",
            )  # fmt: skip
            return number
        return total

    def summed(self, tile: int, axes: str) -> int | None:
        if not axes:
            return tile
        if self.nodes[tile].indices != "mn":
            return None
        return self.node(Node(g.REDUCE, (tile,), NUMBER, "".join(i for i in "mn" if i not in axes), True, name="sum", axes=axes))
