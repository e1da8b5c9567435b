"""The layering of epigen/, read from the sources: who may import whom, and what stays out of which file."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.nodes
import pytest
from checkout import ROOT

from epigen.ops import REDUCTIONS, TABLE

PACKAGE = ROOT / "epigen"

ORDER = (
    "errors", "uncollected", "after_import", "lru_cache", "files", "settings", "shapes", "dtypes", "gpus", "ops",
    "lang.walk", "lang.syntax", "lang.substitute", "lang.quantised", "lang.parser",
    "ir.graph", "ir.parting", "ir.check", "ir.passes", "ir.program", "ir.rules", "ir.eager", "ir.unparse", "ir.written", "ir.autodiff", "ir.derivation", "ir.operand_gradients", "ir.derive", "ir.philox", "ir.nibbles", "ir.reference", "ir.recognise", "ir.bound", "packing",
    "codegen.spec", "codegen.schedules", "codegen.steps", "codegen.emit", "codegen.from_bytes", "codegen.lower", "codegen.sparse", "codegen.functions", "codegen.groups", "codegen.tile", "codegen.completion", "codegen.partitions",
    "codegen.render", "codegen.standalone",
    "perf.traffic", "perf.resources", "perf.limits", "perf.constants", "perf.model",
    "runtime.device", "runtime.arguments", "runtime.code_builder", "runtime.user_cache", "runtime.triton_key", "runtime.direct",
    "runtime.overlap", "runtime.rendering", "runtime.vendor", "runtime.semi_structured", "runtime.workspace", "runtime.loader", "runtime.outputs", "runtime.batches", "runtime.groups", "runtime.ahead", "runtime.native",
    "runtime.launch", "runtime.prepared", "runtime.fast_call", "runtime.calls", "runtime.kernel", "runtime.parted", "runtime.verify",
    "db.fields", "db.lock", "db.salvage", "db.problem", "db.migrations", "db.records", "db.lookup", "db.database_file", "db.database",
    "choose.space", "choose.rule", "choose.choose", "choose.explain",
    "tuning.database", "tuning.records", "tuning.task", "tuning.request", "tuning.suite", "tuning.table", "tuning.process", "tuning.fork_server", "tuning.runner", "tuning.timer", "tuning.sampling",
    "tuning.timing_worker", "tuning.compile_worker", "tuning.interrupt", "tuning.journal", "tuning.storage", "tuning.tpe", "tuning.surrogate", "tuning.study",
    "tuning.search", "tuning.tune", "tuning.fleet", "tuning.remembered", "tuning.first_use", "tuning.report",
    "checkpoints", "training.unlogged", "training.aten", "training.halved", "training.traced", "training.functions", "api",
    "training.guarded_cache", "training.bits", "training.elements", "training.plan", "training.library", "training.composed", "training.embeddings", "training.expected", "training.precompile",
    "training.layer", "training.report", "training.sharding", "training.whole", "training.parted", "training.chain", "training.site", "training.again", "training.linear", "training.modules", "training.quantized", "training.selected", "training.fp8", "training.float8", "training.cross_entropy", "training.attached", "training.experts", "training.expert_modules", "training.moe", "training.operations", "nn",
    "training.regions", "training.rewrite", "training.behind", "training.looped", "training.wrapper", "training.convolutions", "training.stacked", "training.joint",
    "training.backend", "training.views", "training.deferred", "training.weight_only", "training.programs", "training.rehearse", "training.straight", "training.flat", "training.fuse",
    "commands.show", "commands.types", "commands.db", "commands.derivation", "commands.compile", "commands.explain", "commands.info", "commands.live", "commands.tune",
    "cli", "__main__",
)  # fmt: skip
"""Each module, once: it imports only from those before it, lazily as well."""

NO_TORCH = re.compile(
    r"(errors|uncollected|after_import|lru_cache|files|settings|shapes|dtypes|gpus|ops|lang\..*|ir\.(graph|check|passes|program|rules|unparse|written|autodiff|derivation|operand_gradients|derive|philox|nibbles)|codegen\..*)"
)
"""The front end: it works where neither torch nor Triton is installed."""

SOLE_IMPORTERS = {
    "triton": {"runtime.direct", "runtime.loader", "runtime.triton_key"},
    "jinja2": {"codegen.render"},
    "optuna": {"tuning.journal", "tuning.storage", "tuning.study", "tuning.tpe"},
    "sqlalchemy": {"tuning.storage"},
    "click": {"cli", *(f"commands.{name}" for name in ("types", "compile", "db", "derivation", "explain", "info", "tune"))},
}


@dataclass(frozen=True)
class Import:
    """One imported module, as a dotted name. deep: inside a function, so that it happens at a call."""

    name: str
    line: int
    deep: bool


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [name for name in TREES if name.split(".")[-1] != "__init__"]
INITS = [name for name in TREES if name.split(".")[-1] == "__init__"]


def imports(tree: ast.AST, deep: bool = False) -> Iterator[Import]:
    """Every import, those for type checkers too: knowing a type is knowing its layer."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, deep) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import hides its layer"
            yield from (Import(imported(node.module or "", alias.name), node.lineno, deep) for alias in node.names)
        else:
            yield from imports(node, deep or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def imported(module: str, name: str) -> str:
    """`from epigen import ops` imports the module epigen.ops; `from epigen.ops import TABLE` does too."""
    inside = f"{module}.{name}".removeprefix("epigen.")
    return f"epigen.{inside}" if module.split(".")[0] == "epigen" and inside in TREES else module


def roots(name: str, shallow: bool = False) -> set[str]:
    """Top-level packages that a module imports. shallow: at its own import only."""
    return {i.name.split(".")[0] for i in imports(TREES[name]) if not (shallow and i.deep)}


def rank(name: str) -> int:
    assert name in ORDER, f"epigen/{name.replace('.', '/')}.py has no place in ORDER"
    return ORDER.index(name)


def epigen_imports(name: str) -> list[tuple[str, int]]:
    """Modules of epigen that a module imports, each with its line; the package itself is left out."""
    return [(i.name.removeprefix("epigen."), i.line) for i in imports(TREES[name]) if i.name.startswith("epigen.")]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_earlier_layers(name: str) -> None:
    wrong, own = [], rank(name)
    for other, line in epigen_imports(name):
        assert other in MODULES, f"line {line}: epigen.{other} is no module"
        if not rank(other) < own:
            wrong.append(f"line {line}: epigen.{name} imports epigen.{other}, which is not before it in ORDER")
    assert not wrong, "\n".join(wrong)


def test_the_order_names_each_module_once() -> None:
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_the_package_itself_is_imported_for_its_version_only(name: str) -> None:
    tree = TREES[name]
    aliases = {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names if a.name == "epigen"}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in aliases}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "epigen":
            used |= {a.name for a in node.names if a.name not in TREES}
    assert used <= {"__version__"}


def test_importing_the_package_imports_next_to_nothing() -> None:
    """Everything else comes with the first use of a name: `import epigen` stays light."""
    body = [node for node in TREES["__init__"].body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    shallow = {i.name for i in imports(ast.Module(body, [])) if not i.deep}
    assert shallow == {"__future__", "typing", "epigen.after_import", "epigen.errors", "epigen.uncollected"}


@pytest.mark.parametrize("name", [name for name in INITS if name != "__init__"])
def test_a_folder_imports_nothing_by_itself(name: str) -> None:
    """Else importing one of its modules would import others, unseen by the order."""
    assert not list(imports(TREES[name]))


@pytest.mark.parametrize(("package", "owners"), SOLE_IMPORTERS.items())
def test_sole_importers(package: str, owners: set[str]) -> None:
    assert {name for name in TREES if package in roots(name)} == owners & set(MODULES)


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    used = set().union(*map(roots, TREES)) - set(sys.stdlib_module_names) - {"epigen"}
    assert used <= declared


def test_nothing_is_imported_by_a_computed_name() -> None:
    """The tests above read import statements, so there must be no other way in."""
    ways = {"import_module", "__import__", "exec_module", "load_module", "run_module", "run_path"}
    found = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in ways) or (isinstance(node, ast.Attribute) and node.attr in ways)
    }
    assert found == {"tuning.fork_server", "after_import"}, (
        "the first is told by its command line what to fork, and tests put failing workers there; the second has the loader of somebody else's module do more"
    )


def test_only_settings_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    readers = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            if attribute or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}):
                readers.add(name)
    assert readers == {"settings"}


def test_the_processes_of_tests_find_what_the_tests_find() -> None:
    """By `settings.child_environment`: an import path of a test's own would lose packages that are themselves found by PYTHONPATH."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert len(tests) > 50 and not [path.name for path in tests if re.search(r"""["']PYTHONPATH["'](:|\] *=)""", path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", [name for name in MODULES if NO_TORCH.fullmatch(name)])
def test_the_front_end_names_neither_torch_nor_triton(name: str) -> None:
    assert not roots(name) & {"torch", "triton"}


def test_targets_need_torch_for_the_gpu_at_hand_only() -> None:
    assert "torch" not in roots("runtime.device", shallow=True)


def test_the_front_end_runs_without_torch_and_triton() -> None:
    """For real: each of its modules in turn, in a fresh process where importing either one fails."""
    light = [f"epigen.{name}" for name in MODULES if NO_TORCH.fullmatch(name) or name == "runtime.device"]
    code = (
        "import importlib, json, sys\n"
        "for heavy in ('torch', 'triton'):\n"
        "    sys.modules[heavy] = None  # an import of it raises ImportError\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "graph = sys.modules['epigen.ir.check'].check(sys.modules['epigen.lang.parser'].parse('relu(mm + bias)'))\n"
        "print(graph.text)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, json.dumps(light)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "relu(mm + bias)\n"), run.stderr


# `where` and the reductions `sum` and `max` are also what loads, stores and bit packing are written with
LAYOUT = {"where", "sum", "max"}
OPERATIONS = ({name for name, op in TABLE.items() if not op.symbol} | set(REDUCTIONS)) - LAYOUT
TEMPLATES = sorted(p for p in (ROOT / "templates").rglob("*") if p.is_file())
# Beside the kernels this one holds plain torch, which compares results; the operations of a program stay out of it all the same.
HOST = {"standalone.py.j2"}
ACTIVATIONS = {name for name, op in TABLE.items() if op.group in ("activation", "derivative")}


def without_comments(template: str) -> str:
    """Text without Jinja's comments and those of the generated code: prose may say what it likes."""
    return re.sub(r"(^|\s)# .*$", "", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL), flags=re.MULTILINE)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_a_template_names_no_operation(path: Path) -> None:
    """A template owns loops, loads and stores; what is computed comes from the table, so a new row needs no template."""
    assert {"relu", "gelu", "silu", "drelu"} <= ACTIVATIONS <= OPERATIONS
    text = without_comments(path.read_text(encoding="utf-8"))
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    assert {"tl", "gl", "triton"} & words or path.name in HOST
    assert not words & (ACTIVATIONS if path.name in HOST else OPERATIONS)
    if path.name not in HOST:
        assert not re.search(r"(?<!\btl\.)\bwhere\b", text), "a selection of values is an operation; tl.where may mask a load"


OF_HOPPER = re.compile(
    r"registers|hopper|warpgroup|wgmma|NVMMADistributedLayout|DistributedLinearLayout|packed_words|_of_columns|words_taken_over|columns_taken_over"
)
"""What Hopper's instructions, register layouts and the helpers around them are called, and the macros that write them."""


def words_of(node: jinja2.nodes.Node) -> str:
    """All that a part of a template writes or calls."""
    kinds = jinja2.nodes.TemplateData, jinja2.nodes.Const, jinja2.nodes.Name, jinja2.nodes.Getattr
    return " ".join(str(getattr(n, field)) for n in node.find_all(kinds) for field in ("data", "value", "name", "attr") if hasattr(n, field))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_no_template_asks_for_the_dialect_to_learn_the_architecture(path: Path) -> None:
    """Gluon is a language. How a product lies in registers is the architecture's, so that another one's schedule is a folder of its own."""
    if path.name in HOST:
        return
    for node in jinja2.Environment().parse(path.read_text(encoding="utf-8")).find_all((jinja2.nodes.If, jinja2.nodes.CondExpr)):
        assert isinstance(node, jinja2.nodes.If | jinja2.nodes.CondExpr)
        asked = {n.attr for n in node.test.find_all(jinja2.nodes.Getattr)}
        assert "dialect" not in asked or not OF_HOPPER.search(words_of(node)), f"line {node.lineno} asks for the dialect"


def test_what_is_hoppers_stands_in_its_folder() -> None:
    """Others call its macros where the schedule has an architecture, by the architecture's name, and the host's file imports a class by a path of Triton's."""
    called = re.compile(r'schedule\.architecture == "hopper"|schedule\.architecture ~ "/registers\.j2" as registers|\bregisters\.')
    found = {}
    for path in TEMPLATES:
        found[path.relative_to(ROOT / "templates").as_posix()] = set(OF_HOPPER.findall(called.sub("", without_comments(path.read_text(encoding="utf-8")))))
    assert {name for name, words in found.items() if words and not name.startswith("hopper/")} == HOST
    assert found["standalone.py.j2"] == {"hopper"} and "NVMMADistributedLayout" in found["hopper/consumer.j2"]


def test_who_asks_for_the_dialect() -> None:
    """Code that writes, compiles or starts text in it; what a kernel costs and whether it may run is the architecture's."""
    asking = {name for name, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "dialect"}
    assert {name.split(".")[0] for name in asking} == {"codegen", "runtime", "commands"}


# of an operation, of what one takes, a device or the templates' folder: as many as there are of these
UNBOUNDED = {
    "ir.rules.gradients",
    "ir.rules.error",
    "ir.rules.eager",
    "ir.rules.reduction_gradient",
    "ir.reference.torch_function",
    "ir.reference.torch_reduction",
    "ir.recognise._slow",
    "ir.recognise._rows",
    "ir.recognise._near",
    "ir.recognise._far",
    "runtime.native._context",
    "runtime.rendering._of",
}


def test_what_is_kept_of_programs_is_bounded() -> None:
    """A process that is given ever new programs keeps what it made of the last ones."""
    found = set()
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.args.args and any(ast.unparse(d) == "functools.cache" for d in node.decorator_list):
                found.add(f"{module}.{node.name}")
    assert found == UNBOUNDED
