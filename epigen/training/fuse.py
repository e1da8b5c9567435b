"""`epigen.fuse`: linear layers and the activations after them in a user's model -> layers that are both, with the same parameters.

A layer is replaced if all its calls, and all calls of its activation, are such pairs in every way that the model's forwards may go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from epigen.training.flow import Flow, flow
from epigen.training.modules import Chain, Linear, hooked

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_EPILOGUES: dict[type[nn.Module], Callable[[Any, str], str | None]] = {
    nn.ReLU: lambda _, z: f"relu({z})",
    nn.LeakyReLU: lambda m, z: f"leaky_relu({z}, {m.negative_slope!r})",
    nn.GELU: lambda m, z: f"gelu_tanh({z})" if m.approximate == "tanh" else f"gelu({z})",
    nn.SiLU: lambda _, z: f"silu({z})",
    nn.Sigmoid: lambda _, z: f"sigmoid({z})",
    nn.Tanh: lambda _, z: f"tanh({z})",
    nn.Softplus: lambda m, z: f"softplus({z})" if (m.beta, m.threshold) == (1, 20) else None,
    nn.Hardswish: lambda _, z: f"hardswish({z})",
}
"""By activation: its program, of the text of what it is applied to; None where its options are not in the language."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A layer that was replaced. name: in the model. activation: the module that it took over; "" for none."""

    name: str
    activation: str
    epilogue: str


@dataclass(frozen=True, slots=True)
class Left:
    """A linear layer that was left as it is."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Fused:
    """What `fuse` did. chains: the sequences whose layers now run as one chain. It prints as a table."""

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    chains: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(r.name, f"{r.epilogue}{f', with {r.activation}' if r.activation else ''}") for r in self.replaced]
        rows += [(name or "the model", "layers that follow one another run as a chain") for name in self.chains]
        rows += [(x.name or "the model", f"left: {x.why}") for x in self.left]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:{width}}  {said}" for name, said in rows) or "there is no linear layer"


def fuse(model: nn.Module) -> Fused:
    """Replace each `torch.nn.Linear` of a model and the activation module after it by one layer that computes both in one kernel.

    The model is changed in place, and its parameters stay the same objects: optimizers and state dicts are as they were. An activation that
    was taken over becomes an Identity. In a plain `torch.nn.Sequential` layers that then follow one another run as a chain.
    Returns what was replaced, and what was left and why: where the activation is a function in a forward and no module, or not in the
    language; hooks; subclasses, parametrised and quantised layers; other dtypes; a forward that torch.fx cannot trace.

    >>> import torch, epigen
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> print(epigen.fuse(model))
    0          relu(mm + bias), with 1
    2          mm + bias
    the model  layers that follow one another run as a chain
    """
    seen = flow(model)
    linears = [m for m in seen.names if isinstance(m, nn.Linear) and not isinstance(m, Linear)]
    why = {m: _unfit(m, seen) or _unpaired(m, seen) for m in linears}
    pairs = {m: act for m in linears if not why[m] for act in seen.after[m] if isinstance(act, nn.Module)}
    # a layer that is lost to this may have been what another one's activation followed too
    while lost := [m for m, act in pairs.items() if not seen.before[act] <= pairs.keys()]:
        for m in lost:
            why[m] = f"its activation {seen.names[pairs.pop(m)][0]} is called elsewhere too"
    replaced = [_replace(model, seen, m, act) for m, act in pairs.items()]
    for act in dict.fromkeys(pairs.values()):
        _put(model, seen.names[act], nn.Identity())
    chains = []
    for module, names in seen.names.items():
        if type(module) is nn.Sequential and (runs := [r for r in _runs(module, seen) if len(r) > 1 and any(isinstance(m, Linear) for m in r)]):
            replaced += [_replace(model, seen, m, None) for m in dict.fromkeys(m for run in runs for m in run) if not isinstance(m, Linear)]
            module.__class__ = Chain  # as it stays the same object, who holds it need not be found: it may be the model itself
            chains.append(names[0])
    done = {r.name for r in replaced}
    left = [Left(seen.names[m][0], why[m]) for m in linears if seen.names[m][0] not in done]
    order = [names[0] for names in seen.names.values()]
    return Fused(tuple(sorted(replaced, key=lambda r: order.index(r.name))), tuple(left), tuple(chains))


def _unfit(module: nn.Linear, seen: Flow) -> str:
    """'' or why a layer cannot be replaced, whatever follows it."""
    if seen.names[module][0] == "":
        return "it is the model itself, and only what a module holds is replaced"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, and of that only its own class knows what it does"
    if hooked(module):
        return "it has hooks, which would see the activation's result"
    if "forward" in vars(module):
        return "its forward was replaced"
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
    if module.weight.dtype not in _DTYPES:
        return f"its weight is {module.weight.dtype}, and fp32, fp16 and bf16 are trained"
    return ""


def _unpaired(module: nn.Linear, seen: Flow) -> str:
    """'' or why a layer has no activation that it can take over."""
    if module in seen.untraced:
        return seen.untraced[module]
    after = seen.after.get(module, {"no forward that was traced calls it"})
    for found in after:
        if isinstance(found, str):
            return found
        name = f"{seen.names[found][0]} ({type(found).__name__})"
        if type(found) not in _EPILOGUES:
            return f"{name} follows, which no epilogue computes"
        if hooked(found) or "forward" in vars(found):
            return f"{name} follows, which has hooks or a forward of its own"
        if _EPILOGUES[type(found)](found, "mm") is None:
            return f"{name} follows, with options that the language does not have"
    return "" if len(after) == 1 else "several activations follow it in turn"


def _runs(sequence: nn.Sequential, seen: Flow) -> Iterator[list[nn.Linear]]:
    """The layers of a sequence that follow one another, of those that are replaced or could be."""
    run: list[nn.Linear] = []
    for module in sequence:
        if isinstance(module, Linear) or (isinstance(module, nn.Linear) and not _unfit(module, seen)):
            run.append(module)
        elif type(module) is not nn.Identity:
            yield run
            run = []
    yield run


def _replace(model: nn.Module, seen: Flow, module: nn.Linear, activation: nn.Module | None) -> Replaced:
    """activation: None for a layer that only joins a chain."""
    z = "mm + bias" if "bias" in dict(module.named_parameters()) else "mm"
    epilogue = z if activation is None else _EPILOGUES[type(activation)](activation, z)
    assert epilogue is not None
    _put(model, seen.names[module], Linear.sharing(module, epilogue))
    return Replaced(seen.names[module][0], seen.names[activation][0] if activation else "", epilogue)


def _put(model: nn.Module, names: Iterable[str], module: nn.Module) -> None:
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module)
