"""Fixtures of the tests of warmed calls, which run in a process where Triton takes the CPU for a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gpu import FakeGpu
from warmed import Watch


@pytest.fixture(scope="session")
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture(autouse=True)
def _stream(gpu: FakeGpu) -> Iterator[None]:
    gpu.stream = 7
    yield
    gpu.stream = 7


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture
def captured(gpu: FakeGpu) -> Iterator[None]:
    gpu.capturing = True
    yield
    gpu.capturing, gpu.stream = False, 7
