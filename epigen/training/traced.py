"""A plain function of torch's on a product and its inputs -> a program of the language.

The function is run once, on tensors without contents, while torch writes down the operations that it calls; `aten` reads those. Tensors that the function
holds itself, such as a module's parameters, become inputs of the program too. What the function detaches, or computes in torch.no_grad(), is detached in the
program, whose derivative is then the function's.
"""

from __future__ import annotations

import inspect
import re
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from epigen.errors import CallError, CheckError, EpigenError, ParseError
from epigen.ir.check import refused_name
from epigen.ir.program import graph_of
from epigen.ir.reference import without_autocast
from epigen.training import halved
from epigen.training.aten import CALLED, Imported, Importer, Unknown, is_view, name_of
from epigen.training.unlogged import unlogged

Given = Tensor | float


@dataclass(frozen=True, slots=True)
class Traced:
    """program: what the function computes. held: tensors of the function's own, by the names that they have as inputs of the program.
    renamed: by the same names, those arguments of the function that are called otherwise there, because the language has the names for itself.
    viewed: by the same names, views of arguments or of what is held: its name, and what is called of it in turn, with the arguments that follow.
    results: the shape and dtype of each tensor that it returns. structure: what holds them. parts: of how many columns of the product one of its tiles' is."""

    program: Imported
    held: Mapping[str, Tensor]
    renamed: Mapping[str, str]
    viewed: Mapping[str, tuple[str, tuple[tuple[Any, tuple[Any, ...]], ...]]]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    structure: pytree.TreeSpec
    parts: int = 1


class Unrunnable(CallError):
    """A function that torch cannot run on tensors such as these."""


def trace(
    function: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device, inputs: Mapping[str, Given],
    constants: Mapping[str, Any] = types.MappingProxyType({}), what: str = "the epilogue", casts: bool = False, origin: Callable[..., Any] | None = None,
) -> Traced:  # fmt: skip
    """function: takes the product, [..., N], and the inputs by name. shape, dtype: of the product. Numbers among the inputs stay inputs. constants: what it
    takes besides, by name. what: it is called in errors. casts: as of `Importer`. origin: the function by whose names tensors that it holds are called.

    Raises CallError, which names the operation that is not in the language and its place in the function; Unrunnable where torch itself refuses.
    """
    called = function.__call__ if isinstance(function, nn.Module) else function
    names = list(inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        empty = [torch.empty(tuple(shape), dtype=dtype, device=device), *(_empty(value, fake) for value in inputs.values())]
    structure: list[Any] = []

    def flat(mm: Tensor, *values: Tensor) -> list[Any]:
        with _Seen(what):
            results, spec = pytree.tree_flatten(called(mm, **dict(zip(names, values, strict=True)), **constants))
        structure.append(spec)
        return results

    try:
        with fake, unlogged(), torch.enable_grad(), without_autocast(device), fx.traceback.preserve_node_meta():
            module = make_fx(torch.func.functionalize(flat))(*empty)  # what it changes in place is a value of its own
    except EpigenError:
        raise
    except Exception as error:
        if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
            place = _line(traceback.extract_tb(error.__traceback__))
            hint = "choose by torch.where, and leave numbers tensors of one element, or give them as inputs"
            raise Unrunnable(f"{what} asks for the value of a tensor ({place}), which is known at run time alone: {hint}") from error
        said = str(error).partition("\n")[0]
        raise Unrunnable(f"{what} cannot be run on a product of {list(shape)}: {type(error).__name__}: {said}") from error
    module.graph.eliminate_dead_code()
    with fake:
        way = halved.way_of(module, empty)
    if way and (of_parts := _of_parts(function, module, way, structure[0], shape, dtype, device, inputs, what, casts)) is not None:
        return of_parts
    product, *placed = module.graph.find_nodes(op="placeholder")
    called_names = dict(zip(placed, names, strict=True))
    for node, name in called_names.items():
        node.meta[CALLED] = name
    held: dict[str, Tensor] = {}
    renamed: dict[str, str] = {}
    viewed: dict[str, tuple[str, tuple[tuple[Any, tuple[Any, ...]], ...]]] = {}
    taken = {*names}

    views = _views(module.graph, [*(n for n in placed if isinstance(inputs[called_names[n]], Tensor)), *module.graph.find_nodes(op="get_attr")])

    apart = _apart(module.graph)

    def source(node: fx.Node) -> str:
        """What an input is called by whoever gives it."""
        if node in called_names:
            return str(called_names[node])
        if node.op != "get_attr":
            raise Unknown(node, "it counts neither all rows of the product nor all its columns")
        tensor = getattr(module, str(node.target))
        name = next((name for name, other in held.items() if other is tensor), "") or _free(_name_in(origin or function, tensor) or "constant", taken)
        held[name] = tensor
        return name

    def named(node: fx.Node) -> str:
        calls: list[tuple[Any, tuple[Any, ...]]] = []
        while node in views:
            calls.insert(0, (node.target, node.args[1:]))
            (node,) = node.all_input_nodes
        own = source(node)
        if calls:
            return _known(viewed, (own, tuple(calls)), own, taken)
        return own if node not in called_names or refused_name(own, scalar=True) is None else _known(renamed, own, own, taken)

    importer = Importer(product, shape, named, over=views, derived=True, casts=casts, constants=apart)
    try:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                node.meta.setdefault("val", getattr(module, str(node.target)))
            elif node.op == "call_function" and node not in views and node not in apart and not _of_the_product_alone(node, product):
                importer.add(node)
        (output,) = module.graph.find_nodes(op="output")
        results = [_checked(node, what) for node in output.args[0]]
        program = importer.program(results, dtype)
    except Unknown as unknown:
        called_as, place = _place(unknown.node)
        instead = f"; {unknown.instead}" if unknown.instead else ""
        if unknown.node.op == "placeholder":
            raise CallError(f"{what} returns {called_names.get(unknown.node, 'the product')} as it is: {unknown.instead}") from None
        if name_of(unknown.node) == "copy_":
            raise CallError(f"{what} changes an input in place{place}, and a kernel only reads them: return the new value") from None
        raise CallError(f"{what} calls {called_as}{place}, which no epilogue computes: {unknown.why}{instead}") from None
    except (ParseError, CheckError) as error:  # about a text that nobody wrote
        raise CallError(f"{what} is no epilogue: {error.diagnostics[0].message}; {error.diagnostics[0].hint}") from error
    values = [node.meta["val"] for node in results]
    return Traced(program, held, renamed, viewed, tuple((tuple(v.shape), v.dtype) for v in values), structure[0])


def _of_parts(
    function: Callable[..., Any], module: fx.GraphModule, way: str, structure: pytree.TreeSpec, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
    inputs: Mapping[str, Given], what: str, casts: bool,
) -> Traced | None:  # fmt: skip
    """A function that parts its product, by the program of both parts; None where it reads but one. structure: of its results."""
    *lead, columns = shape
    taken = {*inputs}
    x, y = (_free(name, taken) for name in ("left", "right"))
    run = halved.of_parts(module, way, columns)

    def of_both(mm: Tensor, **values: Tensor) -> Any:
        return pytree.tree_unflatten(run(mm, values.pop(y), *values.values()), structure)

    part = torch.empty((*lead, columns // 2), dtype=dtype, device=device)
    traced = trace(of_both, part.shape, dtype, device, {**inputs, y: part}, what=what, casts=casts, origin=function)
    if not all(re.search(rf"\b{name}", traced.program.text) for name in (r"mm\b", rf"{y}\[m,n\]")):
        return None
    text = halved.text_of_parts(way, "mm", traced.program.text, x, y)
    program = replace(traced.program, text=text, graph=graph_of(text), leaves=tuple(leaf for leaf in traced.program.leaves if leaf.name != y))
    return replace(traced, program=program, parts=2)


def _of_the_product_alone(node: fx.Node, product: fx.Node) -> bool:
    """Whether a node writes to the product, which nothing else sees."""
    return name_of(node) == "copy_" and node.args[0] is product


def _views(graph: fx.Graph, inputs: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """What is a view, or a part, of an input alone. The program reads through it where it can, and is given it where it cannot."""
    views: list[fx.Node] = []
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and (is_view(node) or name_of(node) in ("select", "slice"))
            and all(n in views or n in inputs for n in node.all_input_nodes)
        ):
            views.append(node)
    return views


def _apart(graph: fx.Graph) -> Collection[fx.Node]:
    """What neither the product nor any other tensor has part in: it is computed of positions and numbers alone."""
    apart: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and all(n in apart for n in node.all_input_nodes):
            apart[node] = None
    return apart


def _known(names: dict[str, Any], value: Any, base: str, taken: set[str]) -> str:
    """The name of a value among those that have one; else one that is free."""
    name = next((name for name, other in names.items() if other == value), "") or _free(base, taken)
    names[name] = value
    return name


def _empty(value: Given, fake: FakeTensorMode) -> Tensor:
    """A number as a tensor of one element, so that another number is the same program."""
    return fake.from_tensor(value) if isinstance(value, Tensor) else torch.empty((), dtype=torch.float32)


def _checked(node: Any, what: str) -> fx.Node:
    if not isinstance(node, fx.Node):
        raise CallError(f"{what} returns {node!r}, and what it returns are tensors")
    if node.meta["val"].dtype == torch.bool:
        raise CallError(f"{what} returns booleans: return torch.where(condition, 1.0, 0.0), or write the program, with bitmask(condition)")
    return node


class _Seen(TorchFunctionMode):
    """Has each node know which of torch's functions it is of, and the line of the user's function that calls that; and detaches what has no gradient in torch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's own signature
        stack = traceback.extract_stack()
        inside = stack[max(place for place, frame in enumerate(stack) if (frame.filename, frame.name) == (__file__, "flat")) + 1 :]
        own, place = _own(inside), _line(inside)
        if func == _ASKS and inside[-2] in own:
            raise CallError(f"{self.what} asks whether a tensor requires a gradient ({place}), and is traced once for those that do and those that do not")
        called = getattr(func, "__name__", "")
        called = func.__self__.__name__ if called == "__get__" else called.strip("_")
        fx.traceback.set_stack_trace([f"{called}\n{place}"])
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and func != _DATA:
            return result
        if any(result is x for x in args):
            raise CallError(f"{self.what} changes a tensor in place within torch.no_grad() ({place}), and the gradient goes past that: write the new value")
        return pytree.tree_map_only(Tensor, Tensor.detach, result)


def _own(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that are neither torch's nor epigen's."""
    return [frame for frame in stack if not frame.filename.startswith(_OTHERS)]


def _line(stack: Iterable[traceback.FrameSummary]) -> str:
    """The last line of the user's in a stack; "" where there is none."""
    own = _own(stack)
    return f"line {own[-1].lineno} of {Path(own[-1].filename).name}: {own[-1].line}" if own else ""


_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_ASKS, _DATA = (getattr(Tensor, name).__get__ for name in ("requires_grad", "data"))


def _place(node: fx.Node) -> tuple[str, str]:
    """What torch calls the function that a node is of, and where it is called."""
    called, _, place = (node.stack_trace or "").partition("\n")
    return called or name_of(node), f" ({place})" if place else ""


def _name_in(function: Callable[..., Any], tensor: Tensor) -> str:
    """What a function calls a tensor that it holds."""
    function = inspect.unwrap(function)
    if isinstance(function, nn.Module):
        return next((name.rpartition(".")[2] for name, p in [*function.named_parameters(), *function.named_buffers()] if p is tensor), "")
    try:
        held = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return ""
    return next((str(name) for name, value in {**held.globals, **held.nonlocals}.items() if value is tensor), "")


def _free(base: str, taken: set[str]) -> str:
    name, number = base, 1
    while name in taken or refused_name(name) is not None:
        name, number = f"{base}_{number}", number + 1
    taken.add(name)
    return name
