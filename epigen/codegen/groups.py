"""The functions of a kernel that find, of groups whose ends lie in memory, whose a tile is and which rows or which k it has.

A group begins where the ones before it have ended, so that an end below an earlier one makes an empty group, and none reaches past the tensor: whatever the
ends are, each row has one group at most.

TMA clips at a group's end by a ragged descriptor, as Triton's own kernels of experts have it (triton_kernels, ragged_tma): of four dimensions, of which the first
two go round all of memory. Of RAGGED in the first, a group's end in the second, and RAGGED less that end plus a row in the third the address is that of the row,
and the third, whose extent is RAGGED, ends where the group does.
"""

from __future__ import annotations

from epigen.codegen.emit import DIALECTS, renamed
from epigen.codegen.functions import after
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import KernelConfig, KernelSpec

CHUNK = 128
"""Groups that are looked at together."""

RAGGED = 1 << 30
"""Rows that a ragged descriptor tells apart."""

_SCANNED = (
    """@triton.jit
def group_larger(x, y):
    return tl.maximum(x, y)
""",
    """@triton.jit
def group_added(x, y):
    return x + y
""",
)  # Gluon has no cumsum of its own before Triton 3.9

_ARANGE = {
    "triton": f"tl.arange(0, {CHUNK})",
    # each warp has all of them, and asks no other one
    "gluon": f"gl.arange(0, {CHUNK}, gl.BlockedLayout([{CHUNK // 32}], [32], [gl.num_warps()], [0]))",
}

_SPANS = f"""@triton.jit
def group_spans(ends_ptr, group, num_groups, begun, extent):
    # where each of {CHUNK} groups begins and ends, of which the first begins at `begun`
    begin = tl.load(ends_ptr + group - 1, mask=(group % {CHUNK} > 0) & (group <= num_groups), other=0)
    end = tl.load(ends_ptr + group, mask=group < num_groups, other=0)
    begin = tl.minimum(tl.maximum(tl.associative_scan(begin, 0, group_larger), begun), extent).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.associative_scan(end, 0, group_larger), begun), extent).to(tl.int32)
    return begin, end
"""

_ROWS_OF_TILE = f"""@triton.jit
def rows_of_tile(ends_ptr, tile, num_rows, num_groups, BLOCK_M: tl.constexpr):
    # the group that a tile is of, its first row, and where the group's rows end: none of a tile past the last
    tile = tile.to(tl.int32)
    of_group, first_row, end_row, num_tiles, begun = 0, 0, 0, 0, 0
    for start in range(0, num_groups, {CHUNK}):
        group = start + ARANGE
        begin, end = group_spans(ends_ptr, group, num_groups, begun, num_rows)
        tiles = tl.where(group < num_groups, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
        past = num_tiles + tl.associative_scan(tiles, 0, group_added)
        has_tile = (past - tiles <= tile) & (tile < past)
        of_group += tl.sum(tl.where(has_tile, group, 0), 0)
        first_row += tl.sum(tl.where(has_tile, begin + (tile - past + tiles) * BLOCK_M, 0), 0)
        end_row += tl.sum(tl.where(has_tile, end, 0), 0)
        num_tiles += tl.sum(tiles, 0)
        begun = tl.max(end, 0)
    return of_group, first_row, end_row
"""

_TILES_OF_GROUP = f"""@triton.jit
def tiles_of_group(ends_ptr, of_group, num_rows, BLOCK_M: tl.constexpr):
    # from where and up to where the tiles of rows are a group's
    begin_tile, end_tile, begun = 0, 0, 0
    for start in range(0, of_group + 1, {CHUNK}):
        group = start + ARANGE
        begin, end = group_spans(ends_ptr, group, of_group + 1, begun, num_rows)
        tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
        begin_tile += tl.sum(tl.where(group < of_group, tiles, 0), 0)
        end_tile += tl.sum(tl.where(group <= of_group, tiles, 0), 0)
        begun = tl.max(end, 0)
    return begin_tile, end_tile
"""

_SPAN_OF_GROUP = f"""@triton.jit
def span_of_group(ends_ptr, of_group, extent):
    # where a group begins and ends
    begin = 0
    for start in range(0, of_group, {CHUNK}):
        group = start + ARANGE
        begin = tl.maximum(begin, tl.max(tl.load(ends_ptr + group, mask=group < of_group, other=0), 0))
    end = tl.maximum(tl.load(ends_ptr + of_group), begin)
    return tl.minimum(begin, extent).to(tl.int32), tl.minimum(end, extent).to(tl.int32)
"""

_STEPS_OF_TILE = """@triton.jit
def steps_of_tile(ends_ptr, tile, tiles, num_groups, extent, BLOCK_K: tl.constexpr):
    # along k, of a tile among those of all groups; past the last one any
    begin, end = span_of_group(ends_ptr, tl.minimum(tile // tiles, num_groups - 1), extent)
    return tl.maximum(tl.cdiv(end - begin, BLOCK_K), 1)
"""


def functions(spec: KernelSpec, config: KernelConfig) -> list[str]:
    """Those that the kernels of a module call, of which the main one, if it is in Gluon, has its own."""
    grouped = spec.signature.grouped
    if not grouped:
        return []
    main, finishes = SCHEDULES[config.schedule].dialect, after(spec, config)
    if grouped == "k":
        wanted = any(s.operand for f in finishes for s in f.sources)
        of_main, others = [_SPAN_OF_GROUP, *[_STEPS_OF_TILE] * bool(dict(config.values).get("pingpong"))], [_SPAN_OF_GROUP]
    else:
        wanted = any(f.indices != "m" and not all(s.operand for s in f.sources) for f in finishes)
        of_main, others = [*_SCANNED, _SPANS, _ROWS_OF_TILE, *[_TILES_OF_GROUP] * (main == "gluon" or wanted)], [*_SCANNED, _SPANS, _TILES_OF_GROUP]
    others = others if main == "gluon" and wanted else []
    return [*(_in(main, text) for text in of_main), *(renamed(_in("triton", text), NAMES) for text in others)]


NAMES = ("group_larger", "group_added", "group_spans", "tiles_of_group", "span_of_group")


def _in(dialect: str, text: str) -> str:
    return DIALECTS[dialect].rename(text.replace("ARANGE", _ARANGE[dialect]))
