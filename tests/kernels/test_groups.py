"""Products of groups whose ends lie on the device: of rows, each with a right operand of its own, and along k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cases
import pytest
import torch
from compiling import compiled
from grouped import ENDS, EXTENT, HOPPER, OF_K, ROWS, TILED, K, M, N, along_k, ends_of, given, same, same_along_k, spans, whole
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import epigen
from epigen import gpus
from epigen.choose import rule
from epigen.choose.space import Space
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig
from epigen.dtypes import BY_TORCH
from epigen.errors import CallError, ConfigError
from epigen.perf import limits
from epigen.runtime import batches, groups, outputs
from epigen.runtime.ahead import Job
from epigen.runtime.kernel import Kernel
from epigen.runtime.prepared import Plan
from epigen.shapes import Shape


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ends", ENDS)
def test_rows_by_the_reference(ends: str, shared: bool) -> None:
    a, b, inputs = given(len(ENDS[ends]), shared)
    kernel = epigen.compile(ROWS)
    for _ in range(2):  # also as it was prepared
        same(kernel(a, b, groups=ends_of(ENDS[ends]), **inputs), ENDS[ends], a, b, inputs)


@pytest.mark.triton
@pytest.mark.parametrize("config", TILED)
@pytest.mark.parametrize("ends", ENDS)
def test_rows(ends: str, config: str) -> None:
    a, b, inputs = given(len(ENDS[ends]), shared="tiles" in config)
    found = epigen.compile(ROWS, backend="interpreter", config=TILED[config])(a, b, groups=ends_of(ENDS[ends]), **inputs)
    same(found, ENDS[ends], a, b, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*TILED, *HOPPER, "chosen"])
@pytest.mark.parametrize("ends", ENDS)
def test_rows_on_the_gpu(ends: str, config: str) -> None:
    if config in HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a schedule of sm_90")
    several = [5 * end for end in ENDS[ends]]
    a, b, inputs = given(len(several), shared="tiles" in config, m=5 * M, dtype=torch.float16, device="cuda")
    kernel = epigen.compile(ROWS, config=(TILED | HOPPER).get(config))
    for _ in range(3):
        same(kernel(a, b, groups=ends_of(several, "cuda"), **inputs), several, a, b, inputs)


# -- along k


@pytest.mark.parametrize("ends", ENDS)
def test_along_k_by_the_reference(ends: str) -> None:
    a, b, inputs = along_k(len(ENDS[ends]))
    same_along_k(epigen.compile(OF_K)(a, b, groups=ends_of(ENDS[ends]), **inputs), ENDS[ends], a, b, inputs)


@pytest.mark.triton
@pytest.mark.parametrize("config", TILED)
@pytest.mark.parametrize("ends", [ends for ends in ENDS if len(ENDS[ends]) < 100])
def test_along_k(ends: str, config: str) -> None:
    a, b, inputs = along_k(len(ENDS[ends]))
    same_along_k(
        epigen.compile(OF_K, backend="interpreter", config=TILED[config])(a, b, groups=ends_of(ENDS[ends]), **inputs), ENDS[ends], a, b, inputs
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*TILED, *HOPPER, "chosen"])
@pytest.mark.parametrize("ends", ENDS)
def test_along_k_on_the_gpu(ends: str, config: str) -> None:
    if config in HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a schedule of sm_90")
    several = [3 * end for end in ENDS[ends]]
    a, b, inputs = along_k(len(several), torch.float16, "cuda", 3 * EXTENT)
    kernel = epigen.compile(OF_K, config=(TILED | HOPPER).get(config))
    for _ in range(3):  # through Triton, and straight to the driver
        same_along_k(kernel(a, b, groups=ends_of(several, "cuda"), **inputs), several, a, b, inputs)


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_what_is_read_and_written_is_the_groups(backend: str) -> None:
    """What lies between groups' ends and the tensors' is neither read into a result nor written."""
    a, b = torch.full((M, K), torch.nan), whole(2, K, N)
    a[:12] = whole(12, K)
    out = torch.full((M, N), 7.0)
    kernel = epigen.compile("mm", backend=backend, config=None if backend == "reference" else TILED["tiled"])
    kernel(a, b, groups=ends_of((5, 12)), out=out)
    assert torch.equal(out[:12], torch.cat([a[:5] @ b[0], a[5:12] @ b[1]]))
    assert backend == "reference" or (out[12:] == 7).all()


# -- what else programs have


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_positions_and_random_numbers_count_all_rows(backend: str) -> None:
    a, b = whole(M, K), whole(2, K, N)
    product = torch.cat([a[:15] @ b[0], a[15:] @ b[1]])
    ends = ends_of((15, M))
    found = epigen.compile("where(m > n, mm, 0) + pos[m % P]", backend=backend)(a, b, groups=ends, pos=torch.arange(7.0))
    rows = torch.arange(M)
    assert torch.equal(found, torch.where(rows[:, None] > torch.arange(N), product, 0) + rows[:, None] % 7)
    drop = "dropout(mm, 0.5, seed)"
    alone = epigen.compile(drop)(torch.ones(M, 1), torch.ones(1, N), seed=11) != 0
    assert torch.equal(epigen.compile(drop, backend=backend)(torch.ones(M, 1), torch.ones(2, 1, N), seed=11, groups=ends) != 0, alone)


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_gated_units_and_second_products(backend: str) -> None:
    a, both = whole(M, K), whole(3, K, 2 * N)
    ends = (4, 4, 33)
    gate, up = both.chunk(2, -1)
    expected = torch.cat([torch.relu(a[i:j] @ gate[g]) * (a[i:j] @ up[g]) for g, (i, j) in enumerate(spans(ends))])
    stacked = epigen.compile("left, right = halves(mm); relu(left) * right", backend=backend)(a, both, groups=ends_of(ends))
    apart = epigen.compile("relu(mm) * dot(a, up[k,n])", backend=backend)(a, gate.contiguous(), up=up.contiguous(), groups=ends_of(ends))
    assert torch.equal(stacked[:33], expected) and torch.equal(apart[:33], expected)


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_computed_operands(backend: str) -> None:
    a, b, norm, step = whole(M, K), whole(2, K, N), whole(2, K), whole(M)
    found = epigen.compile("dot(a * step[m], b * norm[k])", backend=backend)(a, b, groups=ends_of((9, M)), norm=norm, step=step)
    left = a * step[:, None]
    assert torch.equal(found, torch.cat([left[:9] @ (b[0] * norm[0][:, None]), left[9:] @ (b[1] * norm[1][:, None])]))
    scale = whole(EXTENT)
    x, z = whole(M, EXTENT), whole(EXTENT, N)
    found = epigen.compile("dot(a * scale[k], b)", backend=backend)(x, z, groups=ends_of((9, EXTENT)), scale=scale)
    x = x * scale
    assert torch.equal(found, torch.stack([x[:, :9] @ z[:9], x[:, 9:] @ z[9:]]))


def test_outputs_of_the_callers() -> None:
    a, b, _ = given(2, True)
    kernel = epigen.compile("mm, sum(mm, m), sum(mm, n)")
    out = (torch.empty(M, N), torch.empty(2, N), torch.empty(M))
    assert kernel(a, b, groups=ends_of((8, M)), out=out)[1] is out[1]
    assert torch.equal(out[1], torch.stack([out[0][:8].sum(0), out[0][8:].sum(0)]))
    with pytest.raises(CallError, match=r"leading dimensions \[2\] was expected"):
        kernel(a, b, groups=ends_of((8, M)), out=(out[0], torch.empty(N), out[2]))


# -- as torch traces it


def test_torch_sees_one_operation() -> None:
    a, b, _ = given(3, True)
    ends, kernel = ends_of((8, 8, M)), epigen.compile("relu(mm) * scale[m], sum(mm, m)")
    scale = whole(M)

    def call(a: Tensor, b: Tensor, ends: Tensor, scale: Tensor) -> Any:
        return tuple(kernel(a, b, groups=ends, scale=scale))

    expected = call(a, b, ends, scale)
    traced = make_fx(call)(a, b, ends, scale)
    assert [node.target for node in traced.graph.nodes if "epigen" in str(node.target)] == [torch.ops.epigen.program.default]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for one in (traced(a, b, ends, scale), compiled(a, b, ends, scale)):
        assert all(map(torch.equal, one, expected))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (a, b, ends, scale)]
        assert [t.shape for t in call(*fake)] == [t.shape for t in expected]


@pytest.mark.parametrize("ask", ["explain", "source"])
def test_a_kernel_tells_of_its_last_call(ask: str) -> None:
    a, b, _ = given(2, True)
    kernel = epigen.compile("relu(mm)")
    kernel(a, b, groups=ends_of((8, M)))
    said = getattr(kernel, ask)()
    assert ("2x32x48x32" in said) if ask == "explain" else ("# for groups of rows, each with a b of its own" in said)


def test_meta_tensors_and_a_gpus_text() -> None:
    kernel = epigen.compile("mm + bias, sum(mm, m)")
    a, b = torch.empty(1 << 13, 2048, device="meta", dtype=torch.bfloat16), torch.empty(64, 2816, 2048, device="meta", dtype=torch.bfloat16).mT
    ends, bias = torch.empty(64, device="meta", dtype=torch.int32), torch.empty(64, 2816, device="meta")
    assert [tuple(t.shape) for t in kernel(a, b, groups=ends, bias=bias)] == [(1 << 13, 2816), (64, 2816)]
    assert tuple(kernel(torch.empty(8, 64, device="meta"), torch.empty(64, 16, device="meta"), groups=ends, bias=bias[:, :16])[0].shape) == (64, 8, 16)


# -- what is chosen


def planned(kernel: Kernel, a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> tuple[Plan, Shape]:
    """What a call on an H100 would run, and its problem."""
    grouped = kernel._grouped
    operands, given, batch = groups.one(kernel.graph, grouped._inputs, (a, b), inputs)
    m, n, k = a.shape[0], b.shape[-1], a.shape[1]
    outs = outputs.of(kernel.graph, BY_TORCH[str(a.dtype)])
    _, batch = batches.with_outputs(batch, outs, {}, m, n)
    signature, problem = grouped._signature((m, n, k), operands, given, {}, outs, batch), batch.problem(m, n, k)
    return grouped.plan(problem, target=gpus.TARGETS["sm_90"], signature=signature), problem


def experts(text: str, dtype: torch.dtype = torch.bfloat16, config: KernelConfig | None = None, g: int = 64, m: int = 8192) -> Plan:
    a, b = torch.empty(m, 2048, device="meta", dtype=dtype), torch.empty(g, 1408, 2048, device="meta", dtype=dtype).mT
    inputs = {"bias": torch.empty(g, 1408, device="meta"), "up": b} | {"groups": torch.empty(g, dtype=torch.int32, device="meta")}
    return planned(epigen.compile(text, config=config), a, b, {name: t for name, t in inputs.items() if name in text or name == "groups"})[0]


def gradient(rows: int, config: KernelConfig | None = None) -> Plan:
    """Of 64 experts' weights."""
    a, b = torch.empty(rows, 2048, device="meta", dtype=torch.bfloat16).mT, torch.empty(rows, 1536, device="meta", dtype=torch.bfloat16)
    return planned(epigen.compile("mm", config=config), a, b, {"groups": torch.empty(64, dtype=torch.int32, device="meta")})[0]


@pytest.mark.triton
def test_kernels_compile_ahead() -> None:
    """For sm_90 with hardly a spill, of which the producer has 24 registers to find groups in, by the tensor cores' own instructions and by TMA that knows where groups
    end; and in Triton's language for others."""
    texts = ("mm", "silu(mm) * dot(a, up[k,n])", "mm + bias, sum(mm, m)")
    plans = [experts(text, m=m) for text in texts for m in (8192, 2048)] + [experts("mm", torch.float8_e4m3fn), gradient(8192), gradient(1 << 16)]
    assert {(p.choice.config.schedule, p.choice.config["pingpong"]) for p in plans} == {("warp_specialized", 0), ("warp_specialized", 1)}
    jobs = [Job(p.rendered, gpus.TARGETS["sm_90"], "nt") for p in plans]
    tiled = experts("mm + bias, sum(mm, m)", config=cases.tiled(64, 64, 64, 4, 3))
    others = [Job(tiled.rendered, gpus.TARGETS[target], "nt") for target in ("sm_80", "gfx942")]
    for main, *_ in compiled(jobs):
        text = str(main.stages["ptx"])
        assert main.resources.spills <= 64 and "wgmma.mma_async" in text and "cp.async.bulk.tensor.3d" in text and "cp.async.bulk.tensor.4d" in text
    assert all(main.resources.spills == 0 for main, *_ in compiled(others))


def test_what_is_chosen_is_a_point_of_the_space() -> None:
    """Whatever the shape: also where TMA can address nothing, and where groups have a row or none."""
    h100 = gpus.TARGETS["sm_90"]
    for text in ("mm", "mm + bias, sum(mm, m)", "silu(mm) * dot(a, up[k,n])", "q, s = quantize(mm, fp8e4m3, n/128); q, s"):
        kernel = epigen.compile(text)
        for g, m, n, k in ((8, 8192, 4096, 4096), (64, 8192, 2816, 2048), (128, 100, 1536, 2048), (3, 10, 20, 30), (8, 256, 14336, 4096), (2, 0, 64, 64)):
            for along in "mk" if "up" not in text else "m":
                dtype = torch.bfloat16
                a = torch.empty(m, k if along == "m" else n, device="meta", dtype=dtype)
                a = a if along == "m" else a.mT
                b = torch.empty(*(g, k, n) if along == "m" else (m, n), device="meta", dtype=dtype)
                inputs: dict[str, Any] = {"bias": torch.empty(n, device="meta"), "up": torch.empty(g, k, n, device="meta", dtype=dtype)}
                inputs = {name: t for name, t in inputs.items() if name in text} | {"groups": torch.empty(g, dtype=torch.int32, device="meta")}
                plan, problem = planned(kernel, a, b, inputs)
                spec, config = plan.spec, plan.choice.config
                assert spec.signature.grouped == along and along in SCHEDULES[config.schedule].groups
                assert not limits.unfit(spec, config, problem, h100)
                assert 0 in problem or Space(spec, problem, h100).legal(config), (text, problem, config)
                by_rule = rule.choose(spec, problem, h100).config
                assert not limits.unfit(spec, by_rule, problem, h100), (text, problem, by_rule)


@pytest.mark.parametrize(
    ("along", "config", "why"),
    [
        ("m", cases.split_k(), "the schedule split_k takes no groups along m, which end anywhere: tiled and warp_specialized can"),
        ("m", cases.LIBRARY, "the schedule library takes no groups along m"),
        ("m", cases.tiled(fused_finalize=1), "fused_finalize=0 is needed"),
        ("m", cases.warp_specialized(splits=2), "splits=1 is needed"),
        ("k", cases.warp_specialized(splits=2), "splits=1 is needed"),
        ("k", cases.persistent(), "the schedule persistent takes no groups along k"),
        ("k, by rows", cases.warp_specialized(), "as layout tn has them, and these lie as nn: a.T and b with contiguous rows are needed"),
    ],
)
def test_configs_that_cannot(along: str, config: KernelConfig, why: str) -> None:
    a, b, _ = given(2, True, dtype=torch.float16)
    kernel = epigen.compile("mm, sum(mm, m)", config=config)
    if along != "m":
        a, b = (torch.empty(64, 128, dtype=torch.float16), torch.empty(128, 64, dtype=torch.float16))
        a = a if "rows" in along else a.T.contiguous().T
    with pytest.raises(ConfigError, match=why.replace("(", r"\(")):
        kernel.warm(a.to("meta"), b.to("meta"), gpus.TARGETS["sm_90"], groups=ends_of((1, 2)).to("meta"))


# -- mistakes


def _call(**changed: Any) -> Callable[[], Any]:
    def call() -> Any:
        a, b, _ = given(2, True)
        values = {"text": "mm", "a": a, "b": b, "groups": ends_of((8, M))} | changed
        text, a, b = (values.pop(name) for name in ("text", "a", "b"))
        options = values.pop("options", {})
        return epigen.compile(text, **options)(a, b, **values)

    return call


MISTAKES: Mapping[str, tuple[Callable[[], Any], str]] = {
    "a list": (_call(groups=[8, M]), "groups is where each group ends, a contiguous int32 tensor [G], and a list was given: pass ends.to(torch.int32)"),
    "int64": (_call(groups=torch.tensor([8, M])), "groups is where each group ends, a contiguous int32 tensor [G], and torch.int64 [2] was given"),
    "a matrix": (_call(groups=ends_of((8, M))[None]), "and torch.int32 [1, 2] was given"),
    "none": (_call(groups=ends_of(())), "groups has no elements: a call has a group at least, which may be empty"),
    "elsewhere": (_call(groups=ends_of((8, M)).to("meta")), "groups is on meta, and the call's other tensors are on cpu"),
    "too many": (_call(groups=ends_of((8, 9, M))), "b is [G, K, N] = [2, 32, 48], and groups has 3 ends: a matrix for each was expected"),
    "a batch": (_call(a=whole(2, M, K)), "with groups, of rows a is [M, K] and b [G, K, N], and along k a is [M, K] and b [K, N]: a is [2, 40, 32] and b is [2, 32, 48]"),
    "K": (_call(a=whole(M, K + 1)), "K differs"),
    "columns of another count": (
        _call(text="mm + bias", bias=whole(3, N)),
        "input 'bias' is [3, 48]: its leading dimensions [3] do not broadcast to the product's [2]",
    ),
    "rows of each": (_call(text="mm + s[m]", s=whole(2, M)), "input 's' is declared as s[m], so [M] = [40] was expected"),
    "how many rows": (_call(text="mean(mm, m)"), "the program computes with the number of rows, and each group has another: pass it as an input"),
    "blocks of k": (
        _call(text="dot(a * s[m,k/8], b)", a=whole(M, EXTENT), b=whole(EXTENT, N), s=whole(M, 5)),
        "input 's' has one value for several of k, and groups along k begin anywhere: expand it along k",
    ),
    "invariant": (_call(options={"invariant": "m"}), "the program is invariant, and groups have no order of sums that is kept for all M: compile it without invariant"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    call, why = MISTAKES[mistake]
    with pytest.raises(CallError) as caught:
        call()
    assert why in str(caught.value)


def test_a_product_that_is_given_has_no_groups() -> None:
    with pytest.raises(CallError, match="the product is given, and groups are of a product that is still to be taken: call the kernel with a and b"):
        epigen.compile("relu(mm)").over(whole(M, N), groups=ends_of((8, M)))


def test_gradients_are_refused() -> None:
    a, b, _ = given(2, True)
    with pytest.raises(CallError, match="requires grad"):
        epigen.compile("mm")(a.requires_grad_(), b, groups=ends_of((8, M)))
