"""A forward's own code, read instead of run: the functions of torch that it calls one after another, and all that this hangs on.

The code is evaluated statement by statement on tensors without contents, and whatever it reads besides its arguments is noted: attributes of modules, their kinds,
globals. Anything whose answer could not be compared later, and anything that changes something, ends the reading. So where all that was noted is as it was, the
forward would call the same functions again, and need not be run to find that out.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import linecache
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from epigen.training.rehearse import Event, Observed

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis))
"""What can be compared with what it was, beside tuples of such."""

_MOST_CALLS = 64
"""Functions of Python's within one another, and modules; a forward that has more is none for which this pays."""


class Bent(Exception):
    """Code that cannot be read: why."""


@dataclass(frozen=True)
class Read:
    """A tensor of a module's. store: "_parameters", "_buffers", or "" for the module itself."""

    module: nn.Module
    store: str
    name: str


@dataclass
class Straight:
    """modules: those looked into, each with whether it was called. children: by container and name. all_children: containers that were gone through.
    own: attributes, and their values. tensors: in the order in which they are taken; nothing: where there is none. outside: of classes, modules of Python's and
    globals (where, name, what was there). functions: those of Python's that were read, with what they are made of. exact: whether it hangs on extents. events:
    what is called. result: of fakes."""

    modules: dict[nn.Module, bool] = field(default_factory=dict)
    children: dict[tuple[nn.Module, str], nn.Module] = field(default_factory=dict)
    all_children: dict[nn.Module, None] = field(default_factory=dict)
    own: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)
    tensors: dict[Read, Tensor] = field(default_factory=dict)
    nothing: dict[Read, None] = field(default_factory=dict)
    outside: dict[tuple[int, str], tuple[Any, str, Any]] = field(default_factory=dict)
    functions: dict[types.FunctionType, tuple[types.CodeType, tuple[Any, ...] | None, dict[str, Any] | None]] = field(default_factory=dict)
    exact: bool = False
    events: list[Event] = field(default_factory=list)
    result: Any = None


def read(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], observed: Observed, whole: Callable[[nn.Module], bool]) -> Straight:
    """Read a module's forward, called with these, under `observed`. whole: whether a module inside is not to be looked into. Raises Bent."""
    reader = _Reader(observed, whole, set(module.modules()))
    reader.visit(module, called=False)
    reader.straight.result = reader.call(reader.noted(type(module), "forward", type(module).forward), (module, *args), kwargs)
    reader.straight.events = observed.events
    return reader.straight


# -- where code is written


_SIGNATURE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


@functools.lru_cache(maxsize=512)
def _written(code: types.CodeType) -> ast.FunctionDef | ast.Lambda:
    """The text of a function, which compiles to exactly this code. Raises Bent."""
    if code.co_freevars or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Bent(f"{code.co_name} is no plain function")
    lines = linecache.getlines(code.co_filename)
    nodes: list[ast.FunctionDef | ast.Lambda] = []
    try:
        if code.co_name == "<lambda>":
            nodes = [n for n in _lambdas("".join(lines)) if n.lineno == code.co_firstlineno]
        elif lines:
            nodes += [n for n in ast.walk(_block(inspect.getblock(lines[code.co_firstlineno - 1 :]))) if isinstance(n, ast.FunctionDef)][:1]
    except (SyntaxError, ValueError, IndexError):
        pass
    for node in nodes:
        if _same(code, _compiled(node)):
            return node
    raise Bent(f"the text of {code.co_name} is not at hand")


def _block(lines: Sequence[str]) -> ast.Module:
    """Lines of a function, as far to the right as they are: what is written over several lines would else be another text."""
    return ast.parse(("if True:\n" if lines[0][:1].isspace() else "") + "".join(lines))


@functools.lru_cache(maxsize=8)
def _lambdas(text: str) -> tuple[ast.Lambda, ...]:
    return tuple(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Lambda))


def _compiled(node: ast.FunctionDef | ast.Lambda) -> types.CodeType | None:
    if isinstance(node, ast.FunctionDef):
        bare = ast.FunctionDef(**dict(ast.iter_fields(node)) | {"decorator_list": [], "returns": None})
        ast.copy_location(bare, node)
        body: ast.stmt = bare
    else:
        body = ast.copy_location(ast.Expr(node), node)
    module = compile(ast.fix_missing_locations(ast.Module([body], [])), "<text>", "exec", flags=0, dont_inherit=True)
    pending = [module]
    while pending:
        for constant in pending.pop().co_consts:
            if isinstance(constant, types.CodeType):
                if constant.co_name == getattr(node, "name", "<lambda>"):
                    return constant
                pending.append(constant)
    return None


def _same(a: types.CodeType, b: types.CodeType | None) -> bool:
    return (
        b is not None
        and (a.co_varnames, a.co_freevars, a.co_flags & _SIGNATURE) == (b.co_varnames, b.co_freevars, b.co_flags & _SIGNATURE)
        and _does(a) == _does(b)
    )


def _does(code: types.CodeType) -> list[Any]:
    """Its instructions, but for how a method is called: which differs by whether a module was imported in the same text."""
    instructions: list[Any] = []
    for i in dis.get_instructions(code):
        if i.opname in ("PUSH_NULL", "PRECALL", "CACHE"):
            continue
        name = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL", "CALL_FUNCTION": "CALL"}.get(i.opname, i.opname)
        if isinstance(i.argval, types.CodeType):
            instructions.append((name, _does(i.argval)))
        else:
            instructions.append((name, None if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs else (type(i.argval), repr(i.argval))))
    return instructions


# -- what code does

_BINARY: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_IN_PLACE: dict[type[ast.AST], Any] = {
    ast.Add: operator.iadd, ast.Sub: operator.isub, ast.Mult: operator.imul, ast.Div: operator.itruediv, ast.Pow: operator.ipow,
}  # fmt: skip
_UNARY: dict[type[ast.AST], Any] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
_COMPARED: dict[type[ast.AST], Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip

_EXTENTS = {"shape", "ndim", "size", "dim", "numel", "nelement", "ndimension"}
_KINDS = {"dtype", "device", "is_cuda", "is_cpu", "is_sparse", "is_quantized"}
_KINDS_BY_CALL = {"is_floating_point", "is_complex"}
"""What a tensor is asked that its comparison covers."""

_FUNCTIONS = {len, isinstance, int, float, bool, tuple, min, max, abs, round, range, zip, enumerate, torch.is_tensor, torch.is_floating_point}
"""Of Python's and torch's, which change nothing and hang on what they are given alone."""

_KEPT_BY_THEMSELVES = (nn.Module, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
"""What may be an attribute: it is the same as long as it is that object."""

_NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
_TORCHS = ("torch.functional", "torch.nn.functional", "torch._tensor", "torch._jit_internal")
"""Where those are whose calls are one event, though they are written in Python."""


class _Return(Exception):
    def __init__(self, value: Any):
        self.value = value


@dataclass(frozen=True)
class _Method:
    """A function of a tensor's, by name."""

    of: Tensor
    name: str


class _Reader:
    def __init__(self, observed: Observed, whole: Callable[[nn.Module], bool], inside: set[nn.Module]):
        self.observed, self.whole, self.inside = observed, whole, inside
        self.straight = Straight()
        self.depth = 0

    # -- modules

    def visit(self, module: nn.Module, called: bool) -> None:
        if module not in self.inside:
            raise Bent("it reads a module that is not inside")
        kind = type(module)
        if kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__:
            raise Bent(f"a {kind.__name__} finds its attributes in a way of its own")
        self.straight.modules[module] = self.straight.modules.get(module, False) or called

    def child(self, module: nn.Module, name: str) -> Any:
        child = module._modules[name]
        if child is None:
            raise Bent("it reads a module that is none")
        self.straight.children[module, name] = child
        return child

    def each(self, module: nn.Module) -> list[Any]:
        """The children of a list of modules."""
        if getattr(type(module), "__iter__", None) not in (nn.Sequential.__iter__, nn.ModuleList.__iter__):
            raise Bent(f"it goes through a {type(module).__name__}")
        self.visit(module, called=False)
        self.straight.all_children[module] = None
        return [self.child(module, name) for name in module._modules]

    def attribute(self, module: nn.Module, name: str) -> Any:
        self.visit(module, called=False)
        kind, own = type(module), vars(module)
        there = inspect.getattr_static(kind, name, None)
        if isinstance(there, property):
            return self.call(self.noted(kind, name, there).fget, (module,), {})
        if hasattr(type(there), "__set__"):
            raise Bent(f"it reads {name} of a {kind.__name__}")
        if name in own:
            value = own[name]
            if isinstance(value, Tensor):
                self.straight.tensors[Read(module, "", name)] = value
            elif (
                _plain(value)
                or isinstance(value, _KEPT_BY_THEMSELVES)
                or (isinstance(value, functools.partial) and _plain((*value.args, *value.keywords.values())))
            ):
                self.straight.own[module, name] = value
            else:
                raise Bent(f"it reads a {type(value).__name__}")
            return value
        if isinstance(there, staticmethod):
            return self.noted(kind, name, there.__func__)
        if there is not None:
            if not isinstance(there, types.FunctionType) and not _plain(there):
                raise Bent(f"it reads {name} of a {kind.__name__}")
            self.noted(kind, name, there)
            return types.MethodType(there, module) if isinstance(there, types.FunctionType) else there
        for store in ("_parameters", "_buffers"):
            if name in own[store]:
                value = own[store][name]
                if value is None:
                    self.straight.nothing[Read(module, store, name)] = None
                else:
                    self.straight.tensors[Read(module, store, name)] = value
                return value
        if name in module._modules:
            return self.child(module, name)
        raise Bent(f"a {kind.__name__} has no {name}")

    def noted(self, where: Any, name: str, value: Any) -> Any:
        """What is read of a class, of a module of Python's or of a function's globals."""
        self.straight.outside[id(where), name] = (where, name, value)
        return value

    # -- calls

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(function, types.MethodType):
            return self.call(function.__func__, (function.__self__, *args), kwargs)
        if isinstance(function, functools.partial) and not isinstance(function.func, nn.Module):
            return self.call(function.func, (*function.args, *args), {**function.keywords, **kwargs})
        if isinstance(function, nn.Module):
            return self.call_module(function, args, kwargs)
        if isinstance(function, _Method):
            return self.call_torch(getattr(function.of, function.name), args, kwargs, function)
        if function is getattr and len(args) >= 2 and isinstance(args[1], str):
            return self.get(args[0], args[1])
        if _pure(function):
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and function is not isinstance and function not in (torch.is_tensor, torch.is_floating_point):
                    raise Bent("a tensor becomes a number")
                if isinstance(value, nn.Module) and function is not isinstance:
                    return self.call_on_module(function, args)
            if function is isinstance and isinstance(args[0], nn.Module):
                self.visit(args[0], called=False)
            if function is isinstance and isinstance(args[0], Tensor) and args[1] is not Tensor:
                raise Bent("it asks of what class a tensor is")
            result = function(*args, **kwargs)
            return tuple(result) if isinstance(result, range | zip | enumerate) else result
        if _of_torch(function):
            return self.call_torch(function, args, kwargs)
        if isinstance(function, types.FunctionType):
            return self.call_python(function, args, kwargs)
        raise Bent(f"it calls {getattr(function, '__name__', type(function).__name__)}")

    def call_on_module(self, function: Any, args: Sequence[Any]) -> Any:
        if function is len and len(args) == 1:
            return len(self.each(args[0]))
        if function in (enumerate, zip, tuple):
            given = [self.each(a) if isinstance(a, nn.Module) else a for a in args]
            return tuple(function(*given))
        raise Bent(f"it calls {function.__name__} of a module")

    def call_module(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.whole(module):  # how what it gives lies may be another thing each time
            raise Bent("it calls a module that has a forward by fuse of its own")
        self.visit(module, called=True)
        own, kind = vars(module), type(module)
        if "forward" in own or kind.__call__ is not nn.Module.__call__:
            raise Bent(f"a {kind.__name__} is called in a way of its own")
        return self.call(self.noted(kind, "forward", inspect.getattr_static(kind, "forward")), (module, *args), kwargs)

    def call_torch(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], method: _Method | None = None) -> Any:
        if method is not None and method.name in _EXTENTS | _KINDS_BY_CALL:
            self.straight.exact = self.straight.exact or method.name in _EXTENTS
            return function(*args, **kwargs)
        if method is None and not any(isinstance(t, Tensor) for a in (*args, *kwargs.values()) for t in (a if isinstance(a, tuple | list) else (a,))):
            raise Bent(f"it calls {function.__name__} of no tensor")
        return self.one(function, args, kwargs)

    def one(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that is one event, and nothing besides."""
        before = len(self.observed.events)
        result = function(*args, **kwargs)
        if len(self.observed.events) != before + 1 or self.observed.events[-1].result is not result:
            raise Bent(f"torch does not tell of {getattr(function, '__name__', function)}")
        return self.made(result)

    def made(self, result: Any) -> Any:
        if isinstance(result, tuple | list) and all(isinstance(t, Tensor) for t in result):
            return tuple(result)
        if not isinstance(result, Tensor):
            raise Bent("a tensor becomes a number")
        return result

    def call_python(self, function: types.FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        node = _written(function.__code__)
        if self.depth >= _MOST_CALLS:
            raise Bent("it calls too many functions in one another")
        self.straight.functions[function] = function.__code__, function.__defaults__, function.__kwdefaults__
        bare = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
        bare.__kwdefaults__ = function.__kwdefaults__
        bound = inspect.signature(bare).bind(*args, **kwargs)
        bound.apply_defaults()
        frame = _Frame(self, dict(bound.arguments), function.__globals__)
        self.depth += 1
        try:
            if isinstance(node, ast.Lambda):
                return frame.value(node.body)
            try:
                frame.run(node.body)
            except _Return as returned:
                return returned.value
            return None
        finally:
            self.depth -= 1

    # -- attributes

    def get(self, of: Any, name: str) -> Any:
        if isinstance(of, nn.Module):
            return self.attribute(of, name)
        if isinstance(of, Tensor):
            if name in ("shape", "ndim"):
                self.straight.exact = True
                return getattr(of, name)
            if name in _KINDS:
                return getattr(of, name)
            if name in ("T", "mT"):  # a view, of which torch tells as of a function
                return getattr(of, name)
            if name in ("data", "grad", "requires_grad", "is_leaf", "grad_fn") or not isinstance(getattr(Tensor, name, None), (types.FunctionType, *_NATIVE)):
                raise Bent(f"it reads {name} of a tensor")
            return _Method(of, name)
        if isinstance(of, types.ModuleType):
            value = getattr(of, name)
            return value if isinstance(value, types.ModuleType) else self.noted(of, name, value)
        if isinstance(of, torch.dtype | torch.device | torch.Size | tuple) and not name.startswith("_"):
            return getattr(of, name)
        raise Bent(f"it reads {name} of a {type(of).__name__}")


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_plain, value)))


def _pure(function: Any) -> bool:
    try:
        if function in _FUNCTIONS:
            return True
    except TypeError:
        return False
    return isinstance(function, types.BuiltinFunctionType) and (
        function.__module__ == "math" or (isinstance(function.__self__, torch.Size | tuple | torch.dtype) if function.__self__ is not None else False)
    )


def _of_torch(function: Any) -> bool:
    if isinstance(function, _NATIVE):
        module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        return str(module).split(".")[0] == "torch" or getattr(function, "__objclass__", None) in Tensor.__mro__
    return isinstance(function, types.FunctionType) and function.__module__ in _TORCHS


class _Frame:
    """One function under way."""

    def __init__(self, reader: _Reader, local: dict[str, Any], around: dict[str, Any]):
        self.reader, self.local, self.around = reader, local, around

    # -- statements

    def run(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            step = getattr(self, f"_{type(statement).__name__.lower()}", None)
            if step is None:
                raise Bent(f"its code has a statement of {type(statement).__name__}")
            step(statement)

    def _expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _pass(self, _node: ast.Pass) -> None:
        return

    def _return(self, node: ast.Return) -> None:
        raise _Return(None if node.value is None else self.value(node.value))

    def _if(self, node: ast.If) -> None:
        self.run(node.body if self.truth(self.value(node.test)) else node.orelse)

    def _assert(self, node: ast.Assert) -> None:
        if not self.truth(self.value(node.test)):
            raise Bent("it raises an error")

    def _for(self, node: ast.For) -> None:
        if node.orelse:
            raise Bent("its code has a loop with an else")
        for item in self.items(self.value(node.iter)):
            self.put(node.target, item)
            self.run(node.body)

    def _assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.put(target, value)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.put(node.target, self.value(node.value))

    def _augassign(self, node: ast.AugAssign) -> None:
        before, value = self.value(_loaded(node.target)), self.value(node.value)
        step = _IN_PLACE.get(type(node.op))
        if step is None or not isinstance(node.target, ast.Name):
            raise Bent("its code changes something in place")
        self.put(node.target, self.operated(step, before, value))

    def put(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.local[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(t, ast.Starred) for t in target.elts):
            items = self.items(value)
            if len(items) != len(target.elts):
                raise Bent("it raises an error")
            for each, item in zip(target.elts, items, strict=True):
                self.put(each, item)
        else:
            raise Bent("its code changes something that outlasts it")

    def items(self, value: Any) -> list[Any]:
        if isinstance(value, nn.Module):
            return self.reader.each(value)
        if isinstance(value, tuple | list):
            return list(value)
        raise Bent(f"it goes through a {type(value).__name__}")

    def truth(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            self.reader.visit(value, called=False)
            return len(self.reader.each(value)) > 0 if hasattr(type(value), "__len__") else True
        if isinstance(value, (*PLAIN, tuple, list, types.FunctionType, type)):
            return bool(value)
        raise Bent(f"a {type(value).__name__} is asked whether it is true")

    # -- expressions

    def value(self, node: ast.expr) -> Any:
        step = getattr(self, f"_{type(node).__name__.lower()}", None)
        if step is None:
            raise Bent(f"its code has an expression of {type(node).__name__}")
        return step(node)

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.local:
            return self.local[node.id]
        if node.id in self.around:
            value = self.around[node.id]
            return value if isinstance(value, types.ModuleType) else self.reader.noted(self.around, node.id, value)
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise Bent(f"{node.id} is not known")

    def _attribute(self, node: ast.Attribute) -> Any:
        return self.reader.get(self.value(node.value), node.attr)

    def _call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        args: list[Any] = []
        for a in node.args:
            if isinstance(a, ast.Starred):
                args += self.items(self.value(a.value))
            else:
                args.append(self.value(a))
        kwargs: dict[str, Any] = {}
        for k in node.keywords:
            given = self.value(k.value)
            if k.arg is not None:
                kwargs[k.arg] = given
            elif isinstance(given, dict):
                kwargs |= given
            else:
                raise Bent("its code hands on keywords")
        return self.reader.call(function, args, kwargs)

    def operated(self, function: Any, *values: Any) -> Any:
        if any(isinstance(v, Tensor) for v in values):
            return self.reader.one(function, values, {})
        if all(isinstance(v, PLAIN) or type(v) is tuple for v in values):
            return function(*values)
        raise Bent("it computes with what is no number")

    def _binop(self, node: ast.BinOp) -> Any:
        step = _BINARY.get(type(node.op))
        if step is None:
            raise Bent("its code has a rare operator")
        return self.operated(step, self.value(node.left), self.value(node.right))

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        return not self.truth(value) if isinstance(node.op, ast.Not) else self.operated(_UNARY[type(node.op)], value)

    def _boolop(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for each in node.values:
            value = self.value(each)
            if self.truth(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _compare(self, node: ast.Compare) -> Any:
        left, holds = self.value(node.left), True
        for op, right in zip(node.ops, map(self.value, node.comparators), strict=True):
            if isinstance(op, ast.Is | ast.IsNot):
                if left is not None and right is not None and (isinstance(left, Tensor) or isinstance(right, Tensor)):
                    raise Bent("it asks whether a tensor is another")
                holds = (left is right) is isinstance(op, ast.Is)
            elif isinstance(op, ast.In | ast.NotIn):
                if not _plain(left) or not (_plain(right) or (isinstance(right, list) and all(map(_plain, right)))):
                    raise Bent("it looks for what is no number")
                holds = (left in right) is isinstance(op, ast.In)
            else:
                result = self.operated(_COMPARED[type(op)], left, right)
                if len(node.ops) == 1:
                    return result
                holds = self.truth(result)
            if not holds:
                return False
            left = right
        return holds

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.truth(self.value(node.test)) else node.orelse)

    def _namedexpr(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.put(node.target, value)
        return value

    def _tuple(self, node: ast.Tuple) -> Any:
        return tuple(self._elements(node.elts))

    def _list(self, node: ast.List) -> Any:
        return list(self._elements(node.elts))

    def _elements(self, nodes: Sequence[ast.expr]) -> Iterator[Any]:
        for each in nodes:
            if isinstance(each, ast.Starred):
                yield from self.items(self.value(each.value))
            else:
                yield self.value(each)

    def _subscript(self, node: ast.Subscript) -> Any:
        of, place = self.value(node.value), self.value(node.slice)
        if isinstance(of, nn.Module):
            if isinstance(place, int) and getattr(type(of), "__getitem__", None) in (nn.Sequential.__getitem__, nn.ModuleList.__getitem__):
                return self.reader.each(of)[place]
            raise Bent(f"it takes a part of a {type(of).__name__}")
        if isinstance(of, Tensor):
            return self.operated(operator.getitem, of, place)
        if isinstance(of, tuple | list | str) and isinstance(place, int | slice):
            return of[place]
        raise Bent(f"it takes a part of a {type(of).__name__}")

    def _joinedstr(self, node: ast.JoinedStr) -> Any:
        return "".join(map(self.value, node.values))

    def _formattedvalue(self, node: ast.FormattedValue) -> Any:
        value = self.value(node.value)
        if not _plain(value) or node.conversion != -1:
            raise Bent("it puts what is no number into a text")
        return format(value, "" if node.format_spec is None else self.value(node.format_spec))

    def _slice(self, node: ast.Slice) -> Any:
        parts = [None if part is None else self.value(part) for part in (node.lower, node.upper, node.step)]
        if any(part is not None and type(part) is not int for part in parts):
            raise Bent("it takes a part whose bounds are no numbers")
        return slice(*parts)


def _loaded(target: ast.expr) -> ast.expr:
    return ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target
