"""Compiles the kernels of many calls beforehand, in parallel: what is timed afterwards finds them in Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import epigen
from epigen.dtypes import BY_NAME
from epigen.errors import EpigenError
from epigen.runtime import verify
from epigen.runtime.device import Target
from epigen.tuning.asked import Asked
from epigen.tuning.runner import builders_for


def compile_one(asked: Asked, target: Target) -> str:
    """Compile what a call would launch. Returns what went wrong, "" if nothing: the call itself will say it again."""
    dtype = BY_NAME[asked.dtype]
    kernel = epigen.compile(asked.program)
    sample = verify.sample(kernel.graph, asked.shape, dtype, dtype, dtype, device="meta", layout=asked.layout)
    try:
        kernel.warm(sample.a, sample.b, target=target, **sample.inputs)
    except EpigenError as error:
        return str(error).splitlines()[0]
    return ""


def compile_all(asked: Sequence[Asked], target: Target) -> int:
    """Returns how many compiled. A compiler that dies takes the others with it, and then the calls compile for themselves."""
    if not asked:
        return 0
    done = 0
    with ProcessPoolExecutor(min(len(asked), builders_for(1)), multiprocessing.get_context("spawn"), initializer=os.nice, initargs=(5,)) as pool:
        try:
            for problem in pool.map(compile_one, asked, [target] * len(asked), timeout=120):
                done += not problem
        except (BrokenProcessPool, TimeoutError):
            pool.shutdown(wait=False, cancel_futures=True)
    return done
