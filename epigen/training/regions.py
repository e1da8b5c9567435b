"""The products of a graph of torch's, and what can be computed of each in the same kernel.

A product's region grows over what `aten` can write as a program, as far as nothing that it reads depends on the region from outside. Then it gives back what
the kernel that comes next computes as well, and takes over what was to be computed before it for its sake alone.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from epigen import gpus
from epigen.dtypes import BY_TORCH, FAST_ACCUM
from epigen.errors import EpigenError
from epigen.gpus import Target
from epigen.runtime.batches import Batch
from epigen.shapes import Shape
from epigen.training import expected, precompile
from epigen.training.aten import (
    BITMASK,
    SAME,
    WHERE_BITS,
    Imported,
    Importer,
    Role,
    Unknown,
    Value,
    elementwise,
    is_view,
    lies_as_rows,
    name_of,
    named_arguments,
    same,
    size_hint,
)
from epigen.training.expected import UNTUNED, Terms
from epigen.training.functions import result_dtype

MOST_TILES = 6
"""Tiles that one kernel reads or writes beside its operands: each holds registers and a place in shared memory."""

_aten: Any = torch.ops.aten
_PRODUCTS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}
"""By operation: how many arguments come before the operands."""
_SCALED_MM: Any = _aten._scaled_mm.default
GROUPED_MM: Any = _aten._grouped_mm.default
LOOP, LOOP_GRADIENTS = "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"
LOOPED = "epigen_looped"
"""What the meta of torch's product of groups has that stands for such a loop."""
_OTHERS = (LOOP, "_grouped_mm", "_scaled_grouped_mm", "_scaled_mm", "_int_mm")

Levels = dict[fx.Node, int]


@dataclass(frozen=True, slots=True)
class Product:
    """One product, or a batch of them. a, b: operands, [M, K] and [K, N], or [B, M, K] and [B, K, N]. added: what is added to it. scale: by how much it and that are
    multiplied. parted: into how many products its rows are parted, and the rows of each, where that is of use.
    factors: what the product is multiplied by besides, before anything is added. fast: whether the tensor cores may add up fp8 products alone.
    second: another product of the same a, which is computed in the same kernel. ends: where groups end, of rows with b [G, K, N] or along k with b [K, N].
    loop: whether torch would take one group after the other, and wait for their ends."""

    node: fx.Node
    a: fx.Node
    b: fx.Node
    added: fx.Node | None = None
    scale: tuple[float, float] = (1.0, 1.0)
    parted: tuple[Any, Any] | None = None
    factors: tuple[fx.Node, ...] = ()
    fast: bool = False
    second: Product | None = None
    ends: fx.Node | None = None
    loop: bool = False

    @property
    def groups(self) -> str:
        """The index along which it is of groups; "" of one product and of a batch."""
        return "" if self.ends is None else "m" if self.b.meta["val"].dim() == 3 else "k"

    @property
    def nodes(self) -> list[fx.Node]:
        return [self.node] if self.second is None else [self.node, self.second.node]

    @property
    def options(self) -> str | None:
        """Of its programs, as the operations take them."""
        return json.dumps({"precision": FAST_ACCUM}) if self.fast else None

    @property
    def dtype(self) -> torch.dtype:
        """What a program's results have that are not cast."""
        return result_dtype(self.a.meta["val"].dtype)

    @property
    def batch(self) -> tuple[Any, Any] | None:
        """How many products they are, and the rows of each; None of one. All that share one b, and whose rows lie as those of one matrix, are one."""
        a, b = self.a.meta["val"], self.b.meta["val"]
        if self.groups == "k":
            return self.node.meta["val"].shape[0], a.shape[0]
        if self.parted or a.dim() != 3 or b.dim() != 3 or _is(a.shape[0], 1) or (_is(b.stride(0), 0) and lies_as_rows(a, range(3))):
            return self.parted
        return a.shape[0], a.shape[1]

    @property
    def adds_apart(self) -> bool:
        """Whether the vendor first copies what is added to where the result goes, and reads it there: all but one row for all rows of a matrix."""
        if self.added is None:
            return False
        added = self.added.meta["val"]
        return self.a.meta["val"].dim() == 3 or (added.dim() == 2 and not _is(added.shape[0], 1))

    @property
    def shape(self) -> tuple[Any, ...]:
        """M, N, K, of a batch after the number of its products, and of groups with the rows, or the k, of all."""
        *rows, k = self.a.meta["val"].shape
        n = self.b.meta["val"].shape[-1]
        return (*self.batch, n, k) if self.batch and not self.groups else (functools.reduce(operator.mul, rows), n, k)


@dataclass
class Region:
    """A product, and what is computed of it in the same kernel. nodes: in order, the product first, and a second one behind it. imported: its program."""

    product: Product
    nodes: list[fx.Node]
    outputs: list[fx.Node]
    imported: Imported
    times: tuple[float, float] | None
    """Of the program, and of what would run in its place, in microseconds; None where nothing is known."""


@dataclass(frozen=True, slots=True)
class Left:
    """A product that is left. absorbed: the kernel which comes next does all that follows it as well."""

    why: str
    neighbour: bool = False
    absorbed: bool = False
    times: tuple[float, float] | None = None


# -- products


def products(graph: fx.Graph) -> list[fx.Node]:
    """All of a graph, also those that no program takes."""
    return [n for n in graph.nodes if is_product(n)]


def is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in _PRODUCTS or name_of(node) in _OTHERS)


def of_groups(node: fx.Node) -> bool:
    """Whether it is a product of groups, or a batch that torch computes as such."""
    return node.target is GROUPED_MM or name_of(node) == LOOP


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    before = _PRODUCTS.get(node.target, 0)
    a, b = node.args[before : before + 2]
    return a, b  # type: ignore[return-value]


def product_of(node: fx.Node) -> Product | str:
    """A node as a product, or why it is none that a program takes."""
    if node.target is _SCALED_MM:
        return _scaled(node)
    if of_groups(node):
        return _of_groups(node)
    if not is_product(node):
        return "it is no product"
    if node.target not in _PRODUCTS:
        return f"{name_of(node)} is a product of another kind"
    before, given = _PRODUCTS[node.target], node.args
    a, b = operands(node)
    scale = tuple(node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    if not all(isinstance(s, int | float) for s in scale):
        return "what it is multiplied with is known at run time alone"
    x = a.meta["val"]
    if str(x.dtype) not in BY_TORCH or not x.dtype.is_floating_point:
        return f"operands of {x.dtype}"
    added = given[0] if before and scale[1] != 0 else None
    return Product(node, a, b, added, (float(scale[0]), float(scale[1])))  # type: ignore[arg-type]  # all are numbers


def _scaled(node: fx.Node) -> Product | str:
    """torch's product of fp8 operands, with a scale for each or for each of their rows and columns, and a bias: all of it is rounded once."""
    given = named_arguments(node)
    a, b, *factors = (given[name] for name in ("self", "mat2", "scale_a", "scale_b"))
    x, y = a.meta["val"], b.meta["val"]
    if any(str(t.dtype) not in BY_TORCH or not BY_TORCH[str(t.dtype)].is_fp8 for t in (x, y)):
        return f"operands of {x.dtype}"
    scales = [factor.meta["val"] for factor in factors]
    for scale, along in zip(scales, ((x.shape[0], 1), (1, y.shape[1])), strict=True):
        if scale.dtype != torch.float32 or not (_is(scale.numel(), 1) or all(map(same, scale.shape, along))):
            return f"its scales are {' and '.join(f'{list(s.shape)} of {s.dtype}' for s in scales)}, and not one each, or one a row and a column, of fp32"
    if given.get("scale_result") is not None:
        return "its result has a scale as well"
    return Product(node, a, b, given.get("bias"), factors=tuple(factors), fast=bool(given.get("use_fast_accum")))


def _of_groups(node: fx.Node) -> Product | str:
    """torch's product of groups: of rows, or along k. Without ends it is a batch."""
    given = named_arguments(node)
    a, b, ends = *operands(node), given.get("offs")
    x, y = a.meta["val"], b.meta["val"]
    if str(x.dtype) not in BY_TORCH or not x.dtype.is_floating_point or x.dtype != y.dtype:
        return f"operands of {x.dtype} and {y.dtype}"
    if given.get("bias") is not None:
        return "it adds a bias of its own"
    if ends is None:
        return Product(node, a, b)
    if x.dim() != 2:
        return "it is of groups of columns, and a program's are of rows or along k"
    if ends.meta["val"].dtype != torch.int32:
        return f"its ends are {ends.meta['val'].dtype}, and kernels read int32"
    if y.dim() == 3 and y.stride(-1) != 1 and y.stride(-2) != 1:
        return "neither rows nor columns of its right operands lie side by side in memory, as TMA reads them"
    return Product(node, a, b, ends=ends, loop=LOOPED in node.meta or name_of(node) == LOOP)


def _is(extent: Any, number: int) -> bool:
    return isinstance(extent, int) and extent == number


# -- the region of one


def region_of(product: Product, levels: Levels, terms: Terms = UNTUNED) -> Region | Left:
    """The region of a product, or why there is none."""
    outcome = promising(product, levels, terms)
    if isinstance(outcome, Region) and (kernel := _kernel_of(outcome, terms)) is not None and (why := precompile.spilled(*kernel)):
        return _alone(product, Left(why, True, times=outcome.times), levels, terms)
    return outcome


def taking(node: fx.Node, levels: Levels, terms: Terms, known: dict[fx.Node, Region | Left]) -> Region | None:
    """The region that takes a node, as far as nothing is compiled. known: of products that were looked at before; added to."""
    for own in before(node):
        if own not in known:
            product = product_of(own)
            known[own] = Left(product) if isinstance(product, str) else promising(product, levels, terms)
        if isinstance(outcome := known[own], Region) and node in outcome.nodes:
            return outcome
    return None


def before(node: fx.Node) -> Iterator[fx.Node]:
    """The products that a node is computed of, itself among them, with nothing between that stands alone."""
    seen, pending = {node}, [node]
    while pending:
        value = pending.pop()
        if is_product(value):
            yield value
        elif joins(value):
            pending += [s for s in value.all_input_nodes if s not in seen]
            seen |= set(value.all_input_nodes)


def compile_ahead(nodes: Iterable[fx.Node], levels: Levels, terms: Terms) -> None:
    """Compile the kernels of the regions of a graph's products at once, of which each would be waited for in turn.

    A region that comes to be of one before it is taken may be another one then; its kernel is compiled when it is asked for.
    """
    products = [p for node in nodes if isinstance(p := product_of(node), Product)]
    known = [p for p in products if terms.machine.of(p.a.meta["val"].device) is not None]
    regions = [outcome for product in known if isinstance(outcome := promising(product, levels, terms), Region)]
    precompile.compile_ahead([kernel for region in regions if (kernel := _kernel_of(region, terms)) is not None])


def _kernel_of(region: Region, terms: Terms) -> tuple[expected.ProgramCall, Target] | None:
    """What is compiled for a region, and for what; None where the GPU is not known."""
    call, target = program_call(region.product, region.imported), terms.machine.of(region.product.a.meta["val"].device)
    return None if call is None or target is None else (call, target)


def promising(product: Product, levels: Levels, terms: Terms) -> Region | Left:
    """A region that is expected to pay, as far as nothing is compiled: if there is one with two products, that."""
    outcome = _with_what_follows(product, levels, terms)
    return _alone(product, outcome, levels, terms) if isinstance(outcome, Left) else outcome


def _with_what_follows(product: Product, levels: Levels, terms: Terms) -> Region | Left:
    other = _companion(product) if product.second is None else None
    if other is not None and isinstance(both := promising(replace(product, second=other), levels, terms), Region):
        return both
    try:
        return _promising(product, *_grown(product), levels, terms)
    except (Unknown, EpigenError):
        pass
    try:  # without what the language takes alone and not together with the rest, such as a sum over rows that elements are joined with
        return _promising(product, *_grown(product, checked=True), levels, terms)
    except (Unknown, EpigenError) as error:
        return Left(str(error).partition("\n")[0], True)


def _companion(product: Product) -> Product | None:
    """A product of the same a by another matrix of as many columns, which lies alike, that what follows this one reads: a gated unit's other half."""
    a, b = product.a, product.b
    if product.batch is not None or a.meta["val"].dim() != 2 or product.factors:
        return None
    others = [
        product_of(u)
        for each in _same_values(a)
        for u in each.users
        if (u.target in _PRODUCTS or of_groups(u)) and u is not product.node and operands(u)[0] is each
    ]
    fitting = [x for x in others if isinstance(x, Product) and x.b is not b and _alike(x.b, b) and x.ends is product.ends and not x.adds_apart]
    fitting = [x for x in fitting if x.node not in _above(product) and product.node not in _above(x)]
    if not fitting:
        return None
    nodes = _grown(product)[0]
    read = {s for node in nodes for s in node.all_input_nodes}.difference(nodes)
    reached = {own for leaf in read for own in before(leaf)}
    return next((other for other in fitting if other.node not in nodes and other.node in reached), None)


def _above(product: Product) -> set[fx.Node]:
    """What is computed before a product for what it multiplies and adds, but for its left operand."""
    return above_of([product.b, *([] if product.added is None else [product.added])])


def _same_values(node: fx.Node) -> set[fx.Node]:
    """A node, and views of what it is a view of that are the same: torch writes one for each product."""
    if not is_view(node) or len(node.all_input_nodes) != 1:
        return {node}
    (source,) = node.all_input_nodes
    return {u for u in source.users if u.target is node.target and u.args == node.args and u.kwargs == node.kwargs}


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two matrices, or those of groups, have one dtype and one shape, and the same of their dimensions lies without gaps."""
    x, y = one.meta["val"], other.meta["val"]
    along = [t.stride(-1) == 1 or t.stride(-2) != 1 for t in (x, y)]
    return x.dtype == y.dtype and x.dim() == y.dim() and all(map(same, x.shape, y.shape)) and along[0] == along[1]


def _promising(product: Product, nodes: list[fx.Node], refused: str, levels: Levels, terms: Terms) -> Region | Left:
    """nodes, refused: as `_grown` has them. Raises Unknown, ParseError, CheckError.

    Where many rows read one, such as a gate of each image, or each image the same rows, they are parted into a batch of products, for which nothing need be copied.
    """
    dtype = product.dtype
    first = len(product.nodes)
    if not product.adds_apart and not any(map(_computes, nodes[first:])):
        return Left("nothing elementwise follows it" + (f" that a program computes: {refused}" if refused else ""))
    nodes = _trimmed(nodes, levels)
    if product.second is not None and product.second.node not in nodes:
        return Left("nothing that it computes reads the other product")
    if not product.adds_apart and not any(map(_computes, nodes[first:])):
        return Left("the kernel that reads it next does what follows it as well", True, True)
    outputs = _outputs(nodes)
    inside = set(nodes)
    leaves = _imported(product, nodes, outputs, dtype, ()).leaves
    imported = _imported(product, nodes, outputs, dtype, _taken_over([leaf.node for leaf in leaves], inside))
    if not product.groups and (shared := [leaf.shared for leaf in imported.leaves if leaf.shared]):
        finest = min(shared, key=lambda parts: size_hint(parts[1]) or 0)
        if isinstance(parted := promising(replace(product, parted=finest), levels, terms), Region):
            return parted
    tiles = len([x for x in imported.leaves if x.tile]) + len([x for x in imported.outputs if x == "mn"])
    if tiles > MOST_TILES:
        return Left(f"it reads and writes {tiles} tiles, and a kernel holds at most {MOST_TILES}", True)
    times = _times(product, nodes, outputs, imported, levels, terms)
    if isinstance(times, str):
        return Left(times, True)
    if times is not None and times[0] > times[1]:
        return Left(f"expected to take {times[0]:.1f} us, and the vendor's product with Inductor's kernel {times[1]:.1f}", True, times=times)
    return Region(product, nodes, outputs, imported, times)


def _alone(product: Product, left: Left, levels: Levels, terms: Terms) -> Region | Left:
    """A product of groups without anything that follows it, where epigen's kernel is expected to be the faster one, or torch has a loop. left: of any other.

    Of other products the vendor's kernel is no slower."""
    if not product.groups or product.second is not None:
        return left
    only = product.nodes
    imported = _imported(product, only, only, product.dtype, ())
    times = _times(product, only, only, imported, levels, terms)
    pays = isinstance(times, tuple) and times[0] < times[1]
    return Region(product, only, only, imported, times if isinstance(times, tuple) else None) if pays or product.loop else left


def _computes(node: fx.Node) -> bool:
    """Whether it is arithmetic, not a view, a copy or a part of a result."""
    return not is_view(node) and name_of(node) not in SAME and node.target is not operator.getitem


def _imported(product: Product, nodes: Sequence[fx.Node], outputs: Iterable[fx.Node], dtype: torch.dtype, over: Collection[fx.Node]) -> Imported:
    importer = _importer(product, over)
    for node in nodes:
        if node not in product.nodes:
            importer.add(node)
    return importer.program(outputs, dtype)


class _Importer(Importer):
    def leaf(self, arg: fx.Node, node: fx.Node, beside: tuple[Role, ...]) -> Value:
        if not isinstance(arg.meta.get("val"), torch.Tensor):
            raise Unknown(node, f"its argument {arg.name} is a number that is known at run time alone")
        return super().leaf(arg, node, beside)


def _importer(product: Product, over: Collection[fx.Node] = ()) -> Importer:
    sums = () if product.groups else ("m",)  # which would be each group's
    importer = _Importer(product.node, product.node.meta["val"].shape, _namer(), sums, over, True, batch=product.batch, joining=True)
    if product.added is not None or product.scale[0] != 1 or product.factors:
        importer.plus(product.node, product.added, product.scale, product.factors)
    if product.second is not None:
        importer.second(product.second.node, product.second.b)
        if product.second.added is not None or product.second.scale[0] != 1:
            importer.plus(product.second.node, product.second.added, product.second.scale)
    return importer


def _namer() -> Callable[[fx.Node], str]:
    """Inputs are x0, x1 and so on, so that equal regions have equal texts."""
    known: dict[fx.Node, str] = {}
    return lambda node: known.setdefault(node, f"x{len(known)}")


def _grown(product: Product, checked: bool = False) -> tuple[list[fx.Node], str]:
    """All that can be computed with a product: what is in the language, and reads nothing that depends on the product from outside; and why the first
    elementwise operation is not among it, "" where all are.

    checked: also as a program of each node alone, which takes longer, and which nearly all pass.
    """
    try:
        importer = _importer(product)
    except Unknown as error:
        return product.nodes, str(error)
    nodes, taken, outside, refused = product.nodes, set(product.nodes), set[fx.Node](), ""
    for node in _after(product.nodes, taken, outside):
        if not any(s in outside for s in node.all_input_nodes):
            try:
                importer.add(node)
                if checked and not isinstance(node.meta.get("val"), tuple | list):
                    importer.program([node], product.dtype)
            except (Unknown, EpigenError) as error:
                if any(pointwise(n.target) and _computes(n) for n in ([*node.users] if is_view(node) else [node])):
                    refused = refused or str(error).partition("\n")[0]
            else:
                taken.add(node)
                nodes.append(node)
                continue
        outside.add(node)
    return _whole(nodes, product.nodes), refused


def _after(products: Sequence[fx.Node], taken: Collection[fx.Node], outside: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What depends on products, in order, as long as any of it reads what is taken. Who asks puts each node into one of both."""
    pending: list[fx.Node] = []
    queued = set[fx.Node]()
    reading = 0  # how many of those that are pending read what is taken
    reached = list(products)
    while True:
        for last in reached:
            for user in last.users:
                if user.op == "call_function":
                    if user not in queued:
                        queued.add(user)
                        heapq.heappush(pending, user)
                        reading += last in taken
                    elif last in taken and not any(s in taken for s in user.all_input_nodes if s is not last):
                        reading += 1
        if not reading:
            return
        last = heapq.heappop(pending)
        reading -= any(s in taken for s in last.all_input_nodes)
        yield last
        assert last in taken or last in outside
        reached = [last]


def _whole(nodes: list[fx.Node], products: Collection[fx.Node]) -> list[fx.Node]:
    """Without operations of several results of which somebody else reads any, and what is computed of those."""
    kept = dict.fromkeys(nodes)
    for node in nodes:
        if node in products:
            continue
        several = isinstance(node.meta.get("val"), tuple | list)
        if (several and any(u not in kept for u in node.users)) or not any(s in kept for s in node.all_input_nodes):
            del kept[node]
    return list(kept)


def _taken_over(leaves: Sequence[fx.Node], inside: Collection[fx.Node]) -> set[fx.Node]:
    """What is computed before the region for its sake alone and reads no more than the region does anyway: it would be written, to be read at once.

    Inductor would compute such a value in the kernel that reads it. All that has to be written in any case, for a product or for attention, is read as it is.
    """
    own = {leaf: bases for leaf in leaves if (bases := _bases(leaf, inside)) != {leaf}}
    read = {leaf for leaf in leaves if leaf not in own}
    over = set[fx.Node]()
    for leaf, bases in own.items():
        new = [b for b in bases if b not in read and len([e for e in b.meta["val"].shape if not _is(e, 1)]) > 1]
        if len(new) <= 1:
            over |= _between(leaf, bases)
            read |= bases
    return over


def _bases(node: fx.Node, inside: Collection[fx.Node]) -> set[fx.Node]:
    """The values in memory that a value is computed of by elementwise operations; the value itself where it is one."""
    bases = set[fx.Node]()
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        if value.op != "call_function" or value.target is operator.getitem or not _lazy(value, inside):
            bases.add(value)
        else:
            pending += [s for s in value.all_input_nodes if s not in seen]
            seen |= set(value.all_input_nodes)
    return {v for v in bases if isinstance(v.meta.get("val"), torch.Tensor)}


def _between(node: fx.Node, bases: Collection[fx.Node]) -> set[fx.Node]:
    between = set[fx.Node]()
    pending = [node]
    while pending:
        value = pending.pop()
        if value not in bases and value not in between and value.op == "call_function":
            between.add(value)
            pending += value.all_input_nodes
    return between


def _lazy(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether Inductor would compute a value anew wherever it is read: elementwise, and never written for somebody who cannot."""
    if not (is_view(node) or name_of(node) in SAME or pointwise(node.target)):
        return False
    pending = [u for u in node.users if u not in inside]
    while pending:
        user = pending.pop()
        if is_view(user):
            pending += user.users
        elif not joins(user):
            return False
    return True


# -- what Inductor would do with it


_REDUCTIONS = frozenset("sum mean amax amin any all prod var_mean logsumexp native_layer_norm".split())
_MOVING = frozenset("clone slice select split split_with_sizes slice_scatter select_scatter cat constant_pad_nd index embedding gather".split())
_JOINED = _REDUCTIONS | _MOVING | {"convert_element_type", "_to_copy", "alias", "detach", "full", "iota", BITMASK, WHERE_BITS}


@functools.lru_cache(maxsize=4096)
def pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def joins(node: fx.Node) -> bool:
    """Whether Inductor computes a node in one kernel with what it reads."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return pointwise(node.target) or is_view(node) or name_of(node) in _JOINED or name_of(node) in elementwise()


def levels_of(graph: fx.Graph) -> Levels:
    """How many kernels lie before each value, of those that nothing joins: products, attention, and so on."""
    levels: Levels = {}
    for node in graph.nodes:
        levels[node] = level_of(node, levels)
    return levels


def level_of(node: fx.Node, levels: Levels) -> int:
    return max((levels[s] for s in node.all_input_nodes), default=0) + (node.op == "call_function" and not joins(node))


def kept(node: fx.Node, inside: Collection[fx.Node], levels: Levels) -> bool:
    """Whether a value has to be written to memory in any case: somebody outside reads it who is not in a kernel that could compute it anew."""
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if is_view(user):  # also one inside, of which others read what it is a view of
            pending += user.users
        elif user not in inside and (not joins(user) or levels[user] != levels[node]):
            return True
    return False


def _trimmed(nodes: Sequence[fx.Node], levels: Levels) -> list[fx.Node]:
    """Without what the kernels after it compute as well, where that leaves no more to write.

    A sum over rows stays where it is of what is written in any case, such as a bias gradient, or where a tile would be written for it alone. For any other the
    kernel would read tiles that Inductor's kernel of a norm's backward reads again (on an H100 such sums cost training steps 10 to 14 %; torch 2.11, 2026-11-25).
    """
    summed = _summed(nodes)

    def shortened(stays: Callable[[fx.Node, Collection[fx.Node]], bool]) -> list[fx.Node]:
        """stays: whether a sum, or what is computed of one and read by nobody inside, does so beside these others."""
        taken = dict.fromkeys(nodes)
        needed = above_of([n for n in nodes if n is nodes[0] or summed[n] or kept(n, taken, levels)], taken)
        if len(_outputs([n for n in taken if n in needed])) <= len(_outputs(nodes)):  # of several that are joined later one alone may leave more to write
            taken = {n: None for n in taken if n in needed}
        while True:
            before = len(taken)
            for node in reversed([n for n in taken if n is not nodes[0]]):
                if any(u in taken for u in node.users):
                    continue
                fewer = dict.fromkeys(n for n in taken if n is not node)
                if not node.users or is_view(node) or isinstance(node.meta.get("val"), tuple | list):  # a view stays, of what is written
                    taken = fewer
                elif summed[node]:
                    taken = taken if stays(node, fewer) else fewer
                elif not kept(node, taken, levels) and len(_outputs(list(fewer))) <= len(_outputs(list(taken))):
                    taken = fewer
            if len(taken) == before:
                return list(taken)

    if any(summed.values()):
        with_all, without = shortened(lambda _node, _others: True), shortened(lambda _node, _others: False)
        if len([n for n in _outputs(with_all) if not summed[n]]) < len(_outputs(without)):
            return with_all
    return shortened(lambda node, others: all(_written(n, others, levels) for n in summed[node]))


def above_of(nodes: Sequence[fx.Node], inside: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """These, and all that they are computed of. inside: only what is among these."""
    above, pending = set[fx.Node](), list(nodes)
    while pending:
        if (node := pending.pop()) not in above and (inside is None or node in inside):
            above.add(node)
            pending += node.all_input_nodes
    return above


def _summed(nodes: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """By node, what it is the sums of: as they are, or what is computed of them."""
    sums: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        sums[node] = {_source(node)} if name_of(node) == "sum" else set().union(*(sums.get(s, set()) for s in node.all_input_nodes))
    return sums


def _source(node: fx.Node) -> fx.Node:
    """What a view, a cast or a sum is taken of; its extents may be nodes as well."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _written(node: fx.Node, taken: Collection[fx.Node], levels: Levels) -> bool:
    """Whether a value of the region goes to memory, as it is or as a view or in another dtype."""
    while (is_view(node) or name_of(node) in ("convert_element_type", "_to_copy")) and node in taken and not kept(node, taken, levels):
        node = _source(node)
    return node in taken and kept(node, taken, levels)


def _outputs(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """The values that others than the region read; of a view what it is a view of."""
    taken = set(nodes)
    outputs: dict[fx.Node, None] = {}
    for node in nodes:
        if any(user not in taken for user in node.users):
            while is_view(node) and node in taken:
                node = node.args[0]  # type: ignore[assignment]
            outputs[node] = None
    return list(outputs)


def moved(graph: fx.Graph) -> dict[fx.Node, int]:
    """By node, the bytes that are moved for its sake: written where it lies in memory, and read once by each kernel that reads it."""
    levels = levels_of(graph)
    moved_bytes: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        made = not joins(node.all_input_nodes[0] if node.target is operator.getitem else node)
        if _lies_within(node) or not (made or kept(node, (), levels)):
            continue
        moved_bytes[node] = moved_bytes.get(node, 0) + (bytes_of(node) if node.op == "call_function" else 0)
        for reader in _readers(node, levels):
            moved_bytes[reader] = moved_bytes.get(reader, 0) + bytes_of(node)
    return moved_bytes


def _lies_within(node: fx.Node) -> bool:
    """Whether a value is never written, since it lies within another: a view, or a part of a matrix that products and programs read where it is."""
    return is_view(node) or (node.target == _aten.slice.Tensor and not any(map(joins, node.users)))


def _readers(node: fx.Node, levels: Levels) -> list[fx.Node]:
    """A node of each kernel that reads a value."""
    alone: dict[fx.Node, None] = {}
    joined: dict[int, fx.Node] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if _lies_within(user):
            pending += user.users
        elif user.op == "call_function" and not joins(user):
            alone[user] = None
        elif user.op == "call_function":
            joined.setdefault(levels[user], user)
    return [*alone, *joined.values()]


# -- what it is expected to take


def bytes_of(node: fx.Node) -> int:
    value = node.meta["val"]
    hints = [size_hint(e) for e in value.shape] if isinstance(value, torch.Tensor) else [None]
    return 0 if None in hints else math.prod(e or 0 for e in hints) * value.element_size()


def _times(
    product: Product, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], imported: Imported, levels: Levels, terms: Terms
) -> tuple[float, float] | str | None:
    """How long the program takes, and the vendor's product with Inductor's kernel; None where nothing is known, and in words why it cannot be.

    Where a kernel of Inductor's reads the result in any case, what is fused spares it no launch, and it has to read what the program has written. So does the
    program what is copied for it, since it varies over some of the leading dimensions alone, and what is gathered for it alone, such as each row's bias.
    """
    call = program_call(product, imported)
    target = terms.machine.of(product.a.meta["val"].device)
    if target is None:
        return None
    if call is None:
        return "its extents are known at run time alone, and so is what takes less time"
    gpu = gpus.of_target(target)
    fused, bare = expected.kernels_us(call, target, terms.tune)
    if list(nodes) == product.nodes and not product.adds_apart:
        return fused, bare
    if product.parted and (one := program_call(replace(product, parted=None), imported)) is not None:
        bare = expected.kernels_us(one, target, None)[1]
    inside = set(nodes)
    lazy = [n for n in outputs if any(u not in inside and joins(u) and levels[u] == levels[n] for u in n.users)]
    gathered = [leaf.node for leaf in imported.leaves if leaf.tile and _gathers(leaf.node) and not kept(leaf.node, inside, levels)]
    fused += expected.moved_us([*map(bytes_of, gathered)], gpu) + (gpu.launch_us if gathered else 0.0)
    moved = [
        *map(bytes_of, product.nodes),
        *(bytes_of(leaf.node) for leaf in imported.leaves if leaf.indices != "kn" and leaf.node not in gathered),
        *(bytes_of(n) for n in outputs if n not in lazy or kept(n, inside, levels)),
    ]
    if product.adds_apart:
        bare += expected.moved_us([bytes_of(product.node)] * 2, gpu) + gpu.launch_us
    copied = [leaf for leaf in imported.leaves if leaf.expand is not None]
    fused += expected.moved_us([bytes_of(product.node) if leaf.tile else 0 for leaf in copied], gpu) + (gpu.launch_us if copied else 0.0)
    return fused + expected.moved_us([bytes_of(n) for n in lazy], gpu), bare + expected.moved_us(moved, gpu) + (0.0 if lazy else gpu.launch_us)


def _gathers(node: fx.Node) -> bool:
    """Whether a value is gathered from a table, or a part of what is: Inductor would do that where it is read."""
    while is_view(node) or node.target == _aten.slice.Tensor:
        node = node.all_input_nodes[0]
    return name_of(node) in ("index", "embedding", "gather")


def hinted(shape: tuple[Any, ...]) -> Shape | None:
    """As it is in the first call; None where an extent is known at run time alone."""
    extents: Any = tuple(size_hint(e) for e in shape)
    return None if None in extents else extents


def program_call(product: Product, imported: Imported) -> expected.ProgramCall | None:
    """What a database knows of a region's program; None where an extent is known at run time alone."""
    a, b = product.a.meta["val"], product.b.meta["val"]
    shape = hinted(product.shape)
    if shape is None:
        return None
    if product.ends is not None:
        count = size_hint(product.ends.meta["val"].shape[0])
        if count is None:
            return None
        shape = Batch((count,), {}, product.groups).problem(*shape[-3:])
    layout = "".join("n" if t.stride(-1) == 1 or t.stride(-2) != 1 else "t" for t in (a, b))
    return expected.ProgramCall(
        imported.text,
        shape,
        BY_TORCH[str(a.dtype)],
        layout,
        tuple((leaf.name, BY_TORCH[str(leaf.node.meta["val"].dtype)]) for leaf in imported.leaves),
        product.options,
        product.groups,
    )
