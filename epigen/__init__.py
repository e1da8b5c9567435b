"""epigen: fused matrix-multiplication epilogues, from one line of text to a tuned Triton kernel.

`import epigen` is light: torch and Triton are imported by the first use of a name that needs them. What torch is told of epigen's operations it is told
when it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epigen.after_import import after_import
from epigen.errors import EpigenError
from epigen.uncollected import uncollected

if TYPE_CHECKING:
    from epigen import checkpoints, nn
    from epigen.api import compile, derive, tune
    from epigen.ir.derivation import Derivation
    from epigen.packing import pack_int4, unpack_int4
    from epigen.runtime.kernel import Kernel
    from epigen.training.composed import decompositions
    from epigen.training.cross_entropy import linear_cross_entropy
    from epigen.training.fuse import fuse, unfuse
    from epigen.training.linear import linear
    from epigen.training.report import Report, report
    from epigen.tuning.tune import Tuned

__version__ = "0.1.0"
__all__ = [
    "Derivation", "EpigenError", "Kernel", "Report", "Tuned", "__version__", "checkpoints", "compile", "decompositions", "derive", "fuse", "linear", "linear_cross_entropy", "nn",
    "pack_int4", "report", "tune", "unfuse", "unpack_int4",
]  # fmt: skip


def __dir__() -> list[str]:
    """What the package offers, imported yet or not: completion and `help` go by this."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    with uncollected():
        globals()[name] = value = _imported(name)
    return value


def _imported(name: str) -> Any:
    if name == "compile":
        from epigen.api import compile

        return compile
    if name == "decompositions":
        from epigen.training.composed import decompositions

        return decompositions
    if name == "derive":
        from epigen.api import derive

        return derive
    if name == "Derivation":
        from epigen.ir.derivation import Derivation

        return Derivation
    if name == "Kernel":
        from epigen.runtime.kernel import Kernel

        return Kernel
    if name in ("pack_int4", "unpack_int4"):
        from epigen import packing

        return getattr(packing, name)
    if name == "tune":
        from epigen.api import tune

        return tune
    if name == "Tuned":
        from epigen.tuning.tune import Tuned

        return Tuned
    if name == "linear":
        from epigen.training.linear import linear

        return linear
    if name == "linear_cross_entropy":
        from epigen.training.cross_entropy import linear_cross_entropy

        return linear_cross_entropy
    if name == "fuse":
        from epigen.training.fuse import fuse

        return fuse
    if name in ("report", "Report"):
        from epigen.training import report as module

        return getattr(module, name)
    if name == "unfuse":
        from epigen.training.fuse import unfuse

        return unfuse
    if name == "checkpoints":
        import sys

        import epigen.checkpoints  # noqa: F401  # taken from sys.modules: `import ... as` would ask this function again where an import was interrupted

        return sys.modules["epigen.checkpoints"]
    if name == "nn":
        import epigen.nn as nn  # not `from epigen import nn`, which would ask this function again

        return nn
    raise AttributeError(f"module 'epigen' has no attribute '{name}'")


def _known(to: str) -> None:
    from epigen.training import operations

    getattr(operations, to)()


# each but the first takes a tenth of torch's own import and more, and who does not use it does not import it
after_import("torch", lambda: _known("define"))
after_import("torch.utils.flop_counter", lambda: _known("count_flops"))
after_import("torch.distributed.tensor", lambda: _known("share"))
after_import("torch.distributed.tensor.parallel", lambda: _known("accept_layers"))
after_import("torch.onnx._internal.exporter._decomp", lambda: _known("write_out"))
after_import("transformers.integrations.moe", lambda: _known("offer_experts"))
