"""Triton's digest of itself, remembered from one process to the next.

It is a part of the name of everything in Triton's cache, so that each process computes it before its first launch, from all of Triton's
sources and a library of 400 MB: 0.3 s, and with the kernel already in the cache most of what a first call takes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from epigen.runtime.user_cache import UserCache

_HASHED = ("compiler", "backends", "language", "runtime", "_C")
"""Where in Triton's folder lie the files that its digest depends on."""


def remember(triton: Any, store: UserCache) -> None:
    """Have this process ask for the digest before it computes it. Triton's workers are handed it in the same way (3.9's compile pool)."""
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    info = getattr(compute, "cache_info", None)
    if compute is None or info is None or info().currsize:  # another Triton, or it knows the digest already
        return
    cache.triton_key = functools.cache(lambda: digest(compute, Path(triton.__file__).parent, str(triton.__version__), store))


def digest(compute: Callable[[], str], folder: Path, version: str, store: UserCache) -> str:
    """compute's answer, from the store where no file has changed since it was put there. folder: Triton's."""
    try:
        name = f"triton_{marks(folder, version)}.txt"
    except OSError:  # its files lie elsewhere than in the known versions
        return compute()
    stored = store.read(name)
    # what it says decides only which files of Triton's cache are looked for
    if stored is not None and re.fullmatch(rf"{re.escape(version)}[0-9a-f]{{64}}(-[0-9a-f]{{64}})*", stored):
        return stored
    made = compute()
    store.write(name, made)
    return made


def marks(folder: Path, version: str) -> str:
    """Changes whenever one of the files does: each one's place, size, number and times of change, of which the last cannot be set at will."""
    held = hashlib.sha256(f"{version}\0{folder}".encode())
    for path, status in sorted(_files(folder)):
        held.update(f"\0{path}\0{status.st_size}\0{status.st_ino}\0{status.st_mtime_ns}\0{status.st_ctime_ns}".encode())
    return held.hexdigest()[:32]


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    pending = [str(folder / name) for name in _HASHED]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.name.endswith((".py", ".so", ".pyd")):
                    yield entry.path, entry.stat()
