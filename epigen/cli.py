"""The command line: the group that every command belongs to, and `epigen ops`. Results go to standard output, talk to standard error.

Exit status: 0, 1 (a mistake in what was given), 2 (usage), 3 (a kernel failed its verification), 130 (Ctrl-C). Torch and Triton are
imported by the commands that need them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import click

import epigen
from epigen import ops
from epigen.commands import compile as cli_compile
from epigen.commands import db as cli_db
from epigen.commands import explain as cli_explain
from epigen.commands import info as cli_info
from epigen.commands import tune as cli_tune
from epigen.commands.tune import INTERRUPTED
from epigen.commands.types import say
from epigen.errors import EpigenError, InternalError, VerificationError


class Group(click.Group):
    """Turns the user's mistakes into a message and a status: no traceback reaches the user of a command line."""

    def main(self, *args: Any, **options: Any) -> Any:
        with contextlib.suppress(AttributeError):  # where there is no standard output
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files need be no text
        try:
            return super().main(*args, **options)
        except OSError as error:  # of writing: what is read is looked after where it is read
            say(f"error: cannot write {error.filename or 'the output'}: {error.strerror or error}")
            sys.exit(1)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except VerificationError as error:
            say(f"error: {error}")
            context.exit(3)
        except EpigenError as error:
            say(str(error) if "\n" in str(error) else f"error: {error}")
            context.exit(1)
        except InternalError as error:
            say(f"internal error: {error}")
            context.exit(1)
        except KeyboardInterrupt:
            say("interrupted")
            context.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort, OSError):
            raise  # click's own business, and `main`'s
        except Exception as error:  # noqa: BLE001  # a bug of ours, which is still no reason for a traceback
            say(f"internal error: {InternalError(f'{type(error).__name__}: {error}')}")
            context.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(epigen.__version__, prog_name="epigen")
def main() -> None:
    """Fused matrix-multiplication epilogues, from one line of text to a Triton kernel."""


@main.command("ops")
@click.option("--json", "as_json", is_flag=True, help="write one JSON object instead")
def ops_command(as_json: bool) -> None:
    """List the operations, with their formulas."""
    rows: list[tuple[str, str, str]] = []
    for op in ops.TABLE.values():
        params = [p.name for p in op.params]
        call = (
            f"{op.symbol}{params[0]}" if op.symbol and len(params) == 1 else f" {op.symbol} ".join(params) if op.symbol else f"{op.name}({', '.join(params)})"
        )
        rows.append((op.group, call, op.formula))
    rows += [("reduction", f"{r.name}(x, m | n), {r.name}(x), {r.name}(x, k)", r.formula) for r in ops.REDUCTIONS.values()]
    rows += [
        ("special", text.split(":")[0].split(" = ")[0], text.split(": ", 1)[1] if ": " in text else text.split(" = ", 1)[1]) for text in ops.SPECIAL.values()
    ]
    if as_json:
        click.echo(json.dumps([{"group": g, "call": c, "formula": f} for g, c, f in rows]))
        return
    width = max(len(call) for _, call, _ in rows)
    group = ""
    for row_group, call, formula in rows:
        if row_group != group:
            click.echo(f"{row_group}:")
            group = row_group
        click.echo(f"  {call:<{width}}  {formula}")


main.add_command(cli_compile.compile_command)
main.add_command(cli_db.db)
main.add_command(cli_explain.explain_command)
main.add_command(cli_info.info_command)
main.add_command(cli_tune.tune)

if __name__ == "__main__":
    main()
