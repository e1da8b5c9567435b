"""KernelSpec and KernelConfig -> source text. The sole importer of jinja2.

The text is a Python module of jit functions, which needs triton only. Equal inputs render equal bytes.
"""

from __future__ import annotations

import base64
import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jinja2

import epigen
from epigen.codegen import completion, emit, from_bytes, functions, groups, partitions, schedules, steps, tile
from epigen.codegen.functions import Function
from epigen.codegen.schedules import SCHEDULES
from epigen.codegen.spec import Finish, KernelConfig, KernelSpec, digest
from epigen.dtypes import FP32, INT32


@dataclass(frozen=True, slots=True)
class Rendered:
    """A module's text, its functions with the main kernel first, and the digest that names it."""

    text: str
    functions: tuple[Function, ...]
    digest: str

    @property
    def whole(self) -> bool:
        """Whether the vendor's library computes all of the program, so that there is nothing to generate."""
        return not self.functions


class Shelf(Protocol):
    """Texts under names, for the processes to come. None: there is nothing that may be trusted."""

    def read(self, name: str) -> str | None: ...
    def write(self, name: str, text: str) -> object: ...


class _Compiled(jinja2.BytecodeCache):
    """What Jinja makes of a template, which takes most of a first rendering. Jinja itself sees to it that it is of the same template, Jinja and Python."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf

    def load_bytecode(self, bucket: Any) -> None:
        encoded = self.shelf.read(f"template_{bucket.key}")
        with contextlib.suppress(ValueError):  # of a damaged one
            bucket.bytecode_from_string(base64.b64decode(encoded or "", validate=True))

    def dump_bytecode(self, bucket: Any) -> None:
        self.shelf.write(f"template_{bucket.key}", base64.b64encode(bucket.bytecode_to_string()).decode())


class Renderer:
    """Holds the template environment; one a process is enough. shelf: keeps compiled templates, if given."""

    def __init__(self, templates: Path, shelf: Shelf | None = None):
        self.environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(templates), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
            keep_trailing_newline=True, autoescape=False, bytecode_cache=None if shelf is None else _Compiled(shelf),
        )  # fmt: skip
        self.environment.globals |= {"emit": emit, "ragged_rows": groups.RAGGED}
        self.environment.filters["gluon"] = emit.GLUON.rename

    def render(self, spec: KernelSpec, config: KernelConfig) -> Rendered:
        schedule = SCHEDULES[config.schedule]
        kernels = functions.functions(spec, config)
        text = self.text(
            "module.py.j2", spec=spec, config=config, functions=kernels, schedule=schedule, dot_arguments=dot_arguments(spec, config),
            tma_stored=schedules.tma_stored(spec, config), tma_loaded=schedules.tma_loaded(spec, config), completions=completion.completions(spec, config),
            whole=not kernels, prefetched=schedules.prefetched(spec, config), **functions.units(spec, config),
            part=tile.part_of_tile(config), subtiles=schedules.subtiles(config), declared=tile.declared(spec, config), packs=tile.packs(spec), steps=steps.steps(spec, config),
            carried=steps.carried(spec, config),
            partitions=partitions.partitions(spec, config, kernels[0]) if schedule.architecture == "hopper" else None,
            read=tile.mask_units(schedule, stored=False), kept=tile.mask_units(schedule, stored=True),
        )  # fmt: skip
        return Rendered(text, kernels, digest([text]))

    def text(self, template: str, **values: Any) -> str:
        values |= {
            "version": epigen.__version__,
            "helpers": _helpers,
            "of_finish": _of_finish,
        }
        return _tidy(self.environment.get_template(template).render(values))


def _tidy(text: str) -> str:
    """No trailing blanks; inside a function no blank line after another or before the first line."""
    text = "".join(f"{line.rstrip()}\n" for line in text.strip().split("\n"))
    text = re.sub(r"\n{2,}(?=    )", "\n\n", text)
    text = re.sub(r"\n{3,}(?=\S)", "\n\n\n", text)
    return re.sub(r"\):\n\n(?=    )", "):\n", text)


def _helpers(spec: KernelSpec, config: KernelConfig, dialect: str) -> list[str]:
    """The functions that the kernels call. Those of finishing kernels, which are Triton's, have names of their own beside Gluon's."""
    inside, after = functions.inside(spec, config), functions.after(spec, config)
    of_bytes = [*from_bytes.functions(spec, config), *groups.functions(spec, config)]
    if dialect == "triton":
        return [*_helpers_of(spec, [*inside, *after], in_order=spec.signature.invariant).values(), *of_bytes]
    own = _helpers_of(None, after, in_order=spec.signature.invariant)
    return [*_helpers_of(spec, inside, emit.DIALECTS[dialect]).values(), *of_bytes, *(emit.renamed(text, own) for text in own.values())]


def _helpers_of(spec: KernelSpec | None, finishes: list[Finish], dialect: emit.Dialect = emit.TRITON, in_order: bool = False) -> dict[str, str]:
    """What a main kernel, if it is one of them, and the completion of reductions call. in_order: as of `emit.reduce`; Gluon's layouts are fixed as they are."""
    lines = [*(spec.main_lines if spec else ()), *(line for f in finishes for line in f.all_lines)]
    carried = [over_k.row for over_k in (spec.carried if spec else ())]
    rows = [*(p.row for p in (spec.partials if spec else ())), *(s.row for f in finishes for s in f.sources), *carried]
    stores = [*((*spec.stores, *spec.vectors) if spec else ()), *(o for f in finishes for o in f.stores)]
    casts = [line.dtype for line in lines if line.dtype] + [o.dtype for o in stores]
    return emit.helpers(lines, rows, casts, combining=rows if finishes else carried, dialect=dialect, in_order=in_order)


def _of_finish(text: str, spec: KernelSpec, config: KernelConfig, dialect: str) -> str:
    """A finishing kernel's text with the names of its own functions."""
    own = _helpers_of(None, functions.after(spec, config), in_order=spec.signature.invariant)
    return text if dialect == "triton" else emit.renamed(text, (*own, *groups.NAMES))


def dot_arguments(spec: KernelSpec, config: KernelConfig) -> str:
    """What `tl.dot` takes after a, b and the accumulator."""
    if spec.promoted and SCHEDULES[config.schedule].multiplies:
        return f", max_num_imprecise_acc={min(128, config['block_k'])}"
    if spec.signature.a == FP32:
        return f', input_precision="{spec.signature.precision}"'
    return ", out_dtype=tl.int32" if spec.accumulator == INT32 else ""
