"""What docs/ shows of epigen is what epigen says and holds: commands with what they print, sessions of Python, and blocks that are made of the sources.

`pytest tests/test_docs.py --update-golden` writes them anew.
"""

from __future__ import annotations

import ast
import doctest
import itertools
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from checkout import ROOT
from click.testing import CliRunner

import epigen
from bench.registry import BY_NAME, CLAIMS
from epigen import ops
from epigen.cli import main

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def held(page: Path, shown: str, made: str, update: bool) -> None:
    """What a page shows is what is made for it."""
    if update:
        text = page.read_text(encoding="utf-8")
        assert text.count(shown) == 1
        page.write_text(text.replace(shown, made), encoding="utf-8")
    else:
        assert shown == made


# -- commands, and what they print


CONSOLE = re.compile(r"^```console\n\$ epigen (.*)\n(?:.*\n)*?```$", re.MULTILINE)
CONSOLES = [(page, found[1]) for page in PAGES for found in CONSOLE.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "command"), CONSOLES, ids=[command for _, command in CONSOLES])
def test_commands_print_what_is_shown(page: Path, command: str, update_golden: bool) -> None:
    """What goes to standard output, or where there is nothing the mistake."""
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == (0 if result.stdout else 1), result.output
    (shown,) = (found[0] for found in CONSOLE.finditer(page.read_text(encoding="utf-8")) if found[1] == command)
    held(page, shown, f"```console\n$ epigen {command}\n{(result.stdout or result.stderr).strip()}\n```", update_golden)


INDENTED = [
    line
    for page in (*PAGES, ROOT / "README.md")
    for line in re.findall(r"^    ((?:epigen|python -m bench) .*?)(?: +#.*)?$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("line", INDENTED)
def test_commands_and_options_are_there(line: str) -> None:
    """Of commands that are shown without what they print: many want a GPU, or files of the reader's."""
    words = shlex.split(line)
    if words[0] == "python":
        names = list(itertools.takewhile(lambda word: not word.startswith("-"), words[3:]))
        assert names[:1] == ["compare"] or set(names) <= {*BY_NAME, "NAME"}
        return
    command: click.Command = main
    words = words[1:]
    while isinstance(command, click.Group):
        found = command.commands.get(words.pop(0))
        assert found is not None, line
        command = found
    _, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
    assert not [word for word in rest if word.startswith("--")]


# -- blocks that are made of the sources


def code(text: str) -> str:
    """In a cell of a table."""
    return f"`{text}`".replace("|", r"\|")


def table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ("---",) * len(columns), *rows))


def gradient(texts: tuple[str | None, ...]) -> str:
    return ", ".join("—" if text is None else code(text) for text in texts) or "—"


def operations() -> str:
    """The operation table, a heading a group: the calls and formulas that `epigen ops` prints, with torch's names and the gradients."""
    printed = json.loads(CliRunner().invoke(main, ["ops", "--json"]).stdout)
    names: list[tuple[str, str]] = []  # torch's, and the gradient
    for op in ops.TABLE.values():
        bare = op.torch.format(**{p.name: p.name for p in op.params})
        names.append((", ".join(map(code, op.aten or (bare,))), gradient(op.gradient)))
    for row in ops.REDUCTIONS.values():
        names.append((code(row.torch.format(x="x", dim="dim")), gradient((row.gradient,))))
    names += [("", "")] * len(ops.SPECIAL)
    rows = [(p["group"], code(p["call"]), p["formula"].replace("|", r"\|"), *more) for p, more in zip(printed, names, strict=True)]
    parts = []
    for group in dict.fromkeys(row[0] for row in rows):
        short = group in ("rounded", "special")  # the former stand for rows above, and have their gradients
        columns = ("operation", "meaning") if short else ("operation", "formula", "torch", "gradient")
        parts.append(f"### {group.capitalize()}\n\n{table(columns, (row[1 : 1 + len(columns)] for row in rows if row[0] == group))}")
    return "\n\n".join(parts)


BESIDE = {
    "templates": "One file a schedule, what they share, and a folder of what one architecture has; no names of operations.",
    "tuning_db": "The shipped database: one JSON file a GPU.",
    "tests": "The tests, in folders as those of epigen/; what they share lies in tests/support, golden files in tests/golden.",
    "bench": "One script a claim; results lie in bench/results.",
    "docs": "What a user reads beyond the README.",
}
PIPELINE = ("", "lang", "ir", "codegen", "runtime", "perf", "db", "choose", "tuning", "tune", "training", "pytorch", "commands")


def place(folder: str) -> int:
    return PIPELINE.index(folder) if folder in PIPELINE else len(PIPELINE)


def tree() -> str:
    """The folders of the package in the order of the pipeline, each with the line that it says of itself and its files; then those beside it."""
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "epigen").rglob("*.py")):
        files.setdefault(path.parent.relative_to(ROOT / "epigen").as_posix().removeprefix("."), []).append(path.stem)
    lines = []
    for folder in sorted(files, key=lambda folder: (place(folder), folder)):
        said = ast.get_docstring(ast.parse((ROOT / "epigen" / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        lines.append(f"{'  ' if folder else ''}{folder or 'epigen'}/".ljust(14) + said.split("\n")[0])
        names = " ".join(name for name in files[folder] if not name.startswith("__"))
        lines += textwrap.wrap(names, 116, initial_indent=" " * 14, subsequent_indent=" " * 14)
    lines += [f"{folder}/".ljust(14) + said for folder, said in BESIDE.items()]
    return "\n".join(["```text", *lines, "```"])


def claims() -> str:
    """Which script of bench shows what, and what it wants."""
    wants = (("two GPUs" if claim.gpus > 1 else "a GPU" if claim.gpus else "", *claim.needs) for claim in CLAIMS)
    rows = ((code(claim.name), claim.what, ", ".join(filter(None, want)) or "—") for claim, want in zip(CLAIMS, wants, strict=True))
    return table(("name", "what it shows", "wants"), rows)


BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
BLOCKS: dict[str, Callable[[], str]] = {"operations": operations, "tree": tree, "claims": claims}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_made_of_the_sources(name: str, update_golden: bool) -> None:
    ((page, shown),) = ((page, found[0]) for page in PAGES for found in BLOCK.finditer(page.read_text(encoding="utf-8")) if found[1] == name)
    held(page, shown, f"<!-- {name} -->\n{BLOCKS[name]()}\n<!-- end -->", update_golden)


def test_no_block_is_without_its_source() -> None:
    assert sorted(found[1] for page in PAGES for found in BLOCK.finditer(page.read_text(encoding="utf-8"))) == sorted(BLOCKS)


# -- sessions of Python, and paths


SESSION = re.compile(r"^```pycon\n(.*?)^```", re.MULTILINE | re.DOTALL)
SESSIONS = [page for page in PAGES if SESSION.search(page.read_text(encoding="utf-8"))]


@pytest.mark.triton
@pytest.mark.parametrize("page", SESSIONS, ids=[page.name for page in SESSIONS])
def test_sessions_go_as_shown(page: Path) -> None:
    """Those of one page are one session."""
    text = page.read_text(encoding="utf-8")
    session = doctest.DocTestParser().get_doctest("\n".join(SESSION.findall(text)), {}, page.name, str(page), 0)
    said: list[str] = []
    assert doctest.DocTestRunner().run(session, out=said.append).failed == 0, "".join(said)


def test_paths_lead_somewhere() -> None:
    """Files and folders of the tree that a page names."""
    found = [
        (page.name, path)
        for page in PAGES
        for path in re.findall(r"`((?:epigen|templates|tests|bench|docs|tuning_db)/[\w./]*)`", page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 20 and [one for one in found if not (ROOT / one[1]).exists()] == []


@pytest.mark.gpu
def test_the_example_of_measuring_runs() -> None:
    page = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^    import torch, epigen\n(?:(?:    .*)?\n)+", page, re.MULTILINE)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example), names)
    assert names["times"].keys() == {"epigen", "torch"}


# -- the changelog and the guide for contributors


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.*?)\] - (unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert versions[0][0] == epigen.__version__ and len(versions) == len(re.findall(r"^## ", text, re.MULTILINE))
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"} and "Added" in kinds


def test_the_row_that_is_shown_is_in_the_table() -> None:
    (row,) = re.findall(r"^    Op\(.*\n", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert row in (ROOT / "epigen" / "ops.py").read_text(encoding="utf-8")


def test_every_document_links_to_what_is_there() -> None:
    """Files and headings."""
    for page in (*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            file, _, heading = link.partition("#")
            if link.startswith("https://"):
                continue
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), (page.name, link)
            if heading:
                headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                assert heading in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], (page.name, link)
