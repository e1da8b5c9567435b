"""One of two processes that hold layers in parts: tensor parallelism, and parameters that are gathered where they are used. Started by tests/training/test_ecosystem.py."""

from __future__ import annotations

import copy
import itertools
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import epigen
from epigen.errors import CallError
from epigen.training.backend import backend


def run(rank: int, count: int, place: str) -> None:
    """place: a file that is not there yet, where they meet."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count, timeout=timedelta(seconds=600))
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (count,))
    for hidden, lead in ((32, (6,)), (24, (2, 3))):
        parallel_layers(mesh, hidden, lead)
    for text in PROGRAMS:
        split_every_way(mesh, text)
    a_buffer(mesh)
    mistakes(mesh)
    gathered(mesh)
    compiled(mesh)
    for way in ("DDP", "FSDP", "FSDP of compiled blocks", "TP"):
        by_the_backend(mesh, way)
    fused(mesh)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # as tests/support/training_process.py says


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def whole(t: Any) -> Tensor:
    found: Tensor = t.full_tensor() if isinstance(t, DTensor) else t
    return found


def same(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(whole(found), expected, rtol=1e-4, atol=1e-4)


def parallel_layers(mesh: DeviceMesh, hidden: int, lead: tuple[int, ...]) -> None:
    """A model whose first layer has a part of the columns in each process, and its second of the summands. hidden: of 24 columns the masks' bytes are not split evenly."""
    for act in ("relu", "gelu"):
        torch.manual_seed(0)
        model = epigen.nn.MLP([8, hidden, 4], act)
        plain = copy.deepcopy(model)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        x, y = (drawn(*lead, 8).requires_grad_() for _ in range(2))
        found, expected = model(x), plain(y)
        same(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        same(x.grad, y.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and p.grad.shape == q.shape
            same(p.grad, q.grad)


PROGRAMS = (
    "mm + bias", "alpha * mm - beta * residual", "gelu(mm + bias) * residual", "z = mm + bias; relu(z), sum(z, n)", "z = mm + s; z, sum(z, m), sum(z)",
    "y = mm + residual; y, cast(y, bf16)", "sum(relu(mm), m) * 2", "where(residual > 0, mm, bias)", "mm * mm", "relu(mm), sum(a, k), sum(b, k)", "mm, sum(a, k)", "z = mm + residual; z, bitmask(z > 0)", "max(mm, m)",
)  # fmt: skip


def split_every_way(mesh: DeviceMesh, text: str) -> None:
    """Operands and inputs wherever they may be: what comes out is what it is of whole ones."""
    kernel = epigen.compile(text)
    m, n = 5, 16 if "bitmask" in text else 7
    sizes = {"bias": (n,), "residual": (m, n), "s": (), "alpha": (), "beta": ()}
    inputs = {n.name: drawn(*sizes[n.name], seed=i + 2) for i, n in enumerate(kernel.graph.inputs())}
    x, w = drawn(m, 4), drawn(n, 4, seed=1)
    given = dict(inputs) | ({"alpha": 0.5, "beta": 2.0} if "alpha" in inputs else {"s": 0.5} if "s" in inputs else {})
    expected = kernel(x, w.t(), **given)
    for places in itertools.product((Replicate(), Shard(0), Shard(1)), (Replicate(), Shard(0), Shard(1)), (Replicate(), Shard(0))):
        xs, ws = (distribute_tensor(t, mesh, [p]) for t, p in zip((x, w), places, strict=False))
        more = {
            name: distribute_tensor(value, mesh, [places[2] if value.dim() else Replicate()]) if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
        found = epigen.linear(xs, ws, epilogue=text, **more)
        for t, e in zip([found] if isinstance(found, Tensor) else found, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            assert isinstance(t, DTensor) and t.shape == e.shape and t.dtype == e.dtype
            torch.testing.assert_close(whole(t), e, rtol=1e-2 if t.dtype == torch.bfloat16 else 1e-4, atol=1e-4)
        if places == (Replicate(), Replicate(), Replicate()):
            assert all(t.placements == (Replicate(),) for t in ([found] if isinstance(found, Tensor) else found))
        if text == "mm + bias" and places[:2] == (Shard(1), Shard(1)):
            assert found.placements == (Partial(),), "summands stay where they are"


def a_buffer(mesh: DeviceMesh) -> None:
    """To which the gradient of a weight in parts is added, in parts."""
    for at in (Shard(0), Shard(1), Replicate()):
        w = distribute_tensor(drawn(8, 4), mesh, [at]).requires_grad_()
        buffer = distribute_tensor(torch.ones(8, 4), mesh, [at])
        x = drawn(6, 4, seed=1)
        epigen.linear(distribute_tensor(x, mesh, [Replicate()]), w, epilogue="relu(mm)", main_grad=buffer).sum().backward()
        plain = drawn(8, 4).requires_grad_()
        torch.relu(x @ plain.t()).sum().backward()
        assert w.grad is None and buffer.placements == (at,)
        same(buffer - 1, plain.grad)


def mistakes(mesh: DeviceMesh) -> None:
    w = distribute_tensor(drawn(8, 4), mesh, [Shard(0)])
    with pytest.raises(CallError, match=r"'a' is a plain tensor, and other tensors of the call are DTensors"):
        epigen.linear(drawn(6, 4), w)


def gathered(mesh: DeviceMesh) -> None:
    """FSDP2: each process holds a part of every parameter, and has its own batch."""
    torch.manual_seed(0)
    model = nn.Sequential(epigen.nn.MLP([8, 16, 8], "gelu"), epigen.nn.Linear(8, 4, epilogue="silu(mm + bias)"))
    plain = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = drawn(6, 8)
    rank, count = mesh.get_local_rank(), mesh.size()
    for _ in range(2):
        model.zero_grad()
        model(x.chunk(count)[rank]).square().sum().backward()
    (plain(x).square().sum() / count).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)


def compiled(mesh: DeviceMesh) -> None:
    """torch.compile of layers in parts."""
    w, v = distribute_tensor(drawn(16, 8), mesh, [Shard(0)]), distribute_tensor(drawn(4, 16, seed=1), mesh, [Shard(1)])

    def model(x: Tensor) -> Tensor:
        found: Tensor = epigen.linear(epigen.linear(x, w, epilogue="gelu(mm)"), v, epilogue="mm")
        return found

    x = distribute_tensor(drawn(6, 8, seed=2), mesh, [Replicate()])
    same(torch.compile(model, backend="aot_eager", fullgraph=True)(x), whole(model(x)))


class Block(nn.Module):
    """Of torch's own layers, which the backend has to find."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def by_the_backend(mesh: DeviceMesh, way: str) -> None:
    """torch.compile by the backend of a model in parts, or with a part of the batch: three steps' results, and the gradients."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
    plain, seen, rank, count = copy.deepcopy(model), list[Any](), mesh.get_local_rank(), mesh.size()
    told: dict[str, Any] = {"backend": backend, "options": {"rest": "eager", "report": seen.extend}}
    for block in model[:2] if way != "DDP" else ():
        if way == "TP":
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            if way == "FSDP of compiled blocks":
                block.compile(**told)
            fully_shard(block, mesh=mesh)
    run: Any = nn.parallel.DistributedDataParallel(model) if way == "DDP" else model if way == "TP" else fully_shard(model, mesh=mesh)
    if way != "FSDP of compiled blocks":
        run = torch.compile(run, **told)
    parts, x = 1 if way == "TP" else count, drawn(8, 5, 16)
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        found, expected = run(x.chunk(parts)[rank if parts > 1 else 0]), plain(x)
        same(found, expected.chunk(parts)[rank if parts > 1 else 0])
        whole(found).square().sum().backward()
        (expected.square().sum() / parts).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)
    texts = [s.program for s in seen if s.taken]
    assert any("dgelu" in text for text in texts) and any("out0, gelu" in text or "gelu(" in text for text in texts), (way, texts)


def fused(mesh: DeviceMesh) -> None:
    """DDP of a model whose layers epigen.fuse runs: its hooks find each gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    plain, rank, count = copy.deepcopy(model), mesh.get_local_rank(), mesh.size()
    report = str(epigen.fuse(model))
    assert "2 of 2 linear layers fused" in report, report
    shared, x = nn.parallel.DistributedDataParallel(model), drawn(8, 5, 16)
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        shared(x.chunk(count)[rank]).square().sum().backward()
        (plain(x).square().sum() / count).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)
