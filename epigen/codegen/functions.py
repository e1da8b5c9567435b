"""The functions of a kernel's module, and their arguments: the main kernel, and a finishing kernel for each set of indices that reductions leave.

The templates print these lists, and what launches a kernel passes arguments by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from epigen.codegen import from_bytes, schedules
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KNOWN, Finish, Input, KernelConfig, KernelSpec, Signature, Store, batch_stride, counted, parameter, period_name, stride_name
from epigen.dtypes import FP32, INT32, UINT8, DType
from epigen.ir.graph import GROUPS

_TRITON_TYPES = {"fp8e4m3": "fp8e4nv", "fp8e5m2": "fp8e5", "int8": "i8", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "i1"}

PDL, PTX = "PDL", "PTX"
"""The compile-time argument that says whether a kernel may be launched while the one before it still runs, for whose end it waits by itself."""

# elements of a reduction's length, and of what it leaves, that one step of a finishing kernel holds
_FINISH_TILES = {"n": (128, 32), "m": (128, 32), "": (1024, 1)}


@dataclass(frozen=True, slots=True)
class Argument:
    """A kernel's argument. type: as in Triton's signatures ("*fp16", "i32", "fp32"). about: shape, dtype and role, for the header.

    block: of a tensor that the kernel addresses by TMA, rows and columns of what it moves at a time, and in front of them the 1 of a batch's
    products, or both of a ragged descriptor; its name ends in `_desc`, a pointer's in `_ptr`. transposed: it is the tensor's transpose that has contiguous rows, and is so
    addressed. padded: it is a copy of the tensor whose rows are aligned. ragged: its rows are all groups', and what is moved ends with a group's (groups.py).
    of, factor: an integer's value is that of `of` over `factor`, if `of` is not empty; else factor is what is known to divide it.
    """

    name: str
    type: str
    about: str = ""
    block: tuple[int, ...] | None = None
    transposed: bool = False
    padded: bool = False
    ragged: bool = False
    of: str = ""
    factor: int = KNOWN


@dataclass(frozen=True, slots=True)
class Function:
    """One kernel of a module. finish: None for the main kernel. constants: its compile-time arguments, but for the last, PDL and before it PTX, which depend
    on where it runs.  ptx: whether there is a PTX, for what has some of the text in it. dialect: "triton" or "gluon". steps: of a batch, the pointers of which each product has a place of its own, and how far these are apart.
    contracted: whether the compiler may make one rounded operation of a product and the sum that it goes into. It does so by how many sums there are, which is
    how many rows a thread has: of `mm + bias * alpha` with tiles of 128 rows, and not with 16 (Triton 3.9, sm_90, 2026-11), so that the bits differ.
    """

    name: str
    arguments: tuple[Argument, ...]
    constants: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int
    finish: Finish | None
    dialect: str = "triton"
    steps: tuple[tuple[str, str], ...] = ()
    contracted: bool = True
    ptx: bool = False

    @property
    def names(self) -> list[str]:
        """Of all parameters, in their order."""
        return [*(a.name for a in self.arguments), *(name for name, _ in self.constants), *[PTX] * self.ptx, PDL]

    @property
    def extents(self) -> list[str]:
        """The integers that are no strides: what the kernel counts up to."""
        return [name for a in self.arguments if a.type == "i32" and not (name := a.of or a.name).startswith("stride_")]


def functions(spec: KernelSpec, config: KernelConfig) -> tuple[Function, ...]:
    """The main kernel first; none where the vendor's library computes all of the program."""
    if not SCHEDULES[config.schedule].multiplies and spec.bare_product:
        return ()
    return _main(spec, config), *(_finish(spec, config, f) for f in after(spec, config))


def units(spec: KernelSpec, config: KernelConfig) -> dict[str, frozenset[str]]:
    """Which packed masks the main kernel accesses in words of 32 columns, and which in bytes."""
    masks = frozenset([i.name for i in spec.inputs if i.packed] + [s.name for s in spec.stores if s.packed])
    in_bytes = masks & frozenset(spec.signature.bytewise) if config["block_n"] // schedules.tile_parts(config)[1] >= 32 else masks
    return {"in_words": masks - in_bytes, "in_bytes": in_bytes}


def inside(spec: KernelSpec, config: KernelConfig) -> list[Finish]:
    """The reductions that the main kernel completes."""
    return [f for f in spec.finishes if schedules.finished_inside(f, config)]


def after(spec: KernelSpec, config: KernelConfig) -> list[Finish]:
    """Those that kernels of their own complete."""
    return [f for f in spec.finishes if not schedules.finished_inside(f, config)]


def _type(dtype: DType) -> str:
    return _TRITON_TYPES.get(dtype.name, dtype.name)


def _pointer(name: str, dtype: DType, about: str) -> Argument:
    return Argument(f"{name}_ptr", f"*{_type(dtype)}", about)


def _with_descriptor(
    name: str,
    dtype: DType,
    block: tuple[int, int],
    indices: str | tuple[str, ...],
    leading: int,
    transposed: bool = False,
    role: str = "",
    padded: bool = False,
) -> Argument:
    """A tensor by its TMA descriptor. block, indices: of the tensor, before it is transposed. leading: as of `schedules.leading`."""
    if transposed:
        block, indices = (block[1], block[0]), indices[::-1]
    whose = f"{' of the transpose' * transposed}{' of a copy with aligned rows' * padded}"
    ragged = leading == schedules.RAGGED_LEADING
    about = f"{_shape(indices)} {dtype}{role}: a {'ragged ' * ragged}TMA descriptor{whose}, {block[0]} x {block[1]} at a time"
    moved = (1,) * leading + block
    return Argument(f"{name}_desc", f"tensordesc<{_type(dtype)}[{', '.join(map(str, moved))}]>", about, moved, transposed, padded, ragged)


def _shape(indices: str | tuple[str, ...]) -> str:
    """indices: or what the extents are called."""
    return f"[{', '.join(i.upper() for i in indices)}]" if indices else "[1]"


def _input(item: Input) -> Argument:
    if item.dtype is None:
        return Argument(parameter(item.name), "fp32", "a number")
    if item.packed:
        return _pointer(item.name, UINT8, "[M, ceil(N / 8)] uint8, bit n % 8 of byte n // 8 is column n")
    return _pointer(item.name, item.dtype, f"[{', '.join(item.extents)}] {item.dtype}" if item.indices else f"[1] {item.dtype}")


def _output(store: Store) -> Argument:
    if store.packed:
        return _pointer(store.name, UINT8, "[M, ceil(N / 8)] uint8, written: bit n % 8 of byte n // 8 is column n")
    if store.block > 1:
        return _pointer(store.name, store.dtype, f"[M, ceil(N / {store.block})] {store.dtype}, written: one value for each {store.block} columns")
    return _pointer(store.name, store.dtype, f"{_shape(store.indices)} {store.dtype}, written")


def _strides(items: Iterable[Input | Store]) -> list[Argument]:
    """One a stored index; none for what is passed by value or has one element."""
    return [Argument(stride_name(i.name, index), "i32") for i in items if i.dtype is not None for index in i.indices]


def _periods(items: Iterable[Input | Store]) -> list[Argument]:
    """The extents after which inputs begin anew."""
    return _integers(*(period_name(i.name, index) for i in items if isinstance(i, Input) for index in i.periodic))


def _integers(*names: str) -> list[Argument]:
    return [Argument(n, "i32") for n in names]


def _factored(arguments: Iterable[Argument], signature: Signature) -> tuple[Argument, ...]:
    """The arguments, each once. Those that Triton would take to be of any value are passed divided, so that the kernel can say of what
    they are a multiple."""
    factored = []
    for argument in dict.fromkeys(arguments):
        factor = dict(signature.factors).get(argument.name, KNOWN)
        factored.append(
            Argument(f"{argument.name}_{factor}", "i32", of=argument.name, factor=factor) if 1 < factor < KNOWN else replace(argument, factor=factor)
        )
    return tuple(factored)


def _main(spec: KernelSpec, config: KernelConfig) -> Function:
    schedule, sig, parts = SCHEDULES[config.schedule], spec.signature, schedules.tile_parts(config)
    second = [spec.second] if spec.second else []
    of_operands, of_tiles = schedules.leading(sig, "k"), schedules.leading(sig, "m")
    if schedule.descriptors:
        block_k, copied = config["block_k"], schedules.padded(spec, config)
        operands = [
            _with_descriptor("a", sig.a, (config["block_m"] // parts[0], block_k), "mk", of_operands, sig.layout[0] == "t", padded="a" in copied),
            _with_descriptor(
                "b", sig.b, (block_k // (2 if sig.packed else 1), config["block_n"]), "kn", of_operands, sig.layout[1] == "t", padded="b" in copied
            ),
            *(_with_descriptor(i.name, sig.b, (block_k, config["block_n"]), "kn", of_operands, sig.layout[1] == "t", padded=i.name in copied) for i in second),
        ]
        sizes = _integers("M", "N", "K", *(["num_products"] if sig.batched else []))
    elif spec.pointwise:
        operands, sizes = [], _integers("M", "N")
    elif schedule.multiplies:
        operands = [
            _pointer("a", sig.a, f"[M, K] {sig.a}"),
            _pointer("b", sig.b, f"{ {'': '[K, N]', 'k': '[K / 2, N]', 'n': '[K, N / 2]'}[sig.packed] } {sig.b}"),
        ]
        sizes = _integers("M", "N", "K", *["num_products"] * (sig.grouped == "m"), "stride_am", "stride_ak", "stride_bk", "stride_bn")
    else:
        operands = [_pointer("mm", spec.accumulator, f"[M, N] {spec.accumulator}, the product of a and b")]
        sizes = _integers("M", "N", *["K"] * spec.counts_k, "stride_mm_m", "stride_mm_n")
    rows, columns = (f"ceil({e} / BLOCK_{e}){f' * {count}' if count > 1 else ''}" for e, count in zip("MN", parts, strict=True))
    partials = []
    for p in spec.partials:
        shape = {"m": f"[{rows}, N]", "n": f"[{columns}, M]", "mn": f"[{rows} * {columns}]"}[p.axes]
        partials.append(_pointer(f"{p.name}_partial", FP32, f"{shape} fp32, written: one {p.row} a {'part of a ' * (parts != (1, 1))}tile"))
    part = (config["block_m"] // parts[0], config["block_n"] // parts[1])
    completing = inside(spec, config)
    completed = [o for f in completing for o in f.stores]
    inputs = [*(i for o in spec.of_operands for i in o.inputs), *spec.inputs, *(i for f in completing for i in f.inputs)]
    inputs = inputs if schedule.descriptors else [*second, *inputs]
    tma_loaded, tma_stored, scales = schedules.tma_loaded(spec, config), schedules.tma_stored(spec, config), schedules.scales(spec, config)
    pointed: list[Input | Store] = [
        *(i for i in inputs if i.name not in tma_loaded and i not in scales),
        *(s for s in spec.stores if s.name not in tma_stored),
        *spec.vectors,
        *completed,
    ]
    with_descriptor = {i.name: _with_descriptor(i.name, i.dtype, part, i.indices, of_tiles) for i in inputs if i.dtype is not None and i.name in tma_loaded}
    with_descriptor |= {i.name: _with_descriptor(i.name, i.dtype, (1, config["block_n"]), i.extents, of_operands) for i in scales if i.dtype is not None}
    with_descriptor |= {s.name: _with_descriptor(s.name, s.dtype, part, s.indices, of_tiles, role=", written") for s in spec.stores if s.name in tma_stored}
    if schedules.splits(config) > 1:
        held = "[tiles * SPLITS, BLOCK_M, BLOCK_N]"
        partials.append(_pointer("split_partial", spec.accumulator, f"{held} {spec.accumulator}, written: sums over parts of k"))
    if counted := " + ".join(arrivals(spec, config)):
        partials.append(_pointer("num_arrived", INT32, f"[{counted}] int32, written: 0 before and after"))
    # the bytes of a word lie side by side
    fixed = {stride_name(name, "n") for name in units(spec, config)["in_words"]}
    strides = [*_periods(pointed), *(s for s in _strides(pointed) if s.name not in fixed)]
    addressed = [
        *(with_descriptor.get(i.name) or _input(i) for i in inputs),
        *(with_descriptor.get(s.name) or _output(s) for s in (*spec.stores, *spec.vectors, *completed)),
    ]
    steps: dict[str, str] = {}
    if sig.batched:
        own = [a.name.removesuffix("_ptr") for a in operands if a.block is None and _is_apart(sig, {"a": "mk", "mm": "mn"}.get(a.name[:-4], "kn"))]
        own += [i.name for i in pointed if (isinstance(i, Store) or (i.dtype is not None and i.indices)) and _is_apart(sig, i.indices)]
        strides += _integers(*map(batch_stride, own))
        steps = {f"{name}_ptr": batch_stride(name) for name in own}
        count = counts(config)
        each = {"m": f"{count['parts_m']} * N", "n": f"{count['parts_n']} * M", "mn": f"{count['parts_m']} * {count['parts_n']}"}
        steps |= {f"{p.name}_partial_ptr": each[p.axes] for p in spec.partials if sig.grouped != "m"}
        if schedules.splits(config) > 1:
            steps["split_partial_ptr"] = f"{count['tiles']} * (SPLITS * BLOCK_M * BLOCK_N)"
        if counters := [count[name] for name in arrivals(spec, config)]:
            steps["num_arrived_ptr"] = counters[0] if len(counters) == 1 else f"({' + '.join(counters)})"
    arguments = (*operands, *_ends(sig), *addressed, *partials, *sizes, *strides)
    stages = dict(config.values).get("num_stages", 1)
    name = spec.name if schedule.multiplies else f"{spec.name}_epilogue"
    constants, warps = schedules.constants(config), schedules.warps(config)
    return Function(
        name, _factored(arguments, sig), constants, warps, stages, None, schedule.dialect, tuple(steps.items()), sig.contracted, from_bytes.used(spec, config)
    )


def _ends(sig: Signature) -> list[Argument]:
    return [_pointer(GROUPS, INT32, f"[G] int32, where each group {'of rows' if sig.grouped == 'm' else 'along k'} ends")] if sig.grouped else []


def _is_apart(sig: Signature, indices: str) -> bool:
    """Whether a tensor of a batch has a place of its own for each product: what has rows has all groups' one after another."""
    return not (sig.grouped and sig.grouped in indices)


def arrivals(spec: KernelSpec, config: KernelConfig) -> list[str]:
    """What blocks count of which they are the last to arrive, in the counters' order: the parts along k of "tiles", or of what each of several
    "groups" of warps has of them, or the parts of tiles along the other index, of which there are counters "parts_n" or "parts_m", or all, "1"."""
    split = ["groups" if schedules.sharing(config) > 1 else "tiles"] if schedules.splits(config) > 1 else []
    return split + [{"n": "parts_n", "m": "parts_m", "": "1"}[f.indices] for f in inside(spec, config)]


def counts(config: KernelConfig) -> Mapping[str, str]:
    """How many counters, as text, each of `arrivals` has."""
    down, across = schedules.tile_parts(config)
    return {
        "tiles": "tiles_m * tiles_n",
        "groups": f"{schedules.sharing(config)} * tiles_m * tiles_n",
        "parts_m": "tiles_m" if down == 1 else f"({down} * tiles_m)",
        "parts_n": "tiles_n" if across == 1 else f"({across} * tiles_n)",
        "1": "1",
    }


def _finish(spec: KernelSpec, config: KernelConfig, finish: Finish) -> Function:
    sig = spec.signature
    pointers, lengths, strides = [], [], []
    tiles = {"n": "tiles_m", "m": "tiles_n", "": "tiles"}[finish.indices]
    for source in finish.sources:
        if source.operand:
            dtype, shape = (sig.a, "[M, K]") if source.operand == "a" else (sig.b, "[K, N]")
            pointers.append(_pointer(source.operand, dtype, f"{shape} {dtype}"))
            strides += _integers(f"stride_{source.operand}{finish.indices}", f"stride_{source.operand}k")
            lengths += _integers("K")
        else:
            extent = finish.indices.upper()
            pointers.append(_pointer(f"{source.name}_partial", FP32, f"[{tiles}{', ' + extent if extent else ''}] fp32: one {source.row} a tile"))
            lengths += _integers(tiles)
    sizes = _integers(*finish.indices.upper(), *(e.upper() for e in "mnk" if any(counted(e) in line.args for line in finish.lines)))
    steps: dict[str, str] = {}
    length, width = _FINISH_TILES[finish.indices]
    constants: tuple[tuple[str, int], ...] = (("BLOCK_T", length), ("BLOCK_X", width))
    ends: list[Argument] = []
    if sig.grouped == "m" and not all(s.operand for s in finish.sources) and finish.indices != "m":
        ends, constants = _ends(sig), (*constants, ("BLOCK_M", config["block_m"]))
        lengths = _integers("M", *["tiles_n"] * (not finish.indices)) + [x for x in lengths if x.name == "K"]
    elif sig.grouped == "k" and any(s.operand for s in finish.sources):
        ends = _ends(sig)
    if sig.batched and _is_apart(sig, finish.indices):
        held = [(s.operand, f"{finish.indices}k") for s in finish.sources if s.operand]
        held += [(i.name, i.indices) for i in finish.all_inputs if i.dtype is not None and i.indices]
        held += [(o.name, o.indices) for o in finish.stores]
        steps = {f"{name}_ptr": batch_stride(name) for name, indices in held if _is_apart(sig, indices)}
        partial = {"n": "tiles_m * N", "m": "tiles_n * M", "": "tiles"}[finish.indices]
        steps |= {f"{s.name}_partial_ptr": partial for s in finish.sources if not s.operand and sig.grouped != "m"}
    arguments = (
        *pointers,
        *ends,
        *map(_input, finish.all_inputs),
        *map(_output, finish.stores),
        *sizes,
        *lengths,
        *strides,
        *_periods(finish.inputs),
        *_strides(finish.all_inputs),
        *_strides(finish.stores),
        *_integers(*(step for step in steps.values() if step.startswith("stride_"))),
    )
    name = f"{spec.name}_finish_{finish.indices}".rstrip("_")
    return Function(name, _factored(arguments, sig), constants, 4, 1, finish, steps=tuple(steps.items()), contracted=sig.contracted)
