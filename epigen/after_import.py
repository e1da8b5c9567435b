"""What is done once a package of somebody else is imported, be it before epigen or after, or never.

`import epigen` imports no torch, which takes seconds, and yet torch is to know epigen's operations as soon as both are there: a program that torch.export saved
names them, and is loaded by torch alone. Of torch's own ways an entry point of the group "torch.backends" would run in every process that imports torch,
those without epigen too, takes an import of torch down with it where it fails, and is not there in a checkout.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], object]) -> None:
    """Run an action when a module has been imported; now, where it has been. At its import an error is a warning, for that is not epigen's."""
    if sys.modules.get(name) is not None:
        action()
        return
    watch = next((f for f in sys.meta_path if isinstance(f, _Watch)), None)
    if watch is None:
        sys.meta_path.insert(0, watch := _Watch())
    watch.actions.setdefault(name, []).append(action)


class _Watch:
    """A finder that finds what the others find, and has its loader run the actions at the end. It does so once; the loader is as it was then."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[], object]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = [f for f in sys.meta_path if f is not self]
        spec = next((candidate for f in others if (candidate := f.find_spec(name, path, target)) is not None), None)
        loader: Any = spec and spec.loader
        if loader is not None and hasattr(loader, "__dict__"):
            execute = loader.exec_module

            def then(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                for action in self.actions.pop(name, []):
                    try:
                        action()
                    except Exception as error:  # noqa: BLE001  # whatever it is, it is not of whom imports the module
                        warnings.warn(f"epigen could not tell {name} of its operations: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)

            loader.exec_module = then
        return spec
