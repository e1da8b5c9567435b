"""Groups as a problem to tune and to choose for: what is asked, the oracle's view of a call, records, look-up and the first call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tuned import TRITON, config, opened, problem, record

import epigen
from epigen import cli
from epigen.choose.choose import Chooser
from epigen.choose.space import Space
from epigen.db.database import Database
from epigen.db.records import parse, render
from epigen.dtypes import BF16, FP16, FP32, DType
from epigen.errors import CallError, SuiteError
from epigen.gpus import DEFAULT_TARGET
from epigen.ir.program import graph_of
from epigen.perf import limits
from epigen.runtime import batches, groups, outputs, verify
from epigen.runtime.device import THIS_MACHINE
from epigen.runtime.kernel import Kernel
from epigen.runtime.rendering import renderer
from epigen.shapes import Shape
from epigen.tuning import request, suite, table
from epigen.tuning.first_use import FirstUse
from epigen.tuning.runner import Replay
from epigen.tuning.task import Baseline, Outcome, Task
from epigen.tuning.tune import tune_one

EXPERTS = (8, 256, 512, 256)
OF_ROWS = "z = relu(mm * scale[m] + bias) + residual + m - n; z, bitmask(z > 0), bgrad(z), sum(z, n), sum(a, k)"
OF_K = "z = dot(a * row[m], b * scale[k,n]) + residual; z, sum(z, m)"
UNIT = "silu(mm) * dot(a, up[k,n])"


def asked(text: str, shape: Shape, along: str, dtype: DType = FP16, layout: str = "nt") -> Task:
    return Task(graph_of(text), shape, dtype, dtype, (dtype,), layout, "ieee", DEFAULT_TARGET, groups=along)


@pytest.mark.parametrize(("text", "along"), [(OF_ROWS, "m"), (OF_K, "k"), ("mm", "m"), (UNIT, "m")])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_the_oracle_sees_each_group(text: str, along: str, layout: str) -> None:
    task = asked(text, (3, 24, 40, 16), along, FP32, layout)
    kernel, given = epigen.compile(text), task.sample("cpu")
    verify.demand(verify.differences(kernel, given))
    results = given.call(kernel)()
    results = [r.clone() for r in ([results] if isinstance(results, torch.Tensor) else results)]
    (results[0][2 * 24 + 5] if along == "m" else results[0][2, 5])[7] += 1.0
    wrong = verify.Oracle.of(kernel.graph, given).differences(results)
    assert [d.ok for d in wrong] == [False] + [True] * (len(results) - 1) and wrong[0].where == (5, 7)


@pytest.mark.parametrize(("text", "along", "layout"), [(OF_ROWS, "m", "nt"), (OF_ROWS, "m", "nn"), (UNIT, "m", "nt"), ("mm", "k", "tn"), (OF_K, "k", "tn")])
def test_a_task_is_signed_as_its_call(text: str, along: str, layout: str) -> None:
    """So that what is tuned is the kernel that calls run."""
    task = asked(text, EXPERTS, along, layout=layout)
    calls: list[tuple[object, ...]] = []

    class Called:
        graph = task.graph

        def __call__(self, a: torch.Tensor, b: torch.Tensor, out: None, **inputs: object) -> None:
            assert out is None
            kernel = epigen.compile(text)._grouped
            operands, given, batch = groups.one(kernel.graph, kernel._inputs, (a, b), inputs)
            m, n, k = a.shape[0], b.shape[-1], a.shape[1]
            written = outputs.of(kernel.graph, FP16)
            buffers, batch = batches.with_outputs(batch, written, {}, m, n)
            calls.append((batch.problem(m, n, k), kernel._signature((m, n, k), operands, given, buffers, written, batch)))

    task.sample("meta").call(Called())()  # type: ignore[arg-type]
    shape, signature = calls[0]
    mine = task.spec.signature
    assert shape == EXPERTS
    assert (signature.grouped, signature.layout, set(signature.tma), signature.k_multiple) == (along, layout, set(mine.tma), mine.k_multiple)  # type: ignore[attr-defined]


def test_groups_borrow_from_groups_alone(tmp_path: Path) -> None:
    database = opened(tmp_path)
    database.add(record((64, 1024, 1024, 128)))
    wanted = replace(problem((64, 1024, 1024, 128)), groups="m")
    assert database.find(wanted, TRITON) is None
    for along in "km":
        of_groups = replace(record((32, 1024, 1024, 128), config=config(64)), groups=along)
        database.add(of_groups)
        found = database.find(wanted, TRITON)
        assert (found is not None) == (along == "m")
    alone = database.find(problem((64, 1024, 1024, 128)), TRITON)
    assert alone is not None and alone.how == "exact" and not alone.record.groups


def test_a_record_of_groups_reads_back_and_others_stand_as_before() -> None:
    batch = record((64, 1024, 1024, 128))
    of_rows, of_k = (replace(batch, groups=along) for along in "mk")
    assert '"groups": "m"' in of_rows.text and "groups" not in batch.text and "groups along k" in str(of_k)
    assert len({batch.key, of_rows.key, of_k.key, replace(batch, invariant="m").key}) == 4
    read = parse(render(batch.gpu, batch.capability, [batch, of_rows, of_k]).encode())
    assert sorted(read.records, key=lambda r: r.groups) == [batch, of_k, of_rows] and not read.complaints


@pytest.mark.parametrize(("text", "along", "layout"), [("relu(mm + bias)", "m", "nt"), (UNIT, "m", "nt"), ("mm", "k", "tn")])
def test_groups_are_tuned_and_chosen_for(text: str, along: str, layout: str, tmp_path: Path) -> None:
    one = asked(text, (8, 256, 512, 256), along, BF16, layout)
    space = Space(one.spec, one.shape, one.target)
    points = list(space.every())[:200]
    assert not any(limits.unfit(one.spec, point, one.shape, one.target) for point in points)
    rows = {point: Outcome("ok", 10.0 + i % 7, 0.1, 50) for i, point in enumerate(points)}
    database = Database(tmp_path, seeds=())
    tuned = tune_one(one, database, trials=12, runner=Replay(rows, Baseline(12.0, 20.0)))
    assert tuned.record is not None and tuned.record.groups == along and f"groups along {along}" in str(tuned)
    chooser = Chooser(one.graph, database)
    chosen = chooser(one.spec, one.shape, one.target, "")
    assert chosen.config == tuned.record.kernel_config and "(exact)" in chosen.why
    batch = replace(one, groups="").spec
    assert "tuned for" not in chooser(batch, one.shape, one.target, "").why
    again = table.from_json(table.to_json(table.Table(one, Baseline(12.0, 20.0), rows, {})))
    assert again.task == one and again.task.problem == one.problem


def test_ever_other_numbers_of_rows_along_k_have_one_shape() -> None:
    batch = batches.Batch((8,), {}, "k")
    assert {batch.problem(64, 128, k) for k in range(8 * 64 + 1, 8 * 128 + 1)} == {(8, 64, 128, 128)} and batch.problem(64, 128, 0) == (8, 64, 128, 0)


def test_a_first_call_of_groups_tunes_as_any() -> None:
    kernel = epigen.compile("relu(mm)", tune="missing")
    assert kernel._grouped._at_call is kernel._at_call is not kernel._choose


@pytest.mark.parametrize(
    ("text", "shape", "along", "why"),
    [
        ("mm", (256, 512, 256), "m", "256x512x256 is one: put the number of groups in front"),
        ("mm / extent(m)", EXPERTS, "m", "the program computes with the number of rows"),
        ("mm + pos[m % P, n]", EXPERTS, "m", "input 'pos' has one value for several of m"),
        ("dot(a, b * s[k/32,n])", EXPERTS, "k", "input 's' has one value for several of k"),
    ],
)
def test_what_cannot_be_tuned(text: str, shape: Shape, along: str, why: str) -> None:
    with pytest.raises(CallError) as refused:
        asked(text, shape, along)
    assert why in str(refused.value)


def test_groups_are_asked_for_in_words() -> None:
    """In Python, in a suite, and on the command line."""
    with pytest.raises(CallError, match="unknown groups 'n'"):
        request.every(["mm"], [EXPERTS], groups="n")
    with pytest.raises(CallError, match="invariant"):
        request.every(["mm"], [EXPERTS], ["bf16"], invariant="m", groups="m")[0].task(DEFAULT_TARGET)
    read = suite.parse('[[problem]]\nprogram = "mm"\nshapes = "8x256x512x256"\ngroups = "k"\n[[problem]]\nprogram = "mm"\nshapes = "8x256x512x256"\n')
    assert [r.groups for r in read] == ["k", ""]
    with pytest.raises(SuiteError, match="groups"):
        suite.parse('[[problem]]\nprogram = "mm"\nshapes = "8x256x512x256"\ngroups = "n"\n')
    said = CliRunner().invoke(cli.main, ["tune", "mm", "--shape", "8x256x512x256", "--groups", "n"])
    assert said.exit_code == 2 and "--groups" in said.output


@pytest.mark.gpu
@pytest.mark.parametrize("along", ["m", "k"])
def test_groups_are_tuned_on_a_gpu(along: str, tmp_path: Path) -> None:
    """Measured, recorded, and what a call runs; and at the first use of another program."""
    database, target = Database(tmp_path, seeds=()), THIS_MACHINE.at_hand()
    assert target is not None
    graph = graph_of("mm * s")
    task = Task(graph, (8, 256, 256, 128), BF16, BF16, (BF16,), "nt" if along == "m" else "tn", "ieee", target, groups=along)
    tuned = tune_one(task, database, trials=8)
    assert tuned.result is not None and tuned.result.baseline.mm_us > 0 and tuned.record is not None
    kernel = Kernel(graph, renderer(), Chooser(graph, database))
    verify.demand(verify.differences(kernel, task.sample("cuda")))
    assert kernel.config == tuned.result.winner
    graph = graph_of("relu(mm)")
    missing = Kernel(graph, renderer(), FirstUse(database).chooser(graph))
    verify.demand(verify.differences(missing, replace(task, graph=graph).sample("cuda")))
    assert [(r.shape, r.groups) for _, r in database.records()] == 2 * [((8, 256, 256, 128), along)]
