"""Forward graph -> Derivation: chooses what the forward keeps, and writes both programs.

**Save policy.** The derivative reads values of the forward. Inputs are there anyway, and the results of reductions are a value a row or
column; what it reads of the tiles that depend on mm is kept in one of four ways, each a cut of the forward graph:

    mask            booleans, a bit an element
    output          outputs of the forward, which the caller has anyway
    preactivation   one more tile, of the operands' dtype; the derivative sees it rounded to that, as in eager PyTorch
    recompute       nothing: the product is taken again

The choice is the way that moves the fewest bytes, and of equals the one that keeps the fewest. Traffic comes first because time is what a
training step is short of unless its user says otherwise; memory is bought with it, by asking: "recompute" keeps nothing and costs a second
product, so that it is never chosen where there is another way, and "output" keeps nothing and reads whole elements where a mask reads bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import epigen.ir.graph as g
from epigen.dtypes import FP16, FP32, UINT8, DType
from epigen.errors import CallError, DerivationError, Diagnostic, Span, near_miss
from epigen.ir import autodiff
from epigen.ir.autodiff import GRADIENT, Gradients, carries_gradient, differentiate
from epigen.ir.derivation import (
    ARRIVING,
    INPUT,
    MASK,
    NOTHING,
    OUTPUT,
    PREACTIVATION,
    RECOMPUTE,
    ROW,
    SAVE,
    SAVED,
    Argument,
    Derivation,
    Gradient,
    OperandGradients,
    Option,
    Saved,
)
from epigen.ir.graph import Graph, Node, Output
from epigen.ir.operand_gradients import operand_gradients
from epigen.ir.passes import order
from epigen.ir.unparse import Names
from epigen.ir.written import through_text
from epigen.ops import BOOLEAN, NUMBER

_USUAL = (4096, 4096, 4096)  # where ways are compared: their order hangs on no extent


def derive(graph: Graph, operands: DType = FP16, save: str | None = None, wrt: Iterable[str] | None = None, of: Iterable[str] | None = None) -> Derivation:
    """The derivation of a normalised graph.

    operands: the dtype of a and b, which a saved tile has too. save: one of SAVE; by default the choice of the save policy.
    wrt: "mm" and names of inputs; by default all. Of operands that are computed, or reduced over k for the tiles, also "a" and "b", both of which "mm" stands for. of: names of the outputs that gradients arrive at; by default all that carry any.
    Raises DerivationError for the program, CallError for the rest.
    """
    if not operands.is_float or operands.is_fp8:
        raise CallError(f"{operands} operands have no gradient: train with fp16, bf16 or fp32, and cast for the product alone")
    if save is not None and save not in SAVE:
        raise CallError(f"unknown save={save!r}: {near_miss(str(save), SAVE) or 'it is one of ' + ', '.join(SAVE)}")
    inputs, arriving = (
        [g.PRODUCT, *[*g.OPERANDS] * graph.through_operands(), *(n.name for n in graph.inputs())],
        [o.name for o in graph.outputs if carries_gradient(graph, o)],
    )
    if wrt is not None:
        inputs = _known("input", wrt, inputs)
    if of is not None:
        among = _known("output", of, [o.name for o in graph.outputs])
        arriving = [name for name in arriving if name in among]
    if wrt is not None and "b" in inputs and graph.packed():
        raise CallError("b holds two values in a byte, and has no gradient: leave it out of wrt, or write b, and pass it unpacked (epigen.unpack_int4)")
    of_products = bool({g.PRODUCT, *g.OPERANDS} & set(inputs))
    over_k = _RowValues.of(graph)
    wanted_rows = {name for name, i in over_k.numbers.items() if not _followed_by(graph, i).isdisjoint(inputs)}
    second = [n.name for n in [graph.second()] if n and graph.through_operands()]
    derivative = differentiate(over_k.given, arriving, {*inputs, *wanted_rows, *[g.PRODUCT, *second] * of_products})
    ways = list(_ways(over_k.given, derivative, operands))
    if not ways:
        message = "the gradients need neither mm nor the gradient of a tile, so that no kernel computes them"
        raise DerivationError(graph.text, [Diagnostic(message, None, "list a tile that depends on mm among the outputs")])
    possible = [w.option.save for w in ways]
    chosen = min(ways, key=lambda w: (w.option.moved_bytes(_USUAL), w.option.kept_bytes(_USUAL)))
    if save is not None and chosen.option.save != NOTHING:
        if save not in possible:
            raise CallError(f"save={save!r} does not give the derivative of {graph.text!r} all that it reads: possible are {', '.join(possible)}")
        chosen = ways[possible.index(save)]
    return _assemble(graph, over_k, derivative, chosen, tuple(w.option for w in ways), tuple(arriving), inputs)


@dataclass(frozen=True, slots=True)
class _RowValues:
    """Values of rows and columns that are computed of reductions over k, and that tiles are computed of: to the epilogue's derivative they are inputs like any other.

    given: the program with them as inputs. numbers: of each, by its name there, in the program itself.
    """

    given: Graph
    numbers: Mapping[str, int]

    @classmethod
    def of(cls, graph: Graph) -> _RowValues:
        rows = graph.row_values()
        if not rows:
            return cls(graph, {})
        nodes, numbers = [*graph.nodes], dict[str, int]()
        names = Names(
            [
                *(n.name for n in graph.inputs()),
                *(n.label for i, n in enumerate(nodes) if i not in rows),
                *(o.name for o in graph.outputs if o.node not in rows),
            ]
        )
        for i in rows:
            name = names.fresh(nodes[i].label or "reduced")
            numbers[name] = i
            nodes[i] = replace(nodes[i], op=g.INPUT, args=(), name=name, value=0.0, axes="", dtype=None)
        return cls(order(Graph(tuple(nodes), graph.outputs, graph.text)), numbers)


def _followed_by(graph: Graph, number: int) -> set[str]:
    """What a value of a row, or of a column, follows as a number: inputs, and an operand by its name and as a part of "mm"."""
    followed = autodiff.followed(replace(graph, outputs=(Output("row", number, None),)), ["row"], steps=False)
    operand = "a" if graph.nodes[number].indices == "m" else "b"
    return {*followed, *[operand] * (g.PRODUCT in followed)}


def _known(what: str, names: Iterable[str], known: Collection[str]) -> list[str]:
    if not isinstance(names, Iterable):
        raise CallError(f"the {what}s of a derivation are given by name, and a {type(names).__name__} was given")
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in known:
            raise CallError(f"the program has no {what} '{name}': {near_miss(str(name), known) or f'its {what}s are ' + ', '.join(known)}")
    return names


# -- the ways


@dataclass(frozen=True, slots=True)
class _Way:
    """An option, the nodes that its values belong to, in the same order, and the output whose gradient the backward's mm is ("": none)."""

    option: Option
    nodes: tuple[int, ...]
    product: str


def _ways(graph: Graph, derivative: Gradients, operands: DType) -> Iterable[_Way]:
    """Every way that gives the derivative what it reads."""
    nodes, forward = derivative.nodes, len(graph.nodes)
    second = graph.second()
    from_mm: list[bool] = []  # elementwise
    for node in nodes:
        from_mm.append(node.op == g.DOT or (node.op != g.REDUCE and any(from_mm[a] for a in node.args)))
    kept = {_value(graph, o): o for o in reversed(graph.outputs) if _serves(graph, o, operands)}
    of_blocks = {i for i, block in enumerate(g.blocks_of(nodes)) if block > 1}  # which are reduced again from the tile

    def finished(i: int) -> bool:
        return i < forward and nodes[i].reduced and (i in kept or nodes[i].op in (g.REDUCE, g.INPUT))

    def way(save: str, stop: Callable[[int], bool]) -> _Way | None:
        stops, reached = _cut(derivative, lambda i: finished(i) or (from_mm[i] and i not in of_blocks and stop(i)))
        product = next((o.name for o in graph.outputs if graph.nodes[o.node].indices == "mn" and o.name in reached), "")
        again = g.PRODUCT in reached
        if again != (save == RECOMPUTE) or not (again or product) or (not again and second and second.name in reached):
            return None
        labels = (n.label for i, n in enumerate(nodes) if i not in stops or i in kept)
        names = Names([*(n.name for n in graph.inputs() if not n.reduced), *labels, *(o.name for o in graph.outputs)])
        saved = tuple(_saved(nodes[i], kept.get(i), operands, names) for i in stops)
        return _Way(Option(save, saved, operands, 1 if second is None else 2), stops, "" if again else product)

    nothing = way(NOTHING, lambda _i: False)
    if nothing is not None:
        yield nothing
        return
    tiles = [i for i in _passed_by_all(derivative, finished) if from_mm[i] and i not in of_blocks and i < forward and nodes[i].kind == NUMBER and i not in kept]
    several = (
        way(MASK, lambda i: nodes[i].kind == BOOLEAN),
        way(OUTPUT, lambda i: i in kept),
        # of the tiles that each do alone, the one nearest to the outputs
        way(PREACTIVATION, tiles[0].__eq__) if tiles and not second else None,
        way(PREACTIVATION, lambda i: nodes[i].op == g.DOT) if second else None,  # of two products no tile does alone
        way(RECOMPUTE, lambda _i: False),
    )
    yield from filter(None, several)


def _value(graph: Graph, output: Output) -> int:
    """The node whose value an output holds: of a packed mask the boolean."""
    node = graph.nodes[output.node]
    return node.args[0] if node.op == g.BITMASK else output.node


def _serves(graph: Graph, output: Output, operands: DType) -> bool:
    """Whether the derivative can read an output in place of its value: it is rounded no more than what would be saved instead."""
    node = graph.nodes[output.node]
    if node.op == g.BITMASK:
        return True
    least = FP32 if node.reduced else operands
    return carries_gradient(graph, output) and (output.dtype is None or output.dtype.bits >= least.bits)


def _cut(derivative: Gradients, stop: Callable[[int], bool]) -> tuple[tuple[int, ...], set[str]]:
    """Where the ways down from the gradients end: the nodes that stop them, and the product and the arriving gradients that they reach."""
    stops, reached, seen = [], set(), set()
    pending = [node for _, node in derivative.wanted]
    while pending:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        node = derivative.nodes[number]
        if stop(number):
            stops.append(number)
        elif node.op in (g.DOT, GRADIENT):
            reached.add(node.name or g.PRODUCT)
        else:
            pending += node.args
    return tuple(sorted(stops)), reached


def _passed_by_all(derivative: Gradients, stop: Callable[[int], bool]) -> list[int]:
    """The nodes that lie on all ways down from the gradients to the product, but for those that `stop` ends; from the gradients on.

    A node lies on all of them where no step of any leads past it, from a later node to an earlier one.
    """
    nodes = derivative.nodes
    leads: list[bool] = []  # to the product
    for number, node in enumerate(nodes):
        leads.append(node.op == g.DOT or (not stop(number) and any(leads[a] for a in node.args)))
    starts = {number for _, number in derivative.wanted if leads[number]}
    earliest, passed = min(starts, default=0), []
    seen = set(starts)
    for number in reversed(range(len(nodes))):
        if number not in seen:
            continue
        if earliest >= number:
            passed.append(number)
        following = [a for a in nodes[number].args if leads[a]]
        seen.update(following)
        earliest = min([earliest, *following])
    return passed


def _saved(node: Node, output: Output | None, operands: DType, names: Names) -> Saved:
    if node.kind == BOOLEAN:
        return Saved(output.name if output else names.fresh("saved"), output is None, "mn", UINT8, True)
    if output is not None:
        return Saved(output.name, False, node.indices, output.dtype or (FP32 if node.reduced else operands), False)
    if node.reduced:
        return Saved(names.fresh(node.label or "reduced"), True, node.indices, FP32, False)
    return Saved(names.fresh(node.label or "z"), True, "mn", node.dtype or operands, False)


# -- the programs


def _assemble(
    graph: Graph, over_k: _RowValues, derivative: Gradients, way: _Way, options: tuple[Option, ...], arriving: tuple[str, ...], wrt: Collection[str]
) -> Derivation:  # fmt: skip
    saved = dict(zip(way.nodes, way.option.saved, strict=True))
    inputs = [n.name for n in graph.inputs()]
    periods = {n.name: n.periods for n in graph.inputs()}
    names = Names([*inputs, *(n.label for i, n in enumerate(derivative.nodes) if i not in saved)])

    # the wanted gradients that have to be computed, each once
    own: dict[int, str] = {}
    gradients, rows = list[Gradient](), list[Gradient]()
    for name, number in derivative.wanted:
        node, found = derivative.nodes[number], rows if name in over_k.numbers else gradients
        if node.op == GRADIENT and node.name != way.product:
            found.append(Gradient(name, "", node.name, periods.get(name, ())))
            continue
        if number not in own:
            own[number] = names.fresh(f"d{name}")
        found.append(Gradient(name, own[number], periods=periods.get(name, ())))

    # values of the forward, and gradients, become the backward's inputs; first come the operands of the product that mm is
    sources = {name: Argument(name, INPUT, name) for name in inputs}
    nodes = [*g.GIVEN]
    first = not way.product  # what arrives at the first tile, if the product is the forward's own
    for number, node in enumerate(derivative.nodes):
        node = replace(node, args=tuple(a + len(g.GIVEN) for a in node.args))
        if number in saved:
            s = saved[number]
            name = names.fresh(MASK if s.packed else node.label or (s.output if s.extra else "y"), scalar=not s.indices)
            sources[name] = Argument(name, SAVED, s.output)
            node = Node(g.BITS, (), BOOLEAN, "mn", name=name) if s.packed else Node(g.INPUT, (), NUMBER, s.indices, name=name)
        elif node.op == GRADIENT and node.name == way.product:
            node = Node(g.DOT, (0, 1), NUMBER, "mn")
        elif node.op == GRADIENT:
            name = names.fresh("grad" if first and node.indices == "mn" else f"grad_{node.name}", scalar=not node.indices)
            first = False
            sources[name] = Argument(name, ARRIVING, node.name)
            node = Node(g.INPUT, (), NUMBER, node.indices, name=name)
        nodes.append(node)
    backward = through_text(nodes, [Output(name, number + len(g.GIVEN), None) for number, name in own.items()], graph.text)
    if any(n.op == g.EXTENT and n.name == "k" for n in backward.nodes):
        message = "the derivative computes with the number of k, and is the epilogue of another product, which has another"
        at = graph.text.find("extent(k)")
        raise DerivationError(graph.text, [Diagnostic(message, Span(at, at + 9) if at >= 0 else None, "pass the number as a scalar input")])
    forward = _Forward(graph, over_k, derivative, saved)
    operands = _of_operands(
        graph, over_k, rows, wrt, forward, {n.name or g.PRODUCT for n in graph.nodes if n.op == g.DOT}.intersection(dict(derivative.wanted))
    )
    beside = tuple(forward.beside.values())

    return Derivation(
        forward=forward.extended(),
        results=len(graph.outputs),
        backward=backward,
        product=way.product,
        arguments=tuple(sources[n.name] for n in backward.inputs()),
        gradients=tuple(gradients),
        arriving=arriving,
        save=way.option.save,
        saved=(*way.option.saved, *beside),
        options=tuple(replace(o, saved=(*o.saved, *beside)) for o in options),
        operands=operands,
        rows=tuple(rows),
    )


def _of_operands(
    graph: Graph, over_k: _RowValues, rows: Sequence[Gradient], wrt: Collection[str], forward: _Forward, products: Collection[str]
) -> tuple[OperandGradients, ...]:  # fmt: skip
    """products: those at which a gradient arrives."""
    if not graph.through_operands() or not (products or rows):
        return ()
    if not products:
        message = "a gradient flows to a reduction over k, and none to mm, whose product would take it along to the operand"
        raise DerivationError(graph.text, [Diagnostic(message, None, "leave its output out of the derivation (of=...), or detach what is computed of it")])
    at = {over_k.numbers[r.of]: Argument("", ARRIVING, r.passed) if r.passed else Argument("", ROW, r.of) for r in rows}
    return operand_gradients(graph, [*wrt, *[*g.OPERANDS] * (g.PRODUCT in wrt)], products, at, forward.holding)


class _Forward:
    """The forward with what is saved for the derivative alone as further outputs. beside: of those, by number in the program, what operands' gradients alone need."""

    def __init__(self, graph: Graph, over_k: _RowValues, derivative: Gradients, saved: Mapping[int, Saved]):
        self.graph, self.derivative, self.saved = graph, derivative, saved
        self.beside: dict[int, Saved] = {}
        first = len(graph.nodes)
        self.places = [over_k.numbers.get(n.name, first + i) if n.op == g.INPUT else first + i for i, n in enumerate(derivative.nodes)]
        taken = [*(n.name for n in graph.inputs()), *(n.label for n in graph.nodes), *(o.name for o in graph.outputs), *(s.output for s in saved.values())]
        self.names = Names(taken)

    def holding(self, number: int) -> str:
        """The output that holds a value of a row, or column, of the program's own."""
        of_derivative = (s for i, s in self.saved.items() if self.places[i] == number)
        of_program = (Saved(o.name, False, "", FP32, False) for o in self.graph.outputs if o.node == number and (o.dtype is None or o.dtype.bits >= FP32.bits))
        found = next(itertools.chain(of_derivative, of_program), self.beside.get(number))
        if found is None:
            node = self.graph.nodes[number]
            found = self.beside[number] = Saved(self.names.fresh(node.label or "reduced"), True, node.indices, FP32, False)
        return found.output

    def extended(self) -> Graph:
        extra = [(self.places[i], s) for i, s in self.saved.items() if s.extra] + [*self.beside.items()]
        if not extra:
            return self.graph
        behind = [replace(n, args=tuple(self.places[a] for a in n.args)) for n in self.derivative.nodes]
        nodes, outputs = [*self.graph.nodes, *behind], [*self.graph.outputs]
        for number, s in extra:
            node = nodes[number]
            if s.packed:
                nodes.append(Node(g.BITMASK, (number,), g.PACKED, "mn"))
                outputs.append(Output(s.output, len(nodes) - 1, None))
            elif node.op == g.CAST:  # the store rounds
                outputs.append(Output(s.output, node.args[0], node.dtype))
            else:
                outputs.append(Output(s.output, number, None))
        return through_text(nodes, outputs, self.graph.text)
