"""The callable: checks a call, specialises once a signature, launches. Also answers CPU tensors by the reference.

A call's work is split in two. What depends on dtypes, shapes, strides and devices alone is checked and prepared once (`_Prepared`)
and found again by a key; what depends on the tensors themselves is a few pointer look-ups and the launches. Nothing here waits for
the device.
"""

from __future__ import annotations

import numbers
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigen.codegen import schedules
from epigen.codegen.lower import check_operands, describable, lower, output_dtype, signature_of_contiguous
from epigen.codegen.render import Argument, Function, Rendered, Renderer
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import TMA_BYTES, WIDE, Choice, KernelConfig, KernelSpec, Provisional, Signature, k_multiple
from epigen.dtypes import BF16, BY_TORCH, FP16, FP32, UINT8, DType
from epigen.errors import CallError, ConfigError, near_miss
from epigen.ir import graph as g
from epigen.ir import reference
from epigen.ir.graph import Graph, Node
from epigen.runtime import device, vendor
from epigen.runtime.device import Target
from epigen.runtime.loader import Loader, Resources, describe, interpreting, refusal, warm

Chooser = Callable[[KernelSpec, tuple[int, int, int], str, Target, str], Choice]
"""(spec, shape, layout, target, refused) -> Choice. layout: "nn", "nt", "tn" or "tt", how a and b lie. refused: why a config with a
main loop of Triton's did not work, "" at first."""

BACKENDS = ("triton", "interpreter", "reference")
_INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a kernel does for one signature: meaning, schedule, where the schedule came from, and the text."""

    spec: KernelSpec
    choice: Choice
    rendered: Rendered

    @property
    def source(self) -> str:
        return self.rendered.text


class Kernel:
    """A compiled epilogue program: call it with the operands and the program's inputs.

    Made by `epigen.compile`. Safe to call from several threads.
    """

    def __init__(
        self, graph: Graph, renderer: Renderer, choose: Chooser, config: KernelConfig | None = None, backend: str | None = None, precision: str | None = None,
        at_call: Chooser | None = None,
    ):  # fmt: skip
        """at_call: chooses in place of `choose` where a call of GPU tensors is about to run, and may take its time."""
        self._graph, self.renderer, self._choose, self._at_call = graph, renderer, choose, at_call or choose
        self._config, self._backend, self._precision = config, backend, precision
        self._inputs: dict[str, Node] = {n.name: n for n in graph.inputs()}
        self._names = tuple(o.name for o in graph.outputs)
        self._outputs: Any = namedtuple("Outputs", self._names) if len(self._names) > 1 else None
        self._loaders = {interpret: Loader(interpret) for interpret in (False, True)}
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        self._last: _Prepared | None = None

    @property
    def graph(self) -> Graph:
        """The typed program."""
        return self._graph

    @property
    def program(self) -> str:
        """The program in canonical text."""
        return self._graph.text

    def __repr__(self) -> str:
        inputs = ", ".join(f"{n.name}{'[' + ','.join(n.indices) + ']' if n.indices else ''}" for n in self._inputs.values())
        return f"<epigen.Kernel {self._graph.text!r} inputs: {inputs or 'none'}; outputs: {', '.join(self._names)}>"

    def __call__(self, a: Tensor, b: Tensor, /, *, out: Any = None, **inputs: Tensor | float) -> Any:
        """Run the program.

        a: [M, K]. b: [K, N]. Any strides. inputs: the program's, by name: tile [M, N], row [M], column [N], mask uint8
        [M, ceil(N / 8)], scalar a number or a tensor with one element.
        out: a tensor for a lone output; for several a mapping by name or a sequence; written and returned. It must not overlap an
        operand, or an input that is read at other places than it is written.
        Returns a tensor, or a named tuple where the program has several outputs.
        Raises CallError for names, devices, dtypes or shapes that do not fit.
        """
        outs = self._given_outputs(out)
        if any(isinstance(t, Tensor) and t.is_neg() for t in (a, b, *inputs.values())):
            # a lazily negated view holds the opposite of what it shows
            a, b, inputs = _shown(a), _shown(b), {name: _shown(value) for name, value in inputs.items()}
        key = (*map(_tensor_key, (a, b)), *((name, _tensor_key(value)) for name, value in inputs.items()), *((n, _tensor_key(t)) for n, t in outs.items()), torch.get_float32_matmul_precision())  # fmt: skip
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (a, b, *inputs.values(), *outs.values())):
            raise CallError("an argument requires grad, and a kernel has no backward of its own: call it under torch.no_grad(), or on detached tensors")
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared, results = self._first(a, b, inputs, outs)
            if prepared.plan is None or not isinstance(prepared.plan.choice, Provisional):
                self._prepared[key] = prepared
        else:
            results = prepared.run(a, b, inputs, outs)
        self._last = prepared
        return results[0] if self._outputs is None else self._outputs(*results)

    # -- what the kernel would run

    def plan(
        self, shape: tuple[int, int, int] = (4096, 4096, 4096), dtype: DType | None = None, target: Target | None = None,
        signature: Signature | None = None, layout: str = "nn",
        refused: str = "",
    ) -> Plan:  # fmt: skip
        """The plan for a problem without running it.

        shape: M, N, K. dtype: of operands and inputs. target: default the GPU at hand, else sm_90. signature: in place of dtype.
        layout: how a and b lie, n row-major and t transposed. refused: why Triton's own product is out of the question, if it is.
        """
        if signature is None:
            signature = self.signature_of(dtype or FP16, shape, layout)
        return self._planned(self._choose, shape, target or device.at_hand() or device.DEFAULT, signature, layout, refused)

    def _planned(
        self, choose: Chooser, shape: tuple[int, int, int], target: Target, signature: Signature, layout: str, refused: str, interpreted: bool = False
    ) -> Plan:
        spec = lower(self._graph, signature)
        choice = Choice(self._config, "given by the caller") if self._config else choose(spec, shape, layout, target, refused)
        if interpreted and (twin := schedules.in_triton(choice.config)) != choice.config:
            choice = Choice(twin, f"{choice.why}; in place of {choice.config}, which is in Gluon and cannot be interpreted")
        if why := unfit(choice.config, signature, target):
            raise ConfigError(why)
        return Plan(spec, choice, self.renderer.render(spec, choice.config))

    def signature_of(self, dtype: DType, shape: tuple[int, int, int] | None = None, layout: str = "nn") -> Signature:
        """The signature of a call whose operands and inputs have one dtype (inputs: fp32 beside 8-bit operands); scalars are numbers.

        shape: M, N, K of contiguous tensors; None for any K, and offsets that fit in 32 bits. layout: how a and b lie.
        """
        other = FP32 if dtype.bits == 8 else dtype
        inputs = tuple((n.name, UINT8 if n.op == g.BITS else other if n.indices else None) for n in self._inputs.values())
        if shape is None:
            return Signature(dtype, dtype, inputs, self._precision_now(), layout=layout)
        return signature_of_contiguous(self._graph, dtype, dtype, inputs, shape, layout, self._precision_now())

    def source(self, **problem: Any) -> str:
        """The generated module's text: of the last call, or of the problem that is given as to `plan`."""
        return self._plan_or_last(problem).source

    @property
    def config(self) -> KernelConfig:
        """The schedule and its values, of the last call; before any, of the default problem of `plan`."""
        return self._plan_or_last({}).choice.config

    def explain(self, **problem: Any) -> str:
        """Which config, and where it came from."""
        plan = self._plan_or_last(problem)
        return f"{plan.spec.program}\n{plan.choice.config}\n{plan.choice.why}"

    def _plan_or_last(self, problem: dict[str, Any]) -> Plan:
        if not problem and self._last is not None and self._last.plan is not None:
            return self._last.plan
        return self.plan(**problem)

    # -- preparing a call

    def _first(self, a: Tensor, b: Tensor, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> tuple[_Prepared, list[Tensor]]:
        """Prepare a call and run it, which compiles. Where Triton refuses the chosen config, the vendor's product takes its place."""
        prepared = self._prepare(a, b, inputs, outs)
        try:
            return prepared, prepared.run(a, b, inputs, outs)
        except Exception as error:
            refused = refusal(error) if prepared.plan and not prepared.interpreted else None
            if refused is None:
                raise
            if self._config is not None or prepared.plan is None or not SCHEDULES[prepared.plan.choice.config.schedule].multiplies:
                raise refused from error
        prepared = self._prepare(a, b, inputs, outs, str(refused))
        return prepared, prepared.run(a, b, inputs, outs)

    def _precision_now(self) -> str:
        return self._precision or process_precision()

    def _given_outputs(self, out: Any) -> Mapping[str, Tensor]:
        if out is None:
            return {}
        if isinstance(out, Tensor):
            out = (out,)
        if isinstance(out, Mapping):
            if unknown := out.keys() - set(self._names):
                raise CallError(f"out has no place for {', '.join(sorted(map(str, unknown)))}: the outputs are {', '.join(self._names)}")
            return out
        if not isinstance(out, Sequence):
            raise CallError(f"out is a {type(out).__name__}: pass a tensor, or for several outputs a sequence or a mapping by name")
        if len(out) != len(self._names):
            raise CallError(f"out holds {len(out)} tensors, and the program has {len(self._names)} outputs: {', '.join(self._names)}")
        return dict(zip(self._names, out, strict=True))

    def warm(self, a: Tensor, b: Tensor, /, target: Target, **inputs: Tensor | float) -> list[Resources]:
        """Compile what a call with such arguments would launch on `target`, into Triton's cache, without a GPU.

        a, b, inputs: tensors on torch's meta device, or numbers. A later call in any process finds the kernels compiled.
        Returns each kernel's resources, the main one first. Raises CompileError where Triton refuses one.
        """
        prepared = self._prepare(a, b, inputs, {}, target=target)
        values = prepared.values(a, b, inputs, prepared.results({}))
        assert prepared.plan is not None
        if not SCHEDULES[prepared.plan.choice.config.schedule].multiplies:
            values["mm_ptr"] = torch.empty(prepared.shape[:2], dtype=reference.torch_dtype(prepared.plan.spec.accumulator), device="meta")
        return [warm(x.jit, x.function, x.arguments(values), x.options, target) for x in prepared.launches]

    def _prepare(
        self, a: Tensor, b: Tensor, inputs: Mapping[str, Any], outs: Mapping[str, Tensor], refused: str = "", target: Target | None = None
    ) -> _Prepared:
        """target: compile for it; the tensors then lie on the meta device. By default for the tensors' own device."""
        m, n, k = self._check_operands(a, b)
        self._check_inputs(a, inputs, m, n)
        dtypes = {"a": BY_TORCH[str(a.dtype)], "b": BY_TORCH[str(b.dtype)]}
        outputs = []
        for output in self._graph.outputs:
            node = self._graph.nodes[output.node]
            outputs.append(_Out(output.name, node.indices, output_dtype(self._graph, output, dtypes["a"]), node.kind == g.PACKED))
        for out in outputs:
            if out.name in outs:
                _check_out(outs[out.name], out, m, n, a.device)
        backend = self._backend or ("reference" if a.device.type == "cpu" else "triton")
        if backend == "reference":
            return _Prepared(self._graph, outputs, (m, n, k), a.device)
        if backend == "triton" and not a.is_cuda and target is None:
            raise CallError(f"operand a is on {a.device}, and compiled kernels run on a GPU: move the tensors, or use backend='interpreter'")
        tensors = [a, b, *(t for t in (*inputs.values(), *outs.values()) if isinstance(t, Tensor))]
        if backend == "interpreter" and (culprit := uninterpretable(self._graph, [BY_TORCH.get(str(t.dtype)) for t in tensors], [o.dtype for o in outputs])):
            raise CallError(f"Triton's interpreter rounds to {culprit} wrongly: use fp16 or fp32 there, and {culprit} on a GPU")
        wide = any(_reach(t) >= WIDE for t in tensors) or m * n >= WIDE
        named = tuple((name, None if not isinstance(inputs[name], Tensor) else BY_TORCH[str(inputs[name].dtype)]) for name in self._inputs)
        layout = _layout(a) + _layout(b)
        tma = [name for name, t, lies in zip("ab", (a, b), layout, strict=True) if _describable(t if lies == "n" else t.T)]
        # an output that is still to be allocated will lie without gaps
        for output, out in zip(self._graph.outputs, outputs, strict=True):
            if describable(self._graph, output) and _describable(outs.get(out.name, out.empty(m, n, torch.device("meta")))):
                tma.append(out.name)
        signature = Signature(dtypes["a"], dtypes["b"], named, self._precision_now(), k_multiple(k), 64 if wide else 32, layout, tuple(tma))
        with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
            choose = self._at_call if a.is_cuda and backend == "triton" and target is None else self._choose
            target = target or (device.at_hand() if a.is_cuda else None) or device.DEFAULT
            plan = self._planned(choose, (m, n, k), target, signature, layout, refused, interpreted=backend == "interpreter")
            module = self._loaders[backend == "interpreter"].load(plan.rendered)
        functions = [getattr(module, f.name) for f in plan.rendered.functions]
        prepared = _Prepared(self._graph, outputs, (m, n, k), a.device, plan, functions, backend == "interpreter")
        # few enough in the interpreter that each has several tiles, as on a GPU
        prepared.bind(a, b, inputs, outs, _INTERPRETED_PROGRAMS if prepared.interpreted else target.multiprocessors)
        return prepared

    def _check_operands(self, a: Tensor, b: Tensor) -> tuple[int, int, int]:
        for name, tensor in (("a", a), ("b", b)):
            if not isinstance(tensor, Tensor):
                raise CallError(f"operand {name} is a {type(tensor).__name__}, and a tensor was expected")
            if tensor.dim() != 2:
                raise CallError(f"operand {name} has shape {list(tensor.shape)}, and {'[M, K]' if name == 'a' else '[K, N]'} was expected")
            if str(tensor.dtype) not in BY_TORCH:
                raise CallError(f"operand {name} is {tensor.dtype}, which epigen does not multiply")
        check_operands(BY_TORCH[str(a.dtype)], BY_TORCH[str(b.dtype)])
        if a.shape[1] != b.shape[0]:
            raise CallError(f"a is [M, K] = {list(a.shape)} and b is [K, N] = {list(b.shape)}: K differs (for a Linear layer's weight pass weight.T)")
        if a.device != b.device:
            raise CallError(f"operand a is on {a.device} and operand b on {b.device}")
        return a.shape[0], b.shape[1], a.shape[1]

    def _check_inputs(self, a: Tensor, inputs: Mapping[str, Any], m: int, n: int) -> None:
        for name in inputs:
            if name not in self._inputs:
                raise CallError(
                    f"the program has no input '{name}': {near_miss(name, self._inputs) or 'its inputs are ' + (', '.join(self._inputs) or 'none')}"
                )
        if missing := [name for name in self._inputs if name not in inputs]:
            raise CallError(f"missing input{'s' * (len(missing) > 1)}: {', '.join(f'{n}{_declared(self._inputs[n])}' for n in missing)}")
        for name, node in self._inputs.items():
            _check_input(name, node, inputs[name], m, n, a.device)


@dataclass(frozen=True, slots=True)
class _Out:
    """One output of a call."""

    name: str
    indices: str
    dtype: DType
    packed: bool

    def shape(self, m: int, n: int) -> tuple[int, ...]:
        if self.packed:
            return (m, -(-n // 8))
        return tuple({"m": m, "n": n}[i] for i in self.indices)

    def empty(self, m: int, n: int, on: torch.device) -> Tensor:
        if self.packed:
            return torch.empty((m, reference.mask_stride(n)), dtype=torch.uint8, device=on)[:, : -(-n // 8)]
        return torch.empty(self.shape(m, n), dtype=reference.torch_dtype(self.dtype), device=on)


class _Prepared:
    """A call's fixed part: what to allocate, which functions to launch with which integers, or the reference (functions None)."""

    def __init__(
        self, graph: Graph, outputs: list[_Out], shape: tuple[int, int, int], on: torch.device,
        plan: Plan | None = None, functions: Sequence[Any] | None = None, interpreted: bool = False,
    ):  # fmt: skip
        self.graph, self.outputs, self.shape, self.device = graph, outputs, shape, on
        self.plan, self.functions, self.interpreted = plan, functions, interpreted
        self.launches: list[_Launch] = []

    def bind(self, a: Tensor, b: Tensor, inputs: Mapping[str, Any], outs: Mapping[str, Tensor], multiprocessors: int) -> None:
        """Fix every integer argument and grid."""
        assert self.plan is not None and self.functions is not None
        m, n, k = self.shape
        config = self.plan.choice.config
        tiles_m, tiles_n = -(-m // config["block_m"]), -(-n // config["block_n"])
        programs = schedules.programs(config, tiles_m * tiles_n, multiprocessors)
        tiles_m, tiles_n = (tiles * parts for tiles, parts in zip((tiles_m, tiles_n), schedules.parts(config), strict=True))
        integers = {"M": m, "N": n, "K": k, "tiles_m": tiles_m, "tiles_n": tiles_n, "tiles": tiles_m * tiles_n}
        integers |= {"stride_mm_m": n, "stride_mm_n": 1}
        for name, indices, tensor in (("a", "mk", a), ("b", "kn", b)):
            integers |= {f"stride_{name}{i}": s for i, s in zip(indices, tensor.stride(), strict=True)}
        strided = [(i.name, i.indices, inputs[i.name]) for i in self.plan.spec.all_inputs if i.dtype is not None]
        for out in self.outputs:
            like = outs[out.name] if out.name in outs else out.empty(m, n, torch.device("meta"))
            strided.append((out.name, out.indices, like))
        for name, indices, tensor in strided:
            integers |= {f"stride_{name}_{i}": s for i, s in zip(indices, tensor.stride(), strict=False)}
        self.partials = {"m": (tiles_m, n), "n": (tiles_n, m), "mn": (tiles_m * tiles_n,)}
        for function, jit in zip(self.plan.rendered.functions, self.functions, strict=True):
            if function.finish is None:
                blocks = programs
            else:
                extent = {"m": m, "n": n, "": 1}[function.finish.indices]
                blocks = -(-extent // dict(function.constants)["BLOCK_X"])
            if blocks:
                self.launches.append(_Launch.of(jit, function, blocks, integers))

    def run(self, a: Tensor, b: Tensor, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> list[Tensor]:
        if self.plan is None:
            return self._reference(a, b, inputs, outs)
        results = self.results(outs)
        values = self.values(a, b, inputs, results)
        here = self.device.type == "cpu" or self.device.index == torch.cuda.current_device()
        with nullcontext() if here else torch.cuda.device(self.device), interpreting() if self.interpreted else nullcontext():
            if not SCHEDULES[self.plan.choice.config.schedule].multiplies:
                values["mm_ptr"] = vendor.product(a, b, self.plan.spec.signature.precision).contiguous()
            for launch in self.launches:
                launch(values)
        return results

    def results(self, outs: Mapping[str, Tensor]) -> list[Tensor]:
        """The caller's buffers, and new ones where it gave none."""
        m, n, _ = self.shape
        return [outs[o.name] if o.name in outs else o.empty(m, n, self.device) for o in self.outputs]

    def values(self, a: Tensor, b: Tensor, inputs: Mapping[str, Any], results: Sequence[Tensor]) -> dict[str, Any]:
        """The launches' arguments that are no fixed integers, by name."""
        assert self.plan is not None
        spec = self.plan.spec
        values: dict[str, Any] = {"a_ptr": a, "b_ptr": b}
        for item in spec.all_inputs:
            values[item.name if item.dtype is None else f"{item.name}_ptr"] = float(inputs[item.name]) if item.dtype is None else inputs[item.name]
        values |= {f"{o.name}_ptr": t for o, t in zip(self.outputs, results, strict=True)}
        for partial in spec.partials:
            values[f"{partial.name}_partial_ptr"] = torch.empty(self.partials[partial.axes], dtype=torch.float32, device=self.device)
        return values

    def _reference(self, a: Tensor, b: Tensor, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> list[Tensor]:
        results = reference.evaluate(self.graph, a, b, inputs, [o.dtype for o in self.outputs])
        return [outs[o.name].copy_(r) if o.name in outs else r for o, r in zip(self.outputs, results, strict=True)]


@dataclass(frozen=True, slots=True)
class _Launch:
    """One jit function with its grid; arguments are filled in by name."""

    jit: Any
    function: Function
    grid: tuple[int]
    names: tuple[str, ...]
    integers: Mapping[str, int]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, jit: Any, function: Function, blocks: int, integers: Mapping[str, int]) -> _Launch:
        names = tuple(a.name for a in function.arguments)
        options = dict(function.constants) | {"num_warps": function.num_warps, "num_stages": function.num_stages, "enable_fp_fusion": True}
        return cls(jit, function, (blocks,), names, {n: integers[n] for n in names if n in integers}, options)

    def __call__(self, values: Mapping[str, Any]) -> None:
        self.jit[self.grid](*self.arguments(values), **self.options)

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        return [self.integers[a.name] if a.name in self.integers else _value(a, values, self.function.dialect) for a in self.function.arguments]


# -- checks and keys


def _value(argument: Argument, values: Mapping[str, Any], dialect: str) -> Any:
    if not argument.block:
        return values[argument.name]
    tensor = values[argument.name.removesuffix("_desc") + "_ptr"]
    return describe(tensor.T if argument.transposed else tensor, argument, dialect)


def unfit(config: KernelConfig, signature: Signature, target: Target) -> str:
    """'' or why a config's schedule cannot run on a target, or on tensors that lie so."""
    schedule = SCHEDULES[config.schedule]
    if not schedule.runs_on(target.backend, target.arch):
        return f"the schedule {schedule.name} does not run on {target.name}"
    if schedule.descriptors and (names := [name for name in "ab" if name not in signature.tma]):
        return (
            f"the schedule {schedule.name} addresses operands by TMA descriptors, and {' and '.join(names)} cannot have one: "
            f"rows and the first address must be multiples of {TMA_BYTES} bytes"
        )
    return ""


def _describable(t: Tensor) -> bool:
    """Whether TMA can address a matrix as it lies; the extents may be any, but not 0."""
    rows = t.stride(0) * t.element_size()
    return t.stride(1) == 1 and rows > 0 and rows % TMA_BYTES == 0 and t.data_ptr() % TMA_BYTES == 0 and 0 not in t.shape


def _layout(t: Tensor) -> str:
    return "n" if t.stride(1) == 1 or t.stride(0) != 1 else "t"


def _shown(value: Any) -> Any:
    return value.resolve_neg() if isinstance(value, Tensor) else value


def _tensor_key(t: Any) -> Any:
    return (t.device, t.dtype, t.shape, t.stride(), t.is_neg(), t.data_ptr() % TMA_BYTES) if isinstance(t, Tensor) else type(t)


def _declared(node: Node) -> str:
    if node.op == g.BITS:
        return " (a packed mask, uint8 [M, ceil(N / 8)])"
    return f"[{','.join(node.indices)}]" if node.indices else " (a scalar)"


def process_precision() -> str:
    """What this process has chosen for fp32 operands."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def uninterpretable(graph: Graph, held: Iterable[DType | None], outputs: Iterable[DType]) -> DType | None:
    """A dtype of the call that Triton's interpreter gets wrong, if any: bf16 anywhere, and rounding to fp8 (seen in 3.6.0 and 3.9.0)."""
    rounded = [*outputs, *(n.dtype for n in graph.nodes if n.dtype is not None)]
    return next((t for t in held if t == BF16), None) or next((t for t in rounded if t == BF16 or t.is_fp8), None)


def _reach(t: Tensor) -> int:
    """Largest offset, in elements, from a tensor's first element."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)


def _check_input(name: str, node: Node, value: Any, m: int, n: int, on: torch.device) -> None:
    what = f"input '{name}'"
    if not isinstance(value, Tensor):
        if node.op == g.BITS or node.indices:
            raise CallError(f"{what} is declared as {name}{_declared(node)}, and a {type(value).__name__} was given: pass a tensor")
        if not isinstance(value, numbers.Real):
            raise CallError(f"{what} is a scalar, and a {type(value).__name__} was given: pass a number or a tensor with one element")
        try:
            float(value)
        except OverflowError:
            raise CallError(f"{what} is too large for fp32") from None
        return
    if value.device != on:
        raise CallError(f"{what} is on {value.device}, and the operands are on {on}")
    if node.op == g.BITS:
        if value.dtype != torch.uint8 or tuple(value.shape) != (m, -(-n // 8)):
            raise CallError(f"{what} is a packed mask, uint8 [M, ceil(N / 8)] = [{m}, {-(-n // 8)}], and {value.dtype} {list(value.shape)} was given")
        return
    dtype = BY_TORCH.get(str(value.dtype))
    if dtype is None or dtype == UINT8:
        raise CallError(f"{what} is {value.dtype}, which epigen does not compute with")
    wanted = tuple({"m": m, "n": n}[i] for i in node.indices)
    if (tuple(value.shape) != wanted) if node.indices else (value.numel() != 1):
        expected = f"[{', '.join(i.upper() for i in node.indices)}] = {list(wanted)}" if node.indices else "one element"
        raise CallError(f"{what} is declared as {name}{_declared(node)}, so {expected} was expected, and it has shape {list(value.shape)}")


def _check_out(t: Any, out: _Out, m: int, n: int, on: torch.device) -> None:
    shape, dtype = out.shape(m, n), reference.torch_dtype(out.dtype)
    if isinstance(t, Tensor) and t.is_neg():
        raise CallError(f"out for '{out.name}' is a lazily negated view: pass a plain tensor")
    if not isinstance(t, Tensor) or tuple(t.shape) != shape or t.dtype != dtype or t.device != on:
        found = f"{t.dtype} {list(t.shape)} on {t.device}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise CallError(f"out for '{out.name}' is {found}, and {dtype} {list(shape)} on {on} was expected")
    if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
        raise CallError(f"out for '{out.name}' is expanded: several elements share one place")
