"""Device memory for the tests that take much of it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator

import pytest
import torch

_OTHERS_GB = 8
"""What is left to the tests that run meanwhile."""


@pytest.fixture
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[float], None]]:
    """room(gigabytes): skips where the GPU has less memory than a test takes, and gives back what others hold.

    One test at a time: of two that find the same memory free at once, in two workers, one would run out of it.
    """
    workers = tmp_path_factory.getbasetemp().parent  # of pytest-xdist's workers; without them of this user's runs
    with (workers / "gpu_memory.lock").open("w") as lock:

        def ask(gigabytes: float) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            torch.mm(*[torch.ones(16, 16, device="cuda")] * 2)  # lest cuBLAS take its workspace, which stays, of what is kept below
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0] / 2**30
            if free < gigabytes + _OTHERS_GB:
                pytest.skip(f"{gigabytes} GB of device memory are needed, and {free:.0f} are free")
            torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda")  # this process keeps it, so that no other takes it meanwhile

        yield ask
        torch.cuda.empty_cache()
