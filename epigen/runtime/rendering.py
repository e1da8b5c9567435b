"""The renderer of a process."""

from __future__ import annotations

import functools
from pathlib import Path

from epigen import settings
from epigen.codegen.render import Renderer
from epigen.runtime.user_cache import UserCache


def renderer() -> Renderer:
    """The one renderer of the templates' folder; what it compiles of them is kept in the cache folder."""
    return _of(settings.templates_dir(), settings.cache_dir())


@functools.cache
def _of(templates: Path, cache: Path | None) -> Renderer:
    return Renderer(templates, UserCache(cache))
