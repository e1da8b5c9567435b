"""Tests in processes of their own, under their own names: what is marked `apart` cannot share a process with the others, since it changes torch or Triton for good.

`@pytest.mark.apart(kind, **environment)`: all tests of one kind share a process, which the first of them starts, with that in its environment: a pytest
that collects the same files, and runs what it is told (served.py). Its reports become this run's, so that these tests are chosen, distributed and told of as all others are.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any

import pytest


class Process:
    """A pytest that runs tests of some files one at a time, as it is told. Triton compiles there. Both ends of the pipes are the tests' own, so pickle reads only what they wrote."""

    def __init__(self, config: pytest.Config, files: list[str], environment: dict[str, str]):
        from epigen import settings

        tell, telling = os.pipe()
        hearing, answer = os.pipe()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # goes with this object
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "served", f"--served={tell},{answer}"]
        command += ["-c", str(config.inipath), "--rootdir", str(config.rootpath), *["--update-golden"] * bool(config.getoption("--update-golden")), *files]
        # a cache of its own; and its conftest decides anew who is watched
        inherited = {
            n: v for n, v in settings.child_environment(interpret=False).items() if n not in ("EPIGEN_CACHE", "EPIGEN_TESTS_NOTES") and "XDIST" not in n
        }
        own = inherited | {"TORCHINDUCTOR_CACHE_DIR": os.environ["EPIGEN_TESTS_INDUCTOR"]} | environment
        self.process = subprocess.Popen(
            command, cwd=config.rootpath, env=own, pass_fds=(tell, answer), stdin=subprocess.DEVNULL, stdout=self.said, stderr=self.said
        )
        os.close(tell)
        os.close(answer)
        self._tell, self._hear = os.fdopen(telling, "wb"), os.fdopen(hearing, "rb")

    def run(self, nodeid: str) -> list[dict[str, Any]] | None:
        """The test's reports; None where the process has ended instead."""
        try:
            pickle.dump(nodeid, self._tell)
            self._tell.flush()
            found: list[dict[str, Any]] = pickle.load(self._hear)
        except (BrokenPipeError, EOFError):
            return None
        return found

    def last_words(self) -> str:
        status = self.process.wait()
        self.said.seek(0)
        return f"the process of this test ended with status {status}\n{self.said.read().decode(errors='replace')[-20_000:]}"

    def close(self) -> None:
        """It ends by itself when nothing more can come."""
        with contextlib.suppress(BrokenPipeError):
            self._tell.close()
        self._hear.close()
        self.process.wait()
        self.said.close()


class Apart:
    """The processes of one run, by kind."""

    def __init__(self) -> None:
        self._processes: dict[str, Process] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        mark = item.get_closest_marker("apart")
        if mark is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, *mark.args, **mark.kwargs):
            item.ihook.pytest_runtest_logreport(report=report)
        # what the test before left set up for this one, its folder among it, the next one may not share
        torn = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
        if torn.excinfo is not None:
            item.ihook.pytest_runtest_logreport(report=item.ihook.pytest_runtest_makereport(item=item, call=torn))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item, kind: str, **environment: str) -> list[pytest.TestReport]:
        process = self._processes.get(kind)
        if process is None:
            of_kind = [i for i in item.session.items if (m := i.get_closest_marker("apart")) is not None and m.args == (kind,)]
            process = self._processes[kind] = Process(item.config, sorted({str(i.path) for i in of_kind}), environment)
        try:
            found = process.run(item.nodeid)
            words = "" if found is not None else process.last_words()
        except pytest.fail.Exception as error:  # its time is over
            found, words = None, str(error)
            process.process.kill()
        if found is None:
            self._processes.pop(kind).close()
            return [pytest.TestReport(item.nodeid, item.location, dict(item.keywords), "failed", words, "call")]
        return [item.config.hook.pytest_report_from_serializable(config=item.config, data=data) for data in found]

    def pytest_sessionfinish(self) -> None:
        for process in self._processes.values():
            process.close()
