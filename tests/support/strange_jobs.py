"""Jobs for a compiling child that end as compilers do at their worst. The child imports this file, which therefore imports little."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn

from epigen.errors import CompileError
from epigen.runtime.loader import Compiled


@dataclass(frozen=True)
class Crash:
    """Ends the child as a crashing compiler does."""

    def run(self) -> NoReturn:
        sys.stderr.write("first\nLLVM ERROR: out of ideas\n")
        sys.stderr.flush()
        os.abort()


@dataclass(frozen=True)
class Refusal:
    def run(self) -> NoReturn:
        raise CompileError("no such instruction")


@dataclass(frozen=True)
class Chatter:
    """Prints where the answer goes, as compilers do when asked for their passes."""

    def run(self) -> list[Compiled]:
        print("x" * 100_000, flush=True)
        os.write(1, b"more\n")
        return []


@dataclass(frozen=True)
class Heavy:
    """More than a pipe holds, so that writing it waits for the child."""

    payload: bytes = bytes(1 << 20)
