"""Random numbers of a seed: known answers, the same ones whatever computes them, dropout of them, and what a backward draws again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from compiling import compiled
from golden import Golden
from specs import RENDERER, spec_of
from torch import Tensor

import epigen
from epigen.codegen.spec import KernelConfig
from epigen.codegen.standalone import standalone
from epigen.db.problem import graph_digest
from epigen.dtypes import BF16, FP16, INT64
from epigen.errors import CallError, DerivationError
from epigen.gpus import TARGETS
from epigen.ir import philox
from epigen.ir.program import graph_of
from epigen.runtime.ahead import Job
from epigen.runtime.verify import Oracle, Sample
from epigen.training import sharding

SEEDS = (0, 1, -1, 16, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 2)

CONFIGS: dict[str, KernelConfig] = {
    "tiled": cases.SMALL,
    "other tiles": cases.tiled(64, 16, 16, group_m=1),
    "the last block": cases.tiled(16, 32, 32, prefetch=1, fused_finalize=1),
    "library": cases.LIBRARY,
    "split_k": cases.split_k(16, 32, 32, fused_finalize=1),
    "persistent": cases.persistent(64, 32, flatten=0, subtiles=2, prefetch=1),
}


def operands(m: int = 70, n: int = 48, k: int = 20, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)


def as_int64(seed: int) -> Tensor:
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed])


def drawn(seed: int, m: int, n: int, product: int = 0) -> Tensor:
    return philox.random_numbers(as_int64(seed), torch.arange(m), torch.arange(n), product).float()


# -- the numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Those of Random123, philox4x32 of 10 rounds; of integers, and of tensors."""
    assert philox.philox(counter, key) == words
    c0, c1, c2, c3 = map(torch.tensor, counter)
    k0, k1 = map(torch.tensor, key)
    assert tuple(int(word) for word in philox.philox((c0, c1, c2, c3), (k0, k1))) == words


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 9, 16, 17, 31, 40])
def test_an_element_has_the_number_of_its_place(columns: int) -> None:
    """By bits 0 and 3 of n a word of the counter that the others make, (those, m, product, 0), by the key of both halves of the seed."""
    found = drawn(0x1234567890ABCDEF, 3, columns, product=5)
    for m in range(3):
        for n in range(columns):
            counter, word = n // 16 * 4 + n % 8 // 2, n % 2 + n // 8 % 2 * 2
            word = philox.philox((counter, m, 5, 0), (0x90ABCDEF, 0x12345678))[word]
            assert found[m, n] == (word >> 8) * 2.0**-24


def test_they_are_as_random_numbers_are() -> None:
    """Each within 5 sigma: means, shares, and what neighbours, rows, seeds and products have to do with one another."""
    m, n = 256, 1001
    x, count = drawn(7, m, n).double() - 0.5, m * n
    assert abs(x.mean()) < 5 * (1 / 12 / count) ** 0.5
    assert abs((x * x).mean() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    for p in (0.1, 0.5, 0.9):
        assert abs((x + 0.5 < p).double().mean() - p) < 5 * (p * (1 - p) / count) ** 0.5
    others = [drawn(8, m, n), drawn(7 + 2**32, m, n), drawn(7, m, n, product=1)]
    pairs = [(x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x[:, 8:], x[:, :-8]), *((x, other.double() - 0.5) for other in others)]
    for left, right in pairs:
        assert abs((left * right).mean()) < 5 * (1 / 144 / left.numel()) ** 0.5
    assert drawn(7, m, n).min() >= 0 and drawn(7, m, n).max() < 1


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
def test_kernels_have_the_same_bit_for_bit(config: str) -> None:
    a, b = operands()
    text = "uniform(seed), where(uniform(seed) >= 0.3, mm, 0), bitmask(uniform(other) < 0.5), bgrad(where(uniform(seed) < 0.5, 1, 0))"
    reference, kernel = epigen.compile(text), epigen.compile(text, backend="interpreter", config=CONFIGS[config])
    for seed in SEEDS:
        for given in (seed, as_int64(seed)):
            found = kernel(a, b, seed=given, other=3)
            wanted = drawn(seed, 70, 48)
            assert torch.equal(found[0], wanted) and torch.equal(found[1] != 0, wanted >= 0.3)
            assert torch.equal(found[2], epigen.compile("bitmask(r[m,n] < 0.5), mm")(a, b, r=drawn(3, 70, 48))[0])
            assert torch.equal(found[3], (wanted < 0.5).float().sum(0))
            for x, y in zip(found[:1] + found[2:], reference(a, b, seed=given, other=3)[:1] + reference(a, b, seed=given, other=3)[2:], strict=True):
                assert torch.equal(x, y)


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("leads", [((3,), (3,)), ((2, 3), ()), ((), (2,))], ids=str)
def test_each_product_of_a_batch_has_its_own(leads: tuple[tuple[int, ...], tuple[int, ...]], config: str) -> None:
    a, b = torch.randn(*leads[0], 40, 16), torch.randn(*leads[1], 16, 48)
    lead = torch.broadcast_shapes(*leads)
    wanted = torch.stack([drawn(-9, 40, 48, i) for i in range(lead.numel())]).view(*lead, 40, 48)
    for kernel in (epigen.compile("uniform(seed), mm"), epigen.compile("uniform(seed), mm", backend="interpreter", config=CONFIGS[config])):
        assert torch.equal(kernel(a, b, seed=-9)[0], wanted)
    oracle = Oracle.of(
        graph_of("uniform(seed), mm"), Sample(a.expand(*lead, 40, 16).flatten(0, -3), b.expand(*lead, 16, 48).flatten(0, -3), {"seed": as_int64(-9)})
    )
    assert all(torch.equal(one[0].value.float(), each) for one, each in zip(oracle.products, wanted.flatten(0, -3), strict=True))


@pytest.mark.triton
def test_over_a_product_that_is_given_and_into_given_memory() -> None:
    a, b = operands()
    for backend in ("reference", "interpreter"):
        kernel = epigen.compile("uniform(seed) + 0 * mm", backend=backend)
        assert torch.equal(kernel.over(a @ b, seed=4), drawn(4, 70, 48))
        out = torch.empty(70, 48)
        assert kernel(a, b, seed=4, out=out) is out and torch.equal(out, drawn(4, 70, 48))


def test_a_row_by_itself_has_its_own() -> None:
    a, b = operands()
    assert torch.equal(epigen.compile("uniform(seed), mm", invariant="m")(a, b, seed=6)[0], drawn(6, 70, 48))
    assert torch.equal(epigen.compile("uniform(seed), mm", invariant="m")(torch.stack([a, a]), b, seed=6)[0][1], drawn(6, 70, 48, 1))


def test_rounded_as_eager_torch_rounds() -> None:
    """The product with 1 / (1 - p), in fp32, is one operation of torch's."""
    x = torch.randn(30, 8).bfloat16()
    found = epigen.compile("dropout(relu(mm), 0.1, seed)", rounding="eager")(x, torch.eye(8).bfloat16(), seed=1)
    assert torch.equal(found, torch.where(drawn(1, 30, 8) >= 0.1, (torch.relu(x).float() * (1 / 0.9)).bfloat16(), 0))


def test_nothing_is_unsure_where_p_is_exact() -> None:
    a, b = operands()
    (answer, mask) = Oracle.of(graph_of("dropout(mm, 0.5, seed), bitmask(uniform(seed) >= 0.25)"), Sample(a, b, {"seed": as_int64(1)})).products[0]
    assert mask.unsure is not None and not mask.unsure.any()
    dropped = drawn(1, 70, 48) < 0.5
    assert (answer.bound[dropped] < 1e-30).all() and (answer.value[dropped] == 0).all() and (answer.bound < 1e-3).all()


# -- dropout


@pytest.mark.triton
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("written", [True, False])
def test_what_is_dropped_is_0_whatever_it_was(p: float, written: bool) -> None:
    a, b = operands()
    a[0], a[1] = torch.nan, torch.inf
    text, inputs = (f"dropout(mm, {p}, seed)", {}) if written else ("dropout(mm, p, seed)", {"p": p})
    kept = drawn(11, 70, 48) >= p
    wanted = torch.where(kept, (a @ b) * (1 / (1 - p) if p < 1 else 1), 0)
    for kernel in (epigen.compile(text), epigen.compile(text, backend="interpreter", config=cases.SMALL)):
        for given in (inputs, {name: torch.tensor(value) for name, value in inputs.items()}):
            torch.testing.assert_close(kernel(a, b, seed=11, **given), wanted, equal_nan=True)


@pytest.mark.parametrize(
    "text", ["dropout(mm + bias, 0.25, seed)", "relu(dropout(mm + bias, p, seed))", "dropout(gelu(mm + bias), p, seed) + residual", "dropout(mm, 1, seed)"]
)
def test_derivatives_draw_again(text: str, golden: Golden) -> None:
    """No mask is kept, and no gradient of p or the seed is there."""
    golden(epigen.derive(text), text)
    assert {"seed", "p"}.isdisjoint(gradient.of for gradient in epigen.derive(text).gradients)


def test_a_seed_alone_has_no_gradient(golden: Golden) -> None:
    with golden.raises(DerivationError):
        epigen.derive("dropout(mm, 0.1, seed)", wrt="seed")


@pytest.mark.parametrize("seed", [5, -1, 2**63 + 7, torch.tensor(2**53 + 1)], ids=str)
@pytest.mark.parametrize(
    "text", ["dropout(mm + bias, 0.25, seed)", "dropout(gelu(mm + bias), p, seed)", "gelu(dropout(mm + bias, p, seed)) * 2", "dropout(mm + bias, 0, seed)"]
)
def test_gradients_are_those_of_the_mask(text: str, seed: Any) -> None:
    """Called as often as it takes to be called again."""
    x, weight, bias = torch.randn(2, 9, 5).double(), torch.randn(7, 5).double(), torch.randn(7).double()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    rate = 0.25 if "0.25" in text else 0.5 if "p," in text else 0.0
    scale = (drawn(int(seed), 18, 7).view(2, 9, 7) >= rate).double() / (1 - rate)
    inputs = {"p": rate} if "p," in text else {}
    z = F.linear(x, weight, bias)
    wanted = F.gelu(z * scale) * 2 if text.startswith("gelu") else F.gelu(z) * scale if "gelu" in text else z * scale
    arriving = torch.cos(torch.arange(wanted.numel()).double()).view(wanted.shape)
    gradients = torch.autograd.grad(wanted, leaves, arriving, retain_graph=True)
    for _ in range(3):
        found = epigen.linear(x, weight, bias, text, seed=seed, **inputs)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, leaves, arriving), gradients)


def test_of_a_chain_a_layers_derivative_rides_in_the_next_ones_product() -> None:
    """And draws what its forward drew: a gradient is 0 where that has dropped."""
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(9, 5), torch.randn(7, 5), torch.randn(6, 7)
    leaves = [t.requires_grad_() for t in (x, w1, w2)]
    masks = [(drawn(seed, 9, n) >= p).float() / (1 - p) for seed, n, p in ((3, 7, 0.5), (4, 6, 0.25))]
    wanted = (torch.relu(x @ w1.T) * masks[0]) @ w2.T * masks[1]
    links = [
        epigen.training.chain.Link(w1, {"seed": 3}, "dropout(relu(mm), 0.5, seed)"),
        epigen.training.chain.Link(w2, {"seed": 4}, "dropout(mm, 0.25, seed)"),
    ]
    for _ in range(3):
        found = epigen.training.again.call(x, links)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves, retain_graph=True))


def test_the_sums_gradient_is_the_output_over_what_went_in() -> None:
    x, weight = torch.rand(40, 8).add(1).requires_grad_(), torch.eye(8)
    y = epigen.linear(x, weight, epilogue="dropout(mm, 0.3, seed)", seed=9)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, y.detach() / x.detach())
    assert torch.equal(gradient == 0, drawn(9, 40, 8) < 0.3)


# -- seeds


def test_what_is_no_seed_is_refused(golden: Golden) -> None:
    kernel, (a, b) = epigen.compile("dropout(mm, 0.1, seed)"), operands()
    wrong = {
        "float": 0.5,
        "bool": True,
        "float tensor": torch.tensor(1.0),
        "int32": torch.tensor(1, dtype=torch.int32),
        "two": torch.tensor([1, 2]),
        "too large": 2**64,
    }
    for name, seed in wrong.items():
        with golden.raises(CallError, name):
            kernel(a, b, seed=seed)
        with golden.raises(CallError, f"{name}, a layer's"):
            epigen.linear(a, b.T, epilogue="dropout(mm, 0.1, seed)", seed=seed)
    with golden.raises(CallError, "none"):
        kernel(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_another_seed_is_the_same_kernel() -> None:
    """Of whatever value, through Triton's launcher, which makes constants of some integers, and through torch.compile."""
    kernel, (a, b) = epigen.compile("uniform(seed) + 0 * mm"), operands()
    for seed in SEEDS:
        kernel(a, b, seed=seed)
    assert kernel.plan((64, 64, 64)).spec.signature.inputs == (("seed", INT64),)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with_seed = torch.compile(lambda seed: kernel(a, b, seed=seed), backend=counter)
    for seed in (3, 4, 5, -6, 2**53 + 1):
        assert torch.equal(with_seed(seed), drawn(seed, 70, 48))
    assert counter.frame_count == 2  # for the number itself at first, then for any


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_of_a_layer() -> None:
    torch._dynamo.reset()
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    layer = torch.compile(lambda seed: epigen.linear(x, weight, epilogue="dropout(relu(mm), 0.5, seed)", seed=seed), backend="aot_eager", fullgraph=True)
    for seed in (1, 2, torch.tensor(3)):
        mask = (drawn(int(seed), 6, 8) >= 0.5).float() * 2
        found, wanted = layer(seed), torch.relu(x @ weight.T) * mask
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), (x, weight)), torch.autograd.grad(wanted.sum(), (x, weight)))


def test_seeds_are_told_apart_in_a_digest_and_have_no_names_there() -> None:
    same = ("uniform(seed) * mm", "uniform(other) * mm")
    others = ("uniform(seed) * mm", "alpha * mm", "uniform(x) * uniform(y) * mm", "uniform(x) * mm, uniform(x)")
    assert len({graph_digest(graph_of(text)) for text in same}) == 1
    assert len({graph_digest(graph_of(text)) for text in others}) == 4


def test_no_process_has_a_part_of_what_it_would_have_to_count() -> None:
    assert len(sharding.ways("relu(mm)", 2)) == 3 and len(sharding.ways("dropout(mm, 0.1, seed)", 2)) == 2  # one of them in summands, which no index counts


# -- kernels


@pytest.mark.triton
@pytest.mark.parametrize(
    "text",
    ["dropout(mm, 0.1, seed)", "z = dropout(gelu(mm + bias), p, seed); z, bgrad(z)", "uniform(seed), bitmask(uniform(x) > 0.5), sum(uniform(seed), n), mm"],
)
def test_kernels_compile_ahead(text: str) -> None:
    in_groups = [
        cases.warp_specialized(128, 128, 64, 3, subtiles=2, prefetch=1, fused_finalize=1),
        cases.warp_specialized(128, 64, 64, 3, pingpong=1, fused_finalize=1),
        cases.warp_specialized(prefetch=1, splits=2, tma_store=0),
        cases.warp_specialized(64, 16, 64, 3, pingpong=1),  # one counter's columns each way
        cases.persistent(64, 64, flatten=0, subtiles=2, prefetch=1, fused_finalize=1),
        cases.tiled(32, 64, 32, fused_finalize=1),
    ]
    for batched in (False, True):
        spec = spec_of(text, BF16, layout="nt", tma=("a", "b"), k_multiple=64, batched=batched)
        jobs = [Job(RENDERER.render(spec, config), TARGETS["sm_90"], "nt") for config in in_groups]
        jobs += [Job(RENDERER.render(spec, cases.split_k()), TARGETS[other], "nt") for other in ("sm_80", "gfx942")]
        jobs.append(Job(RENDERER.render(spec_of(text, BF16, index_bits=64, batched=batched), cases.SMALL), TARGETS["sm_90"], "nn"))
        compiled(jobs)


@pytest.mark.triton
def test_what_a_thread_has_of_a_product_shares_a_counter() -> None:
    """Each two rows and columns n, n + 1, n + 8 and n + 9: four words of one Philox."""
    spec = spec_of("dropout(gelu(mm + bias), p, seed)", BF16, layout="nt", tma=("a", "b"), k_multiple=64)
    config = cases.warp_specialized(128, 128, 64, 3, pingpong=1, subtiles=2, prefetch=1)
    [[kernel]] = compiled([Job(RENDERER.render(spec, config), TARGETS["sm_90"], "nt")])
    consumers, threads = 2, 128
    an_element = str(kernel.stages["ptx"]).count("mul.hi.u32") / (consumers * 128 * 128 / threads)
    assert an_element < 20 / 4  # 2 in each of 10 rounds


@pytest.mark.triton
@pytest.mark.parametrize("config", ["tiled", "the last block", "library"])
def test_a_file_of_its_own(config: str, tmp_path: Path) -> None:
    kernel = epigen.compile("z = dropout(relu(mm), p, seed); z, sum(z, n), uniform(other)", config=CONFIGS[config])
    plan, file = kernel.plan((64, 48, 32), dtype=FP16), tmp_path / "drops.py"
    file.write_text(standalone(RENDERER, kernel.graph, plan.spec, plan.choice, plan.rendered))
    run = subprocess.run([sys.executable, file], capture_output=True, text=True, env={"TRITON_INTERPRET": "1", "PATH": ""})
    assert run.returncode == 0, run.stderr
