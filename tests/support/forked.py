"""Scripts run as by a new interpreter, but for torch, whose import takes longer than most of them: each by a fork of one process that has done no more than that."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


def python(*arguments: str | Path, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """arguments: as of an interpreter, -W options and then -c with a text or a file, with its own arguments."""
    return _parent().run([str(a) for a in arguments], cwd, env)


@functools.cache
def _parent() -> Parent:
    return Parent()


class Parent:
    """The process that forks. It ends when this one does, which closes its input."""

    def __init__(self) -> None:
        from epigen import settings

        command = [sys.executable, "-c", "import forked; forked.serve()"]
        self.process = subprocess.Popen(command, env=settings.child_environment(interpret=False), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, arguments: list[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        told, heard = self.process.stdin, self.process.stdout
        assert told is not None and heard is not None
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            pickle.dump((arguments, str(cwd), dict(env), out.name, err.name), told)
            told.flush()
            status: int = pickle.load(heard)
            return subprocess.CompletedProcess(arguments, status, out.read().decode(), err.read().decode())


# -- in that process


def serve() -> None:
    import torch  # noqa: F401

    # what an interpreter finds by itself; the rest is for this process alone
    sys.path[:] = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    told, heard = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    while told.peek(1):  # type: ignore[attr-defined]
        request = pickle.load(told)
        if (child := os.fork()) == 0:
            _run(told, heard, *request)
        pickle.dump(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), heard)
        heard.flush()


def _run(told: BinaryIO, heard: BinaryIO, arguments: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    """Never returns."""
    import atexit
    import traceback
    import warnings

    status = 1
    try:
        told.close()
        heard.close()
        for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_RDWR), descriptor)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        watched = os.environ.get("EPIGEN_TESTS_NOTES") and sys.modules.get("sitecustomize")
        if watched:
            watched.install()
        options: list[str] = []
        while arguments[0] == "-W":
            options.append(arguments[1])
            arguments = arguments[2:]
        warnings._processoptions(options)  # type: ignore[attr-defined]
        sys.path[:0] = [*([] if env.get("PYTHONSAFEPATH") else [""]), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        status = _status(arguments)
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001  # as an interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(arguments: list[str]) -> int:
    import runpy

    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            main: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
            vars(sys.modules["__main__"]).clear()
            vars(sys.modules["__main__"]).update(main)
            exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return 1 if isinstance(ended.code, str) else int(ended.code or 0)
    return 0
