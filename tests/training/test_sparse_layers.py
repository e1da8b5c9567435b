"""Layers whose weights torch has made 2:4 sparse: `epigen.linear`, its gradients, torch.compile and torch.export of it, and `epigen.fuse` of models with such layers.
Without a GPU torch's products of such weights are stood for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fusing import drawn
from sparse_on_cpu import both_ways, products, pruned, sparse
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from under_torch import APART
from zoo import allow_torchvision, quiet

import epigen
from epigen.errors import CallError
from epigen.runtime import semi_structured

M, N, K = 24, 64, 128


@pytest.fixture(autouse=True)
def libraries() -> Iterator[None]:
    torch.manual_seed(0)
    with products():
        yield


def half(*size: int) -> Tensor:
    return drawn(*size).half()


def made_sparse(model: nn.Module, trains: bool = False) -> nn.Module:
    """The model with the zeros in its linear layers' weights, and itself with torch's tensors of these, as torch's tutorial has it."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(pruned(module.weight.detach()))
    dense = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(sparse(module.weight.detach()), requires_grad=trains)
    return dense


# -- epigen.linear


@pytest.mark.parametrize("epilogue", [None, "gelu(mm + bias)", "z = mm + bias; z, bitmask(z > 0)"])
def test_a_linear_layer_computes_what_its_dense_values_do(epilogue: str | None) -> None:
    x, w, bias = half(2, 12, K), pruned(half(N, K)), half(N)
    found, wanted = (epigen.linear(x, weight, bias, epilogue) for weight in (sparse(w), w))
    assert all(map(torch.equal, found, wanted)) if isinstance(found, tuple) else torch.equal(found, wanted)
    layer = epigen.nn.Linear(K, N, epilogue="relu(mm + bias)", dtype=torch.float16)
    layer.weight = nn.Parameter(sparse(w), requires_grad=False)
    assert torch.equal(layer(x), epigen.linear(x, w, layer.bias, "relu(mm + bias)"))


def test_gradients_flow_through_a_weight_that_is_sparse_both_ways() -> None:
    w = both_ways(half(N, K))
    found, wanted = [], []
    for weight, gradients in ((sparse(w, transposed=True), found), (w, wanted)):
        torch.manual_seed(1)
        x, bias, gate = (t.requires_grad_() for t in (half(M, K), half(N), half(M, N)))
        epigen.linear(x, weight, bias, "gelu(mm + bias) * gate[m,n]", gate=gate).square().sum().backward()
        gradients += [x.grad, bias.grad, gate.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_that_there_are_not_are_refused() -> None:
    x, w, bias = half(M, K), sparse(pruned(half(N, K))), half(N).requires_grad_()
    epigen.linear(x, w, bias, "relu(mm + bias)").sum().backward()  # of the epilogue's inputs there are some
    assert bias.grad is not None
    with pytest.raises(CallError, match="sparse along k alone, by which none is multiplied back"):
        epigen.linear(x.clone().requires_grad_(), w, bias, "relu(mm + bias)")
    with pytest.raises(CallError, match="sparse along k alone"):
        epigen.nn.Chain(layer_of(w), layer_of(sparse(pruned(half(32, N)))))(x)
    with pytest.raises(CallError, match="requires a gradient, which it has not"):
        epigen.linear(x, nn.Parameter(w), bias, "relu(mm + bias)")
    with torch.no_grad():
        epigen.linear(x.clone().requires_grad_(), nn.Parameter(w), bias, "relu(mm + bias)")


def layer_of(weight: Any) -> nn.Module:
    layer = epigen.nn.Linear(weight.shape[1], weight.shape[0], epilogue="relu(mm + bias)", dtype=torch.float16)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def test_what_a_sparse_weight_cannot_be_is_said() -> None:
    x, w = half(M, K), sparse(pruned(half(N, K)))
    with pytest.raises(CallError, match="parts the weight, and a 2:4 sparse one has no parts"):
        epigen.linear(x, w, epilogue="g, u = halves(mm); silu(g) * u")
    with pytest.raises(CallError, match=r"autocast computes in torch\.bfloat16"), torch.autocast("cpu", torch.bfloat16):
        epigen.linear(x, w)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(epigen.linear(x.float(), w), epigen.linear(x, w))
    dense = nn.Linear(K, N, dtype=torch.float16)
    dense.weight = nn.Parameter(w, requires_grad=False)
    for refused in (
        lambda: epigen.nn.QuantizedLinear.from_linear(dense),
        lambda: epigen.nn.Float8Linear.from_linear(dense),
        lambda: epigen.linear_cross_entropy(x, w, torch.zeros(M, dtype=torch.int64)),
        lambda: epigen.nn.GatedMLP.from_layers(dense, dense, nn.Linear(N, K, dtype=torch.float16))(x),
        lambda: torch.vmap(lambda x: epigen.linear(x, w))(x[None]),
    ):
        with pytest.raises(CallError, match="is 2:4 sparse, which here nothing can be: pass its dense values"):
            refused()
    with pytest.raises(CallError, match="an input is 2:4 sparse"):
        torch.ops.epigen.program("mm + other[m,n]", None, x, half(K, N), [sparse(pruned(half(M + 8, N)))], [])


# -- under torch's compiler


@APART
@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's own compiler and export, which call what they say to leave
def test_torch_compiles_and_exports_calls_of_sparse_operands() -> None:
    x, w, bias = half(M, K), pruned(half(N, K)), half(N)
    kernel, s = epigen.compile("relu(mm + bias)"), sparse(w)
    wanted = kernel(x, w.t(), bias=bias)
    out = torch.empty_like(wanted)

    def called(x: Tensor, s: Any, bias: Tensor) -> Tensor:
        kernel(x, s.t(), bias=bias, out=out)
        return kernel(x, s.t(), bias=bias) + 1

    out.zero_()
    assert torch.equal(torch.compile(called, backend="aot_eager", fullgraph=True)(x, s, bias), wanted + 1) and torch.equal(out, wanted)
    layer = layer_of(s)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))
    exported = torch.export.export(layer, (x,))
    assert torch.equal(exported.module()(x), layer(x))
    written_out = exported.run_decompositions(epigen.decompositions())
    assert [str(node.target) for node in written_out.graph.nodes if "epigen" in str(node.target)] == ["epigen.of_sparse.default"]
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted:
        kernel(x, s.t(), bias=bias)
    assert counted.get_total_flops() == 2 * M * N * K


@APART
@pytest.mark.triton
def test_torchs_own_operations_write_out_a_call_of_a_sparse_operand() -> None:
    """What a machine without epigen's kernels computes of a program that was exported for it."""
    from epigen.training import composed, library

    x, w, bias = half(M, K), pruned(half(N, K)), half(N)
    held = semi_structured.Compressed.of(sparse(w).t(), True)
    assert held is not None
    for text, inputs in (("relu(mm + bias)", [bias]), ("mm", []), ("cast(mm * 2, fp32)", [])):
        (found,) = composed._of_sparse(text, None, "b", x, held.packed, held.meta, held.numbers, inputs, [])
        (wanted,) = library.run(text, None, x, w.t(), inputs)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


# -- epigen.fuse


class Gated(nn.Module):
    def __init__(self, width: int = 128):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, 256), nn.Linear(width, 256), nn.Linear(256, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) + x


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(128, 256), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return torch.tanh(self.down(F.silu(gate) * up))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "as the tutorial has it"])
def test_a_model_with_sparse_weights_is_fused_with_what_follows_them(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), Gated(), Halved()).half().eval()
    dense, x = made_sparse(model, trains), half(2, 12, K)
    before = dict(model.state_dict())
    said = str(epigen.fuse(model))
    assert "gelu(mm + bias), with gelu" in said and "silu(mm + bias) * x0[m,n], with silu, mul" in said and "mm + bias + x0[m,n], with add" in said
    assert "tanh(mm + bias), with tanh" in said
    assert "4.both  left: chunk follows, which no epilogue computes: a product by a 2:4 sparse weight has no parts" in said
    assert "2       left" in said  # torch adds its bias within the product
    after = model.state_dict()
    assert list(after) == list(before) and all(after[name] is before[name] or type(after[name]) is type(before[name]) for name in before)
    with torch.no_grad():
        wanted = dense(x)
        for _ in range(3):
            close(model(x), wanted)
        hooked = model[0].register_forward_hook(lambda _module, _args, result: result + 1)
        close(model(x), dense[1:](dense[0](x) + 1))
        hooked.remove()
        epigen.unfuse(model)
        close(model(x), wanted)


def test_where_a_gradient_is_wanted_torch_itself_runs() -> None:
    """Of a weight that asks for one, and of an input that has one: torch says of these what it has to say."""
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU()).half()
    dense, x = made_sparse(model, True), half(M, K)
    epigen.fuse(model)
    close(model(x), dense(x))
    assert model(x).requires_grad


def test_layers_of_torchaos_own_sparse_classes_are_left_and_say_why() -> None:
    module = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_sparse_2x4_2d_data_2d_metadata_tensor")
    kind = next(value for name, value in vars(module).items() if name.startswith("Float8Sparse2x4"))
    layer = nn.Linear(128, 64, dtype=torch.bfloat16)
    values = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(kind(values, torch.zeros(64, 16, dtype=torch.uint8), torch.ones(64, 1), [1, 128], None, torch.bfloat16), requires_grad=False)
    (left,) = epigen.fuse(nn.Sequential(layer, nn.ReLU())).left
    assert kind.__name__ in left.why


def test_a_layer_of_llama_is_fused_where_its_weights_are_sparse() -> None:
    allow_torchvision()
    with quiet():
        from transformers import LlamaConfig, LlamaModel

    settings = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    model = LlamaModel(settings).half().eval()
    dense, ids = made_sparse(model), torch.randint(32, (2, 8))
    said = epigen.fuse(model)
    assert [each.name for each in said.replaced] == ["layers.0.mlp.gate_proj"]
    with torch.no_grad():
        for _ in range(2):
            close(model(ids).last_hidden_state, dense(ids).last_hidden_state)
