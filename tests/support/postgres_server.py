"""A PostgreSQL server of the tests' own: on the loopback interface, on a free port, with its data in a folder that goes with it."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_START_S = 250.0
"""What a start never takes that does not hang: on a slow machine, too, the tests that want a server are not left out."""


class NoServerError(Exception):
    """Why there is none."""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A running server's URL for SQLAlchemy. Raises NoServerError where PostgreSQL is not installed or does not start."""
    binaries = _binaries()
    user = _user()
    folder = Path(tempfile.mkdtemp(prefix="epigen-postgres-"))
    try:
        password = secrets.token_hex(8)
        (folder / "password").write_text(password)
        if user is not None:
            for path in (folder, folder / "password"):
                os.chown(path, user.pw_uid, user.pw_gid)
        create = [
            "-D",
            str(folder / "data"),
            "-U",
            "epigen",
            "-A",
            "scram-sha-256",
            "--pwfile",
            str(folder / "password"),
            "--no-sync",
            "--no-locale",
            "-E",
            "UTF8",
        ]
        _checked(_start([str(binaries / "initdb"), *create], user, folder / "initdb.log"), folder / "initdb.log")
        port = _free_port()
        options = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "max_connections=40"]
        command = [str(binaries / "postgres"), "-D", str(folder / "data"), *(part for o in options for part in ("-c", o))]
        process = _start(command, user, folder / "server.log")
        try:
            _await(process, port, folder / "server.log")
            yield f"postgresql+psycopg://epigen:{password}@127.0.0.1:{port}/postgres"
        finally:
            process.terminate()  # "smart": no new sessions
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path:
    """Debian keeps them out of PATH, a folder a version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]))
    if found:
        return found[-1].parent
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    raise NoServerError("PostgreSQL's initdb is neither on PATH nor under /usr/lib/postgresql (Debian's package: postgresql)")


def _user() -> pwd.struct_passwd | None:
    """Whom the server runs as: it refuses root."""
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise NoServerError("PostgreSQL does not run as root, and there is neither a user 'postgres' nor 'nobody'")


def _start(command: list[str], user: pwd.struct_passwd | None, log: Path) -> subprocess.Popen[bytes]:
    as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user is not None else {}
    try:
        with log.open("wb") as into:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=into, stderr=subprocess.STDOUT, cwd="/", **as_user)
    except OSError as error:
        raise NoServerError(f"{command[0]} does not start: {error}") from error


def _checked(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait(_START_S):
        raise NoServerError(f"initdb failed: {log.read_text(errors='replace')[-500:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        if "ready to accept connections" in log.read_text(errors="replace"):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
        time.sleep(0.02)
    raise NoServerError(f"postgres does not start: {log.read_text(errors='replace')[-500:]}")
