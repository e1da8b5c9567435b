"""Weights of few bits, as the libraries that write checkpoints pack them: read, they are what was packed, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao_configs import torchao_config
from zoo import allow_torchvision

from epigen import checkpoints
from epigen.checkpoints import QuantizedWeight
from epigen.errors import CallError

N, K, GROUP = 24, 96, 32


def codes(*shape: int, bits: int = 4) -> Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(bits + len(shape)))


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5).half()


def packed(values: Tensor, bits: int, along: int, order: tuple[int, ...] = ()) -> Tensor:
    """A word after the other, a value after the other, as the first packers did it. order: which of a word's values is stored at each place."""
    values = values.movedim(along, 0)
    each = 32 // bits
    order = order or tuple(range(each))
    words = torch.zeros(values.shape[0] // each, *values.shape[1:], dtype=torch.int64)
    for word in range(words.shape[0]):
        for place, which in enumerate(order):
            words[word] |= values[word * each + which] << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(0, along)


def of_groups(groups: Tensor, group: int = GROUP) -> Tensor:
    """[groups, N] for each element, [N, K]."""
    return torch.stack([groups[k // group] for k in range(groups.shape[0] * group)], 1).float()


# -- GPTQ


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("less_one", [True, False])
def test_a_layer_of_gptq(bits: int, less_one: bool) -> None:
    weight, zero, scale = codes(K, N, bits=bits), codes(K // GROUP, N, bits=bits), scales(K // GROUP, N)
    found = checkpoints.gptq(packed(weight, bits, 0), packed(zero, bits, 1), scale, torch.arange(K) // GROUP, bits=bits, zeros_less_one=less_one)
    assert found.order is None and found.group == GROUP and found.bits == bits
    assert torch.equal(found.dequantized(), (weight.t() - of_groups(zero + less_one)) * of_groups(scale))


def test_its_columns_in_the_order_of_their_activations() -> None:
    """act order: what a column is multiplied by follows its group."""
    groups = torch.randperm(K, generator=torch.Generator().manual_seed(1)) // GROUP
    weight, zero, scale = codes(K, N), codes(K // GROUP, N), scales(K // GROUP, N)
    found = checkpoints.gptq(packed(weight, 4, 0), packed(zero, 4, 1), scale, groups)
    wanted = torch.stack([(weight[k] - (zero[groups[k]] + 1)).float() * scale[groups[k]].float() for k in range(K)], 1)
    assert torch.equal(found.dequantized(), wanted)
    x = torch.randn(3, K, dtype=torch.float64)
    assert found.order is not None
    in_groups = QuantizedWeight(found.values, 4, found.scale, found.zero, GROUP).dequantized()
    torch.testing.assert_close(x[:, found.order] @ in_groups.t().double(), x @ wanted.t().double())


def test_a_symmetric_weight_has_no_zero_points() -> None:
    stored = torch.full((K // GROUP, N), 7)  # 8 less 1
    found = checkpoints.gptq(packed(codes(K, N), 4, 0), packed(stored, 4, 1), scales(K // GROUP, N))
    assert found.zero is None and int(found.values.min()) == -8 and int(found.values.max()) == 7


def test_the_largest_zero_point_is_one_beyond_its_bits() -> None:
    stored = torch.full((K // GROUP, N), 15)
    found = checkpoints.gptq(packed(codes(K, N), 4, 0), packed(stored, 4, 1), scales(K // GROUP, N))
    assert found.zero is not None and bool((found.zero == 16 - 8).all())


def test_groups_of_uneven_size_are_refused() -> None:
    groups = torch.arange(K) // GROUP
    groups[0] = 1
    with pytest.raises(CallError, match=r"the groups of g_idx are of \[31, 32, 33\] columns, where all of 32 are wanted"):
        checkpoints.gptq(packed(codes(K, N), 4, 0), packed(codes(K // GROUP, N), 4, 1), scales(K // GROUP, N), groups)


# -- AWQ


def test_a_layer_of_awq() -> None:
    weight, zero, scale, order = codes(K, N), codes(K // GROUP, N), scales(K // GROUP, N), (0, 2, 4, 6, 1, 3, 5, 7)
    found = checkpoints.awq(packed(weight, 4, 1, order), packed(zero, 4, 1, order), scale)
    assert torch.equal(found.dequantized(), (weight.t() - of_groups(zero)) * of_groups(scale))


# -- compressed-tensors


@pytest.fixture
def pack_to_int32() -> Callable[..., Tensor]:
    allow_torchvision()
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    return pack_to_int32


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("groups", "symmetric"), [(3, True), (3, False), (1, True)])
def test_a_layer_of_compressed_tensors(bits: int, groups: int, symmetric: bool, pack_to_int32: Callable[..., Tensor]) -> None:
    half = 1 << (bits - 1)
    weight, scale = (codes(N, K, bits=bits) - half).to(torch.int8), scales(N, groups)
    zero = (codes(N, groups, bits=bits) - half).to(torch.int8)
    state = {"weight_packed": pack_to_int32(weight, bits), "weight_scale": scale, "weight_shape": torch.tensor([N, K])}
    if not symmetric:
        state["weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0)
    found = checkpoints.compressed_tensors(state, bits=bits)
    group = K // groups
    wanted = (weight.float() - (0 if symmetric else of_groups(zero.t(), group))) * of_groups(scale.t(), group)
    assert torch.equal(found.dequantized(), wanted) and (found.zero is None) == symmetric


def test_its_columns_by_their_activations(pack_to_int32: Callable[..., Tensor]) -> None:
    groups = torch.randperm(K, generator=torch.Generator().manual_seed(2)) // GROUP
    weight, scale = (codes(N, K) - 8).to(torch.int8), scales(N, 3)
    state = {"weight_packed": pack_to_int32(weight, 4), "weight_scale": scale, "weight_shape": torch.tensor([N, K]), "weight_g_idx": groups}
    assert torch.equal(checkpoints.compressed_tensors(state).dequantized(), weight.float() * scale.float()[:, groups])
    uneven = {**state, "weight_g_idx": torch.cat([groups[:-1], (groups[-1:] + 1) % 3])}
    with pytest.raises(CallError, match=r"the groups of g_idx are of \[31, 32, 33\] columns, where all of 32 are wanted"):
        checkpoints.compressed_tensors(uneven)
    with pytest.raises(CallError, match=r"weight_g_idx has shape \[64\], and the weight 96 columns"):
        checkpoints.compressed_tensors({**state, "weight_g_idx": groups[:64]})
    unused = {**state, "weight_g_idx": torch.full((K,), -1)}  # as it is written where groups are in a row
    assert checkpoints.compressed_tensors(unused).order is None


# -- torchao


def by_torchao(name: str) -> Tensor:
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    layer = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    quantize_(layer, torchao_config(name, GROUP))
    return layer.weight


@pytest.mark.parametrize("name", ["int8", "int8 in groups", "int4", "int4 with zero points", "int4 a row", "fp8", "one for all"])
def test_a_weight_of_torchao(name: str) -> None:
    weight = by_torchao(name)
    found = checkpoints.torchao(weight)
    torch.testing.assert_close(found.dequantized(), weight.dequantize().float(), rtol=2**-8, atol=0)  # theirs is rounded to bf16
    assert found.bits == (4 if "int4" in name else 8) and (found.zero is not None) == (name == "int4 with zero points")


def test_what_torchao_quantises_besides_is_left_to_it() -> None:
    with pytest.raises(CallError, match=r"torchao quantises or scales the layer's input too \(act_quant_kwargs\)"):
        checkpoints.torchao(by_torchao("of activations"))
    with pytest.raises(CallError, match="a weight of the class Parameter cannot be read"):
        checkpoints.torchao(torch.nn.Linear(4, 4).weight)


# -- what does not fit


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gptq", {"qweight": torch.zeros(12, N)}, "packed values are int32, not torch.float32"),
        ("gptq", {"qweight": torch.zeros(12, 8, dtype=torch.int32)}, f"scales have {N} columns and qweight has 8"),
        ("gptq", {"qzeros": torch.zeros(4, 3, dtype=torch.int32)}, rf"qzeros hold \[4, {N}\] zero points for scales of \[3, {N}\]"),
        ("gptq", {"g_idx": torch.zeros(4)}, r"g_idx has shape \[4\], and qweight 96 rows"),
        ("gptq", {"bits": 3}, "values of 4 or 8 bits can be read, not of 3"),
        ("gptq", {"scales": torch.zeros(4)}, r"scales have two dimensions, and \[4\] was found"),
        ("awq", {"bits": 8}, "AWQ packs 4 bits, not 8"),
        ("awq", {"qweight": torch.zeros(K, 8, dtype=torch.int32)}, f"scales have {N} columns and qweight has 64"),
    ],
)
def test_a_shape_that_does_not_follow(name: str, change: dict[str, Any], says: str) -> None:
    of_gptq = {"qweight": packed(codes(K, N), 4, 0), "qzeros": packed(codes(3, N), 4, 1), "scales": scales(3, N)}
    given = {"gptq": of_gptq, "awq": {**of_gptq, "qweight": packed(codes(K, N), 4, 1)}}[name]
    with pytest.raises(CallError, match=says):
        getattr(checkpoints, name)(**{**given, **change})


def test_a_state_that_lacks_something() -> None:
    with pytest.raises(CallError, match="a layer of pack-quantized has weight_scale, weight_shape too, and these were given: weight_packed"):
        checkpoints.compressed_tensors({"weight_packed": torch.zeros(4, 4, dtype=torch.int32)})
    state = {"weight_packed": torch.zeros(4, 4, dtype=torch.int32), "weight_scale": scales(4, 1), "weight_shape": torch.tensor([4, 40])}
    with pytest.raises(CallError, match=r"weight_packed holds \[4, 32\] values, and weight_shape says \[4, 40\]"):
        checkpoints.compressed_tensors(state)
