"""Models of transformers with experts: what `epigen.fuse` takes of them, and the same by `experts_implementation="epigen"`."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import zoo
from expert_models import MODELS, experts_of, made
from torch import Tensor, nn

import epigen
from epigen.errors import CallError
from epigen.training.expert_modules import program

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def called(model: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    """The logits and all gradients."""
    y = zoo.first(model(input_ids=zoo._tokens()))
    trained = [p for p in model.parameters() if p.requires_grad]
    return y, list(torch.autograd.grad(zoo.scalar(y), trained, allow_unused=True))


def eager(model: nn.Module) -> nn.Module:
    """transformers' own loop."""
    plain: Any = copy.deepcopy(model)
    plain.set_experts_implementation("eager")
    return plain  # type: ignore[no-any-return]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_experts_are_fused_and_the_model_stays_what_it_was(name: str, ran: list[str]) -> None:
    *_, share, text = MODELS[name]
    model = made(name)
    plain, state, kinds = eager(model), list(model.state_dict()), [type(m) for m in model.modules()]
    found = epigen.fuse(model)
    own = experts_of(model)
    assert {r.name: r.epilogue for r in found.replaced if r.name in own} == dict.fromkeys(own, text)
    assert re.search(r"layers fused \((\d+) % of FLOPs\)", str(found)).group(1) == str(share)  # type: ignore[union-attr]
    ran.clear()
    wanted = called(plain)
    for _ in range(2):
        close(called(model), wanted)
    assert sum("dscore" in text for text in ran) == 2 * len(own), "each of them in kernels, and not in the report alone"
    close(called(copy.deepcopy(model)), wanted)
    assert list(model.state_dict()) == state and [type(m) for m in model.modules()] == kinds
    epigen.unfuse(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_the_implementation_of_that_name(name: str, ran: list[str]) -> None:
    model: Any = made(name)
    wanted = called(eager(model))
    model.set_experts_implementation("epigen")
    close(called(model), wanted)
    assert sum("dscore" in text for text in ran) == len(experts_of(model))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own of autograd functions that it compiles
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("backend", ["aot_eager", "epigen"])
def test_compiled_in_one_piece(name: str, backend: str) -> None:
    model = made(name, num_hidden_layers=1)
    wanted = called(eager(model))
    epigen.fuse(model)
    torch._dynamo.reset()
    with zoo.quiet():
        close(called(torch.compile(model, backend=backend, fullgraph=True)), wanted)  # type: ignore[arg-type]


def test_hooks_and_parametrised_weights() -> None:
    """What an adapter of the experts' weights does: the weights are computed anew at each call."""
    model = made("mixtral", num_hidden_layers=1)
    seen: list[int] = []

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    def adapted(m: nn.Module) -> nn.Module:
        (module,) = experts_of(m).values()
        nn.utils.parametrize.register_parametrization(module, "down_proj", Doubled())
        module.register_forward_hook(lambda *_: seen.append(1))
        return m

    wanted = called(adapted(eager(model)))
    before = epigen.fuse(model)
    assert before.replaced
    close(called(adapted(model)), wanted)
    after = adapted(made("mixtral", num_hidden_layers=1))
    assert "experts" in epigen.fuse(after).replaced[0].name
    close(called(after), wanted)
    assert len(seen) == 3


def test_adapters_of_peft(ran: list[str]) -> None:
    """LoRA of the experts' own weights, which peft computes within its wrapper: put in before and after."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"], init_lora_weights=False)

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        with zoo.quiet():
            return peft.inject_adapter_in_model(config, model)  # type: ignore[no-any-return]

    model = made("mixtral", num_hidden_layers=1)
    wanted, before = called(adapted(eager(model))), adapted(copy.deepcopy(model))
    epigen.fuse(model)
    epigen.fuse(before)
    for each in (adapted(model), before):
        ran.clear()
        close(called(each), wanted)
        assert any("dscore" in text for text in ran)


@pytest.mark.parametrize("routing", ["elsewhere", "skewed", "one token"])
def test_a_module_of_experts_alone(routing: str) -> None:
    """With experts that are on other processes, whose number is past those that are here, as in expert parallelism."""
    model = eager(made("mixtral", num_hidden_layers=1))
    (plain,) = experts_of(model).values()
    fused = copy.deepcopy(plain)
    (layer,) = epigen.fuse(nn.ModuleDict({"experts": fused})).replaced
    assert layer.name == "experts"
    index = {
        "elsewhere": torch.tensor([[0, 4], [4, 2], [4, 4], [1, 0]]),
        "skewed": torch.tensor([[2, 1]] * 7),
        "one token": torch.tensor([[3, 0]]),
    }[routing]
    fused._is_expert_parallel = routing == "elsewhere"  # type: ignore[assignment]
    results = []
    for module in (fused, plain):
        torch.manual_seed(3)
        x, scores = torch.randn(len(index), zoo.WIDTH, requires_grad=True), torch.rand(index.shape, requires_grad=True)
        y = module(x, index, scores)
        results.append((y, torch.autograd.grad(zoo.scalar(y), [x, scores, *module.parameters()])))
    close(*results)


def test_what_is_left() -> None:
    model = made("mixtral", num_hidden_layers=1)
    (module,) = experts_of(model).values()
    only = epigen.fuse(model, only="*.self_attn")
    assert "is not in only" in next(left.why for left in only.left if left.name.endswith("experts"))
    own: Any = module
    own.act_fn = nn.Softmax(-1)
    found = epigen.fuse(model)
    assert "which no epilogue computes" in next(left.why for left in found.left if left.name.endswith("experts"))
    own.has_post_expert_norm = True
    with pytest.raises(CallError, match="a norm follows each expert"):
        program(module)
    chosen: Any = model
    chosen.set_experts_implementation("epigen")
    with pytest.raises(CallError, match="choose another experts_implementation, such as 'grouped_mm'"):
        called(model)


def test_a_mixture_has_the_state_of_mixtrals_block() -> None:
    model = eager(made("mixtral", num_hidden_layers=1))
    block = next(m for m in model.modules() if type(m).__name__ == "MixtralSparseMoeBlock")
    ours = epigen.nn.MoE(zoo.WIDTH, zoo.HIDDEN, 4, 2)
    ours.load_state_dict(block.state_dict())
    x = torch.randn(2, 5, zoo.WIDTH)
    close(ours(x), block(x))
