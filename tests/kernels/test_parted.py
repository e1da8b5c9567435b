"""Programs that part a product's columns, or join two tiles: `g, u = halves(mm)` and `pairs(x, y)`."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from programs import programs
from standalone_files import anew
from torch import Tensor
from torch.nn import functional

import epigen
from epigen.cli import main
from epigen.errors import CallError
from epigen.ir.parting import Part, Parting
from epigen.ir.program import graph_of, parting_of
from epigen.lang.parser import parse
from epigen.lang.syntax import HALVES, PAIRS, WAYS, to_text

M, N, K = 33, 24, 16
GATED = "silu(g) * u"
CLAMPED = "g = minimum(g0, 7); (clamp(u, -7, 7) + 1) * (g * sigmoid(1.702 * g))"
"""Of gpt-oss, whose columns lie in pairs."""
ROTATED = "x, y = pairs(mm); pairs(x * c[m,n] - y * s[m,n], x * s[m,n] + y * c[m,n])"
"""Of rotary embeddings of neighbours."""


def parts(t: Tensor, way: str) -> tuple[Tensor, Tensor]:
    n = t.shape[-1] // 2
    return (t[..., :n], t[..., n:]) if way == HALVES else (t[..., ::2], t[..., 1::2])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """a, b as the transpose of a stacked weight, and its bias."""
    return drawn(*lead, M, K), drawn(2 * N, K, seed=1).T, drawn(2 * N, seed=2)


# -- the language


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("g, u = halves(mm); silu(g) * u", "silu(mm) * dot(a, b_u[k,n])"),
        ("g, u = pairs(dot(a, b)); silu(g) * u", "silu(mm) * dot(a, b_u[k,n])"),
        ("g, u = halves(mm + bias); silu(g) * u", "silu(mm + bias_g[n]) * (dot(a, b_u[k,n]) + bias_u[n])"),
        ("z = mm * alpha + bias; g, u = halves(z); silu(g) * u", "silu(mm * alpha + bias_g[n]) * (dot(a, b_u[k,n]) * alpha + bias_u[n])"),
        ("w = alpha * 2; z = mm * w; g, u = halves(relu(z)); g * u * w", "w = alpha * 2; relu(mm * w) * relu(dot(a, b_u[k,n]) * w) * w"),
        ("g, u = halves(dot(relu(a), b) + residual); g * u", "(dot(relu(a), b) + residual_g[m,n]) * (dot(relu(a), b_u[k,n]) + residual_u[m,n])"),
        ("g, u = halves(mm); g * u + bias", "mm * dot(a, b_u[k,n]) + bias"),
        ("g, u = pairs(mm + pos[m % P, n]); g * u", "(mm + pos_g[m % P, n]) * (dot(a, b_u[k,n]) + pos_u[m % P, n])"),
        ("g, u = halves(mm * m); where(n <= m, g * u, 0)", "where(n <= m, mm * m * (dot(a, b_u[k,n]) * m), 0)"),
        ("g, u = halves(mm * s[m]); g * u", "(mm * s[m]) * (dot(a, b_u[k,n]) * s[m])"),
    ],
)
def test_a_program_that_parts_is_one_of_two_products(text: str, plain: str) -> None:
    assert graph_of(text) == graph_of(plain)
    assert graph_of(graph_of(text).text) == graph_of(text)
    assert graph_of(to_text(parse(text))) == graph_of(text) and parting_of(to_text(parse(text))) == parting_of(text)


def test_what_a_call_gives_and_gets_in_one() -> None:
    assert parting_of("silu(mm) * dot(a, up[k,n])") is None
    assert parting_of("g, u = pairs(mm + bias); g * u") == Parting((Part("b", "b", "b_u", PAIRS), Part("bias", "bias_g", "bias_u", PAIRS)))
    assert parting_of("r = halves(mm, 2 * mm); r, sum(mm, n)") == Parting(outputs=(Part("r", "r_first", "r_second", HALVES),))
    assert [o.name for o in graph_of("pairs(mm, -mm), sum(mm, n)").outputs] == ["out0_first", "out0_second", "out1"]


def test_new_names_are_none_of_the_programs() -> None:
    text = "g, u = halves(mm + bias); g * u * b_u[n] + bias_g[n]"
    parting = parting_of(text)
    assert parting is not None and [(p.first, p.second) for p in parting.inputs] == [("b", "b_u2"), ("bias_g2", "bias_u")]


def test_the_longest_names_have_parts() -> None:
    text = f"{'g' * 64}, {'u' * 64} = halves(mm + {'x' * 64}[n]); {'g' * 64} * {'u' * 64}"
    assert graph_of(graph_of(text).text) == graph_of(text)


# -- calls

BACKENDS = (None, pytest.param("interpreter", marks=pytest.mark.triton))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_gate_of_a_stacked_operand(backend: str | None, way: str, lead: tuple[int, ...]) -> None:
    a, b, bias = operands(*lead)
    g, u = parts(a @ b + bias, way)
    kernel = epigen.compile(f"g, u = {way}(mm + bias); {GATED}", backend=backend)
    torch.testing.assert_close(kernel(a, b, bias=bias), functional.silu(g) * u, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kernel(a, b.contiguous(), bias=bias), functional.silu(g) * u, atol=1e-4, rtol=1e-4)
    clamped = epigen.compile(f"g0, u = {way}(mm + bias); {CLAMPED}", backend=backend)
    g = g.clamp(max=7)
    torch.testing.assert_close(clamped(a, b, bias=bias), (u.clamp(-7, 7) + 1) * g * torch.sigmoid(1.702 * g), atol=1e-4, rtol=1e-4)


def rotated(product: Tensor, c: Tensor, s: Tensor) -> Tensor:
    x, y = parts(product, PAIRS)
    return torch.stack((x * c - y * s, x * s + y * c), -1).flatten(-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_a_rotation_of_neighbours(backend: str | None, lead: tuple[int, ...]) -> None:
    a, b, _ = operands(*lead)
    c, s = drawn(M, N, seed=3), drawn(M, N, seed=4)
    kernel = epigen.compile(ROTATED, backend=backend)
    torch.testing.assert_close(kernel(a, b, c=c, s=s), rotated(a @ b, c, s), atol=1e-4, rtol=1e-4)
    out = torch.full((*lead, M, 2 * N), torch.nan)
    assert kernel(a, b, c=c, s=s, out=out) is out
    torch.testing.assert_close(out, rotated(a @ b, c, s), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_two_tiles_of_one_product_are_joined_beside_another_result(backend: str | None, way: str) -> None:
    a, b, _ = operands()
    kernel = epigen.compile(f"r = {way}(mm, -2 * mm); r, sum(mm, n)", backend=backend)
    found = kernel(a, b)
    assert found._fields == ("r", "out1")
    for part, expected in zip(parts(found.r, way), (a @ b, -2 * (a @ b)), strict=True):
        torch.testing.assert_close(part, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.out1, (a @ b).sum(1), atol=1e-4, rtol=1e-4)
    given = {"r": torch.empty_like(found.r), "out1": torch.empty_like(found.out1)}
    again = kernel(a, b, out=given)
    assert again.r is given["r"] and torch.equal(again.r, found.r) and torch.equal(again.out1, found.out1)


def test_a_transposed_stacked_weight_is_not_copied() -> None:
    """Where its rows can be addressed by TMA, both parts can: a copy of it would take as long as the product of few rows."""
    kernel = epigen.compile("g, u = pairs(mm); silu(g) * u")
    a, b = torch.empty(512, 1024, dtype=torch.bfloat16, device="meta"), torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta").T
    kernel(a, b)
    assert kernel._last is not None and kernel._last.signature is not None
    assert {"b", "b_u"} <= {*kernel._last.signature.tma} and kernel._last.signature.layout == "nt"


def test_a_kernel_is_itself_after_a_pickle_and_says_what_it_takes() -> None:
    kernel = epigen.compile("g, u = halves(mm + bias); silu(g) * u")
    a, b, bias = operands()
    again = pickle.loads(pickle.dumps(kernel))
    assert torch.equal(again(a, b, bias=bias), kernel(a, b, bias=bias)) and copy.deepcopy(kernel) is kernel
    assert "bias, in halves" in repr(kernel) and repr(again) == repr(kernel)


@pytest.mark.parametrize("text", [f"g, u = halves(mm + bias); {GATED}", ROTATED])
def test_torch_compile_looks_into_a_call(text: str) -> None:
    kernel = epigen.compile(text)
    a, b, bias = operands()
    inputs = {"bias": bias} if "bias" in text else {"c": drawn(M, N), "s": drawn(M, N, seed=1)}
    run: Callable[..., Tensor] = lambda a, b, inputs: kernel(a, b, **inputs) + 1  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b, inputs), run(a, b, inputs))


def test_what_does_not_fit_is_refused_in_the_callers_names() -> None:
    kernel, rotation = epigen.compile(f"g, u = halves(mm + bias); {GATED}"), epigen.compile(ROTATED)
    a, b, bias = operands()
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: kernel(a, b[:, :7], bias=bias), r"operand b is parted in halves, and its shape is \[16, 7\]"),
        (lambda: kernel(a, b), r"missing input: bias\[n\]"),
        (lambda: kernel(a, b, bias=bias[:N]), r"'bias' is parted in halves as b is.*48.*\[24\]"),
        (lambda: kernel(a, b, bias=3.0), "a float was given"),
        (lambda: kernel(a, b, bias=bias, bias_g=bias), "no input 'bias_g': did you mean bias"),
        (lambda: kernel(a, b, bias), "by position operands a and b are given.*bias"),
        (lambda: kernel(a, bias=bias), "operand b is missing"),
        (lambda: rotation(a, b, c=bias, s=bias), r"'c' is declared as c\[m,n\]"),
        (lambda: rotation(a, b, c=drawn(M, N), s=drawn(M, N), out=torch.empty(M, N)), "was expected"),
        (lambda: rotation(a, b, c=drawn(M, N), s=drawn(M, N), out=torch.empty(M, 7)), "parted in pairs"),
        (lambda: kernel.over(a), "second product"),
    ]
    for call, message in refused:
        with pytest.raises(CallError, match=message):
            call()


@given(programs(second=True))
def test_random_programs_of_halves_are_those_of_two_products(text: str) -> None:
    """Bit for bit, whichever way the second operand comes."""
    if "dot(" not in text or re.search(r"\b(a|b|up)\b", text.replace("dot(a, up[k,n])", "")):
        return
    way = WAYS[len(text) % 2]
    parted = f"left, right = {way}(mm); " + re.sub(r"\bmm\b", "left", text).replace("dot(a, up[k,n])", "right")
    assert graph_of(parted) == graph_of(text.replace("up[k,n]", "b_right[k,n]"))


# -- layers


def layer(x: Tensor, weight: Tensor, bias: Tensor, way: str) -> Tensor:
    g, u = parts(functional.linear(x, weight, bias), way)
    return functional.silu(g) * u


def leaves() -> list[Tensor]:
    return [t.double().requires_grad_() for t in (drawn(2, 5, K), drawn(2 * N, K, seed=1), drawn(2 * N, seed=2))]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own of autograd functions that it compiles
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("way", "save"), [*itertools.product(WAYS, (None, "recompute"))])
def test_a_layer_has_the_gradients_of_its_whole_tensors(way: str, save: str | None, compiled: bool) -> None:
    exact = leaves()
    layer(*exact, way).square().sum().backward()
    given = [t.detach().float().requires_grad_() for t in exact]
    run: Callable[..., Tensor] = lambda x, weight, bias: epigen.linear(x, weight, bias, f"g, u = {way}(mm + bias); {GATED}", save=save)  # noqa: E731
    run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    for _ in range(3):  # from the third call on by comparison with those before
        for t in given:
            t.grad = None
        result = run(*given)
        result.square().sum().backward()
        torch.testing.assert_close(result, layer(*exact, way).float(), atol=1e-4, rtol=1e-4)
        for t, of in zip(given, exact, strict=True):
            assert t.grad is not None and of.grad is not None
            torch.testing.assert_close(t.grad, of.grad.float(), atol=2e-3, rtol=1e-3)


def test_a_layer_that_rotates_has_its_gradients() -> None:
    x, weight, _ = leaves()
    c, s = drawn(5, N, seed=3).double(), drawn(5, N, seed=4).double()
    rotated(functional.linear(x, weight), c, s).square().sum().backward()
    ours = [t.detach().float().requires_grad_() for t in (x, weight)]
    result = epigen.linear(*ours, None, ROTATED, c=c.float(), s=s.float())
    torch.testing.assert_close(result, rotated(functional.linear(x, weight), c, s).float(), atol=1e-4, rtol=1e-4)
    result.square().sum().backward()
    for t, of in zip(ours, (x, weight), strict=True):
        assert t.grad is not None and of.grad is not None
        torch.testing.assert_close(t.grad, of.grad.float(), atol=2e-3, rtol=1e-3)


def test_a_module_holds_the_stacked_weight() -> None:
    gate = epigen.nn.Linear(K, 2 * N, epilogue=f"g, u = halves(mm + bias); {GATED}")
    down = epigen.nn.Linear(N, 8, epilogue="mm + bias")
    chain, x = epigen.nn.Chain(gate, down), drawn(3, K)
    expected = functional.linear(layer(x, gate.weight, gate.bias, HALVES), down.weight, down.bias)
    torch.testing.assert_close(chain(x), expected, atol=1e-4, rtol=1e-4)
    chain(x).sum().backward()
    assert gate.weight.grad is not None and gate.weight.grad.shape == (2 * N, K) and gate.bias.grad.shape == (2 * N,)
    assert set(chain.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_torch_func_and_autocast_take_a_layer_of_parts() -> None:
    x, weight, bias = (t.detach().float() for t in leaves())
    text = f"g, u = pairs(mm + bias); {GATED}"
    found = torch.func.grad(lambda w: epigen.linear(x, w, bias, text).square().sum())(weight)
    torch.testing.assert_close(found, torch.func.grad(lambda w: layer(x, w, bias, PAIRS).square().sum())(weight), atol=1e-3, rtol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert epigen.linear(x, weight, bias, text).dtype == torch.bfloat16


def test_a_layer_refuses_what_does_not_fit() -> None:
    x, weight, bias = (t.detach().float() for t in leaves())
    text = f"g, u = halves(mm + bias); {GATED}"
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: epigen.linear(x, weight[:7], bias[:7], text), r"weight is parted in halves, and its shape is \[7, 16\]"),
        (lambda: epigen.linear(x, weight, None, text), "missing input 'bias'"),
        (lambda: epigen.linear(x, weight, bias[:N], text), r"last extent is to be 48, and it is of shape \[24\]"),
        (lambda: epigen.linear(x, weight, bias, text, main_grad=torch.zeros(2 * N, K)), "main_grad of a weight whose parts"),
    ]
    for call, message in refused:
        with pytest.raises(CallError, match=message):
            call()


# -- files of their own

CALLS = """
import sys, warnings, torch, parted_file
warnings.simplefilter("ignore")  # numpy's, of Triton's interpreter
whole = getattr(parted_file, [name for name in dir(parted_file) if name.endswith("_of_parts")][0].removesuffix("_of_parts"))
torch.manual_seed(0)
a, b = torch.randn(40, 64).half(), torch.randn(64, 96).half()
product = a.double() @ b.double()
"""
GATED_CALL = """
bias = torch.randn(96).half()
g, u = (product + bias).chunk(2, -1)
torch.testing.assert_close(whole(a, b, bias=bias).double(), torch.nn.functional.silu(g) * u, atol=2e-2, rtol=2e-3)
try:
    whole(a, b[:, :7], bias=bias)
except ValueError as error:
    assert "even" in str(error), error
else:
    sys.exit("seven columns have no halves")
"""
ROTATED_CALL = """
c, s = torch.randn(40, 48).half(), torch.randn(40, 48).half()
x, y = product[:, ::2], product[:, 1::2]
expected = torch.stack((x * c - y * s, x * s + y * c), -1).flatten(-2)
found, total = whole(a, b, c=c, s=s)
torch.testing.assert_close(found.double(), expected, atol=5e-2, rtol=2e-3)
torch.testing.assert_close(total.double(), x.sum(0), atol=1e-2, rtol=1e-3)
"""


@pytest.mark.triton
@pytest.mark.parametrize(("text", "call"), [(f"g, u = halves(mm + bias); {GATED}", GATED_CALL), (f"{ROTATED}, sum(x, m)", ROTATED_CALL)])
def test_a_file_takes_and_gives_whole_tensors(text: str, call: str, tmp_path: Path) -> None:
    config = "schedule=tiled,block_m=32,block_n=32,block_k=32,group_m=1,num_warps=4,num_stages=2"
    arguments = ["compile", text, "--target", "sm_80", "--no-verify", "-o", str(tmp_path / "parted_file.py"), "--config", config]
    made = CliRunner().invoke(main, arguments)
    assert made.exit_code == 0, made.output
    checked = anew(tmp_path, "parted_file.py")
    assert checked.returncode == 0 and "agrees with torch" in checked.stdout, checked.stdout + checked.stderr
    called = anew(tmp_path, "-c", CALLS + call)
    assert called.returncode == 0, called.stderr


# -- functions of torch's

HELD = drawn(2 * N, seed=7)
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "glu": (functional.glu, "left = mm; left * sigmoid(dot(a, b_right[k,n]))"),
    "chunk": (lambda mm: functional.silu(mm.chunk(2, -1)[0]) * mm.chunk(2, -1)[1], "silu(mm) * dot(a, b_right[k,n])"),
    "split": (lambda mm: functional.gelu(mm.split(N, -1)[1]) * mm.split(N, -1)[0], "gelu(dot(a, b_right[k,n])) * mm"),
    "slices": (lambda mm: (mm[..., :N] * 2, mm[..., :N] * mm[..., N:]), "mm * 2, mm * dot(a, b_right[k,n])"),
    "pairs": (lambda mm: functional.silu(mm[..., ::2]) * mm[..., 1::2], "silu(mm) * dot(a, b_right[k,n])"),
    "held": (lambda mm: functional.gelu((mm * HELD)[..., :N]) * (mm * HELD)[..., N:], "gelu(mm * HELD_1[n]) * (dot(a, b_right[k,n]) * HELD_2[n])"),
}


def clamped(mm: Tensor, bias: Tensor) -> Tensor:
    """Of gpt-oss, as transformers writes it."""
    gate, up = (mm + bias)[..., ::2], (mm + bias)[..., 1::2]
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.mark.parametrize(("function", "program"), FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_function_that_parts_its_product_is_a_program_of_parts(function: Callable[..., Any], program: str, lead: tuple[int, ...]) -> None:
    x, weight = drawn(*lead, 5, K).requires_grad_(), drawn(2 * N, K, seed=1).requires_grad_()
    found, expected = epigen.linear(x, weight, None, function), function(functional.linear(x, weight))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    totals = [sum(t.square().sum() for t in (several if isinstance(several, tuple) else (several,))) for several in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(total, (x, weight)) for total in totals), atol=2e-3, rtol=1e-3)
    kernel = epigen.compile(function)
    torch.testing.assert_close(kernel(x.detach(), weight.detach().T), function(functional.linear(x.detach(), weight.detach())), atol=1e-4, rtol=1e-4)
    assert graph_of(kernel.kernel.graph.text) == graph_of(program)


def test_a_functions_bias_is_parted_with_the_product() -> None:
    x, weight, bias = drawn(3, 5, K), drawn(2 * N, K, seed=1), drawn(2 * N, seed=2)
    torch.testing.assert_close(epigen.linear(x, weight, bias, clamped), clamped(functional.linear(x, weight), bias), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(epigen.linear(x, weight, bias, functional.glu), functional.glu(functional.linear(x, weight, bias)), atol=1e-4, rtol=1e-4)
    layer = epigen.nn.Linear(K, 2 * N, epilogue=functional.glu)
    torch.testing.assert_close(layer(x), functional.glu(functional.linear(x, layer.weight, layer.bias)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda mm: torch.relu(mm[..., :N]),
        lambda mm: (mm * 2, mm[..., :N] * mm[..., N:]),
        lambda mm: torch.softmax(mm, -1)[..., :N] * mm[..., N:],
        lambda mm: mm[..., :N] * mm[..., 1 : N + 1],
        lambda mm: mm.split(N // 2, -1)[0] * mm.split(N // 2, -1)[1],
        lambda mm: functional.glu(mm, 0),
    ],
)
def test_a_function_that_does_more_with_the_whole_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CallError, match="no epilogue computes"):
        epigen.linear(drawn(4, K), drawn(2 * N, K, seed=1), None, function)
