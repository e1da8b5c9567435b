"""On a GPU: rows of invariant programs have, bit for bit, what they have in the largest batch, for every M, dtype, layout and alignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import epigen
from epigen.codegen import schedules
from epigen.runtime.kernel import Kernel

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 65, 100, 128, 200, 257, 512, 1000, 2048, 4096, 8192)
MOST = max(ROWS)
EPILOGUES = (
    "mm",
    "relu(mm + bias)",
    "gelu_tanh(mm + bias)",
    "silu(mm) * gate[m,n]",
    "mm + residual",
    "mm + bias * alpha",
    "u = mm * row[m]; u + bias, u * alpha + residual",
    "y = relu(mm * row[m]); y, bitmask(y > 0), bgrad(y)",
)
REDUCTIONS = (
    "mm, sum(mm, n)", "logsumexp(mm + bias, n)", "y = silu(mm) * gate[m,n]; y, sqrt(sum(square(y), n)), max(y, n)", "relu(mm), sum(a, k)",
    "relu(mm), mean(gate[m,n], n)",
    "r = rsqrt(mean(a * a, k) + 1e-6); dot(a * norm[k], b) * r, r",
)  # fmt: skip
SCALED = "cast(mm * row[m] * column[n], bf16)"


@dataclass(frozen=True, slots=True)
class Case:
    """layout: of a and b, as `codegen.spec.LAYOUTS` has it; b always lies the same for all M. strided: a's rows, and those of tiles, lie farther apart, from an
    address on that TMA does not take."""

    text: str
    n: int = 1536
    k: int = 2048
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nt"
    strided: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{self.text} {self.n}x{self.k} {self.dtype} {self.layout}{' strided' * self.strided}{options}"


CASES = [
    *(Case(text) for text in (*EPILOGUES, *REDUCTIONS)),
    *(Case(text, n, k) for text in ("mm", "relu(mm + bias)", "mm, sum(mm, n)") for n, k in ((4096, 4096), (1003, 4097), (4104, 1001), (8, 72))),
    *(Case(text, dtype=torch.float16, layout=layout) for text in ("relu(mm + bias)", "logsumexp(mm, n)") for layout in ("nn", "nt", "tn")),
    *(Case(text, layout="nn", strided=strided) for text in ("silu(mm) * gate[m,n]", REDUCTIONS[2]) for strided in (False, True)),
    *(Case(text, dtype=torch.float32, options={"precision": p}) for text in ("relu(mm + bias)", "mm, sum(mm, n)") for p in ("ieee", "tf32")),
    *(Case("relu(mm + bias)", 1003, 515, torch.float32, "nn", options={"precision": p}) for p in ("ieee", "tf32")),
    *(Case(text, 4096, k, torch.float8_e4m3fn) for text in (SCALED, f"y = {SCALED}; y, sum(y, n)") for k in (64, 2048, 4096)),
    *(Case(SCALED, dtype=torch.float8_e4m3fn, options={"precision": "fast_accum"}) for _ in range(1)),
    Case(SCALED, dtype=torch.float8_e4m3fn, layout="nn"),
    Case(SCALED, 1003, 1040, torch.float8_e4m3fn),
    Case(SCALED, dtype=torch.float8_e5m2),
    *(Case(text, dtype=torch.int8) for text in ("mm", SCALED, f"y = {SCALED}; y, sum(y, n)")),
    Case("dot(relu(a) * norm[k], b) + bias"),
    *(
        Case(
            "relu(mm + bias), sum(mm, n)",
            options={"config": schedules.config("tiled", block_m=m, block_n=64, block_k=64, group_m=8, num_warps=4, num_stages=3)},
        )
        for m in (16, 128)
    ),
]


def drawn(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, size, dtype=dtype, device="cuda")
    return torch.randn(size, device="cuda").to(dtype)


class Batch:
    """All rows of a case, of which calls take some."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        self.case, (n, k) = case, (case.n, case.k)
        self.kernel: Kernel = epigen.compile(case.text, invariant="m", **case.options)
        self.a, weight = drawn((MOST, k), case.dtype), drawn((n, k), case.dtype)
        self.b = weight.t() if case.layout[1] == "t" else weight.t().contiguous()
        other = torch.float32 if case.dtype.itemsize == 1 else case.dtype
        sizes = {"mn": (MOST, n), "m": (MOST,), "n": (n,), "k": (k,), "": ()}
        self.inputs = {node.name: (node.indices, drawn(sizes[node.indices], other)) for node in self.kernel.graph.inputs()}

    def called(self, first: int, count: int) -> dict[str, Tensor]:
        """The outputs that have rows, of a call of some."""
        a = self._placed(self.a[first : first + count], self.case.layout[0] == "t")
        inputs = {
            name: self._placed(value[first : first + count]) if indices == "mn" else value[first : first + count] if indices == "m" else value
            for name, (indices, value) in self.inputs.items()
        }
        found = self.kernel(a, self.b, **inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        nodes = self.kernel.graph.nodes
        return {o.name: t for o, t in zip(self.kernel.graph.outputs, outputs, strict=True) if "m" in nodes[o.node].indices}

    def _placed(self, t: Tensor, transposed: bool = False) -> Tensor:
        if transposed:
            return t.t().contiguous().t()
        if not self.case.strided:
            return t
        wide = torch.empty((len(t), t.shape[1] + 5), dtype=t.dtype, device="cuda")
        return wide[:, 1 : 1 + t.shape[1]].copy_(t)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_have_the_bits_of_the_largest_batch(case: Case) -> None:
    batch = Batch(case)
    whole = batch.called(0, MOST)
    differ = set()
    for m in ROWS:
        for first in {0, (MOST - m) // 3, MOST - m}:
            for name, rows in batch.called(first, m).items():
                if not torch.equal(rows.view(torch.uint8), whole[name][first : first + m].contiguous().view(torch.uint8)):
                    differ.add((name, m, str(batch.kernel.config)))
    assert not differ


@pytest.mark.parametrize("text", ["relu(mm + bias)", REDUCTIONS[2]])
def test_how_rows_lie_changes_no_bit(text: str) -> None:
    packed, apart = (Batch(Case(text, layout="nn", strided=strided)) for strided in (False, True))
    for m in (1, 16, 100, 1024):
        for name, rows in packed.called(0, m).items():
            assert torch.equal(rows, apart.called(0, m)[name]), f"{name} of {m} rows"


@pytest.mark.parametrize("text", ["sum(mm, n), silu(mm)", "logsumexp(mm * gate[m,n], n)"])
def test_a_product_that_is_given(text: str) -> None:
    torch.manual_seed(0)
    kernel = epigen.compile(text, invariant="m")
    for n in (64, 1003, 4096):
        mm, gate = drawn((MOST, n)), drawn((MOST, n), torch.bfloat16)
        inputs = {"gate": gate} if "gate" in text else {}
        whole = kernel.over(mm, **inputs)
        for m in ROWS:
            first = (MOST - m) // 3
            part = kernel.over(mm[first : first + m], **{name: t[first : first + m] for name, t in inputs.items()})
            for some, rows in zip(*((x if isinstance(x, tuple) else (x,)) for x in (part, whole)), strict=True):
                assert torch.equal(some, rows[first : first + m]), f"{m} rows of {n}"


def test_products_of_a_batch_have_the_bits_of_one_alone() -> None:
    torch.manual_seed(0)
    kernel = epigen.compile("relu(mm + bias)", invariant="m")
    a, b, bias = drawn((4, 300, 512), torch.bfloat16), drawn((512, 768), torch.bfloat16), drawn((768,), torch.bfloat16)
    whole = kernel(a, b, bias=bias)
    for m in (1, 17, 300):
        assert torch.equal(kernel(a[:, :m], b, bias=bias), whole[:, :m])
        assert torch.equal(kernel(a[2, :m], b, bias=bias), whole[2, :m])
