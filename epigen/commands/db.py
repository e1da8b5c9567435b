"""The command group `epigen db`: lists, shows, merges, checks and prunes tuning databases. Thin: all work is done by `tuning.database`.

Results go to standard output, warnings to standard error. Exit status: 0, 1 (a mistake, or `check` found one), 2 (usage).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from epigen.errors import DatabaseError

if TYPE_CHECKING:
    from epigen.db.database import Database, Report
    from epigen.db.records import Record

Command = TypeVar("Command", bound=Callable[..., Any])


def _db_option(command: Command) -> Command:
    text = "the database, a folder or one .json file (default: EPIGEN_DB, else the platform's data folder)"
    return click.option("--db", "path", type=click.Path(path_type=Path), help=text)(command)


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="write JSON instead")(command)


def _filters(command: Command) -> Command:
    command = click.option("--program", default="", help="only programs that contain this")(command)
    return click.option("--gpu", default="", help="only GPUs whose name contains this")(command)


def _wanted(gpu: str, program: str) -> Callable[[Record], bool]:
    return lambda r: gpu.lower() in r.gpu.lower() and program in r.program


def _open(path: Path | None) -> Database:
    from epigen.db.database import Database

    return Database(path)


def _warn(*complaints: str) -> None:
    for complaint in complaints:
        click.echo(f"warning: {complaint}", err=True)


@click.group("db")
def db() -> None:
    """List, show, merge, export, check and prune tuning databases."""


@db.command("list")
@_db_option
@_filters
@_json_option
def list_command(path: Path | None, gpu: str, program: str, as_json: bool) -> None:
    """List the tuned problems: the user's, then the shipped ones."""
    database = _open(path)
    wanted = _wanted(gpu, program)
    matches = [(file, record) for file, record in database.records() if wanted(record)]
    _warn(*database.complaints)
    if as_json:
        click.echo(json.dumps([_object(file, record) for file, record in matches]))
        return
    where: Path | None = None
    for file, record in matches:
        if file != where:
            click.echo(f"{file}: {record.gpu} ({record.capability})")
            where = file
        click.echo(f"  {_row(record)}")
    if not matches:
        click.echo(f"no records in {database.path or 'a database of yours'}" + "".join(f", nor in {seed}" for seed in database.seeds), err=True)


@db.command("show")
@click.argument("names", nargs=-1, required=True)
@_db_option
@_json_option
def show_command(names: tuple[str, ...], path: Path | None, as_json: bool) -> None:
    """Show records in full. NAMES are those that `list` begins its lines with; a beginning is enough."""
    database = _open(path)
    records = database.records()
    _warn(*database.complaints)
    matches: list[tuple[Path, Record]] = []
    for name in names:
        some = [(file, record) for file, record in records if record.name.startswith(name)] if name else []
        different = sorted({record.name for _, record in some})
        if not some:
            raise DatabaseError(f"no record's name begins with {name!r}: see `epigen db list`")
        if len(different) > 1:
            raise DatabaseError(f"{name!r} may be {', '.join(different[:5])}{' and others' if len(different) > 5 else ''}: write more of it")
        matches += some
    if as_json:
        click.echo(json.dumps([_object(file, record) for file, record in matches]))
        return
    for file, record in matches:
        _show(file, record)


@db.command("merge")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@_db_option
@_json_option
def merge_command(sources: tuple[Path, ...], path: Path | None, as_json: bool) -> None:
    """Add the records of SOURCES, folders or files. Of two records of one problem the faster stays."""
    database = _open(path)
    _tell(database.merge(*sources), f"into {database.path}", as_json)


@db.command("export")
@click.argument("target", type=click.Path(path_type=Path))
@_db_option
@_filters
@click.option("--shipped", is_flag=True, help="the shipped records too")
@_json_option
def export_command(target: Path, path: Path | None, gpu: str, program: str, shipped: bool, as_json: bool) -> None:
    """Add the database's records to TARGET, a folder or a .json file."""
    database = _open(path)
    _tell(database.export(target, _wanted(gpu, program), shipped), f"into {target}", as_json)


@db.command("check")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@_db_option
@_json_option
@click.pass_context
def check_command(context: click.Context, paths: tuple[Path, ...], path: Path | None, as_json: bool) -> None:
    """Check every file of PATHS (default: the user's database and the shipped ones). Exit status 1 if something is wrong."""
    from epigen.db import database

    chain = _open(path)
    requested = [*paths, *([path] if path else [])]
    where = requested or [root for root in (chain.path, *chain.seeds) if root is not None]
    if not requested:
        _warn(*chain.complaints)
    if missing := [str(p) for p in requested if not database.there(p)]:
        raise DatabaseError(f"{', '.join(missing)} does not exist")
    count = sum(len(database.files(p)) for p in where)
    problems = [problem for p in where for problem in database.check(p)]
    if as_json:
        click.echo(json.dumps({"files": count, "problems": problems}))
    else:
        for problem in problems:
            click.echo(problem)
        click.echo(f"{count} file{'s' * (count != 1)} checked, {len(problems) or 'no'} problem{'s' * (len(problems) != 1)}")
    if problems:
        context.exit(1)


@db.command("prune")
@click.option("--triton", help="drop what was measured under another version of Triton than this")
@click.option("--beaten", is_flag=True, help="drop what is slower than the same problem under another version of Triton")
@click.option("--dry-run", is_flag=True, help="only say what would be dropped")
@_db_option
@_json_option
def prune_command(triton: str | None, beaten: bool, dry_run: bool, path: Path | None, as_json: bool) -> None:
    """Drop records from the user's database, by --triton or --beaten."""
    if triton is None and not beaten:
        raise click.UsageError("say what to drop: --triton VERSION, --beaten or both")
    database = _open(path)
    _tell(database.prune(triton, beaten, dry_run), f"in {database.path}{', if it were no dry run' * dry_run}", as_json)


def _tell(report: Report, where: str, as_json: bool) -> None:
    _warn(*report.complaints)
    for file in report.aside:
        click.echo(f"warning: the damaged file is kept as {file}", err=True)
    counts = {"added": report.added, "replaced": report.replaced, "unchanged": report.unchanged, "dropped": len(report.dropped)}
    if as_json:
        click.echo(json.dumps(counts | {"dropped": report.dropped, "complaints": report.complaints, "aside": [str(f) for f in report.aside]}))
        return
    for line in report.dropped:
        click.echo(line)
    click.echo(", ".join(f"{count} {name}" for name, count in counts.items()) + f" {where}")


def _object(file: Path, record: Record) -> dict[str, Any]:
    return {"name": record.name, "file": str(file), **{name: value for name, value in asdict(record).items() if value is not None}}


def _row(record: Record) -> str:
    from epigen.db.records import short
    from epigen.shapes import extents

    operands = record.a if record.a == record.b else f"{record.a}x{record.b}"
    ratio = f"{record.baseline_us / record.median_us:.2f} vs mm" if record.baseline_us else "   - vs mm"
    return (
        f"{record.name}  {extents(record.shape):<20} {operands:<8} {record.layout}  {record.median_us:>10.2f} us  {ratio}  "
        f"{short(record.program)}{record.apart}  [{record.kernel_config}; Triton {record.triton}]"
    )


def _show(file: Path, record: Record) -> None:
    from epigen.db.records import OUTCOMES
    from epigen.shapes import extents

    precision = f", {record.precision}" if record.precision else ""
    apart = ", invariant" * bool(record.invariant) + f", groups along {record.groups}" * bool(record.groups) + f", sparse {record.sparse}" * bool(record.sparse)
    inputs = f", inputs {', '.join(record.inputs)}" if record.inputs else ""
    unfused = "" if record.unfused_us is None else f"; with one pointwise pass {record.unfused_us:g} us"
    rows = {
        "program": record.program.replace("\n", "\n           "),
        "problem": f"{extents(record.shape)}, {record.a} x {record.b}{inputs} -> {', '.join(record.outputs)}, layout {record.layout}, rows aligned to {record.alignment}{precision}{apart}",
        "gpu": f"{record.gpu} ({record.capability}{f', driver {record.driver}' if record.driver else ''})",
        "config": str(record.kernel_config),
        "time": f"{record.median_us:g} us, spread {record.spread_us:g} us",
        "vendor": f"{record.baseline_us:g} us for the product alone{unfused}" if record.baseline_us else "could not be timed",
        "trials": ", ".join(f"{record.trials[o]} {o.replace('_', ' ')}" for o in OUTCOMES if o in record.trials),
        "measured": f"{record.date}, Triton {record.triton}, torch {record.torch}, epigen {record.epigen}",
        "file": str(file),
    }
    click.echo(record.name)
    for name, text in rows.items():
        click.echo(f"  {name:<8} {text}")
