"""`torch.compile(model, backend="epigen")`: products of the forward and the backward graph, with what follows each, as programs; the rest is Inductor's.

AOTAutograd gives both graphs with activations whole. A product's region grows over what `aten` can write as a program, as far as nothing that it reads
depends on the region from outside. What is left is taken apart as Inductor wants it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import epigen
from epigen import api, ops
from epigen.dtypes import BY_TORCH, INT8, DType
from epigen.errors import CallError, EpigenError
from epigen.training import aten, library
from epigen.training.aten import SEVERAL, Imported, Importer, Unknown, is_view, name_of

_MOST_TILES = 6
"""Tiles that one kernel reads or writes beside its operands: each holds registers and a place in shared memory."""


@dataclass
class Region:
    """A product, and what is computed of it in the same kernel. nodes: in order, the product first. imported: its program."""

    product: fx.Node
    a: fx.Node
    b: fx.Node
    nodes: list[fx.Node]
    outputs: list[fx.Node]
    imported: Imported


@dataclass(frozen=True, slots=True)
class Seen:
    """What was done with one product of a graph. shape: M, N, K as torch has them. why: it was left, where it was."""

    shape: tuple[Any, ...]
    dtype: str
    program: str
    taken: bool
    why: str


def backend(module: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """What torch.compile calls. mode: as for torch.compile. options: Inductor's, and epigen's own:

    rest: "inductor" or "eager", what runs all that is left. tune: "missing" tunes the programs at their first call, as `epigen.compile` does.
    report: called with what was done with the products of each graph, a list of `Seen`; not for graphs that Inductor has kept from before.
    Raises CallError for values that these have not.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    chosen = dict(options or {})
    rest, tune, report = chosen.pop("rest", "inductor"), chosen.pop("tune", None), chosen.pop("report", None)
    if rest not in ("inductor", "eager"):
        raise CallError(f"rest is 'inductor' or 'eager', not {rest!r}")
    if tune not in api.TUNE:
        raise CallError(f"tune is 'missing' or None, not {tune!r}")
    fusing = Fusing(tune, report)

    def eager(graph_module: fx.GraphModule, _inputs: Sequence[Any], **_options: Any) -> Any:
        fusing(graph_module.graph)
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    patches: dict[str, Any] = {**(list_mode_options(mode) if mode else {}), **chosen}
    if rest == "inductor":
        patches["post_grad_custom_pre_pass"] = fusing
    compiled: Any = compile_fx(
        module, inputs, inner_compile=eager if rest == "eager" else compile_fx_inner, config_patches=patches or None, decompositions=kept_whole()
    )
    return compiled  # type: ignore[no-any-return]


class Fusing(CustomGraphPass):
    """The pass over a graph of Inductor's, forward or backward."""

    def __init__(self, tune: str | None = None, report: Callable[[list[Seen]], object] | None = None):
        self.tune, self.report = tune, report

    def __call__(self, graph: fx.Graph) -> None:
        seen = fuse(graph, self.tune)
        if self.report is not None:
            self.report(seen)
        decompose(graph)

    def uuid(self) -> Any:
        """Inductor keeps compiled graphs by this: what was kept by another version of epigen, or for other tuning databases, is no answer."""
        return ("epigen", epigen.__version__, self.tune, get_hash_for_files((__file__, aten.__file__, ops.__file__)))


def _whole_names() -> set[str]:
    rows = {pattern.partition("(")[0] for op in ops.TABLE.values() if op.group in ("activation", "derivative") for pattern in op.aten}
    return rows | {pattern.partition("(")[0] for pattern in SEVERAL if "backward" in pattern or pattern.startswith(("elu", "softplus"))}


def kept_whole() -> dict[Any, Any]:
    """Inductor's decompositions but those of activations and their derivatives."""
    names = _whole_names()
    return {target: rule for target, rule in select_decomp_table().items() if target.name().split("::")[-1].split(".")[0] not in names}


# -- the regions of a graph


def fuse(graph: fx.Graph, tune: str | None = None) -> list[Seen]:
    """Put programs in the places of products and of what follows them. Returns what was done with each product."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    seen: list[Seen] = []
    levels = levels_of(graph)
    for product in [n for n in graph.nodes if _operands(n)]:
        a, b = _operands(product)[:2]
        shape, dtype = (*a.meta["val"].shape, b.meta["val"].shape[-1]), str(a.meta["val"].dtype)
        region, why = _region(product, levels)
        if region is not None:
            _replace(graph, region, tune)
            stable_topological_sort(graph)
            levels = levels_of(graph)
        seen.append(Seen((shape[0], shape[2], shape[1]), dtype, region.imported.text if region else "", region is not None, why))
    graph.eliminate_dead_code()
    graph.lint()
    return seen


def _operands(node: fx.Node) -> tuple[Any, ...]:
    """a and b of a product, and what addmm adds; () for any other node."""
    if node.op != "call_function":
        return ()
    if node.target is torch.ops.aten.mm.default:
        return (node.args[0], node.args[1])
    if node.target is torch.ops.aten.addmm.default and not {k: v for k, v in node.kwargs.items() if v != 1}:
        return (node.args[1], node.args[2], node.args[0])
    return ()


def _region(product: fx.Node, levels: Mapping[fx.Node, int]) -> tuple[Region | None, str]:
    """The region of a product, or why there is none."""
    a, b = _operands(product)[:2]
    dtype = a.meta["val"].dtype
    if str(dtype) not in BY_TORCH or not dtype.is_floating_point:
        return None, f"operands of {dtype}"
    nodes = _grown(product)
    nodes = _trimmed(nodes, levels)
    if len(nodes) == 1:
        return None, "nothing elementwise follows it that the next kernel could not do as well"
    outputs = _outputs(nodes)
    try:
        importer = _importer(product)
        for node in nodes[1:]:
            importer.add(node)
        imported = importer.program(outputs, dtype)
    except (Unknown, EpigenError) as error:
        return None, str(error).partition("\n")[0]
    if len([x for x in imported.leaves if x.indices == "mn"]) + len([x for x in imported.outputs if x == "mn"]) > _MOST_TILES:
        return None, "it reads and writes too many tiles"
    region = Region(product, a, b, nodes, outputs, imported)
    return (region, "") if (why := _loses(region, levels)) is None else (None, why)


def _importer(product: fx.Node) -> Importer:
    importer = Importer(product, product.meta["val"].shape, _namer(), ("m",))
    if added := _operands(product)[2:]:
        importer.plus(product, added[0])
    return importer


def _grown(product: fx.Node) -> list[fx.Node]:
    """All that can be computed with a product: what is in the language, and reads nothing that depends on the product from outside."""
    try:
        importer = _importer(product)
    except Unknown:
        return [product]
    nodes, taken, outside = [product], {product}, set[fx.Node]()
    for node in _after(product):
        sources = node.all_input_nodes
        if any(s in taken or s in outside for s in sources):
            if not any(s in outside for s in sources) and node.target is not operator.getitem:
                try:
                    importer.add(node)
                except (Unknown, EpigenError):
                    pass
                else:
                    taken.add(node)
                    nodes.append(node)
                    continue
            outside.add(node)
    return nodes


def _after(node: fx.Node) -> Iterable[fx.Node]:
    found = node.next
    while found.op != "root":
        if found.op == "call_function":
            yield found
        found = found.next


# -- what Inductor would do with it


def _joins(node: fx.Node) -> bool:
    """Whether Inductor computes a node in one kernel with what it reads."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return torch.Tag.pointwise in node.target.tags or is_view(node) or name_of(node) in _JOINED


_JOINED = frozenset("sum mean amax amin var_mean convert_element_type _to_copy permute t transpose clone alias detach logsumexp native_layer_norm".split()) | {
    pattern.partition("(")[0] for pattern in SEVERAL
}


def levels_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many kernels lie before each value, of those that nothing joins: products, attention, and so on."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = max((found[s] for s in node.all_input_nodes), default=0) + (node.op == "call_function" and not _joins(node))
    return found


def _kept(node: fx.Node, inside: Collection[fx.Node], levels: Mapping[fx.Node, int]) -> bool:
    """Whether a value has to be written to memory in any case: somebody outside reads it who is not in a kernel that could compute it anew."""
    pending = [u for u in node.users if u not in inside]
    while pending:
        user = pending.pop()
        if name_of(user) in ("permute", "t", "transpose") or is_view(user):
            pending += user.users
        elif not _joins(user) or levels[user] != levels[node]:
            return True
    return False


def _trimmed(nodes: Sequence[fx.Node], levels: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Without what the kernels after it compute as well, where that leaves no more to write.

    A sum over rows stays where it is of what is written in any case, such as a bias gradient: for any other the kernel would read tiles that Inductor's
    kernel of a norm's backward reads again (on an H100 such sums cost training steps 10 to 14 %; torch 2.11, 2026-11-25).
    """
    taken = dict.fromkeys(nodes)
    while True:
        before = len(taken)
        for node in reversed([n for n in taken if n is not nodes[0]]):
            if any(u in taken for u in node.users):
                continue
            fewer = dict.fromkeys(n for n in taken if n is not node)
            sums = name_of(node) == "sum"
            if (
                not node.users
                or is_view(node)
                or (sums and not _written(node.all_input_nodes[0], fewer, levels))
                or (not sums and not _kept(node, taken, levels) and len(_outputs(list(fewer))) <= len(_outputs(list(taken))))
            ):  # a view stays, of what is written
                taken = fewer
        if len(taken) == before:
            return list(taken)


def _written(node: fx.Node, taken: Collection[fx.Node], levels: Mapping[fx.Node, int]) -> bool:
    """Whether a value of the region goes to memory, as it is or as a view or in another dtype."""
    while (is_view(node) or name_of(node) in ("convert_element_type", "_to_copy")) and node in taken and not _kept(node, taken, levels):
        (node,) = node.all_input_nodes
    return node in taken and _kept(node, taken, levels)


def _outputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values that others than the region read; of a view what it is a view of."""
    taken = set(nodes)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if any(user not in taken for user in node.users):
            while is_view(node) and node in taken:
                node = node.args[0]  # type: ignore[assignment]
            found[node] = None
    return list(found)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(size_hint(value.numel()) * value.element_size()) if isinstance(value, torch.Tensor) else 0


def _loses(region: Region, levels: Mapping[fx.Node, int]) -> str | None:
    """Why the vendor's product and Inductor's kernel are expected to take less time than the program; None where they are not.

    Where a kernel of Inductor's reads the result in any case, what is fused spares it no launch, and it has to read what the program has written.
    """
    from epigen.codegen.lower import signature_of_contiguous
    from epigen.runtime import device
    from epigen.tuning import gpus, model
    from epigen.tuning.lookup import Found

    a, b = region.a.meta["val"], region.b.meta["val"]
    if a.device.type != "cuda" or (target := device.at_hand(a.device.index)) is None:
        return None  # nothing is known of it
    gpu = gpus.of_target(target)
    shape = (size_hint(a.shape[0]), size_hint(b.shape[1]), size_hint(a.shape[1]))
    layout = "".join("n" if t.stride(1) == 1 or t.stride(0) != 1 else "t" for t in (a, b))
    dtype = BY_TORCH[str(a.dtype)]
    inputs = tuple((leaf.name, _held(leaf.node.meta["val"])) for leaf in region.imported.leaves)
    kernel = library.kernel(region.imported.text, None)
    signature = signature_of_contiguous(region.imported.graph, dtype, dtype, inputs, shape, layout, kernel._precision_now())
    plan = kernel.plan(shape, target=target, signature=signature)
    bare = library.kernel("mm", None).plan(shape, target=target, signature=replace(signature, inputs=(), tma=tuple(t for t in signature.tma if t in "ab")))
    measured = plan.choice.record if isinstance(plan.choice, Found) and plan.choice.how in ("exact", "triton") else None
    if measured is not None and measured.baseline_us is not None:
        fused, product = measured.median_us, measured.baseline_us
    else:
        fused, product = model.estimate_us(plan.spec, plan.choice.config, shape, gpu).us, model.unfused_us(bare.spec, shape, gpu)
    per_us = gpu.achieved_gbps * 1e3
    inside = set(region.nodes)
    lazy = [n for n in region.outputs if any(u not in inside and _joins(u) and levels[u] == levels[n] for u in n.users)]
    fused += sum(map(_bytes, lazy)) / per_us
    moved = _bytes(region.product) + sum(_bytes(leaf.node) for leaf in region.imported.leaves)
    moved += sum(_bytes(n) for n in region.outputs if n not in lazy or _kept(n, inside, levels))
    unfused = product + moved / per_us + (0.0 if lazy else gpu.launch_us)
    return None if fused <= unfused else f"expected to take {fused:.1f} us, and the vendor's product with Inductor's kernel {unfused:.1f}"


def _held(value: Any) -> DType | None:
    if not isinstance(value, torch.Tensor):
        return None
    return INT8 if value.dtype == torch.bool else BY_TORCH[str(value.dtype)]


def size_hint(extent: Any) -> int:
    """An extent that varies, as it is in the first call."""
    return extent if isinstance(extent, int) else int(extent.node.hint)


def _namer() -> Callable[[fx.Node], str]:
    """Inputs are x0, x1 and so on, so that equal regions have equal texts."""
    known: dict[fx.Node, str] = {}
    return lambda node: known.setdefault(node, f"x{len(known)}")


# -- what takes their place


def _replace(graph: fx.Graph, region: Region, tune: str | None) -> None:
    """A call of the program instead of the region's nodes."""
    last = _last([region.a, region.b, *(leaf.node for leaf in region.imported.leaves)], region.product)
    n = region.product.meta["val"].shape[-1]
    with graph.inserting_after(last):
        anchor = graph.call_function(torch.ops.aten.alias.default, (region.a,))  # marks the place, and goes again
    with graph.inserting_before(anchor):
        inputs = [_presented(graph, leaf.node, leaf.indices, leaf.expand, n) for leaf in region.imported.leaves]
        call = _called(graph, library.program, (region.imported.text, tune, region.a, region.b, inputs, []))
        results = []
        for place, node in enumerate(region.outputs):
            item = _called(graph, operator.getitem, (call, place))
            shape = list(node.meta["val"].shape)
            if tuple(item.meta["val"].shape) != tuple(shape):
                item = _called(graph, torch.ops.aten.reshape.default, (item, _sizes(shape)))
            results.append(item)
    graph.erase_node(anchor)
    inside = set(region.nodes)
    for node, item in zip(region.outputs, results, strict=True):
        # views of it inside the region are made anew of the result, by the nodes that were there
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside or is_view(user))
        item.meta.setdefault("val", node.meta["val"])
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)


def _sizes(shape: Sequence[Any]) -> list[Any]:
    """At most one extent that varies is left to torch; more are not."""
    symbolic = [i for i, extent in enumerate(shape) if not isinstance(extent, int)]
    if not symbolic:
        return list(shape)
    if len(symbolic) > 1:
        raise NotImplementedError("a result with several extents that vary")
    return [-1 if i in symbolic else extent for i, extent in enumerate(shape)]


def _presented(graph: fx.Graph, node: fx.Node, indices: str, expand: tuple[int, ...] | None, n: int) -> fx.Node:
    """An input as a program takes it: [M, N], [M], [N] or []."""
    value = node.meta["val"]
    if expand is not None:
        node = _called(graph, torch.ops.aten.expand.default, (node, list(expand)))
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        node = _called(graph, torch.ops.aten.view.dtype, (node, torch.int8))
    shape = {"mn": [-1, n], "m": [-1], "n": [-1], "": []}[indices]
    found = node.meta["val"]
    if isinstance(found, torch.Tensor) and (found.dim() != len(shape)):
        node = _called(graph, torch.ops.aten.reshape.default, (node, shape))
    return node


def _called(graph: fx.Graph, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A node with the value that it would have."""
    node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    mode = torch._guards.detect_fake_mode([v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor)])
    with mode or torch.no_grad(), torch.no_grad():
        node.meta["val"] = target(*values)
    return node


def _last(nodes: Sequence[fx.Node], otherwise: fx.Node) -> fx.Node:
    order: dict[fx.Node, int] = {n: i for i, n in enumerate(otherwise.graph.nodes)}
    found = max(nodes, key=order.__getitem__)
    if found.op in ("placeholder", "get_attr"):  # behind all of them
        return max((n for n in order if n.op in ("placeholder", "get_attr")), key=order.__getitem__)
    return found


# -- what is left


def decompose(graph: fx.Graph) -> None:
    """Take apart what was kept whole and is left."""
    table = select_decomp_table()
    left = table.keys() - kept_whole().keys()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in left:
            _inline(graph, node, table)
    graph.eliminate_dead_code()


def _inline(graph: fx.Graph, node: fx.Node, table: Mapping[Any, Any]) -> None:
    flat, spec = torch.utils._pytree.tree_flatten((node.args, dict(node.kwargs)))
    given = [x for x in flat if isinstance(x, fx.Node)]

    def call(*values: Any) -> Any:
        rest = iter(values)
        args, kwargs = torch.utils._pytree.tree_unflatten([next(rest) if isinstance(x, fx.Node) else x for x in flat], spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    values = [x.meta["val"] for x in given]
    mode = torch._guards.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
    with mode or torch.no_grad(), torch.no_grad():
        body = make_fx(call, decomposition_table=table)(*values)
    copied: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "call_function":
                copied[inner] = graph.node_copy(inner, copied.__getitem__)
                copied[inner].meta = dict(inner.meta)
    (output,) = body.graph.find_nodes(op="output")
    result = output.args[0]
    if isinstance(result, tuple | list):
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(copied[result[place]])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(copied[result])
    graph.erase_node(node)
