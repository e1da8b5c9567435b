"""What the backend expects of a region's kernel, and when it takes one: epigen.training.expected, for a GPU that is not there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import precompiled
import pytest
import torch
from machines import Everywhere
from torch.fx.experimental.proxy_tensor import make_fx
from under_torch import APART

from epigen import gpus
from epigen.dtypes import BF16, FP32
from epigen.gpus import TARGETS
from epigen.runtime.kernel import Kernel
from epigen.training import backend, expected, library, precompile
from epigen.training.report import Seen

pytestmark = [APART, pytest.mark.triton, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own compiler

RELU = expected.ProgramCall("relu(mm)", (8192, 4096, 4096), BF16, "nn", ())


@pytest.mark.parametrize(
    ("text", "measured", "counts"), [("relu(mm)", True, 1.03), ("relu(mm)", False, 1.09), ("mm * x0[m,n] + x1[n] + x2[m,n]", False, 1.09 * 1.12)]
)
def test_an_estimate_counts_for_more_than_a_measurement(text: str, measured: bool, counts: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more so the more tiles it has to read."""
    monkeypatch.setattr(expected, "_kernels_us", lambda *_: (100.0, 110.0, measured))
    fused, bare = expected.kernels_us(expected.ProgramCall(text, (8192, 4096, 4096), BF16, "nn", ()), TARGETS["sm_90"], None)
    assert (fused, bare) == (pytest.approx(100 * counts), 110.0)


@pytest.mark.parametrize("call", [RELU, replace(RELU, shape=(64, 1024, 1024, 128))], ids=["one", "batch"])
def test_what_is_missing_is_tuned_before_it_is_judged(call: expected.ProgramCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel that will be called, as its call would."""
    asked: list[tuple[str | None, bool]] = []
    plan = Kernel.plan

    def seen(self: Kernel, *args: Any, as_called: bool = False, **options: Any) -> Any:
        assert self._known_as is not None
        asked.append((self._known_as.tune, as_called))
        return plan(self, *args, **options)

    monkeypatch.setattr(Kernel, "plan", seen)
    untuned = expected.kernels_us(call, TARGETS["sm_90"], None)
    assert not any(as_called for _, as_called in asked)
    asked.clear()
    assert expected.kernels_us(call, TARGETS["sm_90"], "missing")[0] == pytest.approx(untuned[0] * 1.03 / 1.09), "and then it is no guess"
    assert asked[0] == ("missing", True)


@pytest.fixture(autouse=True)
def nothing_is_left_to_compile() -> Iterator[None]:
    yield
    precompiled.end()


HOPPER = expected.Terms(machine=Everywhere({0: TARGETS["sm_90"]}))


def taken(function: Any, *shapes: tuple[int, ...]) -> Seen:
    """What becomes of the one product, or batch of them, of a function of bf16 tensors, for a Hopper."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.empty(s, dtype=torch.bfloat16) for s in shapes)).graph
    (found,) = backend.fuse(graph, HOPPER)
    return found


def test_a_kernel_that_keeps_values_in_memory_is_not_taken() -> None:
    """On an H100 such a one took 843 us where the product and a pass took 369."""

    def one(g: Any, x: Any, y: Any, w: Any) -> Any:
        """A gated unit's backward with an activation that is in no table."""
        mm = g @ w
        t = torch.tanh((x + x * x * x * 0.0447) * 0.79)
        u = mm * y * (x * 0.5) * (1 - t * t) * 0.79
        return mm * (x * 0.5 * (t + 1)), u + u * 0.0447 * (x * x * 3) + mm * y * (t + 1) * 0.5

    def of_columns(n: int) -> Seen:
        return taken(one, (8192, 2048), (8192, n), (8192, n), (2048, n))

    assert "in memory, for want of registers" in of_columns(5124).why
    assert of_columns(5120).why.startswith("expected to take"), "a quarter of a tile at a time, whose instructions take longer than a pass of their own"
    assert taken(lambda x, w: torch.relu(x @ w), (8192, 2048), (2048, 5120)).program == "relu(mm)"


@pytest.mark.parametrize(
    ("function", "shapes", "program"),
    [
        (lambda a, b: torch.relu(a @ b * 0.125), ((64, 1024, 128), (64, 128, 1024)), "relu(mm * 0.125)"),
        (lambda a, b: torch.relu(a @ b * 0.125), ((32, 1, 4096), (32, 4096, 14336)), ""),  # as much is spared as a launch takes
        (lambda a, b, c: torch.relu(torch.bmm(a, b) + c), ((8, 512, 4096), (8, 4096, 14336), (8, 1, 14336)), "relu(mm + x0[n])"),
        (lambda a, b, c: torch.baddbmm(c, a, b), ((64, 1024, 128), (64, 128, 1024), (1, 1024, 1024)), "mm + x0[m,n]"),  # torch copies it for all
        (lambda a, b, c: torch.addmm(c, a, b), ((8192, 1024), (1024, 4096), (4096,)), ""),
        (lambda a, b, c: torch.addmm(c, a, b), ((8192, 1024), (1024, 4096), (8192, 4096)), "mm + x0[m,n]"),
    ],
)
def test_what_is_taken_of_batches(function: Any, shapes: tuple[tuple[int, ...], ...], program: str) -> None:
    found = taken(function, *shapes)
    assert found.program == program
    if program and len(shapes[0]) == 3:
        assert found.times_us is not None and found.times_us[0] < found.times_us[1] and found.call is not None
        assert found.shape == (shapes[0][0], shapes[0][1], shapes[1][2], shapes[0][2])
        assert found.call.a.shape == shapes[0] and found.call.b.stride == (shapes[1][1] * shapes[1][2], shapes[1][2], 1)


def test_a_kernel_of_a_batch_that_keeps_values_in_memory_is_not_taken() -> None:
    def one(g: Any, x: Any, y: Any, w: Any) -> Any:
        mm = torch.bmm(g, w)
        t = torch.tanh((x + x * x * x * 0.0447) * 0.79)
        u = mm * y * (x * 0.5) * (1 - t * t) * 0.79
        return mm * (x * 0.5 * (t + 1)), u + u * 0.0447 * (x * x * 3) + mm * y * (t + 1) * 0.5

    def of_columns(n: int) -> Seen:
        return taken(one, (8, 1024, 2048), (8, 1024, n), (8, 1024, n), (8, 2048, n))

    assert "in memory, for want of registers" in of_columns(5124).why
    assert "in memory" not in of_columns(5120).why, "rows that TMA addresses are taken a quarter of a tile at a time"


def test_what_is_copied_for_a_program_costs_what_it_takes() -> None:
    """By a kernel of its own, and then it is read as a tile; but for one row of each image and the same rows for all, for which the rows are parted."""

    def added(*lead: int) -> Seen:
        return taken(lambda x, w, c: torch.relu(x @ w + c), (4, 2, 1024, 512), (512, 4096), (*lead, 4096))

    copied, whole = (added(*lead).times_us for lead in ((4, 1, 1024), (4, 2, 1024)))
    assert copied is not None and whole is not None
    gpu = gpus.of_target(TARGETS["sm_90"])
    assert copied[0] - whole[0] == pytest.approx(gpu.launch_us + expected.moved_us([2 * 8192 * 4096], gpu))
    for lead, shape in (((4, 2, 1), (8, 4096)), ((1024,), (1024, 4096)), ((4, 1, 1), (4, 4096))):
        parted = added(*lead)
        assert parted.times_us is not None and parted.times_us[0] < copied[0]
        assert parted.call is not None and [lying.shape for _, lying in parted.call.inputs] == [shape]


def test_masks_are_packed_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels that are compiled before they are taken, of a mask that is a sixteenth of a tile; and a mask is no tile that makes an estimate doubtful."""
    packed: Any = torch.ops.epigen

    def forward(x: Any, w: Any) -> Any:
        y = torch.relu(x @ w)
        return y, packed.bitmask(~(y <= 0))

    assert taken(forward, (2048, 512), (512, 1024)).program == "v = relu(mm); out0 = v; out0, bitmask(~(v <= 0))"
    g, w, mask = torch.empty(2048, 512, dtype=torch.bfloat16), torch.empty(512, 1024, dtype=torch.bfloat16), torch.empty(2048, 128, dtype=torch.uint8)
    (found,) = backend.fuse(make_fx(lambda g, w, mask: packed.where_bits(mask, g @ w), tracing_mode="fake")(g, w, mask).graph, HOPPER)
    assert found.program == "drelu(mm, bits(x0))"
    monkeypatch.setattr(expected, "_kernels_us", lambda *_: (100.0, 110.0, False))
    assert expected.kernels_us(expected.ProgramCall(found.program, (2048, 1024, 512), BF16, "nn", ()), TARGETS["sm_90"], None)[0] == pytest.approx(109)


# -- groups


def of_groups(function: Any, count: int, *shapes: tuple[int, ...]) -> list[Seen]:
    """As `taken`, of a function of tensors and of where so many groups end."""
    given = (*(torch.empty(s, dtype=torch.bfloat16) for s in shapes), torch.empty(count, dtype=torch.int32))
    return backend.fuse(make_fx(function, tracing_mode="fake")(*given).graph, HOPPER)


def gated(x: Any, up: Any, ends: Any) -> Any:
    gate, value = torch._grouped_mm(x, up.transpose(1, 2), offs=ends).chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


def alone(x: Any, y: Any, ends: Any) -> Any:
    return torch._grouped_mm(x, y, offs=ends)


def test_the_kernels_of_groups_are_compiled_ahead() -> None:
    (only,) = of_groups(lambda x, w, ends: torch.relu(torch._grouped_mm(x, w, offs=ends)), 8, (512, 256), (8, 256, 256))
    assert only.program == "relu(mm)"
    precompiled.end()
    compiled = library.kernel("relu(mm)", None)._grouped._compiling[1]
    assert [future.result() for future in compiled] == [""]


@pytest.mark.parametrize("experts", [8, 64])
def test_gates_of_groups_are_taken(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V2-Lite's experts, and as few of them as Mixtral has."""
    monkeypatch.setattr(precompile, "compile_ahead", lambda _kernels: None)
    first, second = of_groups(gated, experts, (8192, 2048), (experts, 2816, 2048))
    assert first == second and first.program == "silu(mm) * dot(a, x0[k,n])" and first.groups == experts and first.shape == (8192, 1408, 2048)
    assert first.times_us is not None and first.times_us[0] < first.times_us[1] and first.call is not None
    assert first.call.groups == experts and first.call.a.shape == (8192, 2048) and first.call.b.shape == (experts, 2048, 1408)
    assert first.call.ends(torch.device("cpu")).tolist()[-1] == 8192 and [lying.shape for _, lying in first.call.inputs] == [(experts, 2048, 1408)]


def test_a_product_of_groups_alone_is_taken_where_it_is_expected_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows each it is, and along k as a weights' gradient lies, whose groups TMA ends."""
    monkeypatch.setattr(precompile, "compile_ahead", lambda _kernels: None)
    assert [s.program for s in of_groups(alone, 128, (1024, 768), (128, 768, 2048))] == ["mm"]
    assert [s.why for s in of_groups(alone, 8, (32768, 14336), (8, 14336, 4096))] == ["nothing elementwise follows it"]
    along_k, lying = (lambda x, y, ends: alone(x.mT, y, ends), 64, (8192, 2048), (8192, 2816)), (alone, 64, (2048, 8192), (8192, 2816))
    (faster,) = of_groups(*along_k)
    assert faster.program == "mm" and faster.flops == 2 * 2048 * 8192 * 2816 and faster.call is not None
    assert faster.call.a.shape == (2048, 8192) and faster.call.ends(torch.device("cpu")).tolist()[:2] == [128, 256]
    assert [s.why for s in of_groups(*lying)] == ["nothing elementwise follows it"]


def test_what_is_gathered_for_a_program_is_written_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of each row's expert, by a kernel of its own, where Inductor would gather it in the pass behind the product."""
    monkeypatch.setattr(precompile, "compile_ahead", lambda _kernels: None)
    shapes = (8192, 2048), (64, 2048, 1408)

    def added(x: Any, w: Any, bias: Any, rows: Any, ends: Any) -> Any:
        return torch.relu(torch._grouped_mm(x, w, offs=ends) + (bias[rows] if bias.shape[0] == 64 else bias))

    def times(bias: tuple[int, int]) -> tuple[float, float]:
        given = *(torch.empty(s, dtype=torch.bfloat16) for s in (*shapes, bias)), torch.zeros(8192, dtype=torch.int64), torch.empty(64, dtype=torch.int32)
        (found,) = backend.fuse(make_fx(added, tracing_mode="fake")(*given).graph, HOPPER)
        assert found.times_us is not None
        return found.times_us

    gathered, read, tile = times((64, 1408)), times((8192, 1408)), 2 * 8192 * 1408
    gpu = gpus.of_target(TARGETS["sm_90"])
    assert gathered[0] - read[0] == pytest.approx(gpu.launch_us + expected.moved_us([tile], gpu))
    assert read[1] - gathered[1] == pytest.approx(expected.moved_us([tile], gpu))


def test_what_is_expected_of_groups_of_rows_is_near_what_was_measured() -> None:
    rows = json.loads((Path(__file__).parents[2] / "bench/results/grouped_h200.json").read_text())["rows"]
    programs = {"mm * score[m]": ("mm * score[m]", (("score", FP32),)), "g, u = halves(mm); silu(g) * u": ("silu(mm) * dot(a, x0[k,n])", (("x0", BF16),))}
    target, off = gpus.by_name("H200").target, list[tuple[float, float]]()
    for row in (r for r in rows if r["program"] in programs):
        (text, inputs), (experts, m, n, k) = programs[row["program"]], row["shape"]
        n, k = (n // 2, k) if "halves" in row["program"] else (k, n // 2)
        call = expected.ProgramCall(text, (experts, -(-m // experts), n, k), BF16, "nt", inputs, groups="m")
        found = expected.kernels_us(call, target, None)
        off.append(tuple(math.log(row["timing"][name]["median_us"] / us) for name, us in zip(("epigen", "grouped_mm"), found, strict=True)))  # type: ignore[arg-type]
    assert len(off) == 28
    assert all(math.sqrt(sum(x * x for x in one) / len(one)) < 0.15 for one in zip(*off, strict=True))


def test_nothing_of_groups_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record would not say how rows are shared out."""
    call = expected.ProgramCall("relu(mm)", (8, 128, 1024, 512), BF16, "nt", (), groups="m")
    untuned = expected.kernels_us(call, TARGETS["sm_90"], None)
    monkeypatch.setattr(Kernel, "_at_call", lambda *_: pytest.fail("it is tuned"), raising=False)
    assert expected.kernels_us(call, TARGETS["sm_90"], "missing") == untuned
