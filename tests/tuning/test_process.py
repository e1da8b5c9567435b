"""Worker processes start whatever the process that starts them lacks: a folder, standard streams, an import path, a file of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import TESTS
from golden import Golden

from epigen import settings
from epigen.errors import TuneError
from epigen.tuning import process
from epigen.tuning.process import Failed, ForkServer, Worker

CHILD = TESTS / "support" / "tuning_child.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("{python} {child} {result} <&- >&- 2>&-", "no standard streams"),
        ("{python} {child} {result} gone", "a folder that is gone"),
        ("{python} {child} {result} locked", "a folder that may not be read"),
        ("{python} {child} {result} thread", "from a thread"),
        ("{python} - {result} < {child}", "from standard input: __main__ has no file"),
        ("{python} -i {child} {result} < /dev/null", "interactive"),
    ],
    ids=lambda text: text if "{" not in text else "",
)
def test_workers_start(tmp_path: Path, command: str, how: str) -> None:
    result = tmp_path / "result"
    environment = settings.child_environment(interpret=False)
    shell = command.format(python=sys.executable, child=CHILD, result=result)
    done = subprocess.run(["sh", "-c", shell], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert result.exists(), f"{how}: {done.stderr[-2000:]}"
    assert result.read_text() == "ok ok ok"


def test_workers_that_never_begin_are_given_up_with_their_last_words(golden: Golden) -> None:
    """A module that cannot be imported would otherwise be every config's crash, which a study remembers."""
    fork_server = ForkServer("no_such_module_of_anybody")
    worker = Worker(fork_server, "faulty_timing_worker")
    try:
        for _ in range(process._STARTS):
            worker.submit(1)
            assert isinstance(worker.answer(300.0), Failed)
            assert fork_server.process is not None
            fork_server.process.wait(300)
        with golden.raises(TuneError):
            worker.submit(1)
    finally:
        fork_server.stop()


@pytest.mark.parametrize(
    ("setup", "job", "said"),
    [(1, "a", "TypeError: can only concatenate str"), (None, 1, "FileNotFoundError: [Errno 2] No such file or directory: '/opt/triton/cuobjdump'")],
)
def test_what_surprises_a_worker_is_told(setup: Any, job: Any, said: str) -> None:
    """It ends the process, which has lost what it was about; the next job has a new one. Else a status was all that anybody heard."""
    fork_server = ForkServer("raising_worker")
    worker = Worker(fork_server, "raising_worker")
    try:
        worker.begin(setup)
        worker.submit(job)
        answer = worker.answer(300.0)
        assert isinstance(answer, Failed) and answer.kind == "crashed" and answer.detail.startswith(f"the worker failed with {said}")
        worker.begin(40)
        worker.submit(2)
        assert worker.answer(300.0) == 42
    finally:
        fork_server.stop()


def test_a_python_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, said in (("/nowhere/python", "cannot be started with /nowhere/python: No such file or directory"), ("", "does not know where it is")):
        monkeypatch.setattr(sys, "executable", value)
        fork_server = ForkServer()
        with pytest.raises(TuneError, match=said):
            fork_server.start()
        assert fork_server.control is None and fork_server.process is None and fork_server.said is None
