"""One of several processes that train one model, each on its part of the batch. Started by tests/training/test_layers_under_torch.py."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed
from torch.nn import functional as F  # noqa: N812  # as everyone calls it
from torch.nn.parallel import DistributedDataParallel

import epigen

EACH = 8
"""Rows a process."""


def run(rank: int, count: int, device: str, place: str) -> None:
    """place: a file that is not there yet, where they meet."""
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    meeting = {"init_method": f"file://{place}", "rank": rank, "world_size": count, "timeout": timedelta(seconds=600)}
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", **meeting)
    torch.manual_seed(0)
    model = epigen.nn.MLP([24, 40, 7], "gelu", device=where)
    shared = DistributedDataParallel(model, bucket_cap_mb=0.001)  # a bucket a layer or so
    x = torch.randn(EACH * count, 24, generator=torch.Generator().manual_seed(5)).to(where)
    first, last = model
    y = F.linear(F.gelu(F.linear(x, first.weight, first.bias)), last.weight, last.bias)
    expected = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    for _ in range(2):
        model.zero_grad()
        shared(x[rank * EACH : (rank + 1) * EACH]).square().sum().backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad * count, e, rtol=1e-3, atol=1e-3)
    torch.distributed.barrier()  # who leaves first takes the meeting place along
    torch.distributed.destroy_process_group()
    # Without destructors: that of gloo's group holds the GIL while it joins its threads, and one of those may still
    # wait for the GIL to drop what it has reduced. torch 2.13 then hangs or, if the interpreter is ending, aborts.
    os._exit(0)
