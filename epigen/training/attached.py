"""A forward that `epigen.fuse` sets on a module, as an attribute beside that of its class, and what else of the module has to know of it.

No class is changed: torch calls `module.forward`, and finds the attribute first. Taken away, the class's own is there again.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from epigen.errors import CallError

FORWARD, REPLICA, SCRIPT = "forward", "_replicate_for_data_parallel", "__prepare_scriptable__"
"""The attributes of a module that are set: what runs, and what torch.nn.DataParallel and torch.jit.script ask a module for."""


class Attached:
    # What a module has as its `forward`. It belongs to one module; a copy of the model holds a copy of it, of the copied module.
    def __init__(self, module: nn.Module):
        self.module = module
        self.active = True

    @property
    def __signature__(self) -> inspect.Signature:
        """Of the module's own forward, which others read to know what to give."""
        return inspect.signature(type(self.module).forward.__get__(self.module))

    @property
    def __code__(self) -> Any:
        """As a method has it: torch.export reads where a forward was written."""
        return type(self.module).forward.__code__

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return type(self.module).forward.__doc__

    def replica(self) -> nn.Module:
        """What torch.nn.DataParallel takes for another GPU. It copies the attributes, of which this forward is the module's own: a replica has its class's."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        for name in (FORWARD, REPLICA, SCRIPT):
            replica.__dict__.pop(name, None)
        return replica

    def script(self) -> nn.Module:
        raise CallError(
            "torch.jit.script compiles the text of a forward, and that of a fused one is not what runs: epigen.unfuse(model) first, or torch.jit.trace, or torch.export"
        )

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def attach(self) -> None:
        self.module.__dict__ |= {FORWARD: self, REPLICA: self.replica, SCRIPT: self.script}


def detach(module: nn.Module) -> None:
    """The module has its class's forward again, also for whoever has wrapped the other."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Attached):
            value.active = False
            if name == FORWARD:
                for each in (FORWARD, REPLICA, SCRIPT):
                    module.__dict__.pop(each, None)


def recorded() -> bool:
    """Whether somebody writes down or transforms what is called, and is to see the module's own code."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )
