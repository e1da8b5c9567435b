"""A call's fixed part: what to allocate, and which functions to launch with which integers. Made once for all calls that are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigen.codegen import schedules
from epigen.codegen.lower import as_computed
from epigen.codegen.render import Rendered
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Choice, KernelConfig, KernelSpec, Signature, batch_stride, parameter, period_name
from epigen.gpus import Target
from epigen.ir import reference
from epigen.ir.graph import Graph
from epigen.runtime import arguments, batches, groups, outputs, overlap, vendor
from epigen.runtime.batches import Batch
from epigen.runtime.launch import Direct, Launch, blocks
from epigen.runtime.loader import interpreting
from epigen.runtime.outputs import Held, Out
from epigen.runtime.workspace import Arrivals, Workspace, counters, parts
from epigen.shapes import Shape

_INTERPRETED_PROGRAMS = 3
"""Of a persistent grid: so few in the interpreter that each has several tiles, as on a GPU."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a kernel does for one signature: meaning, schedule, where the schedule came from, and the text."""

    spec: KernelSpec
    choice: Choice
    rendered: Rendered

    @property
    def source(self) -> str:
        return self.rendered.text

    @property
    def multiplies(self) -> bool:
        """Whether the product is the main kernel's own."""
        return SCHEDULES[self.choice.config.schedule].multiplies

    @property
    def by_vendor(self) -> bool:
        """Whether the main kernel's product is the vendor's, and none that is given."""
        return not self.multiplies and not self.spec.pointwise and not self.rendered.whole


Operands = tuple[Tensor, ...]


class Prepared:
    """What of a call follows from everything but addresses and numbers. Without a plan the reference computes it, but on the meta device, where nothing is.

    operands: of a call, a and b; none where the product is among the inputs.
    signature: where there is no plan, that of the kernel that a GPU would run. batch: where the call is of several products, each of this shape.
    """

    def __init__(
        self, graph: Graph, outs: list[Out], shape: tuple[int, int, int], on: torch.device, plan: Plan | None = None, interpreted: bool = False,
        signature: Signature | None = None, batch: Batch | None = None,
    ):  # fmt: skip
        self.graph, self.outputs, self.shape, self.device, self.plan, self.interpreted = graph, outs, shape, on, plan, interpreted
        self.signature, self.batch = signature, batch
        self.replaces = {o.name: o.replaces for o in outs}
        self.launches: list[Launch] = []
        self.workspace = Workspace()
        self.arrivals: Arrivals | None = None
        self.padded = schedules.padded(plan.spec, plan.choice.config) if plan is not None else ()
        self.compiled: list[Any] = []
        """What each launch has returned."""
        self.tried, self.launchers = False, list[Direct]()

    def bind(self, functions: Sequence[Any], operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor], target: Target) -> None:
        """Fix every integer argument and grid. functions: of the loaded module, in the plan's order. Of a batch, what its first product is given."""
        assert self.plan is not None
        m, n, k = self.shape
        config = self.plan.choice.config
        launched, count = self.launched(config)
        tiles_m, tiles_n = parts(config, launched)
        integers = {"M": m, "N": n, "K": k, "num_products": self.count, "tiles_m": tiles_m, "tiles_n": tiles_n, "tiles": tiles_m * tiles_n}
        integers |= {"stride_mm_m": n, "stride_mm_n": 1}
        for name, indices, tensor in zip("ab", ("mk", "kn"), operands, strict=False):
            integers |= {f"stride_{name}{i}": s for i, s in zip(indices, tensor.stride(), strict=True)}
        strided = [(i.name, i.indices, inputs[i.name]) for i in self.plan.spec.all_inputs if i.dtype is not None]
        nowhere = outputs.allocator(torch.device("meta"))
        for out in self.outputs:
            buffer = outs[out.name] if out.name in outs else out.held(m, n).empty(nowhere)
            strided.append((out.name, out.indices, buffer))
        for name, indices, tensor in strided:
            integers |= {f"stride_{name}_{i}": s for i, s in zip(indices, tensor.stride(), strict=False)}
            integers |= {period_name(name, i): extent for i, extent in zip(indices, tensor.shape, strict=False)}
        integers |= {batch_stride(name): stride for name, stride in (self.batch.strides if self.batch else {}).items()}
        integers |= {x.name: integers[x.of] // x.factor for f in self.plan.rendered.functions for x in f.arguments if x.of}
        self.workspace = Workspace.of(self.plan.spec, config, launched, count)
        if arriving := count * counters(self.plan.spec, config, launched):
            self.arrivals = Arrivals(arriving, self.device)
        for function, jit in zip(self.plan.rendered.functions, functions, strict=True):
            several = count if function.finish is None or function.finish.indices == "m" else self.count
            if grid := blocks(function, config, launched, _INTERPRETED_PROGRAMS if self.interpreted else target.multiprocessors, several):
                follows = bool(self.launches) or self.plan.by_vendor
                self.launches.append(Launch.of(jit, function, grid, integers, None if self.interpreted else target, follows))

    def run(self, operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> list[Tensor]:
        """One output tensor each: the caller's, or a new one. Raises CallError where one of the caller's shares memory with what else it gives."""
        overlap.check(self.replaces, operands, inputs, outs)
        if self.plan is None and self.device.type != "meta":
            return self._reference(operands, inputs, outs)
        results = self.results(outs)
        if self.plan is None:
            return results
        here = self.device.type != "cuda" or self.device.index == torch.cuda.current_device()
        with nullcontext() if here else torch.cuda.device(self.device), interpreting(self.invariant) if self.interpreted else nullcontext():
            if self.plan.rendered.whole:
                a, b = operands
                self.compute(a, b, results[0])
                return results
            values = self.values(operands, inputs, results)
            if self.plan.by_vendor:
                values["mm_ptr"] = self.product(*operands)
            self.compiled = [launch(values) for launch in self.launches]
        return results

    @property
    def problem(self) -> Shape:
        """The shape of all of it."""
        return self.shape if self.batch is None else self.batch.problem(*self.shape)

    def launched(self, config: KernelConfig) -> tuple[tuple[int, int, int], int]:
        """M, N, K of each of how many products kernels are launched for: of groups of rows of one with as many rows as their tiles may have at most."""
        if self.batch is None or self.batch.groups != "m":
            return self.shape, self.count
        (m, n, k), height = self.shape, config["block_m"]
        return ((m + min(self.count, m) * (height - 1)) // height * height, n, k), 1

    @property
    def count(self) -> int:
        """How many products there are."""
        return self.batch.count if self.batch is not None else 1

    @property
    def invariant(self) -> bool:
        """Whether a row has the same bits whatever M is."""
        signature = self._signature
        return signature is not None and signature.invariant

    @property
    def _signature(self) -> Signature | None:
        return self.plan.spec.signature if self.plan is not None else self.signature

    def held(self, out: Out) -> Held:
        """What a new output is allocated as."""
        return out.held(*self.shape[:2], self.batch.lead_of(out.indices) if self.batch is not None else ())

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The vendor's. [M, N], contiguous; of a batch with leading dimensions."""
        assert self.plan is not None
        return vendor.product(a, b, self.plan.spec.signature.precision).contiguous()

    def compute(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """The whole program, by the vendor."""
        assert self.plan is not None
        vendor.compute(a, b, out, self.plan.spec.signature.precision)

    def results(self, outs: Mapping[str, Tensor]) -> list[Tensor]:
        """The caller's buffers, and new ones where it gave none."""
        allocate = outputs.allocator(self.device)
        return [outs[o.name] if o.name in outs else self.held(o).empty(allocate) for o in self.outputs]

    def values(self, operands: Operands, inputs: Mapping[str, Any], results: Sequence[Tensor]) -> dict[str, Any]:
        """The launches' arguments that are no fixed integers, by name, but for the vendor's product. The device is the current one."""
        assert self.plan is not None
        values: dict[str, Any] = {f"{name}_ptr": t for name, t in zip("ab", operands, strict=False)}
        for item in self.plan.spec.all_inputs:
            if item.dtype is None:
                values[parameter(item.name)] = arguments.number(item.name, inputs[item.name])
            else:
                values[f"{item.name}_ptr"] = inputs[item.name]
        if self.arrivals is not None:
            values["num_arrived_ptr"] = self.arrivals.counters()
        values |= {f"{o.name}_ptr": t for o, t in zip(self.outputs, results, strict=True)}
        if self.batch is not None:
            values |= {f"{name}_ptr": self.batch.stacked(name, values[f"{name}_ptr"]) for name in self.described_in_stacks}
        lies = dict(zip("ab", self.plan.spec.signature.layout, strict=True))  # a second right operand as b
        values |= {f"{name}_padded_ptr": arguments.padded(values[f"{name}_ptr"], lies.get(name, lies["b"])) for name in self.padded}
        return values | self.workspace.tensors(self.device)

    @property
    def described_in_stacks(self) -> tuple[str, ...]:
        """The tensors of a batch that kernels address by TMA as the matrices of all products."""
        assert self.plan is not None
        return tuple(a.name.removesuffix("_desc") for f in self.plan.rendered.functions for a in f.arguments if a.block is not None and not a.ragged)

    def slots(self, names: Sequence[str]) -> dict[str, int]:
        """Where each launch's argument is in a row of all values of a call that change. names: the inputs', in the order of their slots.

        The order: operands, inputs, outputs, workspace, counters, the vendor's product.
        """
        assert self.plan is not None
        numbers = {i.name for i in self.plan.spec.all_inputs if i.dtype is None}
        order = [] if self.plan.spec.pointwise else ["a_ptr", "b_ptr"]
        order += [*(parameter(n) if n in numbers else f"{n}_ptr" for n in names), *(f"{o.name}_ptr" for o in self.outputs)]
        order += [b.name for b in self.workspace.buffers] + ["num_arrived_ptr"] * (self.arrivals is not None) + ["mm_ptr"] * self.plan.by_vendor
        return {name: place for place, name in enumerate(order)}

    def direct(self, names: Sequence[str], tensors: Sequence[Any]) -> list[Direct] | None:
        """The launches without Triton, after `run` has gone through it; None where one cannot do without. tensors: in the order of the slots."""
        if not self.tried:
            slots, adjusted = self.slots(names), list(tensors)
            if self.batch is not None:
                for name in self.described_in_stacks:
                    place = slots[f"{name}_ptr"]
                    adjusted[place] = self.batch.stacked(name, tensors[place])
            candidates = [launch.direct(c, slots, adjusted) for launch, c in zip(self.launches, self.compiled, strict=True)]
            self.launchers = [f for f in candidates if f is not None]
            self.tried = True
        return None if self.needs_triton else self.launchers

    @property
    def needs_triton(self) -> bool:
        """Whether `direct` has found a launch that cannot do without Triton, so that nobody need ask again."""
        return self.tried and len(self.launchers) != len(self.launches)

    def _reference(self, operands: Operands, inputs: Mapping[str, Any], outs: Mapping[str, Tensor]) -> list[Tensor]:
        (m, n, _), signature, graph = self.shape, self._signature, self.graph
        if signature is not None and signature.rounding:
            graph = as_computed(graph, signature)
        if self.batch is not None:
            if self.batch.groups:
                several = groups.evaluate(graph, self.batch, operands, inputs, self.shape, self.outputs, self.device)
            else:
                several = batches.evaluate(graph, self.batch.lead, operands, inputs, self.shape, self.outputs, self.device, self.invariant)
            return [outs[o.name].copy_(r) if o.name in outs else r for o, r in zip(self.outputs, several, strict=True)]
        # where the product is given, operands without a k have its extents and its device
        a, b = operands or (torch.empty((m, 0), device=self.device), torch.empty((0, n), device=self.device))
        taken, results = {_storage(t) for t in inputs.values() if isinstance(t, Tensor)}, []
        for out, result in zip(self.outputs, reference.evaluate(graph, a, b, inputs, [o.dtype for o in self.outputs], self.invariant), strict=True):
            held = out.held(m, n)
            # as a kernel writes it: without gaps, no view, and in memory of its own even where it equals an input or another output
            if _storage(result) in taken or result._is_view() or result.stride() != held.strides:
                result = held.empty(outputs.allocator(self.device)).copy_(result)
            taken.add(_storage(result))
            results.append(result)
        return [outs[o.name].copy_(r) if o.name in outs else r for o, r in zip(self.outputs, results, strict=True)]


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
