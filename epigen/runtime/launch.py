"""One launch of a prepared call: a jit function, its grid, and its arguments, of which the integers are fixed.

By name and through Triton the first time; from then on, where that is possible, straight to the driver, with arguments of which only the
addresses and numbers change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from epigen.codegen import schedules
from epigen.codegen.functions import PDL, Argument, Function
from epigen.codegen.spec import KernelConfig
from epigen.gpus import Target
from epigen.runtime import direct, loader, native
from epigen.runtime.code_builder import CodeBuilder
from epigen.runtime.workspace import capturing, tiles


def blocks(function: Function, config: KernelConfig, shape: tuple[int, int, int], multiprocessors: int, count: int = 1) -> int:
    """How many blocks the grid of one function has; 0 where there is nothing to do. shape: M, N, K of each of so many products."""
    m, n, _ = shape
    if function.finish is None:
        return schedules.programs(config, count * math.prod(tiles(config, shape)), multiprocessors)
    extent = {"m": m, "n": n, "": 1}[function.finish.indices]
    return count * -(-extent // dict(function.constants)["BLOCK_X"])


@dataclass(frozen=True, slots=True)
class Direct:
    """A launch without Triton. dependent: as of `Launch`."""

    kernel: native.Kernel
    dependent: Dependent


def in_one_step(launches: Sequence[Direct], values: Sequence[Any], slots: int, index: int | None, apart: Sequence[native.Apart] = ()) -> native.Step | None:
    """All launches of a call; None where the driver has nothing for the device.

    values: of the first slots, the tensors among which have to be aligned as they are here. slots: how many there are. index: the device's.
    apart: as of `native.step`.
    """
    kernels = [(x.kernel, x.dependent == Dependent.ALWAYS, x.dependent != Dependent.NEVER) for x in launches]
    return native.step(kernels, values, slots, index, apart)


def step_call(text: CodeBuilder, step: native.Step, launches: Sequence[Direct], stream: str, slots: Sequence[str]) -> str:
    """The expression that makes all launches of a step, and is whether they were made. stream, slots: expressions."""
    for launch in launches:
        text.hold(launch.kernel.loaded.owner)
    return f"{text.hold(step)}({', '.join([stream, _captured(text, launches, stream), *slots])})"


def _captured(text: CodeBuilder, launches: Sequence[Direct], stream: str) -> str:
    """An expression of whether the stream is captured into a CUDA graph, where that makes a difference to a launch. The default stream, which is 0,
    cannot be, and need not be asked."""
    return f"{stream} and {text.hold(capturing)}()" if any(x.dependent == Dependent.CAPTURED for x in launches) else "False"


class Dependent(Enum):
    """When a kernel is launched while the one before it still runs, for whose end it then waits by itself.

    CAPTURED: into a CUDA graph, where it takes 0.5 us off the 3 to 6 of a small kernel (H200). In a stream that Python fills, small kernels end
    before the next one is there; and after an event, as of a timer, a launch in this way takes 0.8 us longer.
    """

    NEVER = auto()
    CAPTURED = auto()
    ALWAYS = auto()


@dataclass(frozen=True, slots=True)
class Launch:
    """integers: the arguments that are fixed, by name. constants: the compile-time ones. options: those and Triton's own."""

    jit: Any
    function: Function
    grid: tuple[int]
    integers: Mapping[str, int]
    constants: Mapping[str, int]
    options: Mapping[str, Any]
    dependent: Dependent

    @classmethod
    def of(cls, jit: Any, function: Function, grid: int, integers: Mapping[str, int], target: Target | None, follows: bool) -> Launch:
        """target: None under the interpreter. follows: another kernel of the same call comes before."""
        constants = loader.compile_time(function, target)
        dependent = Dependent.NEVER if not constants[PDL] else Dependent.ALWAYS if follows else Dependent.CAPTURED
        options = constants | ({} if target is None else loader.options(function, target, follows))
        fixed = {a.name: integers[a.name] for a in function.arguments if a.name in integers}
        return cls(jit, function, (grid,), fixed, constants, options, dependent)

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Launch through Triton, which compiles at the first time. Returns the compiled kernel; None from the interpreter."""
        return self.jit[self.grid](*self.arguments(values), **self.options)

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """In the function's order. values: all that are no fixed integers, by name."""
        return [self.integers[a.name] if a.name in self.integers else self._argument(a, values) for a in self.function.arguments]

    def _argument(self, argument: Argument, values: Mapping[str, Any]) -> Any:
        value = values[source(argument)]
        return value if argument.block is None else direct.describe_by_triton(self.function.dialect, value, argument.block, argument.ragged)

    def direct(self, compiled: Any, slots: Mapping[str, int], tensors: Sequence[Any]) -> Direct | None:
        """The same launch again, with other addresses of the same alignment and with other numbers; None where it has to go through Triton.

        compiled: what this launch has returned. slots: where in the values of the whole call each argument's is. tensors: those of this call.
        """
        loaded = direct.loaded(self.jit, compiled, self.function.names)
        if loaded is None:
            return None
        parameters: list[tuple[int, int | native.TensorMap]] = []
        number = 0
        for argument in self.function.arguments:
            if argument.name in self.integers:
                parameters.append((-1, self.integers[argument.name]))
                continue
            place = slots[source(argument)]
            if argument.block is None:
                parameters.append((place, 0))
                continue
            tensor_map = native.tensor_map(compiled, number, tensors[place], argument.ragged)
            if tensor_map is None:
                return None
            number += 1
            parameters.append((place, tensor_map))
        kernel = native.kernel(loaded, self.grid[0], [*parameters, *((-1, int(value)) for value in self.constants.values())])
        return None if kernel is None else Direct(kernel, self.dependent)


def source(argument: Argument) -> str:
    """Under which name an argument's value goes: a tensor with a descriptor's is that of its pointer, or of its copy's."""
    return argument.name if argument.block is None else f"{argument.name.removesuffix('_desc')}{'_padded' * argument.padded}_ptr"
