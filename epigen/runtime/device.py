"""A machine's GPUs, as targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from epigen import settings
from epigen.errors import TargetError
from epigen.gpus import TARGETS, Target, target_by_name

by_name = target_by_name
"""As it was called when it stood here: programs of users import it."""


class Machine:
    """The GPUs that this process sees. What asks which are at hand is given a machine: this one by default, and in tests one that is made up."""

    def indices(self) -> tuple[int, ...]:
        """The GPUs of this machine, the current one first; none without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return ()
        current = torch.cuda.current_device()
        return (current, *(i for i in range(torch.cuda.device_count()) if i != current))

    def properties(self, index: int) -> Any:
        """What torch's driver says of a GPU."""
        import torch

        return torch.cuda.get_device_properties(index)

    def likely(self, nodes: Path = Path("/dev")) -> int:
        """How many GPUs this process will see, by the drivers' device nodes: a guess, in no time and without torch."""
        there = sum(node.name.removeprefix("nvidia").isdigit() for node in nodes.glob("nvidia*")) or int((nodes / "dxg").exists() or (nodes / "kfd").exists())
        return min(there, settings.visible_gpus(there))

    def at_hand(self, index: int | None = None) -> Target | None:
        """The target of a GPU of this machine, the current one by default, with its own multiprocessor count; None without a GPU.

        An architecture that is not in the table is taken as its nearest older kin.
        """
        import torch

        if not torch.cuda.is_available():
            return None
        properties = self.properties(torch.cuda.current_device() if index is None else index)
        if torch.version.hip:
            name = properties.gcnArchName.split(":")[0]
            known = TARGETS.get(name) or replace(TARGETS["gfx942" if name.startswith("gfx9") else "gfx1100"], name=name, arch=name)
        else:
            arch = properties.major * 10 + properties.minor
            kin = max((t for t in TARGETS.values() if t.backend == "cuda" and int(t.arch) <= arch), key=lambda t: int(t.arch), default=None)
            if kin is None:
                raise TargetError(f"{properties.name} (sm_{arch}) is older than sm_80, the oldest supported")
            known = replace(kin, name=f"sm_{arch}", arch=arch, shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", kin.shared_bytes)))
        return replace(known, multiprocessors=properties.multi_processor_count, part=properties.name)

    def of(self, place: Any) -> Target | None:
        """The target of a torch.device; None of the CPU, where nothing is known of how long anything takes."""
        return self.at_hand(place.index) if place.type == "cuda" else None


THIS_MACHINE = Machine()
