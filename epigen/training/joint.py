"""What a model's backward wants to know of an activation, one bit an element: the pass over the graph in which AOTAutograd has both forward and backward.

torch keeps ReLU's result for the backward, which asks of each element whether it was positive, and so reads a tile for one bit an element. Where the forward's
product is a program it packs the answers, and the backward reads them, by a program or by a kernel of Inductor's: see `bits`. All else is left as it is: what
no product computes, what the same kernel of the backward reads anyway, and graphs without a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils.checkpoint import CheckpointPolicy

from epigen.training import regions, stacked
from epigen.training.aten import is_view, same
from epigen.training.expected import UNTUNED, Terms
from epigen.training.regions import Left, Region
from epigen.training.rewrite import adding, called

_aten: Any = torch.ops.aten
_bitmask: Any = torch.ops.epigen.bitmask.default
_where_bits: Any = torch.ops.epigen.where_bits.default
_tied: Any = torch.ops.epigen.tied.default


@dataclass(frozen=True, slots=True)
class Question:
    """One that the backward asks of each element. node: which does. of: the value of the forward that it asks about. ask, numbers: what, in torch's operations.
    x, y: the places of what it chooses of among the node's arguments, where the answer is yes and where it is no; None for 0. slope: x by this is in y's place."""

    node: fx.Node
    of: fx.Node
    ask: Callable[..., fx.Node]
    numbers: tuple[float, ...]
    x: int = 0
    y: int | None = None
    slope: float | None = None


def keep_bits(graph: fx.Graph, terms: Terms = UNTUNED) -> None:
    """Have the forward pack what the backward asks of it, where a program does so that is expected to pay.

    Packing costs the forward's kernel 1 to 3 % of its time (the shapes in tuning_db whose rows are whole bytes; H100 and H200, 2026-11), and what it
    writes is a sixteenth of a tile of 16 bits, which the backward need not read.
    """
    late = _late(graph)
    questions = [q for node in graph.nodes if node in late and (q := _question(node, late)) is not None]
    if not questions:
        return
    needed = regions.above_of([s for s in graph.output_node().all_input_nodes if s not in late])
    packed = _pack(graph, [q for q, pays in zip(questions, _paying(graph, questions, terms), strict=True) if pays])
    for mask in dict.fromkeys(mask for mask, _ in packed):
        _tie(graph, mask, needed)
    if packed:
        stable_topological_sort(graph)


def part_stacked(graph: fx.Graph, terms: Terms = UNTUNED) -> None:
    """Have the forward take a stacked product part by part, such as a gate and what it is multiplied with, where a program computes both.

    What the backward keeps are then the parts, in place of the whole product, which no such program gives. It is tried on a copy.
    """
    late = _late(graph)
    of_forward = [node for node in stacked.found(graph) if node not in late]
    if not late or not of_forward:
        return
    copy, at = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, at))
    parted = stacked.as_products(copy, [at[node] for node in of_forward])
    forward, _ = _parted(copy, terms)
    taken = [all(isinstance(r := forward.region(made), Region) and r.product.second is not None for made in each.made) for each in parted]
    stacked.as_products(graph, [node for node, both in zip(of_forward, taken, strict=True) if both])
    graph.eliminate_dead_code()


_NAMES = (_aten.alias.default, _aten.detach.default)
_EXTREMES = (_aten.amax.default, _aten.amin.default, _aten.max.default, _aten.min.default)


def keep_compared(graph: fx.Graph) -> None:
    """Have kept what the backward looks for its largest element in, as that of `amax` does: computed again, by another kernel or without being rounded, no element
    need equal what the forward found, and torch would divide by how many do."""
    for node in graph.find_nodes(op="call_function", target=_aten.eq.Tensor):
        given = [_viewed(x) for x in node.all_input_nodes]
        for value in given:
            if value.op == "call_function" and any(x.target in _EXTREMES for x in given if x is not value):
                value.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def compile_ahead(graph: fx.Graph, terms: Terms = UNTUNED) -> None:
    """Have the kernels of the backward compiled while the forward is. Its own graph comes with the first backward, which would wait for them.

    What of the forward is saved and what is computed anew is not known yet, and changes the forward's programs. The backward's are those that its graph has: all 39
    of twelve models of the tests, and all six of layers of BERT-large, GPT-2 XL and OPT (torch 2.13, 2026-11-27).
    """
    late = _late(graph)
    regions.compile_ahead([node for node in regions.products(graph) if node in late], regions.levels_of(graph), terms)


def _viewed(node: fx.Node) -> fx.Node:
    """What a value is a view of, or another name."""
    while is_view(node) or node.target in _NAMES:
        node = node.all_input_nodes[0]
    return node


def settle(graph: fx.Graph, terms: Terms = UNTUNED) -> None:
    """After forward and backward were parted: what held them together goes, and so does a mask that is packed and read in one graph, but by no program.

    There are masks in one graph where the backward computes a part of the forward again.
    """
    for node in graph.find_nodes(op="call_function", target=_tied):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    here = [node for node in graph.find_nodes(op="call_function", target=_where_bits) if node.args[0].target is _bitmask]
    levels, known = regions.levels_of(graph) if here else {}, dict[fx.Node, Region | Left]()
    for node in here:
        mask, x, *y = node.args
        if regions.taking(mask, levels, terms, known) is not None:
            continue
        with adding(graph, node, node):
            chosen = called(graph, _aten.where.self, (mask.args[0], x, y[0] if y else _zero(graph, node)))
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _zero(graph: fx.Graph, similar: fx.Node) -> fx.Node:
    value = similar.meta["val"]
    node = graph.call_function(_aten.full.default, ([], 0), {"dtype": value.dtype, "device": value.device})
    node.meta["val"] = value.new_zeros(())
    return node


def _late(graph: fx.Graph) -> set[fx.Node]:
    """All that depends on a gradient which arrives, but for the output."""
    late = set[fx.Node]()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in str(node.target)) or (node.op != "output" and any(s in late for s in node.all_input_nodes)):
            late.add(node)
    return late


# -- questions


def _not_at_most(graph: fx.Graph, x: fx.Node, t: float) -> fx.Node:
    return called(graph, _aten.logical_not.default, (called(graph, _aten.le.Scalar, (x, t)),))  # NaN is not


def _above(graph: fx.Graph, x: fx.Node, t: float) -> fx.Node:
    return called(graph, _aten.gt.Scalar, (x, t))


def _between(graph: fx.Graph, x: fx.Node, low: float, high: float) -> fx.Node:
    return called(graph, _aten.logical_and.default, (_above(graph, x, low), called(graph, _aten.lt.Scalar, (x, high))))


def _itself(_graph: fx.Graph, condition: fx.Node) -> fx.Node:
    return condition


def _question(node: fx.Node, late: Collection[fx.Node]) -> Question | None:
    """The same as in the programs that `aten` has for these operations."""
    question = None
    given: Any = node.args
    match node.target, given:
        case _aten.threshold_backward.default, (_, of, t):
            question = Question(node, _named(of), _not_at_most, (t,))
        case _aten.hardtanh_backward.default, (_, of, low, high):
            question = Question(node, _named(of), _between, (low, high))
        case _aten.leaky_relu_backward.default, (_, of, slope, _):
            question = Question(node, _named(of), _above, (0,), slope=slope)
        case _aten.where.self, (of, _, _):
            question = Question(node, of, _itself, (), 1, 2)
    if question is None or question.of in late or next(regions.before(question.of), None) is None:
        return None
    compared, answered = question.of.meta["val"].shape, node.meta["val"].shape
    n = answered[-1] if len(answered) > 1 else 0
    whole = len(compared) == len(answered) and all(map(same, compared, answered))
    return question if whole and isinstance(n, int) and n > 0 and n % 8 == 0 else None


def _named(node: fx.Node) -> fx.Node:
    """What a value is another name of."""
    while node.target in _NAMES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _pack(graph: fx.Graph, questions: Sequence[Question]) -> list[tuple[fx.Node, fx.Node]]:
    """Answer each by a packed mask. Returns of each the mask, made where what is asked about was computed, and what has taken its node's place."""
    masks: dict[Any, fx.Node] = {}
    packed = []
    for q in questions:
        key = q.of, q.ask, q.numbers
        if key not in masks:
            with adding(graph, q.of.next, q.of):
                masks[key] = called(graph, _bitmask, (q.ask(graph, q.of, *q.numbers),))
        with adding(graph, q.node, q.node):
            chosen = called(graph, _where_bits, (masks[key], *_choices(graph, q)))
        q.node.replace_all_uses_with(chosen)
        graph.erase_node(q.node)
        packed.append((masks[key], chosen))
    return packed


def _choices(graph: fx.Graph, q: Question) -> list[Any]:
    x = q.node.args[q.x]
    if q.slope is not None:
        return [x, called(graph, _aten.mul.Tensor, (x, q.slope))]
    return [x] if q.y is None else [x, q.node.args[q.y]]


def _tie(graph: fx.Graph, mask: fx.Node, needed: set[fx.Node]) -> None:
    """Have a result of the forward need a mask: the nearest value of those that it is computed of and that a result needs. needed: what results need."""
    own = regions.above_of([mask])
    pending = [mask]
    for node in pending:
        users = [u for u in node.users if u not in own]
        if node in needed and any(u in needed or u.op == "output" for u in users):
            with adding(graph, mask.next, node):
                value = called(graph, _tied, (node, mask))
            node.replace_all_uses_with(value, delete_user_cb=users.__contains__)
            needed |= {value, *own}
            return
        pending += [s for s in node.all_input_nodes if s not in pending]


# -- which are worth it


def _paying(graph: fx.Graph, questions: Sequence[Question], terms: Terms) -> list[bool]:
    """Of each question whether a program packs the answer, and the kernel that reads it does not read what it is about anyway. It is tried on a copy."""
    copy, at = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, at))
    packed = _pack(copy, [replace(q, node=at[q.node], of=at[q.of]) for q in questions])
    forward, backward = _parted(copy, terms)
    return [_spares(mask, chosen, forward, backward) for mask, chosen in packed]


def _spares(mask: fx.Node, chosen: fx.Node, forward: _Part, backward: _Part) -> bool:
    packs, reads = forward.region(mask), backward.region(chosen)
    if packs is None:
        return False
    inside = set(packs.nodes)
    above = {node for node in regions.above_of([mask]) if forward.at[node] in inside}
    level = backward.levels[backward.at[chosen]]
    kernel = reads.nodes if reads is not None else [node for node in backward.graph.nodes if regions.joins(node) and backward.levels[node] == level]
    given = {backward.source[s] for node in kernel for s in node.all_input_nodes if s in backward.source}
    return not any(above & _tiles(node) for node in given if node.target is not _bitmask)


def _tiles(node: fx.Node) -> set[fx.Node]:
    """A value, and what it is computed of in one kernel, as far as it varies over more than one dimension."""
    tiles, pending = set[fx.Node](), [node]
    while pending:
        value = pending.pop()
        tensor = value.meta.get("val")
        if value not in tiles and isinstance(tensor, torch.Tensor) and len([e for e in tensor.shape if not same(e, 1)]) > 1:
            tiles.add(value)
            pending += value.all_input_nodes if regions.joins(value) else []
    return tiles


class _Part:
    """The forward or the backward of a graph, with the regions of its products. at: its nodes by those of the whole.
    source: what an input of the backward is in the forward."""

    def __init__(self, terms: Terms):
        self.graph, self.terms = fx.Graph(), terms
        self.at: dict[fx.Node, fx.Node] = {}
        self.source: dict[fx.Node, fx.Node] = {}
        self.known: dict[fx.Node, Region | Left] = {}
        self.levels: regions.Levels = {}

    def add(self, node: fx.Node) -> None:
        self.at[node] = self.graph.node_copy(node, self.at.__getitem__)

    def receive(self, node: fx.Node) -> None:
        """A value of the forward that the backward reads."""
        if node not in self.at:
            self.at[node] = given = self.graph.placeholder(node.name)
            given.meta = dict(node.meta)
            self.source[given] = node

    def end(self, results: Sequence[fx.Node]) -> None:
        self.graph.output(tuple(self.at[node] for node in results))
        self.levels = regions.levels_of(self.graph)

    def region(self, node: fx.Node) -> Region | None:
        """The one that takes a node of the whole."""
        return regions.taking(self.at[node], self.levels, self.terms, self.known)


def _parted(graph: fx.Graph, terms: Terms) -> tuple[_Part, _Part]:
    """As the graphs will be, as far as regions go by it: the backward receives all that it reads of the forward."""
    late = _late(graph)
    forward, backward = _Part(terms), _Part(terms)
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node not in late:
            forward.add(node)
            continue
        for s in node.all_input_nodes:
            if s not in late:
                backward.receive(s)
        backward.add(node)
    forward.end([node for node in forward.at if any(u.op == "output" or u in late for u in node.users)])
    backward.end([node for node in backward.at if node in late and any(u.op == "output" for u in node.users)])
    return forward, backward
