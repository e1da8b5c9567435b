"""The stand-alone file: it runs and checks itself where epigen is not installed, catches a wrong kernel, and has a launcher to import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import persistent, split_k, warp_specialized
from click.testing import CliRunner
from standalone_files import LIBRARY, SMALL, File, anew, python

from epigen import api, cli, settings
from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.codegen.standalone import standalone
from epigen.dtypes import BF16, FP8E4M3, FP8E5M2, FP16, FP32, INT8, UINT8
from epigen.gpus import TARGETS

EARLY = schedules.config("tiled", block_m=32, block_n=32, block_k=32, group_m=1, num_warps=4, num_stages=2, prefetch=1, fused_finalize=1)


FILES = (
    File("relu(mm + bias)", ("acc + bias", "acc - bias")),
    File("relu(mm + bias)", ("acc + bias", "acc"), k=4096),
    File("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)", ("z > 0.0", "z >= 0.0")),
    File("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)", ("tl.where(offs_m < M, z, 0.0)", "z"), config=LIBRARY),
    File("dz = drelu(mm, mask); dz, bgrad(dz)", ("tl.where(mask, acc, 0.0)", "tl.where(mask, 0.0, acc)")),
    File("mm, sum(a, k), max(b, k), amax(mm), logsumexp(mm, n), max(mm, m)", ("stride_ak + offs_x", "stride_ak + 0 * offs_x")),
    File("cast(mm * alpha, fp32), cast(mm, int8)", ("acc * alpha", "acc * (alpha + 0.01)")),
    File("h = cast(mm * 0.3, fp16); cast(h * scale_a[m] + gate[m,n], fp32)", ("offs_m * stride_scale_a_m", "offs_m * 0")),
    File("mm", ("tl.store(out_ptr + offs_m", "tl.store(out_ptr + 0 * offs_m"), INT8),
    File("gelu(mm * 0.01 + bias), sum(mm)", ("-1.1511122", "-1.0"), INT8, LIBRARY),
    File("silu(mm) + residual", ("t0 + residual", "t0"), FP32, LIBRARY),
    File("softplus(mm), tanh(mm)", ("-0.33333333333333333", "-0.3"), FP32),
    File("relu(mm + bias)", ("acc + bias", "acc - bias"), config=persistent(), k=4096),
    File("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n)", ("z > 0.0", "z >= 0.0"), config=persistent(block_n=128, subtiles=2), k=4096),
    File("relu(mm + bias)", ("acc + bias", "acc - bias"), config=persistent(), k=1),
    File("z = mm + bias; relu(z), bgrad(z)", ("acc + bias", "acc - bias"), config=split_k(), k=4096),
    File("mm", ("torch.mm(a, b, out=out)", "torch.mm(a, b, out=out).mul_(2)"), FP32, LIBRARY),
    File("z = mm; z", ("torch.mm(a, b, out=z)", "torch.mm(a, b, out=z).mul_(2)"), BF16, LIBRARY),
    File("relu(mm + bias), bgrad(mm)", ("acc + bias", "acc - bias"), config=EARLY, k=4096),
    File("z = mm + bias; z, bgrad(z)", ("acc + bias", "acc - bias"), config=split_k(fused_finalize=1), k=4096),
    File("cast(mm, fp16)", ("acc.to(tl.float16)", "(2 * acc).to(tl.float16)"), FP8E5M2),
    File("relu(dot(relu(a) * norm[k], b) + bias)", ("t0 * norm", "t0 + norm")),
    File("dot(a * row[m], exp(b) * w[k,n] * norm[k]), sum(a, k)", ("offs_bk * stride_w_k", "0 * stride_w_k"), config=split_k()),
    File("r = rsqrt(mean(a * a, k) + 1); dot(a * norm[k], b) * r, r, sum(exp(a), k) / extent(k)", ("acc * r", "acc / r")),
    File("mm * s[n] + bias", ("acc * s", "acc + s"), b=INT8),
    File("relu(dot(a, (b - zero[n]) * s[k,n]))", ("t0 = b - zero", "t0 = b"), b=UINT8, config=split_k()),
    File("silu(mm * s[n]) * dot(a, up[k,n])", ("tl.dot(a, up.to", "tl.dot(a, b.to"), b=FP8E5M2),
    File("dot(a, (b - zero[k/32,n]) * s[k/128,n/7])", ("offs_n // 7", "offs_n // 8"), b=INT8),
    File("mm * s[m/3,n/5] + bias[n/2]", ("offs_m // 3", "offs_m // 4")),
    File("dot(a, (uint4(b) - zero[k/32,n]) * s[k/128,n])", ("x >> 4", "x & 15"), b=UINT8),
    File("dot(a, int4(b, n)) + bias", ("15) ^ 8", "15) ^ 9"), b=UINT8),
    # names that the file itself uses
    File("mm * v1[m] + v0[n] - v2", ("", "")),
    File("where(bits(unpack), mm, reference[m,n]) * integers", ("", "")),
    File("mm * pdl + why[n]", ("", "")),
    File("mm * TensorDescriptor[n] + described", ("", ""), config=persistent(), k=4096),
    File("sys = mm * float16_; known = sys * dtype + shape[m]; sys, known", ("", "")),
    File("os = mm * device + inputs[n]; os, sum(os)", ("", ""), config=LIBRARY),
)  # fmt: skip
GPU_ONLY = (
    File("relu(mm + bias)", ("acc + bias", "acc - bias"), BF16),
    File("cast(mm, fp8e4m3)", ("", "")),
    File("mm", ("", ""), FP8E4M3),
    File("relu(mm + bias)", ("acc + bias", "acc - bias"), config=warp_specialized(subtiles=2), k=4096),
    File("z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n)", ("z > 0.0", "z >= 0.0"), config=warp_specialized(pingpong=1), k=4096),
    File("relu(mm + bias)", ("acc + bias", "acc - bias"), config=warp_specialized(subtiles=2, splits=3), k=4096),
    File("z = mm + bias; z, bgrad(z)", ("acc + bias", "acc - bias"), config=warp_specialized(pingpong=1, splits=2, fused_finalize=1), k=4096),
    File("dz = dgelu(mm, z[m,n]); dz, bgrad(dz)", ("dgelu(acc, z)", "dgelu(acc, -z)"), config=warp_specialized(pingpong=1, tma_load=1), k=4096),
)


def test_epigen_cannot_be_imported_there(away: Path) -> None:
    for way in (anew, python):
        done = way(away, "-c", "import epigen")
        assert done.returncode and "ImportError: not here" in done.stderr


def agrees(file: File, said: str) -> bool:
    """Whether a self-check told of each output in its order, and ended well."""
    *outputs, last = said.splitlines() or [""]
    names = [o.name for o in api.graph_of(file.text).outputs]
    return last.endswith("on cpu: the kernel agrees with torch") and [line.split(":")[0] for line in outputs] == names


@pytest.mark.triton
@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=[pytest.mark.slow] if i else []) for i, f in enumerate((FILES[2], FILES[3], FILES[13], FILES[15]))], ids=str
)
def test_it_runs_and_agrees(away: Path, file: File) -> None:
    """By itself, one of each schedule; what is run so and not imported is the same for every file."""
    (away / "fused.py").write_text(file.source)
    done = anew(away, "fused.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert agrees(file, done.stdout)


# imports every file that is named, and tells what its self-check says, or how it fails
CHECK = """
import contextlib, importlib, io, json, sys, warnings
ends = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.self_check()
    except BaseException as error:
        ends[name] = f"{type(error).__name__}: {error}"
    else:
        ends[name] = said.getvalue()
print(json.dumps(ends))
"""


def self_checks(away: Path, sources: dict[str, str]) -> dict[str, str]:
    """Several files checked in one process, since a start takes seconds."""
    for name, source in sources.items():
        (away / f"{name}.py").write_text(source)
    (away / "check.py").write_text(CHECK)
    done = python(away, "check.py", *sources)
    assert done.returncode == 0, done.stderr
    ends: dict[str, str] = json.loads(done.stdout)
    return ends


@pytest.mark.triton
def test_every_self_check_agrees(away: Path) -> None:
    ends = self_checks(away, {f"file{i}": f.source for i, f in enumerate(FILES)})
    assert {str(file): end for file, end in zip(FILES, ends.values(), strict=True) if not agrees(file, end)} == {}


@pytest.mark.triton
def test_every_self_check_catches_a_wrong_kernel(away: Path) -> None:
    damaged = [f for f in FILES if f.damage[0]]
    ends = self_checks(away, {f"file{i}": f.damaged for i, f in enumerate(damaged)})
    assert {str(damaged[i]): end for i, end in enumerate(ends.values()) if not end.startswith("SystemExit: ") or not end.endswith(" is wrong")} == {}


@pytest.mark.triton
def test_a_wrong_kernel_ends_with_a_failure(away: Path) -> None:
    (away / "fused.py").write_text(FILES[0].damaged)
    done = python(away, "fused.py")
    assert done.returncode == 1 and done.stderr == "out is wrong\n"
    assert "agrees" not in done.stdout


@pytest.mark.triton
def test_what_the_interpreter_cannot_run_asks_for_its_gpu(away: Path) -> None:
    """In the file's heading as well."""
    ends = self_checks(away, {f"file{i}": f.source for i, f in enumerate(GPU_ONLY)})
    for file, end in zip(GPU_ONLY, ends.values(), strict=True):
        gluon = file.config.schedule == "warp_specialized"
        needed = "an NVIDIA GPU of compute capability 9.0 (Hopper)" if gluon else "a GPU"
        assert end.startswith(f"SystemExit: this kernel needs {needed}: ") and ("Gluon" in end) == gluon
        assert f"# Run this file for a self-check against torch: on {needed}.\n" in file.source


LAUNCH = """
import warnings

import torch
import fused, even

# Triton 3.6's interpreter uses a conversion that numpy has deprecated
warnings.filterwarnings("ignore", category=DeprecationWarning, module="triton")

a, b = torch.randint(-2, 3, (50, 33)).half(), torch.randint(-2, 3, (33, 70)).half()
bias, residual = torch.randint(-2, 3, (70,)).half(), torch.randint(-2, 3, (50, 70)).half()
def same(x, y):
    assert torch.equal(x, y), (x, y)

y, mask, total = fused.z_mm_bias_relu_bitmask_bgrad(a, b, bias=bias)
z = a.float() @ b.float() + bias
same(y, z.relu().half())
same(fused._unpack(mask, 70), z > 0)
same(total, z.sum(0))
assert mask.stride() == (16, 1)
# any strides
y, mask, total = fused.z_mm_bias_relu_bitmask_bgrad(a.T.contiguous().T, b.T.contiguous().T, bias=bias)
same(y, z.relu().half())
for module, launcher, x, w in ((fused, "z_mm_bias_relu_bitmask_bgrad", a, b[:-1]), (even, "relu_mm_bias", a, b)):
    try:
        getattr(module, launcher)(x, w, bias=bias)
    except ValueError as error:
        print(error)
same(even.relu_mm_bias(a[:, :32], b[:32], bias=bias), (a[:, :32].float() @ b[:32].float() + bias).relu().half())
try:
    fused.z_mm_bias_relu_bitmask_bgrad(a, b, bias)
except TypeError:
    print("by name")
"""


@pytest.mark.triton
def test_the_launcher_can_be_imported_and_called(away: Path) -> None:
    """Importing runs nothing; K that does not fit is refused before anything is launched."""
    (away / "fused.py").write_text(FILES[2].source)
    (away / "even.py").write_text(FILES[1].source)
    (away / "launch.py").write_text(LAUNCH)
    done = python(away, "launch.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "b is torch.float16 [32, 70] on cpu, and torch.float16 [K, N] = [33, 70] on cpu was expected",
        "this kernel was made for K divisible by 32, and K is 33",
        "by name",
    ]


@pytest.mark.parametrize("file", [*FILES, *GPU_ONLY], ids=str)
def test_what_a_file_is_made_of(file: File) -> None:
    source = file.source
    tree = ast.parse(source)
    imported = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {
        "sys",
        "warnings",
        "torch",
        *({"triton"} if "@triton.jit" in source or "@gluon.jit" in source else ()),
        *({"os"} if "TRITON_INTERPRET" in source else ()),
        *({"typing"} if "int4(" in file.text else ()),  # of the function that reads two values of a byte
    }
    assert source.startswith(f"# {file.text.split('; ')[0]}\n") and source.endswith("\n")
    assert not any(line != line.rstrip() for line in source.splitlines())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) == len(set(functions)) and {"reference", "self_check"} < set(functions)
    assert f"# schedule {file.config}" in source


UNALIGNED = """
import sys, warnings
import torch
import fused
warnings.simplefilter("ignore")
fused.self_check()
for (m, n, k), said in (((64, 24, 8), ""), ((60, 24, 8), "M divisible by 8"), ((64, 20, 8), "N divisible by 8"), ((64, 24, 12), "K divisible by 8")):
    a, b, bias = torch.randn(m, k).half(), torch.randn(n, k).half().T, torch.randn(n).half()
    try:
        found = fused.relu_mm_bias(a.T.contiguous().T, b, bias=bias)
        assert torch.allclose(found.float(), (a.float() @ b.float() + bias).relu(), atol=1e-2) and not said, said
    except ValueError as error:
        assert said and said in str(error), error
"""


@pytest.mark.triton
@pytest.mark.parametrize("config", [SMALL, LIBRARY], ids=lambda c: c.schedule)
def test_a_file_for_unaligned_rows_says_what_it_was_made_for(away: Path, config: KernelConfig) -> None:
    """a transposed, b transposed: 8 divides every row, and 16 none."""
    kernel = api.compile("relu(mm + bias)", config=config)
    plan = kernel.plan((1000, 1000, 1000), dtype=FP16, target=TARGETS["sm_90"], layout="tt")
    (away / "fused.py").write_text(standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered))
    # the library's kernel sees the product alone, and K never
    done = python(away, "-c", UNALIGNED if config is SMALL else UNALIGNED.replace('"K divisible by 8"', '""'))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("file", [FILES[0], FILES[3]], ids=str)
def test_equal_inputs_give_equal_bytes(file: File) -> None:
    assert file.source == file.source


def arguments(file: File) -> list[str]:
    config = ",".join([f"schedule={file.config.schedule}", *(f"{n}={v}" for n, v in file.config.values)])
    return ["compile", file.text, "--dtype", file.dtype.name, "--config", config, "--target", "sm_90"]


def test_the_command_line_writes_the_same_file_in_every_process(tmp_path: Path) -> None:
    """Also where Python's hashes, and so its sets' order, are others."""
    file = FILES[5]
    environment = settings.child_environment(interpret=False)
    written = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.py"
        subprocess.run(
            [sys.executable, "-m", "epigen", *arguments(file), "--no-verify", "-o", str(path)],
            cwd=tmp_path, env=environment | {"PYTHONHASHSEED": seed}, capture_output=True, check=True,
        )  # fmt: skip
        written.append(path.read_text())
    assert written == [file.source] * 2


@pytest.mark.triton
def test_the_command_line_writes_the_file_once_it_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "fused.py"
    done: Any = CliRunner().invoke(cli.main, [*arguments(FILES[0]), "-o", str(path)])
    assert done.exit_code == 0 and done.stdout == ""
    assert path.read_text() == FILES[0].source
    assert "verified  out:" in done.stderr and f"wrote     {path}" in done.stderr


@pytest.mark.triton
@pytest.mark.parametrize("text", ["mm", "relu(mm)"])
def test_torchs_newer_precision_settings_are_no_hindrance(text: str, tmp_path: Path) -> None:
    """Nor are they changed: the older ones cannot be read where both were used."""
    (tmp_path / "fused.py").write_text(File(text, ("", ""), FP32, LIBRARY).source)
    code = (
        "import sys; sys.path.insert(0, '.'); import torch, fused\n"
        "for chosen in ('tf32', 'ieee', 'none'):\n"
        "    torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = chosen\n"
        "    y = getattr(fused, sys.argv[1])(torch.ones(2, 3), torch.ones(3, 4))\n"
        "    assert y.eq(3).all() and torch.backends.cuda.matmul.fp32_precision == chosen\n"
    )
    name = "mm" if text == "mm" else "relu_mm"
    environment = settings.child_environment(interpret=True)
    run = subprocess.run([sys.executable, "-c", code, name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
