"""The tests run alike whatever they are started from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ASKED = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_ctrl_c_reaches_the_tests_of_a_background_job_and_what_they_start() -> None:
    script = f"import subprocess, sys, conftest; {_ASKED}; sys.stdout.flush(); subprocess.run([sys.executable, '-c', {_ASKED!r}], check=True)"

    def ran(script: str) -> list[str]:
        command = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, script]
        return subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout.split()

    assert ran(_ASKED) == ["False"], "else this would show nothing"
    assert ran(script) == ["True", "True"]
