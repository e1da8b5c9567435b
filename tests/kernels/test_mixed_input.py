"""The schedule mixed_input: what it takes and refuses, where it is chosen, and what its weights are multiplied by. `test_gluon` runs it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from choosing import chosen_runs
from click.testing import CliRunner
from golden import Golden

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.cli import main
from epigen.codegen import from_bytes
from epigen.codegen.lower import lower, signature_of_contiguous
from epigen.codegen.spec import KernelSpec
from epigen.codegen.steps import steps
from epigen.dtypes import BF16, FP8E4M3, FP16, FP32, INT8, UINT8, DType
from epigen.ir.program import graph_of
from epigen.nn import QuantizedLinear
from epigen.perf import limits, model
from epigen.perf.resources import Work
from epigen.runtime import outputs

SM90 = gpus.TARGETS["sm_90"]
FOUR, EIGHT = "dot(a, int4(b) * s[k/128,n])", "mm * s[n]"


def spec_of(
    text: str, b: DType = UINT8, shape: tuple[int, int, int] = (4096, 4096, 4096), a: DType = BF16, inputs: DType | None = None, layout: str = "nt"
) -> KernelSpec:
    graph = graph_of(text)
    return lower(graph, signature_of_contiguous(graph, a, b, tuple((i.name, inputs or a) for i in graph.inputs()), shape, layout, "ieee"))


def chosen(text: str, b: DType, shape: tuple[int, int, int]) -> dict[str, Any]:
    config = rule.choose(spec_of(text, b, shape), shape, SM90).config
    return {"schedule": config.schedule, **dict(config.values)}


def test_what_it_does_not_take(golden: Golden) -> None:
    """In words, and no config of it is in the space."""
    shape = (4096, 4096, 4096)
    for name, spec in {
        "no weight": spec_of("relu(mm)", BF16),
        "along n": spec_of(EIGHT, INT8, layout="nn"),
        "two in a byte along n": spec_of("dot(a, int4(b, n))", UINT8, layout="nt"),
        "unaligned": spec_of(EIGHT, INT8, (4096, 4096, 4088)),
        "another left operand": spec_of("dot(relu(a), b) * s[n]", INT8),
        "a reduction": spec_of("z = mm * s[n]; z, bgrad(z)", INT8),
        "a mask": spec_of("bitmask(mm * s[n] > 0)", INT8),
        "two products": spec_of("silu(mm) * dot(a, up[k,n])", INT8),
        "blocks of columns": spec_of("dot(a, b * s[k/128,n/128])", INT8),
        "groups of 24": spec_of("dot(a, b * s[k/24,n])", INT8),
        "a vector along k": spec_of("dot(a, b * s[k])", INT8),
        "rows of scales that are not aligned": spec_of(FOUR, UINT8, (4096, 4092, 4096)),
    }.items():
        golden(limits.unfit(spec, cases.mixed_input(), shape, SM90), name)
        assert "mixed_input" not in Space(spec, shape, SM90).schedules, name
    golden(limits.unfit(spec_of(FOUR), cases.mixed_input(block_k=64).with_value("block_k", 256), shape, SM90), "a step of two groups")
    golden(limits.unfit(spec_of(EIGHT, INT8), cases.mixed_input(), shape, gpus.TARGETS["sm_100"]), "another GPU")
    golden(limits.refusal(spec_of(EIGHT, INT8), cases.mixed_input(256, 256, 64, 2), shape, SM90), "more sums than registers")


def test_what_it_takes_for() -> None:
    """Weights of each kind beside fp16 and bf16."""
    for a, (text, b) in itertools.product(
        (FP16, BF16), ((EIGHT, INT8), (EIGHT, UINT8), (EIGHT, FP8E4M3), (FOUR, UINT8), ("dot(a, (uint4(b) - z[k/32,n]) * s[k/32,n])", UINT8))
    ):
        for shape in ((1, 8192, 8192), (64, 4096, 4096), (300, 1024, 4096), (4096, 14336, 4096)):
            spec = spec_of(text, b, shape, a)
            chosen_runs(spec, shape, SM90)
            space = Space(spec, shape, SM90)
            assert "mixed_input" in space.schedules
            work, own = Work(spec, shape, SM90), [config for config in space.every() if config.schedule == "mixed_input"]
            assert own and not any(limits.refused(config, work) for config in own)
            assert all(estimate.us > 0 for estimate in model.estimates(spec, own[:50], shape, gpus.of_target(SM90)))
    assert "mixed_input" not in Space(spec_of(EIGHT, INT8, a=FP32), (4096, 4096, 4096), SM90).schedules


def test_where_it_is_chosen() -> None:
    assert chosen(FOUR, UINT8, (1, 8192, 8192)) | {"block_m": 16, "block_n": 256, "splits": 4} == chosen(FOUR, UINT8, (1, 8192, 8192))
    assert chosen(EIGHT, INT8, (1, 8192, 8192))["schedule"] == "split_k" and chosen(EIGHT, INT8, (1, 28672, 8192))["schedule"] == "mixed_input"
    assert chosen(EIGHT, INT8, (64, 8192, 8192)) | {"schedule": "mixed_input", "block_m": 64, "block_n": 128, "splits": 2} == chosen(
        EIGHT, INT8, (64, 8192, 8192)
    )
    for m in (512, 4096):
        assert chosen(FOUR, UINT8, (m, 8192, 8192)) | {"block_m": 256, "block_n": 128, "block_k": 64, "splits": 1} == chosen(FOUR, UINT8, (m, 8192, 8192))
    assert chosen(FOUR, UINT8, (300, 8192, 8192))["block_m"] == 128  # of 256 rows two tiles would have 512
    assert chosen("dot(a, int4(b) * s[k/32,n])", UINT8, (4096, 4096, 4096))["block_k"] == 32
    assert chosen(FOUR, UINT8, (16, 256, 512))["schedule"] != "mixed_input"


@pytest.mark.parametrize(
    ("text", "inputs", "zero", "scales", "last"),
    [
        (FOUR, BF16, "", ("s",), ()),
        ("dot(a, (int4(b) - z[k/128,n]) * s[k/128,n])", BF16, "z", ("s",), ()),
        ("dot(a, int4(b) * s[k/128,n] * t[n])", BF16, "", ("s",), ("t",)),
        ("dot(a, int4(b)) * s[n]", BF16, "", (), ()),
    ],
)
def test_what_is_computed_in_the_dtype_of_the_product(text: str, inputs: DType, zero: str, scales: tuple[str, ...], last: tuple[str, ...]) -> None:
    step = steps(spec_of(text, inputs=inputs), cases.mixed_input(block_k=128))[1]
    assert step.as_loaded and (step.zero, step.scales, step.last, step.factors) == (zero, scales, last, ())


def test_what_that_dtype_does_not_hold_is_computed_in_fp32() -> None:
    for text, inputs in ((FOUR, FP32), ("dot(a, (int4(b) * t[n] - z[k/128,n]) * s[k/128,n])", BF16)):
        step = steps(spec_of(text, inputs=inputs), cases.mixed_input(block_k=128))[1]
        assert not step.as_loaded and not step.scales and step.value == step.operand.value


def test_what_is_read_of_a_weight_by_ptx() -> None:
    """Of int8 and of values of 4 bits; other weights are converted by Triton."""
    mixed, tiled = cases.mixed_input(block_k=128), cases.tiled(64, 64, 128)
    used = {
        (str(b), config.schedule): from_bytes.used(spec_of(text, b), config)
        for text, b in ((EIGHT, INT8), (EIGHT, UINT8), (FOUR, UINT8), (EIGHT, FP8E4M3))
        for config in (mixed, tiled)
    }
    assert used == {
        ("int8", "mixed_input"): True,
        ("int8", "tiled"): False,
        ("uint8", "mixed_input"): True,
        ("uint8", "tiled"): True,
        ("fp8e4m3", "mixed_input"): False,
        ("fp8e4m3", "tiled"): False,
    }


def test_a_layer_is_planned_by_it() -> None:
    """As a call on Hopper would have it: the scales' rows are aligned where torch put them."""
    layer = QuantizedLinear.from_linear(torch.nn.Linear(1024, 8192, False, dtype=torch.bfloat16), "int4", 128)
    kernel, x, shape = epigen.compile(layer.program), torch.zeros(512, 1024, dtype=torch.bfloat16), (512, 8192, 1024)
    signature = kernel._signature(shape, (x, layer.qweight.t()), {"weight_scale": layer.scale}, {}, outputs.of(kernel.graph, BF16))
    assert signature.tma == ("a", "b", "weight_scale", "out")
    plan = kernel.plan(shape, target=SM90, signature=signature)
    assert plan.choice.config.schedule == "mixed_input"
    assert [a.name for a in plan.rendered.functions[0].arguments if a.block] == ["a_desc", "b_desc", "weight_scale_desc", "out_desc"]


@pytest.mark.parametrize(
    ("text", "weight", "element"), [(EIGHT, ["--weight", "int8"], "int8"), (FOUR, [], "uint8"), (EIGHT, ["--weight", "fp8e4m3"], "float8e4nv")]
)
def test_a_file_of_its_own(text: str, weight: list[str], element: str, tmp_path: Path) -> None:
    """TMA addresses each tensor by its own dtype."""
    file = tmp_path / "kernel.py"
    given = [
        "compile",
        text,
        "--dtype",
        "bf16",
        *weight,
        "--layout",
        "nt",
        "--schedule",
        "mixed_input",
        "--shape",
        "512x1024x1024",
        "--no-verify",
        "-o",
        str(file),
    ]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 0, done.output
    written = file.read_text()
    compile(written, str(file), "exec")
    assert "_described(_aligned(a), [64, " in written and re.search(rf"_described\(_aligned\(b\.T\), \[128, \d+\], gl\.{element}\)", written)
