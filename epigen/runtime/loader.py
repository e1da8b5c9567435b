"""Source text -> jit functions, and ahead-of-time compilation.

A module is compiled from the text in hand; the file under the cache folder is there for whoever reads a traceback or a profile, and there is
none where no folder can be written. No module is ever loaded from a file that was found.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epigen import settings
from epigen.codegen.functions import PDL, PTX, Argument, Function
from epigen.codegen.render import Rendered
from epigen.codegen.spec import KNOWN
from epigen.errors import CompileError, EpigenError
from epigen.files import reason
from epigen.gpus import Target
from epigen.lru_cache import LruCache
from epigen.runtime import direct, triton_key
from epigen.runtime.user_cache import UserCache, can_be_written
from epigen.uncollected import uncollected

BINARY = {"cuda": "cubin", "hip": "hsaco"}
ASSEMBLY = {"cuda": "ptx", "hip": "amdgcn"}
COMPILED_STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin", "amdgcn", "hsaco")


def _import_triton(interpret: bool) -> Any:
    """Triton in one of its two modes; the first import of a process decides which."""
    if "triton" not in sys.modules:
        settings.set_interpreter(interpret)
    import triton

    if bool(triton.knobs.runtime.interpret) != interpret:
        need, have = ("1", "without it") if interpret else ("0", "with it")
        raise EpigenError(
            f"Triton was imported {have}: set TRITON_INTERPRET={need} before Triton is first imported "
            f"to {'interpret' if interpret else 'compile'} kernels in this process"
        )
    if not interpret:
        _place_cache(triton)
    return triton


def _place_cache(triton: Any) -> None:
    """Where Triton could not write its cache, as in a home that is missing or read-only, it gets a folder beside epigen's own."""
    if settings.triton_cache_chosen():
        return
    own = Path(triton.knobs.cache.dir)
    if not (own.is_absolute() and can_be_written(own)) and (folder := UserCache(settings.cache_dir()).folder("triton")) is not None:
        settings.set_triton_cache(folder)


@functools.cache
def triton_version() -> str:
    from importlib.metadata import version

    return version("triton")


_MODULES = 64
"""Of one kernel, as many as it keeps texts of. One that is forgotten lives on in the calls that are prepared with it, of which a kernel keeps 1024."""


class Loader:
    """Loads rendered modules in one of Triton's modes; keeps the last ones under their digests."""

    def __init__(self, interpret: bool, cache: Path | None = None):
        self.interpret = interpret
        self.store = UserCache(cache or settings.cache_dir())
        self.modules: LruCache[str, types.ModuleType] = LruCache(_MODULES)

    def load(self, rendered: Rendered) -> types.ModuleType:
        return self.modules.get(rendered.digest) or self.modules.put(rendered.digest, self._load(rendered))

    def _load(self, rendered: Rendered) -> types.ModuleType:
        with uncollected():
            triton = _import_triton(self.interpret)
        if not self.interpret:
            triton_key.remember(triton, self.store)
        name = f"{rendered.functions[0].name}_{rendered.digest}"
        path = self.store.write(f"{name}.py", rendered.text) or f"<{name}>"
        # Triton reads the source through linecache: an entry without a time stamp is never read from the file again
        linecache.cache[str(path)] = (len(rendered.text), None, rendered.text.splitlines(keepends=True), str(path))
        module = types.ModuleType(name)
        weakref.finalize(module, linecache.cache.pop, str(path), None)  # else an endless stream of programs would fill it
        module.__file__ = str(path)
        exec(compile(rendered.text, str(path), "exec"), module.__dict__)
        return module


_INTERPRETER = threading.Lock()
"""Held around every interpreted launch of this process. Triton's interpreter keeps the place of the program that runs, and its patches of the
language, in globals: of two launches at a time each would take the other's place. Nothing is compiled meanwhile, for a process has Triton in one mode."""


@contextlib.contextmanager
def interpreting(in_order: bool = False) -> Iterator[None]:
    """Around an interpreted launch: one at a time, and numpy is quiet, as infinities and NaN are part of the arithmetic, as on a GPU.

    Triton 3.6's interpreter also uses a conversion that numpy has deprecated. in_order: tiles are multiplied one k after the other, for what numpy's own product
    gives a row depends on where in a tile it lies.
    """
    import numpy

    with _INTERPRETER, _multiplying_in_order() if in_order else contextlib.nullcontext(), numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="triton")
        yield


@contextlib.contextmanager
def _multiplying_in_order() -> Iterator[None]:
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    multiply = interpreter_builder.create_dot

    def one_by_one(a: Any, b: Any, acc: Any, *options: Any) -> Any:
        for k in range(a.data.shape[-1]):
            acc = multiply(TensorHandle(a.data[..., k : k + 1], a.dtype), TensorHandle(b.data[..., k : k + 1, :], b.dtype), acc, *options)
        return acc

    interpreter_builder.create_dot = one_by_one
    try:
        yield
    finally:
        del interpreter_builder.create_dot  # of the object: its class has the interpreter's


def refusal(error: Exception) -> EpigenError | None:
    """What Triton says of a kernel that does not compile or does not fit the GPU, in epigen's words; None for any other error."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, OutOfResources):
        return CompileError(f"the config does not fit this GPU: {_last_words(error)}")
    if isinstance(error, (CompilationError, PTXASError)) or "PassManager" in str(error):
        return CompileError(f"the kernel does not compile: {_last_words(error)}")
    return None


def unwritten(error: OSError) -> EpigenError:
    """What to say where Triton cannot keep what it compiles, as on a disk that is full: nothing runs from memory alone."""
    place = f" ({error.filename})" if error.filename else ""
    return EpigenError(f"Triton cannot write its cache: {reason(error)}{place}: set TRITON_CACHE_DIR to a folder that can be written")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes. registers: a thread (AMD: vector registers). spills: bytes a thread (AMD: registers)."""

    registers: int
    spills: int
    shared_bytes: int
    blocks_per_sm: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One function compiled for a target: each stage's text or bytes, and its resources."""

    stages: Mapping[str, str | bytes]
    resources: Resources


@dataclass(frozen=True, slots=True)
class _Element:
    """An element type as Triton asks a tensor for it. name: in Triton's signatures."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def itemsize(self) -> int:
        from triton._utils import get_primitive_bitwidth

        return int(get_primitive_bitwidth(self.name)) // 8


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Stands for a tensor that is aligned, and reaches over less than 2 GB, which AMD's compiler asks. Of torch there is nothing in it."""

    dtype: _Element

    def data_ptr(self) -> int:
        return 0

    def ptr_range(self) -> int:
        return 0


def _stand_in(function: Function, argument: Argument, values: Mapping[str, int]) -> Any:
    """An argument as a launch would have it, as far as that can be known: values are what integers are given; else they have what the signature says of them.

    An integer is 48, which has no more factors than it must, or 3: what is 1 would be a constant of the kernel.
    """
    kind = argument.type
    if argument.block is not None:
        element = kind.removeprefix("tensordesc<").partition("[")[0]
        shape, strides = (1 << 12,) * len(argument.block), [1 << 12 * i for i in reversed(range(len(argument.block)))]
        return direct.descriptor(function.dialect, _Tensor(_Element(element)), shape, strides, argument.block)
    if kind.startswith("*"):
        return _Tensor(_Element(kind[1:]))
    if not kind.startswith("i"):
        return 0.5
    # tile counts are small numbers of any value
    known = argument.factor >= KNOWN and not argument.name.startswith("tiles")
    return values.get(argument.name, (1 << 40 if kind == "i64" else 0) + (3 * KNOWN if known else 3))


def compile_ahead(rendered: Rendered, function: Function, target: Target, values: Mapping[str, int] | None = None, follows: bool = False) -> Compiled:
    """Compile one function with no GPU at hand, as a launch would have it.

    Assumed of the arguments, as Triton would find for contiguous tensors: pointers aligned to 16 bytes, extents and strides divisible
    by 16 but for those of which the signature says otherwise. values: of integer arguments, such as a stride of 1. follows: as of `options`.
    Raises CompileError where Triton refuses the kernel.
    """
    jit = getattr(Loader(interpret=False).load(rendered), function.name)
    arguments = [_stand_in(function, a, values or {}) for a in function.arguments]
    return _compile(jit, function, arguments, compile_time(function, target) | options(function, target, follows), target)[1]


def compile_time(function: Function, target: Target | None) -> dict[str, int]:
    """A function's compile-time arguments. target: None under the interpreter, where one kernel runs after another."""
    own = {PTX: target is not None and target.takes_ptx} if function.ptx else {}
    return dict(function.constants) | own | {PDL: target is not None and target.has_dependent_launch}


def options(function: Function, target: Target, follows: bool) -> dict[str, Any]:
    """What Triton's compiler is told of a function, beside its arguments. follows: another kernel of the same call comes before, for whose end it waits by itself."""
    # the last: else every integer operation gets a check for overflow, which only debug mode keeps; a tenth of the time to compile
    compile_options = {"num_warps": function.num_warps, "num_stages": function.num_stages, "sanitize_overflow": False}
    compile_options["enable_fp_fusion"] = function.contracted
    return compile_options | ({"launch_pdl": True} if follows and target.has_dependent_launch else {})


class _Absent:
    """Stands in for a GPU's driver, so that what Triton compiles for a launch can be compiled where there is no such GPU."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


def warm(jit: Any, function: Function, arguments: Sequence[Any], options: Mapping[str, Any], target: Target) -> Resources:
    """Compile one launch into Triton's cache without launching it, for the GPU at hand, or for one that this process does not use.

    arguments: as for the launch; a tensor on torch's meta device stands for one aligned to 16 bytes. A launch with the same integers
    and dtypes finds the result in the cache. Raises CompileError where Triton refuses the kernel.
    """
    kernel, compiled = _compile(jit, function, arguments, options, target)
    if target.backend == "cuda":
        _make_launcher(kernel)
    return compiled.resources


def _compile(jit: Any, function: Function, arguments: Sequence[Any], options: Mapping[str, Any], target: Target) -> tuple[Any, Compiled]:
    """Triton's kernel, and what is in it. options: compile-time arguments too."""
    triton = _import_triton(interpret=False)
    from triton.backends.compiler import GPUTarget

    wanted = GPUTarget(target.backend, target.arch, target.warp_size)
    if not _is_at_hand(triton, wanted):  # else other threads launch by the driver that is there
        triton.runtime.driver.set_active(_Absent(wanted))
    try:
        kernel = jit.warmup(*arguments, grid=(1,), **options)
    except OSError as error:
        raise unwritten(error) from error
    except Exception as error:  # Triton's front end, MLIR and ptxas each raise their own kind
        raise CompileError(f"{function.name} does not compile for {target.name}: {_last_words(error)}") from error
    return kernel, _compiled(kernel, function, target)


def prepare() -> None:
    """What a process compiles with, once, before several of its threads do: Triton's driver, which it makes at the first question, and our launcher."""
    import torch

    triton = _import_triton(interpret=False)
    if torch.cuda.is_available():
        triton.runtime.driver.active.get_current_target()
    native()


def _is_at_hand(triton: Any, target: Any) -> bool:
    if "torch" not in sys.modules:  # nothing of this process launches, then
        return False
    import torch

    return torch.cuda.is_available() and triton.runtime.driver.active.get_current_target() == target


def _make_launcher(kernel: Any) -> None:
    """What a C compiler would make at the first launch, into Triton's cache, too, so that the process that measures need not wait: our own launcher,
    and that of Triton 3.6 for each new list of argument types. Newer ones have one launcher for all."""
    native()
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with contextlib.suppress(Exception):  # without a C compiler or a driver's library: the launch will say so
            driver.CudaLauncher(kernel.src, kernel.metadata)


@functools.cache
def native() -> Any:
    """native.c as a module, from Triton's cache or by its C compiler; None where it cannot be compiled, which is not tried twice."""
    try:
        from triton.backends.nvidia.driver import include_dirs
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_name("native.c").read_text(encoding="utf-8")
        return compile_module_from_src(source, "epigen_native", include_dirs=include_dirs)
    except (ImportError, OSError, RuntimeError, TypeError, subprocess.CalledProcessError):
        return None


def _compiled(kernel: Any, function: Function, target: Target) -> Compiled:
    """What Triton compiled. Raises CompileError for more shared memory than the target has, which Triton itself checks at a launch only."""
    if kernel.metadata.shared > target.shared_bytes:
        raise CompileError(f"{function.name} needs {kernel.metadata.shared} bytes of shared memory, and {target.name} has {target.shared_bytes}")
    stages = {name: kernel.asm[name] for name in COMPILED_STAGES if name in kernel.asm}
    return Compiled(stages, _resources(kernel, stages, function, target))


def _last_words(error: BaseException) -> str:
    """The telling line of a compiler's message, which can hold kilobytes of MLIR. What a function called by the kernel was refused for is
    a cause of the kernel's own refusal, which says nothing but where."""
    while isinstance(error.__cause__, type(error)):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines[-1:]
    return (telling[0] if telling else type(error).__name__)[:300]


def _resources(kernel: Any, stages: Mapping[str, str | bytes], function: Function, target: Target) -> Resources:
    shared = int(kernel.metadata.shared)
    if target.backend == "cuda":
        usage = _cubin_usage(stages["cubin"])
        registers, spills = usage["REG"], usage["STACK"]
    else:
        text = stages["amdgcn"]
        assert isinstance(text, str)
        registers = _last_number(r"\.vgpr_count:\s+(\d+)", text)
        spills = _last_number(r"\.vgpr_spill_count:\s+(\d+)", text)
    threads = function.num_warps * target.warp_size
    return Resources(registers, spills, shared, target.blocks_per_sm(threads, registers, shared))


def _last_number(pattern: str, text: str) -> int:
    matches = re.findall(pattern, text)
    return int(matches[-1]) if matches else 0


def _cubin_usage(cubin: str | bytes) -> dict[str, int]:
    """REG and STACK of the only function of a cubin, read with the cuobjdump that Triton bundles."""
    import triton

    assert isinstance(cubin, bytes)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{tool} cannot be run, by which registers are counted: {error}; install Triton again") from error
    return {name: _last_number(rf"\b{name}:(\d+)", report) for name in ("REG", "STACK")}
