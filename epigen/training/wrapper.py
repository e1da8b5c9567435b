"""The line of Inductor's wrapper code that runs a program: a call of the kernel itself, in place of torch's way to an operation written in Python.

That way takes longer than the kernel's launch. Where the graph's extents are fixed all tensors of a line are always alike, so that its kernel asks nothing of them
either. Who is to see an operation, such as a profiler or one of torch's modes, is given the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epigen.training import library
from epigen.training.site import How, Site

_NAME = f"torch.ops.{library.fused}"


class Line:
    """In place of `library.fused` where wrapper code has it, of which it takes the arguments. static: whether all tensors are always alike."""

    __slots__ = ("site",)

    def __init__(self, text: str, tune: str | None, static: bool, options: str | None = None):
        self.site = Site(text, tune, How.GIVEN, options=options) if static else None

    def __call__(
        self, text: str, tune: str | None, a: Tensor, b: Tensor, inputs: Sequence[Tensor], numbers: Sequence[float], *, options: str | None = None
    ) -> Sequence[Tensor]:
        if not library.usual():
            return list(library.fused(text, tune, a, b, inputs, numbers, options=options))
        site = self.site
        if site is None:
            return library.run(text, tune, a, b, inputs, options)
        results = site.now(a, b, *inputs)
        if results is not None:
            return results
        with torch.no_grad():
            return site.slow(a, b, *inputs)


def register() -> None:
    """Have Inductor write such lines. Where a torch has no place to say so, its code calls the operation, as before."""
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine  # noqa: F401
    except ImportError:
        return
    CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(_NAME, CustomCodegen(python=_write))


def _write(node: Any, writeline: Callable[[Any], None]) -> None:
    """The line, where Inductor's own call of the operation would be. node: a FallbackKernel."""
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    class Named(ExternKernelAllocLine):
        """Inductor's own line, written when all of its arguments have their names, by the name of what is called."""

        def codegen(self, code: Any) -> None:
            node.python_kernel_name = name
            try:
                super().codegen(code)
            finally:
                node.python_kernel_name = _NAME

    name = f"epigen_{node.get_name()}"
    wrapper = outermost = V.graph.wrapper_code
    while (parent := getattr(outermost, "parent_wrapper", None)) is not None:  # of a graph within, whose code has no head of its own
        outermost = parent
    text, tune = node.constant_args[:2]
    outermost.add_import_once("from epigen.training.wrapper import Line")
    options = node.kwargs.get("options")
    beside = "" if options is None else f", options={options!r}"
    outermost.add_import_once(f"{name} = Line({text!r}, {tune!r}, static={_static(node.inputs)}{beside})")
    writeline(Named(wrapper, node))


def _static(inputs: Sequence[Any]) -> bool:
    return all(str(extent).isdigit() for value in inputs for extent in (*value.get_size(), *value.get_stride()))
