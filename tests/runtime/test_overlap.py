"""What a call writes shares no memory with what it reads, but for an input in whose place an output is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import LIBRARY, SMALL, split_k
from golden import Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epigen
from epigen.errors import CallError
from epigen.runtime import overlap

M, N, K = 32, 48, 24
BACKENDS = pytest.mark.parametrize("backend", ["reference", "interpreter"])


def whole(*size: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Small integers: their products' sums are exact."""
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def zeros(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(size, dtype=dtype)


# -- which places are one


def places(t: Tensor) -> list[int]:
    """The address of every byte."""
    found = [t.data_ptr()]
    for size, stride in zip(t.shape, t.stride(), strict=True):
        found = [at + i * stride * t.element_size() for at in found for i in range(size)]
    return [at + i for at in found for i in range(t.element_size())]


BUFFER = torch.zeros(4096, dtype=torch.uint8)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    dims = draw(st.integers(0, 2))
    size, stride = (tuple(draw(st.lists(st.integers(0, most), min_size=dims, max_size=dims))) for most in (6, 14))
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32]))
    return BUFFER.view(dtype).as_strided(size, stride, draw(st.integers(0, 60)))


@settings(max_examples=400, deadline=None)
@given(views(), views())
def test_two_tensors_share_a_byte(x: Tensor, y: Tensor) -> None:
    assert overlap.shared(x, y) == bool(set(places(x)) & set(places(y)))
    assert overlap.within(x) == (len(set(places(x))) < len(places(x)))


def test_views_of_a_large_buffer_are_told_apart_at_once() -> None:
    """The work does not grow with their extents: numpy gives up after a number of steps, and they would be taken to overlap."""
    held = torch.empty(1 << 26, dtype=torch.uint8).view(8192, 8192)
    apart = [(held[:, :4096], held[:, 4096:]), (held[::2, ::2], held[1::2, 1::2]), (held[::2], held[1::2]), (held[:, ::3], held[:, 1::3])]
    apart.append((held.view(-1).as_strided((3000, 1000), (8190, 6), 0), held.view(-1).as_strided((3000, 1000), (8196, 6), 1)))
    for x, y in apart:
        assert overlap.near(x, y) and not overlap.shared(x, y) and not overlap.shared(y, x)
    assert overlap.shared(held[::2], held[:, ::2]) and overlap.shared(held[:, :4097], held[:, 4096:])


# -- what is refused

APART = "give it memory of its own$"
PLACE = "give it memory of its own, or exactly input '{}''s, in whose place it may be computed: the same addresses and strides".format


def refused(backend: str, text: str, out: Any, words: str, a: Tensor | None = None, b: Tensor | None = None, **inputs: Tensor) -> None:
    """When the call is made for the first time, and when one like it has been prepared; and nothing has been written then."""
    kernel = epigen.compile(text, config=SMALL if backend == "interpreter" else None, backend=backend)
    a, b = whole(M, K) if a is None else a, whole(K, N) if b is None else b
    outs = out if isinstance(out, tuple) else (out,)
    kept = [t.clone() for t in (a, b, *inputs.values(), *outs)]
    with pytest.raises(CallError, match=words):
        kernel(a, b, out=out, **inputs)
    kernel(a, b, out=tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in outs), **inputs)
    with pytest.raises(CallError, match=words):
        kernel(a, b, out=out, **inputs)
    assert all(map(torch.equal, kept, (a, b, *inputs.values(), *outs)))


@pytest.mark.triton
@BACKENDS
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(M, M), lambda t: t.T, lambda t: t[:]], ids=["itself", "a view", "transposed", "a slice"])
def test_an_operand_is_not_written(backend: str, view: Callable[[Tensor], Tensor]) -> None:
    square, other = whole(M, M), whole(M, M, seed=1)
    refused(backend, "mm + 0", view(square), f"out for 'out' overlaps operand a: {APART}", square, other)
    refused(backend, "mm + 0", view(square), f"out for 'out' overlaps operand b: {APART}", other, square)


@pytest.mark.triton
@BACKENDS
def test_an_operand_is_not_written_in_part(backend: str) -> None:
    buffer = whole(2 * M * K)
    refused(backend, "mm", buffer[M * K - 1 :][: M * 16].view(M, 16), f"overlaps operand a: {APART}", buffer[: M * K].view(M, K), whole(K, 16))


@pytest.mark.triton
@BACKENDS
def test_an_output_is_no_other_output(backend: str) -> None:
    one, side = zeros(M + 1, N), zeros(M, N + 2)
    refused(backend, "mm, mm * 2", (one[:M], one[1:]), f"out for 'out1' overlaps out for 'out0': {APART}")
    refused(backend, "mm, mm * 2", (one[:M], one[:M]), f"out for 'out1' overlaps out for 'out0': {APART}")
    refused(backend, "mm, sum(mm, n)", (side[:, :N], side.view(torch.float32)[:, N // 2 - 1]), f"out for 'out1' overlaps out for 'out0': {APART}")


@pytest.mark.triton
@BACKENDS
@pytest.mark.parametrize(
    ("text", "like", "name"),
    [
        ("mm, mm + x[m,n]", "tile", "x"),
        ("z = mm + x[n]; z", "tile's row", "x"),
        ("mm * x", "tile's element", "x"),
        ("sum(mm + x[m,n], m) + y[n], mm", "tile, second", "x"),
        ("sum(mm + x[n], m)", "column", "x"),  # what is under a reduction is no part of what the output is computed from element by element
        ("sum(mm * x[m], n)", "row", "x"),
        ("bitmask(mm > 0), drelu(mm, mask)", "mask", "mask"),
    ],
)
def test_an_input_that_an_output_does_not_replace_is_not_written(backend: str, text: str, like: str, name: str) -> None:
    tile, column, row = whole(M, N), whole(N, dtype=torch.float32), whole(M, dtype=torch.float32)
    mask = epigen.compile("bitmask(mm > 0)")(whole(M, K), whole(K, N))
    out, given = {
        "tile": ((tile, zeros(M, N)), tile),
        "tile's row": (tile, tile[0]),
        "tile's element": (tile, tile[3, 3:4]),
        "tile, second": ((column, tile), tile),
        "column": (column, column),
        "row": (row, row),
        "mask": ((mask, zeros(M, N)), mask),
    }[like]
    refused(backend, text, out, f"overlaps input '{name}': {APART}", **{name: given}, **({"y": column.clone()} if "y[n]" in text else {}))


@pytest.mark.triton
@BACKENDS
def test_an_input_is_replaced_at_its_own_place_only(backend: str) -> None:
    tile, square, wide, shifted, rows = whole(M, N), whole(M, M), zeros(M, N, dtype=torch.float32), zeros(M + 1, N), zeros(M + 1, dtype=torch.float32)
    text = "mm + x[m,n]"
    refused(backend, text, shifted[:M], PLACE("x"), x=shifted[1:])
    refused(backend, text, square.T, PLACE("x"), b=whole(K, M), x=square)
    refused(backend, text, tile, PLACE("x"), x=tile[:1].expand(M, N))
    refused(backend, text, wide.view(torch.float16)[:, :N], PLACE("x"), x=wide)
    refused(backend, "sum(mm, n) + x[m]", rows[:M], PLACE("x"), x=rows[1:])
    refused(backend, "mm + x[m,n] - y[m,n]", tile, PLACE("y"), x=tile, y=tile[:1].expand(M, N))


@pytest.mark.triton
@BACKENDS
def test_a_product_that_is_given_is_replaced_at_its_own_place_only(backend: str, golden: Golden) -> None:
    kernel, square = epigen.compile("mm * 2, sum(mm)", backend=backend), whole(M, M)
    expected = kernel.over(square)[0]
    with golden.raises(CallError):
        kernel.over(square, out={"out0": square.T})
    assert torch.equal(kernel.over(square, out={"out0": square})[0], expected)


@BACKENDS
@pytest.mark.parametrize("strides", [(N, 0), (0, 1), (1, 1), (N - 1, 1), (2, 3)], ids=str)
def test_elements_of_an_output_have_places_of_their_own(backend: str, strides: tuple[int, int]) -> None:
    out = zeros(2 * M * N).as_strided((M, N), strides)
    with pytest.raises(CallError, match=r"'out' .*strides"):
        epigen.compile("mm", config=SMALL, backend=backend)(whole(M, K), whole(K, N), out=out)


# -- what is not


@pytest.mark.triton
@BACKENDS
def test_buffers_that_lie_side_by_side(backend: str) -> None:
    """Between the bytes of each lie those of the others, and none is common."""
    text = "z = mm + x[m,n]; z, z * 2, sum(z, n)"
    kernel = epigen.compile(text, config=SMALL if backend == "interpreter" else None, backend=backend)
    held = whole(M, 3 * N + 4)
    a, x = whole(M, K), held[:, 2 * N : 3 * N]
    expected = kernel(a, whole(K, N), x=x.clone())
    out = (held[:, :N], held[:, N : 2 * N], held.view(torch.float32)[:, 3 * N // 2 + 1])
    for _ in range(2):
        assert all(map(torch.equal, kernel(a, whole(K, N), x=x, out=out), expected))
    assert torch.equal(x, whole(M, 3 * N + 4)[:, 2 * N : 3 * N])


@pytest.mark.triton
@pytest.mark.parametrize("config", [SMALL, LIBRARY, split_k(prefetch=1), None], ids=["tiled", "library", "split_k", "reference"])
def test_an_input_by_another_name(config: Any) -> None:
    """A view of the same elements is the input itself; so are two inputs that both are."""
    kernel = epigen.compile("cast(mm + x[m,n] - y[m,n] * 2, fp32)", config=config, backend="interpreter" if config else "reference")
    a, b, grad = whole(M, K), whole(K, N), whole(M, N, dtype=torch.float32)
    expected = kernel(a, b, x=grad.clone(), y=grad.clone())
    assert torch.equal(kernel(a, b, x=grad, y=grad.view(M, N), out=grad[:]), expected)


@pytest.mark.triton
@BACKENDS
def test_a_mask_is_replaced(backend: str) -> None:
    kernel = epigen.compile("bitmask(mask & (mm > 0))", config=SMALL if backend == "interpreter" else None, backend=backend)
    a, b = whole(M, K), whole(K, N)
    mask = epigen.compile("bitmask(mm < 5)")(a, b)
    expected = kernel(a, b, mask=mask.clone())
    assert torch.equal(kernel(a, b, mask=mask, out=mask), expected)


@pytest.mark.triton
@BACKENDS
def test_tensors_without_elements_are_nowhere(backend: str) -> None:
    held = zeros(4, 4)
    assert epigen.compile("mm + x[m,n]", config=SMALL, backend=backend)(held[:0], held, x=held[:0, :], out=held[:0]).shape == (0, 4)
