"""`torch.compile(model, backend="epigen")`: products of the forward and the backward graph, with what follows each, as programs; the rest is Inductor's.

AOTAutograd gives both graphs with activations whole (`whole`). `regions` finds what belongs to each product, and `rewrite` puts a program's call in its place.
What is left is taken apart as Inductor wants it. What was done with each product is kept for `epigen.report`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from epigen import __version__, api, settings
from epigen.db.lookup import Index
from epigen.errors import CallError
from epigen.ir.graph import OPERANDS
from epigen.training import aten, behind, convolutions, elements, joint, looped, regions, rewrite, stacked, whole, wrapper
from epigen.training.aten import Leaf
from epigen.training.expected import UNTUNED, Terms
from epigen.training.regions import Left, Levels, Product, Region
from epigen.training.report import Call, GraphSeen, Lying, Record, Seen, in_graph, record_of

OWN = ("rest", "tune", "report")


def backend(module: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """What torch.compile calls. mode: as for torch.compile. options: Inductor's, and epigen's own:

    rest: "inductor" or "eager", what runs all that is left. tune: "missing" tunes the programs at their first call, as `epigen.compile` does.
    report: called with what was done with the products of each graph, a list of `Seen`; not for graphs that Inductor has kept from before.
    Raises CallError for values that these have not, and for options that neither epigen nor Inductor has.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    own, patches = _options(mode, options or {})
    rest, tune, report = own.get("rest", "inductor"), own.get("tune"), own.get("report")
    caller = inspect.currentframe()
    record = record_of(caller.f_back.f_locals.get("self") if caller is not None and caller.f_back is not None else None)
    fusing = Fusing(tune, record, report, _users("post_grad_custom_pre_pass", patches) if rest == "inductor" else [])
    patches["joint_custom_pre_pass"] = Packing(tune, _users("joint_custom_pre_pass", patches))

    def by_inductor(graph_module: fx.GraphModule, given: Sequence[Any], **graph_options: Any) -> Any:
        graph_options.pop("get_decomp_fn", None)  # once the pass is through Inductor goes by its own table, and keeps no graph that came with another
        with fusing.named(graph_options):
            return compile_fx_inner(graph_module, given, **graph_options)

    def by_torch(graph_module: fx.GraphModule, _given: Sequence[Any], **graph_options: Any) -> Any:
        for part in [m for m in graph_module.modules() if isinstance(m, fx.GraphModule)]:  # itself, and what it calls as one operation, such as branches
            view_to_reshape(part)  # as Inductor does: what takes a value's place may lie in memory otherwise
            before = rewrite.results_of(part.graph)
            with fusing.named(graph_options):
                fusing(part.graph)
            rewrite.lie_as_before(part.graph, before)
            part.recompile()
        return make_boxed_func(graph_module.forward)

    if rest == "inductor":
        wrapper.register()
        patches["post_grad_custom_pre_pass"] = fusing
    else:
        patches["fx_graph_cache"] = False  # which holds what Inductor has made of the same graph
    before = fusing.graphs
    with config.patch(patches):  # such as fallback_random, by which random numbers are torch's own
        decompositions = whole.kept_whole()
    compiled: Any = compile_fx(
        module, inputs, inner_compile=by_inductor if rest == "inductor" else by_torch, config_patches=patches, decompositions=decompositions
    )
    if fusing.graphs == before:
        record.restored += 1
    return compiled  # type: ignore[no-any-return]


def _options(mode: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """epigen's own options, and Inductor's, those of the mode among them."""
    from torch._inductor import config, list_mode_options

    own = {name: value for name, value in given.items() if name in OWN}
    if (rest := own.get("rest", "inductor")) not in ("inductor", "eager"):
        raise CallError(f"rest is 'inductor' or 'eager', not {rest!r}")
    if (tune := own.get("tune")) not in api.TUNE:
        raise CallError(f"tune is 'missing' or None, not {tune!r}")
    if (report := own.get("report")) is not None and not callable(report):
        raise CallError(f"report is called with what was done with each graph's products, and a {type(report).__name__} was given")
    modes = list_mode_options()
    if mode is not None and mode != "default" and mode not in modes:
        raise CallError(f"mode is one of {', '.join(map(repr, modes))}, not {mode!r}")
    known = config.get_config_copy()
    patches = dict(modes[mode]) if mode in modes else {}
    for name, value in given.items():
        if name not in OWN:
            name = name.replace("-", "_")
            if name not in known:
                close = difflib.get_close_matches(name, [*OWN, *known], 1)
                hint = f"did you mean {close[0]!r}?" if close else f"epigen has {', '.join(OWN)}, and torch._inductor.list_options() names Inductor's"
                raise CallError(f"neither epigen nor Inductor has an option {name!r}: {hint}")
            patches[name] = value
    return own, patches


def _users(name: str, patches: Mapping[str, Any]) -> list[Any]:
    """The user's own passes of this kind. torch 2.11 takes one pass and no list of them, so that epigen's calls these."""
    from torch._inductor import config

    passes = patches[name] if name in patches else getattr(config, name)
    return [] if passes is None else list(passes) if isinstance(passes, list | tuple) else [passes]


class Pass(CustomGraphPass):
    """One of epigen's over a graph of Inductor's. tune: as of `epigen.compile`. first: the user's own passes, which come before it."""

    def __init__(self, tune: str | None = None, first: Sequence[Any] = ()):
        self.tune, self.first = tune, first

    def __call__(self, graph: fx.Graph) -> None:
        for own in self.first:
            own(graph)
        self.run(graph)

    def run(self, graph: fx.Graph) -> None:
        raise NotImplementedError

    def uuid(self) -> Any:
        """Inductor keeps compiled graphs by this: what was kept by another epigen, or for other tuning databases, is no answer. None: it keeps none."""
        firsts = tuple(own.uuid() if isinstance(own, CustomGraphPass) else None for own in self.first)
        if None in firsts:
            return None
        return ("epigen", __version__, self.tune, _sources(), _databases(), elements.precision(), firsts)


class Packing(Pass):
    """The pass over forward and backward as one graph, before they are parted."""

    def run(self, graph: fx.Graph) -> None:
        joint.keep_compared(graph)
        terms = Terms(self.tune)
        joint.part_stacked(graph, terms)
        behind.mark(graph)
        joint.keep_bits(graph, terms)
        if self.tune is None:  # else it would be tuned for, which takes seconds a program
            joint.compile_ahead(graph, terms)


class Fusing(Pass):
    """The pass over either. graphs: how many it has seen."""

    def __init__(
        self, tune: str | None = None, record: Record | None = None, report: Callable[[list[Seen]], object] | None = None, first: Sequence[Any] = ()
    ):  # fmt: skip
        super().__init__(tune, first)
        self.record, self.report = record or Record(), report
        self.graphs, self.kind = 0, ""

    @contextmanager
    def named(self, graph_options: Mapping[str, Any]) -> Iterator[None]:
        """While a graph is compiled the pass knows which it is. graph_options: what AOTAutograd says of it."""
        self.kind = "backward" if graph_options.get("is_backward") else "inference" if graph_options.get("is_inference") else "forward"
        try:
            yield
        finally:
            self.kind = ""

    def run(self, graph: fx.Graph) -> None:
        self.graphs += 1
        joint.settle(graph, Terms(self.tune))
        before = regions.moved(graph)
        seen = in_graph(fuse(graph, Terms(self.tune)), self.kind)
        after = regions.moved(graph)
        self.record.graphs.append(GraphSeen(seen, sum(before.values()), sum(after.values()), sum(n for node, n in after.items() if rewrite.is_program(node))))
        if self.report is not None:
            self.report(list(seen))
        whole.decompose(graph)


@functools.cache
def _sources() -> str:
    """A digest of all that decides what a program becomes: epigen's own code and its templates."""
    package = Path(__file__).parent.parent
    return _digest([*package.rglob("*.py"), *settings.templates_dir().rglob("*")])


def _databases() -> str:
    return _digest_of(api.database().index())


@functools.lru_cache(maxsize=1)
def _digest_of(_index: Index) -> str:
    """Inductor asks for each graph several times; a database that has changed has another index."""
    return _digest({file for file, _record in api.database().records()})


def _digest(files: Any) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


# -- a graph


def fuse(graph: fx.Graph, terms: Terms = UNTUNED) -> list[Seen]:
    """Put programs in the places of products and of what follows them. Returns what was done with each product."""
    seen: dict[fx.Node, list[Seen]] = {}
    standing, apart = convolutions.as_products(graph)
    loops = looped.as_products(graph)
    parted = stacked.as_products(graph)
    left = {node: list(several) for node, several in itertools.groupby(apart, lambda each: each.node)}
    levels = regions.levels_of(graph)
    wholes, other_half = {each.original for each in parted}, {made: other for each in parted for made, other in (each.made, each.made[::-1])}
    nodes = [node for node in regions.products(graph) if node not in wholes]
    regions.compile_ahead(nodes, levels, terms)
    hints, together = {node: _hints(node) for node in (*nodes, *wholes)}, dict[fx.Node, Seen]()
    for node in sorted([*nodes, *left]):
        if node in left:
            seen[node] = [Seen(_hinted(each.shape), str(each.dtype), "", each.why, False, False, None) for each in left[node]]
            continue
        if node in together:
            seen[node] = [together[node]]
            continue
        seen[node], taken = _taken(graph, node, hints[node], terms, levels, other_half)
        together |= dict.fromkeys(taken[1:], seen[node][0])  # which has the same extents
    for each in stacked.settle(graph, parted):
        one, other = each.made
        del seen[other]
        whole, _ = _taken(graph, each.original, hints[each.original], terms, regions.levels_of(graph), {})
        seen[one] = whole if whole[0].taken else [dataclasses.replace(seen[one][0], shape=hints[each.original], times_us=None)]
    convolutions.settle(graph, standing)
    looped.settle(graph, loops)
    graph.eliminate_dead_code()
    graph.lint()
    return [one for several in seen.values() for one in several]


def _taken(
    graph: fx.Graph, node: fx.Node, shape: tuple[int | None, ...], terms: Terms, levels: Levels, other_half: Mapping[fx.Node, fx.Node]
) -> tuple[list[Seen], list[fx.Node]]:
    """What was done with one product, and which were taken with it. other_half: of a part of a product the other one, without which it is left."""
    product = regions.product_of(node)  # whose operands may be results of the programs before it
    outcome = Left(product) if isinstance(product, str) else regions.region_of(product, levels, terms)
    if isinstance(outcome, Region) and any(other_half.get(n, n) not in outcome.product.nodes for n in outcome.product.nodes):
        outcome = Left("it is a half of a product, of which no program computes both", True)
    dtype = str(node.meta["val"].dtype if isinstance(product, str) else product.a.meta["val"].dtype)
    call = _call(outcome, terms.tune) if isinstance(outcome, Region) else None
    if isinstance(outcome, Region):
        try:
            behind.keep(graph, outcome, levels)
            rewrite.replace(graph, outcome, terms.tune, levels)
        except NotImplementedError as error:
            outcome = Left(str(error), True)
    groups = (aten.size_hint(product.ends.meta["val"].shape[0]) or 0) if isinstance(product, Product) and product.ends is not None else 0
    if isinstance(outcome, Left):
        return [Seen(shape, dtype, "", outcome.why, outcome.neighbour, outcome.absorbed, outcome.times, groups=groups)], []
    followed = outcome.nodes != outcome.product.nodes or outcome.product.adds_apart
    return [Seen(shape, dtype, outcome.imported.text, "", followed, False, _of_one(outcome), call=call, groups=groups)], outcome.product.nodes


def _of_one(region: Region) -> tuple[float, float] | None:
    """A region's times, of each of its products a share."""
    count = len(region.product.nodes)
    return None if region.times is None else (region.times[0] / count, region.times[1] / count)


def _hints(node: fx.Node) -> tuple[int | None, ...]:
    a, b = regions.operands(node)
    return _hinted(Product(node, a, b).shape)


def _hinted(shape: tuple[Any, ...]) -> tuple[int | None, ...]:
    return tuple(map(aten.size_hint, shape))


def _call(region: Region, tune: str | None) -> Call | None:
    """What a region's program is called with, where nothing of it is known at run time alone."""
    product = region.product
    call = regions.program_call(product, region.imported)
    if call is None:
        return None
    *batch, m, n, k = call.shape
    if product.groups:  # of all of them
        m, n, k = (regions.hinted(product.shape) or call.shape)[-3:]
    extents, dtype = dict(zip("bmnk" if batch else "mnk", (*batch, m, n, k), strict=True)), product.a.meta["val"].dtype
    lies = {"kn": call.layout[1]}

    def shape(indices: str) -> tuple[int, ...]:
        """Of operands, of which groups have those along which they are in one."""
        lead = batch if batch and not (product.groups and product.groups in indices) else []
        return (*lead, *(extents[i] for i in indices))

    def of(leaf: Leaf) -> tuple[int, ...]:
        return shape("kn") if leaf.indices == "kn" else leaf.shape(extents)

    inputs = tuple((leaf.name, _lying(of(leaf), lies.get(leaf.indices, "n"), leaf.node.meta["val"].dtype)) for leaf in region.imported.leaves)
    a, b = (_lying(shape(indices), layout, dtype) for indices, layout in zip(OPERANDS.values(), call.layout, strict=True))
    return Call(tune, a, b, inputs, call.options, batch[0] if product.groups else 0)


def _lying(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Lying:
    """Without gaps. layout: of matrices, as `codegen.spec.LAYOUTS` has it of operands."""
    if layout == "t":
        *batch, rows, columns = shape
        stride = _lying((*batch, columns, rows), "n", dtype).stride
        return Lying(shape, (*stride[:-2], stride[-1], stride[-2]), dtype)
    return Lying(shape, tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))), dtype)
