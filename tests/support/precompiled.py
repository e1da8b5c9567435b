"""Ends what compiles ahead: threads that would go on beside another test, which is not to reach Triton."""

from __future__ import annotations

import os

from epigen.training import precompile


def end() -> None:
    if precompile._threads.cache_info().currsize:
        precompile._threads(os.getpid())[0].shutdown()
        precompile._threads.cache_clear()
