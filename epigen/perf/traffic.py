"""What a call is, before any schedule: FLOPs, bytes moved and launches, fused and unfused. Pure functions.

In go a kernel's meaning and a shape; a config only says how large the tiles are that leave partial results. Times are `model`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from epigen import ops
from epigen.codegen import schedules
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import CAST, WIDEN, Input, KernelConfig, KernelSpec, Store, b_bytes, offsets
from epigen.dtypes import BF16, FP32, INT8, DType
from epigen.ir.graph import OPERANDS, common_indices
from epigen.shapes import Shape, products


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a program must compute and move. bytes: once for each operand, input, output and partial result.

    unfused: the vendor's product in the operands' dtype, then eager PyTorch: a launch and a pass for each operation.
    """

    flops: float
    bytes: float
    launches: int
    unfused_bytes: float
    unfused_launches: int

    @property
    def bytes_saved(self) -> float:
        return self.unfused_bytes - self.bytes

    @property
    def launches_saved(self) -> int:
        return self.unfused_launches - self.launches

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / max(1.0, self.bytes)


def traffic(spec: KernelSpec, shape: Shape, config: KernelConfig | None = None) -> Traffic:
    """FLOPs, bytes and launches, fused and unfused. config: how large a tile is, of which there is one partial result each (128x128 if not
    given), and whether the product is the vendor's, whose result is written and read back unless the vendor computes all of the program.
    """
    block, library = (128, 128), False
    copied: tuple[str, ...] = ()
    sig, after = spec.signature, len(spec.finishes)
    if config is not None:
        down, across = schedules.tile_parts(config)
        block, library = (config["block_m"] // down, config["block_n"] // across), not SCHEDULES[config.schedule].multiplies and not spec.bare_product
        copied = schedules.padded(spec, config)
        after = sum(not schedules.finished_inside(f, config) for f in spec.finishes)
    m, n, k = shape[-3:]
    operands = m * k * sig.a.bytes + b_bytes(shape, sig)
    fused = operands + sum(item_bytes(i, m, n, k) for i in spec.all_inputs) + sum(item_bytes(o, m, n) for o in spec.outputs)
    fused += sum(partial_bytes(p.axes, m, n, block) for p in spec.partials)
    # a finishing kernel that sums over k reads the operand again
    again = sum({"a": m * k * sig.a.bytes, "b": k * n * sig.b.bytes}.get(s.operand, 0) for f in spec.finishes for s in f.sources)
    between = 2 * 4 * m * n if library else 0
    between += sum(2 * (m * k * sig.a.bytes if name == "a" else k * n * sig.b.bytes) for name in copied)
    unfused, launches = _unfused(spec, shape)
    ours, count = 1 + int(library) + len(copied) + after, products(shape)
    return Traffic(
        2.0 * count * m * n * k * len(spec.products), float(count * (fused + again + between)), ours, float(count * (operands + unfused + again)), launches
    )


def size_of(indices: str, m: int, n: int, k: int = 1) -> int:
    """Elements of a value with these indices. k: where it may vary along that."""
    return (m if "m" in indices else 1) * (n if "n" in indices else 1) * (k if "k" in indices else 1)


def item_bytes(item: Input | Store, m: int, n: int, k: int = 1) -> int:
    """Of an input or output in memory."""
    if item.dtype is None:  # a number, passed by value
        return 0
    # of one that begins anew it is not known after how many: the fewest, since most reads of it find it in L2
    if item.packed:
        return m * -(-n // 8)
    if isinstance(item, Store):
        return size_of(item.indices, m, -(-n // item.block), k) * item.dtype.bytes
    extents = {"m": m, "n": n, "k": k}
    return math.prod(-(-extents[i] // item.block(i)) for i in item.indices if i not in item.periodic) * item.dtype.bytes


def partial_bytes(axes: str, m: int, n: int, block: tuple[int, int]) -> int:
    """Of the fp32 results, one a tile of `block` rows and columns, of one reduction over `axes`."""
    tiles_m, tiles_n = -(-m // block[0]), -(-n // block[1])
    return 4 * {"m": tiles_m * n, "n": tiles_n * m, "mn": tiles_m * tiles_n}[axes]


def eager_dtype(spec: KernelSpec) -> DType:
    """What eager PyTorch holds the product in."""
    a = spec.signature.a
    return FP32 if a == INT8 else BF16 if a.is_fp8 else a


def _unfused(spec: KernelSpec, shape: Shape) -> tuple[int, int]:
    """Bytes beyond the operands, of one product, and launches, of the product and one eager operation a line, cast, mask and reduction."""
    m, n, k = shape[-3:]
    element = eager_dtype(spec)
    product = 4 if spec.signature.a == INT8 else element.bytes
    held: dict[str, tuple[str, int]] = dict.fromkeys(spec.products, ("mn", product))  # indices, bytes an element
    moved, launches = m * n * product * len(held), len(held)
    held |= {o.name: (OPERANDS[o.name], element.bytes) for o in spec.computed}
    over_k = [*spec.carried, *(s.over_k for f in spec.finishes for s in f.sources if s.over_k)]
    held |= {r.operand: (OPERANDS[r.operand], element.bytes) for r in over_k}
    held |= {offsets(index): (index, 8) for index in "mn"}  # int64, of torch.arange

    converted = b_bytes(shape, spec.signature) + k * n * spec.signature.multiplied["b"].bytes if any(o.converted for o in spec.operands) else 0
    moved, launches = moved + converted * len(spec.products), launches + (len(spec.products) if converted else 0)

    def size(name: str) -> int:
        indices, each = held[name]
        return size_of(indices, m, n, k) * each

    for item in spec.all_inputs:
        if item.packed:  # unpacked to booleans first
            moved, launches = moved + m * -(-n // 8) + m * n, launches + 1
        held[item.name] = (item.indices, 0 if item.dtype is None else 1 if item.packed else item.dtype.bytes)
    reduced = {s.name: f.indices for f in spec.finishes for s in f.sources}
    lines = list(dict.fromkeys([*spec.main_lines, *(line for f in spec.finishes for line in f.all_lines)]))
    held |= {name: (indices, 4) for name, indices in reduced.items()}
    held |= {r.name: (OPERANDS[r.operand].strip("k"), 4) for r in over_k}
    for line in lines:
        names = [a for a in line.args if isinstance(a, str) and a in held]
        indices = common_indices(held[a][0] for a in names)
        boolean = line.op in ops.TABLE and ops.TABLE[line.op].result == ops.BOOLEAN
        finished = any(a in reduced for a in names)
        each = 1 if boolean else 4 if finished or line.op == WIDEN else line.dtype.bytes if line.op == CAST and line.dtype else element.bytes
        held[line.name] = (indices, each)
        moved, launches = moved + sum(map(size, dict.fromkeys(names))) + size(line.name), launches + 1
        if finished:
            reduced[line.name] = indices
    for r in over_k:
        moved, launches = moved + (size(r.value) if isinstance(r.value, str) else 0) + size(r.name), launches + 1
    for partial in spec.partials:
        kept = "".join(i for i in "mn" if i not in partial.axes)
        source = size(partial.value) if isinstance(partial.value, str) and partial.value in held else 0
        moved, launches = moved + source + 4 * size_of(kept, m, n), launches + 1
    for finish in spec.finishes:
        plain = sum(1 for s in finish.sources if s.operand and not s.over_k)
        moved, launches = moved + plain * 4 * size_of(finish.indices, m, n), launches + plain
    for store in spec.outputs:
        value = held.get(store.value) if isinstance(store.value, str) else None
        if store.packed or (value is not None and value[1] not in (store.dtype.bytes, 0)):
            read = size_of(value[0], m, n) * value[1] if value else 0
            moved, launches = moved + read + item_bytes(store, m, n), launches + 1
    return moved, launches
