"""Compiles the kernels of many calls beforehand, in parallel: what is timed afterwards finds them in Triton's cache."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Sequence

import epigen
from epigen.errors import EpigenError
from epigen.gpus import Target
from epigen.runtime import verify
from epigen.tuning.runner import compile_workers_for
from epigen.tuning.task import Request

_PATIENCE_S = 60.0


def compile_one(request: Request, target: Target) -> str:
    """Compile what a call would launch. Returns what went wrong, "" if nothing: the call itself will say it again."""
    dtype = request.a
    kernel = epigen.compile(request.graph.text)
    sample = verify.sample(kernel.graph, request.shape, dtype, dtype, dtype, device="meta", layout=request.layout)
    try:
        kernel.warm(sample.a, sample.b, target, **sample.inputs)
    except EpigenError as error:
        return str(error).splitlines()[0]
    return ""


def compile_all(requests: Sequence[Request], target: Target) -> int:
    """Returns how many compiled. Where none has been done for a while, a compiler hangs or has died, and the calls compile for themselves."""
    if not requests:
        return 0
    done = 0
    # leaving it ends its processes, whatever they do
    with multiprocessing.get_context("spawn").Pool(min(len(requests), compile_workers_for(1)), os.nice, (5,)) as pool:
        results = pool.imap_unordered(functools.partial(compile_one, target=target), requests)
        try:
            for _ in requests:
                done += not results.next(_PATIENCE_S)
        except multiprocessing.TimeoutError:
            pass
    return done
