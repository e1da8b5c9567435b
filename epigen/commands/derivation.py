"""What `compile --backward` and `explain` say of a program's derivative. Both attach it to what they print anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from epigen.errors import CallError, DerivationError
from epigen.ir.derivation import NOTHING, SAVE

if TYPE_CHECKING:
    from epigen.ir.derivation import Derivation, Option
    from epigen.shapes import Shape

Row = tuple[str, str]

save_option = click.option("--save", type=click.Choice(SAVE), help="with --backward: what the forward keeps (default: the way that moves the fewest bytes)")
wrt_option = click.option("--wrt", metavar="NAME,…", help="with --backward: whose gradients are wanted, of mm and the inputs (default: all)")


def requested(program: str, dtype_name: str, backward: bool, save: str | None, wrt: str | None) -> Derivation | None:
    """The derivation that the options ask for, if they do."""
    if not backward:
        for option, value in (("--save", save), ("--wrt", wrt)):
            if value is not None:
                raise click.UsageError(f"{option} belongs to --backward")
        return None
    from epigen import api

    return api.derive(program, save=save, wrt=None if wrt is None else wrt.split(","), dtype=dtype_name)


def explained(program: str, shape: Shape, dtype_name: str) -> tuple[list[Row], dict[str, Any]]:
    """Rows and a record for any program, a reason where there is no derivative."""
    from epigen import api

    try:
        derived = api.derive(program, dtype=dtype_name)
    except (DerivationError, CallError) as error:
        why = error.diagnostics[0].message if isinstance(error, DerivationError) else str(error)
        return [("backward", f"none: {why}")], {"program": None, "why": why}
    return rows(derived, shape), record(derived, shape)


def rows(derived: Derivation, shape: Shape) -> list[Row]:
    """The two programs and the ways of keeping what the derivative reads, in bytes at a shape."""
    said = [("backward", derived.backward.text), *(("", line) for line in derived.wiring())]
    for each in derived.operands:
        said += [(f"of {each.operand}", each.program.text), ("", each.wiring())]
    if len(derived.forward.outputs) > derived.results:
        said.append(("forward", derived.forward.text))
    chosen = next(o for o in derived.options if o.save == derived.save)
    others = [o for o in derived.options if o is not chosen]
    said.append(("saves", "nothing: the derivative reads no tile of the forward" if chosen.save == NOTHING and not chosen.saved else _way(chosen, shape)))
    said += [("", f"or {_way(o, shape)}") for o in others]
    return said


def _way(option: Option, shape: Shape) -> str:
    from epigen.choose.explain import bytes_text

    kept, moved = (bytes_text(b) if b else "nothing" for b in (option.kept_bytes(shape), option.moved_bytes(shape)))
    return f"{option.save}: {kept} kept, {moved} moved"


def record(derived: Derivation, shape: Shape) -> dict[str, Any]:
    """The same as plain data for JSON."""
    return {
        "program": derived.backward.text,
        "forward": derived.forward.text,
        "product": derived.product,
        "arguments": [{"name": a.name, "source": a.source, "of": a.of} for a in derived.arguments],
        "gradients": [{"of": g.of, "output": g.output, "passed": g.passed, "summed": bool(g.periods)} for g in derived.gradients],
        "operands": [
            {
                "operand": o.operand,
                "product": o.product,
                "program": o.program.text,
                "arguments": [{"name": a.name, "source": a.source, "of": a.of, "transposed": a.transposed} for a in o.arguments],
                "gradients": [{"of": g.of, "output": g.output} for g in o.gradients],
            }
            for o in derived.operands
        ],
        "rows": [{"of": g.of, "output": g.output, "passed": g.passed} for g in derived.rows],
        "save": derived.save,
        "options": [{"save": o.save, "kept_bytes": o.kept_bytes(shape), "moved_bytes": o.moved_bytes(shape)} for o in derived.options],
    }
