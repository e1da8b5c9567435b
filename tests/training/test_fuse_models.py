"""`epigen.fuse` on models that people have: it takes every MLP, and the model stays what it was, with adapters put in before and after.

Run as a program it prints the table of docs/models.md about `fuse`.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import warnings
from importlib.metadata import version
from typing import Any

import pytest
import torch
import zoo
from checkout import ROOT
from torch import Tensor, nn

import epigen

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

GATES = ("up_proj", "wi_1", "fc1_x")
"""The second products of gated MLPs: the first one's kernel takes their results."""


def made(name: str) -> zoo.Made:
    if package := zoo.missing(name):
        pytest.skip(f"{package} is not installed")
    return zoo.ZOO[name]()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def called(model: nn.Module, given: zoo.Made) -> tuple[Tensor, list[Tensor | None]]:
    """The first result and all gradients."""
    torch.manual_seed(0)  # for what drops whole layers
    y = zoo.first(model(**given.inputs))
    trained = [p for p in model.parameters() if p.requires_grad]
    return y, list(torch.autograd.grad(zoo.scalar(y), trained, allow_unused=True))


def test_a_decoder_with_a_cache(ran: list[str]) -> None:
    """OPT's layers hold their MLP themselves, and are called with the cache of keys and values, to which they add."""
    if package := zoo.missing("gpt2"):
        pytest.skip(f"{package} is not installed")
    t = zoo._transformers()
    options = {"hidden_size": zoo.WIDTH, "word_embed_proj_dim": zoo.WIDTH, "ffn_dim": zoo.HIDDEN, "vocab_size": zoo.VOCABULARY}
    with zoo.quiet():
        model = t.OPTModel(t.OPTConfig(**options, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)).eval()
    plain = copy.deepcopy(model)
    found = epigen.fuse(model)
    caches: list[Any] = [None, None]
    for seed in range(3):
        tokens = zoo._tokens(seed=seed)
        ran.clear()
        with torch.no_grad():
            results = [m(input_ids=tokens, cache=cache, use_cache=True) for m, cache in zip((model, plain), caches, strict=True)]
        close(results[0].last_hidden_state, results[1].last_hidden_state)
        caches = [r.cache for r in results]
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == (seed + 1) * tokens.shape[1]
        for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            close(ours.keys, theirs.keys)
    assert ran.count("relu(mm + bias)") == 2 and {r.name for r in found.replaced} >= {f"decoder.layers.{i}.fc{n}" for i in range(2) for n in (1, 2)}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_mlp_is_fused_and_the_model_stays_what_it_was(name: str, ran: list[str]) -> None:
    given = made(name)
    model, plain = given.model, copy.deepcopy(given.model)
    state, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    found = epigen.fuse(model)
    assert {r.name for r in found.replaced} >= {layer for layer in given.layers() if not layer.endswith(GATES)}
    assert {x.why for x in found.left if x.name in given.layers()} <= {"the kernel of another layer takes its result, in mul"}
    for mode in (False, True):
        close(called(model.train(mode), given), called(plain.train(mode), given))
    ran.clear()
    with torch.no_grad():
        model(**given.inputs)
    firsts = [
        layer
        for layer in given.layers()
        if layer.endswith(("intermediate.dense", "c_fc", "gate_proj", "gate_up_proj", "fc1", "wi", "Wi", "wi_0", "linear1", ".0", "fc1_g"))
    ]
    assert len(ran) >= len(firsts), "each of them in a kernel, and not in the report alone"
    close(called(copy.deepcopy(model), given), called(plain, given))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for _ in range(3):
        losses = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            torch.manual_seed(0)
            optimizer.zero_grad()
            loss = zoo.scalar(m(**given.inputs))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        close(*losses)
    close(list(model.parameters()), list(plain.parameters()))
    assert list(model.state_dict()) == state and [type(m) for m in model.modules()] == kinds
    epigen.unfuse(model)
    assert not any("forward" in vars(m) for m in model.modules())


WHY = {
    "in parts or heads": r"(view|reshape|split|chunk) follows",
    "nothing follows in its module": r".*nothing follows there",
    "in another layer's kernel": r"the kernel of another layer takes its result",
    "used twice": r"its result is used in",
    "strided": r"a convolution of stride",
    "not called by its module": r".* does not call it",
    "its forward cannot be tried out": r".* cannot be rehearsed",
}
"""What becomes of the results of layers that are left, and how a report begins to say so."""


def row(name: str) -> str:
    """Of docs/models.md: how many of a model's layers are fused, once it has been called, and why the others are left."""
    given = made(name)
    found = epigen.fuse(given.model.eval())
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        given.model(**given.inputs)
    said = [next(short for short, words in WHY.items() if re.match(words, left.why)) for left in found.left]
    counts = [str(said.count(short) or "-") for short in WHY]
    return f"| {name} | {len(found.replaced)} of {len(found.replaced) + len(found.left)} | {' | '.join(counts)} |"


@pytest.mark.parametrize("name", zoo.ZOO)
def test_what_is_fused_is_in_the_documents(name: str) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    for package, documented in re.findall(r"(transformers|timm|torchvision) (\d+\.\d+)", text.partition("## What fuse takes")[2]):
        if not version(package).startswith(f"{documented}."):
            pytest.skip(f"the table is of {package} {documented}, and {version(package)} is installed")
    assert row(name) in text.splitlines()


@pytest.mark.parametrize(("name", "count"), [("torchvision_resnet", 11), ("torchvision_mobilenet", 12), ("timm_convnext_conv", 4)])
def test_convolutions_and_what_follows_them(name: str, count: int, ran: list[str]) -> None:
    """All that no stride sets apart and that something follows; the same plan holds for what it was rehearsed with and for the model's images."""
    given = made(name)
    plain = copy.deepcopy(given.model)
    found = epigen.fuse(given.model)
    assert len(found.replaced) == count, str(found)
    with torch.no_grad():
        close(given.model(**given.inputs), plain(**given.inputs))
    assert len(ran) >= count - 1, "two layers of a head may run as a chain"


@pytest.mark.parametrize("name", zoo.ZOO)
def test_adapters_before_and_after(name: str) -> None:
    """As peft puts them in; merged, and taken out again."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    given = made(name)
    if not given.layers():
        pytest.skip("it has no linear layers in MLPs to adapt")
    after, before, plain = given.model, copy.deepcopy(given.model), copy.deepcopy(given.model)
    epigen.fuse(after)
    after(**given.inputs)
    for model in (after, before, plain):
        adapt(model.train(), given)  # in eval torch's own encoder passes its layers' forwards by, with peft's adapters in them
    epigen.fuse(before)
    expected = called(plain, given)
    close(called(after, given), expected)
    close(called(before, given), expected)
    close(called(before, given), expected)
    with torch.no_grad():
        for model in (after, before, plain):
            for layer in [m for m in model.modules() if hasattr(m, "merge")]:
                layer.merge()
        torch.manual_seed(0)
        merged = zoo.first(plain(**given.inputs))
        for model in (after, before):
            torch.manual_seed(0)
            close(zoo.first(model(**given.inputs)), merged)


def adapt(model: nn.Module, given: zoo.Made) -> None:
    import warnings

    with zoo.quiet():
        zoo.allow_torchvision()  # peft imports transformers, which imports it
        import peft

        warnings.simplefilter("ignore")  # of a layer that lies transposed it says so
        config = peft.LoraConfig(r=2, target_modules=rf".*\b({given.mlps})", init_lora_weights=False)
        torch.manual_seed(1)
        peft.inject_adapter_in_model(config, model)


if __name__ == "__main__":
    print(f"| model | layers fused | {' | '.join(WHY)} |\n|{' --- |' * (2 + len(WHY))}")
    for chosen in zoo.ZOO:
        print(row(chosen), flush=True)
