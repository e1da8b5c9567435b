"""What a kernel accesses outside of its tensors is an error under the interpreter, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import epigen
from epigen import settings
from epigen.codegen.render import Rendered, Renderer

pytestmark = pytest.mark.triton


# by itself, for Triton decides once whether it interprets
KERNELS = """
import json, sys, torch
from bounded_interpreter import bound
import triton, triton.language as tl
bound()

@triton.jit
def copy(x, y, n, first: tl.constexpr, SIZE: tl.constexpr):
    at = first + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def add(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.atomic_add(x + at, 1, mask=at < n)

@triton.jit
def described(x, rows, SIZE: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, [rows, SIZE], [SIZE, 1], [16, SIZE])
    tile.store([0, 0], tile.load([0, 0]) + 1)

@triton.jit
def word(mask_ptr, out):
    tl.store(out, tl.load(mask_ptr.to(tl.pointer_type(tl.int32))))

whole = torch.arange(64, dtype=torch.float32)
x, y, counts = whole[16:37], torch.zeros(64)[16:37], torch.zeros(64, dtype=torch.int32)[:21]
packed = torch.zeros(16, dtype=torch.uint8)
"""
FINE = (
    "copy[(1,)](x, y, 21, 0, 32); assert (x == y).all()",
    "copy[(1,)](whole.half()[1::2], y, 0, 0, 32)",
    "add[(1,)](counts, 21, 32); assert (counts == 1).all()",
    "described[(1,)](whole, 4, 16); assert (whole == 1 + torch.arange(64)).all()",
    "word[(1,)](packed[8:11], counts)",  # its last byte is the allocation's
)
WRONG = {
    "copy[(1,)](x, torch.zeros(32), 22, 0, 32)": "4 bytes at 0 bytes beyond the end of argument 0: 1 of 22 places are outside",
    "copy[(1,)](torch.zeros(32), y, 25, 0, 32)": "4 bytes at 0 bytes beyond the end of argument 1: 4 of 25 places are outside",
    "copy[(1,)](x, y, 21, -2, 32)": "4 bytes at 8 bytes before argument 0: 2 of 23 places are outside",
    "copy[(1,)](torch.zeros(0), torch.zeros(0), 1, 0, 1)": "1 of 1 places are outside",
    "copy[(1,)](whole[:6:5], torch.zeros(32), 7, 0, 8)": "4 bytes at 0 bytes beyond the end of argument 0: 1 of 7 places are outside",
    "add[(1,)](counts, 22, 32)": "4 bytes at 0 bytes beyond the end of argument 0: 1 of 22 places are outside",
    "described[(1,)](whole, 5, 16)": "4 bytes at 0 bytes beyond the end of argument 0: 16 of 80 places are outside",
    "word[(1,)](packed[13:], counts)": "an address is no multiple of 4",
    "word[(1,)](torch.zeros(11, dtype=torch.uint8)[8:], counts)": "4 bytes at the end of memory: 1 of 1 places are outside",
}
EACH = """
told = {}
for statement in json.loads(sys.argv[1]):
    try:
        exec(statement)
    except Exception as error:
        told[statement] = str(error)
print(json.dumps(told))
"""


def test_only_what_is_outside_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"  # where Triton reads them
    script.write_text(KERNELS + EACH)
    environment = settings.child_environment(interpret=True)  # with this folder, from which pytest imports
    given = json.dumps([*FINE, *WRONG, FINE[0]])  # the last: a launch after one that went wrong
    ran = subprocess.run([sys.executable, str(script), given], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert {statement: what for statement, what in WRONG.items() if what not in told.get(statement, "")} == {}, told
    assert {statement: told[statement] for statement in FINE if statement in told} == {}


def test_a_kernel_that_forgets_a_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that `epigen.compile` makes. The answer would be right."""
    render, masked = Renderer.render, ", mask=offs_n < N, other=0.0"

    def careless(*given: Any) -> Rendered:
        rendered = render(*given)
        assert masked in rendered.text
        return replace(rendered, text=rendered.text.replace(masked, ""), digest=f"{rendered.digest}_careless")

    x, w, bias = torch.randn(20, 16), torch.randn(16, 24), torch.randn(24)
    epigen.compile("relu(mm + bias)", backend="interpreter")(x, w, bias=bias)
    monkeypatch.setattr(Renderer, "render", careless)
    with pytest.raises(Exception, match="argument 2: 8 of 32"):
        epigen.compile("relu(mm + bias)", backend="interpreter")(x, w, bias=bias)
