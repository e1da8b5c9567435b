"""Options and fixtures that every test shares."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import apart
import hypothesis
import postgres_server
import pytest
from bounded_interpreter import bound
from checkout import WATCHED
from golden import Golden
from quick_interpreter import quicken

# generated modules of a test run stay out of the user's own cache, and nothing that the user has tuned changes what the tests see; set before
# anything of epigen is imported, in a folder that goes with the process
_FOLDER = tempfile.TemporaryDirectory(prefix="epigen-tests-", ignore_cleanup_errors=True)
os.environ.setdefault("EPIGEN_CACHE", f"{_FOLDER.name}/cache")
os.environ["EPIGEN_DB"] = f"{_FOLDER.name}/db"
Path(os.environ["EPIGEN_DB"]).mkdir()
# what torch's compiler keeps is of one run: the workers' processes of tests that run apart compile its headers once
os.environ.setdefault("EPIGEN_TESTS_INDUCTOR", f"{_FOLDER.name}/inductor")
# tests that are not marked `triton` are watched, and so are the processes that they start, which import what leads their path
_spec = spec_from_file_location("watch", WATCHED / "sitecustomize.py")
assert _spec is not None and _spec.loader is not None
_watch = module_from_spec(_spec)
_spec.loader.exec_module(_watch)
_watch.install()
sys.path.insert(0, str(WATCHED))
os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, (str(WATCHED), os.environ.get("PYTHONPATH")))))
_NOTES = Path(_FOLDER.name) / "notes"
# OpenBLAS's threads do not survive every fork of a process (numpy 2.3.5: a search's solve waited for ever for the lock of threads that were
# gone); as on the command line, linear algebra has one. Set before numpy is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A script's background jobs begin with Ctrl-C ignored, and so does all that they start: the tests of Ctrl-C waited there for ever
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# no test is judged by how fast it is
hypothesis.settings.register_profile("on any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("on any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--served", None):  # else it is such a process itself
        config.pluginmanager.register(apart.Apart(), "apart")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request)


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-golden")


_decided = threading.local()


class _First(MetaPathFinder):
    """Where torch imports Triton before epigen does, as its compiler does, it is imported to interpret as well: tests of this process may want that."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> None:
        chosen = getattr(_decided, "by_epigen", False) or "TRITON_INTERPRET" in os.environ  # as in a process of tests that run apart
        if name == "triton" and not chosen and not _on_a_gpu():
            from epigen import settings

            settings.set_interpreter(True)


sys.meta_path.insert(0, _First())  # before anything is collected, which may import torch's compiler


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> Iterator[None]:
    """Quick and bounded, from when Triton is imported to interpret, which a process decides with the first kernel that it loads."""
    from epigen.runtime import loader

    imported = loader._import_triton

    def changed(interpret: bool) -> Any:
        _decided.by_epigen = True
        try:
            triton = imported(interpret)
        finally:
            _decided.by_epigen = False
        if interpret:
            quicken()
            bound()
        return triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_import_triton", changed)
        yield


def _on_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _NOTES.unlink(missing_ok=True)
    if not item.path.name.startswith("test_"):
        pass  # a case that a test runs in a process of its own: that test has the mark, or not, and is who is told
    elif item.get_closest_marker("triton") or item.get_closest_marker("gpu") or _on_a_gpu():  # where all that computes reaches it
        os.environ.pop(_watch.NOTES, None)
    else:
        os.environ[_watch.NOTES] = str(_NOTES)
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test without the mark is left out where the oldest Triton is tried, and so must not reach Triton."""
    yield
    if _NOTES.exists():
        who = ", ".join(sorted(set(_NOTES.read_text().split())))
        pytest.fail(f"{item.nodeid} reaches Triton, by {who}: it wants the mark @pytest.mark.triton")


@pytest.fixture(autouse=True, scope="session")
def written_is_read() -> Iterator[None]:
    """What any test derives is made without reading the text that it writes: here that is read, and gives the same to the last label."""
    from epigen.ir import program, written

    made = program.graph_of_written

    def compared(program_of: Any, text: str) -> Any:
        graph = made(program_of, text)
        assert repr(graph) == repr(program.read(text))
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "graph_of_written", compared)
        yield


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that are parsed from here on, as in a process that knows none yet."""
    from epigen.ir import program, written
    from epigen.lru_cache import LruCache

    found: list[str] = []
    parse = program.parse
    monkeypatch.setattr(program, "parse", lambda text: (found.append(text), parse(text))[1])
    monkeypatch.setattr(program, "_KNOWN", LruCache(program.MOST_PROGRAMS))
    monkeypatch.setattr(written, "graph_of_written", program.graph_of_written)
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors: several threads wait for each other longer than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that layers which train run, in order."""
    from epigen.training import library

    found: list[str] = []
    compiled = library.kernel

    def noted(text: str, tune: str | None, options: str | None = None) -> Any:
        found.append(text)
        return compiled(text, tune, options)

    monkeypatch.setattr(library, "kernel", noted)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-k golden` chooses all that have golden texts. Tests that need a GPU are skipped, and say why, where torch sees none; torch is asked only if such were chosen.
    Those that take turns for its memory come first, into the hands of one worker, while the others run the rest: left to the end, all would wait for each other."""
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.extra_keyword_matches.add("golden")
    chosen = [item for item in items if item.get_closest_marker("gpu")]
    if not chosen or config.option.markexpr == "not gpu":
        return
    items.sort(key=lambda item: "room" not in getattr(item, "fixturenames", ()))
    import torch

    if not torch.cuda.is_available():
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason="no GPU at hand"))


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL server, one a worker of pytest."""
    try:
        with postgres_server.server() as url:
            yield url
    except postgres_server.NoServerError as error:
        pytest.skip(str(error))
