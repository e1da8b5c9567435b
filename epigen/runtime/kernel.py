"""The callable: finds what it has prepared for a call like this one, or prepares it. CPU tensors are answered by the reference.

What of a call follows from everything but addresses and numbers is checked and prepared once (`prepared`) and found again by a key; a
call that has been made before is made again with as little Python as that takes (`fast_call`). Nothing here waits for the device.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from epigen.codegen import schedules, sparse
from epigen.codegen.lower import check_computed, check_grouped, describable, lower, over_product, signature_of_contiguous, uninterpretable
from epigen.codegen.render import Rendered, Renderer
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import (
    EXACT_INT8,
    USUAL,
    Choice,
    KernelConfig,
    KernelSpec,
    Numerics,
    Provisional,
    Signature,
    factors,
    index_bits,
    k_multiple,
    whole_words,
)
from epigen.dtypes import BY_TORCH_ON_CPU, FP16, FP32, INT8, DType, right_operand
from epigen.errors import CallError, ConfigError
from epigen.gpus import DEFAULT_TARGET, Target
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.graph import GROUPS, PRODUCT, Graph, Node
from epigen.ir.parting import Parting
from epigen.lang.syntax import declared_text
from epigen.lru_cache import LruCache
from epigen.perf import limits
from epigen.runtime import arguments, batches, groups, outputs, overlap, semi_structured
from epigen.runtime.arguments import process_precision
from epigen.runtime.batches import Batch
from epigen.runtime.calls import Calls, Known
from epigen.runtime.device import THIS_MACHINE, Machine
from epigen.runtime.fast_call import bound, fast_call
from epigen.runtime.loader import Loader, Resources, refusal, unwritten, warm
from epigen.runtime.prepared import Operands, Plan, Prepared
from epigen.shapes import Shape

Chooser = Callable[[KernelSpec, Shape, Target, str], Choice]
"""(spec, shape, target, refused) -> Choice. refused: why a config with a main loop of Triton's did not work, "" at first."""

BACKENDS = ("triton", "interpreter", "reference")

_TEXTS = 64
"""Texts of one kernel: few of its signatures differ, however many shapes there are."""


@dataclass(slots=True)
class _Way:
    """How calls of a sparse operand like one another run. kernel: of the dense values, or where `product` is a dtype, in which the vendor gives the product, of the
    program over that; None where there is nothing after it. said: what such calls have in common, for who asks which kernel ran."""

    choice: Choice
    kernel: Kernel | None
    product: torch.dtype | None
    said: Prepared | None = None


_WAYS = 1024
"""Of calls of sparse operands, by their shapes; many share a kernel."""


class KnownAs(NamedTuple):
    """What `epigen.compile` was given, as an operation of torch names it. options: those beside `tune`, as JSON."""

    text: str
    tune: str | None
    options: str | None


class Kernel:
    """A compiled epilogue program: call it with the operands and the program's inputs.

    Made by `epigen.compile`. Safe to call from several threads. It can be pickled, and is its own copy.
    parting: what a call gives and gets in one, of which the program has parts.
    """

    parting: Parting | None = None

    def __init__(
        self, graph: Graph, renderer: Renderer, choose: Chooser, config: KernelConfig | None = None, backend: str | None = None,
        numerics: Numerics = USUAL, at_call: Chooser | None = None, made_by: Callable[[], Kernel] | None = None, known_as: KnownAs | None = None,
        machine: Machine = THIS_MACHINE, grouped: bool = False,
    ):  # fmt: skip
        """at_call: chooses in place of `choose` where a call of GPU tensors is about to run, and may take its time.
        made_by: makes this kernel anew where it is unpickled, and can be pickled itself. known_as: how torch's operations name it.
        machine: whose GPU is the target where none is named. grouped: whether calls are of groups."""
        self._graph, self.renderer, self._choose, self._at_call = graph, renderer, choose, at_call or choose
        self._config, self._backend, self.numerics = config, backend, numerics
        self._inputs: dict[str, Node] = {n.name: n for n in graph.inputs()} | ({GROUPS: groups.DECLARED} if grouped else {})
        self._input_names = tuple(self._inputs)
        self._matrices = tuple(name for name in self._inputs if name in {*graph.tiles(), *(node.name for node in graph.scales())})
        """The inputs that a TMA descriptor may address."""
        self._seeds = tuple(name for name, node in self._inputs.items() if node.kind == g.SEED)
        self._names = tuple(o.name for o in graph.outputs)
        self._outputs: Any = outputs.named(self._names) if len(self._names) > 1 else None
        self._loaders = {interpret: Loader(interpret) for interpret in (False, True)}
        self._calls = Calls()
        self._specs: LruCache[Signature, KernelSpec] = LruCache(_TEXTS)
        self._rendered: LruCache[tuple[Signature, KernelConfig], Rendered] = LruCache(_TEXTS)
        self._of_sparse: LruCache[tuple[Any, ...], _Way] = LruCache(_WAYS)
        self._children: LruCache[tuple[str, KernelConfig | None], Kernel] = LruCache(_TEXTS)
        self._starting = threading.Lock()
        self._compiling: tuple[int, tuple[Future[Any], ...]] = (0, ())
        """The process, and what other threads of it compile."""
        self._last: Prepared | None = None
        self._made_by, self._known_as, self._machine = made_by, known_as, machine

    def __reduce__(self) -> Any:
        """By its program and options: whoever reads it compiles it anew, for the databases and the GPUs there."""
        if self._made_by is None:
            raise CallError("this kernel was made for one problem, and cannot be pickled: one of epigen.compile can")
        return self._made_by, ()

    def __copy__(self) -> Kernel:
        return self

    def __deepcopy__(self, _memo: Any) -> Kernel:
        """Itself, as of a function: what a kernel remembers of its calls serves all that hold it."""
        return self

    @property
    def graph(self) -> Graph:
        """The typed program."""
        return self._graph

    @property
    def program(self) -> str:
        """The program in canonical text."""
        return self._graph.text

    def __repr__(self) -> str:
        inputs = ", ".join(f"{n.name}{'[' + declared_text(n.indices, n.periods, n.blocks) + ']' if n.indices else ''}" for n in self._inputs.values())
        return f"<epigen.Kernel {self._graph.text!r} inputs: {inputs or 'none'}; outputs: {', '.join(self._names)}>"

    def __call__(self, a: Any = None, b: Any = None, /, *extra: Any, out: Any = None, **inputs: Tensor | float) -> Any:
        """Run the program. Called as `kernel(a, b, bias=bias)`.

        a: [M, K]. b: [K, N]. With leading dimensions, which broadcast as torch.matmul has it, they are several products of one launch, [..., M, K] and
        [..., K, N]; inputs and `out` may have these too, or be the same for all. One of them may be 2:4 sparse, as
        `torch.sparse.to_sparse_semi_structured` makes it, b by its transpose. With groups=ends, int32 [G] on the device, they are products of groups: of
        rows where b is [G, K, N], each of the rows between two ends, or along k where b is [K, N], whose results are [G, M, N]. Any strides; on the meta device the results are, too. inputs: the program's, by name: tile [M, N], row [M], column [N], mask uint8
        [M, ceil(N / 8)], scalar a number or a tensor with one element, seed an int of 64 bits or an int64 tensor with one element; of operands also [K], and [M, K] or [K, N]. Of any dtype of floats (but fp64), int8, uint8, int32, int64 or bool, and in the
        kernel fp32: booleans are 0 and 1, and integers past 2^24 are rounded, as torch's own conversion to float32 rounds them.
        out: a tensor for a lone output; for several a mapping by name or a sequence; written and returned. It may be an input of the same
        indices from which that output is computed element by element, such as grad in "cast(mm + grad[m,n], fp32)", which then accumulates in
        place: every kernel reads an element before it writes it. Beyond that it may overlap nothing else of the call.
        Returns a tensor, or a named tuple where the program has several outputs.
        Raises CallError for names, devices, dtypes or shapes that do not fit, and for an `out` that overlaps what it may not.
        """
        if is_dynamo_compiling():  # a constant to torch.compile, and 30 ns to others
            arguments.check_positional("operands a and b are", len(extra), self._inputs)
            return self._operation((a, b), inputs, out)
        for again, prepared in self._calls.newest.get(type(out), ()) if not extra else ():
            result = again(again, a, b, inputs, out)
            if result is not None:
                self._last = prepared
                return result
        arguments.check_positional("operands a and b are", len(extra), self._inputs)
        if GROUPS in inputs and GROUPS not in self._inputs:
            results = self._grouped(a, b, out=out, **inputs)
            self._last = self._grouped._last
            return results
        return self._call(() if PRODUCT in self._inputs else (a, b), inputs, out)

    def over(self, mm: Any = None, /, *extra: Any, out: Any = None, **inputs: Tensor | float) -> Any:
        """Run the program over a product that is there already: one pointwise kernel in place of the multiplication and its epilogue.

        mm: [M, N], fp32, fp16 or bf16, any strides. inputs, out, and what is returned: as of a call, but that mm's dtype is what outputs have
        that are not cast. out may be mm itself, where that output is computed from it.
        Raises CallError as a call does, and for a program that reduces an operand over k; ConfigError for a kernel that was compiled with a
        config whose schedule multiplies.

        >>> import torch, epigen
        >>> backward = epigen.compile("dz = drelu(mm, y[m,n] > 0); dz, bgrad(dz)")
        >>> dz, dbias = backward.over(torch.ones(2, 2), y=torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        >>> dz, dbias
        (tensor([[0., 1.],
                [1., 1.]]), tensor([1., 2.]))
        """
        arguments.check_positional("mm is", len(extra), self._inputs)
        if PRODUCT in inputs:
            raise CallError("the program has no input 'mm': it is the product, given once and by position")
        if is_dynamo_compiling() or traced() or (not isinstance(mm, Tensor) and arguments.stands_for_one(mm)):
            return self._operation((mm,), inputs, out)
        kernel = self._over
        nothing: Any = None
        results = kernel(nothing, nothing, out=out, **{PRODUCT: mm}, **inputs)
        self._last = kernel._last
        return results

    @functools.cached_property
    def _grouped(self) -> Kernel:
        """The program of groups, whose ends are an input."""
        if PRODUCT in self._inputs:
            raise CallError("the product is given, and groups are of a product that is still to be taken: call the kernel with a and b")
        check_grouped(self._graph, "", self.numerics.invariant)
        made = Kernel(
            self._graph, self.renderer, self._choose, self._config, self._backend, self.numerics, self._at_call, None, self._known_as, self._machine, grouped=True
        )  # fmt: skip
        made.parting = self.parting
        return made

    @functools.cached_property
    def _over(self) -> Kernel:
        """The program whose product is an input."""
        if self._config and SCHEDULES[self._config.schedule].multiplies:
            raise ConfigError(f"the schedule {self._config.schedule} multiplies, and the product is given: compile without a config, or with one of library")
        return Kernel(over_product(self._graph), self.renderer, self._choose, self._config, self._backend, self.numerics, machine=self._machine)

    def _call(self, operands: Operands, inputs: Mapping[str, Any], out: Any) -> Any:
        """A call that is like none of the last ones."""
        if any(map(arguments.stands_for_one, (*operands, *inputs.values()))):
            return self._operation(operands, inputs, out)
        if self._seeds:
            inputs = arguments.with_seeds(self._seeds, inputs, operands[0] if operands else inputs[PRODUCT])
        outs, form = outputs.given(out, self._names), _form(out)
        arguments.check_no_gradient((*operands, *inputs.values(), *outs.values()))
        if self._known_as is not None and traced():
            return self._operation(operands, inputs, out)
        if not semi_structured.TYPES.isdisjoint(map(type, operands)):
            return self._call_of_sparse(operands, inputs, out)
        arguments.check_memory(operands, inputs, outs)
        if any(isinstance(t, Tensor) and t.is_neg() for t in (*operands, *inputs.values())):
            operands, inputs, form = tuple(map(arguments.shown, operands)), {name: arguments.shown(value) for name, value in inputs.items()}, None
        key = _key(operands, inputs, outs)
        known, results = self._calls.get(key), None
        if known is None:
            prepared, results = self._first(operands, inputs, outs)
            known = Known(prepared)
            if prepared.plan is None or not isinstance(prepared.plan.choice, Provisional):
                self._calls.put(key, known)
            else:
                form = None
        elif form is not None and (again := known.again.get(form)) is not None:
            a, b = operands or (None, None)
            answer = again(again, a, b, inputs, out)
            if answer is not None:  # it was only longer ago than those that are compared with
                self._last = known.prepared
                self._calls.remember(known, form, again)
                return answer
        prepared = known.prepared
        if results is None:
            results = prepared.run(operands, inputs, outs)
        self._last = prepared
        if form is not None:
            again = known.again.get(form)
            if again is None or self._calls.is_new(again, form):  # it may differ in what a key leaves out: torch's modes of the thread
                again = fast_call(prepared, operands, {name: inputs[name] for name in self._inputs}, out, results, self._outputs)
            if again is not None:
                self._calls.remember(known, form, again)
        return results[0] if self._outputs is None else self._outputs(*results)

    def _call_of_sparse(self, operands: Operands, inputs: Mapping[str, Any], out: Any) -> Any:
        """A call of which one operand has two of four values: by the vendor's product and the program over it, or by a kernel of its dense values, which are then kept
        for as long as it is there."""
        if GROUPS in self._inputs:
            raise CallError(f"a call of groups has dense operands, and one is 2:4 sparse: {sparse.DENSE}")
        given, outs = semi_structured.of_call(operands), outputs.given(out, self._names)
        arguments.check_names(self._inputs, inputs)
        other, read = given.other, given.read
        arguments.check_memory(read, inputs, outs)
        if other.is_meta or (self._backend or ("reference" if other.device.type == "cpu" else "triton")) == "reference":
            self._check_sparse(given)
            result = self._call(given.dense(), inputs, out)
            self._last = copy.copy(self._last)
            assert self._last is not None and self._last.signature is not None
            self._last.signature = replace(self._last.signature, sparse=given.side)
            return result
        way = self._way_of_sparse(given, inputs)
        if outs:
            overlap.check({o.name: o.replaces for o in outputs.of(self._graph, BY_TORCH_ON_CPU[str(other.dtype)])}, read, inputs, outs)
        if way.product is None:
            assert way.kernel is not None
            result = way.kernel(*given.dense(), out=out, **inputs)
        else:
            product = given.product(way.product)
            if way.kernel is None:
                result = product if not outs else semi_structured.written(product, *outs.items())
            else:
                nothing: Any = None
                result = way.kernel(nothing, nothing, out=out, **{PRODUCT: semi_structured.as_given(product)}, **inputs)
        if way.said is None:
            way.said = self._said_of_sparse(way, given, inputs)
        self._last = way.said
        return result

    def _way_of_sparse(self, given: semi_structured.Operands, inputs: Mapping[str, Any]) -> _Way:
        key, on_gpu = (given.key, self._dtypes(inputs), process_precision()), given.other.is_cuda
        # while a CUDA graph is captured dense values that are not there yet cannot be made, for they would have no contents until it is run
        alone = on_gpu and torch.cuda.is_current_stream_capturing() and not given.held.dense_values_are_there
        known = self._of_sparse.get((*key, alone))
        if known is not None:
            return known
        self._check_sparse(given)
        spec = lower(self._graph, self._signature_of_sparse(given, inputs))
        with torch.cuda.device(given.other.device) if on_gpu else nullcontext():
            target = (self._machine.at_hand() if on_gpu else None) or DEFAULT_TARGET
            choose = self._at_call if on_gpu else self._choose
            choice = Choice(self._config, "given by the caller") if self._config else choose(spec, given.shape, target, "")
        if SCHEDULES[choice.config.schedule].multiplies and (self._config or not alone):
            size = f"{given.held.dense_bytes / 1e6:.3g} MB"
            choice = replace(choice, why=f"{choice.why}; operand {given.side} is 2:4 sparse, and its dense values, {size}, are kept beside it")
            way = _Way(choice, self if self._config else self._child("", choice.config, lambda: self._graph), None)
        else:
            way = self._over_sparse(given, choice)
        return way if isinstance(choice, Provisional) else self._of_sparse.put((*key, alone), way)

    def _check_sparse(self, given: semi_structured.Operands) -> None:
        """That the operands fit together, and that the program can be computed of the vendor's product, or was given a config that multiplies dense values."""
        semi_structured.check(self._graph, given)
        if self._config is not None and SCHEDULES[self._config.schedule].multiplies:
            return
        if self.numerics.invariant:
            raise CallError(f"the program is invariant, and the vendor's product of a 2:4 sparse operand adds up in an order that depends on M: {sparse.DENSE}")
        sparse.check_program(self._graph, BY_TORCH_ON_CPU[str(given.other.dtype)])

    def _over_sparse(self, given: semi_structured.Operands, choice: Choice) -> _Way:
        """The vendor's product, and the program over it."""
        operands = BY_TORCH_ON_CPU[str(given.other.dtype)]
        whole = sparse.alone(self._graph, operands)
        then = "which is the whole program" if whole else "then one fused epilogue"
        choice = replace(choice, why=f"{choice.why}; operand {given.side} is 2:4 sparse: {given.held.called} multiplies it, {then}")
        if whole is not None:
            return _Way(choice, None, reference.torch_dtype(whole))
        config, rounding = None if SCHEDULES[choice.config.schedule].multiplies else choice.config, self.numerics.rounding
        product = reference.torch_dtype(sparse.product_of(operands, rounding))
        return _Way(choice, self._child(operands.name, config, lambda: sparse.over(self._graph, operands, rounding)), product)

    def _warm_of_sparse(self, operands: Operands, target: Target, inputs: Mapping[str, Any]) -> list[Resources]:
        given = semi_structured.of_call(operands)
        self._check_sparse(given)
        choice = (
            Choice(self._config, "") if self._config else self._choose(lower(self._graph, self._signature_of_sparse(given, inputs)), given.shape, target, "")
        )
        if SCHEDULES[choice.config.schedule].multiplies:
            return self._child("", choice.config, lambda: self._graph).warm(*given.dense(), target, **inputs)
        way = self._over_sparse(given, choice)
        nothing: Any = None
        if way.kernel is None or way.product is None:
            return []
        product = semi_structured.as_given(torch.empty((*given.other.shape[:-2], *given.shape[:2]), dtype=way.product, device="meta"))
        return way.kernel.warm(nothing, nothing, target, **{PRODUCT: product}, **inputs)

    def _signature_of_sparse(self, given: semi_structured.Operands, inputs: Mapping[str, Any]) -> Signature:
        return replace(self._signature_like(given.shape, given.standing, inputs), sparse=given.side)

    def _child(self, of: str, config: KernelConfig | None, graph: Callable[[], Graph]) -> Kernel:
        """The kernel of a config that calls of sparse operands run: of dense values, or of what follows a product of such operands, whose dtype `of` says."""
        known = self._children.get((of, config))
        made = functools.partial(
            Kernel, renderer=self.renderer, choose=self._choose, config=config, backend=self._backend, numerics=self.numerics, machine=self._machine
        )
        return known or self._children.put((of, config), made(graph()))

    def _said_of_sparse(self, way: _Way, given: semi_structured.Operands, inputs: Mapping[str, Any]) -> Prepared:
        """What such a call has in common, with the choice that it was made by."""
        last = None if way.kernel is None else way.kernel._last
        if last is None or last.plan is None:
            spec = lower(self._graph, self._signature_of_sparse(given, inputs))
            plan = Plan(spec, way.choice, self.renderer.render(spec, way.choice.config))
            outs = outputs.of(self._graph, BY_TORCH_ON_CPU[str(given.other.dtype)])
            return Prepared(self._graph, outs, given.shape, given.other.device, plan)
        said = copy.copy(last)
        said.plan = replace(last.plan, choice=replace(last.plan.choice, config=way.choice.config, why=way.choice.why))
        return said

    def bound(
        self, operands: Operands, inputs: Mapping[str, Any], results: Sequence[Tensor], views: Mapping[str, str], shapes: Sequence[tuple[int, ...] | None] = ()
    ) -> Callable[..., tuple[Tensor, ...] | None] | None:  # fmt: skip
        """After a call with these: a function for calls whose tensors are known to be alike, as `fast_call.bound` has it; None where there is none, or none yet.

        Of a call of `over` the product is the first of the inputs. The function takes them in the order in which they are given here."""
        kernel = self._over if not operands else self._grouped if GROUPS in inputs and GROUPS not in self._inputs else self
        known = kernel._calls.get(_key(operands, inputs, {}))
        if known is None:
            return None
        return bound(known.prepared, operands, {name: inputs[name] for name in kernel._inputs}, tuple(inputs), results, views, shapes)

    def _operation(self, operands: Operands, inputs: Mapping[str, Any], out: Any) -> Any:
        """A call that torch is to see as one operation: torch.compile, torch.export, or a mode that writes down, counts or only thinks it.

        operands: a and b, or the product alone."""
        if self._known_as is None:
            raise CallError("this kernel was made for one problem, and torch cannot trace it: it can one of epigen.compile")
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (*operands, *inputs.values())):
            raise CallError(arguments.NO_GRADIENT)
        declared = groups.declared(self._inputs, inputs)
        arguments.check_names(declared, inputs)
        several: tuple[Any, ...] = operands
        for name, operand in zip(("a", "b") if len(operands) == 2 else (PRODUCT,), several, strict=True):
            if not (isinstance(operand, Tensor) or arguments.stands_for_one(operand)):
                raise CallError(f"operand {name} is {arguments.kind(operand)}, and a tensor was expected")
        if self._seeds:
            inputs = arguments.with_seeds(self._seeds, inputs, operands[0])
        text, tune, options = self._known_as
        given = [inputs[name] for name in declared]
        if is_dynamo_compiling():
            given = [v if isinstance(v, Tensor) else arguments.traced_number(v, operands[0].device) for v in given]
        tensors = [v if isinstance(v, Tensor) or arguments.stands_for_one(v) else None for v in given]
        numbers = [arguments.number(name, v) for name, v, tensor in zip(declared, given, tensors, strict=True) if tensor is None]
        if out is None:
            if len(operands) == 2:
                results = torch.ops.epigen.program.default(text, tune, *operands, tensors, numbers, options=options)
            else:
                results = torch.ops.epigen.over.default(text, *operands, tensors, numbers, options=options)
        else:
            outs = outputs.given(out, self._names)
            if len(outs) != len(self._names):
                raise CallError(
                    f"out holds {len(outs)} of the {len(self._names)} outputs, and where torch traces a call it holds all: {', '.join(self._names)}"
                )
            results = [outs[name] for name in self._names]
            torch.ops.epigen.into.default(text, tune, list(operands), tensors, numbers, results, options=options)
        return results[0] if self._outputs is None else tuple.__new__(self._outputs, [results[place] for place in range(len(self._names))])

    # -- what the kernel would run

    def plan(
        self, shape: Shape = (4096, 4096, 4096), dtype: DType | None = None, target: Target | None = None,
        signature: Signature | None = None, layout: str = "nn",
        refused: str = "", as_called: bool = False,
    ) -> Plan:  # fmt: skip
        """The plan for a problem without running it.

        shape: M, N, K, of a batch after the number of its products. dtype: of operands and inputs. target: default the GPU at hand, else sm_90. signature: in place of dtype and
        layout, which is how a and b lie: n row-major, t transposed. refused: why Triton's own product is out of the question, if it is.
        as_called: as a call on the GPU at hand would have it, which tunes first where the kernel was compiled so.
        """
        if signature is None:
            signature = self.signature_of(dtype or FP16, shape, layout)
        return self._planned(self._at_call if as_called else self._choose, shape, target or self._machine.at_hand() or DEFAULT_TARGET, signature, refused)

    def _planned(self, choose: Chooser, shape: Shape, target: Target, signature: Signature, refused: str, interpreted: bool = False) -> Plan:
        spec = self._specs.get(signature) or self._specs.put(signature, lower(self._graph, signature))
        refused = refused or ("" if interpreted else _saturates(signature, shape[-1], target))
        if refused and self._config and SCHEDULES[self._config.schedule].multiplies:
            raise ConfigError(f"the schedule {self._config.schedule} multiplies, and {refused}: compile without a config, or with one of library")
        choice = Choice(self._config, "given by the caller") if self._config else choose(spec, shape, target, refused)
        if interpreted and (twin := schedules.in_triton(choice.config)) != choice.config:
            choice = Choice(twin, f"{choice.why}; in place of {choice.config}, which is in Gluon and cannot be interpreted")
        if 0 in shape[:-1]:  # of no tiles none is the last
            choice = replace(choice, config=schedules.several_launches(choice.config))
        if why := limits.unfit(spec, choice.config, shape, target, chosen=self._config is None):
            raise ConfigError(why)
        text = (signature, choice.config)
        return Plan(spec, choice, self._rendered.get(text) or self._rendered.put(text, self.renderer.render(spec, choice.config)))

    def signature_of(self, dtype: DType, shape: Shape | None = None, layout: str = "nn", weight: DType | None = None) -> Signature:
        """The signature of a call whose operands and inputs have one dtype (inputs: fp32 beside 8-bit operands; a packed b is uint8); scalars are numbers.

        shape: as of `plan`, of contiguous tensors; None for any K, and offsets that fit in 32 bits. layout: how a and b lie. weight: the dtype of b where it is
        a weight of fewer bits.
        """
        other = FP32 if dtype.bits == 8 else dtype
        inputs = tuple((n.name, g.given_as(n) or (other if n.indices else None)) for n in self._inputs.values())
        b = right_operand(dtype, weight, self._graph.packed() is not None)
        if shape is None:
            return self._with_numerics(Signature(dtype, b, inputs, self._precision_now(dtype), layout=layout))
        return self._with_numerics(signature_of_contiguous(self._graph, dtype, b, inputs, shape, layout, self._precision_now(dtype)))

    def source(self, **problem: Any) -> str:
        """The generated module's text: of the last call, or of the problem that is given as to `plan`.

        After a call that the reference answered: of the kernel that a GPU would run for it (the GPU at hand, else sm_90).
        """
        return self._plan_or_last(problem).source

    @property
    def config(self) -> KernelConfig:
        """The schedule and its values, of the same kernel as `source`; before any call, of the default problem of `plan`."""
        return self._plan_or_last({}).choice.config

    def explain(self, **problem: Any) -> str:
        """Which config, and where it came from."""
        plan = self._plan_or_last(problem)
        return f"{plan.spec.program}\n{plan.choice.config}\n{plan.choice.why}"

    def _plan_or_last(self, problem: dict[str, Any]) -> Plan:
        if problem or self._last is None:
            return self.plan(**problem)
        return self._last.plan or self.plan(self._last.problem, signature=self._last.signature)

    # -- preparing a call

    def _first(self, operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> tuple[Prepared, list[Tensor]]:
        """Prepare a call and run it, which compiles. Where Triton refuses the chosen config, the vendor's product takes its place."""
        process, compiling = self._compiling
        if process == os.getpid():  # a process that was forked has none of its parent's threads
            wait(compiling)
        prepared = self._prepare(operands, inputs, outs)
        try:
            return prepared, self._start(prepared, operands, inputs, outs)
        except OSError as error:
            raise unwritten(error) from error
        except Exception as error:
            refused = refusal(error) if prepared.plan and not prepared.interpreted else None
            if refused is None:
                raise
            # another product's sums are others in their last bits, and the vendor's is none of groups
            own = self._config is not None or self.numerics.invariant or GROUPS in self._inputs
            if own or prepared.plan is None or not prepared.plan.multiplies or prepared.plan.spec.computed or prepared.plan.spec.carried:
                raise refused from error
        prepared = self._prepare(operands, inputs, outs, str(refused))
        return prepared, self._start(prepared, operands, inputs, outs)

    def _start(self, prepared: Prepared, operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> list[Tensor]:
        """The first run. One at a time: Triton shows a kernel to other threads before it has loaded it (3.6 and 3.9)."""
        with self._starting:
            return prepared.run(operands, inputs, outs)

    def _precision_now(self, operands: DType) -> str:
        return operands.precision(self.numerics.precision or "") or process_precision()

    def _with_numerics(self, signature: Signature) -> Signature:
        return replace(signature, invariant=self.numerics.invariant, rounding=self.numerics.rounding)

    def warm(self, a: Tensor, b: Tensor, target: Target | None = None, /, **inputs: Any) -> list[Resources]:
        """Compile what a call with such arguments would launch on `target`, into Triton's cache, without a GPU.

        a, b, inputs: tensors on torch's meta device, or numbers. One operand may be 2:4 sparse. target: by position, or by this name where no input has it. A later call in any process finds the kernels compiled.
        Returns each kernel's resources, the main one first. Raises CompileError where Triton refuses one.
        """
        target = inputs.pop("target", None) if target is None else target
        if not isinstance(target, Target):
            raise CallError("target is missing: pass the GPU to compile for behind a and b, as kernel.warm(a, b, target)")
        if GROUPS in inputs and GROUPS not in self._inputs:
            return self._grouped.warm(a, b, target, **inputs)
        if not semi_structured.TYPES.isdisjoint((type(a), type(b))):
            return self._warm_of_sparse((a, b), target, inputs)
        prepared = self._prepare(() if PRODUCT in self._inputs else (a, b), inputs, {}, target=target)
        values = prepared.values(() if PRODUCT in self._inputs else (a, b), inputs, prepared.results({}))
        assert prepared.plan is not None
        if prepared.plan.by_vendor:
            values["mm_ptr"] = torch.empty(prepared.shape[:2], dtype=reference.torch_dtype(prepared.plan.spec.accumulator), device="meta")
        return [warm(x.jit, x.function, x.arguments(values), x.options, target) for x in prepared.launches]

    def wait_for(self, compiling: Future[Any]) -> None:
        """Have first calls wait for what compiles one of its kernels in another thread, and may fail: they compile it again then, and say why they cannot."""
        process, earlier = self._compiling
        self._compiling = (os.getpid(), (*(f for f in earlier if process == os.getpid() and not f.done()), compiling))

    def _prepare(self, operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor], refused: str = "", target: Target | None = None) -> Prepared:
        """target: compile for it; the tensors then lie on the meta device. By default for the tensors' own device."""
        operands, inputs, batch = groups.products(self._graph, self._inputs, operands, inputs)
        m, n, k = arguments.check_operands(self._graph, *operands) if operands else (*arguments.check_product(inputs[PRODUCT]), 0)
        what, first = ("operand a", operands[0]) if operands else (PRODUCT, inputs[PRODUCT])
        arguments.check_inputs(self._inputs, inputs, (m, n, k), first)
        arguments.check_positions(self._graph, m, n)
        if operands:
            check_computed(self._graph, BY_TORCH_ON_CPU[str(first.dtype)])
            arguments.check_second(self._graph, inputs, operands[1])
        all_outputs = outputs.of(self._graph, BY_TORCH_ON_CPU[str(first.dtype)])
        shape: Shape = (m, n, k)
        if batch is not None:
            shape = batch.problem(m, n, k)
            outs, batch = batches.with_outputs(batch, all_outputs, outs, m, n)
        for out in all_outputs:
            if out.name in outs:
                outputs.check(outs[out.name], out, m, n, first.device)
        backend = self._backend or ("reference" if first.device.type == "cpu" else "triton")
        tileless = 0 in (m, n) and bool(self._graph.vectors())  # what tiles store of reductions over k
        if backend == "reference" or (target is None and (first.is_meta or tileless)):
            signature = self._signature_like(shape, operands, inputs, batch.groups if batch else "")
            return Prepared(self._graph, all_outputs, (m, n, k), first.device, signature=signature, batch=batch)
        if first.dtype == torch.float64:
            raise CallError(f"{what} is float64, which only the reference on the CPU computes in: no kernel does")
        if backend == "triton" and not first.is_cuda and target is None:
            raise CallError(f"{what} is on {first.device}, and compiled kernels run on a GPU: move the tensors, or use backend='interpreter'")
        if backend == "interpreter":
            self._check_interpretable((*operands, *inputs.values(), *outs.values()), all_outputs)
        signature = self._signature((m, n, k), operands, inputs, outs, all_outputs, batch, backend == "interpreter")
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            choose = self._at_call if first.is_cuda and backend == "triton" and target is None else self._choose
            target = target or (self._machine.at_hand() if first.is_cuda else None) or DEFAULT_TARGET
            plan = self._planned(choose, shape, target, signature, refused, interpreted=backend == "interpreter")
            module = self._loaders[backend == "interpreter"].load(plan.rendered) if plan.rendered.functions else None
        functions = [getattr(module, f.name) for f in plan.rendered.functions]
        prepared = Prepared(self._graph, all_outputs, (m, n, k), first.device, plan, backend == "interpreter", batch=batch)
        prepared.bind(functions, operands, inputs, outs, target)
        return prepared

    def _signature(
        self, shape: tuple[int, int, int], operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor], all_outputs: Sequence[outputs.Out],
        batch: Batch | None = None, interpreted: bool = False,
    ) -> Signature:  # fmt: skip
        """What of a call its kernel's text depends on. all_outputs: one that is still to be allocated will lie without gaps."""
        m, n, k = shape
        nowhere = outputs.allocator(torch.device("meta"))
        results = {out.name: outs[out.name] if out.name in outs else out.held(m, n).empty(nowhere) for out in all_outputs}
        tensors = [t for t in (*operands, *inputs.values(), *results.values()) if isinstance(t, Tensor)]
        matrices = dict(zip("ab", operands, strict=False))
        second = self._graph.second()
        multiplied = matrices | (
            {second.name: inputs[second.name]} if second and arguments.layout(inputs[second.name]) == arguments.layout(operands[1]) else {}
        )
        upright = {name: t if arguments.layout(t) == "n" else t.T for name, t in multiplied.items()}
        upright |= {name: inputs[name] for name in self._matrices}
        written = {o.name: results[o.name] for o in self._graph.outputs if describable(self._graph, o)}
        strided = [(name, {"a": "mk", "b": "kn"}[name], t.stride()) for name, t in matrices.items()]
        strided += [(PRODUCT, "mn", (n, 1))] if operands else []
        strided += [(name, node.indices, inputs[name].stride()) for name, node in self._inputs.items() if isinstance(inputs[name], Tensor)]
        strided += [(out.name, out.indices, results[out.name].stride()) for out in all_outputs]
        a, b = (BY_TORCH_ON_CPU[str(t.dtype)] for t in operands or (inputs[PRODUCT],) * 2)
        strides, grouped = (batch.strides, batch.groups) if batch else ({}, "")
        return Signature(
            a, b, self._dtypes(inputs), self._precision_now(a), 1 if grouped == "k" else k_multiple(k), index_bits(shape, map(arguments.reach, tensors)), "".join(map(arguments.layout, operands)) or "nn",
            tma=tuple(name for name, t in (upright | written).items() if arguments.describable(t, name in written, strides.get(name, 0))),
            factors=factors((m, n, k), strided, strides), bytewise=self._bytewise(inputs, outs, strides), batched=batch is not None,
            invariant=self.numerics.invariant, rounding=self.numerics.rounding, interpreted=interpreted, grouped=grouped,
        )  # fmt: skip

    def _signature_like(self, shape: Shape, operands: Operands, inputs: Mapping[str, Any], groups: str = "") -> Signature:
        """That of a call of the same dtypes whose tensors lie without gaps. groups: the index along which its products are such."""
        a, b = (BY_TORCH_ON_CPU[str(t.dtype)] for t in operands or (inputs[PRODUCT],) * 2)
        lies = "".join(map(arguments.layout, operands)) or "nn"
        return self._with_numerics(signature_of_contiguous(self._graph, a, b, self._dtypes(inputs), shape, lies, self._precision_now(a), groups))

    def _dtypes(self, inputs: Mapping[str, Any]) -> tuple[tuple[str, DType | None], ...]:
        """Of each input; None for a number."""
        return tuple((name, BY_TORCH_ON_CPU[str(inputs[name].dtype)] if isinstance(inputs[name], Tensor) else None) for name in self._inputs)

    def _bytewise(self, inputs: Mapping[str, Any], outs: Mapping[str, Tensor], strides: Mapping[str, int]) -> tuple[str, ...]:
        """The packed masks whose rows are not whole words. What lies behind a row's end may be read, but is written only in epigen's own. strides: of a batch."""
        masks = [name for name, node in self._inputs.items() if node.op == g.BITS]
        bytewise = [name for name in masks if strides.get(name, 0) % 4 or not whole_words(inputs[name].stride(), inputs[name].data_ptr())]
        for o in self._graph.outputs:
            if o.name in outs and self._graph.nodes[o.node].kind == g.PACKED:
                out = outs[o.name]
                if out.shape[1] % 4 or strides.get(o.name, 0) % 4 or not whole_words(out.stride(), out.data_ptr()):
                    bytewise.append(o.name)
        return tuple(bytewise)

    def _check_interpretable(self, values: tuple[Any, ...], all_outputs: list[outputs.Out]) -> None:
        held = [BY_TORCH_ON_CPU.get(str(t.dtype)) for t in values if isinstance(t, Tensor)]
        if culprit := uninterpretable(self._graph, held, [o.dtype for o in all_outputs]):
            raise CallError(f"Triton's interpreter rounds to {culprit} wrongly: use fp16 or fp32 there, and {culprit} on a GPU")


def _key(operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What calls have to have in common to be prepared once. inputs: also in another order, which is another key."""
    named = [*inputs.items(), *outs.items()]
    return (*map(arguments.key, operands), *((name, arguments.key(value)) for name, value in named), len(inputs), process_precision())


def traced() -> bool:
    """Whether one of torch's modes is to see what is called: what writes it down (torch.export, make_fx, torch.jit), counts it, or has no tensors but fake ones.

    Not where an operation runs, for a mode is out of the way by then."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def _form(out: Any) -> type | None:
    """The type of a call's buffers, where they can be told apart by their order."""
    return type(out) if out is None or type(out) in arguments.PLAIN or (isinstance(out, (tuple, list)) and out) else None


def _saturates(signature: Signature, k: int, target: Target) -> str:
    """'' or why a main loop of Triton's would not give the int32 sums of int8 products, which wrap around.

    Triton has NVIDIA's mma.sync saturate (3.6 and 3.9, sm_80 to sm_90 and sm_120), and then a sum depends on the order in which it is taken.
    """
    if signature.a != INT8 or k <= EXACT_INT8 or target.backend != "cuda":
        return ""
    return f"int8 sums may pass 2^31 at K = {k} (beyond {EXACT_INT8}), where they are to wrap around and Triton's product saturates"
