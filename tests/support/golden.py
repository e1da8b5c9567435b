"""What epigen says, pinned once: a golden file for each file of tests, in it a section for each text.

A test asserts of what class an error is, and its data. Its sentences stand in tests/golden/messages, where a change of wording is one difference to read.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checkout
import pytest

FOLDER = checkout.GOLDEN / "messages"
_HEAD = "## "


def sections(path: Path) -> dict[str, str]:
    """The texts of a file by their names."""
    whole = f"\n{path.read_text(encoding='utf-8')}" if path.exists() else ""
    parts = (part.partition("\n") for part in whole.split(f"\n{_HEAD}")[1:])
    return {name: text.rstrip("\n") for name, _, text in parts}


class Golden:
    """The texts of one test: each has the test's name, and one of its own where there are several."""

    def __init__(self, request: pytest.FixtureRequest):
        self.update = bool(request.config.getoption("--update-golden"))
        self.file = request.path.relative_to(checkout.TESTS)
        self.path = FOLDER / self.file.with_suffix(".txt")
        self.test = request.node.originalname
        self._folder = str(request.getfixturevalue("tmp_path")) if "tmp_path" in request.fixturenames else None

    def __call__(self, said: object, name: str = "") -> None:
        """The text is that of the golden file, but for what differs from run to run, and for what torch has to say."""
        text = str(said) if self._folder is None else str(said).replace(self._folder, "...")
        text = re.sub(r"\(line \d+ of", "(line N of", re.sub(r" at 0x[0-9a-f]+", " at 0x...", re.sub(r"RuntimeError: .*", "RuntimeError: ...", text)))
        text = "\n".join(line.rstrip() for line in text.rstrip().split("\n"))
        key = f"{self.test}: {name}" if name else self.test
        if self.update:
            self._write(key, text)
        assert text == sections(self.path).get(key), f"pytest tests/{self.file} --update-golden writes it anew"

    @contextmanager
    def raises(self, kind: type[BaseException], name: str = "") -> Iterator[pytest.ExceptionInfo[BaseException]]:
        """As pytest.raises, and what the error says is golden."""
        with pytest.raises(kind) as caught:
            yield caught
        self(caught.value, name)

    def _write(self, key: str, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # several workers
            texts = sections(self.path) | {key: text}
            file.truncate(0)
            file.write("\n".join(f"{_HEAD}{name}\n{texts[name]}\n" for name in sorted(texts)))
