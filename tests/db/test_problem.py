"""What makes two calls one problem: the spelling of inputs, and what names and dtypes change."""

from __future__ import annotations

from pathlib import Path

from tuned import TRITON, config, opened

from epigen.choose import choose
from epigen.codegen.lower import lower
from epigen.codegen.spec import KernelSpec, Signature
from epigen.db.problem import Problem, problem_of
from epigen.db.records import Record, problem_key
from epigen.dtypes import BF16, FP16, FP32, UINT8, DType
from epigen.gpus import TARGETS
from epigen.ir.check import check
from epigen.ir.graph import Graph
from epigen.ir.passes import normalise
from epigen.lang.parser import parse

SHAPE = (4096, 4096, 4096)
TARGET = TARGETS["sm_90"]


def lowered(text: str, **dtypes: DType | None) -> tuple[Graph, KernelSpec]:
    graph = normalise(check(parse(text)))
    return graph, lower(graph, Signature(FP16, FP16, tuple(dtypes.items()), k_multiple=256))


def problem(text: str, **dtypes: DType | None) -> Problem:
    return problem_of(*lowered(text, **dtypes), SHAPE, TARGET.part, "9.0")


def test_inputs_are_spelled_in_the_order_of_use() -> None:
    found = problem("z = drelu(mm, mask) * alpha + residual; z + bias, sum(z * gate[m], n)", mask=UINT8, alpha=None, residual=FP16, bias=FP32, gate=BF16)
    assert found.inputs == ("bits", "scalar", "fp16[mn]", "fp32[n]", "bf16[m]")
    assert problem("mm").inputs == ()
    # the order in which a call, or the signature made from it, lists them is of no account
    assert problem("mm + bias + residual", residual=FP32, bias=FP16).inputs == ("fp16[n]", "fp32[mn]")


def test_a_scalar_on_the_device_is_the_same_problem_as_a_number() -> None:
    assert problem_key(problem("mm * alpha", alpha=None)) == problem_key(problem("mm * alpha", alpha=FP32))


def test_names_are_none_of_it() -> None:
    one = problem("relu(mm + bias) + residual", bias=FP32, residual=FP16)
    other = problem("relu(mm + shift[n]) + skip[m, n]", shift=FP32, skip=FP16)
    assert problem_key(one) == problem_key(other)
    swapped = problem("relu(mm + bias) + residual", bias=FP16, residual=FP32)
    assert problem_key(one) != problem_key(swapped) and one.spec == swapped.spec


def test_what_reduced_outputs_are_cast_to_is_none_of_it() -> None:
    """A bias gradient in the bias's dtype is tuned with the same in fp32; a tile that is cast moves other numbers of bytes."""
    one = problem("dz = drelu(mm, mask); dz, bgrad(dz)", mask=UINT8)
    other = problem("dz = drelu(mm, mask); dz, cast(bgrad(dz), bf16)", mask=UINT8)
    assert problem_key(one) == problem_key(other) and one.outputs == other.outputs == ("fp16", "fp32")
    tile = problem("dz = drelu(mm, mask); cast(dz, fp32), bgrad(dz)", mask=UINT8)
    assert tile.spec != one.spec and tile.outputs == ("fp32", "fp32")
    packed = problem("z = mm + bias; relu(z), bitmask(z > 0)", bias=FP16)
    assert packed.outputs == ("fp16", "uint8")


def test_a_call_with_other_inputs_borrows(tmp_path: Path) -> None:
    """Through the chooser, as a kernel asks it."""
    database = opened(tmp_path)
    graph, half = lowered("relu(mm + bias)", bias=FP16)
    _, full = lowered("relu(mm + bias)", bias=FP32)
    tuned = problem_of(graph, half, SHAPE, TARGET.part, "9.0")
    run = {"median_us": 1.0, "spread_us": 0.0, "baseline_us": 1.0, "trials": {}, "date": "2026-11-05T12:00:00Z", "triton": TRITON, "torch": "2.13.0"}
    database.add(Record.make(tuned, config(64), **run, epigen="0.1.0"))
    chooser = choose.Chooser(graph, database)
    whys = [chooser(spec, SHAPE, TARGET, "").why for spec in (half, full)]
    assert "with inputs" not in whys[0] and "borrowed" not in whys[0]
    assert whys[1] == "borrowed from 4096x4096x4096 (with inputs fp16[n]), the nearest tuned shape of this program on H100, H200"
