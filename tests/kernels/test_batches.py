"""Several products in one launch: operands, inputs and outputs with leading dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import cases
import pytest
import torch
from batched import EVERYTHING, GROUPED, LEADS, expected, given, same
from compiling import compiled
from golden import Golden
from programs import write_program
from samples import sparse
from specs import RENDERER, spec_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import BF16, FP16, FP32
from epigen.errors import CallError
from epigen.ir.derivation import ARRIVING, INPUT, SAVED
from epigen.perf import limits
from epigen.runtime import arguments, batches, outputs, vendor, verify
from epigen.runtime.ahead import Job
from epigen.runtime.batches import Batch
from epigen.training import composed, library

CONFIGS: Mapping[str, KernelConfig] = {
    "tiled": cases.tiled(32, 32, 32, prefetch=1),
    "split_k": cases.split_k(),
    "library": cases.LIBRARY,
    "tiled, the last block": cases.tiled(16, 32, 32, fused_finalize=1),
    "split_k, the last block": cases.split_k(fused_finalize=1),
    "library, the last block": cases.LIBRARY.with_value("fused_finalize", 1),
    "persistent": cases.persistent(),
    "persistent, subtiles": cases.persistent(64, 32, subtiles=2, flatten=0, prefetch=1),
    "persistent, pointers": cases.persistent(64, 32, tma_store=0, group_m=1),
    "persistent, the last block": cases.persistent(64, 32, flatten=0, subtiles=2, fused_finalize=1),
}


SAME_TEXT = (LEADS[3], LEADS[4], LEADS[7])
"""Those whose kernels have the text of others' of LEADS: they say no more of a Triton version."""


@pytest.mark.triton
@pytest.mark.parametrize(("config", "columns"), [(c, n) for c in CONFIGS for n in (45, 48) if n == 45 or "persistent" in c])
@pytest.mark.parametrize("leads", [pytest.param(leads, marks=[pytest.mark.slow] if leads in SAME_TEXT else []) for leads in LEADS], ids=str)
def test_kernels(leads: Any, config: str, columns: int) -> None:
    """columns: also such as TMA can address."""
    a, b, inputs = given(*leads, n=columns)
    same(epigen.compile(EVERYTHING, backend="interpreter", config=CONFIGS[config])(a, b, **inputs), expected(a, b, inputs))


@pytest.mark.triton
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_each_product_is_what_it_is_alone(part: int) -> None:
    """Random programs, of which each input has leading dimensions or has none, bit for bit."""
    random = Random(f"batches {part}")
    for _ in range(8):
        text = write_program(random, 8, tame=True, casts=(FP16, FP32), operands=random.random() < 0.4)
        able = [c for c in CONFIGS.values() if SCHEDULES[c.schedule].computes or "dot" not in text]
        kernel = epigen.compile(text, backend="interpreter", config=random.choice(able))
        several = [verify.sample(kernel.graph, (37, 45, 34), FP16, FP16, FP16, seed=seed, scalars_by_value=bool(part % 2)) for seed in range(3)]
        shared = {name for name, value in several[0].inputs.items() if random.random() < 0.5 or not isinstance(value, Tensor) or value.numel() == 1}
        inputs = {name: value if name in shared else torch.stack([s.inputs[name] for s in several]) for name, value in several[0].inputs.items()}
        found = kernel(torch.stack([s.a for s in several]), several[0].b, **inputs)
        for i, s in enumerate(several):
            alone = kernel(s.a, several[0].b, **{name: several[0].inputs[name] if name in shared else s.inputs[name] for name in inputs})
            for x, y in zip(*([r] if isinstance(r, Tensor) else r for r in (found, alone)), strict=True):
                assert torch.equal(x[i].nan_to_num(7), y.nan_to_num(7)), text


@pytest.mark.parametrize("leads", LEADS, ids=str)
def test_reference(leads: Any) -> None:
    a, b, inputs = given(*leads)
    kernel = epigen.compile(EVERYTHING)
    same(kernel(a, b, **inputs), expected(a, b, inputs))
    same(kernel(a, b, **inputs), expected(a, b, inputs))  # as it was prepared


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*CONFIGS.values(), *GROUPED.values(), cases.tiled(128, 128, 64, 8, 3), cases.persistent(128, 128, 64, 8), None], ids=str)
@pytest.mark.parametrize("leads", LEADS, ids=str)
@pytest.mark.parametrize("extents", [(33, 45, 20), (256, 128, 64)], ids=str)
def test_gpu(leads: Any, config: KernelConfig | None, extents: tuple[int, int, int]) -> None:
    """Also the second call and those after it, which Triton is not asked for."""
    a, b, inputs = given(*leads, *extents, dtype=torch.float16)
    wanted = [
        t.cuda()
        for t in expected(a.float(), b.float(), {name: v.float() if isinstance(v, Tensor) and v.dtype == torch.float16 else v for name, v in inputs.items()})
    ]
    a, b, inputs = a.cuda(), b.cuda(), {name: v.cuda() if isinstance(v, Tensor) else v for name, v in inputs.items()}
    kernel = epigen.compile(EVERYTHING, config=config)
    for _ in range(3):
        found = kernel(a, b, **inputs)
        same([x if x.dtype == torch.uint8 else x.float() for x in found], wanted)


def bare(on: str, dtype: torch.dtype, leads: Any, **options: Any) -> None:
    a, b, _ = given(*leads, dtype=dtype)
    lead = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    wanted, (a, b) = (a.double() @ b.double()).to(on, dtype), (a.to(on), b.to(on))
    kernel, out = epigen.compile("mm", config=cases.LIBRARY, **options), torch.zeros(*lead, 3, dtype=dtype, device=on)[..., 1]
    for _ in range(3):
        assert torch.equal(kernel(a, b), wanted) and torch.equal(kernel(a, b, out=out.zero_()), wanted)
    assert kernel._last is not None and kernel._last.plan is not None and kernel._last.plan.rendered.whole
    assert "torch.bmm" in kernel._last.plan.source


@pytest.mark.parametrize("leads", LEADS, ids=str)
def test_products_alone_are_the_vendors_whole(leads: Any) -> None:
    """By one call of its library, without a pass after it."""
    bare("cpu", torch.float32, leads, backend="interpreter")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("leads", LEADS, ids=str)
def test_products_alone_on_a_gpu(leads: Any, dtype: torch.dtype) -> None:
    bare("cuda", dtype, leads)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, cases.persistent(128, 16, 64), cases.warp_specialized(128, 16), cases.warp_specialized(128, 16, pingpong=1)], ids=str)
def test_gpu_past_32_bits(config: KernelConfig | None, room: Callable[[float], None]) -> None:
    room(7)
    a, b = torch.ones(3, 1 << 15, 1 << 15, dtype=torch.float16, device="cuda"), torch.ones(3, 1 << 15, 16, dtype=torch.float16, device="cuda")
    found = epigen.compile("cast(mm * 2, fp32)", config=config)(a, b)
    assert found.shape == (3, 1 << 15, 16) and bool((found == 2 << 15).all())


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
def test_each_matrix_may_lie_anyhow_and_far_from_the_next(config: str) -> None:
    """Where the distance from one to the next is past 32 bits, and the offsets within one are not."""
    far = (1 << 31) + 16
    a, b = sparse((2, 17, 24), (far, 24, 1)), sparse((2, 24, 19), (far, 1, 24))
    c, out = sparse((2, 17, 19), (far, 40, 2)), sparse((2, 17, 19), (far, 19, 1))
    kernel = epigen.compile("mm + c[m,n]", backend="interpreter", config=CONFIGS[config])
    assert kernel(a, b, c=c, out=out) is out and torch.equal(out, torch.stack([a[i] @ b[i] + c[i] for i in range(2)]))
    assert kernel._last is not None and kernel._last.plan is not None and kernel._last.plan.spec.signature.index_bits == 32


def heads(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and an input of 4 products, of which each has 24 of the 96 columns of rows that all share: their matrices lie nearer than a matrix's rows."""
    torch.manual_seed(0)
    a, b, c = (torch.randint(-2, 3, (70, 4, 24)).to(device, dtype).transpose(0, 1) for _ in range(3))
    return a, b.mT[..., :24], c


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
def test_matrices_may_lie_side_by_side(config: str) -> None:
    a, b, c = heads(torch.float32, "cpu")
    assert a.stride() == (24, 96, 1)
    out = torch.zeros(70, 4, 24).transpose(0, 1)
    assert epigen.compile("mm + c[m,n]", backend="interpreter", config=CONFIGS[config])(a, b, c=c, out=out) is out
    assert torch.equal(out, a @ b + c)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*CONFIGS.values(), *GROUPED.values()], ids=str)
def test_gpu_matrices_may_lie_side_by_side(config: KernelConfig) -> None:
    a, b, c = heads(torch.float16, "cuda")
    out = torch.zeros(70, 4, 24, dtype=torch.float16, device="cuda").transpose(0, 1)
    kernel = epigen.compile("mm + c[m,n]", config=config)
    for _ in range(3):
        assert kernel(a, b, c=c, out=out) is out and torch.equal(out.float(), a.float() @ b.float() + c.float())


@pytest.mark.triton
def test_computed_operands_and_given_products() -> None:
    a, b, inputs = given((3,), (3,), ())
    norm = torch.arange(60.0).reshape(3, 20)
    found = epigen.compile("dot(relu(a) * norm[k], b)", backend="interpreter", config=CONFIGS["tiled"])(a, b, norm=norm)
    assert torch.equal(found, (torch.relu(a) * norm[:, None, :]) @ b)
    mm = a @ b
    for backend in ("interpreter", "reference"):
        assert torch.equal(epigen.compile("relu(mm + bias)", backend=backend).over(mm, bias=inputs["bias"]), torch.relu(mm + inputs["bias"]))


def test_in_place_and_in_the_callers_buffers(golden: Golden) -> None:
    a, b, _ = given((2, 3), (2, 3), ())
    residual = torch.ones(2, 3, 33, 45)
    epigen.compile("mm + residual")(a, b, residual=residual, out=residual)
    assert torch.equal(residual, a @ b + 1)
    with golden.raises(CallError, "expanded"):
        epigen.compile("mm")(a, b, out=torch.empty(33, 45).expand(2, 3, 33, 45))
    for step in (0, 44, 45 * 32):  # each begins before the one in front of it ends, and in its places
        with pytest.raises(CallError):
            epigen.compile("mm")(a[0], b[0], out=torch.empty(9000).as_strided((3, 33, 45), (step, 45, 1)))
    with golden.raises(CallError, "one product"):
        epigen.compile("mm")(a, b, out=torch.empty(33, 45))


@pytest.mark.parametrize(
    ("a", "b", "inputs", "name"),
    [
        ((2, 3, 4), (3, 4, 5), {}, "batches"),
        ((2, 3, 4), (2, 5, 4), {}, "K differs"),
        ((2, 1, 3, 4), (2, 6, 4, 5), {}, "a batch to copy"),
        ((2, 3, 4), (2, 4, 5), {"bias": (3, 5)}, "a batch of biases"),
        ((2, 3, 4), (2, 4, 5), {"bias": (2, 6)}, "a bias of N"),
        ((2, 3, 4), (4,), {}, "a vector"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(a: tuple[int, ...], b: tuple[int, ...], inputs: Mapping[str, tuple[int, ...]], name: str, golden: Golden) -> None:
    with golden.raises(CallError, name):
        epigen.compile("mm + bias" if inputs else "mm")(torch.ones(a), torch.ones(b), **{key: torch.ones(size) for key, size in inputs.items()})


# -- which schedules


def test_every_schedule_can() -> None:
    target, shape = gpus.TARGETS["sm_90"], (4, 512, 512, 4096)
    assert set(Space(spec_of("relu(mm)", batched=True, tma=("a", "b", "out")), shape, target).schedules) == {
        name for name, schedule in SCHEDULES.items() if not schedule.converts
    }


@pytest.mark.parametrize("target", gpus.TARGETS)
def test_the_rule_chooses_what_can_run(target: str) -> None:
    for text, a, shape in (
        ("mm * s", FP16, (64, 1024, 1024, 128)),
        ("mm, bgrad(mm)", BF16, (8, 16, 4096, 4096)),
        ("relu(mm + bias)", FP32, (1024, 70, 50, 30)),
        ("mm", FP16, (2, 128, 128, 64)),
        ("mm", FP16, (0, 128, 128, 64)),
    ):
        spec = spec_of(text, a, batched=True)
        config = rule.choose(spec, shape, gpus.TARGETS[target]).config
        assert limits.refusal(spec, config, shape, gpus.TARGETS[target]) == "" and Space(spec, shape, gpus.TARGETS[target]).legal(config)


def test_many_small_products_fill_the_gpu_with_large_tiles() -> None:
    target = gpus.TARGETS["sm_90"]
    one, many = (rule.choose(spec_of("mm * s", batched=len(shape) == 4), shape, target).config for shape in ((1024, 1024, 128), (64, 1024, 1024, 128)))
    assert many["block_m"] * many["block_n"] > one["block_m"] * one["block_n"]
    assert "can be numbered" in limits.unfit(spec_of("mm", batched=True), cases.tiled(), (1 << 27, 1024, 1024, 128), target)


_WIDE = ("cp.async.cg.shared.global", "st.global.v4", "global_load_dwordx4", "buffer_load_dwordx4", "global_store_dwordx4", "buffer_store_dwordx4")


@pytest.mark.triton
def test_kernels_compile_ahead_and_load_as_wide() -> None:
    """As those of one product."""
    jobs, wide = [], []
    for target in ("sm_80", "sm_90", "gfx942"):
        for text, config in (("z = relu(mm + bias); z, bgrad(z)", cases.tiled(64, 64, 64, 4, 3)), ("mm * s", cases.split_k())):
            for batched in (False, True):
                jobs.append(Job(RENDERER.render(spec_of(text, BF16, k_multiple=64, batched=batched), config), gpus.TARGETS[target], "nn"))
    for one, (main, *_) in zip(jobs, compiled(jobs), strict=True):
        stage = str(main.stages["ptx" if one.target.backend == "cuda" else "amdgcn"])
        wide.append([stage.count(instruction) for instruction in _WIDE])
        assert main.resources.spills == 0
    assert all(alone == together and any(alone) for alone, together in zip(wide[::2], wide[1::2], strict=True))


_BY_TMA = ("wgmma.mma_async", "cp.async.bulk.tensor", "stmatrix", "ldmatrix", "ld.global", "st.global", "st.shared", "ld.shared")


@pytest.mark.triton
def test_hoppers_kernels_move_as_much_at_once() -> None:
    """As those of one product, of which TMA moves blocks of two dimensions."""
    jobs = []
    for text, layout, config in (
        ("mm * s", "nn", cases.persistent(128, 128, 64, 8)),
        ("z = relu(mm + bias); z, bgrad(z)", "tt", cases.persistent(128, 128, 64, 8, flatten=0, subtiles=2)),
        ("mm * s", "nn", cases.warp_specialized(128, 128, pingpong=1)),
        ("z = relu(mm + c[m,n]); z, bgrad(z)", "tt", cases.warp_specialized(128, 128, pingpong=1, subtiles=2, tma_load=1)),
        ("relu(mm + bias)", "nt", cases.warp_specialized(128, 128, prefetch=1, splits=2)),
    ):
        for batched in (False, True):
            spec = spec_of(text, BF16, k_multiple=64, layout=layout, tma=("a", "b", "c", "z", "out"), batched=batched)
            jobs.append(Job(RENDERER.render(spec, config), gpus.TARGETS["sm_90"], layout))
    found = [main for main, *_ in compiled(jobs)]
    assert all(main.resources.spills == 0 for main in found)
    texts = [str(main.stages["ptx"]) for main in found]
    for alone, together in zip(texts[::2], texts[1::2], strict=True):
        assert [alone.count(x) for x in _BY_TMA] == [together.count(x) for x in _BY_TMA]
        assert alone.count("tensor.2d") == together.count("tensor.3d") > 0 and "tensor.2d" not in together


def test_what_tma_can_address_of_a_batch() -> None:
    def described(*tensors: Tensor) -> tuple[str, ...]:
        kernel = epigen.compile("mm + c[m,n]")
        first, inputs, batch = batches.one(kernel._inputs, tensors[:2], {"c": tensors[2]})
        return kernel._signature((8, 16, 24), first, inputs, {}, outputs.of(kernel.graph, FP16), batch).tma

    a, b, c = torch.zeros(3, 8, 24).half(), torch.zeros(3, 24, 16).half(), torch.zeros(3, 8, 16).half()
    assert described(a, b, c) == ("a", "b", "c", "out")
    assert described(a, b[0], c[0]) == ("a", "b", "c", "out")  # what all products share lies at a distance of 0
    odd = torch.zeros(3 * (8 * 24 + 4)).half()
    assert described(odd.as_strided((3, 8, 24), (8 * 24 + 4, 24, 1)), b, c) == ("b", "c", "out")


@pytest.mark.parametrize("shared", [False, True])
def test_copies_with_aligned_rows_are_as_many_as_there_are_matrices(shared: bool) -> None:
    t = torch.randn(2, 3, 5, 7)
    several = Batch((2, 3), {"b": 0 if shared else 35}).stacked("b", t[0, 0] if shared else t)
    found = arguments.padded(several.mT, "t")
    assert found.shape == (6, 5, 7) and found.stride() == (0 if shared else 5 * 32, 32, 1)
    assert torch.equal(found, (t[:1, :1].expand(2, 3, 5, 7) if shared else t).reshape(6, 5, 7))


def test_the_vendors_products() -> None:
    a, b, _ = given((2, 3), (3,), ())
    assert torch.equal(vendor.products(a, b, "ieee"), a @ b)
    eight = torch.ones(2, 4, 3, dtype=torch.int8)
    assert torch.equal(vendor.products(eight, eight.mT, "ieee"), torch.full((2, 4, 4), 3, dtype=torch.int32))
    assert vendor.products(torch.ones(0, 4, 3), torch.ones(3, 2), "ieee").shape == (0, 4, 2)


# -- derivatives, and torch


@pytest.mark.parametrize("text", ["relu(mm + bias)", "gelu(mm * alpha + bias) * residual", "mm * alpha + residual"])
def test_the_derivatives_programs_run_on_batches(text: str) -> None:
    """Gradients of what all products share are sums of theirs."""
    torch.manual_seed(0)
    a, b, dy = (torch.randn(size, dtype=torch.float64) for size in ((3, 5, 4), (3, 4, 6), (3, 5, 6)))
    inputs = {
        "bias": torch.randn(6, dtype=torch.float64),
        "residual": torch.randn(3, 5, 6, dtype=torch.float64),
        "alpha": torch.tensor(1.5, dtype=torch.float64),
    }
    derived = epigen.derive(text, save="recompute" if "gelu" in text else None, dtype="fp32")
    own = {n.name: inputs[n.name] for n in derived.forward.inputs()}
    kept = epigen.compile(derived.forward.text)(a, b, **own)
    names = [o.name for o in derived.forward.outputs]
    sources: dict[str, Any] = {INPUT: own, ARRIVING: {"out": dy}, SAVED: dict(zip(names, kept if len(names) > 1 else [kept], strict=True))}
    given = {x.name: sources[x.source][x.of] for x in derived.arguments}
    results = epigen.compile(derived.backward.text)(*((dy, torch.eye(6, dtype=torch.float64)) if derived.product else (a, b)), **given)
    found = dict(zip([o.name for o in derived.backward.outputs], results if isinstance(results, tuple) else [results], strict=True))
    leaves = {"mm": (a @ b).requires_grad_(), **{name: t.clone().requires_grad_() for name, t in own.items()}}
    y = {
        "relu(mm + bias)": lambda mm, bias: torch.relu(mm + bias),
        "gelu(mm * alpha + bias) * residual": lambda mm, bias, residual, alpha: torch.nn.functional.gelu(mm * alpha + bias) * residual,
        "mm * alpha + residual": lambda mm, residual, alpha: mm * alpha + residual,
    }[text](**leaves)  # type: ignore[operator]
    for x in derived.gradients:
        gradient = dy if x.passed else found[x.output]
        wanted = torch.autograd.grad(y, leaves[x.of], dy, retain_graph=True)[0]
        torch.testing.assert_close(gradient.sum_to_size(wanted.shape) if wanted.dim() else gradient.sum(), wanted, check_dtype=False, rtol=1e-6, atol=1e-6)


@pytest.mark.triton
@pytest.mark.parametrize("config", CONFIGS)
def test_kernels_of_derivatives_run_on_batches(config: str) -> None:
    """Forward and backward, masks and reductions included, against float64."""
    for text in ("relu(mm + bias)", "gelu(mm * alpha + bias) * residual"):
        derived = epigen.derive(text, dtype="fp16")
        for program in (derived.forward.text, derived.backward.text):
            kernel = epigen.compile(program, backend="interpreter", config=CONFIGS[config])
            verify.demand(verify.differences(kernel, verify.sample(kernel.graph, (3, 40, 48, 32), FP16, FP16, FP16)))


def test_torch_sees_the_shapes_of_batches() -> None:
    a, b, inputs = given((2, 3), (), (2, 3))
    kernel = epigen.compile(EVERYTHING)
    shapes = [t.shape for t in kernel(a, b, **inputs)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(v) if isinstance(v, Tensor) else v for name, v in inputs.items()}
        assert [t.shape for t in kernel(mode.from_tensor(a), mode.from_tensor(b), **fake)] == shapes
        assert epigen.compile("relu(mm)").over(mode.from_tensor(a)).shape == a.shape
    tensors = [inputs[name] if isinstance(inputs[name], Tensor) else None for name in library.names(EVERYTHING)]
    written = composed.WRITTEN_OUT[library.program](EVERYTHING, None, a, b, tensors, [inputs["alpha"]])
    same(written, expected(a, b, inputs))
    assert math.prod(written[0].shape) == 6 * 33 * 45
