"""Any name that the checker allows runs everywhere: as a number, a tensor of every kind, a value or an output, whatever Triton calls its own."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import keyword
import random
import string
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import LIBRARY, persistent, split_k, tiled, warp_specialized
from golden import Golden
from integer_types import first_texts

import epigen
from epigen import ops, settings
from epigen.codegen.render import Renderer
from epigen.codegen.spec import LAUNCHER, KernelConfig, parameter
from epigen.dtypes import FP16, FP32
from epigen.errors import CallError, CheckError, CompileError
from epigen.gpus import TARGETS
from epigen.ir.check import refused_name
from epigen.runtime import loader
from epigen.runtime.ahead import Job, Running

SM_90 = TARGETS["sm_90"]
OTHERS = (
    "grid",
    "warmup",
    "stream",
    "device",
    "kwargs",
    "args",
    "config",
    "kernel",
    "function",
    "values",
    "found",
    "alpha",
    "x",
    "w",
    "weight",
    "save",
    "of",
)
"""What calls in epigen and in Triton call their arguments."""


def allowed(names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if refused_name(name) is None and name[0] != "_" and "__" not in name and name.isascii()})


# -- what Triton's launcher calls its own


class _Bound(Exception):
    """A launch has bound its arguments, and would compile."""


@dataclass(frozen=True)
class _Launches:
    """Answers which of the launcher's names cannot be an input, and how many were tried. For a process in which Triton compiles."""

    def run(self) -> tuple[dict[str, str], int]:
        loader._import_triton(interpret=False)
        from triton.runtime import jit

        names = allowed([*_launchers_names(), *LAUNCHER, *OTHERS])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jit.JITFunction, "_do_compile", _stop)
            return {name: why for name in names if (why := _refused(name))}, len(names)


def _stop(*_: Any, **__: Any) -> None:
    raise _Bound


def _refused(name: str) -> str:
    try:
        kernel = epigen.compile(f"mm * {name}", config=tiled(16, 16, 16))
    except CheckError:  # it reads like a slip of the pen
        return ""
    a, b = (torch.empty((64, 64), device="meta", dtype=torch.float16) for _ in range(2))
    try:
        kernel.warm(a, b, SM_90, **{name: 2.0})
    except CompileError as error:
        return "" if isinstance(error.__cause__, _Bound) else f"{type(error).__name__}: {error}"
    return "nothing was launched"


def _launchers_names() -> set[str]:
    """Every word of what binds a kernel's arguments, and every option of every backend."""
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime import jit

    found = {field.name for options in (CUDAOptions, HIPOptions) for field in dataclasses.fields(options)}
    for function in (jit.create_function_from_signature, jit.JITFunction.run, jit.JITFunction._pack_args, jit.compute_cache_key):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            found |= {node.id} if isinstance(node, ast.Name) else {node.arg} if isinstance(node, ast.arg | ast.keyword) and node.arg else set()
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {word for word in node.value.replace("=", " ").replace("(", " ").replace(",", " ").replace(":", " ").split() if word.isidentifier()}
    return {name for name in found if not keyword.iskeyword(name)}


@pytest.mark.triton
def test_whatever_tritons_launcher_calls_its_own_can_be_an_input() -> None:
    refused, tried = Running(_Launches()).result()  # type: ignore[arg-type,misc]  # the child asks a job for run() only
    assert refused == {} and tried > 60  # type: ignore[comparison-overlap]


def test_what_warm_calls_the_gpu_may_be_an_input() -> None:
    kernel = epigen.compile("sum(where(n == target[m], mm, 0), n)")
    x, w, target = torch.randn(4, 8), torch.randn(5, 8), torch.tensor([0, 4, 2, -100])
    expected = (x @ w.T).gather(1, target.clamp(0)[:, None])[:, 0] * (target >= 0)
    torch.testing.assert_close(kernel(x, w.T, target=target), expected)
    torch.testing.assert_close(epigen.linear(x, w, epilogue=lambda mm, target: mm - target, target=2.0), x @ w.T - 2)
    with pytest.raises(CallError, match="target is missing"):
        kernel.warm(x, w.T, target=target)


def test_a_number_is_called_otherwise_only_where_it_has_to_be() -> None:
    renderer = Renderer(settings.templates_dir())
    kernel = epigen.compile("mm * debug + bias * scale0 + options[n] + backend", config=tiled())
    signature = dataclasses.replace(kernel.signature_of(FP16), inputs=(("debug", None), ("bias", FP16), ("scale0", None), ("options", FP16), ("backend", FP32)))
    rendered = renderer.render(kernel.plan(target=SM_90, signature=signature).spec, tiled())
    assert {"debug_value", "bias_ptr", "scale0", "options_ptr", "stride_options_n", "backend_ptr"} <= set(rendered.functions[0].names)
    assert "acc * debug_value" in rendered.text and "bias * scale0" in rendered.text
    assert [parameter(name) for name in ("alpha", "scale", "debug")] == ["alpha", "scale", "debug_value"]
    assert all(refused_name(parameter(name)) is not None for name in LAUNCHER)  # so that no other input has it


@pytest.mark.triton
@pytest.mark.parametrize("name", sorted(LAUNCHER | set(OTHERS)))
def test_a_number_of_any_name_under_the_interpreter(name: str) -> None:
    a, b = torch.randn(4, 8).half(), torch.randn(8, 5).half()
    kernel = epigen.compile(f"y = mm * {name}; y, sum(y, n) + {name}", config=tiled(16, 16, 16), backend="interpreter")
    y, rows = kernel(a, b, **{name: 2.0})
    want = a.double() @ b.double() * 2
    assert torch.allclose(y.double(), want, atol=0.05) and torch.allclose(rows.double(), want.sum(1) + 2, atol=1e-3)


# -- random names

ROLES: tuple[Callable[[str], str], ...] = (
    "mm * {}".format, "mm + {}[n]".format, "mm + {}[m]".format, "mm * {}[m,n]".format, "where(bits({}), mm, 0)".format,
)  # fmt: skip


def random_name(source: random.Random) -> str:
    """Short ones, for they meet what others call theirs."""
    return source.choice(string.ascii_letters) + "".join(source.choice(string.ascii_letters + string.digits + "_") for _ in range(source.randrange(12)))


def random_program(source: random.Random, names: list[str]) -> str:
    """Every name in a role of its own."""
    values, lines = ["mm"], []
    for name in names:
        text = source.choice(ROLES)(name) if source.random() < 0.7 else ""
        if text:
            values.append(f"({text})")
        else:
            lines.append(f"{name} = {' + '.join(values)}")
            values = [name]
    return "; ".join([*lines, f"({' + '.join(values)}), sum({values[-1]} + mm, m), bitmask({values[-1]} + mm > 0)"])


def programs(count: int, each: int = 9) -> list[str]:
    """Of random names and of those that others call theirs, of which each is in some program. Names that differ by the order of their letters are apart."""
    source = random.Random(0)
    theirs = allowed([*dir(builtins), *keyword.softkwlist, *LAUNCHER, *OTHERS, *_own_locals()])
    source.shuffle(theirs)
    found = []
    for _ in range(count):
        names: list[str] = []
        while len(names) < each:
            name = theirs.pop() if theirs and len(names) % 3 else random_name(source)
            if refused_name(name) is None and "__" not in name and all(sorted(name.lower()) != sorted(other.lower()) for other in names):
                names.append(name)
        text = random_program(source, names)
        try:
            epigen.compile(text)
        except CheckError as error:
            if "did you mean" not in str(error):
                raise
            continue  # a bare name that reads like a slip of the pen
        found.append(text)
    assert len(found) > count * 2 // 3
    return found


def _own_locals() -> set[str]:
    """What the kernels of each schedule call theirs."""
    return {
        node.id
        for config in CONFIGS
        for node in ast.walk(ast.parse(epigen.compile("gelu(mm + bias), bgrad(mm)", config=config).source(target=SM_90)))
        if isinstance(node, ast.Name)
    }


CONFIGS: tuple[KernelConfig, ...] = (
    tiled(16, 32, 32), tiled(32, 32, 32, prefetch=1, fused_finalize=1), split_k(16, 32, 32), LIBRARY, persistent(flatten=0), warp_specialized(pingpong=1),
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.slow
def test_programs_of_any_names_compile() -> None:
    jobs = []
    for number, text in enumerate(programs(4 * len(CONFIGS))):
        plan = epigen.compile(text, config=CONFIGS[number % len(CONFIGS)]).plan((256, 256, 256), FP16, SM_90)
        jobs.append(Job(plan.rendered, SM_90))
    for job, texts in zip(jobs, first_texts(jobs), strict=True):
        assert len(texts) == len(job.rendered.functions) and all("tt.func" in text for text in texts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(LAUNCHER | set(OTHERS)))
def test_a_number_of_any_name_on_a_gpu(name: str) -> None:
    a, b = (torch.randn(64, 64, device="cuda").half() for _ in range(2))
    kernel = epigen.compile(f"mm * {name}", config=tiled(16, 32, 32))
    for value in (2.0, 3.0, 4.0, 4):  # the later ones without Triton's launcher
        assert torch.allclose(kernel(a, b, **{name: value}).double(), a.double() @ b.double() * value, rtol=2e-3, atol=0.1)


# -- names of operations


@pytest.mark.triton
def test_an_input_with_indices_may_have_an_operations_name() -> None:
    """One that generated code has no function of, whether the program has the operation too or not."""
    names = [name for name in ops.FUNCTIONS if refused_name(name, indexed=True) is None]
    assert {"scale", "relu", "where", "square"} <= {*names} and not {"gelu", "sum", "dot", "cast", "maximum", "int4"} & {*names}
    torch.manual_seed(0)
    a, b, inputs = torch.randn(20, 32).half(), torch.randn(32, 24).half(), {name: torch.rand(24).half() + 0.5 for name in names}
    text = "where(mm > 0, relu(mm) + square(mm), scale(mm, 0.5) - clamp(mm, -1, 1)) * (" + " + ".join(f"{name}[n]" for name in sorted(names)) + ")"
    found = epigen.compile(text, config=tiled(32, 32, 32), backend="interpreter")(a, b, **inputs)
    torch.testing.assert_close(found, epigen.compile(text)(a, b, **inputs), rtol=2e-3, atol=2e-2)
    weight = torch.randint(-9, 9, (32, 24), dtype=torch.int8)
    quantised = epigen.compile("dot(a, b * scale[k/16,n])", config=tiled(32, 32, 32), backend="interpreter")(a, weight, scale=torch.rand(2, 24))
    assert quantised.shape == (20, 24)


@pytest.mark.parametrize("text", ["mm * scale", "scale = mm; scale", "mm * gelu[n]", "mm * scale[n] + scale"])
def test_without_indices_an_operation_is_none(text: str, golden: Golden) -> None:
    with golden.raises(CheckError, text):
        epigen.compile(text)
