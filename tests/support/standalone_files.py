"""Stand-alone files to try, and interpreters that run them where epigen is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import forked
from checkout import WATCHED

from epigen import api
from epigen.codegen import schedules
from epigen.codegen.lower import signature_of_contiguous
from epigen.codegen.spec import KernelConfig
from epigen.codegen.standalone import standalone
from epigen.dtypes import FP16, DType
from epigen.gpus import TARGETS

SMALL = schedules.config("tiled", block_m=32, block_n=32, block_k=32, group_m=4, num_warps=4, num_stages=2)
LIBRARY = schedules.config("library", block_m=8, block_n=64, num_warps=4)


@dataclass(frozen=True)
class File:
    """damage: an edit of the kernel that makes it wrong; empty where none is tried."""

    text: str
    damage: tuple[str, str]
    dtype: DType = FP16
    config: KernelConfig = SMALL
    k: int = 1
    b: DType | None = None

    def __str__(self) -> str:
        return f"{self.text} {self.dtype} {self.config.schedule}{'' if self.k == 1 else f' K={self.k}'}{f' b {self.b}' if self.b else ''}"

    @property
    def source(self) -> str:
        kernel = api.compile(self.text, config=self.config, precision="ieee")
        shape = (4096, 4096, self.k)
        signature = kernel.signature_of(self.dtype, shape)
        if self.b is not None:
            signature = signature_of_contiguous(kernel.graph, self.dtype, self.b, signature.inputs, shape, "nt", "ieee")
        plan = kernel.plan(shape, signature=signature, target=TARGETS["sm_90"])
        return standalone(kernel.renderer, kernel.graph, plan.spec, plan.choice, plan.rendered)

    @property
    def damaged(self) -> str:
        source = self.source
        assert source.count(self.damage[0]) == 1, self.damage[0]
        return source.replace(*self.damage)


def _environment() -> dict[str, str]:
    """Without this process's import path; no GPU, so that every machine tests the same."""
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    own.update(PYTHONPATH=str(WATCHED))
    return own


def anew(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter in a folder."""
    return subprocess.run([sys.executable, "-W", "error", *arguments], cwd=folder, env=_environment(), capture_output=True, text=True, check=False)


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same, but for torch, which is imported already: a start else takes longer than what is tested."""
    return forked.python("-W", "error", *arguments, cwd=folder, env=_environment())
