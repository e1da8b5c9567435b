"""The differential cases: one list for every backend, so that the interpreter and the GPU are held to the same answers.

A case is a program, a problem and a config; what runs it compares with the float64 oracle within the oracle's bound. No torch here.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from epigen import ops
from epigen.codegen import schedules
from epigen.codegen.spec import LAYOUTS, KernelConfig
from epigen.dtypes import BF16, FAST_ACCUM, FP8E4M3, FP8E5M2, FP16, FP32, INT8, UINT8, DType

FLOATS = (FP32, FP16, BF16, FP8E4M3, FP8E5M2)
LIBRARY = schedules.config("library", block_m=16, block_n=64, num_warps=4)


def tiled(
    block_m: int = 64, block_n: int = 64, block_k: int = 32, num_warps: int = 4, num_stages: int = 2, group_m: int = 4, fused_finalize: int = 0,
    prefetch: int = 0,
) -> KernelConfig:  # fmt: skip
    return schedules.config(
        "tiled", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, num_warps=num_warps, num_stages=num_stages, fused_finalize=fused_finalize,
        prefetch=prefetch,
    )  # fmt: skip


def split_k(
    block_m: int = 32, block_n: int = 32, block_k: int = 32, splits: int = 4, num_warps: int = 4, num_stages: int = 2, group_m: int = 1,
    fused_finalize: int = 0, prefetch: int = 0,
) -> KernelConfig:  # fmt: skip
    return schedules.config(
        "split_k", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, num_warps=num_warps, num_stages=num_stages, splits=splits,
        fused_finalize=fused_finalize, prefetch=prefetch,
    )  # fmt: skip


def persistent(
    block_m: int = 64, block_n: int = 64, block_k: int = 32, num_warps: int = 4, num_stages: int = 3, group_m: int = 2,
    flatten: int = 1, subtiles: int = 1, tma_store: int = 1, fused_finalize: int = 0, prefetch: int = 0,
) -> KernelConfig:  # fmt: skip
    return schedules.config(
        "persistent", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, flatten=flatten, subtiles=subtiles, tma_store=tma_store,
        num_warps=num_warps, num_stages=num_stages, fused_finalize=fused_finalize, prefetch=prefetch,
    )  # fmt: skip


def warp_specialized(
    block_m: int = 128,
    block_n: int = 64,
    block_k: int = 64,
    num_stages: int = 3,
    group_m: int = 2,
    pingpong: int = 0,
    subtiles: int = 1,
    tma_store: int = 1,
    tma_load: int = 0,
    prefetch: int = 0,
    fused_finalize: int = 0,
    splits: int = 1,
) -> KernelConfig:
    return schedules.config(
        "warp_specialized", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, pingpong=pingpong, subtiles=subtiles, prefetch=prefetch,
        tma_store=tma_store, tma_load=tma_load, num_stages=num_stages, fused_finalize=fused_finalize, splits=splits,
    )  # fmt: skip


def mixed_input(
    block_m: int = 64, block_n: int = 128, block_k: int = 64, num_stages: int = 3, group_m: int = 2, tma_store: int = 1, splits: int = 1
) -> KernelConfig:  # fmt: skip
    return schedules.config(
        "mixed_input", block_m=block_m, block_n=block_n, block_k=block_k, group_m=group_m, tma_store=tma_store, num_stages=num_stages, splits=splits
    )


SMALL = tiled(32, 32, 32)
"""Two or three tiles each way at the usual case's extents, quick under the interpreter."""


@dataclass(frozen=True)
class Case:
    """view: how operands and inputs lie: plain, sliced (every second row and column of something larger), expanded (stride 0),
    shifted (not aligned to 16 bytes)."""

    text: str
    shape: tuple[int, int, int] = (50, 70, 40)
    a: DType = FP16
    b: DType | None = None
    inputs: DType = FP16
    layout: str = "nn"
    view: str = "plain"
    config: KernelConfig | None = field(default=SMALL)
    integers: bool = False
    precision: str = "ieee"
    by_value: bool = True

    def __str__(self) -> str:
        parts = [self.text, "x".join(map(str, self.shape)), str(self.a)]
        parts += [str(self.b)] if self.b else []
        parts += [p for p, default in ((str(self.inputs), "fp16"), (self.layout, "nn"), (self.view, "plain"), (self.precision, "ieee")) if p != default]
        parts += ["integers"] if self.integers else []
        parts += (
            []
            if self.config is SMALL
            else [str(self.config) if self.config and self.config.schedule not in ("tiled", "library") else self.config.schedule if self.config else "rule"]
        )
        parts += [] if self.by_value else ["pointer"]
        return " ".join(parts)

    @property
    def interpretable(self) -> bool:
        """Whether Triton's interpreter computes it right: no bf16, no rounding to fp8 (the default output of fp8 operands is bf16), no Gluon."""
        named = (self.a, self.b, self.inputs)
        if self.config and schedules.SCHEDULES[self.config.schedule].dialect != "triton":
            return False
        return BF16 not in named and not any(t is not None and t.is_fp8 for t in (self.a, self.b)) and not any(w in self.text for w in ("bf16", "fp8"))


def share(cases: list[Case], one_in: int) -> list[Case]:
    """A fixed choice of one in so many, by a hash of the case, so that adding a case does not change which others are taken."""
    return [c for c in cases if int(hashlib.sha256(str(c).encode()).hexdigest(), 16) % one_in == 0]


def covering(cases: list[Case], one_in: int) -> list[Case]:
    """Such a share, and what else it takes to meet everything that some case has: each program in each view, each dtype and layout, and each two
    values of a config and each two extents that go together."""
    chosen = set(share(cases, one_in))
    met = {facet for case in chosen for facet in _facets(case)}
    for case in cases:
        if not met.issuperset(_facets(case)):
            chosen.add(case)
            met.update(_facets(case))
    return [case for case in cases if case in chosen]


def _facets(case: Case) -> set[object]:
    values = case.config.values if case.config is not None else ()
    pairs = {*itertools.combinations(values, 2), *itertools.combinations(zip("mnk", case.shape, strict=True), 2)}
    return {case.text, case.layout, (case.text, case.view), (case.a, case.b), ("inputs", case.inputs)} | pairs


# arguments that keep an operation inside its domain and its values tame
_DOMAIN = {
    "exp": "tanh({x})", "log": "abs({x}) + 0.1", "sqrt": "abs({x})", "rsqrt": "abs({x}) + 0.1", "erf": "{x}",
    "exp2": "tanh({x})", "expm1": "tanh({x})", "log1p": "abs({x}) - 0.9", "pow": "abs({x}) + 0.1", "reciprocal": "abs({x}) + 0.3",
}  # fmt: skip
_OPERANDS = {"tile": "u[m,n]", "row": "v[m]", "column": "w[n]", "scalar": "s", "constant": "0.75"}


def _call(op: ops.Op, kind: str) -> str:
    """The operation on the product and, for its other arguments, a value with the indices of `kind`."""
    other = _OPERANDS[kind]
    first = _DOMAIN.get(op.name, "{x}").format(x="mm")
    args = []
    for position, param in enumerate(op.params):
        if param.kind == ops.BOOLEAN:
            args.append("(mm > 0.25)" if position == 0 else f"({other} > 0.25)")
        elif (op.name, param.name) in (("clamp", "hi"), ("hardtanh", "hi"), ("celu", "alpha")):
            args.append(f"(abs({other}) + 0.5)" if kind != "constant" else "1.5")
        elif op.name == "div" and position == 1:
            args.append(f"(abs({other}) + 0.5)" if kind != "constant" else "0.75")
        else:
            args.append(first if position == 0 else other)
    if op.symbol:
        text = f"{op.symbol}{args[0]}" if len(args) == 1 else f"{args[0]} {op.symbol} {args[1]}"
    else:
        text = f"{op.name}({', '.join(args)})"
    return f"bitmask({text})" if op.result == ops.BOOLEAN else text


def operation_cases() -> list[Case]:
    """Every row of the table, for each operand dtype and each set of indices that its other arguments can have."""
    found = []
    for op in ops.TABLE.values():
        for a in (FP16, BF16, FP32, INT8, FP8E4M3, FP8E5M2):
            inputs = a if a.is_float and a.bits > 8 else FP32
            kinds = tuple(_OPERANDS) if len(op.params) > 1 else ("tile",)
            for kind in kinds:
                found.append(Case(_call(op, kind), (50, 70, 40), a, inputs=inputs))
    return found


def reduction_cases() -> list[Case]:
    found = []
    for name in (*ops.REDUCTIONS, "mean"):
        for a in (FP16, BF16, FP32, INT8, FP8E4M3):
            inputs = a if a.is_float and a.bits > 8 else FP32
            for form in ("{r}(mm + bias, m)", "{r}(mm + bias, n)", "{r}(mm * 0.5)", *(() if name == "mean" else ("{r}(a, k)", "{r}(b, k)"))):
                text = "relu(mm), " + form.format(r=name)
                for shape in ((50, 70, 40), (33, 31, 65)):
                    found.append(Case(text, shape, a, inputs=inputs))
                found.append(Case(text, (50, 70, 40), a, inputs=inputs, config=LIBRARY))
    for a in (FP16, BF16, FP32):
        for text in (
            "z = mm + bias; z, sum(z, n) / 70, sum(z * z, n) * scale_a[m] + 1, amax(z), bgrad(z)",
            "sum(mm, m) * w[n], max(mm, n), cast(amax(mm) * s, fp16)",
            "dz = drelu(mm, mask); dz, bgrad(dz)",
            "cast(sum(mm, m), fp16), mm",
            "h = cast(mm, fp16); h, sum(h, m), amax(h, n)",
            "logsumexp(mm, n), max(mm, n), mm",
        ):
            for config in (SMALL, LIBRARY):
                found.append(Case(text, (50, 70, 40), a, inputs=a, config=config))
    return found


def shape_cases() -> list[Case]:
    """Extents of 0, 1, primes and just beside the block size; every layout."""
    found = []
    text = "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n)"
    extents = (0, 1, 7, 31, 32, 33, 127)
    for a in (FP16, FP32, BF16):
        for m in extents:
            for n in extents:
                for k in (0, 1, 17, 64) if a == FP16 else (0, 33):
                    found.append(Case(text, (m, n, k), a, inputs=a, layout=LAYOUTS[(m + n + k) % 4]))
    for a in (FP16, BF16, FP32, INT8, FP8E4M3, FP8E5M2):
        inputs = a if a.is_float and a.bits > 8 else FP32
        for layout in LAYOUTS:
            for shape in ((64, 64, 64), (65, 63, 31), (128, 96, 100), (16, 256, 48)):
                for config in (SMALL, LIBRARY, None):
                    found.append(Case("relu(mm + bias)", shape, a, inputs=inputs, layout=layout, config=config))
    for layout in LAYOUTS:
        for precision in ("ieee", "tf32"):
            found.append(Case("relu(mm + bias)", (65, 63, 97), FP32, inputs=FP32, layout=layout, precision=precision))
    for a, b in ((FP8E4M3, FP8E5M2), (FP8E5M2, FP8E4M3)):
        for layout in LAYOUTS:
            found.append(Case("relu(mm + bias)", (64, 96, 128), a, b, FP32, layout))
    return found


def view_cases() -> list[Case]:
    found = []
    texts = ("relu(mm + bias)", "mm * scale_a[m] + residual", "dz = drelu(mm, mask); dz, bgrad(dz)", "silu(mm) * gate[m,n] * alpha")
    for view in ("sliced", "expanded", "shifted"):
        for a in (FP16, BF16, FP32, INT8, FP8E4M3):
            inputs = a if a.is_float and a.bits > 8 else FP16
            for text in texts:
                for layout in ("nn", "tt"):
                    for config in (SMALL, LIBRARY):
                        found.append(Case(text, (50, 70, 40), a, inputs=inputs, layout=layout, view=view, config=config))
    for inputs in (*FLOATS, INT8):
        for a in (FP16, FP32):
            for text in ("mm * scale_b[n] + residual", "mm * scale_a[m]", "mm * alpha"):
                found.append(Case(text, (50, 70, 40), a, inputs=inputs, by_value=False))
    return found


def exact_cases() -> list[Case]:
    """Small integers: every sum is exact, so that any order of addition gives the same bits."""
    found = []
    texts = ("mm", "relu(mm + bias)", "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n), amax(z), max(z, m)", "mm * alpha + residual",
             "dz = drelu(mm, mask); dz, bgrad(dz)", "mm, sum(a, k), sum(b, k)")  # fmt: skip
    for a in (FP16, BF16, FP32, INT8, FP8E4M3, FP8E5M2):
        for text in texts:
            for shape in ((50, 70, 40), (64, 64, 64), (33, 129, 31), (1, 1, 1)):
                for config in (SMALL, LIBRARY):
                    found.append(Case(text, shape, a, inputs=FP16, config=config, integers=True))
    return found


def output_cases() -> list[Case]:
    """Every dtype as an output and as a rounding inside, and several outputs of different dtypes."""
    found = []
    for a in (FP16, BF16, FP32, INT8, FP8E4M3):
        inputs = a if a.is_float and a.bits > 8 else FP32
        for dtype in (*FLOATS, INT8):
            for text in (f"cast(mm * 3 + bias, {dtype})", f"cast(mm, {dtype}) + bias", f"cast(sum(mm, m), {dtype}), mm"):
                found.append(Case(text, (50, 70, 40), a, inputs=inputs))
        found.append(Case("cast(mm, fp32), cast(relu(mm), fp16), bitmask(mm > 0), cast(mm, int8)", (50, 70, 40), a, inputs=inputs))
        found.append(Case("mm", (50, 70, 40), a, inputs=inputs))
    return found


def config_cases() -> list[Case]:
    """Tile shapes, warps and stages of the tiled schedule and the library schedule's tiles."""
    found = []
    text = "z = gelu(mm + bias); z, bitmask(z > 0), bgrad(z)"
    for block_m in (16, 64, 128):
        for block_n in (16, 128, 256):
            for block_k in (32, 64):
                for warps in (4, 8):
                    for a in (FP16, FP32):
                        found.append(Case(text, (150, 300, 96), a, inputs=a, config=tiled(block_m, block_n, block_k if a == FP16 else 32, warps, 3)))
    for block_m in (1, 8, 64):
        for block_n in (16, 128, 512):
            shape = (150 if block_m > 1 else 15, 300, 96)  # the interpreter takes a millisecond a tile
            found.append(Case(text, shape, FP16, config=schedules.config("library", block_m=block_m, block_n=block_n, num_warps=4)))
    return found


_TMA_TEXTS = (
    "relu(mm + bias)",
    "z = mm + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n)",
    "dz = drelu(mm, mask); dz, bgrad(dz), amax(dz)",
    "h = gelu(mm) * gate[m,n] * scale_a[m]; h, cast(h, fp32), sum(a, k)",
    "sum(mm, m), max(mm, n), sum(mm)",
)


def persistent_cases() -> list[Case]:
    """Rows of a multiple of 16 bytes, as TMA wants them, and extents that are no multiple of a tile; more tiles than programs."""
    found = []
    for text in _TMA_TEXTS:
        for a in (FP16, BF16):
            for i, layout in enumerate(LAYOUTS):
                for flatten, subtiles, tma_store in ((0, 1, 0), (1, 2, 0), (1, 1, 1), (0, 2, 1))[i % 2 :: 2]:
                    config = persistent(block_n=128 if subtiles == 2 else 64, flatten=flatten, subtiles=subtiles, tma_store=tma_store)
                    found.append(Case(text, (136, 200, 88), a, inputs=a, layout=layout, config=config))
    for a, layouts in ((FP32, LAYOUTS), (INT8, ("nt",)), (FP8E4M3, ("nt",)), (FP8E5M2, ("nt",))):
        for layout in layouts:
            config = persistent(block_k=32 if a == FP32 else 64, subtiles=1)
            found.append(Case("relu(mm + bias)", (144, 208, 112), a, inputs=FP32, layout=layout, config=config, precision="tf32" if a == FP32 else "ieee"))
    for i, shape in enumerate(((1, 8, 8), (64, 64, 32), (8, 264, 8), (65, 64, 2048), (1000, 8, 40), (328, 520, 64))):
        for text in _TMA_TEXTS[:3]:
            found.append(Case(text, shape, FP16, layout="nt", config=persistent(128, 128, 64, *((4, 2), (8, 4))[i % 2], subtiles=2)))
    for text in _TMA_TEXTS:
        for layout in LAYOUTS:  # rows that are copied into aligned ones first
            found.append(Case(text, (135, 201, 87), FP16, layout=layout, config=persistent()))
    for view in ("sliced", "expanded", "shifted"):
        found.append(Case(_TMA_TEXTS[3], (136, 200, 88), FP16, view=view, config=persistent()))
    for text in _TMA_TEXTS[:2]:
        found.append(Case(text, (136, 200, 88), FP16, layout="nt", config=persistent(), integers=True))
    return found


def split_k_cases() -> list[Case]:
    """More parts than steps, tails in k, and what a repeated call finds of the last one's counters."""
    found = []
    for text in _TMA_TEXTS:
        for a in (FP16, BF16, FP32):
            for layout in LAYOUTS:
                found.append(Case(text, (50, 70, 200), a, inputs=a, layout=layout, config=split_k(splits=4 if layout < "t" else 8)))
    for a in (INT8, FP8E4M3, FP8E5M2):
        found.append(Case("relu(mm + bias)", (33, 65, 130), a, inputs=FP32, layout="nt", config=split_k(block_k=64)))
    for shape in ((1, 64, 1000), (16, 128, 2048), (17, 31, 40), (64, 64, 0), (40, 40, 1)):
        for splits in (2, 16, 32):
            found.append(Case(_TMA_TEXTS[1], shape, FP16, layout="nt", config=split_k(16, 64, 64, splits)))
    for text in _TMA_TEXTS[:2]:
        found.append(Case(text, (50, 70, 200), FP16, layout="nt", config=split_k(), integers=True))
    return found


def warp_specialized_cases() -> list[Case]:
    """As for the persistent schedule. More tiles than a GPU has multiprocessors want some extents in the thousands."""
    found = []
    for text in _TMA_TEXTS:
        for a in (FP16, BF16):
            for i, layout in enumerate(LAYOUTS):
                for pingpong, subtiles, tma_store in ((0, 1, 1), (1, 2, 1), (1, 1, 1), (0, 2, 0))[i % 2 :: 2]:
                    # two whole tiles of two results would leave the operands too little shared memory
                    config = warp_specialized(
                        128, 64 if (pingpong, subtiles) == (1, 1) else 128, 64, 3, pingpong=pingpong, subtiles=subtiles, tma_store=tma_store
                    )
                    found.append(Case(text, (264, 392, 136), a, inputs=a, layout=layout, config=config))
    for shape in ((1, 8, 8), (64, 64, 32), (8, 264, 8), (65, 64, 2048), (2056, 2056, 72), (3000, 2048, 64), (2048, 2048, 328)):
        for pingpong, block_n, subtiles, stages in ((0, 256, 2, 3), (1, 128, 1, 4), (1, 64, 1, 2), (0, 64, 1, 8)):
            for text in _TMA_TEXTS[:3]:
                config = warp_specialized(128, block_n, 64, stages, group_m=8, pingpong=pingpong, subtiles=subtiles, prefetch=int(stages in (3, 4)))
                found.append(Case(text, shape, FP16, layout="nt", config=config))
    for text in _TMA_TEXTS:
        found.append(Case(text, (263, 391, 135), BF16, inputs=BF16, layout="nt", config=warp_specialized(pingpong=1)))
    for text in _TMA_TEXTS[:2]:
        for pingpong in (0, 1):
            found.append(Case(text, (264, 392, 136), FP16, layout="nt", config=warp_specialized(pingpong=pingpong), integers=True))
    for text in (*_TMA_TEXTS[1:4], "z = gelu_tanh(mm * alpha) + residual; z, max(z, n) * 2, logsumexp(z, n), logsumexp(z, m), amax(z)"):
        for i, view in enumerate(("sliced", "expanded", "shifted")):  # masks in bytes, but for the sliced ones
            config = warp_specialized(pingpong=i % 2, prefetch=1, tma_store=int(i > 0))
            found.append(Case(text, (264, 392, 136), FP16, view=view, config=config, by_value=False))
        for block_m, block_n, pingpong, subtiles in ((128, 16, 0, 1), (128, 32, 1, 2), (64, 128, 1, 1), (256, 64, 0, 2)):
            config = warp_specialized(block_m, block_n, pingpong=pingpong, subtiles=subtiles)
            found.append(Case(text, (264, 200, 136), BF16, inputs=FP32, layout="tt", config=config))
    for dtype in (FP32, FP8E4M3, FP8E5M2, INT8):
        found.append(Case(f"cast(mm * 3 + bias, {dtype}), cast(amax(mm), {dtype})", (264, 400, 136), FP16, layout="nt", config=warp_specialized(pingpong=1)))
    return found


def eight_bit_cases() -> list[Case]:
    """Operands of 8 bits in the warp-specialised schedule: sums of fp8 that are promoted, whole and in subtiles, and that are not; of int8 of 256 columns."""
    found = []
    texts = ("relu(mm * scale_a[m] * scale_b[n] + bias)", "z = mm + bias; gelu(z), bitmask(z > 0), bgrad(z)", "silu(mm) * gate[m,n]")
    configs = [
        warp_specialized(block_n=128, block_k=128),
        warp_specialized(block_n=128, block_k=128, subtiles=2, prefetch=1),
        warp_specialized(block_n=256, block_k=64, subtiles=2, fused_finalize=1),
        warp_specialized(64, 256, 128, pingpong=1, subtiles=2),
        warp_specialized(128, 64, 128, pingpong=1, tma_load=1),
        warp_specialized(128, 64, 64, subtiles=2, splits=3),
        warp_specialized(64, 64, 128, pingpong=1, splits=2, tma_store=0),
        warp_specialized(256, 32, 32),
    ]
    for i, text in enumerate(texts):
        for j, config in enumerate(configs):
            for k, (a, precision) in enumerate(((FP8E4M3, "ieee"), (FP8E4M3, FAST_ACCUM), (FP8E5M2, "ieee"), (INT8, "ieee"))):
                inputs = (FP32, BF16)[(i + j + k) % 2]
                found.append(Case(text, (264, 272, 592), a, inputs=inputs, layout="nt", config=config, precision=precision))
    for i, shape in enumerate(((1, 16, 16), (65, 80, 4096), (520, 1040, 2064), (263, 199, 391))):
        for a in (FP8E4M3, INT8):
            found.append(Case(texts[0], shape, a, inputs=FP32, layout="nt", config=configs[i % 4]))
    found.append(Case(texts[0], (264, 272, 592), FP8E4M3, FP8E5M2, inputs=FP32, layout="nt", config=configs[0]))
    found.append(Case("mm", (264, 272, 592), INT8, layout="nt", config=configs[2], integers=True))
    return found


def split_in_groups_cases() -> list[Case]:
    """Sums over parts of k in the warp-specialised schedule: two and more, parts without a step, one tile and many, two rows of warps a group."""
    found = []
    texts = (*_TMA_TEXTS[:3], "dz = dgelu(mm, z[m,n]); dz, bgrad(dz), amax(dz)")
    for i, text in enumerate(texts):
        for j, (pingpong, subtiles, splits) in enumerate(((0, 1, 2), (1, 1, 3), (0, 2, 5), (1, 2, 2))):
            config = warp_specialized(128, 64, 64, 3, pingpong=pingpong, subtiles=subtiles, splits=splits, fused_finalize=j // 2, prefetch=i % 2)
            found.append(Case(text, (264, 200, 520), (FP16, BF16)[(i + j) % 2], layout=LAYOUTS[(i + j) % 4], config=config))
        found.append(Case(text, (263, 199, 391), BF16, layout="nt", config=warp_specialized(256, 32, 64, splits=3)))
        found.append(Case(text, (200, 136, 72), FP16, inputs=FP32, layout="nt", config=warp_specialized(128, 16, 64, pingpong=1, tma_store=0, splits=16)))
    for shape in ((1, 8, 8), (65, 64, 4096), (256, 1024, 2056)):
        for pingpong, block_n, subtiles, splits in ((0, 256, 2, 4), (1, 128, 1, 2), (0, 64, 1, 7)):
            config = warp_specialized(128, block_n, 64, 3, group_m=8, pingpong=pingpong, subtiles=subtiles, splits=splits)
            found.append(Case(texts[0], shape, FP16, layout="nt", config=config))
    found.append(Case(texts[0], (264, 200, 520), FP16, layout="tn", config=warp_specialized(splits=4), integers=True))
    return found


APART = (
    "max(mm), bitmask(bits(keep))",
    "mm, gate[m,n] * bias + scale_a[m], sum(gate[m,n], m)",
    "relu(mm), where(bias > 0, scale_a[m], 1), max(abs(residual), n), amax(residual), bgrad(mm)",
)
"""Programs with outputs that do not depend on the product."""


def apart_cases() -> list[Case]:
    """In Gluon, where layouts follow from use, and nothing that the product has part in uses these."""
    found = []
    for i, text in enumerate(APART):
        for pingpong, subtiles in ((0, 1), (1, 1), (0, 2), (1, 2)):
            config = warp_specialized(128, 64, 64, pingpong=pingpong, subtiles=subtiles, tma_load=pingpong)
            found.append(Case(text, (264, 392, 136), (FP16, BF16)[subtiles - 1], layout=LAYOUTS[(i + pingpong) % 4], config=config))
        found.append(Case(text, (263, 391, 135), FP16, inputs=FP32, layout="nt", config=warp_specialized(pingpong=1, subtiles=2)))
        found.append(Case(text, (264, 200, 520), FP16, layout="nt", config=warp_specialized(prefetch=1, splits=3)))
    return found


def tma_load_cases() -> list[Case]:
    """Inputs that TMA brings, beside masks and reductions: through outputs' buffers, through their own and, where rows are not aligned, through none; tails;
    several tiles of each group of warps."""
    found = []
    texts = (
        "dz = dgelu(mm, z[m,n]); dz, bgrad(dz)",
        "relu(mm + bias + residual)",
        "h = gelu(mm) * gate[m,n] + where(mask, u[m,n], v[m,n]); h, relu(h), cast(h, fp32), bitmask(h > 0), sum(h, n)",
        "silu(mm) * gate[m,n] + residual",
    )
    for i, text in enumerate(texts):
        for j, a in enumerate((FP16, BF16)):
            for pingpong, subtiles in ((0, 1), (1, 1), (0, 2), (1, 2)):
                stages = 2 if "cast" in text else 3  # its inputs and outputs leave less room
                config = warp_specialized(128, 64, 64, stages, pingpong=pingpong, subtiles=subtiles, tma_load=1, prefetch=pingpong, fused_finalize=j)
                found.append(Case(text, (264, 392, 136), a, inputs=a, layout=LAYOUTS[(i + pingpong + subtiles) % 4], config=config))
            for pingpong in (0, 1):
                config = warp_specialized(128, 128, 64, 2, pingpong=pingpong, subtiles=4, tma_load=1, prefetch=1 - pingpong, fused_finalize=j)
                found.append(Case(text, (264, 392, 136), a, inputs=a, layout=LAYOUTS[(i + pingpong) % 4], config=config))
        for view in ("sliced", "expanded", "shifted"):
            found.append(Case(text, (264, 392, 136), FP16, view=view, config=warp_specialized(tma_load=1, prefetch=1)))
        found.append(Case(text, (263, 391, 135), FP16, layout="nt", config=warp_specialized(pingpong=1, tma_load=1)))
        found.append(Case(text, (264, 392, 136), FP16, inputs=FP32, layout="nt", config=warp_specialized(64, 64, 64, 2, pingpong=1, tma_load=1)))
    for shape in ((1, 8, 8), (65, 64, 2048), (2056, 2056, 72), (3000, 2048, 328)):
        for pingpong, block_n, subtiles in ((0, 128, 1), (0, 256, 2), (0, 256, 4), (1, 128, 1), (1, 128, 2), (1, 128, 4)):
            found.append(
                Case(texts[0], shape, FP16, layout="nt", config=warp_specialized(128, block_n, 64, 3, pingpong=pingpong, subtiles=subtiles, tma_load=1))
            )
    for pingpong in (0, 1):
        config = warp_specialized(64 << 1 - pingpong, 128, 64, pingpong=pingpong, tma_load=1)
        found.append(Case("cast(mm + grad[m,n], fp32)", (264, 392, 136), FP16, inputs=FP32, layout="tn", config=config, integers=True))
        found.append(Case("cast(mm + u[m,n], int8)", (264, 400, 136), FP16, inputs=INT8, layout="tn", config=config, integers=True))
        found.append(Case(texts[1], (264, 392, 136), BF16, inputs=BF16, layout="nn", config=warp_specialized(pingpong=pingpong, tma_load=1), integers=True))
        # no output leaves by TMA
        for subtiles in (1 + pingpong, 4):
            config = warp_specialized(128, 64, 64, pingpong=pingpong, subtiles=subtiles, tma_store=0, tma_load=1)
            found.append(Case("amax(relu(mm + residual), n), sum(mm * u[m,n], m)", (264, 392, 136), FP16, inputs=FP32, layout="nt", config=config))
        # in quarters that nothing comes to: several outputs, in parts along k too
        config = warp_specialized(128, 128, 64, 3, pingpong=pingpong, subtiles=4, prefetch=pingpong, fused_finalize=1)
        found.append(Case("z = mm + bias; gelu(z), z, bitmask(z > 0), bgrad(z)", (264, 392, 136), BF16, inputs=BF16, layout="nt", config=config))
        config = warp_specialized(128, 128, 64, 3, pingpong=pingpong, subtiles=4, splits=2)
        found.append(Case("z = mm + bias; gelu(z), z", (264, 136, 392), FP16, layout="nt", config=config))
        found.append(
            Case("mm * scale_b[n] + residual", (264, 400, 160), FP8E4M3, inputs=BF16, layout="nt", config=warp_specialized(pingpong=pingpong, tma_load=1))
        )
        config = warp_specialized(128, 128, 64, 2, pingpong=pingpong, subtiles=4, tma_load=1)
        found.append(Case("mm * scale_b[n] + residual", (264, 400, 160), FP8E4M3, inputs=BF16, layout="nt", config=config))
    return found


def fused_finalize_cases() -> list[Case]:
    """Reductions that the last block to arrive completes: of each kind, beside others that it cannot, inputs of both parts, one tile and many."""
    texts = (
        "dz = drelu(mm, mask); dz, bgrad(dz)",
        "z = gelu(mm + bias) * scale_b[n]; z, sum(z, m) * scale_b[n], logsumexp(z, m), sum(z, n) * alpha, max(z), sum(z) * alpha",
        "sum(mm, m), sum(a, k), max(mm, m) - sum(b, k)",
        "bitmask(mm > 0), max(mm, n) * scale_a[m], amax(mm) + 1, cast(amax(mm, m), fp16)",
    )
    found = []
    for i, text in enumerate(texts):
        configs = [
            tiled(32, 32, 32, fused_finalize=1),
            tiled(16, 64, 32, num_warps=1, fused_finalize=1),
            split_k(fused_finalize=1),
            persistent(flatten=0, fused_finalize=1),
            persistent(64, 128, flatten=0, subtiles=2, tma_store=0, fused_finalize=1),
            schedules.config("library", block_m=4, block_n=64, num_warps=4, fused_finalize=1),
            warp_specialized(128, 128, 64, 3, pingpong=1, fused_finalize=1),
            warp_specialized(128, 64, 64, 3, subtiles=2, fused_finalize=1),
            warp_specialized(64, 32, 64, 3, pingpong=1, prefetch=1, fused_finalize=1),
        ]
        for j, config in enumerate(configs):
            shape = (264, 200, 88) if config.schedule == "warp_specialized" else (72, 136, 40)
            found.append(Case(text, shape, (FP16, BF16)[(i + j) % 2], layout="nt", config=config))
            if config.schedule != "library":
                found.append(Case(text, ((17, 24, 16), (264, 24, 64))[(i + j) % 2], FP16, layout=LAYOUTS[(i + j) % 4], config=config))
    for config in (tiled(32, 32, 32, fused_finalize=1), warp_specialized(pingpong=1, fused_finalize=1)):
        found.append(Case(texts[0], (136, 72, 40), FP16, layout="nt", config=config, integers=True))
    sums = "mm + bias, sum(mm, m) + bias, sum(mm, n), sum(mm)"
    found += [Case(sums, shape, FP16, config=tiled(32, 32, 32, fused_finalize=1)) for shape in ((0, 40, 8), (40, 0, 8), (40, 40, 0), (1, 1, 1), (1200, 24, 8))]
    return found


def prefetch_cases() -> list[Case]:
    """Inputs that are loaded before the product, in Triton's own language: of each set of indices and either kind of mask, held in 16 bits and in 32,
    in halves, by parts of k, beside reductions that the last block completes."""
    found = []
    texts = (
        "relu(mm + bias)",
        "dz = drelu(mm, mask); dz, bgrad(dz)",
        "z = gelu(mm * alpha + bias) + residual; z, bitmask(z > scale_a[m]), sum(z, n) * scale_a[m], amax(z)",
        "relu(mm), where(bias > 0, scale_a[m], 1), max(abs(residual), n)",
        "mm, bgrad(mm)",
    )
    configs = (
        tiled(32, 32, 32, prefetch=1),
        tiled(64, 16, 64, num_stages=1, group_m=1, fused_finalize=1, prefetch=1),
        split_k(prefetch=1),
        split_k(16, 64, 32, 8, fused_finalize=1, prefetch=1),
        persistent(flatten=0, prefetch=1),
        persistent(64, 128, flatten=0, subtiles=2, tma_store=0, group_m=1, fused_finalize=1, prefetch=1),
    )
    for i, text in enumerate(texts):
        for j, config in enumerate(configs):
            for a, inputs in ((FP16, FP16), (BF16, BF16), (FP16, FP32)):
                layout = LAYOUTS[(i + j) % 4]
                found.append(Case(text, (72, 136, 88), a, inputs=inputs, layout=layout, config=config, by_value=inputs != FP16))
            found.append(Case(text, (17, 31, 40), FP16, layout="nt", view=("plain", "sliced", "expanded", "shifted")[(i + j) % 4], config=config))
    return found


_OPERAND_TEXTS = (
    "dot(relu(a), b)",
    "dot(relu(a) * norm[k], b)",
    "dot(a * row[m], b * scale_b[k])",
    "relu(dot(exp(a), exp(b) * alpha) + bias)",
    "dot(silu(a) * gate[m,k], where(b > 0, b, b * s[n]) + shift[k,n])",
    "z = dot(tanh(a) * norm[k], b * norm[k]) * row[m] + bias; relu(z), bitmask(z > 0), bgrad(z), sum(z, n) * row[m]",
    "dot(cast(a * row[m], fp16) - row[m], b), sum(a, k), amax(b, k)",
)


def operand_cases() -> list[Case]:
    """What is computed of operands as they are loaded: inputs of each set of indices, of one operand and of both, and in the epilogue too; no k, one, tails of it."""
    found = []
    configs = (SMALL, tiled(64, 32, 64, 8, 3, prefetch=1), split_k(splits=4), tiled(16, 64, 16, 1, 1, group_m=1, fused_finalize=1))
    for i, text in enumerate(_OPERAND_TEXTS):
        for j, a in enumerate((FP16, BF16, FP32)):
            for layout in LAYOUTS:
                config = configs[(i + j + LAYOUTS.index(layout)) % len(configs)]
                found.append(Case(text, (50, 70, 40), a, inputs=a, layout=layout, config=config, by_value=bool(j)))
            found.append(Case(text, (136, 200, 128), a, inputs=FP32, layout="nt", config=None))
        for j, shape in enumerate(((1, 1, 1), (33, 17, 0), (65, 31, 200), (0, 40, 8), (16, 130, 1000))):
            found.append(Case(text, shape, FP16, layout="nt", config=configs[(i + j) % len(configs)]))
        for j, view in enumerate(("sliced", "expanded", "shifted")):
            found.append(Case(text, (50, 70, 40), FP16, layout=("nn", "tt")[j % 2], view=view, config=configs[(i + j) % len(configs)], by_value=False))
    for text in _OPERAND_TEXTS[:3]:
        for config in configs:
            found.append(Case(text, (50, 70, 40), FP16, layout="nt", config=config, integers=True))
    found.append(Case("dot(relu(a), b)", (65, 63, 97), FP32, inputs=FP32, layout="nt", precision="tf32"))
    found.append(Case("dot(a * gate[m,k], b * shift[k,n])", (50, 70, 40), BF16, inputs=FP8E4M3, layout="nt"))
    return found


_WEIGHT_TEXTS = (
    "relu(mm * s[n] + bias)",
    "dot(a, (b - zero[k/32,n]) * s[k/128,n]) + bias",
    "z = dot(a, b * s[k/64,n] * t[n]); z, sum(z, n), bitmask(z > 0)",
    "dot(relu(a) * u[m,k/64], b * s[k/64,n/16]) * alpha",
)
_PACKED_TEXTS = (
    "silu(dot(a, int4(b)) * s[n])",
    "dot(a, int4(b) * s[k/128,n]) + residual",
    "relu(dot(a, (uint4(b) - zero[k/64,n]) * s[k/64,n]) + bias)",
    "dot(a, (uint4(b) - zero[k/32,n]) * s[k/32,n])",
    "dot(a * norm[k], int4(b, n) * s[n])",
)


def weight_cases() -> list[Case]:
    """Weights of fewer bits than what they multiply, in bytes and two in a byte, with scales and zero points of groups; and fp8 with scales in blocks."""
    found = []
    configs = (
        tiled(16, 64, 64, 4, 3), tiled(64, 64, 128, 4, 3), split_k(16, 64, 128, splits=2), tiled(128, 64, 64, 8, 3), split_k(32, 32, 64, num_warps=2), SMALL,
    )  # fmt: skip
    beside = ((BF16, INT8), (FP16, UINT8), (FP16, INT8), (BF16, FP8E4M3), (FP16, FP8E5M2), (FP32, INT8))
    for i, text in enumerate(_WEIGHT_TEXTS):
        for j, (a, b) in enumerate(beside):
            for layout, config in zip(("nt", "nn"), (configs[(i + j) % 6], configs[(i + j + 2) % 6]), strict=True):
                found.append(Case(text, (50, 72, 260), a, b, a, layout, config=config, by_value=bool(j % 2)))
            found.append(Case(text, ((16, 200, 512), (136, 264, 256))[j % 2], a, b, FP32, "nt", config=None))
    for i, text in enumerate(_PACKED_TEXTS):
        for j, (config, a) in enumerate(itertools.product(configs, (BF16, FP16))):
            found.append(Case(text, ((50, 72, 260), (16, 136, 512), (1, 64, 70))[(i + j) % 3], a, UINT8, a, ("nt", "nn")[(i + j) % 4 == 3], config=config))
        found.append(Case(text, (33, 50, 70), FP32, UINT8, FP32, "nt"))
        for shape in ((5, 16, 1024), (64, 200, 512), (264, 136, 256)):
            found.append(Case(text, shape, BF16, UINT8, BF16, "nt", config=None))
        found.append(Case(text, (33, 50, 64), FP16, UINT8, FP16, "nt", ("sliced", "shifted")[i % 2], integers="*" not in text))
    return found


def scaled_cases() -> list[Case]:
    """fp8 with scales in blocks along k, whose steps are scaled one by one."""
    found = []
    configs = (tiled(64, 64, 64, 4, 3), split_k(16, 32, 64, splits=2), tiled(128, 128, 64, 8, 2), tiled(16, 64, 32), None)
    texts = ("dot(a * sa[m,k/128], b * sb[k/128,n/128])", "silu(dot(a * sa[m,k/64], b * sb[k/64,n]) + bias)", "z = dot(a, b * s[k/64,n]); z, sum(z, n)")
    for i, (text, config) in enumerate(itertools.product(texts, configs)):
        for a, b in ((FP8E4M3, None), (FP8E5M2, FP8E4M3)):
            found.append(Case(text, ((136, 208, 272), (16, 136, 512), (65, 144, 300))[i % 3], a, b, FP32, ("nt", "nn")[i % 4 == 3], config=config))
    return found


def scaled_by_warpgroups() -> list[Case]:
    """The same by warpgroups: rows, blocks and columns of scales, one subtile and two, parts along k, tails in each extent."""
    found = []
    texts = (
        "dot(a * sa[m,k/128], b * sb[k/128,n/128])", "silu(dot(a * sa[m,k/64], b * sb[k/64,n]) + bias)", "dot(a * sa[m/128,k/128], b) + residual",
        "z = dot(a, b * s[k/128,n/64]); z, sum(z, n), bgrad(z)", "dot(a * t[k/32], b * s[k/64,n/256])",
    )  # fmt: skip
    configs = (
        warp_specialized(128, 128, 64), warp_specialized(128, 256, 64, subtiles=2), warp_specialized(64, 64, 32, pingpong=1, tma_load=1),
        warp_specialized(128, 128, 64, subtiles=2, splits=3), warp_specialized(64, 128, 64, pingpong=1, subtiles=2, splits=2), warp_specialized(128, 256, 128, 2, subtiles=2),
    )  # fmt: skip
    for i, (text, config) in enumerate(itertools.product(texts, configs)):
        if "k/32" in text:
            config = config.with_value("block_k", 32)
        elif "k/64" in text and config["block_k"] > 64:
            continue
        a, b = ((FP8E4M3, None), (FP8E5M2, FP8E4M3))[i % 2]
        found.append(Case(text, ((136, 208, 592), (264, 528, 512), (72, 400, 336))[i % 3], a, b, FP32, "nt", config=config, by_value=bool(i % 2)))
    return found


_MIXED_TEXTS = (
    "relu(mm * s[n] + bias)",
    "silu(dot(a, b * s[n])) * gate[m,n]",
    "z = dot(a, b * s[k/128,n]); z, z + row[m] * x[m,n]",
    "gelu(dot(a, (b - zero[n]) * s[k/64,n]) + bias)",
    "dot(a, (b * s[k/64,n] - zero[n]) * t[n] + 1)",
)
_MIXED_PACKED_TEXTS = (
    "relu(dot(a, int4(b)) * s[n])",
    "dot(a, int4(b) * s[k/128,n]) + residual",
    "silu(dot(a, (uint4(b) - zero[k/64,n]) * s[k/64,n]) + bias) * gate[m,n]",
    "dot(a, (uint4(b) - 8) * s[k/64,n] * t[n])",
)


def mixed_input_cases() -> list[Case]:
    """Weights that warpgroups convert in registers: tails in each extent, parts along k, more tiles than programs, and what is computed in fp32."""
    found = []
    configs = (
        mixed_input(), mixed_input(16, 256, 64, 4, tma_store=0), mixed_input(128, 256, 64, 2), mixed_input(256, 128, 64, 2, group_m=4),
        mixed_input(32, 128, 64, splits=2), mixed_input(64, 256, 32, 4, splits=3, tma_store=0),
    )  # fmt: skip
    kinds = [(t, b) for t in _MIXED_TEXTS for b in (INT8, UINT8, FP8E4M3)] + [(t, UINT8) for t in _MIXED_PACKED_TEXTS]
    for i, ((text, b), a) in enumerate(itertools.product(kinds, (BF16, FP16))):
        for j, inputs in enumerate((a, FP32)):
            for config in (configs[(i + j) % 6], configs[(i + j + 3) % 6]):
                shape = ((136, 200, 352), (72, 272, 512), (16, 136, 96))[(i + j) % 3]
                found.append(Case(text, shape, a, b, inputs, "nt", config=config, by_value=bool(i % 2)))
    found += [Case(text, (264, 328, 288), BF16, b, BF16, "tt", config=config) for config in configs for text, b in (kinds[0], kinds[-2])]
    found.append(Case(_MIXED_PACKED_TEXTS[1], (128, 3072, 4096), BF16, UINT8, BF16, "nt", config=configs[2]))
    return found


_SECOND_TEXTS = (
    "silu(mm) * dot(a, up[k,n])",
    "g = mm + bias; u = dot(a, up[k,n]) + shift[n]; h = gelu(g) * u; h, g, u, bgrad(u), bitmask(u > 0)",
    "g = mm; u = dot(a, up[k,n]); s = sigmoid(g); dg = grad[m,n] * u * s * (1 + g * (1 - s)); du = grad[m,n] * g * s; dg, du, bgrad(dg), sum(du, n)",
    "relu(dot(a, up[k,n])), amax(mm)",
)


def second_cases() -> list[Case]:
    """Two products of one left operand, in each schedule that has them."""
    found = []
    in_groups = [
        warp_specialized(128, 128, 64, 3, subtiles=2),
        warp_specialized(128, 64, 64, 3, pingpong=1, tma_load=1),
        warp_specialized(128, 128, 32, 4, subtiles=4, tma_load=1),
        warp_specialized(64, 64, 64, 3, pingpong=1, subtiles=2, tma_store=0, prefetch=1),
    ]
    for i, text in enumerate(_SECOND_TEXTS):
        for j, a in enumerate((FP16, BF16, FP32)):
            for layout in LAYOUTS:
                found.append(Case(text, (50, 70, 40), a, inputs=a, layout=layout))
            found.append(Case(text, (135, 201, 87), a, inputs=a, layout=LAYOUTS[(i + j) % 4], config=tiled(64, 32, 32, prefetch=1, fused_finalize=1)))
            found.append(Case(text, (136, 200, 88), a, inputs=a, layout="nt", precision="tf32" if a == FP32 else "ieee", config=None))
        for j, layout in enumerate(LAYOUTS):
            flatten, subtiles, tma_store = ((0, 1, 0), (1, 2, 0), (1, 1, 1), (0, 2, 1))[(i + j) % 4]
            config = persistent(block_n=64, flatten=flatten, subtiles=subtiles, tma_store=tma_store)
            found.append(Case(text, (136, 200, 88), (FP16, BF16)[j % 2], layout=layout, config=config))
            found.append(Case(text, (264, 392, 136), (FP16, BF16)[(i + j) % 2], layout=layout, config=in_groups[j]))
            found.append(Case(text, (263, 391, 135), BF16, inputs=BF16, layout=layout, config=tiled(128, 64, 64, 8, 3)))
            found.append(Case(text, (200, 328, 520), FP16, layout="nt", config=in_groups[j]))
        for view in ("sliced", "shifted"):
            found.append(Case(text, (50, 70, 40), FP16, view=view))
            found.append(Case(text, (136, 200, 88), FP16, view=view, config=(persistent(block_n=64), in_groups[1])[i % 2]))
        found.append(Case(text, (135, 201, 87), FP16, layout=LAYOUTS[i], config=persistent(block_n=64)))  # rows that are copied into aligned ones
        found.append(Case(text, (263, 391, 135), BF16, layout=LAYOUTS[i], config=in_groups[1]))
    for text in ("mm - dot(a, up[k,n]), amax(dot(a, up[k,n]))", _SECOND_TEXTS[3]):
        for config in (SMALL, persistent(block_n=64), *in_groups):
            found.append(Case(text, (136, 200, 88), FP16, layout="nt", config=config, integers=True))
    for a, precision in ((FP8E4M3, "ieee"), (FP8E4M3, FAST_ACCUM), (FP8E5M2, "ieee"), (INT8, "ieee")):
        for config in (tiled(32, 32, 64), persistent(64, 64, 64), warp_specialized(128, 64, 128, 3), warp_specialized(64, 64, 128, 3, pingpong=1, subtiles=2)):
            found.append(Case(_SECOND_TEXTS[0], (136, 208, 272), a, inputs=FP32, layout="nt", config=config, precision=precision))
    found.append(Case("dot(a, up[k,n]), mm", (136, 208, 272), INT8, layout="nt", config=tiled(32, 32, 64), integers=True))
    return found


_CARRIED_TEXTS = (
    "dot(a * norm[k], b) * rsqrt(mean(a * a, k) + 1e-6)",
    "mu = mean(a, k); r = rsqrt(mean(a * a, k) - mu * mu + 1e-3); (mm - mu * colsum[n]) * r + shift[n], mu, r",
    "z = mm / maximum(amax(abs(a), k), 0.1); z, bitmask(z > 0), sum(z, n) * sum(a, k), max(z, m)",
    "x = silu(a) * norm[k] * row[m]; dot(x, b * s[n]) - max(x * g[m,k], k), sum(b * w[k,n] * s[n], k) * s[n] / extent(k)",
    "r = sqrt(mean(a * a, k) + 1); silu(dot(a * norm[k], b) / r) * (dot(a * norm[k], up[k,n]) / r)",
    "mm * sum(exp(b) * t[k/16,n], k) + logsumexp(a - row[m], k) * alpha + row[m], sum(mm, m) / extent(k)",
)


def carried_cases() -> list[Case]:
    """Reductions over k that tiles are computed of, of each operand: where the loop over k takes them along, and as outputs; no k, one, tails of it."""
    found = []
    configs = (SMALL, tiled(64, 32, 64, 8, 3, prefetch=1), tiled(16, 64, 16, 1, 1, group_m=1, fused_finalize=1))
    for i, text in enumerate(_CARRIED_TEXTS):
        for j, a in enumerate((FP16, BF16, FP32)):
            for layout in LAYOUTS:
                config = configs[(i + j + LAYOUTS.index(layout)) % len(configs)]
                found.append(Case(text, (50, 70, 40), a, inputs=a, layout=layout, config=config, by_value=bool(j)))
            found.append(Case(text, (136, 200, 128), a, inputs=FP32, layout="nt", config=None))
        for j, shape in enumerate(((1, 1, 1), (65, 31, 200), (5, 0, 8), (0, 40, 8))):
            found.append(Case(text, shape, FP16, layout="nt", config=configs[(i + j) % len(configs)]))
        found += [Case(text, (50, 70, 40), FP16, view=view, config=configs[i % len(configs)], by_value=False) for view in ("sliced", "expanded", "shifted")]
    for i, text in enumerate(_CARRIED_TEXTS[1:3]):
        for j, layout in enumerate(LAYOUTS):
            flatten, subtiles, tma_store = ((0, 1, 0), (1, 2, 0), (1, 1, 1), (0, 2, 1))[(i + j) % 4]
            config = persistent(block_n=64, flatten=flatten, subtiles=subtiles, tma_store=tma_store)
            found.append(Case(text, (136, 200, 88), (FP16, BF16)[j % 2], layout=layout, config=config))
    found.append(Case("mm + sum(a * a, k), (1 + amax(b, k)) * mm", (33, 17, 0), FP16))  # of nothing a mean would be NaN
    found.append(Case("mm - amax(b * s[k], k), sum(a, k) * mm", (136, 200, 88), FP16, layout="nt", config=persistent(block_n=64, flatten=0)))
    for a in (INT8, FP8E4M3):
        found.append(Case("mm / (1 + amax(a, k)), sum(b * b, k) * mm", (64, 48, 96), a, inputs=FP32, layout="nt", config=tiled(32, 32, 64)))
    found.append(Case("dot(a, b * s[n]) * sum(b, k) + sum(a, k)", (64, 48, 96), FP16, b=INT8, layout="nt", config=tiled(32, 32, 64)))
    return found


_POSITION_TEXTS = (
    "where(n <= m, mm, -inf)",
    "where((n <= m) & (m - n < 8 * window), mm, -1e4)",
    "mm - slope[m] * (m - n)",
    "z = where(n == labels[m], mm, 0); z, sum(z, n), where(n == labels[m], 1, 0)",
    "mm + pos[m % P, n]",
    "z = mm * gate[m % P, n % Q] + bias[n % Q]; relu(z), bitmask(z > row[m % P]), sum(z, n) * row[m % P], sum(z, m) + bias[n % Q]",
    "x = m * scale_a[m]; z = where(n < m, mm, -inf); logsumexp(z, n) + x, max(z, m) * n, sum(mm * n) * 2, bitmask(n <= m), mm - x",
)


def position_cases() -> list[Case]:
    """Numbers of rows and columns as values: masks, biases and labels of them, in tiles, their parts and what completes reductions."""
    found = []
    configs = (
        SMALL,
        LIBRARY,
        tiled(16, 64, 32, prefetch=1, fused_finalize=1),
        split_k(prefetch=1),
        split_k(16, 64, 32, 8, fused_finalize=1),
        persistent(),
        persistent(64, 64, flatten=0, prefetch=1, fused_finalize=1),
        persistent(64, 64, flatten=0, subtiles=2, tma_store=0, prefetch=1, fused_finalize=1),
    )
    in_groups = (
        warp_specialized(128, 128, 64, 3, subtiles=2, prefetch=1),
        warp_specialized(128, 64, 64, 3, pingpong=1, fused_finalize=1),
        warp_specialized(128, 128, 64, 2, pingpong=1, subtiles=4, tma_load=1),
        warp_specialized(64, 64, 64, 3, pingpong=1, subtiles=2, tma_store=0, fused_finalize=1),
        warp_specialized(prefetch=1, splits=3),
        warp_specialized(128, 64, 64, 3, fused_finalize=1, prefetch=1),
    )
    for i, text in enumerate(_POSITION_TEXTS):
        inputs = INT8 if "labels" in text else FP16
        for j, config in enumerate(configs):
            layout = LAYOUTS[(i + j) % 4]
            found.append(Case(text, (50, 70, 40), (FP16, FP32)[j % 2], inputs=inputs, layout=layout, config=config))
            found.append(Case(text, (136, 72, 88), (FP16, BF16)[(i + j) % 2], inputs=inputs, layout=layout, config=config))
        for j, config in enumerate(in_groups):
            found.append(Case(text, (264, 392, 136), (FP16, BF16)[(i + j) % 2], inputs=inputs, layout=LAYOUTS[(i + j) % 4], config=config))
            found.append(Case(text, (263, 391, 135), (BF16, FP16)[(i + j) % 2], inputs=inputs, layout="nt", config=config))
        for shape in ((1, 1, 1), (0, 40, 8), (40, 0, 8), (65, 3, 0), (3, 129, 31)):
            found.append(Case(text, shape, FP16, inputs=inputs, config=SMALL))
        found.append(Case(text, (72, 136, 40), INT8, inputs=INT8 if "labels" in text else FP32, layout="nt"))
        found.append(Case(text, (72, 136, 40), FP16, inputs=inputs, config=None))
    for config in (SMALL, split_k(), in_groups[1]):
        found.append(Case(_POSITION_TEXTS[0], (136, 72, 40), FP16, layout="nt", config=config, integers=True))
    return found


_RANDOM_TEXTS = (
    "dropout(mm, 0.5, seed)",
    "residual + dropout(gelu(mm + bias), 0.1, seed)",
    "z = where(uniform(seed) < 0.25, 0, mm); z, sum(z, n), bgrad(uniform(other)), bitmask(uniform(seed) >= 0.75), uniform(other)",
)


def random_cases() -> list[Case]:
    """Random numbers of a seed, as values and as masks, in tiles and their parts."""
    found = []
    configs = (
        SMALL,
        LIBRARY,
        tiled(16, 64, 32, prefetch=1, fused_finalize=1),
        split_k(16, 64, 32, 8, fused_finalize=1),
        persistent(64, 64, flatten=0, subtiles=2, tma_store=0, prefetch=1, fused_finalize=1),
    )
    in_groups = (
        warp_specialized(128, 128, 64, 3, subtiles=2, prefetch=1),
        warp_specialized(128, 64, 64, 3, pingpong=1, fused_finalize=1),
        warp_specialized(128, 128, 64, 2, pingpong=1, subtiles=4),
        warp_specialized(prefetch=1, splits=3),
    )
    for i, text in enumerate(_RANDOM_TEXTS):
        for j, config in enumerate(configs):
            found.append(Case(text, (50, 70, 40), (FP16, FP32)[j % 2], layout=LAYOUTS[(i + j) % 4], config=config))
            found.append(Case(text, (136, 72, 88), (FP16, BF16)[(i + j) % 2], layout=LAYOUTS[(i + j) % 4], config=config))
        for j, config in enumerate(in_groups):
            found.append(Case(text, (264, 392, 136), (FP16, BF16)[(i + j) % 2], layout=LAYOUTS[(i + j) % 4], config=config))
            found.append(Case(text, (263, 391, 135), (BF16, FP16)[(i + j) % 2], layout="nt", config=config))
        for shape in ((1, 1, 1), (0, 40, 8), (40, 0, 8), (65, 3, 0)):
            found.append(Case(text, shape, FP16, config=SMALL))
        found.append(Case(text, (72, 136, 40), INT8, inputs=FP32, layout="nt"))
        found.append(Case(text, (72, 136, 40), FP16, config=None))
    for config in (SMALL, split_k(), in_groups[1]):
        found.append(Case(_RANDOM_TEXTS[0], (136, 72, 40), FP16, layout="nt", config=config, integers=True))
    return found


_BLOCK_TEXTS = (
    "q, s = quantize(gelu(mm + bias), fp8e4m3, n/64); q, s",
    "q, s = quantize(silu(mm) * dot(a, up[k,n]), fp8e5m2, n/32); q, s",
    "q, s = quantize(mm * row[m] + residual, int8, n/64); z = mm - bias; q, z, s, bgrad(z)",
    "e = exp(mm - max(mm, n/32)); e / sum(e, n/32), logsumexp(mm, n/16) + row[m], sum(mm * mm, n/64)",
)


def block_cases() -> list[Case]:
    """Reductions of blocks of columns, alone and for the tile again: in tiles of one block and of several, and with a last block that is shorter."""
    found = []
    configs = (
        tiled(32, 64, 32),
        LIBRARY,
        tiled(16, 128, 32, prefetch=1, fused_finalize=1),
        split_k(16, 64, 32, 8, fused_finalize=1),
        persistent(64, 128, flatten=0, subtiles=2, tma_store=1, prefetch=1, fused_finalize=1),
    )
    in_groups = (
        warp_specialized(128, 128, 64, 3, subtiles=2, prefetch=1),
        warp_specialized(128, 64, 64, 3, pingpong=1, fused_finalize=1),
        warp_specialized(128, 256, 64, 2, pingpong=1, subtiles=4),
        warp_specialized(prefetch=1, splits=3),
    )
    for i, text in enumerate(_BLOCK_TEXTS):
        second = "dot" in text
        for j, config in enumerate(configs):
            if not second or config.schedule in ("tiled", "persistent"):
                found.append(Case(text, (50, 200, 40), (FP16, FP32)[j % 2], layout=LAYOUTS[(i + j) % 4], config=config))
                found.append(Case(text, (136, 72, 88), (FP16, BF16)[(i + j) % 2], layout=LAYOUTS[(i + j) % 4], config=config))
        for j, config in enumerate(in_groups):
            if not second or (not dict(config.values)["pingpong"] and dict(config.values)["splits"] == 1):
                found.append(Case(text, (264, 392, 136), (FP16, BF16)[(i + j) % 2], layout=LAYOUTS[(i + j) % 4], config=config))
                found.append(Case(text, (263, 391, 135), (BF16, FP16)[(i + j) % 2], layout="nt", config=config))
        for shape in ((1, 1, 1), (0, 40, 8), (40, 0, 8), (65, 3, 0), (3, 129, 31)):
            found.append(Case(text, shape, FP16, config=configs[0]))
        if not second:
            found.append(Case(text, (72, 136, 40), INT8, inputs=FP32, layout="nt", config=configs[0]))
        found.append(Case(text, (72, 136, 40), FP16, config=None))
        found.append(Case(text, (64, 256, 64), FP8E4M3, inputs=FP32, layout="nt", config=configs[0]))
    return found


def all_cases() -> list[Case]:
    groups = (
        operation_cases,
        reduction_cases,
        shape_cases,
        view_cases,
        exact_cases,
        output_cases,
        config_cases,
        split_k_cases,
        persistent_cases,
        warp_specialized_cases,
        tma_load_cases,
        apart_cases,
        fused_finalize_cases,
        split_in_groups_cases,
        eight_bit_cases,
        prefetch_cases,
        operand_cases,
        weight_cases,
        scaled_cases,
        scaled_by_warpgroups,
        mixed_input_cases,
        second_cases,
        carried_cases,
        position_cases,
        random_cases,
        block_cases,
    )
    return list(dict.fromkeys(c for group in groups for c in group()))


def interpreter_cases() -> Iterator[Case]:
    """What the interpreter can run, at extents where it is quick."""
    for case in all_cases():
        if case.interpretable and case.precision == "ieee":
            yield case
