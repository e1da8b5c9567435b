"""torch's operations -> a program of the language: what a graph of `torch.fx` computes of a matrix product, node by node.

Which operations these are is said by the rows of the operation table (`aten`), and, for those of torch's that are several rows, by `SEVERAL`
here; epigen's own, `bits`, stand for packed masks. Broadcasting in torch is by place and in the language by name, so each value carries what its dimensions run along: rows, columns, or a
part of either where a view has parted them. A program computes in fp32 and rounds its outputs once, so casts between floats in between are left out.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from epigen import ops
from epigen.dtypes import BY_TORCH, BY_TORCH_ON_CPU
from epigen.errors import EpigenError
from epigen.ir.graph import Graph
from epigen.ir.program import graph_of
from epigen.ir.recognise import recognised
from epigen.ir.unparse import program_of
from epigen.lang.syntax import HALVES, Call, Program, to_text

# the last value is NaN, where torch has no gradient
_AT_LEAST = "where(x >= y, x, where(x < y, y, detach(maximum(x, y))))"
_AT_MOST = "where(x <= y, x, where(x > y, y, detach(minimum(x, y))))"
_UNDERIVED = {_AT_LEAST: "maximum(x, y)", _AT_MOST: "minimum(x, y)"}
"""The same values, of which no derivative is to be taken."""

SEVERAL = {
    "add(x, y, alpha=s)": "x + s * y",
    "sub(x, y, alpha=s)": "x - s * y",
    "rsub(x, y, alpha=s)": "y - s * x",
    "isnan(x)": "x != x",
    "trunc(x)": "where(x < 0, ceil(x), floor(x))",
    "log2(x)": "1.4426950408889634 * log(x)",
    "log10(x)": "0.4342944819032518 * log(x)",
    "addcmul(x, y, z, value=s)": "x + s * y * z",
    "addcdiv(x, y, z, value=s)": "x + s * y / z",
    "lerp(x, y, w)": "x + w * (y - x)",
    "masked_fill(x, c, y)": "where(c, y, x)",
    "clamp_min(x, y)": _AT_LEAST,
    "clamp_max(x, y)": _AT_MOST,
    "clamp(x, y)": _AT_LEAST,
    "clamp(x, None, y)": _AT_MOST,
    "logical_xor(x, y)": "(x & ~y) | (y & ~x)",
    "bitwise_xor(x, y)": "(x & ~y) | (y & ~x)",
    "softplus(x, beta=s, threshold=t)": "where(s * x > t, x, softplus(s * x) / s)",
    "elu(x, r, s, t)": "where(x > 0, s * x, r * s * expm1(t * minimum(x, 0)))",
    "threshold_backward(g, x, t)": "drelu(g, ~(x <= t))",
    "leaky_relu_backward(g, x, s, self_is_result=False)": "where(x > 0, g, s * g)",
    "leaky_relu_backward(g, y, s, self_is_result=True)": "where(y > 0, g, s * g)",
    "elu_backward(g, r, s, t, is_result=False, self_or_result=x)": "where(x > 0, s * g, r * s * t * g * exp(t * minimum(x, 0)))",
    "elu_backward(g, r, s, t, is_result=True, self_or_result=y)": "where(y > 0, s * g, t * g * (y + r * s))",
    "softplus_backward(g, x, beta=s, threshold=t)": "where(s * x > t, g, g * sigmoid(s * x))",
    "hardswish_backward(g, x)": "where(x <= -3, 0, where(x < 3, g * (x / 3 + 0.5), g))",
    "hardsigmoid_backward(g, x)": "where((x > -3) & (x < 3), g / 6, 0)",
    "hardtanh_backward(g, x, l, h)": "where((x > l) & (x < h), g, 0)",
    "softshrink_backward(g, x, w)": "where((x > w) | (x < -w), g, 0)",
    "hardshrink_backward(g, x, w)": "where((x > w) | (x < -w), g, 0)",
    "log_sigmoid_backward(g, x, _)": "g * sigmoid(-x)",
}
"""Operations of torch that are several rows: written as a row's `aten` is, with the program that takes their place."""

BITMASK, WHERE_BITS = "epigen::bitmask", "epigen::where_bits"
"""What `bits` has of packed masks."""

SAME = ("_to_copy", "convert_element_type", "clone", "alias", "detach", "lift_fresh_copy", "contiguous")
_POWERS = {0.5: "sqrt(x)", -0.5: "rsqrt(x)", -1.0: "1 / x", 1.0: "x"}

_EXACT = 2**24
"""Below it fp32 holds every integer, so that comparing one with these is right whatever it is rounded to."""

Role = tuple[str, int, int] | None
"""What a dimension runs along: ("m" or "n", its extent, and how many rows or columns lie between neighbours); None for an extent of 1. Rows of a batch are those of
all its products, one after the other."""


class Unknown(Exception):
    """A node that is not in the language. node: which. why: in words. instead: what to write."""

    def __init__(self, node: fx.Node, why: str, instead: str = ""):
        super().__init__(why)
        self.node, self.why, self.instead = node, why, instead


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the region. text: a name that the program binds, or a number. roles: of each dimension. packed: torch has it as a mask of one bit an element.
    joined: of both parts of its columns, which are those of one and of another value, the texts; it is a result, and nothing is computed of it."""

    text: str
    roles: tuple[Role, ...] = ()
    boolean: bool = False
    reduced: bool = False
    packed: bool = False
    joined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of the program. name: there. node: what gives it. indices: as it is declared, after "b" where each product of a batch has its own.
    expand: what it is viewed as before, where torch broadcasts it. order: that of its dimensions, rows first, where torch has them in another.
    packed: it is a mask of one bit an element. shared: of a tile that would be made of fewer rows, into how many parts they fall, and the rows of each."""

    name: str
    node: fx.Node
    indices: str
    expand: tuple[int, ...] | None
    order: tuple[int, ...] | None = None
    packed: bool = False
    shared: tuple[int, int] | None = None

    def shape(self, extents: Mapping[str, Any]) -> tuple[Any, ...]:
        """As the program takes it. extents: by index."""
        shape = tuple(extents[i] for i in self.indices)
        return (*shape[:-1], shape[-1] // 8) if self.packed else shape

    @property
    def tile(self) -> bool:
        return "mn" in self.indices


@dataclass(frozen=True, slots=True)
class Imported:
    """text: the program, in canonical form. graph: of the parts of results that it joins. leaves: its inputs in its order. outputs: the indices of each. roles: what the dimensions run along that torch has of it."""

    text: str
    graph: Graph
    leaves: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    roles: tuple[tuple[Role, ...], ...]


@dataclass(frozen=True, slots=True)
class _Rule:
    """params: what torch's arguments are called, by place in its schema; a constant is one that the argument has to equal."""

    params: tuple[tuple[str | int, Any], ...]
    text: str


def _rule(pattern: ast.Call, text: str) -> _Rule:
    places: list[tuple[str | int, ast.expr]] = [*enumerate(pattern.args), *((k.arg or "", k.value) for k in pattern.keywords)]
    return _Rule(tuple((key, value.id if isinstance(value, ast.Name) else (ast.literal_eval(value),)) for key, value in places), text)


@functools.cache
def _rules() -> Mapping[str, tuple[_Rule, ...]]:
    """By the name of torch's operation, those of one row first."""
    by_name: dict[str, list[_Rule]] = {}
    written = [(pattern, _call_text(op)) for op in ops.TABLE.values() for pattern in op.aten]
    for pattern, text in [*written, *SEVERAL.items()]:
        call = ast.parse(pattern, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        by_name.setdefault(call.func.id, []).append(_rule(call, text))
    return {name: tuple(rules) for name, rules in by_name.items()}


def elementwise() -> Collection[str]:
    """The names of torch's elementwise operations that are in the language."""
    return _rules().keys()


def _call_text(op: ops.Op) -> str:
    names = [p.name for p in op.params]
    if not op.symbol:
        return f"{op.name}({', '.join(names)})"
    return f"{op.symbol}{names[0]}" if len(names) == 1 else f"{names[0]} {op.symbol} {names[1]}"


def name_of(node: fx.Node) -> str:
    """`gelu` for aten.gelu.default; `mylib::gelu` for what torch.library has of others."""
    return _name_of(node.target)


@functools.lru_cache(maxsize=4096)
def _name_of(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", str(target))
    return str(target._schema.name).removeprefix("aten::").removeprefix("prims::")


_VIEWS = frozenset("view reshape _unsafe_view unsqueeze squeeze expand flatten unflatten permute t transpose".split())


def chooses(node: fx.Node) -> bool:
    """Whether an element of what a node gives may be one of its arguments' whatever the others are, undefined too."""
    texts = (_UNDERIVED.get(rule.text, rule.text) for rule in _rules().get(name_of(node), ()))
    return name_of(node) == WHERE_BITS or any("where(" in text or "drelu(" in text for text in texts)


def is_view(node: fx.Node) -> bool:
    return name_of(node) in _VIEWS


def moves(node: fx.Node) -> bool:
    """Whether a view changes the order of dimensions."""
    return name_of(node) in ("permute", "t", "transpose")


CALLED = "called"
"""What a node's meta has where it has another name for whoever wrote the graph's function."""


def _called(node: fx.Node) -> str:
    return str(node.meta.get(CALLED, node.name))


class Importer:
    """Writes the program of one region.

    product: the node that is mm; frame: its shape as torch has it, [..., N]; batch: where it is several products how many, and the rows of each. names: what leaves
    are to be called, by node. reductions: over what there may be any: "m", "n" or "mn". over: nodes before the product that the program computes as well, where they are in the language, instead of reading them.
    moving: whether rows and columns of what is computed may change places, as `Imported.roles` then says. derived: whether the program's derivative is to be that
    of the graph, so that what is detached there stays so. casts: whether casts between floats stay, by which eager rounding goes; else all between is fp32. constants: nodes that neither the product nor any input has part in, taken over as those of `over` are.
    joining: whether results may be two tiles beside one another.
    """

    def __init__(
        self,
        product: fx.Node,
        frame: Sequence[int],
        names: Callable[[fx.Node], str] | None = None,
        reductions: Collection[str] = ("m", "n", "mn"),
        over: Collection[fx.Node] = (),
        moving: bool = False,
        derived: bool = False,
        batch: tuple[int, int] | None = None,
        casts: bool = False,
        constants: Collection[fx.Node] = (),
        joining: bool = False,
    ):
        self.batched = batch is not None
        count, self.rows = batch or (1, math.prod(frame[:-1]))
        self.extents = {"b": count, "m": self.rows, "n": frame[-1]}
        self.device = product.meta["val"].device
        self.dtypes = BY_TORCH_ON_CPU if product.meta["val"].dtype == torch.float64 else BY_TORCH
        self.frame_roles = _roles_of(frame)
        self.lines: list[str] = []
        self.leaves: dict[str, Leaf] = {}
        self.known: dict[fx.Node, Value | tuple[Value, ...]] = {product: Value("mm", self.frame_roles)}
        self.reductions = reductions
        self.joining = joining
        self.over, self.constants, self.moving, self.derived, self.casts = {*over, *constants}, set(constants), moving, derived, casts
        self.around = self.frame_roles  # what the arguments of a node are broadcast to, of which none is known
        self.naming = names or (lambda node: node.name)
        self.numbers: dict[float, str] = {}

    # -- what goes in

    def value(self, arg: Any, node: fx.Node, beside: tuple[Role, ...] | None = None) -> Value:
        """An argument of `node`. beside: the roles of the arguments that are known, to which torch broadcasts it."""
        if isinstance(arg, bool):
            raise Unknown(node, f"it takes {arg}, and the language has no booleans but comparisons")
        if isinstance(arg, int | float):
            return Value(_number(float(arg), node))
        if not isinstance(arg, fx.Node):
            raise Unknown(node, f"it takes {arg!r}")
        around = self.around if beside is None else beside
        value = self.known.get(arg)
        if value is None and name_of(arg) in _COUNTING:
            value = self.position(arg, around)
        elif value is None and arg in self.over:
            value = self.taken_over(arg, around)
        if isinstance(value, tuple):
            raise Unknown(node, f"it takes all results of {name_of(arg)}")
        if value is not None and (value.packed or value.joined):
            raise Unknown(node, "it reads the bytes of a mask" if value.packed else "it reads two tiles that are joined")
        return self.leaf(arg, node, around) if value is None else value

    def taken_over(self, arg: fx.Node, around: tuple[Role, ...]) -> Value | None:
        """A value from before the product, computed in the program; None where it is not in the language."""
        before, self.around = self.around, around
        try:
            if is_view(arg) and not moves(arg):
                aligned = _aligned(tuple(arg.meta["val"].shape), around)
                source = None if aligned is None else _reshaped(aligned, tuple(arg.all_input_nodes[0].meta["val"].shape))
                if aligned is None or source is None:
                    raise Unknown(arg, "it is viewed otherwise")
                x = self.value(arg.all_input_nodes[0], arg, source)
                if not all(map(_compatible, reversed(x.roles), reversed(source))):
                    raise Unknown(arg, "it is viewed once as rows and once as columns")
                value = Value(x.text, aligned, x.boolean, x.reduced)
            else:
                read = self.read(arg)
                if isinstance(read, tuple) or read.roles != _aligned(tuple(arg.meta["val"].shape), around):
                    raise Unknown(arg, "it varies over something else")
                value = read
        except (Unknown, EpigenError):
            if arg in self.constants:  # nobody gives it
                raise
            self.over.discard(arg)
            return None
        finally:
            self.around = before
        if arg not in self.constants:  # which may be rows here and columns there
            self.known[arg] = value
        return value

    def position(self, arg: fx.Node, around: tuple[Role, ...]) -> Value | None:
        """What counts all rows, or all columns; None where it counts something else."""
        roles, (start, _, step) = _aligned(tuple(arg.meta["val"].shape), around), _counted(arg)
        axis = self.axes(roles[0]) if roles else ""
        if roles is None or axis not in ("m", "n") or not self.whole(roles, axis) or not isinstance(start, int | float) or not isinstance(step, int | float):
            return None
        return Value(axis if (start, step) == (0, 1) else f"({start!r} + {step!r} * {axis})", roles)

    def leaf(self, arg: fx.Node, node: fx.Node, beside: tuple[Role, ...]) -> Value:
        """What comes from outside the region, as an input of the program."""
        tensor = arg.meta.get("val")
        if isinstance(tensor, int | float | torch.SymFloat | torch.SymInt):
            shape: tuple[int, ...] = ()
            boolean = False
        elif isinstance(tensor, torch.Tensor):
            shape, boolean = tuple(tensor.shape), tensor.dtype == torch.bool
            if str(tensor.dtype) not in self.dtypes:
                raise Unknown(node, f"its argument {_called(arg)} is {tensor.dtype}", f"inputs are {', '.join(t.removeprefix('torch.') for t in BY_TORCH)}")
            if tensor.device != self.device:  # as a number of torch's may be, which a kernel cannot read there
                raise Unknown(
                    node, f"its argument {_called(arg)} is on {tensor.device}, and the product on {self.device}", "move it there, or make it a number"
                )
        else:
            raise Unknown(node, f"its argument {_called(arg)} is a {type(tensor).__name__}")
        leaf, roles = self.placed(arg, shape, node, beside)
        if self.leaves.setdefault(leaf.name, leaf) != leaf:
            raise Unknown(node, f"its argument {_called(arg)} is joined with rows here and with columns there")
        indices = leaf.indices.lstrip("b")
        declared = f"{leaf.name}[{','.join(indices)}]" if indices else leaf.name
        return self.bind(f"{declared} != 0", roles, True) if boolean else Value(declared, roles)

    def placed(self, arg: fx.Node, shape: tuple[int, ...], node: fx.Node, beside: tuple[Role, ...]) -> tuple[Leaf, tuple[Role, ...]]:
        """How the program takes an input, and what its dimensions run along. shape: its own."""
        what, tensor = f"its argument {_called(arg)} is {list(shape)}", arg.meta["val"]
        roles = _aligned(shape, beside)
        if roles is None:
            raise Unknown(node, f"{what}, which does not broadcast to what it is joined with")
        indices, expand = self.indices(roles), None
        if "n" in indices and not self.whole(roles, "n"):
            raise Unknown(node, f"{what}, which varies over a part of the columns")
        number = indices == "b"  # one of each product, which is given as a row or a column of it
        if number:
            indices = "bm" if self.whole(beside, "m") else "bn"
        if number or not self.whole(roles, indices):  # over some of the leading dimensions alone
            columns_at = [place for place, r in enumerate(beside) if self.axes(r) == "n"]
            if len(columns_at) > 1 or ("n" in indices and columns_at != [len(beside) - 1]) or not self.whole(beside, indices.replace("n", "")):
                raise Unknown(node, f"{what}, which varies over a part of the rows")
            if indices == "bmn":
                raise Unknown(node, f"{what}, a matrix of which some products share each: it would be copied for all of them")
            kept = [r if r and self.axes(r) in indices else None for r in beside]
            expand = tuple(r[1] if r else 1 for r in kept)
            roles = tuple(kept) if number else (*[None] * (len(beside) - len(roles)), *roles)
        try:
            order = None if in_order(roles) else tuple(order_of(roles))
            apart = self.batched and expand is None and "mn" in indices and not self.lies_evenly(tensor, roles)
        except NotImplementedError as error:
            raise Unknown(node, str(error)) from None
        if apart:
            raise Unknown(node, f"{what}, whose matrices do not lie evenly in memory")
        if order and (expand or not isinstance(tensor, torch.Tensor) or not lies_as_rows(tensor, [d for d in order if self.axes(roles[d]) != "b"])):
            raise Unknown(node, f"{what}, of which rows and columns have changed places")
        shared = self.shared(roles) if expand and indices == "mn" and not order else None
        return Leaf(self.naming(arg), arg, indices, expand, order, shared=shared), roles

    def shared(self, roles: Sequence[Role]) -> tuple[int, int] | None:
        """Into how many parts the rows fall, and how many each has, where a value has one row for each part, or the same rows for all."""
        along = [r for r in roles if r and r[0] == "m"]
        extent, step = math.prod(r[1] for r in along), along[-1][2]
        if same(extent * step, self.rows):
            return extent, step
        return (self.rows // extent, extent) if same(step, 1) else None

    # -- what dimensions run along

    def axes(self, role: Role) -> str:
        """The indices along which a dimension runs: "b" from one product of a batch to the next, "m" within each, "bm" over the rows of several, or "n"."""
        if role is None:
            return ""
        axis, extent, step = role
        if axis == "n" or not self.batched:
            return axis
        return "b" if same(step % self.rows, 0) else "m" if same(self.rows % (extent * step), 0) else "bm"

    def indices(self, roles: Sequence[Role]) -> str:
        """What a value varies over."""
        axes = {axis for role in roles for axis in self.axes(role)}
        return "".join(axis for axis in "bmn" if axis in axes)

    def whole(self, roles: Sequence[Role], axes: str = "bmn") -> bool:
        """Whether a value varies over all that runs along these."""
        extents = dict.fromkeys("bmn", 1)
        for role in roles:
            if role is not None and (along := self.axes(role)) == "bm":
                extents["b"] *= role[1] * role[2] // self.rows
                extents["m"] *= self.rows // role[2]
            elif role is not None:
                extents[along] *= role[1]
        return all(same(extents[axis], self.extents[axis]) for axis in axes)

    def lies_evenly(self, tensor: torch.Tensor, roles: Sequence[Role]) -> bool:
        """Whether all products of a batch are at one distance in memory, and so are all rows and all columns of each. Raises NotImplementedError as `order_of`."""
        order = [d for d in order_of(roles) if roles[d]]
        together = [(x, y) for x, y in itertools.pairwise(order) if not set(self.axes(roles[x])).isdisjoint(self.axes(roles[y]))]
        return all(same(tensor.stride(outer), tensor.shape[inner] * tensor.stride(inner)) for outer, inner in together)

    # -- the nodes

    def plus(self, product: fx.Node, added: fx.Node | None, scale: tuple[float, float] = (1.0, 1.0), factors: Sequence[fx.Node] = ()) -> None:
        """What addmm adds is a part of its value; product: one that is known, without that. scale: by how much the product and that are multiplied. factors: the product alone, besides."""
        own = self.known[product]
        assert isinstance(own, Value)
        scaled = " * ".join([own.text, *(self.value(factor, product).text for factor in factors)])
        parts = [(scaled, scale[0])] + ([(self.value(added, product).text, scale[1])] if added is not None else [])
        terms = [text if factor == 1 else f"{_number(factor, product)} * {text}" for text, factor in parts]
        self.known[product] = self.bind(" + ".join(terms), self.frame_roles)

    def add(self, node: fx.Node) -> None:
        """Take one more node into the region. Raises Unknown."""
        self.known[node] = self.read(node)

    def read(self, node: fx.Node) -> Value | tuple[Value, ...]:
        name = name_of(node)
        if node.target is operator.getitem:
            source = self.known.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(source, tuple) and isinstance(node.args[1], int) and node.args[1] < len(source):
                return source[node.args[1]]
            raise Unknown(node, "it indexes what is no result of the region")
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unknown(node, f"{name} is no operation of torch on tensors")
        if name == "detach" and self.derived:
            x = self.value(node.args[0], node)
            return x if x.boolean else self.bind(f"detach({x.text})", x.roles, False, x.reduced)
        if any(isinstance(value := self.known.get(s), Value) and value.joined for s in node.all_input_nodes):
            return self.of_parts(node, name)
        if name in SAME:
            return self.cast(node)
        if is_view(node):
            return self.viewed(node)
        if name in ("sum", "amax", "logsumexp", "mean"):
            return self.reduction(node, name)
        if name == "max" and len(node.args) == 1:
            return self.reduction(node, "amax")
        if name == "pow":
            return self.power(node)
        if name == "scalar_tensor" or (name == "full" and not node.args[0]):
            return Value(_number(float(node.args[0 if name == "scalar_tensor" else 1]), node))  # type: ignore[arg-type]
        if name in ("zeros", "ones", "full"):
            return self.filled(node, 0 if name == "zeros" else 1 if name == "ones" else node.args[1])
        if name in ("tril", "triu"):
            return self.triangle(node, name)
        if name == "gather":
            return self.gathered(node)
        if name == "cat" and self.joining:
            return self.together(node)
        if name in ("zeros_like", "ones_like", "full_like"):
            x = self.value(node.args[0], node)
            return Value("0" if name == "zeros_like" else "1" if name == "ones_like" else _number(float(node.args[1]), node), x.roles)  # type: ignore[arg-type]
        if name == "log_sigmoid_forward":
            return (self.apply(node, name),)
        if name == BITMASK:
            return self.packed(node)
        if name == WHERE_BITS:
            return self.chosen(node)
        return self.apply(node, name)

    # -- what is computed of positions

    def filled(self, node: fx.Node, value: Any) -> Value:
        """A tensor of one number."""
        tensor = node.meta["val"]
        roles = _aligned(tuple(tensor.shape), self.around)
        if roles is None:
            raise Unknown(node, f"it is {list(tensor.shape)}, which does not broadcast to what it is joined with")
        if tensor.dtype == torch.bool:
            return self.bind("1 > 0" if value else "1 < 0", roles, True)
        return Value(_number(float(value), node), roles)

    def triangle(self, node: fx.Node, name: str) -> Value:
        x, diagonal = self.value(node.args[0], node), named_arguments(node).get("diagonal", 0)
        if len(x.roles) < 2 or not in_order(x.roles) or not self.whole(x.roles[-2:-1], "m") or not self.whole(x.roles[-1:], "n"):
            raise Unknown(node, "it is a triangle of what has other rows or columns than the product")
        inside = f"n {'<=' if name == 'tril' else '>='} m + {diagonal}" if diagonal else f"n {'<=' if name == 'tril' else '>='} m"
        return self.bind(f"{x.text} & ({inside})" if x.boolean else f"where({inside}, {x.text}, 0)", x.roles, x.boolean)

    def gathered(self, node: fx.Node) -> Value:
        """One column of each row, by an index: the sum of what is 0 elsewhere."""
        source, dim, index = node.args[:3]
        x, shape = self.value(source, node), tuple(node.meta["val"].shape)
        if dim not in (-1, len(shape) - 1) or shape[-1] != 1 or "n" not in self.reductions or not self.whole(x.roles) or x.reduced or x.boolean:
            raise Unknown(node, "it gathers something else than one column of each row of a tile")
        column = self.value(index, node, (*x.roles[:-1], None))
        return self.bind(f"sum(where(n == {column.text}, {x.text}, 0), n)", (*x.roles[:-1], None), False, True)

    def together(self, node: fx.Node) -> Value:
        """Two tiles beside one another."""
        several: Any = node.args[0]
        known = [self.known.get(x) for x in several]
        tiles = [
            x for x in known if isinstance(x, Value) and not (x.packed or x.reduced or x.boolean or x.joined) and self.whole(x.roles) and in_order(x.roles)
        ]
        if len(known) == len(tiles) == 2 and len(tiles[0].roles) == len(tiles[1].roles) and all(map(_compatible, tiles[0].roles, tiles[1].roles)):
            *rows, columns = tiles[0].roles
            if columns is not None and columns[0] == "n" and named_arguments(node).get("dim", 0) in (-1, len(rows)):
                return Value("", (*rows, ("n", 2 * columns[1], 1)), joined=(tiles[0].text, tiles[1].text))
        raise Unknown(node, "it joins something else than two tiles beside one another")

    def of_parts(self, node: fx.Node, name: str) -> Value:
        """What is computed of two tiles that are joined, and of what all columns share: the same of each."""
        if not (name in SAME or name in _rules()):
            raise Unknown(node, "it reads two tiles that are joined")
        whole = {s: x for s in node.all_input_nodes if isinstance(x := self.known.get(s), Value) and x.joined}
        roles = next(iter(whole.values())).roles
        texts = []
        for place in range(2):
            self.known |= {s: Value(x.joined[place], (*x.roles[:-1], ("n", self.extents["n"], 1))) for s, x in whole.items()}
            try:
                part = self.cast(node) if name in SAME else self.apply(node, name)
            finally:
                self.known |= whole
            if part.boolean or not self.whole(part.roles):
                raise Unknown(node, "it is a condition of two tiles that are joined")
            texts.append(part.text)
        return Value("", roles, joined=tuple(texts))

    # -- packed masks

    def packed(self, node: fx.Node) -> Value:
        condition = self.value(node.args[0], node)
        if len(condition.roles) < 2 or not in_order(condition.roles) or not self.whole(condition.roles):
            raise Unknown(node, "it packs what does not vary over all rows and columns, in their order")
        return replace(condition, packed=True)

    def chosen(self, node: fx.Node) -> Value:
        """What a packed mask chooses, element by element: of two values, or of one and 0."""
        mask, *given = node.args
        inside = [self.known[x] for x in given if isinstance(x, fx.Node) and x in self.known]
        beside = _broadcast([v.roles for v in inside if isinstance(v, Value)], node) if inside else self.around
        known = self.known.get(mask)  # type: ignore[arg-type]
        assert isinstance(mask, fx.Node)
        if isinstance(known, Value):
            condition = replace(known, packed=False)
        else:
            condition = self.mask(mask, node, beside)
        values = [self.value(x, node, beside) for x in given]
        if any(v.reduced or v.boolean for v in values):
            raise Unknown(node, "it chooses of sums or of booleans")
        x, *y = (v.text for v in values)
        roles = _broadcast([v.roles for v in (condition, *values)], node)
        return self.bind(f"where({condition.text}, {x}, {y[0]})" if y else f"drelu({x}, {condition.text})", roles)

    def mask(self, arg: fx.Node, node: fx.Node, beside: tuple[Role, ...]) -> Value:
        """A packed mask from outside the region, as an input of the program."""
        roles = _aligned(tuple(node.meta["val"].shape), beside)
        if roles is None or not in_order(roles) or not self.whole(roles):
            raise Unknown(node, f"the packed mask {arg.name} does not vary over all rows and columns, in their order")
        leaf = Leaf(self.naming(arg), arg, "bmn" if self.batched else "mn", None, packed=True)
        if self.leaves.setdefault(leaf.name, leaf) != leaf:
            raise Unknown(node, f"the packed mask {arg.name} is read as bytes too")
        return self.bind(f"bits({leaf.name})", roles, True)

    def apply(self, node: fx.Node, name: str) -> Value:
        """An elementwise operation."""
        if _counts(node):
            raise Unknown(node, "it computes with integers", "the language computes in fp32: cast them to float32 first, which holds those up to 2^24")
        given = _arguments(node)
        for rule in _rules().get(name, ()):
            values = self.matched(rule, given, node)
            if values is not None:
                roles = _broadcast([v.roles for v in values.values()], node)
                tensor = node.meta.get("val")
                tensor = tensor[0] if isinstance(tensor, tuple | list) else tensor
                boolean = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bool
                if any(v.reduced for v in values.values()) and any(not v.reduced and "mn" in self.indices(v.roles) for v in values.values()):
                    raise Unknown(node, "it joins a reduction with what it is taken of", "a second kernel has to read it")
                conditions = _CONDITIONS.get(name, ())
                written = rule.text if self.derived else _UNDERIVED.get(rule.text, rule.text)
                text = _filled(written, {key: _as_condition(value) if key in conditions else _as_number(value) for key, value in values.items()})
                if boolean and not (conditions == ("x", "y") or conditions == ("x",) or name in _COMPARISONS):
                    text = f"({text}) != 0"
                return self.bind(text, roles, boolean, any(v.reduced for v in values.values()))
        raise Unknown(node, f"{name} is not in the language", "compute it outside of the epilogue, or see 'epigen ops' for what is")

    def matched(self, rule: _Rule, given: Mapping[str | int, Any], node: fx.Node) -> dict[str, Value] | None:
        """The rule's names, where the node's arguments are as it wants them."""
        used: set[str] = set()
        named: dict[str, Any] = {}
        for key, wanted in rule.params:
            if key not in given:
                return None
            schema_name, value = given[key]
            used.add(schema_name)
            if isinstance(wanted, tuple):
                if isinstance(value, fx.Node) or value != wanted[0]:
                    return None
            elif wanted != "_":
                if value is None or isinstance(value, str | bool):
                    return None
                named[wanted] = value
        if any(value != default for schema_name, value, default in given.get("", ()) if schema_name not in used):
            return None
        inside = [self.known[x] for x in named.values() if isinstance(x, fx.Node) and x in self.known]
        beside = _broadcast([v.roles for v in inside if isinstance(v, Value)], node) if inside else None
        if beside is not None and node in self.over:  # what takes it has said what it is broadcast to
            beside = _widened(beside, self.around)
        return {name: self.value(value, node, beside) for name, value in named.items()}

    def power(self, node: fx.Node) -> Value:
        base, exponent = node.args
        if not isinstance(exponent, int | float):
            return self.apply(node, "pow")
        x = self.value(base, node)
        if float(exponent) in _POWERS:
            text = _POWERS[float(exponent)].replace("x", x.text) if exponent != 1 else x.text
        elif float(exponent).is_integer() and 2 <= exponent <= 8:
            text = f"({x.text}) ** {int(exponent)}"
        else:
            return self.apply(node, "pow")
        return self.bind(text, x.roles, False, x.reduced)

    def cast(self, node: fx.Node) -> Value:
        x = self.value(node.args[0], node)
        tensor = node.meta["val"]
        if self.moving and name_of(node) in ("clone", "contiguous") and not _lies_as(tensor, x.roles):
            raise Unknown(node, "it copies its rows to elsewhere in memory, as what reads them wants them")  # a kernel of its own, that a program cannot spare
        if tensor.dtype == torch.bool and not x.boolean:
            return self.bind(f"{x.text} != 0", x.roles, True, x.reduced)
        if x.boolean and tensor.dtype != torch.bool:
            return self.bind(f"where({x.text}, 1, 0)", x.roles, False, x.reduced)
        if str(tensor.dtype) not in self.dtypes or not (tensor.dtype.is_floating_point or tensor.dtype == torch.bool):
            raise Unknown(node, f"it casts to {tensor.dtype}", "the language computes in fp32: cast outside of the epilogue")
        if self.casts and tensor.dtype.is_floating_point and node.args[0].meta["val"].dtype != tensor.dtype:  # type: ignore[union-attr]  # x is of a node
            return self.bind(f"cast({x.text}, {self.dtypes[str(tensor.dtype)].name})", x.roles, False, x.reduced)
        return x

    def viewed(self, node: fx.Node) -> Value:
        """A view that keeps rows and columns what they are."""
        x = self.value(node.args[0], node)
        shape = tuple(node.meta["val"].shape)
        roles = _moved(x.roles, node) if moves(node) and self.moving else None if moves(node) else _reshaped(x.roles, shape)
        if roles is None:
            what = "repeats elements" if name_of(node) == "expand" else f"moves elements between {'products, ' if self.batched else ''}rows and columns"
            raise Unknown(node, f"{name_of(node)} to {list(shape)} {what}")
        return Value(x.text, roles, x.boolean, x.reduced)

    def reduction(self, node: fx.Node, name: str) -> Value:
        given = named_arguments(node)
        x = self.value(node.args[0], node)
        if x.reduced:
            raise Unknown(node, "it reduces what is reduced already", "reduce over both at once, or outside of the epilogue")
        if _counts(node):
            raise Unknown(node, f"it takes the {name} of integers", "the language computes in fp32: cast them to float32 first, which holds those up to 2^24")
        if x.boolean:
            raise Unknown(node, f"it takes the {name} of booleans", "write torch.where(condition, 1.0, 0.0) first")
        rank = len(x.roles)
        dims = given.get("dim")
        listed = range(rank) if dims is None or dims == [] else [d % rank for d in ([dims] if isinstance(dims, int) else dims)]
        over = [x.roles[d] for d in listed if x.roles[d] is not None]
        axes = ""
        if "b" in self.indices(over):
            raise Unknown(node, "it reduces over products of a batch", "a program reduces over the rows of each, its columns or both")
        for axis in "mn":
            extent = self.extents[axis]
            parts = [r[1] for r in over if r is not None and r[0] == axis]
            if same(math.prod(parts), extent) and (parts or any(x.roles[d] is None for d in listed)):
                axes += axis
            elif parts:
                raise Unknown(node, f"it reduces a part of the {'rows' if axis == 'm' else 'columns'}", "a program reduces over all rows, all columns or both")
        if axes not in self.reductions:
            raise Unknown(node, "it reduces over the columns" if axes else "it reduces over nothing")
        if not self.whole(x.roles):
            raise Unknown(node, "it reduces what does not vary over rows and columns", "compute it outside of the epilogue")
        text = f"{'max' if name == 'amax' else name}({x.text}{', ' + axes if axes != 'mn' else ''})"
        keep = bool(given.get("keepdim", False))
        roles = tuple(None if d in listed else r for d, r in enumerate(x.roles) if keep or d not in listed)
        return self.bind(text, roles, False, True)

    def second(self, node: fx.Node, right: fx.Node) -> None:
        """Another product of the same left operand, which the program computes too. right: what gives its right operand."""
        leaf = Leaf(self.naming(right), right, "kn", None)
        if right not in self.known and self.leaves.setdefault(leaf.name, leaf) == leaf:
            self.known[node] = self.bind(f"dot(a, {leaf.name}[k,n])", self.frame_roles)

    def bind(self, text: str, roles: tuple[Role, ...], boolean: bool = False, reduced: bool = False) -> Value:
        name = f"v{len(self.lines)}_"
        self.lines.append(f"{name} = {text}")
        return Value(name, roles, boolean, reduced)

    # -- what comes out

    def program(self, outputs: Iterable[fx.Node], operands: torch.dtype) -> Imported:
        """The program with these outputs, each in the dtype that torch gives it, booleans as int8. operands: their dtype. Raises Unknown, ParseError, CheckError."""
        listed: list[str] = []
        joined = set[int]()
        lines = list(self.lines)
        results = list(outputs)
        for position, node in enumerate(results):
            value, dtype = self.known.get(node), node.meta["val"].dtype
            if not isinstance(value, Value):
                raise Unknown(node, "it is a result, and not computed of the product", "return it as it is, outside of the epilogue")
            text = f"bitmask({value.text})" if value.packed else f"cast(where({value.text}, 1, 0), int8)" if value.boolean else value.text
            texts = list(value.joined) or [text]
            if not value.packed and dtype not in (torch.bool, torch.float32 if value.reduced and operands != torch.float64 else operands):
                if not dtype.is_floating_point or str(dtype) not in BY_TORCH:
                    raise Unknown(node, f"its result is {dtype}", "cast it to a float outside of the epilogue")
                texts = [f"cast({text}, {BY_TORCH[str(dtype)].name})" for text in texts]
            named = "out" if len(results) == 1 else f"out{position}"
            joined |= {len(listed)} if value.joined else set()
            listed += [f"{named}_first", f"{named}_second"] if value.joined else [named]
            lines += [f"{name} = {text}" for name, text in zip(listed[-len(texts) :], texts, strict=True)]
        written = _used(lines, listed)
        graph = graph_of("; ".join([*written, ", ".join(listed)]))
        graph = graph_of(text := _with_joined(program_of(recognised(_unlabelled(graph))), joined))
        leaves = tuple(self.leaves[n.name] for n in graph.inputs())
        roles = tuple(value.roles for node in results if isinstance(value := self.known[node], Value))
        return Imported(text, graph, leaves, tuple(graph.nodes[o.node].indices for o in graph.outputs), roles)


_WORD = re.compile(r"v\d+_")


def _used(lines: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """The assignments that the outputs need."""
    needed = set(_WORD.findall(" ".join(outputs)))
    kept: list[str] = []
    for line in reversed(lines):
        name, _, text = line.partition(" = ")
        if name in needed or not _WORD.fullmatch(name):
            needed |= set(_WORD.findall(text))
            kept.append(line)
    return kept[::-1]


def _with_joined(program: Program, firsts: Collection[int]) -> str:
    """The text of a program of parts, with those outputs joined to the ones behind them. firsts: their places."""
    outputs = list(program.outputs)
    for place in sorted(firsts, reverse=True):
        outputs[place : place + 2] = [Call(HALVES, (outputs[place], outputs[place + 1]), outputs[place].span)]
    return to_text(replace(program, outputs=tuple(outputs)))


def _unlabelled(graph: Graph) -> Graph:
    return Graph(tuple(replace(n, label="") if _WORD.fullmatch(n.label) else n for n in graph.nodes), graph.outputs, graph.text)


def _filled(rule: str, values: Mapping[str, str]) -> str:
    """A rule's text with values in the places of its names; a function's name is none of them."""
    return re.sub(r"[a-z_]\w*\b(?!\()", lambda match: values.get(match[0], match[0]), rule)


def _counts(node: fx.Node) -> bool:
    """Whether torch computes it in integers, exactly or around their ends, where fp32 rounds: all but comparisons of small ones."""
    result, given = node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]
    result = result[0] if isinstance(result, tuple | list) else result
    held = {t.dtype for t in given if isinstance(t, torch.Tensor)}
    if not isinstance(result, torch.Tensor) or any(d.is_floating_point for d in held):
        return False
    if result.dtype != torch.bool:
        return not (result.dtype.is_floating_point or _largest(node) < _EXACT)
    rounded = [x for x in node.args if isinstance(x, fx.Node | int | float) and not _largest(x) < _EXACT]
    return not held.isdisjoint((torch.int32, torch.int64)) and len(rounded) > 1


_COUNTING = ("arange", "iota")


def _counted(node: fx.Node) -> tuple[Any, Any, Any]:
    """Of torch.arange and its like the first number, how many there are, and from one to the next."""
    given = named_arguments(node)
    return given.get("start", 0), node.meta["val"].shape[0], given.get("step", 1)


def _largest(x: Any) -> float:
    """The largest magnitude of integers that are computed of numbers and of positions alone; infinite where anything else has part in them."""
    if isinstance(x, int | float):
        return abs(x)
    if not isinstance(x, fx.Node) or x.op != "call_function":
        return math.inf
    name = name_of(x)
    if name in _COUNTING:
        start, count, step = _counted(x)
        known = all(isinstance(each, int | float) for each in (start, count, step))
        return max(abs(start), abs(start + step * count)) if known else math.inf
    if is_view(x) or name in SAME or name in ("neg", "abs"):
        return _largest(x.args[0])
    if name in ("add", "sub") and not x.kwargs and len(x.args) == 2:
        return _largest(x.args[0]) + _largest(x.args[1])
    return _largest(x.args[0]) * _largest(x.args[1]) if name == "mul" else math.inf


_LOGICAL = dict.fromkeys(("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"), ("x", "y"))
_CONDITIONS: Mapping[str, tuple[str, ...]] = _LOGICAL | {"logical_not": ("x",), "bitwise_not": ("x",), "where": ("c",), "masked_fill": ("c",)}
"""The arguments of torch's operations that are conditions, as rules call them. Booleans in other places are numbers, 0 and 1, as torch has them."""

_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne", "isnan")


def _as_number(value: Value) -> str:
    return f"where({value.text}, 1, 0)" if value.boolean else value.text


def _as_condition(value: Value) -> str:
    return value.text if value.boolean else f"({value.text} != 0)"


def _number(value: float, node: fx.Node) -> str:
    if math.isnan(value):
        raise Unknown(node, "it takes NaN, which the language cannot write")
    return f"({value!r})" if value < 0 else repr(value)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by torch's names for them."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    given = dict(node.kwargs)
    given |= {a.name: v for a, v in zip(target._schema.arguments, node.args, strict=False)}
    return given


def _arguments(node: fx.Node) -> dict[str | int, Any]:
    """By place and by name: (torch's name, value); under "" all, as (name, value, default), of which a default that is not there is like no value."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    given = named_arguments(node)
    arguments: dict[str | int, Any] = {}
    listed = []
    for place, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        value = given.get(argument.name, default)
        if argument.name in given or argument.has_default_value():
            arguments[place] = arguments[argument.name] = (argument.name, value)
            listed.append((argument.name, value, default if argument.has_default_value() else inspect.Parameter.empty))
    arguments[""] = listed
    return arguments


# -- dimensions


def same(x: Any, y: Any) -> bool:
    """Whether two extents are equal, of those that vary whether they are so always."""
    return x == y if isinstance(x, int) and isinstance(y, int) else statically_known_true(x == y)


def size_hint(extent: Any) -> int | None:
    """An extent that varies, as it is in the first call; None where it is known at run time alone."""
    if isinstance(extent, int):
        return extent
    return int(extent.node.hint) if extent.node.has_hint() else None


def _roles_of(frame: Sequence[int]) -> tuple[Role, ...]:
    roles: list[Role] = []
    step = 1
    for extent in reversed(frame[:-1]):
        roles.append(None if same(extent, 1) else ("m", extent, step))
        step *= extent
    return (*reversed(roles), None if same(frame[-1], 1) else ("n", frame[-1], 1))


def _compatible(x: Role, y: Role) -> bool:
    return x is None or y is None or (x[0] == y[0] and same(x[1], y[1]) and same(x[2], y[2]))


def _aligned(shape: Sequence[int], frame: Sequence[Role]) -> tuple[Role, ...] | None:
    """The roles of a tensor that torch would broadcast to the frame; None where it would not, or would make the frame larger."""
    if len(shape) > len(frame):
        return None
    roles: list[Role] = []
    for extent, role in zip(reversed(shape), reversed(frame), strict=False):
        if same(extent, 1):
            roles.append(None)
        elif role is not None and same(role[1], extent):
            roles.append(role)
        else:
            return None
    return tuple(reversed(roles))


def _widened(roles: tuple[Role, ...], around: tuple[Role, ...]) -> tuple[Role, ...]:
    """The roles, and where they have none those that they are broadcast to, if they are."""
    if len(roles) > len(around) or not all(map(_compatible, reversed(roles), reversed(around))):
        return roles
    whole = (*[None] * (len(around) - len(roles)), *roles)
    return tuple(role or other for role, other in zip(whole, around, strict=True))


def _broadcast(several: Sequence[tuple[Role, ...]], node: fx.Node) -> tuple[Role, ...]:
    rank = max((len(r) for r in several), default=0)
    combined: list[Role] = [None] * rank
    for roles in several:
        for place, role in enumerate(reversed(roles)):
            if not _compatible(combined[place], role):
                raise Unknown(node, "it joins rows with columns, or different parts of them", "transpose outside of the epilogue")
            combined[place] = combined[place] or role
    return tuple(reversed(combined))


def _reshaped(roles: Sequence[Role], shape: Sequence[int]) -> tuple[Role, ...] | None:
    """The roles after a view, where each new dimension lies within what one of rows and columns gave."""
    pending = [r for r in roles if r is not None]
    reshaped: list[Role] = []
    for extent in reversed(shape):
        if same(extent, 1):
            reshaped.append(None)
            continue
        if not pending:
            return None
        axis, size, step = pending.pop()
        while not same(size, extent):
            if same(size % extent, 0):  # a part of it
                pending.append((axis, size // extent, step * extent))
                size = extent
            elif pending and pending[-1][0] == axis and same(pending[-1][2], step * size):
                size *= pending.pop()[1]
            else:
                return None
        reshaped.append((axis, extent, step))
    return None if pending else tuple(reversed(reshaped))


def _moved(roles: Sequence[Role], node: fx.Node) -> tuple[Role, ...]:
    """The roles after a view that changes the order of dimensions."""
    places = list(range(len(roles)))
    given: tuple[Any, ...] = node.args[1:]
    if name_of(node) == "permute":
        places = list(given[0])
    elif len(roles) > 1:
        x, y = given or (0, 1)
        places[x], places[y] = places[y], places[x]
    return tuple(roles[place] for place in places)


def _lies_as(tensor: torch.Tensor, roles: Sequence[Role]) -> bool:
    """Whether what runs along these lies in memory as a program's result does."""
    steps = [size_hint(tensor.stride(d)) or 0 for d in order_of(roles) if roles[d] is not None]
    return steps == sorted(steps, reverse=True)


def order_of(roles: Sequence[Role]) -> list[int]:
    """The dimensions as they lie in a matrix, rows first, then those of one element. Raises NotImplementedError where that is known at run time alone."""

    def before(x: int, y: int) -> int:
        (axis, _, step), (other_axis, _, other_step) = (roles[d] or ("", 1, 1) for d in (x, y))
        if axis != other_axis:
            return _OUTER_FIRST.index(axis) - _OUTER_FIRST.index(other_axis)
        if same(step, other_step):
            return 0
        if same(step % other_step, 0):  # each step is a product of those within it, and so divides them: which is larger need not be known
            return -1
        if same(other_step % step, 0):
            return 1
        raise NotImplementedError(f"the order of its dimensions, {step} and {other_step} rows apart, is known at run time alone")

    return sorted(range(len(roles)), key=functools.cmp_to_key(before))


_OUTER_FIRST = ("m", "", "n")
"""What dimensions run along, in the order of memory. A dimension of one element, which may lie anywhere, has a place of its own: were it equal to all others,
those on both sides of it would not be compared."""


def in_order(roles: Sequence[Role]) -> bool:
    return [d for d in order_of(roles) if roles[d]] == [d for d in range(len(roles)) if roles[d]]


def lies_as_rows(tensor: torch.Tensor, order: Sequence[int], dense: bool = False) -> bool:
    """Whether a tensor, its dimensions in this order, is a matrix without being copied: the last dimension side by side, all others together at one distance.

    dense: and whether nothing lies between its rows.
    """
    *rows, (columns, step) = [(tensor.shape[d], tensor.stride(d)) for d in order]
    rows = [row for row in rows if not same(row[0], 1)]
    if not (same(columns, 1) or same(step, 1)) or (dense and rows and not same(rows[-1][1], columns)):
        return False
    return all(same(outer[1], inner[0] * inner[1]) for outer, inner in itertools.pairwise(rows))
