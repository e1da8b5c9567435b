"""Whatever a call or a compilation is given that it does not take is refused in words of epigen's own; and calls on the meta device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from cases import SMALL
from golden import Golden
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import epigen
from epigen.codegen.spec import KernelConfig
from epigen.errors import CallError, ConfigError

BACKENDS = pytest.mark.parametrize("backend", ["reference", "interpreter"])
A, B = torch.ones(2, 4), torch.ones(4, 4)
X, ROW, MASK = torch.ones(2, 4), torch.ones(2), torch.ones(2, 1, dtype=torch.uint8)
pytestmark = pytest.mark.triton

TEXT = "drelu(mm + x[m,n] * s + row[m], mask)"


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> None:
    """Some of torch's tensors import Triton, in the mode that compiles."""
    epigen.compile("mm", backend="interpreter", config=SMALL)(A, B)


def freed(t: Tensor) -> Tensor:
    held = t.clone()
    held.untyped_storage().resize_(0)
    return held


def fake(t: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.empty(t.shape, dtype=t.dtype)


def wrapping(t: Tensor) -> Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    found: Tensor = TwoTensor(t, t)
    return found


# Each with what is said of it, whatever it is given as
MADE: Mapping[str, tuple[Callable[[Tensor], Any], str]] = {
    "list": (lambda t: t.tolist(), "list"),
    "array": (lambda t: t.numpy(), "ndarray"),
    "text": (lambda _: "1", "str"),
    "sparse": (lambda t: t.to_sparse(), r"is a sparse_coo tensor, and one with strides was expected: pass t\.to_dense\(\)"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged), "is a nested tensor, and one with strides was expected"),
    "quantized": (lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), r"torch\.qint8"),
    "complex": (lambda t: t.to(torch.complex64), r"torch\.complex64"),
    "conjugate": (lambda t: t.to(torch.complex64).conj(), r"torch\.complex64"),
    "float64": (lambda t: t.double(), "float64"),
    "bool": (lambda t: t.bool(), r"is bool, and the operands are one of|torch\.bool"),
    "int64": (lambda t: t.long(), r"is int64, and the operands are one of|torch\.int64"),
    "meta": (lambda t: t.to("meta"), "on meta"),
    "freed": (freed, "is a Tensor without memory: its storage was freed"),
    "fake": (fake, "is a FakeTensor without memory: .* it only stands for a tensor"),
    "wrapping": (wrapping, "is a TwoTensor, which wraps other tensors"),
    "one dimension more": (lambda t: t[None], "shape|was given|was expected"),
    "no dimension": (lambda t: t.flatten()[0], "shape|was given|was expected"),
    "none": (lambda _: None, "missing|NoneType"),
}


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns that quantised, nested and freed tensors are on their way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@BACKENDS
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("place", ["a", "b", "x", "row", "mask", "out"])
def test_what_is_no_plain_tensor_is_refused_by_name(backend: str, kind: str, place: str) -> None:
    kernel = epigen.compile(TEXT, backend=backend, config=SMALL)
    given: dict[str, Any] = {"a": A, "b": B, "x": X, "row": ROW, "mask": MASK, "out": X.clone()}
    make, words = MADE[kind]
    if place == "out" and kind in ("none", "list"):  # no buffer; and a list is one of several
        return
    if place in ("x", "row") and kind in ("bool", "int64"):  # numbers as any
        return
    with quiet():
        given[place] = make(given[place])
        name = {"a": "operand a", "b": "operand b", "out": "out"}.get(place, f"input '{place}'")
        if place in ("a", "b") and kind == "one dimension more":
            name = "out"  # they are a batch of one product, whose result has another shape than out
        if place == "mask" and "torch" in words:
            words += "|packed mask"
        with pytest.raises(CallError) as found:
            kernel(given.pop("a"), given.pop("b"), s=1.0, **given)
    said = str(found.value)
    assert name in said, said
    assert place == "out" or re.search(words, said), said


@BACKENDS
def test_subclasses_with_memory_of_their_own_are_tensors(backend: str) -> None:
    class Tagged(Tensor):
        pass

    kernel = epigen.compile("mm + x[m,n]", backend=backend, config=SMALL)
    for kind in (lambda t: t.as_subclass(Tagged), lambda t: torch.nn.Parameter(t, requires_grad=False)):
        found = kernel(kind(A), kind(B), x=kind(X), out=kind(X.clone()))
        assert torch.equal(found.as_subclass(Tensor), A @ B + X)


@BACKENDS
@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, "1", None, 1j, [1.0], numpy.array([1.0]), torch.tensor([1.0, 2.0]), torch.tensor(1.0).double()],
    ids=range(9),
)
def test_a_scalar_that_is_none(backend: str, value: Any) -> None:
    with pytest.raises(CallError, match="input 's' is"):
        epigen.compile("mm * s", backend=backend, config=SMALL)(A, B, s=value)


@BACKENDS
@pytest.mark.parametrize(
    "value",
    [float("inf"), float("-inf"), float("nan"), 1e39, True, 2**1000, Fraction(1, 3), numpy.float32(2), torch.tensor(2.0), torch.tensor(2)],
    ids=range(10),
)
def test_a_scalar_of_any_value(backend: str, value: Any) -> None:
    found = epigen.compile("mm * s", backend=backend, config=SMALL)(A, B, s=value)
    expected = (A @ B) * torch.tensor(float(value), dtype=torch.float32)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


# -- what is compiled

GIVEN = {"schedule": "tiled"} | dict(SMALL.values)


@pytest.mark.parametrize("value", [True, 16.0, -16, 0, 17, 10**400, 10**5000, None, "16", [16], float("nan"), numpy.int64(16)], ids=lambda v: type(v).__name__)
def test_a_config_of_other_values(value: Any) -> None:
    for config in (GIVEN | {"block_m": value}, KernelConfig("tiled", tuple((dict(SMALL.values) | {"block_m": value}).items()))):
        with pytest.raises(ConfigError, match=r"block_m=.* 16, 32, 64, 128, 256"):
            epigen.compile("mm", config=config)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GIVEN | {"block_q": 16}, "block_q"),
        (GIVEN | {3: 16}, "3"),
        (GIVEN | {10**5000: 16}, "a huge name"),
        (GIVEN | {None: 16}, "None"),
        ({}, "nothing"),
        ({"schedule": "tiled"}, "a schedule alone"),
        (GIVEN | {"schedule": None}, "no schedule"),
        (GIVEN | {"schedule": ["tiled"]}, "a list of schedules"),
        (GIVEN | {"schedule": 10**5000}, "a huge schedule"),
        ([1], "a list"),
        ("tiled", "a text"),
        (KernelConfig("tiles", ()), "tiles"),
        (KernelConfig("tiled", ()), "a config without values"),
        (KernelConfig("tiled", 3), "a config of 3"),  # type: ignore[arg-type]
    ],
)
def test_a_config_that_is_none(config: Any, name: str, golden: Golden) -> None:
    with golden.raises(ConfigError, name):
        epigen.compile("mm", config=config)


@pytest.mark.parametrize("value", [3, 10**5000, ["ieee"], object(), float("nan")], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("name", ["backend", "precision", "tune", "invariant"])
def test_other_options(name: str, value: Any) -> None:
    with pytest.raises(CallError, match=name):
        epigen.compile("mm", **{name: value})


# -- the meta device


@pytest.mark.parametrize("backend", [None, "reference", "interpreter", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_call_on_the_meta_device(backend: str | None, dtype: torch.dtype) -> None:
    """Results of the same shapes, dtypes and strides as those of a call with memory, and the same checks."""
    text = "z = mm + x[m,n] * s; z, bitmask(z > 0), bgrad(z), cast(sum(z, n), fp16), sum(z)"
    a, b, x = torch.ones(5, 24).to(dtype), torch.ones(24, 37).to(dtype), torch.ones(5, 37)
    kernel, expected = epigen.compile(text, backend=backend), epigen.compile(text)(a, b, x=x, s=1.0)
    for _ in range(2):
        found = kernel(a.to("meta"), b.to("meta"), x=x.to("meta"), s=1.0)
        assert found._fields == expected._fields
        for y, z in zip(found, expected, strict=True):
            assert y.is_meta and (y.shape, y.dtype, y.stride()) == (z.shape, z.dtype, z.stride())
    out = torch.empty(5, 37, device="meta", dtype=expected[0].dtype)
    assert kernel(a.to("meta"), b.to("meta"), x=out.float(), s=1.0, out={"z": out}).z is out
    with pytest.raises(CallError, match="K differs"):
        kernel(a.to("meta"), b.T.to("meta"), x=x.to("meta"), s=1.0)
    with pytest.raises(CallError, match=r"missing inputs: x\[m,n\], s"):
        kernel(a.to("meta"), b.to("meta"))


def test_over_a_product_on_the_meta_device() -> None:
    found = epigen.compile("relu(mm) + x[n]").over(torch.ones(3, 4, device="meta").half(), x=torch.ones(4, device="meta"))
    assert found.is_meta and found.dtype == torch.float16 and found.shape == (3, 4)
