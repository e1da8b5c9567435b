"""No program, sound or not, ends the process: in a thread of 512 KB, and with whatever recursion limit the host has set."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable

import forked
import pytest
from checkout import ROOT
from golden import Golden

from epigen.errors import ParseError
from epigen.ir.check import check
from epigen.ir.derive import derive
from epigen.ir.passes import normalise
from epigen.ir.unparse import unparse
from epigen.lang.parser import MAX_DEPTH, parse

# as many of a piece as a text may have characters, in every way in which Python's parser, or what reads its tree, might recurse
TEXTS = """
    longest = 20_000
    def around(left, right, middle="mm", most=longest):
        return [left * n + middle + right * n for n in (95, 190, most // (len(left) + len(right) + 1))]
    texts = [
        *around("(", ")"), *around("relu(", ")"), *around("(-", ")"), *around("(mm+", ")"), *around("[", "]"), *around("{", "}"), *around("(x:=", ")"), *around("f(x=", ")"),
        *around("mm[", "]"), *around("f'{", "}'"), *around("lambda x=(", "):1"), *around("", "+1"), *around("", "*mm"), *around("", "**2"), *around("", ".x"), *around("", "[m]"),
        *around("", "()"), *around("", "<1"), *around("", " and 1"), *around("", " if 1 else 1"), *around("", ",mm"), *around("", ";mm"), *around("", "'a'"), *around("-", ""),
        *around("~", ""), *around("+", ""), *around("not ", ""), *around("lambda:", ""), *around("await ", ""), *around("x=", ""), *around("- ", "", most=10_000), *around("*", ""),
        *around("(" + "-" * 19, ")"), *around("(not " * 5, ")" * 5), *around("for x in y: ", ""), *around("\\n", ""), *around("#\\n", ""), *around("mm\\n", ""),
        "; ".join(["q0 = mm", *(f"q{i} = q{i - 1} + q{i - 1}" for i in range(1, 600)), "q599"]),
        "; ".join(f"z{i} = " + "(" * 90 + "mm" + " + 1)" * 90 for i in range(8)) + "; z0, z1, z2, z3, z4, z5, z6, z7",
        "relu(" * 100 + "mm" + ")" * 100, "-" * 100 + "mm", "mm" + " + mm" * 100, "mm" + " ** 2" * 1, "where(mm > 0, " * 90 + "mm" + ", 0)" * 90, ", ".join(f"mm > {i}" for i in range(500)),
    ]
"""

IN_A_THREAD = (
    """
    import sys, threading
    import torch
    import epigen
    from epigen import settings
    from epigen.codegen import schedules
    from epigen.codegen.lower import lower
    from epigen.codegen.render import Renderer
    from epigen.codegen.spec import Signature
    from epigen.dtypes import FP16
    from epigen.errors import EpigenError
    from epigen.ir.derive import derive
    from epigen.ir.unparse import unparse
    from epigen.lang.parser import parse
"""
    + TEXTS
    + """
    done, refused = [], []
    def work():
        renderer = Renderer(settings.templates_dir())
        config = schedules.config("tiled", block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3)
        for text in texts:
            try:
                kernel = epigen.compile(text)
                unparse(kernel.graph)
                renderer.render(lower(kernel.graph, Signature(FP16, FP16, tuple((n.name, FP16) for n in kernel.graph.inputs()))), config)
                kernel(torch.ones(2, 3), torch.ones(3, 2))
                derive(kernel.graph)
                done.append(text)
            except EpigenError as error:
                assert str(error)
                refused.append(text)
    if len(sys.argv) > 1:
        sys.setrecursionlimit(int(sys.argv[1]))
    threading.stack_size(512 * 1024)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(len(texts), len(done), len(refused))
"""
)


@pytest.mark.parametrize("limit", [None, 1_000_000], ids=["the usual limit", "a high limit"])
def test_a_thread_of_half_a_megabyte(limit: int | None) -> None:
    found = forked.python("-c", textwrap.dedent(IN_A_THREAD), *([str(limit)] if limit else []), cwd=ROOT, env=os.environ)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stderr == ""
    texts, done, refused = map(int, found.stdout.split())
    assert done + refused == texts
    assert done > 8


def at_depth(calls: int, run: Callable[[], object]) -> object:
    return run() if calls == 0 else at_depth(calls - 1, run)


def depth() -> int:
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame, count = frame.f_back, count + 1
    return count


@pytest.mark.parametrize(
    "text",
    [
        "relu(" * MAX_DEPTH + "mm" + ")" * MAX_DEPTH,
        "mm" + " + mm" * (MAX_DEPTH - 1),
        "; ".join(["q0 = mm", *(f"q{i} = tanh(q{i - 1})" for i in range(1, 400)), "q399"]),
    ],
)
def test_the_deepest_program_needs_no_deep_stack(text: str) -> None:
    """Of a few dozen calls that the host has left, Python's own parser has three times as many; nothing else recurses."""
    derive(normalise(check(parse("relu(mm)"))))  # what a process does once
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth() + 60)
    try:
        graph = normalise(check(parse(text)))
        derived = derive(normalise(check(parse(unparse(graph)))))
    finally:
        sys.setrecursionlimit(before)
    assert derived.backward.text


def test_a_stack_that_is_used_up_is_an_error_in_words(golden: Golden) -> None:
    text = "relu(" * MAX_DEPTH + "mm" + ")" * MAX_DEPTH
    limit = sys.getrecursionlimit()
    with golden.raises(ParseError):
        at_depth(limit - depth() - 25, lambda: parse(text))
    assert parse(text).outputs
