"""A plain function of torch's on a product and its inputs -> a program of the language.

The function is run once, on tensors without contents, while torch writes down the operations that it calls; `aten` reads those. Tensors that the function
holds itself, such as a module's parameters, become inputs of the program too.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from epigen.errors import CallError, EpigenError
from epigen.ir.check import refused_name
from epigen.training.aten import Imported, Importer, Unknown, name_of

Given = Tensor | float


@dataclass(frozen=True, slots=True)
class Traced:
    """program: what the function computes. held: tensors of the function's own, by the names that they have as inputs of the program."""

    program: Imported
    held: Mapping[str, Tensor]


def trace(function: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device, inputs: Mapping[str, Given]) -> Traced:
    """function: takes the product, [..., N], and the inputs by name. shape, dtype: of the product. Numbers among the inputs stay inputs.

    Raises CallError, which names the operation that is not in the language and its place in the function.
    """
    called = function.__call__ if isinstance(function, nn.Module) else function
    what = _described(function)
    names = list(inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        empty = [torch.empty(tuple(shape), dtype=dtype, device=device), *(_empty(value, fake) for value in inputs.values())]
    structure: list[Any] = []

    def flat(mm: Tensor, *values: Tensor) -> list[Any]:
        with _Places():
            results, spec = pytree.tree_flatten(called(mm, **dict(zip(names, values, strict=True))))
        structure.append(spec)
        return results

    try:
        with fake, torch.no_grad(), fx.traceback.preserve_node_meta():
            module = make_fx(flat)(*empty)
    except EpigenError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise CallError(f"{what} cannot be run on a product of {list(shape)}: {type(error).__name__}: {said}") from error
    module.graph.eliminate_dead_code()
    product, *placed = module.graph.find_nodes(op="placeholder")
    called_names = dict(zip(placed, names, strict=True))
    held: dict[str, Tensor] = {}
    taken = {*names}

    def named(node: fx.Node) -> str:
        if node in called_names:
            return str(called_names[node])
        tensor = getattr(module, str(node.target))
        name = _free(_name_in(function, tensor) or "constant", taken)
        held[name] = tensor
        return name

    importer = Importer(product, shape, named)
    try:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                node.meta.setdefault("val", getattr(module, str(node.target)))
            elif node.op == "call_function":
                importer.add(node)
        (output,) = module.graph.find_nodes(op="output")
        program = importer.program([_checked(node, what) for node in output.args[0]], dtype)
    except Unknown as unknown:
        place = _place(unknown.node)
        instead = f"; {unknown.instead}" if unknown.instead else ""
        raise CallError(f"{what} calls {name_of(unknown.node)}{place}, which no epilogue computes: {unknown.why}{instead}") from None
    return Traced(program, held)


def _empty(value: Given, fake: FakeTensorMode) -> Tensor:
    """A number as a tensor of one element, so that another number is the same program."""
    return fake.from_tensor(value) if isinstance(value, Tensor) else torch.empty((), dtype=torch.float32)


def _checked(node: Any, what: str) -> fx.Node:
    if not isinstance(node, fx.Node):
        raise CallError(f"{what} returns {node!r}, and what it returns are tensors")
    if node.meta["val"].dtype == torch.bool:
        raise CallError(f"{what} returns booleans: return torch.where(condition, 1.0, 0.0), or write the program, with bitmask(condition)")
    return node


def _described(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"the epilogue {name}" if name != "<lambda>" else "the epilogue"


class _Places(TorchFunctionMode):
    """Has each node know the line of the user's function that calls it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's own signature
        own = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_OTHERS)]
        fx.traceback.set_stack_trace([f"line {own[-1].lineno} of {Path(own[-1].filename).name}: {own[-1].line}"] if own else [])
        return func(*args, **(kwargs or {}))


_OTHERS = (str(Path(torch.__file__).parent), __file__)


def _place(node: fx.Node) -> str:
    return f" ({node.stack_trace})" if node.stack_trace else ""


def _name_in(function: Callable[..., Any], tensor: Tensor) -> str:
    """What a function calls a tensor that it holds."""
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
