"""The only reader of the environment: where templates, databases and the cache lie.

EPIGEN_CACHE  folder for generated modules and the trials of searches (default: the platform's cache folder, per user)
EPIGEN_DB     the user's tuning database, a folder or one .json file (default: the platform's data folder, per user)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from epigen.errors import DatabaseError

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    """A data folder: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def templates_dir() -> Path:
    return _shipped("templates")


def seed_database_dir() -> Path:
    """The shipped, read-only tuning databases."""
    return _shipped("tuning_db")


def user_database_dir() -> Path:
    """The user's own tuning databases, which tuning writes to; a folder, or one file where EPIGEN_DB names a .json file.

    Raises DatabaseError where there is no such place: without a home folder, or for that of a user whom nobody knows.
    """
    try:
        return _place("EPIGEN_DB", "XDG_DATA_HOME", ".local/share", "Application Support")
    except LookupError as error:
        raise DatabaseError(f"{error.args[0]}: set EPIGEN_DB to a folder or a .json file") from None


def cache_dir() -> Path | None:
    """Folder for what can be made anew, private to the user: generated modules, and the trials of searches. None where there is no such place."""
    try:
        return _place("EPIGEN_CACHE", "XDG_CACHE_HOME", ".cache", "Caches")
    except LookupError:
        return None


def _place(variable: str, base: str, below_home: str, on_a_mac: str) -> Path:
    """What a variable names, or else the platform's own folder for such things. Raises LookupError, in words."""
    if chosen := os.environ.get(variable):
        try:
            return Path(chosen).expanduser().absolute()  # relative to the folder that is the current one now
        except RuntimeError:
            raise LookupError(f"{variable} is {chosen!r}, and there is no such home folder") from None
        except OSError as error:
            raise LookupError(f"{variable} is {chosen!r}, and the current folder cannot be found: {error.strerror}") from None
    given = Path(os.environ.get(base, ""))  # a relative one has no meaning there
    if given.is_absolute() and sys.platform != "darwin":
        return given / "epigen"
    try:
        home = Path.home()
    except RuntimeError:
        raise LookupError("this user has no home folder") from None
    if not home.is_absolute():
        raise LookupError(f"this user's home folder, {str(home)!r}, is no absolute path")
    return home / ("Library/" + on_a_mac if sys.platform == "darwin" else below_home) / "epigen"


def studies_dir() -> Path | None:
    """Folder for the trials of searches, from which a second search of the same problem goes on. None where there is no place for it."""
    cache = cache_dir()
    return None if cache is None else cache / "studies"


def triton_cache_chosen() -> bool:
    """Whether the user has said where Triton keeps what it compiles."""
    return bool(os.environ.get("TRITON_CACHE_DIR") or os.environ.get("TRITON_HOME"))


def set_triton_cache(folder: Path) -> None:
    """Choose that place for this process and its children."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def visible_gpus(there: int) -> int:
    """How many of a machine's GPUs CUDA_VISIBLE_DEVICES names; all, where it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if named is None else len([name for name in named.split(",") if name])


def set_interpreter(on: bool) -> None:
    """Choose Triton's mode for this process; it counts only before Triton is first imported."""
    os.environ["TRITON_INTERPRET"] = "1" if on else "0"


_ALGEBRA = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def one_thread() -> None:
    """Keep this process's linear algebra to one thread, where the user has not said otherwise; it counts only before numpy and torch are
    imported. A search's matrices are small, and idle threads that spin take the processors from the workers."""
    for name in _ALGEBRA:
        os.environ.setdefault(name, "1")


def import_path() -> list[str]:
    """Where this process's children find modules: where it does itself, but for the current folder, in which anything may lie.

    epigen's own place stays, as the last, even where the user stands in it.
    """
    try:
        here = str(Path.cwd())
    except OSError:  # it is gone, and so is all that was in it
        here = ""
    known = [p for p in sys.path if Path(p).is_absolute() and os.path.realpath(p) != here]
    own = str(_PACKAGE.parent)
    # a name with the separator in it would be taken for two, the second one below the current folder
    return [p for p in (*known, *([] if own in known else [own])) if os.pathsep not in p]


def child_environment(interpret: bool) -> dict[str, str]:
    """The environment of a worker with Triton in one of its modes, this process's import path, and one thread for linear algebra."""
    mode = {"TRITON_INTERPRET": "1" if interpret else "0"}
    return os.environ | mode | {"PYTHONPATH": os.pathsep.join(import_path()), "PYTHONSAFEPATH": "1"} | dict.fromkeys(_ALGEBRA, "1")
