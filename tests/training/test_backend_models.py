"""Models that people have under `torch.compile(model, backend=backend)`: outputs, gradients and training steps are eager's, and of the products nearly all are
taken that something elementwise follows.

Run as a program it prints the table of docs/models.md, for all models or those named.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zoo
from beside_eager import agreeing, compiled, gradients, made
from under_torch import APART

from epigen.training.elements import CHANNELS_LAST
from epigen.training.report import Seen

pytestmark = [APART, pytest.mark.filterwarnings("ignore")]  # of the packages that the models come from

SHARE = 0.95
"""Of the products that something elementwise follows, but for those of which the kernel that comes next does all that."""


@dataclass
class Taken:
    """What became of a model's products. absorbed: they are left, since the next kernel does what follows them as well."""

    seen: list[Seen]

    @property
    def neighbours(self) -> list[Seen]:
        return [s for s in self.seen if s.neighbour]

    @property
    def absorbed(self) -> list[Seen]:
        return [s for s in self.seen if s.absorbed]

    def taken(self, graph: str) -> int:
        return sum(s.taken and s.graph == graph for s in self.seen)

    @property
    def share(self) -> float:
        own = len(self.neighbours) - len(self.absorbed)
        return sum(s.taken for s in self.seen) / own if own else 1.0


STACKED = {
    "Phi3Model": ({"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}, "dot(a, x0[k,n]) * silu(mm)"),
    "GlmModel": ({"num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2}, "dot(a, x0[k,n]) * silu(mm)"),
    "Glm4Model": ({"num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2}, "dot(a, x0[k,n]) * silu(mm)"),
    "ModernBertModel": ({"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}, "gelu(mm) * dot(a, x0[k,n])"),
}


@pytest.mark.skipif(bool(zoo.missing("llama")), reason="transformers is not installed")
@pytest.mark.parametrize("name", STACKED)
def test_stacked_gates_are_one_kernel(name: str) -> None:
    """Of a weight whose halves are gate and up, as they lie; with gradients the backward is given both parts."""
    zoo.allow_torchvision()
    transformers: Any = pytest.importorskip("transformers")
    more, program = STACKED[name]
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    model = getattr(transformers, name)(getattr(transformers, name.replace("Model", "Config"))(**sizes, **more)).eval()
    seen: list[Seen] = []
    call = compiled(model, seen)
    given = {"input_ids": torch.arange(12).reshape(2, 6) % 61}
    with torch.no_grad():
        torch.testing.assert_close(call(**given)[0], model(**given)[0], rtol=1e-4, atol=1e-4)
    assert sum(s.program == program for s in seen) == 4, [(s.program, s.why) for s in seen]
    found, expected = (torch.autograd.grad(run(**given)[0].square().sum(), list(model.parameters()), allow_unused=True) for run in (call, model))
    torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None], rtol=1e-3, atol=1e-3)
    assert sum("dot(a, x0[k,n])" in s.program for s in seen if s.graph == "forward") == 4, [(s.graph, s.program, s.why) for s in seen]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_model_is_eagers(name: str) -> None:
    """Its loss and its gradients, three steps of training, and how many of its products are taken."""
    model = made(name)
    call, seen = agreeing(model)
    result = Taken(seen)
    assert result.neighbours and result.share >= SHARE, Counter(s.why for s in result.neighbours if not s.taken and not s.absorbed)
    assert all(s.why for s in seen if not s.taken)
    again = made(name)
    assert trained(call, model) == pytest.approx(trained(again.model, again), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("memory", "training"), [(torch.channels_last, True), (torch.contiguous_format, False)])
def test_convolutions_in_training_and_in_other_memory(memory: torch.memory_format, training: bool) -> None:
    """Norms over the batch stay torch's, and convolutions whose channels do not lie side by side."""
    made_ = made("torchvision_resnet")
    model, x = made_.model.to(memory_format=memory).train(training), made_.inputs["x"].contiguous(memory_format=memory).requires_grad_()
    seen: list[Seen] = []
    results = []
    for call in (model, compiled(model, seen)):
        x.grad = None
        loss, found = gradients(call, model, {"x": x})
        assert x.grad is not None
        results.append([loss, x.grad, *found.values()])
    found, expected = results[::-1]
    largest = max(t.norm().item() for t in expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * largest)
    assert [t.is_contiguous(memory_format=memory) for t in found if t.dim() == 4] == [True] * len([t for t in expected if t.dim() == 4])
    products = [s for s in seen if not s.why.startswith("a convolution")]
    assert {s.why for s in products if s.shape[0] == 512} <= {CHANNELS_LAST} if memory == torch.contiguous_format else any(s.taken for s in products)


def trained(call: Any, model: zoo.Made) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.model.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = zoo.scalar(call(**model.inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


HEAD = "model | products | with an elementwise neighbour | of these in the next kernel | taken forward | taken backward | others left"


def row(name: str) -> str:
    """How many products a model has, what became of them, and why those are left that something elementwise follows."""
    seen: list[Seen] = []
    with zoo.quiet():
        model = zoo.ZOO[name]()
    gradients(compiled(model.model, seen), model.model, model.inputs)
    result = Taken(seen)
    left = Counter(s.why for s in result.neighbours if not s.taken and not s.absorbed)
    why = "; ".join(f"{count}: {reason}" for reason, count in left.items()) or "0"
    counts = (len(seen), len(result.neighbours), len(result.absorbed), result.taken("forward"), result.taken("backward"))
    return f"| {name} | {' | '.join(map(str, counts))} | {why} |"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(f"| {HEAD} |\n|{' --- |' * len(HEAD.split('|'))}")
    for chosen in sys.argv[1:] or [name for name in zoo.ZOO if not zoo.missing(name)]:
        print(row(chosen), flush=True)
