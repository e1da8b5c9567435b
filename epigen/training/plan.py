"""What a chain of layers runs forward and backward: which programs, what they read, and where each gradient comes out. Plain data.

A chain's layers multiply one another's results. Where a layer gives one tile of its operands' dtype, the next takes the derivative of it
over: the gradient that arrives there is the next layer's input-gradient product, and the derivative is that product's epilogue. The last
layer's derivative, and that of a layer which gives anything else, runs over the gradients that arrive from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from epigen.codegen.lower import output_dtype
from epigen.dtypes import BY_TORCH_ON_CPU, FP32, DType
from epigen.errors import CallError
from epigen.ir import autodiff
from epigen.ir import graph as g
from epigen.ir.autodiff import carries_gradient
from epigen.ir.derivation import ARRIVING, INPUT, ROW, SAVED, Derivation
from epigen.ir.derive import derive
from epigen.ir.graph import PRODUCT, Graph, Output, describe_indices
from epigen.ir.program import MOST_PROGRAMS, graph_of
from epigen.ir.written import through_text
from epigen.ops import NUMBER
from epigen.runtime import outputs


class LayerRequest(NamedTuple):
    """One layer, as far as a plan hangs on it.

    text: the program. save, of: as of `epigen.derive`. dtype: of the operands. inputs: the dtypes of the program's inputs in its order, None
    for numbers. wanted: those of them whose gradients are. weight: whether the weight's is.
    """

    text: str
    save: str | None
    of: tuple[str, ...] | None
    dtype: torch.dtype
    inputs: tuple[torch.dtype | None, ...]
    wanted: tuple[bool, ...]
    weight: bool


@dataclass(frozen=True, slots=True)
class Backward:
    """One layer's derivative.

    text: the program; "" where all that is wanted is what arrives. product: at which of the layer's results the gradient arrives that is its
    mm; None where its mm is the layer's own product, taken again.
    kept: what it needs, by place among the layer's inputs, all outputs of its forward, its x and its weight, in a row. For a product that
    is taken again x and the weight come last. indices: of each of them.
    arguments: the program's inputs, by place among what is kept, the layer's numbers and the gradients that arrive.
    mm, inputs, rows: where the gradients of mm, of each input of the layer, and of what reductions over k leave are, by place among the program's outputs and the gradients that
    arrive; None for those that are not wanted. dtypes: the inputs' own, which their gradients have to have. periods: the inputs', along which these are then to be
    summed. zeros: those, by place and None for mm, whose gradients are 0, since the results follow them in steps alone.
    """

    text: str
    product: int | None
    kept: tuple[int, ...]
    indices: tuple[str, ...]
    arguments: tuple[int, ...]
    mm: int | None
    inputs: tuple[int | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    periods: tuple[tuple[str, ...], ...]
    zeros: tuple[int | None, ...] = ()
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OperandBackward:
    """The gradients of what one operand is computed of, over the gradient of mm.

    operand: "a", which is x, or "b", the weight's transpose. text: the program. wide: the same with the operand's own gradient in fp32. arguments: its inputs, by place among what `Step` keeps for operands and behind that the
    gradients of rows, and whether each is transposed; None is the operand itself. own: where the operand's own gradient is among the program's outputs. inputs: each a place among the
    layer's inputs, and where that one's gradient is. right: of a second product, whose gradient it is then over, the place of the right operand among what `Step` keeps; None of mm.
    """

    operand: str
    text: str
    wide: str
    arguments: tuple[tuple[int | None, bool], ...]
    own: int | None
    inputs: tuple[tuple[int, int], ...]
    right: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one layer runs.

    text: the forward; what it keeps are further outputs after the results. inputs: the program's, by place among the layer's. indices: of each of them.
    outputs: the indices of each of the results. constant: the outputs that carry no gradient. own: the derivative, over the gradients that
    arrive; None where there is none, or the next layer takes it over. before: the derivative of the layer before, taken over.
    trains: whether any gradient is wanted. weight, x: whether those of the weight and of what it multiplies are; with `before`, the latter
    is what that gives. operands: where those follow from programs, and are no plain products. kept: what these read, by place among the layer's inputs and all outputs
    of its forward, in a row.
    second: the place among the layer's inputs of the right operand of a second product, if there is one whose gradient is not 0: as `own` gives it, that is
    the gradient of the product.
    """

    text: str
    inputs: tuple[int, ...]
    indices: tuple[str, ...]
    outputs: tuple[str, ...]
    constant: tuple[int, ...]
    own: Backward | None = None
    before: Backward | None = None
    trains: bool = False
    weight: bool = False
    x: bool = False
    operands: tuple[OperandBackward, ...] = ()
    kept: tuple[int, ...] = ()
    second: int | None = None


class Input(NamedTuple):
    """A declared input. packed: a mask. periods, blocks: as of `ir.graph.Node`. seed: of random numbers."""

    name: str
    indices: str
    packed: bool
    periods: tuple[str, ...] = ()
    seed: bool = False
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.periods or self.blocks:
            return f"declared as {describe_indices(self.indices, self.periods, self.blocks)}"
        return (
            "a packed mask [..., ceil(N / 8)]"
            if self.packed
            else {
                "mn": "a tile [..., N]",
                "m": "a row [...]",
                "n": "a column [N]",
                "": "a scalar",
                "k": "a value a column of x [K]",
                "mk": "a tile [..., K]",
                "kn": "a tile of the weight's transpose [K, N]",
            }[self.indices]
        )


@dataclass(frozen=True, slots=True)
class Declared:
    """What a program declares. outputs: the indices of each. tile: whether it gives one tile of numbers, and no more. type: of several outputs."""

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    tile: bool
    type: Any


def declared(text: str) -> Declared:
    if not isinstance(text, str):
        raise CallError(f"an epilogue is text, such as 'relu(mm + bias)', and a {type(text).__name__} was given")
    return _declared(text)


def steps(x: bool, layers: tuple[LayerRequest, ...]) -> tuple[Step, ...]:
    """x: whether the gradient of what the first layer multiplies is wanted. Raises what `epigen.derive` raises."""
    return _steps(x, layers)


def multiplied(text: str) -> str:
    """The name of the input that is the right operand of a second product; "" where there is none."""
    second = graph_of(text).second()
    return second.name if second else ""


def packed(text: str) -> bool:
    """Whether the weight holds two values in a byte, along K."""
    return graph_of(text).packed_along() == "k"


# What torch.compile is not to look into: what torch.compiler.assume_constant_result sets, which imports all of torch.compile to do so
multiplied._dynamo_marked_constant = True  # type: ignore[attr-defined]
packed._dynamo_marked_constant = True  # type: ignore[attr-defined]
declared._dynamo_marked_constant = True  # type: ignore[attr-defined]
steps._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _declared(text: str) -> Declared:
    graph = graph_of(text)
    names = [o.name for o in graph.outputs]
    inputs = tuple(Input(n.name, n.indices, n.op == g.BITS, n.periods, n.kind == g.SEED, n.blocks) for n in graph.inputs())
    nodes = [graph.nodes[o.node] for o in graph.outputs]
    tile = len(nodes) == 1 and nodes[0].indices == "mn" and nodes[0].kind == NUMBER
    return Declared(inputs, tuple(n.indices for n in nodes), tile, outputs.named(tuple(names)) if len(names) > 1 else None)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _steps(x: bool, layers: tuple[LayerRequest, ...]) -> tuple[Step, ...]:
    planned: list[Step] = []
    flows, before = x, None
    for number, layer in enumerate(layers):
        graph, operands = graph_of(layer.text), _dtype(layer.dtype, "weight")
        names, indices = _places(n.name for n in graph.inputs()), tuple(graph.nodes[o.node].indices for o in graph.outputs)
        computed = graph.through_operands()
        products = ["a"] * flows + ["b"] * layer.weight if computed else [PRODUCT] * (layer.weight or flows)
        second = multiplied(layer.text)
        wrt = products + [name for name, want in zip(names, layer.wanted, strict=True) if want or (name == second and flows)]
        if not wrt:
            planned.append(Step(layer.text, tuple(names.values()), tuple(n.indices for n in graph.inputs()), indices, ()))
            continue
        followed, zeros = _followed(graph, layer.of, wrt)
        if zeros and zeros == followed:
            periods = tuple(n.periods for n in graph.inputs())
            nothing = Backward("", 0, (), (), (), None, (None,) * len(names), layer.inputs, periods, tuple(names.get(name) for name in zeros))
            constant = tuple(i for i, o in enumerate(graph.outputs) if not carries_gradient(graph, o))
            planned.append(
                Step(layer.text, tuple(names.values()), tuple(n.indices for n in graph.inputs()), indices, constant, nothing, before, True, layer.weight, flows)
            )
            flows, before = True, None
            continue
        derived = derive(graph, operands, layer.save, [name for name in wrt if name not in zeros], layer.of)
        forward = derived.forward
        # what computes something of this layer's result gives its gradient by a program of its own, and two products give it by two; and between layers the
        # gradient of one product is passed on
        alone = number + 1 < len(layers) and one_product(layers[number + 1].text) and not second
        chained = not zeros and alone and not derived.rows and _chains(graph, operands)
        backward = replace(_backward(derived, names, layer, operands, chained), zeros=tuple(names.get(name) for name in zeros))
        constant = tuple(i for i, o in enumerate(forward.outputs) if i >= derived.results or o.name not in derived.arriving)
        order = tuple(names[n.name] for n in forward.inputs())
        taken = tuple(n.indices for n in forward.inputs())
        through, kept = _through_operands(derived, names, layer, operands) if computed else ((), ())
        place = names[second] if second and backward.inputs[names[second]] is not None else None
        kept = kept if place is None or not flows or through else (place,)
        own = None if chained else backward
        planned.append(Step(forward.text, order, taken, indices, constant, own, before, True, layer.weight, flows, through, kept, place))
        flows, before = True, backward if chained else None
    return tuple(planned)


def _followed(graph: Graph, of: Iterable[str] | None, wrt: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Those of "mm" and inputs that the results follow, and of these those that they follow in steps alone. of, wrt: as of `derive`."""
    arriving = [o.name for o in graph.outputs if of is None or o.name in of]
    followed = autodiff.followed(graph, arriving).intersection(wrt)
    return followed, followed - autodiff.followed(graph, arriving, steps=False)


def _dtype(dtype: torch.dtype, what: str) -> DType:
    if str(dtype) not in BY_TORCH_ON_CPU:
        raise CallError(f"{what} is {dtype}, which epigen does not compute with: train with fp16, bf16 or fp32, or with float64 on the CPU")
    return BY_TORCH_ON_CPU[str(dtype)]


def one_product(text: str) -> bool:
    """Whether the gradient of what a layer multiplies is one product of two tensors."""
    return not graph_of(text).through_operands() and not multiplied(text)


def _chains(graph: Graph, operands: DType) -> bool:
    """Whether the layer after this one, which gives one tile, can take its derivative over: that tile then has the dtype of its gradient."""
    (output,) = graph.outputs
    return carries_gradient(graph, output) and output_dtype(graph, output, operands) == operands


def _backward(derived: Derivation, inputs: Mapping[str, int], layer: LayerRequest, operands: DType, chained: bool) -> Backward:
    """inputs: the layer's, by place. chained: the gradient arrives as a product that the program's own kernel takes; else as a tensor."""
    outputs = _places(o.name for o in derived.forward.outputs)
    dtypes = {name: _dtype(d, f"input '{name}'") for name, d in zip(inputs, layer.inputs, strict=True) if d is not None}
    program, gradients = _settled(layer.text, derived, dtypes | {PRODUCT: operands}, operands, chained)
    sources = {a.name: a for a in derived.arguments}
    read = [sources[n.name] for n in program.inputs()] if program else []
    # among inputs, outputs, x and weight in a row
    every = [n.indices for n in graph_of(layer.text).inputs()] + [derived.forward.nodes[o.node].indices for o in derived.forward.outputs] + ["mn", ""]
    numbers = [i for i, d in enumerate(layer.inputs) if d is None]
    origins = [(a.source, inputs[a.of] if a.source == INPUT else len(inputs) * (a.source == SAVED) + outputs[a.of]) for a in read]
    again = (len(inputs) + len(outputs), len(inputs) + len(outputs) + 1) if not derived.product else ()
    kept = (*dict.fromkeys(i for source, i in origins if source != ARRIVING and not (source == INPUT and i in numbers)), *again)
    arguments = []
    for source, i in origins:
        if source == ARRIVING:
            arguments.append(len(kept) + len(numbers) + i)
        elif source == INPUT and i in numbers:
            arguments.append(len(kept) + numbers.index(i))
        else:
            arguments.append(kept.index(i))
    return Backward(
        text=program.text if program else "",
        product=outputs.get(derived.product),
        kept=kept,
        indices=tuple(every[i] for i in kept),
        arguments=tuple(arguments),
        mm=gradients.get(PRODUCT),
        inputs=tuple(gradients.get(name) for name in inputs),
        dtypes=layer.inputs,
        periods=tuple(n.periods for n in graph_of(layer.text).inputs()),
        rows=tuple(gradients[row.of] for row in derived.rows),
    )


def _through_operands(
    derived: Derivation, inputs: Mapping[str, int], layer: LayerRequest, operands: DType
) -> tuple[tuple[OperandBackward, ...], tuple[int, ...]]:
    """And the places of what these read among the layer's inputs and its forward's outputs. inputs: the layer's, by place."""
    outputs, rows = _places(o.name for o in derived.forward.outputs), _places(row.of for row in derived.rows)
    arrivals = {row.passed: row.of for row in derived.rows if row.passed}
    read = [a for each in derived.operands for a in each.arguments]
    origins = {a: inputs[a.of] if a.source == INPUT else len(inputs) + outputs[a.of] for a in read if a.source in (INPUT, SAVED)}
    second = [inputs[each.product] for each in derived.operands if each.product]
    kept = tuple(dict.fromkeys([*origins.values(), *second]))
    places_of = {a: kept.index(i) for a, i in origins.items()}
    places_of |= {a: len(kept) + rows[a.of if a.source == ROW else arrivals[a.of]] for a in read if a.source in (ROW, ARRIVING)}
    dtypes = {name: _dtype(d, f"input '{name}'") for name, d in zip(inputs, layer.inputs, strict=True) if d is not None} | dict.fromkeys(g.OPERANDS, operands)
    backwards = []
    for each in derived.operands:
        program, wide = (
            _cast(layer.text, each.program, each.program.outputs, {x.output: (dtypes | own)[x.of] for x in reversed(each.gradients)}, operands)
            for own in ({}, {each.operand: FP32})
        )
        places, sources = _places(o.name for o in program.outputs), {a.name: a for a in each.arguments}
        arguments = tuple((places_of.get(a), a.transposed) for a in (sources[n.name] for n in program.inputs()))
        gradients, itself = {x.of: places[x.output] for x in each.gradients}, each.product if each.operand == "b" and each.product else each.operand
        of_inputs = tuple((inputs[name], place) for name, place in gradients.items() if name not in (*g.OPERANDS, itself))
        right = kept.index(inputs[each.product]) if each.product else None
        backwards.append(OperandBackward(each.operand, program.text, wide.text, arguments, gradients.get(itself), of_inputs, right))
    return tuple(backwards), kept


def _places(names: Iterable[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _settled(text: str, derived: Derivation, dtypes: Mapping[str, DType], operands: DType, chained: bool) -> tuple[Graph | None, dict[str, int]]:
    """The backward program with each output in the dtype that its use wants, and by name where each gradient is, as `Backward` has it.

    Over a gradient that is there, what only repeats it is left out; None where nothing remains.
    """
    graph, results = derived.backward, [o.name for o in derived.forward.outputs]
    over = bool(derived.product) and not chained
    default = operands
    if over:
        default = output_dtype(derived.forward, derived.forward.outputs[results.index(derived.product)], operands)
    wanted = {x.output: dtypes[x.of] for x in reversed(derived.gradients)} | {x.output: FP32 for x in derived.rows}
    reads: list[bool] = []  # mm, without which there is no program
    for node in graph.nodes:
        reads.append(node.op == g.DOT or any(reads[a] for a in node.args))
    repeated = {o.name for o in graph.outputs if over and graph.nodes[o.node].op == g.DOT and wanted[o.name] == default}
    rest = [o for o in graph.outputs if o.name not in repeated]
    if rest and not any(reads[o.node] for o in rest):
        repeated, rest = set(), list(graph.outputs)
    order = [o.name for o in rest]
    places = {}
    for x in (*derived.gradients, *derived.rows):
        arrives = x.passed or (derived.product if x.output in repeated else "")
        places[x.of] = len(order) + results.index(arrives) if arrives else order.index(x.output)
    return _cast(text, graph, rest, wanted, default) if rest else None, places


def _cast(text: str, graph: Graph, outputs: Iterable[Output], wanted: Mapping[str, DType], default: DType) -> Graph:
    """The program of some of a graph's outputs, each in the dtype that its use wants. text: of the layer. default: of tiles that are not cast."""
    computed = []
    for o in outputs:
        dtype = wanted[o.name]
        other = dtype != default if graph.nodes[o.node].indices == "mn" else dtype.bits < FP32.bits  # as which sums come, and of doubles as theirs
        computed.append(replace(o, dtype=dtype) if other else o)
    return graph if tuple(computed) == graph.outputs else through_text(graph.nodes, computed, text)
