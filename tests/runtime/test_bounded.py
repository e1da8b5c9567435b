"""An endless stream of programs, shapes and configs leaves no more behind in the process than the last ones take."""

from __future__ import annotations

import gc
import linecache
import weakref

import pytest
import torch
from cases import LIBRARY

import epigen
from epigen.codegen.functions import Function
from epigen.codegen.render import Rendered
from epigen.runtime import calls, code_builder, loader
from epigen.runtime.code_builder import CodeBuilder
from epigen.runtime.kernel import Kernel
from epigen.runtime.loader import Loader


def sources() -> int:
    """Texts that Python keeps for tracebacks."""
    gc.collect()
    return sum("epigen" in name for name in linecache.cache)


@pytest.mark.triton
def test_programs_that_are_dropped_leave_nothing() -> None:
    a, b, dropped, before = torch.ones(2, 16).half(), torch.ones(16, 16).half(), list[weakref.ref[Kernel]](), sources()
    for i in range(20):
        kernel = epigen.compile(f"mm * {i}.5, sum(mm, n)", config=LIBRARY, backend="interpreter")
        assert torch.equal(kernel(a, b)[0], torch.full((2, 16), 16 * (i + 0.5)).half())
        dropped.append(weakref.ref(kernel))
    del kernel
    assert sources() <= before + 1 and not any(ref() for ref in dropped)


def test_shapes_of_one_kernel_are_kept_up_to_a_number() -> None:
    kernel = epigen.compile("mm, mm * 2")
    for m in range(1, calls._KEPT + 30):
        kernel(torch.ones(m, 1), torch.ones(1, 1))
    assert len(kernel._calls) == calls._KEPT


@pytest.mark.triton
@pytest.mark.slow
def test_modules_of_one_kernel_are_kept_up_to_a_number() -> None:
    found, before = Loader(interpret=True), sources()
    texts = [f"import triton\n\n\ndef f():\n    return {i}\n" for i in range(loader._MODULES + 20)]
    for i, text in enumerate(texts):
        assert found.load(Rendered(text, (Function("f", (), (), 1, 1, None),), f"{i:016x}")).f() == i
    assert len(found.modules) == loader._MODULES and sources() <= before + loader._MODULES
    assert found.load(Rendered(texts[0], (Function("f", (), (), 1, 1, None),), f"{0:016x}")).f() == 0
    found.modules.clear()
    assert sources() <= before


def test_written_functions_are_kept_up_to_a_number() -> None:
    """Beside those that are held by whoever calls them, as other tests' layers are."""
    limit = code_builder._factory.cache_parameters()["maxsize"]
    before = set(linecache.cache)
    for i in range(limit + 20):
        text = CodeBuilder("again()")
        text.add(f"return {i}")
        assert text.function()() == i
    gc.collect()
    assert sum(name.startswith("<epigen: again") for name in linecache.cache.keys() - before) <= limit
