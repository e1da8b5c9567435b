"""`epigen.linear`, and chains of such layers: what a user calls. A call like one before it runs what `again` has made of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from epigen.errors import CallError, shown
from epigen.runtime import arguments
from epigen.training import again, functions, parted
from epigen.training.functions import Function
from epigen.training.layer import Link, Value


def linear(
    x: Tensor, weight: Tensor, /, bias: Tensor | None = None, epilogue: str | float | Function | None = None, *, inputs: Mapping[str, Value] | Value | None = None,
    save: str | None = None, of: str | Iterable[str] | None = None, tune: str | None = None, main_grad: Tensor | None = None, **more: Value,
) -> Any:  # fmt: skip
    """A linear layer and all that follows it in one kernel, differentiable: with mm = x @ weight.T, as `torch.nn.functional.linear` has it.

    x: [..., K]. weight: [N, K], of x's dtype; or 2:4 sparse (`torch.sparse.to_sparse_semi_structured`), which has no gradient. bias: [N], the program's input of that name. epilogue: the program; by default "mm + bias", and
    "mm" without a bias. Its further inputs are keywords: tile [..., N], row [...], column [N], packed mask [..., ceil(N / 8)], where the
    dots stand for x's own leading dimensions, to which a tensor of other extents is broadcast as torch has it, scalar a number or a tensor
    with one element. Of booleans and integers they are numbers too, 0 and 1 of booleans. Gradients flow to those that require them. inputs: the same as a mapping, which can hold any name. A keyword that names an option below and an input of the
    epilogue too is the input, or the option where `inputs` holds the input.
    A function of torch's, or a module, may stand for the text, such as `lambda mm, bias: torch.relu(mm + bias)`: of the product [..., N] and of inputs by
    name, which then broadcast to it as in torch, and may be omitted where they have defaults; a bias that it does not take is added to the product first. It is traced by the first call of each combination of shapes;
    parameters of a module that it reads have gradients. Under torch.compile and torch.export its operations take the product as torch's own do.
    A number is addmm's alpha: it scales the product, to which bias is then added.
    save: what the forward keeps for the backward, and of: the outputs at which gradients arrive, both as for `epigen.derive`. Without a
    gradient to take nothing is kept. tune: as for `epigen.compile`. main_grad: an fp32 buffer [N, K] to which each backward() that wants the
    weight's gradient adds it in place, in fp32; the weight's own `grad` is then left alone.
    Under autocast x and weight are cast as by `torch.nn.functional.linear`; the inputs stay as they are, for the kernel reads any dtype.
    In torch.func and forward-mode derivatives it runs as torch's own operations, unfused, and has all derivatives.
    Returns a tile as [..., N], a row as [...]; several outputs as a named tuple; of a function what it returns.
    Raises ParseError or CheckError for the epilogue, DerivationError where it has no derivative, CallError for the rest.

    >>> import torch, epigen
    >>> weight = torch.tensor([[1.0, -1.0], [2.0, 0.0]], requires_grad=True)
    >>> epigen.linear(torch.ones(1, 2), weight, torch.zeros(2), "relu(mm + bias)").sum().backward()
    >>> weight.grad
    tensor([[0., 0.],
            [1., 1.]])
    """
    values = (x, weight, bias, *(inputs.values() if isinstance(inputs, Mapping) else (inputs,)), *more.values())
    options: dict[str, Any]
    written_down = functions.is_function(epilogue) and any(map(arguments.stands_for_one, values))
    if has_torch_function(values) and not written_down:  # of torch.fx's proxies, which write the call down, and of tensors that want to be told of it
        options = {"inputs": inputs, "save": save, "of": of, "tune": tune, "main_grad": main_grad, **more}
        return handle_torch_function(linear, values, x, weight, bias, epilogue, **options)
    product = "mm"
    if isinstance(epilogue, float | int) and not isinstance(epilogue, bool):  # an input of the program, so that another number is the same kernel
        more, product, epilogue = joined({"alpha": epilogue}, more), "mm * alpha", None
    if epilogue is None:
        epilogue = product if bias is None else f"{product} + bias"
    if inputs is None and save is None and of is None and tune is None and main_grad is None:
        return again.call(x, [Link(weight, more if bias is None else {"bias": bias, **more}, epilogue)])
    declared = names_of_inputs(epilogue)
    if inputs is not None and not isinstance(inputs, Mapping):
        if "inputs" not in declared:
            raise CallError(f"inputs is a {type(inputs).__name__}, and a mapping from the names of the epilogue's inputs was expected")
        more, inputs = {"inputs": inputs, **more}, None
    given = joined({} if bias is None else {"bias": bias}, more, inputs or {})
    options = {"save": save, "of": of, "tune": tune, "main_grad": main_grad}
    for name, value in options.items():
        if value is not None and name in declared and name not in given:
            given[name], options[name] = value, None
    return again.call(x, [Link(weight, given, epilogue, options["save"], names(options["of"]), options["tune"], options["main_grad"])])


def names_of_inputs(epilogue: Any) -> tuple[str, ...]:
    if isinstance(epilogue, str) or not functions.is_function(epilogue):
        return parted.inputs(epilogue)  # which refuses what is no text
    # what torch.compile looks into calls the function itself, and need not know
    return () if torch.compiler.is_compiling() else functions.parameters(epilogue)


def joined(*several: Mapping[str, Value]) -> dict[str, Value]:
    """Inputs that were given in several ways, each in one of them."""
    inputs: dict[str, Value] = {}
    for given in several:
        for name, value in given.items():
            if name in inputs:
                raise CallError(f"the input '{name}' is given twice")
            inputs[name] = value
    return inputs


def names(of: Any) -> tuple[str, ...] | None:
    """Outputs as an argument `of` gives them."""
    if of is None:
        return None
    listed = (of,) if isinstance(of, str) else tuple(of) if isinstance(of, Iterable) else (of,)
    if not all(isinstance(name, str) for name in listed):
        raise CallError(f"of is {shown(of)}, and names of outputs were expected")
    return listed
