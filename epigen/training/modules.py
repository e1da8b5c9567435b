"""Modules that train: a linear layer with its epilogue, a sequence of such layers that runs as one chain, a multilayer perceptron, and a gated one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

from epigen import ops
from epigen.errors import CallError, unknown
from epigen.ir import reference
from epigen.training import again, functions, linear
from epigen.training.functions import Function
from epigen.training.layer import Link, Value

ACTIVATIONS = tuple(name for name, op in ops.TABLE.items() if op.group == "activation" and len(op.params) == 1)
"""What an MLP can have between its layers."""


class Linear(nn.Module):
    """`torch.nn.Linear` and what follows it, in one kernel: parameters, their initialisation and the state dict are the same.

    It is no subclass of `torch.nn.Linear`: who looks for those, to adapt, quantise or fold them, takes them for x @ weight.T + bias.
    epilogue: the program, whose mm is x @ weight.T, or a function or a module as for `epigen.linear`, such as `torch.nn.functional.gelu`; a module's
    parameters are then the layer's too. bias: whether the program's input `bias` is a parameter. Its other inputs are given at each call, by name. save, of, tune: as for `epigen.linear`. A weight with an attribute `main_grad`, an fp32 tensor of its shape, has its
    gradient added to that in place, and its `grad` left alone.
    Raises ParseError or CheckError for the epilogue, CallError where it and `bias` disagree.

    >>> import torch, epigen
    >>> epigen.nn.Linear(128, 256, epilogue="gelu(mm + bias)")
    Linear(in_features=128, out_features=256, bias=True, epilogue='gelu(mm + bias)')
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, epilogue: str | Function, save: str | None = None, of: str | Iterable[str] | None = None,
        tune: str | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        of_text = isinstance(epilogue, str) or not functions.is_function(epilogue)
        read = "bias" in linear.names_of_inputs(epilogue)  # what takes none gets its product with the bias added
        if read != bias and (of_text or read):
            verb, wanted = ("reads", f"bias=True, or {without_bias(epilogue)}") if read else ("does not read", "bias=False, or mm + bias in the epilogue")
            raise CallError(f"bias={bias}, and the epilogue {epilogue!r} {verb} a bias: write {wanted}")
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        plain = nn.Linear(in_features, out_features, bias, device, dtype)
        self.weight = plain.weight
        self.register_parameter("bias", plain.bias)
        self.epilogue, self.save, self.of, self.tune = epilogue, save, linear.names(of), tune

    def reset_parameters(self) -> None:
        """As torch.nn.Linear's."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]  # which asks for no more than the two parameters

    def link(self, inputs: Mapping[str, Value]) -> Link:
        """As a part of a chain. Each parameter is read once: a parametrised one is computed anew whenever it is."""
        weight: Any = self.weight
        bias: Any = self.bias
        given = linear.joined({} if bias is None else {"bias": bias}, inputs)
        held = weight if isinstance(weight, Tensor) else self._parameters.get("weight")  # while torch.fx traces, the weight is a proxy
        return Link(weight, given, self.epilogue, self.save, self.of, self.tune, getattr(held, "main_grad", None))

    def forward(self, input: Tensor, inputs: Mapping[str, Value] | None = None, **more: Value) -> Any:  # noqa: A002  # torch.nn.Linear's own name
        """input: [..., in_features]. more: the program's other inputs. inputs: the same as a mapping, for names that are taken here.
        Returns what `epigen.linear` returns."""
        return again.call(input, [self.link(linear.joined(inputs or {}, more))])

    def extra_repr(self) -> str:
        shown = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        if isinstance(self.epilogue, nn.Module):  # which is shown as what the layer holds
            return shown
        return f"{shown}, epilogue={repr(self.epilogue) if isinstance(self.epilogue, str) else functions.name_of(self.epilogue)}"


def without_bias(epilogue: str | Function) -> str:
    if not isinstance(epilogue, str):
        return "a function without it"
    return "an epilogue without it" if "mm + bias" not in epilogue else f"epilogue={epilogue.replace('mm + bias', 'mm')!r}"


class Chain(nn.Sequential):
    """`torch.nn.Sequential` in which `Linear` layers that follow one another run as one chain.

    Backward, each layer's derivative and bias gradient are then computed within the product that the next layer takes for its input gradient,
    instead of a pass of their own. A layer with hooks, or with a forward of its own, is called by itself.

    >>> import torch, epigen
    >>> model = epigen.nn.Chain(epigen.nn.Linear(8, 16, epilogue="silu(mm + bias)"), epigen.nn.Linear(16, 4, epilogue="mm + bias"))
    >>> model(torch.zeros(2, 8)).shape
    torch.Size([2, 4])
    """

    def forward(self, input: Any) -> Any:  # noqa: A002  # torch.nn.Sequential's own name for it
        run: list[Link] = []
        for module in self:
            if isinstance(module, Linear) and as_it_is(module, Linear):
                run.append(module.link({}))
                continue
            if type(module) is nn.Identity and as_it_is(module, nn.Identity):
                continue
            if run:
                input, run = again.call(input, run), []  # noqa: A001
            input = module(input)  # noqa: A001
        return again.call(input, run) if run else input


def as_it_is(module: nn.Module, of: type[nn.Module]) -> bool:
    """Whether calling a module is no more than the forward of its class, so that nobody notices where it is not called."""
    called = type(module).forward is of.forward and type(module).__call__ is of.__call__ and "forward" not in vars(module)
    if isinstance(module, Linear):
        called = called and type(module).link is Linear.link
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return (
        called
        and not own
        and not (torchs._global_forward_hooks or torchs._global_forward_pre_hooks or torchs._global_backward_hooks or torchs._global_backward_pre_hooks)
    )


class MLP(Chain):
    """A multilayer perceptron as one chain: an activation after each linear layer but the last.

    sizes: of the input, of each hidden layer and of the output. activation: one of the language's, by name, or a function or a module as for
    `epigen.linear`. save, tune: as for `epigen.linear`.
    The state dict is that of a `torch.nn.Sequential` of the linear layers alone.
    Raises CallError for what does not fit.

    >>> import torch, epigen
    >>> epigen.nn.MLP([8, 16, 4], activation="gelu")
    MLP(
      (0): Linear(in_features=8, out_features=16, bias=True, epilogue='gelu(mm + bias)')
      (1): Linear(in_features=16, out_features=4, bias=True, epilogue='mm + bias')
    )
    """

    def __init__(
        self, sizes: Sequence[int], activation: str | Function = "relu", bias: bool = True, *, save: str | None = None, tune: str | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        if len(sizes) < 2:
            raise CallError(f"sizes={list(sizes)}: an MLP has the size of its input and of its output at least")
        named = isinstance(activation, str) or not functions.is_function(activation)
        if named and activation not in ACTIVATIONS:
            raise CallError(unknown("activation", activation, ACTIVATIONS))
        z = "mm + bias" if bias else "mm"
        epilogues = [*(f"{activation}({z})" if named else activation for _ in sizes[2:]), z]
        options: dict[str, Any] = {"save": save, "tune": tune, "device": device, "dtype": dtype}
        super().__init__(*(Linear(k, n, bias, epilogue=e, **options) for k, n, e in zip(sizes, sizes[1:], epilogues, strict=False)))

    def __getitem__(self, idx: Any) -> Any:  # torch.nn.Sequential's own name for it
        """A layer, or of a slice a `Chain` of these layers, which are the same objects."""
        return Chain(OrderedDict(list(self._modules.items())[idx])) if isinstance(idx, slice) else super().__getitem__(idx)


class GatedMLP(nn.Module):
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, as Llama, Mistral, Qwen and Gemma have it, with both products of x in one kernel.

    The layers are torch.nn.Linear's, so that parameters and state dict are those of such a model's MLP. Their weights are read, and they are not called; where
    one of them has hooks, or is replaced by a module of another class, all three are, unfused.
    in_features, hidden_features, out_features: their sizes; by default the result has the input's. activation: one of the language's, by name. save, tune: as for
    `epigen.linear`. Raises CallError for what does not fit.

    >>> import torch, epigen
    >>> mlp = epigen.nn.GatedMLP(64, 128)
    >>> mlp(torch.zeros(2, 3, 64)).shape
    torch.Size([2, 3, 64])
    """

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, activation: str = "silu", bias: bool = False, *, save: str | None = None,
        tune: str | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        sizes = ((in_features, hidden_features), (in_features, hidden_features), (hidden_features, in_features if out_features is None else out_features))
        gate, up, down = (nn.Linear(k, n, bias, device, dtype) for k, n in sizes)
        self._take(gate, up, down, activation, save, tune)

    @classmethod
    def from_layers(
        cls, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear, activation: str = "silu", *, save: str | None = None, tune: str | None = None
    ) -> GatedMLP:
        """Of layers that there are, which it shares: `epigen.nn.GatedMLP.from_layers(mlp.gate_proj, mlp.up_proj, mlp.down_proj)`."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(gate_proj, up_proj, down_proj, activation, save, tune)
        return made

    def _take(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str, save: str | None, tune: str | None) -> None:
        if activation not in ACTIVATIONS:
            raise CallError(unknown("activation", activation, ACTIVATIONS))
        if any(not isinstance(layer, nn.Linear) for layer in (gate, up, down)):
            raise CallError("the layers of a GatedMLP are torch.nn.Linear's: merge adapters into their layers first, or leave the module as it is")
        if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None) or down.in_features != gate.out_features:
            shapes = ", ".join(f"{name} {list(layer.weight.shape)}" for name, layer in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)))
            raise CallError(
                f"the layers do not follow from one another: {shapes}; gate_proj and up_proj have one shape, both a bias or neither, and down_proj reads it"
            )
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.activation, self.save, self.tune = activation, save, tune

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn.Linear's own name
        """input: [..., in_features]. Returns [..., out_features]."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not all(as_it_is(layer, nn.Linear) for layer in (gate, up, down)):
            unfused: Tensor = down(reference.torch_function(self.activation)(gate(input)) * up(input))
            return unfused
        biases: list[Any] = [layer.bias for layer in (gate, up, down)]
        program, inputs, last = f"{self.activation}(mm) * dot(a, up[k,n])", {"up": up.weight.t()}, Link(down.weight, {}, "mm", tune=self.tune)
        if biases[0] is not None:
            program = f"{self.activation}(mm + bias) * (dot(a, up[k,n]) + shift[n])"
            inputs |= {"bias": biases[0], "shift": biases[1]}
        if biases[2] is not None:
            last = last._replace(inputs={"bias": biases[2]}, epilogue="mm + bias")
        fused: Tensor = again.call(input, [Link(gate.weight, inputs, program, self.save, tune=self.tune), last])
        return fused

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
