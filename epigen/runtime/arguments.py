"""What a call is given: the checks of operands and inputs, and what of them a prepared call depends on. Raises CallError."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.sparse import SparseSemiStructuredTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epigen.codegen import lower
from epigen.codegen.spec import LINE_BYTES, MOST_POSITIONS, TMA_BYTES
from epigen.dtypes import BF16, BY_TORCH, BY_TORCH_ON_CPU, FP16, FP32, INPUTS, OPERANDS, WEIGHTS, multiplied_as
from epigen.errors import CallError, near_miss
from epigen.ir import graph as g
from epigen.ir.graph import PRODUCT, Graph, Node
from epigen.lang.syntax import declared_text

ALIGNED_BYTES = 16
"""Triton compiles one kernel for addresses that are multiples of this, and another for those that are not."""

MOST_TMA_STRIDE = 1 << 40
"""Bytes, which the distances that a TMA descriptor knows are below."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
"""What is copied as such, by its bytes."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose tensors are nothing but memory: one of a subclass may hold none, or none of its own."""

NO_SPARSE = "is 2:4 sparse, which here nothing can be: pass its dense values, as t.to_dense() has them"
"""Of torch's tensors of that kind, which a kernel's call and a linear layer take in the place of one operand."""

PRODUCTS = (FP32, FP16, BF16)
"""What a product that is given may be: the dtypes of gradients."""


def check_positional(wanted: str, extra: int, declared: Iterable[str]) -> None:
    """wanted: what is given by position. extra: how many arguments came behind it."""
    if extra:
        names = ", ".join(name for name in declared if name != PRODUCT)
        raise CallError(f"by position {wanted} given, and {extra} more came: pass the program's inputs by name ({names or 'it has none'})")


def check_memory(operands: Sequence[Any], inputs: Mapping[str, Any], outs: Mapping[str, Any]) -> None:
    """That what is a tensor has elements in memory of its own, or is on the meta device. The rest is for others to check."""
    for name, value in zip("ab", operands, strict=False):
        _check_memory("operand ", name, value)
    for name, value in inputs.items():
        _check_memory("input ", f"'{name}'", value)
    for name, value in outs.items():
        _check_memory("out for ", f"'{name}'", value)


def _check_memory(kind: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        return
    if value.layout != torch.strided or value.is_nested:
        actual = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        hint = "call once for each of its parts" if value.is_nested else "pass t.to_dense()"
        raise CallError(f"{kind}{name} is a {actual} tensor, and one with strides was expected: {hint}")
    if isinstance(value, SparseSemiStructuredTensor):
        raise CallError(f"{kind}{name} {NO_SPARSE}")
    wraps: Any = is_traceable_wrapper_subclass
    if type(value) not in PLAIN and wraps(value):
        raise CallError(f"{kind}{name} is a {type(value).__name__}, which wraps other tensors: pass those (of a DTensor, t.to_local())")
    if value.is_meta or not value.numel():
        return
    try:
        held = value.data_ptr() != 0
    except RuntimeError:  # so torch says it of what has been freed, and of tensors that only stand for others
        held = False
    if not held or not value.untyped_storage().nbytes():
        raise CallError(
            f"{kind}{name} is a {type(value).__name__} without memory: its storage was freed, or it only stands for a tensor, as in torch's tracing"
        )


def check_operands(graph: Graph, a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """Returns M, N, K."""
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise CallError(f"operand {name} is {kind(tensor)}, and a tensor was expected")
        if tensor.dim() != 2:
            raise CallError(f"operand {name} has shape {list(tensor.shape)}, and {'[M, K]' if name == 'a' else '[K, N]'} was expected")
        check_double(f"operand {name}", tensor, tensor)
        if str(tensor.dtype) not in BY_TORCH_ON_CPU:
            raise CallError(f"operand {name} is {tensor.dtype}, which epigen does not multiply: the operands are one of {', '.join(map(str, OPERANDS))}")
    if torch.float64 in (a.dtype, b.dtype):
        if a.dtype != b.dtype and BY_TORCH_ON_CPU[str(b.dtype)] not in WEIGHTS:
            raise CallError(f"operand a is {a.dtype} and operand b is {b.dtype}: both need the same dtype")
    else:
        lower.check_operands(BY_TORCH_ON_CPU[str(a.dtype)], BY_TORCH_ON_CPU[str(b.dtype)])
    if along := graph.packed_along():
        return _check_packed(graph, a, b, along)
    if a.shape[1] != b.shape[0]:
        raise CallError(f"a is [M, K] = {list(a.shape)} and b is [K, N] = {list(b.shape)}: K differs (for a Linear layer's weight pass weight.T)")
    _check_device(a, b)
    return a.shape[0], b.shape[1], a.shape[1]


def _check_device(a: Tensor, b: Tensor) -> None:
    if a.device != b.device:
        raise CallError(f"operand a is on {a.device} and operand b on {b.device}")


def _check_packed(graph: Graph, a: Tensor, b: Tensor, along: str) -> tuple[int, int, int]:
    """As `check_operands`, of a b that holds two values in a byte along an index."""
    lower.check_packed(graph, BY_TORCH_ON_CPU[str(a.dtype)], BY_TORCH_ON_CPU[str(b.dtype)])
    k, n = (extent * (2 if index == along else 1) for index, extent in zip("kn", b.shape, strict=True))
    if a.shape[1] != k:
        held = "[K / 2, N]" if along == "k" else "[K, N / 2]"
        hint = "" if along == "n" else ": pad a and b by one" if a.shape[1] % 2 else " (for a Linear layer's weight pass epigen.pack_int4(weight).T)"
        raise CallError(f"a is [M, K] = {list(a.shape)} and b, with two values in a byte along {along}, is {held} = {list(b.shape)}: K differs{hint}")
    _check_device(a, b)
    return a.shape[0], n, k


def converted(a: Tensor, b: Tensor) -> bool:
    """Whether b is a narrower weight, which is multiplied in the dtype of a."""
    return a.dtype != b.dtype and _converts(a.dtype, b.dtype)


def _converts(a: torch.dtype, b: torch.dtype) -> bool:
    of_a, of_b = BY_TORCH_ON_CPU.get(str(a)), BY_TORCH_ON_CPU.get(str(b))
    return of_a is not None and of_b is not None and multiplied_as(of_a, of_b) != of_b


# torch.compile is not to look into it: what torch.compiler.assume_constant_result sets, which imports all of torch.compile to do so
_converts._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kind(value: Any) -> str:
    return "missing (operands are given by position)" if value is None else f"a {type(value).__name__}"


def check_product(mm: Tensor) -> tuple[int, int]:
    """A product that is given. Returns M, N."""
    if not isinstance(mm, Tensor):
        raise CallError(f"mm is {kind(mm)}, and a tensor was expected")
    if mm.dim() != 2:
        raise CallError(f"mm has shape {list(mm.shape)}, and [M, N] was expected")
    check_double("mm", mm, mm)
    if BY_TORCH.get(str(mm.dtype)) not in PRODUCTS and mm.dtype != torch.float64:
        raise CallError(f"mm is {mm.dtype}, and a product that is given is one of {', '.join(map(str, PRODUCTS))}")
    return mm.shape[0], mm.shape[1]


def check_inputs(declared: Mapping[str, Node], inputs: Mapping[str, Any], shape: tuple[int, int, int], first: Tensor) -> None:
    """declared: the program's inputs by name. inputs: what the call gives. shape: M, N, K. first: an operand, or the product that is given."""
    check_names(declared, inputs)
    periods: dict[str, tuple[int, str]] = {}
    for name, node in declared.items():
        _check_input(name, node, inputs[name], shape, first)
        for period, extent in zip(node.periods, inputs[name].shape if node.periods else (), strict=True):
            known, other = periods.setdefault(period, (extent, name))
            if period and known != extent:
                raise CallError(f"{period} is {known} of input '{other}' and {extent} of input '{name}': write another letter, or pass as many of both")


def check_names(declared: Mapping[str, Node], inputs: Mapping[str, Any]) -> None:
    for name in inputs:
        if name not in declared:
            raise CallError(f"the program has no input '{name}': {near_miss(name, declared) or 'its inputs are ' + (', '.join(declared) or 'none')}")
    if missing := [name for name in declared if name not in inputs]:
        raise CallError(f"missing input{'s' * (len(missing) > 1)}: {', '.join(f'{n}{_declared(declared[n])}' for n in missing)}")


def check_second(graph: Graph, inputs: Mapping[str, Any], b: Tensor) -> None:
    """The input that is the right operand of a second product, if the program has one, after `check_inputs`. b: that of the first."""
    second = graph.second()
    if second is not None and inputs[second.name].dtype != b.dtype:
        raise CallError(f"input '{second.name}' is {inputs[second.name].dtype} and operand b is {b.dtype}: what is multiplied with a needs the dtype of b")


def check_positions(graph: Graph, m: int, n: int) -> None:
    for index, extent in (("m", m), ("n", n)):
        if index in graph.positions() and extent > MOST_POSITIONS:
            raise CallError(f"the program computes with the position {index}, of which fp32 holds 2^24, and {index.upper()} is {extent}: pass less at a time")


def check_double(what: str, t: Tensor, first: Tensor) -> None:
    """first: an operand, or the product that is given."""
    if t.dtype == torch.float64 and t.device.type not in ("cpu", "meta"):
        raise CallError(f"{what} is float64 on {t.device}, and only the reference on the CPU computes in it: pass it there, or as float32")
    if t.dtype == torch.float64 != first.dtype:
        raise CallError(f"{what} is float64, and the operands are {str(first.dtype).removeprefix('torch.')}: float64 is computed where they are float64 too")


def check_seed(what: str, value: Any) -> None:
    """value: as `seed` has it."""
    if isinstance(value, Tensor) and value.dtype == torch.int64 and value.numel() == 1:
        return
    found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise CallError(f"{what} is a seed, and {found} was given: pass an int of 64 bits, or an int64 tensor with one element")


def _check_input(name: str, node: Node, value: Any, shape: tuple[int, int, int], first: Tensor) -> None:
    if node.kind == g.ENDS:  # which belong to the call, and are checked where its products are found
        return
    what, (m, n, _) = f"input '{name}'", shape
    if node.kind == g.SEED:
        check_seed(what, value)
    if not isinstance(value, Tensor):
        if node.op == g.BITS or node.indices:
            raise CallError(f"{what} is declared as {name}{_declared(node)}, and a {type(value).__name__} was given: pass a tensor")
        if not isinstance(value, numbers.Real):
            raise CallError(f"{what} is a scalar, and a {type(value).__name__} was given: pass a number or a tensor with one element")
        number(name, value)
        return
    if value.device != first.device:
        raise CallError(f"{what} is on {value.device}, and the call's other tensors are on {first.device}")
    check_double(what, value, first)
    if node.op == g.BITS:
        if value.dtype != torch.uint8 or tuple(value.shape) != (m, -(-n // 8)):
            raise CallError(f"{what} is a packed mask, uint8 [M, ceil(N / 8)] = [{m}, {-(-n // 8)}], and {value.dtype} {list(value.shape)} was given")
        return
    if str(value.dtype) not in BY_TORCH_ON_CPU:
        raise CallError(f"{what} is {value.dtype}, which epigen does not compute with: inputs are one of {', '.join(map(str, INPUTS))}")
    wanted = g.held(node.indices, node.blocks, dict(zip("mnk", shape, strict=True)))
    if node.periods and value.dim() == len(wanted):
        wanted = tuple(max(1, own) if period else extent for extent, own, period in zip(wanted, value.shape, node.periods, strict=True))
    if (tuple(value.shape) != wanted) if node.indices else (value.numel() != 1):
        sizes = node.blocks or (1,) * len(node.indices)
        called = [
            period or (f"ceil({i.upper()} / {block})" if block > 1 else i.upper())
            for i, period, block in zip(node.indices, node.periods or ("",) * len(sizes), sizes, strict=True)
        ]
        expected = f"[{', '.join(called)}] = {list(wanted)}" if node.indices else "one element"
        message = f"{what} is declared as {name}{_declared(node)}, so {expected} was expected, and it has shape {list(value.shape)}"
        raise CallError(message + _as_expected(name, tuple(value.shape), wanted))


def _as_expected(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What to write where torch would broadcast it, or it has extents of 1 too many; "" where its elements are others."""
    size = ", ".join(map(str, wanted))
    if [e for e in shape if e != 1] == [e for e in wanted if e != 1]:
        return f": pass {name}.reshape({size})"
    broadcasts = len(shape) <= len(wanted) and all(f in (1, w) for f, w in zip(reversed(shape), reversed(wanted), strict=False))
    return f": pass {name}.expand({size})" if broadcasts else ""


def number(name: str, value: Any) -> float:
    """A scalar input that is passed by value."""
    try:
        return float(value)
    except OverflowError:
        raise CallError(f"input '{name}' is too large for fp32") from None


def with_seeds(names: Iterable[str], inputs: Mapping[str, Any], beside: Any) -> Mapping[str, Any]:
    """The inputs, with seeds as `seed` has them. names: of the seeds."""
    return {**inputs, **{name: seed(name, inputs[name], beside) for name in names if name in inputs}}


def seed(name: str, value: Any, beside: Any) -> Any:
    """A seed as a kernel reads it, a tensor where `beside` lies; one that is no integer as it is, for the checks.

    Its fill is a launch of its own. In return a seed of any value is the same call, through torch's operations and Triton's launchers too, which round or
    specialise integers.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not (isinstance(beside, Tensor) or stands_for_one(beside)):
        return value
    whole = int(value)
    if not -(1 << 63) <= whole < 1 << 64:
        raise CallError(f"input '{name}' is a seed of 64 bits, and {whole} has more")
    return beside.new_full((1,), whole - (1 << 64) if whole >= 1 << 63 else whole, dtype=torch.int64)


def traced_number(value: float, device: torch.device) -> Tensor:
    """A number for torch.compile, which compiles anew for each but for what it does arithmetic of tensors with."""
    return torch.ones((), dtype=torch.float32, device=device).mul(value)


def stands_for_one(value: Any) -> bool:
    """Whether a value is none of torch's tensors and takes part in its functions as one does: a proxy of torch.fx, which writes them down."""
    return not isinstance(value, Tensor) and hasattr(type(value), "__torch_function__")


def has_tangent(t: Tensor) -> bool:
    """Whether a tensor is a dual number of torch's forward-mode derivatives."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None


def check_no_gradient(values: Iterable[Any]) -> None:
    """A kernel has no derivative: what one is wanted of is refused, for it would be lost without a word."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise CallError("an argument is one of torch.func's (grad, jvp, vmap, …), which a kernel cannot look into: use epigen.linear there")
    if any(map(has_tangent, tensors)):
        raise CallError("an argument has a tangent, and a kernel has no forward-mode derivative: use epigen.linear")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise CallError(NO_GRADIENT)


NO_GRADIENT = "an argument requires grad, and a kernel has no backward of its own: use epigen.linear, or call it under torch.no_grad()"


def _declared(node: Node) -> str:
    if node.op == g.BITS:
        return " (a packed mask, uint8 [M, ceil(N / 8)])"
    if node.kind == g.SEED:
        return " (a seed)"
    return f"[{declared_text(node.indices, node.periods, node.blocks)}]" if node.indices else " (a scalar)"


# -- what a prepared call depends on


def key(value: Any) -> Any:
    """Of a tensor all but its contents and its place; of its place the alignment. Of a number its type."""
    if not isinstance(value, Tensor):
        return type(value)
    return value.device, value.dtype, value.shape, value.stride(), value.is_neg(), aligned(value)


def aligned(t: Tensor) -> bool:
    """Whether a tensor's address is a multiple of ALIGNED_BYTES; False where it may have none."""
    return type(t) in PLAIN and t.data_ptr() % ALIGNED_BYTES == 0


def describable(t: Tensor, written: bool = False, step: int = 0) -> bool:
    """Whether TMA can address a matrix as it lies; the extents may be any, but not 0. step: of a batch, the elements from one matrix to the next.

    written: what lies between the ends of rows has to stay as it is, and TMA writes pieces of 16 bytes whole: into a slice of 1004 columns of fp16
    it wrote 1008 (H200, Triton 3.6, 2026-11).
    """
    rows, columns, steps = (each * t.element_size() for each in (t.stride(0), t.shape[1], step))
    even = 0 < rows < MOST_TMA_STRIDE and 0 <= steps < MOST_TMA_STRIDE and rows % TMA_BYTES == steps % TMA_BYTES == 0
    addressed = t.stride(1) == 1 and even and t.data_ptr() % TMA_BYTES == 0 and 0 not in t.shape
    return addressed and not (written and columns % TMA_BYTES)


def padded(t: Tensor, lies: str) -> Tensor:
    """A copy of a matrix, or of its transpose if that is to have contiguous rows, with rows that begin with a line of L2, as TMA loads them
    fastest. What lies between their ends is left as it is: TMA knows the extents, and fetches zeros beyond. Of the several of a batch, each, and
    once what all products share. lies: as of `layout`, which the matrix is copied from as fast as torch can, and from the other one slowly."""
    if t.dim() > 2 and t.shape[0] and t.stride(0) == 0:
        return padded(t[0], lies).expand(t.shape[0], -1, -1)
    t = t if lies == "n" else t.mT
    *rows, columns = t.shape
    each = LINE_BYTES // t.element_size()
    held = torch.empty((*rows, -(-columns // each) * each), dtype=t.dtype, device=t.device)[..., :columns]
    if t.is_meta:
        return held
    word = WORDS.get(_word_bytes(t), t.dtype)
    held.view(word).copy_(t.view(word))
    return held


def _word_bytes(t: Tensor) -> int:
    """The longest words that a matrix of contiguous rows can be taken for: torch copies element by element, so bytes at an eighth of the rate of such."""
    size = t.element_size()
    return math.gcd(8, t.data_ptr(), *(each * size for each in (t.shape[-1], *t.stride()[:-1]))) if t.stride(-1) == 1 else size


def layout(t: Tensor) -> str:
    """How an operand lies: "n" for row-major, "t" for the transpose of a row-major matrix."""
    return "n" if t.stride(-1) == 1 or t.stride(-2) != 1 else "t"


def reach(t: Tensor) -> int:
    """Largest offset, in elements, from a tensor's first element."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)


def shown(value: Any) -> Any:
    """A lazily negated view holds the opposite of what it shows: here as a tensor that holds what it shows."""
    return value.resolve_neg() if isinstance(value, Tensor) else value


_torchs_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def process_precision() -> str:
    """What this process has chosen for fp32 operands, "ieee" or "tf32": what torch's own CUDA products go by.

    That is `torch.backends.cuda.matmul.fp32_precision`, which `torch.set_float32_matmul_precision` and `allow_tf32` set as well, so that of the
    older and the newer settings the one that was set last wins; where it is "none", `torch.backends.fp32_precision`. The older getters raise
    once the two disagree.
    """
    # what the attribute asks, without the 2 us of Python around it
    precision = torch.backends.cuda.matmul.fp32_precision if _torchs_precision is None else _torchs_precision("cuda", "matmul")
    return "tf32" if precision == "tf32" else "ieee"
