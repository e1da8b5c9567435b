"""Several products at once as a problem to choose for and to tune: signatures, buckets, look-up, the model, the oracle, records and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tuned import TRITON, config, opened, problem, record

import epigen
from epigen import cli, gpus
from epigen.choose import rule
from epigen.choose.choose import Chooser
from epigen.choose.explain import explain
from epigen.choose.space import Space
from epigen.codegen.lower import lower
from epigen.codegen.spec import Choice, KernelSpec
from epigen.codegen.standalone import standalone
from epigen.db.database import Database
from epigen.db.problem import capability, coarse_bucket, fine_bucket, problem_of
from epigen.db.records import Record, parse, render
from epigen.dtypes import BF16, FP16, FP32
from epigen.errors import CallError, ConfigError
from epigen.gpus import DEFAULT_TARGET
from epigen.ir.program import graph_of
from epigen.perf import limits, model
from epigen.perf.traffic import traffic
from epigen.runtime import batches, outputs, verify
from epigen.runtime.device import THIS_MACHINE
from epigen.runtime.kernel import Kernel
from epigen.runtime.loader import triton_version
from epigen.runtime.rendering import renderer
from epigen.shapes import Shape, each, extents, products
from epigen.tuning import request, table
from epigen.tuning.first_use import FirstUse
from epigen.tuning.runner import Replay
from epigen.tuning.task import Baseline, Outcome, Task
from epigen.tuning.tune import tune_one

HEADS = (64, 1024, 1024, 128)
EVERYTHING = "z = relu(mm + bias) + residual; z, bitmask(z > 0), bgrad(z), sum(z, n), sum(z)"


def spec_at(text: str, shape: Shape, layout: str = "nn") -> KernelSpec:
    kernel = epigen.compile(text)
    return lower(kernel.graph, kernel.signature_of(FP16, shape, layout))


def test_a_shape_says_how_many_products_there_are() -> None:
    assert (products((2, 3, 4)), products((5, 2, 3, 4)), products((0, 2, 3, 4))) == (1, 5, 0)
    assert (each((2, 3, 4), 6, 7, 8), each((5, 2, 3, 4), 6, 7, 8)) == ((6, 7, 8), (5, 6, 7, 8))
    assert extents(HEADS) == "64x1024x1024x128"
    assert request.shape_of("64x1024x1024x128") == request.shape_of([64, 1024, 1024, 128]) == HEADS
    for wrong in ("64", "64x64", "2x64x1024x1024x128", "64x1024x1024x", [1, 2], [1, 2, 3, 4, 5], [1, 2, 3, -4], [1, 2, 3, 4.0]):
        with pytest.raises(CallError, match="BxMxNxK"):
            request.shape_of(wrong)


@pytest.mark.parametrize("text", [EVERYTHING, "mm * s", "drelu(mm, mask)", "dot(relu(a) * norm[k], b)", "dot(a * gate[m,k], b)"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_a_problem_is_signed_as_a_call_of_tensors_without_gaps(text: str, layout: str) -> None:
    """So that what is tuned is the kernel that calls run, to the divisors of the distances between products."""
    kernel = epigen.compile(text)
    for shape in ((3, 24, 20, 12), (4, 64, 128, 64), (2, 37, 45, 33), (1, 16, 16, 16)):
        m, n, k = shape[1:]
        sample = verify.sample(kernel.graph, shape, FP16, FP16, FP16, device="meta", layout=layout)
        operands, inputs, batch = batches.one(kernel._inputs, (sample.a, sample.b), sample.inputs)
        assert batch is not None and batch.count == shape[0]
        written = outputs.of(kernel.graph, FP16)
        buffers, batch = batches.with_outputs(batch, written, {}, m, n)
        called = kernel._signature((m, n, k), operands, inputs, buffers, written, batch)
        assert called == kernel._signature_like(shape, operands, inputs) and called.batched


def test_buckets_round_the_number_of_products() -> None:
    assert fine_bucket((48, 1000, 512, 64), "nn") == (64, 1024, 512, 64)
    assert coarse_bucket((33, 513, 512, 64), "nn") == (64, 1024, 512, 64)
    assert fine_bucket((1, 16, 512, 64), "nn") == (1, 16, 512, 64)


def test_a_batch_borrows_from_batches_alone(tmp_path: Path) -> None:
    database = opened(tmp_path)
    wanted = problem((48, 1024, 1024, 128))
    database.add(record((1024, 1024, 128)))
    database.add(record((48 * 1024, 1024, 128)))
    assert database.find(wanted, TRITON) is None
    for shape, block_m in (((4, 1024, 1024, 128), 32), ((64, 2048, 1024, 128), 64), ((64, 1024, 1024, 128), 128), ((48, 1024, 1024, 128), 256)):
        added = record(shape, config=config(block_m))
        database.add(added)
        borrowed = database.find(wanted, TRITON)
        assert borrowed is not None and borrowed.record == added and extents(shape) in borrowed.why
    alone = database.find(problem((1024, 1024, 128)), TRITON)
    assert alone is not None and alone.how == "exact" and alone.record.shape == (1024, 1024, 128)


def test_a_record_of_a_batch_reads_back_and_others_stand_as_before() -> None:
    several, one = record(HEADS), record((1024, 1024, 128))
    assert '"shape": [64, 1024, 1024, 128]' in several.text and '"shape": [1024, 1024, 128]' in one.text
    assert several.key != one.key
    read = parse(render(several.gpu, several.capability, [several, one]).encode())
    assert sorted(read.records, key=lambda r: r.shape) == [several, one] and not read.complaints


@pytest.mark.parametrize("text", ["mm * s", EVERYTHING])
def test_what_was_tuned_for_one_number_of_products_is_chosen_for_those_of_its_bucket(text: str, tmp_path: Path) -> None:
    target = DEFAULT_TARGET
    spec, winner = spec_at(text, HEADS), config(64)
    database = Database(tmp_path, seeds=())
    chooser = Chooser(graph_of(text), database)
    assert chooser(spec, HEADS, target, "").config == rule.choose(spec, HEADS, target).config
    tuned = problem_of(graph_of(text), spec, HEADS, target.part, capability(target))
    database.add(
        Record.make(
            tuned, winner, median_us=60.0, spread_us=0.1, trials={"ok": 4}, date="2026-11-26T12:00:00Z", triton=triton_version(), torch="2.13.0", epigen="0.1.0"
        )
    )
    exact, near = chooser(spec, HEADS, target, ""), chooser(spec, (50, *HEADS[1:]), target, "")
    assert exact.config == winner and "(exact)" in exact.why
    assert near.config == winner and "33 to 64 products" in near.why


@pytest.mark.parametrize("target", gpus.TARGETS)
def test_what_is_searched_for_a_batch_can_run(target: str) -> None:
    there = gpus.TARGETS[target]
    for text, shape in (("mm * s", HEADS), (EVERYTHING, (8, 16, 4096, 4096)), ("relu(mm + bias)", (1024, 70, 50, 30)), ("mm", (2, 128, 128, 64))):
        space = Space(spec_at(text, shape, "nt"), shape, there)
        for point in [*space.outline()][:200]:
            assert limits.unfit(space.spec, point, shape, there) == "" and space.legal(point)


def test_one_product_of_a_batch_takes_what_it_takes_alone() -> None:
    """The model of a batch of one is that of its product; of many times as many products all work is as much more."""
    gpu = gpus.DEFAULT
    for text in ("mm * s", EVERYTHING):
        alone, batched = spec_at(text, (512, 1024, 256)), spec_at(text, (1, 512, 1024, 256))
        for point in Space(batched, (1, 512, 1024, 256), gpu.target).outline():
            assert model.estimate_us(alone, point, (512, 1024, 256), gpu) == model.estimate_us(batched, point, (1, 512, 1024, 256), gpu)
            one, many = (model.estimate_us(batched, point, (count, 512, 1024, 256), gpu) for count in (64, 1024))
            assert 12 < (many.us - many.launch_us) / (one.us - one.launch_us) < 20
        assert traffic(batched, (7, 512, 1024, 256)).flops == 7 * traffic(alone, (512, 1024, 256)).flops


def test_after_a_call_on_the_cpu_the_kernel_of_all_its_products_is_shown() -> None:
    kernel = epigen.compile("mm * s")
    kernel(torch.zeros(64, 1024, 128, dtype=torch.float16), torch.zeros(128, 1024, dtype=torch.float16), s=0.5)
    signature = kernel.signature_of(FP16, HEADS)
    assert kernel.config == kernel.plan(HEADS, signature=signature).choice.config and extents(HEADS) in kernel.explain()
    assert "num_products" in kernel.source() or "batch_id" in kernel.source()


def test_an_explanation_is_of_all_products() -> None:
    spec = spec_at("mm * s", HEADS)
    said = explain(spec, HEADS, gpus.DEFAULT, Choice(config(), "given"))
    assert said.traffic.flops == 2.0 * 64 * 1024 * 1024 * 128 and said.estimate.tiles == 64 * 8 * 8


def test_the_oracle_sees_each_product() -> None:
    kernel = epigen.compile(EVERYTHING)
    given = verify.sample(kernel.graph, (3, 20, 24, 16), FP32, FP32, FP32)
    assert given.a.shape == (3, 20, 16) and given.inputs["residual"].shape == (3, 20, 24) and given.inputs["bias"].shape == (24,)
    verify.demand(verify.differences(kernel, given))
    oracle = verify.Oracle.of(kernel.graph, given)
    results = [r.clone() for r in kernel(given.a, given.b, **given.inputs)]
    results[0][2, 5, 7] += 1.0
    wrong = oracle.differences(results)
    assert [d.ok for d in wrong] == [False, True, True, True, True] and wrong[0].where == (5, 7)


@pytest.mark.parametrize(
    ("text", "shape"), [("relu(mm + bias)", (3, 40, 48, 32)), ("dot(relu(a) * norm[k], b)", (40, 48, 32)), ("dot(a, b * col[n])", (2, 40, 48, 32))]
)
def test_a_problem_is_tuned_and_its_table_reads_back(text: str, shape: Shape, tmp_path: Path) -> None:
    one = Task(graph_of(text), shape, BF16, BF16, (BF16,), "nt", "ieee", DEFAULT_TARGET)
    space = Space(one.spec, one.shape, one.target)
    points = list(space.every())[:200]
    rows = {point: Outcome("ok", 10.0 + i % 7, 0.1, 50) for i, point in enumerate(points)}
    database = Database(tmp_path, seeds=())
    tuned = tune_one(one, database, trials=12, runner=Replay(rows, Baseline(12.0, 20.0)))
    assert tuned.record is not None and tuned.record.shape == one.shape and tuned.result is not None
    chosen = Chooser(one.graph, database)(one.spec, one.shape, one.target, "")
    assert chosen.config == tuned.result.winner and "(exact)" in chosen.why
    again = table.from_json(table.to_json(table.Table(one, Baseline(12.0, 20.0), rows, {})))
    assert again.task == one and again.task.problem == one.problem


@pytest.mark.triton
@pytest.mark.slow
def test_the_command_line_takes_batches() -> None:
    said = json.loads(CliRunner().invoke(cli.main, ["explain", "mm * s", "--shape", "64x1024x1024x128", "--gpu", "H100", "--json"]).output)
    assert said["shape"] == list(HEADS) and said["flops"] == 2.0 * 64 * 1024 * 1024 * 128
    compiled = CliRunner().invoke(cli.main, ["compile", "mm * s", "--shape", "64x1024x1024x128", "--target", "sm_90", "--schedule", "tiled"])
    assert compiled.exit_code == 0 and "batch_id" in compiled.output
    refused = CliRunner().invoke(cli.main, ["compile", "mm * s", "--shape", "64x1024x1024x128", "--target", "sm_90", "-o", "fused.py"])
    assert refused.exit_code != 0 and "one product" in refused.output


def test_a_file_of_its_own_is_of_one_product() -> None:
    kernel = epigen.compile("mm * s")
    plan = kernel.plan(HEADS)
    with pytest.raises(ConfigError, match="one product"):
        standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered)


@pytest.mark.gpu
def test_a_batch_is_tuned_on_a_gpu(tmp_path: Path) -> None:
    """Measured, recorded, and what a call of as many products runs; and at the first use of another program."""
    database, target = Database(tmp_path, seeds=()), THIS_MACHINE.at_hand()
    assert target is not None
    graph = graph_of("mm * s")
    tuned = tune_one(Task(graph, (16, 256, 256, 64), BF16, BF16, (BF16,), "nn", "ieee", target), database, trials=8)
    assert tuned.result is not None and tuned.result.baseline.mm_us > 0 and tuned.record is not None
    a, b = torch.randn(16, 256, 64, device="cuda").bfloat16(), torch.randn(16, 64, 256, device="cuda").bfloat16()
    kernel = Kernel(graph, renderer(), Chooser(graph, database))
    torch.testing.assert_close(kernel(a, b, s=0.5), (torch.bmm(a, b).float() * 0.5).bfloat16(), rtol=2e-2, atol=2e-2)
    assert kernel.config == tuned.result.winner
    graph = graph_of("relu(mm)")
    missing = Kernel(graph, renderer(), FirstUse(database).chooser(graph))
    torch.testing.assert_close(missing(a, b), torch.bmm(a, b).relu(), rtol=2e-2, atol=2e-2)
    assert [r.shape for _, r in database.records()] == 2 * [(16, 256, 256, 64)]
