"""The forward of a user's module, run as it stands, in which products wait for what follows them: what a plan expects becomes one kernel.

While such a forward runs torch tells `Run` of each function that it calls. A product that the plan knows gives a tensor without contents, and so does each
expected function of it; with the last one all are computed at once by `epigen.linear`, and nothing without contents is left. Wherever the forward does anything
else than the plan expects, what waits is computed by the functions that were called, in their order. So a plan decides what is fast, and never what is
computed: the forward's own code runs each time, with the branches that it takes and the attributes that it has by then.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from epigen.errors import CallError, InternalError
from epigen.ir.program import MOST_PROGRAMS
from epigen.runtime import semi_structured
from epigen.training import again, chain
from epigen.training.elements import CHANNELS_LAST, channels_second, rows_first, why_no_product, why_not_as_fast
from epigen.training.guarded_cache import DEVICES, GuardedCache, State, state
from epigen.training.layer import Link
from epigen.training.views import View, Viewed, viewed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (Tensor, nn.Parameter)
"""Tensors of any other class are computed by that class alone."""
_WEIGHTS = {*_PLAIN, *semi_structured.TYPES}


class Ref(NamedTuple):
    """An argument of a step: a value, by its number among all that the product and its steps have given."""

    place: int


class Taken(NamedTuple):
    """An argument of a step: a tensor from elsewhere, an input of the program. indices: as it is declared there."""

    name: str
    indices: str
    dtype: torch.dtype


class Fixed(NamedTuple):
    """An argument of a step that is no tensor."""

    value: Any


Argument = Ref | Taken | Fixed


@dataclass(frozen=True)
class Step:
    """A function that is called of a product. views: of a view, what each of its values is: one of two parts of the columns, or all of them, None, in rows of another
    shape. way: how it parts the columns, a view or not. second: it is another product of the same x, of whose arguments the weight and the bias are inputs of the
    program. dtype: of what it gives."""

    func: Any
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    dtype: torch.dtype
    in_place: bool = False
    views: tuple[int | None, ...] = ()
    way: str = ""
    second: bool = False

    @functools.cached_property
    def options(self) -> tuple[list[type], dict[str, Any]] | None:
        """The types and values of its keywords, where none of them is a tensor."""
        if not all(isinstance(a, Fixed) for a in self.kwargs.values()):
            return None
        fixed = {name: a.value for name, a in self.kwargs.items() if isinstance(a, Fixed)}
        return list(map(type, fixed.values())), fixed


@dataclass(frozen=True, slots=True)
class Planned:
    """What is expected of one product. dtype: of what it gives. text: its program. chained: the next product multiplies what the last step gives.

    begun, computed: what was worked out for products, and for chains that end with this one, by their tensors.
    """

    func: Any
    dtype: torch.dtype
    bias: bool
    steps: tuple[Step, ...]
    text: str
    chained: bool
    after_chained: bool

    @property
    def parts(self) -> bool:
        """Whether its program has more products than the one of its weight, or parts of that."""
        return any(step.second or step.way for step in self.steps)

    begun: GuardedCache[tuple[Sequence[int], torch.dtype]] = field(default_factory=GuardedCache, compare=False)
    computed: again.Ways = field(default_factory=GuardedCache, compare=False)


@dataclass(frozen=True)
class Plan:
    """Of each product that a forward calls, in order, what is expected; None where it is computed at once. seconds: those that are steps of another, by the
    places of both."""

    products: tuple[Planned | None, ...]
    seconds: Mapping[int, int] = field(default_factory=dict)

    @functools.cached_property
    def idle(self) -> bool:
        return not any(self.products)


# -- what torch calls things


class Product(NamedTuple):
    """A product as a linear layer has it: x [..., K], weight [N, K], bias [N] or None. Of a convolution x is a view with its channels last."""

    x: Any
    weight: Any
    bias: Any


NO_LAYER = "its product is no linear layer"


def _of_linear(input: Any, weight: Any, bias: Any = None) -> Product:  # noqa: A002  # torch's own name
    return Product(input, weight, bias)


def _of_addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Product | str:  # noqa: A002
    if beta != 1 or alpha != 1 or not isinstance(mat2, nn.Parameter) or not isinstance(input, nn.Parameter) or input.dim() != 1:
        return NO_LAYER
    return Product(mat1, mat2.t(), input)


def _of_matmul(input: Any, other: Any) -> Product | str:  # noqa: A002
    if type(other) is Deferred or other.dim() != 2:
        return NO_LAYER
    return Product(input, other.t(), None)


def _of_convolution(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1  # noqa: A002, ARG001
) -> Product | str:  # fmt: skip
    if type(input) is Deferred or input.dim() != weight.dim():
        return NO_LAYER
    autocast = state(input.device.type)[2] is not None
    if why := why_no_product(weight, stride, padding, groups) or ("" if autocast else why_not_as_fast(input)):
        return why
    x = input.permute(rows_first(input.dim()))
    return Product(x, weight.flatten(1), bias) if x.is_contiguous() else CHANNELS_LAST


def in_its_place(x: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    """What a layer computes of its input by a kernel of its own: a function of torch's to whoever is told of them, so that a plan counts it among the products."""
    if has_torch_function_unary(x):
        return handle_torch_function(in_its_place, (x,), x, compute)
    return compute(x)


def _of_layer(x: Any, compute: Any) -> str:  # noqa: ARG001
    return "its layer computes it by itself"


CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
PRODUCTS: dict[Any, Callable[..., Product | str]] = {
    F.linear: _of_linear,
    torch.addmm: _of_addmm,
    **dict.fromkeys(MATMULS, _of_matmul),
    **dict.fromkeys(CONVOLUTIONS, _of_convolution),
    in_its_place: _of_layer,
}
"""What reads each, or says why it is no product that is fused. addmm: a linear layer whose weight lies transposed, as in GPT-2. A product by a matrix is one
without a bias, as x @ weight.T is. Convolutions: of one element."""

_GETTERS = "shape dtype device ndim layout is_cuda is_cpu requires_grad is_sparse is_quantized is_meta is_nested is_mkldnn is_mps is_xpu itemsize".split()
_ASKING = (
    {getattr(Tensor, name).__get__ for name in _GETTERS if hasattr(getattr(Tensor, name, None), "__get__")}
    | {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
        Tensor.__len__,
    }
    | {torch.is_tensor, torch.is_floating_point, torch.is_complex, torch.numel, Tensor.ndimension}
)
"""What asks how a tensor is made, and not for its contents."""


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def pure(func: Any) -> bool:
    """Whether a function, by its name, changes no tensor that it is given and no state of torch's."""
    name = getattr(func, "__name__", "")
    if (
        not name
        or name in ("__setitem__", "__set__", "__delete__", "set_", "copy_")
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    ):
        return False
    if name.startswith("_") and not name.startswith("__"):  # such as torch._C._set_grad_enabled
        return "set" not in name
    return name.endswith("__") or not name.endswith("_")


def asks(func: Any) -> bool:
    return func in _ASKING


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def functional(func: Any) -> Any:
    """The function that computes the same and changes nothing; the function itself where it changes nothing; None where it is not known."""
    name = getattr(func, "__name__", "")
    if pure(func):
        return func
    if name.startswith("__i") and name.endswith("__"):
        return getattr(Tensor, f"__{name[3:]}", None)
    if not name.endswith("_") or name.endswith("__"):
        return None
    for home in (torch._C._nn, torch) if not hasattr(Tensor, name) or getattr(Tensor, name) is not func else (Tensor,):
        if getattr(home, name, None) == func:
            return getattr(home, name[:-1], None) or getattr(F, name[:-1], None)
    return getattr(F, name[:-1], None) if getattr(F, name, None) is func else None


# -- without contents


class Deferred(Tensor):
    """What a product, or a function of it, will give. It becomes an ordinary tensor as soon as anybody asks for more than how it is made."""

    region: Region
    place: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where no `Run` is at hand any more: an exception has ended it."""
        if asks(func):
            return _undeferred(func, args, kwargs)
        for deferred in _all_deferred(args, kwargs):
            deferred.region.settle()
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CallError(_UNSEEN.format(what=f"{func} is called"))


_UNSEEN = (
    "{what} in a way that torch does not tell of, such as by a torch.autograd.Function, on a result that epigen.fuse has put off, since the module's forward does "
    "something else than it did when it was fused: call epigen.fuse(model) again, or epigen.unfuse(model)"
)


def _undeferred(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _all_deferred(args: Any, kwargs: Any) -> list[Deferred]:
    deferred: list[Deferred] = []
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        item = pending.pop()
        if type(item) is Deferred:
            deferred.append(item)
        elif isinstance(item, tuple | list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
    return deferred


class Region:
    """One product that waits, and the steps that have come so far.

    calls: what was called, each with the values that it takes as places, to be called in fact where the plan does not hold: as many as steps have come. values: by
    place. views: of which columns each value is, and in which shape. frame: that of the values that may come next, channels last. moved: in torch's shape they
    come second. plain: whether all inputs are given as they came. way: the function by which it was computed, where there is one for tensors like these.
    """

    __slots__ = (
        "_before",
        "calls",
        "device",
        "frame",
        "inputs",
        "kind",
        "lead",
        "moved",
        "plain",
        "plan",
        "product",
        "settled",
        "state",
        "values",
        "views",
        "wants",
        "way",
    )

    def __init__(self, plan: Planned, product: Product, before: Region | None, frame: tuple[int, ...], now: State, device: torch.device, kind: str):
        """kind: the device's."""
        self.plan, self.product, self._before, self.frame, self.state, self.device, self.kind = plan, product, before, frame, now, device, kind
        self.moved = plan.func in CONVOLUTIONS
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], bool]] = []
        self.values: list[Callable[[], Deferred | None]] = []
        self.views: list[View] = []
        x, weight, bias = product
        self.inputs: dict[str, Tensor] = {} if bias is None else {"bias": bias}
        self.settled, self.plain = False, True
        self.way: Callable[..., Tensor] | None = None
        # which the results of a chain have until its end, whatever is viewed in between
        self.lead: tuple[int, ...] = frame[:-1] if before is None else before.lead
        self.wants: bool = now[0] and (
            weight.requires_grad or (x.requires_grad if before is None else before.wants) or (bias is not None and bias.requires_grad)
        )

    def give(self, dtype: torch.dtype) -> Deferred:
        """The next place's tensor."""
        shape = tuple(self.frame[d] for d in channels_second(len(self.frame))) if self.moved else self.frame
        return self.seen_as(View(shape, self.frame[-1]), dtype)

    def seen_as(self, view: View, dtype: torch.dtype) -> Deferred:
        """The same, of another shape than the frame's."""
        deferred: Deferred = Tensor._make_wrapper_subclass(Deferred, view.shape, dtype=dtype, device=self.device, requires_grad=self.wants)
        deferred.region, deferred.place = self, len(self.values)
        self.values.append(weakref.ref(deferred))
        self.views.append(view)
        return deferred

    def matched(self, step: Step, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a step, which is no view, is this call."""
        if func != step.func or len(args) != len(step.args) or state(self.kind) != self.state:
            return False
        for argument, value in zip(step.args, args, strict=True):
            if not self.agrees(func, argument, value):
                return False
        if kwargs or step.kwargs:
            options = step.options
            # the types first: a tensor is compared with nothing
            if options is None or options[0] != [*map(type, kwargs.values())] or options[1] != kwargs:
                if len(kwargs) != len(step.kwargs):
                    return False
                for name, argument in step.kwargs.items():
                    if name not in kwargs or not self.agrees(func, argument, kwargs[name]):
                        return False
        return not step.way or self.halved(*args[1:], **kwargs)

    def halved(self, dim: int = -1) -> bool:
        """Whether F.glu parts the columns, along this dimension of a tensor of this rank; from then on the frame is of one part."""
        *lead, columns = self.frame
        self.frame = (*lead, columns // 2)
        return columns % 2 == 0 and dim % (len(lead) + 1) == (1 if self.moved else len(lead))

    def agrees(self, func: Any, argument: Argument, value: Any) -> bool:
        kind = type(argument)
        if kind is Ref:
            return type(value) is Deferred and value.region is self and value.place == argument.place  # type: ignore[union-attr]
        if kind is Fixed:
            wanted = argument.value  # type: ignore[union-attr]
            return value is wanted or (type(value) is type(wanted) and not isinstance(value, Tensor) and bool(value == wanted))
        if type(value) not in _PLAIN or value.dtype != argument.dtype or value.device != self.device:  # type: ignore[union-attr]
            return False
        frame = self.frame
        if value.shape == frame and argument.indices == "mn" and not self.moved:  # type: ignore[union-attr]
            presented: Tensor | None = value
        else:
            faced = facing(value, func, frame) if self.moved else value
            presented = None if faced is None else present(faced, argument.indices, frame)  # type: ignore[union-attr]
        if presented is None:
            return False
        if frame[:-1] != self.lead and "m" in argument.indices:  # type: ignore[union-attr]
            presented = presented.reshape(*self.lead, *presented.shape[len(frame) - 1 :])
        self.plain = self.plain and presented is value
        self.inputs[argument.name] = presented  # type: ignore[union-attr]
        self.wants = self.wants or (self.state[0] and value.requires_grad)
        return True

    def viewed(self, step: Step, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Viewed | None:
        """What a view gives, where it is this step."""
        of = args[0]
        if func != step.func or type(of) is not Deferred or of.region is not self or step.args != (Ref(of.place),) or state(self.kind) != self.state:
            return None
        found = viewed(func, self.views[of.place], self.moved, args[1:], kwargs)
        if found is None or found.way != step.way or found.parts != step.views:
            return None
        first = found.views[0]
        if not first.unflattened:
            self.frame = tuple(first.shape[d] for d in rows_first(len(first.shape))) if self.moved else first.shape
        return found

    def joined(self, func: Any, product: Product) -> Step | None:
        """The next step, where it is this product of the same x."""
        step = self.next
        weight = self.product.weight
        x, other, added = product
        if step is None or not step.second or step.func != func or x is not self.product.x or state(self.kind) != self.state:
            return None
        if type(other) not in _PLAIN or (other.shape, other.dtype, other.device) != (weight.shape, weight.dtype, weight.device):
            return None
        if (added is None) != (len(step.args) == 1) or (added is not None and (type(added) not in _PLAIN or not _bias_fits(added, other))):
            return None
        for argument, value in zip(step.args, (other.t(), added), strict=False):
            assert isinstance(argument, Taken)
            self.inputs[argument.name] = value
            self.wants = self.wants or (self.state[0] and value.requires_grad)
        return step

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], in_place: bool) -> None:
        self.calls.append((func, tuple(map(_placed, args)), {k: _placed(v) for k, v in kwargs.items()}, in_place))

    # -- as it was planned

    def links(self) -> tuple[Tensor, list[Link]]:
        """What all products up to this one multiply in turn, and the layers."""
        own = Link(self.product.weight, self.inputs, self.plan.text)
        if self._before is None:
            return self.product.x, [own]
        x, links = self._before.links()
        return x, [*links, own]

    def tensors(self) -> tuple[Tensor, ...]:
        """All that `links` holds, in a row."""
        own = (self.product.weight, *self.inputs.values())
        return (self.product.x, *own) if self._before is None else (*self._before.tensors(), *own)

    def compute(self) -> Tensor:
        """What the last step gives."""
        if watched() or torch._C._autograd._profiler_enabled():  # a mode around the forward, or a profile, is to see the chain
            result: Tensor = chain.chain(*self.links())
        else:
            result, self.way = again.run(self.plan.computed, self.state, self.tensors(), self.links)
        result = result if result.shape == self.frame else result.view(self.frame)
        return result.permute(channels_second(len(self.frame))) if self.moved else result

    def regions(self) -> list[Region]:
        """This one and those whose results it multiplies."""
        return [self, *(self._before.regions() if self._before is not None else ())]

    @property
    def spared_us(self) -> float:
        """What the kernels of its steps would have taken, each of which reads what the one before it has written."""
        each = _LAUNCH_US + 2 * math.prod(self.frame) * self.plan.dtype.itemsize / _BYTES_A_US
        return each * sum(not step.views for step in self.plan.steps) * (_BACKWARD if self.wants else 1.0)

    @property
    def held(self) -> list[int]:
        """The places whose tensors somebody has."""
        return [place for place, value in enumerate(self.values) if value() is not None]

    @property
    def dtype(self) -> torch.dtype:
        """Of what the last step gives."""
        return self.plan.steps[-1].dtype if self.plan.steps else self.plan.dtype

    @property
    def next(self) -> Step | None:
        """The step that is expected."""
        at, steps = len(self.calls), self.plan.steps
        return steps[at] if at < len(steps) else None

    @property
    def complete(self) -> bool:
        return len(self.calls) == len(self.plan.steps)

    # -- as it was called

    def settle(self) -> None:
        """Compute all that somebody holds, by the functions that were called."""
        held = self.held
        if self.settled or not held:
            return
        self.settled = True
        with _restored(self.state):
            x = self.product.x
            if type(x) is Deferred:
                x.region.settle()
            contents = [self.plan.func(*_arguments(self.plan.func, Product(x, self.product.weight, self.product.bias)))]
            for func, args, kwargs, in_place in self.calls:
                if len(contents) > max(held):
                    break
                called = functional(func) if in_place else func
                named = {k: _content(v, contents) for k, v in kwargs.items()}
                result = called(*(_content(v, contents) for v in args), **(named | {"inplace": False} if "inplace" in named else named))
                contents += result if isinstance(result, tuple) else (result,)
            given: list[Tensor] = []
            for place in held:  # a function may give what it was given
                given.append(contents[place].view_as(contents[place]) if any(contents[place] is other for other in given) else contents[place])
            for place, tensor in zip(held, given, strict=True):
                deferred = self.values[place]()
                if deferred is not None:
                    become(deferred, tensor)


def _arguments(func: Any, product: Product) -> tuple[Any, ...]:
    if func in CONVOLUTIONS:
        rank = product.x.dim()
        return product.x.permute(channels_second(rank)), product.weight[(..., *[None] * (rank - 2))], product.bias
    if func in MATMULS:
        return product.x, product.weight.t()
    return (product.bias, product.x, product.weight.t()) if func == torch.addmm else (product.x, product.weight, product.bias)


def _placed(value: Any) -> Any:
    return Ref(value.place) if type(value) is Deferred else value


def _content(value: Any, contents: Sequence[Any]) -> Any:
    return contents[value.place] if type(value) is Ref else value


class _restored:  # noqa: N801  # used as a context manager of torch's is
    """torch's state as it was when what is computed was called."""

    def __init__(self, then: State):
        self.then = then

    def __enter__(self) -> None:
        now = torch.is_grad_enabled()
        if self.then[0] and not now:
            raise CallError(_UNSEEN.format(what="gradients are switched off"))
        self.grad = torch.set_grad_enabled(self.then[0])

    def __exit__(self, *_: object) -> None:
        self.grad.__exit__(None, None, None)


def become(deferred: Deferred, contents: Tensor) -> None:
    """The same object, from now on an ordinary tensor with these contents and their gradient."""
    if type(contents) is not Tensor or contents.shape != _undeferred(Tensor.shape.__get__, (deferred,), None):  # type: ignore[attr-defined]
        raise InternalError(f"a {type(contents).__name__} of shape {list(contents.shape)} was computed for a result of another")
    if contents._use_count() > 1:  # type: ignore[attr-defined]  # somebody else holds it, as where a function gives what it was given
        contents = contents.view_as(contents)
    vars(deferred).clear()
    deferred.__class__ = Tensor  # type: ignore[assignment]
    torch._C._swap_tensor_impl(deferred, contents)


# -- shapes


def present(value: Tensor, indices: str, frame: tuple[int, ...]) -> Tensor | None:
    """A tensor as the program takes it, where torch would broadcast it to the frame in this way; None where it is of another kind."""
    if indices == "mn":
        if value.shape == frame:
            return value
        return value.expand(frame) if kind(value.shape, frame) == "mn" else None
    if kind(value.shape, frame) != indices:
        return None
    if value.dim() == len(indices) and indices in ("n", ""):
        return value
    if indices == "n":
        return value.reshape(-1)
    return value.reshape(()) if not indices else value.squeeze(-1).expand(frame[:-1])


def facing(value: Tensor, func: Any, frame: tuple[int, ...]) -> Tensor | None:
    """An argument beside a convolution's result, with its channels last as the frame's; None where it would have to be copied. func: whose argument."""
    dims, rank = value.dim(), len(frame)
    if dims > rank or (func is F.batch_norm and dims == 1):
        return value
    faced = (value.view((1,) * (rank - dims) + tuple(value.shape)) if dims < rank else value).permute(rows_first(rank))
    return faced if faced.is_contiguous() and (faced.shape == frame or kind(faced.shape, frame) != "mn") else None


def kind(shape: Sequence[int], frame: Sequence[int]) -> str | None:
    """What a tensor that torch would broadcast to the frame varies along: "mn", "m", "n" or ""; None where it would not, or would make it larger.

    What has the frame's own shape is a tile, also where an extent of it is 1.
    """
    if tuple(shape) == tuple(frame):
        return "mn"
    if len(shape) > len(frame):
        return None
    rows = columns = False
    for place in range(1, len(shape) + 1):
        if shape[-place] != frame[-place] and shape[-place] != 1:
            return None
        if shape[-place] != 1:
            rows, columns = rows or place > 1, columns or place == 1
    return "m" * rows + "n" * columns


# -- while a forward runs


def watched() -> bool:
    """Whether a mode of torch's is to see the functions that are called, but for one that only says where tensors are made of nothing."""
    around = torch._C._len_torch_function_stack()
    return around > 1 or (around == 1 and type(torch._C._get_function_stack_at(0)) is not DeviceContext)


_LAUNCH_US, _BYTES_A_US, _FUNCTION_US, _PRODUCT_US = 5.0, 3e6, 1.0, 20.0
"""Of a kernel that is spared: the host's time of its launch, and the bytes that it would have moved in a microsecond. What of the host's time a `Run` adds to
each function that is called, and to each product that waits (torch 2.13, one core, 2026-11; the bytes are an H100's)."""

_BACKWARD = 2.5
"""How many times as much is spared where gradients are wanted: each function has a derivative as well, and each bias a sum."""


class Run(TorchFunctionMode):
    """One call of a forward. deviated: it did something else than the plan expects. ways: of each chain that was computed, the function for it, if there is one,
    and whether that takes its inputs as they come. called: how many functions. spared_us: what kernels would have taken that it did without."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan, self.count, self.deviated = plan, 0, False
        self.called, self.spared_us = 0, 0.0
        self.ways: list[tuple[Callable[..., Tensor] | None, bool]] = []
        self.pending: list[Region] = []
        self.held: list[Region] = []

    @property
    def pays(self) -> bool:
        """Whether kernels that are spared would have taken longer than all this takes of the host, which then does not matter even if the GPU waits for it."""
        return self.spared_us >= _FUNCTION_US * self.called + _PRODUCT_US * (1 + len(self.ways))

    def end(self) -> None:
        """What the forward has given or kept becomes ordinary tensors."""
        self.deviate()
        while self.held:  # each before those whose results it multiplies, which it holds until it is gone
            self.held.pop(0).settle()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called += 1
        if func in PRODUCTS:
            return self.product(func, args, kwargs or {})
        if not self.pending and not self.held:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in _ASKING:
            return _undeferred(func, args, kwargs)
        if Deferred in types:
            return self.step(func, args, kwargs or {})
        if not pure(func) or (kwargs and (kwargs.get("inplace") or kwargs.get("out") is not None)):
            self.deviate()
            self.settle_readers(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def settle_readers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compute what somebody holds of a product that was joined, before what it would be computed of is changed: by default the first argument."""
        if self.held:
            first = args[0] if args and isinstance(args[0], Tensor) else (args, dict(kwargs))
            changed = [t for t in pytree.tree_leaves((first, kwargs.get("out"))) if isinstance(t, Tensor)]
            for region in self.held:
                if region.held and any(_share(t, read) for t in changed for read in region.tensors()):
                    region.settle()

    def product(self, func: Any, args: Any, kwargs: Any) -> Any:
        place, self.count = self.count, self.count + 1
        planned = self.plan.products[place] if place < len(self.plan.products) else None
        if planned is not None and planned.func == func:
            product = PRODUCTS[func](*args, **kwargs)
            region = None if isinstance(product, str) else self.begun(planned, product)
            if region is not None:
                if planned.steps:
                    self.pending.append(region)
                    return region.give(planned.dtype)
                return self.computed(region)
        elif place in self.plan.seconds and (joined := self.second(self.plan.products[self.plan.seconds[place]], func, args, kwargs)) is not None:
            return joined
        if planned is not None or place in self.plan.seconds or (self.pending and _all_deferred(args, kwargs)):
            self.deviate()
            self.deviated = True
        return func(*args, **kwargs)

    def second(self, planned: Planned | None, func: Any, args: Any, kwargs: Any) -> Deferred | None:
        """A product that is a step of one that waits. planned: of that."""
        region = next((r for r in reversed(self.pending) if r.plan is planned), None)
        product = PRODUCTS[func](*args, **kwargs)
        step = None if region is None or isinstance(product, str) else region.joined(func, product)
        if region is None or step is None:
            return None
        region.note(func, args, kwargs, False)
        return region.give(step.dtype)

    def begun(self, planned: Planned, product: Product) -> Region | None:
        """A product's region, where it is what was planned."""
        x, weight, bias = product
        if type(weight) not in _WEIGHTS or (bias is None) == planned.bias or (bias is not None and type(bias) not in _PLAIN):
            return None
        device = weight.device
        kind = device.type
        now = state(kind)
        before = x.region if type(x) is Deferred else None
        tensors: tuple[Tensor, ...]
        if before is None:
            if planned.after_chained or type(x) not in _PLAIN:
                return None
            tensors, shape, dtype = (x, weight) if bias is None else (x, weight, bias), x.shape, x.dtype
        else:
            if not planned.after_chained or not before.plan.chained or not before.complete or x.place != len(before.values) - 1 or before.state != now:
                return None
            tensors, shape, dtype = (weight,) if bias is None else (weight, bias), before.frame, before.dtype
        of = (shape, dtype)
        if planned.begun.get(now, tensors) != of:
            if (x.device if before is None else before.device) != device or not fits(product, tuple(shape), dtype, now, planned.dtype):
                return None
            planned.begun.put(now, tensors, of)
        region = Region(planned, product, before, (*shape[:-1], weight.shape[0]), now, device, kind)
        if type(weight) in semi_structured.TYPES and (
            planned.parts or (now[0] and (weight.requires_grad or (x.requires_grad if before is None else before.wants)))
        ):
            return None
        if before is not None:
            self.pending.remove(before)
        return region

    def computed(self, region: Region) -> Tensor:
        if region in self.pending:
            self.pending.remove(region)
        result = region.compute()
        self.ways.append((region.way, all(r.plain for r in region.regions())))
        self.spared_us += sum(r.spared_us for r in region.regions())
        self.held += [r for r in region.regions() if r.held]  # and no other, which would hold what it multiplies
        return result

    def step(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        region = next((x.region for x in args if type(x) is Deferred), None)
        step, found = region.next if region is not None else None, None
        if region is not None and step is not None:
            found = region.viewed(step, func, args, kwargs) if step.views else region.matched(step, func, args, kwargs)
        if region is None or step is None or not found:
            self.deviate()
            return func(*args, **kwargs)
        last = len(region.calls) + 1 == len(region.plan.steps) and not region.plan.chained
        if not step.in_place:
            if last:
                return self.computed(region)
            region.note(func, args, kwargs, False)
            if not isinstance(found, Viewed):
                return region.give(step.dtype)
            values = tuple(region.seen_as(view, step.dtype) for view in found.views)
            return values if found.several else values[0]
        region.note(func, args, kwargs, True)
        changed: Deferred = args[0]
        place = changed.place
        region.values[place] = _nobody  # it is no longer what it was there, for whoever settles the region
        if last:
            become(changed, self.computed(region))
        else:
            changed.place = len(region.values)
            region.values.append(weakref.ref(changed))
            region.views.append(region.views[place])
        return changed

    def deviate(self) -> None:
        """Go on as if nothing had been planned."""
        self.deviated = self.deviated or bool(self.pending)
        pending, self.pending = self.pending, []
        for region in pending:
            region.settle()


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether they lie in the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if a.layout != torch.strided or b.layout != torch.strided:
            return False
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _nobody() -> None:
    """In the place of a reference to a value that was changed since."""
    return


def fits(product: Product, shape: tuple[int, ...], dtype: torch.dtype, now: State, gives: torch.dtype) -> bool:
    """Whether `epigen.linear` computes a product of tensors of one device. shape, dtype: of x. gives: the dtype of what torch's own would give."""
    _, weight, bias = product
    n, k = weight.shape if weight.dim() == 2 else (0, 0)
    if (
        not n
        or not k
        or not shape
        or shape[-1] != k
        or 0 in shape
        or gives not in DTYPES
        or weight.layout != torch.strided
        or weight.device.type not in DEVICES
    ):
        return False
    if gives != (weight.dtype if now[2] is None else now[2]) or (now[2] is None and dtype != weight.dtype):
        return False
    return bias is None or _bias_fits(bias, weight)


def _bias_fits(bias: Tensor, weight: Tensor) -> bool:
    return tuple(bias.shape) == (weight.shape[0],) and bias.device == weight.device and bias.dtype in DTYPES
