"""`epigen.linear_cross_entropy` against torch's own loss of all logits in float64: values, gradients, what is refused, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import epigen
from epigen.errors import CallError
from epigen.training import cross_entropy

M, N, K = 14, 50, 12
ONCE = 16
"""Columns at a time here: four parts, of which the last is not whole."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "smoothed": {"label_smoothing": 0.1}, "scaled": {"logit_scale": 0.5}, "capped": {"softcap": 5.0}, "z": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.2, "softcap": 4.0, "logit_scale": 1.5, "z_loss": 0.03},
}  # fmt: skip
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "LEAST_COLUMNS", ONCE)


def drawn(dtype: torch.dtype = torch.float32, bias: bool = True, m: int = M, n: int = N, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, weight, target, of which two rows are ignored, and bias."""
    g = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*size, generator=g).to(device, dtype).requires_grad_() for size in ((m, K), (n, K), (n,)))
    target = torch.randint(0, n, (m,), generator=g)
    target[3 % m] = target[7 % m] = -100
    return x, weight, target.to(device), b if bias else None


def exact(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
    softcap: float | None = None, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    z = functional.linear(x, weight, bias) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    losses = functional.cross_entropy(z, target.long(), reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * torch.logsumexp(z, -1) ** 2 * (target != -100)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / (target != -100).sum()}[reduction]


def doubled(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def agree(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None and expected is not None and found.shape == expected.shape
    assert (found.double() - expected).norm() <= CLOSE[dtype] * expected.norm() + 1e-12, (found, expected)


def compare(dtype: torch.dtype, bias: bool, reduction: str, options: dict[str, Any], keep_logits: bool = False, **sizes: Any) -> None:
    x, weight, target, b = drawn(dtype, bias, **sizes)
    ours = epigen.linear_cross_entropy(x, weight, target, b, reduction=reduction, keep_logits=keep_logits, **options)
    of_x, of_weight, of_b = doubled(x, weight, b)
    assert of_x is not None and of_weight is not None
    theirs = exact(of_x, of_weight, target, of_b, reduction=reduction, **options)
    gradient = torch.linspace(0.5, 2, theirs.numel(), dtype=torch.float64, device=theirs.device).reshape(theirs.shape)
    ours.backward(gradient.to(ours.dtype))  # type: ignore[no-untyped-call]
    theirs.backward(gradient)  # type: ignore[no-untyped-call]
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    agree(ours.detach(), theirs.detach(), dtype)
    for t, of in zip((x, weight, b), (of_x, of_weight, of_b), strict=True):
        if t is not None and of is not None:
            assert t.grad is not None and t.grad.dtype == dtype
            agree(t.grad, of.grad, dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("bias", "reduction", "keep_logits"), [(False, "mean", False), (True, "none", True), (True, "sum", False), (False, "none", False)])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_values_and_gradients_are_those_of_all_logits(dtype: torch.dtype, bias: bool, reduction: str, keep_logits: bool, options: dict[str, Any]) -> None:
    compare(dtype, bias, reduction, options, keep_logits)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "keep_logits"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False), (torch.float16, False)])
def test_a_gpu_computes_the_same(dtype: torch.dtype, keep_logits: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LEAST_COLUMNS", 512)
    compare(dtype, True, "mean", options, keep_logits, m=300, n=1511, device="cuda")


def test_leading_dimensions_and_small_integers() -> None:
    x, weight, target, b = drawn()
    whole = epigen.linear_cross_entropy(x, weight, target, b, reduction="none")
    parts = epigen.linear_cross_entropy(x.view(2, 7, K), weight, target.view(2, 7).int(), b, reduction="none")
    assert parts.shape == (2, 7) and torch.equal(parts.flatten(), whole)
    assert torch.equal(epigen.linear_cross_entropy(x[0], weight, target[0]), epigen.linear_cross_entropy(x[:1], weight, target[:1]))


def test_gradients_by_finite_differences() -> None:
    x, weight, target, b = drawn(torch.float64, m=5, n=20)
    assert torch.autograd.gradcheck(lambda x, w, b: epigen.linear_cross_entropy(x, w, target, b, **OPTIONS["all"]), (x, weight, b))


@pytest.mark.parametrize("frozen", [(True, False, False), (False, True, False), (False, False, True), (True, True, False), (False, True, True)])
def test_only_what_is_wanted_is_computed(frozen: tuple[bool, bool, bool]) -> None:
    x, weight, target, b = drawn()
    assert b is not None
    every = torch.autograd.grad(epigen.linear_cross_entropy(x, weight, target, b), (x, weight, b))
    given = [t.detach().requires_grad_(not still) for t, still in zip((x, weight, b), frozen, strict=True)]
    epigen.linear_cross_entropy(given[0], given[1], target, given[2]).backward()  # type: ignore[no-untyped-call]
    for t, still, expected in zip(given, frozen, every, strict=True):
        assert (t.grad is None) == still
        if t.grad is not None:
            torch.testing.assert_close(t.grad, expected)


def test_a_mean_over_thousands_of_rows_in_fp16() -> None:
    """What it makes of a probability lies below fp16's numbers: it is multiplied in where there is room."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=g).half().requires_grad_() for size in ((20000, 8), (40, 8)))
    target = torch.randint(0, 40, (20000,), generator=g)
    epigen.linear_cross_entropy(x, weight, target).backward()  # type: ignore[no-untyped-call]
    of_x, of_weight = doubled(x, weight)
    assert of_x is not None and of_weight is not None
    exact(of_x, of_weight, target, None).backward()  # type: ignore[no-untyped-call]
    agree(weight.grad, of_weight.grad, torch.float16)
    assert x.grad is not None and of_x.grad is not None
    assert ((x.grad.double() - of_x.grad).abs() < 6e-8 + of_x.grad.abs() * 5e-3).all(), "fp16's least number, and its rounding"


def test_rows_that_are_ignored_count_for_nothing_whatever_they_hold() -> None:
    x, weight, target, b = drawn()
    with torch.no_grad():
        x[3], x[7] = torch.inf, torch.nan
    ours = epigen.linear_cross_entropy(x, weight.detach(), target, b)
    (found,) = torch.autograd.grad(ours, (x,))
    assert ours.isfinite() and (found[[3, 7]] == 0).all() and found.isfinite().all()
    every = epigen.linear_cross_entropy(x.detach(), weight, torch.full((M,), -100))
    assert every.isnan(), "a mean over none, as torch has it"
    assert epigen.linear_cross_entropy(x.detach()[:2], weight, target[:2], ignore_index=int(target[0]), reduction="none")[0] == 0


def test_no_rows() -> None:
    x, weight, target, _ = drawn()
    total = epigen.linear_cross_entropy(x[:0], weight, target[:0], reduction="sum")
    total.backward()  # type: ignore[no-untyped-call]
    assert total == 0 and weight.grad is not None and (weight.grad == 0).all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own of autograd functions that it compiles
@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_takes_it_whole(dynamic: bool, keep_logits: bool) -> None:
    loss: Callable[..., Tensor] = lambda x, w, t, b: epigen.linear_cross_entropy(x, w, t, b, softcap=9.0, keep_logits=keep_logits) * 2  # noqa: E731
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for m in (M, 9):
        x, weight, target, b = drawn(m=m)
        assert b is not None
        expected = torch.autograd.grad(loss(x, weight, target, b), (x, weight, b))
        torch.testing.assert_close(torch.autograd.grad(compiled(x, weight, target, b), (x, weight, b)), expected)


def test_torch_export_writes_it_down() -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(K, N, bias=False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return epigen.linear_cross_entropy(x, self.head.weight, target)

    x, _, target, _ = drawn()
    module = Last()
    program = torch.export.export(module, (x.detach(), target))
    torch.testing.assert_close(program.module()(x.detach(), target), module(x, target).detach(), check_stride=False)


def test_torch_func_and_autocast() -> None:
    x, weight, target, b = (None if t is None else t.detach() for t in drawn())
    assert x is not None and weight is not None and target is not None and b is not None
    ours = torch.func.grad(lambda w: epigen.linear_cross_entropy(x, w, target, b, **OPTIONS["all"]))(weight)
    torch.testing.assert_close(ours, torch.func.grad(lambda w: exact(x, w, target, b, **OPTIONS["all"]))(weight))
    found = torch.func.vmap(lambda x, t: epigen.linear_cross_entropy(x, weight, t, reduction="none"))(x.view(2, 7, K), target.view(2, 7))
    torch.testing.assert_close(found.flatten(), exact(x, weight, target, None, reduction="none"))
    with torch.autocast("cpu", torch.bfloat16):
        halved = epigen.linear_cross_entropy(x, weight, target)
    assert halved.dtype == torch.float32
    torch.testing.assert_close(halved, epigen.linear_cross_entropy(x.bfloat16(), weight.bfloat16(), target))


def test_there_is_no_second_derivative() -> None:
    x, weight, target, _ = drawn()
    with pytest.raises(CallError, match="no second derivative"):
        torch.autograd.grad(epigen.linear_cross_entropy(x, weight, target), (x,), create_graph=True)


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_products_are_counted() -> None:
    x, weight, target, _ = drawn()
    product = 2 * M * N * K
    for keep_logits, count in ((False, 4), (True, 3)):
        run = lambda keep_logits=keep_logits: epigen.linear_cross_entropy(x, weight, target, keep_logits=keep_logits)  # type: ignore[misc]  # noqa: E731
        assert flops(run) == product and flops(lambda run=run: run().backward()) == count * product  # type: ignore[misc]


def test_how_many_columns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cross_entropy.columns_at_once(8192, 131072, 2) == 8192
    for m in (1, 100, 8192, 100_000):
        for n in (5, 50257, 256000):
            columns = cross_entropy.columns_at_once(m, n, 2)
            assert columns == n or (columns % 256 == 0 and columns >= cross_entropy.LEAST_COLUMNS)
            assert columns <= cross_entropy.LEAST_COLUMNS or m * columns * 2 <= cross_entropy.WORKSPACE_BYTES


def test_what_does_not_fit_is_refused() -> None:
    x, weight, target, b = drawn()
    outside = target.clone()
    outside[5] = N
    with pytest.raises(IndexError, match=f"Target {N} is out of bounds"):
        epigen.linear_cross_entropy(x, weight, outside)
    with pytest.raises(IndexError, match=f"Target {N} is out of bounds"):
        functional.cross_entropy(functional.linear(x, weight), outside)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: epigen.linear_cross_entropy(x, weight, target, reduction="avg"), "unknown reduction"),
        (lambda: epigen.linear_cross_entropy(x, weight[:, 1:], target), r"x is \[14, 12\] and weight is \[50, 11\]"),
        (lambda: epigen.linear_cross_entropy(x, weight, target[1:]), "one number a row"),
        (lambda: epigen.linear_cross_entropy(x, weight, torch.rand(M, N)), "a probability for each class"),
        (lambda: epigen.linear_cross_entropy(x, weight, target.float()), "the numbers of classes were expected"),
        (lambda: epigen.linear_cross_entropy(x, weight, target, b[1:] if b is not None else None), r"bias is \[49\]"),
        (lambda: epigen.linear_cross_entropy(x, weight[:0], target), "no class"),
        (lambda: epigen.linear_cross_entropy(x, weight.double(), target), "both need the same dtype"),
        (lambda: epigen.linear_cross_entropy(x, weight, target, label_smoothing=1.5), "label_smoothing=1.5"),
        (lambda: epigen.linear_cross_entropy(x, weight, target, softcap=0.0), "softcap=0.0"),
        (lambda: epigen.linear_cross_entropy(x, weight, target, z_loss=float("nan")), "z_loss=nan"),
        (lambda: epigen.linear_cross_entropy(x, weight, 3), "target is a int"),  # type: ignore[arg-type]
        (lambda: epigen.linear_cross_entropy(x, weight, target.to("meta")), "target on meta"),
    ]
    for call, message in refused:
        with pytest.raises(CallError, match=message):
            call()


@pytest.mark.skipif(bool(zoo.missing("llama")), reason="transformers is not installed")
def test_the_loss_of_a_language_model() -> None:
    """Of a small Llama, whose own loss has logits of all tokens: the same, with the same gradients of all parameters."""
    zoo.allow_torchvision()
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(24).reshape(2, 12) % 61
    labels = ids.clone()
    labels[0, :4] = -100
    theirs = model(input_ids=ids, labels=labels).loss
    expected = torch.autograd.grad(theirs, list(model.parameters()))
    hidden = model.model(input_ids=ids).last_hidden_state
    ours = epigen.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, labels[:, 1:])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, list(model.parameters())), expected, rtol=1e-4, atol=1e-6)
