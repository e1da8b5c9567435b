"""Problems with a 2:4 sparse operand: what is asked for, what a worker is given, the space, records and look-up, tables and the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sparse_on_cpu import pruned
from tuned import PLAIN, RUN, TRITON, opened

from epigen import cli
from epigen.choose import rule
from epigen.choose.choose import Chooser
from epigen.choose.space import Space
from epigen.codegen import schedules
from epigen.db.database import Database
from epigen.db.lookup import Index
from epigen.db.records import Record, parse, render
from epigen.dtypes import FP16
from epigen.errors import CallError
from epigen.gpus import Target, by_name
from epigen.ir import bound
from epigen.ir.program import graph_of
from epigen.runtime import semi_structured, verify
from epigen.runtime.loader import triton_version
from epigen.tuning import report, request, suite, table
from epigen.tuning.runner import Replay
from epigen.tuning.task import Baseline, Outcome, Task
from epigen.tuning.tune import study_name, tune_one

H200: Target = by_name("H200").target
LIBRARY = schedules.config("library", block_m=8, block_n=128, num_warps=1)


def task(text: str = "relu(mm + bias)", shape: str = "512x1024x1024", sparse: str = "b", **asked: Any) -> Task:
    (one,) = request.every([text], [shape], sparse=sparse, **asked)
    return one.task(H200)


def test_a_request_says_which_operand_is_sparse() -> None:
    given = "".join(f'[[problem]]\nprogram = "mm"\nshapes = "64x64x64"\n{more}\n' for more in ("", 'sparse = "b"', 'sparse = "b"', 'sparse = "a"'))
    assert [r.sparse for r in suite.parse(given)] == ["", "b", "a"]
    assert (task().problem.sparse, task(sparse="").problem.sparse) == ("b", "")
    assert study_name(task()) != study_name(task(sparse=""))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sparse": "c"}, "unknown sparse operand 'c'"),
        ({"layouts": ["nn"]}, "layout nn: a 2:4 sparse b lies along k, as layout nt has it"),
        ({"layouts": ["tn"], "sparse": "a"}, "a 2:4 sparse a lies along k, as layout nn has it"),
        ({"shape": "64x60x64"}, "N a multiple of 16 and K one of 16, and they are 60 and 64"),
        ({"shape": "64x64x48", "dtype_names": ["int8"]}, "K one of 32"),
        ({"dtype_names": ["fp32"]}, "2:4 sparse fp32"),
        ({"weights": ["int8"]}, "both need the same dtype"),
        ({"shape": "2x64x64x64"}, "2x64x64x64 is a batch"),
        ({"invariant": "m"}, "the program is invariant"),
        ({"text": "dot(relu(a), b)"}, "of a 2:4 sparse operand is the vendor's"),
        ({"text": "mm, mm * 2", "dtype_names": ["int8"]}, "int32 beside other outputs"),
    ],
)
def test_what_cannot_be_sparse_is_said_before_anything_is_measured(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(CallError, match=said):
        task(**asked)


def test_the_sparse_product_competes_with_all_kernels_of_the_dense_values() -> None:
    one, dense = task(), task(sparse="")
    names = Space(one.spec, one.shape, H200).schedules
    assert "library" in names and names == Space(dense.spec, dense.shape, H200).schedules
    assert rule.choose(one.spec, one.shape, H200).config.schedule == "library" != rule.choose(dense.spec, dense.shape, H200).config.schedule


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_sample_has_two_of_four_values(side: str, dtype: torch.dtype) -> None:
    name = {torch.float16: "fp16", torch.int8: "int8", torch.float8_e4m3fn: "fp8e4m3"}[dtype]
    one = task("mm * 0.5", "64x96x128", side, dtype_names=[name])
    plain, made = replace_sparse(one).sample("cpu"), one.sample("cpu")
    held, before = (made.a, plain.a) if side == "a" else (made.b.t(), plain.b.t())
    assert held.dtype == dtype and held.stride(-1) == 1
    zeros = (held.float().view(-1, 4) == 0).sum(-1)
    assert zeros.min() >= 2 and torch.equal(held.float(), torch.where(held.float() != 0, before.float(), 0))
    kept, dropped = held.float().abs().view(-1, 4).sum(-1), pruned(before.contiguous()).float().abs().view(-1, 4).sum(-1)
    assert torch.equal(kept, dropped)


def replace_sparse(one: Task) -> Task:
    return replace(one, sparse="")


def test_a_worker_calls_the_library_with_the_sparse_operand_and_others_with_its_dense_values() -> None:
    one = task()
    sample = one.sample("meta")
    given = one.given(sample, LIBRARY)
    a, b = given.a, given.b
    assert a is sample.a and type(b) in semi_structured.TYPES and b.shape == sample.b.shape and b.is_meta
    assert one.given(sample, PLAIN) is sample
    other = task(sparse="a", layouts=["nn"]).given(sample, LIBRARY)
    assert type(other.a) in semi_structured.TYPES and other.b is sample.b


def test_the_bound_has_the_rounding_of_the_product_and_no_more() -> None:
    """The vendor's product of 16 bits is rounded before the epilogue: what that moves is no mistake, and twice that is."""
    graph, dtypes = graph_of("mm - shift[m,n]"), [FP16]
    given = verify.sample(graph, (16, 32, 64), FP16, FP16, FP16, seed=1)
    exact = given.a.double() @ given.b.double()
    inputs = {"shift": exact.half()}  # so that little more is left than what was rounded
    plain = bound.expect(graph, given.a, given.b, inputs, dtypes, "ieee")
    wider = bound.expect(graph, given.a, given.b, inputs, dtypes, "ieee", product=FP16)
    found = (exact.half() - inputs["shift"]).half()
    assert not bound.compare(found, plain[0]).ok and bound.compare(found, wider[0]).ok
    assert not bound.compare(found + 2 * exact.abs().max().half() * 2**-10, wider[0]).ok


def test_records_of_sparse_problems_are_kept_and_found_apart() -> None:
    one, dense = task(), task(sparse="")
    records = [Record.make(t.problem, config, **RUN) for t, config in ((one, LIBRARY), (dense, PLAIN))]
    assert len({r.key for r in records}) == 2 and records[0].apart == " (sparse b)" and records[1].apart == ""
    text = render(records[0].gpu, records[0].capability, records)
    assert parse(text.encode()).records == tuple(sorted(records, key=lambda r: (r.program, r.key))) and text.count('"sparse": "b"') == 1
    index = Index([records])
    for t, config in ((one, LIBRARY), (dense, PLAIN)):
        assert [f.config for f in index.candidates(t.problem, TRITON)] == [config]
        far = replace(t.problem, shape=(600, 1024, 1024))
        assert [f.config for f in index.near(far, TRITON)] == [config]


def test_a_call_takes_what_was_measured_for_its_shape_or_the_one_that_stands_for_it(tmp_path: Path) -> None:
    database, one = opened(tmp_path), task()
    database.add(Record.make(one.problem, PLAIN, **RUN | {"triton": triton_version()}))
    choose = Chooser(one.graph, database)
    for shape, config in (((512, 1024, 1024), PLAIN), ((400, 1024, 1024), PLAIN), ((513, 1024, 1024), None), ((512, 1024, 512), None)):
        found = choose(task(shape="x".join(map(str, shape))).spec, shape, H200, "")
        assert found.config == config or (config is None and found.config.schedule == "library" and "no measurement says" in found.why)


def test_a_recorded_table_of_a_sparse_problem_is_searched(tmp_path: Path) -> None:
    one = task()
    rows = {LIBRARY: Outcome("ok", 40.0, 0.1, 10), PLAIN: Outcome("ok", 60.0, 0.1, 10)}
    again = table.from_json(table.to_json(table.Table(one, Baseline(50.0, 60.0), rows, {})))
    assert again.task.sparse == "b"
    found = tune_one(again.task, Database(tmp_path / "db", seeds=()), trials=2, runner=Replay(again.rows, again.baseline))
    assert found.record is not None and (found.record.sparse, found.record.schedule) == ("b", "library")
    assert str(found).startswith("relu(mm + bias) 512x1024x1024 fp16 nt sparse b: ")
    assert report.name(again.task) == "relu(mm + bias) 512x1024x1024 fp16 sparse b nt" and report.record(again.task, found)["sparse"] == "b"
    shown = CliRunner().invoke(cli.main, ["db", "list", "--db", str(tmp_path / "db")]).stdout
    assert "relu(mm + bias) (sparse b)" in shown
