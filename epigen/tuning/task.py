"""What a tuning worker is told, and what it answers. Light: nothing here imports torch before a worker asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from epigen.codegen import sparse
from epigen.codegen.lower import check_grouped, lower, signature_of_contiguous
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Choice, KernelConfig, KernelSpec, Numerics
from epigen.db.problem import Problem, capability, problem_of
from epigen.db.records import short
from epigen.dtypes import DType
from epigen.errors import CallError
from epigen.gpus import Target
from epigen.ir import graph as g
from epigen.ir.graph import Graph
from epigen.perf import limits
from epigen.shapes import Shape, extents

if TYPE_CHECKING:
    from epigen.codegen.render import Renderer
    from epigen.runtime.kernel import Kernel
    from epigen.runtime.verify import Sample


@dataclass(frozen=True, slots=True)
class Request:
    """One problem to tune, whatever GPU it is for: a program, and calls of it whose tensors lie in memory without gaps.

    inputs: the dtype of all inputs that have indices, or one for each of them, in the graph's order; scalars are numbers. layout: how a and b lie.
    invariant: "m" where a row has to have the same bits whatever M is. groups: "m" or "k" where the products of a batch are groups along it, all with as much of it.
    sparse: the operand of whose values two of four are 0, "a" or "b"; "" where none is.
    """

    graph: Graph
    shape: Shape
    a: DType
    b: DType
    inputs: tuple[DType, ...]
    layout: str
    precision: str
    invariant: str = field(default="", kw_only=True)
    groups: str = field(default="", kw_only=True)
    sparse: str = field(default="", kw_only=True)

    def task(self, target: Target, seed: int = 0) -> Task:
        return Task(
            self.graph, self.shape, self.a, self.b, self.inputs, self.layout, self.precision, target, seed=seed, invariant=self.invariant, groups=self.groups, sparse=self.sparse,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task(Request):
    """A request on one GPU. A worker gets it pickled, and parses nothing. device: index of the GPU that measures."""

    target: Target
    device: int = 0
    seed: int = 0

    spec: KernelSpec = field(init=False, repr=False, compare=False)
    """The kernel that the calls run."""
    problem: Problem = field(init=False, repr=False, compare=False)
    """What the database calls it."""

    def __post_init__(self) -> None:
        """Raises CallError where the dtypes and the program do not fit together, where all M have one config, where the program has no groups, and where an operand cannot be sparse; ValueError
        where there are not as many dtypes as inputs."""
        named = tuple(self.input_dtypes().items())
        signature = signature_of_contiguous(self.graph, self.a, self.b, named, self.shape, self.layout, self.precision, self.groups)
        if self.groups:
            check_grouped(self.graph, self.groups, bool(self.invariant))
            if len(self.shape) != 4:
                raise CallError(f"groups along {self.groups} are several products, and {extents(self.shape)} is one: put the number of groups in front")
            if begun := next((n.name for n in self.graph.inputs() if self.groups in g.shared_along(n)), ""):
                raise CallError(
                    f"input '{begun}' has one value for several of {self.groups}, all groups' counted on: no sample is made of such, and none is tuned"
                )
        spec = lower(self.graph, replace(signature, invariant=bool(self.invariant), sparse=self.sparse))
        if self.sparse:
            sparse.check(self.graph, spec.signature, self.shape)
        if limits.one_config(spec, self.target):
            raise CallError(
                f'invariant="{self.invariant}": on {self.target.name} all M of {short(self.graph.text)} {self.a} have one config, since two might add up in another order: '
                "there is nothing to tune"
            )
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "problem", problem_of(self.graph, spec, self.shape, self.target.part, capability(self.target)))

    def input_dtypes(self) -> dict[str, DType | None]:
        """Each named input's, as a Signature holds them."""
        dense = [n.name for n in self.graph.inputs() if n.op != g.BITS and n.indices]
        each = dict(zip(dense, self.inputs if len(self.inputs) > 1 else self.inputs * len(dense), strict=True))
        return {n.name: g.given_as(n) or each.get(n.name) for n in self.graph.inputs()}

    def sample(self, device: str, shape: Shape | None = None) -> Sample:
        """Arguments of a call, at the task's shape or another; a sparse operand with its zeros."""
        from epigen.runtime import verify

        held = {name: dtype for name, dtype in self.input_dtypes().items() if dtype is not None}
        several = verify.sample(self.graph, shape or self.shape, self.a, self.b, held, seed=self.seed, device=device, layout=self.layout)
        made = verify.pruned(several, self.sparse) if self.sparse and device != "meta" else several
        return replace(made, groups=self.groups)

    def given(self, sample: Sample, config: KernelConfig) -> Sample:
        """What a candidate is called with: of a sparse operand its dense values, or where the vendor multiplies it itself. sample: not on the CPU."""
        if not self.sparse or SCHEDULES[config.schedule].multiplies:
            return sample
        from epigen.runtime import semi_structured

        if not sample.a.is_meta:
            a, b = semi_structured.compressed(sample.a, sample.b, self.sparse)
            return replace(sample, a=a, b=b)
        (rows, columns), dtype = (sample.a if self.sparse == "a" else sample.b.t()).shape, sample.a.dtype
        held = semi_structured.Compressed.without_contents(rows, columns, dtype).tensor(self.sparse == "b")
        return replace(sample, **{self.sparse: held})

    def kernel(self, renderer: Renderer, config: KernelConfig) -> Kernel:
        """The program's kernel with one config."""
        from epigen.runtime.kernel import Kernel

        choice = Choice(config, "a candidate")
        return Kernel(self.graph, renderer, lambda *_: choice, config, "triton", Numerics(self.precision, bool(self.invariant)))


_QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution


def median_error(spread: float, samples: int) -> float:
    """The standard error of the median of so many samples that scatter normally. spread: between their quartiles."""
    return math.sqrt(math.pi / 2 / samples) * spread / _QUARTILES


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trial. median_us, spread_us: of the timed samples (spread: between the quartiles); 0 where nothing was timed."""

    kind: str
    median_us: float = 0.0
    spread_us: float = 0.0
    samples: int = 0
    detail: str = ""

    @property
    def error_us(self) -> float:
        """The standard error of the median; 0 where it is not known how many samples there were."""
        return median_error(self.spread_us, self.samples) if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """The vendor's product alone, and with one pointwise pass after it, in microseconds; 0 where it could not be timed."""

    mm_us: float
    unfused_us: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Configs and the vendor's product, timed interleaved. outcomes: in the order of the configs. untimed: what of the baseline could not be timed, and why."""

    outcomes: tuple[Outcome, ...]
    baseline: Baseline
    untimed: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """Check and time one config. limit_us: the best so far, or 0."""

    config: KernelConfig
    limit_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Compare:
    """Time configs that have been checked, the vendor's product alone and with one pointwise pass, interleaved."""

    configs: tuple[KernelConfig, ...]


Job = Measure | Compare
"""What the measuring worker is asked."""
