"""What is done once somebody else's module is imported: when, how often, and that the import is none the worse for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from epigen.after_import import _Watch, after_import

NAME = "epigen_tests_watched_module"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that nobody has imported, and the import system as it was."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _Watch)])
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    yield path
    sys.modules.pop(NAME, None)


def test_it_is_done_at_the_end_of_the_import_and_once() -> None:
    done: list[int] = []
    after_import(NAME, lambda: done.append(sys.modules[NAME].value))
    after_import(NAME, lambda: done.append(2))
    assert importlib.util.find_spec(NAME) is not None and not done, "to look for it is not to import it"
    found = importlib.import_module(NAME)
    assert done == [1, 2]
    assert "exec_module" not in vars(found.__loader__) and found.__spec__ is not None and found.__spec__.loader is found.__loader__
    importlib.reload(found)
    assert done == [1, 2]
    after_import(NAME, lambda: done.append(3))
    assert done == [1, 2, 3], "at once, where it is there"


def test_an_import_that_fails_is_made_again(module: Path) -> None:
    done: list[int] = []
    module.write_text("raise ImportError('not today')\n")
    after_import(NAME, lambda: done.append(1))
    with pytest.raises(ImportError, match="not today"):
        importlib.import_module(NAME)
    assert not done and NAME not in sys.modules
    module.write_text("value = 1  # and another size\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert done == [1]


def test_what_goes_wrong_is_said_and_the_import_goes_on() -> None:
    def wrong() -> None:
        raise AttributeError("no such operation")

    after_import(NAME, wrong)
    with pytest.warns(RuntimeWarning, match=f"{NAME} .*AttributeError"):
        assert importlib.import_module(NAME).value == 1


def test_a_module_that_is_not_there_is_not_found() -> None:
    after_import("epigen_tests_no_such_module", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("epigen_tests_no_such_module")
    assert importlib.util.find_spec("epigen_tests_no_such_module") is None
