"""Packed masks in words of 4 bytes where their rows allow it, else in bytes: any width, stride and address, and no byte beside them written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import LIBRARY, tiled
from compiling import assembly, compiled, job
from compiling import tiled as compiled_tile

import epigen
from epigen.codegen.spec import KernelConfig, whole_words
from epigen.dtypes import FP16
from epigen.gpus import TARGETS
from epigen.ir import reference
from epigen.runtime import verify
from epigen.runtime.ahead import Job
from epigen.runtime.kernel import Kernel

TEXT = "z = cast(mm + bias * scale_a[m], fp16); z, bitmask(z > -0.5), where(mask, z, 0)"  # a bit is set where nothing is, too
M, K = 19, 16
FILL = 0xA5

# how a mask of M rows of so many bytes lies: the row stride, and the offset of its first byte, in an aligned buffer
LYING: dict[str, Callable[[int], tuple[int, int]]] = {
    "own": lambda width: (-(-width // 16) * 16, 0),
    "tight": lambda width: (width, 0),
    "odd stride": lambda width: (width + 1 + width % 2, 0),
    "words": lambda width: (-(-width // 4) * 4 + 8, 0),
    "offset 1": lambda width: (-(-width // 16) * 16 + 16, 1),
    "offset 4": lambda width: (-(-width // 16) * 16 + 16, 4),
}
WIDTHS = (1, 31, 33, 64, 72, 95, 128)


def lying(how: str, n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty mask, and the buffer that it lies in."""
    width = -(-n // 8)
    stride, offset = LYING[how](width)
    buffer = torch.full((M * stride + 32,), FILL, dtype=torch.uint8, device=device)
    return torch.as_strided(buffer, (M, width), (stride, 1), offset), buffer


def words(n: int) -> set[str]:
    """The ways to lie in which each row begins at a word."""
    return {"own", "words"} | ({"tight"} if -(-n // 8) % 4 == 0 else set())


def bytewise(kernel: Kernel) -> set[str]:
    """The masks that the last call's kernel accesses in bytes; in words all others."""
    found = set(re.findall(r"(mask|out1)_ptr \+ offs_m \* stride_\1_m \+ offs_byte", kernel.source()))
    assert found | set(re.findall(r"(mask|out1)_ptr\.to\(tl\.pointer_type\(tl\.int32\)\)", kernel.source())) == {"mask", "out1"}
    return found


def check(config: KernelConfig | None, n: int, how: str, device: str, backend: str) -> None:
    kernel = epigen.compile(TEXT, config=config, backend=backend)
    given = verify.sample(kernel.graph, (M, n, K), FP16, FP16, FP16, seed=n, device=device)
    mask, _ = lying(how, n, device)
    mask.copy_(given.inputs["mask"])  # its neighbours hold set bits, which must not be read as columns
    given = verify.Sample(given.a, given.b, given.inputs | {"mask": mask})
    result = kernel(given.a, given.b, **given.inputs)
    expected = given.a.float() @ given.b.float() + given.inputs["bias"].float() * given.inputs["scale_a"].float()[:, None]
    torch.testing.assert_close(result.z.float(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(result.out1, reference.pack(result.z > -0.5))
    assert torch.equal(result.out2, torch.where(reference.unpack(mask, n), result.z, 0))
    narrow = kernel.config["block_n"] < 32
    assert bytewise(kernel) == {"mask", "out1"} if narrow else bytewise(kernel) == ({"mask"} if how not in words(n) else set())

    out, buffer = lying(how, n, device)
    kernel(given.a, given.b, **given.inputs, out={"out1": out})
    # what lies behind a row's last byte is another's
    assert "out1" in bytewise(kernel) or (how in words(n) and out.shape[1] % 4 == 0)
    assert torch.equal(out, result.out1)
    outside = torch.ones_like(buffer, dtype=torch.bool)
    torch.as_strided(outside, out.shape, out.stride(), out.storage_offset()).fill_(False)
    assert (buffer[outside] == FILL).all()


@pytest.mark.triton
@pytest.mark.parametrize(("turn", "config"), [*enumerate((tiled(32, 32, 32), tiled(16, 128, 32), LIBRARY))], ids=["32", "128", "library"])
@pytest.mark.parametrize(("place", "how"), [*enumerate(LYING)], ids=LYING)
def test_any_width_stride_and_address(turn: int, config: KernelConfig, place: int, how: str) -> None:
    """Each two of width, way to lie and config; on a GPU all three."""
    for n in WIDTHS[(turn + place) % 3 :: 3]:
        check(config, n, how, "cpu", "interpreter")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [tiled(64, 32, 32), tiled(128, 128, 32), tiled(128, 256, 64, 8), tiled(16, 64, 32), tiled(32, 16, 32), LIBRARY, None])
@pytest.mark.parametrize("how", LYING)
def test_gpu(config: KernelConfig | None, how: str) -> None:
    for n in (*WIDTHS, 257, 512, 1000):
        check(config, n, how, "cuda", "triton")


@pytest.mark.triton
def test_an_address_that_moves_gets_a_kernel_of_its_own() -> None:
    """The same shape and strides, so that only the address tells."""
    kernel = epigen.compile("drelu(mm, mask)", config=tiled(32, 32, 32), backend="interpreter")
    given = verify.sample(kernel.graph, (M, 70, K), FP16, FP16, FP16, seed=1)
    expected = kernel(given.a, given.b, **given.inputs)
    for offset in (0, 1, 4, 16, 0):
        mask = torch.as_strided(torch.zeros(M * 32, dtype=torch.uint8), (M, 9), (16, 1), offset)
        mask.copy_(given.inputs["mask"])
        assert torch.equal(kernel(given.a, given.b, mask=mask), expected)
        assert ("mask_word" in kernel.source()) == (offset % 16 == 0)


@pytest.mark.parametrize(
    ("strides", "address", "whole"),
    [
        ((16, 1), 0, True),
        ((4, 1), 32, True),
        ((8, 1), 48, True),
        ((2, 1), 0, False),
        ((5, 1), 0, False),
        ((16, 2), 0, False),
        ((16, 1), 4, False),
        ((16, 1), 1, False),
    ],
)
def test_what_rows_are_whole_words(strides: tuple[int, int], address: int, whole: bool) -> None:
    assert whole_words(strides, address) == whole


FORWARD = "z = mm + bias; relu(z), bitmask(z > 0)"
TILES = (compiled_tile(128, 256, 64, 8), compiled_tile(128, 128, 64, 4), compiled_tile(64, 128, 64, 4))


@pytest.mark.triton
def test_packing_and_reading_a_mask_take_few_instructions_on_hopper() -> None:
    """A thread's bits of a word are joined before any shuffle, and what is read comes in words."""
    forward, gated, backward = (
        compiled([job(text, "sm_90", FP16, config) for config in TILES]) for text in (FORWARD, f"{FORWARD}, z * scale_a[m]", "drelu(mm, mask)")
    )
    for found in (forward, gated):
        # two for each word of 32 columns, of which a thread has a share of eight
        assert [assembly(r).count("shfl.sync.bfly") for r in found] == [32, 32, 16]
    for results, rows in zip(backward, (16, 16, 8), strict=True):
        text = assembly(results)
        assert "shfl.sync.bfly" not in text and "ld.global.b8" not in text
        loaded = re.findall(r"ld\.global\.\S*b32", text)
        assert 0 < len(loaded) <= rows // 4


@pytest.mark.triton
def test_a_mask_of_bytes_takes_more() -> None:
    """The other path compiles too, from a signature of its own."""
    found = {}
    for bytewise_ in ((), ("out1",)):
        kernel = epigen.compile(FORWARD, config=TILES[2])
        signature = replace(kernel.signature_of(FP16, (4096, 4096, 4096)), bytewise=bytewise_)
        plan = kernel.plan((4096, 4096, 4096), target=TARGETS["sm_90"], signature=signature)
        (found[bytewise_],) = compiled([Job(plan.rendered, TARGETS["sm_90"])])
    words_, bytes_ = (assembly([found[b][0]]).count("shfl.sync.bfly") for b in ((), ("out1",)))
    assert (words_, bytes_) == (16, 64)
