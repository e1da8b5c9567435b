"""Records of tuned problems for the tests of the database: all alike but for what a test names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from epigen.codegen import schedules
from epigen.codegen.spec import KernelConfig
from epigen.db.database import Database
from epigen.db.problem import Problem
from epigen.db.records import Record

H200, H100, A100 = ("NVIDIA H200", "9.0"), ("NVIDIA H100 80GB HBM3", "9.0"), ("NVIDIA A100-SXM4-80GB", "8.0")
NAME = "nvidia_h200_sm90.json"
TRITON = "3.9.0"
SPEC, OTHER_SPEC = "0123456789abcdef", "fedcba9876543210"
KIND, OTHER_KIND = "load:n store:mn reduce:", "load: store:mn,bits reduce:m"


def config(block_m: int = 128, **more: int) -> KernelConfig:
    return schedules.config("tiled", **({"block_m": block_m, "block_n": 128, "block_k": 64, "group_m": 8, "num_warps": 8, "num_stages": 3} | more))


PLAIN = config()


def problem(shape: tuple[int, int, int] = (4096, 4096, 4096), **more: Any) -> Problem:
    plain = Problem(*H200, shape, "fp16", "fp16", ("fp16[n]",), ("fp16",), "nn", "", "relu(mm + bias)", SPEC, KIND, 16)
    return replace(plain, **more)


def record(shape: tuple[int, int, int] = (4096, 4096, 4096), median_us: float = 100.0, config: KernelConfig = PLAIN, triton: str = TRITON,
           date: str = "2026-11-05T12:00:00Z", **more: Any) -> Record:  # fmt: skip
    measured: dict[str, Any] = {
        "spread_us": 1.0,
        "baseline_us": 90.0,
        "unfused_us": 130.0,
        "trials": {"ok": 40, "crashed": 1},
        "torch": "2.13.0+cu130",
        "epigen": "0.1.0",
    }
    measured |= {name: more.pop(name) for name in list(more) if name in (*measured, "driver")}
    return Record.make(problem(shape, **more), config, median_us=median_us, triton=triton, date=date, **measured)


def opened(path: Path, *seeds: Path) -> Database:
    return Database(path, seeds=seeds)


RUN: dict[str, Any] = {
    "median_us": 1.0,
    "spread_us": 0.0,
    "baseline_us": 1.0,
    "trials": {},
    "date": "2026-11-05T12:00:00Z",
    "triton": TRITON,
    "torch": "2.13.0",
    "epigen": "0.1.0",
}
"""A measurement, for Record.make."""
