"""Who takes a training step: one multilayer perceptron as epigen, eager torch, torch.compile and nvmath-python's epilogues have it.

All layers are of one width, in one dtype, with equal parameters. A step is forward and backward, from a given gradient of the result to those
of all parameters, the input's apart: a loss and an optimizer would be the same operations for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import epigen
from bench import peers
from bench.peers import COMPILE_MODE, COMPILED, EAGER, OURS, Missing

NVMATH = "nvmath"
"""As results name it: cuBLASLt as peers has it is one product, this a network."""

PRODUCTS = "products alone"
"""Not a contender: what no epilogue could spare."""

LAYERS = 4
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


def plain(sizes: Sequence[int], activation: str = "relu", **options: Any) -> nn.Sequential:
    """`epigen.nn.MLP` as torch alone writes it. After the same seed it has the same parameters. options: of torch.nn.Linear."""
    found: list[nn.Module] = []
    for k, n in itertools.pairwise(sizes):
        found += [nn.Linear(k, n, **options), ACTIVATIONS[activation]()]
    return nn.Sequential(*found[:-1])


@dataclass(frozen=True, slots=True)
class Task:
    """x, gradient: [batch, width], random. seed: of the parameters."""

    x: Tensor
    gradient: Tensor
    activation: str = "relu"
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        return [self.x.shape[1]] * (LAYERS + 1)

    def plain(self, dtype: torch.dtype | None = None) -> nn.Sequential:
        """dtype: to which the parameters are then converted."""
        torch.manual_seed(self.seed)
        return plain(self.sizes, self.activation, device=self.x.device, dtype=self.x.dtype).to(dtype)

    def ours(self, save: str | None = None) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return epigen.nn.MLP(self.sizes, self.activation, save=save, device=self.x.device, dtype=self.x.dtype)


def task(width: int, batch: int, activation: str = "relu", on: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Task:
    drawing = torch.Generator(on).manual_seed(1)
    x, gradient = (torch.randn(batch, width, generator=drawing, device=on).to(dtype) for _ in range(2))
    return Task(x, gradient, activation)


@dataclass(frozen=True, slots=True)
class Network:
    """forward: to whatever the backward needs. backward: of that, to the gradients of weight and bias, layer by layer. note: for the record.

    close: gives back what it holds.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], list[Tensor]]
    note: str = ""
    close: Callable[[], object] = lambda: None

    def step(self) -> list[Tensor]:
        return self.backward(self.forward())


def of_module(module: nn.Module, x: Tensor, gradient: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> Network:
    """call: what is called in the module's place, such as what torch.compile made of it."""
    parameters = list(module.parameters())

    def backward(y: Tensor) -> list[Tensor]:
        y.backward(gradient)
        found = [p.grad for p in parameters]
        module.zero_grad()
        return found  # type: ignore[return-value]

    return Network(lambda: (call or module)(x), backward)


def eager(t: Task) -> Network:
    return of_module(t.plain(), t.x, t.gradient)


def ours(t: Task, save: str | None = None) -> Network:
    return of_module(t.ours(save), t.x, t.gradient)


def compiled(t: Task) -> Network:
    """Static shapes; everything compiled before is forgotten."""
    torch._dynamo.reset()
    module = t.plain()
    made = of_module(module, t.x, t.gradient, torch.compile(module, mode=COMPILE_MODE, dynamic=False, fullgraph=True))
    made.step()  # compiles; what goes wrong belongs to the making
    return Network(made.forward, made.backward, COMPILE_MODE)


def exact(t: Task) -> Network:
    """In fp32 throughout, from the same parameters: what rounding in the task's dtype is measured against."""
    return of_module(t.plain(torch.float32), t.x.float(), t.gradient.float())


def products(t: Task) -> Callable[[], list[Tensor]]:
    """The products of a step by torch.mm, of the operands that eager torch's step has, and nothing else of it: activations, derivatives and sums take no time."""
    module, inputs, weights, gradients = t.plain(), list[Tensor](), list[Tensor](), list[Tensor]()
    y = t.x
    for m in module:
        x, y = y, m(y)
        if isinstance(m, nn.Linear):
            inputs.append(x.detach())
            weights.append(m.weight.detach())
            y.register_hook(gradients.append)  # the last layer's first
    y.backward(t.gradient)

    def run() -> list[Tensor]:
        """Each layer's result, its weight's gradient and, but for the first, its input's."""
        found = [torch.mm(x, w.T) for x, w in zip(inputs, weights, strict=True)]
        for x, w, dz in zip(inputs[::-1], weights[::-1], gradients, strict=True):
            found.append(torch.mm(dz.T, x))
            if x is not inputs[0]:
                found.append(torch.mm(dz, w))
        return found

    return run


class _Product:
    """One of nvmath's stateful products (nvmath-python 1.0), planned and autotuned for its first operands, and called with others like them.

    Once its operands are released, as they are between calls, it wants all of them again, the epilog's inputs as well.
    """

    def __init__(self, a: Tensor, b: Tensor, epilog: Any = None, inputs: dict[str, Tensor] | None = None):
        from nvmath.linalg.advanced import Matmul

        self.call = Matmul(a, b)
        try:
            self.call.plan(**({"epilog": epilog, "epilog_inputs": inputs} if epilog is not None else {}))
            self.call.autotune(iterations=peers.AUTOTUNED)
            self.call.release_operands()
        except BaseException:
            self.call.free()
            raise

    def __call__(self, a: Tensor, b: Tensor, inputs: dict[str, Tensor] | None = None) -> Any:
        self.call.reset_operands(a=a, b=b, epilog_inputs=inputs)
        result = self.call.execute()
        self.call.release_operands()  # else it would keep them alive
        return result


def nvmath(t: Task) -> Network:
    """As nvmath's own example trains: RELU_AUX_BIAS forward, DRELU_BGRAD backward, plain products for the weights' gradients.

    All compute the transposes, as in y^T = relu(W x^T + b). Layers of one width share their plans.
    """
    try:
        from nvmath.linalg.advanced import MatmulEpilog
    except ImportError as error:
        raise Missing(f"nvmath-python cannot be imported: {error}") from None
    if t.activation != "relu":
        raise Missing("DRELU_BGRAD is of relu alone")
    layers = [(m.weight.detach(), m.bias.detach()[:, None]) for m in t.plain() if isinstance(m, nn.Linear)]
    (weight, bias), x, g = layers[0], t.x, t.gradient
    made: dict[str, _Product] = {}

    def close() -> None:
        for product in made.values():
            product.call.free()

    def forward() -> list[Tensor]:
        """Each layer's operand, and its mask after it; the result at the end."""
        kept, y = [], x
        for w, b in layers[:-1]:
            kept.append(y)
            transposed, aux = made["hidden"](w, y.T, {"bias": b})
            y = transposed.T
            kept.append(aux["relu_aux"])
        return [*kept, y, made["last"](layers[-1][0], y.T, {"bias": layers[-1][1]}).T]

    def backward(kept: list[Tensor]) -> list[Tensor]:
        kept.pop()
        dz, db = g, g.sum(0)
        found = []
        for w, _ in reversed(layers):
            y = kept.pop()
            found[:0] = [made["weight"](y.T, dz).T, db]
            if kept:
                transposed, aux = made["input"](w.T, dz.T, {"relu_aux": kept.pop()})
                dz, db = transposed.T, aux["drelu_bgrad"].reshape(-1)
        return found

    try:
        made["hidden"] = _Product(weight, x.T, MatmulEpilog.RELU_AUX_BIAS, {"bias": bias})
        made["last"] = _Product(weight, x.T, MatmulEpilog.BIAS, {"bias": bias})
        mask = made["hidden"](weight, x.T, {"bias": bias})[1]["relu_aux"]
        made["input"] = _Product(weight.T, g.T, MatmulEpilog.DRELU_BGRAD, {"relu_aux": mask})
        made["weight"] = _Product(x.T, g)
    except BaseException:
        close()
        raise
    return Network(forward, backward, "RELU_AUX_BIAS, DRELU_BGRAD, autotuned", close)


MAKERS: dict[str, Callable[[Task], Network]] = {OURS: ours, EAGER: eager, COMPILED: compiled, NVMATH: nvmath}
