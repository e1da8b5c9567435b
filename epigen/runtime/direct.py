"""A compiled kernel's own C launcher, called without the Python that Triton puts around it. What it knows of Triton's insides is here.

`jit[grid](...)` binds, specialises and looks up anew at every launch, and describes each tensor to TMA anew. Its first launch returns the
compiled kernel; with arguments of the same types, the same integers and the same alignments every later one would come to that kernel
again, so it may as well be called at once. Whether they are the same is for the caller to know.

Nothing here is promised by Triton. What is found is therefore looked at, not assumed: the launcher's Python is run once with marks in
place of the stream and the arguments, and what arrives at the C function says where they go. Seen alike in Triton 3.6 and 3.9. Where
something looks otherwise the answer is None, and `jit[grid]` stays the way.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epigen.dtypes import BY_TORCH
from epigen.runtime.code_builder import CodeBuilder


def describe_by_triton(dialect: str, t: Tensor, block: tuple[int, int]) -> Any:
    """A matrix as an argument of `jit[grid]` that its kernel addresses by TMA, in blocks; its rows or its columns are contiguous.

    dialect: the kernel's, "triton" or "gluon".
    """
    t = upright(t)
    if dialect == "triton":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(t, list(block))
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    dtype = getattr(gl, BY_TORCH[str(t.dtype)].triton)
    return GluonDescriptor.from_tensor(t, list(block), gl.NVMMASharedLayout.get_default_for(list(block), dtype))


def upright(t: Tensor) -> Tensor:
    """The matrix or its transpose, whichever has contiguous rows: TMA addresses nothing else."""
    return t if t.stride(1) == 1 else t.T


@dataclass(frozen=True, slots=True)
class Start:
    """A kernel's C function and what it takes before and behind the stream. dependent: where in `middle` it says whether the kernel is launched while
    the one before it still runs. packed: its kernel's arguments are one tuple. owner: of its code."""

    function: Callable[..., object]
    head: tuple[Any, ...]
    middle: tuple[Any, ...]
    dependent: int
    packed: bool
    owner: Any

    def call(self, text: CodeBuilder, stream: str, dependent: str, arguments: Sequence[str]) -> str:
        """The statement that launches. stream, dependent: expressions. arguments: those for all of the kernel's, constants too; addresses are integers,
        and a tensor with a descriptor is its descriptor and what `Descriptors` says that follows."""
        text.hold(self.owner)
        middle = [dependent if place == self.dependent else text.hold(value) for place, value in enumerate(self.middle)]
        last = f"({', '.join(arguments)},)" if self.packed else ", ".join(arguments)
        return f"{text.hold(self.function)}({', '.join([*map(text.hold, self.head), stream, *middle, last])})"


def start(jit: Any, compiled: Any, names: Sequence[str], blocks: int, arguments: int) -> Start | None:
    """The C launcher of a kernel, ready but for the stream and the arguments.

    jit, compiled: a function, and what a launch of it returned. names: its parameters in the order of the arguments to come.
    blocks: of the grid. arguments: how many there are, descriptors spread out.
    """
    launcher = _launcher(compiled)
    if launcher is None or [p.name for p in jit.params] != list(names):
        return None
    function = _beneath(launcher.launch)
    if function is None:
        return None
    reached: list[tuple[Any, ...]] = []
    stand_in = copy.copy(launcher)
    stand_in.launch = lambda *given: reached.append(given)
    stream, dependent, marks = object(), object(), tuple(object() for _ in range(arguments))
    stand_in.launch_pdl = dependent
    try:
        stand_in(blocks, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *marks)
    except (TypeError, AttributeError):  # another calling convention than the known ones
        return None
    return _replay(function, reached, stream, dependent, marks, compiled)


def _replay(
    function: Callable[..., object], reached: Sequence[tuple[Any, ...]], stream: object, dependent: object, marks: tuple[Any, ...], compiled: Any
) -> Start | None:
    """The C function with what arrived there, but for what the marks stood for: the stream, whether it is launched as a dependent, the arguments.

    compiled: owns the code.
    """
    if len(reached) != 1:
        return None
    (given,) = reached
    places = [i for i, value in enumerate(given) if value is stream]
    spread = len(marks) > 0 and given[-len(marks) :] == marks
    if len(places) != 1 or not (spread or given[-1:] == (marks,)):
        return None
    head, middle = given[: places[0]], given[places[0] + 1 : -len(marks) if spread else -1]
    known = [i for i, value in enumerate(middle) if value is dependent]
    if len(known) != 1 or any(value in marks for value in (*head, *middle)):
        return None
    return Start(function, head, middle, known[0], not spread, compiled)


def _launcher(compiled: Any) -> Any:
    """Triton's launcher of a kernel for CUDA that needs no memory of its own; None for any other.

    For AMD, Triton specialises on the size of a tensor's memory as well, which no caller here keeps account of.
    """
    from triton.compiler import CompiledKernel

    if not isinstance(compiled, CompiledKernel) or compiled.metadata.target.backend != "cuda":
        return None
    launcher = compiled.run
    if type(launcher).__name__ != "CudaLauncher" or getattr(launcher, "gsan_enabled", False):
        return None
    sizes = (getattr(launcher, "global_scratch_size", None), getattr(launcher, "profile_scratch_size", None))
    return launcher if sizes == (0, 0) and hasattr(launcher, "launch") else None


def _beneath(launch: Any) -> Callable[..., object] | None:
    """The C function itself; of a kernel with descriptors Triton has it in a closure, around which it makes them."""
    if isinstance(launch, types.FunctionType):
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    return launch if isinstance(launch, types.BuiltinFunctionType) else None


# -- descriptors


@dataclass(frozen=True, slots=True)
class _Place:
    """As much of a tensor as a descriptor is made from."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class _Described:
    """What Triton's own TensorDescriptor holds, without its checks, which the first launch has made."""

    base: _Place
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False
    element_strides: None = None


_REMEMBERED = 64
"""Descriptors kept of one argument: an activation comes back at one of a few addresses, as the allocator hands them out."""


class Descriptors(dict[int, object]):
    """By address, those of tensors that differ in their address alone. rest: what the C function takes after each, shape and strides.

    A descriptor holds nothing but the address and what is fixed here (shape, strides, dtype, block, swizzle), so that of an address
    stays right whatever lay there meanwhile.
    """

    def __init__(self, make: Callable[[int], Sequence[object]], rest: tuple[int, ...]):
        super().__init__()
        self.make, self.rest = make, rest

    def __missing__(self, address: int) -> object:
        if len(self) >= _REMEMBERED:
            self.clear()
        found = self[address] = self.make(address)[0]
        return found


def describe(compiled: Any, number: int, t: Tensor) -> Descriptors | None:
    """The descriptors of tensors like `t`. number: the argument's among those that have a descriptor."""
    launcher = _launcher(compiled)
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) if launcher is not None else None
    make = getattr(sys.modules.get(type(launcher).__module__), "make_tensordesc_arg", None)
    if make is None or not metadata or not 0 <= number < len(metadata) or metadata[number] is None:
        return None
    rest = (None,) * (len(inspect.signature(make).parameters) - 2)  # Triton 3.9 hands on arguments of the launch, which it does not read
    t = upright(t)
    shape, strides, meta = tuple(t.shape), tuple(t.stride()), metadata[number]
    try:
        made = make(_Described(_Place(t.data_ptr()), shape, strides), meta, *rest)
    except (TypeError, AttributeError, KeyError):  # it wants to know something else
        return None
    if tuple(made[1:]) != (*shape, *strides):
        return None
    return Descriptors(lambda address: make(_Described(_Place(address), shape, strides), meta, *rest), (*shape, *strides))


# -- who else takes part in a launch


def observed(jits: Sequence[Any], text: CodeBuilder) -> str | None:
    """An expression that is true once a launch of these is not Triton's own business any more: somebody has hooked into it or changed how it
    compiles. None where that is so already, or cannot be known."""
    from triton import knobs

    runtime = knobs.runtime
    enter: Any = getattr(runtime, "launch_enter_hook", None)
    leave: Any = getattr(runtime, "launch_exit_hook", None)
    watched = [getattr(j, "pre_run_hooks", None) for j in jits]
    if any(not isinstance(calls, list) for calls in (*watched, getattr(enter, "calls", None), getattr(leave, "calls", None))):
        return None
    if runtime.debug or getattr(runtime, "add_stages_inspection_hook", None) is not None or enter.calls or leave.calls or any(watched):
        return None
    x, y, z = map(text.hold, (runtime, enter, leave))
    ways = [f"{y}.calls", f"{z}.calls", *map(text.hold, watched)]
    own = getattr(runtime, "__dict__", None)
    if own == {}:  # nothing has been set, and all has the class's values: one question in place of four
        return " or ".join([text.hold(own), *ways])
    ways += [f"{x}.launch_enter_hook is not {y}", f"{x}.launch_exit_hook is not {z}", f"{x}.debug"]
    ways += [f"{x}.add_stages_inspection_hook is not None"] * hasattr(runtime, "add_stages_inspection_hook")
    return " or ".join(ways)
