"""What a stand-alone file's launcher is called with: tensors of any strides and extents, or a refusal in words before anything is read."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from cases import persistent, split_k, warp_specialized
from golden import Golden
from standalone_files import LIBRARY, SMALL, File, python

from epigen import api, cli
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig
from epigen.codegen.standalone import standalone
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8
from epigen.errors import CheckError
from epigen.gpus import TARGETS

PROGRAM = "z = mm * alpha + bias; where(mask, z, gate[m,n]), bitmask(z > 0), bgrad(z), sum(z, n)"
STORING = "storing"
CONFIGS = {
    "tiled": SMALL, "completing": SMALL.with_value("fused_finalize", 1).with_value("prefetch", 1), "split_k": split_k(), "library": LIBRARY,
    "persistent": persistent(flatten=0, tma_store=0), STORING: persistent(flatten=0, tma_store=1),
}  # fmt: skip


def written(folder: Path, config: KernelConfig, program: str = PROGRAM, name: str = "fused", **problem: Any) -> Path:
    """The file of one config; without a problem as `epigen compile -o` makes it where no shape is given."""
    kernel = api.compile(program, config=config, precision="ieee")
    plan = kernel.plan(target=TARGETS["sm_90"], **({"signature": kernel.signature_of(FP16)} | problem))
    path = folder / f"{name}.py"
    path.write_text(standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered))
    return path


# Calls the launcher with tensors that lie in memory in many ways, and holds it to the file's own reference; says what each way came to.
WAYS = """
import importlib, json, sys, warnings
import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)

def unaligned(t):
    held = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    return held.copy_(t)

LIES = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.T.contiguous().T if t.dim() == 2 else t,
    "flipped": lambda t: t.flip(0),
    "sliced": lambda t: torch.cat([t, t], t.dim() - 1)[..., : t.shape[-1]],
    "every second": lambda t: t.repeat_interleave(2, t.dim() - 1)[..., ::2],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "expanded columns": lambda t: t[..., :1].expand(t.shape),
    "overlapping rows": lambda t: torch.zeros(t.numel() + 8, dtype=t.dtype).as_strided(t.shape, (1,) * t.dim()).clone() + t if t.dim() == 1 else t.contiguous().view(-1).as_strided(t.shape, (1, 1)),
    "unaligned": unaligned,
    "far apart": lambda t: torch.zeros(t.shape[0], 5000, dtype=t.dtype)[:, : t.shape[-1]].copy_(t) if t.dim() == 2 else t,
}

def inputs(m, n, k, seed=0):
    torch.manual_seed(seed)
    whole = lambda *size: torch.randint(-2, 3, size).half()
    mask = torch.randint(0, 256, (m, -(-n // 8)), dtype=torch.uint8)
    return dict(a=whole(m, k), b=whole(k, n), bias=whole(n), gate=whole(m, n), mask=mask)

def agree(fused, given):
    launcher = next(getattr(fused, name) for name in vars(fused) if name.startswith("z_mm_alpha"))
    a, b = given["a"], given["b"]
    named = {name: t for name, t in given.items() if name not in "ab"}
    found, expected = launcher(a, b, alpha=0.5, **named), fused.reference(a, b, alpha=0.5, **named)
    for x, y in zip(found, expected):
        x = fused._unpack(x, b.shape[1]) if x.dtype == torch.uint8 else x
        if x.shape != y.shape or not torch.equal(x.double(), y.double()):
            return False
    return True

ends = {}
for module, shape in json.loads(sys.argv[1]):
    fused = importlib.import_module(module)
    for name, lies in LIES.items():
        given = inputs(*shape)
        if shape != [17, 23, 9] and name not in ("contiguous", *(["transposed", "unaligned"] if shape[0] > 1 and 0 not in shape else [])):
            continue
        try:
            end = "right" if agree(fused, {which: lies(tensor) for which, tensor in given.items()}) else "WRONG"
        except (ValueError, TypeError, RuntimeError) as error:
            end = f"{type(error).__name__}: {error}"
        ends[f"{module} {'x'.join(map(str, shape))} {name}"] = end
print(json.dumps(ends))
"""


def ends(folder: Path, script: str, *arguments: str) -> dict[str, str]:
    (folder / "ways.py").write_text(script)
    done = python(folder, "ways.py", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def lying(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each config, shape and way to lie, what came of the call. One process for all of them: a start takes longer than a call."""
    folder = tmp_path_factory.mktemp("lying")
    for name, config in CONFIGS.items():
        written(folder, config, name=name, **({"signature": None, "shape": (4096, 4096, 4096), "dtype": FP16} if name == STORING else {}))
    shapes = [(17, 23, 9), (16, 24, 32), (1, 1, 1), (0, 23, 9), (17, 0, 9), (17, 23, 0), (0, 0, 0)]
    return ends(folder, WAYS, json.dumps([(name, shape) for name in CONFIGS for shape in shapes]))


@pytest.mark.triton
def test_tensors_may_lie_in_any_way(lying: dict[str, str]) -> None:
    """Extents that are odd, whole and 1; what cannot be stored by TMA is refused by its extent."""
    full = {way: end for way, end in lying.items() if "0" not in way.split()[1].split("x")}
    unstored = {way for way in full if way.startswith((f"{STORING} 17x23", f"{STORING} 1x1"))}
    assert {way: end for way, end in full.items() if way not in unstored and end != "right"} == {} and len(full) == (11 + 3 + 1) * len(CONFIGS)
    assert {full[way] for way in unstored} == {f"ValueError: this kernel was made for N divisible by 8, and it is {n}" for n in (23, 1)}


def test_empty_tensors_are_right_or_refused_in_words(lying: dict[str, str]) -> None:
    empty = {way: end for way, end in lying.items() if "0" in way.split()[1].split("x")}
    assert len(empty) == 4 * len(CONFIGS)
    for way, end in empty.items():
        name, extents, _ = way.split(" ", 2)
        if SCHEDULES[CONFIGS[name].schedule].descriptors:
            assert end.startswith(f"ValueError: {extents} ") and "TMA" in end
        elif CONFIGS[name]["fused_finalize"] and "0" in extents.split("x")[:2]:
            assert end.startswith(f"ValueError: {extents} ") and "reductions" in end
        else:
            assert end == "right"


# Calls the launcher with what it must refuse, each in place of one argument.
REFUSED = """
import importlib, json, sys, warnings
import torch

warnings.simplefilter("ignore")
half = lambda *size: torch.ones(size, dtype=torch.float16)
M, N, K = 16, 24, 32
freed = half(K, N)
freed.untyped_storage().resize_(0)
WRONG = {
    "a of another dtype": dict(a=torch.ones(M, K)), "b of another dtype": dict(b=torch.ones(K, N)), "bias of another dtype": dict(bias=torch.ones(N)),
    "a mask of booleans": dict(mask=torch.ones(M, N // 8, dtype=torch.bool)), "a of float64": dict(a=torch.ones(M, K).double()),
    "b with another K": dict(b=half(K - 1, N)), "a with one extent": dict(a=half(K)), "a with three": dict(a=half(1, M, K)), "b with one": dict(b=half(K)),
    "a short bias": dict(bias=half(N - 1)), "a long bias": dict(bias=half(N + 1)), "a bias of one": dict(bias=half(1)), "a bias as a row": dict(bias=half(1, N)),
    "a short gate": dict(gate=half(M - 1, N)), "a transposed gate": dict(gate=half(N, M)), "a short mask": dict(mask=torch.zeros(M, N // 8 - 1, dtype=torch.uint8)),
    "a mask that is unpacked": dict(mask=torch.zeros(M, N, dtype=torch.uint8)),
    "a elsewhere": dict(a=half(M, K).to("meta")), "b elsewhere": dict(b=half(K, N).to("meta")), "bias elsewhere": dict(bias=half(N).to("meta")),
    "all elsewhere": {name: t.to("meta") for name, t in dict(a=half(M, K), b=half(K, N), bias=half(N), gate=half(M, N), mask=torch.zeros(M, 3, dtype=torch.uint8)).items()},
    "a list": dict(a=[[1.0]]), "a number as bias": dict(bias=1.0), "nothing as bias": dict(bias=None), "numpy": dict(a=half(M, K).numpy()),
    "sparse": dict(a=half(M, K).to_sparse()), "freed memory": dict(b=freed), "a gradient": dict(a=half(M, K).requires_grad_()),
    "alpha as text": dict(alpha="x"), "alpha of several": dict(alpha=torch.ones(2)), "no alpha": dict(alpha=None), "complex alpha": dict(alpha=1j),
}
def right():
    return dict(a=half(M, K), b=half(K, N), bias=half(N), gate=half(M, N), mask=torch.zeros(M, N // 8, dtype=torch.uint8), alpha=2.0)

def call(module, given):
    launcher = next(getattr(module, name) for name in vars(module) if name.startswith("z_mm_alpha"))
    launcher(given.pop("a"), given.pop("b"), **given)

ends = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for way, wrong in WRONG.items():
        try:
            call(module, right() | wrong)
        except (ValueError, TypeError, RuntimeError) as error:
            ends[f"{name}: {way}"] = f"{type(error).__name__}: {error}"
        else:
            ends[f"{name}: {way}"] = "taken"
    with torch.no_grad():
        call(module, right() | dict(a=half(M, K).requires_grad_(), alpha=1))
print(json.dumps(ends))
"""


@pytest.mark.triton
def test_what_does_not_fit_is_refused_before_it_is_read(away: Path, golden: Golden) -> None:
    names = ("tiled", "persistent", "library")
    for name in names:
        written(away, CONFIGS[name], name=name)
    found = ends(away, REFUSED, *names)
    assert {way: end for way, end in found.items() if end == "taken"} == {} and len(found) > 30 * len(names)
    for name in names:
        golden(found[f"{name}: a short bias"], "a short bias")
        assert found[f"{name}: b elsewhere"].endswith("on meta, and torch.float16 [K, N] = [32, 24] on cpu was expected")
        golden(found[f"{name}: numpy"], "numpy")
        for way, word in (("sparse", "sparse"), ("freed memory", "freed"), ("a gradient", "no_grad")):
            assert word in found[f"{name}: {way}"]


# Few pages are touched, so that all of it fits in any memory.
FAR = """
import sys, warnings
import torch
warnings.simplefilter("ignore")
fused = __import__(sys.argv[1])
a, b = torch.randn(4, 64).half(), torch.randn(64, 24).half()
base = torch.empty(3 * 2**30 + 4096, dtype=torch.float16)
far = base.as_strided((4, 64), (2**30, 1))
far.copy_(a)
try:
    found = fused.relu_mm(far, b)
    print("right" if torch.allclose(found.float(), torch.relu(a.float() @ b.float()), atol=2e-2) else "wrong")
except ValueError as error:
    print(error)
try:
    fused.relu_mm(torch.empty(1, 1).half().expand(2**20, 64), torch.empty(1, 1).half().expand(64, 2**12))
except ValueError as error:
    print(error)
"""


@pytest.mark.triton
@pytest.mark.parametrize("config", [SMALL, persistent()], ids=lambda c: c.schedule)
def test_offsets_past_32_bits_are_refused(config: KernelConfig, away: Path, golden: Golden) -> None:
    written(away, config, "relu(mm)")
    done = python(away, "-c", FAR, "fused")
    assert done.returncode == 0, done.stderr
    strided, extents = done.stdout.splitlines()
    assert strided.startswith("a reaches over 2**31 elements")
    golden(extents)


@pytest.mark.triton
def test_a_file_of_64_bit_offsets_takes_them(away: Path) -> None:
    written(away, SMALL, "relu(mm)", shape=(70000, 70000, 64), signature=None, dtype=FP16)
    done = python(away, "-c", FAR[: FAR.rindex("try:")], "fused")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


# What the launcher says on GPUs that are not there: torch is asked for their capability alone.
ELSEWHERE = """
import importlib, json, sys
import torch
torch.cuda.get_device_name = lambda device: "a GPU"
ends = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        torch.cuda.get_device_capability = lambda device, found=capability: found
        ends[f"{name} {capability[0]}{capability[1]}"] = module._unfit(torch.device("cuda"))
    torch.version.hip, torch.cuda.get_device_capability = "7", lambda device: (9, 4)
    ends[f"{name} hip"] = module._unfit(torch.device("cuda"))
    torch.version.hip = None
print(json.dumps(ends))
"""


@pytest.mark.triton
def test_other_gpus_are_refused_in_words(away: Path, golden: Golden) -> None:
    written(away, SMALL, "relu(mm)", "tiled")
    written(away, persistent(), "relu(mm)", "persistent")
    written(away, warp_specialized(), "relu(mm)", "gluon")
    written(away, SMALL, "cast(mm, fp8e4m3)", "fp8")
    found = ends(away, ELSEWHERE, "tiled", "persistent", "gluon", "fp8")
    runs = {name for name, end in found.items() if not end}
    assert runs == {
        *(f"tiled {gpu}" for gpu in (80, 89, 90, 100, "hip")), "persistent 90", "persistent 100", "gluon 90", *(f"fp8 {gpu}" for gpu in (89, 90, 100, "hip"))
    }  # fmt: skip
    golden(found["gluon 80"], "gluon")
    golden(found["persistent hip"], "hip")
    golden(found["fp8 80"], "fp8")


IMPORTED_BEFORE = """
import triton
import torch, fused
try:
    fused.relu_mm(torch.ones(4, 4).half(), torch.ones(4, 4).half())
except RuntimeError as error:
    print(error)
"""


@pytest.mark.triton
def test_triton_that_was_imported_to_compile_is_said(away: Path) -> None:
    written(away, SMALL, "relu(mm)")
    done = python(away, "-c", IMPORTED_BEFORE)
    assert done.returncode == 0 and "the tensors are on cpu" in done.stdout and "TRITON_INTERPRET=1" in done.stdout, done.stderr


# Counts copies of operands that a call makes.
COPIES = """
import torch, warnings
import fused
warnings.simplefilter("ignore")
copied = []
aligned = fused._aligned
def watched(t):
    found = aligned(t)
    copied.append(found is not t)
    return found
fused._aligned = watched
for k, n in ((64, 64), (61, 64), (64, 60), (61, 59)):
    fused.relu_mm(torch.ones(64, k).half(), torch.ones(k, n).half())
    print(*map(int, copied))
    copied.clear()
"""


@pytest.mark.triton
def test_only_what_tma_cannot_address_is_copied(away: Path) -> None:
    written(away, persistent(tma_store=0), "relu(mm)")
    assert python(away, "-c", COPIES).stdout.splitlines() == ["0 0", "1 0", "0 1", "1 1"]


@pytest.mark.triton
def test_a_launcher_keeps_the_users_names_apart(away: Path) -> None:
    """Whatever the launcher itself names is refused as a name, or works as one."""
    names: set[str] = set()
    for file in (File("relu(mm) * bias", ("", ""), config=c) for c in (SMALL, split_k(), persistent(), LIBRARY, warp_specialized())):
        tree = ast.parse(file.source)
        inside = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("relu_mm_bias", "reference")]
        names |= {n.id for f in inside for n in ast.walk(f) if isinstance(n, ast.Name)} - {"bias", "a", "b"}
    assert {"torch", "M", "num_programs", "_known"} <= names
    free = []
    for name in sorted(names | {"t", "known", "indices", "shape", "device", "sys", "os", "warnings", "TensorDescriptor", "gl", "pdl", "contextlib"}):
        try:
            api.graph_of(f"mm * {name} + {name}_2[n]")
        except (CheckError, cli.EpigenError):
            continue
        free.append(name)
    sources = {f"file{i}": File(f"mm * {name} + {name}_2[n]", ("", "")).source for i, name in enumerate(free)}
    for module, source in sources.items():
        (away / f"{module}.py").write_text(source)
    check = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name).self_check()\n"
    done = python(away, "-W", "ignore", "-c", check, *sources)
    assert done.returncode == 0 and done.stdout.count("agrees with torch") == len(free) > 5, done.stderr


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [FP32, BF16, FP8E4M3, INT8], ids=str)
def test_each_dtype_of_operands_says_where_it_runs(dtype: Any, away: Path) -> None:
    kernel = api.compile("relu(mm * 0.1)", config=SMALL, precision="ieee")
    plan = kernel.plan(target=TARGETS["sm_90"], signature=kernel.signature_of(dtype))
    (away / "fused.py").write_text(standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered))
    done = python(away, "fused.py")
    runs = dtype in (FP32, INT8)
    assert (done.returncode == 0) == runs and ("needs a GPU" in done.stderr) == (not runs) and "Traceback" not in done.stderr
