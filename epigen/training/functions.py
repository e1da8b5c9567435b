"""Plain torch functions as epilogues: the program that a function is for the shapes of a call, found again for calls alike.

A function is traced for each combination of shapes and dtypes that it meets, because torch broadcasts by shape and a function may go by it too. Most
combinations give one program, and then share its kernel. What a function reads besides its arguments is looked at before a trace is used again: numbers,
flags and tensors of its closure, its globals and its defaults, and of the functions it calls; of a module its attributes, parameters and training mode.
A function that is made anew for each call, as a lambda in a forward is, has the traces of those before it that have its code and read the same.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from epigen.codegen.spec import USUAL, Numerics
from epigen.dtypes import BY_TORCH
from epigen.errors import CallError, near_miss
from epigen.ir import reference
from epigen.ir.eager import product_dtype
from epigen.lru_cache import LruCache
from epigen.runtime import arguments
from epigen.runtime.kernel import Kernel

if TYPE_CHECKING:
    from epigen.training.aten import Leaf
    from epigen.training.traced import Traced

_TRACES = 1024
"""Kept of one function: those used last."""

Function = Callable[..., Any]


def is_function(epilogue: object) -> bool:
    return callable(epilogue) and not isinstance(epilogue, str | type | Kernel)


class _Known:
    """What is known of one function. parameters: all of them. traces: by shapes, dtypes and what it has read."""

    def __init__(self, function: Function):
        self.parameters = _parameters(function) if not _is_code(function) else _of_code(*_signature(function))
        self.names = tuple(p.name for p in self.parameters[1:])
        self.traces: LruCache[Hashable, Traced] = LruCache(_TRACES)


_SHARED: LruCache[Hashable, Traced] = LruCache(_TRACES)
"""Of functions that are no more than code, and read nothing that is compared by what object it is: of that, none is kept alive here, and another could get its id."""

_OF: weakref.WeakKeyDictionary[Any, dict[object, _Known]] = weakref.WeakKeyDictionary()
"""By the function, or by the object whose method it is, and then by the method."""


def _written(function: Function) -> Function:
    """What torch.compile was given, where it gave this: the program takes its place."""
    return getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "_orig_mod", None) or function


def _known(function: Function) -> _Known:
    function = _written(function)
    owner, method = getattr(function, "__self__", None) or function, getattr(function, "__func__", None)
    try:
        of = _OF.get(owner)
        if of is None:
            of = _OF.setdefault(owner, {})
    except TypeError:  # it cannot be held weakly, and so is known to nobody
        return _Known(function)
    return of[method] if method in of else of.setdefault(method, _Known(function))


def parameters(function: Function) -> tuple[str, ...]:
    """The names of a function's inputs: all its parameters but the first, which is the product. Raises CallError where they cannot be read."""
    return _known(function).names


def _parameters(function: Function) -> list[inspect.Parameter]:
    what = described(function)
    try:
        accepted = list(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters.values())
    except (TypeError, ValueError, AttributeError):  # of a builtin or of TorchScript, which take the product alone
        return [inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY)]
    if not accepted or accepted[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise CallError(f"{what} takes nothing by position, and the product was to be its first argument: write def epilogue(mm, …)")
    return [p for p in accepted if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)]


def _is_code(function: Function) -> bool:
    """Whether a function is no more than its code, its defaults and what it reads; one that stands for another says so in an attribute."""
    return type(function) is types.FunctionType and not function.__dict__


def _signature(function: Function) -> tuple[types.CodeType, int, tuple[str, ...]]:
    """All that its parameters hang on: the code, and which of them have defaults."""
    return function.__code__, len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ())


@functools.lru_cache(maxsize=_TRACES)
def _of_code(code: types.CodeType, defaults: int, named: tuple[str, ...]) -> list[inspect.Parameter]:
    """The parameters of functions like this."""
    bare = types.FunctionType(code, {}, code.co_name, (None,) * defaults, tuple(types.CellType() for _ in code.co_freevars))
    bare.__kwdefaults__ = dict.fromkeys(named)
    return _parameters(bare)


def name_of(function: Function) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def described(function: Function) -> str:
    name = name_of(function)
    return f"the epilogue {name}" if name != "<lambda>" else "the epilogue"


def checked(function: Function, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inputs, whose names are the function's; a bias may come besides. Raises CallError for others and for those that are missing."""
    known = _known(function)
    for name in inputs:
        if name not in known.names and name != "bias":
            hint = near_miss(name, known.names) or "its inputs are " + (", ".join(known.names) or "none")
            raise CallError(f"{described(function)} has no input '{name}': {hint}")
    for parameter in known.parameters[1:]:
        if parameter.default is parameter.empty and parameter.name not in inputs and parameter.kind != parameter.POSITIONAL_ONLY:
            raise CallError(f"missing input '{parameter.name}' of {described(function)}")
    return inputs


def plain(function: Function, x: Tensor, weight: Tensor, inputs: Mapping[str, Any]) -> Any:
    """The function of x @ weight.T as torch runs it, unfused. Where torch takes derivatives itself, or traces."""
    if not any(map(arguments.stands_for_one, (x, weight))) and arguments.converted(x, weight):
        weight = weight.to(x.dtype)
    # by a module's class, since torch.compile takes no module as a constant up to torch 2.12
    if "bias" in inputs and not _takes_bias(type(function) if isinstance(function, nn.Module) else function):
        return function(nn.functional.linear(x, weight, inputs["bias"]), **{name: value for name, value in inputs.items() if name != "bias"})
    return function(nn.functional.linear(x, weight), **inputs)


def _takes_bias(function: Function | type[nn.Module]) -> bool:
    if isinstance(function, type) and issubclass(function, nn.Module):
        return "bias" in inspect.signature(function.forward).parameters
    return "bias" in _known(function).names


# torch.compile is not to look into it: what torch.compiler.assume_constant_result sets, which imports all of torch.compile to do so
_takes_bias._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _after_bias(function: Function) -> Function:
    """A function that takes no bias, of the product with the bias added."""

    @functools.wraps(function, updated=())
    def biased(mm: Tensor, bias: Tensor, **inputs: Any) -> Any:
        return function(mm + bias, **inputs)

    biased.__name__ = name_of(function)
    return biased


# -- traces, found again


def traced(
    function: Function, shape: Sequence[int], dtype: torch.dtype, device: torch.device, inputs: Mapping[str, Any], casts: bool = False
) -> Traced:  # fmt: skip
    """What the function computes of a product. shape: [..., N], and dtype: of the product. inputs: by name. casts: as of `aten.Importer`.

    A bias that the function does not take is added to the product first, as a linear layer does.
    Numbers stay inputs of the program, so that another number is no other kernel, unless the function takes them where torch takes no tensor.
    Raises CallError for what no epilogue computes: it names the operation, its line and what to do.
    """
    function = _written(function)
    known = _known(function).traces
    given = {name: value for name, value in checked(function, inputs).items() if _is_input(value)}
    constants = {name: value for name, value in inputs.items() if name not in given}
    call = (tuple(shape), dtype, device.type, casts, tuple((name, _seen(value)) for name, value in given.items()))
    key = (call, _state(constants), _state(function))
    trace = known.get(key)
    shared = trace is None and _is_code(function) and not any(_BY_ID in state for state in key[1:])
    if shared:
        trace = _SHARED.get(key)
    if trace is None:
        # with the numbers' values, where they had to become constants
        numbers = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        valued = (key, _state(numbers))
        trace = known.get(valued) if numbers else None
        if trace is None:
            run = _after_bias(function) if "bias" in inputs and not _takes_bias(function) else function
            trace, general = _traced(run, shape, dtype, device, given, constants, casts)
            known.put(key if general else valued, trace)
            if shared and general and not trace.held:
                _SHARED.put(key, trace)
    return trace


def _traced(
    function: Function, shape: Sequence[int], dtype: torch.dtype, device: torch.device, given: Mapping[str, Any], constants: Mapping[str, Any],
    casts: bool = False,
) -> tuple[Traced, bool]:  # fmt: skip
    """And whether it holds for other numbers."""
    from epigen.training.traced import Unrunnable, trace

    what = described(function)
    try:
        return trace(function, shape, dtype, device, given, constants, what, casts), True
    except Unrunnable:
        numbers = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        if not numbers:
            raise
        return trace(function, shape, dtype, device, {k: v for k, v in given.items() if k not in numbers}, {**constants, **numbers}, what, casts), False


def _is_input(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def _seen(value: Any) -> Hashable:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else "number"


_BY_ID = object()
"""Stands before an object's id in a state."""


def _state(value: Any) -> tuple[Hashable, ...]:
    return tuple(_walk(value, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[Hashable]:
    """What a function reads besides its arguments, as far as it can be compared. A tensor that a trace has read is held by it, so that no other gets its id."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        yield type(value), value
        return
    if isinstance(value, tuple | list | dict):
        yield type(value), len(value)
        if isinstance(value, dict):
            value = [part for item in value.items() for part in item]
        for item in value:
            yield from _walk(item, seen)
        return
    if isinstance(value, types.MethodType):  # made anew whenever it is asked for
        yield from _walk(value.__func__, seen)
        yield from _walk_owner(value.__self__, value.__func__, seen)
        return
    if _for_good(value):
        yield value
        return
    if type(value) is types.FunctionType:
        yield types.FunctionType  # by what it is made of: of two with the same code that read the same, one is the other
    else:
        yield _BY_ID
        yield id(value)
    if id(value) in seen or isinstance(value, Tensor):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for name, item in vars(value).items():
            if "_hooks" not in name:
                yield name
                yield from _walk(item, seen)
        yield value.training  # of TorchScript no attribute
        yield from _walk_owner(value, inspect.getattr_static(type(value), "forward", None), seen)
    elif isinstance(value, functools.partial):
        yield from _walk((value.func, value.args, *value.keywords.items()), seen)
    elif isinstance(value, types.FunctionType):
        yield value.__code__  # which a notebook's autoreload replaces within the function
        for item in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield from _walk(item, seen)
        for cell in value.__closure__ or ():
            try:
                yield from _walk(cell.cell_contents, seen)
            except ValueError:  # it is empty yet
                yield "empty"
        for name in _names(value.__code__):
            referenced = value.__globals__.get(name)
            if isinstance(referenced, types.ModuleType):
                yield from _walk_module(referenced, _names(value.__code__), seen)
            elif isinstance(referenced, type):
                yield _BY_ID
                yield id(referenced)
            else:
                yield from _walk(referenced, seen)
    elif isinstance(call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
        yield from _walk_owner(value, call, seen)


def _walk_module(module: types.ModuleType, names: Sequence[str], seen: set[int]) -> Iterator[Hashable]:
    """Of what a function may read of a module: what has one of these names there, or in a module that has."""
    yield module
    if module.__name__.partition(".")[0] == "torch" or id(module) in seen:
        return
    seen.add(id(module))
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, types.ModuleType):
            yield from _walk_module(value, names, seen)
        elif not isinstance(value, type):
            yield from _walk(value, seen)


def _walk_owner(owner: Any, method: Any, seen: set[int]) -> Iterator[Hashable]:
    """What a method may read of the object that it belongs to: its and its class's attributes of the names that are in the method's code, or in that of the object's
    other methods that are among them."""
    if not isinstance(method, types.FunctionType) or _torchs(method):
        return
    yield from _walk(method, seen)
    places = (getattr(owner, "__dict__", {}), *map(vars, type(owner).__mro__))  # inspect.getattr_static takes ten times as long
    pending, known = list(_names(method.__code__)), set[str]()
    while pending:
        name = pending.pop()
        if name in known:
            continue
        known.add(name)
        attribute = next((place[name] for place in places if name in place), None)
        if isinstance(attribute, property):
            attribute = attribute.fget
        elif isinstance(attribute, staticmethod | classmethod):
            attribute = attribute.__func__
        elif isinstance(attribute, types.MemberDescriptorType):  # of a slot
            attribute = getattr(owner, name, None)
        if isinstance(attribute, types.FunctionType) and not _torchs(attribute):
            pending += _names(attribute.__code__)
        yield from _walk(attribute, seen)


def _for_good(value: Any) -> bool:
    """Whether it is a function of Python's or torch's, which is there as long as the process."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    return isinstance(value, types.FunctionType) and _torchs(value)


def _torchs(function: types.FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


@functools.lru_cache(maxsize=_TRACES)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Of what a function may read of its globals, also by functions inside it."""
    return (*code.co_names, *(name for inner in code.co_consts if isinstance(inner, types.CodeType) for name in _names(inner)))


# -- its inputs and results, as a program and as torch have them


def presented(trace: Traced, inputs: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Tensor | float]:
    """The program's inputs: [..., N], [...], [N] or scalars. shape: of the product, [..., N]."""
    given = {**inputs, **trace.held, **{name: inputs[own] for name, own in trace.renamed.items()}}
    for name, (own, calls) in trace.viewed.items():
        given[name] = functools.reduce(lambda value, call: call[0](value, *call[1]), calls, given[own])
    tile = (*shape[:-1], shape[-1] // trace.parts)
    return {leaf.name: _presented(leaf, given[leaf.name], tile) for leaf in trace.program.leaves}


def _presented(leaf: Leaf, value: Any, shape: Sequence[int]) -> Tensor | float:
    if not isinstance(value, Tensor):
        number: float = value
        return number
    if leaf.expand is not None:
        value = value.expand(leaf.expand)
    wanted = {"mn": (*shape,), "m": (*shape[:-1],), "n": (shape[-1],), "": ()}[leaf.indices]
    tensor: Tensor = value if tuple(value.shape) == wanted else value.reshape(wanted)
    return tensor


def returned(trace: Traced, results: Sequence[Tensor]) -> Any:
    """The program's results as the function returns them: shapes, dtypes, and what holds them."""
    return pytree.tree_unflatten([_shaped(t, shape, dtype) for t, (shape, dtype) in zip(results, trace.results, strict=True)], trace.structure)


def _shaped(t: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    t = t if t.dtype == dtype else t.to(dtype)  # a bare product of int8 is int32
    return t if t.shape == shape else torch.ops.aten._unsafe_view.default(t, shape)  # nothing else holds it: an ordinary tensor


def result_dtype(operands: torch.dtype) -> torch.dtype:
    """What a function sees the product as. That of int8 is fp32, and of fp8 bf16: what a program gives there."""
    if str(operands) not in BY_TORCH:
        return operands
    return reference.torch_dtype(product_dtype(BY_TORCH[str(operands)]))


def _matrix(t: Tensor) -> Tensor:
    """[..., N] as [M, N]."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


class FunctionKernel:
    """A torch function of a product as a callable kernel. Made by `epigen.compile`; safe to call from several threads.

    It is traced by its first call, and by later ones of other shapes or dtypes. `kernel` is the `Kernel` of the last call, and has the rest: `source()`,
    `config`, `explain()`.
    """

    def __init__(self, function: Function, make: Callable[[str], Kernel], made_by: Callable[[], FunctionKernel], numerics: Numerics = USUAL):
        """make: the kernel of a program. made_by: makes this anew where it is unpickled. numerics: of the kernels."""
        parameters(function)  # refuses what takes no product
        self.function, self._make, self._made_by, self._numerics = function, make, made_by, numerics
        self._kernels: LruCache[str, Kernel] = LruCache(_TRACES)
        self._last: Kernel | None = None

    def __reduce__(self) -> Any:
        return self._made_by, ()

    def __repr__(self) -> str:
        return f"<epigen.FunctionKernel of {described(self.function)}: {self._last.program if self._last else 'not called yet'}>"

    @property
    def kernel(self) -> Kernel:
        """The kernel of the last call. Raises CallError before the first."""
        if self._last is None:
            raise CallError(f"{described(self.function)} was not called yet, and what program it is hangs on the shapes: call it first")
        return self._last

    @property
    def program(self) -> str:
        """The program of the last call in canonical text, which compiles to the same kernel. Raises CallError before the first."""
        return self.kernel.program

    def __call__(self, a: Any = None, b: Any = None, /, *extra: Any, **inputs: Any) -> Any:
        """Run the function on a @ b. Called as `kernel(a, b, bias=bias)`.

        a: [..., K]. b: [K, N]. inputs: the function's further arguments, by name: tensors of any shape that torch broadcasts to [..., N], numbers.
        Returns what the function returns, in its shapes and dtypes; each result was rounded once.
        Raises CallError for what does not fit, and for a function that no program computes.
        """
        if torch.compiler.is_compiling() or any(map(arguments.stands_for_one, (a, b, *inputs.values()))):
            self._check_compiled()
            return self.function(a @ b, *extra, **inputs)
        arguments.check_positional("operands a and b are", len(extra), parameters(self.function))
        arguments.check_no_gradient((a, b, *inputs.values()))  # whose tensors no function can be traced with
        for name, operand in (("a", a), ("b", b)):
            if not isinstance(operand, Tensor):
                raise CallError(f"operand {name} is a {type(operand).__name__}, and a tensor was expected")
        if a.dim() < 1 or b.dim() != 2:
            raise CallError(f"a is {list(a.shape)} and b {list(b.shape)}, and [..., K] and [K, N] were expected")
        return self._run((*a.shape[:-1], b.shape[1]), result_dtype(a.dtype), a.device, inputs, lambda kernel, given: kernel(_matrix(a), b, **given))

    def over(self, mm: Any = None, /, *extra: Any, **inputs: Any) -> Any:
        """Run the function on a product that is there already, in one pointwise kernel. mm: [..., N]. The rest as of a call."""
        if torch.compiler.is_compiling() or any(map(arguments.stands_for_one, (mm, *inputs.values()))):
            self._check_compiled()
            return self.function(mm, *extra, **inputs)
        arguments.check_positional("mm is", len(extra), parameters(self.function))
        arguments.check_no_gradient((mm, *inputs.values()))
        if not isinstance(mm, Tensor) or mm.dim() < 1:
            raise CallError(f"mm is {list(mm.shape) if isinstance(mm, Tensor) else f'a {type(mm).__name__}'}, and a tensor [..., N] was expected")
        return self._run(mm.shape, mm.dtype, mm.device, inputs, lambda kernel, given: kernel.over(_matrix(mm), **given))

    def _check_compiled(self) -> None:
        """Raises CallError where torch.compile, or what torch.fx writes down, would have kernels of its own for what is to be invariant, or rounded as eager torch does."""
        if self._numerics.invariant or self._numerics.rounding:
            what, its = ("invariant", "product depends on M") if self._numerics.invariant else ("eagerly rounded", "kernels round each output once")
            raise CallError(
                f"an {what} kernel of a torch function is not seen by torch.compile and torch.fx, whose own {its}: give epigen.compile the program "
                "as text, which the function's kernel has as `program` after a call"
            )

    def _run(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, inputs: Mapping[str, Any], call: Callable[..., Any]) -> Any:
        trace = traced(self.function, shape, dtype, device, inputs, casts=bool(self._numerics.rounding))
        text = trace.program.text
        self._last = kernel = self._kernels.get(text) or self._kernels.put(text, self._make(text))
        results = call(kernel, presented(trace, inputs, (math.prod(shape[:-1]), shape[-1])))
        return returned(trace, [results] if isinstance(results, Tensor) else list(results))
