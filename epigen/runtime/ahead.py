"""Ahead-of-time compilation in a process of its own: Triton's two modes do not mix in one, and a compiler crash stays out of ours."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

from epigen import settings
from epigen.codegen.functions import Function
from epigen.codegen.render import Rendered
from epigen.errors import CompileError, EpigenError
from epigen.gpus import Target
from epigen.ir.graph import INDICES
from epigen.runtime.loader import Compiled, compile_ahead


def layout_constants(function: Function, layout: str = "nn") -> dict[str, int]:
    """The strides of 1 that contiguous tensors have. layout: how a and b lie, as in `codegen.spec.LAYOUTS`."""
    names = {a.name for a in function.arguments}
    ones = {"stride_ak" if layout[0] == "n" else "stride_am", "stride_bn" if layout[1] == "n" else "stride_bk"}
    # the last index of an input or an output; of a packed mask read in words, the rows' stride is the only one
    masks = {f"stride_{a.name.removesuffix('_ptr')}_m" for a in function.arguments if a.type == "*u8"}
    ones |= {
        n for n in names - masks if n.startswith("stride_") and n[-2] == "_" and not any(f"{n[:-1]}{behind}" in names for behind in INDICES.partition(n[-1])[2])
    }
    return dict.fromkeys(sorted(ones & names), 1)


@dataclass(frozen=True, slots=True)
class Job:
    """All functions of one module for one target. follows: the first comes after the vendor's product, as the others come after it."""

    rendered: Rendered
    target: Target
    layout: str = "nn"
    follows: bool = False

    def run(self) -> list[Compiled]:
        functions = self.rendered.functions
        follows = [self.follows, *[True] * (len(functions) - 1)]
        return [compile_ahead(self.rendered, f, self.target, layout_constants(f, self.layout), x) for f, x in zip(functions, follows, strict=True)]


class Running:
    """A compilation under way. The pipe's two ends are both epigen's own, so pickle reads only what epigen wrote."""

    def __init__(self, job: Job):
        environment = settings.child_environment(interpret=False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "epigen.runtime.ahead"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        assert self.process.stdin is not None
        payload = pickle.dumps(job)
        with contextlib.suppress(BrokenPipeError):  # a child that died at once is reported by `result`
            self.process.stdin.write(payload)
            self.process.stdin.flush()

    def stop(self) -> None:
        """Give the compilation up."""
        self.process.kill()
        self.process.communicate()

    def result(self) -> list[Compiled]:
        """Waits. Raises CompileError where the compiler refused the kernel or crashed."""
        out, err = self.process.communicate()
        if self.process.returncode:
            words = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
            raise CompileError(f"the compiler process ended with status {self.process.returncode}: {words[-1] if words else 'no message'}")
        answer = pickle.loads(out)
        if isinstance(answer, EpigenError):
            raise answer
        compiled: list[Compiled] = answer
        return compiled


def main() -> None:
    """Read a job, write its result or the error. What compilers print to standard output goes to standard error."""
    results = os.dup(1)
    os.dup2(2, 1)
    job: Job = pickle.load(sys.stdin.buffer)
    answer: list[Compiled] | EpigenError
    try:
        answer = job.run()
    except EpigenError as error:
        answer = CompileError(str(error))
    with os.fdopen(results, "wb") as pipe:
        pickle.dump(answer, pipe)


if __name__ == "__main__":
    main()
