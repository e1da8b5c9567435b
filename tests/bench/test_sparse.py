"""bench.sparse without a GPU: contenders on CPU tensors, where torch's products of sparse tensors are stood for, and made-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import ONE_H200
from sparse_on_cpu import products
from sparse_on_cpu import sparse as made_sparse

import epigen
from bench import readme, record, sparse, tables
from bench.checked import Wrong
from bench.sparse import CASES, CHOSEN, COMPILED, DENSE, MM, OURS, SEARCHED, SPARSE_MM, Case
from epigen.runtime.verify import Sample
from epigen.shapes import Shape

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.compile is given runs as it is, and so do torch's products."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with products():
        yield


def on_the_cpu(case: Case, tuned: bool = False) -> tuple[dict[str, Callable[[], Any]], Sample]:
    torch.manual_seed(0)
    given, beside = sparse.operands(case, (24, 64, 128), "cpu")
    return sparse.contenders(case, given, beside, made_sparse(given.b.t()), tuned), given


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contenders_compute_the_same(case: Case) -> None:
    found, given = on_the_cpu(case, tuned=True)
    assert set(found) == {MM, DENSE, SPARSE_MM, OURS, COMPILED, CHOSEN}  # a search there is of cuSPARSELt's alone
    sparse.check(found, case, given, "24x64x128")
    for name in (OURS, SPARSE_MM):
        with pytest.raises(Wrong, match=f"{name} at 24x64x128 is off by "):
            sparse.check(found | {name: lambda name=name: found[name]() * 1.05}, case, given, "24x64x128")


def row(case: Case, shape: Shape, tuned: bool = False) -> dict[str, Any]:
    times = {MM: 100.0, DENSE: 110.0, SPARSE_MM: 80.0, SEARCHED: 64.0, OURS: 88.0, COMPILED: 99.0} | ({CHOSEN: 90.0} if tuned else {})
    configs = {DENSE: "warp_specialized block_m=128", CHOSEN: "library block_m=8"}
    timed = {name: {"median_us": us} for name, us in times.items()}
    return {"program": case.name, "shape": list(shape), "dtype": "bf16", "configs": configs, "alg_id": 3, "timing": timed}


def test_the_result_says_where_which_is_faster() -> None:
    rows = [row(CASES[0], (64, 64, 64)), row(CASES[0], (64, 64, 128), True)]
    assert sparse.verdict(rows[:1]) == {"faster": 1, "of": 1}
    rows[0]["timing"][DENSE]["median_us"] = 44.0
    assert sparse.verdict(rows) == {"faster": 1, "of": 2, "chosen_takes_at_most": 1.023}


def test_the_script_tunes_writes_and_the_readme_shows_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sparse, "measured", row)
    monkeypatch.setattr(tables, "FOLDERS", (tmp_path,))
    assert readme.sparse_rows() == "Not measured yet: `python -m bench sparse`."
    for options in ([], ["--tuned"]):
        monkeypatch.setattr("sys.argv", ["sparse", "--commit", "abc1234", "--out", str(tmp_path), *options, "64x8192x8192"])
        sparse.main(ONE_H200)
    assert "64x8192x8192 gelu + bias: 88.0 us, times as fast as: mm 1.14, epigen, dense values 1.25" in capsys.readouterr().out
    for name in ("sparse_h200", "sparse_tuned_h200"):
        found = record.read(tmp_path / f"{name}.json")
        record.write(name, replace(found, environment={**found.environment, "gpu": "H200", "triton": "3.6.0", "driver": "580"}), tmp_path)
    shown = readme.sparse_rows()
    assert "| 64x8192x8192 gelu + bias | H200 | 1.25 | 1.12 | 1.14 | 1.25 | 1.56 | |" in shown
    assert "| 64x8192x8192 gelu + bias | H200, tuned | 1.25 | 1.12 | 1.14 | 1.25 | 1.56 | library, 1.22 |" in shown
    assert "H200, tuned: the sparse product is faster in 2 of 2. Measured on H200" in shown


def test_what_is_tuned_is_the_dense_and_the_sparse_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Any] = []
    operands = sparse.operands
    monkeypatch.setattr(epigen, "tune", lambda text, shape, **options: tuned.append((text, shape, options["sparse"])))
    monkeypatch.setattr(sparse, "operands", lambda case, _shape: operands(case, (24, 64, 128), "cpu"))
    monkeypatch.setattr(sparse.semi_structured, "compressed", lambda a, b, _side: (a, made_sparse(b.t()).t()))
    monkeypatch.setattr(sparse.timing, "cold", lambda found, **_: {name: {"median_us": 1.0} for name in found})
    found = sparse.measured(CASES[0], (64, 64, 64), True)
    assert tuned == [("gelu(mm + bias)", (64, 64, 64), None), ("gelu(mm + bias)", (64, 64, 64), "b")]
    assert set(found["configs"]) == {DENSE, CHOSEN} and CHOSEN in found["timing"] and "alg_id" not in found
