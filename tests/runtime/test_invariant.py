"""Rows of invariant programs have the same bits whatever M is, by the reference and by interpreted kernels; and how the option is given, kept and refused."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

import epigen
from epigen.codegen import schedules
from epigen.dtypes import FP16
from epigen.errors import CallError, CompileError, ConfigError
from epigen.gpus import TARGETS
from epigen.ir import reference
from epigen.runtime import loader
from epigen.runtime.kernel import Kernel

ROWS, K, N = 130, 96, 80
PARTS = ((0, 1), (0, 2), (0, 7), (3, 20), (0, 64), (1, 66), (65, 130), (129, 130))
"""Of the rows, calls of their own."""
PROGRAMS = (
    "mm", "gelu_tanh(mm + bias)", "y = silu(mm * row[m]) * gate[m,n]; y, bitmask(y > 0)", "y = mm * gate[m,n]; y, sum(y, n), logsumexp(mm, n), mean(gate[m,n], n)",
    "y = relu(mm); y, amax(y, n), sum(a, k)",
)  # fmt: skip
SPLIT = schedules.config("split_k", **dict(cases.SMALL.values), splits=2)


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def given(kernel: Kernel, low: int, high: int, dtype: torch.dtype, strided: bool = False) -> tuple[Tensor, ...]:
    """The outputs of a call of some of the rows. strided: rows that lie farther apart, from an odd address on."""
    a, b, gate = drawn(ROWS, K).to(dtype), drawn(N, K, seed=1).to(dtype).T, drawn(ROWS, N, seed=2).to(dtype)
    if strided:
        a, gate = (torch.cat([t, t[:, :3]], 1)[:, 1:].roll(1, 1)[:, : t.shape[1]].copy_(t) for t in (a, gate))
    values = {"bias": drawn(N, seed=3).to(dtype), "row": drawn(ROWS, seed=4)[low:high], "gate": gate[low:high]}
    found = kernel(a[low:high], b, **{n.name: values[n.name] for n in kernel.graph.inputs()})
    return found if isinstance(found, tuple) else (found,)


def unlike(kernel: Kernel, dtype: torch.dtype) -> list[tuple[int, int]]:
    """The calls of which some row has other bits than in the call of all rows."""
    whole = given(kernel, 0, ROWS, dtype)
    return [
        (low, high)
        for low, high in PARTS
        for strided in (False, True)
        if not all(torch.equal(part, rows[low:high]) for part, rows in zip(given(kernel, low, high, dtype, strided), whole, strict=True))
    ]


@pytest.mark.triton
@pytest.mark.parametrize("text", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "interpreter"])
def test_a_row_has_the_same_bits_in_every_batch(backend: str, dtype: torch.dtype, text: str) -> None:
    kernel = epigen.compile(text, backend=backend, invariant="m")
    assert unlike(kernel, dtype) == []
    one = given(kernel, 5, 6, dtype)
    for found, wanted in zip(one, given(epigen.compile(text, backend=backend), 5, 6, dtype), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.triton
def test_the_interpreter_multiplies_in_order_only_for_these(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []
    own = loader._multiplying_in_order
    monkeypatch.setattr(loader, "_multiplying_in_order", lambda: entered.append(True) or own())
    a, b = drawn(4, K), drawn(K, N)
    epigen.compile("mm", backend="interpreter")(a, b)
    assert not entered
    epigen.compile("mm", backend="interpreter", invariant="m")(a, b)
    assert entered
    from triton.runtime.interpreter import interpreter_builder

    assert "create_dot" not in vars(interpreter_builder)


@pytest.mark.triton
def test_whole_numbers_are_summed_as_ever() -> None:
    """So that what takes another order still takes all of them."""
    a, b = (torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(0)).half() for size in ((70, K), (K, 150)))
    product = a.float() @ b.float()
    for config in (None, cases.tiled(32, 64, fused_finalize=1), cases.persistent(subtiles=2)):
        out, rows, columns, of_a, whole = epigen.compile(
            "mm, sum(mm, n), sum(mm, m), sum(a, k), sum(mm)", backend="interpreter", config=config, invariant="m"
        )(a, b)  # fmt: skip
        assert torch.equal(out.float(), product) and torch.equal(rows, product.sum(1)) and torch.equal(columns, product.sum(0))
        assert torch.equal(of_a, a.float().sum(1)) and whole == product.sum()


def test_what_all_rows_have_a_part_in_is_of_all_rows() -> None:
    kernel, plain = (epigen.compile("y = relu(mm); y / extent(m), bgrad(y), sum(y, n), y, sum(y)", invariant=i) for i in ("m", None))
    a, b = (torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(0)).float() for size in ((9, 6), (6, 5)))
    for found, wanted in zip(kernel(a, b), plain(a, b), strict=True):
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()


def test_no_rows_and_several_products() -> None:
    kernel = epigen.compile("relu(mm + bias), sum(mm, n)", invariant="m")
    tile, rows = kernel(torch.ones(0, 4), torch.ones(4, 3), bias=torch.ones(3))
    assert tile.shape == (0, 3) and rows.shape == (0,)
    a, b = drawn(3, 20, K), drawn(K, N, seed=1)
    whole, few = (epigen.compile("mm", invariant="m")(t, b) for t in (a, a[:, 4:9]))
    assert torch.equal(whole[:, 4:9], few)


def test_a_kernel_over_a_product_is_invariant_too() -> None:
    kernel = epigen.compile("sum(mm, n), silu(mm)", invariant="m")
    mm = drawn(ROWS, 1003)
    for found, whole in zip(kernel.over(mm[7:8]), kernel.over(mm), strict=True):
        assert torch.equal(found, whole[7:8])
    assert kernel._over.numerics.invariant and not epigen.compile("silu(mm)")._over.numerics.invariant


# -- the text


def test_the_text_is_another_only_where_values_are_summed() -> None:
    """By neighbours: Triton shares values out over threads by what divides M."""
    config = cases.tiled(64, 64, 32)
    for text, changed in (("gelu(mm + bias)", False), ("amax(mm, n)", False), ("sum(mm, n)", True), ("logsumexp(mm, n)", True), ("mm, sum(a, k)", True)):
        invariant, plain = (epigen.compile(text, config=config, invariant=i).source(shape=(64, 256, 256), dtype=FP16) for i in ("m", None))
        said = "# a row of the result has the same bits whatever M is\n"
        assert said in invariant
        assert (invariant.replace(said, "") != plain) == changed == ("sum_in_order" in invariant) and "sum_in_order" not in plain
        if changed:
            assert re.findall(r"tl\.sum|tl\.cumsum", invariant) == []


def test_no_function_has_products_and_sums_made_one() -> None:
    for text in ("sum(mm, n), sum(a, k)", "relu(mm + bias)"):
        for invariant in ("m", None):
            functions = epigen.compile(text, invariant=invariant).plan((64, 256, 256), dtype=FP16).rendered.functions
            for function in functions:
                assert loader.options(function, TARGETS["sm_90"], False)["enable_fp_fusion"] == (invariant is None)


# -- how it is given


def test_what_is_no_index_is_refused() -> None:
    for wrong in ("n", "M", True, 1):
        with pytest.raises(CallError, match=r"unknown invariant .*(did you mean m|known are m)"):
            epigen.compile("mm", invariant=wrong)  # type: ignore[call-overload]


@pytest.mark.triton
def test_a_config_that_splits_k_is_refused_by_a_call() -> None:
    with pytest.raises(ConfigError, match="splits=2 adds up parts"):
        epigen.compile("mm", config=SPLIT, backend="interpreter", invariant="m")(drawn(4, K), drawn(K, N))


def test_where_triton_refuses_nothing_takes_its_place() -> None:
    kernel = epigen.compile("relu(mm)", invariant="m")
    with pytest.raises(ConfigError, match="no such luck; and the vendor's product"):
        kernel.plan((64, 64, 64), dtype=FP16, target=TARGETS["sm_90"], refused="no such luck")


@pytest.mark.triton
@pytest.mark.parametrize(("invariant", "attempts"), [("m", 1), (None, 2)])
def test_what_does_not_compile_fails(invariant: str | None, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary kernel tries the vendor's product then."""
    kernel, prepared = epigen.compile("relu(mm)", invariant=invariant), []
    plan = kernel.plan((64, 64, 64), dtype=FP16, target=TARGETS["sm_90"])

    def fails(*_: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(kernel, "_prepare", lambda *given: prepared.append(given) or SimpleNamespace(plan=plan, interpreted=False))
    monkeypatch.setattr(kernel, "_start", fails)
    with pytest.raises((CompileError, RuntimeError), match="does not compile: PassManager" if invariant else "PassManager"):
        kernel(torch.ones(2, 3), torch.ones(3, 4))
    assert len(prepared) == attempts


@pytest.mark.parametrize("way", [lambda k: pickle.loads(pickle.dumps(k)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_it_outlives_a_process(way: Callable[[Any], Any]) -> None:
    assert way(epigen.compile("mm", invariant="m")).numerics.invariant
    assert not way(epigen.compile("mm")).numerics.invariant


@pytest.mark.parametrize("over", [False, True], ids=["a call", "over"])
def test_torch_keeps_it_in_what_it_writes_down(over: bool) -> None:
    """A row of what torch.export has written has the bits of a call."""
    kernel = epigen.compile("sum(mm, n), mm", invariant="m")

    class Calls(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return kernel.over(a) if over else kernel(a, b)

    a, b = drawn(ROWS, 1003), drawn(1003, N)
    written = torch.export.export(Calls(), (a, b), strict=False)
    (call,) = (node for node in written.graph.nodes if "epigen" in str(node.target))
    assert call.kwargs["options"] == '{"invariant": "m"}'
    for found, one in zip(written.module()(a, b), kernel.over(a[3:4]) if over else kernel(a[3:4], b), strict=True):
        assert torch.equal(found[3:4], one)


def test_it_is_not_written_out_in_torchs_own_operations() -> None:
    class Calls(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return kernel(a, b)

    kernel = epigen.compile("relu(mm)", invariant="m")
    written = torch.export.export(Calls(), (drawn(2, 4), drawn(4, 3)), strict=False)
    with pytest.raises(CallError, match="which torch's own operations do not keep"):
        written.run_decompositions(epigen.decompositions())


def test_the_reference_of_others_takes_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    own = reference.product
    monkeypatch.setattr(reference, "product", lambda a, b, compute: counted.append(len(a)) or own(a, b, compute))
    for invariant, wanted in ((None, [5]), ("m", [1] * 5)):
        epigen.compile("relu(mm)", invariant=invariant)(drawn(5, 4), drawn(4, 3))
        assert counted == wanted
        counted.clear()
