"""The command line: what goes to which stream, exit statuses, every stage, and mistakes that end in a message."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
from click.testing import CliRunner
from golden import Golden
from machines import NO_GPU

import epigen
from epigen import api, cli, dtypes, ops, settings
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import LAYOUTS
from epigen.commands import compile as cli_compile
from epigen.errors import InternalError
from epigen.gpus import TARGETS
from epigen.runtime import ahead, verify

SMALL = "schedule=tiled,block_m=32,block_n=32,block_k=32,group_m=4,num_warps=4,num_stages=2"
QUICK = ("--config", SMALL, "--no-verify")
EARLY = ("ast", "ir", "lowered")


def run(*arguments: str, status: int = 0) -> Any:
    """A run in this process, which ended by its own exit status and not by an exception that got away. Without a GPU: the same answers on every machine."""
    done = CliRunner().invoke(cli.main, arguments, prog_name="epigen", obj=NO_GPU)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The same answers whatever is shipped."""
    monkeypatch.setattr(settings, "seed_database_dir", lambda: tmp_path / "nothing")
    api.database.cache_clear()
    yield
    api.database.cache_clear()


COMPILED: dict[tuple[str, str, str], list[Any]] = {}


@pytest.fixture
def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module is compiled for a target by the first test that needs it: a compiler process takes seconds."""

    class Once(ahead.Running):
        def __init__(self, job: ahead.Job):
            self.key = (job.rendered.digest, job.target.name, job.layout)
            if self.key not in COMPILED:
                super().__init__(job)

        def result(self) -> list[Any]:
            if self.key not in COMPILED:
                COMPILED[self.key] = super().result()
            return COMPILED[self.key]

    monkeypatch.setattr(ahead, "Running", Once)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The compiler processes that were started."""
    started: list[subprocess.Popen[bytes]] = []
    begin = ahead.Running.__init__

    def keep(self: ahead.Running, job: ahead.Job) -> None:
        begin(self, job)
        started.append(self.process)

    monkeypatch.setattr(ahead.Running, "__init__", keep)
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


# -- usage


def test_help_and_version() -> None:
    assert run("--version").stdout == f"epigen, version {epigen.__version__}\n"
    for arguments in (("--help",), ("-h",)):
        text = run(*arguments).stdout
        assert text.startswith("Usage: epigen [OPTIONS] COMMAND") and "compile" in text and "ops" in text
    text = re.sub(r"\s+", " ", run("compile", "--help").stdout)
    for option in (
        "--shape",
        "--dtype",
        "--layout",
        "--precision",
        "--invariant",
        "--target",
        "--emit",
        "--config",
        "--output",
        "--backward",
        "--save",
        "--wrt",
        "--no-verify",
        "--json",
    ):
        assert option in text
    for choice in (*cli_compile.TARGETS, *EARLY, *cli_compile.COMPILED, "fp8e4m3"):
        assert choice in text.replace("| ", "|")


# -- mistakes in what was given


@pytest.mark.parametrize("emit", [*EARLY, "source", "ptx"])
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("reluu(mm + bias)", "'reluu'"),
        ("relu(mm + ", "ParseError"),
        ("mm * s[m] + s[n]", "'s'"),
        ("mm + sum(mm)", "CheckError"),
        ("__import__('os').system('true')", "Error"),
    ],
)
def test_a_mistake_in_the_program_is_shown_with_a_caret(program: str, message: str, emit: str) -> None:
    done = run("compile", program, "--emit", emit, status=1)
    assert done.stdout == "" and message in done.stderr
    assert re.search(r"^  +\^+$", done.stderr, re.MULTILINE)
    assert done.stderr.startswith(("ParseError: ", "CheckError: "))


@pytest.mark.parametrize("config", [f"block_m={'9' * 5000}", "block_m=²"], ids=["long", "superscript"])
def test_a_config_of_odd_numbers(config: str) -> None:
    done = CliRunner().invoke(cli.main, ["compile", "mm", "--config", config], obj=NO_GPU)
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in (1, 2)
    assert "block_m=" in done.stderr and done.stdout == ""


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize(
    ("emit", "target", "stages"), [("ptx", "gfx942", "ttir, ttgir, llir, amdgcn, hsaco"), ("hsaco", "sm_90", "ttir, ttgir, llir, ptx, cubin")]
)
def test_a_stage_that_a_target_lacks(emit: str, target: str, stages: str) -> None:
    done = run("compile", "relu(mm + bias)", *QUICK, "--emit", emit, "--target", target, status=1)
    assert done.stdout == "" and done.stderr.endswith(f"error: {target} has no stage '{emit}': it has {stages}\n")


def test_a_stage_that_a_schedule_lacks_is_said_before_anything_is_run(children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "differences", lambda *_, **__: pytest.fail("the kernel was run"))
    for arguments in (("--emit", "ttir", "--target", "sm_90"), ("--emit", "hsaco")):
        assert run("compile", "relu(mm + bias)", *arguments, status=1).stdout == ""
    assert children == []


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize("emit", ["ttir", "ttgir", "ptx"])
def test_every_stage_of_the_default_target_is_there(emit: str) -> None:
    assert run("compile", "relu(mm + bias)", "--no-verify", "--emit", emit).stdout


@pytest.mark.triton
def test_a_kernel_that_the_compiler_refuses() -> None:
    done = run("compile", "cast(mm, fp8e4m3)", *QUICK, "--emit", "ptx", "--target", "sm_80", status=1)
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: epigen_cast_mm_fp8e4m3 does not compile for sm_80: ") and "fp8e4nv not supported" in last and len(last) < 400


def test_a_bug_is_called_a_bug(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    def broken(*_: object, **__: object) -> None:
        raise InternalError("node 3 has no name")

    monkeypatch.setattr(api, "compile", broken)
    done = run("compile", "mm", status=1)
    golden(done.stderr)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "fused.py"
    done = run("compile", "mm", *QUICK, "-o", str(path), status=1)
    assert done.stderr.endswith(f"error: cannot write {path}: No such file or directory\n")
    assert "is a directory" in run("compile", "mm", *QUICK, "-o", str(tmp_path), status=2).stderr
    for emit in EARLY:
        assert "cannot write" in run("compile", "mm", "--emit", emit, "-o", str(path), status=1).stderr


@pytest.mark.parametrize(
    "program", ["-mm + bias", "-mm", "--mm", "-relu(mm)", "-alpha * mm", "-offset * mm", "-offset*mm", "-offset+mm", "-1 * mm"]
)  # fmt: skip
@pytest.mark.parametrize("before", [True, False])
def test_a_program_may_begin_with_a_minus(program: str, before: bool) -> None:
    options = ("--emit", "ast")
    done = run("compile", *((program, *options) if before else (*options, program)))
    assert done.stdout == run("compile", f"({program})", *options).stdout == run("compile", *options, "--", program).stdout


def test_an_option_keeps_its_value_whatever_it_looks_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, arguments in (("-mm.py", ("-o", "-mm.py")), ("mm/f.py", ("-omm/f.py",)), ("-mm (1).py", ("--output", "-mm (1).py"))):
        Path("mm").mkdir(exist_ok=True)
        run("compile", "mm", "--emit", "ir", *arguments)
        assert Path(name).is_file()


# -- early stages


def test_emit_ast(golden: Golden) -> None:
    golden(run("compile", "z = mm + bias; relu(z), z ** 2", "--emit", "ast").stdout)


def test_emit_ir(golden: Golden) -> None:
    golden(run("compile", "z = mm + bias; z, cast(sum(z, m), fp16)", "--emit", "ir").stdout)


def test_emit_lowered_of_an_operand_that_is_computed() -> None:
    said = run("compile", "dot(relu(a) * norm[k], b) + bias", "--emit", "lowered", "--shape", "64x64x48").stdout
    assert (
        "  load norm[k] fp16\n  t0 = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)\n  t1 = t0 * norm\n  multiply t1 for a as fp16\n  load bias[n] fp16\n"
        in said
    )


def test_emit_lowered(golden: Golden) -> None:
    golden(run("compile", "z = mm * alpha + bias; z, bitmask(z > 0), bgrad(z)", "--emit", "lowered", "--dtype", "bf16", "--shape", "64x64x48").stdout)


@pytest.mark.parametrize("emit", EARLY)
def test_early_stages_as_json_and_to_a_file(emit: str, tmp_path: Path) -> None:
    text = run("compile", "relu(mm + bias)", "--emit", emit).stdout
    assert json.loads(run("compile", "relu(mm + bias)", "--emit", emit, "--json").stdout) == {"program": "relu(mm + bias)", emit: text}
    path = tmp_path / "stage.txt"
    assert run("compile", "relu(mm + bias)", "--emit", emit, "-o", str(path)).stdout == ""
    assert path.read_text() == text


# -- source


def test_source_goes_to_stdout_and_talk_to_stderr() -> None:
    done = run("compile", "relu(mm + bias)", *QUICK)
    tree = ast.parse(done.stdout)
    assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)] == ["epigen_relu_mm_bias"]
    assert done.stdout.startswith("# relu(mm + bias)\n") and done.stdout.endswith("\n") and not done.stdout.endswith("\n\n")
    assert done.stderr.splitlines() == [
        "target    sm_90 (H100, H200), the default, since no GPU is at hand",
        f"config    {SMALL.removeprefix('schedule=').replace(',', ' ')} fused_finalize=0 prefetch=0",
        "          given by the caller",
        f"compiled  relu(mm + bias), fp16 for sm_90: {done.stdout.count(chr(10))} lines of Triton, schedule tiled",
        "next      epigen compile 'relu(mm + bias)' -o fused.py             # a stand-alone file: kernel, launcher, self-check",
        "          epigen explain 'relu(mm + bias)' --shape 4096x4096x4096  # what bounds it, and what fusing saves",
    ]


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize("program", ["relu(mm+bias)", "mm", "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)"])
def test_without_a_gpu_the_kernel_is_one_that_any_gpu_runs_and_was_itself_verified(program: str) -> None:
    done = run("compile", program, "--json")
    found = json.loads(done.stdout)
    assert found["config"]["schedule"] == "tiled" and found["verified"]["same_source"]
    assert found["source"].count("\n") < 90
    least = min(t.shared_bytes for t in TARGETS.values())
    assert 0 < found["resources"][0]["shared_bytes"] <= least


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
def test_the_summary_comes_last() -> None:
    """After the source, as on a terminal, where both streams are one."""
    done = run("compile", "relu(mm+bias)")
    after = done.output[done.output.index(done.stdout) + len(done.stdout) :]
    assert [line.split()[0] for line in after.splitlines() if not line.startswith(" ")] == ["compiled", "verified", "resources", "next"]
    before = done.output[: done.output.index(done.stdout)]
    assert [line.split()[0] for line in before.splitlines() if not line.startswith(" ")] == ["target", "config"]


def test_what_is_named_next_is_for_the_same_problem() -> None:
    options = ["--dtype", "fp8e4m3", "--layout", "nt", "--precision", "fast_accum"]
    done = run("compile", "relu(mm + bias)", "--no-verify", "--target", "sm_90", *options)
    named = [shlex.split(line[10:], comments=True) for line in done.stderr[done.stderr.index("\nnext") + 1 :].splitlines()]
    assert named and all(command[3:9] == options for command in named)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--backward", "--dtype", "bf16"),
        ("-o", "a file's name.py"),
        ("--dtype", "fp8e4m3", "--layout", "nt", "--precision", "fast_accum"),
        ("--invariant", "m"),
    ],
    ids=" ".join,
)
def test_the_commands_that_are_named_next_are_commands(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("compile", "relu(mm + bias)", "--no-verify", *arguments)
    said = done.stderr[done.stderr.index("\nnext") + 1 :].splitlines()
    named = [shlex.split(line[10:], comments=True) for line in said]
    assert len(named) >= 2
    for words in named:
        if words[0] == "epigen":
            run(*words[1:], *(("--no-verify",) if words[1] == "compile" else ()))
        else:
            assert words[0] == "python" and Path(words[1]).is_file()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_taken_as_asked(schedule: str) -> None:
    """At a shape at which each may pay."""
    shape = "16x4096x4096" if schedule == "split_k" else "4096x4096x4096"
    weight = ["--weight", "int8", "--layout", "nt"] if SCHEDULES[schedule].converts else []
    found = json.loads(run("compile", "relu(mm + bias)", "--no-verify", "--schedule", schedule, "--shape", shape, *weight, "--json").stdout)
    assert found["config"]["schedule"] == schedule


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_taken_as_asked(target: str) -> None:
    done = run("compile", "relu(mm + bias)", "--no-verify", "--target", target)
    assert f"target    {target} ({TARGETS[target].part}), as asked\n" in done.stderr and f"on {target}: no measurement is at hand" in done.stderr
    assert ("warpgroup_mma(" if target == "sm_90" else "tl.dot(") in done.stdout


@pytest.mark.parametrize("dtype", [t.name for t in dtypes.OPERANDS])
def test_dtypes(dtype: str) -> None:
    text = run("compile", "relu(mm + bias)", *QUICK, "--dtype", dtype).stdout
    assert f"[M, K] {dtype}\n" in text and f"[N] {'fp32' if dtypes.BY_NAME[dtype].bits == 8 else dtype}\n" in text


def test_invariant() -> None:
    done = run("compile", "sum(mm, n)", "--no-verify", "--target", "sm_90", "--invariant", "m", "--shape", "8192x4096x4096")
    assert "one config for all M, since the program is invariant" in done.stderr and "sum_in_order(" in done.stdout
    said = done.stderr[done.stderr.index("\nnext") + 1 :].splitlines()
    assert all("--invariant m" in line for line in said) and not any("epigen tune" in line for line in said)
    parts = "schedule=split_k,block_m=16,block_n=64,block_k=64,group_m=1,num_warps=4,num_stages=3,splits=4"
    assert "splits=4 adds up parts" in run("compile", "mm", "--no-verify", "--invariant", "m", "--config", parts, status=1).stderr


@pytest.mark.triton
@pytest.mark.parametrize("block_m", ["16", "128"])
def test_of_an_invariant_program_no_product_and_sum_are_one_operation(block_m: str) -> None:
    """Which the compiler does by how many sums there are: that many rows a thread has, and so by the config."""
    config = f"block_m={block_m},block_n=64,block_k=64,group_m=8,num_warps=4,num_stages=3"
    asked = ("compile", "cast(mm + bias * alpha, fp32)", "--no-verify", "--target", "sm_90", "--config", config, "--emit", "ptx")
    assert "fma.rn.f32" not in run(*asked, "--invariant", "m").stdout
    if block_m == "128":
        assert "fma.rn.f32" in run(*asked).stdout


@pytest.mark.triton
def test_rows_of_an_invariant_program_are_summed_by_no_threads_order() -> None:
    """Triton lays a reduction out over threads by what divides M."""
    asked = ("compile", "y = mm * gate[m,n]; y, logsumexp(y, n), sum(gate[m,n], n)", "--no-verify", "--target", "sm_90", "--emit", "ttgir")
    plain, invariant = (run(*asked, *more).stdout for more in ((), ("--invariant", "m")))
    assert _added(plain) and not _added(invariant) and "tt.split" in invariant


def _added(ttgir: str) -> list[str]:
    """The reductions whose order decides bits: sums, and no maxima."""
    return [body for body in re.findall(r'"tt.reduce"\(.*?tt.reduce.return', ttgir, re.DOTALL) if "arith.addf" in body]


def test_precision_and_shape() -> None:
    assert 'input_precision="tf32"' in run("compile", "mm", *QUICK, "--dtype", "fp32", "--precision", "tf32").stdout
    assert 'input_precision="ieee"' in run("compile", "mm", *QUICK, "--dtype", "fp32").stdout
    # a K that the block divides needs no mask along K, and no K is promised by default
    assert "K - k" in run("compile", "mm", *QUICK).stdout
    done = run("compile", "mm", "--no-verify", "--shape", "100x200x4096")
    assert "K - k" not in done.stdout and "the model's choice of tiled for 100x200x4096 fp16 on sm_90" in done.stderr


def test_a_shape_past_32_bit_offsets() -> None:
    """The kernel that is shown is one that a call of this shape would run."""
    assert "tl.int64" in run("compile", "mm + residual", *QUICK, "--shape", "70000x70000x64").stdout
    assert "tl.int64" not in run("compile", "mm + residual", *QUICK, "--shape", "4096x4096x64").stdout


@pytest.mark.parametrize("shape", ["0x0x0", "1x1x1", "1x100000x3"])
def test_any_shape_has_a_kernel(shape: str) -> None:
    assert "tl.dot(" in run("compile", "mm", "--no-verify", "--shape", shape).stdout


def test_a_library_config() -> None:
    done = run("compile", "relu(mm + bias)", "--no-verify", "--config", "schedule=library,block_m=8,block_n=64,num_warps=4")
    assert "def epigen_relu_mm_bias_epilogue(" in done.stdout and "tl.dot(" not in done.stdout


def test_a_program_that_the_vendor_computes_whole() -> None:
    config = "schedule=library,block_m=8,block_n=64,num_warps=4"
    done = run("compile", "mm", "--config", config, "--json")
    found = json.loads(done.stdout)
    assert found["source"].endswith("def epigen_mm(a, b, out):\n    torch.mm(a, b, out=out)\n") and "triton" not in found["source"]
    assert found["resources"] == [] and found["verified"]["outputs"]["out"]["ok"] and "fp16 under torch on the CPU, this very kernel" in done.stderr
    said = run("compile", "mm", "--config", config, "--emit", "ptx", status=1).stderr
    assert "error: the vendor's library computes all of this program, so there is no ptx of it: give --schedule tiled, which multiplies" in said


# -- the derivative


def test_backward_is_derived_told_and_compiled(golden: Golden) -> None:
    done = run("compile", "relu(mm + bias)", "--backward", "--shape", "512x300x200", *QUICK)
    assert done.stdout == run("compile", "dmm = drelu(mm, mask); dbias = bgrad(dmm); dmm, dbias", "--shape", "512x300x200", *QUICK).stdout
    golden("\n".join(done.stderr.splitlines()[:7]))


def test_backward_as_asked(golden: Golden) -> None:
    """Another way of keeping, fewer gradients, and what needs no kernel."""
    done = run("compile", "gelu(mm + bias) + residual", "--backward", "--save", "recompute", "--wrt", "mm,residual", "--emit", "ast")
    golden(done.stdout, "ast")
    golden("\n".join(done.stderr.splitlines()[:3]), "what it reads")
    assert "forward " not in done.stderr, "nothing is added to it"


def test_backward_as_json() -> None:
    found = json.loads(run("compile", "tanh(mm)", "--backward", "--json", *QUICK).stdout)
    assert found["program"] == "dmm = dtanh(mm, y[m,n]); dmm" and "def epigen_dmm_dtanh" in found["source"]
    assert found["derivation"]["save"] == "output" and found["derivation"]["product"] == "out"
    assert found["derivation"]["arguments"] == [{"name": "y", "source": "saved", "of": "out"}]
    assert found["derivation"]["gradients"] == [{"of": "mm", "output": "dmm", "passed": "", "summed": False}]


# -- verification and resources


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
def test_a_kernel_is_checked_and_its_resources_are_told() -> None:
    done = run("compile", "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)", "--config", SMALL)
    for name in ("out0", "out2"):
        assert re.search(rf"^verified  {name}: largest error \S+, bound \S+$", done.stderr, re.MULTILINE)
    assert re.search(r"^verified  out1: \d+\.\d\d% of the bits lie within rounding of their threshold, the others are equal$", done.stderr, re.MULTILINE)
    assert "          at 35x37x61 fp16 under Triton's interpreter, this very kernel, against float64\n" in done.stderr
    resources = re.findall(
        r"^resources (\w+): \d+ registers a thread, 0 spilled, \d+ bytes of shared memory, \d+ blocks? a multiprocessor$", done.stderr, re.MULTILINE
    )
    assert resources == ["epigen_z_mm_bias_relu_bitmask_bgrad", "epigen_z_mm_bias_relu_bitmask_bgrad_finish_n"]


def test_no_verify_runs_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]) -> None:
    monkeypatch.setattr(verify, "differences", lambda *_, **__: pytest.fail("the kernel was run"))
    done = run("compile", "mm", *QUICK)
    assert "verified" not in done.stderr and "resources" not in done.stderr and children == []


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_verified_as_it_is(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[verify.Sample] = []
    sample = verify.sample
    monkeypatch.setattr(verify, "sample", lambda *args, **options: given.append(sample(*args, **options)) or given[-1])
    monkeypatch.setattr(cli_compile, "_start_compiling", lambda *_: None)
    run("compile", "relu(mm + bias)", "--config", SMALL, "--layout", layout)
    (one,) = given
    assert "".join("n" if t.stride(1) == 1 else "t" for t in (one.a, one.b)) == layout


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["1000x1002x1004", "1001x1003x999", "1024x1000x1000"])
def test_a_kernel_of_unaligned_rows_is_verified_itself(layout: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_compile, "_start_compiling", lambda *_: None)
    done = run("compile", "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)", "--config", SMALL, "--layout", layout, "--shape", shape)
    assert "under Triton's interpreter, this very kernel, against float64\n" in done.stderr


@pytest.mark.triton
def test_a_kernel_in_gluon_is_verified_by_its_like_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_compile, "_start_compiling", lambda *_: None)
    config = f"schedule=warp_specialized,{','.join(f'{name}={value}' for name, value in cases.warp_specialized().values)}"
    done = run("compile", "relu(mm + bias)", "--config", config, "--layout", "nt", "--shape", "256x256x256")
    assert "under Triton's interpreter, the kernel (in its place one in Triton's own language, persistent block_m=128 " in done.stderr
    assert "gl.warp_specialize(" in done.stdout


@pytest.mark.triton
@pytest.mark.parametrize(
    ("program", "dtype", "said"),
    [
        ("relu(mm + bias)", "fp32", "fp32 under Triton's interpreter, this very kernel"),
        ("mm", "int8", "int8 under Triton's interpreter, this very kernel"),
        (
            "relu(mm + bias)",
            "bf16",
            "fp16 under Triton's interpreter, the kernel (its twin with fp16 for bf16, which Triton's interpreter rounds wrongly: run it on a GPU for bf16 itself)",
        ),
        ("mm", "fp8e4m3", "(its twin with fp16 for bf16,"),
        ("cast(mm * 0.1, fp8e5m2), bgrad(mm)", "fp16", "(its twin with fp16 for fp8e5m2,"),
        ("cast(mm, fp16)", "fp8e5m2", "fp8e5m2 under Triton's interpreter, this very kernel"),
    ],
)
def test_what_was_verified_is_said(program: str, dtype: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_compile, "_start_compiling", lambda *_: None)
    done = run("compile", program, "--config", SMALL, "--dtype", dtype, "--json")
    assert said in done.stderr
    verified = json.loads(done.stdout)["verified"]
    assert verified["same_source"] == ("this very kernel" in said) and all(o["ok"] for o in verified["outputs"].values())


@pytest.mark.triton
@pytest.mark.parametrize("arguments", [(), ("--json",), ("--emit", "ptx"), ("-o", "fused.py")], ids=" ".join)
def test_a_wrong_kernel_is_not_shown(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    """A row with a wrong spelling is caught by the run against the oracle, which uses the row's other column."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ops.TABLE, "relu", replace(ops.TABLE["relu"], triton="tl.maximum({x}, 0.5)"))
    done = run("compile", "relu(mm + bias)", "--config", SMALL, *arguments, status=3)
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
    assert re.search(r"^error: output 'out' is wrong at \[\d+, \d+\]: the error is \S+, and the bound \S+$", done.stderr.splitlines()[-1])
    assert [process.poll() is None for process in children] == [False] * len(children), "a compiler was left running"


@pytest.mark.triton
def test_a_wrong_reduction_is_caught_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_compile, "_start_compiling", lambda *_: None)
    monkeypatch.setitem(ops.REDUCTIONS, "sum", replace(ops.REDUCTIONS["sum"], combine="{x} + 1.01 * {y}"))
    assert "output 'out1' is wrong" in run("compile", "mm, bgrad(mm + 1)", "--config", SMALL, status=3).stderr


# -- compiled stages


STAGES = {
    "ttir": ("sm_90", "tt.func"),
    "ttgir": ("sm_90", "ttg.num-warps"),
    "llir": ("sm_90", "define "),
    "ptx": ("sm_90", ".target sm_90a"),
    "amdgcn": ("gfx942", "v_mfma"),
}


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize("emit", STAGES)
def test_text_stages(emit: str, tmp_path: Path) -> None:
    target, content = STAGES[emit]
    arguments = ("compile", "relu(mm + bias)", "--config", SMALL, "--no-verify", "--emit", emit, "--target", target)
    done = run(*arguments)
    assert content in done.stdout and "epigen_relu_mm_bias" in done.stdout
    assert json.loads(run(*arguments, "--json").stdout)[emit] == done.stdout
    path = tmp_path / "kernel"
    assert run(*arguments, "-o", str(path)).stdout == ""
    assert path.read_text() == done.stdout


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
@pytest.mark.parametrize(("emit", "target"), [("cubin", "sm_90"), ("hsaco", "gfx942")])
def test_binary_stages(emit: str, target: str, tmp_path: Path) -> None:
    arguments = ("compile", "relu(mm + bias)", "--config", SMALL, "--no-verify", "--emit", emit, "--target", target)
    binary = run(*arguments).stdout_bytes
    assert binary.startswith(b"\x7fELF")
    assert bytes.fromhex(json.loads(run(*arguments, "--json").stdout)[emit]) == binary
    path = tmp_path / "kernel"
    assert run(*arguments, "-o", str(path)).stdout_bytes == b""
    assert path.read_bytes() == binary


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
def test_every_function_is_in_a_text_stage_and_a_binary_says_what_it_leaves_out() -> None:
    arguments = ("compile", "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z)", "--config", SMALL, "--no-verify")
    assert set(re.findall(r"\.entry (\w+)", run(*arguments, "--emit", "ptx").stdout)) == {
        f"epigen_z_mm_bias_relu_bitmask_bgrad{end}" for end in ("", "_finish_n")
    }
    assert "note      the cubin holds the main kernel; 1 finishing kernel" in run(*arguments, "--emit", "cubin").stderr


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
def test_a_config_that_cannot_run_is_not_shown() -> None:
    """More shared memory than the target has."""
    config = "schedule=tiled,block_m=64,block_n=64,block_k=128,group_m=4,num_warps=4,num_stages=6"
    done = run("compile", "mm", "--no-verify", "--config", config, "--target", "sm_86", "--emit", "ptx", status=1)
    assert done.stdout == "" and "shared memory" in done.stderr.splitlines()[-1]


# -- JSON


@pytest.mark.triton
@pytest.mark.usefixtures("compile_once")
def test_json_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    done = run("compile", "relu(mm + bias)", "--config", SMALL, "--json")
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    source = found.pop("source")
    (resources,) = found.pop("resources")
    verified = found.pop("verified")
    plan = api.compile(
        "relu(mm + bias)", config=dict(p.split("=") if p.startswith("s") else (p.split("=")[0], int(p.split("=")[1])) for p in SMALL.split(","))
    ).plan()
    assert found == {
        "program": "relu(mm + bias)", "name": "epigen_relu_mm_bias", "target": "sm_90", "dtype": "fp16", "why": "given by the caller",
        "config": {"schedule": "tiled"} | dict(plan.choice.config.values), "digest": found["digest"], "epigen": epigen.__version__,
    }  # fmt: skip
    assert re.fullmatch(r"[0-9a-f]{16}", found["digest"])
    assert source == run("compile", "relu(mm + bias)", *QUICK).stdout
    assert verified["shape"] == [35, 37, 61] and verified["dtype"] == "fp16" and verified["outputs"]["out"]["ok"]
    assert resources["name"] == "epigen_relu_mm_bias" and resources["spills"] == 0 and resources["blocks_per_sm"] >= 1
    of_weight = json.loads(run("compile", "mm * s[n]", "--config", SMALL, "--weight", "int8", "--json").stdout)
    assert of_weight["weight"] == "int8" and of_weight["verified"]["outputs"]["out"]["ok"] and "[K, N] int8" in of_weight["source"]
    for weight in ("int8", "uint8", "fp8e4m3", "fp8e5m2"):
        assert f" x {weight}, layout nn" in run("explain", "mm * s[n]", "--weight", weight, "--shape", "64x64x64").stdout
        assert run("compile", "mm * s[n]", "--no-verify", "--schedule", "tiled", "--weight", weight).exit_code == 0
    path = tmp_path / "fused.py"
    told = json.loads(run("compile", "relu(mm + bias)", *QUICK, "--json", "-o", str(path)).stdout)
    assert path.read_text() == told["source"] != source


# -- ops


def test_ops_lists_every_row() -> None:
    text = run("ops").stdout
    rows = json.loads(run("ops", "--json").stdout)
    headings = [line for line in text.splitlines() if not line.startswith("  ")]
    assert headings == ["arithmetic:", "activation:", "derivative:", "rounded:", "reduction:", "special:"]
    for op in ops.TABLE.values():
        call = (
            f"{op.name}({', '.join(p.name for p in op.params)})"
            if not op.symbol
            else f" {op.symbol} ".join(p.name for p in op.params)
            if len(op.params) == 2
            else f"{op.symbol}x"
        )
        assert rows.count({"group": op.group, "call": call, "formula": op.formula}) == 1
        assert re.search(rf"^  {re.escape(call)} +{re.escape(op.formula)}$", text, re.MULTILINE)
    for row in ops.REDUCTIONS.values():
        assert re.search(rf"^  {row.name}\(x, m \| n\), .* {re.escape(row.formula)}$", text, re.MULTILINE)
    for name in ops.SPECIAL:
        assert re.search(rf"^  {name}\(", text, re.MULTILINE)
    assert len(rows) == len(ops.TABLE) + len(ops.REDUCTIONS) + len(ops.SPECIAL)
    assert {name.split("(")[0] for row in rows for name in [row["call"]]} >= ops.FUNCTIONS


# -- as a process of its own


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = settings.child_environment(interpret=False) | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", "-m", "epigen", *arguments]
    return subprocess.run(command, env=environment, text=True, check=False, **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options))


@pytest.mark.triton
def test_a_whole_run() -> None:
    """Checked and compiled, both of Triton's modes."""
    done = process("compile", "relu(mm + bias)", "--config", SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run("compile", "relu(mm + bias)", *QUICK).stdout
    assert [line.split()[0] for line in done.stderr.splitlines() if not line.startswith(" ")] == [
        "target", "config", "compiled", "verified", "resources", "next",
    ]  # fmt: skip


def test_a_mistake_ends_in_a_message(golden: Golden) -> None:
    done = process("compile", "reluu(mm + bias)")
    assert (done.returncode, done.stdout) == (1, "")
    golden(done.stderr)


@pytest.mark.parametrize("arguments", [("ops",), ("ops", "--json"), ("compile", "mm", "--emit", "ir"), ("compile", "mm", *QUICK), ("--help",)], ids=" ".join)
def test_a_reader_that_went_away(arguments: tuple[str, ...]) -> None:
    """As in `epigen ops | head -0`: no traceback, and no complaint from the interpreter's own end either."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = process(*arguments, stdout=write)
    finally:
        os.close(write)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr and "Error" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments", [("ops",), ("ops", "--json"), ("compile", "mm", "--emit", "ir"), ("info",), ("--help",), ("compile", "--help"), ("--version",)], ids=" ".join
)
def test_a_full_disk_is_a_message(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = process(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


def test_python_m_epigen_is_the_command() -> None:
    environment = settings.child_environment(interpret=False)
    for arguments, said in (
        (("--version",), epigen.__version__),
        (("compile", "mm", "--emit", "ir"), "output out = %2"),
        (("--help",), "python -m epigen [OPTIONS]"),
    ):
        done = subprocess.run([sys.executable, "-W", "error", "-m", "epigen", *arguments], env=environment, capture_output=True, text=True, check=True)
        assert said in done.stdout


def test_ctrl_c_ends_a_command_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(api, "compile", interrupted)
    assert run("compile", "mm", status=130).stderr == "interrupted\n"
